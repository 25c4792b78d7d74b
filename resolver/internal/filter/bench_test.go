package filter

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// perOp reports the processor time of fn a call, which other load on the machine disturbs less than the wall
// clock.
func perOp(b *testing.B, fn func(i int)) {
	b.ReportAllocs()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	start, n := threadTime(), 0
	for b.Loop() {
		fn(n)
		n++
	}
	b.ReportMetric(float64(threadTime()-start)/float64(n), "cpu-ns/op")
}

func threadTime() int64 {
	const thread = 1 // RUSAGE_THREAD of Linux
	var u syscall.Rusage
	if syscall.Getrusage(thread, &u) != nil {
		return 0
	}
	return u.Utime.Nano() + u.Stime.Nano()
}

// row returns the names one behind the other in memory. A resolver has a name in the packet it has just read;
// names from all over the heap would measure the heap.
func row(names [][]byte) [][]byte {
	all := slices.Concat(names...)
	out := make([][]byte, len(names))
	for i, n := range names {
		out[i], all = all[:len(n):len(n)], all[len(n):]
	}
	return out
}

// BenchmarkMainLists loads the 19 main lists and matches popular names, names on the lists, and names that
// nobody has, all in random order, and a few over and over. A match includes hashing the name.
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
	runtime.LockOSThread()
	start := threadTime()
	m, rules := load()
	took := time.Duration(threadTime() - start)
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&after)
	runtime.KeepAlive(files)
	st := m.Stats()
	b.Logf("%d rules (%d patterns) in %v of processor time; %.1f B/rule of heap, %.1f counted; %d in lists of always",
		rules, st.Patterns, took, float64(int64(after.HeapAlloc)-int64(before.HeapAlloc))/float64(rules), float64(st.Bytes)/float64(rules), len(m.rules.always))

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
	one, some := Set{1}, Set{}
	for i := range files {
		some.Add(i)
	}
	// Random halves of the lists, for users who all differ.
	halves := make([]Set, 1024)
	for i := range halves {
		for l := range files {
			if r.IntN(2) == 0 {
				halves[i].Add(l)
			}
		}
	}
	q := &Query{Type: typeA}
	for _, set := range []struct {
		name  string
		names [][]byte
	}{{"few", popular[:200]}, {"popular", popular}, {"listed", listed}, {"missing", missing}} {
		for _, user := range []struct {
			name  string
			lists func(i int) *Set
		}{
			{"1 list", func(int) *Set { return &one }},
			{"19 lists", func(int) *Set { return &some }},
			{"random half", func(i int) *Set { return &halves[i%len(halves)] }},
		} {
			b.Run(set.name+"/"+user.name, func(b *testing.B) {
				names := row(set.names)
				var h [dnsname.MaxLabels + 1]uint64
				perOp(b, func(i int) {
					name := names[i%len(names)]
					n := dnsname.SuffixHashes(&key, name, &h)
					m.MatchHashed(name, h[:n], user.lists(i), q)
				})
			})
		}
	}
	// What a worker sees: popular names by Zipf's law, remembered.
	zipf := rand.NewZipf(r, 1.0001, 1, uint64(len(popular)-1))
	asked := make([][]byte, 200_000)
	for i := range asked {
		asked[i] = popular[zipf.Uint64()]
	}
	for _, set := range []struct {
		name  string
		names [][]byte
	}{{"few", popular[:200]}, {"popular", popular}, {"zipf", asked}} {
		b.Run("memo/"+set.name+"/random half", func(b *testing.B) {
			names := row(set.names)
			var h [dnsname.MaxLabels + 1]uint64
			memo := new(Memo)
			perOp(b, func(i int) {
				name := names[i%len(names)]
				n := dnsname.SuffixHashes(&key, name, &h)
				memo.Match(m, name, h[:n], &halves[i%len(halves)], q)
			})
		})
	}
	b.Run("hashes alone", func(b *testing.B) {
		names := row(popular)
		var h [dnsname.MaxLabels + 1]uint64
		perOp(b, func(i int) { dnsname.SuffixHashes(&key, names[i%len(names)], &h) })
	})
}
