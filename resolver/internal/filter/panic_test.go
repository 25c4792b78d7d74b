package filter

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// A list that makes the compiler panic is refused; the lists beside it are built all the same.
func TestPanicOfOneListStaysThere(t *testing.T) {
	key := dnsname.NewKey([16]byte{1})
	b := NewBuilder(&key)
	if _, err := b.Add(0, strings.NewReader("||one.example^")); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Add(1, panics{}); err == nil || !strings.Contains(err.Error(), "panicked") {
		t.Errorf("the error is %v", err)
	}
	if _, err := b.Add(2, strings.NewReader("||two.example^")); err != nil {
		t.Fatal(err)
	}
	m := b.Build(nil)
	lists := m.Lists()
	if lists.Has(1) || !lists.Has(0) || !lists.Has(2) {
		t.Errorf("lists %v", lists)
	}
	for name, want := range map[string]Verdict{"one.example.": Blocked, "two.example.": Blocked, "three.example.": None} {
		if got := m.Match([]byte(dnsname.MustParse(name)), nil, &Query{Type: 1}); got.Verdict != want {
			t.Errorf("%s: %v", name, got.Verdict)
		}
	}
}

type panics struct{}

func (panics) Read([]byte) (int, error) { panic("out of range") }

func TestIsAddress(t *testing.T) {
	for _, s := range []string{"192.0.2.1", "0.0.0.0", "255.255.255.255", "256.1.1.1", "1.2.3", "1.2.3.4.5", "01.2.3.4", "1.2.3.", ".1.2.3", "1..2.3", "",
		":", "::", "::1", "2001:db8::1", "::ffff:1.2.3.4", "g::", "1:2", "a.b.c.d", "1.2.3.x"} {
		_, err := netip.ParseAddr(s)
		if got := isAddress(s); got != (err == nil) {
			t.Errorf("%q: %v, ParseAddr says %v", s, got, err)
		}
	}
}
