package siminternet

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math/big"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

const unknownAlgorithm = 200 // unassigned

// A signingKey is a DNSKEY record with its private key.
type signingKey struct {
	record    *dns.DNSKEY
	private   crypto.Signer
	algorithm uint8 // the true one, also where the record says unknownAlgorithm
}

// deriveKey makes the key of a zone out of its name: the same in every process.
func deriveKey(zone string, algorithm uint8, flags uint16, ttl uint32) (*signingKey, error) {
	k := &signingKey{algorithm: algorithm, record: &dns.DNSKEY{
		Hdr:   dns.RR_Header{Name: zone, Rrtype: dns.TypeDNSKEY, Class: dns.ClassINET, Ttl: ttl},
		Flags: flags, Protocol: 3, Algorithm: algorithm,
	}}
	seed := fmt.Sprintf("siminternet %s %d %d", zone, algorithm, flags)
	var public []byte
	switch algorithm {
	case dns.RSASHA256, dns.RSASHA512:
		private := rsaKeys[flags&1]()
		k.private = private
		public = append([]byte{3, 1, 0, 1}, private.N.Bytes()...) // RFC 3110 section 2: exponent 65537, modulus
	case dns.ECDSAP256SHA256, dns.ECDSAP384SHA384:
		private, err := ecdsaKey(seed, algorithm)
		if err != nil {
			return nil, err
		}
		point, err := private.PublicKey.Bytes()
		if err != nil {
			return nil, err
		}
		k.private = private
		public = point[1:] // RFC 6605 section 4: without the octet that says "uncompressed"
	case dns.ED25519:
		sum := sha256.Sum256([]byte(seed))
		private := ed25519.NewKeyFromSeed(sum[:])
		k.private = private
		public = private.Public().(ed25519.PublicKey)
	default:
		return nil, fmt.Errorf("algorithm %d: known are 8, 10, 13, 14, 15, and 0 for unsigned", algorithm)
	}
	k.record.PublicKey = base64.StdEncoding.EncodeToString(public)
	return k, nil
}

func ecdsaKey(seed string, algorithm uint8) (*ecdsa.PrivateKey, error) {
	var err error
	for i := range 16 { // a scalar beyond the group order is improbable, not impossible
		sum := sha512.Sum512(fmt.Appendf(nil, "%s %d", seed, i))
		var private *ecdsa.PrivateKey
		if algorithm == dns.ECDSAP256SHA256 {
			private, err = ecdsa.ParseRawPrivateKey(elliptic.P256(), sum[:32])
		} else {
			private, err = ecdsa.ParseRawPrivateKey(elliptic.P384(), sum[:48])
		}
		if err == nil {
			return private, nil
		}
	}
	return nil, err
}

// rsaKeys are the zone signing and the key signing key of all RSA zones: searching primes for each would cost
// every test a second.
var rsaKeys = [2]func() *rsa.PrivateKey{
	sync.OnceValue(func() *rsa.PrivateKey { return rsaKey("siminternet rsa zone signing key") }),
	sync.OnceValue(func() *rsa.PrivateKey { return rsaKey("siminternet rsa key signing key") }),
}

func rsaKey(seed string) *rsa.PrivateKey {
	one := big.NewInt(1)
	for i := 0; ; i++ {
		p := prime(fmt.Sprintf("%s p %d", seed, i))
		q := prime(fmt.Sprintf("%s q %d", seed, i))
		k := &rsa.PrivateKey{Primes: []*big.Int{p, q}}
		k.N, k.E = new(big.Int).Mul(p, q), 65537
		phi := new(big.Int).Mul(new(big.Int).Sub(p, one), new(big.Int).Sub(q, one))
		k.D = new(big.Int).ModInverse(big.NewInt(int64(k.E)), phi)
		if k.D != nil && k.N.BitLen() == 2048 && k.Validate() == nil {
			k.Precompute()
			return k
		}
	}
}

