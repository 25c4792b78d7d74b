package tcp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/listen"
	"github.com/sluice-dns/sluice/resolver/internal/listen/listentest"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/simnet"
)

// A rig is a running server and a way to connect to it.
type rig struct {
	*Server
	dial func() net.Conn
	stop func() error // ends the context and returns what Serve returned
}

// real runs f over sockets.
func real(t *testing.T, o Options, f func(t *testing.T, r rig)) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o.Listener = l
	r := serve(t, o)
	r.dial = func() net.Conn {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(20 * time.Second))
		t.Cleanup(func() { c.Close() })
		return c
	}
	f(t, r)
	if err := r.stop(); err != nil {
		t.Error(err)
	}
}

var serverAddr = netip.MustParseAddrPort("192.0.2.53:53")

// simulated runs f in a bubble over a network in memory.
func simulated(t *testing.T, o Options, f func(t *testing.T, r rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := simnet.New()
		l, err := n.ListenTCP(serverAddr)
		if err != nil {
			t.Fatal(err)
		}
		o.Listener = l
		r := serve(t, o)
		r.dial = func() net.Conn {
			c, err := n.DialTCP(t.Context(), netip.AddrPort{}, serverAddr)
			if err != nil {
				t.Fatal(err)
			}
			return c
		}
		f(t, r)
		if err := r.stop(); err != nil {
			t.Error(err)
		}
		n.Close()
	})
}

func serve(t *testing.T, o Options) rig {
	if o.Handler == nil {
		o.Handler = new(listentest.Handler)
	}
	s := New(o)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx) }()
	return rig{Server: s, stop: sync.OnceValue(func() error { cancel(); return <-done })}
}

// both runs a test over sockets and in memory: the two ways of reading.
func both(t *testing.T, o func() Options, f func(t *testing.T, r rig)) {
	t.Run("sockets", func(t *testing.T) { real(t, o(), f) })
	t.Run("memory", func(t *testing.T) { simulated(t, o(), f) })
}

func frames(msgs ...[]byte) []byte {
	var b []byte
	for _, m := range msgs {
		b = appendFrame(b, m)
	}
	return b
}

func readFrame(t *testing.T, c net.Conn) []byte {
	t.Helper()
	var n [2]byte
	if _, err := io.ReadFull(c, n[:]); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, binary.BigEndian.Uint16(n[:]))
	if _, err := io.ReadFull(c, b); err != nil {
		t.Fatal(err)
	}
	return b
}

func write(t *testing.T, c net.Conn, b []byte) {
	t.Helper()
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
}

// expectEnd checks that the server ends the connection, cleanly or by a reset, without sending anything.
func expectEnd(t *testing.T, c net.Conn) {
	t.Helper()
	n, err := c.Read(make([]byte, 1))
	if n != 0 || err != io.EOF && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %d bytes, %v; want the connection to end", n, err)
	}
}

func options() Options { return Options{} }

func TestOneQuery(t *testing.T) {
	h := new(listentest.Handler)
	both(t, func() Options { return Options{Handler: h, ListenerID: 5} }, func(t *testing.T, r rig) {
		c := r.dial()
		write(t, c, frames(listentest.Query(7, "hit.example.")))
		if m := readFrame(t, c); dnswire.Uint16(m) != 7 || string(m[13:16]) != "hit" {
			t.Errorf("hit: %x", m)
		}
		write(t, c, frames(listentest.Query(8, "miss.example.")))
		if m := readFrame(t, c); dnswire.Uint16(m) != 8 {
			t.Errorf("miss: %x", m)
		}
		q := h.Last()
		if q.Transport != query.TCP || q.Listener != 5 || q.Source != listen.AddrPort(c.LocalAddr()) || q.Local != listen.AddrPort(c.RemoteAddr()) || q.Arrived == 0 {
			t.Errorf("query %+v", q)
		}
		write(t, c, frames([]byte{0, 9, 1, 0, 0, 9, 0, 0, 0, 0, 0, 0}))
		if m := readFrame(t, c); dnswire.ReadHeader(m).RCode() != dnswire.RCodeFormErr {
			t.Errorf("fault: %x", m)
		}
		write(t, c, frames(listentest.Query(10, "big.example.")))
		if m := readFrame(t, c); len(m) < listentest.Big {
			t.Errorf("big: %d bytes", len(m))
		}
		c.Close()
	})
}

