package denialcache

import (
	"errors"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/validator/denial"
)

// maxHashes is how many NSEC3 hashes one Find may compute.
const maxHashes = 16

// A Kind says what Find found.
type Kind uint8

// The kinds.
const (
	Nothing  Kind = iota
	NXDomain      // the name does not exist
	NoData        // the type does not exist at the name
	Expanded      // the name does not exist, and Wildcard, if it has the type or an alias, answers
)

// A Denial is what Find found, with what proves it.
type Denial struct {
	Kind Kind
	Zone dnsname.Name // whose records they are
	// SOA is the zone's, for NXDomain and NoData. Proof holds NSEC or NSEC3 sets. All are Secure and have the TTL of
	// the whole.
	SOA   query.RRset
	Proof []query.RRset
	// TTL is how long that is so, in seconds.
	TTL uint32
	// Wildcard is the owner of the records that may answer, for Expanded.
	Wildcard dnsname.Name
}

// Find looks for a denial of (name, typ), of class IN. With Nothing there is none.
func (c *Cache) Find(view query.View, name dnsname.Name, typ uint16, now clock.Instant) Denial {
	if typ == dnswire.TypeANY || typ == dnswire.TypeRRSIG || typ == dnswire.TypeNSEC || typ == dnswire.TypeNSEC3 {
		return Denial{} // what proofs are made of is asked for by those who want to see it
	}
	holder := name
	if typ == dnswire.TypeDS && name != dnsname.Root {
		holder = name.Parent() // the zone above has them
	}
	l := look{c: c, now: now, name: name, typ: typ}
	var hashed, iterated bool
	c.mu.RLock()
	for at := holder; at != "" && l.zone == nil; at = at.Parent() {
		l.zone = c.zones[zoneKey{view, at}]
	}
	if z := l.zone; z != nil {
		l.soa, l.minimum, l.soaUntil = z.soa, z.minimum, z.soaUntil
		l.params, hashed = z.params, len(z.hashes) > 0
		iterated = l.params.Iterated()
	}
	c.mu.RUnlock()
	if l.zone == nil {
		return Denial{}
	}
	d := l.byName()
	if d.Kind == Nothing && hashed {
		if iterated {
			select {
			case c.hashing <- struct{}{}:
				defer func() { <-c.hashing }()
			default:
				return Denial{}
			}
		}
		d = l.byHash()
	}
	if d.Kind != Nothing {
		c.found.Add(1)
	}
	return d
}

// A look is one Find. What it says of the zone is as it was when it began.
type look struct {
	c    *Cache
	now  clock.Instant
	name dnsname.Name
	typ  uint16

	zone     *zone
	soa      query.RRset
	minimum  uint32
	soaUntil clock.Instant
	params   denial.Params

	spans []*span // found so far, each once
}

// at adds the live span that matches a place or covers it, and reports which.
func (l *look) at(hashed bool, place string) (s *span, match bool) {
	l.c.mu.RLock()
	if hashed {
		if l.zone.params == l.params { // a new chain may have come meanwhile
			s, match = l.zone.hashes.find(place)
		}
	} else {
		s, match = l.zone.names.find(place)
	}
	l.c.mu.RUnlock()
	if s == nil || !l.now.Before(s.until) {
		return nil, false
	}
	return s, match
}

func (l *look) use(s *span) {
	for _, have := range l.spans {
		if have == s {
			return
		}
	}
	l.spans = append(l.spans, s)
}

// byName tries NSEC records.
func (l *look) byName() Denial {
	s, match := l.at(false, order(l.name))
	if s == nil {
		return Denial{}
	}
	l.use(s)
	var encloser dnsname.Name
	if !match {
		next, _ := denial.ReadNSEC(&s.set, l.zone.key.name)
		encloser = l.name.Suffix(max(dnsname.CommonLabels(l.name, s.set.Name), dnsname.CommonLabels(l.name, next)))
		if encloser == l.name { // an empty non-terminal
			encloser = ""
		} else if w, _ := l.at(false, order(wildcard(encloser))); w != nil {
			l.use(w)
		}
	}
	return l.judge(encloser, nil)
}

func wildcard(encloser dnsname.Name) dnsname.Name { return "\x01*" + encloser }

var errHashes = errors.New("too many hashes for a look")

// byHash tries NSEC3 records: the closest encloser that has one, what covers the next closer name, and the wildcard.
func (l *look) byHash() Denial {
	left := maxHashes
	h := denial.NewHasher(func() error {
		if left--; left < 0 {
			return errHashes
		}
		return nil
	})
	var below *span
	for at := l.name; at.IsWithin(l.zone.key.name); at = at.Parent() {
		hash, err := h.Hash(at, l.params)
		if err != nil {
			return Denial{}
		}
		s, match := l.at(true, string(hash[:]))
		if !match {
			below = s
			continue
		}
		l.spans = nil
		l.use(s)
		if at == l.name {
			return l.judge("", h)
		}
		if below == nil || s.foreign {
			return Denial{}
		}
		l.use(below)
		if hash, err = h.Hash(wildcard(at), l.params); err != nil {
			return Denial{}
		}
		if w, _ := l.at(true, string(hash[:])); w != nil {
			l.use(w)
		}
		return l.judge(at, h)
	}
	return Denial{}
}

// judge says what the spans found prove. encloser is the closest encloser, if the name does not exist.
func (l *look) judge(encloser dnsname.Name, h *denial.Hasher) Denial {
	sets := make([]query.RRset, len(l.spans))
	for i, s := range l.spans {
		sets[i] = s.set
	}
	p := denial.New(l.zone.key.name, sets, h)
	d := Denial{Kind: NXDomain, Zone: l.zone.key.name}
	r := p.NameError(l.name)
	if r.Status != query.Secure {
		d.Kind = NoData
		r = p.NoData(l.name, l.typ)
	}
	if r.Status != query.Secure && encloser != "" && l.name != wildcard(encloser) {
		d.Kind, d.Wildcard = Expanded, wildcard(encloser)
		r = p.Expansion(l.name, encloser.Labels())
	}
	if r.Status != query.Secure {
		return Denial{}
	}
	until := clock.Never
	if d.Kind != Expanded {
		if l.soa.Type == 0 {
			return Denial{}
		}
		until = min(l.soaUntil, l.now.Add(time.Duration(l.minimum)*time.Second))
		d.SOA = l.soa
	}
	for _, i := range r.Used {
		until = min(until, l.spans[i].until)
	}
	if !l.now.Before(until) {
		return Denial{}
	}
	d.TTL = uint32((until.Sub(l.now) + time.Second - 1) / time.Second)
	d.SOA.TTL = d.TTL
	for _, i := range r.Used {
		s := l.spans[i]
		if !s.used.Load() { // most are, and a store would take the line from other processors
			s.used.Store(true)
		}
		sets[i].TTL = d.TTL
		d.Proof = append(d.Proof, sets[i])
	}
	return d
}
