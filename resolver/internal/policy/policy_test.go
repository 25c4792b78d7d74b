package policy

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"net/netip"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
	"github.com/sluice-dns/sluice/usercache"
)

// A world is a real user cache, filled through the door that sync uses, and a store of blobs.
type world struct {
	t     testing.TB
	dir   string
	cache *usercache.Cache
	id    usercache.Identity
	rev   map[usercache.Kind]uint64

	mu    sync.Mutex
	blobs map[[32]byte][]byte
}

func newWorld(t testing.TB) *world {
	w := &world{t: t, dir: t.TempDir(), rev: map[usercache.Kind]uint64{}, blobs: map[[32]byte][]byte{}}
	w.open()
	t.Cleanup(func() { w.cache.Close() })
	w.id = usercache.Identity{Dataset: [16]byte{1}, Lineage: [16]byte{2}}
	for _, k := range []usercache.Kind{usercache.CatalogueKind, usercache.Users} {
		d := w.cache.Dataset(k)
		if err := d.BeginTransfer(w.id, false); err != nil {
			t.Fatal(err)
		}
		if err := d.FinishTransfer(w.id, 0, clock.Wall()); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

func (w *world) open() {
	c, err := usercache.Open(usercache.Options{Dir: w.dir})
	if err != nil {
		w.t.Fatal(err)
	}
	w.cache = c
}

func (w *world) put(k usercache.Kind, key string, m proto.Message) {
	w.t.Helper()
	w.putAll(k, map[string]proto.Message{key: m})
}

// putAll puts records by key; nil ones are removed.
func (w *world) putAll(k usercache.Kind, records map[string]proto.Message) {
	w.t.Helper()
	from := w.rev[k]
	w.rev[k]++
	d := usercache.Delta{From: from, To: from + 1}
	for key, m := range records {
		c := usercache.Change{Key: []byte(key), Revision: from + 1, Removed: m == nil}
		if m != nil {
			var err error
			if c.Bytes, err = proto.Marshal(m); err != nil {
				w.t.Fatal(err)
			}
		}
		d.Changes = append(d.Changes, c)
	}
	if _, err := w.cache.Dataset(k).ApplyDelta(w.t.Context(), w.id, d, clock.Wall()); err != nil {
		w.t.Fatal(err)
	}
}

// list adds a catalogue list with its bytes.
func (w *world) list(id string, number uint32, text string) {
	w.put(usercache.CatalogueKind, "list/"+id, &userv1.List{Name: strings.ToUpper(id), Number: number, Sha256: w.blob(text), Size: uint64(len(text))})
}

func (w *world) blob(text string) []byte {
	sum := sha256.Sum256([]byte(text))
	w.mu.Lock()
	defer w.mu.Unlock()
	w.blobs[sum] = []byte(text)
	return sum[:]
}

func (w *world) get(sum [32]byte) ([]byte, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	b, ok := w.blobs[sum]
	return b, ok
}

func (w *world) policy() *Policy {
	return New(Options{Key: dnsname.NewKey([16]byte{7}), Users: w.cache, Blob: w.get, Logger: slog.New(slog.DiscardHandler)})
}

func set(values ...string) *userv1.StringSet { return &userv1.StringSet{Values: values} }

func rules(lines ...string) *userv1.Rules {
	return &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte(strings.Join(lines, "\n"))}, Rules: uint32(len(lines))}
}

// ask makes the query of a device, its rules compiled.
func (w *world) ask(p *Policy, device, name, typ string) *query.Query {
	w.t.Helper()
	q := w.query(device, name, typ)
	if !p.Ready(q) {
		p.Prepare(w.t.Context(), q)
	}
	return q
}

