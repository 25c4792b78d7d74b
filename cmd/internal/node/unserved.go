package node

import (
	"fmt"

	"github.com/sluice-dns/sluice/cmd/internal/config"
)

// Unserved returns the keys of a configuration that ask for what this version does not do, where silently not
// doing it would mislead: a listener that would not be there, an answer that would not be changed, a zone that
// would be resolved another way.
func Unserved(c *config.Sluice) (faults []config.Fault) {
	add := func(asked bool, key, what, try string) {
		if asked {
			faults = append(faults, c.Fault(key, "this version "+what, try))
		}
	}
	add(len(c.Listen.DoQ) > 0, "listen.doq", "serves no DoQ", "[]")
	add(c.Listen.HTTP3, "listen.http3", "serves no HTTP/3", "false")
	add(len(c.PolicyZones) > 0, "policy_zones", "applies no response policy zones", "users' lists in RPZ form, or []")
	add(c.DNS64.Prefix.IsValid(), "dns64.prefix", "makes no AAAA records (DNS64)", `""`)
	add(len(c.Rebinding.PrivateAddresses) > 0, "rebinding.private_addresses", "protects against rebinding by users' settings alone", "[], and rebinding_protection=true in a policy")
	add(len(c.Recursion.ECS.Zones) > 0, "recursion.ecs.zones", "sends no client subnets", "[]")
	add(!c.Users.PeerListen.Off(), "users.peer_listen", "serves no segments to siblings", `""`)
	if e := c.Users.ServiceListen; len(c.Users.Services) == 0 && !e.Off() {
		add(!e.Local(), "users.service_listen", "offers a standalone resolver's service without TLS", "a loopback address or unix:PATH")
	}
	if e := c.Admin.Listen; !e.Off() {
		add(!e.Local(), "admin.listen", "offers the admin service without TLS", "a loopback address or unix:PATH")
	}
	for i, z := range c.StubZones {
		add(z.View != "", fmt.Sprintf("stub_zones[%d].view", i), "has no views", `""`)
	}
	for i, z := range c.ForwardZones {
		key := fmt.Sprintf("forward_zones[%d]", i)
		add(z.View != "", key+".view", "has no views", `""`)
		add(z.Strategy != config.Fastest, key+".strategy", "has the strategy fastest alone", "fastest")
		for j, u := range z.Upstreams {
			at := fmt.Sprintf("%s.upstreams[%d]", key, j)
			add(u.URL.Scheme != "udp" && u.URL.Scheme != "tcp" || !u.URL.Addr.IsValid(), at+".url", "forwards over plain DNS to addresses", "udp://ADDRESS")
			add(u.Role != config.Primary, at+".role", "knows primaries alone", "primary")
		}
	}
	return faults
}
