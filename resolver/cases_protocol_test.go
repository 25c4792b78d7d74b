package resolver_test

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// newProtocolLab is a lab with two more zones, one of them signed.
func newProtocolLab(t *testing.T, edit func(*resolver.Options)) *lab {
	t.Helper()
	sim := siminternet.Standard(clock.Wall())
	server := sim.Servers("ed25519.example.")
	deep := strings.Repeat(strings.Repeat("d", 63)+".", 3) + strings.Repeat("e", 63-2-len("cases.example.")) // 255 octets with the zone's name
	err := sim.Replace(
		siminternet.Zone{Name: "cases.example.", Servers: server, Records: `
v4 300 A 192.0.2.1
v4 300 A 192.0.2.2
both A 192.0.2.3
both AAAA 2001:db8::3
mapped A 192.0.2.4
mapped AAAA ::ffff:192.0.2.9
mixed A 192.0.2.5
mixed AAAA ::ffff:192.0.2.9
mixed AAAA 2001:db8::5
onlymapped AAAA ::ffff:192.0.2.9
alias CNAME v4
private A 10.1.2.3
half A 10.1.2.3
half A 192.0.2.6
toprivate CNAME x.inside
x.inside A 10.1.2.3
hint HTTPS 1 . alpn=h2 ipv4hint=10.1.2.3
v6private AAAA fd00::1
text TXT only
unknown TYPE65280 \# 5 c000022105
odd\000\046\255byte A 192.0.2.7
` + deep + ` A 192.0.2.8
bad A 192.0.2.10
`},
		siminternet.Zone{Name: "sealed.example.", Servers: server, Algorithm: dns.ED25519, Records: `
v4 A 192.0.2.20
private A 10.1.2.3
text TXT only
broken A 192.0.2.21
`, FaultAt: map[string]siminternet.Fault{"broken": siminternet.NoDenial}},
	)
	if err != nil {
		t.Fatal(err)
	}
	return newLabIn(t, sim, edit)
}

