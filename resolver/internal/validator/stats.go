package validator

import (
	"sync/atomic"

	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Stats are what a Validator has done since it was made.
type Stats struct {
	// Answers are those validated, by what they were found to be: Indeterminate, Insecure, Secure and Bogus. An
	// answer is counted once, however often it was asked for again.
	Answers map[query.Status]uint64
	// Verified and Failed are signatures, whose verification succeeded and failed.
	Verified, Failed uint64
	// Unfinished are answers whose status could not be found: the budget or the time of the question was spent, or
	// keys were out of reach.
	Unfinished uint64
	// Verifying is how many signatures are being verified now, Places how many may be at once, Peak how many were
	// at most.
	Verifying, Places, Peak int
}

// Stats reads the counters.
func (v *Validator) Stats() Stats {
	s := Stats{
		Answers:  make(map[query.Status]uint64),
		Verified: v.count.verified.Load(), Failed: v.count.failed.Load(), Unfinished: v.count.unfinished.Load(),
		Verifying: len(v.pool), Places: cap(v.pool), Peak: int(v.count.peak.Load()),
	}
	for _, status := range []query.Status{query.Indeterminate, query.Insecure, query.Secure, query.Bogus} {
		s.Answers[status] = v.count.answers[status].Load()
	}
	return s
}

// counters are behind Stats.
type counters struct {
	answers                      [query.Bogus + 1]atomic.Uint64
	verified, failed, unfinished atomic.Uint64
	peak                         atomic.Int64
}

// entered notes that so many verifications are going on.
func (c *counters) entered(n int) {
	for {
		peak := c.peak.Load()
		if int64(n) <= peak || c.peak.CompareAndSwap(peak, int64(n)) {
			return
		}
	}
}
