package tcp

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/listen"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

const (
	bufferSize = 2 * (2 + MaxQuery)
	// writeSize is how many bytes of answers are gathered before they are written.
	writeSize = 16 << 10
	// maxQueued is how many bytes of answers may wait behind a write before nothing more is read.
	maxQueued = 64 << 10
)

// A conn is one connection. Its goroutine reads and answers inline; answers that were resolved come from any
// goroutine. Whoever finds that nobody writes becomes the writer until nothing is left to write.
type conn struct {
	s          *Server
	nc         net.Conn
	source     netip.AddrPort
	local      netip.AddrPort
	serverName string

	// Owned by the connection's goroutine.
	in       *[bufferSize]byte // nil while nothing is unread
	r, w     int               // in[r:w] is unread
	one      [1]byte
	raw      syscall.RawConn // of a TCP connection: read without holding a buffer while waiting
	recv     func(fd uintptr) bool
	recvN    int
	recvErr  syscall.Errno
	frameEnd clock.Instant // when the message begun must be complete; 0 if none has

	mu      sync.Mutex // guards everything below
	changed sync.Cond  // of any of it
	pending int        // queries being resolved
	writing bool       // someone writes
	queue   []byte     // framed answers to be written by them
	held    int        // bytes of the queue and of what is being written
	broken  bool       // writing failed or the connection was aborted
}

func newConn(s *Server, nc net.Conn, source, local netip.AddrPort) *conn {
	c := &conn{s: s, nc: nc, source: source, local: local}
	c.changed.L = &c.mu
	switch nc := nc.(type) {
	case *net.TCPConn:
		if raw, err := nc.SyscallConn(); err == nil {
			c.raw = raw
			c.recv = c.recvTCP
		}
	case *tls.Conn:
		c.serverName = listen.ServerName(nc)
	}
	return c
}

var errFrame = errors.New("not a query")

// run serves the connection until it ends.
func (c *conn) run() {
	defer c.releaseIn()
	err := c.fill(FirstByte)
	for err == nil {
		if err = c.answer(); err == nil {
			err = c.fill(c.s.idleFor())
		}
	}
	switch {
	case errors.Is(err, io.EOF):
		c.finish()
	case errors.Is(err, os.ErrDeadlineExceeded) && c.s.draining.Load():
		c.finish()
		c.linger()
	case errors.Is(err, os.ErrDeadlineExceeded):
		c.s.counters.TimedOut.Add(1)
		c.abort()
	case errors.Is(err, errFrame):
		c.s.counters.Malformed.Add(1)
		c.abort()
	default:
		c.abort()
	}
	c.finish() // nobody writes any more
}

// fill waits for more bytes, as long as that if no message has begun. While queries are being resolved the
// connection is not idle.
func (c *conn) fill(wait time.Duration) error {
	for {
		left := wait
		if c.frameEnd != 0 {
			left = c.frameEnd.Sub(clock.Elapsed())
		}
		if err := c.setReadDeadline(time.Now().Add(left)); err != nil {
			return err
		}
		err := c.read()
		if errors.Is(err, os.ErrDeadlineExceeded) && c.frameEnd == 0 && !c.s.draining.Load() && c.busy() {
			continue
		}
		return err
	}
}

// setReadDeadline does so unless the server drains: then the deadline has passed for good.
func (c *conn) setReadDeadline(t time.Time) error {
	if err := c.nc.SetReadDeadline(t); err != nil {
		return err
	}
	if c.s.draining.Load() {
		return os.ErrDeadlineExceeded
	}
	return nil
}

func (c *conn) busy() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pending > 0 || c.writing
}

func (c *conn) read() error {
	if c.raw != nil {
		if err := c.raw.Read(c.recv); err != nil {
			return err
		}
		switch {
		case c.recvErr != 0:
			return c.recvErr
		case c.recvN == 0:
			return io.EOF
		}
		c.w += c.recvN
		return nil
	}
	if c.in == nil {
		// Wait with room for one byte. What comes with it is in the TLS connection's own buffer by then.
		if _, err := io.ReadFull(c.nc, c.one[:]); err != nil {
			return err
		}
		c.in = c.s.buffers.Get().(*[bufferSize]byte)
		c.in[0] = c.one[0]
		c.w = 1
		c.frameEnd = clock.Elapsed().Add(Frame)
		if err := c.setReadDeadline(time.Now().Add(Frame)); err != nil {
			return err
		}
	}
	n, err := c.nc.Read(c.in[c.w:])
	c.w += n
	if n > 0 {
		return nil // an error comes back with the next read
	}
	return err
}

