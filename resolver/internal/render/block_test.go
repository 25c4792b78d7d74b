package render

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Blocking answers in all modes, for all types that matter and for clients with DO=1 and AD=1: what is in them,
// with which TTL, and what is not.
func TestBlockingAnswers(t *testing.T) {
	r := New(Options{MaxUDP: 1232, EDE: true})
	null, nx := query.Block{Mode: query.BlockNull}, query.Block{Mode: query.BlockNXDomain}
	custom := query.Block{Mode: query.BlockCustom, IPv4: netip.MustParseAddr("192.0.2.10")}
	both := query.Block{Mode: query.BlockCustom, IPv4: netip.MustParseAddr("192.0.2.10"), IPv6: netip.MustParseAddr("2001:db8::10")}
	const empty = "NOERROR + SOA"
	for _, c := range []struct {
		row   string
		block query.Block
		want  map[uint16]string
	}{
		{"B01", null, map[uint16]string{dns.TypeA: "0.0.0.0", dns.TypeAAAA: "::", dns.TypeMX: empty, dns.TypeHTTPS: empty, dns.TypeSVCB: empty, dns.TypeTXT: empty,
			dns.TypeNS: empty, dns.TypeSOA: empty, dns.TypeCNAME: empty, dns.TypeDS: empty, dns.TypeDNSKEY: empty, dns.TypeRRSIG: empty, dns.TypePTR: empty, dns.TypeSRV: empty, dns.TypeANY: empty, 65280: empty}},
		{"B02", nx, map[uint16]string{dns.TypeA: "NXDOMAIN + SOA", dns.TypeAAAA: "NXDOMAIN + SOA", dns.TypeHTTPS: "NXDOMAIN + SOA", dns.TypeANY: "NXDOMAIN + SOA", dns.TypeDS: "NXDOMAIN + SOA"}},
		{"B03", custom, map[uint16]string{dns.TypeA: "192.0.2.10", dns.TypeAAAA: empty, dns.TypeTXT: empty, dns.TypeHTTPS: empty, dns.TypeANY: empty}},
		{"", both, map[uint16]string{dns.TypeA: "192.0.2.10", dns.TypeAAAA: "2001:db8::10", dns.TypeMX: empty}},
		{"", query.Block{Mode: query.BlockNoData}, map[uint16]string{dns.TypeA: empty, dns.TypeAAAA: empty, dns.TypeTXT: empty, dns.TypeANY: empty}},
		{"", query.Block{Mode: query.BlockRefused}, map[uint16]string{dns.TypeA: "REFUSED", dns.TypeAAAA: "REFUSED", dns.TypeMX: "REFUSED", dns.TypeANY: "REFUSED"}},
	} {
		for typ, want := range c.want {
			for _, do := range []bool{false, true} {
				for _, ttl := range []uint32{0, 77, 300} { // B04: the TTL is what was set, exactly
					b := c.block
					b.TTL, b.EDE, b.Reason = time.Duration(ttl)*time.Second, EDEFiltered, "OISD"
					q := ask(t, "wWw.A.eXaMpLe.", typ, func(m *dns.Msg) { m.SetEdns0(1232, do); m.AuthenticatedData = true })
					var out [1500]byte
					m := unpack(t, out[:r.Block(q, &b, out[:])])
					what := fmt.Sprintf("%s mode %d %s DO=%v TTL %d", c.row, b.Mode, dns.TypeToString[typ], do, ttl)
					if got := shape(t, what, m, ttl); got != want {
						t.Errorf("%s: %s, want %s", what, got, want)
					}
					if m.AuthenticatedData || m.Authoritative || !m.RecursionAvailable || m.Question[0].Name != "wWw.A.eXaMpLe." || m.IsEdns0() == nil || m.IsEdns0().Do() != do {
						t.Errorf("%s: %v", what, m)
					}
					e, ok := m.IsEdns0().Option[0].(*dns.EDNS0_EDE)
					if !ok || len(m.IsEdns0().Option) != 1 || e.InfoCode != 17 || e.ExtraText != "OISD" {
						t.Errorf("%s: extended error %v", what, m.IsEdns0().Option)
					}
				}
			}
		}
	}
}

