package filter

import (
	"cmp"
	"encoding/binary"
	"iter"
	"math"
	"math/bits"
	"slices"
	"strings"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

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
