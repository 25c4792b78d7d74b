package bizlogic

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"slices"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache"
)

// heartbeatEvery is the time between heartbeats on a Watch.
const heartbeatEvery = 5 * time.Second

// maxLeaves is how many buckets one Leaves may name, and maxKeys how many records one Fetch.
const (
	maxLeaves = 1024
	maxKeys   = 16384
)

// syncServer is what resolvers follow.
type syncServer struct {
	syncv1.UnimplementedSyncServiceServer
	s *Service
}

// A watch is an open Watch, for status and for naming siblings.
type watch struct {
	node nodeID
	peer string
}

func (y syncServer) Watch(req *syncv1.WatchRequest, stream grpc.ServerStreamingServer[syncv1.WatchResponse]) error {
	s := y.s
	d, err := s.dataset(req.GetKind(), req.GetScope())
	if err != nil {
		return err
	}
	s.flush(d.kind) // so that the caller is met at the committed head
	hello := s.hello(d, req)
	if err := stream.Send(&syncv1.WatchResponse{Message: &syncv1.WatchResponse_Hello{Hello: hello}}); err != nil {
		return err
	}
	if hello.Resume != syncv1.Resume_RESUME_OK {
		return nil
	}
	w := &watch{node: callerOf(stream.Context(), req.GetNode()), peer: req.GetNode().GetPeerAddress()}
	s.watches.Store(w, struct{}{})
	defer s.watches.Delete(w)

	heartbeat := time.NewTicker(heartbeatEvery)
	defer heartbeat.Stop()
	at := walk{pos: req.GetRevision()}
	if err := s.beat(d, &at, stream); err != nil {
		return err
	}
	for {
		wait, err := s.sendReady(d, &at, stream, heartbeat.C)
		if err != nil {
			return err
		}
		select {
		case <-wait:
		case <-heartbeat.C:
			s.flush(d.kind) // so that a caller at head hears of the head it is at
			if _, err := s.sendReady(d, &at, stream, nil); err != nil {
				return err
			}
			if err := s.beat(d, &at, stream); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case <-s.ctx.Done():
			return errClosing
		}
	}
}

// sendReady sends everything after at that has been flushed, with heartbeats in between while that takes
// long, and returns what to wait for.
func (s *Service) sendReady(d *dataset, at *walk, stream grpc.ServerStreamingServer[syncv1.WatchResponse], heartbeat <-chan time.Time) (<-chan struct{}, error) {
	for {
		entries, behind, wait := d.after(at.pos)
		switch {
		case behind || at.under:
			delta, err := s.next(d, at)
			if err != nil {
				return nil, reading(err)
			}
			if err := stream.Send(&syncv1.WatchResponse{Message: &syncv1.WatchResponse_Delta{Delta: delta}}); err != nil {
				return nil, err
			}
		case len(entries) > 0:
			for _, e := range entries {
				send := e.send
				if e.from < at.pos {
					send = func(stream grpc.ServerStreamingServer[syncv1.WatchResponse]) error { return e.sendRest(stream, at.pos) }
				}
				if err := send(stream); err != nil {
					return nil, err
				}
				at.pos = e.to
			}
		default:
			return wait, nil
		}
		select {
		case <-heartbeat:
			if err := s.beat(d, at, stream); err != nil {
				return nil, err
			}
		case <-s.ctx.Done():
			return nil, errClosing
		default:
		}
	}
}

// beat sends a heartbeat. To a caller who has all that was flushed it names that revision, so that being
// at head can be seen under a steady load of changes; to others the committed head.
func (s *Service) beat(d *dataset, at *walk, stream grpc.ServerStreamingServer[syncv1.WatchResponse]) error {
	var needs uint64
	if d.kind == Users {
		needs, _ = s.datasets[Catalogue].position()
	}
	d.mu.Lock()
	head, root := d.head, usercache.Hash{}
	if at.pos == d.flushed {
		head, root = d.flushed, d.flushedRoot
	} else {
		root = d.tree.Root()
	}
	d.mu.Unlock()
	return stream.Send(&syncv1.WatchResponse{Message: &syncv1.WatchResponse_Heartbeat{
		Heartbeat: &syncv1.Heartbeat{Head: head, Root: root[:], NeedsCatalogue: needs}}})
}

