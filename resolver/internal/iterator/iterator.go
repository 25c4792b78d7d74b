// Package iterator resolves a question by iteration: from the root hints, or the deepest zone cut already
// known, down to an answer (RFC 1034 section 5.3.3).
//
// It follows referrals, finds the addresses of name servers, hides from each server what it need not know
// (QNAME minimisation, RFC 9156), follows aliases, and tells an answer from the many things that servers send
// instead. Stub and forward zones are starting points of another kind. What is learned goes to the cache of
// RRsets, status Unchecked: nothing here is validated, and what Resolve returns is therefore query.Unvalidated.
// DNSSEC records are always asked for and kept, denials included.
//
// What a server says is believed within the zone it was asked for, and no further: records outside it are
// dropped; NS records and addresses count in referrals only; glue counts for names within the zone that gives
// it and answers no client; a delegation lives as long as its parent allowed, whatever the child says.
//
// Everything spends from the tree of the question (package query), and every loop has a bound of its own:
// maxReferrals, maxAliases, maxNames …, hardening section A. NXDOMAIN and NODATA are answers. When resolution
// ends without an answer the error is a *Failure, with an extended DNS error (RFC 8914) and a text; it wraps
// query.ErrLimit if the tree's budget ended it, or the context's error. Other failures are remembered as
// RFC 9520 wants.
//
// One Resolve runs in its caller's goroutine. Exchanges run in goroutines of their own, so that a second
// server can be asked while a first may still answer; all have ended when Resolve returns.
package iterator

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/crew"
	"github.com/sluice-dns/sluice/resolver/internal/denialcache"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
	"github.com/sluice-dns/sluice/resolver/internal/selection"
)

// Resolve finds the answer to q, in the cache or by asking, spending from tree. q is of class IN.
func (it *Iterator) Resolve(ctx context.Context, tree *query.Tree, q query.Question) (query.Unvalidated, error) {
	return it.resolve(ctx, tree, q, false, nil)
}

// Again finds the answer to q by asking for each name of it, though the cache or the memory of failures knows
// it. The servers in avoid are not asked for the answers: it is for data that expires soon or turned out to be
// bogus.
func (it *Iterator) Again(ctx context.Context, tree *query.Tree, q query.Question, avoid []netip.AddrPort) (query.Unvalidated, error) {
	return it.resolve(ctx, tree, q, true, avoid)
}

// Cached answers q from the cache alone, or reports that it cannot. With a staleTTL above 0 data past its end
// will do; it then has that TTL, and the result says so.
func (it *Iterator) Cached(q query.Question, staleTTL uint32) (query.Unvalidated, bool) {
	if q.Class != dnswire.ClassIN || q.Name == "" || metaType(q.Type) {
		return query.Unvalidated{}, false
	}
	r := &run{it: it, q: q, now: clock.Elapsed(), offline: true, staleTTL: staleTTL}
	out, err := r.resolve()
	return out, err == nil
}

// An Exchange asks one server one question. Package exchange has it.
type Exchange interface {
	Ask(ctx context.Context, tree *query.Tree, a query.Ask) (query.Reply, error)
}

// Options is what an Iterator needs. Every other zero field means the default stated on it.
type Options struct {
	// RRsets, Servers and Exchange must be set.
	RRsets   *rrcache.Cache
	Servers  *selection.Selector
	Exchange Exchange

	// Hints are the servers of the root. Nil means the built-in ones.
	Hints []Hint
	// Prime asks a root server for the root's servers before the hints are used, and again when that answer
	// has expired (RFC 8109).
	Prime bool
	// PrimeOnce leaves it at the first such answer: when that has expired the hints are used.
	PrimeOnce bool

	// NoIPv4 and NoIPv6 leave a family of addresses unused.
	NoIPv4, NoIPv6 bool
	// Port is where authoritative servers listen. Zero means 53.
	Port uint16
	// DoNotQuery lists addresses that no delegation may make us ask. Nil means DefaultDoNotQuery; empty means
	// none. Addresses of Zones are exempt.
	DoNotQuery []netip.Prefix

	Minimise Minimise
	// NoCase0x20 keeps names in lower case (see query.Ask).
	NoCase0x20 bool
	// LooseGlue believes glue for names outside the zone that gives it, for that one delegation.
	LooseGlue bool
	// UDPSize is what EDNS offers. Zero means 1232.
	UDPSize uint16

	// Denied says what follows for a question from proofs seen before (RFC 8198). Nil: nothing.
	Denied func(view query.View, name dnsname.Name, typ uint16, now clock.Instant) denialcache.Denial

	// LocalRoot is asked in the place of the root's servers. Nil: they are asked.
	LocalRoot Root

	// Told says whether the servers of a zone are told the subnet of a question (RFC 7871), and whether the names in it
	// may have data for one subnet alone. Nil: nobody is told.
	Told func(zone dnsname.Name) bool

	// Zones are the stub and forward zones of all views.
	Zones []Zone
}

