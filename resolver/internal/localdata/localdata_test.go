package localdata

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

func records(t *testing.T, text string) []dnswire.Record {
	t.Helper()
	rs, err := dnswire.ParseRecords(text, ".", "test", 300)
	if err != nil {
		t.Fatal(err)
	}
	return rs
}

// say gives RCODE and records of an answer, "-" for none.
func say(d *Data, name, typ string, class uint16) string {
	tp, err := dnswire.ParseType(typ)
	if err != nil {
		panic(err)
	}
	q := query.Question{Name: dnsname.MustParse(name), Type: tp, Class: class}
	e, ok := d.Lookup(&q, 0)
	if !ok {
		return "-"
	}
	a := e.View()
	msg := append(make([]byte, 12), q.Name...)
	msg = append(msg, 0, 0, 0, 0)
	off := len(msg)
	msg = append(msg, a.Body...)
	s := []string{dnswire.RCodeText(a.RCode)}
	var x dnswire.Expander
	for i := range a.AN {
		rr, next := dnswire.ReadRR(msg, off)
		d, _ := x.AppendRData(nil, msg, rr)
		s = append(s, fmt.Sprintf("%s=%s", dnswire.TypeText(rr.Type), dnswire.Text(rr.Type, d)))
		off, _ = next, i
	}
	if a.NS > 0 {
		s = append(s, "SOA")
	}
	return strings.Join(s, " ")
}

