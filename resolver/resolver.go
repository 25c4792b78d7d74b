// Package resolver is one recursive, filtering resolver: New builds it out of its parts, Run serves until its
// context ends, Close gives everything back.
//
// It has no logic of its own. New reads top to bottom as the list of what a resolver consists of; each part is
// a package in resolver/internal, whose package comment is its contract. The order in which a query meets them
// stands in package pipeline.
//
// Sockets are given, not opened: the caller has the privileges, or an in-memory network for tests. User data
// comes through a usercache.Cache, which somebody else keeps current; the resolver reads it and would run as
// well from a file.
package resolver

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/cookie"
	"github.com/sluice-dns/sluice/resolver/internal/dns64"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/identify"
	"github.com/sluice-dns/sluice/resolver/internal/limits"
	"github.com/sluice-dns/sluice/resolver/internal/listen"
	"github.com/sluice-dns/sluice/resolver/internal/listen/doh"
	"github.com/sluice-dns/sluice/resolver/internal/listen/dot"
	"github.com/sluice-dns/sluice/resolver/internal/listen/tcp"
	"github.com/sluice-dns/sluice/resolver/internal/listen/udp"
	"github.com/sluice-dns/sluice/resolver/internal/localdata"
	"github.com/sluice-dns/sluice/resolver/internal/overload"
	"github.com/sluice-dns/sluice/resolver/internal/pipeline"
	"github.com/sluice-dns/sluice/resolver/internal/policy"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/rebinding"
	"github.com/sluice-dns/sluice/resolver/internal/render"
	"github.com/sluice-dns/sluice/usercache"
)

// Options are what a resolver is built of. Limits, Users and Logger are needed; every other zero field means
// the default stated on it, or off.
type Options struct {
	// NodeID answers id.server; "" gives no answer.
	NodeID string
	// Limits are the live limits of this machine.
	Limits *LiveLimits
	// NameKey keys the hashes of names in filter and caches: random, kept in the data directory.
	NameKey [16]byte
	// Users is everybody's settings.
	Users *usercache.Cache
	// Blob returns the bytes of a list or rule text by the SHA-256 of its content, or false while they are
	// not there.
	Blob func(sha256 [32]byte) ([]byte, bool)
	// OpenBlob opens a catalogue list's text for reading, which may be longer than is good for memory. Nil takes it
	// from Blob.
	OpenBlob func(sha256 [32]byte) (io.ReadCloser, bool)
	// FilterIndex is the file that keeps the compiled catalogue lists for the next start; "" keeps none.
	FilterIndex string
	// OwnTexts is the file that keeps which rules and lists of users were in force for the next start; "" keeps it not.
	OwnTexts string

	Access    AccessOptions
	Identify  IdentifyOptions
	Recursion RecursionOptions
	DNSSEC    DNSSECOptions
	Cache     CacheOptions
	Answers   AnswerOptions
	Local     LocalOptions
	Rebinding RebindingOptions
	// PolicyZones hold for everybody, before what users want; the first one with a match decides.
	PolicyZones []PolicyZone
	// DNS64 is the prefix of the AAAA records that are made of A records (RFC 6147); none if it is zero.
	DNS64 netip.Prefix

	Listeners Listeners
	// Transport opens the ways to servers; nil means real sockets.
	Transport Transport

	// QueryLog is given an event for each query of a client whose settings allow it; nil means nobody is.
	QueryLog func(*QueryEvent)
	Logger   *slog.Logger
}

// AccessOptions say who may ask; see interface section "access".
type AccessOptions struct {
	Allow, Unlimited []netip.Prefix
}

// IdentifyOptions say how devices are recognised; see package identify.
type IdentifyOptions struct {
	ServerNames        []string
	Relays, Dedicated  []netip.Prefix
	DefaultDevice      map[netip.AddrPort]usercache.DeviceID
	Stranger, WhenCold string
	// Propose is told of device ids that do not exist and may be of a user with automatic devices; it must not
	// wait. Nil: nobody is.
	Propose func(*usercache.DeviceID)
}

