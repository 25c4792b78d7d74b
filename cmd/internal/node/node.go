// Package node is one resolver process: it opens what a configuration names and joins the parts.
//
// Start opens the data directory, sockets and certificates and builds the resolver, the client that keeps its
// user data current, and, without a configured business-logic service, that service itself on a file of its
// own (standalone). Run serves until its context ends, then drains. Everything is given back by Close.
//
// Start fails with every reason named; after it nothing that goes wrong outside stops the process from
// answering: a service that is away, a disk that is full, a certificate that expires are logged, counted and
// shown by /readyz.
package node

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/sluice-dns/sluice/cmd/internal/config"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/syncclient"
	"github.com/sluice-dns/sluice/usercache"
)

// Options are what a configuration does not say.
type Options struct {
	// Logger is needed. Level, if not nil, is its level, which operators can change.
	Logger *slog.Logger
	Level  *slog.LevelVar
	// Version of the program.
	Version string
	// OwnProcess: this is the only node of the process, so GOMAXPROCS and GOMEMLIMIT are set by its limits.
	OwnProcess bool
	// Transport opens the ways to authoritative servers; nil means real sockets.
	Transport resolver.Transport
	// Machine is what limits are made for; nil means this machine.
	Machine *resolver.Machine
}

// A Node is a resolver process. It is safe for concurrent use.
type Node struct {
	o      Options
	config *config.Sluice
	log    *slog.Logger

	limits   *resolver.LiveLimits
	users    *usercache.Cache
	service  *standalone // nil with a configured service
	sync     *syncclient.Client
	resolver *resolver.Resolver
	certs    *certificates
	sockets  sockets
	control  *control // admin and HTTP
	registry *prometheus.Registry
	queries  *queryLog

	texts textWatch

	started   clock.Instant
	listsSeen atomic.Bool // all lists were here once, or are no longer waited for

	cancel  context.CancelFunc // of what Start started
	waits   []func()
	closing sync.Once
}

// Start builds a node. The caller closes it.
func Start(c *config.Sluice, o Options) (_ *Node, err error) {
	if f := Unserved(c); len(f) > 0 {
		return nil, errors.New(f[0].String())
	}
	n := &Node{o: o, config: c, log: o.Logger, started: clock.Elapsed()}
	var ctx context.Context
	ctx, n.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			n.Close()
		}
	}()

	if t := c.Testing; t.ClockFile != "" || t.WallFile != "" {
		n.log.Warn("the clock follows a file: for tests only", "clock_file", t.ClockFile, "wall_file", t.WallFile)
		wait, err := clock.Follow(ctx, t.ClockFile, t.WallFile)
		if err != nil {
			return nil, err
		}
		n.waits = append(n.waits, wait)
	}
	if err := n.setLimits(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(c.DataDir, 0o700); err != nil {
		return nil, fmt.Errorf("data_dir: %w", err)
	}
	key, err := hashKey(filepath.Join(c.DataDir, "hash.key"))
	if err != nil {
		return nil, err
	}
	n.users, err = usercache.Open(usercache.Options{
		Dir:     filepath.Join(c.DataDir, "users"),
		Guard:   usercache.GuardOptions{Share: c.Users.ShrinkGuard.Share, Min: uint64(c.Users.ShrinkGuard.Min), Window: c.Users.ShrinkGuard.Window},
		Program: o.Version, Logger: n.log,
		DetailsBytes: n.limits.Value(resolver.LimitGoMemLimit) / detailsShare,
	})
	if err != nil {
		return nil, fmt.Errorf("user data: %w", err)
	}
	var metrics *resolver.SyncMetrics
	if n.registry, metrics, err = resolver.NewMetrics(); err != nil {
		return nil, err
	}
	if err := n.startSync(metrics); err != nil {
		return nil, err
	}
	if n.certs, err = loadCertificates(c.TLS.Certificates, n.log); err != nil {
		return nil, err
	}
	if err := n.sockets.open(&c.Listen, n.limits); err != nil {
		return nil, err
	}
	if n.queries, err = openQueryLog(c.Log.Queries, n.users.Catalogue); err != nil {
		return nil, err
	}
	ro, err := n.resolverOptions(key)
	if err != nil {
		return nil, err
	}
	if n.resolver, err = resolver.New(*ro); err != nil {
		return nil, err
	}
	if n.service != nil {
		n.service.resolver.Store(n.resolver)
	}
	n.sockets.given = true // the resolver closes them from now on
	if n.control, err = newControl(n); err != nil {
		return nil, err
	}
	return n, nil
}

