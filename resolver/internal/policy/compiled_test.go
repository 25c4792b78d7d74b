package policy

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

var long = flag.Bool("long", false, "run the long tests too")
var users = flag.Int("users", 1_000_000, "how many users TestMillionUsers makes")

// Many users with rules of their own ask in random order: the compiled rules stay within their budget, whoever asks
// is judged by his own, and what was dropped is compiled anew.
func TestBudget(t *testing.T) {
	const users = 300
	w := newWorld(t)
	records := map[string]proto.Message{}
	for i := range users {
		lines := []string{fmt.Sprintf("||only-%d.example^", i)}
		for k := range 50 {
			lines = append(lines, fmt.Sprintf("||filler-%d-%d.example^", i, k))
		}
		id := fmt.Sprintf("u%d", i)
		records[id] = &userv1.User{Rules: rules(lines...), Devices: []*userv1.Device{{Id: id}}}
	}
	w.putAll(usercache.Users, records)
	p := w.policy()
	w.ask(p, "u0", "only-0.example.", "A")
	one, _ := p.own.use()
	budget := 20 * one
	p = New(Options{Key: p.o.Key, Users: w.cache, Blob: w.get, OwnBytes: budget})
	first := w.ask(p, "u0", "only-0.example.", "A")
	rng := rand.New(rand.NewPCG(1, 2))
	most := 0
	for range 3000 {
		i := rng.IntN(users)
		name := i
		if rng.IntN(2) == 0 {
			name = rng.IntN(users)
		}
		v := p.Question(w.ask(p, fmt.Sprintf("u%d", i), fmt.Sprintf("only-%d.example.", name), "A"))
		if (v.Kind == query.Blocked) != (name == i) {
			t.Fatalf("user %d asks for the name of user %d: %s", i, name, say(v))
		}
		bytes, texts := p.own.use()
		if most = max(most, texts); bytes > budget {
			t.Fatalf("%d bytes are held, of %d", bytes, budget)
		}
	}
	if most < 8 {
		t.Errorf("at most %d texts were kept, though there is room for more", most)
	}
	if v := p.Question(first); v.Kind != query.Blocked {
		t.Errorf("a query that began before its rules were dropped: %s", say(v))
	}
	// Settings that go take what was made of them along.
	for id := range records {
		records[id] = &userv1.User{Devices: []*userv1.Device{{Id: id}}}
	}
	w.putAll(usercache.Users, records)
	for i := range users {
		w.ask(p, fmt.Sprintf("u%d", i), "x.example.", "A")
	}
}

// One user's texts beyond his share are left out and named; others have theirs.
func TestTooMuch(t *testing.T) {
	w := newWorld(t)
	huge := strings.Repeat("||a.very-long-name-to-fill-the-share.example^\n", 100_000)
	w.put(usercache.Users, "u", &userv1.User{Rules: rules("||small.example^"), Devices: []*userv1.Device{{Id: "d"}},
		Settings: &userv1.Settings{OwnLists: &userv1.OwnListSet{Values: []*userv1.OwnList{
			{Id: "huge", Sha256: w.blob(huge), Size: uint64(len(huge))}, {Id: "tiny", Sha256: w.blob("||tiny.example^"), Size: 15}}}}})
	p := New(Options{Key: w.policy().o.Key, Users: w.cache, Blob: w.get, OwnBytes: 8 << 20})
	q := w.ask(p, "d", "small.example.", "A")
	if tooMuch, missing := p.LeftOut(q); len(tooMuch) != 1 || tooMuch[0] != "own list huge" || missing {
		t.Errorf("left out %v, %v", tooMuch, missing)
	}
	for name, want := range map[string]query.VerdictKind{"small.example.": query.Blocked, "tiny.example.": query.Blocked, "a.very-long-name-to-fill-the-share.example.": query.Pass} {
		if v := p.Question(w.ask(p, "d", name, "A")); v.Kind != want {
			t.Errorf("%s: %s", name, say(v))
		}
	}
}

