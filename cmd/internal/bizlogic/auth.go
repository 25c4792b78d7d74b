package bizlogic

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"net/netip"
	"slices"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
)

// Who may call what:
//
//	in the clear (loopback, unix sockets, in memory)    everything, unless a token is sent: then as it says
//	client certificate, organisation "node"             sync.v1
//	client certificate, organisation one of the roles   admin.v1 as for a token of that role
//	bearer token of role admin                          admin.v1
//	                     operator                       admin.v1 without TokenService and Backup
//	                     reader                         what only shows
//
// The certificate's common name is the node, its organisational unit the region.
const (
	roleAdmin    = "admin"
	roleOperator = "operator"
	roleReader   = "reader"
	roleNode     = "node"
)

// ServerOptions are the options that a gRPC server for this service needs: they check who calls, and that
// they are still there.
func (s *Service) ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			if err := s.allow(ctx, info.FullMethod); err != nil {
				return nil, err
			}
			return handle(ctx, req)
		}),
		grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
			if err := s.allow(stream.Context(), info.FullMethod); err != nil {
				return err
			}
			return handle(srv, stream)
		}),
		// A peer that vanished must not hold a watch for ever.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		// A batch of 1,000 lines of an import may be longer than gRPC's default of 4 MiB.
		grpc.MaxRecvMsgSize(32 << 20),
	}
}

// allow decides whether a caller may use a method.
func (s *Service) allow(ctx context.Context, method string) error {
	service, name, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	if strings.HasPrefix(service, "grpc.health.") {
		return nil
	}
	roles, clear := rolesOf(ctx)
	if token := bearer(ctx); token != "" {
		role, err := s.tokenRole(token)
		if err != nil {
			return err
		}
		roles, clear = []string{role}, false
	}
	if clear {
		return nil
	}
	for _, role := range roles {
		if may(role, service, name) {
			return nil
		}
	}
	if len(roles) == 0 {
		return status.Error(codes.Unauthenticated, "a client certificate or a token is needed")
	}
	return status.Errorf(codes.PermissionDenied, "role %s may not call %s", strings.Join(roles, ", "), name)
}

func may(role, service, name string) bool {
	isAdmin := strings.HasPrefix(service, "sluice.admin.")
	switch role {
	case roleNode:
		return strings.HasPrefix(service, "sluice.sync.")
	case roleAdmin:
		return isAdmin
	case roleOperator:
		return isAdmin && !strings.HasSuffix(service, ".TokenService") && name != "Backup"
	case roleReader:
		shows := strings.HasPrefix(name, "Get") || strings.HasPrefix(name, "List") || name == "ServiceStatus" || name == "Export"
		return isAdmin && shows && !strings.HasSuffix(service, ".TokenService")
	}
	return false
}

// rolesOf is what a caller's certificate says, or that it came in the clear from where that is allowed.
func rolesOf(ctx context.Context) (roles []string, clear bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, false
	}
	if t, ok := p.AuthInfo.(credentials.TLSInfo); ok {
		if len(t.State.VerifiedChains) == 0 {
			return nil, false
		}
		for _, o := range t.State.VerifiedChains[0][0].Subject.Organization {
			if slices.Contains([]string{roleAdmin, roleOperator, roleReader, roleNode}, o) {
				roles = append(roles, o)
			}
		}
		return roles, false
	}
	if ap, err := netip.ParseAddrPort(p.Addr.String()); err == nil {
		return nil, ap.Addr().Unmap().IsLoopback()
	}
	return nil, true // unix socket or in memory
}

func bearer(ctx context.Context) string {
	md, _ := metadata.FromIncomingContext(ctx)
	for _, v := range md.Get("authorization") {
		if scheme, token, ok := strings.Cut(v, " "); ok && strings.EqualFold(scheme, "bearer") {
			return token
		}
	}
	return ""
}

// tokenRole is the role of a valid token.
func (s *Service) tokenRole(token string) (string, error) {
	id, _, _ := strings.Cut(token, ".")
	t := new(storev1.Token)
	err := s.db.View(func(tx *bolt.Tx) error {
		return proto.Unmarshal(tx.Bucket(bucketService).Bucket(bucketTokens).Get([]byte(id)), t)
	})
	if err != nil {
		return "", reading(err)
	}
	sum := sha256.Sum256([]byte(token))
	if subtle.ConstantTimeCompare(sum[:], t.Sha256) != 1 {
		return "", status.Error(codes.Unauthenticated, "this token is not valid")
	}
	if t.Expires != 0 && clock.Wall().Unix() >= t.Expires {
		return "", status.Error(codes.Unauthenticated, "this token has expired")
	}
	return t.Role, nil
}
