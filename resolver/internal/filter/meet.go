package filter

import (
	"net/netip"
	"slices"
	"strings"
	"sync"

	"golang.org/x/net/publicsuffix"

	"github.com/sluice-dns/sluice/resolver/internal/filter/rulelist"
)

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
	if len(names) > 0 && strings.HasSuffix(names[0], "*") {
		suffix, registry := publicsuffix.PublicSuffix(strings.Clone(text)) // which may keep it, in an error
		above := text[:len(text)-len(suffix)]
		for len(names) > 0 && strings.HasSuffix(names[0], "*") { // few: rulelist.maxWild
			if registry && within(above, names[0]) {
				return true
			}
			names = names[1:]
		}
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

// within reports whether a name is zone, which ends in ".*" and stands for all top-level domains and what else names are
// registered under (google.* is google.com and google.co.uk, but not google.evil.com), or is below it. above is what the
// name has above that.
func within(above, zone string) bool {
	base := zone[:len(zone)-1]
	return strings.HasSuffix(above, base) && (len(above) == len(base) || above[len(above)-len(base)-1] == '.')
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
