package filter

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/filter/rulelist"
)

// TestPolicyZone judges by lists that are response policy zones: in each the longest match decides, whatever it
// says, and clients come before names.
func TestPolicyZone(t *testing.T) {
	zone := "$TTL 60\n" + strings.Join([]string{
		"*.b.example CNAME rpz-passthru.",              // 2
		"bad.b.example CNAME .",                        // 3
		"*.bad.b.example CNAME .",                      // 4
		"*.c.example A 192.0.2.1",                      // 5
		"ok.c.example CNAME rpz-passthru.",             // 6
		"x.c.example A 192.0.2.2",                      // 7
		"block.c.example CNAME *.",                     // 8
		"drop.example CNAME rpz-drop.",                 // 9
		"tcp.example CNAME rpz-tcp-only.",              // 10
		"*.d.example CNAME .",                          // 11
		"redirected.d.example CNAME walled.example.",   // 12
		"8.0.0.0.10.rpz-client-ip CNAME rpz-passthru.", // 13
		"32.66.0.0.10.rpz-client-ip CNAME .",           // 14
		"24.0.2.0.192.rpz-ip CNAME .",                  // 15
		"32.7.2.0.192.rpz-ip CNAME rpz-passthru.",      // 16
		"32.zz.db8.2001.rpz-ip CNAME .",                // 17
	}, "\n")
	m, rep := Compile(&testKey, zone)
	if rep.Skipped > 0 {
		t.Fatalf("%+v", rep.Complaints)
	}
	for _, m := range []*Matcher{m, m.Merge(nil), reloaded(t, m)} {
		for query, want := range map[string]string{
			"a.b.example A": "allowed 2", "bad.b.example A": "blocked 3", "x.bad.b.example A": "blocked 4", "b.example A": "none",
			"a.c.example A": `rewritten 5 ["192.0.2.1"]`, "ok.c.example A": "allowed 6", "x.c.example A": `rewritten 7 ["192.0.2.2"]`,
			"block.c.example A": "blocked 8", "redirected.d.example A": "rewritten 12 to walled.example", "a.d.example A": "blocked 11",
			// The client decides first, by the longest prefix.
			"bad.b.example A 10.1.2.3": "allowed 13", "none.example A 10.1.2.3": "allowed 13", "a.b.example A 10.0.0.66": "blocked 14",
			"bad.b.example A 192.0.2.1": "blocked 3", "none.example A 2001:db8::1": "none",
		} {
			if got := judge(t, m, nil, query); got != want {
				t.Errorf("%s is %s, want %s", query, got, want)
			}
		}
		for query, want := range map[string]rulelist.Action{"drop.example A": rulelist.Drop, "tcp.example AAAA": rulelist.TCPOnly} {
			f := strings.Fields(query)
			typ, _ := rulelist.TypeCode(f[1])
			r := m.Match([]byte(dnsname.MustParse(f[0])), nil, &Query{Type: typ})
			if r.Verdict != Rewritten || m.Rewrite(&r, typ).Action != want {
				t.Errorf("%s: %+v, %+v", query, r, m.Rewrite(&r, typ))
			}
		}
		for addr, want := range map[string]uint32{"192.0.2.1": 15, "192.0.2.7": 16, "192.0.3.1": 0, "2001:db8:ffff::1": 17, "2001:db9::": 0, "::ffff:192.0.2.9": 15} {
			r := m.MatchAddr(netip.MustParseAddr(addr), nil, &Query{Type: typeA})
			if r.Line != want || (want == 0) != (r.Verdict == None) || (want == 16) != (r.Verdict == Allowed) {
				t.Errorf("%s: %v by line %d, want %d", addr, r.Verdict, r.Line, want)
			}
		}
	}
	// Zones do not decide for each other, nor for lists that are none.
	b := NewBuilder(&testKey)
	for i, text := range []string{zone, "$TTL 60\n*.b.example CNAME .\n", "||ok.c.example^$important\n"} {
		if _, err := b.Add(i, strings.NewReader(text)); err != nil {
			t.Fatal(err)
		}
	}
	both := b.Build(nil)
	for _, tt := range []struct {
		lists Set
		query string
		want  string
	}{
		{Set{0b001}, "a.b.example A", "allowed 2"}, {Set{0b010}, "a.b.example A", "blocked 2"}, {Set{0b011}, "a.b.example A", "allowed 2"},
		{Set{0b010}, "a.b.example A 10.1.2.3", "blocked 2"}, {Set{0b011}, "bad.b.example A", "blocked 3"}, {Set{0b101}, "ok.c.example A", "blocked 1"},
	} {
		if got := judge(t, both, &tt.lists, tt.query); got != tt.want {
			t.Errorf("lists %b: %s is %s, want %s", tt.lists[0], tt.query, got, tt.want)
		}
	}
}
