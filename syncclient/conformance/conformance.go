// Package conformance is what every server of proto/sync/v1 must do, as tests. It is run against the
// reference service and offered to whoever writes another one:
//
//	func TestSyncConformance(t *testing.T) {
//		conformance.Run(t, conformance.Harness{New: newServer})
//	}
//
// It looks at the dataset "users" and knows nothing of what records mean. It does not test admission beyond
// the handling of one ticket, nor speed.
package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	"github.com/sluice-dns/sluice/syncclient"
	"github.com/sluice-dns/sluice/usercache"
)

// A Harness makes servers to test.
type Harness struct {
	// New returns a service of its own, with no users. It ends with the test.
	New func(t *testing.T) Server
}

// A Server is a service under test.
type Server struct {
	// Dial connects to its gRPC in plaintext.
	Dial func(ctx context.Context, address string) (net.Conn, error)
	// Write makes user n, or changes it so that versions differ, and returns the revision. Key is the
	// record that this writes.
	Write func(t *testing.T, n, version int) uint64
	Key   func(n int) string
	// Remove removes user n and returns the revision.
	Remove func(t *testing.T, n int) uint64
	// Blob stores bytes that can then be had by Blob. Nil: blobs are not tested.
	Blob func(t *testing.T, b []byte) syncclient.Hash
	// Restart ends the service and starts it on the same data. Nil: not tested.
	Restart func(t *testing.T)
}

const kind = string(usercache.Users)

// Run tests a service.
func Run(t *testing.T, h Harness) {
	tests := []struct {
		name string
		test func(t *testing.T, c *caller)
	}{
		{"DigestsAgreeWithRecords", digests},
		{"LeavesAgreeWithRecords", leaves},
		{"FetchGoesOnFromItsCursor", cursor},
		{"FetchByKey", keys},
		{"WatchFollows", watch},
		{"WatchCatchesUp", catchUp},
		{"WatchSaysWhyNot", resume},
		{"BadRequests", bad},
		{"Tickets", tickets},
		{"Blobs", blobs},
		{"ClientFollows", client},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s := h.New(t)
			conn, err := grpc.NewClient("passthrough:///conformance", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(s.Dial))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // of which a busy machine with the race detector needs one
			defer cancel()
			test.test(t, &caller{Server: s, ctx: ctx, sync: syncv1.NewSyncServiceClient(conn), segments: syncv1.NewSegmentServiceClient(conn)})
		})
	}
}

type caller struct {
	Server
	ctx      context.Context
	sync     syncv1.SyncServiceClient
	segments syncv1.SegmentServiceClient
}

// restart restarts the service and waits until the connection has noticed: a call that was on its way over
// the old one ends with UNAVAILABLE, which says nothing of the service.
func (c *caller) restart(t *testing.T) {
	t.Helper()
	c.Server.Restart(t)
	for {
		_, err := c.sync.Digests(c.ctx, &syncv1.DigestsRequest{Kind: kind}, grpc.WaitForReady(true))
		if status.Code(err) != codes.Unavailable {
			return
		}
	}
}

// populate writes users 0 to n, some twice, and removes one.
func (c *caller) populate(t *testing.T, n int) {
	for i := range n {
		c.Write(t, i, 1)
	}
	for i := 0; i < n; i += 3 {
		c.Write(t, i, 2)
	}
	c.Remove(t, n/2)
}

func (c *caller) digests(t *testing.T, level, node uint32) *syncv1.DigestsResponse {
	t.Helper()
	resp, err := c.sync.Digests(c.ctx, &syncv1.DigestsRequest{Kind: kind, Level: level, Node: node})
	if err != nil {
		t.Fatal(err)
	}
	if len(resp.GetRoot()) != 32 || len(resp.GetIdentity().GetDatasetId()) != 16 || len(resp.GetIdentity().GetLineage()) != 16 {
		t.Fatalf("root %x, identity %v", resp.GetRoot(), resp.GetIdentity())
	}
	return resp
}

