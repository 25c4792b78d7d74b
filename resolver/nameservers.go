package resolver

import (
	"context"
	"net/netip"
	"slices"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/iterator"
	"github.com/sluice-dns/sluice/resolver/internal/policy"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
)

// nameServers knows the name servers that answers came through, for the rules of policy zones and lists that are
// about them (rpz-nsdname, rpz-nsip).
//
// They are those of every zone cut on the way to a name that the cache knows, by the parent's word, with the
// addresses it knows; those of the root and of top-level domains do not count (what others call min-ns-dots: 1),
// since a rule that meets them would block nearly everything. An answer outlives no cut of its zone, but a cut that
// nobody uses may have to make room: then it is asked for again before the answer is judged, unless the client does
// not want recursion, and if nobody says, the answer is judged without. A stale answer is judged by the cuts it was
// given under, and nobody is asked. At and above a stub or forward zone there are no name servers: the operator
// says who is asked.
type nameServers struct {
	rrsets   *rrcache.Cache
	iterator *iterator.Iterator
	policy   *policy.Policy
	zones    *policyZones
}

// maxServers bounds the names, and the addresses, of the name servers that one name of an answer is judged by.
const maxServers = 128

// minDots is how many dots a zone's name must have for its servers to count.
const minDots = 1

// of returns the servers of the zones on the way to a name, in the order in which rules are to look at them.
func (s *nameServers) of(name dnsname.Name, view query.View, stale, addrs bool, now clock.Instant) (out query.Servers) {
	top := s.top(view, name)
	for zone := name; ; zone = zone.Parent() {
		var ns query.RRset
		var ok bool
		if zone, ns, ok = s.cut(zone, view, stale, now); !ok || zone.Labels() <= minDots || !zone.Below(top) || zone == top {
			break
		}
		for rdata := range query.RDatas(ns.Data) {
			if len(out.Names) == maxServers {
				break
			}
			b := make([]byte, len(rdata))
			dnsname.Fold(b, rdata)
			out.Names = append(out.Names, dnsname.Name(b))
		}
	}
	slices.SortFunc(out.Names, dnsname.Compare)
	out.Names = slices.Compact(out.Names)
	if !addrs {
		return out
	}
	for _, server := range out.Names {
		for _, typ := range []uint16{dnswire.TypeA, dnswire.TypeAAAA} {
			set, found := s.rrsets.Get(rrcache.Key{Name: server, Type: typ, Class: dnswire.ClassIN, View: view}, now)
			if !found.OK && !(found.Stale && stale) {
				continue
			}
			for d := range query.RDatas(set.Data) {
				if a, ok := netip.AddrFromSlice(d); ok && len(out.Addrs) < maxServers {
					out.Addrs = append(out.Addrs, a)
				}
			}
		}
	}
	slices.SortFunc(out.Addrs, netip.Addr.Compare)
	out.Addrs = slices.Compact(out.Addrs)
	return out
}

// top is the zone at and above which nobody's servers count.
func (s *nameServers) top(view query.View, name dnsname.Name) dnsname.Name {
	if z := s.iterator.Configured(view, name); z != nil {
		if z.Forward != nil {
			return name // nor below: a forwarder's word delegates nothing
		}
		return z.Name
	}
	return dnsname.Root
}

func (s *nameServers) cut(name dnsname.Name, view query.View, stale bool, now clock.Instant) (dnsname.Name, query.RRset, bool) {
	if stale {
		return s.rrsets.StaleDelegation(name, view, now)
	}
	zone, ns, _, ok := s.rrsets.Delegation(name, view, now)
	return zone, ns, ok
}

// Of is what package policy is told of a name of an answer.
func (s *nameServers) Of(q *query.Query, a *query.Answer, name dnsname.Name, addrs bool) query.Servers {
	return s.of(name, q.Turn.Current.View, a.Stale, addrs, clock.Elapsed())
}

// Unknown returns the names of an answer of whose zones no servers are known, if a rule for q wants to know them.
func (s *nameServers) Unknown(q *query.Query, a *query.Answer, now clock.Instant) (names []dnsname.Name) {
	if a.Stale || q.Turn.Local || !s.policy.WantsServers(q) && !s.zones.wantServers(q) {
		return nil
	}
	cur := &q.Turn.Current
	last, zone := cur.Name, dnsname.Root // zone is the last name's
	look := func(name, zone dnsname.Name) {
		if name.Labels() <= minDots+1 && zone.Labels() <= minDots || s.iterator.Configured(cur.View, name) != nil {
			return
		}
		known, _, _, ok := s.rrsets.Delegation(name, cur.View, now)
		if !ok || known.Labels() < max(zone.Labels(), minDots+1) {
			names = append(names, dnsname.Name([]byte(name)))
		}
	}
	for off := 0; ; {
		kind, value, next, ok := a.Facts.Next(off)
		if !ok {
			break
		}
		switch off = next; kind {
		case query.FactAlias:
			look(last, dnsname.Root)
			last = dnsname.Name(value)
		case query.FactZone:
			zone = dnsname.Name(value)
		}
	}
	if a.RCode != dnswire.RCodeNXDomain || zone.Labels() > minDots { // the servers of a top-level domain said that nothing is there
		look(last, zone)
	}
	return names
}

// Find has the zones of names looked for from above, so that the cache knows their cuts.
func (s *nameServers) Find(ctx context.Context, tree *query.Tree, view query.View, names []dnsname.Name) {
	for _, n := range names {
		// Whatever is said of the name itself, on the way to it zones are delegated.
		_, _ = s.iterator.Again(ctx, tree, query.Question{Name: n, Type: dnswire.TypeNS, Class: dnswire.ClassIN, CD: true, View: view}, nil)
	}
}
