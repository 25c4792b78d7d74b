package resolver

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/admin"
	"github.com/sluice-dns/sluice/resolver/internal/validator"
)

// negativeAnchors are the negative trust anchors of an engine (RFC 7646): configured ones, which stay, and those that
// operators add for a while. Whatever changes them makes the caches forget what is at and below the name, and look
// anew at every settled answer.
type negativeAnchors struct {
	engine *engine

	mu  sync.Mutex // guards what is below
	all map[Name]negativeAnchor
}

type negativeAnchor struct {
	until clock.Instant // clock.Never if it is configured
	why   string
}

// maxNegativeAnchors bounds those that are added.
const maxNegativeAnchors = 256

func newNegativeAnchors(e *engine, configured []Name) *negativeAnchors {
	n := &negativeAnchors{engine: e, all: make(map[Name]negativeAnchor)}
	for _, name := range configured {
		n.all[name] = negativeAnchor{until: clock.Never}
	}
	return n
}

// List returns all, in order of name.
func (n *negativeAnchors) List() (out []admin.NegativeAnchor) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for name, a := range n.all {
		out = append(out, shown(name, a))
	}
	slices.SortFunc(out, func(a, b admin.NegativeAnchor) int { return strings.Compare(a.Name.String(), b.Name.String()) })
	return out
}

func shown(name Name, a negativeAnchor) admin.NegativeAnchor {
	m := admin.NegativeAnchor{Name: name, Why: a.why}
	if a.until != clock.Never {
		m.Until = clock.Wall().Add(a.until.Sub(clock.Elapsed()))
	}
	return m
}

// Add adds one for d, or gives one that was added another end.
func (n *negativeAnchors) Add(name Name, d time.Duration, why string) (admin.NegativeAnchor, error) {
	n.mu.Lock()
	old, had := n.all[name]
	a := negativeAnchor{until: clock.Elapsed().Add(d), why: why}
	switch {
	case had && old.until == clock.Never:
		n.mu.Unlock()
		return admin.NegativeAnchor{}, &admin.FieldError{Field: "name", What: name.String() + " is in dnssec.insecure already"}
	case !had && len(n.all) >= maxNegativeAnchors:
		n.mu.Unlock()
		return admin.NegativeAnchor{}, fmt.Errorf("there are %d negative trust anchors already; remove one first", len(n.all))
	}
	n.all[name] = a
	n.apply()
	n.mu.Unlock()
	if !had {
		n.engine.rejudge(name)
	}
	return shown(name, a), nil
}

// Remove takes one away.
func (n *negativeAnchors) Remove(name Name) error {
	n.mu.Lock()
	_, had := n.all[name]
	above := Name("")
	for p := name.Parent(); p != "" && !had && above == ""; p = p.Parent() {
		if _, is := n.all[p]; is {
			above = p
		}
	}
	delete(n.all, name)
	n.apply()
	n.mu.Unlock()
	switch {
	case had:
	case above != "":
		return fmt.Errorf("negative trust anchor at %v: %w; it is the one at %v that keeps the name from being validated", name, admin.ErrNotFound, above)
	default:
		return fmt.Errorf("negative trust anchor at %v: %w; the name is validated as it is (nta list shows all there are)", name, admin.ErrNotFound)
	}
	n.engine.rejudge(name)
	return nil
}

// apply tells the validator. mu is held.
func (n *negativeAnchors) apply() {
	list := make([]validator.Insecure, 0, len(n.all))
	for name := range n.all {
		list = append(list, validator.Insecure{Name: name})
	}
	n.engine.validate.SetInsecure(list)
}

// expire ends those whose time is over and returns them.
func (n *negativeAnchors) expire(now clock.Instant) (ended []Name) {
	n.mu.Lock()
	for name, a := range n.all {
		if !now.Before(a.until) {
			delete(n.all, name)
			ended = append(ended, name)
		}
	}
	if len(ended) > 0 {
		n.apply()
	}
	n.mu.Unlock()
	for _, name := range ended {
		n.engine.rejudge(name)
	}
	return ended
}

// run ends them in time, until ctx ends.
func (n *negativeAnchors) run(ctx context.Context, log *slog.Logger) {
	everySecond(ctx, func() {
		for _, name := range n.expire(clock.Elapsed()) {
			log.Info("the time of a negative trust anchor is over", "name", name.String())
		}
	})
}

// rejudge makes what is at and below a name be fetched and judged anew, and settled answers be made anew.
func (e *engine) rejudge(name Name) {
	e.rrsets.Purge(name, true, 0)
	e.forget(name, true)
	e.answers.Raise()
	e.holds.forget()
}
