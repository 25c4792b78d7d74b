package siminternet

import (
	"slices"
	"strings"

	"github.com/miekg/dns"
)

// A result is the content of a response: the sections and the bits that the zone data decides.
type result struct {
	rcode             int
	authoritative     bool
	answer, ns, extra []dns.RR
}

// maxChain bounds the aliases followed inside one zone.
const maxChain = 12

// answer looks a question up in the zones of one server, as RFC 1034 section 4.3.2 with its successors says.
func answer(zones []*zone, q dns.Question, do bool) result {
	name := canonical(q.Name)
	z := choose(zones, name, q.Qtype)
	if z == nil {
		return result{rcode: dns.RcodeRefused}
	}
	r := &responder{z: z, do: do, qtype: q.Qtype, asked: q.Name, result: result{authoritative: true}}
	for range maxChain {
		next := r.step(name)
		if next == "" || !dns.IsSubDomain(z.name, next) {
			break // what lies outside the zone is for the resolver to ask
		}
		name = next
	}
	return r.result
}

// choose returns the deepest zone that holds name. A DS RRset belongs to the parent, if this server has it.
func choose(zones []*zone, name string, qtype uint16) *zone {
	var apex *zone
	for _, z := range zones {
		switch {
		case !dns.IsSubDomain(z.name, name):
		case z.name == name && qtype == dns.TypeDS && name != ".":
			apex = z
		default:
			return z
		}
	}
	return apex
}

type responder struct {
	result
	z     *zone
	do    bool
	qtype uint16
	asked string // the query name in the spelling of the query
}

// step answers for one name and returns the alias to follow, or "".
func (r *responder) step(name string) (next string) {
	z := r.z

	// From the apex down: a delegation or a DNAME above the name ends the search.
	ancestors := []string{}
	for n := name; n != z.name; n = parentName(n) {
		ancestors = append(ancestors, n)
	}
	ancestors = append(ancestors, z.name)
	encloser := ""
	for _, n := range slices.Backward(ancestors) {
		node := z.nodes[n]
		if node == nil {
			break
		}
		encloser = n
		if node.cut && !(n == name && r.qtype == dns.TypeDS) {
			r.refer(node)
			return ""
		}
		if dname := node.rrsets[dns.TypeDNAME]; dname != nil && n != name {
			return r.substitute(name, n, dname)
		}
	}

	if encloser == name {
		return r.fromNode(name, z.nodes[name], nil, func() proof { return z.proveNoData(name) })
	}
	if wildcard := z.nodes["*."+strings.TrimPrefix(encloser, ".")]; wildcard != nil {
		shown := z.proveWildcard(name, encloser)
		return r.fromNode(name, wildcard, shown.rrs, func() proof { return z.proveWildcardNoData(name, encloser) })
	}
	r.rcode = dns.RcodeNameError
	r.deny(name, z.proveNoName(name, encloser))
	return ""
}

// fromNode answers from the RRsets of a node, which is that of the name or a wildcard. shown are the denial
// records that a positive answer needs; noData makes the proof of a negative one.
func (r *responder) fromNode(name string, n *node, shown []dns.RR, noData func() proof) (next string) {
	cname := n.rrsets[dns.TypeCNAME]
	switch {
	case r.qtype == dns.TypeANY && len(n.rrsets) > 0:
		for _, t := range n.types() {
			r.put(&r.answer, name, n.rrsets[t])
		}
	case cname != nil && r.qtype != dns.TypeCNAME && r.qtype != dns.TypeNSEC && r.qtype != dns.TypeRRSIG:
		r.put(&r.answer, name, cname)
		next = canonical(cname[0].(*dns.CNAME).Target)
	case r.qtype == dns.TypeNSEC && r.z.zsk != nil && !r.z.denial.hashed && len(n.rrsets) > 0:
		rr, _ := r.z.denial.at(n.name)
		r.put(&r.answer, name, []dns.RR{rr})
	case r.qtype == dns.TypeRRSIG && r.z.zsk != nil && len(n.rrsets) > 0:
		for _, t := range n.types() {
			if sig := r.signature(n.rrsets[t], n); sig != nil {
				sig.Hdr.Name = r.spell(name)
				r.answer = append(r.answer, sig)
			}
		}
	case n.rrsets[r.qtype] != nil:
		r.put(&r.answer, name, n.rrsets[r.qtype])
		for _, rr := range r.z.addresses(n.rrsets[r.qtype]) {
			r.extra = append(r.extra, dns.Copy(rr))
		}
	default:
		r.deny(name, noData())
		return ""
	}
	if r.do && r.z.faultAt(name)&NoDenial == 0 {
		r.putDenial(shown)
	}
	return next
}