// A text that is not there yet is not looked for by each query, but as soon as something has arrived.
func TestMissingText(t *testing.T) {
	w := newWorld(t)
	text := "||late.example^"
	sum := w.blob(text)
	delete(w.blobs, [32]byte(sum))
	w.put(usercache.Users, "u", &userv1.User{Rules: &userv1.Rules{Body: &userv1.Rules_Sha256{Sha256: sum}, Size: uint64(len(text))}, Devices: []*userv1.Device{{Id: "d"}}})
	p := w.policy()
	q := w.ask(p, "d", "late.example.", "A")
	if _, missing := p.LeftOut(q); !missing || p.Question(q).Kind != query.Pass || !p.Ready(q) {
		t.Errorf("without the text: missing %v, ready %v", missing, p.Ready(q))
	}
	w.blob(text)
	p.Update()
	if p.Ready(q) {
		t.Error("what has arrived is not looked at")
	}
	if v := p.Question(w.ask(p, "d", "late.example.", "A")); v.Kind != query.Blocked {
		t.Errorf("with the text: %s", say(v))
	}
}

// A text that has changed and whose bytes are still on their way leaves what was there before in force, for whom it was
// there, until it comes.
func TestTextsThatChange(t *testing.T) {
	w := newWorld(t)
	put := func(user string, texts ...string) {
		sums := make([][]byte, len(texts))
		for i, text := range texts {
			sums[i] = w.blob(text)
		}
		own := &userv1.Rules{Body: &userv1.Rules_Sha256{Sha256: sums[0]}, Size: uint64(len(texts[0]))}
		if strings.Contains(texts[0], "-1") { // the first one is short enough for the record
			own = rules(texts[0])
		}
		w.put(usercache.Users, user, &userv1.User{Rules: own,
			Settings: &userv1.Settings{OwnLists: &userv1.OwnListSet{Values: []*userv1.OwnList{{Id: "mine", Sha256: sums[1], Size: uint64(len(texts[1]))}}}},
			Devices:  []*userv1.Device{{Id: user}}})
	}
	p := w.policy()
	check := func(what, device string, missing bool, blocked ...string) {
		t.Helper()
		for _, name := range []string{"rule-1.example.", "list-1.example.", "rule-2.example.", "list-2.example."} {
			q := w.ask(p, device, name, "A")
			want := query.Pass
			if slices.Contains(blocked, name) {
				want = query.Blocked
			}
			if v := p.Question(q); v.Kind != want {
				t.Errorf("%s: %s asks for %s: %s, want %v", what, device, name, say(v), want)
			}
			if _, m := p.LeftOut(q); m != missing {
				t.Errorf("%s: missing %v", what, m)
			}
		}
	}
	put("u", "||rule-1.example^", "||list-1.example^")
	check("at first", "u", false, "rule-1.example.", "list-1.example.")
	on := w.blobs
	w.blobs = maps.Clone(on)
	put("u", "||rule-2.example^", "||list-2.example^")
	put("other", "||rule-2.example^", "||list-2.example^")
	come := w.blobs
	w.blobs = on
	for range 2 {
		check("on their way", "u", true, "rule-1.example.", "list-1.example.")
		check("on their way", "other", true)
		p.Update() // something else has come
	}
	w.blobs = come
	p.Update()
	check("arrived", "u", false, "rule-2.example.", "list-2.example.")
	check("arrived", "other", false, "rule-2.example.", "list-2.example.")
	// Of devices without number not all are remembered.
	var c compiled
	c.init(1 << 20)
	for i := range 1000 {
		id, _ := usercache.ParseID(fmt.Sprintf("d%d", i))
		c.remember(owner{user: id, device: id}, map[string]usedText{"x": {}})
	}
	if n := len(c.before); n == 0 || n > 1<<20/beforeBytes {
		t.Errorf("%d devices are remembered", n)
	}
}

