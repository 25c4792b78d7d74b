package filter

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// BenchmarkMainLists loads the 19 main lists and matches popular names, names on the lists, and names that
// nobody has.
func BenchmarkMainLists(b *testing.B) {
	files := listFiles(b, "main")
	key := dnsname.Key{K0: 5, K1: 6}
	load := func() (*Matcher, int) {
		bl := NewBuilder(&key)
		rules := 0
		for i, f := range files {
			rep, err := bl.Add(i, bytes.NewReader(f.Text))
			if err != nil {
				b.Fatal(err)
			}
			rules += rep.Rules
		}
		return bl.Build(nil), rules
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	start := time.Now()
	m, rules := load()
	took := time.Since(start)
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&after)
	st := m.Stats()
	b.Logf("%d rules (%d patterns) in %v; %.1f B/rule of heap, %.1f counted; %d in lists of always",
		rules, st.Patterns, took, float64(after.HeapAlloc-before.HeapAlloc)/float64(rules), float64(st.Bytes)/float64(rules), len(m.rules.always))

	var popular [][]byte
	for _, l := range strings.Fields(string(unpack(b, shared(b, "data", "names", "umbrella_top_100k.txt.gz")))) {
		if i := strings.LastIndexByte(l, ','); i >= 0 {
			l = l[i+1:]
		}
		if n, err := dnsname.Parse(l); err == nil {
			popular = append(popular, []byte(n))
		}
	}
	r := rand.New(rand.NewPCG(1, 2))
	r.Shuffle(len(popular), func(i, j int) { popular[i], popular[j] = popular[j], popular[i] })
	var listed, missing [][]byte
	for _, n := range popular {
		if res := m.Match(n, nil, &Query{Type: typeA}); res.Verdict != None {
			listed = append(listed, n)
		} else {
			missing = append(missing, n)
		}
	}
	some := Set{}
	for i := range files {
		some.Add(i)
	}
	for _, set := range []struct {
		name  string
		names [][]byte
	}{{"popular", popular}, {"listed", listed}, {"missing", missing}} {
		b.Run(set.name, func(b *testing.B) {
			b.ReportAllocs()
			q := &Query{Type: typeA}
			i := 0
			for b.Loop() {
				m.Match(set.names[i], &some, q)
				if i++; i == len(set.names) {
					i = 0
				}
			}
		})
	}
	b.Run("judge by facts", func(b *testing.B) {
		b.ReportAllocs()
		q := &Query{Type: typeA}
		facts := make([]Facts, len(popular))
		var h [dnsname.MaxLabels + 1]uint64
		for i, n := range popular {
			facts[i] = m.Facts(n, h[:dnsname.SuffixHashes(&key, n, &h)])
		}
		i := 0
		for b.Loop() {
			m.Judge(&facts[i], popular[i], &some, q)
			if i++; i == len(popular) {
				i = 0
			}
		}
	})
	b.Run("hashes alone", func(b *testing.B) {
		i := 0
		var h [dnsname.MaxLabels + 1]uint64
		for b.Loop() {
			dnsname.SuffixHashes(&key, popular[i], &h)
			if i++; i == len(popular) {
				i = 0
			}
		}
	})
}
