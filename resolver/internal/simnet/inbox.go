package simnet

import (
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
)

// A parcel is a datagram, or a segment of a stream, on its way or waiting to be read.
type parcel struct {
	due  clock.Instant // not readable before
	from netip.AddrPort
	data []byte
	end  error // of a stream: io.EOF or a reset; stays at the head of the queue
}

// An inbox is what a reader waits at. Sending and reading meet here and nowhere else.
type inbox struct {
	mu       sync.Mutex // guards everything below
	queue    []parcel   // by due, then by arrival
	bytes    int        // in queue
	deadline time.Time
	closed   error         // what readers get once the endpoint is closed; nil while open
	changed  chan struct{} // closed and replaced whenever a waiting reader or writer should look again
}

func newInbox() *inbox { return &inbox{changed: make(chan struct{})} }

// put queues p unless the box is closed or holds limit parcels.
func (b *inbox) put(p parcel, limit int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed != nil || len(b.queue) >= limit {
		return false
	}
	b.insert(p)
	return true
}

func (b *inbox) insert(p parcel) {
	i := len(b.queue)
	for i > 0 && b.queue[i-1].due > p.due {
		i--
	}
	b.queue = slices.Insert(b.queue, i, p)
	b.bytes += len(p.data)
	b.wake()
}

func (b *inbox) wake() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// take waits for the first parcel that is due and gives it to use, which reports whether it is finished with
// the parcel; what use leaves in it is the head of the queue for the next call.
func (b *inbox) take(use func(p *parcel) (finished bool)) error {
	for {
		b.mu.Lock()
		if b.closed != nil {
			b.mu.Unlock()
			return b.closed
		}
		left, err := untilDeadline(b.deadline)
		if err != nil {
			b.mu.Unlock()
			return err
		}
		if len(b.queue) > 0 {
			p := &b.queue[0]
			wait := p.due.Sub(clock.Elapsed())
			if wait <= 0 {
				before := len(p.data)
				finished := use(p)
				b.bytes -= before - len(p.data)
				if finished {
					b.bytes -= len(p.data)
					b.queue[0] = parcel{}
					b.queue = b.queue[1:]
				}
				b.wake() // a writer may wait for room
				b.mu.Unlock()
				return nil
			}
			left = min(left, wait)
		}
		changed := b.changed
		b.mu.Unlock()
		await(changed, left)
	}
}

func (b *inbox) setDeadline(t time.Time) {
	b.mu.Lock()
	b.deadline = t
	b.wake()
	b.mu.Unlock()
}

// close makes every reader return err and drops what is queued. The first call counts.
func (b *inbox) close(err error) (first bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed != nil {
		return false
	}
	b.closed, b.queue, b.bytes = err, nil, 0
	b.wake()
	return true
}

const forever = time.Duration(1<<63 - 1)

// untilDeadline returns the time left, or the error of a deadline that has passed.
func untilDeadline(t time.Time) (time.Duration, error) {
	if t.IsZero() {
		return forever, nil
	}
	if left := time.Until(t); left > 0 {
		return left, nil
	}
	return 0, os.ErrDeadlineExceeded
}

// await returns when changed is closed, or after d.
func await(changed <-chan struct{}, d time.Duration) {
	if d == forever {
		<-changed
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-changed:
	case <-timer.C:
	}
}

func opError(op, network string, local, remote net.Addr, err error) error {
	return &net.OpError{Op: op, Net: network, Source: local, Addr: remote, Err: err}
}
