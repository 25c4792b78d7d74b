package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the files of expected output")

// A shell runs command lines against servers of the test.
type shell struct {
	t     *testing.T
	stdin string
	env   map[string]string
}

// run returns the exit status and what was written.
func (s *shell) run(args ...string) (int, string, string) {
	s.t.Helper()
	var out, errs strings.Builder
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	defer cancel()
	code := execute(ctx, args, strings.NewReader(s.stdin), &out, &errs, func(k string) string { return s.env[k] })
	return code, out.String(), errs.String()
}

// ok runs a command line that must succeed and returns its output.
func (s *shell) ok(args ...string) string {
	s.t.Helper()
	code, out, errs := s.run(args...)
	if code != 0 {
		s.t.Fatalf("sluicectl %v: exit %d: %s%s", args, code, out, errs)
	}
	return out
}

// fails runs a command line that must end with a status and say something of standard error.
func (s *shell) fails(want int, says string, args ...string) {
	s.t.Helper()
	code, out, errs := s.run(args...)
	if code != want || !strings.Contains(errs, says) {
		s.t.Errorf("sluicectl %v: exit %d, %q, %q; want exit %d and %q", args, code, out, errs, want, says)
	}
}

// serve serves on loopback and returns the address.
func serve(t *testing.T, register func(*grpc.Server), opts ...grpc.ServerOption) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(opts...)
	register(g)
	done := make(chan struct{})
	go func() { defer close(done); _ = g.Serve(l) }()
	t.Cleanup(func() { g.Stop(); <-done })
	return l.Addr().String()
}

// A fakeResolver is a resolver of which the test says what it answers.
type fakeResolver struct {
	adminv1.UnimplementedResolverServiceServer
	revision, catalogue atomic.Uint64
	asked               atomic.Int32
	advance             int32 // Status is answered with the revision after so many calls
	next                uint64
	draining            atomic.Bool
	last                proto.Message
	dump                []byte
	loaded              bytes.Buffer
}

func (f *fakeResolver) Status(context.Context, *adminv1.StatusRequest) (*adminv1.StatusResponse, error) {
	if f.asked.Add(1) == f.advance {
		f.revision.Store(f.next)
	}
	return &adminv1.StatusResponse{Ready: !f.draining.Load(), State: "fresh", Level: "normal", Revision: f.revision.Load(), Users: 3, Node: "n1", Degraded: 0.125,
		LagMs: 1500, Uptime: 61, Datasets: []*adminv1.DatasetStatus{{Kind: "users", Revision: f.revision.Load()}, {Kind: "catalogue", Revision: f.catalogue.Load()}}}, nil
}

func (f *fakeResolver) SyncStatus(context.Context, *adminv1.SyncStatusRequest) (*adminv1.SyncStatusResponse, error) {
	return &adminv1.SyncStatusResponse{Datasets: []*adminv1.DatasetStatus{
		{Kind: "users", State: "suspect", Revision: 41, Head: 42, Records: 3, Root: strings.Repeat("ab", 32), GuardTripped: true, Overlay: 2, BucketsLeft: 7,
			Totals: &userv1.Totals{Users: 3, Devices: 4}}}}, nil
}

func (f *fakeResolver) SyncAccept(_ context.Context, r *adminv1.SyncAcceptRequest) (*adminv1.SyncAcceptResponse, error) {
	f.last = r
	return &adminv1.SyncAcceptResponse{Released: 2}, nil
}

func (f *fakeResolver) Explain(_ context.Context, r *adminv1.ExplainRequest) (*adminv1.ExplainResponse, error) {
	f.last = r
	return &adminv1.ExplainResponse{Steps: []*adminv1.ExplainStep{
		{Step: "identity", Verdict: "none", Detail: "device phone of user ann"},
		{Step: "list", Verdict: "blocked", List: "oisd", Rule: "||ads.example^\x1b[31m", Line: 12}}}, nil
}

func (f *fakeResolver) ListNegativeTrustAnchors(context.Context, *adminv1.ListNegativeTrustAnchorsRequest) (*adminv1.ListNegativeTrustAnchorsResponse, error) {
	return &adminv1.ListNegativeTrustAnchorsResponse{Anchors: []*adminv1.NegativeTrustAnchor{
		{Name: "broken.example.", Until: 1893456000, Why: "keys are being mended"}, {Name: "lab.example.", Configured: true},
	}}, nil
}

func (f *fakeResolver) AddNegativeTrustAnchor(_ context.Context, r *adminv1.AddNegativeTrustAnchorRequest) (*adminv1.AddNegativeTrustAnchorResponse, error) {
	f.last = r
	return &adminv1.AddNegativeTrustAnchorResponse{Anchor: &adminv1.NegativeTrustAnchor{Name: r.Name, Until: 1893456000, Why: r.Why}}, nil
}

