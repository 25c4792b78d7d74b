package filter

import (
	"cmp"
	"encoding/binary"
	"iter"
	"math"
	"math/bits"
	"net/netip"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"
	"sync"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/filter/rulelist"
)

// A rule is one that a suffix and a kind do not tell: a pattern, an expression, or a rule with conditions. It
// holds no pointers, so that hundreds of thousands cost the garbage collector nothing and a file can hold them.
type rule struct {
	twin  uint64 // equal for twins: rules that differ in $badfilter alone
	text  uint32 // where in ruleSet.texts the text of its pattern begins
	line  uint32
	more  uint32 // one more than its place in ruleSet.mores; 0 for a bare pattern
	size  uint16 // of the pattern's text
	list  uint16
	flags ruleFlags
	least uint8 // the shortest name that can match
	_     [5]byte
}

type ruleFlags uint16

const (
	isAllow ruleFlags = 1 << iota
	isImportant
	isBad
	isHost
	isAddr    // the pattern is an address
	hasVoids  // some list disables the rule: see rules.voids
	isDropped // it costs too much: see Dropped
	isRegex
	atName // the pattern's start; neither is anywhere
	atLabel
	toEnd     // the pattern's end is the name's
	isZone    // of a policy zone
	isTrigger // about something else than the name asked for; see triggers.go
	ruleFlagsEnd
)

// more is what few rules need.
type more struct {
	expr string // the expression's text
	re   *regexp.Regexp
	pre  *precheck // of re
	size int       // of re, in instructions
	mods *rulelist.Mods
	addr netip.Addr
}

// compile makes the expression.
func (m *more) compile() error {
	e := rulelist.Insensitive(m.expr)
	var err error
	if m.re, err = regexp.Compile(e); err != nil {
		return err
	}
	tree, err := syntax.Parse(e, syntax.Perl)
	if err != nil {
		return err
	}
	m.pre = newPrecheck(tree)
	prog, err := syntax.Compile(tree.Simplify())
	if err != nil {
		return err
	}
	m.size = len(prog.Inst)
	return nil
}

// A ruleSet is rules with what they refer to.
type ruleSet struct {
	all   []rule
	texts []byte
	mores []*more
	// What all and texts lie in while the set grows. A set that does not is in one region.
	memAll, memTexts *region
}

// text returns the text of a rule's pattern, valid while the ruleSet is alive.
func (x *ruleSet) text(r *rule) string { return view(x.texts[r.text:][:r.size]) }

// moreOf returns what the rule has beyond a pattern, or nil.
func (x *ruleSet) moreOf(r *rule) *more {
	if r.more == 0 {
		return nil
	}
	return x.mores[r.more-1]
}

func (r *rule) before(o *rule) bool {
	return r.list < o.list || r.list == o.list && r.line < o.line
}

// add takes over what rulelist hands out for a moment. It reports false if there is no room for more text.
func (x *ruleSet) add(r *rulelist.Rule, list uint16) bool {
	c := rule{line: r.Line, list: list}
	if r.Allow {
		c.flags |= isAllow
	}
	if r.Important {
		c.flags |= isImportant
	}
	if r.Bad {
		c.flags |= isBad
	}
	if r.Form.IsHost() {
		c.flags |= isHost
	}
	if r.Form.IsZone() {
		c.flags |= isZone
	}
	if r.Trigger != rulelist.ByName {
		c.flags |= isTrigger
	}
	switch r.Glob.Start {
	case rulelist.AtName:
		c.flags |= atName
	case rulelist.AtLabel:
		c.flags |= atLabel
	case rulelist.Anywhere:
	}
	if r.Glob.End {
		c.flags |= toEnd
	}
	c.least = uint8(min(255, len(r.Glob.Text)-strings.Count(r.Glob.Text, "*")))
	var m *more
	if r.Mods != nil || r.Form == rulelist.Regex || r.Addr.IsValid() {
		m = &more{mods: r.Mods, addr: r.Addr}
		if r.Form == rulelist.Regex {
			c.flags |= isRegex
			m.expr = r.Pattern
			if err := m.compile(); err != nil {
				panic(err) // rulelist has parsed it
			}
			c.least = uint8(min(255, m.pre.shortest))
		}
	}
	if a, err := netip.ParseAddr(r.Glob.Text); err == nil && a.Is4() {
		c.flags |= isAddr
	}
	c.twin = twin(r)
	return x.put(c, r.Glob.Text, m)
}

// put adds a rule with its text and what it has beyond.
func (x *ruleSet) put(c rule, text string, m *more) bool {
	if len(x.texts)+len(text) > math.MaxUint32 {
		return false
	}
	c.text, c.size, c.more = uint32(len(x.texts)), uint16(len(text)), 0
	x.texts = append(extend(&x.memTexts, x.texts, len(text)), text...)
	if m != nil {
		x.mores = append(x.mores, m)
		c.more = uint32(len(x.mores))
	}
	x.all = append(extend(&x.memAll, x.all, 1), c)
	return true
}

