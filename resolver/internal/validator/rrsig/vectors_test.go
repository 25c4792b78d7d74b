package rrsig

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// vectors are the examples that RFCs publish: key, delegation signer, set and signature.
var vectors = []struct {
	name, zone string
	text       string // DNSKEY, DS if there is one, the set, RRSIG
	tag        uint16
	keyErr     error
	checkErr   error
}{
	{"RFC 5702 section 6.1, a key of 512 bits", "example.net.", `
example.net. IN DNSKEY 256 3 8 AwEAAcFcGsaxxdgiuuGmCkVImy4h99CqT7jwY3pexPGcnUFtR2Fh36BponcwtkZ4cAgtvd4Qs8PkxUdp6p/DlUmObdk=
www.example.net. IN A 192.0.2.91
www.example.net. IN RRSIG A 8 3 3600 20300101000000 20000101000000 9033 example.net. kRCOH6u7l0QGy9qpC9l1sLncJcOKFLJ7GhiUOibu4teYp5VE9RncriShZNz85mwlMgNEacFYK/lPtPiVYP4bwg==`,
		9033, ErrAlgorithm, nil},
	{"RFC 5702 section 6.2", "example.net.", `
example.net. IN DNSKEY 256 3 10 AwEAAdHoNTOW+et86KuJOWRDp1pndvwb6Y83nSVXXyLA3DLroROUkN6X0O6pnWnjJQujX/AyhqFDxj13tOnD9u/1kTg7cV6rklMrZDtJCQ5PCl/D7QNPsgVsMu1J2Q8gpMpztNFLpPBz1bWXjDtaR7ZQBlZ3PFY12ZTSncorffcGmhOL
www.example.net. IN A 192.0.2.91
www.example.net. IN RRSIG A 10 3 3600 20300101000000 20000101000000 3740 example.net. tsb4wnjRUDnB1BUi+t6TMTXThjVnG+eCkWqjvvjhzQL1d0YRoOe0CbxrVDYd0xDtsuJRaeUw1ep94PzEWzr0iGYgZBWm/zpq+9fOuagYJRfDqfReKBzMweOLDiNa8iP5g9vMhpuv6OPlvpXwm9Sa9ZXIbNl1MBGk0fthPgxdDLw=`,
		3740, nil, nil},
	{"RFC 6605 section 6.1", "example.net.", `
example.net. IN DNSKEY 257 3 13 GojIhhXUN/u4v54ZQqGSnyhWJwaubCvTmeexv7bR6edbkrSqQpF64cYbcB7wNcP+e+MAnLr+Wi9xMWyQLc8NAA==
example.net. IN DS 55648 13 2 b4c8c1fe2e7477127b27115656ad6256f424625bf5c1e2770ce6d6e37df61d17
www.example.net. IN A 192.0.2.1
www.example.net. IN RRSIG A 13 3 3600 20100909100439 20100812100439 55648 example.net. qx6wLYqmh+l9oCKTN6qIc+bw6ya+KJ8oMz0YP107epXAyGmt+3SNruPFKG7tZoLBLlUzGGus7ZwmwWep666VCw==`,
		55648, nil, nil},
	{"RFC 6605 section 6.2", "example.net.", `
example.net. IN DNSKEY 257 3 14 xKYaNhWdGOfJ+nPrL8/arkwf2EY3MDJ+SErKivBVSum1w/egsXvSADtNJhyem5RCOpgQ6K8X1DRSEkrbYQ+OB+v8/uX45NBwY8rp65F6Glur8I/mlVNgF6W/qTI37m40
example.net. IN DS 10771 14 4 72d7b62976ce06438e9c0bf319013cf801f09ecc84b8d7e9495f27e305c6a9b0563a9b5f4d288405c3008a946df983d6
www.example.net. IN A 192.0.2.1
www.example.net. IN RRSIG A 14 3 3600 20100909102025 20100812102025 10771 example.net. /L5hDKIvGDyI1fcARX3z65qrmPsVz73QD1Mr5CEqOiLP95hxQouuroGCeZOvzFaxsT8Glr74hbavRKayJNuydCuzWTSSPdz7wnqXL5bdcJzusdnI0RSMROxxwGipWcJm`,
		10771, nil, nil},
	{"RFC 8080 section 6.1, with the label count its erratum gives", "example.com.", `
example.com. IN DNSKEY 257 3 15 l02Woi0iS8Aa25FQkUd9RMzZHJpBoRQwAQEX1SxZJA4=
example.com. IN DS 3613 15 2 3aa5ab37efce57f737fc1627013fee07bdf241bd10f3b1964ab55c78e79a304b
example.com. IN MX 10 mail.example.com.
example.com. IN RRSIG MX 15 2 3600 1440021600 1438207200 3613 example.com. oL9krJun7xfBOIWcGHi7mag5/hdZrKWw15jPGrHpjQeRAvTdszaPD+QLs3fx8A4M3e23mRZ9VrbpMngwcrqNAg==`,
		3613, nil, nil},
	{"RFC 8080 section 6.2, with the label count its erratum gives", "example.com.", `
example.com. IN DNSKEY 257 3 16 3kgROaDjrh0H2iuixWBrc8g2EpBBLCdGzHmn+G2MpTPhpj/OiBVHHSfPodx1FYYUcJKm1MDpJtIA
example.com. IN DS 9713 16 2 6ccf18d5bc5d7fc2fceb1d59d17321402f2aa8d368048db93dd811f5cb2b19c7
example.com. IN MX 10 mail.example.com.
example.com. IN RRSIG MX 16 2 3600 1440021600 1438207200 9713 example.com. 3cPAHkmlnxcDHMyg7vFC34l0blBhuG1qpwLmjInI8w1CMB29FkEAIJUA0amxWndkmnBZ6SKiwZSAxGILn/NBtOXft0+Gj7FSvOKxE/07+4RQvE581N3Aj/JtIyaiYVdnYtyMWbSNyGEY2213WKsJlwEA`,
		9713, nil, nil},
	{"RFC 8080 section 6.2 as printed: one label too many, yet signed so", "example.com.", `
example.com. IN DNSKEY 257 3 16 3kgROaDjrh0H2iuixWBrc8g2EpBBLCdGzHmn+G2MpTPhpj/OiBVHHSfPodx1FYYUcJKm1MDpJtIA
example.com. IN MX 10 mail.example.com.
example.com. IN RRSIG MX 16 3 3600 1440021600 1438207200 9713 example.com. Nmc0rgGKpr3GKYXcB1JmqqS4NYwhmechvJTqVzt3jR+Qy/lSLFoIk1L+9e39GPL+5tVzDPN3f9kAwiu8KCuPPjtl227ayaCZtRKZuJax7n9NuYlZJIusX0SOIOKBGzG+yWYtz1/jjbzl5GGkWvREUCUA`,
		9713, nil, ErrLabels},
}

