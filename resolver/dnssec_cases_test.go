package resolver_test

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha1"
	"encoding/base64"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloudflare/circl/sign/ed448"
	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// The servers of the Internet that these cases happen in.
const (
	caseTLDServer  = "127.53.1.5" // example., NSEC
	optServer      = "127.53.1.6" // opt., NSEC3 with opt-out
	zServer        = "127.53.7.1" // z.example., signed, NSEC
	zServer2       = "127.53.7.2" // z.example., too
	n3Server       = "127.53.7.3" // n3.example., signed, NSEC3
	unsignedServer = "127.53.7.4" // plain.example. and kid.opt., unsigned
	faultServer    = "127.53.7.6" // signed zones with faults
	craftServer    = "127.53.7.7" // craft.example., made by its hook
)

func caseZones() zones {
	leaf := `
		www A 198.51.100.1
		www AAAA 2001:db8::1
		txt TXT "one"
		*.wc A 198.51.100.9
		a.b.ent A 198.51.100.7
		toplain CNAME www.plain.example.
		root-key-sentinel-is-ta-00001 A 198.51.100.8
		root-key-sentinel-not-ta-00001 A 198.51.100.8
		root-key-sentinel-is-ta-1 A 198.51.100.8
	`
	signed := func(name string, alg uint8, servers []string, fault siminternet.Fault) siminternet.Zone {
		z := siminternet.Zone{Name: name, Algorithm: alg, Records: leaf, Fault: fault, TTL: 300}
		for _, s := range servers {
			z.Servers = append(z.Servers, netip.MustParseAddr(s))
		}
		return z
	}
	at := func(s ...string) []string { return s }
	n3 := signed("n3.example.", 13, at(n3Server), 0)
	n3.NSEC3 = &siminternet.NSEC3{Iterations: 1, Salt: "AB"}
	opt := signed("opt.", 13, at(optServer), 0)
	opt.NSEC3 = &siminternet.NSEC3{OptOut: true}
	island := signed("island.example.", 13, at(faultServer), 0)
	island.NoDS = true
	return zones{
		signed(".", 13, at("127.53.0.1"), 0),
		signed("example.", 13, at(caseTLDServer), 0), opt,
		signed("z.example.", 13, at(zServer, zServer2), 0), n3, island,
		{Name: "plain.example.", Servers: []netip.Addr{netip.MustParseAddr(unsignedServer)}, Records: "www A 198.51.100.2\ntowild CNAME x.wc.z.example."},
		{Name: "kid.z.example.", Servers: []netip.Addr{netip.MustParseAddr(zServer)}, Records: "www A 198.51.100.4"},
		{Name: "kid.opt.", Servers: []netip.Addr{netip.MustParseAddr(unsignedServer)}, Records: "www A 198.51.100.3"},
		{Name: "craft.example.", Servers: []netip.Addr{netip.MustParseAddr(craftServer)}, Records: "www A 198.51.100.6"},
		signed("deep.down.example.", 15, at(faultServer), 0),
		signed("bad.example.", 13, at(faultServer), siminternet.BadSignature),
		signed("expired.example.", 13, at(faultServer), siminternet.Expired),
		signed("early.example.", 13, at(faultServer), siminternet.NotYetValid),
		signed("nosig.example.", 13, at(faultServer), siminternet.NoSignature),
		signed("wrongds.example.", 13, at(faultServer), siminternet.WrongDS),
		signed("alg200.example.", 13, at(faultServer), siminternet.UnknownAlgorithm),
		signed("a8.example.", 8, at(faultServer), 0),
		signed("a10.example.", 10, at(faultServer), 0),
		signed("a14.example.", 14, at(faultServer), 0),
	}
}

// newCaseLab runs a resolver in a fresh Internet of caseZones.
func newCaseLab(t *testing.T, begin time.Time, edit func(*resolver.Options)) *lab {
	t.Helper()
	sim, err := siminternet.New(begin, caseZones()...)
	if err != nil {
		t.Fatal(err)
	}
	return newLabIn(t, sim, edit)
}

// An edit changes the answer that a good server would give.
type edit func(in *siminternet.Internet, q siminternet.Query, m *dns.Msg)

// on restricts an edit to one question.
func on(name string, typ uint16, f edit) edit {
	return func(in *siminternet.Internet, q siminternet.Query, m *dns.Msg) {
		if n, t := asked(q); n == name && t == typ {
			f(in, q, m)
		}
	}
}

// without drops the records, signatures included, that a condition holds for.
func without(cond func(rr dns.RR) bool) edit {
	return func(_ *siminternet.Internet, _ siminternet.Query, m *dns.Msg) {
		drop := func(rr dns.RR) bool {
			return rr.Header().Rrtype != dns.TypeOPT && cond(rr)
		}
		m.Answer, m.Ns = slices.DeleteFunc(m.Answer, drop), slices.DeleteFunc(m.Ns, drop)
	}
}

// covers reports whether rr is of the type, or a signature over it.
func covers(rr dns.RR, typ uint16) bool {
	sig, ok := rr.(*dns.RRSIG)
	return rr.Header().Rrtype == typ || ok && sig.TypeCovered == typ
}

func isOwner(rr dns.RR, name string) bool { return strings.EqualFold(rr.Header().Name, name) }

