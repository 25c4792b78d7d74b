package filter

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// Whoever writes rules makes names as slow as he can: with patterns that begin everywhere in a long name and go on for
// long, with expressions as big as they may be. What that costs is bounded, by count and not by the clock; a rule that a
// table holds is found all the same.
func TestWorkOfOneQueryIsBounded(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	var b strings.Builder
	for range 126 { // the most labels
		b.WriteByte(byte('a' + r.IntN(4)))
		b.WriteByte('.')
	}
	name := b.String() + "z"
	lists := map[string]func(b *strings.Builder){
		"expressions": func(b *strings.Builder) {
			for i := range 64 {
				fmt.Fprintf(b, "/(?:[a-d.]?){0,%d}[z][^z]/$important\n", 90+i)
			}
		},
	}
	for _, head := range []string{"", "|", "||", "||a*"} {
		lists["patterns "+head] = func(b *strings.Builder) {
			for i := 0; i+8 <= len(name); i += 1 + i%2 {
				for k := range maxCrowd {
					fmt.Fprintf(b, "%s%s%s*q%d$important\n", head, name[i:i+8], strings.Repeat("*a*b", 5), k)
				}
			}
		}
	}
	wire := []byte(dnsname.MustParse(name + "."))
	for what, write := range lists {
		var b strings.Builder
		write(&b)
		b.WriteString("||b.c.d.z^\n||" + name[len(name)-9:] + "^\n")
		m, _ := Compile(&testKey, b.String())
		spent := 0
		q := &Query{Type: 1, Spent: &spent}
		for range 20 { // names of one answer
			if got := m.Match(wire, nil, q); got.Verdict != Blocked {
				t.Errorf("%s: %v", what, got.Verdict)
			}
		}
		// One rule may begin when nearly all is spent: the biggest expression on the longest name.
		if most := maxSpent + 2*255*1000 + 1000; spent > most {
			t.Errorf("%s: %d steps, at most %d", what, spent, most)
		}
		if spent == 0 {
			t.Errorf("%s: nothing was tried", what)
		}
	}
}

// Finding out whether a name or an address can be remembered is work of the query's as well: an answer may hold hundreds
// of either, all of them new.
func TestWorkOfRememberingIsBounded(t *testing.T) {
	var b strings.Builder
	for i := range 64 {
		fmt.Fprintf(&b, "/(?:[a-d0-9.]?){0,%d}[z1][^z]/$important\n", 90+i)
	}
	m, _ := Compile(&testKey, b.String())
	const many = 300
	const most = maxSpent + 2*255*1000 + 1000
	memo, spent := new(Memo), 0
	q := &Query{Type: 1, Spent: &spent}
	match := func(name string) {
		var h [dnsname.MaxLabels + 1]uint64
		wire := []byte(dnsname.MustParse(name))
		n := dnsname.SuffixHashes(m.key, wire, &h)
		memo.Match(m, wire, h[:n], nil, q)
	}
	for i := range many {
		match(fmt.Sprintf("x%d.", i) + strings.Repeat("a.b.c.d.", 15) + "z.")
	}
	if spent <= maxSpent || spent > most {
		t.Errorf("names: %d steps, %d to %d expected", spent, maxSpent, most)
	}
	spent = 0
	for i := range many {
		memo.MatchAddr(m, netip.AddrFrom4([4]byte{222, 222, byte(i), 222}), nil, q)
	}
	if spent <= maxSpent || spent > most {
		t.Errorf("addresses: %d steps, %d to %d expected", spent, maxSpent, most)
	}
	// What there was nothing left to find out of is not remembered as a name that no rule meets.
	m, _ = Compile(&testKey, "/^q+.x[0-9]+$/")
	spent = maxSpent + 1
	match("qq.x1.")
	if memo.find(m, m.key.Hash([]byte(dnsname.MustParse("qq.x1.")))) != nil {
		t.Error("a name of which nothing was found out is remembered")
	}
}

