package rrcache

import (
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
)

// maxRare bounds how many types of a name are kept that are not common ones, data and denials alike; the common
// ones are fewer than 50, so that a name has at most 100 (CVE-2024-1737 and its like). Whoever asks
// for more types of a name fills the cache with what nobody else asks for.
const maxRare = 50

// commonTypes are those with a use in today's DNS; the bit of type t is t%64 of word t/64.
var commonTypes = func() (bits [5]uint64) {
	for _, t := range [...]uint16{
		1, 2, 5, 6, 12, 13, 15, 16, 17, 18, 24, 25, 28, 29, 33, 35, 36, 37, 39, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52,
		53, 55, 59, 60, 61, 62, 63, 64, 65, 66, 99, 108, 109, 256, 257, 261,
	} {
		bits[t/64] |= 1 << (t % 64)
	}
	return bits
}()

func common(typ uint16) bool {
	return int(typ/64) < len(commonTypes) && commonTypes[typ/64]>>(typ%64)&1 != 0
}

// A rarities counts, roughly, the rare types stored of each name: names share its counters, which start anew
// every hour. Where they are full, rare types are not kept: they are asked for again.
type rarities [1024]atomic.Uint32

// room reports whether one more may be stored, and counts it.
func (r *rarities) room(k Key, nameHash uint64, now clock.Instant) bool {
	if k.Type == dnswire.TypeANY || common(k.Type) {
		return true
	}
	slot := &r[nameHash%uint64(len(r))]
	hour := uint32(now/clock.Instant(time.Hour)) << 8
	for {
		v := slot.Load()
		n := v & 0xff
		if v&^0xff != hour {
			n = 0
		}
		if n >= maxRare {
			return false
		}
		if slot.CompareAndSwap(v, hour|(n+1)) {
			return true
		}
	}
}
