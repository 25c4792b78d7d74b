package forward

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/forward/upstream"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/selection"
)

// A contest is one question on its way to the members of a pool. It belongs to one goroutine; attempts run in their
// own, and all have ended when run returns.
type contest struct {
	p     *Pool
	ctx   context.Context
	tree  *query.Tree
	ask   query.Ask
	avoid []netip.AddrPort
	end   clock.Instant

	primaries, spares []*member // not asked yet, best first
	explored          bool      // the first primary was chosen by chance
	silent            []*member // to be asked again, in this order
	done              map[*member]bool

	running sync.WaitGroup
	results chan result
	flying  []*attempt
	lost    map[*member]bool // primaries that failed or were silent for longer than patience
	all     int              // primaries
	spared  int              // spares asked

	groups     []group
	weak       *result // a referral, to be taken for a denial when nobody says more
	disagreed  bool
	complaints []string
	unreached  bool  // the network failed, at some upstream
	limit      error // what ended work for the question as a whole
}

// An attempt is one question on its way to one member.
type attempt struct {
	up      *member
	choice  selection.Choice
	noEDNS  bool
	sent    clock.Instant
	patient clock.Instant // until when nobody else is asked on its account
	blame   clock.Instant // when its silence is held against it; 0: never, or it has been
	waiting bool          // patient has not come
	dropped bool          // cancelled in favour of the same question sent anew
	cancel  context.CancelFunc
}

type result struct {
	*attempt
	reply query.Reply
	err   error
	panic *query.Panic
}

// A group is answers that agree.
type group struct {
	print upstream.Fingerprint
	first result
	count int
}

func newContest(ctx context.Context, p *Pool, tree *query.Tree, a query.Ask, avoid []netip.AddrPort) *contest {
	now := clock.Elapsed()
	c := &contest{
		p: p, ctx: ctx, tree: tree, ask: a, avoid: avoid, end: min(tree.Deadline, now.Add(a.Timeout)),
		done: make(map[*member]bool), lost: make(map[*member]bool), results: make(chan result, 3*len(p.ups)+3),
	}
	c.primaries, c.explored = p.order(now, Primary, avoid)
	c.spares, _ = p.order(now, Spare, avoid)
	c.all = len(c.primaries)
	return c
}

// run returns the first answer that suffices.
func (c *contest) run() (won result, print upstream.Fingerprint, err error) {
	defer func() {
		for _, t := range c.flying {
			t.cancel()
		}
		c.running.Wait()
	}()
	if c.p.spec.Strategy >= Race {
		for len(c.primaries) > 0 && c.limit == nil {
			c.next()
		}
	}
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		now := clock.Elapsed()
		c.expire(now)
		for c.limit == nil && now < c.end && c.waits()+c.best() < c.p.need && c.next() {
		}
		if len(c.flying)+c.best() < c.p.need || now >= c.end || c.limit != nil {
			if c.weak != nil && c.p.spec.Strategy != Quorum && c.limit == nil {
				return *c.weak, upstream.FingerprintOf(c.weak.reply.Message), nil
			}
			return result{}, print, c.conclude(now)
		}
		timer.Reset(c.sleep(now))
		select {
		case r := <-c.results:
			if r.panic != nil {
				panic(r.panic)
			}
			if g := c.take(r); g != nil && g.count >= c.p.need {
				return g.first, g.print, nil
			}
		case <-timer.C:
		case <-c.ctx.Done():
			return result{}, print, c.ctx.Err()
		}
	}
}

// waits returns how many attempts may still be answered in good time, best how many answers agree so far.
func (c *contest) waits() (n int) {
	for _, t := range c.flying {
		if t.waiting {
			n++
		}
	}
	return n
}

func (c *contest) best() (n int) {
	for i := range c.groups {
		n = max(n, c.groups[i].count)
	}
	return n
}

// next asks one more member, and reports whether there was one to ask.
func (c *contest) next() bool {
	for {
		var m *member
		switch {
		case len(c.primaries) > 0:
			m, c.primaries = c.primaries[0], c.primaries[1:]
		case len(c.spares) > 0 && c.spareDue():
			m, c.spares = c.spares[0], c.spares[1:]
			c.spared++
		case len(c.silent) > 0:
			m, c.silent = c.silent[0], c.silent[1:]
			if c.done[m] {
				continue
			}
		default:
			return false
		}
		if c.send(m, false) {
			return true
		}
		if c.limit != nil {
			return false
		}
	}
}

