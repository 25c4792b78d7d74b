package bizlogic

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
)

// tokenServer keeps the tokens of people and programs. A token is ID.SECRET; what is stored is its hash.
type tokenServer struct {
	adminv1.UnimplementedTokenServiceServer
	s *Service
}

func (a tokenServer) CreateToken(ctx context.Context, req *adminv1.CreateTokenRequest) (*adminv1.CreateTokenResponse, error) {
	switch req.GetRole() {
	case roleAdmin, roleOperator, roleReader:
	case "tenant":
		return nil, status.Error(codes.Unimplemented, "role: tokens bound to a tenant are not possible yet")
	default:
		return nil, invalid("role", "%q is none of admin, operator, reader", req.GetRole())
	}
	if req.GetTenant() != "" {
		return nil, invalid("tenant", "belongs to role tenant")
	}
	if err := checkText("note", req.GetNote(), maxName); err != nil {
		return nil, err
	}
	if req.GetLifetime() > 1<<31 {
		return nil, invalid("lifetime", "%d s is more than 68 years", req.GetLifetime())
	}
	id := "t" + rand.Text()[:12]
	token := id + "." + rand.Text()
	sum := sha256.Sum256([]byte(token))
	now := clock.Wall()
	t := &storev1.Token{Role: req.GetRole(), Sha256: sum[:], Created: now.Unix(), Note: req.GetNote()}
	if req.GetLifetime() > 0 {
		t.Expires = now.Add(time.Duration(req.GetLifetime()) * time.Second).Unix()
	}
	_, err := a.s.change(ctx, func(v *view) error { return v.auxPut(bucketTokens, id, t) })
	if err != nil {
		return nil, err
	}
	return &adminv1.CreateTokenResponse{Id: id, Token: token}, nil
}

func (a tokenServer) ListTokens(context.Context, *adminv1.ListTokensRequest) (*adminv1.ListTokensResponse, error) {
	resp := new(adminv1.ListTokensResponse)
	err := a.s.db.View(func(tx *bolt.Tx) error {
		return tx.Bucket(bucketService).Bucket(bucketTokens).ForEach(func(k, b []byte) error {
			t := new(storev1.Token)
			err := proto.Unmarshal(b, t)
			resp.Tokens = append(resp.Tokens, &adminv1.TokenInfo{Id: string(k), Role: t.Role, Tenant: t.Tenant,
				Created: t.Created, Expires: t.Expires, Note: t.Note})
			return err
		})
	})
	if err != nil {
		return nil, reading(err)
	}
	return resp, nil
}

func (a tokenServer) RevokeToken(ctx context.Context, req *adminv1.RevokeTokenRequest) (*adminv1.RevokeTokenResponse, error) {
	_, err := a.s.change(ctx, func(v *view) error {
		if v.auxGet(bucketTokens, req.GetId()) == nil {
			return notFound("token", req.GetId())
		}
		v.auxDelete(bucketTokens, req.GetId())
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &adminv1.RevokeTokenResponse{}, nil
}
