package policy

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// remove takes a record away.
func (w *world) remove(k usercache.Kind, key string) { w.putAll(k, map[string]proto.Message{key: nil}) }

// A number is given again when what had it is gone: whoever is judged by the new list, service or engine is never
// judged by the old one, nor the other way around, whichever of the profile and the snapshot is older.
func TestNumbersGivenAgain(t *testing.T) {
	w := newWorld(t)
	service := func(id string) {
		w.put(usercache.CatalogueKind, "service/"+id, &userv1.Service{Rules: []string{"||" + id + ".example^"}})
	}
	engine := func(id string) {
		w.put(usercache.CatalogueKind, "safesearch/"+id, &userv1.SafeSearch{Rewrites: []*userv1.Rewrite{{Name: id + ".example", Records: []string{"A 198.51.100.1"}}}})
	}
	w.list("old", 0, "||old.example^")
	service("old-service")
	engine("mid")
	w.put(usercache.CatalogueKind, "category/kind", &userv1.Category{Lists: []string{"old"}})
	window := []*userv1.Window{{Days: 0x7f, From: 0, To: 1440}}
	for _, id := range []string{"old", "new"} {
		w.put(usercache.Users, id, &userv1.User{Devices: []*userv1.Device{{Id: id}}, Settings: &userv1.Settings{
			Lists: set(id), Services: set(id + "-service"), SafeSearch: set(id+"-engine", "mid")}})
		w.put(usercache.Users, id+"-timed", &userv1.User{Devices: []*userv1.Device{{Id: id + "-timed"}}, Settings: &userv1.Settings{
			SafeSearch: set("mid"), Schedules: &userv1.ScheduleSet{Values: []*userv1.Schedule{{Id: "s", Windows: window, Services: []string{id + "-service"}, Lists: []string{id},
				Action: userv1.ScheduleAction_SCHEDULE_ACTION_BLOCK}}}}})
	}
	p := w.policy()
	// say is what a query made now is told by the snapshot of now.
	check := func(when, device, name, want string) {
		t.Helper()
		if got := say(p.Question(w.ask(p, device, name, "A"))); got != want {
			t.Errorf("%s: %s asks %s: %s, want %s", when, device, name, got, want)
		}
	}
	for _, who := range []string{"old", "old-timed"} {
		check("at first", who, "old.example.", "blocked by list mode 0")
		check("at first", who, "old-service.example.", "blocked by service mode 0")
		check("at first", who, "mid.example.", "synthesised by safe search NOERROR 198.51.100.1")
	}
	before := map[string]any{}
	for _, who := range []string{"old", "old-timed"} {
		for _, n := range []string{"new.example.", "new-service.example.", "mid.example."} {
			before[who+" "+n] = w.ask(p, who, n, "A")
		}
	}
	text := "||new.example^"
	w.remove(usercache.CatalogueKind, "list/old")
	w.remove(usercache.CatalogueKind, "service/old-service")
	w.put(usercache.CatalogueKind, "list/new", &userv1.List{Number: 0, Sha256: w.blob(text), Size: uint64(len(text))})
	service("new-service")
	engine("a-engine") // before the other in the order of ids
	engine("z-engine")

	for _, who := range []string{"new", "new-timed"} { // the profile is newer than the snapshot
		check("not yet compiled", who, "old.example.", "pass by nothing")
		check("not yet compiled", who, "old-service.example.", "pass by nothing")
		check("not yet compiled", who, "mid.example.", "synthesised by safe search NOERROR 198.51.100.1")
	}
	p.Update()
	for _, who := range []string{"new", "new-timed"} {
		check("compiled", who, "new.example.", "blocked by list mode 0")
		check("compiled", who, "old.example.", "pass by nothing")
		check("compiled", who, "new-service.example.", "blocked by service mode 0")
		check("compiled", who, "mid.example.", "synthesised by safe search NOERROR 198.51.100.1")
		check("compiled", who, "a-engine.example.", "pass by nothing")
	}
	check("compiled", "old", "new.example.", "pass by nothing")
	for what, q := range before { // the profile is older
		q := q.(*query.Query)
		want := "pass by nothing"
		if q.Question.Name == dnsname.MustParse("mid.example.") {
			want = "synthesised by safe search NOERROR 198.51.100.1"
		}
		if got := say(p.Question(q)); got != want {
			t.Errorf("asked before: %s: %s, want %s", what, got, want)
		}
	}
}

