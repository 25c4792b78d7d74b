// Package pipeline is the path of a query: the order of the stages, stated once.
//
// step takes a query as far as it can go without waiting and says what came of it: a response is written,
// nothing is to be sent, or a question has to be resolved first. TryNow is step over what the caches hold,
// called inline by listeners. Resolve fetches what step needs, then steps again with the answer in hand, as
// often as policy turns the question into another (query.MaxTurns at most). All transports use these two.
//
// The order inside a step: limits and access; identity; policy on the question, that of everybody's policy zones
// before the user's; local data; caches; policy on the answer, likewise; what is changed in it for everybody; the response. A rewritten question, a flattened alias
// and the A records that AAAA records are made of are one more turn of the same loop, not a branch of its own. step is pure: it waits for nothing, allocates nothing, and writes only to what
// the worker owns.
//
// Resolution is shared: one flight for each Question, whoever asks, so the flight never learns who does. A
// query that needs a flight waits in it, which costs memory but no goroutine; how many wait is bounded, and
// one client's retransmission joins its first query. Who has waited for a while, or may not wait, is given
// stale data if there is any. A client over UDP is not answered when it has given up; while no server has said
// anything it is told so before it does.
package pipeline

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/crew"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
)

// The stages, by what the path needs of each.
type (
	// A Gate applies limits and access lists. Early is called before the client is known, Late after.
	Gate interface {
		Early(q *query.Query) query.RefuseReason
		Late(q *query.Query) query.RefuseReason
	}

	// An Identifier fills in q.Client, or says why the query must be refused. After query.Unproven Prove is to be
	// called, which may take its time, and then Identify again, which does not say so twice.
	//
	// Unassigned says that the address asked is kept for clients and is nobody's: no answer leaves it, not even one
	// that refuses.
	Identifier interface {
		Identify(q *query.Query) query.RefuseReason
		Unassigned(q *query.Query) bool
		Prove(ctx context.Context, q *query.Query)
	}

	// A Policy judges. Question judges q.Turn.Current, Answer what came back for it; sofar is what Question
	// said. Neither may be called before the client's own rules are compiled: Ready says whether they are,
	// Prepare compiles them and may take its time. If Prepare is false the client has to be identified anew, for
	// its settings have changed meanwhile.
	Policy interface {
		Ready(q *query.Query) bool
		Prepare(ctx context.Context, q *query.Query) bool
		Question(q *query.Query) query.Verdict
		Answer(q *query.Query, a *query.Answer, sofar query.Verdict) query.Verdict
	}

	// Local answers from local data and for special names; buf is work space.
	Local interface {
		Lookup(question *query.Question, now clock.Instant) (settled.Entry, bool)
	}

	// Answers is the cache of settled answers: an entry is copied into buf.
	Answers interface {
		Get(question *query.Question, now clock.Instant, buf []byte) (e settled.Entry, refresh bool, ok bool)
	}

	// A Fetcher resolves a question, settles the answer and puts into the caches what belongs there. It is
	// told nothing of who asks. An error says why there is no answer; one that wraps query.ErrLimit is
	// about tree, not about the question.
	Fetcher interface {
		Fetch(ctx context.Context, tree *query.Tree, question query.Question) (settled.Entry, error)
		// Refresh resolves anew what the caches still hold, and replaces it. Postpone is told instead when
		// there is no room for that now.
		Refresh(ctx context.Context, tree *query.Tree, question query.Question) error
		Postpone(question query.Question)
		// Stale returns what the caches have past its end (RFC 8767), without waiting for anybody.
		Stale(question query.Question) (settled.Entry, bool)
		// Held returns what the caches have, if there is nothing better what is past its end, and says that. Nobody
		// is asked.
		Held(question query.Question) (e settled.Entry, stale, ok bool)
	}

	// Zones judges by response policy zones, which hold for everybody. hit is false if no rule matches; a verdict
	// of kind Pass that hits means that no other rule is to be applied. Question judges q.Turn.Current and the
	// client, Alias whether a rule matches the name of an alias, Answer what came back, a nil a standing for a
	// failure. Target is the alias that the caches have for a name, so that a rule for where it leads holds even
	// if nothing is there.
	Zones interface {
		Question(q *query.Query) (v query.Verdict, hit bool)
		Alias(name dnsname.Name) bool
		Answer(q *query.Query, a *query.Answer, now clock.Instant) (v query.Verdict, hit bool)
		Target(question *query.Question, now clock.Instant) (target dnsname.Name, ttl uint32, ok bool)
	}

	// NameServers knows whose servers answers came from, for rules that want to know. Unknown returns the names of an
	// answer of which it does not know what such a rule for q wants to know, Find has them looked for.
	NameServers interface {
		Unknown(q *query.Query, a *query.Answer, now clock.Instant) []dnsname.Name
		Find(ctx context.Context, tree *query.Tree, view query.View, names []dnsname.Name)
	}

	// Cookies checks the cookie of a query and makes the one it gets back (RFC 7873).
	Cookies interface {
		Check(q *query.Query, wall time.Time)
	}

	// DNS64 says when an answer to a question of type AAAA is to be made of A records, and whether some of its
	// own do not count; Reverse gives the name that a reverse name within its prefix is an alias of.
	DNS64 interface {
		Wanted(q *query.Query, a *query.Answer) bool
		Excludes(q *query.Query, a *query.Answer) bool
		Reverse(n dnsname.Name) (dnsname.Name, bool)
	}

	// Rebinding says whether an answer may hold private addresses for a public name.
	Rebinding interface {
		Offends(q *query.Query, a *query.Answer) bool
	}

	// Subnets says whose network q.Turn.Current carries to those who answer it (RFC 7871), if anybody's.
	Subnets interface {
		Subnet(q *query.Query) query.Subnet
	}

	// A Renderer writes responses.
	Renderer interface {
		Answer(q *query.Query, a *query.Answer, now clock.Instant, out []byte) int
		Block(q *query.Query, b *query.Block, out []byte) int
		Synth(q *query.Query, s *query.Synth, out []byte) int
		Truncated(q *query.Query, out []byte) int
		Error(q *query.Query, rcode, ede uint16, text string, out []byte) int
		Fault(q *query.Query, f query.Fault, out []byte) int
	}
)