// detailsShare is the part of the Go heap that devices' settings of variable size may take, merged.
const detailsShare = 32

// setLimits makes the table of limits for the machine and applies what belongs to the process.
func (n *Node) setLimits() error {
	m := n.o.Machine
	if m == nil {
		this, err := resolver.ReadMachine(os.DirFS("/"))
		if err != nil {
			return err
		}
		m = &this
	}
	var err error
	if n.limits, err = resolver.NewLiveLimits(*m, LimitsOptions(n.config)); err != nil {
		return err
	}
	if n.o.OwnProcess {
		n.applyProcess()
	}
	return nil
}

// applyProcess sets what the Go runtime takes from the limits.
func (n *Node) applyProcess() {
	if !n.o.OwnProcess {
		return
	}
	runtime.GOMAXPROCS(int(n.limits.Value(resolver.LimitGoMaxProcs)))
	debug.SetMemoryLimit(n.limits.Value(resolver.LimitGoMemLimit))
}

// LimitsOptions is what a configuration says about limits.
func LimitsOptions(c *config.Sluice) resolver.LimitsOptions {
	o := resolver.LimitsOptions{Class: c.Limits.Class, Workers: c.Listen.Workers, Set: map[resolver.LimitsName]int64{}}
	for name, v := range c.Limits.Set {
		if l, ok := resolver.LimitsByName(name); ok { // config knows no other names; a test compares
			o.Set[l] = v
		}
	}
	if l, _ := resolver.LimitsByName("cache"); c.Cache.Size > 0 {
		o.Set[l] = c.Cache.Size
	}
	return o
}

// hashKey reads the key of name hashes, or makes it. It is kept so that a compiled index can be kept; whoever
// knows it could choose names that collide.
func hashKey(path string) (key [16]byte, err error) {
	b, err := os.ReadFile(path)
	switch {
	case err == nil && len(b) == len(key):
		return [16]byte(b), nil
	case err == nil:
		return key, fmt.Errorf("%s has %d bytes and should have %d; delete it to have a new one made", path, len(b), len(key))
	case !errors.Is(err, fs.ErrNotExist):
		return key, err
	}
	rand.Read(key[:])
	if err := os.WriteFile(path, key[:], 0o600); err != nil {
		_ = os.Remove(path) // half a key would be in the way of the next start
		return key, err
	}
	return key, nil
}

// startSync makes the client of the business-logic service, and without a configured one the service.
func (n *Node) startSync(metrics *resolver.SyncMetrics) (err error) {
	c := n.config
	o := syncclient.Options{
		Cache: n.users, DataDir: filepath.Join(c.DataDir, "sync"), StaleAfter: c.Users.StaleAfter, Metrics: metrics, Logger: n.log,
		Node: syncclient.Node{ID: c.Node.ID, Region: c.Node.Region, Version: n.o.Version},
	}
	if len(c.Users.Services) == 0 {
		if n.service, err = openStandalone(c, n.o, n.log); err != nil {
			return err
		}
		o.Services, o.Dial = []string{inProcess}, n.service.dial
		if err := n.registry.Register(n.service.service.Metrics()); err != nil {
			return fmt.Errorf("registering the metrics of the service: %w", err)
		}
	} else {
		for _, s := range c.Users.Services {
			o.Services = append(o.Services, s.String())
		}
		if o.TLS, err = clientTLS(&c.Users.TLS); err != nil {
			return err
		}
	}
	n.sync, err = syncclient.New(o)
	return err
}

