package exchange

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// loopback starts s on real sockets at the given address and returns the one chosen.
func loopback(t *testing.T, s *auth, addr string, closeAfter int) netip.AddrPort {
	t.Helper()
	for {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Skipf("%s: %v", addr, err)
		}
		at := l.Addr().(*net.TCPAddr).AddrPort()
		pc, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		if err != nil { // the port is free over TCP alone
			l.Close()
			continue
		}
		go s.serveUDP(pc)
		go s.serveTCP(l, closeAfter)
		t.Cleanup(func() { pc.Close(); l.Close() })
		return at
	}
}

func newSockets(t *testing.T, o SocketOptions) *Exchange {
	t.Helper()
	tr, err := NewSockets(o)
	if err != nil {
		t.Fatal(err)
	}
	x := New(Options{Transport: tr})
	t.Cleanup(func() { x.Close() })
	return x
}

func askAt(server netip.AddrPort) query.Ask {
	a := ask()
	a.Server, a.Timeout = server, 5*time.Second
	return a
}

func TestSocketsReuseAndReplacePorts(t *testing.T) {
	// Ports are drawn, and two of them equal once in twenty thousand runs: what is wrong twice is wrong.
	wrong := reuseAndReplace(t)
	if wrong != "" {
		wrong = reuseAndReplace(t)
	}
	if wrong != "" {
		t.Error(wrong)
	}
}

// reuseAndReplace asks so often that a shard of one socket must have replaced it twice, and says what is wrong with
// the ports that were used.
func reuseAndReplace(t *testing.T) string {
	t.Helper()
	s := &auth{udp: once(plain), tcp: plain}
	x := newSockets(t, SocketOptions{Shard: 1})
	servers := []netip.AddrPort{loopback(t, s, "127.0.0.1:0", 0), loopback(t, s, "127.0.0.3:0", 0)}
	for i := range 3 * maxUses {
		r, err := x.Ask(t.Context(), tree(), askAt(servers[i%2]))
		if err != nil || r.TCP || r.RTT <= 0 {
			t.Fatalf("%+v, %v", r, err)
		}
	}
	ports := map[uint16]int{}
	from := s.sources()
	for _, f := range from {
		ports[f.Port()]++
	}
	if len(ports) < 2 || len(ports) > 4 {
		return fmt.Sprintf("%d ports for %d queries: %v", len(ports), len(from), ports)
	}
	for p, n := range ports {
		if p < 1024 || n > maxUses+1 {
			return fmt.Sprintf("port %d used %d times", p, n)
		}
	}
	return ""
}

