package usercache

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/bits"
)

// The digest tree lets two copies of a dataset find out where they differ by exchanging a few hashes
// instead of the data. Both sides of proto/sync use this code. FORMAT.md has the definition in words and
// test vectors.
//
// The sums find accidents: lost, changed, duplicated or misplaced records. They prove nothing against
// someone who chooses record bytes to make two different sets add up to the same sum. Authenticity is the
// business of the TLS connection a record came over.

const (
	// Buckets is the number of leaves' buckets in a tree. A record's bucket is the first two bytes of the
	// SHA-256 of its key.
	Buckets = 1 << 16

	// Nodes is the number of inner nodes; node n covers the buckets n*256 to n*256+255.
	Nodes = 256

	// BucketsPerNode is the number of buckets below one inner node.
	BucketsPerNode = Buckets / Nodes

	// StorePrefix is the number of bytes of SHA-256(key) in front of the key in a store key.
	StorePrefix = 8
)

// Each kind of hash input begins with its own byte, so that no leaf can pass for a node.
const (
	tagLeaf = 0x01
	tagNode = 0x02
	tagRoot = 0x03
)

// A Hash is a SHA-256 of the tree: an inner node or the root.
type Hash [sha256.Size]byte

// String returns the hash in hexadecimal.
func (h Hash) String() string { return fmt.Sprintf("%x", h[:]) }

// A Leaf is the digest of one record: the first 16 bytes of
// SHA-256(0x01 || be32 len(key) || key || be64 revision || bytes).
type Leaf [16]byte

// LeafOf returns the digest of one record.
func LeafOf(key []byte, revision uint64, bytes []byte) Leaf {
	// One contiguous buffer is several times faster than a streaming hash for inputs of this size, and
	// stays on the stack for the usual record.
	var stack [512]byte
	buf := append(stack[:0], tagLeaf)
	buf = binary.BigEndian.AppendUint32(buf, uint32(len(key)))
	buf = append(buf, key...)
	buf = binary.BigEndian.AppendUint64(buf, revision)
	buf = append(buf, bytes...)
	sum := sha256.Sum256(buf)
	return Leaf(sum[:16])
}

// BucketOf returns the bucket of a key.
func BucketOf(key []byte) uint16 {
	sum := sha256.Sum256(key)
	return binary.BigEndian.Uint16(sum[:])
}

// AppendStoreKey appends the key under which a store keeps a record: the first 8 bytes of SHA-256(key),
// then the key. In this order a bucket is one contiguous range, and a transfer bucket by bucket is a
// sequential append.
func AppendStoreKey(dst, key []byte) []byte {
	sum := sha256.Sum256(key)
	dst = append(dst, sum[:StorePrefix]...)
	return append(dst, key...)
}

// KeyOfStoreKey returns the record key inside a store key, and whether the store key is well formed,
// hash prefix included. The result shares memory with storeKey.
func KeyOfStoreKey(storeKey []byte) (key []byte, ok bool) {
	if len(storeKey) <= StorePrefix {
		return nil, false
	}
	key = storeKey[StorePrefix:]
	sum := sha256.Sum256(key)
	return key, string(sum[:StorePrefix]) == string(storeKey[:StorePrefix])
}

// A BucketSum is the digest of one bucket: how many records it holds, and the sum of their leaves as
// big-endian integers modulo 2^128. It does not depend on order. The zero value is the empty bucket. It is
// a value; Add and Remove return the successor.
type BucketSum struct {
	Count  uint64
	Hi, Lo uint64 // the sum: Hi*2^64 + Lo
}

// bucketSumLen is the length of a BucketSum in a hash or on disk: be64 count, then the sum in 16 bytes.
const bucketSumLen = 24

// Add returns the sum with one record more.
func (b BucketSum) Add(l Leaf) BucketSum {
	var carry uint64
	b.Lo, carry = bits.Add64(b.Lo, binary.BigEndian.Uint64(l[8:]), 0)
	b.Hi, _ = bits.Add64(b.Hi, binary.BigEndian.Uint64(l[:8]), carry)
	b.Count++
	return b
}

// Remove returns the sum with one record less.
func (b BucketSum) Remove(l Leaf) BucketSum {
	var borrow uint64
	b.Lo, borrow = bits.Sub64(b.Lo, binary.BigEndian.Uint64(l[8:]), 0)
	b.Hi, _ = bits.Sub64(b.Hi, binary.BigEndian.Uint64(l[:8]), borrow)
	b.Count--
	return b
}

// AppendTo appends the 24 bytes of the sum as hashes, disks and wires have it: be64 count, then the
// 128-bit sum, big-endian.
func (b BucketSum) AppendTo(dst []byte) []byte {
	dst = binary.BigEndian.AppendUint64(dst, b.Count)
	dst = binary.BigEndian.AppendUint64(dst, b.Hi)
	return binary.BigEndian.AppendUint64(dst, b.Lo)
}

// ParseBucketSum is the inverse of AppendTo.
func ParseBucketSum(b []byte) (BucketSum, error) {
	if len(b) != bucketSumLen {
		return BucketSum{}, fmt.Errorf("a bucket digest has %d bytes, not %d", bucketSumLen, len(b))
	}
	return BucketSum{
		Count: binary.BigEndian.Uint64(b),
		Hi:    binary.BigEndian.Uint64(b[8:]),
		Lo:    binary.BigEndian.Uint64(b[16:]),
	}, nil
}