// resolverOptions brings the configuration into the resolver's form.
func (n *Node) resolverOptions(key [16]byte) (*resolver.Options, error) {
	c := n.config
	o := &resolver.Options{
		NodeID: c.Node.ID, Limits: n.limits, NameKey: key, Users: n.users, Logger: n.log,
		Blob: func(sum [32]byte) ([]byte, bool) {
			b, err := n.sync.Blobs().Get(sum)
			return b, err == nil
		},
		OpenBlob: func(sum [32]byte) (io.ReadCloser, bool) {
			f, err := n.sync.Blobs().Open(sum)
			return f, err == nil
		},
		FilterIndex: filepath.Join(c.DataDir, "filter.index"), OwnTexts: filepath.Join(c.DataDir, "own.texts"),
		Access: resolver.AccessOptions{Allow: c.Access.Allow, Unlimited: c.Access.Unlimited},
		Identify: resolver.IdentifyOptions{
			Relays: c.Identify.Relays, Dedicated: c.Identify.Dedicated, DefaultDevice: map[netip.AddrPort]usercache.DeviceID{},
			Stranger: c.Stranger, WhenCold: c.Users.WhenCold, Propose: n.sync.Propose,
		},
		Recursion: resolver.RecursionOptions{
			Prime: c.Recursion.PrimeRoot, PrimeOnce: !c.Recursion.RefreshRoot, NoIPv4: !c.Recursion.IPv4, NoIPv6: !c.Recursion.IPv6,
			UpstreamPort: c.Recursion.UpstreamPort,
			DoNotQuery:   c.Recursion.DoNotQuery.Networks, BuiltInDoNotQuery: c.Recursion.DoNotQuery.Default,
			Minimise:   map[config.QNAMEMinimisation]resolver.Minimise{config.MinimiseOff: resolver.MinimiseOff, config.MinimiseRelaxed: resolver.MinimiseRelaxed, config.MinimiseStrict: resolver.MinimiseStrict}[c.Recursion.QNAMEMinimisation],
			NoCase0x20: !c.Recursion.CaseRandomisation, LooseGlue: !c.Recursion.HardenGlue, UDPSize: c.Recursion.EDNSBufferSize,
			Outgoing: c.Recursion.Outgoing, QueryTimeout: c.Recursion.QueryTimeout, ClientWaitUDP: c.Recursion.ClientWaitUDP,
		},
		Cache: resolver.CacheOptions{
			MinTTL: c.Cache.MinTTL, MaxTTL: c.Cache.MaxTTL, MaxNegativeTTL: c.Cache.MaxNegativeTTL,
			NoPrefetch: !c.Cache.Prefetch || !c.Recursion.BackgroundLookups, Aggressive: c.Cache.AggressiveNSEC,
		},
		Answers:   resolver.AnswerOptions{MaxUDP: int(c.Answers.MaxUDPSize), Minimal: c.Answers.Minimal, EDE: c.Answers.EDE, Contact: c.Answers.Contact, Organization: c.Answers.Organization},
		Local:     resolver.LocalOptions{DefaultZones: c.Recursion.LocalZones == config.LocalZonesDefault, Version: "sluice"},
		Rebinding: resolver.RebindingOptions{Addresses: c.Rebinding.PrivateAddresses},
		DNS64:     c.DNS64.Prefix,
		Listeners: n.sockets.listeners(c, n.certs),
		Transport: n.o.Transport,
		QueryLog:  n.queries.observer(),
	}
	if c.Cache.ServeStale.Enabled {
		o.Cache.MaxStale, o.Cache.StaleTTL, o.Cache.StaleAfter = c.Cache.ServeStale.MaxStale, c.Cache.ServeStale.AnswerTTL, c.Cache.ServeStale.ClientTimeout
	}
	if c.Cache.Persist {
		o.Cache.File = filepath.Join(c.DataDir, "rrsets.cache")
	}
	if o.Recursion.DoNotQuery == nil {
		o.Recursion.DoNotQuery = []netip.Prefix{}
	}
	for _, name := range c.Identify.ServerNames {
		o.Identify.ServerNames = append(o.Identify.ServerNames, strings.TrimSuffix(name, "."))
	}
	for addr, device := range c.Identify.DefaultDevice {
		id, ok := usercache.ParseID(device)
		if !ok {
			return nil, fmt.Errorf("identify.default_device: %q is not a device id", device)
		}
		o.Identify.DefaultDevice[addr] = id
	}
	var err error
	if o.DNSSEC, err = dnssecOptions(c); err != nil {
		return nil, err
	}
	ecs := &c.Recursion.ECS
	o.Recursion.ECS.IPv4, o.Recursion.ECS.IPv6 = uint8(ecs.IPv4), uint8(ecs.IPv6)
	for _, z := range ecs.Zones {
		name, err := resolver.ParseName(z)
		if err != nil {
			return nil, fmt.Errorf("recursion.ecs.zones: %w", err)
		}
		o.Recursion.ECS.Zones = append(o.Recursion.ECS.Zones, name)
	}
	if f := c.Recursion.RootHintsFile; f != "" {
		text, err := os.ReadFile(f)
		if err != nil {
			return nil, fmt.Errorf("recursion.root_hints_file: %w", err)
		}
		if config.HoldsHints(string(text)) {
			o.Recursion.RootHints, o.Recursion.HintsFile = string(text), f
		} else {
			n.log.Warn("the hints file holds no records; the built-in servers of the root are used", "file", f)
		}
	}
	if o.Recursion.LocalRoot, err = localRoot(c); err != nil {
		return nil, fmt.Errorf("recursion.local_root: %w", err)
	}
	for _, d := range c.Rebinding.PrivateDomains {
		name, err := resolver.ParseName(d)
		if err != nil {
			return nil, fmt.Errorf("rebinding.private_domains: %w", err)
		}
		o.Rebinding.Domains = append(o.Rebinding.Domains, name)
	}
	if o.Local.Records, _, err = localRecords(c); err != nil {
		return nil, err
	}
	if o.PolicyZones, err = policyZones(c); err != nil {
		return nil, err
	}
	zones, err := zonesOf(c)
	o.Recursion.Zones = zones
	return o, err
}

