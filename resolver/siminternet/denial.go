package siminternet

import (
	"cmp"
	"slices"
	"strings"

	"github.com/miekg/dns"
)

// A denialChain holds the zone's NSEC or NSEC3 records in their order. It is the same ring for both: an entry
// matches what sorts at its place and covers what sorts between it and the next.
type denialChain struct {
	entries []denialEntry
	hash    func(name string) string // the place of a name in the order
	hashed  bool                     // NSEC3
}

type denialEntry struct {
	order string
	rr    dns.RR
}

func (z *zone) makeDenial() denialChain {
	if z.declared.NSEC3 != nil {
		return z.makeNSEC3(*z.declared.NSEC3)
	}
	var nodes []*node
	for _, n := range z.nodes {
		if len(n.rrsets) > 0 {
			nodes = append(nodes, n)
		}
	}
	slices.SortFunc(nodes, func(a, b *node) int { return strings.Compare(a.order, b.order) })
	chain := denialChain{hash: canonicalOrder}
	for i, n := range nodes {
		chain.entries = append(chain.entries, denialEntry{n.order, &dns.NSEC{
			Hdr:        dns.RR_Header{Name: n.name, Rrtype: dns.TypeNSEC, Class: dns.ClassINET, Ttl: z.negativeTTL()},
			NextDomain: nodes[(i+1)%len(nodes)].name,
			TypeBitMap: n.types(dns.TypeRRSIG, dns.TypeNSEC),
		}})
	}
	return chain
}

func (z *zone) makeNSEC3(p NSEC3) denialChain {
	chain := denialChain{hashed: true, hash: func(name string) string {
		return dns.HashName(name, dns.SHA1, p.Iterations, p.Salt)
	}}
	// RFC 5155 section 7.1: with opt-out, insecure delegations have no record, nor have empty non-terminals
	// that exist on their account alone.
	covered := make(map[string]*node)
	for _, n := range z.nodes {
		if len(n.rrsets) == 0 || p.OptOut && n.cut && n.rrsets[dns.TypeDS] == nil {
			continue
		}
		for name := n.name; covered[name] == nil; name = parentName(name) {
			covered[name] = z.nodes[name]
			if name == z.name {
				break
			}
		}
	}
	for name := range covered {
		chain.entries = append(chain.entries, denialEntry{order: chain.hash(name), rr: &dns.NSEC3{
			Hdr:  dns.RR_Header{Rrtype: dns.TypeNSEC3, Class: dns.ClassINET, Ttl: z.negativeTTL()},
			Hash: dns.SHA1, Iterations: p.Iterations, SaltLength: uint8(len(p.Salt) / 2), Salt: p.Salt,
			TypeBitMap: covered[name].nsec3Types(),
		}})
	}
	slices.SortFunc(chain.entries, func(a, b denialEntry) int { return strings.Compare(a.order, b.order) })
	for i, e := range chain.entries {
		rr := e.rr.(*dns.NSEC3)
		rr.Hdr.Name = strings.ToLower(e.order) + "." + strings.TrimPrefix(z.name, ".")
		rr.HashLength, rr.NextDomain = 20, chain.entries[(i+1)%len(chain.entries)].order
		if p.OptOut {
			rr.Flags = 1
		}
	}
	return chain
}

// types returns the types at a node for an NSEC record, sorted, with those that signing adds.
func (n *node) types(added ...uint16) []uint16 {
	for t := range n.rrsets {
		added = append(added, t)
	}
	slices.Sort(added)
	return added
}

// nsec3Types returns the types at a node for an NSEC3 record: RRSIG only where something is signed.
func (n *node) nsec3Types() []uint16 {
	if len(n.rrsets) == 0 || n.cut && n.rrsets[dns.TypeDS] == nil {
		return n.types()
	}
	return n.types(dns.TypeRRSIG)
}

