package udp

import (
	"errors"
	"net"
	"net/netip"
	"os"

	"github.com/sluice-dns/sluice/resolver/clock"
)

// plain receives and sends one datagram a call, through the methods of the connection.
type plain struct{ w *worker }

func (p plain) serve() error {
	w := p.w
	b := &w.batch
	buf := make([]byte, MaxQuery+1) // one more, to see what is too long
	b.out[0].buf = make([]byte, MaxQuery)
	for failed := 0; ; failed = 0 {
		n, from, err := w.conn.ReadFromUDPAddrPort(buf)
		for err != nil {
			// One may be the ICMP error of an earlier response; many in a row are not.
			if failed++; failed > 100 || errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrDeadlineExceeded) {
				return err
			}
			n, from, err = w.conn.ReadFromUDPAddrPort(buf)
		}
		if n > MaxQuery {
			w.server.counters.Long.Add(1)
			continue
		}
		b.in[0] = datagram{buf[:n], netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), w.local}
		b.received = 1
		w.serveBatch(clock.Elapsed())
		if b.answers > 0 {
			p.send(b.out[0].buf[:b.out[0].n], from)
		}
	}
}

func (p plain) replier(i int) func([]byte) {
	to := p.w.batch.in[i].from
	return func(response []byte) { p.send(response, to) }
}

func (p plain) send(response []byte, to netip.AddrPort) {
	if _, err := p.w.conn.WriteToUDPAddrPort(response, to); err != nil {
		p.w.server.counters.Unsent.Add(1)
	}
}
