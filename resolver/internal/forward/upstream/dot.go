package upstream

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Limits of one DoT client.
const (
	maxConns     = 4  // connections open at once
	maxPipelined = 64 // questions on a connection whose answers have not come, those given up included
	idleFor      = 10 * time.Second
	// handshakeTimeout bounds connecting, which goes on when the question that began it is given up: the next
	// one will want the connection.
	handshakeTimeout = 5 * time.Second
	writeTimeout     = 2 * time.Second
)

// A dot client asks over TLS.
type dot struct {
	spec    Spec
	dial    func(ctx context.Context, network, address string) (net.Conn, error)
	tls     *tls.Config
	backoff backoff

	ctx     context.Context // ends when the client is closed
	cancel  context.CancelFunc
	running sync.WaitGroup // dials and readers

	mu      sync.Mutex // guards everything below, and all of pending in conns
	conns   []*dotConn
	dialing *dialing
	closed  bool
}

// A dialing is a connection being made. conn or err is set before done is closed.
type dialing struct {
	done chan struct{}
	conn *dotConn
	err  error
}

// A dotConn is one connection.
type dotConn struct {
	net.Conn
	raw     net.Conn   // beneath: closing it never waits, as saying goodbye in TLS may
	writing sync.Mutex // one message at a time

	// Guarded by dot.mu.
	pending map[uint16]*waiter // nil waiter: given up, but its answer may still come
	heard   int                // messages received
	retired bool               // takes no more questions
	idle    *time.Timer        // closes it; nil while anything is pending
}

// A waiter is a question whose answer has not come.
type waiter struct {
	answer chan []byte // of size one; closed when the connection ends
	heard  int         // dotConn.heard when it was sent
}

func newDoT(s Spec, o Options) *dot {
	d := &dot{spec: s, dial: o.Dial, tls: tlsConfig(s, o.TLS, "dot")}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	return d
}

// errClosedConn: the connection ended before the answer came.
var errClosedConn = errors.New("the connection ended")

// Ask sends a on a connection that is open, or a new one.
func (d *dot) Ask(ctx context.Context, tree *query.Tree, a query.Ask) (query.Reply, error) {
	left, err := timeLeft(ctx, tree, a.Timeout)
	if err != nil {
		return query.Reply{}, networkError(ctx, d.spec, err)
	}
	inner, cancel := context.WithTimeout(ctx, left)
	defer cancel()
	for range 2 {
		if err := tree.Query(); err != nil {
			return query.Reply{}, err
		}
		c, fresh, err := d.connection(inner)
		if err != nil {
			return query.Reply{}, networkError(ctx, d.spec, err)
		}
		r, err := d.ask(inner, c, &a)
		if err == nil || fresh || !errors.Is(err, errClosedConn) {
			if err != nil {
				err = networkError(ctx, d.spec, err)
			}
			return r, err
		}
	}
	return query.Reply{}, fmt.Errorf("%w: %v closes its connections", query.ErrUnreachable, d.spec)
}

// connection returns one with room, waiting for it to be made if need be. fresh says that it is new.
func (d *dot) connection(ctx context.Context) (c *dotConn, fresh bool, err error) {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil, false, net.ErrClosed
	}
	for _, c := range d.conns {
		if !c.retired && len(c.pending) < maxPipelined {
			d.mu.Unlock()
			return c, false, nil
		}
	}
	if d.dialing == nil {
		if len(d.conns) >= maxConns {
			d.mu.Unlock()
			return nil, false, fmt.Errorf("%w: %v has %d connections full", query.ErrBusy, d.spec, maxConns)
		}
		if d.backoff.rests(clock.Elapsed()) {
			d.mu.Unlock()
			return nil, false, fmt.Errorf("%w: %v could not be connected to a moment ago", query.ErrUnreachable, d.spec)
		}
		d.dialing = &dialing{done: make(chan struct{})}
		d.running.Add(1)
		go d.connect(d.dialing)
	}
	dl := d.dialing
	d.mu.Unlock()
	select {
	case <-dl.done:
		return dl.conn, true, dl.err
	case <-ctx.Done():
		return nil, false, ctx.Err()
	}
}

func (d *dot) connect(dl *dialing) {
	defer d.running.Done()
	ctx, cancel := context.WithTimeout(d.ctx, handshakeTimeout)
	defer cancel()
	var secure *tls.Conn
	conn, err := d.dial(ctx, "tcp", d.spec.Addr.String())
	if err == nil {
		secure = tls.Client(conn, d.tls)
		if err = secure.HandshakeContext(ctx); err != nil {
			conn.Close()
		}
	}
	if err != nil {
		d.backoff.failed(clock.Elapsed())
	} else {
		d.backoff.worked()
	}
	d.mu.Lock()
	d.dialing = nil
	if err == nil && d.closed {
		err = net.ErrClosed
		conn.Close()
	}
	if err == nil {
		dl.conn = &dotConn{Conn: secure, raw: conn, pending: make(map[uint16]*waiter)}
		d.conns = append(d.conns, dl.conn)
		d.rest(dl.conn)
		d.running.Add(1)
		go d.read(dl.conn)
	}
	dl.err = err
	d.mu.Unlock()
	close(dl.done)
}

