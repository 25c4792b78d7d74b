package dnswire

import (
	"fmt"
	"io"
	"strings"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// A Record is one record in expanded wire form, read from presentation form.
type Record struct {
	Name  dnsname.Name
	Type  uint16
	Class uint16
	TTL   uint32
	Data  []byte
}

// ParseRecords reads records in zone-file syntax. origin completes relative names, ttl is the default TTL,
// file names the text in errors, which give the line. $INCLUDE is refused: a text never opens a file.
func ParseRecords(text, origin, file string, ttl uint32) ([]Record, error) {
	var out []Record
	err := EachRecord(strings.NewReader(text), origin, file, ttl, func(r Record) error {
		out = append(out, r)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// EachRecord is ParseRecords for texts that are too long to be held: it calls f with one record after the other
// until f returns an error, which it returns.
func EachRecord(text io.Reader, origin, file string, ttl uint32, f func(Record) error) error {
	p := dns.NewZoneParser(text, origin, file)
	p.SetDefaultTTL(ttl)
	p.SetIncludeAllowed(false)
	for rr, ok := p.Next(); ok; rr, ok = p.Next() {
		r, err := fromRR(rr)
		if err != nil {
			return fmt.Errorf("%s: %s: %w", file, rr.Header().Name, err)
		}
		if err := f(r); err != nil {
			return err
		}
	}
	return p.Err()
}

func fromRR(rr dns.RR) (Record, error) {
	buf := make([]byte, dns.Len(rr)+16)
	n, err := dns.PackRR(rr, buf, 0, nil, false)
	if err != nil {
		return Record{}, err
	}
	name := PlainName(buf[:n], 0)
	w, next := ReadRR(buf[:n], 0)
	if name < 0 || next != n {
		return Record{}, fmt.Errorf("%s cannot be packed", dns.TypeToString[rr.Header().Rrtype])
	}
	r := Record{Type: w.Type, Class: w.Class, TTL: w.TTL, Data: append([]byte(nil), buf[w.Data:w.End]...)}
	if !CheckRData(r.Type, r.Data) { // the library reads a line that ends behind the type
		return Record{}, fmt.Errorf("the data of the %s record is missing or malformed", TypeText(r.Type))
	}
	dnsname.Fold(buf[:name], buf[:name])
	r.Name = dnsname.Name(buf[:name])
	return r, nil
}

// Text returns RDATA, which is expanded, in presentation form; what cannot be read is given as RFC 3597 has
// it for unknown types.
func Text(typ uint16, rdata []byte) string {
	msg := []byte{0, byte(typ >> 8), byte(typ), 0, 1, 0, 0, 0, 0, byte(len(rdata) >> 8), byte(len(rdata))}
	msg = append(msg, rdata...)
	rr, _, err := dns.UnpackRR(msg, 0)
	if err != nil {
		return fmt.Sprintf("\\# %d %x", len(rdata), rdata)
	}
	return strings.TrimSpace(strings.TrimPrefix(rr.String(), rr.Header().String()))
}

// TypeText returns the mnemonic of a type, TYPE123 for one without.
func TypeText(typ uint16) string { return dns.Type(typ).String() }

// ParseType reads a mnemonic or TYPE123, in any case.
func ParseType(s string) (uint16, error) {
	s = strings.ToUpper(s)
	if t, ok := dns.StringToType[s]; ok {
		return t, nil
	}
	var n uint16
	if rest, ok := strings.CutPrefix(s, "TYPE"); ok {
		if _, err := fmt.Sscanf(rest, "%d", &n); err == nil && fmt.Sprint(n) == rest {
			return n, nil
		}
	}
	return 0, fmt.Errorf("%q is not a record type; write for example AAAA or TYPE65", s)
}

// RCodeText returns the mnemonic of a response code.
func RCodeText(rcode uint16) string {
	if s, ok := dns.RcodeToString[int(rcode)]; ok {
		return s
	}
	return fmt.Sprintf("RCODE%d", rcode)
}