// NodeHash returns the digest of an inner node from its 256 buckets, in order:
// SHA-256(0x02 || bucket 0 || … || bucket 255), 24 bytes a bucket.
func NodeHash(buckets *[BucketsPerNode]BucketSum) Hash {
	buf := make([]byte, 0, 1+BucketsPerNode*bucketSumLen) // does not escape: on the stack
	buf = append(buf, tagNode)
	for i := range buckets {
		buf = buckets[i].AppendTo(buf)
	}
	return sha256.Sum256(buf)
}

// RootHash returns the root from the 256 inner nodes, in order: SHA-256(0x03 || node 0 || … || node 255).
func RootHash(nodes *[Nodes]Hash) Hash {
	buf := make([]byte, 0, 1+Nodes*sha256.Size)
	buf = append(buf, tagRoot)
	for i := range nodes {
		buf = append(buf, nodes[i][:]...)
	}
	return sha256.Sum256(buf)
}

// A Tree is the digest tree of one set of records. It is not safe for concurrent use. It takes up to 1.6 MB.
//
// Hashes are computed when asked for: a change marks its node, and Root hashes the marked nodes and the
// root once, however many changes there were.
type Tree struct {
	buckets [Nodes]*[BucketsPerNode]BucketSum // nil: all are empty, as in most nodes of most datasets
	nodes   [Nodes]Hash
	root    Hash
	dirty   [Nodes]bool // nodes[i] is out of date
	stale   bool        // some node is dirty, or root is out of date
	records uint64
}

var emptyNode [BucketsPerNode]BucketSum

// NewTree returns the tree of the empty set.
func NewTree() *Tree {
	t := new(Tree)
	empty := NodeHash(&emptyNode)
	for i := range t.nodes {
		t.nodes[i] = empty
	}
	t.root = RootHash(&t.nodes)
	return t
}

// Add enters one record into a bucket.
func (t *Tree) Add(bucket uint16, l Leaf) { t.Set(bucket, t.Bucket(bucket).Add(l)) }

// Remove takes one record out of a bucket. The record must have been added.
func (t *Tree) Remove(bucket uint16, l Leaf) { t.Set(bucket, t.Bucket(bucket).Remove(l)) }

// Set replaces the digest of a bucket, as when a stored tree is loaded.
func (t *Tree) Set(bucket uint16, b BucketSum) {
	n := bucket >> 8
	if t.buckets[n] == nil {
		t.buckets[n] = new([BucketsPerNode]BucketSum)
	}
	at := &t.buckets[n][bucket&0xff]
	t.records += b.Count - at.Count
	*at = b
	t.dirty[n], t.stale = true, true
}

// Bucket returns the digest of one bucket.
func (t *Tree) Bucket(bucket uint16) BucketSum { return t.node(uint8(bucket >> 8))[bucket&0xff] }

func (t *Tree) node(n uint8) *[BucketsPerNode]BucketSum {
	if b := t.buckets[n]; b != nil {
		return b
	}
	return &emptyNode
}

// Records returns how many records the tree covers.
func (t *Tree) Records() uint64 { return t.records }

// Root returns the root of the tree.
func (t *Tree) Root() Hash {
	t.rehash()
	return t.root
}

// NodeHashes returns the digests of the 256 inner nodes: level 1 of Digests.
func (t *Tree) NodeHashes() [Nodes]Hash {
	t.rehash()
	return t.nodes
}

// NodeBuckets returns the digests of the 256 buckets of one inner node: level 2 of Digests.
func (t *Tree) NodeBuckets(node uint8) [BucketsPerNode]BucketSum { return *t.node(node) }

// DiffNodes returns the inner nodes whose hashes differ from other, in order.
func (t *Tree) DiffNodes(other *[Nodes]Hash) []uint8 {
	t.rehash()
	var diff []uint8
	for i := range t.nodes {
		if t.nodes[i] != other[i] {
			diff = append(diff, uint8(i))
		}
	}
	return diff
}

// DiffBuckets returns the buckets below one inner node whose digests differ from other, in order.
func (t *Tree) DiffBuckets(node uint8, other *[BucketsPerNode]BucketSum) []uint16 {
	var diff []uint16
	ours := t.node(node)
	for i := range other {
		if ours[i] != other[i] {
			diff = append(diff, uint16(node)<<8|uint16(i))
		}
	}
	return diff
}

// Clone returns a copy, for those who compare at leisure while the original moves on.
func (t *Tree) Clone() *Tree {
	t.rehash()
	c := *t
	for i, b := range t.buckets {
		if b != nil {
			own := *b
			c.buckets[i] = &own
		}
	}
	return &c
}

func (t *Tree) rehash() {
	if !t.stale {
		return
	}
	for i := range t.dirty {
		if t.dirty[i] {
			t.nodes[i] = NodeHash(t.node(uint8(i)))
			t.dirty[i] = false
		}
	}
	t.root = RootHash(&t.nodes)
	t.stale = false
}
