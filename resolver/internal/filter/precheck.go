package filter

import (
	"regexp/syntax"
	"slices"
	"strings"
)

// A precheck is what can be told of the names an expression matches without running it, which costs as much
// as all the rest of a match.
type precheck struct {
	// anchors are literals of which every match contains at least one; nil if none are known.
	anchors []string
	// needs are literals that every match contains.
	needs []string
	// shortest is the least length of a match.
	shortest int
	// prefixes are the literals with one of which the name begins; nil if the expression does not say.
	prefixes []string
}

func newPrecheck(re *syntax.Regexp) *precheck {
	p := &precheck{anchors: anchors(re), needs: needs(re, nil), shortest: minLen(re)}
	if parts := flat(re); parts[0].Op == syntax.OpBeginText {
		if p.prefixes, _ = prefixes([]string{""}, parts[1:]); slices.Contains(p.prefixes, "") {
			p.prefixes = nil
		}
	}
	return p
}

// may reports whether the expression may match.
func (p *precheck) may(text string) bool {
	if len(text) < p.shortest {
		return false
	}
	if len(p.prefixes) > 0 && !slices.ContainsFunc(p.prefixes, func(s string) bool { return strings.HasPrefix(text, s) }) {
		return false
	}
	for _, n := range p.needs {
		if !strings.Contains(text, n) {
			return false
		}
	}
	return true
}

// flat returns the parts of a concatenation, captures opened.
func flat(re *syntax.Regexp) []*syntax.Regexp {
	switch re.Op {
	case syntax.OpCapture:
		return flat(re.Sub[0])
	case syntax.OpConcat:
		var all []*syntax.Regexp
		for _, s := range re.Sub {
			all = append(all, flat(s)...)
		}
		return all
	}
	return []*syntax.Regexp{re}
}

// prefixes extends each of the strings by what the parts in a row begin with, as far as that is a few plain
// bytes. It reports whether that was all of them.
func prefixes(before []string, parts []*syntax.Regexp) (after []string, whole bool) {
	const most = 128
	for _, re := range parts {
		var next []string
		whole := true
		switch re.Op {
		case syntax.OpLiteral:
			next = []string{literal(re)}
		case syntax.OpCharClass:
			for i := 0; i < len(re.Rune); i += 2 {
				if re.Rune[i+1] >= 0x80 || re.Rune[i+1]-re.Rune[i] >= most {
					return before, false
				}
				for r := re.Rune[i]; r <= re.Rune[i+1]; r++ {
					next = appendNew(next, strings.ToLower(string(r)))
				}
			}
		case syntax.OpPlus, syntax.OpRepeat:
			if re.Op == syntax.OpRepeat && re.Min == 0 {
				return before, false
			}
			next, _ = prefixes([]string{""}, flat(re.Sub[0]))
			whole = false // once is sure; how it goes on is not
		case syntax.OpAlternate:
			for _, s := range re.Sub {
				some, all := prefixes([]string{""}, flat(s))
				whole = whole && all
				for _, p := range some {
					next = appendNew(next, p)
				}
			}
		default:
			return before, false
		}
		if len(next) == 0 || slices.Contains(next, "") || len(before)*len(next) > most {
			return before, false
		}
		before = product(before, next)
		if !whole {
			return before, false
		}
	}
	return before, true
}

// product returns all pairs joined.
func product(a, b []string) (c []string) {
	for _, x := range a {
		for _, y := range b {
			c = appendNew(c, x+y)
		}
	}
	return c
}

// minLen returns the least number of bytes of a match.
func minLen(re *syntax.Regexp) int {
	n := 0
	switch re.Op {
	case syntax.OpLiteral:
		n = len(re.Rune)
	case syntax.OpCharClass, syntax.OpAnyChar, syntax.OpAnyCharNotNL:
		n = 1
	case syntax.OpCapture, syntax.OpPlus:
		n = minLen(re.Sub[0])
	case syntax.OpRepeat:
		n = re.Min * minLen(re.Sub[0])
	case syntax.OpConcat:
		for _, s := range re.Sub {
			n += minLen(s)
		}
	case syntax.OpAlternate:
		n = minLen(re.Sub[0])
		for _, s := range re.Sub[1:] {
			n = min(n, minLen(s))
		}
	}
	return min(n, 1<<16)
}

// literal returns the text of a literal in lower case, or "" if it is not plain.
func literal(re *syntax.Regexp) string {
	s := strings.ToLower(string(re.Rune))
	for i := range len(s) {
		// K and S fold to letters beyond ASCII, but no name has those unless somebody made it up.
		if s[i] >= 0x80 {
			return ""
		}
	}
	return s
}

// needs appends literals that every match of re contains.
func needs(re *syntax.Regexp, to []string) []string {
	switch re.Op {
	case syntax.OpLiteral:
		if s := literal(re); s != "" && len(to) < 8 {
			to = append(to, s)
		}
	case syntax.OpCapture, syntax.OpPlus:
		to = needs(re.Sub[0], to)
	case syntax.OpRepeat:
		if re.Min > 0 {
			to = needs(re.Sub[0], to)
		}
	case syntax.OpConcat:
		for _, s := range re.Sub {
			to = needs(s, to)
		}
	}
	return to
}

// anchors returns literals of which every match of re contains at least one, or nil.
func anchors(re *syntax.Regexp) []string {
	switch re.Op {
	case syntax.OpLiteral:
		if s := literal(re); s != "" {
			return []string{s}
		}
	case syntax.OpCapture, syntax.OpPlus:
		return anchors(re.Sub[0])
	case syntax.OpRepeat:
		if re.Min > 0 {
			return anchors(re.Sub[0])
		}
	case syntax.OpConcat:
		var best []string
		for _, s := range re.Sub {
			if a := anchors(s); a != nil && (best == nil || shortest(a) > shortest(best)) {
				best = a
			}
		}
		return best
	case syntax.OpAlternate:
		var union []string
		for _, s := range re.Sub {
			a := anchors(s)
			if a == nil || len(union) > 64 {
				return nil
			}
			union = append(union, a...)
		}
		return union
	}
	return nil
}

func shortest(s []string) int {
	n := len(s[0])
	for _, s := range s {
		n = min(n, len(s))
	}
	return n
}
