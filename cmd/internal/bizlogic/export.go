package bizlogic

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protodelim"

	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache"
)

const (
	// exportEvery is the least time between two exports of a dataset.
	exportEvery = 10 * time.Minute

	// exportSegments is how many segments a dataset is cut into: enough to resume cheaply, few enough that
	// each compresses well.
	exportSegments = 64
)

// segmentServer gives out exports.
type segmentServer struct {
	syncv1.UnimplementedSegmentServiceServer
	s *Service
}

// An exporter makes exports, one at a time per dataset, and keeps the newest and the one before.
type exporter struct {
	s   *Service
	dir string

	mu   sync.Mutex
	kind map[string]*exported
}

type exported struct {
	manifest *syncv1.ManifestResponse // newest; nil: none yet
	before   []*syncv1.SegmentInfo    // of the one before, which some may still be reading
	made     clock.Instant
	making   chan struct{} // closed when the one under way is done; nil: none
	err      error         // of the last attempt
}

func newExporter(s *Service) *exporter {
	dir := filepath.Join(s.opts.Dir, "exports")
	_ = os.RemoveAll(dir) // of an earlier run: nobody holds a manifest that names them
	return &exporter{s: s, dir: dir, kind: map[string]*exported{}}
}

func (g segmentServer) Manifest(ctx context.Context, req *syncv1.ManifestRequest) (*syncv1.ManifestResponse, error) {
	d, err := g.s.dataset(req.GetKind(), req.GetScope())
	if err != nil {
		return nil, err
	}
	if d.kind == Secrets {
		return nil, status.Error(codes.NotFound, "secrets are not exported")
	}
	return g.s.exports.newest(ctx, d)
}

// newest returns the newest export. If it is old, the next is begun; if there is none, it is waited for.
func (x *exporter) newest(ctx context.Context, d *dataset) (*syncv1.ManifestResponse, error) {
	head, _ := d.position()
	x.mu.Lock()
	e := x.kind[d.kind]
	if e == nil {
		e = &exported{}
		x.kind[d.kind] = e
	}
	now := clock.Elapsed()
	old := e.manifest == nil || e.manifest.OldestAsOf < head && now.Sub(e.made) >= exportEvery
	if old && e.making == nil {
		if x.s.ctx.Err() != nil {
			x.mu.Unlock()
			return nil, errClosing
		}
		e.making, e.made = make(chan struct{}), now
		x.s.wg.Go(func() { x.make(d, e) })
	}
	m, wait := e.manifest, e.making
	x.mu.Unlock()
	if m != nil {
		return m, nil
	}
	select {
	case <-wait:
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if e.manifest == nil {
		return nil, cond(e.err, errClosing)
	}
	return e.manifest, nil
}

// make makes an export and puts it in place.
func (x *exporter) make(d *dataset, e *exported) {
	m, err := x.write(d)
	x.mu.Lock()
	defer x.mu.Unlock()
	defer func() { close(e.making); e.making = nil }()
	if e.err = reading(err); err != nil {
		return
	}
	keep := map[string]bool{}
	for _, seg := range m.Segments {
		keep[string(seg.Sha256)] = true
	}
	for _, seg := range e.manifest.GetSegments() {
		keep[string(seg.Sha256)] = true
	}
	for _, seg := range e.before {
		if !keep[string(seg.Sha256)] {
			_ = os.Remove(x.path(seg.Sha256)) // a leftover is removed at the next start
		}
	}
	e.before, e.manifest = e.manifest.GetSegments(), m
}

// write writes the segments of one export.
func (x *exporter) write(d *dataset) (*syncv1.ManifestResponse, error) {
	if err := os.MkdirAll(x.dir, 0o700); err != nil {
		return nil, err
	}
	m := &syncv1.ManifestResponse{Identity: x.s.identity(d), Created: clock.Wall().Unix()}
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, err
	}
	defer enc.Close()
	const width = usercache.Buckets / exportSegments
	for i := range exportSegments {
		first := uint32(i * width)
		var packed bytes.Buffer
		enc.Reset(&packed)
		raw := &countingWriter{w: enc}
		for b := first; b < first+width; b++ {
			if x.s.ctx.Err() != nil {
				return nil, errClosing
			}
			parts, _, err := x.s.fetchBucket(d.kind, uint16(b))
			if err != nil {
				return nil, err
			}
			for _, p := range parts {
				p.Cursor = nil
				if m.OldestAsOf == 0 || p.AsOf < m.OldestAsOf {
					m.OldestAsOf = p.AsOf
				}
				m.NewestAsOf = max(m.NewestAsOf, p.AsOf)
				m.Records += uint64(len(p.Records))
				if _, err := protodelim.MarshalTo(raw, p); err != nil {
					return nil, err
				}
			}
		}
		if err := enc.Close(); err != nil {
			return nil, err
		}
		sum := sha256.Sum256(packed.Bytes())
		if err := writeFile(x.path(sum[:]), packed.Bytes()); err != nil {
			return nil, err
		}
		m.Segments = append(m.Segments, &syncv1.SegmentInfo{Sha256: sum[:], Size: uint64(packed.Len()), RawSize: raw.n,
			Buckets: &syncv1.BucketRange{First: first, Last: first + width - 1}})
	}
	return m, nil
}

func (x *exporter) path(sum []byte) string { return filepath.Join(x.dir, hex.EncodeToString(sum)) }

func (g segmentServer) Segment(req *syncv1.SegmentRequest, stream grpc.ServerStreamingServer[syncv1.SegmentResponse]) error {
	if len(req.GetSha256()) != sha256.Size {
		return invalid("sha256", "a SHA-256 has %d bytes, not %d", sha256.Size, len(req.GetSha256()))
	}
	return g.s.sendFile(g.s.exports.path(req.GetSha256()), "segment", req.GetSha256(), req.GetOffset(), req.GetTicket(),
		callerOf(stream.Context(), req.GetNode()), func(data []byte, offset, size uint64) error {
			return stream.Send(&syncv1.SegmentResponse{Data: data, Offset: offset, Size: size})
		})
}

type countingWriter struct {
	w interface{ Write([]byte) (int, error) }
	n uint64
}

func (c *countingWriter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.n += uint64(n)
	if err == nil && n < len(b) {
		err = errors.New("short write")
	}
	return n, err
}
