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
	add(!c.Users.PeerListen.Off(), "users.peer_listen", "serves no segments to siblings", `""`)
	if e := c.Users.ServiceListen; len(c.Users.Services) == 0 && !e.Off() {
		add(!e.Local(), "users.service_listen", "offers a standalone resolver's service without TLS", "a loopback address or unix:PATH")
	}
	if e := c.Admin.Listen; !e.Off() {
		add(!e.Local(), "admin.listen", "offers the admin service without TLS", "a loopback address or unix:PATH")
	}
	for i, z := range c.StubZones {
		add(z.View != "", fmt.Sprintf("stub_zones[%d].view", i), "puts no client in a view", `""`)
	}
	for i, z := range c.ForwardZones {
		add(z.View != "", fmt.Sprintf("forward_zones[%d].view", i), "puts no client in a view", `""`)
	}
	return faults
}