// Minimise says how much of a name servers are told (RFC 9156).
type Minimise uint8

const (
	// Relaxed minimises, and tells all where a server answers the minimised question wrongly.
	Relaxed Minimise = iota
	// Strict believes every answer to a minimised question.
	Strict
	// Off tells every server the whole name.
	Off
)

// A Zone is a stub or forward zone: names at or below Name, in the given view, are asked for elsewhere.
type Zone struct {
	Name dnsname.Name
	View query.View
	// Servers are authoritative for a stub zone.
	Servers []netip.AddrPort
	// Forward asks the resolvers of a forward zone; nil for a stub zone.
	Forward Forwarder
	// First resolves by iteration when no resolver of a forward zone answers.
	First bool
}

// An Iterator resolves questions. It is safe for concurrent use.
type Iterator struct {
	opts     Options // constant after New
	zones    atomic.Pointer[zoneTable]
	hints    hintSet
	failures memory[question]
	names    memory[dnsname.Name] // NS names that could not be resolved
	broken   memory[dnsname.Name] // zones whose servers answer minimised questions wrongly
	loads    loads

	// dnames is false until a DNAME was stored: most resolvers see few, and looking for one costs a lookup for
	// each ancestor of a name.
	dnames     atomic.Bool
	priming    atomic.Bool
	primed     atomic.Bool  // once
	primeAfter atomic.Int64 // a clock.Instant
	families   [2]family
	crew       crew.Crew // exchanges
}

// New returns an Iterator.
func New(o Options) *Iterator {
	if o.Hints == nil {
		o.Hints = DefaultHints()
	}
	if o.Port == 0 {
		o.Port = 53
	}
	if o.DoNotQuery == nil {
		o.DoNotQuery = DefaultDoNotQuery()
	}
	it := &Iterator{opts: o, hints: newHintSet(o.Hints)}
	it.families[ipv6].failed.Store(doubtAfter)
	it.SetZones(o.Zones)
	return it
}

// Limits of one resolution. The tree's budgets come on top.
const (
	maxReferrals = 30 // followed on the way to one name
	maxDepth     = 6  // of looking for addresses of name servers of name servers …
	maxNames     = 13 // NS names considered of a delegation
	maxPerName   = 8  // addresses used of one NS name
	maxAddresses = 32 // addresses used of a delegation
	maxRound     = 2  // NS names resolved before the servers found are tried
	maxGlueless  = 6  // NS names resolved for one delegation
)

// tooLong is how long a resolution took that came to no end in the time of its tree for its own sake, so that
// another tree's time would not be enough either: that is a failure of the question (RFC 9520 section 3.2).
const tooLong = 6 * time.Second

// A question is the key of what is remembered about questions.
type question struct {
	name   dnsname.Name
	typ    uint16
	view   query.View
	subnet query.Subnet
}

func (it *Iterator) resolve(ctx context.Context, tree *query.Tree, q query.Question, fresh bool, avoid []netip.AddrPort) (query.Unvalidated, error) {
	if q.Class != dnswire.ClassIN || q.Name == "" || metaType(q.Type) {
		return query.Unvalidated{}, &Failure{Code: edeNotSupported, Text: "only data of class IN can be resolved"}
	}
	now := clock.Elapsed()
	key := question{q.Name, q.Type, q.View, q.Subnet}
	if !fresh {
		if text, failing := it.failures.active(key, now); failing {
			if out, ok := it.Cached(q, 0); ok { // learned since, or what could not be had anew
				return out, nil
			}
			return query.Unvalidated{}, &Failure{Code: edeCachedError, Text: text}
		}
	}
	r := &run{it: it, ctx: ctx, tree: tree, now: now, q: q, fresh: fresh, avoid: avoid, family: &kin{}}
	out, err := r.resolve()
	if err == nil {
		it.failures.forget(key)
		return out, nil
	}
	var f *Failure
	if !errors.As(err, &f) {
		f = &Failure{Code: edeOther, Text: err.Error(), err: err}
	}
	late := errors.Is(f.err, context.DeadlineExceeded) && clock.Elapsed().Sub(now) >= tooLong
	if (f.memorable() || late) && len(avoid) == 0 { // that nobody else could be asked says nothing of those avoided
		b := questionBackoff
		if r.family.circular {
			b = circleBackoff
		}
		it.failures.failed(key, f.Text, r.now, b)
	}
	return query.Unvalidated{}, f
}

