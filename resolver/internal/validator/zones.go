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

// A table remembers things until they end or the epoch changes. The zero value with most set is ready.
type table[K comparable, V any] struct {
	most int

	mu sync.Mutex // guards m
	m  map[K]entry[V]
}

type entry[V any] struct {
	v     V
	end   clock.Instant
	epoch uint32
}

func (t *table[K, V]) get(k K, now clock.Instant, epoch uint32) (v V, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e, ok := t.m[k]; ok && e.epoch == epoch && now.Before(e.end) {
		return e.v, true
	}
	return v, false
}

func (t *table[K, V]) put(k K, v V, end clock.Instant, epoch uint32, now clock.Instant) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.m == nil {
		t.m = make(map[K]entry[V])
	}
	if _, ok := t.m[k]; !ok && len(t.m) >= t.most {
		t.drop(now)
	}
	t.m[k] = entry[V]{v, end, epoch}
}

// drop makes room: of a few entries, which map iteration begins at a random place, the one that ends first.
func (t *table[K, V]) drop(now clock.Instant) {
	var victim K
	first := clock.Never
	seen := 0
	for k, e := range t.m {
		if e.end < first || seen == 0 {
			victim, first = k, e.end
		}
		if seen++; seen == 8 || first.Before(now) {
			break
		}
	}
	delete(t.m, victim)
}

// forget removes the entries of the keys that match.
func (t *table[K, V]) forget(match func(K) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for k := range t.m {
		if match(k) {
			delete(t.m, k)
		}
	}
}

// What is remembered: zones; why questions were answered with bogus data; until when records of denials are
// verified, by the hash of all that was.
type (
	zoneTable  = table[zoneKey, *zone]
	bogusTable = table[bogusKey, reason]
	proofTable = table[proofKey, clock.Instant]
)

type zoneKey struct {
	name dnsname.Name
	view query.View
}

type bogusKey struct {
	name   dnsname.Name
	typ    uint16
	view   query.View
	subnet query.Subnet
}

type proofKey [32]byte
