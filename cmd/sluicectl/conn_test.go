package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

// newCertificate makes a certificate that signs itself, for 127.0.0.1, and files of it and its key.
func newCertificate(t *testing.T) (cert tls.Certificate, certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test", Organization: []string{"operator"}},
		NotBefore: time.Unix(0, 0), NotAfter: time.Unix(1<<33, 0), IsCA: true, BasicConstraintsValid: true,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certFile = write(t, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
	keyFile = write(t, string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret})))
	cert, err = tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	return cert, certFile, keyFile
}

func TestTLS(t *testing.T) {
	cert, ca, key := newCertificate(t)
	pool := x509.NewCertPool()
	pem, err := os.ReadFile(ca)
	if err != nil || !pool.AppendCertsFromPEM(pem) {
		t.Fatal(err)
	}
	f := &fakeResolver{}
	addr := serve(t, func(g *grpc.Server) { adminv1.RegisterResolverServiceServer(g, f) },
		grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS13, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool})))
	sh := &shell{t: t, env: map[string]string{"SLUICE_RESOLVER": addr}}
	sh.ok("status", "--ca", ca, "--cert", ca, "--key", key)
	sh.fails(exitFailed, "cannot be reached", "status", "--ca", ca)         // no client certificate
	sh.fails(exitFailed, "cannot be reached", "status", "--timeout", "50s") // in the clear
	sh.fails(exitUsage, "go together", "status", "--ca", ca, "--cert", ca)  //
	sh.fails(exitFailed, "--cert, --key", "status", "--ca", ca, "--cert", ca, "--key", ca)
	_, other, _ := newCertificate(t)
	sh.fails(exitFailed, "certificate", "status", "--ca", other, "--cert", ca, "--key", key)
}

// What listens at a mistaken port may speak anything, here HTTP as at http.listen.
func TestNotGRPC(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	var conns []net.Conn
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns = append(conns, c)
			_, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
		for _, c := range conns {
			c.Close()
		}
	})
	sh := &shell{t: t}
	sh.fails(exitFailed, "admin.listen", "status", "--resolver", l.Addr().String())
	sh.fails(exitFailed, "admin.listen", "user", "list", "--service", l.Addr().String())
}

func TestUnixSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer()
	f := &fakeResolver{}
	adminv1.RegisterResolverServiceServer(g, f)
	done := make(chan struct{})
	go func() { defer close(done); _ = g.Serve(l) }()
	defer func() { g.Stop(); <-done }()
	sh := &shell{t: t, env: map[string]string{}}
	if out := sh.ok("status", "--resolver", "unix:"+path); !strings.Contains(out, "fresh") {
		t.Errorf("status = %s", out)
	}
}

// What leaves this machine is encrypted: a token never goes in the clear.
func TestBeyondLoopbackIsTLS(t *testing.T) {
	for addr, local := range map[string]bool{
		"127.0.0.1:1": true, "[::1]:1": true, "localhost:1": true, "127.5.5.5:1": true, "unix:/run/s": true, "[::ffff:127.0.0.1]:1": true,
		"192.0.2.1:1": false, "example.net:1": false, "localhost.example.net:1": false, "[2001:db8::1]:1": false, "0.0.0.0:1": false,
	} {
		if _, got, err := parseAddress(addr); got != local || err != nil {
			t.Errorf("%s: %v, %v", addr, got, err)
		}
		if (bearer{secure: !local}).RequireTransportSecurity() == local {
			t.Error(addr)
		}
	}
	for _, addr := range []string{"", ":", "127.0.0.1", "unix:", "::1:53:"} {
		if _, _, err := parseAddress(addr); err == nil {
			t.Errorf("%q is an address", addr)
		}
	}
}
