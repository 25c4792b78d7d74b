package bizlogic

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache"
)

const (
	// coalesce is how long changes may be gathered into one delta.
	coalesce = 20 * time.Millisecond

	// maxDelta is about how many bytes of changes one message carries; a client must take that, a record
	// and change, by gRPC's default limit of 4 MiB.
	maxDelta = 1 << 20

	// maxRing bounds the bytes of deltas kept for streams that lag; beyond it they read the index.
	maxRing = 8 << 20

	// maxPending bounds what is gathered before a flush. More than that goes to every stream by the index.
	maxPending = 4 << 20
)

// A dataset is where one dataset stands, and the ring of its newest deltas.
type dataset struct {
	kind string
	id   []byte // 16 bytes; constant

	mu sync.Mutex // guards everything below; held for memory work only

	// As of the last commit.
	head    uint64
	oldest  uint64
	tree    *usercache.Tree
	records uint64
	size    uint64
	totals  *userv1.Totals

	pending      []*syncv1.Change // committed and not in the ring yet
	pendingBytes int
	overflow     bool // pending was given up: the index has it

	// As of the last flush.
	flushed     uint64
	flushedRoot usercache.Hash
	ring        []*ringEntry // each begins where the one before ends; the last ends at flushed
	ringBytes   int
	changed     chan struct{} // closed at the next flush
}

// A ringEntry is one delta, encoded by the first stream that sends it and shared by all.
type ringEntry struct {
	from, to uint64
	bytes    int

	once     sync.Once
	msg      *syncv1.WatchResponse
	prepared grpc.PreparedMsg
	err      error
}

// send sends the delta on a stream.
func (e *ringEntry) send(stream grpc.ServerStreamingServer[syncv1.WatchResponse]) error {
	// The encoded form does not depend on the stream, as long as none sets a compressor of its own; a
	// prepared message says itself whether it is compressed.
	e.once.Do(func() { e.err = e.prepared.Encode(stream, e.msg) })
	if e.err != nil {
		return e.err
	}
	return stream.SendMsg(&e.prepared)
}

// sendRest sends what of the delta lies after pos, to a stream that comes from the index.
func (e *ringEntry) sendRest(stream grpc.ServerStreamingServer[syncv1.WatchResponse], pos uint64) error {
	whole := e.msg.GetDelta()
	rest := &syncv1.Delta{From: pos, To: whole.To, Root: whole.Root, NeedsCatalogue: whole.NeedsCatalogue}
	for _, c := range whole.Changes {
		if c.Revision > pos {
			rest.Changes = append(rest.Changes, c)
		}
	}
	return stream.Send(&syncv1.WatchResponse{Message: &syncv1.WatchResponse_Delta{Delta: rest}})
}

// commit takes a committed transaction's work over.
func (d *dataset) commit(w *work) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for bucket, sum := range w.sums {
		d.tree.Set(bucket, sum)
	}
	d.head, d.oldest = w.meta.Revision, w.meta.Oldest
	d.records, d.size, d.totals = w.meta.Records, w.meta.Size, w.meta.Totals
	for _, c := range w.changes {
		d.pendingBytes += changeSize(c)
	}
	if d.overflow || d.pendingBytes > maxPending {
		d.pending, d.overflow = nil, true
		return
	}
	d.pending = append(d.pending, w.changes...)
}

// position is the committed head and its root.
func (d *dataset) position() (head uint64, root usercache.Hash) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.head, d.tree.Root()
}

// flush moves what is pending to the ring and wakes the streams.
func (d *dataset) flush(needs uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.head == d.flushed {
		return
	}
	root := d.tree.Root()
	if d.overflow || d.pendingBytes > maxDelta {
		// Streams read it from the index, in messages of bounded size.
		d.ring, d.ringBytes = nil, 0
	} else {
		delta := &syncv1.Delta{From: d.flushed, To: d.head, Changes: newest(d.pending), Root: root[:], NeedsCatalogue: needs}
		d.ring = append(d.ring, &ringEntry{from: d.flushed, to: d.head, bytes: d.pendingBytes + 128,
			msg: &syncv1.WatchResponse{Message: &syncv1.WatchResponse_Delta{Delta: delta}}})
		d.ringBytes += d.pendingBytes + 128
		for d.ringBytes > maxRing {
			d.ringBytes -= d.ring[0].bytes
			d.ring[0] = nil
			d.ring = d.ring[1:]
		}
	}
	d.pending, d.pendingBytes, d.overflow = nil, 0, false
	d.flushed, d.flushedRoot = d.head, root
	close(d.changed)
	d.changed = make(chan struct{})
}

// newest keeps each key's last change, in order of revision.
func newest(changes []*syncv1.Change) []*syncv1.Change {
	seen := make(map[string]bool, len(changes))
	out := make([]*syncv1.Change, 0, len(changes))
	for _, c := range slices.Backward(changes) {
		if !seen[string(c.Key)] {
			seen[string(c.Key)] = true
			out = append(out, c)
		}
	}
	slices.Reverse(out)
	return out
}

