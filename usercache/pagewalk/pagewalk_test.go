package pagewalk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"
)

// build returns a small file with everything in it: several levels of branches, an inline bucket, a value
// with overflow, a freelist with entries.
func build(t testing.TB) (file []byte, entries map[string]string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "x.db")
	db, err := bolt.Open(path, 0o600, &bolt.Options{PageSize: 1024, NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	entries = map[string]string{}
	put := func(b *bolt.Bucket, name, k, v string) {
		entries[name+" "+k] = v
		if err := b.Put([]byte(k), []byte(v)); err != nil {
			t.Fatal(err)
		}
	}
	update := func(f func(tx *bolt.Tx)) {
		if err := db.Update(func(tx *bolt.Tx) error { f(tx); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	update(func(tx *bolt.Tx) {
		for _, name := range []string{"big", "empty", "inline"} {
			if _, err := tx.CreateBucket([]byte(name)); err != nil {
				t.Fatal(err)
			}
		}
		put(tx.Bucket([]byte("inline")), "inline", "k", "v")
		put(tx.Bucket([]byte("inline")), "inline", "none", "")
	})
	for round := range 3 {
		update(func(tx *bolt.Tx) {
			for i := range 400 {
				put(tx.Bucket([]byte("big")), "big", fmt.Sprintf("key-%04d", i), fmt.Sprintf("value %d of round %d", i, round))
			}
			put(tx.Bucket([]byte("big")), "big", "long", string(bytes.Repeat([]byte{byte(round)}, 5000)))
		})
	}
	update(func(tx *bolt.Tx) {
		for i := range 50 {
			k := fmt.Sprintf("key-%04d", i*3)
			delete(entries, "big "+k)
			if err := tx.Bucket([]byte("big")).Delete([]byte(k)); err != nil {
				t.Fatal(err)
			}
		}
	})
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b, entries
}

func walk(file []byte) (*Report, map[string]string, error) {
	got := map[string]string{}
	r, err := Walk(bytes.NewReader(file), int64(len(file)), func(bucket string, k, v []byte) error {
		got[bucket+" "+string(k)] = string(v)
		return nil
	})
	return r, got, err
}

func TestWholeFile(t *testing.T) {
	file, want := build(t)
	r, got, err := walk(file)
	if err != nil || !r.Whole() {
		t.Fatalf("a whole file: %v, %v", err, r.Faults)
	}
	if len(got) != len(want) || r.Entries != uint64(len(want)) {
		t.Errorf("%d entries, want %d", len(got), len(want))
	}
	for k, v := range want {
		if got[k] != v {
			t.Errorf("%s = %.40q, want %.40q", k, got[k], v)
		}
	}
	stop := errors.New("stop")
	if _, err := Walk(bytes.NewReader(file), int64(len(file)), func(string, []byte, []byte) error { return stop }); err != stop {
		t.Errorf("the error of yield came back as %v", err)
	}
}

// A torn write of one meta page is what the other is for.
func TestOneMetaSuffices(t *testing.T) {
	file, want := build(t)
	older, _, _ := walk(file)
	for page := range 2 {
		torn := bytes.Clone(file)
		clear(torn[page*1024 : page*1024+512])
		r, got, err := walk(torn)
		if err != nil {
			t.Errorf("without meta %d: %v", page, err)
			continue
		}
		if r.TxID == older.TxID && (!r.Whole() || len(got) != len(want)) {
			t.Errorf("without meta %d, the older: %v, %d entries", page, r.Faults, len(got))
		}
	}
	both := bytes.Clone(file)
	clear(both[:2048])
	if _, _, err := walk(both); !errors.Is(err, ErrNotBolt) {
		t.Errorf("without both metas: %v", err)
	}
	if _, _, err := walk([]byte("just a text file\n")); !errors.Is(err, ErrNotBolt) {
		t.Errorf("a text: %v", err)
	}
	if _, _, err := walk(nil); !errors.Is(err, ErrNotBolt) {
		t.Errorf("an empty file: %v", err)
	}
}

// What the file is if it has no meta page is told.
func TestWhatIsWrongWithMetas(t *testing.T) {
	file, _ := build(t)
	for _, c := range []struct {
		at   int // of a byte, in both metas
		want error
	}{{16, ErrNotBolt}, {20, ErrVersion}, {40, ErrMetas}} {
		b := bytes.Clone(file)
		b[c.at]++
		b[1024+c.at]++
		if _, _, err := walk(b); err != c.want || !errors.Is(err, ErrNotBolt) {
			t.Errorf("byte %d: %v, want %v", c.at, err, c.want)
		}
	}
}

// A bucket that stands in an inline bucket is refused wherever it points to.
func TestBucketInInlineBucket(t *testing.T) {
	le := binary.LittleEndian
	for _, root := range []uint64{0, 2, 1 << 60} {
		b := make([]byte, pageHeader+leafElement, 128)
		le.PutUint16(b[8:], flagLeaf)
		le.PutUint16(b[10:], 1)
		le.PutUint32(b[pageHeader:], bucketLeaf)
		le.PutUint32(b[pageHeader+4:], leafElement)
		le.PutUint32(b[pageHeader+8:], 1)
		le.PutUint32(b[pageHeader+12:], bucketHeader+pageHeader)
		value := make([]byte, bucketHeader+pageHeader)
		le.PutUint64(value, root)
		le.PutUint16(value[bucketHeader+8:], flagLeaf)
		b = append(append(b, 'k'), value...)
		w := &walker{pageSize: 1024, report: new(Report)}
		if err := w.leaf("inline", 7, b, nil, nil, 0, 0); err != nil || len(w.report.Faults) != 1 || !strings.Contains(w.report.Faults[0].What, "inline") {
			t.Errorf("root %d: %v, %v", root, err, w.report.Faults)
		}
	}
}

// Structural damage anywhere is found: every truncation, and every change of a page's header or of a
// pointer.
func TestDamageIsFound(t *testing.T) {
	file, _ := build(t)
	whole, all, _ := walk(file)
	for n := 2048; n < int(whole.Pages)*1024; n += 1024 {
		r, got, err := walk(file[:n])
		if err == nil && r.Whole() {
			t.Errorf("cut to %d bytes, it passes as whole", n)
		}
		if len(got) > len(all) {
			t.Errorf("cut to %d bytes, it has more entries than before", n)
		}
	}
	used := whole.Pages
	for p := uint64(2); p < used; p++ {
		zeroed := bytes.Clone(file)
		clear(zeroed[p*1024 : (p+1)*1024])
		r, _, err := walk(zeroed)
		// A free page may hold anything, and pages that only continue another hold values.
		if err != nil {
			t.Errorf("page %d zeroed: %v", p, err)
		}
		if r.Whole() && bytes.Contains(file[p*1024:(p+1)*1024], []byte("round 2")) && file[p*1024+8] == flagLeaf && inUse(file, p) {
			t.Errorf("page %d zeroed passes as whole", p)
		}
	}
}

// inUse reports whether a walk reaches a page.
func inUse(file []byte, page uint64) bool {
	b := bytes.Clone(file)
	b[page*1024+8] = 0x40
	r, _, _ := walk(b)
	return !r.Whole()
}

// Whatever the bytes, the walk ends, stays within bounds, and yields no more than the file is long.
func TestRandomDamage(t *testing.T) {
	file, _ := build(t)
	rnd := rand.New(rand.NewPCG(7, 8))
	for range 300 {
		b := bytes.Clone(file)
		for range 1 + rnd.IntN(4) {
			at := rnd.IntN(len(b))
			if rnd.IntN(2) == 0 { // headers and elements are at the start of pages
				at = at/1024*1024 + rnd.IntN(96)
			}
			b[at] ^= 1 << rnd.IntN(8)
		}
		check(t, b)
	}
}

func check(t *testing.T, file []byte) {
	total := 0
	_, err := Walk(bytes.NewReader(file), int64(len(file)), func(_ string, k, v []byte) error {
		total += len(k) + len(v)
		return nil
	})
	_ = err // an error is as good an answer as a report
	if limit := maxNesting * len(file); total > limit {
		t.Errorf("a file of %d bytes yields %d", len(file), total)
	}
}

func FuzzWalk(f *testing.F) {
	file, _ := build(f)
	f.Add(file, uint32(0), uint32(0), byte(0))
	f.Add(file[:4096], uint32(2048), uint32(1030), byte(1))
	f.Fuzz(func(t *testing.T, file []byte, a, b uint32, x byte) {
		file = bytes.Clone(file)
		if len(file) > 0 {
			file[int(a)%len(file)] ^= x
			file[int(b)%len(file)] += x
		}
		check(t, file)
	})
}
