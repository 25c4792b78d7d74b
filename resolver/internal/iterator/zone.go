package iterator

import (
	"errors"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// A cut is a zone and who serves it, as far as known. It belongs to one run.
type cut struct {
	name dnsname.Name
	// granted is until when the parent vouched for the delegation; what is learned below lives no longer.
	granted clock.Instant
	servers []netip.AddrPort
	// nameless are NS names of which no address is known, halfKnown those of which one family is missing.
	nameless, halfKnown []dnsname.Name
	// glued are NS names, of other zones, of which only glue is known: their own zone may know better.
	glued []dnsname.Name
	// children are NS names that the child alone gives. They are worth asking when the parent's do not answer.
	children []dnsname.Name
	parents  *query.RRset // the NS set that the parent gives, until children was looked for
	resolved int          // NS names looked up for this delegation

	cached bool      // the delegation was known before this run
	static bool      // a configured zone
	pool   Forwarder // of a forward zone
	// replaced: SetZones put another pool, or none, in the place of this one before it was asked.
	replaced bool
	first    bool
}

// left returns how long the grant lasts, in seconds, rounded up.
func (z *cut) left(now clock.Instant) uint32 {
	const second = clock.Instant(time.Second)
	return uint32(min(max((z.granted-now+second-1)/second, 0), math.MaxInt32))
}

// start returns the deepest cut known from which the name can be reached. With above, it is a cut strictly
// above that zone. The records of type DS stand in the parent (RFC 4035 section 3.1.4.1).
func (r *run) start(name dnsname.Name, typ uint16, above dnsname.Name) *cut {
	from := startName(name, typ, above)
	configured := r.it.Configured(r.q.View, from)
	if configured != nil && configured.Forward != nil {
		return staticCut(configured)
	}
	z := r.deepest(from)
	if configured != nil && (z == nil || !z.name.Below(configured.Name)) {
		return staticCut(configured)
	}
	if z == nil || z.name == dnsname.Root {
		return r.root()
	}
	return z
}

// startPublic is start without regard to configured zones.
func (r *run) startPublic(name dnsname.Name, typ uint16) *cut {
	if z := r.deepest(startName(name, typ, "")); z != nil && z.name != dnsname.Root {
		return z
	}
	return r.root()
}

func startName(name dnsname.Name, typ uint16, above dnsname.Name) dnsname.Name {
	switch {
	case above != "":
		return above.Parent()
	case typ == dnswire.TypeDS && name != dnsname.Root:
		return name.Parent()
	}
	return name
}

func staticCut(z *Zone) *cut {
	return &cut{
		name: z.Name, granted: clock.Never, servers: slices.Clone(z.Servers),
		static: true, pool: z.Forward, first: z.First,
	}
}

// deepest returns the deepest cached delegation at or above name, or nil.
func (r *run) deepest(name dnsname.Name) *cut {
	zone, ns, granted, ok := r.it.opts.RRsets.Delegation(name, r.q.View, r.now)
	if !ok {
		return nil
	}
	z := &cut{name: zone, granted: granted, cached: true}
	r.fill(z, &ns, nil)
	if len(z.servers) == 0 {
		z.servers = slices.Clone(r.family.referred[zone])
	}
	if c := r.it.Configured(r.q.View, zone); c != nil && c.Forward != nil {
		return z // what the cache has of the child's own servers is a forwarder's word, which delegates nothing
	}
	z.parents = &ns
	return z
}

// findChildren looks for NS names that the child alone gives, which few resolutions need.
func (r *run) findChildren(z *cut) {
	if z.parents == nil {
		return
	}
	if own, ok := r.get(z.name, dnswire.TypeNS); ok && answers(&own) {
		for d := range query.RDatas(first(own.Data, maxNames)) {
			if name := nameIn(dnswire.TypeNS, d); name != "" && !names(z.parents, name) {
				z.children = append(z.children, name)
			}
		}
	}
	z.parents = nil
}

// names reports whether an NS set names a server.
func names(ns *query.RRset, server dnsname.Name) bool {
	for d := range query.RDatas(ns.Data) {
		if nameIn(dnswire.TypeNS, d) == server {
			return true
		}
	}
	return false
}

// root returns the root zone: its servers as primed, or as hinted.
func (r *run) root() *cut {
	if r.it.opts.Prime {
		r.prime()
	}
	z := &cut{name: dnsname.Root, granted: clock.Never, cached: true}
	if ns, ok := r.get(dnsname.Root, dnswire.TypeNS); ok {
		r.fill(z, &ns, r.it.hints.byName)
		if len(z.servers) > 0 {
			return z
		}
	}
	for _, a := range r.it.hints.all {
		r.addServer(z, netip.AddrPortFrom(a, r.it.opts.Port))
	}
	return z
}

// descend enters a delegation: it keeps what the referral said and returns the child's cut.
func (r *run) descend(parent *cut, res response) *cut {
	now := r.now
	granted := min(parent.granted, now.Add(seconds(res.ns.TTL)))
	loose := make(map[dnsname.Name][]netip.Addr)
	inBailiwick := res.glue[:0]
	for _, g := range res.glue {
		switch {
		case g.Name.IsWithin(parent.name):
			inBailiwick = append(inBailiwick, g)
		case r.it.opts.LooseGlue:
			loose[g.Name] = append(loose[g.Name], addresses(&g)...)
		}
	}
	res.glue = inBailiwick
	r.keepReferral(parent, &res, granted, now)
	z := &cut{name: res.child, granted: granted}
	for i := range res.glue { // also when the cache holds nothing, as with a TTL of 0
		g := &res.glue[i]
		loose[g.Name] = append(loose[g.Name], addresses(g)...)
	}
	r.fill(z, &res.ns, loose)
	if r.family.referred == nil {
		r.family.referred = make(map[dnsname.Name][]netip.AddrPort)
	}
	r.family.referred[z.name] = slices.Clip(z.servers)
	return z
}

func (r *run) referred(zone dnsname.Name) bool {
	_, ok := r.family.referred[zone]
	return ok
}

// fill gives z the servers in an NS RRset whose addresses are known; more finds the others. extra has
// addresses that the cache does not.
func (r *run) fill(z *cut, ns *query.RRset, extra map[dnsname.Name][]netip.Addr) {
	count := 0
	for d := range query.RDatas(ns.Data) {
		if count++; count > maxNames {
			break
		}
		name := nameIn(dnswire.TypeNS, d)
		if name == "" {
			continue
		}
		var found [2]bool
		n := 0
		add := func(a netip.Addr) {
			if n < maxPerName && r.it.uses(a) {
				n++
				r.addServer(z, netip.AddrPortFrom(a, r.it.opts.Port))
				found[familyOf(a)] = true
			}
		}
		at := r.at(name, query.Subnet{})
		missing, glue := false, !name.IsWithin(z.name) && z.name != dnsname.Root
		for fam, typ := range familyTypes {
			if !r.it.enabled(fam) {
				found[fam] = true // nobody misses it
				continue
			}
			set, known, own := r.addressSet(&at, typ)
			for _, a := range set {
				add(a)
			}
			if known {
				found[fam] = true
			}
			glue = glue && !own
		}
		for _, a := range extra[name] {
			add(a)
		}
		missing = !found[0] || !found[1]
		switch {
		case n == 0 && missing:
			z.nameless = append(z.nameless, name)
		case missing:
			z.halfKnown = append(z.halfKnown, name)
		}
		if glue && n > 0 {
			z.glued = append(z.glued, name)
		}
	}
}

func (r *run) addServer(z *cut, a netip.AddrPort) {
	if len(z.servers) < maxAddresses && r.it.uses(a.Addr()) && !slices.Contains(z.servers, a) {
		z.servers = append(z.servers, a)
	}
}

// more looks for addresses of servers of z that are not known yet, and reports whether it found any. answered
// says that servers which are known did answer, though to no avail: then the zone can be asked for names in
// itself, and other addresses of the same servers are not worth looking for.
func (r *run) more(z *cut, answered bool) (bool, error) {
	before := len(z.servers)
	if !answered {
		r.findChildren(z)
		for _, name := range z.children {
			at := r.at(name, query.Subnet{})
			for _, typ := range familyTypes {
				known, _, _ := r.addressSet(&at, typ)
				for _, a := range known[:min(len(known), maxPerName)] {
					r.addServer(z, netip.AddrPortFrom(a, r.it.opts.Port))
				}
			}
			z.nameless = append(z.nameless, name)
		}
		z.children = nil
		if len(z.servers) > before {
			return true, nil
		}
	}
	for {
		for range maxRound {
			name, verify := z.nextName(answered)
			if name == "" {
				return len(z.servers) > before, nil
			}
			found, err := r.findAddresses(name, verify)
			if err != nil {
				return false, err
			}
			for _, a := range found[:min(len(found), maxPerName)] {
				r.addServer(z, netip.AddrPortFrom(a, r.it.opts.Port))
			}
		}
		if len(z.servers) > before {
			return true, nil
		}
	}
}

// hasNames reports whether NS names are left that more might resolve when nobody answers.
func (r *run) hasNames(z *cut) bool {
	r.findChildren(z)
	if len(z.children) > 0 {
		return true
	}
	for _, from := range [][]dnsname.Name{z.nameless, z.halfKnown, z.glued} {
		for _, name := range from {
			if z.resolved < maxGlueless && !name.IsWithin(z.name) {
				return true
			}
		}
	}
	return false
}

// nextName takes the next NS name that is worth resolving, "" if there is none. verify says that glue for it is
// known, and was of no use.
func (z *cut) nextName(answered bool) (name dnsname.Name, verify bool) {
	for _, from := range []*[]dnsname.Name{&z.nameless, &z.halfKnown, &z.glued} {
		if answered && from == &z.halfKnown {
			continue
		}
		for len(*from) > 0 && z.resolved < maxGlueless {
			name := (*from)[0]
			*from = (*from)[1:]
			if answered || !name.IsWithin(z.name) {
				z.resolved++
				return name, from == &z.glued
			}
		}
	}
	return "", false
}

// findAddresses resolves the name of a name server: the first enabled family that has addresses which the
// cache does not know yet. No address is no error; an error ends the whole resolution.
//
// With verify, glue is not enough: the name's own zone is asked.
func (r *run) findAddresses(name dnsname.Name, verify bool) ([]netip.Addr, error) {
	if r.depth >= maxDepth || r.family.dead[name] {
		return nil, nil
	}
	if _, failing := r.it.names.active(name, r.now); failing {
		return nil, nil
	}
	circular, absent := false, true
	var meanwhile []netip.Addr // known by now, because another resolution wanted them too
	for fam, typ := range familyTypes {
		if !r.it.enabled(fam) {
			continue
		}
		if r.waitsFor(name, typ) {
			circular, r.family.circular = true, true // we are here because of this very question
			continue
		}
		at := r.at(name, query.Subnet{}) // for each family anew, as the first may have been asked for
		if set, known, own := r.addressSet(&at, typ); own || known && !verify {
			for _, a := range set {
				if r.it.uses(a) {
					meanwhile = append(meanwhile, a)
				}
			}
			continue
		}
		sub := &run{
			it: r.it, now: r.now, ctx: r.ctx, tree: r.tree, parent: r, depth: r.depth + 1, family: r.family, glueDoes: !verify,
			q: query.Question{Name: name, Type: typ, Class: dnswire.ClassIN, CD: true, View: r.q.View},
		}
		out, err := sub.resolve()
		r.now = sub.now
		if err != nil {
			if spent(err) {
				return nil, err
			}
			if f := (*Failure)(nil); errors.As(err, &f) && f.shed {
				circular = true // it says as little
			}
			absent = false
			continue
		}
		var found []netip.Addr
		if n := len(out.Answer); n > 0 && out.Answer[n-1].Type == typ {
			for _, a := range addresses(&out.Answer[n-1]) {
				if r.it.uses(a) {
					found = append(found, a)
				}
			}
		}
		if len(found) > 0 {
			return found, nil
		}
	}
	if len(meanwhile) > 0 {
		return meanwhile, nil
	}
	if circular || verify {
		return nil, nil // it says nothing of the name, or nothing against its glue
	}
	if r.family.dead == nil {
		r.family.dead = make(map[dnsname.Name]bool)
	}
	r.family.dead[name] = true
	r.it.names.failed(name, "", r.now, nameBackoff)
	if absent {
		if err := r.tree.MissingName(); err != nil {
			return nil, &Failure{Code: edeNoReachable, Text: "name servers whose names do not exist: " + err.Error(), err: err}
		}
	}
	return nil, nil
}

// glueFor returns the glue that a referral by z has for a name, if glue is what this run needs: whoever delegates
// the zone of a name server vouches for its address as much as for any other delegation, and a question is
// saved.
func (r *run) glueFor(z *cut, res *response, name dnsname.Name, typ uint16) *query.RRset {
	if !r.glueDoes || name != r.q.Name || !name.IsWithin(z.name) {
		return nil
	}
	if g := find(res.glue, name, typ); g != nil && slices.ContainsFunc(addresses(g), r.it.uses) {
		return g
	}
	return nil
}

// waitsFor reports whether this run, or one that waits for it, is itself looking for these addresses. The chain
// of runs says so exactly; Tree.Enter would take two goroutines of one tree that need the same address for a
// circle.
func (r *run) waitsFor(name dnsname.Name, typ uint16) bool {
	for ; r != nil; r = r.parent {
		if r.q.Name == name && r.q.Type == typ {
			return true
		}
	}
	return false
}

// addresses returns those in an A or AAAA RRset.
func addresses(s *query.RRset) (out []netip.Addr) {
	for d := range query.RDatas(s.Data) {
		if a, ok := netip.AddrFromSlice(d); ok {
			out = append(out, a)
		}
	}
	return out
}
