package filter

import (
	"fmt"
	"io"
	"runtime/debug"
	"strings"
	"sync/atomic"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/filter/rulelist"
)

// MaxOverlays is how many tables younger than the base a Matcher searches. Each costs one probe a suffix.
const MaxOverlays = 3

// A Matcher is an immutable set of compiled lists.
type Matcher struct {
	key        *dnsname.Key
	generation uint64 // unique in the process
	layers     []layer
	rules      *rules
	bad        []rule // the $badfilter rules that are not in tables, kept for the next Build
	lists      Set
}

var generations atomic.Uint64

// Lists returns the numbers of the lists in the Matcher.
func (m *Matcher) Lists() Set { return m.lists }

// Overlays returns how many tables lie over the base.
func (m *Matcher) Overlays() int { return max(0, len(m.layers)-1) }

// Dropped returns the rules that the Matcher does not use because they would cost too much, by list and line.
// The slice must not be changed.
func (m *Matcher) Dropped() []Dropped { return m.rules.dropped }

// Stats says what a Matcher holds.
type Stats struct {
	Rules    int   // rules that can match, or disable others
	Bytes    int64 // memory, roughly
	Patterns int   // of the rules, those that are not in tables
}

// Stats counts rules and memory.
func (m *Matcher) Stats() Stats {
	s := Stats{Patterns: len(m.rules.all) + len(m.bad)}
	for i := range m.layers {
		t := m.layers[i].table
		s.Rules += t.rules
		s.Bytes += int64(cap(t.filter))*8 + int64(cap(t.slots))*16 + int64(cap(t.sets))*8 + int64(cap(t.lines))*4
	}
	s.Rules += s.Patterns
	for _, rs := range [][]rule{m.rules.all, m.bad} {
		for i := range rs {
			s.Bytes += 64 + int64(len(rs[i].glob.Text))
			if rs[i].more != nil {
				s.Bytes += 64
				if rs[i].more.re != nil {
					s.Bytes += 4096
				}
			}
		}
	}
	for _, x := range []*multimap{&m.rules.bySuffix, &m.rules.byDot, &m.rules.label8, &m.rules.label4, &m.rules.by8, &m.rules.by4} {
		s.Bytes += int64(len(x.filter))*8 + int64(len(x.keys))*16 + int64(len(x.ids))*4
	}
	return s
}

// A Builder collects lists for a Matcher. It is for one goroutine.
type Builder struct {
	key     *dnsname.Key
	table   []posting
	complex []rule
	changed Set // lists added or removed
	added   Set
}

// NewBuilder returns a Builder whose Matchers hash names with key.
func NewBuilder(key *dnsname.Key) *Builder { return &Builder{key: key} }

// Add compiles a list under a number below MaxLists; it replaces the list of that number in the Matcher that
// Build is given. A number can be added once. The error is the reader's, or says that the text made the
// compiler panic, which one list must not do to all users; the list then counts as not added.
func (b *Builder) Add(list int, r io.Reader) (rep rulelist.Report, err error) {
	if list < 0 || list >= MaxLists || b.changed.Has(list) {
		panic("filter: list number out of range or given twice")
	}
	postings, complex := len(b.table), len(b.complex)
	defer func() {
		if v := recover(); v != nil {
			b.table, b.complex = b.table[:postings], b.complex[:complex]
			err = fmt.Errorf("the rule compiler panicked, please report the list: %v\n%s", v, debug.Stack())
		}
	}()
	rep, err = rulelist.Parse(r, rulelist.Options{}, func(r *rulelist.Rule) {
		if r.Form < rulelist.Simple && r.Mods == nil {
			h := b.key.Hash(r.Name)
			b.table = append(b.table, posting{max(h, 1), uint64(kindOf(r))<<41 | uint64(list)<<32 | uint64(r.Line)})
			return
		}
		b.complex = append(b.complex, newRule(r, uint16(list)))
	})
	if err != nil {
		b.table, b.complex = b.table[:postings], b.complex[:complex]
		return rep, err
	}
	b.changed.Add(list)
	b.added.Add(list)
	return rep, nil
}

// Remove takes the list of that number out of the Matcher that Build is given.
func (b *Builder) Remove(list int) { b.changed.Add(list) }

// Build returns a Matcher of the lists added and, if old is not nil, of those in old that were not changed.
// The result shares old's tables and puts the new lists over them, unless that makes more than MaxOverlays:
// then all become one table, which takes a moment and, while it lasts, sixteen bytes a rule. The Builder is
// used up.
func (b *Builder) Build(old *Matcher) *Matcher {
	m := &Matcher{key: b.key, generation: generations.Add(1), lists: b.added}
	complex := b.complex
	if old != nil {
		if *old.key != *b.key {
			panic("filter: the old Matcher has another key")
		}
		keep := old.lists.Minus(b.changed)
		for i := range m.lists {
			m.lists[i] |= keep[i]
		}
		for _, l := range old.layers {
			if l.live = l.live.Minus(b.changed); !l.live.empty() {
				m.layers = append(m.layers, l)
			}
		}
		for _, rs := range [][]rule{old.rules.all, old.bad} {
			for i := range rs {
				if keep.Has(int(rs[i].list)) {
					complex = append(complex, rs[i])
				}
			}
		}
	}
	if len(b.table) > 0 {
		m.layers = append(m.layers, layer{newTable(b.table), b.added})
	}
	for _, r := range complex {
		if r.flags&isBad != 0 {
			m.bad = append(m.bad, r)
		}
	}
	m.rules = newRules(b.key, complex)
	*b = Builder{}
	if len(m.layers) > 1+MaxOverlays {
		return m.Merge()
	}
	return m
}

// Merge returns an equal Matcher of one table. It leaves m as it is, so that it can run in the background
// while m serves. Facts taken from m are not valid for the result.
func (m *Matcher) Merge() *Matcher {
	n := 0
	for _, l := range m.layers {
		n += l.rules
	}
	ps := make([]posting, 0, n)
	for i := range m.layers {
		ps = m.layers[i].postings(ps, &m.layers[i].live)
	}
	c := *m
	c.generation = generations.Add(1)
	c.layers = nil
	if len(ps) > 0 {
		c.layers = []layer{{newTable(ps), m.lists}}
	}
	return &c
}

// Compile makes a Matcher of one small text, a private list or a user's own rules, as list 0.
func Compile(key *dnsname.Key, text string) (*Matcher, rulelist.Report) {
	b := NewBuilder(key)
	rep, _ := b.Add(0, strings.NewReader(text)) // a string has no read errors
	return b.Build(nil), rep
}
