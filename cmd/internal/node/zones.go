package node

import (
	"fmt"

	"github.com/sluice-dns/sluice/cmd/internal/config"
	"github.com/sluice-dns/sluice/resolver"
)

// zonesOf brings stub and forward zones into the resolver's form.
func zonesOf(c *config.Sluice) (zones []resolver.Zone, err error) {
	for _, s := range c.StubZones {
		name, err := resolver.ParseName(s.Name)
		if err != nil {
			return nil, fmt.Errorf("stub_zones: %w", err)
		}
		zones = append(zones, resolver.Zone{Name: name, Servers: s.Addresses})
	}
	for _, f := range c.ForwardZones {
		name, err := resolver.ParseName(f.Name)
		if err != nil {
			return nil, fmt.Errorf("forward_zones: %w", err)
		}
		p := &resolver.ForwardPool{Strategy: strategies[f.Strategy], Quorum: f.Quorum}
		for _, u := range f.Upstreams {
			p.Upstreams = append(p.Upstreams, resolver.ForwardUpstream{
				Spec: resolver.UpstreamSpec{Scheme: schemes[u.URL.Scheme], Addr: u.URL.Addr, ServerName: u.URL.ServerName, Path: u.URL.Path},
				Role: roles[u.Role],
			})
		}
		zones = append(zones, resolver.Zone{Name: name, Forward: p, First: f.First})
	}
	return zones, nil
}

// localRoot reads the copy of the root zone, if there is to be one.
func localRoot(c *config.Sluice) (*resolver.LocalRoot, error) {
	if c.Recursion.LocalRoot == "" {
		return nil, nil
	}
	return resolver.OpenLocalRoot(c.Recursion.LocalRoot)
}

var (
	strategies = map[config.Strategy]resolver.ForwardStrategy{
		config.Fastest: resolver.ForwardFastest, config.Hedged: resolver.ForwardHedged,
		config.Race: resolver.ForwardRace, config.Quorum: resolver.ForwardQuorum,
	}
	roles = map[config.Role]resolver.ForwardRole{
		config.Primary: resolver.ForwardPrimary, config.Spare: resolver.ForwardSpare, config.Shadow: resolver.ForwardShadow,
	}
	schemes = map[string]resolver.UpstreamScheme{
		"udp": resolver.UpstreamUDP, "tcp": resolver.UpstreamTCP, "tls": resolver.UpstreamTLS, "https": resolver.UpstreamHTTPS,
	}
)
