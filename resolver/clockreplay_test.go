package resolver_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/iterator"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/selection"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// TestReplay plays the leap second of 1 January 2017 again, when a large resolver measured round-trip times with
// a clock that stepped back, averaged negative times, and panicked while choosing servers: the date steps while
// clients ask. No query fails, no estimate is negative or absurd, TTLs and backoffs run on as if nothing were.
//
// Each has a negative control: an estimator of that kind, fed with the same exchanges timed by the date, breaks.
func TestReplay(t *testing.T) {
	const hour, year = 3600, 365 * 86400
	for _, c := range []struct {
		name    string
		offsets []int64 // of the date, in seconds, one after the other
	}{
		{"rrdns-2017-clock-steps-back", []int64{-1, 0, -hour, 0, -10 * year, 0}},
		{"rrdns-2017-clock-steps-forward", []int64{1, 0, hour, 0, 10 * year, 0}},
		{"rrdns-2017-leap-second-under-load", []int64{0, -1, -2, -1, -2, -3, -2, -3, 0, -1, 1, 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Run("clients", func(t *testing.T) { clockClients(t, c.offsets) })
			t.Run("estimates", func(t *testing.T) { clockEstimates(t, c.offsets) })
		})
	}
}

// A wallFile moves the date of this process, as the setting testing.wall_file does.
type wallFile struct {
	name string
	stop func()
}

func followWall(t *testing.T) *wallFile {
	t.Helper()
	w := &wallFile{name: filepath.Join(t.TempDir(), "wall")}
	w.write(t, 0)
	ctx, cancel := context.WithCancel(context.Background())
	wait, err := clock.Follow(ctx, "", w.name)
	if err != nil {
		t.Fatal(err)
	}
	w.stop = sync.OnceFunc(func() {
		w.write(t, 0)
		time.Sleep(20 * time.Millisecond) // it is read every few milliseconds
		cancel()
		wait()
	})
	return w
}

func (w *wallFile) write(t *testing.T, seconds int64) {
	t.Helper()
	if err := os.WriteFile(w.name, []byte(strconv.FormatInt(seconds, 10)), 0o600); err != nil {
		t.Fatal(err)
	}
}

// loadZone has a fast, a slow and a silent server.
func loadZone() siminternet.Zone {
	return siminternet.Zone{Name: "load.lab.", Servers: addressesOf(3), Records: "* A 198.51.100.1\nlong 3000 A 198.51.100.2"}
}

func loadServers(in *siminternet.Internet) {
	a := addressesOf(3)
	in.SetBehaviour(a[0], siminternet.Behaviour{Delay: 20 * time.Millisecond})
	in.SetBehaviour(a[1], siminternet.Behaviour{Delay: 150 * time.Millisecond})
	in.SetBehaviour(a[2], siminternet.Behaviour{Silent: true})
}

// clockClients asks a whole resolver while the date steps.
func clockClients(t *testing.T, offsets []int64) {
	assault(t, zones{loadZone(), zoneAt("dead.lab.", victim1, "* A 198.51.100.9")}, nil, func(l *lab) {
		t := l.t
		w := followWall(t)
		defer w.stop()
		loadServers(l.sim)
		const signed = "www.ed25519.example."
		if m := l.must(signed, dns.TypeA); m.Rcode != 0 || !m.AuthenticatedData {
			t.Fatalf("%s", m)
		}
		l.must("long.load.lab.", dns.TypeA)
		began := time.Now()

		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		var asked, failed atomic.Int64
		for k := range 8 {
			wg.Go(func() {
				for i := 0; ctx.Err() == nil; i++ {
					name := []string{fmt.Sprintf("u%d-%d.load.lab.", k, i), "same.load.lab.", "long.load.lab.", signed}[i%4]
					m, err := l.ask(name, dns.TypeA, nil)
					if asked.Add(1); err != nil || m.Rcode != dns.RcodeSuccess {
						failed.Add(1)
						t.Errorf("%s: %v, %v", name, err, m)
						return
					}
					time.Sleep(40 * time.Millisecond)
				}
			})
		}
		for i, off := range offsets {
			time.Sleep(700 * time.Millisecond)
			// A failure remembered for a second is remembered across the step, and no longer.
			dead := fmt.Sprintf("d%d.dead.lab.", i)
			l.behave(victim1, siminternet.Behaviour{Lame: siminternet.LameServfail})
			if m := l.must(dead, dns.TypeA); m.Rcode != dns.RcodeServerFailure || extended(m) == 13 {
				t.Errorf("%s: %v", dead, m)
			}
			w.write(t, off)
			time.Sleep(300 * time.Millisecond)
			if m := l.must(dead, dns.TypeA); m.Rcode != dns.RcodeServerFailure || extended(m) != 13 {
				t.Errorf("the date is %d s off: the failure of %s is forgotten: %v", off, dead, m)
			}
			l.behave(victim1, siminternet.Behaviour{})
			time.Sleep(time.Second)
			if m := l.must(dead, dns.TypeA); m.Rcode != dns.RcodeSuccess {
				t.Errorf("the date is %d s off: the failure of %s is remembered for too long: %v", off, dead, m)
			}
			// A TTL runs by elapsed time.
			want := 3000 - int(time.Since(began)/time.Second)
			if got := int(l.must("long.load.lab.", dns.TypeA).Answer[0].Header().Ttl); got < want-1 || got > want+1 {
				t.Errorf("the date is %d s off: TTL %d, want %d", off, got, want)
			}
			// Signatures go by the date, as they must: nothing new can be validated years away.
			name := []string{"www.p384.test.", "www.ecdsa.com.", "www.rsa512.test.", "www.example.com.", "www.example.net.", "www.chain.example."}[i%6]
			m := l.must(name, dns.TypeA)
			switch far := off < -86400 || off > 60*86400; {
			case far && i < 6 && m.Rcode != dns.RcodeServerFailure:
				t.Errorf("%s is valid though the date is %d s off: %v", name, off, m)
			case !far && i < 6 && m.Rcode == dns.RcodeServerFailure:
				t.Errorf("the date is %d s off: %s: %v", off, name, m)
			}
		}
		cancel()
		wg.Wait()
		w.stop()
		// Back at the right date, what could not be validated can, once the memory of its being bogus has ended.
		time.Sleep(90 * time.Second)
		for _, name := range []string{"www.p384.test.", "www.ecdsa.com.", "www.rsa512.test.", "www.example.com.", "www.example.net."} {
			if m := l.must(name, dns.TypeA); m.Rcode != dns.RcodeSuccess || !m.AuthenticatedData {
				t.Errorf("at the right date again: %s: %v", name, m)
			}
		}
		t.Logf("%d queries, %d failed", asked.Load(), failed.Load())
	})
}