// join returns the rules of x and, behind them, those of old that are of the lists in keep, in memory for just
// these; of x nothing is left. lost are rules that there is no room for.
func (x *ruleSet) join(old *ruleSet, keep *Set) (all ruleSet, mem *region, lost []Dropped) {
	rules, texts := len(x.all), len(x.texts)
	fits := func(r *rule) bool { return texts+int(r.size) <= math.MaxUint32 }
	for i := range old.all {
		if r := &old.all[i]; keep.Has(int(r.list)) && fits(r) {
			rules++
			texts += int(r.size)
		}
	}
	mem = newRegion(wordsFor[rule](rules) + wordsFor[byte](texts))
	all.mores = x.mores
	all.lieIn(&cutter{mem.words}, rules, texts)
	rules, texts = copy(all.all, x.all), copy(all.texts, x.texts)
	x.memAll.free()
	x.memTexts.free()
	*x = ruleSet{}
	for i := range old.all {
		r := &old.all[i]
		if !keep.Has(int(r.list)) {
			continue
		}
		if !fits(r) {
			lost = append(lost, Dropped{r.list, r.line})
			continue
		}
		c := *r
		c.text, c.more = uint32(texts), 0
		if m := old.moreOf(r); m != nil {
			all.mores = append(all.mores, m)
			c.more = uint32(len(all.mores))
		}
		all.all[rules] = c
		rules++
		texts += copy(all.texts[texts:], old.text(r))
	}
	return all, mem, lost
}

// lieIn makes the next of some memory the set's.
func (x *ruleSet) lieIn(c *cutter, rules, texts int) {
	x.all, x.texts = cut[rule](c, rules), cut[byte](c, texts)
}

// cut drops all rules from the nth on.
func (x *ruleSet) cut(rules, texts, mores int) {
	x.all, x.texts, x.mores = x.all[:rules], x.texts[:texts], x.mores[:mores]
}

// twin hashes what must be equal in a rule and the $badfilter rule that disables it. A list's author who
// finds a collision disables a rule that he could have named, so FNV is good enough.
func twin(r *rulelist.Rule) uint64 {
	h := uint64(14695981039346656037)
	add := func(c byte) { h = (h ^ uint64(c)) * 1099511628211 }
	var f byte
	if r.Allow {
		f |= 1
	}
	if r.Important {
		f |= 2
	}
	if r.Form == rulelist.Regex {
		f |= 4
	}
	add(f)
	for i := range len(r.Pattern) {
		add(r.Pattern[i])
	}
	if r.Mods != nil {
		for _, c := range r.Mods.AppendKey(nil) {
			add(c)
		}
	}
	return h
}

// rules are all the rules of a Matcher that are not in tables, and the ways to find them. Rules that are
// $badfilter are among them, for the next Build, and match nothing.
type rules struct {
	ruleSet
	voids    map[uint32]*Set // by index of all: the lists that disable the rule
	bySuffix multimap        // by suffix hash
	byDot    multimap        // by the twelve or eight bytes of text after a dot
	label8   multimap        // by the first eight bytes of a label and what follows it
	label4   multimap        // by the first four
	by8, by4 multimap        // by eight or four bytes of text anywhere
	always   []uint32        // tried on every name
	dropped  []Dropped
	mem      []*region // holds all of these but mores, voids and dropped

	// What look needs, made by sieve.
	gates                        struct{ suffix, dot, label8, label4 gate }
	in8, in4                     bitmap // the keys of by8 and by4
	hasSuffix, hasLabel, hasText bool
	needs                        []need // of each of always
}

const (
	// maxCrowd is how many rules may hang off one anchor: real lists come to 17. Each is tried on every name
	// that has the anchor, so without a limit a list could make names as slow as it likes.
	maxCrowd = 128
	// maxAlways is how many rules without an anchor one list may have, and maxAlwaysAll all lists together.
	maxAlways, maxAlwaysAll = 64, 1024
)

// A Dropped names a rule that a Matcher does not use because it would cost too much: more than 128 rules
// share the literal it could be found by, or its list has more than 64 that have none.
type Dropped struct {
	List uint16
	Line uint32
}

// newRules indexes the rules of a set that lies in mem.
func newRules(key *dnsname.Key, set ruleSet, mem *region) *rules {
	x := &rules{ruleSet: set}
	if len(x.all) == 0 {
		return x
	}
	for i := range x.all {
		x.all[i].flags &^= isDropped
	}
	x.findVoids()
	x.pack(key, mem, x.anchor(key))
	x.sieve()
	return x
}

// findVoids finds the twins of rules that are $badfilter.
func (x *rules) findVoids() {
	bad := map[uint64]*Set{}
	for i := range x.all {
		r := &x.all[i]
		r.flags &^= hasVoids
		if r.flags&isBad != 0 {
			s := bad[r.twin]
			if s == nil {
				s = &Set{}
				bad[r.twin] = s
			}
			s.Add(int(r.list))
		}
	}
	if len(bad) == 0 {
		return
	}
	x.voids = map[uint32]*Set{}
	for i := range x.all {
		r := &x.all[i]
		if r.flags&(isBad|isHost) != 0 {
			continue
		}
		if s := bad[r.twin]; s != nil {
			r.flags |= hasVoids
			x.voids[uint32(i)] = s
		}
	}
}

