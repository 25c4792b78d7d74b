// Package answercache keeps settled answers, each ready to be sent but for its header and TTLs, keyed by the
// whole Question: name, type, class, DO, CD, view and subnet. Two questions that differ in any of them never
// share an entry.
//
// It is an accelerator in front of the RRset cache: losing an entry costs time only, which answers deserve a
// place is the caller's decision, and nothing here is persisted. Get takes no lock, allocates nothing and
// copies the entry into the caller's buffer (see package arena); the key is compared byte by byte.
//
// Every entry carries the epoch in which it was settled. Raising the epoch makes all older ones misses at
// once, and entries settled before that are refused when they arrive late: whoever resolves reads Epoch
// before it starts.
package answercache

import (
	"encoding/binary"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/arena"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
)

// Get copies the answer to q into buf and returns it; it is valid as long as buf. hash is Hash of q. An entry
// that buf cannot hold is a miss.
func (c *Cache) Get(q *query.Question, hash uint64, buf []byte, now clock.Instant) (settled.Entry, Found) {
	for p := c.table.Probe(hash ^ c.seed); p.Next(); {
		n := p.Len()
		if n > len(buf) || !p.Copy(buf[:n]) {
			continue
		}
		e, ok := settled.FromCache(buf[:n])
		if !ok || !e.Answers(q) {
			continue
		}
		end := e.Expires()
		if e.Epoch() != c.epoch.Load() || end.Add(c.maxStale) <= now {
			return settled.Entry{}, Found{}
		}
		p.Touch()
		f := Found{OK: end > now, Stale: end <= now, ref: p.Ref()}
		if left := end.Sub(now); left <= c.prefetchLeft && f.OK && p.Freq() >= prefetchUses {
			life := end.Sub(clock.Instant(p.Meta()))
			f.Due = life >= prefetchLife && left <= life/10 && !p.Claimed() && !e.Stale()
		}
		return e, f
	}
	return settled.Entry{}, Found{}
}

// Found says what Get found. It is a value of a few words, and is good for one Claim at any later time.
type Found struct {
	// OK: the entry is within its TTL. Stale: it is past it, but not by more than Options.MaxStale. Never
	// both.
	OK, Stale bool
	// Due: it should be fetched anew, because it was used before and the last tenth of a life of at least 9 s
	// has begun. Whoever Claims it does. One made of stale data never is: its servers are left alone.
	Due bool
	ref arena.Ref
}

// Claim reports whether the caller is the one to fetch the entry anew. It is true once until the entry is
// replaced or Unclaim is called.
func (f Found) Claim() bool { return f.ref.Claim() }

// Unclaim gives a claim back, after a fetch that failed.
func (f Found) Unclaim() { f.ref.Unclaim() }

// Prefetching (hardening: prefetch storms): an answer is worth it after two uses, of which its second question,
// by which it got here, is the first; and if its life is long enough for a tenth of it to be a window.
const (
	prefetchUses = 1
	prefetchLife = 9 * time.Second
)

// Options tunes a Cache.
type Options struct {
	// Bytes is the budget for everything, index included; see arena.Options.
	Bytes int64
	// Seed is random for each process: with it nobody who learns the key of Hash can tell which entries are
	// neighbours.
	Seed uint64
	// MaxStale is how long an answer can be had after its end. Zero means not at all.
	MaxStale time.Duration
	// NoPrefetch leaves entries alone until they end.
	NoPrefetch bool
}

// A Cache keeps settled answers. It is safe for concurrent use.
type Cache struct {
	table        *arena.Table // constant after New
	seed         uint64
	maxStale     time.Duration
	prefetchLeft time.Duration // no entry with more left than this is due

	epoch atomic.Uint32
}

// New returns an empty cache in epoch 0.
func New(o Options) *Cache {
	c := &Cache{
		// A small answer takes some 160 bytes, header and overhead included.
		table:        arena.NewTable(arena.Options{Bytes: o.Bytes, EntryBytes: 128, KeyAt: settled.KeyAt}),
		seed:         o.Seed << 16, // the table does not use the lowest bits
		maxStale:     o.MaxStale,
		prefetchLeft: time.Duration(1<<63 - 1),
	}
	if o.NoPrefetch {
		c.prefetchLeft = -1
	}
	return c
}

