package query

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
)

// pack makes a query's bytes with miekg/dns.
func pack(t testing.TB, edit func(m *dns.Msg)) []byte {
	m := new(dns.Msg)
	m.SetQuestion("WwW.Example.", dns.TypeA)
	m.Id = 0x1234
	if edit != nil {
		edit(m)
	}
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func opt(options ...dns.EDNS0) func(*dns.Msg) {
	return func(m *dns.Msg) {
		m.SetEdns0(1400, true)
		m.IsEdns0().Option = options
	}
}

func TestReadFaults(t *testing.T) {
	plain := pack(t, nil)
	edit := func(f func(b []byte)) []byte { b := slices.Clone(plain); f(b); return b }
	many := func() (o []dns.EDNS0) {
		for range 1000 {
			o = append(o, &dns.EDNS0_NSID{Code: dns.EDNS0NSID})
		}
		return
	}()
	unfit := pack(t, opt(&dns.EDNS0_NSID{Code: dns.EDNS0NSID}))
	unfit[len(unfit)-1] = 1 // the length of the last option
	for name, c := range map[string]struct {
		wire []byte
		tr   Transport
		want Fault
	}{
		"a plain query":                     {plain, UDP, NoFault},
		"nothing":                           {nil, UDP, Ignore},
		"eleven bytes":                      {plain[:11], UDP, Ignore},
		"a response":                        {edit(func(b []byte) { b[2] |= 0x80 }), UDP, Ignore},
		"NOTIFY":                            {edit(func(b []byte) { b[2] |= 4 << 3 }), UDP, NotImp},
		"no question":                       {edit(func(b []byte) { b[5] = 0 }), UDP, FormErr},
		"a cookie without a question":       {pack(t, func(m *dns.Msg) { opt(&dns.EDNS0_COOKIE{Code: 10, Cookie: "0102030405060708"})(m); m.Question = nil }), TCP, CookieOnly},
		"a short cookie without a question": {pack(t, func(m *dns.Msg) { opt(&dns.EDNS0_COOKIE{Code: 10, Cookie: "0102"})(m); m.Question = nil }), UDP, FormErr},
		"no cookie and no question":         {pack(t, func(m *dns.Msg) { opt(&dns.EDNS0_NSID{Code: dns.EDNS0NSID})(m); m.Question = nil }), UDP, FormErr},
		"another version without a question": {pack(t, func(m *dns.Msg) {
			opt(&dns.EDNS0_COOKIE{Code: 10, Cookie: "0102030405060708"})(m)
			m.IsEdns0().SetVersion(1)
			m.Question = nil
		}), UDP, FormErr},
		"two questions":       {edit(func(b []byte) { b[5] = 2 }), UDP, FormErr},
		"an answer":           {edit(func(b []byte) { b[7] = 1 }), UDP, FormErr},
		"an authority record": {edit(func(b []byte) { b[9] = 1 }), UDP, FormErr},
		"IXFR with its SOA": {pack(t, func(m *dns.Msg) {
			m.SetIxfr("example.", 1, "ns.example.", "x.example.")
			m.Id = 0x1234
		}), UDP, NoFault},
		"TC":                           {edit(func(b []byte) { b[2] |= 2 }), UDP, FormErr},
		"a compressed name":            {edit(func(b []byte) { b[12] = 0xc0 }), UDP, FormErr},
		"a name without end":           {plain[:20], UDP, FormErr},
		"no type":                      {plain[:len(plain)-4], UDP, FormErr},
		"no class":                     {plain[:len(plain)-2], UDP, FormErr},
		"trailing bytes over UDP":      {append(slices.Clone(plain), 0), UDP, NoFault},
		"trailing bytes over TCP":      {append(slices.Clone(plain), 0), TCP, FormErr},
		"an additional record missing": {edit(func(b []byte) { b[11] = 1 }), UDP, FormErr},
		"EDNS":                         {pack(t, opt()), UDP, NoFault},
		"EDNS version 1":               {pack(t, func(m *dns.Msg) { opt()(m); m.IsEdns0().SetVersion(1) }), UDP, BadVers},
		"two OPT":                      {pack(t, func(m *dns.Msg) { opt()(m); m.Extra = append(m.Extra, m.Extra[0]) }), UDP, FormErr},
		"OPT of another owner":         {pack(t, func(m *dns.Msg) { opt()(m); m.Extra[0].Header().Name = "a." }), UDP, FormErr},
		"a short cookie":               {pack(t, opt(&dns.EDNS0_COOKIE{Code: 10, Cookie: "0102"})), UDP, FormErr},
		"a cookie of 12 bytes":         {pack(t, opt(&dns.EDNS0_COOKIE{Code: 10, Cookie: "010203040506070809101112"})), UDP, FormErr},
		"a subnet with spare bits":     {pack(t, opt(&dns.EDNS0_LOCAL{Code: 8, Data: []byte{0, 1, 20, 0, 192, 0, 0x2f}})), UDP, FormErr},
		"a subnet with a scope":        {pack(t, opt(&dns.EDNS0_LOCAL{Code: 8, Data: []byte{0, 1, 8, 8, 10}})), UDP, FormErr},
		"a subnet too long":            {pack(t, opt(&dns.EDNS0_LOCAL{Code: 8, Data: []byte{0, 1, 8, 0, 10, 1}})), UDP, FormErr},
		"a subnet of no known family":  {pack(t, opt(&dns.EDNS0_LOCAL{Code: 8, Data: []byte{0, 3, 8, 0, 10}})), UDP, FormErr},
		"an option that does not fit":  {unfit, UDP, FormErr},
		"a thousand options":           {pack(t, opt(many...)), UDP, NoFault},
		"TSIG":                         {pack(t, func(m *dns.Msg) { m.SetTsig("k.", dns.HmacSHA256, 300, 0) }), UDP, FormErr},
		"a name of 255 bytes":          {pack(t, func(m *dns.Msg) { m.Question[0].Name = strings.Repeat("a.", 127) }), UDP, NoFault},
	} {
		var q Query
		q.Transport = c.tr
		if got := q.Read(c.wire); got != c.want {
			t.Errorf("%s: fault %d, want %d", name, got, c.want)
		}
		if c.want != Ignore && q.ID != 0x1234 {
			t.Errorf("%s: ID %x", name, q.ID)
		}
	}
}

func TestReadFields(t *testing.T) {
	wire := pack(t, func(m *dns.Msg) {
		m.AuthenticatedData, m.CheckingDisabled = true, true
		opt(&dns.EDNS0_COOKIE{Code: 10, Cookie: "0102030405060708"},
			&dns.EDNS0_SUBNET{Code: 8, Family: 1, SourceNetmask: 24, Address: []byte{192, 0, 2, 0}},
			&dns.EDNS0_LOCAL{Code: 65074, Data: []byte("cpe-7")},
			&dns.EDNS0_LOCAL{Code: 65001, Data: []byte("first")}, &dns.EDNS0_LOCAL{Code: 65073, Data: []byte("second")},
			&dns.EDNS0_PADDING{Padding: make([]byte, 5)})(m)
	})
	var q Query
	q.Source = netip.MustParseAddrPort("192.0.2.9:1000")
	if f := q.Read(wire); f != NoFault {
		t.Fatal(f)
	}
	want := Question{Name: dnsname.MustParse("www.example."), Type: 1, Class: 1, DO: true, CD: true}
	check := func(what string, q *Query) {
		if q.Question != want || string(q.AsIs) != "\x03WwW\x07Example\x00" || !q.RD || !q.AD {
			t.Errorf("%s: question %+v, spelled %q", what, q.Question, q.AsIs)
		}
		if e := q.EDNS; e.UDPSize != 1400 || !bytes.Equal(e.Cookie, []byte{1, 2, 3, 4, 5, 6, 7, 8}) || e.Subnet.Bits != 24 ||
			!e.HasSubnet || string(e.CPE) != "cpe-7" || string(e.MAC) != "first" || e.MACCode != 65001 || !e.Padding || e.NSID {
			t.Errorf("%s: EDNS %+v", what, e)
		}
	}
	check("read", &q)
	q.Turn.Current = q.Question
	own := q.Own()
	clear(wire)
	q.Read(pack(t, func(m *dns.Msg) { m.Question[0].Name = "other.name." })) // the worker goes on
	check("own", own)
	if own.Turn.Current != want {
		t.Errorf("own: current question %+v", own.Turn.Current)
	}
	if n := testing.AllocsPerRun(100, func() { q.Read(pack0) }); n != 0 {
		t.Errorf("Read allocates %v times", n)
	}
}

var pack0 = func() []byte {
	m := new(dns.Msg)
	m.SetQuestion("www.example.", dns.TypeA)
	m.SetEdns0(1232, true)
	m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_SUBNET{Code: 8, Family: 2, SourceNetmask: 56, Address: make([]byte, 16)}}
	b, _ := m.Pack()
	return b
}()