// hello compares where a caller stands with where the dataset does.
func (s *Service) hello(d *dataset, req *syncv1.WatchRequest) *syncv1.Hello {
	d.mu.Lock()
	head, oldest, root := d.head, d.oldest, d.tree.Root()
	d.mu.Unlock()
	h := &syncv1.Hello{Identity: s.identity(d), Head: head, Oldest: oldest, Root: root[:],
		HeartbeatMs: uint32(heartbeatEvery / time.Millisecond)}
	id, at := req.GetIdentity(), req.GetRevision()
	switch {
	case len(id.GetDatasetId()) == 0 || at == 0:
		h.Resume = syncv1.Resume_RESUME_COLD
	case !bytes.Equal(id.GetDatasetId(), d.id):
		h.Resume = syncv1.Resume_RESUME_OTHER_DATASET
	case !bytes.Equal(id.GetLineage(), s.db.lineage[:]):
		h.Resume = syncv1.Resume_RESUME_OTHER_LINEAGE
	case at > head:
		h.Resume = syncv1.Resume_RESUME_AHEAD
	case at < oldest:
		h.Resume = syncv1.Resume_RESUME_TOO_OLD
	case at == head && len(req.GetRoot()) > 0 && !bytes.Equal(req.GetRoot(), root[:]):
		h.Resume = syncv1.Resume_RESUME_OTHER_ROOT
	default:
		h.Resume = syncv1.Resume_RESUME_OK
	}
	return h
}

