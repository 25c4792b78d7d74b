package demo

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/sluice-dns/sluice/cmd/internal/config"
	"github.com/sluice-dns/sluice/cmd/internal/node"
	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/siminternet"
	"github.com/sluice-dns/sluice/usercache"
)

// The people of the demo, and what the operator gives them.
var (
	alice    = client{name: "alice", device: "alice-phone", source: netip.MustParseAddr("127.0.0.2")}
	bob      = client{name: "bob", device: "bob-laptop", source: netip.MustParseAddr("127.0.0.3")}
	stranger = client{name: "a stranger", device: "nobody-phone", source: netip.MustParseAddr("127.0.0.4")}
)

const (
	serverName = "dns.demo.test" // devices are labels under it
	listID     = "ads"
	listName   = "Demo ads and trackers"
	policyID   = "family"

	listText = `! A filter list as people publish them: one rule a line.
! Comments begin with an exclamation mark.
||ads.example^
||tracker.example^
`
	aliceRules   = "! Alice wants these banners.\n@@||banner.ads.example^\n"
	aliceRewrite = "nas.home.arpa=A 192.0.2.7"
)

// A system is everything that runs.
type system struct {
	dir     string
	version string
	log     *slog.Logger

	internet *siminternet.Internet
	port     uint16 // of all its servers
	service  *service
	nodes    []*process
	resent   atomic.Int64 // queries that a client sent again

	caFile string
	roots  *x509.CertPool
}

// start starts everything, makes the users and waits until both resolvers serve them.
func (s *system) start(ctx context.Context) (err error) {
	s.internet = siminternet.Standard(clock.Wall())
	if s.port, err = s.internet.ListenLoopback(0); err != nil {
		return fmt.Errorf("starting the small Internet: %w", err)
	}
	if err := s.writeFiles(); err != nil {
		return err
	}

	s.service = &service{dir: s.path("service"), version: s.version, log: s.log.With("part", "service")}
	if err := s.service.start(); err != nil {
		return err
	}
	if err := s.service.open(); err != nil {
		return err
	}
	if err := s.provision(ctx); err != nil {
		return err
	}

	for _, name := range []string{"resolver-1", "resolver-2"} {
		p := &process{name: name, config: s.config(name), version: s.version, log: s.log.With("part", name)}
		s.nodes = append(s.nodes, p)
		if err := p.start(); err != nil {
			return err
		}
	}
	for _, p := range s.nodes {
		if err := s.settled(ctx, p); err != nil {
			return err
		}
	}
	return nil
}

func (s *system) path(name string) string { return filepath.Join(s.dir, name) }

