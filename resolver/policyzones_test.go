package resolver_test

import (
	"fmt"
	"io"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

func policyZone(t *testing.T, name, text string) resolver.PolicyZone {
	t.Helper()
	n, err := resolver.ParseName(name)
	if err != nil {
		t.Fatal(err)
	}
	return resolver.PolicyZone{Name: n, File: name, Open: func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(text)), nil }}
}

// TestPolicyZones: what zones say of questions, aliases, addresses and servers, through a whole resolver, and
// that an answer that was changed is never authentic.
func TestPolicyZones(t *testing.T) {
	const first = `$TTL 60
@ SOA ns. host. 1 2 3 4 30
www.a8.example CNAME .
www.a10.example CNAME rpz-passthru.
www.a14.example CNAME www.z.example.
www.plain.example A 192.0.2.77
www.bad.example A 192.0.2.78
gone.plain.example A 192.0.2.79
tcp.z.example CNAME rpz-tcp-only.
txt.z.example CNAME rpz-drop.
*.wc.z.example CNAME *.garden.n3.example.
32.4.100.51.198.rpz-ip CNAME *.
ns1.n3.example.rpz-nsdname CNAME .
32.4.7.53.127.rpz-nsip TXT "by the server"
`
	const second = `$TTL 60
www.a8.example A 192.0.2.1
www.a10.example CNAME .
`
	synctest.Test(t, func(t *testing.T) {
		l := newCaseLab(t, time.Now(), func(o *resolver.Options) {
			o.PolicyZones = []resolver.PolicyZone{policyZone(t, "first.", first), policyZone(t, "second.", second)}
		})
		defer l.stop()
		z, _ := l.sim.Zone("z.example.")
		z.Records += "\nlost CNAME gone.plain.example.\ntcp A 198.51.100.9\ntwice CNAME once\nonce CNAME www.plain.example.\n"
		if err := l.sim.Replace(z); err != nil {
			t.Fatal(err)
		}
		for _, again := range []string{"", " from the cache"} {
			for ask, want := range map[string]string{
				"www.z.example. A":      "NOERROR | www.z.example. A 198.51.100.1 AD",
				"www.a8.example. A":     "NXDOMAIN EDE 15",
				"www.a8.example. AAAA":  "NXDOMAIN EDE 15",
				"www.a10.example. A":    "NOERROR | www.a10.example. A 198.51.100.1 AD",
				"www.a14.example. A":    "NOERROR | www.a14.example. CNAME www.z.example. | www.z.example. A 198.51.100.1",
				"www.plain.example. A":  "NOERROR | www.plain.example. A 192.0.2.77",
				"www.plain.example. MX": "NOERROR",
				"toplain.z.example. A":  "NOERROR | toplain.z.example. CNAME www.plain.example. | www.plain.example. A 192.0.2.77",
				"twice.z.example. A":    "NOERROR | once.z.example. CNAME www.plain.example. | twice.z.example. CNAME once.z.example. | www.plain.example. A 192.0.2.77",
				"lost.z.example. A":     "NOERROR | gone.plain.example. A 192.0.2.79 | lost.z.example. CNAME gone.plain.example.",
				"www.bad.example. A":    "NOERROR | www.bad.example. A 192.0.2.78",    // bogus, and asked for by its name
				"txt.bad.example. TXT":  "SERVFAIL EDE 6",                             // bogus, which no rule changes
				"tcp.z.example. A":      "NOERROR | tcp.z.example. A 198.51.100.9 AD", // asked again over TCP
				"x.wc.z.example. A":     "NXDOMAIN | x.wc.z.example. CNAME x.wc.z.example.garden.n3.example.",
				"txt.z.example. TXT":    "nothing",
				"www.kid.z.example. A":  "NOERROR EDE 15", // the address of the answer
				"www.n3.example. A":     "NXDOMAIN EDE 15",
				"www.kid.opt. TXT":      `NOERROR | www.kid.opt. TXT "by the server"`,
			} {
				w := strings.Fields(ask)
				m := new(dns.Msg).SetQuestion(w[0], dns.StringToType[w[1]])
				m.SetEdns0(1232, false)
				m.AuthenticatedData = true
				r, err := l.exchangeFor("udp", m, 6*time.Second)
				if err == nil && r.Truncated {
					if len(r.Answer) > 0 {
						t.Errorf("%s%s: truncated with records", ask, again)
					}
					r, err = l.exchangeFor("tcp", m, 6*time.Second)
				}
				got := "nothing"
				if err == nil {
					got = text(r)
					if r.AuthenticatedData {
						got += " AD"
					}
					if code := extended(r); code >= 0 && strings.Contains(want, "EDE") {
						got += fmt.Sprintf(" EDE %d", code)
					}
				}
				if got != want {
					t.Errorf("%s%s:\n got %s\nwant %s", ask, again, got, want)
				}
			}
		}
	})
	t.Run("the client's address", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			l := newCaseLab(t, time.Now(), func(o *resolver.Options) {
				o.PolicyZones = []resolver.PolicyZone{policyZone(t, "rpz.", "8.0.0.0.10.rpz-client-ip CNAME *.\n")}
			})
			defer l.stop()
			l.want("www.z.example.", dns.TypeA, "NOERROR")
			if n := l.sim.Count(func(e siminternet.LogEntry) bool { return true }); n != 0 {
				t.Errorf("%d queries were sent for a client that gets nothing", n)
			}
		})
	})
	for file, want := range map[string]string{"a CNAME .\n": "", "a A 1.2.3\n": "policy zone rpz.: "} {
		if err := resolver.CheckPolicyZone(policyZone(t, "rpz.", file)); (err == nil) != (want == "") || err != nil && !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: %v", file, err)
		}
	}
}