// AnswerOptions shape responses.
type AnswerOptions struct {
	MaxUDP  int
	Minimal bool
	EDE     bool
	// Contact and Organization are told to clients that ask for structured error data.
	Contact      []string
	Organization string
}

// RebindingOptions keep private addresses out of public answers; see package rebinding.
type RebindingOptions struct {
	Addresses []netip.Prefix
	Domains   []Name
}

// LocalOptions say what is answered without asking anybody.
type LocalOptions struct {
	DefaultZones bool
	Records      []LocalRecord
	Version      string // answers version.server
}

// LocalRecord is one record of local data; ParseLocal makes them.
type LocalRecord = dnswire.Record

// ParseLocal reads a record "[TTL] TYPE RDATA" of the given owner.
func ParseLocal(owner, record string) (LocalRecord, error) {
	rs, err := dnswire.ParseRecords(owner+" "+record+"\n", ".", "local data", 3600)
	switch {
	case err != nil:
		return LocalRecord{}, err
	case len(rs) != 1:
		return LocalRecord{}, fmt.Errorf("%q is %d records; write one as TYPE RDATA", record, len(rs))
	}
	return rs[0], nil
}

// localOptions are the part of o that local data depends on.
func (o *Options) localOptions() localdata.Options {
	var except []Name
	for _, z := range o.Recursion.Zones {
		except = append(except, z.Name)
	}
	return localdata.Options{
		Zones: o.Local.DefaultZones, Except: except, Records: o.Local.Records, NodeID: o.NodeID, Version: o.Local.Version,
		IPv4Only: o.DNS64.IsValid(),
	}
}

// CheckLocal reports what New would refuse of o.Local.Records, and which of them, or nil.
func CheckLocal(o *Options) (index int, err error) {
	_, err = localdata.New(o.localOptions())
	if e := (*localdata.RecordError)(nil); errors.As(err, &e) {
		index = e.Index
	}
	return index, err
}

// Listeners are the sockets to serve, opened by the caller and closed by the resolver.
type Listeners struct {
	// UDP has one socket for each worker.
	UDP           []net.PacketConn
	TCP, DoT, DoH []net.Listener
	// GetCertificate chooses the certificate of an encrypted connection; needed with DoT and DoH.
	GetCertificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	// DoHPath is where DoH is served; "" means /dns-query.
	DoHPath string
	// ProxyFrom are networks that must send a PROXY v2 header, which names the client.
	ProxyFrom []netip.Prefix
}

// QueryEvent is what the query log learns of one query.
type QueryEvent = query.Event

// DecidedBy puts in words what decided a query that was logged, as explanations do: the step, "" if nothing applied,
// and the id of the catalogue list or service whose rule it was, "" if it was none's. The event has the rule's line.
func DecidedBy(e *QueryEvent, cat *usercache.Catalogue) (step, list string) {
	if e.Verdict == query.Pass {
		return "", ""
	}
	switch e.Why {
	case policy.WhyList, policy.WhyThreat:
		if l := cat.List(int(e.List)); l != nil {
			list = l.ID
		}
	case policy.WhyService:
		for i := range cat.Services {
			if s := &cat.Services[i]; s.Number == int(e.List) {
				list = s.ID
			}
		}
	}
	return policy.WhyText(e.Why), list
}

// A Resolver answers DNS queries. It is safe for concurrent use.
type Resolver struct {
	o        Options
	ctx      context.Context
	cancel   context.CancelFunc
	engine   *engine
	policy   *policy.Policy
	rules    *policyZones
	standins *standins
	gate     *overload.Gate
	stages   pipeline.Options // what path is made of
	path     *pipeline.Pipeline
	servers  []server
	named    []namedListener // for metrics
	live     *liveLimits
	changed  chan struct{} // of size one: the catalogue or the set of blobs has changed
}

