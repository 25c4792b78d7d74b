// Package selection chooses which authoritative server address to ask next.
//
// It keeps one record for each server address: a smoothed round-trip time in the manner of RFC 6298 section 2,
// how often the address failed in a row and how long it is therefore left alone, what it was found unable to
// do, and for which zones it is lame. It sends nothing: callers ask Pick, run the exchange themselves, and
// report back with Answered, TimedOut and the Learn methods.
//
// Preference has three tiers. First servers that are neither resting nor lame for the zone: one at random
// among those whose expected time is within Band of the best, so that a guesser cannot foresee which one is
// asked (RFC 5452 section 9.1), and now and then one outside it, to notice that it got better. Then lame
// ones, since lameness may be of one name or type. Then resting ones: a server whose rest is over is probed by
// one question at a time, and whoever has no other server to ask may ask a resting one too, the sooner to
// find out that the network is back.
//
// Time is a parameter. No function here reads the clock, so a table of (now, event) pairs is a complete test.
// Every method is total: any state, any clock and any sample give a valid choice; an unknown address is a
// valid input and counts as untried. The table is bounded; what is forgotten is untried again.
package selection

import (
	crand "crypto/rand"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// Options tunes a Selector. Every zero field means the default stated on it.
type Options struct {
	// Size is the most addresses remembered. Zero means 16,384, about 6 MB.
	Size int
	// Seed makes choices reproducible, for tests. Zero means random.
	Seed [32]byte
}

// A Selector remembers how authoritative servers have behaved. It is safe for concurrent use.
type Selector struct {
	size int // constant after New

	mu      sync.Mutex // guards everything below; held for map work only
	rand    *rand.Rand
	byAddr  map[netip.AddrPort]*record
	records []*record // the same, for choosing whom to forget
}

// New returns an empty Selector.
func New(o Options) *Selector {
	if o.Size <= 0 {
		o.Size = 1 << 14
	}
	if o.Seed == [32]byte{} {
		crand.Read(o.Seed[:])
	}
	return &Selector{size: o.Size, rand: rand.New(rand.NewChaCha8(o.Seed)), byAddr: make(map[netip.AddrPort]*record)}
}

// A Choice is whom to ask and how.
type Choice struct {
	Server netip.AddrPort
	// Patience is how long to wait before another server is worth asking.
	Patience time.Duration
	// Hurried says that this is less than the server may need: its end is no timeout to report.
	Hurried bool
	// Probe says that this is the one question that finds out whether a resting server is back.
	Probe bool
	// Lame says that the server was found lame for the zone and that there was no better one.
	Lame bool
	Abilities
}

// Abilities are what was learned of a server's shortcomings, and that it understands EDNS.
type Abilities struct {
	// Doubted is true when there is evidence against options that is not yet believed.
	Doubted bool
	// EDNS is true once a response had an OPT record: failures are then not blamed on EDNS.
	EDNS bool
	// NoEDNS, NoOptions and NoCase: the server answers only without OPT, without EDNS options, without
	// varied letter case. TCP: UDP gets no answer.
	NoEDNS, NoOptions, NoCase, TCP bool
}

// Pick chooses among the candidate servers of a zone. skip, if not nil, leaves out candidates that the caller
// has done with. The result is false if none is left, or those left rest and are being probed.
func (s *Selector) Pick(now clock.Instant, zone dnsname.Name, candidates []netip.AddrPort, skip func(netip.AddrPort) bool) (Choice, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var tiers [3][]option
	var space [3][8]option
	for t := range tiers {
		tiers[t] = space[t][:0]
	}
	for _, addr := range candidates {
		if skip != nil && skip(addr) {
			continue
		}
		o := option{addr: addr, rec: s.byAddr[addr], expect: unknownTimeout}
		tier := usable
		if r := o.rec; r != nil {
			r.expire(now)
			o.expect = r.est.expected()
			switch {
			case r.est.resting(now):
				tier = resting
			case r.est.probeDue(now):
				// One question at a time finds out; all others see it as resting.
				o.probe = true
				if now.Before(r.probing) {
					tier = resting
				}
			case r.lameFor(zone, now):
				tier = lame
			}
		}
		tiers[tier] = append(tiers[tier], o)
	}
	for tier, options := range tiers {
		if len(options) == 0 {
			continue
		}
		if tier == resting {
			return s.pickResting(now, options)
		}
		o := s.fromBand(options)
		c := o.choice(s.firstTimeout())
		c.Lame = tier == lame
		if best := fastest(options); o.expect > best+Band {
			// Exploring must not cost the client much.
			if hurry := max(2*best, minTimeout); hurry < c.Patience {
				c.Patience, c.Hurried = hurry, o.rec == nil || hurry < o.rec.est.plainTimeout()
			}
		}
		if o.probe {
			c.Probe = true
			o.rec.probing = now.Add(c.Patience)
		}
		if o.rec != nil {
			o.rec.used = now
		}
		return c, true
	}
	return Choice{}, false
}

const (
	usable = iota
	lame
	resting
)

// Numbers of choosing; hardening section E.
const (
	// Band is how much slower than the best a server may be and still be chosen at random with it.
	Band = 400 * time.Millisecond
	// exploreOneIn is how often a choice is made among all servers instead of those in the band.
	exploreOneIn = 20
	// unknownTimeout is the expectation of, and least patience with, a server that never answered;
	// unknownSpread is added at random, so that many first tries do not end at once.
	unknownTimeout = 376 * time.Millisecond
	unknownSpread  = 24 * time.Millisecond
)

type option struct {
	addr   netip.AddrPort
	rec    *record // nil: never heard of
	expect time.Duration
	probe  bool
}

func (o option) choice(first time.Duration) Choice {
	c := Choice{Server: o.addr, Patience: first}
	if o.rec != nil {
		if o.rec.est.srtt > 0 || o.rec.est.timeouts > 0 {
			c.Patience = o.rec.est.timeout()
		}
		c.Abilities = o.rec.abilities
	}
	return c
}

func (s *Selector) firstTimeout() time.Duration {
	return unknownTimeout + time.Duration(s.rand.Int64N(int64(unknownSpread)))
}

func fastest(options []option) time.Duration {
	best := options[0].expect
	for _, o := range options[1:] {
		best = min(best, o.expect)
	}
	return best
}

func (s *Selector) fromBand(options []option) option {
	if s.rand.IntN(exploreOneIn) == 0 {
		return options[s.rand.IntN(len(options))]
	}
	// Reservoir sampling of one, over the options in the band.
	best, n := fastest(options), 0
	chosen := options[0]
	for _, o := range options {
		if o.expect <= best+Band {
			if n++; s.rand.IntN(n) == 0 {
				chosen = o
			}
		}
	}
	return chosen
}

// pickResting chooses among servers that all rest: the one whose rest ends first. In the first, short rest
// anybody may ask, since a lossy server gets there by chance; a server that stayed dead is asked by one
// question at a time.
func (s *Selector) pickResting(now clock.Instant, options []option) (Choice, bool) {
	var chosen *option
	for i := range options {
		o := &options[i]
		if o.rec.est.rests > 1 && now.Before(o.rec.probing) {
			continue
		}
		if chosen == nil || o.rec.est.restUntil.Before(chosen.rec.est.restUntil) {
			chosen = o
		}
	}
	if chosen == nil {
		return Choice{}, false
	}
	c := chosen.choice(0)
	c.Probe = true
	chosen.rec.probing = now.Add(c.Patience)
	chosen.rec.used = now
	return c, true
}

// Answered reports that a server gave a response, of whatever content, rtt after it was asked. A round-trip
// time that cannot be is no reason to believe the ones before it: the estimate starts anew.
func (s *Selector) Answered(now clock.Instant, server netip.AddrPort, rtt time.Duration) {
	s.edit(now, server, func(r *record) {
		r.probing = 0
		if sample, ok := NewRTT(rtt); ok {
			r.est = r.est.answered(sample)
		} else {
			r.est = estimate{}
		}
	})
}

// Alive reports a response whose round-trip time says nothing.
func (s *Selector) Alive(now clock.Instant, server netip.AddrPort) {
	s.edit(now, server, func(r *record) { r.est, r.probing = r.est.alive(), 0 })
}

// TimedOut reports that a question sent at the given instant got no response while it was worth waiting, or
// that the network called the server unreachable.
func (s *Selector) TimedOut(now clock.Instant, server netip.AddrPort, sent clock.Instant) {
	s.edit(now, server, func(r *record) { r.est, r.probing = r.est.timedOut(now, sent), 0 })
}

// edit applies f to the record of a server, making one if there is none.
func (s *Selector) edit(now clock.Instant, server netip.AddrPort, f func(*record)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.byAddr[server]
	if r == nil {
		if len(s.records) >= s.size {
			s.forget()
		}
		r = &record{addr: server, index: len(s.records)}
		s.byAddr[server] = r
		s.records = append(s.records, r)
	}
	r.used = now
	r.expire(now)
	f(r)
}

// forget drops the least recently used of a few records chosen at random.
func (s *Selector) forget() {
	victim := s.records[s.rand.IntN(len(s.records))]
	for range 7 {
		if r := s.records[s.rand.IntN(len(s.records))]; r.used.Before(victim.used) {
			victim = r
		}
	}
	last := s.records[len(s.records)-1]
	s.records[victim.index], last.index = last, victim.index
	s.records = s.records[:len(s.records)-1]
	delete(s.byAddr, victim.addr)
}

// Len returns how many addresses are remembered.
func (s *Selector) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.records)
}

// A Server is what is known of one address, for people.
type Server struct {
	SRTT     time.Duration // 0: never answered
	Timeouts int           // in a row
	Resting  bool
	Abilities
}

// Look returns what is known of an address.
func (s *Selector) Look(now clock.Instant, server netip.AddrPort) (Server, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.byAddr[server]
	if r == nil {
		return Server{}, false
	}
	r.expire(now)
	return Server{SRTT: r.est.srtt, Timeouts: r.est.timeouts, Resting: r.est.resting(now), Abilities: r.abilities}, true
}
