package syncclient

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"sync"
	"time"

	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache"
)

const (
	// missedHeartbeats in a row mean that the service or the way to it is gone.
	missedHeartbeats = 3
	// stalledHeartbeats is how many may name a head beyond ours while nothing comes.
	stalledHeartbeats = 12
	// defaultHeartbeat is assumed when a Hello does not say; others are taken within reason.
	defaultHeartbeat                         = 5 * time.Second
	minHeartbeat, maxHeartbeat               = time.Second, 30 * time.Second
	proven                                   = 4 * time.Second // how long a Watch must have gone well to forget what went wrong before
	maxIdle                                  = 100             // messages in a row that say nothing new
	maxParts                                 = 64 << 20        // bytes of one revision that came in several deltas
	aheadAgain                               = 2               // a replica may be a moment behind; twice in a row it is not that
	never                      clock.Instant = math.MinInt64
)

// Why a follower leaves a Watch of its own accord.
var (
	errAsked     = errors.New("an operator asked for something")
	errRepairDue = errors.New("a repair is due and may be tried")
)

// needRepair says that a dataset cannot go on by deltas, or should not.
type needRepair struct {
	why string
	// diverged: the service's history is not ours. Somebody should know.
	diverged bool
	// behind: the service may be at a revision before ours, which then means nothing to it.
	behind bool
	// blind: there is no Watch until it is repaired.
	blind bool
}

func (n *needRepair) Error() string { return "a repair is needed: " + n.why }

// A follower keeps one dataset current.
type follower struct {
	c    *Client
	kind usercache.Kind
	ds   *usercache.Dataset
	log  *slog.Logger
	wake chan struct{} // of size one: an operator asked for something

	// Owned by run.
	due      *needRepair // nil: all is well
	repairs  int         // since the roots were last found equal
	ahead    int         // times in a row that the service was behind us
	settleAt uint64      // before this revision our root is not the service's of any revision
	warned   bool        // about what is wrong now

	mu          sync.Mutex // guards what follows; held for memory work only
	interrupt   context.CancelCauseFunc
	asked       bool                // an operator asked for something that has not been looked at
	wanted      string              // a repair that an operator asked for
	foreign     *usercache.Identity // what the service serves and we do not take
	accepted    *usercache.Identity // and an operator said we should
	head        uint64
	atHead      clock.Instant // never: not since the start
	service     string
	activity    string
	lastErr     string
	repairDue   string
	repairTimes uint64
}

func newFollower(c *Client, kind usercache.Kind) *follower {
	return &follower{c: c, kind: kind, ds: c.opts.Cache.Dataset(kind), log: c.opts.Logger.With("dataset", string(kind)),
		wake: make(chan struct{}, 1), atHead: never, activity: "not started"}
}

// run follows one service after the other until ctx ends.
func (f *follower) run(ctx context.Context) {
	defer f.set(func() { f.activity, f.service = "ended", "" })
	for ctx.Err() == nil {
		f.takeOrders()
		s, at := f.pick()
		if s == nil {
			f.set(func() { f.activity, f.service = "waiting to try again", "" })
			f.idle(ctx, at)
			continue
		}
		started := clock.Elapsed()
		l, err := s.connect()
		if err == nil {
			err = f.follow(ctx, s, l)
		}
		if ctx.Err() != nil {
			return
		}
		f.handle(s, l, started, err)
	}
}

// pick returns the first service that may be tried now, or else when one may be.
func (f *follower) pick() (*service, clock.Instant) {
	now, soonest := clock.Elapsed(), clock.Never
	for _, s := range f.c.services {
		at := f.c.backoffs.ready(s.address, f.watchKey(s))
		if f.due != nil && f.due.blind {
			at = max(at, f.c.backoffs.ready(f.repairKey(s)))
		}
		if !now.Before(at) {
			return s, at
		}
		soonest = min(soonest, at)
	}
	return nil, soonest
}

