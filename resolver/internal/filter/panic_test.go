package filter

import (
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
