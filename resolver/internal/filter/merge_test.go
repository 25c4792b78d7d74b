package filter

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// TestMergeInStages merges a big table with a changed list, two more and a removed one while names are matched:
// each Matcher on the way says the same, at every time it serves, and the old table's memory goes piece by piece.
func TestMergeInStages(t *testing.T) {
	const n = 2*stagedFrom + 10_000
	var base strings.Builder
	for i := range n {
		fmt.Fprintf(&base, "||n%d.example^\n", i)
	}
	build := func(old *Matcher, lists map[int]string, remove ...int) *Matcher {
		b := NewBuilder(&testKey)
		for list, text := range lists {
			if _, err := b.Add(list, strings.NewReader(text)); err != nil {
				t.Fatal(err)
			}
		}
		for _, list := range remove {
			b.Remove(list)
		}
		return b.Build(old)
	}
	m := build(nil, map[int]string{3: base.String(), 5: "||n1.example^\n||gone.example^\n", 7: "||old.example^"})
	m = build(m, map[int]string{5: "||n1.example^$badfilter\n||more.example^\n@@||n2.example^\n"})
	m = build(m, map[int]string{500: "||n3.example^$important\n@@||n3.example^\n-pattern-\n"})
	m = build(m, map[int]string{9: "||n4.example^\n"}, 7)
	if m.Overlays() != MaxOverlays || m.Merged() {
		t.Fatalf("%d overlays, merged %v", m.Overlays(), m.Merged())
	}
	var names [][]byte
	for _, s := range []string{"n1", "n2", "n3", "n4", "gone", "old", "more", "x-pattern-y", "nothing"} {
		names = append(names, []byte(dnsname.MustParse("a."+s+".example")))
	}
	for i := 5; i < n; i += n / 200 {
		names = append(names, []byte(dnsname.MustParse(fmt.Sprintf("n%d.example", i))))
	}
	sets := []*Set{nil, {1 << 3}, {1<<5 | 1<<9}}
	var want []Result
	for _, name := range names {
		for _, s := range sets {
			r := m.Match(name, s, &Query{})
			want = append(want, r)
		}
	}
	if want[0].Verdict != None || want[3].Verdict != Allowed || want[6].Verdict != Blocked {
		t.Fatalf("the test does not test: %+v", want[:9])
	}
	same := func(when string, m *Matcher) {
		for i, name := range names {
			for k, s := range sets {
				if r := m.Match(name, s, &Query{}); r != want[i*len(sets)+k] {
					t.Errorf("%s: %s by set %d: %+v, want %+v", when, dnsname.Name(name), k, r, want[i*len(sets)+k])
				}
			}
		}
	}
	var serving atomic.Pointer[Matcher]
	serving.Store(m)
	stop := make(chan struct{})
	var readers sync.WaitGroup
	var reads atomic.Pointer[Matcher] // what the reader has in hand
	readers.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				m := serving.Load()
				reads.Store(m)
				same("beside", m)
			}
		}
	})
	m = nil
	var first, last int64 // how much is mapped; the new table is from the first stage on
	steps := 0
	next := serving.Load().Merge(func(m *Matcher) {
		steps++
		same(fmt.Sprint("stage ", steps), m)
		last = mapped.Load()
		if steps == 1 {
			first = last
		}
		if m.Save(t.TempDir()+"/index", new([MaxLists]ID)) == nil {
			t.Error("a stage was saved")
		}
		serving.Store(m)
		// The reader has the stage before in hand for a moment yet; at the first two for as long as it likes, but what
		// it holds cannot be given back, which is looked at in the last.
		for steps > 2 && reads.Load() != m {
			runtime.Gosched()
		}
	})
	t.Logf("%d stages, of %d bytes at first, %d at last", steps, first, last)
	serving.Store(next)
	close(stop)
	readers.Wait()
	same("merged", next)
	same("reloaded", reloaded(t, next))
	if steps < stages/2 || next.Overlays() != 0 || !next.Merged() {
		t.Errorf("%d stages, %d overlays, merged %v", steps, next.Overlays(), next.Merged())
	}
	if runtime.GOOS == "linux" && !raceEnabled && last > first-2*hugePage {
		t.Errorf("%d bytes are mapped in the last stage, %d were in the first: the old table stays", last, first)
	}
}

// A merge of lists of which nothing is left has nothing in it.
func TestMergeOfNothing(t *testing.T) {
	b := NewBuilder(&testKey)
	if _, err := b.Add(1, strings.NewReader("||a.example^")); err != nil {
		t.Fatal(err)
	}
	m := b.Build(nil)
	b = NewBuilder(&testKey)
	b.Remove(1)
	if m = b.Build(m).Merge(func(*Matcher) { t.Error("a stage of nothing") }); m.Stats().Rules != 0 || m.Match([]byte(dnsname.MustParse("a.example")), nil, &Query{}).Verdict != None {
		t.Errorf("%+v", m.Stats())
	}
}
