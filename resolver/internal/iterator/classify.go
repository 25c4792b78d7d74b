package iterator

import (
	"slices"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// A kind is what a response means for the question it answers.
type kind uint8

const (
	// kindAnswer: the chain ends in data of the type asked.
	kindAnswer kind = iota
	// kindAlias: the chain ends in an alias; its target is to be asked for where it belongs.
	kindAlias
	// kindNoData, kindNXDomain: the last name has no data of the type, or does not exist.
	kindNoData
	kindNXDomain
	// kindYXDomain: a DNAME makes a name that is too long (RFC 6672 section 2.2).
	kindYXDomain
	// kindReferral: ask the servers of child.
	kindReferral
	// kindEmpty: neither data nor a SOA record nor a referral. It may be a NODATA answer of a server that
	// knows no better (RFC 2308 section 2.2 type 3), so it is believed when no server says more.
	kindEmpty
	// kindLame: the server does not serve the zone, for the reason in why.
	kindLame
	// kindFailed: the server could not answer this question, for the reason in why; the zone may be fine.
	kindFailed
)

var kindNames = [...]string{"answer", "alias", "NODATA", "NXDOMAIN", "YXDOMAIN", "referral", "empty", "lame", "failed"}

func (k kind) String() string { return kindNames[k] }

// A response is a message reduced to what may be believed of it, given who sent it. Everything outside the
// zone asked, and everything that the question did not call for, is gone.
type response struct {
	kind  kind
	why   string // for kindLame and kindFailed, in words
	rcode uint16
	// weak says that the server did not claim authority, though it should: used when nobody does better.
	weak bool
	// proven says that the denial comes with NSEC or NSEC3 records of the zone that are signed, by nobody verified.
	proven bool
	// local says that it comes from the local copy of the root.
	local bool
	// bare marks a NODATA answer that has no SOA record, from a server of authority, which no other contradicts.
	bare bool

	// chain holds aliases in their order, each DNAME before the CNAME it makes, then the data.
	chain []query.RRset
	last  dnsname.Name // the name the outcome is about
	soa   *query.RRset // of a negative answer; nil: missing
	proof []query.RRset

	// subnet is the client subnet that the answer holds for; zero: everybody.
	subnet query.Subnet

	// Of a referral; proof then holds the denial of DS.
	child dnsname.Name
	ns    query.RRset
	ds    *query.RRset
	glue  []query.RRset // of the priming answer too
}

// maxAliases is how many aliases one question may follow, in one response and in all.
const maxAliases = 11

// classify reads a response to (name, typ), sent by a server of zone, or by a forwarder for all at or below
// zone.
func classify(m *query.Message, zone, name dnsname.Name, typ uint16, forwarder bool) response {
	r := response{rcode: m.RCode, last: name, weak: !m.Header.AA() && !forwarder}
	switch m.RCode {
	case dnswire.RCodeNoError, dnswire.RCodeNXDomain, dnswire.RCodeYXDomain:
	case dnswire.RCodeRefused, 9, 10: // NOTAUTH, NOTZONE
		r.kind, r.why = kindLame, dnswire.RCodeText(m.RCode)
		return r
	default:
		r.kind, r.why = kindFailed, dnswire.RCodeText(m.RCode)
		return r
	}
	done := r.follow(m, zone, typ, forwarder)
	r.keepProof(m, zone)
	if done {
		if zone == dnsname.Root && name == dnsname.Root && typ == dnswire.TypeNS && r.kind == kindAnswer {
			r.ns = r.chain[len(r.chain)-1]
			r.keepGlue(m)
		}
		return r
	}
	r.soa = findSOA(m, zone, r.last, typ)
	r.proven = slices.ContainsFunc(r.proof, func(s query.RRset) bool { return signedBy(&s, zone) })
	switch {
	case len(r.chain) > 0 && !(forwarder && r.soa != nil) && !(m.RCode == dnswire.RCodeNXDomain && (r.proven || !r.weak && r.soa != nil && signedBy(r.soa, zone))):
		// The response code belongs to the last name (RFC 6604 section 3), but the server need not know the
		// zone of that name, and NODATA may be said of the alias.
		r.kind = kindAlias
	case m.RCode == dnswire.RCodeNXDomain && (r.soa != nil || !r.weak || r.proven):
		r.kind = kindNXDomain
	case m.RCode != dnswire.RCodeNoError:
		r.kind, r.why = kindFailed, dnswire.RCodeText(m.RCode)+" without authority"
	case r.soa != nil:
		r.kind = kindNoData
	case forwarder:
		r.kind = kindEmpty
	default:
		r.refer(m, zone, typ)
		if r.kind == kindEmpty && r.proven {
			r.kind = kindNoData
		}
	}
	return r
}

// follow walks the aliases in the answer section from the name asked and reports whether that settles the
// matter.
//
// What a response has about the target of an alias need not be authoritative (RFC 2181 section 5.4.1): the
// target may lie below a cut, and the server may say what it once heard. So the target is asked for, unless
// signatures say that the zone's own data is at hand, or a forwarder has done all the asking.
func (r *response) follow(m *query.Message, zone dnsname.Name, typ uint16, forwarder bool) bool {
	believe := func(s *query.RRset) bool { return len(r.chain) == 0 || forwarder || signedBy(s, zone) }
	for hops := 0; ; hops++ {
		// A name outside the zone is asked for in its own zone, whatever this server says of it.
		if !r.last.IsWithin(zone) {
			r.kind = kindAlias
			return true
		}
		if hops > maxAliases || hops > 0 && r.owns(r.last) {
			r.kind = kindAlias // a chain too long, or a loop: whoever follows on will see
			return true
		}
		if d := findDNAME(m.Answer, zone, r.last); d != nil && typ != dnswire.TypeANY {
			if !believe(d) {
				r.kind = kindAlias
				return true
			}
			target := nameIn(dnswire.TypeDNAME, d.First())
			next, err := r.last.Replace(d.Name, target)
			if !has(r.chain, d) {
				r.chain = append(r.chain, one(*d))
			}
			if err != nil || target == "" {
				r.kind = kindYXDomain
				return true
			}
			r.chain = append(r.chain, synthesise(d, r.last, next))
			if typ == dnswire.TypeCNAME {
				r.kind = kindAnswer
				return true
			}
			r.last = next
			continue
		}
		if s := find(m.Answer, r.last, typ); s != nil {
			if !believe(s) {
				r.kind = kindAlias
				return true
			}
			r.chain = append(r.chain, *s)
			r.kind = kindAnswer
			return true
		}
		c := find(m.Answer, r.last, dnswire.TypeCNAME)
		if c == nil {
			return false
		}
		target := nameIn(dnswire.TypeCNAME, c.First())
		if target == "" {
			return false
		}
		if !believe(c) {
			r.kind = kindAlias
			return true
		}
		r.chain = append(r.chain, one(*c))
		r.last = target
	}
}

// signedBy reports whether a set comes with a signature that names zone as its signer. Nobody has verified it:
// it says where the data is from, not that it is true.
func signedBy(s *query.RRset, zone dnsname.Name) bool {
	for sig := range query.RDatas(s.Sigs) {
		if nameIn(dnswire.TypeRRSIG, sig) == zone {
			return true
		}
	}
	return false
}

// owns reports whether the chain has an alias at name.
func (r *response) owns(name dnsname.Name) bool {
	for i := range r.chain {
		if r.chain[i].Is(name, dnswire.TypeCNAME) {
			return true
		}
	}
	return false
}

func has(sets []query.RRset, s *query.RRset) bool {
	for i := range sets {
		if sets[i].Is(s.Name, s.Type) {
			return true
		}
	}
	return false
}

// one returns s with its first record alone: two CNAME records at a name are a protocol error, of which the
// first is followed.
func one(s query.RRset) query.RRset {
	if query.CountRData(s.Data) > 1 {
		s.Data = query.AppendRData(nil, s.First())
	}
	return s
}

// synthesise makes the CNAME that a DNAME stands for (RFC 6672 section 3.1). The server's own is not looked
// at: it carries no signature, so nothing would tell a forged one.
func synthesise(d *query.RRset, owner, target dnsname.Name) query.RRset {
	return query.RRset{
		Name: owner, Type: dnswire.TypeCNAME, Class: d.Class, TTL: d.TTL,
		Data: query.AppendRData(nil, []byte(target)),
	}
}

// find returns the RRset of a name and type in class IN. For type ANY it is the first at the name: an answer
// to ANY holds one RRset (RFC 8482 section 4.1).
func find(section []query.RRset, name dnsname.Name, typ uint16) *query.RRset {
	for i := range section {
		s := &section[i]
		if s.Name == name && s.Class == dnswire.ClassIN && (s.Type == typ || typ == dnswire.TypeANY && s.Type != dnswire.TypeRRSIG) {
			return s
		}
	}
	return nil
}

// findDNAME returns a DNAME of the zone at an ancestor of name.
func findDNAME(section []query.RRset, zone, name dnsname.Name) *query.RRset {
	for i := range section {
		s := &section[i]
		if s.Type == dnswire.TypeDNAME && s.Class == dnswire.ClassIN && name.Below(s.Name) && s.Name.IsWithin(zone) {
			return s
		}
	}
	return nil
}

// findSOA returns the SOA record that makes a negative answer about name believable.
func findSOA(m *query.Message, zone, name dnsname.Name, typ uint16) *query.RRset {
	for i := range m.Authority {
		s := &m.Authority[i]
		if s.Type != dnswire.TypeSOA || s.Class != dnswire.ClassIN || !s.Name.IsWithin(zone) || !name.IsWithin(s.Name) {
			continue
		}
		if typ == dnswire.TypeDS && s.Name == name && name != dnsname.Root {
			continue // the child speaks, of what its parent knows
		}
		return s
	}
	return nil
}

func (r *response) keepProof(m *query.Message, zone dnsname.Name) {
	for i := range m.Authority {
		s := &m.Authority[i]
		if (s.Type == dnswire.TypeNSEC || s.Type == dnswire.TypeNSEC3) && s.Class == dnswire.ClassIN && s.Name.IsWithin(zone) {
			r.proof = append(r.proof, *s)
		}
	}
}

// refer decides about a response without data and without SOA: a referral, if its authority section names
// exactly one zone strictly below the one asked and at or above the name. The AA bit says nothing: some
// servers set it in referrals.
func (r *response) refer(m *query.Message, zone dnsname.Name, typ uint16) {
	var ns *query.RRset
	elsewhere := false
	for i := range m.Authority {
		s := &m.Authority[i]
		switch {
		case s.Type != dnswire.TypeNS || s.Class != dnswire.ClassIN:
		case s.Name.Below(zone) && r.last.IsWithin(s.Name):
			if ns != nil {
				r.kind, r.why = kindLame, "referral to two zones at once"
				return
			}
			ns = s
		case s.Name == zone && !r.weak:
			// The zone's own NS records beside a NODATA answer.
		default:
			elsewhere = true
		}
	}
	switch {
	case elsewhere:
		r.kind, r.why = kindLame, "referral upwards or sideways"
	case ns == nil:
		r.kind = kindEmpty
	case typ == dnswire.TypeDS && ns.Name == r.last:
		// An old server, which knows nothing of DS, sends us to the child (RFC 4035 section 3.1.4.1 forbids it).
		r.kind = kindEmpty
	default:
		r.kind, r.child, r.ns = kindReferral, ns.Name, *ns
		r.ns.Data, r.ns.Sigs = first(ns.Data, maxNames), nil
		r.ds = find(m.Authority, ns.Name, dnswire.TypeDS)
		r.keepGlue(m)
	}
}

// first returns the first n records of an RRset's data.
func first(data []byte, n int) []byte {
	end := 0
	for d := range query.RDatas(data) {
		if n--; n < 0 {
			break
		}
		end += 2 + len(d)
	}
	return data[:end:end]
}

// keepGlue takes the addresses of the delegation's servers. Whether to believe one depends on whose name it
// is, which the caller judges.
func (r *response) keepGlue(m *query.Message) {
	for i := range m.Additional {
		s := &m.Additional[i]
		if s.Type != dnswire.TypeA && s.Type != dnswire.TypeAAAA || s.Class != dnswire.ClassIN {
			continue
		}
		for d := range query.RDatas(r.ns.Data) {
			if nameIn(dnswire.TypeNS, d) == s.Name {
				r.glue = append(r.glue, *s)
				break
			}
		}
	}
}

// nameIn returns the first name in RDATA, in canonical form, or "".
func nameIn(typ uint16, rdata []byte) dnsname.Name {
	n := dnswire.NameIn(typ, rdata, 0)
	if n == nil {
		return ""
	}
	b := make([]byte, len(n))
	dnsname.Fold(b, n)
	return dnsname.Name(b)
}
