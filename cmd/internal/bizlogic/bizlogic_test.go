package bizlogic

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/usercache"
)

// A rig is a service behind an in-memory connection.
type rig struct {
	t   *testing.T
	svc *Service

	users    adminv1.UserServiceClient
	policies adminv1.PolicyServiceClient
	lists    adminv1.ListServiceClient
	data     adminv1.DataServiceClient
	tokens   adminv1.TokenServiceClient
	sync     syncv1.SyncServiceClient
	segments syncv1.SegmentServiceClient

	dial func(...grpc.DialOption) *grpc.ClientConn
	stop func()
}

// start opens a service on a folder; it ends with the test, or at stop.
func start(t *testing.T, o Options) *rig {
	t.Helper()
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	o.noSync = true
	svc, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return serve(t, svc)
}

func serve(t *testing.T, svc *Service) *rig {
	lis := bufconn.Listen(1 << 20)
	srv := grpc.NewServer(svc.ServerOptions()...)
	svc.Register(srv)
	go srv.Serve(lis)
	dial := func(more ...grpc.DialOption) *grpc.ClientConn {
		conn, err := grpc.NewClient("passthrough:///bizlogic", append(more, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return lis.DialContext(ctx) }))...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	conn := dial()
	r := &rig{t: t, svc: svc, dial: dial,
		users: adminv1.NewUserServiceClient(conn), policies: adminv1.NewPolicyServiceClient(conn), lists: adminv1.NewListServiceClient(conn),
		data: adminv1.NewDataServiceClient(conn), tokens: adminv1.NewTokenServiceClient(conn),
		sync: syncv1.NewSyncServiceClient(conn), segments: syncv1.NewSegmentServiceClient(conn)}
	stopped := false
	r.stop = func() {
		if stopped {
			return
		}
		stopped = true
		if err := svc.Close(); err != nil {
			t.Error(err)
		}
		conn.Close()
		srv.Stop()
	}
	t.Cleanup(r.stop)
	return r
}

func (r *rig) user(id string, more ...string) uint64 {
	r.t.Helper()
	req := &adminv1.CreateUserRequest{Id: id}
	if len(more) > 0 {
		req.Policy = more[0]
	}
	resp, err := r.users.CreateUser(r.t.Context(), req)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.Revision
}

func (r *rig) device(user, id string, links ...string) error {
	_, err := r.users.CreateDevice(r.t.Context(), &adminv1.CreateDeviceRequest{User: user, Device: &userv1.Device{Id: id, Links: links}})
	return err
}

// set makes assignments written as KEY=V, KEY+=V, KEY-=V.
func (r *rig) set(target string, assignments ...string) (uint64, error) {
	req := &adminv1.SetSettingsRequest{Target: target}
	for _, a := range assignments {
		req.Assignments = append(req.Assignments, assignment(a))
	}
	resp, err := r.policies.SetSettings(r.t.Context(), req)
	return resp.GetRevision(), err
}

func assignment(s string) *adminv1.Assignment {
	key, value, _ := strings.Cut(s, "=")
	op := adminv1.Operation_OPERATION_SET
	if k, ok := strings.CutSuffix(key, "+"); ok {
		key, op = k, adminv1.Operation_OPERATION_ADD
	} else if k, ok := strings.CutSuffix(key, "-"); ok {
		key, op = k, adminv1.Operation_OPERATION_REMOVE
	}
	return &adminv1.Assignment{Key: key, Operation: op, Value: value}
}

func (r *rig) addList(id, text string, replace bool) (*adminv1.AddListResponse, error) {
	stream, err := r.lists.AddList(r.t.Context())
	if err != nil {
		return nil, err
	}
	send := func(m *adminv1.AddListRequest) {
		if err := stream.Send(m); err != nil && !errors.Is(err, io.EOF) { // EOF: the answer is there already
			r.t.Error(err)
		}
	}
	send(&adminv1.AddListRequest{Part: &adminv1.AddListRequest_Header_{Header: &adminv1.AddListRequest_Header{Id: id, Replace: replace}}})
	send(&adminv1.AddListRequest{Part: &adminv1.AddListRequest_Data{Data: []byte(text)}})
	return stream.CloseAndRecv()
}

