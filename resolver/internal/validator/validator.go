// Package validator settles the security status of what iteration brought.
//
// In its present form it validates nothing: every answer is settled as Indeterminate (RFC 4033 section 5:
// no trust anchor says anything about it), so AD is never set and nothing is ever Bogus. Signatures and
// proofs that came with the data are kept and passed on to clients that ask for them. Chains of trust come
// with the recursor work; they take this package's place in the path without changing it.
package validator

import (
	"context"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
)

// Options tune a Validator.
type Options struct {
	// Full keeps authority and additional records of positive answers (answers.minimal: false).
	Full bool
	// Epoch is the present epoch of the caches, stamped into every entry.
	Epoch func() uint32
}

// A Validator settles answers. It is safe for concurrent use.
type Validator struct{ o Options }

// New returns a Validator.
func New(o Options) *Validator {
	if o.Epoch == nil {
		o.Epoch = func() uint32 { return 0 }
	}
	return &Validator{o}
}

// Validate decides the status of u and seals it. tree is charged for the work.
func (v *Validator) Validate(_ context.Context, _ *query.Tree, u *query.Unvalidated, now clock.Instant) (settled.Entry, error) {
	status := query.Indeterminate
	if u.Question.CD {
		status = query.Unchecked
	}
	ede := query.NoEDE
	if u.Stale {
		ede = edeStale
		if u.RCode == 3 {
			ede = edeStaleNXDomain
		}
	}
	return settled.Settle(u, status, settled.Options{Now: now, Epoch: v.o.Epoch(), EDE: ede, Full: v.o.Full})
}

// Extended errors of RFC 8914 section 4.
const (
	edeStale         = 3
	edeStaleNXDomain = 19
)
