package syncclient

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
)

const (
	// maxBlob bounds a blob. The service takes lists of up to 300 MiB.
	maxBlob = 512 << 20
	// maxAsked is how many blobs outside the wanted set are remembered. Who asks for more is told that the
	// blob is not here, and nothing else happens.
	maxAsked = 65536
)

// A Hash is the SHA-256 that names a blob.
type Hash = [32]byte

// ErrNoBlob says that a blob is not here yet.
var ErrNoBlob = errors.New("this blob has not arrived yet")

// Blobs are big texts, filter lists and long rule sets, named by their SHA-256 and kept as files in
// DataDir/blobs. Those of the wanted set, and those somebody tried to read, are fetched from the service;
// what an interrupted transfer has brought is kept. A file that is not what its name says is never returned:
// it is fetched anew. Those nobody has wanted or read for Options.KeepBlobs are removed.
//
// It is safe for concurrent use.
type Blobs struct {
	c    *Client
	dir  string
	keep time.Duration
	log  *slog.Logger
	wake chan struct{} // of size one

	mu     sync.Mutex // guards everything below; held for memory work only
	wanted map[Hash]bool
	used   map[Hash]clock.Instant // when blobs outside wanted were last read, asked for or wanted
	have   map[Hash]bool
	failed map[Hash]blobFailure
	notify []chan<- struct{}
}

type blobFailure struct {
	times int
	until clock.Instant
	why   string
}

func openBlobs(c *Client, dir string, keep time.Duration) (*Blobs, error) {
	if keep == 0 {
		keep = 24 * time.Hour
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the directory of blobs: %w", err)
	}
	b := &Blobs{c: c, dir: dir, keep: keep, log: c.opts.Logger, wake: make(chan struct{}, 1),
		wanted: map[Hash]bool{}, used: map[Hash]clock.Instant{}, have: map[Hash]bool{}, failed: map[Hash]blobFailure{}}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("reading the directory of blobs: %w", err)
	}
	now := clock.Elapsed()
	for _, e := range entries {
		name, part := strings.CutSuffix(e.Name(), ".part")
		if raw, err := hex.DecodeString(name); err == nil && len(raw) == len(Hash{}) {
			h := Hash(raw)
			if !part {
				b.used[h], b.have[h] = now, true
			} else if fi, err := e.Info(); err != nil || clock.Wall().Sub(fi.ModTime()) > keep {
				_ = removeFile(filepath.Join(dir, e.Name())) // a transfer that nobody came back to
			}
		}
	}
	return b, nil
}

// Want says which blobs must be here; it replaces what was said before.
func (b *Blobs) Want(set []Hash) {
	now := clock.Elapsed()
	b.mu.Lock()
	for h := range b.wanted {
		b.used[h] = now
	}
	b.wanted = make(map[Hash]bool, len(set))
	for _, h := range set {
		b.wanted[h] = true
		delete(b.used, h)
	}
	b.mu.Unlock()
	b.poke()
}

// Notify arranges that after each arrival something is sent to ch, unless it is full: a channel of size one
// makes a reader look again at least once after the last arrival.
func (b *Blobs) Notify(ch chan<- struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.notify = append(b.notify, ch)
}

// Has reports whether a blob is here, as far as can be said without reading it.
func (b *Blobs) Has(h Hash) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.have[h]
}

// Get returns a blob's bytes, verified. One that is not here is ErrNoBlob, and is fetched from now on.
func (b *Blobs) Get(h Hash) ([]byte, error) {
	f, err := b.Open(h)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(f)
	if err != nil {
		return nil, fmt.Errorf("blob %x: %w", h, err)
	}
	return data, nil
}

// Open returns a blob for reading from the start, verified. The caller closes it. Errors are as of Get.
func (b *Blobs) Open(h Hash) (io.ReadCloser, error) {
	if !b.use(h) {
		b.poke()
		return nil, fmt.Errorf("blob %x: %w", h, ErrNoBlob)
	}
	f, err := os.Open(b.path(h))
	if err == nil {
		err = checkReader(f, h)
		if err == nil {
			_, err = f.Seek(0, io.SeekStart)
		}
		if err == nil {
			return f, nil
		}
		_ = f.Close()
	}
	b.log.Error("a blob is damaged; it is fetched anew", "blob", hex.EncodeToString(h[:]), "error", err)
	b.mu.Lock()
	delete(b.have, h)
	b.mu.Unlock()
	_ = removeFile(b.path(h)) // the next download replaces it anyway
	b.poke()
	return nil, fmt.Errorf("blob %x: %w (it was damaged: %w)", h, ErrNoBlob, err)
}

// use notes that a blob is in use, and reports whether it is here.
func (b *Blobs) use(h Hash) bool {
	now := clock.Elapsed()
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, known := b.used[h]; !b.wanted[h] && (known || len(b.used) < maxAsked) {
		b.used[h] = now
	}
	return b.have[h]
}

func (b *Blobs) path(h Hash) string { return filepath.Join(b.dir, hex.EncodeToString(h[:])) }

func (b *Blobs) poke() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// missing returns the blobs to fetch that may be tried now, in a fixed order, and when others may.
func (b *Blobs) missing() (list []Hash, later clock.Instant) {
	now := clock.Elapsed()
	later = clock.Never
	b.mu.Lock()
	defer b.mu.Unlock()
	look := func(h Hash) {
		if b.have[h] {
			return
		}
		if f := b.failed[h]; now.Before(f.until) {
			later = min(later, f.until)
		} else {
			list = append(list, h)
		}
	}
	for h := range b.wanted {
		look(h)
	}
	for h := range b.used {
		look(h)
	}
	slices.SortFunc(list, func(x, y Hash) int { return slices.Compare(x[:], y[:]) })
	return list, later
}

