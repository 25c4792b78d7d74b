package filter

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"flag"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

var long = flag.Bool("long", false, "run the long tests too")

// TestRegion grows and shrinks memory across the border of the heap, and gives it back.
func TestRegion(t *testing.T) {
	before := mapped.Load()
	r := newRegion(10)
	want := 0
	for _, words := range []int{100, offHeap/8 + 5, 4 * offHeap / 8, offHeap / 4, offHeap / 8, 50, 2 * offHeap / 8, 7} {
		r.resize(words)
		if len(r.words) != words {
			t.Fatalf("%d words, want %d", len(r.words), words)
		}
		for i, w := range r.words {
			if i < want && w != uint64(i+1) || i >= want && w != 0 {
				t.Fatalf("word %d of %d is %d, %d were written", i, words, w, want)
			}
			r.words[i] = uint64(i + 1)
		}
		want = words
	}
	runtime.KeepAlive(r)
	r = newRegion(offHeap)
	// What tests before left behind may go meanwhile, so that nothing is said of the difference.
	if runtime.GOOS == "linux" && !raceEnabled && (!r.mapped || mapped.Load() < 8*offHeap) {
		t.Errorf("a region of %d bytes is mapped: %v; %d bytes are in all", 8*len(r.words), r.mapped, mapped.Load())
	}
	runtime.KeepAlive(r)
	for range 100 {
		runtime.GC()
		if mapped.Load() <= before {
			return
		}
		runtime.Gosched()
	}
	t.Errorf("%d bytes stay mapped, %d before", mapped.Load(), before)
}

// TestBigTable makes a table outside the heap, in place, and finds in it what was put in, and nothing else.
func TestBigTable(t *testing.T) {
	const n = 100_000
	var text strings.Builder
	for i := range n {
		fmt.Fprintf(&text, "||n%d.example^\n", i)
	}
	b := NewBuilder(&testKey)
	for _, list := range []int{3, 4} {
		if _, err := b.Add(list, strings.NewReader(text.String())); err != nil {
			t.Fatal(err)
		}
		text.WriteString("||more.example^\n")
	}
	m := b.Build(nil)
	for round, m := range []*Matcher{m, reloaded(t, m), m.Merge(nil)} {
		for i := range n {
			name := []byte(dnsname.MustParse(fmt.Sprintf("x.n%d.example", i)))
			if r := m.Match(name, nil, &Query{}); r.Verdict != Blocked || r.List != 3 || r.Line != uint32(i+1) {
				t.Fatalf("round %d: n%d: %+v", round, i, r)
			}
			if r := m.Match(name, &Set{1 << 4}, &Query{}); r.List != 4 || r.Line != uint32(i+1) {
				t.Fatalf("round %d: n%d in list 4: %+v", round, i, r)
			}
			copy(name[3:], "zz")
			if r := m.Match(name, nil, &Query{}); r.Verdict != None {
				t.Fatalf("round %d: %v: %+v", round, dnsname.Name(name), r)
			}
		}
	}
}

// TestPeak holds building of the 19 lists, by themselves and beside what serves, to one and a half times the
// memory of the index that comes out. It looks at what the system gave the process.
func TestPeak(t *testing.T) {
	if !*long || raceEnabled {
		t.Skip("two million rules: with -long, not with -race")
	}
	names := listNames(t, "main")
	add := func(b *Builder, lists ...int) {
		for _, i := range lists {
			f, err := os.Open(shared(t, "data", "lists", names[i]+".gz"))
			if err != nil {
				t.Fatal(err)
			}
			z, err := gzip.NewReader(bufio.NewReader(f))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := b.Add(i, z); err != nil {
				t.Fatal(err)
			}
			f.Close()
		}
	}
	defer debug.SetGCPercent(debug.SetGCPercent(10)) // garbage that the runtime lets lie is not ours
	serving := new(Matcher)                          // nothing else refers to it
	all := int64(0)                                  // bytes of the index
	measure := func(what string, do func()) {
		t.Helper()
		for range 3 {
			runtime.GC()
		}
		debug.FreeOSMemory()
		if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0o200); err != nil {
			t.Skip("the system does not measure peaks: ", err)
		}
		size := serving.Stats().Bytes
		before := status(t, "VmRSS") - size // of all else
		do()
		peak := status(t, "VmHWM") - before
		if all == 0 {
			size = serving.Stats().Bytes
		}
		if all != 0 {
			size = all // without what is in tables twice
		}
		t.Logf("%s: %.1f MB at most, %.2f times the index", what, float64(peak)/1e6, float64(peak)/float64(size))
		if peak > size*3/2 {
			t.Errorf("%s takes %d bytes, the index has %d", what, peak, size)
		}
	}
	var everything []int
	for i := range names {
		everything = append(everything, i)
	}
	change := func(lists ...int) func() {
		return func() {
			b := NewBuilder(&testKey)
			add(b, lists...)
			serving = b.Build(serving)
		}
	}
	merge := func() {
		was := serving
		serving = nil
		serving = was.Merge(func(m *Matcher) { serving = m })
	}
	serving = NewBuilder(&testKey).Build(nil)
	change(0)() // what the process needs once
	serving = NewBuilder(&testKey).Build(nil)
	measure("building", change(everything...))
	s := serving.Stats()
	all = s.Bytes
	t.Logf("%d rules, %d of them patterns, %.1f MB, %.1f B a rule", s.Rules, s.Patterns, float64(s.Bytes)/1e6, float64(s.Bytes)/float64(s.Rules))
	if s.Bytes > 24*int64(s.Rules) {
		t.Errorf("%d bytes for %d rules", s.Bytes, s.Rules)
	}
	for _, i := range []int{0, 8, 10} { // a big one, the one with the most patterns, and the biggest
		measure("changing "+names[i], change(i))
		measure("merging", merge)
	}
}

// status returns a line of /proc/self/status in bytes.
func status(t testing.TB, key string) int64 {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Skip(err)
	}
	for l := range bytes.Lines(b) {
		var n int64
		if _, err := fmt.Sscanf(string(l), key+": %d kB", &n); err == nil {
			return n << 10
		}
	}
	t.Skipf("no %s", key)
	return 0
}
