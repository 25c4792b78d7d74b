//go:build linux && !race

package filter

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

func mapWords(words int) ([]uint64, bool) {
	b, err := unix.MmapPtr(-1, 0, nil, uintptr(words)*8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, false
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
