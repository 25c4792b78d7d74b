// Package forward asks the resolvers of a forward zone: a pool of upstreams of which one good answer is wanted.
//
// Forward puts one question, with RD=1, DO=1 and CD=1: validation is done here, above the pool, and must see the
// data that an upstream would hold back as bogus. An answer is NOERROR, NXDOMAIN or YXDOMAIN. Everything else is a
// failure of that upstream for this question, and the next one is asked: SERVFAIL, REFUSED and other RCODEs, a
// referral (which is taken for NODATA without SOA when nobody says more: some resolvers answer so), silence, a malformed or truncated message (after TCP has been tried), a broken connection. An upstream
// that says REFUSED or NOTIMP, or refers, is asked last for refusedFor: it will say so again. There is no failure
// memory of questions here; that is the iterator's.
//
// # Roles
//
// Primaries answer. Spares are asked only when primaries fail: with fastest, hedged and race when every primary has
// failed or has been silent for longer than patience, with quorum one for each such primary. The first answers that
// suffice end the matter whoever gives them, so a spare's delay never delays what a primary already has, and a
// primary that is late still wins over a spare that is later. Shadows (package shadow) never answer anybody, by type:
// they are handed over at New, and what is left of them here is a thing that can be told of an answer and returns
// nothing. They count for nothing below.
//
// # Strategies
//
// Fastest asks the primary with the lowest smoothed round-trip time; one in exploreOneIn questions goes to another, to
// notice that it got better. When patience with it ends (as package selection has it: twice the time expected and more,
// 50 ms to 1.5 s, 376 ms if unknown) or it fails, the next fastest is asked too, the first still being welcome.
//
// Hedged is fastest, but a second primary is asked once the first has taken longer than it usually does (its
// round-trip time and half as much again), before patience has ended.
//
// Race asks all primaries at once; the first answer is taken. Failures do not count while others may still answer.
//
// Quorum asks all primaries at once and answers when as many as the quorum give the same answer: the same RCODE and
// the same RRsets in the answer section, whatever the order, TTLs, letter case and signatures. As soon as no number of
// those outstanding could make a quorum any more, it fails and says so; disagreement is no failure of a primary and
// calls for no spare. A quorum larger than the number of primaries cannot be had: New refuses it.
//
// Over UDP the same upstream is asked again when all have been asked and it stayed silent, at most three times
// (query.Tree.Send); other transports repeat what is lost by themselves. An attempt whose patience has ended goes on
// for lateness more, since an upstream may itself have to resolve. Upstreams silent three times in a row rest, as
// package selection has it: they are asked last, and in the end by one question at a time.
//
// Errors: query.ErrLimit or the context's error where those ended it, net.ErrClosed after Close, else one that names
// each upstream tried and what it did. Time is elapsed time throughout. Every message costs the question's tree one query, shadows' none.
package forward

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/forward/shadow"
	"github.com/sluice-dns/sluice/resolver/internal/forward/upstream"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/selection"
)

// Forward puts a question to the pool. a says name, type, class, subnet, whether letter case may be varied, and by its
// Timeout how long all of it may take. Upstreams with an address in avoid are asked last. The address returned is that
// of the upstream whose answer it is, with quorum of the first of those that agree.
func (p *Pool) Forward(ctx context.Context, tree *query.Tree, a query.Ask, avoid []netip.AddrPort) (query.Reply, netip.AddrPort, error) {
	if !p.enter() {
		return query.Reply{}, netip.AddrPort{}, fmt.Errorf("the pool was replaced: %w", net.ErrClosed)
	}
	defer p.running.Done()
	a.Server, a.RD, a.CD, a.DO = netip.AddrPort{}, true, true, true
	c := newContest(ctx, p, tree, a, avoid)
	won, print, err := c.run()
	if err != nil {
		p.counters.Failed.Add(1)
		if c.disagreed {
			p.counters.Disagreed.Add(1)
		}
		return query.Reply{}, netip.AddrPort{}, err
	}
	p.counters.Answered.Add(1)
	won.up.counters.Won.Add(1)
	p.shadows.Observe(a, print)
	return won.reply, won.up.Addr, nil
}

// A Role is what an upstream is used for.
type Role uint8

// The roles.
const (
	Primary Role = iota
	Spare
	Shadow
)

var roleNames = [...]string{"primary", "spare", "shadow"}

func (r Role) String() string { return roleNames[r] }

// A Strategy is how several upstreams are used.
type Strategy uint8

// The strategies; see the package comment.
const (
	Fastest Strategy = iota
	Hedged
	Race
	Quorum
)

// An Upstream is a resolver and its role.
type Upstream struct {
	upstream.Spec
	Role Role
}

