package resolver_test

import (
	"context"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/siminternet"
	"github.com/sluice-dns/sluice/usercache"
)

// A hit allocates nothing from the packet in the listener's buffer to the packet in the send buffer. It is
// counted over the whole process, listener loop included, while a client asks over a real socket: the client
// allocates nothing either, and the average over many queries forgets what timers do meanwhile.
func TestUDPHitAllocatesNothing(t *testing.T) {
	addr, stop := serveOnLoopback(t)
	defer stop()
	c, err := net.Dial("udp", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	m := new(dns.Msg)
	m.SetQuestion("www.ed25519.example.", dns.TypeA)
	m.SetEdns0(1232, true)
	wire, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	var buf [1500]byte
	n := 0
	ask := func() {
		if _, err := c.Write(wire); err != nil {
			t.Fatal(err)
		}
		if n, err = c.Read(buf[:]); err != nil {
			t.Fatal(err)
		}
	}
	c.SetDeadline(time.Now().Add(30 * time.Second))
	for range 5 {
		ask() // cold, then warm, then hot
	}
	// What a young resolver does beside (its first checkpoint, say) would count too: a hit that allocates does so
	// in every round.
	least := testing.AllocsPerRun(500, ask)
	for range 20 {
		least = min(least, testing.AllocsPerRun(500, ask))
	}
	if least != 0 {
		t.Errorf("%v allocations for a hit", least)
	}
	r := new(dns.Msg)
	if err := r.Unpack(buf[:n]); err != nil || len(r.Answer) < 3 {
		t.Errorf("the hit was no full answer: %v, %v", r, err)
	}
}

// BenchmarkUDPHit is a query and its answer over loopback, client included.
func BenchmarkUDPHit(b *testing.B) {
	addr, stop := serveOnLoopback(b)
	defer stop()
	c, err := net.Dial("udp", addr.String())
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	m := new(dns.Msg)
	m.SetQuestion("www.ed25519.example.", dns.TypeA)
	wire, _ := m.Pack()
	var buf [1500]byte
	b.ReportAllocs()
	for b.Loop() {
		c.Write(wire)
		if _, err := c.Read(buf[:]); err != nil {
			b.Fatal(err)
		}
	}
}

// serveOnLoopback runs a resolver on a real UDP socket, in front of the standard Internet on loopback.
func serveOnLoopback(t testing.TB) (addr netip.AddrPort, stop func()) {
	t.Helper()
	sim := siminternet.Standard(clock.Wall())
	port, err := sim.ListenLoopback(0)
	if err != nil {
		t.Fatal(err)
	}
	limits, err := resolver.NewLiveLimits(resolver.Machine{Memory: 2 << 30, CPUs: 1}, resolver.LimitsOptions{})
	if err != nil {
		t.Fatal(err)
	}
	users, err := usercache.Open(usercache.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	fillEmpty(t, users)
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	loopback := []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
	r, err := resolver.New(resolver.Options{
		Limits: limits, Users: users,
		Access:    resolver.AccessOptions{Allow: loopback, Unlimited: loopback},
		Identify:  resolver.IdentifyOptions{Stranger: "serve"},
		Recursion: resolver.RecursionOptions{RootHints: sim.RootHints(), HintsFile: "hints", NoIPv6: true, UpstreamPort: port},
		Answers:   resolver.AnswerOptions{MaxUDP: 1232, Minimal: true, EDE: true},
		Listeners: resolver.Listeners{UDP: []net.PacketConn{pc}},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	return pc.LocalAddr().(*net.UDPAddr).AddrPort(), func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		r.Close()
		users.Close()
		sim.Close()
	}
}
