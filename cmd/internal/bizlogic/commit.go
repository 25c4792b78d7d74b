package bizlogic

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache"
)

const (
	// maxGroup is how many operations share one fsync, and how many wait before callers block.
	maxGroup = 500

	// maxRecord is the longest record, in bytes.
	maxRecord = 256 << 10
)

// An op is one change on its way to disk: plan looks and says what to write, all or nothing.
type op struct {
	plan   func(*view) error
	accept bool // the shrink guard does not object
	done   chan struct{}

	revision uint64 // results, valid after done
	err      error
}

// change runs plan in the writer and waits until what it staged is on disk. It returns the revision of the
// commit; when nothing differed from what is stored, 0.
//
// If ctx ends first the change may or may not have been made; callers that must know read again.
func (s *Service) change(ctx context.Context, plan func(*view) error) (uint64, error) {
	return s.do(ctx, &op{plan: plan})
}

func (s *Service) do(ctx context.Context, o *op) (uint64, error) {
	o.done = make(chan struct{})
	select {
	case s.ops <- o:
	case <-ctx.Done():
		return 0, status.FromContextError(ctx.Err()).Err()
	case <-s.ctx.Done():
		return 0, errClosing
	}
	select {
	case <-o.done:
		return o.revision, o.err
	case <-ctx.Done():
		return 0, status.FromContextError(ctx.Err()).Err()
	case <-s.ctx.Done():
		select { // the writer may have finished it on its way out
		case <-o.done:
			return o.revision, o.err
		default:
			return 0, errClosing
		}
	}
}

// writeLoop is the only writer of the store. It commits in groups of whatever has arrived.
func (s *Service) writeLoop() {
	for {
		var group []*op
		select {
		case <-s.ctx.Done():
			return
		case o := <-s.ops:
			group = append(group, o)
		}
	more:
		for len(group) < maxGroup {
			select {
			case o := <-s.ops:
				group = append(group, o)
			default:
				break more
			}
		}
		s.commit(group)
	}
}

// commit runs a group of operations in one transaction, and tells the feed when it is on disk.
func (s *Service) commit(group []*op) {
	was := s.db.unsettled
	if err := s.db.mayWrite(); err != nil {
		s.log.Error("the store cannot be written; nothing was changed", "operations", len(group), "error", err)
		for _, o := range group {
			o.revision, o.err = 0, storing(err)
			close(o.done)
		}
		return
	}
	if was != nil {
		s.log.Info("the store can be written again")
	}
	var b *batch
	id := proto.CloneOf(s.db.id)
	err := s.db.Update(func(tx *bolt.Tx) error {
		b = newBatch(tx, id, clock.Wall(), s.opts.Guard, s.opts.Dir)
		b.own = s.opts.Own
		for _, o := range group {
			o.revision, o.err = b.run(o)
			if b.broken != nil {
				return b.broken
			}
		}
		return b.finish()
	})
	if err != nil {
		s.log.Error("commit failed; nothing was changed", "operations", len(group), "error", err)
		for _, o := range group {
			o.revision, o.err = 0, storing(err)
		}
	} else {
		s.db.id = id
		for kind, w := range b.work {
			s.datasets[kind].commit(w)
		}
		if len(b.work) > 0 {
			select {
			case s.flushing <- struct{}{}:
			default: // a flush is due already
			}
		}
	}
	for _, o := range group {
		close(o.done)
	}
}

// A batch is the writing side of one transaction.
type batch struct {
	tx     *bolt.Tx
	id     *storev1.Identity
	now    time.Time
	guard  Guard
	own    OwnLists
	dir    string // data folder, where blobs are
	work   map[string]*work
	broken error // the store failed half-way: the transaction must be given up
}

// A work is what a transaction does to one dataset.
type work struct {
	meta    *storev1.Meta
	sums    map[uint16]usercache.BucketSum
	changes []*syncv1.Change
}

func newBatch(tx *bolt.Tx, id *storev1.Identity, now time.Time, g Guard, dir string) *batch {
	return &batch{tx: tx, id: id, now: now, guard: g, dir: dir, work: map[string]*work{}}
}

