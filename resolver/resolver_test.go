package resolver_test

import (
	"context"
	"maps"
	"net"
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
	"github.com/sluice-dns/sluice/usercache"
)

// A lab is one resolver in an in-memory Internet, inside a synctest bubble.
type lab struct {
	t    *testing.T
	net  *siminternet.Network
	sim  *siminternet.Internet
	addr netip.AddrPort // of the resolver, UDP and TCP
	stop func()
	port uint16
	r    *resolver.Resolver
}

// newLab runs a resolver, which validates, in the standard Internet.
func newLab(t *testing.T, edit func(*resolver.Options)) *lab {
	t.Helper()
	return newLabIn(t, siminternet.Standard(clock.Wall()), edit)
}

func newLabIn(t *testing.T, sim *siminternet.Internet, edit func(*resolver.Options)) *lab {
	t.Helper()
	l := &lab{t: t, net: siminternet.NewNetwork(), addr: netip.MustParseAddrPort("127.0.0.1:53"), port: 20000}
	l.sim = sim
	if err := l.sim.Attach(l.net); err != nil {
		t.Fatal(err)
	}
	users, err := usercache.Open(usercache.Options{Dir: t.TempDir(), ProfilesCached: 64})
	if err != nil {
		t.Fatal(err)
	}
	udp, err := l.net.ListenUDP(l.addr)
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := l.net.ListenTCP(l.addr)
	if err != nil {
		t.Fatal(err)
	}
	everybody := []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
	o := resolver.Options{
		Limits: limitsWith(nil), Users: users, Transport: resolver.Dialing(l.net.Dial),
		Access:    resolver.AccessOptions{Allow: everybody, Unlimited: everybody},
		Identify:  resolver.IdentifyOptions{Stranger: "serve", WhenCold: "refuse"},
		Recursion: resolver.RecursionOptions{RootHints: l.sim.RootHints(), HintsFile: "hints", NoIPv6: true},
		DNSSEC:    resolver.DNSSECOptions{Validate: true, Anchors: l.sim.TrustAnchor(), AnchorsFile: "anchors"},
		Answers:   resolver.AnswerOptions{MaxUDP: 1232, Minimal: true, EDE: true},
		Listeners: resolver.Listeners{UDP: []net.PacketConn{udp}, TCP: []net.Listener{tcp}},
	}
	if edit != nil {
		edit(&o)
	}
	if o.Listeners.GetCertificate != nil { // then all transports, and several workers
		for port, to := range map[uint16]*[]net.Listener{853: &o.Listeners.DoT, 443: &o.Listeners.DoH} {
			s, err := l.net.ListenTCP(netip.AddrPortFrom(l.addr.Addr(), port))
			if err != nil {
				t.Fatal(err)
			}
			*to = append(*to, s)
		}
		for port := range uint16(2) {
			udp, err := l.net.ListenUDP(netip.AddrPortFrom(l.addr.Addr(), 54+port))
			if err != nil {
				t.Fatal(err)
			}
			o.Listeners.UDP = append(o.Listeners.UDP, udp)
		}
	}
	fillEmpty(t, users)
	r, err := resolver.New(o)
	if err != nil {
		t.Fatal(err)
	}
	l.r = r
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	l.stop = func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		r.Close()
		users.Close()
		l.sim.Close()
		l.net.Close()
	}
	return l
}

// limitsWith are the limits of class 2g with those of set, and a small cache: under the race detector it is memory to be
// cleared, for each of hundreds of resolvers.
func limitsWith(set map[string]int64) *resolver.LiveLimits {
	all := map[string]int64{"cache": 2 << 20}
	maps.Copy(all, set)
	lo := resolver.LimitsOptions{Set: map[resolver.LimitsName]int64{}}
	for name, v := range all {
		n, ok := resolver.LimitsByName(name)
		if !ok {
			panic("no limit " + name)
		}
		lo.Set[n] = v
	}
	live, err := resolver.NewLiveLimits(resolver.Machine{Memory: 2 << 30, CPUs: 1}, lo)
	if err != nil {
		panic(err)
	}
	return live
}