// goodAnswer is what a good server says to another question.
func goodAnswer(q siminternet.Query, name string, typ uint16) *dns.Msg {
	q.Msg = q.Msg.Copy()
	q.Msg.Question[0].Name, q.Msg.Question[0].Qtype = name, typ
	return q.Answer()
}

func rename(rrs []dns.RR, name string) []dns.RR {
	var out []dns.RR
	for _, rr := range rrs {
		rr = dns.Copy(rr)
		rr.Header().Name = name
		out = append(out, rr)
	}
	return out
}

func keep(rrs []dns.RR, typ uint16) (out []dns.RR) {
	for _, rr := range rrs {
		if covers(rr, typ) {
			out = append(out, rr)
		}
	}
	return out
}

// TestDNSSECCases are the outcomes that RFCs, or the agreement of other validating resolvers, give.
func TestDNSSECCases(t *testing.T) {
	const www, wwwAAAA = "www.z.example. A 198.51.100.1", "www.z.example. AAAA 2001:db8::1"
	nsec := func(m *dns.Msg) []dns.RR { return slices.Concat(keep(m.Ns, dns.TypeNSEC), keep(m.Ns, dns.TypeNSEC3)) }
	// dropProof drops the k-th NSEC or NSEC3 record of a negative answer or an expanded one, with its signature.
	dropProof := func(k int) edit {
		return func(in *siminternet.Internet, q siminternet.Query, m *dns.Msg) {
			var owners []string
			for _, rr := range nsec(m) {
				if rr.Header().Rrtype != dns.TypeRRSIG {
					owners = append(owners, rr.Header().Name)
				}
			}
			if k < len(owners) {
				m.Ns = slices.DeleteFunc(m.Ns, func(rr dns.RR) bool {
					return isOwner(rr, owners[k]) && (covers(rr, dns.TypeNSEC) || covers(rr, dns.TypeNSEC3))
				})
			}
		}
	}
	sentinelTag := func(l *lab) string { // the tag of the anchor that the lab has
		ds, err := dns.NewRR(l.sim.TrustAnchor())
		if err != nil {
			panic(err)
		}
		return fmt.Sprintf("%05d", ds.(*dns.DS).KeyTag)
	}
	type step struct {
		ask  string // NAME TYPE, and flags: do, cd, noad
		want string // RCODE, answer, AD if set, and the extended error if it must be given; "|" between answers
	}
	for _, c := range []struct {
		id    string
		edit  map[string]edit // by server
		opt   func(*resolver.Options)
		steps []step
		also  func(*lab)
	}{
		{id: "E03 no AD for those who neither ask for it nor for DNSSEC", steps: []step{{"www.z.example. A noad", "NOERROR | " + www}, {"www.z.example. A", "NOERROR | " + www + " AD"}}},
		{id: "E05 CD gets what is bogus", steps: []step{{"www.bad.example. A cd", "NOERROR | www.bad.example. A 198.51.100.1"}, {"www.bad.example. A", "SERVFAIL EDE 6"}}},
		{id: "E06, E63 corrupted signatures: nothing leaks", steps: []step{{"www.bad.example. A do", "SERVFAIL EDE 6"}, {"nx.bad.example. A do", "SERVFAIL EDE 6"}, {"www.bad.example. MX do", "SERVFAIL EDE 6"}}},
		{id: "E07 expired", steps: []step{{"www.expired.example. A", "SERVFAIL EDE 7"}}},
		{id: "E07 not yet valid", steps: []step{{"www.early.example. A", "SERVFAIL EDE 8"}}},
		{id: "E09 no signatures", steps: []step{{"www.nosig.example. A", "SERVFAIL EDE 10"}}},
		{id: "E09 no signature over this set", edit: map[string]edit{
			zServer:  on("www.z.example.", dns.TypeA, without(func(rr dns.RR) bool { return rr.Header().Rrtype == dns.TypeRRSIG })),
			zServer2: on("www.z.example.", dns.TypeA, without(func(rr dns.RR) bool { return rr.Header().Rrtype == dns.TypeRRSIG })),
		}, steps: []step{{"www.z.example. A", "SERVFAIL EDE 10"}, {"www.z.example. AAAA", "NOERROR | " + wwwAAAA + " AD"}}},
		{id: "E10 no key of the DS", steps: []step{{"www.wrongds.example. A", "SERVFAIL EDE 9"}}},
		{id: "E10 no keys", edit: map[string]edit{n3Server: on("n3.example.", dns.TypeDNSKEY, func(_ *siminternet.Internet, q siminternet.Query, m *dns.Msg) {
			*m = *goodAnswer(q, "n3.example.", dns.TypeMX)
			m.Question[0].Qtype = dns.TypeDNSKEY
		})}, steps: []step{{"www.n3.example. A", "SERVFAIL EDE 9"}}},
		{id: "E12 an algorithm that nobody knows", steps: []step{{"www.alg200.example. A", "NOERROR | www.alg200.example. A 198.51.100.1"}}},
		{id: "E15 algorithms", steps: []step{
			{"www.a8.example. A", "NOERROR | www.a8.example. A 198.51.100.1 AD"}, {"www.a10.example. A", "NOERROR | www.a10.example. A 198.51.100.1 AD"},
			{"www.a14.example. A", "NOERROR | www.a14.example. A 198.51.100.1 AD"}, {"www.deep.down.example. A", "NOERROR | www.deep.down.example. A 198.51.100.1 AD"},
		}},
		{id: "E17 a signature by an unknown key first", edit: map[string]edit{n3Server: on("www.n3.example.", dns.TypeA, func(_ *siminternet.Internet, _ siminternet.Query, m *dns.Msg) {
			for i, rr := range m.Answer {
				if sig, ok := rr.(*dns.RRSIG); ok {
					other := dns.Copy(sig).(*dns.RRSIG)
					other.KeyTag ^= 0x5555
					m.Answer = slices.Insert(m.Answer, i, dns.RR(other))
					return
				}
			}
		})}, steps: []step{{"www.n3.example. A", "NOERROR | www.n3.example. A 198.51.100.1 AD"}}},
		{id: "E18, E20 names and types that are not there", steps: []step{
			{"nx.z.example. A", "NXDOMAIN AD"}, {"www.z.example. MX", "NOERROR AD"}, {"ent.z.example. A", "NOERROR AD"}, {"b.ent.z.example. A", "NOERROR AD"},
			{"nx.n3.example. A", "NXDOMAIN AD"}, {"www.n3.example. MX", "NOERROR AD"}, {"ent.n3.example. A", "NOERROR AD"}, {"x.wc.n3.example. MX", "NOERROR AD"},
		}},
		{id: "E21 the type that is denied is there", edit: map[string]edit{n3Server: on("www.n3.example.", dns.TypeA, func(_ *siminternet.Internet, q siminternet.Query, m *dns.Msg) {
			m.Answer, m.Ns = nil, goodAnswer(q, "www.n3.example.", dns.TypeMX).Ns
		}), zServer: on("www.z.example.", dns.TypeA, func(_ *siminternet.Internet, q siminternet.Query, m *dns.Msg) {
			m.Answer, m.Ns = nil, goodAnswer(q, "www.z.example.", dns.TypeMX).Ns
		}), zServer2: on("www.z.example.", dns.TypeA, func(_ *siminternet.Internet, q siminternet.Query, m *dns.Msg) {
			m.Answer, m.Ns = nil, goodAnswer(q, "www.z.example.", dns.TypeMX).Ns
		})}, steps: []step{{"www.n3.example. A", "SERVFAIL EDE 6"}, {"www.z.example. A", "SERVFAIL EDE 6"}}},
		{id: "E23 the child's apex denies its DS", edit: map[string]edit{caseTLDServer: func(_ *siminternet.Internet, q siminternet.Query, m *dns.Msg) {
			if name, typ := asked(q); name == "n3.example." && typ == dns.TypeDS {
				m.Answer, m.Ns = nil, nil
				q.Server = netip.MustParseAddr(n3Server)
				m.Ns = goodAnswer(q, "n3.example.", dns.TypeMX).Ns
			} else if dns.IsSubDomain("n3.example.", name) {
				m.Ns = slices.DeleteFunc(m.Ns, func(rr dns.RR) bool { return covers(rr, dns.TypeDS) })
			}
		}}, steps: []step{{"www.n3.example. A", "SERVFAIL"}}},
		{id: "E23 the parent's record at the cut denies the child's names", edit: map[string]edit{unsignedServer: on("nx.plain.example.", dns.TypeA, func(_ *siminternet.Internet, q siminternet.Query, m *dns.Msg) {
			q.Server = netip.MustParseAddr(caseTLDServer)
			m.Rcode = dns.RcodeNameError
			m.Ns = append(m.Ns, nsec(goodAnswer(q, "plain.example.", dns.TypeDS))...)
		})}, steps: []step{{"nx.plain.example. A", "NXDOMAIN"}}},
		{id: "E24 a wildcard", steps: []step{{"x.wc.z.example. A do", "NOERROR | x.wc.z.example. A 198.51.100.9 AD"}, {"x.y.wc.n3.example. A", "NOERROR | x.y.wc.n3.example. A 198.51.100.9 AD"}}, also: func(l *lab) {
			m, err := l.ask("x.wc.z.example.", dns.TypeA, func(m *dns.Msg) { m.IsEdns0().SetDo() })
			if err != nil || len(keep(m.Ns, dns.TypeNSEC)) != 2 {
				l.t.Errorf("the proof is not given: %v, %v", m, err)
			}
		}},
		{id: "E25 a wildcard without proof", edit: map[string]edit{zServer: on("x.wc.z.example.", dns.TypeA, dropProof(0)), zServer2: on("x.wc.z.example.", dns.TypeA, dropProof(0)),
			n3Server: on("x.wc.n3.example.", dns.TypeA, dropProof(0))}, steps: []step{{"x.wc.z.example. A", "SERVFAIL"}, {"x.wc.n3.example. A", "SERVFAIL"}, {"y.wc.z.example. A", "NOERROR | y.wc.z.example. A 198.51.100.9 AD"}}},
		{id: "E26 a wildcard without the type", steps: []step{{"x.wc.z.example. MX", "NOERROR AD"}}},
		{id: "E28 fewer labels in the signature than the signer has", edit: map[string]edit{n3Server: on("www.n3.example.", dns.TypeA, func(in *siminternet.Internet, _ siminternet.Query, m *dns.Msg) {
			set := keep(m.Answer, dns.TypeA)[:1]
			sig := in.Sign("n3.example.", rename(set, "*.example."))
			m.Answer = append(set, rename([]dns.RR{sig}, set[0].Header().Name)...)
		})}, steps: []step{{"www.n3.example. A", "SERVFAIL"}, {"www.n3.example. AAAA", "NOERROR | www.n3.example. AAAA 2001:db8::1 AD"}}},
		{id: "E28 one label more than the signer: a wildcard at the apex that nothing denies", edit: map[string]edit{n3Server: on("www.n3.example.", dns.TypeA, func(in *siminternet.Internet, _ siminternet.Query, m *dns.Msg) {
			set := keep(m.Answer, dns.TypeA)[:1]
			sig := in.Sign("n3.example.", rename(set, "*.n3.example."))
			m.Answer = append(set, rename([]dns.RR{sig}, set[0].Header().Name)...)
		})}, steps: []step{{"www.n3.example. A", "SERVFAIL"}}},
		{id: "E31 opt-out: an unsigned child is insecure", steps: []step{{"www.kid.opt. A", "NOERROR | www.kid.opt. A 198.51.100.3"}}},
		{id: "E34 a child covered by a record without opt-out", edit: map[string]edit{caseTLDServer: nil, n3Server: func(_ *siminternet.Internet, q siminternet.Query, m *dns.Msg) {
			name, typ := asked(q)
			if !dns.IsSubDomain("ghost.n3.example.", name) {
				return
			}
			proof := nsec(goodAnswer(q, "ghost.n3.example.", dns.TypeA))
			m.Rcode, m.Answer, m.Ns, m.Authoritative = 0, nil, nil, false
			if name == "ghost.n3.example." && typ == dns.TypeDS {
				m.Authoritative = true
				m.Ns = append(keep(goodAnswer(q, "nx.n3.example.", dns.TypeA).Ns, dns.TypeSOA), proof...)
				return
			}
			m.Ns = append(records("ghost.n3.example. NS ns.ghost.n3.example."), proof...)
			m.Extra = append(m.Extra, records("ns.ghost.n3.example. A "+craftServer)...)
		}, craftServer: func(_ *siminternet.Internet, q siminternet.Query, m *dns.Msg) {
			if name, typ := asked(q); name == "www.ghost.n3.example." && typ == dns.TypeA {
				m.Rcode, m.Authoritative, m.Ns = 0, true, nil
				m.Answer = records("www.ghost.n3.example. A 198.51.100.66")
			}
		}}, steps: []step{{"www.ghost.n3.example. A", "SERVFAIL"}}},
		{id: "E37 a signed alias into an unsigned zone", steps: []step{{"toplain.z.example. A", "NOERROR | toplain.z.example. CNAME www.plain.example. | www.plain.example. A 198.51.100.2"}}},
		{id: "E38 with the target's address, false, in the same answer", edit: map[string]edit{n3Server: on("toplain.n3.example.", dns.TypeA, func(_ *siminternet.Internet, _ siminternet.Query, m *dns.Msg) {
			m.Answer = append(m.Answer, records("www.plain.example. A 198.51.100.66")...)
		})}, steps: []step{{"toplain.n3.example. A", "NOERROR | toplain.n3.example. CNAME www.plain.example. | www.plain.example. A 198.51.100.2"}}},
		{id: "E39 an alias with a false signature into an unsigned zone", steps: []step{{"toplain.bad.example. A", "SERVFAIL EDE 6"}}},
		{id: "E40 an unsigned alias to a signed wildcard", steps: []step{{"towild.plain.example. A do", "NOERROR | towild.plain.example. CNAME x.wc.z.example. | x.wc.z.example. A 198.51.100.9"}}},
		{id: "E41 an unsigned child", steps: []step{{"www.plain.example. A", "NOERROR | www.plain.example. A 198.51.100.2"}, {"www.kid.z.example. A", "NOERROR | www.kid.z.example. A 198.51.100.4"}}},
		{id: "E42 an unsigned answer for a name that is no delegation", edit: map[string]edit{n3Server: on("txt.n3.example.", dns.TypeA, func(_ *siminternet.Internet, _ siminternet.Query, m *dns.Msg) {
			m.Answer, m.Ns = records("txt.n3.example. A 198.51.100.66"), nil
		})}, steps: []step{{"txt.n3.example. A", "SERVFAIL EDE 10"}}},
		{id: "E43 empty names between the anchor and the zone", steps: []step{{"www.deep.down.example. A", "NOERROR | www.deep.down.example. A 198.51.100.1 AD"}, {"a.b.ent.n3.example. A", "NOERROR | a.b.ent.n3.example. A 198.51.100.7 AD"}}},
		{id: "E45 the DS of a zone is its parent's", also: func(l *lab) {
			m, err := l.ask("z.example.", dns.TypeDS, func(m *dns.Msg) { m.AuthenticatedData = true })
			if err != nil || m.Rcode != 0 || !m.AuthenticatedData || len(m.Answer) != 1 {
				l.t.Errorf("%v, %v", m, err)
			}
		}},
		{id: "E46 the DS of an unsigned zone on its parent's server", steps: []step{{"kid.z.example. DS", "NOERROR AD"}, {"plain.example. DS", "NOERROR AD"}}},
		{id: "E47 the root has no parent", steps: []step{{". DS", "NOERROR AD"}}},
		{id: "E48 an unsigned zone's server answers DS queries oddly", edit: map[string]edit{unsignedServer: func(in *siminternet.Internet, q siminternet.Query, m *dns.Msg) {
			if _, typ := asked(q); typ == dns.TypeDS {
				m.Ns = append(m.Ns, records("0p9mhaveqvm6t7vbl5lop2u3t2rp3tom.plain.example. NSEC3 1 0 12 aabbccdd 2t7b4g4vsa5smi47k61mv5bv1a22bojr MX DNSKEY NS SOA NSEC3PARAM RRSIG")...)
			}
		}}, steps: []step{{"www.plain.example. A", "NOERROR | www.plain.example. A 198.51.100.2"}}},
		{id: "E49 or with an error", edit: map[string]edit{unsignedServer: func(in *siminternet.Internet, q siminternet.Query, m *dns.Msg) {
			if _, typ := asked(q); typ == dns.TypeDS || typ == dns.TypeDNSKEY {
				m.Rcode, m.Answer, m.Ns = dns.RcodeServerFailure, nil, nil
			}
		}}, steps: []step{{"www.plain.example. A", "NOERROR | www.plain.example. A 198.51.100.2"}}},
		{id: "E54 signed, and nobody vouches for it", steps: []step{{"www.island.example. A do", "NOERROR | www.island.example. A 198.51.100.1"}}},
		{id: "E61 unsigned junk in the authority section", edit: map[string]edit{n3Server: on("www.n3.example.", dns.TypeA, func(_ *siminternet.Internet, _ siminternet.Query, m *dns.Msg) {
			m.Ns = append(m.Ns, records("n3.example. NS ns.evil.test.\nevil.n3.example. NS ns.evil.test.")...)
		})}, steps: []step{{"www.n3.example. A", "NOERROR | www.n3.example. A 198.51.100.1 AD"}}, also: func(l *lab) {
			if m, err := l.ask("www.n3.example.", dns.TypeA, nil); err != nil || len(m.Ns) != 0 {
				l.t.Errorf("%v, %v", m, err)
			}
		}},
		{id: "E62 one of two servers has false signatures", edit: map[string]edit{zServer: func(_ *siminternet.Internet, _ siminternet.Query, m *dns.Msg) {
			for _, rr := range slices.Concat(m.Answer, m.Ns) {
				if sig, ok := rr.(*dns.RRSIG); ok {
					sig.Signature = base64.StdEncoding.EncodeToString(make([]byte, 64))
				}
			}
		}}, steps: []step{{"www.z.example. A", "NOERROR | " + www + " AD"}, {"www.z.example. AAAA", "NOERROR | " + wwwAAAA + " AD"}, {"nx.z.example. A", "NXDOMAIN AD"}, {"www.z.example. MX", "NOERROR AD"}, {"txt.z.example. TXT", `NOERROR | txt.z.example. TXT "one" AD`}}},
		{id: "E64 a failure echoes EDNS and DO", also: func(l *lab) {
			m, err := l.ask("www.bad.example.", dns.TypeA, func(m *dns.Msg) { m.IsEdns0().SetDo() })
			if err != nil || m.IsEdns0() == nil || !m.IsEdns0().Do() || len(m.Answer)+len(m.Ns) != 0 {
				l.t.Errorf("%v, %v", m, err)
			}
		}},
		{id: "E65 the root key sentinel, of a key that is not trusted", steps: []step{
			{"root-key-sentinel-is-ta-00001.z.example. A", "SERVFAIL"},
			{"root-key-sentinel-not-ta-00001.z.example. A", "NOERROR | root-key-sentinel-not-ta-00001.z.example. A 198.51.100.8 AD"},
			{"root-key-sentinel-is-ta-1.z.example. A", "NOERROR | root-key-sentinel-is-ta-1.z.example. A 198.51.100.8 AD"}, // five digits, or nothing special
			{"root-key-sentinel-is-ta-00001.z.example. A cd", "NOERROR | root-key-sentinel-is-ta-00001.z.example. A 198.51.100.8"},
			{"root-key-sentinel-is-ta-00001.z.example. MX", "NOERROR AD"},
		}},
		{id: "E65 the root key sentinel, of the key that is trusted", edit: map[string]edit{zServer: nil}, also: func(l *lab) {
			tag := sentinelTag(l)
			z, _ := l.sim.Zone("n3.example.")
			z.Records += "root-key-sentinel-is-ta-" + tag + " A 198.51.100.8\nroot-key-sentinel-not-ta-" + tag + " A 198.51.100.8\n"
			if err := l.sim.Replace(z); err != nil {
				l.t.Fatal(err)
			}
			for word, want := range map[string]int{"is": dns.RcodeSuccess, "not": dns.RcodeServerFailure} {
				m, err := l.ask("root-key-sentinel-"+word+"-ta-"+tag+".n3.example.", dns.TypeA, nil)
				if err != nil || m.Rcode != want {
					l.t.Errorf("%s: %v, %v", word, m, err)
				}
			}
		}},
		{id: "E67 upper case in names inside RDATA", edit: map[string]edit{
			zServer: upperCase, zServer2: upperCase,
		}, steps: []step{{"www.z.example. A", "NOERROR | " + www + " AD"}, {"nx.z.example. A", "NXDOMAIN AD"}, {"www.z.example. MX", "NOERROR AD"}}},
		{id: "E69 a wildcard by its own name", steps: []step{{"*.wc.z.example. A", "NOERROR | *.wc.z.example. A 198.51.100.9 AD"}, {"*.wc.n3.example. A", "NOERROR | *.wc.n3.example. A 198.51.100.9 AD"}}},
		{id: "a negative trust anchor", opt: func(o *resolver.Options) {
			for _, n := range []string{"bad.example.", "expired.example."} {
				name, _ := resolver.ParseName(n)
				o.DNSSEC.Insecure = append(o.DNSSEC.Insecure, name)
			}
		}, steps: []step{{"www.bad.example. A", "NOERROR | www.bad.example. A 198.51.100.1"}, {"www.expired.example. A", "NOERROR | www.expired.example. A 198.51.100.1"},
			{"nx.bad.example. A", "NXDOMAIN"}, {"www.z.example. A", "NOERROR | " + www + " AD"}, {"www.early.example. A", "SERVFAIL EDE 8"}}},
		{id: "without validation", opt: func(o *resolver.Options) { o.DNSSEC = resolver.DNSSECOptions{} }, steps: []step{
			{"www.bad.example. A", "NOERROR | www.bad.example. A 198.51.100.1"}, {"www.z.example. A", "NOERROR | " + www}}},
		{id: "without anchors", opt: func(o *resolver.Options) { o.DNSSEC.Anchors = "" }, steps: []step{
			{"www.bad.example. A", "NOERROR | www.bad.example. A 198.51.100.1"}, {"www.z.example. A", "NOERROR | " + www}}},
		{id: "E19, E26, E32 each part of a proof is needed", edit: map[string]edit{}, also: func(l *lab) {
			n := 0
			for _, q := range []struct {
				name, zone string
				typ        uint16
			}{
				{"nx.z.example.", "z.", dns.TypeA}, {"x.wc.z.example.", "z.", dns.TypeMX}, {"www.z.example.", "z.", dns.TypeMX},
				{"nx.n3.example.", "n3.", dns.TypeA}, {"x.wc.n3.example.", "n3.", dns.TypeMX}, {"www.n3.example.", "n3.", dns.TypeMX}, {"ent.n3.example.", "n3.", dns.TypeMX},
			} {
				for k := range 4 {
					// A name of its own each time, so that no cache has the answer; where the name matters, another type.
					name, typ := q.name, q.typ
					switch {
					case strings.HasPrefix(name, "nx."):
						name = fmt.Sprintf("nx%d.%sexample.", k, q.zone)
					case strings.HasPrefix(name, "x."):
						name = fmt.Sprintf("x%d.wc.%sexample.", k, q.zone)
					default:
						typ = []uint16{dns.TypeMX, dns.TypeSRV, dns.TypeCAA, dns.TypePTR}[k]
					}
					parts := 0
					hook := on(name, typ, func(in *siminternet.Internet, q siminternet.Query, m *dns.Msg) {
						parts = 0
						for _, rr := range nsec(m) {
							if rr.Header().Rrtype != dns.TypeRRSIG {
								parts++
							}
						}
						dropProof(k)(in, q, m)
					})
					for _, s := range []string{zServer, zServer2, n3Server} {
						l.editAt(s, hook)
					}
					m, err := l.ask(name, typ, nil)
					if err != nil {
						l.t.Fatal(err)
					}
					if k < parts {
						n++
						if m.Rcode != dns.RcodeServerFailure {
							l.t.Errorf("%s %s without part %d of %d: %s", name, dns.TypeToString[typ], k, parts, text(m))
						}
					}
				}
			}
			if n < 10 {
				l.t.Errorf("%d parts were taken away", n)
			}
		}},
		{id: "E70 the servers do not answer for their keys; later they do", edit: map[string]edit{}, also: func(l *lab) {
			l.hook(n3Server, func(q siminternet.Query) *siminternet.Reply {
				if _, typ := asked(q); typ == dns.TypeDNSKEY {
					return &siminternet.Reply{}
				}
				return nil
			})
			for try := 0; ; try++ {
				m, err := l.ask("www.n3.example.", dns.TypeA, nil)
				if err != nil { // UDP clients are answered for five seconds
					if try < 5 {
						continue
					}
					l.t.Fatal(err)
				}
				if code := extended(m); m.Rcode != dns.RcodeServerFailure || code != 9 && code != 22 {
					l.t.Errorf("%s, EDE %d", text(m), code)
				}
				break
			}
			l.hook(n3Server, nil)
			time.Sleep(5 * time.Minute)
			if m, err := l.ask("www.n3.example.", dns.TypeA, nil); err != nil || m.Rcode != 0 {
				l.t.Errorf("later: %v, %v", m, err)
			}
		}},
	} {
		t.Run(c.id, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newCaseLab(t, time.Now(), c.opt)
				defer l.stop()
				for server, e := range c.edit {
					l.editAt(server, e)
				}
				for _, s := range c.steps {
					w := strings.Fields(s.ask)
					m, err := l.ask(w[0], dns.StringToType[w[1]], func(m *dns.Msg) {
						m.AuthenticatedData = !slices.Contains(w, "noad")
						m.CheckingDisabled = slices.Contains(w, "cd")
						m.IsEdns0().SetDo(slices.Contains(w, "do"))
					})
					if err != nil {
						t.Errorf("%s: %v", s.ask, err)
						continue
					}
					got := text(m)
					if m.AuthenticatedData {
						got += " AD"
					}
					if code := extended(m); strings.Contains(s.want, " EDE ") {
						got += fmt.Sprintf(" EDE %d", code)
					}
					if got != s.want {
						t.Errorf("%s:\n got %s (EDE %d)\nwant %s\n%v", s.ask, got, extended(m), s.want, m.IsEdns0())
					}
				}
				if c.also != nil {
					c.also(l)
				}
			})
		})
	}
}