// query makes the query of a device.
func (w *world) query(device, name, typ string) *query.Query {
	w.t.Helper()
	q := &query.Query{Source: netip.MustParseAddrPort("192.0.2.1:5000"), Scratch: new(query.Scratch)}
	id, _ := usercache.ParseID(device)
	if s := w.cache.LookupDevice(&id, &q.Client.Profile); s != usercache.Found {
		w.t.Fatalf("device %s: %v", device, s)
	}
	tp, err := dnswire.ParseType(typ)
	if err != nil {
		w.t.Fatal(err)
	}
	q.Question = query.Question{Name: dnsname.MustParse(name), Type: tp, Class: 1}
	q.Turn.Current = q.Question
	return q
}

// say puts a verdict in words.
func say(v query.Verdict) string {
	s := v.Kind.String() + " by " + WhyText(v.Why)
	switch v.Kind {
	case query.Redirected, query.Flattened:
		s += " to " + v.Target.String()
	case query.Blocked:
		s += fmt.Sprintf(" mode %d", v.Block.Mode)
	case query.Synthesised:
		s += " " + dnswire.RCodeText(v.Synth.RCode)
		for i := range v.Synth.RRs {
			for d := range query.RDatas(v.Synth.RRs[i].Data) {
				s += " " + dnswire.Text(v.Synth.RRs[i].Type, d)
			}
		}
	}
	return s
}

// answer settles an answer to the current question of q.
func answer(t testing.TB, q *query.Query, records string) query.Answer {
	t.Helper()
	rs, err := dnswire.ParseRecords(records, ".", "test", 300)
	if err != nil {
		t.Fatal(err)
	}
	u := &query.Unvalidated{Question: q.Turn.Current}
	for _, r := range rs {
		u.Answer = append(u.Answer, query.RRset{Name: r.Name, Type: r.Type, Class: 1, TTL: r.TTL, Data: query.AppendRData(nil, r.Data)})
	}
	e, err := settled.Settle(u, query.Indeterminate, settled.Options{EDE: query.NoEDE})
	if err != nil {
		t.Fatal(err)
	}
	return e.View()
}

