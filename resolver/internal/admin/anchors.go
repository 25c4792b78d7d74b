package admin

import (
	"context"
	"fmt"
	"time"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// How long a negative trust anchor that was added lives. It is for a fault that somebody is mending; one that is
// forgotten leaves a hole (RFC 7646 section 2).
const (
	anchorTime    = 24 * time.Hour
	maxAnchorTime = 7 * 24 * time.Hour
)

// A NegativeAnchor is a name at and below which nothing is validated.
type NegativeAnchor struct {
	Name dnsname.Name
	// Until is when it ends; the zero time is that of a configured one.
	Until time.Time
	Why   string
}

func (a NegativeAnchor) message() *adminv1.NegativeTrustAnchor {
	m := &adminv1.NegativeTrustAnchor{Name: a.Name.String(), Why: a.Why, Configured: a.Until.IsZero()}
	if !m.Configured {
		m.Until = a.Until.Unix()
	}
	return m
}

// ListNegativeTrustAnchors shows where validation ends.
func (s *Server) ListNegativeTrustAnchors(context.Context, *adminv1.ListNegativeTrustAnchorsRequest) (*adminv1.ListNegativeTrustAnchorsResponse, error) {
	if s.o.Anchors == nil {
		return nil, missing("negative trust anchors, as it does not validate (dnssec.validate),")
	}
	resp := &adminv1.ListNegativeTrustAnchorsResponse{}
	for _, a := range s.o.Anchors.List() {
		resp.Anchors = append(resp.Anchors, a.message())
	}
	return resp, nil
}

// AddNegativeTrustAnchor ends validation at a name.
func (s *Server) AddNegativeTrustAnchor(ctx context.Context, req *adminv1.AddNegativeTrustAnchorRequest) (*adminv1.AddNegativeTrustAnchorResponse, error) {
	if s.o.Anchors == nil {
		return nil, missing("negative trust anchors, as it does not validate (dnssec.validate),")
	}
	name, err := parseName(req.Name)
	if err != nil {
		return nil, err
	}
	if name == dnsname.Root {
		return nil, &FieldError{"name", "is the root: everything would be insecure; name the zone that is broken, or set dnssec.validate to false"}
	}
	d, err := duration(req.Seconds)
	switch {
	case err != nil:
		return nil, err
	case d == 0:
		d = anchorTime
	case d > maxAnchorTime:
		return nil, &FieldError{"seconds", fmt.Sprintf("%v is longer than a week; for one that stays use dnssec.insecure", d)}
	}
	if len(req.Why) > 1024 {
		return nil, &FieldError{"why", fmt.Sprintf("has %d bytes; at most 1024", len(req.Why))}
	}
	a, err := s.o.Anchors.Add(name, d, req.Why)
	if err != nil {
		return nil, err
	}
	s.o.Logger.Warn("an operator added a negative trust anchor", "name", name.String(), "for", d, "why", req.Why, "by", callerOf(ctx))
	return &adminv1.AddNegativeTrustAnchorResponse{Anchor: a.message()}, nil
}

// RemoveNegativeTrustAnchor makes what is below a name be validated again.
func (s *Server) RemoveNegativeTrustAnchor(ctx context.Context, req *adminv1.RemoveNegativeTrustAnchorRequest) (*adminv1.RemoveNegativeTrustAnchorResponse, error) {
	if s.o.Anchors == nil {
		return nil, missing("negative trust anchors, as it does not validate (dnssec.validate),")
	}
	name, err := parseName(req.Name)
	if err != nil {
		return nil, err
	}
	if err := s.o.Anchors.Remove(name); err != nil {
		return nil, err
	}
	s.o.Logger.Warn("an operator removed a negative trust anchor", "name", name.String(), "by", callerOf(ctx))
	return &adminv1.RemoveNegativeTrustAnchorResponse{}, nil
}
