package filter

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/filter/rulelist"
)

// judge says in one string what a Matcher thinks of "name TYPE", by "device" or "#tag" if one follows.
func judge(t testing.TB, m *Matcher, lists *Set, query string) string {
	f := strings.Fields(query)
	q := &Query{}
	if len(f) > 1 {
		var ok bool
		if q.Type, ok = rulelist.TypeCode(f[1]); !ok {
			t.Fatalf("%q: no such type", query)
		}
	}
	for _, who := range f[2:] {
		if tag, ok := strings.CutPrefix(who, "#"); ok {
			q.Tags = append(q.Tags, tag)
		} else if a, err := netip.ParseAddr(who); err == nil {
			q.Addr = a
		} else {
			q.Client = who
		}
	}
	n, err := dnsname.Parse(f[0])
	if err != nil {
		t.Fatal(err)
	}
	r := m.Match([]byte(n), lists, q)
	switch r.Verdict {
	case None:
		return "none"
	case Rewritten:
		a := m.Rewrite(&r, q.Type)
		switch {
		case a.CNAME != "":
			return fmt.Sprintf("rewritten %d to %s", r.Line, a.CNAME)
		case a.RCode != 0:
			return fmt.Sprintf("rewritten %d %s", r.Line, rulelist.RCodeName(a.RCode))
		}
		return fmt.Sprintf("rewritten %d %q", r.Line, a.Data)
	}
	s := fmt.Sprintf("%v %d", r.Verdict, r.Line)
	if a := m.HostAddrs(&r, q.Type); len(a) > 0 {
		s += fmt.Sprint(" ", a)
	}
	return s
}

