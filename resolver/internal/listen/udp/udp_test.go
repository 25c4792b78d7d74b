package udp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/listen"
	"github.com/sluice-dns/sluice/resolver/internal/listen/listentest"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/simnet"
)

// start serves conns until the test ends and returns the server and what ends it.
func start(t *testing.T, h *listentest.Handler, o Options) (*Server, func() error) {
	t.Helper()
	o.Handler = h
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx) }()
	stop := sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	return s, stop
}

func bind(t *testing.T, at string) *net.UDPConn {
	t.Helper()
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(at)))
	if err != nil {
		t.Skipf("%s: %v", at, err)
	}
	return c
}

func dial(t *testing.T, to net.Addr) *net.UDPConn {
	t.Helper()
	c, err := net.DialUDP("udp", nil, to.(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second))
	return c
}

func exchange(t *testing.T, c net.Conn, q []byte) []byte {
	t.Helper()
	if _, err := c.Write(q); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 65535)
	n, err := c.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return b[:n]
}

// plainConn hides the type of a *net.UDPConn, so that it is served one datagram at a time.
type plainConn struct{ *net.UDPConn }

// Both readers must do the same.
func TestServe(t *testing.T) {
	for _, reader := range []string{"mmsg", "plain"} {
		t.Run(reader, func(t *testing.T) {
			u := bind(t, "127.0.0.1:0")
			var pc net.PacketConn = u
			if reader == "plain" {
				pc = plainConn{u}
			}
			h := new(listentest.Handler)
			s, _ := start(t, h, Options{Conns: []net.PacketConn{pc}, ListenerID: 7})
			c := dial(t, u.LocalAddr())

			q := listentest.Query(1, "hit.Example.")
			if r := exchange(t, c, q); r[0] != 0 || r[1] != 1 || r[2]&0x80 == 0 || !bytes.Equal(r[12:len(q)], q[12:]) {
				t.Errorf("hit: %x", r)
			}
			if r := exchange(t, c, listentest.Query(2, "miss.example.")); r[1] != 2 || dnswire.ReadHeader(r).AN != 1 {
				t.Errorf("miss: %x", r)
			}
			last := h.Last()
			if last.Transport != query.UDP || last.Listener != 7 || last.Source != addrPort(c.LocalAddr()) || last.Local != addrPort(u.LocalAddr()) || last.Arrived == 0 {
				t.Errorf("query %+v", last)
			}
			if r := exchange(t, c, []byte{0, 3, 1, 0, 0, 9, 0, 0, 0, 0, 0, 0}); r[1] != 3 || dnswire.ReadHeader(r).RCode() != dnswire.RCodeFormErr {
				t.Errorf("fault: %x", r)
			}
			// None of these gets an answer; the hit after them does.
			long := append(listentest.Query(4, "hit.example."), make([]byte, MaxQuery)...)
			response := listentest.Query(5, "hit.example.")
			response[2] |= 0x80
			for _, b := range [][]byte{long, response, {1, 2, 3}, {}, listentest.Query(6, "drop.example."), listentest.Query(7, "lost.example.")} {
				if _, err := c.Write(b); err != nil {
					t.Fatal(err)
				}
			}
			if r := exchange(t, c, listentest.Query(8, "hit.example.")); r[1] != 8 {
				t.Errorf("want the answer to 8 alone, got %x", r)
			}
			if n := s.Counters().Long.Load(); n != 1 {
				t.Errorf("%d too long, want 1", n)
			}
			// An ICMP error of a response must not disturb the socket.
			gone := dial(t, u.LocalAddr())
			gone.Write(listentest.Query(9, "miss.example."))
			gone.Close()
			if r := exchange(t, c, listentest.Query(10, "hit.example.")); r[1] != 10 {
				t.Errorf("after an ICMP error: %x", r)
			}
		})
	}
}

func addrPort(a net.Addr) netip.AddrPort { return a.(*net.UDPAddr).AddrPort() }

