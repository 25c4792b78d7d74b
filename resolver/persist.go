package resolver

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/replace"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
)

// This file keeps RRsets while the process does not run.
//
// They are written when the process stops and every saveEvery, to a new file that takes the old one's place:
// those most used first, within maxSaved bytes and maxSaving. What a crash or a full disk leaves of it is found
// by its checksums, so it is not forced to the disk. A start reads it in the background while it serves: what is
// known already is never replaced, what has ended is left out, and everything is Unchecked (package rrcache says
// why). Settled answers are not kept: they can be made again. What is purged stays purged: by blocks that are read
// later, and after a crash, for the file is then written anew soon.
//
// Names tell what people are interested in: the file is for its owner alone.

const (
	saveEvery = 30 * time.Minute
	// savePurged is how long the file holds what was purged, should the process crash.
	savePurged = 5 * time.Minute
	// maxSaved is a few million names, which are nearly all that anybody asks for twice.
	maxSaved = 256 << 20
	// maxSaving bounds what a stop waits for.
	maxSaving = 3 * time.Second
	// maxLoading bounds how long reading competes with serving. What is read later is fetched sooner.
	maxLoading = time.Minute
)

// savedMagic begins the file. What follows is the fingerprint of what its data depends on besides time, and the
// dump.
const savedMagic = "sluice cache 1\n"

// run keeps the engine's house until ctx ends: the caches are loaded, saved, and claims given back.
func (e *engine) run(ctx context.Context, log *slog.Logger) {
	var loaded chan bool
	if e.file != "" {
		loaded = make(chan bool)
		go func() { loaded <- e.load(ctx, log) }()
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	whole := false
	next := clock.Elapsed().Add(saveEvery)
	purges := e.rrsets.Purges() // by when the file was written
	save := func() {
		purges = e.rrsets.Purges()
		e.save(log)
	}
	for {
		select {
		case whole = <-loaded:
			loaded = nil
		case <-tick.C:
			now := clock.Elapsed()
			e.claims.release(now)
			if e.rrsets.Purges() != purges {
				next = min(next, now.Add(savePurged))
			}
			if whole && !now.Before(next) {
				save()
				next = now.Add(saveEvery)
			}
		case <-ctx.Done():
			if loaded != nil {
				whole = <-loaded
			}
			// Of a file that was not read to its end the rest must not be lost, unless it holds what was purged.
			if whole || e.file != "" && e.rrsets.Purges() != purges {
				save()
			}
			return
		}
	}
}

// fingerprint is of what decides where data comes from: from other roots or other zones it would be wrong.
func (e *engine) fingerprint() [sha256.Size]byte {
	h := sha256.New()
	io.WriteString(h, e.roots)
	for _, z := range e.zones.texts() {
		fmt.Fprintln(h, z)
	}
	return [sha256.Size]byte(h.Sum(nil))
}

// texts describes the zones, in an order of their own.
func (s *zones) texts() []string {
	s.mu.Lock()
	now := s.now // replaced as a whole
	s.mu.Unlock()
	var texts []string
	for k, c := range now {
		t := fmt.Sprintf("%v %d %v %v", k.name, k.view, c.Servers, c.First)
		if c.Forward != nil {
			for _, u := range c.Forward.Upstreams {
				t += fmt.Sprintf(" %v", u)
			}
		}
		texts = append(texts, t)
	}
	slices.Sort(texts)
	return texts
}

// load reads the file, and reports whether all of it has been taken in or given up for good.
func (e *engine) load(ctx context.Context, log *slog.Logger) bool {
	info, err := os.Stat(e.file)
	if errors.Is(err, fs.ErrNotExist) {
		return true // the first start
	}
	if err == nil && !info.Mode().IsRegular() { // a pipe might never answer
		err = fmt.Errorf("%s is not a regular file", e.file)
	}
	var f *os.File
	if err == nil {
		f, err = os.Open(e.file)
	}
	if err != nil {
		log.Warn("the cache that was kept cannot be read and is ignored", "err", err)
		return true
	}
	defer f.Close()
	var head [len(savedMagic) + sha256.Size]byte
	if _, err := io.ReadFull(f, head[:]); err != nil || string(head[:len(savedMagic)]) != savedMagic {
		log.Warn("the cache that was kept is damaged and is ignored", "file", e.file)
		return true
	}
	begun := clock.Elapsed()
	last := begun
	first := true
	limit, others := errors.New("time is up"), errors.New("other zones")
	n, skipped, err := e.rrsets.LoadAll(reader(func(b []byte) (int, error) {
		now := clock.Elapsed()
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		// Zones that change from here on purge what is loaded of them.
		if first && [sha256.Size]byte(head[len(savedMagic):]) != e.fingerprint() {
			return 0, others
		}
		first = false
		if now.Sub(begun) > maxLoading {
			return 0, limit
		}
		time.Sleep(min(now.Sub(last), 10*time.Millisecond)) // half of a processor is for this, the rest for clients
		last = clock.Elapsed()
		return f.Read(b)
	}), begun, clock.Wall())
	switch {
	case ctx.Err() != nil:
		return false
	case errors.Is(err, others):
		log.Info("the cache that was kept is not used: root hints, stub or forward zones were others", "file", e.file)
	case errors.Is(err, rrcache.ErrPurged):
		log.Info("the rest of the cache that was kept is not used", "reason", err, "loaded", n)
	case err != nil && !errors.Is(err, limit):
		log.Warn("the cache that was kept is not used, or not beyond a damaged place", "file", e.file, "err", err, "loaded", n)
	default:
		log.Info("the cache that was kept is loaded", "entries", n, "skipped", skipped, "took", clock.Elapsed().Sub(begun))
	}
	return true
}

// save writes the file.
func (e *engine) save(log *slog.Logger) {
	if err := e.write(); err != nil {
		log.Warn("keeping the cache for the next start; the file before it stays", "err", err)
	}
}

func (e *engine) write() error {
	return replace.File(e.file, func(f *os.File) error {
		print := e.fingerprint()
		if _, err := f.Write(append([]byte(savedMagic), print[:]...)); err != nil {
			return err
		}
		begun := clock.Elapsed()
		enough := func(written int64) bool { return written >= maxSaved || clock.Elapsed().Sub(begun) > maxSaving }
		_, err := e.rrsets.DumpUntil(f, begun, clock.Wall(), enough)
		return err
	})
}

// A reader is a function that reads.
type reader func([]byte) (int, error)

func (r reader) Read(b []byte) (int, error) { return r(b) }
