package policy

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// Every two rows of the table meet at one name, in both combinations of what they can say; the upper one decides.
func TestPairs(t *testing.T) {
	// A row is what makes a name meet it, and what is said then.
	type layer struct {
		settings     *userv1.Settings
		device, user []string // rules
		own          []string // rules of a private list
	}
	var shared, lists, threats []string // of everybody, so that each pair has a name of its own
	rows := []struct {
		name string
		want string
		add  func(l *layer, n string)
	}{
		{"0 access list", "refused by access list", func(l *layer, n string) { l.settings.DenyDomains = set(n) }},
		{"1 filtering off", "pass by filtering off", func(l *layer, n string) { l.settings.Enabled = proto.Bool(false) }},
		{"2 unblocked", "allowed by unblocked", func(l *layer, n string) {
			l.settings.Unblocks = &userv1.UnblockSet{Values: []*userv1.Unblock{{Name: n}}}
		}},
		{"3 important exception", "allowed by important rule", func(l *layer, n string) { l.user = append(l.user, "@@||"+n+"^$important") }},
		{"3 important block", "blocked by important rule", func(l *layer, n string) { shared = append(shared, "||"+n+"^$important") }},
		{"4 device exception", "allowed by device rule", func(l *layer, n string) { l.device = append(l.device, "@@||"+n+"^") }},
		{"4 device block", "blocked by device rule", func(l *layer, n string) { l.device = append(l.device, "||"+n+"^") }},
		{"5 user exception", "allowed by user rule", func(l *layer, n string) { l.user = append(l.user, "@@||"+n+"^") }},
		{"5 user block", "blocked by user rule", func(l *layer, n string) { l.user = append(l.user, "||"+n+"^") }},
		{"5 policy exception", "allowed by policy rule", func(l *layer, n string) { shared = append(shared, "@@||"+n+"^") }},
		{"5 policy block", "blocked by policy rule", func(l *layer, n string) { shared = append(shared, "||"+n+"^") }},
		{"6 rewrite", "synthesised by rewrite", func(l *layer, n string) {
			l.settings.Rewrites = &userv1.RewriteSet{Values: []*userv1.Rewrite{{Name: n, Records: []string{"A 198.51.100.1"}}}}
		}},
		{"7 safe search", "redirected by safe search", func(l *layer, n string) { l.settings.SafeSearch = set("engine") }},
		{"8 type", "blocked by record type", func(l *layer, n string) { l.settings.BlockTypes = set("A") }},
		{"9 schedule", "blocked by schedule", func(l *layer, n string) {
			l.settings.Schedules = &userv1.ScheduleSet{Values: []*userv1.Schedule{{Id: "always", Action: userv1.ScheduleAction_SCHEDULE_ACTION_BLOCK, Everything: true,
				Windows: []*userv1.Window{{Days: 0x7f, From: 0, To: 1440}}}}}
		}},
		{"9 service", "blocked by service", func(l *layer, n string) { l.settings.Services = set("service") }},
		{"10 list rewrite", "synthesised by own list", func(l *layer, n string) { l.own = append(l.own, "||"+n+"^$dnsrewrite=192.0.2.9") }},
		{"10 important exception", "allowed by list", func(l *layer, n string) { lists = append(lists, "@@||"+n+"^$important") }},
		{"10 important block", "blocked by own list", func(l *layer, n string) { l.own = append(l.own, "||"+n+"^$important") }},
		{"10 own exception", "allowed by own list", func(l *layer, n string) { l.own = append(l.own, "@@||"+n+"^") }},
		{"10 list block", "blocked by list", func(l *layer, n string) { lists = append(lists, "||"+n+"^") }},
		{"11 threat", "blocked by threat list", func(l *layer, n string) { threats = append(threats, "||"+n+"^") }},
		// Last: an exception that stands above threats and does not lift them.
		{"10 list exception", "allowed by list", func(l *layer, n string) { lists = append(lists, "@@||"+n+"^") }},
	}
	type pair struct{ name, rows, want string }
	var pairs []pair
	var services []string
	var engine []*userv1.Rewrite
	w := newWorld(t)
	users := map[string]proto.Message{}
	for i, a := range rows {
		for k, b := range rows[i:] {
			c := pair{fmt.Sprintf("p%d-%d.example", i, i+k), a.name + " meets " + b.name, a.want}
			l := &layer{settings: &userv1.Settings{Lists: set("list"), SafeBrowsing: proto.Bool(true)}}
			a.add(l, c.name)
			if k > 0 {
				b.add(l, c.name)
			}
			switch {
			case b.name == "10 list exception" && a.name == "10 list block":
				c.want = b.want // an exception before a block
			case a.name == "10 important exception" && b.name == "11 threat":
				c.want = b.want // which no exception of a catalogue list lifts
			}
			if own := strings.Join(l.own, "\n"); own != "" {
				l.settings.OwnLists = &userv1.OwnListSet{Values: []*userv1.OwnList{{Id: "own", Sha256: w.blob(own), Size: uint64(len(own))}}}
			}
			services = append(services, "||"+c.name+"^")
			engine = append(engine, &userv1.Rewrite{Name: c.name, Records: []string{"CNAME safe.example"}})
			id := strings.TrimSuffix(c.name, ".example")
			users[id] = &userv1.User{Policy: "shared", Settings: l.settings, Rules: rules(l.user...), Devices: []*userv1.Device{{Id: id, Rules: rules(l.device...)}}}
			pairs = append(pairs, c)
		}
	}
	w.list("list", 0, strings.Join(lists, "\n"))
	w.list("threats", 1, strings.Join(threats, "\n"))
	w.putAll(usercache.CatalogueKind, map[string]proto.Message{
		"category/malware":  &userv1.Category{Lists: []string{"threats"}, Threat: true, SafeBrowsing: true},
		"service/service":   &userv1.Service{Rules: services},
		"safesearch/engine": &userv1.SafeSearch{Rewrites: engine},
		"policy/shared":     &userv1.Policy{Rules: rules(shared...)},
	})
	w.putAll(usercache.Users, users)
	p := w.policy()
	for _, c := range pairs {
		v := p.Question(w.ask(p, strings.TrimSuffix(c.name, ".example"), c.name+".", "A"))
		if got := v.Kind.String() + " by " + WhyText(v.Why); got != c.want {
			t.Errorf("%s: %s, want %s", c.rows, got, c.want)
		}
	}
	// The table is whole: what can decide is in a row, but for what only answers meet and what holds for everybody.
	said := map[string]bool{"nothing": true, "rebinding protection": true, "policy zone": true, "bypass": true}
	for _, r := range rows {
		said[r.want[strings.Index(r.want, " by ")+4:]] = true
	}
	for w := range query.Why(NumWhy) {
		if !said[WhyText(w)] {
			t.Errorf("no row decides by %q", WhyText(w))
		}
	}
}

