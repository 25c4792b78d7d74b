package resolver

import (
	"context"
	"sync"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/answercache"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Refresh resolves anew a question whose answer is near its end, and keeps the answer. If that fails the old
// one stays until its end, and after holdOff the next hit in its last tenth tries again.
func (e *engine) Refresh(ctx context.Context, tree *query.Tree, q query.Question) error {
	epoch := e.answers.Epoch()
	u, err := e.iterator.Again(ctx, tree, q, nil)
	if err == nil {
		_, err = e.settle(ctx, tree, &u, true, epoch)
	}
	if err != nil {
		e.giveBack(q, holdOff)
	}
	return err
}

// Postpone is told of a refresh that there was no room for: a hit may ask for it again a moment later.
func (e *engine) Postpone(q query.Question) { e.giveBack(q, time.Second) }

// giveBack gives up, in a while, the claim by which an answer is refreshed once.
func (e *engine) giveBack(q query.Question, in time.Duration) {
	buf := entryBuffers.Get().(*[query.MaxEntry]byte)
	defer entryBuffers.Put(buf)
	now := clock.Elapsed()
	if _, found := e.answers.Get(&q, answercache.Hash(&e.key, &q), buf[:], now); found.OK {
		e.claims.add(claim{found, now.Add(in)})
	}
}

// claims are those to be given back. The zero value is ready.
type claims struct {
	mu sync.Mutex // guards everything below
	of []claim
}

type claim struct {
	found answercache.Found
	until clock.Instant
}

// maxClaims bounds them. An answer whose claim is not given back ends without having been refreshed.
const maxClaims = 4096

func (c *claims) add(of claim) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.of) < maxClaims {
		c.of = append(c.of, of)
	}
}

// release gives back those whose time has come.
func (c *claims) release(now clock.Instant) {
	c.mu.Lock()
	defer c.mu.Unlock()
	left := c.of[:0]
	for _, of := range c.of {
		if now.Before(of.until) {
			left = append(left, of)
		} else {
			of.found.Unclaim()
		}
	}
	clear(c.of[len(left):])
	c.of = left
}
