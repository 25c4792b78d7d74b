package filter

import (
	"math/rand/v2"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"
	"testing"
)

func TestPrecheck(t *testing.T) {
	for _, tt := range []struct {
		expr     string
		prefixes string // joined by |
		anchors  string
		shortest int
	}{
		{`^(mon|tue)\d{1,2}\.x`, "mon0|mon1|mon2|mon3|mon4|mon5|mon6|mon7|mon8|mon9|tue0|tue1|tue2|tue3|tue4|tue5|tue6|tue7|tue8|tue9", "mon|tue", 6},
		{`^(a|c)\.[0-9a-f]{56}\.com$`, "a.0", ".com", 62},
		{`ads|tracker`, "", "ads|tracker", 3},
		{`^adserverx{0,2}\.io$`, "adserver", "adserver", 11},
		{`^(ab+|c)d`, "ab|c", "a|c", 2},
		{`^a?b`, "", "b", 1},
		{`^$|x`, "", "", 0},
		{`(a|b*)(cdef|ghi)+`, "", "cdef|ghi", 3},
		{`\bads\b`, "", "ads", 3},
		{`.*`, "", "", 0},
		{`^[^a]x`, "", "x", 2},
	} {
		re, err := syntax.Parse("(?i)"+tt.expr, syntax.Perl)
		if err != nil {
			t.Fatal(err)
		}
		p := newPrecheck(re)
		slices.Sort(p.anchors)
		got := strings.Join(p.prefixes, "|")
		if tt.prefixes == "a.0" { // thirty-two of them
			if len(p.prefixes) != 32 || !strings.HasPrefix(got, "a.0|a.1") {
				t.Errorf("%s: prefixes %s", tt.expr, got)
			}
			got = tt.prefixes
		}
		if got != tt.prefixes || strings.Join(p.anchors, "|") != tt.anchors || p.shortest != tt.shortest {
			t.Errorf("%s: prefixes %s, anchors %q, shortest %d; want %+v", tt.expr, got, p.anchors, p.shortest, tt)
		}
	}
}

// TestPrecheckHolds makes expressions at random: what one matches must pass its precheck and hold an anchor.
func TestPrecheckHolds(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	var expr func(depth int) string
	expr = func(depth int) string {
		if depth == 0 {
			return pick(r, "a", "ab", "b.", `\.`, "[ab]", `\d`, "[^a]", "com", ".")
		}
		a, b := expr(depth-1), expr(depth-1)
		return pick(r, a+b, a+b, a+b, "("+a+"|"+b+")", "("+a+")"+pick(r, "?", "*", "+", "{1,2}", "{0,1}", "{2}"), a)
	}
	hits := 0
	for range 3000 {
		e := pick(r, "^", "^", "", `(^|\.)`) + expr(r.IntN(4)) + pick(r, "$", "", "")
		tree, err := syntax.Parse("(?i)"+e, syntax.Perl)
		if err != nil {
			continue
		}
		re, p := regexp.MustCompile("(?i)"+e), newPrecheck(tree)
		for range 20 {
			var b []byte
			for range r.IntN(8) {
				b = append(b, "aab.1com"[r.IntN(8)])
			}
			if !re.Match(b) {
				continue
			}
			hits++
			s := string(b)
			if !p.may(s) {
				t.Fatalf("%s matches %q, but its precheck does not: %+v", e, s, p)
			}
			if len(p.anchors) > 0 && !slices.ContainsFunc(p.anchors, func(a string) bool { return strings.Contains(s, a) }) {
				t.Fatalf("%s matches %q, which has none of its anchors %q", e, s, p.anchors)
			}
		}
	}
	if hits < 1000 {
		t.Errorf("only %d matches: the test does not test", hits)
	}
}
