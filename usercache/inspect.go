package usercache

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	"github.com/sluice-dns/sluice/usercache/pagewalk"
)

// A FileReport is what reading a file found, without bbolt and without changing it.
type FileReport struct {
	Path string
	Size int64
	// Whole: nothing is wrong; pages, records, counts, sums and root agree.
	Whole bool
	// Faults are what is wrong and where, at most 100; More counts the rest.
	Faults []string
	More   uint64

	PageSize int
	Pages    uint64
	TxID     uint64

	Format     uint32
	Kind       Kind
	Identity   Identity
	Revision   uint64
	Root       Hash // computed from the records
	Records    uint64
	Totals     Totals
	Overlay    uint64
	Oldest     uint64 // of a transfer in progress
	Generation uint64
	Written    time.Time // the checkpoint; zero if unknown
	Program    string

	Good, Bad uint64 // records read, and records that could not be used
}

// Verify reads a file and reports whether it is whole. The error is of the system, or ErrNewerFormat.
func Verify(path string) (*FileReport, error) { return readFile(path, fileReader{}) }

// ReadFile is Verify that also hands over every sound record, in no particular order. Its slices are
// valid during the call; an error of record ends the reading.
func ReadFile(path string, record func(Record) error) (*FileReport, error) {
	return readFile(path, fileReader{record: func(r *fileRecord) error {
		return record(Record{Key: r.key, Revision: r.revision, Bytes: r.bytes})
	}})
}

// RepairFile copies the readable records of a file, and its head, to a new one, which must not exist. The
// report is of the damaged file. What is missing then differs in the digest tree and is fetched again: the
// new file says that a transfer is in progress.
func RepairFile(from, to string) (*FileReport, error) {
	if _, err := os.Lstat(to); !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%s exists; move it away", to)
	}
	probe, err := Verify(from)
	if err != nil {
		return nil, err
	}
	kind := probe.Kind
	if kind == "" {
		kind = Users
	}
	o := Options{Dir: filepath.Dir(to), Logger: discard(), OverlayExpiry: 7 * 24 * time.Hour}
	c := &Cache{opts: o}
	d := c.newDataset(kind)
	report, err := readFile(from, fileReader{
		meta:    func(m *storev1.Meta) error { d.restore(m); return nil },
		prepare: d.prepare,
		record:  d.loadRecord,
		overlay: func(o overlayRecord) { d.salvaged = append(d.salvaged, o) },
		asOf:    func(bucket uint16, asOf uint64) { d.asOf[bucket] = asOf },
	})
	if err != nil {
		return nil, err
	}
	for _, o := range d.salvaged {
		if err := d.loadOverlay(o); err != nil {
			return nil, err
		}
	}
	d.noteUnusable()
	if !report.Whole {
		d.revision, d.oldest = 0, noBucketYet
	}
	head := d.headGroup()
	tmp := to + ".tmp"
	_ = os.Remove(tmp) // of an earlier attempt
	if err := d.writeCheckpoint(context.Background(), tmp, report.Generation, head, 0, false); err != nil {
		_ = os.Remove(tmp) // never whole
		return nil, fmt.Errorf("writing %s: %w", to, err)
	}
	if err := os.Rename(tmp, to); err != nil {
		return nil, fmt.Errorf("writing %s: %w", to, err)
	}
	return report, syncDir(filepath.Dir(to))
}

func (r *FileReport) fault(format string, args ...any) {
	if len(r.Faults) == 100 {
		r.More++
		return
	}
	r.Faults = append(r.Faults, fmt.Sprintf(format, args...))
}

func (r *FileReport) pages(w *pagewalk.Report) {
	r.PageSize, r.Pages, r.TxID = w.PageSize, w.Pages, w.TxID
	// What is wrong with pages comes first: it explains the rest.
	var faults []string
	for _, f := range w.Faults {
		faults = append(faults, f.String())
	}
	rest := r.Faults
	r.Faults = faults[:min(len(faults), 100)]
	r.More += w.More
	for _, f := range rest {
		r.fault("%s", f)
	}
}

func (r *FileReport) checkpoint(m *storev1.Checkpoint) {
	r.Generation, r.Program = m.Generation, m.Program
	if m.Written != 0 {
		r.Written = time.Unix(m.Written, 0).UTC()
	}
}

// head compares what the file says of its records with what was read.
func (r *FileReport) head(m *storev1.Meta, tree *Tree, sums int) {
	r.Root, r.Records = tree.Root(), tree.Records()
	if m == nil {
		r.fault("meta: there is none")
		return
	}
	r.Format, r.Kind, r.Revision, r.Oldest = m.Format, Kind(m.Kind), m.Revision, m.Oldest
	r.Totals = totalsOf(m.Totals)
	if len(m.DatasetId) == 16 && len(m.Lineage) == 16 {
		r.Identity = Identity{[16]byte(m.DatasetId), [16]byte(m.Lineage)}
	}
	if m.Records != r.Records {
		r.fault("records: %d, not the %d that were written", r.Records, m.Records)
	}
	if string(m.Root) != string(r.Root[:]) {
		r.fault("records: their root is %v, not the %x that was written", r.Root, m.Root)
	}
	if sums != Nodes {
		r.fault("tree: %d nodes, not %d", sums, Nodes)
	}
}
