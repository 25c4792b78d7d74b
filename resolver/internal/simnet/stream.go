package simnet

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
)

const (
	window  = 64 << 10 // bytes that may be unread in one direction before writing blocks
	backlog = 128      // connections waiting to be accepted; more are refused

	// Retransmission as TCP does it: the first pause, doubled after every loss, and how many losses in a row
	// end a connection or an attempt to connect.
	synPause, dataPause = time.Second, 200 * time.Millisecond
	synTries, dataTries = 6, 8
)

// A Listener accepts TCP connections at one address.
type Listener struct {
	net     *Network
	addr    netip.AddrPort
	waiting chan *Conn
	done    chan struct{}
	once    sync.Once
}

// ListenTCP listens at local; port 0 chooses a free one.
func (n *Network) ListenTCP(local netip.AddrPort) (*Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	local, err := n.place("listen", local, netip.AddrPort{}, func(a netip.AddrPort) bool { return n.listening[a] != nil })
	if err != nil {
		return nil, err
	}
	l := &Listener{net: n, addr: local, waiting: make(chan *Conn, backlog), done: make(chan struct{})}
	n.listening[local] = l
	return l, nil
}

// Accept waits for a connection.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case <-l.done: // a closed listener accepts nothing, even if somebody waits
	default:
		select {
		case c := <-l.waiting:
			return c, nil
		case <-l.done:
		}
	}
	return nil, opError("accept", "tcp", nil, l.Addr(), net.ErrClosed)
}

// Addr returns a *net.TCPAddr.
func (l *Listener) Addr() net.Addr { return net.TCPAddrFromAddrPort(l.addr) }

// Close stops listening and resets the connections that nobody accepted.
func (l *Listener) Close() error {
	err := opError("close", "tcp", nil, l.Addr(), net.ErrClosed)
	l.once.Do(func() {
		err = nil
		l.net.mu.Lock() // from here on nobody joins the queue
		delete(l.net.listening, l.addr)
		l.net.mu.Unlock()
		close(l.done)
		for {
			select {
			case c := <-l.waiting:
				c.SetLinger(0)
				c.Close()
			default:
				return
			}
		}
	})
	return err
}

// A Conn is one end of a TCP connection. It is a net.Conn, safe for concurrent use.
type Conn struct {
	net           *Network
	local, remote netip.AddrPort
	in, out       *inbox // out is the peer's in

	linger atomic.Int64 // 0: Close resets

	writing sync.Mutex // serialises writers; held while a writer waits for room

	mu            sync.Mutex // guards everything below
	writeDeadline time.Time
	lastDue       clock.Instant // segments arrive in order
	broken        error         // set when retransmission gave up
}

// DialTCP connects to remote: one round trip, longer if Link loses packets. A zero local address means the
// network's default host, and port 0 a random port.
func (n *Network) DialTCP(ctx context.Context, local, remote netip.AddrPort) (*Conn, error) {
	fail := func(err error) (*Conn, error) {
		return nil, opError("dial", "tcp", nil, net.TCPAddrFromAddrPort(remote), err)
	}
	if err := ctx.Err(); err != nil {
		return fail(err)
	}
	n.mu.Lock()
	local, err := n.place("dial", local, remote, func(netip.AddrPort) bool { return false })
	n.mu.Unlock()
	if err != nil {
		return nil, err
	}
	there, reached := n.transit(local, remote, synPause, synTries)
	back, answered := time.Duration(0), false
	if reached {
		back, answered = n.transit(remote, local, synPause, synTries)
	}
	if d := there + back; d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return fail(ctx.Err())
		}
	}
	if !reached || !answered {
		return fail(syscall.ETIMEDOUT)
	}

	a, b := newInbox(), newInbox()
	near := &Conn{net: n, local: local, remote: remote, in: a, out: b}
	far := &Conn{net: n, local: remote, remote: local, in: b, out: a}
	near.linger.Store(-1)
	far.linger.Store(-1)
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.listening[remote]
	if l == nil || n.closed {
		return fail(syscall.ECONNREFUSED)
	}
	select {
	case l.waiting <- far:
		n.streams[near], n.streams[far] = struct{}{}, struct{}{}
		return near, nil
	default:
		return fail(syscall.ECONNREFUSED)
	}
}

// Dial has the form of net.Dialer.DialContext. The address is an IP address and a port.
func (n *Network) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Err: err}
	}
	switch network {
	case "udp", "udp4", "udp6":
		c, err := n.DialUDP(netip.AddrPort{}, to)
		if err != nil {
			return nil, err // a nil *PacketConn must not become a net.Conn
		}
		return c, nil
	case "tcp", "tcp4", "tcp6":
		c, err := n.DialTCP(ctx, netip.AddrPort{}, to)
		if err != nil {
			return nil, err
		}
		return c, nil
	}
	return nil, &net.OpError{Op: "dial", Net: network, Err: fmt.Errorf("simnet has udp and tcp, not %q", network)}
}

