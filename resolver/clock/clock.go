// Package clock is the one place in Sluice that reads time.
//
// There are two clocks, because two questions are asked of time. Elapsed answers "how long": it counts
// nanoseconds since the machine booted, suspended time included (CLOCK_BOOTTIME), and never steps. TTLs,
// leases, backoff, rest periods and round-trip times use it. Wall answers "what is the date": signatures,
// schedules and anything written to disk use it, and must survive it stepping either way.
//
// The results have different types, Instant and time.Time, so that one cannot be subtracted from the other.
//
// In a test binary both read time.Now, so that inside a testing/synctest bubble they follow the bubble.
// Waiting (timers, deadlines of the net package) is not this package's business.
//
// For scenario players that must move a running process through time, Follow reads offsets from files; see
// the configuration section "testing".
package clock

import (
	"math"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// An Instant is a point of elapsed time, in nanoseconds since an origin that is fixed for the life of the
// process. Instants of different processes cannot be compared, so they are never persisted. Those that Elapsed
// returns are above 0, so that 0 can stand for "long ago" or "not yet".
type Instant int64

// Never is later than every Instant that Elapsed returns.
const Never Instant = math.MaxInt64

// Add returns the instant d after i. It saturates instead of wrapping.
func (i Instant) Add(d time.Duration) Instant {
	s := i + Instant(d)
	switch {
	case d > 0 && s < i:
		return Never
	case d < 0 && s > i:
		return math.MinInt64
	}
	return s
}

// Sub returns the time from j to i.
func (i Instant) Sub(j Instant) time.Duration { return time.Duration(i - j) }

// Before reports whether i is earlier than j.
func (i Instant) Before(j Instant) bool { return i < j }

// Seconds returns the whole seconds since the origin. Caches keep these 32 bits: enough for 90 years of
// uptime.
func (i Instant) Seconds() uint32 { return uint32(max(i, 0) / Instant(time.Second)) }

// Offsets set by Follow, in nanoseconds. Written only while scenarios are played.
var elapsedOffset, wallOffset atomic.Int64

var inTest = testing.Testing()

// Elapsed returns the present instant.
//
// Go reads CLOCK_BOOTTIME by a system call only, which cost a resolver up to a fifth of its CPU, but the
// monotonic clock without one. The two differ by the time that the machine was suspended, so that difference
// is what is read anew, once in suspendEvery.
func Elapsed() Instant {
	off := Instant(elapsedOffset.Load())
	if inTest {
		return Instant(time.Now().UnixNano()) + off
	}
	up := time.Since(started)
	if last := suspendRead.Load(); up-time.Duration(last) >= suspendEvery && suspendRead.CompareAndSwap(last, int64(up)) {
		// Read in this order the difference is never too large, and the largest so far is kept: nothing steps
		// back.
		b := boottime()
		slept := int64(b) - int64(time.Since(started))
		for old := suspended.Load(); slept > old && !suspended.CompareAndSwap(old, slept); old = suspended.Load() {
		}
	}
	return Instant(suspended.Load()) + Instant(up) + off
}

// suspendEvery is how long after the machine woke up Elapsed may still be without the time it slept.
const suspendEvery = 10 * time.Millisecond

var (
	started     = time.Now()
	suspended   atomic.Int64 // CLOCK_BOOTTIME less the monotonic time since started, in nanoseconds
	suspendRead atomic.Int64 // when that was read, in nanoseconds since started
)

func init() { suspended.Store(int64(boottime()) - int64(time.Since(started))) }

// origin is how long before the machine's start the origin is: a process whose clock Follow turns back by
// decades still has Instants above 0.
const origin = Instant(40 * 365 * 24 * time.Hour)

// boottime reads CLOCK_BOOTTIME.
func boottime() Instant {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		// Kernels older than 2.6.39 lack it; Go needs a newer one. Without a clock nothing here is safe.
		panic("clock: CLOCK_BOOTTIME: " + err.Error())
	}
	return origin + Instant(ts.Nano())
}

// Wall returns the date. It has no monotonic reading: a duration must never be computed from it.
func Wall() time.Time {
	return time.Now().Round(0).Add(time.Duration(elapsedOffset.Load() + wallOffset.Load()))
}
