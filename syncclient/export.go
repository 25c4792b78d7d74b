package syncclient

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	"github.com/sluice-dns/sluice/usercache"
)

// maxSegment bounds a segment of an export, compressed and not.
const maxSegment = 1 << 30

// fromExport takes what it can of the planned buckets from the service's newest export, and out of the plan.
// It is no error if there is no export that helps.
func (r *repair) fromExport(ctx context.Context) error {
	asking, cancel := context.WithTimeout(ctx, answerTime)
	m, err := r.l.segments.Manifest(asking, &syncv1.ManifestRequest{Kind: string(r.f.kind)})
	cancel()
	switch status.Code(err) {
	case codes.OK:
	case codes.NotFound, codes.Unimplemented:
		return nil
	default:
		return err
	}
	if id, err := parseIdentity(m.GetIdentity()); err != nil || id != r.id {
		return fmt.Errorf("the manifest is of %v (%w)", id, cmpErr(err))
	}
	if r.held.Complete && r.held.Identity == r.id && m.GetOldestAsOf() < r.held.Revision {
		return nil // it would turn newer settings back
	}
	dir := filepath.Join(r.f.c.opts.DataDir, "segments")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	for _, s := range m.GetSegments() {
		b := s.GetBuckets()
		i, _ := slices.BinarySearch(r.whole, uint16(min(b.GetFirst(), usercache.Buckets-1)))
		if i == len(r.whole) || uint32(r.whole[i]) > b.GetLast() {
			continue
		}
		if err := r.segment(ctx, dir, s, m); err != nil {
			return fmt.Errorf("segment %x: %w", s.GetSha256(), err)
		}
	}
	return nil
}

func (r *repair) segment(ctx context.Context, dir string, s *syncv1.SegmentInfo, m *syncv1.ManifestResponse) error {
	if len(s.GetSha256()) != 32 || s.GetSize() > maxSegment || s.GetRawSize() > maxSegment {
		return wrong("its name has %d bytes, itself %d, %d decompressed", len(s.GetSha256()), s.GetSize(), s.GetRawSize())
	}
	sum := [32]byte(s.GetSha256())
	err := download(ctx, dir, sum, s.GetSize(), func(ctx context.Context, offset uint64) (func() (chunk, error), error) {
		stream, err := r.l.segments.Segment(ctx, &syncv1.SegmentRequest{Sha256: sum[:], Offset: offset, Ticket: r.ticket.id, Node: r.f.c.opts.Node.message()})
		if err != nil {
			return nil, err
		}
		return func() (chunk, error) {
			m, err := stream.Recv()
			if err == nil {
				r.ticket.moved(m)
			}
			return chunk{m.GetData(), m.GetOffset(), m.GetSize()}, err
		}, nil
	})
	if err != nil {
		return err
	}
	path := filepath.Join(dir, hex.EncodeToString(sum[:]))
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	have := map[uint16]bool{}
	err = readSegment(f, s.GetRawSize(), func(data *usercache.BucketData) error {
		b := s.GetBuckets()
		if uint32(data.Bucket) < b.GetFirst() || uint32(data.Bucket) > b.GetLast() || have[data.Bucket] || !data.Whole ||
			data.AsOf < m.GetOldestAsOf() || data.AsOf > m.GetNewestAsOf() {
			return wrong("bucket %d as of %d is not what the manifest says", data.Bucket, data.AsOf)
		}
		if _, planned := slices.BinarySearch(r.whole, data.Bucket); !planned {
			return nil
		}
		have[data.Bucket] = true
		return r.apply(ctx, data, false)
	})
	r.whole = slices.DeleteFunc(r.whole, func(b uint16) bool { return have[b] })
	return errors.Join(err, removeFile(path))
}

// readSegment reads the buckets of a segment: zstd over FetchResponse messages, each after its length as a
// varint.
func readSegment(file io.Reader, rawSize uint64, each func(*usercache.BucketData) error) error {
	z, err := zstd.NewReader(file, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(64<<20))
	if err != nil {
		return err
	}
	defer z.Close()
	raw := bufio.NewReader(io.LimitReader(z, int64(rawSize)))
	var p bucketParts
	for {
		n, err := binary.ReadUvarint(raw)
		if err == io.EOF {
			break
		}
		if err != nil {
			return wrong("a length in it: %v", err)
		}
		if n > maxMessage {
			return wrong("a message of %d bytes in it", n)
		}
		buf := make([]byte, n)
		if _, err := io.ReadFull(raw, buf); err != nil {
			return wrong("it ends within a message: %v", err)
		}
		var m syncv1.FetchResponse
		if err := proto.Unmarshal(buf, &m); err != nil {
			return wrong("a message in it: %v", err)
		}
		data, err := p.add(&m)
		if err != nil {
			return err
		}
		if data != nil {
			if err := each(data); err != nil {
				return err
			}
		}
	}
	if p.data != nil {
		return wrong("it ends within bucket %d", p.data.Bucket)
	}
	return nil
}
