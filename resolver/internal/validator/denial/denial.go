// Package denial judges what NSEC and NSEC3 records prove: that a name, a type or a secure delegation does not
// exist, or that a wildcard was rightly expanded (RFC 4035 section 5.4, RFC 5155 section 8, both as clarified
// by RFC 6840 section 4, and RFC 9824 for compact denial).
//
// Its functions are pure: no I/O, no clock, no state but the hashes a Hasher remembers. What goes in are sets
// whose signatures somebody else has verified, and who says so with status Secure; sets of any other status,
// class or type are passed over. What a set must be to count is checked here all the same, from its own RRSIG
// records: signed by the zone, not made from a wildcard, one record, owner and next name inside the zone, for
// NSEC3 an owner directly below the apex, a known hash and known flags. Whatever fails that proves nothing.
//
// Every function is total on any bytes. The work is bounded: MaxNSEC and MaxNSEC3 records of one proof are
// looked at, and NSEC3 hashes are charged to the caller's budget by what they cost, MaxIterations and one being a
// unit. Zones that ask for more than MaxIterations prove nothing here (RFC 9276 section 3.2).
//
// The package does not decide what becomes of an answer: an RCODE is not signed, so it is the caller's business
// to ask the question (NameError, NoData, …) that fits the response.
package denial

import (
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/validator/rrsig"
)

// Limits of one proof (CVE-2023-50868).
const (
	// MaxNSEC3 is how many NSEC3 records are looked at; those behind are passed over. A proof needs three, and an
	// answer whose aliases stay in one zone a few more.
	MaxNSEC3 = 8
	// MaxNSEC is the same for NSEC records, which cost comparisons only.
	MaxNSEC = 32
	// MaxIterations is the most additional iterations that prove something; beyond, the zone counts as insecure (RFC
	// 9276 section 3.2). The salt is priced: an iteration over a salt that needs n SHA-1 blocks counts n times.
	MaxIterations = 50
	// MaxExamined is up to where a proof that counts no more has to be one all the same; see excused.
	MaxExamined = 150
	// RefuseIterations is where a zone is no longer excused: beyond, the proof is Bogus.
	RefuseIterations = 500
)

// Extended errors (RFC 8914 section 4, RFC 9276 section 3.2) found in a Result.
const (
	EDEBogus       uint16 = 6  // the records contradict what they should prove
	EDENSECMissing uint16 = 12 // a record that the proof needs is not there
	EDEIterations  uint16 = 27 // unsupported NSEC3 iterations value
)

// A Result is what a proof came to.
type Result struct {
	// Status is Secure if what was asked is proven; Insecure if the records are good and leave it open, because
	// opt-out covers the name (RFC 5155 section 9.2) or the zone asks for too many iterations: the response is then
	// accepted, without AD; Bogus if it is not proven.
	Status query.Status
	// OptOut: a record with the opt-out flag covers the next closer name. Nothing may be synthesised from it.
	OptOut bool
	// EDE and Reason say why Status is not Secure; EDE is query.NoEDE, and Reason empty, where there is nothing to
	// say. Reason is a short English phrase of this package's, never bytes from the network.
	EDE    uint16
	Reason string
	// Err is set if the Hasher's budget ended it (Status is then Bogus): it says nothing of the data.
	Err error
	// Used are the indexes of the sets that the proof rests on, each once.
	Used []int
	// Encloser is the closest encloser, where the proof found one; wildcards that could answer stand directly below.
	Encloser dnsname.Name
	// NextCloser is the name one label longer than Encloser on the way to the name asked for, if NSEC3 records
	// denied it. With OptOut everything at and below it may be unsigned.
	NextCloser dnsname.Name
}

// A Cut is what a proof says of a name as a zone cut.
type Cut uint8

// What a name may turn out to be.
const (
	Unproven    Cut = iota // nothing is proven: Status is Bogus
	InsecureCut            // a delegation without DS or, with OptOut, possibly one, at or below Result.NextCloser
	NoCut                  // no zone begins there: an ordinary name, an empty non-terminal, or no name at all
)

// A Proof is the denial records of one response that one zone signed.
type Proof struct {
	zone   dnsname.Name
	nsec   []nsec
	nsec3  []nsec3
	params Params // of all of nsec3
	mixed  bool   // nsec3 is of more than one chain
	hasher *Hasher
}

// New takes from sets, which hold anything, the NSEC and NSEC3 records that count: see the package comment. h
// remembers hashes beyond this proof and charges for new ones; nil stands for one without a budget. The sets
// must not change while the Proof is in use.
func New(zone dnsname.Name, sets []query.RRset, h *Hasher) *Proof {
	if h == nil {
		h = new(Hasher)
	}
	p := &Proof{zone: zone, hasher: h}
	for i := range sets {
		s := &sets[i]
		if s.Status != query.Secure || s.Class != dnswire.ClassIN || !s.Name.IsWithin(zone) {
			continue
		}
		switch s.Type {
		case dnswire.TypeNSEC:
			if len(p.nsec) < MaxNSEC && signedAsIs(s, zone) {
				p.addNSEC(s, i)
			}
		case dnswire.TypeNSEC3:
			if len(p.nsec3) < MaxNSEC3 && signedAsIs(s, zone) {
				p.addNSEC3(s, i)
			}
		}
	}
	return p
}

