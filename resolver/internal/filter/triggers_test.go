package filter

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/filter/rulelist"
)

// served splits what a test says of name servers: names, and addresses.
func served(text string) (names []dnsname.Name, addrs []netip.Addr) {
	for _, f := range strings.Fields(text) {
		if a, err := netip.ParseAddr(f); err == nil {
			addrs = append(addrs, a)
		} else {
			names = append(names, dnsname.MustParse(f))
		}
	}
	return names, addrs
}

// said puts a result in words.
func said(m *Matcher, r *Result, qtype uint16) string {
	s := fmt.Sprintf("%v %d", r.Verdict, r.Line)
	if r.Verdict == Rewritten {
		a := m.Rewrite(r, qtype)
		s += fmt.Sprintf(" %s%s%q", a.Action, a.CNAME, a.Data)
	}
	if r.Verdict == None {
		return "none"
	}
	return s
}

// TestServers judges name servers by lists that are policy zones: names before addresses, the first of the names, the
// longest prefix.
func TestServers(t *testing.T) {
	zone := strings.Join([]string{
		"$TTL 60",
		"ns.bad.example.rpz-nsdname CNAME .",               // 2
		"*.bad.example.rpz-nsdname CNAME .",                // 3
		"ok.bad.example.rpz-nsdname CNAME rpz-passthru.",   // 4
		"*.deep.bad.example.rpz-nsdname A 192.0.2.44",      // 5
		"drop.example.rpz-nsdname CNAME rpz-drop.",         // 6
		"walled.example.rpz-nsdname CNAME garden.example.", // 7
		"32.1.0.0.10.rpz-nsip CNAME rpz-passthru.",         // 8
		"8.0.0.0.10.rpz-nsip CNAME .",                      // 9
		"16.0.0.9.10.rpz-nsip CNAME rpz-tcp-only.",         // 10
		"32.zz.db8.2001.rpz-nsip CNAME *.",                 // 11
		"24.0.2.0.192.rpz-ip A 192.0.2.12",                 // 12
		"32.7.2.0.192.rpz-ip CNAME rpz-passthru.",          // 13
		"8.0.0.0.11.rpz-client-ip CNAME garden.example.",   // 14
		"32.1.0.0.11.rpz-client-ip CNAME .",                // 15
		"walled.example.rpz-nsdname A 192.0.2.16",          // 16: beside another action
	}, "\n")
	m, rep := Compile(&testKey, zone)
	if rep.Skipped > 0 || rep.Rules != 15 {
		t.Fatalf("%+v", rep)
	}
	for _, m := range []*Matcher{m, m.Merge(nil), reloaded(t, m)} {
		for servers, want := range map[string]string{
			"ns.bad.example": "blocked 2", "x.bad.example": "blocked 3", "y.x.bad.example": "blocked 3", "bad.example": "none", "ok.bad.example": "allowed 4",
			"x.ok.bad.example": "blocked 3", "a.deep.bad.example": `rewritten 5 ["192.0.2.44"]`, "deep.bad.example": "blocked 3", "nsxbad.example": "none",
			"drop.example": `rewritten 6 drop[]`, "walled.example": "rewritten 7 garden.example[]", "example": "none", ".": "none",
			// The first name decides, and any name before all addresses.
			"fine.example ok.bad.example ns.bad.example": "allowed 4", "ns.bad.example ok.bad.example 10.0.0.1": "blocked 2",
			"10.0.0.1": "allowed 8", "10.0.0.2": "blocked 9", "10.9.0.1": `rewritten 10 tcp-only[]`, "11.0.0.1": "none", "::ffff:10.0.0.2": "blocked 9",
			"10.0.0.2 10.0.0.1": "allowed 8", "10.0.0.2 10.9.1.1": `rewritten 10 tcp-only[]`, "2001:db8::1": "blocked 11", "2001:db8::1 10.0.0.2": "blocked 9",
			"192.0.2.1": "none", "": "none",
		} {
			names, addrs := served(servers)
			r := m.MatchServers(names, addrs, nil, &Query{Type: typeA, NoRewrite: true})
			if got := said(m, &r, typeA); got != want {
				t.Errorf("%q is %s, want %s", servers, got, want)
			}
			if r := m.MatchServers(names, addrs, &Set{2}, &Query{}); r.Verdict != None {
				t.Errorf("%q is %v by lists that are not there", servers, r.Verdict)
			}
		}
		memo := new(Memo)
		for addr, want := range map[string]string{"192.0.2.1": `rewritten 12 ["192.0.2.12"]`, "192.0.2.7": "allowed 13", "10.0.0.1": "none"} {
			r := m.MatchAddr(netip.MustParseAddr(addr), nil, &Query{Type: typeA, NoRewrite: true})
			for range 2 { // found out, and remembered
				if again := memo.MatchAddr(m, netip.MustParseAddr(addr), nil, &Query{Type: typeA, NoRewrite: true}); again != r {
					t.Errorf("%s with a memo: %+v, want %+v", addr, again, r)
				}
			}
			if got := said(m, &r, typeA); got != want {
				t.Errorf("address %s is %s, want %s", addr, got, want)
			}
		}
		for addr, want := range map[string]string{"11.0.0.2": "rewritten 14 garden.example[]", "11.0.0.1": "blocked 15", "10.0.0.1": "none"} {
			r := m.Match([]byte(dnsname.MustParse("www.example")), nil, &Query{Type: typeA, Addr: netip.MustParseAddr(addr)})
			if got := said(m, &r, typeA); got != want {
				t.Errorf("client %s is %s, want %s", addr, got, want)
			}
		}
	}
	// Of a client, too, each list has its say, and its own longest prefix.
	b := NewBuilder(&testKey)
	for i, text := range []string{"24.0.0.0.11.rpz-client-ip CNAME rpz-passthru.", "32.1.0.0.11.rpz-client-ip CNAME .", "||plain.example^"} {
		if _, err := b.Add(i, strings.NewReader(text)); err != nil {
			t.Fatal(err)
		}
	}
	both := b.Build(nil)
	r := both.Match([]byte(dnsname.MustParse("x.example")), nil, &Query{Type: typeA, Addr: netip.MustParseAddr("11.0.0.1")})
	if r.Verdict != Allowed || r.List != 0 {
		t.Errorf("%v by list %d, want the exception of list 0", r.Verdict, r.List)
	}
	if names, addrs := both.WantsServers(nil); names || addrs {
		t.Error("lists without such rules want to know servers")
	}
	// What is wanted follows the lists as they come and go.
	for _, step := range []struct {
		list        int
		text        string
		names, addr bool
	}{{3, "a.rpz-nsdname CNAME .", true, false}, {4, "8.0.0.0.10.rpz-nsip CNAME .", true, true}, {3, "", true, true}, {4, "||x^", false, false}} {
		b := NewBuilder(&testKey)
		if step.text == "" {
			b.Remove(step.list)
		} else if _, err := b.Add(step.list, strings.NewReader(step.text)); err != nil {
			t.Fatal(err)
		}
		both = b.Build(both)
		if names, addrs := both.WantsServers(nil); names != step.names || addrs != step.addr {
			t.Errorf("after list %d: wants %v, %v", step.list, names, addrs)
		}
		if names, _ := both.WantsServers(&Set{7}); names {
			t.Error("lists that are not chosen want to know servers")
		}
	}
}

