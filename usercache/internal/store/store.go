// Package store keeps the records of one dataset in memory, outside the Go heap.
//
// A record is known by an ordinal, a small number it keeps while its key exists. Readers go from an ordinal
// to the record, writers from a key. For each ordinal there are two versions, nearly always the same one:
// the replica, byte for byte what the service sent, and the serving version, which readers see.
//
// One goroutine writes at a time; any number read, without locks. A record's bytes are written once and
// never changed; replacing a record is one atomic store of its new place. Records lie in chunks; when less
// than three quarters of a shard is live, its records are copied to new chunks and the old ones left to
// their last readers.
//
// There are 256 shards, by the first byte of SHA-256(key); a shard is a node of the digest tree.
package store

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"

	"github.com/sluice-dns/sluice/usercache/internal/offheap"
)

// Shards is the number of shards.
const Shards = 256

const (
	minChunk = 4 << 10
	maxChunk = 1 << 20

	// A place is the position of a record: 14 bits of chunk, 18 bits of offset in units of 4 bytes. Zero is
	// no place: offsets begin at 4.
	placeUnit   = 4
	chunkShift  = 18
	offsetMask  = 1<<chunkShift - 1
	maxChunks   = 1 << (32 - chunkShift)
	headerLen   = 12
	firstOffset = placeUnit

	// A header is 1 bit of flags, 11 bits of the key's length and 20 of the bytes', then the revision.
	keyBits    = 11
	lengthBits = 20

	// MaxKey and MaxBytes bound a record, so that its lengths fit a header and the whole a chunk.
	MaxKey   = 1<<keyBits - 1
	MaxBytes = maxChunk - firstOffset - headerLen - MaxKey - placeUnit
)

// ErrFull says that a shard can hold no more records or bytes.
var ErrFull = errors.New("a shard of the user data is full")

// A Record is one version of a record. Its slices are outside the Go heap and valid until the last call of
// Release on any copy of it.
type Record struct {
	Key      []byte
	Bytes    []byte
	Revision uint64
	// Flags belong to the owner of the store. Only the lowest bit is kept.
	Flags uint8
	// Stamp names this version of the record: the ordinal has the same stamp as long as it has the same
	// serving version, and never the same one again. (It does change when a shard is compacted.)
	Stamp uint64

	block *offheap.Block
}

// Release ends the use of the record's slices. It must be called after the last use of them, or the
// garbage collector may unmap them earlier.
func (r *Record) Release() { runtime.KeepAlive(r.block) }

// Size returns the length of key and bytes.
func (r *Record) Size() int { return len(r.Key) + len(r.Bytes) }

// A Store is the records of a dataset.
type Store struct {
	shards [Shards]shard
	count  int // keys, of either version; the writer's
}

type shard struct {
	view atomic.Pointer[view]
	keys Table

	// Owned by the writer.
	free     []uint32          // ordinals to give again
	next     uint32            // ordinals given so far
	diverged map[uint32]uint32 // place of the replica where it is not the serving version; 0 = no replica
	tail     int               // where the last chunk goes on
	live     int               // bytes of records that are current
	total    int               // bytes of records in all chunks
}

// A view is what readers need of a shard. Its chunks are final except that more may follow in the next view;
// places is shared by successive views until a compaction, after which it never changes again. So a place
// read through a view always fits the chunks of that view or of one that follows at once.
type view struct {
	places *offheap.Block
	chunks []*offheap.Block
	epoch  uint32 // compactions so far; a place means the same throughout an epoch
}

// New returns an empty store.
func New() *Store { return new(Store) }

// Hash returns what Store needs to know of a key: its shard and its tag there. The bucket of the digest tree
// is the shard and the top 8 bits of the tag.
func Hash(key []byte) (shard uint8, tag uint32) {
	sum := sha256.Sum256(key)
	return sum[0], binary.BigEndian.Uint32(sum[1:])
}

