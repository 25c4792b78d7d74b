package validator

import (
	"slices"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/validator/rrsig"
)

// This file follows the chain of trust: which zones there are between an anchor and a name, and with which
// keys they sign.
//
// Zones are looked for in what the cache holds of DS records first, from the top down: referrals left them
// there. Only if that does not tell is anybody asked: for the DS records of the zone that a signature names
// (zone), or, when there is no signature to go by, of each name on the way (unsigned).

// zone returns what is known of the zone of exactly this name, or of what is above it if the chain of trust
// ends there; nil if there is no zone of this name.
func (r *run) zone(name dnsname.Name) (*zone, error) {
	z, err := r.walk(name, false)
	if err != nil || z.status != query.Secure || z.name == name {
		return z, err
	}
	if r.working[name] {
		return nil, nil // its own DS records would have to be signed by itself
	}
	if r.working == nil {
		r.working = make(map[dnsname.Name]bool)
	}
	r.working[name] = true
	defer delete(r.working, name)
	z, cut, err := r.delegation(name, true)
	if err != nil || !cut {
		return nil, err
	}
	return z, nil
}

// unsigned returns the zone that holds name as far as it matters to data without a good signature: if it is
// Secure, the data should have had one. With thorough it asks for the DS records of the names on the way, since
// a zone may be delegated to the servers of its parent, so that no referral was seen.
func (r *run) unsigned(name dnsname.Name, thorough bool) (*zone, error) {
	z, err := r.walk(name, false)
	if err != nil || z.status != query.Secure || !thorough {
		return z, err
	}
	deeper, err := r.walk(name, true)
	if err == nil && deeper.status == query.Bogus {
		return z, nil // no proof of an insecure delegation: the data that lacks a signature is what is wrong
	}
	return deeper, err
}

// walk goes from the deepest zone known at or above name down to the zone that holds it, or to where the chain
// of trust ends. It sees the delegations that the cache knows of; with ask the others too.
func (r *run) walk(name dnsname.Name, ask bool) (*zone, error) {
	z, err := r.deepest(name)
	if err != nil {
		return nil, err
	}
	for k := z.name.Labels() + 1; k <= name.Labels() && z.status == query.Secure; k++ {
		if ask {
			if r.probes++; r.probes > maxProbes {
				break
			}
		}
		next, cut, err := r.delegation(name.Suffix(k), ask)
		switch {
		case err != nil:
			return nil, err
		case cut:
			z = next
		case next == nothing:
			return z, nil // no such name, so nothing below either
		}
	}
	return z, nil
}

// nothing is what delegation returns for a name that does not exist.
var nothing = new(zone)

// known returns the deepest zone remembered at or above name, if nothing has to be asked for that; otherwise
// nil.
func (r *run) known(name dnsname.Name) *zone {
	for n := name; n != ""; n = n.Parent() {
		if z, ok := r.remembered(n); ok {
			return z
		}
	}
	return &zone{name: dnsname.Root, status: query.Indeterminate, why: reason{ede: query.NoEDE}}
}

// remembered returns the zone known to begin at n; ok with a nil zone means that an anchor does which has not
// been used yet.
func (r *run) remembered(n dnsname.Name) (z *zone, ok bool) {
	if until, ok := (*r.v.insecure.Load())[n]; ok && (until.IsZero() || r.wall.Before(until)) {
		return &zone{name: n, status: query.Insecure, why: reason{ede: query.NoEDE}}, true
	}
	if z := r.zones[n]; z != nil {
		return z, true
	}
	if z, ok := r.v.zones.get(zoneKey{n, r.view}, r.now, r.epoch); ok {
		return z, true
	}
	_, _, anchored := r.v.o.Anchors.At(n)
	return nil, anchored
}

// delegated reports whether a zone without keys that count is known to begin at n.
func (r *run) delegated(n dnsname.Name) bool {
	if z, ok := r.remembered(n); !ok || !z.unsigned() {
		return false
	}
	_, negative := (*r.v.insecure.Load())[n]
	return !negative // a negative trust anchor is not a delegation
}

