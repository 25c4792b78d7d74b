package rrcache

import (
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// TTL returns the TTL that a set with the given one is kept with, so that who passes data on while it is being
// stored shows the same TTL as who gets it from the cache a moment later.
func (c *Cache) TTL(ttl uint32) uint32 {
	return uint32(min(max(seconds(ttl), c.opts.MinTTL), c.opts.MaxTTL) / time.Second)
}

// NegativeTTL returns the TTL that a denial is kept with: see PutNegative.
func (c *Cache) NegativeTTL(soa query.RRset, proof []query.RRset) uint32 {
	life, _ := c.negativeLife(soa, proof)
	return uint32(life / time.Second)
}

// bareLife is how long a denial without SOA and proof is kept: long enough to spare its servers a client that
// keeps asking.
const bareLife = 5 * time.Second

// negativeLife returns how long a denial is good for; ok is false if it may not be kept.
func (c *Cache) negativeLife(soa query.RRset, proof []query.RRset) (life time.Duration, ok bool) {
	first := soa.First()
	hasSOA := soa.Type == dnswire.TypeSOA && len(first) >= 22
	switch {
	case !hasSOA && soa.Type != 0:
		return 0, false
	case !hasSOA && len(proof) == 0:
		return bareLife, true
	}
	life = min(c.opts.MaxNegativeTTL, c.opts.MaxTTL)
	if hasSOA {
		life = min(life, seconds(soa.TTL), seconds(dnswire.Uint32(first[len(first)-4:])))
	}
	for i := range proof {
		life = min(life, seconds(proof[i].TTL))
	}
	return life, true
}
