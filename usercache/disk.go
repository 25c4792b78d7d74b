package usercache

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache/internal/store"
	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"
)

// Names of the buckets of a file. FORMAT.md describes them.
var (
	bucketMeta    = []byte("meta")
	bucketTree    = []byte("tree")
	bucketRecords = []byte("records")
	bucketOverlay = []byte("overlay")
	bucketAsOfs   = []byte("as_of")

	keyMeta       = []byte("dataset")
	keyCheckpoint = []byte("checkpoint")
)

// formatVersion is the version of the format this package writes. Older ones are migrated as they are read;
// there is none yet.
const formatVersion = 1

const (
	// maxQueued is how many bytes of changes may wait for a disk that works before changes wait too.
	maxQueued = 32 << 20
	// maxFailing is how many may wait for a disk that fails, before they are dropped in favour of a
	// checkpoint.
	maxFailing = 64 << 20
	// maxSince is how many may come in while a checkpoint is written, before it is given up.
	maxSince = 256 << 20
	// commitBytes ends the gathering of groups into one transaction.
	commitBytes = 8 << 20
	// entryCost is what an entry of a group takes beside the record.
	entryCost = 160

	retryMin = 250 * time.Millisecond
	retryMax = 30 * time.Second
)

// A disk is what a Dataset has of its file. It is a part of Dataset, under its lock, except for the fields
// of the writer.
type disk struct {
	open    *group
	groups  []*group // closed, in order
	queued  int      // bytes of groups
	counter uint64   // groups closed so far

	written           uint64 // groups on disk
	persistedRevision uint64
	generation        uint64
	failing           error  // the last attempt's; nil = all is well
	mustCheckpoint    bool   // the file lacks changes, or there is none: it takes no more
	drops             int    // how often groups were dropped
	base              uint64 // a generation that was read in place of a newer one; 0 = none
	closed            bool
	wakeup            chan struct{} // of size one: the writer should look
	progress          chan struct{} // closed and replaced whenever written or failing changes

	// Owned by the writer.
	damaged []string // files to set aside once what was saved from them is on disk
	file    *file
	changes uint64 // at the last checkpoint
	since   []*group
	keep    bool // gather since
}

// A file is an open generation.
type file struct {
	db         *bolt.DB
	path       string
	generation uint64
	written    time.Time
}

// A group is changes that reach the disk in one transaction, at whose end the file is the replica at one
// revision.
type group struct {
	opened     clock.Instant
	entries    []entry
	overlay    []overlayChange
	asOf       []bucketAsOf
	forgetAsOf bool // before asOf
	cost       int

	// Set when closed.
	number uint64
	meta   *storev1.Meta
	sums   *[Nodes]BucketSum
}

type entry struct {
	storeKey []byte
	record   store.Record
	leaf     Leaf
	removed  bool
}

type overlayChange struct {
	storeKey []byte
	message  *storev1.Overlay // nil = dropped; its record is filled in when written
	record   store.Record
}

type bucketAsOf struct {
	bucket uint16
	asOf   uint64
}

func (g *group) put(key hashedKey, r store.Record, l Leaf) {
	g.entries = append(g.entries, entry{storeKey: key, record: r, leaf: l})
	g.cost += entryCost + r.Size()
}

func (g *group) remove(key hashedKey) {
	g.entries = append(g.entries, entry{storeKey: key, removed: true})
	g.cost += entryCost + len(key)
}

func (g *group) setOverlay(d *Dataset, key string, e *overlayEntry) {
	c := overlayChange{storeKey: AppendStoreKey(nil, []byte(key)), message: e.message()}
	if e.reason != NeverUsable {
		if ordinal, ok := d.store.FindServing([]byte(key)); ok {
			c.record, _ = d.store.Serving(ordinal)
		}
	}
	g.overlay = append(g.overlay, c)
	g.cost += entryCost + c.record.Size()
}

func (g *group) dropOverlay(key string) {
	g.overlay = append(g.overlay, overlayChange{storeKey: AppendStoreKey(nil, []byte(key))})
	g.cost += entryCost
}

