package arena

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// hash is good enough for tests: keys are not hostile.
func hash(key []byte) uint64 {
	h := uint64(14695981039346656037)
	for _, c := range key {
		h = (h ^ uint64(c)) * 1099511628211
	}
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}

// few divides the work of a test where the race detector makes it slow.
func few(n int) int {
	if raceEnabled || testing.Short() {
		return n / 10
	}
	return n
}

func keyOf(i int) []byte { return binary.BigEndian.AppendUint32(nil, uint32(i)) }

func (t *Table) put(key, value []byte, meta uint64) bool {
	w := t.Lock(hash(key))
	defer w.Unlock()
	return w.Put(append(append([]byte(nil), key...), value...), len(key), meta)
}

func (t *Table) get(key, buf []byte) (value []byte, meta uint64, ok bool) {
	for p := t.Probe(hash(key)); p.Next(); {
		n := p.Len()
		if n <= len(buf) && p.Copy(buf[:n]) && bytes.HasPrefix(buf[:n], key) {
			p.Touch()
			return buf[len(key):n], p.Meta(), true
		}
	}
	return nil, 0, false
}

// check compares the sums a table keeps with what a count of its slots and segments gives.
func (t *Table) check(tb testing.TB) {
	tb.Helper()
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.Lock()
		entries, live := 0, 0
		places := map[uint64]bool{}
		for slot, v := range s.slots {
			if v == 0 {
				continue
			}
			off := v >> offsetShift & offsetMask
			g := s.segs[off/segmentWords]
			if places[off] || uint16(v>>versionPos) != g.version || int(off%segmentWords) >= int(g.used) {
				tb.Fatalf("slot %d shows %d, in a segment of %+v", slot, off, g)
			}
			places[off] = true
			entries++
			live += entryWords(s.data[s.at(int(off))])
		}
		queued := 0
		for _, k := range append(append([]int32(nil), s.small...), s.main...) {
			queued++
			if s.segs[k].used == 0 {
				tb.Fatalf("segment %d is queued and empty", k)
			}
		}
		if entries != s.entries || live != s.live {
			tb.Fatalf("%d entries of %d words, the sums say %d and %d", entries, live, s.entries, s.live)
		}
		if queued+len(s.free)+len(s.released) != len(s.segs) || len(s.free) == 0 {
			tb.Fatalf("%d segments queued, %d free, %d released, of %d", queued, len(s.free), len(s.released), len(s.segs))
		}
		s.mu.Unlock()
	}
}

// While nothing is evicted a table is a map.
func TestTableIsAMap(t *testing.T) {
	for _, bytes := range []int64{4 << 20, 64 << 20} { // one shard, four
		t.Run(fmt.Sprint(bytes), func(t *testing.T) {
			r := rand.New(rand.NewPCG(3, uint64(bytes)))
			tb := NewTable(Options{Bytes: bytes})
			if tb.Bytes() > bytes {
				t.Fatalf("reserved %d", tb.Bytes())
			}
			type val struct {
				v string
				m uint64
			}
			model := map[int]val{}
			buf := make([]byte, MaxPayload)
			for n := range few(60000) {
				k := r.IntN(2000)
				switch r.IntN(6) {
				case 0, 1:
					v := make([]byte, r.IntN(40))
					for i := range v {
						v[i] = byte(r.Uint32())
					}
					m := r.Uint64()
					if !tb.put(keyOf(k), v, m) {
						t.Fatal("refused")
					}
					model[k] = val{string(v), m}
				case 2:
					if n%4 == 0 {
						w := tb.Lock(hash(keyOf(k)))
						e, ok := w.Find(keyOf(k))
						if _, want := model[k]; ok != want {
							t.Fatalf("key %d: found %v", k, ok)
						}
						if ok {
							w.Delete(e)
						}
						w.Unlock()
						delete(model, k)
						break
					}
					w := tb.Lock(hash(keyOf(k)))
					if e, ok := w.Find(keyOf(k)); ok {
						m := r.Uint64()
						e.SetMeta(m)
						model[k] = val{model[k].v, m}
						if !e.Equal(append(keyOf(k), model[k].v...)) || string(e.Append(nil)[4:]) != model[k].v {
							t.Fatalf("key %d differs", k)
						}
					}
					w.Unlock()
				default:
					v, m, ok := tb.get(keyOf(k), buf)
					want, wantOK := model[k]
					if ok != wantOK || string(v) != want.v || m != want.m {
						t.Fatalf("key %d: %x %x %v, want %+v %v", k, v, m, ok, want, wantOK)
					}
				}
			}
			tb.check(t)
			if st := tb.Stats(); st.Evictions != 0 || st.Entries != len(model) {
				t.Fatalf("%+v, the model has %d", st, len(model))
			}
			seen := 0
			if err := tb.Copies(func(p []byte, m uint64) error {
				seen++
				if w := model[int(binary.BigEndian.Uint32(p))]; w.v != string(p[4:]) || w.m != m {
					t.Fatalf("copy of %x", p)
				}
				return nil
			}); err != nil || seen != len(model) {
				t.Fatalf("%d copies, %v", seen, err)
			}
			odd := 0
			for k := range model {
				odd += k & 1
			}
			if n := tb.Walk(func(p []byte, _ uint64) bool { return p[3]&1 == 1 }); n != odd || tb.Stats().Entries != len(model)-odd {
				t.Fatalf("walk deleted %d of %d", n, odd)
			}
			tb.check(t)
		})
	}
}