// Cases of users and of caches of verdicts, of which there are none: each input of a match counts each time.
func TestCases(t *testing.T) {
	w := newWorld(t)
	w.list("ads", 0, "||ads.example^\n||both.example^\n")
	w.list("mine", 1, "@@||both.example^\n@@||never.example^\n")
	w.list("shared", 2, "||a.example^$client=192.0.2.1\n||tagged.example^$ctag=device_pc\n||named.example^$client=two\n")
	lists := func(ids ...string) *userv1.Settings { return &userv1.Settings{Lists: set(ids...)} }
	w.put(usercache.Users, "u18", &userv1.User{Settings: lists("ads", "mine"), Devices: []*userv1.Device{{Id: "u18-device"}}})
	w.put(usercache.Users, "u18-mine", &userv1.User{Settings: lists("mine"), Devices: []*userv1.Device{{Id: "u18-mine-device"}}})
	w.put(usercache.Users, "m20-1", &userv1.User{Settings: lists("shared"), Devices: []*userv1.Device{{Id: "one", Tags: []string{"device_pc"}}}})
	w.put(usercache.Users, "m20-2", &userv1.User{Settings: lists("shared"), Devices: []*userv1.Device{{Id: "two"}}})
	p := w.policy()
	for round := range 2 { // in both orders
		for _, c := range []struct{ row, device, source, name, want string }{
			{"U18", "u18-device", "192.0.2.1", "other.example.", "pass"},
			{"U18", "u18-device", "192.0.2.1", "ads.example.", "blocked"},
			{"U18", "u18-device", "192.0.2.1", "both.example.", "allowed"},
			{"U18", "u18-mine-device", "192.0.2.1", "other.example.", "pass"},
			{"U18", "u18-mine-device", "192.0.2.1", "ads.example.", "pass"},
			{"M20, K07", "one", "192.0.2.1", "a.example.", "blocked"},
			{"M20, K07", "two", "192.0.2.2", "a.example.", "pass"},
			{"M20, K07", "two", "192.0.2.1", "a.example.", "blocked"},
			{"M20, K07", "one", "192.0.2.2", "a.example.", "pass"},
			{"$ctag", "one", "192.0.2.1", "tagged.example.", "blocked"},
			{"$ctag", "two", "192.0.2.1", "tagged.example.", "pass"},
			{"$client by id", "two", "192.0.2.1", "named.example.", "blocked"},
			{"$client by id", "one", "192.0.2.1", "named.example.", "pass"},
		} {
			q := w.ask(p, c.device, c.name, "A")
			q.Source = addrPort(c.source)
			if v := p.Question(q); v.Kind.String() != c.want {
				t.Errorf("%s, round %d: %s at %s asks %s: %s, want %s", c.row, round, c.device, c.source, c.name, say(v), c.want)
			}
		}
	}
}