// fillEmpty makes the user data whole: no users, so that everybody is a stranger and nobody is cold.
func fillEmpty(t testing.TB, c *usercache.Cache) {
	id := usercache.Identity{Dataset: [16]byte{1}, Lineage: [16]byte{1}}
	for _, k := range []usercache.Kind{usercache.CatalogueKind, usercache.Users} {
		d := c.Dataset(k)
		if err := d.BeginTransfer(id, false); err != nil {
			t.Fatal(err)
		}
		if err := d.FinishTransfer(id, 0, clock.Wall()); err != nil {
			t.Fatal(err)
		}
	}
}

// ask sends a query over UDP, and over TCP after a truncated response.
func (l *lab) ask(name string, typ uint16, edit func(*dns.Msg)) (*dns.Msg, error) {
	m := new(dns.Msg)
	m.SetQuestion(name, typ)
	m.SetEdns0(1232, false)
	if edit != nil {
		edit(m)
	}
	r, err := l.exchange("udp", m)
	if err == nil && r.Truncated {
		r, err = l.exchange("tcp", m)
	}
	return r, err
}

func (l *lab) exchange(network string, m *dns.Msg) (*dns.Msg, error) {
	conn, err := l.net.Dial(l.t.Context(), network, l.addr.String())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	c := &dns.Conn{Conn: conn, UDPSize: 4096}
	if err := c.WriteMsg(m); err != nil {
		return nil, err
	}
	for {
		r, err := c.ReadMsg()
		if err != nil || r.Id == m.Id {
			return r, err
		}
	}
}

func text(m *dns.Msg) string {
	s := []string{dns.RcodeToString[m.Rcode]}
	s = append(s, siminternet.AnswerText(m.Answer)...)
	return strings.Join(s, " | ")
}

// Without validation every name of the standard Internet has the outcome that its table says, cold, warm and
// hot, and nothing is authentic.
func TestStandardInternetUnvalidated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, func(o *resolver.Options) { o.DNSSEC.Validate = false })
		defer l.stop()
		for _, e := range siminternet.Expect() {
			for _, when := range []string{"cold", "warm", "hot"} {
				m, err := l.ask(e.Name, e.Type, nil)
				if err != nil {
					t.Errorf("%s %s %s: %v", when, e.Name, dns.TypeToString[e.Type], err)
					break
				}
				got := siminternet.AnswerText(m.Answer)
				slices.Sort(got)
				want := slices.Clone(e.Answer)
				slices.Sort(want)
				if m.Rcode != e.RCode || !slices.Equal(got, want) || m.AuthenticatedData {
					t.Errorf("%s %s %s:\n got %s\nwant %s %v", when, e.Name, dns.TypeToString[e.Type], text(m), dns.RcodeToString[e.RCode], e.Answer)
					break
				}
			}
		}
	})
}

// When no server of a zone answers any more, what was true a while ago is given, with a short TTL and an
// extended error that says so (RFC 8767, RFC 8914); without that, SERVFAIL.
func TestStaleWhenServersAreDown(t *testing.T) {
	for _, stale := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			l := newLab(t, func(o *resolver.Options) {
				if stale {
					o.Cache.MaxStale = 24 * time.Hour
				}
			})
			defer l.stop()
			name := "www.ed25519.example."
			before, err := l.ask(name, dns.TypeA, nil)
			if err != nil || before.Rcode != dns.RcodeSuccess {
				t.Fatalf("%v, %v", before, err)
			}
			for _, a := range l.sim.Addrs() {
				l.sim.SetBehaviour(a, siminternet.Behaviour{Silent: true})
			}
			time.Sleep(2 * time.Hour) // beyond the TTL
			var m *dns.Msg
			for range 3 { // a UDP client gives up after a while and asks again
				if m, err = l.ask(name, dns.TypeA, nil); err == nil {
					break
				}
			}
			if err != nil {
				t.Fatal(err)
			}
			ede := -1
			for _, o := range m.IsEdns0().Option {
				if e, ok := o.(*dns.EDNS0_EDE); ok {
					ede = int(e.InfoCode)
				}
			}
			switch {
			case stale && (m.Rcode != dns.RcodeSuccess || len(m.Answer) != len(before.Answer) || m.Answer[0].Header().Ttl != 30 || ede != 3):
				t.Errorf("stale: %v", m)
			case !stale && m.Rcode != dns.RcodeServerFailure:
				t.Errorf("without stale data: %v", m)
			}
		})
	}
}
