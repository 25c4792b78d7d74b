package demo

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/sluice-dns/sluice/cmd/internal/bizlogic"
	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

// A service is the business-logic service. It has one address for resolvers and one for operators, so that it
// can be changed while resolvers do not reach it.
type service struct {
	dir     string
	version string
	log     *slog.Logger

	resolvers string // where resolvers find it: the same in each life
	operators string

	store   *bizlogic.Service // nil while stopped
	server  *grpc.Server
	serving errgroup.Group
	conn    *grpc.ClientConn // the operator's
}

// start opens the store and serves operators. Resolvers do not reach it until open.
func (s *service) start() (err error) {
	s.store, err = bizlogic.Open(bizlogic.Options{Dir: s.dir, Compile: bizlogic.Engine, Version: s.version, Log: s.log})
	if err != nil {
		return err
	}
	s.server = grpc.NewServer(s.store.ServerOptions()...)
	s.store.Register(s.server)
	if s.operators, err = s.listen("127.0.0.1:0"); err != nil {
		return err
	}
	s.conn, err = grpc.NewClient("passthrough:///"+s.operators, grpc.WithTransportCredentials(insecure.NewCredentials()))
	return err
}

// open lets resolvers in, at the same address in each life. Its port is none of those that systems give out, or
// somebody else could have it when the service comes back.
func (s *service) open() (err error) {
	if s.resolvers != "" {
		_, err = s.listen(s.resolvers)
		return err
	}
	for range 100 {
		if s.resolvers, err = s.listen(fmt.Sprintf("127.0.0.1:%d", 22000+rand.IntN(10000))); err == nil {
			return nil
		}
	}
	s.resolvers = ""
	return err
}

func (s *service) listen(at string) (string, error) {
	l, err := net.Listen("tcp", at)
	if err != nil {
		return at, fmt.Errorf("business-logic service: %w", err)
	}
	server := s.server
	s.serving.Go(func() error { return server.Serve(l) })
	return l.Addr().String(), nil
}

// stop ends the service as its process would end: connections are cut, nothing listens, the store is closed.
// It may be called in any state.
func (s *service) stop() error {
	if s.store == nil {
		return nil
	}
	if s.conn != nil {
		s.conn.Close()
	}
	s.server.Stop()
	_ = s.serving.Wait() // whatever Serve says, it has ended
	err := s.store.Close()
	s.store, s.conn, s.serving = nil, nil, errgroup.Group{}
	return err
}

// head is the newest revision of the users.
func (s *service) head() uint64 { return s.store.Head(bizlogic.Users) }

func (s *service) users() adminv1.UserServiceClient { return adminv1.NewUserServiceClient(s.conn) }
func (s *service) policies() adminv1.PolicyServiceClient {
	return adminv1.NewPolicyServiceClient(s.conn)
}

// addList gives the catalogue a list from a file.
func (s *service) addList(ctx context.Context, id, name, file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	up, err := adminv1.NewListServiceClient(s.conn).AddList(ctx)
	if err != nil {
		return err
	}
	// A stream that the service has ended says why in CloseAndRecv; Send would only say EOF.
	send := func(r *adminv1.AddListRequest) error {
		if err := up.Send(r); err != nil && err != io.EOF {
			return err
		}
		return nil
	}
	if err := send(&adminv1.AddListRequest{Part: &adminv1.AddListRequest_Header_{Header: &adminv1.AddListRequest_Header{Id: id, Name: name}}}); err != nil {
		return err
	}
	if err := send(&adminv1.AddListRequest{Part: &adminv1.AddListRequest_Data{Data: text}}); err != nil {
		return err
	}
	got, err := up.CloseAndRecv()
	if err != nil {
		return fmt.Errorf("adding list %s: %w", id, err)
	}
	if len(got.Complaints) > 0 {
		c := got.Complaints[0]
		return fmt.Errorf("adding list %s: line %d, %q: %s", id, c.Line, c.Text, c.What)
	}
	return nil
}

// set changes settings of a target: KEY, VALUE, KEY, VALUE …, each added to the set that KEY is.
func (s *service) set(ctx context.Context, target string, pairs ...string) error {
	var as []*adminv1.Assignment
	for i := 0; i+1 < len(pairs); i += 2 {
		as = append(as, &adminv1.Assignment{Key: pairs[i], Operation: adminv1.Operation_OPERATION_ADD, Value: pairs[i+1]})
	}
	if _, err := s.policies().SetSettings(ctx, &adminv1.SetSettingsRequest{Target: target, Assignments: as}); err != nil {
		return fmt.Errorf("settings of %s: %w", target, err)
	}
	return nil
}

// setRules replaces a target's own rules and returns the revision.
func (s *service) setRules(ctx context.Context, target, rules string) (uint64, error) {
	r, err := s.policies().SetRules(ctx, &adminv1.SetRulesRequest{Target: target, Text: []byte(rules)})
	if err != nil {
		return 0, fmt.Errorf("rules of %s: %w", target, err)
	}
	if len(r.Complaints) > 0 {
		return 0, fmt.Errorf("rules of %s: %q: %s", target, r.Complaints[0].Text, r.Complaints[0].What)
	}
	return r.Revision, nil
}