// Access lists by name, exceptions of rebinding protection, the switches against ways around the resolver,
// categories that others demand.
func TestSwitches(t *testing.T) {
	w := newWorld(t)
	w.list("court", 0, "||court.example^\n")
	w.list("malware", 1, "||malware.example^\n")
	w.put(usercache.CatalogueKind, "category/court", &userv1.Category{Lists: []string{"court"}, Required: true, Number: 0})
	w.put(usercache.CatalogueKind, "category/malware", &userv1.Category{Lists: []string{"malware"}, Threat: true, Number: 1})
	w.put(usercache.CatalogueKind, "safesearch/engine", &userv1.SafeSearch{Rewrites: []*userv1.Rewrite{{Name: "www.engine.example", Records: []string{"CNAME safe.elsewhere.example"}}}})
	device := func(id string, s *userv1.Settings) *userv1.Device { return &userv1.Device{Id: id, Settings: s} }
	w.put(usercache.Users, "u", &userv1.User{Settings: &userv1.Settings{Categories: set("court", "malware")}, Devices: []*userv1.Device{
		device("denies", &userv1.Settings{DenyDomains: set("games.example"), Enabled: proto.Bool(false), Ecs: proto.Bool(false)}),
		device("allows", &userv1.Settings{AllowDomains: set("example", "engine.example"), DenyDomains: set("games.example"), SafeSearch: set("engine")}),
		device("canary", &userv1.Settings{BlockFirefoxCanary: proto.Bool(true)}),
		device("relay", &userv1.Settings{BlockPrivateRelay: proto.Bool(true)}),
		device("rebinding", &userv1.Settings{RebindingProtection: proto.Bool(true), RebindingExceptions: set("corp.example")}),
	}})
	p := w.policy()
	for _, c := range []struct{ device, name, typ, want string }{
		{"denies", "games.example.", "A", "refused by access list"},
		{"denies", "x.y.games.example.", "TXT", "refused by access list"},
		{"denies", "mygames.example.", "A", "pass by filtering off"},
		{"allows", "a.example.", "A", "pass by nothing"},
		{"allows", "a.test.", "A", "refused by access list"},
		{"allows", "a.games.example.", "A", "refused by access list"},
		{"allows", "www.engine.example.", "AAAA", "redirected by safe search to safe.elsewhere.example."},
		{"allows", "www.engine.example.", "HTTPS", "redirected by safe search to safe.elsewhere.example."},
		{"allows", "www.engine.example.", "MX", "pass by nothing"},
		{"canary", "use-application-dns.net.", "A", "blocked by bypass mode 1"},
		{"canary", "mask.icloud.com.", "A", "pass by nothing"},
		{"relay", "mask.icloud.com.", "AAAA", "blocked by bypass mode 1"},
		{"relay", "mask-h2.icloud.com.", "HTTPS", "blocked by bypass mode 1"},
		{"relay", "use-application-dns.net.", "A", "pass by nothing"},
	} {
		if got := say(p.Question(w.ask(p, c.device, c.name, c.typ))); got != c.want {
			t.Errorf("%s asks %s %s: %s, want %s", c.device, c.name, c.typ, got, c.want)
		}
	}
	for name, want := range map[string]uint16{"court.example.": 16, "malware.example.": 15} {
		if v := p.Question(w.ask(p, "canary", name, "A")); v.Block.EDE != want {
			t.Errorf("%s: extended error %d, want %d (%s)", name, v.Block.EDE, want, say(v))
		}
	}
	for _, c := range []struct {
		what, name, answer string
		local              bool
		want               string
	}{
		{"a private address", "a.example.", "a.example. A 192.168.1.1", false, "blocked by rebinding protection mode 0"},
		{"of an excepted name", "nas.corp.example.", "nas.corp.example. A 192.168.1.1", false, "pass by nothing"},
		{"behind an alias to an excepted name", "a.example.", "a.example. CNAME nas.corp.example.\nnas.corp.example. A 192.168.1.1", false, "blocked by rebinding protection mode 0"},
		{"IPv4-mapped", "a.example.", "a.example. AAAA ::ffff:10.0.0.1", false, "blocked by rebinding protection mode 0"},
		{"behind NAT64", "a.example.", "a.example. AAAA 64:ff9b::10.0.0.1", false, "blocked by rebinding protection mode 0"},
		{"behind NAT64, public", "a.example.", "a.example. AAAA 64:ff9b::203.0.113.1", false, "pass by nothing"},
		{"behind 6to4", "a.example.", "a.example. AAAA 2002:c0a8:101::1", false, "blocked by rebinding protection mode 0"},
		{"IPv4-compatible", "a.example.", "a.example. AAAA ::127.0.0.1", false, "blocked by rebinding protection mode 0"},
		{"of this network", "a.example.", "a.example. A 0.1.2.3", false, "blocked by rebinding protection mode 0"},
		{"site-local", "a.example.", "a.example. AAAA fec0::1", false, "blocked by rebinding protection mode 0"},
		{"public IPv6", "a.example.", "a.example. AAAA 2600::1", false, "pass by nothing"},
		{"in a hint", "a.example.", "a.example. HTTPS 1 . ipv6hint=fd00::1", false, "blocked by rebinding protection mode 0"},
		{"of local data", "a.example.", "a.example. A 192.168.1.1", true, "pass by nothing"},
	} {
		q := w.ask(p, "rebinding", c.name, "A")
		q.Turn.Local = c.local
		a := answer(t, q, c.answer)
		if got := say(p.Answer(q, &a, p.Question(q))); got != c.want {
			t.Errorf("%s: %s, want %s", c.what, got, c.want)
		}
	}
}

