package filter

import (
	"os"
	"runtime"
	"sync/atomic"
	"unsafe"
)

// A region is memory for one big part of an index: 64-bit words, zero at first. From offHeap bytes on it lies
// outside the Go heap, where it neither costs the garbage collector work nor doubles its next goal.
//
// A region is given back when nothing refers to it any more. Slices of its words are no such reference: who
// works on them keeps the Matcher or the region alive until he is done (runtime.KeepAlive).
type region struct {
	words  []uint64
	mapped bool
	undo   runtime.Cleanup
}

// offHeap is the size from which regions lie outside the Go heap. Private lists and custom rules, of which
// there may be a million, stay below it: a mapping costs at least a page and a system call.
const offHeap = 1 << 20

// mapped counts the bytes of regions outside the Go heap.
var mapped atomic.Int64

func newRegion(words int) *region {
	r := &region{}
	if words*8 >= offHeap {
		if w, ok := mapWords(words); ok {
			r.own(w)
			return r
		}
	}
	r.words = make([]uint64, words)
	return r
}

// own makes the words, a mapping, the region's.
func (r *region) own(w []uint64) {
	mapped.Add(int64(len(w)) * 8)
	r.words, r.mapped = w, true
	r.undo = runtime.AddCleanup(r, func(m mapping) {
		mapped.Add(-int64(m.words) * 8)
		unmapWords(m)
	}, mapping{unsafe.Pointer(unsafe.SliceData(w)), len(w)})
}

// disown takes the words from the region.
func (r *region) disown() []uint64 {
	if r.mapped {
		r.undo.Stop()
		mapped.Add(-int64(len(r.words)) * 8)
	}
	w := r.words
	r.words, r.mapped = nil, false
	return w
}

// A mapping is what a cleanup may know of words: where they are.
type mapping struct {
	at    unsafe.Pointer
	words int
}

// resize makes the region that many words long and keeps those that stay. Slices of the old words are void.
func (r *region) resize(words int) {
	wasMapped := r.mapped
	old := r.disown()
	if wasMapped {
		if words < len(old) {
			clear(old[words:min(len(old), words+os.Getpagesize()/8)]) // the rest of the last page stays
		}
		if w, ok := remapWords(old, words); ok {
			r.own(w)
			return
		}
	}
	n := newRegion(words)
	copy(n.words, old)
	if wasMapped {
		unmapWords(mapping{unsafe.Pointer(unsafe.SliceData(old)), len(old)})
	}
	if n.mapped {
		r.own(n.disown())
	} else {
		r.words = n.words
	}
}

// huge asks for huge pages, for an index that is read at random: with small ones most look-ups miss the TLB.
func (r *region) huge() {
	if r.mapped && len(r.words)*8 >= hugePage {
		adviseHuge(r.words)
	}
}

const (
	hugePage = 2 << 20
	// someMemory is worth to be given back by itself where there are no huge pages.
	someMemory = 256 << 10
)

// pieces cuts a mapping at the multiples of so many bytes, a power of two, into regions that are given back one by
// one. What r is of any other memory is one piece, itself; otherwise r is void.
func (r *region) pieces(size uintptr) []*region { return r.cut(stretch{len(r.words), size}) }

// A stretch is a part of a region, up to a word, that is cut into pieces of its own size.
type stretch struct {
	to   int
	size uintptr
}

// cut is pieces for a region whose parts are cut each in its way. A page on the border of two is the former's.
func (r *region) cut(parts ...stretch) (pieces []*region) {
	if !r.mapped {
		return []*region{r}
	}
	words := r.disown()
	page := os.Getpagesize() / 8
	from := 0
	for _, part := range parts {
		for to := min(len(words), (part.to+page-1)/page*page); from < to; {
			n := min(to-from, int(part.size-addressOf(words[from:])%part.size)/8)
			p := &region{}
			p.own(words[from : from+n : from+n])
			pieces = append(pieces, p)
			from += n
		}
	}
	return pieces
}

// addressOf returns where words lie.
func addressOf(w []uint64) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(w))) }

// inside reports whether all of the region is among some bytes.
func (r *region) inside(b []byte) bool {
	from := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	at := addressOf(r.words)
	return from <= at && at+uintptr(len(r.words))*8 <= from+uintptr(len(b))
}

// touching returns those regions that hold some of the words of w.
func touching(mem []*region, w []uint64) []*region {
	from, to := addressOf(w), addressOf(w)+uintptr(len(w))*8
	var some []*region
	for _, r := range mem {
		if at := addressOf(r.words); at < to && from < at+uintptr(len(r.words))*8 {
			some = append(some, r)
		}
	}
	return some
}

// free gives the memory back now, when nobody can be reading it.
func (r *region) free() {
	if r != nil && r.mapped {
		w := r.disown()
		unmapWords(mapping{unsafe.Pointer(unsafe.SliceData(w)), len(w)})
	}
}

// extend returns s, which is empty or all that is in mem, with room for n more.
func extend[T any](mem **region, s []T, n int) []T {
	if n <= cap(s)-len(s) {
		return s
	}
	words := wordsFor[T](max(len(s)+n, 2*len(s), 64))
	if *mem == nil {
		*mem = newRegion(words)
	} else {
		(*mem).resize(words)
	}
	if words*8 >= 8*hugePage { // so that a page too much is no great part of it
		(*mem).huge()
	}
	return castSlice[T]((*mem).words)[:len(s)]
}

// castSlice is words as something else, of a size that divides eight or is a multiple of it.
func castSlice[T any](w []uint64) []T {
	if len(w) == 0 {
		return nil
	}
	var t T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(w))), len(w)*8/int(unsafe.Sizeof(t)))
}

// A cutter cuts a region into slices.
type cutter struct{ rest []uint64 }

func (c *cutter) words(n int) []uint64 {
	w := c.rest[:n:n]
	c.rest = c.rest[n:]
	return w
}

// cut returns the next n values, which begin at a word.
func cut[T any](c *cutter, n int) []T {
	return castSlice[T](c.words(wordsFor[T](n)))[:n:n]
}

// wordsFor returns how many words n values take.
func wordsFor[T any](n int) int {
	var t T
	return (n*int(unsafe.Sizeof(t)) + 7) / 8
}

// bytesOf returns values as the bytes they lie in memory as.
func bytesOf[T any](s []T) []byte {
	var t T
	if len(s) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(t)))
}
