package forward

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/forward/upstream"
	"github.com/sluice-dns/sluice/resolver/internal/iterator"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
	"github.com/sluice-dns/sluice/resolver/internal/selection"
)

// TestReplay replays how a cloud's DNS failed on 14 and 26 November 2020: every query went to several resolvers and a
// quorum of answers was collected; new ones ran as shadows with a deliberate delay; a mistake in the configuration made
// the chooser wait for all of them, and the old ones did not answer while they took in a new configuration. Clients gave
// up after seconds.
//
// Each replay is run once as this package is, and once with its safeguard switched off: then it has to fail.
func TestReplay(t *testing.T) {
	for _, tt := range []struct {
		name         string
		safe, unsafe func(t *testing.T) (complaint string)
	}{
		{"yandex-2020-quorum-needs-all",
			func(t *testing.T) string { return quorumNeedsAll(t, true) }, func(t *testing.T) string { return quorumNeedsAll(t, false) }},
		{"yandex-2020-shadow-is-slow",
			func(t *testing.T) string { return shadowIsSlow(t, true) }, func(t *testing.T) string { return shadowIsSlow(t, false) }},
		{"yandex-2020-reload-under-load",
			func(t *testing.T) string { return reloadUnderLoad(t, true) }, func(t *testing.T) string { return reloadUnderLoad(t, false) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if c := tt.safe(t); c != "" {
				t.Error(c)
			}
			if tt.unsafe(t) == "" {
				t.Error("passes with its safeguard switched off: it shows nothing")
			}
		})
	}
}

// patience of a client, after which an answer is of no use to it; a stub resolver waits about as long.
const patience = 2 * time.Second

// quorumNeedsAll: three primaries of which two must agree, two spares and a shadow that are slow by design, and a
// configuration that asks for all six. The safeguard refuses it; without it, the pool is what was asked for.
func quorumNeedsAll(t *testing.T, safeguard bool) (complaint string) {
	const good, slow = "10ms 60 A 192.0.2.80", "3s 60 A 192.0.2.80"
	bubble(t, []string{good, good, good, slow, slow, slow}, func(r *rig) {
		running := r.spec(Quorum, 2, "primary", "primary", "primary", "spare", "spare", "shadow")
		mistaken := running
		mistaken.Quorum = 6
		p := r.pool(running)
		if safeguard {
			if next, err := New(mistaken, r.options()); err == nil {
				next.Close()
				complaint = "a quorum of all is accepted"
				return
			} else if want := "a quorum of 6 of 3 primaries"; !strings.Contains(err.Error(), want) {
				complaint = fmt.Sprintf("refused with %q, want %q", err, want)
				return
			}
		} else { // the roles are lost with the check that knows them, as they were then
			for i := range mistaken.Upstreams {
				mistaken.Upstreams[i].Role = Primary
			}
			var err error
			if p, err = build(mistaken, r.options()); err != nil {
				t.Fatal(err)
			}
			r.opened = append(r.opened, p)
		}
		complaint = r.load(p, "", 100)
	})
	return complaint
}

// load asks n names one after the other and returns what is wrong with the answers.
func (r *rig) load(p *Pool, prefix string, n int) (complaint string) {
	late, worst := 0, time.Duration(0)
	for i := range n {
		got, _, took := ask(r.t.Context(), p, fmt.Sprintf("%sn%d.example.com.", prefix, i))
		if got != "NOERROR, A 192.0.2.80" {
			return got
		}
		if took > patience {
			late++
		}
		worst = max(worst, took)
	}
	if late > 0 || worst > 60*time.Millisecond {
		return fmt.Sprintf("%d of %d answers came when clients had gone; the slowest took %v", late, n, worst)
	}
	return ""
}

// shadowIsSlow: shadows that take three seconds, then answer nothing, then lie, beside primaries that are well. The
// safeguard is that nobody waits for what Observe does; without it, the pool tells a shadow of an answer and waits.
func shadowIsSlow(t *testing.T, safeguard bool) (complaint string) {
	const good = "10ms 60 A 192.0.2.80"
	for _, s := range []struct {
		strategy Strategy
		quorum   int
	}{{Fastest, 0}, {Hedged, 0}, {Race, 0}, {Quorum, 2}} {
		bubble(t, []string{good, good, "3s 60 A 192.0.2.80", "3s 60 A 192.0.2.80"}, func(r *rig) {
			p := r.pool(r.spec(s.strategy, s.quorum, "primary", "primary", "shadow", "shadow"))
			if !safeguard {
				p.shadows = waiting{p}
			}
			for _, does := range []string{"3s 60 A 192.0.2.80", "silent", "0s 60 A 203.0.113.66", "0s SERVFAIL"} {
				r.up[2].do(does)
				r.up[3].do(does)
				if c := r.load(p, "x"+fmt.Sprint(len(does)), 30); c != "" {
					complaint = fmt.Sprintf("strategy %d beside shadows that do %q: %s", s.strategy, does, c)
					return
				}
			}
			if r.up[2].count() == 0 || r.up[3].count() == 0 {
				complaint = "the shadow was never asked: this shows nothing"
			}
		})
		if complaint != "" {
			return complaint
		}
	}
	return ""
}

