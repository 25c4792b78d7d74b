package validator

import (
	"crypto/sha256"
	"encoding/binary"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
	"github.com/sluice-dns/sluice/resolver/internal/validator/denial"
	"github.com/sluice-dns/sluice/resolver/internal/validator/rrsig"
)

// This file judges what is said not to exist. Package denial knows what NSEC and NSEC3 records prove; here
// their signatures are verified, and those of the SOA record beside them, which says for how long.

// denied judges the denial of u, which is about name, and returns the sets that belong into the answer.
func (r *run) denied(u *query.Unvalidated, name dnsname.Name) (verdict, []query.RRset, error) {
	soa, judged := findDenial(u, name)
	// Out of the cache a denial comes with its SOA record, except one of DS records. Without it, records that are
	// Secure may prove something of an alias before, and say nothing of name.
	if judged != query.Unchecked && (soa != nil || u.Question.Type == dnswire.TypeDS && judged != query.Secure) {
		vd := verdict{status: judged, why: reason{ede: query.NoEDE}}
		if judged == query.Bogus {
			vd.why = because(edeBogus, "the denial of %v was found bogus a moment ago", name)
		}
		var needed []query.RRset
		for i := range u.Authority {
			if u.Authority[i].Status != query.Unchecked {
				needed = append(needed, u.Authority[i])
			}
		}
		return vd, needed, nil
	}
	holder := name
	if u.Question.Type == dnswire.TypeDS && name != dnsname.Root {
		holder = name.Parent()
	}
	if z := r.known(holder); z.unsigned() {
		return r.denial(u, name, soa, z.verdict(), nil)
	}
	why := because(edeNoProof, "%v %s is said not to exist, without a proof", name, dnswire.TypeText(u.Question.Type))
	claimed := false
	for _, signer := range deepestFirst(proofSigners(u, holder)) {
		claimed = true
		z, err := r.zone(signer)
		switch {
		case err != nil:
			return verdict{}, nil, err
		case z == nil || z.status != query.Secure && z.status != query.Bogus:
			continue
		case z.status == query.Bogus:
			return z.verdict(), nil, nil
		}
		if soa != nil {
			vd, err := r.prove(soa, z)
			if err != nil {
				return verdict{}, nil, err
			}
			if vd.status == query.Bogus {
				why = vd.why
				continue
			}
		}
		p, failed, err := r.proof(u, z)
		if err != nil {
			return verdict{}, nil, err
		}
		var res denial.Result
		if u.RCode == dnswire.RCodeNXDomain {
			res = p.NameError(name)
		} else {
			res = p.NoData(name, u.Question.Type)
		}
		vd, err := r.result(name, u.Question.Type, res)
		if err != nil {
			return verdict{}, nil, err
		}
		if vd.status == query.Insecure && r.overruled(signer, holder) {
			continue
		}
		if vd.status != query.Bogus {
			vd.zone = z
			return r.denial(u, name, soa, vd, res.Used)
		}
		if why = vd.why; failed != nil {
			why = *failed // rather why a record does not count than that it is missing
		}
	}
	z, err := r.unsigned(holder, !claimed)
	switch {
	case err != nil:
		return verdict{}, nil, err
	case u.RCode == dnswire.RCodeNXDomain && soa != nil && r.mayBeAbsent(z):
		return absent(u, z)
	case z.status == query.Bogus:
		return z.verdict(), nil, nil
	case z.status == query.Secure:
		return bogus(why), nil, nil
	}
	return r.denial(u, name, soa, z.verdict(), nil)
}

