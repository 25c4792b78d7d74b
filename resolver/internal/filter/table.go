package filter

import (
	"cmp"
	"encoding/binary"
	"math/bits"
	"slices"
	"unsafe"

	"github.com/sluice-dns/sluice/resolver/internal/filter/rulelist"
)

// A posting is one rule that a suffix and its kind tell completely, on its way into a table. The order of
// postings is that of their fields.
type posting struct {
	hash uint64 // of the suffix; never 0
	at   uint64 // kind << 41 | list << 32 | line
}

// A kind is form << 3 | allow << 2 | important << 1 | bad, in seven bits. Rules that differ in the last bit
// alone are twins.
type kind uint8

func kindOf(r *rulelist.Rule) kind {
	k := kind(r.Form) << 3
	if r.Allow {
		k |= 4
	}
	if r.Important {
		k |= 2
	}
	if r.Bad {
		k |= 1
	}
	return k
}

func (k kind) form() rulelist.Form { return rulelist.Form(k >> 3) }

// kinds says of each kind what matching needs.
var kinds = func() (t [128]struct {
	scope rulelist.Scope
	rank  uint8 // 0 for hosts lines
	zone  bool
}) {
	for i := range t {
		k := kind(i)
		t[i].scope, t[i].zone = k.form().Scope(), k.form().IsZone()
		if !k.form().IsHost() {
			t[i].rank = rank(k&4 != 0, k&2 != 0)
		}
	}
	return t
}()

// A table holds postings by hash, in order of hash: slot i lies at or after its hash's share of span, so a
// search ends at the first greater hash or free slot. Sets of (kind, list) are interned.
type table struct {
	// filter answers most searches, which fail, from memory that is small enough to stay near: a power of two
	// of words, indexed by the hash's first bits, of which a suffix sets three bits.
	filter []uint64
	shift  uint8
	slots  []slot
	span   uint64
	// sets holds what slots refer to: sections, each a header and the words of a Set that are not zero.
	// header = kind | words present << 8 | place of its first line << 16 | 1 << 63 if it is the last section
	sets  []uint64
	lines []uint32
	rules int
	// mem holds all of these, in pieces that are given back one by one. A table read from a file shares the
	// first and the last with others.
	mem []*region
	// sieve holds filter; nil if mem does.
	sieve *region
}

// A slot is one suffix.
type slot struct {
	hash  uint64 // 0 if free
	set   uint32 // an index of sets; with the top bit: the only posting's kind and list
	lines uint32 // an index of lines; or the only posting's line
}

const single = 1 << 31

// find returns the place of a hash.
func (t *table) find(hash uint64) (int, bool) {
	hash = max(hash, 1)
	if b := filterBits(hash); *t.word(hash)&b != b {
		return 0, false
	}
	at, _ := bits.Mul64(hash, t.span)
	for i := int(at); i < len(t.slots); i++ {
		h := t.slots[i].hash
		if h == hash {
			return i, true
		}
		if h > hash || h == 0 {
			break
		}
	}
	return 0, false
}

// postings are the rules of a table to be, in a region that becomes its slots.
type postings struct {
	mem *region
	all []posting
}

func (p *postings) add(x posting) { p.all = append(extend(&p.mem, p.all, 1), x) }

// newTable makes a table of postings, of which nothing is left. It needs little memory beside theirs: slots are
// of the same size and never more than a third more, so they are made in place.
func newTable(p *postings) *table {
	ps := p.all
	sortPostings(ps)
	// A rule that stands twice in a list is kept once, at its first line.
	ps = slices.CompactFunc(ps, func(a, b posting) bool { return a.hash == b.hash && a.at>>32 == b.at>>32 })
	suffixes, shared := 0, 0
	for i := 0; i < len(ps); {
		n := sameHash(ps, i)
		if n > i+1 {
			shared += n - i
		}
		suffixes++
		i = n
	}
	w := newWriter(len(ps), suffixes, shared)
	t := w.table
	// The suffixes move to the front, which never overtakes the postings still to be read.
	slots := castSlice[slot](p.mem.words)
	k := 0
	for i := 0; i < len(ps); k++ {
		n := sameHash(ps, i)
		slots[k] = w.slot(ps[i:n])
		i = n
	}
	t.sets = slices.Clip(t.sets)
	t.slots = spreadSlots(p.mem, k, t.span)
	t.mem = append(t.mem, p.mem.pieces(hugePage)...)
	*p = postings{}
	return t
}

// A writer makes a table of postings that come suffix by suffix, in order of hash.
type writer struct {
	*table
	interned map[string]uint32 // the sets there are, by the kinds and lists of postings
	key      []byte
	line     int // of lines are used
}

