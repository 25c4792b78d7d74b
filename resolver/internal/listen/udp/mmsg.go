package udp

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-dns/sluice/resolver/clock"
)

// mmsg receives and sends batches with recvmmsg and sendmmsg. Its memory is laid out once.
type mmsg struct {
	w        *worker
	raw      syscall.RawConn
	wildcard bool // bound to the unspecified address: control messages say which address was asked
	in, out  [batchSize]mmsghdr
	iin, iou [batchSize]unix.Iovec
	name     [batchSize]sockaddr
	ctl      [batchSize]control // received; without wildcard only the first is used
	from     [batchSize]control // to be sent: the address to send from
	queries  []byte             // batchSize buffers of stride bytes
	answers  []byte

	source    [batchSize]uint8 // which message a datagram of the batch was
	overflow  uint32           // the kernel's count as last seen
	err       error            // of receiving, when the callback ends
	yield     bool             // the callback ended to let others run
	busySince clock.Instant
}

// mmsghdr is struct mmsghdr of recvmmsg(2).
type mmsghdr struct {
	hdr unix.Msghdr
	n   uint32
}

// sockaddr holds a sockaddr_in or a sockaddr_in6.
type sockaddr [unix.SizeofSockaddrInet6]byte

// control holds the control messages of one datagram: a timestamp, the queue's overflow count, the packet
// information, each behind its header and padded to 8 bytes.
type control struct {
	_ [0]uint64 // aligns it as a Cmsghdr must be
	b [controlSize]byte
}

func (c *control) header() *unix.Cmsghdr { return (*unix.Cmsghdr)(unsafe.Pointer(&c.b[0])) }

const (
	headerSize  = unix.SizeofCmsghdr
	controlSize = 3*headerSize + 16 + 8 + 24
	// stride keeps the same parts of all buffers from falling into the same sets of the CPU's cache, as they
	// would if they were 4096 bytes apart.
	stride = MaxQuery + 192
)

func newMMsg(w *worker, c *net.UDPConn) (*mmsg, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	m := &mmsg{
		w: w, raw: raw, wildcard: !w.local.Addr().IsValid() || w.local.Addr().IsUnspecified(),
		queries: make([]byte, batchSize*stride), answers: make([]byte, batchSize*stride),
	}
	for i := range batchSize {
		m.iin[i].Base = &m.queries[i*stride]
		m.iin[i].SetLen(MaxQuery)
		m.in[i].hdr = unix.Msghdr{Name: &m.name[i][0], Iov: &m.iin[i], Iovlen: 1}
		if m.wildcard || i == 0 {
			m.in[i].hdr.Control = &m.ctl[i].b[0]
		}
		w.batch.out[i].buf = m.answers[i*stride : i*stride+MaxQuery : i*stride+MaxQuery]
		m.iou[i] = unix.Iovec{Base: &m.answers[i*stride]}
		m.out[i].hdr = unix.Msghdr{Iov: &m.iou[i], Iovlen: 1}
	}
	var optErr error
	err = raw.Control(func(fd uintptr) { optErr = m.setOptions(int(fd)) })
	if err == nil {
		err = optErr
	}
	return m, err
}

func (m *mmsg) setOptions(fd int) error {
	set := func(level, opt, value int, name string) error {
		return os.NewSyscallError("setsockopt "+name, unix.SetsockoptInt(fd, level, opt, value))
	}
	if err := set(unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1, "SO_TIMESTAMPNS"); err != nil {
		return err
	}
	if err := set(unix.SOL_SOCKET, unix.SO_RXQ_OVFL, 1, "SO_RXQ_OVFL"); err != nil {
		return err
	}
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return os.NewSyscallError("getsockopt SO_DOMAIN", err)
	}
	if domain == unix.AF_INET {
		// Responses are at most what the client offered: no path MTU, learnt from whoever sends ICMP, is to
		// make them fragments.
		if err := set(unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_OMIT, "IP_MTU_DISCOVER"); err != nil {
			return err
		}
		if m.wildcard {
			return set(unix.IPPROTO_IP, unix.IP_PKTINFO, 1, "IP_PKTINFO")
		}
		return nil
	}
	unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_OMIT) // fails if it is IPv6 only
	if err := set(unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_OMIT, "IPV6_MTU_DISCOVER"); err != nil {
		return err
	}
	if m.wildcard {
		return set(unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1, "IPV6_RECVPKTINFO")
	}
	return nil
}