func TestPutRefuses(t *testing.T) {
	tb := NewTable(Options{Bytes: MinBytes, KeyAt: 8})
	w := tb.Lock(1)
	defer w.Unlock()
	for n, want := range map[int]bool{0: false, 8: false, 11: false, 12: true, MaxPayload: true, MaxPayload + 1: false} {
		if got := w.Put(make([]byte, n), 4, 0); got != want {
			t.Errorf("%d bytes: %v", n, got)
		}
	}
	if w.Put(make([]byte, 100), 0, 0) {
		t.Error("an entry without a key")
	}
}

// Whatever is put, the memory is what was asked for, the sums are right, and what is found is what was put
// last.
func TestEvictionKeepsTheBudget(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for _, entry := range []int{32, 96, 4096} {
		tb := NewTable(Options{Bytes: 1 << 20, EntryBytes: entry, Keep: 2})
		last := map[int]uint64{}
		buf := make([]byte, MaxPayload)
		for n := range few(40000) {
			k := r.IntN(20000)
			if r.IntN(3) > 0 {
				k = r.IntN(500) // some are popular
			}
			if v, m, ok := tb.get(keyOf(k), buf); ok && (m != last[k] || len(v) != int(m%1000)) {
				t.Fatalf("key %d: meta %d, %d bytes; put last %d", k, m, len(v), last[k])
			} else if !ok {
				m := uint64(n)
				if n%500 == 0 {
					m = uint64(n)*1000 + 999
				}
				size := int(m % 1000)
				if !tb.put(keyOf(k), make([]byte, size), m) {
					t.Fatal("refused")
				}
				last[k] = m
			}
			if n%6000 == 0 {
				tb.check(t)
			}
		}
		tb.check(t)
		st := tb.Stats()
		if tb.Bytes() > 1<<20 || st.Bytes > tb.Bytes() || st.Evictions == 0 {
			t.Errorf("%d reserved, %+v", tb.Bytes(), st)
		}
		// Two thirds of the questions are for 500 keys of about 500 bytes: a quarter of the room.
		hits := 0
		for k := range 500 {
			if _, _, ok := tb.get(keyOf(k), buf); ok {
				hits++
			}
		}
		if entry < 4096 && hits < 450 {
			t.Errorf("only %d of the 500 popular keys are there", hits)
		}
	}
}

// A flood of keys asked once does not wash out those that are used; alone it has all the room, first in,
// first out.
func TestFlood(t *testing.T) {
	if raceEnabled {
		t.Skip("a long run of one goroutine")
	}
	tb := NewTable(Options{Bytes: 2 << 20, EntryBytes: 64, Keep: 2})
	buf := make([]byte, 1024)
	const popular = 2000
	use := func() (hits int) {
		for k := range popular {
			if _, _, ok := tb.get(keyOf(k), buf); ok {
				hits++
			} else {
				tb.put(keyOf(k), make([]byte, 40), 0)
			}
		}
		return hits
	}
	for range 4 {
		use()
	}
	const flood = 200000 // eight times what fits
	for i := range flood {
		tb.put(keyOf(1000000+i), make([]byte, 40), 0)
		if i%20000 == 0 {
			if hits := use(); i > 100000 && hits < popular*95/100 {
				t.Errorf("after %d: %d hits of %d", i, hits, popular)
			}
		}
	}
	tb.check(t)

	tb.Clear()
	tb.check(t)
	for i := range flood {
		tb.put(keyOf(i), make([]byte, 40), 0)
	}
	// A fingerprint that looks like one seen before sends a few to the other queue, which then takes a segment.
	there := tb.Stats().Entries * 9 / 10
	for i := flood - 1; i >= flood-there; i-- {
		if _, _, ok := tb.get(keyOf(i), buf); !ok {
			t.Fatalf("of the last %d, number %d is missing", there, flood-i)
		}
	}
	if bytes := tb.Bytes(); tb.Stats().Bytes < bytes*3/4 {
		t.Errorf("%d entries of 64 bytes in %d", there, bytes)
	}
}