// newWriter makes a table without slots for so many rules of so many suffixes, of which those that share one
// with others count as shared.
func newWriter(rules, suffixes, shared int) *writer {
	words := bits.Len(uint(suffixes / 8)) // at least eight bits a suffix
	t := &table{rules: rules, span: uint64(suffixes)*4/3 + 1, shift: uint8(64 - words)}
	if suffixes >= stagedFrom {
		t.span = (t.span + borders - 1) / borders * borders
	}
	if suffixes < stagedFrom {
		mem := newRegion(1<<words + wordsFor[uint32](shared))
		c := cutter{mem.words}
		t.filter, t.lines = c.words(1<<words), cut[uint32](&c, shared)
		t.mem = []*region{mem}
	} else { // a merge has done with the filter first
		t.sieve = newRegion(1 << words)
		t.sieve.huge()
		t.filter = t.sieve.words
		lines := newRegion(wordsFor[uint32](shared))
		t.lines = cut[uint32](&cutter{lines.words}, shared)
		t.mem = lines.pieces(someMemory)
	}
	return &writer{table: t, interned: map[string]uint32{}}
}

// slot makes what the table has of one suffix, but for its place.
func (w *writer) slot(ps []posting) slot {
	s := slot{hash: ps[0].hash}
	w.filter[s.hash>>(w.shift&63)&uint64(len(w.filter)-1)] |= filterBits(s.hash)
	if len(ps) == 1 {
		s.set, s.lines = single|uint32(ps[0].at>>32), uint32(ps[0].at)
		return s
	}
	w.key = w.key[:0]
	s.lines = uint32(w.line)
	for _, p := range ps {
		w.key = binary.LittleEndian.AppendUint16(w.key, uint16(p.at>>32))
		w.lines[w.line] = uint32(p.at)
		w.line++
	}
	set, ok := w.interned[string(w.key)]
	if !ok {
		set = uint32(len(w.sets))
		w.addSet(ps)
		w.interned[string(w.key)] = set
	}
	s.set = set
	return s
}

// sameHash returns where the postings of the hash at i end.
func sameHash(ps []posting, i int) int {
	n := i + 1
	for n < len(ps) && ps[n].hash == ps[i].hash {
		n++
	}
	return n
}

// spreadSlots moves the first n slots of mem, sorted by hash, to where searches begin, or behind their
// predecessors. That is never before where they were, so it is done in place, from the last to the first; the
// places are found in order, though, and remembered for a stretch at a time.
func spreadSlots(mem *region, n int, span uint64) []slot {
	const stretch = 4096
	place := func(s *slot, next int) int {
		home, _ := bits.Mul64(s.hash, span)
		return max(next, int(home))
	}
	slots := castSlice[slot](mem.words)
	var begins []int
	next := 0
	for i := range n {
		if i%stretch == 0 {
			begins = append(begins, next)
		}
		next = place(&slots[i], next) + 1
	}
	size := max(next, int(span))
	if room := len(slots); size > room || !mem.mapped && size < room {
		mem.resize(2 * size)
		slots = castSlice[slot](mem.words)
	}
	clear(slots[n:])
	var places [stretch]int
	for b := len(begins) - 1; b >= 0; b-- {
		from, to := b*stretch, min(n, (b+1)*stretch)
		next := begins[b]
		for i := from; i < to; i++ {
			places[i-from] = place(&slots[i], next)
			next = places[i-from] + 1
		}
		for i := to - 1; i >= from; i-- {
			s := slots[i]
			slots[i] = slot{}
			slots[places[i-from]] = s
		}
	}
	if size < len(slots) {
		mem.resize(2 * size)
	}
	return castSlice[slot](mem.words)[:size:size]
}

// addSet appends the sections of the postings of one suffix.
func (t *table) addSet(ps []posting) {
	base := 0
	for i := 0; i < len(ps); {
		k := kind(ps[i].at >> 41)
		var s Set
		n := i
		for ; n < len(ps) && kind(ps[n].at>>41) == k; n++ {
			s.Add(int(ps[n].at >> 32 & (MaxLists - 1)))
		}
		head := uint64(k) | uint64(base)<<16
		base += n - i
		i = n
		if i == len(ps) {
			head |= 1 << 63
		}
		for w := range s {
			if s[w] != 0 {
				head |= 1 << (8 + w)
			}
		}
		t.sets = append(t.sets, head)
		for w := range s {
			if s[w] != 0 {
				t.sets = append(t.sets, s[w])
			}
		}
	}
}

