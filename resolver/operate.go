package resolver

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/admin"
	"github.com/sluice-dns/sluice/resolver/internal/limits"
	"github.com/sluice-dns/sluice/resolver/internal/metrics"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Words of the operator's side; see packages admin and metrics.
type (
	// Readiness says whether the node should get queries, and why not.
	Readiness = admin.Readiness
	// SyncControl is what operators see and do of the sync of user data.
	SyncControl = admin.Sync
	// DatasetMetrics is where a dataset stands, for metrics.
	DatasetMetrics = metrics.Dataset
	// SyncMetrics is told of sync as it happens.
	SyncMetrics = metrics.Sync
	// LimitEntry is a changed limit.
	LimitEntry = limits.Entry
)

// ShowDataset renders what is held of a dataset for SyncControl.
var ShowDataset = admin.ShowDataset

// NewMetrics returns a registry and what sync is to report to; Operate adds the resolver's own.
func NewMetrics() (*prometheus.Registry, *SyncMetrics, error) {
	reg := prometheus.NewRegistry()
	s, err := metrics.RegisterSync(reg)
	return reg, s, err
}

// OperateOptions are what the operator's side needs besides the resolver.
type OperateOptions struct {
	Node, Region, Version string
	Readiness             func() Readiness
	Draining              func(on bool)
	Sync                  SyncControl
	Datasets              func() []DatasetMetrics
	Level                 *slog.LevelVar // nil: the level cannot be changed
	// Applied is called after a limit has been changed.
	Applied  func(LimitEntry)
	Registry *prometheus.Registry
}

// A Control is the operator's side of a resolver.
type Control struct {
	admin *admin.Server
	http  *http.Server
}

// Operate returns the operator's side: metrics are registered, nothing is served yet.
func (r *Resolver) Operate(o OperateOptions) (*Control, error) {
	if err := metrics.Register(o.Registry, r.sources(&o)); err != nil {
		return nil, err
	}
	a := admin.Options{
		Node: o.Node, Region: o.Region, Version: o.Version, Readiness: o.Readiness, Logger: r.o.Logger,
		Serving: r.policy.Serving,
		Limits: admin.LiveLimits{Live: r.o.Limits, Apply: func(e limits.Entry) {
			r.applyLimits()
			if o.Applied != nil {
				o.Applied(e)
			}
		}},
		Cache:   admin.Caches{RRsets: r.engine.rrsets, Answers: r.engine.answers, Key: r.engine.key, Forget: r.engine.forget},
		Explain: r.explainer(), Sync: o.Sync, Lifecycle: lifecycle(o.Draining),
	}
	if r.engine.negative != nil {
		a.Anchors = r.engine.negative
	}
	if o.Level != nil {
		a.Log = admin.NewLogLevel(o.Level)
	}
	return &Control{
		admin: admin.New(a),
		http:  admin.NewHTTPServer(admin.HTTPOptions{Readiness: o.Readiness, Metrics: o.Registry, Logger: r.o.Logger}),
	}, nil
}

// explainer says how queries would be judged.
func (r *Resolver) explainer() admin.Policies {
	return admin.Policies{Users: r.o.Users, Policy: r.policy, Path: r.stages, Gate: r.gate, Zones: r.rules, Blob: r.o.Blob}
}

// ServeAdmin serves the admin gRPC service on a listener of loopback or a unix socket until ctx ends.
func (c *Control) ServeAdmin(ctx context.Context, l net.Listener) error { return c.admin.Serve(ctx, l) }

// HTTP returns the server of /livez, /readyz, /metrics and /debug/pprof; the caller serves and closes it.
func (c *Control) HTTP() *http.Server { return c.http }

type lifecycle func(on bool)

func (l lifecycle) SetDraining(on bool) { l(on) }

// applyLimits carries changed limits to where they are not read each time.
func (r *Resolver) applyLimits() {
	r.live.apply()
	bytes := r.o.Limits.Value(limits.Cache)
	r.engine.answers.Limit(bytes / answerShare)
	r.engine.rrsets.Limit(rrsetShare(bytes))
	if r.engine.denials != nil {
		r.engine.denials.Limit(bytes/denialShare, clock.Elapsed())
	}
}