// TestRules holds small lists, one rule a line, to what they mean.
func TestRules(t *testing.T) {
	tests := []struct {
		rules string
		want  map[string]string
	}{
		{"a.example", map[string]string{"a.example A": "blocked 1 [0.0.0.0]", "A.Example AAAA": "blocked 1", "sub.a.example A": "none"}},
		{"*.host.example", map[string]string{"x.host.example A": "blocked 1", "y.x.host.example A": "blocked 1", "host.example A": "none", "x.zhost.example A": "none"}},
		{"||zip^", map[string]string{"zip A": "blocked 1", "a.zip A": "blocked 1", "a.zipx A": "none", "zip.example A": "none", ". A": "none"}},
		{"||a.example^\n@@||ok.a.example^", map[string]string{"a.example A": "blocked 1", "x.ok.a.example A": "allowed 2"}},
		{"@@||a.example^\n127.0.0.1 a.example", map[string]string{"a.example A": "allowed 1"}},
		{"||a.example^$important\n@@||a.example^\n@@||a.example^$important", map[string]string{"a.example A": "allowed 3"}},
		{"||a.example^$important\n@@||b.a.example^", map[string]string{"b.a.example A": "blocked 1"}},
		{"||stats.example^\n@@/^stats?\\./", map[string]string{"stats.example A": "allowed 2"}},
		{"/ads|tracker/\n/^stat\\.x{0,2}\\.io$/\n/^(x1|y22)\\.[0-9a-f]{4}\\.net$/", map[string]string{"my.ads.io A": "blocked 1",
			"tracker A": "blocked 1", "stat.xx.io A": "blocked 2", "stat.xxx.io A": "none", "y22.beef.net A": "blocked 3", "y22.beef.com A": "none", "y2.beef.net A": "none"}},
		{"/^adserverx{0,2}\\.io$/", map[string]string{"adserver.io A": "blocked 1", "adserverxx.io A": "blocked 1", "adserverxxx.io A": "none"}},
		{"192.0.2.200 a.example\n192.0.2.201 a.example\n::1 a.example", map[string]string{"a.example A": "blocked 1 [192.0.2.200 192.0.2.201]",
			"a.example AAAA": "blocked 3 [::1]", "a.example TXT": "blocked 1"}},
		// $badfilter
		{"||a.b.example^\n||b.example^\n||a.b.example^$badfilter\n||b.example^$badfilter", map[string]string{"a.b.example A": "none"}},
		{"*$denyallow=x.example\n*$denyallow=y.example,badfilter", map[string]string{"a.example A": "blocked 1", "x.example A": "none"}},
		{"||a.example^$client=kid,important\n||a.example^$important,client=kid,badfilter", map[string]string{"a.example A kid": "none"}},
		{"||a.example^$dnstype=A\n||a.example^$badfilter\n/x/\n/x/$badfilter\na.b\n0.0.0.0 c.example\n||c.example^$badfilter", map[string]string{
			"a.example A": "blocked 1", "xx A": "none", "c.example A": "blocked 6 [0.0.0.0]"}},
		// conditions
		{"||a.example^$dnstype=~A|~CNAME\n||b.example^$dnstype=~A|A", map[string]string{"a.example A": "none", "a.example HTTPS": "blocked 1", "b.example A": "blocked 2", "b.example TXT": "none"}},
		{"||h2.example^$ctag=pc|printer\n||h3.example^$ctag=~pc|~router\n||h4.example^$ctag=~pc|router", map[string]string{
			"h2.example A #phone": "none", "h2.example A #phone #printer": "blocked 1", "h2.example A": "none", "h3.example A #phone": "blocked 2",
			"h3.example A #pc": "none", "h4.example A #router": "blocked 3", "h4.example A #pc #router": "none"}},
		{"||a.example^$client=192.0.2.0/24|~192.0.2.9|Kid", map[string]string{"a.example A 192.0.2.1": "blocked 1", "a.example A 192.0.2.9": "none",
			"a.example A 192.0.2.9 Kid": "none", "a.example A Kid": "blocked 1", "a.example A kid": "none", "a.example A ::ffff:192.0.2.7": "blocked 1"}},
		{"*$denyallow=com|ok.example", map[string]string{"a.com A": "none", "sub.ok.example A": "none", "a.org A": "blocked 1", "xcom A": "blocked 1", "192.0.2.1 A": "none"}},
		// rewrites
		{"|a.example^$dnsrewrite=192.0.2.1\n|a.example^$dnsrewrite=192.0.2.2\n|a.example^$dnsrewrite=2001:db8::1", map[string]string{
			"a.example A": `rewritten 1 ["192.0.2.1" "192.0.2.2"]`, "a.example AAAA": `rewritten 1 ["2001:db8::1"]`, "a.example MX": "rewritten 1 []", "x.a.example A": "none"}},
		{"|a.example^$dnsrewrite=192.0.2.1\n|a.example^$dnsrewrite=b.example\n@@||a.example^\n@@||a.example^$dnsrewrite", map[string]string{"a.example A": "allowed 3"}},
		{"||a.example^$dnsrewrite=192.0.2.1,important\n@@||a.example^$dnsrewrite\n@@||a.example^", map[string]string{"a.example A": `rewritten 1 ["192.0.2.1"]`}},
		{"||a.example^$dnsrewrite=NOERROR;MX;10 mail.example\n@@||a.example^$dnsrewrite=NOERROR;MX;10 mail.example", map[string]string{"a.example MX": "none"}},
		{"||a.example^$dnsrewrite=A.example\n||a.example^", map[string]string{"a.example A": "blocked 2", "b.a.example A": "rewritten 1 to a.example"}},
		{"||a.example^$dnsrewrite=192.0.2.1\n||a.example^$dnsrewrite=b.example\n||a.example^$dnsrewrite=REFUSED", map[string]string{"a.example A": "rewritten 3 REFUSED"}},
		{"|a.example^$dnstype=HTTPS,dnsrewrite=REFUSED", map[string]string{"a.example HTTPS": "rewritten 1 REFUSED", "a.example A": "none"}},
		{"address=/a.example/192.0.2.1", map[string]string{"x.a.example A": `rewritten 1 ["192.0.2.1"]`}},
		// zones
		{"$TTL 60\na.example CNAME .\n*.b.example CNAME .\nok.b.example CNAME rpz-passthru.", map[string]string{"a.example A": "blocked 2", "x.a.example A": "none",
			"b.example A": "none", "x.b.example A": "blocked 3", "ok.b.example A": "allowed 4"}},
	}
	for _, tt := range tests {
		m, rep := Compile(&testKey, tt.rules)
		if rep.Skipped > 0 {
			t.Errorf("%q: %+v", tt.rules, rep.Complaints)
		}
		for query, want := range tt.want {
			if got := judge(t, m, nil, query); got != want {
				t.Errorf("%q: %s is %s, want %s", tt.rules, query, got, want)
			}
		}
	}
}

