// Package listen holds what the listeners share: the handler they call, lifecycle, buffers.
//
// A listener turns what a socket brings into a query.Query and sends what the handler makes of it. It opens
// no sockets: it is given them. Each transport is a package below this one.
package listen

import "github.com/sluice-dns/sluice/resolver/internal/query"

// A Handler answers queries. The pipeline is one; tests have their own.
type Handler interface {
	// NewWorker returns the state of one serving goroutine. Its ring is consumed by the handler.
	NewWorker() *query.Worker

	// TryNow answers q from what the caches hold, without waiting and without allocating. q was read
	// without fault. The response is out[:n]; n is 0
	// if nothing is to be sent. If after has AfterResolve there is no answer yet and Resolve must be called.
	TryNow(w *query.Worker, q *query.Query, out []byte) (n int, after query.After)

	// Fault writes the response to a message that could not be read; n is 0 if nothing is to be sent.
	Fault(w *query.Worker, q *query.Query, f query.Fault, out []byte) (n int)

	// Resolve answers q, which it owns from here on (listeners pass q.Own()), and calls reply exactly once,
	// from any goroutine and perhaps before Resolve returns. The response is valid during the call; nil
	// means that nothing is to be sent. Resolve itself does not wait.
	Resolve(q *query.Query, reply func(response []byte))
}
