package rrsig

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// date of the signatures made here: in the middle of their day.
var date = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

// A signer makes signatures by miekg/dns, the other implementation.
type signer struct {
	key  *dns.DNSKEY
	priv crypto.Signer
}

func newSigner(t testing.TB, zone string, algorithm uint8, bits int) *signer {
	t.Helper()
	k := &dns.DNSKEY{Hdr: dns.RR_Header{Name: zone, Rrtype: dns.TypeDNSKEY, Class: dns.ClassINET, Ttl: 3600}, Flags: 257, Protocol: 3, Algorithm: algorithm}
	p, err := k.Generate(bits)
	if err != nil {
		t.Fatal(err)
	}
	return &signer{k, p.(crypto.Signer)}
}

func (s *signer) parsed(t testing.TB) *Key {
	t.Helper()
	k := ParseKey(rdata(t, s.key))
	if k == nil || k.Tag != s.key.KeyTag() {
		t.Fatalf("key = %+v, want tag %d", k, s.key.KeyTag())
	}
	return k
}

// sign returns the RDATA of a signature over rrs.
func (s *signer) sign(t testing.TB, rrs ...dns.RR) []byte {
	t.Helper()
	sig := &dns.RRSIG{Hdr: dns.RR_Header{Ttl: rrs[0].Header().Ttl}, KeyTag: s.key.KeyTag(), SignerName: s.key.Hdr.Name, Algorithm: s.key.Algorithm,
		Inception: uint32(date.Add(-12 * time.Hour).Unix()), Expiration: uint32(date.Add(12 * time.Hour).Unix())}
	if err := sig.Sign(s.priv, rrs); err != nil {
		t.Fatal(err)
	}
	return rdata(t, sig)
}