// TestOtherUsersLists has one index, and users whose choices see nothing of each other.
func TestOtherUsersLists(t *testing.T) {
	b := NewBuilder(&testKey)
	for i, text := range []string{"||ads.example^\nplain.example", "@@||ads.example^", "||ads.example^$badfilter", "\n||ads.example^$important", "\n\n192.0.2.9 plain.example"} {
		if _, err := b.Add(i*100, strings.NewReader(text)); err != nil {
			t.Fatal(err)
		}
	}
	m := b.Build(nil)
	for _, tt := range []struct {
		lists []int
		query string
		want  string
	}{
		{nil, "ads.example A", "none"},
		{[]int{0}, "x.ads.example A", "blocked 1"},
		{[]int{0, 100}, "ads.example A", "allowed 1"},
		{[]int{0, 200}, "ads.example A", "none"},
		{[]int{200, 300}, "ads.example A", "blocked 2"},
		{[]int{0, 100, 200, 300}, "ads.example A", "blocked 2"},
		{[]int{0, 400}, "plain.example A", "blocked 2 [0.0.0.0 192.0.2.9]"},
		{[]int{400}, "plain.example A", "blocked 3 [192.0.2.9]"},
		{[]int{511}, "plain.example A", "none"},
	} {
		var s Set
		for _, n := range tt.lists {
			s.Add(n)
		}
		if got := judge(t, m, &s, tt.query); got != tt.want {
			t.Errorf("lists %v: %s is %s, want %s", tt.lists, tt.query, got, tt.want)
		}
	}
}

func TestMatchAddr(t *testing.T) {
	memo := new(Memo)
	m, _ := Compile(&testKey, "192.0.2.6\n||198.51.100.7^\n/^203\\.0\\.113\\.1\\d$/\n2001:db8::6\n203.0.114.\n0.0.0.0 192.0.2.9\n*$denyallow=com\n||2.3^\n@@||198.51.100.8^")
	for addr, want := range map[string]uint32{
		"192.0.2.6": 1, "192.0.2.66": 0, "198.51.100.7": 2, "203.0.113.12": 3, "203.0.114.2": 5, "203.0.113.2": 0, "2001:db8::6": 4, "2001:db8::7": 0,
		"::ffff:192.0.2.6": 1, "192.0.2.9": 0, "10.0.2.3": 0, "198.51.100.8": 9,
	} {
		r := m.MatchAddr(netip.MustParseAddr(addr), nil, &Query{Type: typeA})
		for range 2 { // found out, and remembered
			if again := memo.MatchAddr(m, netip.MustParseAddr(addr), nil, &Query{Type: typeA}); again != r {
				t.Errorf("%s with a memo: %+v, want %+v", addr, again, r)
			}
		}
		if r.Line != want || (want == 0) != (r.Verdict == None) {
			t.Errorf("%s: %v by line %d, want %d", addr, r.Verdict, r.Line, want)
		}
	}
}

// TestLayers changes lists and holds the layers and the old Matcher to it.
func TestLayers(t *testing.T) {
	build := func(old *Matcher, n int, text string) *Matcher {
		b := NewBuilder(&testKey)
		if _, err := b.Add(n, strings.NewReader(text)); err != nil {
			t.Fatal(err)
		}
		return b.Build(old)
	}
	m1 := build(nil, 1, "||a.example^\n/adserver/")
	m2 := build(m1, 2, "@@||a.example^")
	m3 := build(m2, 1, "\n||a.example^$important")
	for m, want := range map[*Matcher]string{m1: "blocked 1", m2: "allowed 1", m3: "blocked 2"} {
		if got := judge(t, m, nil, "a.example A"); got != want {
			t.Errorf("%d overlays: %s, want %s", m.Overlays(), got, want)
		}
	}
	if got := judge(t, m3, nil, "adserver.example A"); got != "none" {
		t.Errorf("a pattern outlives its list: %s", got)
	}
	m := m3
	for i := range 10 {
		m = build(m, 10+i, fmt.Sprintf("||n%d.example^", i))
		if m.Overlays() > MaxOverlays {
			t.Fatalf("%d overlays", m.Overlays())
		}
	}
	b := NewBuilder(&testKey)
	b.Remove(12)
	if m = b.Build(m); judge(t, m, nil, "n2.example A") != "none" || judge(t, m, nil, "n3.example A") != "blocked 1" || judge(t, m, nil, "a.example A") != "blocked 2" {
		t.Error("after ten more lists and a removal the rules are wrong")
	}
	lists := m.Lists()
	if lists.Len() != 11 || lists.Has(12) || !lists.Has(19) {
		t.Errorf("lists %v", lists)
	}
}