// send writes a message as it is and returns what comes back, nil for silence.
func (l *lab) send(network string, wire []byte) []byte {
	l.t.Helper()
	conn, err := l.net.Dial(l.t.Context(), network, l.addr.String())
	if err != nil {
		l.t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	if network == "tcp" {
		wire = append(binary.BigEndian.AppendUint16(nil, uint16(len(wire))), wire...)
	}
	if _, err := conn.Write(wire); err != nil {
		l.t.Fatal(err)
	}
	buf := make([]byte, 65535)
	if network == "udp" {
		n, err := conn.Read(buf)
		if err != nil {
			return nil
		}
		return buf[:n]
	}
	if _, err := io.ReadFull(conn, buf[:2]); err != nil {
		return nil
	}
	n := binary.BigEndian.Uint16(buf)
	if _, err := io.ReadFull(conn, buf[:n]); err != nil {
		return nil
	}
	return buf[:n]
}

func packed(t testing.TB, name string, typ uint16, edit func(*dns.Msg)) []byte {
	t.Helper()
	m := new(dns.Msg)
	m.SetQuestion(name, typ)
	m.Id = 0xcafe
	if edit != nil {
		edit(m)
	}
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// told summarises a response: RCODE, opcode if it is not QUERY, flags other than QR and RA, the answer, "soa" for a
// negative one, and the code of an extended error.
func told(wire []byte) string {
	if wire == nil {
		return "silence"
	}
	m := new(dns.Msg)
	if err := m.Unpack(wire); err != nil {
		return err.Error()
	}
	rcode := m.Rcode
	if o := m.IsEdns0(); o != nil && o.ExtendedRcode()&^15 != 0 {
		rcode = o.ExtendedRcode()
	}
	s := []string{dns.RcodeToString[rcode]}
	if rcode == dns.RcodeBadVers {
		s[0] = "BADVERS" // the number is that of BADSIG too
	}
	if m.Opcode != dns.OpcodeQuery {
		s = append(s, fmt.Sprintf("opcode=%d", m.Opcode))
	}
	for name, set := range map[string]bool{"tc": m.Truncated, "aa": m.Authoritative, "not-a-response": !m.Response, "Z": m.Zero, "id-lost": m.Id != 0xcafe} {
		if set {
			s = append(s, name)
		}
	}
	if m.AuthenticatedData {
		s = append(s, "ad")
	}
	if len(m.Question) == 0 {
		s = append(s, "header-only")
	}
	for _, rr := range m.Answer {
		if u, ok := rr.(*dns.RFC3597); ok {
			s = append(s, fmt.Sprintf(`%s TYPE%d \# %d %s`, u.Hdr.Name, u.Hdr.Rrtype, len(u.Rdata)/2, u.Rdata))
			continue
		}
		s = append(s, siminternet.AnswerText([]dns.RR{rr})...)
	}
	for _, rr := range m.Ns {
		if rr.Header().Rrtype == dns.TypeSOA {
			s = append(s, "soa")
		}
	}
	if o := m.IsEdns0(); o != nil {
		for _, x := range o.Option {
			if e, ok := x.(*dns.EDNS0_EDE); ok {
				s = append(s, fmt.Sprintf("ede=%d", e.InfoCode))
			}
		}
	}
	return strings.Join(s, " ")
}

func edns(do bool) func(*dns.Msg) { return func(m *dns.Msg) { m.SetEdns0(1232, do) } }

// F22, and hardly anybody's business: what the caches hold, by a question without RD. It is shown to whom the operator
// trusts, as it was validated, and nobody is asked for it; what is past its end is also fetched anew.
func TestRecursionNotDesired(t *testing.T) {
	for _, trusted := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			l := newProtocolLab(t, func(o *resolver.Options) {
				o.Cache.MaxStale = 24 * time.Hour
				if !trusted {
					o.Access.Unlimited = nil
				}
			})
			defer l.stop()
			look := func(name string, typ uint16) string {
				return told(l.send("udp", packed(t, name, typ, func(m *dns.Msg) { m.RecursionDesired = false; edns(true)(m) })))
			}
			queries := func() int { return l.sim.Count(func(siminternet.LogEntry) bool { return true }) }
			names := []struct {
				name string
				typ  uint16
				want string
			}{
				{"v4.cases.example.", dns.TypeA, "NOERROR v4.cases.example. A 192.0.2.1 v4.cases.example. A 192.0.2.2"},
				{"alias.cases.example.", dns.TypeA, "NOERROR alias.cases.example. CNAME v4.cases.example. v4.cases.example. A 192.0.2.1 v4.cases.example. A 192.0.2.2"},
				{"v4.sealed.example.", dns.TypeA, "NOERROR ad v4.sealed.example. A 192.0.2.20"},
				{"nx.sealed.example.", dns.TypeA, "NXDOMAIN ad soa"},
				{"text.cases.example.", dns.TypeA, "NOERROR soa"},
			}
			before := queries()
			for _, c := range names {
				if got := look(c.name, c.typ); got != "REFUSED ede=20" {
					t.Errorf("%s before anybody asked for it: %s", c.name, got)
				}
			}
			if n := queries() - before; n != 0 {
				t.Errorf("looking caused %d queries", n)
			}
			for _, c := range names {
				l.ask(c.name, c.typ, nil)
			}
			before = queries()
			for range 2 {
				for _, c := range names {
					want := c.want
					if !trusted {
						want = "REFUSED ede=20"
					}
					got := look(c.name, c.typ)
					if trusted && strings.HasPrefix(c.want, "NOERROR ad") { // its signature is not told of
						got, _, _ = strings.Cut(got, " v4.sealed.example. RRSIG")
					}
					if got != want {
						t.Errorf("trusted %t, %s: %s, want %s", trusted, c.name, got, want)
					}
				}
			}
			if n := queries() - before; n != 0 {
				t.Errorf("looking caused %d queries", n)
			}
			time.Sleep(301 * time.Second)
			want, fresh := "NOERROR v4.cases.example. A 192.0.2.1 v4.cases.example. A 192.0.2.2 ede=3", 1
			if !trusted {
				want, fresh = "REFUSED ede=20", 0
			}
			if got := look("v4.cases.example.", dns.TypeA); got != want {
				t.Errorf("trusted %t, past its end: %s, want %s", trusted, got, want)
			}
			synctest.Wait()
			time.Sleep(5 * time.Second)
			n := l.sim.Count(func(e siminternet.LogEntry) bool { return strings.EqualFold(e.Name, "v4.cases.example.") }) - 1
			if n != fresh {
				t.Errorf("trusted %t: what was past its end was fetched anew %d times, want %d", trusted, n, fresh)
			}
			if trusted {
				if got := look("v4.cases.example.", dns.TypeA); got != names[0].want {
					t.Errorf("afterwards: %s", got)
				}
			}
		})
	}
}

