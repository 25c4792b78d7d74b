package admin

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
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
	"github.com/sluice-dns/sluice/resolver/internal/overload"
	"github.com/sluice-dns/sluice/resolver/internal/pipeline"
	"github.com/sluice-dns/sluice/resolver/internal/policy"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
	"github.com/sluice-dns/sluice/resolver/internal/render"
	"github.com/sluice-dns/sluice/resolver/internal/rpz"
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
		"list/oisd":      &userv1.List{Name: "OISD", Number: 4, Sha256: sum[:], Size: uint64(len(text))},
		"service/chat":   &userv1.Service{Name: "Chat", Rules: []string{"||chat.example^", "||chat.test^"}},
		"category/games": &userv1.Category{Number: 1},
		"category/full":  &userv1.Category{Number: 2, Lists: []string{"oisd"}},
		"policy/kid": &userv1.Policy{Settings: &userv1.Settings{
			Lists: &userv1.StringSet{Values: []string{"oisd"}}, Services: &userv1.StringSet{Values: []string{"chat"}}}},
	})
	put(usercache.Users, map[string]proto.Message{
		"ann": &userv1.User{Policy: "kid", Devices: []*userv1.Device{{Id: "phone"}},
			Rules:    &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte("@@||good.example^\n||bad.example^\n")}, Rules: 2},
			Settings: &userv1.Settings{Rewrites: &userv1.RewriteSet{Values: []*userv1.Rewrite{{Name: "old.example", Records: []string{"CNAME ads.example"}}}}}},
		"bob": &userv1.User{},
		"eve": &userv1.User{Devices: []*userv1.Device{{Id: "pad"}}, Settings: &userv1.Settings{RateLimit: proto.Uint32(5), RateBurst: proto.Uint32(7),
			AllowNetworks: &userv1.StringSet{Values: []string{"192.0.2.0/24"}}, DenyNetworks: &userv1.StringSet{Values: []string{"192.0.2.128/25"}}}},
		"kim": &userv1.User{Devices: []*userv1.Device{{Id: "kit"}}, Rules: &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte("||bad.example^\n")}, Rules: 1},
			Settings: &userv1.Settings{Categories: &userv1.StringSet{Values: []string{"games", "full"}}, Mode: userv1.BlockMode_BLOCK_MODE_CUSTOM_IP, BlockIpv6: proto.String("2001:db8::1"),
				Unblocks: &userv1.UnblockSet{Values: []*userv1.Unblock{{Name: "free.example"}, {Name: "lent.example", Subtree: true, Until: 32503680000}}}}},
		"off": &userv1.User{Disabled: true, Devices: []*userv1.Device{{Id: "out"}}},
		"odd": &userv1.User{Policy: "gone", Devices: []*userv1.Device{{Id: "ends"}}},
		"zoe": &userv1.User{Devices: []*userv1.Device{{Id: "web", DohOnly: true, TokenSha256: [][]byte{make([]byte, 32)}}}},
	})
	return c, func(s [32]byte) ([]byte, bool) { return text, s == sum }
}

// An internet answers every question with nothing, but for an alias and a name whose servers are dead.
type internet struct{}

func (internet) Lookup(*query.Question, clock.Instant) (settled.Entry, bool) {
	return settled.Entry{}, false
}

func (internet) Get(*query.Question, clock.Instant, []byte) (settled.Entry, bool, bool) {
	return settled.Entry{}, false, false
}

func (internet) Fetch(_ context.Context, _ *query.Tree, q query.Question) (settled.Entry, error) {
	if q.Name == dnsname.MustParse("dead.example.") {
		return settled.Entry{}, errors.New("no server answers")
	}
	u := &query.Unvalidated{Question: q}
	if q.Name == dnsname.MustParse("alias.example.") {
		u.Answer = []query.RRset{{Name: q.Name, Type: dnswire.TypeCNAME, Class: 1, TTL: 60, Data: query.AppendRData(nil, []byte(dnsname.MustParse("x.tracker.example.")))}}
	}
	return settled.Settle(u, query.Insecure, settled.Options{Now: clock.Elapsed(), EDE: query.NoEDE})
}

func (internet) Refresh(context.Context, *query.Tree, query.Question) error { return nil }
func (internet) Postpone(query.Question)                                    {}
func (internet) Stale(query.Question) (settled.Entry, bool)                 { return settled.Entry{}, false }
func (internet) Held(query.Question) (settled.Entry, bool, bool) {
	return settled.Entry{}, false, false
}

