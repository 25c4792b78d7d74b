package resolver

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-dns/sluice/resolver/internal/admin"
	"github.com/sluice-dns/sluice/resolver/internal/limits"
)

// Readiness says whether the node should get queries, and why not; see package admin.
type Readiness = admin.Readiness

// HTTPServer returns the server of /livez, /readyz, /metrics and /debug/pprof. The caller serves and closes it.
func (r *Resolver) HTTPServer(ready func() Readiness, metrics prometheus.Gatherer) *http.Server {
	return admin.NewHTTPServer(admin.HTTPOptions{Readiness: ready, Metrics: metrics, Logger: r.o.Logger})
}

// Limits that a process applies to itself.
const (
	LimitWorkers    = limits.Workers
	LimitGoMaxProcs = limits.GoMaxProcs
	LimitGoMemLimit = limits.GoMemLimit
)