// TestPrecedence is the table of the package comment: each name of it meets several rows, and the first
// decides.
func TestPrecedence(t *testing.T) {
	w := newWorld(t)
	w.list("ads", 0, "||listed.example^\n||both.example^\n@@||excepted.example^\n||ruled.example^\n||rewritten.example^\n||served.example^\n||unblocked.example^\n||important.example^\n||tracker.example^\n||192.0.2.66^\n||imp-list.example^$important\n127.0.0.1 localhost\n")
	w.list("own-exception", 1, "@@||threat.example^\n@@||both.example^\n")
	w.list("malware", 2, "||threat.example^\n||excepted.example^\n")
	w.put(usercache.CatalogueKind, "category/malware", &userv1.Category{Name: "Malware", Lists: []string{"malware"}, Threat: true, SafeBrowsing: true, Number: 0})
	w.put(usercache.CatalogueKind, "service/tube", &userv1.Service{Name: "Tube", Rules: []string{"||served.example^", "||tube.example^"}, Number: 0})
	w.put(usercache.CatalogueKind, "safesearch/google", &userv1.SafeSearch{Name: "Google", Rewrites: []*userv1.Rewrite{{Name: "www.google.example", Records: []string{"CNAME forcesafesearch.google.example."}}}})
	w.put(usercache.CatalogueKind, "policy/base", &userv1.Policy{
		Settings: &userv1.Settings{Lists: set("ads", "own-exception"), SafeBrowsing: proto.Bool(true), Services: set("tube"), SafeSearch: set("google")},
		Rules:    rules("||by-policy.example^", "@@||policy-excepts.example^", "||device-and-policy.example^$important"),
	})
	ownList := w.blob("||own-list.example^\n@@||listed-but-own.example^\n")
	w.put(usercache.Users, "family", &userv1.User{
		Policy: "base",
		Settings: &userv1.Settings{
			Rewrites: &userv1.RewriteSet{Values: []*userv1.Rewrite{
				{Name: "rewritten.example", Records: []string{"A 198.51.100.1", "A 198.51.100.2"}},
				{Name: "*.rewritten.example", Records: []string{"CNAME target.example."}},
				{Name: "gone.example", Records: []string{"NXDOMAIN"}},
				{Name: "self.example", Records: []string{"CNAME self.example."}},
			}},
			Unblocks:            &userv1.UnblockSet{Values: []*userv1.Unblock{{Name: "unblocked.example"}, {Name: "over.example", Until: 1}}},
			OwnLists:            &userv1.OwnListSet{Values: []*userv1.OwnList{{Id: "mine", Sha256: ownList, Size: 51}}},
			BlockHttpsRecords:   proto.Bool(true),
			BlockBypass:         proto.Bool(true),
			BlockTypes:          set("ANY"),
			RebindingProtection: proto.Bool(true),
		},
		Rules: rules("||ruled.example^", "@@||policy-excepts.example^", "||important.example^$important", "@@||important.example^", "||by-user.example^$dnsrewrite=192.0.2.7", "@@||both-important.example^$important", "||both-important.example^$important", "||unblocked.example^"),
		Devices: []*userv1.Device{
			{Id: "tablet", Rules: rules("@@||ruled.example^", "||by-device.example^", "@@||device-and-policy.example^")},
			{Id: "off", Settings: &userv1.Settings{Enabled: proto.Bool(false)}},
			{Id: "paused", Settings: &userv1.Settings{PausedUntil: proto.Int64(1 << 40)}},
			{Id: "no-longer-paused", Settings: &userv1.Settings{PausedUntil: proto.Int64(1000), Mode: userv1.BlockMode_BLOCK_MODE_NXDOMAIN}},
			{Id: "custom", Settings: &userv1.Settings{Mode: userv1.BlockMode_BLOCK_MODE_CUSTOM_IP, BlockIpv4: proto.String("198.51.100.9")}},
		},
	})
	p := w.policy()
	if m := p.Missing(); len(m) != 0 {
		t.Fatalf("missing lists %v", m)
	}
	for _, c := range []struct{ row, device, name, typ, want string }{
		{"1", "off", "listed.example.", "A", "pass by filtering off"},
		{"1", "paused", "listed.example.", "A", "pass by filtering off"},
		{"1", "no-longer-paused", "listed.example.", "A", "blocked by list mode 1"},
		{"2 over 5 and 10", "tablet", "unblocked.example.", "A", "allowed by unblocked"},
		{"2 exact name", "tablet", "x.unblocked.example.", "A", "blocked by user rule mode 0"},
		{"3 over 5", "tablet", "important.example.", "A", "blocked by important rule mode 0"},
		{"3 exception first", "tablet", "both-important.example.", "A", "allowed by important rule"},
		{"3 of the policy over 4", "tablet", "device-and-policy.example.", "A", "blocked by important rule mode 0"},
		{"4 over 5", "tablet", "ruled.example.", "A", "allowed by device rule"},
		{"4", "tablet", "by-device.example.", "A", "blocked by device rule mode 0"},
		{"5 over 10", "off", "ruled.example.", "A", "pass by filtering off"},
		{"5", "custom", "ruled.example.", "A", "blocked by user rule mode 4"},
		{"5 user over policy", "tablet", "policy-excepts.example.", "A", "allowed by user rule"},
		{"5 policy", "tablet", "by-policy.example.", "A", "blocked by policy rule mode 0"},
		{"5 rewrite", "tablet", "by-user.example.", "A", "synthesised by user rule NOERROR 192.0.2.7"},
		{"6 over 10", "tablet", "rewritten.example.", "A", "synthesised by rewrite NOERROR 198.51.100.1 198.51.100.2"},
		{"6 other family", "tablet", "rewritten.example.", "AAAA", "synthesised by rewrite NOERROR"},
		{"6 another type", "tablet", "rewritten.example.", "TXT", "synthesised by rewrite NOERROR"},
		{"6 wildcard", "tablet", "a.b.rewritten.example.", "A", "flattened by rewrite to target.example."},
		{"6 NXDOMAIN", "tablet", "gone.example.", "TXT", "synthesised by rewrite NXDOMAIN"},
		{"6 itself is none", "tablet", "self.example.", "A", "pass by nothing"},
		{"7", "tablet", "www.google.example.", "A", "redirected by safe search to forcesafesearch.google.example."},
		{"8", "tablet", "anything.example.", "HTTPS", "blocked by record type mode 2"},
		{"8", "tablet", "anything.example.", "ANY", "blocked by record type mode 2"},
		{"8", "tablet", "use-application-dns.net.", "A", "blocked by bypass mode 1"},
		{"9 over 10", "tablet", "served.example.", "A", "blocked by service mode 0"},
		{"9", "tablet", "www.tube.example.", "AAAA", "blocked by service mode 0"},
		{"10 private", "tablet", "own-list.example.", "A", "blocked by own list mode 0"},
		{"10", "tablet", "listed.example.", "A", "blocked by list mode 0"},
		{"10 exception of another list", "tablet", "both.example.", "A", "allowed by list"},
		{"10 below", "tablet", "x.y.listed.example.", "A", "blocked by list mode 0"},
		{"10 but not localhost", "tablet", "localhost.", "A", "pass by nothing"},
		{"10 not", "tablet", "notlisted.example.", "A", "pass by nothing"},
		{"11 over an exception of a list", "tablet", "threat.example.", "A", "blocked by threat list mode 0"},
		{"11 over an exception of 10", "tablet", "excepted.example.", "A", "blocked by threat list mode 0"},
	} {
		if got := say(p.Question(w.ask(p, c.device, c.name, c.typ))); got != c.want {
			t.Errorf("row %s: %s asks %s %s: %s, want %s", c.row, c.device, c.name, c.typ, got, c.want)
		}
	}

	for _, c := range []struct{ what, device, name, answer, want string }{
		{"nothing", "tablet", "clean.example.", "clean.example. A 203.0.113.1", "pass by nothing"},
		{"an alias", "tablet", "clean.example.", "clean.example. CNAME x.Tracker.example.\nx.tracker.example. A 203.0.113.1", "blocked by list mode 0"},
		{"an alias, device off", "off", "clean.example.", "clean.example. CNAME tracker.example.", "pass by nothing"},
		{"the second alias", "tablet", "clean.example.", "clean.example. CNAME ok.example.\nok.example. CNAME by-device.example.", "blocked by device rule mode 0"},
		{"an excepted alias before a blocked one", "tablet", "clean.example.", "clean.example. CNAME both.example.\nboth.example. CNAME tracker.example.", "blocked by list mode 0"},
		{"an address", "tablet", "clean.example.", "clean.example. A 192.0.2.66", "blocked by list mode 0"},
		{"an HTTPS target", "tablet", "clean.example.", "clean.example. HTTPS 1 tracker.example.", "blocked by list mode 0"},
		{"an HTTPS hint", "tablet", "clean.example.", "clean.example. HTTPS 1 . ipv4hint=192.0.2.66", "blocked by list mode 0"},
		{"an MX target", "tablet", "clean.example.", "clean.example. MX 1 tracker.example.", "blocked by list mode 0"},
		{"a private address", "tablet", "clean.example.", "clean.example. A 10.1.2.3", "blocked by rebinding protection mode 0"},
		{"a rewrite is not for targets", "tablet", "clean.example.", "clean.example. CNAME by-user.example.", "pass by nothing"},
		{"an allowed question", "tablet", "ruled.example.", "ruled.example. CNAME tracker.example.", "pass by nothing"},
	} {
		q := w.ask(p, c.device, c.name, "A")
		sofar := p.Question(q)
		a := answer(t, q, c.answer)
		if got := say(p.Answer(q, &a, sofar)); got != c.want {
			t.Errorf("answer with %s: %s, want %s", c.what, got, c.want)
		}
	}

	// A stranger's empty profile filters nothing.
	q := &query.Query{Scratch: new(query.Scratch)}
	q.Turn.Current = query.Question{Name: dnsname.MustParse("listed.example."), Type: 1, Class: 1}
	if v := p.Question(q); v.Kind != query.Pass {
		t.Errorf("a stranger: %s", say(v))
	}

	// The verdict says which rule, and the block what people are told.
	v := p.Question(w.ask(p, "tablet", "listed.example.", "A"))
	if v.List != 0 || v.Line != 1 || v.Block.Reason != "ADS" || v.Block.EDE != 17 || v.Block.TTL != 10*time.Second {
		t.Errorf("%+v", v)
	}
	var steps []string
	p.ExplainQuestion(w.ask(p, "tablet", "threat.example.", "A"), func(s Step) {
		steps = append(steps, fmt.Sprintf("%s %s %s:%d", s.Step, s.Verdict, s.List, s.Line))
	})
	if got, want := strings.Join(steps, "; "), "list allowed own-exception:1; threat list blocked malware:1"; got != want {
		t.Errorf("explained as %q, want %q", got, want)
	}

	for _, name := range []string{"listed.example.", "notlisted.example.", "by-device.example.", "www.tube.example."} {
		q := w.ask(p, "tablet", name, "A")
		a := answer(t, q, "x.example. CNAME y.example.\ny.example. A 203.0.113.1")
		if n := allocsOf(func() { p.Answer(q, &a, p.Question(q)) }); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// allocsOf counts what f allocates each time. The user cache writes its file behind, which counts too: what allocates
// does so in every round.
func allocsOf(f func()) float64 {
	n := 1.0
	for round := 0; n != 0 && round < 100; round++ {
		n = testing.AllocsPerRun(50, f)
	}
	return n
}

func TestSchedules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		defer w.cache.Close()
		w.list("ads", 0, "||ads.example^")
		w.put(usercache.CatalogueKind, "service/tube", &userv1.Service{Name: "Tube", Rules: []string{"||tube.example^"}})
		window := func(from, to uint32) []*userv1.Window {
			return []*userv1.Window{{Days: 0x7f, From: from * 60, To: to * 60}}
		}
		w.put(usercache.Users, "kid", &userv1.User{
			Settings: &userv1.Settings{Lists: set("ads"), Schedules: &userv1.ScheduleSet{Values: []*userv1.Schedule{
				{Id: "homework", TimeZone: "UTC", Windows: window(14, 18), Action: userv1.ScheduleAction_SCHEDULE_ACTION_BLOCK, Services: []string{"tube"}},
				{Id: "treat", TimeZone: "UTC", Windows: window(16, 17), Action: userv1.ScheduleAction_SCHEDULE_ACTION_PAUSE, Services: []string{"tube"}},
				{Id: "night", TimeZone: "UTC", Windows: window(22, 30), Action: userv1.ScheduleAction_SCHEDULE_ACTION_BLOCK, Everything: true},
				{Id: "noon", TimeZone: "UTC", Windows: window(12, 13), Action: userv1.ScheduleAction_SCHEDULE_ACTION_PAUSE, Everything: true},
			}}},
			Devices: []*userv1.Device{{Id: "tablet"}},
		})
		p := w.policy()
		for hour := range 24 { // the bubble begins at midnight UTC
			want := map[string]string{"tube.example.": "pass", "ads.example.": "blocked", "other.example.": "pass"}
			switch {
			case hour >= 22 || hour < 6:
				want = map[string]string{"tube.example.": "blocked", "ads.example.": "blocked", "other.example.": "blocked"}
			case hour == 12:
				want = map[string]string{"tube.example.": "pass", "ads.example.": "pass", "other.example.": "pass"}
			case hour == 16: // who asks why it passes is told
				var steps []string
				p.ExplainQuestion(w.ask(p, "tablet", "tube.example.", "A"), func(s Step) {
					steps = append(steps, fmt.Sprintf("%s %s: %s, %s", s.Step, s.Verdict, s.Detail, s.Change))
				})
				if got, want := strings.Join(steps, "; "), "schedule pass: schedule treat pauses the services, categories and lists it names, schedules-=treat"; got != want {
					t.Errorf("explained as %q, want %q", got, want)
				}
			case hour >= 14 && hour < 18:
				want["tube.example."] = "blocked"
			}
			for name, kind := range want {
				if got := p.Question(w.ask(p, "tablet", name, "A")); got.Kind.String() != kind {
					t.Errorf("%02d:00 %s: %s, want %s", hour, name, say(got), kind)
				}
			}
			time.Sleep(time.Hour)
		}
	})
}