// Literals that a list's author has chosen so that a hash which he knows puts them all in one place are found in a few
// steps all the same.
func TestLiteralsThatCollide(t *testing.T) {
	const chars = "abcdefghijklmnopqrstuvwxyz0123456789"
	is := func(b byte) bool { return strings.IndexByte(chars, b) >= 0 }
	// The low 26 bits of key^key>>29 are the same for all.
	const low26 = 1<<26 - 1
	var rules strings.Builder
	n := 0
	for i := 0; n < 20_000; i++ {
		a, b, c, d := chars[i%36], chars[i/36%36], chars[i/36/36%36], chars[i/36/36/36]
		begin := uint64(a) | uint64(b)<<8 | uint64(c)<<16 | uint64(d)<<24
		key := begin&(1<<29-1) | ((begin^0x155aa53)&low26)<<29
		if !is(byte(key>>24)) || !is(byte(key>>32)) || !is(byte(key>>40)) || !is(byte(key>>48)) {
			continue
		}
		for _, e := range []byte(chars) {
			fmt.Fprintf(&rules, "%s*q\n||%s*q\nx.%s*q\n", literalOf(key, e), literalOf(key, e), literalOf(key, e))
			n += 3
		}
	}
	m, _ := Compile(&testKey, rules.String())
	keys := 0
	for i, mm := range m.rules.maps() {
		for at := range mm.keys {
			k := &mm.keys[at]
			if k.from == k.to {
				continue
			}
			keys++
			if steps := (uint64(at) - mm.home(k.key)) & uint64(len(mm.keys)-1); steps > 200 {
				t.Fatalf("in map %d a key is found in %d steps", i, steps)
			}
		}
	}
	if keys < n/2 {
		t.Errorf("%d keys of %d rules: the test does not test", keys, n)
	}
}

func literalOf(key uint64, last byte) string {
	var b [8]byte
	for i := range b {
		b[i] = byte(key >> (8 * i))
	}
	b[7] = last
	return string(b[:])
}

// Conditions of thousands of values are searched, not walked, and say what they said.
func TestConditionsOfManyValues(t *testing.T) {
	var names, prefixes []string
	r := rand.New(rand.NewPCG(2, 2))
	for i := range 3000 {
		names = append(names, fmt.Sprintf("n%d.deny", i))
		prefixes = append(prefixes, fmt.Sprintf("10.%d.%d.%d/%d", r.IntN(4), r.IntN(256), r.IntN(256), 17+r.IntN(16)))
	}
	for i := range 40 {
		prefixes = append(prefixes, fmt.Sprintf("2001:db8:%x::/%d", i*i, 40+r.IntN(40)))
		names = append(names, fmt.Sprintf("wild%d.*", i))
	}
	for _, s := range [][]string{names, prefixes} {
		r.Shuffle(len(s), func(i, k int) { s[i], s[k] = s[k], s[i] })
	}
	deny, _ := Compile(&testKey, "*$denyallow="+strings.Join(names, "|"))
	for name, blocked := range map[string]bool{"n7.deny.": false, "x.n2999.deny.": false, "n3000.deny.": true, "deny.": true, "xn7.deny.": true, "wild3.com.": false, "a.wild39.co.uk.": false, "wild40.com.": true, "wild3.": true} {
		if got := deny.Match([]byte(dnsname.MustParse(name)), nil, &Query{Type: 1}); (got.Verdict == Blocked) != blocked {
			t.Errorf("%s: %v", name, got.Verdict)
		}
	}
	for _, not := range []string{"", "~"} {
		m, rep := Compile(&testKey, "||x.example^$client="+not+strings.Join(prefixes, "|"+not))
		if rep.Rules != 1 {
			t.Fatalf("%+v", rep.Complaints)
		}
		for i := range 3000 {
			a := netip.AddrFrom4([4]byte{10, byte(r.IntN(6)), byte(r.IntN(256)), byte(r.IntN(256))})
			if i%4 == 0 {
				a = netip.MustParseAddr(fmt.Sprintf("2001:db8:%x:%x::1", r.IntN(1600), r.IntN(1<<16)))
			}
			in := slices.ContainsFunc(prefixes, func(s string) bool { return netip.MustParsePrefix(s).Contains(a) })
			if got := m.Match([]byte(dnsname.MustParse("x.example.")), nil, &Query{Type: 1, Addr: a}); (got.Verdict == Blocked) != (in == (not == "")) {
				t.Errorf("%s%v: %v", not, a, got.Verdict)
			}
		}
	}
	if m, _ := Compile(&testKey, "||x.example^$client="+strings.Repeat("a|", 3000)+"me|zz"); m.Match([]byte(dnsname.MustParse("x.example.")), nil, &Query{Type: 1, Client: "me"}).Verdict != Blocked {
		t.Error("a client by name is not found")
	}
	_, rep := Compile(&testKey, "*$denyallow=a.*|"+strings.Join(func() (s []string) {
		for i := range 64 {
			s = append(s, fmt.Sprintf("b%d.*", i))
		}
		return s
	}(), "|"))
	if rep.Rules != 0 || !strings.Contains(rep.Complaints[0].Reason, "64") {
		t.Errorf("a $denyallow with too many names that end in .*: %+v", rep.Complaints)
	}
}

