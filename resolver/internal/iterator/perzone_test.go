package iterator

import (
	"fmt"
	"testing"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// The bound of a zone's steps: 200, fewer while its servers are silent, and whole again when they answer or after
// a time of quiet.
func TestLoads(t *testing.T) {
	var l loads
	zone, now := dnsname.MustParse("victim.lab."), now()
	fill := func() (n int) {
		for l.enter(zone, now) {
			n++
		}
		for range n {
			l.leave(zone, false, now)
		}
		return n
	}
	rounds := func(n int, silent bool) {
		for range n {
			l.enter(zone, now)
			l.leave(zone, silent, now)
		}
	}
	if n := fill(); n != maxPerZone {
		t.Errorf("%d steps at once, want %d", n, maxPerZone)
	}
	for range maxPerZone + 1 {
		if !l.enter(dnsname.MustParse("com."), now) || !l.enter(dnsname.Root, now) {
			t.Fatal("the root or a top-level domain has a bound")
		}
	}
	l.enter(zone, now) // so that the zone is not idle in between
	rounds(judgeEvery, true)
	if z := l.m[zone]; z.bound != maxPerZone*3/4 {
		t.Errorf("bound %d after %d silent steps", z.bound, judgeEvery)
	}
	rounds(30*judgeEvery, true)
	if z := l.m[zone]; z.bound != minPerZone {
		t.Errorf("bound %d after silence for long", z.bound)
	}
	for range minPerZone - 1 {
		l.enter(zone, now)
	}
	if l.enter(zone, now) {
		t.Errorf("more than %d steps for a zone of silent servers", minPerZone)
	}
	for range minPerZone - 1 {
		l.leave(zone, true, now)
	}
	rounds(30*judgeEvery, false)
	if z := l.m[zone]; z.bound != maxPerZone {
		t.Errorf("bound %d after answers for long", z.bound)
	}
	rounds(30*judgeEvery, true)
	l.leave(zone, true, now)
	now = now.Add(zoneQuiet + time.Second)
	if n := fill(); n != maxPerZone {
		t.Errorf("%d steps at once after a time of quiet", n)
	}
	for i := range maxMemory + 100 { // zones whose bound shrank stay, if not for ever
		name := dnsname.MustParse(fmt.Sprintf("z%d.lab.", i))
		for range judgeEvery {
			l.enter(name, now)
			l.leave(name, true, now)
		}
	}
	if len(l.m) > maxMemory {
		t.Errorf("%d zones remembered", len(l.m))
	}
}
