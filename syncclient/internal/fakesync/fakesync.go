// Package fakesync is a business-logic service in memory that speaks proto/sync/v1 as it should be spoken,
// unless a test has it lie. It keeps everything for ever, gives a ticket to whoever asks, and sends each
// commit at once. Only tests import it.
package fakesync

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/usercache"
)

// Server is a service with its datasets. The exported fields are set before Start.
type Server struct {
	syncv1.UnimplementedSyncServiceServer
	syncv1.UnimplementedSegmentServiceServer

	// Tamper sees every message before it is sent, by the name of its RPC, and may change it, hold it
	// back, or end the call with an error. Nil changes nothing. It may be replaced by SetTamper.
	tamper func(ctx context.Context, rpc string, m proto.Message) error
	// NeedTicket: Fetch and Blob are refused without one.
	NeedTicket bool
	// Heartbeat is the time between heartbeats. Zero means 5 s.
	Heartbeat time.Duration

	mu       sync.Mutex
	datasets map[string]*dataset
	head     uint64
	blobs    map[[32]byte][]byte
	segments map[[32]byte][]byte
	calls    map[string]int
	acquired []*syncv1.AcquireRequest
	released int
	out      bool // the ticket; a transfer that was cut off leaves it out

	server   *grpc.Server
	listener *bufconn.Listener
	serving  sync.WaitGroup
}

type dataset struct {
	id       usercache.Identity
	head     uint64
	oldest   uint64
	records  map[string]usercache.Record
	removed  map[string]uint64
	tree     *usercache.Tree
	changed  chan struct{}
	manifest *syncv1.ManifestResponse
}

// New returns a service with all datasets, empty, at revision 1.
func New() *Server {
	s := &Server{datasets: map[string]*dataset{}, head: 1, blobs: map[[32]byte][]byte{}, segments: map[[32]byte][]byte{}, calls: map[string]int{}}
	for i, kind := range usercache.Kinds {
		d := &dataset{head: 1, oldest: 1, records: map[string]usercache.Record{}, removed: map[string]uint64{}, tree: usercache.NewTree(), changed: make(chan struct{})}
		d.id.Dataset[0], d.id.Lineage[0] = byte(i+1), 1
		s.datasets[string(kind)] = d
	}
	return s
}

// Start serves until Stop. Dial reaches it.
func (s *Server) Start() {
	server, listener := grpc.NewServer(), bufconn.Listen(1<<20)
	syncv1.RegisterSyncServiceServer(server, s)
	syncv1.RegisterSegmentServiceServer(server, s)
	s.mu.Lock()
	s.server, s.listener = server, listener
	s.mu.Unlock()
	s.serving.Go(func() { _ = server.Serve(listener) })
}

// Stop ends all calls.
func (s *Server) Stop() {
	s.mu.Lock()
	server := s.server
	s.server, s.listener = nil, nil
	s.mu.Unlock()
	if server != nil {
		server.Stop()
	}
	s.serving.Wait()
}

// Dial connects to the service, or fails when it is stopped.
func (s *Server) Dial(ctx context.Context, _ string) (net.Conn, error) {
	s.mu.Lock()
	l := s.listener
	s.mu.Unlock()
	if l == nil {
		return nil, errors.New("connection refused")
	}
	return l.DialContext(ctx)
}

// SetTamper replaces what sees every message before it is sent.
func (s *Server) SetTamper(f func(ctx context.Context, rpc string, m proto.Message) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tamper = f
}

// Commit makes changes of one dataset in one revision, which it returns. Revisions in the changes are
// ignored.
func (s *Server) Commit(kind usercache.Kind, changes ...usercache.Change) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.head++
	d := s.datasets[string(kind)]
	d.head = s.head
	for _, c := range changes {
		d.drop(string(c.Key))
		if c.Removed {
			d.removed[string(c.Key)] = s.head
			continue
		}
		delete(d.removed, string(c.Key))
		d.put(usercache.Record{Key: c.Key, Revision: s.head, Bytes: c.Bytes})
	}
	close(d.changed)
	d.changed = make(chan struct{})
	return s.head
}

