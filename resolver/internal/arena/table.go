// Package arena keeps bytes outside the Go heap, where the garbage collector neither scans nor counts them.
//
// A Memory is a plain range of words. A Table is a cache made of one: entries of {meta word, payload bytes}
// found by a 64-bit hash, in a fixed number of bytes, index included. What an entry means and when it ends is
// its owner's business; only where its key stands in the payload is fixed for a table (Options.KeyAt), and
// keys have a form in which none is the beginning of another.
//
// # Reading
//
// Readers take no lock and hold no view. They copy out: load the slot's word (where the entry is, and the
// version of that place), copy by atomic 64-bit loads, load the word again; if it differs, the place may
// have been reused meanwhile and the copy is a miss. A Probe does this. A hit writes nothing but a 2-bit
// frequency in the slot, and that only while it is below 3.
//
// # Writing and eviction
//
// Writers lock one of a few shards. A shard's bytes are cut into segments of 64 KiB, filled one after the
// other and never edited, except that an entry's meta word may be replaced. When no segment is free the
// oldest of a queue is emptied: entries that were used move on, the others go, and the segment as a whole is
// reused. So there is no fragmentation, no free list of entries, and the budget is exact by construction.
// There are two queues, as in S3-FIFO (Yang et al., SOSP 2023): new entries start in the small one, which
// gives way first while it holds more than a tenth of the segments; entries used there, and those that come
// back soon after having left it (a table of 16-bit fingerprints remembers), go to the main one. A flood of
// names asked once thus passes through a tenth of the space, but has all of it while nobody else does.
//
// Replaced and deleted entries occupy their place until their segment's turn comes.
//
// The hash must be keyed: a table believes that nobody can choose hashes that collide.
package arena

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
)

func get64(b []byte) uint64    { return binary.LittleEndian.Uint64(b) }
func put64(b []byte, v uint64) { binary.LittleEndian.PutUint64(b, v) }

const (
	segmentWords = 8192 // 64 KiB
	headWords    = 2    // the header word and the meta word

	// MaxPayload is the most bytes of one entry: what fits a segment.
	MaxPayload = (segmentWords - headWords) * 8

	// MinBytes is the least a Table is given: index and four segments, which eviction needs to turn.
	MinBytes = 512 << 10

	// shardBytes is the size from which a table is cut in two: more shards mean less waiting, but each
	// wastes up to three segments that are being filled or kept in reserve.
	shardBytes = 16 << 20
	maxShards  = 64

	// shardLimit is what a slot's 29 bits of word offset can address.
	shardLimit = 4 << 30

	bucketSlots = 8 // a cache line
)

// A slot is one word; zero is an empty slot.
//
//	bits 0-1   frequency: uses since it was written or last spared, at most 3
//	bit  2     claim
//	bits 3-31  offset in the shard's data, in words
//	bits 32-47 version of the segment, so that a reused place never looks like what was there before
//	bits 48-63 fingerprint, never zero
const (
	freqMask    = 3
	claimBit    = 4
	offsetShift = 3
	offsetMask  = 1<<29 - 1
	versionPos  = 32
	fpPos       = 48
	placeMask   = ^uint64(freqMask | claimBit)
)

// An entry's header word is its payload's length (bits 0-15) and 48 bits of its hash:
//
//	bits 0-25  bucket
//	bits 26-41 fingerprint
//	bits 42-47 shard
const (
	bucketBits = 26
	lenMask    = 1<<16 - 1
)

// Options tunes a Table.
type Options struct {
	// Bytes is the budget, index and all; less than MinBytes means MinBytes, and what cannot be divided
	// evenly stays unused.
	Bytes int64
	// EntryBytes is the expected size of an entry with its two words of overhead: it decides the size of
	// the index. Zero means 96.
	EntryBytes int
	// KeyAt is where in a payload the key starts: a multiple of 8.
	KeyAt int
	// Keep is how many uses an entry in the small queue needs to move on to the main one, 1 to 3. Zero
	// means 1.
	Keep int
}

// A Table is a cache of bytes. It is safe for concurrent use.
type Table struct {
	mem       *Memory
	shards    []shard
	shardMask uint64
	keep      uint64
	keyAt     int
	bytes     int64
	dataAt    int // where the segments start in mem
}

