package listen

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/listen/listentest"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

func TestReadProxy(t *testing.T) {
	v4 := listentest.ProxyHeader("192.0.2.7:4000", "198.51.100.1:53")
	edit := func(b []byte, f func(b []byte) []byte) []byte { return f(append([]byte(nil), b...)) }
	long := func(n int) []byte {
		return edit(v4, func(b []byte) []byte {
			binary.BigEndian.PutUint16(b[14:], uint16(n-16))
			return append(b, make([]byte, n-len(b))...)
		})
	}
	for _, c := range []struct {
		name   string
		b      []byte
		source string // "" if the header gives none
		n      int    // 0 if it is none
	}{
		{"IPv4", v4, "192.0.2.7:4000", len(v4)},
		{"and a query", append(v4[:len(v4):len(v4)], 1, 2, 3), "192.0.2.7:4000", len(v4)},
		{"IPv6", listentest.ProxyHeader("[2001:db8::1]:1", "[2001:db8::2]:2"), "[2001:db8::1]:1", 52},
		{"mapped", listentest.ProxyHeader("[::ffff:192.0.2.7]:1", "[::ffff:192.0.2.8]:2"), "192.0.2.7:1", 52},
		{"over UDP", edit(v4, func(b []byte) []byte { b[13] = 0x12; return b }), "192.0.2.7:4000", len(v4)},
		{"options", long(100), "192.0.2.7:4000", 100},
		{"longest", long(512), "192.0.2.7:4000", 512},
		{"LOCAL", edit(v4, func(b []byte) []byte { b[12] = 0x20; return b }), "", len(v4)},
		{"unspecified family", edit(v4, func(b []byte) []byte { b[13] = 0; return b }), "", len(v4)},
		{"too long", long(513), "", 0},
		{"cut off", v4[:len(v4)-1], "", 0},
		{"fixed part cut off", v4[:15], "", 0},
		{"empty", nil, "", 0},
		{"version 1", []byte("PROXY TCP4 192.0.2.7 198.51.100.1 4000 53\r\n"), "", 0},
		{"version 3", edit(v4, func(b []byte) []byte { b[12] = 0x31; return b }), "", 0},
		{"unknown command", edit(v4, func(b []byte) []byte { b[12] = 0x22; return b }), "", 0},
		{"unknown transport", edit(v4, func(b []byte) []byte { b[13] = 0x13; return b }), "", 0},
		{"LOCAL with anything", edit(v4, func(b []byte) []byte { b[12], b[13] = 0x20, 0xff; return b }), "", len(v4)},
		{"unix sockets", edit(v4, func(b []byte) []byte { b[13] = 0x31; return b }), "", 0},
		{"too short for its addresses", edit(v4, func(b []byte) []byte { b[15] = 11; return b }), "", 0},
	} {
		p, n, err := ReadProxy(c.b)
		source := ""
		if p.Source.IsValid() {
			source = p.Source.String()
		}
		if source != c.source || n != c.n || (err == nil) != (c.n > 0) {
			t.Errorf("%s: %v, %d, %v; want %q, %d", c.name, p, n, err, c.source, c.n)
		}
	}
}

func FuzzReadProxy(f *testing.F) {
	f.Add(listentest.ProxyHeader("192.0.2.7:4000", "198.51.100.1:53"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, n, err := ReadProxy(b); n > len(b) || n > maxProxy || (err == nil) != (n >= proxyFixed) {
			t.Errorf("%d of %d bytes, %v", n, len(b), err)
		}
	})
}

// stalled is a listener of connections from a proxy that sends no header.
type stalled struct {
	net.Listener
	left int
}

func (l *stalled) Accept() (net.Conn, error) {
	if l.left--; l.left < 0 {
		return nil, net.ErrClosed
	}
	c, _ := net.Pipe()
	return c, nil
}

func TestProxiesThatSendNoHeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &Acceptor{
			Listener: &stalled{left: maxHeaders + 5}, Gate: NewConnections(1, 1), Counters: new(Counters),
			FromProxy: func(netip.Addr) bool { return true },
			Serve:     func(net.Conn, netip.AddrPort, netip.AddrPort) { t.Error("one was served") },
		}
		start := time.Now()
		if err := a.Run(t.Context()); err != nil {
			t.Error(err)
		}
		a.Wait()
		c := a.Counters
		if full, bad := c.Refused[query.RefuseConnections].Load(), c.Malformed.Load(); full != 5 || bad != maxHeaders || time.Since(start) != proxyWait {
			t.Errorf("%d too many, %d without header after %v", full, bad, time.Since(start))
		}
	})
}

// failing is a listener that returns the given errors and then, for ever, the last.
type failing struct {
	net.Listener
	errs []error
}

func (l *failing) Accept() (net.Conn, error) {
	err := l.errs[0]
	if len(l.errs) > 1 {
		l.errs = l.errs[1:]
	}
	return nil, err
}

func TestAcceptErrors(t *testing.T) {
	broken := errors.New("broken")
	for _, c := range []struct {
		errs []error
		want error
		took time.Duration
	}{
		{[]error{net.ErrClosed}, nil, 0},
		// Out of descriptors for a while is no end, however long it lasts: 5, 10, … 640 ms, then 1 s each.
		{[]error{syscall.EMFILE, syscall.ENFILE, net.ErrClosed}, nil, 15 * time.Millisecond},
		{append(repeat(os.NewSyscallError("accept4", syscall.EMFILE), 10), net.ErrClosed), nil, 1275*time.Millisecond + 2*time.Second},
		{[]error{broken}, broken, 1275 * time.Millisecond},
	} {
		synctest.Test(t, func(t *testing.T) {
			a := &Acceptor{Listener: &failing{errs: c.errs}, Gate: NewConnections(1, 1), Counters: new(Counters)}
			start := time.Now()
			err := a.Run(context.Background())
			if d := time.Since(start); err != c.want || d != c.took {
				t.Errorf("%v: %v after %v, want %v after %v", c.errs, err, d, c.want, c.took)
			}
		})
	}
}

func repeat(err error, n int) (all []error) {
	for range n {
		all = append(all, err)
	}
	return all
}

func TestOpenUDP(t *testing.T) {
	conns, err := OpenUDP(t.Context(), netip.MustParseAddrPort("127.0.0.1:0"), 2)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range conns {
		defer c.Close()
		if c.LocalAddr().String() != conns[0].LocalAddr().String() {
			t.Errorf("%v and %v", c.LocalAddr(), conns[0].LocalAddr())
		}
	}
	if _, err := OpenUDP(t.Context(), netip.MustParseAddrPort("192.0.2.1:0"), 2); err == nil {
		t.Error("an address that is not ours was bound")
	}
}