// metaType reports types that are no data (RFC 6895 section 3.1), ANY excepted.
func metaType(typ uint16) bool {
	return typ == 0 || typ == dnswire.TypeOPT || typ >= 249 && typ <= dnswire.TypeMAILA
}

// A run resolves one question: the client's, or that for the address of a name server.
type run struct {
	it    *Iterator
	ctx   context.Context
	tree  *query.Tree
	now   clock.Instant // as of the last wait
	q     query.Question
	fresh bool // ask, though the cache knows
	avoid []netip.AddrPort
	// offline: only the cache is used; staleTTL, if above 0, is the TTL of what it has past its end.
	offline  bool
	staleTTL uint32
	parent   *run // which waits for this one; nil for the client's
	glueDoes bool // the parent run wants an address to ask, for which glue is good enough
	depth    int
	family   *kin

	out query.Unvalidated
}

// kin is what all runs of one Resolve share.
type kin struct {
	// dead are NS names that gave no address; they are not tried again for the same question.
	dead map[dnsname.Name]bool
	// referred are zones of which the parent's referral is as new as this Resolve, and the servers it gave: they count
	// for the rest of it, though the cache may hold them no longer (a TTL of 0, a purge).
	referred map[dnsname.Name][]netip.AddrPort
	// circular is true once the address of a name server turned out to depend on itself.
	circular bool
}

// resolve follows aliases from the name asked to the data.
func (r *run) resolve() (query.Unvalidated, error) {
	r.out = query.Unvalidated{Question: r.q, Cached: true}
	aliases := 0
	for name := r.q.Name; ; {
		res, err := r.name(name)
		if err != nil {
			return query.Unvalidated{}, err
		}
		if r.fresh && res.last != name && (res.kind == kindNoData || res.kind == kindNXDomain) {
			res.kind = kindAlias // what was said of the target beside the alias may be what was wrong: ask for it alone
		}
		for i := range res.chain {
			s := &res.chain[i]
			if s.Type == dnswire.TypeCNAME && (res.kind != kindAnswer || i < len(res.chain)-1) {
				aliases++
				if r.followed(s.Name) {
					return query.Unvalidated{}, &Failure{Code: edeOther, Text: fmt.Sprintf("%v: aliases go round in a circle", s.Name), final: true}
				}
			}
			if s.Type == dnswire.TypeDNAME && has(r.out.Answer, s) {
				continue // one DNAME may stand for several aliases
			}
			r.out.Answer = append(r.out.Answer, *s)
		}
		if aliases > maxAliases {
			return query.Unvalidated{}, &Failure{Code: edeOther, Text: fmt.Sprintf("%v: more than %d aliases in a row", r.q.Name, maxAliases), final: true}
		}
		r.addAuthority(res)
		switch res.kind {
		case kindAlias:
			name = res.last
			continue
		case kindNXDomain:
			r.out.RCode = dnswire.RCodeNXDomain
		case kindYXDomain:
			r.out.RCode = dnswire.RCodeYXDomain
		}
		if r.out.Zone == "" { // the last name came from the cache
			if zone, _, _, ok := r.it.opts.RRsets.Delegation(res.last, r.q.View, r.now); ok {
				r.out.Zone = zone
			}
		}
		return r.out, nil
	}
}

// followed reports whether an alias at name was followed before.
func (r *run) followed(name dnsname.Name) bool {
	for i := range r.out.Answer {
		if r.out.Answer[i].Is(name, dnswire.TypeCNAME) {
			return true
		}
	}
	return false
}

func (r *run) addAuthority(res response) {
	add := func(s *query.RRset) {
		for i := range r.out.Authority {
			if r.out.Authority[i].Is(s.Name, s.Type) {
				return
			}
		}
		r.out.Authority = append(r.out.Authority, *s)
	}
	if res.soa != nil && (res.kind == kindNoData || res.kind == kindNXDomain) {
		add(res.soa)
	}
	for i := range res.proof {
		add(&res.proof[i])
	}
}

