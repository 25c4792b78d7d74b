// Package pagewalk reads a bbolt file page by page, trusting nothing in it.
//
// bbolt itself trusts its file: on a damaged one it may loop while eating memory, crash in a goroutine of
// its own, or keep a lock for ever. So a file is walked here first, by pread, and bbolt opens it only if it
// has passed. The walk checks the metas' checksums, each page's id, type and bounds, the order of keys
// within a page and between pages, that every page is reached once, and that every page below the high-water
// mark is reached or free. Its work is bounded by the number of pages and its memory by a bit a page and the
// largest page.
//
// What can be read of a damaged file is yielded all the same; the Report says what was wrong and where.
//
// The format is that of bbolt 1.3 to 1.5 (version 2 of the file format), little-endian.
package pagewalk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
)

// A Fault is something wrong with a page.
type Fault struct {
	Page uint64
	What string
}

// String returns the fault in words.
func (f Fault) String() string { return fmt.Sprintf("page %d: %s", f.Page, f.What) }

// A Report is what a walk found.
type Report struct {
	PageSize int
	Pages    uint64 // below the high-water mark
	TxID     uint64 // of the newest transaction
	Entries  uint64 // yielded
	Faults   []Fault
	// More counts faults beyond the first maxFaults.
	More uint64
}

// maxFaults is how many faults are described; a file may have one for every page.
const maxFaults = 100

// Whole reports whether nothing was wrong.
func (r *Report) Whole() bool { return len(r.Faults) == 0 }

func (r *Report) fault(page uint64, format string, args ...any) {
	if len(r.Faults) == maxFaults {
		r.More++
		return
	}
	r.Faults = append(r.Faults, Fault{page, fmt.Sprintf(format, args...)})
}

// ErrNotBolt says that neither meta page of a file can be used. ErrVersion and ErrMetas are such errors: of a file that
// a newer bbolt wrote, and of one that bbolt wrote and something damaged.
var (
	ErrNotBolt = errors.New("not a bbolt file")
	ErrVersion = fmt.Errorf("%w of a version known here", ErrNotBolt)
	ErrMetas   = fmt.Errorf("%w: both meta pages are damaged", ErrNotBolt)
)

const (
	magic   = 0xED0CDAED
	version = 2

	pageHeader   = 16
	leafElement  = 16
	branchElem   = 16
	bucketHeader = 16
	metaLen      = 64

	flagBranch   = 0x01
	flagLeaf     = 0x02
	flagMeta     = 0x04
	flagFreelist = 0x10

	bucketLeaf = 0x01 // flag of a leaf element that holds a bucket

	// noFreelist is a meta's freelist id when the list is not kept in the file.
	noFreelist = ^uint64(0)

	// maxDepth bounds the height of a tree: with two keys a page it holds more than any file.
	maxDepth = 64
	// maxNesting bounds buckets within buckets. Ours have one level.
	maxNesting = 4
	// maxPageBytes bounds a page with its overflow, hence a value.
	maxPageBytes = 1 << 28
)

// A Yield is given every key and value of every bucket, in order. The slices are valid during the call. An
// error ends the walk and is returned by Walk. bucket is the name of the bucket, nested ones joined by "/".
type Yield func(bucket string, key, value []byte) error

// Walk reads a file of the given size.
//
// The error is an ErrNotBolt, an error of reading, or that of yield. Damage is no error; see Report.
func Walk(file io.ReaderAt, size int64, yield Yield) (*Report, error) {
	w := &walker{file: file, size: size, yield: yield, report: new(Report)}
	m, err := w.meta()
	if err != nil {
		return w.report, err
	}
	r := w.report
	r.PageSize, r.Pages, r.TxID = int(m.pageSize), m.high, m.txid
	w.pageSize = uint64(m.pageSize)
	if have := uint64(size) / w.pageSize; m.high > have {
		r.fault(have, "the file ends here, before page %d that its meta names as the end", m.high)
		// Pages beyond the end fail when they are read; a bit each would be memory for nothing.
		w.pages = have
	} else {
		w.pages = m.high
	}
	w.seen = make([]uint64, (w.pages+63)/64)
	w.mark(0)
	w.mark(1)
	if err := w.tree("", m.root, nil, nil, 0, 0); err != nil {
		return r, err
	}
	if err := w.freelist(m.freelist); err != nil {
		return r, err
	}
	if m.freelist != noFreelist {
		w.unreached()
	}
	return r, nil
}

