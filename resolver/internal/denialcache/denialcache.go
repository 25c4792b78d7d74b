// Package denialcache keeps Secure NSEC and NSEC3 records by the gaps that they show, so that questions whose
// answers lie in them need not be asked (RFC 8198).
//
// Put takes what a validator has found Secure. Find tells, of any name and type, whether what is kept proves that
// the name or the type does not exist, or that a wildcard answers; the outcome is that of package denial on the
// very records that an authoritative server would have sent, and it comes with them. What the wildcard holds is
// for the caller to look up, and so is whether a name may be answered this way at all: names at and below a zone
// that the operator configured elsewhere, or a negative trust anchor, may not.
//
// Kept are the records of a zone and its SOA, by view, in gaps that never overlap: what is newer removes what
// contradicts it. Not kept are records with opt-out, whose gaps hold what is not signed; NSEC3 records whose
// hashes cost too much; and records of gaps so narrow that they were made for one answer (RFC 4470, RFC 9824),
// which would fill the cache and answer nothing.
//
// Nothing lives longer than its TTL, nor than Options.MaxTTL; a denial lives as long as the first of its records
// and of its SOA, and no longer than the SOA's MINIMUM (RFC 8198 section 5.4, RFC 9077).
//
// The memory is bounded in bytes. When there is no room, what was not used since it was last looked at goes first.
package denialcache

import (
	"encoding/binary"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/validator/denial"
)

// Options tune a Cache. Every zero field means the default stated on it.
type Options struct {
	// Bytes is the budget for everything. Zero means 1 MiB.
	Bytes int64
	// MaxTTL lowers longer TTLs. Zero means an hour.
	MaxTTL time.Duration
}

// A Cache keeps denials. It is safe for concurrent use.
type Cache struct {
	o Options // constant after New

	// hashing has a place for each Find at a time that computes iterated hashes; who finds none does without.
	hashing chan struct{}
	found   atomic.Uint64

	mu    sync.RWMutex // guards what is below, zones included; held for looking and moving, never for hashing or proofs
	zones map[zoneKey]*zone
	queue []*span // all that is kept, in the order in which it is looked at for eviction, and some that is gone
	live  int
	bytes int64

	budget    int64
	evictions uint64
}

type zoneKey struct {
	view query.View
	name dnsname.Name
}

// A zone is what is kept of one. It exists as long as it has a span.
type zone struct {
	key      zoneKey
	soa      query.RRset // Type 0: none
	minimum  uint32
	soaUntil clock.Instant
	names    ring // NSEC
	hashes   ring // NSEC3, of one chain
	params   denial.Params
}

// A span is one record. All but used and dead is constant.
type span struct {
	gap
	foreign bool // NSEC3: names below the owner are not the zone's
	set     query.RRset
	until   clock.Instant
	zone    *zone
	used    atomic.Bool // since it was last looked at for eviction
	dead    bool        // removed; guarded by Cache.mu
}

// New returns an empty Cache.
func New(o Options) *Cache {
	if o.Bytes == 0 {
		o.Bytes = 1 << 20
	}
	if o.MaxTTL == 0 {
		o.MaxTTL = time.Hour
	}
	return &Cache{o: o, budget: o.Bytes, zones: make(map[zoneKey]*zone), hashing: make(chan struct{}, max(1, runtime.NumCPU()/2))}
}

// Put keeps what may be kept of a proof: NSEC and NSEC3 sets that zone signed, and the zone's SOA, if soa is that.
// Sets that are not Secure are passed over. TTLs are those that remain, signatures considered.
func (c *Cache) Put(view query.View, name dnsname.Name, soa query.RRset, proof []query.RRset, now clock.Instant) {
	type record struct {
		s      *span
		hashed bool
		params denial.Params
	}
	var records []record
	for i := range proof {
		s := &proof[i]
		if s.Status != query.Secure || s.Class != dnswire.ClassIN || s.TTL == 0 {
			continue
		}
		r := record{s: &span{until: c.until(s.TTL, now)}}
		switch s.Type {
		case dnswire.TypeNSEC:
			next, ok := denial.ReadNSEC(s, name)
			if !ok || next == "\x01\x00"+s.Name {
				continue
			}
			r.s.gap = gap{order(s.Name), order(next)}
		case dnswire.TypeNSEC3:
			h, ok := denial.ReadNSEC3(s, name)
			if !ok || h.OptOut || h.Params.Excessive() || narrow(&h) {
				continue
			}
			r.hashed, r.params = true, h.Params
			r.s.gap, r.s.foreign = gap{string(h.Owner[:]), string(h.Next[:])}, h.Foreign
		default:
			continue
		}
		r.s.set = owned(s)
		records = append(records, r)
	}
	if len(records) == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	z := c.zones[zoneKey{view, name}]
	if z == nil {
		z = &zone{key: zoneKey{view, name}}
		c.zones[z.key] = z
		c.bytes += zoneOverhead
	}
	for _, r := range records {
		r.s.zone = z
		to := &z.names
		if r.hashed {
			to = &z.hashes
			if r.params != z.params {
				z.params = r.params // the zone has a new chain
				for _, old := range z.hashes {
					c.bury(old)
				}
				z.hashes = nil
			}
		}
		for _, old := range to.insert(r.s) {
			c.bury(old)
		}
		c.queue = append(c.queue, r.s)
		c.live++
		c.bytes += r.s.size()
	}
	if n := len(soa.Data); soa.Is(name, dnswire.TypeSOA) && soa.Status == query.Secure && n >= 4 {
		c.bytes -= setSize(&z.soa)
		z.soa, z.soaUntil = owned(&soa), c.until(soa.TTL, now)
		z.minimum = binary.BigEndian.Uint32(soa.Data[n-4:]) // MINIMUM is the last field of the one record
		c.bytes += setSize(&z.soa)
	}
	c.evict(now)
}

