package filter

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// A multimap finds rules by a number. Its filter answers most searches, which fail, from one word.
type multimap struct {
	filter []uint64 // a power of two of them
	shift  uint8    // of a hash, to index filter
	mul    uint64   // odd; see home
	place  uint8    // how far to shift a product, to index keys
	keys   []multikey
	ids    []uint32
}

type multikey struct {
	key      uint64
	pairs    uint64 // that all its rules need: see pairset
	from, to uint32 // of ids; free if equal
}

type pair struct {
	key uint64
	id  uint32
}

// pairs are what a multimap is made of. They lie in memory of their own that is given back when it is.
type pairs struct {
	mem      *region
	all      []pair
	distinct int // keys
}

func (p *pairs) add(key uint64, id uint32) { p.all = append(extend(&p.mem, p.all, 1), pair{key, id}) }

// settle puts the pairs in order. It returns the rules that are left out because their key has maxCrowd others.
func (p *pairs) settle(rules []rule) (over []uint32) {
	slices.SortStableFunc(p.all, func(a, b pair) int { return cmp.Compare(a.key, b.key) })
	ps := slices.Compact(p.all)
	kept := ps[:0]
	for i, n := 0, 0; i < len(ps); i = n {
		for n = i + 1; n < len(ps) && ps[n].key == ps[i].key; n++ {
		}
		crowd := ps[i:n]
		if len(crowd) > maxCrowd {
			takeTurns(crowd, rules)
			for _, p := range crowd[maxCrowd:] {
				over = append(over, p.id)
			}
			crowd = crowd[:maxCrowd]
		}
		kept = append(kept, crowd...)
	}
	p.all = kept
	for i := range kept {
		if i == 0 || kept[i].key != kept[i-1].key {
			p.distinct++
		}
	}
	return over
}

// takeTurns puts rules in such an order that each list has its first before any has its second, and so on: a list whose
// author has crowded a key loses by that, and no other.
func takeTurns(crowd []pair, rules []rule) {
	slices.SortFunc(crowd, func(a, b pair) int {
		r, o := &rules[a.id], &rules[b.id]
		return cmp.Or(cmp.Compare(r.list, o.list), cmp.Compare(r.line, o.line), cmp.Compare(a.id, b.id))
	})
	turns, had := make(map[uint32]int, len(crowd)), [MaxLists]int{}
	for _, p := range crowd {
		list := rules[p.id].list
		turns[p.id] = had[list]
		had[list]++
	}
	slices.SortStableFunc(crowd, func(a, b pair) int { return cmp.Compare(turns[a.id], turns[b.id]) })
}

// size returns the lengths of the multimap's filter and keys.
func (p *pairs) size() (filter, keys int) {
	if p.distinct == 0 {
		return 0, 0
	}
	// Sixteen bits of filter a key or more, of which a key sets three: of absent keys one in 300 passes.
	return 1 << bits.Len(uint(p.distinct/4)), 1 << bits.Len(uint(p.distinct*3/2))
}

// words returns how many the multimap takes.
func (p *pairs) words() int {
	filter, keys := p.size()
	return filter + wordsFor[multikey](keys) + wordsFor[uint32](len(p.all))
}

// multimap makes one in the next of some memory, which is zero, for the rules of x.
func (p *pairs) multimap(c *cutter, x *ruleSet, mul uint64) (m multimap) {
	filter, keys := p.size()
	if keys == 0 {
		return m
	}
	ps := p.all
	m = multimap{filter: c.words(filter), shift: uint8(64 - bits.TrailingZeros(uint(filter))), keys: cut[multikey](c, keys), ids: cut[uint32](c, len(ps))}
	m.setPlaces(mul)
	for i := 0; i < len(ps); {
		k := multikey{key: ps[i].key, pairs: ^uint64(0), from: uint32(i)}
		for ; i < len(ps) && ps[i].key == k.key; i++ {
			m.ids[i] = ps[i].id
			k.pairs &= x.needed(&x.all[ps[i].id])
		}
		k.to = uint32(i)
		h := spread(k.key)
		m.filter[h>>(m.shift&63)&uint64(len(m.filter)-1)] |= filterBits(h)
		at := m.home(k.key)
		for m.keys[at].from != m.keys[at].to {
			at = m.after(at)
		}
		m.keys[at] = k
	}
	return m
}

// setPlaces says where keys are looked for.
func (m *multimap) setPlaces(mul uint64) {
	m.mul, m.place = mul, uint8(64-bits.Len(uint(max(len(m.keys), 1)-1)))
}

// multiplier is what decides where keys are kept.
func multiplier(key *dnsname.Key) uint64 { return key.Start().Word(spread8).Sum() | 1 }

// home is where the search for a key begins. Whoever writes rules chooses the keys, but not where they come to lie: the
// multiplier is secret, and of two keys that do not depend on it the upper bits agree as rarely as by chance.
func (m *multimap) home(key uint64) uint64 { return (key ^ key>>29) * m.mul >> m.place }

// after is the place behind one.
func (m *multimap) after(at uint64) uint64 { return (at + 1) & uint64(len(m.keys)-1) }

// spread makes the upper bits of a key's hash good ones.
func spread(key uint64) uint64 { return (key ^ key>>29) * spread8 }

// filterBits are the three bits of a filter word that a key sets.
func filterBits(h uint64) uint64 { return 1<<(h>>32&63) | 1<<(h>>26&63) | 1<<(h>>20&63) }

// A gate is a multimap's filter, also of one that is empty.
type gate struct {
	filter []uint64
	shift  uint8
}

func (m *multimap) gate() gate {
	if len(m.ids) == 0 {
		return gate{filter: make([]uint64, 1)}
	}
	return gate{m.filter, m.shift}
}

// may returns 1 if a key whose hash is h may be there, and 0 otherwise.
func (g *gate) may(h uint64) uint64 {
	missing := filterBits(h) &^ g.filter[h>>(g.shift&63)&uint64(len(g.filter)-1)]
	return 1 ^ (missing|-missing)>>63
}

// find returns the rules of a key, unless none can match a text that has just these pairs.
func (m *multimap) find(key, pairs uint64) []uint32 {
	if len(m.ids) == 0 {
		return nil
	}
	for at := m.home(key); ; at = m.after(at) {
		k := &m.keys[at]
		if k.from == k.to {
			return nil
		}
		if k.key == key {
			if k.pairs&^pairs != 0 {
				return nil
			}
			return m.ids[k.from:k.to]
		}
	}
}

// A bitmap is a filter that costs little to ask, for the places of a name are many: of two bits a key in 64 bits
// or more, as far as 64 KiB allow.
type bitmap struct {
	bits  []uint64 // at least one
	shift uint8
}

func newBitmap(m *multimap) bitmap {
	n := len(m.ids)
	if n == 0 {
		return bitmap{make([]uint64, 1), 0}
	}
	k := min(bits.Len(uint(n))+6, 19) - 6
	b := bitmap{make([]uint64, 1<<k), uint8(64 - k)}
	for _, key := range m.keys {
		if key.from != key.to {
			h := key.key * spread8
			b.bits[h>>(b.shift&63)&uint64(len(b.bits)-1)] |= 1<<(h>>45&63) | 1<<(h>>39&63)
		}
	}
	return b
}

const spread8 = 0x9e3779b97f4a7c15

// has reports, in the last bit, whether there may be the key.
func (b *bitmap) has(key uint64) uint64 {
	h := key * spread8
	w := b.bits[h>>(b.shift&63)&uint64(len(b.bits)-1)]
	return w >> (h >> 45 & 63) & (w >> (h >> 39 & 63))
}
