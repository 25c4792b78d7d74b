package exchange

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"

	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Sizes of the parts of a cookie (RFC 7873 section 4).
const (
	clientCookieLen    = 8
	minServerCookieLen = 8
	maxServerCookieLen = 32
)

// clientCookie is our cookie for a server: its address encrypted with a key that lives as long as the process,
// so that nothing has to be remembered of servers without cookies, and no server can tell what others get. The
// transport talks to one server from one source address, so the cookie does not tie two of ours together.
func (x *Exchange) clientCookie(a *query.Ask) (c [clientCookieLen]byte) {
	block := a.Server.Addr().As16()
	x.cookies.Encrypt(block[:], block[:])
	copy(c[:], block[:])
	return c
}

func newCookieKey() cipher.Block {
	var key [16]byte
	rand.Read(key[:])
	b, err := aes.NewCipher(key[:])
	if err != nil {
		panic(err) // of a key of 16 bytes it makes none
	}
	return b
}

func (x *Exchange) appendCookie(options []byte, a *query.Ask, s *server) []byte {
	var v [clientCookieLen + maxServerCookieLen]byte
	c := x.clientCookie(a)
	n := copy(v[:], c[:])
	x.mu.Lock()
	n += copy(v[n:], s.cookie)
	x.mu.Unlock()
	return dnswire.AppendOption(options, dnswire.OptionCookie, v[:n])
}

// judgeCookie checks the cookie of a response over UDP that matches otherwise, and remembers the server's.
func (x *Exchange) judgeCookie(m *query.Message, a *query.Ask, s *server) verdict {
	if a.NoEDNS || a.NoOptions {
		return matched
	}
	if m.Cookie == nil {
		x.mu.Lock()
		known := s.cookie != nil
		x.mu.Unlock()
		if known {
			return noCookie
		}
		return matched
	}
	if !x.learn(m, a, s) {
		return noCookie
	}
	if m.RCode == dnswire.RCodeBadCook {
		return badCookie
	}
	return matched
}

// learn remembers the server cookie of m, and returns false if the cookie is not a response to ours.
func (x *Exchange) learn(m *query.Message, a *query.Ask, s *server) bool {
	c := x.clientCookie(a)
	n := len(m.Cookie) - clientCookieLen
	if n < minServerCookieLen || n > maxServerCookieLen || string(m.Cookie[:clientCookieLen]) != string(c[:]) {
		return false
	}
	x.mu.Lock()
	s.cookie = append([]byte(nil), m.Cookie[clientCookieLen:]...)
	x.mu.Unlock()
	return true
}

// learnOverTCP believes what a response over TCP says of cookies: a server that does not send one there has
// stopped, and its responses over UDP are taken without again.
func (x *Exchange) learnOverTCP(m *query.Message, a *query.Ask, s *server) {
	if a.NoEDNS || a.NoOptions || x.learn(m, a, s) {
		return
	}
	x.mu.Lock()
	s.cookie = nil
	x.mu.Unlock()
}