// sortPostings sorts by hash and place: into 2^k bins by the first bits of the hash, which are as good as
// random, then each bin.
func sortPostings(ps []posting) {
	compare := func(a, b posting) int {
		return cmp.Or(cmp.Compare(a.hash, b.hash), cmp.Compare(a.at, b.at))
	}
	k := bits.Len(uint(len(ps))) - 4
	if k < 4 {
		slices.SortFunc(ps, compare)
		return
	}
	k = min(k, 14)
	shift := 64 - k
	ends := make([]int, 1<<k+1)
	for _, p := range ps {
		ends[p.hash>>shift+1]++
	}
	for i := 1; i < len(ends); i++ {
		ends[i] += ends[i-1]
	}
	// In place, cycle by cycle: heads[b] is where bin b's next posting goes.
	heads := slices.Clone(ends[:len(ends)-1])
	for b := range heads {
		for heads[b] < ends[b+1] {
			p := ps[heads[b]]
			for {
				to := p.hash >> shift
				if int(to) == b {
					break
				}
				ps[heads[to]], p = p, ps[heads[to]]
				heads[to]++
			}
			ps[heads[b]] = p
			heads[b]++
		}
		slices.SortFunc(ps[ends[b]:ends[b+1]], compare)
	}
}

// appendPostings appends the postings at a slot of the lists in keep, in order.
func (t *table) appendPostings(ps []posting, s *slot, keep *Set) []posting {
	if s.set&single != 0 {
		if keep.Has(int(s.set & (MaxLists - 1))) {
			ps = append(ps, posting{s.hash, uint64(s.set&^single)<<32 | uint64(s.lines)})
		}
		return ps
	}
	line := s.lines
	for at := s.set; ; {
		head := t.sets[at]
		at++
		for w := range MaxLists / 64 {
			if head&(1<<(8+w)) == 0 {
				continue
			}
			for word := t.sets[at]; word != 0; word &= word - 1 {
				list := w*64 + bits.TrailingZeros64(word)
				if keep.Has(list) {
					ps = append(ps, posting{s.hash, uint64(kind(head)&127)<<41 | uint64(list)<<32 | uint64(t.lines[line])})
				}
				line++
			}
			at++
		}
		if head>>63 != 0 {
			return ps
		}
	}
}

// A layer is a table as one Matcher sees it.
type layer struct {
	*table
	live Set // the lists whose rules here count; the others are in younger layers, or gone
}

// voids returns the twins that rules of the chosen lists disable at a slot: bit k/2 for kind k.
func (l *layer) voids(s slot, lists *Set) uint64 {
	if s.set&single != 0 {
		k, list := kind(s.set>>9&127), s.set&(MaxLists-1)
		if k&1 != 0 && lists[list/64]&l.live[list/64]&(1<<(list%64)) != 0 {
			return 1 << (k >> 1)
		}
		return 0
	}
	var v uint64
	for at := s.set; ; {
		head := l.sets[at]
		at++
		k := kind(head & 127)
		if k&1 == 0 {
			at += uint32(bits.OnesCount64(head & 0xff00))
		} else {
			for m := head & 0xff00; m != 0; m &= m - 1 {
				w := bits.TrailingZeros64(m) - 8
				if l.sets[at]&lists[w]&l.live[w] != 0 {
					v |= 1 << (k >> 1)
				}
				at++
			}
		}
		if head>>63 != 0 {
			return v
		}
	}
}

// eval judges the rules at a slot that are not void.
func (l *layer) eval(j *judgement, s slot, exact bool, void uint64) {
	if s.set&single != 0 {
		list := s.set & (MaxLists - 1)
		if bit := j.lists[list/64] & l.live[list/64] & (1 << (list % 64)); bit != 0 {
			k := kind(s.set >> 9 & 127)
			if kinds[k].zone {
				bit = j.zoneHits(k, exact, void, int(list/64), bit)
			}
			if bit != 0 {
				j.simple(k, exact, void, uint16(list), s.lines)
			}
		}
		return
	}
	for at := s.set; ; {
		head := l.sets[at]
		at++
		line := s.lines + uint32(head>>16&0xffffff)
		for m := head & 0xff00; m != 0; m &= m - 1 {
			w := bits.TrailingZeros64(m) - 8
			word := l.sets[at]
			at++
			hit := word & j.lists[w] & l.live[w]
			if hit != 0 && kinds[head&127].zone {
				hit = j.zoneHits(kind(head&127), exact, void, w, hit)
			}
			if hit != 0 {
				b := bits.TrailingZeros64(hit)
				j.simple(kind(head&127), exact, void, uint16(w*64+b), l.lines[line+uint32(bits.OnesCount64(word&(1<<b-1)))])
				// The first list is the one to name; the others of the section say the same.
				if !kinds[head&127].zone {
					for m &= m - 1; m != 0; m &= m - 1 {
						at++
					}
					break
				}
			}
			line += uint32(bits.OnesCount64(word))
		}
		if head>>63 != 0 {
			return
		}
	}
}

