package dnsname

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

func TestParseAndString(t *testing.T) {
	for _, c := range []struct{ in, wire, out string }{
		{".", "\x00", "."},
		{"com", "\x03com\x00", "com."},
		{"WWW.Example.COM.", "\x03www\x07example\x03com\x00", "www.example.com."},
		{`a\.b.c`, "\x03a.b\x01c\x00", `a\.b.c.`},
		{`\000\255.x`, "\x02\x00\xff\x01x\x00", `\000\255.x.`},
		{"_dns.*.x", "\x04_dns\x01*\x01x\x00", "_dns.*.x."},
	} {
		n, err := Parse(c.in)
		if err != nil || string(n) != c.wire || n.String() != c.out {
			t.Errorf("Parse(%q) = %q, %v; String %q", c.in, string(n), err, n.String())
		}
	}
	l63 := strings.Repeat("a", 63)
	longest := strings.Repeat(l63+".", 3) + strings.Repeat("b", 61)
	if n, err := Parse(longest); err != nil || len(n) != MaxLen {
		t.Errorf("the longest name: %d bytes, %v", len(n), err)
	}
	for in, want := range map[string]error{
		"": ErrEmpty, "..": ErrEmpty, ".a": ErrEmpty, "a..b": ErrEmpty,
		l63 + "a": ErrLong, longest + "b": ErrLong, longest + "b.": ErrLong, longest + ".c": ErrLong,
	} {
		if n, err := Parse(in); !errors.Is(err, want) {
			t.Errorf("Parse(%q) = %q, %v; want %v", in, n, err, want)
		}
	}
	for _, in := range []string{`a\`, `a\1`, `a\12x`, `\256`} {
		if n, err := Parse(in); err == nil {
			t.Errorf("Parse(%q) = %q, want an error", in, n)
		}
	}
}

func TestRelations(t *testing.T) {
	p := MustParse
	for _, c := range []struct {
		n, zone       string
		within, below bool
	}{
		{"a.b.", "b.", true, true}, {"b.", "b.", true, false}, {"ab.", "b.", false, false},
		{"b.", "a.b.", false, false}, {"a.", ".", true, true}, {".", ".", true, false},
		{`x\001b.`, "b.", false, false}, // the bytes \x01b\x00 end it, but no label starts there
	} {
		if g := p(c.n).IsWithin(p(c.zone)); g != c.within {
			t.Errorf("%s within %s = %v", c.n, c.zone, g)
		}
		if g := p(c.n).Below(p(c.zone)); g != c.below {
			t.Errorf("%s below %s = %v", c.n, c.zone, g)
		}
	}
	n := p("a.bb.ccc.")
	if n.Labels() != 3 || n.Parent() != p("bb.ccc.") || n.FirstLabel() != "a" || Root.Parent() != "" ||
		n.Suffix(0) != Root || n.Suffix(2) != p("bb.ccc.") || n.Suffix(9) != n {
		t.Error("walking a.bb.ccc. went wrong")
	}
	if CommonLabels(p("a.b.c."), p("x.b.c.")) != 2 || CommonLabels(n, Root) != 0 || CommonLabels(n, n) != 3 {
		t.Error("CommonLabels")
	}
	if r, err := p("x.old.").Replace(p("old."), p("new.zone.")); err != nil || r != p("x.new.zone.") {
		t.Errorf("Replace: %v %v", r, err)
	}
	if !p("*.a.").IsWildcard() || p("a.*.").IsWildcard() || p("**.a.").IsWildcard() || Root.IsWildcard() {
		t.Error("IsWildcard")
	}
}

// The example of RFC 4034 section 6.1.
func TestCompareIsCanonical(t *testing.T) {
	want := []string{"example.", "a.example.", "yljkjljk.a.example.", "Z.a.example.", "zABC.a.EXAMPLE.", "z.example.", `\001.z.example.`, "*.z.example.", `\200.z.example.`}
	var names []Name
	for _, s := range want {
		names = append(names, MustParse(s))
	}
	got := slices.Clone(names)
	slices.Reverse(got)
	slices.SortFunc(got, Compare)
	if !slices.Equal(got, names) {
		t.Errorf("order %v", got)
	}
}

func TestFoldEveryByte(t *testing.T) {
	var in, want [256]byte
	for i := range in {
		in[i], want[i] = byte(i), byte(i)
		if 'A' <= i && i <= 'Z' {
			want[i] += 32
		}
	}
	for off := range 9 { // each byte in each lane, and in the tail
		got := make([]byte, 256-off)
		Fold(got, in[off:])
		if !bytes.Equal(got, want[off:]) {
			t.Fatalf("offset %d differs", off)
		}
	}
}

func TestSuffixHashes(t *testing.T) {
	k := NewKey([16]byte{1, 2, 3})
	name := MustParse("a.longer-label-of-more-than-8.com.")
	var out [MaxLabels + 1]uint64
	if n := SuffixHashes(&k, []byte(name), &out); n != 3 {
		t.Fatalf("%d labels", n)
	}
	seen := map[uint64]bool{}
	for i := range 3 {
		if h := k.Hash([]byte(name.Suffix(i + 1))); h != out[i] || seen[h] {
			t.Errorf("suffix %d: %x, want %x", i+1, out[i], h)
		}
		seen[out[i]] = true
	}
	other := NewKey([16]byte{1, 2, 4})
	if other.Hash([]byte(name)) == out[2] {
		t.Error("the key does not matter")
	}
	if a := testing.AllocsPerRun(100, func() { SuffixHashes(&k, []byte(name), &out) }); a != 0 {
		t.Errorf("%v allocations", a)
	}
}

// Labels of every length, in names of every length, so that last words lie before, at and over the name's end;
// the expected words are put together byte by byte.
func TestHashesOfEveryLength(t *testing.T) {
	k := Key{1, 2}
	for first := 1; first <= 63; first++ {
		for second := range 20 {
			name := append([]byte{byte(first)}, "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijk"[:first]...)
			if second > 0 {
				name = append(append(name, byte(second)), "0123456789-0123456789"[:second]...)
			}
			name = append(name, 0)
			want := k.Start()
			var sums []uint64
			for _, from := range []int{first + 1, 0} {
				label := name[from : from+1+int(name[from])]
				if label[0] == 0 {
					continue
				}
				for i := 0; i < len(label); i += 8 {
					var w uint64
					for j := i; j < min(i+8, len(label)); j++ {
						w |= uint64(label[j]) << (8 * (j - i))
					}
					want = want.Word(w)
				}
				sums = append(sums, want.Sum())
			}
			var got [MaxLabels + 1]uint64
			n := SuffixHashes(&k, name, &got)
			if !slices.Equal(got[:n], sums) || k.Hash(name) != sums[n-1] {
				t.Fatalf("%q: %x, want %x", name, got[:n], sums)
			}
		}
	}
}

// The reference vectors of SipHash-1-3 use a final length byte, which the label form replaces; what can be
// checked against the definition is one word with its finalisation, computed here by an independent
// straight-line copy.
func TestSipHashRounds(t *testing.T) {
	k := Key{0x0706050403020100, 0x0f0e0d0c0b0a0908}
	// SipHash-1-3 of the empty message, key 00..0f: one word of zero (length 0), then finalisation.
	if got := k.Start().Word(0).Sum(); got != 0xabac0158050fc4dc {
		t.Errorf("SipHash-1-3 of nothing = %#x, want 0xabac0158050fc4dc", got)
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{".", "a.b", `\.`, `\000.`, "*.x.", strings.Repeat("a.", 127)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := Parse(s)
		if err != nil {
			return
		}
		if err := Check([]byte(n)); err != nil {
			t.Fatalf("Parse(%q) = %q: %v", s, string(n), err)
		}
		back, err := Parse(n.String())
		if err != nil || back != n {
			t.Fatalf("%q -> %q -> %q, %v", s, n.String(), string(back), err)
		}
		buf := make([]byte, 256)
		if end, err := dns.PackDomainName(n.String(), buf, 0, nil, false); err != nil || string(buf[:end]) != string(n) {
			t.Fatalf("miekg/dns packs %q as %q, %v", n.String(), buf[:end], err)
		}
	})
}