// What a client may send, and what it must get: one row for each behaviour, over UDP and TCP.
func TestClientProtocol(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newProtocolLab(t, func(o *resolver.Options) { o.NodeID, o.Local.Version = "node-7", "sluice" })
		defer l.stop()
		l.ask("v4.cases.example.", dns.TypeA, nil) // a name that is in the caches
		header := func(f func(b []byte)) []byte {
			b := packed(t, "v4.cases.example.", dns.TypeA, nil)
			f(b)
			return b
		}
		class := func(name string, typ, class uint16) []byte {
			return packed(t, name, typ, func(m *dns.Msg) { m.Question[0].Qclass = class; m.SetEdns0(1232, false) })
		}
		const v4 = "NOERROR v4.cases.example. A 192.0.2.1 v4.cases.example. A 192.0.2.2"
		for _, c := range []struct {
			row  string // of the collection of known behaviours, "" for others
			what string
			wire []byte
			want string
		}{
			{"F03", "opcode 15", header(func(b []byte) { b[2] |= 15 << 3 }), "NOTIMP opcode=15 header-only"},
			{"F03", "NOTIFY", header(func(b []byte) { b[2] |= 4 << 3 }), "NOTIMP opcode=4 header-only"},
			{"F03", "UPDATE", header(func(b []byte) { b[2] |= 5 << 3 }), "NOTIMP opcode=5 header-only"},
			{"F04", "EDNS version 1", packed(t, "v4.cases.example.", dns.TypeA, func(m *dns.Msg) { edns(false)(m); m.IsEdns0().SetVersion(1) }), "BADVERS"},
			{"F05", "an unknown EDNS option", packed(t, "v4.cases.example.", dns.TypeA, func(m *dns.Msg) {
				edns(false)(m)
				m.IsEdns0().Option = append(m.IsEdns0().Option, &dns.EDNS0_LOCAL{Code: 65001 + 99, Data: []byte("x")})
			}), v4},
			{"F06", "an unknown EDNS flag", packed(t, "v4.cases.example.", dns.TypeA, func(m *dns.Msg) { edns(false)(m); m.IsEdns0().Hdr.Ttl |= 0x40 }), v4},
			{"F06", "the header's Z", header(func(b []byte) { b[3] |= 0x40 }), v4},
			{"F07", "no question", header(func(b []byte) { b[5] = 0 }), "FORMERR header-only"},
			{"F07", "two questions", header(func(b []byte) { b[5] = 2 }), "FORMERR header-only"},
			{"F08", "a response", header(func(b []byte) { b[2] |= 0x80 }), "silence"},
			{"", "a message of eleven bytes", header(func([]byte) {})[:11], "silence"},
			{"F22", "RD=0, a name nobody asked for", packed(t, "both.cases.example.", dns.TypeA, func(m *dns.Msg) { m.RecursionDesired = false; edns(false)(m) }), "REFUSED ede=20"},
			{"F22", "RD=0, a name of the resolver's own", packed(t, "version.bind.", dns.TypeTXT, func(m *dns.Msg) { m.RecursionDesired = false; m.Question[0].Qclass = dns.ClassCHAOS }), `NOERROR version.bind. TXT "sluice"`},
			{"F23", "version.bind", class("version.bind.", dns.TypeTXT, dns.ClassCHAOS), `NOERROR version.bind. TXT "sluice"`},
			{"F23", "id.server", class("ID.server.", dns.TypeTXT, dns.ClassCHAOS), `NOERROR id.server. TXT "node-7"`},
			{"F23", "another name of class CH", class("authors.bind.", dns.TypeTXT, dns.ClassCHAOS), "REFUSED ede=21"},
			{"F23", "class ANY", class("v4.cases.example.", dns.TypeA, dns.ClassANY), "REFUSED ede=21"},
			{"F23", "class 7", class("v4.cases.example.", dns.TypeA, 7), "REFUSED ede=21"},
			{"F23", "class NONE", class("v4.cases.example.", dns.TypeA, dns.ClassNONE), "REFUSED ede=21"},
			{"F24", "AXFR", packed(t, "cases.example.", dns.TypeAXFR, nil), "REFUSED"},
			{"F24", "IXFR", packed(t, "cases.example.", dns.TypeA, func(m *dns.Msg) { m.SetIxfr("cases.example.", 1, "ns.", "x."); m.Id = 0xcafe }), "REFUSED"},
			{"", "TSIG, which nobody checks", packed(t, "v4.cases.example.", dns.TypeA, func(m *dns.Msg) { m.SetTsig("k.", dns.HmacSHA256, 300, 1) }), "FORMERR header-only"},
			{"", "TKEY", packed(t, "v4.cases.example.", dns.TypeTKEY, nil), "NOTIMP"},
			{"", "type OPT", packed(t, "v4.cases.example.", dns.TypeOPT, nil), "FORMERR"},
			{"F28", "octets that presentation form escapes", packed(t, `odd\000\.\255byte.cases.example.`, dns.TypeA, nil), `NOERROR odd\000\.\255byte.cases.example. A 192.0.2.7`},
			{"F29", "256 octets", []byte("\xca\xfe\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + strings.Repeat("\x3f"+strings.Repeat("d", 63), 4) + "\x00\x00\x01\x00\x01"), "FORMERR header-only"},
			{"F29", "a label of 64 octets", []byte("\xca\xfe\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x40" + strings.Repeat("d", 64) + "\x00\x00\x01\x00\x01"), "FORMERR header-only"},
			{"", "a pointer to itself as name", []byte("\xca\xfe\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\xc0\x0c\x00\x01\x00\x01"), "FORMERR header-only"},
			{"", "an unknown type (RFC 3597)", packed(t, "unknown.cases.example.", 65280, nil), `NOERROR unknown.cases.example. TYPE65280 \# 5 c000022105`},
			{"", "an unknown type that is not there", packed(t, "unknown.cases.example.", 65281, nil), "NOERROR soa"},
		} {
			for _, network := range []string{"udp", "tcp"} {
				if network == "tcp" && c.want == "silence" {
					continue // the connection ends
				}
				got := told(l.send(network, c.wire))
				if got != c.want {
					t.Errorf("%s %s over %s: %s, want %s", c.row, c.what, network, got, c.want)
				}
			}
		}
		if n := l.sim.Count(func(e siminternet.LogEntry) bool { return strings.EqualFold(e.Name, "both.cases.example.") }); n != 0 {
			t.Errorf("F22: a query without RD sent %d queries", n)
		}

		// F19: the question comes back in the client's letters, also from the cache; F29: the longest name.
		long := strings.Repeat(strings.Repeat("D", 63)+".", 3) + strings.Repeat("e", 63-2-len("cases.example.")) + ".cases.example."
		for _, name := range []string{"V4.CaSeS.eXaMpLe.", long} {
			wire := packed(t, name, dns.TypeA, nil)
			got := l.send("udp", wire)
			if len(got) < len(wire) || string(got[12:len(wire)]) != string(wire[12:]) || binary.BigEndian.Uint16(got[6:]) == 0 {
				t.Errorf("F19, F29: %q is not answered as it was asked", name)
			}
		}

		// F25: ANY is one RRset, and nothing is asked for it that is at hand.
		l.sim.ResetLog()
		m, err := l.ask("v4.cases.example.", dns.TypeANY, nil)
		if err != nil || len(m.Answer) != 2 || m.Answer[0].Header().Rrtype != dns.TypeA || l.sim.Count(nil) != 0 {
			t.Errorf("F25: %v, %v, after %d queries", m, err, l.sim.Count(nil))
		}

		// F17: NSID once, however often it is asked for; the cookie that comes back is then taken.
		options := func(o ...dns.EDNS0) *dns.OPT {
			m := new(dns.Msg)
			if err := m.Unpack(l.send("udp", packed(t, "v4.cases.example.", dns.TypeA, func(m *dns.Msg) {
				edns(false)(m)
				m.IsEdns0().Option = o
			}))); err != nil || m.IsEdns0() == nil || m.Rcode != dns.RcodeSuccess {
				t.Fatalf("%v: %v", m, err)
			}
			return m.IsEdns0()
		}
		var many []dns.EDNS0
		for range 200 {
			many = append(many, &dns.EDNS0_NSID{Code: dns.EDNS0NSID}, &dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0102030405060708"})
		}
		got := options(many...).Option
		if len(got) != 2 {
			t.Fatalf("F17: options %v", got)
		}
		cookie, ok := got[0].(*dns.EDNS0_COOKIE)
		nsid, ok2 := got[1].(*dns.EDNS0_NSID)
		if !ok || !ok2 || len(cookie.Cookie) != 48 || !strings.HasPrefix(cookie.Cookie, "010203040506070801000000") || nsid.Nsid != hex.EncodeToString([]byte("node-7")) {
			t.Errorf("F17: options %v", got)
		}

		// RFC 7873 section 5.4: a cookie without a question is given, or told whether it is good. Without a cookie
		// the question is missed.
		alone := func(cookie string) *dns.Msg {
			q := new(dns.Msg)
			q.Id = 4711
			q.SetEdns0(1232, false)
			if cookie != "" {
				q.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: cookie}}
			}
			wire, err := q.Pack()
			if err != nil {
				t.Fatal(err)
			}
			m := new(dns.Msg)
			if err := m.Unpack(l.send("udp", wire)); err != nil || m.Id != 4711 || !m.Response || len(m.Question)+len(m.Answer)+len(m.Ns) != 0 {
				t.Fatalf("%q alone: %v, %v", cookie, m, err)
			}
			return m
		}
		server := func(m *dns.Msg) string {
			if o := m.IsEdns0(); o != nil && len(o.Option) == 1 {
				return o.Option[0].(*dns.EDNS0_COOKIE).Cookie
			}
			return ""
		}
		const client = "0102030405060708"
		m = alone(client)
		good := server(m)
		if m.Rcode != dns.RcodeSuccess || len(good) != 48 || !strings.HasPrefix(good, client) {
			t.Errorf("a cookie alone: %v", m)
		}
		if m := alone(good); m.Rcode != dns.RcodeSuccess || len(server(m)) != 48 {
			t.Errorf("a good cookie alone: %v", m)
		}
		forged := good[:46] + "00"
		if forged == good {
			forged = good[:46] + "01"
		}
		if m := alone(forged); m.Rcode != dns.RcodeBadCookie || len(server(m)) != 48 {
			t.Errorf("a cookie that is not ours alone: %v", m)
		}
		if m := alone(""); m.Rcode != dns.RcodeFormatError || m.IsEdns0() != nil {
			t.Errorf("nothing alone: %v", m)
		}
	})
}

