//go:build unix

package policy

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-dns/sluice/internal/fulldisk"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/usercache"
)

// On a full disk the index of lists is not kept, which is said once; the lists judge as they should, the file before
// stays as it was, and soon after there is room again it is written, which is said too. It runs in a process of its
// own, because the limit on the size of files that stands for the full disk is the process's.
func TestIndexFullDisk(t *testing.T) {
	if fulldisk.Alone(t) {
		return
	}
	room := func(bytes uint64) { fulldisk.Room(t, bytes) }
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.list("l", 0, "||one.example^")
		path := filepath.Join(t.TempDir(), "filter.index")
		var log logText
		changed := make(chan struct{}, 1)
		start := func() (p *Policy, stop func()) {
			p = New(Options{Key: dnsname.NewKey([16]byte{7}), Users: w.cache, Blob: w.get, Index: path, Changed: changed, Logger: slog.New(slog.NewTextHandler(&log, nil))})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- p.Run(ctx) }()
			return p, func() { cancel(); <-done }
		}
		kept := func() string {
			t.Helper()
			if left, _ := filepath.Glob(path + "?*"); len(left) != 0 {
				t.Errorf("left behind: %v", left)
			}
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			return string(b)
		}
		wait := func(d time.Duration) {
			time.Sleep(d)
			synctest.Wait()
		}
		_, stop := start()
		wait(2 * savePause)
		before := kept()
		w.list("l", 0, "||two.example^")
		for _, bytes := range []uint64{0, 100} { // nothing fits, and the head alone
			room(bytes)
			log.Reset()
			changed <- struct{}{}
			wait(5*saveAgain + savePause)
			if bytes == 0 && (strings.Count(log.String(), "level=ERROR") != 1 || !strings.Contains(log.String(), "file too large")) || bytes > 0 && log.String() != "" {
				t.Errorf("with room for %d bytes: %s", bytes, log.String())
			}
			if kept() != before {
				t.Error("the file changed")
			}
		}
		room(1 << 40)
		wait(saveAgain)
		if kept() == before || strings.Count(log.String(), "\n") != 1 || !strings.Contains(log.String(), "kept again") {
			t.Errorf("with room again: %s", log.String())
		}
		whole := kept()
		wait(5 * saveAgain)
		if kept() != whole || strings.Count(log.String(), "\n") != 1 {
			t.Errorf("once it is written: %s", log.String())
		}
		stop()
		// A start finds it.
		w.mu.Lock()
		clear(w.blobs)
		w.mu.Unlock()
		p, stop := start()
		defer stop()
		if m := p.Missing(); len(m) != 0 || p.Stats().Rules != 1 || p.state.Load().listHash == [usercache.MaxLists][64]byte{} {
			t.Errorf("missing %v, %+v", m, p.Stats())
		}
	})
}

// A logText holds what was logged.
type logText struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logText) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logText) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *logText) Reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b.Reset()
}
