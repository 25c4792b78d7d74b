package bizlogic

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protodelim"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache"
)

// TestAdmissionOrder plays a region's restart by the clock of the test.
func TestAdmissionOrder(t *testing.T) {
	a := newAdmission(1)
	now := clock.Instant(time.Hour)
	ask := func(region, id string, need syncv1.Need, age time.Duration) (string, time.Duration, bool) {
		t.Helper()
		g, err := a.acquire(nodeID{id, region}, need, age, now)
		if no := (*notYet)(nil); errors.As(err, &no) {
			return "", no.after, false
		}
		if err != nil {
			t.Fatal(err)
		}
		return g.ticket, 0, g.seed
	}
	cold, stale, repair := syncv1.Need_NEED_COLD, syncv1.Need_NEED_STALE, syncv1.Need_NEED_REPAIR

	first, _, seed := ask("eu", "eu-1", stale, time.Hour)
	if first == "" || !seed {
		t.Fatal("the first of a region is its seed")
	}
	if again, _, _ := ask("eu", "eu-1", stale, time.Hour); again != first {
		t.Error("a node that asks again has its ticket")
	}
	for i, n := range []struct {
		region, id string
		need       syncv1.Need
		age        time.Duration
	}{{"eu", "eu-2", repair, 0}, {"eu", "eu-3", stale, time.Minute}, {"eu", "eu-4", stale, time.Hour}, {"eu", "eu-5", cold, 0}, {"us", "us-1", repair, 0}} {
		if ticket, wait, _ := ask(n.region, n.id, n.need, n.age); ticket != "" || wait != firstBackoff {
			t.Errorf("%d: ticket %q, wait %v while the only one is out", i, ticket, wait)
		}
	}
	if _, wait, _ := ask("eu", "eu-2", repair, 0); wait != firstBackoff {
		t.Errorf("asking before the time: wait %v", wait)
	}
	// In the order of need, whoever asks first: the seed of the other region, cold, stale by age, repair.
	release := first
	for _, want := range []string{"us-1", "eu-5", "eu-4", "eu-3", "eu-2"} {
		a.release(release, true, now)
		now = now.Add(firstBackoff)
		got := ""
		for _, n := range []struct {
			region, id string
			need       syncv1.Need
			age        time.Duration
		}{{"eu", "eu-2", repair, 0}, {"eu", "eu-3", stale, time.Minute}, {"eu", "eu-4", stale, time.Hour}, {"eu", "eu-5", cold, 0}, {"us", "us-1", repair, 0}} {
			if node := a.nodes[n.id]; node.waiting || got == "" && node.lastTicket == 0 {
				node.notBefore = 0 // they come when they may
				if ticket, _, _ := ask(n.region, n.id, n.need, n.age); ticket != "" {
					got, release = n.id, ticket
				}
			}
		}
		if got != want {
			t.Fatalf("%q came next; want %s", got, want)
		}
	}
	// One that had a ticket within the hour goes behind one that had none.
	a.release(release, true, now)
	ask("eu", "eu-9", repair, 0)
	lone := a.leases
	for ticket := range lone {
		a.release(ticket, true, now)
	}
	a.nodes["eu-8"] = &node{region: "eu", need: repair, waiting: true, notBefore: now}
	if ticket, _, _ := ask("eu", "eu-5", cold, 0); ticket != "" {
		t.Error("a node that just had one went before one that waits")
	}
	// Who waits and does not come back holds nobody up.
	now = now.Add(patience + time.Second)
	a.nodes["eu-5"].notBefore = 0
	if ticket, _, _ := ask("eu", "eu-5", cold, 0); ticket == "" {
		t.Error("a node that vanished holds others up")
	}
	// A lease without progress ends; the refused come ever less often.
	now = now.Add(leaseTime)
	if n := a.out(now); n != 0 {
		t.Errorf("%d leases after %v without progress", n, leaseTime)
	}
}