func TestByteAtATime(t *testing.T) {
	both(t, options, func(t *testing.T, r rig) {
		c := r.dial()
		for _, b := range frames(listentest.Query(1, "hit.example."), listentest.Query(2, "miss.example."), listentest.Query(3, "hit.example.")) {
			write(t, c, []byte{b})
		}
		got := map[uint16]bool{}
		for range 3 {
			got[dnswire.Uint16(readFrame(t, c))] = true
		}
		if !got[1] || !got[2] || !got[3] {
			t.Errorf("answers to %v", got)
		}
		c.Close()
	})
}

// A message that lies across the end of the buffer, many times.
func TestManyPipelined(t *testing.T) {
	both(t, options, func(t *testing.T, r rig) {
		c := r.dial()
		const n = 3000
		go func() {
			var b []byte
			for i := range uint16(n) {
				name := "hit.example."
				switch i % 7 {
				case 0:
					name = "miss.example."
				case 1:
					name = "hit.0123456789.0123456789.0123456789.0123456789.0123456789.example."
				}
				b = append(b, frames(listentest.Query(i, name))...)
			}
			c.Write(b)
		}()
		seen := make([]bool, n)
		for range n {
			id := dnswire.Uint16(readFrame(t, c))
			if seen[id] {
				t.Fatalf("%d was answered twice", id)
			}
			seen[id] = true
		}
		c.Close()
	})
}

func TestOutOfOrder(t *testing.T) {
	resolving := make(chan func(), 10)
	h := &listentest.Handler{OnResolve: func(_ *query.Query, answer func()) { resolving <- answer }}
	real(t, Options{Handler: h}, func(t *testing.T, r rig) {
		c := r.dial()
		write(t, c, frames(listentest.Query(1, "miss.example."), listentest.Query(2, "miss.example."), listentest.Query(3, "hit.example.")))
		if id := dnswire.Uint16(readFrame(t, c)); id != 3 {
			t.Errorf("%d before the hit", id)
		}
		first, second := <-resolving, <-resolving
		second()
		if id := dnswire.Uint16(readFrame(t, c)); id != 2 {
			t.Errorf("%d before the one that was ready", id)
		}
		first()
		if id := dnswire.Uint16(readFrame(t, c)); id != 1 {
			t.Errorf("got %d", id)
		}
	})
}

// No more than Depth queries of a connection are resolved at a time, and the depth can be changed.
func TestDepth(t *testing.T) {
	depth := new(atomic.Int64)
	depth.Store(2)
	resolving := make(chan func(), 100)
	h := &listentest.Handler{OnResolve: func(_ *query.Query, answer func()) { resolving <- answer }}
	real(t, Options{Handler: h, Depth: depth}, func(t *testing.T, r rig) {
		c := r.dial()
		var b []byte
		for i := range uint16(20) {
			b = append(b, frames(listentest.Query(i, "miss.example."))...)
		}
		write(t, c, b)
		// step answers one of those under way, and waits until there are want of them again.
		var under []func()
		step := func(want int) {
			t.Helper()
			if len(under) > 0 {
				under[0]()
				under = under[1:]
				readFrame(t, c)
			}
			for len(under) < want {
				under = append(under, <-resolving)
			}
			// A query too many would have been begun by who began these; it gets the chance to come.
			for range 100 {
				runtime.Gosched()
			}
			if n := len(under) + len(resolving); n != want {
				t.Errorf("%d at a time, want %d", n, want)
			}
		}
		for range 10 {
			step(2)
		}
		depth.Store(5)
		for range 6 {
			step(5)
		}
		for n := 4; n >= 0; n-- { // there are no more
			step(n)
		}
	})
}