func (e *overlayEntry) message() *storev1.Overlay {
	return &storev1.Overlay{
		Reason: storev1.OverlayReason(e.reason), HeldRevision: e.heldRevision, Since: e.since, Until: e.until, Detail: e.detail,
	}
}

// group returns the open group.
func (k *disk) group(d *Dataset) *group {
	if k.open == nil {
		k.open = &group{opened: clock.Elapsed()}
		k.wake()
	}
	return k.open
}

// close closes the open group: the file will be what the replica is now.
func (k *disk) close(d *Dataset) {
	g := k.open
	if g == nil {
		return
	}
	k.open = nil
	k.counter++
	g.number, g.meta = k.counter, d.meta()
	sums := d.sums
	g.sums = &sums
	k.groups = append(k.groups, g)
	k.queued += g.cost
	if k.failing != nil && k.queued > maxFailing {
		k.groups, k.queued, k.mustCheckpoint = nil, 0, true
		k.drops++
	}
	k.wake()
}

func (k *disk) closeIfFull(d *Dataset) {
	if k.open != nil && len(k.open.entries)+len(k.open.overlay)+len(k.open.asOf) >= d.cache.opts.GroupChanges {
		k.close(d)
	}
}

func (k *disk) wake() {
	select {
	case k.wakeup <- struct{}{}:
	default:
	}
}

// advance tells those who wait that something has changed.
func (k *disk) advance() {
	close(k.progress)
	k.progress = make(chan struct{})
}