// writeFiles writes what parts read: root hints, the trust anchor, the list, certificates.
func (s *system) writeFiles() (err error) {
	s.caFile = s.path("ca.pem")
	cert, key, ca, err := makeCertificate(clock.Wall())
	if err != nil {
		return err
	}
	s.roots = x509.NewCertPool()
	s.roots.AddCert(ca)
	for name, text := range map[string]string{
		"root.hints":  s.internet.RootHints(),
		"root.anchor": s.internet.TrustAnchor(),
		"ads.txt":     listText,
		"ca.pem":      string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.Raw})),
		"cert.pem":    cert,
		"key.pem":     key,
	} {
		if err := os.WriteFile(s.path(name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// config is the configuration of one resolver: that of an operator whose Internet is on one port of loopback.
func (s *system) config(name string) *config.Sluice {
	c := config.Default()
	c.DataDir = s.path(name)
	c.Node.ID, c.Node.Region = name, "demo"
	free := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}
	c.Listen = config.Listen{UDP: free, TCP: free, DoT: free, DoH: free, Workers: 1}
	c.TLS.Certificates = []config.Certificate{{Cert: s.path("cert.pem"), Key: s.path("key.pem")}}
	c.Identify.ServerNames = []string{serverName}
	c.Recursion.RootHintsFile = s.path("root.hints")
	c.Recursion.UpstreamPort = s.port
	c.Recursion.IPv6 = false
	c.Recursion.DoNotQuery = config.DoNotQuery{}
	c.Recursion.LocalZones = config.LocalZonesNone // the small Internet has names under test.
	c.DNSSEC.TrustAnchorFile = s.path("root.anchor")
	c.DNSSEC.TrustAnchorUpdates, c.DNSSEC.TrustAnchorSignalling = false, false
	c.Cache.Size = 32 << 20
	c.Users.Services = []config.Endpoint{{Network: "tcp", Address: s.service.resolvers}}
	c.Admin.Listen, c.HTTP.Listen = config.Endpoint{Network: "tcp", Address: "127.0.0.1:0"}, config.Endpoint{}
	return c
}

// provision does the operator's work through the admin API.
func (s *system) provision(ctx context.Context) error {
	v := s.service
	if err := v.addList(ctx, listID, listName, s.path("ads.txt")); err != nil {
		return err
	}
	if _, err := v.policies().CreatePolicy(ctx, &adminv1.CreatePolicyRequest{Id: policyID, Name: "Families"}); err != nil {
		return fmt.Errorf("policy %s: %w", policyID, err)
	}
	if err := v.set(ctx, "policy/"+policyID, "lists", listID, "safe_search", "google"); err != nil {
		return err
	}
	for _, u := range []struct {
		client
		policy string
	}{{alice, policyID}, {bob, ""}} {
		if _, err := v.users().CreateUser(ctx, &adminv1.CreateUserRequest{Id: u.name, Policy: u.policy}); err != nil {
			return fmt.Errorf("user %s: %w", u.name, err)
		}
		if _, err := v.users().CreateDevice(ctx, &adminv1.CreateDeviceRequest{
			User: u.name, Device: &userv1.Device{Id: u.device, Links: []string{u.source.String()}},
		}); err != nil {
			return fmt.Errorf("device %s: %w", u.device, err)
		}
	}
	if err := v.set(ctx, alice.name, "rewrites", aliceRewrite); err != nil {
		return err
	}
	_, err := v.setRules(ctx, alice.name, aliceRules)
	return err
}

// settled waits until a resolver serves the service's newest revision and has compiled what it needs.
func (s *system) settled(ctx context.Context, p *process) error {
	head := s.service.head()
	if err := until(ctx, func() bool { return p.revision() >= head }); err != nil {
		return fmt.Errorf("%s has revision %d and not the service's %d: %w", p.name, p.revision(), head, err)
	}
	// The list comes after the users that need it, and only answers tell that it is compiled.
	var last error
	if err := until(ctx, func() bool {
		_, last = s.expect(ctx, p, alice, udp, question{"www.ads.example.", typeA}, blocked)
		return last == nil
	}); err != nil {
		return fmt.Errorf("%s does not apply the list: %w", p.name, last)
	}
	return nil
}

// hold makes sure that everything serves after the checks.
func (s *system) hold() error {
	if s.service.store == nil {
		if err := s.service.start(); err != nil {
			return err
		}
		return s.service.open()
	}
	return nil
}

// close ends everything that runs.
func (s *system) close() {
	for _, p := range s.nodes {
		if err := p.stop(); err != nil {
			s.log.Error("stopping", "part", p.name, "err", err)
		}
	}
	if s.service != nil {
		if err := s.service.stop(); err != nil {
			s.log.Error("stopping the service", "err", err)
		}
	}
	if s.internet != nil {
		s.internet.Close()
	}
}

// A process is one resolver, with a data directory that outlives it.
type process struct {
	name    string
	config  *config.Sluice
	version string
	log     *slog.Logger

	node  *node.Node       // nil while stopped
	admin *grpc.ClientConn // the operator's
	end   context.CancelFunc
	ended chan error
}

// start starts the resolver on free ports.
func (p *process) start() error {
	m, err := resolver.ReadMachine(os.DirFS("/"))
	if err != nil {
		return err
	}
	m.Memory = min(m.Memory, 2<<30) // two resolvers share this process: no table for all of the machine
	n, err := node.Start(p.config, node.Options{Logger: p.log, Version: p.version, Machine: &m})
	if err != nil {
		return fmt.Errorf("starting %s: %w", p.name, err)
	}
	if p.admin, err = grpc.NewClient("passthrough:///"+n.AdminAddr(), grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		return errors.Join(err, n.Close())
	}
	ctx, end := context.WithCancel(context.Background())
	p.node, p.end, p.ended = n, end, make(chan error, 1)
	go func() { p.ended <- n.Run(ctx) }()
	return nil
}

// stop drains and closes the resolver; it may be called in any state.
func (p *process) stop() error {
	if p.node == nil {
		return nil
	}
	p.end()
	err := errors.Join(<-p.ended, p.admin.Close(), p.node.Close())
	p.node = nil
	return err
}

// revision is that of the users it serves, 0 while it is stopped.
func (p *process) revision() uint64 {
	if p.node == nil {
		return 0
	}
	return p.node.Users().Dataset(usercache.Users).Status().Revision
}

// adminAddr is where its operators find it; "" while it is stopped.
func (p *process) adminAddr() string {
	if p.node == nil {
		return ""
	}
	return p.node.AdminAddr()
}

// root is the digest of the users it serves.
func (p *process) root() usercache.Hash {
	if p.node == nil {
		return usercache.Hash{}
	}
	return p.node.Users().Dataset(usercache.Users).Root()
}

// addr is where it serves a transport; the zero address while it is stopped.
func (p *process) addr(t transport) netip.AddrPort {
	if p.node == nil {
		return netip.AddrPort{}
	}
	return p.node.Addrs()[t.listener()][0]
}

// until asks again and again whether something holds.
func until(ctx context.Context, holds func() bool) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-ctx.Done():
			return errors.New("not in time")
		case <-tick.C:
		}
	}
	return nil
}
