//go:build unix

package resolver_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/internal/fulldisk"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// On a full disk the cache is not kept, of which one line tells each time it is tried; clients notice nothing, the
// file before stays as it was, and with room again the next try succeeds. It runs in a process of its own, because
// the limit on the size of files that stands for the full disk is the process's.
func TestFullDisk(t *testing.T) {
	if fulldisk.Alone(t) {
		return
	}
	file := filepath.Join(t.TempDir(), "rrsets.cache")
	room := func(bytes uint64) { fulldisk.Room(t, bytes) }
	synctest.Test(t, func(t *testing.T) {
		sim, err := siminternet.New(clock.Wall(), cacheZones()...)
		if err != nil {
			t.Fatal(err)
		}
		var log guarded
		h := &history{newLabIn(t, sim, func(o *resolver.Options) {
			o.Cache.File, o.Logger = file, slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
		}), time.Now()}
		defer h.stop()
		serves := func() {
			t.Helper()
			h.is(h.get("www.signed.example.", dns.TypeA, nil), "NOERROR 198.51.100.20", 1, 3600)
		}
		kept := func() time.Time {
			t.Helper()
			if left, _ := filepath.Glob(file + "?*"); len(left) != 0 {
				t.Errorf("left behind: %v", left)
			}
			i, err := os.Stat(file)
			if err != nil {
				t.Fatal(err)
			}
			return i.ModTime()
		}
		serves()
		h.at(31 * time.Minute)
		serves()
		whole := kept()
		for n, bytes := range []uint64{0, 100} { // nothing fits, and the head alone
			room(bytes)
			h.at(time.Duration(61+30*n) * time.Minute)
			serves()
			if kept() != whole || strings.Count(log.String(), "\n") != n+1 || !strings.Contains(log.String(), "file too large") {
				t.Errorf("room for %d bytes: %s", bytes, log.String())
			}
		}
		room(1 << 40)
		h.at(121 * time.Minute)
		serves()
		if kept() == whole || strings.Count(log.String(), "\n") != 2 {
			t.Errorf("with room again: %s", log.String())
		}
	})
}

// A guarded text is written by one goroutine and read by another.
type guarded struct {
	mu   sync.Mutex
	text strings.Builder
}

func (g *guarded) Write(b []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.text.Write(b)
}

func (g *guarded) String() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.text.String()
}