// A policy's texts are the policy's: while new ones are on their way its users are judged by those before, whoever of them
// is judged first, and by no other policy's, though one of them had that before.
func TestTextsOfPolicies(t *testing.T) {
	w := newWorld(t)
	put := func(policy, text string, here bool) {
		sum := w.blob(text)
		if !here {
			w.mu.Lock()
			delete(w.blobs, [32]byte(sum))
			w.mu.Unlock()
		}
		w.put(usercache.CatalogueKind, "policy/"+policy, &userv1.Policy{
			Rules:    &userv1.Rules{Body: &userv1.Rules_Sha256{Sha256: sum}, Size: uint64(len(text))},
			Settings: &userv1.Settings{OwnLists: &userv1.OwnListSet{Values: []*userv1.OwnList{{Id: "list", Sha256: w.blob("||list-" + policy + ".example^"), Size: 20}}}},
		})
	}
	user := func(id, policy string, own bool) {
		u := &userv1.User{Policy: policy, Devices: []*userv1.Device{{Id: id}}}
		if own {
			u.Rules = rules("||own.example^")
			u.Settings = &userv1.Settings{OwnLists: &userv1.OwnListSet{Removed: []string{"list"}}}
		}
		w.put(usercache.Users, id, u)
	}
	put("one", "||one.example^", true)
	put("two", "||two.example^", false)
	for _, own := range []bool{false, true} {
		suffix := map[bool]string{true: "-own"}[own]
		user("first"+suffix, "one", own)
		user("second"+suffix, "one", own)
		user("other"+suffix, "two", own)
	}
	p := w.policy()
	check := func(when, device, name string, want query.VerdictKind) {
		t.Helper()
		for _, d := range []string{device, device + "-own"} {
			if got := p.Question(w.ask(p, d, name+".example.", "A")); got.Kind != want {
				t.Errorf("%s, %s asks %s: %s, want %v", when, d, name, say(got), want)
			}
		}
	}
	check("at first", "first", "one", query.Blocked)
	for _, own := range []bool{false, true} {
		user("first"+map[bool]string{true: "-own"}[own], "two", own)
	}
	check("given another policy", "first", "one", query.Pass)
	check("given another policy", "other", "one", query.Pass)
	check("of the policy", "second", "one", query.Blocked)
	put("one", "||new.example^", false)
	check("on its way", "other", "one", query.Pass)
	check("on its way", "second", "one", query.Blocked)
	put("two", "||two.example^", true)
	p.Update()
	check("arrived", "first", "two", query.Blocked)
	check("arrived", "other", "two", query.Blocked)
	check("arrived", "other", "one", query.Pass)
	if got := p.Question(w.ask(p, "second", "list-one.example.", "A")); got.Kind != query.Blocked {
		t.Errorf("the policy's list: %s", say(got))
	}
	if got := p.Question(w.ask(p, "second-own", "list-one.example.", "A")); got.Kind != query.Pass {
		t.Errorf("the policy's list, which this user does without: %s", say(got))
	}
}

// A tenant has two compilations at a time, whoever else compiles; who waits in vain gives up with his context.
func TestCompilationsOfTenants(t *testing.T) {
	var c compiled
	c.init(1 << 20)
	for range perTenant {
		if !c.enter(t.Context(), "a") {
			t.Fatal("no turn")
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if c.enter(ctx, "a") {
			t.Error("a third one at a time")
		}
	})
	if !c.enter(t.Context(), "b") {
		t.Error("another tenant has no turn")
	}
	c.leave("b")
	cancel()
	wg.Wait()
	for range perTenant {
		c.leave("a")
	}
	if len(c.tenants) != 0 || len(c.slots) != 0 {
		t.Errorf("%d tenants and %d turns are left", len(c.tenants), len(c.slots))
	}
}

