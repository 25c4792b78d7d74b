package iterator

import (
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
)

// This file is all that is read from and written to the cache of RRsets.
//
// With a client subnet in the question, answers of zones that are told of it are kept under that subnet, or, if their
// scope is 0 or they came without one, for all networks of the family and for those who have no subnet (RFC 7871
// section 7.3). They are looked for in both places: what was answered to somebody without a subnet may be meant for
// where we are, and is for nobody else. Names of other zones, delegations and addresses of servers know no subnet.

func (r *run) get(name dnsname.Name, typ uint16) (query.RRset, bool) {
	s, found := r.look(name, typ, query.Subnet{})
	return s, found.OK && found.Negative.Kind == rrcache.NoKind
}

func (r *run) look(name dnsname.Name, typ uint16, subnet query.Subnet) (query.RRset, rrcache.Found) {
	at := r.at(name, subnet)
	return r.lookAt(&at, typ)
}

// at begins looks for several types at one name.
func (r *run) at(name dnsname.Name, subnet query.Subnet) rrcache.At {
	return r.it.opts.RRsets.At(rrcache.Key{Name: name, Class: dnswire.ClassIN, View: r.q.View, Subnet: subnet}, r.now)
}

func (r *run) lookAt(at *rrcache.At, typ uint16) (query.RRset, rrcache.Found) {
	s, found := at.Get(typ)
	if found.Ends != 0 && (r.out.Until == 0 || found.Ends < r.out.Until) {
		r.out.Until = found.Ends
	}
	if found.Stale && r.staleTTL > 0 {
		found.OK, r.out.Stale = true, true
		s.TTL = r.staleTTL
		if n := &found.Negative; n.Kind != rrcache.NoKind {
			n.TTL, n.SOA.TTL = r.staleTTL, r.staleTTL
			for i := range n.Proof {
				n.Proof[i].TTL = r.staleTTL
			}
		}
	}
	return s, found
}

// tells reports whether the servers of a zone are told the question's subnet.
func (r *run) tells(zone dnsname.Name) bool {
	return r.q.Subnet.Family != 0 && r.it.opts.Told != nil && r.it.opts.Told(zone)
}

// find is lookAt for the answer to a client; at is the name without a subnet.
func (r *run) find(at *rrcache.At, name dnsname.Name, typ uint16) (query.RRset, rrcache.Found) {
	if !r.tells(name) {
		return r.lookAt(at, typ)
	}
	s, found := r.look(name, typ, r.q.Subnet)
	if !found.OK {
		return r.look(name, typ, query.Subnet{Family: r.q.Subnet.Family})
	}
	return s, found
}

// answers reports whether a set may be given to clients: glue may not.
func answers(s *query.RRset) bool { return s.Rank >= query.RankNonAuth }

// cached returns what the cache knows of a name and type: data, an alias, or a denial.
func (r *run) cached(name dnsname.Name, typ uint16) (response, bool) {
	if typ == dnswire.TypeANY {
		return r.cachedAny(name)
	}
	at := r.at(name, query.Subnet{})
	s, found := r.find(&at, name, typ)
	if found.OK {
		if n := &found.Negative; n.Kind != rrcache.NoKind {
			if typ == dnswire.TypeDS && n.SOA.Type != dnswire.TypeSOA && !r.q.CD && !r.offline {
				return response{}, false // a referral said so, without the SOA record that a client wants
			}
			return denial(name, n), true
		}
		if answers(&s) && !unproven(&s) {
			return response{kind: kindAnswer, last: name, chain: []query.RRset{s}}, true
		}
	}
	if typ != dnswire.TypeCNAME {
		if c, found := r.find(&at, name, dnswire.TypeCNAME); found.OK && answers(&c) && !unproven(&c) {
			if target := nameIn(dnswire.TypeCNAME, c.First()); target != "" {
				return response{kind: kindAlias, last: target, chain: []query.RRset{c}}, true
			}
		}
	}
	for up := name.Parent(); up != "" && r.it.dnames.Load(); up = up.Parent() {
		d, found := r.look(up, dnswire.TypeDNAME, query.Subnet{})
		if !found.OK || !answers(&d) {
			continue
		}
		target := nameIn(dnswire.TypeDNAME, d.First())
		next, err := name.Replace(up, target)
		if target == "" || err != nil {
			return response{kind: kindYXDomain, last: name, chain: []query.RRset{d}}, true
		}
		res := response{kind: kindAlias, last: next, chain: []query.RRset{d, synthesise(&d, name, next)}}
		if typ == dnswire.TypeCNAME {
			res.kind = kindAnswer
		}
		return res, true
	}
	if _, n, ok := r.it.opts.RRsets.NXCut(name, r.q.View, r.now); ok {
		// What the operator configured is not for the public tree to deny, nor for a tree that was public
		// before it was configured.
		if z := r.it.Configured(r.q.View, name); z == nil || z.Name == dnsname.Root {
			return denial(name, &n), true
		}
	}
	return response{}, false
}

