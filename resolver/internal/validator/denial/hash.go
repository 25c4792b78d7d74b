package denial

import (
	"crypto/sha1"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

const (
	hashLen   = sha1.Size
	hashChars = 32 // of an owner label: 20 bytes in base32, no padding
)

// A Hash is a hashed name.
type Hash = [hashLen]byte

// A Hasher computes NSEC3 hashes (RFC 5155 section 5) and remembers those that it has computed, so that the proofs
// of one question share them. It is for one goroutine at a time. The zero value charges nobody.
type Hasher struct {
	charge func() error
	memo   []hashed
}

type hashed struct {
	name   dnsname.Name
	params Params
	hash   Hash
}

// NewHasher returns a Hasher that calls charge before each hash that is new to it, and once more for every
// MaxIterations that the hash takes beyond the first; an error ends the proof. (*query.Tree).Hash is such a function.
func NewHasher(charge func() error) *Hasher { return &Hasher{charge: charge} }

// Hash returns the hash of a name, or the error of who pays for it.
func (h *Hasher) Hash(name dnsname.Name, p Params) (Hash, error) {
	for i := range h.memo {
		if m := &h.memo[i]; m.name == name && m.params == p {
			return m.hash, nil
		}
	}
	if h.charge != nil {
		for range p.weight() {
			if err := h.charge(); err != nil {
				return Hash{}, err
			}
		}
	}
	sum := hash(name, p)
	if len(h.memo) < maxMemo {
		h.memo = append(h.memo, hashed{name, p, sum})
	}
	return sum, nil
}

// maxMemo bounds what a Hasher without a budget remembers.
const maxMemo = 128

// hash is the hash of RFC 5155 section 5 of a name in canonical form.
func hash(name dnsname.Name, p Params) Hash {
	var b [dnsname.MaxLen + 255]byte
	n := copy(b[:], name)
	n += copy(b[n:], p.salt)
	sum := sha1.Sum(b[:n])
	for range p.iterations {
		copy(b[:], sum[:])
		n = hashLen + copy(b[hashLen:], p.salt)
		sum = sha1.Sum(b[:n])
	}
	return sum
}

// ownerHash reads the hash out of the first label of an NSEC3 owner (base32 with the extended hex alphabet, RFC 4648
// section 7), which stands directly below the apex.
func ownerHash(owner, zone dnsname.Name, out *Hash) bool {
	if len(owner) != 1+hashChars+len(zone) || owner[0] != hashChars || owner[1+hashChars:] != zone {
		return false
	}
	var acc uint64
	for i := range hashChars {
		c := owner[1+i]
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c && c <= 'v':
			c -= 'a' - 10
		default:
			return false
		}
		acc = acc<<5 | uint64(c)
		if i%8 == 7 { // eight characters are five bytes
			at := i / 8 * 5
			out[at], out[at+1], out[at+2], out[at+3], out[at+4] = byte(acc>>32), byte(acc>>24), byte(acc>>16), byte(acc>>8), byte(acc)
			acc = 0
		}
	}
	return true
}
