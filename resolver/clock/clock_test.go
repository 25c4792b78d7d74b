package clock

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestClocksFollowTheBubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, w := Elapsed(), Wall()
		time.Sleep(time.Hour)
		if d := Elapsed().Sub(e); d != time.Hour {
			t.Errorf("Elapsed moved by %v in an hour", d)
		}
		if d := Wall().Sub(w); d != time.Hour {
			t.Errorf("Wall moved by %v in an hour", d)
		}
	})
}

func TestElapsedOutsideTests(t *testing.T) {
	inTest = false
	defer func() { inTest = true }()
	a := Elapsed()
	b := Elapsed()
	if a.Add(-30*365*24*time.Hour) <= 0 || b < a {
		t.Errorf("Elapsed went from %d to %d", a, b)
	}
	// It is CLOCK_BOOTTIME, read from both sides, in many goroutines.
	var wg sync.WaitGroup
	defer wg.Wait()
	for range 4 {
		wg.Go(func() {
			last := Instant(0)
			for range 20000 {
				before := boottime()
				now := Elapsed()
				if now < last || now > boottime() || before.Sub(now) > 100*time.Millisecond {
					t.Errorf("Elapsed is %d after %d, when CLOCK_BOOTTIME was %d", now, last, before)
					return
				}
				last = now
			}
		})
	}
}

func BenchmarkElapsed(b *testing.B) {
	inTest = false
	defer func() { inTest = true }()
	b.Run("elapsed", func(b *testing.B) {
		for b.Loop() {
			Elapsed()
		}
	})
	b.Run("boottime", func(b *testing.B) {
		for b.Loop() {
			boottime()
		}
	})
}

func TestAddSaturates(t *testing.T) {
	for _, c := range []struct {
		from Instant
		by   time.Duration
		want Instant
	}{
		{5, 7, 12},
		{5, -7, -2},
		{Never - 1, time.Hour, Never},
		{math.MinInt64 + 1, -time.Hour, math.MinInt64},
	} {
		if got := c.from.Add(c.by); got != c.want {
			t.Errorf("%d.Add(%d) = %d, want %d", c.from, c.by, got, c.want)
		}
	}
}

func TestFollow(t *testing.T) {
	defer func() { elapsedOffset.Store(0); wallOffset.Store(0) }()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		both, wall := filepath.Join(dir, "clock"), filepath.Join(dir, "wall")
		write := func(name, s string) {
			if err := os.WriteFile(name, []byte(s), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		write(both, "0000000000000000000\n")
		write(wall, "-0000000000000000060\n")
		ctx, cancel := context.WithCancel(t.Context())
		e0 := Elapsed()
		wait, err := Follow(ctx, both, wall)
		if err != nil {
			t.Fatal(err)
		}
		if d := time.Since(Wall()).Round(time.Second); d != time.Minute {
			t.Errorf("wall is %v behind, want 1m", d)
		}
		write(both, "3600\n")
		time.Sleep(20 * time.Millisecond)
		if d := Elapsed().Sub(e0); d != time.Hour+20*time.Millisecond {
			t.Errorf("elapsed moved by %v, want 1h0m0.02s", d)
		}
		os.Remove(both)
		write(wall, "12x")
		time.Sleep(20 * time.Millisecond)
		if d := Elapsed().Sub(e0); d != time.Hour+40*time.Millisecond {
			t.Errorf("a missing file changed the offset: %v", d)
		}
		cancel()
		wait()
	})
}

func TestFollowRefusesWhatItCannotRead(t *testing.T) {
	name := filepath.Join(t.TempDir(), "clock")
	if _, err := Follow(t.Context(), name, ""); err == nil || !strings.Contains(err.Error(), name) {
		t.Errorf("missing file: %v", err)
	}
	for _, s := range []string{"", "soon", "1.5", "99999999999"} {
		if err := os.WriteFile(name, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Follow(t.Context(), "", name); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%q: %v", s, err)
		}
	}
}
