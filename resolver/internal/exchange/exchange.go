// Package exchange asks one server one question.
//
// Ask sends the question over UDP, or TCP when told to, and returns the one response that matches. It knows
// nothing of zones: whom to ask, how often, and what an answer means is the iterator's business.
//
// Spoofing (RFC 5452). A query goes from a random port of a shard of sockets, each connected to one server
// while it has its one query outstanding, with a random ID, a random letter case if the iterator wants it,
// and a cookie (RFC 7873). There is one rule for what comes back: whatever does not match (ID, question with
// its letter case, QR, opcode, cookie, more bytes than were offered, not a DNS message) is ignored and sends
// the exchange over TCP at once, and only TCP's response is accepted. The server is never blamed. A server
// that once sent a cookie must go on sending it; a response without goes the same way. A truncated response
// (TC=1) is not looked at any further: TCP again.
//
// At most one exchange with the same question, flags, subnet and server is outstanding (birthday attacks;
// CVE-2025-5994): identical Asks share it. Every message sent, and every joining, costs the tree one query.
//
// Sockets come from a Transport. NewSockets has the real ones; Dialing makes one of a dial function, for
// in-memory networks.
//
// It does not follow referrals, retry, choose servers or remember what they can do, cookies excepted.
package exchange

import (
	"context"
	"crypto/cipher"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Ask asks a.Server and waits for the response that matches. With an error, the reply's Mismatch, CaseLost and
// Truncated still say what happened before; its Message is nil. Replies of joined Asks share one Message,
// which is not to be changed.
func (x *Exchange) Ask(ctx context.Context, tree *query.Tree, a query.Ask) (query.Reply, error) {
	key := a
	key.Timeout = 0
	for {
		if err := tree.Query(); err != nil {
			return query.Reply{}, err
		}
		f, server, err := x.enter(key)
		if err != nil {
			return query.Reply{}, err
		}
		if server != nil {
			return x.lead(ctx, tree, key, server, f, a)
		}
		select {
		case <-f.done:
		case <-ctx.Done():
			return query.Reply{}, contextError(ctx, a.Server)
		}
		if f.own() {
			continue // the one who asked gave up for reasons of its own: ask ourselves
		}
		r := f.reply
		r.Joined = true
		return r, f.err
	}
}

func (x *Exchange) lead(ctx context.Context, tree *query.Tree, key query.Ask, s *server, f *flight, a query.Ask) (query.Reply, error) {
	f.err = errAbandoned // unless run returns
	defer x.leave(key, s, f)
	f.reply, f.err = x.run(ctx, tree, s, a)
	if errors.Is(f.err, query.ErrTimeout) && clock.Elapsed() >= tree.Deadline {
		f.err = fmt.Errorf("%w: time", query.ErrLimit) // the server was not given all it may take
	}
	return f.reply, f.err
}

// errAbandoned is what joiners see of an exchange that ended by a panic.
var errAbandoned = errors.New("the exchange was abandoned")

// An Exchange asks servers. It is safe for concurrent use.
type Exchange struct {
	opts     Options      // constant after New
	cookies  cipher.Block // makes our cookies
	counters Counters
	buffers  sync.Pool // of *buffer

	mu      sync.Mutex // guards everything below; held for map work only
	flights map[query.Ask]*flight
	servers map[netip.AddrPort]*server
	idle    map[netip.AddrPort][]*stream
	idling  int // streams in idle
	closed  bool
}

// Options tunes an Exchange. Zero fields mean the default stated.
type Options struct {
	// Transport opens the ways to servers; it is required, and Close closes it.
	Transport Transport

	// InFlight bounds the exchanges with one server at a time; more end with query.ErrBusy. Default 100.
	InFlight int

	// UDPSize is what EDNS offers when an Ask does not say (recursion.edns_buffer_size). Default 1232, at
	// most 4096.
	UDPSize uint16

	// Servers bounds how many servers' cookies are remembered. Default 32,768.
	Servers int

	// IdleStreams bounds the idle TCP connections kept for reuse, in all; IdleFor how long. Default 128, 5 s.
	IdleStreams int
	IdleFor     time.Duration
}

// Counters count what an Exchange did; they may be read at any time.
type Counters struct {
	UDP, TCP                      atomic.Uint64 // messages sent
	Joined                        atomic.Uint64 // Asks that shared another's exchange
	Timeouts, Unreachable         atomic.Uint64
	Truncated                     atomic.Uint64 // responses with TC=1
	Mismatched, CaseLost, Cookies atomic.Uint64 // responses that did not match; Cookies: for want of a right cookie
	Busy                          atomic.Uint64 // Asks refused by the server's in-flight limit
}

// Sent returns how many messages went to servers over all transports.
func (c *Counters) Sent() uint64 { return c.UDP.Load() + c.TCP.Load() }

const maxUDPSize = 4096

// New returns an Exchange.
func New(o Options) *Exchange {
	if o.InFlight == 0 {
		o.InFlight = 100
	}
	if o.UDPSize == 0 {
		o.UDPSize = 1232
	}
	if o.Servers == 0 {
		o.Servers = 32 << 10
	}
	if o.IdleStreams == 0 {
		o.IdleStreams = 128
	}
	if o.IdleFor == 0 {
		o.IdleFor = 5 * time.Second
	}
	x := &Exchange{
		opts:    o,
		cookies: newCookieKey(),
		flights: make(map[query.Ask]*flight),
		servers: make(map[netip.AddrPort]*server),
		idle:    make(map[netip.AddrPort][]*stream),
	}
	x.buffers.New = func() any { return new(buffer) }
	return x
}

// Counters returns the counters of x.
func (x *Exchange) Counters() *Counters { return &x.counters }

// Close closes idle connections and the transport. Asks under way end by their own timeout; later ones fail
// with net.ErrClosed.
func (x *Exchange) Close() error {
	x.mu.Lock()
	x.closed = true
	all := x.idle
	x.idle, x.idling = nil, 0
	x.mu.Unlock()
	for _, streams := range all {
		for _, s := range streams {
			s.close()
		}
	}
	return x.opts.Transport.Close()
}

// A flight is an exchange under way, shared by those who ask the same.
type flight struct {
	done  chan struct{}
	reply query.Reply // reply and err are set before done is closed
	err   error
}

// own reports whether the flight ended for reasons that concern its leader alone.
func (f *flight) own() bool {
	return errors.Is(f.err, context.Canceled) || errors.Is(f.err, context.DeadlineExceeded) || errors.Is(f.err, query.ErrLimit)
}

// A server is what is known of one; Exchange.mu guards it. Servers without cookie and without exchange are
// forgotten.
type server struct {
	inFlight int
	cookie   []byte // the server's part of the cookie it sent last; nil: it never sent one
}

// enter joins the flight of key, then the server is nil, or starts one, which leave ends.
func (x *Exchange) enter(key query.Ask) (*flight, *server, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed {
		return nil, nil, fmt.Errorf("asking %v: %w", key.Server, net.ErrClosed)
	}
	if f := x.flights[key]; f != nil {
		x.counters.Joined.Add(1)
		return f, nil, nil
	}
	s := x.servers[key.Server]
	if s == nil {
		s = new(server)
		x.servers[key.Server] = s
	}
	if s.inFlight >= x.opts.InFlight {
		x.counters.Busy.Add(1)
		return nil, nil, fmt.Errorf("%w: %v has %d outstanding", query.ErrBusy, key.Server, s.inFlight)
	}
	s.inFlight++
	f := &flight{done: make(chan struct{})}
	x.flights[key] = f
	return f, s, nil
}

func (x *Exchange) leave(key query.Ask, s *server, f *flight) {
	x.mu.Lock()
	delete(x.flights, key)
	s.inFlight--
	if s.inFlight == 0 && s.cookie == nil {
		delete(x.servers, key.Server)
	}
	if len(x.servers) > x.opts.Servers {
		for at, old := range x.servers { // in random order
			if old.inFlight == 0 {
				delete(x.servers, at)
				break
			}
		}
	}
	x.mu.Unlock()
	close(f.done)
}

// A buffer is the memory of one exchange.
type buffer struct {
	out  [512]byte // header, question, OPT with cookie and subnet: at most 12+259+11+44+24
	in   [maxUDPSize + 1]byte
	opts [96]byte
}

// run carries out the exchange: UDP, then TCP if what UDP brought asks for it.
func (x *Exchange) run(ctx context.Context, tree *query.Tree, s *server, a query.Ask) (r query.Reply, err error) {
	if a.UDPSize == 0 {
		a.UDPSize = x.opts.UDPSize
	}
	a.UDPSize = min(a.UDPSize, maxUDPSize)
	b := x.buffers.Get().(*buffer)
	defer x.buffers.Put(b)
	defer func() {
		switch {
		case errors.Is(err, query.ErrTimeout):
			x.counters.Timeouts.Add(1)
		case errors.Is(err, query.ErrUnreachable):
			x.counters.Unreachable.Add(1)
		}
	}()

	if !a.TCP {
		end := clock.Elapsed().Add(a.Timeout)
		v, err := x.udp(ctx, tree, s, &a, b, end, &r)
		if err == nil && v == badCookie { // RFC 7873 section 5.3: once more with the cookie just learnt
			if err = tree.Query(); err == nil {
				v, err = x.udp(ctx, tree, s, &a, b, end, &r)
			}
		}
		if err != nil || v == matched {
			return r, err
		}
		switch v {
		case truncated:
			r.Truncated = true
			x.counters.Truncated.Add(1)
		case caseLost:
			r.CaseLost = true
			x.counters.CaseLost.Add(1)
		case noCookie, badCookie:
			r.Mismatch = true
			x.counters.Cookies.Add(1)
		default:
			r.Mismatch = true
			x.counters.Mismatched.Add(1)
		}
		if err := tree.Query(); err != nil {
			return r, err
		}
	}
	r.TCP = true
	err = x.tcp(ctx, tree, s, &a, b, &r)
	switch {
	case err == nil || a.TCP || ctx.Err() != nil || errors.Is(err, query.ErrLimit) || errors.Is(err, query.ErrTruncated):
	case r.Truncated:
		err = fmt.Errorf("%w: %w", query.ErrTruncated, err)
	case errors.Is(err, query.ErrUnreachable):
		// Somebody's stray packet took us to TCP, which the server need not have: it is not unreachable.
		err = fmt.Errorf("%w: %v sent nothing that matched over UDP, and TCP fails", query.ErrTimeout, a.Server)
	}
	return r, err
}

// A verdict is what a response over UDP is.
type verdict int

const (
	matched verdict = iota
	mismatched
	caseLost  // it matches but for the letter case of the name
	truncated // TC=1
	noCookie  // the server sent cookies before, and not now, or not ours
	badCookie // RCODE BADCOOKIE, and a new server cookie was learnt
)

// udp sends the question and judges the first thing that comes.
func (x *Exchange) udp(ctx context.Context, tree *query.Tree, s *server, a *query.Ask, b *buffer, end clock.Instant, r *query.Reply) (verdict, error) {
	id, n := x.write(b.out[:], a, s, b, a.Case0x20)
	c, err := x.opts.Transport.Packet(a.Server)
	if err != nil {
		return 0, networkError(ctx, a.Server, err)
	}
	start := clock.Elapsed()
	left, err := timeLeft(ctx, tree, a, start, end.Sub(start))
	if err != nil {
		c.Release(true)
		return 0, err
	}
	x.counters.UDP.Add(1)
	m, err := roundTrip(ctx, c, b.out[:n], b.in[:], left)
	if err != nil {
		return 0, networkError(ctx, a.Server, err)
	}
	v, msg := x.judge(b.in[:m], b.out[:n], id, a, s)
	if v == matched {
		r.Message, r.RTT = msg, clock.Elapsed().Sub(start)
		r.Scope, r.HasScope = a.Subnet.Scope(msg.Subnet)
	}
	c.Release(v == matched)
	return v, nil
}

// roundTrip sends p and receives one datagram in time. On error c has been released.
func roundTrip(ctx context.Context, c PacketConn, p, in []byte, left time.Duration) (int, error) {
	c.SetReadDeadline(time.Now().Add(left)) // cannot fail on an open endpoint
	stop := func() bool { return true }
	if ctx.Done() != nil {
		stop = context.AfterFunc(ctx, func() { c.SetReadDeadline(time.Unix(1, 0)) })
	}
	n, err := c.RoundTrip(p, in)
	if !stop() && err == nil {
		// The deadline is being moved behind our back, so the endpoint cannot be used again.
		err = ctx.Err()
	}
	if err != nil {
		// After a timeout too: the late response would be the next user's mismatch.
		c.Release(false)
	}
	return n, err
}

// judge decides what the datagram in is, as the response to the query out.
func (x *Exchange) judge(in, out []byte, id uint16, a *query.Ask, s *server) (verdict, *query.Message) {
	if len(in) < dnswire.HeaderLen || len(in) > int(max(a.UDPSize, 512)) {
		return mismatched, nil
	}
	exact, folded := sameQuestion(in, out, id)
	if !folded {
		return mismatched, nil
	}
	if !exact {
		return caseLost, nil
	}
	if dnswire.ReadHeader(in).TC() {
		return truncated, nil
	}
	m, err := query.ReadMessage(in)
	if err != nil {
		return mismatched, nil
	}
	return x.judgeCookie(m, a, s), m
}

// sameQuestion reports whether in is a response with this ID and a question equal to out's, exactly and
// without regard to letter case.
func sameQuestion(in, out []byte, id uint16) (exact, folded bool) {
	if len(in) < dnswire.HeaderLen {
		return false, false
	}
	h := dnswire.ReadHeader(in)
	if h.ID != id || !h.Response() || h.Opcode() != dnswire.OpcodeQuery || h.QD != 1 {
		return false, false
	}
	end := dnswire.PlainName(out, dnswire.HeaderLen)
	if len(in) < end+4 || string(in[end:end+4]) != string(out[end:end+4]) {
		return false, false
	}
	got, want := in[dnswire.HeaderLen:end], out[dnswire.HeaderLen:end]
	if string(got) == string(want) {
		return true, true
	}
	for i := range got {
		if lower(got[i]) != lower(want[i]) {
			return false, false
		}
	}
	return false, true
}

func lower(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		c |= 0x20
	}
	return c
}

