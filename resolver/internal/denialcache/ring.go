package denialcache

import (
	"slices"
	"sort"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// A gap is what lies between two places of a circle, the ends not included. Places are ordered as bytes: hashes as
// they are, names as order makes them. A gap from a place to itself is all the rest of the circle.
type gap struct{ from, to string }

func (g *gap) covers(at string) bool {
	if g.from < g.to {
		return g.from < at && at < g.to
	}
	return g.from < at || at < g.to
}

// A ring holds spans in the order of where they begin. Their gaps do not overlap.
type ring []*span

// find returns the span that begins at a place (match) or whose gap the place is in, or nil.
func (r ring) find(at string) (s *span, match bool) {
	if len(r) == 0 {
		return nil, false
	}
	i := r.search(at)
	if i < len(r) && r[i].from == at {
		return r[i], true
	}
	if s = r[(i+len(r)-1)%len(r)]; s.covers(at) {
		return s, false
	}
	return nil, false
}

// search returns the index of the first span that begins at a place or behind it.
func (r ring) search(at string) int {
	return sort.Search(len(r), func(i int) bool { return r[i].from >= at })
}

// insert places s and returns the spans that had to go: those that begin where s does or in its gap, which s says is
// empty, and the one in whose gap s begins.
func (r *ring) insert(s *span) (gone []*span) {
	take := func(from, to int) {
		gone = append(gone, (*r)[from:to]...)
		*r = slices.Delete(*r, from, to)
	}
	at := r.search(s.from)
	if s.from < s.to {
		take(at, r.search(s.to))
	} else {
		take(at, len(*r))
		take(0, min(r.search(s.to), at))
		at = r.search(s.from)
	}
	if n := len(*r); n > 0 {
		if before := (at + n - 1) % n; (*r)[before].covers(s.from) {
			take(before, before+1)
			at = r.search(s.from)
		}
	}
	*r = slices.Insert(*r, at, s)
	return gone
}

// remove takes s out, if it is there.
func (r *ring) remove(s *span) bool {
	i := r.search(s.from)
	if i == len(*r) || (*r)[i] != s {
		return false
	}
	*r = slices.Delete(*r, i, i+1)
	return true
}

// order returns name in a form that is ordered as bytes as names are canonically (RFC 4034 section 6.1): labels from
// the right, each ended by a zero byte, so that the shorter is first, and zero and one bytes in labels written as two.
func order(name dnsname.Name) string {
	var starts [dnsname.MaxLabels + 1]uint8
	n := 0
	for i := 0; i < len(name) && name[i] != 0; i += 1 + int(name[i]) {
		starts[n] = uint8(i)
		n++
	}
	b := make([]byte, 0, len(name)+8)
	for n--; n >= 0; n-- {
		at := int(starts[n])
		for _, c := range []byte(name[at+1 : at+1+int(name[at])]) {
			if c <= 1 {
				b = append(b, 1, c+1)
			} else {
				b = append(b, c)
			}
		}
		b = append(b, 0)
	}
	return string(b)
}