func TestAdmissionBackoffAndLease(t *testing.T) {
	a := newAdmission(1)
	now := clock.Instant(time.Hour)
	g, err := a.acquire(nodeID{"x", "eu"}, syncv1.Need_NEED_COLD, 0, now)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60} {
		_, err := a.acquire(nodeID{"y", "eu"}, syncv1.Need_NEED_COLD, 0, now)
		if no := (*notYet)(nil); !errors.As(err, &no) || no.after != want*time.Second {
			t.Errorf("refused with %v; want %d s", err, want)
		}
		for until := now.Add(want * time.Second); now < until; {
			now = min(until, now.Add(leaseTime/2)) // the other makes progress meanwhile
			if err := a.renew(g.ticket, uint64(now), now); err != nil {
				t.Error(err)
			}
		}
	}
	now = now.Add(leaseTime)
	if err := a.renew(g.ticket, 0, now); status.Code(err) != codes.NotFound {
		t.Errorf("renewing what has ended: %v", err)
	}
	// Renewing without progress extends nothing.
	g, err = a.acquire(nodeID{"z", "us"}, syncv1.Need_NEED_COLD, 0, now.Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	now = now.Add(time.Hour + leaseTime/2)
	if err := a.renew(g.ticket, 0, now); err != nil {
		t.Error(err)
	}
	if n := a.out(now.Add(leaseTime / 2)); n != 0 {
		t.Error("a lease was extended without progress")
	}
	// The seed did not finish: its region gets another.
	if g, err := a.acquire(nodeID{"w", "us"}, syncv1.Need_NEED_COLD, 0, now.Add(leaseTime)); err != nil || !g.seed {
		t.Errorf("after a seed that did not finish: %v, %v", g, err)
	}
}

func TestSmallLane(t *testing.T) {
	a := newAdmission(1)
	now := clock.Instant(time.Hour)
	who := nodeID{id: "x"}
	if _, err := a.enter(nil, who, smallFetch+1, now); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("too much without a ticket: %v", err)
	}
	p, err := a.enter(nil, who, smallFetch, now)
	if err != nil || p.spend(smallFetch, now) != nil {
		t.Fatal(err)
	}
	_, err = a.enter(nil, who, 128<<10, now)
	var wait time.Duration
	for _, d := range status.Convert(err).Details() {
		if r, ok := d.(*errdetails.RetryInfo); ok {
			wait = r.RetryDelay.AsDuration()
		}
	}
	if status.Code(err) != codes.ResourceExhausted || wait != 2*time.Second {
		t.Errorf("beyond the lane: %v, wait %v", err, wait)
	}
	if _, err := a.enter(nil, nodeID{id: "other"}, smallFetch, now); err != nil {
		t.Errorf("another node: %v", err)
	}
	if _, err := a.enter(nil, who, 128<<10, now.Add(wait)); err != nil {
		t.Errorf("after waiting: %v", err)
	}
	if _, err := a.enter([]byte("forged"), who, 1, now); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a ticket nobody gave: %v", err)
	}
}

func TestBulkNeedsATicket(t *testing.T) {
	r := start(t, Options{Transfers: 1})
	importAll(t, r, "x", linesOfUsers(5_000), 100)
	d, _ := r.sync.Digests(t.Context(), &syncv1.DigestsRequest{Kind: Users})
	if d.Size < smallFetch/2 {
		t.Fatalf("%d bytes", d.Size)
	}
	all := &syncv1.FetchRequest{Kind: Users, Ranges: []*syncv1.BucketRange{{First: 0, Last: usercache.Buckets - 1}}, Node: &syncv1.Node{Id: "n"}}
	stream, err := r.sync.Fetch(t.Context(), all)
	if err == nil {
		for err == nil {
			_, err = stream.Recv()
		}
	}
	wantError(t, err, codes.ResourceExhausted, "")
	got, err := r.sync.Acquire(t.Context(), &syncv1.AcquireRequest{Kind: Users, Need: syncv1.Need_NEED_COLD, Node: &syncv1.Node{Id: "n", Region: "eu"}})
	if err != nil || !got.Seed || got.LeaseMs == 0 {
		t.Fatal(got, err)
	}
	_, err = r.sync.Acquire(t.Context(), &syncv1.AcquireRequest{Kind: Users, Need: syncv1.Need_NEED_COLD, Node: &syncv1.Node{Id: "m", Region: "eu"}})
	wantError(t, err, codes.ResourceExhausted, "")
	p := newReplica(t, Users)
	p.repair(r, got.Ticket)
	p.wantEqual(r)
	if _, err := r.sync.Release(t.Context(), &syncv1.ReleaseRequest{Ticket: got.Ticket, Complete: true}); err != nil {
		t.Error(err)
	}
}