// shape says in words what a response holds, and that every record in it has the asked name, in its letters, and the
// TTL.
func shape(t *testing.T, what string, m *dns.Msg, ttl uint32) string {
	t.Helper()
	for _, rr := range append(m.Answer, m.Ns...) {
		if h := rr.Header(); h.Name != m.Question[0].Name || h.Ttl != ttl { // B08
			t.Errorf("%s: %v", what, rr)
		}
	}
	if m.Rcode == dns.RcodeRefused && len(m.Answer)+len(m.Ns) == 0 {
		return "REFUSED"
	}
	if len(m.Answer) == 1 && len(m.Ns) == 0 && m.Rcode == 0 {
		switch rr := m.Answer[0].(type) {
		case *dns.A:
			return rr.A.String()
		case *dns.AAAA:
			return rr.AAAA.String()
		}
	}
	if len(m.Answer) == 0 && len(m.Ns) == 1 {
		if soa, ok := m.Ns[0].(*dns.SOA); ok && soa.Minttl == ttl { // RFC 2308 section 5: the least of TTL and MINIMUM
			return dns.RcodeToString[m.Rcode] + " + SOA"
		}
	}
	return m.String()
}

// A client that asks for structured error data gets it, with what the operator has to say; in a message that has
// no room for it the answer goes before.
func TestStructuredErrors(t *testing.T) {
	b := query.Block{Mode: query.BlockNXDomain, TTL: 10 * time.Second, EDE: EDEBlocked, Reason: "Malware \"x\" & ünsafe\x01"}
	raw := func(data ...byte) func(*dns.Msg) {
		return func(m *dns.Msg) {
			m.SetEdns0(1232, false)
			m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_LOCAL{Code: dns.EDNS0EDE, Data: data}}
		}
	}
	full := New(Options{MaxUDP: 1232, EDE: true, Contact: []string{"mailto:abuse@example.net"}, Organization: "Example"})
	for _, c := range []struct {
		what string
		r    *Renderer
		edit func(*dns.Msg)
		want string
	}{
		{"an empty option", full, raw(), `{"c":["mailto:abuse@example.net"],"j":"Malware \"x\" & ünsafe\u0001","o":"Example"}`},
		{"code 0 and no text", full, raw(0, 0), `{"c":["mailto:abuse@example.net"],"j":"Malware \"x\" & ünsafe\u0001","o":"Example"}`},
		{"an operator who says nothing", New(Options{MaxUDP: 1232, EDE: true}), raw(), `{"j":"Malware \"x\" & ünsafe\u0001"}`},
		{"another code", full, raw(0, 17), b.Reason},
		{"a text", full, raw(0, 0, 'x'), b.Reason},
		{"nothing", full, edns(1232, false), b.Reason},
	} {
		q := ask(t, "x.example.", dns.TypeA, c.edit)
		var out [1500]byte
		m := unpack(t, out[:c.r.Block(q, &b, out[:])])
		e, ok := m.IsEdns0().Option[0].(*dns.EDNS0_EDE)
		if !ok || e.InfoCode != 15 || m.Rcode != dns.RcodeNameError {
			t.Errorf("%s: %v", c.what, m)
			continue
		}
		got, want := e.ExtraText, c.want
		if strings.HasPrefix(want, "{") {
			var a, b any
			if json.Unmarshal([]byte(got), &a) != nil || json.Unmarshal([]byte(want), &b) != nil || fmt.Sprint(a) != fmt.Sprint(b) {
				t.Errorf("%s: %q, want %q", c.what, got, want)
			}
		} else if got != want {
			t.Errorf("%s: %q, want %q", c.what, got, want)
		}
	}
	// 512 bytes hold the answer and not the data.
	long := New(Options{MaxUDP: 1232, EDE: true, Contact: []string{"https://example.net/" + strings.Repeat("a", 170), "https://example.net/" + strings.Repeat("b", 170)}})
	for _, mode := range []query.BlockMode{query.BlockNull, query.BlockNXDomain, query.BlockRefused} {
		b.Mode = mode
		q := ask(t, strings.Repeat("label.", 20)+"example.", dns.TypeA, func(m *dns.Msg) { raw()(m); m.IsEdns0().SetUDPSize(512) })
		var out [1500]byte
		m := unpack(t, out[:long.Block(q, &b, out[:])])
		if m.Truncated || mode != query.BlockRefused && len(m.Answer)+len(m.Ns) != 1 {
			t.Errorf("mode %d in 512 bytes: %v", mode, m)
		}
	}
	// Bytes that are no UTF-8, and a name of a list that is too long.
	b.Reason = strings.Repeat("ü", 100) + "\xff"
	q := ask(t, "x.example.", dns.TypeA, raw())
	var out [1500]byte
	m := unpack(t, out[:full.Block(q, &b, out[:])])
	if e := m.IsEdns0().Option[0].(*dns.EDNS0_EDE); !json.Valid([]byte(e.ExtraText)) {
		t.Errorf("%q", e.ExtraText)
	}
}