// Keys of what is backed off separately: an address, following a dataset there, and repairing it there.
func (f *follower) watchKey(s *service) string  { return s.address + " watch " + string(f.kind) }
func (f *follower) repairKey(s *service) string { return s.address + " repair " + string(f.kind) }

func (f *follower) idle(ctx context.Context, until clock.Instant) {
	t := time.NewTimer(until.Sub(clock.Elapsed()))
	defer t.Stop()
	select {
	case <-t.C:
	case <-f.wake:
	case <-ctx.Done():
	}
}

// ask hands an operator's wish to the follower, who leaves whatever it waits for.
func (f *follower) ask(what func()) {
	f.mu.Lock()
	what()
	f.asked = true
	if f.interrupt != nil {
		f.interrupt(errAsked)
	}
	f.mu.Unlock()
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// takeOrders makes operators' wishes due. They do not wait for backoff.
func (f *follower) takeOrders() {
	f.mu.Lock()
	wanted, asked := f.wanted, f.asked
	f.wanted, f.asked = "", false
	f.mu.Unlock()
	if wanted != "" && f.due == nil {
		f.due = &needRepair{why: wanted}
	}
	if asked {
		for _, s := range f.c.services {
			f.c.backoffs.succeed(f.watchKey(s), f.repairKey(s))
		}
	}
}

// follow repairs and watches at one service until something goes wrong.
func (f *follower) follow(ctx context.Context, s *service, l *link) error {
	f.set(func() { f.service = s.address })
	for ctx.Err() == nil {
		f.takeOrders()
		st := f.ds.Status()
		switch {
		case !st.Complete:
			f.due = &needRepair{why: "there is no data yet", blind: true}
		case f.due == nil && st.Transferring:
			f.due = &needRepair{why: "a transfer was interrupted", behind: true}
		case f.due == nil && st.Suspect:
			f.due = &needRepair{why: "the root differed"}
		}
		if f.due != nil && !clock.Elapsed().Before(f.c.backoffs.ready(f.repairKey(s))) {
			started := clock.Elapsed()
			err := f.repair(ctx, l)
			if ctx.Err() != nil || err != nil && unreachable(err) {
				return err
			}
			if err != nil {
				demanded, _ := retryAfter(err)
				f.failed(err, func() (int, time.Duration) {
					return f.c.backoffs.fail(f.repairKey(s), started, demanded, maxWrong, err.Error())
				})
			} else {
				f.due = nil
			}
		}
		f.set(func() {
			f.repairDue = ""
			if f.due != nil {
				f.repairDue = f.due.why
			}
		})
		if f.due != nil && f.due.blind {
			return errRepairDue
		}
		err := f.watch(ctx, s, l)
		var need *needRepair
		switch {
		case errors.As(err, &need):
			if need.diverged {
				f.c.opts.Metrics.Diverged(string(f.kind))
				f.log.Error("the service's data is not ours; ours goes on being served until it is repaired",
					"service", s.address, "why", need.why, "revision", f.ds.Status().Revision)
			}
			if f.repairs > 0 {
				// Repaired, and wrong again before it was right once: the service does not agree with itself,
				// or this program is at fault. Either way not at full speed.
				f.c.backoffs.fail(f.repairKey(s), clock.Elapsed(), 0, maxWrong, "differs again after a repair: "+need.why)
			}
			f.due = need
		case errors.Is(err, errRepairDue), errors.Is(err, errAsked):
		default:
			return err
		}
	}
	return context.Cause(ctx)
}

// handle decides what a failure of a service means for the next attempt.
func (f *follower) handle(s *service, l *link, started clock.Instant, err error) {
	switch {
	case err == nil || errors.Is(err, errAsked) || errors.Is(err, errRepairDue):
		return
	case l != nil && unreachable(err) && !s.dropIfDead(l):
		// The connection carries other datasets: it is this one's stream.
		demanded, _ := retryAfter(err)
		f.failed(err, func() (int, time.Duration) {
			return f.c.backoffs.fail(f.watchKey(s), started, demanded, maxUnreachable, err.Error())
		})
	case unreachable(err):
		demanded, _ := retryAfter(err)
		f.failed(err, func() (int, time.Duration) {
			return f.c.backoffs.fail(s.address, started, demanded, maxUnreachable, err.Error())
		})
	default:
		demanded, _ := retryAfter(err)
		f.failed(err, func() (int, time.Duration) {
			return f.c.backoffs.fail(f.watchKey(s), started, demanded, maxWrong, err.Error())
		})
	}
}

// failed notes a failure. What goes on failing is said aloud once.
func (f *follower) failed(err error, backOff func() (failures int, wait time.Duration)) {
	failures, wait := backOff()
	reason := "other"
	var w *wrongError
	switch {
	case unreachable(err):
		reason = "unreachable"
	case refused(err):
		reason = "refused"
	case errors.As(err, &w) || tooBig(err):
		reason = "wrong"
	case errors.Is(err, usercache.ErrOtherDataset):
		reason = "other-dataset"
	}
	f.c.opts.Metrics.Failed(string(f.kind), reason)
	level := slog.LevelDebug
	if !f.warned {
		level = slog.LevelWarn
		f.warned = true
	}
	f.log.Log(context.Background(), level, "following the service", "error", err, "failures", failures, "again_in", wait)
	f.set(func() { f.lastErr = err.Error() })
}

// set changes what Status says.
func (f *follower) set(change func()) {
	f.mu.Lock()
	change()
	f.mu.Unlock()
	f.c.changed()
}

// watch follows the dataset by deltas. It returns a *needRepair when that cannot go on.
func (f *follower) watch(ctx context.Context, s *service, l *link) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	f.mu.Lock()
	if f.asked {
		f.mu.Unlock()
		return errAsked
	}
	f.interrupt, f.activity = cancel, "watching"
	f.mu.Unlock()
	defer f.set(func() { f.interrupt, f.activity = nil, "" })
	if f.due != nil {
		wait := f.c.backoffs.ready(f.repairKey(s)).Sub(clock.Elapsed())
		t := time.AfterFunc(max(wait, 0), func() { cancel(errRepairDue) })
		defer t.Stop()
	}

	st := f.ds.Status()
	req := &syncv1.WatchRequest{Kind: string(f.kind), Identity: identityMessage(st.Identity), Revision: st.Revision, Node: f.c.opts.Node.message()}
	if f.due == nil && st.Revision >= f.settleAt {
		// While a repair is due a difference is no news, and deltas are wanted all the same.
		root := f.ds.Root()
		req.Root = root[:]
	}
	stream, err := l.sync.Watch(ctx, req)
	if err != nil {
		return fmt.Errorf("watching at %s: %w", s.address, cause(ctx, err))
	}
	dog := newWatchdog(cancel)
	m, err := receive(ctx, dog, answerTime, stream.Recv)
	if err != nil {
		return fmt.Errorf("watching at %s: %w", s.address, ended(err))
	}
	hello := m.GetHello()
	if hello == nil {
		return wrong("a Watch begins with %T, not a Hello", m.GetMessage())
	}
	heartbeat, err := f.greet(hello, st, req.Root != nil)
	if err != nil {
		return err
	}
	w := watching{f: f, since: clock.Elapsed(), id: st.Identity, heartbeat: heartbeat, keys: []string{s.address, f.watchKey(s)}}
	for {
		m, err := receive(ctx, dog, missedHeartbeats*max(heartbeat, defaultHeartbeat), stream.Recv)
		if err != nil {
			return fmt.Errorf("watching at %s: %w", s.address, ended(err))
		}
		switch v := m.GetMessage().(type) {
		case *syncv1.WatchResponse_Delta:
			err = w.delta(ctx, v.Delta)
		case *syncv1.WatchResponse_Heartbeat:
			err = w.beat(ctx, v.Heartbeat)
		default:
			err = wrong("%T in the middle of a Watch", v)
		}
		if err != nil {
			return err
		}
		if w.idle > maxIdle {
			return wrong("%d messages in a row that say nothing", w.idle)
		}
	}
}

