package rebinding

import (
	"encoding/hex"
	"net/netip"
	"testing"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

var guard = New(
	[]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")},
	[]dnsname.Name{dnsname.MustParse("corp.example.")},
)

func bytesOf(a string) []byte { return netip.MustParseAddr(a).AsSlice() }

func TestRecord(t *testing.T) {
	https := func(params string) []byte {
		b, err := hex.DecodeString("000100" + params)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, c := range []struct {
		owner string
		typ   uint16
		rdata []byte
		want  bool
	}{
		{"www.example.", 1, bytesOf("10.1.2.3"), true},
		{"www.example.", 1, bytesOf("11.1.2.3"), false},
		{"www.example.", 28, bytesOf("fd00::1"), true},
		{"www.example.", 28, bytesOf("::ffff:10.1.2.3"), true},
		{"www.example.", 28, bytesOf("2001:db8::1"), false},
		{"WWW.CORP.example.", 1, bytesOf("10.1.2.3"), false},
		{"corp.example.", 1, bytesOf("10.1.2.3"), false},
		{"notcorp.example.", 1, bytesOf("10.1.2.3"), true},
		{"www.example.", 65, https("000400080b0000010a000001"), true},                 // the second of two ipv4hints
		{"www.example.", 65, https("000400040b000001"), false},                        // a public one
		{"www.example.", 64, https("00060010fd000000000000000000000000000001"), true}, // ipv6hint
		{"www.corp.example.", 65, https("000400040a000001"), false},                   // a private domain
		{"www.example.", 65, https("000400080a000001"), false},                        // a hint that does not fit is none
		{"www.example.", 65, []byte{0}, false},                                        // no record at all
		{"www.example.", 16, bytesOf("10.1.2.3"), false},                              // a TXT record that looks like one
		{"www.example.", 1, []byte{10, 0}, false},
	} {
		if got := guard.Record([]byte(dnsname.MustParse(c.owner)), c.typ, c.rdata); got != c.want {
			t.Errorf("%s type %d %x: %v", c.owner, c.typ, c.rdata, got)
		}
	}
}

func TestOffends(t *testing.T) {
	alias := func(f query.Facts, n string) query.Facts {
		return query.AppendFact(f, query.FactAlias, []byte(dnsname.MustParse(n)))
	}
	addr := func(f query.Facts, a string) query.Facts { return query.AppendFact(f, query.FactAddress, bytesOf(a)) }
	var many query.Facts
	for range 300 {
		many = addr(many, "2001:db8::1")
	}
	for name, c := range map[string]struct {
		asked string
		facts query.Facts
		want  bool
	}{
		"none":                               {"www.example.", nil, false},
		"a public address":                   {"www.example.", addr(nil, "192.0.2.1"), false},
		"a private one behind a public one":  {"www.example.", addr(addr(nil, "192.0.2.1"), "10.0.0.1"), true},
		"of a private domain":                {"a.corp.example.", addr(nil, "10.0.0.1"), false},
		"a private domain's alias to others": {"a.corp.example.", addr(alias(nil, "www.example."), "10.0.0.1"), true},
		"an alias into a private domain":     {"www.example.", addr(alias(nil, "a.corp.example."), "10.0.0.1"), false},
		"more than facts hold":               {"www.example.", many, true},
	} {
		q := &query.Query{}
		q.Turn.Current = query.Question{Name: dnsname.MustParse(c.asked), Type: dnswire.TypeA, Class: 1}
		if got := guard.Offends(q, &query.Answer{Facts: c.facts}); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
