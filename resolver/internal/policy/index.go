package policy

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"sync/atomic"
	"time"
	"weak"

	"github.com/sluice-dns/sluice/resolver/internal/filter"
)

// How the index of the catalogue's lists changes while it serves. A changed list goes over what there is
// (filter.Builder), where it takes memory beside its old version, and when lists have been left alone for a while all
// become one table again. Both together stay below one and a half times the index, whatever changes: merging gives the
// old tables back bit by bit, and lists whose new versions would be more than a part of the index wait, as they are,
// until those before them are merged.

const (
	// savePause is how long the catalogue's lists must stay as they are before their index is merged and written:
	// after a start without one they arrive one by one. By then nobody waits any more for the answer to a query that
	// began with what was before.
	savePause = 5 * time.Second
	// saveAgain is when to try again to write the index after it has failed.
	saveAgain = time.Minute
	// changeShare is the part of a bigger one that lists may have that are in it in two versions.
	changeShare = 8
)

// smallIndex is an index that may be in memory twice: keeping it from that is not worth anybody's waiting.
var smallIndex int64 = 8 << 20

// A shelf holds the matcher of a state's lists. Merging puts an equal one in its place, for queries too that have begun
// with that state: they would keep the memory of the old one for as long as their answers take.
type shelf struct {
	atomic.Pointer[filter.Matcher]
	// revision is the catalogue's by which the lists were numbered first.
	revision uint64
	// void, if not nil, are the numbers that mean other lists in the Matcher than they did in the shelf's states. It is
	// looked at after the Matcher, and stored before.
	void atomic.Pointer[filter.Set]
}

func newShelf(m *filter.Matcher, revision uint64) *shelf {
	s := &shelf{revision: revision}
	s.Store(m)
	return s
}

// A room says how much new versions of lists may come beside the old ones before these are merged away.
type room struct {
	bytes int64
	none  bool // has been taken
}

// newRoom returns what there is now. If there are as many tables as there may be, they are merged first: one more would
// have them merged all at once.
func (p *Policy) newRoom(now *shelf) room {
	if now == nil {
		return room{math.MaxInt64, true}
	}
	if s := now.Load().Stats(); s.Bytes <= smallIndex {
		return room{math.MaxInt64, true}
	}
	if now.Load().Overlays() == filter.MaxOverlays {
		p.mergeLocked(now)
	}
	s := now.Load().Stats()
	return room{s.Bytes/changeShare - s.Overlaid, s.Overlaid == 0}
}

// take takes room for a list, of which a rule takes about as much memory as text. A list for which there can never be
// room gets all of it.
func (r *room) take(size uint64) bool {
	if !r.none && size > uint64(max(r.bytes, 0)) {
		return false
	}
	r.bytes -= int64(min(size, math.MaxInt64/2))
	r.none = false
	return true
}

// loadIndex starts a state from the index on disk, so that a restart compiles only what has changed since.
func (s *state) loadIndex(o *Options) {
	if o.Index == "" {
		return
	}
	m, ids, err := filter.Load(o.Index, &o.Key)
	switch {
	case err == nil:
		s.lists, s.listHash = newShelf(m, o.Users.Catalogue().Revision), *ids
		lists := m.Lists()
		o.Logger.Info("the index of filter lists was read", "lists", lists.Len(), "rules", m.Stats().Rules)
	case errors.Is(err, fs.ErrNotExist):
	default:
		o.Logger.Warn("filter lists are compiled again", "err", err)
	}
}

// keep merges and writes the index whenever the lists have changed and stayed so for a moment, and before it returns.
// Lists that waited are then taken in. It writes which texts of users are in force likewise. A disk that fails changes
// nothing for users; until it works again a start would compile again what has changed.
func (p *Policy) keep(ctx context.Context) {
	lists := time.NewTimer(savePause)
	var texts <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			p.saveIndex()
			p.saveTexts()
			return
		case <-p.listsChanged:
			lists.Reset(savePause)
		case <-p.replaced:
			if texts == nil {
				texts = time.After(savePause)
			}
		case <-lists.C:
			p.merge()
			if p.state.Load().waiting > 0 {
				p.Update()
				lists.Reset(savePause)
			} else if !p.saveIndex() {
				lists.Reset(saveAgain)
			}
		case <-texts:
			if texts = nil; !p.saveTexts() {
				texts = time.After(saveAgain)
			}
		}
	}
}

func (p *Policy) tellReplaced() {
	select {
	case p.replaced <- struct{}{}:
	default:
	}
}

func (p *Policy) tellListsChanged() {
	select {
	case p.listsChanged <- struct{}{}:
	default:
	}
}

// merge makes one table of the lists' index, so that a query searches one and what is gone takes no memory.
func (p *Policy) merge() {
	p.making.Lock()
	defer p.making.Unlock()
	p.mergeLocked(p.state.Load().lists)
}

func (p *Policy) mergeLocked(now *shelf) {
	if now.Load().Merged() {
		return
	}
	// States before this one hold what is to be given back. Unless tables are too many to wait for that, their queries
	// have been answered, all but some that nobody waits for; of those, and of listeners that are idle and have the
	// last one before their eyes, none may hold it.
	shelves := []*shelf{now}
	for _, w := range p.former {
		if s := w.Value(); s != nil && s != now {
			shelves = append(shelves, s)
		}
	}
	serve := func(m *filter.Matcher) {
		for _, s := range shelves {
			s.Store(m)
		}
	}
	catalogue := p.state.Load().catalogue
	for _, s := range shelves[1:] {
		if void := filter.Set(catalogue.Renumbered(s.revision).Lists); void != (filter.Set{}) {
			s.void.Store(&void)
		}
	}
	serve(now.Load())
	serve(now.Load().Merge(serve))
	p.former = p.former[:0]
	for _, s := range shelves {
		p.former = append(p.former, weak.Make(s))
	}
	p.merged = true
}

// saveIndex writes the index if what is on disk is not it, and is false if that failed.
func (p *Policy) saveIndex() bool {
	p.making.Lock()
	s := p.state.Load()
	lists, merged := s.lists.Load(), p.merged
	p.merged = false
	p.making.Unlock()
	if p.o.Index == "" || s.listHash == p.saved && !merged && !p.unsaved {
		return true
	}
	if err := lists.Save(p.o.Index, &s.listHash); err != nil {
		if !p.unsaved {
			p.o.Logger.Error("the index of filter lists cannot be kept: a start compiles again what has changed since it was, until there is room", "err", err, "next_try", saveAgain)
		}
		p.unsaved = true
		return false
	}
	if p.unsaved {
		p.o.Logger.Info("the index of filter lists is kept again", "path", p.o.Index)
	}
	p.saved, p.unsaved = s.listHash, false
	return true
}
