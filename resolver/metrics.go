package resolver

import (
	"github.com/sluice-dns/sluice/resolver/internal/metrics"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// validationMetrics reads the validator's counters.
func (r *Resolver) validationMetrics() metrics.Validation {
	s := r.engine.validate.Stats()
	m := metrics.Validation{
		Answers: make(map[string]uint64), Unfinished: s.Unfinished, Verified: s.Verified, Failed: s.Failed,
		Verifying: s.Verifying, Places: s.Places,
	}
	for status, n := range s.Answers {
		m.Answers[status.String()] = n
	}
	if r.engine.negative != nil {
		m.NegativeAnchors = len(r.engine.negative.List())
	}
	return m
}

// forwardMetrics reads the counters of forward zones. Only zones of the public tree have a name of their own there,
// and no view is served yet.
func (r *Resolver) forwardMetrics() (out []metrics.Forward) {
	for _, z := range r.ForwardStats() {
		if z.View != query.View(0) {
			continue
		}
		f := metrics.Forward{Zone: z.Zone.String(), Answered: z.Answered, Failed: z.Failed, Disagreed: z.Disagreed}
		for _, u := range z.Upstreams {
			f.Upstreams = append(f.Upstreams, metrics.ForwardUpstream{
				Name: u.Name, Role: u.Role.String(), Asked: u.Asked, Answered: u.Answered, Won: u.Won, TimedOut: u.TimedOut, Failed: u.Failed,
				Broken: u.Broken, Same: u.Same, Different: u.Different, Skipped: u.Skipped, SRTT: u.SRTT.Seconds(), Resting: u.Resting,
			})
		}
		out = append(out, f)
	}
	return out
}