// A server is a listener of any transport.
type server interface {
	Serve(ctx context.Context) error
	Close() error
}

// A namedListener is what counts of one listener: udp or conns.
type namedListener struct {
	name  string
	udp   *udp.Server
	conns *listen.Counters
}

// New builds a resolver. It opens nothing and starts nothing but the workers of the path; Close is needed
// even if Run is never called.
func New(o Options) (_ *Resolver, err error) {
	switch {
	case o.Limits == nil:
		return nil, errors.New("resolver: Options.Limits is needed")
	case o.Users == nil:
		return nil, errors.New("resolver: Options.Users is needed")
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	r := &Resolver{o: o, changed: make(chan struct{}, 1)}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			r.cancel()
		}
	}()

	if r.engine, err = newEngine(&o); err != nil {
		return nil, err
	}
	local, err := localdata.New(o.localOptions())
	if err != nil {
		return nil, err
	}
	r.rules = &policyZones{rrsets: r.engine.rrsets}
	servers := &nameServers{rrsets: r.engine.rrsets, iterator: r.engine.iterator, zones: r.rules}
	r.rules.servers = servers
	r.policy = policy.New(policy.Options{
		Key: r.engine.key, Users: o.Users, Blob: o.Blob, OpenBlob: o.OpenBlob, Changed: r.catalogueChanged(), Logger: o.Logger,
		Index: o.FilterIndex, OwnTexts: o.OwnTexts, Servers: servers.Of,
		OwnBytes: o.Limits.Value(limits.GoMemLimit) / ownRulesShare,
	})
	r.standins = newStandins(&o)
	r.gate = overload.New(overload.Options{
		Allow: o.Access.Allow, Unlimited: o.Access.Unlimited, Seed: r.engine.key.K0,
		Rate: func() int { return int(o.Limits.Value(limits.ClientRate)) },
	})
	ident := identify.New(identify.Options{
		Directory: directory{o.Users}, ServerNames: o.Identify.ServerNames,
		Relays: o.Identify.Relays, Dedicated: o.Identify.Dedicated, DefaultDevice: o.Identify.DefaultDevice,
		Stranger: o.Identify.Stranger, WhenCold: o.Identify.WhenCold,
		Propose: o.Identify.Propose, Verifying: int(o.Limits.Value(limits.Workers)) / 4,
	})
	path := pipeline.Options{
		Gate: r.gate, Identify: ident, Policy: r.policy, Local: local, Answers: r.engine, Fetch: r.engine,
		Cookies: cookie.New(cookieSecret(o.NameKey)),
		Budget: func() query.Budget {
			return query.Budget{
				Time:    o.Recursion.QueryTimeout,
				Queries: int(o.Limits.Value(limits.TreeQueries)), FailedValidations: int(o.Limits.Value(limits.TreeFailedValidations)),
			}
		},
		InFlight:      func() int { return int(o.Limits.Value(limits.InFlight)) },
		Outstanding:   func() int { return int(o.Limits.Value(limits.ClientOutstanding)) },
		ClientWaitUDP: o.Recursion.ClientWaitUDP, StaleAfter: o.Cache.StaleAfter,
		ByList: 1<<policy.WhyList | 1<<policy.WhyThreat,
		Log:    queryLog(o.QueryLog), Observe: o.QueryLog,
		Logger: o.Logger,
	}
	shape := render.Options{MaxUDP: o.Answers.MaxUDP, EDE: o.Answers.EDE, NSID: o.NodeID, Contact: o.Answers.Contact, Organization: o.Answers.Organization}
	if o.DNS64.IsValid() {
		if shape.DNS64, err = dns64.New(o.DNS64); err != nil {
			return nil, fmt.Errorf("DNS64: %w", err)
		}
		path.DNS64 = shape.DNS64
	}
	if len(o.Rebinding.Addresses) > 0 {
		shape.Private = rebinding.New(o.Rebinding.Addresses, o.Rebinding.Domains)
		path.Rebinding = shape.Private
	}
	servers.policy = r.policy
	if err := r.SetPolicyZones(o.PolicyZones); err != nil {
		return nil, err
	}
	path.Zones, path.NameServers = r.rules, servers
	if r.engine.subnets != nil {
		path.Subnets, shape.Subnets = r.engine.subnets, true
	}
	path.Render = render.New(shape)
	r.stages = path
	r.path = pipeline.New(r.ctx, path)
	r.live = newLiveLimits(o.Limits)
	if r.servers, err = r.newListeners(); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// ownRulesShare is the part of the Go heap that users' own rules may take once compiled.
