package exchange

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/simnet"
)

var serverAddr = netip.MustParseAddrPort("192.0.2.1:53")

// An auth is an authoritative server made of functions. It counts what it receives.
type auth struct {
	udp func(q []byte) [][]byte // nil: silent
	tcp func(q []byte) []byte   // nil: does not listen

	mu         sync.Mutex
	nUDP, nTCP int
	conns      int
	from       []netip.AddrPort
}

func (s *auth) counts() (udp, tcp int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nUDP, s.nTCP
}

func (s *auth) sources() []netip.AddrPort {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.from)
}

func (s *auth) connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conns
}

type packetConn interface {
	ReadFromUDPAddrPort([]byte) (int, netip.AddrPort, error)
	WriteToUDPAddrPort([]byte, netip.AddrPort) (int, error)
}

func (s *auth) serveUDP(c packetConn) {
	b := make([]byte, 4096)
	for {
		n, from, err := c.ReadFromUDPAddrPort(b)
		if err != nil {
			return
		}
		s.mu.Lock()
		s.nUDP++
		s.from = append(s.from, from)
		s.mu.Unlock()
		if s.udp != nil {
			for _, r := range s.udp(bytes.Clone(b[:n])) {
				c.WriteToUDPAddrPort(r, from)
			}
		}
	}
}

func (s *auth) serveTCP(l net.Listener, closeAfter int) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		s.conns++
		s.mu.Unlock()
		go func() {
			defer c.Close()
			for i := 1; ; i++ {
				var l [2]byte
				if _, err := io.ReadFull(c, l[:]); err != nil {
					return
				}
				b := make([]byte, binary.BigEndian.Uint16(l[:]))
				if _, err := io.ReadFull(c, b); err != nil {
					return
				}
				s.mu.Lock()
				s.nTCP++
				s.mu.Unlock()
				r := s.tcp(b)
				if r == nil {
					continue
				}
				c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(r))), r...))
				if i == closeAfter {
					return
				}
			}
		}()
	}
}

// reply makes a response to q: its question, one A record, and an OPT with options if the query had one.
func reply(q []byte, options []byte) []byte {
	h := dnswire.ReadHeader(q)
	end := dnswire.PlainName(q, dnswire.HeaderLen) + 4
	r := append([]byte(nil), q[:end]...)
	r = append(r, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 7)
	out := dnswire.Header{ID: h.ID, Flags: dnswire.FlagQR | dnswire.FlagAA, QD: 1, AN: 1}
	if h.AR > 0 {
		out.AR = 1
		r = append(r, 0, 0, 41, 4, 0xd0, 0, 0, 0, 0, byte(len(options)>>8), byte(len(options)))
		r = append(r, options...)
	}
	out.Put(r)
	return r
}

func plain(q []byte) []byte { return reply(q, nil) }

func once(f func(q []byte) []byte) func([]byte) [][]byte {
	return func(q []byte) [][]byte { return [][]byte{f(q)} }
}

// cookieOf returns the COOKIE option of a query.
func cookieOf(q []byte) []byte {
	// A query is read as any message is.
	m, err := query.ReadMessage(q)
	if err != nil {
		panic(err)
	}
	return m.Cookie
}

// bubble runs f with an exchange that talks to s over a network in memory.
func bubble(t *testing.T, s *auth, o Options, f func(t *testing.T, x *Exchange, n *simnet.Network)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := simnet.New()
		n.Link = func(_, _ netip.AddrPort) (time.Duration, bool) { return 10 * time.Millisecond, false }
		pc, err := n.ListenUDP(serverAddr)
		if err != nil {
			t.Fatal(err)
		}
		go s.serveUDP(pc)
		if s.tcp != nil {
			l, err := n.ListenTCP(serverAddr)
			if err != nil {
				t.Fatal(err)
			}
			go s.serveTCP(l, 0)
		}
		o.Transport = Dialing(n.Dial)
		x := New(o)
		f(t, x, n)
		x.Close()
		n.Close()
	})
}