// name finds what there is to know of one name: data, an alias to follow, or its absence.
func (r *run) name(name dnsname.Name) (response, error) {
	if !r.fresh {
		if res, ok := r.cached(name, r.q.Type); ok {
			r.out.Zone = ""
			return res, nil
		}
		if res, ok := r.inferred(name, r.q.Type); ok {
			r.out.Zone, r.out.Inferred = "", true
			return res, nil
		}
	}
	if r.offline {
		return response{}, errNotCached
	}
	r.out.Cached = false
	return r.iterate(name, r.q.Type)
}

var errNotCached = errors.New("not in the cache")

// iterate goes from the deepest known cut above name down to its zone.
func (r *run) iterate(name dnsname.Name, typ uint16) (response, error) {
	z := r.start(name, typ, "")
	again := false
	for range maxReferrals + 1 { // and what the last of them leads to
		res, err := r.atZone(z, name, typ)
		if err != nil {
			switch {
			case !recoverable(err):
				return response{}, err
			case z.replaced:
				z = r.start(name, typ, "")
				continue
			case z.static && z.first:
				z = r.startPublic(name, typ)
				continue
			case z.cached && !again && z.name != dnsname.Root && !r.referred(z.name):
				// The servers we knew are of no use: they may have moved, or their glue may have expired
				// before the delegation did. The parent knows.
				again = true
				z = r.start(name, typ, z.name)
				continue
			}
			return response{}, err
		}
		if res.kind != kindReferral {
			r.settledBy(z, &res)
			return res, nil
		}
		glue := r.glueFor(z, &res, name, typ)
		z = r.descend(z, res)
		if glue != nil {
			return response{kind: kindAnswer, last: name, chain: []query.RRset{*glue}}, nil
		}
	}
	return response{}, &Failure{Code: edeOther, Text: fmt.Sprintf("%v: more than %d referrals", name, maxReferrals), final: true}
}

// atZone asks the servers of z about name until they answer, or refer to a zone below.
func (r *run) atZone(z *cut, name dnsname.Name, typ uint16) (response, error) {
	m := minimiser{zone: z.name, name: name, at: z.name, off: r.it.opts.Minimise == Off || z.pool != nil}
	if !m.off && r.it.opts.Minimise == Relaxed {
		_, m.off = r.it.broken.active(z.name, r.now)
	}
	fallback := false
	for {
		m.step()
		if m.at == name {
			res, err := r.ask(z, name, typ, false)
			if err == nil && res.kind != kindReferral {
				r.keep(z, &res, typ, res.subnet)
				if res.subnet.Family == 0 && r.tells(name) { // it holds for everybody, those who are asked about here too
					r.keep(z, &res, typ, query.Subnet{Family: r.q.Subnet.Family})
				}
				if fallback && res.kind != kindNXDomain {
					r.it.broken.failed(z.name, "", r.now, brokenBackoff)
				}
			}
			return res, err
		}
		switch r.known(m.at) {
		case exists:
			continue
		case denied:
			if n, ok := r.provenDenial(m.at, z.name); ok {
				return denial(name, &n), nil // nothing is below a name that does not exist (RFC 8020)
			}
			if r.it.opts.Minimise == Strict {
				break // the question below is answered by the cache of some server, at worst
			}
			m.off, fallback = true, true
			continue
		}
		res, err := r.ask(z, m.at, dnswire.TypeA, true)
		if err != nil {
			if !recoverable(err) || r.it.opts.Minimise == Strict {
				return res, err
			}
			m.off, fallback = true, true
			continue
		}
		if res.kind == kindNXDomain && res.last != m.at {
			res.kind = kindAlias // it is the target that does not exist
		}
		switch res.kind {
		case kindReferral:
			return res, nil
		case kindNXDomain:
			r.keep(z, &res, dnswire.TypeA, query.Subnet{})
			if r.it.opts.Minimise == Strict || res.proven && len(res.chain) == 0 || r.secureZone(z.name) {
				res.last = name
				return res, nil // nothing is below a name that does not exist (RFC 8020)
			}
			m.off, fallback = true, true
		case kindYXDomain:
			m.off = true
		default:
			r.keep(z, &res, dnswire.TypeA, query.Subnet{})
			m.off = len(res.chain) > 0 && res.chain[0].Type == dnswire.TypeDNAME
		}
	}
}

// recoverable reports whether asking other servers might still help.
func recoverable(err error) bool {
	var f *Failure
	return errors.As(err, &f) && f.err == nil && !f.final
}

// spent reports whether an error ends all work for the question, rather than one way of doing it.
func spent(err error) bool {
	var f *Failure
	return !errors.As(err, &f) || f.err != nil
}

// left returns how much of the tree's time is left.
func (r *run) left() time.Duration { return r.tree.Deadline.Sub(clock.Elapsed()) }
