// Package dns64 says when and how AAAA records are made of A records (RFC 6147), for clients that reach IPv4
// only through a translator.
//
// A question of type AAAA is first answered as any other. If that brought no address, or none outside
// ::ffff:0:0/96, its A records are asked for, and what they hold is put into the prefix (RFC 6052 section 2.2).
// NXDOMAIN stays NXDOMAIN. This happens on the way to one client, to answers whose security status has been
// decided; caches hold what servers said. So a denial that does not validate is never worked around (section
// 5.5), and what is made is never Secure: AD is off, where RFC 6147 would allow it. A client that validates
// itself (DO and CD) gets what there is.
//
// The well-known prefix 64:ff9b::/96 is used for private addresses as well, as other resolvers do, though RFC
// 6052 section 3.1 wants them only with a prefix of the network's own: a translator that drops such packets
// tells the client no less than the absence of an address would.
//
// Everything is pure; a Prefix is constant.
package dns64

import (
	"fmt"
	"net/netip"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// A Prefix is where IPv4 addresses are put.
type Prefix struct {
	bits  int
	bytes [16]byte
}

// New returns the prefix, or why it is none: its length must be 32, 40, 48, 56, 64 or 96. RFC 6052 section 2.2
// wants bits 64 to 71 to be zero, which only a prefix of length 96 can break; such prefixes are in use and do no
// harm here, so they are taken.
func New(p netip.Prefix) (*Prefix, error) {
	if !p.IsValid() || !p.Addr().Is6() || p.Addr().Is4In6() {
		return nil, fmt.Errorf("%s is no IPv6 network", p)
	}
	if p != p.Masked() {
		return nil, fmt.Errorf("%s has bits beyond its length; %s has not", p, p.Masked())
	}
	switch p.Bits() {
	case 32, 40, 48, 56, 64, 96:
	default:
		return nil, fmt.Errorf("%s: the length of a DNS64 prefix is 32, 40, 48, 56, 64 or 96 (RFC 6052 section 2.2)", p)
	}
	return &Prefix{bits: p.Bits(), bytes: p.Addr().As16()}, nil
}

// reserved is the byte that no part of an address stands in.
const reserved = 8

// Embed returns the IPv6 address for an IPv4 address.
func (p *Prefix) Embed(v4 [4]byte) (v6 [16]byte) {
	v6 = p.bytes
	at := p.bits / 8
	for _, b := range v4 {
		if at == reserved {
			at++
		}
		v6[at] = b
		at++
	}
	return v6
}

// Extract returns the IPv4 address in an IPv6 address, if it is within the prefix and in its form.
func (p *Prefix) Extract(v6 [16]byte) (v4 [4]byte, ok bool) {
	at := p.bits / 8
	for i := range v4 {
		if at == reserved {
			at++
		}
		v4[i] = v6[at]
		at++
	}
	return v4, p.Embed(v4) == v6
}

// Wanted reports whether the question that a answers is to be answered by its A records: it is of type AAAA,
// and the answer is no error and has no address, or none that counts.
func (p *Prefix) Wanted(q *query.Query, a *query.Answer) bool {
	cur := &q.Turn.Current
	if cur.Type != dnswire.TypeAAAA || cur.Class != dnswire.ClassIN || a.RCode != dnswire.RCodeNoError || cur.DO && cur.CD {
		return false
	}
	any, excluded := addresses(a)
	return any == excluded
}

// Excludes reports whether an answer holds addresses that do not count beside others.
func (p *Prefix) Excludes(q *query.Query, a *query.Answer) bool {
	cur := &q.Turn.Current
	if cur.Type != dnswire.TypeAAAA || cur.DO && cur.CD {
		return false
	}
	_, excluded := addresses(a)
	return excluded > 0
}

func addresses(a *query.Answer) (all, excluded int) {
	for off := 0; ; {
		kind, v, next, ok := a.Facts.Next(off)
		if !ok {
			return all, excluded
		}
		if kind == query.FactAddress {
			all++
			if Excluded(v) {
				excluded++
			}
		}
		off = next
	}
}

// Excluded reports whether the RDATA of an AAAA record is an IPv4 address in disguise, which no IPv6 network
// carries (RFC 6147 section 5.1.4).
func Excluded(rdata []byte) bool {
	if len(rdata) != 16 || rdata[10] != 0xff || rdata[11] != 0xff {
		return false
	}
	for _, b := range rdata[:10] {
		if b != 0 {
			return false
		}
	}
	return true
}

// ip6arpa and inAddrArpa are where reverse names are.
var (
	ip6arpa    = dnsname.MustParse("ip6.arpa.")
	inAddrArpa = dnsname.MustParse("in-addr.arpa.")
)

// Reverse returns the reverse name of the IPv4 address whose IPv6 address the given reverse name stands for:
// PTR questions about addresses in the prefix are answered by an alias to it (RFC 6147 section 5.3.1).
func (p *Prefix) Reverse(n dnsname.Name) (dnsname.Name, bool) {
	const nibbles = 32
	if len(n) != 2*nibbles+len(ip6arpa) || n[2*nibbles:] != ip6arpa {
		return "", false
	}
	var v6 [16]byte
	for i := range nibbles {
		if n[2*i] != 1 {
			return "", false
		}
		c := n[2*i+1]
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		default:
			return "", false
		}
		v6[15-i/2] |= c << (4 * (i % 2))
	}
	v4, ok := p.Extract(v6)
	if !ok {
		return "", false
	}
	var b []byte
	for i := len(v4) - 1; i >= 0; i-- {
		label := fmt.Appendf(nil, "%d", v4[i])
		b = append(append(b, byte(len(label))), label...)
	}
	return dnsname.Name(b) + inAddrArpa, true
}