// spareDue reports whether primaries have failed so that the next spare is to be asked.
func (c *contest) spareDue() bool {
	if c.p.spec.Strategy == Quorum {
		return c.spared < len(c.lost) // each stands in for one
	}
	return len(c.lost) == c.all
}

// send asks m, or notes why it cannot be asked.
func (c *contest) send(m *member, noEDNS bool) bool {
	now := clock.Elapsed()
	choice, ok := c.p.speed.Pick(now, dnsname.Root, []netip.AddrPort{m.key}, nil)
	if !ok {
		c.lose(m, "rests, having been silent for long")
		return false
	}
	if !c.tree.Send(m.Spec.String(), c.ask.Name, c.ask.Type) {
		c.done[m] = true
		c.count(m)
		return false
	}
	t := &attempt{up: m, choice: choice, noEDNS: noEDNS || choice.NoEDNS, sent: now, waiting: true}
	patience := choice.Patience
	t.blame = now.Add(patience)
	if hurry, ok := c.hurry(m); ok && hurry < patience {
		patience = hurry
	}
	t.patient = now.Add(patience)
	a := c.ask
	a.NoEDNS, a.NoOptions = t.noEDNS, choice.NoOptions
	a.Case0x20 = a.Case0x20 && !choice.NoCase
	a.Timeout = min(choice.Patience+lateness, c.end.Sub(now))
	for _, old := range c.flying { // identical questions would share one exchange, so that nothing were sent anew
		if old.up == m && old.noEDNS == t.noEDNS && m.Scheme == upstream.UDP {
			old.dropped = true
			old.cancel()
		}
	}
	ctx, cancel := context.WithCancel(c.ctx)
	t.cancel = cancel
	c.flying = append(c.flying, t)
	m.counters.Asked.Add(1)
	c.running.Go(func() {
		defer cancel()
		r := result{attempt: t}
		defer func() {
			if v := recover(); v != nil { // it goes on where somebody recovers it, instead of ending the process
				r.panic = query.Caught(v, fmt.Sprintf("question %v %s to %v", a.Name, dnswire.TypeText(a.Type), m.key))
			}
			c.results <- r
		}()
		r.reply, r.err = m.client.Ask(ctx, c.tree, a)
		if r.err == nil {
			c.tree.Hear()
		}
	})
	return true
}

// hurry returns how long to wait before another primary is asked, if that is less than patience with m.
func (c *contest) hurry(m *member) (time.Duration, bool) {
	if c.p.spec.Strategy > Hedged || m.Role != Primary || len(c.primaries) == 0 || len(c.flying) > 0 || len(c.groups) > 0 {
		return 0, false
	}
	known, _ := c.p.speed.Look(clock.Elapsed(), m.key)
	if c.explored {
		// Exploring must not cost the client much: what the best would have taken, twice.
		best, _ := c.p.speed.Look(clock.Elapsed(), c.primaries[0].key)
		for _, o := range c.primaries[1:] {
			if k, ok := c.p.speed.Look(clock.Elapsed(), o.key); ok && k.SRTT > 0 && (best.SRTT == 0 || k.SRTT < best.SRTT) {
				best = k
			}
		}
		c.explored = false
		if best.SRTT > 0 {
			return max(2*best.SRTT, minHedge), true
		}
	}
	if c.p.spec.Strategy == Hedged && known.SRTT > 0 {
		return max(known.SRTT+known.SRTT/2, minHedge), true
	}
	return 0, false
}

// expire ends the patience with attempts that were silent too long.
func (c *contest) expire(now clock.Instant) {
	for _, t := range c.flying {
		if t.blame != 0 && t.blame <= now {
			t.blame = 0
			c.p.speed.TimedOut(now, t.up.key, t.sent)
			t.up.counters.TimedOut.Add(1)
			c.complain(t.up, "timed out")
			c.count(t.up)
			if t.up.Scheme == upstream.UDP {
				c.silent = append(c.silent, t.up)
			}
		}
		if t.patient <= now {
			t.waiting = false
		}
	}
}