func tree() *query.Tree { return query.NewTree(clock.Elapsed(), query.Budget{}) }

func ask() query.Ask {
	return query.Ask{Server: serverAddr, Name: dnsname.MustParse("www.Example.com"), Type: dnswire.TypeA, Class: dnswire.ClassIN,
		DO: true, Case0x20: true, Timeout: 400 * time.Millisecond}
}

func TestAnswerOverUDP(t *testing.T) {
	var got []byte
	s := &auth{udp: once(func(q []byte) []byte { got = q; return plain(q) })}
	bubble(t, s, Options{}, func(t *testing.T, x *Exchange, _ *simnet.Network) {
		tr := tree()
		a := ask()
		a.RD, a.CD = true, true
		a.Subnet = query.Subnet{Family: 1, Bits: 20, Addr: [16]byte{198, 51, 96}}
		r, err := x.Ask(t.Context(), tr, a)
		if err != nil || len(r.Message.Answer) != 1 || r.TCP || r.Joined || r.RTT != 20*time.Millisecond {
			t.Fatalf("%+v, %v", r, err)
		}
		if r.HasScope {
			t.Error("a scope without an echo of the subnet")
		}
		if tr.Left() != 99 {
			t.Errorf("%d queries left, want 99", tr.Left())
		}
		m, err := query.ReadMessage(got)
		if err != nil {
			t.Fatal(err)
		}
		h := m.Header
		if !h.RD() || !h.CD() || h.Response() || m.UDPSize != 1232 || len(m.Cookie) != 8 || string(m.Subnet) != "\x00\x01\x14\x00\xc6\x33\x60" {
			t.Errorf("query %+v", m)
		}
		if string(m.QName) == string(a.Name) {
			t.Errorf("name %q keeps its case", m.QName) // 2^-13 by chance
		}
	})
}

func TestFlags(t *testing.T) {
	var got []byte
	s := &auth{udp: once(func(q []byte) []byte { got = q; return plain(q) })}
	bubble(t, s, Options{UDPSize: 1400}, func(t *testing.T, x *Exchange, _ *simnet.Network) {
		for _, c := range []struct {
			name string
			edit func(*query.Ask)
			ok   func(*query.Message) bool
		}{
			{"plain", func(*query.Ask) {}, func(m *query.Message) bool { return m.EDNS && m.UDPSize == 1400 && m.Cookie != nil }},
			{"NoEDNS", func(a *query.Ask) { a.NoEDNS = true }, func(m *query.Message) bool { return !m.EDNS && m.Header.AR == 0 }},
			{"NoOptions", func(a *query.Ask) { a.NoOptions = true }, func(m *query.Message) bool { return m.EDNS && m.Cookie == nil }},
			{"UDPSize", func(a *query.Ask) { a.UDPSize = 512 }, func(m *query.Message) bool { return m.UDPSize == 512 }},
			{"no 0x20", func(a *query.Ask) { a.Case0x20 = false }, func(m *query.Message) bool { return string(m.QName) == string(ask().Name) }},
		} {
			a := ask()
			c.edit(&a)
			if _, err := x.Ask(t.Context(), tree(), a); err != nil {
				t.Errorf("%s: %v", c.name, err)
				continue
			}
			if m, err := query.ReadMessage(got); err != nil || !c.ok(m) {
				t.Errorf("%s: sent %+v, %v", c.name, m, err)
			}
		}
	})
}

