package siminternet

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// A checker is a plain validating resolver, written to check the servers and not to be one: it asks everything
// anew, trusts only the anchor, and shares no code with the package but the comparison of results.
type checker struct {
	t       *testing.T
	now     time.Time
	hints   []netip.Addr
	anchor  []dns.RR
	ask     func(server netip.Addr, tr Transport, m *dns.Msg) (*dns.Msg, error)
	trusted map[string]*trust // zones reached
}

// trust is what the checker knows of a zone: its servers, and keys if it is secure.
type trust struct {
	zone  string
	addrs []netip.Addr
	keys  []*dns.DNSKEY // nil: insecure
	bogus error
}

type outcomeOf struct {
	rcode  int
	answer []dns.RR
	status Status
	why    error
}

// resolve answers a question from the root, following aliases.
func (c *checker) resolve(name string, qtype uint16) outcomeOf {
	var out outcomeOf
	for range 12 {
		m, zone := c.iterate(name, qtype)
		if m == nil {
			out.rcode, out.status, out.why = dns.RcodeServerFailure, Bogus, fmt.Errorf("no answer from %v for %s", zone.addrs, name)
			return out
		}
		status, err := c.judge(zone, m, name, qtype)
		if status > out.status {
			out.status, out.why = status, err
		}
		out.rcode = m.Rcode
		out.answer = append(out.answer, m.Answer...)
		last := lastName(m, name, qtype)
		if last == "" || sameName(last, name) || m.Rcode != dns.RcodeSuccess || dns.IsSubDomain(zone.zone, last) && hasType(m.Ns, dns.TypeSOA) {
			return out
		}
		name = last
	}
	out.why = fmt.Errorf("too many aliases")
	return out
}

// lastName follows the aliases of an answer; it returns "" if the last name has the type asked for.
func lastName(m *dns.Msg, name string, qtype uint16) string {
	for range 20 {
		next := ""
		for _, rr := range m.Answer {
			if !sameName(rr.Header().Name, name) {
				continue
			}
			if rr.Header().Rrtype == qtype {
				return ""
			}
			if cname, ok := rr.(*dns.CNAME); ok {
				next = cname.Target
			}
		}
		if next == "" {
			return name
		}
		name = next
	}
	return name
}

// iterate follows referrals to the final response and the zone of its servers.
func (c *checker) iterate(name string, qtype uint16) (*dns.Msg, *trust) {
	zone := c.root()
	for range 20 {
		m := c.query(zone.addrs, name, qtype)
		if m == nil {
			return nil, zone
		}
		if !m.Authoritative && m.Rcode == dns.RcodeSuccess && hasType(m.Ns, dns.TypeNS) {
			zone = c.child(zone, m)
			continue
		}
		return m, zone
	}
	return nil, zone
}

func (c *checker) root() *trust {
	if z := c.trusted["."]; z != nil {
		return z
	}
	z := &trust{zone: ".", addrs: c.hints}
	c.trusted["."] = z
	c.fetchKeys(z, c.anchor)
	return z
}

// child makes the trust of a delegated zone out of the referral to it.
func (c *checker) child(parent *trust, m *dns.Msg) *trust {
	z := &trust{}
	var names []string
	for _, rr := range m.Ns {
		if ns, ok := rr.(*dns.NS); ok {
			z.zone = canonical(ns.Hdr.Name)
			names = append(names, ns.Ns)
		}
	}
	if known := c.trusted[z.zone]; known != nil {
		return known
	}
	c.trusted[z.zone] = z
	if !dns.IsSubDomain(parent.zone, z.zone) || z.zone == parent.zone {
		c.t.Errorf("%s refers to %s, which is not below it", parent.zone, z.zone)
	}
	for _, n := range names {
		for _, rr := range m.Extra {
			if a, ok := rr.(*dns.A); ok && sameName(a.Hdr.Name, n) {
				addr, _ := netip.AddrFromSlice(a.A.To4())
				z.addrs = append(z.addrs, addr)
			}
		}
	}
	if len(z.addrs) == 0 {
		for _, n := range names {
			for _, rr := range c.resolve(n, dns.TypeA).answer {
				if a, ok := rr.(*dns.A); ok {
					addr, _ := netip.AddrFromSlice(a.A.To4())
					z.addrs = append(z.addrs, addr)
				}
			}
		}
	}
	c.secureChild(parent, z, m.Ns)
	return z
}

