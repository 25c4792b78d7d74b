// Package doh serves DNS over HTTPS (RFC 8484), HTTP/1.1 and HTTP/2, through net/http.
//
// Requests: GET with the query in the parameter "dns", base64url without padding (padding is tolerated), or
// POST with a body of type application/dns-message, at Path, Path/ and Path/DEVICE with or without a final
// slash. What identifies a client goes into the query and is judged elsewhere: the device of the path, the
// name and password of Basic authentication, the token of Bearer, the TLS server name.
//
// Status: 200 with any DNS response, errors included (RFC 8484 section 4.2.1); 400 for what is no DNS query,
// 404 for another path, 405 for another method, 413 for more than 64 kB, 415 for another type. A query that
// gets no response on purpose ends its stream, or its HTTP/1.1 connection, without one, and so does a request
// beyond Options.Requests: a stream costs a goroutine and perhaps a large answer that the client is in no hurry
// to read, and there are many to a connection, so that a limit on connections alone bounds no memory. So does
// one beyond Options.Depth of its own connection, which HTTP/2 clients are told of as they come and which may
// fall meanwhile. A client that gives up more than 200 requests within a minute loses its connection: each may
// have cost a resolution (rapid reset).
//
// Responses carry Cache-Control with the smallest TTL (RFC 8484 section 5.1) and are private: whose policy
// they follow may depend on the client's address, which a shared cache would not see.
package doh

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/listen"
)

// Limits of a connection, against rapid resets, floods of settings and endless headers (CVE-2023-44487 and its like).
const (
	maxStreams  = 100
	maxRequests = 1024
	maxFrame    = 16 << 10  // the smallest there may be
	streamRoom  = 64 << 10  // bytes received and not yet read: a whole body
	connRoom    = 128 << 10 // the same of a connection, in place of the library's megabyte
	maxResets   = 200       // requests given up in resetTime
	resetTime   = time.Minute
	maxHeader   = 16 << 10
	maxBody     = 64 << 10
	headerTime  = 3 * time.Second  // until a request's header is complete
	bodyTime    = 5 * time.Second  // until its body is
	answerTime  = 15 * time.Second // until the response is written: resolving takes up to 8 s
	idleTime    = 10 * time.Second
	handshakes  = 64
	defaultPath = "/dns-query"
)

// Options say how to serve. Zero fields mean the default stated.
type Options struct {
	// Listener is served and closed at the end. Required, as is Handler.
	Listener net.Listener
	Handler  listen.Handler

	// GetCertificate chooses the certificate for a client, as in tls.Config. Nil serves HTTP without TLS, for
	// tests and behind a proxy that ends TLS, HTTP/2 with prior knowledge included.
	GetCertificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	// Handshakes bounds the TLS handshakes in progress; it may be changed at any time. Default 64.
	Handshakes *atomic.Int64
	// Requests bounds the requests under way in all connections; it may be changed at any time. Default 1024.
	Requests *atomic.Int64
	// Streams bounds those of one HTTP/2 connection, as it is told. Default and most: 100.
	Streams int
	// Depth bounds the requests under way of one connection; it may be changed at any time. Nil: Streams does.
	Depth *atomic.Int64
	// Gate limits connections. Default: 4096 in all and 64 a source.
	Gate listen.Gate
	// FromProxy names the addresses whose connections must begin with a PROXY header, version 2. Default: none.
	FromProxy func(netip.Addr) bool
	// Desks are lent to requests. Default: as many as processors.
	Desks listen.Desks
	// Path is where queries are taken. Default "/dns-query".
	Path string
	// Drain is how long requests may take once the context has ended. Default 5 s.
	Drain time.Duration
	// ListenerID is put in each query.
	ListenerID uint16
}

// A Server serves one listener.
type Server struct {
	opts     Options
	path     string // without a final slash
	counters listen.Counters
	config   *tls.Config // nil without TLS
	http     *http.Server
	conns    *handover
	outs     sync.Pool    // of *[]byte: responses being written
	underWay atomic.Int64 // requests

	handshakes context.Context // ends when those in progress are to be given up
	giveUp     context.CancelFunc
	killed     chan struct{} // closed by Close
	kill       sync.Once
}

// New returns a server; Serve runs it.
func New(o Options) *Server {
	if o.Handshakes == nil {
		o.Handshakes = new(atomic.Int64)
		o.Handshakes.Store(handshakes)
	}
	if o.Requests == nil {
		o.Requests = new(atomic.Int64)
		o.Requests.Store(maxRequests)
	}
	if o.Streams == 0 {
		o.Streams = maxStreams
	}
	if o.Gate == nil {
		o.Gate = listen.NewConnections(4096, 64)
	}
	if o.Desks == nil {
		o.Desks = listen.NewDesks(o.Handler, 0)
	}
	if o.Path == "" {
		o.Path = defaultPath
	}
	if o.Drain == 0 {
		o.Drain = 5 * time.Second
	}
	s := &Server{
		opts: o, path: strings.TrimSuffix(o.Path, "/"), killed: make(chan struct{}),
		conns: &handover{conns: make(chan net.Conn), done: make(chan struct{}), addr: o.Listener.Addr()},
	}
	s.outs.New = func() any { b := make([]byte, 0, 2048); return &b }
	s.handshakes, s.giveUp = context.WithCancel(context.Background())
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	if o.GetCertificate != nil {
		s.config = listen.TLSConfig(o.GetCertificate, "h2", "http/1.1")
	} else {
		protocols.SetUnencryptedHTTP2(true)
	}
	s.http = &http.Server{
		Handler:   s,
		Protocols: protocols,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: min(o.Streams, maxStreams), MaxReadFrameSize: maxFrame,
			MaxReceiveBufferPerStream: streamRoom, MaxReceiveBufferPerConnection: connRoom,
		},
		MaxHeaderBytes:    maxHeader,
		ReadHeaderTimeout: headerTime,
		ReadTimeout:       bodyTime,
		WriteTimeout:      answerTime,
		IdleTimeout:       idleTime,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, tracked(c))
		},
		// What it logs are faults of clients.
		ErrorLog: slog.NewLogLogger(slog.Default().Handler(), slog.LevelDebug),
	}
	return s
}

