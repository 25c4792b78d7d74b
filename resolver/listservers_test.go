package resolver_test

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// TestListServers: rules of users' lists about the name servers that answers come through, through a whole resolver:
// fresh, from the cache, when the delegation has gone from the cache, stale, over aliases, and in forward zones.
func TestListServers(t *testing.T) {
	zone := func(name, server, ns string, records string) siminternet.Zone {
		return siminternet.Zone{Name: name, NameServers: []siminternet.NameServer{{Name: ns, Addrs: []netip.Addr{netip.MustParseAddr(server)}}}, Records: records}
	}
	internet := func() *siminternet.Internet {
		return newInternet(t, zones{
			zone("example.", labServer, "ns.example.", ""),
			zone("good.example.", "127.0.7.1", "ns.good.example.", "www A 192.0.2.1\ntobad CNAME www.bad.example.\ntwo CNAME tobad\nfw CNAME www.corp.example.\nx A 192.0.2.9\n"),
			zone("bad.example.", "127.0.7.2", "dns.evil.example.", "www A 192.0.2.2\nok A 192.0.2.3\ntogood CNAME www.good.example.\naddr A 192.0.2.77\n"),
			zone("evil.example.", "127.0.7.3", "ns.evil.example.", "www A 192.0.2.4\n"),
			zone("kid.bad.example.", "127.0.7.4", "ns.kid.bad.example.", "www A 192.0.2.5\n"),
			zone("corp.example.", "127.0.7.5", "dns.evil.example.", "www A 192.0.2.6\n"),
		})
	}
	catalogue := map[string]proto.Message{}
	var blobs [][]byte
	users := map[string]proto.Message{}
	source := map[string]string{}
	user := func(id string, s *userv1.Settings, lines ...string) {
		if len(lines) > 0 {
			l, text := list(uint32(len(blobs)), "$TTL 60\n"+strings.Join(lines, "\n")+"\n")
			catalogue["list/"+id], blobs = l, append(blobs, text)
			s.Lists = strs(id)
		}
		s.Log = userv1.LogPrivacy_LOG_PRIVACY_FULL
		s.Mode = userv1.BlockMode_BLOCK_MODE_NXDOMAIN
		source[id] = fmt.Sprintf("10.0.1.%d", len(source)+1)
		users[id] = &userv1.User{Settings: s, Devices: []*userv1.Device{{Id: id, Links: []string{source[id]}}}}
	}
	user("nobody", &userv1.Settings{})
	user("plain", &userv1.Settings{}, "||other.example^")
	user("name", &userv1.Settings{}, "dns.evil.example.rpz-nsdname CNAME .", "ok.bad.example CNAME rpz-passthru.")
	user("wild", &userv1.Settings{}, "*.evil.example.rpz-nsdname CNAME .", "dns.evil.example.rpz-nsdname CNAME rpz-passthru.")
	user("addr", &userv1.Settings{}, "24.0.7.0.127.rpz-nsip CNAME .", "32.1.7.0.127.rpz-nsip CNAME rpz-passthru.", "32.77.2.0.192.rpz-ip CNAME rpz-passthru.")
	user("drop", &userv1.Settings{}, "dns.evil.example.rpz-nsdname CNAME rpz-drop.")
	user("tcp", &userv1.Settings{}, "dns.evil.example.rpz-nsdname CNAME rpz-tcp-only.")
	user("data", &userv1.Settings{}, "dns.evil.example.rpz-nsdname A 192.0.2.99")
	user("walled", &userv1.Settings{}, "dns.evil.example.rpz-nsdname CNAME www.bad.example.")
	user("tld", &userv1.Settings{}, "ns.example.rpz-nsdname CNAME .", "32.1.1.0.127.rpz-nsip CNAME .")
	rules := func(id, text string) {
		users[id].(*userv1.User).Rules = &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte(text)}}
	}
	user("rules", &userv1.Settings{})
	rules("rules", "dns.evil.example.rpz-nsdname CNAME .\n@@||ok.bad.example^\n")
	user("off", &userv1.Settings{Enabled: proto.Bool(false)})
	rules("off", "dns.evil.example.rpz-nsdname CNAME .\n")

	const nx = "NXDOMAIN, SOA 10, EDE 17"
	steps := []struct{ id, ask, want string }{
		{"nobody", "www.bad", "NOERROR, A 192.0.2.2"},
		{"plain", "www.bad", "NOERROR, A 192.0.2.2"},
		{"name", "www.bad", nx},
		{"name", "nothing.bad", nx},
		{"name", "ok.bad", "NOERROR, A 192.0.2.3"}, // the name goes first
		{"name", "www.kid.bad", nx},                // a zone on the way
		{"name", "www.evil", "NOERROR, A 192.0.2.4"},
		{"name", "www.good", "NOERROR, A 192.0.2.1"},
		{"name", "two.good", nx},   // the end of the chain
		{"name", "togood.bad", nx}, // its beginning
		{"wild", "www.bad", "NOERROR, A 192.0.2.2"},
		{"wild", "www.evil", nx},
		{"addr", "www.bad", nx},
		{"addr", "www.good", "NOERROR, A 192.0.2.1"},
		{"addr", "addr.bad", "NOERROR, A 192.0.2.77"}, // an address of the answer goes first
		{"drop", "www.bad", "nothing"},
		{"tcp", "www.bad", "truncated NOERROR"},
		{"data", "www.bad", "NOERROR, A 192.0.2.99"},
		{"data", "two.good", "NOERROR, A 192.0.2.99"},
		{"walled", "ok.bad", "NOERROR, A 192.0.2.2, CNAME www.bad.example."},
		{"walled", "www.bad", "NOERROR, A 192.0.2.2"},
		{"tld", "www.good", "NOERROR, A 192.0.2.1"}, // whose servers do not count
		{"rules", "www.bad", nx},
		{"rules", "ok.bad", "NOERROR, A 192.0.2.3"},
		{"off", "www.bad", "NOERROR, A 192.0.2.2"},
	}
	ask := func(h *household, id, name string) string {
		m, err := h.from(source[id], name+".example.", dns.TypeA)
		switch {
		case err != nil:
			return "nothing"
		case m.Truncated:
			return "truncated " + briefly(m, err)
		}
		return briefly(m, err)
	}
	run := func(t *testing.T, edit func(*resolver.Options), f func(h *household)) {
		synctest.Test(t, func(t *testing.T) { withHousehold(t, internet(), catalogue, users, blobs, edit, f) })
	}
	t.Run("fresh, cached, evicted", func(t *testing.T) {
		var mu sync.Mutex
		logged := map[string]string{}
		run(t, func(o *resolver.Options) {
			o.QueryLog = func(e *resolver.QueryEvent) {
				mu.Lock()
				defer mu.Unlock()
				logged[e.Question().Name.String()] = fmt.Sprint(e.Verdict, " ", e.Line)
			}
		}, func(h *household) {
			for round := range 4 {
				for _, s := range steps {
					if got := ask(h, s.id, s.ask); got != s.want {
						t.Errorf("round %d, %s asks %s: %s, want %s", round, s.id, s.ask, got, s.want)
					}
				}
				before := h.sim.Count(func(siminternet.LogEntry) bool { return true })
				if round == 2 { // from now on the delegations are not in the cache, but the answers are
					for _, n := range []string{"bad.example.", "good.example.", "evil.example.", "kid.bad.example.", "example."} {
						h.r.DropCut(mustName(t, n))
					}
					for _, id := range []string{"nobody", "plain", "off"} {
						ask(h, id, "www.bad")
					}
					if n := h.sim.Count(func(siminternet.LogEntry) bool { return true }); n != before {
						t.Errorf("%d queries were sent for who has no such rules", n-before)
					}
				}
				if round == 1 {
					h.sim.ResetLog()
				}
			}
		})
		if got := logged["nothing.bad.example."]; got != "blocked 2" {
			t.Errorf("logged as %q", got)
		}
	})
	t.Run("stale", func(t *testing.T) {
		run(t, func(o *resolver.Options) { o.Cache.MaxStale = 24 * time.Hour }, func(h *household) {
			for _, name := range []string{"www.bad", "www.good", "two.good"} {
				ask(h, "nobody", name)
			}
			for _, s := range []string{labServer, "127.0.7.1", "127.0.7.2", "127.0.7.3"} {
				h.sim.SetBehaviour(netip.MustParseAddr(s), siminternet.Behaviour{Silent: true})
			}
			time.Sleep(2 * time.Hour)
			for _, s := range []struct{ id, ask, want string }{
				{"nobody", "www.bad", "NOERROR, A 192.0.2.2, EDE 3"}, {"name", "www.bad", nx}, {"name", "two.good", nx},
				{"name", "www.good", "NOERROR, A 192.0.2.1, EDE 3"}, {"addr", "www.bad", nx}, {"addr", "www.good", "NOERROR, A 192.0.2.1, EDE 3"},
			} {
				if got := ask(h, s.id, s.ask); got != s.want {
					t.Errorf("%s asks %s: %s, want %s", s.id, s.ask, got, s.want)
				}
			}
		})
	})
	t.Run("configured zones", func(t *testing.T) {
		run(t, func(o *resolver.Options) {
			forward := &resolver.ForwardPool{Upstreams: []resolver.ForwardUpstream{{Spec: resolver.UpstreamSpec{Scheme: resolver.UpstreamUDP, Addr: netip.MustParseAddrPort("127.0.7.5:53")}}}}
			o.Recursion.Zones = []resolver.Zone{
				{Name: mustName(t, "corp.example."), Forward: forward},
				{Name: mustName(t, "bad.example."), Servers: []netip.AddrPort{netip.MustParseAddrPort("127.0.7.2:53")}},
			}
		}, func(h *household) {
			for range 2 {
				for _, s := range []struct{ id, ask, want string }{
					{"name", "www.corp", "NOERROR, A 192.0.2.6"}, {"addr", "www.corp", "NOERROR, A 192.0.2.6"},
					{"name", "fw.good", "NOERROR, A 192.0.2.6, CNAME www.corp.example."}, {"name", "www.bad", "NOERROR, A 192.0.2.2"},
					{"addr", "www.kid.bad", nx}, // below a stub zone servers delegate
				} {
					if got := ask(h, s.id, s.ask); got != s.want {
						t.Errorf("%s asks %s: %s, want %s", s.id, s.ask, got, s.want)
					}
				}
			}
		})
	})
}

