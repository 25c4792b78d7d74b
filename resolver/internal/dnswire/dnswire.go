// Package dnswire reads and edits DNS messages in place: header, question, EDNS, TTLs, records.
//
// Readers take the whole message and an offset and return the offset behind what they read, or a negative
// one if the bytes are not what they should be; they never panic and never read outside the message. Work is
// bounded: compression pointers go strictly backwards and at most MaxHops of them are followed for one name,
// and an Expander limits what all names of one message may cost together (RFC 9267).
//
// Builder writes messages into a buffer of the caller and compresses names. Nothing here allocates, except
// where a function says so. Presentation form is left to github.com/miekg/dns, behind Text.
package dnswire

import (
	"encoding/binary"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// HeaderLen is the size of a message's header (RFC 1035 section 4.1.1).
const HeaderLen = 12

// MaxMessage is the most bytes a message can have.
const MaxMessage = 65535

// Types that Sluice treats specially (IANA, DNS Parameters).
const (
	TypeA          uint16 = 1
	TypeNS         uint16 = 2
	TypeCNAME      uint16 = 5
	TypeSOA        uint16 = 6
	TypePTR        uint16 = 12
	TypeHINFO      uint16 = 13
	TypeMX         uint16 = 15
	TypeTXT        uint16 = 16
	TypeSIG        uint16 = 24
	TypeAAAA       uint16 = 28
	TypeSRV        uint16 = 33
	TypeNAPTR      uint16 = 35
	TypeDNAME      uint16 = 39
	TypeOPT        uint16 = 41
	TypeDS         uint16 = 43
	TypeRRSIG      uint16 = 46
	TypeNSEC       uint16 = 47
	TypeDNSKEY     uint16 = 48
	TypeNSEC3      uint16 = 50
	TypeNSEC3PARAM uint16 = 51
	TypeTLSA       uint16 = 52
	TypeSVCB       uint16 = 64
	TypeHTTPS      uint16 = 65
	TypeTKEY       uint16 = 249
	TypeTSIG       uint16 = 250
	TypeIXFR       uint16 = 251
	TypeAXFR       uint16 = 252
	TypeMAILB      uint16 = 253
	TypeMAILA      uint16 = 254
	TypeANY        uint16 = 255
)

// Classes.
const (
	ClassIN   uint16 = 1
	ClassCH   uint16 = 3
	ClassNONE uint16 = 254
	ClassANY  uint16 = 255
)

// Response codes, extended ones included.
const (
	RCodeNoError  uint16 = 0
	RCodeFormErr  uint16 = 1
	RCodeServFail uint16 = 2
	RCodeNXDomain uint16 = 3
	RCodeNotImp   uint16 = 4
	RCodeRefused  uint16 = 5
	RCodeYXDomain uint16 = 6
	RCodeBadVers  uint16 = 16
	RCodeBadKey   uint16 = 17
	RCodeBadCook  uint16 = 23
)

// EDNS options.
const (
	OptionNSID      uint16 = 3
	OptionSubnet    uint16 = 8
	OptionCookie    uint16 = 10
	OptionKeepAlive uint16 = 11
	OptionPadding   uint16 = 12
	OptionEDE       uint16 = 15
	OptionMAC       uint16 = 65001
	OptionMACText   uint16 = 65073
	OptionCPEID     uint16 = 65074
)

// Opcodes.
const (
	OpcodeQuery  = 0
	OpcodeNotify = 4
	OpcodeUpdate = 5
)

// Header flags, as bits of the second 16-bit word.
const (
	FlagQR uint16 = 1 << 15
	FlagAA uint16 = 1 << 10
	FlagTC uint16 = 1 << 9
	FlagRD uint16 = 1 << 8
	FlagRA uint16 = 1 << 7
	FlagAD uint16 = 1 << 5
	FlagCD uint16 = 1 << 4
)

// A Header is a message's first twelve bytes.
type Header struct {
	ID, Flags      uint16
	QD, AN, NS, AR uint16
}

// ReadHeader reads the header of msg, which has at least HeaderLen bytes.
func ReadHeader(msg []byte) Header {
	_ = msg[HeaderLen-1]
	return Header{Uint16(msg), Uint16(msg[2:]), Uint16(msg[4:]), Uint16(msg[6:]), Uint16(msg[8:]), Uint16(msg[10:])}
}

// Put writes h to the front of msg.
func (h Header) Put(msg []byte) {
	_ = msg[HeaderLen-1]
	PutUint16(msg, h.ID)
	PutUint16(msg[2:], h.Flags)
	PutUint16(msg[4:], h.QD)
	PutUint16(msg[6:], h.AN)
	PutUint16(msg[8:], h.NS)
	PutUint16(msg[10:], h.AR)
}

// Flags of a header, by name.
func (h Header) Response() bool { return h.Flags&FlagQR != 0 }
func (h Header) AA() bool       { return h.Flags&FlagAA != 0 }
func (h Header) TC() bool       { return h.Flags&FlagTC != 0 }
func (h Header) RD() bool       { return h.Flags&FlagRD != 0 }
func (h Header) RA() bool       { return h.Flags&FlagRA != 0 }
func (h Header) AD() bool       { return h.Flags&FlagAD != 0 }
func (h Header) CD() bool       { return h.Flags&FlagCD != 0 }

// Opcode returns the kind of message.
func (h Header) Opcode() int { return int(h.Flags >> 11 & 15) }

// RCode returns the four bits of the header; OPT may hold eight more.
func (h Header) RCode() uint16 { return h.Flags & 15 }

// Numbers in network order.
func Uint16(b []byte) uint16       { return binary.BigEndian.Uint16(b) }
func Uint32(b []byte) uint32       { return binary.BigEndian.Uint32(b) }
func PutUint16(b []byte, v uint16) { binary.BigEndian.PutUint16(b, v) }
func PutUint32(b []byte, v uint32) { binary.BigEndian.PutUint32(b, v) }

// PlainName returns the offset behind the uncompressed name at off, or -1.
func PlainName(msg []byte, off int) int {
	start := off
	for off < len(msg) {
		l := int(msg[off])
		off += 1 + l
		if l == 0 {
			if off-start > dnsname.MaxLen {
				return -1
			}
			return off
		}
		if l > 63 {
			return -1
		}
	}
	return -1
}

// skipName returns the offset behind the name at off, compressed or not, without following a pointer, or -1.
func skipName(msg []byte, off int) int {
	start := off
	for off < len(msg) && off-start <= dnsname.MaxLen {
		l := int(msg[off])
		switch {
		case l == 0:
			return off + 1
		case l >= 0xc0:
			if off+2 > len(msg) {
				return -1
			}
			return off + 2
		case l > 63:
			return -1
		}
		off += 1 + l
	}
	return -1
}

// MaxHops is how many compression pointers one name may follow: with strictly backward pointers a name of
// 127 labels cannot need more.
const MaxHops = 126

// An Expander expands the names of one message and bounds their total cost. The zero value is ready; use one
// for each message.
type Expander struct{ spent int }

// maxExpanded is how many bytes all names of a message may come to when expanded. A message of 64 kB full of
// pointers to long names would otherwise cost a hundred times its size.
const maxExpanded = 64 << 10

// Name writes the name at off of msg to out, expanded, letters as they are, and returns its length and the
// offset behind it in the message; the length is -1 if it is not a name or the budget is spent.
func (x *Expander) Name(msg []byte, off int, out *[dnsname.MaxLen + 1]byte) (n, next int) {
	next = -1
	limit := off // a pointer must go to before here
	for hops := 0; ; {
		if off >= len(msg) {
			return -1, -1
		}
		l := int(msg[off])
		switch {
		case l >= 0xc0:
			if off+2 > len(msg) {
				return -1, -1
			}
			if next < 0 {
				next = off + 2
			}
			to := l&0x3f<<8 | int(msg[off+1])
			if hops++; hops > MaxHops || to >= limit {
				return -1, -1
			}
			off, limit = to, to
			continue
		case l > 63:
			return -1, -1
		}
		if n+1+l > dnsname.MaxLen || off+1+l > len(msg) {
			return -1, -1
		}
		copy(out[n:], msg[off:off+1+l])
		n += 1 + l
		off += 1 + l
		if l == 0 {
			if next < 0 {
				next = off
			}
			if x.spent += n; x.spent > maxExpanded {
				return -1, -1
			}
			return n, next
		}
	}
}

// An RR is where a record stands in a message.
type RR struct {
	Type, Class uint16
	TTL         uint32
	Data, End   int // RDATA is msg[Data:End]
}

// ReadRR reads the record at off and returns it with the offset behind it, or a negative one. The owner name
// is only passed over: Expander.Name at off reads it.
func ReadRR(msg []byte, off int) (RR, int) {
	off = skipName(msg, off)
	if off < 0 || off+10 > len(msg) {
		return RR{}, -1
	}
	rr := RR{
		Type: Uint16(msg[off:]), Class: Uint16(msg[off+2:]), TTL: Uint32(msg[off+4:]),
		Data: off + 10, End: off + 10 + int(Uint16(msg[off+8:])),
	}
	if rr.End > len(msg) {
		return RR{}, -1
	}
	return rr, rr.End
}

// ClampTTL applies RFC 2181 section 8: a TTL with the top bit set is 0.
func ClampTTL(ttl uint32) uint32 {
	if ttl>>31 != 0 {
		return 0
	}
	return ttl
}
