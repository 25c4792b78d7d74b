package resolver

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/answercache"
	"github.com/sluice-dns/sluice/resolver/internal/denialcache"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/ecs"
	"github.com/sluice-dns/sluice/resolver/internal/exchange"
	"github.com/sluice-dns/sluice/resolver/internal/iterator"
	"github.com/sluice-dns/sluice/resolver/internal/limits"
	"github.com/sluice-dns/sluice/resolver/internal/localroot"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
	"github.com/sluice-dns/sluice/resolver/internal/selection"
	"github.com/sluice-dns/sluice/resolver/internal/validator"
	"github.com/sluice-dns/sluice/resolver/internal/validator/trustanchor"
)

// RecursionOptions steer iterative resolution; the zero value is the public tree over IPv4 and IPv6.
type RecursionOptions struct {
	// RootHints is the text of a root hints file (zone-file syntax); "" means the built-in ones. HintsFile
	// names it in errors.
	RootHints, HintsFile string
	// LocalRoot is asked in the place of the root's servers (RFC 8806); nil means that they are asked.
	LocalRoot      *LocalRoot
	Prime          bool
	PrimeOnce      bool // not again when the root's servers have expired
	NoIPv4, NoIPv6 bool
	// UpstreamPort is where authoritative servers listen; 0 means 53.
	UpstreamPort uint16
	// DoNotQuery lists networks that are never asked, besides those of BuiltInDoNotQuery.
	DoNotQuery        []netip.Prefix
	BuiltInDoNotQuery bool
	Minimise          Minimise
	NoCase0x20        bool
	LooseGlue         bool
	UDPSize           uint16
	Zones             []Zone
	// ECS says which zones' servers are told the networks of clients (RFC 7871); the zero value tells nobody. Its Relays
	// are those of IdentifyOptions.
	ECS ECSOptions
	// UpstreamTLS is what DoT and DoH connections to resolvers of forward zones start from; nil means the
	// system's roots.
	UpstreamTLS *tls.Config
	// Outgoing are the source addresses of upstream queries; none means that the kernel chooses.
	Outgoing []netip.Addr
	// QueryTimeout is how long one question may take; 0 means 8 s. ClientWaitUDP is how long after its
	// arrival a UDP query is still answered; 0 means 5 s.
	QueryTimeout, ClientWaitUDP time.Duration
}

// Words of packages inside, for those who fill in Options.
type (
	Minimise  = iterator.Minimise
	Transport = exchange.Transport
	Name      = dnsname.Name
	// ECSOptions say which zones are told of clients' networks, and how much.
	ECSOptions = ecs.Options
)

// QNAME minimisation modes, and what else callers need to fill in Options.
const (
	MinimiseRelaxed = iterator.Relaxed
	MinimiseStrict  = iterator.Strict
	MinimiseOff     = iterator.Off
)

// Dialing makes a Transport of a dial function such as that of an in-memory network.
var Dialing = exchange.Dialing

// ParseName reads a domain name in presentation form.
func ParseName(s string) (Name, error) { return dnsname.Parse(s) }

// CacheOptions bound what is kept. The size is the limit "cache".
type CacheOptions struct {
	MinTTL, MaxTTL, MaxNegativeTTL time.Duration
	// MaxStale is how long expired data is kept for when servers cannot be reached (RFC 8767); 0 means not
	// at all. StaleTTL is the TTL it is given with; 0 means 30 s.
	MaxStale, StaleTTL time.Duration
	// StaleAfter is how long a client waits for fresh data while there is stale data. Zero: not at all.
	StaleAfter time.Duration
	NoPrefetch bool
	// Aggressive answers from proofs of other names (RFC 8198), if answers are validated.
	Aggressive bool
	// File is where RRsets are kept while the process does not run; "" means nowhere.
	File string
}

// An engine resolves questions: caches, iterator, validator. It implements what the pipeline wants of a
// Fetcher and of Answers.
type engine struct {
	key      dnsname.Key
	rrsets   *rrcache.Cache
	answers  *answercache.Cache
	servers  *selection.Selector
	exchange *exchange.Exchange
	root     *localroot.Copy
	iterator *iterator.Iterator
	zones    *zones
	validate *validator.Validator
	subnets  *ecs.Policy        // nil: nobody is told of clients' networks
	anchors  *trustanchor.Store // nil: nothing is validated
	negative *negativeAnchors   // nil: nothing is validated
	staleTTL uint32             // seconds; 0: nothing stale is given
	judges   bool               // answers are validated
	denials  *denialcache.Cache // nil: proofs are used for what they were asked for
	asked    doorkeeper
	holds    holds
	claims   claims
	file     string // where RRsets are kept; "" is nowhere
	roots    string // the text of the root hints
}

// answerShare is the part of the cache budget that answers get; RRsets get the rest but for denialShare, because
// answers can be made again from them.
const answerShare = 4

func rrsetShare(bytes int64) int64 { return bytes - bytes/answerShare - bytes/denialShare }

