package crew

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// Every function runs once, as many at a time as there are, and nobody is left when all have returned: the
// bubble would say so.
func TestEverythingRunsAndNobodyIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Crew
		for range 3 {
			var ran atomic.Int64
			var all sync.WaitGroup
			gate := make(chan struct{})
			for range 2 * maxIdle {
				all.Add(1)
				c.Go(func() { <-gate; ran.Add(1); all.Done() })
			}
			synctest.Wait()
			if n := ran.Load(); n != 0 {
				t.Fatalf("%d functions returned before they were let", n)
			}
			close(gate)
			all.Wait()
			synctest.Wait()
			if n := ran.Load(); n != 2*maxIdle {
				t.Errorf("%d functions ran, want %d", n, 2*maxIdle)
			}
			if c.working != 0 || len(c.idle) != 0 {
				t.Errorf("%d at work and %d idle when all have returned", c.working, len(c.idle))
			}
		}
	})
}

func TestGoroutinesAreUsedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Crew
		stay := make(chan struct{})
		c.Go(func() { <-stay })
		for range 1000 {
			c.Go(func() {})
			synctest.Wait()
		}
		if len(c.idle) != 1 {
			t.Errorf("%d goroutines wait after functions that ran one after the other, want 1", len(c.idle))
		}
		for range maxIdle + 10 {
			c.Go(func() { <-stay })
		}
		many := make(chan struct{})
		for range maxIdle + 10 {
			c.Go(func() { <-many })
		}
		close(many)
		synctest.Wait()
		if len(c.idle) != maxIdle {
			t.Errorf("%d goroutines wait, want %d", len(c.idle), maxIdle)
		}
		close(stay)
	})
}

func BenchmarkGo(b *testing.B) {
	var c Crew
	stay := make(chan struct{})
	c.Go(func() { <-stay })
	var all sync.WaitGroup
	for b.Loop() {
		all.Add(1)
		c.Go(all.Done)
		all.Wait()
	}
	close(stay)
}