// substitute answers by a DNAME: the record, and the CNAME it makes (RFC 6672 section 3.1), unsigned.
func (r *responder) substitute(name, owner string, dname []dns.RR) (next string) {
	r.put(&r.answer, owner, dname)
	target := canonical(dname[0].(*dns.DNAME).Target)
	prefix := strings.TrimSuffix(name, strings.TrimPrefix(owner, "."))
	next = prefix + strings.TrimPrefix(target, ".")
	if labels, ok := dns.IsDomainName(next); !ok || labels == 0 {
		r.rcode = dns.RcodeYXDomain
		return ""
	}
	r.answer = append(r.answer, &dns.CNAME{
		Hdr:    dns.RR_Header{Name: r.spell(name), Rrtype: dns.TypeCNAME, Class: dns.ClassINET, Ttl: dname[0].Header().Ttl},
		Target: next,
	})
	return next
}

// refer answers by a delegation: NS, DS or the proof that there is none, glue.
func (r *responder) refer(cut *node) {
	r.authoritative = len(r.answer) > 0 // an alias before it was answered with authority
	ns := cut.rrsets[dns.TypeNS]
	for _, rr := range ns {
		r.ns = append(r.ns, dns.Copy(rr))
	}
	if r.do {
		if ds := cut.rrsets[dns.TypeDS]; ds != nil {
			r.put(&r.ns, cut.name, ds)
		} else if r.z.faultAt(cut.name)&NoDenial == 0 {
			r.putDenial(r.z.proveNoData(cut.name).rrs)
		}
	}
	for _, rr := range r.z.addresses(ns) {
		if r.z.noSiblingGlue[cut.name] && !dns.IsSubDomain(cut.name, canonical(rr.Header().Name)) {
			continue
		}
		r.extra = append(r.extra, dns.Copy(rr))
	}
}

// deny completes a negative answer: the SOA record, whose TTL says how long to believe it, and the proof.
func (r *responder) deny(name string, p proof) {
	soa := dns.Copy(r.z.soa).(*dns.SOA)
	soa.Hdr.Ttl = r.z.negativeTTL()
	r.ns = append(r.ns, soa)
	if !r.do {
		return
	}
	if sig := r.z.rrsig([]dns.RR{r.z.soa}); sig != nil {
		sig.Hdr.Ttl = soa.Hdr.Ttl
		r.ns = append(r.ns, sig)
	}
	if r.z.faultAt(name)&NoDenial == 0 {
		r.putDenial(p.rrs)
	}
}

func (r *responder) putDenial(rrs []dns.RR) {
	for _, rr := range rrs {
		there := slices.ContainsFunc(r.ns, func(o dns.RR) bool {
			return o.Header().Rrtype == rr.Header().Rrtype && o.Header().Name == rr.Header().Name
		})
		if !there {
			r.put(&r.ns, rr.Header().Name, []dns.RR{rr})
		}
	}
}

// put appends an RRset under the given owner name (another than its own if it is a wildcard's), with its
// signature when the query wants it.
func (r *responder) put(section *[]dns.RR, owner string, rrs []dns.RR) {
	owner = r.spell(owner)
	for _, rr := range rrs {
		rr = dns.Copy(rr)
		rr.Header().Name = owner
		*section = append(*section, rr)
	}
	if !r.do {
		return
	}
	if sig := r.signature(rrs, r.z.nodes[canonical(rrs[0].Header().Name)]); sig != nil {
		sig.Hdr.Name = owner
		*section = append(*section, sig)
	}
}

// signature returns the signature of an RRset at n (nil for an NSEC3 record); delegations have none.
func (r *responder) signature(rrs []dns.RR, n *node) *dns.RRSIG {
	t := rrs[0].Header().Rrtype
	if n != nil && n.cut && t != dns.TypeDS && t != dns.TypeNSEC {
		return nil
	}
	return r.z.rrsig(rrs)
}

// spell returns name in the spelling of the query, as servers do that compress names: a resolver that varies
// the case of its queries (0x20) gets it back.
func (r *responder) spell(name string) string {
	if strings.EqualFold(name, r.asked) {
		return r.asked
	}
	return name
}