// signedAsIs reports whether s holds one record and zone signed it for this very owner. A denial record that a
// wildcard was expanded to is truly signed and says what is not true of its owner (CVE-2017-15105).
func signedAsIs(s *query.RRset, zone dnsname.Name) bool {
	if query.CountRData(s.Data) != 1 {
		return false
	}
	signed := false
	for rdata := range query.RDatas(s.Sigs) {
		sig, ok := rrsig.ParseSig(rdata)
		if !ok || sig.Covered != s.Type || !sig.SignedBy(zone) {
			continue
		}
		// Which of several signatures verified is not known here, so none may say otherwise.
		if sig.Expanded(s.Name) {
			return false
		}
		signed = true
	}
	return signed
}

// NameError asks whether name does not exist and no wildcard could stand for it (RFC 4035 section 5.4, RFC 5155
// section 8.4): the proof of an NXDOMAIN response.
func (p *Proof) NameError(name dnsname.Name) Result {
	return p.either(name, func() Result { return p.nameErrorNSEC(name) }, func() Result { return p.nameErrorNSEC3(name) })
}

// NoData asks whether name exists, if only by a wildcard or as an empty non-terminal, and has neither a record of
// the type nor an alias (RFC 4035 section 5.4, RFC 5155 sections 8.5 to 8.7): the proof of a NODATA response. DS
// records are denied by the parent zone alone, everything else at an apex by the child alone.
func (p *Proof) NoData(name dnsname.Name, typ uint16) Result {
	return p.either(name, func() Result { return p.noDataNSEC(name, typ) }, func() Result { return p.noDataNSEC3(name, typ) })
}

// Expansion asks whether nothing closer to name exists than the wildcard below its last labels labels, which is
// what the RRSIG of an answer that a wildcard gave says (RFC 4035 section 5.3.4, RFC 5155 section 8.8). For the
// wildcard asked for by its own name there is nothing to prove.
func (p *Proof) Expansion(name dnsname.Name, labels int) Result {
	if name.IsWildcard() && labels == name.Labels()-1 {
		return proven(name.Parent())
	}
	if labels < p.zone.Labels() || labels >= name.Labels() {
		return bogus(EDEBogus, "the signature's label count fits neither name nor zone")
	}
	return p.either(name, func() Result { return p.expansionNSEC(name, labels) }, func() Result { return p.expansionNSEC3(name, labels) })
}

// Delegation asks what the zone, which must be above name, says of name as the apex of a zone of its own, given
// that there was no DS record (RFC 4035 section 5.2, RFC 5155 section 8.9, RFC 6840 section 4.4). Beyond
// MaxIterations Status is Insecure, and the cut still what the records say of it; where they were not examined it is
// InsecureCut.
func (p *Proof) Delegation(name dnsname.Name) (Cut, Result) {
	if !name.Below(p.zone) {
		return Unproven, bogus(EDEBogus, "the name is not below the zone that should deny it")
	}
	cut := Unproven
	r := p.either(name, func() (r Result) {
		cut, r = p.delegationNSEC(name)
		return r
	}, func() (r Result) {
		cut, r = p.delegationNSEC3(name)
		return r
	})
	switch {
	case r.Status == query.Bogus:
		return Unproven, r
	case cut == Unproven: // too many iterations to look
		return InsecureCut, r
	}
	return cut, r
}

// either tries the NSEC records and then the NSEC3 records: a zone that changes from one to the other may send
// both, and each chain is a proof of its own.
func (p *Proof) either(name dnsname.Name, nsec, nsec3 func() Result) Result {
	if !name.IsWithin(p.zone) {
		return bogus(EDEBogus, "the name is not in the zone that should deny it")
	}
	r := bogus(EDENSECMissing, "no NSEC or NSEC3 record that counts")
	if len(p.nsec) > 0 {
		if r = nsec(); r.Status != query.Bogus {
			return r
		}
	}
	if len(p.nsec3) == 0 {
		return r
	}
	switch price := p.params.price(); {
	case p.mixed: // RFC 5155 section 8.2
		return bogus(EDEBogus, "NSEC3 records of different chains")
	case price > RefuseIterations:
		return bogus(EDEIterations, "far too many NSEC3 iterations")
	case price > MaxIterations:
		return p.excused(name, nsec3)
	}
	return nsec3()
}

// excused judges the proof of a zone that asks for too many iterations: it leaves open what it should prove, but
// that is no licence to send anything. Whoever could put any genuine NSEC3 record of such a zone into a response
// would otherwise take the signatures off every name of it. So up to MaxExamined a proof that is none is Bogus, as
// it is for validators that still compute as many; and no valid one can be. Beyond, and where the hashes could
// cost half of a question's budget, which deep names of an unwise zone would, the zone is taken at its word.
func (p *Proof) excused(name dnsname.Name, nsec3 func() Result) Result {
	const wildcardAndSelf, half = 2, 32
	hashes := name.Labels() - p.zone.Labels() + wildcardAndSelf
	if p.params.price() <= MaxExamined && hashes*p.params.weight() <= half {
		if r := nsec3(); r.Status == query.Bogus && r.Err == nil {
			return r
		}
	}
	r := Result{Status: query.Insecure, EDE: EDEIterations, Reason: "too many NSEC3 iterations"}
	for i := range p.nsec3 {
		r.use(p.nsec3[i].set)
	}
	return r
}

func proven(encloser dnsname.Name, used ...int) Result {
	r := Result{Status: query.Secure, EDE: query.NoEDE, Encloser: encloser}
	for _, i := range used {
		r.use(i)
	}
	return r
}

func bogus(ede uint16, reason string) Result {
	return Result{Status: query.Bogus, EDE: ede, Reason: reason}
}

func (r *Result) use(set int) {
	for _, u := range r.Used {
		if u == set {
			return
		}
	}
	r.Used = append(r.Used, set)
}
