package pipeline

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
)

type flightShard struct {
	mu sync.Mutex
	m  map[query.Question]*flight
}

// A flight is one question being resolved and the queries that wait for it. The shard's lock guards it.
type flight struct {
	waiters []*waiter
	ids     map[clientID]*waiter // made when there are enough waiters to make looking through them slow
	tree    *query.Tree          // of who leads
	// stale, if not zero, is what those who waited have been given and who comes is given at once: nobody
	// waits any more, the flight is for the caches.
	stale settled.Entry
}

// A waiter is a query that cannot be answered yet. It belongs to the flight it waits in.
type waiter struct {
	q     *query.Query
	reply func([]byte)
	tree  *query.Tree // of a query that led a flight before; nil until then
	// prepared counts how often its client's rules were compiled in vain, for its settings had changed.
	prepared int
}

// clientID tells a retransmission from another query (hardening: one waiter for each client and id).
type clientID struct {
	source netip.AddrPort
	id     uint16
}

func (w *waiter) client() clientID { return clientID{w.q.Source, w.q.ID} }

// joined reports whether a query is a retransmission of one that waits, whose client then waits from now on.
func (f *flight) joined(q *query.Query) bool {
	id := clientID{q.Source, q.ID}
	if f.ids != nil {
		w := f.ids[id]
		if w != nil {
			w.q.Arrived = q.Arrived
		}
		return w != nil
	}
	for _, w := range f.waiters {
		if w.client() == id {
			w.q.Arrived = q.Arrived
			return true
		}
	}
	return false
}

func (f *flight) add(w *waiter) {
	f.waiters = append(f.waiters, w)
	switch {
	case f.ids != nil:
		f.ids[w.client()] = w
	case len(f.waiters) > 32:
		f.ids = make(map[clientID]*waiter, 128)
		for _, w := range f.waiters {
			f.ids[w.client()] = w
		}
	}
}

// Resolve answers q, waiting in a flight for what it needs. See listen.Handler.
func (p *Pipeline) Resolve(q *query.Query, reply func(response []byte)) {
	if p.o.Outstanding != nil && q.Client.Kind == query.Stranger && !q.Client.Unlimited {
		source := q.Source.Addr()
		if !p.enter(source, q.CookieOK) {
			q.Outcome.Refused = query.RefuseOutstanding
			p.drop(&waiter{q: q, reply: reply})
			return
		}
		inner := reply
		reply = func(response []byte) { p.leave(source); inner(response) }
	}
	w := &waiter{q: q, reply: reply}
	p.await(w)
}

// await has done what a query needs that cannot be answered yet.
func (p *Pipeline) await(w *waiter) {
	switch w.q.Turn.Stage {
	case query.StageData:
		p.wait(w)
	case query.StageServers:
		p.seek(w)
	default:
		p.prepare(w)
	}
}

// prepare does what has to be done before a query can be looked at: proving its client, compiling the client's own
// rules. Then it may well be answered from the caches.
func (p *Pipeline) prepare(w *waiter) {
	if int(p.inFlight.Load()) >= p.o.InFlight() || !p.launch() {
		p.busy(w)
		return
	}
	go func() {
		defer p.running.Done()
		defer p.inFlight.Add(-1)
		var err error
		proving, ready := w.q.Turn.Stage == query.StageStart, false
		p.guard(query.NewTree(clock.Elapsed(), p.o.Budget()), w.q.Question, &err, func(ctx context.Context) error {
			if proving {
				p.o.Identify.Prove(ctx, w.q)
			} else {
				ready = p.o.Policy.Prepare(ctx, w.q)
			}
			return ctx.Err()
		})
		switch {
		case ready:
		case proving:
			if w.q.Proof == query.NoProof {
				w.q.Proof = query.ProofFailed // a panic, which must not come again and again
			}
		case err != nil || w.prepared == maxPrepared:
			p.busy(w) // rather than to judge by less than all of the client's rules
			return
		default:
			w.prepared++
			w.q.Proof, w.q.Client, w.q.Turn = query.NoProof, query.Client{}, query.Turn{}
		}
		p.end(w, nil)
	}()
}

// seek has the name servers looked for that rules want to know of and the caches no longer know. What is not found
// does not count: the query is judged without it.
func (p *Pipeline) seek(w *waiter) {
	if int(p.inFlight.Load()) >= p.o.InFlight() || !p.launch() {
		p.busy(w)
		return
	}
	go func() {
		defer p.running.Done()
		defer p.inFlight.Add(-1)
		tree, t := query.NewTree(clock.Elapsed(), p.o.Budget()), &w.q.Turn
		var err error
		p.guard(tree, t.Current, &err, func(ctx context.Context) error {
			p.o.NameServers.Find(ctx, tree, t.Current.View, t.Unknown)
			return nil
		})
		t.Stage, t.Unknown = query.StageData, nil
		p.end(w, nil)
	}()
}