// The catalogue changes under a running policy; a list whose bytes are missing keeps its last version.
func TestUpdates(t *testing.T) {
	w := newWorld(t)
	w.list("ads", 0, "||one.example^")
	w.put(usercache.Users, "u", &userv1.User{Settings: &userv1.Settings{Lists: set("ads", "more")}, Devices: []*userv1.Device{{Id: "d"}}})
	p := w.policy()
	check := func(when string, blocked ...string) {
		t.Helper()
		for _, n := range []string{"one.example.", "two.example.", "three.example."} {
			want := strings.Contains(strings.Join(blocked, " "), n)
			if got := p.Question(w.ask(p, "d", n, "A")); (got.Kind == query.Blocked) != want {
				t.Errorf("%s: %s is %s", when, n, say(got))
			}
		}
	}
	check("at first", "one.example.")

	late := []byte("||two.example^")
	sum := sha256.Sum256(late)
	w.put(usercache.CatalogueKind, "list/ads", &userv1.List{Number: 0, Sha256: sum[:]})
	p.Update()
	check("the new version has not come", "one.example.")
	if m := p.Missing(); len(m) != 1 || m[0] != "ads" {
		t.Errorf("missing %v", m)
	}
	w.blob(string(late))
	p.Update()
	check("it has come", "two.example.")

	w.list("more", 1, "||three.example^")
	p.Update()
	check("a second list", "two.example.", "three.example.")

	w.put(usercache.CatalogueKind, "list/ads", &userv1.List{Number: 0, Sha256: w.blob("<!DOCTYPE html><html><body>sign in</body></html>")})
	p.Update()
	check("an HTML page in place of a list", "two.example.", "three.example.")
}

