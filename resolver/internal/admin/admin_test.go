package admin

import (
	"bytes"
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// A rig is a Server and a client of it in memory.
type rig struct {
	adminv1.ResolverServiceClient
	health grpc_health_v1.HealthClient
	end    func() error // stops serving; returns what Serve did
}

func start(t *testing.T, o Options) *rig {
	t.Helper()
	if o.Readiness == nil {
		o.Readiness = func() Readiness { return Readiness{Ready: true, State: "fresh", Level: "normal"} }
	}
	o.Logger = slog.New(slog.DiscardHandler)
	l := bufconn.Listen(1 << 16)
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- New(o).Serve(ctx, l) }()
	conn, err := grpc.NewClient("passthrough:///admin", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	var ended bool
	r := &rig{adminv1.NewResolverServiceClient(conn), grpc_health_v1.NewHealthClient(conn), func() error {
		if ended {
			return nil
		}
		ended = true
		cancel()
		return <-served
	}}
	t.Cleanup(func() {
		conn.Close()
		if err := r.end(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// wantError checks the code of an error and the field it names ("" for none).
func wantError(t *testing.T, what string, err error, code codes.Code, field string) {
	t.Helper()
	got := ""
	for _, d := range status.Convert(err).Details() {
		if b, ok := d.(*errdetails.BadRequest); ok && len(b.FieldViolations) == 1 {
			got = b.FieldViolations[0].Field
		}
	}
	if status.Code(err) != code || got != field {
		t.Errorf("%s = %v (field %q); want %v, field %q", what, err, got, code, field)
	}
}

// parts are fakes that record what was asked of them.
type parts struct {
	draining atomic.Bool
	sync     struct{ kind, dataset, why string }
	err      error
	panics   bool
	entered  chan struct{} // Dump says that it has begun,
	block    chan struct{} // and waits for this
	loaded   []byte
}

func (p *parts) SetDraining(on bool) { p.draining.Store(on) }

func (p *parts) Datasets() []*adminv1.DatasetStatus {
	return []*adminv1.DatasetStatus{
		{Kind: "users", State: "fresh", Revision: 7, Overlay: 2, Generation: 3, LagMs: 40},
		{Kind: "catalogue", State: "fresh", Revision: 12, Overlay: 1, Generation: 9},
	}
}

func (p *parts) Accept(_ context.Context, kind, dataset, why string) (int, error) {
	p.sync.kind, p.sync.dataset, p.sync.why = kind, dataset, why
	return 5, p.err
}

func (p *parts) Repair(context.Context, string) (bool, error) { return true, p.err }

func (p *parts) Explain(ctx context.Context, a Asking) ([]*adminv1.ExplainStep, error) {
	if p.panics {
		panic("explain")
	}
	if _, limited := ctx.Deadline(); !limited {
		return nil, errors.New("a call without a time limit")
	}
	return []*adminv1.ExplainStep{{Step: fmt.Sprintf("%s %s %s %d", a.Who.User, a.Who.Device, a.Name, a.Type)}}, p.err
}

func (p *parts) Look(dnsname.Name, uint16) []*adminv1.CacheEntry { return nil }
func (p *parts) Purge(n dnsname.Name, subtree bool, typ uint16) int {
	return len(n)
}

func (p *parts) Dump(w io.Writer) error {
	if p.block != nil {
		p.entered <- struct{}{}
		<-p.block
	}
	_, err := w.Write(bytes.Repeat([]byte("x"), 3*dumpChunk+1))
	return errors.Join(err, p.err)
}

func (p *parts) Load(r io.Reader) (int, int, error) {
	b, err := io.ReadAll(r)
	p.loaded = b
	return len(b), 1, errors.Join(err, p.err)
}

func TestRequestsAreChecked(t *testing.T) {
	p := &parts{}
	var panics atomic.Int32
	r := start(t, Options{Sync: p, Explain: p, Cache: p, Lifecycle: p, Log: NewLogLevel(new(slog.LevelVar)), Limits: newLimits(t, nil), Panicked: func() { panics.Add(1) }})
	ctx := t.Context()
	call := map[string]func() error{
		"target": func() error {
			_, err := r.Explain(ctx, &adminv1.ExplainRequest{Target: "a/b/c", Name: "x.example"})
			return err
		},
		"name": func() error {
			_, err := r.Explain(ctx, &adminv1.ExplainRequest{Target: "a", Name: strings.Repeat("a", 64) + ".example"})
			return err
		},
		"type": func() error {
			_, err := r.Explain(ctx, &adminv1.ExplainRequest{Target: "a", Name: "x.example", Type: "AAAAA"})
			return err
		},
		"address": func() error {
			_, err := r.Explain(ctx, &adminv1.ExplainRequest{Target: "a", Name: "x.example", Address: "192.0.2.0/24"})
			return err
		},
		"transport": func() error {
			_, err := r.Explain(ctx, &adminv1.ExplainRequest{Target: "a", Name: "x.example", Transport: "smoke"})
			return err
		},
		"kind": func() error {
			_, err := r.SyncRepair(ctx, &adminv1.SyncRepairRequest{Kind: "user"})
			return err
		},
		"dataset": func() error {
			_, err := r.SyncAccept(ctx, &adminv1.SyncAcceptRequest{Dataset: "xyz"})
			return err
		},
		"seconds": func() error {
			_, err := r.SetLogLevel(ctx, &adminv1.SetLogLevelRequest{Level: "debug", Seconds: 1 << 60})
			return err
		},
		"level": func() error {
			_, err := r.SetLogLevel(ctx, &adminv1.SetLogLevelRequest{Level: "loud"})
			return err
		},
		"why": func() error {
			_, err := r.SetLimit(ctx, &adminv1.SetLimitRequest{Name: "in_flight", Value: "300", Why: strings.Repeat("x", 2000)})
			return err
		},
		"value": func() error {
			_, err := r.SetLimit(ctx, &adminv1.SetLimitRequest{Name: "in_flight", Value: "many"})
			return err
		},
	}
	for field, f := range call {
		wantError(t, field, f(), codes.InvalidArgument, field)
	}
	if _, err := r.CachePurge(ctx, &adminv1.CachePurgeRequest{}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("purge of no name = %v", err)
	}
	if _, err := r.CacheLook(ctx, &adminv1.CacheLookRequest{Name: strings.Repeat("x", maxMessage)}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a message of more than 1 MiB = %v", err)
	}

	resp, err := r.Explain(ctx, &adminv1.ExplainRequest{Target: "Ann/Phone", Name: "WWW.example"})
	if err != nil || resp.Steps[0].Step != "ann phone www.example. 1" {
		t.Errorf("explain = %v, %v", resp, err)
	}
	for want, err := range map[codes.Code]error{
		codes.NotFound:           fmt.Errorf("user: %w", ErrNotFound),
		codes.FailedPrecondition: fmt.Errorf("user: %w", ErrRefused),
		codes.DeadlineExceeded:   fmt.Errorf("asking: %w", context.DeadlineExceeded),
		codes.Internal:           errors.New("something"),
	} {
		p.err = err
		_, got := r.SyncRepair(ctx, &adminv1.SyncRepairRequest{})
		wantError(t, "repair", got, want, "")
	}
	p.err, p.panics = nil, true
	_, err = r.Explain(ctx, &adminv1.ExplainRequest{Target: "ann", Name: "example"})
	wantError(t, "a panic", err, codes.Internal, "")
	if panics.Load() != 1 {
		t.Errorf("%d panics counted", panics.Load())
	}
	if _, err := start(t, Options{}).CacheLook(ctx, &adminv1.CacheLookRequest{Name: "example"}); status.Code(err) != codes.Unimplemented {
		t.Errorf("without caches: %v", err)
	}
}

func TestStatusAndSync(t *testing.T) {
	p := &parts{}
	r := start(t, Options{Node: "n1", Region: "eu", Version: "1", Sync: p, Lifecycle: p, Readiness: func() Readiness {
		return Readiness{Ready: !p.draining.Load(), State: "fresh", Level: "normal", Draining: p.draining.Load(), Revision: 7, Users: 3}
	}})
	ctx := t.Context()
	st, err := r.Status(ctx, &adminv1.StatusRequest{})
	if err != nil || !st.Ready || st.Overlay != 3 || st.Generation != 3 || st.LagMs != 40 || st.Revision != 7 || st.Users != 3 || st.Node != "n1" || len(st.Datasets) != 2 {
		t.Errorf("status = %v, %v", st, err)
	}
	one, err := r.SyncStatus(ctx, &adminv1.SyncStatusRequest{Kind: "catalogue"})
	if err != nil || len(one.Datasets) != 1 || one.Datasets[0].Generation != 9 {
		t.Errorf("sync status = %v, %v", one, err)
	}
	// A catalogue that is held and not yet compiled is not served.
	for present, want := range map[bool]uint64{true: 12, false: 10} {
		r := start(t, Options{Sync: p, Serving: func() (bool, uint64) { return present, 10 }})
		if st, err := r.Status(ctx, &adminv1.StatusRequest{}); err != nil || st.Datasets[1].Revision != want || st.Datasets[0].Revision != 7 {
			t.Errorf("present %v: %v, %v", present, st, err)
		}
	}
	id := strings.Repeat("AB", 16)
	acc, err := r.SyncAccept(ctx, &adminv1.SyncAcceptRequest{Dataset: id, Why: "moved"})
	if err != nil || acc.Released != 5 || p.sync.kind != "users" || p.sync.dataset != strings.ToLower(id) || p.sync.why != "moved" {
		t.Errorf("accept = %v, %v, asked %+v", acc, err, p.sync)
	}
	for _, on := range []bool{true, false} {
		if on {
			_, err = r.Drain(ctx, &adminv1.DrainRequest{})
		} else {
			_, err = r.Undrain(ctx, &adminv1.UndrainRequest{})
		}
		if err != nil || p.draining.Load() != on {
			t.Errorf("draining %v: %v, %v", on, p.draining.Load(), err)
		}
	}
}

// One dump at a time, and the bytes of dump and load arrive whole, in messages of bounded size.
func TestDumpAndLoad(t *testing.T) {
	p := &parts{entered: make(chan struct{}), block: make(chan struct{})}
	r := start(t, Options{Cache: p})
	ctx := t.Context()
	dump, err := r.CacheDump(ctx, &adminv1.CacheDumpRequest{})
	if err != nil {
		t.Fatal(err)
	}
	<-p.entered
	second, err := r.CacheDump(ctx, &adminv1.CacheDumpRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err = second.Recv(); status.Code(err) != codes.ResourceExhausted {
		t.Fatalf("a second dump = %v", err)
	}
	close(p.block)
	n := 0
	for {
		m, err := dump.Recv()
		if err == io.EOF {
			break
		}
		if err != nil || len(m.Data) > dumpChunk {
			t.Fatalf("%d bytes, %v", len(m.GetData()), err)
		}
		n += len(m.Data)
	}
	if n != 3*dumpChunk+1 {
		t.Errorf("%d bytes", n)
	}
	load, err := r.CacheLoad(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"abc", "", "de"} {
		if err := load.Send(&adminv1.CacheLoadRequest{Data: []byte(part)}); err != nil {
			t.Fatal(err)
		}
	}
	if resp, err := load.CloseAndRecv(); err != nil || resp.Loaded != 5 || resp.Skipped != 1 || string(p.loaded) != "abcde" {
		t.Errorf("load = %v, %v", resp, err)
	}
}

func TestWhoMayCall(t *testing.T) {
	s := New(Options{Readiness: func() Readiness { return Readiness{} }, TokenRole: func(token string) (string, error) {
		if token == "bad" {
			return "", errors.New("expired")
		}
		return token, nil
	}})
	at := func(addr, token string) context.Context {
		a, _ := net.ResolveTCPAddr("tcp", addr)
		ctx := peer.NewContext(t.Context(), &peer.Peer{Addr: a})
		if token != "" {
			ctx = metadata.NewIncomingContext(ctx, metadata.Pairs("authorization", "Bearer "+token))
		}
		return ctx
	}
	show, change := adminv1.ResolverService_Status_FullMethodName, adminv1.ResolverService_Drain_FullMethodName
	for _, c := range []struct {
		addr, token, method string
		want                codes.Code
	}{
		{"127.0.0.1:1", "", change, codes.OK},
		{"[::1]:1", "", change, codes.OK},
		{"[::ffff:127.0.0.1]:1", "", change, codes.OK},
		{"192.0.2.1:1", "", show, codes.Unauthenticated},
		{"192.0.2.1:1", "", "/grpc.health.v1.Health/Check", codes.OK},
		{"192.0.2.1:1", "admin", change, codes.OK},
		{"192.0.2.1:1", "operator", change, codes.OK},
		{"192.0.2.1:1", "reader", show, codes.OK},
		{"192.0.2.1:1", "reader", change, codes.PermissionDenied},
		{"192.0.2.1:1", "reader", adminv1.ResolverService_CacheDump_FullMethodName, codes.PermissionDenied},
		{"192.0.2.1:1", "tenant", show, codes.PermissionDenied},
		{"127.0.0.1:1", "reader", change, codes.PermissionDenied}, // a token is taken at its word everywhere
		{"127.0.0.1:1", "bad", show, codes.Unauthenticated},
	} {
		if got := status.Code(s.allow(at(c.addr, c.token), c.method)); got != c.want {
			t.Errorf("%s with token %q calling %s = %v; want %v", c.addr, c.token, c.method, got, c.want)
		}
	}
	for org, want := range map[string]codes.Code{"operator": codes.OK, "reader": codes.PermissionDenied, "node": codes.PermissionDenied, "": codes.Unauthenticated} {
		tlsInfo := credentials.TLSInfo{} // a connection without client certificate
		if org != "" {
			tlsInfo.State.VerifiedChains = [][]*x509.Certificate{{{Subject: pkix.Name{CommonName: "ann", Organization: []string{org}}}}}
		}
		ctx := peer.NewContext(t.Context(), &peer.Peer{Addr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}, AuthInfo: tlsInfo})
		if got := status.Code(s.allow(ctx, change)); got != want {
			t.Errorf("a certificate of %q = %v; want %v", org, got, want)
		}
		if org != "" && callerOf(ctx) != "ann" {
			t.Errorf("caller %q", callerOf(ctx))
		}
	}
	if got := status.Code(New(Options{}).allow(at("127.0.0.1:1", "admin"), show)); got != codes.Unauthenticated {
		t.Errorf("a token where none are known = %v", got)
	}
	if got := status.Code(s.allow(t.Context(), show)); got != codes.Unauthenticated {
		t.Errorf("a caller from nowhere = %v", got)
	}
}

// Health says the same as readiness, follows it, and its watches end when the server does.
func TestHealth(t *testing.T) {
	var ready atomic.Bool
	r := start(t, Options{Readiness: func() Readiness { return Readiness{Ready: ready.Load()} }})
	got, err := r.health.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	if err != nil || got.Status != grpc_health_v1.HealthCheckResponse_NOT_SERVING {
		t.Errorf("check = %v, %v", got, err)
	}
	_, err = r.health.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: "other"})
	wantError(t, "another service", err, codes.NotFound, "")
	w, err := r.health.Watch(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []grpc_health_v1.HealthCheckResponse_ServingStatus{2, 1, 2} {
		if m, err := w.Recv(); err != nil || m.Status != want {
			t.Fatalf("watch = %v, %v; want %v", m, err, want)
		}
		ready.Store(want == 2)
	}
	if err := r.end(); err != nil {
		t.Error(err)
	}
	for err = nil; err == nil; { // the last change may still come
		_, err = w.Recv()
	}
	if err == io.EOF || status.Code(err) != codes.Unavailable {
		t.Errorf("a watch at the end = %v", err)
	}
}

func TestLogLevel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var v slog.LevelVar
		l := NewLogLevel(&v)
		defer l.Close()
		if was := l.SetLevel(slog.LevelDebug, time.Hour); was != slog.LevelInfo || v.Level() != slog.LevelDebug {
			t.Errorf("was %v, is %v", was, v.Level())
		}
		// A second change for a time goes back to what was set for good, not to the first.
		time.Sleep(30 * time.Minute)
		l.SetLevel(slog.LevelError, time.Hour)
		time.Sleep(59 * time.Minute)
		if synctest.Wait(); v.Level() != slog.LevelError {
			t.Errorf("too early: %v", v.Level())
		}
		time.Sleep(2 * time.Minute)
		if synctest.Wait(); v.Level() != slog.LevelInfo {
			t.Errorf("afterwards %v", v.Level())
		}
		// A change for good ends one for a time.
		l.SetLevel(slog.LevelDebug, time.Hour)
		l.SetLevel(slog.LevelWarn, 0)
		time.Sleep(2 * time.Hour)
		if synctest.Wait(); v.Level() != slog.LevelWarn {
			t.Errorf("a change for good became %v", v.Level())
		}
	})
}

func TestPages(t *testing.T) {
	state := Readiness{Ready: false, Reasons: []string{"cold"}, State: "cold", Level: "normal", Dataset: "ab", Revision: 42, Users: 3}
	var live error
	reg := prometheus.NewRegistry()
	reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "sluice_test", Help: "Test."}, func() float64 { return 4 }))
	h := NewHandler(HTTPOptions{Readiness: func() Readiness { return state }, Live: func() error { return live }, Metrics: reg})
	get := func(method, path string) (int, string) {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, path, nil))
		return w.Code, w.Body.String()
	}
	code, body := get("GET", "/readyz")
	want := `{"ready":false,"reasons":["cold"],"state":"cold","degraded":0,"level":"normal","draining":false,"dataset":"ab","revision":42,"users":3}` + "\n"
	if code != http.StatusServiceUnavailable || body != want {
		t.Errorf("readyz = %d %s; want %s", code, body, want)
	}
	// Shedding shows, and withdraws nothing.
	state = Readiness{Ready: true, State: "fresh", Level: "shed", Degraded: 0.25}
	code, body = get("GET", "/readyz")
	var fields map[string]any
	if err := json.Unmarshal([]byte(body), &fields); err != nil || code != 200 || fields["degraded"] != 0.25 || len(fields["reasons"].([]any)) != 0 {
		t.Errorf("readyz = %d %s", code, body)
	}
	if code, _ := get("GET", "/livez"); code != 200 {
		t.Errorf("livez = %d", code)
	}
	live = errors.New("the UDP workers stand still")
	if code, body := get("GET", "/livez"); code != 503 || !strings.Contains(body, "stand still") {
		t.Errorf("livez = %d %s", code, body)
	}
	if code, body := get("GET", "/metrics"); code != 200 || !strings.Contains(body, "sluice_test 4") {
		t.Errorf("metrics = %d %s", code, body)
	}
	for path, want := range map[string]int{"/debug/pprof/": 200, "/debug/pprof/goroutine?debug=1": 200, "/": 404, "/debug/vars": 404} {
		if code, _ := get("GET", path); code != want {
			t.Errorf("%s = %d", path, code)
		}
	}
	if code, _ := get("POST", "/readyz"); code != http.StatusMethodNotAllowed {
		t.Errorf("POST = %d", code)
	}
}
