package listen

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// A Gate decides who may open a connection. It is asked before anything is read, so refusing is cheap.
type Gate interface {
	// Enter counts a connection from source, or says why there may not be one. After NotRefused, Leave is
	// called once when the connection ends.
	Enter(source netip.Addr) query.RefuseReason
	Leave(source netip.Addr)
	// Share is how much of what the gate admits is in use, from 0 to 1. Idle timeouts shrink by it.
	Share() float64
}

// Connections is the Gate that counts: so many in all, so many for each source, which is an IPv4 address or
// an IPv6 /64. The limits may be changed while it is in use: lower ones let nobody in until enough have left.
type Connections struct {
	Max, PerSource atomic.Int64
	// Exempt says whether the limit for each source does not apply (access.unlimited). Nil exempts nobody.
	Exempt func(netip.Addr) bool

	all atomic.Int64

	mu      sync.Mutex // guards everything below
	sources map[netip.Addr]int64
}

// NewConnections returns a gate with these limits.
func NewConnections(limit, perSource int) *Connections {
	g := &Connections{sources: make(map[netip.Addr]int64)}
	g.Max.Store(int64(limit))
	g.PerSource.Store(int64(perSource))
	return g
}

// Enter counts a connection.
func (g *Connections) Enter(source netip.Addr) query.RefuseReason {
	key := sourceKey(source)
	exempt := g.Exempt != nil && g.Exempt(source)
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.all.Load() >= g.Max.Load() || !exempt && g.sources[key] >= g.PerSource.Load() {
		return query.RefuseConnections
	}
	g.all.Add(1)
	g.sources[key]++
	return query.NotRefused
}

// Leave ends what Enter counted.
func (g *Connections) Leave(source netip.Addr) {
	key := sourceKey(source)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.all.Add(-1)
	if g.sources[key]--; g.sources[key] == 0 {
		delete(g.sources, key)
	}
}

// Share returns connections over limit.
func (g *Connections) Share() float64 {
	return min(float64(g.all.Load())/float64(max(g.Max.Load(), 1)), 1)
}

// Unread bounds the bytes of answers that connections hold, all together, because their clients have not read
// what was written before: an answer is many times as long as the query it takes to have it, so that a few
// bytes from each of many clients would fill the memory. Max may be changed at any time.
type Unread struct {
	Max atomic.Int64
	all atomic.Int64
}

// NewUnread returns a bound of so many bytes.
func NewUnread(limit int64) *Unread {
	u := new(Unread)
	u.Max.Store(limit)
	return u
}

// Add counts n bytes more, or less, and reports whether all are within the bound.
func (u *Unread) Add(n int) bool { return u.all.Add(int64(n)) <= u.Max.Load() }

// Bytes returns how many there are.
func (u *Unread) Bytes() int64 { return u.all.Load() }

func sourceKey(a netip.Addr) netip.Addr {
	a = a.Unmap().WithZone("")
	if a.Is6() {
		p, _ := a.Prefix(64)
		return p.Addr()
	}
	return a
}

// Counters count the connections of a listener; they may be read at any time.
type Counters struct {
	Accepted         atomic.Uint64
	Active           atomic.Int64
	Refused          [query.NumRefuseReason]atomic.Uint64
	Handshaking      atomic.Int64  // TLS handshakes in progress
	HandshakesFull   atomic.Uint64 // connections refused because too many were
	HandshakesFailed atomic.Uint64
	TimedOut         atomic.Uint64 // connections closed for being idle, slow, or not reading their answers
	Malformed        atomic.Uint64 // connections closed for what they sent
}

// An Acceptor takes connections from a listener and serves each in a goroutine of its own.
type Acceptor struct {
	Listener net.Listener
	Gate     Gate
	Counters *Counters
	// TLS, if not nil, is shaken hands by first, at most Handshakes at a time (a limit that may be changed at
	// any time); further connections are closed before they cost anything.
	TLS        *tls.Config
	Handshakes *atomic.Int64
	// FromProxy, if not nil, names the addresses whose connections must begin with a PROXY header, which then
	// tells the source and the local address. The gate counts what the header tells, so that one proxy may
	// bring many clients.
	FromProxy func(netip.Addr) bool
	// Serve is called in the connection's goroutine. When it returns the connection is closed. c is a
	// *tls.Conn if TLS is set.
	Serve func(c net.Conn, source, local netip.AddrPort)

	wg      sync.WaitGroup // connections
	headers atomic.Int64   // connections that wait for their PROXY header
}

// maxHeaders is how many connections from proxies may wait for their header at once, each at most proxyWait.
const maxHeaders = 1024

