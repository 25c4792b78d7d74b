package resolver_test

import (
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/selection"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// Section E: how long things are waited for and remembered, as far as it can be seen from outside. How servers are
// chosen by their times is in package selection.

var rowsE = []limitRow{
	{"first timeout: of a server not known", "milliseconds; whether it is always waited for so long", 376, "true", "false", func(_ *testing.T, n int) string {
		return fmt.Sprint(patience(0) >= time.Duration(n)*time.Millisecond)
	}},
	{"first timeout: the least", "milliseconds that a server which answers in 1 ms is waited for at least; whether it is", 50, "true", "false", func(_ *testing.T, n int) string {
		return fmt.Sprint(patience(time.Millisecond) >= time.Duration(n)*time.Millisecond)
	}},
	{"first timeout: the most", "milliseconds that a server which answers in 2 s is waited for; whether it is", 1500, "true", "false", func(_ *testing.T, n int) string {
		return fmt.Sprint(patience(2*time.Second) >= time.Duration(n)*time.Millisecond)
	}},
	{"dead servers: the first rest", "seconds since the third timeout in a row; whether the server is asked", 59, "false", "true", func(_ *testing.T, n int) string {
		return rested(1, time.Duration(n)*time.Second+time.Millisecond)
	}},
	{"dead servers: the longest rest", "seconds since the last of many timeouts; whether the server is asked", 899, "false", "true", func(_ *testing.T, n int) string {
		return rested(9, time.Duration(n)*time.Second+time.Millisecond)
	}},
	{"failures: the first is remembered for", "tenths of a second until the question comes again; whether servers are asked", 9, "false", "true", func(t *testing.T, n int) string {
		return failedAgain(t, 1, time.Duration(n)*100*time.Millisecond+50*time.Millisecond)
	}},
	{"failures: the second is remembered for", "seconds until the question comes again; whether servers are asked", 4, "false", "true", func(t *testing.T, n int) string {
		return failedAgain(t, 2, time.Duration(n)*time.Second+500*time.Millisecond)
	}},
	{"failures: the longest is remembered for", "seconds until the question comes again after eight failures; whether servers are asked", 59, "false", "true", func(t *testing.T, n int) string {
		return failedAgain(t, 8, time.Duration(n)*time.Second+500*time.Millisecond)
	}},
	{"bogus answers are remembered for", "seconds until the question comes again; whether servers are asked", 59, "false", "true", func(t *testing.T, n int) (out string) {
		onHistory(t, nil, func(h *history) {
			if got := h.get("bad.signed.example.", dns.TypeA, nil); got.Rcode != dns.RcodeServerFailure {
				t.Error(got)
			}
			time.Sleep(time.Duration(n)*time.Second + 500*time.Millisecond)
			out = fmt.Sprint(h.get("bad.signed.example.", dns.TypeA, nil).sent > 0)
		})
		return out
	}},
	{"TTL: the most", "seconds since a record with a TTL of ten years was fetched; questions sent for it", 86399, "0", "1", func(t *testing.T, n int) (out string) {
		onZones(t, func() []siminternet.Zone { // in the root zone, which nobody grants for a time
			root := cacheZones()[0]
			root.Records = "eternal 315360000 A 198.51.100.4"
			return []siminternet.Zone{root, cacheZones()[1]}
		}, nil, func(h *history) {
			h.get("eternal.", dns.TypeA, nil)
			time.Sleep(time.Duration(n) * time.Second)
			h.sim.ResetLog()
			h.get("eternal.", dns.TypeA, nil)
			out = some(h.sim.Count(func(e siminternet.LogEntry) bool { return e.Is("eternal.", dns.TypeA) }))
		})
		return out
	}},
	{"TTL: the most of a denial", "seconds since a name was denied for a day; questions sent for it", 3599, "0", "1", func(t *testing.T, n int) (out string) {
		z := zoneAt("neg.lab.", victim1, "@ 86400 SOA ns1 hostmaster 1 2 3 4 86400")
		assault(t, zones{z}, func(o *resolver.Options) { o.Cache.MaxNegativeTTL = time.Hour }, func(l *lab) {
			l.must("nx.neg.lab.", dns.TypeA)
			time.Sleep(time.Duration(n) * time.Second)
			l.sim.ResetLog()
			l.must("nx.neg.lab.", dns.TypeA)
			out = some(l.sim.Count(func(e siminternet.LogEntry) bool { return e.Is("nx.neg.lab.", dns.TypeA) }))
		})
		return out
	}},
	{"serve-stale: the TTL that stale data is given with", "seconds; whether it has at least so many", 30, "true", "false", func(t *testing.T, n int) (out string) {
		onHistory(t, stale(0), func(h *history) {
			h.get("brief.plain.lab.", dns.TypeA, nil)
			time.Sleep(time.Minute)
			h.silence(true, plainServer)
			out = fmt.Sprint(h.get("brief.plain.lab.", dns.TypeA, nil).ttl() >= n)
		})
		return out
	}},
	{"serve-stale: servers that failed are left alone for", "seconds; whether they are asked then", 29, "false", "true", func(t *testing.T, n int) (out string) {
		onHistory(t, stale(1800*time.Millisecond), func(h *history) {
			h.get("brief.plain.lab.", dns.TypeA, nil)
			time.Sleep(time.Minute)
			h.sim.SetBehaviour(plainServer, siminternet.Behaviour{Lame: siminternet.LameRefused})
			if got := h.get("brief.plain.lab.", dns.TypeA, nil); got.ttl() != 30 || got.sent == 0 {
				t.Error(got)
			}
			time.Sleep(time.Duration(n)*time.Second + 500*time.Millisecond)
			out = fmt.Sprint(h.get("brief.plain.lab.", dns.TypeA, nil).sent > 0)
		})
		return out
	}},
}

// onHistory runs f against a resolver in the Internet of cacheZones.
func onHistory(t *testing.T, edit func(*resolver.Options), f func(h *history)) {
	t.Helper()
	onZones(t, cacheZones, edit, f)
}

func onZones(t *testing.T, all func() []siminternet.Zone, edit func(*resolver.Options), f func(h *history)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		sim, err := siminternet.New(time.Now(), all()...)
		if err != nil {
			t.Fatal(err)
		}
		l := newLabIn(t, sim, edit)
		defer l.stop()
		f(&history{l, time.Now()})
	})
}