// wantError checks the code of an error and, if given, the field it names.
func wantError(t *testing.T, err error, code codes.Code, field string) {
	t.Helper()
	if status.Code(err) != code {
		t.Errorf("error = %v; want %v", err, code)
		return
	}
	if field == "" {
		return
	}
	for _, d := range status.Convert(err).Details() {
		if b, ok := d.(*errdetails.BadRequest); ok && len(b.FieldViolations) == 1 && b.FieldViolations[0].Field == field {
			return
		}
	}
	t.Errorf("error %v does not name field %q: %v", err, field, status.Convert(err).Details())
}

// A replica is the smallest client of the sync protocol: what any resolver must come to hold.
type replica struct {
	t        *testing.T
	kind     string
	identity *syncv1.Identity
	revision uint64
	newest   uint64 // largest as_of fetched: before it the records are of mixed revisions
	records  map[string]*syncv1.Record
	deltas   int
}

func newReplica(t *testing.T, kind string) *replica {
	return &replica{t: t, kind: kind, records: map[string]*syncv1.Record{}}
}

func (p *replica) tree() *usercache.Tree {
	tree := usercache.NewTree()
	for key, rec := range p.records {
		tree.Add(usercache.BucketOf([]byte(key)), usercache.LeafOf([]byte(key), rec.Revision, rec.Bytes))
	}
	return tree
}

// repair compares by digests and fetches what differs.
func (p *replica) repair(r *rig, ticket []byte) {
	p.t.Helper()
	top, err := r.sync.Digests(p.t.Context(), &syncv1.DigestsRequest{Kind: p.kind, Level: 1})
	if err != nil {
		p.t.Fatal(err)
	}
	p.identity = top.Identity
	oldest := top.AsOf
	mine := p.tree()
	var nodes [usercache.Nodes]usercache.Hash
	for i := range nodes {
		nodes[i] = usercache.Hash(top.Digests[i*32:])
	}
	req := &syncv1.FetchRequest{Kind: p.kind, Identity: p.identity, Ticket: ticket}
	for _, n := range mine.DiffNodes(&nodes) {
		level, err := r.sync.Digests(p.t.Context(), &syncv1.DigestsRequest{Kind: p.kind, Level: 2, Node: uint32(n)})
		if err != nil {
			p.t.Fatal(err)
		}
		var buckets [usercache.BucketsPerNode]usercache.BucketSum
		for i := range buckets {
			if buckets[i], err = usercache.ParseBucketSum(level.Digests[i*24 : i*24+24]); err != nil {
				p.t.Fatal(err)
			}
		}
		for _, b := range mine.DiffBuckets(n, &buckets) {
			req.Ranges = append(req.Ranges, &syncv1.BucketRange{First: uint32(b), Last: uint32(b)})
		}
	}
	stream, err := r.sync.Fetch(p.t.Context(), req)
	if err != nil {
		p.t.Fatal(err)
	}
	held := map[uint32][]string{} // before the fetch, by bucket
	for key := range p.records {
		b := uint32(usercache.BucketOf([]byte(key)))
		held[b] = append(held[b], key)
	}
	part := map[string]bool{}
	for {
		f, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			p.t.Fatal(err)
		}
		oldest, p.newest = min(oldest, f.AsOf), max(p.newest, f.AsOf)
		for _, rec := range f.Records {
			part[string(rec.Key)] = true
			if old := p.records[string(rec.Key)]; old == nil || rec.Revision > old.Revision {
				p.records[string(rec.Key)] = rec
			}
		}
		if f.More {
			continue
		}
		for _, key := range held[f.Bucket] {
			if rec := p.records[key]; rec != nil && !part[key] && rec.Revision <= f.AsOf {
				delete(p.records, key)
			}
		}
		clear(part)
	}
	p.revision = oldest
}