// Run serves until ctx ends, then drains. The error is what failed, nil after a drain.
func (n *Node) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	if n.service != nil {
		g.Go(func() error { return n.service.run(ctx) })
	}
	g.Go(func() error { return n.sync.Run(ctx) })
	g.Go(func() error { n.followSync(ctx); return nil })
	g.Go(func() error { n.wantBlobs(ctx); return nil })
	g.Go(func() error {
		if n.service != nil {
			n.awaitUsers(ctx)
		}
		return n.resolver.Run(ctx)
	})
	g.Go(func() error { return n.control.run(ctx) })
	err := g.Wait()
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// ownServiceWait is how long the first queries wait for the user data of the service in this process.
const ownServiceWait = 5 * time.Second

// awaitUsers returns when there is user data. The service is in this process, so that is a matter of
// milliseconds, and queries that arrive meanwhile wait in the sockets' buffers: a first start refuses nobody.
func (n *Node) awaitUsers(ctx context.Context) {
	changed := make(chan struct{}, 1)
	n.sync.Notify(changed)
	n.users.Dataset(usercache.Users).Notify(changed)
	limit := time.After(ownServiceWait)
	for n.sync.Status().State == syncclient.Cold {
		select {
		case <-changed:
		case <-limit:
			return
		case <-ctx.Done():
			return
		}
	}
}