// zoneRules are policy zones without anything of an answer but its facts.
type zoneRules struct{ *rpz.Rules }

func (z zoneRules) Question(q *query.Query) (query.Verdict, bool) {
	return z.Rules.Question(q.Source.Addr(), q.Turn.Current.Name, q.Turn.Current.Type)
}
func (z zoneRules) Alias(n dnsname.Name) bool { return z.Names(n) }
func (z zoneRules) Answer(q *query.Query, a *query.Answer, _ clock.Instant) (v query.Verdict, hit bool) {
	return v, false
}
func (zoneRules) Target(*query.Question, clock.Instant) (n dnsname.Name, ttl uint32, ok bool) {
	return "", 0, false
}
func (z zoneRules) ExplainQuestion(q *query.Query) (query.Verdict, rpz.Decision, bool) {
	return z.Rules.ExplainQuestion(q.Source.Addr(), q.Turn.Current.Name, q.Turn.Current.Type)
}
func (z zoneRules) ExplainAnswer(*query.Query, *query.Answer, clock.Instant) (v query.Verdict, d rpz.Decision, hit bool) {
	return v, d, false
}

func newExplainer(t *testing.T, zone string) Policies {
	t.Helper()
	users, blob := newUsers(t)
	p := Policies{
		Users: users, Blob: blob, Policy: policy.New(policy.Options{Key: dnsname.NewKey([16]byte{7}), Users: users, Blob: blob}),
		Gate: overload.New(overload.Options{Allow: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, Unlimited: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}),
		Path: pipeline.Options{Local: internet{}, Answers: internet{}, Fetch: internet{}, Render: render.New(render.Options{EDE: true})},
	}
	if zone != "" {
		rules, _, err := rpz.Load([]rpz.Source{{Name: dnsname.MustParse("rpz.test."), Text: strings.NewReader(zone), File: "zone"}}, policy.WhyPolicyZone)
		if err != nil {
			t.Fatal(err)
		}
		p.Path.Zones, p.Zones = zoneRules{rules}, zoneRules{rules}
	}
	return p
}