// watch opens a Watch from where the replica stands and returns it with the Hello.
func (p *replica) watch(ctx context.Context, r *rig) (grpc.ServerStreamingClient[syncv1.WatchResponse], *syncv1.Hello) {
	p.t.Helper()
	stream, err := r.sync.Watch(ctx, &syncv1.WatchRequest{Kind: p.kind, Identity: p.identity, Revision: p.revision})
	if err != nil {
		p.t.Fatal(err)
	}
	m, err := stream.Recv()
	if err != nil {
		p.t.Fatal(err)
	}
	return stream, m.GetHello()
}

// follow applies messages until the replica is at or beyond a revision.
func (p *replica) follow(stream grpc.ServerStreamingClient[syncv1.WatchResponse], until uint64) {
	p.t.Helper()
	for p.revision < until {
		m, err := stream.Recv()
		if err != nil {
			p.t.Fatalf("at %d of %d: %v", p.revision, until, err)
		}
		p.apply(m)
	}
}

func (p *replica) apply(m *syncv1.WatchResponse) {
	p.t.Helper()
	if h := m.GetHeartbeat(); h != nil && h.Head == p.revision && p.revision >= p.newest {
		if root := p.tree().Root(); string(root[:]) != string(h.Root) {
			p.t.Errorf("at %d the root is %v, the heartbeat says %x", p.revision, root, h.Root)
		}
	}
	d := m.GetDelta()
	if d == nil {
		return
	}
	p.deltas++
	if d.From != p.revision || d.To < d.From {
		p.t.Errorf("delta (%d,%d] at %d", d.From, d.To, p.revision)
	}
	seen := map[string]bool{}
	for _, c := range d.Changes {
		if seen[string(c.Key)] {
			p.t.Errorf("%q twice in one delta", c.Key)
		}
		seen[string(c.Key)] = true
		if c.Revision <= d.From || c.Revision > d.To {
			p.t.Errorf("change at %d in delta (%d,%d]", c.Revision, d.From, d.To)
		}
		if old := p.records[string(c.Key)]; old != nil && old.Revision >= c.Revision {
			continue
		}
		if c.Removed {
			delete(p.records, string(c.Key))
		} else {
			p.records[string(c.Key)] = &syncv1.Record{Key: c.Key, Revision: c.Revision, Bytes: c.Bytes}
		}
	}
	if !d.More {
		p.revision = d.To
	}
	if root := p.tree().Root(); len(d.Root) > 0 && p.revision >= p.newest && string(root[:]) != string(d.Root) {
		p.t.Errorf("after (%d,%d] the root is %v, the delta says %x", d.From, d.To, root, d.Root)
	}
}

func (p *replica) wantEqual(r *rig) {
	p.t.Helper()
	head, want := r.svc.datasets[p.kind].position()
	if got := p.tree().Root(); got != want || p.revision != head {
		p.t.Errorf("replica at %d has root %v with %d records; service at %d has %v", p.revision, got, len(p.records), head, want)
	}
}

func TestWatchFollowsWhatFetchBegan(t *testing.T) {
	r := start(t, Options{})
	for i := range 50 {
		r.user(fmt.Sprintf("user-%d", i))
	}
	p := newReplica(t, Users)
	if _, hello := p.watch(t.Context(), r); hello.Resume != syncv1.Resume_RESUME_COLD {
		t.Errorf("without data: %v", hello.Resume)
	}
	p.repair(r, nil)
	p.wantEqual(r)

	stream, hello := p.watch(t.Context(), r)
	if hello.Resume != syncv1.Resume_RESUME_OK {
		t.Fatalf("after a fetch: %v", hello.Resume)
	}
	var last uint64
	for i := range 30 {
		last = r.user(fmt.Sprintf("late-%d", i))
	}
	resp, err := r.users.DeleteUser(t.Context(), &adminv1.DeleteUserRequest{Id: "user-7"})
	if err != nil {
		t.Fatal(err)
	}
	p.follow(stream, last)
	p.follow(stream, resp.Revision)
	p.wantEqual(r)
	if p.records["user-7"] != nil || p.records["late-29"] == nil {
		t.Error("the replica holds the wrong users")
	}
}

