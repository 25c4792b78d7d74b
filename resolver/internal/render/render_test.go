package render

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dns64"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
	"github.com/sluice-dns/sluice/resolver/internal/rebinding"
)

const t0 = clock.Instant(1000 * time.Second)

// settle makes an entry from records in zone-file syntax.
func settle(t testing.TB, question query.Question, status query.Status, answer, authority string) settled.Entry {
	t.Helper()
	sets := func(text string) (out []query.RRset) {
		rs, err := dnswire.ParseRecords(text, ".", "test", 300)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range rs {
			if n := len(out); r.Type == dnswire.TypeRRSIG && n > 0 {
				out[n-1].Sigs = query.AppendRData(out[n-1].Sigs, r.Data)
				continue
			} else if n > 0 && out[n-1].Is(r.Name, r.Type) {
				out[n-1].Data = query.AppendRData(out[n-1].Data, r.Data)
				continue
			}
			out = append(out, query.RRset{Name: r.Name, Type: r.Type, Class: r.Class, TTL: r.TTL, Data: query.AppendRData(nil, r.Data)})
		}
		return
	}
	u := &query.Unvalidated{Question: question, Answer: sets(answer), Authority: sets(authority)}
	if answer == "" && strings.Contains(authority, "nx.") {
		u.RCode = dnswire.RCodeNXDomain
	}
	e, err := settled.Settle(u, status, settled.Options{Now: t0, EDE: query.NoEDE})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func ask(t testing.TB, name string, typ uint16, edit func(*dns.Msg)) *query.Query {
	t.Helper()
	m := new(dns.Msg)
	m.SetQuestion(name, typ)
	if edit != nil {
		edit(m)
	}
	wire, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	q := &query.Query{Transport: query.UDP}
	if f := q.Read(wire); f != query.NoFault {
		t.Fatalf("fault %d", f)
	}
	q.Turn.Current = q.Question
	return q
}

func edns(size uint16, do bool) func(*dns.Msg) { return func(m *dns.Msg) { m.SetEdns0(size, do) } }

func unpack(t testing.TB, wire []byte) *dns.Msg {
	t.Helper()
	m := new(dns.Msg)
	if err := m.Unpack(wire); err != nil {
		t.Fatalf("% x: %v", wire, err)
	}
	return m
}

// lines renders the records of a section without tabs.
func lines(rrs []dns.RR) string {
	var s []string
	for _, rr := range rrs {
		if rr.Header().Rrtype != dns.TypeOPT {
			s = append(s, strings.ReplaceAll(rr.String(), "\t", " "))
		}
	}
	return strings.Join(s, "\n")
}

const sig = "RRSIG A 13 2 300 20300101000000 20200101000000 1 example. AAAA"

func TestAnswer(t *testing.T) {
	question := query.Question{Name: dnsname.MustParse("www.example."), Type: 1, Class: 1}
	plain := settle(t, question, query.Indeterminate, "www.example. 300 CNAME web.example.\nweb.example. 100 A 192.0.2.1\nweb.example. 100 A 192.0.2.2\nweb.example. 100 "+sig, "example. 300 NS ns.example.")
	question.DO = true
	signed := settle(t, question, query.Secure, "www.example. 300 CNAME web.example.\nweb.example. 100 A 192.0.2.1\nweb.example. 100 "+sig, "")

	q := ask(t, "WWW.example.", 1, nil)
	var out [dnswire.MaxMessage]byte
	r := New(Options{MaxUDP: 1232, EDE: true})
	a := plain.View()
	n := r.Answer(q, &a, t0.Add(40*time.Second), out[:])
	m := unpack(t, out[:n])
	want := "WWW.example. 260 IN CNAME web.example.\nweb.example. 60 IN A 192.0.2.1\nweb.example. 60 IN A 192.0.2.2"
	if m.Id != q.ID || m.Question[0].Name != "WWW.example." || lines(m.Answer) != want || len(m.Ns)+len(m.Extra) != 0 ||
		!m.Response || !m.RecursionAvailable || !m.RecursionDesired || m.Authoritative || m.AuthenticatedData {
		t.Errorf("got\n%v\nwant answer\n%s", m, want)
	}
	if got := plain.Expires(); got != t0.Add(100*time.Second) {
		t.Errorf("expires at %v, want after the shortest TTL", got)
	}

	q = ask(t, "www.example.", 1, edns(1232, true))
	a = signed.View()
	n = r.Answer(q, &a, t0.Add(1000*time.Second), out[:])
	m = unpack(t, out[:n])
	if !m.AuthenticatedData || len(m.Answer) != 3 || m.IsEdns0() == nil || !m.IsEdns0().Do() || m.Answer[0].Header().Ttl != 0 {
		t.Errorf("signed, long expired:\n%v", m)
	}
	q.Question.DO, q.AD = false, false
	if n = r.Answer(q, &a, t0, out[:]); unpack(t, out[:n]).AuthenticatedData {
		t.Error("AD=1 for a client that asked for neither DO nor AD (RFC 6840 section 5.8)")
	}
	allocs := testing.AllocsPerRun(100, func() { a := plain.View(); r.Answer(q, &a, t0.Add(time.Second), out[:]) })
	if allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
}

func TestTruncation(t *testing.T) {
	name := dnsname.MustParse("big.example.")
	txt := "big.example. 300 TXT " + strings.Repeat("\""+strings.Repeat("x", 200)+"\" ", 5)
	e := settle(t, query.Question{Name: name, Type: dnswire.TypeTXT, Class: 1}, query.Insecure, txt, "")
	a := e.View()
	r := New(Options{MaxUDP: 1232, EDE: true})
	var out [dnswire.MaxMessage]byte
	for _, c := range []struct {
		edit func(*dns.Msg)
		tr   query.Transport
		tc   bool
	}{{nil, query.UDP, true}, {nil, query.TCP, false}, {edns(600, false), query.UDP, true}, {edns(4096, false), query.UDP, false}} {
		q := ask(t, "big.example.", dns.TypeTXT, c.edit)
		q.Transport = c.tr
		n := r.Answer(q, &a, t0, out[:])
		m := unpack(t, out[:n])
		if m.Truncated != c.tc || (len(m.Answer) == 0) != c.tc || n > q.MaxResponse(1232) || len(m.Question) != 1 {
			t.Errorf("%v: TC=%v with %d answers in %d bytes", c.tr, m.Truncated, len(m.Answer), n)
		}
	}
}

func TestAliasesInFront(t *testing.T) {
	cur := query.Question{Name: dnsname.MustParse("safe.search.example."), Type: 1, Class: 1}
	e := settle(t, cur, query.Secure, "safe.search.example. 300 CNAME edge.search.example.\nedge.search.example. 300 A 192.0.2.1", "")
	a := e.View()
	r := New(Options{MaxUDP: 1232})
	var out [dnswire.MaxMessage]byte
	q := ask(t, "www.Search.example.", 1, edns(1232, true))
	q.Turn.Current = cur
	q.Turn.Aliases[0] = query.Alias{Target: cur.Name, TTL: 60}
	q.Turn.NumAliases = 1
	n := r.Answer(q, &a, t0.Add(100*time.Second), out[:])
	m := unpack(t, out[:n])
	want := "www.Search.example. 60 IN CNAME safe.search.example.\nsafe.search.example. 200 IN CNAME edge.search.example.\nedge.search.example. 200 IN A 192.0.2.1"
	if !strings.EqualFold(lines(m.Answer), want) || m.AuthenticatedData {
		t.Errorf("AD=%v\n%s\nwant\n%s", m.AuthenticatedData, lines(m.Answer), want)
	}
	q.Turn.Flatten = true
	n = r.Answer(q, &a, t0, out[:])
	if got, want := lines(unpack(t, out[:n]).Answer), "www.Search.example. 60 IN A 192.0.2.1"; got != want {
		t.Errorf("flattened\n%s\nwant\n%s", got, want)
	}
}

func TestBlock(t *testing.T) {
	r := New(Options{MaxUDP: 1232, EDE: true})
	var out [512]byte
	custom := query.Block{Mode: query.BlockCustom, TTL: 10 * time.Second, IPv4: netip.MustParseAddr("192.0.2.9"), EDE: 15, Reason: "a list"}
	soa := "ads.example. 10 IN SOA sluice.invalid. hostmaster.sluice.invalid. 1 3600 600 86400 10"
	for _, c := range []struct {
		typ    uint16
		mode   query.BlockMode
		rcode  int
		answer string
		soa    bool
	}{
		{dns.TypeA, query.BlockNull, 0, "ads.example. 10 IN A 0.0.0.0", false},
		{dns.TypeAAAA, query.BlockNull, 0, "ads.example. 10 IN AAAA ::", false},
		{dns.TypeHTTPS, query.BlockNull, 0, "", true},
		{dns.TypeMX, query.BlockNull, 0, "", true},
		{dns.TypeA, query.BlockNXDomain, 3, "", true},
		{dns.TypeA, query.BlockNoData, 0, "", true},
		{dns.TypeA, query.BlockRefused, 5, "", false},
		{dns.TypeA, query.BlockCustom, 0, "ads.example. 10 IN A 192.0.2.9", false},
		{dns.TypeAAAA, query.BlockCustom, 0, "", true},
	} {
		b := custom
		b.Mode = c.mode
		q := ask(t, "ads.example.", c.typ, edns(1232, true))
		n := r.Block(q, &b, out[:])
		m := unpack(t, out[:n])
		if m.Rcode != c.rcode || lines(m.Answer) != c.answer || (lines(m.Ns) == soa) != c.soa || m.AuthenticatedData || int(q.Outcome.RCode) != c.rcode {
			t.Errorf("mode %d %s:\n%v", c.mode, dns.TypeToString[c.typ], m)
		}
		o := m.IsEdns0().Option
		if len(o) != 1 || o[0].(*dns.EDNS0_EDE).InfoCode != 15 || o[0].(*dns.EDNS0_EDE).ExtraText != "a list" {
			t.Errorf("mode %d: options %v", c.mode, o)
		}
		if a := testing.AllocsPerRun(20, func() { r.Block(q, &b, out[:]) }); a != 0 {
			t.Errorf("mode %d: %v allocations", c.mode, a)
		}
	}
}

func TestPaddingOverEncryptedTransports(t *testing.T) {
	e := settle(t, query.Question{Name: dnsname.MustParse("a.example."), Type: 1, Class: 1}, query.Insecure, "a.example. 300 A 192.0.2.1", "")
	a := e.View()
	r := New(Options{MaxUDP: 1232, EDE: true})
	var out [dnswire.MaxMessage]byte
	for tr := range query.Transport(query.NumTransports) {
		q := ask(t, "a.example.", 1, edns(1232, false))
		q.Transport = tr
		n := r.Answer(q, &a, t0, out[:])
		unpack(t, out[:n])
		if padded := n%468 == 0; padded != tr.Encrypted() {
			t.Errorf("%v: %d bytes", tr, n)
		}
	}
}

func TestFaults(t *testing.T) {
	r := New(Options{EDE: true})
	var out [512]byte
	q := &query.Query{ID: 77, RD: true}
	for f, want := range map[query.Fault]int{query.FormErr: 1, query.NotImp: 4} {
		n := r.Fault(q, f, out[:])
		if m := unpack(t, out[:n]); n != 12 || m.Id != 77 || m.Rcode != want || !m.Response {
			t.Errorf("fault %d: %d bytes, %v", f, n, m)
		}
	}
	if n := r.Fault(q, query.Ignore, out[:]); n != 0 {
		t.Errorf("%d bytes for a message to be ignored", n)
	}
	q = ask(t, "a.example.", 1, edns(1232, false))
	n := r.Fault(q, query.BadVers, out[:])
	if m := unpack(t, out[:n]); m.Rcode != dns.RcodeBadVers || m.IsEdns0() == nil {
		t.Errorf("BADVERS: %v", m)
	}
}

// Nothing written is ever longer than the room, whatever the room.
func TestEveryRoom(t *testing.T) {
	cur := query.Question{Name: dnsname.MustParse("a.example."), Type: 1, Class: 1}
	e := settle(t, cur, query.Insecure, "a.example. 300 A 192.0.2.1\na.example. 300 A 192.0.2.2", "")
	a := e.View()
	prefix, err := dns64.New(netip.MustParsePrefix("64:ff9b::/96"))
	if err != nil {
		t.Fatal(err)
	}
	r := New(Options{
		MaxUDP: 1232, EDE: true, NSID: strings.Repeat("n", 300), DNS64: prefix,
		Private: rebinding.New([]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, nil),
	})
	q := ask(t, "a.example.", 1, func(m *dns.Msg) {
		edns(1232, true)(m)
		m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_NSID{Code: dns.EDNS0NSID}, &dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0102030405060708"}}
	})
	q.HasCookie = true
	b := query.Block{EDE: 15, Reason: "a list with a long name", TTL: time.Second}
	s := query.Synth{TTL: 5}
	var big [500]byte
	for room := range big {
		out := big[:room:room]
		q.Turn.NumAliases, q.Turn.Flatten, q.Turn.Edit = 0, false, 0
		for i, n := range []int{
			r.Answer(q, &a, t0, out), r.Block(q, &b, out), r.Synth(q, &s, out), r.Truncated(q, out),
			r.Error(q, 2, 22, "some text", out), r.Fault(q, query.BadVers, out), r.Fault(q, query.FormErr, out),
		} {
			if n > room {
				t.Fatalf("room %d: case %d wrote %d bytes", room, i, n)
			}
		}
		q.Turn.NumAliases = 1
		q.Turn.Aliases[0].Target = cur.Name
		if n := r.Answer(q, &a, t0, out); n > room {
			t.Fatalf("room %d: %d bytes behind an alias", room, n)
		}
		for edit := range query.EditPrivate | query.EditExcluded | query.EditSynthesise + 1 {
			q.Turn.Edit = edit
			if n := r.Answer(q, &a, t0, out); n > room {
				t.Fatalf("room %d: %d bytes of an edited answer", room, n)
			}
		}
	}
	out := make([]byte, 1232)
	for edit := range query.EditPrivate | query.EditExcluded | query.EditSynthesise + 1 {
		q.Turn.NumAliases, q.Turn.Edit = 0, edit
		if n := testing.AllocsPerRun(100, func() { r.Answer(q, &a, t0, out) }); n != 0 {
			t.Errorf("%v allocations for an answer with edits %b", n, edit)
		}
	}
	if m := unpack(t, out[:r.Answer(q, &a, t0, out)]); len(m.IsEdns0().Option) != 2 {
		t.Errorf("options %v", m.IsEdns0().Option)
	}
}