func (f *fakeResolver) RemoveNegativeTrustAnchor(_ context.Context, r *adminv1.RemoveNegativeTrustAnchorRequest) (*adminv1.RemoveNegativeTrustAnchorResponse, error) {
	f.last = r
	return &adminv1.RemoveNegativeTrustAnchorResponse{}, nil
}

func (f *fakeResolver) SetLimit(_ context.Context, r *adminv1.SetLimitRequest) (*adminv1.SetLimitResponse, error) {
	f.last = r
	if r.Name != "cache" {
		return nil, status.Errorf(codes.NotFound, "there is no limit %q", r.Name)
	}
	return &adminv1.SetLimitResponse{Limit: &adminv1.Limit{Name: r.Name, Value: "1073741824", Unit: "bytes", From: "set live: " + r.Why, Until: 1893456000, Why: r.Why}}, nil
}

func (f *fakeResolver) CacheLook(context.Context, *adminv1.CacheLookRequest) (*adminv1.CacheLookResponse, error) {
	return &adminv1.CacheLookResponse{Entries: []*adminv1.CacheEntry{
		{Cache: "rrset", Name: "www.example.", Type: "A", Ttl: 17, Status: "secure", Rank: "answer", Data: []string{"192.0.2.1", "192.0.2.2"}},
		{Cache: "rrset", Name: "www.example.", Type: "AAAA", Ttl: -5, Status: "insecure", Rank: "authority", Data: []string{"NODATA"}, View: "corp"}}}, nil
}

func (f *fakeResolver) CacheDump(_ *adminv1.CacheDumpRequest, s grpc.ServerStreamingServer[adminv1.CacheDumpResponse]) error {
	if f.dump == nil {
		_ = s.Send(&adminv1.CacheDumpResponse{Data: []byte("half")})
		return status.Error(codes.Internal, "the cache broke")
	}
	return errors.Join(s.Send(&adminv1.CacheDumpResponse{Data: f.dump[:3]}), s.Send(&adminv1.CacheDumpResponse{Data: f.dump[3:]}))
}

func (f *fakeResolver) CacheLoad(s grpc.ClientStreamingServer[adminv1.CacheLoadRequest, adminv1.CacheLoadResponse]) error {
	for {
		m, err := s.Recv()
		if err == io.EOF {
			return s.SendAndClose(&adminv1.CacheLoadResponse{Loaded: uint64(f.loaded.Len()), Skipped: 1})
		}
		if err != nil {
			return err
		}
		f.loaded.Write(m.Data)
	}
}

func (f *fakeResolver) Drain(context.Context, *adminv1.DrainRequest) (*adminv1.DrainResponse, error) {
	f.draining.Store(true)
	return &adminv1.DrainResponse{}, nil
}

func (f *fakeResolver) SetLogLevel(_ context.Context, r *adminv1.SetLogLevelRequest) (*adminv1.SetLogLevelResponse, error) {
	f.last = r
	return &adminv1.SetLogLevelResponse{Was: "info"}, nil
}

func startResolver(t *testing.T) (*fakeResolver, string) {
	f := &fakeResolver{}
	return f, serve(t, func(g *grpc.Server) { adminv1.RegisterResolverServiceServer(g, f) })
}

// A fakeService answers what the real service cannot be brought to.
type fakeService struct {
	adminv1.UnimplementedUserServiceServer
	adminv1.UnimplementedPolicyServiceServer
	adminv1.UnimplementedDataServiceServer
	token atomic.Value
	batch func(*adminv1.ImportRequest) (*adminv1.ImportResponse, error)
}

func (f *fakeService) CreateUser(ctx context.Context, r *adminv1.CreateUserRequest) (*adminv1.CreateUserResponse, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	f.token.Store(strings.Join(md.Get("authorization"), ","))
	return &adminv1.CreateUserResponse{Revision: 18446744073709551615, Dataset: "users"}, nil
}

func (f *fakeService) CreatePolicy(context.Context, *adminv1.CreatePolicyRequest) (*adminv1.CreatePolicyResponse, error) {
	st, _ := status.New(codes.ResourceExhausted, "too many").WithDetails(&errdetails.RetryInfo{})
	return nil, st.Err()
}

func (f *fakeService) Import(_ context.Context, r *adminv1.ImportRequest) (*adminv1.ImportResponse, error) {
	return f.batch(r)
}

