package exchange

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// SocketOptions tunes NewSockets. Zero fields mean the default stated.
type SocketOptions struct {
	// Sources are the local addresses to ask from, of either family (recursion.outgoing). A server is always
	// asked from the same one, since its cookie depends on it. None of a family: the kernel chooses.
	Sources []netip.Addr
	// Shard is how many UDP sockets are kept for each source, and for each family without. Default 1,024.
	Shard int
}

// NewSockets returns the Transport of real sockets.
//
// Its UDP sockets are opened when first needed, each bound to a random port above 1023. A query gets a random
// socket of the shard, which is connected to the query's server while it has it, so that the kernel drops what
// others send and ICMP errors concern this server alone. After maxUses queries, and after anything but one
// query with one response, a socket is closed and its place taken by one with another port. Opening a socket
// for every query would cost three times as much.
func NewSockets(o SocketOptions) (Transport, error) {
	if o.Shard == 0 {
		o.Shard = 1024
	}
	s := &sockets{seed: maphash.MakeSeed()}
	add := func(v6 bool, from netip.Addr) {
		sh := &shard{source: from, v6: v6, places: make([]place, o.Shard)}
		if v6 {
			s.v6 = append(s.v6, sh)
		} else {
			s.v4 = append(s.v4, sh)
		}
	}
	for _, a := range o.Sources {
		a = a.Unmap()
		if !a.IsValid() || a.IsUnspecified() || a.IsMulticast() {
			return nil, fmt.Errorf("outgoing address %v: it must be one address of this machine", a)
		}
		add(a.Is6(), a)
	}
	if s.v4 == nil {
		add(false, netip.Addr{})
	}
	if s.v6 == nil {
		add(true, netip.Addr{})
	}
	return s, nil
}

type sockets struct {
	seed   maphash.Seed // which source a server is asked from
	v4, v6 []*shard     // one for each source
}

func (s *sockets) shard(server netip.Addr) *shard {
	list := s.v4
	if server.Is6() {
		list = s.v6
	}
	if len(list) == 1 {
		return list[0]
	}
	return list[maphash.Comparable(s.seed, server)%uint64(len(list))]
}

func (s *sockets) Packet(server netip.AddrPort) (PacketConn, error) {
	server = netip.AddrPortFrom(server.Addr().Unmap(), server.Port())
	return s.shard(server.Addr()).take(server)
}

func (s *sockets) Stream(ctx context.Context, server netip.AddrPort) (net.Conn, error) {
	d := net.Dialer{KeepAlive: -1}
	if from := s.shard(server.Addr().Unmap()).source; from.IsValid() {
		d.LocalAddr = &net.TCPAddr{IP: from.AsSlice(), Zone: from.Zone()}
	}
	return d.DialContext(ctx, "tcp", server.String())
}

func (s *sockets) Close() error {
	for _, sh := range append(s.v4[:len(s.v4):len(s.v4)], s.v6...) {
		sh.close()
	}
	return nil
}

// A shard is the UDP sockets of one source address.
type shard struct {
	source netip.Addr // zero: the kernel chooses
	v6     bool

	mu     sync.Mutex // guards everything below
	places []place
	closed bool
}

type place struct {
	socket *socket // nil: none is open
	busy   bool
}

// tries is how often a random place is drawn before a socket beyond the shard is opened.
const tries = 4

// take returns a socket connected to server.
func (sh *shard) take(server netip.AddrPort) (PacketConn, error) {
	var draw [4 * tries]byte
	rand.Read(draw[:])
	sh.mu.Lock()
	if sh.closed {
		sh.mu.Unlock()
		return nil, net.ErrClosed
	}
	at := -1
	var c *socket
	for i := range tries {
		p := int(binary.LittleEndian.Uint32(draw[4*i:]) % uint32(len(sh.places)))
		if !sh.places[p].busy {
			at, c = p, sh.places[p].socket
			sh.places[p] = place{busy: true}
			break
		}
	}
	sh.mu.Unlock()

	if c != nil && !c.reconnect(server) {
		c.Close()
		c = nil
	}
	if c == nil {
		var err error
		if c, err = open(sh.source, sh.v6, server); err != nil {
			sh.put(at, nil)
			return nil, err
		}
	}
	c.shard, c.place = sh, at
	return c, nil
}

// put gives back the place, with the socket to keep there, or nil.
func (sh *shard) put(at int, c *socket) {
	if at >= 0 {
		sh.mu.Lock()
		if sh.closed {
			sh.mu.Unlock()
		} else {
			sh.places[at] = place{socket: c}
			sh.mu.Unlock()
			return
		}
	}
	if c != nil {
		c.Close()
	}
}

func (sh *shard) close() {
	sh.mu.Lock()
	sh.closed = true
	places := sh.places
	sh.places = nil
	sh.mu.Unlock()
	for _, p := range places {
		if p.socket != nil {
			p.socket.Close()
		}
	}
}

// maxUses is how many queries go out from one port.
const maxUses = 32