// recvTCP is the callback of RawConn.Read. The socket does not block, so RawSyscall will do.
func (c *conn) recvTCP(fd uintptr) bool {
	if c.in == nil {
		c.in = c.s.buffers.Get().(*[bufferSize]byte)
	}
	n, _, e := syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(&c.in[c.w])), uintptr(len(c.in)-c.w))
	if e == syscall.EAGAIN {
		if c.w == 0 {
			c.releaseIn()
		}
		return false
	}
	c.recvN, c.recvErr = int(n), e
	return true
}

func (c *conn) releaseIn() {
	if c.in != nil {
		c.s.buffers.Put(c.in)
		c.in = nil
	}
	c.r, c.w = 0, 0
}

// answer answers all whole messages that were read, and keeps what is left for the next fill.
func (c *conn) answer() error {
	for more := true; more; {
		if err := c.room(); err != nil {
			return err
		}
		var err error
		if more, err = c.answerSome(); err != nil {
			return err
		}
	}
	if c.r == c.w {
		c.releaseIn()
		c.frameEnd = 0
		return nil
	}
	if c.r > 0 || c.frameEnd == 0 { // another message has begun
		c.frameEnd = clock.Elapsed().Add(Frame)
	}
	c.w = copy(c.in[:], c.in[c.r:c.w])
	c.r = 0
	return nil
}

// room waits until another query may be resolved and answers do not pile up.
func (c *conn) room() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case c.broken:
			return net.ErrClosed
		case len(c.queue) < maxQueued && c.pending < int(max(c.s.opts.Depth.Load(), 1)):
			return nil
		}
		c.changed.Wait()
	}
}

// answerSome answers messages until none is whole, or enough is to be written or resolved for now: then more
// is true.
func (c *conn) answerSome() (more bool, err error) {
	var out *[]byte
	k := c.s.opts.Desks.Borrow()
	q := &k.Query
	q.Transport, q.Listener, q.Source, q.Local, q.ServerName = c.s.opts.Transport, c.s.opts.ListenerID, c.source, c.local, c.serverName
	q.PathDevice, q.AuthDevice, q.AuthSecret = "", "", ""
	q.Arrived = clock.Elapsed()
	for {
		frame, ferr := nextFrame(c.in[c.r:c.w])
		if frame == nil || ferr != nil {
			more, err = false, ferr
			break
		}
		c.r += 2 + len(frame)
		n, fault, resolve := k.Answer(frame)
		if fault == query.Ignore {
			err = errFrame // whoever sends this is not a stub resolver
			break
		}
		if n > 0 {
			if out == nil {
				out = c.s.outs.Get().(*[]byte)
			}
			*out = appendFrame(*out, k.Out[:n])
			if len(*out) >= writeSize {
				more = true
				break
			}
		}
		if resolve {
			full := c.begin()
			c.s.opts.Handler.Resolve(q.Own(), c.reply)
			if full {
				more = true
				break
			}
		}
	}
	c.s.opts.Desks.Return(k)
	if out != nil {
		c.send(*out)
		if cap(*out) <= 2*writeSize {
			*out = (*out)[:0]
			c.s.outs.Put(out)
		}
	}
	return more, err
}

// nextFrame returns the message at the start of b, nil if it is not complete yet, or an error if it can be
// none. A message has at least a header and at most MaxQuery bytes.
func nextFrame(b []byte) ([]byte, error) {
	if len(b) < 2 {
		return nil, nil
	}
	n := int(binary.BigEndian.Uint16(b))
	if n < 12 || n > MaxQuery {
		return nil, errFrame
	}
	if len(b) < 2+n {
		return nil, nil
	}
	return b[2 : 2+n : 2+n], nil
}

