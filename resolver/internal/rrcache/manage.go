package rrcache

import (
	"errors"
	"slices"
	"sync"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// Purge removes what is stored for a name, in every view and for every subnet: all types or, if typ is not
// 0, that one; with subtree also for all names below. It removes NXDOMAIN entries of the name whatever the
// type, and those of its ancestors, since they would answer for it. It returns how many entries went.
//
// What a resolution under way stores later is not its business. What a dump being loaded still holds of the name is
// left out.
func (c *Cache) Purge(name dnsname.Name, subtree bool, typ uint16) int {
	p := purge{name, subtree, typ}
	c.loads.purged(p)
	return c.table.Walk(func(payload []byte, _ uint64) bool {
		kind, k, _, ok := readKey(payload)
		return ok && p.takes(kind, &k)
	})
}

// A purge is what Purge was told.
type purge struct {
	name    dnsname.Name
	subtree bool
	typ     uint16
}

func (p *purge) takes(kind kind, k *Key) bool {
	if kind == kindNX && p.name.IsWithin(k.Name) {
		return true
	}
	if k.Name != p.name && !(p.subtree && k.Name.Below(p.name)) {
		return false
	}
	return kind == kindNX || p.typ == 0 || p.typ == k.Type
}

// maxPurges is how many purges are remembered for the dumps being loaded: each of their entries is held against
// all of them. With one more the loading ends.
const maxPurges = 1000

// ErrPurged is the error of Load when so much was purged meanwhile that the rest of the dump is not worth having.
var ErrPurged = errors.New("the cache was emptied, or purged of very many names, meanwhile")

// loads remembers what is purged while dumps are being loaded: what comes out of a file is older than the purge.
//
// An entry is added under mu, and a purge noted under it before it walks the table. So the purge either finds
// the entry in the table or is known to who would add it.
type loads struct {
	mu     sync.Mutex // held for a block's entries, or to note a purge
	open   int        // dumps being loaded
	purges []purge    // since the first of them began
	ended  uint64     // how often everything that was being loaded then became useless
	count  uint64     // purges so far
}

// A loading is one of them.
type loading struct {
	from  int // purges before it began do not concern it: whoever loads a dump later wants what it holds
	ended uint64
}

func (l *loads) begin() loading {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open++
	return loading{len(l.purges), l.ended}
}

func (l *loads) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open--; l.open == 0 {
		l.purges = nil
	}
}

func (l *loads) purged(p purge) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.count++
	switch {
	case l.open == 0:
	case len(l.purges) >= maxPurges:
		l.ended++
	default:
		l.purges = append(l.purges, p)
	}
}

func (l *loads) emptied() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.count++
	l.ended++
}

// block runs add with the purges since in began, or returns ErrPurged.
func (l *loads) block(in loading, add func([]purge)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended != in.ended {
		return ErrPurged
	}
	add(l.purges[in.from:])
	return nil
}

// Purges returns how often something was purged, cleared or raised. A dump from before the last time holds what was
// to be forgotten.
func (c *Cache) Purges() uint64 {
	c.loads.mu.Lock()
	defer c.loads.mu.Unlock()
	return c.loads.count
}

func taken(ps []purge, kind kind, k *Key) bool {
	return slices.ContainsFunc(ps, func(p purge) bool { return p.takes(kind, k) })
}

// Raise begins a new epoch: everything stored before is a miss from now on, and dumps being loaded are given up.
func (c *Cache) Raise() {
	c.loads.emptied() // first: nothing old is added to the new epoch
	if c.epoch.Add(1)&epochMask == 0 {
		c.table.Clear() // 65,536 epochs ago the entries looked alike
	}
}

// Limit changes the budget while serving; see arena.Table.Limit.
func (c *Cache) Limit(bytes int64) int64 { return c.table.Limit(bytes) }

// Clear removes everything and gives the memory back to the system. Dumps being loaded are given up.
func (c *Cache) Clear() {
	c.loads.emptied()
	c.table.Clear()
}

// Stats are sums of this moment.
type Stats struct {
	Entries      int
	Bytes        int64 // of live entries
	Budget       int64 // of everything
	Hits, Misses uint64
	Evictions    uint64
}

// Stats returns the sums.
func (c *Cache) Stats() Stats {
	t := c.table.Stats()
	s := Stats{Entries: t.Entries, Bytes: t.Bytes, Budget: c.table.Bytes(), Evictions: t.Evictions}
	for i := range c.counts {
		s.Hits += c.counts[i].hits.Load()
		s.Misses += c.counts[i].misses.Load()
	}
	return s
}