type walker struct {
	file     io.ReaderAt
	size     int64
	yield    Yield
	report   *Report
	pageSize uint64
	pages    uint64
	seen     []uint64 // bit set of pages reached or free

	window   []byte // of the file, at windowAt
	windowAt uint64
	bufs     [][]byte // one page a depth, reused
}

type meta struct {
	pageSize uint32
	root     uint64
	freelist uint64
	high     uint64
	txid     uint64
}

// meta returns the newer valid meta. As bbolt does, it looks for the second one at the page sizes there are,
// since the first may be torn.
func (w *walker) meta() (meta, error) {
	var b [pageHeader + metaLen]byte
	wrong := ErrNotBolt // with the file, if it has no meta page
	read := func(at int64) (m meta, ok bool) {
		if n, _ := w.file.ReadAt(b[:], at); n < len(b) {
			return m, false
		}
		m, err := parseMeta(b[:])
		if err != nil && wrong == ErrNotBolt {
			wrong = err
		}
		return m, err == nil
	}
	first, ok := read(0)
	var second meta
	for size := int64(512); size <= 64<<10; size *= 2 {
		if ok && size != int64(first.pageSize) {
			continue
		}
		if m, valid := read(size); valid && int64(m.pageSize) == size {
			second = m
			break
		}
	}
	switch {
	case first.pageSize == 0 && second.pageSize == 0:
		return meta{}, wrong
	case second.txid > first.txid || first.pageSize == 0:
		return second, nil
	}
	return first, nil
}

// parseMeta reads a meta page. Its error is ErrNotBolt, ErrVersion or ErrMetas.
func parseMeta(page []byte) (meta, error) {
	b := page[pageHeader:]
	if binary.LittleEndian.Uint32(b) != magic {
		return meta{}, ErrNotBolt
	}
	if binary.LittleEndian.Uint32(b[4:]) != version {
		return meta{}, ErrVersion
	}
	m := meta{
		pageSize: binary.LittleEndian.Uint32(b[8:]),
		root:     binary.LittleEndian.Uint64(b[16:]),
		freelist: binary.LittleEndian.Uint64(b[32:]),
		high:     binary.LittleEndian.Uint64(b[40:]),
		txid:     binary.LittleEndian.Uint64(b[48:]),
	}
	sum := fnv.New64a()
	sum.Write(b[:56])
	if binary.LittleEndian.Uint16(page[8:])&flagMeta == 0 || binary.LittleEndian.Uint64(b[56:]) != sum.Sum64() ||
		m.pageSize < 512 || m.pageSize > 64<<10 || m.pageSize&(m.pageSize-1) != 0 {
		return meta{}, ErrMetas
	}
	return m, nil
}

// mark notes that a page is reached. It reports false if it was before, or does not exist.
func (w *walker) mark(page uint64) bool {
	if page >= w.pages || w.seen[page/64]>>(page%64)&1 != 0 {
		return false
	}
	w.seen[page/64] |= 1 << (page % 64)
	return true
}

// errSkip says that a page cannot be used; the fault has been reported.
var errSkip = errors.New("skipped")

// page reads a page with its overflow into the buffer of a depth.
func (w *walker) page(id uint64, depth int) ([]byte, error) {
	if id < 2 || id >= w.pages {
		w.report.fault(id, "there is no such page, but another refers to it")
		return nil, errSkip
	}
	if !w.mark(id) {
		w.report.fault(id, "it is reached twice")
		return nil, errSkip
	}
	head, err := w.bytes(id*w.pageSize, pageHeader)
	if err != nil {
		return nil, err
	}
	overflow := uint64(binary.LittleEndian.Uint32(head[12:]))
	if self := binary.LittleEndian.Uint64(head); self != id {
		w.report.fault(id, "it says that it is page %d", self)
		return nil, errSkip
	}
	n := (overflow + 1) * w.pageSize
	if overflow >= w.pages-id || n > maxPageBytes {
		w.report.fault(id, "its overflow of %d pages passes the end", overflow)
		return nil, errSkip
	}
	for i := id + 1; i <= id+overflow; i++ {
		if !w.mark(i) {
			w.report.fault(id, "its overflow page %d is reached twice", i)
			return nil, errSkip
		}
	}
	for len(w.bufs) <= depth {
		w.bufs = append(w.bufs, nil)
	}
	b, err := w.bytes(id*w.pageSize, n)
	if err != nil {
		return nil, err
	}
	w.bufs[depth] = append(w.bufs[depth][:0], b...)
	return w.bufs[depth], nil
}

