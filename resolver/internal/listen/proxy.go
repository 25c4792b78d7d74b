package listen

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"time"
)

// A Proxied is a pair of addresses that a PROXY header tells: who really asks, and where. They are invalid if
// the header says that the proxy speaks for itself (a health check).
type Proxied struct{ Source, Local netip.AddrPort }

const (
	proxyFixed = 16  // signature, version and command, family, length
	maxProxy   = 512 // bytes of a whole header, options included
	proxyWait  = 3 * time.Second
)

const proxySignature = "\r\n\r\n\x00\r\nQUIT\n"

// ErrProxy is what a message that must begin with a PROXY header, version 2, and does not, gives.
var ErrProxy = errors.New("no PROXY protocol header, version 2")

// ReadProxy reads the PROXY header at the start of b and returns its length. The options at its end are passed
// over.
func ReadProxy(b []byte) (p Proxied, n int, err error) {
	if len(b) < proxyFixed {
		return p, 0, ErrProxy
	}
	n, err = proxyLen(b)
	if err != nil || len(b) < n {
		return p, 0, ErrProxy
	}
	command, family, transport, addrs := b[12]&15, b[13]>>4, b[13]&15, b[proxyFixed:n]
	switch command {
	case 0: // LOCAL
		return p, n, nil
	case 1: // PROXY
	default:
		return p, 0, ErrProxy
	}
	// Which of the transports it is, stream or datagram, is known from how the header came, and proxies that turn
	// one into the other say one or the other.
	if transport > 2 {
		return p, 0, ErrProxy
	}
	var size int
	switch family {
	case 0: // unspecified: the proxy does not know
		return p, n, nil
	case 1:
		size = 4
	case 2:
		size = 16
	default:
		return p, 0, ErrProxy
	}
	if len(addrs) < 2*size+4 {
		return p, 0, ErrProxy
	}
	source, _ := netip.AddrFromSlice(addrs[:size])
	local, _ := netip.AddrFromSlice(addrs[size : 2*size])
	p.Source = netip.AddrPortFrom(source.Unmap(), binary.BigEndian.Uint16(addrs[2*size:]))
	p.Local = netip.AddrPortFrom(local.Unmap(), binary.BigEndian.Uint16(addrs[2*size+2:]))
	return p, n, nil
}

// proxyLen returns the length of a header of which the fixed part is in b.
func proxyLen(b []byte) (int, error) {
	n := proxyFixed + int(binary.BigEndian.Uint16(b[14:]))
	if string(b[:12]) != proxySignature || b[12]>>4 != 2 || n > maxProxy {
		return 0, ErrProxy
	}
	return n, nil
}

// readProxyFrom reads the header from a connection, and not a byte more.
func readProxyFrom(c net.Conn) (Proxied, error) {
	c.SetReadDeadline(time.Now().Add(proxyWait))
	defer c.SetReadDeadline(time.Time{})
	var b [maxProxy]byte
	if _, err := io.ReadFull(c, b[:proxyFixed]); err != nil {
		return Proxied{}, err
	}
	n, err := proxyLen(b[:])
	if err != nil {
		return Proxied{}, err
	}
	if _, err := io.ReadFull(c, b[proxyFixed:n]); err != nil {
		return Proxied{}, err
	}
	p, _, err := ReadProxy(b[:n])
	return p, err
}