// F13 and F14: queries on one TCP connection, in whatever pieces they come, are answered as soon as each can be.
func TestTCPPipelining(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newProtocolLab(t, nil)
		defer l.stop()
		conn, err := l.net.Dial(t.Context(), "tcp", l.addr.String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(10 * time.Second))
		l.ask("v4.cases.example.", dns.TypeA, nil)
		frame := func(name string, id uint16) []byte {
			b := packed(t, name, dns.TypeA, func(m *dns.Msg) { m.Id = id })
			return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)
		}
		next := func() uint16 {
			var b [4096]byte
			if _, err := io.ReadFull(conn, b[:2]); err != nil {
				t.Fatal(err)
			}
			n := binary.BigEndian.Uint16(b[:])
			if _, err := io.ReadFull(conn, b[:n]); err != nil {
				t.Fatal(err)
			}
			return binary.BigEndian.Uint16(b[:])
		}
		slow := frame("www.slow.example.", 1)
		for i := range slow { // one byte a segment, the length's too
			conn.Write(slow[i : i+1])
		}
		var ten []byte
		for id := range uint16(10) {
			ten = append(ten, frame("v4.cases.example.", 100+id)...)
		}
		conn.Write(ten)
		var ids []uint16
		for range 11 {
			ids = append(ids, next())
		}
		if ids[10] != 1 {
			t.Errorf("the slow name was not answered last: %v", ids)
		}
		slices.Sort(ids)
		if want := []uint16{1, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109}; !slices.Equal(ids, want) {
			t.Errorf("answered were %v", ids)
		}
	})
}