func ended(err error) error {
	if errors.Is(err, io.EOF) {
		return errEnded
	}
	return err
}

func cause(ctx context.Context, err error) error {
	if c := context.Cause(ctx); c != nil {
		return c
	}
	return err
}

// greet judges a Hello; rooted says that we have sent a root. Without an error deltas follow.
func (f *follower) greet(h *syncv1.Hello, st usercache.DatasetStatus, rooted bool) (heartbeat time.Duration, err error) {
	id, err := parseIdentity(h.GetIdentity())
	if err != nil {
		return 0, err
	}
	if len(h.GetRoot()) != len(usercache.Hash{}) {
		return 0, wrong("a root of %d bytes", len(h.GetRoot()))
	}
	ahead := f.ahead
	f.ahead = 0
	f.set(func() { f.head = h.GetHead() })
	switch h.GetResume() {
	case syncv1.Resume_RESUME_OK:
		if id != st.Identity {
			return 0, wrong("it resumes %v as %v", st.Identity, id)
		}
	case syncv1.Resume_RESUME_COLD:
		return 0, &needRepair{why: "the service takes us for empty", blind: true}
	case syncv1.Resume_RESUME_TOO_OLD:
		return 0, &needRepair{why: fmt.Sprintf("revision %d is before %d, the oldest that can be resumed", st.Revision, h.GetOldest()), blind: true}
	case syncv1.Resume_RESUME_OTHER_LINEAGE:
		return 0, &needRepair{why: fmt.Sprintf("the service has lineage %x, we have %x", id.Lineage[:], st.Identity.Lineage[:]), diverged: true, blind: true}
	case syncv1.Resume_RESUME_OTHER_DATASET:
		return 0, &needRepair{why: fmt.Sprintf("the service has dataset %x, we have %x", id.Dataset[:], st.Identity.Dataset[:]), diverged: true, blind: true}
	case syncv1.Resume_RESUME_AHEAD:
		if f.ahead = ahead + 1; f.ahead < aheadAgain {
			return 0, fmt.Errorf("the service is at revision %d, we are at %d; perhaps it is a moment behind", h.GetHead(), st.Revision)
		}
		f.ahead = 0
		return 0, &needRepair{why: fmt.Sprintf("the service is at revision %d, we are at %d", h.GetHead(), st.Revision), diverged: true, behind: true, blind: true}
	case syncv1.Resume_RESUME_OTHER_ROOT:
		if !rooted {
			return 0, wrong("it finds another root than one that it was not told")
		}
		f.ds.MarkSuspect()
		return 0, &needRepair{why: fmt.Sprintf("the root differs at revision %d", st.Revision), diverged: true}
	default:
		return 0, wrong("Resume is %v", h.GetResume())
	}
	heartbeat = time.Duration(h.GetHeartbeatMs()) * time.Millisecond
	if heartbeat == 0 {
		heartbeat = defaultHeartbeat
	}
	return min(max(heartbeat, minHeartbeat), maxHeartbeat), nil
}