// Many queries wait when the server starts: they arrive in full batches, and every one is answered once.
func TestBatches(t *testing.T) {
	u := bind(t, "127.0.0.1:0")
	u.SetReadBuffer(1 << 20)
	c := dial(t, u.LocalAddr())
	c.SetReadBuffer(1 << 20)
	const n = 100
	for i := range uint16(n) {
		name := "hit.example."
		if i%3 == 0 {
			name = "miss.example."
		}
		if _, err := c.Write(listentest.Query(i, name)); err != nil {
			t.Fatal(err)
		}
	}
	start(t, new(listentest.Handler), Options{Conns: []net.PacketConn{u}})
	var got []int
	b := make([]byte, 4096)
	for range n {
		if _, err := c.Read(b); err != nil {
			t.Fatal(err)
		}
		got = append(got, int(dnswire.Uint16(b)))
	}
	slices.Sort(got)
	for i := range n {
		if got[i] != i {
			t.Fatalf("answers to %v", got)
		}
	}
}

// Bound to the unspecified address, responses must leave from the address asked.
func TestWildcard(t *testing.T) {
	for _, c := range []struct{ bind, ask string }{
		{"0.0.0.0:0", "127.0.0.1"}, {"0.0.0.0:0", "127.1.2.3"}, {"[::]:0", "::1"}, {"[::]:0", "127.4.5.6"},
	} {
		network := "udp4"
		if c.bind[0] == '[' {
			network = "udp"
		}
		u, err := net.ListenUDP(network, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(c.bind)))
		if err != nil {
			t.Skip(err)
		}
		h := new(listentest.Handler)
		start(t, h, Options{Conns: []net.PacketConn{u}})
		at := netip.AddrPortFrom(netip.MustParseAddr(c.ask), addrPort(u.LocalAddr()).Port())
		conn := dial(t, net.UDPAddrFromAddrPort(at)) // connected: a response from elsewhere does not arrive
		for _, name := range []string{"hit.example.", "miss.example."} {
			if r := exchange(t, conn, listentest.Query(1, name)); r[1] != 1 {
				t.Errorf("%v: %x", c, r)
			}
		}
		if got := h.Last().Local; got != at {
			t.Errorf("%v: asked at %v, want %v", c, got, at)
		}
	}
}

func TestProxy(t *testing.T) {
	u := bind(t, "127.0.0.1:0")
	h := new(listentest.Handler)
	s, _ := start(t, h, Options{Conns: []net.PacketConn{u}, FromProxy: func(a netip.Addr) bool { return a == netip.MustParseAddr("127.0.0.1") }})
	c := dial(t, u.LocalAddr())
	q := listentest.Query(1, "miss.example.")
	header := listentest.ProxyHeader("192.0.2.7:4000", "198.51.100.1:53")
	c.Write(q) // without: dropped
	if r := exchange(t, c, append(header, q...)); r[1] != 1 {
		t.Errorf("%x", r)
	}
	if last := h.Last(); last.Source.String() != "192.0.2.7:4000" || last.Local.String() != "198.51.100.1:53" {
		t.Errorf("source %v, local %v", last.Source, last.Local)
	}
	if n := s.Counters().Proxy.Load(); n != 1 {
		t.Errorf("%d without header, want 1", n)
	}
}

func TestWorkersShareAnAddress(t *testing.T) {
	conns, err := listen.OpenUDP(t.Context(), netip.MustParseAddrPort("127.0.0.1:0"), 3)
	if err != nil {
		t.Fatal(err)
	}
	h := new(listentest.Handler)
	start(t, h, Options{Conns: conns})
	for i := range uint16(30) {
		c := dial(t, conns[2].LocalAddr())
		if r := exchange(t, c, listentest.Query(i, "miss.example.")); dnswire.Uint16(r) != i {
			t.Errorf("%x", r)
		}
	}
	if h.Resolved.Load() != 30 {
		t.Errorf("%d resolved", h.Resolved.Load())
	}
}