func TestWatchSaysWhyItDoesNotResume(t *testing.T) {
	r := start(t, Options{})
	head := r.user("a")
	p := newReplica(t, Users)
	p.repair(r, nil)
	id := p.identity
	other := &syncv1.Identity{DatasetId: make([]byte, 16), Lineage: id.Lineage}
	fork := &syncv1.Identity{DatasetId: id.DatasetId, Lineage: make([]byte, 16)}
	for _, c := range []struct {
		req  *syncv1.WatchRequest
		want syncv1.Resume
	}{
		{&syncv1.WatchRequest{Identity: id, Revision: head}, syncv1.Resume_RESUME_OK},
		{&syncv1.WatchRequest{Identity: id, Revision: head, Root: make([]byte, 32)}, syncv1.Resume_RESUME_OTHER_ROOT},
		{&syncv1.WatchRequest{Identity: id, Revision: head + 1}, syncv1.Resume_RESUME_AHEAD},
		{&syncv1.WatchRequest{Identity: id}, syncv1.Resume_RESUME_COLD},
		{&syncv1.WatchRequest{Revision: head}, syncv1.Resume_RESUME_COLD},
		{&syncv1.WatchRequest{Identity: other, Revision: head}, syncv1.Resume_RESUME_OTHER_DATASET},
		{&syncv1.WatchRequest{Identity: fork, Revision: head}, syncv1.Resume_RESUME_OTHER_LINEAGE},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		c.req.Kind = Users
		stream, err := r.sync.Watch(ctx, c.req)
		if err != nil {
			t.Fatal(err)
		}
		m, err := stream.Recv()
		if err != nil || m.GetHello().GetResume() != c.want {
			t.Errorf("Watch(%v) = %v, %v; want %v", c.req, m, err, c.want)
		}
		if c.want != syncv1.Resume_RESUME_OK {
			if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
				t.Errorf("after %v: %v; want the end", c.want, err)
			}
		}
		cancel()
	}
	for _, req := range []*syncv1.WatchRequest{{Kind: "nonsense"}, {Kind: Users, Scope: "eu"}} {
		stream, err := r.sync.Watch(t.Context(), req)
		if err == nil {
			_, err = stream.Recv()
		}
		if c := status.Code(err); c != codes.NotFound && c != codes.InvalidArgument {
			t.Errorf("Watch(%v): %v", req, err)
		}
	}
}

func TestResumeAfterRestart(t *testing.T) {
	dir := t.TempDir()
	r := start(t, Options{Dir: dir})
	for i := range 20 {
		r.user(fmt.Sprintf("user-%d", i))
	}
	p := newReplica(t, Users)
	p.repair(r, nil)
	r.user("while-away")
	if _, err := r.users.DeleteUser(t.Context(), &adminv1.DeleteUserRequest{Id: "user-3"}); err != nil {
		t.Fatal(err)
	}
	r.stop()

	r = start(t, Options{Dir: dir})
	last := r.user("after")
	stream, hello := p.watch(t.Context(), r)
	if hello.Resume != syncv1.Resume_RESUME_OK {
		t.Fatalf("after a restart: %v", hello.Resume)
	}
	p.follow(stream, last)
	p.wantEqual(r)
	if p.deltas != 1 || len(p.records) != 21 {
		t.Errorf("%d deltas for %d records; want one for 21", p.deltas, len(p.records))
	}
}