func (m *mmsg) serve() error {
	for {
		m.yield = false
		if err := m.raw.Read(m.serveReady); err != nil {
			// The socket is being closed, or the deadline has passed: the server drains. What the kernel has
			// queued until now is still answered, but not what comes for ever.
			m.raw.Control(func(fd uintptr) {
				for range 64 {
					if !m.once(fd) {
						return
					}
				}
			})
			return err
		}
		if !m.yield {
			return m.err
		}
		runtime.Gosched()
	}
}

// serveReady is the callback of RawConn.Read: it serves until nothing is left and returns false to wait for
// more, or true to return to serve.
func (m *mmsg) serveReady(fd uintptr) bool {
	m.busySince = 0
	for m.once(fd) {
		if m.yield {
			return true
		}
	}
	return m.err != nil
}

// once serves one batch and returns false if there was none.
func (m *mmsg) once(fd uintptr) bool {
	m.ready()
	n, _, e := syscall.RawSyscall6(unix.SYS_RECVMMSG, fd, uintptr(unsafe.Pointer(&m.in[0])), batchSize, unix.MSG_DONTWAIT, 0, 0)
	switch e {
	case 0:
	case syscall.EAGAIN:
		return false
	case syscall.EINTR, syscall.ECONNREFUSED, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.ENOMEM, syscall.ENOBUFS:
		m.yield = true // it passes, or is the ICMP error of an earlier response
		return true
	default:
		m.err = os.NewSyscallError("recvmmsg", e)
		return false
	}
	now := clock.Elapsed()
	m.gather(int(n))
	m.w.serveBatch(now)
	m.flush(fd)
	if m.busySince == 0 {
		m.busySince = now
	} else if now.Sub(m.busySince) >= turn {
		m.yield = true
	}
	return true
}

// ready undoes what receiving writes to the headers.
func (m *mmsg) ready() {
	for i := range m.in {
		h := &m.in[i].hdr
		h.Namelen = unix.SizeofSockaddrInet6
		if h.Control != nil {
			h.SetControllen(controlSize)
		}
	}
}

// gather makes the batch of n messages received, without those that cannot be answered.
func (m *mmsg) gather(n int) {
	w, b := m.w, &m.w.batch
	b.received = 0
	local := w.local
	for i := range n {
		h := &m.in[i]
		if h.hdr.Control != nil {
			asked, sent := m.readControl(i)
			if m.wildcard {
				local = netip.AddrPortFrom(asked, w.local.Port())
			}
			// One look a batch will do, for the kernel queues them in order: the first is the oldest. It is
			// compared with the clock that stamped it, steps and all, which package clock need not show.
			if i == 0 && sent != 0 {
				age := kernelTime() - sent
				if age > w.queueAge.Load() {
					w.queueAge.Store(age)
				}
				if age > int64(MaxAge) {
					w.server.counters.Old.Add(uint64(n))
					return
				}
			}
		}
		if h.hdr.Flags&unix.MSG_TRUNC != 0 {
			w.server.counters.Long.Add(1)
			continue
		}
		b.in[b.received] = datagram{m.queries[i*stride : i*stride+int(h.n)], m.name[i].addrPort(), local}
		m.source[b.received] = uint8(i)
		b.received++
	}
}

// kernelTime reads the clock of the kernel's timestamps.
func kernelTime() int64 {
	var ts unix.Timespec
	syscall.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_REALTIME, uintptr(unsafe.Pointer(&ts)), 0)
	return ts.Nano()
}