// The answer is judged by the type of its records; what a catalogue list's exception lets through is still judged
// by threats; lists that a schedule pauses are paused for answers too.
func TestAnswersByType(t *testing.T) {
	w := newWorld(t)
	w.list("types", 0, "||t.example^$dnstype=CNAME\n||mx.example^$dnstype=MX\n||h.example^$dnstype=HTTPS\n||192.0.2.66^$dnstype=AAAA\n@@||excepted.example^\n@@||txt.example^\n||tracker.example^\n")
	w.list("malware", 1, "||threat.example^\n||192.0.2.99^\n||txt.example^$dnstype=TXT\n")
	w.put(usercache.CatalogueKind, "category/malware", &userv1.Category{Lists: []string{"malware"}, Threat: true})
	w.put(usercache.Users, "u", &userv1.User{Settings: &userv1.Settings{Lists: set("types"), Categories: set("malware")}, Devices: []*userv1.Device{{Id: "d"},
		{Id: "switched", Settings: &userv1.Settings{BlockTypes: set("TXT"), BlockHttpsRecords: proto.Bool(true)}, Rules: rules("@@||mine.example^$dnstype=TXT")},
		{Id: "paused", Settings: &userv1.Settings{Schedules: &userv1.ScheduleSet{Values: []*userv1.Schedule{{Id: "s", Action: userv1.ScheduleAction_SCHEDULE_ACTION_PAUSE,
			Lists: []string{"types"}, Categories: []string{"malware"}, Windows: []*userv1.Window{{Days: 0x7f, From: 0, To: 1440}}}}}}}}})
	p := w.policy()
	for _, c := range []struct{ device, name, typ, answer, want string }{
		{"d", "a.example.", "A", "a.example. CNAME t.example.\nt.example. A 203.0.113.1", "blocked by list mode 0"}, // C10
		{"d", "a.example.", "AAAA", "a.example. CNAME t.example.", "blocked by list mode 0"},                        // C04
		{"d", "a.example.", "MX", "a.example. MX 1 mx.example.", "blocked by list mode 0"},
		{"d", "a.example.", "SRV", "a.example. SRV 1 1 1 mx.example.", "pass by nothing"},
		{"d", "a.example.", "SRV", "a.example. SRV 1 1 1 tracker.example.", "blocked by list mode 0"},
		{"d", "a.example.", "NS", "a.example. NS tracker.example.", "blocked by list mode 0"},
		{"d", "1.2.0.192.in-addr.arpa.", "PTR", "1.2.0.192.in-addr.arpa. PTR x.tracker.example.", "blocked by list mode 0"},
		{"d", "a.example.", "HTTPS", "a.example. HTTPS 1 h.example.", "blocked by list mode 0"},
		{"d", "a.example.", "HTTPS", "a.example. HTTPS 0 h.example.", "blocked by list mode 0"}, // AliasMode
		{"d", "a.example.", "SVCB", "a.example. SVCB 0 h.example.", "pass by nothing"},
		{"d", "a.example.", "SVCB", "a.example. SVCB 0 tracker.example.", "blocked by list mode 0"},
		{"d", "a.example.", "A", "a.example. A 192.0.2.66", "pass by nothing"},                                                         // another type
		{"d", "excepted.example.", "A", "excepted.example. CNAME tracker.example.\ntracker.example. A 203.0.113.1", "pass by nothing"}, // C02
		{"d", "excepted.example.", "A", "excepted.example. CNAME threat.example.\nthreat.example. A 203.0.113.1", "blocked by threat list mode 0"},
		{"d", "excepted.example.", "A", "excepted.example. A 192.0.2.99", "blocked by threat list mode 0"},
		{"d", "t.example.", "ANY", "t.example. CNAME a.example.", "blocked by list mode 0"},
		{"d", "t.example.", "ANY", "t.example. A 203.0.113.1", "pass by nothing"},
		{"d", "mx.example.", "ANY", "mx.example. MX 1 a.example.", "blocked by list mode 0"},
		{"d", "mx.example.", "ANY", "mx.example. TXT a\nmx.example. MX 1 a.example.", "blocked by list mode 0"},
		{"d", "a.example.", "ANY", "a.example. MX 1 mx.example.", "blocked by list mode 0"},
		{"d", "a.example.", "ANY", "a.example. HTTPS 1 h.example.", "blocked by list mode 0"},
		{"d", "a.example.", "ANY", "a.example. TXT mx.example.", "pass by nothing"},
		{"d", "txt.example.", "ANY", "txt.example. TXT a", "blocked by threat list mode 0"}, // though a list excepts it
		{"switched", "a.example.", "ANY", "a.example. TXT a", "blocked by record type mode 2"},
		{"switched", "a.example.", "ANY", "a.example. HTTPS 1 .", "blocked by record type mode 2"},
		{"switched", "a.example.", "ANY", "a.example. MX 1 b.example.", "pass by nothing"},
		{"switched", "mine.example.", "ANY", "mine.example. TXT a", "pass by nothing"},
		{"paused", "a.example.", "A", "a.example. CNAME tracker.example.\ntracker.example. A 192.0.2.99", "pass by nothing"},
	} {
		q := w.ask(p, c.device, c.name, c.typ)
		a := answer(t, q, c.answer)
		if got := say(p.Answer(q, &a, p.Question(q))); got != c.want {
			t.Errorf("%s: %s %s with %q: %s, want %s", c.device, c.name, c.typ, c.answer, got, c.want)
		}
	}
}