// fetch reads a Fetch to its end.
func (c *caller) fetch(t *testing.T, req *syncv1.FetchRequest) (list []*syncv1.FetchResponse) {
	t.Helper()
	req.Kind = kind
	stream, err := c.sync.Fetch(c.ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	for {
		m, err := stream.Recv()
		if err == io.EOF {
			return list
		}
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, m)
	}
}

// all reads the whole dataset: a message for each bucket, for which only one test has the time.
func (c *caller) all(t *testing.T) map[string]*syncv1.Record {
	t.Helper()
	return c.records(t, []*syncv1.BucketRange{{First: 0, Last: usercache.Buckets - 1}})
}

// users reads the buckets of users 0 to n.
func (c *caller) users(t *testing.T, n int) map[string]*syncv1.Record {
	t.Helper()
	var buckets []uint32
	for i := range n {
		buckets = append(buckets, uint32(usercache.BucketOf([]byte(c.Key(i)))))
	}
	slices.Sort(buckets)
	var ranges []*syncv1.BucketRange
	for _, b := range slices.Compact(buckets) {
		ranges = append(ranges, &syncv1.BucketRange{First: b, Last: b})
	}
	return c.records(t, ranges)
}

// records reads ranges of buckets, each of which must come once, whole and in order.
func (c *caller) records(t *testing.T, ranges []*syncv1.BucketRange) map[string]*syncv1.Record {
	t.Helper()
	records := map[string]*syncv1.Record{}
	next, left := ranges[0].First, ranges
	for _, m := range c.fetch(t, &syncv1.FetchRequest{Ranges: ranges}) {
		if len(left) == 0 || m.Bucket != next || !m.Whole {
			t.Fatalf("bucket %d, whole %v, in place of %d", m.Bucket, m.Whole, next)
		}
		var before []byte
		for _, r := range m.Records {
			at := usercache.AppendStoreKey(nil, r.Key)
			if uint32(usercache.BucketOf(r.Key)) != m.Bucket || r.Revision > m.AsOf || r.Revision == 0 || bytes.Compare(before, at) >= 0 {
				t.Fatalf("record %q of revision %d in bucket %d as of %d", r.Key, r.Revision, m.Bucket, m.AsOf)
			}
			before = at
			records[string(r.Key)] = r
		}
		if m.More {
			continue
		}
		if next++; next > left[0].Last {
			if left = left[1:]; len(left) > 0 {
				next = left[0].First
			}
		}
	}
	if len(left) != 0 {
		t.Fatalf("a Fetch ends before bucket %d", next)
	}
	return records
}

func treeOf(records map[string]*syncv1.Record) *usercache.Tree {
	tree := usercache.NewTree()
	for _, r := range records {
		tree.Add(usercache.BucketOf(r.Key), usercache.LeafOf(r.Key, r.Revision, r.Bytes))
	}
	return tree
}

func digests(t *testing.T, c *caller) {
	const users = 40
	check := func(records map[string]*syncv1.Record) {
		t.Helper()
		tree := treeOf(records)
		root := tree.Root()
		for level := range uint32(3) {
			resp := c.digests(t, level, 7)
			if !bytes.Equal(resp.Root, root[:]) || resp.Records != uint64(len(records)) {
				t.Errorf("level %d: root %x of %d records; the records make %x of %d", level, resp.Root, resp.Records, root, len(records))
			}
		}
		if got := c.digests(t, 0, 0); len(got.Digests) != 0 {
			t.Errorf("level 0 has %d bytes", len(got.Digests))
		}
		var nodes []byte
		for _, h := range tree.NodeHashes() {
			nodes = append(nodes, h[:]...)
		}
		if got := c.digests(t, 1, 0); !bytes.Equal(got.Digests, nodes) {
			t.Error("level 1 differs from the records'")
		}
		for n := range uint32(usercache.Nodes) {
			var sums []byte
			for _, b := range tree.NodeBuckets(uint8(n)) {
				sums = b.AppendTo(sums)
			}
			if got := c.digests(t, 2, n); !bytes.Equal(got.Digests, sums) {
				t.Errorf("level 2 of node %d differs from the records'", n)
			}
		}
	}
	check(c.users(t, users))
	c.populate(t, users)
	check(c.all(t))
	if c.Restart != nil {
		c.restart(t)
		check(c.users(t, users))
	}
}

