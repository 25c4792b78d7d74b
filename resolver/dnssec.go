package resolver

import (
	"context"
	"fmt"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/ecs"
	"github.com/sluice-dns/sluice/resolver/internal/iterator"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
	"github.com/sluice-dns/sluice/resolver/internal/validator"
	"github.com/sluice-dns/sluice/resolver/internal/validator/trustanchor"
)

// DNSSECOptions steer validation; the zero value validates nothing.
type DNSSECOptions struct {
	Validate bool
	// Anchors is the text of a file of DS and DNSKEY records (zone-file syntax) that are trusted, AnchorsFile
	// its name in errors. With both empty the built-in anchors of the root are used; an empty text with a name
	// trusts nothing.
	Anchors, AnchorsFile string
	// Follow keeps the anchors current (RFC 5011), Signal tells their zones which keys are trusted here (RFC
	// 8145). State is the file that keeps what was learned; "" means nowhere.
	Follow, Signal bool
	State          string
	// Insecure are names at and below which nothing is validated (negative trust anchors, RFC 7646).
	Insecure []Name
	// Skew is how far the clocks of signers and ours may be apart.
	Skew time.Duration
	// SHA1 validates signatures of the algorithms 5 and 7 too, whose zones are insecure otherwise (RFC 9905).
	SHA1 bool
}

// CheckAnchors reports what is wrong with the text of a file of trust anchors, naming file and line, or nil.
var CheckAnchors = trustanchor.Check

// CheckHints reports what is wrong with the text of a file of root hints, or nil.
func CheckHints(text, file string) error {
	_, err := iterator.ParseHints(text, file)
	return err
}

// newValidator makes the validator of an engine whose caches and iterator stand.
func (e *engine) newValidator(o *Options) (*validator.Validator, error) {
	vo := validator.Options{Full: !o.Answers.Minimal, Epoch: e.answers.Epoch}
	d := &o.DNSSEC
	if !d.Validate {
		return validator.New(vo), nil
	}
	e.judges = true
	ao := trustanchor.Options{
		Text: d.Anchors, File: d.AnchorsFile, State: d.State, Skew: d.Skew,
		Dropped: e.distrust, Logger: o.Logger,
	}
	if d.Follow {
		ao.Fetch = e.fetchKeys
	}
	if d.Signal {
		ao.Tell = e.tell
	}
	var err error
	if e.anchors, err = trustanchor.New(ao); err != nil {
		return nil, err
	}
	vo.Fetch, vo.Cache, vo.Anchors = e.iterator, e.rrsets, e.anchors
	if e.subnets != nil {
		vo.Cache = subnetCache{e.rrsets, e.subnets}
	}
	vo.Skew, vo.SHA1 = d.Skew, d.SHA1
	if e.denials != nil {
		vo.Denials = e.denials
	}
	for _, n := range d.Insecure {
		vo.Insecure = append(vo.Insecure, validator.Insecure{Name: n})
	}
	e.negative = newNegativeAnchors(e, d.Insecure)
	return validator.New(vo), nil
}

// A subnetCache is the cache of RRsets to the validator of questions with subnets: names of zones that are not told
// of subnets have their data where the iterator keeps it.
type subnetCache struct {
	*rrcache.Cache
	subnets *ecs.Policy
}

func (c subnetCache) SetStatus(view query.View, subnet query.Subnet, set query.RRset, now clock.Instant) bool {
	if !c.subnets.Told(set.Name) {
		subnet = query.Subnet{}
	}
	return c.Cache.SetStatus(view, subnet, set, now)
}

func (c subnetCache) PutNegative(k rrcache.Key, kind rrcache.Kind, soa query.RRset, proof []query.RRset, status query.Status, now clock.Instant) bool {
	if !c.subnets.Told(k.Name) {
		k.Subnet = query.Subnet{}
	}
	return c.Cache.PutNegative(k, kind, soa, proof, status, now)
}

// runAnchors keeps the trust anchors current until ctx ends.
func (e *engine) runAnchors(ctx context.Context) {
	if e.anchors != nil {
		e.anchors.Run(ctx)
	}
}

// distrust forgets everything that was judged, because it is judged by other anchors now.
func (e *engine) distrust() {
	e.rrsets.Raise()
	e.answers.Raise()
	if e.denials != nil {
		e.denials.Clear()
	}
}

// expanded reports whether a set in an answer was made from a wildcard. The cache of RRsets does not give such
// sets to clients, for it lacks the proof that they apply, so the whole answer has to be kept.
func expanded(u *query.Unvalidated) bool {
	for i := range u.Answer {
		s := &u.Answer[i]
		for sig := range query.RDatas(s.Sigs) {
			if len(sig) > 3 && int(sig[3]) < s.Name.Labels() && !(s.Name.IsWildcard() && int(sig[3]) == s.Name.Labels()-1) {
				return true
			}
		}
	}
	return false
}

// forget makes what is known of the zones at a name, or with subtree of those below it too, be found out anew.
func (e *engine) forget(name dnsname.Name, subtree bool) {
	e.validate.Forget(name, subtree)
	if e.denials != nil {
		e.denials.Purge(name, subtree)
	}
}

// fetchKeys asks a zone's servers for its keys.
func (e *engine) fetchKeys(ctx context.Context, zone dnsname.Name) (query.RRset, error) {
	tree := query.NewTree(clock.Elapsed(), query.Budget{})
	u, err := e.iterator.Again(ctx, tree, query.Question{Name: zone, Type: dnswire.TypeDNSKEY, Class: dnswire.ClassIN, DO: true, CD: true}, nil)
	if err != nil {
		return query.RRset{}, err
	}
	if len(u.Answer) == 0 || !u.Answer[0].Is(zone, dnswire.TypeDNSKEY) {
		return query.RRset{}, fmt.Errorf("%v has no DNSKEY records", zone)
	}
	return u.Answer[0], nil
}

const typeNULL = 10 // RFC 8145 section 5.1 asks for it

// tell asks a question for the sake of being seen; nothing is expected of the answer.
func (e *engine) tell(ctx context.Context, name dnsname.Name) error {
	tree := query.NewTree(clock.Elapsed(), query.Budget{})
	_, err := e.iterator.Again(ctx, tree, query.Question{Name: name, Type: typeNULL, Class: dnswire.ClassIN, DO: true, CD: true}, nil)
	return err
}
