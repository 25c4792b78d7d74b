package node

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluice-dns/sluice/cmd/internal/config"
	"github.com/sluice-dns/sluice/resolver"
)

// sockets are the listeners of a node.
type sockets struct {
	udp           []net.PacketConn
	tcp, dot, doh []net.Listener
	addrs         map[string][]netip.AddrPort
	given         bool // the resolver has them
}

// rcvbuf is how much a UDP socket may queue, in bytes: a burst of some ten thousand queries. The kernel's
// limit may make it less.
const rcvbuf = 4 << 20

// open opens every address of the configuration. With UDP, each address gets as many sockets as workers.
func (s *sockets) open(c *config.Listen, l *resolver.LiveLimits) error {
	s.addrs = make(map[string][]netip.AddrPort)
	workers := int(l.Value(resolver.LimitWorkers))
	for _, a := range c.UDP {
		if workers > 1 && a.Port() != 0 {
			if err := free(a); err != nil {
				return fmt.Errorf("listen.udp: %w", err)
			}
		}
	}
	for _, a := range c.UDP {
		at := a
		for i := range workers {
			lc := net.ListenConfig{Control: udpOptions(workers > 1)}
			pc, err := lc.ListenPacket(context.Background(), "udp", at.String())
			if err != nil {
				return fmt.Errorf("listen.udp: %w", err)
			}
			s.udp = append(s.udp, pc)
			if i == 0 {
				at = pc.LocalAddr().(*net.UDPAddr).AddrPort() // port 0: the other workers share the one chosen
				s.addrs["udp"] = append(s.addrs["udp"], unmap(at))
			}
		}
	}
	for _, x := range []struct {
		key   string
		addrs []netip.AddrPort
		to    *[]net.Listener
	}{{"tcp", c.TCP, &s.tcp}, {"dot", c.DoT, &s.dot}, {"doh", c.DoH, &s.doh}} {
		for i, a := range x.addrs {
			if x.key == "tcp" && a.Port() == 0 && i < len(c.UDP) && c.UDP[i].Port() == 0 && c.UDP[i].Addr() == a.Addr() {
				a = s.addrs["udp"][i] // plain DNS is one service: the same port on both if it is to be had
				if ln, err := net.Listen("tcp", a.String()); err == nil {
					s.add(x.key, ln, x.to)
					continue
				}
				a = x.addrs[i]
			}
			ln, err := net.Listen("tcp", a.String())
			if err != nil {
				return fmt.Errorf("listen.%s: %w", x.key, err)
			}
			s.add(x.key, ln, x.to)
		}
	}
	return nil
}

// free reports why an address cannot be had alone. Workers share one by SO_REUSEPORT, and the kernel lets any
// process of the same user share it too: a second resolver, started by mistake, would silently take half of the
// clients.
func free(a netip.AddrPort) error {
	pc, err := net.ListenPacket("udp", a.String())
	if err != nil {
		return err
	}
	return pc.Close()
}

func (s *sockets) add(key string, ln net.Listener, to *[]net.Listener) {
	*to = append(*to, ln)
	s.addrs[key] = append(s.addrs[key], unmap(ln.Addr().(*net.TCPAddr).AddrPort()))
}

func unmap(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

func udpOptions(share bool) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		var err error
		if cerr := c.Control(func(fd uintptr) {
			if share {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
			}
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, rcvbuf) // as much as the kernel allows
		}); cerr != nil {
			return cerr
		}
		return err
	}
}

func (s *sockets) listeners(c *config.Sluice, certs *certificates) resolver.Listeners {
	return resolver.Listeners{UDP: s.udp, TCP: s.tcp, DoT: s.dot, DoH: s.doh, GetCertificate: certs.get, DoHPath: c.Identify.DoHPath, ProxyFrom: c.Listen.ProxyProtocolFrom}
}

// attrs are the addresses for the log lines "ready" and "serving".
func (s *sockets) attrs(n *Node) []any {
	join := func(as []netip.AddrPort) string {
		var t []string
		for _, a := range as {
			t = append(t, a.String())
		}
		return strings.Join(t, ",")
	}
	attrs := []any{}
	for _, k := range []string{"udp", "tcp", "dot", "doh", "doq"} {
		attrs = append(attrs, k, join(s.addrs[k]))
	}
	service := ""
	if n.service != nil {
		service = n.service.addr
	}
	return append(attrs, "http", n.control.httpAddr, "admin", n.control.adminAddr, "service", service)
}

// close closes what the resolver was not given.
func (s *sockets) close() {
	if s.given {
		return
	}
	for _, c := range s.udp {
		c.Close()
	}
	for _, ls := range [][]net.Listener{s.tcp, s.dot, s.doh} {
		for _, l := range ls {
			l.Close()
		}
	}
}

// certificates are those of the encrypted listeners, replaced as one by reload.
type certificates struct {
	files []config.Certificate
	log   *slog.Logger
	now   atomic.Pointer[[]tls.Certificate]
}

func loadCertificates(files []config.Certificate, log *slog.Logger) (*certificates, error) {
	c := &certificates{files: files, log: log}
	return c, c.reload()
}

// reload reads all certificates, or changes nothing.
func (c *certificates) reload() error {
	var pairs []tls.Certificate
	for _, f := range c.files {
		p, err := tls.LoadX509KeyPair(f.Cert, f.Key)
		if err != nil {
			return fmt.Errorf("tls.certificates: %s: %w", f.Cert, err)
		}
		if p.Leaf == nil {
			if p.Leaf, err = x509.ParseCertificate(p.Certificate[0]); err != nil {
				return fmt.Errorf("tls.certificates: %s: %w", f.Cert, err)
			}
		}
		if p.Leaf.PublicKeyAlgorithm == x509.RSA {
			// An RSA handshake costs several times what an ECDSA one does; operators have learned of it in a
			// reconnect storm.
			c.log.Warn("a certificate has an RSA key: handshakes will cost several times as much as with ECDSA; renew it with an ECDSA key", "file", f.Cert)
		}
		pairs = append(pairs, p)
	}
	c.now.Store(&pairs)
	return nil
}

// get chooses the certificate that fits what the client supports and names, the first if none does.
func (c *certificates) get(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
	pairs := *c.now.Load()
	if len(pairs) == 0 {
		return nil, errors.New("no certificate is configured")
	}
	for i := range pairs {
		if h.SupportsCertificate(&pairs[i]) == nil {
			return &pairs[i], nil
		}
	}
	return &pairs[0], nil
}

// readPool reads the certificates of authorities.
func readPool(file string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s holds no certificate in PEM form", file)
	}
	return pool, nil
}
