package admin

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/answercache"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/limits"
	"github.com/sluice-dns/sluice/resolver/internal/policy"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
	"github.com/sluice-dns/sluice/usercache"
)

func newLimits(t *testing.T, apply func(limits.Entry)) LiveLimits {
	t.Helper()
	live, err := limits.NewLive(limits.Machine{Memory: 8 << 30, CPUs: 4}, limits.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return LiveLimits{live, apply}
}

func TestLiveLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var applied []string
		l := newLimits(t, func(e limits.Entry) { applied = append(applied, fmt.Sprint(e.Name, " ", e.New)) })
		all := l.Limits()
		if !slices.IsSortedFunc(all, func(a, b *adminv1.Limit) int { return strings.Compare(a.Name, b.Name) }) || len(all) < 14 {
			t.Errorf("limits = %v", all)
		}
		until := clock.Wall().Add(time.Hour).Unix()
		got, err := l.Set("cache", "1GiB", time.Hour, "tight")
		if err != nil || got.Value != "1073741824" || got.Unit != "bytes" || got.Until != until || got.Why != "tight" {
			t.Errorf("set = %v, %v", got, err)
		}
		if got, err = l.Set("in_flight", "300", 0, ""); err != nil || got.Until != 0 || got.Value != "300" {
			t.Errorf("set = %v, %v", got, err)
		}
		time.Sleep(2 * time.Hour)
		l.Expire(now())
		for _, m := range l.Limits() {
			if m.Name == "cache" && (m.Until != 0 || m.Why != "" || m.Value == "1073741824") {
				t.Errorf("after its time: %v", m)
			}
		}
		if got, err = l.Reset("in_flight"); err != nil || got.Value == "300" {
			t.Errorf("reset = %v, %v", got, err)
		}
		if want := fmt.Sprintf("[cache 1073741824 in_flight 300 in_flight %s]", got.Value); fmt.Sprint(applied) != want {
			t.Errorf("applied %v; want %s", applied, want)
		}
		for _, c := range []struct {
			name, value string
			code        codes.Code
			field       string
		}{
			{"no_such", "1", codes.NotFound, ""},
			{"in_flight", "-1", codes.InvalidArgument, "value"},
			{"in_flight", "1KiB", codes.InvalidArgument, "value"},
			{"cache", "1 GB", codes.InvalidArgument, "value"},
			{"cache", "99999999999GiB", codes.InvalidArgument, "value"},
			{"cache", "100GiB", codes.InvalidArgument, "value"}, // more than the machine
			{"workers", "3", codes.InvalidArgument, "value"},    // not to be set
		} {
			_, err := l.Set(c.name, c.value, 0, "")
			wantError(t, c.name+"="+c.value, coded(err), c.code, c.field)
		}
	})
}

// newCaches holds www.example. A in both caches, a denial and a delegation.
func newCaches(t *testing.T) Caches {
	t.Helper()
	c := Caches{
		RRsets:  rrcache.New(rrcache.Options{Bytes: 1 << 20, Key: dnsname.NewKey([16]byte{7})}),
		Answers: answercache.New(answercache.Options{Bytes: 1 << 20}),
		Key:     dnsname.NewKey([16]byte{5}),
		Views:   map[query.View]string{3: "corp"},
	}
	now := clock.Elapsed()
	www := dnsname.MustParse("www.example.")
	a := query.RRset{Name: www, Type: dnswire.TypeA, Class: dnswire.ClassIN, TTL: 300, Rank: query.RankAnswer, Status: query.Insecure,
		Data: query.AppendRData(query.AppendRData(nil, []byte{192, 0, 2, 1}), []byte{192, 0, 2, 2})}
	c.RRsets.Put(0, query.Subnet{}, a, rrcache.Put{}, now)
	c.RRsets.Put(3, query.Subnet{}, a, rrcache.Put{}, now)
	ns := query.RRset{Name: dnsname.MustParse("example."), Type: dnswire.TypeNS, Class: dnswire.ClassIN, TTL: 300, Rank: query.RankGlue,
		Data: query.AppendRData(nil, []byte(dnsname.MustParse("ns1.example.")))}
	c.RRsets.Put(0, query.Subnet{}, ns, rrcache.Put{Granted: now.Add(time.Minute)}, now)
	q := query.Question{Name: www, Type: dnswire.TypeA, Class: dnswire.ClassIN, DO: true}
	e, err := settled.Settle(&query.Unvalidated{Question: q, Answer: []query.RRset{a}}, query.Insecure,
		settled.Options{Now: now, Epoch: c.Answers.Epoch(), EDE: query.NoEDE})
	if err != nil || !c.Answers.Put(&q, answercache.Hash(&c.Key, &q), e, now) {
		t.Fatal(err)
	}
	return c
}

