package rrsig

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"encoding/binary"
	"math/big"
	"math/bits"

	"github.com/cloudflare/circl/sign/ed448"
)

// Algorithms whose signatures can be verified (IANA, DNSSEC Algorithm Numbers).
const (
	RSASHA1      = 5 // RFC 3110
	RSASHA1NSEC3 = 7 // RFC 5155
	RSASHA256    = 8 // RFC 5702
	RSASHA512    = 10
	ECDSAP256    = 13 // RFC 6605
	ECDSAP384    = 14
	Ed25519      = 15 // RFC 8080
	Ed448        = 16
)

// Supported reports whether signatures of an algorithm can be verified here.
func Supported(algorithm uint8) bool {
	switch algorithm {
	case RSASHA1, RSASHA1NSEC3, RSASHA256, RSASHA512, ECDSAP256, ECDSAP384, Ed25519, Ed448:
		return true
	}
	return false
}

// UsesSHA1 reports whether an algorithm's signatures rest on SHA-1 alone, so that operators should take zones
// signed by it for insecure (RFC 9905 section 2).
func UsesSHA1(algorithm uint8) bool { return algorithm == RSASHA1 || algorithm == RSASHA1NSEC3 }

// Flags of a DNSKEY.
const (
	FlagZone   = 0x0100 // RFC 4034 section 2.1.1
	FlagRevoke = 0x0080 // RFC 5011 section 7
	FlagSEP    = 0x0001
)

// Limits on RSA keys: beyond them a verification costs too much, below them it says too little.
const (
	minModulus  = 1024 // bits
	maxModulus  = 4096 // bits
	maxExponent = 35   // bits
)

// A Key is a DNSKEY, read once: finding and checking the point of a key costs a good part of a verification.
// It is immutable and safe for concurrent use.
type Key struct {
	Flags     uint16
	Protocol  uint8
	Algorithm uint8
	Tag       uint16 // RFC 4034 appendix B; not unique

	rdata  []byte
	public publicKey // nil if err says so
	err    error
}

// ParseKey reads a DNSKEY RDATA, which the key keeps, so it must not change. It returns nil only if there is
// not even the fixed part; a key that cannot be used for another reason is returned, for its tag counts, and
// its Err says why.
func ParseKey(rdata []byte) *Key {
	if len(rdata) < keyFixed {
		return nil
	}
	k := &Key{
		Flags:     binary.BigEndian.Uint16(rdata),
		Protocol:  rdata[2],
		Algorithm: rdata[3],
		Tag:       KeyTag(rdata),
		rdata:     rdata,
	}
	k.public, k.err = parsePublic(k.Algorithm, rdata[keyFixed:])
	switch {
	case k.err != nil:
	case k.Flags&FlagZone == 0 || k.Protocol != 3: // RFC 4034 sections 2.1.1 and 2.1.2
		k.err = ErrNotZone
	case k.Flags&FlagRevoke != 0:
		k.err = ErrRevoked
	}
	return k
}

// keyFixed is how many bytes of a DNSKEY stand before the public key.
const keyFixed = 4

// Err says why the key verifies nothing: ErrAlgorithm, ErrKey, ErrNotZone, ErrRevoked; nil if it can.
func (k *Key) Err() error { return k.err }

// RData returns what the key was read from. It must not be changed.
func (k *Key) RData() []byte { return k.rdata }

// Revoked reports whether the key has the REVOKE flag.
func (k *Key) Revoked() bool { return k.Flags&FlagRevoke != 0 }

// SEP reports whether the key has the flag of a secure entry point, a hint that it signs keys.
func (k *Key) SEP() bool { return k.Flags&FlagSEP != 0 }

// KeyTag computes the key tag of a DNSKEY RDATA of at least four bytes (RFC 4034 appendix B).
func KeyTag(rdata []byte) uint16 {
	if rdata[3] == 1 { // RSA/MD5 has a rule of its own (appendix B.1)
		if n := len(rdata); n >= keyFixed+3 {
			return binary.BigEndian.Uint16(rdata[n-3:])
		}
		return 0
	}
	var sum uint32 // at most 65535 bytes: below 2^31
	for i, b := range rdata {
		if i&1 == 0 {
			sum += uint32(b) << 8
		} else {
			sum += uint32(b)
		}
	}
	sum += sum >> 16
	return uint16(sum)
}

// A publicKey verifies one signature: over digest, or over message where the algorithm hashes itself.
type publicKey interface {
	verify(message, digest, signature []byte, algorithm uint8) bool
}

func parsePublic(algorithm uint8, b []byte) (publicKey, error) {
	switch algorithm {
	case RSASHA1, RSASHA1NSEC3, RSASHA256, RSASHA512:
		return parseRSA(b)
	case ECDSAP256:
		return parseECDSA(elliptic.P256(), b)
	case ECDSAP384:
		return parseECDSA(elliptic.P384(), b)
	case Ed25519:
		if len(b) != ed25519.PublicKeySize {
			return nil, ErrKey
		}
		return ed25519Key(b), nil
	case Ed448:
		if len(b) != ed448.PublicKeySize {
			return nil, ErrKey
		}
		return ed448Key(b), nil
	}
	return nil, ErrAlgorithm
}

