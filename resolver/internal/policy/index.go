package policy

import (
	"context"
	"errors"
	"io/fs"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/filter"
)

// savePause is how long the catalogue's lists must stay as they are before their index is merged and written:
// after a start without one they arrive one by one.
const savePause = 5 * time.Second

// loadIndex starts a state from the index on disk, so that a restart compiles only what has changed since.
func (s *state) loadIndex(o *Options) {
	if o.Index == "" {
		return
	}
	m, ids, err := filter.Load(o.Index, &o.Key)
	switch {
	case err == nil:
		s.lists, s.listHash = m, *ids
		lists := m.Lists()
		o.Logger.Info("the index of filter lists was read", "lists", lists.Len(), "rules", m.Stats().Rules)
	case errors.Is(err, fs.ErrNotExist):
	default:
		o.Logger.Warn("filter lists are compiled again", "err", err)
	}
}

// keepIndex merges and writes the index whenever the lists have changed and stayed so for a moment, and before
// it returns. A disk that fails changes nothing for users: the next start compiles again.
func (p *Policy) keepIndex(ctx context.Context) {
	quiet := time.NewTimer(savePause)
	for {
		select {
		case <-ctx.Done():
			p.saveIndex()
			return
		case <-p.listsChanged:
			quiet.Reset(savePause)
		case <-quiet.C:
			p.merge()
			p.saveIndex()
		}
	}
}

func (p *Policy) tellListsChanged() {
	select {
	case p.listsChanged <- struct{}{}:
	default:
	}
}

// merge makes one table of the lists' index, so that a query searches one. If the catalogue changes meanwhile
// it is for the next time.
func (p *Policy) merge() {
	old := p.state.Load()
	if old.lists.Overlays() == 0 {
		return
	}
	s := *old
	s.view.state = &s
	s.lists = old.lists.Merge(nil)
	p.state.CompareAndSwap(old, &s)
}

func (p *Policy) saveIndex() {
	s := p.state.Load()
	if p.o.Index == "" || s.lists == p.saved {
		return
	}
	p.saved = s.lists // one try: the next change is the next
	if err := s.lists.Save(p.o.Index, &s.listHash); err != nil {
		p.o.Logger.Error("the next start compiles the filter lists again", "err", err)
	}
}