// narrow reports a gap that less than one in a million names falls into. Where the gap is wider the record may
// spare queries; a zone of more names gains nothing, and one whose server makes gaps as it answers (RFC 7129
// appendix B) has no others.
func narrow(h *denial.Hashed) bool {
	width := binary.BigEndian.Uint64(h.Next[:]) - binary.BigEndian.Uint64(h.Owner[:])
	return width < 1<<(64-20) && h.Owner != h.Next
}

func (c *Cache) until(ttl uint32, now clock.Instant) clock.Instant {
	return now.Add(min(time.Duration(ttl)*time.Second, c.o.MaxTTL))
}

// owned returns a copy of s that shares no memory with a message or a buffer.
func owned(s *query.RRset) query.RRset {
	o := *s
	both := make([]byte, 0, len(s.Data)+len(s.Sigs))
	both = append(append(both, s.Data...), s.Sigs...)
	o.Data, o.Sigs = both[:len(s.Data):len(s.Data)], both[len(s.Data):]
	return o
}

// What entries cost beside their bytes, measured and rounded up.
const (
	zoneOverhead = 512
	spanOverhead = 384
)

func setSize(s *query.RRset) int64 { return int64(len(s.Name) + len(s.Data) + len(s.Sigs)) }

func (s *span) size() int64 { return spanOverhead + int64(len(s.from)+len(s.to)) + setSize(&s.set) }

// bury notes that a span is in no ring any more. mu is held.
func (c *Cache) bury(s *span) {
	s.dead = true
	c.live--
	c.bytes -= s.size()
}

// evict makes room. mu is held.
func (c *Cache) evict(now clock.Instant) {
	for c.bytes > c.budget && len(c.queue) > 0 {
		s := c.queue[0]
		c.queue[0] = nil
		c.queue = c.queue[1:]
		switch {
		case s.dead:
		case s.used.Load() && now.Before(s.until):
			s.used.Store(false)
			c.queue = append(c.queue, s)
		default:
			c.remove(s)
			c.evictions++
		}
	}
	if len(c.queue) > 2*c.live+64 { // what is gone must not pile up
		kept := make([]*span, 0, c.live)
		for _, s := range c.queue {
			if !s.dead {
				kept = append(kept, s)
			}
		}
		c.queue = kept
	}
}

// remove takes a span out of its zone, and the zone away with its last. mu is held.
func (c *Cache) remove(s *span) {
	z := s.zone
	if !z.names.remove(s) {
		z.hashes.remove(s)
	}
	c.bury(s)
	if len(z.names)+len(z.hashes) == 0 {
		c.drop(z)
	}
}

// drop forgets a zone. mu is held.
func (c *Cache) drop(z *zone) {
	for _, r := range []ring{z.names, z.hashes} {
		for _, s := range r {
			c.bury(s)
		}
	}
	z.names, z.hashes = nil, nil
	c.bytes -= zoneOverhead + setSize(&z.soa)
	delete(c.zones, z.key)
}

// Purge forgets what might answer for a name in any view, or with subtree for a name below it too: the zones that
// could hold it, whole.
func (c *Cache) Purge(name dnsname.Name, subtree bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, z := range c.zones {
		if name.IsWithin(k.name) || subtree && k.name.IsWithin(name) {
			c.drop(z)
		}
	}
}

// Limit changes the budget while serving.
func (c *Cache) Limit(bytes int64, now clock.Instant) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.budget = bytes
	c.evict(now)
}

// Clear forgets everything.
func (c *Cache) Clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, z := range c.zones {
		c.drop(z)
	}
	c.queue = nil
}

// Stats are sums of this moment.
type Stats struct {
	Zones, Records int
	Bytes, Budget  int64
	Evictions      uint64
	Found          uint64 // denials that Find has found
}

// Stats returns the sums.
func (c *Cache) Stats() Stats {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return Stats{Zones: len(c.zones), Records: c.live, Bytes: c.bytes, Budget: c.budget, Evictions: c.evictions, Found: c.found.Load()}
}
