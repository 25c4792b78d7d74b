// Package rrcache keeps RRsets, and denials of them, for as long as their TTLs allow.
//
// A set is found by name, type, class, view and client subnet. With it the cache keeps what decides whether
// newer data may replace it: its rank (RFC 2181 section 5.4.1) and its security status. DO and CD are no
// part of the key, for a set holds its signatures and its status: callers look at Status before they use
// what Get returns.
//
// # Time
//
// TTLs become points of elapsed time when a set is stored, clamped by Options, and Get returns what remains,
// rounded up to a second, so that live data never has TTL 0. A set of TTL 0 is for the resolution that
// fetched it and is not stored. After its end a set can be had for Options.MaxStale more, and is then marked
// so (RFC 8767).
//
// # Delegations
//
// The NS set of a referral is the parent's grant of a zone to somebody. It is kept apart from the child's own
// NS set, in entries that only Put with a Granted time makes. Such an entry ends at the time the parent
// granted, and at the latest with the grant of the zone cut above it (the root's excepted, whose servers
// nobody grants); what the child says of itself neither prolongs nor replaces it. So a domain that its
// parent has taken away goes when the last grant ends, however it was kept alive (ghost domains,
// CVE-2012-1033, and their successors).
//
// # Denials
//
// NODATA stands where the set would. NXDOMAIN stands at the name and answers for every type (RFC 2308
// section 5); NXCut finds one at an ancestor, if it is Secure (RFC 8020). Both keep the SOA and the proof.
//
// # Size
//
// An entry costs what it is large, in an exact budget, and no type of a name is found by way of another; even so
// a name has at most 100 types (see maxRare). How many records a set has and how large a message is are bounded
// where messages are read (package query).
//
// Entries live in a package arena table: outside the Go heap, in an exact budget. Lookups take no lock.
package rrcache

