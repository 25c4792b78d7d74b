package denial

import (
	"bytes"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// An nsec3 is an NSEC3 record: between Owner and Next no hash of a name in the zone lies.
type nsec3 struct {
	Hashed
	types bitmap
	set   int
}

// A Hashed is what one needs to know of an NSEC3 record to find it.
type Hashed struct {
	Owner, Next Hash
	OptOut      bool
	// Foreign: names below the owner are not the zone's to speak of; it is a delegation or a DNAME.
	Foreign bool
	Params  Params
}

// Params are what makes a chain of NSEC3 records; the hash is SHA-1 always. They are comparable.
type Params struct {
	iterations uint16
	salt       string
}

// Iterated reports whether a hash costs more than the cheapest.
func (p Params) Iterated() bool { return p.price() > 0 }

// Excessive reports whether the zone asks for more work than proofs are worth here.
func (p Params) Excessive() bool { return p.price() > MaxIterations }

// price returns what one hash costs beyond the cheapest, in SHA-1 blocks: the additional iterations, and for salts
// that need more than one block, that many times as much.
func (p Params) price() int {
	const padding = 9 // FIPS 180-4 section 5.1.1: a bit and a 64-bit length at least
	blocks := (hashLen + len(p.salt) + padding + 63) / 64
	return (int(p.iterations)+1)*blocks - 1
}

// weight returns how many hashes of the most iterations that count one hash costs as much as, at least one.
func (p Params) weight() int { return (p.price() + 1 + MaxIterations) / (MaxIterations + 1) }

// addNSEC3 takes the record of s, unless it is malformed, stands elsewhere than directly below the apex
// (CVE-2026-10723), or has a hash or flags that are not known (RFC 5155 sections 8.1 and 8.2).
func (p *Proof) addNSEC3(s *query.RRset, set int) {
	h, types, ok := parseNSEC3(s, p.zone)
	if !ok {
		return
	}
	if len(p.nsec3) == 0 {
		p.params = h.Params
	}
	p.mixed = p.mixed || h.Params != p.params
	p.nsec3 = append(p.nsec3, nsec3{h, types, set})
}

// ReadNSEC3 reads the record of a set, if New would let it count. It looks neither at its status nor, beyond that,
// at its signatures.
func ReadNSEC3(s *query.RRset, zone dnsname.Name) (Hashed, bool) {
	if s.Type != dnswire.TypeNSEC3 || !signedAsIs(s, zone) {
		return Hashed{}, false
	}
	h, _, ok := parseNSEC3(s, zone)
	return h, ok
}

func parseNSEC3(s *query.RRset, zone dnsname.Name) (h Hashed, types bitmap, ok bool) {
	if !ownerHash(s.Name, zone, &h.Owner) {
		return h, nil, false
	}
	const fixed = 5 // hash algorithm, flags, iterations, length of the salt
	rdata := s.First()
	if len(rdata) < fixed || rdata[0] != hashSHA1 || rdata[1]&^flagOptOut != 0 {
		return h, nil, false
	}
	h.OptOut = rdata[1]&flagOptOut != 0
	saltEnd := fixed + int(rdata[4])
	if len(rdata) < saltEnd+1+hashLen || rdata[saltEnd] != hashLen {
		return h, nil, false
	}
	h.Params = Params{dnswire.Uint16(rdata[2:]), string(rdata[fixed:saltEnd])}
	copy(h.Next[:], rdata[saltEnd+1:])
	types = bitmap(rdata[saltEnd+1+hashLen:])
	if !types.valid() {
		return h, nil, false
	}
	h.Foreign = types.foreignBelow()
	return h, types, true
}

// The hash algorithm and the flag of RFC 5155 section 11.
const (
	hashSHA1   = 1
	flagOptOut = 1
)

// covers reports whether h lies in the gap. The last record of a chain points to the first, and the only one of a
// chain to itself.
func (n *nsec3) covers(h *Hash) bool {
	after, before := bytes.Compare(h[:], n.Owner[:]) > 0, bytes.Compare(h[:], n.Next[:]) < 0
	if bytes.Compare(n.Owner[:], n.Next[:]) < 0 {
		return after && before
	}
	return after || before
}

// A place is what the records say of one name: at most one of match and cover is set.
type place struct{ match, cover *nsec3 }

func (p *Proof) place(name dnsname.Name) (pl place, err error) {
	h, err := p.hasher.Hash(name, p.params)
	if err != nil {
		return place{}, err
	}
	for i := range p.nsec3 {
		if p.nsec3[i].Owner == h {
			return place{match: &p.nsec3[i]}, nil
		}
	}
	for i := range p.nsec3 {
		if p.nsec3[i].covers(&h) {
			return place{cover: &p.nsec3[i]}, nil
		}
	}
	return place{}, nil
}

// An enclosure is the closest provable encloser of a name (RFC 5155 section 8.3), and what is said of the next
// closer name. If the name itself has a record, encloser is the name, and there is no next closer name.
type enclosure struct {
	encloser   dnsname.Name
	at         *nsec3
	nextCloser dnsname.Name
	cover      *nsec3
}

// enclose finds the closest encloser that a record matches. failed, if not nil, is the outcome in its stead.
func (p *Proof) enclose(name dnsname.Name) (e enclosure, failed *Result) {
	var below place
	for at := name; at.IsWithin(p.zone); at = at.Parent() {
		pl, err := p.place(at)
		if err != nil {
			return enclosure{}, limited(err)
		}
		if pl.match == nil {
			e.nextCloser, below = at, pl
			continue
		}
		e.encloser, e.at, e.cover = at, pl.match, below.cover
		switch {
		case at == name:
		case e.at.Foreign:
			return e, failure(EDEBogus, reasonParent)
		case e.cover == nil:
			return e, failure(EDENSECMissing, "no record covers the next closer name")
		}
		return e, nil
	}
	return e, failure(EDENSECMissing, "no record matches an encloser of the name")
}

// proven returns the outcome of a proof that rests on e, and on w beside it, if not nil.
func (e *enclosure) proven(w *nsec3) Result {
	r := proven(e.encloser, e.at.set)
	r.NextCloser = e.nextCloser
	r.covered(e.cover)
	if w != nil {
		r.use(w.set)
	}
	return r
}

// covered notes that the proof rests on c covering the next closer name.
func (r *Result) covered(c *nsec3) {
	r.use(c.set)
	if c.OptOut { // RFC 5155 section 9.2
		r.Status, r.OptOut, r.Reason = query.Insecure, true, "opt-out covers the name"
	}
}

func failure(ede uint16, reason string) *Result {
	r := bogus(ede, reason)
	return &r
}

func limited(err error) *Result {
	return &Result{Status: query.Bogus, EDE: query.NoEDE, Reason: "too many NSEC3 hashes", Err: err}
}

func (p *Proof) nameErrorNSEC3(name dnsname.Name) Result {
	e, failed := p.enclose(name)
	switch {
	case failed != nil:
		return *failed
	case e.encloser == name:
		return bogus(EDEBogus, reasonExists)
	}
	w, err := p.place(wildcardBelow(e.encloser))
	switch {
	case err != nil:
		return *limited(err)
	case w.match != nil:
		return bogus(EDEBogus, reasonWildcard)
	case w.cover == nil:
		return bogus(EDENSECMissing, reasonWildcard)
	}
	return e.proven(w.cover)
}

func (p *Proof) noDataNSEC3(name dnsname.Name, typ uint16) Result {
	e, failed := p.enclose(name)
	switch {
	case failed != nil:
		return *failed
	case e.encloser == name:
		if reason := e.at.types.lack(typ, name, p.zone); reason != "" {
			return bogus(EDEBogus, reason)
		}
		return proven("", e.at.set)
	}
	wildcard := wildcardBelow(e.encloser)
	w, err := p.place(wildcard)
	if err != nil {
		return *limited(err)
	}
	if w.match != nil {
		reason := w.match.types.lack(typ, wildcard, p.zone)
		if reason == "" {
			return e.proven(w.match)
		}
		if !e.cover.OptOut {
			return bogus(EDEBogus, reason)
		}
	}
	if e.cover.OptOut {
		// The name may be an insecure delegation, whose DS is asked for (RFC 5155 section 8.6), or stand below one
		// and be unsigned, or be an empty non-terminal above some (RFC 5155 section 7.1). A wildcard that has the
		// type, and whose record may be among these by chance, would not be asked then.
		return e.proven(nil)
	}
	return bogus(EDENSECMissing, "neither the name nor a wildcard is shown to exist")
}

func (p *Proof) expansionNSEC3(name dnsname.Name, labels int) Result {
	nextCloser := name.Suffix(labels + 1)
	pl, err := p.place(nextCloser)
	switch {
	case err != nil:
		return *limited(err)
	case pl.match != nil:
		return bogus(EDEBogus, "a name closer than the wildcard exists")
	case pl.cover == nil:
		return bogus(EDENSECMissing, "no record covers the next closer name")
	}
	r := proven(nextCloser.Parent())
	r.NextCloser = nextCloser
	r.covered(pl.cover)
	return r
}

func (p *Proof) delegationNSEC3(name dnsname.Name) (Cut, Result) {
	e, failed := p.enclose(name)
	switch {
	case failed != nil:
		return Unproven, *failed
	case e.encloser == name:
		cut, reason := e.at.types.cut()
		if cut == Unproven {
			return cut, bogus(EDEBogus, reason)
		}
		return cut, proven("", e.at.set)
	case e.cover.OptOut:
		return InsecureCut, e.proven(nil)
	}
	return NoCut, e.proven(nil)
}
