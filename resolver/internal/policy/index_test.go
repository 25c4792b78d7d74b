package policy

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// TestIndexKept restarts a Policy: what has not changed is not compiled again, what has is, what the catalogue
// names but nobody has goes on as it was, and a damaged file costs one line of log.
func TestIndexKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.list("ads", 0, "||one.example^\n-tracker-")
		w.list("more", 1, "||two.example^")
		w.put(usercache.Users, "u", &userv1.User{Settings: &userv1.Settings{Lists: set("ads", "more", "late")}, Devices: []*userv1.Device{{Id: "d"}}})
		path := filepath.Join(t.TempDir(), "index")
		read := 0
		var log bytes.Buffer
		run := func(do func(p *Policy)) {
			t.Helper()
			read = 0
			log.Reset()
			p := New(Options{Key: dnsname.NewKey([16]byte{7}), Users: w.cache, Index: path, Logger: slog.New(slog.NewTextHandler(&log, nil)),
				Blob: func(sum [32]byte) ([]byte, bool) { read++; return w.get(sum) }})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- p.Run(ctx) }()
			do(p)
			cancel()
			<-done
		}
		check := func(when string, p *Policy, blocked string) {
			t.Helper()
			for _, n := range []string{"one.example.", "a-tracker-b.example.", "two.example.", "three.example."} {
				if got := p.Question(w.ask(p, "d", n, "A")); (got.Kind == query.Blocked) != strings.Contains(blocked, n) {
					t.Errorf("%s: %s is %s", when, n, say(got))
				}
			}
		}
		run(func(p *Policy) {
			check("cold", p, "one.example. a-tracker-b.example. two.example.")
			time.Sleep(2 * savePause)
			synctest.Wait()
			if _, err := os.Stat(path); err != nil {
				t.Errorf("nothing was written while it runs: %v", err)
			}
		})
		if read != 2 {
			t.Errorf("the first start read %d lists", read)
		}
		run(func(p *Policy) { check("restarted", p, "one.example. a-tracker-b.example. two.example.") })
		if read != 0 {
			t.Errorf("a restart compiled %d lists again", read)
		}
		// The catalogue goes on: one list is new, and of another nobody has the bytes.
		w.list("late", 2, "||three.example^")
		w.put(usercache.CatalogueKind, "list/ads", &userv1.List{Number: 0, Sha256: bytes.Repeat([]byte{7}, 32)})
		run(func(p *Policy) {
			check("a list more", p, "one.example. a-tracker-b.example. two.example. three.example.")
			if m := p.Missing(); len(m) != 1 || m[0] != "ads" {
				t.Errorf("missing %v", m)
			}
		})
		run(func(p *Policy) {
			check("and again", p, "one.example. a-tracker-b.example. two.example. three.example.")
		})
		if read != 1 {
			t.Errorf("%d lists were looked for, want the missing one alone", read)
		}
		// A damaged file.
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		b[len(b)/2] ^= 1
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		w.list("ads", 0, "||one.example^")
		run(func(p *Policy) { check("damaged", p, "one.example. two.example. three.example.") })
		if n := strings.Count(log.String(), "level=WARN"); n != 1 || !strings.Contains(log.String(), "checksum") || read != 3 {
			t.Errorf("%d warnings, %d lists read: %s", n, read, log.String())
		}
	})
}

// TestZoneActions has a catalogue list that is a policy zone with actions that are no answers.
func TestZoneActions(t *testing.T) {
	w := newWorld(t)
	w.list("zone", 0, "$TTL 60\nd.example CNAME rpz-drop.\nt.example CNAME rpz-tcp-only.\n*.g.example CNAME *.garden.example.\n*.garden.example CNAME *.garden.example.\n")
	w.put(usercache.Users, "u", &userv1.User{Settings: &userv1.Settings{Lists: set("zone")}, Devices: []*userv1.Device{{Id: "d"}}})
	p := w.policy()
	for name, want := range map[string]query.VerdictKind{"d.example.": query.Dropped, "t.example.": query.Truncated, "x.example.": query.Pass, "x.garden.example.": query.Pass,
		"x.g.example.": query.Redirected, strings.Repeat("a.", 119) + "g.example.": query.Synthesised} {
		if got := p.Question(w.ask(p, "d", name, "A")); got.Kind != want {
			t.Errorf("%s is %s", name, say(got))
		}
	}
	if got := p.Question(w.ask(p, "d", "x.g.example.", "A")); got.Target.String() != "x.g.example.garden.example." {
		t.Errorf("below a garden: %s", say(got))
	}
}