// A million standard users, a tenth of them with rules, ask in random order (-long): what they take beyond their
// records, and that the budget of compiled rules holds.
func TestMillionUsers(t *testing.T) {
	n := *users
	if !*long {
		t.Skip("-long")
	}
	w := newWorld(t)
	w.list("one", 0, "||one.example^\n")
	w.list("two", 1, "||two.example^\n")
	w.put(usercache.CatalogueKind, "service/chat", &userv1.Service{Rules: []string{"||chat.example^"}})
	w.put(usercache.CatalogueKind, "policy/family", &userv1.Policy{Settings: &userv1.Settings{Lists: set("one")}})
	heap := func() int64 {
		runtime.GC()
		runtime.GC() // what went by a cleanup of the first
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	// Records and their index are partly outside the heap, so that the system is asked.
	anon := func() int64 {
		debug.FreeOSMemory()
		status, err := os.ReadFile("/proc/self/status")
		if err != nil {
			t.Skip(err)
		}
		_, after, _ := strings.Cut(string(status), "RssAnon:")
		var kib int64
		if _, err := fmt.Sscan(after, &kib); err != nil {
			t.Fatal(err)
		}
		return kib << 10
	}
	before := anon()
	var bytes int64
	for first := 0; first < n; first += 10_000 {
		records := map[string]proto.Message{}
		for i := first; i < first+10_000; i++ {
			u := &userv1.User{Policy: "family", Settings: &userv1.Settings{Lists: set("one", "two"), Services: set("chat")}}
			for d := range 3 {
				u.Devices = append(u.Devices, &userv1.Device{Id: fmt.Sprintf("%07x%d", i, d)})
			}
			u.Devices[0].Links = []string{fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255)}
			if i%10 == 0 {
				var lines []string
				for k := range 50 {
					lines = append(lines, fmt.Sprintf("||r%02d.%07x.example^", k, i))
				}
				u.Rules = rules(lines...)
			}
			bytes += int64(proto.Size(u))
			records[fmt.Sprintf("user-%07x", i)] = u
		}
		w.putAll(usercache.Users, records)
	}
	// As after a restart: what filling and writing took is gone.
	if err := w.cache.Close(); err != nil {
		t.Fatal(err)
	}
	w.open()
	p := New(Options{Key: w.policy().o.Key, Users: w.cache, Blob: w.get, OwnBytes: int64(n) * 32})
	filled, full := heap(), anon()
	rng := rand.New(rand.NewPCG(3, 4))
	start, most, blocked := time.Now(), int64(0), 0
	for k := range n {
		i := rng.IntN(n)
		q := w.ask(p, fmt.Sprintf("%07x%d", i, rng.IntN(3)), fmt.Sprintf("r07.%07x.example.", i), "A")
		v := p.Question(q)
		if (v.Kind == query.Blocked) != (i%10 == 0) {
			t.Fatalf("user %d: %s", i, say(v))
		}
		if v.Kind == query.Blocked {
			blocked++
		}
		if k%1000 == 0 {
			held, _ := p.own.use()
			most = max(most, held)
		}
	}
	held, texts := p.own.use()
	grown := heap() - filled
	t.Logf("%d users take %d B each beside the %d B of their record; of %d B compiled rules hold at most %d, now %d for %d texts, and the heap has grown by %d; %d of %d queries blocked, %v",
		n, (full-before-bytes)/int64(n), bytes/int64(n), p.o.OwnBytes, most, held, texts, grown, blocked, n, time.Since(start))
	if most > p.o.OwnBytes || held > p.o.OwnBytes {
		t.Errorf("compiled rules hold %d B of %d", most, p.o.OwnBytes)
	}
	// Beside them there are the merged settings, which have a budget of their own, and what the last queries used.
	if most := p.o.OwnBytes + 16<<20 + 8<<20; grown > most {
		t.Errorf("the heap has grown by %d B, of at most %d", grown, most)
	}
}