// A Failure is an error of a Fetcher that says which extended error (RFC 8914) a client should be given.
type Failure interface {
	error
	EDE() (code uint16, text string)
}

// Options are the stages and the limits of a Pipeline. All stages are needed, but for those that say otherwise.
type Options struct {
	Gate     Gate
	Identify Identifier
	Policy   Policy
	Local    Local
	Answers  Answers
	Fetch    Fetcher
	Render   Renderer
	// Zones, NameServers, Subnets, Cookies, DNS64 and Rebinding are off if nil.
	Zones       Zones
	NameServers NameServers
	Subnets     Subnets
	Cookies     Cookies
	DNS64       DNS64
	Rebinding   Rebinding

	// Budget is what one client's question may cost; read for each, so that it can be changed live.
	Budget func() query.Budget
	// InFlight is how many questions may be resolved at once, read for each. Zero means 10,000.
	InFlight func() int
	// Waiters is how many queries may wait in all. Zero means ten for each question in flight.
	Waiters func() int
	// Outstanding is how many of a stranger's queries may wait at once, by address; read for each. Nil or
	// zero means no limit.
	Outstanding func() int
	// ClientWaitUDP is how long after its arrival a UDP query is still answered. Zero means 5 s; it is 1.9 s while
	// more than half of Waiters wait.
	ClientWaitUDP time.Duration
	// StaleAfter is how long a query waits while there is stale data to answer it with: the client response
	// timer of RFC 8767 section 5. Zero: not at all. Resolution goes on meanwhile.
	StaleAfter time.Duration

	// ByList has the bits of the Whys that come of a catalogue list: its number is then in Outcome.List, and what
	// it decides is counted.
	ByList uint64

	// Log says of a query whether observers want an event of it. Nil: of none.
	Log func(q *query.Query) query.After
	// Observe is given the events that Log asked for, by one goroutine for each worker. Nil: nobody is.
	Observe func(*query.Event)
	// Logger is told of recovered panics. Nil means slog.Default.
	Logger *slog.Logger
}

