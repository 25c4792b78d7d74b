package filter

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/publicsuffix"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/filter/rulelist"
)

// The naive evaluator goes through every rule for every name, with package regexp for patterns and strings
// for suffixes. It shares the parser with the engine and nothing else.

type naiveRule struct {
	rulelist.Rule
	name string // text
	re   *regexp.Regexp
	list int
}

func naiveRules(t testing.TB, list int, text string) (rs []naiveRule) {
	rulelist.ParseString(text, func(r *rulelist.Rule) {
		n := naiveRule{Rule: *r, list: list}
		n.Name = slices.Clone(r.Name)
		n.name = strings.TrimSuffix(dnsname.Name(r.Name).String(), ".")
		switch r.Form {
		case rulelist.Glob:
			var p string
			switch r.Glob.Start {
			case rulelist.AtName:
				p = "^"
			case rulelist.AtLabel:
				p = `(^|\.)`
			}
			var runs []string
			for _, s := range strings.Split(r.Glob.Text, "*") {
				runs = append(runs, regexp.QuoteMeta(s))
			}
			p += strings.Join(runs, ".*")
			if r.Glob.End {
				p += "$"
			}
			n.re = regexp.MustCompile("(?s)" + p)
		case rulelist.Regex:
			n.re = regexp.MustCompile("(?i)" + r.Pattern)
		}
		rs = append(rs, n)
	})
	return rs
}

func (n *naiveRule) key() string {
	if n.Form < rulelist.Simple && n.Mods == nil {
		return fmt.Sprintf("%d %s %v %v", n.Form, n.name, n.Allow, n.Important) // Pattern may or may not be set
	}
	return fmt.Sprintf("%d %s %q %v %v %s", n.Form, n.name, n.Pattern, n.Allow, n.Important, n.Mods.AppendKey(nil))
}

func (n *naiveRule) matches(name string, q *Query) bool {
	if n.re != nil {
		if !n.re.MatchString(name) {
			return false
		}
	} else {
		exact, below := name == n.name, strings.HasSuffix(name, "."+n.name)
		switch n.Form.Scope() {
		case rulelist.ScopeExact:
			below = false
		case rulelist.ScopeBelow:
			exact = false
		}
		if !exact && !below {
			return false
		}
	}
	m := n.Mods
	if m == nil {
		return true
	}
	if len(m.Types) > 0 && !slices.Contains(m.Types, q.Type) || len(m.Types) == 0 && slices.Contains(m.NotTypes, q.Type) {
		return false
	}
	for _, d := range m.DenyAllow {
		if name == d || strings.HasSuffix(name, "."+d) {
			return false
		}
		if b, ok := strings.CutSuffix(d, "*"); ok {
			if tld, registry := publicsuffix.PublicSuffix(name); registry && strings.HasSuffix("."+name, "."+b+tld) {
				return false
			}
		}
	}
	if _, err := netip.ParseAddr(name); err == nil && len(m.DenyAllow) > 0 {
		return false
	}
	if slices.Contains(m.NotClients.Names, q.Client) || len(m.Clients.Names) > 0 && !slices.Contains(m.Clients.Names, q.Client) {
		return false
	}
	has := func(tags []string) bool {
		return slices.ContainsFunc(q.Tags, func(t string) bool { return slices.Contains(tags, t) })
	}
	return !has(m.NotTags) && (len(m.Tags) == 0 || has(m.Tags))
}

func (n *naiveRule) depth() int {
	if n.Form >= rulelist.Simple || n.Mods != nil {
		return 0
	}
	return dnsname.Name(n.Name).Labels()
}

type naiveResult struct {
	verdict  Verdict
	deciding map[[2]int]int // list, line: labels if it is a rule of a table
	answers  []string
	hosts    []netip.Addr
}