// sources say how metrics read the resolver.
func (r *Resolver) sources(o *OperateOptions) metrics.Sources {
	return metrics.Sources{
		Version: o.Version,
		Workers: r.path.Workers,
		Resolving: func() metrics.Resolving {
			f, w := r.path.InFlight()
			return metrics.Resolving{Flights: f, Waiting: w}
		},
		Listeners: r.listenerMetrics,
		Upstream: func() metrics.Upstream {
			c := r.engine.exchange.Counters()
			return metrics.Upstream{
				UDP: c.UDP.Load(), TCP: c.TCP.Load(), Joined: c.Joined.Load(), Timeouts: c.Timeouts.Load(), Unreachable: c.Unreachable.Load(),
				Truncated: c.Truncated.Load(), Mismatched: c.Mismatched.Load(), CaseLost: c.CaseLost.Load(), BadCookies: c.Cookies.Load(), Busy: c.Busy.Load(),
				LocalRoot: r.engine.root.Answered(),
			}
		},
		Caches: func() []metrics.Cache {
			s, a := r.engine.rrsets.Stats(), r.engine.answers.Stats()
			caches := []metrics.Cache{
				{Name: "rrset", Entries: s.Entries, Bytes: s.Bytes, Budget: s.Budget, Evictions: s.Evictions},
				{Name: "answer", Entries: a.Entries, Bytes: a.Bytes, Budget: a.Budget, Evictions: a.Evictions},
			}
			if r.engine.denials != nil {
				d := r.engine.denials.Stats()
				caches = append(caches, metrics.Cache{Name: "denial", Entries: d.Records, Bytes: d.Bytes, Budget: d.Budget, Evictions: d.Evictions})
			}
			return caches
		},
		Validation: r.validationMetrics,
		Forwards:   r.forwardMetrics,
		Datasets:   o.Datasets,
		Lists: func() (all []metrics.List) {
			for _, l := range r.o.Users.Catalogue().Lists {
				all = append(all, metrics.List{ID: l.ID, Number: l.Number, Rules: l.Rules, Updated: l.Updated})
			}
			return all
		},
		Untried:  r.policy.Untried,
		Pressure: func() metrics.Pressure { return metrics.Pressure{} },
		Limits: func() map[string]int64 {
			t := r.o.Limits.Table()
			m := map[string]int64{}
			for _, row := range t.Rows() {
				m[row.Name] = row.Value
			}
			return m
		},
		Panics: func() uint64 { return uint64(r.path.Panics()) },
	}
}

// listenerMetrics reads the listeners' counters.
func (r *Resolver) listenerMetrics() (out []metrics.Listener) {
	for _, n := range r.named {
		if n.udp != nil {
			c := n.udp.Counters()
			out = append(out, metrics.Listener{Name: n.name, Dropped: map[string]uint64{
				"overflow": c.Overflow.Load(), "old": c.Old.Load(), "long": c.Long.Load(), "source": c.Source.Load(), "unsent": c.Unsent.Load(),
			}})
			continue
		}
		c := n.conns
		l := metrics.Listener{
			Name: n.name, Connections: c.Active.Load(), Accepted: c.Accepted.Load(), Handshakes: c.Handshaking.Load(),
			Dropped: map[string]uint64{
				"handshakes": c.HandshakesFull.Load(), "handshake_failed": c.HandshakesFailed.Load(),
				"timeout": c.TimedOut.Load(), "malformed": c.Malformed.Load(),
			},
		}
		for i := range l.Refused {
			l.Refused[i] = c.Refused[i].Load()
		}
		out = append(out, l)
	}
	return out
}

// listenerName is the transport, with a number behind it from the second listener on.
func listenerName(t query.Transport, i int) string {
	if i == 0 {
		return t.String()
	}
	return t.String() + "-" + strconv.Itoa(i+1)
}

// Limits that a process applies to itself.
const (
	LimitWorkers    = limits.Workers
	LimitGoMaxProcs = limits.GoMaxProcs
	LimitGoMemLimit = limits.GoMemLimit
)
