package iterator

import (
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// A Root answers in the place of the root's servers, as they would, from a copy of their zone (RFC 8806). Package
// localroot has it.
type Root interface {
	// Answer returns nil if the servers are to be asked.
	Answer(name dnsname.Name, typ uint16, now clock.Instant, wall time.Time) *query.Message
	// Doubt says that it gave an answer that is bogus.
	Doubt(now clock.Instant)
}

// localRoot stands for Options.LocalRoot among servers: in what Resolve returns, and in what Again is to avoid. Nobody
// has this address.
var localRoot = netip.AddrPort{}

// askLocal asks the local copy of the root, if it may be asked, in the place of the servers of z.
func (r *run) askLocal(z *cut, name dnsname.Name, typ uint16) (response, bool) {
	if z.name != dnsname.Root || z.static || r.it.opts.LocalRoot == nil || slices.Contains(r.avoid, localRoot) {
		return response{}, false
	}
	m := r.it.opts.LocalRoot.Answer(name, typ, r.now, clock.Wall())
	if m == nil {
		return response{}, false
	}
	res := classify(m, z.name, name, typ, false)
	switch res.kind {
	case kindLame, kindFailed, kindEmpty:
		return response{}, false
	}
	res.local = true
	return res, true
}

// settledBy notes that a zone settled what there is of a name. If it is the root, and this run was to avoid the local
// copy, then what the copy said of the name that was asked for was bogus. Behind an alias it may have been the alias
// that was, for which the copy is not to blame.
func (r *run) settledBy(z *cut, res *response) {
	r.out.Zone = z.name
	switch {
	case res.local:
		if !slices.Contains(r.out.Servers, localRoot) {
			r.out.Servers = append(r.out.Servers, localRoot)
		}
	case z.name == dnsname.Root && !z.static && len(r.out.Answer) == 0 && slices.Contains(r.avoid, localRoot) && r.it.opts.LocalRoot != nil:
		r.it.opts.LocalRoot.Doubt(r.now)
	}
}
