// Package admin is the operator's side of one resolver: the gRPC service of proto/admin/v1 (resolver.proto)
// with gRPC health, and the HTTP pages that balancers, Prometheus and profilers read.
//
// What can be looked at and changed is named by small interfaces (Limits, Cache, Explainer, Sync, Lifecycle,
// Log); an absent one makes its calls UNIMPLEMENTED. LiveLimits, Caches, Policies and LogLevel satisfy them for
// the parts of a resolver. Readiness is one value that /readyz, gRPC health of the service "" and Status
// render.
//
// Who may call: in the clear from loopback, a unix socket or in memory, everybody; beyond that TLS and a client
// certificate or token whose role allows the call (see auth.go). A message has at most 1 MiB, a call that is no
// stream at most 30 s.
//
// Implementations return plain errors; they become codes in one place. FieldError, *limits.Error and
// rrcache.ErrDump are INVALID_ARGUMENT with google.rpc.BadRequest naming the field; ErrNotFound, ErrRefused and
// ErrBusy are NOT_FOUND, FAILED_PRECONDITION and RESOURCE_EXHAUSTED; a context's error keeps its meaning;
// anything else is INTERNAL.
package admin

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/netutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// Serve serves the admin service on a listener, which it closes, until ctx ends; then calls get two seconds to
// finish. Connections are limited to maxConnections.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	g := grpc.NewServer(s.ServerOptions()...)
	s.Register(g)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		<-ctx.Done()
		s.stop() // health watches do not end by themselves
		hard := time.AfterFunc(2*time.Second, g.Stop)
		defer hard.Stop()
		g.GracefulStop()
	}()
	err := g.Serve(netutil.LimitListener(l, maxConnections))
	if ctx.Err() == nil {
		return fmt.Errorf("admin service on %v: %w", l.Addr(), err)
	}
	<-ended
	return nil
}

const (
	maxConnections = 128
	maxStreams     = 64 // of one connection
	maxMessage     = 1 << 20
	callTimeout    = 30 * time.Second
)

// Register offers the service and gRPC health on a server that was made with ServerOptions.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	adminv1.RegisterResolverServiceServer(r, s)
	grpc_health_v1.RegisterHealthServer(r, healthServer{s: s})
}

// ServerOptions are the options that a gRPC server for this service needs: who may call, limits, errors.
func (s *Server) ServerOptions() []grpc.ServerOption {
	o := []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(s.unary),
		grpc.ChainStreamInterceptor(s.stream),
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.MaxHeaderListSize(16 << 10),
		grpc.ConnectionTimeout(10 * time.Second),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: 15 * time.Minute, Time: time.Minute, Timeout: 20 * time.Second}),
	}
	if s.o.Credentials != nil {
		o = append(o, grpc.Creds(s.o.Credentials))
	}
	return o
}

// The parts that an operator looks at and changes.
type (
	// NegativeAnchors are the negative trust anchors.
	NegativeAnchors interface {
		// List returns all, in order of name.
		List() []NegativeAnchor
		// Add adds one for so long, or replaces one that was added.
		Add(name dnsname.Name, d time.Duration, why string) (NegativeAnchor, error)
		// Remove takes one away; the error is ErrNotFound if there is none.
		Remove(name dnsname.Name) error
	}

	// Limits are the live limits.
	Limits interface {
		// Limits returns all, in order of name.
		Limits() []*adminv1.Limit
		// Set changes one; d 0 means until reset.
		Set(name, value string, d time.Duration, why string) (*adminv1.Limit, error)
		Reset(name string) (*adminv1.Limit, error)
	}

	// Cache is the caches of what was resolved.
	Cache interface {
		// Look returns what is held for a name, of one type, or of all if typ is 0.
		Look(name dnsname.Name, typ uint16) []*adminv1.CacheEntry
		// Purge removes a name, with subtree also those below; typ 0 means all types.
		Purge(name dnsname.Name, subtree bool, typ uint16) (removed int)
		// Dump writes the RRset cache, Load takes such a dump in.
		Dump(w io.Writer) error
		Load(r io.Reader) (loaded, skipped int, err error)
	}

	// An Explainer says how a query would be judged, in steps of which the last decides.
	Explainer interface {
		Explain(ctx context.Context, a Asking) ([]*adminv1.ExplainStep, error)
	}

	// Sync follows the business-logic service.
	Sync interface {
		// Datasets returns where each dataset stands.
		Datasets() []*adminv1.DatasetStatus
		// Accept accepts a held shrink or, if dataset is not empty, another dataset of that id in
		// hexadecimal; it returns how many overlay entries ended.
		Accept(ctx context.Context, kind, dataset, why string) (released int, err error)
		// Repair begins a repair, or reports that one is under way.
		Repair(ctx context.Context, kind string) (already bool, err error)
	}

	// Lifecycle turns readiness off and on; listeners go on.
	Lifecycle interface {
		SetDraining(on bool)
	}

	// Log is how much is logged.
	Log interface {
		// SetLevel changes it, for a time or, if d is 0, until it is changed again, and returns what it was.
		SetLevel(l slog.Level, d time.Duration) (was slog.Level)
	}
)