func startService(t *testing.T) (*fakeService, string) {
	f := &fakeService{}
	return f, serve(t, func(g *grpc.Server) {
		adminv1.RegisterUserServiceServer(g, f)
		adminv1.RegisterPolicyServiceServer(g, f)
		adminv1.RegisterDataServiceServer(g, f)
	})
}

// golden compares output with a file of testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".txt")
	if *rewrite {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s:\n%s\nwant:\n%s", name, got, want)
	}
}

func TestUsage(t *testing.T) {
	dir := t.TempDir()
	sh := &shell{t: t, env: map[string]string{}}
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"nosuch"}, "nosuch"},
		{[]string{"user"}, "create, delete, get, list"},
		{[]string{"user", "nosuch"}, "nosuch"},
		{[]string{"user", "create"}, "arg"},
		{[]string{"user", "create", "a", "b"}, "arg"},
		{[]string{"user", "create", "a", "--nosuch"}, "nosuch"},
		{[]string{"user", "create", "a", "--if-revision", "3"}, "does not exist yet"},
		{[]string{"user", "list", "-o", "xml"}, "xml"},
		{[]string{"user", "list", "--timeout", "0s"}, "timeout"},
		{[]string{"user", "get", "a", "--service", "127.0.0.1"}, "HOST:PORT"},
		{[]string{"user", "get", "a", "--service", "unix:"}, "path"},
		{[]string{"policy", "set", "ann"}, "arg"},
		{[]string{"policy", "set", "ann", "mode"}, "KEY=VALUE"},
		{[]string{"policy", "set", "ann", "=nxdomain"}, "KEY=VALUE"},
		{[]string{"policy", "set", "ann/", "mode=nxdomain"}, "no target"},
		{[]string{"policy", "set", "a/b/c", "mode=nxdomain"}, "no target"},
		{[]string{"policy", "set", "mode=nxdomain", "lists+=a"}, "no target"}, // the target was forgotten
		{[]string{"rules", "set", "ann"}, "file"},
		{[]string{"list", "add", "x"}, "file url"},
		{[]string{"list", "add", "x", "--file", "a", "--url", "b"}, "file url"},
		{[]string{"list", "add", "x", "--url", "http://x/", "--refresh", "1ms"}, "--refresh"},
		{[]string{"explain", "ann"}, "arg"},
		{[]string{"explain", "ann", "x.example", "--resolver", "127.0.0.1:1", "--resolver", "127.0.0.1:2"}, "one --resolver"},
		{[]string{"limits", "set", "cache", "1GiB", "--for", "-1s"}, "--for"},
		{[]string{"sync", "accept", "--fleet", "--dataset", "ab"}, "at resolvers"},
		{[]string{"token", "create"}, "role"},
		{[]string{"status", "--cert", "x"}, "--ca"},
	} {
		sh.fails(exitUsage, c.says, c.args...)
		// The same as an object.
		if strings.Contains(strings.Join(c.args, " "), "-o xml") {
			continue
		}
		code, out, errs := sh.run(append(c.args, "-o", "json")...)
		var f failure
		if err := json.Unmarshal([]byte(errs), &f); err != nil || code != exitUsage || out != "" || f.Code != "INVALID_ARGUMENT" || !strings.Contains(f.Message, c.says) {
			t.Errorf("sluicectl %v -o json: exit %d, %q, %q", c.args, code, out, errs)
		}
	}
	for _, args := range [][]string{{}, {"--help"}, {"policy", "set", "--help"}, {"completion", "bash"}} {
		if code, out, errs := sh.run(args...); code != 0 || out == "" || errs != "" {
			t.Errorf("sluicectl %v: exit %d, %q", args, code, errs)
		}
	}
	// Failures that are not the command line's.
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"user", "list", "--service", "unix:" + filepath.Join(dir, "none")}, "cannot be reached"},
		{[]string{"user", "list", "--token-file", filepath.Join(dir, "none")}, "no such file"},
		{[]string{"user", "list", "--ca", os.DevNull}, "no certificate"},
		{[]string{"import", "-f", filepath.Join(dir, "none")}, "no such file"},
		{[]string{"cache", "load", filepath.Join(dir, "none")}, "no such file"},
	} {
		sh.fails(exitFailed, c.says, c.args...)
	}
}

