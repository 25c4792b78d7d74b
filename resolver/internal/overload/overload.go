// Package overload admits queries or turns them away: who may ask, and how much.
//
// Sources are of three kinds. A stranger is nobody we know: over UDP its address range (an IPv4 /24, an IPv6
// /56, which is what one customer usually has) gets so many answers a second, because its packets may be
// forged to make us flood somebody; beyond that every second one is answered with TC=1, so that a real client
// behind the same range gets through over TCP, and the rest is dropped. One that returns our cookie has shown
// that its address is its own, and is not limited so. A listed source stands in
// access.allow by a prefix of its own or in access.unlimited, and is not rate limited here; nor is loopback.
// An identified client has the limits of its settings instead, over every transport and wherever it asks from:
// networks, and rate_limit and rate_burst, beyond which it is refused; see userRates. A client that nobody
// identified but that is served by a policy has those of the policy as well, by itself: its address (of IPv6 the /56)
// is one user, unless it stands in access.unlimited.
//
// Access is judged before identity on plain DNS and after it on encrypted transports, where a known device
// may ask from anywhere.
//
// A Gate holds one word for each range it has seen lately in a table of fixed size, updated by compare and
// swap; two ranges that fall on one word share its allowance. It never blocks and does not allocate.
package overload

import (
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Options say who may ask and how much.
type Options struct {
	// Allow are the networks that may ask (access.allow), Unlimited those to which no per-source limit
	// applies (access.unlimited).
	Allow, Unlimited []netip.Prefix
	// Rate is how many answers a second a stranger's range gets over UDP; read for each query, 0 means no
	// limit.
	Rate func() int
	// Seed mixes ranges into the table, so that nobody can choose ranges that share a word.
	Seed uint64
}

// A Gate admits queries. It is safe for concurrent use.
type Gate struct {
	o       Options
	buckets []atomic.Uint64
	users   userRates
}

// tableSize is how many words the table has: half a megabyte.
const tableSize = 1 << 16

// New returns a Gate.
func New(o Options) *Gate {
	if o.Rate == nil {
		o.Rate = func() int { return 0 }
	}
	g := &Gate{o: o, buckets: make([]atomic.Uint64, tableSize)}
	g.users.init(o.Seed)
	return g
}

// Early judges a query before its client is known.
func (g *Gate) Early(q *query.Query) query.RefuseReason {
	src := q.Source.Addr().Unmap()
	if q.Source.Port() == 0 && q.Transport == query.UDP {
		// Nobody can receive there: a forged source; dropped. A response over a connection goes
		// back over it, and a proxy in front may not know the client's port.
		return query.RefuseRate
	}
	q.Client.Unlimited = within(g.o.Unlimited, src)
	if !q.Transport.Encrypted() && !q.Client.Unlimited && !within(g.o.Allow, src) {
		return query.RefuseAccess
	}
	if q.Client.Unlimited || listed(g.o.Allow, src) {
		q.Client.Kind = query.Listed
	}
	return query.NotRefused
}

// Late judges a query when its client is known.
func (g *Gate) Late(q *query.Query) query.RefuseReason {
	if why := g.Admits(q); why != query.NotRefused {
		return why
	}
	src := q.Source.Addr().Unmap()
	if q.Client.Kind == query.Stranger && q.Transport == query.UDP && !q.CookieOK && !src.IsLoopback() {
		if why := g.rate(src, q.Arrived); why != query.NotRefused {
			return why
		}
	}
	worker := 0
	if q.Scratch != nil {
		worker = q.Scratch.Worker
	}
	if p := &q.Client.Profile; p.RateLimit != 0 && !g.users.take(g.allowance(q), p.RateLimit, p.RateBurst, worker, q.Arrived) {
		return query.RefuseUserRate
	}
	return query.NotRefused
}

// Admits is the part of Late that looks at networks alone.
func (g *Gate) Admits(q *query.Query) query.RefuseReason {
	src := q.Source.Addr().Unmap()
	if d := q.Client.Profile.Details; d != nil {
		if within(d.DenyNetworks, src) || len(d.AllowNetworks) > 0 && !within(d.AllowNetworks, src) {
			return query.RefuseAccess
		}
	}
	if q.Client.Kind != query.Identified && q.Transport.Encrypted() && !q.Client.Unlimited && !within(g.o.Allow, src) {
		return query.RefuseAccess
	}
	return query.NotRefused
}

// allowance tells apart whose rate_limit a query is of: the user's, that of a device with a limit of its own, or of
// clients that nobody identified that of each source. It is 0 if there is none.
func (g *Gate) allowance(q *query.Query) uint64 {
	p := &q.Client.Profile
	switch {
	case q.Client.Kind == query.Identified:
		return g.users.key(p)
	case q.Client.Unlimited:
		return 0
	}
	return g.users.source(q.Source.Addr().Unmap())
}

// Left is how many queries the client of q, which was admitted, may ask at once now beyond which it is refused; limited
// is false if nothing of its settings limits it. Nothing is taken.
func (g *Gate) Left(q *query.Query) (left int, limited bool) {
	p := &q.Client.Profile
	key := g.allowance(q)
	if p.RateLimit == 0 || p.RateLimit >= maxUserRate || key == 0 {
		return 0, false
	}
	return g.users.left(key, p.RateLimit, p.RateBurst, q.Arrived), true
}

// Networks are those of access.allow and access.unlimited that hold an address; the zero Prefix stands for none.
func (g *Gate) Networks(a netip.Addr) (allow, unlimited netip.Prefix) {
	return first(g.o.Allow, a.Unmap()), first(g.o.Unlimited, a.Unmap())
}

// Allowed is access.allow.
func (g *Gate) Allowed() []netip.Prefix { return g.o.Allow }

func first(ps []netip.Prefix, a netip.Addr) netip.Prefix {
	if i := slices.IndexFunc(ps, func(p netip.Prefix) bool { return p.Contains(a) }); i >= 0 {
		return ps[i]
	}
	return netip.Prefix{}
}

// within reports whether a prefix of ps contains a. The lists are short; a long one belongs in a trie.
func within(ps []netip.Prefix, a netip.Addr) bool {
	for i := range ps {
		if ps[i].Contains(a) {
			return true
		}
	}
	return false
}

// listed is within for access.allow as a list of known sources: a prefix that is everybody lists nobody, and
// loopback, the default, needs no listing.
func listed(ps []netip.Prefix, a netip.Addr) bool {
	for i := range ps {
		if ps[i].Bits() > 0 && !ps[i].Addr().IsLoopback() && ps[i].Contains(a) {
			return true
		}
	}
	return false
}

// A bucket word: 24 bits of the range's hash, 24 bits of time in units of 1/64 s, and 16 bits of tokens in
// units of 1/16 answer. A range that meets another's word takes it over, with a full allowance.
const (
	tickPerSecond = 64
	tokenUnit     = 16
	maxRate       = 65535 / tokenUnit
)

// rate takes one answer from the range's allowance.
func (g *Gate) rate(src netip.Addr, now clock.Instant) query.RefuseReason {
	rate := g.o.Rate()
	if rate <= 0 {
		return query.NotRefused
	}
	rate = min(rate, maxRate)
	h := g.hash(src)
	word := &g.buckets[h%tableSize]
	tag := h >> 40
	tick := uint64(now/clock.Instant(time.Second/tickPerSecond)) & 0xffffff
	for {
		old := word.Load()
		tokens := rate * tokenUnit
		if old>>40 == tag && old != 0 {
			passed := (tick - old>>16) & 0xffffff
			if passed > 1<<23 {
				passed = 0 // another worker's batch is a little ahead of ours
			}
			tokens = min(int(old&0xffff)+int(min(passed, 64*tickPerSecond))*rate*tokenUnit/tickPerSecond, rate*tokenUnit)
		}
		if tokens < tokenUnit {
			// The parity of what is refused decides who slips through with TC=1: kept in the lowest bit.
			next := tag<<40 | tick<<16 | uint64(tokens)&^1 | uint64(tokens&1^1)
			if !word.CompareAndSwap(old, next) {
				continue
			}
			if tokens&1 == 0 {
				return query.RefuseSlip
			}
			return query.RefuseRate
		}
		if word.CompareAndSwap(old, tag<<40|tick<<16|uint64(tokens-tokenUnit)) {
			return query.NotRefused
		}
	}
}

// hash mixes the source's range.
func (g *Gate) hash(src netip.Addr) uint64 {
	b := src.As16()
	hi := uint64(b[0])<<56 | uint64(b[1])<<48 | uint64(b[2])<<40 | uint64(b[3])<<32 | uint64(b[4])<<24 | uint64(b[5])<<16 | uint64(b[6])<<8
	if src.Is4() {
		hi = uint64(b[12])<<24 | uint64(b[13])<<16 | uint64(b[14])<<8 | 1
	}
	return mix(hi ^ g.o.Seed)
}