// windowSize is how much is read ahead when pages come in order.
const windowSize = 256 << 10

// bytes returns n bytes of the file, valid until the next call.
func (w *walker) bytes(at, n uint64) ([]byte, error) {
	if at >= w.windowAt && at+n <= w.windowAt+uint64(len(w.window)) {
		return w.window[at-w.windowAt:][:n], nil
	}
	// Reading ahead pays only where the file was written in order; elsewhere read what is asked.
	want := max(n, w.pageSize)
	if next := w.windowAt + uint64(len(w.window)); at >= next && at < next+w.pageSize*8 {
		want = max(n, windowSize)
	}
	want = min(want, uint64(w.size)-at)
	if uint64(cap(w.window)) < want {
		w.window = make([]byte, want)
	}
	w.window = w.window[:want]
	w.windowAt = at
	if got, err := w.file.ReadAt(w.window, int64(at)); got < int(n) {
		w.window = w.window[:0]
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, fmt.Errorf("reading at byte %d: %w", at, err)
	} else if got < int(want) {
		w.window = w.window[:got]
	}
	return w.window[:n], nil
}

// tree walks the tree of a bucket from a page. Keys must lie in [low, high); nil is no bound.
func (w *walker) tree(bucket string, id uint64, low, high []byte, depth, nesting int) error {
	if depth >= maxDepth {
		w.report.fault(id, "the tree is deeper than %d", maxDepth)
		return nil
	}
	b, err := w.page(id, depth)
	if err == errSkip {
		return nil
	}
	if err != nil {
		// A page that the disk cannot read is a fault like another; the rest may be readable.
		w.report.fault(id, "%v", err)
		return nil
	}
	switch flags := binary.LittleEndian.Uint16(b[8:]); flags {
	case flagLeaf:
		return w.leaf(bucket, id, b, low, high, depth, nesting)
	case flagBranch:
		return w.branch(bucket, id, b, low, high, depth, nesting)
	default:
		w.report.fault(id, "it is of type %#x where a branch or leaf belongs", flags)
		return nil
	}
}

func (w *walker) branch(bucket string, id uint64, b []byte, low, high []byte, depth, nesting int) error {
	count := int(binary.LittleEndian.Uint16(b[10:]))
	if count == 0 || pageHeader+count*branchElem > len(b) {
		w.report.fault(id, "a branch of %d elements", count)
		return nil
	}
	key := func(i int) (key []byte, child uint64, ok bool) {
		e := b[pageHeader+i*branchElem:]
		k, ok := within(b, pageHeader+i*branchElem, binary.LittleEndian.Uint32(e), binary.LittleEndian.Uint32(e[4:]))
		return k, binary.LittleEndian.Uint64(e[8:]), ok
	}
	// Children are walked only if the branch as a whole makes sense.
	var before []byte
	for i := range count {
		k, _, ok := key(i)
		if !ok {
			w.report.fault(id, "key %d lies outside", i)
			return nil
		}
		if i > 0 && bytes.Compare(before, k) >= 0 {
			w.report.fault(id, "key %d is not above the one before", i)
			return nil
		}
		// The first key of a branch may be above or below what its parent says of it; bbolt does not
		// rewrite parents. The others must be within.
		if i > 0 && low != nil && bytes.Compare(k, low) < 0 || high != nil && bytes.Compare(k, high) >= 0 {
			w.report.fault(id, "key %d is not where its parent says", i)
			return nil
		}
		before = k
	}
	for i := range count {
		k, child, _ := key(i)
		lo, hi := k, high
		if i == 0 {
			lo = low
		}
		if i+1 < count {
			hi, _, _ = key(i + 1)
		}
		if err := w.tree(bucket, child, lo, hi, depth+1, nesting); err != nil {
			return err
		}
	}
	return nil
}