// timedByDate is an Exchange whose round-trip times are differences of the date, as in 2017: the mistake under
// test. It also feeds the estimator of that time.
type timedByDate struct {
	iterator.Exchange
	naive naive
}

func (x *timedByDate) Ask(ctx context.Context, tree *query.Tree, a query.Ask) (query.Reply, error) {
	sent := clock.Wall()
	r, err := x.Exchange.Ask(ctx, tree, a)
	if err == nil {
		r.RTT = clock.Wall().Sub(sent)
		x.naive.answered(a.Server, r.RTT)
	}
	return r, err
}

// naive is a weighted choice by smoothed round-trip times without any safeguard.
type naive struct {
	mu       sync.Mutex
	srtt     map[netip.AddrPort]time.Duration
	panics   int
	negative int
	absurd   int
}

func (n *naive) answered(server netip.AddrPort, rtt time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	defer func() {
		if recover() != nil {
			n.panics++
		}
	}()
	s, ok := n.srtt[server]
	if s += (rtt - s) / 8; !ok {
		s = rtt
	}
	n.srtt[server] = s
	switch {
	case rtt < 0:
		n.negative++
	case rtt > time.Second:
		n.absurd++
	}
	rand.Int64N(int64(s) + 1) // how its weight was drawn
}

// clockEstimates resolves without clients, so that the estimates can be looked at, with round-trip times as they
// are and as the date has them.
func clockEstimates(t *testing.T, offsets []int64) {
	for _, byDate := range []bool{false, true} {
		var wrong *timedByDate
		var servers *selection.Selector
		withRecursor(t, zones{loadZone()}, "", func(o *iterator.Options) {
			servers = o.Servers
			if byDate {
				wrong = &timedByDate{Exchange: o.Exchange, naive: naive{srtt: map[netip.AddrPort]time.Duration{}}}
				o.Exchange = wrong
			}
		}, func(r *recursor) {
			t := r.t
			w := followWall(t)
			defer w.stop()
			loadServers(r.sim)
			ctx, cancel := context.WithCancel(context.Background())
			var wg sync.WaitGroup
			var resolved atomic.Int64
			for k := range 8 {
				wg.Go(func() {
					for i := 0; ctx.Err() == nil; i++ {
						name := fmt.Sprintf("u%d-%d.load.lab.", k, i)
						u, err := r.iterator.Resolve(context.Background(), query.NewTree(clock.Elapsed(), query.Budget{}), question(name, dns.TypeA))
						if err != nil || len(u.Answer) != 1 {
							t.Errorf("%s: %v", name, err)
							return
						}
						resolved.Add(1)
					}
				})
			}
			look := func(off int64) {
				for _, a := range r.sim.Addrs() {
					s, ok := servers.Look(clock.Elapsed(), netip.AddrPortFrom(a, 53))
					if ok && (s.SRTT < 0 || s.SRTT > 400*time.Millisecond) {
						t.Errorf("the date is %d s off: the sRTT of %v is %v", off, a, s.SRTT)
					}
				}
			}
			for _, off := range offsets {
				time.Sleep(time.Second)
				w.write(t, off)
				time.Sleep(50 * time.Millisecond)
				if !byDate {
					look(off)
				}
			}
			time.Sleep(time.Second)
			cancel()
			wg.Wait()
			if resolved.Load() < 100 {
				t.Errorf("%d names resolved: no load", resolved.Load())
			}
			if !byDate {
				return
			}
			// A step forward by a few seconds looks like a slow answer; one back, or by more, is refused, and the
			// estimate begins anew.
			for _, a := range r.sim.Addrs() {
				if s, ok := servers.Look(clock.Elapsed(), netip.AddrPortFrom(a, 53)); ok && (s.SRTT < 0 || s.SRTT > 4*time.Second) {
					t.Errorf("timed by the date: the sRTT of %v is %v", a, s.SRTT)
				}
			}
			n := &wrong.naive
			t.Logf("%d names; negative control: %d negative samples, %d absurd ones, %d panics", resolved.Load(), n.negative, n.absurd, n.panics)
			if n.negative+n.absurd == 0 || n.negative > 0 && n.panics == 0 && strings.Contains(t.Name(), "back") {
				t.Errorf("the estimator of 2017 survives: the replay shows nothing")
			}
		})
	}
}