func TestExplain(t *testing.T) {
	p := newExplainer(t, "")
	const access = "access, none, \"\" 0 \"\", not judged without the client's address: over plain DNS access.allow lets in 192.0.2.0/24 []\n"
	const who = access + "identity, none, \"\" 0 \"\", device phone of user ann, revision 9, policy kid []\n"
	nothing := func(name string) string {
		return "question, none, \"\" 0 \"\", nothing applies to " + name + ". A []\n"
	}
	for name, want := range map[string]string{
		"ads.example":   `list, blocked, "oisd" 2 "||ads.example^", ads.example; answered 0.0.0.0, TTL 10, EDE 17 (OISD) [@@||ads.example^ in the user's rules, or lists-=oisd]`,
		"bad.example":   `user rule, blocked, "user rules" 2 "||bad.example^", bad.example; answered 0.0.0.0, TTL 10, EDE 17 (user rule) [@@||bad.example^ in the user's rules, or without the rule]`,
		"good.example":  `user rule, allowed, "user rules" 1 "@@||good.example^", good.example [without the rule; its block wins if it is $important]` + "\n" + `answer, none, "" 0 "", given as resolved: NOERROR, 0 records, Insecure []`,
		"x.chat.test":   `service, blocked, "chat" 2 "||chat.test^", x.chat.test; answered 0.0.0.0, TTL 10, EDE 17 (Chat) [@@||x.chat.test^ in the user's rules, or services-=chat]`,
		"plain.example": nothing("plain.example") + `answer, none, "" 0 "", given as resolved: NOERROR, 0 records, Insecure []`,
		"dead.example":  nothing("dead.example") + `answer, none, "" 0 "", it could not be resolved: no server answers []`,
		"alias.example": nothing("alias.example") + `answer: list, blocked, "oisd" 3 "||tracker.example^", x.tracker.example; answered 0.0.0.0, TTL 10, EDE 17 (OISD) [@@||x.tracker.example^ in the user's rules, or lists-=oisd]`,
	} {
		for _, target := range []string{"ann", "ann/phone"} {
			if got := explain(t, p, target, name, nil); got != who+want+"\n" {
				t.Errorf("%s, %s:\n%swant\n%s%s\n", target, name, got, who, want)
			}
		}
	}
	// A rewrite is followed to what it leads to.
	if got := explain(t, p, "ann", "old.example", nil); !strings.Contains(got, "rewrite, rewritten") || !strings.Contains(got, "the question is now ads.example.") || !strings.HasSuffix(got, "lists-=oisd]\n") {
		t.Errorf("a rewrite:\n%s", got)
	}
	// What has no effect, and for how long something has.
	const idle = `lists, none, "" 0 "", the settings have categories that hold no list, and so no effect: games [lists for them: sluicectl category set games lists+=LIST]` + "\n"
	for name, want := range map[string]string{
		"bad.example":    `bad.example; answered no data (mode is custom_ip, and block_ipv4 is not set), TTL 10`,
		"free.example":   `unblocks has free.example [`,
		"x.lent.example": `unblocks has *.lent.example until 3000-01-01T00:00:00Z [`,
	} {
		if got := explain(t, p, "kim", name, nil); !strings.Contains(got, idle) || !strings.Contains(got, want) {
			t.Errorf("%s:\n%swant %q", name, got, want)
		}
	}
	for target, want := range map[string]struct {
		code codes.Code
		says string
	}{
		"nobody": {codes.NotFound, `user "nobody"`}, "ann/tv": {codes.NotFound, `device "tv" of user "ann"`}, "bob/tv": {codes.NotFound, "the user has no device"},
		"bob": {codes.FailedPrecondition, "has no device"}, "bob/phone": {codes.NotFound, `it is user "ann"'s`},
		"off": {codes.FailedPrecondition, `user "off" is disabled`}, "odd": {codes.FailedPrecondition, "cannot be used"},
	} {
		who, err := ParseTarget(target)
		if err != nil {
			t.Fatal(err)
		}
		_, err = p.Explain(t.Context(), Asking{Who: who, Name: dnsname.MustParse("ads.example."), Type: 1})
		wantError(t, target, coded(err), want.code, "")
		if err == nil || !strings.Contains(err.Error(), want.says) {
			t.Errorf("%s: %v, want %q", target, err, want.says)
		}
	}
}

// What decides before the user's settings and beside them: networks, rates, policy zones, in the order of the path.
func TestExplainBesidePolicy(t *testing.T) { synctest.Test(t, explainBesidePolicy) }

