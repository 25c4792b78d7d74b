// Package simnet is a packet network in memory: UDP endpoints and TCP connections without sockets, for tests
// that run in a testing/synctest bubble.
//
// Endpoints have addresses of type netip.AddrPort and behave as those of package net do: deadlines give
// os.ErrDeadlineExceeded, closing wakes whoever waits and gives net.ErrClosed, a datagram longer than the
// buffer is cut. The network starts no goroutine. What is on its way lies in the receiver's queue with the
// instant it becomes readable, so delays cost nothing, order is exactly reproducible, and a test that closes
// its endpoints leaves nothing behind.
//
// Link says how long a datagram from one address to another takes, or that it is lost. On TCP a lost segment is
// sent again, as TCP would, which shows as delay; a dead link makes dialing fail after its timeout. Inject puts
// a datagram with any source address on the network: with Watch, that is all a spoofer needs.
//
// What it is not: there are no routes, no ICMP (a datagram to nobody vanishes; dialing TCP where nobody listens
// is refused after one round trip), no fragmentation, and no unspecified addresses: an endpoint has exactly one
// address.
package simnet

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
)

// queueLimit bounds the datagrams waiting at one endpoint, on their way or unread. More are dropped, as by a
// full socket buffer.
const queueLimit = 4096

// A Network joins endpoints. It is safe for concurrent use; the exported fields are set before the first use.
type Network struct {
	// Link tells the one-way delay of a packet, or that it is lost. It is called for every packet, from the
	// sender's goroutine, holding no lock. Nil means no delay and no loss.
	Link func(from, to netip.AddrPort) (delay time.Duration, lost bool)

	// Watch sees every datagram that an endpoint sends, before Link judges it. The payload is the sender's
	// buffer, valid during the call. It may call Inject. Nil means nobody watches.
	Watch func(from, to netip.AddrPort, payload []byte)

	mu        sync.Mutex // guards everything below; held for map work only
	packet    map[netip.AddrPort]*PacketConn
	listening map[netip.AddrPort]*Listener
	streams   map[*Conn]struct{}
	ports     *rand.Rand
	closed    bool

	// Lock order: Network.mu, then inbox.mu.
}

// New returns an empty network.
func New() *Network {
	return &Network{
		packet:    make(map[netip.AddrPort]*PacketConn),
		listening: make(map[netip.AddrPort]*Listener),
		streams:   make(map[*Conn]struct{}),
		ports:     rand.New(rand.NewPCG(53, 53)), // the same ports in every run
	}
}

// Inject delivers payload to the endpoint at to, after the given time, as if from had sent it. Link and Watch
// are not asked. It reports whether there was an endpoint that would take it.
func (n *Network) Inject(from, to netip.AddrPort, payload []byte, after time.Duration) bool {
	n.mu.Lock()
	c := n.packet[to]
	n.mu.Unlock()
	if c == nil || (c.remote.IsValid() && c.remote != from) {
		return false
	}
	return c.in.put(parcel{from: from, data: append([]byte(nil), payload...), due: clock.Elapsed().Add(after)}, queueLimit)
}

// Close closes every endpoint of the network.
func (n *Network) Close() error {
	n.mu.Lock()
	n.closed = true
	var all []interface{ Close() error }
	for _, c := range n.packet {
		all = append(all, c)
	}
	for _, l := range n.listening {
		all = append(all, l)
	}
	for c := range n.streams {
		all = append(all, c)
	}
	n.mu.Unlock()
	for _, c := range all {
		c.Close()
	}
	return nil
}

// Open returns how many endpoints, listeners and connections are open: for tests that look for leaks.
func (n *Network) Open() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.packet) + len(n.listening) + len(n.streams)
}

func (n *Network) send(from, to netip.AddrPort, payload []byte) {
	if n.Watch != nil {
		n.Watch(from, to, payload)
	}
	var delay time.Duration
	if n.Link != nil {
		var lost bool
		if delay, lost = n.Link(from, to); lost {
			return
		}
	}
	n.Inject(from, to, payload, delay)
}

// defaultHosts are the addresses of those who dial without saying from where.
var defaultHosts = [2]netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}

// place completes local for an endpoint that talks to remote (zero when it listens): a missing address becomes
// the default host of remote's family, port 0 a random port that taken refuses. The caller holds n.mu.
func (n *Network) place(op string, local, remote netip.AddrPort, taken func(netip.AddrPort) bool) (netip.AddrPort, error) {
	fail := func(err error) (netip.AddrPort, error) {
		return netip.AddrPort{}, &net.OpError{Op: op, Net: "simnet", Addr: net.UDPAddrFromAddrPort(local), Err: err}
	}
	if n.closed {
		return fail(net.ErrClosed)
	}
	addr, port := local.Addr(), local.Port()
	if !addr.IsValid() && remote.IsValid() {
		addr = defaultHosts[0]
		if remote.Addr().Is6() {
			addr = defaultHosts[1]
		}
	}
	if !addr.IsValid() || addr.IsUnspecified() {
		return fail(fmt.Errorf("an endpoint needs one specific address, not %v", addr))
	}
	if port != 0 {
		if at := netip.AddrPortFrom(addr, port); !taken(at) {
			return at, nil
		}
		return fail(syscall.EADDRINUSE)
	}
	for range 1 << 17 {
		at := netip.AddrPortFrom(addr, uint16(1024+n.ports.IntN(1<<16-1024)))
		if !taken(at) {
			return at, nil
		}
	}
	return fail(syscall.EADDRINUSE)
}
