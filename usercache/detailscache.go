package usercache

import (
	"sync/atomic"
	"unsafe"

	"github.com/sluice-dns/sluice/usercache/internal/store"
)

// A detailsCache keeps the merged Details of devices that have their own, within a budget of bytes. A device has
// two slots side by side, which it may have to share; what has not been asked for since a hand last passed it goes
// when the budget is spent (the second-chance algorithm). It takes no lock: an entry is taken out by whoever swaps
// or clears its slot, who then subtracts its bytes.
type detailsCache struct {
	slots  []atomic.Pointer[detailsEntry]
	budget int64
	bytes  atomic.Int64
	hand   atomic.Uint64
}

type detailsEntry struct {
	user      uint32
	used      atomic.Bool
	device    ID
	revision  uint64
	catalogue uint64 // serial: an entry nobody asks for again must not keep an old catalogue alive
	details   *Details
	bytes     int64
}

// detailsSlotShare is how many bytes of budget there are to a slot. Few Details take so little, so that the budget
// is spent before the slots are.
const detailsSlotShare = 256

func (dc *detailsCache) init(budget int64) {
	dc.budget = budget
	dc.slots = make([]atomic.Pointer[detailsEntry], 2*max(budget/(2*detailsSlotShare), 1))
}

func (dc *detailsCache) get(cat *Catalogue, r *store.Record, device []byte, p *Profile) *Details {
	h := (uint64(p.User)<<32 ^ uint64(p.DeviceID.n)<<16 ^ uint64(p.DeviceID.b[0])<<8 ^ uint64(p.DeviceID.b[max(p.DeviceID.n, 1)-1])) * 0x9e3779b97f4a7c15
	i := (h >> 32) % uint64(len(dc.slots)/2) * 2
	// The new entry takes the place of the device's older one; else of none; else of one not asked for lately.
	at, worth := &dc.slots[i], 3
	for k := range 2 {
		s := &dc.slots[i+uint64(k)]
		e, w := s.Load(), 0
		switch {
		case e == nil:
			w = 1
		case e.user != p.User || e.device != p.DeviceID:
			if w = 2; e.used.Load() {
				w = 3
			}
		case e.revision == p.Revision && e.catalogue == cat.serial:
			if !e.used.Load() { // so that a line that all workers read is written once a round
				e.used.Store(true)
			}
			return e.details
		}
		if w < worth {
			at, worth = s, w
		}
	}
	e := &detailsEntry{user: p.User, device: p.DeviceID, revision: p.Revision, catalogue: cat.serial, details: cat.detailsOf(r.Bytes, device)}
	if e.details.isEmpty() {
		e.details = nil
	}
	e.bytes = int64(unsafe.Sizeof(*e)) + e.details.bytes()
	dc.put(at, e)
	return e.details
}

func (dc *detailsCache) put(at *atomic.Pointer[detailsEntry], e *detailsEntry) {
	dc.bytes.Add(e.bytes)
	if old := at.Swap(e); old != nil {
		dc.bytes.Add(-old.bytes)
	}
	// Twice around: once to take all their chance, once to take them out.
	for left := 2 * len(dc.slots); dc.bytes.Load() > dc.budget && left > 0; left-- {
		s := &dc.slots[dc.hand.Add(1)%uint64(len(dc.slots))]
		if e := s.Load(); e != nil && !e.used.Swap(false) && s.CompareAndSwap(e, nil) {
			dc.bytes.Add(-e.bytes)
		}
	}
}

// bytes returns about how much memory the Details take, what is compiled of them apart.
func (d *Details) bytes() int64 {
	if d == nil {
		return 0
	}
	const text = 16
	n := int64(unsafe.Sizeof(*d)) + int64(len(d.Name)+len(d.Policy))
	for _, l := range d.OwnLists {
		n += int64(unsafe.Sizeof(l)) + int64(len(l.ID))
	}
	for i := range d.Schedules {
		s := &d.Schedules[i]
		n += int64(unsafe.Sizeof(*s)) + int64(len(s.ID)) + int64(len(s.Windows))*int64(unsafe.Sizeof(Window{}))
	}
	for _, r := range d.Rewrites {
		n += int64(unsafe.Sizeof(r)) + int64(len(r.Name))
		for _, v := range r.Records {
			n += text + int64(len(v))
		}
	}
	for _, u := range d.Unblocks {
		n += int64(unsafe.Sizeof(u)) + int64(len(u.Name))
	}
	for _, texts := range [...][]string{d.AllowDomains, d.DenyDomains, d.RebindingExceptions, d.BlockTypes, d.Tags} {
		for _, t := range texts {
			n += text + int64(len(t))
		}
	}
	return n + 32*int64(len(d.AllowNetworks)+len(d.DenyNetworks))
}