// Users with equal rules share one matcher, which goes when the last of them does.
func TestEqualRulesAreShared(t *testing.T) {
	w := newWorld(t)
	for _, u := range []string{"a", "b"} {
		w.put(usercache.Users, u, &userv1.User{Rules: rules("||x.example^"), Devices: []*userv1.Device{{Id: u}}})
	}
	p := w.policy()
	qa, qb := w.ask(p, "a", "x.example.", "A"), w.ask(p, "b", "x.example.", "A")
	ma := qa.Client.Profile.Details.Compiled().(*own).rules[1]
	if mb := qb.Client.Profile.Details.Compiled().(*own).rules[1]; ma == nil || ma != mb {
		t.Error("two users with one text have two matchers")
	}
	if p.Question(qb).Kind != query.Blocked {
		t.Error("the shared rules do not block")
	}
}

// A catalogue is served once all its lists are compiled, and not when it is merely there.
func TestServing(t *testing.T) {
	w := newWorld(t)
	w.list("one", 0, "||one.example^\n")
	p := w.policy()
	want := func(what string, present bool, revision uint64) {
		t.Helper()
		if ok, n := p.Serving(); ok != present || n != revision {
			t.Errorf("%s: %v, %d; want %v, %d", what, ok, n, present, revision)
		}
	}
	want("at first", true, 1)
	text := "||two.example^\n"
	sum := sha256.Sum256([]byte(text))
	w.put(usercache.CatalogueKind, "list/two", &userv1.List{Number: 1, Sha256: sum[:], Size: uint64(len(text))})
	want("before the update", false, 1)
	p.Update()
	want("without the bytes", false, 1)
	w.blob(text)
	p.Update()
	want("with the bytes", true, 2)
}

