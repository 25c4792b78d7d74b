package simnet

import (
	"net"
	"net/netip"
	"syscall"
	"time"
)

// A PacketConn is a UDP endpoint. It is a net.PacketConn and, when connected, a net.Conn; it also has the
// methods of *net.UDPConn that use netip.AddrPort. It is safe for concurrent use.
type PacketConn struct {
	net    *Network
	local  netip.AddrPort
	remote netip.AddrPort // zero unless connected
	in     *inbox
}

// ListenUDP opens an endpoint at local; port 0 chooses a free one.
func (n *Network) ListenUDP(local netip.AddrPort) (*PacketConn, error) {
	return n.openUDP("listen", local, netip.AddrPort{})
}

// DialUDP opens an endpoint connected to remote: it receives datagrams of remote alone. A zero local address
// means the network's default host, and port 0 a random port.
func (n *Network) DialUDP(local, remote netip.AddrPort) (*PacketConn, error) {
	return n.openUDP("dial", local, remote)
}

func (n *Network) openUDP(op string, local, remote netip.AddrPort) (*PacketConn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	local, err := n.place(op, local, remote, func(a netip.AddrPort) bool { return n.packet[a] != nil })
	if err != nil {
		return nil, err
	}
	c := &PacketConn{net: n, local: local, remote: remote, in: newInbox()}
	n.packet[local] = c
	return c, nil
}

// ReadFromUDPAddrPort waits for a datagram and copies it to p. What does not fit is lost.
func (c *PacketConn) ReadFromUDPAddrPort(p []byte) (n int, from netip.AddrPort, err error) {
	err = c.in.take(func(d *parcel) bool {
		n, from = copy(p, d.data), d.from
		return true
	})
	if err != nil {
		err = opError("read", "udp", c.LocalAddr(), c.RemoteAddr(), err)
	}
	return n, from, err
}

// WriteToUDPAddrPort sends p to the given address. It never blocks.
func (c *PacketConn) WriteToUDPAddrPort(p []byte, to netip.AddrPort) (int, error) {
	if c.remote.IsValid() {
		return 0, opError("write", "udp", c.LocalAddr(), c.RemoteAddr(), net.ErrWriteToConnected)
	}
	return c.write(p, to)
}

// Read waits for a datagram and copies it to p. What does not fit is lost.
func (c *PacketConn) Read(p []byte) (int, error) {
	n, _, err := c.ReadFromUDPAddrPort(p)
	return n, err
}

// Write sends p to the address the endpoint is connected to. It never blocks.
func (c *PacketConn) Write(p []byte) (int, error) {
	if !c.remote.IsValid() {
		return 0, opError("write", "udp", c.LocalAddr(), nil, syscall.EDESTADDRREQ)
	}
	return c.write(p, c.remote)
}

func (c *PacketConn) write(p []byte, to netip.AddrPort) (int, error) {
	c.in.mu.Lock()
	closed := c.in.closed
	c.in.mu.Unlock()
	switch {
	case closed != nil:
		return 0, opError("write", "udp", c.LocalAddr(), c.RemoteAddr(), closed)
	case len(p) > maxDatagram:
		return 0, opError("write", "udp", c.LocalAddr(), c.RemoteAddr(), syscall.EMSGSIZE)
	}
	c.net.send(c.local, to, p)
	return len(p), nil
}

const maxDatagram = 65507 // bytes a UDP datagram over IPv4 can carry

// ReadFrom is net.PacketConn's form of ReadFromUDPAddrPort; addr is a *net.UDPAddr.
func (c *PacketConn) ReadFrom(p []byte) (n int, addr net.Addr, err error) {
	n, from, err := c.ReadFromUDPAddrPort(p)
	if err != nil {
		return n, nil, err
	}
	return n, net.UDPAddrFromAddrPort(from), nil
}

// WriteTo is net.PacketConn's form of WriteToUDPAddrPort; addr must be a *net.UDPAddr.
func (c *PacketConn) WriteTo(p []byte, addr net.Addr) (int, error) {
	a, ok := addr.(*net.UDPAddr)
	if !ok {
		return 0, opError("write", "udp", c.LocalAddr(), addr, syscall.EINVAL)
	}
	to := a.AddrPort()
	return c.WriteToUDPAddrPort(p, netip.AddrPortFrom(to.Addr().Unmap(), to.Port()))
}

// LocalAddr returns a *net.UDPAddr.
func (c *PacketConn) LocalAddr() net.Addr { return net.UDPAddrFromAddrPort(c.local) }

// RemoteAddr returns the *net.UDPAddr the endpoint is connected to, or nil.
func (c *PacketConn) RemoteAddr() net.Addr {
	if !c.remote.IsValid() {
		return nil
	}
	return net.UDPAddrFromAddrPort(c.remote)
}

// SetDeadline sets the read deadline; writing never waits.
func (c *PacketConn) SetDeadline(t time.Time) error { return c.SetReadDeadline(t) }

// SetReadDeadline sets the time after which reading fails with os.ErrDeadlineExceeded; zero means never.
func (c *PacketConn) SetReadDeadline(t time.Time) error { c.in.setDeadline(t); return nil }

// SetWriteDeadline does nothing: writing never waits.
func (c *PacketConn) SetWriteDeadline(time.Time) error { return nil }

// Close ends the endpoint and frees its port.
func (c *PacketConn) Close() error {
	if !c.in.close(net.ErrClosed) {
		return opError("close", "udp", c.LocalAddr(), c.RemoteAddr(), net.ErrClosed)
	}
	c.net.mu.Lock()
	delete(c.net.packet, c.local)
	c.net.mu.Unlock()
	return nil
}
