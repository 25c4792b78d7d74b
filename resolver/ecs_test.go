package resolver_test

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// An ecsLab is a resolver that tells the servers of geo.lab. of clients' networks, and relays that ask it.
type ecsLab struct {
	*lab
	mu   sync.Mutex
	seen map[string][]string // networks told, by the zone of the server that was told
}

// told returns the networks told since it was last called.
func (l *ecsLab) told() map[string][]string {
	l.mu.Lock()
	defer l.mu.Unlock()
	seen := l.seen
	l.seen = map[string][]string{}
	return seen
}

// inGeo runs f. Names of geo.lab. are answered by the network told of: w… with scope 24, all… with scope 0, mute…
// without an option, other… with the option of another network, wide… with that of another length. The last octet of
// an address is the third of the network's, or 250 where no network was told.
func inGeo(t *testing.T, edit func(*resolver.Options), f func(l *ecsLab)) {
	t.Helper()
	all := func() []siminternet.Zone {
		return append(cacheZones()[:3],
			zoneAt("geo.lab.", victim1, "away CNAME target.good.lab."),
			zoneAt("good.lab.", victim2, "target A 198.51.100.99\nto CNAME w.geo.lab."))
	}
	onZones(t, all, func(o *resolver.Options) {
		o.Recursion.ECS = resolver.ECSOptions{Zones: names("geo.lab."), IPv4: 24, IPv6: 56}
		o.Identify.Relays = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")} // where clients of the lab are
		if edit != nil {
			edit(o)
		}
	}, func(h *history) {
		l := &ecsLab{lab: h.lab, seen: map[string][]string{}}
		for _, zone := range []string{".", "lab.", "geo.lab.", "good.lab."} {
			for _, a := range l.sim.Servers(zone) {
				l.hook(a.String(), func(q siminternet.Query) *siminternet.Reply {
					s := subnetOf(q.Msg)
					if s != nil {
						l.mu.Lock()
						l.seen[zone] = append(l.seen[zone], fmt.Sprintf("%s/%d", s.Address, s.SourceNetmask))
						l.mu.Unlock()
					}
					name, typ := asked(q)
					if zone != "geo.lab." || typ != dns.TypeA || strings.HasPrefix(name, "away") || name == "geo.lab." {
						return nil
					}
					return geoAnswer(q, name, s)
				})
			}
		}
		f(l)
	})
}

func geoAnswer(q siminternet.Query, name string, s *dns.EDNS0_SUBNET) *siminternet.Reply {
	octet := 250
	if s != nil {
		octet = int(s.Address.To16()[14])
	}
	r := say(q, true, 0, fmt.Sprintf("%s 300 A 198.51.100.%d", name, octet), "", "")
	if s == nil || strings.HasPrefix(name, "mute") || r.Msg.IsEdns0() == nil {
		return r
	}
	echo := *s
	echo.SourceScope = 24
	switch {
	case strings.HasPrefix(name, "all"):
		echo.SourceScope = 0
	case strings.HasPrefix(name, "other"):
		echo.Address = net.IPv4(203, 0, 99, 0)
	case strings.HasPrefix(name, "wide"):
		echo.SourceNetmask, echo.Address = 16, net.IPv4(203, 0, 0, 0)
	}
	r.Msg.IsEdns0().Option = append(r.Msg.IsEdns0().Option, &echo)
	return r
}

func subnetOf(m *dns.Msg) *dns.EDNS0_SUBNET {
	if o := m.IsEdns0(); o != nil {
		for _, o := range o.Option {
			if s, ok := o.(*dns.EDNS0_SUBNET); ok {
				return s
			}
		}
	}
	return nil
}

// get asks for a client of a network ("" for a relay that names none) and returns the last address, and the network
// and scope in the response.
func (l *ecsLab) get(name, network string) (address, scope string) {
	l.t.Helper()
	m, err := l.ask(name, dns.TypeA, func(m *dns.Msg) {
		if network == "" {
			return
		}
		p := netip.MustParsePrefix(network)
		s := &dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: uint8(p.Bits()), Address: p.Addr().AsSlice()}
		if p.Addr().Is6() {
			s.Family = 2
		}
		m.IsEdns0().Option = append(m.IsEdns0().Option, s)
	})
	if err != nil {
		l.t.Fatalf("%s for %s: %v", name, network, err)
	}
	address = dns.RcodeToString[m.Rcode]
	if n := len(m.Answer); n > 0 {
		if a, ok := m.Answer[n-1].(*dns.A); ok {
			address = a.A.String()
		}
	}
	if s := subnetOf(m); s != nil {
		scope = fmt.Sprintf("%s/%d %d", s.Address, s.SourceNetmask, s.SourceScope)
	}
	return address, scope
}

func (l *ecsLab) want(name, network, address, scope string, sent int) {
	l.t.Helper()
	for range 3 { // answered by servers, from RRsets, from settled answers: all the same
		l.sim.ResetLog()
		a, s := l.get(name, network)
		if a != address || s != scope {
			l.t.Errorf("%s for %q: %s, scope %q; want %s and %q", name, network, a, s, address, scope)
		}
		if n := l.sim.Count(func(e siminternet.LogEntry) bool { return e.Is(name, dns.TypeA) }); n != sent {
			l.t.Errorf("%s for %q: %d questions, want %d", name, network, n, sent)
		}
		sent = 0
	}
}