// TestConcurrent matches while the same Matcher is built upon and merged; the race detector judges.
func TestConcurrent(t *testing.T) {
	m, _ := Compile(&testKey, randomList(rand.New(rand.NewPCG(3, 3)), 500, new([]string))+"||never.to.be.seen^\n/re\\d+/\n")
	const query = "never.to.be.seen A"
	before := judge(t, m, nil, query)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 1))
			for range 2000 {
				m.Match([]byte(dnsname.MustParse(randomName(r))), nil, &Query{Type: typeA})
			}
		})
	}
	wg.Go(func() {
		next := m
		for i := range 20 {
			b := NewBuilder(&testKey)
			if _, err := b.Add(1+i, strings.NewReader("||x.example^\nads")); err != nil {
				t.Error(err)
			}
			next = b.Build(next).Merge(nil)
		}
		if got := judge(t, next, nil, query); got != before {
			t.Errorf("with twenty lists more it is %s, was %s", got, before)
		}
	})
	wg.Wait()
	if got := judge(t, m, nil, query); got != before {
		t.Errorf("it is %s, was %s", got, before)
	}
}

// TestFailedRead leaves nothing of a list that could not be read to its end.
func TestFailedRead(t *testing.T) {
	b := NewBuilder(&testKey)
	if _, err := b.Add(3, io.MultiReader(strings.NewReader("||a.example^\n/b/\n"), iotest.ErrReader(io.ErrUnexpectedEOF))); err == nil {
		t.Fatal("no error")
	}
	if _, err := b.Add(3, strings.NewReader("||c.example^")); err != nil {
		t.Fatal(err)
	}
	m := b.Build(nil)
	if judge(t, m, nil, "a.example A") != "none" || judge(t, m, nil, "b A") != "none" || judge(t, m, nil, "c.example A") != "blocked 1" {
		t.Error("half a list was taken")
	}
}

// TestCrowd has more rules behind one literal, one suffix and none at all than a name may cost. Those over the
// limit are named; the others work.
func TestCrowd(t *testing.T) {
	var b strings.Builder
	for i := range 300 {
		fmt.Fprintf(&b, "||a%d*aaaaaaaa\n", i)
	}
	for i := range 300 {
		fmt.Fprintf(&b, "/^x.?%d.?y$/\n", i)
	}
	for i := range 300 {
		fmt.Fprintf(&b, "||%d*b.c.d^\n", i)
	}
	m, rep := Compile(&testKey, b.String())
	if rep.Rules != 900 || rep.Skipped != 0 {
		t.Fatalf("%d rules, %d skipped: %+v", rep.Rules, rep.Skipped, rep.Complaints)
	}
	if got, want := len(m.Dropped()), 300-maxCrowd+300-maxAlways+300-maxCrowd; got != want {
		t.Errorf("%d rules dropped, want %d", got, want)
	}
	for _, d := range m.Dropped() {
		if 300 < d.Line && d.Line <= 300+maxAlways {
			t.Errorf("line %d is dropped", d.Line)
		}
	}
	for query, want := range map[string]string{"a5.aaaaaaaaa A": "blocked 6", "x3y A": "blocked 304", "7b.b.c.d A": "blocked 608"} {
		if got := judge(t, m, nil, query); got != want {
			t.Errorf("%s is %s, want %s", query, got, want)
		}
	}
}

// TestCrowdOfAnother has a list crowd the literals by which another's rules are found: it is its own rules that are left
// out, whichever list came first.
func TestCrowdOfAnother(t *testing.T) {
	var crowd strings.Builder
	for i := range 3 * maxCrowd {
		fmt.Fprintf(&crowd, "a%d*adserver\n", i)
		fmt.Fprintf(&crowd, "a%d*b.c.d^\n", i)
	}
	const other = "adserver*x\n@@||fine.adserver*y\n*.b.c.d^$dnstype=A\n"
	for _, first := range []int{1, 2} {
		b := NewBuilder(&testKey)
		for _, list := range []int{first, 3 - first} {
			if _, err := b.Add(list, strings.NewReader([]string{1: crowd.String(), 2: other}[list])); err != nil {
				t.Fatal(err)
			}
		}
		m := b.Build(nil)
		for i := range 2 {
			for query, want := range map[string]string{"adserverx A": "blocked 1", "fine.adservery A": "allowed 2", "q.b.c.d A": "blocked 3"} {
				if got := judge(t, m, &Set{1 << 2}, query); got != want {
					t.Errorf("list %d first: %s is %s, want %s", first, query, got, want)
				}
			}
			for _, d := range m.Dropped() {
				if d.List != 1 {
					t.Errorf("list %d first: line %d of list %d is left out", first, d.Line, d.List)
				}
			}
			if i == 0 { // the list that crowds comes again, beside the other's rules of before
				b := NewBuilder(&testKey)
				if _, err := b.Add(1, strings.NewReader(crowd.String())); err != nil {
					t.Fatal(err)
				}
				m = b.Build(m)
			}
		}
	}
}