// A Target is a user, or one device of a user if Device is not zero.
type Target struct {
	User, Device usercache.ID
}

// An Asking is a query to be explained.
type Asking struct {
	Who  Target
	Name dnsname.Name
	Type uint16
	// Address is the client's; the zero Addr if it is not known. Transport is how it asks; nil if that is not known.
	Address   netip.Addr
	Transport *query.Transport
}

// ParseTarget reads "USER" or "USER/DEVICE".
func ParseTarget(s string) (t Target, err error) {
	user, device, isDevice := strings.Cut(s, "/")
	var ok bool
	if t.User, ok = usercache.ParseID(user); !ok {
		return Target{}, &FieldError{"target", fmt.Sprintf("%q is not an id of 1 to 63 letters, digits and hyphens; write USER or USER/DEVICE", user)}
	}
	if !isDevice {
		return t, nil
	}
	if t.Device, ok = usercache.ParseID(device); !ok {
		return Target{}, &FieldError{"target", fmt.Sprintf("%q is not an id of 1 to 63 letters, digits and hyphens; write USER or USER/DEVICE", device)}
	}
	return t, nil
}

// Options are what a Server serves. Readiness is needed; the other zero fields mean none, or the default
// stated.
type Options struct {
	Node, Region, Version string

	// Readiness says whether the resolver may be sent queries.
	Readiness func() Readiness

	// Serving reports whether queries are judged by the present catalogue, and the revision of the newest by
	// which they were: holding a catalogue is not serving it, since lists have to be fetched and compiled.
	// Nil means that what is held is served.
	Serving func() (present bool, revision uint64)

	Limits    Limits
	Cache     Cache
	Explain   Explainer
	Sync      Sync
	Lifecycle Lifecycle
	Log       Log
	Anchors   NegativeAnchors

	// Credentials are TLS, for a listener beyond loopback. Nil means in the clear.
	Credentials credentials.TransportCredentials
	// TokenRole returns the role of a token, or why it is not valid. Nil knows no tokens.
	TokenRole func(token string) (role string, err error)

	// Logger is told what was changed, by whom, and of recovered panics. Nil means slog.Default.
	Logger *slog.Logger
	// Panicked is called for each recovered panic. Nil is fine.
	Panicked func()
}

// A Server implements the admin service. It is safe for concurrent use.
type Server struct {
	adminv1.UnimplementedResolverServiceServer
	o       Options
	started clock.Instant
	bulk    chan struct{} // of size one: held by a dump or load

	stopping context.Context // ends health watches
	stop     context.CancelFunc
}

// New returns a Server that serves nothing yet.
func New(o Options) *Server {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	s := &Server{o: o, started: clock.Elapsed(), bulk: make(chan struct{}, 1)}
	s.stopping, s.stop = context.WithCancel(context.Background())
	return s
}

// Status shows the resolver.
func (s *Server) Status(context.Context, *adminv1.StatusRequest) (*adminv1.StatusResponse, error) {
	r := s.o.Readiness()
	resp := &adminv1.StatusResponse{
		Ready: r.Ready, Reasons: r.Reasons, State: r.State, Degraded: r.Degraded, Level: r.Level, Draining: r.Draining,
		Dataset: r.Dataset, Revision: r.Revision, Users: uint64(r.Users),
		Node: s.o.Node, Region: s.o.Region, Version: s.o.Version,
		Uptime: uint64(clock.Elapsed().Sub(s.started) / time.Second),
	}
	if s.o.Sync != nil {
		resp.Datasets = s.datasets()
	}
	for _, d := range resp.Datasets {
		resp.Overlay += d.Overlay
		if d.Kind == string(usercache.Users) {
			resp.Generation, resp.LagMs = d.Generation, d.LagMs
		}
	}
	return resp, nil
}