// A shard owns a part of the hashes: its index, its ghosts and its segments. First in the table's Memory are the
// indexes of all shards, then the first segments of all, the second ones, and so on, so that a table holding little
// occupies few pages, huge ones as they are: zeroing those was a sixteenth of the time of the first names.
type shard struct {
	slots   []uint64 // atomic
	data    []uint64 // the segments of all shards; atomic where readers may look
	buckets uint64
	first   uint32 // where in data the shard's first segment starts; the next are a segment of each shard apart,
	spread  uint32 // and there are 1<<spread shards

	mu        sync.Mutex // guards everything below, and all stores but those of Probe
	ghosts    []uint64   // four 16-bit fingerprints a word
	segs      []segment
	free      []int32 // at least one between operations: survivors of an eviction go there
	released  []int32 // given back to the system by Limit
	small     []int32 // oldest first; the last is being filled
	main      []int32
	entries   int
	live      int // words of live entries
	evictions uint64
	_         [64]byte
}

type segment struct {
	version uint16
	main    bool
	used    int32 // words
}

// NewTable returns an empty table.
func NewTable(o Options) *Table {
	if o.EntryBytes == 0 {
		o.EntryBytes = 96
	}
	o.EntryBytes = max(o.EntryBytes, 32) // no entry is smaller, and the index must leave room
	if o.KeyAt%8 != 0 {
		panic("arena: KeyAt is not a multiple of 8")
	}
	if o.Keep == 0 {
		o.Keep = 1
	}
	o.Bytes = max(o.Bytes, MinBytes)
	n := 1
	for n < maxShards && o.Bytes/int64(2*n) >= shardBytes {
		n *= 2
	}
	per := min(o.Bytes/int64(n), shardLimit)
	// A slot costs its 8 bytes and half a ghost.
	buckets := per / int64(o.EntryBytes+9) / bucketSlots
	index := buckets * bucketSlots        // words
	ghosts := buckets * bucketSlots / 8   // words
	index = (index + ghosts + 511) &^ 511 // data starts on a page
	segs := (per/8 - index) / segmentWords
	shardWords := index + segs*segmentWords
	t := &Table{
		mem:       Reserve(int64(n) * shardWords * 8),
		shards:    make([]shard, n),
		shardMask: uint64(n - 1),
		keep:      uint64(o.Keep),
		keyAt:     o.KeyAt,
		bytes:     int64(n) * shardWords * 8,
	}
	t.dataAt = int(int64(n) * index)
	for i := range t.shards {
		s := &t.shards[i]
		w := t.mem.Words()[int64(i)*index:]
		s.slots = w[:buckets*bucketSlots]
		s.ghosts = w[buckets*bucketSlots:][:ghosts]
		s.data = t.mem.Words()[t.dataAt:]
		s.first, s.spread = uint32(i*segmentWords), uint32(bits.TrailingZeros(uint(n)))
		s.buckets = uint64(buckets)
		s.segs = make([]segment, segs)
		for k := int32(segs) - 1; k >= 0; k-- {
			s.free = append(s.free, k)
		}
	}
	return t
}

// at returns where in data a word of the shard is that has this offset in its segments.
func (s *shard) at(off int) int {
	const within = segmentWords - 1
	return off&^within<<s.spread + int(s.first) + off&within
}

// A place is where an entry with a given hash may be.
type place struct {
	shard  uint64
	key    uint64 // the 48 bits of the header
	fp     uint64
	b1, b2 uint64
}

func (t *Table) place(hash uint64) place {
	h := hash >> 16
	p := place{shard: h >> (bucketBits + 16) & t.shardMask, key: h}
	s := &t.shards[p.shard]
	p.b1, p.b2, p.fp = s.spots(h)
	return p
}

// spots returns the two buckets and the fingerprint of 48 bits of hash.
func (s *shard) spots(h uint64) (b1, b2, fp uint64) {
	const mask = 1<<bucketBits - 1
	fp = h >> bucketBits & 0xffff
	low := h & mask
	b1 = low * s.buckets >> bucketBits
	other := (low ^ bits.Reverse64(fp*0x9e3779b97f4a7c15+low)>>(64-bucketBits)) & mask
	b2 = other * s.buckets >> bucketBits
	return b1, b2, max(fp, 1)
}

