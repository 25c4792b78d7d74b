package usercache

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"

	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache/internal/store"
	"github.com/sluice-dns/sluice/usercache/pagewalk"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// load reads a dataset from its files, or returns an empty one.
//
// The newest file that is whole gives the state. A file that cannot be read at all is passed over, and left
// alone, if another is whole; else the operator must decide. Files newer than it, damaged, still give records that are
// newer than its own. If no file is whole, their records are all there is: the dataset is then suspect and
// not complete, so that nobody is taken for a stranger because his record is lost.
func (c *Cache) load(kind Kind) (*Dataset, error) {
	log := c.opts.Logger
	list, err := c.generations(kind)
	if err != nil {
		return nil, err
	}
	newest, skipped := uint64(0), false
	if len(list) > 0 {
		newest = list[0]
	}
	if c.starts >= 2 && len(list) > 1 {
		log.Warn("two starts did not become ready; the newest user data is not used", "dataset", kind, "file", c.path(kind, list[0]))
		skipped = true
		list = append(list[1:], newest) // it is still better than none
	}
	var damaged []string
	var unreadable error // of a file that tells nothing, not even whose it is
	var d *Dataset
	for i, g := range list {
		path := c.path(kind, g)
		next := c.newDataset(kind)
		report, err := next.loadFile(path)
		if errors.Is(err, errUnreadable) {
			// It may be readable again tomorrow, so it is left alone.
			log.Error("user data cannot be read", "dataset", kind, "error", err)
			unreadable = errors.Join(unreadable, err)
			continue
		}
		if err != nil {
			return nil, err
		}
		if !report.Whole {
			log.Error("user data is damaged", "file", path, "fault", report.Faults[0], "faults", len(report.Faults)+int(report.More), "records_read", report.Good)
			damaged = append(damaged, path)
			continue
		}
		d = next
		d.disk.generation = newest
		d.disk.persistedRevision = d.revision
		if i == 0 && g == newest {
			f, err := openFile(path, kind, g)
			if err != nil {
				return nil, err
			}
			if t := report.Written; !t.IsZero() {
				f.written = t
			}
			d.disk.file = f
		} else {
			d.disk.mustCheckpoint = true
			if skipped || unreadable != nil {
				d.disk.base = g
			}
		}
		break
	}
	if len(list) == 0 {
		return c.newDataset(kind), nil
	}
	whole := d != nil
	if !whole && unreadable != nil {
		return nil, fmt.Errorf("no user data that is whole is left beside what cannot be read; mend that, or move it away to begin anew: %w", unreadable)
	}
	if !whole {
		d = c.newDataset(kind)
		d.disk.generation = newest
	}
	for _, path := range damaged {
		if err := d.salvage(path, whole); err != nil {
			return nil, err
		}
		d.disk.mustCheckpoint = true
	}
	d.disk.damaged = damaged
	if !whole {
		d.revision, d.oldest = 0, noBucketYet
		d.suspect = true
	}
	d.whole.Store(d.complete())
	return d, nil
}