// ask sends one question on c and waits for its answer.
func (d *dot) ask(ctx context.Context, c *dotConn, a *query.Ask) (query.Reply, error) {
	w := &waiter{answer: make(chan []byte, 1)}
	id, err := d.enter(c, w)
	if err != nil {
		return query.Reply{}, err
	}
	var buf [2 + maxQuery]byte
	out := appendQuery(buf[:2], id, a)
	dnswire.PutUint16(out, uint16(len(out)-2))

	c.writing.Lock()
	start := clock.Elapsed()
	c.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, err = c.Write(out)
	c.writing.Unlock()
	if err != nil {
		d.end(c) // part of a message may have gone out
		return query.Reply{}, fmt.Errorf("%w: %v", errClosedConn, err)
	}
	select {
	case in, ok := <-w.answer:
		if !ok {
			return query.Reply{}, errClosedConn
		}
		r, err := readReply(in, a)
		r.RTT = clock.Elapsed().Sub(start)
		return r, err
	case <-ctx.Done():
		d.giveUp(c, id, w, errors.Is(ctx.Err(), context.DeadlineExceeded))
		return query.Reply{}, ctx.Err()
	}
}

// enter gives a question an ID on c.
func (d *dot) enter(c *dotConn, w *waiter) (uint16, error) {
	var random [2]byte
	rand.Read(random[:])
	id := dnswire.Uint16(random[:])
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.pending == nil {
		return 0, errClosedConn
	}
	if len(c.pending) >= maxPipelined { // others were quicker
		return 0, fmt.Errorf("%w: %v", query.ErrBusy, d.spec)
	}
	for ; ; id++ {
		if _, taken := c.pending[id]; !taken {
			break
		}
	}
	w.heard = c.heard
	c.pending[id] = w
	if c.idle != nil {
		c.idle.Stop()
		c.idle = nil
	}
	return id, nil
}

// giveUp stops waiting. A connection on which nothing came since the question was sent is taken for dead.
func (d *dot) giveUp(c *dotConn, id uint16, w *waiter, late bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.pending[id] != w {
		return
	}
	c.pending[id] = nil
	if late && c.heard == w.heard {
		c.retired = true
	}
	given := 0
	for _, w := range c.pending {
		if w == nil {
			given++
		}
	}
	if given == len(c.pending) && c.retired {
		c.raw.Close() // the reader sees it
	}
}

// read takes answers from c until it ends.
func (d *dot) read(c *dotConn) {
	defer d.running.Done()
	defer d.end(c)
	r := bufio.NewReaderSize(c, 4096)
	for {
		var size [2]byte
		if _, err := io.ReadFull(r, size[:]); err != nil {
			return
		}
		in := make([]byte, dnswire.Uint16(size[:]))
		if _, err := io.ReadFull(r, in); err != nil || len(in) < dnswire.HeaderLen {
			return
		}
		d.mu.Lock()
		c.heard++
		id := dnswire.Uint16(in)
		w, known := c.pending[id]
		delete(c.pending, id)
		if w != nil {
			w.answer <- in
		}
		if known && len(c.pending) == 0 {
			d.rest(c)
		}
		d.mu.Unlock()
	}
}

// rest starts the idle time of c, which nothing is pending on; d.mu is held.
func (d *dot) rest(c *dotConn) {
	if c.retired {
		c.raw.Close()
		return
	}
	c.idle = time.AfterFunc(idleFor, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if c.idle != nil && len(c.pending) == 0 {
			c.retired = true
			c.raw.Close()
		}
	})
}

// end closes c and fails what is pending on it.
func (d *dot) end(c *dotConn) {
	c.raw.Close()
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, o := range d.conns {
		if o == c {
			d.conns = append(d.conns[:i:i], d.conns[i+1:]...)
			break
		}
	}
	if c.idle != nil {
		c.idle.Stop()
		c.idle = nil
	}
	for _, w := range c.pending {
		if w != nil {
			close(w.answer)
		}
	}
	c.pending, c.retired = nil, true
}

func (d *dot) Close() error {
	d.cancel()
	d.mu.Lock()
	d.closed = true
	for _, c := range d.conns {
		c.retired = true
		c.raw.Close()
	}
	d.mu.Unlock()
	d.running.Wait()
	return nil
}