// A Probe walks the entries that may be the one looked for. It is a value and allocates nothing.
//
//	for p := t.Probe(hash); p.Next(); {
//		if p.Len() <= len(buf) && p.Copy(buf[:p.Len()]) && isMine(buf[:p.Len()]) {
//			…
//		}
//	}
type Probe struct {
	s      *shard
	key    uint64
	fp     uint64
	b1, b2 uint64
	i      uint64
	slot   uint64
	word   uint64
	n      int
	meta   uint64
}

// Probe starts a walk.
func (t *Table) Probe(hash uint64) Probe {
	p := t.place(hash)
	return Probe{s: &t.shards[p.shard], key: p.key, fp: p.fp, b1: p.b1, b2: p.b2}
}

// Next moves on to the next candidate.
func (p *Probe) Next() bool {
	s := p.s
	for p.i < 2*bucketSlots {
		b := p.b1
		if p.i >= bucketSlots {
			if b = p.b2; b == p.b1 {
				break
			}
		}
		slot := b*bucketSlots + p.i%bucketSlots
		p.i++
		w := atomic.LoadUint64(&s.slots[slot])
		if w>>fpPos != p.fp {
			continue
		}
		off := w >> offsetShift & offsetMask
		head := atomic.LoadUint64(&s.data[s.at(int(off))])
		if head>>16 != p.key {
			continue
		}
		p.slot, p.word, p.n = slot, w, int(head&lenMask)
		return true
	}
	return false
}

// Len returns the length of the candidate's payload.
func (p *Probe) Len() int { return p.n }

// Copy copies the payload to dst, whose length is Len, and the meta word; false means that the entry went
// meanwhile.
func (p *Probe) Copy(dst []byte) bool {
	off := p.s.at(int(p.word >> offsetShift & offsetMask))
	end := off + headWords + (len(dst)+7)/8
	if end > len(p.s.data) {
		return false // a length from a place being reused
	}
	p.meta = atomic.LoadUint64(&p.s.data[off+1])
	Copy(dst, p.s.data[off+headWords:end])
	return atomic.LoadUint64(&p.s.slots[p.slot])&placeMask == p.word&placeMask
}

// Meta returns the meta word read by Copy.
func (p *Probe) Meta() uint64 { return p.meta }

// Touch notes a use.
func (p *Probe) Touch() {
	if p.word&freqMask < freqMask {
		// A lost race is a lost count.
		atomic.CompareAndSwapUint64(&p.s.slots[p.slot], p.word, p.word+1)
	}
}

// Ref returns a reference by which the entry can be claimed later.
func (p *Probe) Ref() Ref { return Ref{p.s, p.slot, p.word & placeMask} }

// Freq returns how often the entry has been used, at most 3, not counting this time.
func (p *Probe) Freq() int { return int(p.word & freqMask) }

// Claimed reports whether the entry was claimed when it was read.
func (p *Probe) Claimed() bool { return p.word&claimBit != 0 }

// A Ref names one version of an entry. It keeps nothing alive: if the entry has gone, its methods do
// nothing.
type Ref struct {
	s    *shard
	slot uint64
	word uint64
}

// Claim sets the entry's claim bit and reports whether it was the caller who set it. Writing the entry anew
// clears the bit.
func (r Ref) Claim() bool { return r.flip(claimBit) }

// Unclaim clears the claim bit.
func (r Ref) Unclaim() { r.flip(0) }

func (r Ref) flip(to uint64) bool {
	if r.s == nil {
		return false
	}
	for {
		w := atomic.LoadUint64(&r.s.slots[r.slot])
		if w&placeMask != r.word || w&claimBit == to {
			return false
		}
		if atomic.CompareAndSwapUint64(&r.s.slots[r.slot], w, w&^claimBit|to) {
			return true
		}
	}
}

// A Writer holds the lock of the shard that a hash belongs to, until Unlock.
type Writer struct {
	t *Table
	s *shard
	p place
}