// maps are the multimaps in the order in which they are kept.
func (x *rules) maps() [6]*multimap {
	return [...]*multimap{&x.bySuffix, &x.byDot, &x.label8, &x.label4, &x.by8, &x.by4}
}

// pack makes the multimaps behind all else, in one region.
func (x *rules) pack(key *dnsname.Key, mem *region, pairs [6]pairs) {
	words := wordsFor[rule](len(x.all)) + wordsFor[byte](len(x.texts)) + wordsFor[uint32](len(x.always))
	for i := range pairs {
		words += pairs[i].words()
	}
	mem.resize(words)
	mem.huge()
	x.mem = []*region{mem}
	c := &cutter{mem.words}
	x.lieIn(c, len(x.all), len(x.texts))
	x.always = move(c, x.always)
	for i, m := range x.maps() {
		*m = pairs[i].multimap(c, &x.ruleSet, multiplier(key))
		pairs[i].mem.free()
	}
}

// sieve makes what look needs.
func (x *rules) sieve() {
	x.gates.suffix, x.gates.dot = x.bySuffix.gate(), x.byDot.gate()
	x.gates.label8, x.gates.label4 = x.label8.gate(), x.label4.gate()
	x.in8, x.in4 = newBitmap(&x.by8), newBitmap(&x.by4)
	x.hasSuffix = len(x.bySuffix.ids) > 0
	x.hasLabel = len(x.byDot.ids)+len(x.label8.ids)+len(x.label4.ids) > 0
	x.hasText = len(x.by8.ids)+len(x.by4.ids) > 0
	x.needs = make([]need, len(x.always))
	for i, id := range x.always {
		x.needs[i] = x.need(&x.all[id])
	}
}

// A need is what every name has that a rule matches.
type need struct {
	chars uint64 // see charset
	size  int    // or more
}

func (x *rules) need(r *rule) need {
	n := need{size: int(r.least)}
	texts := x.literals(r)
	if r.flags&isRegex != 0 {
		texts.set = x.moreOf(r).pre.needs
	}
	for texts.next() {
		n.chars |= charset(texts.lit)
	}
	return n
}

// met reports whether a name may match.
func (n *need) met(s *sight) bool { return n.chars&^s.chars == 0 && n.size <= s.size }

