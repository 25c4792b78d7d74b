package dnswire

import "github.com/sluice-dns/sluice/resolver/internal/dnsname"

// A layout says where names stand in RDATA: after lead bytes, names of them, then at least tail bytes more.
// rest allows bytes beyond the tail. strings character-strings follow the lead bytes (NAPTR).
type layout struct {
	lead, names, tail uint8
	rest              bool
	strings           uint8
	// compress: we may compress these names when sending (RFC 3597 section 4: only types of RFC 1035).
	compress bool
	// fixed: the RDATA has no name and exactly lead bytes.
	fixed bool
}

// layouts of the types that hold names, or whose RDATA has one size. Names of the types of RFC 1035 and, by
// RFC 3597 section 4, of RP, AFSDB, RT, SIG, PX, NXT, NAPTR and SRV may arrive compressed; for the others a
// pointer is a malformed record.
func layoutOf(typ uint16) (l layout, acceptPointers, known bool) {
	switch typ {
	case TypeA:
		return layout{lead: 4, fixed: true}, false, true
	case TypeAAAA:
		return layout{lead: 16, fixed: true}, false, true
	case TypeNS, 3, 4, TypeCNAME, 7, 8, 9, TypePTR: // MD MF MB MG MR
		return layout{names: 1, compress: true}, true, true
	case TypeSOA:
		return layout{names: 2, tail: 20, compress: true}, true, true
	case 14: // MINFO
		return layout{names: 2, compress: true}, true, true
	case TypeMX:
		return layout{lead: 2, names: 1, compress: true}, true, true
	case 17: // RP
		return layout{names: 2}, true, true
	case 18, 21, 36: // AFSDB RT KX
		return layout{lead: 2, names: 1}, true, true
	case 26: // PX
		return layout{lead: 2, names: 2}, true, true
	case TypeSRV:
		return layout{lead: 6, names: 1}, true, true
	case TypeNAPTR:
		return layout{lead: 4, strings: 3, names: 1}, true, true
	case TypeDNAME:
		return layout{names: 1}, true, true
	case TypeSIG, TypeRRSIG:
		return layout{lead: 18, names: 1, rest: true}, typ == TypeSIG, true
	case TypeNSEC, 30: // NXT
		return layout{names: 1, rest: true}, typ == 30, true
	case TypeSVCB, TypeHTTPS:
		return layout{lead: 2, names: 1, rest: true}, false, true
	case TypeDS, 59: // CDS
		return layout{lead: 5, rest: true}, false, true
	case TypeDNSKEY, 60: // CDNSKEY
		return layout{lead: 4, rest: true}, false, true
	case 62: // CSYNC
		return layout{lead: 6, rest: true}, false, true
	case 104, 106: // NID L64
		return layout{lead: 10, fixed: true}, false, true
	case 105, 108: // L32 EUI48
		return layout{lead: 6, fixed: true}, false, true
	case 107: // LP
		return layout{lead: 2, names: 1}, false, true
	case 109: // EUI64
		return layout{lead: 8, fixed: true}, false, true
	case TypeNSEC3, TypeNSEC3PARAM:
		return layout{lead: 5, rest: true}, false, true
	case TypeTLSA, 53: // SMIMEA
		return layout{lead: 3, rest: true}, false, true
	case 44: // SSHFP
		return layout{lead: 2, rest: true}, false, true
	case 256: // URI
		return layout{lead: 4, rest: true}, false, true
	}
	return layout{rest: true}, false, false
}

// AppendRData appends the RDATA of rr to dst with its names expanded, letters as they are, or returns false
// if it is malformed for its type.
func (x *Expander) AppendRData(dst, msg []byte, rr RR) ([]byte, bool) {
	l, pointers, _ := layoutOf(rr.Type)
	b := msg[rr.Data:rr.End]
	if l.fixed {
		return append(dst, b...), len(b) == int(l.lead)
	}
	if len(b) < int(l.lead) {
		return dst, false
	}
	off := rr.Data + int(l.lead)
	for range l.strings {
		if off >= rr.End {
			return dst, false
		}
		off += 1 + int(msg[off])
	}
	if off > rr.End {
		return dst, false
	}
	dst = append(dst, msg[rr.Data:off]...)
	for range l.names {
		if !pointers {
			end := PlainName(msg[:rr.End], off)
			if end < 0 {
				return dst, false
			}
			dst = append(dst, msg[off:end]...)
			off = end
			continue
		}
		var name [dnsname.MaxLen + 1]byte
		n, next := x.Name(msg, off, &name)
		if n < 0 || next > rr.End {
			return dst, false
		}
		dst = append(dst, name[:n]...)
		off = next
	}
	if left := rr.End - off; left < int(l.tail) || left > int(l.tail) && !l.rest {
		return dst, false
	}
	return append(dst, msg[off:rr.End]...), checkRest(rr.Type, msg[rr.Data:rr.End], msg[off:rr.End])
}

