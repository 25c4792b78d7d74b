package iterator

import (
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/denialcache"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// inferred answers from what proofs of other names say of this one (RFC 8198), or reports that nothing follows.
//
// A zone's word counts as long as its parent's: when the grant has ended, the servers are asked, so that a domain
// that was taken away or has moved does not live on by what it once denied.
func (r *run) inferred(name dnsname.Name, typ uint16) (response, bool) {
	if r.it.opts.Denied == nil || r.q.Subnet != (query.Subnet{}) {
		return response{}, false
	}
	configured := r.it.Configured(r.q.View, name)
	if configured != nil && configured.Name != dnsname.Root {
		return response{}, false // not for the public tree to deny
	}
	d := r.it.opts.Denied(r.q.View, name, typ, r.now)
	if d.Kind == denialcache.Nothing {
		return response{}, false
	}
	ttl := d.TTL
	if configured == nil && d.Zone != dnsname.Root {
		holder := name
		if typ == dnswire.TypeDS {
			holder = name.Parent()
		}
		zone, _, granted, ok := r.it.opts.RRsets.Delegation(holder, r.q.View, r.now)
		if !ok || !zone.IsWithin(d.Zone) || !r.now.Before(granted) {
			return response{}, false
		}
		ttl = min(ttl, uint32((granted.Sub(r.now)+time.Second-1)/time.Second))
	}
	for i := range d.Proof {
		d.Proof[i].TTL = ttl
	}
	d.SOA.TTL = ttl
	res := response{last: name, proof: d.Proof}
	switch d.Kind {
	case denialcache.NXDomain:
		res.kind, res.rcode, res.soa = kindNXDomain, dnswire.RCodeNXDomain, &d.SOA
		return res, true
	case denialcache.NoData:
		res.kind, res.soa = kindNoData, &d.SOA
		return res, true
	}
	s, ok := r.expanded(d.Wildcard, typ)
	if ok {
		res.kind = kindAnswer
	} else if s, ok = r.expanded(d.Wildcard, dnswire.TypeCNAME); ok {
		res.kind, res.last = kindAlias, nameIn(dnswire.TypeCNAME, s.First())
	}
	if !ok || res.last == "" {
		return response{}, false
	}
	// It is checked like any answer that a wildcard gave: its proof is at hand.
	s.Name, s.Status, s.TTL = name, query.Unchecked, min(s.TTL, ttl)
	res.chain = []query.RRset{s}
	return res, true
}

// expanded returns the Secure set of a wildcard.
func (r *run) expanded(wildcard dnsname.Name, typ uint16) (query.RRset, bool) {
	s, ok := r.get(wildcard, typ)
	return s, ok && s.Status == query.Secure && answers(&s)
}
