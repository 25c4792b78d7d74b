package usercache

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/usercache/internal/store"
	"google.golang.org/protobuf/proto"
)

// A Dataset is one of the sets of records a resolver holds. It has two layers. The replica is byte for byte
// what the service sent, good or bad, and is what digests are computed over. The serving view, which lookups
// read, is the replica except for the overlay: records of which an older version is served.
//
// A sync client begins with BeginTransfer, compares Tree and Leaves with the service's, hands over the buckets
// that differ by ApplyBucket and ends with FinishTransfer; from the revision given there on it hands over
// deltas by ApplyDelta. It does the same when a root differs, and after a start that finds Status().Transferring
// set: the transfer had not ended. A dataset that is not Complete but has records is one of which a part was
// lost, or is still to come.
//
// Reading never waits for disk. Changes are made one call at a time.
type Dataset struct {
	kind  Kind
	cache *Cache

	// seq is odd while a batch is being applied, so that a reader who found nothing knows whether to look
	// again.
	seq atomic.Uint64
	// whole: see complete.
	whole atomic.Bool
	store *store.Store
	users *userIndex // nil but for Users

	// Lock order: Dataset.mu, then userIndex.crowdsMu. mu is held for memory work only.
	mu             sync.RWMutex
	tree           *Tree
	sums           [Nodes]BucketSum // per node, as kept on disk
	identity       Identity
	revision       uint64
	oldest         uint64            // smallest as_of of the transfer in progress; 0 = none; noBucketYet = begun
	replacing      bool              // the transfer in progress replaces newer records too
	asOf           map[uint16]uint64 // of buckets fetched and not yet overtaken by revision
	newestAsOf     uint64
	totals         Totals
	size           uint64 // keys and bytes of all records
	needsCatalogue uint64
	freshAt        int64
	guard          guard
	overlay        map[string]*overlayEntry
	suspect        bool
	decoded        map[string]*catalogueRecord // serving records of the small datasets
	listPeaks      map[string]listPeak
	changed        bool    // decoded has changed since the last snapshot
	stale          []stale // claims to take out at the end of the batch
	notify         []chan<- struct{}
	newBlobs       []NewBlob

	disk disk

	// While loading.
	unusable []unusable      // bad records
	salvaged []overlayRecord // of a file being repaired

	// Scratch of the writer.
	newFacts, oldFacts, servingFacts userFacts
	ordinals                         []uint32
	changes                          uint64 // since the last checkpoint
}

// noBucketYet is Dataset.oldest of a transfer of which no bucket has come.
const noBucketYet = math.MaxUint64

// flagUnusable marks a serving record that this version cannot use.
const flagUnusable = 1

type stale struct {
	ordinal uint32
	claims  []claim
}

type listPeak struct {
	rules uint32
	at    int64
}

// Errors that a caller branches on.
var (
	// ErrOtherDataset: the data is of another dataset or lineage than the one held.
	ErrOtherDataset = errors.New("another dataset or lineage")
	// ErrIncomplete: a delta came for a dataset that has never been received in whole.
	ErrIncomplete = errors.New("the dataset is not complete: a transfer must end first")
	// ErrNoTransfer: a bucket came outside BeginTransfer and FinishTransfer.
	ErrNoTransfer = errors.New("no transfer in progress")
	// ErrClosed: the cache is closed.
	ErrClosed = errors.New("user cache is closed")
)

// A GapError says that a delta begins after the revision held: something in between is missing.
type GapError struct {
	Have, From uint64
}

// Error describes the gap.
func (e *GapError) Error() string {
	return fmt.Sprintf("a delta from revision %d, but only %d is held: watch again from there", e.From, e.Have)
}

// A Result says what became of a delta or bucket.
type Result struct {
	Applied int // records written or removed in the replica
	Skipped int // older than what is held
	Bad     int // stored, but this version cannot use them
	Held    int // removals the shrink guard holds back in the serving view
	// RootChecked: the sender's root could be compared; RootDiffers: and it is not ours. The dataset is then
	// suspect until a transfer ends.
	RootChecked, RootDiffers bool
}

// Kind returns the dataset's kind.
func (d *Dataset) Kind() Kind { return d.kind }

// ApplyDelta applies the changes of revisions (From, To] and answers by them at once; disk follows. A delta
// that overlaps what is held is fine, one that leaves a gap is a *GapError. It waits only when the disk is
// far behind but working.
//
// A root that differs undoes nothing: users keep their newest settings, and the dataset is suspect.
func (d *Dataset) ApplyDelta(ctx context.Context, id Identity, delta Delta, now time.Time) (Result, error) {
	d.mu.Lock()
	res, err := d.applyDelta(id, delta, now)
	d.mu.Unlock()
	if err != nil {
		return res, fmt.Errorf("%s: delta (%d, %d]: %w", d.kind, delta.From, delta.To, err)
	}
	return res, d.disk.wait(ctx, d)
}