func leaves(t *testing.T, c *caller) {
	c.populate(t, 40)
	records := c.users(t, 40)
	want := map[uint32][]*syncv1.Record{}
	for _, key := range slices.SortedFunc(maps.Keys(records), func(a, b string) int {
		return bytes.Compare(usercache.AppendStoreKey(nil, []byte(a)), usercache.AppendStoreKey(nil, []byte(b)))
	}) {
		b := uint32(usercache.BucketOf([]byte(key)))
		want[b] = append(want[b], records[key])
	}
	buckets := slices.Sorted(maps.Keys(want))
	buckets = append(buckets, (buckets[len(buckets)-1]+1)%usercache.Buckets) // an empty one, most likely
	stream, err := c.sync.Leaves(c.ctx, &syncv1.LeavesRequest{Kind: kind, Identity: c.digests(t, 0, 0).Identity, Buckets: buckets})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range buckets {
		m, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if m.Bucket != b || len(m.Leaves) != len(want[b]) {
			t.Fatalf("%d leaves of bucket %d; want %d of %d", len(m.Leaves), m.Bucket, len(want[b]), b)
		}
		for i, r := range want[b] {
			leaf := usercache.LeafOf(r.Key, r.Revision, r.Bytes)
			if l := m.Leaves[i]; !bytes.Equal(l.Key, r.Key) || l.Revision != r.Revision || !bytes.Equal(l.Hash, leaf[:]) {
				t.Errorf("leaf of %q: %v, want %x", r.Key, l, leaf)
			}
		}
	}
	if _, err := stream.Recv(); err != io.EOF {
		t.Errorf("after the last bucket: %v", err)
	}
}

func cursor(t *testing.T, c *caller) {
	c.populate(t, 40)
	ranges := func() []*syncv1.BucketRange {
		return []*syncv1.BucketRange{{First: 3, Last: 3}, {First: 5, Last: 20}, {First: 1000, Last: 1001}}
	}
	want := c.fetch(t, &syncv1.FetchRequest{Ranges: ranges()})
	if len(want) != 19 {
		t.Fatalf("%d answers for 19 buckets", len(want))
	}
	for i, m := range want {
		rest := c.fetch(t, &syncv1.FetchRequest{Ranges: ranges(), Cursor: m.Cursor})
		if len(rest) != len(want)-i-1 || len(rest) > 0 && rest[0].Bucket != want[i+1].Bucket {
			t.Errorf("from the cursor of bucket %d come %d answers; want %d", m.Bucket, len(rest), len(want)-i-1)
		}
	}
}

func keys(t *testing.T, c *caller) {
	c.populate(t, 10)
	records := c.users(t, 10)
	ask := slices.Sorted(maps.Keys(records))
	ask = append(ask, "no-such-user")
	slices.SortFunc(ask, func(a, b string) int {
		return bytes.Compare(usercache.AppendStoreKey(nil, []byte(a)), usercache.AppendStoreKey(nil, []byte(b)))
	})
	var req syncv1.FetchRequest
	for _, k := range ask {
		req.Keys = append(req.Keys, []byte(k))
	}
	missing := 0
	for _, m := range c.fetch(t, &req) {
		if m.Whole {
			t.Errorf("bucket %d comes whole", m.Bucket)
		}
		for _, r := range m.Records {
			if w := records[string(r.Key)]; w == nil || !bytes.Equal(w.Bytes, r.Bytes) || w.Revision != r.Revision || uint32(usercache.BucketOf(r.Key)) != m.Bucket {
				t.Errorf("record %q", r.Key)
			}
			delete(records, string(r.Key))
		}
		for _, k := range m.Missing {
			missing++
			if string(k) != "no-such-user" || uint32(usercache.BucketOf(k)) != m.Bucket {
				t.Errorf("%q is missing from bucket %d", k, m.Bucket)
			}
		}
	}
	if len(records) != 0 || missing != 1 {
		t.Errorf("%d records did not come, %d keys are missing", len(records), missing)
	}
}

