package resolver_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// Zones in which everything that a proof can say is there to be said. All but the root are on one server each.
func denialZones() []siminternet.Zone {
	at := func(n int) []netip.Addr { return []netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, byte(n)})} }
	records := `
www A 192.0.2.80
www MX 10 www
ent.deep.below A 192.0.2.81
*.wild A 192.0.2.82
www.wild TXT "closer than the wildcard"
*.alias CNAME www
*.cross CNAME target.plain.
zz A 192.0.2.83
dname DNAME www.wild
`
	zone := func(name string, n int, p *siminternet.NSEC3) siminternet.Zone {
		return siminternet.Zone{Name: name, Servers: at(n), Algorithm: 13, NSEC3: p, Records: records}
	}
	return []siminternet.Zone{
		{Name: ".", Servers: at(1), Algorithm: 13},
		zone("nsec.", 2, nil),
		zone("nsec3.", 3, &siminternet.NSEC3{}),
		zone("salted.", 4, &siminternet.NSEC3{Iterations: 5, Salt: "abcd"}),
		zone("optout.", 5, &siminternet.NSEC3{OptOut: true}),
		{Name: "plain.", Servers: at(6), Records: "target A 192.0.2.90\n"},
		zone("signed.nsec.", 7, nil),
		{Name: "unsigned.nsec.", Servers: at(8), Records: "www A 192.0.2.91\n"},
		zone("signed.nsec3.", 9, nil),
		{Name: "unsigned.nsec3.", Servers: at(10), Records: "www A 192.0.2.91\n"},
		{Name: "unsigned.optout.", Servers: at(11), Records: "www A 192.0.2.91\n"},
	}
}

func denialLab(t *testing.T, edit func(*resolver.Options)) *lab {
	t.Helper()
	sim, err := siminternet.New(clock.Wall(), denialZones()...)
	if err != nil {
		t.Fatal(err)
	}
	return newLabIn(t, sim, edit)
}

func aggressive(o *resolver.Options) { o.Cache.Aggressive = true }

func withDO(m *dns.Msg) { m.IsEdns0().SetDo() }

// Names that do not exist, asked for at random, cost the servers of a signed zone as many queries as the zone has
// gaps, and not one for each name. Without aggressive use, or with opt-out, they cost one each.
func TestRandomSubdomains(t *testing.T) {
	const names = 250
	for _, c := range []struct {
		zone       string
		aggressive bool
		most       int
	}{
		{"nsec.", true, 40}, {"nsec3.", true, 40}, {"salted.", true, 40},
		{"nsec.", false, -1}, {"optout.", true, -1},
	} {
		synctest.Test(t, func(t *testing.T) {
			l := denialLab(t, func(o *resolver.Options) { o.Cache.Aggressive = c.aggressive })
			defer l.stop()
			r := rand.New(rand.NewPCG(1, 1))
			for i := range names {
				name := fmt.Sprintf("%x.%s", r.Uint64(), c.zone)
				m, err := l.ask(name, dns.TypeA, withDO)
				if err != nil || m.Rcode != dns.RcodeNameError || m.AuthenticatedData != (c.zone != "optout.") {
					t.Fatalf("%d: %s: %v, %v", i, name, m, err)
				}
			}
			sent := l.sim.Count(func(e siminternet.LogEntry) bool { return e.Server == l.sim.Servers(c.zone)[0] })
			if c.most < 0 && sent < names || c.most >= 0 && sent > c.most {
				t.Errorf("%s aggressive %v: %d names cost %d queries", c.zone, c.aggressive, names, sent)
			}
		})
	}
}

