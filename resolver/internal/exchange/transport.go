package exchange

import (
	"context"
	"net"
	"net/netip"
	"time"
)

// A Transport opens the ways to servers. It is safe for concurrent use.
type Transport interface {
	// Packet returns an endpoint on a random local port that is connected to server, holds nothing unread,
	// and belongs to the caller until it is released.
	Packet(server netip.AddrPort) (PacketConn, error)
	// Stream connects to server over TCP.
	Stream(ctx context.Context, server netip.AddrPort) (net.Conn, error)
	// Close frees what is not in use now, and the rest when it is released.
	Close() error
}

// A PacketConn exchanges datagrams with one server.
type PacketConn interface {
	// RoundTrip sends out and waits for a datagram, of which it returns the length; bytes beyond len(in) are lost.
	RoundTrip(out, in []byte) (int, error)
	// SetReadDeadline bounds RoundTrip and may be called meanwhile.
	SetReadDeadline(time.Time) error
	// Release ends the use. Clean says that one query got one response and nothing more is expected, so that
	// the endpoint may serve another server.
	Release(clean bool)
}

// Dialing makes a Transport of a function with the form of net.Dialer.DialContext, which is called with
// network "udp" or "tcp" and an address and port. It opens an endpoint for each query.
func Dialing(dial func(ctx context.Context, network, address string) (net.Conn, error)) Transport {
	return dialing(dial)
}

type dialing func(ctx context.Context, network, address string) (net.Conn, error)

func (d dialing) Packet(server netip.AddrPort) (PacketConn, error) {
	c, err := d(context.Background(), "udp", server.String())
	if err != nil {
		return nil, err
	}
	return dialled{c}, nil
}

func (d dialing) Stream(ctx context.Context, server netip.AddrPort) (net.Conn, error) {
	return d(ctx, "tcp", server.String())
}

func (d dialing) Close() error { return nil }

type dialled struct{ net.Conn }

func (c dialled) RoundTrip(out, in []byte) (int, error) {
	if _, err := c.Write(out); err != nil {
		return 0, err
	}
	return c.Read(in)
}

func (c dialled) Release(bool) { c.Close() }
