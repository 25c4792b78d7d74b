package dot

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/listen/listentest"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

func start(t *testing.T, o Options) (s *Server, client *tls.Config, stop func() error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o.Listener = l
	if o.Handler == nil {
		o.Handler = new(listentest.Handler)
	}
	o.GetCertificate, client = listentest.Certificate()
	s = New(o)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx) }()
	stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	return s, client, stop
}

func dial(t *testing.T, s *Server) net.Conn {
	t.Helper()
	c, err := tryDial(t, s)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// tryDial may fail if the server resets the connection before connecting has returned.
func tryDial(t *testing.T, s *Server) (net.Conn, error) {
	c, err := net.Dial("tcp", s.Addr().String())
	if err == nil {
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(20 * time.Second))
	}
	return c, err
}

func frame(b []byte) []byte { return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...) }

func readFrame(t *testing.T, c net.Conn) []byte {
	t.Helper()
	var n [2]byte
	if _, err := io.ReadFull(c, n[:]); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, binary.BigEndian.Uint16(n[:]))
	if _, err := io.ReadFull(c, b); err != nil {
		t.Fatal(err)
	}
	return b
}

func TestQueries(t *testing.T) {
	h := new(listentest.Handler)
	o := Options{}
	o.Handler = h
	s, config, _ := start(t, o)
	for _, v := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		config := config.Clone()
		config.MaxVersion, config.ServerName, config.NextProtos = v, "Kid-1.dns.Example", []string{"dot"}
		c := tls.Client(dial(t, s), config)
		var b []byte
		for i := range uint16(50) {
			name := "hit.example."
			if i%5 == 0 {
				name = "miss.example."
			}
			b = append(b, frame(listentest.Query(i, name))...)
		}
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		seen := map[uint16]bool{}
		for range 50 {
			seen[dnswire.Uint16(readFrame(t, c))] = true
		}
		if len(seen) != 50 {
			t.Errorf("%d answers, want 50", len(seen))
		}
		if q := h.Last(); q.Transport != query.DoT || q.ServerName != "kid-1.dns.example" {
			t.Errorf("transport %v, server name %q", q.Transport, q.ServerName)
		}
		if p := c.ConnectionState().NegotiatedProtocol; p != "dot" {
			t.Errorf("protocol %q", p)
		}
		c.Close()
	}
}

func TestBadHandshakes(t *testing.T) {
	s, config, stop := start(t, Options{})
	old := config.Clone()
	old.MaxVersion = tls.VersionTLS11
	other := config.Clone()
	other.NextProtos = []string{"h2"}
	for name, config := range map[string]*tls.Config{"TLS 1.1": old, "another protocol": other} {
		c := tls.Client(dial(t, s), config)
		if c.Handshake() == nil {
			t.Errorf("%s was accepted", name)
		}
	}
	c := dial(t, s)
	c.Write(frame(listentest.Query(1, "hit.example."))) // not TLS at all
	if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Error(err)
	}
	stop()
	if n := s.Counters().HandshakesFailed.Load(); n != 3 {
		t.Errorf("%d handshakes failed, want 3", n)
	}
	if n := s.Counters().Active.Load(); n != 0 {
		t.Errorf("%d connections active", n)
	}
}

func TestHandshakesAreCapped(t *testing.T) {
	limit := new(atomic.Int64)
	limit.Store(2)
	s, config, stop := start(t, Options{Handshakes: limit})
	slow := []net.Conn{dial(t, s), dial(t, s)} // say nothing
	for s.Counters().Handshaking.Load() != 2 {
		runtime.Gosched() // connected is not yet accepted
	}
	before := s.Counters().HandshakesFull.Load()
	if c, err := tryDial(t, s); err == nil {
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Errorf("a third handshake: %d bytes, %v", n, err)
		}
	}
	if s.Counters().HandshakesFull.Load() != before+1 {
		t.Error("not counted")
	}
	limit.Store(3) // while it runs
	c := tls.Client(dial(t, s), config)
	if err := c.Handshake(); err != nil {
		t.Error(err)
	}
	if err := stop(); err != nil { // does not wait for the silent ones
		t.Error(err)
	}
	for _, c := range slow {
		if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, syscall.ECONNRESET) {
			t.Error(err)
		}
	}
}

func TestSessionsResumeWithSharedKeys(t *testing.T) {
	a, config, _ := start(t, Options{})
	b, _, _ := start(t, Options{})
	b.config.GetCertificate = a.config.GetCertificate
	key := [][32]byte{{1, 2, 3}}
	a.SetTicketKeys(key)
	b.SetTicketKeys(key)
	config.ClientSessionCache = tls.NewLRUClientSessionCache(4)
	for i, s := range []*Server{a, b} {
		c := tls.Client(dial(t, s), config)
		c.Write(frame(listentest.Query(1, "hit.example.")))
		readFrame(t, c) // by now the ticket has come as well
		if got := c.ConnectionState().DidResume; got != (i == 1) {
			t.Errorf("server %d: resumed %v", i, got)
		}
		c.Close()
	}
}

// A byte at a time, each in a record of its own, and half-closing.
func TestPieces(t *testing.T) {
	s, config, _ := start(t, Options{})
	c := tls.Client(dial(t, s), config)
	for _, b := range frame(listentest.Query(1, "miss.example.")) {
		if _, err := c.Write([]byte{b}); err != nil {
			t.Fatal(err)
		}
	}
	c.CloseWrite()
	if id := dnswire.Uint16(readFrame(t, c)); id != 1 {
		t.Errorf("got %d", id)
	}
	if n, err := c.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("%d bytes, %v; want the server to say goodbye", n, err)
	}
}
