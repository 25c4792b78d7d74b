package usercache

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache/internal/offheap"
	"github.com/sluice-dns/sluice/usercache/internal/store"
	"golang.org/x/sys/unix"
)

// Open loads the datasets from a directory, or begins empty ones, and starts writing changes there. It takes
// the newest file of each dataset that can be read; records of a damaged one are saved as far as they can
// be. It fails if another process has the directory, or if a file is of a newer version or another dataset:
// such a file is left as it is.
func Open(o Options) (*Cache, error) {
	if o.GroupChanges == 0 {
		o.GroupChanges = 500
	}
	if o.GroupDelay == 0 {
		o.GroupDelay = 250 * time.Millisecond
	}
	if o.CheckpointEvery == 0 {
		o.CheckpointEvery = 24 * time.Hour
	}
	if o.OverlayExpiry == 0 {
		o.OverlayExpiry = 7 * 24 * time.Hour
	}
	if o.DetailsBytes == 0 {
		o.DetailsBytes = 16 << 20
	}
	if o.ProfilesCached == 0 {
		o.ProfilesCached = 1 << 13
	}
	if o.Logger == nil {
		o.Logger = discard()
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the directory of user data: %w", err)
	}
	lock, err := lockDir(o.Dir)
	if err != nil {
		return nil, err
	}
	c := &Cache{opts: o, lock: lock, starts: countStart(o.Dir)}
	c.details.init(o.DetailsBytes)
	c.profiles.init(o.ProfilesCached)
	for _, kind := range Kinds {
		d, err := c.load(kind)
		if err != nil {
			for _, d := range c.datasets {
				if d.disk.file != nil {
					_ = d.disk.file.db.Close() // nothing was written
				}
			}
			_ = lock.Close()
			return nil, err
		}
		c.datasets = append(c.datasets, d)
	}
	c.users = c.datasets[0]
	for _, d := range c.datasets[1:] {
		c.publish(d)
	}
	c.warnSpace()
	ctx, stop := context.WithCancel(context.Background())
	c.stop = stop
	for _, d := range c.datasets {
		c.done.Go(func() { d.write(ctx) })
	}
	c.done.Go(func() { c.maintain(ctx) })
	return c, nil
}

// Options tunes a Cache. Every zero field but Dir means the default stated on it.
type Options struct {
	// Dir is where the files are. It is made, for this user alone, if it does not exist. Required.
	Dir string

	// Guard is the shrink guard of all datasets.
	Guard GuardOptions
	// OverlayExpiry is how long a removal is held back at most. Zero means seven days.
	OverlayExpiry time.Duration

	// GroupChanges and GroupDelay say when changes are written: after so many, or so long after the first.
	// Zero means 500 and 250 ms.
	GroupChanges int
	GroupDelay   time.Duration
	// CheckpointEvery is how old a file gets before it is written anew. Zero means 24 hours.
	CheckpointEvery time.Duration

	// DetailsBytes bounds the memory in which settings of variable size are kept merged, for devices that ask
	// again; 550 bytes for one that has rules and nothing else. Zero means 16 MiB.
	DetailsBytes int64

	// ProfilesCached is how many resolved profiles are kept for devices that ask again and again; 500 bytes
	// each. Zero means 8,192. It is rounded up to a power of two.
	ProfilesCached int

	// Program is noted in the files, for people.
	Program string
	// Logger is told of what needs attention. Nil means nobody is.
	Logger *slog.Logger

	// fault is called before each step of writing, by name; its error stands for the disk's. For tests.
	fault func(step string) error
}

// A Cache holds the datasets of a resolver. It is safe for concurrent use.
type Cache struct {
	opts     Options
	lock     *os.File
	starts   int
	datasets []*Dataset // in order of Kinds
	users    *Dataset

	catalogue atomic.Pointer[Catalogue]
	config    atomic.Pointer[ConfigSnapshot]
	secrets   atomic.Pointer[SecretsSnapshot]
	details   detailsCache
	profiles  profileCache
	serial    uint64 // of the newest catalogue; under the lock of its dataset

	recovered atomic.Uint64

	stop  context.CancelFunc
	done  sync.WaitGroup
	close sync.Once
}

// Dataset returns a dataset. It panics if there is no such kind.
func (c *Cache) Dataset(k Kind) *Dataset {
	return c.datasets[slices.Index(Kinds, k)]
}

// Catalogue returns the present catalogue.
func (c *Cache) Catalogue() *Catalogue { return c.catalogue.Load() }

// Config returns the present configuration of regions and flags.
func (c *Cache) Config() *ConfigSnapshot { return c.config.Load() }

// Secrets returns the present secrets.
func (c *Cache) Secrets() *SecretsSnapshot { return c.secrets.Load() }

// RecoveredPanics returns how often bbolt, or its memory, has failed under the writer since Open.
func (c *Cache) RecoveredPanics() uint64 { return c.recovered.Load() }

// Ready notes that the process has become ready with this data. A start that follows two without it does
// not trust the newest file.
func (c *Cache) Ready() error { return writeStarts(c.opts.Dir, 0) }

// Close writes what is not yet on disk and lets go of the directory. Lookups go on answering. The error says
// what could not be written.
func (c *Cache) Close() error {
	var err error
	c.close.Do(func() {
		for _, d := range c.datasets {
			d.mu.Lock()
			d.disk.close(d)
			d.mu.Unlock()
		}
		c.stop()
		c.done.Wait()
		for _, d := range c.datasets {
			d.mu.Lock()
			d.disk.closed = true
			if d.disk.failing != nil {
				err = errors.Join(err, fmt.Errorf("%s: not on disk: %w", d.kind, d.disk.failing))
			}
			d.disk.advance()
			d.mu.Unlock()
		}
		err = errors.Join(err, c.lock.Close())
	})
	return err
}

