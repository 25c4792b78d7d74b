package resolver_test

import (
	"bytes"
	"context"
	"crypto"
	"encoding/base64"
	"errors"
	"fmt"
	mrand "math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/denialcache"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/validator/denial/denialtest"
	"github.com/sluice-dns/sluice/resolver/internal/validator/rrsig"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// Section B: what one answer makes us compute. Zones are signed by a key that the recursor trusts, so that
// nothing but the limit stands against what is over it.

// signedAnswer resolves www.b.lab. A, which the zone's servers answer as f says, and gives the outcome to say.
func signedAnswer(t *testing.T, s *signer, keys []dns.RR, servers []netip.Addr, f func(name string, m *dns.Msg), say func(r *recursor, outcome string) string) (out string) {
	t.Helper()
	withRecursor(t, zones{{Name: "b.lab.", Servers: servers}}, s.anchor(), nil, func(r *recursor) {
		for _, a := range servers {
			r.sim.SetBehaviour(a, siminternet.Behaviour{Hook: s.serveKeys(append([]dns.RR{s.ksk}, keys...), func(q siminternet.Query, m *dns.Msg) {
				name, _ := asked(q)
				f(name, m)
			})})
		}
		got := r.outcome("www.b.lab.", dns.TypeA)
		r.t.Log(got)
		out = say(r, got)
	})
	return out
}

func status(_ *recursor, outcome string) string {
	if strings.HasPrefix(outcome, "SERVFAIL") {
		return "SERVFAIL"
	}
	return outcome
}

func failures(r *recursor, _ string) string { return some(r.spent().failed) }

var oneServer = []netip.Addr{netip.MustParseAddr(evil1)}

// falseBy is a signature over set that claims to be of the signer's own key, and is none.
func falseBy(s *signer, set []dns.RR, i int) *dns.RRSIG {
	g := s.unsigned(set)
	b := bytes.Repeat([]byte{byte(1 + i)}, 64)
	g.Signature = base64.StdEncoding.EncodeToString(b)
	return g
}

// manySignatures answers with n signatures, the last one right if good says so.
func manySignatures(t *testing.T, n int, good bool, servers []netip.Addr, say func(*recursor, string) string) string {
	s := newSigner("b.lab.")
	return signedAnswer(t, s, nil, servers, func(name string, m *dns.Msg) {
		set := records(name + " A 198.51.100.1")
		m.Answer = slices.Clone(set)
		for i := range n {
			if good && i == n-1 {
				m.Answer = append(m.Answer, s.sign(set, "", nil))
			} else {
				m.Answer = append(m.Answer, falseBy(s, set, i))
			}
		}
	}, say)
}

// collidingWith returns keys of the same tag as an RSA key, made by changing places of words in its modulus.
func collidingWith(k *dns.DNSKEY, n int) (keys []dns.RR) {
	b, err := base64.StdEncoding.DecodeString(k.PublicKey)
	if err != nil {
		panic(err)
	}
	for i := range n {
		w := slices.Clone(b)
		x, y := 6+2*i, 40+2*i
		for bytes.Equal(w[x:x+2], w[y:y+2]) { // that would be the same key
			y += 2
		}
		w[x], w[x+1], w[y], w[y+1] = w[y], w[y+1], w[x], w[x+1]
		c := dns.Copy(k).(*dns.DNSKEY)
		c.PublicKey = base64.StdEncoding.EncodeToString(w)
		if c.KeyTag() != k.KeyTag() {
			panic("the tags differ")
		}
		keys = append(keys, c)
	}
	return keys
}

func nsec3Zone(n int, name string) func(t *testing.T) string {
	return func(t *testing.T) (out string) {
		z := zoneAt("h.example.", victim2, "www A 198.51.100.1")
		z.Algorithm, z.NSEC3 = 13, &siminternet.NSEC3{Iterations: uint16(n)}
		withRecursor(t, zones{z}, "", nil, func(r *recursor) {
			out = status(r, r.outcome(name, dns.TypeA))
		})
		return out
	}
}

// rsaKey reads a key with a modulus and an exponent of so many bits.
func rsaKey(modulus, exponent int) string {
	bits := func(n int) []byte {
		b := bytes.Repeat([]byte{0xff}, (n+7)/8)
		if n%8 != 0 {
			b[0] >>= 8 - n%8
		}
		return b
	}
	e := bits(exponent)
	rdata := append([]byte{1, 0, 3, 8, byte(len(e))}, e...)
	err := rrsig.ParseKey(append(rdata, bits(modulus)...)).Err()
	if err == nil {
		return "taken"
	}
	if errors.Is(err, rrsig.ErrAlgorithm) {
		return "not supported"
	}
	return err.Error()
}

var rowsB = []limitRow{
	{"KeyTrap: keys of one tag tried", "keys of one tag and algorithm, the last of which made the signature", 2, "NOERROR Secure", "SERVFAIL", func(t *testing.T, n int) string {
		s := newSigner("b.lab.")
		k := &dns.DNSKEY{Hdr: s.ksk.Hdr, Flags: 256, Protocol: 3, Algorithm: dns.RSASHA256}
		priv, err := k.Generate(1024)
		if err != nil {
			t.Fatal(err)
		}
		keys := append(collidingWith(k, n-1), k)
		return signedAnswer(t, s, keys, oneServer, func(name string, m *dns.Msg) {
			set := records(name + " A 198.51.100.1")
			g := s.unsigned(set)
			g.Algorithm, g.KeyTag = k.Algorithm, k.KeyTag()
			if err := g.Sign(priv.(crypto.Signer), set); err != nil {
				panic(err)
			}
			m.Answer = append(set, g)
		}, status)
	}},
	{"KeyTrap: signatures tried of an RRset", "signatures, the last of which is right", 4, "NOERROR Secure", "SERVFAIL", func(t *testing.T, n int) string {
		return manySignatures(t, n, true, oneServer, status)
	}},
	{"KeyTrap: failed verifications of an RRset", "false signatures; verifications that failed", 4, "4", "4", func(t *testing.T, n int) string {
		return manySignatures(t, n, false, oneServer, failures)
	}},
	{"KeyTrap: failed verifications of one query, over its retries", "servers that all give four false signatures; verifications that failed", 2, "8", "8", func(t *testing.T, n int) string {
		return manySignatures(t, 4, false, addressesOf(n), failures)
	}},
	{"KeyTrap: failed verifications of one query", "failures charged to one tree", 8, "charged", "limit", func(t *testing.T, n int) string {
		tree := query.NewTree(0, query.Budget{})
		return charged(n, tree.FailedValidation)
	}},
	{"KeyTrap: successful verifications of one query", "verifications charged to one tree", 64, "charged", "limit", func(t *testing.T, n int) string {
		tree := query.NewTree(0, query.Budget{})
		return charged(n, tree.Validation)
	}},
	{"KeyTrap: DS records", "DS records of a zone, the last of which is right", 8, "NOERROR Secure", "SERVFAIL", func(t *testing.T, n int) (out string) {
		parent, child := newSigner("p.lab."), newSigner("c.p.lab.")
		var ds []string
		right := child.ksk.ToDS(dns.SHA256)
		first, err := strconv.ParseUint(right.Digest[:2], 16, 8)
		if err != nil {
			t.Fatal(err)
		}
		for i := range n - 1 {
			d := *right
			d.Digest = fmt.Sprintf("%02x", first^uint64(1+i)) + right.Digest[2:] // never the right one, whatever it is
			ds = append(ds, d.String())
		}
		set := records(strings.Join(append(ds, right.String()), "\n"))
		withRecursor(t, zones{zoneAt("p.lab.", evil1, ""), zoneAt("c.p.lab.", evil2, "")}, parent.anchor(), nil, func(r *recursor) {
			r.sim.SetBehaviour(netip.MustParseAddr(evil1), siminternet.Behaviour{Hook: parent.serve(func(q siminternet.Query, m *dns.Msg) {
				name, typ := asked(q)
				switch {
				case name == "c.p.lab." && typ == dns.TypeDS:
					m.Answer = append(slices.Clone(set), parent.sign(set, "", nil))
				default:
					m.Authoritative = false
					m.Ns = append(records("c.p.lab. NS ns1.c.p.lab."), append(slices.Clone(set), parent.sign(set, "", nil))...)
					m.Extra = append(m.Extra, records("ns1.c.p.lab. A "+evil2)...)
				}
			})})
			r.sim.SetBehaviour(netip.MustParseAddr(evil2), siminternet.Behaviour{Hook: child.serve(func(q siminternet.Query, m *dns.Msg) {
				name, _ := asked(q)
				m.Answer = child.signed(name + " A 198.51.100.1")
			})})
			got := r.outcome("www.c.p.lab.", dns.TypeA)
			r.t.Log(got)
			out = status(r, got)
		})
		return out
	}},
	{"NSEC3: iterations that are validated", "iterations", 50, "NXDOMAIN Secure", "NXDOMAIN Insecure", func(t *testing.T, n int) string {
		return nsec3Zone(n, "nx.h.example.")(t)
	}},
	{"NSEC3: iterations that are borne", "iterations", 500, "NXDOMAIN Insecure", "SERVFAIL", func(t *testing.T, n int) string {
		return nsec3Zone(n, "nx.h.example.")(t)
	}},
	{"NSEC3: hashes of one query", "labels below the zone, each of which may be the closest encloser; two hashes more", 62, "NXDOMAIN Secure", "SERVFAIL", func(t *testing.T, n int) string {
		return nsec3Zone(0, strings.Repeat("l.", n)+"h.example.")(t)
	}},
	{"NSEC3: hashes charged to one query", "hashes", 64, "charged", "limit", func(t *testing.T, n int) string {
		tree := query.NewTree(0, query.Budget{})
		return charged(n, tree.Hash)
	}},
	{"NSEC3, negative proof padding: denial records used of an answer", "NSEC records, the last of which denies", 8, "NXDOMAIN Secure", "SERVFAIL", func(t *testing.T, n int) string {
		s := newSigner("b.lab.")
		return signedAnswer(t, s, nil, oneServer, func(name string, m *dns.Msg) {
			m.Rcode = dns.RcodeNameError
			for i := range n - 1 {
				m.Ns = append(m.Ns, s.signed(fmt.Sprintf("y%d.b.lab. NSEC y%da.b.lab. A RRSIG NSEC", i, i))...)
			}
			m.Ns = append(m.Ns, s.signed("b.lab. NSEC y.b.lab. NS SOA RRSIG NSEC DNSKEY")...)
		}, status)
	}},
	{"RSA: the largest modulus", "bits", 4096, "taken", "not supported", func(t *testing.T, n int) string { return rsaKey(n, 17) }},
	{"RSA: a modulus too small", "bits", 1023, "not supported", "taken", func(t *testing.T, n int) string { return rsaKey(n, 17) }},
	{"RSA: the largest exponent", "bits", 35, "taken", "not supported", func(t *testing.T, n int) string { return rsaKey(2048, n) }},
	{"canonicalisation: records of a signed RRset", "records", 256, "taken", rrsig.ErrSize.Error(), func(t *testing.T, n int) string {
		set := query.RRset{Name: dnsname.MustParse("www.b.lab."), Type: dnswire.TypeA, Class: dnswire.ClassIN}
		for i := range n {
			set.Data = query.AppendRData(set.Data, []byte{10, 0, byte(i >> 8), byte(i)})
		}
		var v rrsig.Verifier
		if err := v.Load(&set); err != nil {
			return err.Error()
		}
		return "taken"
	}},
	{"canonicalisation: bytes that are signed", "bytes, of one record and its signature's head", rrsig.MaxInput, rrsig.ErrSignature.Error(), rrsig.ErrSize.Error(), func(t *testing.T, n int) string {
		s := newSigner("b.lab.")
		rdata := func(rr dns.RR) []byte {
			b := make([]byte, 512)
			l, err := dns.PackRR(rr, b, 0, nil, false)
			if err != nil {
				t.Fatal(err)
			}
			return b[len(s.zone)+1+10 : l] // behind the owner, type, class, TTL and length
		}
		fake := rdata(falseBy(s, records("b.lab. TYPE65280 \\# 0"), 0))
		sig, ok := rrsig.ParseSig(fake)
		if !ok {
			t.Fatal("no signature")
		}
		set := query.RRset{Name: dnsname.MustParse("b.lab."), Type: 65280, Class: dnswire.ClassIN}
		head := len(fake) - 64 // without the signature itself (RFC 4034 section 3.1.8.1)
		set.Data = query.AppendRData(nil, make([]byte, n-head-len(set.Name)-10))
		var v rrsig.Verifier
		if err := v.Load(&set); err != nil {
			return err.Error()
		}
		return v.Verify(&sig, rrsig.ParseKey(rdata(s.ksk))).Error()
	}},
	{"KeyTrap: verifications at once", "answers that are validated at once; whether no more were than half the processors", max(1, runtime.NumCPU()/2), "true", "true", func(t *testing.T, n int) (out string) {
		withRecursor(t, nil, "", nil, func(r *recursor) {
			names := []string{"www.ecdsa.com.", "www.ed25519.example.", "www.rsa.com.", "www.secure.example.", "www.org.", "www.com.", "www.example."}
			var wg sync.WaitGroup
			for range 4 * n {
				for _, name := range names {
					wg.Go(func() {
						tree := query.NewTree(clock.Elapsed(), query.Budget{})
						if u, err := r.iterator.Resolve(context.Background(), tree, question(name, dns.TypeA)); err == nil {
							r.validator.Validate(context.Background(), tree, &u, clock.Elapsed())
						}
					})
				}
			}
			wg.Wait()
			s := r.validator.Stats()
			if s.Verified == 0 || s.Peak == 0 || s.Places != max(1, runtime.NumCPU()/2) {
				t.Errorf("%+v", s)
			}
			out = fmt.Sprint(s.Peak <= max(1, runtime.NumCPU()/2))
		})
		return out
	}},
	{"aggressive NSEC3: hashes of one lookup", "labels below the zone; the apex and the wildcard are hashed too", 14, "denied", "unknown", func(t *testing.T, n int) string {
		c := denialcache.New(denialcache.Options{})
		z := denialtest.New(mrand.New(mrand.NewPCG(0, 0)), 1)
		for seed := uint64(1); !z.NSEC3 || z.OptOut; seed++ {
			z = denialtest.New(mrand.New(mrand.NewPCG(seed, 0)), 1)
		}
		now := clock.Instant(1000 * time.Second)
		c.Put(0, dnsname.MustParse("z."), soaOf("z."), z.Chain, now)
		if d := c.Find(0, dnsname.MustParse(strings.Repeat("q.", n)+"z."), dns.TypeA, now); d.Kind == denialcache.NXDomain {
			return "denied"
		}
		return "unknown"
	}},
	{"ANY: RRsets of an answer", "RRsets at the name; how many are given", 1, "1", "1", func(t *testing.T, n int) (out string) {
		all := []string{"www A 198.51.100.1", "www AAAA 2001:db8::1"}
		assault(t, zones{zoneAt("any.lab.", victim1, strings.Join(all[:n], "\n"))}, nil, func(l *lab) {
			for _, typ := range []uint16{dns.TypeA, dns.TypeAAAA} {
				l.must("www.any.lab.", typ)
			}
			types := map[uint16]bool{}
			for _, rr := range l.must("www.any.lab.", dns.TypeANY).Answer {
				types[rr.Header().Rrtype] = true
			}
			out = some(len(types))
		})
		return out
	}},
}

// soaOf is the SOA RRset of a zone.
func soaOf(zone string) query.RRset {
	n := dnsname.MustParse(zone)
	return query.RRset{Name: n, Type: dnswire.TypeSOA, Class: dnswire.ClassIN, TTL: 60, Data: query.AppendRData(nil, append([]byte(n+n), append(make([]byte, 19), 60)...)), Status: query.Secure}
}

func charged(n int, spend func() error) string {
	for range n {
		if err := spend(); err != nil {
			if !errors.Is(err, query.ErrLimit) {
				return err.Error()
			}
			return "limit"
		}
	}
	return "charged"
}