// write makes the query in out and returns its ID and length.
func (x *Exchange) write(out []byte, a *query.Ask, s *server, b *buffer, mixCase bool) (id uint16, n int) {
	var random [2 + 32]byte
	rand.Read(random[:])
	id = dnswire.Uint16(random[:])

	var w dnswire.Builder
	w.Reset(out[:0:len(out)])
	w.Question([]byte(a.Name), a.Type, a.Class)
	if mixCase {
		name := w.Bytes()[dnswire.HeaderLen : dnswire.HeaderLen+len(a.Name)]
		for i, c := range name { // a length byte is at most 63, so not a letter
			if 'a' <= c && c <= 'z' && random[2+i/8]>>(i%8)&1 != 0 {
				name[i] = c &^ 0x20
			}
		}
	}
	h := dnswire.Header{ID: id, QD: 1}
	if a.RD {
		h.Flags |= dnswire.FlagRD
	}
	if a.CD {
		h.Flags |= dnswire.FlagCD
	}
	if !a.NoEDNS {
		options := b.opts[:0]
		if !a.NoOptions {
			options = x.appendCookie(options, a, s)
			options = a.Subnet.AppendOption(options)
		}
		w.OPT(a.UDPSize, 0, a.DO, options)
		h.AR = 1
	}
	h.Put(w.Bytes())
	return id, w.Len()
}

