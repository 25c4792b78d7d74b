package arena

import (
	"fmt"
	"sync/atomic"
)

// A Memory is a range of 64-bit words outside the Go heap, all zero at first. It is reserved at once and
// becomes resident as it is written. It is never unmapped while the process lives, so a late reader finds
// zeros or other data, never a fault.
type Memory struct {
	words []uint64
}

// Reserve returns a Memory of at least the given number of bytes. It panics if the address space is refused,
// which happens at start or not at all: there is no serving without caches.
func Reserve(bytes int64) *Memory {
	if bytes < 0 {
		panic(fmt.Sprintf("arena: %d bytes asked for", bytes))
	}
	w, err := reserve((bytes + 7) / 8)
	if err != nil {
		panic(fmt.Sprintf("arena: reserving %d bytes: %v; lower the cache size or raise the limit on address space", bytes, err))
	}
	return &Memory{words: w}
}

// Words returns the whole range. Words that readers may look at while they are written must be written and
// read with the functions of sync/atomic; Copy does so.
func (m *Memory) Words() []uint64 { return m.words }

// Release gives the pages that lie wholly inside words from..to back to the system; they read as zero from
// now on and become resident again when written. Other words of the range become zero or stay.
func (m *Memory) Release(from, to int) { release(m.words[from:to]) }

// Copy copies words out by atomic loads, as little-endian bytes, until dst is full. Words must hold
// (len(dst)+7)/8 words at least.
func Copy(dst []byte, words []uint64) {
	n := len(dst) / 8
	words = words[:(len(dst)+7)/8]
	for i := range words[:n] {
		put64(dst[i*8:i*8+8], atomic.LoadUint64(&words[i]))
	}
	if rest := dst[n*8:]; len(rest) > 0 {
		w := atomic.LoadUint64(&words[n])
		for i := range rest {
			rest[i] = byte(w >> (8 * i))
		}
	}
}

// store writes bytes, zeros behind them, by atomic stores: the counterpart of Copy.
func store(words []uint64, src []byte) {
	n := len(src) / 8
	for i := range n {
		atomic.StoreUint64(&words[i], get64(src[i*8:i*8+8]))
	}
	if rest := src[n*8:]; len(rest) > 0 {
		var w uint64
		for i, c := range rest {
			w |= uint64(c) << (8 * i)
		}
		atomic.StoreUint64(&words[n], w)
	}
}