// What a rule gives in the place of an answer is of the type that the client asked for, also where AAAA records were being
// made of A records; and where a rule leads to another name, that one's AAAA records come first.
func TestPolicyZonesAndDNS64(t *testing.T) {
	const zone = `$TTL 60
32.50.100.51.198.rpz-ip CNAME both.z.example.
32.51.100.51.198.rpz-ip A 192.0.2.90
32.51.100.51.198.rpz-ip AAAA 2001:db8::90
32.52.100.51.198.rpz-ip A 192.0.2.91
32.53.100.51.198.rpz-ip CNAME only4.z.example.
`
	synctest.Test(t, func(t *testing.T) {
		l := newCaseLab(t, time.Now(), func(o *resolver.Options) {
			o.DNS64 = netip.MustParsePrefix("64:ff9b::/96")
			o.PolicyZones = []resolver.PolicyZone{policyZone(t, "rpz.", zone)}
		})
		defer l.stop()
		z, _ := l.sim.Zone("z.example.")
		z.Records += "\nr50 A 198.51.100.50\nr51 A 198.51.100.51\nr52 A 198.51.100.52\nr53 A 198.51.100.53\nboth A 198.51.100.9\nboth AAAA 2001:db8::9\nonly4 A 198.51.100.10\n"
		if err := l.sim.Replace(z); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			l.want("only4.z.example.", dns.TypeAAAA, "NOERROR | only4.z.example. AAAA 64:ff9b::c633:640a")
			l.want("r50.z.example.", dns.TypeAAAA, "NOERROR | both.z.example. AAAA 2001:db8::9 | r50.z.example. CNAME both.z.example.")
			l.want("r51.z.example.", dns.TypeAAAA, "NOERROR | r51.z.example. AAAA 2001:db8::90")
			l.want("r51.z.example.", dns.TypeA, "NOERROR | r51.z.example. A 192.0.2.90")
			l.want("r52.z.example.", dns.TypeAAAA, "NOERROR")
			l.want("r53.z.example.", dns.TypeAAAA, "NOERROR | only4.z.example. AAAA 64:ff9b::c633:640a | r53.z.example. CNAME only4.z.example.")
		}
	})
}

// Policy zones are replaced while serving: answers that are cached follow at once, and zones that cannot be read leave
// those before in force.
func TestSetPolicyZones(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newCaseLab(t, time.Now(), nil)
		defer l.stop()
		const blocked = "NXDOMAIN"
		is := func(want string) {
			t.Helper()
			for range 3 {
				if got := text(l.must("www.plain.example.", dns.TypeA)); !strings.HasPrefix(got, want) {
					t.Errorf("%s, want %s", got, want)
				}
			}
		}
		first := text(l.must("www.plain.example.", dns.TypeA))
		if !strings.HasPrefix(first, "NOERROR") {
			t.Fatal(first)
		}
		is(first)
		zone := policyZone(t, "rpz.", "www.plain.example CNAME .\n")
		if err := l.r.SetPolicyZones([]resolver.PolicyZone{zone}); err != nil {
			t.Fatal(err)
		}
		is(blocked)
		for _, bad := range []resolver.PolicyZone{
			policyZone(t, "rpz.", "www.plain.example CNAME\n"),
			{Name: zone.Name, File: "gone.rpz", Open: func() (io.ReadCloser, error) { return nil, fmt.Errorf("no such file") }},
		} {
			if err := l.r.SetPolicyZones([]resolver.PolicyZone{bad}); err == nil || !strings.Contains(err.Error(), "rpz.") {
				t.Errorf("a broken zone: %v", err)
			}
			is(blocked)
		}
		if err := l.r.SetPolicyZones([]resolver.PolicyZone{policyZone(t, "rpz.", "other.example CNAME .\n")}); err != nil {
			t.Fatal(err)
		}
		is(first)
		if err := l.r.SetPolicyZones(nil); err != nil {
			t.Fatal(err)
		}
		is(first)
	})
}