// Serving returns the serving version of an ordinal. Any goroutine may call it, with any ordinal.
func (s *Store) Serving(ordinal uint32) (Record, bool) {
	sh := &s.shards[ordinal>>24]
	local := ordinal & 0xffffff
	for {
		v := sh.view.Load()
		if v == nil {
			return Record{}, false
		}
		words := v.places.Words32()
		if int(local) >= len(words) {
			return Record{}, false
		}
		place := atomic.LoadUint32(&words[local])
		if place == 0 {
			runtime.KeepAlive(v)
			return Record{}, false
		}
		if r, ok := v.at(place); ok {
			return r, true
		}
		// The writer has begun a chunk since; the next view has it.
	}
}

// Stamp returns the stamp of the ordinal's serving version; zero if there is none.
func (s *Store) Stamp(ordinal uint32) uint64 {
	v := s.shards[ordinal>>24].view.Load()
	if v == nil {
		return 0
	}
	place := uint32(0)
	if words, local := v.places.Words32(), ordinal&0xffffff; int(local) < len(words) {
		place = atomic.LoadUint32(&words[local])
	}
	runtime.KeepAlive(v)
	return v.stamp(place)
}

func (v *view) stamp(place uint32) uint64 {
	if place == 0 {
		return 0
	}
	return uint64(v.epoch)<<32 | uint64(place)
}

func (v *view) at(place uint32) (Record, bool) {
	c := int(place >> chunkShift)
	if c >= len(v.chunks) {
		return Record{}, false
	}
	block := v.chunks[c]
	b := block.Bytes()[int(place&offsetMask)*placeUnit:]
	head := binary.LittleEndian.Uint32(b)
	keyLen, n := int(head>>lengthBits&(1<<keyBits-1)), int(head&(1<<lengthBits-1))
	body := b[headerLen:]
	r := Record{
		Key:      body[:keyLen:keyLen],
		Bytes:    body[keyLen : keyLen+n : keyLen+n],
		Revision: binary.LittleEndian.Uint64(b[4:]),
		Flags:    uint8(head >> (lengthBits + keyBits)),
		Stamp:    v.stamp(place),
		block:    block,
	}
	return r, true
}

// The functions below are the writer's.

// Count returns the number of keys known, with a replica or only a serving version.
func (s *Store) Count() int { return s.count }

// Find returns the ordinal of a key.
func (s *Store) Find(key []byte) (ordinal uint32, ok bool) {
	n, tag := Hash(key)
	return s.FindAt(n, tag, key)
}

// FindAt is Find for a key whose shard and tag are known.
func (s *Store) FindAt(n uint8, tag uint32, key []byte) (uint32, bool) {
	sh := &s.shards[n]
	for f := sh.keys.Find(tag); ; {
		local, ok := f.Next()
		if !ok {
			return 0, false
		}
		ordinal := uint32(n)<<24 | local
		r, ok := s.any(ordinal)
		if ok && string(r.Key) == string(key) {
			r.Release()
			return ordinal, true
		}
		r.Release()
	}
}

// any returns some version of an ordinal, for the sake of its key.
func (s *Store) any(ordinal uint32) (Record, bool) {
	if r, ok := s.Serving(ordinal); ok {
		return r, true
	}
	return s.Replica(ordinal)
}

// FindServing returns the ordinal of a key that has a serving version. Any goroutine may call it.
func (s *Store) FindServing(key []byte) (ordinal uint32, ok bool) {
	n, tag := Hash(key)
	for f := s.shards[n].keys.Find(tag); ; {
		local, ok := f.Next()
		if !ok {
			return 0, false
		}
		ordinal := uint32(n)<<24 | local
		r, ok := s.Serving(ordinal)
		same := ok && string(r.Key) == string(key)
		r.Release()
		if same {
			return ordinal, true
		}
	}
}

// Replica returns the replica's version of an ordinal.
func (s *Store) Replica(ordinal uint32) (Record, bool) {
	sh := &s.shards[ordinal>>24]
	if place, ok := sh.diverged[ordinal&0xffffff]; ok {
		if place == 0 {
			return Record{}, false
		}
		return sh.view.Load().at(place)
	}
	return s.Serving(ordinal)
}