// W17 and W19, and the other rewrites of rules.
func TestRewrites(t *testing.T) {
	w := newWorld(t)
	w.put(usercache.Users, "u", &userv1.User{
		Settings: &userv1.Settings{Rewrites: &userv1.RewriteSet{Values: []*userv1.Rewrite{
			{Name: "*.host.example", Records: []string{"A 192.0.2.2"}},
			{Name: "a.host.example", Records: []string{"A 192.0.2.1"}},
			{Name: "*.both.example", Records: []string{"A 192.0.2.3", "AAAA 2001:db8::3"}},
			{Name: "BIG.EXAMPLE", Records: []string{"A 192.0.2.4"}},
			{Name: "*.sub.w.example", Records: []string{"A 192.0.2.6"}},
			{Name: "*.w.example", Records: []string{"A 192.0.2.5"}},
			{Name: "except.w.example", Records: []string{"CNAME except.w.example"}},
			{Name: "alias.example", Records: []string{"CNAME target.example"}},
			{Name: "mail.example", Records: []string{"MX 10 mx.example", `TXT "a b" c`}},
		}}},
		Rules:   rules("||self.example^$dnsrewrite=SELF.example", "||text.example^$dnsrewrite=NOERROR;TXT;a b;c \"d\"", "||long.example^$dnsrewrite=NOERROR;TXT;"+strings.Repeat("x", 300)),
		Devices: []*userv1.Device{{Id: "d"}},
	})
	p := w.policy()
	for _, c := range []struct{ name, typ, want string }{
		{"a.host.example.", "A", "synthesised by rewrite NOERROR 192.0.2.1"},
		{"b.host.example.", "A", "synthesised by rewrite NOERROR 192.0.2.2"},
		{"host.example.", "A", "pass by nothing"},
		{"www.both.example.", "AAAA", "synthesised by rewrite NOERROR 2001:db8::3"},
		{"big.example.", "A", "synthesised by rewrite NOERROR 192.0.2.4"},
		{"a.host.example.", "HTTPS", "synthesised by rewrite NOERROR"},
		{"a.host.example.", "TXT", "synthesised by rewrite NOERROR"},
		{"x.sub.w.example.", "A", "synthesised by rewrite NOERROR 192.0.2.6"},
		{"y.w.example.", "A", "synthesised by rewrite NOERROR 192.0.2.5"},
		{"except.w.example.", "A", "pass by nothing"},
		{"alias.example.", "A", "flattened by rewrite to target.example."},
		{"mail.example.", "MX", "synthesised by rewrite NOERROR 10 mx.example."},
		{"mail.example.", "TXT", `synthesised by rewrite NOERROR "a b" "c"`},
		{"mail.example.", "A", "synthesised by rewrite NOERROR"},
		{"self.example.", "A", "pass by nothing"}, // W17
		{"text.example.", "TXT", `synthesised by user rule NOERROR "a b;c \"d\""`},
		{"long.example.", "TXT", fmt.Sprintf("synthesised by user rule NOERROR %q %q", strings.Repeat("x", 255), strings.Repeat("x", 45))},
	} {
		if got := say(p.Question(w.ask(p, "d", c.name, c.typ))); got != c.want {
			t.Errorf("%s %s: %s, want %s", c.name, c.typ, got, c.want)
		}
	}
}

