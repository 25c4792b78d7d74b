package iterator

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// A Failure is a resolution that ended without an answer.
type Failure struct {
	Code uint16 // extended DNS error (RFC 8914)
	Text string // which object, what was wrong

	err error // query.ErrLimit or the context's error; nil if the fault is with the servers
	// final: other servers would not help.
	final bool
	// shed: there was no room to ask, which says nothing of the question.
	shed bool
}

// Extended DNS errors (IANA).
const (
	edeOther        uint16 = 0
	edeCachedError  uint16 = 13
	edeNotSupported uint16 = 21
	edeNoReachable  uint16 = 22
	edeNetwork      uint16 = 23
)

func (f *Failure) Error() string { return f.Text }

// EDE returns the extended DNS error that clients may be told.
func (f *Failure) EDE() (code uint16, text string) { return f.Code, f.Text }

func (f *Failure) Unwrap() error { return f.err }

// memorable reports whether the failure says something of the question, rather than of who asked it.
func (f *Failure) memorable() bool {
	return !f.shed && !errors.Is(f.err, query.ErrLimit) && !errors.Is(f.err, context.Canceled) && !errors.Is(f.err, context.DeadlineExceeded) &&
		f.Code != edeNotSupported
}

// A backoff says how long a failure is remembered: first, then second, then twice as long each time up to
// most. After a time of quiet it starts anew.
type backoff struct{ first, second, most, quiet time.Duration }

var (
	// RFC 9520 section 3.2: at least 1 s, at most 5 minutes.
	questionBackoff = backoff{time.Second, 5 * time.Second, 60 * time.Second, 5 * time.Minute}
	// Zones whose servers' names depend on each other (TsuNAME) do not mend themselves.
	circleBackoff = backoff{30 * time.Second, 30 * time.Second, 60 * time.Second, 5 * time.Minute}
	nameBackoff   = backoff{60 * time.Second, 60 * time.Second, 60 * time.Second, 5 * time.Minute}
	brokenBackoff = backoff{time.Hour, time.Hour, time.Hour, time.Hour}
)

// maxMemory bounds each memory. What is forgotten costs questions, no more.
const maxMemory = 1 << 14

// A memory remembers, for a while, that something failed. The zero value is ready.
type memory[K comparable] struct {
	mu sync.Mutex // guards everything below
	m  map[K]failing
}

type failing struct {
	until clock.Instant
	times int
	text  string
}

func (m *memory[K]) active(k K, now clock.Instant) (text string, failing bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f, ok := m.m[k]
	return f.text, ok && now.Before(f.until)
}

func (m *memory[K]) failed(k K, text string, now clock.Instant, b backoff) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f, ok := m.m[k]
	switch {
	case ok && now.Before(f.until):
		return // failures of questions that were under way together are one
	case ok && now.Sub(f.until) > b.quiet:
		f.times = 0
	}
	d := b.first
	if f.times > 0 {
		d = min(b.second<<min(f.times-1, 16), b.most)
	}
	f.times, f.until, f.text = f.times+1, now.Add(d), text
	if m.m == nil {
		m.m = make(map[K]failing)
	}
	if !ok && len(m.m) >= maxMemory {
		m.drop(now)
	}
	m.m[k] = f
}

// drop makes room: of a few entries, which map iteration begins at a random place, the one that ends first.
func (m *memory[K]) drop(now clock.Instant) {
	var victim K
	ends := clock.Never
	seen := 0
	for k, f := range m.m {
		if f.until.Before(ends) {
			victim, ends = k, f.until
		}
		if seen++; seen == 8 || ends.Before(now) {
			break
		}
	}
	delete(m.m, victim)
}

func (m *memory[K]) forget(k K) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.m, k)
}