func TestMaxResponse(t *testing.T) {
	for _, c := range []struct {
		tr   Transport
		edns uint16
		want int
	}{{UDP, 0, 512}, {UDP, 100, 512}, {UDP, 1000, 1000}, {UDP, 4096, 1232}, {TCP, 600, 65535}} {
		q := Query{Transport: c.tr, EDNS: EDNS{Present: c.edns > 0, UDPSize: c.edns}}
		if got := q.MaxResponse(1232); got != c.want {
			t.Errorf("%v with %d: %d, want %d", c.tr, c.edns, got, c.want)
		}
	}
}

func TestReadMessageGathersRRsets(t *testing.T) {
	m := new(dns.Msg)
	m.SetQuestion("a.example.", dns.TypeA)
	m.Response = true
	rr := func(s string) dns.RR {
		r, err := dns.NewRR(s)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	m.Answer = []dns.RR{
		rr("A.example. 300 A 192.0.2.1"), rr("b.example. 60 A 192.0.2.3"), rr("a.EXAMPLE. 200 A 192.0.2.2"),
		rr("a.example. 300 A 192.0.2.1"), // again
		rr("a.example. 100 RRSIG A 13 2 300 20300101000000 20200101000000 1 example. AAAA"),
		rr("c.example. 300 RRSIG TXT 13 2 300 20300101000000 20200101000000 1 example. AAAA"),
		rr("d.example. 4294967295 A 192.0.2.4"),
	}
	m.SetEdns0(1232, false)
	m.Rcode = dns.RcodeBadVers
	m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_EDE{InfoCode: 22, ExtraText: "no"}}
	wire, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	got, err := ReadMessage(wire)
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Answer) != 4 || len(got.Additional) != 0 {
		t.Fatalf("%d sets in the answer, %d in additional", len(got.Answer), len(got.Additional))
	}
	a := got.Answer[0]
	if a.Name != dnsname.MustParse("a.example.") || CountRData(a.Data) != 2 || CountRData(a.Sigs) != 1 || a.TTL != 100 {
		t.Errorf("set %+v", a)
	}
	if s := got.Answer[3]; s.Type != dnswire.TypeRRSIG || s.Name != dnsname.MustParse("c.example.") {
		t.Errorf("a signature without its set: %+v", s)
	}
	if got.Answer[2].TTL != 0 {
		t.Error("a TTL with the top bit set is not 0")
	}
	if got.RCode != 16 || got.EDE != 22 || got.EDEText != "no" || got.UDPSize != 1232 {
		t.Errorf("EDNS: %+v", got)
	}
}