// Diverged reports whether the ordinal's serving version is not its replica.
func (s *Store) Diverged(ordinal uint32) bool {
	_, ok := s.shards[ordinal>>24].diverged[ordinal&0xffffff]
	return ok
}

// AppendBucket appends the ordinals of all keys in a bucket of the digest tree.
func (s *Store) AppendBucket(dst []uint32, bucket uint16) []uint32 {
	n := uint32(bucket >> 8)
	lo := uint32(bucket&0xff) << 24
	from := len(dst)
	dst = s.shards[n].keys.AppendRange(dst, lo, lo|0xffffff)
	for i := from; i < len(dst); i++ {
		dst[i] |= n << 24
	}
	return dst
}

// A Draft is a version written to a chunk but not yet visible.
type Draft struct {
	Record  Record
	Ordinal uint32
	// New: the key had no ordinal before. It has one now; Publish or Discard must follow.
	New bool

	place uint32
	tag   uint32
}

// Insert is Write for a key that is known to be new, and of which shard and tag are known.
func (s *Store) Insert(n uint8, tag uint32, key, bytes []byte, revision uint64, flags uint8) (Draft, error) {
	sh := &s.shards[n]
	place, err := sh.write(key, bytes, revision, flags)
	if err != nil {
		return Draft{}, err
	}
	local, err := sh.take()
	if err != nil {
		return Draft{}, err
	}
	r, _ := sh.view.Load().at(place)
	return Draft{Record: r, Ordinal: uint32(n)<<24 | local, New: true, place: place, tag: tag}, nil
}

// Write copies a version into the store. The ordinal is given to a new key at once, and found by Find only
// after Publish.
func (s *Store) Write(key, bytes []byte, revision uint64, flags uint8) (Draft, error) {
	n, tag := Hash(key)
	return s.WriteAt(n, tag, key, bytes, revision, flags)
}

// WriteAt is Write for a key whose shard and tag are known.
func (s *Store) WriteAt(n uint8, tag uint32, key, bytes []byte, revision uint64, flags uint8) (Draft, error) {
	sh := &s.shards[n]
	place, err := sh.write(key, bytes, revision, flags)
	if err != nil {
		return Draft{}, err
	}
	r, _ := sh.view.Load().at(place)
	d := Draft{Record: r, place: place, tag: tag}
	var known bool
	if d.Ordinal, known = s.FindAt(n, tag, key); known {
		return d, nil
	}
	local, err := sh.take()
	if err != nil {
		return Draft{}, err
	}
	d.Ordinal, d.New = uint32(n)<<24|local, true
	return d, nil
}

// A Target says which versions a change concerns.
type Target uint8

// The targets.
const (
	Both Target = iota
	ReplicaOnly
	ServingOnly
)

// Publish makes a draft the replica's version, the serving version, or both.
func (s *Store) Publish(d Draft, to Target) error {
	sh := &s.shards[d.Ordinal>>24]
	local := d.Ordinal & 0xffffff
	if d.New {
		if err := sh.keys.Add(d.tag, local); err != nil {
			sh.free = append(sh.free, local)
			return err
		}
		s.count++
	}
	serving, replica := sh.places(local)
	switch to {
	case Both:
		serving, replica = d.place, d.place
	case ReplicaOnly:
		replica = d.place
	case ServingOnly:
		serving = d.place
	}
	sh.set(local, serving, replica)
	return nil
}

// Remove takes the ordinal's version out of the replica, the serving view, or both. When neither is left the
// ordinal is free to be given again.
func (s *Store) Remove(ordinal uint32, from Target) {
	sh := &s.shards[ordinal>>24]
	local := ordinal & 0xffffff
	serving, replica := sh.places(local)
	if serving == 0 && replica == 0 {
		return
	}
	var key [1024]byte
	r, _ := s.any(ordinal)
	k := append(key[:0], r.Key...)
	r.Release()
	if from != ReplicaOnly {
		serving = 0
	}
	if from != ServingOnly {
		replica = 0
	}
	if serving == 0 && replica == 0 {
		_, tag := Hash(k)
		sh.keys.Remove(tag, local)
		s.count--
	}
	sh.set(local, serving, replica)
	if serving == 0 && replica == 0 {
		sh.free = append(sh.free, local)
	}
}