// A Spec says what a pool consists of.
type Spec struct {
	Upstreams []Upstream
	Strategy  Strategy
	Quorum    int // how many must agree, with strategy Quorum; otherwise 0
}

// Equal reports whether two specs make the same pool.
func (s Spec) Equal(o Spec) bool {
	return s.Strategy == o.Strategy && s.Quorum == o.Quorum && slices.Equal(s.Upstreams, o.Upstreams)
}

// Check returns what is wrong with a spec.
func (s Spec) Check() error {
	primaries := 0
	for i, u := range s.Upstreams {
		if u.Role > Shadow {
			return fmt.Errorf("upstream %v: unknown role %d", u, u.Role)
		}
		if u.Role == Primary {
			primaries++
		}
		if slices.ContainsFunc(s.Upstreams[:i], func(o Upstream) bool { return o.Spec == u.Spec }) {
			return fmt.Errorf("upstream %v stands twice", u.Spec)
		}
	}
	switch {
	case primaries == 0:
		return errors.New("no upstream is a primary: shadows never answer, spares only beside primaries")
	case s.Strategy > Quorum:
		return fmt.Errorf("unknown strategy %d", s.Strategy)
	case s.Strategy != Quorum && s.Quorum != 0:
		return fmt.Errorf("a quorum of %d without the strategy quorum", s.Quorum)
	case s.Strategy == Quorum && s.Quorum < 1:
		return errors.New("the strategy quorum needs to know how many must agree")
	case s.Quorum > primaries:
		return fmt.Errorf("a quorum of %d of %d primaries; shadows and spares do not count", s.Quorum, primaries)
	}
	return nil
}

// Options are what pools share.
type Options struct {
	upstream.Options
	Shadow shadow.Options
}

// A Pool is the upstreams of one forward zone. It is safe for concurrent use.
type Pool struct {
	spec     Spec // constant after New
	need     int  // answers that must agree
	ups      []*member
	shadows  observer
	set      *shadow.Set // for Close and counters
	speed    *selection.Selector
	counters Counters

	running sync.WaitGroup // Forwards; Add under mu, while not closed
	mu      sync.Mutex     // guards closed
	closed  bool
}

// An observer is told what was answered. It is all that Forward sees of shadows.
type observer interface {
	Observe(a query.Ask, answered upstream.Fingerprint)
}

// A member is a primary or spare.
type member struct {
	Upstream
	client   upstream.Client
	key      netip.AddrPort // its name in Pool.speed: the address alone may be another upstream's too
	refused  atomic.Int64   // until when it is asked last: a clock.Instant
	counters MemberCounters
}

// Counters count what a pool did; they may be read at any time.
type Counters struct {
	Answered, Failed atomic.Uint64
	Disagreed        atomic.Uint64 // failed for want of a quorum among answers that came
}

// MemberCounters count what one primary or spare did.
type MemberCounters struct {
	Asked, Answered, Won     atomic.Uint64
	TimedOut, Failed, Broken atomic.Uint64 // silent; an RCODE that is no answer; an error of the network or a malformed message
}

// Numbers of choosing.
const (
	exploreOneIn = 20
	refusedFor   = 30 * time.Second
	// lateness is how long after patience has ended an answer is still welcome.
	lateness = 5 * time.Second
	// unknownTime is what is expected of an upstream that never answered, as in package selection.
	unknownTime = 376 * time.Millisecond
	minHedge    = 5 * time.Millisecond
)

// New returns a pool; it opens nothing yet.
func New(s Spec, o Options) (*Pool, error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	return build(s, o)
}

// build is New without Check.
func build(s Spec, o Options) (*Pool, error) {
	p := &Pool{spec: s, need: max(s.Quorum, 1), speed: selection.New(selection.Options{Size: max(len(s.Upstreams), 1)})}
	var shadows []upstream.Client
	for i, u := range s.Upstreams {
		c, err := upstream.New(u.Spec, o.Options)
		if err != nil {
			return nil, err
		}
		if u.Role == Shadow {
			shadows = append(shadows, c)
			continue
		}
		p.ups = append(p.ups, &member{Upstream: u, client: c, key: netip.AddrPortFrom(netip.IPv4Unspecified(), uint16(i+1))})
	}
	p.set = shadow.New(shadows, o.Shadow)
	p.shadows = p.set
	return p, nil
}

// Spec returns what the pool was made of.
func (p *Pool) Spec() Spec { return p.spec }

func (p *Pool) enter() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.running.Add(1)
	return true
}

// Close takes no more questions, waits for those under way, and ends connections.
func (p *Pool) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.running.Wait()
	p.set.Close()
	for _, u := range p.ups {
		u.client.Close()
	}
	return nil
}

// Stats are the counters of a pool and of each upstream, in the order of its spec.
type Stats struct {
	Answered, Failed, Disagreed uint64
	Upstreams                   []UpstreamStats
}