// prime returns the first prime at or after 1,024 bits derived from seed, the two highest of which are set.
func prime(seed string) *big.Int {
	var b [128]byte
	for i := 0; i < len(b); i += 64 {
		sum := sha512.Sum512(fmt.Appendf(nil, "%s %d", seed, i))
		copy(b[i:], sum[:])
	}
	b[0] |= 0xc0
	b[127] |= 1
	p := new(big.Int).SetBytes(b[:])
	for two := big.NewInt(2); !p.ProbablyPrime(8); p.Add(p, two) {
	}
	return p
}

// ds returns the DS record that vouches for the zone.
func (z *zone) ds() *dns.DS {
	ds := z.ksk.record.ToDS(dns.SHA256)
	ds.Hdr.Name = z.name
	ds.Hdr.Ttl = z.ttl
	if z.declared.Fault&WrongDS != 0 {
		first := "0"
		if ds.Digest[0] == '0' {
			first = "1"
		}
		ds.Digest = first + ds.Digest[1:]
	}
	return ds
}

// A sigCache holds signatures once made. It is bounded by the RRsets of the zone.
type sigCache struct {
	mu   sync.Mutex
	made map[key]*dns.RRSIG
}

// rrsig returns the signature of an RRset of this zone, or nil if there is none to be had.
func (z *zone) rrsig(rrs []dns.RR) *dns.RRSIG {
	if z.zsk == nil || len(rrs) == 0 {
		return nil
	}
	k := key{canonical(rrs[0].Header().Name), rrs[0].Header().Rrtype}
	fault := z.faultAt(k.name)
	if fault&NoSignature != 0 {
		return nil
	}
	z.sigs.mu.Lock()
	sig := z.sigs.made[k]
	z.sigs.mu.Unlock()
	if sig == nil {
		sig = z.sign(rrs, fault)
		z.sigs.mu.Lock()
		if z.sigs.made == nil {
			z.sigs.made = make(map[key]*dns.RRSIG)
		}
		z.sigs.made[k] = sig
		z.sigs.mu.Unlock()
	}
	return dns.Copy(sig).(*dns.RRSIG)
}

func (z *zone) sign(rrs []dns.RR, fault Fault) *dns.RRSIG {
	by := z.zsk
	if rrs[0].Header().Rrtype == dns.TypeDNSKEY {
		by = z.ksk
	}
	from, until := z.now.Add(-24*time.Hour), z.now.Add(60*24*time.Hour)
	switch {
	case fault&Expired != 0:
		from, until = z.now.Add(-30*24*time.Hour), z.now.Add(-24*time.Hour)
	case fault&NotYetValid != 0:
		from = z.now.Add(10 * 24 * time.Hour)
	}
	sig := &dns.RRSIG{
		Hdr:       dns.RR_Header{Ttl: rrs[0].Header().Ttl},
		Algorithm: by.algorithm, KeyTag: by.record.KeyTag(), SignerName: z.name,
		// Serial number arithmetic (RFC 4034 section 3.1.5): the lower 32 bits are what counts.
		Inception: uint32(from.Unix()), Expiration: uint32(until.Unix()),
	}
	if err := sig.Sign(by.private, rrs); err != nil {
		panic(fmt.Sprintf("siminternet: signing %v: %v", rrs[0], err)) // our own keys and records: a bug here
	}
	sig.Algorithm = by.record.Algorithm
	if fault&BadSignature != 0 {
		raw, _ := base64.StdEncoding.DecodeString(sig.Signature)
		last := raw[len(raw)-4:]
		binary.BigEndian.PutUint32(last, ^binary.BigEndian.Uint32(last))
		sig.Signature = base64.StdEncoding.EncodeToString(raw)
	}
	return sig
}

func (z *zone) faultAt(name string) Fault {
	fault := z.declared.Fault
	for n, f := range z.declared.FaultAt {
		if !dns.IsFqdn(n) {
			n += "." + strings.TrimPrefix(z.name, ".")
		}
		if canonical(n) == name {
			fault |= f
		}
	}
	return fault
}