// Settle makes the replica's version, or its absence, the serving one.
func (s *Store) Settle(ordinal uint32) {
	if !s.Diverged(ordinal) {
		return
	}
	sh := &s.shards[ordinal>>24]
	local := ordinal & 0xffffff
	_, replica := sh.places(local)
	if replica == 0 {
		s.Remove(ordinal, ServingOnly)
		return
	}
	sh.set(local, replica, replica)
}

// Compact copies the live records of every shard of which less than 75 % is live. It is called between
// changes, never while a draft is unpublished. A shard for whose copy there is no memory stays as it is.
func (s *Store) Compact() {
	for i := range s.shards {
		sh := &s.shards[i]
		if sh.total > minChunk && sh.live*4 < sh.total*3 {
			_ = sh.compact() // no memory now; the next change tries again
		}
	}
}

// Reserve makes room in the key index for n records in all.
func (s *Store) Reserve(n int) error {
	for i := range s.shards {
		if err := s.shards[i].keys.Reserve(n/Shards + n/Shards/16); err != nil {
			return err
		}
	}
	return nil
}

// Sizes says where memory goes, in bytes.
type Sizes struct {
	Live   int // current records, headers included
	Chunks int // all chunks, as far as they are used: the rest of a mapping takes no memory
	Index  int // key index and places
}

// Sizes returns the present sizes.
func (s *Store) Sizes() Sizes {
	var z Sizes
	for i := range s.shards {
		sh := &s.shards[i]
		z.Live += sh.live
		z.Index += sh.keys.Bytes()
		if v := sh.view.Load(); v != nil {
			z.Index += len(v.places.Bytes())
			z.Chunks += sh.total
		}
	}
	return z
}

// take gives an ordinal to a new key, growing the places if need be.
func (sh *shard) take() (uint32, error) {
	if n := len(sh.free); n > 0 {
		local := sh.free[n-1]
		sh.free = sh.free[:n-1]
		return local, nil
	}
	v := sh.view.Load() // there is one: take follows write
	local := sh.next
	if local >= 1<<24 {
		return 0, ErrFull
	}
	if words := len(v.places.Words32()); int(local) >= words {
		places, err := grow(v.places, max(16, words+words/8))
		if err != nil {
			return 0, err
		}
		v.places.Retire()
		sh.view.Store(&view{places: places, chunks: v.chunks, epoch: v.epoch})
	}
	sh.next++
	return local, nil
}

// grow returns a copy of places with room for n. From here on the old block is constant.
func grow(old *offheap.Block, n int) (*offheap.Block, error) {
	block, err := offheap.New(n * 4)
	if err != nil {
		return nil, err
	}
	copy(block.Words32(), old.Words32())
	return block, nil
}

// places returns where the versions of a local ordinal are.
func (sh *shard) places(local uint32) (serving, replica uint32) {
	serving = sh.view.Load().places.Words32()[local]
	replica = serving
	if p, ok := sh.diverged[local]; ok {
		replica = p
	}
	return serving, replica
}

// set changes where the versions are, and keeps account of what is live.
func (sh *shard) set(local, serving, replica uint32) {
	oldServing, oldReplica := sh.places(local)
	sh.live += sh.sizeAt(serving, replica) - sh.sizeAt(oldServing, oldReplica)
	if serving == replica {
		delete(sh.diverged, local)
	} else {
		if sh.diverged == nil {
			sh.diverged = make(map[uint32]uint32)
		}
		sh.diverged[local] = replica
	}
	atomic.StoreUint32(&sh.view.Load().places.Words32()[local], serving)
}

