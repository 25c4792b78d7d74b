package listen

import (
	"runtime"

	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// A Desk is a worker with what it needs to answer one query after the other: the query and room for its
// response. Whoever borrowed it must not wait for anything while it has it.
type Desk struct {
	Worker *query.Worker
	Query  query.Query
	Out    [dnswire.MaxMessage]byte

	handler Handler
	after   query.After // of all since it was borrowed
}

// Desks is a fixed number of desks, shared by the connections of a listener: connections are many and cost
// little while they are idle.
type Desks chan *Desk

// NewDesks returns n desks; 0 means as many as there are processors.
func NewDesks(h Handler, n int) Desks {
	if n == 0 {
		n = runtime.GOMAXPROCS(0)
	}
	d := make(Desks, n)
	for range n {
		d <- &Desk{Worker: h.NewWorker(), handler: h}
	}
	return d
}

// Borrow waits for a desk, which Return gives back.
func (d Desks) Borrow() *Desk { return <-d }

// Return gives back a desk and tells the consumer of its ring if there is something for it.
func (d Desks) Return(k *Desk) {
	if k.after != 0 && k.Worker != nil && k.Worker.Ring != nil {
		k.Worker.Ring.Wake()
	}
	k.after = 0
	d <- k
}

// Answer answers wire inline if that is possible. All fields of k.Query that a listener sets are set. The
// response is k.Out[:n], n 0 meaning that nothing is to be sent; resolve means that the response will come
// from Handler.Resolve, to be called with k.Query.Own().
func (k *Desk) Answer(wire []byte) (n int, f query.Fault, resolve bool) {
	q := &k.Query
	q.Scratch = &k.Worker.Scratch
	if f = q.Read(wire); f != query.NoFault {
		if f == query.Ignore {
			return 0, f, false
		}
		return k.handler.Fault(k.Worker, q, f, k.Out[:]), f, false
	}
	n, after := k.handler.TryNow(k.Worker, q, k.Out[:])
	k.after |= after &^ query.AfterResolve
	return n, f, after&query.AfterResolve != 0
}
