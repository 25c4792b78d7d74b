package filter

import (
	"math"
	"net/netip"
	"regexp"
	"regexp/syntax"
	"strings"

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

func move[T any](c *cutter, s []T) []T {
	to := cut[T](c, len(s))
	copy(to, s)
	return to
}