// naiveServers is MatchServers for one list, going through its rules.
func naiveServers(rules []naiveRule, names []dnsname.Name, addrs []netip.Addr) (best []*naiveRule) {
	for _, n := range names {
		depth := -1
		for i := range rules {
			r := &rules[i]
			if r.Trigger != rulelist.ByServer {
				continue
			}
			owner := dnsname.Name(r.Name[:len(r.Name)-4]) + dnsname.Root
			if r.Form == rulelist.ZoneExact && n == owner || r.Form == rulelist.ZoneBelow && n.Below(owner) && n != owner {
				switch d := owner.Labels(); {
				case d > depth:
					best, depth = []*naiveRule{r}, d
				case d == depth:
					best = append(best, r)
				}
			}
		}
		if depth >= 0 {
			return best
		}
	}
	longest := -1
	for i := range rules {
		for _, a := range addrs {
			r := &rules[i]
			if r.Trigger != rulelist.ByServerAddr || !r.Prefix.Contains(a) {
				continue
			}
			size := r.Prefix.Bits()
			if a.Is4() {
				size += 96
			}
			if size > longest {
				best, longest = nil, size
			}
			// Of equally long ones that of the first address.
			if size == longest && (len(best) == 0 || best[0].Prefix == r.Prefix || slices.IndexFunc(addrs, r.Prefix.Contains) < slices.IndexFunc(addrs, best[0].Prefix.Contains)) {
				if len(best) > 0 && best[0].Prefix != r.Prefix {
					best = nil
				}
				if !slices.Contains(best, r) {
					best = append(best, r)
				}
			}
		}
	}
	return best
}

func randomServers(r *rand.Rand) (names []dnsname.Name, addrs []netip.Addr) {
	for range r.IntN(4) {
		names = append(names, dnsname.MustParse(randomName(r)))
	}
	slices.SortFunc(names, dnsname.Compare)
	for range r.IntN(4) {
		addrs = append(addrs, netip.AddrFrom4([4]byte{10, byte(r.IntN(2)), 0, byte(r.IntN(4))}))
		if r.IntN(4) == 0 {
			addrs = append(addrs, netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 15: byte(r.IntN(3))}))
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return names, addrs
}