import (
	"bytes"
	"encoding/binary"
	"math"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/arena"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Get returns the set with this key, with the TTL that remains, or tells of its denial. The set's Name is
// k.Name; its data is the caller's.
func (c *Cache) Get(k Key, now clock.Instant) (query.RRset, Found) { return c.GetIn(nil, k, now) }

// GetIn is Get with the data placed in buf if it fits there, so that a positive lookup need not allocate.
func (c *Cache) GetIn(buf []byte, k Key, now clock.Instant) (query.RRset, Found) {
	nameHash := c.hashName(k.Name)
	nx := c.denied(buf, nameHash, k, now)
	if nx.payload != nil {
		buf = nil // taken
	}
	return c.get(buf, nx, nameHash, k, now)
}

// At begins lookups of several types at one name, of which the denial is looked for once. k.Type does not matter.
func (c *Cache) At(k Key, now clock.Instant) At {
	nameHash := c.hashName(k.Name)
	return At{c: c, k: k, now: now, nameHash: nameHash, nx: c.denied(nil, nameHash, k, now)}
}

// An At is a name at a moment; see Cache.At.
type At struct {
	c        *Cache
	k        Key
	now      clock.Instant
	nameHash uint64
	nx       entry // its denial
}

// Get is Cache.Get for a type at the name.
func (a *At) Get(typ uint16) (query.RRset, Found) {
	k := a.k
	k.Type = typ
	return a.c.get(nil, a.nx, a.nameHash, k, a.now)
}

// denied returns the NXDOMAIN entry of a name, without payload if there is none that can be used.
func (c *Cache) denied(buf []byte, nameHash uint64, k Key, now clock.Instant) entry {
	var kb keyBuf
	e, ok := c.read(buf, appendKey(kb[:0], kindNX, k), c.hash(nameHash, kindNX, k))
	if !ok || e.end().Add(c.opts.MaxStale) <= now {
		return entry{}
	}
	return e
}

// get is GetIn once the denial of the name was looked for.
func (c *Cache) get(buf []byte, best entry, nameHash uint64, k Key, now clock.Instant) (query.RRset, Found) {
	var kb keyBuf
	bestKind := kindNX
	for _, kind := range [...]kind{kindSet, kindCut} {
		alive := best.payload != nil && best.end() > now
		if kind == kindCut && (k.Type != dnswire.TypeNS || alive) {
			break
		}
		e, ok := c.read(buf, appendKey(kb[:0], kind, k), c.hash(nameHash, kind, k))
		if !ok || e.end() <= now && (kind == kindCut || e.end().Add(c.opts.MaxStale) <= now) {
			continue
		}
		// A live NXDOMAIN hides a set stored before it (Put removes it when newer data comes), but not a
		// better one: nothing forged may hide what is Secure.
		if best.payload == nil || !alive && e.end() > best.end() || alive && e.end() > now && e.standing() > best.standing() {
			best, bestKind = e, kind
			buf = nil // taken
		}
	}
	count := &c.counts[nameHash%uint64(len(c.counts))]
	if best.payload == nil {
		count.misses.Add(1)
		return query.RRset{}, Found{}
	}
	live := best.end() > now
	if live {
		count.hits.Add(1)
	} else {
		count.misses.Add(1)
	}
	f := Found{OK: live, Stale: !live}
	if best.negative() || bestKind == kindNX {
		f.Negative = best.denial(k.Name, k.Class, bestKind, now)
		return query.RRset{}, f
	}
	set, over := best.set(k, now)
	switch {
	case bestKind == kindCut:
		f.Cut = best.end()
	case over > 0:
		f.Ends = best.end()
		set.TTL = min(set.TTL, uint32(c.opts.MaxTTL/time.Second)) // an entry from a dump may go beyond
	}
	return set, f
}

// Secure reports whether there is a live set with this key that is Secure. It copies nothing.
func (c *Cache) Secure(k Key, now clock.Instant) bool {
	var kb, have keyBuf
	key := appendKey(kb[:0], kindSet, k)
	for p := c.table.Probe(c.hash(c.hashName(k.Name), kindSet, k)); p.Next(); {
		if p.Len() < len(key) || !p.Copy(have[:len(key)]) || !bytes.Equal(have[:len(key)], key) {
			continue
		}
		p.Touch()
		m := meta(p.Meta())
		return m.epoch() == c.epoch.Load()&epochMask && m.end() > now && !m.negative() && m.status() == query.Secure
	}
	return false
}

// A Key says which set is meant.
type Key struct {
	Name        dnsname.Name
	Type, Class uint16
	View        query.View
	Subnet      query.Subnet
}

// Found says what Get found.
type Found struct {
	// OK: there is live data, a set or a denial. Stale: there is data past its end, of TTL 0. Never both.
	OK, Stale bool
	// Cut is when the parent's grant ends, if the set is the NS set of a referral.
	Cut clock.Instant
	// Ends is when the set ends, if that is before its TTL says so, because the grant of its zone does; otherwise 0.
	Ends clock.Instant
	// Negative is the denial, if its Kind is not NoKind; there is no set then.
	Negative Negative
}

// A Kind says what a denial denies.
type Kind uint8

// The kinds of denials.
const (
	NoKind   Kind = iota
	NXDomain      // the name
	NoData        // the type at this name
)

// A Negative is a denial with what it was learned from.
type Negative struct {
	Kind   Kind
	Status query.Status
	TTL    uint32 // what remains; 0 when stale
	SOA    query.RRset
	Proof  []query.RRset // NSEC or NSEC3 sets; each has the TTL and Status of the whole
}

// Options tunes a Cache.
type Options struct {
	// Bytes is the budget for everything, index included; see arena.Options.
	Bytes int64
	// Key keys the hashes; random for each process, so that nobody can choose names that collide.
	Key dnsname.Key
	// MinTTL raises shorter TTLs of sets (not of denials).
	MinTTL time.Duration
	// MaxTTL lowers longer TTLs. Zero means a day.
	MaxTTL time.Duration
	// MaxNegativeTTL lowers longer TTLs of denials. Zero means an hour.
	MaxNegativeTTL time.Duration
	// MaxStale is how long an entry can be had after its end. Zero means not at all.
	MaxStale time.Duration
}

// bogusTTL bounds how long data is remembered as Bogus: the zone may be mended (RFC 4035 section 4.7).
const bogusTTL = time.Minute

// A Cache keeps RRsets. It is safe for concurrent use.
type Cache struct {
	opts  Options // constant after New
	table *arena.Table

	loads  loads
	epoch  atomic.Uint32
	rare   rarities
	counts [16]struct { // striped by name
		hits, misses atomic.Uint64
		_            [48]byte
	}
}

// New returns an empty cache.
func New(o Options) *Cache {
	if o.MaxTTL == 0 {
		o.MaxTTL = 24 * time.Hour
	}
	if o.MaxNegativeTTL == 0 {
		o.MaxNegativeTTL = time.Hour
	}
	return &Cache{
		opts: o,
		// An A record at a name of usual length takes 56 bytes. Two uses keep it: the resolution that
		// fetched it may use it once more itself.
		table: arena.NewTable(arena.Options{Bytes: o.Bytes, EntryBytes: 48, Keep: 2}),
	}
}

// Put is what Cache.Put is told beside the set.
type Put struct {
	// Granted is when the parent's grant ends: set for the NS set of a referral (and of the root), and for
	// glue that must not outlive it. Zero means none.
	Granted clock.Instant
	// Lease is when the grant of the zone that the set is from ends. The set ends then too, but keeps the TTL that its
	// zone gave it: the second client is told what the first was. (An NS set is told of no longer than it is granted.)
	// Zero means that it is not known.
	Lease clock.Instant
}

// Put stores a set if it is at least as good as a live one that is there, and reports whether it did.
//
// Better is a higher rank. Secure data has the highest rank whatever it came with, so that nothing unchecked
// replaces it; Bogus data has none. Equals replace each other. An NS set with a Granted time is a
// delegation: referrals replace it, and a set of a higher rank (the child's) only within the grant.
func (c *Cache) Put(view query.View, subnet query.Subnet, set query.RRset, p Put, now clock.Instant) bool {
	k := Key{set.Name, set.Type, set.Class, view, subnet}
	nameHash := c.hashName(k.Name)
	end := now.Add(min(max(seconds(set.TTL), c.opts.MinTTL), c.opts.MaxTTL))
	if p.Granted != 0 {
		end = min(end, p.Granted)
	}
	if set.Status == query.Bogus {
		end = min(end, now.Add(bogusTTL))
	}
	over := uint32(0)
	if p.Lease != 0 && p.Lease < end {
		if set.Type != dnswire.TypeNS {
			over = left(end, now) - left(p.Lease, now)
		}
		end = p.Lease
	}
	kind := kindSet
	if set.Type == dnswire.TypeNS {
		cut, hasCut := c.cutAt(nameHash, k, now)
		if p.Granted != 0 {
			// Without a grant in force, what the child says of itself makes none.
			if set.Rank <= query.RankGlue || hasCut || k.Name == dnsname.Root {
				kind = kindCut
			}
			if above, ok := c.grantAbove(k, now); ok {
				end = min(end, above)
			}
		}
		if hasCut && set.Rank > query.RankGlue && k.Name != dnsname.Root {
			end = min(end, cut)
		}
	}
	if ticks(end) <= ticks(now) {
		return false
	}
	m := makeMeta(end, set.Status, set.Rank, false, c.epoch.Load())
	var kb keyBuf
	key := appendKey(kb[:0], kind, k)
	payload := make([]byte, 0, len(key)+1+2*binary.MaxVarintLen32+len(set.Data)+len(set.Sigs))
	payload = append(payload, key...)
	payload = appendSet(payload, over, set.Data, set.Sigs)
	instead := overEqual
	if kind == kindCut && set.Rank == query.RankGlue {
		instead = overAll
	}
	if !c.store(k, nameHash, kind, payload, len(key), m, instead, now) {
		return false
	}
	if kind == kindSet && set.Rank > query.RankGlue {
		c.removeNX(nameHash, k, m, now)
	}
	return true
}

// PutNegative stores a denial of k.Name (NXDomain) or of k.Type at it (NoData), and reports whether it did:
// its rank is that of an authoritative answer, or the highest if status is Secure. Its TTL is the least of
// the SOA's TTL and MINIMUM (RFC 2308 section 5) and of the proof's; without either it is a few seconds. A
// referral denies the DS record of its zone by a proof without SOA. A validator calls it again with the status
// it found.
func (c *Cache) PutNegative(k Key, kind Kind, soa query.RRset, proof []query.RRset, status query.Status, now clock.Instant) bool {
	life, ok := c.negativeLife(soa, proof)
	if kind == NoKind || !ok {
		return false
	}
	if status == query.Bogus {
		life = min(life, bogusTTL)
	}
	end := now.Add(life)
	if ticks(end) <= ticks(now) || len(proof) > maxProof {
		return false
	}
	at := kindSet
	if kind == NXDomain {
		at = kindNX
	}
	var kb keyBuf
	key := appendKey(kb[:0], at, k)
	payload := append(make([]byte, 0, 512), key...)
	payload = appendDenial(payload, k.Name, soa, proof)
	m := makeMeta(end, status, query.RankAnswer, true, c.epoch.Load())
	return c.store(k, c.hashName(k.Name), at, payload, len(key), m, overEqual, now)
}

// maxProof bounds the sets of a denial: three NSEC3 records prove any, and a padded proof is not worth
// keeping.
const maxProof = 8

// What an entry may take the place of.
type over uint8

const (
	overDead  over = iota // what has ended
	overEqual             // what is no better
	overAll
)

// store writes an entry unless there is one that it may not take the place of, or the name has too many.
func (c *Cache) store(k Key, nameHash uint64, kind kind, payload []byte, keyLen int, m meta, over over, now clock.Instant) bool {
	w := c.table.Lock(c.hash(nameHash, kind, k))
	defer w.Unlock()
	old, ok := w.Find(payload[:keyLen])
	if ok {
		om := meta(old.Meta())
		if alive := om.epoch() == m.epoch() && om.end() > now; alive && (over == overDead || over == overEqual && om.standing() > m.standing()) {
			return false
		}
		if old.Equal(payload) { // a refresh, or a status found: the same bytes need no new place
			old.SetMeta(uint64(m))
			return true
		}
	} else if kind == kindSet && !c.rare.room(k, nameHash, now) {
		return false
	}
	return w.Put(payload, keyLen, uint64(m))
}

// removeNX removes an NXDOMAIN at the name that a new set contradicts, unless it is better than the set.
func (c *Cache) removeNX(nameHash uint64, k Key, m meta, now clock.Instant) {
	var kb keyBuf
	key := appendKey(kb[:0], kindNX, k)
	w := c.table.Lock(c.hash(nameHash, kindNX, k))
	defer w.Unlock()
	if e, ok := w.Find(key); ok {
		if om := meta(e.Meta()); om.end() <= now || om.standing() <= m.standing() {
			w.Delete(e)
		}
	}
}

// SetStatus records what validation found: set.Status is the status of exactly this data. If it is what the
// cache holds, status and rank (RankSecure for Secure) are noted and a shorter TTL counts (a validator
// lowers it to the signatures' end); otherwise the set is Put. It takes the data, not only the key, because
// another set may have been stored meanwhile, on which no judgement has been passed. A set that is Put lives no
// longer than the grant of its zone.
func (c *Cache) SetStatus(view query.View, subnet query.Subnet, set query.RRset, now clock.Instant) bool {
	if set.Status == query.Secure {
		set.Rank = query.RankSecure
	}
	k := Key{set.Name, set.Type, set.Class, view, subnet}
	nameHash := c.hashName(k.Name)
	if c.note(nameHash, k, set, now) {
		return true
	}
	return c.Put(view, subnet, set, Put{Lease: c.Lease(set.Name, set.Type, view, now)}, now)
}

func (c *Cache) note(nameHash uint64, k Key, set query.RRset, now clock.Instant) bool {
	var kb keyBuf
	key := appendKey(kb[:0], kindSet, k)
	w := c.table.Lock(c.hash(nameHash, kindSet, k))
	noted := false
	var m meta
	if e, ok := w.Find(key); ok {
		m = meta(e.Meta())
		if m.epoch() == c.epoch.Load()&epochMask && !m.negative() && m.status() == query.Unchecked && m.end() > now {
			payload := e.Append(nil)
			data, sigs, over, ok := splitSet(payload[len(key):])
			// A TTL that goes beyond the end is part of what is stored, so it is not lowered in place.
			ok = ok && (over == 0 || set.TTL >= m.remaining(now)+over)
			if ok && bytes.Equal(data, set.Data) && bytes.Equal(sigs, set.Sigs) {
				end := min(m.end(), now.Add(seconds(set.TTL)))
				if set.Status == query.Bogus {
					end = min(end, now.Add(bogusTTL))
				}
				m = makeMeta(end, set.Status, max(set.Rank, m.rank()), false, m.epoch())
				e.SetMeta(uint64(m))
				noted = true
			}
		}
	}
	w.Unlock()
	if noted {
		c.removeNX(nameHash, k, m, now)
	}
	return noted
}

// Delegation returns the deepest live zone cut at or above name whose NS set a parent granted (or, for the
// root, priming brought), that set, and when the grant ends.
func (c *Cache) Delegation(name dnsname.Name, view query.View, now clock.Instant) (zone dnsname.Name, ns query.RRset, granted clock.Instant, ok bool) {
	return c.delegation(name, view, now, now)
}

// StaleDelegation is Delegation for who is about to use stale data: cuts count for Options.MaxStale after their end.
// They say whose the data was, and are nothing to go by to anybody's servers.
func (c *Cache) StaleDelegation(name dnsname.Name, view query.View, now clock.Instant) (zone dnsname.Name, ns query.RRset, ok bool) {
	zone, ns, _, ok = c.delegation(name, view, now, now.Add(-c.opts.MaxStale))
	return zone, ns, ok
}

// delegation finds the deepest cut that ends after since.
func (c *Cache) delegation(name dnsname.Name, view query.View, now, since clock.Instant) (zone dnsname.Name, ns query.RRset, granted clock.Instant, ok bool) {
	var hashes [dnsname.MaxLabels + 1]uint64
	n := dnsname.SuffixHashes(&c.opts.Key, []byte(name), &hashes)
	for zone = name; zone != ""; zone = zone.Parent() {
		n--
		h := c.hashRoot()
		if n >= 0 {
			h = hashes[n]
		}
		k := Key{Name: zone, Type: dnswire.TypeNS, Class: dnswire.ClassIN, View: view}
		var kb keyBuf
		e, found := c.read(nil, appendKey(kb[:0], kindCut, k), c.hash(h, kindCut, k))
		if found && e.end() > since {
			ns, _ := e.set(k, now)
			return zone, ns, e.end(), true
		}
	}
	return "", query.RRset{}, 0, false
}

// Lease returns until when the parent has granted the zone that a set belongs to, as far as cuts are known;
// clock.Never if that is the root, or none.
func (c *Cache) Lease(name dnsname.Name, typ uint16, view query.View, now clock.Instant) clock.Instant {
	if typ == dnswire.TypeDS && name != dnsname.Root {
		name = name.Parent() // whose zone has it
	}
	if zone, _, granted, ok := c.Delegation(name, view, now); ok && zone != dnsname.Root {
		return granted
	}
	return clock.Never
}

// cutAt returns when the grant of the cut at k.Name ends, if there is a live one.
func (c *Cache) cutAt(nameHash uint64, k Key, now clock.Instant) (clock.Instant, bool) {
	k.Type, k.Subnet = dnswire.TypeNS, query.Subnet{}
	var kb keyBuf
	e, ok := c.read(nil, appendKey(kb[:0], kindCut, k), c.hash(nameHash, kindCut, k))
	return e.end(), ok && e.end() > now
}

// grantAbove returns when the grant of the nearest cut strictly above k.Name ends; the root is none.
func (c *Cache) grantAbove(k Key, now clock.Instant) (clock.Instant, bool) {
	for up := k.Name.Parent(); up != "" && up != dnsname.Root; up = up.Parent() {
		k.Name = up
		if end, ok := c.cutAt(c.hashName(up), k, now); ok {
			return end, true
		}
	}
	return 0, false
}

// NXCut returns the nearest ancestor of name, itself not counted, that a live and Secure NXDOMAIN denies, so
// that name cannot exist either (RFC 8020). Whether that may be used where the operator configured a zone of
// his own is the caller's business.
func (c *Cache) NXCut(name dnsname.Name, view query.View, now clock.Instant) (at dnsname.Name, n Negative, ok bool) {
	var hashes [dnsname.MaxLabels + 1]uint64
	left := dnsname.SuffixHashes(&c.opts.Key, []byte(name), &hashes)
	for at = name.Parent(); len(at) > 1; at = at.Parent() {
		left--
		k := Key{Name: at, Class: dnswire.ClassIN, View: view}
		var kb keyBuf
		e, found := c.read(nil, appendKey(kb[:0], kindNX, k), c.hash(hashes[left-1], kindNX, k))
		if found && e.end() > now && e.status() == query.Secure {
			return at, e.denial(at, k.Class, kindNX, now), true
		}
	}
	return "", Negative{}, false
}

// An entry is what read returned: a copy.
type entry struct {
	meta
	payload []byte
	keyLen  int
}

// read copies the entry with this key, in buf if it fits.
func (c *Cache) read(buf, key []byte, hash uint64) (entry, bool) {
	for p := c.table.Probe(hash); p.Next(); {
		n := p.Len()
		if n < len(key) {
			continue
		}
		b := buf
		if cap(b) < n {
			b = make([]byte, n)
		}
		b = b[:n]
		if !p.Copy(b) || !bytes.Equal(b[:len(key)], key) {
			continue
		}
		m := meta(p.Meta())
		if m.epoch() != c.epoch.Load()&epochMask {
			return entry{}, false
		}
		p.Touch()
		return entry{m, b, len(key)}, true
	}
	return entry{}, false
}

// set returns the set of e, and by how much its TTL goes beyond its end.
func (e entry) set(k Key, now clock.Instant) (s query.RRset, over uint32) {
	data, sigs, over, _ := splitSet(e.payload[e.keyLen:])
	ttl := e.remaining(now)
	if ttl > 0 {
		ttl += over
	}
	return query.RRset{
		Name: k.Name, Type: k.Type, Class: k.Class,
		TTL: ttl, Status: e.status(), Rank: e.rank(),
		Data: data, Sigs: sigs,
	}, over
}

func (e entry) denial(name dnsname.Name, class uint16, at kind, now clock.Instant) Negative {
	n := Negative{Kind: NoData, Status: e.status(), TTL: e.remaining(now)}
	if at == kindNX {
		n.Kind = NXDomain
	}
	sets, _ := readDenial(e.payload[e.keyLen:], name)
	for i := range sets {
		sets[i].Class, sets[i].TTL, sets[i].Status, sets[i].Rank = class, n.TTL, n.Status, query.RankAuthority
		if n.Status == query.Secure {
			sets[i].Rank = query.RankSecure
		}
	}
	if len(sets) > 0 && sets[0].Type == dnswire.TypeSOA {
		n.SOA, sets = sets[0], sets[1:]
	}
	n.Proof = sets
	return n
}

// seconds turns a TTL into a duration; values with the top bit set mean 0 (RFC 2181 section 8).
func seconds(ttl uint32) time.Duration {
	if ttl > math.MaxInt32 {
		return 0
	}
	return time.Duration(ttl) * time.Second
}