// watching is the state of one Watch.
type watching struct {
	f         *follower
	since     clock.Instant
	id        usercache.Identity
	heartbeat time.Duration
	keys      []string // of backoff, forgotten once the service has proved right

	parts     []usercache.Change // of a delta with more to come
	partsFrom uint64
	partsSize int
	idle      int // messages in a row without news
	behind    int // heartbeats in a row with a head beyond ours and no progress
	lastBeat  clock.Instant
}

// delta applies changes.
func (w *watching) delta(ctx context.Context, m *syncv1.Delta) error {
	f := w.f
	d, err := parseDelta(m)
	if err != nil {
		return err
	}
	if w.parts != nil && d.From != w.partsFrom {
		return wrong("a delta from %d comes between the parts of one from %d", d.From, w.partsFrom)
	}
	if m.GetMore() || w.parts != nil {
		for _, c := range d.Changes {
			w.partsSize += len(c.Key) + len(c.Bytes)
		}
		if w.partsSize > maxParts {
			// Comparing digests copes with any amount.
			return &needRepair{why: fmt.Sprintf("one commit after revision %d has more than %d bytes", d.From, maxParts), blind: true}
		}
		w.parts, w.partsFrom = append(w.parts, d.Changes...), d.From
		if w.parts == nil {
			w.parts = []usercache.Change{}
		}
		if m.GetMore() {
			if len(d.Changes) == 0 {
				w.idle++
			} else {
				w.idle, w.behind = 0, 0
			}
			return nil
		}
		d.Changes, w.parts, w.partsSize = w.parts, nil, 0
	}

	before := f.ds.Status().Revision
	atHead := d.Root != nil
	if f.due != nil {
		d.Root = nil // that it differs is known
	}
	res, err := f.ds.ApplyDelta(ctx, w.id, d, wall())
	if err != nil {
		return f.notApplied(err)
	}
	f.c.opts.Metrics.Applied(string(f.kind), res.Applied)
	if d.To > before {
		w.idle, w.behind = 0, 0
	} else {
		w.idle++
	}
	if res.RootDiffers {
		return &needRepair{why: fmt.Sprintf("the root differs at revision %d", d.To), diverged: true}
	}
	f.set(func() { f.head = max(f.head, d.To) })
	if atHead {
		w.atHead(res.RootChecked)
	}
	return nil
}