// A Pipeline answers queries. It implements listen.Handler. It is safe for concurrent use.
type Pipeline struct {
	o   Options
	ctx context.Context // ends the flights

	flights [64]flightShard
	inFlight, waiting, refreshing,
	panics atomic.Int64

	outMu       sync.Mutex         // guards outstanding
	outstanding map[netip.Addr]int // waiting queries of strangers

	running sync.WaitGroup
	crew    crew.Crew // the flights

	mu      sync.Mutex // guards what follows
	workers []*query.Worker
	closed  bool

	// Responses made by flights are counted and noted by one worker, which its lock hands around.
	flightMu     sync.Mutex
	flightWorker *query.Worker
}

// New returns a Pipeline whose flights end with ctx. Close waits for them.
func New(ctx context.Context, o Options) *Pipeline {
	if o.ClientWaitUDP == 0 {
		o.ClientWaitUDP = 5 * time.Second
	}
	if o.InFlight == nil {
		o.InFlight = func() int { return 10_000 }
	}
	if o.Waiters == nil {
		o.Waiters = func() int { return 10 * o.InFlight() }
	}
	if o.Budget == nil {
		o.Budget = func() query.Budget { return query.Budget{} }
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	p := &Pipeline{o: o, ctx: ctx, outstanding: make(map[netip.Addr]int)}
	for i := range p.flights {
		p.flights[i].m = make(map[query.Question]*flight)
	}
	p.flightWorker = p.NewWorker()
	return p
}

// ringSize is how many events a worker may be ahead of its observer.
const ringSize = 1024

// NewWorker returns the state of one serving goroutine, and starts the consumer of its ring.
func (p *Pipeline) NewWorker() *query.Worker {
	w := &query.Worker{Ring: query.NewRing(ringSize)}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.workers = append(p.workers, w)
	w.Scratch.Worker = len(p.workers)
	if !p.closed {
		p.running.Add(1)
		go func() {
			defer p.running.Done()
			for p.ctx.Err() == nil {
				select {
				case <-p.ctx.Done():
				case <-w.Ring.Waiting():
				}
				w.Ring.Drain(p.aftermath)
			}
		}()
	}
	return w
}

// aftermath carries out what a response left to be done.
func (p *Pipeline) aftermath(e *query.Event) {
	if e.After&(query.AfterRefresh|query.AfterStaleRefresh) != 0 {
		p.refresh(e.Question())
	}
	if e.After&(query.AfterLog|query.AfterCount) != 0 && p.o.Observe != nil {
		p.o.Observe(e)
	}
}

// Workers returns the workers made so far, for counters.
func (p *Pipeline) Workers() []*query.Worker {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]*query.Worker(nil), p.workers...)
}

// InFlight returns how many questions are being resolved, and how many queries wait for them.
func (p *Pipeline) InFlight() (flights, waiting int64) { return p.inFlight.Load(), p.waiting.Load() }

// Panics returns how many panics were recovered.
func (p *Pipeline) Panics() int64 { return p.panics.Load() }

// Close waits until the flights have ended; the context given to New ends them.
func (p *Pipeline) Close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.running.Wait()
}

// An outcome is what a step came to.
type outcome uint8

const (
	done   outcome = iota // the response is out[:n]
	silent                // nothing is to be sent
	need                  // the client has to be proven, its rules compiled, or q.Turn.Current resolved
)

// TryNow answers q from what is at hand. See listen.Handler.
func (p *Pipeline) TryNow(w *query.Worker, q *query.Query, out []byte) (n int, after query.After) {
	defer func() {
		if v := recover(); v != nil { // one query that breaks a stage must not take all others with it
			p.recovered(q.Question, v)
			query.Inc(&w.Counters.Dropped)
			n, after = 0, 0
		}
	}()
	if q.Scratch == nil {
		q.Scratch = &w.Scratch
	}
	oc, n, after := p.step(q, q.Arrived, nil, out)
	if oc == need {
		query.Inc(&w.Counters.Misses)
		return 0, query.AfterResolve
	}
	if oc == silent {
		n = 0
	}
	return n, p.count(w, q, n, after)
}