// run fetches what is missing and removes what nobody wants, until ctx ends.
func (b *Blobs) run(ctx context.Context) {
	sweep := time.NewTicker(max(b.keep/24, time.Second))
	defer sweep.Stop()
	for ctx.Err() == nil {
		wait := clock.Never
		list, later := b.missing()
		if len(list) > 0 {
			s, at := b.pick()
			if s != nil {
				b.fetch(ctx, s, list)
				continue
			}
			wait = at
		}
		wait = min(wait, later)
		t := time.NewTimer(min(wait.Sub(clock.Elapsed()), time.Hour))
		select {
		case <-t.C:
		case <-b.wake:
		case <-sweep.C:
			b.sweep()
		case <-ctx.Done():
		}
		t.Stop()
	}
}

func (b *Blobs) key(s *service) string { return s.address + " blobs" }

func (b *Blobs) pick() (*service, clock.Instant) {
	now, soonest := clock.Elapsed(), clock.Never
	for _, s := range b.c.services {
		at := b.c.backoffs.ready(s.address, b.key(s))
		if !now.Before(at) {
			return s, at
		}
		soonest = min(soonest, at)
	}
	return nil, soonest
}

// fetch brings blobs until one fails for a reason that concerns all.
func (b *Blobs) fetch(ctx context.Context, s *service, list []Hash) {
	var t *ticket
	defer func() {
		if t != nil {
			t.release()
		}
	}()
	started := clock.Elapsed()
	l, err := s.connect()
	for i := 0; err == nil && i < len(list); {
		h := list[i]
		err = b.fetchOne(ctx, l, h, t)
		if refused(err) && t == nil {
			t, err = b.c.acquire(ctx, l, &syncv1.AcquireRequest{Kind: "catalogue", Node: b.c.opts.Node.message(), Need: syncv1.Need_NEED_REPAIR})
			continue
		}
		if err == nil {
			b.arrived(h)
			b.c.backoffs.succeed(b.key(s))
			i++
			continue
		}
		if ctx.Err() != nil || unreachable(err) || refused(err) {
			break
		}
		b.fail(h, s, err)
		err = nil
		i++
	}
	if ctx.Err() != nil {
		return
	}
	if t != nil {
		t.complete = err == nil
	}
	if err != nil {
		demanded, _ := retryAfter(err)
		failures, wait := b.c.backoffs.fail(b.key(s), started, demanded, maxUnreachable, err.Error())
		if l != nil && unreachable(err) {
			s.dropIfDead(l)
		}
		level := slog.LevelDebug
		if failures == 1 {
			level = slog.LevelWarn
		}
		b.log.Log(ctx, level, "fetching blobs", "service", s.address, "error", err, "again_in", wait)
	}
}

func (b *Blobs) fetchOne(ctx context.Context, l *link, h Hash, t *ticket) error {
	return download(ctx, b.dir, h, maxBlob, func(ctx context.Context, offset uint64) (func() (chunk, error), error) {
		req := &syncv1.BlobRequest{Sha256: h[:], Offset: offset, Node: b.c.opts.Node.message()}
		if t != nil {
			req.Ticket = t.id
		}
		stream, err := l.sync.Blob(ctx, req)
		if err != nil {
			return nil, err
		}
		return func() (chunk, error) {
			m, err := stream.Recv()
			if err == nil && t != nil {
				t.moved(m)
			}
			return chunk{m.GetData(), m.GetOffset(), m.GetSize()}, err
		}, nil
	})
}

func (b *Blobs) arrived(h Hash) {
	b.mu.Lock()
	b.have[h] = true
	delete(b.failed, h)
	wakeAll(b.notify)
	b.mu.Unlock()
	b.c.changed()
}

// fail notes that one blob cannot be had.
func (b *Blobs) fail(h Hash, s *service, err error) {
	if status.Code(err) == codes.InvalidArgument {
		// The service's is shorter than what is here.
		_ = removeFile(b.path(h) + ".part")
	}
	b.mu.Lock()
	f := b.failed[h]
	f.times++
	d := min(firstWait<<min(f.times, 20), maxWrong)
	f.until = clock.Elapsed().Add(d/2 + b.c.backoffs.random(d/2))
	f.why = err.Error()
	b.failed[h] = f
	b.mu.Unlock()
	if f.times == 1 {
		b.log.Warn("a blob cannot be had", "blob", hex.EncodeToString(h[:]), "service", s.address, "error", err)
	}
}

// sweep removes what nobody has wanted for long.
func (b *Blobs) sweep() {
	now := clock.Elapsed()
	var gone []Hash
	b.mu.Lock()
	maps.DeleteFunc(b.used, func(h Hash, at clock.Instant) bool {
		if now.Sub(at) < b.keep {
			return false
		}
		gone = append(gone, h)
		delete(b.have, h)
		delete(b.failed, h)
		return true
	})
	b.mu.Unlock()
	for _, h := range gone {
		if err := errors.Join(removeFile(b.path(h)), removeFile(b.path(h)+".part")); err != nil {
			b.log.Warn("blobs", "error", err)
		}
	}
}

// BlobStatus is how many blobs there are.
type BlobStatus struct {
	Wanted  int // in the wanted set
	Missing int // of these, not here
	Held    int // files
	// LastError of a missing one. Empty: none failed.
	LastError string
}

func (b *Blobs) status() (s BlobStatus) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s.Wanted, s.Held = len(b.wanted), len(b.have)
	for h := range b.wanted {
		if !b.have[h] {
			s.Missing++
			if f := b.failed[h]; f.why != "" {
				s.LastError = f.why
			}
		}
	}
	return s
}