// at returns the record that matches name, or the one that covers it.
func (c *denialChain) at(name string) (rr dns.RR, matches bool) {
	i, found := slices.BinarySearchFunc(c.entries, c.hash(name), func(e denialEntry, order string) int {
		return cmp.Compare(e.order, order)
	})
	if !found {
		i = (i + len(c.entries) - 1) % len(c.entries)
	}
	return c.entries[i].rr, found
}

// The proofs. Each returns records without repetition; all are empty in an unsigned zone.

// proveNoData shows that name exists without the type asked for. For a DS query or a referral in a zone with
// opt-out there may be no record for the name: the closest provable encloser stands in (RFC 5155 section 7.2.4).
func (z *zone) proveNoData(name string) proof {
	p := proof{z: z}
	if z.zsk == nil {
		return p
	}
	rr, matches := z.denial.at(name)
	if matches || !z.denial.hashed {
		p.add(rr) // NSEC: an empty non-terminal is denied its types by the record before it
		return p
	}
	p.closestEncloser(name, parentName(name))
	return p
}

// proveNoName shows that neither name nor a wildcard below its closest encloser exists.
func (z *zone) proveNoName(name, encloser string) proof {
	p := z.proveNotItself(name, encloser)
	if z.zsk != nil {
		p.cover("*." + strings.TrimPrefix(p.encloser(encloser), "."))
	}
	return p
}

// proveWildcard shows that a wildcard may answer for name: name itself does not exist. NSEC3 needs only the next
// closer name covered, since the signature tells the closest encloser (RFC 5155 section 7.2.6).
func (z *zone) proveWildcard(name, encloser string) proof {
	p := proof{z: z}
	if z.zsk == nil {
		return p
	}
	if z.denial.hashed {
		p.cover(nextCloser(name, encloser))
	} else {
		p.cover(name)
	}
	return p
}

// proveWildcardNoData shows that the wildcard that answers for name lacks the type asked for.
func (z *zone) proveWildcardNoData(name, encloser string) proof {
	p := z.proveNotItself(name, encloser)
	if z.zsk != nil {
		p.cover("*." + strings.TrimPrefix(encloser, "."))
	}
	return p
}

func (z *zone) proveNotItself(name, encloser string) proof {
	p := proof{z: z}
	switch {
	case z.zsk == nil:
	case z.denial.hashed:
		p.closestEncloser(name, encloser)
	default:
		p.cover(name)
	}
	return p
}

// A proof is a set of NSEC or NSEC3 records.
type proof struct {
	z   *zone
	rrs []dns.RR
}

// cover adds the record that covers name or matches it.
func (p *proof) cover(name string) {
	rr, _ := p.z.denial.at(name)
	p.add(rr)
}

// closestEncloser adds the closest encloser proof of RFC 5155 section 7.2.1.
func (p *proof) closestEncloser(name, encloser string) {
	encloser = p.encloser(encloser)
	p.cover(encloser)
	p.cover(nextCloser(name, encloser))
}

// encloser returns the closest name at or above the given one that has a record of its own: the closest
// encloser, or with opt-out the closest provable one.
func (p *proof) encloser(name string) string {
	for p.z.denial.hashed && name != p.z.name {
		if _, ok := p.z.denial.at(name); ok {
			break
		}
		name = parentName(name)
	}
	return name
}

func (p *proof) add(rr dns.RR) {
	if !slices.Contains(p.rrs, rr) {
		p.rrs = append(p.rrs, rr)
	}
}

// nextCloser returns the name one label longer than encloser on the way to name.
func nextCloser(name, encloser string) string {
	for {
		up := parentName(name)
		if up == encloser {
			return name
		}
		name = up
	}
}

func (z *zone) negativeTTL() uint32 {
	soa := z.records[key{z.name, dns.TypeSOA}][0].(*dns.SOA)
	return min(soa.Hdr.Ttl, soa.Minttl) // RFC 2308 section 5, RFC 9077
}
