package validator

import (
	"errors"
	"slices"
	"sync"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/validator/rrsig"
)

// set judges one RRset and notes the verdict. A Secure set that was made from a wildcard is not noted: it is
// only as good as the proof that nothing closer exists, which does not stand with it in the cache.
func (r *run) set(s *query.RRset) (verdict, error) {
	switch s.Status {
	case query.Secure, query.Insecure, query.Indeterminate:
		return verdict{status: s.Status, why: reason{ede: query.NoEDE}}, nil
	case query.Bogus:
		return bogus(because(edeBogus, "%v %s was found bogus a moment ago", s.Name, dnswire.TypeText(s.Type))), nil
	}
	if s.Type == dnswire.TypeRRSIG { // nothing signs signatures
		return insecure(reason{ede: query.NoEDE}), nil
	}
	vd, err := r.signed(s)
	if err != nil || vd.status == query.Bogus {
		return vd, err
	}
	s.Status = vd.status
	if vd.encloser == "" {
		r.note(s, vd.status)
	}
	return vd, nil
}

// signed judges an RRset by its signatures or, if none of them is worth anything, by whether its zone has to be
// signed at all.
func (r *run) signed(s *query.RRset) (verdict, error) {
	holder := s.Name // the name whose zone holds the set
	if s.Type == dnswire.TypeDS && s.Name != dnsname.Root {
		holder = s.Name.Parent()
	}
	if z := r.known(holder); z.unsigned() {
		return z.verdict(), nil
	}
	why := because(edeNoSignature, "%v %s has no signature", s.Name, dnswire.TypeText(s.Type))
	claimed := false
	for _, signer := range deepestFirst(signers(s, holder)) {
		claimed = true
		z, err := r.zone(signer)
		if err != nil {
			return verdict{}, err
		}
		switch {
		case z == nil:
			why = because(edeNoSignature, "%v %s: %v, said to have signed it, is no zone", s.Name, dnswire.TypeText(s.Type), signer)
		case z.status == query.Bogus:
			return z.verdict(), nil
		case z.status == query.Secure:
			vd, err := r.verify(s, z, z.keys)
			if err != nil || vd.status == query.Secure {
				return vd, err
			}
			why = vd.why
		}
		// A signer that is not secure says nothing of the zone that holds the set: it may be above its anchor.
	}
	z, err := r.unsigned(holder, !claimed)
	if err != nil || z.status != query.Secure {
		return z.verdict(), err
	}
	return bogus(why), nil
}

// signers returns the zones that claim to have signed a set, in the order of their signatures.
func signers(s *query.RRset, holder dnsname.Name) (out []dnsname.Name) {
next:
	for rdata := range query.RDatas(s.Sigs) {
		sig, ok := rrsig.ParseSig(rdata)
		if !ok || sig.Covered != s.Type {
			continue
		}
		for _, n := range out {
			if sig.SignedBy(n) {
				continue next
			}
		}
		if n := sig.SignerName(); holder.IsWithin(n) && len(out) < maxSigners {
			out = append(out, n)
		}
	}
	return out
}

// deepestFirst orders the zones that claim to have signed something.
func deepestFirst(zones []dnsname.Name) []dnsname.Name {
	if len(zones) > 1 {
		slices.SortStableFunc(zones, func(a, b dnsname.Name) int { return b.Labels() - a.Labels() })
	}
	return zones
}

// overruled reports that there is a trust anchor between a zone and a name below it: whoever set that anchor does
// not want to be told by the zone that nothing is signed there.
func (r *run) overruled(zone, name dnsname.Name) bool {
	for n := name; n.Below(zone); n = n.Parent() {
		if _, _, ok := r.v.o.Anchors.At(n); ok {
			return true
		}
	}
	return false
}

// cryptography is what a run needs to verify signatures: room that is used again.
type cryptography struct{ verifier rrsig.Verifier }

var cryptographies = sync.Pool{New: func() any { return new(cryptography) }}