// transit returns how long one packet takes that is sent again after every loss, and whether it arrives.
func (n *Network) transit(from, to netip.AddrPort, pause time.Duration, tries int) (total time.Duration, arrives bool) {
	if n.Link == nil {
		return 0, true
	}
	for range tries {
		delay, lost := n.Link(from, to)
		if !lost {
			return total + delay, true
		}
		total += pause
		pause *= 2
	}
	return total, false
}

// Read waits for data.
func (c *Conn) Read(p []byte) (n int, err error) {
	if len(p) == 0 {
		return 0, nil
	}
	var end error
	err = c.in.take(func(s *parcel) bool {
		if s.end != nil {
			end = s.end
			return false
		}
		n = copy(p, s.data)
		s.data = s.data[n:]
		return len(s.data) == 0
	})
	switch {
	case end == io.EOF:
		return 0, io.EOF
	case end != nil:
		return 0, c.opError("read", end)
	case err != nil:
		return 0, c.opError("read", err)
	}
	return n, nil
}

// Write sends p. It waits while the peer leaves a window of 64 KiB unread.
func (c *Conn) Write(p []byte) (written int, err error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	for len(p) > 0 {
		n, err := c.writeSome(p)
		written += n
		if err != nil {
			return written, c.opError("write", err)
		}
		p = p[n:]
	}
	return written, nil
}

// writeSome sends what fits the window, waiting until something does.
func (c *Conn) writeSome(p []byte) (int, error) {
	for {
		// Taken before anything is looked at, so that no change after the look is missed.
		c.out.mu.Lock()
		changed := c.out.changed
		c.out.mu.Unlock()

		c.mu.Lock()
		deadline, broken := c.writeDeadline, c.broken
		c.mu.Unlock()
		if broken != nil {
			return 0, broken
		}
		left, err := untilDeadline(deadline)
		if err != nil {
			return 0, err
		}
		if err := c.in.isClosed(); err != nil {
			return 0, err // this end was closed
		}
		c.out.mu.Lock()
		room, gone := window-c.out.bytes, c.out.closed != nil
		c.out.mu.Unlock()
		switch {
		case gone:
			return 0, syscall.EPIPE
		case room > 0:
			n := min(len(p), room)
			return n, c.segment(parcel{data: append([]byte(nil), p[:n]...)})
		}
		await(changed, left)
	}
}

// segment puts s on its way, behind everything sent before.
func (c *Conn) segment(s parcel) error {
	delay, arrives := c.net.transit(c.local, c.remote, dataPause, dataTries)
	c.mu.Lock()
	if !arrives && c.broken == nil {
		c.broken = syscall.ETIMEDOUT
	}
	err := c.broken
	c.lastDue = max(c.lastDue, clock.Elapsed().Add(delay))
	s.due = c.lastDue
	c.mu.Unlock()
	if err == nil {
		c.out.put(s, 1<<30) // bounded in bytes by the window
	}
	return err
}

// Close sends what was written and then an end; a linger time of 0 makes it reset the connection instead.
func (c *Conn) Close() error {
	if !c.in.close(net.ErrClosed) {
		return c.opError("close", net.ErrClosed)
	}
	end := io.EOF
	if c.linger.Load() == 0 {
		end = syscall.ECONNRESET
	}
	c.segment(parcel{end: end})
	c.out.mu.Lock()
	c.out.wake() // a writer of this end may wait for room
	c.out.mu.Unlock()
	c.net.mu.Lock()
	delete(c.net.streams, c)
	c.net.mu.Unlock()
	return nil
}

// SetLinger works as on *net.TCPConn as far as it matters here: 0 makes Close reset the connection.
func (c *Conn) SetLinger(sec int) error { c.linger.Store(int64(sec)); return nil }

// LocalAddr returns a *net.TCPAddr.
func (c *Conn) LocalAddr() net.Addr { return net.TCPAddrFromAddrPort(c.local) }

// RemoteAddr returns a *net.TCPAddr.
func (c *Conn) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(c.remote) }

// SetDeadline sets both deadlines.
func (c *Conn) SetDeadline(t time.Time) error {
	c.SetReadDeadline(t)
	return c.SetWriteDeadline(t)
}

// SetReadDeadline sets the time after which Read fails with os.ErrDeadlineExceeded; zero means never.
func (c *Conn) SetReadDeadline(t time.Time) error { c.in.setDeadline(t); return nil }

// SetWriteDeadline sets the time after which Write fails with os.ErrDeadlineExceeded; zero means never.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	c.writeDeadline = t
	c.mu.Unlock()
	c.out.mu.Lock()
	c.out.wake()
	c.out.mu.Unlock()
	return nil
}

func (c *Conn) opError(op string, err error) error {
	return opError(op, "tcp", c.LocalAddr(), c.RemoteAddr(), err)
}

func (b *inbox) isClosed() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.closed
}

var (
	_ net.Conn       = (*Conn)(nil)
	_ net.Conn       = (*PacketConn)(nil)
	_ net.PacketConn = (*PacketConn)(nil)
	_ net.Listener   = (*Listener)(nil)
)
