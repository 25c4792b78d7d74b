package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-dns/sluice/cmd/internal/config"
	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/syncclient"
	"github.com/sluice-dns/sluice/usercache"
)

// control is what operators and balancers talk to.
type control struct {
	node     *Node
	draining atomic.Bool
	of       *resolver.Control

	http, admin         net.Listener // nil when off
	httpAddr, adminAddr string
}

func newControl(n *Node) (_ *control, err error) {
	c := &control{node: n}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	if c.http, c.httpAddr, err = listenEndpoint(n.config.HTTP.Listen); err != nil {
		return nil, fmt.Errorf("http.listen: %w", err)
	}
	if c.admin, c.adminAddr, err = listenEndpoint(n.config.Admin.Listen); err != nil {
		return nil, fmt.Errorf("admin.listen: %w", err)
	}
	c.of, err = n.resolver.Operate(resolver.OperateOptions{
		Node: n.config.Node.ID, Region: n.config.Node.Region, Version: n.o.Version,
		Readiness: n.readiness, Draining: c.draining.Store, Sync: syncControl{n}, Datasets: n.datasetMetrics,
		Level: n.o.Level, Registry: n.registry, Applied: func(resolver.LimitEntry) { n.applyProcess() },
	})
	return c, err
}

// listenEndpoint listens on a TCP address or a unix socket, in place of one that a killed process left. An
// endpoint that is off gives no listener.
func listenEndpoint(e config.Endpoint) (net.Listener, string, error) {
	if e.Off() {
		return nil, "", nil
	}
	if e.Network == "unix" {
		if err := os.Remove(e.Address); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, "", err
		}
	}
	l, err := net.Listen(e.Network, e.Address)
	if err != nil {
		return nil, "", err
	}
	return l, l.Addr().String(), nil
}

func (c *control) run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	if c.admin != nil {
		g.Go(func() error { return c.of.ServeAdmin(ctx, c.admin) })
	}
	if c.http != nil {
		server := c.of.HTTP()
		g.Go(func() error {
			if err := server.Serve(c.http); err != nil && !errors.Is(err, http.ErrServerClosed) {
				return fmt.Errorf("http.listen: %w", err)
			}
			return nil
		})
		g.Go(func() error {
			<-ctx.Done()
			end, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			if server.Shutdown(end) != nil { // somebody still reads a profile
				server.Close()
			}
			return nil
		})
	}
	return g.Wait()
}

func (c *control) close() {
	for _, l := range []net.Listener{c.http, c.admin} {
		if l != nil {
			l.Close()
		}
	}
}

// syncControl shows and steers the sync of user data for operators.
type syncControl struct{ n *Node }

// Datasets returns where each dataset stands.
func (s syncControl) Datasets() []*adminv1.DatasetStatus {
	var out []*adminv1.DatasetStatus
	for _, d := range s.n.sync.Status().Datasets {
		m := resolver.ShowDataset(s.n.users.Dataset(d.Kind))
		m.Revision = min(m.Revision, s.n.texts.before(s.n, d.Kind))
		m.State = d.State.String()
		if d.Head > 0 {
			m.Head = d.Head
		}
		if d.AtHead >= 0 {
			m.LagMs = uint64(d.AtHead.Milliseconds())
		}
		if d.LastError != "" {
			m.Error = d.LastError
		}
		out = append(out, m)
	}
	return out
}

// Accept lets through what the shrink guard holds or, if dataset is not empty, takes over another dataset.
func (s syncControl) Accept(_ context.Context, kind, dataset, why string) (int, error) {
	for _, d := range s.n.sync.Status().Datasets {
		if string(d.Kind) == kind && dataset != "" && fmt.Sprintf("%x", d.Foreign.Dataset[:]) != dataset {
			return 0, fmt.Errorf("the service does not offer dataset %s; it offers %x", dataset, d.Foreign.Dataset[:])
		}
	}
	a, err := s.n.sync.Accept(usercache.Kind(kind))
	if err != nil {
		return 0, err
	}
	s.n.log.Warn("an operator accepted", "dataset", kind, "removals", a.Removals, "took_over", a.Identity, "why", why)
	return a.Removals, nil
}

// Repair begins a repair, or reports that one is due already.
func (s syncControl) Repair(_ context.Context, kind string) (bool, error) {
	already := false
	for _, d := range s.n.sync.Status().Datasets {
		already = already || string(d.Kind) == kind && d.RepairDue != ""
	}
	return already, s.n.sync.Repair(usercache.Kind(kind))
}

// datasetMetrics is where the datasets stand, for metrics.
func (n *Node) datasetMetrics() (out []resolver.DatasetMetrics) {
	for _, d := range n.sync.Status().Datasets {
		out = append(out, resolver.DatasetMetrics{
			Kind: string(d.Kind), State: d.State.String(), Revision: d.Revision, Head: max(d.Head, d.Revision), Persisted: d.PersistedRevision,
			Records: d.Records, Overlay: uint64(d.Overlay), Bytes: d.Bytes, MemoryBytes: int64(d.MemoryBytes),
			LagSeconds: max(d.AtHead.Seconds(), 0), GuardTripped: d.GuardTripped, Users: d.Totals.Users,
		})
	}
	return out
}

// readiness says whether this node should get queries. Being stale or overloaded is no reason against it.
func (n *Node) readiness() resolver.Readiness {
	s := n.sync.Status()
	users := n.users.Dataset(usercache.Users).Status()
	r := resolver.Readiness{
		State: s.State.String(), Level: "normal",
		Dataset: fmt.Sprintf("%x", users.Identity.Dataset[:]), Revision: users.Revision, Users: int(users.Totals.Users),
	}
	if s.State == syncclient.Cold {
		r.Reasons = append(r.Reasons, "cold")
	}
	if n.listsAwaited() {
		r.Reasons = append(r.Reasons, "lists")
	}
	if n.control != nil && n.control.draining.Load() {
		r.Draining = true
		r.Reasons = append(r.Reasons, "draining")
	}
	r.Ready = len(r.Reasons) == 0
	return r
}

// AdminAddr is where the admin service listens; "" when it is off.
func (n *Node) AdminAddr() string { return n.control.adminAddr }

// listsWait is how long a young node is held back for want of the bytes of a list: until they are here, users
// of the list would get what it blocks. A list that never comes must not keep a node out for ever.
const listsWait = 30 * time.Second

// listsAwaited reports whether the node has not yet had all lists since it started.
func (n *Node) listsAwaited() bool {
	if n.listsSeen.Load() || n.resolver == nil {
		return false
	}
	if n.resolver.ListsPresent() || clock.Elapsed().Sub(n.started) > listsWait {
		n.listsSeen.Store(true)
		return false
	}
	return true
}