// sizeAt returns the bytes taken by one or two places.
func (sh *shard) sizeAt(a, b uint32) int {
	n := 0
	if a != 0 {
		n += sh.size(a)
	}
	if b != 0 && b != a {
		n += sh.size(b)
	}
	return n
}

func (sh *shard) size(place uint32) int {
	r, _ := sh.view.Load().at(place)
	return stored(len(r.Key), len(r.Bytes))
}

// stored is the space a record takes in a chunk.
func stored(key, bytes int) int {
	return (headerLen + key + bytes + placeUnit - 1) / placeUnit * placeUnit
}

// write appends a record to the last chunk, or to a new one.
func (sh *shard) write(key, bytes []byte, revision uint64, flags uint8) (place uint32, err error) {
	if len(key) > MaxKey || len(bytes) > MaxBytes {
		return 0, fmt.Errorf("a record of %d bytes with a key of %d does not fit", len(bytes), len(key))
	}
	need := stored(len(key), len(bytes))
	v := sh.view.Load()
	if v == nil {
		places, err := offheap.New(16 * 4)
		if err != nil {
			return 0, err
		}
		v = &view{places: places}
	}
	last := len(v.chunks) - 1
	if last < 0 || sh.tail+need > len(v.chunks[last].Bytes()) {
		if last+1 >= maxChunks {
			return 0, ErrFull
		}
		size := minChunk
		if last >= 0 {
			size = min(maxChunk, 2*len(v.chunks[last].Bytes()))
		}
		for size < firstOffset+need {
			size *= 2
		}
		block, err := offheap.New(size)
		if err != nil {
			return 0, err
		}
		v = &view{places: v.places, chunks: append(v.chunks, block), epoch: v.epoch}
		last++
		sh.tail = firstOffset
		sh.view.Store(v)
	}
	b := v.chunks[last].Bytes()[sh.tail:]
	put(b, key, bytes, revision, flags)
	place = uint32(last)<<chunkShift | uint32(sh.tail/placeUnit)
	sh.tail += need
	sh.total += need
	return place, nil
}

func put(b, key, bytes []byte, revision uint64, flags uint8) {
	binary.LittleEndian.PutUint32(b, uint32(flags&1)<<(lengthBits+keyBits)|uint32(len(key))<<lengthBits|uint32(len(bytes)))
	binary.LittleEndian.PutUint64(b[4:], revision)
	copy(b[headerLen:], key)
	copy(b[headerLen+len(key):], bytes)
}

// compact copies the live records into new chunks and publishes places and chunks as one new view.
func (sh *shard) compact() error {
	old := sh.view.Load()
	places, err := grow(old.places, len(old.places.Words32()))
	if err != nil {
		return err
	}
	next := shard{} // only write is used of it
	next.view.Store(&view{places: places, epoch: old.epoch + 1})
	if sh.live >= maxChunk/2 {
		// Skip the small sizes: the shard is past them.
		block, err := offheap.New(maxChunk)
		if err != nil {
			return err
		}
		next.view.Store(&view{places: places, chunks: []*offheap.Block{block}, epoch: old.epoch + 1})
		next.tail = firstOffset
	}
	move := func(place uint32) (uint32, error) {
		r, _ := old.at(place)
		return next.write(r.Key, r.Bytes, r.Revision, r.Flags)
	}
	words := places.Words32()
	diverged := make(map[uint32]uint32, len(sh.diverged))
	for local := range sh.next {
		serving := words[local]
		if serving != 0 {
			moved, err := move(serving)
			if err != nil {
				return err
			}
			words[local] = moved
		}
		if replica, ok := sh.diverged[local]; ok {
			if replica != 0 {
				if replica, err = move(replica); err != nil {
					return err
				}
			}
			diverged[local] = replica
		}
	}
	v := next.view.Load()
	sh.diverged, sh.tail, sh.live, sh.total = diverged, next.tail, next.total, next.total
	sh.view.Store(v)
	old.places.Retire()
	for _, c := range old.chunks {
		c.Retire()
	}
	return nil
}