// zoneHits returns those of some lists in which a rule of a policy zone is the first met, which is that of the
// longest suffix, and remembers them: in a zone the longest match decides.
func (j *judgement) zoneHits(k kind, exact bool, void uint64, word int, lists uint64) uint64 {
	if k&1 != 0 || void&(1<<(k>>1)) != 0 || (kinds[k].scope == rulelist.ScopeExact) != exact {
		return 0
	}
	for _, z := range j.zones[:j.nZones] {
		if int(z.list/64) == word && z.depth > j.depth {
			lists &^= 1 << (z.list % 64)
		}
	}
	for rest := lists; rest != 0; rest &= rest - 1 {
		j.close(uint16(word*64 + bits.TrailingZeros64(rest)))
	}
	return lists
}

// simple judges one rule of a table.
func (j *judgement) simple(k kind, exact bool, void uint64, list uint16, line uint32) {
	if k&1 != 0 || void&(1<<(k>>1)) != 0 {
		return
	}
	info := &kinds[k]
	if info.scope == rulelist.ScopeExact && !exact || info.scope == rulelist.ScopeBelow && exact {
		return
	}
	if info.rank != 0 {
		j.take(info.rank, j.depth, list, line)
		return
	}
	if j.addr {
		return
	}
	f := k.form()
	j.r.hosts |= 1 << (f - rulelist.HostNull4)
	j.take(hostRank(f >= rulelist.HostNull6, j.q.Type), j.depth, list, line)
}

// nearWords is how large a filter is that does not stay near by itself.
const nearWords = 1 << 13

// fetch begins to fetch the words that may asks.
func (m *Matcher) fetch(hashes []uint64) {
	for i := range m.layers {
		t := m.layers[i].table
		if len(t.filter) < nearWords {
			continue
		}
		for _, h := range hashes {
			prefetch(unsafe.Pointer(t.word(max(h, 1))))
		}
	}
}

// word returns the word of the filter that a hash sets bits in.
func (t *table) word(hash uint64) *uint64 {
	return &t.filter[hash>>(t.shift&63)&uint64(len(t.filter)-1)]
}

// may returns a bit for each of the last 64 hashes that may be in the Matcher's tables, the last in the last
// bit, without a branch, so that the processor waits for all the words of the filters at once. It begins to
// fetch the slots of those that may.
func (m *Matcher) may(hashes []uint64) (mask uint64) {
	hashes = hashes[max(0, len(hashes)-64):]
	for i := range m.layers {
		t := m.layers[i].table
		filter, shift := t.filter, t.shift&63
		found := uint64(0)
		for i, h := range hashes {
			h = max(h, 1)
			missing := filterBits(h) &^ filter[h>>shift&uint64(len(filter)-1)]
			found |= (1 ^ (missing|-missing)>>63) << (i & 63)
		}
		mask |= found
		for ; found != 0; found &= found - 1 {
			at, _ := bits.Mul64(hashes[bits.TrailingZeros64(found)], t.span)
			prefetch(unsafe.Pointer(&t.slots[at]))
		}
	}
	return mask
}

// suffixes judges the rules of tables, from the longest suffix on; mask is from may.
func (m *Matcher) suffixes(j *judgement, mask uint64, hashes []uint64) {
	from := max(0, len(hashes)-64)
	for mask != 0 {
		i := bits.Len64(mask) - 1
		mask &^= 1 << i
		j.depth = uint8(from + i + 1)
		m.suffix(j, hashes[from+i], from+i == len(hashes)-1)
	}
	// Of names of more labels than that, the short suffixes.
	for i := from - 1; i >= 0; i-- {
		j.depth = uint8(i + 1)
		m.suffix(j, hashes[i], false)
	}
}

// suffix judges the rules of all layers at one suffix.
func (m *Matcher) suffix(j *judgement, hash uint64, exact bool) {
	if len(m.layers) == 1 {
		l := &m.layers[0]
		if at, ok := l.find(hash); ok {
			s := l.slots[at]
			l.eval(j, s, exact, l.voids(s, j.lists))
		}
		return
	}
	var found [maxLayers]slot
	var void uint64
	for i := range m.layers {
		l := &m.layers[i]
		if at, ok := l.find(hash); ok {
			found[i] = l.slots[at]
			void |= l.voids(found[i], j.lists)
		}
	}
	for i := range m.layers {
		if found[i].hash != 0 {
			m.layers[i].eval(j, found[i], exact, void)
		}
	}
}