func linesOfUsers(n int) (lines [][]byte) {
	for i := range n {
		lines = append(lines, fmt.Appendf(nil, `{"user":{"id":"user-%06d","name":"%s %d"}}`, i, strings.Repeat("Somebody ", 26), i))
	}
	return lines
}

func TestExportHoldsEverything(t *testing.T) {
	r := start(t, Options{})
	importAll(t, r, "x", linesOfUsers(1000), 100)
	_, err := r.segments.Manifest(t.Context(), &syncv1.ManifestRequest{Kind: Secrets})
	wantError(t, err, codes.NotFound, "")
	m, err := r.segments.Manifest(t.Context(), &syncv1.ManifestRequest{Kind: Users})
	if err != nil || m.Records != 1000 || m.OldestAsOf != m.NewestAsOf || len(m.Segments) != exportSegments {
		t.Fatalf("manifest: %v, %v", m, err)
	}
	p := newReplica(t, Users)
	p.identity, p.revision = m.Identity, m.OldestAsOf
	next := uint32(0)
	for _, seg := range m.Segments {
		if seg.Buckets.First != next {
			t.Errorf("segment begins at %d; want %d", seg.Buckets.First, next)
		}
		next = seg.Buckets.Last + 1
		stream, err := r.segments.Segment(t.Context(), &syncv1.SegmentRequest{Sha256: seg.Sha256, Node: &syncv1.Node{Id: fmt.Sprint(next)}})
		if err != nil {
			t.Fatal(err)
		}
		var packed []byte
		for {
			part, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			packed = append(packed, part.Data...)
		}
		z, err := zstd.NewReader(bytes.NewReader(packed))
		if err != nil {
			t.Fatal(err)
		}
		for br := bufio.NewReader(z); ; {
			f := new(syncv1.FetchResponse)
			if err := protodelim.UnmarshalFrom(br, f); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			for _, rec := range f.Records {
				p.records[string(rec.Key)] = rec
			}
		}
		z.Close()
	}
	p.wantEqual(r)
	// The next within ten minutes is the same.
	r.user("late")
	again, err := r.segments.Manifest(t.Context(), &syncv1.ManifestRequest{Kind: Users})
	if err != nil || again.NewestAsOf != m.NewestAsOf {
		t.Errorf("at once again: %v, %v", again.GetNewestAsOf(), err)
	}
	if found, _ := filepath.Glob(filepath.Join(r.svc.exports.dir, "*")); len(found) > exportSegments {
		t.Errorf("%d files", len(found))
	}
}