// F26: who may not ask is told so, before anything is done.
func TestAccessRefusedProtocol(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newProtocolLab(t, func(o *resolver.Options) {
			nobody := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
			o.Access = resolver.AccessOptions{Allow: nobody, Unlimited: nobody}
		})
		defer l.stop()
		if got := told(l.send("udp", packed(t, "v4.cases.example.", dns.TypeA, edns(false)))); got != "REFUSED ede=18" || l.sim.Count(nil) != 0 {
			t.Errorf("F26: %s after %d queries", got, l.sim.Count(nil))
		}
	})
}

// F30: records that are not what their type asks for are left out, and the good ones given.
func TestMalformedRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newProtocolLab(t, nil)
		defer l.stop()
		rr := func(typ uint16, data string) dns.RR {
			return &dns.RFC3597{Hdr: dns.RR_Header{Name: "bad.cases.example.", Rrtype: typ, Class: dns.ClassINET, Ttl: 60}, Rdata: data}
		}
		for _, a := range l.sim.Servers("cases.example.") {
			l.sim.SetBehaviour(a, siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
				if !strings.EqualFold(q.Msg.Question[0].Name, "bad.cases.example.") {
					return nil
				}
				m := q.Answer()
				m.Ns, m.Rcode = nil, dns.RcodeSuccess
				switch q.Msg.Question[0].Qtype {
				case dns.TypeA:
					m.Answer = append(m.Answer, rr(dns.TypeA, "c00002"), rr(dns.TypeA, "c000020a0b"))
				case dns.TypeAAAA:
					m.Answer = []dns.RR{rr(dns.TypeAAAA, "20")}
				case dns.TypeNSEC:
					m.Answer = []dns.RR{rr(dns.TypeNSEC, "0000")}
				case dns.TypeMX:
					m.Ns = []dns.RR{rr(dns.TypeNSEC, "0000"), mustRR("cases.example. 60 SOA . . 1 1 1 1 1")}
				case dns.TypeTXT:
					m.Answer = append(m.Answer, rr(dns.TypeTXT, "0561"), rr(dns.TypeTXT, "0161"))
				case dns.TypeHTTPS:
					m.Answer = []dns.RR{rr(dns.TypeHTTPS, "0001000001000302683200010003026833")}
				}
				return &siminternet.Reply{Msg: m}
			}})
		}
		if got := told(l.send("udp", packed(t, "bad.cases.example.", dns.TypeA, nil))); got != "NOERROR bad.cases.example. A 192.0.2.10" {
			t.Errorf("one good A record: %s", got)
		}
		if got := told(l.send("udp", packed(t, "bad.cases.example.", dns.TypeAAAA, nil))); got != "SERVFAIL" {
			t.Errorf("no good AAAA record: %s", got) // which is not the same as none
		}
		cd := func(m *dns.Msg) { edns(true)(m); m.CheckingDisabled = true }
		if got := told(l.send("udp", packed(t, "bad.cases.example.", dns.TypeNSEC, cd))); !strings.HasPrefix(got, "SERVFAIL") {
			t.Errorf("an NSEC record without a whole window: %s", got)
		}
		if got := l.send("udp", packed(t, "bad.cases.example.", dns.TypeMX, cd)); !strings.HasPrefix(told(got), "NOERROR") || strings.Contains(hex.EncodeToString(got), "002f00010000003c00020000") {
			t.Errorf("an NSEC record without a whole window beside the SOA record: %x", got)
		}
		if got := told(l.send("udp", packed(t, "bad.cases.example.", dns.TypeTXT, nil))); got != `NOERROR bad.cases.example. TXT "a"` {
			t.Errorf("one good TXT record: %s", got)
		}
		raw := l.send("udp", packed(t, "bad.cases.example.", dns.TypeHTTPS, nil))
		if !strings.Contains(hex.EncodeToString(raw), "0001000001000302683200010003026833") {
			t.Errorf("HTTPS with a key twice: %x", raw)
		}
	})
}

