// Package cookie makes and checks the server cookies that clients get (RFC 7873), in the form of RFC 9018: a
// client that returns one has received a packet at its address, so its address is not forged.
//
// A server cookie is version 1, three reserved bytes, the time in seconds, and SipHash-2-4 over client cookie,
// those eight bytes and the client's address. It is good for an hour, and five minutes ahead of our clock for
// servers that share a secret and not quite a clock (RFC 9018 section 4.3); each response carries a fresh one.
// Nothing is remembered of clients. Behind a PROXY header the address is that of the client, not of the proxy.
//
// Keys are derived from one secret, a new one each day of the wall clock: the cookie's own time says which one
// made it, so rotation (RFC 9018 section 5) needs no state and no agreement beyond the secret. Nobody is turned
// away for a wrong cookie: it is as good as none.
package cookie

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"math/bits"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/query"
)

const (
	clientLen = 8
	serverLen = 16
	version   = 1

	past     = uint32(time.Hour / time.Second)       // how old a cookie may be
	future   = uint32(5 * time.Minute / time.Second) // and how far ahead
	keyEvery = uint32(24 * time.Hour / time.Second)
)

// A Jar makes and checks cookies. It is safe for concurrent use.
type Jar struct {
	secret [32]byte
	keys   atomic.Pointer[keys]
}

// New returns a Jar. Those that share the secret accept each other's cookies.
func New(secret [32]byte) *Jar { return &Jar{secret: secret} }

// Check reads the cookie of q, if it has one, and fills in what the response carries. It allocates once a day.
func (j *Jar) Check(q *query.Query, wall time.Time) {
	c := q.EDNS.Cookie
	if len(c) < clientLen {
		return
	}
	now, addr := uint32(wall.Unix()), q.Source.Addr().Unmap()
	client := (*[clientLen]byte)(c)
	if len(c) == clientLen+serverLen {
		// Times are numbers modulo 2^32 (RFC 1982).
		then := binary.BigEndian.Uint32(c[clientLen+4:])
		if c[clientLen] == version && (now-then <= past || then-now <= future) {
			var want [serverLen]byte
			copy(want[:8], c[clientLen:]) // the reserved bytes too: whoever made it may have used them
			sign(j.key(then, now), client, &want, addr)
			q.CookieOK = hmac.Equal(want[8:], c[clientLen+8:])
		}
	}
	q.HasCookie = true
	q.ServerCookie = [serverLen]byte{version}
	binary.BigEndian.PutUint32(q.ServerCookie[4:], now)
	sign(j.key(now, now), client, &q.ServerCookie, addr)
}

// keys are those of one day and of its neighbours, for cookies from just beyond midnight.
type keys struct {
	day                   uint32
	before, today, behind sipKey
}

// key returns the key of the day of then, which is near now.
func (j *Jar) key(then, now uint32) *sipKey {
	k, day := j.keys.Load(), now/keyEvery
	if k == nil || k.day != day {
		k = &keys{day, j.derive(day - 1), j.derive(day), j.derive(day + 1)}
		j.keys.Store(k)
	}
	switch then / keyEvery {
	case day - 1:
		return &k.before
	case day + 1:
		return &k.behind
	}
	return &k.today
}

func (j *Jar) derive(day uint32) sipKey {
	h := hmac.New(sha256.New, j.secret[:])
	h.Write(binary.BigEndian.AppendUint32([]byte("server cookie of day "), day))
	b := h.Sum(nil)
	return newSipKey([16]byte(b))
}

// sign fills in the hash of a server cookie of which the first eight bytes are there.
func sign(k *sipKey, client *[clientLen]byte, server *[serverLen]byte, addr netip.Addr) {
	s := k.start()
	s.word(binary.LittleEndian.Uint64(client[:]))
	s.word(binary.LittleEndian.Uint64(server[:8]))
	var sum uint64
	if addr.Is4() {
		a := addr.As4()
		sum = s.end(uint64(binary.LittleEndian.Uint32(a[:])) | 20<<56)
	} else {
		a := addr.As16()
		s.word(binary.LittleEndian.Uint64(a[:]))
		s.word(binary.LittleEndian.Uint64(a[8:]))
		sum = s.end(32 << 56)
	}
	binary.LittleEndian.PutUint64(server[8:], sum)
}

// SipHash-2-4 (Aumasson and Bernstein), as far as cookies need it.
type (
	sipKey   struct{ k0, k1 uint64 }
	sipState struct{ v0, v1, v2, v3 uint64 }
)

func newSipKey(b [16]byte) sipKey {
	return sipKey{binary.LittleEndian.Uint64(b[:]), binary.LittleEndian.Uint64(b[8:])}
}

func (k *sipKey) start() sipState {
	return sipState{k.k0 ^ 0x736f6d6570736575, k.k1 ^ 0x646f72616e646f6d, k.k0 ^ 0x6c7967656e657261, k.k1 ^ 0x7465646279746573}
}

func (s *sipState) word(w uint64) {
	s.v3 ^= w
	s.rounds(2)
	s.v0 ^= w
}

// end takes the last word, which holds the length in its highest byte.
func (s *sipState) end(last uint64) uint64 {
	s.word(last)
	s.v2 ^= 0xff
	s.rounds(4)
	return s.v0 ^ s.v1 ^ s.v2 ^ s.v3
}

func (s *sipState) rounds(n int) {
	for range n {
		s.v0 += s.v1
		s.v1 = bits.RotateLeft64(s.v1, 13) ^ s.v0
		s.v0 = bits.RotateLeft64(s.v0, 32)
		s.v2 += s.v3
		s.v3 = bits.RotateLeft64(s.v3, 16) ^ s.v2
		s.v0 += s.v3
		s.v3 = bits.RotateLeft64(s.v3, 21) ^ s.v0
		s.v2 += s.v1
		s.v1 = bits.RotateLeft64(s.v1, 17) ^ s.v2
		s.v2 = bits.RotateLeft64(s.v2, 32)
	}
}