// deepest is known, with the keys of an anchor fetched if that is what it comes to.
func (r *run) deepest(name dnsname.Name) (*zone, error) {
	for n := name; n != ""; n = n.Parent() {
		z, ok := r.remembered(n)
		switch {
		case z != nil:
			return z, nil
		case ok:
			return r.anchored(n)
		}
	}
	return r.known(name), nil
}

// anchored establishes a zone that is a trust anchor.
func (r *run) anchored(name dnsname.Name) (*zone, error) {
	ds, keys, _ := r.v.o.Anchors.At(name)
	usable := false
	for range rrsig.UsableDS(ds, r.v.accepts) {
		usable = true
	}
	for rdata := range query.RDatas(keys) {
		k := rrsig.ParseKey(rdata)
		usable = usable || k != nil && rrsig.Supported(k.Algorithm) && r.v.accepts(k.Algorithm)
	}
	if !usable {
		return r.insecureFrom(name, because(edeAlgorithm, "no trust anchor of %v is of an algorithm that counts", name), 3600), nil
	}
	z, err := r.keys(name, ds, keys, clock.Never)
	if err == nil && z.status == query.Secure {
		r.v.alive.Store(name, true)
	}
	return z, err
}

// mayBeAbsent reports whether it can be true that a zone without keys is not there at all: it is a trust anchor, all
// who were asked for its keys deny the name, there is no anchor above that could have vouched for the denial or
// against it, and the zone has not been seen since the start.
func (r *run) mayBeAbsent(z *zone) bool {
	if z.status != query.Bogus || !z.why.absent {
		return false
	}
	for n := z.name.Parent(); n != ""; n = n.Parent() {
		if _, _, ok := r.v.o.Anchors.At(n); ok {
			return false
		}
	}
	_, seen := r.v.alive.Load(z.name)
	return !seen
}

// remember keeps a zone for others and for the rest of this run.
func (r *run) remember(z *zone) *zone {
	if r.zones == nil {
		r.zones = make(map[dnsname.Name]*zone)
	}
	r.zones[z.name] = z
	if r.now.Before(z.end) {
		r.v.zones.put(zoneKey{z.name, r.view}, z, z.end, r.epoch, r.now)
	}
	return z
}

func (r *run) broken(name dnsname.Name, why reason, d time.Duration) *zone {
	why.zone = true
	return r.remember(&zone{name: name, status: query.Bogus, why: why, end: r.now.Add(d)})
}

func (r *run) insecureFrom(name dnsname.Name, why reason, ttl uint32) *zone {
	return r.remember(&zone{name: name, status: query.Insecure, why: why, end: r.now.Add(seconds(ttl))})
}

func seconds(ttl uint32) time.Duration { return time.Duration(ttl) * time.Second }

// question is one of the validator's own.
func (r *run) question(name dnsname.Name, typ uint16) query.Question {
	return query.Question{Name: name, Type: typ, Class: dnswire.ClassIN, DO: true, CD: true, View: r.view}
}

// forEverybody leaves the client's subnet out of what is noted, until the function it returns is called: keys and
// delegations depend on nobody's.
func (r *run) forEverybody() (restore func()) {
	subnet := r.subnet
	r.subnet = query.Subnet{}
	return func() { r.subnet = subnet }
}

// delegation says what the parent has of a zone named name: cut, with the zone that begins there (or the end of
// the chain of trust), or not, with nothing if the parent denies the name. Without ask only the cache is looked
// at. The zone that holds the parent's side must be reachable from a Secure one.
func (r *run) delegation(name dnsname.Name, ask bool) (z *zone, cut bool, err error) {
	if z, _ := r.remembered(name); z != nil {
		return z, true, nil
	}
	if z, ok := r.ordinary[name]; ok {
		return z, false, nil
	}
	defer r.forEverybody()()
	q := r.question(name, dnswire.TypeDS)
	u, ok := r.v.o.Fetch.Cached(q, 0)
	if !ok {
		if !ask {
			return nil, false, nil
		}
		if u, err = r.v.o.Fetch.Resolve(r.ctx, r.tree, q); err != nil {
			if ended(err) {
				return nil, false, given("DS records of "+name.String(), err)
			}
			return r.broken(name, because(edeOf(err), "%v: its DS records cannot be had: %v", name, err), unreachableFor), true, nil
		}
	}
	avoid := u.Servers
	for try := 0; ; try++ {
		z, cut, why, err := r.parentSays(name, &u)
		if err != nil || why == nil {
			if err == nil && !cut {
				if r.ordinary == nil {
					r.ordinary = make(map[dnsname.Name]*zone)
				}
				r.ordinary[name] = z
			}
			return z, cut, err
		}
		if try == maxRetries || why.zone {
			return r.broken(name, *why, bogusFor), true, nil
		}
		if !ask && try == 0 {
			ask = true // what the cache has is bad; what else there is has to be known
		}
		again, err := r.v.o.Fetch.Again(r.ctx, r.tree, q, avoid)
		if err != nil {
			if ended(err) {
				return nil, false, given("DS records of "+name.String(), err)
			}
			return r.broken(name, *why, bogusFor), true, nil
		}
		u = again
		avoid = append(avoid, u.Servers...)
	}
}