func show(entries []*adminv1.CacheEntry) string {
	var b strings.Builder
	for _, e := range entries {
		fmt.Fprintf(&b, "%s|%s|%s|%s|%s|%s|%s\n", e.Cache, e.Name, e.Type, e.Status, e.Rank, e.View, strings.Join(e.Data, ";"))
		if e.Ttl < 55 || e.Ttl > 300 {
			fmt.Fprintf(&b, "ttl %d\n", e.Ttl)
		}
	}
	return b.String()
}

func TestCaches(t *testing.T) {
	c := newCaches(t)
	www := dnsname.MustParse("www.example.")
	want := `rrset|www.example.|A|insecure|answer||192.0.2.1;192.0.2.2
answer|www.example.|A|insecure|||NOERROR DO;www.example. A 192.0.2.1;www.example. A 192.0.2.2
rrset|www.example.|A|insecure|answer|corp|192.0.2.1;192.0.2.2
`
	for _, typ := range []uint16{0, dnswire.TypeA} {
		if got := show(c.Look(www, typ)); got != want {
			t.Errorf("look at type %d:\n%swant\n%s", typ, got, want)
		}
	}
	if got := show(c.Look(www, dnswire.TypeAAAA)); got != "" {
		t.Errorf("another type:\n%s", got)
	}
	if got := show(c.Look(dnsname.MustParse("example."), 0)); got != "rrset|example.|NS|unchecked|delegation, glue||ns1.example.\n" {
		t.Errorf("delegation:\n%s", got)
	}
	before := c.RRsets.Stats()
	c.Look(www, 0)
	if after := c.RRsets.Stats(); after.Hits != before.Hits || after.Misses != before.Misses {
		t.Error("looking counts as use")
	}

	var dump bytes.Buffer
	if err := c.Dump(&dump); err != nil {
		t.Fatal(err)
	}
	epoch := c.Answers.Epoch()
	if n := c.Purge(dnsname.MustParse("example."), true, 0); n != 4 {
		t.Errorf("purged %d", n)
	}
	if c.Answers.Epoch() == epoch {
		t.Error("an answer under way, made of what was purged, would be kept")
	}
	if got := show(c.Look(www, 0)); got != "" {
		t.Errorf("after the purge:\n%s", got)
	}
	loaded, skipped, err := c.Load(bytes.NewReader(dump.Bytes()))
	if loaded != 3 || skipped != 0 || err != nil {
		t.Errorf("load = %d, %d, %v", loaded, skipped, err)
	}
	_, _, err = c.Load(bytes.NewReader(dump.Bytes()[:dump.Len()-3]))
	wantError(t, "half a dump", coded(err), codes.InvalidArgument, "data")
}

// newUsers is a user cache with a policy, a list and two users.
func newUsers(t *testing.T) (*usercache.Cache, func([32]byte) ([]byte, bool)) {
	t.Helper()
	c, err := usercache.Open(usercache.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	text := []byte("! a list\n||ads.example^\n||tracker.example^\n")
	sum := sha256.Sum256(text)
	put := func(k usercache.Kind, records map[string]proto.Message) {
		id, d := usercache.Identity{Dataset: [16]byte{1}, Lineage: [16]byte{2}}, c.Dataset(k)
		if err := errors.Join(d.BeginTransfer(id, false), d.FinishTransfer(id, 0, clock.Wall())); err != nil {
			t.Fatal(err)
		}
		delta := usercache.Delta{To: 9}
		for key, m := range records {
			b, _ := proto.Marshal(m)
			delta.Changes = append(delta.Changes, usercache.Change{Key: []byte(key), Revision: 9, Bytes: b})
		}
		if _, err := d.ApplyDelta(t.Context(), id, delta, clock.Wall()); err != nil {
			t.Fatal(err)
		}
	}
	put(usercache.CatalogueKind, map[string]proto.Message{
		"list/oisd":    &userv1.List{Name: "OISD", Number: 4, Sha256: sum[:], Size: uint64(len(text))},
		"service/chat": &userv1.Service{Name: "Chat", Rules: []string{"||chat.example^", "||chat.test^"}},
		"policy/kid": &userv1.Policy{Settings: &userv1.Settings{
			Lists: &userv1.StringSet{Values: []string{"oisd"}}, Services: &userv1.StringSet{Values: []string{"chat"}}}},
	})
	put(usercache.Users, map[string]proto.Message{
		"ann": &userv1.User{Policy: "kid", Devices: []*userv1.Device{{Id: "phone"}},
			Rules:    &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte("@@||good.example^\n||bad.example^\n")}, Rules: 2},
			Settings: &userv1.Settings{Rewrites: &userv1.RewriteSet{Values: []*userv1.Rewrite{{Name: "old.example", Records: []string{"CNAME ads.example"}}}}}},
		"bob": &userv1.User{},
	})
	return c, func(s [32]byte) ([]byte, bool) { return text, s == sum }
}

