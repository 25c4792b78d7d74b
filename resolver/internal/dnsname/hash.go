package dnsname

import (
	"encoding/binary"
	"math/bits"
)

func le64(b []byte) uint64       { return binary.LittleEndian.Uint64(b) }
func putLE64(b []byte, v uint64) { binary.LittleEndian.PutUint64(b, v) }

// A Key keys the hashes of names. It is random for each installation (or process), so that nobody outside
// can choose names that collide.
type Key struct{ K0, K1 uint64 }

// NewKey takes a key from 16 random bytes.
func NewKey(b [16]byte) Key { return Key{le64(b[:8]), le64(b[8:])} }

// A HashState is SipHash-1-3 part-way through a name. It is a value: feeding labels returns the successor,
// so the states of all suffixes of a name cost one pass.
type HashState struct{ v0, v1, v2, v3 uint64 }

// Start returns the state in which nothing, or the root alone, has been hashed.
func (k Key) Start() HashState {
	return HashState{
		k.K0 ^ 0x736f6d6570736575,
		k.K1 ^ 0x646f72616e646f6d,
		k.K0 ^ 0x6c7967656e657261,
		k.K1 ^ 0x7465646279746573,
	}
}

// round is SipRound. It takes the words one by one because only so the compiler puts it into its callers.
func round(v0, v1, v2, v3 uint64) (uint64, uint64, uint64, uint64) {
	v0 += v1
	v2 += v3
	v1 = bits.RotateLeft64(v1, 13) ^ v0
	v3 = bits.RotateLeft64(v3, 16) ^ v2
	v0 = bits.RotateLeft64(v0, 32) + v3
	v2 += v1
	return v0, bits.RotateLeft64(v1, 17) ^ v2, bits.RotateLeft64(v2, 32), bits.RotateLeft64(v3, 21) ^ v0
}

// Word feeds eight bytes.
func (s HashState) Word(w uint64) HashState {
	s.v0, s.v1, s.v2, s.v3 = round(s.v0, s.v1, s.v2, s.v3^w)
	s.v0 ^= w
	return s
}

// Label feeds one label, its length byte first, padded with zeros to a multiple of eight bytes: the length
// makes the padding unambiguous, and every suffix ends on a word, so a prefix's state can be finished too.
func (s HashState) Label(l []byte) HashState {
	at := 0
	for ; len(l)-at >= 8; at += 8 {
		s = s.Word(le64(l[at:]))
	}
	if at < len(l) {
		s = s.Word(lastWord(l, at, len(l)))
	}
	return s
}

// lastWord returns b[from:to], less than eight bytes, padded with zeros. Without need it does not go byte by
// byte, whose number the processor cannot guess.
func lastWord(b []byte, from, to int) (w uint64) {
	mask := uint64(1)<<(8*(to-from)&63) - 1
	if from+8 <= len(b) {
		return le64(b[from:]) & mask
	}
	if over := from + 8 - len(b); len(b) >= 8 {
		return le64(b[len(b)-8:]) >> (8 * over & 63) & mask
	}
	for i, c := range b[from:to] {
		w |= uint64(c) << (8 * i)
	}
	return w
}

// Sum finishes a copy of the state.
func (s HashState) Sum() uint64 {
	v0, v1, v2, v3 := round(s.v0, s.v1, s.v2^0xff, s.v3)
	v0, v1, v2, v3 = round(v0, v1, v2, v3)
	v0, v1, v2, v3 = round(v0, v1, v2, v3)
	return v0 ^ v1 ^ v2 ^ v3
}

// SuffixHashes hashes every suffix of name, which is in canonical wire form: out[i] is the hash of the
// suffix of i+1 labels, so out[0] belongs to the top-level domain. It returns the number of labels and does
// not allocate. The root alone has none: its hash is Start().Sum().
func SuffixHashes(k *Key, name []byte, out *[MaxLabels + 1]uint64) int {
	var at [MaxLabels + 1]uint8
	n := 0
	for i := 0; i < len(name) && name[i] != 0 && n < MaxLabels; i += 1 + int(name[i]) {
		at[n] = uint8(i)
		n++
	}
	s := k.Start()
	v0, v1, v2, v3 := s.v0, s.v1, s.v2, s.v3
	for i := range n {
		from := int(at[n-1-i])
		to := from + 1 + int(name[from])
		for ; to-from >= 8; from += 8 {
			w := le64(name[from:])
			v0, v1, v2, v3 = round(v0, v1, v2, v3^w)
			v0 ^= w
		}
		if from < to {
			w := lastWord(name, from, to)
			v0, v1, v2, v3 = round(v0, v1, v2, v3^w)
			v0 ^= w
		}
		out[i] = HashState{v0, v1, v2, v3}.Sum()
	}
	return n
}

// Hash returns the hash of a whole name in canonical wire form: what SuffixHashes gives for its last suffix.
func (k *Key) Hash(name []byte) uint64 {
	var at [MaxLabels + 1]uint8
	n := 0
	for i := 0; i < len(name) && name[i] != 0 && n < MaxLabels; i += 1 + int(name[i]) {
		at[n] = uint8(i)
		n++
	}
	s := k.Start()
	for i := n - 1; i >= 0; i-- {
		from := int(at[i])
		s = s.Label(name[from : from+1+int(name[from])])
	}
	return s.Sum()
}