// editAt makes a server edit its good answers; nil makes it a good one.
func (l *lab) editAt(server string, e edit) {
	if e == nil {
		l.behave(server, siminternet.Behaviour{})
		return
	}
	l.hook(server, func(q siminternet.Query) *siminternet.Reply {
		m := q.Answer()
		e(l.sim, q, m)
		return reply(q, m)
	})
}

// upperCase gives the answers of z.example. upper case in the next names of NSEC records, which are signed as
// they are, and in the signer's name, which is signed in lower case (RFC 6840 section 5.1).
func upperCase(in *siminternet.Internet, _ siminternet.Query, m *dns.Msg) {
	for _, section := range [][]dns.RR{m.Answer, m.Ns} {
		for i, rr := range section {
			if n, ok := rr.(*dns.NSEC); ok {
				n.NextDomain = strings.ToUpper(n.NextDomain)
				for j, o := range section {
					if s, ok := o.(*dns.RRSIG); ok && s.TypeCovered == dns.TypeNSEC && isOwner(o, rr.Header().Name) {
						section[j] = in.Sign("z.example.", []dns.RR{section[i]})
					}
				}
			}
		}
		for _, rr := range section {
			if s, ok := rr.(*dns.RRSIG); ok && strings.EqualFold(s.SignerName, "z.example.") {
				s.SignerName = "Z.EXAMPLE."
			}
		}
	}
}