func (d *dataset) put(r usercache.Record) {
	d.records[string(r.Key)] = r
	d.tree.Add(usercache.BucketOf(r.Key), usercache.LeafOf(r.Key, r.Revision, r.Bytes))
}

func (d *dataset) drop(key string) {
	if old, ok := d.records[key]; ok {
		d.tree.Remove(usercache.BucketOf(old.Key), usercache.LeafOf(old.Key, old.Revision, old.Bytes))
		delete(d.records, key)
	}
}

// Corrupt replaces a record's bytes without a new revision: history is not what it was.
func (s *Server) Corrupt(kind usercache.Kind, key string, b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.datasets[string(kind)]
	r := d.records[key]
	d.drop(key)
	r.Bytes = b
	d.put(r)
}

// SetIdentity makes a dataset another one. Its revisions go on after a leap.
func (s *Server) SetIdentity(kind usercache.Kind, id usercache.Identity) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.head += 1_000_000
	d := s.datasets[string(kind)]
	d.id, d.head = id, s.head
}

// Rewind sets a dataset's head back.
func (s *Server) Rewind(kind usercache.Kind, head uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.datasets[string(kind)].head = head
}

// Forget makes revisions before oldest impossible to resume.
func (s *Server) Forget(kind usercache.Kind, oldest uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.datasets[string(kind)].oldest = oldest
}

// Identity returns what a dataset is.
func (s *Server) Identity(kind usercache.Kind) usercache.Identity {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.datasets[string(kind)].id
}

// Position returns a dataset's head and root.
func (s *Server) Position(kind usercache.Kind) (head uint64, root usercache.Hash) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.datasets[string(kind)]
	return d.head, d.tree.Root()
}

// AddBlob returns the name of a blob that is served from now on.
func (s *Server) AddBlob(b []byte) [32]byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := sha256.Sum256(b)
	s.blobs[h] = b
	return h
}

// Calls returns how often an RPC was called.
func (s *Server) Calls(rpc string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[rpc]
}

// Acquired returns the requests for tickets, and how many were given back.
func (s *Server) Acquired() (requests []*syncv1.AcquireRequest, released int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.acquired), s.released
}

// Refused is an error that sends the caller away for a while.
func Refused(after time.Duration) error {
	st, err := status.New(codes.ResourceExhausted, "not now").WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(after)})
	if err != nil {
		panic(err)
	}
	return st.Err()
}

// show passes a message by the tamperer.
func (s *Server) show(ctx context.Context, rpc string, m proto.Message) error {
	s.mu.Lock()
	f := s.tamper
	s.mu.Unlock()
	if f == nil {
		return nil
	}
	return f(ctx, rpc, m)
}

func (s *Server) called(rpc string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[rpc]++
}

// find returns a dataset, with s.mu held.
func (s *Server) find(kind string, id *syncv1.Identity) (*dataset, error) {
	s.mu.Lock()
	d := s.datasets[kind]
	if d == nil {
		s.mu.Unlock()
		return nil, status.Errorf(codes.NotFound, "no dataset %q", kind)
	}
	if id != nil && (!bytes.Equal(id.DatasetId, d.id.Dataset[:]) || !bytes.Equal(id.Lineage, d.id.Lineage[:])) {
		s.mu.Unlock()
		return nil, status.Error(codes.FailedPrecondition, "another identity")
	}
	return d, nil
}

func message(id usercache.Identity) *syncv1.Identity {
	return &syncv1.Identity{DatasetId: bytes.Clone(id.Dataset[:]), Lineage: bytes.Clone(id.Lineage[:])}
}

func invalid(format string, args ...any) error {
	return status.Errorf(codes.InvalidArgument, format, args...)
}

