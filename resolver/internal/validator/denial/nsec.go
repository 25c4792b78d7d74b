package denial

import (
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// An nsec is an NSEC record: between owner and next no name exists in the zone, save those above next.
type nsec struct {
	owner, next dnsname.Name
	types       bitmap
	set         int
}

// addNSEC takes the record of s, unless it is malformed or points out of the zone (CVE-2026-13321) or backwards.
func (p *Proof) addNSEC(s *query.RRset, set int) {
	if n, ok := parseNSEC(s, p.zone); ok {
		n.set = set
		p.nsec = append(p.nsec, n)
	}
}

// ReadNSEC returns the next name of a set's record, in canonical form, if New would let the record count. It looks
// neither at its status nor, beyond that, at its signatures.
func ReadNSEC(s *query.RRset, zone dnsname.Name) (next dnsname.Name, ok bool) {
	if s.Type != dnswire.TypeNSEC || !s.Name.IsWithin(zone) || !signedAsIs(s, zone) {
		return "", false
	}
	n, ok := parseNSEC(s, zone)
	return n.next, ok
}

func parseNSEC(s *query.RRset, zone dnsname.Name) (nsec, bool) {
	rdata := s.First()
	end := dnswire.PlainName(rdata, 0)
	if end < 0 || !bitmap(rdata[end:]).valid() {
		return nsec{}, false
	}
	var next [dnsname.MaxLen]byte
	dnsname.Fold(next[:], rdata[:end]) // signed as it was sent (RFC 6840 section 5.1), compared as a name
	n := nsec{owner: s.Name, next: dnsname.Name(next[:end]), types: bitmap(rdata[end:])}
	if !n.next.IsWithin(zone) || n.next != zone && dnsname.Compare(n.owner, n.next) >= 0 { // only the last points back, to the apex
		return nsec{}, false
	}
	return n, true
}

func (p *Proof) matchNSEC(name dnsname.Name) *nsec {
	for i := range p.nsec {
		if p.nsec[i].owner == name {
			return &p.nsec[i]
		}
	}
	return nil
}

// coverNSEC returns the record in whose gap name lies. A record at a delegation or a DNAME says nothing of names
// below, which are not the zone's (RFC 6840 section 4.1).
func (p *Proof) coverNSEC(name dnsname.Name) *nsec {
	for i := range p.nsec {
		n := &p.nsec[i]
		if n.covers(name, p.zone) && !(n.types.foreignBelow() && name.Below(n.owner)) {
			return n
		}
	}
	return nil
}

func (n *nsec) covers(name, zone dnsname.Name) bool {
	return dnsname.Compare(n.owner, name) < 0 && (n.next == zone || dnsname.Compare(name, n.next) < 0)
}

// encloser returns the closest encloser of name, which n covers: owner and next exist, and so does what is above
// them; anything closer to name would lie between them.
func (n *nsec) encloser(name dnsname.Name) dnsname.Name {
	return name.Suffix(max(dnsname.CommonLabels(name, n.owner), dnsname.CommonLabels(name, n.next)))
}

const (
	reasonExists    = "the name exists"
	reasonUncovered = "no record covers the name"
	reasonENT       = "the name exists as an empty non-terminal"
	reasonWildcard  = "a wildcard may stand for the name"
	reasonType      = "the type exists"
	reasonAlias     = "the name is an alias"
	reasonParent    = "the record is of the parent side of a zone cut"
	reasonApex      = "the record is of the child side of a zone cut"
)

func (p *Proof) nameErrorNSEC(name dnsname.Name) Result {
	if m := p.matchNSEC(name); m != nil {
		if m.types.has(typeNXNAME) { // RFC 9824 section 2: the zone says that the name is no name
			return proven("", m.set)
		}
		return bogus(EDEBogus, reasonExists)
	}
	c := p.coverNSEC(name)
	if c == nil {
		return bogus(EDENSECMissing, reasonUncovered)
	}
	if c.next.Below(name) {
		return bogus(EDEBogus, reasonENT)
	}
	encloser := c.encloser(name)
	wildcard := wildcardBelow(encloser)
	if p.matchNSEC(wildcard) != nil {
		return bogus(EDEBogus, reasonWildcard)
	}
	w := p.coverNSEC(wildcard)
	if w == nil {
		return bogus(EDENSECMissing, reasonWildcard)
	}
	if w.next.Below(wildcard) {
		return bogus(EDEBogus, reasonWildcard)
	}
	return proven(encloser, c.set, w.set)
}

func (p *Proof) noDataNSEC(name dnsname.Name, typ uint16) Result {
	if m := p.matchNSEC(name); m != nil {
		return m.lacks(typ, p.zone, proven("", m.set))
	}
	c := p.coverNSEC(name)
	if c == nil {
		return bogus(EDENSECMissing, reasonUncovered)
	}
	if c.next.Below(name) { // an empty non-terminal has no types
		return proven("", c.set)
	}
	encloser := c.encloser(name)
	wildcard := wildcardBelow(encloser)
	if m := p.matchNSEC(wildcard); m != nil {
		return m.lacks(typ, p.zone, proven(encloser, c.set, m.set))
	}
	if w := p.coverNSEC(wildcard); w != nil && w.next.Below(wildcard) {
		return proven(encloser, c.set, w.set) // an empty wildcard (RFC 4592 section 2.2.2)
	}
	return bogus(EDENSECMissing, "neither the name nor a wildcard is shown to exist")
}

// lacks returns r if n, whose owner answers the question, says that it has no data for it.
func (n *nsec) lacks(typ uint16, zone dnsname.Name, r Result) Result {
	if reason := n.types.lack(typ, n.owner, zone); reason != "" {
		return bogus(EDEBogus, reason)
	}
	return r
}

func (p *Proof) expansionNSEC(name dnsname.Name, labels int) Result {
	if p.matchNSEC(name) != nil {
		return bogus(EDEBogus, reasonExists)
	}
	c := p.coverNSEC(name)
	switch {
	case c == nil:
		return bogus(EDENSECMissing, reasonUncovered)
	case c.next.Below(name):
		return bogus(EDEBogus, reasonENT)
	}
	encloser := c.encloser(name)
	if encloser.Labels() != labels {
		return bogus(EDEBogus, "another name encloses the name than the wildcard's")
	}
	return proven(encloser, c.set)
}

func (p *Proof) delegationNSEC(name dnsname.Name) (Cut, Result) {
	if m := p.matchNSEC(name); m != nil {
		cut, reason := m.types.cut()
		if cut == Unproven {
			return cut, bogus(EDEBogus, reason)
		}
		return cut, proven("", m.set)
	}
	if c := p.coverNSEC(name); c != nil { // no such name, or an empty one: nothing is delegated by it
		return NoCut, proven("", c.set)
	}
	return Unproven, bogus(EDENSECMissing, reasonUncovered)
}

// wildcardBelow returns *.encloser. It fits, as a name below encloser has at least as many bytes.
func wildcardBelow(encloser dnsname.Name) dnsname.Name { return "\x01*" + encloser }