func TestClaims(t *testing.T) {
	tb := NewTable(Options{})
	tb.put(keyOf(1), []byte("one"), 0)
	ref := func() Ref {
		p := tb.Probe(hash(keyOf(1)))
		var b [7]byte
		if !p.Next() || !p.Copy(b[:p.Len()]) {
			t.Fatal("gone")
		}
		return p.Ref()
	}
	a, b := ref(), ref()
	if !a.Claim() || a.Claim() || b.Claim() {
		t.Error("a claim is given once")
	}
	p := tb.Probe(hash(keyOf(1)))
	if p.Next(); !p.Claimed() {
		t.Error("not seen as claimed")
	}
	b.Unclaim()
	if !b.Claim() {
		t.Error("a claim given back can be had again")
	}
	tb.put(keyOf(1), []byte("two"), 0)
	if a.Claim() {
		t.Error("claimed an entry that was replaced")
	}
	a.Unclaim()
	if c := ref(); !c.Claim() {
		t.Error("a new version is unclaimed")
	}
	var none Ref
	if none.Claim() {
		t.Error("claimed nothing")
	}
}

func TestLimitGivesMemoryBack(t *testing.T) {
	if raceEnabled {
		t.Skip("the arena is on the heap")
	}
	tb := NewTable(Options{Bytes: 40 << 20}) // two shards
	next := 0
	fill := func() int {
		for range 100000 {
			tb.put(keyOf(next), make([]byte, 476), 0)
			next++
		}
		tb.check(t)
		return tb.Stats().Entries
	}
	full := fill()
	before := resident(t)
	got := tb.Limit(10 << 20)
	tb.check(t)
	if got > 10<<20 {
		t.Errorf("limit in force %d", got)
	}
	if n := tb.Stats().Entries; n > full/4 || n < full/8 {
		t.Errorf("%d of %d entries left", n, full)
	}
	if after := resident(t); before > 0 && after > before-(20<<20) {
		t.Errorf("resident %d, before %d", after, before)
	}
	if n := fill(); n > full/4 {
		t.Errorf("%d entries in a quarter of the room for %d", n, full)
	}
	if tb.Limit(1<<40) != tb.Bytes() || fill() < full*97/100 {
		t.Error("the room did not come back")
	}
	if got := tb.Limit(0); got > 16<<20 {
		t.Errorf("least limit %d", got)
	}
	tb.check(t)
}

// resident returns the resident bytes of this process, 0 where the arena is on the heap or nobody says.
func resident(t *testing.T) int {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	var size, rss int
	if _, err := fmt.Sscan(strings.TrimSpace(string(b)), &size, &rss); err != nil {
		t.Fatal(err)
	}
	return rss * os.Getpagesize()
}