func (d *Dataset) applyDelta(id Identity, delta Delta, now time.Time) (res Result, err error) {
	if err := d.mayChange(id); err != nil {
		return res, err
	}
	if !d.complete() {
		return res, ErrIncomplete
	}
	if delta.From > d.revision {
		return res, &GapError{Have: d.revision, From: delta.From}
	}
	if delta.To < delta.From {
		return res, errors.New("it ends before it begins")
	}
	for i := range delta.Changes {
		if c := &delta.Changes[i]; c.Revision > delta.To {
			return res, fmt.Errorf("record %q has revision %d", clip(c.Key), c.Revision)
		}
		if err := checkEnvelope(delta.Changes[i].Key, delta.Changes[i].Bytes); err != nil {
			return res, err
		}
	}
	d.begin()
	for i := range delta.Changes {
		c := &delta.Changes[i]
		if c.Revision <= d.revision || len(d.asOf) > 0 && c.Revision <= d.asOf[BucketOf(c.Key)] {
			res.Skipped++
			continue
		}
		if err = d.apply(c, nil, now, &res); err != nil {
			break
		}
		d.noteBlobs(c)
	}
	if err == nil && delta.To > d.revision {
		d.revision = delta.To
		d.forgetAsOf()
	}
	d.needsCatalogue = max(d.needsCatalogue, delta.NeedsCatalogue)
	d.end(now)
	if err == nil && delta.Root != nil && d.settledAt(delta.To) {
		res.RootChecked = true
		if *delta.Root != d.tree.Root() {
			res.RootDiffers = true
			d.suspect = true
		}
	}
	return res, err
}

// settledAt reports whether the replica is exactly the dataset at revision.
func (d *Dataset) settledAt(revision uint64) bool {
	return d.revision == revision && d.oldest == 0 && d.newestAsOf <= revision
}

// forgetAsOf drops the as_of of buckets once the revision has overtaken them all.
func (d *Dataset) forgetAsOf() {
	if d.oldest == 0 && len(d.asOf) > 0 && d.revision >= d.newestAsOf {
		d.asOf = make(map[uint16]uint64)
		d.newestAsOf = 0
		d.disk.group(d).forgetAsOf = true
	}
}

func (d *Dataset) mayChange(id Identity) error {
	if d.disk.closed {
		return ErrClosed
	}
	if id != d.identity || id.IsZero() {
		return fmt.Errorf("%w: %v is held, not %v", ErrOtherDataset, d.identity, id)
	}
	return nil
}

func checkEnvelope(key, b []byte) error {
	if len(key) == 0 || len(key) > MaxKey {
		return fmt.Errorf("a record's key has %d bytes, not 1-%d", len(key), MaxKey)
	}
	if len(b) > MaxRecord {
		return fmt.Errorf("record %q has %d bytes, more than %d", clip(key), len(b), MaxRecord)
	}
	return nil
}

// BeginTransfer begins, or after a restart resumes, fetching buckets: what has come before is kept, and is
// found equal when digests are compared again. Into an empty dataset any
// identity may be transferred; into another one only its own: see AcceptLineage and AcceptDataset.
//
// With replace, records held with a revision newer than a bucket's as_of are replaced too. That is for a
// dataset that has diverged: held revisions mean nothing to the service.
func (d *Dataset) BeginTransfer(id Identity, replace bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.disk.closed {
		return ErrClosed
	}
	if id.IsZero() {
		return fmt.Errorf("%s: %w: the service names no dataset", d.kind, ErrOtherDataset)
	}
	if d.identity.IsZero() {
		d.identity = id
	} else if id != d.identity && !d.complete() && d.store.Count() == 0 {
		d.replaceDataset(id) // nothing has come of the other one
	}
	if err := d.mayChange(id); err != nil {
		return fmt.Errorf("%s: %w", d.kind, err)
	}
	// The comparison of digests that follows says anew which buckets are good, and as of when.
	d.oldest = noBucketYet
	clear(d.asOf)
	d.newestAsOf = 0
	g := d.disk.group(d)
	g.forgetAsOf, g.asOf = true, nil
	d.replacing = d.replacing || replace
	d.whole.Store(d.complete())
	return nil
}

// ApplyBucket applies one bucket, or a part of one, of the transfer in progress. Lookups answer by it at
// once. The snapshot of a small dataset follows when the transfer ends, or ten seconds later if it does not: a
// catalogue comes in as many buckets as it has records, and is not made anew for each.
func (d *Dataset) ApplyBucket(ctx context.Context, id Identity, b BucketData, now time.Time) (Result, error) {
	d.mu.Lock()
	res, err := d.applyBucket(id, b, now)
	d.mu.Unlock()
	if err != nil {
		return res, fmt.Errorf("%s: bucket %d: %w", d.kind, b.Bucket, err)
	}
	return res, d.disk.wait(ctx, d)
}

