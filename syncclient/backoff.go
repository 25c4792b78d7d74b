package syncclient

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"math/big"
	"os"
	"sync"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
)

const (
	// firstWait is what the wait after a first failure is drawn from; it doubles with each further one.
	firstWait = 500 * time.Millisecond
	// maxUnreachable bounds it for an address: asking costs the service a handshake, and when it is back it
	// should not take long to be found.
	maxUnreachable = 15 * time.Second
	// maxWrong bounds it for a dataset whose service refuses, or is wrong: asking may cost a transfer.
	maxWrong = 5 * time.Minute
	// maxRetryAfter bounds what a service may demand.
	maxRetryAfter = time.Hour
	// maxSpread is what is added at most to what a service demands: it keeps a place in the order for some
	// seconds only.
	maxSpread = 5 * time.Second
)

func wall() time.Time { return clock.Wall() }

// backoffs is when what may be tried again. Keys are chosen by callers. Waits are kept in a file, as dates
// with their lengths: whatever the clock has done meanwhile, none gets longer than it was.
type backoffs struct {
	path string
	rand io.Reader
	log  *slog.Logger

	saving sync.Mutex // held while the file is written; taken before mu

	mu      sync.Mutex // guards entries; held for memory work only
	entries map[string]backoffEntry
}

// A backoffEntry is a value.
type backoffEntry struct {
	Failures int       `json:"failures"`
	Until    time.Time `json:"until"`
	Delay    string    `json:"delay"`
	Why      string    `json:"why"`

	until, failedAt clock.Instant
}

type backoffFile struct {
	Version int                     `json:"version"`
	Entries map[string]backoffEntry `json:"entries"`
}

// loadBackoffs reads the file. One that cannot be read is as good as none: it costs some politeness.
func loadBackoffs(path string, random io.Reader, log *slog.Logger) *backoffs {
	b := &backoffs{path: path, rand: random, log: log, entries: map[string]backoffEntry{}}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return b
	}
	if err == nil {
		err = b.decode(data, clock.Wall(), clock.Elapsed())
	}
	if err != nil {
		log.Warn("waits of before the restart are forgotten", "file", path, "error", err)
	}
	return b
}

func (b *backoffs) decode(data []byte, date time.Time, now clock.Instant) error {
	var f backoffFile
	if err := json.Unmarshal(data, &f); err != nil {
		return err
	}
	if f.Version != 1 {
		return errors.New("unknown version")
	}
	for key, e := range f.Entries {
		delay, err := time.ParseDuration(e.Delay)
		if err != nil || e.Failures < 0 {
			return errors.New("damaged entry " + key)
		}
		delay = min(max(delay, 0), maxRetryAfter+maxSpread)
		e.until = now.Add(min(max(e.Until.Sub(date), 0), delay))
		e.Failures = min(e.Failures, 64)
		b.entries[key] = e
	}
	return nil
}

// ready returns when the things of all keys may be tried.
func (b *backoffs) ready(keys ...string) clock.Instant {
	b.mu.Lock()
	defer b.mu.Unlock()
	var at clock.Instant
	for _, key := range keys {
		at = max(at, b.entries[key].until)
	}
	return at
}

// fail notes a failure of an attempt that began at started, and returns how many there were in a row and
// how long to wait. Of attempts under way at once only the first counts.
func (b *backoffs) fail(key string, started clock.Instant, demanded, most time.Duration, why string) (failures int, wait time.Duration) {
	now := clock.Elapsed()
	b.mu.Lock()
	e := b.entries[key]
	if e.Failures > 0 && started <= e.failedAt && now.Before(e.until) && demanded == 0 {
		b.mu.Unlock()
		return e.Failures, e.until.Sub(now)
	}
	if e.Failures < 64 {
		e.Failures++
	}
	if demanded > 0 {
		demanded = min(demanded, maxRetryAfter)
		wait = demanded + b.random(min(demanded/4, maxSpread))
	} else {
		d := min(firstWait<<min(e.Failures-1, 20), most)
		wait = d/2 + b.random(d/2)
	}
	e.failedAt, e.until = now, now.Add(wait)
	e.Until, e.Delay, e.Why = clock.Wall().Add(wait), wait.String(), why
	b.entries[key] = e
	b.mu.Unlock()
	b.save()
	return e.Failures, wait
}

// succeed forgets failures.
func (b *backoffs) succeed(keys ...string) {
	changed := false
	b.mu.Lock()
	for _, key := range keys {
		if _, ok := b.entries[key]; ok {
			delete(b.entries, key)
			changed = true
		}
	}
	b.mu.Unlock()
	if changed {
		b.save()
	}
}

// failing returns what is known of a key.
func (b *backoffs) failing(key string) backoffEntry {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.entries[key]
}

func (b *backoffs) save() {
	b.saving.Lock()
	defer b.saving.Unlock()
	b.mu.Lock()
	data, err := json.MarshalIndent(backoffFile{1, b.entries}, "", "\t")
	b.mu.Unlock()
	if err == nil {
		err = replaceFile(b.path, data)
	}
	if err != nil {
		b.log.Warn("waits would not survive a restart", "file", b.path, "error", err)
	}
}

// random returns a duration in [0, n).
func (b *backoffs) random(n time.Duration) time.Duration {
	if n <= 0 {
		return 0
	}
	r, err := rand.Int(b.rand, big.NewInt(int64(n)))
	if err != nil {
		return n / 2 // a broken source must not break the wait
	}
	return time.Duration(r.Int64())
}

// replaceFile writes a small file so that a reader finds the old content or the new. It does not survive
// a loss of power for certain.
func replaceFile(path string, data []byte) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