// maxPrepared is how often a query is identified anew because its client's settings change faster than the rules in
// them are compiled.
const maxPrepared = 8

// enter counts a stranger's waiting query, or reports that it has too many: ten times as many for an address
// that is proven not to be forged.
func (p *Pipeline) enter(a netip.Addr, proven bool) bool {
	limit := p.o.Outstanding()
	if proven {
		limit *= 10
	}
	p.outMu.Lock()
	defer p.outMu.Unlock()
	if limit > 0 && p.outstanding[a] >= limit {
		return false
	}
	p.outstanding[a]++
	return true
}

func (p *Pipeline) leave(a netip.Addr) {
	p.outMu.Lock()
	defer p.outMu.Unlock()
	if p.outstanding[a]--; p.outstanding[a] == 0 {
		delete(p.outstanding, a)
	}
}

func (p *Pipeline) shard(question *query.Question) *flightShard {
	h := uint32(question.Type)
	for i := 0; i < len(question.Name); i++ {
		h = h*16777619 ^ uint32(question.Name[i])
	}
	return &p.flights[h%uint32(len(p.flights))]
}

// wait puts w into the flight of its present question, which it starts if there is none.
func (p *Pipeline) wait(w *waiter) {
	question := w.q.Turn.Current
	if question.Class != dnswire.ClassIN {
		p.end(w, &fetched{err: errRefusedClass})
		return
	}
	if !w.q.RD {
		p.peek(w, question)
		return
	}
	s := p.shard(&question)
	s.mu.Lock()
	if f := s.m[question]; f != nil {
		if stale := f.stale; !stale.IsZero() {
			s.mu.Unlock()
			p.end(w, &fetched{entry: stale})
			return
		}
		again := w.q.Transport == query.UDP && f.joined(w.q)
		join := !again && int(p.waiting.Load()) < p.o.Waiters()
		if join {
			if w.tree != nil {
				// What others pay for costs a joiner one query. If it has none left, the next stage sees that.
				_ = w.tree.Query()
			}
			p.waiting.Add(1)
			f.add(w)
		}
		s.mu.Unlock()
		if !join && (again || !p.endStale(w, question)) {
			p.drop(w) // a retransmission of what already waits, or one more than may wait: silence, never SERVFAIL
		}
		return
	}
	if int(p.inFlight.Load()) >= p.o.InFlight() || !p.launch() {
		s.mu.Unlock()
		if !p.endStale(w, question) {
			p.busy(w)
		}
		return
	}
	f := &flight{}
	f.add(w)
	s.m[question] = f
	p.waiting.Add(1)
	s.mu.Unlock()
	p.crew.Go(func() { p.fly(s, question, f) })
}

// busy turns away a query for which there is no room.
func (p *Pipeline) busy(w *waiter) {
	w.q.Outcome.Refused = query.RefuseBusy
	var out [dnswire.HeaderLen + 255 + 4 + 256]byte
	n := p.o.Render.Error(w.q, dnswire.RCodeServFail, edeNoReachable, "too many questions are being resolved", out[:])
	p.respond(w, out[:n], 0)
}

// peek answers a query that does not want recursion with what the caches have. What is past its end is fetched anew
// all the same, for those who do.
func (p *Pipeline) peek(w *waiter, question query.Question) {
	entry, stale, ok := p.held(question)
	if !ok {
		p.end(w, &fetched{err: errNotHeld})
		return
	}
	if stale {
		p.refresh(question)
	}
	p.end(w, &fetched{entry: entry})
}

// held asks the Fetcher for what the caches have; a panic below is counted and logged, and means that it is nothing.
func (p *Pipeline) held(question query.Question) (entry settled.Entry, stale, ok bool) {
	defer func() {
		if v := recover(); v != nil {
			p.recovered(question, v)
			entry, stale, ok = settled.Entry{}, false, false
		}
	}()
	return p.o.Fetch.Held(question)
}

// launch counts a goroutine that resolves, unless the pipeline is closed.
func (p *Pipeline) launch() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.ctx.Err() != nil {
		return false
	}
	p.running.Add(1)
	p.inFlight.Add(1)
	return true
}

// maxLeaders is how many waiters of one flight may lead it in turn. A leader whose own budget ends hands over
// to a waiter with a budget of its own, which goes on from what the caches have learned; without a bound a
// crowd could be made to spend a budget each on a question that nobody can afford.
const maxLeaders = 3