// The special names: what is answered without asking anybody, and what is resolved as any.
func TestSpecialNames(t *testing.T) {
	for _, zones := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			l := newProtocolLab(t, func(o *resolver.Options) {
				o.Local.DefaultZones = zones
				r, err := resolver.ParseLocal("_dns.resolver.arpa.", "SVCB 1 dns.example. alpn=dot")
				if err != nil {
					t.Fatal(err)
				}
				o.Local.Records = append(o.Local.Records, r)
			})
			defer l.stop()
			for _, c := range []struct {
				row, name string
				typ       uint16
				want      string // "" for what is resolved as any
			}{
				{"G01", "localhost.", dns.TypeA, "NOERROR localhost. A 127.0.0.1"},
				{"G01", "localhost.", dns.TypeAAAA, "NOERROR localhost. AAAA ::1"},
				{"G01", "foo.localhost.", dns.TypeA, "NOERROR foo.localhost. A 127.0.0.1"},
				{"G02", "1.1.168.192.in-addr.arpa.", dns.TypePTR, "NXDOMAIN soa"},
				{"G02", "10.in-addr.arpa.", dns.TypeSOA, "NOERROR 10.in-addr.arpa. SOA 10.in-addr.arpa. nobody.invalid. 1 3600 1200 604800 10800"},
				{"G02", "x.d.f.ip6.arpa.", dns.TypePTR, "NXDOMAIN soa"},
				{"G02", "1.0.0.127.in-addr.arpa.", dns.TypePTR, "NOERROR 1.0.0.127.in-addr.arpa. PTR localhost."},
				{"G04", "1.1.64.100.in-addr.arpa.", dns.TypePTR, "NXDOMAIN soa"},
				{"G04", "1.1.127.100.in-addr.arpa.", dns.TypePTR, "NXDOMAIN soa"},
				{"G04", "1.1.128.100.in-addr.arpa.", dns.TypePTR, ""},
				{"G05", "x.test.", dns.TypeA, "NXDOMAIN soa"},
				{"G05", "x.invalid.", dns.TypeA, "NXDOMAIN soa"},
				{"", "printer.local.", dns.TypeA, "NXDOMAIN soa"},
				{"", "x.onion.", dns.TypeA, "NXDOMAIN soa"},
				{"G08", "x.home.arpa.", dns.TypeA, "NXDOMAIN soa"},
				{"G08", "home.arpa.", dns.TypeDS, ""},
				{"", "x.resolver.arpa.", dns.TypeA, "NOERROR soa"},
				{"G10", "ipv4only.arpa.", dns.TypeA, ""}, // this resolver has no DNS64
				{"G11", "x.alt.", dns.TypeA, ""},
				{"G23", "example.", dns.TypeSOA, ""},
			} {
				if !zones && c.row != "G01" {
					continue // each costs a walk, and says the same
				}
				l.sim.ResetLog()
				got := told(l.send("udp", packed(t, c.name, c.typ, nil)))
				asked := l.sim.Count(nil)
				switch {
				case !zones: // resolved, or denied by what the caches know already
					if c.want != "" && got == c.want && strings.HasPrefix(got, "NOERROR") {
						t.Errorf("%s %s without default zones: %s", c.row, c.name, got)
					}
				case c.want != "" && (got != c.want || asked != 0):
					t.Errorf("%s %s: %s after %d queries, want %s", c.row, c.name, got, asked, c.want)
				case c.want == "" && (got == "REFUSED" || got == "silence" || strings.Contains(got, "nobody.invalid.")):
					t.Errorf("%s %s: %s", c.row, c.name, got)
				case c.want == "" && c.row != "G11" && c.row != "G10" && asked == 0:
					t.Errorf("%s %s: nobody was asked", c.row, c.name)
				}
			}
			// RFC 9462: what is configured is given, with the default zones or without.
			if got := told(l.send("udp", packed(t, "_dns.resolver.arpa.", dns.TypeSVCB, nil))); got != `NOERROR _dns.resolver.arpa. SVCB 1 dns.example. alpn="dot"` {
				t.Errorf("the designated resolver: %s", got)
			}
		})
	}
}