func TestHalfClose(t *testing.T) {
	resolving := make(chan func(), 1)
	h := &listentest.Handler{OnResolve: func(_ *query.Query, answer func()) { resolving <- answer }}
	real(t, Options{Handler: h}, func(t *testing.T, r rig) {
		c := r.dial()
		write(t, c, append(frames(listentest.Query(1, "miss.example."), listentest.Query(2, "hit.example.")), 0, 40, 1)) // and a piece of one
		c.(*net.TCPConn).CloseWrite()
		if id := dnswire.Uint16(readFrame(t, c)); id != 2 {
			t.Errorf("got %d", id)
		}
		(<-resolving)()
		if id := dnswire.Uint16(readFrame(t, c)); id != 1 {
			t.Errorf("got %d", id)
		}
		expectEnd(t, c)
	})
}

func TestHostileFrames(t *testing.T) {
	response := listentest.Query(1, "hit.example.")
	response[2] |= 0x80
	for name, b := range map[string][]byte{
		"empty":          {0, 0},
		"short":          frames([]byte("12345678901")),
		"too long":       {MaxQuery >> 8, MaxQuery&0xff + 1},
		"longest":        {0xff, 0xff},
		"a response":     frames(response),
		"an HTTP client": []byte("GET / HTTP/1.1\r\n\r\n"),
	} {
		both(t, options, func(t *testing.T, r rig) {
			c := r.dial()
			write(t, c, b)
			expectEnd(t, c)
			if n := r.Counters().Malformed.Load(); n != 1 {
				t.Errorf("%s: %d counted as malformed, want 1", name, n)
			}
			c.Close()
		})
	}
}

func TestTimeouts(t *testing.T) {
	query1 := frames(listentest.Query(1, "hit.example."))
	slow := &listentest.Handler{OnResolve: func(_ *query.Query, answer func()) { time.AfterFunc(25*time.Second, answer) }}
	for _, c := range []struct {
		name    string
		handler *listentest.Handler
		do      func(t *testing.T, c net.Conn) // at once
		share   float64
		want    time.Duration // until the connection ends
	}{
		{"not a byte", nil, func(*testing.T, net.Conn) {}, 0, FirstByte},
		{"one byte", nil, func(t *testing.T, c net.Conn) { write(t, c, []byte{0}) }, 0, Frame},
		{"slow loris", nil, func(t *testing.T, c net.Conn) {
			for _, b := range query1[:8] {
				write(t, c, []byte{b})
				time.Sleep(100 * time.Millisecond)
			}
		}, 0, Frame},
		{"idle", nil, func(t *testing.T, c net.Conn) { write(t, c, query1); readFrame(t, c) }, 0, Idle},
		{"idle under load", nil, func(t *testing.T, c net.Conn) { write(t, c, query1); readFrame(t, c) }, 1, Idle / 10},
		{"then a piece", nil, func(t *testing.T, c net.Conn) {
			write(t, c, append(query1[:len(query1):len(query1)], 0, 33, 1))
			readFrame(t, c)
		}, 0, Frame},
		// Not idle while something is being resolved: the answer comes at 25 s, and the next look is at 30 s.
		{"waiting for an answer", slow, func(t *testing.T, c net.Conn) {
			write(t, c, frames(listentest.Query(1, "miss.example.")))
			readFrame(t, c)
		}, 0, 3 * Idle},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := Options{Gate: share(c.share)}
			if c.handler != nil {
				o.Handler = c.handler
			}
			simulated(t, o, func(t *testing.T, r rig) {
				conn := r.dial()
				start := time.Now()
				c.do(t, conn)
				expectEnd(t, conn)
				if d := time.Since(start); d != c.want {
					t.Errorf("ended after %v, want %v", d, c.want)
				}
				if r.Counters().TimedOut.Load() != 1 {
					t.Error("not counted")
				}
				conn.Close()
			})
		})
	}
}

type share float64

func (share) Enter(netip.Addr) query.RefuseReason { return query.NotRefused }
func (share) Leave(netip.Addr)                    {}
func (s share) Share() float64                    { return float64(s) }