// sleep returns how long nothing is to be done unless an answer comes.
func (c *contest) sleep(now clock.Instant) time.Duration {
	until := c.end
	for _, t := range c.flying {
		if t.waiting {
			until = min(until, t.patient)
		}
		if t.blame != 0 {
			until = min(until, t.blame)
		}
	}
	return max(until.Sub(now), 0)
}

// take judges what came of an attempt; it returns the group of an answer.
func (c *contest) take(r result) *group {
	t := r.attempt
	c.flying = slices.DeleteFunc(c.flying, func(f *attempt) bool { return f == t })
	now := clock.Elapsed()
	if r.err != nil {
		c.takeError(t, r.err, now)
		return nil
	}
	c.p.learn(now, t, &r.reply)
	why := failure(r.reply.Message)
	if why == "" {
		t.up.refused.Store(0)
		t.up.counters.Answered.Add(1)
		c.done[t.up] = true
		return c.vote(r)
	}
	t.up.counters.Failed.Add(1)
	// An error without OPT may be due to ours (RFC 6891 section 6.2.2).
	m := r.reply.Message
	if !t.noEDNS && !m.EDNS && !t.choice.EDNS && (m.RCode == dnswire.RCodeFormErr || m.RCode == dnswire.RCodeNotImp) && c.send(t.up, true) {
		return nil
	}
	if m.RCode == dnswire.RCodeNoError && !m.Header.TC() && c.weak == nil {
		c.weak = &r
	}
	switch m.RCode {
	case dnswire.RCodeRefused, dnswire.RCodeNotImp, dnswire.RCodeNoError:
		t.up.refused.Store(int64(now.Add(refusedFor)))
	}
	c.lose(t.up, why)
	return nil
}

func (c *contest) vote(r result) *group {
	print := upstream.FingerprintOf(r.reply.Message)
	for i := range c.groups {
		if g := &c.groups[i]; g.print == print {
			g.count++
			return g
		}
	}
	c.groups = append(c.groups, group{print, r, 1})
	return &c.groups[len(c.groups)-1]
}

func (c *contest) takeError(t *attempt, err error, now clock.Instant) {
	switch {
	case t.dropped || c.ctx.Err() != nil:
	case errors.Is(err, query.ErrLimit):
		c.limit = err
	case errors.Is(err, query.ErrBusy):
		c.lose(t.up, "is busy with other questions")
	case errors.Is(err, query.ErrTimeout):
		t.blame = min(t.blame, now) // as expire will see, unless it has
		if t.blame != 0 {
			c.flying = append(c.flying, t)
			c.expire(now)
			c.flying = slices.DeleteFunc(c.flying, func(f *attempt) bool { return f == t })
		}
	default:
		t.up.counters.Broken.Add(1)
		if errors.Is(err, query.ErrUnreachable) {
			c.unreached = true
			c.p.speed.TimedOut(now, t.up.key, t.sent)
		}
		c.lose(t.up, err.Error())
	}
}

// count notes that a primary has failed, which may call for a spare.
func (c *contest) count(m *member) {
	if m.Role == Primary {
		c.lost[m] = true
	}
}

// lose has done with a member.
func (c *contest) lose(m *member, why string) {
	c.done[m] = true
	c.count(m)
	c.complain(m, why)
}

func (c *contest) complain(m *member, what string) {
	if len(c.complaints) < 4 {
		if !strings.Contains(what, m.Addr.String()) {
			what = m.Addr.String() + " " + what
		}
		c.complaints = append(c.complaints, what)
	}
}

// conclude says why there is no answer.
func (c *contest) conclude(now clock.Instant) error {
	if c.limit != nil {
		return c.limit
	}
	if len(c.groups) > 0 {
		c.disagreed = true
		answers := 0
		for i := range c.groups {
			answers += c.groups[i].count
		}
		c.complaints = slices.Insert(c.complaints, 0, fmt.Sprintf("no quorum: of %d answers %d agree, %d must", answers, c.best(), c.p.need))
	}
	text := "no upstream to ask"
	if len(c.complaints) > 0 {
		text = strings.Join(c.complaints, ", ")
	}
	switch {
	case c.unreached:
		return fmt.Errorf("%w: %s", query.ErrUnreachable, text)
	case now >= c.tree.Deadline:
		return fmt.Errorf("%w: time: %s", query.ErrLimit, text)
	}
	return fmt.Errorf("%w: %s", query.ErrTimeout, text)
}