func newEngine(o *Options) (*engine, error) {
	e := &engine{key: dnsname.NewKey(o.NameKey), file: o.Cache.File, roots: o.Recursion.RootHints}
	if o.Cache.MaxStale > 0 {
		e.staleTTL = max(uint32(o.Cache.StaleTTL/time.Second), 1)
		if o.Cache.StaleTTL == 0 {
			e.staleTTL = 30
		}
	}
	var seed [24]byte
	if _, err := rand.Read(seed[:]); err != nil {
		return nil, fmt.Errorf("reading random bytes: %w", err)
	}
	bytes := o.Limits.Value(limits.Cache)
	e.answers = answercache.New(answercache.Options{
		Bytes: bytes / answerShare, Seed: binary.LittleEndian.Uint64(seed[16:]),
		MaxStale: o.Cache.MaxStale, NoPrefetch: o.Cache.NoPrefetch,
	})
	e.rrsets = rrcache.New(rrcache.Options{
		Bytes: rrsetShare(bytes), Key: dnsname.NewKey([16]byte(seed[:16])),
		MinTTL: o.Cache.MinTTL, MaxTTL: o.Cache.MaxTTL, MaxNegativeTTL: o.Cache.MaxNegativeTTL, MaxStale: o.Cache.MaxStale,
	})
	transport := o.Transport
	if transport == nil {
		var err error
		if transport, err = exchange.NewSockets(exchange.SocketOptions{Sources: o.Recursion.Outgoing}); err != nil {
			return nil, err
		}
	}
	e.exchange = exchange.New(exchange.Options{Transport: transport, UDPSize: o.Recursion.UDPSize})
	e.servers = selection.New(selection.Options{})
	var hints []iterator.Hint // nil: the built-in ones
	if o.Recursion.RootHints != "" {
		var err error
		if hints, err = iterator.ParseHints(o.Recursion.RootHints, o.Recursion.HintsFile); err != nil {
			return nil, err
		}
	}
	var never []netip.Prefix
	if o.Recursion.BuiltInDoNotQuery {
		never = iterator.DefaultDoNotQuery()
	}
	never = append(never, o.Recursion.DoNotQuery...)
	if never == nil {
		never = []netip.Prefix{} // none, rather than the iterator's default
	}
	denied := e.newDenials(o)
	about := o.Recursion.ECS
	about.Relays = o.Identify.Relays
	var err error
	if e.subnets, err = ecs.New(about); err != nil {
		return nil, fmt.Errorf("client subnets: %w", err)
	}
	var told func(Name) bool
	if e.subnets != nil {
		told = e.subnets.Told
	}
	e.root = localroot.New(o.Logger)
	e.root.Set(o.Recursion.LocalRoot)
	e.iterator = iterator.New(iterator.Options{
		RRsets: e.rrsets, Servers: e.servers, Exchange: e.exchange,
		Hints: hints, Prime: o.Recursion.Prime, PrimeOnce: o.Recursion.PrimeOnce,
		NoIPv4: o.Recursion.NoIPv4, NoIPv6: o.Recursion.NoIPv6, Port: o.Recursion.UpstreamPort,
		DoNotQuery: never, Minimise: o.Recursion.Minimise, NoCase0x20: o.Recursion.NoCase0x20,
		LooseGlue: o.Recursion.LooseGlue, UDPSize: o.Recursion.UDPSize, Denied: denied, Told: told,
		LocalRoot: e.root,
	})
	e.zones = newZones(e, transport, o.Recursion.UpstreamTLS)
	if err := e.zones.set(o.Recursion.Zones); err != nil {
		return nil, err
	}
	if e.validate, err = e.newValidator(o); err != nil {
		return nil, err
	}
	return e, nil
}

// Fetch resolves a question, settles the answer and keeps it. An answer made wholly of cached data has been
// asked for before, and so has one that takes the place of an older one: these are worth a place among the
// settled answers. One just fetched is not yet: its RRsets are kept, and most names are asked for once.
func (e *engine) Fetch(ctx context.Context, tree *query.Tree, q query.Question) (settled.Entry, error) {
	if entry, ok := e.held(q); ok {
		return entry, nil
	}
	if err := e.validate.Failing(&q, clock.Elapsed()); err != nil {
		return settled.Entry{}, err
	}
	epoch := e.answers.Epoch()
	u, err := e.iterator.Resolve(ctx, tree, q)
	if err != nil {
		return e.insteadOf(err, q)
	}
	known := e.recovered(q)
	return e.settle(ctx, tree, &u, u.Cached || known, epoch)
}

// settle seals an answer, and keeps it if it should be kept and the caches have not been told to forget since epoch.
func (e *engine) settle(ctx context.Context, tree *query.Tree, u *query.Unvalidated, keep bool, epoch uint32) (settled.Entry, error) {
	now := clock.Elapsed()
	entry, err := e.validate.Validate(ctx, tree, u, now)
	if err != nil {
		return settled.Entry{}, err
	}
	if u.Inferred { // from what is cached, though it may have been asked for never before
		keep = e.asked.before(answercache.Hash(&e.key, &u.Question))
	} else {
		keep = keep || e.judges && expanded(u)
	}
	if keep && e.answers.Epoch() == epoch {
		if !u.Cached { // no longer than the parents of its zones have granted them
			for i := range u.Answer {
				entry.Until(e.rrsets.Lease(u.Answer[i].Name, u.Answer[i].Type, u.Question.View, now))
			}
		}
		if u.Until != 0 {
			entry.Until(u.Until)
		}
		e.answers.Put(&u.Question, answercache.Hash(&e.key, &u.Question), entry, now)
	}
	return entry, nil
}

// Get looks a settled answer up.
func (e *engine) Get(q *query.Question, now clock.Instant, buf []byte) (settled.Entry, bool, bool) {
	entry, found := e.answers.Get(q, answercache.Hash(&e.key, q), buf, now)
	if !found.OK {
		return settled.Entry{}, false, false // what is past its end is given by Stale, which says so in the answer
	}
	return entry, found.Due && found.Claim(), true
}

// close ends what the engine holds open; nothing may be resolving any more.
func (e *engine) close() {
	e.zones.close()
	e.exchange.Close()
}