// A client that pipelines and never reads must not hold the server's memory, and is closed.
func TestPeerThatDoesNotRead(t *testing.T) {
	for _, name := range []string{"hit.example.", "miss.example.", "big.example."} {
		h := new(listentest.Handler)
		simulated(t, Options{Handler: h}, func(t *testing.T, r rig) {
			c := r.dial()
			start := time.Now()
			var err error
			for i := 0; err == nil && i < 100000; i++ {
				_, err = c.Write(frames(listentest.Query(uint16(i), name)))
			}
			if d := time.Since(start); err == nil || d != WriteBlocked {
				t.Errorf("%s: %v after %v, want to be closed after %v", name, err, d, WriteBlocked)
			}
			if n := h.Hits.Load() + h.Resolved.Load(); n > 10000 {
				t.Errorf("%s: %d queries were answered to a peer that does not read", name, n)
			}
			if r.Counters().TimedOut.Load() == 0 {
				t.Errorf("%s: not counted", name)
			}
			c.Close()
		})
	}
}

// largest resolves every "miss" to the largest answer there can be.
type largest struct{ listentest.Handler }

func (h *largest) Resolve(_ *query.Query, reply func([]byte)) {
	reply(make([]byte, dnswire.MaxMessage))
}

// Answers that clients do not read are bounded over all connections, whether they were answered inline or
// resolved; clients that read, and those that ask little, do not suffer from those that do not.
func TestUnreadAnswersAreBounded(t *testing.T) {
	for _, label := range []string{"miss.example.", "big.example."} {
		unread := listen.NewUnread(256 << 10)
		simulated(t, Options{Handler: new(largest), Unread: unread}, func(t *testing.T, r rig) {
			const clients = 30
			var queries [][]byte
			for i := range 40 {
				queries = append(queries, listentest.Query(uint16(i), label))
			}
			var conns []net.Conn
			for range clients {
				c := r.dial()
				write(t, c, frames(queries...))
				conns = append(conns, c)
			}
			synctest.Wait()
			held := 0
			for _, c := range r.all() {
				c.mu.Lock()
				held += len(c.queue)
				c.mu.Unlock()
			}
			// What one connection may hold regardless: less than writeSize, and one answer or batch more.
			if most := 256<<10 + clients*(2*writeSize+dnswire.MaxMessage); held > most || unread.Bytes() > int64(most) {
				t.Errorf("%s: %d bytes in queues, %d counted, of at most %d", label, held, unread.Bytes(), most)
			}
			// Who is answered inline waits for its own writes, and is no danger.
			if cut := r.Counters().TimedOut.Load() != 0; cut != (label[0] == 'm') {
				t.Errorf("%s: clients were cut off: %v", label, cut)
			}
			good := r.dial()
			for i := range 40 {
				write(t, good, frames(listentest.Query(uint16(i), "hit.example.")))
				readFrame(t, good)
			}
			big := r.dial()
			write(t, big, frames(listentest.Query(1, "miss.example.")))
			readFrame(t, big)
			for _, c := range append(conns, good, big) {
				c.Close()
			}
			synctest.Wait()
			if n := unread.Bytes(); n != 0 {
				t.Errorf("%s: %d bytes are held by nobody", label, n)
			}
		})
	}
}

func TestConnectionLimits(t *testing.T) {
	g := listen.NewConnections(3, 2)
	real(t, Options{Gate: g}, func(t *testing.T, r rig) {
		ask := func(c net.Conn) {
			t.Helper()
			write(t, c, frames(listentest.Query(1, "hit.example.")))
			readFrame(t, c)
		}
		dial := func(ip string) (net.Conn, error) {
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}
			c, err := d.Dial("tcp", r.Addr().String())
			if err == nil {
				t.Cleanup(func() { c.Close() })
				c.SetDeadline(time.Now().Add(20 * time.Second))
			}
			return c, err
		}
		from := func(ip string) net.Conn {
			t.Helper()
			c, err := dial(ip)
			if err != nil {
				t.Fatal(err)
			}
			return c
		}
		refused := func(ip string) {
			t.Helper()
			c, err := dial(ip)
			if errors.Is(err, syscall.ECONNRESET) {
				return // before connecting had even returned
			}
			expectEnd(t, c)
		}
		a, b := from("127.0.0.1"), from("127.0.0.1")
		ask(a)
		ask(b)
		refused("127.0.0.1") // the source has its share
		ask(from("127.0.0.2"))
		refused("127.0.0.3") // full
		if n := r.Counters().Refused[query.RefuseConnections].Load(); n != 2 {
			t.Errorf("%d refused, want 2", n)
		}
		if n := r.Counters().Active.Load(); n != 3 {
			t.Errorf("%d active, want 3", n)
		}
		g.Max.Store(4) // while it runs
		ask(from("127.0.0.3"))
	})
	if g.Share() != 0 {
		t.Errorf("share %v after all have left", g.Share())
	}
}