func naiveMatch(rules []naiveRule, name string, chosen func(int) bool, q *Query) (res naiveResult) {
	bad := map[string]bool{}
	for i := range rules {
		if r := &rules[i]; r.Bad && chosen(r.list) {
			bad[r.key()] = true
		}
	}
	var hits []*naiveRule
	for i := range rules {
		r := &rules[i]
		if !r.Bad && chosen(r.list) && (r.Form.IsHost() || !bad[r.key()]) && r.matches(name, q) {
			hits = append(hits, r)
		}
	}
	// In a policy zone the longest match decides, local data beside an action at one owner.
	hits = slices.DeleteFunc(hits, func(r *naiveRule) bool {
		return r.Form.IsZone() && slices.ContainsFunc(hits, func(o *naiveRule) bool {
			return o != nil && o.Form.IsZone() && o.list == r.list && dnsname.Name(o.Name).Labels() > dnsname.Name(r.Name).Labels()
		})
	})
	isRewrite := func(r *naiveRule) bool { return r.Mods != nil && r.Mods.Rewrite != nil }
	res.deciding = map[[2]int]int{}
	var left []*naiveRule
	for _, r := range hits {
		if !isRewrite(r) || r.Allow || r.Mods.Rewrite.CNAME != "" && r.Mods.Rewrite.CNAME == name {
			continue
		}
		if !slices.ContainsFunc(hits, func(x *naiveRule) bool {
			return isRewrite(x) && x.Allow && (x.Important || !r.Important) && (x.Mods.Rewrite.Any || *x.Mods.Rewrite == *r.Mods.Rewrite)
		}) {
			left = append(left, r)
		}
	}
	if len(left) > 0 {
		res.verdict = Rewritten
		class := func(r *naiveRule) int {
			switch rw := r.Mods.Rewrite; {
			case rw.RCode != 0:
				return 0
			case rw.CNAME != "":
				return 1
			}
			return 2
		}
		best := class(slices.MinFunc(left, func(a, b *naiveRule) int { return class(a) - class(b) }))
		for _, r := range left {
			if class(r) != best {
				continue
			}
			res.deciding[[2]int{r.list, int(r.Line)}] = 0
			if best == 2 && q.Type != 0 && r.Mods.Rewrite.Type == q.Type { // type 0 stands for a rewrite to nothing
				res.answers = append(res.answers, r.Mods.Rewrite.Value)
			}
		}
		slices.Sort(res.answers)
		res.answers = slices.Compact(res.answers)
		return res
	}
	rank := func(r *naiveRule) int {
		switch {
		case r.Form.IsHost():
			return 1
		case r.Important && r.Allow:
			return 5
		case r.Important:
			return 4
		case r.Allow:
			return 3
		}
		return 2
	}
	top := 0
	for _, r := range hits {
		if !isRewrite(r) {
			top = max(top, rank(r))
		}
	}
	addrs := []netip.Addr{netip.MustParseAddr("0.0.0.0"), netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::"), netip.MustParseAddr("::1")}
	for _, r := range hits {
		if isRewrite(r) || rank(r) != top {
			continue
		}
		res.deciding[[2]int{r.list, int(r.Line)}] = max(res.deciding[[2]int{r.list, int(r.Line)}], r.depth())
		res.verdict = Blocked
		if r.Allow {
			res.verdict = Allowed
		}
		if top == 1 {
			a := r.Addr
			if r.Form != rulelist.HostAddr {
				a = addrs[r.Form-rulelist.HostNull4]
			}
			if a.Is4() && q.Type == typeA || a.Is6() && q.Type == typeAAAA {
				res.hosts = append(res.hosts, a)
			}
		}
	}
	slices.SortFunc(res.hosts, netip.Addr.Compare)
	res.hosts = slices.Compact(res.hosts)
	return res
}

// diff compares the engine's result with the naive one.
func diff(m *Matcher, r *Result, want naiveResult, qtype uint16) string {
	if r.Verdict != want.verdict {
		return fmt.Sprintf("verdict %v (list %d line %d), want %v of %v", r.Verdict, r.List, r.Line, want.verdict, want.deciding)
	}
	if r.Verdict == None {
		return ""
	}
	if _, ok := want.deciding[[2]int{int(r.List), int(r.Line)}]; !ok {
		return fmt.Sprintf("%v by list %d line %d, want one of %v", r.Verdict, r.List, r.Line, want.deciding)
	}
	// Of equals the longest suffix in a table comes first, then list and line.
	deepest := slices.Max(slices.Collect(maps.Values(want.deciding)))
	for d, depth := range want.deciding {
		if r.hosts == 0 && r.n == 0 && depth == deepest && (d[0] < int(r.List) || d[0] == int(r.List) && d[1] < int(r.Line)) {
			return fmt.Sprintf("%v by list %d line %d, want the first of %v", r.Verdict, r.List, r.Line, want.deciding)
		}
	}
	if r.Verdict == Rewritten && len(want.deciding) <= maxRefs {
		got := m.Rewrite(r, qtype).Data
		slices.Sort(got)
		if !slices.Equal(got, want.answers) {
			return fmt.Sprintf("answers %q, want %q", got, want.answers)
		}
	}
	if len(want.deciding) <= maxRefs {
		got := m.HostAddrs(r, qtype)
		slices.SortFunc(got, netip.Addr.Compare)
		if !slices.Equal(got, want.hosts) {
			return fmt.Sprintf("host addresses %v, want %v", got, want.hosts)
		}
	}
	return ""
}

var testKey = dnsname.Key{K0: 0x0706050403020100, K1: 0x0f0e0d0c0b0a0908}

// labels are few, so that rules and names meet often.
var labels = []string{"a", "b", "ads", "ad1", "tracker", "example", "org", "com", "my-long-label", "1", "x--y", "metrics9"}

func randomName(r *rand.Rand) string {
	var l []string
	for range 1 + r.IntN(4) {
		l = append(l, labels[r.IntN(len(labels))])
	}
	return strings.Join(l, ".")
}

func pick[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

// randomRule writes a rule of any kind.
func randomRule(r *rand.Rand) string {
	n := randomName(r)
	switch r.IntN(20) {
	case 0:
		return pick(r, "0.0.0.0 ", "127.0.0.1 ", ":: ", "::1 ", "192.0.2.7 ", "2001:db8::7 ") + n + " " + randomName(r)
	case 1:
		return n
	case 2:
		return "*." + n
	case 3:
		return "address=/" + n + "/" + pick(r, "", "#", "192.0.2.9")
	case 4:
		return pick(r, "", "*.") + n + pick(r, " CNAME .", " IN CNAME *.", " CNAME rpz-passthru.", " 60 CNAME walled.example.")
	case 5:
		return "/" + pick(r, "^", "", `(^|\.)`) + pick(r, regexp.QuoteMeta(n), `a[a-z]+\.`, `(ads|tracker|metrics\d)\.`, `\d+`, `^(ad1|ads)\..*com`, ".*") + pick(r, "$", "", `\.org$`) + "/" + randomMods(r)
	}
	p := n
	if r.IntN(3) == 0 {
		i := r.IntN(len(p) + 1)
		p = p[:i] + "*" + p[i+r.IntN(len(p)+1-i):]
	}
	if r.IntN(4) == 0 {
		p = p[r.IntN(len(p)):]
	}
	return pick(r, "", "", "", "@@") + pick(r, "||", "||", "||", "|", "", "*.", ".", "||*.", "://") + p + pick(r, "^", "^", "^", "|", "^|", "") + randomMods(r)
}

func randomMods(r *rand.Rand) string {
	if r.IntN(2) == 0 {
		return ""
	}
	var m []string
	for range 1 + r.IntN(2) {
		m = append(m, pick(r, "important", "important", "badfilter", "badfilter", "dnstype=A", "dnstype=~A|~TXT", "dnstype=AAAA|HTTPS",
			"client=kid", "client=~kid", "ctag=pc", "ctag=~pc|~tv", "denyallow=a.example|org", "denyallow=example.*",
			"dnsrewrite=192.0.2.1", "dnsrewrite=192.0.2.2", "dnsrewrite=2001:db8::1", "dnsrewrite=NXDOMAIN", "dnsrewrite=ads.example", "dnsrewrite", "dnsrewrite=NOERROR;TXT;hi"))
	}
	return "$" + strings.Join(m, ",")
}

// randomList writes rules, some of them twins of those in pool, to which it adds.
func randomList(r *rand.Rand, rules int, pool *[]string) string {
	var b strings.Builder
	for range rules {
		rule := randomRule(r)
		if len(*pool) > 0 && r.IntN(8) == 0 {
			rule = pick(r, *pool...) + pick(r, "$badfilter", ",badfilter", "$important,badfilter")
		} else {
			*pool = append(*pool, rule)
		}
		b.WriteString(rule)
		b.WriteString(pick(r, "\n", "\n", "\r\n", "\n# comment\n\n"))
	}
	return b.String()
}

// TestAgainstNaive builds Matchers of random lists, in one go, in layers, with lists replaced and removed,
// and merged, and compares every verdict with the naive one.
func TestAgainstNaive(t *testing.T) {
	rounds := 100
	if testing.Short() || raceEnabled {
		rounds = 20
	}
	verdicts := map[Verdict]int{}
	memo, remembered := new(Memo), 0
	for round := range rounds {
		r := rand.New(rand.NewPCG(uint64(round), 7))
		texts := map[int]string{}
		var pool []string
		var m *Matcher
		for range 1 + r.IntN(6) {
			b := NewBuilder(&testKey)
			for range 1 + r.IntN(4) {
				n := pick(r, 0, 1, 2, 3, 63, 64, 130, 511)
				if b.changed.Has(n) {
					continue
				}
				if m != nil && r.IntN(4) == 0 {
					b.Remove(n)
					delete(texts, n)
					continue
				}
				texts[n] = randomList(r, 1+r.IntN(pick(r, 5, 40, 200)), &pool)
				if _, err := b.Add(n, strings.NewReader(texts[n])); err != nil {
					t.Fatal(err)
				}
			}
			m = b.Build(m)
		}
		if m.Overlays() > MaxOverlays {
			t.Fatalf("%d overlays", m.Overlays())
		}
		var rules []naiveRule
		for n, text := range texts {
			rules = append(rules, naiveRules(t, n, text)...)
		}
		merged := m.Merge(nil)
		loaded := reloaded(t, m)
		for range 200 {
			name := randomName(r)
			wire := []byte(dnsname.MustParse(name))
			q := &Query{Type: pick[uint16](r, 1, 28, 16, 65), Client: pick(r, "", "kid", "other"), Tags: pick(r, nil, []string{"pc"}, []string{"tv", "pc"})}
			var lists *Set
			if r.IntN(3) > 0 {
				lists = &Set{}
				for n := range texts {
					if r.IntN(2) == 0 {
						lists.Add(n)
					}
				}
			}
			want := naiveMatch(rules, name, func(n int) bool { return lists == nil || lists.Has(n) }, q)
			verdicts[want.verdict]++
			for _, m := range []*Matcher{m, merged, loaded} {
				got := m.Match(wire, lists, q)
				for range 2 { // found out, and remembered
					var h [dnsname.MaxLabels + 1]uint64
					n := dnsname.SuffixHashes(&testKey, wire, &h)
					if again := memo.Match(m, wire, h[:n], lists, q); again != got {
						t.Fatalf("round %d: %s with a memo is %+v, want %+v", round, name, again, got)
					}
					if memo.find(m, h[n-1]) != nil && got.Verdict != None {
						remembered++
					}
				}
				if d := diff(m, &got, want, q.Type); d != "" {
					t.Fatalf("round %d, %s type %d client %q tags %q: %s\nlists %v", round, name, q.Type, q.Client, q.Tags, d, texts)
				}
			}
		}
	}
	if remembered < rounds {
		t.Errorf("%d verdicts were remembered: the test does not test the Memo", remembered)
	}
	for v := None; v <= Rewritten; v++ {
		if verdicts[v] < rounds {
			t.Errorf("only %d of the names were %v: the test does not test", verdicts[v], v)
		}
	}
}

func FuzzMatch(f *testing.F) {
	f.Add("||a.example^\n@@||b.a.example^\n0.0.0.0 c.example", "x.b.a.example", uint16(1))
	f.Add("*$denyallow=com\n/ad(s|x)\\d*/\n*.example", "ads.example.com", uint16(28))
	f.Add("$TTL 1\na CNAME .\n*.b CNAME c.\n", "x.b", uint16(5))
	f.Add("||adservice*.x^", strings.Repeat(strings.Repeat("a", 63)+".", 3)+strings.Repeat("a", 56)+".info", uint16(1))
	r := rand.New(rand.NewPCG(1, 1))
	for range 20 {
		f.Add(randomList(r, 10, new([]string)), randomName(r), uint16(1))
	}
	f.Fuzz(func(t *testing.T, text, name string, qtype uint16) {
		n, err := dnsname.Parse(name)
		if err != nil || n == dnsname.Root {
			return
		}
		plain := string(appendText(nil, []byte(n)))
		m, _ := Compile(&testKey, text)
		q := &Query{Type: qtype}
		got := m.Match([]byte(n), nil, q)
		for _, c := range []byte(plain) {
			if c >= 0x80 || c == 0 {
				return // letters that fold beyond ASCII; dots inside labels
			}
		}
		want := naiveMatch(naiveRules(t, 0, text), plain, func(int) bool { return true }, q)
		if d := diff(m, &got, want, qtype); d != "" {
			t.Fatalf("%s: %s", plain, d)
		}
		if a, err := netip.ParseAddr(plain); err == nil {
			m.MatchAddr(a, nil, q)
		}
	})
}