// A craftsman makes the zone craft.example. by itself: keys and signatures that siminternet would not make.
type craftsman struct {
	keys  []dns.RR // the DNSKEY RRset
	ds    []dns.RR // what the parent has
	signs []craft
}

// A craft is a way to sign.
type craft struct {
	key  *dns.DNSKEY
	sign func(data []byte) []byte
}

// serve puts the zone into an Internet.
func (c *craftsman) serve(l *lab) {
	l.editAt(caseTLDServer, func(in *siminternet.Internet, q siminternet.Query, m *dns.Msg) {
		name, typ := asked(q)
		if !dns.IsSubDomain("craft.example.", name) {
			return
		}
		ds := append(slices.Clone(c.ds), in.Sign("example.", c.ds))
		if name == "craft.example." && typ == dns.TypeDS {
			m.Answer, m.Ns = ds, nil
			return
		}
		m.Ns = append(keep(m.Ns, dns.TypeNS), ds...)
	})
	l.editAt(craftServer, func(_ *siminternet.Internet, q siminternet.Query, m *dns.Msg) {
		name, typ := asked(q)
		set := records("craft.example. SOA ns1.craft.example. h. 1 2 3 4 60")
		m.Answer, m.Ns = nil, nil
		switch {
		case name == "craft.example." && typ == dns.TypeDNSKEY:
			set = c.keys
			m.Answer = slices.Clone(set)
		case name == "www.craft.example." && typ == dns.TypeA:
			set = records("www.craft.example. A 198.51.100.6")
			m.Answer = slices.Clone(set)
		default:
			m.Ns = slices.Clone(set)
		}
		for _, s := range c.signs {
			if m.Answer != nil {
				m.Answer = append(m.Answer, s.over(set))
			} else {
				m.Ns = append(m.Ns, s.over(set))
			}
		}
	})
}

