package rulelist

// The types that rules give data for.
const (
	typeA     = 1
	typeNS    = 2
	typeCNAME = 5
	typePTR   = 12
	typeMX    = 15
	typeTXT   = 16
	typeAAAA  = 28
	typeSRV   = 33
	typeDNAME = 39
	typeSVCB  = 64
	typeHTTPS = 65
)

// typeCode holds the record types by their names (IANA, "Resource Record (RR) TYPEs", query types included).
var typeCode = map[string]uint16{
	"A": 1, "NS": 2, "MD": 3, "MF": 4, "CNAME": 5, "SOA": 6, "MB": 7, "MG": 8, "MR": 9, "NULL": 10, "WKS": 11,
	"PTR": 12, "HINFO": 13, "MINFO": 14, "MX": 15, "TXT": 16, "RP": 17, "AFSDB": 18, "X25": 19, "ISDN": 20,
	"RT": 21, "NSAP": 22, "NSAP-PTR": 23, "SIG": 24, "KEY": 25, "PX": 26, "GPOS": 27, "AAAA": 28, "LOC": 29,
	"NXT": 30, "EID": 31, "NIMLOC": 32, "SRV": 33, "ATMA": 34, "NAPTR": 35, "KX": 36, "CERT": 37, "A6": 38,
	"DNAME": 39, "SINK": 40, "OPT": 41, "APL": 42, "DS": 43, "SSHFP": 44, "IPSECKEY": 45, "RRSIG": 46,
	"NSEC": 47, "DNSKEY": 48, "DHCID": 49, "NSEC3": 50, "NSEC3PARAM": 51, "TLSA": 52, "SMIMEA": 53, "HIP": 55,
	"NINFO": 56, "RKEY": 57, "TALINK": 58, "CDS": 59, "CDNSKEY": 60, "OPENPGPKEY": 61, "CSYNC": 62,
	"ZONEMD": 63, "SVCB": 64, "HTTPS": 65, "DSYNC": 66, "SPF": 99, "UINFO": 100, "UID": 101, "GID": 102,
	"UNSPEC": 103, "NID": 104, "L32": 105, "L64": 106, "LP": 107, "EUI48": 108, "EUI64": 109, "NXNAME": 128,
	"TKEY": 249, "TSIG": 250, "IXFR": 251, "AXFR": 252, "MAILB": 253, "MAILA": 254, "ANY": 255, "URI": 256,
	"CAA": 257, "AVC": 258, "DOA": 259, "AMTRELAY": 260, "RESINFO": 261, "WALLET": 262, "CLA": 263, "IPN": 264,
	"TA": 32768, "DLV": 32769,
}

var typeName = func() map[uint16]string {
	m := make(map[uint16]string, len(typeCode))
	for n, c := range typeCode {
		m[c] = n
	}
	return m
}()

// TypeCode returns the record type of that name, in any case.
func TypeCode(name string) (uint16, bool) {
	t, ok := typeCode[name]
	return t, ok
}

// rcode holds the response codes that a header can carry, by name.
var rcode = map[string]uint16{
	"NOERROR": 0, "FORMERR": 1, "SERVFAIL": 2, "NXDOMAIN": 3, "NOTIMP": 4, "REFUSED": 5, "YXDOMAIN": 6,
	"YXRRSET": 7, "NXRRSET": 8, "NOTAUTH": 9, "NOTZONE": 10,
}

// RCodeName returns the name of a response code of a Rewrite.
func RCodeName(code uint16) string {
	for n, c := range rcode {
		if c == code {
			return n
		}
	}
	return ""
}