// With and without aggressive use every question has the same answer: RCODE, AD, records, and the proof that goes
// with it, whatever was asked before.
func TestAggressiveUseChangesNothing(t *testing.T) {
	var questions []dns.Question
	for _, zone := range []string{"nsec.", "nsec3.", "salted.", "optout."} {
		for _, name := range []string{
			"", "www.", "no.", "a.www.", "below.", "deep.below.", "ent.deep.below.", "x.deep.below.", "x.ent.deep.below.", "wild.", "*.wild.", "a.wild.", "b.a.wild.",
			"www.wild.", "x.www.wild.", "alias.", "a.alias.", "b.alias.", "a.cross.", "zz.", "zzz.", "dname.", "a.dname.", "b.a.dname.",
			"unsigned.", "www.unsigned.", "no.unsigned.", "signed.", "www.signed.", "no.signed.", "a.wild.signed.",
		} {
			for _, typ := range []uint16{dns.TypeA, dns.TypeMX, dns.TypeTXT, dns.TypeDS, dns.TypeCNAME, dns.TypeSOA} {
				questions = append(questions, dns.Question{Name: name + zone, Qtype: typ})
			}
		}
	}
	outcome := func(m *dns.Msg) string {
		var authority []string
		for _, rr := range m.Ns {
			if _, sig := rr.(*dns.RRSIG); !sig {
				authority = append(authority, strings.ToLower(rr.Header().Name)+" "+dns.TypeToString[rr.Header().Rrtype])
			}
		}
		slices.Sort(authority)
		answer := siminternet.AnswerText(m.Answer)
		slices.Sort(answer)
		return fmt.Sprint(dns.RcodeToString[m.Rcode], m.AuthenticatedData, answer, authority)
	}
	var want map[dns.Question]string
	for seed, on := range []bool{false, true, true, true} {
		synctest.Test(t, func(t *testing.T) {
			l := denialLab(t, func(o *resolver.Options) { o.Cache.Aggressive = on })
			defer l.stop()
			got := map[dns.Question]string{}
			rand.New(rand.NewPCG(uint64(seed), 0)).Shuffle(len(questions), func(i, j int) { questions[i], questions[j] = questions[j], questions[i] })
			for _, q := range questions {
				m, err := l.ask(q.Name, q.Qtype, withDO)
				if err != nil {
					t.Fatalf("%s %s: %v", q.Name, dns.TypeToString[q.Qtype], err)
				}
				got[q] = outcome(m)
				if !on {
					if m.Rcode == dns.RcodeServerFailure {
						t.Errorf("%s %s: %v", q.Name, dns.TypeToString[q.Qtype], m)
					}
				} else if got[q] != want[q] {
					t.Errorf("seed %d: %s %s:\n got %s\nwant %s", seed, q.Name, dns.TypeToString[q.Qtype], got[q], want[q])
				}
			}
			if sent := l.sim.Count(func(siminternet.LogEntry) bool { return true }); !on {
				want = got
				t.Logf("%d questions cost %d queries", len(questions), sent)
			} else {
				t.Logf("%d, aggressively", sent)
			}
		})
	}
}

