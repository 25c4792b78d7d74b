package denial

import (
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
)

// typeNXNAME marks, in compact denial, a name that does not exist (RFC 9824 section 2).
const typeNXNAME = 128

// A bitmap is the type bit maps of an NSEC or NSEC3 record (RFC 4034 section 4.1.2).
type bitmap []byte

// valid reports whether b is well formed.
func (b bitmap) valid() bool { return dnswire.CheckTypes(b) }

// has reports whether a valid b lists typ.
func (b bitmap) has(typ uint16) bool {
	for len(b) > 0 {
		window, n := b[0], int(b[1])
		if window == byte(typ>>8) {
			at := int(typ&0xff) / 8
			return at < n && b[2+at]&(0x80>>(typ&7)) != 0
		}
		b = b[2+n:]
	}
	return false
}

// delegates reports whether it is the parent side of a zone cut that b speaks of.
func (b bitmap) delegates() bool { return b.has(dnswire.TypeNS) && !b.has(dnswire.TypeSOA) }

// foreignBelow reports whether names below the owner are not this zone's to deny: they are delegated or, by a
// DNAME, stand elsewhere.
func (b bitmap) foreignBelow() bool { return b.delegates() || b.has(dnswire.TypeDNAME) }

// lack returns why b, the types at owner, does not deny that there is data of a type, or "".
func (b bitmap) lack(typ uint16, owner, zone dnsname.Name) string {
	switch {
	case b.has(typ):
		return reasonType
	case b.has(dnswire.TypeCNAME): // RFC 6840 section 4.3
		return reasonAlias
	case typ == dnswire.TypeANY && len(b) > 0: // RFC 6840 section 4.2
		return reasonType
	case typ == dnswire.TypeDS:
		// The root has no parent to ask.
		if owner != dnsname.Root && (owner == zone || b.has(dnswire.TypeSOA)) {
			return reasonApex
		}
	case b.delegates(): // RFC 6840 section 4.1
		return reasonParent
	}
	return ""
}

// cut tells what b, the types at a name below the apex, says of it as a zone cut, or why it says nothing.
func (b bitmap) cut() (Cut, string) {
	switch {
	case b.has(dnswire.TypeDS):
		return Unproven, reasonType
	case b.has(dnswire.TypeSOA):
		return Unproven, reasonApex
	case b.has(dnswire.TypeNS):
		return InsecureCut, ""
	}
	return NoCut, ""
}