// UpstreamStats are those of one upstream. A shadow has Same and Different, others Won and SRTT.
type UpstreamStats struct {
	Name                     string
	Role                     Role
	Asked, Answered, Won     uint64
	TimedOut, Failed, Broken uint64
	Same, Different, Skipped uint64
	SRTT                     time.Duration
	Resting                  bool
}

// Stats reads the counters.
func (p *Pool) Stats(now clock.Instant) Stats {
	s := Stats{Answered: p.counters.Answered.Load(), Failed: p.counters.Failed.Load(), Disagreed: p.counters.Disagreed.Load()}
	members, shadows := p.ups, p.set.Counters()
	for _, u := range p.spec.Upstreams {
		st := UpstreamStats{Name: u.Spec.String(), Role: u.Role}
		if u.Role == Shadow {
			c := shadows[0]
			shadows = shadows[1:]
			st.Same, st.Different, st.Skipped = c.Same.Load(), c.Different.Load(), c.Skipped.Load()
			st.TimedOut, st.Failed = c.TimedOut.Load(), c.Failed.Load()
			st.Answered = st.Same + st.Different
			st.Asked = st.Answered + st.TimedOut + st.Failed
			if st.Answered > 0 {
				st.SRTT = time.Duration(c.Took.Load() / int64(st.Answered))
			}
		} else {
			m := members[0]
			members = members[1:]
			c := &m.counters
			st.Asked, st.Answered, st.Won = c.Asked.Load(), c.Answered.Load(), c.Won.Load()
			st.TimedOut, st.Failed, st.Broken = c.TimedOut.Load(), c.Failed.Load(), c.Broken.Load()
			known, _ := p.speed.Look(now, m.key)
			st.SRTT, st.Resting = known.SRTT, known.Resting
		}
		s.Upstreams = append(s.Upstreams, st)
	}
	return s
}

// order returns the primaries or spares, best first. explored says that the first is there by chance, before the best.
func (p *Pool) order(now clock.Instant, role Role, avoid []netip.AddrPort) (out []*member, explored bool) {
	type place struct {
		m    *member
		last int // how many reasons there are to ask it last
		time time.Duration
	}
	var places []place
	for _, m := range p.ups {
		if m.Role != role {
			continue
		}
		known, _ := p.speed.Look(now, m.key)
		at := place{m: m, time: known.SRTT}
		if at.time == 0 {
			at.time = unknownTime
		}
		at.time += time.Duration(known.Timeouts) * unknownTime
		until := clock.Instant(m.refused.Load())
		switch {
		case slices.Contains(avoid, m.Addr):
			at.last = 3
		case known.Resting:
			at.last = 2
		case now.Before(until) && until.Sub(now) <= refusedFor:
			at.last = 1
		}
		places = append(places, at)
	}
	rand.Shuffle(len(places), func(i, j int) { places[i], places[j] = places[j], places[i] }) // equals in any order
	slices.SortStableFunc(places, func(a, b place) int {
		if a.last != b.last {
			return a.last - b.last
		}
		return int(a.time - b.time)
	})
	for _, at := range places {
		out = append(out, at.m)
	}
	if role == Primary && p.spec.Strategy <= Hedged && len(out) > 1 && places[1].last == 0 && rand.IntN(exploreOneIn) == 0 {
		n := 1
		for n < len(out) && places[n].last == 0 {
			n++
		}
		i := 1 + rand.IntN(n-1)
		chance := out[i]
		copy(out[1:], out[:i]) // the best is the next to be asked, should this one be slow
		out[0], explored = chance, true
	}
	return out, explored
}

// settle notes what an answer says of the upstream's abilities.
func (p *Pool) learn(now clock.Instant, t *attempt, r *query.Reply) {
	switch {
	case r.Joined:
		p.speed.Alive(now, t.up.key)
	default:
		p.speed.Answered(now, t.up.key, r.RTT)
	}
	if r.CaseLost {
		p.speed.Lacking(now, t.up.key, selection.LackCase)
	}
	if !upstream.Answers(r.Message) {
		return
	}
	switch {
	case r.Message.EDNS && !t.choice.EDNS:
		p.speed.Able(now, t.up.key, selection.LackEDNS)
	case t.noEDNS && !t.choice.NoEDNS:
		p.speed.Lacking(now, t.up.key, selection.LackEDNS)
	}
}

// failure says in words why a response is no answer, "" if it is one.
func failure(m *query.Message) string {
	switch {
	case m.Header.TC():
		return "truncated its response over TCP"
	case upstream.Answers(m):
		return ""
	case m.RCode == dnswire.RCodeNoError:
		return "refers instead of resolving"
	}
	return "said " + dnswire.RCodeText(m.RCode)
}