// verify judges a set by the given keys of a zone: Secure, with the set's TTL bounded by its signature (RFC
// 4035 section 5.3.3), or Bogus. An error says that a budget is spent.
func (r *run) verify(s *query.RRset, z *zone, keys []*rrsig.Key) (verdict, error) {
	what := func(ede uint16, problem string) verdict {
		return bogus(because(ede, "%v %s: %s", s.Name, dnswire.TypeText(s.Type), problem))
	}
	c := r.crypto
	if err := c.verifier.Load(s); err != nil {
		return what(edeBogus, err.Error()), nil
	}
	vd := what(edeNoSignature, "no signature by "+z.name.String())
	rank := 0 // of the complaint in vd
	complain := func(r int, ede uint16, err error) {
		if r > rank {
			rank, vd = r, what(ede, err.Error())
		}
	}
	tried, failures := 0, 0
	for rdata := range query.RDatas(s.Sigs) {
		sig, ok := rrsig.ParseSig(rdata)
		if !ok || !sig.SignedBy(z.name) {
			continue
		}
		if err := c.verifier.Check(&sig, z.name, r.wall, r.v.o.Skew); err != nil {
			switch err {
			case rrsig.ErrExpired:
				complain(5, edeExpired, err)
			case rrsig.ErrNotYetValid:
				complain(4, edeNotYetValid, err)
			case rrsig.ErrAlgorithm:
				complain(1, edeAlgorithm, err)
			default:
				complain(3, edeBogus, err)
			}
			continue
		}
		if !r.v.accepts(sig.Algorithm) {
			complain(1, edeAlgorithm, rrsig.ErrAlgorithm)
			continue
		}
		colliding := 0
		for _, k := range keys {
			if k.Tag != sig.KeyTag || k.Algorithm != sig.Algorithm {
				continue
			}
			if colliding == 0 {
				if tried++; tried > maxSignatures {
					return vd, nil
				}
			}
			if colliding++; colliding > maxColliding {
				break
			}
			var err error
			switch k.Err() {
			case rrsig.ErrNotZone:
				complain(2, edeNoZoneKey, k.Err())
				continue
			case rrsig.ErrRevoked, rrsig.ErrAlgorithm:
				complain(2, edeBogus, k.Err())
				continue
			case nil:
				if err = r.enter(); err != nil {
					return verdict{}, err
				}
				if err = c.verifier.Verify(&sig, k); err == nil {
					r.v.count.verified.Add(1)
				} else {
					r.v.count.failed.Add(1)
				}
				<-r.v.pool
			default: // a broken key costs what a failed verification does (CVE-2025-8677)
				err = k.Err()
			}
			if err == nil {
				if err := r.tree.Validation(); err != nil {
					return verdict{}, r.spent(s, err)
				}
				return r.secure(s, z, &sig), nil
			}
			complain(6, edeBogus, err)
			if err := r.tree.FailedValidation(); err != nil {
				return verdict{}, r.spent(s, err)
			}
			if failures++; failures >= maxFailures {
				return vd, nil
			}
		}
		if colliding == 0 {
			complain(1, edeNoKey, errNoSuchKey)
		}
	}
	return vd, nil
}

var errNoSuchKey = errors.New("the zone has no such key as its signatures name")

// secure notes what a verified signature says beside that the set is genuine.
func (r *run) secure(s *query.RRset, z *zone, sig *rrsig.Sig) verdict {
	s.TTL = sig.TTL(s.TTL, r.wall, r.v.o.Skew)
	vd := verdict{status: query.Secure, why: reason{ede: query.NoEDE}, zone: z}
	if sig.Expanded(s.Name) {
		vd.encloser = s.Name.Suffix(int(sig.Labels))
	}
	return vd
}

// accepts reports whether signatures of an algorithm count.
func (v *Validator) accepts(algorithm uint8) bool { return v.o.SHA1 || !rrsig.UsesSHA1(algorithm) }

// enter waits for a place in the pool; receiving from the pool leaves it.
func (r *run) enter() error {
	select {
	case r.v.pool <- struct{}{}:
		r.v.count.entered(len(r.v.pool))
		return nil
	case <-r.ctx.Done():
		return &Failure{Code: edeOther, Text: "validation given up: " + r.ctx.Err().Error(), err: r.ctx.Err()}
	}
}

// spent is the error of a tree that can afford no more verifications.
func (r *run) spent(s *query.RRset, err error) error {
	return &Failure{Code: edeBogus, Text: s.Name.String() + " " + dnswire.TypeText(s.Type) + ": " + err.Error(), err: err}
}

// given wraps what the fetcher said.
func given(what string, err error) error {
	var f interface{ EDE() (uint16, string) }
	code := uint16(edeOther)
	if errors.As(err, &f) {
		code, _ = f.EDE()
	}
	return &Failure{Code: code, Text: what + ": " + err.Error(), err: err}
}
