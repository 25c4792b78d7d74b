package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

// maxReply is the longest message that is taken from a server: all lists or policies come as one.
const maxReply = 64 << 20

// dial connects to a server. Nothing is sent before the first call.
func (a *app) dial(addr string) (*grpc.ClientConn, error) {
	target, local, err := parseAddress(addr)
	if err != nil {
		return nil, err
	}
	opts := []grpc.DialOption{grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReply))}
	if local && a.ca == "" {
		if a.cert != "" {
			return nil, usagef("cert", "--cert is for TLS, and %s is reached without; give --ca to use TLS", addr)
		}
		opts = append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))
	} else {
		cfg, err := a.tlsConfig()
		if err != nil {
			return nil, err
		}
		opts = append(opts, grpc.WithTransportCredentials(credentials.NewTLS(cfg)))
	}
	if a.tokenFile != "" {
		token, err := readSecret(a.tokenFile)
		if err != nil {
			return nil, err
		}
		opts = append(opts, grpc.WithPerRPCCredentials(bearer{token, !local}))
	}
	conn, err := grpc.NewClient(target, opts...)
	if err != nil {
		return nil, usagef("", "address %q: %v", addr, err)
	}
	a.conns = append(a.conns, conn)
	return conn, nil
}

// parseAddress turns HOST:PORT or unix:PATH into a gRPC target, and says whether what is sent there stays on
// this machine.
func parseAddress(addr string) (target string, local bool, err error) {
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		if path == "" {
			return "", false, usagef("", "address %q has no path", addr)
		}
		return addr, true, nil
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil || port == "" {
		return "", false, usagef("", "address %q is neither HOST:PORT nor unix:PATH", addr)
	}
	ip, err := netip.ParseAddr(host)
	local = host == "localhost" || err == nil && ip.Unmap().IsLoopback()
	return "passthrough:///" + addr, local, nil
}

func (a *app) tlsConfig() (*tls.Config, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS13}
	if a.ca != "" {
		pem, err := os.ReadFile(a.ca)
		if err != nil {
			return nil, failedf("--ca: %w", err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, failedf("--ca: %s holds no certificate in PEM", a.ca)
		}
	}
	if (a.cert == "") != (a.key == "") {
		return nil, usagef("cert", "--cert and --key go together")
	}
	if a.cert != "" {
		pair, err := tls.LoadX509KeyPair(a.cert, a.key)
		if err != nil {
			return nil, failedf("--cert, --key: %w", err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return cfg, nil
}

// readSecret reads a token or password from a file, without the line end.
func readSecret(file string) (string, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return "", failedf("%w", err)
	}
	s := strings.TrimRight(string(b), "\r\n")
	if s == "" || strings.ContainsAny(s, "\r\n\x00") || len(s) > 4096 {
		return "", failedf("%s holds no single line of text", file)
	}
	return s, nil
}

// bearer sends a token with each call.
type bearer struct {
	token  string
	secure bool
}

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + b.token}, nil
}

func (b bearer) RequireTransportSecurity() bool { return b.secure }

// atService calls f with the service's connection, and its error as a failure.
func (a *app) atService(f func(conn *grpc.ClientConn) error) error {
	conn, err := a.dial(a.service)
	if err != nil {
		return err
	}
	return refused(a.service, f(conn))
}

// atResolvers calls f for each resolver, going on after failures.
func (a *app) atResolvers(f func(addr string, c adminv1.ResolverServiceClient) error) error {
	var all error
	for _, addr := range a.resolvers {
		conn, err := a.dial(addr)
		if err == nil {
			err = refused(addr, f(addr, adminv1.NewResolverServiceClient(conn)))
			if f, ok := errors.AsType[*failure](err); ok && len(a.resolvers) > 1 && f.Message != "" && !strings.HasPrefix(f.Message, addr) {
				f.Message = addr + ": " + f.Message // which of them says so
			}
		}
		all = both(all, err)
	}
	return all
}

// atOneResolver is atResolvers for what makes no sense at several.
func (a *app) atOneResolver(f func(addr string, c adminv1.ResolverServiceClient) error) error {
	if len(a.resolvers) > 1 {
		return usagef("resolver", "this works with one --resolver, and %d are given", len(a.resolvers))
	}
	return a.atResolvers(f)
}

// call bounds one call.
func (a *app) call(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, a.timeout)
}