func TestOldQueriesAreDropped(t *testing.T) {
	u := bind(t, "127.0.0.1:0")
	s, err := New(Options{Conns: []net.PacketConn{u}, Handler: new(listentest.Handler)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	m := s.workers[0].sockets.(*mmsg)
	for _, c := range []struct {
		age  time.Duration
		want int
	}{{0, 2}, {MaxAge - time.Second/2, 2}, {MaxAge + time.Second/2, 0}, {-time.Hour, 2}} {
		m.ready()
		m.stamp(0, time.Now().Add(-c.age))
		for i := range 2 {
			m.in[i].n = uint32(copy(m.queries[i*stride:], listentest.Query(1, "hit.example.")))
		}
		m.gather(2)
		if s.workers[0].batch.received != c.want {
			t.Errorf("aged %v: %d kept, want %d", c.age, s.workers[0].batch.received, c.want)
		}
	}
	if a := s.QueueAge(); a < MaxAge || s.QueueAge() != 0 {
		t.Errorf("longest age %v", a)
	}
	if n := s.Counters().Old.Load(); n != 2 {
		t.Errorf("%d counted as old, want 2", n)
	}
}

// stamp writes the control message that the kernel would.
func (m *mmsg) stamp(i int, at time.Time) {
	h := m.ctl[i].header()
	h.Level, h.Type = unix.SOL_SOCKET, unix.SO_TIMESTAMPNS
	h.SetLen(headerSize + 16)
	ts := unix.NsecToTimespec(at.UnixNano())
	copy(m.ctl[i].b[headerSize:], (*[16]byte)(unsafePointer(&ts))[:])
	m.in[i].hdr.SetControllen(headerSize + 16)
}

// The kernel does stamp, and counts what a full queue lost.
func TestTheKernelTellsAgeAndLoss(t *testing.T) {
	u := bind(t, "127.0.0.1:0")
	u.SetReadBuffer(1) // the kernel's minimum: a few datagrams
	s, err := New(Options{Conns: []net.PacketConn{u}, Handler: new(listentest.Handler)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c := dial(t, u.LocalAddr())
	q := listentest.Query(1, "hit.example.")
	for range 50 {
		c.Write(q)
	}
	m := s.workers[0].sockets.(*mmsg)
	serve := func() (stamped bool) {
		m.raw.Control(func(fd uintptr) {
			m.ready()
			n, _, e := syscall.RawSyscall6(unix.SYS_RECVMMSG, fd, uintptr(unsafePointer(&m.in[0])), batchSize, unix.MSG_DONTWAIT, 0, 0)
			if e != 0 || n == 0 {
				t.Fatalf("%d datagrams, %v", n, e)
			}
			_, sent := m.readControl(0)
			stamped = sent != 0
		})
		return stamped
	}
	if !serve() {
		t.Error("no timestamp")
	}
	c.Write(q) // carries the count
	serve()
	if s.Counters().Overflow.Load() == 0 {
		t.Error("no loss was counted")
	}
}

func TestOwnAddressesAndPortZeroGetNoAnswer(t *testing.T) {
	h := new(listentest.Handler)
	s, err := New(Options{Conns: []net.PacketConn{bind(t, "127.0.0.1:0")}, Handler: h, Own: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.9:53")}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	w := s.workers[0]
	for _, c := range []struct {
		from string
		want int
	}{{"127.0.0.9:53", 0}, {"127.0.0.9:0", 0}, {w.local.String(), 0}, {"127.0.0.9:54", 1}, {"127.0.0.8:53", 1}} {
		w.batch.in[0] = datagram{data: listentest.Query(1, "hit.example."), from: netip.MustParseAddrPort(c.from)}
		w.batch.received = 1
		w.serveBatch(1)
		if w.batch.answers != c.want {
			t.Errorf("from %s: %d answers, want %d", c.from, w.batch.answers, c.want)
		}
	}
}

func TestServeBatchDoesNotAllocate(t *testing.T) {
	s, err := New(Options{Conns: []net.PacketConn{bind(t, "127.0.0.1:0")}, Handler: new(listentest.Handler)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	w := s.workers[0]
	for i := range batchSize {
		w.batch.in[i] = datagram{data: listentest.Query(uint16(i), "hit.example."), from: netip.MustParseAddrPort("192.0.2.1:4000"), local: w.local}
	}
	m := w.sockets.(*mmsg)
	if n := testing.AllocsPerRun(100, func() {
		w.batch.received = batchSize
		w.serveBatch(1)
		m.ready()
	}); n != 0 || w.batch.answers != batchSize {
		t.Errorf("%v allocations for %d answers", n, w.batch.answers)
	}
}

// The whole loop over a real socket, receiving and sending included.
func TestLoopDoesNotAllocate(t *testing.T) {
	u := bind(t, "127.0.0.1:0")
	h := new(listentest.Handler)
	s, err := New(Options{Conns: []net.PacketConn{u}, Handler: h})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c := dial(t, u.LocalAddr())
	q := listentest.Query(1, "hit.example.")
	m := s.workers[0].sockets.(*mmsg)
	b := make([]byte, 512)
	m.raw.Control(func(fd uintptr) {
		if n := testing.AllocsPerRun(50, func() {
			for range 4 {
				c.Write(q)
			}
			for m.once(fd) {
			}
			for range 4 {
				c.Read(b)
			}
		}); n != 0 {
			t.Errorf("%v allocations", n)
		}
	})
	if h.Hits.Load() < 200 {
		t.Errorf("%d hits", h.Hits.Load())
	}
}

func TestDrainWaitsForAnswers(t *testing.T) {
	for _, reader := range []string{"mmsg", "plain"} {
		u := bind(t, "127.0.0.1:0")
		var pc net.PacketConn = u
		if reader == "plain" {
			pc = plainConn{u}
		}
		resolving := make(chan func(), 1)
		h := &listentest.Handler{OnResolve: func(_ *query.Query, answer func()) { resolving <- answer }}
		_, stop := start(t, h, Options{Conns: []net.PacketConn{pc}})
		c := dial(t, u.LocalAddr())
		c.Write(listentest.Query(1, "miss.example."))
		answer := <-resolving
		ended := make(chan error, 1)
		go func() { ended <- stop() }()
		answer()
		b := make([]byte, 512)
		if _, err := c.Read(b); err != nil || b[1] != 1 {
			t.Errorf("%s: %v", reader, err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

func TestDrainIsBounded(t *testing.T) {
	u := bind(t, "127.0.0.1:0")
	resolving := make(chan func(), 1)
	h := &listentest.Handler{OnResolve: func(_ *query.Query, answer func()) { resolving <- answer }}
	s, stop := start(t, h, Options{Conns: []net.PacketConn{u}, Drain: time.Millisecond})
	c := dial(t, u.LocalAddr())
	c.Write(listentest.Query(1, "miss.example."))
	answer := <-resolving
	if err := stop(); err != nil {
		t.Error(err)
	}
	answer() // to nobody
	if s.Counters().Unsent.Load() != 1 {
		t.Error("a response over a closed socket was not counted")
	}
}

func TestInMemoryNetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := simnet.New()
		at := netip.MustParseAddrPort("192.0.2.53:53")
		pc, err := n.ListenUDP(at)
		if err != nil {
			t.Fatal(err)
		}
		h := &listentest.Handler{OnResolve: func(_ *query.Query, answer func()) { time.AfterFunc(2*time.Second, answer) }}
		_, stop := start(t, h, Options{Conns: []net.PacketConn{pc}})
		c, err := n.DialUDP(netip.AddrPort{}, at)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		for i, name := range []string{"hit.example.", "miss.example."} {
			if r := exchange(t, c, listentest.Query(uint16(i), name)); int(r[1]) != i {
				t.Errorf("%s: %x", name, r)
			}
		}
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
}

func TestNewNamesWhatItCannotServe(t *testing.T) {
	c, err := net.ListenPacket("unixgram", fmt.Sprintf("%s/s", t.TempDir()))
	if err != nil {
		t.Skip(err)
	}
	defer c.Close()
	if _, err := New(Options{Conns: []net.PacketConn{c}, Handler: new(listentest.Handler)}); err == nil {
		t.Error("a unix socket was accepted")
	}
}

// brokenConn fails for ever.
type brokenConn struct{ *net.UDPConn }

func (brokenConn) ReadFromUDPAddrPort([]byte) (int, netip.AddrPort, error) {
	return 0, netip.AddrPort{}, syscall.EIO
}

func TestASocketThatFailsForEverIsReported(t *testing.T) {
	good := bind(t, "127.0.0.1:0")
	s, err := New(Options{Conns: []net.PacketConn{good, brokenConn{bind(t, "127.0.0.1:0")}}, Handler: new(listentest.Handler)})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Serve(context.Background()); !errors.Is(err, syscall.EIO) {
		t.Errorf("got %v", err)
	}
	if _, err := good.Write(nil); !errors.Is(err, net.ErrClosed) {
		t.Error("the other socket is still open")
	}
}

func TestCloseIsNoFailure(t *testing.T) {
	a, b := bind(t, "127.0.0.1:0"), bind(t, "127.0.0.1:0")
	s, err := New(Options{Conns: []net.PacketConn{a, b}, Handler: new(listentest.Handler)})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(context.Background()) }()
	s.Close()
	if err := <-done; err != nil {
		t.Errorf("closing is no failure: %v", err)
	}
}
