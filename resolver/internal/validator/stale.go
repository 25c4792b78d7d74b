package validator

import (
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
)

// StaleOptions say how stale data is given.
type StaleOptions struct {
	// For is how long the entry may be used, in seconds.
	For uint32
	// Judged: only data on which a judgement was passed while it lived will do, since it cannot be had now.
	Judged bool
}

// Stale seals an answer of which a part is past its end (RFC 8767). It asks nobody: whoever is in need of stale
// data is so because servers do not answer. Data once found Bogus, or on which nothing was found where something
// should have been, is no answer; what was found Secure is given as Insecure, because its signatures may have
// ended as well, so that AD is never set. Whoever asked with CD judges for himself.
func (v *Validator) Stale(u *query.Unvalidated, o StaleOptions, now clock.Instant) (settled.Entry, bool) {
	status := query.Indeterminate
	switch {
	case u.Question.CD:
		status = query.Unchecked
	case o.Judged:
		status = query.Insecure
	}
	for _, sets := range [][]query.RRset{u.Answer, u.Authority} {
		for i := range sets {
			switch sets[i].Status {
			case query.Unchecked:
				if o.Judged && !u.Question.CD && !synthesised(sets, i) {
					return settled.Entry{}, false
				}
			case query.Bogus:
				if !u.Question.CD {
					return settled.Entry{}, false
				}
			case query.Indeterminate:
				status = min(status, query.Indeterminate)
			}
		}
	}
	ede := uint16(edeStale)
	if u.RCode == dnswire.RCodeNXDomain {
		ede = edeStaleNXDomain
	}
	e, err := settled.Settle(u, status, settled.Options{Now: now, Epoch: v.o.Epoch(), EDE: ede, Full: v.o.Full, TTL: o.For})
	return e, err == nil
}

// synthesised reports a CNAME that was made from the DNAME before it, whose judgement is its own.
func synthesised(sets []query.RRset, i int) bool {
	return i > 0 && sets[i].Type == dnswire.TypeCNAME && sets[i-1].Type == dnswire.TypeDNAME
}
