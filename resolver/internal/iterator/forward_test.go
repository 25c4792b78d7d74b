package iterator

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

type forwarderFunc func(query.Ask) (query.Reply, netip.AddrPort, error)

func (f forwarderFunc) Forward(_ context.Context, _ *query.Tree, a query.Ask, _ []netip.AddrPort) (query.Reply, netip.AddrPort, error) {
	return f(a)
}

// A question that is on its way to a pool when zones change goes to the pool that took its place, or where the name
// belongs when none did.
func TestZonesChangeUnderway(t *testing.T) {
	zone := func(f Forwarder) []Zone { return []Zone{{Name: dnsname.MustParse("rsa.org."), Forward: f}} }
	holder := siminternet.Zone{Name: "holder.lab.", Servers: servers(s3)}
	bubble(t, zones{holder}, nil, func(r *rig) {
		gone := func(next []Zone) Forwarder {
			return forwarderFunc(func(query.Ask) (query.Reply, netip.AddrPort, error) {
				r.it.SetZones(next)
				return query.Reply{}, netip.AddrPort{}, fmt.Errorf("replaced: %w", net.ErrClosed)
			})
		}
		r.it.SetZones(zone(gone(nil)))
		r.want("www.rsa.org.", typeA, "NOERROR", "www.rsa.org. A 198.18.2.1")
		r.forgetSets()
		r.hook(s3, func(q siminternet.Query) *siminternet.Reply {
			return say(q, false, 0, "www.rsa.org. A 10.9.9.9", "", "")
		})
		r.it.SetZones(zone(gone(zone(pool(&r.opts, s3)))))
		r.want("www.rsa.org.", typeA, "NOERROR", "www.rsa.org. A 10.9.9.9")
	})
}
