// Package rrsig verifies one signature over one RRset with one key.
//
// It reads DNSKEY, DS and RRSIG RDATA where they stand (RFC 4034), brings an RRset into canonical form (RFC
// 4034 section 6 as corrected by RFC 6840 section 5.1) and verifies signatures of the algorithms 5, 7, 8, 10,
// 13, 14, 15 and 16. It does not decide what a failure means, which keys are trusted, how many attempts a
// set is worth, nor whether SHA-1 is good enough: that is the validator's. A positive outcome says that the
// key made the signature over these records, for this owner or for the wildcard it was expanded from
// (Sig.Expanded), which must then be proved to apply.
//
// Use: Load a set into a Verifier once; for each signature ask Check, which costs nothing, and only then
// Verify, which costs a public-key operation and is what a budget has to count. Dates are arguments. Every
// function is total: hostile bytes give an error and bounded work, at most MaxRecords records and MaxInput
// bytes of signature input.
//
// Errors are the sentinels below, returned as they are, to be told apart by errors.Is or ==.
package rrsig

import (
	"bytes"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/binary"
	"errors"
	"slices"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// What can be wrong.
var (
	// Of a signature, found by Check without cryptography.
	ErrCovered     = errors.New("the signature covers another type")
	ErrSigner      = errors.New("the signer is not the zone, or the zone does not hold the owner")
	ErrLabels      = errors.New("the signature's label count does not fit owner and signer")
	ErrExpired     = errors.New("the signature has expired")
	ErrNotYetValid = errors.New("the signature is not yet valid")
	ErrTimes       = errors.New("the signature expires before it begins")

	// Of a key, known once it is read; see Key.Err. ErrAlgorithm is also the answer for a signature.
	ErrAlgorithm = errors.New("the algorithm, or the size of the key, is not supported")
	ErrKey       = errors.New("the key is malformed for its algorithm")
	ErrNotZone   = errors.New("the key is not a zone key")
	ErrRevoked   = errors.New("the key is revoked")

	// Of key and signature together: another key is meant. Costs nothing.
	ErrOtherKey = errors.New("the signature was not made by this key: tag or algorithm differ")

	// ErrSignature is the one failure that cost a public-key operation.
	ErrSignature = errors.New("the signature does not match the data")

	// ErrSize: the set is beyond MaxRecords or MaxInput.
	ErrSize = errors.New("the set is too big to be verified")
)

// Limits of the work one signature can ask for.
const (
	MaxRecords = 256       // records of a set
	MaxInput   = 64 * 1024 // bytes that are hashed
)

// A Verifier holds one RRset in canonical form, and the buffers needed for it. The zero value is ready for
// Load; it may be reused for any number of sets, which then allocates nothing but what the cryptography
// does. It is for one goroutine at a time.
type Verifier struct {
	set *query.RRset // nil: nothing loaded

	data    []byte   // RDATA of the set, names in lower case
	records [][]byte // views of data in canonical order, duplicates removed
	input   []byte   // what is signed, for one signature
}

// Load takes set, which must not change until the next Load. Its owner and class must be those of all its
// records, as query.RRset has it.
func (v *Verifier) Load(set *query.RRset) error {
	v.set, v.data, v.records = nil, v.data[:0], v.records[:0]
	if len(set.Data) > MaxInput+2*MaxRecords {
		return ErrSize
	}
	v.data = slices.Grow(v.data, len(set.Data)) // so that views stay valid
	for rdata := range query.RDatas(set.Data) {
		if len(v.records) == MaxRecords {
			return ErrSize
		}
		at := len(v.data)
		v.data = append(v.data, rdata...)
		r := v.data[at:len(v.data):len(v.data)]
		canonical(set.Type, r)
		v.records = append(v.records, r)
	}
	slices.SortFunc(v.records, bytes.Compare)
	v.records = slices.CompactFunc(v.records, bytes.Equal)
	v.set = set
	return nil
}

// Check reports why sig cannot be one of zone over the loaded set at the given date, or nil. skew is how far
// the signer's clock and ours may be apart.
func (v *Verifier) Check(sig *Sig, zone dnsname.Name, now time.Time, skew time.Duration) error {
	switch {
	case sig.Covered != v.set.Type || sig.Covered == dnswire.TypeRRSIG:
		return ErrCovered
	case !sig.SignedBy(zone) || !v.set.Name.IsWithin(zone):
		return ErrSigner
	case int(sig.Labels) > countedLabels(v.set.Name) || int(sig.Labels) < countedLabels(zone):
		return ErrLabels
	case !Supported(sig.Algorithm):
		return ErrAlgorithm
	}
	return sig.validAt(now, skew)
}

// Verify reports whether key made sig over the loaded set: nil, or ErrSignature after the cryptography was
// done, or another error before: ErrOtherKey, so that it can be asked with every key in turn, or the key's
// Err. It does not look at dates and names: Check does. A revoked key verifies nothing here; see
// VerifyRevoked.
func (v *Verifier) Verify(sig *Sig, key *Key) error {
	if sig.Algorithm != key.Algorithm || sig.KeyTag != key.Tag {
		return ErrOtherKey
	}
	if key.err != nil {
		return key.err
	}
	return v.verify(sig, key)
}

// VerifyRevoked reports whether the loaded set is a DNSKEY RRset that holds key, which is revoked, and sig
// was made by it: the only thing a revoked key can vouch for is its revocation (RFC 5011 section 2.1).
func (v *Verifier) VerifyRevoked(sig *Sig, key *Key) error {
	_, in := slices.BinarySearchFunc(v.records, key.rdata, bytes.Compare)
	if !in || v.set.Type != dnswire.TypeDNSKEY || sig.Algorithm != key.Algorithm || sig.KeyTag != key.Tag || !key.Revoked() {
		return ErrOtherKey
	}
	if key.err != ErrRevoked {
		return key.err
	}
	return v.verify(sig, key)
}

// verify does the cryptography.
func (v *Verifier) verify(sig *Sig, key *Key) error {
	if !v.signedInput(sig) {
		return ErrSize
	}
	var digest []byte
	switch sig.Algorithm {
	case RSASHA1, RSASHA1NSEC3:
		d := sha1.Sum(v.input)
		digest = d[:]
	case RSASHA256, ECDSAP256:
		d := sha256.Sum256(v.input)
		digest = d[:]
	case ECDSAP384:
		d := sha512.Sum384(v.input)
		digest = d[:]
	case RSASHA512:
		d := sha512.Sum512(v.input)
		digest = d[:]
	}
	if !key.public.verify(v.input, digest, sig.Signature, sig.Algorithm) {
		return ErrSignature
	}
	return nil
}

// signedInput makes v.input what RFC 4034 section 3.1.8.1 says is signed, or returns false if that is beyond
// MaxInput.
func (v *Verifier) signedInput(sig *Sig) bool {
	b := append(v.input[:0], sig.head...)
	dnsname.Fold(b[sigFixed:], b[sigFixed:])

	var owner [2 + dnsname.MaxLen + 8]byte // with type, class and TTL: the same for all records
	o := owner[:0]
	if name := v.set.Name; sig.Expanded(name) {
		o = append(o, 1, '*')
		o = append(o, name.Suffix(int(sig.Labels))...)
	} else {
		o = append(o, name...)
	}
	o = binary.BigEndian.AppendUint16(o, v.set.Type)
	o = binary.BigEndian.AppendUint16(o, v.set.Class)
	o = binary.BigEndian.AppendUint32(o, sig.OriginalTTL)
	for _, r := range v.records {
		b = append(b, o...)
		b = query.AppendRData(b, r)
		if len(b) > MaxInput {
			v.input = b
			return false
		}
	}
	v.input = b
	return true
}

// A Sig is an RRSIG RDATA (RFC 4034 section 3.1), read in place: its slices are views of what was parsed.
type Sig struct {
	Covered               uint16
	Algorithm             uint8
	Labels                uint8
	OriginalTTL           uint32
	Expiration, Inception uint32 // seconds since 1970 modulo 2^32 (RFC 4034 section 3.1.5)
	KeyTag                uint16
	Signer                []byte // in wire form, letters as they came
	Signature             []byte

	head []byte // the RDATA up to the signature
}

// sigFixed is how many bytes of an RRSIG stand before the signer's name.
const sigFixed = 18

// ParseSig reads an RRSIG RDATA; false means that it is none.
func ParseSig(rdata []byte) (Sig, bool) {
	if len(rdata) <= sigFixed {
		return Sig{}, false
	}
	end := dnswire.PlainName(rdata, sigFixed)
	if end < 0 {
		return Sig{}, false
	}
	return Sig{
		Covered:     binary.BigEndian.Uint16(rdata),
		Algorithm:   rdata[2],
		Labels:      rdata[3],
		OriginalTTL: binary.BigEndian.Uint32(rdata[4:]),
		Expiration:  binary.BigEndian.Uint32(rdata[8:]),
		Inception:   binary.BigEndian.Uint32(rdata[12:]),
		KeyTag:      binary.BigEndian.Uint16(rdata[16:]),
		Signer:      rdata[sigFixed:end:end],
		Signature:   rdata[end:],
		head:        rdata[:end:end],
	}, true
}

// SignedBy reports whether the signer's name is zone.
func (s *Sig) SignedBy(zone dnsname.Name) bool {
	if len(s.Signer) != len(zone) {
		return false
	}
	var folded [dnsname.MaxLen]byte
	dnsname.Fold(folded[:], s.Signer)
	return string(folded[:len(s.Signer)]) == string(zone)
}

// SignerName returns the signer's name in canonical form. It allocates.
func (s *Sig) SignerName() dnsname.Name {
	b := make([]byte, len(s.Signer))
	dnsname.Fold(b, s.Signer)
	return dnsname.Name(b)
}

// Expanded reports whether, by the label count, data at owner was made from a wildcard (RFC 4035 section
// 5.3.2): then the closest encloser is owner.Suffix(int(s.Labels)), and that no closer match exists must be
// proved. A literal question for the wildcard itself is no expansion.
func (s *Sig) Expanded(owner dnsname.Name) bool { return int(s.Labels) < countedLabels(owner) }

// TTL returns for how long a set with this TTL may be kept on the word of s (RFC 4035 section 5.3.3): no
// longer than its original TTL, nor than until it expires, the skew of Check included.
func (s *Sig) TTL(ttl uint32, now time.Time, skew time.Duration) uint32 {
	left := int32(s.Expiration-uint32(now.Unix())) + clampSkew(skew)
	return min(ttl, s.OriginalTTL, uint32(max(left, 0)))
}

func (s *Sig) validAt(now time.Time, skew time.Duration) error {
	t, by := uint32(now.Unix()), uint32(clampSkew(skew))
	switch {
	case before(s.Expiration, s.Inception):
		return ErrTimes
	case before(s.Expiration, t-by):
		return ErrExpired
	case before(t+by, s.Inception):
		return ErrNotYetValid
	}
	return nil
}

// clampSkew keeps a skew, in seconds, small against the half circle of serial numbers.
func clampSkew(d time.Duration) int32 {
	return int32(min(max(d, 0), 365*24*time.Hour) / time.Second)
}

// before compares serial numbers (RFC 1982 section 3.2).
func before(a, b uint32) bool { return int32(a-b) < 0 }

// countedLabels counts labels as the field of an RRSIG does: without the root and without a leading asterisk
// (RFC 4034 section 3.1.3).
func countedLabels(n dnsname.Name) int {
	if n.IsWildcard() {
		return n.Labels() - 1
	}
	return n.Labels()
}

// canonical makes the names inside rdata lower case where the canonical form asks for it.
func canonical(typ uint16, rdata []byte) {
	if typ != typeA6 {
		dnswire.CanonicalRData(typ, rdata)
		return
	}
	// A6 (RFC 2874 section 3.1) is in the list of RFC 4034 section 6.2, and its name moves.
	if len(rdata) > 0 && rdata[0] <= 128 {
		if at := 1 + (128-int(rdata[0])+7)/8; at < len(rdata) && dnsname.Check(rdata[at:]) == nil {
			dnsname.Fold(rdata[at:], rdata[at:])
		}
	}
}

const typeA6 = 38
