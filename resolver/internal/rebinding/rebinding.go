// Package rebinding recognises addresses of one's own networks in answers about other people's names: DNS
// rebinding, by which a page from outside gets a browser to talk to a machine inside as if it were its own
// server.
//
// It judges A and AAAA records and the address hints of SVCB and HTTPS records by the name that owns them. A
// record that offends is left out of the response, the others stay; who leaves it out also gives up AD, the
// signature and the proof that went with the set. Names at or below a private domain may have any address.
//
// Everything is pure; a Guard is constant.
package rebinding

import (
	"net/netip"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// A Guard knows which addresses are private, and to whom.
type Guard struct {
	addresses []netip.Prefix
	domains   []dnsname.Name
}

// New returns a Guard. IPv4 networks also stand for their addresses in IPv6 (::ffff:0:0/96), which reach the
// same machine.
func New(addresses []netip.Prefix, domains []dnsname.Name) *Guard {
	return &Guard{addresses, domains}
}

// allFacts is how many bytes of facts surely hold those of the whole answer.
const allFacts = 4096

// Offends reports whether an answer to q.Turn.Current may hold something to leave out: Record then says what.
// It allocates nothing for an answer without private addresses.
func (g *Guard) Offends(q *query.Query, a *query.Answer) bool {
	owner := q.Turn.Current.Name
	var alias []byte // the owner from here on, if not nil
	for off := 0; ; {
		kind, v, next, ok := a.Facts.Next(off)
		if !ok {
			return len(a.Facts) > allFacts
		}
		switch kind {
		case query.FactAlias:
			alias = v
		case query.FactAddress:
			if !g.private(v) {
				break
			}
			if alias != nil {
				owner, alias = dnsname.Name(alias), nil
			}
			if !g.may(owner) {
				return true
			}
		}
		off = next
	}
}

// Record reports whether one record is to be left out. owner is in any case; rdata is expanded.
func (g *Guard) Record(owner []byte, typ uint16, rdata []byte) bool {
	switch typ {
	case dnswire.TypeA, dnswire.TypeAAAA:
		if !g.private(rdata) {
			return false
		}
	case dnswire.TypeSVCB, dnswire.TypeHTTPS:
		if !g.hints(rdata) {
			return false
		}
	default:
		return false
	}
	folded := make([]byte, len(owner))
	dnsname.Fold(folded, owner)
	return !g.may(dnsname.Name(folded))
}

// hints reports whether an SVCB or HTTPS record holds a private address (RFC 9460 section 7.3).
func (g *Guard) hints(rdata []byte) bool {
	target := dnswire.NameIn(dnswire.TypeSVCB, rdata, 0)
	if target == nil {
		return false
	}
	for p := rdata[2+len(target):]; len(p) >= 4; {
		code, n := dnswire.Uint16(p), 4+int(dnswire.Uint16(p[2:]))
		if n > len(p) {
			return false
		}
		size := 0
		switch code {
		case 4: // ipv4hint
			size = 4
		case 6: // ipv6hint
			size = 16
		}
		for v := p[4:n]; size > 0 && len(v) >= size; v = v[size:] {
			if g.private(v[:size]) {
				return true
			}
		}
		p = p[n:]
	}
	return false
}

func (g *Guard) private(b []byte) bool {
	a, ok := netip.AddrFromSlice(b)
	if !ok {
		return false
	}
	plain := a.Unmap()
	for i := range g.addresses {
		if g.addresses[i].Contains(plain) || g.addresses[i].Contains(a) {
			return true
		}
	}
	return false
}

// may reports whether a name is within a private domain.
func (g *Guard) may(n dnsname.Name) bool {
	for _, d := range g.domains {
		if n.IsWithin(d) {
			return true
		}
	}
	return false
}