// A fetched is what a flight brought.
type fetched struct {
	entry settled.Entry
	err   error
}

// step takes q on from q.Turn.Stage. have is what was fetched for q.Turn.Current, nil if nothing was.
func (p *Pipeline) step(q *query.Query, now clock.Instant, have *fetched, out []byte) (oc outcome, n int, after query.After) {
	t := &q.Turn
	if t.Stage == query.StageStart {
		t.Current = q.Question
		switch why := p.admit(q); why {
		case query.NotRefused:
		case query.Unproven:
			return need, 0, 0
		default:
			return p.refuse(q, why, out)
		}
		if rcode, ede, ok := unsupported(&q.Question); ok {
			return done, p.o.Render.Error(q, rcode, ede, "", out), 0
		}
		t.Stage = query.StageQuestion
		if !p.o.Policy.Ready(q) {
			return need, 0, 0
		}
	}
	for {
		if t.Stage == query.StageQuestion {
			if p.o.Zones != nil && !t.Exempt {
				if t.Verdict, t.Exempt = p.o.Zones.Question(q); t.Exempt {
					if oc, n, over := p.apply(q, &t.Verdict, out); over {
						return oc, n, after
					}
				}
			}
			t.Verdict = p.o.Policy.Question(q)
			if oc, n, over := p.apply(q, &t.Verdict, out); over {
				return oc, n, after
			}
			t.Stage = query.StageData
			if t.Verdict.Kind == query.Redirected || t.Verdict.Kind == query.Flattened {
				t.Stage = query.StageQuestion
				continue
			}
			if p.o.Subnets != nil {
				t.Current.Subnet = p.o.Subnets.Subnet(q)
			}
		}
		entry, from, ok := p.data(q, now, have)
		if !ok && have == nil && p.reverse(q) {
			continue
		}
		if !ok {
			if have != nil && p.insteadOfFailure(q, have.err) {
				have = nil
				continue
			}
			if have != nil {
				if p.zoned(q) && p.turnToCachedAlias(q, now) {
					have = nil
					continue
				}
				if oc, n, over, turned := p.zonesOnAnswer(q, nil, now, out); over {
					return oc, n, after
				} else if turned {
					have = nil
					continue
				}
				return done, p.fail(q, have.err, out), after
			}
			if !q.RD && !sees(q) {
				return done, p.fail(q, errNotHeld, out), after
			}
			return need, 0, after
		}
		have = nil
		if from == cacheDue {
			after |= query.AfterRefresh
		}
		a, v := &q.Scratch.Answer, &q.Scratch.Verdict
		*a = entry.View()
		if p.o.NameServers != nil && q.RD && !t.Sought {
			if t.Unknown = p.o.NameServers.Unknown(q, a, now); len(t.Unknown) > 0 {
				t.Stage, t.Sought = query.StageServers, true
				return need, 0, after
			}
		}
		if p.zoned(q) && p.turnToAlias(q, a, now) {
			continue
		}
		if oc, n, over, turned := p.zonesOnAnswer(q, a, now, out); over {
			return oc, n, after
		} else if turned {
			continue
		}
		*v = p.o.Policy.Answer(q, a, t.Verdict)
		if oc, n, over := p.apply(q, v, out); over {
			return oc, n, after
		}
		if v.Kind == query.Redirected || v.Kind == query.Flattened {
			t.Stage = query.StageQuestion
			continue
		}
		if !p.edit(q, a, now, from) {
			continue
		}
		if n = p.o.Render.Answer(q, a, now, out); n == 0 {
			return silent, 0, after
		}
		return done, n, after
	}
}

// A source is where the answer to a question comes from.
type source uint8

const (
	flown source = iota
	local
	cache
	cacheDue // from the cache, and near its end
)