func (d *Dataset) applyBucket(id Identity, b BucketData, now time.Time) (res Result, err error) {
	if err := d.mayChange(id); err != nil {
		return res, err
	}
	if d.oldest == 0 {
		return res, ErrNoTransfer
	}
	listed := make(map[string]bool, len(b.Records))
	for i := range b.Records {
		r := &b.Records[i]
		if err := checkEnvelope(r.Key, r.Bytes); err != nil {
			return res, err
		}
		if BucketOf(r.Key) != b.Bucket {
			return res, fmt.Errorf("record %q is of bucket %d", clip(r.Key), BucketOf(r.Key))
		}
		if r.Revision > b.AsOf {
			return res, fmt.Errorf("record %q has revision %d, the bucket only %d", clip(r.Key), r.Revision, b.AsOf)
		}
		listed[string(r.Key)] = true
	}
	for _, key := range b.Missing {
		if err := checkEnvelope(key, nil); err != nil {
			return res, err
		}
		if BucketOf(key) != b.Bucket || listed[string(key)] {
			return res, fmt.Errorf("record %q is missing and is not, or of another bucket", clip(key))
		}
	}
	d.begin()
	defer func() { d.endBatch(now) }()
	for i := range b.Records {
		r := &b.Records[i]
		c := Change{Key: r.Key, Revision: r.Revision, Bytes: r.Bytes}
		if err := d.apply(&c, &b.AsOf, now, &res); err != nil {
			return res, err
		}
		d.noteBlobs(&c)
	}
	gone := b.Missing
	if b.Whole {
		d.ordinals = d.store.AppendBucket(d.ordinals[:0], b.Bucket)
		for _, o := range d.ordinals {
			if r, ok := d.store.Replica(o); ok {
				if !listed[string(r.Key)] && (d.replacing || r.Revision <= b.AsOf) {
					gone = append(gone, slices.Clone(r.Key))
				}
				r.Release()
			}
		}
	}
	for _, key := range gone {
		c := Change{Key: key, Revision: b.AsOf, Removed: true}
		if err := d.apply(&c, &b.AsOf, now, &res); err != nil {
			return res, err
		}
	}
	d.oldest = min(d.oldest, max(b.AsOf, 1)) // 0 means no transfer
	if b.Whole {
		// Of a part, the other records are still as they were: deltas older than its as_of concern them.
		d.asOf[b.Bucket] = b.AsOf
		d.newestAsOf = max(d.newestAsOf, b.AsOf)
		g := d.disk.group(d)
		g.asOf = append(g.asOf, bucketAsOf{b.Bucket, b.AsOf})
		g.cost += 16
	}
	return res, nil
}

// FinishTransfer ends a transfer of which all buckets have come. The replica is then at revision: the
// smallest as_of of the buckets fetched and of the digests by which the others were found equal. Deltas
// from there on complete it.
func (d *Dataset) FinishTransfer(id Identity, revision uint64, now time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.mayChange(id); err != nil {
		return fmt.Errorf("%s: %w", d.kind, err)
	}
	if d.oldest == 0 {
		return fmt.Errorf("%s: %w", d.kind, ErrNoTransfer)
	}
	if d.oldest != noBucketYet && revision > d.oldest && d.newestAsOf > 0 {
		return fmt.Errorf("%s: a transfer with a bucket as of revision %d cannot end at %d", d.kind, d.oldest, revision)
	}
	if d.replacing {
		d.revision = revision
	} else {
		d.revision = max(d.revision, revision)
	}
	d.oldest, d.replacing, d.suspect = 0, false, false
	d.forgetAsOf()
	if d.guard.acceptedThrough == everything {
		d.guard.acceptedThrough = 0
		d.guard.accept(revision, d.totals, now)
	}
	d.guard.observe(d.totals, now)
	d.whole.Store(d.complete())
	d.show()
	d.disk.group(d)
	d.disk.close(d)
	d.wake()
	return nil
}

// An Agreement is what a comparison of leaves with another lineage found.
type Agreement struct {
	Equal, Differing uint64 // records
}

// AcceptLineage takes over another lineage of the same dataset, if at least 90 % of the records agree. A
// transfer must follow.
func (d *Dataset) AcceptLineage(id Identity, a Agreement) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.disk.closed {
		return ErrClosed
	}
	if id.Dataset != d.identity.Dataset {
		return fmt.Errorf("%s: %w: an operator must accept %v in place of %v", d.kind, ErrOtherDataset, id, d.identity)
	}
	if all := a.Equal + a.Differing; d.store.Count() > 0 && (all == 0 || float64(a.Equal) < 0.9*float64(all)) {
		return fmt.Errorf("%s: %w: only %d of %d records of lineage %x agree with those held; an operator must accept it",
			d.kind, ErrOtherDataset, a.Equal, all, id.Lineage[:])
	}
	d.adopt(id)
	return nil
}

// AcceptDataset takes over whatever dataset the service has, on an operator's word. A transfer must follow.
func (d *Dataset) AcceptDataset(id Identity) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.disk.closed {
		return ErrClosed
	}
	if id.IsZero() {
		return fmt.Errorf("%s: %w: none is named", d.kind, ErrOtherDataset)
	}
	d.replaceDataset(id)
	return nil
}

// replaceDataset makes way for another dataset. What is held goes on being served until buckets of the new
// one take its place, but who is not found is not a stranger any more.
func (d *Dataset) replaceDataset(id Identity) {
	d.adopt(id)
	d.revision = 0
	d.guard.acceptedThrough = everything
	d.whole.Store(false)
}

// everything is guard.acceptedThrough while a whole dataset is being replaced on an operator's word.
const everything = math.MaxUint64

func (d *Dataset) adopt(id Identity) {
	d.identity = id
	d.oldest, d.replacing = noBucketYet, true
	clear(d.asOf)
	d.newestAsOf = 0
	d.guard.acceptedThrough = 0 // that was a revision of another history
	d.disk.group(d).forgetAsOf = true
}