// Users of one shared policy share what is compiled of its rewrites; the TTL that these do not state is each user's own.
func TestRewritesOfOnePolicy(t *testing.T) {
	w := newWorld(t)
	w.put(usercache.CatalogueKind, "policy/shared", &userv1.Policy{Settings: &userv1.Settings{Rewrites: &userv1.RewriteSet{Values: []*userv1.Rewrite{
		{Name: "data.example", Records: []string{"A 192.0.2.1", "TXT a"}}, {Name: "alias.example", Records: []string{"CNAME target.example"}},
		{Name: "gone.example", Records: []string{"NXDOMAIN"}}, {Name: "stated.example", Records: []string{"A 192.0.2.2"}, Ttl: 33},
	}}}})
	for id, ttl := range map[string]uint32{"a": 11, "b": 22} {
		w.put(usercache.Users, id, &userv1.User{Policy: "shared", Settings: &userv1.Settings{BlockTtl: proto.Uint32(ttl)}, Devices: []*userv1.Device{{Id: id}}})
	}
	p := w.policy()
	for _, who := range []struct {
		id  string
		ttl uint32
	}{{"a", 11}, {"b", 22}, {"a", 11}} {
		ask := func(name, typ string) query.Verdict { return p.Question(w.ask(p, who.id, name, typ)) }
		if v := ask("data.example.", "A"); v.Synth.TTL != who.ttl || v.Synth.RRs[0].TTL != who.ttl {
			t.Errorf("%s: data has TTL %d and %d, want %d", who.id, v.Synth.TTL, v.Synth.RRs[0].TTL, who.ttl)
		}
		if v := ask("data.example.", "AAAA"); v.Synth.TTL != who.ttl {
			t.Errorf("%s: no data has TTL %d, want %d", who.id, v.Synth.TTL, who.ttl)
		}
		if v := ask("gone.example.", "A"); v.Synth.TTL != who.ttl {
			t.Errorf("%s: NXDOMAIN has TTL %d, want %d", who.id, v.Synth.TTL, who.ttl)
		}
		if v := ask("alias.example.", "A"); v.Block.TTL != time.Duration(who.ttl)*time.Second {
			t.Errorf("%s: an alias has TTL %v, want %d", who.id, v.Block.TTL, who.ttl)
		}
		if v := ask("stated.example.", "A"); v.Synth.RRs[0].TTL != 33 {
			t.Errorf("%s: TTL %d, want the 33 that is stated", who.id, v.Synth.RRs[0].TTL)
		}
	}
}