// data finds the answer to q.Turn.Current: what was fetched, local data, or the cache.
func (p *Pipeline) data(q *query.Query, now clock.Instant, have *fetched) (e settled.Entry, from source, ok bool) {
	cur := &q.Turn.Current
	if have != nil {
		return have.entry, flown, !have.entry.IsZero()
	}
	q.Turn.Local = false
	if e, ok := p.o.Local.Lookup(cur, now); ok {
		q.Turn.Local = true
		return e, local, true
	}
	if !q.RD && !sees(q) {
		return e, cache, false
	}
	e, refresh, ok := p.o.Answers.Get(cur, now, q.Scratch.Entry[:])
	if ok {
		q.Outcome.Hit = true
	}
	if refresh {
		return e, cacheDue, ok
	}
	return e, cache, ok
}

// sees reports whether a client may look into the cache without having what is not there fetched. That shows what
// others have asked for and leaves no trace, so it is for whom the operator trusts alone (access.unlimited; without
// one, this machine); everybody else gets what is local.
func sees(q *query.Query) bool { return q.Client.Unlimited }

// edit decides what is changed in an answer for everybody, and reports whether it can be written then;
// otherwise q.Turn.Current is the next question. Local data may hold any address: the operator wrote it.
func (p *Pipeline) edit(q *query.Query, a *query.Answer, now clock.Instant, from source) bool {
	t := &q.Turn
	t.Edit = 0
	if p.o.Rebinding != nil && from != local && p.o.Rebinding.Offends(q, a) {
		t.Edit |= query.EditPrivate
	}
	d := p.o.DNS64
	if d == nil {
		return true
	}
	switch {
	case t.DNS64 == query.DNS64Asking && a.RCode == dnswire.RCodeNoError && hasAddress(a):
		t.Edit |= query.EditSynthesise
	case t.DNS64 == query.DNS64Asking: // no A records either: the first answer will do (RFC 6147 section 5.1.6)
		t.DNS64, t.Current.Type = query.DNS64Failed, dnswire.TypeAAAA
		return false
	case t.DNS64 == query.DNS64Off && d.Wanted(q, a):
		t.DNS64, t.Current.Type = query.DNS64Asking, dnswire.TypeA
		t.MaxTTL = uint32(max(a.Expires.Sub(now), 0) / time.Second)
		return false
	case d.Excludes(q, a):
		t.Edit |= query.EditExcluded
	}
	return true
}

// zoned reports whether policy zones have something to say of q still.
func (p *Pipeline) zoned(q *query.Query) bool { return p.o.Zones != nil && !q.Turn.Exempt }

// turnToAlias makes the first alias of an answer that a policy zone has a rule for the question, behind those
// before it; false if there is none.
func (p *Pipeline) turnToAlias(q *query.Query, a *query.Answer, now clock.Instant) bool {
	last := 0 // offset behind the alias
	for off := 0; last == 0; {
		kind, value, next, ok := a.Facts.Next(off)
		if !ok {
			return false
		}
		if off = next; kind == query.FactAlias && p.o.Zones.Alias(dnsname.Name(unsafe.String(unsafe.SliceData(value), len(value)))) { // read only, not kept
			last = off
		}
	}
	ttl := uint32(max(a.Expires.Sub(now), 0) / time.Second)
	for off := 0; off < last; {
		kind, value, next, _ := a.Facts.Next(off)
		if off = next; kind == query.FactAlias && !q.Turn.Alias(dnsname.Name(value), ttl) { // a copy: facts are the worker's buffer
			return false
		}
	}
	q.Turn.Stage = query.StageQuestion
	return true
}

// turnToCachedAlias is turnToAlias for a question that could not be resolved, perhaps because nothing is where
// its aliases lead.
func (p *Pipeline) turnToCachedAlias(q *query.Query, now clock.Instant) bool {
	t := &q.Turn
	was := *t
	for {
		target, ttl, ok := p.o.Zones.Target(&t.Current, now)
		if !ok || !t.Alias(target, ttl) {
			*t = was
			return false
		}
		if p.o.Zones.Alias(target) {
			t.Stage = query.StageQuestion
			return true
		}
	}
}

