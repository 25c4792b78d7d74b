package siminternet

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/simnet"
)

// A Network is an in-memory network, named here for those who cannot import simnet.
type Network = simnet.Network

// NewNetwork returns an empty in-memory network.
func NewNetwork() *Network { return simnet.New() }

const (
	// idleTCP is how long a connection may be idle (RFC 7766 section 6.2.3 speaks of seconds).
	idleTCP = 10 * time.Second

	// maxDelayed bounds the answers that wait for their delay at one server; more queries are dropped.
	maxDelayed = 4096
)

// Attach runs every server at port 53 of its address on an in-memory network, until Close.
func (in *Internet) Attach(n *Network) error {
	return in.run(func(addr netip.Addr) (packetConn, net.Listener, error) {
		at := netip.AddrPortFrom(addr, 53)
		u, err := n.ListenUDP(at)
		if err != nil {
			return nil, nil, err
		}
		t, err := n.ListenTCP(at)
		if err != nil {
			u.Close()
			return nil, nil, err
		}
		return u, t, nil
	})
}

// ListenLoopback runs every server at its address, which must be in 127.0.0.0/8, on real sockets of one port,
// until Close. Port 0 chooses one that is free for all of them; the port is returned.
func (in *Internet) ListenLoopback(port uint16) (uint16, error) {
	for _, addr := range in.Addrs() {
		if !addr.Is4() || !addr.IsLoopback() {
			return 0, fmt.Errorf("server %v is not in 127.0.0.0/8", addr)
		}
	}
	if port != 0 {
		return port, in.listenPort(port)
	}
	// The system chooses for the first server; whether the port is free at the other addresses, one has to try.
	var err error
	for range 20 {
		var first *net.UDPConn
		first, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(in.Addrs()[0], 0)))
		if err != nil {
			return 0, err
		}
		port = first.LocalAddr().(*net.UDPAddr).AddrPort().Port()
		first.Close()
		if err = in.listenPort(port); err == nil {
			return port, nil
		}
	}
	return 0, err
}

func (in *Internet) listenPort(port uint16) error {
	return in.run(func(addr netip.Addr) (packetConn, net.Listener, error) {
		at := netip.AddrPortFrom(addr, port)
		u, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(at))
		if err != nil {
			return nil, nil, err
		}
		t, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(at))
		if err != nil {
			u.Close()
			return nil, nil, err
		}
		return u, t, nil
	})
}

// Close stops every server and returns when all their goroutines have ended. Zones and log remain.
func (in *Internet) Close() error {
	in.mu.Lock()
	all := in.running
	in.running, in.addrs = nil, nil
	in.mu.Unlock()
	for _, r := range all {
		r.stop()
	}
	for _, r := range all {
		r.wg.Wait()
	}
	return nil
}

type packetConn interface {
	ReadFromUDPAddrPort([]byte) (int, netip.AddrPort, error)
	WriteToUDPAddrPort([]byte, netip.AddrPort) (int, error)
	Close() error
}

// run opens every server's sockets, then serves; if one cannot be opened, none is.
func (in *Internet) run(open func(netip.Addr) (packetConn, net.Listener, error)) error {
	var opened []*running
	addrs := make(map[netip.Addr]bool)
	for _, addr := range in.Addrs() {
		u, t, err := open(addr)
		if err != nil {
			for _, r := range opened {
				r.stop()
			}
			return err
		}
		addrs[addr] = true
		r := &running{
			in: in, addr: addr, server: in.server(addr), udp: u, tcp: t,
			delayed: make(chan struct{}, maxDelayed), conns: make(map[net.Conn]struct{}),
		}
		r.ctx, r.cancel = context.WithCancel(context.Background())
		opened = append(opened, r)
	}
	for _, r := range opened {
		r.wg.Go(r.serveUDP)
		r.wg.Go(r.serveTCP)
	}
	in.mu.Lock()
	in.running = append(in.running, opened...)
	in.addrs = addrs
	in.mu.Unlock()
	return nil
}

// A running is one server with open sockets. stop ends its goroutines; wg waits for them.
type running struct {
	in     *Internet
	addr   netip.Addr
	server *server
	udp    packetConn
	tcp    net.Listener
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	delayed chan struct{} // a token for each answer that waits

	mu      sync.Mutex // guards everything below
	stopped bool
	conns   map[net.Conn]struct{}
}

func (r *running) stop() {
	r.cancel()
	r.udp.Close()
	r.tcp.Close()
	r.mu.Lock()
	r.stopped = true
	var conns []net.Conn
	for c := range r.conns {
		conns = append(conns, c)
	}
	r.mu.Unlock()
	for _, c := range conns {
		c.Close()
	}
}

func (r *running) serveUDP() {
	buf := make([]byte, 4096) // more than any query takes
	for {
		n, from, err := r.udp.ReadFromUDPAddrPort(buf)
		if err != nil {
			if r.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			continue // an error that belongs to one packet sent earlier
		}
		out := r.in.handle(r.server, r.addr, buf[:n], UDP, from)
		if out.delay <= 0 {
			r.sendUDP(out, from)
			continue
		}
		select {
		case r.delayed <- struct{}{}:
			r.wg.Go(func() {
				if r.pause(out.delay) {
					r.sendUDP(out, from)
				}
				<-r.delayed
			})
		default:
		}
	}
}

func (r *running) sendUDP(out outcome, to netip.AddrPort) {
	for _, p := range out.packets {
		r.udp.WriteToUDPAddrPort(p, to) // a lost answer is what UDP has
	}
}

func (r *running) serveTCP() {
	for {
		c, err := r.tcp.Accept()
		if err != nil {
			if r.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			continue // the peer was gone before it was accepted
		}
		if r.server.behaviour.Load().ResetTCP {
			c.(interface{ SetLinger(int) error }).SetLinger(0)
			c.Close()
			continue
		}
		r.mu.Lock()
		if r.stopped {
			r.mu.Unlock()
			c.Close()
			return
		}
		r.conns[c] = struct{}{}
		r.mu.Unlock()
		r.wg.Go(func() {
			r.serveConn(c)
			r.mu.Lock()
			delete(r.conns, c)
			r.mu.Unlock()
			c.Close()
		})
	}
}

// serveConn answers the queries of one connection in their order.
func (r *running) serveConn(c net.Conn) {
	remote := c.RemoteAddr().(*net.TCPAddr).AddrPort()
	from := netip.AddrPortFrom(remote.Addr().Unmap(), remote.Port())
	var length [2]byte
	buf := make([]byte, 1<<16)
	for {
		c.SetDeadline(time.Now().Add(idleTCP)) // a deadline of package net
		if _, err := io.ReadFull(c, length[:]); err != nil {
			return
		}
		query := buf[:binary.BigEndian.Uint16(length[:])]
		if _, err := io.ReadFull(c, query); err != nil {
			return
		}
		out := r.in.handle(r.server, r.addr, query, TCP, from)
		if !r.pause(out.delay) {
			return
		}
		for _, p := range out.packets {
			if len(p) > 1<<16-1 {
				continue
			}
			if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(p))), p...)); err != nil {
				return
			}
		}
	}
}

// pause waits for d, and reports whether the server still runs.
func (r *running) pause(d time.Duration) bool {
	if d <= 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-r.ctx.Done():
		return false
	}
}