const ownRulesShare = 16

// cookieSecret makes the secret of server cookies from the key in the data directory, so that clients keep theirs
// over a restart, and so does whoever gives several resolvers one key (RFC 9018 section 2). Without a key it is
// random.
func cookieSecret(key [16]byte) (secret [32]byte) {
	if key == ([16]byte{}) {
		rand.Read(secret[:])
		return secret
	}
	h := hmac.New(sha256.New, key[:])
	h.Write([]byte("secret of server cookies"))
	return [32]byte(h.Sum(nil))
}

// newListeners makes the servers of all transports.
func (r *Resolver) newListeners() (servers []server, err error) {
	l, live := &r.o.Listeners, r.live
	exempt := func(a netip.Addr) bool { return within(r.o.Access.Unlimited, a) }
	for _, g := range live.gates[query.TCP:] {
		g.Exempt = exempt
	}
	var fromProxy func(netip.Addr) bool
	if len(l.ProxyFrom) > 0 {
		fromProxy = func(a netip.Addr) bool { return within(l.ProxyFrom, a) }
	}
	if len(l.UDP) > 0 {
		s, err := udp.New(udp.Options{Conns: l.UDP, Handler: r.path, FromProxy: fromProxy})
		if err != nil {
			return nil, err
		}
		servers = append(servers, s)
		r.named = append(r.named, namedListener{name: listenerName(query.UDP, 0), udp: s})
	}
	name := func(t query.Transport, i int, c *listen.Counters) {
		r.named = append(r.named, namedListener{name: listenerName(t, i), conns: c})
	}
	desks := listen.NewDesks(r.path, int(r.o.Limits.Value(limits.Workers)))
	unread := listen.NewUnread(r.o.Limits.Value(limits.Buffers))
	common := func(n net.Listener, transport query.Transport) tcp.Options {
		return tcp.Options{Listener: n, Handler: r.path, Gate: live.gates[transport], Depth: &live.depth, Unread: unread, Desks: desks, FromProxy: fromProxy}
	}
	for i, n := range l.TCP {
		s := tcp.New(common(n, query.TCP))
		name(query.TCP, i, s.Counters())
		servers = append(servers, s)
	}
	for i, n := range l.DoT {
		s := dot.New(dot.Options{Options: common(n, query.DoT), GetCertificate: l.GetCertificate, Handshakes: &live.handshakes})
		name(query.DoT, i, s.Counters())
		servers = append(servers, s)
	}
	for i, n := range l.DoH {
		s := doh.New(doh.Options{
			Listener: n, Handler: r.path, Gate: live.gates[query.DoH], Desks: desks, Path: l.DoHPath, FromProxy: fromProxy,
			GetCertificate: l.GetCertificate, Handshakes: &live.handshakes,
			Requests: &live.requests, Streams: int(live.depth.Load()), Depth: &live.depth,
		})
		name(query.DoH, i, s.Counters())
		servers = append(servers, s)
	}
	return servers, nil
}

func within(ps []netip.Prefix, a netip.Addr) bool {
	for _, p := range ps {
		if p.Contains(a.Unmap()) {
			return true
		}
	}
	return false
}