func (y syncServer) Digests(_ context.Context, req *syncv1.DigestsRequest) (*syncv1.DigestsResponse, error) {
	d, err := y.s.dataset(req.GetKind(), req.GetScope())
	if err != nil {
		return nil, err
	}
	if req.GetLevel() > 2 {
		return nil, invalid("level", "there are levels 0 to 2, not %d", req.GetLevel())
	}
	if req.GetNode() >= usercache.Nodes {
		return nil, invalid("node", "there are nodes 0 to %d, not %d", usercache.Nodes-1, req.GetNode())
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	root := d.tree.Root()
	resp := &syncv1.DigestsResponse{Identity: y.s.identity(d), AsOf: d.head, Root: root[:], Records: d.records, Size: d.size}
	switch req.GetLevel() {
	case 1:
		for _, h := range d.tree.NodeHashes() {
			resp.Digests = append(resp.Digests, h[:]...)
		}
	case 2:
		for _, b := range d.tree.NodeBuckets(uint8(req.GetNode())) {
			resp.Digests = b.AppendTo(resp.Digests)
		}
	}
	return resp, nil
}

func (y syncServer) Leaves(req *syncv1.LeavesRequest, stream grpc.ServerStreamingServer[syncv1.LeavesResponse]) error {
	d, err := y.s.dataset(req.GetKind(), req.GetScope())
	if err != nil {
		return err
	}
	if err := y.s.sameIdentity(d, req.GetIdentity()); err != nil {
		return err
	}
	if len(req.GetBuckets()) > maxLeaves {
		return invalid("buckets", "at most %d at once, not %d", maxLeaves, len(req.GetBuckets()))
	}
	for _, n := range req.GetBuckets() {
		if n >= usercache.Buckets {
			return invalid("buckets", "there are buckets 0 to %d, not %d", usercache.Buckets-1, n)
		}
		resp := &syncv1.LeavesResponse{Bucket: n}
		resp.AsOf, err = y.s.readBucket(d.kind, uint16(n), func(key []byte, revision uint64, b []byte) {
			leaf := usercache.LeafOf(key, revision, b)
			resp.Leaves = append(resp.Leaves, &syncv1.Leaf{Key: bytes.Clone(key), Revision: revision, Hash: leaf[:]})
		})
		if err != nil {
			return reading(err)
		}
		if err := stream.Send(resp); err != nil {
			return err
		}
	}
	return nil
}

// readBucket reads one bucket in one short transaction, and returns the head it was read at. What each is
// given is valid during the call only.
func (s *Service) readBucket(kind string, bucket uint16, each func(key []byte, revision uint64, b []byte)) (asOf uint64, err error) {
	err = s.db.View(func(tx *bolt.Tx) error {
		m, err := metaOf(tx, kind)
		if err != nil {
			return err
		}
		asOf = m.Revision
		prefix := binary.BigEndian.AppendUint16(nil, bucket)
		c := tx.Bucket([]byte(kind)).Bucket(bucketRecords).Cursor()
		for k, v := c.Seek(prefix); k != nil && bytes.HasPrefix(k, prefix); k, v = c.Next() {
			revision, b, err := openRecord(v)
			if err != nil {
				return err
			}
			each(k[usercache.StorePrefix:], revision, b)
		}
		return nil
	})
	return asOf, err
}

func (y syncServer) Fetch(req *syncv1.FetchRequest, stream grpc.ServerStreamingServer[syncv1.FetchResponse]) error {
	s := y.s
	d, err := s.dataset(req.GetKind(), req.GetScope())
	if err != nil {
		return err
	}
	if err := s.sameIdentity(d, req.GetIdentity()); err != nil {
		return err
	}
	if len(req.GetKeys()) > maxKeys {
		return invalid("keys", "at most %d at once, not %d", maxKeys, len(req.GetKeys()))
	}
	first, skip, err := fetchFrom(req)
	if err != nil {
		return err
	}
	lane, err := s.admission.enter(req.GetTicket(), callerOf(stream.Context(), req.GetNode()), s.fetchSize(d, req, first), clock.Elapsed())
	if err != nil {
		return err
	}
	defer func() { lane.leave(clock.Elapsed()) }()

	send := func(parts []*syncv1.FetchResponse, bytes int) error {
		if err := lane.spend(bytes, clock.Elapsed()); err != nil {
			return err
		}
		for _, p := range parts {
			if err := stream.Send(p); err != nil {
				return err
			}
		}
		lane.moved(clock.Elapsed())
		select {
		case <-s.ctx.Done():
			return errClosing
		default:
			return stream.Context().Err()
		}
	}
	for _, r := range req.GetRanges() {
		for n := max(r.GetFirst(), first); n <= r.GetLast(); n++ {
			parts, size, err := s.fetchBucket(d.kind, uint16(n))
			if err != nil {
				return reading(err)
			}
			if err := send(parts, size); err != nil {
				return err
			}
		}
	}
	for i := skip; i < len(req.GetKeys()); {
		resp, n, size, err := s.fetchKeys(d.kind, req.GetKeys()[i:])
		if err != nil {
			return reading(err)
		}
		i += n
		resp.Cursor = keyCursor(i)
		if err := send([]*syncv1.FetchResponse{resp}, size); err != nil {
			return err
		}
	}
	return nil
}

// A cursor says what a Fetch has sent: 'b' and be32 the next bucket, or 'k' and be32 the next key.
func bucketCursor(next uint32) []byte { return binary.BigEndian.AppendUint32([]byte{'b'}, next) }
func keyCursor(next int) []byte       { return binary.BigEndian.AppendUint32([]byte{'k'}, uint32(next)) }

// fetchFrom reads and checks where a Fetch begins: at which bucket, and at which key.
func fetchFrom(req *syncv1.FetchRequest) (bucket uint32, key int, err error) {
	last := int64(-1)
	for _, r := range req.GetRanges() {
		if r.GetLast() >= usercache.Buckets || r.GetFirst() > r.GetLast() || int64(r.GetFirst()) <= last {
			return 0, 0, invalid("ranges", "%d-%d does not follow %d, or is beyond %d", r.GetFirst(), r.GetLast(), last, usercache.Buckets-1)
		}
		last = int64(r.GetLast())
	}
	for _, k := range req.GetKeys() {
		if len(k) == 0 || len(k) > 1024 {
			return 0, 0, invalid("keys", "a key has 1 to 1024 bytes, not %d", len(k))
		}
	}
	switch c := req.GetCursor(); {
	case len(c) == 0:
		return 0, 0, nil
	case len(c) == 5 && c[0] == 'b' && binary.BigEndian.Uint32(c[1:]) <= usercache.Buckets:
		return binary.BigEndian.Uint32(c[1:]), 0, nil
	case len(c) == 5 && c[0] == 'k' && int(binary.BigEndian.Uint32(c[1:])) <= len(req.GetKeys()):
		return usercache.Buckets, int(binary.BigEndian.Uint32(c[1:])), nil
	}
	return 0, 0, invalid("cursor", "%x is not one of ours", req.GetCursor())
}

// fetchSize estimates the bytes of a Fetch.
func (s *Service) fetchSize(d *dataset, req *syncv1.FetchRequest, first uint32) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.records == 0 {
		return 0
	}
	n := uint64(len(req.GetKeys()))
	for _, r := range req.GetRanges() {
		for b := max(r.GetFirst(), first); b <= r.GetLast(); b++ {
			n += d.tree.Bucket(uint16(b)).Count
		}
	}
	return int(float64(n) * float64(d.size) / float64(d.records))
}

