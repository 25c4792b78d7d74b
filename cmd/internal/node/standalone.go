package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"

	"github.com/sluice-dns/sluice/cmd/internal/bizlogic"
	"github.com/sluice-dns/sluice/cmd/internal/config"
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
}

func openStandalone(c *config.Sluice, o Options, log *slog.Logger) (*standalone, error) {
	dir := filepath.Join(c.DataDir, "service")
	svc, err := bizlogic.Open(bizlogic.Options{Dir: dir, Compile: bizlogic.Engine, Version: o.Version, Log: log})
	if err != nil {
		return nil, fmt.Errorf("standalone service: %w", err)
	}
	s := &standalone{service: svc, pipe: bufconn.Listen(1 << 20)}
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