// secureChild settles whether child is secure by the DS records, or the proof of their absence, in section.
func (c *checker) secureChild(parent, child *trust, section []dns.RR) {
	if parent.bogus != nil || parent.keys == nil {
		child.bogus = parent.bogus
		return
	}
	ds, err := c.delegationSigner(parent, child.zone, section)
	if err != nil {
		child.bogus = err
	} else if len(ds) > 0 {
		c.fetchKeys(child, ds)
	}
}

// delegationSigner returns the DS records of a child that can be used, or none if it is proven insecure.
func (c *checker) delegationSigner(parent *trust, child string, section []dns.RR) ([]dns.RR, error) {
	ds := rrset(section, child, dns.TypeDS)
	if len(ds) == 0 {
		e, err := c.evidence(parent, section)
		if err == nil {
			_, err = e.noData(child, dns.TypeDS)
		}
		if err != nil {
			return nil, fmt.Errorf("no DS for %s: %w", child, err)
		}
		return nil, nil
	}
	if _, err := c.verify(parent, ds, section); err != nil {
		return nil, fmt.Errorf("DS of %s: %w", child, err)
	}
	return slices.DeleteFunc(ds, func(rr dns.RR) bool { return rr.(*dns.DS).Algorithm > 16 }), nil
}

func (c *checker) fetchKeys(z *trust, ds []dns.RR) {
	m := c.query(z.addrs, z.zone, dns.TypeDNSKEY)
	if m == nil {
		z.bogus = fmt.Errorf("no DNSKEY for %s", z.zone)
		return
	}
	set := rrset(m.Answer, z.zone, dns.TypeDNSKEY)
	for _, rr := range ds {
		want, ok := rr.(*dns.DS)
		if !ok {
			continue
		}
		for _, rr := range set {
			k := rr.(*dns.DNSKEY)
			if k.KeyTag() != want.KeyTag || k.Algorithm != want.Algorithm || !strings.EqualFold(k.ToDS(want.DigestType).Digest, want.Digest) {
				continue
			}
			if _, err := c.verify(&trust{zone: z.zone, keys: []*dns.DNSKEY{k}}, set, m.Answer); err != nil {
				z.bogus = fmt.Errorf("DNSKEY of %s: %w", z.zone, err)
				return
			}
			for _, rr := range set {
				z.keys = append(z.keys, rr.(*dns.DNSKEY))
			}
			return
		}
	}
	z.bogus = fmt.Errorf("no key of %s matches its DS", z.zone)
}

