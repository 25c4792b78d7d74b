package filter

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
	"runtime"

	"github.com/sluice-dns/sluice/resolver/internal/filter/rulelist"
)

// A Memo remembers where in the tables of a Matcher the names last judged were found, so that names asked for all the
// time cost little more than their hash. What it remembers is the same whoever asks, and holds for one Matcher: a
// user's lists, and the query, are judged each time. It is for one goroutine; the zero Memo remembers nothing.
type Memo struct {
	kept  [1 << memoBits]known
	sight sight // for the name that is being judged
}

const memoBits = 11 // 64 KiB: more would not stay near

// known is where one name was found, the longest suffix first.
type known struct {
	key    uint64 // of name and Matcher
	slots  [3]uint32
	layers [3]uint8
	depths [3]uint8 // in labels
	n      uint8
}

// Match is m.MatchHashed. A nil Memo does for it too.
func (c *Memo) Match(m *Matcher, name []byte, hashes []uint64, lists *Set, q *Query) Result {
	// Rules for clients come before names, and names of more labels are rare.
	if c == nil || len(hashes) == 0 || len(hashes) > 64 || m.triggers[rulelist.ByClient] != (prefixSizes{}) {
		return m.MatchHashed(name, hashes, lists, q)
	}
	if k := c.find(m, hashes[len(hashes)-1]); k != nil {
		return m.recall(k, name, len(hashes), lists, q)
	}
	var s *sight
	if m.looks(hashes) {
		s = &c.sight
	}
	suffixes, seen := m.sift(s, name, hashes)
	if now, ok := m.know(seen, suffixes, hashes, q); ok {
		c.keep(m, hashes[len(hashes)-1], now)
	}
	runtime.KeepAlive(m)
	if suffixes == 0 && seen == nil {
		return Result{}
	}
	return m.match(seen, suffixes, name, hashes, lists, q)
}

// MatchAddr is m.MatchAddr. Of addresses it remembers those that no rule knows.
func (c *Memo) MatchAddr(m *Matcher, addr netip.Addr, lists *Set, q *Query) Result {
	if c == nil {
		return m.MatchAddr(addr, lists, q)
	}
	b := addr.As16()
	hash := m.key.Start().Word(binary.LittleEndian.Uint64(b[:8])).Word(binary.LittleEndian.Uint64(b[8:])).Word(^uint64(0)).Sum()
	if c.find(m, hash) != nil {
		return Result{}
	}
	r := m.MatchAddr(addr, lists, q)
	if r.Verdict == None && m.strange(addr, q) {
		c.keep(m, hash, known{})
	}
	return r
}

// strange reports that no rule knows an address, whoever asks. Finding out is q's to pay.
func (m *Matcher) strange(addr netip.Addr, q *Query) bool {
	var buf [64]byte
	name := rulelist.AppendAddr(buf[:0], addr.Unmap())
	hash := [1]uint64{m.key.Hash(name)}
	if m.may(hash[:]) != 0 || m.longest(rulelist.ByAnswer, addr, &all, &Query{}) >= 0 {
		return false
	}
	known := false
	if m.looks(hash[:]) {
		var s sight
		m.rules.take(&s, name)
		known = m.rules.look(&s, name, hash[:]) && m.rules.any(&s, hash[:], q)
	}
	runtime.KeepAlive(m)
	return !known
}

// keyOf stands for a name and a Matcher: if two have the same, so have 63 bits of keyed hashes.
func (m *Matcher) keyOf(hash uint64) uint64 { return (hash ^ m.generation*spread8) | 1 }

// find returns what is known of a name, or nil.
func (c *Memo) find(m *Matcher, hash uint64) *known {
	key := m.keyOf(hash)
	if k := &c.kept[key>>(64-memoBits)]; k.key == key {
		return k
	}
	return nil
}

func (c *Memo) keep(m *Matcher, hash uint64, k known) {
	k.key = m.keyOf(hash)
	c.kept[k.key>>(64-memoBits)] = k
}

// know finds out what can be remembered of a name, at q's cost. It reports false if that would not tell all: rules that
// are not in tables meet the name, or several tables have its suffix, whose rules may disable each other.
func (m *Matcher) know(s *sight, suffixes uint64, hashes []uint64, q *Query) (k known, ok bool) {
	for ; suffixes != 0; suffixes &^= 1 << (bits.Len64(suffixes) - 1) {
		at := bits.Len64(suffixes) - 1
		for i := range m.layers {
			slot, ok := m.layers[i].find(hashes[at])
			if !ok {
				continue
			}
			if int(k.n) == len(k.slots) || k.n > 0 && k.depths[k.n-1] == uint8(at+1) {
				return k, false
			}
			k.slots[k.n], k.layers[k.n], k.depths[k.n] = uint32(slot), uint8(i), uint8(at+1)
			k.n++
		}
	}
	return k, s == nil || !m.rules.any(s, hashes, q)
}

// recall judges a name of so many labels by what is known.
func (m *Matcher) recall(k *known, name []byte, labels int, lists *Set, q *Query) Result {
	if k.n == 0 {
		return Result{}
	}
	var j judgement
	j.q, j.lists = q, lists
	if lists == nil {
		j.lists = &all
	}
	for i := range k.n {
		l := &m.layers[k.layers[i]]
		s := l.slots[k.slots[i]]
		j.depth = k.depths[i]
		l.eval(&j, s, int(j.depth) == labels, l.voids(s, j.lists))
	}
	r := j.finish(m, name)
	runtime.KeepAlive(m)
	return r
}
