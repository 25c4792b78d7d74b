package limits

import (
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
)

// A Live is a table that can be changed while it is used. Value is for the hot
// path. It is safe for concurrent use.
//
// A change is judged like a configuration: For makes the whole table anew, so
// that what follows from the changed limit follows, and a change that does not
// fit is refused.
type Live struct {
	machine Machine
	options Options // as the configuration has it

	values [rows]atomic.Int64

	mu      sync.Mutex // guards everything below
	table   Table
	changes map[Name]change
	audit   []Entry // the newest auditSize, oldest first
}

type change struct {
	value   int64
	expires clock.Instant // clock.Never for good
	why     string
}

// auditSize bounds the entries that are kept; every one is also returned to the
// caller, who logs it.
const auditSize = 256

// An Entry says what was changed, when, how long for and why.
type Entry struct {
	At       time.Time     `json:"at"`
	Name     string        `json:"name"`
	Old      int64         `json:"old"`
	New      int64         `json:"new"`
	For      time.Duration `json:"for"` // 0: until it is changed or reset
	Why      string        `json:"why"`
	Expired  bool          `json:"expired,omitempty"` // the time of a change ran out
	Reverted bool          `json:"reverted,omitempty"`
}

// Now is the present on both clocks: Elapsed decides when a change expires, Wall
// is written into the audit.
type Now struct {
	Elapsed clock.Instant
	Wall    time.Time
}

// NewLive makes the table of a machine and lets it be changed.
func NewLive(m Machine, o Options) (*Live, error) {
	o.Set, o.SetFrom = maps.Clone(o.Set), maps.Clone(o.SetFrom)
	t, err := For(m, o)
	if err != nil {
		return nil, err
	}
	l := &Live{machine: m, options: o, changes: map[Name]change{}}
	l.store(t)
	return l, nil
}

// Value returns a limit as it is now. It costs one atomic load.
func (l *Live) Value(n Name) int64 { return l.values[n].Load() }

// Table returns all limits as they are now.
func (l *Live) Table() Table {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.table
}

// Audit returns the last changes, oldest first.
func (l *Live) Audit() []Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]Entry(nil), l.audit...)
}

// Set changes a limit for a time; 0 means until it is changed or reset. The
// caller applies what Value alone does not, such as GOMEMLIMIT.
func (l *Live) Set(n Name, value int64, d time.Duration, why string, now Now) (Entry, error) {
	if d < 0 {
		return Entry{}, &Error{n.String(), fmt.Sprintf("cannot be set for %v", d), "a time that is not negative"}
	}
	if err := settable(n, value); err != nil {
		return Entry{}, err
	}
	c := change{value: value, expires: clock.Never, why: why}
	if d > 0 {
		c.expires = now.Elapsed.Add(d)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	changes := maps.Clone(l.changes)
	changes[n] = c
	e := Entry{At: now.Wall, Name: n.String(), Old: l.table.Value(n), For: d, Why: why}
	if err := l.apply(changes); err != nil {
		return Entry{}, err
	}
	e.New = l.table.Value(n)
	l.note(e)
	return e, nil
}

// Reset gives a limit back to the configuration and the class.
func (l *Live) Reset(n Name, why string, now Now) (Entry, error) {
	if !n.Settable() {
		return Entry{}, settable(n, 0)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	e := Entry{At: now.Wall, Name: n.String(), Old: l.table.Value(n), Why: why, Reverted: true}
	changes := maps.Clone(l.changes)
	delete(changes, n)
	if err := l.apply(changes); err != nil {
		return Entry{}, fmt.Errorf("without this change another no longer fits: %w", err)
	}
	e.New = l.table.Value(n)
	l.note(e)
	return e, nil
}

// Expire ends the changes whose time has run out and returns them. Changes that
// only fitted beside an expired one end with it. The owner calls it every second
// or so.
func (l *Live) Expire(now Now) []Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	kept := maps.Clone(l.changes)
	maps.DeleteFunc(kept, func(_ Name, c change) bool { return !now.Elapsed.Before(c.expires) })
	if len(kept) == len(l.changes) {
		return nil
	}
	before, old := l.changes, l.table
	if l.apply(kept) != nil {
		// The configuration by itself fits, or there would be no Live.
		_ = l.apply(map[Name]change{})
	}
	var ended []Entry
	for n := range rows {
		if c, was := before[n]; was {
			if _, is := l.changes[n]; !is {
				e := Entry{At: now.Wall, Name: n.String(), Old: old.Value(n), New: l.table.Value(n), Why: c.why, Expired: true, Reverted: true}
				l.note(e)
				ended = append(ended, e)
			}
		}
	}
	return ended
}

// apply makes the table with these changes, or leaves everything as it is.
func (l *Live) apply(changes map[Name]change) error {
	o := l.options
	o.Set, o.SetFrom = maps.Clone(o.Set), maps.Clone(o.SetFrom)
	if o.Set == nil {
		o.Set = map[Name]int64{}
	}
	if o.SetFrom == nil {
		o.SetFrom = map[Name]string{}
	}
	for n, c := range changes {
		o.Set[n] = c.value
		o.SetFrom[n] = "set live"
		if c.why != "" {
			o.SetFrom[n] += ": " + c.why
		}
	}
	t, err := For(l.machine, o)
	if err != nil {
		return err
	}
	l.changes = changes
	l.store(t)
	return nil
}

func (l *Live) store(t Table) {
	l.table = t
	for n := range rows {
		l.values[n].Store(t.rows[n].Value)
	}
}

func (l *Live) note(e Entry) {
	if len(l.audit) == auditSize {
		l.audit = append(l.audit[:0], l.audit[1:]...)
	}
	l.audit = append(l.audit, e)
}