func TestClientSubnet(t *testing.T) {
	inGeo(t, nil, func(l *ecsLab) {
		// Each network has its own answer, and whoever names none has another.
		l.want("w.geo.lab.", "203.0.1.0/24", "198.51.100.1", "203.0.1.0/24 24", 1)
		l.want("w.geo.lab.", "203.0.2.64/26", "198.51.100.2", "203.0.2.64/26 24", 1)
		l.want("w.geo.lab.", "203.0.2.128/25", "198.51.100.2", "203.0.2.128/25 24", 0)
		l.want("w.geo.lab.", "", "198.51.100.250", "", 1)
		l.want("w.geo.lab.", "203.0.1.0/24", "198.51.100.1", "203.0.1.0/24 24", 0)

		// An answer for all is one for all, of the family that asked, and for those without a network.
		l.want("all1.geo.lab.", "203.0.1.0/24", "198.51.100.1", "203.0.1.0/24 24", 1)
		l.want("all1.geo.lab.", "203.0.2.0/24", "198.51.100.1", "203.0.2.0/24 24", 0)
		l.want("all1.geo.lab.", "", "198.51.100.1", "", 0)
		l.want("all1.geo.lab.", "2001:db8:0:300::/56", "198.51.100.0", "2001:db8:0:300::/56 56", 1)
		// One that was given to somebody without a network is for nobody else.
		l.want("all2.geo.lab.", "", "198.51.100.250", "", 1)
		l.want("all2.geo.lab.", "203.0.1.0/24", "198.51.100.1", "203.0.1.0/24 24", 1)

		// What does not echo the network told is for all.
		for _, name := range []string{"mute.geo.lab.", "other.geo.lab.", "wide.geo.lab."} {
			l.want(name, "203.0.1.0/24", "198.51.100.1", "203.0.1.0/24 24", 1)
			l.want(name, "203.0.2.0/24", "198.51.100.1", "203.0.2.0/24 24", 0)
		}

		// An alias to another zone takes nothing along, and one from another zone gets nothing.
		l.want("away.geo.lab.", "203.0.1.0/24", "198.51.100.99", "203.0.1.0/24 24", 1)
		l.want("target.good.lab.", "203.0.1.0/24", "198.51.100.99", "203.0.1.0/24 0", 0)
		l.want("to.good.lab.", "203.0.9.0/24", "198.51.100.250", "203.0.9.0/24 0", 1)

		// A private network means nothing to anybody.
		l.want("w2.geo.lab.", "192.168.1.0/24", "198.51.100.250", "192.168.1.0/24 0", 1)

		all := l.told()
		for _, zone := range []string{".", "lab.", "good.lab."} {
			if got := all[zone]; len(got) > 0 {
				t.Errorf("a server of %s was told of %v", zone, got)
			}
		}
		for _, told := range all["geo.lab."] {
			if p := netip.MustParsePrefix(told); p.Addr().Is4() && p.Bits() > 24 || p.Bits() > 56 || p.Addr().IsPrivate() || p != p.Masked() {
				t.Errorf("a server was told of %s", told)
			}
		}
		if len(all["geo.lab."]) == 0 {
			t.Error("nobody was told anything")
		}
	})
}

// K04: a client that sends a prefix of length 0 gets nothing that was meant for another network, and nobody is told of
// one for its sake.
func TestClientSubnetDeclined(t *testing.T) {
	for _, decline := range []string{"0.0.0.0/0", "::/0"} {
		inGeo(t, nil, func(l *ecsLab) {
			l.want("w.geo.lab.", "203.0.1.0/24", "198.51.100.1", "203.0.1.0/24 24", 1)
			l.told()
			l.want("w.geo.lab.", decline, "198.51.100.250", strings.Replace(decline, "/", "/", 1)+" 0", 1)
			if told := l.told(); len(told) > 0 {
				t.Errorf("told %v", told)
			}
		})
	}
}

// Who is no relay is not believed; and what is not configured is not sent.
func TestClientSubnetOfStrangers(t *testing.T) {
	for name, edit := range map[string]func(*resolver.Options){
		"no relay": func(o *resolver.Options) { o.Identify.Relays = nil },
		"no zones": func(o *resolver.Options) { o.Recursion.ECS.Zones = nil },
		"no bits":  func(o *resolver.Options) { o.Recursion.ECS.IPv4 = 0 },
	} {
		inGeo(t, edit, func(l *ecsLab) {
			scope := "203.0.1.0/24 0"
			if name == "no zones" {
				scope = ""
			}
			l.want("w.geo.lab.", "203.0.1.0/24", "198.51.100.250", scope, 1)
			if told := l.told(); len(told) > 0 {
				t.Errorf("%s: told %v", name, told)
			}
		})
	}
}

// A refresh before the end is one for the network whose answer it is.
func TestClientSubnetRefresh(t *testing.T) {
	inGeo(t, nil, func(l *ecsLab) {
		for range 4 {
			l.get("w.geo.lab.", "203.0.1.0/24")
		}
		l.told()
		time.Sleep(290 * time.Second)
		l.get("w.geo.lab.", "203.0.1.0/24")
		time.Sleep(time.Second)
		if got := l.told()["geo.lab."]; len(got) != 1 || got[0] != "203.0.1.0/24" {
			t.Errorf("told %v", got)
		}
		l.want("w.geo.lab.", "203.0.1.0/24", "198.51.100.1", "203.0.1.0/24 24", 0)
		time.Sleep(20 * time.Second)
		l.want("w.geo.lab.", "203.0.1.0/24", "198.51.100.1", "203.0.1.0/24 24", 0)
	})
}
