package rrsig

import (
	"bytes"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/binary"
	"hash"
	"iter"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Digest types of a DS that are supported (IANA, DS RR Type Digest Algorithms).
const (
	DigestSHA1   = 1
	DigestSHA256 = 2
	DigestSHA384 = 4
)

// A DS is the RDATA of a DS record (RFC 4034 section 5.1), read in place: Digest is a view.
type DS struct {
	KeyTag     uint16
	Algorithm  uint8
	DigestType uint8
	Digest     []byte
}

// ParseDS reads a DS RDATA; false means that it is none.
func ParseDS(rdata []byte) (DS, bool) {
	if len(rdata) < 4 {
		return DS{}, false
	}
	return DS{binary.BigEndian.Uint16(rdata), rdata[2], rdata[3], rdata[4:]}, true
}

// Supported reports whether both the algorithm of the key and the digest are known here. A delegation all of
// whose DS are not is insecure (RFC 4035 section 5.2, RFC 6840 section 5.2).
func (d *DS) Supported() bool {
	return Supported(d.Algorithm) && (d.DigestType == DigestSHA1 || d.DigestType == DigestSHA256 || d.DigestType == DigestSHA384)
}

// Matches reports whether d stands for this key of the zone owner. It costs a hash, and only if tag and
// algorithm agree.
func (d *DS) Matches(owner dnsname.Name, key *Key) bool {
	if d.KeyTag != key.Tag || d.Algorithm != key.Algorithm {
		return false
	}
	sum := Digest(d.DigestType, owner, key.rdata)
	return sum != nil && bytes.Equal(sum, d.Digest)
}

// Digest returns the digest of a DNSKEY RDATA for a DS (RFC 4034 section 5.1.4), nil if the type is not
// supported.
func Digest(digestType uint8, owner dnsname.Name, dnskey []byte) []byte {
	var h hash.Hash
	switch digestType {
	case DigestSHA1:
		h = sha1.New()
	case DigestSHA256:
		h = sha256.New()
	case DigestSHA384:
		h = sha512.New384()
	default:
		return nil
	}
	h.Write([]byte(owner))
	h.Write(dnskey)
	return h.Sum(nil)
}

// UsableDS iterates over those DS of an RRset's Data that decide about the zone: of a supported algorithm and
// digest type, accepted by accept if it is not nil, and not by SHA-1 where such a one has a better digest (RFC
// 4509 section 3). None: the zone is insecure, provided that the set itself is Secure.
func UsableDS(data []byte, accept func(algorithm uint8) bool) iter.Seq[DS] {
	usable := func(rdata []byte) (DS, bool) {
		d, ok := ParseDS(rdata)
		return d, ok && d.Supported() && (accept == nil || accept(d.Algorithm))
	}
	return func(yield func(DS) bool) {
		better := false
		for rdata := range query.RDatas(data) {
			if d, ok := usable(rdata); ok && d.DigestType != DigestSHA1 {
				better = true
			}
		}
		for rdata := range query.RDatas(data) {
			if d, ok := usable(rdata); ok && !(better && d.DigestType == DigestSHA1) && !yield(d) {
				return
			}
		}
	}
}