func TestWhoMayCallWhat(t *testing.T) {
	r := start(t, Options{})
	token := func(role string) string {
		resp, err := r.tokens.CreateToken(t.Context(), &adminv1.CreateTokenRequest{Role: role})
		if err != nil {
			t.Fatal(err)
		}
		return resp.Token
	}
	admin, operator, reader := token("admin"), token("operator"), token("reader")
	tcp := func(addr string) net.Addr { a, _ := net.ResolveTCPAddr("tcp", addr); return a }
	cert := func(roles ...string) credentials.AuthInfo {
		c := &x509.Certificate{Subject: pkix.Name{CommonName: "n1", OrganizationalUnit: []string{"eu"}, Organization: roles}}
		return credentials.TLSInfo{State: tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{c}}}}
	}
	noCert := credentials.TLSInfo{}
	const watch, create, get, tokens, backup = "/sluice.sync.v1.SyncService/Watch", "/sluice.admin.v1.UserService/CreateUser",
		"/sluice.admin.v1.UserService/GetUser", "/sluice.admin.v1.TokenService/CreateToken", "/sluice.admin.v1.DataService/Backup"
	for _, c := range []struct {
		addr   string
		auth   credentials.AuthInfo
		token  string
		method string
		want   codes.Code
	}{
		{"127.0.0.1:1", nil, "", watch, codes.OK},
		{"[::1]:1", nil, "", create, codes.OK},
		{"192.0.2.1:1", nil, "", get, codes.Unauthenticated},
		{"127.0.0.1:1", noCert, "", create, codes.Unauthenticated},
		{"192.0.2.1:1", cert("node"), "", watch, codes.OK},
		{"192.0.2.1:1", cert("node"), "", get, codes.PermissionDenied},
		{"192.0.2.1:1", cert("stranger"), "", watch, codes.Unauthenticated},
		{"192.0.2.1:1", cert("operator"), "", create, codes.OK},
		{"192.0.2.1:1", noCert, admin, tokens, codes.OK},
		{"192.0.2.1:1", noCert, admin, watch, codes.PermissionDenied},
		{"192.0.2.1:1", noCert, operator, create, codes.OK},
		{"192.0.2.1:1", noCert, operator, tokens, codes.PermissionDenied},
		{"192.0.2.1:1", noCert, operator, backup, codes.PermissionDenied},
		{"192.0.2.1:1", noCert, reader, get, codes.OK},
		{"192.0.2.1:1", noCert, reader, create, codes.PermissionDenied},
		{"192.0.2.1:1", noCert, reader + "x", get, codes.Unauthenticated},
		{"192.0.2.1:1", noCert, "", "/grpc.health.v1.Health/Check", codes.OK},
		{"127.0.0.1:1", nil, reader, create, codes.PermissionDenied}, // a token binds, even where none is needed
	} {
		ctx := peer.NewContext(t.Context(), &peer.Peer{Addr: tcp(c.addr), AuthInfo: c.auth})
		if c.token != "" {
			ctx = metadata.NewIncomingContext(ctx, metadata.Pairs("authorization", "Bearer "+c.token))
		}
		if err := r.svc.allow(ctx, c.method); status.Code(err) != c.want {
			t.Errorf("%s from %s with %v, token %.1s: %v; want %v", c.method, c.addr, c.auth, c.token, err, c.want)
		}
	}
	ctx := peer.NewContext(context.Background(), &peer.Peer{Addr: tcp("192.0.2.1:1"), AuthInfo: cert("node")})
	if got := callerOf(ctx, &syncv1.Node{Id: "liar", Region: "us"}); got != (nodeID{"n1", "eu"}) {
		t.Errorf("caller %v", got)
	}

	list, err := r.tokens.ListTokens(t.Context(), &adminv1.ListTokensRequest{})
	if err != nil || len(list.Tokens) != 3 {
		t.Fatal(list, err)
	}
	for _, tok := range list.Tokens {
		if _, err := r.tokens.RevokeToken(t.Context(), &adminv1.RevokeTokenRequest{Id: tok.Id}); err != nil {
			t.Error(err)
		}
	}
	if _, err := r.svc.tokenRole(admin); status.Code(err) != codes.Unauthenticated {
		t.Errorf("a revoked token: %v", err)
	}
	for _, req := range []*adminv1.CreateTokenRequest{{Role: "king"}, {Role: "reader", Tenant: "t"}} {
		_, err := r.tokens.CreateToken(t.Context(), req)
		wantError(t, err, codes.InvalidArgument, "")
	}
}