// patience is how long a server is waited for, at least, that answers in the given time; 0 stands for one that never answered.
func patience(rtt time.Duration) time.Duration {
	s, now, server := selection.New(selection.Options{}), clock.Instant(time.Hour), netip.MustParseAddrPort("192.0.2.1:53")
	for range 50 { // until the variation is small
		if rtt > 0 {
			s.Answered(now, server, rtt)
		}
	}
	least := time.Hour
	for range 1000 { // that for an unknown server varies
		c, _ := s.Pick(now, ".", []netip.AddrPort{server}, nil)
		least = min(least, c.Patience)
	}
	return least
}

// rested makes a server fail for so many rests in a row and reports whether it is asked, beside one that works, after
// so much of the last of them.
func rested(rests int, after time.Duration) string {
	s, now := selection.New(selection.Options{}), clock.Instant(time.Hour)
	dead := netip.MustParseAddrPort("192.0.2.1:53")
	for i := range rests {
		failures := 3
		if i > 0 {
			now, failures = now.Add(time.Hour), 1 // the probe
		}
		for range failures {
			now = now.Add(2 * time.Second)
			s.TimedOut(now, dead, now.Add(-time.Second))
		}
	}
	k, _ := s.Look(now.Add(after), dead)
	return fmt.Sprint(!k.Resting)
}

// failedAgain asks for a name whose servers refuse, so often that it has failed so many times, and reports whether
// they are asked again after so much of the last time.
func failedAgain(t *testing.T, times int, after time.Duration) (out string) {
	assault(t, zones{refusing}, nil, func(l *lab) {
		for _, a := range l.sim.Servers("refused.lab.") {
			l.sim.SetBehaviour(a, siminternet.Behaviour{Lame: siminternet.LameRefused})
		}
		for i := range times {
			if i > 0 {
				time.Sleep(61 * time.Second)
			}
			if m := l.must("w.refused.lab.", dns.TypeA); m.Rcode != dns.RcodeServerFailure {
				t.Error(m)
			}
		}
		time.Sleep(after)
		l.sim.ResetLog()
		l.must("w.refused.lab.", dns.TypeA)
		out = fmt.Sprint(sentTo(l.sim) > 0)
	})
	return out
}