func TestSocketsAreConcurrent(t *testing.T) {
	s := &auth{udp: once(plain), tcp: plain}
	x := newSockets(t, SocketOptions{Shard: 8})
	at := loopback(t, s, "127.0.0.1:0", 0)
	var wg sync.WaitGroup
	for i := range 40 { // more than the shard has
		wg.Go(func() {
			for j := range 20 {
				a := askAt(at)
				a.Type = uint16(1000 + i*20 + j)
				if _, err := x.Ask(t.Context(), tree(), a); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if n := x.Counters().Sent(); n < 800 {
		t.Errorf("%d sent, want at least 800", n)
	}
}

func TestSocketsSayWhenAServerIsUnreachable(t *testing.T) {
	x := newSockets(t, SocketOptions{})
	nobody := nobodys(t)
	for _, tcp := range []bool{false, true} {
		a := askAt(nobody)
		a.TCP = tcp
		if _, err := x.Ask(t.Context(), tree(), a); !errors.Is(err, query.ErrUnreachable) {
			t.Errorf("TCP %v: %v", tcp, err)
		}
	}
}

// nobodys returns a port at which nobody answers, and nobody else can begin to before the test has ended: it is taken,
// over UDP by a socket that hears another port alone, over TCP by one that does not listen.
func nobodys(t *testing.T) netip.AddrPort {
	t.Helper()
	for {
		c, err := net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 9})
		if err != nil {
			t.Fatal(err)
		}
		at := c.LocalAddr().(*net.UDPAddr).AddrPort()
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Bind(fd, sockaddr(at)); err != nil { // the port is free over UDP alone
			c.Close()
			unix.Close(fd)
			continue
		}
		t.Cleanup(func() { c.Close(); unix.Close(fd) })
		return at
	}
}

func TestSourceAddresses(t *testing.T) {
	s := &auth{udp: once(plain), tcp: plain}
	x := newSockets(t, SocketOptions{Sources: []netip.Addr{netip.MustParseAddr("127.0.0.7"), netip.MustParseAddr("127.0.0.8")}})
	at := loopback(t, s, "127.0.0.1:0", 0)
	for range 4 {
		if _, err := x.Ask(t.Context(), tree(), askAt(at)); err != nil {
			t.Fatal(err)
		}
	}
	from := s.sources()
	for _, f := range from {
		if f.Addr() != from[0].Addr() || f.Addr().As4()[3] < 7 {
			t.Errorf("asked from %v, before from %v", f, from[0])
		}
	}
	for _, bad := range []netip.Addr{{}, netip.MustParseAddr("0.0.0.0"), netip.MustParseAddr("ff02::1")} {
		if _, err := NewSockets(SocketOptions{Sources: []netip.Addr{bad}}); err == nil {
			t.Errorf("source %v was accepted", bad)
		}
	}
}

func TestIPv6(t *testing.T) {
	s := &auth{udp: once(plain), tcp: plain}
	x := newSockets(t, SocketOptions{})
	at := loopback(t, s, "[::1]:0", 0)
	for range 3 {
		if r, err := x.Ask(t.Context(), tree(), askAt(at)); err != nil || r.TCP {
			t.Fatalf("%+v, %v", r, err)
		}
	}
}

// What arrives at a socket between two uses must not meet the next query.
func TestStrayDatagramRetiresTheSocket(t *testing.T) {
	s := &auth{udp: func(q []byte) [][]byte { return [][]byte{plain(q), plain(q), plain(q)} }, tcp: plain}
	x := newSockets(t, SocketOptions{Shard: 1})
	at := loopback(t, s, "127.0.0.1:0", 0)
	for range 20 {
		r, err := x.Ask(t.Context(), tree(), askAt(at))
		if err != nil {
			t.Fatal(err)
		}
		// A duplicate may still come between the look and the next query; it then is a mismatch like any
		// other, and TCP answers.
		if r.TCP && !r.Mismatch {
			t.Errorf("%+v", r)
		}
	}
}

func TestServerClosesIdleStream(t *testing.T) {
	s := &auth{tcp: plain}
	x := newSockets(t, SocketOptions{})
	at := loopback(t, s, "127.0.0.1:0", 1)
	for range 3 {
		a := askAt(at)
		a.TCP = true
		tr := tree()
		if _, err := x.Ask(t.Context(), tr, a); err != nil {
			t.Fatal(err)
		}
	}
	if n := s.connections(); n != 3 {
		t.Errorf("%d connections, want 3", n)
	}
}

func TestCloseEndsTheExchange(t *testing.T) {
	s := &auth{udp: once(plain), tcp: plain}
	x := newSockets(t, SocketOptions{})
	at := loopback(t, s, "127.0.0.1:0", 0)
	if _, err := x.Ask(t.Context(), tree(), askAt(at)); err != nil {
		t.Fatal(err)
	}
	if err := x.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := x.Ask(t.Context(), tree(), askAt(at)); !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}

func BenchmarkSockets(b *testing.B) {
	pc, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		b.Fatal(err)
	}
	defer pc.Close()
	s := &auth{udp: once(plain)}
	go s.serveUDP(pc)
	tr, err := NewSockets(SocketOptions{})
	if err != nil {
		b.Fatal(err)
	}
	x := New(Options{Transport: tr})
	defer x.Close()
	a := askAt(pc.LocalAddr().(*net.UDPAddr).AddrPort())
	b.ReportAllocs()
	for b.Loop() {
		if _, err := x.Ask(b.Context(), tree(), a); err != nil {
			b.Fatal(err)
		}
	}
}

// B15: an answer right in all but the address it comes from is none, and is not even seen.
func TestAnswerFromAnotherAddress(t *testing.T) {
	pc, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	other, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 4)})
	if err != nil {
		t.Skipf("127.0.0.4: %v", err)
	}
	defer other.Close()
	go func() {
		b := make([]byte, 4096)
		for {
			n, from, err := pc.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			forged := plain(b[:n])
			forged[len(forged)-12] = 66 // the last octet of the address, before the OPT record
			other.WriteToUDPAddrPort(forged, from)
			pc.WriteToUDPAddrPort(plain(b[:n]), from)
		}
	}()
	x := newSockets(t, SocketOptions{Shard: 1})
	for range 5 {
		r, err := x.Ask(t.Context(), tree(), askAt(pc.LocalAddr().(*net.UDPAddr).AddrPort()))
		if err != nil || r.TCP || r.Mismatch || len(r.Message.Answer) != 1 || string(r.Message.Answer[0].First()) != "\xc0\x00\x02\x07" {
			t.Fatalf("%+v, %v", r, err)
		}
	}
}