// run plans and applies one operation. An error concerns that operation alone and leaves no trace of it.
func (b *batch) run(o *op) (uint64, error) {
	v := &view{b: b, tx: b.tx, now: b.now, accept: o.accept, staged: map[string]map[string][]byte{}, claimed: map[string]string{}}
	if err := o.plan(v); err != nil {
		return 0, storing(err)
	}
	if err := v.drop(); err != nil {
		return 0, storing(err)
	}
	totals, err := b.judge(v, o.accept)
	if err != nil {
		return 0, storing(err)
	}
	if v.empty() {
		return 0, nil
	}
	revision, err := b.apply(v, totals)
	if err != nil {
		b.broken = err
	}
	return revision, err
}

// judge computes the totals that the staged changes lead to and asks the guard about them. When the guard
// would object and an accepted shrink is going on, the acceptance travels with the changes.
func (b *batch) judge(v *view, accept bool) (map[string]*userv1.Totals, error) {
	out := map[string]*userv1.Totals{}
	for kind, staged := range v.staged {
		if len(staged) == 0 {
			continue
		}
		m, err := b.metaNow(kind)
		if err != nil {
			return nil, err
		}
		t := proto.CloneOf(m.Totals)
		removes := false
		for key, now := range staged {
			_, was, existed, err := getRecord(b.tx, kind, []byte(key))
			if err != nil {
				return nil, err
			}
			if existed {
				addTotals(t, kind, key, was, -1)
			}
			if now != nil {
				addTotals(t, kind, key, now, 1)
			} else {
				removes = true
			}
		}
		if why := b.guard.objects(m.Guard, m.Totals, t, b.now); why != "" {
			if !accept && !acceptedShrink(b.tx, kind).open(b.now) {
				return nil, refused("the shrink guard of %s holds: %s; if this is meant, accept it (`sluicectl sync accept --fleet --kind %s`) and repeat", kind, why, kind)
			}
			if removes {
				acc := acceptedShrink(b.tx, kind).ShrinkAccepted
				if accept || acc == nil {
					acc = &userv1.ShrinkAccepted{By: byImport, Accepted: b.now.Unix()}
				}
				acc.ThroughRevision, acc.Totals = b.id.Revision+1, t
				if staged[keyAccepted], err = encode(acc); err != nil {
					return nil, err
				}
			}
		}
		out[kind] = t
	}
	return out, nil
}

// apply writes what a view has staged under the next revision. An error means the store failed.
func (b *batch) apply(v *view, totals map[string]*userv1.Totals) (uint64, error) {
	revision := b.id.Revision
	changed := false
	for _, staged := range v.staged {
		changed = changed || len(staged) > 0
	}
	if changed {
		revision++
		b.id.Revision = revision
	}
	for _, kind := range kinds {
		staged := v.staged[kind]
		if len(staged) == 0 {
			continue
		}
		w, err := b.workOn(kind)
		if err != nil {
			return 0, err
		}
		keys := make([]string, 0, len(staged))
		for key := range staged {
			keys = append(keys, key)
		}
		slices.Sort(keys)
		for _, key := range keys {
			if err := b.put(w, kind, []byte(key), revision, staged[key]); err != nil {
				return 0, err
			}
		}
		accepted := staged[keyAccepted] != nil
		w.meta.Revision, w.meta.Totals = revision, totals[kind]
		w.meta.Guard = b.guard.observe(w.meta.Guard, totals[kind], b.now, accepted)
		if accepted {
			w.meta.Guard.AcceptedThrough = revision
		}
	}
	svc := b.tx.Bucket(bucketService)
	for _, p := range v.aux {
		var err error
		if p.value == nil {
			err = svc.Bucket(p.bucket).Delete(p.key)
		} else {
			err = svc.Bucket(p.bucket).Put(p.key, p.value)
		}
		if err != nil {
			return 0, err
		}
	}
	if !changed {
		return 0, nil
	}
	return revision, nil
}

