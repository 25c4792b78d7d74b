//go:build linux && !race

package arena

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hugePage is the size from which transparent huge pages are asked for: an index is read at random, and
// with small pages most look-ups miss the TLB.
const hugePage = 2 << 20

func reserve(words int64) ([]uint64, error) {
	if words == 0 {
		return nil, nil
	}
	b, err := unix.Mmap(-1, 0, int(words*8), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	if len(b) >= hugePage {
		_ = unix.Madvise(b, unix.MADV_HUGEPAGE) // advice only: kernels without it say EINVAL
	}
	return unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), words), nil
}

func release(words []uint64) {
	page := uintptr(os.Getpagesize())
	from := uintptr(unsafe.Pointer(unsafe.SliceData(words)))
	skip := (page - from%page) % page
	size := uintptr(len(words) * 8)
	if size < skip+page {
		return
	}
	b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), size)
	_ = unix.Madvise(b[skip:skip+(size-skip)/page*page], unix.MADV_DONTNEED) // cannot fail on a mapping of ours
}
