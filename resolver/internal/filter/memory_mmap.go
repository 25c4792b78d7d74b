//go:build linux && !race

package filter

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapWords maps memory; if it is large enough for a huge page, from where one may begin.
func mapWords(words int) ([]uint64, bool) {
	size, over := uintptr(words)*8, uintptr(0)
	if size >= hugePage {
		over = hugePage
	}
	b, err := unix.MmapPtr(-1, 0, nil, size+over, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, false
	}
	if over > 0 {
		page := uintptr(os.Getpagesize())
		end := (size + page - 1) &^ (page - 1)
		skip := -uintptr(b) & (hugePage - 1)
		if skip > 0 {
			_ = unix.MunmapPtr(b, skip) // of a mapping of ours, as below
		}
		b = unsafe.Add(b, skip)
		if rest := over - skip; rest > 0 {
			_ = unix.MunmapPtr(unsafe.Add(b, end), rest)
		}
	}
	return unsafe.Slice((*uint64)(b), words), true
}

// remapWords moves pages rather than bytes, so that growing needs no second copy.
func remapWords(w []uint64, words int) ([]uint64, bool) {
	b, err := unix.MremapPtr(unsafe.Pointer(unsafe.SliceData(w)), uintptr(len(w))*8, nil, uintptr(words)*8, unix.MREMAP_MAYMOVE)
	if err != nil {
		return nil, false
	}
	return unsafe.Slice((*uint64)(b), words), true
}

func adviseHuge(w []uint64) { _ = unix.Madvise(castSlice[byte](w), unix.MADV_HUGEPAGE) } // kernels without it say EINVAL

func unmapWords(m mapping) {
	_ = unix.MunmapPtr(m.at, uintptr(m.words)*8) // of a mapping of ours
}