// followSync tells the resolver of blobs, and logs once when the node serves and is ready, and what shrink guards do.
func (n *Node) followSync(ctx context.Context) {
	changed := make(chan struct{}, 1)
	n.sync.Notify(changed)
	for _, k := range usercache.Kinds {
		n.users.Dataset(k).Notify(changed)
	}
	said, guards := "", guardWatch{}
	for {
		for _, k := range usercache.Kinds {
			d := n.users.Dataset(k)
			guards.look(n.log, d.Status(), d.Overlay)
		}
		ready := n.readiness()
		switch {
		case ready.Ready && said != "ready":
			said = "ready"
			if err := n.users.Ready(); err != nil {
				n.log.Warn("noting that this start succeeded", "err", err)
			}
			n.log.Info("ready", n.sockets.attrs(n)...)
		case !ready.Ready && said == "":
			said = "serving"
			n.log.Info("serving", append(n.sockets.attrs(n), "reasons", strings.Join(ready.Reasons, ","))...)
		}
		var again <-chan time.Time
		if said != "ready" {
			again = time.After(100 * time.Millisecond) // compiling a list tells nobody when it ends
		}
		select {
		case <-ctx.Done():
			return
		case <-again:
		case <-changed:
			for _, k := range usercache.Kinds {
				n.texts.before(n, k)
			}
			n.resolver.BlobArrived()
		}
	}
}

// Reload reads certificates again and takes stub, forward and policy zones and the copy of the root zone from c, the
// latter two with what is in their files now; whatever else c changes needs a restart. A certificate or zone that cannot
// be used leaves what was before in place, of zones all of their kind. With a nil c zones stay.
func (n *Node) Reload(c *config.Sluice) {
	if c != nil {
		policies, err := policyZones(c)
		if err == nil {
			err = n.resolver.SetPolicyZones(policies)
		}
		if err != nil {
			n.log.Error("reloading policy zones; the ones before stay", "err", err)
		} else {
			n.log.Info("reloaded policy zones", "zones", len(policies))
		}
		if root, err := localRoot(c); err != nil {
			n.log.Error("reloading the local copy of the root zone; the one before stays", "err", err)
		} else {
			n.resolver.SetLocalRoot(root)
			if root != nil {
				n.log.Info("reloaded the local copy of the root zone", "serial", root.Serial(), "records", root.Records(), "expires", root.Expires())
			}
		}
		zones, err := zonesOf(c)
		if err == nil {
			err = n.resolver.SetZones(zones)
		}
		if err != nil {
			n.log.Error("reloading stub and forward zones; the ones before stay", "err", err)
		} else {
			n.log.Info("reloaded stub and forward zones", "zones", len(zones))
		}
	}
	if err := n.certs.reload(); err != nil {
		n.log.Error("reloading certificates; the ones before stay", "err", err)
		return
	}
	n.log.Info("reloaded certificates")
}

// Addrs returns the addresses served, by transport.
func (n *Node) Addrs() map[string][]netip.AddrPort { return n.sockets.addrs }

// Limits returns the live limits.
func (n *Node) Limits() *resolver.LiveLimits { return n.limits }

// Users returns the user data.
func (n *Node) Users() *usercache.Cache { return n.users }

// Close gives everything back; it may be called in any state.
func (n *Node) Close() error {
	n.closing.Do(func() {
		if n.control != nil {
			n.control.close()
		}
		if n.resolver != nil {
			n.resolver.Close()
		}
		n.sockets.close()
		if n.sync != nil {
			n.sync.Close()
		}
		if n.service != nil {
			n.service.close()
		}
		if n.users != nil {
			if err := n.users.Close(); err != nil {
				n.log.Error("closing the user data", "err", err)
			}
		}
		if n.queries != nil {
			n.queries.close()
		}
		n.cancel()
		for _, wait := range n.waits {
			wait()
		}
	})
	return nil
}

// clientTLS is what this node shows to the service; nil without any file, for loopback and unix sockets.
func clientTLS(c *config.ClientTLS) (*tls.Config, error) {
	if c.CA == "" && c.Cert == "" {
		return nil, nil
	}
	t := &tls.Config{MinVersion: tls.VersionTLS13, ServerName: c.ServerName}
	if c.CA != "" {
		pool, err := readPool(c.CA)
		if err != nil {
			return nil, fmt.Errorf("users.tls.ca: %w", err)
		}
		t.RootCAs = pool
	}
	if c.Cert != "" {
		pair, err := tls.LoadX509KeyPair(c.Cert, c.Key)
		if err != nil {
			return nil, fmt.Errorf("users.tls: %w", err)
		}
		t.Certificates = []tls.Certificate{pair}
	}
	return t, nil
}