// datasets are the datasets as they are served.
func (s *Server) datasets() []*adminv1.DatasetStatus {
	all := s.o.Sync.Datasets()
	if s.o.Serving == nil {
		return all
	}
	// Asked after the revisions were read: what is present now is no older than they are.
	present, revision := s.o.Serving()
	for _, d := range all {
		if d.Kind == string(usercache.CatalogueKind) && !present {
			d.Revision = min(d.Revision, revision)
		}
	}
	return all
}

// SyncStatus shows the datasets.
func (s *Server) SyncStatus(_ context.Context, req *adminv1.SyncStatusRequest) (*adminv1.SyncStatusResponse, error) {
	if s.o.Sync == nil {
		return nil, missing("datasets")
	}
	if req.Kind == "" {
		return &adminv1.SyncStatusResponse{Datasets: s.datasets()}, nil
	}
	if _, err := kindOf(req.Kind); err != nil {
		return nil, err
	}
	resp := new(adminv1.SyncStatusResponse)
	for _, d := range s.datasets() {
		if d.Kind == req.Kind {
			resp.Datasets = append(resp.Datasets, d)
		}
	}
	return resp, nil
}

// SyncAccept accepts a held shrink, or another dataset.
func (s *Server) SyncAccept(ctx context.Context, req *adminv1.SyncAcceptRequest) (*adminv1.SyncAcceptResponse, error) {
	if s.o.Sync == nil {
		return nil, missing("datasets")
	}
	kind, err := kindOf(req.Kind)
	if err != nil {
		return nil, err
	}
	if req.Dataset != "" && (len(req.Dataset) != 32 || strings.Trim(req.Dataset, "0123456789abcdefABCDEF") != "") {
		return nil, &FieldError{"dataset", fmt.Sprintf("%.80q is not an id of 32 hexadecimal digits", req.Dataset)}
	}
	n, err := s.o.Sync.Accept(ctx, kind, strings.ToLower(req.Dataset), req.Why)
	if err != nil {
		return nil, err
	}
	s.o.Logger.Warn("an operator accepted what this resolver held back", "kind", kind, "dataset", req.Dataset, "released", n, "why", req.Why, "by", callerOf(ctx))
	return &adminv1.SyncAcceptResponse{Released: uint64(n)}, nil
}

// SyncRepair begins a repair.
func (s *Server) SyncRepair(ctx context.Context, req *adminv1.SyncRepairRequest) (*adminv1.SyncRepairResponse, error) {
	if s.o.Sync == nil {
		return nil, missing("datasets")
	}
	kind, err := kindOf(req.Kind)
	if err != nil {
		return nil, err
	}
	already, err := s.o.Sync.Repair(ctx, kind)
	if err != nil {
		return nil, err
	}
	s.o.Logger.Info("an operator asked for a repair", "kind", kind, "already", already, "by", callerOf(ctx))
	return &adminv1.SyncRepairResponse{Already: already}, nil
}

// kindOf checks the kind of a dataset; "" means users.
func kindOf(kind string) (string, error) {
	if kind == "" {
		return string(usercache.Users), nil
	}
	if !slices.Contains(usercache.Kinds, usercache.Kind(kind)) {
		return "", &FieldError{"kind", fmt.Sprintf("there is no dataset %.80q; there are %v", kind, usercache.Kinds)}
	}
	return kind, nil
}

// Explain shows how a query would be judged.
func (s *Server) Explain(ctx context.Context, req *adminv1.ExplainRequest) (*adminv1.ExplainResponse, error) {
	if s.o.Explain == nil {
		return nil, missing("explanations")
	}
	who, err := ParseTarget(req.Target)
	if err != nil {
		return nil, err
	}
	name, err := parseName(req.Name)
	if err != nil {
		return nil, err
	}
	asking := Asking{Who: who, Name: name, Type: dnswire.TypeA}
	if req.Type != "" {
		if asking.Type, err = parseType(req.Type); err != nil {
			return nil, err
		}
	}
	if req.Address != "" {
		if asking.Address, err = netip.ParseAddr(req.Address); err != nil || asking.Address.Zone() != "" {
			return nil, &FieldError{"address", fmt.Sprintf("%.80q is not an address; write 192.0.2.7 or 2001:db8::7", req.Address)}
		}
		asking.Address = asking.Address.Unmap()
	}
	if asking.Transport, err = parseTransport(req.Transport); err != nil {
		return nil, err
	}
	steps, err := s.o.Explain.Explain(ctx, asking)
	if err != nil {
		return nil, err
	}
	return &adminv1.ExplainResponse{Steps: steps}, nil
}

