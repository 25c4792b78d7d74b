package answercache

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
)

const (
	start = clock.Instant(1000 * time.Second)
	s     = time.Second
)

var hashKey = dnsname.NewKey([16]byte{5})

func question(n string) query.Question {
	return query.Question{Name: dnsname.MustParse(n), Type: dnswire.TypeA, Class: dnswire.ClassIN}
}

// answer makes an entry whose address is the number n.
func answer(tb testing.TB, q query.Question, n uint32, ttl uint32, now clock.Instant, epoch uint32) settled.Entry {
	tb.Helper()
	e, err := settled.Settle(&query.Unvalidated{
		Question: q,
		Answer: []query.RRset{{
			Name: q.Name, Type: dnswire.TypeA, Class: q.Class, TTL: ttl,
			Data: query.AppendRData(nil, binary.BigEndian.AppendUint32(nil, n)),
		}},
	}, query.Insecure, settled.Options{Now: now, Epoch: epoch, EDE: query.NoEDE})
	if err != nil {
		tb.Fatal(err)
	}
	return e
}

func address(e settled.Entry) uint32 {
	b := e.View().Body
	return binary.BigEndian.Uint32(b[len(b)-4:])
}

func (c *Cache) put(tb testing.TB, q query.Question, n, ttl uint32, now clock.Instant) bool {
	tb.Helper()
	return c.Put(&q, Hash(&hashKey, &q), answer(tb, q, n, ttl, now, c.Epoch()), now)
}

func (c *Cache) get(q query.Question, now clock.Instant) (settled.Entry, Found) {
	return c.Get(&q, Hash(&hashKey, &q), make([]byte, query.MaxEntry), now)
}

// Every part of the question is part of the key, even if the hashes were equal.
func TestKeysAreApart(t *testing.T) {
	base := question("www.example.")
	variants := []query.Question{base}
	vary := func(f func(*query.Question)) {
		q := base
		f(&q)
		variants = append(variants, q)
	}
	vary(func(q *query.Question) { q.Name = dnsname.MustParse("ww.example.") })
	vary(func(q *query.Question) { q.Name = dnsname.Root })
	vary(func(q *query.Question) { q.Type = dnswire.TypeAAAA })
	vary(func(q *query.Question) { q.Class = 3 })
	vary(func(q *query.Question) { q.DO = true })
	vary(func(q *query.Question) { q.CD = true })
	vary(func(q *query.Question) { q.DO, q.CD = true, true })
	vary(func(q *query.Question) { q.View = 1 })
	vary(func(q *query.Question) { q.Subnet = query.Subnet{Family: 1, Bits: 24, Addr: [16]byte{192, 0, 2}} })
	vary(func(q *query.Question) { q.Subnet = query.Subnet{Family: 1, Bits: 23, Addr: [16]byte{192, 0, 2}} })
	vary(func(q *query.Question) { q.Subnet = query.Subnet{Family: 2, Bits: 24, Addr: [16]byte{192, 0, 2}} })
	vary(func(q *query.Question) { q.Subnet = query.Subnet{Family: 2, Bits: 128, Addr: [16]byte{15: 1}} })
	vary(func(q *query.Question) { q.Subnet = query.Subnet{Family: 1} })

	hashes := map[uint64]query.Question{}
	for _, q := range variants {
		h := Hash(&hashKey, &q)
		if other, ok := hashes[h]; ok {
			t.Errorf("%+v and %+v hash alike", q, other)
		}
		hashes[h] = q
	}
	buf := make([]byte, query.MaxEntry)
	for _, same := range []bool{false, true} {
		hash := func(q query.Question) uint64 {
			if same {
				return 42
			}
			return Hash(&hashKey, &q)
		}
		c := New(Options{Bytes: 1 << 20, Seed: 77})
		for i, q := range variants {
			if e, f := c.Get(&q, hash(q), buf, start); f.OK {
				t.Fatalf("%+v is answered by %+v", q, e.Question())
			}
			if !c.Put(&q, hash(q), answer(t, q, uint32(i), 60, start, 0), start) {
				t.Fatalf("%+v refused", q)
			}
		}
		for i, q := range variants {
			e, f := c.Get(&q, hash(q), buf, start)
			if !f.OK || e.Question() != q || address(e) != uint32(i) {
				t.Errorf("%+v: %+v", q, f)
			}
		}
	}
}

