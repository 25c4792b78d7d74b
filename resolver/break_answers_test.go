package resolver_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// Whatever an answer leads to is judged: wherever in it that stands, however it is written, and however the answer
// came about.
func TestAnswersThatHideWhatIsBlocked(t *testing.T) {
	const bad4, bad6 = "192.0.2.66", "2001:db8::66"
	var up strings.Builder
	record := func(format string, args ...any) { fmt.Fprintf(&up, format+"\n", args...) }
	for i := range 20 { // chains whose alias of a depth is blocked
		for d := 1; d <= 20; d++ {
			to := fmt.Sprintf("k%d-%d", d, i+1)
			if i+1 == d {
				to = fmt.Sprintf("k%d-%d.bad", d, i+1)
			}
			from := fmt.Sprintf("k%d-%d", d, i)
			if i == d {
				from += ".bad"
			}
			record("%s CNAME %s", from, to)
			if i == 19 {
				record("%s A 192.0.2.1", to)
			}
		}
	}
	record("ok A 192.0.2.1\nok AAAA 2001:db8::1\nbad A 192.0.2.2\nxbad A 192.0.2.4\nv4 A %s\nv6 AAAA %s\nonly4 A %s", bad4, bad6, bad4)
	record("upper CNAME X.BaD\nx.bad A 192.0.2.3\ndotted CNAME x\\.bad\nx\\.bad A 192.0.2.5\nspelt CNAME \\120.\\098\\065d")
	record("dn DNAME bad\ny.bad A 192.0.2.6")
	record("alias HTTPS 0 x.bad\nfirst HTTPS 0 second\nsecond HTTPS 0 x.bad\nhint4 HTTPS 1 . alpn=h2 ipv4hint=192.0.2.1,%s\nhint6 HTTPS 1 . ipv6hint=2001:db8::1,%s\nsvcb SVCB 1 x.bad", bad4, bad6)
	record("far HTTPS 1 . key65000=%s ipv4hint=%s", strings.Repeat("a", 200), bad4)
	record("mx MX 10 ok\nmx MX 20 x.bad\nsrv SRV 1 1 1 x.bad\nns.mx MX 1 x.bad\nptr PTR x.bad\ncut.deep NS x.bad")
	for i := range 250 {
		record("manya A 198.51.%d.%d\nmanyaaaa AAAA 2001:db8:1::%x", 100+i/200, i%200, i+1)
		record("manymx MX %d %s.%s.%s.m%d", i+1, strings.Repeat("a", 60), strings.Repeat("b", 60), strings.Repeat("c", 60), i)
	}
	record("manya A 198.51.200.66\nmanyaaaa AAAA 2001:db8:ffff::66\nmanymx MX 900 x.bad")
	record("stale 60 CNAME stale.bad\nstale.bad 60 A 192.0.2.7")

	catalogue := map[string]proto.Message{
		"safesearch/engine": &userv1.SafeSearch{Rewrites: []*userv1.Rewrite{
			{Name: "a.search.example", Records: []string{"CNAME v4.example"}}, {Name: "b.search.example", Records: []string{"CNAME x.bad.example"}}, {Name: "c.search.example", Records: []string{"CNAME upper.example"}},
			{Name: "d.search.example", Records: []string{"CNAME d.search.example"}},
		}},
	}
	l, text := list(0, "||bad.example^\n||192.0.2.66^\n||198.51.200.66^\n||2001:db8::66^\n||2001:db8:ffff::66^\n@@||excepted.example^")
	catalogue["list/bad"] = l
	rewrites := []*userv1.Rewrite{
		{Name: "to-bad.rw.example", Records: []string{"CNAME x.bad.example"}}, {Name: "to-upper.rw.example", Records: []string{"CNAME upper.example"}},
		{Name: "to-v4.rw.example", Records: []string{"CNAME v4.example"}}, {Name: "self.rw.example", Records: []string{"CNAME self.rw.example"}},
		{Name: "ping.rw.example", Records: []string{"CNAME pong.rw.example"}}, {Name: "pong.rw.example", Records: []string{"CNAME ping.rw.example"}},
		{Name: "local.rw.example", Records: []string{"CNAME localhost"}}, {Name: "gone.rw.example", Records: []string{"CNAME nowhere.example"}},
		{Name: "*.wc.example", Records: []string{"A 198.51.100.1"}}, {Name: "exact.wc.example", Records: []string{"CNAME x.bad.example"}},
		{Name: "*.deep.wc.example", Records: []string{"NXDOMAIN"}}, {Name: "plain.deep.wc.example", Records: []string{"CNAME plain.deep.wc.example"}},
		{Name: "given.example", Records: []string{"A " + bad4}},
	}
	users := map[string]proto.Message{
		"filtered": &userv1.User{Settings: &userv1.Settings{Lists: strs("bad"), SafeSearch: strs("engine"), Rewrites: &userv1.RewriteSet{Values: rewrites}},
			Rules:   &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte("||dnsrw.example^$dnsrewrite=x.bad.example\n||loop1.example^$dnsrewrite=loop2.example\n||loop2.example^$dnsrewrite=loop1.example\n||under.example^$dnsrewrite=a.under.example\n")}},
			Devices: []*userv1.Device{{Id: "f", Links: []string{"10.0.1.1"}}}},
		"free": &userv1.User{Devices: []*userv1.Device{{Id: "n", Links: []string{"10.0.1.2"}}}},
	}
	const blocked4, blocked6, nodata = "NOERROR, A 0.0.0.0, EDE 17", "NOERROR, AAAA ::, EDE 17", "NOERROR, SOA 10, EDE 17"
	synctest.Test(t, func(t *testing.T) {
		sim := newInternet(t, zones{zoneAt("example.", labServer, up.String())})
		withHousehold(t, sim, catalogue, users, [][]byte{text}, func(o *resolver.Options) {
			o.Local.DefaultZones, o.Cache.MaxStale, o.Cache.StaleAfter = true, 24*time.Hour, 1800*time.Millisecond
			o.DNS64 = netip.MustParsePrefix("64:ff9b::/96")
		}, func(h *household) {
			ask := func(from, name string, typ uint16) string {
				t.Helper()
				m := new(dns.Msg).SetQuestion(name+".example.", typ)
				m.SetEdns0(1232, false)
				for range 3 {
					r, err := h.from(from, m.Question[0].Name, typ)
					if err == nil && r.Truncated {
						conn, e := h.net.DialTCP(t.Context(), netip.AddrPortFrom(netip.MustParseAddr(from), 0), h.addr)
						if e != nil {
							t.Fatal(e)
						}
						dc := &dns.Conn{Conn: conn}
						if err = dc.WriteMsg(m); err == nil {
							r, err = dc.ReadMsg()
						}
						conn.Close()
					}
					if err == nil {
						return briefly(r, nil)
					}
				}
				return "silence"
			}
			for _, round := range []string{"cold", "warm"} {
				for d := 1; d <= 20; d++ {
					name := fmt.Sprintf("k%d-0", d)
					// A chain that is too long for anybody is a failure.
					if got := ask("10.0.1.1", name, dns.TypeA); !strings.HasPrefix(got, "SERVFAIL") {
						t.Errorf("%s, blocked alias %d of 20: %s", round, d, got)
					}
					if got := ask("10.0.1.1", fmt.Sprintf("k%d-10", d), dns.TypeA); got != blocked4 && d > 10 {
						t.Errorf("%s, blocked alias %d of 10: %s", round, d-10, got)
					}
				}
				for ask1, want := range map[string]string{
					"ok A": "NOERROR, A 192.0.2.1", "xbad A": "NOERROR, A 192.0.2.4", "bad A": blocked4, "v4 A": blocked4, "v6 AAAA": blocked6,
					"upper A": blocked4, "spelt A": blocked4, "dotted A": `NOERROR, A 192.0.2.5, CNAME x\.bad.example.`,
					"y.dn A": blocked4, "y.dn AAAA": blocked6,
					"alias HTTPS": nodata, "first HTTPS": "NOERROR, HTTPS 0 second.example.", "second HTTPS": nodata, "hint4 HTTPS": nodata, "hint6 HTTPS": nodata, "svcb SVCB": nodata, "far HTTPS": nodata,
					"mx MX": nodata, "srv SRV": nodata, "ptr PTR": nodata,
					"manya A": blocked4, "manyaaaa AAAA": blocked6, "manymx MX": nodata,
					"only4 AAAA": blocked6, "ok.only4 AAAA": "NXDOMAIN, SOA 300",
					"a.search A": "NOERROR, A 0.0.0.0, CNAME v4.example., EDE 17", "b.search A": "NOERROR, A 0.0.0.0, CNAME x.bad.example., EDE 17", "c.search A": "NOERROR, A 0.0.0.0, CNAME upper.example., EDE 17", "b.search AAAA": "NOERROR, AAAA ::, CNAME x.bad.example., EDE 17", "d.search A": "NXDOMAIN, SOA 300",
					"to-bad.rw A": blocked4, "to-upper.rw A": blocked4, "to-v4.rw A": blocked4, "self.rw A": "NXDOMAIN, SOA 300",
					"ping.rw A": "SERVFAIL, EDE 0", "local.rw A": "NOERROR, A 127.0.0.1", "gone.rw A": "NXDOMAIN, SOA 300",
					"x.wc A": "NOERROR, A 198.51.100.1", "exact.wc A": blocked4, "x.exact.wc A": "NOERROR, A 198.51.100.1", "x.deep.wc A": "NXDOMAIN, SOA 10", "plain.deep.wc A": "NXDOMAIN, SOA 300",
					"given A":  "NOERROR, A " + bad4, // as the user has it
					"dnsrw A":  "NOERROR, A 0.0.0.0, CNAME x.bad.example., EDE 17",
					"loop1 A":  "SERVFAIL, EDE 0",
					"under A":  "NXDOMAIN, CNAME a.under.example., SOA 300",
					"stale A":  blocked4,
					"stale MX": nodata,
				} {
					name, typ, _ := strings.Cut(ask1, " ")
					got := ask("10.0.1.1", name, dns.StringToType[typ])
					if got != want {
						t.Errorf("%s, %s: %s, want %s", round, ask1, got, want)
					}
				}
			}
			// Stale data is judged as fresh data is.
			for _, a := range sim.Addrs() {
				sim.SetBehaviour(a, siminternet.Behaviour{Silent: true})
			}
			time.Sleep(2 * time.Hour)
			if got := ask("10.0.1.2", "stale", dns.TypeA); got != "NOERROR, A 192.0.2.7, CNAME stale.bad.example., EDE 3" {
				t.Errorf("stale, unfiltered: %s", got)
			}
			for range 2 {
				if got := ask("10.0.1.1", "stale", dns.TypeA); got != blocked4 {
					t.Errorf("stale: %s", got)
				}
			}
		})
	})
}