// AcceptShrink lets the removals go through that the shrink guard holds, and makes what is left the new
// measure. It returns how many records left the serving view.
func (d *Dataset) AcceptShrink(now time.Time) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.begin()
	n := d.release(d.revision, now)
	d.end(now)
	return n
}

// release ends the overlay entries of held removals up to a revision.
func (d *Dataset) release(through uint64, now time.Time) int {
	n := 0
	for key, e := range d.overlay {
		if e.reason == HeldRemoval && e.heldRevision <= through {
			d.endOverlay(key, e)
			n++
		}
	}
	d.guard.accept(through, d.totals, now)
	clear(d.listPeaks)
	d.disk.group(d)
	return n
}

// begin starts a batch.
func (d *Dataset) begin() { d.seq.Add(1) }

// end ends a batch: others see it, and hear of it.
func (d *Dataset) end(now time.Time) {
	d.show()
	d.endBatch(now)
}

// show makes a new snapshot of a small dataset, if it has changed since the last.
func (d *Dataset) show() {
	if d.changed {
		d.cache.publish(d)
	}
}

// endBatch ends a batch but for the snapshot: what lookups no longer need goes.
func (d *Dataset) endBatch(now time.Time) {
	for _, s := range d.stale {
		d.users.leave(s.ordinal, s.claims)
	}
	clear(d.stale)
	d.stale = d.stale[:0]
	d.store.Compact()
	d.guard.observe(d.totals, now)
	d.seq.Add(1)
	d.disk.closeIfFull(d)
	d.wake()
}