// notApplied tells what the service did wrong from what is wrong here.
func (f *follower) notApplied(err error) error {
	var gap *usercache.GapError
	switch {
	case errors.As(err, &gap):
		return wrong("%v", err)
	case errors.Is(err, usercache.ErrClosed), errors.Is(err, context.Canceled), errors.Is(err, usercache.ErrOtherDataset):
		return err
	}
	return wrong("%v", err)
}

// beat compares where the service is with where we are.
func (w *watching) beat(ctx context.Context, m *syncv1.Heartbeat) error {
	f := w.f
	root, err := parseRoot(m.GetRoot())
	if err != nil {
		return err
	}
	if root == nil {
		return wrong("a heartbeat without a root")
	}
	now := clock.Elapsed()
	if w.lastBeat != 0 && now.Sub(w.lastBeat) < w.heartbeat/4 {
		w.idle++ // nothing but heartbeats, and too many of them
	} else {
		w.idle = 0
	}
	w.lastBeat = now
	f.set(func() { f.head = m.GetHead() })
	at := f.ds.Status().Revision
	switch head := m.GetHead(); {
	case head < at:
		f.ds.MarkSuspect()
		return &needRepair{why: fmt.Sprintf("the service went back to revision %d, we are at %d", head, at), diverged: true, behind: true, blind: true}
	case head > at:
		if w.behind++; w.behind > stalledHeartbeats {
			return fmt.Errorf("%w: it is at revision %d and sends nothing after %d", errSilent, head, at)
		}
		return nil
	}
	w.behind = 0
	if f.due != nil {
		root = nil // that it differs is known
	}
	// A delta of nothing compares the roots at one instant, if they can be compared yet.
	res, err := f.ds.ApplyDelta(ctx, w.id, usercache.Delta{From: at, To: at, Root: root, NeedsCatalogue: m.GetNeedsCatalogue()}, wall())
	if err != nil {
		return f.notApplied(err)
	}
	if res.RootDiffers {
		return &needRepair{why: fmt.Sprintf("the root differs at revision %d", at), diverged: true}
	}
	w.atHead(res.RootChecked)
	return nil
}

// atHead notes that we have all there is.
func (w *watching) atHead(checked bool) {
	f := w.f
	if f.due == nil {
		f.ds.MarkFresh(wall())
	}
	if checked && f.due == nil {
		f.repairs = 0
	}
	if clock.Elapsed().Sub(w.since) >= proven {
		f.c.backoffs.succeed(w.keys...)
	}
	if f.warned && f.due == nil {
		f.warned = false
		f.log.Info("following the service again", "revision", f.ds.Status().Revision)
	}
	f.set(func() {
		f.atHead = clock.Elapsed()
		if f.due == nil {
			f.lastErr, f.foreign = "", nil
		}
	})
}
