package resolver

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/answercache"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
	"github.com/sluice-dns/sluice/resolver/internal/validator"
)

// This file is RFC 8767: what was true a while ago, rather than nothing.
//
// It is given to clients that have waited for Options.Cache.StaleAfter, while resolution goes on (package
// pipeline), and where resolution has failed. It goes to the settled answers too, with the TTL it is given
// with, so that a crowd is answered on the hot path; what resolution brings takes its place. After a failure
// nobody is asked again for holdOff, and stale data is given without waiting.

// holdOff is how long servers that did not answer are left alone while there is stale data (RFC 8767 section 5).
const holdOff = 30 * time.Second

// Stale returns what the cache has for a question though some of it has ended, sealed with an extended error
// that says so.
func (e *engine) Stale(q query.Question) (settled.Entry, bool) {
	if e.staleTTL == 0 {
		return settled.Entry{}, false
	}
	u, ok := e.iterator.Cached(q, e.staleTTL)
	if !ok || !u.Stale {
		return settled.Entry{}, false
	}
	now := clock.Elapsed()
	entry, ok := e.validate.Stale(&u, validator.StaleOptions{For: min(e.staleTTL, uint32(holdOff/time.Second)), Judged: e.judges}, now)
	if !ok {
		return settled.Entry{}, false
	}
	hash := answercache.Hash(&e.key, &q)
	e.answers.Put(&q, hash, entry, now)
	if now, ok := e.iterator.Cached(q, e.staleTTL); ok && !now.Stale {
		e.answers.Drop(&q, hash) // resolution has ended meanwhile: what it brought must not be hidden
	}
	return entry, true
}

// Held returns what the caches hold for a question, which need not be among the settled answers, or what they held.
// It asks nobody, so what was never validated is not there.
func (e *engine) Held(q query.Question) (entry settled.Entry, stale, ok bool) {
	now := clock.Elapsed()
	u, ok := e.iterator.Cached(q, 0)
	if !ok {
		entry, ok = e.Stale(q)
		return entry, true, ok
	}
	entry, err := e.validate.Validate(over, query.NewTree(now, query.Budget{}), &u, now)
	return entry, false, err == nil
}

// over is the context of what may not ask anybody.
var over = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// held returns stale data while its servers are left alone.
func (e *engine) held(q query.Question) (settled.Entry, bool) {
	if !e.holds.active(q, clock.Elapsed()) {
		return settled.Entry{}, false
	}
	return e.Stale(q)
}

// insteadOf returns stale data where resolution ended with err. If it ended for the limits of who asked, the
// servers have failed nobody, and the next one may try.
func (e *engine) insteadOf(err error, q query.Question) (settled.Entry, error) {
	entry, ok := e.Stale(q)
	if !ok {
		return settled.Entry{}, err
	}
	if !errors.Is(err, query.ErrLimit) {
		e.holds.begin(q, clock.Elapsed())
	}
	return entry, nil
}

// recovered ends the time in which servers are left alone, and reports whether the settled answers have one to
// this question, if only a stale one.
func (e *engine) recovered(q query.Question) bool {
	e.holds.end(q)
	now := clock.Elapsed()
	buf := entryBuffers.Get().(*[query.MaxEntry]byte)
	defer entryBuffers.Put(buf)
	old, found := e.answers.Get(&q, answercache.Hash(&e.key, &q), buf[:], now)
	if !found.OK && !found.Stale {
		return false
	}
	if old.Stale() {
		for flags := range 4 { // nor are those better who ask for signatures, or not to be protected
			q.DO, q.CD = flags&1 != 0, flags&2 != 0
			e.answers.Drop(&q, answercache.Hash(&e.key, &q))
		}
	}
	return true
}

var entryBuffers = sync.Pool{New: func() any { return new([query.MaxEntry]byte) }}

// holds are the questions of which nobody is asked for a while. The zero value is ready.
type holds struct {
	mu sync.Mutex // guards everything below
	m  map[query.Question]clock.Instant
}

// maxHolds bounds them; a question more costs what one costs that has no stale data.
const maxHolds = 1 << 14

// heldKey is what questions have in common that the same servers would be asked.
func heldKey(q query.Question) query.Question {
	q.DO, q.CD = false, false
	return q
}

func (h *holds) active(q query.Question, now clock.Instant) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.m) > 0 && now.Before(h.m[heldKey(q)])
}

func (h *holds) begin(q query.Question, now clock.Instant) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.m == nil {
		h.m = make(map[query.Question]clock.Instant)
	}
	if len(h.m) >= maxHolds {
		seen := 0
		for k, until := range h.m { // from a random place on
			if seen++; !now.Before(until) || seen == 8 {
				delete(h.m, k)
				break
			}
		}
	}
	h.m[heldKey(q)] = now.Add(holdOff)
}

// forget ends all, since who is asked has changed.
func (h *holds) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.m)
}

func (h *holds) end(q query.Question) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.m) > 0 {
		delete(h.m, heldKey(q))
	}
}
