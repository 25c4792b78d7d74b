//go:build !linux || race

package arena

import "sync/atomic"

// The race detector sees only the Go heap, and other systems lack MADV_DONTNEED: there the same code runs
// on a slice.

func reserve(words int64) ([]uint64, error) { return make([]uint64, words), nil }

func release(words []uint64) {
	for i := range words {
		atomic.StoreUint64(&words[i], 0)
	}
}