// zonesOnAnswer applies what policy zones say of an answer, or with a nil one of a failure: over ends the query,
// turned makes another question of it.
func (p *Pipeline) zonesOnAnswer(q *query.Query, a *query.Answer, now clock.Instant, out []byte) (oc outcome, n int, over, turned bool) {
	if !p.zoned(q) {
		return 0, 0, false, false
	}
	v := &q.Scratch.Verdict
	*v, q.Turn.Exempt = p.o.Zones.Answer(q, a, now)
	if !q.Turn.Exempt {
		return 0, 0, false, false
	}
	if oc, n, over = p.apply(q, v, out); over {
		return oc, n, true, false
	}
	if v.Kind == query.Redirected {
		q.Turn.Stage = query.StageQuestion
		return 0, 0, false, true
	}
	return 0, 0, false, false
}

func hasAddress(a *query.Answer) bool {
	for off := 0; ; {
		kind, _, next, ok := a.Facts.Next(off)
		if !ok || kind == query.FactAddress {
			return ok
		}
		off = next
	}
}

// dns64TTL is how long AAAA records made without a denial are kept for, in seconds (RFC 6147 section 5.1.7).
const dns64TTL = 600

// insteadOfFailure goes on with the A records when servers give no answer to a question of type AAAA, as some
// do for want of knowing it (RFC 6147 sections 5.1.2 and 5.1.3). Only if it was the servers: what failed to
// validate, or was too much work, stays a failure.
func (p *Pipeline) insteadOfFailure(q *query.Query, err error) bool {
	t := &q.Turn
	f, ok := errors.AsType[Failure](err)
	if p.o.DNS64 == nil || t.DNS64 != query.DNS64Off || t.Current.Type != dnswire.TypeAAAA || t.Current.DO && t.Current.CD || !ok {
		return false
	}
	if code, _ := f.EDE(); code != edeNoReachable && code != edeNetworkError {
		return false
	}
	t.DNS64, t.Current.Type, t.MaxTTL = query.DNS64Asking, dnswire.TypeA, dns64TTL
	return true
}

// reverse makes a question for the name of an address that DNS64 made one for the name of the IPv4 address in
// it, behind an alias.
func (p *Pipeline) reverse(q *query.Query) bool {
	t := &q.Turn
	if p.o.DNS64 == nil || t.Current.Type != dnswire.TypePTR || t.Current.Class != dnswire.ClassIN {
		return false
	}
	target, ok := p.o.DNS64.Reverse(t.Current.Name)
	if !ok || !t.Alias(target, dns64TTL) {
		return false
	}
	t.Stage = query.StageQuestion
	return true
}

// apply carries out a verdict. over is true if that ended the query; Redirected and Flattened set up the
// next turn and leave going on to the caller.
func (p *Pipeline) apply(q *query.Query, v *query.Verdict, out []byte) (oc outcome, n int, over bool) {
	// Who lets pass what is asked now does not unsay what turned the question to it, nor what let it through.
	if v.Kind != query.Pass || v.Why != 0 && q.Outcome.Verdict == query.Pass {
		q.Outcome.Verdict, q.Outcome.Why, q.Outcome.List, q.Outcome.Line = v.Kind, v.Why, v.List, v.Line
	}
	switch v.Kind {
	case query.Pass, query.Allowed:
		return 0, 0, false
	case query.Redirected, query.Flattened:
		t := &q.Turn
		if !t.Alias(v.Target, uint32(v.Block.TTL/time.Second)) {
			return done, p.o.Render.Error(q, dnswire.RCodeServFail, edeOther, "rewritten too often", out), true
		}
		t.Flatten = t.Flatten || v.Kind == query.Flattened
		return 0, 0, false
	case query.Blocked:
		n = p.o.Render.Block(q, &v.Block, out)
	case query.Synthesised:
		n = p.o.Render.Synth(q, v.Synth, out)
	case query.Refused:
		n = p.o.Render.Error(q, dnswire.RCodeRefused, edeProhibited, v.Block.Reason, out)
	case query.Truncated:
		if q.Transport != query.UDP {
			q.Outcome.Verdict = query.Pass // it came the way it was to come
			return 0, 0, false
		}
		n = p.o.Render.Truncated(q, out)
	case query.Dropped:
		return silent, 0, true
	}
	if n == 0 {
		return silent, 0, true
	}
	return done, n, true
}

// Extended errors made here (RFC 8914 section 4).
const (
	edeOther            = 0
	edeNotReady         = 14
	edeProhibited       = 18
	edeNotAuthoritative = 20
	edeNotSupported     = 21
	edeNoReachable      = 22
	edeNetworkError     = 23
)