// absent passes on that a name does not exist, below a trust anchor whose zone does not seem to exist either: an
// island whose anchor outlived it, or that is not part of this network. Only the denial of a name is passed on, it
// is Indeterminate, and nothing is concluded from it: no data of the zone is believed without its signatures, no DS
// records are thereby denied, and the caches are not told. Once the zone has shown its keys, a denial is what it was
// for everybody else all along, bogus. So whoever can forge answers gains what withholding them would give him, and
// that only as long as the anchor has never been of use, where no other stands above it.
func absent(u *query.Unvalidated, z *zone) (verdict, []query.RRset, error) {
	why := because(edeIndeterminate, "%v is a trust anchor, and all who were asked deny that there is such a name", z.name)
	var needed []query.RRset
	for _, s := range u.Authority {
		if s.Status == query.Secure { // it proves something of an alias before
			continue
		}
		s.TTL, s.Status = min(s.TTL, uint32(bogusFor/time.Second)), query.Indeterminate
		needed = append(needed, s)
	}
	return verdict{status: query.Indeterminate, why: why}, needed, nil
}

// findDenial returns the SOA record of the denial, nil if there is none, and the status with which the denial
// came out of the cache.
func findDenial(u *query.Unvalidated, name dnsname.Name) (soa *query.RRset, judged query.Status) {
	judged = query.NumStatus
	for i := range u.Authority {
		s := &u.Authority[i]
		switch {
		case s.Type == dnswire.TypeSOA && name.IsWithin(s.Name):
			return s, s.Status
		case s.Type == dnswire.TypeNSEC || s.Type == dnswire.TypeNSEC3:
			judged = min(judged, s.Status)
		}
	}
	if judged == query.NumStatus {
		judged = query.Unchecked
	}
	return nil, judged
}

// proofSigners returns the zones that claim to have signed the denial and could: the names that hold them are
// at or above holder.
func proofSigners(u *query.Unvalidated, holder dnsname.Name) (out []dnsname.Name) {
	for i := range u.Authority {
		switch u.Authority[i].Type {
		case dnswire.TypeNSEC, dnswire.TypeNSEC3:
		default:
			continue
		}
	next:
		for _, n := range signers(&u.Authority[i], u.Authority[i].Name) {
			if !holder.IsWithin(n) || len(out) == maxSigners {
				continue
			}
			for _, o := range out {
				if o == n {
					continue next
				}
			}
			out = append(out, n)
		}
	}
	return out
}

// prove verifies one record of a denial, unless that was done before, and notes the outcome in it. The same
// records come with many denials: the SOA, and the proofs about the apex, the closest encloser and its wildcard.
func (r *run) prove(s *query.RRset, z *zone) (verdict, error) {
	good := verdict{status: query.Secure, why: reason{ede: query.NoEDE}, zone: z}
	if s.Status == query.Secure {
		return good, nil
	}
	k := r.proofKey(s, z)
	if end, ok := r.v.proofs.get(k, r.now, r.epoch); ok {
		s.Status, s.TTL = query.Secure, min(s.TTL, uint32((end.Sub(r.now)+time.Second-1)/time.Second))
		return good, nil
	}
	vd, err := r.verify(s, z, z.keys)
	if err == nil && vd.status == query.Secure {
		s.Status = query.Secure
		end := min(z.end, r.now.Add(seconds(s.TTL)))
		r.v.proofs.put(k, end, end, r.epoch, r.now)
	}
	return vd, err
}

// proofKey stands for a set with its signatures, and for whose they are to be.
func (r *run) proofKey(s *query.RRset, z *zone) (k proofKey) {
	b := append(r.keyBuf[:0], byte(r.view), byte(s.Type>>8), byte(s.Type), byte(s.Class>>8), byte(s.Class), byte(len(z.name)), byte(len(s.Name)))
	b = append(append(b, z.name...), s.Name...)
	b = append(binary.BigEndian.AppendUint32(b, uint32(len(s.Data))), s.Data...)
	b = append(b, s.Sigs...)
	r.keyBuf = b
	return sha256.Sum256(b)
}

// proof verifies the NSEC and NSEC3 records of u that z signed. failed says why one of them does not count.
func (r *run) proof(u *query.Unvalidated, z *zone) (p *denial.Proof, failed *reason, err error) {
	n := 0
	for i := range u.Authority {
		s := &u.Authority[i]
		if s.Type != dnswire.TypeNSEC && s.Type != dnswire.TypeNSEC3 || s.Status == query.Secure || !signedBy(s, z.name) {
			continue
		}
		if n++; n > maxProofs {
			break
		}
		vd, err := r.prove(s, z)
		if err != nil {
			return nil, nil, err
		}
		if vd.status == query.Bogus {
			failed = &vd.why
		}
	}
	if r.nsec3 == nil {
		r.nsec3 = denial.NewHasher(r.tree.Hash)
	}
	return denial.New(z.name, u.Authority, r.nsec3), failed, nil
}

