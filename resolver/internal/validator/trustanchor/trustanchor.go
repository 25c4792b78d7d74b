// Package trustanchor keeps the keys that chains of trust begin with.
//
// Anchors are DS and DNSKEY records of any names, from a file or built in (the root's key signing keys as IANA
// publishes them). From then on a Store follows each of these zones as RFC 5011 has it: it fetches the zone's
// DNSKEY RRset now and then, adds a key that was there for the hold-down time under the signature of a key that
// is trusted, and drops a revoked key at once and for good. What it learned is kept in a small text file with a
// checksum, written as a whole; a file that is damaged is set aside, said so, and the configured anchors hold.
// The Store also tells the zones which keys are trusted here (RFC 8145 section 5).
//
// Readers (At, RootTag) take an immutable snapshot and never wait. Everything else belongs to the goroutine
// that is in Run; observe, which decides, is pure. Hold-down times are counted by elapsed time, so that a step
// of the date neither completes nor restarts them; across a restart the date has to do, for no longer than the
// longest time between two looks.
//
// It does not validate answers: that is the validator's, which asks At.
package trustanchor

import (
	"context"
	"encoding/hex"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/validator/rrsig"
)

// Options tune a Store. Every zero field means the default stated on it.
type Options struct {
	// Text holds DS and DNSKEY records in zone-file syntax, File names it in errors. With both empty the
	// built-in anchors of the root are used; a Text that is empty, with a File, trusts nothing.
	Text, File string
	// State is the file in which what was learned is kept; "" means nowhere. Its folder exists.
	State string

	// Fetch returns the DNSKEY RRset of a zone with its signatures, as the zone's servers have it now, not
	// from a cache. Nil means that anchors stay as configured: nothing is fetched, and nothing learned earlier
	// counts.
	Fetch func(ctx context.Context, zone dnsname.Name) (query.RRset, error)
	// Tell asks a question of type NULL for the sake of being seen (RFC 8145 section 5.1). Nil means that
	// nobody is told.
	Tell func(ctx context.Context, name dnsname.Name) error

	// Skew is how far the clocks of signers and ours may be apart.
	Skew time.Duration
	// Dropped is called, by the goroutine in Run, when something is trusted no longer: what was judged by it
	// has to be judged again. (A key more changes no judgement that was good.) Nil: nobody is told.
	Dropped func()
	// Logger is told what operators should know. Nil means slog.Default.
	Logger *slog.Logger
}

// A Store answers what is trusted, and keeps it current while Run runs. It is safe for concurrent use.
type Store struct {
	o    Options // constant after New
	view atomic.Pointer[view]

	points []*point // owned by Run, once it runs
	others []*point // not configured now; kept in the file
}

// A view is what readers see.
type view struct {
	anchors map[dnsname.Name]anchors
	tags    map[uint16]bool // of the root's
}

// anchors are RDATA in the form of query.RRset.Data.
type anchors struct{ ds, keys []byte }

// New reads the configured anchors and what was learned about them. An error is about the former: which file
// and line, and what is wrong.
func New(o Options) (*Store, error) {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	source := ""
	if o.Text == "" && o.File == "" {
		o.Text, o.File, source = BuiltIn, "the built-in anchors", "built-in"
	}
	configured, warnings, err := parse(o.Text, o.File)
	if err != nil {
		return nil, err
	}
	for _, w := range warnings {
		o.Logger.Warn(w)
	}
	s := &Store{o: o}
	for _, name := range slices.SortedFunc(maps.Keys(configured), dnsname.Compare) {
		s.points = append(s.points, newPoint(name, configured[name], source))
	}
	if o.State != "" && o.Fetch != nil {
		s.restore()
	}
	for _, p := range s.points {
		if !p.fold() {
			o.Logger.Error(p.gone())
		}
	}
	s.publish()
	return s, nil
}

// At returns the DS and DNSKEY RDATA that are trusted for the zone of this name, in the form of
// query.RRset.Data; ok is false if the name is no trust anchor.
func (s *Store) At(name dnsname.Name) (ds, keys []byte, ok bool) {
	a, ok := s.view.Load().anchors[name]
	return a.ds, a.keys, ok
}

// RootTag reports whether a key with this tag is trusted for the root (RFC 8509).
func (s *Store) RootTag(tag uint16) bool { return s.view.Load().tags[tag] }

// publish gives readers the present state and reports whether something in the last is trusted no longer.
func (s *Store) publish() (dropped bool) {
	v := &view{anchors: map[dnsname.Name]anchors{}, tags: map[uint16]bool{}}
	for _, p := range s.points {
		a := p.trusted()
		if a.ds == nil && a.keys == nil {
			continue
		}
		v.anchors[p.name] = a
		if p.name == dnsname.Root {
			for _, tag := range p.tags() {
				v.tags[tag] = true
			}
		}
	}
	old := s.view.Swap(v)
	if old == nil {
		return false
	}
	for name, was := range old.anchors {
		is := v.anchors[name]
		if lacks(is.ds, was.ds) || lacks(is.keys, was.keys) {
			return true
		}
	}
	return false
}