// charset returns the set of characters of a text; some count as the same.
func charset(s string) (set uint64) {
	for i := range len(s) {
		set |= 1 << (s[i] & 63)
	}
	return set
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

func move[T any](c *cutter, s []T) []T {
	to := cut[T](c, len(s))
	copy(to, s)
	return to
}

// anchor finds for each rule the rarest thing that any name it matches must have, to hang it off, and returns
// what the multimaps are made of, in their order.
func (x *rules) anchor(key *dnsname.Key) (found [6]pairs) {
	count := newCounts(len(x.texts))
	for _, s := range common {
		for i := range len(s) - 3 {
			count.add(gram(s[i:i+4]), 1000)
			if i+8 <= len(s) {
				count.add(gram(s[i:i+8]), 1000)
			}
		}
	}
	var name [256]byte
	for i := range x.all {
		r := &x.all[i]
		if r.flags&isBad != 0 {
			continue
		}
		for it := x.literals(r); it.next(); {
			l := it.lit
			for g := range grams(l) {
				count.add(g, 1)
			}
			for k := range labelKeys(l) {
				if k.size == 12 {
					count.add(k.key, 1)
				}
			}
		}
		if _, n := x.suffix(r, &name); n > 0 {
			count.add(key.Hash(name[:n]), 1)
		}
	}
	suffix, dot, label8, label4, by8, by4 := &found[0], &found[1], &found[2], &found[3], &found[4], &found[5]
	hang := func(lit string, id uint32) {
		g, _ := count.rarest(lit)
		if len(lit) >= 8 {
			by8.add(g, id)
		} else {
			by4.add(g, id)
		}
	}
	var perList [MaxLists]int
	always := func(id uint32) {
		r := &x.all[id]
		if perList[r.list]++; perList[r.list] > maxAlways || len(x.always) == maxAlwaysAll {
			x.dropped = append(x.dropped, Dropped{r.list, r.line})
			return
		}
		x.always = append(x.always, id)
	}
	for i := range x.all {
		r, id := &x.all[i], uint32(i)
		if r.flags&isBad != 0 {
			continue
		}
		if r.flags&isRegex != 0 {
			pre := x.moreOf(r).pre
			if p := pre.prefixes; len(p) > 0 && shortest(p) >= 4 {
				for _, l := range p {
					label4.add(gram(l[:4]), id)
				}
				continue
			}
			// Any of the literals may be the one, so the rule hangs off each.
			if lits := pre.anchors; len(lits) > 0 && shortest(lits) >= 4 && !slices.ContainsFunc(lits, everywhere) {
				for _, l := range lits {
					hang(l, id)
				}
			} else {
				always(id)
			}
			continue
		}
		labels, n := x.suffix(r, &name)
		first, atStart := x.first(r)
		best := "" // of literals of eight bytes or more the rarest, else of those of four
		least := uint32(0)
		var label labelKey // of labels but the first the longest, of those the rarest
		leastLabel := uint32(0)
		for it := x.literals(r); it.next(); {
			l := it.lit
			for k := range labelKeys(l) {
				if c := count.of(k.key); k.size > label.size || k.size == label.size && c < leastLabel {
					label, leastLabel = k, c
				}
			}
			if len(l) < 4 || len(best) >= 8 && len(l) < 8 {
				continue
			}
			if _, c := count.rarest(l); best == "" || c < least || len(l) >= 8 && len(best) < 8 {
				best, least = l, c
			}
		}
		switch {
		case r.flags&isTrigger != 0, labels >= 2 && (best == "" || count.of(key.Hash(name[:n])) <= crowded):
			suffix.add(key.Hash(name[:n]), id)
		case atStart && len(first) >= 8 && count.of(gram(first[:8])) <= crowded:
			label8.add(gram(first[:8]), id)
		case label.size >= 8 && leastLabel <= crowded:
			dot.add(label.key, id)
		case atStart && 4 <= len(first) && len(best) < 8 && count.of(gram(first[:4])) <= crowded:
			label4.add(gram(first[:4]), id)
		case label.size == 4 && len(best) < 8 && leastLabel <= crowded:
			label4.add(label.key, id)
		case best != "":
			hang(best, id)
		case labels >= 1:
			suffix.add(key.Hash(name[:n]), id)
		default:
			always(id)
		}
	}
	count.mem.free()
	for i := range found {
		for _, id := range found[i].settle(x.all) {
			// An expression may hang elsewhere too; a rule that some names would not meet is better met by none.
			x.all[id].flags |= isDropped
			x.dropped = append(x.dropped, Dropped{x.all[id].list, x.all[id].line})
		}
	}
	slices.SortFunc(x.dropped, func(a, b Dropped) int { return cmp.Or(cmp.Compare(a.List, b.List), cmp.Compare(a.Line, b.Line)) })
	x.dropped = slices.Compact(x.dropped)
	return found
}

// common are parts of very many names: rules are better found by anything else they have.
var common = []string{"in-addr.arpa", "ip6.arpa", ".com", ".net", ".org", "www.", ".co.", "cdn.", "api.", ".google", "googleapis.com",
	".amazonaws.com", ".cloudfront.net", ".akamai", ".microsoft.com", ".windows.net", ".azure", ".apple.com", ".icloud.com", ".facebook.com"}

// everywhere reports whether so many names have a literal that a rule is better tried on every name, of which
// its other needs leave few.
func everywhere(lit string) bool {
	return slices.ContainsFunc(common, func(s string) bool { return strings.Contains(s, lit) })
}

// crowded is how many rules may have a string at the start of a label before something rarer is looked for.
const crowded = 8

// grams yields the eight-byte strings of a literal, or its four-byte strings if it is shorter, as numbers.
func grams(lit string) func(func(uint64) bool) {
	return func(yield func(uint64) bool) {
		n := 8
		if len(lit) < 8 {
			n = 4
		}
		for i := 0; i+n <= len(lit); i++ {
			if !yield(gram(lit[i : i+n])) {
				return
			}
		}
	}
}

func gram(s string) uint64 {
	var b [8]byte
	copy(b[:], s)
	return binary.LittleEndian.Uint64(b[:])
}

// A labelKey stands for the first twelve, eight or four bytes from the start of a label on.
type labelKey struct {
	key  uint64
	size int
}

// labelKeys yields what a literal tells of the labels that start in it.
func labelKeys(lit string) iter.Seq[labelKey] {
	return func(yield func(labelKey) bool) {
		for {
			_, rest, ok := strings.Cut(lit, ".")
			if !ok || len(rest) < 4 {
				return
			}
			lit = rest
			k := labelKey{gram(lit[:4]), 4}
			if len(lit) >= 12 {
				k = labelKey{twelve(gram(lit[:8]), gram(lit[8:12])), 12}
			} else if len(lit) >= 8 {
				k = labelKey{gram(lit[:8]), 8}
			}
			if !yield(k) {
				return
			}
		}
	}
}

// twelve makes a key of eight bytes and the four that follow.
func twelve(eight, four uint64) uint64 { return eight ^ spread(four) }

// counts tell roughly how many rules have a string.
type counts struct {
	n     []uint16
	shift uint8
	mem   *region
}

// newCounts makes room for so many different strings that few share a count.
func newCounts(strings int) counts {
	k := min(max(bits.Len(uint(strings))+1, 8), 20)
	mem := newRegion(wordsFor[uint16](1 << k))
	return counts{castSlice[uint16](mem.words), uint8(64 - k), mem}
}

func (c counts) add(gram uint64, n uint16) {
	at := &c.n[spread(gram)>>c.shift]
	*at = min(*at, math.MaxUint16-n) + n
}

func (c counts) of(gram uint64) uint32 { return uint32(c.n[spread(gram)>>c.shift]) }

// rarest returns the string of a literal that the fewest rules have, and how many have it.
func (c counts) rarest(lit string) (best uint64, least uint32) {
	least = 1 << 31
	for g := range grams(lit) {
		if n := c.of(g); n < least {
			best, least = g, n
		}
	}
	return best, least
}

// first returns the text, up to the first *, that a match of a pattern has at the start of a label, or, if
// not atStart, after a dot.
func (x *ruleSet) first(r *rule) (text string, atStart bool) {
	text, _, _ = strings.Cut(x.text(r), "*")
	if r.flags&(atName|atLabel) == 0 {
		_, text, _ = strings.Cut(text, ".")
		return text, false
	}
	return text, true
}

// literals are, of a pattern, the runs of bytes that a match contains, all of them; of an expression, a set of
// which it contains one.
type literals struct {
	lit string // the one come to

	set  []string
	rest string
	more bool // of rest
}

func (x *ruleSet) literals(r *rule) literals {
	if r.flags&isRegex != 0 {
		return literals{set: x.moreOf(r).pre.anchors}
	}
	return literals{rest: x.text(r), more: true}
}

// next goes to the next, if there is one.
func (l *literals) next() bool {
	switch {
	case l.more:
		l.lit, l.rest, l.more = strings.Cut(l.rest, "*")
	case len(l.set) > 0:
		l.lit, l.set = l.set[0], l.set[1:]
	default:
		return false
	}
	return true
}

// suffix writes the whole labels that the names a pattern matches end with, as a name in wire form, and
// returns their number and the name's length.
func (x *ruleSet) suffix(r *rule, buf *[256]byte) (labels, n int) {
	if r.flags&toEnd == 0 {
		return 0, 0
	}
	text := x.text(r)
	s := text[strings.LastIndexByte(text, '*')+1:]
	if len(s) < len(text) || r.flags&(atName|atLabel) == 0 {
		dot := strings.IndexByte(s, '.')
		if dot < 0 {
			return 0, 0
		}
		s = s[dot+1:]
	}
	if s == "" || len(s) > 253 {
		return 0, 0
	}
	if r.flags&atName != 0 && strings.IndexByte(s, ':') >= 0 { // an IPv6 address is one label
		buf[0] = byte(len(s))
		buf[1+len(s)] = 0
		return 2, copy(buf[1:], s) + 2
	}
	for l := range strings.SplitSeq(s, ".") {
		if len(l) == 0 || len(l) > 63 {
			return 0, 0
		}
		buf[n] = byte(len(l))
		n += 1 + copy(buf[n+1:], l)
		labels++
	}
	buf[n] = 0
	return labels, n + 1
}

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

// pairset returns the set of the pairs of neighbouring bytes in a text; some count as the same. A text that has another
// in it has its pairs too, which is told without going to the rule: popular names meet many an anchor, and hardly a
// rule.
func pairset(s string) (set uint64) {
	for i := 1; i < len(s); i++ {
		set |= pairBit(s[i-1], s[i])
	}
	return set
}

func pairBit(a, b byte) uint64 { return 1 << (((uint32(a) | uint32(b)<<8) * (spread8 >> 32)) >> 26) }

// needed returns pairs that every name has that the rule matches; zero bytes stand before and behind a name.
func (x *ruleSet) needed(r *rule) (set uint64) {
	if r.flags&isRegex != 0 {
		for _, lit := range x.moreOf(r).pre.needs {
			set |= pairset(lit)
		}
		return set
	}
	text := x.text(r)
	for it := x.literals(r); it.next(); {
		set |= pairset(it.lit)
	}
	if n := len(text); n > 0 {
		if r.flags&atName != 0 && text[0] != '*' {
			set |= pairBit(0, text[0])
		}
		if r.flags&toEnd != 0 && text[n-1] != '*' {
			set |= pairBit(text[n-1], 0)
		}
	}
	return set
}

// A sight is a name as the rules see that are not in tables: its text, and where in it some may be found.
type sight struct {
	// buf holds the text and then zeros, so that there are sixteen bytes from its last byte on.
	buf    [256 + 16]byte
	size   int
	chars  uint64    // the text's characters, if there are rules that ask
	pairs  uint64    // the text's pairs, with the zero bytes around it, if any place may have rules
	suffix [2]uint64 // bits: labels whose suffix may have rules
	start  [4]uint64 // bits: places where a label starts that may have rules
	inside [4]uint64 // bits: places where a text starts that may have rules
}

func (s *sight) text() string { return view(s.buf[:s.size]) }

// take takes a name in: its text, its characters, and the places in it where a text may start that rules have. It
// asks all places without a branch for each: most names meet nothing, and the processor asks several places at once.
func (x *rules) take(s *sight, name []byte) {
	s.size = len(appendText(s.buf[:0], name))
	clear(s.buf[s.size:][:16])
	s.chars, s.suffix, s.start, s.inside = 0, [2]uint64{}, [4]uint64{}, [4]uint64{}
	if !x.hasText {
		if len(x.always) > 0 {
			s.chars = charset(s.text())
		}
		return
	}
	in8, in4 := x.in8, x.in4
	chars := charset(view(s.buf[max(0, s.size-3):s.size]))
	for from := 0; from+4 <= s.size; from += 64 {
		var mask uint64
		for i := from; i < from+64 && i+4 <= s.size; i++ {
			w := le64(s.buf[i:])
			mask |= (in8.has(w) | in4.has(w&math.MaxUint32)) & 1 << (i & 63)
			chars |= 1 << (w & 63)
		}
		s.inside[from/64&3] = mask
	}
	s.chars = chars
}

// look reports whether any rule may match a name that take has taken in.
func (x *rules) look(s *sight, name []byte, hashes []uint64) bool {
	found := s.inside[0] | s.inside[1] | s.inside[2] | s.inside[3]
	if x.hasSuffix {
		g := x.gates.suffix
		for i, h := range hashes {
			bit := g.may(spread(h))
			s.suffix[i/64&1] |= bit << (i & 63)
			found |= bit
		}
	}
	if x.hasLabel {
		dot, label8, label4 := x.gates.dot, x.gates.label8, x.gates.label4
		for i := 0; i+4 <= s.size; i += 1 + int(name[i]) { // text lacks the first length octet
			w := le64(s.buf[i:])
			h := spread(w)
			bit := label8.may(h) | label4.may(spread(w&math.MaxUint32))
			if i > 0 {
				bit |= dot.may(h) | dot.may(spread(twelve(w, le64(s.buf[i+8:])&math.MaxUint32)))
			}
			s.start[i/64&3] |= bit << (i & 63)
			found |= bit
		}
	}
	if found != 0 {
		s.pairs = pairset(view(s.buf[:s.size+1])) | pairBit(0, s.buf[0])
		found = x.confirm(s, hashes)
	}
	for i, id := range x.always {
		if x.needs[i].met(s) {
			if m := x.moreOf(&x.all[id]); m == nil || m.pre == nil || m.pre.may(s.text()) {
				return true
			}
		}
	}
	return found != 0
}

// confirm forgets the places of a name that have no rule which may match it, and returns 0 if none are left.
func (x *rules) confirm(s *sight, hashes []uint64) (found uint64) {
	for half, mask := range s.suffix {
		for ; mask != 0; mask &= mask - 1 {
			at := bits.TrailingZeros64(mask)
			if len(x.bySuffix.find(hashes[half*64+at], s.pairs)) == 0 {
				s.suffix[half] &^= 1 << at
			}
		}
		found |= s.suffix[half]
	}
	for quarter, mask := range s.start {
		for ; mask != 0; mask &= mask - 1 {
			at := bits.TrailingZeros64(mask)
			if ids := x.startAt(s, quarter*64+at); len(ids[0])+len(ids[1])+len(ids[2])+len(ids[3]) == 0 {
				s.start[quarter] &^= 1 << at
			}
		}
		found |= s.start[quarter]
	}
	for quarter, mask := range s.inside {
		for ; mask != 0; mask &= mask - 1 {
			at := bits.TrailingZeros64(mask)
			if ids := x.insideAt(s, quarter*64+at); len(ids[0])+len(ids[1]) == 0 {
				s.inside[quarter] &^= 1 << at
			}
		}
		found |= s.inside[quarter]
	}
	return found
}

// startAt returns the rules that may match because of what stands at a place where a label starts.
func (x *rules) startAt(s *sight, at int) (ids [4][]uint32) {
	key := le64(s.buf[at:])
	if at > 0 {
		ids[0] = x.byDot.find(key, s.pairs)
		ids[1] = x.byDot.find(twelve(key, le64(s.buf[at+8:])&math.MaxUint32), s.pairs)
	}
	ids[2] = x.label8.find(key, s.pairs)
	ids[3] = x.label4.find(key&math.MaxUint32, s.pairs)
	return ids
}

// insideAt returns the rules that may match because of the text at a place.
func (x *rules) insideAt(s *sight, at int) [2][]uint32 {
	key := le64(s.buf[at:])
	return [2][]uint32{x.by8.find(key, s.pairs), x.by4.find(key&math.MaxUint32, s.pairs)}
}

// candidates hands the rules that may match to f, until it reports false.
func (x *rules) candidates(s *sight, hashes []uint64, f func(ids []uint32) bool) {
	for half, mask := range s.suffix {
		for ; mask != 0; mask &= mask - 1 {
			if !f(x.bySuffix.find(hashes[half*64+bits.TrailingZeros64(mask)], s.pairs)) {
				return
			}
		}
	}
	for quarter, mask := range s.start {
		for ; mask != 0; mask &= mask - 1 {
			for _, ids := range x.startAt(s, quarter*64+bits.TrailingZeros64(mask)) {
				if !f(ids) {
					return
				}
			}
		}
	}
	for quarter, mask := range s.inside {
		for ; mask != 0; mask &= mask - 1 {
			for _, ids := range x.insideAt(s, quarter*64+bits.TrailingZeros64(mask)) {
				if !f(ids) {
					return
				}
			}
		}
	}
	for i := range x.needs {
		if x.needs[i].met(s) && !f(x.always[i:i+1]) {
			return
		}
	}
}

// complex judges the rules that are not in tables and may match. What it costs is added to spent, or to the query's
// own count.
func (x *rules) complex(j *judgement, s *sight, hashes []uint64, spent *int) {
	if j.q.Spent != nil {
		spent = j.q.Spent
	}
	text := s.text()
	x.candidates(s, hashes, func(ids []uint32) bool {
		for _, id := range ids {
			j.try(x, id, text, spent)
		}
		return true
	})
}

// maxKnown is how much of maxSpent it may take to find out that no rule meets a name, so that its place can be
// remembered: of names that take longer there are few, and looking at them is better spent on judging.
const maxKnown = maxSpent / 64

// any reports whether some rule's pattern meets the name, conditions and lists apart, or may for all that can be found
// out for maxKnown, which counts as q's, or for what q has left.
func (x *rules) any(s *sight, hashes []uint64, q *Query) (found bool) {
	text, spent, most := s.text(), 0, maxKnown
	if q.Spent != nil {
		most = min(most, maxSpent-*q.Spent)
	}
	x.candidates(s, hashes, func(ids []uint32) bool {
		for _, id := range ids {
			if found = found || spent > most || x.meets(&x.all[id], text, &spent); found {
				break
			}
		}
		return !found
	})
	if q.Spent != nil {
		*q.Spent += spent
	}
	return found
}

func le64(b []byte) uint64 { return binary.LittleEndian.Uint64(b) }

// try judges one rule.
func (j *judgement) try(x *rules, id uint32, text string, spent *int) {
	r := &x.all[id]
	if len(text) < int(r.least) || r.flags&isDropped != 0 || !j.lists.Has(int(r.list)) {
		return
	}
	rk := rank(r.flags&isAllow != 0, r.flags&isImportant != 0)
	m := x.moreOf(r)
	rewrite := m != nil && m.mods != nil && m.mods.Rewrite != nil
	if (rk < j.r.rank || rk == j.r.rank && j.best > 0) && !rewrite && r.flags&isHost == 0 {
		return // it would change nothing
	}
	if rewrite && j.q.NoRewrite && r.flags&isZone == 0 {
		return
	}
	if j.addr && (r.flags&isHost != 0 || r.flags&isAddr != 0 && x.text(r) != text) {
		return
	}
	if *spent > maxSpent || !x.meets(r, text, spent) || m != nil && m.mods != nil && !applies(m.mods, j.q, text) {
		return
	}
	if r.flags&hasVoids != 0 && intersect(x.voids[id], j.lists) {
		return
	}
	switch {
	case rewrite && r.flags&isAllow != 0:
		collect(&j.cancel, &j.nCancel, id)
	case rewrite:
		collect(&j.rewrite, &j.nRewrite, id)
	case r.flags&isHost != 0:
		collect(&j.hostAddr, &j.nHost, id)
		j.take(hostRank(!m.addr.Is4(), j.q.Type), 0, r.list, r.line)
	default:
		j.take(rk, 0, r.list, r.line)
	}
}

// collect adds a rule that may have been met before, by another of its literals.
func collect(to *[maxRefs]uint32, n *int, id uint32) {
	if *n < maxRefs && !slices.Contains(to[:*n], id) {
		to[*n] = id
		*n++
	}
}

// rewrite returns the value of a rule that has one.
func (x *rules) rewrite(id uint32) *rulelist.Rewrite { return x.moreOf(&x.all[id]).mods.Rewrite }

// deepest drops the rewrites of policy zones that have a longer match, among them or among those found.
func (x *rules) deepest(ids []uint32, found []zoneHit) []uint32 {
	depth := func(r *rule) int {
		n := strings.Count(x.text(r), ".") // of *.x the pattern is .x
		if r.flags&atName != 0 {
			n++
		}
		return n
	}
	kept := ids[:0:len(ids)]
	var all [maxRefs]uint32
	for _, id := range all[:copy(all[:], ids)] {
		r := &x.all[id]
		beaten := r.flags&(isZone|isTrigger) == isZone && (slices.ContainsFunc(found, func(z zoneHit) bool { return z.list == r.list && int(z.depth) > depth(r) }) ||
			slices.ContainsFunc(all[:len(ids)], func(id uint32) bool {
				o := &x.all[id]
				return o.flags&isZone != 0 && o.list == r.list && depth(o) > depth(r)
			}))
		if !beaten {
			kept = append(kept, id)
		}
	}
	return kept
}

func intersect(a, b *Set) bool {
	for i := range a {
		if a[i]&b[i] != 0 {
			return true
		}
	}
	return false
}

// scratch lends memory that package regexp may keep a pointer to; a buffer on the stack would move to the
// heap for every name.
var scratch = sync.Pool{New: func() any { return new([256]byte) }}

// maxSpent is what trying rules that are not in tables may cost for one query, in steps of some ten nanoseconds; see
// Query.Spent. Names made to meet as many rules of 27 real lists as they can come to a quarter of it, others to a
// hundredth.
const maxSpent = 1 << 20

// meets reports whether the rule's pattern matches a name, and adds to what has been spent.
func (x *ruleSet) meets(r *rule, text string, spent *int) bool {
	*spent += 2
	if r.flags&isRegex != 0 {
		m := x.moreOf(r)
		if !m.pre.may(text) {
			return false
		}
		*spent += 8 + 2*len(text)*m.size
		b := scratch.Get().(*[256]byte)
		ok := m.re.Match(b[:copy(b[:], text)])
		scratch.Put(b)
		return ok
	}
	pattern, end, s := x.text(r), r.flags&toEnd != 0, text
	run, rest, star := strings.Cut(pattern, "*")
	switch {
	case r.flags&atName != 0:
		return strings.HasPrefix(s, run) && follows(rest, star, end, s[len(run):], spent)
	case r.flags&atLabel == 0:
		return floats(pattern, end, s, spent)
	}
	for {
		if *spent++; strings.HasPrefix(s, run) {
			if after := s[len(run):]; star || !end || after == "" {
				// With a star the first place that fits is as good as any: what is found behind a later one is
				// found behind this too.
				return follows(rest, star, end, after, spent)
			}
		}
		dot := strings.IndexByte(s, '.')
		if dot < 0 {
			return false
		}
		s = s[dot+1:]
	}
}

// follows matches the rest of a pattern, behind its first run, with the rest of a name.
func follows(rest string, star, end bool, s string, spent *int) bool {
	if star {
		return floats(rest, end, s, spent)
	}
	return !end || s == ""
}

// floats matches a pattern anywhere in s. Taking each run where it first fits leaves the most for the rest.
func floats(pattern string, end bool, s string, spent *int) bool {
	for {
		*spent += 2 + len(s)/16
		run, rest, star := strings.Cut(pattern, "*")
		if !star {
			if end {
				return strings.HasSuffix(s, run)
			}
			return strings.Contains(s, run)
		}
		i := strings.Index(s, run)
		if i < 0 {
			return false
		}
		s, pattern = s[i+len(run):], rest
	}
}

// applies reports whether a rule's conditions hold.
func applies(m *rulelist.Mods, q *Query, text string) bool {
	if len(m.Types) > 0 {
		if !slices.Contains(m.Types, q.Type) {
			return false
		}
	} else if slices.Contains(m.NotTypes, q.Type) {
		return false
	}
	if len(m.DenyAllow) > 0 {
		if isAddress(text) || spares(m.DenyAllow, text) {
			return false
		}
	}
	if names(&m.NotClients, q) || !m.Clients.Empty() && !names(&m.Clients, q) {
		return false
	}
	for _, t := range q.Tags {
		if slices.Contains(m.NotTags, t) {
			return false
		}
	}
	if len(m.Tags) > 0 {
		return slices.ContainsFunc(q.Tags, func(t string) bool { return slices.Contains(m.Tags, t) })
	}
	return true
}

func names(c *rulelist.Clients, q *Query) bool {
	if len(c.Names) > 0 && (has(c.Names, q.Client) || has(c.Names, q.Name)) {
		return true
	}
	if len(c.Prefixes) > 0 && q.Addr.IsValid() {
		a := q.Addr.Unmap().WithZone("")
		// None holds another, so it is the last that does not begin behind the address.
		i, found := slices.BinarySearchFunc(c.Prefixes, a, func(p netip.Prefix, a netip.Addr) int { return p.Addr().Compare(a) })
		return found || i > 0 && c.Prefixes[i-1].Contains(a)
	}
	return false
}

// has reports whether a text, if it is one, is among sorted ones.
func has(sorted []string, s string) bool {
	_, found := slices.BinarySearch(sorted, s)
	return found && s != ""
}

// spares reports whether a name is one of $denyallow, or below one.
func spares(names []string, text string) bool {
	for len(names) > 0 && strings.HasSuffix(names[0], "*") { // few: rulelist.maxWild
		if within(text, names[0]) {
			return true
		}
		names = names[1:]
	}
	for len(names) > 0 {
		if _, found := slices.BinarySearch(names, text); found {
			return true
		}
		dot := strings.IndexByte(text, '.')
		if dot < 0 {
			break
		}
		text = text[dot+1:]
	}
	return false
}

// within reports whether a name is zone, which ends in ".*" and stands for all its top-level domains, of one label or
// more, or is below it.
func within(text, zone string) bool {
	base := strings.TrimSuffix(zone, "*")
	for {
		if strings.HasPrefix(text, base) {
			return true
		}
		dot := strings.IndexByte(text, '.')
		if dot < 0 {
			return false
		}
		text = text[dot+1:]
	}
}

// isAddress reports whether a name is the text of an address. Names with a colon are so rare that ParseAddr may
// judge them, given a copy, since its error keeps the text; the others are judged here.
func isAddress(text string) bool {
	if strings.IndexByte(text, ':') >= 0 {
		_, err := netip.ParseAddr(strings.Clone(text))
		return err == nil
	}
	dots, digits, value := 0, 0, 0
	for i := range len(text) {
		switch c := text[i]; {
		case c == '.' && digits > 0:
			dots++
			digits, value = 0, 0
		case '0' <= c && c <= '9' && (digits == 0 || value > 0): // no leading zeros
			digits++
			if value = 10*value + int(c-'0'); value > 255 {
				return false
			}
		default:
			return false
		}
	}
	return dots == 3 && digits > 0
}