// $client in one's own rules knows a device by what its owner calls it. In lists of the catalogue it does not, where
// it would hit everybody's device of that name.
func TestClientByName(t *testing.T) {
	w := newWorld(t)
	w.list("all", 0, "||of-list.example^$client='Frank\\'s laptop'\n")
	w.put(usercache.CatalogueKind, "policy/asks", &userv1.Policy{Rules: rules("||of-policy.example^$client='Frank\\'s laptop'")})
	laptop := func(id string) *userv1.Device { return &userv1.Device{Id: id, Name: "Frank's laptop"} }
	w.put(usercache.Users, "u", &userv1.User{
		Policy: "asks", Settings: &userv1.Settings{Lists: set("all")},
		Rules: rules("||of-user.example^$client='Frank\\'s laptop'", "||of-all-else.example^$client=~'Frank\\'s laptop'",
			"||192.0.2.66^$client='Frank\\'s laptop'", "||by-id.example^$client=dev-1"),
		Devices: []*userv1.Device{laptop("dev-1"), {Id: "dev-2", Name: "frank's laptop"}, {Id: "dev-3"}},
	})
	// One who has nothing but a name beside his policy.
	w.put(usercache.Users, "v", &userv1.User{Policy: "asks", Settings: &userv1.Settings{Lists: set("all")}, Devices: []*userv1.Device{laptop("dev-4"), {Id: "dev-5"}}})
	p := w.policy()
	for name, want := range map[string]string{
		"of-user.example.": "+--", "of-all-else.example.": "-++", "by-id.example.": "+--", "of-policy.example.": "+--+-", "of-list.example.": "-----",
	} {
		got := ""
		for i := range want {
			mark := "-"
			if v := p.Question(w.ask(p, fmt.Sprintf("dev-%d", i+1), name, "A")); v.Kind == query.Blocked {
				mark = "+"
			}
			got += mark
		}
		if got != want {
			t.Errorf("%s is blocked for %s, want %s", name, got, want)
		}
	}
	for device, want := range map[string]query.VerdictKind{"dev-1": query.Blocked, "dev-3": query.Pass} {
		q := w.ask(p, device, "x.example.", "A")
		a := answer(t, q, "x.example. A 192.0.2.66")
		if v := p.Answer(q, &a, p.Question(q)); v.Kind != want {
			t.Errorf("%s is sent to an address: %s", device, say(v))
		}
	}
	q := w.ask(p, "dev-1", "of-user.example.", "A")
	if n := allocsOf(func() { p.Question(q) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
	// Another name counts as soon as it is there.
	w.put(usercache.Users, "v", &userv1.User{Policy: "asks", Devices: []*userv1.Device{{Id: "dev-4", Name: "Old laptop"}, laptop("dev-5")}})
	for device, want := range map[string]query.VerdictKind{"dev-4": query.Pass, "dev-5": query.Blocked} {
		if v := p.Question(w.ask(p, device, "of-policy.example.", "A")); v.Kind != want {
			t.Errorf("%s, renamed: %s", device, say(v))
		}
	}
}

// Rules that cost too much are left out, and the operator is told which, once.
func TestDroppedRulesAreTold(t *testing.T) {
	w := newWorld(t)
	var text strings.Builder
	for i := range 100 {
		fmt.Fprintf(&text, "/^x.?%d.?y$/\n", i)
	}
	w.list("costly", 3, "||a.example^\n"+text.String())
	var log bytes.Buffer
	p := New(Options{Key: dnsname.NewKey([16]byte{7}), Users: w.cache, Blob: w.get, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	p.Update()
	w.list("other", 4, "||b.example^")
	p.Update()
	told := regexp.MustCompile(`level=WARN msg="rules of a catalogue list are left out.*" list=costly rules=36 first_line=66\n`)
	if n := len(told.FindAllString(log.String(), -1)); n != 1 {
		t.Errorf("told %d times:\n%s", n, log.String())
	}
}