func TestResolverTables(t *testing.T) {
	f, addr := startResolver(t)
	for len(addr) < len("127.0.0.1:10000") { // ports of expected output have five digits
		f, addr = startResolver(t)
	}
	f.revision.Store(42)
	sh := &shell{t: t, env: map[string]string{"SLUICE_RESOLVER": addr}}
	at := func(s string) string { return strings.ReplaceAll(s, addr, "127.0.0.1:8053 ") }
	for name, args := range map[string][]string{
		"status":      {"status"},
		"sync-status": {"sync", "status"},
		"sync-accept": {"sync", "accept", "--why", "moved"},
		"explain":     {"explain", "ann/phone", "ads.example"},
		"limits-set":  {"limits", "set", "cache", "1GiB", "--for", "30m", "--why", "tight"},
		"cache-look":  {"cache", "look", "www.example"},
		"nta-list":    {"nta", "list"},
		"nta-add":     {"nta", "add", "broken.example", "--for", "2h", "--why", "keys are being mended"},
		"log-level":   {"log", "level", "debug", "--for", "10m"},
	} {
		golden(t, name, at(sh.ok(args...))+"\n"+sh.ok(append(args, "-o", "json")...))
	}
	sh.ok("explain", "ann", "x.example", "AAAA", "--addr", "192.0.2.7", "--transport", "dot")
	if r := f.last.(*adminv1.ExplainRequest); r.Target != "ann" || r.Type != "AAAA" || r.Address != "192.0.2.7" || r.Transport != "dot" {
		t.Errorf("asked %v", r)
	}
	sh.ok("limits", "set", "cache", "1GiB", "--for", "30m")
	if r := f.last.(*adminv1.SetLimitRequest); r.Seconds != 1800 || r.Value != "1GiB" {
		t.Errorf("asked %v", r)
	}
	sh.ok("nta", "add", "broken.example", "--for", "2h", "--why", "tired")
	if r := f.last.(*adminv1.AddNegativeTrustAnchorRequest); r.Name != "broken.example" || r.Seconds != 7200 || r.Why != "tired" {
		t.Errorf("asked %v", r)
	}
	sh.ok("nta", "remove", "broken.example")
	if r := f.last.(*adminv1.RemoveNegativeTrustAnchorRequest); r.Name != "broken.example" {
		t.Errorf("asked %v", r)
	}
	sh.fails(exitFailed, `there is no limit "nosuch"`, "limits", "set", "nosuch", "1")
	sh.ok("drain")
	if !f.draining.Load() {
		t.Error("not draining")
	}
	sh.fails(exitFailed, "does not do this", "undrain") // the fake has none
	sh.fails(exitFailed, "another address with --service", "user", "list", "--service", addr)

	// One of two is down: the other is shown, and the exit status says so.
	code, out, errs := sh.run("status", "--resolver", "127.0.0.1:1", "--resolver", addr)
	if code != exitFailed || !strings.Contains(out, "fresh") || !strings.Contains(errs, "127.0.0.1:1 cannot be reached") {
		t.Errorf("exit %d, %s, %s", code, out, errs)
	}
}

