package usercache

import (
	"bytes"
	"encoding/hex"
	"math/rand/v2"
	"strconv"
	"testing"
)

// The vectors of FORMAT.md. They were computed with an independent implementation (Python's hashlib and
// integers), so a change here is a change of the protocol.
func TestDigestVectors(t *testing.T) {
	t.Run("store key and bucket", func(t *testing.T) {
		for _, c := range []struct {
			key, storeKey string
			bucket        uint16
		}{
			{"alice", "2bd806c97f0e00af616c696365", 0x2bd8},
			{"bob", "81b637d8fcd2c6da626f62", 0x81b6},
			{"user-000000042", "feaeb2e42f0ce659757365722d303030303030303432", 0xfeae},
		} {
			sk := AppendStoreKey(nil, []byte(c.key))
			if got := hex.EncodeToString(sk); got != c.storeKey {
				t.Errorf("store key of %q = %s, want %s", c.key, got, c.storeKey)
			}
			if got := BucketOf([]byte(c.key)); got != c.bucket {
				t.Errorf("bucket of %q = %#x, want %#x", c.key, got, c.bucket)
			}
			if key, ok := KeyOfStoreKey(sk); !ok || string(key) != c.key {
				t.Errorf("KeyOfStoreKey(%x) = %q, %v", sk, key, ok)
			}
			sk[0]++
			if _, ok := KeyOfStoreKey(sk); ok {
				t.Errorf("a store key with a wrong prefix passed: %x", sk)
			}
		}
		if _, ok := KeyOfStoreKey(make([]byte, 8)); ok {
			t.Error("a store key without a key passed")
		}
	})
	t.Run("leaf", func(t *testing.T) {
		for _, c := range []struct {
			key      string
			revision uint64
			bytes    []byte
			leaf     string
		}{
			{"alice", 1, nil, "4f9a7746997d459a5bc74c5be25028af"},
			{"alice", 7, []byte{0x0a, 0x01, 0x02}, "d57102fb592721ea87e04faec3157a16"},
			{"bob", 1<<64 - 1, bytes.Repeat([]byte{0xab}, 1000), "a3f7e536fd262f8ac6aefbba918f931f"},
		} {
			l := LeafOf([]byte(c.key), c.revision, c.bytes)
			if got := hex.EncodeToString(l[:]); got != c.leaf {
				t.Errorf("leaf of %q at %d = %s, want %s", c.key, c.revision, got, c.leaf)
			}
		}
	})
	t.Run("tree", func(t *testing.T) {
		tr := NewTree()
		check := func(what, want string) {
			t.Helper()
			if got := tr.Root().String(); got != want {
				t.Errorf("root %s = %s, want %s", what, got, want)
			}
		}
		check("of the empty set", "b84398c26ac46e29bdf64366bc1ff1f7710557137a29b031724b3036810b5ffd")
		add := func(key string, rev uint64, b []byte) {
			tr.Add(BucketOf([]byte(key)), LeafOf([]byte(key), rev, b))
		}
		add("alice", 7, []byte{0x0a, 0x01, 0x02})
		check("of alice", "fbe70d9fc80c4ff7faacadb5d7ffd37f5d4db548361901027a87f73367271101")
		add("bob", 1<<64-1, bytes.Repeat([]byte{0xab}, 1000))
		check("of alice and bob", "b909a3bdfd4266a580ecee05e7cbaf07077925256aea028f954b2212cad71e31")
		nodes := tr.NodeHashes()
		if got, want := nodes[0x2b].String(), "1bb3239dc9a3a369345e1c34e49dc5fde459133b5fbf808da8092ef596c2e880"; got != want {
			t.Errorf("node 0x2b = %s, want %s", got, want)
		}
		if got, want := nodes[0].String(), "33f1bd3b60d0e75eb989b72140aabdc8f274c34fa51aa1b3422bd0c84b74b3ae"; got != want {
			t.Errorf("empty node = %s, want %s", got, want)
		}
	})
}

