package dnswire

import (
	"bytes"
	"encoding/hex"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// records has one of each kind of layout.
const records = `
$ORIGIN example.
@ 3600 SOA ns.example. host.example. 1 2 3 4 5
@ NS ns.example.
www A 192.0.2.1
www AAAA 2001:db8::1
alias CNAME www.Example.
old DNAME new.example.
@ MX 10 mail.example.
_s._tcp SRV 1 2 53 www.example.
n NAPTR 1 2 "u" "E2U+sip" "!^.*$!sip:x@example!" www.example.
p PX 10 a.example. b.example.
rp RP a.example. b.example.
txt TXT "one" "two"
h HTTPS 1 . alpn=h2 ipv4hint=192.0.2.1
d DS 1 13 2 3A5E9F5C2D2B3B0E0C0D0A0908070605040302010F0E0D0C0B0A090807060504
k DNSKEY 257 3 13 oJMRESz5E4gYzS/q6XDrvU1qMPYIjCWzJaOau8XNEZeqCYKD5ar0IRd8KqXXFJkqmVfRvMGPmM1x8fGAa2XhSA==
s NSEC t.example. A RRSIG
u TYPE65280 \# 3 010203
www RRSIG A 13 2 3600 20300101000000 20200101000000 1 example. oJMRESz5E4gYzS/q6XDrvU1qMPYIjCWzJaOau8XNEZeqCYKD5ar0IRd8KqXXFJkqmVfRvMGPmM1x8fGAa2XhSA==
`

// Every record goes through ParseRecords and Builder into a compressed message that miekg/dns reads as the
// same records, and back through Expander.
func TestBuilderAndExpander(t *testing.T) {
	rs, err := ParseRecords(records, ".", "records", 3600)
	if err != nil {
		t.Fatal(err)
	}
	var b Builder
	b.Reset(make([]byte, 0, 4096))
	b.Question([]byte("\x03WWW\x07example\x00"), TypeA, ClassIN)
	plain := 0
	for _, r := range rs {
		if !b.RR([]byte(r.Name), r.Type, r.Class, r.TTL, r.Data) {
			t.Fatalf("%s %s does not fit", r.Name, TypeText(r.Type))
		}
		plain += len(r.Name) + 10 + len(r.Data)
		if !CheckRData(r.Type, r.Data) {
			t.Errorf("CheckRData refuses %s", TypeText(r.Type))
		}
	}
	Header{ID: 7, Flags: FlagQR, QD: 1, AN: uint16(len(rs))}.Put(b.Bytes())
	if b.Len() > plain*7/8 {
		t.Errorf("%d bytes for records of %d: not compressed", b.Len(), plain)
	}
	var m dns.Msg
	if err := m.Unpack(b.Bytes()); err != nil {
		t.Fatalf("miekg/dns: %v", err)
	}
	zp := dns.NewZoneParser(strings.NewReader(records), ".", "records")
	for i := range rs {
		want, _ := zp.Next()
		// A compressed name takes the letters of the one it points at, so case may differ.
		if !strings.EqualFold(m.Answer[i].String(), want.String()) {
			t.Errorf("record %d is %s, want %s", i, m.Answer[i], want)
		}
	}
	var x Expander
	var name [dnsname.MaxLen + 1]byte
	off := PlainName(b.Bytes(), HeaderLen) + 4
	for _, r := range rs {
		n, _ := x.Name(b.Bytes(), off, &name)
		rr, next := ReadRR(b.Bytes(), off)
		if n < 0 || next < 0 {
			t.Fatalf("%s %s cannot be read back", r.Name, TypeText(r.Type))
		}
		dnsname.Fold(name[:n], name[:n])
		got, ok := x.AppendRData(nil, b.Bytes(), rr)
		if !ok || string(name[:n]) != string(r.Name) || !strings.EqualFold(string(got), string(r.Data)) {
			t.Errorf("%s %s: read back %q as % x, want % x", r.Name, TypeText(r.Type), name[:n], got, r.Data)
		}
		off = next
	}
}

func TestBuilderKeepsToItsRoom(t *testing.T) {
	var b Builder
	owner := []byte("\x01a\x07example\x00")
	for size := HeaderLen; size < 90; size++ {
		b.Reset(make([]byte, 0, size))
		n := b.Len()
		for b.RR(owner, TypeMX, ClassIN, 1, append([]byte{0, 1, 4}, "mail\x07example\x00"...)) {
			n = b.Len()
		}
		if b.Len() != n || n > size {
			t.Fatalf("room %d: %d bytes after a record that did not fit, %d before", size, b.Len(), n)
		}
	}
}

func TestExpanderRefuses(t *testing.T) {
	h := make([]byte, HeaderLen)
	long := bytes.Repeat([]byte("\x01a"), 127)
	for name, c := range map[string]struct {
		tail []byte
		off  int
	}{
		"pointer to itself":          {[]byte{0xc0, 12}, 12},
		"pointer forward":            {[]byte{0xc0, 14, 0}, 12},
		"pointer cut off":            {[]byte{0xc0}, 12},
		"two that point at another":  {[]byte{0xc0, 14, 0xc0, 12}, 14},
		"pointer past the message":   {[]byte{0xff, 0xff}, 12},
		"label type 01":              {[]byte{0x41, 0}, 12},
		"label cut off":              {[]byte{5, 'a'}, 12},
		"no end":                     {[]byte{1, 'a'}, 12},
		"more than 255 bytes":        {append(append([]byte{}, long...), 1, 'b', 0), 12},
		"255 bytes through pointers": {append(append(append([]byte{}, long...), 0), 1, 'b', 0xc0, 12), 12 + 255},
		"behind the message":         {nil, 12},
	} {
		var x Expander
		var out [dnsname.MaxLen + 1]byte
		if n, _ := x.Name(append(h, c.tail...), c.off, &out); n >= 0 {
			t.Errorf("%s: read as %q", name, out[:n])
		}
	}
}

// A message of pointers to one long name costs little to send and much to expand; the budget ends it.
func TestExpanderBudget(t *testing.T) {
	msg := append(make([]byte, HeaderLen), bytes.Repeat([]byte("\x01a"), 126)...)
	msg = append(msg, 0)
	ptr := len(msg)
	msg = append(msg, 0xc0, 12)
	var x Expander
	var out [dnsname.MaxLen + 1]byte
	reads := 0
	for range 100_000 {
		if n, _ := x.Name(msg, ptr, &out); n < 0 {
			break
		}
		reads++
	}
	if want := maxExpanded / 253; reads != want {
		t.Errorf("%d names of 253 bytes were expanded, want %d", reads, want)
	}
}

// RDATA of types that have a structure is held against it, wherever it is read. What no type is known for is opaque
// (RFC 3597).
func TestMalformedRData(t *testing.T) {
	for _, c := range []struct {
		typ       uint16
		good, bad string // hexadecimal, separated by spaces
	}{
		{TypeNSEC, "00 00000140 00000140010180", "- 0000 000000 000001 00000240 000021" + strings.Repeat("ff", 33) + " 00010140000140 00000140000140 00000140ff"},
		{TypeNSEC3, "0101000a0002aabb 0101000a0002aabb000140 0100000002ccdd02aabb000140",
			"- 01010000 0101000a00 0101000a02cc 0101000a0000 0101000a0003aabb 0101000a0002aabb00 0101000a0002aabb0000"},
		{TypeNSEC3PARAM, "0100000000 0100000001aa", "01000000 010000000001 0100000002aa"},
		{TypeTXT, "00 0161 01610162", "- 02 0261 016102"},
		{TypeHINFO, "0000 01610162", "- 00 000000 016102"},
		{257, "000569737375653b 00016100", "- 00 0000 000061 00056973"},
		{TypeTLSA, "030101ff", "0301"},
		{44, "0101ff", "01"},
		{62, "000000010003000140", "0000000100 00000001000300 0000000100030001"},
		{108, "010203040506", "0102030405 01020304050607"},
		{TypeDS, "000108020a", "00010802"},
		{65280, "- 00 ffffffff", ""},
	} {
		check := func(list string, want bool) {
			for _, h := range strings.Fields(list) {
				data, err := hex.DecodeString(strings.TrimPrefix(h, "-"))
				if err != nil {
					t.Fatal(err)
				}
				if got := CheckRData(c.typ, data); got != want {
					t.Errorf("%s %s is well formed: %v", TypeText(c.typ), h, got)
				}
				msg := append(make([]byte, HeaderLen), 0, byte(c.typ>>8), byte(c.typ), 0, 1, 0, 0, 0, 0, 0, byte(len(data)))
				msg = append(append(msg, data...), 0xff, 0xff) // what follows is not the record's
				rr, next := ReadRR(msg, HeaderLen)
				if next < 0 {
					t.Fatal("not read")
				}
				var x Expander
				if _, got := x.AppendRData(nil, msg, rr); got != want {
					t.Errorf("%s %s is taken from a message: %v", TypeText(c.typ), h, got)
				}
			}
		}
		check(c.good, true)
		check(c.bad, false)
	}
}

func TestTypes(t *testing.T) {
	for in, want := range map[string]uint16{"a": 1, "HTTPS": 65, "TYPE65280": 65280, "type1": 1} {
		if got, err := ParseType(in); err != nil || got != want {
			t.Errorf("%s = %d, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "TYPE", "TYPE-1", "TYPE65536", "TYPE01", "BOGUS"} {
		if got, err := ParseType(in); err == nil {
			t.Errorf("%q = %d, want an error", in, got)
		}
	}
	if s := Text(TypeA, []byte{1, 2}); s != `\# 2 0102` {
		t.Errorf("a broken A record is %q", s)
	}
}

// FuzzReadRR walks any bytes as a message: nothing panics, and what AppendRData accepts is well formed.
func FuzzReadRR(f *testing.F) {
	rs, _ := ParseRecords(records, ".", "records", 3600)
	var b Builder
	b.Reset(make([]byte, 0, 4096))
	for _, r := range rs {
		b.RR([]byte(r.Name), r.Type, r.Class, r.TTL, r.Data)
	}
	f.Add(b.Bytes())
	f.Add([]byte("\x00\x00\x84\x00\x00\x00\x00\x01\x00\x00\x00\x00\xc0\x00\x00\x05\x00\x01\x00\x00\x00\x00\x00\x02\xc0\x0c"))
	f.Fuzz(func(t *testing.T, msg []byte) {
		var x Expander
		var name [dnsname.MaxLen + 1]byte
		var rdata []byte
		for off := HeaderLen; ; {
			if n, _ := x.Name(msg, off, &name); n >= 0 {
				if err := dnsname.Check(name[:n]); err != nil {
					t.Fatalf("%q: %v", name[:n], err)
				}
			}
			rr, next := ReadRR(msg, off)
			if next < 0 {
				return
			}
			if next <= off {
				t.Fatal("no progress")
			}
			var ok bool
			if rdata, ok = x.AppendRData(rdata[:0], msg, rr); ok {
				if !CheckRData(rr.Type, rdata) {
					t.Fatalf("type %d: % x was accepted", rr.Type, rdata)
				}
				NameIn(rr.Type, rdata, 0)
				CanonicalRData(rr.Type, rdata)
				Text(rr.Type, rdata)
			}
			off = next
		}
	})
}

// A line that ends behind the type is no record, whatever the library makes of it.
func TestParseRecordsWithoutData(t *testing.T) {
	for _, typ := range []string{"A", "AAAA", "CNAME", "DNAME", "NS", "PTR", "MX", "SOA", "SRV", "DS"} {
		if rs, err := ParseRecords("a.example. 60 IN "+typ+" \n", ".", "zone.txt", 60); err == nil {
			t.Errorf("%s: %v", typ, rs)
		} else if !strings.Contains(err.Error(), "zone.txt") {
			t.Errorf("%s: %v does not name the file", typ, err)
		}
	}
	if rs, err := ParseRecords("a.example. 60 IN TYPE65280 \\# 0\n", ".", "zone.txt", 60); err != nil || len(rs) != 1 {
		t.Errorf("an unknown type may be empty (RFC 3597): %v, %v", rs, err)
	}
}
