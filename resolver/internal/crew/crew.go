// Package crew runs functions in goroutines that are used again.
//
// A resolution needs a deep stack, which the runtime grows for every new goroutine by copying it again and again:
// that took a twentieth of the time of a cold name. Here a goroutine that has done its work waits for more while
// others of the crew are at work. When the last of them has returned all end, so a Crew has nothing to close and
// leaves nothing behind: whoever waits for the functions has waited for the goroutines.
package crew

import "sync"

// Go runs f in a goroutine. A panic in f ends the process, as in any goroutine.
func (c *Crew) Go(f func()) {
	var next chan func()
	c.mu.Lock()
	c.working++
	if last := len(c.idle) - 1; last >= 0 { // the one that worked last, as its stack is warm
		next = c.idle[last]
		c.idle = c.idle[:last]
	}
	c.mu.Unlock()
	if next != nil {
		next <- f
		return
	}
	go c.work(f)
}

// A Crew is a set of goroutines. The zero value is ready for use. It is safe for concurrent use.
type Crew struct {
	mu      sync.Mutex // guards everything below
	working int
	idle    []chan func() // with room for one function, so that Go never waits
}

// maxIdle bounds how many goroutines wait for work: stacks of 16 KiB.
const maxIdle = 256

func (c *Crew) work(f func()) {
	next := make(chan func(), 1)
	for ok := true; ok; f, ok = <-next {
		f()
		if !c.rest(next) {
			return
		}
	}
}

// rest makes the caller wait for work in next, or reports that it is not needed any more.
func (c *Crew) rest(next chan func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.working--
	if c.working == 0 {
		for _, n := range c.idle {
			close(n)
		}
		c.idle = nil
		return false
	}
	if len(c.idle) >= maxIdle {
		return false
	}
	c.idle = append(c.idle, next)
	return true
}