// A watcher applies what a Watch says.
type watcher struct {
	t       *testing.T
	stream  grpc.ServerStreamingClient[syncv1.WatchResponse]
	hello   *syncv1.Hello
	at      uint64
	records map[string]*syncv1.Record
	deltas  int
	cancel  context.CancelFunc
}

func (c *caller) watch(t *testing.T, req *syncv1.WatchRequest) *watcher {
	t.Helper()
	req.Kind = kind
	ctx, cancel := context.WithCancel(c.ctx)
	t.Cleanup(cancel)
	stream, err := c.sync.Watch(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	m, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if m.GetHello() == nil {
		t.Fatalf("first of all: %v", m)
	}
	return &watcher{t: t, stream: stream, hello: m.GetHello(), at: req.Revision, records: map[string]*syncv1.Record{}, cancel: cancel}
}

// until reads up to a revision, and what follows until the root there is known.
func (w *watcher) until(revision uint64) {
	w.t.Helper()
	for {
		m, err := w.stream.Recv()
		if err != nil {
			w.t.Fatal(err)
		}
		var root []byte
		switch {
		case m.GetDelta() != nil:
			d := m.GetDelta()
			w.deltas++
			if d.From != w.at || d.To < d.From {
				w.t.Fatalf("a delta (%d, %d] at %d", d.From, d.To, w.at)
			}
			seen, last := map[string]bool{}, d.From
			for _, change := range d.Changes {
				k := string(change.Key)
				if seen[k] || change.Revision < last || change.Revision <= d.From || change.Revision > d.To {
					w.t.Fatalf("delta (%d, %d]: %q of revision %d after %d; twice: %v", d.From, d.To, k, change.Revision, last, seen[k])
				}
				seen[k], last = true, change.Revision
				if change.Removed {
					delete(w.records, k)
				} else {
					w.records[k] = &syncv1.Record{Key: change.Key, Revision: change.Revision, Bytes: change.Bytes}
				}
			}
			if !d.More {
				w.at, root = d.To, d.Root
			}
		case m.GetHeartbeat() != nil:
			h := m.GetHeartbeat()
			if h.Head < w.at || len(h.Root) != 32 {
				w.t.Fatalf("at %d: %v", w.at, h)
			}
			if h.Head == w.at {
				root = h.Root
			}
		default:
			w.t.Fatalf("%v in the middle", m)
		}
		if len(root) > 0 {
			if ours := treeOf(w.records).Root(); !bytes.Equal(ours[:], root) {
				w.t.Fatalf("root at revision %d: %x, ours is %x", w.at, root, ours)
			}
			if w.at >= revision {
				return
			}
		}
	}
}

func watch(t *testing.T, c *caller) {
	at := c.digests(t, 0, 0)
	w := c.watch(t, &syncv1.WatchRequest{Identity: at.Identity, Revision: at.AsOf, Root: at.Root})
	if w.hello.Resume != syncv1.Resume_RESUME_OK || w.hello.Head != at.AsOf || !bytes.Equal(w.hello.Root, at.Root) || w.hello.HeartbeatMs == 0 || w.hello.Oldest > at.AsOf {
		t.Fatalf("%v", w.hello)
	}
	w.until(at.AsOf) // a heartbeat at head comes without being waited for
	for n := range 20 {
		r := c.Write(t, n, 1)
		if r <= w.at {
			t.Fatalf("revision %d after %d", r, w.at)
		}
		w.until(r)
	}
	w.until(c.Write(t, 3, 2))
	w.until(c.Remove(t, 4))
	if w.records[c.Key(4)] != nil || w.records[c.Key(3)] == nil {
		t.Error("a removal did not come, or too much went")
	}
}

func catchUp(t *testing.T, c *caller) {
	at := c.digests(t, 0, 0)
	for round := range 3 {
		for n := range 30 {
			c.Write(t, n, round+1)
		}
	}
	last := c.Remove(t, 7)
	if c.Restart != nil {
		c.restart(t)
	}
	w := c.watch(t, &syncv1.WatchRequest{Identity: at.Identity, Revision: at.AsOf, Root: at.Root})
	if w.hello.Resume != syncv1.Resume_RESUME_OK || w.hello.Head < last {
		t.Fatalf("%v", w.hello)
	}
	w.until(last)
	if w.records[c.Key(7)] != nil || w.records[c.Key(8)] == nil {
		t.Error("a removal did not come, or too much went")
	}
	// And from the middle.
	middle := w.at
	have := maps.Clone(w.records)
	w.cancel()
	last = c.Write(t, 8, 9)
	w = c.watch(t, &syncv1.WatchRequest{Identity: at.Identity, Revision: middle})
	w.records = have
	w.until(last)
}

func resume(t *testing.T, c *caller) {
	c.populate(t, 5)
	at := c.digests(t, 0, 0)
	flip := func(b []byte) []byte { b = bytes.Clone(b); b[0] ^= 1; return b }
	tests := map[syncv1.Resume]*syncv1.WatchRequest{
		syncv1.Resume_RESUME_COLD:          {},
		syncv1.Resume_RESUME_OTHER_LINEAGE: {Identity: &syncv1.Identity{DatasetId: at.Identity.DatasetId, Lineage: flip(at.Identity.Lineage)}, Revision: at.AsOf},
		syncv1.Resume_RESUME_OTHER_DATASET: {Identity: &syncv1.Identity{DatasetId: flip(at.Identity.DatasetId), Lineage: at.Identity.Lineage}, Revision: at.AsOf},
		syncv1.Resume_RESUME_AHEAD:         {Identity: at.Identity, Revision: at.AsOf + 1000},
		syncv1.Resume_RESUME_OTHER_ROOT:    {Identity: at.Identity, Revision: at.AsOf, Root: flip(at.Root)},
	}
	for want, req := range tests {
		w := c.watch(t, req)
		if w.hello.Resume != want || !bytes.Equal(w.hello.Identity.GetLineage(), at.Identity.Lineage) {
			t.Errorf("%v, want %v", w.hello, want)
		}
		if m, err := w.stream.Recv(); err != io.EOF {
			t.Errorf("%v goes on with %v, %v", want, m, err)
		}
	}
	w := c.watch(t, &syncv1.WatchRequest{Identity: at.Identity, Revision: at.AsOf})
	if w.hello.Resume != syncv1.Resume_RESUME_OK {
		t.Errorf("without a root: %v", w.hello)
	}
}

func bad(t *testing.T, c *caller) {
	other := &syncv1.Identity{DatasetId: make([]byte, 16), Lineage: make([]byte, 16)}
	fetch := func(req *syncv1.FetchRequest) func() error {
		return func() error {
			if req.Kind == "" {
				req.Kind = kind
			}
			s, err := c.sync.Fetch(c.ctx, req)
			if err == nil {
				_, err = s.Recv()
			}
			return err
		}
	}
	leaves := func(req *syncv1.LeavesRequest) func() error {
		return func() error {
			req.Kind = kind
			s, err := c.sync.Leaves(c.ctx, req)
			if err == nil {
				_, err = s.Recv()
			}
			return err
		}
	}
	tests := []struct {
		name string
		call func() error
		want codes.Code
	}{
		{"Digests of no such kind", func() error {
			_, err := c.sync.Digests(c.ctx, &syncv1.DigestsRequest{Kind: "nonsense"})
			return err
		}, codes.NotFound},
		{"Digests of a scope", func() error {
			_, err := c.sync.Digests(c.ctx, &syncv1.DigestsRequest{Kind: kind, Scope: "x"})
			return err
		}, codes.InvalidArgument},
		{"Digests of level 3", func() error {
			_, err := c.sync.Digests(c.ctx, &syncv1.DigestsRequest{Kind: kind, Level: 3})
			return err
		}, codes.InvalidArgument},
		{"Digests of node 256", func() error {
			_, err := c.sync.Digests(c.ctx, &syncv1.DigestsRequest{Kind: kind, Level: 2, Node: 256})
			return err
		}, codes.InvalidArgument},
		{"Watch of no such kind", func() error {
			s, err := c.sync.Watch(c.ctx, &syncv1.WatchRequest{Kind: "nonsense"})
			if err == nil {
				_, err = s.Recv()
			}
			return err
		}, codes.NotFound},
		{"Fetch of another identity", fetch(&syncv1.FetchRequest{Identity: other, Ranges: []*syncv1.BucketRange{{}}}), codes.FailedPrecondition},
		{"Fetch backwards", fetch(&syncv1.FetchRequest{Ranges: []*syncv1.BucketRange{{First: 9, Last: 8}}}), codes.InvalidArgument},
		{"Fetch beyond the end", fetch(&syncv1.FetchRequest{Ranges: []*syncv1.BucketRange{{Last: usercache.Buckets}}}), codes.InvalidArgument},
		{"Fetch out of order", fetch(&syncv1.FetchRequest{Ranges: []*syncv1.BucketRange{{First: 5, Last: 9}, {First: 9, Last: 10}}}), codes.InvalidArgument},
		{"Leaves of another identity", leaves(&syncv1.LeavesRequest{Identity: other, Buckets: []uint32{1}}), codes.FailedPrecondition},
		{"Leaves beyond the end", leaves(&syncv1.LeavesRequest{Buckets: []uint32{usercache.Buckets}}), codes.InvalidArgument},
		{"Leaves of too many", leaves(&syncv1.LeavesRequest{Buckets: make([]uint32, 1025)}), codes.InvalidArgument},
		{"Manifest of no such kind", func() error {
			_, err := c.segments.Manifest(c.ctx, &syncv1.ManifestRequest{Kind: "nonsense"})
			return err
		}, codes.NotFound},
	}
	for _, test := range tests {
		if err := test.call(); status.Code(err) != test.want {
			t.Errorf("%s: %v, want %v", test.name, err, test.want)
		}
	}
}

func tickets(t *testing.T, c *caller) {
	c.populate(t, 20)
	resp, err := c.sync.Acquire(c.ctx, &syncv1.AcquireRequest{Kind: kind, Node: &syncv1.Node{Id: "a", Region: "r"}, Need: syncv1.Need_NEED_COLD})
	if err != nil {
		t.Fatal(err)
	}
	if len(resp.Ticket) == 0 || resp.LeaseMs == 0 {
		t.Fatalf("%v", resp)
	}
	const buckets = 1000
	got := c.fetch(t, &syncv1.FetchRequest{Ticket: resp.Ticket, Ranges: []*syncv1.BucketRange{{Last: buckets - 1}}, Node: &syncv1.Node{Id: "a", Region: "r"}})
	if len(got) < buckets {
		t.Errorf("%d answers", len(got))
	}
	if _, err := c.sync.Renew(c.ctx, &syncv1.RenewRequest{Ticket: resp.Ticket, Received: 1000}); err != nil {
		t.Errorf("renewing after progress: %v", err)
	}
	if _, err := c.sync.Release(c.ctx, &syncv1.ReleaseRequest{Ticket: resp.Ticket, Complete: true}); err != nil {
		t.Error(err)
	}
	if _, err := c.sync.Renew(c.ctx, &syncv1.RenewRequest{Ticket: resp.Ticket, Received: 2000}); err == nil {
		t.Error("a ticket given back is renewed")
	}
}

func blobs(t *testing.T, c *caller) {
	if c.Blob == nil {
		t.Skip("the harness has no blobs")
	}
	b := bytes.Repeat([]byte("a line of a list\n"), 20000)
	h := c.Blob(t, b)
	for _, offset := range []int{0, 1, 100_000, len(b)} {
		stream, err := c.sync.Blob(c.ctx, &syncv1.BlobRequest{Sha256: h[:], Offset: uint64(offset)})
		if err != nil {
			t.Fatal(err)
		}
		got := bytes.Clone(b[:offset])
		for n := 0; ; n++ {
			m, err := stream.Recv()
			if err == io.EOF && n > 0 {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if m.Offset != uint64(len(got)) || m.Size != uint64(len(b)) {
				t.Fatalf("%d bytes at %d of %d come at %d", len(m.Data), m.Offset, m.Size, len(got))
			}
			got = append(got, m.Data...)
		}
		if !bytes.Equal(got, b) {
			t.Errorf("from %d: other bytes", offset)
		}
	}
	for _, sum := range [][]byte{make([]byte, 32), make([]byte, 5)} {
		stream, err := c.sync.Blob(c.ctx, &syncv1.BlobRequest{Sha256: sum})
		if err == nil {
			_, err = stream.Recv()
		}
		if want := map[int]codes.Code{32: codes.NotFound, 5: codes.InvalidArgument}[len(sum)]; status.Code(err) != want {
			t.Errorf("a name of %d bytes: %v, want %v", len(sum), err, want)
		}
	}
}

// client follows a history of changes with the real client, which is restarted now and then, and compares
// the whole state.
func client(t *testing.T, c *caller) {
	random := rand.New(rand.NewPCG(1, 2))
	dir := t.TempDir()
	alive := map[int]bool{}
	c.populate(t, 10)
	for n := range 10 {
		alive[n] = n != 5
	}
	for round := range 4 {
		cache, err := usercache.Open(usercache.Options{Dir: dir + "/users", Guard: usercache.GuardOptions{Share: 1}})
		if err != nil {
			t.Fatal(err)
		}
		s, err := syncclient.New(syncclient.Options{Cache: cache, Services: []string{"inprocess:conformance"}, Dial: c.Dial,
			DataDir: dir + "/sync", Node: syncclient.Node{ID: "conformance", Region: "r", Version: "test"}})
		if err != nil {
			t.Fatal(err)
		}
		news := make(chan struct{}, 1)
		s.Notify(news)
		cache.Dataset(usercache.Users).Notify(news)
		done := make(chan error, 1)
		go func() { done <- s.Run(c.ctx) }()

		last := uint64(0)
		for i := range 60 {
			n := random.IntN(40)
			if alive[n] && random.IntN(3) == 0 {
				last = c.Remove(t, n)
				alive[n] = false
			} else {
				last = c.Write(t, n, 100*round+i)
				alive[n] = true
			}
		}
		if err := atRevision(c.ctx, s, cache, news, last); err != nil {
			t.Fatal(err)
		}
		at := c.digests(t, 0, 0)
		ds := cache.Dataset(usercache.Users)
		if root := ds.Root(); !bytes.Equal(root[:], at.Root) {
			t.Errorf("round %d: root %v at revision %d, the service has %x", round, root, ds.Status().Revision, at.Root)
		}
		for n := range 40 {
			if _, ok := ds.Get([]byte(c.Key(n))); ok != alive[n] {
				t.Errorf("round %d: user %d is there: %v", round, n, ok)
			}
		}
		if st := s.Status(); round > 0 && st.Datasets[0].Repairs != 0 {
			t.Errorf("round %d: %d repairs to catch up", round, st.Datasets[0].Repairs)
		}
		s.Close()
		if err := errors.Join(<-done, cache.Close()); err != nil {
			t.Fatal(err)
		}
		for range 10 { // while it is away
			n := random.IntN(40)
			c.Write(t, n, 1000*round)
			alive[n] = true
		}
		if c.Restart != nil && round == 1 {
			c.restart(t)
		}
	}
}

// atRevision waits until the users are at a revision and fresh.
func atRevision(ctx context.Context, s *syncclient.Client, cache *usercache.Cache, news <-chan struct{}, revision uint64) error {
	for {
		st := s.Status()
		if cache.Dataset(usercache.Users).Status().Revision >= revision && st.Datasets[0].State == syncclient.Fresh {
			return nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return fmt.Errorf("not at revision %d: %+v", revision, st)
		}
	}
}