// judge settles the status of a final response from servers of zone.
func (c *checker) judge(zone *trust, m *dns.Msg, name string, qtype uint16) (Status, error) {
	// Servers of a zone may serve zones below it: then the cut between them was never seen.
	signer := ""
	for _, rr := range slices.Concat(m.Answer, m.Ns) {
		if sig, ok := rr.(*dns.RRSIG); ok {
			signer = canonical(sig.SignerName)
			break
		}
	}
	if zone.keys != nil && zone.bogus == nil && signer != zone.zone {
		until := signer
		if signer == "" {
			until = name
		}
		zone = c.descend(zone, until)
	}
	switch {
	case zone.bogus != nil:
		return Bogus, zone.bogus
	case zone.keys == nil:
		return Insecure, nil
	}

	e, err := c.evidence(zone, m.Ns)
	if err != nil {
		return Bogus, err
	}
	status := Secure
	for _, set := range rrsets(m.Answer) {
		h := set[0].Header()
		if h.Rrtype == dns.TypeCNAME && madeByDNAME(set[0].(*dns.CNAME), m.Answer) {
			continue
		}
		labels, err := c.verify(zone, set, m.Answer)
		if err != nil {
			return Bogus, err
		}
		if labels < dns.CountLabel(h.Name) && !strings.HasPrefix(h.Name, "*.") {
			optOut, err := e.wildcardMayAnswer(h.Name, labels)
			if err != nil {
				return Bogus, err
			}
			if optOut {
				status = Insecure
			}
		}
	}
	last := lastName(m, name, qtype)
	if last == "" || !dns.IsSubDomain(zone.zone, last) {
		return status, nil
	}
	if !sameName(last, name) && !hasType(m.Ns, dns.TypeSOA) {
		return status, nil // the alias leads into another zone of this name space
	}
	soa := slices.IndexFunc(m.Ns, func(rr dns.RR) bool { return rr.Header().Rrtype == dns.TypeSOA })
	if soa < 0 {
		return Bogus, fmt.Errorf("negative answer without SOA")
	}
	if _, err := c.verify(zone, m.Ns[soa:soa+1], m.Ns); err != nil {
		return Bogus, err
	}
	var optOut bool
	if m.Rcode == dns.RcodeNameError {
		optOut, err = e.noName(last)
	} else {
		optOut, err = e.noData(last, qtype)
	}
	if err != nil {
		return Bogus, err
	}
	if optOut {
		status = Insecure
	}
	return status, nil
}

// descend finds the zone cuts between zone and name on the servers of zone, by asking for DS.
func (c *checker) descend(zone *trust, name string) *trust {
	for n := range dns.CountLabel(name) {
		labels := dns.SplitDomainName(name)
		at := canonical(strings.Join(labels[len(labels)-1-n:], "."))
		if at == zone.zone || !dns.IsSubDomain(zone.zone, at) {
			continue
		}
		m := c.query(zone.addrs, at, dns.TypeDS)
		if m == nil {
			continue
		}
		if rrset(m.Answer, at, dns.TypeDS) != nil {
			child := &trust{zone: at, addrs: zone.addrs}
			c.secureChild(zone, child, m.Answer)
			zone = child
			continue
		}
		e, err := c.evidence(zone, m.Ns)
		if err != nil {
			return &trust{zone: at, bogus: err}
		}
		if e.delegates(at) {
			return &trust{zone: at, addrs: zone.addrs}
		}
	}
	return zone
}

// verify checks the signature of an RRset, and returns its labels field.
func (c *checker) verify(zone *trust, set, section []dns.RR) (labels int, err error) {
	h := set[0].Header()
	err = fmt.Errorf("%s %s: no signature", h.Name, dns.Type(h.Rrtype))
	for _, rr := range section {
		sig, ok := rr.(*dns.RRSIG)
		if !ok || sig.TypeCovered != h.Rrtype || !sameName(sig.Hdr.Name, h.Name) {
			continue
		}
		if sig.Hdr.Ttl != h.Ttl {
			c.t.Errorf("%s %s: TTL %d, its signature %d", h.Name, dns.Type(h.Rrtype), h.Ttl, sig.Hdr.Ttl)
		}
		for _, k := range zone.keys {
			if k.KeyTag() != sig.KeyTag {
				continue
			}
			err = sig.Verify(k, set)
			if err == nil && !sig.ValidityPeriod(c.now) {
				err = fmt.Errorf("%s %s: signature not valid at %v", h.Name, dns.Type(h.Rrtype), c.now)
			}
			if err == nil {
				return int(sig.Labels), nil
			}
		}
	}
	return 0, err
}

// evidence is the verified NSEC and NSEC3 records of a response.
type evidence struct {
	zone  string
	nsec  []*dns.NSEC
	nsec3 []*dns.NSEC3
}