// readControl reads the control messages of message i: the address asked and when the kernel got it, in
// nanoseconds since 1970; zero if they are not there.
func (m *mmsg) readControl(i int) (asked netip.Addr, sent int64) {
	b := m.ctl[i].b[:min(int(m.in[i].hdr.Controllen), controlSize)]
	for len(b) >= headerSize {
		h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0])) // aligned: each begins at a multiple of 8
		if int(h.Len) < headerSize || int(h.Len) > len(b) {
			break
		}
		d := b[headerSize:h.Len]
		switch {
		case h.Level == unix.SOL_SOCKET && h.Type == unix.SO_TIMESTAMPNS && len(d) >= 16:
			sent = int64(binary.NativeEndian.Uint64(d))*1e9 + int64(binary.NativeEndian.Uint64(d[8:]))
		case h.Level == unix.SOL_SOCKET && h.Type == unix.SO_RXQ_OVFL && len(d) >= 4:
			c := binary.NativeEndian.Uint32(d)
			m.w.server.counters.Overflow.Add(uint64(c - m.overflow))
			m.overflow = c
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && len(d) >= unix.SizeofInet4Pktinfo:
			asked = netip.AddrFrom4([4]byte(d[4:8])) // ipi_spec_dst: also for a broadcast an address of ours
			m.setSource(i, h.Level, h.Type, d[:unix.SizeofInet4Pktinfo])
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && len(d) >= unix.SizeofInet6Pktinfo:
			a := netip.AddrFrom16([16]byte(d[:16]))
			asked = a.Unmap()
			m.setSource(i, h.Level, h.Type, d[:unix.SizeofInet6Pktinfo])
		}
		b = b[min((int(h.Len)+7)&^7, len(b)):]
	}
	return asked, sent
}

// setSource makes the control message that sends the response to message i from the address it asked.
func (m *mmsg) setSource(i int, level, typ int32, info []byte) {
	c := &m.from[i]
	h := c.header()
	h.Level, h.Type = level, typ
	h.SetLen(headerSize + len(info))
	d := c.b[headerSize : headerSize+len(info)]
	copy(d, info)
	// The interface is left to routing, which need not send out where it came in; except for addresses that
	// mean nothing without it.
	if typ == unix.IP_PKTINFO {
		clear(d[:4])
	} else if !(d[0] == 0xfe && d[1]&0xc0 == 0x80) {
		clear(d[16:20])
	}
}

// sourceLen is the length of the control message for message i, padding included; 0 if there is none.
func (m *mmsg) sourceLen(i int) int {
	if !m.wildcard {
		return 0
	}
	return (int(m.from[i].header().Len) + 7) &^ 7
}

// flush sends the batch's answers.
func (m *mmsg) flush(fd uintptr) {
	b := &m.w.batch
	for i := range b.answers {
		a := &b.out[i]
		to := int(m.source[a.to])
		h := &m.out[i].hdr
		h.Name, h.Namelen = &m.name[to][0], m.in[to].hdr.Namelen
		m.iou[i].SetLen(a.n)
		if n := m.sourceLen(to); n > 0 {
			h.Control = &m.from[to].b[0]
			h.SetControllen(n)
		}
	}
	for at := 0; at < b.answers; {
		n, _, e := syscall.RawSyscall6(unix.SYS_SENDMMSG, fd, uintptr(unsafe.Pointer(&m.out[at])), uintptr(b.answers-at), unix.MSG_DONTWAIT, 0, 0)
		if e != 0 { // of the first message: a firewall, no route, a full queue. The others may still go.
			m.w.server.counters.Unsent.Add(1)
			n = 1
		}
		at += int(n)
	}
}

// replier keeps what sending a single response later takes.
func (m *mmsg) replier(i int) func([]byte) {
	at := m.source[i]
	r := &later{m: m, name: m.name[at], nameLen: m.in[at].hdr.Namelen, from: m.from[at], fromLen: m.sourceLen(int(at))}
	return r.send
}

type later struct {
	m       *mmsg
	name    sockaddr
	nameLen uint32
	from    control
	fromLen int
}

func (r *later) send(response []byte) {
	iov := unix.Iovec{Base: &response[0]}
	iov.SetLen(len(response))
	h := unix.Msghdr{Name: &r.name[0], Namelen: r.nameLen, Iov: &iov, Iovlen: 1}
	if r.fromLen > 0 {
		h.Control = &r.from.b[0]
		h.SetControllen(r.fromLen)
	}
	var e syscall.Errno
	err := r.m.raw.Control(func(fd uintptr) {
		_, _, e = syscall.RawSyscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&h)), unix.MSG_DONTWAIT)
	})
	if err != nil || e != 0 {
		r.m.w.server.counters.Unsent.Add(1)
	}
}

// addrPort reads a socket address; IPv4 in IPv6 comes out as IPv4.
func (s *sockaddr) addrPort() netip.AddrPort {
	port := binary.BigEndian.Uint16(s[2:])
	if binary.NativeEndian.Uint16(s[:]) == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(s[4:8])), port)
	}
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte(s[8:24])).Unmap(), port)
}