// Hosts lines, in a list and pasted among one's own rules: of all addresses that they give a name those are answered
// that lead somewhere, and their usual beginning does no harm.
func TestHostsLines(t *testing.T) {
	const nulls, reals = "0.0.0.0 both.example\n::1 six.example\n0.0.0.0 null.example\n", "192.0.2.7 both.example\n2001:db8::7 six.example\n"
	const beginning = "127.0.0.1 localhost\n::1 localhost\nfe80::1%lo0 localhost\n0.0.0.0 0.0.0.0\n"
	w := newWorld(t)
	w.list("nulls", 0, beginning+nulls)
	w.list("reals", 1, reals)
	w.put(usercache.Users, "listed", &userv1.User{Settings: &userv1.Settings{Lists: set("nulls", "reals")}, Devices: []*userv1.Device{{Id: "listed"}}})
	w.put(usercache.Users, "own", &userv1.User{Rules: rules(beginning, nulls, reals), Devices: []*userv1.Device{{Id: "own"}}})
	p := w.policy()
	for device, by := range map[string]string{"listed": "list", "own": "user rule"} {
		for _, c := range []struct{ name, typ, want string }{
			{"both.example.", "A", "synthesised by " + by + " NOERROR 192.0.2.7"},
			{"both.example.", "AAAA", "blocked by " + by + " mode 0"},
			{"six.example.", "AAAA", "synthesised by " + by + " NOERROR 2001:db8::7"},
			{"null.example.", "A", "blocked by " + by + " mode 0"},
			{"localhost.", "A", "pass by nothing"}, // P11
			{"localhost.", "AAAA", "pass by nothing"},
		} {
			if got := say(p.Question(w.ask(p, device, c.name, c.typ))); got != c.want {
				t.Errorf("%s: %s %s: %s, want %s", device, c.name, c.typ, got, c.want)
			}
		}
	}
}