// lacks reports whether some RDATA of was is not in is.
func lacks(is, was []byte) bool {
	for w := range query.RDatas(was) {
		there := false
		for i := range query.RDatas(is) {
			there = there || string(i) == string(w)
		}
		if !there {
			return true
		}
	}
	return false
}

// How often Run looks, beside what RFC 5011 section 2.3 computes.
const (
	firstRetry = time.Minute    // doubled up to retryFloor while servers have not been reached since the start
	tellEvery  = 24 * time.Hour // RFC 8145 section 5.3 wants no more than once a TTL; the root's is longer
	fetchTime  = 30 * time.Second
	// tick is how long a sleep lasts at most, for a clock that tests move.
	tick = time.Minute
)

// Run follows the anchors until ctx ends. It is called once.
func (s *Store) Run(ctx context.Context) {
	looks, tells := s.o.Fetch != nil, s.o.Tell != nil
	if !looks && !tells || len(s.points) == 0 {
		<-ctx.Done()
		return
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		now := clock.Elapsed()
		next := now.Add(tick)
		for _, p := range s.points {
			if ctx.Err() != nil {
				return
			}
			if looks {
				if !now.Before(p.nextLook) {
					s.look(ctx, p)
				}
				next = min(next, p.nextLook)
			}
			if tells {
				if !now.Before(p.nextTell) {
					s.tell(ctx, p)
				}
				next = min(next, p.nextTell)
			}
		}
		timer.Reset(max(next.Sub(clock.Elapsed()), time.Millisecond))
	}
}

// look fetches the keys of p and acts on what they say.
func (s *Store) look(ctx context.Context, p *point) {
	fetching, cancel := context.WithTimeout(ctx, fetchTime)
	set, err := s.o.Fetch(fetching, p.name)
	cancel()
	if ctx.Err() != nil {
		return
	}
	now := clock.Elapsed()
	if err != nil {
		p.nextLook = now.Add(p.retryUnreached())
		s.say(p, slog.LevelWarn, fmt.Sprintf("the keys of %v cannot be had, its trust anchors stay as they are: %v", p.name, err))
		return
	}
	saw := p.observe(&set, now, clock.Wall(), s.o.Skew)
	p.nextLook = now.Add(saw.next)
	for _, n := range saw.news {
		s.o.Logger.Log(ctx, n.level, n.text)
	}
	if saw.problem != "" {
		s.say(p, slog.LevelError, saw.problem)
	} else {
		p.said = ""
	}
	if s.publish() && s.o.Dropped != nil {
		s.o.Dropped()
	}
	if saw.learned && s.o.State != "" {
		if err := save(s.o.State, slices.Concat(s.points, s.others)); err != nil {
			s.o.Logger.Error("what was learned of trust anchors is not kept: " + err.Error())
		}
	}
}

// say reports a problem once, not at each look.
func (s *Store) say(p *point, level slog.Level, text string) {
	if p.said != text {
		p.said = text
		s.o.Logger.Log(context.Background(), level, text)
	}
}

// tell lets the servers of p know which keys are trusted. Nothing depends on the answer.
func (s *Store) tell(ctx context.Context, p *point) {
	p.nextTell = clock.Elapsed().Add(tellEvery)
	name, ok := signal(p.name, p.tags())
	if !ok {
		return
	}
	asking, cancel := context.WithTimeout(ctx, fetchTime)
	defer cancel()
	if err := s.o.Tell(asking, name); err != nil && ctx.Err() == nil {
		s.o.Logger.Debug("telling which trust anchors are used", "name", name, "error", err)
	}
}

// signal returns the name to ask for to tell that these keys are trusted (RFC 8145 section 5.1): _ta- and the
// tags in hexadecimal, sorted, before the zone's name. A label holds twelve.
func signal(zone dnsname.Name, tags []uint16) (dnsname.Name, bool) {
	if len(tags) == 0 {
		return "", false
	}
	slices.Sort(tags)
	tags = slices.Compact(tags)
	var hexes []string
	for _, t := range tags[:min(len(tags), 12)] {
		hexes = append(hexes, hex.EncodeToString([]byte{byte(t >> 8), byte(t)}))
	}
	name, err := zone.Prepend("_ta-" + strings.Join(hexes, "-"))
	return name, err == nil
}

// restore takes up what was learned before.
func (s *Store) restore() {
	saved, err := load(s.o.State)
	if err != nil {
		s.o.Logger.Error(fmt.Sprintf("what was learned of trust anchors is lost, the configured ones are used: %v", err))
		return
	}
	for _, p := range s.points {
		if old, ok := saved[p.name]; ok {
			p.resume(old)
			delete(saved, p.name)
		}
	}
	for _, name := range slices.SortedFunc(maps.Keys(saved), dnsname.Compare) {
		s.others = append(s.others, &point{name: name, source: saved[name].source, seenWall: saved[name].seen, keys: saved[name].keys})
	}
}

// tagOf is the tag of a DS or DNSKEY RDATA.
func tagOf(rdata []byte, ds bool) uint16 {
	if ds {
		d, _ := rrsig.ParseDS(rdata)
		return d.KeyTag
	}
	return rrsig.KeyTag(rdata)
}
