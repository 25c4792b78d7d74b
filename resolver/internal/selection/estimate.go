package selection

import (
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
)

// An RTT is a round-trip time that can be: NewRTT alone makes one. In 2017 a leap second made one of the
// large resolvers compute negative times, and its weighted choice panicked on the average.
type RTT struct{ d time.Duration }

// maxRTT is beyond what any exchange waits for.
const maxRTT = 30 * time.Second

// NewRTT refuses a time that is negative or longer than anybody waits.
func NewRTT(d time.Duration) (RTT, bool) {
	if d < 0 || d > maxRTT {
		return RTT{}, false
	}
	return RTT{max(d, time.Microsecond)}, true
}

// Numbers of timeouts and rest; hardening section E.
const (
	minTimeout = 50 * time.Millisecond
	maxTimeout = 1500 * time.Millisecond

	// restAfter timeouts in a row a server rests for restFirst, twice as long after each failed probe, at most
	// restMost.
	restAfter = 3
	restFirst = 60 * time.Second
	restMost  = 15 * time.Minute
)

// An estimate is what we believe about one server address. It is a value: methods return the successor
// instead of changing the receiver.
//
// Invariants, checked by FuzzSelector:
//
//	srtt == 0                     if the address never answered; else 1 µs <= srtt <= maxRTT
//	0 <= rttvar <= maxRTT
//	rests == 0, restUntil == 0    iff  timeouts < restAfter
//	an answer sets timeouts, rests and restUntil to 0
type estimate struct {
	srtt, rttvar time.Duration
	timeouts     int
	rests        int // how many rests in a row; the last ends at restUntil
	restUntil    clock.Instant
	lastTimeout  clock.Instant // when the last counted timeout was noticed
}

// answered takes a sample in (RFC 6298 section 2.2 and 2.3: alpha 1/8, beta 1/4).
func (e estimate) answered(sample RTT) estimate {
	e = e.alive()
	if e.srtt == 0 {
		e.srtt, e.rttvar = sample.d, sample.d/2
		return e
	}
	e.rttvar += ((e.srtt - sample.d).Abs() - e.rttvar) / 4
	e.srtt = max(e.srtt+(sample.d-e.srtt)/8, time.Microsecond)
	return e
}

func (e estimate) alive() estimate {
	e.timeouts, e.rests, e.restUntil, e.lastTimeout = 0, 0, 0, 0
	return e
}

// timedOut counts a failure. Questions that were under way together fail together and count once; failures
// during a rest say nothing new.
func (e estimate) timedOut(now, sent clock.Instant) estimate {
	if e.timeouts > 0 && sent.Before(e.lastTimeout) && !now.Before(e.lastTimeout) {
		return e
	}
	if e.resting(now) {
		return e
	}
	e.lastTimeout = now
	if e.timeouts < restAfter {
		e.timeouts++
	}
	if e.timeouts == restAfter {
		rest := restMost
		if e.rests < 4 { // 60, 120, 240, 480 s
			rest = restFirst << e.rests
		}
		e.rests = min(e.rests+1, 8)
		e.restUntil = now.Add(rest)
	}
	return e
}

// resting reports whether the server is to be left alone. A rest that ends later than the longest rest from
// now belongs to a clock that stepped, and is over.
func (e estimate) resting(now clock.Instant) bool {
	return e.rests > 0 && now.Before(e.restUntil) && !now.Add(restMost).Before(e.restUntil)
}

// probeDue reports whether the rest is over but no answer has come since.
func (e estimate) probeDue(now clock.Instant) bool { return e.rests > 0 && !e.resting(now) }

// expected is what the server is compared by. Silence puts it outside the band of those that answer.
func (e estimate) expected() time.Duration {
	if e.timeouts > 0 {
		return e.timeout() + Band
	}
	if e.srtt == 0 {
		return unknownTimeout
	}
	return e.srtt
}

// plainTimeout is timeout without regard to timeouts.
func (e estimate) plainTimeout() time.Duration {
	e.timeouts = 0
	return e.timeout()
}

// timeout is how long to wait for an answer: doubled with each timeout in a row (RFC 6298 section 5.5).
func (e estimate) timeout() time.Duration {
	t := unknownTimeout
	if e.srtt > 0 {
		t = max(2*e.srtt+4*e.rttvar, minTimeout)
	}
	return min(t<<min(e.timeouts, restAfter), maxTimeout)
}