func addrPort(addr string) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(addr), 5000) }

// What would change a verdict is said as a setting or a rule.
func TestExplained(t *testing.T) {
	w := newWorld(t)
	w.list("ads", 0, "||ads.example^\n")
	w.list("malware", 1, "||malware.example^\n")
	w.list("night", 2, "||night.example^\n")
	w.put(usercache.CatalogueKind, "category/malware", &userv1.Category{Lists: []string{"malware"}, Threat: true})
	w.put(usercache.CatalogueKind, "service/tube", &userv1.Service{Name: "Tube", Rules: []string{"||tube.example^"}})
	w.put(usercache.Users, "u", &userv1.User{
		Settings: &userv1.Settings{Lists: set("ads"), Categories: set("malware"), DenyDomains: set("games.example"),
			Schedules: &userv1.ScheduleSet{Values: []*userv1.Schedule{{Id: "always", Action: userv1.ScheduleAction_SCHEDULE_ACTION_BLOCK, Services: []string{"tube"}, Lists: []string{"night"},
				Windows: []*userv1.Window{{Days: 0x7f, From: 0, To: 1440}}}}},
			Rewrites: &userv1.RewriteSet{Values: []*userv1.Rewrite{{Name: "*.nas.example", Records: []string{"A 192.0.2.1"}}}}},
		Rules:   rules("! mine", "||mine.example^", "||must.example^$important"),
		Devices: []*userv1.Device{{Id: "d", Rules: rules("||device.example^")}, {Id: "off", Settings: &userv1.Settings{Enabled: proto.Bool(false)}}},
	})
	p := w.policy()
	for _, c := range []struct{ device, name, want string }{
		{"d", "ads.example.", "list blocked ads:1 [@@||ads.example^ in the user's rules, or lists-=ads]"},
		{"d", "x.malware.example.", "threat list blocked malware:1 [@@||x.malware.example^ in the user's rules, or category malware off (categories-=malware, safe_browsing, adult), or lists-=malware]"},
		{"d", "night.example.", "list blocked night:1 [@@||night.example^ in the user's rules, or schedules-=always]"},
		{"d", "tube.example.", "service blocked tube:1 [@@||tube.example^ in the user's rules, or schedules-=always]"},
		{"d", "mine.example.", "user rule blocked user rules:2 [@@||mine.example^ in the user's rules, or without the rule]"},
		{"d", "must.example.", "important rule blocked user rules:3 [@@||must.example^$important in the user's rules, or without the rule]"},
		{"d", "device.example.", "device rule blocked device rules:1 [@@||device.example^ in the device's rules, or without the rule]"},
		{"d", "a.nas.example.", "rewrite synthesised :0 [rewrites-=*.nas.example]"},
		{"d", "games.example.", "access list refused :0 [deny_domains without it]"},
		{"off", "ads.example.", "filtering off pass :0 [enabled=true]"},
	} {
		var steps []string
		p.ExplainQuestion(w.ask(p, c.device, c.name, "A"), func(s Step) {
			steps = append(steps, fmt.Sprintf("%s %v %s:%d [%s]", s.Step, s.Verdict, s.List, s.Line, s.Change))
		})
		if got := strings.Join(steps, "; "); got != c.want {
			t.Errorf("%s: %s\nwant %s", c.name, got, c.want)
		}
	}
}
