package resolver_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/siminternet"
	"github.com/sluice-dns/sluice/usercache"
)

// hits are queries that the cache, or the asker's settings, answer. The user asks from 127.0.0.2; his lists, services
// and rules all look at the name, and at each address of the answer.
var hits = []struct{ name, from, ask, answer string }{
	{"a stranger's", "127.0.0.1", "www.ed25519.example.", "www.ed25519.example. A"},
	{"a user's", "127.0.0.2", "www.ed25519.example.", "www.ed25519.example. A"},
	{"a user's, blocked by a list", "127.0.0.2", "www.ads.example.", "www.ads.example. A 0.0.0.0"},
	{"a user's, blocked by a rule of his", "127.0.0.2", "mine.example.", "mine.example. A 0.0.0.0"},
}

// A hit allocates nothing from the packet in the listener's buffer to the packet in the send buffer, whoever asks. It
// is counted over the whole process, listener loop included, while a client asks over a real socket: the client
// allocates nothing either, and the average over many queries forgets what timers do meanwhile.
func TestUDPHitAllocatesNothing(t *testing.T) {
	addr, stop := serveOnLoopback(t)
	defer stop()
	for _, h := range hits {
		c := newHitter(t, addr, h.from, h.ask)
		defer c.Close()
		c.until(t, h.answer)
		// What a young resolver does beside (its first checkpoint, say) would count too: a hit that allocates does so
		// in every round.
		ask := func() { c.ask(t) }
		least := testing.AllocsPerRun(500, ask)
		for round := 0; least != 0 && round < 20; round++ {
			least = min(least, testing.AllocsPerRun(500, ask))
		}
		if least != 0 {
			t.Errorf("%s hit: %v allocations", h.name, least)
		}
		if got := c.answer(t); !strings.HasPrefix(got, h.answer) {
			t.Errorf("%s hit is answered %q, want %q", h.name, got, h.answer)
		}
	}
}

// BenchmarkUDPHit is a query and its answer over loopback, client included.
func BenchmarkUDPHit(b *testing.B) {
	addr, stop := serveOnLoopback(b)
	defer stop()
	for _, h := range hits {
		b.Run(h.name, func(b *testing.B) {
			c := newHitter(b, addr, h.from, h.ask)
			defer c.Close()
			c.until(b, h.answer)
			b.ReportAllocs()
			for b.Loop() {
				c.ask(b)
			}
		})
	}
}

// A hitter asks one question over and over.
type hitter struct {
	net.Conn
	query []byte
	buf   [1500]byte
	n     int
}

func newHitter(t testing.TB, addr netip.AddrPort, from, name string) *hitter {
	t.Helper()
	c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(from), 0)), net.UDPAddrFromAddrPort(addr))
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(60 * time.Second))
	m := new(dns.Msg)
	m.SetQuestion(name, dns.TypeA)
	m.SetEdns0(1232, true)
	h := &hitter{Conn: c}
	if h.query, err = m.Pack(); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *hitter) ask(t testing.TB) {
	_, err := h.Write(h.query)
	if err == nil {
		h.n, err = h.Read(h.buf[:])
	}
	if err != nil {
		t.Fatal(err)
	}
}

// answer returns the first record of the last answer, without its TTL.
func (h *hitter) answer(t testing.TB) string {
	m := new(dns.Msg)
	if err := m.Unpack(h.buf[:h.n]); err != nil || len(m.Answer) == 0 {
		return fmt.Sprint(dns.RcodeToString[m.Rcode], err)
	}
	f := strings.Fields(m.Answer[0].String())
	return strings.Join(append(f[:1:1], f[3:]...), " ")
}

// until asks until it is answered so, as it is when the lists have been compiled, and a few times more: cold, then
// warm, then hot.
func (h *hitter) until(t testing.TB, answer string) {
	t.Helper()
	for h.ask(t); !strings.HasPrefix(h.answer(t), answer); h.ask(t) {
	}
	for range 5 {
		h.ask(t)
	}
}

// serveOnLoopback runs a resolver on a real UDP socket, in front of the standard Internet on loopback, for strangers
// and for one user.
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
	listed, text := list(0, "||ads.example^\n*-tracker-*\n/^ad[0-9]+\\./\n@@||good.example^$important\n||x.example^$dnstype=TXT\n")
	putRecords(t, users, usercache.CatalogueKind, 0, map[string]proto.Message{
		"list/ads":      listed,
		"service/tv":    &userv1.Service{Number: 0, Rules: []string{"||tv.example^"}},
		"category/kids": &userv1.Category{Lists: []string{"ads"}},
	})
	putRecords(t, users, usercache.Users, 0, map[string]proto.Message{"u": &userv1.User{
		Settings: &userv1.Settings{Lists: strs("ads"), Services: strs("tv"), RebindingProtection: proto.Bool(true)},
		Rules:    &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte("||mine.example^\n@@||mine.example.org^\n")}},
		Devices:  []*userv1.Device{{Id: "d", Links: []string{"127.0.0.2"}}},
	}})
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	loopback := []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
	r, err := resolver.New(resolver.Options{
		Limits: limits, Users: users, Blob: func([32]byte) ([]byte, bool) { return text, true },
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
