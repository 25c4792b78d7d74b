package filter

import (
	"encoding/binary"
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

// A rule is one that a suffix and a kind do not tell: a pattern, an expression, or a rule with conditions.
type rule struct {
	glob  rulelist.Pattern
	more  *more  // nil for a bare pattern
	twin  uint64 // equal for twins: rules that differ in $badfilter alone
	line  uint32
	list  uint16
	flags ruleFlags
}

type ruleFlags uint8

const (
	isAllow ruleFlags = 1 << iota
	isImportant
	isBad
	isHost
	isAddr // the pattern is an address
	hasVoids // some list disables the rule: see rules.voids
)

// more is what few rules need.
type more struct {
	re   *regexp.Regexp
	mods *rulelist.Mods
	addr netip.Addr
	// anchors are the literals of re of which any match contains one; nil if there are none.
	anchors []string
}

func (r *rule) before(o *rule) bool {
	return r.list < o.list || r.list == o.list && r.line < o.line
}

// newRule takes over what rulelist hands out for a moment.
func newRule(r *rulelist.Rule, list uint16) rule {
	c := rule{glob: r.Glob, line: r.Line, list: list}
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
	if r.Mods != nil || r.Form == rulelist.Regex || r.Addr.IsValid() {
		c.more = &more{mods: r.Mods, addr: r.Addr}
		if r.Form == rulelist.Regex {
			// rulelist has parsed it, so it compiles.
			c.more.re = regexp.MustCompile(rulelist.Insensitive(r.Pattern))
			if re, err := syntax.Parse(rulelist.Insensitive(r.Pattern), syntax.Perl); err == nil {
				c.more.anchors = anchors(re)
			}
		}
	}
	if a, err := netip.ParseAddr(r.Glob.Text); err == nil && a.Is4() {
		c.flags |= isAddr
	}
	c.twin = twin(r)
	return c
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

// rules are all the rules of a Matcher that are not in tables, and the ways to find them.
type rules struct {
	all      []rule
	voids    map[uint32]*Set // by index of all: the lists that disable the rule
	bySuffix multimap        // by suffix hash
	by8, by4 multimap        // by eight or four bytes of text
	always   []uint32        // tried on every name
}

// newRules indexes rs. Rules that are $badfilter find their twins and are dropped.
func newRules(key *dnsname.Key, rs []rule) *rules {
	x := &rules{}
	bad := map[uint64]*Set{}
	n := 0
	for i := range rs {
		if rs[i].flags&isBad != 0 {
			s := bad[rs[i].twin]
			if s == nil {
				s = &Set{}
				bad[rs[i].twin] = s
			}
			s.Add(int(rs[i].list))
		} else {
			n++
		}
	}
	if n == 0 {
		return x
	}
	x.all = make([]rule, 0, n)
	for i := range rs {
		if rs[i].flags&isBad != 0 {
			continue
		}
		r := rs[i]
		r.flags &^= hasVoids
		if s := bad[r.twin]; s != nil && r.flags&isHost == 0 {
			r.flags |= hasVoids
			if x.voids == nil {
				x.voids = map[uint32]*Set{}
			}
			x.voids[uint32(len(x.all))] = s
		}
		x.all = append(x.all, r)
	}
	x.anchor(key)
	return x
}

// anchor hangs each rule off the rarest thing that any name it matches must have.
func (x *rules) anchor(key *dnsname.Key) {
	var suffix, by8, by4 []pair
	var count [1 << 16]uint16 // how many rules have an eight- or four-byte string, roughly
	bump := func(lit string) {
		for n := range grams(lit) {
			c := &count[mix(n)>>48]
			*c = min(*c, 65534) + 1
		}
	}
	for i := range x.all {
		r := &x.all[i]
		if lits := r.literals(); lits != nil {
			for _, l := range lits {
				bump(l)
			}
		}
	}
	var name [256]byte
	for i := range x.all {
		r, id := &x.all[i], uint32(i)
		labels, n := r.suffix(&name)
		lits := r.literals()
		shortest := 0
		if len(lits) > 0 {
			shortest = len(lits[0])
			if r.more != nil && r.more.re != nil {
				for _, l := range lits {
					shortest = min(shortest, len(l))
				}
			} else {
				for _, l := range lits {
					shortest = max(shortest, len(l))
				}
			}
		}
		switch {
		case labels >= 2 || labels == 1 && shortest < 4:
			suffix = append(suffix, pair{key.Hash(name[:n]), id})
		case shortest >= 4 && r.more != nil && r.more.re != nil:
			// Any of the literals may be the one, so the rule hangs off each.
			for _, l := range lits {
				g := rarest(&count, l)
				if len(l) >= 8 {
					by8 = append(by8, pair{g, id})
				} else {
					by4 = append(by4, pair{g, id})
				}
			}
		case shortest >= 4:
			best, lit := uint16(65535), ""
			for _, l := range lits {
				if len(l) < 4 || len(lit) >= 8 && len(l) < 8 {
					continue
				}
				c := count[mix(rarest(&count, l))>>48]
				if c < best || len(l) >= 8 && len(lit) < 8 {
					best, lit = c, l
				}
			}
			g := rarest(&count, lit)
			if len(lit) >= 8 {
				by8 = append(by8, pair{g, id})
			} else {
				by4 = append(by4, pair{g, id})
			}
		default:
			x.always = append(x.always, id)
		}
	}
	x.bySuffix, x.by8, x.by4 = newMultimap(suffix), newMultimap(by8), newMultimap(by4)
}

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

func mix(g uint64) uint64 {
	hi, lo := bits.Mul64(g^0x9e3779b97f4a7c15, 0xd6e8feb86659fd93)
	return hi ^ lo
}

// rarest returns the string of a literal that the fewest rules have. Ends of names, ".com" and the like, are
// what names have most, so the last one is taken only if it must be.
func rarest(count *[1 << 16]uint16, lit string) (best uint64) {
	least := uint32(1 << 31)
	for g := range grams(lit) {
		if c := uint32(count[mix(g)>>48]); c < least {
			best, least = g, c
		}
	}
	return best
}

// literals returns, for a pattern, the runs of bytes that a match contains, all of them; for an expression, a
// set of which it contains one.
func (r *rule) literals() []string {
	if r.more != nil && r.more.re != nil {
		return r.more.anchors
	}
	if r.glob.Text == "" {
		return nil
	}
	return strings.Split(r.glob.Text, "*")
}

// suffix writes the whole labels that the names a pattern matches end with, as a name in wire form, and
// returns their number and the name's length.
func (r *rule) suffix(buf *[256]byte) (labels, n int) {
	g := &r.glob
	if !g.End || r.more != nil && r.more.re != nil {
		return 0, 0
	}
	s := g.Text[strings.LastIndexByte(g.Text, '*')+1:]
	if len(s) < len(g.Text) || g.Start == rulelist.Anywhere {
		dot := strings.IndexByte(s, '.')
		if dot < 0 {
			return 0, 0
		}
		s = s[dot+1:]
	}
	if s == "" || len(s) > 253 {
		return 0, 0
	}
	if g.Start == rulelist.AtName && strings.IndexByte(s, ':') >= 0 { // an IPv6 address is one label
		buf[0] = byte(len(s))
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

// anchors returns literals of which every match of re contains at least one, or nil.
func anchors(re *syntax.Regexp) []string {
	switch re.Op {
	case syntax.OpLiteral:
		s := strings.ToLower(string(re.Rune))
		for i := range len(s) {
			if s[i] >= 0x80 {
				return nil
			}
		}
		return []string{s}
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

// A multimap finds rules by a number. Its filter answers most searches, which fail, from one word.
type multimap struct {
	filter []uint64
	keys   []multikey // open addressing, a power of two of them
	ids    []uint32
}

type multikey struct {
	key      uint64
	from, to uint32 // of ids; free if equal
}

type pair struct {
	key uint64
	id  uint32
}

func newMultimap(ps []pair) multimap {
	var m multimap
	if len(ps) == 0 {
		return m
	}
	slices.SortStableFunc(ps, func(a, b pair) int {
		switch {
		case a.key < b.key:
			return -1
		case a.key > b.key:
			return 1
		}
		return 0
	})
	ps = slices.Compact(ps)
	distinct := 0
	for i := range ps {
		if i == 0 || ps[i].key != ps[i-1].key {
			distinct++
		}
	}
	m.keys = make([]multikey, 1<<bits.Len(uint(distinct*3/2)))
	m.filter = make([]uint64, 1<<bits.Len(uint(distinct/4)))
	m.ids = make([]uint32, len(ps))
	for i := 0; i < len(ps); {
		k := multikey{key: ps[i].key, from: uint32(i)}
		for ; i < len(ps) && ps[i].key == k.key; i++ {
			m.ids[i] = ps[i].id
		}
		k.to = uint32(i)
		h := mix(k.key)
		m.filter[h>>32&uint64(len(m.filter)-1)] |= 1 << (h >> 58)
		at := h & uint64(len(m.keys)-1)
		for m.keys[at].from != m.keys[at].to {
			at = (at + 1) & uint64(len(m.keys)-1)
		}
		m.keys[at] = k
	}
	return m
}

func (m *multimap) find(key uint64) []uint32 {
	if len(m.ids) == 0 {
		return nil
	}
	h := mix(key)
	if m.filter[h>>32&uint64(len(m.filter)-1)]&(1<<(h>>58)) == 0 {
		return nil
	}
	for at := h & uint64(len(m.keys)-1); ; at = (at + 1) & uint64(len(m.keys)-1) {
		k := m.keys[at]
		if k.from == k.to {
			return nil
		}
		if k.key == key {
			return m.ids[k.from:k.to]
		}
	}
}

// complex judges the rules that are not in tables.
func (m *Matcher) complex(j *judgement, name []byte, hashes []uint64) {
	var buf [256]byte
	text := view(appendText(buf[:0], name))
	x := m.rules
	for i := len(hashes) - 1; i >= 0 && len(x.bySuffix.ids) > 0; i-- {
		for _, id := range x.bySuffix.find(hashes[i]) {
			j.try(x, id, text)
		}
	}
	if len(x.by8.ids) > 0 {
		for i := 0; i+8 <= len(text); i++ {
			for _, id := range x.by8.find(le64(text[i:])) {
				j.try(x, id, text)
			}
		}
	}
	if len(x.by4.ids) > 0 {
		for i := 0; i+4 <= len(text); i++ {
			for _, id := range x.by4.find(le32(text[i:])) {
				j.try(x, id, text)
			}
		}
	}
	for _, id := range x.always {
		j.try(x, id, text)
	}
}

// any reports whether some rule's pattern meets the name, conditions and lists apart.
func (x *rules) any(name []byte, hashes []uint64) bool {
	if len(x.all) == 0 {
		return false
	}
	var buf [256]byte
	text := view(appendText(buf[:0], name))
	meets := func(ids []uint32) bool {
		for _, id := range ids {
			if x.all[id].meets(text) {
				return true
			}
		}
		return false
	}
	for _, h := range hashes {
		if meets(x.bySuffix.find(h)) {
			return true
		}
	}
	for i := 0; i+4 <= len(text); i++ {
		if i+8 <= len(text) && meets(x.by8.find(le64(text[i:]))) || meets(x.by4.find(le32(text[i:]))) {
			return true
		}
	}
	return meets(x.always)
}

func le64(s string) uint64 {
	return uint64(s[0]) | uint64(s[1])<<8 | uint64(s[2])<<16 | uint64(s[3])<<24 |
		uint64(s[4])<<32 | uint64(s[5])<<40 | uint64(s[6])<<48 | uint64(s[7])<<56
}

func le32(s string) uint64 {
	return uint64(s[0]) | uint64(s[1])<<8 | uint64(s[2])<<16 | uint64(s[3])<<24
}

// try judges one rule.
func (j *judgement) try(x *rules, id uint32, text string) {
	r := &x.all[id]
	if !j.lists.Has(int(r.list)) {
		return
	}
	rk := rank(r.flags&isAllow != 0, r.flags&isImportant != 0)
	rewrite := r.more != nil && r.more.mods != nil && r.more.mods.Rewrite != nil
	if rk <= j.r.rank && !rewrite && r.flags&isHost == 0 {
		return // it would change nothing
	}
	if rewrite && j.q.NoRewrite {
		return
	}
	if j.addr && (r.flags&isHost != 0 || r.flags&isAddr != 0 && r.glob.Text != text) {
		return
	}
	if !r.meets(text) || !r.applies(j.q, text) {
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
		j.take(hostRank(!r.more.addr.Is4(), j.q.Type), r.list, r.line)
	default:
		j.take(rk, r.list, r.line)
	}
}

// collect adds a rule that may have been met before, by another of its literals.
func collect(to *[maxRefs]uint32, n *int, id uint32) {
	if *n < maxRefs && !slices.Contains(to[:*n], id) {
		to[*n] = id
		*n++
	}
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

// meets reports whether the rule's pattern matches a name.
func (r *rule) meets(text string) bool {
	if r.more != nil && r.more.re != nil {
		b := scratch.Get().(*[256]byte)
		ok := r.more.re.Match(b[:copy(b[:], text)])
		scratch.Put(b)
		return ok
	}
	return globMatch(&r.glob, text)
}

func globMatch(g *rulelist.Pattern, s string) bool {
	switch g.Start {
	case rulelist.Anywhere:
		return floats(g.Text, g.End, s)
	case rulelist.AtName:
		return begins(g.Text, g.End, s)
	}
	for {
		if begins(g.Text, g.End, s) {
			return true
		}
		dot := strings.IndexByte(s, '.')
		if dot < 0 {
			return false
		}
		s = s[dot+1:]
	}
}

// begins matches a pattern from the beginning of s.
func begins(pattern string, end bool, s string) bool {
	run, rest, star := strings.Cut(pattern, "*")
	if !strings.HasPrefix(s, run) {
		return false
	}
	if star {
		return floats(rest, end, s[len(run):])
	}
	return !end || len(s) == len(run)
}

// floats matches a pattern anywhere in s. Taking each run where it first fits leaves the most for the rest.
func floats(pattern string, end bool, s string) bool {
	for {
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

// applies reports whether the rule's conditions hold.
func (r *rule) applies(q *Query, text string) bool {
	if r.more == nil || r.more.mods == nil {
		return true
	}
	m := r.more.mods
	if len(m.Types) > 0 {
		if !slices.Contains(m.Types, q.Type) {
			return false
		}
	} else if slices.Contains(m.NotTypes, q.Type) {
		return false
	}
	if len(m.DenyAllow) > 0 {
		if isAddress(text) {
			return false
		}
		for _, d := range m.DenyAllow {
			if within(text, d) {
				return false
			}
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
	if q.Client != "" && slices.Contains(c.Names, q.Client) {
		return true
	}
	if len(c.Prefixes) > 0 && q.Addr.IsValid() {
		a := q.Addr.Unmap().WithZone("")
		for _, p := range c.Prefixes {
			if p.Contains(a) {
				return true
			}
		}
	}
	return false
}

// within reports whether a name is zone or below it. A zone ending in ".*" stands for all its top-level
// domains, of one label or more.
func within(text, zone string) bool {
	base, wild := strings.CutSuffix(zone, "*")
	for {
		if wild && strings.HasPrefix(text, base) || !wild && text == zone {
			return true
		}
		dot := strings.IndexByte(text, '.')
		if dot < 0 {
			return false
		}
		text = text[dot+1:]
	}
}

// isAddress reports whether a name is the text of an address.
func isAddress(text string) bool {
	if text == "" || text[0] > '9' && strings.IndexByte(text, ':') < 0 {
		return false
	}
	_, err := netip.ParseAddr(text)
	return err == nil
}
