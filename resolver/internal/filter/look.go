package filter

import (
	"encoding/binary"
	"math"
	"math/bits"
)

// A sight is a name as the rules see that are not in tables: its text, and where in it some may be found.
type sight struct {
	buf    [256 + ahead]byte // the text, and then zeros
	size   int
	chars  uint64    // the text's characters, if there are rules that ask
	pairs  uint64    // the text's pairs, with the zero bytes around it, if any place may have rules
	suffix [2]uint64 // bits: labels whose suffix may have rules
	start  [4]uint64 // bits: places where a label starts that may have rules
	inside [4]uint64 // bits: places where a text starts that may have rules
}

// ahead is how many bytes from a place of a name on are looked at, at most.
const ahead = 16

func (s *sight) text() string { return view(s.buf[:s.size]) }

// take takes a name in: its text, its characters, and the places in it where a text may start that rules have. It
// asks all places without a branch for each: most names meet nothing, and the processor asks several places at once.
func (x *rules) take(s *sight, name []byte) {
	s.size = len(appendText(s.buf[:0], name))
	clear(s.buf[s.size:][:ahead])
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

func le64(b []byte) uint64 { return binary.LittleEndian.Uint64(b) }