func randomTrigger(r *rand.Rand) string {
	owner := pick(r, "", "", "*.") + randomName(r) + ".rpz-nsdname"
	if r.IntN(3) == 0 {
		owner = pick(r, "32.1.0.0.10", "32.2.0.1.10", "24.0.0.0.10", "16.0.0.1.10", "8.0.0.0.10", "128.1.zz.db8.2001", "32.zz.db8.2001") + ".rpz-nsip"
	}
	return owner + pick(r, " CNAME .", " CNAME *.", " CNAME rpz-passthru.", " CNAME rpz-drop.", " CNAME garden.example.", " A 192.0.2.1", " A 192.0.2.2")
}

// TestServersAgainstNaive compares MatchServers over several lists, in layers, merged and reloaded, with going through
// the rules.
func TestServersAgainstNaive(t *testing.T) {
	verdicts := map[Verdict]int{}
	rounds := 40
	if testing.Short() || raceEnabled {
		rounds = 10
	}
	for round := range rounds {
		r := rand.New(rand.NewPCG(uint64(round), 11))
		var m *Matcher
		var texts []string
		var rules [][]naiveRule
		for n := range 1 + r.IntN(4) {
			text := "$TTL 60\n"
			for range 1 + r.IntN(30) {
				text += randomTrigger(r) + "\n"
			}
			texts, rules = append(texts, text), append(rules, naiveRules(t, n, text))
			b := NewBuilder(&testKey)
			if _, err := b.Add(n, strings.NewReader(text)); err != nil {
				t.Fatal(err)
			}
			m = b.Build(m)
		}
		ms := []*Matcher{m, m.Merge(nil), reloaded(t, m)}
		for range 100 {
			names, addrs := randomServers(r)
			for _, m := range ms {
				if d := diffServers(m, rules, names, addrs, verdicts); d != "" {
					t.Fatalf("round %d, %v %v: %s\n%s", round, names, addrs, d, strings.Join(texts, "\n"))
				}
			}
		}
	}
	for v := None; v <= Rewritten; v++ {
		if verdicts[v] < 5*rounds {
			t.Errorf("only %d were %v: the test does not test", verdicts[v], v)
		}
	}
}

func diffServers(m *Matcher, lists [][]naiveRule, names []dnsname.Name, addrs []netip.Addr, verdicts map[Verdict]int) string {
	got := m.MatchServers(names, addrs, nil, &Query{Type: typeA})
	verdicts[got.Verdict]++
	want, list := None, 0
	var lines []uint32
	for n, rules := range lists {
		v := None
		var in []uint32
		for _, r := range naiveServers(rules, names, addrs) {
			is := Blocked
			switch {
			case r.Mods != nil:
				is = Rewritten
			case r.Allow:
				is = Allowed
			}
			if is > v {
				v, in = is, nil
			}
			if is == v {
				in = append(in, r.Line)
			}
		}
		if v > want {
			want, list, lines = v, n, in
		}
	}
	if got.Verdict != want || want != None && (int(got.List) != list || !slices.Contains(lines, got.Line)) {
		return fmt.Sprintf("%v by list %d line %d, want %v by list %d lines %d", got.Verdict, got.List, got.Line, want, list, lines)
	}
	return ""
}

func FuzzServers(f *testing.F) {
	f.Add("a.rpz-nsdname CNAME .\n*.a.rpz-nsdname A 1.2.3.4\n8.0.0.0.10.rpz-nsip CNAME rpz-drop.", "x.a", "10.0.0.1")
	f.Add("*.rpz-nsdname CNAME rpz-passthru.\nb.a.rpz-nsdname CNAME .", "b.a", "::1")
	r := rand.New(rand.NewPCG(1, 1))
	for range 20 {
		f.Add(randomTrigger(r)+"\n"+randomTrigger(r)+"\n"+randomList(r, 5, new([]string)), randomName(r), "10.0.0.1")
	}
	f.Fuzz(func(t *testing.T, text, name, addr string) {
		n, err := dnsname.Parse(name)
		a, aerr := netip.ParseAddr(addr)
		if err != nil || aerr != nil || a.Zone() != "" {
			return
		}
		text = "$TTL 1\n" + text
		m, _ := Compile(&testKey, text)
		if d := diffServers(m, [][]naiveRule{naiveRules(t, 0, text)}, []dnsname.Name{n}, []netip.Addr{a.Unmap()}, map[Verdict]int{}); d != "" {
			t.Fatal(d)
		}
		m.MatchAddr(a, nil, &Query{Type: typeA})
		m.Match([]byte(n), nil, &Query{Type: typeA, Addr: a})
	})
}