// RFC 6147: AAAA records are made of A records when there are none, and of no others; what is made is never
// Secure, and never what somebody else gets who wants to validate.
func TestDNS64(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newProtocolLab(t, func(o *resolver.Options) { o.DNS64 = netip.MustParsePrefix("64:ff9b::/96") })
		defer l.stop()
		do := func(m *dns.Msg) { m.SetEdns0(1232, true); m.AuthenticatedData = true }
		cd := func(m *dns.Msg) { do(m); m.CheckingDisabled = true }
		for round, when := range []string{"cold", "warm", "hot", "later"} {
			if round == 3 {
				time.Sleep(200 * time.Second)
			}
			for _, c := range []struct {
				name string
				typ  uint16
				edit func(*dns.Msg)
				want string
			}{
				{"v4.cases.example.", dns.TypeAAAA, nil, "NOERROR v4.cases.example. AAAA 64:ff9b::c000:201 v4.cases.example. AAAA 64:ff9b::c000:202"},
				{"v4.cases.example.", dns.TypeA, nil, "NOERROR v4.cases.example. A 192.0.2.1 v4.cases.example. A 192.0.2.2"},
				{"v4.cases.example.", dns.TypeAAAA, cd, "NOERROR soa"}, // section 5.5: the client validates
				{"alias.cases.example.", dns.TypeAAAA, nil, "NOERROR alias.cases.example. CNAME v4.cases.example. v4.cases.example. AAAA 64:ff9b::c000:201 v4.cases.example. AAAA 64:ff9b::c000:202"},
				{"both.cases.example.", dns.TypeAAAA, nil, "NOERROR both.cases.example. AAAA 2001:db8::3"},
				{"mapped.cases.example.", dns.TypeAAAA, nil, "NOERROR mapped.cases.example. AAAA 64:ff9b::c000:204"},
				{"mixed.cases.example.", dns.TypeAAAA, nil, "NOERROR mixed.cases.example. AAAA 2001:db8::5"},
				{"onlymapped.cases.example.", dns.TypeAAAA, nil, "NOERROR"},
				{"text.cases.example.", dns.TypeAAAA, nil, "NOERROR soa"}, // no A records either
				{"nothing.cases.example.", dns.TypeAAAA, nil, "NXDOMAIN soa"},
				{"v4.sealed.example.", dns.TypeAAAA, do, "NOERROR v4.sealed.example. AAAA 64:ff9b::c000:214"}, // validated, yet AD is off
				{"text.sealed.example.", dns.TypeAAAA, do, "NOERROR ad soa"},
				{"broken.sealed.example.", dns.TypeAAAA, nil, "SERVFAIL"}, // a denial that does not validate
				{"ipv4only.arpa.", dns.TypeAAAA, nil, "NOERROR ipv4only.arpa. AAAA 64:ff9b::c000:aa ipv4only.arpa. AAAA 64:ff9b::c000:ab"},
				{"ipv4only.arpa.", dns.TypeA, nil, "NOERROR ipv4only.arpa. A 192.0.0.170 ipv4only.arpa. A 192.0.0.171"},
			} {
				wire := l.send("udp", packed(t, c.name, c.typ, c.edit))
				got := told(wire)
				if strings.HasPrefix(got, c.want) && strings.HasPrefix(got[len(c.want):], " ede=") {
					got = c.want
				}
				if got != c.want {
					t.Errorf("%s %s: %s, want %s", when, c.name, got, c.want)
				}
				m := new(dns.Msg)
				if m.Unpack(wire) == nil && when == "later" && c.name == "v4.cases.example." && c.typ == dns.TypeAAAA && c.edit == nil && m.Answer[0].Header().Ttl > 100 {
					t.Errorf("later: the TTL is %d", m.Answer[0].Header().Ttl)
				}
			}
		}
		// PTR questions go to the IPv4 name.
		reverse, _ := dns.ReverseAddr("64:ff9b::7f00:1")
		m, err := l.ask(reverse, dns.TypePTR, nil)
		if err != nil || len(m.Answer) == 0 || m.Answer[0].Header().Rrtype != dns.TypeCNAME || m.Answer[0].(*dns.CNAME).Target != "1.0.0.127.in-addr.arpa." {
			t.Errorf("PTR: %v, %v", m, err)
		}
	})
}