func (c *checker) evidence(zone *trust, section []dns.RR) (e evidence, err error) {
	e.zone = zone.zone
	for _, rr := range section {
		switch rr := rr.(type) {
		case *dns.NSEC:
			e.nsec = append(e.nsec, rr)
		case *dns.NSEC3:
			e.nsec3 = append(e.nsec3, rr)
		default:
			continue
		}
		if _, err := c.verify(zone, []dns.RR{rr}, section); err != nil {
			return e, err
		}
	}
	return e, nil
}

// matching returns the types at name, if a record matches it.
func (e evidence) matching(name string) (types []uint16, ok bool) {
	for _, r := range e.nsec {
		if sameName(r.Hdr.Name, name) {
			return r.TypeBitMap, true
		}
	}
	for _, r := range e.nsec3 {
		if r.Match(name) {
			return r.TypeBitMap, true
		}
	}
	return nil, false
}

func (e evidence) covered(name string) (ok, optOut bool) {
	for _, r := range e.nsec {
		if nsecCovers(r, name) {
			return true, false
		}
	}
	for _, r := range e.nsec3 {
		if r.Cover(name) {
			return true, r.Flags&1 != 0
		}
	}
	return false, false
}

func nsecCovers(r *dns.NSEC, name string) bool {
	after := compareNames(r.Hdr.Name, name) < 0
	before := compareNames(name, r.NextDomain) < 0
	if compareNames(r.Hdr.Name, r.NextDomain) < 0 {
		return after && before
	}
	return after // the last record points back to the apex
}

// compareNames is RFC 4034 section 6.1 for names without escapes.
func compareNames(a, b string) int {
	la, lb := dns.SplitDomainName(strings.ToLower(a)), dns.SplitDomainName(strings.ToLower(b))
	slices.Reverse(la)
	slices.Reverse(lb)
	return slices.CompareFunc(la, lb, cmp.Compare[string])
}

// encloser returns the closest encloser of a name that does not exist, as proven.
func (e evidence) encloser(name string) (encloser string, optOut bool, err error) {
	if len(e.nsec) > 0 {
		for _, r := range e.nsec {
			if nsecCovers(r, name) {
				n := max(dns.CompareDomainName(r.Hdr.Name, name), dns.CompareDomainName(r.NextDomain, name))
				return lastLabels(name, n), false, nil
			}
		}
		return "", false, fmt.Errorf("no NSEC covers %s", name)
	}
	for n := dns.CountLabel(name) - 1; n >= dns.CountLabel(e.zone); n-- {
		if _, ok := e.matching(lastLabels(name, n)); ok {
			covered, optOut := e.covered(lastLabels(name, n+1))
			if !covered {
				return "", false, fmt.Errorf("no NSEC3 covers %s", lastLabels(name, n+1))
			}
			return lastLabels(name, n), optOut, nil
		}
	}
	return "", false, fmt.Errorf("no NSEC3 matches an encloser of %s", name)
}

func (e evidence) noName(name string) (optOut bool, err error) {
	if _, ok := e.matching(name); ok {
		return false, fmt.Errorf("%s exists", name)
	}
	encloser, optOut, err := e.encloser(name)
	if err != nil {
		return false, err
	}
	wildcard := "*." + strings.TrimPrefix(encloser, ".")
	if ok, _ := e.covered(wildcard); !ok {
		return false, fmt.Errorf("%s is not denied", wildcard)
	}
	return optOut, nil
}

func (e evidence) noData(name string, qtype uint16) (optOut bool, err error) {
	lacks := func(types []uint16) error {
		if slices.Contains(types, qtype) || slices.Contains(types, dns.TypeCNAME) {
			return fmt.Errorf("%s has %s or CNAME", name, dns.Type(qtype))
		}
		return nil
	}
	if types, ok := e.matching(name); ok {
		return false, lacks(types)
	}
	for _, r := range e.nsec {
		if nsecCovers(r, name) && dns.IsSubDomain(name, canonical(r.NextDomain)) {
			return false, nil // an empty non-terminal
		}
	}
	encloser, optOut, err := e.encloser(name)
	if err != nil {
		return false, err
	}
	if types, ok := e.matching("*." + strings.TrimPrefix(encloser, ".")); ok {
		return optOut, lacks(types)
	}
	if qtype == dns.TypeDS && optOut {
		return true, nil
	}
	return false, fmt.Errorf("nothing denies %s %s", name, dns.Type(qtype))
}

