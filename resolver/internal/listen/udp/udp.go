// Package udp serves DNS over UDP.
//
// Each socket has one worker: a goroutine that receives a batch, answers what the caches hold into a second
// batch, and sends that. Sockets of one address share it through SO_REUSEPORT, so more workers are more
// sockets. Queries that must be resolved are handed to the handler and answered by themselves, later.
//
// On *net.UDPConn a batch is up to 32 datagrams by one recvmmsg, made without telling the scheduler (the
// socket does not block) inside one long call of RawConn.Read, whose goroutine the runtime parks when the
// queue is empty. A worker that has served for a millisecond without finding it empty lets others run. Any
// other connection with the netip methods of *net.UDPConn, such as one of an in-memory network, is served one
// datagram at a time. Both call the same serveBatch.
//
// Responses leave from the address that was asked: on sockets bound to the unspecified address it is read
// from each datagram (IP_PKTINFO, RFC 3542). Dropped without a response: datagrams longer than MaxQuery, those
// from port 0 or from one of our own sockets, those that were in the socket's queue for longer than MaxAge
// (the client has given up; answering would only make the next ones late as well), and responses.
package udp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/listen"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// MaxQuery is the most bytes a query may have, and room for a response.
const MaxQuery = 4096

// batchSize is how many datagrams are received and sent in one call: more gain nothing measurable.
const batchSize = 32

// MaxAge is how long a query may have waited in the socket's queue.
const MaxAge = 1500 * time.Millisecond

// turn is how long a worker serves before it lets others run.
const turn = time.Millisecond

// Options say how to serve. Zero fields mean the default stated.
type Options struct {
	// Conns are served, one worker each, and closed at the end. Required, as is Handler.
	Conns   []net.PacketConn
	Handler listen.Handler

	// Own are the addresses of our other sockets, which must not get answers.
	Own []netip.AddrPort
	// FromProxy names the addresses whose datagrams must begin with a PROXY header, version 2, which tells the
	// source and the local address of the query; responses go to the proxy. Default: none.
	FromProxy func(netip.Addr) bool
	// Drain is how long queries may be resolved once the context has ended. Default 5 s.
	Drain time.Duration
	// ListenerID is put in each query.
	ListenerID uint16
}

// Counters count what was dropped; they may be read at any time.
type Counters struct {
	Overflow atomic.Uint64 // by the kernel, the socket's queue being full
	Old      atomic.Uint64 // longer than MaxAge in the queue
	Long     atomic.Uint64 // longer than MaxQuery
	Source   atomic.Uint64 // from port 0 or from ourselves
	Proxy    atomic.Uint64 // from a proxy without a right PROXY header
	Unsent   atomic.Uint64 // responses that the kernel would not take
}

// A Server serves a set of sockets.
type Server struct {
	opts     Options
	workers  []*worker
	own      addresses
	counters Counters
	pending  sync.WaitGroup // queries being resolved

	closing sync.Once
}

// conn is what a socket must offer.
type conn interface {
	net.PacketConn
	ReadFromUDPAddrPort(b []byte) (n int, from netip.AddrPort, err error)
	WriteToUDPAddrPort(b []byte, to netip.AddrPort) (int, error)
}

// New returns a server; Serve runs it. An error names the connection that cannot be served.
func New(o Options) (*Server, error) {
	if o.Drain == 0 {
		o.Drain = 5 * time.Second
	}
	s := &Server{opts: o}
	for _, a := range o.Own {
		s.own.add(a)
	}
	for _, pc := range o.Conns {
		c, ok := pc.(conn)
		if !ok {
			return nil, fmt.Errorf("serving %v: a %T lacks the netip methods of *net.UDPConn", pc.LocalAddr(), pc)
		}
		local := listen.AddrPort(pc.LocalAddr())
		s.own.add(local)
		w := &worker{server: s, handler: o.Handler, local: local, conn: c, state: o.Handler.NewWorker()}
		w.sockets = plain{w}
		if u, ok := c.(*net.UDPConn); ok {
			m, err := newMMsg(w, u)
			if err != nil {
				return nil, fmt.Errorf("serving %v: %w", local, err)
			}
			w.sockets = m
		}
		s.workers = append(s.workers, w)
	}
	return s, nil
}

// Counters returns the server's counters.
func (s *Server) Counters() *Counters { return &s.counters }

// QueueAge returns the longest that a query was in a socket's queue since it was last called.
func (s *Server) QueueAge() time.Duration {
	var most int64
	for _, w := range s.workers {
		most = max(most, w.queueAge.Swap(0))
	}
	return time.Duration(most)
}

// Serve serves until ctx ends or Close is called, and returns when it has ended. When ctx ends no more is
// received; queries under way are answered within Options.Drain. The error is nil unless a socket failed.
func (s *Server) Serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() {
		for _, w := range s.workers {
			w.conn.SetReadDeadline(time.Unix(1, 0))
		}
	})
	defer stop()
	errs := make([]error, len(s.workers))
	var wg sync.WaitGroup
	for i, w := range s.workers {
		wg.Go(func() {
			err := w.sockets.serve()
			if !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, net.ErrClosed) {
				errs[i] = fmt.Errorf("serving %v: %w", w.local, err)
				s.Close() // a socket that fails is a fault of the machine: the others end with it
			}
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		s.await()
	}
	s.Close()
	return errors.Join(errs...)
}

// await waits until all queries are answered, or for Drain.
func (s *Server) await() {
	done := make(chan struct{})
	go func() { // ends when the handler has replied to everything, as it must
		s.pending.Wait()
		close(done)
	}()
	late := time.NewTimer(s.opts.Drain)
	defer late.Stop()
	select {
	case <-done:
	case <-late.C:
	}
}

// Close closes the sockets. Serve returns soon after; responses that come later are dropped.
func (s *Server) Close() error {
	var err error
	s.closing.Do(func() {
		for _, w := range s.workers {
			err = errors.Join(err, w.conn.Close())
		}
	})
	return err
}

// A worker serves one socket.
type worker struct {
	server  *Server
	handler listen.Handler
	local   netip.AddrPort // as bound
	conn    conn
	sockets sockets
	state   *query.Worker
	query   query.Query
	batch   batch

	queueAge atomic.Int64 // nanoseconds, the most since it was read
}

// sockets is how datagrams come and go: mmsg or plain.
type sockets interface {
	// serve receives batches and calls serveBatch for each until receiving fails.
	serve() error
	// replier returns what sends the response to the i-th datagram later, from any goroutine.
	replier(i int) func(response []byte)
}

// A batch is what was received and what is to be sent.
type batch struct {
	in  [batchSize]datagram
	out [batchSize]answer

	received int
	answers  int
}

// A datagram is one query: its bytes, whence it came, and to which of our addresses.
type datagram struct {
	data        []byte
	from, local netip.AddrPort
}

// An answer is out[:n], the response to the datagram with index to.
type answer struct {
	buf []byte
	n   int
	to  int
}