func TestDumpAndLoad(t *testing.T) {
	f, addr := startResolver(t)
	sh := &shell{t: t, env: map[string]string{"SLUICE_RESOLVER": addr}}
	file := filepath.Join(t.TempDir(), "dump")
	if err := os.WriteFile(file, []byte("what was there"), 0o600); err != nil {
		t.Fatal(err)
	}
	sh.fails(exitFailed, "the cache broke", "cache", "dump", file)
	if b, _ := os.ReadFile(file); string(b) != "what was there" {
		t.Errorf("a failed dump left %q", b)
	}
	f.dump = bytes.Repeat([]byte("dump"), chunk)
	sh.ok("cache", "dump", file)
	if b, _ := os.ReadFile(file); !bytes.Equal(b, f.dump) {
		t.Errorf("%d bytes dumped", len(b))
	}
	if out := sh.ok("cache", "load", file, "-o", "json"); out != fmt.Sprintf(`{"loaded":%d,"skipped":1}`+"\n", len(f.dump)) || !bytes.Equal(f.loaded.Bytes(), f.dump) {
		t.Errorf("load = %s, %d bytes", out, f.loaded.Len())
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(file), ".*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// --wait returns once every resolver serves the change, and says which does not.
func TestWait(t *testing.T) {
	_, service := startService(t)
	one, addr1 := startResolver(t)
	two, addr2 := startResolver(t)
	most := uint64(18446744073709551615)
	one.revision.Store(most)
	two.advance, two.next = 4, most
	sh := &shell{t: t, env: map[string]string{"SLUICE_SERVICE": service, "SLUICE_RESOLVER": addr1 + "," + addr2}}
	if out := sh.ok("user", "create", "ann", "--wait", "1h"); out != "{\"revision\":18446744073709551615}\n" {
		t.Errorf("create = %q", out)
	}
	if two.asked.Load() < 4 {
		t.Error("did not wait for the second resolver")
	}
	two.revision.Store(7)
	// How far a resolver is can be told once both have answered, within however long that takes here.
	var code int
	var out, errs string
	for wait := 50 * time.Millisecond; wait < 30*time.Second; wait *= 2 {
		code, out, errs = sh.run("user", "create", "ann", "--wait", wait.String(), "-o", "json")
		if code != exitFailed || !strings.Contains(errs, "has not answered") {
			break
		}
	}
	var f failure
	if err := json.Unmarshal([]byte(errs), &f); err != nil || code != exitFailed || f.Code != "DEADLINE_EXCEEDED" || !strings.Contains(f.Message, addr2+" serves revision 7 of users") {
		t.Errorf("exit %d, %s", code, errs)
	}
	if out != "{\"revision\":18446744073709551615,\"dataset\":\"users\"}\n" { // the change is made all the same
		t.Errorf("create = %q", out)
	}
	sh.fails(exitFailed, "127.0.0.1:1", "user", "create", "ann", "--wait", "50ms", "--resolver", "127.0.0.1:1")
}

func TestTokenAndRetry(t *testing.T) {
	svc, addr := startService(t)
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("id.secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	sh := &shell{t: t, env: map[string]string{"SLUICE_SERVICE": addr, "SLUICE_TOKEN_FILE": file}}
	sh.ok("user", "create", "ann")
	if got := svc.token.Load(); got != "Bearer id.secret" {
		t.Errorf("sent %q", got)
	}
	sh.fails(exitFailed, "try again in 0s", "policy", "create", "p")
	sh.fails(exitFailed, `"code":"RESOURCE_EXHAUSTED"`, "policy", "create", "p", "-o", "json")
}

// An import goes on where it stopped, in batches of 1,000 lines, and names the line it stops at.
func TestImportResumes(t *testing.T) {
	svc, addr := startService(t)
	sh := &shell{t: t, env: map[string]string{"SLUICE_SERVICE": addr}}
	var text strings.Builder
	for i := 1; i <= 2500; i++ {
		fmt.Fprintf(&text, "{\"user\":{\"id\":\"u%d\"}}\r\n", i)
	}
	file := filepath.Join(t.TempDir(), "users.jsonl")
	if err := os.WriteFile(file, []byte(strings.TrimSuffix(text.String(), "\r\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	next, revision, id := uint64(1), uint64(0), ""
	var sizes []string
	failAt := uint64(2000)
	svc.batch = func(r *adminv1.ImportRequest) (*adminv1.ImportResponse, error) {
		if id == "" {
			id = r.Id
		}
		if r.Id != id || len(r.Id) != 64 {
			t.Errorf("id %q, then %q", id, r.Id)
		}
		if len(r.Lines) == 0 {
			return &adminv1.ImportResponse{NextLine: next, Revision: revision}, nil
		}
		if r.FirstLine != next {
			t.Errorf("line %d after %d", r.FirstLine, next)
		}
		if want := fmt.Sprintf(`{"user":{"id":"u%d"}}`, r.FirstLine); string(r.Lines[0]) != want {
			t.Errorf("line %d is %q", r.FirstLine, r.Lines[0])
		}
		end := r.FirstLine + uint64(len(r.Lines))
		if r.FirstLine <= failAt && failAt < end {
			st, _ := status.New(codes.InvalidArgument, "line 2000: there is no policy").WithDetails(
				&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: "line 2000"}}})
			return nil, st.Err()
		}
		sizes = append(sizes, fmt.Sprint(len(r.Lines)))
		next, revision = end, revision+1
		return &adminv1.ImportResponse{NextLine: next, Revision: revision, Changed: uint32(len(r.Lines)), Datasets: []string{"users"}}, nil
	}
	sh.fails(exitFailed, file+":2000: there is no policy (lines below 1001 are taken", "import", "-f", file)
	failAt = 0
	if out := sh.ok("import", "-f", file, "-o", "json"); out != `{"revision":3,"next_line":2501,"changed":1500,"datasets":["users"]}`+"\n" {
		t.Errorf("import = %s", out)
	}
	if got := strings.Join(sizes, " "); got != "1000 1000 500" {
		t.Errorf("batches of %s", got)
	}
	// Once more: nothing is left to do. The same from standard input.
	sh.stdin = strings.TrimSuffix(text.String(), "\r\n")
	if out := sh.ok("import", "-f", "-"); out != "{\"revision\":3}\n" {
		t.Errorf("import = %s", out)
	}
	sh.stdin = strings.Repeat("x", maxLine+1)
	id, next = "", 1
	sh.fails(exitFailed, "standard input:1: the line has more than", "import", "-f", "-")
}
