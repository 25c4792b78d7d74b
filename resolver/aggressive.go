package resolver

import (
	"sync/atomic"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/denialcache"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/limits"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// This file is RFC 8198: what was proved for one name answers for others. The validator fills package denialcache,
// the iterator asks it before it asks servers.

// denialShare is the part of the cache budget that proofs get: one record of a zone answers for many names, or
// for none.
const denialShare = 32

// newDenials makes the cache of proofs, and returns how the iterator asks it; nil if nothing is validated. Without
// aggressive use it answers still where the proof is of the very question: a referral proves that a zone has no DS
// records and lacks the SOA that goes with the answer to who asks for them.
func (e *engine) newDenials(o *Options) func(query.View, dnsname.Name, uint16, clock.Instant) denialcache.Denial {
	if !o.DNSSEC.Validate {
		return nil
	}
	aggressive := o.Cache.Aggressive
	e.denials = denialcache.New(denialcache.Options{Bytes: o.Limits.Value(limits.Cache) / denialShare, MaxTTL: o.Cache.MaxNegativeTTL})
	return func(view query.View, name dnsname.Name, typ uint16, now clock.Instant) denialcache.Denial {
		if !aggressive && typ != dnswire.TypeDS {
			return denialcache.Denial{}
		}
		if e.validate.Untrusted(name, clock.Wall()) { // a proof from above may be what is wrong (RFC 7646)
			return denialcache.Denial{}
		}
		d := e.denials.Find(view, name, typ, now)
		if !aggressive && !(d.Kind == denialcache.NoData && len(d.Proof) == 1 && (d.Proof[0].Name == name || d.Proof[0].Type == dnswire.TypeNSEC3)) {
			return denialcache.Denial{}
		}
		return d
	}
}

// A doorkeeper remembers which questions were asked a while ago, by their hashes, and now and then one that was
// not. Answers inferred for random names are worth no place among the settled ones; those asked for again are.
type doorkeeper [1 << 14]atomic.Uint32

// before reports whether a question was asked before, and notes that it was.
func (d *doorkeeper) before(hash uint64) bool {
	slot, tag := &d[hash%uint64(len(d))], uint32(hash>>32)|1
	if slot.Load() == tag {
		return true
	}
	slot.Store(tag)
	return false
}
