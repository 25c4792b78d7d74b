package resolver

import (
	"context"
	"net/netip"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/resolver/internal/admin"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Explain is what operators are told of a query over UDP from an address.
func (r *Resolver) Explain(ctx context.Context, target string, name Name, typ uint16, from netip.Addr) ([]*adminv1.ExplainStep, error) {
	who, err := admin.ParseTarget(target)
	if err != nil {
		return nil, err
	}
	udp := query.UDP
	return r.explainer().Explain(ctx, admin.Asking{Who: who, Name: name, Type: typ, Address: from, Transport: &udp})
}

// Decided puts in words what decided a query that was logged, as explanations do: step, verdict, list, line.
func (r *Resolver) Decided(e *QueryEvent) (step, verdict, list string, line uint32) {
	if e.Verdict == query.Pass {
		return "", "none", "", 0
	}
	verdict = map[query.VerdictKind]string{query.Allowed: "allowed", query.Redirected: "rewritten", query.Flattened: "rewritten", query.Synthesised: "rewritten"}[e.Verdict]
	if verdict == "" {
		verdict = "blocked"
	}
	step, list = DecidedBy(e, r.o.Users.Catalogue())
	return step, verdict, list, e.Line
}