// timeLeft returns how long an attempt may take that starts now and would take at most d.
func timeLeft(ctx context.Context, tree *query.Tree, a *query.Ask, now clock.Instant, d time.Duration) (time.Duration, error) {
	if ctx.Err() != nil {
		return 0, contextError(ctx, a.Server)
	}
	if now >= tree.Deadline {
		return 0, fmt.Errorf("%w: time", query.ErrLimit)
	}
	return min(d, tree.Deadline.Sub(now)), nil
}

func contextError(ctx context.Context, server netip.AddrPort) error {
	return fmt.Errorf("asking %v: %w", server, ctx.Err())
}

// networkError turns what the network says into the errors that query declares.
func networkError(ctx context.Context, server netip.AddrPort, err error) error {
	switch {
	case ctx.Err() != nil:
		return contextError(ctx, server)
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), errors.Is(err, syscall.ETIMEDOUT):
		return fmt.Errorf("%w from %v", query.ErrTimeout, server)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%w: %v closed the connection", query.ErrUnreachable, server)
	}
	for _, e := range []syscall.Errno{
		syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EPIPE, syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.EHOSTDOWN,
		syscall.EADDRNOTAVAIL, syscall.EAFNOSUPPORT, syscall.EACCES, syscall.EPERM, syscall.EINVAL, syscall.ENOPROTOOPT,
	} {
		if errors.Is(err, e) {
			return fmt.Errorf("%w: %v: %w", query.ErrUnreachable, server, e)
		}
	}
	return fmt.Errorf("asking %v: %w", server, err)
}