// A tree must not depend on the order or history of changes, only on the set.
func TestTreeIsAFunctionOfTheSet(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	type rec struct {
		key []byte
		l   Leaf
	}
	var recs []rec
	for i := range 2000 {
		key := []byte("u" + strconv.Itoa(i))
		recs = append(recs, rec{key, LeafOf(key, uint64(i), key)})
	}
	want := NewTree()
	for _, r := range recs[:1000] {
		want.Add(BucketOf(r.key), r.l)
	}

	got := NewTree()
	for _, i := range rnd.Perm(len(recs)) {
		got.Add(BucketOf(recs[i].key), recs[i].l)
		if i%97 == 0 {
			got.Root() // intermediate roots leave no trace
		}
	}
	if got.Root() == want.Root() {
		t.Fatal("twice the records, the same root")
	}
	if n := got.DiffNodes(&want.nodes); len(n) == 0 {
		t.Fatal("DiffNodes found nothing between different trees")
	}
	for _, i := range rnd.Perm(1000) {
		r := recs[1000+i]
		got.Remove(BucketOf(r.key), r.l)
	}
	if got.Root() != want.Root() || got.Records() != 1000 {
		t.Fatalf("root %v with %d records, want %v with 1000", got.Root(), got.Records(), want.Root())
	}

	// One changed record is found as one bucket of one node.
	r := recs[5]
	bucket := BucketOf(r.key)
	got.Remove(bucket, r.l)
	got.Add(bucket, LeafOf(r.key, 5000, r.key))
	nodes := want.NodeHashes()
	n := got.DiffNodes(&nodes)
	if len(n) != 1 || n[0] != uint8(bucket>>8) {
		t.Fatalf("DiffNodes = %v, want [%d]", n, bucket>>8)
	}
	b := want.NodeBuckets(n[0])
	if d := got.DiffBuckets(n[0], &b); len(d) != 1 || d[0] != bucket {
		t.Fatalf("DiffBuckets = %v, want [%d]", d, bucket)
	}
}

func TestBucketSumBytes(t *testing.T) {
	b := BucketSum{Count: 3, Hi: 1 << 63, Lo: 9}
	got, err := ParseBucketSum(b.AppendTo(nil))
	if err != nil || got != b {
		t.Errorf("ParseBucketSum(AppendTo) = %v, %v; want %v", got, err, b)
	}
	if _, err := ParseBucketSum(make([]byte, 23)); err == nil {
		t.Error("23 bytes passed for a bucket digest")
	}
	all := Leaf(bytes.Repeat([]byte{0xff}, 16))
	if got := (BucketSum{}).Add(all).Add(all).Remove(all).Remove(all); got != (BucketSum{}) {
		t.Errorf("sum after overflow and back = %v", got)
	}
}

// A clone and its original go their own ways, in nodes that had buckets when it was made and in those that had none.
func TestCloneOfATreeStandsAlone(t *testing.T) {
	leaf := Leaf{15: 7}
	tree := NewTree()
	tree.Add(0x0102, leaf)
	clone := tree.Clone()
	before := clone.Root()
	tree.Add(0x0102, leaf)
	tree.Add(0x0900, leaf)
	if clone.Root() != before || clone.Records() != 1 || clone.Bucket(0x0102).Count != 1 || clone.Bucket(0x0900) != (BucketSum{}) {
		t.Error("a change of the original shows in the clone")
	}
	clone.Remove(0x0102, leaf)
	if clone.Root() != NewTree().Root() {
		t.Error("an emptied tree has another root than an empty one")
	}
	if b := tree.Bucket(0x0102); b.Count != 2 {
		t.Errorf("a change of the clone shows in the original: %+v", b)
	}
	if b := NewTree().Bucket(0x0102); b != (BucketSum{}) {
		t.Errorf("an empty tree has a record: %+v", b)
	}
}