func edeOf(err error) uint16 {
	f, ok := err.(interface{ EDE() (uint16, string) })
	if !ok {
		return edeOther
	}
	code, _ := f.EDE()
	return code
}

// parentSays judges an answer to a question for the DS records of name. why is set if it is bogus.
func (r *run) parentSays(name dnsname.Name, u *query.Unvalidated) (z *zone, cut bool, why *reason, err error) {
	if len(u.Answer) > 0 {
		ds := &u.Answer[0]
		if ds.Type != dnswire.TypeDS {
			return nil, false, nil, nil // an alias, so no zone begins here
		}
		vd, err := r.set(ds)
		switch {
		case err != nil:
			return nil, false, nil, err
		case vd.status == query.Bogus:
			return nil, false, &vd.why, nil
		case vd.status != query.Secure:
			return r.insecureFrom(name, vd.why, ds.TTL), true, nil, nil
		}
		if vd.encloser != "" { // nothing is delegated by a wildcard (RFC 4592 section 4.2)
			why := because(edeBogus, "%v DS was made from a wildcard", name)
			return nil, false, &why, nil
		}
		if dead := r.unusable(ds); dead.ede != query.NoEDE {
			return r.insecureFrom(name, dead, ds.TTL), true, nil, nil
		}
		z, err := r.keys(name, ds.Data, nil, r.now.Add(seconds(ds.TTL)))
		return z, true, nil, err
	}
	d, err := r.dsDenied(u, name)
	switch {
	case err != nil:
		return nil, false, nil, err
	case d.status == query.Bogus:
		return nil, false, &d.why, nil
	case !d.ordinary && (d.status != query.Secure || d.delegation):
		return r.insecureFrom(name, d.why, d.ttl), true, nil, nil
	case d.nameError:
		return nothing, false, nil, nil
	}
	return nil, false, nil, nil
}

// unusable returns why a Secure DS set asks for nothing that can be validated (RFC 4035 section 5.2), or a reason
// without code.
func (r *run) unusable(ds *query.RRset) reason {
	for range rrsig.UsableDS(ds.Data, r.v.accepts) {
		return reason{ede: query.NoEDE}
	}
	for rdata := range query.RDatas(ds.Data) {
		if d, ok := rrsig.ParseDS(rdata); ok && rrsig.Supported(d.Algorithm) && r.v.accepts(d.Algorithm) {
			return because(edeDigest, "no DS record of %v has a digest of a known type", ds.Name)
		}
	}
	return because(edeAlgorithm, "no DS record of %v is of an algorithm that counts", ds.Name)
}

// keys fetches the DNSKEY set of a zone and checks it against the DS or DNSKEY records that vouch for it, which
// hold until the given time.
func (r *run) keys(name dnsname.Name, ds, anchors []byte, until clock.Instant) (*zone, error) {
	defer r.forEverybody()()
	q := r.question(name, dnswire.TypeDNSKEY)
	u, err := r.v.o.Fetch.Resolve(r.ctx, r.tree, q)
	if err != nil {
		if ended(err) {
			return nil, given("DNSKEY records of "+name.String(), err)
		}
		why := because(edeNoKey, "%v: its DNSKEY records cannot be had: %v", name, err)
		return r.broken(name, why, unreachableFor), nil
	}
	avoid := u.Servers
	absent := true
	for try := 0; ; try++ {
		z, why, err := r.childSays(name, &u, ds, anchors, until)
		if err != nil || z != nil {
			return z, err
		}
		absent = absent && u.RCode == dnswire.RCodeNXDomain
		why.absent = absent
		if try == maxRetries {
			return r.broken(name, why, bogusFor), nil
		}
		again, err := r.v.o.Fetch.Again(r.ctx, r.tree, q, avoid)
		if err != nil {
			if ended(err) {
				return nil, given("DNSKEY records of "+name.String(), err)
			}
			return r.broken(name, why, bogusFor), nil
		}
		u = again
		avoid = append(avoid, u.Servers...)
	}
}