// fetchBucket reads a bucket as the responses that carry it.
func (s *Service) fetchBucket(kind string, bucket uint16) (parts []*syncv1.FetchResponse, size int, err error) {
	part, partSize := &syncv1.FetchResponse{}, 0
	asOf, err := s.readBucket(kind, bucket, func(key []byte, revision uint64, b []byte) {
		if partSize >= maxDelta {
			parts = append(parts, part)
			part, partSize = &syncv1.FetchResponse{}, 0
		}
		part.Records = append(part.Records, &syncv1.Record{Key: bytes.Clone(key), Revision: revision, Bytes: bytes.Clone(b)})
		partSize += len(key) + len(b) + 24
		size += len(key) + len(b) + 24
	})
	if err != nil {
		return nil, 0, err
	}
	parts = append(parts, part)
	for i, p := range parts {
		p.Bucket, p.AsOf, p.Whole, p.More = uint32(bucket), asOf, true, i < len(parts)-1
	}
	parts[len(parts)-1].Cursor = bucketCursor(uint32(bucket) + 1)
	return parts, size, nil
}

// fetchKeys reads the records of the first few keys that are in one bucket, and returns how many they were.
func (s *Service) fetchKeys(kind string, keys [][]byte) (resp *syncv1.FetchResponse, n, size int, err error) {
	bucket := usercache.BucketOf(keys[0])
	resp = &syncv1.FetchResponse{Bucket: uint32(bucket)}
	err = s.db.View(func(tx *bolt.Tx) error {
		m, err := metaOf(tx, kind)
		if err != nil {
			return err
		}
		resp.AsOf = m.Revision
		for n < len(keys) && size < maxDelta && usercache.BucketOf(keys[n]) == bucket {
			key := keys[n]
			n++
			revision, b, ok, err := getRecord(tx, kind, key)
			if err != nil {
				return err
			}
			size += len(key) + len(b) + 24
			if !ok {
				resp.Missing = append(resp.Missing, key)
				continue
			}
			resp.Records = append(resp.Records, &syncv1.Record{Key: key, Revision: revision, Bytes: bytes.Clone(b)})
		}
		return nil
	})
	return resp, n, size, err
}

func (y syncServer) Blob(req *syncv1.BlobRequest, stream grpc.ServerStreamingServer[syncv1.BlobResponse]) error {
	s := y.s
	if len(req.GetSha256()) != sha256.Size {
		return invalid("sha256", "a SHA-256 has %d bytes, not %d", sha256.Size, len(req.GetSha256()))
	}
	return s.sendFile(s.blobPath(req.GetSha256()), "blob", req.GetSha256(), req.GetOffset(), req.GetTicket(), callerOf(stream.Context(), req.GetNode()),
		func(data []byte, offset, size uint64) error {
			return stream.Send(&syncv1.BlobResponse{Data: data, Offset: offset, Size: size})
		})
}

// sendFile sends a file that is named by its content, from an offset.
func (s *Service) sendFile(path, what string, sum []byte, offset uint64, ticket []byte, who nodeID, send func(data []byte, offset, size uint64) error) error {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return notFound(what, hex.EncodeToString(sum))
	}
	if err != nil {
		return reading(err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return reading(err)
	}
	size := uint64(fi.Size())
	if offset > size {
		return invalid("offset", "the %s has %d bytes; %d is beyond", what, size, offset)
	}
	lane, err := s.admission.enter(ticket, who, int(size-offset), clock.Elapsed())
	if err != nil {
		return err
	}
	defer func() { lane.leave(clock.Elapsed()) }()
	if _, err := f.Seek(int64(offset), io.SeekStart); err != nil {
		return reading(err)
	}
	buf := make([]byte, 256<<10)
	for first := true; first || offset < size; first = false {
		n, err := io.ReadFull(f, buf[:min(uint64(len(buf)), size-offset)])
		if err != nil {
			return reading(err)
		}
		if err := lane.spend(n, clock.Elapsed()); err != nil {
			return err
		}
		if err := send(buf[:n], offset, size); err != nil {
			return err
		}
		lane.moved(clock.Elapsed())
		offset += uint64(n)
		if s.ctx.Err() != nil {
			return errClosing
		}
	}
	return nil
}