func TestLife(t *testing.T) {
	c := New(Options{Bytes: 1 << 20, MaxStale: 50 * s})
	q := question("x.example.")
	c.put(t, q, 1, 100, start)
	for _, x := range []struct {
		at             time.Duration
		ok, stale, due bool
	}{
		{0, true, false, false},
		{89 * s, true, false, false},
		{91 * s, true, false, true}, // used before, and in its last tenth
		{100 * s, false, true, false},
		{149 * s, false, true, false},
		{150 * s, false, false, false},
	} {
		_, f := c.get(q, start.Add(x.at))
		if f.OK != x.ok || f.Stale != x.stale || f.Due != x.due {
			t.Errorf("at %v: %+v, want %+v", x.at, f, x)
		}
	}

	// One of those who find it due may fetch; a failure gives the claim back, a new entry starts afresh.
	_, f := c.get(q, start.Add(95*s))
	_, g := c.get(q, start.Add(96*s))
	if !f.Claim() || g.Claim() {
		t.Error("claimed twice")
	}
	if _, h := c.get(q, start.Add(97*s)); h.Due || !h.OK {
		t.Errorf("claimed and due: %+v", h)
	}
	f.Unclaim()
	if _, h := c.get(q, start.Add(98*s)); !h.Due {
		t.Error("not due after a failure")
	}
	c.put(t, q, 2, 100, start.Add(98*s))
	if g.Claim() {
		t.Error("claimed what was replaced")
	}
	if e, h := c.get(q, start.Add(189*s)); !h.OK || !h.Due || address(e) != 2 {
		t.Errorf("%+v", h) // popularity survives a refresh
	}

	// Neither what nobody uses nor what lives briefly is fetched ahead.
	c.put(t, question("once.example."), 1, 100, start)
	if _, f := c.get(question("once.example."), start.Add(95*s)); f.Due {
		t.Error("due at its first use")
	}
	brief := question("brief.example.")
	c.put(t, brief, 1, 8, start)
	for range 4 {
		c.get(brief, start)
	}
	if _, f := c.get(brief, start.Add(7*s+s/2)); f.Due {
		t.Error("a life of 8 s was fetched ahead")
	}
	c = New(Options{Bytes: 1 << 20, NoPrefetch: true})
	c.put(t, q, 1, 100, start)
	for range 4 {
		if _, f := c.get(q, start.Add(95*s)); f.Due {
			t.Error("due without prefetching")
		}
	}
	if _, f := c.get(q, start.Add(100*s)); f.OK || f.Stale {
		t.Error("stale without MaxStale")
	}
}

func TestEpochs(t *testing.T) {
	c := New(Options{Bytes: 1 << 20})
	q := question("x.example.")
	c.put(t, q, 1, 100, start)
	late := answer(t, q, 2, 100, start, c.Epoch())
	c.Raise()
	if _, f := c.get(q, start); f.OK {
		t.Error("an older epoch's answer")
	}
	if c.Put(&q, Hash(&hashKey, &q), late, start) {
		t.Error("an answer begun in an older epoch was stored")
	}
	if !c.put(t, q, 3, 100, start) {
		t.Error("refused")
	}
	if e, f := c.get(q, start); !f.OK || address(e) != 3 {
		t.Error("lost")
	}
	other := question("y.example.")
	if c.Put(&other, Hash(&hashKey, &other), answer(t, q, 1, 100, start, c.Epoch()), start) {
		t.Error("stored under another question")
	}
	if c.put(t, q, 1, 0, start) {
		t.Error("stored what has no time to live")
	}
	if e, f := c.Get(&q, Hash(&hashKey, &q), make([]byte, 20), start); f.OK || !e.IsZero() {
		t.Error("copied into a buffer that is too small")
	}
}

func TestPurge(t *testing.T) {
	for _, x := range []struct {
		name    string
		subtree bool
		want    int
	}{
		{"a.example.", false, 3}, {"a.example.", true, 4}, {"example.", true, 6}, {".", true, 7}, {"example.", false, 1}, {"b.", true, 0},
	} {
		c := New(Options{Bytes: 1 << 20})
		for _, n := range []string{"example.", "a.example.", "b.a.example.", "ba.example.", "org."} {
			c.put(t, question(n), 1, 60, start)
		}
		do := question("a.example.")
		do.DO = true
		c.put(t, do, 1, 60, start)
		alias := question("alias.example.")
		e, err := settled.Settle(&query.Unvalidated{Question: alias, Answer: []query.RRset{{
			Name: alias.Name, Type: dnswire.TypeCNAME, Class: 1, TTL: 60, Data: query.AppendRData(nil, []byte(dnsname.MustParse("a.example."))),
		}}}, query.Insecure, settled.Options{Now: start})
		if err != nil || !c.Put(&alias, Hash(&hashKey, &alias), e, start) {
			t.Fatal("no alias")
		}
		if n := c.Purge(dnsname.MustParse(x.name), x.subtree); n != x.want || c.Stats().Entries != 7-n {
			t.Errorf("purge %+v removed %d, left %+v", x, n, c.Stats())
		}
	}
}