func TestProxy(t *testing.T) {
	h := new(listentest.Handler)
	g := listen.NewConnections(10, 1)
	real(t, Options{Handler: h, Gate: g, FromProxy: func(a netip.Addr) bool { return a.IsLoopback() }}, func(t *testing.T, r rig) {
		q := frames(listentest.Query(1, "miss.example."))
		for _, client := range []string{"192.0.2.7:4000", "192.0.2.8:4000"} {
			c := r.dial()
			for _, b := range append(listentest.ProxyHeader(client, "198.51.100.1:53"), q...) {
				write(t, c, []byte{b})
			}
			readFrame(t, c)
			if last := h.Last(); last.Source.String() != client || last.Local.String() != "198.51.100.1:53" {
				t.Errorf("source %v, local %v", last.Source, last.Local)
			}
		}
		again := r.dial()
		write(t, again, listentest.ProxyHeader("192.0.2.7:4001", "198.51.100.1:53"))
		expectEnd(t, again) // the client has its share, though the proxy has not
		without := r.dial()
		write(t, without, q)
		expectEnd(t, without)
		if n := r.Counters().Malformed.Load(); n != 1 {
			t.Errorf("%d malformed, want 1", n)
		}
	})
}

func TestGate(t *testing.T) {
	g := listen.NewConnections(10, 1)
	g.Exempt = func(a netip.Addr) bool { return a.IsLoopback() }
	for _, c := range []struct {
		source string
		ok     bool
	}{
		{"192.0.2.1", true}, {"192.0.2.1", false}, {"::ffff:192.0.2.1", false}, {"192.0.2.2", true},
		{"2001:db8::1", true}, {"2001:db8::2", false}, {"2001:db8:0:1::1", true}, {"::1", true}, {"::1", true},
	} {
		if got := g.Enter(netip.MustParseAddr(c.source)) == query.NotRefused; got != c.ok {
			t.Errorf("%s: %v", c.source, got)
		}
	}
	g.Leave(netip.MustParseAddr("192.0.2.1"))
	if g.Enter(netip.MustParseAddr("192.0.2.1")) != query.NotRefused {
		t.Error("a place that was left is not free")
	}
}

func TestDrain(t *testing.T) {
	resolving := make(chan func(), 1)
	h := &listentest.Handler{OnResolve: func(_ *query.Query, answer func()) { resolving <- answer }}
	both(t, func() Options { return Options{Handler: h} }, func(t *testing.T, r rig) {
		idle, busy := r.dial(), r.dial()
		write(t, idle, frames(listentest.Query(1, "hit.example.")))
		readFrame(t, idle)
		write(t, busy, frames(listentest.Query(2, "miss.example.")))
		answer := <-resolving
		ended := make(chan error)
		go func() { ended <- r.stop() }()
		expectEnd(t, idle)
		idle.Close()
		answer()
		if id := dnswire.Uint16(readFrame(t, busy)); id != 2 {
			t.Errorf("got %d", id)
		}
		expectEnd(t, busy)
		busy.Close()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestDrainIsBounded(t *testing.T) {
	var answer func()
	h := &listentest.Handler{OnResolve: func(_ *query.Query, a func()) { answer = a }}
	simulated(t, Options{Handler: h, Drain: 2 * time.Second}, func(t *testing.T, r rig) {
		c := r.dial()
		write(t, c, frames(listentest.Query(1, "miss.example.")))
		synctest.Wait()
		start := time.Now()
		r.stop()
		if d := time.Since(start); d != 2*time.Second {
			t.Errorf("ended after %v, want 2s", d)
		}
		answer() // to nobody
		c.Close()
	})
}

func TestCloseEndsAll(t *testing.T) {
	h := &listentest.Handler{OnResolve: func(*query.Query, func()) {}}
	both(t, func() Options { return Options{Handler: h} }, func(t *testing.T, r rig) {
		c := r.dial()
		write(t, c, frames(listentest.Query(1, "hit.example."), listentest.Query(2, "miss.example.")))
		readFrame(t, c)
		r.Close()
		expectEnd(t, c)
		c.Close()
	})
}

// A listener that fails ends the server, connections included, and the error says so.
func TestListenerThatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := net.Pipe()
		broken := errors.New("broken")
		h := &listentest.Handler{OnResolve: func(*query.Query, func()) {}}
		s := New(Options{Handler: h, Listener: &oneConn{conn: b, err: broken}})
		done := make(chan error)
		go func() { done <- s.Serve(context.Background()) }()
		write(t, a, frames(listentest.Query(1, "miss.example."))) // never answered
		if err := <-done; err != broken {
			t.Errorf("got %v", err)
		}
		if _, err := a.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("the connection: %v", err)
		}
	})
}