// rsaKey verifies by crypto/rsa, but for exponents beyond its reach.
type rsaKey struct {
	rsa.PublicKey
	// exponent is set if it is beyond 31 bits, which crypto/rsa refuses: 2^32+1 was a choice of BIND's key
	// generator.
	exponent *big.Int
}

// parseRSA reads a key as RFC 3110 section 2 has it. Leading zeros, which it forbids, are passed over as
// other validators do.
func parseRSA(b []byte) (publicKey, error) {
	if len(b) < 1 {
		return nil, ErrKey
	}
	n := int(b[0])
	b = b[1:]
	if n == 0 {
		if len(b) < 2 {
			return nil, ErrKey
		}
		n = int(binary.BigEndian.Uint16(b))
		b = b[2:]
	}
	if n == 0 || n >= len(b) {
		return nil, ErrKey
	}
	exponent, modulus := trimZeros(b[:n]), trimZeros(b[n:])
	if len(exponent) == 0 || len(modulus) == 0 {
		return nil, ErrKey
	}
	if l := bitLen(modulus); l < minModulus || l > maxModulus || bitLen(exponent) > maxExponent {
		return nil, ErrAlgorithm
	}
	var e uint64
	for _, c := range exponent {
		e = e<<8 | uint64(c)
	}
	if e < 3 || e&1 == 0 || modulus[len(modulus)-1]&1 == 0 {
		return nil, ErrKey // no exponent, or no modulus, that RSA could have
	}
	k := &rsaKey{PublicKey: rsa.PublicKey{N: new(big.Int).SetBytes(modulus), E: int(e & (1<<31 - 1))}}
	if e >= 1<<31 {
		k.exponent = new(big.Int).SetUint64(e)
	}
	return k, nil
}

func trimZeros(b []byte) []byte {
	for len(b) > 0 && b[0] == 0 {
		b = b[1:]
	}
	return b
}

// bitLen is the length in bits of a number without leading zero bytes.
func bitLen(b []byte) int { return len(b)*8 - bits.LeadingZeros8(b[0]) }

func (k *rsaKey) verify(_, digest, signature []byte, algorithm uint8) bool {
	var h crypto.Hash
	switch algorithm {
	case RSASHA1, RSASHA1NSEC3:
		h = crypto.SHA1
	case RSASHA256:
		h = crypto.SHA256
	case RSASHA512:
		h = crypto.SHA512
	default:
		return false
	}
	if k.exponent != nil {
		return k.verifyBig(h, digest, signature)
	}
	return rsa.VerifyPKCS1v15(&k.PublicKey, h, digest, signature) == nil
}

// ecdsaKey verifies ECDSA signatures on one curve.
type ecdsaKey struct{ ecdsa.PublicKey }

func parseECDSA(curve elliptic.Curve, b []byte) (publicKey, error) {
	size := (curve.Params().BitSize + 7) / 8
	if len(b) != 2*size {
		return nil, ErrKey
	}
	var point [1 + 2*48]byte
	point[0] = 4 // uncompressed
	copy(point[1:], b)
	p, err := ecdsa.ParseUncompressedPublicKey(curve, point[:1+2*size])
	if err != nil {
		return nil, ErrKey
	}
	return &ecdsaKey{*p}, nil
}

func (k *ecdsaKey) verify(_, digest, signature []byte, _ uint8) bool {
	size := (k.Curve.Params().BitSize + 7) / 8
	if len(signature) != 2*size { // RFC 6605 section 4: r and s, nothing else
		return false
	}
	var der [8 + 2*(48+1)]byte
	n := copy(der[:], []byte{0x30, 0})
	n = appendInteger(der[:], n, signature[:size])
	n = appendInteger(der[:], n, signature[size:])
	der[1] = byte(n - 2) // at most 102: the short form
	return ecdsa.VerifyASN1(&k.PublicKey, digest, der[:n])
}

// appendInteger writes an ASN.1 INTEGER at der[n:] and returns its end.
func appendInteger(der []byte, n int, v []byte) int {
	v = trimZeros(v)
	pad := 0
	if len(v) == 0 || v[0]&0x80 != 0 {
		pad = 1
	}
	der[n], der[n+1] = 2, byte(pad+len(v))
	n += 2 + pad // the padding is zero already
	return n + copy(der[n:], v)
}

type ed25519Key ed25519.PublicKey

func (k ed25519Key) verify(message, _, signature []byte, _ uint8) bool {
	return len(signature) == ed25519.SignatureSize && ed25519.Verify(ed25519.PublicKey(k), message, signature)
}

type ed448Key ed448.PublicKey

func (k ed448Key) verify(message, _, signature []byte, _ uint8) bool {
	return len(signature) == ed448.SignatureSize && ed448.Verify(ed448.PublicKey(k), message, signature, "")
}