// Lock returns a Writer for the hash.
func (t *Table) Lock(hash uint64) Writer {
	p := t.place(hash)
	s := &t.shards[p.shard]
	s.mu.Lock()
	return Writer{t, s, p}
}

// Unlock ends the Writer.
func (w Writer) Unlock() { w.s.mu.Unlock() }

// An Entry is a live entry in the hands of a Writer, valid until the Writer's next Put or Delete.
type Entry struct {
	s    *shard
	slot uint64
	off  int
	at   int // where in data that is
}

// Find returns the entry with this key.
func (w Writer) Find(key []byte) (Entry, bool) {
	for i := range uint64(2 * bucketSlots) {
		b := w.p.b1
		if i >= bucketSlots {
			b = w.p.b2
		}
		slot := b*bucketSlots + i%bucketSlots
		v := atomic.LoadUint64(&w.s.slots[slot])
		if v>>fpPos != w.p.fp {
			continue
		}
		off := int(v >> offsetShift & offsetMask)
		e := Entry{w.s, slot, off, w.s.at(off)}
		if w.s.data[e.at]>>16 == w.p.key && e.has(w.t.keyAt, key) {
			return e, true
		}
	}
	return Entry{}, false
}

// has reports whether b stands in the payload at a multiple of 8.
func (e Entry) has(at int, b []byte) bool {
	if at+len(b) > e.Len() {
		return false
	}
	d := e.s.data[e.at+headWords+at/8:]
	for len(b) >= 8 {
		if d[0] != get64(b) {
			return false
		}
		d, b = d[1:], b[8:]
	}
	for i, c := range b {
		if byte(d[0]>>(8*i)) != c {
			return false
		}
	}
	return true
}

// Len returns the length of the payload.
func (e Entry) Len() int { return int(e.s.data[e.at] & lenMask) }

// Meta returns the meta word.
func (e Entry) Meta() uint64 { return e.s.data[e.at+1] }

// SetMeta replaces the meta word. Readers see the old one or the new.
func (e Entry) SetMeta(m uint64) { atomic.StoreUint64(&e.s.data[e.at+1], m) }

// Append appends the payload to dst.
func (e Entry) Append(dst []byte) []byte {
	n := e.Len()
	dst = append(dst, make([]byte, n)...)
	Copy(dst[len(dst)-n:], e.s.data[e.at+headWords:])
	return dst
}

// Equal reports whether the payload is b.
func (e Entry) Equal(b []byte) bool { return e.Len() == len(b) && e.has(0, b) }

// Delete removes the entry.
func (w Writer) Delete(e Entry) { w.s.remove(e.slot, e.off) }

// Put stores a payload whose key has keyLen bytes, in place of the entry with that key if there is one. It
// returns false if there is no room for the key in it or it is longer than MaxPayload.
func (w Writer) Put(payload []byte, keyLen int, meta uint64) bool {
	keyAt := w.t.keyAt
	if keyLen == 0 || len(payload) < keyAt+keyLen || len(payload) > MaxPayload {
		return false
	}
	key := payload[keyAt : keyAt+keyLen]
	s := w.s
	words := headWords + (len(payload)+7)/8
	old, replaces := w.Find(key)
	toMain := replaces && s.segs[old.off/segmentWords].main
	if !replaces && s.tookGhost(w.p.key, w.p.fp) {
		toMain = true
	}
	off := s.room(words, toMain, w.t.keep)
	// Making room may have moved or evicted the old entry.
	old, replaces = w.Find(key)
	at := s.at(off)
	atomic.StoreUint64(&s.data[at], w.p.key<<16|uint64(len(payload)))
	atomic.StoreUint64(&s.data[at+1], meta)
	store(s.data[at+headWords:], payload)
	if replaces {
		freq := atomic.LoadUint64(&s.slots[old.slot]) & freqMask
		s.forget(old.off)
		s.point(old.slot, off, w.p.fp, freq)
	} else {
		s.point(s.vacancy(w.p.b1, w.p.b2), off, w.p.fp, 0)
	}
	return true
}