func (p *Pipeline) admit(q *query.Query) query.RefuseReason {
	if p.o.Cookies != nil && q.EDNS.Cookie != nil {
		p.o.Cookies.Check(q, clock.Wall())
	}
	if why := p.o.Gate.Early(q); why != query.NotRefused {
		if why == query.RefuseAccess && p.o.Identify.Unassigned(q) {
			return query.RefuseDedicated
		}
		return why
	}
	if why := p.o.Identify.Identify(q); why != query.NotRefused {
		return why
	}
	return p.o.Gate.Late(q)
}

// refuse answers a query that was not admitted. What a limit turns away is dropped, so that shedding costs
// nothing and reflects nothing; who may not ask is told so.
func (p *Pipeline) refuse(q *query.Query, why query.RefuseReason, out []byte) (outcome, int, query.After) {
	q.Outcome.Refused = why
	switch why {
	case query.RefuseRate, query.RefuseOutstanding, query.RefuseConnections, query.RefuseDedicated:
		return silent, 0, 0
	case query.RefuseUserRate:
		return done, p.o.Render.Error(q, dnswire.RCodeRefused, edeProhibited, "over the rate limit", out), 0
	case query.RefuseSlip:
		return done, p.o.Render.Truncated(q, out), 0
	case query.RefuseCold:
		return done, p.o.Render.Error(q, dnswire.RCodeRefused, edeNotReady, "no user data yet, or not the policy for who asks", out), 0
	case query.RefuseBusy:
		return done, p.o.Render.Error(q, dnswire.RCodeServFail, edeNoReachable, "overloaded", out), 0
	}
	return done, p.o.Render.Error(q, dnswire.RCodeRefused, edeProhibited, "", out), 0
}

// unsupported answers questions that are not for a recursive resolver: zone transfers, transaction types,
// and classes other than IN and CH (whose few names are local data).
func unsupported(q *query.Question) (rcode, ede uint16, ok bool) {
	switch q.Type {
	case dnswire.TypeOPT, 0:
		return dnswire.RCodeFormErr, query.NoEDE, true
	case dnswire.TypeTKEY, dnswire.TypeTSIG, dnswire.TypeMAILA, dnswire.TypeMAILB:
		return dnswire.RCodeNotImp, query.NoEDE, true
	case dnswire.TypeAXFR, dnswire.TypeIXFR:
		return dnswire.RCodeRefused, edeNotAuthoritative, true
	}
	if q.Class != dnswire.ClassIN && q.Class != dnswire.ClassCH {
		return dnswire.RCodeRefused, edeNotSupported, true
	}
	return 0, 0, false
}

// fail writes the response to a question that could not be resolved.
func (p *Pipeline) fail(q *query.Query, err error, out []byte) int {
	code, text := uint16(edeOther), ""
	if f, ok := errors.AsType[Failure](err); ok {
		code, text = f.EDE()
	} else if errors.Is(err, query.ErrLimit) || errors.Is(err, errSilence) {
		code, text = edeNoReachable, err.Error()
	} else if errors.Is(err, errRefusedClass) {
		return p.o.Render.Error(q, dnswire.RCodeRefused, edeNotSupported, "", out)
	} else if errors.Is(err, errNotHeld) {
		return p.o.Render.Error(q, dnswire.RCodeRefused, edeNotAuthoritative, err.Error(), out)
	}
	return p.o.Render.Error(q, dnswire.RCodeServFail, code, text, out)
}

// errRefusedClass ends questions of class CH that local data does not answer.
var errRefusedClass = errors.New("only class IN is resolved")

// errNotHeld ends questions without RD that would have to be resolved.
var errNotHeld = errors.New("recursion was not asked for")

