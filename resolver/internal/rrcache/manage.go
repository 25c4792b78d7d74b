package rrcache

import (
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// Purge removes what is stored for a name, in every view and for every subnet: all types or, if typ is not
// 0, that one; with subtree also for all names below. It removes NXDOMAIN entries of the name whatever the
// type, and those of its ancestors, since they would answer for it. It returns how many entries went.
//
// What a resolution under way stores later is not its business.
func (c *Cache) Purge(name dnsname.Name, subtree bool, typ uint16) int {
	return c.table.Walk(func(payload []byte, _ uint64) bool {
		kind, k, _, ok := readKey(payload)
		if !ok {
			return false
		}
		if kind == kindNX && name.IsWithin(k.Name) {
			return true
		}
		if k.Name != name && !(subtree && k.Name.Below(name)) {
			return false
		}
		return kind == kindNX || typ == 0 || typ == k.Type
	})
}

// Raise begins a new epoch: everything stored before is a miss from now on.
func (c *Cache) Raise() {
	if c.epoch.Add(1)&epochMask == 0 {
		c.table.Clear() // 65,536 epochs ago the entries looked alike
	}
}

// Limit changes the budget while serving; see arena.Table.Limit.
func (c *Cache) Limit(bytes int64) int64 { return c.table.Limit(bytes) }

// Clear removes everything and gives the memory back to the system.
func (c *Cache) Clear() { c.table.Clear() }

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