func mustName(t *testing.T, s string) resolver.Name {
	t.Helper()
	n, err := resolver.ParseName(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestListZonesLoop: what the records of a list's zone lead to is judged again, by the same zone and all others; those
// that lead round in a circle, or on for ever, end in a failure that says so, and no more is asked upstream.
func TestListZonesLoop(t *testing.T) {
	zone := []string{"$TTL 60", "a CNAME b.", "b CNAME a.", "self.example CNAME self.example.", "*.grow.example CNAME *.x.grow.example.", "to.example CNAME blocked.example.", "blocked.example CNAME .",
		"pass.example CNAME pass2.example.", "pass2.example CNAME rpz-passthru.", "*.walled.example CNAME door.walled.example.", "32.1.2.0.192.rpz-ip CNAME www.good.example.", "32.2.2.0.192.rpz-ip CNAME y.ping.example.", "32.3.2.0.192.rpz-ip CNAME x.ping.example.", "b.rpz-nsdname CNAME ."}
	for i := range 20 {
		zone = append(zone, fmt.Sprintf("c%d.example CNAME c%d.example.", i, i+1))
	}
	l, text := list(0, strings.Join(zone, "\n")+"\n")
	u := &userv1.User{Settings: &userv1.Settings{Lists: strs("l"), Mode: userv1.BlockMode_BLOCK_MODE_NXDOMAIN}, Devices: []*userv1.Device{{Id: "d", Links: []string{"10.0.1.1"}}}}
	synctest.Test(t, func(t *testing.T) {
		sim := newInternet(t, zones{zoneAt("example.", labServer, `
self A 192.0.2.9
door.walled A 192.0.2.8
pass2 A 192.0.2.7
www.good A 192.0.2.1
x.ping A 192.0.2.2
y.ping A 192.0.2.3
c14 A 192.0.2.14
c20 A 192.0.2.20
blocked A 192.0.2.6
`)})
		withHousehold(t, sim, map[string]proto.Message{"list/l": l}, map[string]proto.Message{"u": u}, [][]byte{text}, nil, func(h *household) {
			const tooOften = "SERVFAIL, EDE 0"
			for range 2 {
				for name, want := range map[string]string{
					"a.": tooOften, "b.": tooOften, "self.example.": "NOERROR, A 192.0.2.9", "y.grow.example.": "NXDOMAIN, CNAME y.grow.example.x.grow.example., SOA 300", "to.example.": "NXDOMAIN, CNAME blocked.example., SOA 10, EDE 17",
					"pass.example.": "NOERROR, A 192.0.2.7, CNAME pass2.example.", "door.walled.example.": "NOERROR, A 192.0.2.8", "x.walled.example.": "NOERROR, A 192.0.2.8, CNAME door.walled.example.",
					"www.good.example.": "NOERROR, A 192.0.2.1", "x.ping.example.": tooOften, "c0.example.": tooOften,
					"c13.example.": "NOERROR, A 192.0.2.20, CNAME c14.example., CNAME c15.example., CNAME c16.example., CNAME c17.example., CNAME c18.example., CNAME c19.example., CNAME c20.example.",
				} {
					m, err := h.from("10.0.1.1", name, dns.TypeA)
					if got := briefly(m, err); got != want {
						t.Errorf("%s: %s, want %s", name, got, want)
					}
				}
			}
			if n := sim.Count(func(e siminternet.LogEntry) bool {
				return strings.Contains(e.Name, "blocked") || strings.HasPrefix(e.Name, "c1")
			}); n != 0 {
				t.Errorf("%d questions for what nobody gets went upstream", n)
			}
		})
	})
}