// checkRest reports whether what follows the last name in rdata is built as its type asks for. Of types that are
// not listed anything will do: the parameters of SVCB, which may grow, are for clients to judge.
func checkRest(typ uint16, rdata, rest []byte) bool {
	switch typ {
	case TypeNSEC:
		return CheckTypes(rest)
	case 62: // CSYNC
		return CheckTypes(rdata[6:])
	case TypeNSEC3: // hash algorithm, flags, iterations, salt, hash, types
		hash := 5 + int(rdata[4])
		return hash < len(rdata) && rdata[hash] > 0 && hash+1+int(rdata[hash]) <= len(rdata) && CheckTypes(rdata[hash+1+int(rdata[hash]):])
	case TypeNSEC3PARAM:
		return len(rdata) == 5+int(rdata[4])
	case TypeTXT, 99: // SPF
		return len(rdata) > 0 && skipStrings(rdata) >= 0
	case TypeHINFO:
		return skipStrings(rdata) == 2
	case 257: // CAA: flags, the tag, its value
		return len(rdata) > 2 && rdata[1] > 0 && 2+int(rdata[1]) <= len(rdata)
	}
	return true
}

// skipStrings returns how many character-strings b consists of, or -1 if it does not.
func skipStrings(b []byte) (n int) {
	for ; len(b) > 0; n++ {
		if 1+int(b[0]) > len(b) {
			return -1
		}
		b = b[1+int(b[0]):]
	}
	return n
}

// CheckTypes reports whether b is well formed as type bit maps (RFC 4034 section 4.1.2): windows in ascending order,
// each of 1 to 32 bytes. None at all is well formed, for NSEC3 records of empty non-terminals.
func CheckTypes(b []byte) bool {
	last := -1
	for len(b) > 0 {
		if len(b) < 3 || int(b[0]) <= last || b[1] == 0 || b[1] > 32 || len(b) < 2+int(b[1]) {
			return false
		}
		last = int(b[0])
		b = b[2+int(b[1]):]
	}
	return true
}

// CheckRData reports whether rdata, which is expanded, is well formed for its type.
func CheckRData(typ uint16, rdata []byte) bool {
	l, _, _ := layoutOf(typ)
	if l.fixed {
		return len(rdata) == int(l.lead)
	}
	off := int(l.lead)
	for range l.strings {
		if off >= len(rdata) {
			return false
		}
		off += 1 + int(rdata[off])
	}
	for range l.names {
		if off = PlainName(rdata, off); off < 0 {
			return false
		}
	}
	left := len(rdata) - off
	return left >= int(l.tail) && (l.rest || left == int(l.tail)) && checkRest(typ, rdata, rdata[off:])
}

// NameIn returns the k-th name (from 0) in expanded RDATA as a view, or nil: the target of a CNAME, the
// exchange of an MX record, the signer of an RRSIG record.
func NameIn(typ uint16, rdata []byte, k int) []byte {
	l, _, _ := layoutOf(typ)
	if k >= int(l.names) || len(rdata) < int(l.lead) {
		return nil
	}
	off := int(l.lead)
	for range l.strings {
		if off >= len(rdata) {
			return nil
		}
		off += 1 + int(rdata[off])
	}
	for ; ; k-- {
		end := PlainName(rdata, off)
		if end < 0 {
			return nil
		}
		if k == 0 {
			return rdata[off:end]
		}
		off = end
	}
}

// CanonicalRData makes the names inside expanded rdata lower case, in place, where RFC 4034 section 6.2 as
// corrected by RFC 6840 section 5.1 asks for it: not in NSEC, nor in types that came later (SVCB).
func CanonicalRData(typ uint16, rdata []byte) {
	l, _, known := layoutOf(typ)
	if !known || l.names == 0 || typ == TypeNSEC || typ == TypeSVCB || typ == TypeHTTPS {
		return
	}
	for k := range int(l.names) {
		if n := NameIn(typ, rdata, k); n != nil {
			dnsname.Fold(n, n)
		}
	}
}