// put writes or removes (bytes nil) one record with everything derived from it.
func (b *batch) put(w *work, kind string, key []byte, revision uint64, bytes []byte) error {
	ds := b.tx.Bucket([]byte(kind))
	records, index, tombstones := ds.Bucket(bucketRecords), ds.Bucket(bucketByRevision), ds.Bucket(bucketTombstones)
	storeKey := usercache.AppendStoreKey(nil, key)
	bucket := binary.BigEndian.Uint16(storeKey)
	sum, ok := w.sums[bucket]
	if !ok {
		if v := ds.Bucket(bucketTree).Get(storeKey[:2]); v != nil {
			var err error
			if sum, err = usercache.ParseBucketSum(v); err != nil {
				return err
			}
		}
	}

	var was []byte
	if v := records.Get(storeKey); v != nil {
		oldRevision, old, err := openRecord(v)
		if err != nil {
			return err
		}
		was = append(make([]byte, 0, len(old)), old...)
		sum = sum.Remove(usercache.LeafOf(key, oldRevision, old))
		w.meta.Size -= uint64(len(key) + len(old))
		w.meta.Records--
		if err := index.Delete(append(be64(oldRevision), key...)); err != nil {
			return err
		}
	} else if v := tombstones.Get(key); v != nil {
		if err := index.Delete(slices.Concat(v, key)); err != nil {
			return err
		}
		if err := tombstones.Delete(key); err != nil {
			return err
		}
	}

	var entry storev1.Entry
	if bytes != nil {
		sum = sum.Add(usercache.LeafOf(key, revision, bytes))
		w.meta.Size += uint64(len(key) + len(bytes))
		w.meta.Records++
		if err := putProto(records, storeKey, &storev1.Record{Revision: revision, Bytes: bytes}); err != nil {
			return err
		}
	} else {
		entry = storev1.Entry{Removed: true, RemovedAt: b.now.Unix()}
		if err := records.Delete(storeKey); err != nil {
			return err
		}
		if err := tombstones.Put(key, be64(revision)); err != nil {
			return err
		}
	}
	if err := putProto(index, append(be64(revision), key...), &entry); err != nil {
		return err
	}
	w.sums[bucket] = sum
	w.changes = append(w.changes, &syncv1.Change{Key: key, Revision: revision, Bytes: bytes, Removed: bytes == nil})
	switch kind {
	case Users:
		return b.indexUser(string(key), was, bytes)
	case Catalogue:
		return b.indexOwn(string(key), policyRecord(string(key), was), policyRecord(string(key), bytes))
	}
	return nil
}

// indexUser brings the service's own indexes from one version of a user to the next.
func (b *batch) indexUser(id string, was, now []byte) error {
	if strings.Contains(id, "/") {
		return nil // not a user
	}
	svc := b.tx.Bucket(bucketService)
	before, after := new(userv1.User), new(userv1.User)
	// A record that cannot be decoded was checked before it was written, so this cannot be met; were it,
	// it would have no claims.
	_ = proto.Unmarshal(was, before)
	_ = proto.Unmarshal(now, after)

	if err := b.indexOwn(id, userLayers(before), userLayers(after)); err != nil {
		return err
	}
	old, new_ := claims(id, before), claims(id, after)
	for c, owner := range old {
		if new_[c] == "" && string(svc.Bucket(bucketClaims).Get([]byte(c))) == owner {
			if err := svc.Bucket(bucketClaims).Delete([]byte(c)); err != nil {
				return err
			}
		}
	}
	for c, owner := range new_ {
		if old[c] != owner || was == nil {
			if err := svc.Bucket(bucketClaims).Put([]byte(c), []byte(owner)); err != nil {
				return err
			}
		}
	}
	if before.Policy != after.Policy || now == nil || was == nil {
		policies := svc.Bucket(bucketPolicies)
		if before.Policy != "" {
			if err := policies.Delete([]byte(before.Policy + "\x00" + id)); err != nil {
				return err
			}
		}
		if after.Policy != "" && now != nil {
			if err := policies.Put([]byte(after.Policy+"\x00"+id), []byte{}); err != nil {
				return err
			}
		}
	}
	if now == nil {
		return svc.Bucket(bucketIDs).Delete([]byte(id))
	}
	if was == nil {
		return svc.Bucket(bucketIDs).Put([]byte(id), []byte{})
	}
	return nil
}

func (b *batch) workOn(kind string) (*work, error) {
	if w := b.work[kind]; w != nil {
		return w, nil
	}
	m, err := metaOf(b.tx, kind)
	if err != nil {
		return nil, err
	}
	w := &work{meta: m, sums: map[uint16]usercache.BucketSum{}}
	b.work[kind] = w
	return w, nil
}

// metaNow is a dataset's meta as the operations before in this transaction left it.
func (b *batch) metaNow(kind string) (*storev1.Meta, error) {
	if w := b.work[kind]; w != nil {
		return w.meta, nil
	}
	return metaOf(b.tx, kind)
}

