package overload

import (
	"fmt"
	"testing"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// asking sends queries of identified clients.
type asking struct {
	g       *Gate
	scratch []*query.Scratch // of as many workers
}

func newAsking(workers int) asking {
	a := asking{g: New(Options{Seed: 7})}
	for w := range workers {
		a.scratch = append(a.scratch, &query.Scratch{Worker: w + 1})
	}
	return a
}

// passed returns how many of n queries are admitted, spread over the workers.
func (a asking) passed(t *testing.T, p usercache.Profile, tr query.Transport, n int, at time.Duration) (passed int) {
	t.Helper()
	for i := range n {
		q := from(tr, "192.0.2.1")
		q.Arrived, q.Client.Kind, q.Client.Profile, q.Scratch = clock.Instant(at), query.Identified, p, a.scratch[i%len(a.scratch)]
		switch why := a.g.Late(q); why {
		case query.NotRefused:
			passed++
		case query.RefuseUserRate:
		default:
			t.Fatalf("refused: %v", why)
		}
	}
	return passed
}

func limited(user uint32, device string, rate, burst uint32) usercache.Profile {
	p := usercache.Profile{User: user, RateLimit: rate, RateBurst: burst}
	p.DeviceID, _ = usercache.ParseID(device)
	return p
}

func TestRateOfUsers(t *testing.T) {
	own := limited(1, "kid", 10, 0)
	own.Flags |= usercache.DeviceRate
	for _, workers := range []int{1, 4} {
		a := newAsking(workers)
		t0 := 5 * time.Hour
		for _, c := range []struct {
			what string
			p    usercache.Profile
			tr   query.Transport
			n    int
			at   time.Duration
			want int
		}{
			{"at once", limited(1, "pc", 100, 0), query.UDP, 300, 0, 100},
			{"another transport", limited(1, "pc", 100, 0), query.DoH, 10, 0, 0},
			{"another device of the user", limited(1, "tv", 100, 0), query.TCP, 10, 0, 0},
			{"a device with its own", own, query.UDP, 30, 0, 10},
			{"another user", limited(2, "pc", 100, 0), query.UDP, 300, 0, 100},
			{"a user without a limit", limited(3, "pc", 0, 5), query.UDP, 300, 0, 300},
			{"a burst beyond the rate", limited(4, "pc", 10, 50), query.UDP, 300, 0, 50},
			{"a burst below the rate", limited(5, "pc", 1000, 5), query.UDP, 300, 0, 5},
			{"one a second", limited(6, "pc", 1, 0), query.UDP, 5, 0, 1},
			{"half a second later", limited(1, "pc", 100, 0), query.UDP, 300, 500 * time.Millisecond, 50},
			{"and with it its own", own, query.UDP, 30, 500 * time.Millisecond, 5},
			{"of a burst", limited(4, "pc", 10, 50), query.UDP, 300, time.Second, 10},
			{"days later", limited(1, "pc", 100, 0), query.UDP, 300, 200 * time.Hour, 100},
			{"weeks later", limited(1, "pc", 100, 0), query.UDP, 300, 1000 * time.Hour, 100},
			{"a limit lowered", limited(1, "pc", 10, 0), query.UDP, 300, 1001 * time.Hour, 10},
			{"a limit raised", limited(1, "pc", 1_000_000, 0), query.UDP, 300, 1001 * time.Hour, 300},
			{"a burst of months", limited(7, "pc", 1, 10_000_000), query.UDP, 300, 1001 * time.Hour, 300},
		} {
			if got := a.passed(t, c.p, c.tr, c.n, t0+c.at); got != c.want {
				t.Errorf("%d workers, %s: %d of %d passed, want %d", workers, c.what, got, c.n, c.want)
			}
		}
	}
}

// Clients that nobody identified, served by a policy: each source has the policy's rate and networks to itself.
func TestRateOfStrangersServedByAPolicy(t *testing.T) {
	for _, kind := range []query.ClientKind{query.Stranger, query.Listed} {
		g := New(Options{Allow: prefixes("0.0.0.0/0", "::/0"), Seed: 7})
		at := clock.Instant(5 * time.Hour)
		p := usercache.Profile{RateLimit: 10, RateBurst: 20, Details: &usercache.Details{DenyNetworks: prefixes("203.0.113.0/24")}}
		send := func(tr query.Transport, addr string, unlimited bool, n int) (passed int, last query.RefuseReason) {
			for range n {
				q := from(tr, addr)
				q.Arrived, q.Client.Kind, q.Client.Profile, q.Client.Unlimited = at, kind, p, unlimited
				left, limited := g.Left(q)
				if last = g.Late(q); last == query.NotRefused {
					passed++
				}
				if limited == unlimited || limited && last != query.RefuseAccess && (left > 0) != (last == query.NotRefused) {
					t.Errorf("%s over %v: %d left, limited %v; then %v", addr, tr, left, limited, last)
				}
			}
			return passed, last
		}
		for _, c := range []struct {
			what string
			tr   query.Transport
			addr string
			free bool
			want int
			last query.RefuseReason
		}{
			{"at once", query.UDP, "192.0.2.1", false, 20, query.RefuseUserRate},
			{"another transport", query.DoT, "192.0.2.1", false, 0, query.RefuseUserRate},
			{"its neighbour", query.TCP, "192.0.2.2", false, 20, query.RefuseUserRate},
			{"access.unlimited", query.UDP, "192.0.2.1", true, 30, query.NotRefused},
			{"IPv6", query.UDP, "2001:db8:0:1100::1", false, 20, query.RefuseUserRate},
			{"the same /56", query.UDP, "2001:db8:0:11ff::2", false, 0, query.RefuseUserRate},
			{"another /56", query.UDP, "2001:db8:0:1200::1", false, 20, query.RefuseUserRate},
			{"a network that the policy denies", query.UDP, "203.0.113.1", false, 0, query.RefuseAccess},
		} {
			if got, last := send(c.tr, c.addr, c.free, 30); got != c.want || last != c.last {
				t.Errorf("kind %d, %s: %d passed, then %v; want %d, %v", kind, c.what, got, last, c.want, c.last)
			}
		}
		at += clock.Instant(time.Second)
		if got, _ := send(query.UDP, "192.0.2.1", false, 30); got != 10 {
			t.Errorf("kind %d, a second later: %d passed", kind, got)
		}
	}
}

// Whoever stays below the limit is never refused, however the queries come; whoever does not gets no more than it.
func TestRateOverTime(t *testing.T) {
	for _, workers := range []int{1, 3, 16} {
		for _, c := range []struct{ sent, limit int }{{3, 10}, {9, 10}, {30, 100}, {60, 100}, {99, 100}, {500, 100}, {5000, 100}} {
			a := newAsking(workers)
			p, passed, seconds := limited(1, "pc", uint32(c.limit), 0), 0, 10
			for i := range c.sent * seconds {
				at := time.Hour + time.Duration(i)*time.Second/time.Duration(c.sent)
				q := from(query.UDP, "192.0.2.1")
				q.Arrived, q.Client.Kind, q.Client.Profile, q.Scratch = clock.Instant(at), query.Identified, p, a.scratch[(i*7)%workers]
				if a.g.Late(q) == query.NotRefused {
					passed++
				}
			}
			switch {
			case c.sent <= c.limit && passed != c.sent*seconds:
				t.Errorf("%d workers, %d a second of %d: %d passed, of %d", workers, c.sent, c.limit, passed, c.sent*seconds)
			case c.sent > c.limit && (passed > c.limit*(seconds+1) || passed < c.limit*seconds*95/100):
				t.Errorf("%d workers, %d a second of %d: %d passed in %d s", workers, c.sent, c.limit, passed, seconds)
			}
		}
	}
}

// As many users as there are words, which fall on the sets unevenly: nearly all are held to their limits.
func TestRatesOfManyUsers(t *testing.T) {
	a := newAsking(1)
	more := 0
	for round := range 2 {
		for u := range uint32(userWords / 2) {
			if n := a.passed(t, limited(u, "pc", 1, 0), query.UDP, 1, time.Hour); round == 1 {
				more += n
			}
		}
	}
	if more > userWords/2/20 {
		t.Errorf("%d of %d users got more than their limit", more, userWords/2)
	}
}

func TestRatesAllocateNothing(t *testing.T) {
	a := newAsking(1)
	q := from(query.UDP, "192.0.2.1")
	q.Client.Kind, q.Client.Profile, q.Scratch = query.Identified, limited(1, "pc", 100, 0), a.scratch[0]
	if n := testing.AllocsPerRun(300, func() { q.Arrived += clock.Instant(time.Millisecond); a.g.Late(q) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkUserRate(b *testing.B) {
	for _, rate := range []uint32{100, 100_000} {
		b.Run(fmt.Sprint(rate), func(b *testing.B) {
			g := New(Options{Seed: 7})
			q := from(query.UDP, "192.0.2.1")
			q.Client.Kind, q.Client.Profile, q.Scratch = query.Identified, limited(1, "pc", rate, 0), &query.Scratch{Worker: 1}
			for b.Loop() {
				q.Arrived += 10_000
				g.Late(q)
			}
		})
	}
}

// What a user has spent is not to be earned again by another who is given his number, be the limits the same.
func TestRatesOfANumberGivenAgain(t *testing.T) {
	a := newAsking(1)
	gone, next := limited(1, "pc", 1, 200_000), limited(1, "pc", 1, 200_000)
	gone.UserID, _ = usercache.ParseID("gone")
	next.UserID, _ = usercache.ParseID("next")
	for _, p := range []usercache.Profile{gone, next} {
		if got := a.passed(t, p, query.UDP, 200_001, time.Hour); got != 200_000 {
			t.Errorf("%s: %d passed", p.UserID, got)
		}
	}
}
