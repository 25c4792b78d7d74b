package resolver

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/policy"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/rpz"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
)

// A PolicyZone is a response policy zone that applies to everybody.
type PolicyZone struct {
	Name Name
	// Open gives its text (zone-file syntax), File names it in errors.
	Open func() (io.ReadCloser, error)
	File string
	// Action overrides what the zone says; Target is the name that ActionCNAME answers with.
	Action PolicyAction
	Target Name
}

// A PolicyAction is what is done with a match in a policy zone.
type PolicyAction = rpz.Action

// The actions.
const (
	ActionGiven    = rpz.Given
	ActionDisabled = rpz.Disabled
	ActionPassThru = rpz.PassThru
	ActionDrop     = rpz.Drop
	ActionNXDomain = rpz.NXDomain
	ActionNoData   = rpz.NoData
	ActionTCPOnly  = rpz.TCPOnly
	ActionCNAME    = rpz.CNAME
)

// CheckPolicyZone reports why a zone cannot be used, or nil.
func CheckPolicyZone(z PolicyZone) error {
	_, err := loadPolicyZones([]PolicyZone{z}, slog.New(slog.DiscardHandler))
	return err
}

func loadPolicyZones(zones []PolicyZone, log *slog.Logger) (_ *rpz.Rules, err error) {
	var sources []rpz.Source
	for _, z := range zones {
		text, e := z.Open()
		if e != nil {
			return nil, fmt.Errorf("policy zone %v: %w", z.Name, e)
		}
		defer func() { err = errors.Join(err, text.Close()) }()
		sources = append(sources, rpz.Source{Name: z.Name, Text: &timed{Reader: text}, File: z.File, Action: z.Action, Target: z.Target})
	}
	rules, reports, err := rpz.Load(sources, policy.WhyPolicyZone)
	if err != nil {
		return nil, err
	}
	for _, r := range reports {
		log.Info("policy zone", "zone", r.Zone, "rules", r.Rules, "unused_records", r.Dropped)
		if r.Dropped > 0 {
			log.Warn("some records of a policy zone are not used", "zone", r.Zone, "records", r.Dropped, "first", r.First)
		}
	}
	return rules, nil
}

// policyZoneTime is how long a policy zone may take to be read; a hostile source could keep it reading for ever.
const policyZoneTime = 10 * time.Minute

// timed reads for policyZoneTime and then fails.
type timed struct {
	io.Reader
	begun bool
	until clock.Instant
}

func (t *timed) Read(p []byte) (int, error) {
	if !t.begun {
		t.begun, t.until = true, clock.Elapsed().Add(policyZoneTime)
	}
	n, err := t.Reader.Read(p)
	if clock.Elapsed() > t.until {
		return 0, fmt.Errorf("it was not read within %v", policyZoneTime)
	}
	return n, err
}

// SetPolicyZones replaces the policy zones while serving, with what they hold now. With an error nothing has changed.
// Nothing has to be forgotten: what is cached has not been judged.
func (r *Resolver) SetPolicyZones(zones []PolicyZone) error {
	if len(zones) == 0 {
		r.rules.rules.Store(nil)
		return nil
	}
	rules, err := loadPolicyZones(zones, r.o.Logger)
	if err != nil {
		return err
	}
	r.rules.rules.Store(rules)
	return nil
}

// policyZones gives the rules what they need to know of a query.
type policyZones struct {
	rules   atomic.Pointer[rpz.Rules] // nil: none
	rrsets  *rrcache.Cache
	servers *nameServers
}

func (z *policyZones) Question(q *query.Query) (v query.Verdict, hit bool) {
	if rules := z.rules.Load(); rules != nil {
		return rules.Question(q.Source.Addr(), q.Turn.Current.Name, q.Turn.Current.Type)
	}
	return v, false
}

func (z *policyZones) Alias(name dnsname.Name) bool {
	rules := z.rules.Load()
	return rules != nil && rules.Names(name)
}

func (z *policyZones) Answer(q *query.Query, a *query.Answer, now clock.Instant) (v query.Verdict, hit bool) {
	rules := z.rules.Load()
	if rules == nil {
		return v, false
	}
	facts, servers := z.behind(rules, q, a, now)
	return rules.Answer(facts, servers, q.Turn.Current.Name, q.Turn.Wanted())
}

// ExplainQuestion is Question, with what decided.
func (z *policyZones) ExplainQuestion(q *query.Query) (v query.Verdict, d rpz.Decision, hit bool) {
	if rules := z.rules.Load(); rules != nil {
		return rules.ExplainQuestion(q.Source.Addr(), q.Turn.Current.Name, q.Turn.Current.Type)
	}
	return v, d, false
}

// ExplainAnswer is Answer, with what decided.
func (z *policyZones) ExplainAnswer(q *query.Query, a *query.Answer, now clock.Instant) (v query.Verdict, d rpz.Decision, hit bool) {
	rules := z.rules.Load()
	if rules == nil {
		return v, d, false
	}
	facts, servers := z.behind(rules, q, a, now)
	return rules.ExplainAnswer(facts, servers, q.Turn.Current.Name, q.Turn.Wanted())
}

// behind is what an answer holds and, if rules want to know, the servers of the zones that it came through.
func (z *policyZones) behind(rules *rpz.Rules, q *query.Query, a *query.Answer, now clock.Instant) (facts query.Facts, servers []rpz.Server) {
	cur := &q.Turn.Current
	if a != nil {
		facts = a.Facts
	}
	if !rules.WantServers() {
		return facts, nil
	}
	add := func(name dnsname.Name) {
		found := z.servers.of(name, cur.View, a != nil && a.Stale, true, now)
		for _, n := range found.Names {
			servers = append(servers, rpz.Server{Name: n})
		}
		for _, addr := range found.Addrs {
			servers = append(servers, rpz.Server{Addr: addr})
		}
	}
	add(cur.Name)
	for off := 0; ; {
		kind, value, next, ok := facts.Next(off)
		if !ok {
			return facts, servers
		}
		if off = next; kind == query.FactAlias {
			add(dnsname.Name(value))
		}
	}
}

// wantServers reports whether rules for q want to know name servers.
func (z *policyZones) wantServers(q *query.Query) bool {
	rules := z.rules.Load()
	return rules != nil && !q.Turn.Exempt && rules.WantServers()
}

func (z *policyZones) Target(q *query.Question, now clock.Instant) (target dnsname.Name, ttl uint32, ok bool) {
	set, found := z.rrsets.Get(rrcache.Key{Name: q.Name, Type: dnswire.TypeCNAME, Class: dnswire.ClassIN, View: q.View, Subnet: q.Subnet}, now)
	to := dnswire.NameIn(dnswire.TypeCNAME, set.First(), 0)
	if !found.OK || to == nil || set.Status == query.Bogus {
		return "", 0, false
	}
	b := make([]byte, len(to))
	dnsname.Fold(b, to)
	return dnsname.Name(b), set.TTL, true
}