// over signs a set, whose records are in canonical form but for their order.
func (c craft) over(set []dns.RR) *dns.RRSIG {
	h := set[0].Header()
	sig := &dns.RRSIG{Hdr: dns.RR_Header{Name: h.Name, Rrtype: dns.TypeRRSIG, Class: h.Class, Ttl: h.Ttl}, TypeCovered: h.Rrtype, Algorithm: c.key.Algorithm,
		Labels: uint8(dns.CountLabel(h.Name)), OrigTtl: h.Ttl, KeyTag: c.key.KeyTag(), SignerName: "craft.example.",
		Inception: uint32(time.Now().Add(-time.Hour).Unix()), Expiration: uint32(time.Now().Add(time.Hour).Unix())}
	pack := func(rr dns.RR) []byte {
		b := make([]byte, dns.MaxMsgSize)
		n, err := dns.PackRR(rr, b, 0, nil, false)
		if err != nil {
			panic(err)
		}
		return b[:n]
	}
	data := pack(sig)[len(h.Name)+1+10:] // behind owner, type, class, TTL and length
	var wires []string
	for _, rr := range set {
		wires = append(wires, string(pack(rr)))
	}
	slices.SortFunc(wires, func(a, b string) int { return strings.Compare(a[len(h.Name)+1+10:], b[len(h.Name)+1+10:]) })
	for _, w := range wires {
		data = append(data, w...)
	}
	sig.Signature = base64.StdEncoding.EncodeToString(c.sign(data))
	return sig
}