// Put stores the answer to q, in place of the one before, and reports whether it did: not if the entry is of
// another question or another epoch, or longer than query.MaxEntry.
func (c *Cache) Put(q *query.Question, hash uint64, e settled.Entry, now clock.Instant) bool {
	b := e.Bytes()
	if len(b) > query.MaxEntry || !e.Answers(q) || e.Epoch() != c.epoch.Load() || e.Expires() <= now {
		return false
	}
	var kb [32 + dnsname.MaxLen]byte
	key := settled.AppendKey(kb[:0], q)
	w := c.table.Lock(hash ^ c.seed)
	defer w.Unlock()
	return w.Put(b, len(key), uint64(now))
}

// Drop forgets the answer to q.
func (c *Cache) Drop(q *query.Question, hash uint64) {
	var kb [32 + dnsname.MaxLen]byte
	w := c.table.Lock(hash ^ c.seed)
	defer w.Unlock()
	if e, ok := w.Find(settled.AppendKey(kb[:0], q)); ok {
		w.Delete(e)
	}
}

// Hash returns the hash of a whole question, to be computed once and given to Get and Put.
func Hash(key *dnsname.Key, q *query.Question) uint64 {
	return Mix(key.Hash([]byte(q.Name)), q)
}

// Mix makes the hash of a question out of that of its name, where that is known already: the last of
// dnsname.SuffixHashes.
func Mix(name uint64, q *query.Question) uint64 {
	rest := uint64(q.Type) | uint64(q.Class)<<16 | uint64(q.View)<<32
	if q.DO {
		rest |= 1 << 40
	}
	if q.CD {
		rest |= 1 << 41
	}
	h := name + rest*0x9e3779b97f4a7c15
	if q.Subnet.Family != 0 {
		h = mix(h ^ binary.LittleEndian.Uint64(q.Subnet.Addr[:8]))
		h = mix(h ^ binary.LittleEndian.Uint64(q.Subnet.Addr[8:]))
		h += uint64(q.Subnet.Family)<<8 | uint64(q.Subnet.Bits)
	}
	return mix(h)
}

// mix is the finaliser of MurmurHash3. It is no secret: the hash of the name is.
func mix(h uint64) uint64 {
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}

// Epoch returns the epoch to settle answers in.
func (c *Cache) Epoch() uint32 { return c.epoch.Load() }

// Raise begins a new epoch: all entries, and those still being made, are misses from now on.
func (c *Cache) Raise() { c.epoch.Add(1) }

// Purge removes the answers for a name, or with subtree for those below it too, for every other part of the
// question, and those that lead there by an alias. It returns how many went. Answers still being made are
// not its business; Raise is for those who must be sure.
func (c *Cache) Purge(name dnsname.Name, subtree bool) int {
	hit := func(n dnsname.Name) bool { return n == name || subtree && n.Below(name) }
	return c.table.Walk(func(payload []byte, _ uint64) bool {
		e, ok := settled.FromCache(payload)
		if !ok {
			return true
		}
		if hit(e.Question().Name) {
			return true
		}
		facts := e.View().Facts
		for kind, v, next, ok := facts.Next(0); ok; kind, v, next, ok = facts.Next(next) {
			if kind == query.FactAlias && hit(dnsname.Name(v)) {
				return true
			}
		}
		return false
	})
}

// Limit changes the budget while serving; see arena.Table.Limit.
func (c *Cache) Limit(bytes int64) int64 { return c.table.Limit(bytes) }

// Clear removes everything and gives the memory back to the system.
func (c *Cache) Clear() { c.table.Clear() }

// Stats are sums of this moment. Hits and misses are counted by the workers.
type Stats struct {
	Entries   int
	Bytes     int64 // of live entries
	Budget    int64 // of everything
	Evictions uint64
}

// Stats returns the sums.
func (c *Cache) Stats() Stats {
	t := c.table.Stats()
	return Stats{t.Entries, t.Bytes, c.table.Bytes(), t.Evictions}
}
