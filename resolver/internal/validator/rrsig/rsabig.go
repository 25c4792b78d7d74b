package rrsig

import (
	"bytes"
	"crypto"
	"math/big"
)

// verifyBig is PKCS #1 v1.5 verification (RFC 8017 section 8.2.2) for the exponents that crypto/rsa refuses.
// Nothing here is secret, so math/big does.
func (k *rsaKey) verifyBig(h crypto.Hash, digest, signature []byte) bool {
	size := k.Size()
	if len(signature) != size {
		return false
	}
	s := new(big.Int).SetBytes(signature)
	if s.Cmp(k.N) >= 0 {
		return false
	}
	got := s.Exp(s, k.exponent, k.N).FillBytes(make([]byte, size))

	// 00 01 ff … ff 00 DigestInfo digest, compared as a whole: nothing in it may be parsed (RFC 8017 section
	// 9.2, and the forgeries of 2006).
	want := make([]byte, 0, size)
	want = append(want, 0, 1)
	tail := append(digestInfo(h), digest...)
	if size < len(tail)+11 {
		return false
	}
	for len(want) < size-len(tail)-1 {
		want = append(want, 0xff)
	}
	want = append(want, 0)
	want = append(want, tail...)
	return bytes.Equal(got, want)
}

// digestInfo is the DER prefix of RFC 8017 section 9.2, note 1.
func digestInfo(h crypto.Hash) []byte {
	switch h {
	case crypto.SHA1:
		return []byte{0x30, 0x21, 0x30, 0x09, 0x06, 0x05, 0x2b, 0x0e, 0x03, 0x02, 0x1a, 0x05, 0x00, 0x04, 0x14}
	case crypto.SHA256:
		return []byte{0x30, 0x31, 0x30, 0x0d, 0x06, 0x09, 0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x02, 0x01, 0x05, 0x00, 0x04, 0x20}
	}
	return []byte{0x30, 0x51, 0x30, 0x0d, 0x06, 0x09, 0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x02, 0x03, 0x05, 0x00, 0x04, 0x40} // SHA-512
}