// Private addresses are left out of answers about public names; what is left is not called Secure.
func TestRebinding(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inside, err := resolver.ParseName("inside.cases.example.")
		if err != nil {
			t.Fatal(err)
		}
		l := newProtocolLab(t, func(o *resolver.Options) {
			o.Rebinding = resolver.RebindingOptions{
				Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")},
				Domains:   []resolver.Name{inside},
			}
			r, err := resolver.ParseLocal("nas.example.", "A 10.0.0.9")
			if err != nil {
				t.Fatal(err)
			}
			o.Local.Records = append(o.Local.Records, r)
		})
		defer l.stop()
		do := func(m *dns.Msg) { m.SetEdns0(1232, true) }
		for _, when := range []string{"cold", "warm", "hot"} {
			for _, c := range []struct {
				name string
				typ  uint16
				edit func(*dns.Msg)
				want string
			}{
				{"private.cases.example.", dns.TypeA, edns(false), "NOERROR soa ede=17"},
				{"half.cases.example.", dns.TypeA, edns(false), "NOERROR half.cases.example. A 192.0.2.6 ede=17"},
				{"v4.cases.example.", dns.TypeA, edns(false), "NOERROR v4.cases.example. A 192.0.2.1 v4.cases.example. A 192.0.2.2"},
				{"v6private.cases.example.", dns.TypeAAAA, nil, "NOERROR soa"},
				{"hint.cases.example.", dns.TypeHTTPS, nil, "NOERROR soa"},
				{"x.inside.cases.example.", dns.TypeA, nil, "NOERROR x.inside.cases.example. A 10.1.2.3"},
				{"toprivate.cases.example.", dns.TypeA, nil, "NOERROR toprivate.cases.example. CNAME x.inside.cases.example. x.inside.cases.example. A 10.1.2.3"},
				{"nas.example.", dns.TypeA, nil, "NOERROR nas.example. A 10.0.0.9"}, // the operator's own words
				{"private.sealed.example.", dns.TypeA, do, "NOERROR soa ede=17"},
				{"v4.sealed.example.", dns.TypeA, do, "NOERROR ad v4.sealed.example. A 192.0.2.20"},
			} {
				if got := told(l.send("udp", packed(t, c.name, c.typ, c.edit))); got != c.want {
					t.Errorf("%s %s: %s, want %s", when, c.name, got, c.want)
				}
			}
		}
	})
}

// F27: a positive answer is minimal unless the operator wants more, and then it holds the name servers of the zone at
// most.
func TestMinimalAnswers(t *testing.T) {
	for _, minimal := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			l := newProtocolLab(t, func(o *resolver.Options) { o.Answers.Minimal = minimal })
			defer l.stop()
			for range 3 { // fetched, from the cache of RRsets, from that of answers
				m, err := l.ask("v4.cases.example.", dns.TypeA, nil)
				if err != nil || m.Rcode != dns.RcodeSuccess || len(m.Answer) != 2 {
					t.Fatalf("minimal %t: %v, %v", minimal, m, err)
				}
				if minimal && len(m.Ns) > 0 || len(m.Extra) != 1 { // OPT
					t.Errorf("minimal %t: more than was asked for: %v", minimal, m)
				}
				for _, rr := range m.Ns {
					if h := rr.Header(); h.Rrtype != dns.TypeNS || !strings.EqualFold(h.Name, "cases.example.") {
						t.Errorf("authority: %v", rr)
					}
				}
			}
		})
	}
}
