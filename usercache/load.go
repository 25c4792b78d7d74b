package usercache

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"

	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache/internal/pagewalk"
	"github.com/sluice-dns/sluice/usercache/internal/store"
	"google.golang.org/protobuf/proto"
)

// load reads a dataset from its files, or returns an empty one.
//
// The newest file that is whole gives the state. Files newer than it, damaged, still give records that are
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
		list = list[1:]
	}
	var damaged []string
	var d *Dataset
	for i, g := range list {
		path := c.path(kind, g)
		next := c.newDataset(kind)
		report, err := next.loadFile(path)
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
		if i == 0 && g == newest && len(damaged) == 0 {
			f, err := openFile(path, g)
			if err != nil {
				return nil, err
			}
			if t := report.Written; !t.IsZero() {
				f.written = t
			}
			d.disk.file = f
		} else {
			d.disk.mustCheckpoint = true
			if skipped {
				d.disk.base = g
			}
		}
		break
	}
	if len(list) == 0 {
		return c.newDataset(kind), nil
	}
	whole := d != nil
	if !whole {
		d = c.newDataset(kind)
		d.disk.generation = newest
	}
	for _, path := range damaged {
		if err := d.salvage(path, whole); err != nil {
			return nil, err
		}
		if err := os.Rename(path, strings.TrimSuffix(path, ".db")+".damaged"); err != nil {
			log.Warn("setting damaged user data aside", "error", err)
		}
		d.disk.mustCheckpoint = true
	}
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
		record: func(key []byte, revision uint64, b []byte, leaf Leaf, bucket uint16) error {
			return d.loadRecord(key, revision, b, leaf, bucket)
		},
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
	return d.store.Reserve(int(min(m.Records, 1<<30)))
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

// loadRecord enters a record of a file. Keys come once.
func (d *Dataset) loadRecord(key []byte, revision uint64, b []byte, leaf Leaf, bucket uint16) error {
	message, bad := d.read(key, b, &d.newFacts)
	flags := uint8(0)
	if bad != nil {
		flags = flagUnusable
		d.unusable = append(d.unusable, unusable{string(key), revision, bad.Error()})
	}
	draft, err := d.store.Write(key, b, revision, flags)
	if err != nil {
		return fmt.Errorf("record %q: %w", clip(key), err)
	}
	if d.users != nil {
		if err := d.users.enter(draft.Ordinal, d.newFacts.claims); err != nil {
			return fmt.Errorf("record %q: %w", clip(key), err)
		}
	}
	if err := d.store.Publish(draft, store.Both); err != nil {
		return fmt.Errorf("record %q: %w", clip(key), err)
	}
	if d.users != nil {
		d.users.rejoin(draft.Ordinal, d.newFacts.claims)
	}
	d.count(&d.totals, key, b, &d.newFacts, true)
	d.size += uint64(len(key) + len(b))
	d.tree.Add(bucket, leaf)
	d.sums[bucket>>8] = d.sums[bucket>>8].Add(leaf)
	if bad == nil {
		d.setDecoded(key, revision, message)
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
		record: func(key []byte, revision uint64, b []byte, _ Leaf, _ uint16) error {
			c := Change{Key: key, Revision: revision, Bytes: b}
			return d.apply(&c, false, clock.Wall(), &res)
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
// may be nil. Slices are valid during the call. An error of meta or record ends the reading.
type fileReader struct {
	meta       func(m *storev1.Meta) error
	checkpoint func(m *storev1.Checkpoint)
	asOf       func(bucket uint16, asOf uint64)
	overlay    func(overlayRecord)
	record     func(key []byte, revision uint64, b []byte, leaf Leaf, bucket uint16) error
}

// ErrNewerFormat says that a file was written by a newer version of this program.
var ErrNewerFormat = errors.New("written by a newer version")

// readFile walks a file, yields what is sound in it, and compares it with what the file says of itself.
func readFile(path string, to fileReader) (*FileReport, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("opening user data: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("opening user data: %w", err)
	}
	r := &FileReport{Path: path, Size: info.Size()}
	var head *storev1.Meta
	tree := NewTree()
	var sums, stored [Nodes]BucketSum
	haveSums := 0
	walk, err := pagewalk.Walk(f, info.Size(), func(bucket string, key, value []byte) error {
		switch bucket {
		case string(bucketMeta):
			switch string(key) {
			case string(keyMeta):
				m := new(storev1.Meta)
				if err := proto.Unmarshal(value, m); err != nil {
					r.fault("meta: %v", errBroken)
					return nil
				}
				if m.Format > formatVersion {
					return fmt.Errorf("%s: %w (format %d, this one knows %d); it is left as it is", path, ErrNewerFormat, m.Format, formatVersion)
				}
				// Each record takes at least the header of an element.
				if m.Records > uint64(info.Size())/16 {
					r.fault("meta: %d records do not fit a file of %d bytes", m.Records, info.Size())
					m.Records = 0
				}
				head = m
				if to.meta != nil {
					return to.meta(m)
				}
			case string(keyCheckpoint):
				m := new(storev1.Checkpoint)
				if err := proto.Unmarshal(value, m); err != nil {
					r.fault("checkpoint: %v", errBroken)
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
				r.fault("as_of: entry %x is no bucket", clip(key))
				return nil
			}
			if to.asOf != nil {
				to.asOf(binary.BigEndian.Uint16(key), m.AsOf)
			}
		case string(bucketOverlay):
			m := new(storev1.Overlay)
			k, ok := KeyOfStoreKey(key)
			if !ok || len(k) > MaxKey || proto.Unmarshal(value, m) != nil {
				r.fault("overlay: entry %x is none", clip(key))
				return nil
			}
			r.Overlay++
			if to.overlay != nil {
				to.overlay(overlayRecord{key: append([]byte(nil), k...), message: m})
			}
		case string(bucketTree):
			sum, err := ParseBucketSum(value)
			if len(key) != 1 || err != nil {
				r.fault("tree: entry %x is no node", clip(key))
				return nil
			}
			stored[key[0]] = sum
			haveSums++
		case string(bucketRecords):
			k, ok := KeyOfStoreKey(key)
			check, revision, b, okValue := parseValue(value)
			if !ok || len(k) > MaxKey || !okValue || len(b) > MaxRecord {
				r.Bad++
				r.fault("records: entry %x is no record", clip(key))
				return nil
			}
			leaf := LeafOf(k, revision, b)
			if string(leaf[:valueCheck]) != string(check) {
				r.Bad++
				r.fault("records: %q has changed since it was written", clip(k))
				return nil
			}
			r.Good++
			bucket := binary.BigEndian.Uint16(key)
			tree.Add(bucket, leaf)
			sums[bucket>>8] = sums[bucket>>8].Add(leaf)
			if to.record != nil {
				return to.record(k, revision, b, leaf, bucket)
			}
		}
		return nil
	})
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