// wait returns when the disk has caught up with changes, or does not work.
func (k *disk) wait(ctx context.Context, d *Dataset) error {
	for {
		d.mu.RLock()
		behind := k.queued > maxQueued && k.failing == nil && !k.closed
		progress := k.progress
		d.mu.RUnlock()
		if !behind {
			return nil
		}
		select {
		case <-progress:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (k *disk) status(s *DatasetStatus) {
	s.Unpersisted = k.failing != nil
	if k.failing != nil {
		s.DiskError = k.failing.Error()
	}
	s.PersistedRevision, s.Generation = k.persistedRevision, k.generation
}

// Flush returns when everything applied so far is on disk, or the disk has failed to take it.
func (d *Dataset) Flush(ctx context.Context) error {
	d.mu.Lock()
	d.disk.close(d)
	goal := d.disk.counter
	d.mu.Unlock()
	for {
		d.mu.RLock()
		written, failing, closed, progress := d.disk.written, d.disk.failing, d.disk.closed, d.disk.progress
		d.mu.RUnlock()
		switch {
		case written >= goal:
			return nil
		case failing != nil:
			return fmt.Errorf("%s: not on disk: %w", d.kind, failing)
		case closed:
			return ErrClosed
		}
		select {
		case <-progress:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// write is the goroutine that writes a dataset's file. It ends, with everything written that can be, soon
// after ctx does.
func (d *Dataset) write(ctx context.Context) {
	// A fault in bbolt's mapping, as when the file is truncated under it, is then a panic to recover from.
	debug.SetPanicOnFault(true)
	retry := retryMin
	for {
		d.mu.Lock()
		wait := d.due(ctx.Err() != nil)
		d.mu.Unlock()
		if wait > 0 {
			timer := time.NewTimer(wait)
			select {
			case <-timer.C:
			case <-d.disk.wakeup:
			case <-ctx.Done():
			}
			timer.Stop()
			continue
		}
		if wait < 0 { // nothing to do
			if ctx.Err() != nil {
				break
			}
			select {
			case <-d.disk.wakeup:
			case <-ctx.Done():
			}
			continue
		}
		err := d.writeSome(ctx)
		if fault := (*faultError)(nil); errors.As(err, &fault) {
			d.cache.recovered.Add(1)
		}
		d.mu.Lock()
		failed := d.disk.failing == nil && err != nil
		recovered := d.disk.failing != nil && err == nil
		d.disk.failing = err
		d.disk.advance()
		d.mu.Unlock()
		log := d.cache.opts.Logger
		if err == nil {
			retry = retryMin
			if recovered {
				log.Info("user data is on disk again", "dataset", d.kind)
			}
			continue
		}
		if failed {
			log.Error("user data cannot be written; users are served from memory", "dataset", d.kind, "error", err)
		}
		if ctx.Err() != nil {
			break
		}
		timer := time.NewTimer(retry)
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
		retry = min(2*retry, retryMax)
	}
	if f := d.disk.file; f != nil {
		if err := guarded(f.db.Close); err != nil {
			d.cache.opts.Logger.Warn("closing user data", "file", f.path, "error", err)
		}
	}
}

// due says how long the writer may still wait: 0 = there is something to write, negative = there is nothing.
func (d *Dataset) due(closing bool) time.Duration {
	k := &d.disk
	if closing {
		k.close(d)
	}
	if len(k.groups) > 0 || k.mustCheckpoint {
		return 0
	}
	if k.open == nil {
		return -1
	}
	left := k.open.opened.Add(d.cache.opts.GroupDelay).Sub(clock.Elapsed())
	if left <= 0 {
		k.close(d)
		return 0
	}
	return left
}

// writeSome writes what waits, in a transaction or a checkpoint.
func (d *Dataset) writeSome(ctx context.Context) error {
	d.mu.Lock()
	must := d.disk.mustCheckpoint
	records, changes := d.tree.Records(), d.changes
	d.mu.Unlock()
	f := d.disk.file
	if f == nil || must {
		return d.checkpoint(ctx, false)
	}
	if err := d.commit(f); err != nil {
		return err
	}
	churned := changes-d.disk.changes > max(records/2, minChurn)
	old := clock.Wall().Sub(f.written) > d.cache.opts.CheckpointEvery
	if ctx.Err() == nil && (churned || old && changes != d.disk.changes) {
		if err := d.checkpoint(ctx, true); err != nil && d.disk.file != nil {
			// The present file is good and goes on; the next occasion comes.
			d.disk.changes, f.written = changes, clock.Wall()
			d.cache.opts.Logger.Warn("no checkpoint of user data", "dataset", d.kind, "error", err)
		}
	}
	return nil
}

// minChurn is how many changes are worth a checkpoint however few the records.
const minChurn = 10000

// commit writes closed groups to f in one transaction.
func (d *Dataset) commit(f *file) error {
	d.mu.RLock()
	n, bytes := 0, 0
	for n < len(d.disk.groups) && bytes < commitBytes {
		bytes += d.disk.groups[n].cost
		n++
	}
	groups := d.disk.groups[:n:n]
	must := d.disk.mustCheckpoint
	d.mu.RUnlock()
	if must {
		return errDropped
	}
	if n == 0 {
		return nil
	}
	err := guarded(func() error {
		if err := d.cache.fault("commit"); err != nil {
			return err
		}
		return f.db.Update(func(tx *bolt.Tx) error { return putGroups(tx, groups) })
	})
	var fault *faultError
	if errors.As(err, &fault) {
		// bbolt may hold its locks for ever: the file is left to itself, and what it lacks is in memory.
		d.disk.file = nil
		d.mu.Lock()
		d.disk.mustCheckpoint = true
		d.mu.Unlock()
	}
	if err != nil {
		return fmt.Errorf("writing %s: %w", f.path, err)
	}
	d.done(groups)
	return nil
}

var errDropped = errors.New("changes were dropped for which the disk had no room in time")

// done takes written groups off the queue.
func (d *Dataset) done(groups []*group) {
	if d.disk.keep {
		d.disk.since = append(d.disk.since, groups...)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	last := groups[len(groups)-1].number
	for len(d.disk.groups) > 0 && d.disk.groups[0].number <= last {
		d.disk.queued -= d.disk.groups[0].cost
		d.disk.groups = d.disk.groups[1:]
	}
	d.disk.written = last
	d.disk.persistedRevision = groups[len(groups)-1].meta.Revision
	d.disk.advance()
}

// putGroups writes groups; the file is then what the last of them says.
func putGroups(tx *bolt.Tx, groups []*group) error {
	records, overlay, asOf := tx.Bucket(bucketRecords), tx.Bucket(bucketOverlay), tx.Bucket(bucketAsOfs)
	var entries []entry
	for _, g := range groups {
		entries = append(entries, g.entries...)
		if len(g.asOf) > 0 {
			// A transfer comes in order of key: pages that are split need no room for more.
			records.FillPercent = 0.9
		}
	}
	// In key order, so that a page is touched once. The last change of a key counts.
	slices.SortStableFunc(entries, func(a, b entry) int { return slices.Compare(a.storeKey, b.storeKey) })
	for i := range entries {
		e := &entries[i]
		if i+1 < len(entries) && slices.Equal(e.storeKey, entries[i+1].storeKey) {
			continue
		}
		var err error
		if e.removed {
			err = records.Delete(e.storeKey)
		} else {
			err = records.Put(e.storeKey, appendValue(nil, &e.record, e.leaf))
			e.record.Release()
		}
		if err != nil {
			return err
		}
	}
	for _, g := range groups {
		for i := range g.overlay {
			if err := putOverlay(overlay, &g.overlay[i]); err != nil {
				return err
			}
		}
		if g.forgetAsOf {
			if err := tx.DeleteBucket(bucketAsOfs); err != nil {
				return err
			}
			var err error
			if asOf, err = tx.CreateBucket(bucketAsOfs); err != nil {
				return err
			}
		}
		if err := putAsOf(asOf, g.asOf); err != nil {
			return err
		}
	}
	last := groups[len(groups)-1]
	return putHead(tx, last.meta, last.sums)
}

func putOverlay(b *bolt.Bucket, c *overlayChange) error {
	if c.message == nil {
		return b.Delete(c.storeKey)
	}
	if c.record.Key != nil {
		c.message.Record = &storev1.Record{Revision: c.record.Revision, Bytes: slices.Clone(c.record.Bytes)}
		c.record.Release()
	}
	v, err := proto.Marshal(c.message)
	c.message.Record = nil
	if err != nil {
		return err
	}
	return b.Put(c.storeKey, seal(nil, bucketOverlay, c.storeKey, v))
}

func putAsOf(b *bolt.Bucket, list []bucketAsOf) error {
	for _, a := range list {
		v, err := proto.Marshal(&storev1.BucketState{AsOf: a.asOf})
		if err != nil {
			return err
		}
		key := binary.BigEndian.AppendUint16(nil, a.bucket)
		if err := b.Put(key, seal(nil, bucketAsOfs, key, v)); err != nil {
			return err
		}
	}
	return nil
}

// putHead writes what describes the records: meta and the sums of the tree's nodes.
func putHead(tx *bolt.Tx, m *storev1.Meta, sums *[Nodes]BucketSum) error {
	v, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	if err := tx.Bucket(bucketMeta).Put(keyMeta, seal(nil, bucketMeta, keyMeta, v)); err != nil {
		return err
	}
	tree := tx.Bucket(bucketTree)
	for i := range sums {
		v := sums[i].AppendTo(nil)
		if string(tree.Get([]byte{byte(i)})) == string(v) {
			continue
		}
		if err := tree.Put([]byte{byte(i)}, v); err != nil {
			return err
		}
	}
	return nil
}

// A faultError is a panic of bbolt, or a fault in its memory.
type faultError struct{ what any }

// Error says what happened.
func (e *faultError) Error() string { return fmt.Sprintf("bbolt failed: %v", e.what) }

// guarded calls f and turns a panic into an error.
func guarded(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = &faultError{r}
		}
	}()
	return f()
}

// checkpoint writes all there is in memory to a new file, and makes it the present one. Changes go on
// meanwhile; they reach the present file too, if there is one. An optional checkpoint is given up when ctx
// ends: the present file has everything.
func (d *Dataset) checkpoint(ctx context.Context, optional bool) (err error) {
	log := d.cache.opts.Logger
	d.mu.Lock()
	d.disk.close(d)
	// Everything up to here will be in the scan.
	head := d.headGroup()
	changes, size, drops := d.changes, d.size, d.disk.drops
	generation := d.disk.generation + 1
	d.mu.Unlock()

	if err := d.cache.fault("checkpoint"); err != nil {
		return err
	}
	path := d.cache.path(d.kind, generation)
	tmp := path + ".tmp"
	if err := needSpace(d.cache.opts.Dir, size+size/4); err != nil {
		return err
	}
	if err := os.Remove(tmp); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("removing an unfinished checkpoint: %w", err)
	}
	d.disk.keep, d.disk.since = true, nil
	defer func() {
		d.disk.keep, d.disk.since = false, nil
		if err != nil {
			_ = os.Remove(tmp) // never whole
		}
	}()
	err = guarded(func() error { return d.writeCheckpoint(ctx, tmp, generation, head, drops, optional) })
	if err != nil {
		return fmt.Errorf("writing a checkpoint to %s: %w", tmp, err)
	}
	if err := d.cache.fault("verify"); err != nil {
		return err
	}
	report, err := Verify(tmp)
	if err != nil {
		return fmt.Errorf("reading the checkpoint %s again: %w", tmp, err)
	}
	if !report.Whole {
		return fmt.Errorf("the checkpoint %s is damaged: %s", tmp, report.Faults[0])
	}
	if err := d.cache.fault("rename"); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("publishing a checkpoint: %w", err)
	}
	if err := syncDir(d.cache.opts.Dir); err != nil {
		return err
	}
	f, err := openFile(path, d.kind, generation)
	if err != nil {
		return err
	}
	f.written = clock.Wall()
	old := d.disk.file
	d.disk.file, d.disk.changes = f, changes
	last := head
	if n := len(d.disk.since); n > 0 {
		last = d.disk.since[n-1]
	}
	d.disk.keep = false
	d.done([]*group{last})
	d.mu.Lock()
	d.disk.generation, d.disk.mustCheckpoint = generation, false
	d.mu.Unlock()
	if old != nil {
		if err := guarded(old.db.Close); err != nil {
			log.Warn("closing user data", "file", old.path, "error", err)
		}
	}
	for _, path := range d.disk.damaged {
		if err := os.Rename(path, strings.TrimSuffix(path, ".db")+".damaged"); err != nil {
			log.Warn("setting damaged user data aside", "error", err)
		}
	}
	d.disk.damaged = nil
	d.cache.removeOld(d.kind, generation, d.disk.base)
	d.disk.base = 0
	log.Info("checkpoint of user data", "dataset", d.kind, "file", filepath.Base(path), "revision", last.meta.Revision, "records", last.meta.Records)
	return nil
}

// headGroup returns all that a file holds beside records, as it is now.
func (d *Dataset) headGroup() *group {
	sums := d.sums
	head := &group{meta: d.meta(), number: d.disk.counter, sums: &sums}
	for key, e := range d.overlay {
		head.setOverlay(d, key, e)
	}
	for b, a := range d.asOf {
		head.asOf = append(head.asOf, bucketAsOf{b, a})
	}
	slices.SortFunc(head.asOf, func(a, b bucketAsOf) int { return cmp.Compare(a.bucket, b.bucket) })
	slices.SortFunc(head.overlay, func(a, b overlayChange) int { return slices.Compare(a.storeKey, b.storeKey) })
	return head
}

// writeCheckpoint fills a new file.
func (d *Dataset) writeCheckpoint(ctx context.Context, path string, generation uint64, head *group, drops int, optional bool) error {
	db, err := bolt.Open(path, 0o600, &bolt.Options{NoSync: true, NoFreelistSync: false, FreelistType: bolt.FreelistMapType, InitialMmapSize: initialMmap(d.kind)})
	if err != nil {
		return err
	}
	done := false
	defer func() {
		if !done {
			_ = guarded(db.Close) // the file goes anyway
		}
	}()
	err = db.Update(func(tx *bolt.Tx) error {
		for _, name := range [][]byte{bucketMeta, bucketTree, bucketRecords, bucketOverlay, bucketAsOfs} {
			if _, err := tx.CreateBucket(name); err != nil {
				return err
			}
		}
		v, err := proto.Marshal(&storev1.Checkpoint{
			Format: formatVersion, Generation: generation, Written: clock.Wall().Unix(), Program: d.cache.opts.Program,
		})
		if err != nil {
			return err
		}
		if err := tx.Bucket(bucketMeta).Put(keyCheckpoint, seal(nil, bucketMeta, keyCheckpoint, v)); err != nil {
			return err
		}
		for i := range head.overlay {
			if err := putOverlay(tx.Bucket(bucketOverlay), &head.overlay[i]); err != nil {
				return err
			}
		}
		return putAsOf(tx.Bucket(bucketAsOfs), head.asOf)
	})
	if err != nil {
		return err
	}
	var list []entry
	for node := range Nodes {
		if head.sums[node].Count == 0 {
			continue // what has come since is written at the end
		}
		err := db.Update(func(tx *bolt.Tx) error {
			b := tx.Bucket(bucketRecords)
			b.FillPercent = 0.95 // written in order, and most records will stay
			for i := range BucketsPerNode {
				list = d.bucketEntries(list[:0], uint16(node*BucketsPerNode+i))
				for i := range list {
					r := &list[i].record
					if err := b.Put(list[i].storeKey, appendValue(nil, r, LeafOf(r.Key, r.Revision, r.Bytes))); err != nil {
						return err
					}
					r.Release()
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		// What has changed meanwhile goes to the present file as ever, and to this one at the end.
		if f := d.disk.file; f != nil && optional {
			if err := d.commit(f); err != nil {
				return err
			}
		}
		if err := d.tooMuchSince(); err != nil {
			return err
		}
		if optional && ctx.Err() != nil {
			return ctx.Err()
		}
	}
	d.mu.Lock()
	d.disk.close(d)
	dropped := d.disk.drops != drops
	for _, g := range d.disk.groups {
		if g.number > head.number && (len(d.disk.since) == 0 || g.number > d.disk.since[len(d.disk.since)-1].number) {
			d.disk.since = append(d.disk.since, g)
		}
	}
	d.mu.Unlock()
	if dropped {
		return errDropped
	}
	d.disk.since = slices.DeleteFunc(d.disk.since, func(g *group) bool { return g.number <= head.number })
	err = db.Update(func(tx *bolt.Tx) error {
		if len(d.disk.since) == 0 {
			return putHead(tx, head.meta, head.sums)
		}
		return putGroups(tx, d.disk.since)
	})
	if err != nil {
		return err
	}
	if err := d.cache.fault("sync"); err != nil {
		return err
	}
	if err := db.Sync(); err != nil {
		return err
	}
	done = true
	return db.Close()
}

// tooMuchSince gives a checkpoint up that changes outrun.
func (d *Dataset) tooMuchSince() error {
	n := 0
	for _, g := range d.disk.since {
		n += g.cost
	}
	d.mu.RLock()
	n += d.disk.queued
	d.mu.RUnlock()
	if n > maxSince {
		return errors.New("too many changes came meanwhile")
	}
	return nil
}

// bucketEntries appends the records of a bucket in order of store key.
func (d *Dataset) bucketEntries(list []entry, bucket uint16) []entry {
	d.mu.RLock()
	for _, o := range d.store.AppendBucket(nil, bucket) {
		if r, ok := d.store.Replica(o); ok {
			list = append(list, entry{record: r})
		}
	}
	d.mu.RUnlock()
	for i := range list {
		list[i].storeKey = AppendStoreKey(nil, list[i].record.Key)
	}
	slices.SortFunc(list, func(a, b entry) int { return slices.Compare(a.storeKey, b.storeKey) })
	return list
}

// openFile opens a file that the page walker has passed.
func openFile(path string, kind Kind, generation uint64) (*file, error) {
	f := &file{path: path, generation: generation, written: clock.Wall()}
	err := guarded(func() (err error) {
		f.db, err = bolt.Open(path, 0o600, &bolt.Options{
			Timeout: 100 * time.Millisecond, FreelistType: bolt.FreelistMapType, InitialMmapSize: initialMmap(kind),
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", path, err)
	}
	return f, nil
}

// initialMmap returns how much address space to reserve for a file, beyond any expected size: growing a
// mapping would wait for readers. It is not memory.
func initialMmap(k Kind) int {
	if k == Users {
		return min(64<<30, math.MaxInt/4)
	}
	return min(1<<30, math.MaxInt/4)
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("syncing the data directory: %w", err)
	}
	defer dir.Close()
	if err := dir.Sync(); err != nil {
		return fmt.Errorf("syncing %s: %w", path, err)
	}
	return nil
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }
