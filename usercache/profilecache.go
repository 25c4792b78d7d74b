package usercache

import (
	"math/bits"
	"sync/atomic"
	"unsafe"

	"github.com/sluice-dns/sluice/usercache/internal/store"
)

// A profileCache keeps Profiles as they were resolved, so that a device that asks again and again costs one
// copy. It is direct-mapped by the hash of the claim. An entry counts only while everything it was made of
// is still the same: the catalogue, the user's record, and the claims in that part of the index; so a change
// is answered by as soon as it is applied, and nothing has to be invalidated.
//
// Readers copy an entry out word by word and look at its sequence number before and after. Writers that find
// an entry being written let it be.
type profileCache struct {
	slots   []profileSlot
	details []atomic.Pointer[Details] // apart, so that the collector need not scan the slots
}

type profileSlot struct {
	seq atomic.Uint32 // odd while the slot is written
	// seen is the low half of the hash that last missed here. A profile is kept when it misses twice in a
	// row: of devices that ask once in a while nothing is worth keeping.
	seen  atomic.Uint32
	stamp [4]atomic.Uint64
	words [profileWords]atomic.Uint64
}

const (
	profileWords = unsafe.Sizeof(Profile{}) / 8
	detailsWord  = unsafe.Offsetof(Profile{}.Details) / 8
)

// A profileStamp is what a profile was made of.
type profileStamp struct {
	hash      uint64 // of the claim
	catalogue uint64 // serial
	version   uint32 // of the claims' table
	record    uint64 // stamp of the user's record
}

func (pc *profileCache) init(n int) {
	n = 1 << bits.Len(uint(max(n, 1)-1))
	pc.slots = make([]profileSlot, n)
	pc.details = make([]atomic.Pointer[Details], n)
}

// get fills in p from an entry that is still good. If it reports false, p may hold anything, except that its
// Details are valid.
func (pc *profileCache) get(st *profileStamp, records *store.Store, p *Profile) bool {
	i := st.hash & uint64(len(pc.slots)-1)
	s := &pc.slots[i]
	seq := s.seq.Load()
	if seq&1 != 0 || s.stamp[0].Load() != st.hash || s.stamp[1].Load() != st.catalogue || s.stamp[2].Load() != uint64(st.version) {
		return false
	}
	record := s.stamp[3].Load()
	to := (*[profileWords]uint64)(unsafe.Pointer(p))
	for w := range to {
		if w != int(detailsWord) {
			to[w] = s.words[w].Load()
		}
	}
	p.Details = pc.details[i].Load()
	return s.seq.Load() == seq && records.Stamp(p.User) == record
}

// put keeps a profile, if it is asked for the second time in a row.
func (pc *profileCache) put(st *profileStamp, p *Profile) {
	i := st.hash & uint64(len(pc.slots)-1)
	s := &pc.slots[i]
	if mark := uint32(st.hash >> 32); s.seen.Load() != mark {
		s.seen.Store(mark)
		return
	}
	seq := s.seq.Load()
	if seq&1 != 0 || !s.seq.CompareAndSwap(seq, seq+1) {
		return
	}
	s.stamp[0].Store(st.hash)
	s.stamp[1].Store(st.catalogue)
	s.stamp[2].Store(uint64(st.version))
	s.stamp[3].Store(st.record)
	from := (*[profileWords]uint64)(unsafe.Pointer(p))
	for w := range from {
		if w != int(detailsWord) {
			s.words[w].Store(from[w])
		}
	}
	pc.details[i].Store(p.Details)
	s.seq.Store(seq + 2)
}