func TestLookup(t *testing.T) {
	d, err := New(Options{
		Zones: true,
		Except: []dnsname.Name{
			dnsname.MustParse("168.192.in-addr.arpa."), dnsname.MustParse("corp.test."), dnsname.Root,
		},
		Records: records(t, "nas.home.arpa. A 192.0.2.7\nnas.home.arpa. A 192.0.2.8\na.b.home.arpa. TXT x\nmy.example. A 192.0.2.9\nalias.example. CNAME My.example.\nout.example. CNAME www.example.net.\n"),
		NodeID:  "node-1", Version: "sluice",
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, typ, want string }{
		{"localhost.", "A", "NOERROR A=127.0.0.1"},
		{"foo.localhost.", "AAAA", "NOERROR AAAA=::1"},
		{"localhost.", "MX", "NOERROR SOA"},
		{"1.0.0.127.in-addr.arpa.", "PTR", "NOERROR PTR=localhost."},
		{"2.0.0.127.in-addr.arpa.", "PTR", "NXDOMAIN SOA"},
		{"127.in-addr.arpa.", "SOA", "NOERROR SOA=127.in-addr.arpa. nobody.invalid. 1 3600 1200 604800 10800"},
		{"0.0.127.in-addr.arpa.", "PTR", "NOERROR SOA"}, // an empty non-terminal
		{"1.1.16.172.in-addr.arpa.", "PTR", "NXDOMAIN SOA"},
		{"1.1.32.172.in-addr.arpa.", "PTR", "-"},
		{"1.1.100.100.in-addr.arpa.", "PTR", "NXDOMAIN SOA"},
		{"1.1.168.192.in-addr.arpa.", "PTR", "-"}, // resolved elsewhere
		{"x.test.", "A", "-"},                     // a zone below it is resolved elsewhere
		{"x.onion.", "A", "NXDOMAIN SOA"},
		{"onion.", "A", "NOERROR SOA"},
		{"printer.local.", "A", "NXDOMAIN SOA"},
		{"x.alt.", "A", "-"}, // RFC 9476: resolved as any
		{"_dns.resolver.arpa.", "SVCB", "NOERROR SOA"},
		{"_dns.resolver.arpa.", "A", "NOERROR SOA"},
		{"x.resolver.arpa.", "A", "NOERROR SOA"},
		{"home.arpa.", "DS", "-"}, // its parent is public
		{"16.172.in-addr.arpa.", "DS", "-"},
		{"test.", "DS", "-"}, // not served here, see Except
		{"onion.", "DS", "NOERROR SOA"},
		{"c.home.arpa.", "DS", "NXDOMAIN SOA"},
		{"ipv4only.arpa.", "A", "-"}, // without DNS64 resolved as any
		{"nas.home.arpa.", "A", "NOERROR A=192.0.2.7 A=192.0.2.8"},
		{"nas.home.arpa.", "AAAA", "NOERROR SOA"},
		{"b.home.arpa.", "A", "NOERROR SOA"},
		{"c.home.arpa.", "A", "NXDOMAIN SOA"},
		{"my.example.", "A", "NOERROR A=192.0.2.9"},
		{"my.example.", "AAAA", "NOERROR SOA"},
		{"x.my.example.", "A", "-"},
		{"other.example.", "A", "-"},
		{"alias.example.", "A", "NOERROR CNAME=My.example. A=192.0.2.9"},
		{"alias.example.", "CNAME", "NOERROR CNAME=My.example."},
		{"out.example.", "A", "NOERROR CNAME=www.example.net."},
		{"www.example.com.", "A", "-"},
		{".", "NS", "-"},
	} {
		if got := say(d, c.name, c.typ, 1); got != c.want {
			t.Errorf("%s %s: %s, want %s", c.name, c.typ, got, c.want)
		}
	}
	for name, want := range map[string]string{"version.bind.": `NOERROR TXT="sluice"`, "id.server.": `NOERROR TXT="node-1"`, "authors.bind.": "-"} {
		if got := say(d, name, "TXT", dnswire.ClassCH); got != want {
			t.Errorf("CH %s: %s, want %s", name, got, want)
		}
	}
	q := query.Question{Name: dnsname.MustParse("www.example.com."), Type: 1, Class: 1}
	if a := testing.AllocsPerRun(100, func() { d.Lookup(&q, 0) }); a != 0 {
		t.Errorf("%v allocations for a name that is not local", a)
	}
}

// A resolver with DNS64 knows the names by which clients find its prefix, without the default zones too.
func TestIPv4Only(t *testing.T) {
	d, err := New(Options{IPv4Only: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, typ, want string }{
		{"ipv4only.arpa.", "A", "NOERROR A=192.0.0.170 A=192.0.0.171"},
		{"ipv4only.arpa.", "AAAA", "NOERROR SOA"}, // of which DNS64 makes addresses
		{"ipv4only.arpa.", "DS", "-"},
		{"x.ipv4only.arpa.", "A", "NXDOMAIN SOA"},
		{"171.0.0.192.in-addr.arpa.", "PTR", "NOERROR PTR=ipv4only.arpa."},
		{"172.0.0.192.in-addr.arpa.", "PTR", "-"},
		{"localhost.", "A", "-"},
	} {
		if got := say(d, c.name, c.typ, 1); got != c.want {
			t.Errorf("%s %s: %s, want %s", c.name, c.typ, got, c.want)
		}
	}
	d, err = New(Options{Zones: true, Records: records(t, "_dns.resolver.arpa. SVCB 1 dot.example. alpn=dot")})
	if err != nil {
		t.Fatal(err)
	}
	if got := say(d, "_dns.resolver.arpa.", "SVCB", 1); !strings.HasPrefix(got, "NOERROR SVCB=1 dot.example.") {
		t.Errorf("a configured designation: %s", got)
	}
}

// What could never be served is refused, with the record that it is about.
func TestNewRefuses(t *testing.T) {
	many := ""
	for i := range 4000 {
		many += fmt.Sprintf("big.example. A 10.0.%d.%d\n", i/256, i%256)
	}
	for text, want := range map[string]string{
		"x.example. A 192.0.2.1\na.example. CNAME b.example.\na.example. A 192.0.2.1": "2: local data of a.example.: a CNAME record beside others",
		"a.example. A 192.0.2.1\na.example. CNAME b.example.":                         "1: local data of a.example.: a CNAME record beside others",
		"a.example. CNAME b.example.\na.example. CNAME c.example.":                    "1: local data of a.example.: a second CNAME record",
		"localhost. CNAME b.example.":                                                 "0: local data of localhost.: a CNAME record beside others",
		"a.example. CH A 192.0.2.1":                                                   "0: local data of a.example.: class 3; only class IN is served",
		many:                                                                          "2275: local data of big.example.: more records of one type than an answer can hold",
	} {
		_, err := New(Options{Zones: true, Records: records(t, text)})
		e := (*RecordError)(nil)
		if !errors.As(err, &e) || fmt.Sprintf("%d: %v", e.Index, err) != want {
			t.Errorf("%.80q: %v, want %s", text, err, want)
		}
	}
	// What is taken is answered, to the last record.
	d, err := New(Options{Records: records(t, strings.Join(strings.Split(many, "\n")[:2275], "\n"))})
	if err != nil {
		t.Fatal(err)
	}
	e, ok := d.Lookup(&query.Question{Name: dnsname.MustParse("big.example."), Type: dnswire.TypeA, Class: dnswire.ClassIN}, 1)
	if !ok || e.View().RCode != 0 {
		t.Errorf("the largest set has no answer: %v", ok)
	}
}