func TestSlowWatcherReadsTheIndex(t *testing.T) {
	r := start(t, Options{})
	r.user("first")
	quick, slow := newReplica(t, Users), newReplica(t, Users)
	quick.repair(r, nil)
	slow.repair(r, nil)
	quickStream, _ := quick.watch(t.Context(), r)
	// The slow one is read only at the end, over a connection that holds little meanwhile.
	narrow := *r
	narrow.sync = syncv1.NewSyncServiceClient(r.dial(grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(64<<10)))
	slowStream, _ := slow.watch(t.Context(), &narrow)

	// Far more than the ring holds, over the same few records, most of them big.
	var last uint64
	for i := range 400 {
		id := fmt.Sprintf("user-%d", i%40)
		rules := strings.Repeat(fmt.Sprintf("||%d.example^\n", i), 2000)
		if i < 40 {
			r.user(id)
		}
		resp, err := r.policies.SetRules(t.Context(), &adminv1.SetRulesRequest{Target: id, Text: []byte(rules)[:min(len(rules), maxInline)]})
		if err != nil {
			t.Fatal(err)
		}
		last = resp.Revision
		if i%10 == 0 {
			quick.follow(quickStream, last)
		}
	}
	quick.follow(quickStream, last)
	quick.wantEqual(r)
	slow.follow(slowStream, last)
	slow.wantEqual(r)
	if slow.deltas >= quick.deltas {
		t.Errorf("the slow watcher took %d deltas, the quick one %d", slow.deltas, quick.deltas)
	}
}

func TestOneBigCommitComesInParts(t *testing.T) {
	r := start(t, Options{})
	p := newReplica(t, Users)
	p.repair(r, nil)
	text := strings.Repeat("||ads.example^\n", maxInline/16)
	var lines [][]byte
	for i := range 200 {
		m := &adminv1.User{Id: fmt.Sprintf("user-%d", i), Rules: &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte(text)}}}
		lines = append(lines, exportedLine(t, "user", m))
	}
	resp, err := r.data.Import(t.Context(), &adminv1.ImportRequest{Id: "big", FirstLine: 1, Lines: lines})
	if err != nil {
		t.Fatal(err)
	}
	stream, _ := p.watch(t.Context(), r)
	p.follow(stream, resp.Revision)
	p.wantEqual(r)
	if p.deltas < 6 {
		t.Errorf("6 MB of one revision came in %d deltas", p.deltas)
	}
}

func TestHeartbeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, Options{})
		r.user("a")
		p := newReplica(t, Users)
		p.repair(r, nil)
		stream, _ := p.watch(t.Context(), r)
		begin := time.Now()
		for i := range 4 {
			m, err := stream.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if h := m.GetHeartbeat(); h == nil || h.Head != p.revision || time.Since(begin) != time.Duration(i)*heartbeatEvery {
				t.Errorf("message %d after %v: %v", i, time.Since(begin), m)
			}
			p.apply(m)
		}
		// Changes are told long before the next heartbeat.
		last := r.user("b")
		begin = time.Now()
		p.follow(stream, last)
		if d := time.Since(begin); d > coalesce {
			t.Errorf("a change took %v", d)
		}
		p.wantEqual(r)
		// A burst is coalesced: far fewer deltas than changes.
		before := p.deltas
		for i := range 200 {
			last = r.user(fmt.Sprintf("burst-%d", i))
		}
		p.follow(stream, last)
		if n := p.deltas - before; n > 5 {
			t.Errorf("200 changes at one instant came in %d deltas", n)
		}
		p.wantEqual(r)
		r.stop()
	})
}

func TestFetchWhileWriting(t *testing.T) {
	r := start(t, Options{})
	rnd := rand.New(rand.NewPCG(1, 2))
	for i := range 300 {
		r.user(fmt.Sprintf("user-%d", i))
	}
	ctx, cancel := context.WithCancel(t.Context())
	written := make(chan uint64)
	go func() {
		var last uint64
		defer func() { written <- last }()
		for i := 0; ctx.Err() == nil; i++ {
			id := fmt.Sprintf("user-%d", rnd.IntN(300))
			resp, err := r.policies.SetSettings(context.Background(), &adminv1.SetSettingsRequest{Target: id,
				Assignments: []*adminv1.Assignment{assignment(fmt.Sprintf("block_ttl=%d", i%80000))}})
			if err != nil {
				t.Error(err)
				return
			}
			last = resp.Revision
		}
	}()
	p := newReplica(t, Users)
	p.repair(r, nil)
	cancel()
	last := <-written
	stream, hello := p.watch(t.Context(), r)
	if hello.Resume != syncv1.Resume_RESUME_OK {
		t.Fatal(hello.Resume)
	}
	p.follow(stream, last)
	p.wantEqual(r)
}