// commonTypes are looked for when the question is of type ANY, which any one RRset answers (RFC 8482).
var commonTypes = [...]uint16{
	dnswire.TypeA, dnswire.TypeAAAA, dnswire.TypeMX, dnswire.TypeTXT, dnswire.TypeNS, dnswire.TypeSOA, dnswire.TypeHTTPS,
	dnswire.TypeSRV, dnswire.TypePTR, dnswire.TypeCNAME,
}

func (r *run) cachedAny(name dnsname.Name) (response, bool) {
	at := r.at(name, query.Subnet{})
	for _, t := range commonTypes {
		s, found := r.find(&at, name, t)
		switch {
		case !found.OK:
		case found.Negative.Kind == rrcache.NXDomain:
			return denial(name, &found.Negative), true
		case found.Negative.Kind == rrcache.NoKind && answers(&s) && !unproven(&s):
			return response{kind: kindAnswer, last: name, chain: []query.RRset{s}}, true
		}
	}
	return response{}, false
}

func denial(name dnsname.Name, n *rrcache.Negative) response {
	res := response{kind: kindNoData, last: name, proof: n.Proof}
	if n.Kind == rrcache.NXDomain {
		res.kind, res.rcode = kindNXDomain, dnswire.RCodeNXDomain
	}
	if n.SOA.Type == dnswire.TypeSOA {
		res.soa = &n.SOA
	}
	return res
}

// unproven reports a set made from a wildcard that nobody has validated yet: the proof that no closer name
// exists, which it needs, is not kept with it.
func unproven(s *query.RRset) bool {
	if s.Status != query.Unchecked {
		return false
	}
	for sig := range query.RDatas(s.Sigs) {
		if len(sig) > 3 && int(sig[3]) < s.Name.Labels() && !(s.Name.IsWildcard() && int(sig[3]) == s.Name.Labels()-1) {
			return true
		}
	}
	return false
}

// What is known of a name on the way to another.
type knowledge uint8

const (
	unknown knowledge = iota
	exists
	denied
)

func (r *run) known(name dnsname.Name) knowledge {
	at := r.at(name, query.Subnet{})
	s, found := r.lookAt(&at, dnswire.TypeA)
	switch {
	case found.OK && found.Negative.Kind == rrcache.NXDomain:
		return denied
	case found.OK && (found.Negative.Kind == rrcache.NoData || answers(&s)):
		return exists
	}
	if s, found := r.lookAt(&at, dnswire.TypeCNAME); found.OK && found.Negative.Kind == rrcache.NoKind && answers(&s) {
		return exists
	}
	return unknown
}

// provenDenial returns the denial of a name, if its zone is Secure and has signed it: that proves as much of all
// names below, so whoever validates will see.
func (r *run) provenDenial(name, zone dnsname.Name) (rrcache.Negative, bool) {
	_, found := r.look(name, dnswire.TypeA, query.Subnet{})
	n := found.Negative
	if !found.OK || n.Kind != rrcache.NXDomain || n.Status != query.Unchecked && n.Status != query.Secure {
		return n, false
	}
	return n, slices.ContainsFunc(n.Proof, func(s query.RRset) bool { return signedBy(&s, zone) }) && r.secureZone(zone)
}

// secureZone reports whether the zone's keys were found Secure: its denials can then be believed, and forged
// answers will be noticed.
func (r *run) secureZone(zone dnsname.Name) bool {
	k := rrcache.Key{Name: zone, Type: dnswire.TypeDNSKEY, Class: dnswire.ClassIN, View: r.q.View}
	return r.it.opts.RRsets.Secure(k, r.now)
}

// addressSet returns the addresses of a name server as the cache has them, glue included; known also if it
// has that there are none. own says that this is the word of the name's own zone.
func (r *run) addressSet(name *rrcache.At, typ uint16) (addrs []netip.Addr, known, own bool) {
	s, found := r.lookAt(name, typ)
	switch {
	case !found.OK:
		return nil, false, false
	case found.Negative.Kind != rrcache.NoKind:
		return nil, true, true
	}
	return addresses(&s), true, answers(&s)
}