func explainBesidePolicy(t *testing.T) {
	p := newExplainer(t, "zoned.example CNAME .\nonward.example CNAME ads.example.\npassed.example CNAME rpz-passthru.\n32.66.2.0.192.rpz-client-ip CNAME rpz-drop.\ntcp.example CNAME rpz-tcp-only.\n")
	var steps []string
	ask := func(target, name, addr string, tr query.Transport, typ uint16) string {
		steps = nil
		lines := explain(t, p, target, name, func(a *Asking) {
			if addr != "" {
				a.Address = netip.MustParseAddr(addr)
			}
			a.Transport, a.Type = &tr, typ
		})
		for line := range strings.Lines(lines) {
			f := strings.SplitN(line, ", ", 3)
			if f[1] == "none" {
				steps = append(steps, f[0])
			} else {
				steps = append(steps, f[0]+" "+f[1])
			}
		}
		return lines
	}
	for _, c := range []struct {
		what, target, name, addr string
		tr                       query.Transport
		typ                      uint16
		steps, says              string
	}{
		{"a zone", "ann", "zoned.example", "", query.UDP, 1, "access identity policy zone blocked", `"rpz.test" 0 "zoned.example CNAME .", zoned.example; answered NXDOMAIN, TTL 60, EDE 15 (policy zone rpz.test) [`},
		{"a zone's alias, judged on", "ann", "onward.example", "", query.UDP, 1, "access identity policy zone rewritten redirect rewritten list blocked", "the question is now ads.example."},
		{"let through by a zone", "ann", "passed.example", "", query.UDP, 1, "access identity policy zone question answer", "no other rule of policy zones counts"},
		{"a client that a zone drops", "ann", "ads.example", "192.0.2.66", query.UDP, 1, "access identity policy zone blocked", "the client 192.0.2.66"},
		{"only over TCP", "ann", "tcp.example", "", query.UDP, 1, "access identity policy zone blocked", "rpz-tcp-only"},
		{"over TCP", "ann", "tcp.example", "", query.TCP, 1, "access identity policy zone question answer", "it has come over TCP"},
		{"an address in access.allow", "ann", "ads.example", "192.0.2.1", query.UDP, 1, "access identity list blocked", "192.0.2.1 is in access.allow (192.0.2.0/24)"},
		{"one that is not, plain", "ann", "ads.example", "198.51.100.1", query.TCP, 1, "access blocked", "198.51.100.1 may not ask over plain DNS"},
		{"one that is not, encrypted", "ann", "ads.example", "198.51.100.1", query.DoT, 1, "access identity list blocked", "may ask from anywhere"},
		{"access.unlimited", "ann", "ads.example", "127.0.0.1", query.UDP, 1, "access identity list blocked", "access.unlimited (127.0.0.0/8)"},
		{"its own networks, no address", "eve", "x.example", "", query.DoH, 1, "identity access rate limit question answer", "allow_networks has 192.0.2.0/24, deny_networks has 192.0.2.128/25"},
		{"within them", "eve", "x.example", "192.0.2.1", query.UDP, 1, "access identity access rate limit question answer", "192.0.2.1 is in allow_networks (192.0.2.0/24)"},
		{"denied", "eve", "x.example", "192.0.2.129", query.UDP, 1, "access identity access blocked", "deny_networks-=192.0.2.128/25"},
		{"outside", "eve", "x.example", "203.0.113.7", query.DoT, 1, "access identity access blocked", "allow_networks+=203.0.113.7"},
		{"its rate", "eve", "x.example", "192.0.2.1", query.UDP, 1, "access identity access rate limit question answer", "5 queries a second of the user's devices together, 7 at once; 7 left now"},
		{"by DoH alone", "zoe", "x.example", "", query.DoT, 1, "identity blocked", "doh_only=false"},
		{"and by DoH", "zoe", "x.example", "", query.DoH, 1, "identity question answer", "it has to show its password"},
		{"a transfer", "ann", "x.example", "", query.TCP, 252, "access identity question blocked", "questions of type AXFR are not answered: REFUSED"},
	} {
		got := ask(c.target, c.name, c.addr, c.tr, c.typ)
		if strings.Join(steps, " ") != c.steps || !strings.Contains(got, c.says) {
			t.Errorf("%s: %v\n%swant %s and %q", c.what, steps, got, c.steps, c.says)
		}
	}
	// What is left of a rate is what queries have left of it; explaining takes nothing.
	q := &query.Query{Transport: query.DoT, Source: netip.MustParseAddrPort("192.0.2.1:4000"), Arrived: clock.Elapsed()}
	id, _ := usercache.ParseID("pad")
	if p.Users.LookupDevice(&id, &q.Client.Profile); q.Client.Profile.RateLimit == 0 {
		t.Fatal("no device with a limit")
	}
	q.Client.Kind = query.Identified
	for range 7 {
		if why := p.Gate.Late(q); why != query.NotRefused {
			t.Fatal(why)
		}
	}
	for _, c := range []struct {
		after time.Duration
		says  string
	}{{0, "none left now: refused"}, {0, "none left now: refused"}, {time.Second, "; 5 left now"}, {0, "; 5 left now"}} {
		time.Sleep(c.after)
		if got := ask("eve", "x.example", "192.0.2.1", query.UDP, 1); !strings.Contains(got, c.says) || (steps[len(steps)-1] == "rate limit blocked") != strings.Contains(c.says, "refused") {
			t.Errorf("at its limit, and %v later:\n%s", c.after, got)
		}
	}
}

func explain(t *testing.T, p Policies, target, name string, edit func(*Asking)) string {
	t.Helper()
	who, err := ParseTarget(target)
	if err != nil {
		t.Fatal(err)
	}
	a := Asking{Who: who, Name: dnsname.MustParse(name + "."), Type: dnswire.TypeA}
	if edit != nil {
		edit(&a)
	}
	steps, err := p.Explain(t.Context(), a)
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
	if m.Kind != "users" || m.Revision != 9 || m.Records != 7 || m.Totals.Users != 7 || m.Totals.Devices != 6 || len(m.Root) != 64 || m.Dataset != "01"+strings.Repeat("0", 30) {
		t.Errorf("%v", m)
	}
}
