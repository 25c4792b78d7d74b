package store

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
)

// The table against a map, with tags so few that everything collides.
func TestTableModel(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	var table Table
	type pair struct{ tag, ordinal uint32 }
	model := map[pair]int{}
	tags := []uint32{0, 1, 7, 1 << 31, 1<<32 - 1, 1<<32 - 2, 0xff000000, 0xffffff00}
	for range 20000 {
		p := pair{tags[rnd.IntN(len(tags))], uint32(rnd.IntN(40))}
		if rnd.IntN(2) == 0 && len(model) < 100 {
			if err := table.Add(p.tag, p.ordinal); err != nil {
				t.Fatal(err)
			}
			model[p]++
		} else {
			had := model[p] > 0
			if got := table.Remove(p.tag, p.ordinal); got != had {
				t.Fatalf("Remove(%v) = %v", p, got)
			}
			if model[p]--; model[p] <= 0 {
				delete(model, p)
			}
		}
	}
	total := 0
	for _, tag := range tags {
		found := map[pair]int{}
		for f := table.Find(tag); ; {
			o, ok := f.Next()
			if !ok {
				break
			}
			found[pair{tag, o}]++
		}
		for p, n := range found {
			if model[p] != n {
				t.Errorf("%v is found %d times, was entered %d times", p, n, model[p])
			}
		}
		for p, n := range model {
			if p.tag == tag && found[p] != n {
				t.Errorf("%v is found %d times, was entered %d times", p, found[p], n)
			}
		}
		total += len(table.AppendRange(nil, tag, tag))
	}
	if total != table.Len() || len(table.AppendRange(nil, 0, 1<<32-1)) != table.Len() {
		t.Errorf("ranges yield %d entries, the table has %d", total, table.Len())
	}
	for range 10 {
		table.AddBelow(5, 1, 3)
	}
	n := 0
	for f := table.Find(5); ; n++ {
		if _, ok := f.Next(); !ok {
			break
		}
	}
	if n > 3 {
		t.Errorf("%d entries of a tag limited to 3", n)
	}
}

// The store against two maps, replica and serving view, with records of all sizes and much churn.
func TestStoreModel(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	s := New()
	type version struct {
		bytes    string
		revision uint64
	}
	replica, serving := map[string]version{}, map[string]version{}
	keys := make([]string, 500)
	for i := range keys {
		keys[i] = fmt.Sprintf("key-%d", i)
	}
	for step := range 20000 {
		key := keys[rnd.IntN(len(keys))]
		switch op := rnd.IntN(10); {
		case op < 6:
			size := rnd.IntN(300)
			if rnd.IntN(200) == 0 {
				size = rnd.IntN(256 << 10)
			}
			v := version{string(bytes.Repeat([]byte{byte(step)}, size)), uint64(step)}
			d, err := s.Write([]byte(key), []byte(v.bytes), v.revision, 0)
			if err != nil {
				t.Fatal(err)
			}
			to := Target(rnd.IntN(3))
			if err := s.Publish(d, to); err != nil {
				t.Fatal(err)
			}
			if to != ServingOnly {
				replica[key] = v
			}
			if to != ReplicaOnly {
				serving[key] = v
			}
		case op < 9:
			if o, ok := s.Find([]byte(key)); ok {
				from := Target(rnd.IntN(3))
				s.Remove(o, from)
				if from != ServingOnly {
					delete(replica, key)
				}
				if from != ReplicaOnly {
					delete(serving, key)
				}
			}
		default:
			if o, ok := s.Find([]byte(key)); ok {
				s.Settle(o)
				delete(serving, key)
				if v, ok := replica[key]; ok {
					serving[key] = v
				}
			}
		}
		if step%64 == 0 {
			s.Compact()
		}
	}
	live := map[string]bool{}
	for k := range replica {
		live[k] = true
	}
	for k := range serving {
		live[k] = true
	}
	if s.Count() != len(live) {
		t.Errorf("%d keys, want %d", s.Count(), len(live))
	}
	seen := 0
	for bucket := range 1 << 16 {
		for _, o := range s.AppendBucket(nil, uint16(bucket)) {
			seen++
			check := func(what string, r Record, ok bool, model map[string]version) {
				a, _ := s.any(o)
				key := string(a.Key)
				want, wantOK := model[key]
				if ok != wantOK || ok && (string(r.Bytes) != want.bytes || r.Revision != want.revision || string(r.Key) != key) {
					t.Errorf("%s of %s: %d bytes of revision %d (%v), want %d of %d (%v)", what, key, len(r.Bytes), r.Revision, ok, len(want.bytes), want.revision, wantOK)
				}
			}
			r, ok := s.Replica(o)
			check("replica", r, ok, replica)
			r, ok = s.Serving(o)
			check("serving", r, ok, serving)
		}
	}
	if seen != len(live) {
		t.Errorf("the buckets hold %d keys, want %d", seen, len(live))
	}
	s.Compact()
	for i := range s.shards {
		if sh := &s.shards[i]; sh.total > minChunk && sh.live*4 < sh.total*3 {
			t.Errorf("shard %d: %d of %d bytes live after Compact", i, sh.live, sh.total)
		}
	}
}

// Readers see whole records while the writer replaces and compacts them: the bytes always agree with the
// revision, and a key that exists throughout is always found.
func TestReadersDuringChurn(t *testing.T) {
	s := New()
	key := func(i int) []byte { return fmt.Appendf(nil, "k%d", i) }
	body := func(rev uint64) []byte { return bytes.Repeat([]byte{byte(rev)}, 40+int(rev%100)) }
	const n = 300
	write := func(i int, rev uint64) {
		d, err := s.Write(key(i), body(rev), rev, 0)
		if err == nil {
			err = s.Publish(d, Both)
		}
		if err != nil {
			t.Error(err)
		}
	}
	for i := range n {
		write(i, 1)
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	for g := range 2 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(g), 1))
			for !stop.Load() {
				i := rnd.IntN(n)
				o, ok := s.FindServing(key(i))
				if !ok {
					t.Errorf("key %d is missing", i)
					return
				}
				r, ok := s.Serving(o)
				if !ok || !bytes.Equal(r.Bytes, body(r.Revision)) || !bytes.Equal(r.Key, key(i)) {
					t.Errorf("key %d: torn record of revision %d", i, r.Revision)
					return
				}
				r.Release()
			}
		})
	}
	rnd := rand.New(rand.NewPCG(9, 9))
	for rev := range uint64(20000) {
		write(rnd.IntN(n), rev+2)
		extra := fmt.Appendf(nil, "x%d", rnd.IntN(2000)) // come and go, so that tables grow and fill with tombstones
		if o, ok := s.Find(extra); ok {
			s.Remove(o, Both)
		} else if d, err := s.Write(extra, body(rev), rev, 0); err == nil {
			_ = s.Publish(d, Both)
		}
		if rev%50 == 0 {
			s.Compact()
		}
	}
	stop.Store(true)
	wg.Wait()
}

func TestRecordTooBig(t *testing.T) {
	if _, err := New().Write([]byte("k"), make([]byte, maxChunk), 1, 0); err == nil {
		t.Error("a record larger than a chunk was taken")
	}
}