// waiting is shadows that are waited for.
type waiting struct{ p *Pool }

func (w waiting) Observe(a query.Ask, answered upstream.Fingerprint) {
	settled := func() (n uint64) {
		for _, c := range w.p.set.Counters() {
			n += c.Same.Load() + c.Different.Load() + c.Failed.Load() + c.TimedOut.Load() + c.Skipped.Load()
		}
		return n
	}
	before := settled()
	w.p.set.Observe(a, answered)
	for settled() < before+uint64(len(w.p.set.Counters())) {
		time.Sleep(time.Millisecond)
	}
}

// reloadUnderLoad: a zone's resolvers are changed ten times a second, there and back, while 200 queries a second go on.
// None may be lost or take 50 ms longer than without. The safeguard is that a new table of zones takes the place of the
// old at once while those under way end with what they began with; without it, the old goes before the new is there.
func reloadUnderLoad(t *testing.T, safeguard bool) (complaint string) {
	const (
		baseline = 10 * time.Millisecond
		queries  = 1000
		every    = 5 * time.Millisecond
		building = 60 * time.Millisecond // of a new configuration
	)
	bubble(t, []string{"10ms 60 A 192.0.2.80", "10ms 60 A 192.0.2.80"}, func(r *rig) {
		it := iterator.New(iterator.Options{
			RRsets: rrcache.New(rrcache.Options{Bytes: 8 << 20}), Servers: selection.New(selection.Options{}), Exchange: r.x,
			Hints: []iterator.Hint{}, Zones: nil, DoNotQuery: []netip.Prefix{},
		})
		set := func(p *Pool) {
			if p == nil {
				it.SetZones(nil)
				return
			}
			it.SetZones([]iterator.Zone{{Name: dnsname.Root, Forward: p}})
		}
		pools := make([]Spec, 2)
		for i := range pools {
			pools[i] = Spec{Upstreams: []Upstream{{Spec: upstream.Spec{Addr: r.up[i].addr}}}}
		}
		now := r.pool(pools[0])
		set(now)

		done := make(chan struct{})
		var reloading, asking sync.WaitGroup
		reloads := 0
		reloading.Go(func() {
			for i := 1; ; i++ {
				select {
				case <-done:
					return
				case <-time.After(100*time.Millisecond - building):
				}
				if !safeguard {
					set(nil)
				}
				time.Sleep(building)
				next, err := New(pools[i%2], r.options())
				if err != nil {
					panic(err)
				}
				set(next)
				old := now
				reloading.Go(func() { old.Close() })
				now = next
				reloads++
			}
		})
		var mu sync.Mutex
		lost, slow, why := 0, 0, ""
		for i := range queries {
			asking.Go(func() {
				q := query.Question{Name: dnsname.MustParse(fmt.Sprintf("n%d.example.com.", i)), Type: 1, Class: 1}
				start := clock.Elapsed()
				_, err := it.Resolve(r.t.Context(), query.NewTree(start, query.Budget{}), q)
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err != nil:
					lost, why = lost+1, err.Error()
				case clock.Elapsed().Sub(start) > baseline+50*time.Millisecond:
					slow++
				}
			})
			time.Sleep(every)
		}
		asking.Wait()
		close(done)
		reloading.Wait()
		synctest.Wait()
		now.Close()
		switch {
		case lost > 0 || slow > 0:
			complaint = fmt.Sprintf("of %d queries %d were lost and %d slow, over %d reloads: %s", queries, lost, slow, reloads, why)
		case reloads < 40 || r.up[0].count() < queries/3 || r.up[1].count() < queries/3:
			complaint = fmt.Sprintf("%d reloads, questions %v: too few to show anything", reloads, r.counts())
		}
	})
	return complaint
}
