package node

import (
	"context"
	"math"
	"sync"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/syncclient"
	"github.com/sluice-dns/sluice/usercache"
)

const (
	// blobsEvery is how often at most the records are read for the blobs they name, and blobsShare the part of
	// the time that this may take: with many users it is done less often. Meanwhile what a query needs is fetched
	// because it is asked for.
	blobsEvery = 2 * time.Second
	blobsShare = 50
)

// wantBlobs keeps the blobs here that records name, whether somebody asks for them or not: after a restart with
// the service away there must be no list that a user has and that is missing.
func (n *Node) wantBlobs(ctx context.Context) {
	changed := make(chan struct{}, 1)
	n.users.Dataset(usercache.CatalogueKind).Notify(changed)
	n.users.Dataset(usercache.Users).Notify(changed)
	for {
		started := clock.Elapsed()
		all := map[syncclient.Hash]bool{}
		n.users.Blobs(func(sum [32]byte) { all[sum] = true })
		list := make([]syncclient.Hash, 0, len(all))
		for sum := range all {
			list = append(list, sum)
		}
		n.sync.Blobs().Want(list)
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(blobsEvery, blobsShare*clock.Elapsed().Sub(started))):
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// A textWatch knows the blobs that changes have named and that are not here yet. While one is missing, its record is
// not served as it stands, and who waits for its revision has to wait.
type textWatch struct {
	mu      sync.Mutex
	missing map[usercache.Kind]map[syncclient.Hash]missingText
}

type missingText struct {
	revision uint64        // of the oldest record that names it
	since    clock.Instant // when that came
}

// A blob that has not come for textWait is no longer waited for: its record may have changed again, and then nobody
// wants it. maxMissing bounds how many are.
const (
	textWait   = 30 * time.Second
	maxMissing = 8192
)

// before returns the revision up to which a dataset is served with all its texts, as far as changes are concerned;
// MaxUint64 if none is missing. It is to be called after the dataset's revision has been read. What is missing is
// fetched from now on.
func (w *textWatch) before(n *Node, kind usercache.Kind) uint64 {
	blobs := n.sync.Blobs()
	least, ask := w.look(n.users.Dataset(kind), blobs.Has, clock.Elapsed())
	for _, sum := range ask {
		_, _ = blobs.Get(sum) // which is not here, and comes because somebody asks
	}
	return least
}

// look is before, but for asking for what has turned out to be missing.
func (w *textWatch) look(d *usercache.Dataset, has func(syncclient.Hash) bool, now clock.Instant) (least uint64, ask []syncclient.Hash) {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.missing[d.Kind()]
	if m == nil {
		m = make(map[syncclient.Hash]missingText)
		if w.missing == nil {
			w.missing = make(map[usercache.Kind]map[syncclient.Hash]missingText)
		}
		w.missing[d.Kind()] = m
	}
	for _, b := range d.NewBlobs() {
		if _, known := m[b.Sum]; !known && len(m) < maxMissing && !has(b.Sum) {
			m[b.Sum] = missingText{b.Revision, now}
			ask = append(ask, b.Sum)
		}
	}
	least = math.MaxUint64
	for sum, t := range m {
		if has(sum) || now.Sub(t.since) > textWait {
			delete(m, sum)
			continue
		}
		least = min(least, t.revision-1)
	}
	return least, ask
}
