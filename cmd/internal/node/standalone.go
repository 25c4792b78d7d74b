package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"

	"github.com/sluice-dns/sluice/cmd/internal/bizlogic"
	"github.com/sluice-dns/sluice/cmd/internal/config"
	"github.com/sluice-dns/sluice/resolver"
)

// inProcess is the address of the service inside this process.
const inProcess = "inprocess:standalone"

// A standalone is the business-logic service in the resolver's own process: its own sync client reaches it
// through memory, operators through users.service_listen.
type standalone struct {
	service *bizlogic.Service
	server  *grpc.Server
	pipe    *bufconn.Listener
	listen  net.Listener // nil when off
	addr    string

	resolver atomic.Pointer[resolver.Resolver] // nil until it is built
}

// resolve finds where lists are fetched by the resolver of this very process, which may be the only one there is.
func (s *standalone) resolve(ctx context.Context, host string) ([]netip.Addr, error) {
	r := s.resolver.Load()
	if r == nil {
		return nil, errors.New("the resolver has not started yet")
	}
	return r.LookupHost(ctx, host)
}

func openStandalone(c *config.Sluice, o Options, log *slog.Logger) (*standalone, error) {
	dir := filepath.Join(c.DataDir, "service")
	s := &standalone{pipe: bufconn.Listen(1 << 20)}
	svc, err := bizlogic.Open(bizlogic.Options{
		Dir: dir, Compile: bizlogic.Engine, Version: o.Version, Log: log,
		Guard: bizlogic.Guard{Share: c.Users.ShrinkGuard.Share, Min: c.Users.ShrinkGuard.Min, Window: c.Users.ShrinkGuard.Window},
		Download: bizlogic.Download{MaxSize: c.Fetch.MaxSize, Timeout: c.Fetch.Timeout, PrivateAddresses: c.Fetch.PrivateAddresses,
			Files: c.Fetch.Files, Resolve: s.resolve},
		Own: bizlogic.OwnLists{Number: c.OwnLists.Number, MaxSize: c.OwnLists.MaxSize, Rules: c.OwnLists.Rules},
	})
	if err != nil {
		return nil, fmt.Errorf("standalone service: %w", err)
	}
	s.service = svc
	if s.listen, s.addr, err = listenEndpoint(c.Users.ServiceListen); err != nil {
		svc.Close()
		return nil, fmt.Errorf("users.service_listen: %w", err)
	}
	s.server = grpc.NewServer(svc.ServerOptions()...)
	svc.Register(s.server)
	return s, nil
}

func (s *standalone) dial(ctx context.Context, _ string) (net.Conn, error) {
	return s.pipe.DialContext(ctx)
}

// run serves until ctx ends.
func (s *standalone) run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	listeners := []net.Listener{s.pipe}
	if s.listen != nil {
		listeners = append(listeners, s.listen)
	}
	for _, l := range listeners {
		g.Go(func() error {
			if err := s.server.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
				return fmt.Errorf("serving %v: %w", l.Addr(), err)
			}
			return nil
		})
	}
	g.Go(func() error {
		<-ctx.Done()
		s.server.Stop() // watches never end by themselves, so a graceful stop would wait for ever
		return nil
	})
	return g.Wait()
}

func (s *standalone) close() {
	s.server.Stop()
	if s.listen != nil {
		s.listen.Close()
	}
	s.service.Close()
}
