// Package dot serves DNS over TLS (RFC 7858): package tcp's server behind TLS 1.2 or later, application
// protocol "dot" if the client names any. The TLS server name goes into each query in lower case; who that
// identifies is decided elsewhere.
//
// A handshake costs as much as a hundred answers, so at most Handshakes are in progress at a time and further
// connections are closed before they cost one.
package dot

import (
	"crypto/tls"
	"sync/atomic"

	"github.com/sluice-dns/sluice/resolver/internal/listen"
	"github.com/sluice-dns/sluice/resolver/internal/listen/tcp"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// DefaultHandshakes is how many TLS handshakes are in progress at a time.
const DefaultHandshakes = 64

// Options say how to serve. Transport and Accept of the embedded options are set by New.
type Options struct {
	tcp.Options

	// GetCertificate chooses the certificate for a client, as in tls.Config. Required.
	GetCertificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	// Handshakes bounds the TLS handshakes in progress; it may be changed at any time. Default 64.
	Handshakes *atomic.Int64
}

// A Server serves one listener.
type Server struct {
	*tcp.Server
	config *tls.Config
}

// New returns a server; Serve runs it.
func New(o Options) *Server {
	if o.Handshakes == nil {
		o.Handshakes = new(atomic.Int64)
		o.Handshakes.Store(DefaultHandshakes)
	}
	config := listen.TLSConfig(o.GetCertificate, "dot")
	o.Transport = query.DoT
	o.Accept = func(a *listen.Acceptor) { a.TLS, a.Handshakes = config, o.Handshakes }
	return &Server{tcp.New(o.Options), config}
}

// SetTicketKeys replaces the keys of session tickets: the first makes new ones, all are accepted. Nodes that
// share them resume each other's sessions. Until it is called keys are this process's own.
func (s *Server) SetTicketKeys(keys [][32]byte) { s.config.SetSessionTicketKeys(keys) }