func appendFrame(b, msg []byte) []byte {
	b = binary.BigEndian.AppendUint16(b, uint16(len(msg)))
	return append(b, msg...)
}

// begin counts a query that will be resolved, and says whether it is the last for now.
func (c *conn) begin() (full bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pending++
	return c.pending >= int(c.s.opts.Depth.Load())
}

// reply takes the response to a query that was resolved.
func (c *conn) reply(response []byte) {
	if !c.take(response) {
		c.s.counters.TimedOut.Add(1)
		c.abort()
	}
}

// take puts a response into the queue and sees to it that somebody writes. It returns false if there is no
// room for it.
func (c *conn) take(response []byte) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pending--
	c.changed.Broadcast()
	if response == nil || c.broken {
		return true
	}
	if !c.hold(2 + len(response)) {
		return false
	}
	c.queue = appendFrame(c.queue, response)
	if !c.writing {
		// Writing may block, and whoever resolved the query has other things to do. More answers may join
		// the queue until the goroutine runs.
		c.writing = true
		go c.writeQueue()
	}
	return true
}

// hold counts n bytes of answers more. It refuses if all connections hold too many and this one's client is
// among those who do not read; others go on. c.mu is held.
func (c *conn) hold(n int) bool {
	if !c.s.opts.Unread.Add(n) && c.held >= writeSize {
		c.s.opts.Unread.Add(-n)
		return false
	}
	c.held += n
	return true
}

// letGo counts n bytes less. c.mu is held.
func (c *conn) letGo(n int) {
	c.held -= n
	c.s.opts.Unread.Add(-n)
}

// send writes framed answers, or lets the present writer do it.
func (c *conn) send(b []byte) {
	c.mu.Lock()
	room := c.broken || c.hold(len(b))
	if c.broken || !room || c.writing {
		if !c.broken && room {
			c.queue = append(c.queue, b...)
		}
		c.mu.Unlock()
		if !room {
			c.s.counters.TimedOut.Add(1)
			c.abort()
		}
		return
	}
	c.writing = true
	c.mu.Unlock()
	c.write(b)
	c.mu.Lock()
	c.letGo(len(b))
	c.mu.Unlock()
	c.writeQueue()
}

// writeQueue writes what is in the queue until it is empty. The caller has set writing.
func (c *conn) writeQueue() {
	c.mu.Lock()
	for len(c.queue) > 0 && !c.broken {
		b := c.queue
		c.queue = nil
		c.changed.Broadcast()
		c.mu.Unlock()
		c.write(b)
		c.mu.Lock()
		c.letGo(len(b))
	}
	c.writing = false
	c.changed.Broadcast()
	c.mu.Unlock()
}

func (c *conn) write(b []byte) {
	c.nc.SetWriteDeadline(time.Now().Add(WriteBlocked)) // fails only together with Write
	if _, err := c.nc.Write(b); err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			c.s.counters.TimedOut.Add(1)
		}
		c.abort()
	}
}

// abort ends the connection now.
func (c *conn) abort() {
	c.mu.Lock()
	c.broken = true
	c.letGo(len(c.queue))
	c.queue = nil
	c.changed.Broadcast()
	c.mu.Unlock()
	// A TLS connection would first write its goodbye, which may block; its peer has given that up.
	if t, ok := c.nc.(*tls.Conn); ok {
		t.NetConn().Close()
		return
	}
	c.nc.Close()
}

// finish waits until all answers are written, or the connection is broken and nobody writes to it any more.
func (c *conn) finish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.writing || !c.broken && (c.pending > 0 || len(c.queue) > 0) {
		c.changed.Wait()
	}
	c.broken = true // late replies find nobody
}

// linger says goodbye to a client whose queries may still be on their way: closing with bytes unread would
// reset the connection and could take answers away that it has not read.
func (c *conn) linger() {
	w, ok := c.nc.(interface{ CloseWrite() error })
	if !ok || w.CloseWrite() != nil {
		return
	}
	c.nc.SetReadDeadline(time.Now().Add(time.Second))
	io.Copy(io.Discard, c.nc)
}
