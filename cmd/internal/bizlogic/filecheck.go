package bizlogic

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"os"
)

// bbolt trusts the file it opens: a damaged one makes it panic, in places where nobody can recover, or
// loop. So a file is read by this walker first: checksums of the meta pages, types and bounds of pages,
// order of keys, every page at most once. Its work is bounded by the number of pages. bbolt opens what has
// passed.

const (
	boltMagic   = 0xED0CDAED
	boltVersion = 2

	pageBranch   = 0x01
	pageLeaf     = 0x02
	pageFreelist = 0x10

	pageHeader  = 16 // id u64, flags u16, count u16, overflow u32
	elementSize = 16
	metaSize    = 64

	leafBucket = 0x01 // flag of a leaf element: its value is a bucket
	noFreelist = ^uint64(0)
)

// checkFile returns nil if bbolt can open the file, else a *StoreError.
func checkFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return &StoreError{Path: path, What: "cannot be read", Err: err}
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return &StoreError{Path: path, What: "cannot be read", Err: err}
	}
	restore := "restore a backup into an empty data_dir"
	m, err := readMeta(f, fi.Size())
	switch {
	case fi.Size() == 0:
		return &StoreError{Path: path, What: "is empty", Try: restore}
	case errors.Is(err, errForeign):
		return &StoreError{Path: path, What: "is not a store of this service, nor any bbolt file", Try: "name another data_dir"}
	case errors.Is(err, errNewer):
		return &StoreError{Path: path, What: "is of a version of bbolt that this program does not know", Try: "run the newer program that wrote it"}
	case err != nil:
		return &StoreError{Path: path, What: "is damaged", Err: err, Try: restore}
	}
	w := &pageWalker{f: f, meta: m, seen: make([]uint64, m.pages/64+1)}
	if err := w.walk(); err != nil {
		return &StoreError{Path: path, What: "is damaged", Err: err, Try: restore}
	}
	return nil
}

var (
	errForeign = errors.New("no bbolt meta page")
	errNewer   = errors.New("unknown version")
)

// A boltMeta is what a meta page says.
type boltMeta struct {
	pageSize              int64
	root, freelist, pages uint64
	txid                  uint64
}

// readMeta finds the newer of the valid meta pages.
func readMeta(f io.ReaderAt, size int64) (boltMeta, error) {
	best, found := boltMeta{}, false
	worst := errForeign
	try := func(at int64) {
		b := make([]byte, pageHeader+metaSize)
		if _, err := f.ReadAt(b, at); err != nil {
			return
		}
		m, err := parseMeta(b[pageHeader:])
		switch {
		case err == nil && (!found || m.txid > best.txid):
			best, found = m, true
		case err != nil && worst == errForeign:
			worst = err
		}
	}
	try(0)
	if found {
		try(best.pageSize)
	} else {
		// The second meta page is one page on, and the size of a page is what the first would have said.
		for page := int64(1024); page <= 64<<10 && !found; page *= 2 {
			try(page)
		}
	}
	if !found {
		return boltMeta{}, worst
	}
	if int64(best.pages) > size/best.pageSize {
		return boltMeta{}, fmt.Errorf("it should have %d pages of %d bytes and has %d bytes: the end is missing", best.pages, best.pageSize, size)
	}
	if best.root < 2 || best.root >= best.pages {
		return boltMeta{}, fmt.Errorf("the root page %d is outside the file", best.root)
	}
	return best, nil
}

func parseMeta(b []byte) (boltMeta, error) {
	le := binary.LittleEndian
	if le.Uint32(b) != boltMagic {
		return boltMeta{}, errForeign
	}
	if le.Uint32(b[4:]) != boltVersion {
		return boltMeta{}, errNewer
	}
	h := fnv.New64a()
	h.Write(b[:56])
	if h.Sum64() != le.Uint64(b[56:]) {
		return boltMeta{}, errors.New("the checksum of a meta page is wrong")
	}
	m := boltMeta{pageSize: int64(le.Uint32(b[8:])), root: le.Uint64(b[16:]), freelist: le.Uint64(b[32:]), pages: le.Uint64(b[40:]), txid: le.Uint64(b[48:])}
	if m.pageSize < 512 || m.pageSize > 64<<10 || m.pageSize&(m.pageSize-1) != 0 {
		return boltMeta{}, fmt.Errorf("a page of %d bytes is not possible", m.pageSize)
	}
	return m, nil
}

// A pageWalker visits the pages of a file.
type pageWalker struct {
	f    io.ReaderAt
	meta boltMeta
	seen []uint64 // a bit a page
}

// A pageRef is a page to visit, and what its parent says about its keys: lo <= key < hi; nil: no bound.
type pageRef struct {
	id     uint64
	lo, hi []byte
}

func (w *pageWalker) walk() error {
	if w.meta.freelist != noFreelist {
		if err := w.freelist(w.meta.freelist); err != nil {
			return err
		}
	}
	for todo := []pageRef{{id: w.meta.root}}; len(todo) > 0; {
		at := todo[len(todo)-1]
		b, err := w.page(at.id)
		if err != nil {
			return err
		}
		below, err := visit(b, at, false)
		if err != nil {
			return fmt.Errorf("page %d: %w", at.id, err)
		}
		todo = append(todo[:len(todo)-1], below...)
	}
	return nil
}

