package exchange

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// A stream is a TCP connection, used by one exchange at a time.
type stream struct {
	net.Conn
	r      *bufio.Reader
	expire *time.Timer // while idle
}

func (s *stream) close() {
	if s.expire != nil {
		s.expire.Stop()
	}
	s.Close()
}

// minTCPTimeout is how long TCP gets at least after UDP: enough for a handshake with a server that is slow, not
// for a SYN sent again.
const minTCPTimeout = time.Second

// tcp asks over TCP, on an idle connection if there is one. A connection that the server closed while it was
// idle is no fault: a new one is opened, once.
func (x *Exchange) tcp(ctx context.Context, tree *query.Tree, s *server, a *query.Ask, b *buffer, r *query.Reply) error {
	timeout := a.Timeout
	if !a.TCP {
		timeout = max(timeout, minTCPTimeout)
	}
	left, err := timeLeft(ctx, tree, a, clock.Elapsed(), timeout)
	if err != nil {
		return err
	}
	end := clock.Elapsed().Add(left)
	id, n := x.write(b.out[2:], a, s, b, r.CaseLost)
	dnswire.PutUint16(b.out[:], uint16(n))
	out := b.out[:2+n]

	c := x.takeIdle(a.Server)
	for reused := c != nil; ; reused = false {
		if c == nil {
			if c, err = x.dial(ctx, a.Server, end.Sub(clock.Elapsed())); err != nil {
				return networkError(ctx, a.Server, err)
			}
		}
		x.counters.TCP.Add(1)
		m, rtt, err := x.overStream(ctx, c, out, id, end)
		if err == nil {
			x.giveIdle(a.Server, c)
			x.learnOverTCP(m, a, s)
			r.Message, r.RTT = m, rtt
			r.Scope, r.HasScope = a.Subnet.Scope(m.Subnet)
			if r.CaseLost && string(m.QName) == string(out[2+dnswire.HeaderLen:][:len(m.QName)]) {
				r.CaseLost, r.Mismatch = false, true // the server keeps the case: somebody else answered over UDP
			}
			return nil
		}
		c.close()
		c = nil
		if errors.Is(err, query.ErrMalformed) || errors.Is(err, query.ErrTruncated) {
			return fmt.Errorf("response of %v over TCP: %w", a.Server, err)
		}
		err = networkError(ctx, a.Server, err)
		if !reused || !errors.Is(err, query.ErrUnreachable) {
			return err
		}
		if err := tree.Query(); err != nil {
			return err
		}
	}
}

func (x *Exchange) dial(ctx context.Context, server netip.AddrPort, left time.Duration) (*stream, error) {
	ctx, cancel := context.WithTimeout(ctx, left)
	defer cancel()
	c, err := x.opts.Transport.Stream(ctx, server)
	if err != nil {
		return nil, err
	}
	return &stream{Conn: c, r: bufio.NewReaderSize(c, 2048)}, nil
}

// overStream writes the framed query and reads the response.
func (x *Exchange) overStream(ctx context.Context, c *stream, out []byte, id uint16, end clock.Instant) (*query.Message, time.Duration, error) {
	start := clock.Elapsed()
	c.SetDeadline(time.Now().Add(end.Sub(start)))
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	m, rtt, err := func() (*query.Message, time.Duration, error) {
		if _, err := c.Write(out); err != nil {
			return nil, 0, err
		}
		var size [2]byte
		if _, err := io.ReadFull(c.r, size[:]); err != nil {
			return nil, 0, err
		}
		in := make([]byte, dnswire.Uint16(size[:]))
		if _, err := io.ReadFull(c.r, in); err != nil {
			return nil, 0, err
		}
		rtt := clock.Elapsed().Sub(start)
		m, err := query.ReadMessage(in)
		if err != nil {
			return nil, 0, err
		}
		h := m.Header
		// A response without question is taken when it reports an error: some servers that cannot read the
		// query echo nothing of it.
		if _, same := sameQuestion(in, out[2:], id); !same &&
			(m.HasQuestion || m.RCode == dnswire.RCodeNoError || h.ID != id || !h.Response() || h.Opcode() != dnswire.OpcodeQuery) {
			return nil, 0, fmt.Errorf("%w: it answers something else", query.ErrMalformed)
		}
		if h.TC() { // there is nowhere to go from here, and part of an answer is none (RFC 2181 section 9)
			return nil, 0, fmt.Errorf("%w: TC=1", query.ErrTruncated)
		}
		return m, rtt, nil
	}()
	if !stop() && err == nil {
		err = ctx.Err()
	}
	return m, rtt, err
}

// takeIdle returns an idle connection to server, or nil.
func (x *Exchange) takeIdle(server netip.AddrPort) *stream {
	x.mu.Lock()
	defer x.mu.Unlock()
	list := x.idle[server]
	for len(list) > 0 {
		s := list[len(list)-1]
		list = list[:len(list)-1]
		x.idling--
		if len(list) == 0 {
			delete(x.idle, server)
		} else {
			x.idle[server] = list
		}
		if s.expire.Stop() {
			return s
		} // else its timer has fired and closes it
	}
	return nil
}

// giveIdle keeps s for the next exchange, if there is room and nothing unexpected waits in it.
func (x *Exchange) giveIdle(server netip.AddrPort, s *stream) {
	x.mu.Lock()
	if x.closed || x.idling >= x.opts.IdleStreams || s.r.Buffered() > 0 {
		x.mu.Unlock()
		s.close()
		return
	}
	s.expire = time.AfterFunc(x.opts.IdleFor, func() { x.expireIdle(server, s) })
	x.idle[server] = append(x.idle[server], s)
	x.idling++
	x.mu.Unlock()
}

func (x *Exchange) expireIdle(server netip.AddrPort, s *stream) {
	x.mu.Lock()
	list := x.idle[server]
	for i, t := range list {
		if t == s {
			x.idling--
			if list = append(list[:i:i], list[i+1:]...); len(list) == 0 {
				delete(x.idle, server)
			} else {
				x.idle[server] = list
			}
			break
		}
	}
	x.mu.Unlock()
	s.Close()
}