// fly resolves a question and gives the answer to all who wait for it.
func (p *Pipeline) fly(s *flightShard, question query.Question, f *flight) {
	defer p.running.Done()
	defer p.soothe(s, question, f)()
	defer p.giveUp(s, f)()
	for leaders := 1; ; leaders++ {
		s.mu.Lock()
		var lead *waiter // nil: all have been given stale data
		var tree *query.Tree
		if len(f.waiters) > 0 {
			lead = f.waiters[0]
			tree = lead.tree
		}
		if tree == nil {
			tree = query.NewTree(clock.Elapsed(), p.o.Budget())
			if lead != nil {
				lead.tree = tree
			}
		}
		f.tree = tree
		s.mu.Unlock()
		have := p.fetch(tree, question)

		s.mu.Lock()
		waiters := f.waiters
		if led := len(waiters) > 0 && waiters[0] == lead; errors.Is(have.err, query.ErrLimit) && leaders < maxLeaders && len(waiters) > 0 && (!led || len(waiters) > 1) {
			if !led { // it was told that there is no answer
				s.mu.Unlock()
				continue
			}
			f.waiters = waiters[1:]
			if f.ids != nil {
				delete(f.ids, lead.client())
			}
			p.waiting.Add(-1)
			s.mu.Unlock()
			p.end(lead, have)
			continue
		}
		delete(s.m, question)
		f.waiters = nil
		patience := p.patience() // with those counted who wait here
		p.waiting.Add(-int64(len(waiters)))
		p.inFlight.Add(-1)
		s.mu.Unlock()
		for _, w := range waiters {
			p.endWithin(w, have, patience)
		}
		return
	}
}

// soothe gives stale data to those who wait in a flight, once the first of them has waited long enough and if
// there is any. The function returned ends that.
func (p *Pipeline) soothe(s *flightShard, question query.Question, f *flight) (stop func()) {
	give := func() {
		entry, ok := p.stale(question)
		if !ok {
			return
		}
		s.mu.Lock()
		waiters := f.waiters
		f.stale, f.waiters, f.ids = entry, nil, nil
		p.waiting.Add(-int64(len(waiters)))
		s.mu.Unlock()
		for _, w := range waiters {
			p.end(w, &fetched{entry: entry})
		}
	}
	if p.o.StaleAfter <= 0 {
		give()
		return func() {}
	}
	given := make(chan struct{})
	timer := time.AfterFunc(p.o.StaleAfter, func() { defer close(given); give() })
	return func() {
		if !timer.Stop() {
			<-given
		}
	}
}

// giveUpShare: this part of ClientWaitUDP before it ends clients are told that there is no answer; with 5 s it is 0.2 s,
// before stub resolvers, which wait as long, ask again or somebody else.
const giveUpShare = 25

// errSilence ends queries over UDP of clients who are about to stop waiting while no server has said anything.
var errSilence = errors.New("no server has answered so far")