func TestEmpty(t *testing.T) {
	m := NewBuilder(&testKey).Build(nil)
	if got := judge(t, m, nil, "a.example A"); got != "none" {
		t.Error(got)
	}
	if r := m.MatchAddr(netip.MustParseAddr("192.0.2.1"), nil, &Query{}); r.Verdict != None {
		t.Error(r)
	}
	if m = m.Merge(nil); judge(t, m, nil, "a.example A") != "none" {
		t.Error("merged")
	}
}

func TestNoAllocs(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes sync.Pool allocate")
	}
	m, _ := Compile(&testKey, "||blocked.example^\n@@||allowed.example^\n-tracker-\n/^re\\d+\\./\n||rw.example^$dnsrewrite=192.0.2.1\n0.0.0.0 host.example\n192.0.2.1 host2.example\n*$dnstype=HTTPS,denyallow=com,client=x")
	q := &Query{Type: typeA, Client: "kid", Addr: netip.MustParseAddr("192.0.2.7"), Tags: []string{"pc"}}
	https := &Query{Type: 65, Client: "x"}
	var lists Set
	lists.Add(0)
	memo := new(Memo)
	for _, n := range []string{"www.blocked.example", "allowed.example", "x-tracker-y.example", "re12.example", "rw.example", "host.example", "host2.example", "nothing.to.see.example"} {
		name := []byte(dnsname.MustParse(n))
		if avg := testing.AllocsPerRun(200, func() {
			m.Match(name, &lists, q)
			m.Match(name, &lists, https)
			var h [dnsname.MaxLabels + 1]uint64
			memo.Match(m, name, h[:dnsname.SuffixHashes(&testKey, name, &h)], &lists, q)
		}); avg != 0 {
			t.Errorf("%s: %v allocations", n, avg)
		}
	}
	addr := netip.MustParseAddr("2001:db8::1")
	if avg := testing.AllocsPerRun(200, func() { m.MatchAddr(addr, &lists, q); memo.MatchAddr(m, addr, &lists, q) }); avg != 0 {
		t.Errorf("an address: %v allocations", avg)
	}
}

func TestJudge(t *testing.T) {
	j, reports, err := NewJudge([]ListFile{{"one.txt", []byte("\uFEFF  ||a.example^  \r\n192.0.2.1 h.example\r\n")}, {"two.txt", []byte("! t\n||r.example^$dnsrewrite=REFUSED\n||x.example^$popup")}})
	if err != nil || len(reports) != 2 || reports[1].Skipped != 1 {
		t.Fatal(reports, err)
	}
	got, err := j.Judge("x.a.example.", "a", Query{})
	if err != nil || got.Rule != "||a.example^" || got.List != "one.txt" || got.Line != 1 || got.Verdict != "blocked" || got.Type != "A" {
		t.Errorf("%+v, %v", got, err)
	}
	if got, _ = j.Judge("h.example", "A", Query{}); got.Line != 2 || fmt.Sprint(got.HostIPs) != "[192.0.2.1]" {
		t.Errorf("%+v", got)
	}
	if got, _ = j.Judge("r.example", "TYPE65", Query{}); got.List != "two.txt" || got.Line != 2 || got.Rewrite == nil || got.Rewrite.RCode != "REFUSED" {
		t.Errorf("%+v", got)
	}
	for _, bad := range [][2]string{{"a..b", "A"}, {"a.example", "TYPE65536"}, {"a.example", "FOO"}} {
		if _, err := j.Judge(bad[0], bad[1], Query{}); err == nil {
			t.Errorf("%q passes", bad)
		}
	}
}

func wireName(text string) []byte { return []byte(dnsname.MustParse(text)) }

// Names of 255 octets, whatever their last label, are looked at to the end and not beyond.
func TestLongestNames(t *testing.T) {
	m, _ := Compile(&testKey, "||adservice*.x^\n||*.bigbigbigbig.foo*\n*.sevenxx.foobar*\n*ads-*\n*x99*\n/^[a-z]+-ads\\./\n/ads?$/\nplain.example\n||sub*.plain.example^$denyallow=a.plain.example")
	for last := 1; last <= 63; last++ {
		text := strings.Repeat("b", last)
		for rest := 253 - last; rest > 0; {
			n := min(rest-1, 63)
			if rest-1-n == 1 { // no room for a label
				n--
			}
			text = strings.Repeat("a", n) + "." + text
			rest -= n + 1
		}
		name := dnsname.MustParse(text + ".")
		if len(name) != 255 {
			t.Fatalf("%q has %d octets", name, len(name))
		}
		if r := m.Match([]byte(name), nil, &Query{Type: typeA}); r.Verdict != None {
			t.Errorf("%v: %v", name, r)
		}
	}
}
