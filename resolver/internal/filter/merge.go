package filter

import (
	"cmp"
	"math/bits"
	"runtime"
	"slices"
	"sync/atomic"
	"time"
)

const (
	// borders is how many parts a table can be cut into, by the first eight bits of hashes.
	borders = 256
	// stages is how often a merge stops to let go of what it has done with.
	stages = 8
	// stagedFrom is how many suffixes a table has at least that is merged in stages: two megabytes of them.
	stagedFrom = 1 << 17
	// maxLayers is how many tables a Matcher searches while it is merged.
	maxLayers = 1 + MaxOverlays + 1
)

// Merge returns an equal Matcher of one table. It can run in the background while m serves.
//
// So that old and new table need not be in memory at once, a big merge hands out equal Matchers on its way, each
// of which has some more in the new table and does without what the one before had of it in the old ones. serve
// puts such a Matcher in the place of the last and lets go of that, as the caller must let go of m before; the
// memory is free when nobody matches with them any more. What serve is given is for matching alone: it can be
// neither saved nor built upon. If serve is nil, the new table is made beside the old ones.
func (m *Matcher) Merge(serve func(*Matcher)) *Matcher {
	next := *m // but from here on m is not used, so that it can go
	next.generation = generations.Add(1)
	next.stale = false
	layers := slices.Clone(m.layers)
	next.layers = nil

	rules, suffixes, shared := 0, 0, 0
	for g := newMerging(layers); g.next(); {
		rules += len(g.ps)
		suffixes++
		if len(g.ps) > 1 {
			shared += len(g.ps)
		}
	}
	if suffixes == 0 {
		return &next
	}
	const step = borders / stages
	border := step
	if serve == nil || suffixes < stagedFrom {
		border = borders
	} else {
		release(nil) // what is left of the building of m
	}
	w := newWriter(rules, suffixes, shared)
	free := 0 // the first slot that is so
	for g := newMerging(layers); g.next(); {
		free = w.place(g.ps[0].hash, free) + 1
	}
	mem := newRegion(2 * max(free, int(w.span)))
	mem.huge()
	w.slots = castSlice[slot](mem.words)
	w.mem = append(w.mem, mem.pieces(hugePage)...)

	free = 0
	g := newMerging(layers)
	clear(layers)
	for g.next() {
		for border < borders && g.ps[0].hash >= uint64(border)<<56 {
			// Who searches below the border must not come upon slots that are being written: the last one before
			// it has to be free.
			if free < border*int(w.span/borders) {
				g.stage(w, uint64(border)<<56, next, serve)
				border = (border/step + 1) * step
			} else {
				border++
			}
		}
		at := w.place(g.ps[0].hash, free)
		w.slots[at] = w.slot(g.ps)
		free = at + 1
	}
	w.sets = slices.Clip(w.sets)
	next.layers = []layer{{w.table, next.lists}}
	return &next
}

// place returns where a suffix goes if the slots from free on are.
func (t *table) place(hash uint64, free int) int {
	home, _ := bits.Mul64(hash, t.span)
	return max(free, int(home))
}

// A merging yields the suffixes of some layers in order of hash.
type merging struct {
	from []cursor
	ps   []posting // of the suffix come to
}

type cursor struct {
	layer
	at int // the next slot that is not free
}

func newMerging(layers []layer) *merging {
	g := &merging{}
	for _, l := range layers {
		c := cursor{l, -1}
		c.step()
		g.from = append(g.from, c)
	}
	return g
}

func (c *cursor) step() {
	for c.at++; c.at < len(c.slots) && c.slots[c.at].hash == 0; c.at++ {
	}
}

// next goes to the next suffix that has rules; it is false at the end.
func (g *merging) next() bool {
	g.ps = g.ps[:0]
	for len(g.ps) == 0 {
		least := uint64(0)
		for i := range g.from {
			if c := &g.from[i]; c.at < len(c.slots) && (least == 0 || c.slots[c.at].hash < least) {
				least = c.slots[c.at].hash
			}
		}
		if least == 0 {
			return false
		}
		parts := 0
		for i := range g.from {
			if c := &g.from[i]; c.at < len(c.slots) && c.slots[c.at].hash == least {
				before := len(g.ps)
				g.ps = c.appendPostings(g.ps, &c.slots[c.at], &c.live)
				if len(g.ps) > before {
					parts++
				}
				c.step()
			}
		}
		if parts > 1 {
			slices.SortFunc(g.ps, func(a, b posting) int { return cmp.Compare(a.at, b.at) })
		}
	}
	runtime.KeepAlive(g)
	return true
}

// stage serves a Matcher that finds what lies before a border in the new table and the rest in the old ones, and
// goes on with what these then are.
func (g *merging) stage(w *writer, border uint64, next Matcher, serve func(*Matcher)) {
	next.generation = generations.Add(1)
	next.partial = true
	next.layers = []layer{{w.before(border), next.lists}}
	var held atomic.Int64
	for i := range g.from {
		c := &g.from[i]
		c.table = c.after(border, &held)
		next.layers = append(next.layers, c.layer)
	}
	serve(&next)
	release(&held)
}

// release has the collector give back what nobody holds any more, and waits for a moment until that is done for what
// held counts. Who matches with the Matcher of before has that for a moment yet; if somebody has it for longer, the
// memory is given back later.
func release(held *atomic.Int64) {
	if held == nil { // anything that is given back with all else
		held = new(atomic.Int64)
		held.Add(1)
		runtime.AddCleanup(new(region), func(held *atomic.Int64) { held.Add(-1) }, held)
	}
	for try := range 100 {
		if try%25 == 0 {
			runtime.GC()
		}
		if held.Load() == 0 {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// before returns the table as it is now, with suffixes before a border alone. It stays so while the writer goes
// on: what is written then, nobody who searches it reads.
func (w *writer) before(border uint64) *table {
	t := *w.table
	t.sift(0, border>>(t.shift&63))
	return &t
}

// after returns the table without the suffixes before a border, unless it is small. held counts the pieces of
// memory that it does without until they are given back.
func (t *table) after(border uint64, held *atomic.Int64) *table {
	if len(t.filter) < 2*borders {
		return t
	}
	c := *t
	c.sift(border>>(t.shift&63), uint64(len(t.filter)))
	first, _ := bits.Mul64(border, t.span) // of the slots that may be searched
	filter, slots, lines := bytesOf(t.filter), bytesOf(t.slots[:first]), bytesOf(t.lines)
	for _, s := range t.slots[first:] {
		if s.hash >= border && s.set&single == 0 { // lines are in the order of slots
			lines = bytesOf(t.lines[:s.lines])
			break
		}
	}
	c.mem = nil
	for _, r := range t.mem {
		if !r.mapped || !r.inside(filter) && !r.inside(slots) && !r.inside(lines) {
			c.mem = append(c.mem, r)
			continue
		}
		held.Add(1)
		runtime.AddCleanup(r, func(held *atomic.Int64) { held.Add(-1) }, held)
	}
	runtime.KeepAlive(t)
	return &c
}

// sift gives the table a filter of its own with some words of the one it has. It is coarser, so that it takes
// little memory: for the moment that a stage of a merge lasts, more searches may find that there is nothing.
func (t *table) sift(from, to uint64) {
	sieve := newRegion(len(t.filter) / 2)
	for i := from; i < to; i++ {
		sieve.words[i/2] |= t.filter[i]
	}
	t.sieve, t.filter, t.shift = sieve, sieve.words, t.shift+1
}