func TestFetchResumesByCursorAndKeys(t *testing.T) {
	r := start(t, Options{})
	for i := range 20 {
		r.user(fmt.Sprintf("user-%d", i))
	}
	all := &syncv1.FetchRequest{Kind: Users, Ranges: []*syncv1.BucketRange{{First: 0, Last: 999}, {First: 5000, Last: 5999}},
		Keys: [][]byte{[]byte("user-1"), []byte("nobody"), []byte("user-2")}}
	read := func(req *syncv1.FetchRequest, stop int) (out []*syncv1.FetchResponse) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream, err := r.sync.Fetch(ctx, req)
		if err != nil {
			t.Fatal(err)
		}
		for len(out) != stop {
			f, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, f)
		}
		return out
	}
	whole := read(all, -1)
	if len(whole) != 2003 {
		t.Fatalf("%d responses", len(whole))
	}
	keyed := whole[2000:]
	if string(keyed[0].Records[0].Key) != "user-1" || string(keyed[1].Missing[0]) != "nobody" || keyed[2].Whole {
		t.Errorf("keys: %v", keyed)
	}
	for _, cut := range []int{1, 1000, 1500, 2000, 2002} {
		first := read(all, cut)
		rest := proto.CloneOf(all)
		rest.Cursor = first[cut-1].Cursor
		if got := len(read(rest, -1)); got != len(whole)-cut {
			t.Errorf("after %d the cursor gives %d more; want %d", cut, got, len(whole)-cut)
		}
	}
	for _, req := range []*syncv1.FetchRequest{
		{Kind: Users, Ranges: []*syncv1.BucketRange{{First: 5, Last: 4}}},
		{Kind: Users, Ranges: []*syncv1.BucketRange{{First: 1, Last: 70000}}},
		{Kind: Users, Ranges: []*syncv1.BucketRange{{First: 1, Last: 3}, {First: 3, Last: 4}}},
		{Kind: Users, Cursor: []byte("junk")},
		{Kind: Users, Keys: [][]byte{{}}},
	} {
		stream, err := r.sync.Fetch(t.Context(), req)
		if err == nil {
			_, err = stream.Recv()
		}
		wantError(t, err, codes.InvalidArgument, "")
	}
}

// TestTreeEqualsRecords holds the incrementally kept tree and index against the records, over a history of
// writes, removals and returns.
func TestTreeEqualsRecords(t *testing.T) {
	dir := t.TempDir()
	r := start(t, Options{Dir: dir, Guard: Guard{Min: 1 << 30}})
	rnd := rand.New(rand.NewPCG(3, 4))
	exists := map[string]bool{}
	p := newReplica(t, Users)
	p.repair(r, nil)
	for i := range 600 {
		id := fmt.Sprintf("user-%d", rnd.IntN(40))
		var err error
		switch {
		case !exists[id]:
			r.user(id)
			exists[id] = true
		case rnd.IntN(3) == 0:
			_, err = r.users.DeleteUser(t.Context(), &adminv1.DeleteUserRequest{Id: id})
			exists[id] = false
		default:
			_, err = r.set(id, fmt.Sprintf("block_ttl=%d", i))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	fresh := newReplica(t, Users)
	fresh.repair(r, nil)
	fresh.wantEqual(r)
	r.stop()
	r = start(t, Options{Dir: dir}) // without a ring
	fresh.wantEqual(r)
	stream, _ := p.watch(t.Context(), r)
	p.follow(stream, r.svc.Head(Users))
	p.wantEqual(r)
	if p.deltas != 1 || len(p.records) != len(fresh.records) {
		t.Errorf("the index gave %d deltas, %d records; fetched %d", p.deltas, len(p.records), len(fresh.records))
	}
}