func newKey(algorithm uint8, flags uint16, public []byte) *dns.DNSKEY {
	return &dns.DNSKEY{Hdr: dns.RR_Header{Name: "craft.example.", Rrtype: dns.TypeDNSKEY, Class: dns.ClassINET, Ttl: 300}, Flags: flags, Protocol: 3, Algorithm: algorithm,
		PublicKey: base64.StdEncoding.EncodeToString(public)}
}

func TestDNSSECKeysOfManyKinds(t *testing.T) {
	edPublic, edPrivate, err := ed448.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	byEd448 := func(flags uint16) craft {
		return craft{newKey(16, flags, edPublic), func(data []byte) []byte { return ed448.Sign(edPrivate, data, "") }}
	}
	rsaPrivate, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	rsaPublic := append([]byte{3, 1, 0, 1}, rsaPrivate.N.Bytes()...)
	bySHA1 := craft{newKey(5, 257, rsaPublic), func(data []byte) []byte {
		sum := sha1.Sum(data)
		s, err := rsa.SignPKCS1v15(nil, rsaPrivate, crypto.SHA1, sum[:])
		if err != nil {
			panic(err)
		}
		return s
	}}
	spoilt := func(c craft) craft {
		return craft{c.key, func(data []byte) []byte { s := c.sign(data); s[len(s)-1] ^= 1; return s }}
	}
	ds := func(keys ...*dns.DNSKEY) (out []dns.RR) {
		for _, k := range keys {
			d := k.ToDS(dns.SHA256)
			d.Hdr.Ttl = 300
			out = append(out, d)
		}
		return out
	}
	// An exponent of 300 bytes, in the long form of RFC 3110 section 2.
	longExponent := newKey(8, 257, slices.Concat([]byte{0, 1, 44}, slices.Repeat([]byte{0xff}, 300), rsaPrivate.N.Bytes()))
	good, zoneless := byEd448(257), byEd448(1)
	const answer = "NOERROR | www.craft.example. A 198.51.100.6"
	for _, c := range []struct {
		id   string
		zone craftsman
		sha1 bool
		want string
	}{
		{"E15 Ed448", craftsman{[]dns.RR{good.key}, ds(good.key), []craft{good}}, false, answer + " AD"},
		{"E15 Ed448, spoilt", craftsman{[]dns.RR{good.key}, ds(good.key), []craft{spoilt(good)}}, false, "SERVFAIL EDE 6"},
		{"E11 a key that is not for zones", craftsman{[]dns.RR{zoneless.key}, ds(zoneless.key), []craft{zoneless}}, false, "SERVFAIL EDE 11"},
		{"E16 DS of two algorithms, signed by one", craftsman{[]dns.RR{good.key, bySHA1.key}, ds(good.key, newKey(8, 257, rsaPublic)), []craft{good}}, false, answer + " AD"},
		{"E68 an exponent of 300 bytes is of no use, and of no harm", craftsman{[]dns.RR{longExponent}, ds(longExponent), []craft{{longExponent, func([]byte) []byte { return make([]byte, 128) }}}}, false, answer},
		{"E68 beside a good key", craftsman{[]dns.RR{longExponent, good.key}, ds(longExponent, good.key), []craft{good}}, false, answer + " AD"},
		{"SHA-1 is insecure by default (RFC 9905)", craftsman{[]dns.RR{bySHA1.key}, ds(bySHA1.key), []craft{bySHA1}}, false, answer},
		{"SHA-1 is insecure by default, whatever it signs", craftsman{[]dns.RR{bySHA1.key}, ds(bySHA1.key), []craft{spoilt(bySHA1)}}, false, answer},
		{"SHA-1 beside a better algorithm", craftsman{[]dns.RR{bySHA1.key, good.key}, ds(bySHA1.key, good.key), []craft{bySHA1, good}}, false, answer + " AD"},
		{"SHA-1, if wanted", craftsman{[]dns.RR{bySHA1.key}, ds(bySHA1.key), []craft{bySHA1}}, true, answer + " AD"},
		{"SHA-1, if wanted, spoilt", craftsman{[]dns.RR{bySHA1.key}, ds(bySHA1.key), []craft{spoilt(bySHA1)}}, true, "SERVFAIL EDE 6"},
	} {
		t.Run(c.id, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newCaseLab(t, time.Now(), func(o *resolver.Options) { o.DNSSEC.SHA1 = c.sha1 })
				defer l.stop()
				c.zone.serve(l)
				m, err := l.ask("www.craft.example.", dns.TypeA, func(m *dns.Msg) { m.AuthenticatedData = true })
				if err != nil {
					t.Fatal(err)
				}
				got := text(m)
				if m.AuthenticatedData {
					got += " AD"
				}
				if strings.Contains(c.want, "EDE") {
					got += fmt.Sprintf(" EDE %d", extended(m))
				}
				if got != c.want {
					t.Errorf("got %s (EDE %d), want %s; %v", got, extended(m), c.want, m.IsEdns0())
				}
			})
		})
	}
}

// TestSignatureSkew: signatures that ended half an hour ago are good for those who allow an hour.
func TestSignatureSkew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for skew, want := range map[time.Duration]int{0: dns.RcodeServerFailure, 29 * time.Minute: dns.RcodeServerFailure, time.Hour: dns.RcodeSuccess} {
			l := newCaseLab(t, time.Now().Add(-60*24*time.Hour-30*time.Minute), func(o *resolver.Options) { o.DNSSEC.Skew = skew })
			m, err := l.ask("www.z.example.", dns.TypeA, nil)
			if err != nil || m.Rcode != want {
				t.Errorf("skew %v: %v, %v", skew, m, err)
			}
			if m != nil && m.Rcode == 0 && m.Answer[0].Header().Ttl > 1800 {
				t.Errorf("skew %v: TTL %d outlives the signature", skew, m.Answer[0].Header().Ttl)
			}
			l.stop()
		}
	})
}