// A query that began before a number was given again is not judged by the list that has it now, not even when that has
// been merged under it; what else it is judged by is judged on.
func TestNumberGivenAgainAndMerged(t *testing.T) {
	w := newWorld(t)
	w.list("old", 0, "||old.example^")
	w.list("other", 1, "||other.example^")
	w.list("threat", 2, "||threat.example^")
	w.put(usercache.CatalogueKind, "category/kind", &userv1.Category{Lists: []string{"threat"}, Threat: true})
	w.put(usercache.Users, "u", &userv1.User{Settings: &userv1.Settings{Lists: set("old", "other"), Categories: set("kind")}, Devices: []*userv1.Device{{Id: "d"}}})
	p := w.policy()
	names := []string{"old", "new", "other", "threat", "danger"}
	early := map[string]*query.Query{}
	for _, n := range names {
		early[n] = w.ask(p, "d", n+".example.", "A")
	}
	for round := range 2 { // what was merged once is merged again
		records := map[string]proto.Message{"list/old": nil, "list/threat": nil}
		for n, id := range map[uint32]string{0: "new", 2: "danger"} {
			text := fmt.Sprintf("||%s.example^\n||round%d.example^", id, round)
			records["list/"+id] = &userv1.List{Number: n, Sha256: w.blob(text), Size: uint64(len(text))}
		}
		records["category/kind"] = &userv1.Category{Lists: []string{"danger"}, Threat: true}
		w.putAll(usercache.CatalogueKind, records)
		p.Update()
		p.merge()
		for _, n := range names {
			want := "pass by nothing"
			if n == "other" {
				want = "blocked by list mode 0"
			}
			if got := say(p.Question(early[n])); got != want {
				t.Errorf("round %d, %s, asked before: %s, want %s", round, n, got, want)
			}
			q := early[n]
			a := answer(t, q, n+".example. CNAME new.example.\nnew.example. CNAME danger.example.\ndanger.example. A 203.0.113.1")
			if got := say(p.Answer(q, &a, query.Verdict{})); got != "pass by nothing" {
				t.Errorf("round %d, %s, answered after: %s", round, n, got)
			}
			want = map[string]string{"other": "blocked by list mode 0", "danger": "blocked by threat list mode 0"}[n]
			if got := say(p.Question(w.ask(p, "d", n+".example.", "A"))); want != "" && got != want {
				t.Errorf("round %d, %s: %s, want %s", round, n, got, want)
			}
		}
	}
}

// A list that is given the number of another, and whose bytes are not here yet, matches nothing until they are:
// neither at once nor after a restart what the other one's did.
func TestNumberGivenAgainWithoutBytes(t *testing.T) {
	w := newWorld(t)
	w.list("old", 0, "||old.example^")
	w.put(usercache.Users, "u", &userv1.User{Settings: &userv1.Settings{Lists: set("new")}, Devices: []*userv1.Device{{Id: "d"}}})
	index := filepath.Join(t.TempDir(), "index")
	start := func() *Policy {
		return New(Options{Key: dnsname.NewKey([16]byte{7}), Users: w.cache, Blob: w.get, Index: index, Logger: slog.New(slog.DiscardHandler)})
	}
	p := start()
	p.saveIndex()
	w.remove(usercache.CatalogueKind, "list/old")
	w.put(usercache.CatalogueKind, "list/new", &userv1.List{Number: 0, Sha256: make([]byte, 32)})
	p.Update()
	for _, p := range []*Policy{p, start()} {
		if got := say(p.Question(w.ask(p, "d", "old.example.", "A"))); got != "pass by nothing" {
			t.Errorf("old.example.: %s", got)
		}
		if m := p.Missing(); len(m) != 1 {
			t.Errorf("missing %v", m)
		}
	}
}

// A query is judged from start to end by the snapshot it began with: what a list says of the question and of the answer is
// not of two versions, of which neither would have let it pass.
func TestOneSnapshotToTheEnd(t *testing.T) {
	w := newWorld(t)
	w.list("list", 0, "||target.example^")
	w.put(usercache.Users, "u", &userv1.User{Settings: &userv1.Settings{Lists: set("list")}, Devices: []*userv1.Device{{Id: "d"}}})
	p := w.policy()
	q := w.ask(p, "d", "asked.example.", "A")
	sofar := p.Question(q)
	w.list("list", 0, "||asked.example^")
	p.Update()
	a := answer(t, q, "asked.example. CNAME target.example.\ntarget.example. A 203.0.113.1")
	if got := say(p.Answer(q, &a, sofar)); got != "blocked by list mode 0" {
		t.Errorf("%s", got)
	}
}

// Who changes his rules while a query of his waits for them to be compiled is never judged without rules.
func TestRulesChangedBeforeTheyAreCompiled(t *testing.T) {
	w := newWorld(t)
	put := func(lines ...string) {
		w.put(usercache.Users, "u", &userv1.User{Rules: rules(lines...), Devices: []*userv1.Device{{Id: "d"}}})
	}
	put("||asked.example^")
	p := w.policy()
	q := w.query("d", "asked.example.", "A")
	if p.Ready(q) {
		t.Fatal("ready at once")
	}
	put("||asked.example^", "||more.example^")
	if p.Prepare(t.Context(), q) {
		t.Errorf("prepared to be judged without rules: %s", say(p.Question(q)))
	}
	q = w.query("d", "asked.example.", "A")
	if !p.Ready(q) && !p.Prepare(t.Context(), q) {
		t.Fatal("cannot be prepared")
	}
	if got := say(p.Question(q)); got != "blocked by user rule mode 0" {
		t.Errorf("identified anew: %s", got)
	}
	// Nor if there is no time to compile them.
	put("||asked.example^", "||most.example^")
	q = w.query("d", "asked.example.", "A")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if p.Ready(q) || p.Prepare(ctx, q) {
		t.Errorf("no time: %s", say(p.Question(q)))
	}
}
