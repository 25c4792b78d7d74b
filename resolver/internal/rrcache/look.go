package rrcache

import (
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// A Held is an entry as it stands in the cache, for people who look.
type Held struct {
	Type     uint16      // 0 for the denial of a name
	Set      query.RRset // if Negative.Kind is NoKind
	Negative Negative
	Status   query.Status
	Rank     query.Rank
	Left     time.Duration // negative: so long past its end, and kept as stale data
	Cut      bool          // the grant of a zone by its parent
}

// Look returns what is held at a name in a view, of class IN and for no client subnet: of one type or, if typ
// is 0, of each below lookTypes and of TA and DLV. It counts neither as a hit nor as a miss.
func (c *Cache) Look(name dnsname.Name, typ uint16, view query.View, now clock.Instant) []Held {
	nameHash := c.hashName(name)
	var held []Held
	see := func(kind kind, typ uint16) {
		k := Key{Name: name, Type: typ, Class: dnswire.ClassIN, View: view}
		var kb keyBuf
		e, ok := c.read(nil, appendKey(kb[:0], kind, k), c.hash(nameHash, kind, k))
		if !ok || e.end() <= now && (kind == kindCut || e.end().Add(c.opts.MaxStale) <= now) {
			return
		}
		h := Held{Type: typ, Status: e.status(), Rank: e.rank(), Left: e.end().Sub(now), Cut: kind == kindCut}
		if e.negative() || kind == kindNX {
			h.Negative = e.denial(name, k.Class, kind, now)
		} else {
			h.Set, _ = e.set(k, now)
		}
		held = append(held, h)
	}
	see(kindNX, 0)
	if typ == 0 || typ == dnswire.TypeNS {
		see(kindCut, dnswire.TypeNS)
	}
	if typ != 0 {
		see(kindSet, typ)
		return held
	}
	for t := uint16(1); t < lookTypes; t++ {
		see(kindSet, t)
	}
	for t := uint16(32768); t <= 32769; t++ {
		see(kindSet, t)
	}
	return held
}

// lookTypes is beyond every type number given out so far but for two.
const lookTypes = 512