// synthetic reports whether s is a CNAME that a DNAME before it in a chain makes.
func synthetic(before []query.RRset, s *query.RRset) bool {
	return s.Type == dnswire.TypeCNAME && len(s.Sigs) == 0 && slices.ContainsFunc(before, func(d query.RRset) bool {
		return d.Type == dnswire.TypeDNAME && s.Name.Below(d.Name)
	})
}

// keep stores what a response about (name, typ) says, and marks its sets with their rank.
func (r *run) keep(z *cut, res *response, typ uint16, subnet query.Subnet) {
	now, c := r.now, r.it.opts.RRsets
	lease := z.left(now)
	rank := query.RankAnswer
	if res.weak || z.pool != nil {
		rank = query.RankNonAuth
	}
	for i := range res.chain {
		s := &res.chain[i]
		s.Rank, s.TTL = rank, c.TTL(s.TTL)
		if s.Type == dnswire.TypeRRSIG || synthetic(res.chain[:i], s) {
			continue // signatures alone; a CNAME that is made anew from its DNAME each time
		}
		if s.Type == dnswire.TypeDNAME {
			r.it.dnames.Store(true)
		}
		c.Put(r.q.View, subnet, *s, rrcache.Put{Lease: now.Add(seconds(lease))}, now)
	}
	if res.kind != kindNXDomain && res.kind != kindNoData {
		return
	}
	if res.soa == nil {
		// RFC 2308 section 5 would not keep a denial without SOA at all. The cache does for a few seconds, so
		// that whoever keeps asking asks the servers less often.
		if res.bare && typ != dnswire.TypeDS && typ != dnswire.TypeANY && typ != dnswire.TypeRRSIG {
			k := rrcache.Key{Name: res.last, Type: typ, Class: dnswire.ClassIN, View: r.q.View, Subnet: subnet}
			c.PutNegative(k, rrcache.NoData, query.RRset{}, nil, query.Unchecked, now)
		}
		return
	}
	// The denial is passed on with the TTL it is kept with (RFC 2308 section 3).
	soa := *res.soa
	soa.TTL = min(c.NegativeTTL(soa, res.proof), lease)
	soa.Rank = query.RankAuthority
	res.soa = &soa
	for i := range res.proof {
		res.proof[i].TTL, res.proof[i].Rank = soa.TTL, query.RankAuthority
	}
	k := rrcache.Key{Name: res.last, Type: typ, Class: dnswire.ClassIN, View: r.q.View, Subnet: subnet}
	switch {
	case res.kind == kindNXDomain:
		c.PutNegative(k, rrcache.NXDomain, *res.soa, res.proof, query.Unchecked, now)
	case res.kind == kindNoData && typ != dnswire.TypeANY && typ != dnswire.TypeRRSIG:
		c.PutNegative(k, rrcache.NoData, *res.soa, res.proof, query.Unchecked, now)
	}
}

// keepReferral stores a delegation, what the parent says of its security, and its glue.
func (r *run) keepReferral(parent *cut, res *response, granted, now clock.Instant) {
	c := r.it.opts.RRsets
	ns := res.ns
	ns.Rank = query.RankGlue
	c.Put(r.q.View, query.Subnet{}, ns, rrcache.Put{Granted: granted}, now)
	if res.ds != nil {
		ds := *res.ds
		ds.Rank = query.RankAuthority // the parent's own data, wherever it stands
		c.Put(r.q.View, query.Subnet{}, ds, rrcache.Put{Granted: parent.granted}, now)
	} else if len(res.proof) > 0 {
		k := rrcache.Key{Name: res.child, Type: dnswire.TypeDS, Class: dnswire.ClassIN, View: r.q.View}
		c.PutNegative(k, rrcache.NoData, query.RRset{}, res.proof, query.Unchecked, now)
	}
	r.keepGlueSets(res.glue, granted, now)
}

func (r *run) keepGlueSets(glue []query.RRset, granted, now clock.Instant) {
	for _, g := range glue {
		g.Rank, g.Sigs = query.RankGlue, nil
		r.it.opts.RRsets.Put(r.q.View, query.Subnet{}, g, rrcache.Put{Granted: granted}, now)
	}
}

// keepPrimed stores the answer to a priming question: the root's servers and their addresses.
func (r *run) keepPrimed(res *response, now clock.Instant) {
	ns := res.chain[len(res.chain)-1]
	ns.Rank = query.RankGlue
	granted := now.Add(seconds(ns.TTL))
	r.it.opts.RRsets.Put(r.q.View, query.Subnet{}, ns, rrcache.Put{Granted: granted}, now)
	r.keepGlueSets(res.glue, granted, now)
}

func seconds(ttl uint32) time.Duration { return time.Duration(ttl) * time.Second }
