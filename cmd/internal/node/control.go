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

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-dns/sluice/cmd/internal/config"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/syncclient"
	"github.com/sluice-dns/sluice/usercache"
)

// control is what operators and balancers talk to.
type control struct {
	node     *Node
	draining atomic.Bool

	http     *http.Server
	httpOn   net.Listener
	httpAddr string

	adminAddr string
}

func newControl(n *Node) (*control, error) {
	c := &control{node: n}
	if e := n.config.HTTP.Listen; !e.Off() {
		ln, err := listenEndpoint(e)
		if err != nil {
			return nil, fmt.Errorf("http.listen: %w", err)
		}
		c.httpOn, c.httpAddr = ln, ln.Addr().String()
		c.http = n.resolver.HTTPServer(n.readiness, prometheus.NewRegistry())
	}
	return c, nil
}

// listenEndpoint listens on a TCP address or a unix socket, in place of one that a killed process left.
func listenEndpoint(e config.Endpoint) (net.Listener, error) {
	if e.Network == "unix" {
		if err := os.Remove(e.Address); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
	}
	return net.Listen(e.Network, e.Address)
}

func (c *control) run(ctx context.Context) error {
	if c.http == nil {
		<-ctx.Done()
		return nil
	}
	stop := context.AfterFunc(ctx, func() {
		end, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		c.http.Shutdown(end)
	})
	defer stop()
	if err := c.http.Serve(c.httpOn); err != nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("http.listen: %w", err)
	}
	return nil
}

func (c *control) close() {
	if c.http != nil {
		c.http.Close()
		c.httpOn.Close()
	}
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
	if n.control != nil && n.control.draining.Load() {
		r.Draining = true
		r.Reasons = append(r.Reasons, "draining")
	}
	r.Ready = len(r.Reasons) == 0
	return r
}
