package query

import (
	"encoding/binary"
	"iter"
	"math"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// A Status is the security status of data (RFC 4035 section 4.3), and Unchecked for data that nobody has
// judged yet.
type Status uint8

// The statuses. Indeterminate: no trust anchor covers the name, or validation is off.
const (
	Unchecked Status = iota
	Indeterminate
	Insecure
	Secure
	Bogus
	NumStatus = iota
)

var statusNames = [NumStatus]string{"Unchecked", "Indeterminate", "Insecure", "Secure", "Bogus"}

func (s Status) String() string { return statusNames[s] }

// A Rank says how trustworthy data is by where it stood (RFC 2181 section 5.4.1); higher replaces lower.
type Rank uint8

// The ranks, lowest first.
const (
	RankNone       Rank = iota
	RankAdditional      // additional section of any response, authority section of a non-authoritative one
	RankGlue            // glue, and NS records of a referral
	RankNonAuth         // answer section of a non-authoritative response
	RankAuthority       // authority section of an authoritative response
	RankAnswer          // answer section of an authoritative response
	RankSecure          // validated
)

// An RRset is the records of one owner, type and class, with the signatures that cover them.
type RRset struct {
	Name  dnsname.Name
	Type  uint16
	Class uint16
	// TTL is the lowest of its records' (RFC 2181 section 5.2), in seconds, and what remains of it when the
	// set comes from a cache.
	TTL    uint32
	Status Status
	Rank   Rank
	// Data and Sigs (RRSIG RDATA) hold each record's RDATA, expanded, behind a 16-bit length. They are
	// immutable: sets are shared.
	Data, Sigs []byte
}

// AppendRData appends one RDATA to a Data or Sigs field. What is longer than any record can be is left out.
func AppendRData(dst, rdata []byte) []byte {
	if len(rdata) > math.MaxUint16 {
		return dst
	}
	dst = binary.BigEndian.AppendUint16(dst, uint16(len(rdata)))
	return append(dst, rdata...)
}

// RDatas iterates over a Data or Sigs field.
func RDatas(data []byte) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for len(data) >= 2 {
			n := 2 + int(binary.BigEndian.Uint16(data))
			if n > len(data) || !yield(data[2:n:n]) {
				return
			}
			data = data[n:]
		}
	}
}

// CountRData returns how many records a Data or Sigs field holds.
func CountRData(data []byte) int {
	n := 0
	for range RDatas(data) {
		n++
	}
	return n
}

// First returns the first RDATA, or nil.
func (s *RRset) First() []byte {
	for d := range RDatas(s.Data) {
		return d
	}
	return nil
}

// Is reports whether s has this owner and type.
func (s *RRset) Is(name dnsname.Name, typ uint16) bool { return s.Type == typ && s.Name == name }