func TestPublishedExamples(t *testing.T) {
	for _, c := range vectors {
		t.Run(c.name, func(t *testing.T) {
			zone := dnsname.MustParse(c.zone)
			var key *Key
			var ds [][]byte
			var sig Sig
			set := query.RRset{Class: dnswire.ClassIN}
			for _, r := range records(t, c.text) {
				switch r.Type {
				case dnswire.TypeDNSKEY:
					key = ParseKey(r.Data)
				case dnswire.TypeDS:
					ds = append(ds, r.Data)
				case dnswire.TypeRRSIG:
					sig = mustSig(t, r.Data)
				default:
					set.Name, set.Type, set.TTL = r.Name, r.Type, r.TTL
					set.Data = query.AppendRData(set.Data, r.Data)
				}
			}
			if key.Tag != c.tag || key.Err() != c.keyErr {
				t.Errorf("key has tag %d, error %v; want %d, %v", key.Tag, key.Err(), c.tag, c.keyErr)
			}
			for _, d := range ds {
				d, _ := ParseDS(d)
				if !d.Matches(zone, key) {
					t.Error("the DS does not match its key")
				}
				if d.Matches(zone.Parent(), key) {
					t.Error("the DS matches the key of another zone")
				}
			}
			var v Verifier
			if err := v.Load(&set); err != nil {
				t.Fatal(err)
			}
			middle := time.Unix(int64(sig.Inception)/2+int64(sig.Expiration)/2, 0)
			if err := v.Check(&sig, zone, middle, 0); err != c.checkErr {
				t.Errorf("Check = %v, want %v", err, c.checkErr)
			}
			if err := v.Verify(&sig, key); err != c.keyErr {
				t.Errorf("Verify = %v, want %v", err, c.keyErr)
			}
			if c.keyErr != nil {
				return
			}
			// Any bit of what is signed, and of the signature, counts.
			spoil := func(what string, set query.RRset, sig Sig, key *Key, want error) {
				t.Helper()
				if err := v.Load(&set); err != nil {
					t.Fatal(err)
				}
				if err := v.Verify(&sig, key); err != want {
					t.Errorf("%s: Verify = %v, want %v", what, err, want)
				}
			}
			for _, at := range []int{0, len(sig.Signature) / 2, len(sig.Signature) - 1} {
				s := sig
				s.Signature = slices.Clone(sig.Signature)
				s.Signature[at] ^= 1
				spoil("signature changed", set, s, key, ErrSignature)
			}
			for _, s := range [][]byte{nil, {}, sig.Signature[1:], sig.Signature[:len(sig.Signature)-1], append(slices.Clone(sig.Signature), 0), make([]byte, len(sig.Signature)), bytes.Repeat([]byte{0xff}, len(sig.Signature))} {
				other := sig
				other.Signature = s
				spoil("other signature", set, other, key, ErrSignature)
			}
			other := set
			other.Data = slices.Clone(set.Data)
			other.Data[len(other.Data)-2]++
			spoil("data changed", other, sig, key, ErrSignature)
			other = set
			other.Name = dnsname.MustParse("ftp.example.net.")
			spoil("owner changed", other, sig, key, ErrSignature)
			other = set
			other.Class = dnswire.ClassCH
			spoil("class changed", other, sig, key, ErrSignature)
			s := sig
			s.OriginalTTL++
			spoil("original TTL changed", set, s, key, ErrSignature)
			s = sig
			s.KeyTag++
			spoil("another tag", set, s, key, ErrOtherKey)
			s = sig
			s.Algorithm = 8
			spoil("another algorithm", set, s, key, ErrOtherKey)
		})
	}
}

// records reads zone-file text.
func records(t testing.TB, text string) []dnswire.Record {
	t.Helper()
	rs, err := dnswire.ParseRecords(text, ".", "test", 3600)
	if err != nil {
		t.Fatal(err)
	}
	return rs
}

func mustSig(t testing.TB, rdata []byte) Sig {
	t.Helper()
	s, ok := ParseSig(rdata)
	if !ok {
		t.Fatal("not an RRSIG")
	}
	return s
}