// Where a proof seen before must not be used: at and below zones configured elsewhere and negative trust anchors, when
// its TTL or the grant of its zone has ended, after a purge. The server is asked then.
func TestAggressiveUseHasBounds(t *testing.T) {
	off := func(o *resolver.Options) { o.Cache.Aggressive = false }
	hours := func(l *lab, n int) { time.Sleep(time.Duration(n) * time.Hour) }
	for _, c := range []struct {
		what  string
		edit  func(*resolver.Options)
		first string // asked before
		after func(l *lab, n int)
		name  string
		typ   uint16
		asks  bool
	}{
		{"as it is", nil, "mm.nsec.", nil, "mn.nsec.", dns.TypeA, false},
		{"the wildcard answers", nil, "a.wild.nsec.", nil, "b.wild.nsec.", dns.TypeA, false},
		{"after its TTL", nil, "mm.nsec.", hours, "mn.nsec.", dns.TypeA, true},
		{"switched off", off, "mm.nsec.", nil, "mn.nsec.", dns.TypeA, true},
		{"switched off, a referral told", off, "www.unsigned.nsec.", nil, "unsigned.nsec.", dns.TypeDS, false},
		{"switched off, a neighbour told", off, "mm.nsec.", nil, "mn.nsec.", dns.TypeDS, true},
		{"below a negative trust anchor", func(o *resolver.Options) { o.DNSSEC.Insecure = names("mn.nsec.") }, "mm.nsec.", nil, "x.mn.nsec.", dns.TypeA, true},
		{"at a stub zone", func(o *resolver.Options) {
			o.Recursion.Zones = []resolver.Zone{{Name: names("mn.nsec.")[0], Servers: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.2:53")}}}
		}, "mm.nsec.", nil, "x.mn.nsec.", dns.TypeA, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			l := denialLab(t, func(o *resolver.Options) {
				aggressive(o)
				if c.edit != nil {
					c.edit(o)
				}
			})
			defer l.stop()
			for _, name := range []string{c.first, c.first + "x.nsec."} {
				if m, err := l.ask(name, dns.TypeA, withDO); err != nil || m.Rcode == dns.RcodeServerFailure {
					t.Fatalf("%s: %s: %v, %v", c.what, name, m, err)
				}
			}
			if c.after != nil {
				c.after(l, 2)
			}
			// The SOA is known from another denial.
			if m, err := l.ask("www.nsec.", dns.TypeTXT, withDO); err != nil || m.Rcode != dns.RcodeSuccess {
				t.Fatalf("%s: %v, %v", c.what, m, err)
			}
			before := l.sim.Count(func(siminternet.LogEntry) bool { return true })
			m, err := l.ask(c.name, c.typ, withDO)
			if err != nil {
				t.Fatal(err)
			}
			if asked := l.sim.Count(func(siminternet.LogEntry) bool { return true }) > before; asked != c.asks {
				t.Errorf("%s: %s asked a server: %v\n%v", c.what, c.name, asked, m)
			}
		})
	}
}

func names(texts ...string) (out []resolver.Name) {
	for _, s := range texts {
		n, err := resolver.ParseName(s)
		if err != nil {
			panic(err)
		}
		out = append(out, n)
	}
	return out
}

// E29: a signed NSEC record whose next name lies outside its zone (CVE-2026-13321) proves nothing: neither in its own
// zone nor, kept for later, of the names of others that it would cover.
func TestNSECBeyondItsZone(t *testing.T) {
	s := newSigner("e29.lab.")
	extra := zones{zoneAt("e29.lab.", evil1, ""), zoneAt("f29.lab.", victim2, "www A 198.51.100.29")}
	aggressive := func(o *resolver.Options) {
		o.DNSSEC.Anchors += "\n" + s.anchor()
		o.Cache.Aggressive = true
	}
	assault(t, extra, aggressive, func(l *lab) {
		next := "z.e29.lab."
		l.hook(evil1, s.serve(func(_ siminternet.Query, m *dns.Msg) {
			m.Rcode = dns.RcodeNameError
			m.Ns = s.signed("e29.lab. NSEC " + next + " NS SOA RRSIG NSEC DNSKEY")
		}))
		if m := l.must("a.e29.lab.", dns.TypeA); m.Rcode != dns.RcodeNameError || !m.AuthenticatedData {
			t.Fatalf("an honest record: %v", m)
		}
		before := sentTo(l.sim, evil1)
		if m := l.must("b.e29.lab.", dns.TypeA); m.Rcode != dns.RcodeNameError || sentTo(l.sim, evil1) != before {
			t.Fatalf("it is not used for another name: %v", m)
		}
		next = "zzz.lab."
		for _, name := range []string{"zz.e29.lab.", "zzz.e29.lab."} { // beyond what the honest record covers
			if m := l.must(name, dns.TypeA); m.Rcode != dns.RcodeServerFailure {
				t.Errorf("%s is denied by a record that goes beyond its zone: %v", name, m)
			}
		}
		if m := l.must("www.f29.lab.", dns.TypeA); m.Rcode != 0 || len(m.Answer) != 1 {
			t.Errorf("a name of another zone: %v", m)
		}
	})
}