// childSays judges an answer to a question for the DNSKEY records of a zone. A nil zone means that it is bogus,
// for the reason given.
func (r *run) childSays(name dnsname.Name, u *query.Unvalidated, ds, anchors []byte, until clock.Instant) (*zone, reason, error) {
	if len(u.Answer) == 0 || !u.Answer[0].Is(name, dnswire.TypeDNSKEY) {
		return nil, because(edeNoKey, "%v has no DNSKEY records, though it is to be signed", name), nil
	}
	set := &u.Answer[0]
	if set.Status == query.Bogus {
		return nil, because(edeBogus, "%v DNSKEY was found bogus a moment ago", name), nil
	}
	var all []*rrsig.Key
	for rdata := range query.RDatas(set.Data) {
		if k := rrsig.ParseKey(rdata); k != nil && len(all) < rrsig.MaxRecords {
			all = append(all, k)
		}
	}
	trusted, why, unsupported := r.trusted(name, all, ds, anchors)
	if len(trusted) == 0 {
		if unsupported {
			return r.insecureFrom(name, why, set.TTL), reason{}, nil
		}
		return nil, why, nil
	}
	if set.Status != query.Secure {
		z := &zone{name: name}
		vd, err := r.verify(set, z, trusted)
		if err != nil {
			return nil, reason{}, err
		}
		if vd.status == query.Bogus || vd.encloser != "" {
			r.note(set, query.Bogus)
			return nil, vd.why, nil
		}
		r.note(set, query.Secure)
	}
	return r.remember(&zone{
		name: name, status: query.Secure, keys: all, why: reason{ede: query.NoEDE},
		end: min(until, r.now.Add(seconds(set.TTL))),
	}), reason{}, nil
}

// trusted returns the keys that DS or anchor records vouch for. If there are none it says why; unsupported
// means that those there are cannot be used here, which makes the zone insecure rather than bogus.
func (r *run) trusted(name dnsname.Name, all []*rrsig.Key, ds, anchors []byte) (out []*rrsig.Key, why reason, unsupported bool) {
	why = because(edeNoKey, "%v has no DNSKEY record that matches its DS records or trust anchor", name)
	matched, beyond := 0, 0
	consider := func(k *rrsig.Key) {
		matched++
		switch k.Err() {
		case rrsig.ErrAlgorithm:
			beyond++
		case rrsig.ErrNotZone:
			why = because(edeNoZoneKey, "%v: the DNSKEY record vouched for is not a zone key", name)
		case rrsig.ErrRevoked:
			why = because(edeNoKey, "%v: the DNSKEY record vouched for is revoked", name)
		default: // malformed ones too: they are counted where they fail
			if !slices.Contains(out, k) {
				out = append(out, k)
			}
		}
	}
	looked := 0
	for d := range rrsig.UsableDS(ds, r.v.accepts) {
		if looked++; looked > maxDS {
			break
		}
		colliding := 0
		for _, k := range all {
			if k.Tag != d.KeyTag || k.Algorithm != d.Algorithm {
				continue
			}
			if colliding++; colliding > maxColliding {
				break
			}
			if d.Matches(name, k) {
				consider(k)
			}
		}
	}
	for rdata := range query.RDatas(anchors) {
		for _, k := range all {
			if string(k.RData()) == string(rdata) && r.v.accepts(k.Algorithm) {
				consider(k)
			}
		}
	}
	if len(out) == 0 && matched > 0 && beyond == matched {
		return nil, because(edeAlgorithm, "%v: its keys are of a size that is not supported", name), true
	}
	return out, why, false
}