// parseTransport reads the name of a transport; nil if there is none.
func parseTransport(s string) (*query.Transport, error) {
	if s == "" {
		return nil, nil
	}
	var names []string
	for t := query.UDP; t < query.NumTransports; t++ {
		if t.String() == s {
			return &t, nil
		}
		names = append(names, t.String())
	}
	return nil, &FieldError{"transport", fmt.Sprintf("there is no transport %.80q; there are %s", s, strings.Join(names, ", "))}
}

func parseName(s string) (dnsname.Name, error) {
	if s == "" {
		return "", &FieldError{"name", "is missing"}
	}
	n, err := dnsname.Parse(s)
	if err != nil {
		return "", &FieldError{"name", err.Error()}
	}
	return n, nil
}

// parseType reads the mnemonic of a type; "" is 0, which means all.
func parseType(s string) (uint16, error) {
	if s == "" {
		return 0, nil
	}
	t, err := dnswire.ParseType(s)
	if err == nil && t == 0 {
		err = fmt.Errorf("type 0 is reserved")
	}
	if err != nil {
		return 0, &FieldError{"type", err.Error()}
	}
	return t, nil
}

// GetLimits shows limits.
func (s *Server) GetLimits(_ context.Context, req *adminv1.GetLimitsRequest) (*adminv1.GetLimitsResponse, error) {
	if s.o.Limits == nil {
		return nil, missing("limits")
	}
	all := s.o.Limits.Limits()
	if req.Name == "" {
		return &adminv1.GetLimitsResponse{Limits: all}, nil
	}
	for _, l := range all {
		if l.Name == req.Name {
			return &adminv1.GetLimitsResponse{Limits: []*adminv1.Limit{l}}, nil
		}
	}
	return nil, fmt.Errorf("limit %.80q: %w; there are %s", req.Name, ErrNotFound, limitNames(all))
}

func limitNames(all []*adminv1.Limit) string {
	names := make([]string, len(all))
	for i, l := range all {
		names[i] = l.Name
	}
	return strings.Join(names, ", ")
}

// maxLiveChange is the longest time for which something can be changed: longer is a matter for the
// configuration.
const maxLiveChange = 366 * 24 * time.Hour

func duration(seconds uint64) (time.Duration, error) {
	if seconds > uint64(maxLiveChange/time.Second) {
		return 0, &FieldError{"seconds", fmt.Sprintf("%d is more than a year; change the configuration instead", seconds)}
	}
	return time.Duration(seconds) * time.Second, nil
}

// SetLimit changes a limit.
func (s *Server) SetLimit(ctx context.Context, req *adminv1.SetLimitRequest) (*adminv1.SetLimitResponse, error) {
	if s.o.Limits == nil {
		return nil, missing("limits")
	}
	d, err := duration(req.Seconds)
	if err != nil {
		return nil, err
	}
	if len(req.Why) > 1024 {
		return nil, &FieldError{"why", fmt.Sprintf("has %d bytes; at most 1024", len(req.Why))}
	}
	l, err := s.o.Limits.Set(req.Name, req.Value, d, req.Why)
	if err != nil {
		return nil, err
	}
	s.o.Logger.Warn("an operator changed a limit", "limit", l.Name, "value", l.Value, "for", d, "why", req.Why, "by", callerOf(ctx))
	return &adminv1.SetLimitResponse{Limit: l}, nil
}

// ResetLimit takes a change back.
func (s *Server) ResetLimit(ctx context.Context, req *adminv1.ResetLimitRequest) (*adminv1.ResetLimitResponse, error) {
	if s.o.Limits == nil {
		return nil, missing("limits")
	}
	l, err := s.o.Limits.Reset(req.Name)
	if err != nil {
		return nil, err
	}
	s.o.Logger.Warn("an operator reset a limit", "limit", l.Name, "value", l.Value, "by", callerOf(ctx))
	return &adminv1.ResetLimitResponse{Limit: l}, nil
}

// CacheLook shows what is cached.
func (s *Server) CacheLook(_ context.Context, req *adminv1.CacheLookRequest) (*adminv1.CacheLookResponse, error) {
	if s.o.Cache == nil {
		return nil, missing("caches")
	}
	name, err := parseName(req.Name)
	if err != nil {
		return nil, err
	}
	typ, err := parseType(req.Type)
	if err != nil {
		return nil, err
	}
	return &adminv1.CacheLookResponse{Entries: s.o.Cache.Look(name, typ)}, nil
}