// finish writes what all operations of the transaction share.
func (b *batch) finish() error {
	for kind, w := range b.work {
		ds := b.tx.Bucket([]byte(kind))
		for bucket, sum := range w.sums {
			k := binary.BigEndian.AppendUint16(nil, bucket)
			var err error
			if sum == (usercache.BucketSum{}) {
				err = ds.Bucket(bucketTree).Delete(k)
			} else {
				err = ds.Bucket(bucketTree).Put(k, sum.AppendTo(nil))
			}
			if err != nil {
				return err
			}
		}
		if err := putProto(ds.Bucket(bucketMeta), keyMeta, w.meta); err != nil {
			return err
		}
	}
	return putProto(b.tx.Bucket(bucketService).Bucket(bucketIdentity), keyIdentity, b.id)
}

// A view is what an operation sees while it plans: the store as the operations before left it, and what it
// has staged itself.
type view struct {
	b       *batch
	tx      *bolt.Tx
	now     time.Time
	accept  bool                         // the shrink guard does not object
	staged  map[string]map[string][]byte // kind → key → bytes; nil: removed
	taken   map[string][]bool            // numbers that are taken, by kind of record; see freeNumber
	claimed map[string]string            // claims made and given up ("") by what is staged
	aux     []auxPut
}

// An auxPut writes to, or with a nil value deletes from, a bucket of the service's own.
type auxPut struct {
	bucket, key, value []byte
}

// get reads a record. Its bytes must not be kept beyond the operation.
func (v *view) get(kind, key string) (revision uint64, bytes []byte, ok bool, err error) {
	revision, stored, ok, err := getRecord(v.tx, kind, []byte(key))
	if err != nil {
		return 0, nil, false, err
	}
	if b, staged := v.staged[kind][key]; staged {
		return revision, b, b != nil, nil
	}
	return revision, stored, ok, nil
}

// load reads a record into m; ok is false if there is none.
func (v *view) load(kind, key string, m proto.Message) (revision uint64, ok bool, err error) {
	revision, b, ok, err := v.get(kind, key)
	if err != nil || !ok {
		return 0, false, err
	}
	if err := proto.Unmarshal(b, m); err != nil {
		return 0, false, fmt.Errorf("record %q of %s: %w", key, kind, err)
	}
	return revision, true, nil
}

// put stages a record.
func (v *view) put(kind, key string, m proto.Message) error {
	b, err := encode(m)
	if err != nil {
		return invalid("record", "%v", err)
	}
	if len(b) > maxRecord {
		return invalid("record", "%s of %s would take %d bytes; at most %d are stored", key, kind, len(b), maxRecord)
	}
	if b == nil {
		b = []byte{} // an empty message is a record; nil is a removal
	}
	v.stage(kind, key, b)
	return nil
}

// remove stages a removal.
func (v *view) remove(kind, key string) { v.stage(kind, key, nil) }

func (v *view) stage(kind, key string, b []byte) {
	if v.staged[kind] == nil {
		v.staged[kind] = map[string][]byte{}
	}
	v.staged[kind][key] = b
}

// auxGet reads from a bucket of the service's own, staged writes included.
func (v *view) auxGet(bucket []byte, key string) []byte {
	for i := len(v.aux) - 1; i >= 0; i-- {
		if bytes.Equal(v.aux[i].bucket, bucket) && string(v.aux[i].key) == key {
			return v.aux[i].value
		}
	}
	return v.tx.Bucket(bucketService).Bucket(bucket).Get([]byte(key))
}

func (v *view) auxPut(bucket []byte, key string, m proto.Message) error {
	b, err := encode(m)
	if err != nil {
		return err
	}
	if b == nil {
		b = []byte{}
	}
	v.aux = append(v.aux, auxPut{bucket, []byte(key), b})
	return nil
}

func (v *view) auxDelete(bucket []byte, key string) {
	v.aux = append(v.aux, auxPut{bucket, []byte(key), nil})
}

// drop forgets staged changes that change nothing.
func (v *view) drop() error {
	for kind, staged := range v.staged {
		for key, b := range staged {
			_, was, ok, err := getRecord(v.tx, kind, []byte(key))
			if err != nil {
				return err
			}
			if ok == (b != nil) && bytes.Equal(was, b) {
				delete(staged, key)
			}
		}
	}
	return nil
}

func (v *view) empty() bool {
	for _, staged := range v.staged {
		if len(staged) > 0 {
			return false
		}
	}
	return len(v.aux) == 0
}