// giveUp ends the waiting of those in a flight whose clients are about to stop, if no server has answered anything:
// whoever is told nothing cannot tell a dead Internet from a dead resolver. Where servers do answer, only slowly, the
// client asks again and is answered then. The function returned ends that.
func (p *Pipeline) giveUp(s *flightShard, f *flight) (stop func()) {
	wait := p.o.ClientWaitUDP - p.o.ClientWaitUDP/giveUpShare
	var timer *time.Timer
	var looks sync.WaitGroup
	over := false // with timer and f, the shard's lock guards it
	look := func() {
		defer looks.Done()
		s.mu.Lock()
		if over || f.tree != nil && f.tree.Heard() {
			s.mu.Unlock()
			return
		}
		now, next := clock.Elapsed(), wait
		var tired, others []*waiter
		for _, w := range f.waiters {
			left := wait - now.Sub(w.q.Arrived)
			if w.q.Transport == query.UDP && left <= 0 {
				tired = append(tired, w)
				if f.ids != nil {
					delete(f.ids, w.client())
				}
				continue
			}
			others = append(others, w)
			if w.q.Transport == query.UDP {
				next = min(next, left)
			}
		}
		f.waiters = others
		pressed := p.patience() < p.o.ClientWaitUDP
		p.waiting.Add(-int64(len(tired)))
		looks.Add(1)
		timer.Reset(next)
		s.mu.Unlock()
		for _, w := range tired {
			if pressed {
				p.drop(w)
			} else {
				p.end(w, &fetched{err: errSilence})
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	looks.Add(1)
	timer = time.AfterFunc(wait, look)
	return func() {
		s.mu.Lock()
		over = true
		s.mu.Unlock()
		if timer.Stop() {
			looks.Done()
		}
		looks.Wait()
	}
}

// stale asks the Fetcher for stale data; a panic below is counted and logged, and means that there is none.
func (p *Pipeline) stale(question query.Question) (entry settled.Entry, ok bool) {
	defer func() {
		if v := recover(); v != nil {
			p.recovered(question, v)
			entry, ok = settled.Entry{}, false
		}
	}()
	return p.o.Fetch.Stale(question)
}

// endStale answers a query that may not wait with stale data, if there is any.
func (p *Pipeline) endStale(w *waiter, question query.Question) bool {
	entry, ok := p.stale(question)
	if ok {
		p.end(w, &fetched{entry: entry})
	}
	return ok
}

// fetch calls the Fetcher.
func (p *Pipeline) fetch(tree *query.Tree, question query.Question) *fetched {
	have := &fetched{}
	p.guard(tree, question, &have.err, func(ctx context.Context) (err error) {
		have.entry, err = p.o.Fetch.Fetch(ctx, tree, question)
		if err == nil && have.entry.IsZero() {
			err = fmt.Errorf("resolving %s brought nothing", question.Name)
		}
		return err
	})
	return have
}

// guard calls f with a context that ends with tree's deadline; a panic below becomes an error, counted and
// logged.
func (p *Pipeline) guard(tree *query.Tree, question query.Question, err *error, f func(context.Context) error) {
	ctx, cancel := context.WithTimeout(p.ctx, tree.Deadline.Sub(clock.Elapsed()))
	defer cancel()
	defer func() {
		if v := recover(); v != nil {
			p.recovered(question, v)
			*err = fmt.Errorf("internal error while resolving %s", question.Name)
		}
	}()
	*err = f(ctx)
}

// pressedWait is how long after its arrival a UDP query is still answered while more than half of the places for
// waiting queries are taken. Answers held back until many leave at once are what a pulse is made of (DNSBomb,
// CVE-2024-33655), and a client has asked again by then.
const pressedWait = 1900 * time.Millisecond

// patience is how long after its arrival a UDP query is answered now.
func (p *Pipeline) patience() time.Duration {
	if p.waiting.Load() > int64(p.o.Waiters()/2) {
		return min(p.o.ClientWaitUDP, pressedWait)
	}
	return p.o.ClientWaitUDP
}

// end takes a query on with what its flight brought: a response, or the next question.
func (p *Pipeline) end(w *waiter, have *fetched) { p.endWithin(w, have, p.patience()) }

// endWithin is end for a query over UDP that is answered so long after its arrival and no later.
func (p *Pipeline) endWithin(w *waiter, have *fetched, patience time.Duration) {
	now := clock.Elapsed()
	if w.q.Transport == query.UDP && now.Sub(w.q.Arrived) > patience {
		p.drop(w) // its client has given up or asked again
		return
	}
	space := spaces.Get().(*space)
	defer spaces.Put(space)
	w.q.Scratch = &space.scratch
	oc, n, after := p.rescuedStep(w.q, now, have, space.out[:])
	w.q.Scratch = nil
	switch oc {
	case need:
		p.await(w)
		return
	case silent:
		n = 0
	}
	p.respond(w, space.out[:n], after)
}

// rescuedStep is step; a panic below is counted and logged, and its query gets no response.
func (p *Pipeline) rescuedStep(q *query.Query, now clock.Instant, have *fetched, out []byte) (oc outcome, n int, after query.After) {
	defer func() {
		if v := recover(); v != nil {
			p.recovered(q.Question, v)
			oc, n, after = silent, 0, 0
		}
	}()
	return p.step(q, now, have, out)
}

// A space is what a waiting query needs once it goes on.
type space struct {
	out     [dnswire.MaxMessage]byte
	scratch query.Scratch
}

var spaces = sync.Pool{New: func() any { return new(space) }}

// respond counts and sends a response; an empty one is silence.
func (p *Pipeline) respond(w *waiter, response []byte, after query.After) {
	p.flightMu.Lock()
	if p.count(p.flightWorker, w.q, len(response), after) != 0 {
		p.flightWorker.Ring.Wake()
	}
	p.flightMu.Unlock()
	if len(response) == 0 {
		response = nil
	}
	w.reply(response)
}

func (p *Pipeline) drop(w *waiter) { p.respond(w, nil, 0) }

// maxRefreshing is how many questions may be resolved for the caches' sake at once (hardening: prefetch storms).
const maxRefreshing = 64

// refresh resolves a question for the cache's sake, if it is not being resolved already and there is room.
func (p *Pipeline) refresh(question query.Question) {
	s := p.shard(&question)
	s.mu.Lock()
	_, flying := s.m[question]
	s.mu.Unlock()
	if flying {
		return
	}
	if p.refreshing.Add(1) > maxRefreshing || int(p.inFlight.Load()) >= p.o.InFlight()/2 || !p.launch() {
		p.refreshing.Add(-1)
		p.o.Fetch.Postpone(question)
		return
	}
	go func() {
		defer p.running.Done()
		defer p.inFlight.Add(-1)
		defer p.refreshing.Add(-1)
		tree := query.NewTree(clock.Elapsed(), p.o.Budget())
		var err error // what cannot be refreshed is served until it ends
		p.guard(tree, question, &err, func(ctx context.Context) error { return p.o.Fetch.Refresh(ctx, tree, question) })
	}()
}
