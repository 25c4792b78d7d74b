// Package ecs decides whose network a question carries to authoritative servers, and to which of them (EDNS client
// subnet, RFC 7871).
//
// Only zones that the operator lists get to see any, since each learns something of every client and each answer
// takes a place in the caches for each network. A question carries a subnet if the name asked for (or what policy made
// of it) is in a listed zone; Told says whether the servers of a zone may be told: those of listed zones and of zones
// below them. Names of such a question that are elsewhere, as an alias may lead to, are resolved as for everybody.
//
// The subnet is the network of the address that the query came from. From a relay (identify.relays) it is what the
// relay's own option says, and none if it says nothing: the relay is not the client. Options of anybody else are not
// believed. Nobody's network is sent who declines, by an option with a prefix of length 0 (RFC 7871 section 7.1.2) or
// by the setting "ecs" of the user. Addresses that mean nothing elsewhere, private ones above all, are not sent.
//
// It computes; there is no I/O and no clock here, and Subnet allocates nothing.
package ecs

import (
	"fmt"
	"net/netip"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// Options are what an operator says. The zero value sends nothing to anybody.
type Options struct {
	// Zones may be told. The root and top-level domains cannot be among them: their answers are the same for all.
	Zones []dnsname.Name
	// IPv4 and IPv6 are how many bits of an address are sent at most; 0 sends none of that family.
	IPv4, IPv6 uint8
	// Relays are networks whose options are believed.
	Relays []netip.Prefix
}

// A Policy decides. It is immutable.
type Policy struct {
	o     Options
	zones map[dnsname.Name]bool
}

// New returns a Policy, nil if no zone is listed. An error names the zone that cannot be.
func New(o Options) (*Policy, error) {
	if len(o.Zones) == 0 {
		return nil, nil
	}
	p := &Policy{o: o, zones: make(map[dnsname.Name]bool, len(o.Zones))}
	for _, z := range o.Zones {
		if z.Labels() < 2 {
			return nil, fmt.Errorf("%v: neither the root nor a top-level domain is told of clients; list the zones that answer by network", z)
		}
		p.zones[z] = true
	}
	if o.IPv4 > 32 || o.IPv6 > 128 {
		return nil, fmt.Errorf("%d bits of IPv4 and %d of IPv6: there are 32 and 128", o.IPv4, o.IPv6)
	}
	return p, nil
}

// Told reports whether the servers of a zone may be told of clients' networks; the same for whether a name is theirs
// to answer so.
func (p *Policy) Told(zone dnsname.Name) bool {
	for n := zone; n != ""; n = n.Parent() {
		if p.zones[n] {
			return true
		}
	}
	return false
}

// Subnet returns what q.Turn.Current is to carry.
func (p *Policy) Subnet(q *query.Query) query.Subnet {
	switch cur := &q.Turn.Current; {
	case cur.Class != dnswire.ClassIN || !varies(cur.Type) || !p.Told(cur.Name):
		return query.Subnet{}
	case q.EDNS.HasSubnet && q.EDNS.Subnet.Bits == 0: // declined, whoever says so
		return query.Subnet{}
	case q.Client.Kind == query.Identified && !q.Client.Profile.Is(usercache.ECS):
		return query.Subnet{}
	}
	src := q.Source.Addr().Unmap()
	if !p.relay(src) {
		return p.of(src, 128)
	}
	if !q.EDNS.HasSubnet {
		return query.Subnet{}
	}
	s := q.EDNS.Subnet
	a := netip.AddrFrom16(s.Addr)
	if s.Family == 1 {
		a = netip.AddrFrom4([4]byte(s.Addr[:4]))
	}
	return p.of(a, s.Bits)
}

// varies reports whether the data of a type may depend on who asks. What zones and chains of trust are made of must
// not.
func varies(typ uint16) bool {
	switch typ {
	case dnswire.TypeNS, dnswire.TypeSOA, dnswire.TypeDNAME, dnswire.TypeDS, dnswire.TypeDNSKEY, dnswire.TypeRRSIG,
		dnswire.TypeNSEC, dnswire.TypeNSEC3, dnswire.TypeNSEC3PARAM, dnswire.TypeANY:
		return false
	}
	return true
}

func (p *Policy) relay(a netip.Addr) bool {
	for _, n := range p.o.Relays {
		if n.Contains(a) {
			return true
		}
	}
	return false
}

// of is the network of an address of which so many bits are known.
func (p *Policy) of(a netip.Addr, known uint8) query.Subnet {
	if !public(a) {
		return query.Subnet{}
	}
	s := query.Subnet{Family: 2, Bits: min(known, p.o.IPv6)}
	if a.Is4() {
		s = query.Subnet{Family: 1, Bits: min(known, p.o.IPv4)}
	}
	if s.Bits == 0 {
		return query.Subnet{}
	}
	n, err := a.Prefix(int(s.Bits))
	if err != nil {
		return query.Subnet{}
	}
	if a.Is4() {
		b := n.Addr().As4()
		copy(s.Addr[:], b[:])
	} else {
		s.Addr = n.Addr().As16()
	}
	return s
}

// nowhere are networks that mean something else wherever one is (RFC 6890), beyond those that netip knows of.
var nowhere = [...]netip.Prefix{netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("100.64.0.0/10")}

func public(a netip.Addr) bool {
	if a.IsUnspecified() || a.IsLoopback() || a.IsPrivate() || a.IsLinkLocalUnicast() || a.IsMulticast() {
		return false
	}
	for _, n := range nowhere {
		if n.Contains(a) {
			return false
		}
	}
	return true
}