// Rules that block the world in a roundabout way are refused or told as such, and block nothing else by mistake: an
// exception for the operator is never far, a list is not let in.
func TestRoundaboutWaysToBlockAll(t *testing.T) {
	some := []string{"a.", "www.google.com.", "x.co.uk.", "xn--bcher-kva.example.", "1.2.3.4.in-addr.arpa.", "_dmarc.example.org."}
	for _, rule := range []string{"||*^", "/./", "*.*", "|", "^", ".", "*", "||", "||^", "**", "*^", "|*", "*|", "||*", "||*.", ".*", "/.*/", "/^/", "/$/", "//", "/", "/a?/", "/[a-z0-9]/", "/.+\\..+/", "/(a|b|c|.)/", "/\\w/", "/[^ ]/", "@", "@@", "@@*",
		"||*^$important", "*$important", "||*.*^", "*.*.*", "||.*^", "||**^", "*$dnstype=A|AAAA", "/./$dnstype=~MX", "*$client=~nobody", "*$ctag=~none", "*$denyallow=nothing.example", "://", "http://", "http://*", "|http://", "||*^$dnsrewrite=192.0.2.1", "*$dnsrewrite=", "0.0.0.0 *", "0.0.0.0 .", "address=/#/", "address=/*/", "address=//", "server=/#/"} {
		m, rep := Compile(&testKey, rule+"\n||one.example^\n")
		all := true
		for _, n := range some {
			if v := m.Match([]byte(dnsname.MustParse(n)), nil, &Query{Type: 1}).Verdict; v != Blocked && v != Rewritten {
				all = false
			}
		}
		told := len(rep.World) > 0
		if all && !told && !strings.Contains(rule, "~no") && !strings.Contains(rule, "denyallow") {
			t.Errorf("%q blocks all names and is not told as such", rule)
		}
		if v := m.Match([]byte(dnsname.MustParse("one.example.")), nil, &Query{Type: 1}).Verdict; v != Blocked && v != Rewritten && !strings.HasPrefix(rule, "@@*") {
			t.Errorf("%q made the rule after it void", rule)
		}
	}
}

// Whatever bytes a line has, they stay in their line, and what is no name blocks none.
func TestStrangeBytes(t *testing.T) {
	nul, bad, sep := "\x00", "\xff\xfe", "\u2028"
	long := strings.Repeat("ü", 60)
	text := strings.Join([]string{
		"||one.example^", "||a" + nul + "b.example^", "||" + bad + ".example^", "||c.example^" + sep + "||d.example^", "0.0.0.0 e.example" + nul, "f.example" + sep,
		"||" + long + ".example^", "||\u0430pple.example^", "0.0.0.0 \u0430pple.test", "||xn--" + strings.Repeat("a", 60) + ".example^", "||" + strings.Repeat("a", 64) + ".example^", "||two.example^",
	}, "\n")
	m, rep := Compile(&testKey, text)
	for name, want := range map[string]Verdict{"one.example.": Blocked, "two.example.": Blocked, "c.example.": None, "d.example.": None, "apple.example.": None, "apple.test.": None, "xn--pple-43d.example.": Blocked, "xn--pple-43d.test.": Blocked,
		"example.": None, "b.example.": None, "a.example.": None, `a\000b.example.`: None, `\255\254.example.`: None} {
		if got := m.Match([]byte(dnsname.MustParse(name)), nil, &Query{Type: 1}).Verdict; got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
	if rep.Rules != 4 || rep.Skipped != 8 {
		t.Errorf("%d rules, %d skipped: %+v", rep.Rules, rep.Skipped, rep.Complaints)
	}
}

// A flood of $badfilter rules costs what their number does, and voids twins alone.
func TestBadfilterFlood(t *testing.T) {
	var b strings.Builder
	for i := range 20_000 {
		fmt.Fprintf(&b, "||x%d.example^$badfilter\n||p%d-*.example^$badfilter\n", i, i)
	}
	b.WriteString("||x7.example^\n||p7-*.example^\n||x7.example^$important\n||keep.example^\n")
	m, _ := Compile(&testKey, b.String())
	for name, want := range map[string]Verdict{"x7.example.": Blocked, "p7-a.example.": None, "keep.example.": Blocked, "x8.example.": None} {
		if got := m.Match([]byte(dnsname.MustParse(name)), nil, &Query{Type: 1}).Verdict; got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
