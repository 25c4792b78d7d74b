package iterator

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// A Forwarder asks the resolvers of a forward zone. Package forward has it.
type Forwarder interface {
	// Forward returns a response with RCODE NOERROR, NXDOMAIN or YXDOMAIN and the address of the resolver that
	// gave it. Resolvers in avoid are asked only if there are no others. a.Server and flags are not set, a.Timeout
	// is the time for all. A Forwarder that is no longer in use may return net.ErrClosed, provided that SetZones has
	// replaced it before.
	Forward(ctx context.Context, tree *query.Tree, a query.Ask, avoid []netip.AddrPort) (query.Reply, netip.AddrPort, error)
}

// forwardFirst is how long forwarders are waited for when there is iteration to fall back on.
const forwardFirst = 2 * time.Second

// forward asks the resolvers of a forward zone. What they say is believed for names in the zone and delegates
// nothing: a resolver's word is no referral, and a cache of delegations that it could fill would be a way from
// one forwarder into the whole tree (MaginotDNS).
func (r *run) forward(z *cut, name dnsname.Name, typ uint16) (response, error) {
	left := r.left()
	if z.first {
		left = min(left, forwardFirst)
	}
	o := &r.it.opts
	var subnet query.Subnet
	if r.tells(z.name) { // not for being in the way to a listed zone
		subnet = r.q.Subnet
	}
	reply, from, err := z.pool.Forward(r.ctx, r.tree, query.Ask{
		Name: name, Type: typ, Class: dnswire.ClassIN, Subnet: subnet,
		Case0x20: !o.NoCase0x20 && !r.secureZone(z.name), UDPSize: o.UDPSize, Timeout: left,
	}, r.avoid)
	r.now = clock.Elapsed()
	if err != nil {
		z.replaced = errors.Is(err, net.ErrClosed)
		return response{}, r.notForwarded(z, name, typ, err)
	}
	res := classify(reply.Message, z.name, name, typ, true)
	if res.kind == kindEmpty {
		res.kind = kindNoData
	}
	if res.kind == kindLame || res.kind == kindFailed { // not with the RCODEs promised; a Forwarder that errs costs this question alone
		return response{}, &Failure{Code: edeNoReachable, Text: fmt.Sprintf("%v %s at the resolvers of %v: %v %s", name, dnswire.TypeText(typ), z.name, from.Addr(), res.why)}
	}
	if reply.HasScope && reply.Scope > 0 {
		res.subnet = r.q.Subnet
	}
	if !slices.Contains(r.out.Servers, from) {
		r.out.Servers = append(r.out.Servers, from)
	}
	return res, nil
}

func (r *run) notForwarded(z *cut, name dnsname.Name, typ uint16, err error) error {
	f := &Failure{Code: edeNoReachable, Text: fmt.Sprintf("%v %s at the resolvers of %v: %v", name, dnswire.TypeText(typ), z.name, err)}
	switch {
	case r.ctx.Err() != nil:
		f.Code, f.err = edeOther, r.ctx.Err()
	case errors.Is(err, query.ErrLimit):
		f.Code, f.err = edeOther, err
	case errors.Is(err, query.ErrUnreachable):
		f.Code = edeNetwork
	}
	if r.left() <= 0 {
		f.final = true
	}
	return f
}

// SetZones replaces the stub and forward zones. Resolutions under way go on with those they began with; the
// caches are the caller's business.
func (it *Iterator) SetZones(zones []Zone) {
	t := newZoneTable(zones)
	it.zones.Store(&t)
}

// Configured returns the stub or forward zone that names at or below name belong to in a view, or nil. What the
// public tree denies (RFC 8020, RFC 8198) says nothing of names in it.
func (it *Iterator) Configured(view query.View, name dnsname.Name) *Zone {
	return it.zones.Load().find(view, name)
}

// A zoneTable finds configured zones. It is immutable.
type zoneTable map[zoneKey]*Zone

type zoneKey struct {
	name dnsname.Name
	view query.View
}

func newZoneTable(zones []Zone) zoneTable {
	t := make(zoneTable, len(zones))
	for i := range zones {
		z := zones[i]
		t[zoneKey{z.Name, z.View}] = &z
	}
	return t
}

// find returns the deepest zone at or above name, of the view or else of the public one.
func (t zoneTable) find(view query.View, name dnsname.Name) *Zone {
	if len(t) == 0 {
		return nil
	}
	for ; name != ""; name = name.Parent() {
		if z := t[zoneKey{name, view}]; z != nil {
			return z
		}
		if z := t[zoneKey{name, 0}]; z != nil {
			return z
		}
	}
	return nil
}