// Watch implements syncv1.
func (s *Server) Watch(req *syncv1.WatchRequest, stream grpc.ServerStreamingServer[syncv1.WatchResponse]) error {
	s.called("Watch")
	d, err := s.find(req.Kind, nil)
	if err != nil {
		return err
	}
	root := d.tree.Root()
	hello := &syncv1.Hello{Identity: message(d.id), Head: d.head, Oldest: d.oldest, Root: root[:], HeartbeatMs: 5000}
	if s.Heartbeat != 0 {
		hello.HeartbeatMs = uint32(s.Heartbeat / time.Millisecond)
	}
	switch id := req.Identity; {
	case id == nil || req.Revision == 0:
		hello.Resume = syncv1.Resume_RESUME_COLD
	case !bytes.Equal(id.DatasetId, d.id.Dataset[:]):
		hello.Resume = syncv1.Resume_RESUME_OTHER_DATASET
	case !bytes.Equal(id.Lineage, d.id.Lineage[:]):
		hello.Resume = syncv1.Resume_RESUME_OTHER_LINEAGE
	case req.Revision > d.head:
		hello.Resume = syncv1.Resume_RESUME_AHEAD
	case req.Revision < d.oldest:
		hello.Resume = syncv1.Resume_RESUME_TOO_OLD
	case req.Revision == d.head && len(req.Root) > 0 && !bytes.Equal(req.Root, root[:]):
		hello.Resume = syncv1.Resume_RESUME_OTHER_ROOT
	default:
		hello.Resume = syncv1.Resume_RESUME_OK
	}
	s.mu.Unlock()

	ctx := stream.Context()
	send := func(m *syncv1.WatchResponse) error {
		if err := s.show(ctx, "Watch", m); err != nil {
			return err
		}
		return stream.Send(m)
	}
	if err := send(&syncv1.WatchResponse{Message: &syncv1.WatchResponse_Hello{Hello: hello}}); err != nil || hello.Resume != syncv1.Resume_RESUME_OK {
		return err
	}
	tick := time.NewTicker(time.Duration(hello.HeartbeatMs) * time.Millisecond)
	defer tick.Stop()
	pos, beat := req.Revision, true
	for {
		s.mu.Lock()
		delta, changed := s.delta(d, pos), d.changed
		head, root, needs := d.head, d.tree.Root(), s.needs(d)
		s.mu.Unlock()
		if delta != nil {
			if err := send(&syncv1.WatchResponse{Message: &syncv1.WatchResponse_Delta{Delta: delta}}); err != nil {
				return err
			}
			pos = delta.To
		}
		if beat {
			beat = false
			if err := send(&syncv1.WatchResponse{Message: &syncv1.WatchResponse_Heartbeat{Heartbeat: &syncv1.Heartbeat{Head: head, Root: root[:], NeedsCatalogue: needs}}}); err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-tick.C:
			beat = true
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *Server) needs(d *dataset) uint64 {
	if d == s.datasets[string(usercache.Users)] {
		return s.datasets[string(usercache.CatalogueKind)].head
	}
	return 0
}

// delta returns everything after a revision, or nil if that is nothing.
func (s *Server) delta(d *dataset, pos uint64) *syncv1.Delta {
	if pos >= d.head {
		return nil
	}
	root := d.tree.Root()
	m := &syncv1.Delta{From: pos, To: d.head, Root: root[:], NeedsCatalogue: s.needs(d)}
	for _, r := range d.records {
		if r.Revision > pos {
			m.Changes = append(m.Changes, &syncv1.Change{Key: r.Key, Revision: r.Revision, Bytes: r.Bytes})
		}
	}
	for k, rev := range d.removed {
		if rev > pos {
			m.Changes = append(m.Changes, &syncv1.Change{Key: []byte(k), Revision: rev, Removed: true})
		}
	}
	slices.SortFunc(m.Changes, func(a, b *syncv1.Change) int { return int(a.Revision) - int(b.Revision) })
	return m
}

// Digests implements syncv1.
func (s *Server) Digests(ctx context.Context, req *syncv1.DigestsRequest) (*syncv1.DigestsResponse, error) {
	s.called("Digests")
	if req.Scope != "" || req.Level > 2 || req.Node >= usercache.Nodes {
		return nil, invalid("scope %q, level %d, node %d", req.Scope, req.Level, req.Node)
	}
	d, err := s.find(req.Kind, nil)
	if err != nil {
		return nil, err
	}
	root := d.tree.Root()
	resp := &syncv1.DigestsResponse{Identity: message(d.id), AsOf: d.head, Root: root[:], Records: d.tree.Records()}
	for k, r := range d.records {
		resp.Size += uint64(len(k) + len(r.Bytes))
	}
	switch req.Level {
	case 1:
		for _, h := range d.tree.NodeHashes() {
			resp.Digests = append(resp.Digests, h[:]...)
		}
	case 2:
		for _, b := range d.tree.NodeBuckets(uint8(req.Node)) {
			resp.Digests = b.AppendTo(resp.Digests)
		}
	}
	s.mu.Unlock()
	return resp, s.show(ctx, "Digests", resp)
}

// bucket returns a bucket's records in order of key hash.
func (d *dataset) bucket(n uint32) []usercache.Record {
	var list []usercache.Record
	if d.tree.Bucket(uint16(n)).Count == 0 {
		return nil
	}
	for _, r := range d.records {
		if usercache.BucketOf(r.Key) == uint16(n) {
			list = append(list, r)
		}
	}
	slices.SortFunc(list, func(a, b usercache.Record) int {
		return bytes.Compare(usercache.AppendStoreKey(nil, a.Key), usercache.AppendStoreKey(nil, b.Key))
	})
	return list
}

// Leaves implements syncv1.
func (s *Server) Leaves(req *syncv1.LeavesRequest, stream grpc.ServerStreamingServer[syncv1.LeavesResponse]) error {
	s.called("Leaves")
	if len(req.Buckets) > 1024 {
		return invalid("%d buckets", len(req.Buckets))
	}
	for _, n := range req.Buckets {
		if n >= usercache.Buckets {
			return invalid("bucket %d", n)
		}
		d, err := s.find(req.Kind, req.Identity)
		if err != nil {
			return err
		}
		m := &syncv1.LeavesResponse{Bucket: n, AsOf: d.head}
		for _, r := range d.bucket(n) {
			leaf := usercache.LeafOf(r.Key, r.Revision, r.Bytes)
			m.Leaves = append(m.Leaves, &syncv1.Leaf{Key: r.Key, Revision: r.Revision, Hash: leaf[:]})
		}
		s.mu.Unlock()
		if err := s.show(stream.Context(), "Leaves", m); err != nil {
			return err
		}
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	return nil
}

func (d *dataset) response(n uint32) *syncv1.FetchResponse {
	m := &syncv1.FetchResponse{Bucket: n, AsOf: d.head, Whole: true, Cursor: binary.BigEndian.AppendUint32(nil, n+1)}
	for _, r := range d.bucket(n) {
		m.Records = append(m.Records, &syncv1.Record{Key: r.Key, Revision: r.Revision, Bytes: r.Bytes})
	}
	return m
}

// Fetch implements syncv1.
func (s *Server) Fetch(req *syncv1.FetchRequest, stream grpc.ServerStreamingServer[syncv1.FetchResponse]) error {
	s.called("Fetch")
	last := int64(-1)
	for _, r := range req.Ranges {
		if int64(r.First) <= last || r.Last < r.First || r.Last >= usercache.Buckets {
			return invalid("ranges %v", req.Ranges)
		}
		last = int64(r.Last)
	}
	if s.NeedTicket && len(req.Ticket) == 0 {
		return Refused(time.Second)
	}
	from := uint32(0)
	if len(req.Cursor) == 4 {
		from = binary.BigEndian.Uint32(req.Cursor)
	}
	send := func(m *syncv1.FetchResponse) error {
		if err := s.show(stream.Context(), "Fetch", m); err != nil {
			return err
		}
		return stream.Send(m)
	}
	for _, r := range req.Ranges {
		for n := max(r.First, from); n <= r.Last; n++ {
			d, err := s.find(req.Kind, req.Identity)
			if err != nil {
				return err
			}
			m := d.response(n)
			s.mu.Unlock()
			if err := send(m); err != nil {
				return err
			}
		}
	}
	for i := int(from); i < len(req.Keys); i++ {
		k := req.Keys[i]
		d, err := s.find(req.Kind, req.Identity)
		if err != nil {
			return err
		}
		m := &syncv1.FetchResponse{Bucket: uint32(usercache.BucketOf(k)), AsOf: d.head, Cursor: binary.BigEndian.AppendUint32(nil, uint32(i+1))}
		if r, ok := d.records[string(k)]; ok {
			m.Records = []*syncv1.Record{{Key: k, Revision: r.Revision, Bytes: r.Bytes}}
		} else {
			m.Missing = [][]byte{k}
		}
		s.mu.Unlock()
		if err := send(m); err != nil {
			return err
		}
	}
	return nil
}

// Blob implements syncv1.
func (s *Server) Blob(req *syncv1.BlobRequest, stream grpc.ServerStreamingServer[syncv1.BlobResponse]) error {
	s.called("Blob")
	if len(req.Sha256) != 32 {
		return invalid("a SHA-256 of %d bytes", len(req.Sha256))
	}
	if s.NeedTicket && len(req.Ticket) == 0 {
		return Refused(time.Second)
	}
	s.mu.Lock()
	b, ok := s.blobs[[32]byte(req.Sha256)]
	s.mu.Unlock()
	if !ok {
		return status.Error(codes.NotFound, "no such blob")
	}
	return chunks(b, req.Offset, func(data []byte, at uint64) error {
		m := &syncv1.BlobResponse{Data: data, Offset: at, Size: uint64(len(b))}
		if err := s.show(stream.Context(), "Blob", m); err != nil {
			return err
		}
		return stream.Send(m)
	})
}

// chunks cuts bytes into small messages.
func chunks(b []byte, offset uint64, send func(data []byte, at uint64) error) error {
	if offset > uint64(len(b)) {
		return status.Error(codes.InvalidArgument, "offset beyond the end")
	}
	if offset == uint64(len(b)) {
		return send(nil, offset)
	}
	for chunk := range slices.Chunk(b[offset:], 64<<10) {
		if err := send(bytes.Clone(chunk), offset); err != nil {
			return err
		}
		offset += uint64(len(chunk))
	}
	return nil
}

// Acquire implements syncv1.
func (s *Server) Acquire(ctx context.Context, req *syncv1.AcquireRequest) (*syncv1.AcquireResponse, error) {
	s.called("Acquire")
	s.mu.Lock()
	s.acquired = append(s.acquired, req)
	s.out = true
	s.mu.Unlock()
	resp := &syncv1.AcquireResponse{Ticket: []byte("ticket"), LeaseMs: 30_000}
	return resp, s.show(ctx, "Acquire", resp)
}

// Renew implements syncv1.
func (s *Server) Renew(ctx context.Context, _ *syncv1.RenewRequest) (*syncv1.RenewResponse, error) {
	s.called("Renew")
	s.mu.Lock()
	out := s.out
	s.mu.Unlock()
	if !out {
		return nil, status.Error(codes.NotFound, "no such ticket")
	}
	resp := &syncv1.RenewResponse{LeaseMs: 30_000}
	return resp, s.show(ctx, "Renew", resp)
}

// Release implements syncv1.
func (s *Server) Release(context.Context, *syncv1.ReleaseRequest) (*syncv1.ReleaseResponse, error) {
	s.called("Release")
	s.mu.Lock()
	defer s.mu.Unlock()
	s.released++
	s.out = false
	return &syncv1.ReleaseResponse{}, nil
}

// Export makes an export of a dataset, in four segments.
func (s *Server) Export(kind usercache.Kind) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.datasets[string(kind)]
	m := &syncv1.ManifestResponse{Identity: message(d.id), OldestAsOf: d.head, NewestAsOf: d.head, Records: d.tree.Records()}
	byBucket := map[uint32][]string{}
	for _, k := range slices.Sorted(maps.Keys(d.records)) {
		n := uint32(usercache.BucketOf([]byte(k)))
		byBucket[n] = append(byBucket[n], k)
	}
	z, err := zstd.NewWriter(nil)
	if err != nil {
		panic(err)
	}
	const each = usercache.Buckets / 4
	for first := uint32(0); first < usercache.Buckets; first += each {
		var raw []byte
		for n := first; n < first+each; n++ {
			b := &syncv1.FetchResponse{Bucket: n, AsOf: d.head, Whole: true}
			for _, k := range byBucket[n] {
				r := d.records[k]
				b.Records = append(b.Records, &syncv1.Record{Key: r.Key, Revision: r.Revision, Bytes: r.Bytes})
			}
			enc, err := proto.Marshal(b)
			if err != nil {
				panic(err)
			}
			raw = append(binary.AppendUvarint(raw, uint64(len(enc))), enc...)
		}
		packed := z.EncodeAll(raw, nil)
		h := sha256.Sum256(packed)
		s.segments[h] = packed
		m.Segments = append(m.Segments, &syncv1.SegmentInfo{Sha256: h[:], Size: uint64(len(packed)), RawSize: uint64(len(raw)),
			Buckets: &syncv1.BucketRange{First: first, Last: first + each - 1}})
	}
	d.manifest = m
}

// Manifest implements syncv1.
func (s *Server) Manifest(ctx context.Context, req *syncv1.ManifestRequest) (*syncv1.ManifestResponse, error) {
	s.called("Manifest")
	d, err := s.find(req.Kind, nil)
	if err != nil {
		return nil, err
	}
	m := d.manifest
	s.mu.Unlock()
	if m == nil {
		return nil, status.Error(codes.NotFound, "no export")
	}
	m = proto.CloneOf(m)
	return m, s.show(ctx, "Manifest", m)
}

// Segment implements syncv1.
func (s *Server) Segment(req *syncv1.SegmentRequest, stream grpc.ServerStreamingServer[syncv1.SegmentResponse]) error {
	s.called("Segment")
	s.mu.Lock()
	b, ok := s.segments[[32]byte(req.Sha256)]
	s.mu.Unlock()
	if !ok {
		return status.Error(codes.NotFound, "no such segment")
	}
	return chunks(b, req.Offset, func(data []byte, at uint64) error {
		m := &syncv1.SegmentResponse{Data: data, Offset: at, Size: uint64(len(b))}
		if err := s.show(stream.Context(), "Segment", m); err != nil {
			return err
		}
		return stream.Send(m)
	})
}

// ProposeDevice makes the device, whoever asks.
func (s *Server) ProposeDevice(ctx context.Context, req *syncv1.ProposeDeviceRequest) (*syncv1.ProposeDeviceResponse, error) {
	s.called("propose")
	if err := s.show(ctx, "propose", req); err != nil {
		return nil, err
	}
	s.mu.Lock()
	r, ok := s.datasets[string(usercache.Users)].records[req.GetUser()]
	s.mu.Unlock()
	u := new(userv1.User)
	if err := proto.Unmarshal(r.Bytes, u); err != nil || !ok {
		return nil, status.Errorf(codes.NotFound, "there is no user %q", req.GetUser())
	}
	u.Devices = append(u.Devices, &userv1.Device{Id: req.GetDevice(), Automatic: true})
	b, err := proto.Marshal(u)
	if err != nil {
		return nil, err
	}
	return &syncv1.ProposeDeviceResponse{Created: true, Revision: s.Commit(usercache.Users, usercache.Change{Key: []byte(req.GetUser()), Bytes: b})}, nil
}