// Run serves until ctx ends, then drains: no more is received, and what is being answered gets a few seconds.
// It returns nil after a drain, otherwise what failed.
func (r *Resolver) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, s := range r.servers {
		g.Go(func() error { return s.Serve(ctx) })
	}
	g.Go(func() error { r.engine.run(ctx, r.o.Logger); return nil })
	g.Go(func() error { return r.policy.Run(ctx) })
	g.Go(func() error { r.standins.run(ctx); return nil })
	g.Go(func() error { r.live.run(ctx, r.o.Logger); return nil })
	g.Go(func() error { r.engine.runAnchors(ctx); return nil })
	if r.engine.negative != nil {
		g.Go(func() error { r.engine.negative.run(ctx, r.o.Logger); return nil })
	}
	err := g.Wait()
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// Close ends everything at once and waits for it.
func (r *Resolver) Close() error {
	for _, s := range r.servers {
		s.Close()
	}
	r.cancel()
	r.path.Close()
	r.engine.close()
	return nil
}

// queryLog says which queries are logged: those of users whose settings allow more than counters.
func queryLog(to func(*QueryEvent)) func(q *query.Query) query.After {
	if to == nil {
		return nil
	}
	return func(q *query.Query) query.After {
		if q.Client.Kind == query.Identified && q.Client.Profile.Log < usercache.LogNoClient {
			return 0
		}
		return query.AfterLog
	}
}

// catalogueChanged returns a channel that is sent to when the catalogue or the set of blobs has changed.
func (r *Resolver) catalogueChanged() <-chan struct{} {
	r.o.Users.Dataset(usercache.CatalogueKind).Notify(r.changed)
	return r.changed
}

// BlobArrived tells the resolver that a blob which Options.Blob did not have before is there now.
func (r *Resolver) BlobArrived() {
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// ListsPresent reports whether the bytes of all catalogue lists are here and compiled.
func (r *Resolver) ListsPresent() bool {
	present, _ := r.policy.Serving()
	return present
}

// directory is what package identify needs to know of the users.
type directory struct{ *usercache.Cache }

func (d directory) Policy(name string, p *usercache.Profile) bool {
	found, ok := d.Catalogue().Policy(name)
	if ok {
		*p = found
	}
	return ok
}

// liveLimits carries changed limits to where they are read.
type liveLimits struct {
	limits            *LiveLimits
	gates             [query.NumTransports]*listen.Connections // by transport; nil for UDP
	depth, handshakes atomic.Int64
	requests          atomic.Int64 // of DoH: waiting for an answer is most of what they do, so in_flight bounds them too
}

func newLiveLimits(l *LiveLimits) *liveLimits {
	v := &liveLimits{limits: l}
	for t := query.TCP; t < query.NumTransports; t++ {
		v.gates[t] = listen.NewConnections(1, 1)
	}
	v.apply()
	return v
}

func (v *liveLimits) apply() {
	for t, name := range map[query.Transport]limits.Name{
		query.TCP: limits.TCPConnections, query.DoT: limits.DoTConnections, query.DoH: limits.DoHConnections, query.DoQ: limits.DoQConnections,
	} {
		v.gates[t].Max.Store(v.limits.Value(name))
		v.gates[t].PerSource.Store(v.limits.Value(limits.ConnectionsPerSource))
	}
	v.depth.Store(v.limits.Value(limits.Pipelining))
	v.handshakes.Store(v.limits.Value(limits.Handshakes))
	v.requests.Store(v.limits.Value(limits.InFlight))
}

// run ends changes whose time is over.
func (v *liveLimits) run(ctx context.Context, log *slog.Logger) {
	everySecond(ctx, func() {
		for _, e := range v.limits.Expire(limits.Now{Elapsed: clock.Elapsed(), Wall: clock.Wall()}) {
			log.Info("the time of a changed limit is over", "limit", e.Name, "was", e.Old, "is", e.New)
			v.apply()
		}
	})
}

// everySecond calls f until ctx ends.
func everySecond(ctx context.Context, f func()) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			f()
		}
	}
}
