package admin

import (
	"context"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

// Who may call what:
//
//	in the clear (loopback, unix sockets, in memory)   everything, unless a token is sent: then as it says
//	role admin or operator                             everything
//	role reader                                        what only shows
//	everybody                                          health
//
// A role is the organisation of a verified client certificate, or what Options.TokenRole says of a bearer
// token.

// shows are the calls that change nothing. A dump is not among them: it holds everybody's queries.
var shows = []string{
	adminv1.ResolverService_Status_FullMethodName,
	adminv1.ResolverService_SyncStatus_FullMethodName,
	adminv1.ResolverService_Explain_FullMethodName,
	adminv1.ResolverService_GetLimits_FullMethodName,
	adminv1.ResolverService_CacheLook_FullMethodName,
	adminv1.ResolverService_ListNegativeTrustAnchors_FullMethodName,
}

func (s *Server) allow(ctx context.Context, method string) error {
	if strings.HasPrefix(method, "/grpc.health.") {
		return nil
	}
	roles, clear := rolesOf(ctx)
	if token := bearer(ctx); token != "" {
		if s.o.TokenRole == nil {
			return status.Error(codes.Unauthenticated, "this resolver knows no tokens")
		}
		role, err := s.o.TokenRole(token)
		if err != nil {
			return status.Errorf(codes.Unauthenticated, "token: %v", err)
		}
		roles, clear = []string{role}, false
	}
	if clear {
		return nil
	}
	for _, role := range roles {
		if role == "admin" || role == "operator" || role == "reader" && slices.Contains(shows, method) {
			return nil
		}
	}
	if len(roles) == 0 {
		return status.Error(codes.Unauthenticated, "beyond loopback TLS and a client certificate or a token are needed")
	}
	return status.Errorf(codes.PermissionDenied, "role %s may not call %s", strings.Join(roles, ", "), method)
}

// rolesOf is what a caller's certificate says, or that it came in the clear from where that is allowed.
func rolesOf(ctx context.Context) (roles []string, clear bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, false
	}
	if t, ok := p.AuthInfo.(credentials.TLSInfo); ok {
		if len(t.State.VerifiedChains) > 0 {
			roles = t.State.VerifiedChains[0][0].Subject.Organization
		}
		return roles, false
	}
	if a, err := netip.ParseAddrPort(p.Addr.String()); err == nil {
		return nil, a.Addr().Unmap().IsLoopback()
	}
	return nil, true // a unix socket or in memory
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

// callerOf names a caller for the log.
func callerOf(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return "unknown"
	}
	if t, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(t.State.VerifiedChains) > 0 {
		return t.State.VerifiedChains[0][0].Subject.CommonName
	}
	return p.Addr.String()
}
