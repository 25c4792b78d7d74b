package resolver

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/forward"
	"github.com/sluice-dns/sluice/resolver/internal/forward/upstream"
	"github.com/sluice-dns/sluice/resolver/internal/iterator"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// A Zone is a stub or forward zone: names at or below Name are asked for elsewhere than the public tree says.
type Zone struct {
	Name Name
	// View is 0 for the public tree.
	View query.View
	// Servers are the authoritative servers of a stub zone.
	Servers []netip.AddrPort
	// Forward is the pool of resolvers of a forward zone; nil for a stub zone.
	Forward *ForwardPool
	// First resolves a forward zone by iteration when no resolver of the pool answers.
	First bool
}

// Words of package forward, for those who fill in a Zone.
type (
	ForwardPool     = forward.Spec
	ForwardStrategy = forward.Strategy
	ForwardUpstream = forward.Upstream
	ForwardRole     = forward.Role
	UpstreamSpec    = upstream.Spec
	UpstreamScheme  = upstream.Scheme
)

// The strategies, roles and schemes of package forward.
const (
	ForwardFastest = forward.Fastest
	ForwardHedged  = forward.Hedged
	ForwardRace    = forward.Race
	ForwardQuorum  = forward.Quorum

	ForwardPrimary = forward.Primary
	ForwardSpare   = forward.Spare
	ForwardShadow  = forward.Shadow

	UpstreamUDP   = upstream.UDP
	UpstreamTCP   = upstream.TCP
	UpstreamTLS   = upstream.TLS
	UpstreamHTTPS = upstream.HTTPS
)

// SetZones replaces the stub and forward zones while serving. With an error nothing has changed. Zones that are as
// before keep their connections and what is known of their upstreams; names at or below all others are forgotten.
// Queries under way end with the zones they began with.
//
// Which of the built-in local zones give way to a zone of the operator's is decided by New alone.
func (r *Resolver) SetZones(zones []Zone) error { return r.engine.zones.set(zones) }

// zones are the configured zones of an engine.
type zones struct {
	options forward.Options // constant
	engine  *engine

	closing sync.WaitGroup // pools that are no longer used

	setting sync.Mutex // one change at a time
	mu      sync.Mutex // guards what is below; held for map work only
	now     map[zoneKey]configured
}

type zoneKey struct {
	name Name
	view query.View
}

type configured struct {
	Zone
	pool *forward.Pool // nil for a stub zone
}

func newZones(e *engine, t Transport, base *tls.Config) *zones {
	var o forward.Options
	o.Exchange, o.TLS = e.exchange, base
	o.Dial = func(ctx context.Context, _, address string) (net.Conn, error) {
		to, err := netip.ParseAddrPort(address)
		if err != nil {
			return nil, err
		}
		return t.Stream(ctx, to)
	}
	return &zones{engine: e, options: o}
}

// same reports whether what z says is what c does.
func (c configured) same(z Zone) bool {
	if c.First != z.First || len(c.Servers) != len(z.Servers) || (c.Forward == nil) != (z.Forward == nil) {
		return false
	}
	for i := range z.Servers {
		if c.Servers[i] != z.Servers[i] {
			return false
		}
	}
	return z.Forward == nil || c.Forward.Equal(*z.Forward)
}

// set is SetZones.
func (s *zones) set(all []Zone) error {
	s.setting.Lock()
	defer s.setting.Unlock()
	old := s.now // nobody else changes it
	next := make(map[zoneKey]configured, len(all))
	var made []*forward.Pool
	fail := func(z Zone, err error) error {
		for _, p := range made {
			p.Close()
		}
		return fmt.Errorf("zone %v: %w", z.Name, err)
	}
	var changed []Name
	for _, z := range all {
		k := zoneKey{z.Name, z.View}
		if _, twice := next[k]; twice {
			return fail(z, fmt.Errorf("configured twice in one view"))
		}
		if z.Forward == nil && len(z.Servers) == 0 {
			return fail(z, fmt.Errorf("a stub zone without servers"))
		}
		if was, ok := old[k]; ok && was.same(z) {
			next[k] = was
			continue
		}
		c := configured{Zone: z}
		if z.Forward != nil {
			p, err := forward.New(*z.Forward, s.options)
			if err != nil {
				return fail(z, err)
			}
			made = append(made, p)
			c.pool = p
		}
		next[k] = c
		changed = append(changed, z.Name)
	}
	var unused []*forward.Pool
	for k, was := range old {
		is, still := next[k]
		if !still {
			changed = append(changed, k.name)
		}
		if was.pool != nil && is.pool != was.pool {
			unused = append(unused, was.pool)
		}
	}
	table := make([]iterator.Zone, 0, len(next))
	for _, c := range next {
		z := iterator.Zone{Name: c.Name, View: c.View, Servers: c.Servers, First: c.First}
		if c.pool != nil {
			z.Forward = c.pool
		}
		table = append(table, z)
	}
	s.engine.iterator.SetZones(table)
	s.mu.Lock()
	s.now = next
	s.mu.Unlock()
	if old == nil {
		return nil // the caches are empty
	}
	s.forget(changed)
	s.closing.Go(func() {
		for _, p := range unused {
			p.Close()
		}
		if len(unused) > 0 { // what they answered in the meantime
			s.forget(changed)
		}
	})
	return nil
}

// forget empties the caches of names at or below zones.
func (s *zones) forget(names []Name) {
	for _, n := range names {
		s.engine.rrsets.Purge(n, true, 0)
		s.engine.forget(n, true)
	}
	if len(names) > 0 {
		s.engine.answers.Raise()
		s.engine.holds.forget()
	}
}

// ForwardStats are the counters of one forward zone's pool.
type ForwardStats struct {
	Zone Name
	View query.View
	forward.Stats
}

// ForwardStats reads the counters of all pools, in no order.
func (r *Resolver) ForwardStats() (out []ForwardStats) {
	s := r.engine.zones
	s.mu.Lock()
	now := s.now // replaced as a whole
	s.mu.Unlock()
	for k, c := range now {
		if c.pool != nil {
			out = append(out, ForwardStats{Zone: k.name, View: k.view, Stats: c.pool.Stats(clock.Elapsed())})
		}
	}
	return out
}

// close ends all pools; nothing may be resolving any more.
func (s *zones) close() {
	s.setting.Lock()
	defer s.setting.Unlock()
	for _, c := range s.now {
		if c.pool != nil {
			c.pool.Close()
		}
	}
	s.closing.Wait()
}
