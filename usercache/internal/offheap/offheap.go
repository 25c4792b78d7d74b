// Package offheap gives byte storage outside the Go heap.
//
// Records and their index are gigabytes that the garbage collector need not scan and whose size must not
// move its next goal. A Block is anonymous memory behind a small handle. Whoever reads the memory keeps the
// handle reachable; when the last one lets go, the garbage collector runs the handle's cleanup, which
// returns the memory to the system. Nothing is reused, so a reader can never see another's data.
//
// Blocks below a threshold are ordinary slices: a mapping has the granularity of a page and the kernel
// allows 65,530 of them. Under the race detector, which is blind to memory mapped behind its back, all
// blocks are.
//
// The memory of a Block must be reached through a local copy of the handle that stays alive, as by
// runtime.KeepAlive, until the last access.
package offheap

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapAbove is the size from which a Block is mapped: sixteen pages, so that rounding wastes little.
const mapAbove = 64 << 10

// A Block is zeroed memory of a fixed size.
type Block struct {
	mem     []byte
	mapping *mapping // nil for a slice
}

// A mapping is what remains to be undone when its Block is gone.
type mapping struct {
	mem     []byte
	retired atomic.Bool
}

var mapped, retired atomic.Int64

// Mapped returns how many bytes are mapped now, including those whose readers have let go but which the
// garbage collector has not yet seen.
func Mapped() int64 { return mapped.Load() }

// Retired returns how many bytes of mapped memory have been retired and wait for their readers and the
// garbage collector.
func Retired() int64 { return retired.Load() }

// Retire says that the owner has let go of the block. It does not touch the memory, which readers may still
// hold; it lets Retired tell how much a collection would free.
func (b *Block) Retire() {
	if b.mapping != nil && b.mapping.retired.CompareAndSwap(false, true) {
		retired.Add(int64(len(b.mem)))
	}
}

// New returns a zeroed block of size bytes. It fails if the system has no memory to give.
func New(size int) (*Block, error) {
	if size < mapAbove || onHeap {
		// Backed by words so that Words is aligned.
		words := make([]uint64, (size+7)/8)
		return &Block{mem: unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), len(words)*8)[:size:size]}, nil
	}
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("mapping %d bytes for user data: %w", size, err)
	}
	mapped.Add(int64(size))
	b := &Block{mem: mem, mapping: &mapping{mem: mem}}
	runtime.AddCleanup(b, (*mapping).undo, b.mapping)
	return b, nil
}

func (m *mapping) undo() {
	mapped.Add(-int64(len(m.mem)))
	if m.retired.Load() {
		retired.Add(-int64(len(m.mem)))
	}
	// Cannot fail for a mapping that exists; if it did there would be nothing to do but leak.
	_ = unix.Munmap(m.mem)
}

// Bytes returns the memory of the block, valid while the block is reachable.
func (b *Block) Bytes() []byte { return b.mem }

// Words returns the memory as 64-bit words; a remainder below eight bytes is left out.
func (b *Block) Words() []uint64 {
	return unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b.mem))), len(b.mem)/8)
}

// Words32 returns the memory as 32-bit words.
func (b *Block) Words32() []uint32 {
	return unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(b.mem))), len(b.mem)/4)
}