func (y syncServer) Acquire(ctx context.Context, req *syncv1.AcquireRequest) (*syncv1.AcquireResponse, error) {
	s := y.s
	if _, err := s.dataset(req.GetKind(), ""); err != nil {
		return nil, err
	}
	who := callerOf(ctx, req.GetNode())
	if who.id == "" {
		return nil, invalid("node.id", "a ticket is given to a node with a name")
	}
	g, err := s.admission.acquire(who, req.GetNeed(), time.Duration(req.GetAge())*time.Second, clock.Elapsed())
	if no := (*notYet)(nil); errors.As(err, &no) {
		return nil, no.status(s.siblings(who))
	}
	if err != nil {
		return nil, err
	}
	return &syncv1.AcquireResponse{Ticket: []byte(g.ticket), LeaseMs: uint32(leaseTime / time.Millisecond), Seed: g.seed, Siblings: s.siblings(who)}, nil
}

func (y syncServer) Renew(_ context.Context, req *syncv1.RenewRequest) (*syncv1.RenewResponse, error) {
	if err := y.s.admission.renew(string(req.GetTicket()), req.GetReceived(), clock.Elapsed()); err != nil {
		return nil, err
	}
	return &syncv1.RenewResponse{LeaseMs: uint32(leaseTime / time.Millisecond)}, nil
}

func (y syncServer) Release(_ context.Context, req *syncv1.ReleaseRequest) (*syncv1.ReleaseResponse, error) {
	y.s.admission.release(string(req.GetTicket()), req.GetComplete(), clock.Elapsed())
	return &syncv1.ReleaseResponse{}, nil
}

// siblings names up to 4 nodes of the caller's region that offer segments.
func (s *Service) siblings(who nodeID) []*syncv1.Sibling {
	var out []*syncv1.Sibling
	s.watches.Range(func(k, _ any) bool {
		w := k.(*watch)
		known := slices.ContainsFunc(out, func(o *syncv1.Sibling) bool { return o.Id == w.node.id })
		if w.peer != "" && w.node.region == who.region && w.node.id != who.id && !known {
			out = append(out, &syncv1.Sibling{Id: w.node.id, Address: w.peer})
		}
		return len(out) < 4
	})
	return out
}

func (y syncServer) ProposeDevice(ctx context.Context, req *syncv1.ProposeDeviceRequest) (*syncv1.ProposeDeviceResponse, error) {
	return y.s.proposeDevice(ctx, req)
}

// dataset finds what a request is about.
func (s *Service) dataset(kind, scope string) (*dataset, error) {
	if scope != "" {
		return nil, invalid("scope", "partial sets are not served")
	}
	d := s.datasets[kind]
	if d == nil {
		return nil, status.Errorf(codes.NotFound, "there is no dataset %q; there are %v", kind, kinds)
	}
	return d, nil
}

func (s *Service) identity(d *dataset) *syncv1.Identity {
	return &syncv1.Identity{DatasetId: d.id, Lineage: s.db.lineage[:]}
}

// sameIdentity checks what a caller believes is served.
func (s *Service) sameIdentity(d *dataset, id *syncv1.Identity) error {
	if len(id.GetDatasetId()) > 0 && !bytes.Equal(id.GetDatasetId(), d.id) {
		return refused("this is dataset %x of %s, not %x", d.id, d.kind, id.GetDatasetId())
	}
	if len(id.GetLineage()) > 0 && !bytes.Equal(id.GetLineage(), s.db.lineage[:]) {
		return refused("this is lineage %x of %s, not %x", s.db.lineage, d.kind, id.GetLineage())
	}
	return nil
}
