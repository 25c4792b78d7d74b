package udp

import (
	"net/netip"
	"slices"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/listen"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// serveBatch answers the datagrams received, as far as that can be done at once, into the batch's answers. It
// allocates nothing for a query that is answered at once.
func (w *worker) serveBatch(now clock.Instant) {
	b := &w.batch
	b.answers = 0
	var done query.After
	q := &w.query
	q.Transport, q.Listener, q.Arrived = query.UDP, w.server.opts.ListenerID, now
	for i := range b.in[:b.received] {
		d := &b.in[i]
		if w.server.own.has(d.from) {
			w.server.counters.Source.Add(1)
			continue
		}
		q.Source, q.Local, q.Scratch = d.from, d.local, &w.state.Scratch
		data := d.data
		if fromProxy := w.server.opts.FromProxy; fromProxy != nil && fromProxy(d.from.Addr()) {
			p, n, err := listen.ReadProxy(data)
			if err != nil {
				w.server.counters.Proxy.Add(1)
				continue
			}
			if data = data[n:]; p.Source.IsValid() {
				q.Source, q.Local = p.Source, p.Local
			}
		}
		a := &b.out[b.answers]
		if f := q.Read(data); f != query.NoFault {
			if f == query.Ignore {
				continue
			}
			a.n = w.handler.Fault(w.state, q, f, a.buf)
		} else {
			n, after := w.handler.TryNow(w.state, q, a.buf)
			if after&query.AfterResolve != 0 {
				w.resolve(i)
				continue
			}
			done |= after
			a.n = n
		}
		if a.n > 0 {
			a.to = i
			b.answers++
		}
	}
	if done != 0 && w.state.Ring != nil {
		w.state.Ring.Wake()
	}
}

func (w *worker) resolve(i int) {
	s := w.server
	s.pending.Add(1)
	send := w.sockets.replier(i)
	w.handler.Resolve(w.query.Own(), func(response []byte) {
		defer s.pending.Done()
		if len(response) > 0 {
			send(response)
		}
	})
}

// addresses is a set in which the ports, of which there are few, are looked up first.
type addresses struct {
	ports []uint16
	all   []netip.AddrPort
}

func (s *addresses) add(a netip.AddrPort) {
	a = netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
	s.all = append(s.all, a)
	if !slices.Contains(s.ports, a.Port()) {
		s.ports = append(s.ports, a.Port())
	}
}

// has reports whether a must not be answered: it is in the set, or its port is 0. A socket bound to the
// unspecified address stands for itself alone, since the machine's other addresses may have other owners.
func (s *addresses) has(a netip.AddrPort) bool {
	return a.Port() == 0 || slices.Contains(s.ports, a.Port()) && slices.Contains(s.all, a)
}
