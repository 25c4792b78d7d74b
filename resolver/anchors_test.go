package resolver_test

import (
	"crypto"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// A rolling zone is roll., a trust anchor by itself, whose owner changes its keys: those in has, signing those in
// by. A letter in lower case is the key revoked. Everything else is signed by key Z.
type rolling struct {
	mu      sync.Mutex
	has, by string
	keys    map[byte]*dns.DNSKEY
	priv    map[byte]crypto.Signer
}

func newRolling(t *testing.T) *rolling {
	t.Helper()
	z := &rolling{keys: map[byte]*dns.DNSKEY{}, priv: map[byte]crypto.Signer{}}
	for _, n := range []byte("ABCZ") {
		k := &dns.DNSKEY{Hdr: dns.RR_Header{Name: "roll.", Rrtype: dns.TypeDNSKEY, Class: dns.ClassINET, Ttl: 7200}, Flags: 257, Protocol: 3, Algorithm: dns.ED25519}
		p, err := k.Generate(256)
		if err != nil {
			t.Fatal(err)
		}
		z.keys[n], z.priv[n] = k, p.(crypto.Signer)
	}
	z.keys['Z'].Flags = 256
	return z
}

func (z *rolling) set(has, by string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.has, z.by = has, by
}

func (z *rolling) key(n byte) (*dns.DNSKEY, crypto.Signer) {
	up := n &^ 0x20
	k := *z.keys[up]
	if up != n {
		k.Flags |= dns.REVOKE
	}
	return &k, z.priv[up]
}

func (z *rolling) answer(q siminternet.Query) *siminternet.Reply {
	z.mu.Lock()
	defer z.mu.Unlock()
	m := new(dns.Msg).SetReply(q.Msg)
	m.Authoritative = true
	m.SetEdns0(1232, true)
	signed := func(by string, rrs ...dns.RR) []dns.RR {
		for _, n := range []byte(by) {
			k, p := z.key(n)
			sig := &dns.RRSIG{Hdr: dns.RR_Header{Ttl: rrs[0].Header().Ttl}, KeyTag: k.KeyTag(), SignerName: "roll.", Algorithm: k.Algorithm,
				Inception: uint32(time.Now().Add(-24 * time.Hour).Unix()), Expiration: uint32(time.Now().Add(7 * 24 * time.Hour).Unix())}
			if err := sig.Sign(p, slices.Clone(rrs)); err != nil {
				panic(err)
			}
			rrs = append(rrs, sig)
		}
		return rrs
	}
	parse := func(text string) dns.RR {
		rr, err := dns.NewRR(text)
		if err != nil {
			panic(err)
		}
		return rr
	}
	switch name := strings.ToLower(q.Msg.Question[0].Name); {
	case name == "roll." && q.Msg.Question[0].Qtype == dns.TypeDNSKEY:
		for _, n := range []byte(z.has + "Z") {
			k, _ := z.key(n)
			m.Answer = append(m.Answer, k)
		}
		keys := m.Answer
		for _, n := range []byte(z.by) {
			m.Answer = append(m.Answer, signed(string(n), slices.Clone(keys)...)[len(keys):]...)
		}
	case name == "www.roll." && q.Msg.Question[0].Qtype == dns.TypeA:
		m.Answer = signed("Z", parse("www.roll. 60 IN A 192.0.2.80"))
	default:
		m.Ns = signed("Z", parse("roll. 60 IN SOA ns1.roll. h.roll. 1 2 3 4 60"))
		if name != "roll." && name != "www.roll." {
			m.Rcode = dns.RcodeNameError
		}
	}
	return &siminternet.Reply{Msg: m}
}

// TestTrustAnchorRoll: a zone that is a trust anchor changes its keys as RFC 5011 wants it, and the resolver
// follows, over restarts, without believing anything too soon; and tells the zone so (RFC 8145).
func TestTrustAnchorRoll(t *testing.T) {
	state := filepath.Join(t.TempDir(), "trust-anchors")
	synctest.Test(t, func(t *testing.T) {
		z := newRolling(t)
		server := netip.MustParseAddr("127.53.9.9")
		start := func() *lab {
			t.Helper()
			sim, err := siminternet.New(time.Now(), siminternet.Zone{Name: ".", Servers: []netip.Addr{netip.MustParseAddr("127.53.0.1")}},
				siminternet.Zone{Name: "roll.", Servers: []netip.Addr{server}})
			if err != nil {
				t.Fatal(err)
			}
			sim.SetBehaviour(server, siminternet.Behaviour{Hook: z.answer})
			return newLabIn(t, sim, func(o *resolver.Options) {
				o.DNSSEC.Anchors, o.DNSSEC.AnchorsFile = z.keys['A'].ToDS(dns.SHA256).String(), "anchors"
				o.DNSSEC.Follow, o.DNSSEC.Signal, o.DNSSEC.State = true, true, state
			})
		}
		var l *lab
		begin := time.Now()
		want := func(hour float64, outcome string) {
			t.Helper()
			time.Sleep(time.Until(begin.Add(time.Duration(hour * float64(time.Hour)))))
			m, err := l.ask("www.roll.", dns.TypeA, func(m *dns.Msg) { m.AuthenticatedData = true })
			if err != nil {
				t.Fatalf("hour %v: %v", hour, err)
			}
			if got := fmt.Sprintf("%s AD=%v", text(m), m.AuthenticatedData); got != outcome {
				t.Errorf("hour %v: %s, want %s; %v", hour, got, outcome, m.IsEdns0())
			}
		}
		const good, bad = "NOERROR | www.roll. A 192.0.2.80 AD=true", "SERVFAIL AD=false"

		z.set("AB", "A")
		l = start()
		want(0.1, good)
		z.set("B", "B") // too soon
		want(3, bad)
		z.set("AB", "A") // B alone was nobody's word that counts
		want(6, good)
		signal := fmt.Sprintf("_ta-%04x.roll.", z.keys['A'].KeyTag())
		if asked := l.sim.Count(func(e siminternet.LogEntry) bool { return e.Is(signal, dns.TypeNULL) }); asked != 1 {
			t.Errorf("%s was asked for %d times in six hours", signal, asked)
		}
		l.stop()

		// Twenty-nine days pass more quickly here than in a bubble.
		text, err := os.ReadFile(state)
		if err != nil {
			t.Fatal(err)
		}
		aged := regexp.MustCompile(`key addpend \d+ `).ReplaceAllString(string(text), fmt.Sprintf("key addpend %d ", (30*24-4)*3600))
		aged = aged[:strings.Index(aged, "sha256 ")]
		if err := os.WriteFile(state, fmt.Appendf(nil, "%ssha256 %x\n", aged, sha256.Sum256([]byte(aged))), 0o600); err != nil {
			t.Fatal(err)
		}
		l = start()
		want(7, good)
		z.set("BC", "B") // the resolver does not believe B yet
		want(9.5, bad)
		z.set("AB", "A")
		want(13, good)
		z.set("BC", "B")
		want(16, good)
		z.set("aBC", "aB") // A revokes itself
		want(19, good)
		z.set("A", "A") // whoever has A's private key is nobody now
		want(22, bad)
		l.stop()
		l = start() // nor after a restart, though the configuration still names it
		want(23, bad)
		z.set("BC", "B")
		want(26, good)
		l.stop()
	})
}

// A trust anchor may be for a zone that is not there. That a name below it does not exist is then passed on as what it
// is, nobody's word; but never data, nor once the zone has shown its keys, nor if an anchor above could speak.
func TestAnchorOfAnAbsentZone(t *testing.T) {
	const denied, bad, good = "NXDOMAIN AD=false EDE5", "SERVFAIL AD=false EDE9", "NOERROR | www.roll. A 192.0.2.80 AD=true"
	for _, c := range []struct {
		what         string
		above        bool   // the root is an anchor too
		before, then string // what becomes of a denial before the zone has shown its keys, and after
	}{
		{"an island", false, denied, bad},
		{"the root is an anchor too", true, bad, bad},
	} {
		synctest.Test(t, func(t *testing.T) {
			z := newRolling(t)
			z.set("A", "A")
			server := netip.MustParseAddr("127.53.9.9")
			sim, err := siminternet.New(time.Now(), siminternet.Zone{Name: ".", Servers: []netip.Addr{netip.MustParseAddr("127.53.0.1")}, Algorithm: dns.ED25519},
				siminternet.Zone{Name: "roll.", Servers: []netip.Addr{server}})
			if err != nil {
				t.Fatal(err)
			}
			// absent: the server denies every name of the zone, by a proof that nobody can verify; forging: all but an
			// address.
			var absent, forging atomic.Bool
			sim.SetBehaviour(server, siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
				if !absent.Load() {
					return z.answer(q)
				}
				m := new(dns.Msg).SetReply(q.Msg)
				m.Authoritative = true
				if name, typ := asked(q); forging.Load() && typ == dns.TypeA {
					m.Answer = records(name + " A 203.0.113.66")
					return &siminternet.Reply{Msg: m}
				}
				m.Rcode = dns.RcodeNameError
				m.Ns = records("roll. 300 SOA ns1.roll. h.roll. 1 2 3 4 300\nroll. 300 NSEC roll. NS SOA RRSIG NSEC DNSKEY")
				return &siminternet.Reply{Msg: m}
			}})
			l := newLabIn(t, sim, func(o *resolver.Options) {
				o.DNSSEC.Anchors, o.DNSSEC.AnchorsFile = z.keys['A'].ToDS(dns.SHA256).String()+"\n", "anchors"
				if c.above {
					o.DNSSEC.Anchors += sim.TrustAnchor()
				}
			})
			defer l.stop()
			want := func(name string, typ uint16, outcome string) {
				t.Helper()
				m, err := l.ask(name, typ, func(m *dns.Msg) { m.AuthenticatedData = true })
				if err != nil {
					t.Fatal(err)
				}
				got := fmt.Sprintf("%s AD=%v", text(m), m.AuthenticatedData)
				for _, x := range m.IsEdns0().Option {
					if e, ok := x.(*dns.EDNS0_EDE); ok {
						got += fmt.Sprintf(" EDE%d", e.InfoCode)
					}
				}
				if m.Rcode == dns.RcodeNameError && (len(m.Ns) == 0 || m.Ns[0].Header().Ttl > 60) {
					t.Errorf("%s, %s: kept for long: %v", c.what, name, m.Ns)
				}
				if !strings.HasPrefix(got, outcome) {
					t.Errorf("%s, %s %s: %s, want %s", c.what, name, dns.TypeToString[typ], got, outcome)
				}
			}
			absent.Store(true)
			want("www.roll.", dns.TypeA, c.before)
			want("www.roll.", dns.TypeDS, c.before)
			want("www.roll.", dns.TypeA, c.before) // from the cache
			time.Sleep(301 * time.Second)
			want("other.roll.", dns.TypeDS, c.before)
			forging.Store(true)
			want("www.roll.", dns.TypeA, "SERVFAIL AD=false") // no DS records were denied thereby
			want("forged.roll.", dns.TypeA, "SERVFAIL AD=false")

			absent.Store(false)
			time.Sleep(301 * time.Second)
			want("www.roll.", dns.TypeA, good)

			absent.Store(true)
			forging.Store(false)
			want("nx.roll.", dns.TypeA, "SERVFAIL AD=false") // the keys are known still
			time.Sleep(3 * time.Hour)
			want("www.roll.", dns.TypeA, c.then)
			want("nx2.roll.", dns.TypeA, c.then)
		})
	}
}