// Each of these arrives instead of, and before, the right response. TCP must be used and believed.
func TestMismatchGoesToTCP(t *testing.T) {
	edit := func(f func(r []byte) []byte) func([]byte) []byte { return func(q []byte) []byte { return f(plain(q)) } }
	for _, c := range []struct {
		name string
		bad  func(q []byte) []byte
	}{
		{"wrong ID", edit(func(r []byte) []byte { r[0] ^= 1; return r })},
		{"QR=0", edit(func(r []byte) []byte { r[2] &^= 0x80; return r })},
		{"opcode", edit(func(r []byte) []byte { r[2] |= 5 << 3; return r })},
		{"wrong name", edit(func(r []byte) []byte { r[13] ^= 1; return r })},
		{"longer name", edit(func(r []byte) []byte { r[12]++; return r })},
		{"wrong type", edit(func(r []byte) []byte { r[12+17+1] = 28; return r })},
		{"wrong class", edit(func(r []byte) []byte { r[12+17+3] = 3; return r })},
		{"no question", func(q []byte) []byte { return []byte{q[0], q[1], 0x80, 1, 0, 0, 0, 0, 0, 0, 0, 0} }},
		{"a spoofed answer without question", edit(func(r []byte) []byte { r[5] = 0; return append(r[:12], r[12+17+4:]...) })},
		{"cut off", edit(func(r []byte) []byte { return r[:len(r)-3] })},
		{"short", edit(func(r []byte) []byte { return r[:7] })},
		{"empty", edit(func(r []byte) []byte { return nil })},
		{"more than offered", edit(func(r []byte) []byte { return append(r, make([]byte, 1232)...) })},
		{"case lost", edit(func(r []byte) []byte { dnsname.Fold(r[12:29], r[12:29]); return r })},
		{"case lost over UDP alone", edit(func(r []byte) []byte { dnsname.Fold(r[12:29], r[12:29]); return r })},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &auth{
				udp: func(q []byte) [][]byte { return [][]byte{c.bad(q), plain(q)} },
				tcp: func(q []byte) []byte {
					r := plain(q)
					if c.name == "case lost" {
						dnsname.Fold(r[12:29], r[12:29])
					}
					r[len(r)-12] = 99
					return r
				},
			}
			bubble(t, s, Options{}, func(t *testing.T, x *Exchange, _ *simnet.Network) {
				tr := tree()
				r, err := x.Ask(t.Context(), tr, ask())
				if err != nil {
					t.Fatal(err)
				}
				if lost := c.name == "case lost"; !r.TCP || r.CaseLost != lost || r.Mismatch == lost || r.Truncated {
					t.Errorf("reply %+v", r)
				}
				if r.RTT != 20*time.Millisecond {
					t.Errorf("RTT %v, want that of TCP without the handshake", r.RTT)
				}
				if tr.Left() != 98 {
					t.Errorf("%d queries left, want 98", tr.Left())
				}
			})
		})
	}
}

func TestTruncatedGoesToTCP(t *testing.T) {
	tc := func(q []byte) []byte { r := plain(q); r[2] |= 2; return r }
	bubble(t, &auth{udp: once(tc), tcp: plain}, Options{}, func(t *testing.T, x *Exchange, _ *simnet.Network) {
		if r, err := x.Ask(t.Context(), tree(), ask()); err != nil || !r.Truncated || !r.TCP || r.Mismatch {
			t.Errorf("%+v, %v", r, err)
		}
	})
	bubble(t, &auth{udp: once(tc)}, Options{}, func(t *testing.T, x *Exchange, _ *simnet.Network) {
		if r, err := x.Ask(t.Context(), tree(), ask()); !errors.Is(err, query.ErrTruncated) || !r.Truncated || r.Message != nil {
			t.Errorf("TCP refused: %+v, %v", r, err)
		}
	})
}

// A spoofer must not be able to make a server without TCP look unreachable.
func TestMismatchNeverBlamesTheServer(t *testing.T) {
	bad := func(q []byte) []byte { r := plain(q); r[0] ^= 1; return r }
	bubble(t, &auth{udp: once(bad)}, Options{}, func(t *testing.T, x *Exchange, _ *simnet.Network) {
		r, err := x.Ask(t.Context(), tree(), ask())
		if !errors.Is(err, query.ErrTimeout) || errors.Is(err, query.ErrUnreachable) || !r.Mismatch {
			t.Errorf("%+v, %v", r, err)
		}
	})
}

