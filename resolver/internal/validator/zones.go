package validator

import (
	"sync"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/validator/rrsig"
)

// A zone is what is known of a name at which a zone begins, or at and below which nothing is signed. It is
// immutable once made.
type zone struct {
	name dnsname.Name
	// status is Secure for a zone whose keys are known; Insecure for a proven end of the chain of trust,
	// Indeterminate for names without an anchor above, Bogus for a zone that should have keys and has none.
	status query.Status
	keys   []*rrsig.Key
	why    reason
	end    clock.Instant
}

func (z *zone) verdict() verdict {
	if z == nil {
		return verdict{}
	}
	return verdict{status: z.status, why: z.why}
}

// unsigned reports that nothing in z has to be signed. A zone without keys that should have some is not so: what
// its signatures claim decides about data there.
func (z *zone) unsigned() bool {
	return z != nil && (z.status == query.Insecure || z.status == query.Indeterminate)
}

// A zoneTable remembers zones until they end. The zero value with most set is ready.
type zoneTable struct {
	most int

	mu sync.Mutex // guards m
	m  map[zoneKey]zoneEntry
}

type zoneKey struct {
	name dnsname.Name
	view query.View
}

type zoneEntry struct {
	*zone
	epoch uint32
}

func (t *zoneTable) get(k zoneKey, now clock.Instant, epoch uint32) *zone {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e, ok := t.m[k]; ok && e.epoch == epoch && now.Before(e.end) {
		return e.zone
	}
	return nil
}

func (t *zoneTable) put(k zoneKey, z *zone, epoch uint32, now clock.Instant) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.m == nil {
		t.m = make(map[zoneKey]zoneEntry)
	}
	if _, ok := t.m[k]; !ok && len(t.m) >= t.most {
		drop(t.m, now, func(e zoneEntry) clock.Instant { return e.end })
	}
	t.m[k] = zoneEntry{z, epoch}
}

// forget removes what is known of a name, or with subtree of those below it too, in every view.
func (t *zoneTable) forget(name dnsname.Name, subtree bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for k := range t.m {
		if k.name == name || subtree && k.name.Below(name) {
			delete(t.m, k)
		}
	}
}

// drop makes room: of a few entries, which map iteration begins at a random place, the one that ends first.
func drop[K comparable, E any](m map[K]E, now clock.Instant, end func(E) clock.Instant) {
	var victim K
	first := clock.Never
	seen := 0
	for k, e := range m {
		if at := end(e); at < first || seen == 0 {
			victim, first = k, at
		}
		if seen++; seen == 8 || first.Before(now) {
			break
		}
	}
	delete(m, victim)
}

// A bogusTable remembers why questions were answered with bogus data. The zero value with most set is ready.
type bogusTable struct {
	most int

	mu sync.Mutex // guards m
	m  map[bogusKey]bogusEntry
}

type bogusKey struct {
	name   dnsname.Name
	typ    uint16
	view   query.View
	subnet query.Subnet
}

type bogusEntry struct {
	why   reason
	end   clock.Instant
	epoch uint32
}

func (t *bogusTable) get(k bogusKey, now clock.Instant, epoch uint32) (reason, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e, ok := t.m[k]
	return e.why, ok && e.epoch == epoch && now.Before(e.end)
}

func (t *bogusTable) put(k bogusKey, why reason, end clock.Instant, epoch uint32, now clock.Instant) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.m == nil {
		t.m = make(map[bogusKey]bogusEntry)
	}
	if _, ok := t.m[k]; !ok && len(t.m) >= t.most {
		drop(t.m, now, func(e bogusEntry) clock.Instant { return e.end })
	}
	t.m[k] = bogusEntry{why, end, epoch}
}

func (t *bogusTable) forget(name dnsname.Name, subtree bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for k := range t.m {
		if k.name == name || subtree && k.name.Below(name) {
			delete(t.m, k)
		}
	}
}

// A proofTable remembers which records of denials were verified, by the hash of all that was verified. The zero
// value with most set is ready.
type proofTable struct {
	most int

	mu sync.Mutex // guards m
	m  map[proofKey]proofEntry
}

type proofKey [32]byte

type proofEntry struct {
	end   clock.Instant
	epoch uint32
}

func (t *proofTable) get(k proofKey, now clock.Instant, epoch uint32) (clock.Instant, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e, ok := t.m[k]
	return e.end, ok && e.epoch == epoch && now.Before(e.end)
}

func (t *proofTable) put(k proofKey, end clock.Instant, epoch uint32, now clock.Instant) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.m == nil {
		t.m = make(map[proofKey]proofEntry)
	}
	if _, ok := t.m[k]; !ok && len(t.m) >= t.most {
		drop(t.m, now, func(e proofEntry) clock.Instant { return e.end })
	}
	t.m[k] = proofEntry{end, epoch}
}