// point makes a slot show the entry at off, which is written.
func (s *shard) point(slot uint64, off int, fp, freq uint64) {
	version := uint64(s.segs[off/segmentWords].version)
	s.entries++
	s.live += entryWords(s.data[s.at(off)])
	atomic.StoreUint64(&s.slots[slot], fp<<fpPos|version<<versionPos|uint64(off)<<offsetShift|freq)
}

func entryWords(head uint64) int { return headWords + (int(head&lenMask)+7)/8 }

// forget takes the entry at off out of the sums.
func (s *shard) forget(off int) {
	s.entries--
	s.live -= entryWords(s.data[s.at(off)])
}

func (s *shard) remove(slot uint64, off int) {
	s.forget(off)
	atomic.StoreUint64(&s.slots[slot], 0)
}

// vacancy returns an empty slot of the emptier of two buckets. If both are full it makes one of the sixteen
// move to its other bucket; a reader that looks for it at that moment may miss it. Only if none can move, in
// an index far smaller than the entries deserve, does the least used go.
func (s *shard) vacancy(b1, b2 uint64) uint64 {
	slot, n := s.emptyIn(b1)
	if other, m := s.emptyIn(b2); m > n {
		slot, n = other, m
	}
	if n > 0 {
		return slot
	}
	worst, worstFreq := uint64(0), uint64(freqMask+1)
	for _, b := range [2]uint64{b1, b2} {
		for slot := b * bucketSlots; slot < (b+1)*bucketSlots; slot++ {
			v := atomic.LoadUint64(&s.slots[slot])
			to1, to2, _ := s.spots(s.data[s.at(int(v>>offsetShift&offsetMask))] >> 16)
			if to1 == b {
				to1 = to2
			}
			if to, n := s.emptyIn(to1); n > 0 {
				atomic.StoreUint64(&s.slots[to], v)
				atomic.StoreUint64(&s.slots[slot], 0)
				return slot
			}
			if v&freqMask < worstFreq {
				worst, worstFreq = slot, v&freqMask
			}
		}
	}
	s.evictions++
	s.remove(worst, int(atomic.LoadUint64(&s.slots[worst])>>offsetShift&offsetMask))
	return worst
}

// emptyIn returns an empty slot of a bucket and how many there are.
func (s *shard) emptyIn(b uint64) (slot uint64, n int) {
	for i := b * bucketSlots; i < (b+1)*bucketSlots; i++ {
		if atomic.LoadUint64(&s.slots[i]) == 0 {
			slot = i
			n++
		}
	}
	return slot, n
}

// room returns the offset of words free words in the segment that the queue is filling, and takes them.
func (s *shard) room(words int, toMain bool, keep uint64) int {
	if off, ok := s.take(words, toMain); ok {
		return off
	}
	// One free segment is kept for the survivors of an eviction; so this asks for two. Sparing costs an
	// entry one of at most three uses, so that a few rounds free a segment; the bound is for the pause.
	const patience = 6
	for i := 0; len(s.free) < 2; i++ {
		s.evict(keep, i >= patience)
	}
	// Survivors may have opened a segment of this queue meanwhile.
	if off, ok := s.take(words, toMain); ok {
		return off
	}
	s.open(toMain)
	off, _ := s.take(words, toMain)
	return off
}

func (s *shard) take(words int, toMain bool) (int, bool) {
	q := s.small
	if toMain {
		q = s.main
	}
	if len(q) == 0 {
		return 0, false
	}
	k := q[len(q)-1]
	g := &s.segs[k]
	if int(g.used)+words > segmentWords {
		return 0, false
	}
	off := int(k)*segmentWords + int(g.used)
	g.used += int32(words)
	return off, true
}

// open lets a queue fill a free segment.
func (s *shard) open(toMain bool) {
	k := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	s.segs[k].main = toMain
	if toMain {
		s.main = append(s.main, k)
	} else {
		s.small = append(s.small, k)
	}
}