func TestReadMessageRefuses(t *testing.T) {
	m := new(dns.Msg)
	m.SetQuestion("a.example.", dns.TypeA)
	for i := range MaxRRsPerSet + 1 {
		m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: "a.example.", Rrtype: 1, Class: 1}, A: []byte{10, 0, byte(i >> 8), byte(i)}})
	}
	m.Compress = true
	big, _ := m.Pack()
	for name, wire := range map[string][]byte{
		"nothing":                   nil,
		"257 records in one set":    big,
		"cut off":                   big[:len(big)-1],
		"counts without records":    {0, 0, 0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff},
		"an A record of five bytes": append([]byte{0, 0, 0x80, 0, 0, 0, 0, 1, 0, 0, 0, 0}, "\x00\x00\x01\x00\x01\x00\x00\x00\x00\x00\x05abcde"...),
	} {
		if _, err := ReadMessage(wire); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A record that is not what its type asks for is left out, and the message is malformed if that changes what
// it says.
func TestReadMessageDropsBadRecords(t *testing.T) {
	good := func(rr string) dns.RR {
		r, err := dns.NewRR(rr)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	bad := func(owner string, typ uint16, data string) dns.RR {
		return &dns.RFC3597{Hdr: dns.RR_Header{Name: owner, Rrtype: typ, Class: dns.ClassINET, Ttl: 60}, Rdata: data}
	}
	const (
		a    = "www.example. 60 A 192.0.2.1"
		name = "www.example."
	)
	duplicateKeys := "0001000001000302683200010003026833" // alpn twice: form is for who uses it to judge
	for title, c := range map[string]struct {
		an, ns, ar []dns.RR
		want       string // records kept by section, dropped; "" for a malformed message
	}{
		"one of three A":             {an: []dns.RR{good(a), bad(name, 1, "c00002"), good("www.example. 60 A 192.0.2.2")}, want: "2/0/0 dropped 1"},
		"the only A":                 {an: []dns.RR{bad(name, 1, "c00002")}},
		"the only A behind an alias": {an: []dns.RR{good("www.example. 60 CNAME x.example."), bad("x.example.", 1, "c00002")}},
		"AAAA of four bytes":         {an: []dns.RR{good("www.example. 60 AAAA 2001:db8::1"), bad(name, 28, "c0000201")}, want: "1/0/0 dropped 1"},
		"the only NS":                {ns: []dns.RR{bad("example.", 2, "ff")}},
		"one of two NS":              {ns: []dns.RR{good("example. 60 NS a.example."), bad("example.", 2, "ff")}, want: "0/1/0 dropped 1"},
		"glue":                       {ns: []dns.RR{good("example. 60 NS a.example.")}, ar: []dns.RR{bad("a.example.", 1, "")}, want: "0/1/0 dropped 1"},
		"a signature":                {an: []dns.RR{good(a), bad(name, 46, "00")}, want: "1/0/0 dropped 1"},
		"HTTPS with one key twice":   {an: []dns.RR{bad(name, 65, duplicateKeys)}, want: "1/0/0 dropped 0"},
		"an unknown type":            {an: []dns.RR{bad(name, 65280, "")}, want: "1/0/0 dropped 0"},
	} {
		wire := pack(t, func(m *dns.Msg) { m.Response = true; m.Answer, m.Ns, m.Extra = c.an, c.ns, c.ar })
		m, err := ReadMessage(wire)
		got := ""
		if err == nil {
			count := func(sets []RRset) (n int) {
				for i := range sets {
					n += CountRData(sets[i].Data)
				}
				return n
			}
			got = fmt.Sprintf("%d/%d/%d dropped %d", count(m.Answer), count(m.Authority), count(m.Additional), m.Dropped)
		} else if !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", title, err)
		}
		if got != c.want {
			t.Errorf("%s: %q (%v), want %q", title, got, err, c.want)
		}
	}
}

func TestTreeSpends(t *testing.T) {
	tree := NewTree(0, Budget{Queries: 2, FailedValidations: 1})
	first, second := tree.Query(), tree.Query()
	if first != nil || second != nil || !errors.Is(tree.Query(), ErrLimit) || tree.Left() != 0 {
		t.Error("the third query was not refused")
	}
	if tree.FailedValidation() != nil || !errors.Is(tree.FailedValidation(), ErrLimit) {
		t.Error("the second failed validation was not refused")
	}
	n := dnsname.MustParse("ns.example.")
	if !tree.Enter(n, 1) || tree.Enter(n, 1) || !tree.Enter(n, 28) {
		t.Error("Enter")
	}
	tree.Leave(n, 1)
	if !tree.Enter(n, 1) {
		t.Error("Enter after Leave")
	}
	for i := range maxSends + 1 {
		if ok := tree.Send("192.0.2.1/udp", n, 1); ok != (i < maxSends) {
			t.Errorf("send %d: %v", i+1, ok)
		}
	}
}

func TestRing(t *testing.T) {
	r := NewRing(3) // of four
	for i := range 6 {
		if e := r.Slot(); e != nil {
			e.Line = uint32(i)
			r.Commit()
		}
	}
	var got []uint32
	r.Drain(func(e *Event) { got = append(got, e.Line) })
	if !slices.Equal(got, []uint32{0, 1, 2, 3}) || r.Dropped() != 2 {
		t.Errorf("%v, %d dropped", got, r.Dropped())
	}
}

func FuzzRead(f *testing.F) {
	f.Add(pack0, byte(0))
	f.Add(pack(f, nil), byte(1))
	f.Fuzz(func(t *testing.T, wire []byte, tr byte) {
		q := Query{Transport: Transport(tr % NumTransports)}
		if q.Read(wire) == NoFault {
			if err := dnsname.Check([]byte(q.Question.Name)); err != nil {
				t.Fatal(err)
			}
			if o := q.Own(); o.Question != q.Question {
				t.Fatal("Own differs")
			}
		}
	})
}

func FuzzReadMessage(f *testing.F) {
	f.Add(pack0)
	f.Fuzz(func(t *testing.T, wire []byte) {
		m, err := ReadMessage(wire)
		if err != nil {
			return
		}
		for _, sets := range [][]RRset{m.Answer, m.Authority, m.Additional} {
			for _, s := range sets {
				if n := CountRData(s.Data); n == 0 || n > MaxRRsPerSet {
					t.Fatalf("%d records", n)
				}
				for d := range RDatas(s.Data) {
					if !dnswire.CheckRData(s.Type, d) {
						t.Fatalf("type %d: % x", s.Type, d)
					}
				}
			}
		}
	})
}

// TestRDataTooLong: a length of 16 bits says too little of data that no record can hold, and who reads on from
// there reads rubbish.
func TestRDataTooLong(t *testing.T) {
	data := AppendRData(nil, []byte("first"))
	data = AppendRData(data, make([]byte, 1<<16))
	data = AppendRData(data, make([]byte, 1<<16-1))
	var got []int
	for d := range RDatas(data) {
		got = append(got, len(d))
	}
	if !slices.Equal(got, []int{5, 1<<16 - 1}) {
		t.Errorf("lengths %v", got)
	}
}