// The race detector cannot watch memory outside the heap, so here entries carry a checksum, the table is so
// small that places are reused all the time, and readers and writers run together. Run without -race it
// tests the mapped arena, with -race the code.
func TestReadersNeverSeeTornEntries(t *testing.T) {
	tb := NewTable(Options{Bytes: MinBytes})
	rounds := few(40000)
	const keys = 1500
	seal := func(k, n int, r *rand.Rand) []byte {
		b := make([]byte, 12, 12+n)
		binary.BigEndian.PutUint32(b, uint32(k))
		for range n {
			b = append(b, byte(r.Uint32()))
		}
		binary.LittleEndian.PutUint32(b[4:], uint32(len(b)))
		binary.LittleEndian.PutUint32(b[8:], crc32.ChecksumIEEE(b[12:]))
		return b
	}
	var writers, readers sync.WaitGroup
	var done atomic.Bool
	var hits, misses atomic.Int64
	for g := range 2 {
		writers.Go(func() {
			r := rand.New(rand.NewPCG(9, uint64(g)))
			for n := range rounds {
				k := r.IntN(keys)
				b := seal(k, r.IntN(1200), r)
				w := tb.Lock(hash(keyOf(k)))
				if n%50 == 0 {
					if e, ok := w.Find(keyOf(k)); ok {
						w.Delete(e)
					}
				} else {
					w.Put(b, 4, uint64(k))
				}
				w.Unlock()
				if n%5000 == 0 {
					tb.Clear()
				}
			}
		})
	}
	for g := range 3 {
		readers.Go(func() {
			r := rand.New(rand.NewPCG(10, uint64(g)))
			buf := make([]byte, MaxPayload)
			for n := 0; !done.Load(); n++ {
				if n%32 == 0 {
					runtime.Gosched() // the writers' progress decides how long this takes
				}
				k := r.IntN(keys)
				v, m, ok := tb.get(keyOf(k), buf)
				if !ok {
					misses.Add(1)
					continue
				}
				hits.Add(1)
				if m != uint64(k) || int(binary.LittleEndian.Uint32(v)) != len(v)+4 || binary.LittleEndian.Uint32(v[4:]) != crc32.ChecksumIEEE(v[8:]) {
					t.Errorf("key %d: a torn entry of %d bytes, meta %d", k, len(v), m)
					return
				}
			}
		})
	}
	writers.Wait()
	done.Store(true)
	readers.Wait()
	tb.check(t)
	if hits.Load() == 0 || misses.Load() == 0 {
		t.Errorf("%d hits, %d misses: nothing was tested", hits.Load(), misses.Load())
	}
}

// The same key written again at the same place, after all was evicted, is another version: a reader that
// comes back late cannot take what it copied for whole.
func TestReusedPlaceIsAnotherVersion(t *testing.T) {
	tb := NewTable(Options{})
	tb.put(keyOf(1), []byte("one"), 0)
	p, fresh := tb.Probe(hash(keyOf(1))), tb.Probe(hash(keyOf(1)))
	p.Next()
	tb.Clear()
	tb.put(keyOf(1), []byte("two"), 0)
	fresh.Next()
	if (p.word^fresh.word)>>offsetShift&offsetMask != 0 || p.slot != fresh.slot {
		t.Fatal("not the same place: the test shows nothing")
	}
	var b [7]byte
	if p.Copy(b[:]) || !fresh.Copy(b[:]) {
		t.Error("an old version was taken for the new one")
	}
}

func TestCopyAndStore(t *testing.T) {
	words := Reserve(1024).Words()
	for n := range 40 {
		src := make([]byte, n)
		for i := range src {
			src[i] = byte(i + 1)
		}
		store(words, src)
		got := make([]byte, n)
		Copy(got, words)
		if !bytes.Equal(got, src) {
			t.Fatalf("%x, want %x", got, src)
		}
	}
}

func TestReleaseZeroes(t *testing.T) {
	m := Reserve(1 << 20)
	w := m.Words()
	for i := range w {
		w[i] = 1
	}
	page := os.Getpagesize() / 8
	m.Release(page/2, 10*page)
	if w[0] != 1 || w[page] != 0 || w[10*page-1] != 0 || w[10*page] != 1 {
		t.Errorf("words %d %d %d %d", w[0], w[page], w[10*page-1], w[10*page])
	}
	m.Release(5, 5)
	m.Release(10*page, 10*page+1)
}

func BenchmarkGet(b *testing.B) {
	tb := NewTable(Options{Bytes: 256 << 20, EntryBytes: 128})
	for i := range 1000000 {
		tb.put(keyOf(i), make([]byte, 100), 0)
	}
	buf := make([]byte, 1024)
	r := rand.New(rand.NewPCG(1, 1))
	order := make([]uint32, 1<<20)
	for i := range order {
		order[i] = uint32(r.IntN(1000000))
	}
	var key [4]byte
	i := 0
	for b.Loop() {
		binary.BigEndian.PutUint32(key[:], order[i&(1<<20-1)])
		i++
		if _, _, ok := tb.get(key[:], buf); !ok {
			b.Fatal("miss")
		}
	}
}
