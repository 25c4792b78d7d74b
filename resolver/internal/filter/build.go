package filter

import (
	"fmt"
	"io"
	"math"
	"runtime"
	"runtime/debug"
	"slices"
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
	lists      Set
	triggers   triggers // of all lists there were since the first
	servers    Set      // lists with rules about name servers
	stale      bool     // its tables have rules of lists that have changed or are gone
	partial    bool     // a stage of a merge, only to match with
}

var generations atomic.Uint64

// Lists returns the numbers of the lists in the Matcher.
func (m *Matcher) Lists() Set { return m.lists }

// Overlays returns how many tables lie over the base.
func (m *Matcher) Overlays() int { return max(0, len(m.layers)-1) }

// Merged reports whether Merge would only copy: there is one table, without rules of lists that are gone.
func (m *Matcher) Merged() bool { return len(m.layers) <= 1 && !m.stale }

// Dropped returns the rules that the Matcher does not use because they would cost too much, by list and line.
// The slice must not be changed.
func (m *Matcher) Dropped() []Dropped { return m.rules.dropped }

// Stats says what a Matcher holds.
type Stats struct {
	Rules    int   // rules that can match, or disable others
	Bytes    int64 // memory, roughly
	Overlaid int64 // of it, the overlays
	Patterns int   // of the rules, those that are not in tables
}

// Stats counts rules and memory.
func (m *Matcher) Stats() Stats {
	s := Stats{Patterns: len(m.rules.all)}
	for i := range m.layers {
		t := m.layers[i].table
		s.Rules += t.rules
		bytes := int64(cap(t.filter))*8 + int64(cap(t.slots))*16 + int64(cap(t.sets))*8 + int64(cap(t.lines))*4
		if s.Bytes += bytes; i > 0 {
			s.Overlaid += bytes
		}
	}
	s.Rules += s.Patterns
	s.Bytes += int64(len(m.rules.all))*32 + int64(len(m.rules.texts)) + int64(len(m.rules.always))*4
	for _, x := range m.rules.maps() {
		s.Bytes += int64(len(x.filter))*8 + int64(len(x.keys))*24 + int64(len(x.ids))*4
	}
	for _, x := range m.rules.mores {
		s.Bytes += 96
		if x.re != nil {
			s.Bytes += 4096
		}
	}
	return s
}

// A Builder collects lists for a Matcher. It is for one goroutine.
type Builder struct {
	key     *dnsname.Key
	table   postings
	rules   ruleSet
	changed Set // lists added or removed
	added   Set
	trigger triggers
	servers Set    // of those added, the lists with rules about name servers
	undo    func() // takes the list added last out again
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
	postings, rules, texts, mores := len(b.table.all), len(b.rules.all), len(b.rules.texts), len(b.rules.mores)
	undo := func() {
		b.table.all = b.table.all[:postings]
		b.rules.cut(rules, texts, mores)
		b.servers.Remove(list)
	}
	defer func() {
		if v := recover(); v != nil {
			undo()
			err = fmt.Errorf("the rule compiler panicked, please report the list: %v\n%s", v, debug.Stack())
		}
	}()
	full := false
	rep, err = rulelist.Parse(r, rulelist.Options{}, func(r *rulelist.Rule) {
		switch r.Trigger {
		case rulelist.ByServer, rulelist.ByServerAddr:
			b.servers.Add(list)
		}
		if r.Prefix.IsValid() {
			b.trigger[r.Trigger].add(r.Prefix)
		}
		if r.Form < rulelist.Simple && r.Mods == nil {
			h := b.key.Hash(r.Name)
			b.table.add(posting{max(h, 1), uint64(kindOf(r))<<41 | uint64(list)<<32 | uint64(r.Line)})
			return
		}
		full = !b.rules.add(r, uint16(list)) || full
	})
	if err == nil && full {
		err = fmt.Errorf("the patterns of all lists together have more than %d bytes", math.MaxUint32)
	}
	if err != nil {
		undo()
		return rep, err
	}
	b.changed.Add(list)
	b.added.Add(list)
	b.undo = func() {
		undo()
		b.changed.Remove(list)
		b.added.Remove(list)
	}
	return rep, nil
}

// Undo makes the last Add not to have been, for a caller who does not like its Report.
func (b *Builder) Undo() { b.undo() }

// Remove takes the list of that number out of the Matcher that Build is given.
func (b *Builder) Remove(list int) { b.changed.Add(list) }

// Build returns a Matcher of the lists added and, if old is not nil, of those in old that were not changed.
// The result shares old's tables and puts the new lists over them, unless that makes more than MaxOverlays:
// then all become one table beside the old ones, which takes a moment and as much memory again; who minds that
// calls Merge before. It shares old's patterns too if no list that has some is changed. The Builder is used up.
func (b *Builder) Build(old *Matcher) *Matcher {
	m := &Matcher{key: b.key, generation: generations.Add(1), lists: b.added, triggers: b.trigger, servers: b.servers}
	if old != nil {
		if *old.key != *b.key {
			panic("filter: the old Matcher has another key")
		}
		if old.partial {
			panic("filter: the old Matcher is being merged")
		}
		keep := old.lists.Minus(b.changed)
		for i := range m.lists {
			m.lists[i] |= keep[i]
			m.servers[i] |= keep[i] & old.servers[i]
		}
		for t := range m.triggers {
			for i := range m.triggers[t] {
				m.triggers[t][i] |= old.triggers[t][i]
			}
		}
		m.stale = old.stale
		for _, l := range old.layers {
			live := l.live.Minus(b.changed)
			m.stale = m.stale || live != l.live
			if l.live = live; !l.live.empty() {
				m.layers = append(m.layers, l)
			}
		}
	}
	if len(b.table.all) > 0 {
		m.layers = append(m.layers, layer{newTable(&b.table), b.added})
	}
	m.rules = b.newRules(old)
	*b = Builder{}
	if len(m.layers) > 1+MaxOverlays {
		return m.Merge(nil)
	}
	return m
}

// newRules returns the rules of the lists added and those of old that are not in tables: old's own if no list
// with such rules has changed, for to index them again takes as long as many a list.
func (b *Builder) newRules(old *Matcher) *rules {
	defer runtime.KeepAlive(old)
	kept, keep := &ruleSet{}, Set{}
	if old != nil {
		kept, keep = &old.rules.ruleSet, old.lists.Minus(b.changed)
		if len(b.rules.all) == 0 && !slices.ContainsFunc(kept.all, func(r rule) bool { return !keep.Has(int(r.list)) }) {
			return old.rules
		}
	}
	if len(b.rules.texts) > offHeap {
		runtime.GC() // reading left garbage, and indexing needs memory
	}
	all, mem, lost := b.rules.join(kept, &keep)
	x := newRules(b.key, all, mem)
	x.dropped = append(x.dropped, lost...)
	return x
}

// Compile makes a Matcher of one small text, a private list or a user's own rules, as list 0.
func Compile(key *dnsname.Key, text string) (*Matcher, rulelist.Report) {
	b := NewBuilder(key)
	rep, _ := b.Add(0, strings.NewReader(text)) // a string has no read errors
	return b.Build(nil), rep
}
