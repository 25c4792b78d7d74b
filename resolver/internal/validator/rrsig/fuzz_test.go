package rrsig

import (
	"bytes"
	"crypto"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// fuzzKey signs what the fuzzer makes: Ed25519, so that a finding can be repeated.
var fuzzKey = sync.OnceValue(func() *signer {
	k := &dns.DNSKEY{Hdr: dns.RR_Header{Name: "example.", Rrtype: dns.TypeDNSKEY, Class: dns.ClassINET, Ttl: 3600}, Flags: 257, Protocol: 3, Algorithm: 15,
		PublicKey: "l02Woi0iS8Aa25FQkUd9RMzZHJpBoRQwAQEX1SxZJA4="}
	p, err := k.NewPrivateKey("Private-key-format: v1.2\nAlgorithm: 15 (ED25519)\nPrivateKey: ODIyNjAzODQ2MjgwODAxMjI2NDUxOTAyMDQxNDIyNjI=\n")
	if err != nil {
		panic(err)
	}
	return &signer{k, p.(crypto.Signer)}
})

// FuzzAgainstMiekg: whatever records of whatever type a message brings, signing them there and verifying them
// here must agree, in any order, with duplicates, under a wildcard; and leaving one out must not verify.
func FuzzAgainstMiekg(f *testing.F) {
	for _, text := range []string{"NS A.Example.", "MX 1 B.example.", "SOA A.b. C.d. 1 2 3 4 5", "NSEC A.Example. A RRSIG", "TXT \"Aa\" \"\"", "SRV 1 2 3 A.", `NAPTR 1 2 "A" "B" "C" D.`,
		"RP A.b. C.d.", "HTTPS 1 A.b. alpn=h2", "DNSKEY 256 3 8 AAAA", "DS 1 8 2 AABB", "A 192.0.2.1", "AAAA ::1", "TYPE65280 \\# 3 414243", "PX 1 A.b. C.d.", "KX 1 A.b.", "CAA 0 issue \"A\"",
		"DNAME A.b.", "MINFO A.b. C.d.", "HINFO A B", "AFSDB 1 A.b."} {
		r := rr(f, "x.example. 300 IN "+text)
		f.Add(r.Header().Rrtype, rdata(f, r), []byte("\x01Z\x00"), uint8(1))
	}
	f.Fuzz(func(t *testing.T, typ uint16, one, two []byte, labels uint8) {
		if typ == dnswire.TypeRRSIG || typ == dnswire.TypeOPT || typ == typeA6 || typ == 30 || typ == 0 || typ > 127 && typ < 256 {
			return // never signed, not an RRset, or lowered here and not there (A6, NXT)
		}
		var rrs []dns.RR
		for _, data := range [][]byte{one, two} {
			if r := viaMiekg(typ, data); r != nil {
				rrs = append(rrs, r)
			}
		}
		if len(rrs) == 0 {
			return
		}
		s := fuzzKey()
		sig := &dns.RRSIG{Hdr: dns.RR_Header{Ttl: 300}, KeyTag: s.key.KeyTag(), SignerName: "example.", Algorithm: 15,
			Inception: uint32(date.Unix()) - 60, Expiration: uint32(date.Unix()) + 60}
		if err := sig.Sign(s.priv, rrs); err != nil {
			return
		}
		set := &query.RRset{Name: dnsname.MustParse("x.example."), Type: typ, Class: 1}
		if labels&1 != 0 { // the other implementation, too, takes a low label count for a wildcard
			set.Name = dnsname.MustParse("A.b.example.")
			for _, r := range rrs {
				r.Header().Name = "*.b.example."
			}
			if err := sig.Sign(s.priv, rrs); err != nil {
				return
			}
		}
		for _, r := range rrs {
			data := packed(r)
			if data == nil {
				return
			}
			set.Data = query.AppendRData(set.Data, data)
			set.Data = query.AppendRData(set.Data, data)
		}
		raw := packed(sig)
		parsed, ok := ParseSig(raw)
		if !ok {
			t.Fatalf("a packed signature is not one: %x", raw)
		}
		key := ParseKey(packed(s.key))
		if err := verify(set, &parsed, dnsname.MustParse("example."), key, date, 0); err != nil {
			t.Errorf("type %d, %x and %x: %v", typ, one, two, err)
		}
		if len(rrs) == 2 && !bytes.Equal(packed(rrs[0]), packed(rrs[1])) {
			less := *set
			less.Data = less.Data[:2*(2+len(packed(rrs[0])))]
			var v, w Verifier
			if v.Load(&less) == nil && w.Load(set) == nil && len(v.records) != len(w.records) {
				if err := verify(&less, &parsed, dnsname.MustParse("example."), key, date, 0); err != ErrSignature {
					t.Errorf("type %d, %x without %x: %v", typ, one, two, err)
				}
			}
		}
	})
}

// viaMiekg returns the record that miekg/dns reads from RDATA, or nil.
func viaMiekg(typ uint16, data []byte) dns.RR {
	if len(data) > 4096 {
		return nil
	}
	msg := append([]byte("\x01x\x07example\x00"), byte(typ>>8), byte(typ), 0, 1, 0, 0, 1, 44, byte(len(data)>>8), byte(len(data)))
	r, off, err := dns.UnpackRR(append(msg, data...), 0)
	if err != nil || off != len(msg)+len(data) || r.Header().Rrtype != typ {
		return nil
	}
	// It reads RDATA that ends early as one with empty fields, and names it then packs in two ways.
	if again := packed(r); len(again) == 0 || !dnswire.CheckRData(typ, again) {
		return nil
	}
	return r
}

func packed(r dns.RR) []byte {
	buf := make([]byte, dns.Len(r)+1024)
	n, err := dns.PackRR(r, buf, 0, nil, false)
	if err != nil {
		return nil
	}
	w, _ := dnswire.ReadRR(buf[:n], 0)
	return slices.Clone(buf[w.Data:w.End])
}

// FuzzHostile: no bytes make it panic, and nothing but the right signature verifies.
func FuzzHostile(f *testing.F) {
	s := fuzzKey()
	a := rr(f, "x.example. 300 IN A 192.0.2.1")
	f.Add(rdata(f, s.key), s.sign(f, a), []byte{1, 2, 15, 2, 0}, query.AppendRData(nil, rdata(f, a)), uint16(1))
	for _, c := range vectors {
		var key, sig []byte
		for _, r := range records(f, c.text) {
			switch r.Type {
			case dnswire.TypeDNSKEY:
				key = r.Data
			case dnswire.TypeRRSIG:
				sig = r.Data
			}
		}
		f.Add(key, sig, []byte(nil), []byte("\x00\x04abcd\x00\x01"), uint16(1))
	}
	f.Fuzz(func(t *testing.T, key, sig, ds, data []byte, typ uint16) {
		set := &query.RRset{Name: dnsname.MustParse("x.example."), Type: typ, Class: 1, Data: data}
		var v Verifier
		if err := v.Load(set); err != nil {
			return
		}
		if !slices.IsSortedFunc(v.records, bytes.Compare) {
			t.Error("records are out of order")
		}
		k := ParseKey(key)
		for d := range UsableDS(query.AppendRData(nil, ds), nil) {
			if k != nil && d.Matches(set.Name, k) && !bytes.Equal(d.Digest, Digest(d.DigestType, set.Name, key)) {
				t.Error("a DS matches that does not")
			}
		}
		p, ok := ParseSig(sig)
		if !ok || k == nil {
			return
		}
		if len(p.Signature)+len(p.head) != len(sig) || dnsname.Check(p.Signer) != nil {
			t.Errorf("parts of %x do not add up", sig)
		}
		_ = v.Check(&p, dnsname.MustParse("example."), date, time.Hour)
		p.KeyTag, p.Algorithm = k.Tag, k.Algorithm
		if v.Verify(&p, k) == nil && k.Err() != nil {
			t.Errorf("a key with %v verifies", k.Err())
		}
		_ = v.VerifyRevoked(&p, k)
	})
}