func (e evidence) wildcardMayAnswer(name string, labels int) (optOut bool, err error) {
	at := name
	if len(e.nsec3) > 0 {
		at = lastLabels(name, labels+1)
	}
	ok, optOut := e.covered(at)
	if !ok {
		return false, fmt.Errorf("wildcard answer, but nothing says that %s does not exist", at)
	}
	return optOut, nil
}

// delegates reports whether the evidence shows an insecure delegation at name.
func (e evidence) delegates(name string) bool {
	if types, ok := e.matching(name); ok {
		return slices.Contains(types, dns.TypeNS) && !slices.Contains(types, dns.TypeSOA)
	}
	_, optOut := e.covered(name)
	return optOut
}

// query asks servers in turn, as a resolver does: over TCP if truncated, without EDNS if they cannot, with
// their cookie if they want it.
func (c *checker) query(addrs []netip.Addr, name string, qtype uint16) *dns.Msg {
	for _, addr := range addrs {
		m := new(dns.Msg).SetQuestion(dns.Fqdn(name), qtype)
		m.RecursionDesired = false
		m.SetEdns0(1232, true)
		m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0011223344556677"}}
		tr := UDP
		for range 4 {
			r, err := c.ask(addr, tr, m)
			switch {
			case err != nil:
				if tr == TCP {
					c.t.Errorf("%v over TCP: %v", addr, err)
				}
			case r.Rcode == dns.RcodeFormatError && m.IsEdns0() != nil:
				m.Extra = nil
				continue
			case r.Rcode == dns.RcodeBadCookie:
				m.IsEdns0().Option = r.IsEdns0().Option
				continue
			case r.Truncated:
				tr = TCP
				continue
			case r.Rcode == dns.RcodeSuccess || r.Rcode == dns.RcodeNameError:
				return r
			}
			break
		}
	}
	return nil
}

func madeByDNAME(cname *dns.CNAME, section []dns.RR) bool {
	for _, rr := range section {
		d, ok := rr.(*dns.DNAME)
		if ok && dns.IsSubDomain(d.Hdr.Name, cname.Hdr.Name) && !sameName(d.Hdr.Name, cname.Hdr.Name) {
			prefix := strings.TrimSuffix(strings.ToLower(cname.Hdr.Name), strings.ToLower(d.Hdr.Name))
			return sameName(prefix+d.Target, cname.Target)
		}
	}
	return false
}

func rrset(section []dns.RR, name string, t uint16) (set []dns.RR) {
	for _, rr := range section {
		if rr.Header().Rrtype == t && sameName(rr.Header().Name, name) {
			set = append(set, rr)
		}
	}
	return set
}

func rrsets(section []dns.RR) (sets [][]dns.RR) {
	for i, rr := range section {
		h := rr.Header()
		if h.Rrtype != dns.TypeRRSIG && rrset(section[:i], h.Name, h.Rrtype) == nil {
			sets = append(sets, rrset(section, h.Name, h.Rrtype))
		}
	}
	return sets
}

func hasType(section []dns.RR, t uint16) bool {
	return slices.ContainsFunc(section, func(rr dns.RR) bool { return rr.Header().Rrtype == t })
}

func sameName(a, b string) bool { return strings.EqualFold(a, b) }

func lastLabels(name string, n int) string {
	labels := dns.SplitDomainName(name)
	return dns.Fqdn(strings.Join(labels[len(labels)-n:], "."))
}
