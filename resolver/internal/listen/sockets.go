package listen

import (
	"context"
	"net"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// receiveBuffer is what a UDP socket asks the kernel for, which gives at most net.core.rmem_max: at 300,000
// queries a second the default of 208 KiB is full within a millisecond of a worker's absence.
const receiveBuffer = 4 << 20

// OpenUDP opens n sockets at one address, among which the kernel divides the clients (SO_REUSEPORT). Port 0
// chooses one port for all. Listeners open nothing themselves; this is for whoever hands them sockets.
func OpenUDP(ctx context.Context, at netip.AddrPort, n int) ([]net.PacketConn, error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		if e := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer) // a smaller one will do
		}); e != nil {
			return e
		}
		return os.NewSyscallError("setsockopt SO_REUSEPORT", err)
	}}
	network := "udp4"
	if at.Addr().Is6() {
		network = "udp6"
	}
	var conns []net.PacketConn
	for range n {
		c, err := lc.ListenPacket(ctx, network, at.String())
		if err != nil {
			for _, c := range conns {
				c.Close()
			}
			return nil, err
		}
		conns = append(conns, c)
		at = netip.AddrPortFrom(at.Addr(), AddrPort(c.LocalAddr()).Port())
	}
	return conns, nil
}