func TestTimeouts(t *testing.T) {
	bubble(t, &auth{tcp: func([]byte) []byte { return nil }}, Options{}, func(t *testing.T, x *Exchange, n *simnet.Network) {
		open := n.Open()
		start := clock.Elapsed()
		took := func() time.Duration { d := clock.Elapsed().Sub(start); start = clock.Elapsed(); return d }

		_, err := x.Ask(t.Context(), tree(), ask())
		if d := took(); !errors.Is(err, query.ErrTimeout) || d != 400*time.Millisecond {
			t.Errorf("UDP: %v after %v", err, d)
		}
		a := ask()
		a.TCP = true
		_, err = x.Ask(t.Context(), tree(), a)
		if d := took(); !errors.Is(err, query.ErrTimeout) || d != 400*time.Millisecond {
			t.Errorf("TCP: %v after %v", err, d)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err = x.Ask(ctx, tree(), ask())
		if d := took(); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, query.ErrTimeout) || d != 50*time.Millisecond {
			t.Errorf("context: %v after %v", err, d)
		}
		tr := query.NewTree(clock.Elapsed(), query.Budget{Time: 30 * time.Millisecond})
		_, err = x.Ask(t.Context(), tr, ask())
		if d := took(); !errors.Is(err, query.ErrLimit) || d != 30*time.Millisecond {
			t.Errorf("tree: %v after %v", err, d)
		}
		synctest.Wait() // the server side sees the end of its connection
		if now := n.Open(); now > open {
			t.Errorf("%d endpoints left open", now-open)
		}
	})
}

// After UDP, TCP gets as much time again and at least a second.
func TestTimeoutOfTCPAfterUDP(t *testing.T) {
	s := &auth{udp: once(func(q []byte) []byte { r := plain(q); r[2] |= 2; return r }), tcp: func([]byte) []byte { return nil }}
	bubble(t, s, Options{}, func(t *testing.T, x *Exchange, _ *simnet.Network) {
		for _, c := range []struct{ timeout, want time.Duration }{{400 * time.Millisecond, 1020 * time.Millisecond}, {1500 * time.Millisecond, 1520 * time.Millisecond}} {
			start := clock.Elapsed()
			a := ask()
			a.Timeout = c.timeout
			_, err := x.Ask(t.Context(), tree(), a)
			if d := clock.Elapsed().Sub(start); !errors.Is(err, query.ErrTruncated) || !errors.Is(err, query.ErrTimeout) || d != c.want {
				t.Errorf("%v after %v, want %v", err, d, c.want)
			}
		}
	})
}

func TestBudget(t *testing.T) {
	s := &auth{udp: once(func(q []byte) []byte { r := plain(q); r[2] |= 2; return r }), tcp: plain}
	bubble(t, s, Options{}, func(t *testing.T, x *Exchange, _ *simnet.Network) {
		tr := query.NewTree(clock.Elapsed(), query.Budget{Queries: 1})
		if _, err := x.Ask(t.Context(), tr, ask()); !errors.Is(err, query.ErrLimit) {
			t.Error(err)
		}
		if _, err := x.Ask(t.Context(), tr, ask()); !errors.Is(err, query.ErrLimit) {
			t.Error(err)
		}
		if u, c := s.counts(); u != 1 || c != 0 {
			t.Errorf("%d over UDP and %d over TCP; want 1 and 0", u, c)
		}
	})
}

