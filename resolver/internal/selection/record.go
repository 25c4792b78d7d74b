package selection

import (
	"net/netip"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// A record is all that is known of one address. Guarded by Selector.mu.
type record struct {
	addr  netip.AddrPort
	index int           // in Selector.records
	used  clock.Instant // last picked or reported

	est     estimate
	probing clock.Instant // a probe is under way until then

	abilities   Abilities
	lackedUntil [numLack]clock.Instant
	strikes     [numLack]uint8
	ednsUntil   clock.Instant // how long abilities.EDNS is believed

	lame [maxLame]lameness // a ring
	next int
}

// A Lack is something a server cannot do.
type Lack uint8

// The lacks.
const (
	LackEDNS    Lack = iota // answered without OPT what it would not answer with
	LackOptions             // answered without options what it would not answer with
	LackCase                // gave the question back in other letters
	LackUDP                 // answered over TCP alone
	numLack
)

const (
	// lackFor is how long a lack is believed before it is tried again.
	lackFor = time.Hour
	// strikesNeeded: one spoofed or unlucky reply must not cost a server its EDNS, so it takes two consistent
	// ones in a row, which came through different ports since every exchange has its own.
	strikesNeeded = 2
)

// Lacking reports evidence that a server cannot do something. It is believed after the second time in a row;
// letter case after the first, since the exchange has had the answer confirmed over TCP.
func (s *Selector) Lacking(now clock.Instant, server netip.AddrPort, l Lack) {
	if l >= numLack {
		return
	}
	s.edit(now, server, func(r *record) {
		if r.strikes[l] < strikesNeeded {
			r.strikes[l]++
		}
		r.abilities.Doubted = r.strikes[LackOptions] > 0
		if r.strikes[l] == strikesNeeded || l == LackCase {
			*r.ability(l) = true
			r.lackedUntil[l] = now.Add(lackFor)
		}
	})
}

// Able reports evidence that a server can do it.
func (s *Selector) Able(now clock.Instant, server netip.AddrPort, l Lack) {
	if l >= numLack {
		return
	}
	s.edit(now, server, func(r *record) {
		r.strikes[l] = 0
		*r.ability(l) = false
		r.abilities.Doubted = r.strikes[LackOptions] > 0
		if l == LackEDNS {
			r.abilities.EDNS = true
			r.ednsUntil = now.Add(lackFor)
		}
	})
}

func (r *record) ability(l Lack) *bool {
	switch l {
	case LackEDNS:
		return &r.abilities.NoEDNS
	case LackOptions:
		return &r.abilities.NoOptions
	case LackCase:
		return &r.abilities.NoCase
	default:
		return &r.abilities.TCP
	}
}

// expire ends lacks that are to be tried again, and the belief in EDNS, which the next answer with EDNS renews: what
// stands at an address may be replaced by something older.
func (r *record) expire(now clock.Instant) {
	if r.abilities.EDNS && !now.Before(r.ednsUntil) {
		r.abilities.EDNS = false
	}
	for l := range numLack {
		if b := r.ability(l); *b && !now.Before(r.lackedUntil[l]) {
			*b, r.strikes[l] = false, 0
			r.abilities.Doubted = r.strikes[LackOptions] > 0
		}
	}
}

// maxLame is for how many zones one server is remembered as lame. Lameness only orders servers, so what is
// forgotten costs a question.
const maxLame = 8

type lameness struct {
	zone  dnsname.Name
	until clock.Instant
}

// Lame reports that a server does not answer for a zone it should serve; it is preferred less for that zone
// until d has passed.
func (s *Selector) Lame(now clock.Instant, server netip.AddrPort, zone dnsname.Name, d time.Duration) {
	s.edit(now, server, func(r *record) {
		for i := range r.lame {
			if r.lame[i].zone == zone {
				r.lame[i].until = now.Add(d)
				return
			}
		}
		r.lame[r.next] = lameness{zone, now.Add(d)}
		r.next = (r.next + 1) % maxLame
	})
}

// Serves reports a good answer for a zone.
func (s *Selector) Serves(server netip.AddrPort, zone dnsname.Name) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.byAddr[server]; r != nil {
		for i := range r.lame {
			if r.lame[i].zone == zone {
				r.lame[i] = lameness{}
			}
		}
	}
}

func (r *record) lameFor(zone dnsname.Name, now clock.Instant) bool {
	for i := range r.lame {
		if l := &r.lame[i]; l.zone == zone && zone != "" && now.Before(l.until) {
			return true
		}
	}
	return false
}