func signedBy(s *query.RRset, zone dnsname.Name) bool {
	for rdata := range query.RDatas(s.Sigs) {
		if sig, ok := rrsig.ParseSig(rdata); ok && sig.SignedBy(zone) {
			return true
		}
	}
	return false
}

// result turns what a proof came to into a verdict.
func (r *run) result(name dnsname.Name, typ uint16, res denial.Result) (verdict, error) {
	if res.Err != nil {
		return verdict{}, &Failure{Code: edeBogus, Text: name.String() + ": denial of existence: " + res.Err.Error(), err: res.Err}
	}
	vd := verdict{status: res.Status, why: reason{ede: res.EDE}}
	if res.Reason != "" {
		vd.why = because(res.EDE, "%v %s: denial of existence: %s", name, dnswire.TypeText(typ), res.Reason)
	}
	return vd, nil
}

// denial seals a denial whose status is known: the sets it needs have the least of their TTLs (RFC 2308 section
// 5, RFC 9077), and the cache is told. used are the indexes of the proof in u.Authority.
func (r *run) denial(u *query.Unvalidated, name dnsname.Name, soa *query.RRset, vd verdict, used []int) (verdict, []query.RRset, error) {
	var proof []query.RRset
	if vd.status == query.Secure || len(used) > 0 {
		for _, i := range used {
			proof = append(proof, u.Authority[i])
		}
	} else {
		for i := range u.Authority { // of an unsigned zone, or under no anchor: as it came
			// What is Secure proves something of an alias before, in another zone.
			if s := &u.Authority[i]; (s.Type == dnswire.TypeNSEC || s.Type == dnswire.TypeNSEC3) && s.Status != query.Secure {
				proof = append(proof, *s)
			}
		}
	}
	var head query.RRset
	ttl := ^uint32(0)
	if soa != nil {
		head, ttl = *soa, soa.TTL
	}
	for i := range proof {
		ttl = min(ttl, proof[i].TTL)
	}
	head.TTL, head.Status = ttl, vd.status
	for i := range proof {
		proof[i].TTL, proof[i].Status = ttl, vd.status
	}
	r.keepProof(vd, head, proof)
	kind := rrcache.NoData
	if u.RCode == dnswire.RCodeNXDomain {
		kind = rrcache.NXDomain
	}
	var needed []query.RRset
	if soa != nil {
		needed = append(needed, head)
	} else {
		head = query.RRset{}
	}
	k := rrcache.Key{Name: name, Type: u.Question.Type, Class: dnswire.ClassIN, View: r.view, Subnet: r.subnet}
	if k.Type == dnswire.TypeDS && vd.why.ede == denial.EDEIterations {
		// Insecure for what it cost, which says nothing of a delegation: whoever follows the chain of trust has to
		// judge the records again.
		return vd, append(needed, proof...), nil
	}
	if k.Type != dnswire.TypeANY && k.Type != dnswire.TypeRRSIG || kind == rrcache.NXDomain {
		if soa != nil || k.Type == dnswire.TypeDS {
			r.v.o.Cache.PutNegative(k, kind, head, proof, vd.status, r.now)
		}
	}
	return vd, append(needed, proof...), nil
}

// keepProof keeps what a Secure verdict rests on for other questions, which holds for everybody.
func (r *run) keepProof(vd verdict, soa query.RRset, proof []query.RRset) {
	if r.v.o.Denials == nil || vd.status != query.Secure || vd.zone == nil || r.subnet != (query.Subnet{}) {
		return
	}
	if r.v.o.Epoch() == r.epoch { // what was judged before everything was forgotten is not to come back
		r.v.o.Denials.Put(r.view, vd.zone.name, soa, proof, r.now)
	}
}