// after says what a stream at revision pos sends next: entries of the ring; or, if behind, the index; or, if
// neither, it waits for the next flush. The first entry may begin before pos, since the index ends where its
// transaction was and not where an entry begins.
func (d *dataset) after(pos uint64) (entries []*ringEntry, behind bool, wait <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if pos >= d.flushed {
		return nil, false, d.changed
	}
	i, ok := slices.BinarySearchFunc(d.ring, pos, func(e *ringEntry, pos uint64) int {
		switch {
		case e.to <= pos:
			return -1
		case e.from > pos:
			return 1
		}
		return 0
	})
	if !ok {
		return nil, true, nil
	}
	return slices.Clone(d.ring[i:]), false, nil
}

// flushLoop flushes datasets when something was committed: at once after a pause, else coalescing.
func (s *Service) flushLoop() {
	timer := time.NewTimer(0)
	<-timer.C
	last := clock.Elapsed().Add(-coalesce)
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-s.flushing:
		}
		if wait := coalesce - clock.Elapsed().Sub(last); wait > 0 {
			timer.Reset(wait)
			select {
			case <-s.ctx.Done():
				return
			case <-timer.C:
			}
		}
		s.flushAll()
		last = clock.Elapsed()
	}
}

// flushAll flushes every dataset, the catalogue before the users that name things of it.
func (s *Service) flushAll() {
	for _, kind := range []string{Catalogue, Config, Secrets, Users} {
		s.flush(kind)
	}
}

func (s *Service) flush(kind string) {
	var needs uint64
	if kind == Users {
		// Whatever these users name was committed before them, so it is at or before the catalogue's head.
		needs, _ = s.datasets[Catalogue].position()
	}
	s.datasets[kind].flush(needs)
}

// A walk is a stream's place in the by-revision index.
type walk struct {
	pos  uint64 // everything up to here is sent
	part []byte // within the revision after pos: last index key sent
	// under: the index has not been read to its end since the walk began, so the ring cannot be joined yet.
	under bool
}

// next reads the next delta of the index after w, in one short transaction, and moves w past it. A walk ends
// at the revision of its last transaction, never before: the index has each record at its newest change alone,
// so a walk that stopped at an earlier revision would lack what a record changed since was at that revision,
// and so would have another root there than the dataset had.
func (s *Service) next(d *dataset, w *walk) (*syncv1.Delta, error) {
	delta := &syncv1.Delta{From: w.pos}
	done := true
	err := s.db.View(func(tx *bolt.Tx) error {
		m, err := metaOf(tx, d.kind)
		if err != nil {
			return err
		}
		if w.pos < m.Oldest {
			return fmt.Errorf("revision %d is older than %d, the oldest that can be resumed", w.pos, m.Oldest)
		}
		if d.kind == Users {
			catalogue, err := metaOf(tx, Catalogue)
			if err != nil {
				return err
			}
			delta.NeedsCatalogue = catalogue.Revision
		}
		size, complete := 0, 0 // complete: changes of revisions that are in delta whole
		c := tx.Bucket([]byte(d.kind)).Bucket(bucketByRevision).Cursor()
		from := be64(w.pos + 1)
		k, v := c.Seek(from)
		if w.part != nil {
			if k, v = c.Seek(w.part); bytes.Equal(k, w.part) {
				k, v = c.Next()
			}
		}
		for ; k != nil; k, v = c.Next() {
			revision := binary.BigEndian.Uint64(k)
			if n := len(delta.Changes); n > 0 && revision != delta.Changes[n-1].Revision {
				complete = n
			}
			if size >= maxDelta {
				done = false
				break
			}
			change, err := s.readChange(tx, d.kind, k[8:], revision, v)
			if err != nil {
				return err
			}
			delta.Changes = append(delta.Changes, change)
			size += changeSize(change)
		}
		switch n := len(delta.Changes); {
		case done:
			delta.To, w.part = m.Revision, nil
			d.mu.Lock()
			if d.head == delta.To { // not a commit ahead or behind the transaction
				root := d.tree.Root()
				delta.Root = root[:]
			}
			d.mu.Unlock()
		case complete > 0: // end between two revisions
			delta.To, w.part = delta.Changes[complete-1].Revision, nil
			delta.Changes = delta.Changes[:complete]
		default: // one revision is too big for a message
			last := delta.Changes[n-1]
			delta.To, delta.More = last.Revision, true
			w.part = append(be64(last.Revision), last.Key...)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if !delta.More {
		w.pos = delta.To
	}
	w.under = !done
	return delta, nil
}

// readChange makes a change out of an entry of the index.
func (s *Service) readChange(tx *bolt.Tx, kind string, key []byte, revision uint64, entry []byte) (*syncv1.Change, error) {
	change := &syncv1.Change{Key: bytes.Clone(key), Revision: revision}
	var e storev1.Entry
	if err := proto.Unmarshal(entry, &e); err != nil {
		return nil, fmt.Errorf("index of %s at revision %d: %w", kind, revision, err)
	}
	if e.Removed {
		change.Removed = true
		return change, nil
	}
	got, b, ok, err := getRecord(tx, kind, key)
	if err != nil {
		return nil, err
	}
	if !ok || got != revision {
		return nil, fmt.Errorf("index of %s names %q at revision %d, which the records do not have", kind, key, revision)
	}
	change.Bytes = bytes.Clone(b)
	return change, nil
}

func changeSize(c *syncv1.Change) int { return len(c.Key) + len(c.Bytes) + 24 }