// Against a map: what is found is what was put last and has not ended; the budget holds.
func TestAgainstModel(t *testing.T) {
	type val struct {
		n   uint32
		end clock.Instant
	}
	r := rand.New(rand.NewPCG(4, 4))
	c := New(Options{Bytes: 512 << 10})
	model := map[query.Question]val{}
	names := make([]dnsname.Name, 10000)
	for i := range names {
		names[i] = dnsname.MustParse(fmt.Sprintf("n%d.example.", i))
	}
	now := start
	for i := range 20000 {
		now = now.Add(time.Duration(r.IntN(int(s / 10))))
		q := query.Question{Name: names[int(float64(len(names))*r.Float64()*r.Float64()*r.Float64())], Type: uint16(1 + r.IntN(2)), Class: 1, DO: r.IntN(2) == 0}
		e, f := c.get(q, now)
		want := model[q]
		if f.OK && (address(e) != want.n || want.end <= now) {
			t.Fatalf("%+v at %v: %d, want %+v", q, now, address(e), want)
		}
		if !f.OK {
			ttl := uint32(1 + r.IntN(600))
			if !c.put(t, q, uint32(i), ttl, now) {
				t.Fatal("refused")
			}
			model[q] = val{uint32(i), now.Add(time.Duration(ttl) * s)}
		}
	}
	st := c.Stats()
	t.Logf("%+v", st)
	if st.Budget > 512<<10 || st.Bytes > st.Budget || st.Evictions == 0 || st.Entries < 1500 {
		t.Errorf("%+v", st)
	}
}

func TestGetDoesNotAllocate(t *testing.T) {
	c := New(Options{Bytes: 1 << 20, MaxStale: s})
	q := question("a-rather-long-name-of-a-host.www.example.")
	c.put(t, q, 1, 100, start)
	absent := question("absent.example.")
	buf := make([]byte, query.MaxEntry)
	if n := testing.AllocsPerRun(200, func() {
		if _, f := c.Get(&q, Hash(&hashKey, &q), buf, start); !f.OK {
			t.Fatal("miss")
		} else if f.Due {
			f.Claim()
		}
		if _, f := c.Get(&absent, Hash(&hashKey, &absent), buf, start); f.OK {
			t.Fatal("hit")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// Readers, writers, purges and epochs at once: an answer is always that of its question, whole.
func TestConcurrently(t *testing.T) {
	c := New(Options{Bytes: 512 << 10, MaxStale: s})
	const names = 4000
	qs := make([]query.Question, names)
	entries := make([][]byte, names)
	for i := range qs {
		qs[i] = question(fmt.Sprintf("n%d.example.", i))
		entries[i] = answer(t, qs[i], uint32(i), 100, start, 0).Bytes()
	}
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(g)))
			buf := make([]byte, query.MaxEntry)
			for n := range 8000 {
				i := r.IntN(names)
				q := &qs[i]
				h := Hash(&hashKey, q)
				e, f := c.Get(q, h, buf, start)
				if f.OK && !bytes.Equal(e.Bytes(), entries[i]) {
					t.Errorf("%v: not the entry that was put", q.Name)
					return
				}
				if !f.OK {
					own, _ := settled.FromCache(entries[i])
					c.Put(q, h, own, start)
				} else if n%7 == 0 {
					f.Claim()
					f.Unclaim()
				}
				if n%2000 == 1999 && g == 0 {
					c.Purge(q.Name, false)
					c.Limit(256<<10 + int64(n)*10)
				}
			}
		})
	}
	wg.Wait()
	if st := c.Stats(); st.Entries == 0 || st.Evictions == 0 {
		t.Errorf("%+v", st)
	}
}

func BenchmarkGet(b *testing.B) {
	const n = 1000000
	c := New(Options{Bytes: 512 << 20, Seed: 3})
	qs := make([]query.Question, n)
	for i := range qs {
		qs[i] = question(fmt.Sprintf("host%d.example.com.", i))
		c.put(b, qs[i], uint32(i), 1000, start)
	}
	st := c.Stats()
	if st.Entries != n {
		b.Fatalf("%+v", st)
	}
	r := rand.New(rand.NewPCG(1, 1))
	order := make([]uint32, 1<<20)
	for i := range order {
		order[i] = uint32(r.IntN(n))
	}
	buf := make([]byte, query.MaxEntry)
	i := 0
	for b.Loop() {
		q := &qs[order[i&(1<<20-1)]]
		i++
		if _, f := c.Get(q, Hash(&hashKey, q), buf, start); !f.OK {
			b.Fatal("miss")
		}
	}
	b.ReportMetric(float64(st.Bytes)/n, "B/entry")
}
