package query

import (
	"sync/atomic"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// After says what a response still asks for once it is written: side effects that a hit must not run itself.
type After uint8

// The bits of After.
const (
	AfterRefresh      After = 1 << iota // the entry is near its end: fetch it anew
	AfterStaleRefresh                   // stale data was given: fetch it anew
	AfterLog                            // the client's queries are logged, or dnstap listens
	AfterCount                          // the client's counters want it
	AfterResolve                        // there is no answer yet: Resolve must be called
)

// An Event is what the consumer of a worker's ring learns of one query. Its size is fixed and it holds no
// pointers, so that a ring is one block of memory filled in place.
type Event struct {
	At        clock.Instant
	After     After
	Transport Transport
	Verdict   VerdictKind
	Why       Why
	RCode     uint16
	List      uint16
	Line      uint32
	Client    ClientKind
	User      uint32   // the user's number in this process (usercache.Profile)
	Source    [16]byte // all zero if the user's settings let nobody know
	Type      uint16
	Class     uint16
	DO, CD    bool
	View      View
	Subnet    Subnet // of the question
	NameLen   uint8
	Name      [dnsname.MaxLen]byte
}

// Question returns the question as it was being answered; its name is a copy.
func (e *Event) Question() Question {
	return Question{
		Name: dnsname.Name(e.Name[:e.NameLen]), Type: e.Type, Class: e.Class,
		DO: e.DO, CD: e.CD, View: e.View, Subnet: e.Subnet,
	}
}

// A Ring takes events from one worker to one consumer, without locks. When it is full an event is dropped
// and counted: DNS is never delayed by who watches it.
type Ring struct {
	events []Event // a power of two
	_      [40]byte
	head   atomic.Uint64 // next to read; written by the consumer
	_      [56]byte
	tail   atomic.Uint64 // next to write; written by the worker
	drops  atomic.Uint64 // written by the worker
	_      [40]byte
	wake   chan struct{}
}

// NewRing returns a ring of at least size events.
func NewRing(size int) *Ring {
	n := 1
	for n < size {
		n *= 2
	}
	return &Ring{events: make([]Event, n), wake: make(chan struct{}, 1)}
}

// Slot returns the event to fill, or nil if the ring is full. Commit makes it visible.
func (r *Ring) Slot() *Event {
	t := r.tail.Load()
	if t-r.head.Load() == uint64(len(r.events)) {
		r.drops.Add(1)
		return nil
	}
	return &r.events[t&uint64(len(r.events)-1)]
}

// Commit hands over the event that Slot returned.
func (r *Ring) Commit() { r.tail.Store(r.tail.Load() + 1) }

// Wake tells the consumer that there are events. A worker calls it once a batch.
func (r *Ring) Wake() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Waiting is what the consumer waits on.
func (r *Ring) Waiting() <-chan struct{} { return r.wake }

// Drain calls f for each event that is there; the pointer is valid during the call.
func (r *Ring) Drain(f func(*Event)) {
	for h := r.head.Load(); h != r.tail.Load(); h = r.head.Load() {
		f(&r.events[h&uint64(len(r.events)-1)])
		r.head.Store(h + 1)
	}
}

// Dropped returns how many events found the ring full.
func (r *Ring) Dropped() uint64 { return r.drops.Load() }