// loadFile fills an empty dataset from a file. The error is of a file that must not be touched, or of the
// system; damage is in the report.
func (d *Dataset) loadFile(path string) (*FileReport, error) {
	d.begin()
	defer d.seq.Add(1)
	var overlay []overlayRecord
	report, err := readFile(path, fileReader{
		meta: func(m *storev1.Meta) error {
			if Kind(m.Kind) != d.kind {
				return fmt.Errorf("%s holds the dataset %q, not %q; move it away", path, m.Kind, d.kind)
			}
			d.restore(m)
			return d.reserve(m)
		},
		asOf: func(bucket uint16, asOf uint64) {
			d.asOf[bucket] = asOf
			d.newestAsOf = max(d.newestAsOf, asOf)
		},
		overlay: func(o overlayRecord) { overlay = append(overlay, o) },
		prepare: d.prepare,
		record:  d.loadRecord,
	})
	if err != nil {
		return nil, err
	}
	if !report.Whole {
		return report, nil
	}
	for _, o := range overlay {
		if err := d.loadOverlay(o); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	d.noteUnusable()
	d.whole.Store(d.complete())
	return report, nil
}

// reserve makes room for the records to come.
func (d *Dataset) reserve(m *storev1.Meta) error {
	// A file cannot make us reserve more than its records could need; see readFile.
	if err := d.store.Reserve(int(min(m.Records, 1<<30))); err != nil || d.users == nil {
		return err
	}
	// A device has one claim at least; nothing says how many more.
	claims := int(min(m.GetTotals().GetDevices(), m.Records*maxDevices, 1<<30))
	for i := range d.users.tables {
		if err := d.users.tables[i].Reserve(claims/256 + claims/256/16); err != nil {
			return err
		}
	}
	return nil
}

// restore takes over what heads a file.
func (d *Dataset) restore(m *storev1.Meta) {
	if len(m.DatasetId) == 16 && len(m.Lineage) == 16 {
		d.identity = Identity{[16]byte(m.DatasetId), [16]byte(m.Lineage)}
	}
	d.revision, d.oldest = m.Revision, m.Oldest
	d.needsCatalogue, d.freshAt = m.NeedsCatalogue, m.FreshAt
	if m.Guard != nil {
		d.guard.restore(m.Guard)
	}
}

// prepare decodes a record of a file. It is called by several goroutines.
func (d *Dataset) prepare(r *fileRecord, facts *userFacts) {
	r.message, r.bad = d.read(r.key, r.bytes, facts)
	r.devices, r.enabled = facts.devices, facts.enabled
}

// loadRecord enters a record of a file. Keys come once.
func (d *Dataset) loadRecord(r *fileRecord) error {
	flags := uint8(0)
	if r.bad != nil {
		flags = flagUnusable
		d.unusable = append(d.unusable, unusable{string(r.key), r.revision, r.bad.Error()})
	}
	draft, err := d.store.Insert(r.storeKey[0], binary.BigEndian.Uint32(r.storeKey[1:]), r.key, r.bytes, r.revision, flags)
	if err != nil {
		return fmt.Errorf("record %q: %w", clip(r.key), err)
	}
	defer draft.Record.Release()
	if d.users != nil {
		if err := d.users.enter(draft.Ordinal, r.claims); err != nil {
			return fmt.Errorf("record %q: %w", clip(r.key), err)
		}
	}
	if err := d.store.Publish(draft, store.Both); err != nil {
		return fmt.Errorf("record %q: %w", clip(r.key), err)
	}
	if d.users != nil {
		d.users.rejoin(draft.Ordinal, r.claims)
	}
	d.count(&d.totals, r.key, r.bytes, &userFacts{devices: r.devices, enabled: r.enabled}, true)
	d.size += uint64(len(r.key) + len(r.bytes))
	bucket := binary.BigEndian.Uint16(r.storeKey)
	d.tree.Add(bucket, r.leaf)
	d.sums[bucket>>8] = d.sums[bucket>>8].Add(r.leaf)
	if r.bad == nil {
		d.setDecoded(r.key, r.revision, r.message)
	}
	return nil
}

type unusable struct {
	key      string
	revision uint64
	detail   string
}

type overlayRecord struct {
	key     []byte
	message *storev1.Overlay
}

// loadOverlay puts an overlay entry of a file in force again, if it still says something: this version may
// know how to use a record that the one before did not.
func (d *Dataset) loadOverlay(o overlayRecord) error {
	m := o.message
	if m.Record == nil || m.Reason == storev1.OverlayReason_OVERLAY_REASON_UNUSABLE {
		return nil // loadRecord has found out itself
	}
	ordinal, known := d.store.Find(o.key)
	replica, held := store.Record{}, false
	if known {
		replica, held = d.store.Replica(ordinal)
		defer replica.Release()
	}
	reason := OverlayReason(m.Reason)
	if reason == BadRecord && (!held || replica.Flags&flagUnusable == 0) {
		d.disk.group(d).dropOverlay(string(o.key))
		return nil
	}
	message, bad := d.read(o.key, m.Record.Bytes, &d.newFacts)
	if bad != nil {
		return nil // the replica is no worse
	}
	if d.users != nil && held {
		d.read(replica.Key, replica.Bytes, &d.oldFacts)
		d.users.leave(ordinal, d.oldFacts.claims)
	}
	draft, err := d.store.Write(o.key, m.Record.Bytes, m.Record.Revision, 0)
	if err != nil {
		return fmt.Errorf("record %q: %w", clip(o.key), err)
	}
	defer draft.Record.Release()
	if err := d.store.Publish(draft, store.ServingOnly); err != nil {
		return fmt.Errorf("record %q: %w", clip(o.key), err)
	}
	if d.users != nil {
		if err := d.users.enter(draft.Ordinal, d.newFacts.claims); err != nil {
			return fmt.Errorf("record %q: %w", clip(o.key), err)
		}
	}
	d.overlay[string(o.key)] = &overlayEntry{
		reason: reason, heldRevision: m.HeldRevision, since: m.Since, until: m.Until, detail: m.Detail,
	}
	d.setDecoded(o.key, m.Record.Revision, message)
	return nil
}

// noteUnusable makes overlay entries of the bad records for which no good version was kept.
func (d *Dataset) noteUnusable() {
	for _, u := range d.unusable {
		if d.overlay[u.key] == nil {
			d.overlay[u.key] = &overlayEntry{reason: NeverUsable, heldRevision: u.revision, since: clock.Wall().Unix(), detail: u.detail}
		}
	}
	d.unusable = nil
}

// salvage takes those records of a damaged file that are newer than what is held. Without a whole file as
// base it takes the head of the file too.
func (d *Dataset) salvage(path string, base bool) error {
	d.begin()
	defer d.end(clock.Wall())
	var res Result
	var overlay []overlayRecord
	_, err := readFile(path, fileReader{
		overlay: func(o overlayRecord) { overlay = append(overlay, o) },
		meta: func(m *storev1.Meta) error {
			if !base && d.identity.IsZero() && Kind(m.Kind) == d.kind {
				d.restore(m)
			}
			return nil
		},
		record: func(r *fileRecord) error {
			c := Change{Key: r.key, Revision: r.revision, Bytes: r.bytes}
			return d.apply(&c, nil, clock.Wall(), &res)
		},
	})
	if !base {
		for _, o := range overlay {
			if err := d.loadOverlay(o); err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
		}
	}
	d.cache.opts.Logger.Info("records saved from damaged user data", "file", path, "records", res.Applied)
	return err
}

// A fileReader is given what a file holds, in the order as_of, meta, overlay, records. Any of its functions
// may be nil. Slices are valid during the call. An error of meta or record ends the reading. Calls come one
// at a time, except those of prepare.
type fileReader struct {
	meta       func(m *storev1.Meta) error
	checkpoint func(m *storev1.Checkpoint)
	asOf       func(bucket uint16, asOf uint64)
	overlay    func(overlayRecord)
	// prepare is called for each record before record, by any goroutine.
	prepare func(r *fileRecord, facts *userFacts)
	record  func(r *fileRecord) error
}

// A fileRecord is a record of a file.
type fileRecord struct {
	storeKey []byte
	value    []byte

	// Found by check.
	sound    bool // what follows is the record as it was written
	key      []byte
	revision uint64
	bytes    []byte
	leaf     Leaf

	// Found by prepare.
	message proto.Message
	bad     error
	claims  []claim
	devices int
	enabled bool
}

// check decodes the envelope, and compares it with the check that was written with it.
func (r *fileRecord) check() {
	key, ok := KeyOfStoreKey(r.storeKey)
	check, revision, b, okValue := parseValue(r.value)
	if !ok || len(key) > MaxKey || !okValue || len(b) > MaxRecord {
		return
	}
	r.key, r.revision, r.bytes, r.leaf = key, revision, b, LeafOf(key, revision, b)
	r.sound = string(r.leaf[:valueCheck]) == string(check)
}

// A fileBatch is records on their way from the walker by way of a checker to whoever enters them: reading,
// hashing and entering take about as long as each other, so they go on at the same time.
type fileBatch struct {
	records []fileRecord
	buf     []byte // what the records' slices share; never grown, so that they stay valid
	claims  []claim
}

const (
	batchRecords = 512
	batchBytes   = 1 << 20
)

// add takes a record over, and reports false if the batch has no room for it.
func (b *fileBatch) add(storeKey, value []byte) bool {
	n := len(storeKey) + len(value)
	if len(b.records) == batchRecords || len(b.buf)+n > cap(b.buf) && len(b.records) > 0 {
		return false
	}
	if b.buf == nil || n > cap(b.buf) {
		b.buf = make([]byte, 0, max(batchBytes, n))
	}
	at := len(b.buf)
	b.buf = append(append(b.buf, storeKey...), value...)
	b.records = append(b.records, fileRecord{
		storeKey: b.buf[at : at+len(storeKey) : at+len(storeKey)], value: b.buf[at+len(storeKey) : at+n : at+n],
	})
	return true
}

// check checks and prepares all records.
func (b *fileBatch) check(prepare func(*fileRecord, *userFacts)) {
	var facts userFacts
	var ends []int
	for i := range b.records {
		r := &b.records[i]
		r.check()
		if r.sound && prepare != nil {
			prepare(r, &facts)
			b.claims = append(b.claims, facts.claims...)
		}
		facts.claims = facts.claims[:0]
		ends = append(ends, len(b.claims))
	}
	from := 0
	for i, end := range ends { // only now does b.claims stay where it is
		b.records[i].claims = b.claims[from:end:end]
		from = end
	}
}

// reset empties the batch for use again.
func (b *fileBatch) reset() {
	clear(b.records)
	b.records, b.buf, b.claims = b.records[:0], b.buf[:0], b.claims[:0]
}

var errStopped = errors.New("stopped")

// errUnreadable is of a file that the system does not let us read.
var errUnreadable = errors.New("opening user data")

// ErrNewerFormat says that a file was written by a newer version of this program.
var ErrNewerFormat = errors.New("written by a newer version")

// readFile walks a file, yields what is sound in it, and compares it with what the file says of itself.
func readFile(path string, to fileReader) (*FileReport, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // of a pipe, opening does not wait for a writer
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errUnreadable, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errUnreadable, err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%w: %s is not a regular file", errUnreadable, path)
	}
	r := &FileReport{Path: path, Size: info.Size()}
	var head *storev1.Meta
	tree := NewTree()
	var sums, stored [Nodes]BucketSum
	haveSums := 0

	// Walker, checkers and this goroutine hand batches on. Each batch in flight is one of a fixed number.
	checkers := max(1, runtime.GOMAXPROCS(0)-1)
	free := make(chan *fileBatch, checkers+3)
	read, checked := make(chan *fileBatch, cap(free)), make(chan *fileBatch, cap(free))
	for range cap(free) {
		free <- new(fileBatch)
	}
	var stopped error // by a record that was refused
	stop := make(chan struct{})
	var checking sync.WaitGroup
	for range checkers {
		checking.Go(func() {
			for b := range read {
				b.check(to.prepare)
				checked <- b
			}
		})
	}
	var walk *pagewalk.Report
	var walkErr error
	var others []string // faults the walker's goroutine finds
	fault := func(format string, args ...any) {
		if len(others) < 100 {
			others = append(others, fmt.Sprintf(format, args...))
		}
	}
	go func() {
		batch := <-free
		hand := func() error {
			read <- batch
			select {
			case batch = <-free:
				return nil
			case <-stop:
				batch = new(fileBatch)
				return errStopped
			}
		}
		walk, walkErr = pagewalk.Walk(f, info.Size(), func(bucket string, key, value []byte) error {
			if bucket == string(bucketRecords) {
				if batch.add(key, value) {
					return nil
				}
				if err := hand(); err != nil {
					return err
				}
				batch.add(key, value)
				return nil
			}
			if bucket == string(bucketTree) {
				sum, err := ParseBucketSum(value)
				if len(key) != 1 || err != nil {
					fault("tree: entry %x is no node", clip(key))
					return nil
				}
				stored[key[0]] = sum
				haveSums++
				return nil
			}
			if bucket != string(bucketMeta) && bucket != string(bucketAsOfs) && bucket != string(bucketOverlay) {
				return nil // of a later version that a reader may pass over
			}
			value, ok := unseal([]byte(bucket), key, value)
			if !ok {
				fault("%s: entry %x has changed since it was written", bucket, clip(key))
				return nil
			}
			switch bucket {
			case string(bucketMeta):
				switch string(key) {
				case string(keyMeta):
					m := new(storev1.Meta)
					if err := proto.Unmarshal(value, m); err != nil {
						fault("meta: %v", errBroken)
						return nil
					}
					if m.Format > formatVersion {
						return fmt.Errorf("%s: %w (format %d, this one knows %d); it is left as it is", path, ErrNewerFormat, m.Format, formatVersion)
					}
					// Each record takes at least the header of an element.
					if m.Records > uint64(info.Size())/16 {
						fault("meta: %d records do not fit a file of %d bytes", m.Records, info.Size())
						m.Records = 0
					}
					head = m
					if to.meta != nil {
						return to.meta(m)
					}
				case string(keyCheckpoint):
					m := new(storev1.Checkpoint)
					if err := proto.Unmarshal(value, m); err != nil {
						fault("checkpoint: %v", errBroken)
						return nil
					}
					r.checkpoint(m)
					if to.checkpoint != nil {
						to.checkpoint(m)
					}
				}
			case string(bucketAsOfs):
				m := new(storev1.BucketState)
				if len(key) != 2 || proto.Unmarshal(value, m) != nil {
					fault("as_of: entry %x is no bucket", clip(key))
					return nil
				}
				if to.asOf != nil {
					to.asOf(binary.BigEndian.Uint16(key), m.AsOf)
				}
			case string(bucketOverlay):
				m := new(storev1.Overlay)
				k, ok := KeyOfStoreKey(key)
				if !ok || len(k) > MaxKey || proto.Unmarshal(value, m) != nil {
					fault("overlay: entry %x is none", clip(key))
					return nil
				}
				r.Overlay++
				if to.overlay != nil {
					to.overlay(overlayRecord{key: append([]byte(nil), k...), message: m})
				}
			}
			return nil
		})
		read <- batch
		close(read)
		checking.Wait()
		close(checked)
	}()
	for b := range checked {
		for i := range b.records {
			rec := &b.records[i]
			switch {
			case stopped != nil:
			case !rec.sound:
				r.Bad++
				if rec.key == nil {
					r.fault("records: entry %x is no record", clip(rec.storeKey))
				} else {
					r.fault("records: %q has changed since it was written", clip(rec.key))
				}
			default:
				r.Good++
				bucket := binary.BigEndian.Uint16(rec.storeKey)
				tree.Add(bucket, rec.leaf)
				sums[bucket>>8] = sums[bucket>>8].Add(rec.leaf)
				if to.record != nil {
					if stopped = to.record(rec); stopped != nil {
						close(stop)
					}
				}
			}
		}
		b.reset()
		select {
		case free <- b:
		default: // the walker has ended and given its own back
		}
	}
	err = walkErr
	if stopped != nil {
		return r, stopped
	}
	r.Faults = append(others, r.Faults...)
	if walk != nil {
		r.pages(walk)
	}
	if errors.Is(err, pagewalk.ErrNotBolt) {
		r.fault("%v", err)
		return r, nil
	}
	if err != nil {
		return r, err
	}
	r.head(head, tree, haveSums)
	if haveSums == Nodes {
		for i := range sums {
			if sums[i] != stored[i] {
				r.fault("records of node %d: %d, not the %d that were written, or others", i, sums[i].Count, stored[i].Count)
			}
		}
	}
	r.Whole = len(r.Faults) == 0
	return r, nil
}