// publish makes a new snapshot of a small dataset. d.mu is held, or d is not yet known to others.
func (c *Cache) publish(d *Dataset) {
	d.changed = false
	switch d.kind {
	case CatalogueKind:
		cat := newCatalogue(d.revision, d.decoded, c.catalogue.Load())
		c.serial++
		cat.serial = c.serial
		c.catalogue.Store(cat)
	case Config:
		c.config.Store(newConfig(d.revision, d.decoded))
	case Secrets:
		c.secrets.Store(newSecrets(d.revision, d.decoded))
	}
}

// maintain does what no change brings about.
func (c *Cache) maintain(ctx context.Context) {
	ticker := time.NewTicker(10 * time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		for _, d := range c.datasets {
			d.expire(clock.Wall())
		}
		// Memory that compaction has left is unmapped when the collector finds its handles. With a small
		// heap that may be minutes away.
		if retired := offheap.Retired(); retired > 32<<20 && retired > offheap.Mapped()/16 {
			runtime.GC()
		}
	}
}

func (c *Cache) fault(step string) error {
	if c.opts.fault == nil {
		return nil
	}
	return c.opts.fault(step)
}

func (c *Cache) newDataset(kind Kind) *Dataset {
	d := &Dataset{
		kind: kind, cache: c, store: store.New(), tree: NewTree(),
		asOf: make(map[uint16]uint64), guard: newGuard(c.opts.Guard), overlay: make(map[string]*overlayEntry),
		decoded: make(map[string]*catalogueRecord), listPeaks: make(map[string]listPeak),
		disk: disk{wakeup: make(chan struct{}, 1), progress: make(chan struct{})},
	}
	if kind == Users {
		d.users = newUserIndex(d.store)
	}
	return d
}

// lockDir takes the directory for this process.
func lockDir(dir string) (*os.File, error) {
	path := filepath.Join(dir, "usercache.lock")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("locking the directory of user data: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("user data in %s is in use by another process; give each its own directory", dir)
		}
		return nil, fmt.Errorf("locking %s: %w", path, err)
	}
	return f, nil
}

// countStart returns how many starts in a row have not become ready, and counts this one. What cannot be
// read or written counts as nothing: it must not keep a resolver from starting.
func countStart(dir string) int {
	b, _ := os.ReadFile(filepath.Join(dir, "usercache.starts"))
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || n < 0 {
		n = 0
	}
	_ = writeStarts(dir, n+1)
	return n
}

func writeStarts(dir string, n int) error {
	path := filepath.Join(dir, "usercache.starts")
	if err := os.WriteFile(path+".tmp", []byte(strconv.Itoa(n)+"\n"), 0o600); err != nil {
		return fmt.Errorf("counting starts: %w", err)
	}
	return os.Rename(path+".tmp", path)
}

// path returns the name of a generation of a dataset.
func (c *Cache) path(kind Kind, generation uint64) string {
	return filepath.Join(c.opts.Dir, fmt.Sprintf("%s-%08d.db", kind, generation))
}

// generations returns the numbers of a dataset's files, newest first.
func (c *Cache) generations(kind Kind) ([]uint64, error) {
	entries, err := os.ReadDir(c.opts.Dir)
	if err != nil {
		return nil, fmt.Errorf("reading the directory of user data: %w", err)
	}
	var list []uint64
	for _, e := range entries {
		name, ok := strings.CutPrefix(e.Name(), string(kind)+"-")
		if !ok {
			continue
		}
		if name, ok = strings.CutSuffix(name, ".db"); !ok {
			continue
		}
		if n, err := strconv.ParseUint(name, 10, 64); err == nil {
			list = append(list, n)
		}
	}
	slices.Sort(list)
	slices.Reverse(list)
	return list, nil
}

// removeOld removes the files of a dataset before the predecessor of a generation, except base.
func (c *Cache) removeOld(kind Kind, generation, base uint64) {
	list, err := c.generations(kind)
	if err != nil {
		c.opts.Logger.Warn("removing old user data", "error", err)
		return
	}
	kept := 0
	for _, g := range list {
		if g > generation || g == base {
			continue
		}
		if kept++; kept <= 2 {
			continue
		}
		if err := os.Remove(c.path(kind, g)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			c.opts.Logger.Warn("removing old user data", "error", err)
		}
	}
}

// needSpace fails if a directory has not so many bytes left.
func needSpace(dir string, need uint64) error {
	free, err := freeSpace(dir)
	if err == nil && free < need {
		return fmt.Errorf("%s has %d MiB left, %d MiB are needed", dir, free>>20, need>>20)
	}
	return nil // if the system cannot say, writing will
}

func freeSpace(dir string) (uint64, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, err
	}
	return s.Bavail * uint64(s.Bsize), nil
}

// warnSpace says so if the disk is smaller than three times the data: the file, its predecessor, and the
// checkpoint being written.
func (c *Cache) warnSpace() {
	var size, have uint64
	for _, d := range c.datasets {
		size += d.size
	}
	if free, err := freeSpace(c.opts.Dir); err == nil {
		have = free
	} else {
		return
	}
	entries, _ := os.ReadDir(c.opts.Dir)
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			have += uint64(info.Size())
		}
	}
	if have < 3*size {
		c.opts.Logger.Warn("the disk is too small for the user data; checkpoints may fail",
			"dir", c.opts.Dir, "have_mib", have>>20, "need_mib", 3*size>>20)
	}
}
