package simnet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

var (
	server = netip.MustParseAddrPort("192.0.2.53:53")
	other  = netip.MustParseAddrPort("192.0.2.54:53")
)

// bubble runs f on a fresh network and checks that closing the network leaves nothing behind.
func bubble(t *testing.T, f func(*testing.T, *Network)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := New()
		defer n.Close()
		f(t, n)
		n.Close()
		if open := n.Open(); open != 0 {
			t.Errorf("%d endpoints still open", open)
		}
	})
}

func listen(t *testing.T, n *Network, at netip.AddrPort) *PacketConn {
	c, err := n.ListenUDP(at)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func dial(t *testing.T, n *Network, to netip.AddrPort) *PacketConn {
	c, err := n.DialUDP(netip.AddrPort{}, to)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// read returns what one Read gave, in words.
func read(r io.Reader) string {
	buf := make([]byte, 64)
	n, err := r.Read(buf)
	return words(string(buf[:n]), err)
}

func words(s string, err error) string {
	switch {
	case err == nil:
		return s
	case errors.Is(err, os.ErrDeadlineExceeded):
		return "deadline"
	case errors.Is(err, net.ErrClosed):
		return "closed"
	case err == io.EOF:
		return "end"
	case errors.Is(err, syscall.ECONNRESET):
		return "reset"
	case errors.Is(err, syscall.EPIPE):
		return "broken pipe"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case errors.Is(err, syscall.ETIMEDOUT):
		return "timed out"
	case errors.Is(err, context.DeadlineExceeded):
		return "context"
	}
	return err.Error()
}

func expect(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %q, want %q", what, got, want)
	}
}

// at checks the time since start, exactly.
func at(t *testing.T, start time.Time, want time.Duration) {
	t.Helper()
	if d := time.Since(start); d != want {
		t.Errorf("at %v, want %v", d, want)
	}
}

func TestDatagrams(t *testing.T) {
	bubble(t, func(t *testing.T, n *Network) {
		delays := map[netip.AddrPort]time.Duration{server: 30 * time.Millisecond}
		n.Link = func(from, to netip.AddrPort) (time.Duration, bool) {
			return delays[from] + delays[to], to == other
		}
		s, c := listen(t, n, server), dial(t, n, server)
		start := time.Now()

		c.Write([]byte("query"))
		buf := make([]byte, 64)
		size, from, err := s.ReadFromUDPAddrPort(buf)
		expect(t, "server", words(string(buf[:size]), err), "query")
		at(t, start, 30*time.Millisecond)
		if want := c.LocalAddr().(*net.UDPAddr).AddrPort(); from != want {
			t.Errorf("from %v, want %v", from, want)
		}
		s.WriteToUDPAddrPort([]byte("answer"), from)
		expect(t, "client", read(c), "answer")
		at(t, start, 60*time.Millisecond)

		// An endpoint takes nothing but what its peer sends; a deadline is exact; it can be lifted.
		stranger := listen(t, n, netip.MustParseAddrPort("192.0.2.99:53"))
		stranger.WriteTo([]byte("spoof"), c.LocalAddr())
		c.SetReadDeadline(time.Now().Add(time.Second))
		expect(t, "client", read(c), "deadline")
		at(t, start, 1060*time.Millisecond)
		c.SetReadDeadline(time.Time{})

		// With the peer's address, anything can be put in front of it, in the order of arrival.
		if !n.Inject(server, from, []byte("late"), 20*time.Millisecond) || !n.Inject(server, from, []byte("early"), 10*time.Millisecond) {
			t.Error("injection was not taken")
		}
		if n.Inject(other, from, []byte("x"), 0) || n.Inject(server, other, []byte("x"), 0) {
			t.Error("injection was taken that nobody reads")
		}
		expect(t, "client", read(c), "early")
		expect(t, "client", read(c), "late")

		// Lost, addressed to nobody, longer than the buffer.
		lost := listen(t, n, other)
		stranger.WriteToUDPAddrPort([]byte("x"), other)
		stranger.WriteToUDPAddrPort([]byte("x"), netip.MustParseAddrPort("192.0.2.77:53"))
		lost.SetReadDeadline(time.Now().Add(time.Hour))
		expect(t, "lost", read(lost), "deadline")
		s.WriteToUDPAddrPort(bytes.Repeat([]byte("y"), 100), from)
		expect(t, "long", read(c), strings.Repeat("y", 64))

		if _, err := c.Write(make([]byte, 70000)); !errors.Is(err, syscall.EMSGSIZE) {
			t.Errorf("giant datagram: %v", err)
		}
	})
}

func TestWatch(t *testing.T) {
	bubble(t, func(t *testing.T, n *Network) {
		var seen []string
		n.Watch = func(from, to netip.AddrPort, p []byte) {
			seen = append(seen, string(p))
			if to == server { // a spoofer on the path is faster than the server
				n.Inject(to, from, []byte("forged"), 0)
			}
		}
		listen(t, n, server)
		c := dial(t, n, server)
		c.Write([]byte("query"))
		expect(t, "client", read(c), "forged")
		expect(t, "seen", strings.Join(seen, ","), "query")
	})
}

func TestQueueIsBounded(t *testing.T) {
	bubble(t, func(t *testing.T, n *Network) {
		s, c := listen(t, n, server), dial(t, n, server)
		for i := range queueLimit + 10 {
			fmt.Fprint(c, i)
		}
		s.SetReadDeadline(time.Now().Add(time.Second))
		got := 0
		for read(s) == fmt.Sprint(got) {
			got++
		}
		if got != queueLimit {
			t.Errorf("%d datagrams in order, want %d", got, queueLimit)
		}
	})
}

func TestCloseWakes(t *testing.T) {
	bubble(t, func(t *testing.T, n *Network) {
		u := listen(t, n, server)
		l, err := n.ListenTCP(server)
		if err != nil {
			t.Fatal(err)
		}
		reader, _ := pair(t, n, l)
		_, writer := pair(t, n, l)
		results := make(chan string, 4)
		go func() { results <- "udp " + read(u) }()
		go func() { _, err := l.Accept(); results <- "accept " + words("", err) }()
		go func() { results <- "tcp " + read(reader) }()
		go func() {
			_, err := writer.Write(make([]byte, 10*window))
			results <- "write " + words("", err)
		}()
		synctest.Wait()
		select {
		case r := <-results:
			t.Errorf("%s before anything was closed", r)
		default:
		}
		for _, c := range []struct {
			io.Closer
			want string
		}{{u, "udp closed"}, {l, "accept closed"}, {reader, "tcp closed"}, {writer, "write closed"}} {
			expect(t, "close", words("", c.Close()), "")
			expect(t, "result", <-results, c.want)
			expect(t, "second close", words("", c.Close()), "closed")
		}
		// The address is free again.
		listen(t, n, server)
		if _, err := n.ListenTCP(server); err != nil {
			t.Error(err)
		}
	})
}

func pair(t *testing.T, n *Network, l *Listener) (near, far *Conn) {
	t.Helper()
	near, err := n.DialTCP(context.Background(), netip.AddrPort{}, l.addr)
	if err != nil {
		t.Fatal(err)
	}
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return near, c.(*Conn)
}

func TestStream(t *testing.T) {
	bubble(t, func(t *testing.T, n *Network) {
		n.Link = func(from, to netip.AddrPort) (time.Duration, bool) { return 10 * time.Millisecond, false }
		l, err := n.ListenTCP(server)
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		near, far := pair(t, n, l)
		at(t, start, 20*time.Millisecond) // one round trip

		near.Write([]byte("one"))
		near.Write([]byte("two"))
		expect(t, "far", read(far), "one")
		at(t, start, 30*time.Millisecond)
		buf := make([]byte, 2)
		io.ReadFull(far, buf)
		expect(t, "far", string(buf)+read(far), "two")

		// What was written before closing arrives; then the end, as often as one asks.
		near.Write([]byte("last"))
		near.Close()
		expect(t, "far", read(far), "last")
		expect(t, "far", read(far), "end")
		expect(t, "far", read(far), "end")
		_, err = far.Write([]byte("x"))
		expect(t, "writing to a closed peer", words("", err), "broken pipe")

		// A reset overtakes nothing, but it is no end.
		near, far = pair(t, n, l)
		far.SetLinger(0)
		far.Close()
		expect(t, "near", read(near), "reset")
		if open := n.Open(); open != 3 { // the listener and an end of each connection
			t.Errorf("%d open, want 3", open)
		}
	})
}

func TestWindow(t *testing.T) {
	bubble(t, func(t *testing.T, n *Network) {
		l, err := n.ListenTCP(server)
		if err != nil {
			t.Fatal(err)
		}
		near, far := pair(t, n, l)
		near.SetWriteDeadline(time.Now().Add(time.Second))
		start := time.Now()
		size, err := near.Write(make([]byte, 2*window))
		expect(t, "nobody reads", words("", err), "deadline")
		at(t, start, time.Second)
		if size != window {
			t.Errorf("%d bytes written, want %d", size, window)
		}
		// A reader makes room.
		near.SetWriteDeadline(time.Time{})
		text := bytes.Repeat([]byte("0123456789"), 50_000)
		go func() {
			near.Write(text)
			near.Close()
		}()
		all, err := io.ReadAll(far)
		if err != nil || !bytes.Equal(all[window:], text) {
			t.Errorf("%d bytes and %v, want %d", len(all), err, window+len(text))
		}
	})
}

func TestDialing(t *testing.T) {
	bubble(t, func(t *testing.T, n *Network) {
		dead, tries := false, 0
		n.Link = func(from, to netip.AddrPort) (time.Duration, bool) {
			if to == other {
				tries++
			}
			return 10 * time.Millisecond, dead || to == other && tries < 3
		}
		dial := func(ctx context.Context, to netip.AddrPort) string {
			c, err := n.DialTCP(ctx, netip.AddrPort{}, to)
			if err == nil {
				c.Close()
			}
			return words("connected", err)
		}
		ctx := context.Background()

		start := time.Now()
		expect(t, "nobody listens", dial(ctx, server), "refused")
		at(t, start, 20*time.Millisecond)

		if _, err := n.ListenTCP(other); err != nil {
			t.Fatal(err)
		}
		start = time.Now()
		expect(t, "two losses", dial(ctx, other), "connected")
		at(t, start, 3020*time.Millisecond) // 1 s and 2 s until the packet is sent again

		dead = true
		start = time.Now()
		expect(t, "dead", dial(ctx, server), "timed out")
		at(t, start, 63*time.Second)
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		start = time.Now()
		expect(t, "dead, with a context", dial(ctx, server), "context")
		at(t, start, time.Second)
	})
}

// TestBrokenLink: a connection whose packets are all lost breaks, and says so.
func TestBrokenLink(t *testing.T) {
	bubble(t, func(t *testing.T, n *Network) {
		lost := 0
		n.Link = func(from, to netip.AddrPort) (time.Duration, bool) { lost--; return 0, lost >= 0 }
		l, err := n.ListenTCP(server)
		if err != nil {
			t.Fatal(err)
		}
		near, far := pair(t, n, l)
		start := time.Now()
		lost = 2
		near.Write([]byte("one"))
		near.Write([]byte("two"))
		expect(t, "after two losses", read(far), "one")
		at(t, start, 600*time.Millisecond)
		expect(t, "in order", read(far), "two")
		lost = 1000
		_, err = near.Write([]byte("three"))
		expect(t, "broken", words("", err), "timed out")
	})
}

func TestAddresses(t *testing.T) {
	bubble(t, func(t *testing.T, n *Network) {
		listen(t, n, server)
		if _, err := n.ListenUDP(server); !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("second endpoint at one address: %v", err)
		}
		for _, bad := range []netip.AddrPort{{}, netip.MustParseAddrPort("0.0.0.0:53"), netip.MustParseAddrPort("[::]:53")} {
			if _, err := n.ListenUDP(bad); err == nil {
				t.Errorf("listened at %v", bad)
			}
		}
		seen := map[string]bool{}
		for range 100 {
			c := dial(t, n, server)
			seen[c.LocalAddr().String()] = true
		}
		if len(seen) != 100 {
			t.Errorf("%d different ports for 100 endpoints", len(seen))
		}
		six, err := n.Dial(context.Background(), "udp", "[2001:db8::1]:53")
		if err != nil || !strings.HasPrefix(six.LocalAddr().String(), "[fd00::1]:") {
			t.Errorf("%v %v", six, err)
		}
		if _, err := n.Dial(context.Background(), "sctp", "192.0.2.1:53"); err == nil {
			t.Error("dialed sctp")
		}
		n.Close()
		if _, err := n.ListenUDP(other); !errors.Is(err, net.ErrClosed) {
			t.Errorf("a closed network opens endpoints: %v", err)
		}
	})
}
