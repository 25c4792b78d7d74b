package store

import (
	"math"
	"runtime"
	"sync/atomic"

	"github.com/sluice-dns/sluice/usercache/internal/offheap"
)

// A Table finds the ordinals that were entered under a 32-bit tag. The same tag may be entered many times;
// two keys may have the same tag: whoever finds an ordinal checks what it stands for. One goroutine writes;
// any number read at the same time, without locks, and never miss an entry that is present throughout.
//
// It is an open-addressing hash table with linear probing in which entries never move: removing leaves a
// tombstone, and when few slots are empty the whole is copied and published anew. An entry's home is
// proportional to its tag, so that a range of tags is a range of slots. 8 bytes a slot, 75 to 88 % full.
type Table struct {
	cur atomic.Pointer[slots]

	// Owned by the writer.
	live int // entries
	used int // entries and tombstones
}

// A slot is tag<<32 | ordinal+1; zero is empty.
type slots struct {
	words []uint64
	block *offheap.Block // keeps words alive
}

const (
	tombstone = 0x00000000_ffffffff

	// MaxOrdinal is the largest ordinal a Table can hold.
	MaxOrdinal = 0xffffffff - 2

	minSlots = 8
)

func home(tag uint32, n int) int { return int(uint64(tag) * uint64(n) >> 32) }

// Find starts a search for a tag.
func (t *Table) Find(tag uint32) Finder {
	s := t.cur.Load()
	if s == nil {
		return Finder{}
	}
	return Finder{s: s, tag: tag, at: home(tag, len(s.words)), left: len(s.words)}
}

// A Finder yields the ordinals under one tag.
type Finder struct {
	s    *slots
	tag  uint32
	at   int
	left int // slots not yet looked at
}

// Next returns the next ordinal.
func (f *Finder) Next() (ordinal uint32, ok bool) {
	for f.left > 0 {
		w := atomic.LoadUint64(&f.s.words[f.at])
		runtime.KeepAlive(f.s)
		f.left--
		if f.at++; f.at == len(f.s.words) {
			f.at = 0
		}
		if w == 0 {
			f.left = 0
			return 0, false
		}
		if uint32(w>>32) == f.tag && w != tombstone {
			return uint32(w) - 1, true
		}
	}
	return 0, false
}

// Len returns the number of entries. Only the writer may call it.
func (t *Table) Len() int { return t.live }

// Bytes returns the size of the table's memory.
func (t *Table) Bytes() int {
	if s := t.cur.Load(); s != nil {
		return len(s.words) * 8
	}
	return 0
}

// Add enters an ordinal under a tag. It fails only if there is no memory, and then changes nothing.
func (t *Table) Add(tag, ordinal uint32) error {
	_, err := t.AddBelow(tag, ordinal, math.MaxInt)
	return err
}

// AddBelow is Add, unless about limit ordinals have the tag already: then it enters nothing and reports
// false. It keeps a search short whatever the data.
func (t *Table) AddBelow(tag, ordinal uint32, limit int) (added bool, err error) {
	s := t.cur.Load()
	if s == nil || (t.used+1)*100 > len(s.words)*88 {
		if s, err = t.rebuild(t.live + 1); err != nil {
			return false, err
		}
	}
	for i, same := home(tag, len(s.words)), 0; ; {
		w := s.words[i]
		if w == 0 || w == tombstone {
			if w == 0 {
				t.used++
			}
			t.live++
			atomic.StoreUint64(&s.words[i], uint64(tag)<<32|uint64(ordinal+1))
			return true, nil
		}
		if uint32(w>>32) == tag {
			if same++; same >= limit {
				return false, nil
			}
		}
		if i++; i == len(s.words) {
			i = 0
		}
	}
}

// Remove takes one entry of the ordinal under the tag out, and reports whether there was one.
func (t *Table) Remove(tag, ordinal uint32) bool {
	s := t.cur.Load()
	if s == nil {
		return false
	}
	want := uint64(tag)<<32 | uint64(ordinal+1)
	i := home(tag, len(s.words))
	for range s.words {
		switch s.words[i] {
		case 0:
			return false
		case want:
			t.live--
			atomic.StoreUint64(&s.words[i], tombstone)
			return true
		}
		if i++; i == len(s.words) {
			i = 0
		}
	}
	return false
}

// AppendRange appends the ordinals of all tags from lo to hi, in no particular order. Only the writer may
// call it.
func (t *Table) AppendRange(dst []uint32, lo, hi uint32) []uint32 {
	s := t.cur.Load()
	if s == nil {
		return dst
	}
	n := len(s.words)
	first, last := home(lo, n), home(hi, n)
	for i := first; i < first+n; i++ {
		w := s.words[i%n]
		if w == 0 && i >= last {
			break
		}
		if w == 0 || w == tombstone {
			continue
		}
		if tag := uint32(w >> 32); tag >= lo && tag <= hi {
			dst = append(dst, uint32(w)-1)
		}
	}
	return dst
}

// Reserve makes room for n entries in all, so that a load does not grow step by step.
func (t *Table) Reserve(n int) error {
	if s := t.cur.Load(); s != nil && n*100 <= len(s.words)*88 {
		return nil
	}
	_, err := t.rebuild(n)
	return err
}

// rebuild publishes a copy with room for n entries at 75 %.
func (t *Table) rebuild(n int) (*slots, error) {
	size := max(minSlots, n*4/3+1)
	block, err := offheap.New(size * 8)
	if err != nil {
		return nil, err
	}
	to := &slots{words: block.Words(), block: block}
	if old := t.cur.Load(); old != nil {
		for _, w := range old.words {
			if w == 0 || w == tombstone {
				continue
			}
			i := home(uint32(w>>32), size)
			for to.words[i] != 0 {
				if i++; i == size {
					i = 0
				}
			}
			to.words[i] = w
		}
		old.block.Retire()
	}
	t.used = t.live
	t.cur.Store(to)
	return to, nil
}