// oneConn is a listener that has one connection and then fails.
type oneConn struct {
	net.Listener
	conn net.Conn
	err  error
}

func (l *oneConn) Accept() (net.Conn, error) {
	c := l.conn
	l.conn = nil
	if c == nil {
		return nil, l.err
	}
	return c, nil
}

func (l *oneConn) Close() error { return nil }

// An idle connection holds no buffer.
func TestIdleConnectionsHoldNoBuffer(t *testing.T) {
	simulated(t, Options{}, func(t *testing.T, r rig) {
		c := r.dial()
		write(t, c, frames(listentest.Query(1, "hit.example.")))
		readFrame(t, c)
		synctest.Wait()
		for _, c := range r.all() {
			if c.in != nil || c.queue != nil {
				t.Error("a buffer is held")
			}
		}
		c.Close()
	})
}

func FuzzFrames(f *testing.F) {
	f.Add(frames(listentest.Query(1, "hit.example."), listentest.Query(2, "miss.example.")), uint8(5))
	f.Add([]byte{0, 0}, uint8(1))
	f.Add([]byte{0xff, 0xff, 1}, uint8(1))
	f.Fuzz(func(t *testing.T, in []byte, cut uint8) {
		// Whatever the pieces, the outcome is that of the whole.
		want, wantErr := split(in, len(in)+1)
		got, err := split(in, int(cut)+1)
		if !bytes.Equal(bytes.Join(got, nil), bytes.Join(want, nil)) || (err == nil) != (wantErr == nil) {
			t.Errorf("%x in pieces of %d: %x, %v; whole: %x, %v", in, cut+1, got, err, want, wantErr)
		}
	})
}

func split(in []byte, piece int) (out [][]byte, err error) {
	var b []byte
	for len(in) > 0 {
		n := min(piece, len(in))
		b, in = append(b, in[:n]...), in[n:]
		for {
			m, err := nextFrame(b)
			if err != nil {
				return out, err
			}
			if m == nil {
				break
			}
			out = append(out, m)
			b = b[2+len(m):]
		}
	}
	return out, nil
}

// FuzzServer feeds any bytes to a whole server, which must survive and let go of the connection.
func FuzzServer(f *testing.F) {
	f.Add(frames(listentest.Query(1, "hit.example."), listentest.Query(2, "miss.example."), listentest.Query(2, "lost.example.")))
	f.Add([]byte{0, 12, 0})
	f.Fuzz(func(t *testing.T, in []byte) {
		s := New(Options{Handler: new(listentest.Handler), Listener: closedListener{}})
		a, b := net.Pipe()
		go func() { a.Write(in); a.Close() }()
		go io.Copy(io.Discard, a)
		s.serve(b, netip.AddrPort{}, netip.AddrPort{})
		b.Close()
		if len(s.conns) != 0 {
			t.Error("the connection is still registered")
		}
	})
}

type closedListener struct{ net.Listener }