// evict empties the oldest segment of the queue that has to give way, which may be one still being filled.
// Entries that have been used enough move to the main queue unless ruthless. It needs a free segment and
// leaves at least as many as before.
func (s *shard) evict(keep uint64, ruthless bool) {
	q := &s.main
	if len(s.main) == 0 || len(s.small)*10 > len(s.small)+len(s.main) {
		q = &s.small
	}
	k := (*q)[0]
	*q = append((*q)[:0], (*q)[1:]...)
	g := &s.segs[k]
	least, cost := keep, uint64(freqMask) // a promoted entry starts from zero
	if g.main {
		least, cost = 1, 1
	}
	base := int(k) * segmentWords
	for at := 0; at < int(g.used); {
		off := base + at
		head := s.data[s.at(off)]
		words := entryWords(head)
		at += words
		slot, ok := s.slotOf(off)
		if !ok {
			continue // replaced or deleted
		}
		freq := atomic.LoadUint64(&s.slots[slot]) & freqMask
		if freq >= least && !ruthless {
			to, ok := s.take(words, true)
			if !ok {
				s.open(true)
				to, _ = s.take(words, true)
			}
			for i, w := range s.data[s.at(off):][:words] {
				atomic.StoreUint64(&s.data[s.at(to)+i], w)
			}
			_, _, fp := s.spots(head >> 16)
			s.forget(off)
			s.point(slot, to, fp, freq-min(freq, cost))
			continue
		}
		s.evictions++
		if !g.main {
			s.addGhost(head >> 16)
		}
		s.remove(slot, off)
	}
	s.empty(k)
}

// empty puts a segment on the free list. No slot shows into it any more; a new version makes sure that none
// ever seems to do so again for a reader that still holds the old word.
func (s *shard) empty(k int32) {
	g := &s.segs[k]
	g.used = 0
	g.version++
	s.free = append(s.free, k)
}

// slotOf returns the slot that shows the entry at off; false means that the entry is dead.
func (s *shard) slotOf(off int) (uint64, bool) {
	b1, b2, _ := s.spots(s.data[s.at(off)] >> 16)
	for _, b := range [2]uint64{b1, b2} {
		for i := range uint64(bucketSlots) {
			slot := b*bucketSlots + i
			v := atomic.LoadUint64(&s.slots[slot])
			if v != 0 && int(v>>offsetShift&offsetMask) == off {
				return slot, true
			}
		}
	}
	return 0, false
}

// A ghost is the fingerprint of an entry that left the small queue unused, at a place its bucket bits give.
// Later ones overwrite earlier ones.
func (s *shard) ghostAt(key uint64) (word uint64, shift uint64) {
	const mask = 1<<bucketBits - 1
	i := (key & mask) * uint64(len(s.ghosts)*4) >> bucketBits
	return i / 4, i % 4 * 16
}

func (s *shard) addGhost(key uint64) {
	_, _, fp := s.spots(key)
	w, shift := s.ghostAt(key)
	s.ghosts[w] = s.ghosts[w]&^(0xffff<<shift) | fp<<shift
}

func (s *shard) tookGhost(key, fp uint64) bool {
	w, shift := s.ghostAt(key)
	if s.ghosts[w]>>shift&0xffff != fp {
		return false
	}
	s.ghosts[w] &^= 0xffff << shift
	return true
}

// Stats are a table's sums.
type Stats struct {
	Entries   int
	Bytes     int64  // of live entries, each with its overhead in its segment
	Evictions uint64 // entries that went for want of room
}

// Stats returns the sums of this moment, shard by shard.
func (t *Table) Stats() Stats {
	var st Stats
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.Lock()
		st.Entries += s.entries
		st.Bytes += int64(s.live) * 8
		st.Evictions += s.evictions
		s.mu.Unlock()
	}
	return st
}

// Bytes returns how much memory the table reserved: never more than its budget (if that is at least
// MinBytes).
func (t *Table) Bytes() int64 { return t.bytes }

// Walk calls drop for each entry, its payload in a buffer that is reused, and deletes those for which it
// returns true; it returns how many. Entries that were replaced and not yet overwritten may be shown too. A
// shard is locked to writers while it is walked, about a millisecond for every 2 MiB it has, so drop must be
// short and must not use the table. Entries written to shards already walked are not seen.
func (t *Table) Walk(drop func(payload []byte, meta uint64) bool) int {
	var buf [MaxPayload]byte
	n := 0
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.Lock()
		for k := range s.segs {
			s.walk(k, buf[:], func(off int, payload []byte) {
				// Most entries are of no interest, so the index is asked last.
				if !drop(payload, s.data[s.at(off)+1]) {
					return
				}
				if slot, ok := s.slotOf(off); ok {
					s.remove(slot, off)
					n++
				}
			})
		}
		s.mu.Unlock()
	}
	return n
}