func TestIdenticalAsksShareOneExchange(t *testing.T) {
	s := &auth{udp: once(plain)}
	bubble(t, s, Options{}, func(t *testing.T, x *Exchange, _ *simnet.Network) {
		var wg sync.WaitGroup
		var mu sync.Mutex
		joined := 0
		for i := range 10 {
			wg.Go(func() {
				tr := tree()
				a := ask()
				a.Timeout += time.Duration(i) // not part of what is asked
				r, err := x.Ask(t.Context(), tr, a)
				if err != nil || tr.Left() != 99 {
					t.Errorf("%v, %d left", err, tr.Left())
				}
				mu.Lock()
				defer mu.Unlock()
				if r.Joined {
					joined++
				}
			})
		}
		wg.Wait()
		if u, _ := s.counts(); u != 1 || joined != 9 || x.Counters().Joined.Load() != 9 {
			t.Errorf("%d queries, %d joined; want 1 and 9", u, joined)
		}
		other := ask()
		other.Subnet = query.Subnet{Family: 1, Bits: 8, Addr: [16]byte{10}}
		wg.Go(func() { x.Ask(t.Context(), tree(), other) })
		wg.Go(func() { x.Ask(t.Context(), tree(), ask()) })
		wg.Wait()
		if u, _ := s.counts(); u != 3 {
			t.Errorf("%d queries; one with another subnet must not be shared", u)
		}
	})
}

func TestJoinerTakesOverFromALeaderThatGivesUp(t *testing.T) {
	for _, c := range []struct {
		name string
		lead func(x *Exchange)
	}{
		{"cancelled", func(x *Exchange) {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
			defer cancel()
			x.Ask(ctx, tree(), ask())
		}},
		{"out of time", func(x *Exchange) {
			x.Ask(context.Background(), query.NewTree(clock.Elapsed(), query.Budget{Time: 5 * time.Millisecond}), ask())
		}},
	} {
		s := &auth{udp: once(plain)}
		bubble(t, s, Options{}, func(t *testing.T, x *Exchange, _ *simnet.Network) {
			done := make(chan struct{})
			go func() { defer close(done); c.lead(x) }()
			synctest.Wait()
			tr := tree()
			r, err := x.Ask(t.Context(), tr, ask())
			if err != nil || r.Joined || tr.Left() != 98 {
				t.Errorf("%s: %+v, %v, %d left", c.name, r, err, tr.Left())
			}
			<-done
		})
	}
}

func TestInFlightLimit(t *testing.T) {
	s := &auth{}
	bubble(t, s, Options{InFlight: 3}, func(t *testing.T, x *Exchange, _ *simnet.Network) {
		var wg sync.WaitGroup
		for i := range 3 {
			a := ask()
			a.Type = uint16(100 + i)
			wg.Go(func() { x.Ask(t.Context(), tree(), a) })
		}
		synctest.Wait()
		if _, err := x.Ask(t.Context(), tree(), ask()); !errors.Is(err, query.ErrBusy) {
			t.Error(err)
		}
		a := ask()
		a.Server = netip.MustParseAddrPort("192.0.2.2:53")
		if _, err := x.Ask(t.Context(), tree(), a); !errors.Is(err, query.ErrTimeout) {
			t.Errorf("another server: %v", err)
		}
		wg.Wait()
		if _, err := x.Ask(t.Context(), tree(), ask()); !errors.Is(err, query.ErrTimeout) {
			t.Errorf("afterwards: %v", err)
		}
		if len(x.servers) != 0 || len(x.flights) != 0 {
			t.Errorf("%d servers and %d flights are left", len(x.servers), len(x.flights))
		}
	})
}