func (d *Dataset) wake() {
	for _, ch := range d.notify {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// Notify arranges that after each change something is sent to ch, unless it is full: a channel of size one
// makes a reader look again at least once after the last change.
func (d *Dataset) Notify(ch chan<- struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.notify = append(d.notify, ch)
}

// apply makes one change, if it is newer than what is held. In a transfer asOf is when the sender looked: what
// is held and not newer than that must give way, whatever its revision.
func (d *Dataset) apply(c *Change, asOf *uint64, now time.Time, res *Result) error {
	k := hashKey(c.Key)
	ordinal, known := d.store.FindAt(k.shard(), k.tag(), c.Key)
	var old store.Record
	held := false
	if known {
		old, held = d.store.Replica(ordinal)
		defer old.Release()
	}
	if held {
		keep := old.Revision >= c.Revision
		if asOf != nil {
			same := !c.Removed && old.Revision == c.Revision && string(old.Bytes) == string(c.Bytes)
			keep = same || old.Revision > *asOf && !d.replacing
		}
		if keep {
			res.Skipped++
			return nil
		}
	}
	if c.Removed {
		if held {
			d.remove(k, ordinal, &old, c, now, res)
			res.Applied++
		}
		return nil
	}
	if err := d.put(k, ordinal, known, &old, held, c, now, res); err != nil {
		return err
	}
	res.Applied++
	return nil
}

// A hashedKey is a store key, from which all that depends on the hash of the key is read.
type hashedKey []byte

func hashKey(key []byte) hashedKey {
	return AppendStoreKey(make([]byte, 0, StorePrefix+len(key)), key)
}

func (k hashedKey) shard() uint8   { return k[0] }
func (k hashedKey) tag() uint32    { return binary.BigEndian.Uint32(k[1:]) }
func (k hashedKey) bucket() uint16 { return binary.BigEndian.Uint16(k) }

// put writes a record.
func (d *Dataset) put(k hashedKey, ordinal uint32, known bool, old *store.Record, held bool, c *Change, now time.Time, res *Result) error {
	bucket := k.bucket()
	message, bad := d.read(c.Key, c.Bytes, &d.newFacts)

	totals := d.totals
	if held {
		// The old version cannot be judged anew as an error here: only its facts matter.
		d.read(old.Key, old.Bytes, &d.oldFacts)
		d.count(&totals, old.Key, old.Bytes, &d.oldFacts, false)
	}
	d.count(&totals, c.Key, c.Bytes, &d.newFacts, true)

	var serving store.Record
	served := false
	if known {
		serving, served = d.store.Serving(ordinal)
		defer serving.Release()
	}
	good := served && serving.Flags&flagUnusable == 0

	// Which version is served from now on, and why.
	reason, detail := OverlayReason(0), ""
	switch {
	case bad != nil && good:
		reason, detail = BadRecord, bad.Error()
	case bad != nil:
		reason, detail = NeverUsable, bad.Error()
	case good && held && d.guarded(c.Revision):
		if l := d.guard.loss(totals); l&lostEnabled != 0 && d.oldFacts.enabled && !d.newFacts.enabled ||
			l&lostDevices != 0 && d.oldFacts.devices > d.newFacts.devices {
			reason, detail = HeldRemoval, d.guard.describe(totals)
		} else if why := d.shrunkList(c.Key, message, now); why != "" {
			reason, detail = HeldRemoval, why
		}
	}

	flags := uint8(0)
	if reason == NeverUsable {
		flags = flagUnusable
	}
	draft, err := d.store.WriteAt(k.shard(), k.tag(), c.Key, c.Bytes, c.Revision, flags)
	if err != nil {
		return fmt.Errorf("record %q: %w", clip(c.Key), err)
	}
	defer draft.Record.Release()
	to := store.Both
	if reason == BadRecord || reason == HeldRemoval {
		to = store.ReplicaOnly
	}
	if d.users != nil && to == store.Both {
		// First enter what is new, then show the record, and only then take out what is old: whoever looks
		// in between finds the device.
		d.servingFacts.claims = d.servingFacts.claims[:0]
		if served {
			d.read(serving.Key, serving.Bytes, &d.servingFacts)
		}
		all := d.newFacts.claims
		var more, fewer []claim
		if d.users.crowded.Load() > 0 {
			all = slices.Clone(all)
		}
		more, fewer = split(d.newFacts.claims, d.servingFacts.claims)
		if err := d.users.enter(draft.Ordinal, more); err != nil {
			return fmt.Errorf("record %q: %w", clip(c.Key), err)
		}
		if err := d.store.Publish(draft, to); err != nil {
			d.users.leave(draft.Ordinal, more)
			return fmt.Errorf("record %q: %w", clip(c.Key), err)
		}
		d.users.rejoin(draft.Ordinal, all)
		if len(fewer) > 0 {
			d.stale = append(d.stale, stale{draft.Ordinal, slices.Clone(fewer)})
		}
	} else if err := d.store.Publish(draft, to); err != nil {
		return fmt.Errorf("record %q: %w", clip(c.Key), err)
	}

	if held {
		l := LeafOf(old.Key, old.Revision, old.Bytes)
		d.tree.Remove(bucket, l)
		d.sums[bucket>>8] = d.sums[bucket>>8].Remove(l)
	}
	l := LeafOf(c.Key, c.Revision, c.Bytes)
	d.tree.Add(bucket, l)
	d.sums[bucket>>8] = d.sums[bucket>>8].Add(l)
	d.totals = totals
	d.size += uint64(len(c.Key) + len(c.Bytes))
	if held {
		d.size -= uint64(old.Size())
	}
	d.changes++
	d.disk.group(d).put(k, draft.Record, l)

	switch reason {
	case 0:
		d.dropOverlay(string(c.Key))
		d.setDecoded(c.Key, c.Revision, message)
	default:
		if bad != nil {
			res.Bad++
		} else {
			res.Held++
		}
		d.setOverlay(string(c.Key), reason, c.Revision, detail, now)
		if reason == NeverUsable {
			d.setDecoded(c.Key, c.Revision, nil)
		}
	}
	if m, ok := message.(*userv1.ShrinkAccepted); ok && string(c.Key) == guardKey {
		d.release(m.ThroughRevision, now)
	}
	return nil
}

// guardKey is the key of the record by which an accepted shrink reaches every resolver.
const guardKey = "guard/accepted"

// remove takes a record out of the replica, and out of the serving view unless the guard holds it there.
func (d *Dataset) remove(k hashedKey, ordinal uint32, old *store.Record, c *Change, now time.Time, res *Result) {
	totals := d.totals
	d.read(old.Key, old.Bytes, &d.oldFacts)
	d.count(&totals, old.Key, old.Bytes, &d.oldFacts, false)

	bucket := k.bucket()
	l := LeafOf(old.Key, old.Revision, old.Bytes)
	d.tree.Remove(bucket, l)
	d.sums[bucket>>8] = d.sums[bucket>>8].Remove(l)
	d.totals = totals
	d.size -= uint64(old.Size())
	d.changes++
	d.disk.group(d).remove(k)

	serving, served := d.store.Serving(ordinal)
	good := served && serving.Flags&flagUnusable == 0
	serving.Release()
	if good && d.guarded(c.Revision) && d.guard.loss(totals) != 0 {
		d.store.Remove(ordinal, store.ReplicaOnly)
		d.setOverlay(string(c.Key), HeldRemoval, c.Revision, d.guard.describe(totals), now)
		res.Held++
		return
	}
	d.unserve(ordinal, served)
	d.store.Remove(ordinal, store.Both)
	d.dropOverlay(string(c.Key))
	d.setDecoded(c.Key, 0, nil)
}

// unserve arranges that the claims of the serving record go at the end of the batch.
func (d *Dataset) unserve(ordinal uint32, served bool) {
	if d.users == nil || !served {
		return
	}
	r, ok := d.store.Serving(ordinal)
	if !ok {
		return
	}
	d.read(r.Key, r.Bytes, &d.servingFacts)
	r.Release()
	if len(d.servingFacts.claims) > 0 {
		d.stale = append(d.stale, stale{ordinal, slices.Clone(d.servingFacts.claims)})
	}
}

// guarded reports whether the shrink guard judges removals of a revision.
func (d *Dataset) guarded(revision uint64) bool {
	return revision > d.guard.acceptedThrough
}

// shrunkList says what is wrong with a catalogue list that has lost too many rules, or nothing.
func (d *Dataset) shrunkList(key []byte, message proto.Message, now time.Time) string {
	m, ok := message.(*userv1.List)
	if !ok || d.guard.opts.Share >= 1 {
		return ""
	}
	id := string(key)
	peak := d.listPeaks[id]
	if old, ok := d.decoded[id]; ok && peak.rules == 0 {
		if l, ok := old.message.(*userv1.List); ok {
			peak = listPeak{l.Rules, now.Unix()}
		}
	}
	if now.Unix()-peak.at > int64(d.guard.opts.Window/time.Second) {
		peak = listPeak{}
	}
	lost := uint64(peak.rules) - min(uint64(m.Rules), uint64(peak.rules))
	if lost > d.guard.opts.Min && float64(lost) > d.guard.opts.Share*float64(peak.rules) {
		d.listPeaks[id] = peak
		return fmt.Sprintf("%d rules, were %d", m.Rules, peak.rules)
	}
	if m.Rules >= peak.rules {
		peak = listPeak{m.Rules, now.Unix()}
	}
	d.listPeaks[id] = peak
	return ""
}

// read decodes and checks a record. It fills facts in the users dataset and returns the message in others.
func (d *Dataset) read(key, b []byte, facts *userFacts) (proto.Message, error) {
	facts.claims, facts.devices, facts.enabled = facts.claims[:0], 0, false
	if string(key) == guardKey {
		m := new(userv1.ShrinkAccepted)
		if err := proto.Unmarshal(b, m); err != nil {
			return nil, errBroken
		}
		return m, nil
	}
	switch d.kind {
	case Users:
		if slices.Contains(key, '/') {
			return nil, nil // a kind of record this version does not know
		}
		err := d.users.readUser(b, facts)
		if id, ok := ParseID(key); !ok || string(id.Bytes()) != string(key) {
			return nil, fmt.Errorf("user id %q is not 1-%d of a-z 0-9 -", clip(key), MaxID)
		}
		return nil, err
	case CatalogueKind:
		return decodeCatalogue(key, b)
	case Config:
		return decodeConfig(key, b)
	default:
		return decodeSecrets(key, b)
	}
}

// count adds a record to totals, or takes it out.
func (d *Dataset) count(t *Totals, key, b []byte, f *userFacts, add bool) {
	user := d.kind != Users || !slices.Contains(key, '/')
	one := func(n *uint64, by uint64) {
		if add {
			*n += by
		} else {
			*n -= by
		}
	}
	one(&t.RecordBytes, uint64(len(b)))
	if user {
		one(&t.Users, 1)
	}
	if d.kind == Users {
		one(&t.Devices, uint64(f.devices))
		if f.enabled {
			one(&t.EnabledUsers, 1)
		}
	}
}

// setDecoded keeps the message of a serving record of the small datasets; nil forgets it.
func (d *Dataset) setDecoded(key []byte, revision uint64, m proto.Message) {
	if d.kind == Users {
		return
	}
	d.changed = true
	if m == nil {
		delete(d.decoded, string(key))
		return
	}
	d.decoded[string(key)] = &catalogueRecord{key: string(key), revision: revision, message: m}
}

// An OverlayReason is why the serving view differs from the replica in a record.
type OverlayReason uint8

// The reasons.
const (
	// BadRecord: the newest version cannot be used; the last good one is served.
	BadRecord OverlayReason = 1 + iota
	// HeldRemoval: the shrink guard holds the removal, or a change that loses what the guard misses.
	HeldRemoval
	// NeverUsable: no version could ever be used; the user is known and served by the cold policy.
	NeverUsable
)

// String returns the reason in words.
func (r OverlayReason) String() string {
	return [...]string{"none", "bad record", "held removal", "never usable"}[r]
}

// An OverlayEntry is a record that the serving view holds against the replica.
type OverlayEntry struct {
	Key    string
	Reason OverlayReason
	// ServedRevision is that of the version served; 0 when none is.
	ServedRevision uint64
	// HeldRevision is that of the change held off.
	HeldRevision uint64
	Since        time.Time
	Until        time.Time // zero: for ever
	Detail       string
}

type overlayEntry struct {
	reason       OverlayReason
	heldRevision uint64
	since, until int64
	detail       string
}

// Overlay returns all overlay entries in order of key.
func (d *Dataset) Overlay() []OverlayEntry {
	d.mu.RLock()
	defer d.mu.RUnlock()
	var list []OverlayEntry
	for key, e := range d.overlay {
		o := OverlayEntry{Key: key, Reason: e.reason, HeldRevision: e.heldRevision, Since: time.Unix(e.since, 0), Detail: e.detail}
		if e.until != 0 {
			o.Until = time.Unix(e.until, 0)
		}
		if e.reason != NeverUsable {
			if ordinal, ok := d.store.FindServing([]byte(key)); ok {
				r, _ := d.store.Serving(ordinal)
				o.ServedRevision = r.Revision
				r.Release()
			}
		}
		list = append(list, o)
	}
	slices.SortFunc(list, func(a, b OverlayEntry) int { return strings.Compare(a.Key, b.Key) })
	return list
}

func (d *Dataset) setOverlay(key string, reason OverlayReason, held uint64, detail string, now time.Time) {
	e := &overlayEntry{reason: reason, heldRevision: held, since: now.Unix(), detail: detail}
	if before := d.overlay[key]; before != nil && before.reason == reason {
		e.since = before.since
	}
	if reason == HeldRemoval {
		e.until = e.since + int64(d.cache.opts.OverlayExpiry/time.Second)
	}
	d.overlay[key] = e
	d.disk.group(d).setOverlay(d, key, e)
}

func (d *Dataset) dropOverlay(key string) {
	if d.overlay[key] != nil {
		delete(d.overlay, key)
		d.disk.group(d).dropOverlay(key)
	}
}

// endOverlay makes the replica's version, or its absence, the serving one.
func (d *Dataset) endOverlay(key string, e *overlayEntry) {
	defer d.dropOverlay(key)
	ordinal, ok := d.store.Find([]byte(key))
	if !ok || e.reason == NeverUsable {
		return
	}
	replica, held := d.store.Replica(ordinal)
	defer replica.Release()
	d.unserve(ordinal, true)
	if !held {
		d.store.Settle(ordinal)
		d.setDecoded([]byte(key), 0, nil)
		return
	}
	message, bad := d.read(replica.Key, replica.Bytes, &d.newFacts)
	if bad != nil {
		return // there is nothing better than what is served
	}
	if d.users != nil {
		// Entering all and leaving the old ones at the end of the batch counts each claim twice in between,
		// which harms nobody.
		if err := d.users.enter(ordinal, d.newFacts.claims); err != nil {
			return // no memory: the next change of the record settles it
		}
	}
	d.store.Settle(ordinal)
	if d.users != nil {
		d.users.rejoin(ordinal, d.newFacts.claims)
	}
	d.setDecoded([]byte(key), replica.Revision, message)
}

// expire ends overlay entries whose time has come, and shows what a transfer that has not ended has brought.
func (d *Dataset) expire(now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.changed {
		d.show()
		d.wake()
	}
	due := false
	for _, e := range d.overlay {
		due = due || e.until != 0 && e.until <= now.Unix()
	}
	if !due || d.disk.closed {
		return
	}
	d.begin()
	for key, e := range d.overlay {
		if e.until != 0 && e.until <= now.Unix() {
			d.endOverlay(key, e)
		}
	}
	d.end(now)
}

// Leaves returns the digests of all records of a bucket, in order of store key.
func (d *Dataset) Leaves(bucket uint16) []KeyLeaf {
	d.mu.RLock()
	defer d.mu.RUnlock()
	var list []KeyLeaf
	for _, o := range d.store.AppendBucket(nil, bucket) {
		if r, ok := d.store.Replica(o); ok {
			list = append(list, KeyLeaf{Key: slices.Clone(r.Key), Revision: r.Revision, Leaf: LeafOf(r.Key, r.Revision, r.Bytes)})
			r.Release()
		}
	}
	slices.SortFunc(list, func(a, b KeyLeaf) int {
		return strings.Compare(string(AppendStoreKey(nil, a.Key)), string(AppendStoreKey(nil, b.Key)))
	})
	return list
}

// Bucket returns the records of a bucket, in order of store key, and the revision at which they hold.
func (d *Dataset) Bucket(bucket uint16) BucketData {
	d.mu.RLock()
	defer d.mu.RUnlock()
	b := BucketData{Bucket: bucket, AsOf: max(d.revision, d.asOf[bucket]), Whole: true}
	for _, o := range d.store.AppendBucket(nil, bucket) {
		if r, ok := d.store.Replica(o); ok {
			b.Records = append(b.Records, Record{Key: slices.Clone(r.Key), Revision: r.Revision, Bytes: slices.Clone(r.Bytes)})
			r.Release()
		}
	}
	slices.SortFunc(b.Records, func(x, y Record) int {
		return strings.Compare(string(AppendStoreKey(nil, x.Key)), string(AppendStoreKey(nil, y.Key)))
	})
	return b
}

// Get returns the replica's version of a record.
func (d *Dataset) Get(key []byte) (Record, bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	ordinal, ok := d.store.Find(key)
	if !ok {
		return Record{}, false
	}
	r, ok := d.store.Replica(ordinal)
	defer r.Release()
	return Record{Key: slices.Clone(r.Key), Revision: r.Revision, Bytes: slices.Clone(r.Bytes)}, ok
}

// Root returns the root of the replica's digest tree.
func (d *Dataset) Root() Hash {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.tree.Root()
}

// Tree returns a copy of the replica's digest tree, to compare with the service's.
func (d *Dataset) Tree() *Tree {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.tree.Clone()
}

// MarkFresh remembers that the dataset was at the service's head.
func (d *Dataset) MarkFresh(now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.freshAt = now.Unix() // goes to disk with the next change
}

// MarkSuspect says that the service has another root at the same revision. Data goes on being served.
func (d *Dataset) MarkSuspect() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.suspect = true
}

// DatasetStatus is where a dataset stands.
type DatasetStatus struct {
	Kind     Kind
	Identity Identity
	Revision uint64
	// Complete: the dataset has been received in whole at least once. Otherwise it is cold.
	Complete bool
	// Suspect: the service's root differed at the same revision.
	Suspect bool
	// Transferring: between BeginTransfer and FinishTransfer; OldestAsOf is then the smallest as_of of the
	// buckets that have come, and 0 if none has.
	Transferring bool
	OldestAsOf   uint64

	Records        uint64
	Bytes          uint64 // of all keys and record bytes
	Totals         Totals
	NeedsCatalogue uint64
	FreshAt        time.Time // zero: never

	Overlay      int // entries, of which
	Bad          int // last good versions and users never usable
	Held         int // held by the guard
	GuardTripped bool
	GuardDetail  string

	// Unpersisted: the disk does not take changes; PersistedRevision is what a restart would find.
	Unpersisted       bool
	PersistedRevision uint64
	DiskError         string
	Generation        uint64 // of the file

	MemoryBytes int // records with dead space, and indexes
	IndexBytes  int // indexes alone
}

// Status returns where the dataset stands.
func (d *Dataset) Status() DatasetStatus {
	d.mu.RLock()
	defer d.mu.RUnlock()
	s := DatasetStatus{
		Kind: d.kind, Identity: d.identity, Revision: d.revision, Complete: d.complete(), Suspect: d.suspect,
		Transferring: d.oldest != 0, Records: d.tree.Records(), Bytes: d.size, Totals: d.totals,
		NeedsCatalogue: d.needsCatalogue, Overlay: len(d.overlay),
	}
	if d.oldest != noBucketYet {
		s.OldestAsOf = d.oldest
	}
	if d.freshAt != 0 {
		s.FreshAt = time.Unix(d.freshAt, 0)
	}
	for _, e := range d.overlay {
		if e.reason == HeldRemoval {
			s.Held++
		} else {
			s.Bad++
		}
	}
	s.GuardDetail = d.guard.describe(d.totals)
	s.GuardTripped = s.Held > 0 || s.GuardDetail != ""
	d.disk.status(&s)
	z := d.store.Sizes()
	s.MemoryBytes, s.IndexBytes = z.Chunks+z.Index, z.Index
	if d.users != nil {
		n := d.users.memory()
		s.MemoryBytes += n
		s.IndexBytes += n
	}
	return s
}

// complete reports whether the dataset has been received in whole: it has an identity, and is not in its
// first transfer.
func (d *Dataset) complete() bool {
	return !d.identity.IsZero() && (d.revision > 0 || d.oldest == 0)
}

// meta returns what heads the dataset on disk.
func (d *Dataset) meta() *storev1.Meta {
	root := d.tree.Root()
	m := &storev1.Meta{
		Format: formatVersion, Kind: string(d.kind), Revision: d.revision, Root: root[:],
		Records: d.tree.Records(), Totals: d.totals.message(), Guard: d.guard.message(d.guard.loss(d.totals) != 0),
		Oldest: d.oldest, NeedsCatalogue: d.needsCatalogue, FreshAt: d.freshAt, Size: d.size,
	}
	if !d.identity.IsZero() {
		m.DatasetId, m.Lineage = d.identity.Dataset[:], d.identity.Lineage[:]
	}
	return m
}

// appendValue appends what the file holds of a record: the first four bytes of its leaf, then a
// store.v1.Record.
func appendValue(dst []byte, r *store.Record, leaf Leaf) []byte {
	dst = append(dst, leaf[:valueCheck]...)
	if r.Revision != 0 {
		dst = append(dst, 1<<3|wireVarint)
		dst = binary.AppendUvarint(dst, r.Revision)
	}
	if len(r.Bytes) > 0 {
		dst = append(dst, 2<<3|wireBytes)
		dst = binary.AppendUvarint(dst, uint64(len(r.Bytes)))
		dst = append(dst, r.Bytes...)
	}
	return dst
}

// valueCheck is the length of the check in front of a value.
const valueCheck = 4

// parseValue is the inverse of appendValue. The check is the caller's.
func parseValue(v []byte) (check []byte, revision uint64, b []byte, ok bool) {
	if len(v) < valueCheck {
		return nil, 0, nil, false
	}
	check, v = v[:valueCheck], v[valueCheck:]
	for {
		f, rest, more := nextField(v)
		if !more {
			return check, revision, b, len(rest) == 0
		}
		v = rest
		switch {
		case f.num == 1 && f.wire == wireVarint:
			revision = f.n
		case f.num == 2 && f.isBytes():
			b = f.b
		}
	}
}

// sealCheck is the length of the check in front of a value that is not a record.
const sealCheck = 8

// seal appends what the file holds of a value of the buckets meta, overlay and as_of: a check, by which
// damage is told from what was written, and the value. Nothing else in the file speaks for these: a bit of
// an identity or a revision that has changed would make good data another dataset's, or of another time.
func seal(dst []byte, bucket, key, v []byte) []byte {
	check := sealOf(bucket, key, v)
	return append(append(dst, check[:]...), v...)
}

// unseal is the inverse of seal; ok is false if anything has changed.
func unseal(bucket, key, sealed []byte) (v []byte, ok bool) {
	if len(sealed) < sealCheck {
		return nil, false
	}
	v = sealed[sealCheck:]
	check := sealOf(bucket, key, v)
	return v, string(check[:]) == string(sealed[:sealCheck])
}

// sealOf is the first 8 bytes of SHA-256(0x04 || bucket || 0x00 || be32 len(key) || key || value).
func sealOf(bucket, key, v []byte) (check [sealCheck]byte) {
	h := sha256.New()
	h.Write([]byte{4})
	h.Write(bucket)
	h.Write(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(key))))
	h.Write(key)
	h.Write(v)
	copy(check[:], h.Sum(nil))
	return check
}
