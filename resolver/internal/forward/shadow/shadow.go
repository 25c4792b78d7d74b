// Package shadow tries out resolvers beside those that answer, without ever answering.
//
// A Set is shown questions with the fingerprint of the answer that was given. Of some of them, chosen at random, it
// asks its resolvers too and counts how they would have done: the same answer, another one, none, and how fast. That
// is all that comes back. Nothing here returns a message or anything made of one: what a shadow said is reduced to a
// fingerprint the moment it arrives, so that no mistake of a caller can put it before a client or make a client wait
// for it. (A design in which shadows were resolvers like others, told apart by a setting, took a cloud's DNS down.)
//
// Its budget is its own: at most Options.InFlight questions are outstanding at all its resolvers together, and what
// would be more is skipped and counted; trees of clients are not charged. Observe never waits.
package shadow

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/forward/upstream"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Observe shows the set a question that was answered. a.Server is ignored.
func (s *Set) Observe(a query.Ask, answered upstream.Fingerprint) {
	if len(s.resolvers) == 0 || s.o.Sample > 1 && rand.IntN(s.o.Sample) != 0 {
		return
	}
	for _, r := range s.resolvers {
		s.mu.Lock()
		full := s.inFlight >= s.o.InFlight
		if full || s.closed {
			s.mu.Unlock()
			r.counters.Skipped.Add(1)
			continue
		}
		s.inFlight++
		s.running.Add(1)
		s.mu.Unlock()
		go s.compare(r, a, answered)
	}
}

// Options tune a Set. Zero fields mean the default stated.
type Options struct {
	// Sample is how many questions there are to one that is tried. Default 8; 1 tries all.
	Sample int
	// InFlight bounds the questions outstanding. Default 16.
	InFlight int
	// Timeout is how long a shadow may take. Default 5 s.
	Timeout time.Duration
}

// A Set is some resolvers that are tried out. It is safe for concurrent use.
type Set struct {
	o         Options
	resolvers []*resolver
	ctx       context.Context // ends when the set is closed
	cancel    context.CancelFunc
	running   sync.WaitGroup

	mu       sync.Mutex // guards everything below
	inFlight int
	closed   bool
}

type resolver struct {
	client   upstream.Client
	counters Counters
}

// Counters count how one resolver did; they may be read at any time.
type Counters struct {
	Same      atomic.Uint64 // answered as the client was answered
	Different atomic.Uint64 // answered, with another RCODE or other data
	Failed    atomic.Uint64 // an error, or an RCODE that is no answer
	TimedOut  atomic.Uint64
	Skipped   atomic.Uint64 // not asked: the budget was spent
	Panicked  atomic.Uint64 // made us panic: a fault of ours, which costs nobody an answer
	// Took is how long answers took in all, in nanoseconds.
	Took atomic.Int64
}

// New returns a set that owns the clients.
func New(clients []upstream.Client, o Options) *Set {
	if o.Sample == 0 {
		o.Sample = 8
	}
	if o.InFlight == 0 {
		o.InFlight = 16
	}
	if o.Timeout == 0 {
		o.Timeout = 5 * time.Second
	}
	s := &Set{o: o}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	for _, c := range clients {
		s.resolvers = append(s.resolvers, &resolver{client: c})
	}
	return s
}

// Counters returns those of each resolver, in the order given to New.
func (s *Set) Counters() (out []*Counters) {
	for _, r := range s.resolvers {
		out = append(out, &r.counters)
	}
	return out
}

// maxQueries is what one question may cost: truncation and a cookie exchange included.
const maxQueries = 4

func (s *Set) compare(r *resolver, a query.Ask, answered upstream.Fingerprint) {
	defer s.running.Done()
	defer func() {
		if v := recover(); v != nil {
			r.counters.Panicked.Add(1)
			slog.Error("comparing a shadow's answer panicked", "panic", query.Caught(v, "question "+a.Name.String()))
		}
		s.mu.Lock()
		s.inFlight--
		s.mu.Unlock()
	}()
	a.Timeout = s.o.Timeout
	tree := query.NewTree(clock.Elapsed(), query.Budget{Time: s.o.Timeout, Queries: maxQueries})
	start := clock.Elapsed()
	reply, err := r.client.Ask(s.ctx, tree, a)
	switch {
	case s.ctx.Err() != nil:
	case err != nil && clock.Elapsed() >= tree.Deadline:
		r.counters.TimedOut.Add(1)
	case err != nil || !upstream.Answers(reply.Message):
		r.counters.Failed.Add(1)
	default:
		r.counters.Took.Add(int64(max(clock.Elapsed().Sub(start), 0)))
		if upstream.FingerprintOf(reply.Message) == answered {
			r.counters.Same.Add(1)
		} else {
			r.counters.Different.Add(1)
		}
	}
}

// Close ends everything under way and waits for it.
func (s *Set) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.running.Wait()
	for _, r := range s.resolvers {
		r.client.Close()
	}
	return nil
}