func (s *shard) walk(k int, buf []byte, each func(off int, payload []byte)) {
	for at := 0; at < int(s.segs[k].used); {
		off := k*segmentWords + at
		d := s.data[s.at(off):]
		head := d[0]
		at += entryWords(head)
		b := buf[:head&lenMask]
		Copy(b, d[headWords:])
		each(off, b)
	}
}

// Copies calls each with a copy of every live entry, first those of the main queue, then the others, and oldest
// segments first, holding no lock meanwhile: it is for dumps, which may miss or repeat an entry that moves at
// that moment. An error of each ends it and is returned.
func (t *Table) Copies(each func(payload []byte, meta uint64) error) error {
	type item struct {
		from, to int
		meta     uint64
	}
	var buf [MaxPayload]byte
	var all []byte
	var items []item
	for i := range 2 * len(t.shards) {
		s := &t.shards[i%len(t.shards)]
		s.mu.Lock()
		queue := s.main
		if i >= len(t.shards) {
			queue = s.small
		}
		order := slices.Clone(queue)
		s.mu.Unlock()
		for _, k := range order {
			all, items = all[:0], items[:0]
			s.mu.Lock()
			s.walk(int(k), buf[:], func(off int, payload []byte) {
				if _, ok := s.slotOf(off); ok {
					items = append(items, item{len(all), len(all) + len(payload), s.data[s.at(off)+1]})
					all = append(all, payload...)
				}
			})
			s.mu.Unlock()
			for _, it := range items {
				if err := each(all[it.from:it.to], it.meta); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// Clear removes everything and gives the segments back to the system.
func (t *Table) Clear() {
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.Lock()
		// Pages never written stay so.
		for k := range s.slots {
			if atomic.LoadUint64(&s.slots[k]) != 0 {
				atomic.StoreUint64(&s.slots[k], 0)
			}
		}
		for k := range s.ghosts {
			if s.ghosts[k] != 0 {
				s.ghosts[k] = 0
			}
		}
		for _, k := range append(s.small, s.main...) {
			s.empty(k)
			t.releaseSegment(s, k)
		}
		s.small, s.main = s.small[:0], s.main[:0]
		s.entries, s.live = 0, 0
		s.mu.Unlock()
	}
}

func (t *Table) releaseSegment(s *shard, k int32) {
	from := t.dataAt + s.at(int(k)*segmentWords)
	t.mem.Release(from, from+segmentWords)
}

// minSegments is what a shard needs to turn: one being filled in each queue, one in reserve, one to evict.
const minSegments = 4

// Limit makes the table use at most the given bytes from now on, index included, evicting what is beyond;
// the memory goes back to the system. It cannot exceed what was reserved nor go below what the index and a
// few segments need. It returns the limit in force.
func (t *Table) Limit(bytes int64) int64 {
	inForce := int64(0)
	for i := range t.shards {
		s := &t.shards[i]
		index := t.bytes/int64(len(t.shards)) - int64(len(s.segs)*segmentWords*8)
		want := int((bytes/int64(len(t.shards)) - index) / (segmentWords * 8))
		want = min(max(want, minSegments), len(s.segs))
		s.mu.Lock()
		for len(s.segs)-len(s.released) > want {
			for n := 0; len(s.free) < 2; n++ {
				s.evict(t.keep, n >= 1)
			}
			k := s.free[len(s.free)-1]
			s.free = s.free[:len(s.free)-1]
			s.released = append(s.released, k)
			t.releaseSegment(s, k)
		}
		for len(s.segs)-len(s.released) < want {
			s.free = append(s.free, s.released[len(s.released)-1])
			s.released = s.released[:len(s.released)-1]
		}
		inForce += index + int64(len(s.segs)-len(s.released))*segmentWords*8
		s.mu.Unlock()
	}
	return inForce
}