// Fault answers a message that could not be read. See listen.Handler.
func (p *Pipeline) Fault(w *query.Worker, q *query.Query, f query.Fault, out []byte) int {
	if p.o.Identify.Unassigned(q) {
		q.Outcome.Refused = query.RefuseDedicated
		p.count(w, q, 0, 0)
		return 0
	}
	if f == query.CookieOnly {
		// It gets more than a header: as much as it sent, so not everybody may have it, nor as often as they like.
		if p.o.Cookies != nil {
			p.o.Cookies.Check(q, clock.Wall())
		}
		q.Outcome.Refused = p.o.Gate.Early(q)
		if q.Outcome.Refused == query.NotRefused && q.Transport == query.UDP {
			q.Outcome.Refused = p.o.Gate.Late(q)
		}
		switch q.Outcome.Refused {
		case query.NotRefused:
		case query.RefuseAccess:
			n := p.o.Render.Error(q, dnswire.RCodeRefused, query.NoEDE, "", out)
			p.count(w, q, n, 0)
			return n
		default:
			p.count(w, q, 0, 0)
			return 0
		}
	}
	n := p.o.Render.Fault(q, f, out)
	p.count(w, q, n, 0)
	return n
}

// count notes what became of q in the worker's own counters and, if somebody wants it, its ring.
func (p *Pipeline) count(w *query.Worker, q *query.Query, n int, after query.After) query.After {
	c := &w.Counters
	if n == 0 {
		query.Inc(&c.Dropped)
	} else {
		query.Inc(&c.Queries[q.Transport][min(q.Outcome.RCode, 23)])
	}
	query.Inc(&c.Verdicts[q.Outcome.Verdict])
	if p.o.ByList>>(q.Outcome.Why&63)&1 != 0 && int(q.Outcome.List) < len(c.Lists) {
		query.Inc(&c.Lists[q.Outcome.List])
	}
	if q.Outcome.Refused != query.NotRefused {
		query.Inc(&c.Refused[q.Outcome.Refused])
	} else if q.Client.Misnamed {
		query.Inc(&c.Misnamed)
	}
	if q.Outcome.Hit {
		query.Inc(&c.Hits)
	}
	if p.o.Log != nil {
		after |= p.o.Log(q)
	}
	// What is refreshed need not be what was asked for, of which the others want to hear.
	const refresh = query.AfterRefresh | query.AfterStaleRefresh
	for _, part := range [...]query.After{after & refresh, after &^ refresh} {
		if part == 0 {
			continue
		}
		if e := w.Ring.Slot(); e != nil {
			fillEvent(e, q, part)
			w.Ring.Commit() // the listener wakes the consumer, once a batch
		}
	}
	return after
}

func fillEvent(e *query.Event, q *query.Query, after query.After) {
	e.At, e.After, e.Transport = q.Arrived, after, q.Transport
	e.Verdict, e.Why, e.List, e.Line = q.Outcome.Verdict, q.Outcome.Why, q.Outcome.List, q.Outcome.Line
	e.RCode, e.Source = q.Outcome.RCode, q.Source.Addr().As16()
	if q.Client.Unnamed() {
		e.Source = [16]byte{}
	}
	e.Type, e.Class, e.DO, e.CD = q.Question.Type, q.Question.Class, q.Question.DO, q.Question.CD
	e.View, e.Subnet = q.Question.View, q.Question.Subnet
	e.Client, e.User = q.Client.Kind, q.Client.Profile.User
	name := q.Question.Name
	if after&(query.AfterRefresh|query.AfterStaleRefresh) != 0 {
		name = q.Turn.Current.Name // what is near its end, which policy may have put in place of what was asked
		e.Type, e.Subnet = q.Turn.Current.Type, q.Turn.Current.Subnet
	}
	e.NameLen = uint8(copy(e.Name[:], name))
}

// recovered counts a panic and keeps its input for a replay: the question, never who asked it.
func (p *Pipeline) recovered(question query.Question, v any) {
	p.panics.Add(1)
	stack, input := debug.Stack(), []string(nil)
	if c, ok := v.(*query.Panic); ok {
		v, stack, input = c.Value, c.Stack, c.Input
	}
	p.o.Logger.Error("a panic was recovered while resolving; please report it with this line",
		"name", question.Name.String(), "type", dnswire.TypeText(question.Type), "class", question.Class,
		"do", question.DO, "cd", question.CD, "view", question.View, "panic", v, "input", input, "stack", string(stack))
}
