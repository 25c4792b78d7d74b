package admin

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/limits"
)

// LiveLimits is Limits over the live table.
type LiveLimits struct {
	*limits.Live
	// Apply carries a changed limit to where Value alone does not: GOMEMLIMIT, caches, connections. Nil
	// means nowhere.
	Apply func(limits.Entry)
}

// Limits returns all rows in order of name.
func (l LiveLimits) Limits() []*adminv1.Limit {
	table, live := l.Table(), l.changes()
	var out []*adminv1.Limit
	for _, row := range table.Rows() {
		out = append(out, limitMessage(row, live))
	}
	slices.SortFunc(out, func(a, b *adminv1.Limit) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// changes returns the changes in force, by name, as the audit has them.
func (l LiveLimits) changes() map[string]limits.Entry {
	live := map[string]limits.Entry{}
	for _, e := range l.Audit() {
		if e.Reverted {
			delete(live, e.Name)
		} else {
			live[e.Name] = e
		}
	}
	return live
}

func limitMessage(row limits.Row, live map[string]limits.Entry) *adminv1.Limit {
	m := &adminv1.Limit{Name: row.Name, Value: strconv.FormatInt(row.Value, 10), Unit: row.Unit, From: row.From}
	if e, ok := live[row.Name]; ok {
		m.Why = e.Why
		if e.For > 0 {
			m.Until = e.At.Add(e.For).Unix()
		}
	}
	return m
}

// Set changes a limit. A value is a number, or bytes with KiB, MiB or GiB.
func (l LiveLimits) Set(name, value string, d time.Duration, why string) (*adminv1.Limit, error) {
	n, err := l.byName(name)
	if err != nil {
		return nil, err
	}
	table := l.Table()
	v, err := parseValue(value, table.Row(n).Unit == "bytes")
	if err != nil {
		return nil, err
	}
	e, err := l.Live.Set(n, v, d, why, now())
	return l.applied(n, e, err)
}

// Reset gives a limit back to the configuration and the class.
func (l LiveLimits) Reset(name string) (*adminv1.Limit, error) {
	n, err := l.byName(name)
	if err != nil {
		return nil, err
	}
	e, err := l.Live.Reset(n, "reset by an operator", now())
	return l.applied(n, e, err)
}

func (l LiveLimits) applied(n limits.Name, e limits.Entry, err error) (*adminv1.Limit, error) {
	if err != nil {
		return nil, err
	}
	if l.Apply != nil {
		l.Apply(e)
	}
	table := l.Table()
	return limitMessage(table.Row(n), l.changes()), nil
}

func (l LiveLimits) byName(name string) (limits.Name, error) {
	n, ok := limits.ByName(name)
	if !ok {
		return 0, fmt.Errorf("limit %.80q: %w; there are %s", name, ErrNotFound, limitNames(l.Limits()))
	}
	return n, nil
}

func now() limits.Now { return limits.Now{Elapsed: clock.Elapsed(), Wall: clock.Wall()} }

func parseValue(s string, bytes bool) (int64, error) {
	digits, shift := s, 0
	if bytes {
		for unit, sh := range map[string]int{"KiB": 10, "MiB": 20, "GiB": 30} {
			if d, ok := strings.CutSuffix(s, unit); ok {
				digits, shift = strings.TrimSpace(d), sh
			}
		}
	}
	n, err := strconv.ParseUint(digits, 10, 63)
	switch {
	case err != nil && bytes:
		return 0, &FieldError{"value", fmt.Sprintf("%.80q is not a number of bytes; write for example 512MiB", s)}
	case err != nil:
		return 0, &FieldError{"value", fmt.Sprintf("%.80q is not a whole number", s)}
	case n > math.MaxInt64>>shift:
		return 0, &FieldError{"value", fmt.Sprintf("%.80q is more than can be counted", s)}
	}
	return int64(n) << shift, nil
}