func rdata(t testing.TB, rr dns.RR) []byte {
	t.Helper()
	buf := make([]byte, dns.Len(rr)+300)
	n, err := dns.PackRR(rr, buf, 0, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	w, _ := dnswire.ReadRR(buf[:n], 0)
	return buf[w.Data:w.End:w.End]
}

// setOf makes a set of rrs at owner.
func setOf(t testing.TB, owner string, rrs ...dns.RR) *query.RRset {
	t.Helper()
	s := &query.RRset{Name: dnsname.MustParse(owner), Type: rrs[0].Header().Rrtype, Class: dnswire.ClassIN, TTL: rrs[0].Header().Ttl}
	for _, rr := range rrs {
		s.Data = query.AppendRData(s.Data, rdata(t, rr))
	}
	return s
}

func rr(t testing.TB, text string) dns.RR {
	t.Helper()
	r, err := dns.NewRR(text)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// verify does what a validator does with one signature.
func verify(set *query.RRset, sig *Sig, zone dnsname.Name, key *Key, now time.Time, skew time.Duration) error {
	var v Verifier
	if err := v.Load(set); err != nil {
		return err
	}
	if err := v.Check(sig, zone, now, skew); err != nil {
		return err
	}
	return v.Verify(sig, key)
}

func TestSignaturesOfEveryAlgorithm(t *testing.T) {
	for _, c := range []struct {
		algorithm uint8
		bits      int
	}{{5, 1024}, {7, 1024}, {8, 2048}, {10, 1024}, {13, 256}, {14, 384}, {15, 256}} { // Ed448: the published example
		s := newSigner(t, "example.", c.algorithm, c.bits)
		rrs := []dns.RR{rr(t, "www.example. 300 IN TXT b"), rr(t, "www.example. 300 IN TXT a c"), rr(t, "www.example. 300 IN TXT ab")}
		sig := mustSig(t, s.sign(t, rrs...))
		slices.Reverse(rrs)
		set := setOf(t, "www.example.", append(rrs, rrs[1])...) // neither order nor a duplicate matters
		set.TTL = 17                                            // nor what is left of the TTL
		key := s.parsed(t)
		if err := verify(set, &sig, dnsname.MustParse("example."), key, date, 0); err != nil {
			t.Errorf("algorithm %d: %v", c.algorithm, err)
		}
		if UsesSHA1(c.algorithm) != (c.algorithm < 8) {
			t.Errorf("algorithm %d uses SHA-1: %v", c.algorithm, UsesSHA1(c.algorithm))
		}
		set = setOf(t, "www.example.", rrs[1:]...)
		if err := verify(set, &sig, dnsname.MustParse("example."), key, date, 0); err != ErrSignature {
			t.Errorf("algorithm %d, one record missing: %v", c.algorithm, err)
		}
	}
}

func TestCheck(t *testing.T) {
	s := newSigner(t, "Example.COM.", 13, 256)
	at := func(d time.Duration) time.Time { return date.Add(d) }
	base := func(set *dns.A) Sig { return mustSig(t, s.sign(t, set)) }
	a := rr(t, "www.example.com. 300 IN A 192.0.2.1").(*dns.A)
	set := setOf(t, "www.example.com.", a)
	zone := dnsname.MustParse("example.com.")
	for _, c := range []struct {
		what string
		set  *query.RRset
		zone dnsname.Name
		edit func(*Sig)
		now  time.Time
		skew time.Duration
		want error
	}{
		{"good; the signer's letters do not matter", set, zone, nil, date, 0, nil},
		{"last second", set, zone, nil, at(12 * time.Hour), 0, nil},
		{"a second late", set, zone, nil, at(12*time.Hour + time.Second), 0, ErrExpired},
		{"late, within the skew", set, zone, nil, at(13 * time.Hour), time.Hour, nil},
		{"a second beyond the skew", set, zone, nil, at(13*time.Hour + time.Second), time.Hour, ErrExpired},
		{"first second", set, zone, nil, at(-12 * time.Hour), 0, nil},
		{"a second early", set, zone, nil, at(-12*time.Hour - time.Second), 0, ErrNotYetValid},
		{"early, within the skew", set, zone, nil, at(-13 * time.Hour), time.Hour, nil},
		{"a second before the skew", set, zone, nil, at(-13*time.Hour - time.Second), time.Hour, ErrNotYetValid},
		{"negative skew is none", set, zone, nil, at(12*time.Hour + time.Second), -time.Hour, ErrExpired},
		{"absurd skew does not wrap", set, zone, nil, at(-2 * 365 * 24 * time.Hour), 1 << 62, ErrNotYetValid},
		{"ten years later", set, zone, nil, date.AddDate(10, 0, 0), time.Hour, ErrExpired},
		{"ten years earlier", set, zone, nil, date.AddDate(-10, 0, 0), time.Hour, ErrNotYetValid},
		{"ends before it begins", set, zone, func(s *Sig) { s.Inception, s.Expiration = s.Expiration, s.Inception }, date, 24 * time.Hour, ErrTimes},
		{"across 2106: serial numbers", set, zone, func(s *Sig) { s.Inception, s.Expiration = 0xffff_0000, 0x0000_ffff }, time.Unix(1<<32+5, 0), 0, nil},
		{"before 2106", set, zone, func(s *Sig) { s.Inception, s.Expiration = 0xffff_0000, 0x0000_ffff }, time.Unix(1<<32-5, 0), 0, nil},
		{"after it", set, zone, func(s *Sig) { s.Inception, s.Expiration = 0xffff_0000, 0x0000_ffff }, time.Unix(1<<32+0x1_0000, 0), 0, ErrExpired},
		{"another type", set, zone, func(s *Sig) { s.Covered = 28 }, date, 0, ErrCovered},
		{"a parent's signature", set, dnsname.MustParse("com."), nil, date, 0, ErrSigner},
		{"of a zone elsewhere", setOf(t, "www.example.net.", a), zone, nil, date, 0, ErrSigner},
		{"a name that only ends alike", setOf(t, "www.badexample.com.", a), zone, nil, date, 0, ErrSigner},
		{"more labels than the owner", set, zone, func(s *Sig) { s.Labels = 4 }, date, 0, ErrLabels},
		{"fewer labels than the signer", set, zone, func(s *Sig) { s.Labels = 1 }, date, 0, ErrLabels},
		{"as many as the signer: *.example.com", set, zone, func(s *Sig) { s.Labels = 2 }, date, 0, nil},
		{"the asterisk does not count", setOf(t, "*.example.com.", a), zone, nil, date, 0, ErrLabels},
		{"unknown algorithm", set, zone, func(s *Sig) { s.Algorithm = 200 }, date, 0, ErrAlgorithm},
		{"DSA", set, zone, func(s *Sig) { s.Algorithm = 3 }, date, 0, ErrAlgorithm},
	} {
		var v Verifier
		if err := v.Load(c.set); err != nil {
			t.Fatal(err)
		}
		sig := base(a)
		if c.edit != nil {
			c.edit(&sig)
		}
		if err := v.Check(&sig, c.zone, c.now, c.skew); err != c.want {
			t.Errorf("%s: %v, want %v", c.what, err, c.want)
		}
	}
	sig := base(a)
	if sig.SignerName() != zone {
		t.Errorf("signer = %s", sig.SignerName())
	}
	sigs := setOf(t, "www.example.com.", a)
	sigs.Type = dnswire.TypeRRSIG
	sig.Covered = dnswire.TypeRRSIG
	var v Verifier
	if err := v.Load(sigs); err != nil {
		t.Fatal(err)
	}
	if err := v.Check(&sig, zone, date, 0); err != ErrCovered {
		t.Errorf("a signature over signatures: %v", err)
	}
}

func TestTTL(t *testing.T) {
	sig := Sig{OriginalTTL: 3600, Expiration: uint32(date.Unix()) + 100}
	for _, c := range []struct {
		ttl  uint32
		at   time.Duration
		skew time.Duration
		want uint32
	}{
		{30, 0, 0, 30},
		{3600, 0, 0, 100},
		{86400, -24 * time.Hour, 0, 3600},
		{3600, 0, time.Minute, 160},
		{3600, 100 * time.Second, 0, 0},
		{3600, time.Hour, time.Minute, 0},
	} {
		if got := sig.TTL(c.ttl, date.Add(c.at), c.skew); got != c.want {
			t.Errorf("TTL(%d) %v from now = %d, want %d", c.ttl, c.at, got, c.want)
		}
	}
}

// TestWildcards: what was expanded from a wildcard verifies for the owner it was expanded to; the wildcard
// asked for literally is no expansion (E69).
func TestWildcards(t *testing.T) {
	s := newSigner(t, "example.", 13, 256)
	key, zone := s.parsed(t), dnsname.MustParse("example.")
	wild := rr(t, "*.w.example. 300 IN A 192.0.2.1")
	sig := mustSig(t, s.sign(t, wild))
	for _, c := range []struct {
		owner    string
		expanded bool
		want     error
	}{
		{"a.w.example.", true, nil},
		{"b.a.w.example.", true, nil},
		{"*.a.w.example.", true, nil},
		{"*.w.example.", false, nil},
		{"w.example.", false, ErrSignature},
		{"a.v.example.", true, ErrSignature},
		{"a.example.", false, ErrSignature},
		{"example.", false, ErrLabels},
	} {
		set := setOf(t, c.owner, wild)
		if err := verify(set, &sig, zone, key, date, 0); err != c.want {
			t.Errorf("%s: %v, want %v", c.owner, err, c.want)
		}
		if sig.Expanded(set.Name) != c.expanded {
			t.Errorf("%s: expanded = %v", c.owner, !c.expanded)
		}
	}
}

// TestCanonicalNames: names inside RDATA are signed in lower case where RFC 4034 section 6.2, as corrected by
// RFC 6840 section 5.1, says so, and as they are elsewhere.
func TestCanonicalNames(t *testing.T) {
	for text, lowered := range map[string]bool{
		`NS A.Example.`:                       true,
		`CNAME A.Example.`:                    true,
		`DNAME A.Example.`:                    true,
		`PTR A.Example.`:                      true,
		`MX 10 A.Example.`:                    true,
		`SOA A.Example. B.Example. 1 2 3 4 5`: true,
		`SRV 1 2 3 A.Example.`:                true,
		`NAPTR 1 2 "S" "X" "Y" A.Example.`:    true,
		`RP A.Example. B.Example.`:            true,
		`MINFO A.Example. B.Example.`:         true,
		`PX 1 A.Example. B.Example.`:          true,
		`KX 1 A.Example.`:                     true,
		`AFSDB 1 A.Example.`:                  true,
		`RT 1 A.Example.`:                     true,
		`NSEC A.Example. A`:                   false,
		`HINFO "A.Example" "B"`:               false,
		`SVCB 1 A.Example.`:                   false,
		`HTTPS 1 A.Example.`:                  false,
		`TXT "A.Example."`:                    false,
	} {
		r := rr(t, "x.example. 300 IN "+text)
		before := rdata(t, r)
		var v Verifier
		set := setOf(t, "x.example.", r)
		if err := v.Load(set); err != nil {
			t.Fatal(err)
		}
		if string(set.First()) != string(before) {
			t.Errorf("%s: the set itself was changed", text)
		}
		if got := !slices.Equal(v.records[0], before); got != lowered {
			t.Errorf("%s: lowered = %v, want %v", text, got, lowered)
		}
	}
	name := "\x01A\x07Example\x00"
	for in, want := range map[string]string{
		"\x80" + name:          "\x80" + strings.ToLower(name), // prefix of 128 bits: no address
		"\x40ABCDEFGH" + name:  "\x40ABCDEFGH" + strings.ToLower(name),
		"\x00ABCDEFGHABCDEFGH": "\x00ABCDEFGHABCDEFGH",
		"\x81" + name:          "\x81" + name,
		"\x40ABCDEFGH\x3fABC":  "\x40ABCDEFGH\x3fABC",
		"":                     "",
	} {
		b := []byte(in)
		canonical(typeA6, b)
		if string(b) != want {
			t.Errorf("A6 %q = %q, want %q", in, b, want)
		}
	}
}

// TestNSECNextNameInUpperCase: a signer that leaves upper case in NSEC's next name, and in its own name, is
// right to (E67).
func TestNSECNextNameInUpperCase(t *testing.T) {
	s := newSigner(t, "EXAMPLE.", 13, 256)
	r := rr(t, "a.example. 300 IN NSEC B.Example. A RRSIG NSEC")
	sig := mustSig(t, s.sign(t, r))
	if err := verify(setOf(t, "a.example.", r), &sig, dnsname.MustParse("example."), s.parsed(t), date, 0); err != nil {
		t.Error(err)
	}
}

func TestSizeLimits(t *testing.T) {
	s := newSigner(t, "example.", 13, 256)
	sized := func(n, size int) *query.RRset {
		set := &query.RRset{Name: dnsname.MustParse("example."), Type: 65280, Class: 1}
		for i := range n {
			b := make([]byte, size)
			binary.BigEndian.PutUint16(b, uint16(i))
			set.Data = query.AppendRData(set.Data, b)
		}
		return set
	}
	for _, c := range []struct {
		n, size int
		want    error
	}{
		{MaxRecords, 2, ErrSignature},
		{MaxRecords + 1, 2, ErrSize},
		{1, MaxInput - 46, ErrSignature}, // 18 + 9 of the RRSIG, 9 + 10 around the RDATA
		{1, MaxInput - 45, ErrSize},
		{1, 65535, ErrSize},
		{5, 16384, ErrSize},
		{200, 300, ErrSignature},
		{200, 310, ErrSize},
	} {
		sig := mustSig(t, s.sign(t, rr(t, "example. 300 IN A 192.0.2.1")))
		sig.Covered = 65280
		if err := verify(sized(c.n, c.size), &sig, dnsname.MustParse("example."), s.parsed(t), date, 0); err != c.want {
			t.Errorf("%d records of %d bytes: %v, want %v", c.n, c.size, err, c.want)
		}
	}
}

func TestKeys(t *testing.T) {
	rsaKey := func(exponent, modulus []byte) []byte {
		b := []byte{1, 0, 3, 8}
		if len(exponent) < 256 {
			b = append(b, byte(len(exponent)))
		} else {
			b = append(b, 0, byte(len(exponent)>>8), byte(len(exponent)))
		}
		return append(append(b, exponent...), modulus...)
	}
	mod := func(bits int) []byte {
		b := make([]byte, (bits+7)/8)
		b[0] = 1 << ((bits - 1) % 8)
		b[len(b)-1] |= 1
		return b
	}
	f4 := []byte{1, 0, 1}
	good := newSigner(t, "example.", 13, 256)
	ecc := rdata(t, good.key)
	edit := func(f func([]byte)) []byte { b := slices.Clone(ecc); f(b); return b }
	for _, c := range []struct {
		what  string
		rdata []byte
		want  error
	}{
		{"ECDSA", ecc, nil},
		{"not for zones", edit(func(b []byte) { b[0] = 0 }), ErrNotZone},
		{"protocol 2", edit(func(b []byte) { b[2] = 2 }), ErrNotZone},
		{"revoked", edit(func(b []byte) { b[1] |= FlagRevoke }), ErrRevoked},
		{"unknown flags", edit(func(b []byte) { b[0] |= 0x40 }), nil},
		{"unknown algorithm", edit(func(b []byte) { b[3] = 253 }), ErrAlgorithm},
		{"point not on the curve", edit(func(b []byte) { b[10] ^= 1 }), ErrKey},
		{"point zero", append(slices.Clone(ecc[:4]), make([]byte, 64)...), ErrKey},
		{"point short", ecc[:len(ecc)-1], ErrKey},
		{"point long", append(slices.Clone(ecc), 0), ErrKey},
		{"P-256 point as P-384", edit(func(b []byte) { b[3] = 14 }), ErrKey},
		{"Ed25519 of 64 bytes", edit(func(b []byte) { b[3] = 15 }), ErrKey},
		{"Ed448 of 64 bytes", edit(func(b []byte) { b[3] = 16 }), ErrKey},
		{"no key at all", ecc[:4], ErrKey},
		{"RSA without anything", []byte{1, 0, 3, 8}, ErrKey},
		{"RSA, long form cut off", []byte{1, 0, 3, 8, 0, 1}, ErrKey},
		{"RSA, exponent beyond the end", []byte{1, 0, 3, 8, 200, 1}, ErrKey},
		{"RSA, long exponent beyond the end", []byte{1, 0, 3, 8, 0, 255, 255, 1, 2}, ErrKey},
		{"RSA, no exponent", rsaKey(nil, mod(1024))[:4+1], ErrKey},
		{"RSA, exponent of length 0 in long form", append([]byte{1, 0, 3, 8, 0, 0, 0}, mod(1024)...), ErrKey},
		{"RSA, exponent zero", rsaKey([]byte{0, 0}, mod(1024)), ErrKey},
		{"RSA, exponent 1", rsaKey([]byte{1}, mod(1024)), ErrKey},
		{"RSA, even exponent", rsaKey([]byte{1, 0, 2}, mod(1024)), ErrKey},
		{"RSA, even modulus", rsaKey(f4, append(mod(1024)[:127], 2)), ErrKey},
		{"RSA, modulus zero", rsaKey(f4, make([]byte, 128)), ErrKey},
		{"RSA, no modulus", rsaKey(f4, nil), ErrKey},
		{"RSA 1023", rsaKey(f4, mod(1023)), ErrAlgorithm},
		{"RSA 1024", rsaKey(f4, mod(1024)), nil},
		{"RSA 4096", rsaKey(f4, mod(4096)), nil},
		{"RSA 4096, leading zeros", rsaKey(append([]byte{0, 0}, f4...), append([]byte{0, 0}, mod(4096)...)), nil},
		{"RSA 4097", rsaKey(f4, mod(4097)), ErrAlgorithm},
		{"RSA 65536, whatever it is", rsaKey(f4, mod(65536)), ErrAlgorithm},
		{"RSA, exponent of 35 bits", rsaKey([]byte{7, 255, 255, 255, 255}, mod(1024)), nil},
		{"RSA, exponent of 36 bits", rsaKey([]byte{8, 0, 0, 0, 1}, mod(1024)), ErrAlgorithm},
		{"RSA, exponent of 300 bytes (E68)", rsaKey(mod(2400), mod(2048)), ErrAlgorithm},
		{"RSA, 65537 in 300 bytes (E68)", rsaKey(append(make([]byte, 297), f4...), mod(2048)), nil},
		{"RSA, exponent of 65000 bytes", rsaKey(mod(65000*8), mod(2048)), ErrAlgorithm},
	} {
		k := ParseKey(c.rdata)
		if k == nil {
			t.Errorf("%s: no key", c.what)
			continue
		}
		if k.Err() != c.want {
			t.Errorf("%s: %v, want %v", c.what, k.Err(), c.want)
		}
		// Whatever the key is, verifying with it is safe and says why not.
		want := c.want
		if want == nil {
			want = ErrSignature
		}
		sig := Sig{Covered: 1, Algorithm: k.Algorithm, Labels: 1, KeyTag: k.Tag, Signature: make([]byte, 256), head: make([]byte, 19)}
		var v Verifier
		if err := v.Load(setOf(t, "example.", rr(t, "example. 300 IN A 192.0.2.1"))); err != nil {
			t.Fatal(err)
		}
		if err := v.Verify(&sig, k); err != want {
			t.Errorf("%s: Verify = %v, want %v", c.what, err, want)
		}
	}
	for _, b := range [][]byte{nil, {1}, {1, 0, 3}} {
		if ParseKey(b) != nil {
			t.Errorf("ParseKey(%v) gave a key", b)
		}
	}
	if tag := KeyTag([]byte{1, 0, 3, 1, 0xaa, 0xbb, 0xcc}); tag != 0xaabb {
		t.Errorf("tag of an RSA/MD5 key = %x, want its last but two bytes", tag)
	}
}

// TestExponentBeyond31Bits: crypto/rsa refuses 2^32+1, which zones use.
func TestExponentBeyond31Bits(t *testing.T) {
	e := big.NewInt(1<<32 + 1)
	var p *rsa.PrivateKey
	d := new(big.Int)
	for { // the exponent must be prime to p-1 and q-1
		var err error
		if p, err = rsa.GenerateKey(rand.Reader, 1024); err != nil {
			t.Fatal(err)
		}
		one := big.NewInt(1)
		phi := new(big.Int).Mul(new(big.Int).Sub(p.Primes[0], one), new(big.Int).Sub(p.Primes[1], one))
		if d.ModInverse(e, phi) != nil {
			break
		}
	}
	for algorithm, h := range map[uint8]crypto.Hash{RSASHA1: crypto.SHA1, RSASHA256: crypto.SHA256, RSASHA512: crypto.SHA512} {
		key := ParseKey(slices.Concat([]byte{1, 0, 3, algorithm, 5}, e.Bytes(), p.N.Bytes()))
		if key.Err() != nil {
			t.Fatal(key.Err())
		}
		set := setOf(t, "example.", rr(t, "example. 300 IN A 192.0.2.1"))
		head := slices.Concat([]byte{0, 1, algorithm, 1, 0, 0, 1, 44}, make([]byte, 8), binary.BigEndian.AppendUint16(nil, key.Tag), []byte("\x07example\x00"))
		sig := mustSig(t, append(slices.Clone(head), 0))
		var v Verifier
		if err := v.Load(set); err != nil {
			t.Fatal(err)
		}
		if !v.signedInput(&sig) {
			t.Fatal("input too big")
		}
		hash := h.New()
		hash.Write(v.input)
		em := []byte{0, 1}
		tail := slices.Concat([]byte{0}, digestInfo(h), hash.Sum(nil))
		for len(em)+len(tail) < 128 {
			em = append(em, 0xff)
		}
		em = append(em, tail...)
		made := new(big.Int).Exp(new(big.Int).SetBytes(em), d, p.N).FillBytes(make([]byte, 128))
		// The same padding as the library's: what it verifies, verifyBig builds.
		lib := new(big.Int).Exp(new(big.Int).SetBytes(em), p.D, p.N).FillBytes(make([]byte, 128))
		if err := rsa.VerifyPKCS1v15(&p.PublicKey, h, hash.Sum(nil), lib); err != nil {
			t.Errorf("algorithm %d: crypto/rsa: %v", algorithm, err)
		}
		sig = mustSig(t, append(slices.Clone(head), made...))
		if err := v.Verify(&sig, key); err != nil {
			t.Errorf("algorithm %d: %v", algorithm, err)
		}
		for _, at := range []int{0, 64, 127} {
			sig.Signature[at] ^= 1
			if err := v.Verify(&sig, key); err != ErrSignature {
				t.Errorf("algorithm %d, signature spoilt at %d: %v", algorithm, at, err)
			}
			sig.Signature[at] ^= 1
		}
		for _, s := range [][]byte{made[1:], append([]byte{0}, made...), p.N.Bytes(), new(big.Int).Add(new(big.Int).SetBytes(made), p.N).Bytes()} {
			sig.Signature = s
			if err := v.Verify(&sig, key); err != ErrSignature {
				t.Errorf("algorithm %d, signature of %d bytes: %v", algorithm, len(s), err)
			}
		}
	}
}

func TestRevokedKey(t *testing.T) {
	s := newSigner(t, "example.", 13, 256)
	s.key.Flags |= FlagRevoke
	other := newSigner(t, "example.", 13, 256)
	sig := mustSig(t, s.sign(t, s.key, other.key))
	zone := dnsname.MustParse("example.")
	set, key := setOf(t, "example.", s.key, other.key), s.parsed(t)
	if err := verify(set, &sig, zone, key, date, 0); err != ErrRevoked {
		t.Errorf("a revoked key verifies keys: %v", err)
	}
	var v Verifier
	load := func(set *query.RRset) {
		t.Helper()
		if err := v.Load(set); err != nil {
			t.Fatal(err)
		}
	}
	load(set)
	if err := v.VerifyRevoked(&sig, key); err != nil {
		t.Errorf("its own revocation: %v", err)
	}
	if err := v.VerifyRevoked(&sig, other.parsed(t)); err != ErrOtherKey {
		t.Errorf("by a key that is not revoked: %v", err)
	}
	spoilt := mustSig(t, s.sign(t, other.key))
	if err := v.VerifyRevoked(&spoilt, key); err != ErrSignature {
		t.Errorf("signature over something else: %v", err)
	}
	load(setOf(t, "example.", other.key))
	if err := v.VerifyRevoked(&spoilt, key); err != ErrOtherKey {
		t.Errorf("a set without the revoked key: %v", err)
	}
}

func TestUsableDS(t *testing.T) {
	s := newSigner(t, "example.", 13, 256)
	ds := func(algorithm, digest uint8) []byte {
		return append([]byte{1, 2, algorithm, digest}, make([]byte, 20)...)
	}
	for _, c := range []struct {
		what string
		in   [][]byte
		want string
	}{
		{"none", nil, ""},
		{"SHA-1 alone", [][]byte{ds(8, 1)}, "8/1"},
		{"SHA-1 beside SHA-256", [][]byte{ds(8, 1), ds(8, 2)}, "8/2"},
		{"SHA-1 beside SHA-384 of another algorithm", [][]byte{ds(13, 4), ds(8, 1)}, "13/4"},
		{"SHA-256 and SHA-384", [][]byte{ds(13, 4), ds(8, 2)}, "13/4 8/2"},
		{"SHA-1 beside a better one that is of no use", [][]byte{ds(8, 1), ds(200, 2), ds(8, 3), ds(8, 200)}, "8/1"},
		{"SHA-1 beside a better one that is not accepted", [][]byte{ds(13, 1), ds(5, 2)}, "13/1"},
		{"nothing known", [][]byte{ds(253, 2), ds(8, 3), ds(1, 1)}, ""},
		{"not accepted", [][]byte{ds(5, 2), ds(7, 2)}, ""},
		{"malformed", [][]byte{{1, 2, 8}, nil}, ""},
	} {
		var data []byte
		for _, d := range c.in {
			data = query.AppendRData(data, d)
		}
		var got []string
		for d := range UsableDS(data, func(a uint8) bool { return !UsesSHA1(a) }) {
			got = append(got, fmt.Sprintf("%d/%d", d.Algorithm, d.DigestType))
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%s: %v, want %s", c.what, got, c.want)
		}
	}
	// Digests, against the other implementation; and near misses.
	key, zone := s.parsed(t), dnsname.MustParse("example.")
	for _, h := range []uint8{dns.SHA1, dns.SHA256, dns.SHA384} {
		d, _ := ParseDS(rdata(t, s.key.ToDS(h)))
		if !d.Matches(zone, key) {
			t.Errorf("digest type %d does not match", h)
		}
		for what, edit := range map[string]func(*DS){
			"tag":       func(d *DS) { d.KeyTag++ },
			"algorithm": func(d *DS) { d.Algorithm++ },
			"type":      func(d *DS) { d.DigestType ^= 3 },
			"unknown":   func(d *DS) { d.DigestType = 9 },
			"short":     func(d *DS) { d.Digest = d.Digest[:len(d.Digest)-1] },
			"empty":     func(d *DS) { d.Digest = nil },
			"long":      func(d *DS) { d.Digest = append(slices.Clone(d.Digest), 0) },
		} {
			wrong := d
			if edit(&wrong); wrong.Matches(zone, key) {
				t.Errorf("digest type %d matches with another %s", h, what)
			}
		}
	}
}

// TestErrorsTellApart: callers branch on them.
func TestErrorsTellApart(t *testing.T) {
	all := []error{ErrCovered, ErrSigner, ErrLabels, ErrExpired, ErrNotYetValid, ErrTimes, ErrAlgorithm, ErrKey, ErrNotZone, ErrRevoked, ErrOtherKey, ErrSignature, ErrSize}
	for i, a := range all {
		for j, b := range all {
			if errors.Is(a, b) != (i == j) {
				t.Errorf("%v is %v", a, b)
			}
		}
	}
}

// TestAllocations: a Verifier in use allocates nothing of its own; what is left is the cryptography's.
func TestAllocations(t *testing.T) {
	s := newSigner(t, "example.", 13, 256)
	rrs := []dns.RR{rr(t, "www.example. 300 IN MX 1 A.example."), rr(t, "www.example. 300 IN MX 2 b.example.")}
	raw := s.sign(t, rrs...)
	set, key, zone := setOf(t, "www.example.", rrs...), s.parsed(t), dnsname.MustParse("example.")
	var v Verifier
	digest := sha256.Sum256([]byte("x"))
	asn1, err := s.priv.(*ecdsa.PrivateKey).Sign(rand.Reader, digest[:], crypto.SHA256)
	if err != nil {
		t.Fatal(err)
	}
	bare := testing.AllocsPerRun(20, func() { ecdsa.VerifyASN1(&s.priv.(*ecdsa.PrivateKey).PublicKey, digest[:], asn1) })
	ours := testing.AllocsPerRun(20, func() {
		if err := v.Load(set); err != nil {
			t.Fatal(err)
		}
		sig, _ := ParseSig(raw)
		if err := v.Check(&sig, zone, date, 0); err != nil {
			t.Fatal(err)
		}
		if err := v.Verify(&sig, key); err != nil {
			t.Fatal(err)
		}
	})
	if ours > bare+4 {
		t.Errorf("%v allocations, of which %v are the library's", ours, bare)
	}
	t.Logf("%v allocations, of which %v are the library's", ours, bare)
}

func BenchmarkVerify(b *testing.B) {
	for _, c := range []struct {
		name      string
		algorithm uint8
		bits      int
	}{{"RSASHA256-2048", 8, 2048}, {"ECDSAP256", 13, 256}, {"ECDSAP384", 14, 384}, {"Ed25519", 15, 256}} {
		b.Run(c.name, func(b *testing.B) {
			s := newSigner(b, "example.", c.algorithm, c.bits)
			a := rr(b, "www.example. 300 IN A 192.0.2.1")
			raw := s.sign(b, a)
			set, key, zone := setOf(b, "www.example.", a), s.parsed(b), dnsname.MustParse("example.")
			var v Verifier
			b.ReportAllocs()
			for b.Loop() {
				if err := v.Load(set); err != nil {
					b.Fatal(err)
				}
				sig, _ := ParseSig(raw)
				if err := v.Check(&sig, zone, date, 0); err != nil {
					b.Fatal(err)
				}
				if err := v.Verify(&sig, key); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
