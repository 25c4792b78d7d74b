package trustanchor

import (
	"crypto/sha256"
	"encoding/hex"
	"testing"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// withSum ends the text of a state file as save would.
func withSum(text string) []byte {
	sum := sha256.Sum256([]byte(text))
	return []byte(text + "sha256 " + hex.EncodeToString(sum[:]) + "\n")
}

// FuzzState: no file makes it panic, and what is read is written the same way again.
func FuzzState(f *testing.F) {
	f.Add("zone . built-in 2026-11-30T06:00:00Z\nkey valid 0 AQEDD5dNlqItIkvAGluRUJFHfUTM2RyaQaEUMAEBF9UsWSQO\nkey addpend 86400 AQADD5dNlqItIkvAGluRUJFHfUTM2RyaQaEUMAEBF9UsWSQO\n")
	f.Add("zone a\\032b. file:00 never\n")
	f.Add("key revoked 1 AA==\n")
	f.Fuzz(func(t *testing.T, body string) {
		_, _ = parseState([]byte(body))
		saved, err := parseState(withSum(header + body))
		if err != nil {
			return
		}
		var points []*point
		for name, p := range saved {
			if dnsname.Check([]byte(name)) != nil {
				t.Errorf("%q is not a name", name)
			}
			points = append(points, &point{name: name, source: p.source, seenWall: p.seen, keys: p.keys})
		}
		again, err := parseState(render(points))
		if err != nil {
			t.Fatalf("%q is written so that it cannot be read: %v", body, err)
		}
		for name, p := range again {
			if was := saved[name]; len(was.keys) != len(p.keys) || was.source != p.source || !was.seen.Equal(p.seen) {
				t.Errorf("%v: %+v became %+v", name, was, p)
			}
		}
	})
}

// FuzzAnchorFile: no text makes it panic, and what it accepts is an anchor by itself.
func FuzzAnchorFile(f *testing.F) {
	f.Add(BuiltIn)
	f.Add("a. IN DNSKEY 257 3 8 " + ksk24)
	f.Add("$TTL 1\n. IN DS ( 1 8 2 ; c\n \"00\" )\n")
	f.Fuzz(func(t *testing.T, text string) {
		m, _, err := parse(text, "file")
		if err != nil {
			return
		}
		for name, a := range m {
			if p := newPoint(name, a, ""); !p.fold() || len(p.tags()) == 0 {
				t.Errorf("%v is an anchor of nothing", name)
			}
		}
	})
}