// page reads a page with what overflows it, and marks them as seen.
func (w *pageWalker) page(id uint64) ([]byte, error) {
	if id < 2 || id >= w.meta.pages {
		return nil, fmt.Errorf("page %d is outside the file", id)
	}
	head := make([]byte, pageHeader)
	if _, err := w.f.ReadAt(head, int64(id)*w.meta.pageSize); err != nil {
		return nil, fmt.Errorf("page %d: %w", id, err)
	}
	if got := binary.LittleEndian.Uint64(head); got != id {
		return nil, fmt.Errorf("page %d says it is page %d", id, got)
	}
	n := uint64(binary.LittleEndian.Uint32(head[12:])) + 1
	if n > w.meta.pages-id {
		return nil, fmt.Errorf("page %d overflows the end of the file", id)
	}
	for p := id; p < id+n; p++ {
		if w.seen[p/64]&(1<<(p%64)) != 0 {
			return nil, fmt.Errorf("page %d is used twice", p)
		}
		w.seen[p/64] |= 1 << (p % 64)
	}
	b := make([]byte, int64(n)*w.meta.pageSize)
	if _, err := w.f.ReadAt(b, int64(id)*w.meta.pageSize); err != nil {
		return nil, fmt.Errorf("page %d: %w", id, err)
	}
	return b, nil
}

// freelist checks the list of free pages and marks them, so that none is used too.
func (w *pageWalker) freelist(id uint64) error {
	b, err := w.page(id)
	if err != nil {
		return err
	}
	le := binary.LittleEndian
	if le.Uint16(b[8:])&pageFreelist == 0 {
		return fmt.Errorf("page %d is no list of free pages", id)
	}
	n, ids := uint64(le.Uint16(b[10:])), b[pageHeader:]
	if n == 0xffff { // too many for the header
		n, ids = le.Uint64(ids), ids[8:]
	}
	if n > uint64(len(ids))/8 {
		return fmt.Errorf("page %d lists %d free pages and has no room for them", id, n)
	}
	for i := range n {
		p := le.Uint64(ids[i*8:])
		if p < 2 || p >= w.meta.pages {
			return fmt.Errorf("free page %d is outside the file", p)
		}
		if w.seen[p/64]&(1<<(p%64)) != 0 {
			return fmt.Errorf("page %d is free twice, or used", p)
		}
		w.seen[p/64] |= 1 << (p % 64)
	}
	return nil
}

// visit checks one page and returns the pages below it. An inline page is a bucket within a leaf.
func visit(b []byte, at pageRef, inline bool) ([]pageRef, error) {
	le := binary.LittleEndian
	flags, n := le.Uint16(b[8:]), int(le.Uint16(b[10:]))
	if pageHeader+n*elementSize > len(b) {
		return nil, fmt.Errorf("%d elements do not fit", n)
	}
	switch {
	case flags == pageLeaf:
	case flags == pageBranch && !inline && n > 0:
	default:
		return nil, fmt.Errorf("flags %#x do not belong in a tree", flags)
	}
	var below []pageRef
	var last []byte
	for i := range n {
		e := pageHeader + i*elementSize
		var pos, ksize, vsize uint64
		if flags == pageBranch {
			pos, ksize = uint64(le.Uint32(b[e:])), uint64(le.Uint32(b[e+4:]))
		} else {
			pos, ksize, vsize = uint64(le.Uint32(b[e+4:])), uint64(le.Uint32(b[e+8:])), uint64(le.Uint32(b[e+12:]))
		}
		start := uint64(e) + pos
		if pos < elementSize*uint64(n-i) || start+ksize+vsize > uint64(len(b)) {
			return nil, fmt.Errorf("element %d is outside the page", i)
		}
		key, value := b[start:start+ksize], b[start+ksize:start+ksize+vsize]
		if i > 0 && bytes.Compare(last, key) >= 0 {
			return nil, fmt.Errorf("element %d is out of order", i)
		}
		if at.hi != nil && bytes.Compare(key, at.hi) >= 0 || at.lo != nil && bytes.Compare(key, at.lo) < 0 {
			return nil, fmt.Errorf("element %d does not belong under its parent", i)
		}
		last = key
		if flags == pageBranch {
			if len(below) > 0 {
				below[len(below)-1].hi = key
			}
			below = append(below, pageRef{id: le.Uint64(b[e+8:]), lo: key, hi: at.hi})
			continue
		}
		if le.Uint32(b[e:])&leafBucket == 0 {
			continue
		}
		if inline { // bbolt keeps only buckets without buckets in a leaf, and nobody would look at this one's pages
			return nil, fmt.Errorf("element %d is a bucket within an inline one", i)
		}
		if len(value) < 16 { // root u64, sequence u64
			return nil, fmt.Errorf("element %d is too short for a bucket", i)
		}
		if root := le.Uint64(value); root != 0 {
			below = append(below, pageRef{id: root})
			continue
		}
		if len(value) < 16+pageHeader {
			return nil, fmt.Errorf("element %d is no bucket", i)
		}
		if _, err := visit(value[16:], pageRef{}, true); err != nil {
			return nil, fmt.Errorf("bucket in element %d: %w", i, err)
		}
	}
	return below, nil
}
