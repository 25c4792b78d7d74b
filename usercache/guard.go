package usercache

import (
	"fmt"
	"time"

	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

// Totals is what a shrink guard watches.
type Totals struct {
	Users        uint64 // in other datasets: records
	EnabledUsers uint64
	Devices      uint64
	RecordBytes  uint64
}

// each calls f with the name and both values of every total.
func (t *Totals) each(o *Totals, f func(name string, a, b uint64)) {
	f("users", t.Users, o.Users)
	f("enabled users", t.EnabledUsers, o.EnabledUsers)
	f("devices", t.Devices, o.Devices)
	f("record bytes", t.RecordBytes, o.RecordBytes)
}

func (t *Totals) maximum(o Totals) {
	t.Users = max(t.Users, o.Users)
	t.EnabledUsers = max(t.EnabledUsers, o.EnabledUsers)
	t.Devices = max(t.Devices, o.Devices)
	t.RecordBytes = max(t.RecordBytes, o.RecordBytes)
}

// GuardOptions tunes a shrink guard. Every zero field means the default stated on it.
type GuardOptions struct {
	// Share of a total that may go within Window. Zero means 0.1; 1 or more switches the guard off.
	Share float64
	// Min is how many must be lost before the share matters. Zero means 20. For record bytes it stands for
	// so many records of average size.
	Min uint64
	// Window is how far back a maximum counts. Zero means 24 hours.
	Window time.Duration
}

// A guard compares totals with their maxima of the last 24 hours. It is a value of the dataset, under its
// lock; time is an argument.
type guard struct {
	opts  GuardOptions
	hours []guardHour // oldest first, each of one hour; at most maxGuardHours
	// acceptedThrough: removals up to this revision are wanted.
	acceptedThrough uint64
}

type guardHour struct {
	hour int64 // Unix seconds
	max  Totals
}

const maxGuardHours = 25

func newGuard(o GuardOptions) guard {
	if o.Share == 0 {
		o.Share = 0.1
	}
	if o.Min == 0 {
		o.Min = 20
	}
	if o.Window == 0 {
		o.Window = 24 * time.Hour
	}
	return guard{opts: o}
}

// observe remembers totals that the dataset has.
func (g *guard) observe(t Totals, now time.Time) {
	hour := now.Truncate(time.Hour).Unix()
	for len(g.hours) > 0 && g.hours[0].hour < now.Add(-g.opts.Window).Unix()-3600 {
		g.hours = g.hours[1:]
	}
	n := len(g.hours)
	// A date that has stepped back is counted in the newest hour.
	if n > 0 && g.hours[n-1].hour >= hour {
		g.hours[n-1].max.maximum(t)
		return
	}
	g.hours = append(g.hours, guardHour{hour, t})
	if len(g.hours) > maxGuardHours {
		g.hours = g.hours[1:]
	}
}

// A loss is what a guard finds missing: the zero loss is none.
type loss uint8

const (
	lostUsers loss = 1 << iota
	lostEnabled
	lostDevices
	lostBytes
)

// loss returns which totals have shrunk too far below their maxima.
func (g *guard) loss(t Totals) loss {
	if g.opts.Share >= 1 {
		return 0
	}
	var peak Totals
	for i := range g.hours {
		peak.maximum(g.hours[i].max)
	}
	var l loss
	bit := loss(1)
	t.each(&peak, func(name string, now, before uint64) {
		if before > now {
			lost, least := before-now, g.opts.Min
			if name == "record bytes" {
				least = least * before / max(1, peak.Users)
			}
			if lost > least && float64(lost) > g.opts.Share*float64(before) {
				l |= bit
			}
		}
		bit <<= 1
	})
	return l
}

// describe says for people what has been lost.
func (g *guard) describe(t Totals) string {
	var peak Totals
	for i := range g.hours {
		peak.maximum(g.hours[i].max)
	}
	s := ""
	l, bit := g.loss(t), loss(1)
	t.each(&peak, func(name string, now, before uint64) {
		if l&bit != 0 {
			if s != "" {
				s += ", "
			}
			s += fmt.Sprintf("%s %d, were %d", name, now, before)
		}
		bit <<= 1
	})
	return s
}

// accept makes what the dataset has now the new measure.
func (g *guard) accept(through uint64, t Totals, now time.Time) {
	g.acceptedThrough = max(g.acceptedThrough, through)
	g.hours = nil
	g.observe(t, now)
}

func (g *guard) message(tripped bool) *storev1.Guard {
	m := &storev1.Guard{Tripped: tripped, AcceptedThrough: g.acceptedThrough}
	for _, h := range g.hours {
		m.Hours = append(m.Hours, &storev1.GuardHour{Hour: h.hour, Max: h.max.message()})
	}
	return m
}

func (g *guard) restore(m *storev1.Guard) {
	g.acceptedThrough = m.GetAcceptedThrough()
	g.hours = nil
	for _, h := range m.GetHours() {
		if len(g.hours) < maxGuardHours {
			g.hours = append(g.hours, guardHour{h.GetHour(), totalsOf(h.GetMax())})
		}
	}
}

func (t Totals) message() *userv1.Totals {
	return &userv1.Totals{Users: t.Users, EnabledUsers: t.EnabledUsers, Devices: t.Devices, RecordBytes: t.RecordBytes}
}

func totalsOf(m *userv1.Totals) Totals {
	return Totals{Users: m.GetUsers(), EnabledUsers: m.GetEnabledUsers(), Devices: m.GetDevices(), RecordBytes: m.GetRecordBytes()}
}
