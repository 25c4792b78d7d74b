package query

import (
	"sync/atomic"

	"github.com/sluice-dns/sluice/usercache"
)

// A Worker is what one serving goroutine owns: buffers, counters that only it writes, and its ring. Handing
// it on to another goroutine needs a happens-before edge (a channel or a lock).
type Worker struct {
	Scratch  Scratch
	Counters Counters
	Ring     *Ring
}

// Counters count what a worker answered. Only the worker writes them, readers may look at any time: each
// field is written with Inc, an atomic store without a locked instruction.
type Counters struct {
	_        [64]byte                         // a worker's counters share no cache line with a neighbour's
	Queries  [NumTransports][24]atomic.Uint64 // by transport and RCODE; 23 collects the rest
	Verdicts [NumVerdictKind]atomic.Uint64
	Refused  [NumRefuseReason]atomic.Uint64
	Hits     atomic.Uint64
	Misses   atomic.Uint64
	Dropped  atomic.Uint64 // queries that got no answer on purpose
	Misnamed atomic.Uint64 // queries of Client.Misnamed that were served as a stranger's
	// Lists counts what rules of catalogue lists decided, by number of the list.
	Lists [usercache.MaxLists]atomic.Uint64
	_     [64]byte
}

// Inc adds one to a counter that only the calling goroutine writes.
func Inc(c *atomic.Uint64) { c.Store(c.Load() + 1) }