// A socket is a connected UDP socket. Between take and Release it belongs to one exchange.
type socket struct {
	*os.File // in the runtime's poller; its own Read takes an empty datagram for the end of a file
	raw      syscall.RawConn
	fd       int
	uses     int
	shard    *shard
	place    int // in the shard; -1: beyond it

	// turn sends out, and receives in when it is called again. It is made once so that RoundTrip allocates
	// nothing; the rest are its arguments and results.
	turn    func(fd uintptr) (done bool)
	out, in []byte
	n       int
	err     error
}

func open(source netip.Addr, v6 bool, server netip.AddrPort) (*socket, error) {
	family := unix.AF_INET
	if v6 {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := prepare(fd, source, v6, server); err != nil {
		unix.Close(fd)
		return nil, err
	}
	c := &socket{File: os.NewFile(uintptr(fd), "udp"), fd: fd}
	if c.raw, err = c.SyscallConn(); err != nil {
		c.Close()
		return nil, err
	}
	// RawSyscall: the socket does not block, so the scheduler need not know.
	c.turn = func(fd uintptr) bool {
		if out := c.out; out != nil {
			c.out = nil
			_, _, e := syscall.RawSyscall(unix.SYS_WRITE, fd, uintptr(unsafe.Pointer(&out[0])), uintptr(len(out)))
			if e != 0 && e != syscall.EAGAIN && e != syscall.ENOBUFS { // a full send queue is a datagram lost
				c.err = os.NewSyscallError("write", e)
				return true
			}
			return false
		}
		n, _, e := syscall.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(&c.in[0])), uintptr(len(c.in)))
		if e == syscall.EAGAIN {
			return false
		}
		if c.n = int(n); e != 0 {
			c.n, c.err = 0, os.NewSyscallError("read", e)
		}
		return true
	}
	return c, nil
}

func prepare(fd int, source netip.Addr, v6 bool, server netip.AddrPort) error {
	var err error
	if v6 {
		err = errors.Join(
			os.NewSyscallError("setsockopt IPV6_V6ONLY", unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)),
			os.NewSyscallError("setsockopt IPV6_MTU_DISCOVER", unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_OMIT)))
	} else {
		// OMIT: no path MTU learnt from (forged) ICMP makes us fragment.
		err = os.NewSyscallError("setsockopt IP_MTU_DISCOVER", unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_OMIT))
	}
	if err != nil {
		return err
	}
	if err := bindRandom(fd, source, v6); err != nil {
		return err
	}
	return os.NewSyscallError("connect", unix.Connect(fd, sockaddr(server)))
}

// bindRandom binds to a port between 1024 and 65535 drawn from the system's random source.
func bindRandom(fd int, source netip.Addr, v6 bool) error {
	if !source.IsValid() {
		source = netip.IPv4Unspecified()
		if v6 {
			source = netip.IPv6Unspecified()
		}
	}
	for tries := 0; ; tries++ {
		var b [2]byte
		rand.Read(b[:])
		port := binary.LittleEndian.Uint16(b[:])
		if port < 1024 {
			continue
		}
		err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(source, port)))
		if err != unix.EADDRINUSE || tries > 100 {
			return os.NewSyscallError("bind", err)
		}
	}
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	sa := &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
	if z := a.Addr().Zone(); z != "" {
		if i, err := net.InterfaceByName(z); err == nil {
			sa.ZoneId = uint32(i.Index)
		}
	}
	return sa
}

// reconnect turns the socket to another server and reports whether it holds nothing that came before.
func (c *socket) reconnect(server netip.AddrPort) bool {
	// Connecting to AF_UNSPEC first lets the kernel choose the source address anew.
	none := unix.RawSockaddr{Family: unix.AF_UNSPEC}
	if _, _, e := syscall.RawSyscall(unix.SYS_CONNECT, uintptr(c.fd), uintptr(unsafe.Pointer(&none)), unsafe.Sizeof(none)); e != 0 {
		return false
	}
	if unix.Connect(c.fd, sockaddr(server)) != nil {
		return false // open tells why
	}
	var b [1]byte
	_, _, e := syscall.RawSyscall6(unix.SYS_RECVFROM, uintptr(c.fd), uintptr(unsafe.Pointer(&b[0])), 1, unix.MSG_DONTWAIT|unix.MSG_PEEK, 0, 0)
	return e == syscall.EAGAIN
}

// RoundTrip sends within the poller's Read: the poller then hears of whatever comes back, and nothing need be
// looked for in a socket that is known to be empty.
func (c *socket) RoundTrip(out, in []byte) (int, error) {
	c.out, c.in, c.n, c.err = out, in, 0, nil
	err := c.raw.Read(c.turn)
	c.out, c.in = nil, nil
	if err == nil {
		err = c.err
	}
	return c.n, err
}

// SetReadDeadline bounds RoundTrip.
func (c *socket) SetReadDeadline(t time.Time) error { return c.File.SetReadDeadline(t) }

// Release gives the socket back to its shard, or closes it.
func (c *socket) Release(clean bool) {
	c.uses++
	if clean && c.uses < maxUses && c.place >= 0 {
		c.shard.put(c.place, c)
		return
	}
	c.shard.put(c.place, nil)
	c.Close()
}