// HandshakeTimeout is how long a client has for the TLS handshake.
const HandshakeTimeout = 5 * time.Second

// Run accepts until the listener is closed, by anyone; the error is nil then. Connections go on: Wait waits for
// them. When ctx ends, TLS handshakes in progress are given up.
func (a *Acceptor) Run(ctx context.Context) error {
	var pause time.Duration
	for {
		c, err := a.Listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			// Out of descriptors, or the peer has gone already: neither is a reason to stop. Connections
			// that end free descriptors, so look again soon.
			if pause = min(max(2*pause, 5*time.Millisecond), time.Second); pause == time.Second && !temporary(err) {
				return err
			}
			time.Sleep(pause)
			continue
		}
		pause = 0
		source, local := AddrPort(c.RemoteAddr()), AddrPort(c.LocalAddr())
		if a.FromProxy != nil && a.FromProxy(source.Addr()) {
			// The gate cannot count those whose client is not known yet, so they are counted here.
			if a.headers.Add(1) > maxHeaders {
				a.headers.Add(-1)
				a.Counters.Refused[query.RefuseConnections].Add(1)
				reset(c)
				continue
			}
			a.wg.Go(func() {
				p, err := readProxyFrom(c)
				a.headers.Add(-1)
				if err != nil {
					a.Counters.Malformed.Add(1)
					reset(c)
					return
				}
				if p.Source.IsValid() {
					source, local = p.Source, p.Local
				}
				if a.admit(c, source) {
					a.serve(ctx, c, source, local)
				}
			})
			continue
		}
		if a.admit(c, source) {
			a.wg.Go(func() { a.serve(ctx, c, source, local) })
		}
	}
}

// Wait returns when all connections have ended. It is called after Run.
func (a *Acceptor) Wait() { a.wg.Wait() }

// admit asks the gate, and closes the connection if it refuses.
func (a *Acceptor) admit(c net.Conn, source netip.AddrPort) bool {
	if why := a.Gate.Enter(source.Addr()); why != query.NotRefused {
		a.Counters.Refused[why].Add(1)
		reset(c)
		return false
	}
	a.Counters.Accepted.Add(1)
	a.Counters.Active.Add(1)
	return true
}

// serve serves a connection that was admitted.
func (a *Acceptor) serve(ctx context.Context, c net.Conn, source, local netip.AddrPort) {
	defer func() {
		c.Close()
		a.Counters.Active.Add(-1)
		a.Gate.Leave(source.Addr())
	}()
	if a.TLS == nil {
		a.Serve(c, source, local)
		return
	}
	if t := a.handshake(ctx, c); t != nil {
		a.Serve(t, source, local)
		t.Close()
	}
}

func temporary(err error) bool {
	var t interface{ Temporary() bool }
	return errors.As(err, &t) && t.Temporary()
}

func (a *Acceptor) handshake(ctx context.Context, c net.Conn) *tls.Conn {
	if a.Counters.Handshaking.Add(1) > a.Handshakes.Load() {
		a.Counters.Handshaking.Add(-1)
		a.Counters.HandshakesFull.Add(1)
		reset(c)
		return nil
	}
	defer a.Counters.Handshaking.Add(-1)
	ctx, cancel := context.WithTimeout(ctx, HandshakeTimeout)
	defer cancel()
	t := tls.Server(c, a.TLS)
	if err := t.HandshakeContext(ctx); err != nil {
		a.Counters.HandshakesFailed.Add(1)
		return nil
	}
	return t
}

// reset closes a connection without leaving it in TIME_WAIT.
func reset(c net.Conn) {
	if l, ok := c.(interface{ SetLinger(int) error }); ok {
		l.SetLinger(0)
	}
	c.Close()
}

// TLSConfig returns the server configuration of an encrypted transport: TLS 1.2 and later, certificates from
// get, the application protocols named.
func TLSConfig(get func(*tls.ClientHelloInfo) (*tls.Certificate, error), protocols ...string) *tls.Config {
	return &tls.Config{GetCertificate: get, MinVersion: tls.VersionTLS12, NextProtos: protocols}
}

// ServerName returns the TLS server name that the client asked for as a query.Query holds it.
func ServerName(t *tls.Conn) string {
	b := []byte(t.ConnectionState().ServerName)
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	if n := len(b); n > 0 && b[n-1] == '.' {
		b = b[:n-1]
	}
	return string(b)
}

// AddrPort reads an address of package net; the zero value if it is of another kind (net.Pipe).
func AddrPort(a net.Addr) netip.AddrPort {
	var ap netip.AddrPort
	switch a := a.(type) {
	case *net.TCPAddr:
		ap = a.AddrPort()
	case *net.UDPAddr:
		ap = a.AddrPort()
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