// wildcard judges the proof that a Secure set which was made from a wildcard needs, and returns the sets of it.
func (r *run) wildcard(u *query.Unvalidated, s *query.RRset, vd verdict) (verdict, []query.RRset, error) {
	p, failed, err := r.proof(u, vd.zone)
	if err != nil {
		return verdict{}, nil, err
	}
	res := p.Expansion(s.Name, vd.encloser.Labels())
	out, err := r.result(s.Name, s.Type, res)
	if err != nil || out.status == query.Bogus {
		if failed != nil {
			out.why = *failed
		}
		return out, nil, err
	}
	s.Status = out.status
	var needed []query.RRset
	for _, i := range res.Used {
		needed = append(needed, u.Authority[i])
	}
	if out.status == query.Secure && r.v.o.Denials != nil && !u.Inferred {
		out.zone = vd.zone
		r.keepProof(out, query.RRset{}, needed)
		// What was signed are the records of the wildcard, and as such they may answer for other names (RFC 8198
		// section 5.3).
		w := *s
		w.Name = "\x01*" + vd.encloser
		r.note(&w, query.Secure)
	}
	return out, needed, nil
}

// A dsDenial is what the denial of DS records came to.
type dsDenial struct {
	verdict
	delegation bool // there is, or with opt-out may be, a delegation to a zone that is not signed
	ordinary   bool // there is none, by records that may be too costly to be Secure
	nameError  bool // the name does not exist
	ttl        uint32
}

// dsDenied judges a denial of DS records by the zone above name.
func (r *run) dsDenied(u *query.Unvalidated, name dnsname.Name) (dsDenial, error) {
	d := dsDenial{verdict: bogus(because(edeNoProof, "%v: nothing proves that it has no DS records", name)), ttl: r.ttl(u)}
	soa, judged := findDenial(u, name)
	if judged == query.Insecure || judged == query.Indeterminate {
		d.verdict = verdict{status: judged, why: reason{ede: query.NoEDE}}
		return d, nil
	}
	holder := name.Parent()
	claimed := false
	for _, signer := range deepestFirst(proofSigners(u, holder)) {
		claimed = true
		z, err := r.zone(signer)
		switch {
		case err != nil:
			return d, err
		case z == nil || z.status != query.Secure && z.status != query.Bogus:
			continue
		case z.status == query.Bogus:
			d.verdict = z.verdict()
			return d, nil
		}
		p, failed, err := r.proof(u, z)
		if err != nil {
			return d, err
		}
		cut, res := p.Delegation(name)
		vd, err := r.result(name, dnswire.TypeDS, res)
		if err != nil {
			return d, err
		}
		if vd.status == query.Bogus {
			if d.why = vd.why; failed != nil {
				d.why = *failed
			}
			continue
		}
		if (vd.status != query.Secure || cut == denial.InsecureCut) && r.overruled(signer, holder) {
			continue
		}
		d.verdict = vd
		d.delegation, d.ordinary = cut == denial.InsecureCut, cut == denial.NoCut
		d.nameError = !d.delegation && u.RCode == dnswire.RCodeNXDomain && p.NameError(name).Status == query.Secure
		if judged == query.Secure {
			return d, nil
		}
		if soa != nil {
			vd, err := r.prove(soa, z)
			if err != nil || vd.status == query.Bogus {
				return d, err // good enough for us, not for clients
			}
		}
		if d.nameError || u.RCode == dnswire.RCodeNoError {
			vd.zone = z
			_, _, err = r.denial(u, name, soa, vd, res.Used)
			d.ttl = r.ttl(u)
		}
		return d, err
	}
	z, err := r.unsigned(holder, !claimed)
	if err != nil {
		return d, err
	}
	if z.status != query.Secure {
		d.verdict = z.verdict()
	}
	return d, nil
}

// ttl is how long a denial lives.
func (r *run) ttl(u *query.Unvalidated) uint32 {
	ttl := uint32(3600)
	for i := range u.Authority {
		ttl = min(ttl, u.Authority[i].TTL)
	}
	return ttl
}