func TestCookies(t *testing.T) {
	var mode string // how the server behaves over UDP
	var sent []byte // the cookie it received last
	tcpCookies := true
	cookie := func(q []byte, client []byte, server string) []byte {
		return reply(q, dnswire.AppendOption(nil, dnswire.OptionCookie, append(bytes.Clone(client), server...)))
	}
	s := &auth{
		udp: once(func(q []byte) []byte {
			sent = cookieOf(q)
			switch mode {
			case "none":
				return plain(q)
			case "forged":
				return cookie(q, []byte("12345678"), "serverco")
			case "short":
				return cookie(q, sent[:8], "serv")
			case "bad":
				r := cookie(q, sent[:8], "newcooki")
				if string(sent[8:]) != "newcooki" {
					r[3] |= 7 // BADCOOKIE is 23: 7 here and 1 in OPT
					r[len(r)-20-6] = 1
				}
				return r
			case "always bad":
				r := cookie(q, sent[:8], "newcooki")
				r[3] |= 7
				r[len(r)-20-6] = 1
				return r
			}
			return cookie(q, sent[:8], "serverco")
		}),
		tcp: func(q []byte) []byte {
			if !tcpCookies {
				return plain(q)
			}
			return cookie(q, cookieOf(q)[:8], "overtcp!")
		},
	}
	bubble(t, s, Options{}, func(t *testing.T, x *Exchange, _ *simnet.Network) {
		for _, step := range []struct {
			mode       string
			tcpCookies bool
			wantSent   string // the server part in the (last) query over UDP
			wantTCP    bool
			queries    int
		}{
			{"none", true, "", false, 1},              // never had one: fine
			{"good", true, "", false, 1},              // learnt
			{"good", true, "serverco", false, 1},      // sent back
			{"none", true, "serverco", true, 2},       // must go on
			{"forged", true, "overtcp!", true, 2},     // not ours
			{"short", true, "overtcp!", true, 2},      // not a cookie
			{"bad", true, "newcooki", false, 2},       // once more with the new one
			{"always bad", true, "newcooki", true, 3}, // then TCP
			{"none", false, "overtcp!", true, 2},      // over TCP neither: it has stopped
			{"none", false, "", false, 1},
		} {
			mode, tcpCookies = step.mode, step.tcpCookies
			tr := tree()
			r, err := x.Ask(t.Context(), tr, ask())
			if err != nil || len(sent) < 8 || string(sent[8:]) != step.wantSent || r.TCP != step.wantTCP || r.Mismatch != step.wantTCP || tr.Left() != 100-step.queries {
				t.Errorf("%+v: sent %q, TCP %v, %d queries, %v", step, sent, r.TCP, 100-tr.Left(), err)
			}
		}
		a := ask()
		a.Server = netip.MustParseAddrPort("192.0.2.77:53")
		b := ask()
		if x.clientCookie(&a) == x.clientCookie(&b) {
			t.Error("two servers get the same client cookie")
		}
	})
}

func TestCookieMemoryIsBounded(t *testing.T) {
	x := New(Options{Transport: Dialing(nil), Servers: 8})
	for i := range 100 {
		key := ask()
		key.Server = netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 53)
		f, s, err := x.enter(key)
		if err != nil {
			t.Fatal(err)
		}
		s.cookie = []byte("serverco")
		x.leave(key, s, f)
	}
	if len(x.servers) != 8 {
		t.Errorf("%d servers remembered, want 8", len(x.servers))
	}
}

func TestSubnetEcho(t *testing.T) {
	sent := query.Subnet{Family: 1, Bits: 20, Addr: [16]byte{198, 51, 96}}
	for _, c := range []struct {
		echo  string
		scope uint8
		ok    bool
	}{
		{"\x00\x01\x14\x18\xc6\x33\x60", 24, true},
		{"\x00\x01\x14\x00\xc6\x33\x60", 0, true},
		{"\x00\x02\x14\x18\xc6\x33\x60", 0, false},
		{"\x00\x01\x18\x18\xc6\x33\x60", 0, false},
		{"\x00\x01\x14\x18\xc6\x33\x70", 0, false},
		{"\x00\x01\x14\x18\xc6\x33", 0, false},
		{"", 0, false},
	} {
		if got, ok := sent.Scope([]byte(c.echo)); got != c.scope || ok != c.ok {
			t.Errorf("%q: %d, %v", c.echo, got, ok)
		}
	}
	if _, ok := (query.Subnet{}).Scope([]byte("\x00\x00\x00\x00")); ok {
		t.Error("a scope for a subnet that was not sent")
	}
}