func TestExplain(t *testing.T) {
	users, blob := newUsers(t)
	p := Policies{Users: users, Blob: blob, Policy: policy.New(policy.Options{Key: dnsname.NewKey([16]byte{7}), Users: users, Blob: blob})}
	p.Answer = func(_ context.Context, q query.Question) (settled.Entry, bool, error) {
		if q.Name == dnsname.MustParse("dead.example.") {
			return settled.Entry{}, false, errors.New("no server answers")
		}
		u := &query.Unvalidated{Question: q}
		if q.Name == dnsname.MustParse("alias.example.") {
			u.Answer = []query.RRset{{Name: q.Name, Type: dnswire.TypeCNAME, Class: 1, TTL: 60, Data: query.AppendRData(nil, []byte(dnsname.MustParse("x.tracker.example.")))}}
		}
		e, err := settled.Settle(u, query.Insecure, settled.Options{Now: clock.Elapsed(), EDE: query.NoEDE})
		return e, false, err
	}
	const who = "identity, none, \"\" 0 \"\", device phone of user ann, revision 9, policy kid []\n"
	nothing := func(name string) string {
		return "question, none, \"\" 0 \"\", nothing applies to " + name + ". A []\n"
	}
	for name, want := range map[string]string{
		"ads.example":   `list, blocked, "oisd" 2 "||ads.example^", ads.example [@@||ads.example^ in the user's rules, or lists-=oisd]`,
		"bad.example":   `user rule, blocked, "user rules" 2 "||bad.example^", bad.example [@@||bad.example^ in the user's rules, or without the rule]`,
		"good.example":  `user rule, allowed, "user rules" 1 "@@||good.example^", good.example [without the rule; its block wins if it is $important]` + "\n" + `answer, none, "" 0 "", given as resolved: NOERROR, 0 records, Insecure []`,
		"x.chat.test":   `service, blocked, "chat" 2 "||chat.test^", x.chat.test [@@||x.chat.test^ in the user's rules, or services-=chat]`,
		"plain.example": nothing("plain.example") + `answer, none, "" 0 "", given as resolved: NOERROR, 0 records, Insecure []`,
		"dead.example":  nothing("dead.example") + `answer, none, "" 0 "", it could not be resolved: no server answers []`,
		"alias.example": nothing("alias.example") + `answer: list, blocked, "oisd" 3 "||tracker.example^", x.tracker.example [@@||x.tracker.example^ in the user's rules, or lists-=oisd]`,
	} {
		for _, target := range []string{"ann", "ann/phone"} {
			if got := explain(t, p, target, name); got != who+want+"\n" {
				t.Errorf("%s, %s:\n%swant\n%s%s\n", target, name, got, who, want)
			}
		}
	}
	// A rewrite is followed to what it leads to.
	if got := explain(t, p, "ann", "old.example"); !strings.Contains(got, "rewrite, rewritten") || !strings.HasSuffix(got, "lists-=oisd]\n") {
		t.Errorf("a rewrite:\n%s", got)
	}
	for target, code := range map[string]codes.Code{"nobody": codes.NotFound, "ann/tv": codes.FailedPrecondition, "bob": codes.FailedPrecondition, "bob/phone": codes.NotFound} {
		who, err := ParseTarget(target)
		if err != nil {
			t.Fatal(err)
		}
		_, err = p.Explain(t.Context(), who, dnsname.MustParse("ads.example."), 1)
		wantError(t, target, coded(err), code, "")
	}
}

func explain(t *testing.T, p Policies, target, name string) string {
	t.Helper()
	who, err := ParseTarget(target)
	if err != nil {
		t.Fatal(err)
	}
	steps, err := p.Explain(t.Context(), who, dnsname.MustParse(name+"."), dnswire.TypeA)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, s := range steps {
		fmt.Fprintf(&b, "%s, %s, %q %d %q, %s [%s]\n", s.Step, s.Verdict, s.List, s.Line, s.Rule, s.Detail, s.Change)
	}
	return b.String()
}

func TestShowDataset(t *testing.T) {
	users, _ := newUsers(t)
	m := ShowDataset(users.Dataset(usercache.Users))
	if m.Kind != "users" || m.Revision != 9 || m.Records != 2 || m.Totals.Users != 2 || m.Totals.Devices != 1 || len(m.Root) != 64 || m.Dataset != "01"+strings.Repeat("0", 30) {
		t.Errorf("%v", m)
	}
}
