package node

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/sluice-dns/sluice/usercache"
)

// What the shrink guard does is said when it begins and when it ends, not at each change in between.
func TestGuardWatch(t *testing.T) {
	log := new(lines)
	g := guardWatch{}
	entries := []usercache.OverlayEntry{
		{Key: "list/a", Reason: usercache.BadRecord, Detail: "it is broken"},
		{Key: "list/ads", Reason: usercache.HeldRemoval, Detail: "5 rules, were 1000", Until: time.Unix(1e9, 0)},
	}
	look := func(kind usercache.Kind, held int) {
		g.look(slog.New(slog.NewTextHandler(log, nil)), usercache.DatasetStatus{Kind: kind, Held: held}, func() []usercache.OverlayEntry { return entries })
	}
	look(usercache.Users, 0)
	look(usercache.CatalogueKind, 0)
	if n := log.with("guard"); n != 0 {
		t.Errorf("%d lines though nothing is held", n)
	}
	look(usercache.CatalogueKind, 1)
	look(usercache.Users, 0)
	look(usercache.CatalogueKind, 2)
	log.mu.Lock()
	text := log.b.String()
	log.mu.Unlock()
	for _, part := range []string{"level=WARN", "dataset=catalogue", "records=1", "list/ads: 5 rules, were 1000", "until=2001-09-09T01:46:40Z", "sluicectl sync accept --kind catalogue", "--fleet"} {
		if !strings.Contains(text, part) {
			t.Errorf("nothing of %q in %s", part, text)
		}
	}
	if strings.Contains(text, "broken") || log.with("guard") != 1 {
		t.Errorf("not one line about what is held: %s", text)
	}
	look(usercache.CatalogueKind, 0)
	look(usercache.CatalogueKind, 0)
	if n := log.with("holds nothing any more"); n != 1 {
		t.Errorf("%d lines about its end", n)
	}
	look(usercache.CatalogueKind, 1)
	if n := log.with("level=WARN"); n != 1 {
		t.Errorf("%d lines when it begins again", n)
	}
}