func TestStreamsAreReused(t *testing.T) {
	s := &auth{tcp: plain}
	bubble(t, s, Options{IdleStreams: 2}, func(t *testing.T, x *Exchange, n *simnet.Network) {
		a := ask()
		a.TCP = true
		get := func() {
			t.Helper()
			if r, err := x.Ask(t.Context(), tree(), a); err != nil || !r.TCP {
				t.Fatalf("%+v, %v", r, err)
			}
		}
		get()
		get()
		if s.connections() != 1 {
			t.Errorf("%d connections for two exchanges, want 1", s.connections())
		}
		time.Sleep(6 * time.Second)
		synctest.Wait()
		if x.idling != 0 || len(x.idle) != 0 {
			t.Errorf("%d connections idle for 6 s", x.idling)
		}
		get()
		if s.connections() != 2 {
			t.Errorf("%d connections, want a second after the first was idle for long", s.connections())
		}
		// More at once than are kept.
		var wg sync.WaitGroup
		for i := range 5 {
			a := a
			a.Type = uint16(100 + i)
			wg.Go(func() { x.Ask(t.Context(), tree(), a) })
		}
		wg.Wait()
		if x.idling != 2 {
			t.Errorf("%d connections idle, want 2", x.idling)
		}
	})
}

func TestResponsesOverTCP(t *testing.T) {
	formErr := func(q []byte) []byte { return []byte{q[0], q[1], 0x80, 1, 0, 0, 0, 0, 0, 0, 0, 0} }
	truncated := func(q []byte) []byte { r := plain(q); r[2] |= 2; return r }
	for _, c := range []struct {
		name string
		tcp  func(q []byte) []byte
		ok   bool
	}{
		{"TC=1", truncated, false},
		{"any letter case", func(q []byte) []byte { r := plain(q); r[13] = 'W'; return r }, true},
		{"FORMERR without question", formErr, true},
		{"NOERROR without question", func(q []byte) []byte { r := formErr(q); r[3] = 0; return r }, false},
		{"wrong ID", func(q []byte) []byte { r := plain(q); r[1] ^= 1; return r }, false},
		{"wrong name", func(q []byte) []byte { r := plain(q); r[13]++; return r }, false},
		{"garbage", func(q []byte) []byte { return []byte("garbage") }, false},
		{"empty", func(q []byte) []byte { return []byte{} }, false},
	} {
		bubble(t, &auth{tcp: c.tcp}, Options{}, func(t *testing.T, x *Exchange, _ *simnet.Network) {
			a := ask()
			a.TCP = true
			_, err := x.Ask(t.Context(), tree(), a)
			if c.ok != (err == nil) || !c.ok && !errors.Is(err, query.ErrMalformed) && !(c.name == "TC=1" && errors.Is(err, query.ErrTruncated)) {
				t.Errorf("%s: %v", c.name, err)
			}
			if !c.ok && x.idling != 0 {
				t.Errorf("%s: the connection is kept", c.name)
			}
		})
	}
}

func FuzzJudge(f *testing.F) {
	x := New(Options{Transport: Dialing(nil)})
	a := ask()
	a.UDPSize = 1232
	out := make([]byte, 512)
	s := new(server)
	_, n := x.write(out, &a, s, new(buffer), true)
	out = out[:n]
	out[0], out[1] = 0, 7
	f.Add(plain(out))
	f.Add(out)
	f.Add([]byte{0, 7, 0x80})
	f.Fuzz(func(t *testing.T, in []byte) {
		v, m := x.judge(in, out, 7, &a, s)
		if v == matched && (m == nil || m.Header.ID != 7 || string(m.QName) != string(out[12:12+len(a.Name)])) {
			t.Errorf("matched %x", in)
		}
		s.cookie = nil
	})
}
