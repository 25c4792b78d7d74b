package iterator

import (
	"sync"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// Names made up at random (water torture) miss every cache and all go to the servers of one zone. What is under
// way there is bounded, so that neither the zone nor this resolver drowns: the rest is turned away at once.
// The bound of a zone shrinks while its servers are silent, as questions to them would only wait. The root and
// top-level domains, which everybody needs, have no bound but those of the servers (package exchange).
const (
	maxPerZone = 200
	minPerZone = 20
	// judgeEvery steps a zone's bound is judged: above silentMany of them without any answer it shrinks, below
	// silentFew it grows.
	judgeEvery, silentMany, silentFew = 100, 30, 10
	// zoneQuiet after the last step a bound is forgotten.
	zoneQuiet = 5 * time.Minute
)

// A load is what is under way for a zone.
type load struct {
	steps, bound  int
	ended, silent int // since the bound was last judged
	last          clock.Instant
}

// loads holds zones with steps under way, and those with a bound that shrank. The zero value is ready.
type loads struct {
	mu sync.Mutex // guards m
	m  map[dnsname.Name]*load
}

// enter counts a step for a zone, or reports that there are too many; leave ends one that was counted.
func (l *loads) enter(zone dnsname.Name, now clock.Instant) bool {
	if zone.Labels() < 2 {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	z := l.m[zone]
	if z == nil {
		if l.m == nil {
			l.m = make(map[dnsname.Name]*load)
		}
		if len(l.m) >= maxMemory {
			l.drop()
		}
		z = &load{bound: maxPerZone}
		l.m[zone] = z
	}
	if z.steps == 0 && now.Sub(z.last) > zoneQuiet {
		*z = load{bound: maxPerZone}
	}
	if z.steps >= z.bound {
		return false
	}
	z.steps++
	return true
}

func (l *loads) leave(zone dnsname.Name, silent bool, now clock.Instant) {
	if zone.Labels() < 2 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	z := l.m[zone]
	z.steps--
	z.last = now
	z.ended++
	if silent {
		z.silent++
	}
	if z.ended == judgeEvery {
		switch {
		case z.silent > silentMany:
			z.bound = max(z.bound*3/4, minPerZone)
		case z.silent < silentFew:
			z.bound = min(z.bound*4/3, maxPerZone)
		}
		z.ended, z.silent = 0, 0
	}
	if z.steps == 0 && z.bound == maxPerZone {
		delete(l.m, zone)
	}
}

// drop forgets one of a few zones without steps, in the random order of a map.
func (l *loads) drop() {
	n := 0
	for zone, z := range l.m {
		if z.steps == 0 {
			delete(l.m, zone)
			return
		}
		if n++; n == 8 {
			return // as many zones as there are questions in flight, which are bounded elsewhere
		}
	}
}
