// Package tcp serves DNS over TCP (RFC 7766), and over anything else that carries framed messages in a
// connection: package dot uses it.
//
// A connection carries messages behind a 16-bit length. Clients may pipeline; what the caches hold is answered
// at once, all that one read brought in one write; the rest is resolved at the same time, at most Depth of a
// connection, and answered in the order it is ready. With Depth under way nothing more is read.
//
// A connection costs one goroutine, without a buffer while it is idle. Another goroutine runs while answers
// that were resolved are written.
//
// Connections end: when the client has closed its side and has its answers; FirstByte after the start without
// a byte; Frame after a message began that is not complete; when idle for Idle, which shrinks to a tenth as
// the gate fills; when answers cannot be written for WriteBlocked, or at once when the answers that all
// connections hold exceed Unread and this one's client leaves more than writeSize bytes unread; for a message
// longer than MaxQuery, or one that is no query. Metrics count them.
package tcp

import (
	"context"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/listen"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// MaxQuery is the most bytes a query may have. The largest name with generous padding has a quarter of it.
const MaxQuery = 4096

// Timeouts, see the package comment.
const (
	FirstByte    = 3 * time.Second
	Frame        = 3 * time.Second
	Idle         = 10 * time.Second
	WriteBlocked = 5 * time.Second
)

// DefaultDepth is how many queries of one connection are resolved at a time.
const DefaultDepth = 64

// Options say how to serve. Zero fields mean the default stated.
type Options struct {
	// Listener is served and closed at the end. Required, as is Handler.
	Listener net.Listener
	Handler  listen.Handler

	// Gate limits connections. Default: 4096 in all and 64 a source.
	Gate listen.Gate
	// FromProxy names the addresses whose connections must begin with a PROXY header, version 2. Default: none.
	FromProxy func(netip.Addr) bool
	// Depth bounds how many queries of one connection are resolved at a time, pipelining; it may be changed
	// at any time. Default 64.
	Depth *atomic.Int64
	// Unread bounds the answers that wait for clients to read, in all connections. Default 64 MiB.
	Unread *listen.Unread
	// Desks are lent to connections while they have something to do. Default: as many as processors.
	Desks listen.Desks
	// Drain is how long connections may take to get their answers once the context has ended. Default 5 s.
	Drain time.Duration
	// ListenerID is put in each query.
	ListenerID uint16

	// For package dot: the transport that queries are marked with, and what Acceptor needs for TLS.
	Transport query.Transport
	Accept    func(*listen.Acceptor)
}

// A Server serves one listener.
type Server struct {
	opts     Options
	counters listen.Counters
	buffers  sync.Pool // of *[bufferSize]byte, what connections read to
	outs     sync.Pool // of *[]byte, what they write from

	handshakes context.Context // ends when those in progress are to be given up
	giveUp     context.CancelFunc
	draining   atomic.Bool // nothing more is read

	mu    sync.Mutex // guards conns
	conns map[*conn]struct{}
}

// New returns a server; Serve runs it.
func New(o Options) *Server {
	if o.Gate == nil {
		o.Gate = listen.NewConnections(4096, 64)
	}
	if o.Depth == nil {
		o.Depth = new(atomic.Int64)
		o.Depth.Store(DefaultDepth)
	}
	if o.Unread == nil {
		o.Unread = listen.NewUnread(64 << 20)
	}
	if o.Desks == nil {
		o.Desks = listen.NewDesks(o.Handler, 0)
	}
	if o.Drain == 0 {
		o.Drain = 5 * time.Second
	}
	if o.Transport == query.UDP {
		o.Transport = query.TCP
	}
	s := &Server{opts: o, conns: make(map[*conn]struct{})}
	s.handshakes, s.giveUp = context.WithCancel(context.Background())
	s.buffers.New = func() any { return new([bufferSize]byte) }
	s.outs.New = func() any { b := make([]byte, 0, 4096); return &b }
	return s
}

// Counters returns the server's counters.
func (s *Server) Counters() *listen.Counters { return &s.counters }

// Addr returns the listener's address.
func (s *Server) Addr() net.Addr { return s.opts.Listener.Addr() }

// Serve serves until ctx ends or Close is called, and returns when every connection has ended. When ctx ends
// no more is accepted or read; queries under way are answered within Options.Drain. The error is nil unless
// the listener failed.
func (s *Server) Serve(ctx context.Context) error {
	a := &listen.Acceptor{Listener: s.opts.Listener, Gate: s.opts.Gate, Counters: &s.counters, FromProxy: s.opts.FromProxy, Serve: s.serve}
	if s.opts.Accept != nil {
		s.opts.Accept(a)
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-done:
			return
		case <-ctx.Done():
		}
		s.giveUp()
		s.drain()
		late := time.NewTimer(s.opts.Drain)
		defer late.Stop()
		select {
		case <-done:
		case <-late.C:
			s.Close()
		}
	})
	err := a.Run(s.handshakes)
	if err != nil {
		s.Close() // nobody new can come: better to start anew than to linger
	}
	a.Wait()
	close(done)
	wg.Wait()
	s.Close()
	return err
}

// drain lets connections end once they have their answers.
func (s *Server) drain() {
	s.draining.Store(true)
	s.opts.Listener.Close()
	for _, c := range s.all() {
		c.nc.SetReadDeadline(time.Unix(1, 0))
	}
}

// Close ends all connections at once. It does not wait for Serve to return.
func (s *Server) Close() error {
	s.draining.Store(true)
	s.giveUp()
	err := s.opts.Listener.Close()
	for _, c := range s.all() {
		c.abort()
	}
	return err
}

func (s *Server) all() []*conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.conns))
}

// serve is what a connection's goroutine runs.
func (s *Server) serve(nc net.Conn, source, local netip.AddrPort) {
	c := newConn(s, nc, source, local)
	s.mu.Lock()
	s.conns[c] = struct{}{}
	s.mu.Unlock()
	c.run() // looks at draining after it set a deadline, as drain sets deadlines after draining
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
}

// idleFor is how long a connection may be idle now: less as the gate fills, so that connections in use find
// room (RFC 7766 section 6.2.3 leaves it to us).
func (s *Server) idleFor() time.Duration {
	share := s.opts.Gate.Share()
	if share <= 0.5 {
		return Idle
	}
	return Idle - time.Duration(float64(Idle-Idle/10)*(share-0.5)*2)
}