// Counters returns the server's counters.
func (s *Server) Counters() *listen.Counters { return &s.counters }

// Addr returns the listener's address.
func (s *Server) Addr() net.Addr { return s.opts.Listener.Addr() }

// SetTicketKeys replaces the keys of session tickets: the first makes new ones, all are accepted.
func (s *Server) SetTicketKeys(keys [][32]byte) {
	if s.config != nil {
		s.config.SetSessionTicketKeys(keys)
	}
}

// Serve serves until ctx ends or Close is called, and returns when every connection has ended. When ctx ends
// no more connections are accepted; requests under way are answered within Options.Drain. The error is nil
// unless the listener failed.
func (s *Server) Serve(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { s.http.Serve(s.conns) }) // ends with s.conns, whose error says nothing new
	stopped := make(chan struct{})
	wg.Go(func() {
		select {
		case <-stopped:
			return
		case <-ctx.Done():
		}
		s.giveUp()
		s.opts.Listener.Close()
		late, cancel := context.WithTimeout(context.Background(), s.opts.Drain)
		defer cancel()
		s.http.Shutdown(late)
		s.Close()
	})
	a := &listen.Acceptor{
		Listener: tracking{s.opts.Listener}, Gate: s.opts.Gate, Counters: &s.counters,
		TLS: s.config, Handshakes: s.opts.Handshakes, FromProxy: s.opts.FromProxy, Serve: s.handOver,
	}
	err := a.Run(s.handshakes)
	if err != nil {
		s.Close() // nobody new can come: better to start anew than to linger
	}
	a.Wait()
	close(stopped)
	s.Close()
	wg.Wait()
	return err
}

// Close ends all connections at once. It does not wait for Serve to return.
func (s *Server) Close() error {
	s.giveUp()
	s.kill.Do(func() { close(s.killed) })
	err := s.opts.Listener.Close()
	s.conns.Close()
	s.http.Close()
	return err
}

// handOver gives a connection to the HTTP server and waits until that has closed it.
func (s *Server) handOver(c net.Conn, source, local netip.AddrPort) {
	t := tracked(c)
	t.peer = peer{source: source, local: local}
	if e, ok := c.(*tls.Conn); ok {
		t.peer.serverName = listen.ServerName(e)
	}
	select {
	case s.conns.conns <- c:
		select {
		case <-t.closed:
		case <-s.killed:
			t.Close() // the HTTP server closes those it knows; it may be about to learn of this one
		}
	case <-s.conns.done:
	}
}

// A peer is what a connection says of its client.
type peer struct {
	source, local netip.AddrPort
	serverName    string
}

type connKey struct{}

// handover is the listener that the HTTP server sees: connections come to it after the limits and the TLS
// handshake.
type handover struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
	addr  net.Addr
}

var errClosed = errors.New("listener closed")

func (h *handover) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.done:
		return nil, errClosed
	}
}

func (h *handover) Close() error   { h.once.Do(func() { close(h.done) }); return nil }
func (h *handover) Addr() net.Addr { return h.addr }

// tracking makes connections tell when they are closed.
type tracking struct{ net.Listener }

func (l tracking) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &trackedConn{Conn: c, closed: make(chan struct{})}, nil
}

type trackedConn struct {
	net.Conn
	peer   peer // set before the HTTP server has it
	once   sync.Once
	closed chan struct{}

	underWay atomic.Int64 // requests

	mu     sync.Mutex // guards what follows
	resets int        // requests given up since
	since  clock.Instant
}

// reset counts a request that the client gave up, and closes the connection if there have been too many.
func (c *trackedConn) reset(now clock.Instant) (tooMany bool) {
	c.mu.Lock()
	if c.resets == 0 || now.Sub(c.since) >= resetTime {
		c.resets, c.since = 0, now
	}
	c.resets++
	tooMany = c.resets > maxResets
	c.mu.Unlock()
	if tooMany {
		c.Close()
	}
	return tooMany
}

func (c *trackedConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// SetLinger lets the acceptor reset connections that it refuses.
func (c *trackedConn) SetLinger(sec int) error {
	if l, ok := c.Conn.(interface{ SetLinger(int) error }); ok {
		return l.SetLinger(sec)
	}
	return nil
}

func tracked(c net.Conn) *trackedConn {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	return c.(*trackedConn)
}
