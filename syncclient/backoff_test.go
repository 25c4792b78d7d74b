package syncclient

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache"
)

func TestBackoffs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "backoff.json")
	synctest.Test(t, func(t *testing.T) {
		load := func() *backoffs { return loadBackoffs(path, rand.Reader, slog.New(slog.DiscardHandler)) }
		b := load()
		for n := 1; n <= 100; n++ {
			time.Sleep(time.Minute)
			failures, wait := b.fail("a", clock.Elapsed(), 0, time.Minute, "why")
			most := min(firstWait<<min(n-1, 20), time.Minute)
			if failures != min(n, 64) || wait < most/2 || wait > most {
				t.Fatalf("failure %d waits %v, want %v to %v", failures, wait, most/2, most)
			}
		}
		// Two that began before the first had failed are one failure.
		started := clock.Elapsed()
		b.fail("b", started, 0, time.Minute, "why")
		if n, _ := b.fail("b", started, 0, time.Minute, "why"); n != 1 {
			t.Errorf("%d failures", n)
		}
		if _, wait := b.fail("c", started, 10*time.Second, time.Minute, "why"); wait < 10*time.Second || wait > 12500*time.Millisecond {
			t.Errorf("told 10 s, waits %v", wait)
		}
		if _, wait := b.fail("d", started, 1000*time.Hour, time.Minute, "why"); wait > maxRetryAfter+maxSpread {
			t.Errorf("waits %v", wait)
		}
		c := load()
		for _, key := range []string{"a", "b", "c", "d", "none"} {
			if x, y := b.ready(key), c.ready(key); x.Sub(y).Abs() > time.Microsecond && max(x, y) > clock.Elapsed() {
				t.Errorf("%s: ready at %v, after a restart at %v", key, x, y)
			}
		}
		b.succeed("a")
		if f := load().failing("a"); f.Failures != 0 {
			t.Error("what has succeeded fails after a restart")
		}
	})
}

func FuzzBackoffFile(f *testing.F) {
	f.Add([]byte(`{"version":1,"entries":{"127.0.0.1:8054":{"failures":3,"until":"2026-01-01T00:00:10Z","delay":"15s","why":"refused"}}}`))
	f.Add([]byte(`{"version":1,"entries":{"x":{"failures":9999999,"until":"9999-01-01T00:00:10Z","delay":"99999h"}}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		b := &backoffs{entries: map[string]backoffEntry{}}
		date := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		if b.decode(data, date, 1000) != nil {
			return
		}
		for key, e := range b.entries {
			if wait := b.ready(key).Sub(1000); wait < 0 || wait > maxRetryAfter+maxSpread || e.Failures < 0 || e.Failures > 64 {
				t.Errorf("%q waits %v after %d failures, whatever the clock", key, wait, e.Failures)
			}
		}
	})
}

func FuzzSegment(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte("(\xb5/\xfd\x04\x00\x19\x00\x00\x02(\x01\x85\xa5\x1e\x9d"))
	f.Fuzz(func(t *testing.T, data []byte) {
		_ = readSegment(bytes.NewReader(data), 1<<20, func(d *usercache.BucketData) error {
			if int(d.Bucket) >= usercache.Buckets {
				t.Error(d.Bucket)
			}
			return nil
		})
	})
}

func TestNew(t *testing.T) {
	cache, err := usercache.Open(usercache.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer cache.Close()
	dial := func(context.Context, string) (net.Conn, error) { return nil, net.ErrClosed }
	tests := []struct {
		what    string
		address string
		tls     *tls.Config
		dial    func(context.Context, string) (net.Conn, error)
		ok      bool
	}{
		{"loopback", "127.0.0.1:8054", nil, nil, true},
		{"loopback, IPv6", "[::1]:8054", nil, nil, true},
		{"unix", "unix:/run/sluice.sock", nil, nil, true},
		{"in this process", "inprocess:x", nil, dial, true},
		{"in this process without Dial", "inprocess:x", nil, nil, false},
		{"beyond loopback", "192.0.2.1:8054", nil, nil, false},
		{"beyond loopback, mapped", "[::ffff:192.0.2.1]:8054", nil, nil, false},
		{"a name, which may be anywhere", "localhost:8054", nil, dial, false},
		{"beyond loopback by TLS", "service.example:8054", &tls.Config{}, nil, true},
		{"no port", "127.0.0.1", nil, nil, false},
		{"nothing", "", nil, nil, false},
	}
	for _, test := range tests {
		c, err := New(Options{Cache: cache, DataDir: t.TempDir(), Services: []string{test.address}, TLS: test.tls, Dial: test.dial, Node: Node{ID: "n"}})
		if (err == nil) != test.ok {
			t.Errorf("%s: %v", test.what, err)
		}
		if err == nil {
			c.Close() // before Run
			if err := c.Run(t.Context()); err != ErrClosed {
				t.Errorf("Run after Close: %v", err)
			}
		}
	}
}