func (w *walker) leaf(bucket string, id uint64, b []byte, low, high []byte, depth, nesting int) error {
	count := int(binary.LittleEndian.Uint16(b[10:]))
	if pageHeader+count*leafElement > len(b) {
		w.report.fault(id, "a leaf of %d elements", count)
		return nil
	}
	var before []byte
	total := uint64(count) * leafElement
	for i := range count {
		at := pageHeader + i*leafElement
		e := b[at:]
		flags, pos := binary.LittleEndian.Uint32(e), binary.LittleEndian.Uint32(e[4:])
		keyLen, valueLen := binary.LittleEndian.Uint32(e[8:]), binary.LittleEndian.Uint32(e[12:])
		kv, ok := within(b, at, pos, keyLen)
		if ok {
			_, ok = within(b, at, pos, keyLen+valueLen)
			ok = ok && keyLen+valueLen >= keyLen
		}
		// Elements that overlap would be more work than the page is long.
		if total += uint64(keyLen) + uint64(valueLen); !ok || total > uint64(len(b)) {
			w.report.fault(id, "element %d lies outside", i)
			return nil
		}
		key := kv[:keyLen:keyLen]
		value := b[at+int(pos)+int(keyLen):][:valueLen:valueLen]
		if i > 0 && bytes.Compare(before, key) >= 0 ||
			low != nil && bytes.Compare(key, low) < 0 || high != nil && bytes.Compare(key, high) >= 0 {
			w.report.fault(id, "key %d is out of order", i)
			return nil
		}
		before = key
		switch {
		case flags&bucketLeaf != 0 && uint64(len(b)) < w.pageSize:
			w.report.fault(id, "bucket %q is in an inline bucket, where bbolt keeps none but would follow it", key)
		case flags&bucketLeaf != 0:
			if err := w.bucket(bucket, id, key, value, depth, nesting); err != nil {
				return err
			}
		case bucket == "":
			w.report.fault(id, "a value outside any bucket")
		default:
			w.report.Entries++
			if err := w.yield(bucket, key, value); err != nil {
				return err
			}
		}
	}
	return nil
}

// bucket walks a bucket whose header, and perhaps only page, is a value.
func (w *walker) bucket(parent string, id uint64, key, value []byte, depth, nesting int) error {
	if len(value) < bucketHeader || nesting >= maxNesting {
		w.report.fault(id, "bucket %q has no header, or is nested too deep", key)
		return nil
	}
	name := string(key)
	if parent != "" {
		name = parent + "/" + name
	}
	root := binary.LittleEndian.Uint64(value)
	if root != 0 {
		return w.tree(name, root, nil, nil, depth+1, nesting+1)
	}
	inline := value[bucketHeader:]
	if len(inline) < pageHeader || binary.LittleEndian.Uint16(inline[8:]) != flagLeaf {
		w.report.fault(id, "bucket %q has no page", key)
		return nil
	}
	return w.leaf(name, id, inline, nil, nil, depth+1, nesting+1)
}

// within returns size bytes at pos behind an element of a page, if they are in the page.
func within(page []byte, element int, pos, size uint32) ([]byte, bool) {
	at := uint64(element) + uint64(pos)
	if pos == 0 && size == 0 || at+uint64(size) > uint64(len(page)) {
		return nil, pos == 0 && size == 0
	}
	return page[at:][:size], true
}

// freelist checks the list of free pages: bbolt would give a page that is listed wrongly to new data.
func (w *walker) freelist(id uint64) error {
	if id == noFreelist {
		return nil
	}
	b, err := w.page(id, 0)
	if err != nil {
		if err != errSkip {
			w.report.fault(id, "%v", err)
		}
		return nil
	}
	if flags := binary.LittleEndian.Uint16(b[8:]); flags != flagFreelist {
		w.report.fault(id, "it is of type %#x where the list of free pages belongs", flags)
		return nil
	}
	count, at := uint64(binary.LittleEndian.Uint16(b[10:])), pageHeader
	if count == 0xffff {
		if len(b) < pageHeader+8 {
			w.report.fault(id, "the list of free pages has no length")
			return nil
		}
		count, at = binary.LittleEndian.Uint64(b[pageHeader:]), pageHeader+8
	}
	if count > uint64(len(b)-at)/8 {
		w.report.fault(id, "the list of free pages is longer than its page")
		return nil
	}
	for i := range count {
		free := binary.LittleEndian.Uint64(b[at+int(i)*8:])
		if free < 2 || !w.mark(free) {
			w.report.fault(free, "it is listed as free, but is in use, listed twice or does not exist")
		}
	}
	return nil
}

// unreached reports pages that are neither in use nor free. bbolt never makes them; a changed pointer does.
func (w *walker) unreached() {
	if !w.report.Whole() {
		return // pages below the faults are unreached too
	}
	for p := range w.pages {
		if w.seen[p/64]>>(p%64)&1 == 0 {
			w.report.fault(p, "it is neither in use nor free")
		}
	}
}