// CachePurge forgets names.
func (s *Server) CachePurge(ctx context.Context, req *adminv1.CachePurgeRequest) (*adminv1.CachePurgeResponse, error) {
	if s.o.Cache == nil {
		return nil, missing("caches")
	}
	name, err := parseName(req.Name)
	if err != nil {
		return nil, err
	}
	typ, err := parseType(req.Type)
	if err != nil {
		return nil, err
	}
	n := s.o.Cache.Purge(name, req.Subtree, typ)
	s.o.Logger.Info("an operator purged a name", "name", name.String(), "subtree", req.Subtree, "type", req.Type, "removed", n, "by", callerOf(ctx))
	return &adminv1.CachePurgeResponse{Removed: uint64(n)}, nil
}

// dumpChunk is how many bytes of a dump go in one message.
const dumpChunk = 64 << 10

// CacheDump gives the RRset cache out. One dump or load runs at a time.
func (s *Server) CacheDump(_ *adminv1.CacheDumpRequest, stream grpc.ServerStreamingServer[adminv1.CacheDumpResponse]) error {
	if s.o.Cache == nil {
		return missing("caches")
	}
	if err := s.takeBulk(); err != nil {
		return err
	}
	defer s.giveBulk()
	return s.o.Cache.Dump(dumpWriter{stream})
}

// A dumpWriter sends what is written.
type dumpWriter struct {
	to grpc.ServerStreamingServer[adminv1.CacheDumpResponse]
}

func (w dumpWriter) Write(b []byte) (n int, err error) {
	for part := range slices.Chunk(b, dumpChunk) {
		if err := w.to.Send(&adminv1.CacheDumpResponse{Data: part}); err != nil {
			return n, err
		}
		n += len(part)
	}
	return n, nil
}

// CacheLoad takes a dump in.
func (s *Server) CacheLoad(stream grpc.ClientStreamingServer[adminv1.CacheLoadRequest, adminv1.CacheLoadResponse]) error {
	if s.o.Cache == nil {
		return missing("caches")
	}
	if err := s.takeBulk(); err != nil {
		return err
	}
	defer s.giveBulk()
	loaded, skipped, err := s.o.Cache.Load(&loadReader{from: stream})
	if err != nil {
		return err
	}
	s.o.Logger.Info("an operator loaded a cache dump", "loaded", loaded, "by", callerOf(stream.Context()))
	return stream.SendAndClose(&adminv1.CacheLoadResponse{Loaded: uint64(loaded), Skipped: uint64(skipped)})
}

// A loadReader reads what is sent.
type loadReader struct {
	from grpc.ClientStreamingServer[adminv1.CacheLoadRequest, adminv1.CacheLoadResponse]
	rest []byte
}

func (r *loadReader) Read(b []byte) (int, error) {
	for len(r.rest) == 0 {
		m, err := r.from.Recv()
		if err != nil {
			return 0, err // io.EOF at the end
		}
		r.rest = m.Data
	}
	n := copy(b, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

func (s *Server) takeBulk() error {
	select {
	case s.bulk <- struct{}{}:
		return nil
	default:
		return fmt.Errorf("%w: another dump or load is under way; try again when it has ended", ErrBusy)
	}
}

func (s *Server) giveBulk() { <-s.bulk }

// Drain makes readiness false.
func (s *Server) Drain(ctx context.Context, _ *adminv1.DrainRequest) (*adminv1.DrainResponse, error) {
	return &adminv1.DrainResponse{}, s.setDraining(ctx, true)
}

// Undrain ends that.
func (s *Server) Undrain(ctx context.Context, _ *adminv1.UndrainRequest) (*adminv1.UndrainResponse, error) {
	return &adminv1.UndrainResponse{}, s.setDraining(ctx, false)
}

func (s *Server) setDraining(ctx context.Context, on bool) error {
	if s.o.Lifecycle == nil {
		return missing("draining")
	}
	s.o.Lifecycle.SetDraining(on)
	s.o.Logger.Warn("an operator changed draining", "draining", on, "by", callerOf(ctx))
	return nil
}

// SetLogLevel changes how much is logged.
func (s *Server) SetLogLevel(ctx context.Context, req *adminv1.SetLogLevelRequest) (*adminv1.SetLogLevelResponse, error) {
	if s.o.Log == nil {
		return nil, missing("log levels")
	}
	level, ok := levels[req.Level]
	if !ok {
		return nil, &FieldError{"level", fmt.Sprintf("%.80q is none of debug, info, warn, error", req.Level)}
	}
	d, err := duration(req.Seconds)
	if err != nil {
		return nil, err
	}
	was := s.o.Log.SetLevel(level, d)
	s.o.Logger.Warn("an operator changed the log level", "level", req.Level, "was", levelName(was), "for", d, "by", callerOf(ctx))
	return &adminv1.SetLogLevelResponse{Was: levelName(was)}, nil
}
