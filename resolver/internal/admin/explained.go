package admin

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"time"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/pipeline"
	"github.com/sluice-dns/sluice/resolver/internal/policy"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
	"github.com/sluice-dns/sluice/resolver/internal/rpz"
	"github.com/sluice-dns/sluice/usercache"
)

// The stages of the path with an explanation at each. What they do not change is the stage's own.
type (
	explainedGate     struct{ e *explanation }
	explainedIdentity struct{ e *explanation }
	explainedPolicy   struct {
		*policy.Policy
		e *explanation
	}
	explainedZones struct {
		pipeline.Zones
		e *explanation
	}
	explainedLocal struct {
		pipeline.Local
		e *explanation
	}
	explainedAnswers struct {
		pipeline.Answers
		e *explanation
	}
	explainedFetch struct {
		pipeline.Fetcher
		e *explanation
	}
	explainedDNS64 struct {
		pipeline.DNS64
		e *explanation
	}
	explainedRebinding struct {
		pipeline.Rebinding
		e *explanation
	}
	explainedRender struct {
		pipeline.Renderer
		e *explanation
	}
)

// Early is the access list of the resolver, which on plain DNS comes before who asks.
func (x explainedGate) Early(q *query.Query) query.RefuseReason {
	x.e.restart()
	addr := q.Source.Addr()
	if !addr.IsValid() {
		if allowed := x.e.p.Gate.Allowed(); !q.Transport.Encrypted() && !everybody(allowed) {
			x.e.note("access", "none", "not judged without the client's address: over plain DNS access.allow lets in "+networks(allowed), "")
		}
		return query.NotRefused
	}
	allow, unlimited := x.e.p.Gate.Networks(addr)
	switch why := x.e.p.Gate.Early(q); {
	case why != query.NotRefused:
		x.e.note("access", "blocked", fmt.Sprintf("%v may not ask over plain DNS: access.allow has %s; refused", addr, networks(x.e.p.Gate.Allowed())),
			"access.allow with its network, or DoT or DoH with the device's id, by which it may ask from anywhere")
		return why
	case q.Client.Unlimited:
		x.e.note("access", "none", fmt.Sprintf("%v is in access.unlimited (%v)", addr, unlimited), "")
	case allow.IsValid():
		x.e.note("access", "none", fmt.Sprintf("%v is in access.allow (%v)", addr, allow), "")
	default:
		x.e.note("access", "none", fmt.Sprintf("%v is not in access.allow, and comes over %v, where a known device may ask from anywhere", addr, q.Transport), "")
	}
	return query.NotRefused
}

// Late is the user's own networks and rate.
func (x explainedGate) Late(q *query.Query) query.RefuseReason {
	p, addr := &q.Client.Profile, q.Source.Addr().Unmap()
	if d := p.Details; d != nil && len(d.AllowNetworks)+len(d.DenyNetworks) > 0 {
		if !addr.IsValid() {
			x.e.note("access", "none", "not judged without the client's address: "+ownNetworks(d), "")
		} else if !x.networks(d, addr) {
			return query.RefuseAccess
		}
	}
	if why := x.e.p.Gate.Admits(q); addr.IsValid() && why != query.NotRefused {
		return why
	}
	left, limited := x.e.p.Gate.Left(q)
	if !limited {
		return query.NotRefused
	}
	burst, whose := p.RateBurst, "of the user's devices together"
	if burst == 0 {
		burst = p.RateLimit
	}
	if p.Is(usercache.DeviceRate) {
		whose = "of the device"
	}
	limit := fmt.Sprintf("%d queries a second %s, %d at once", p.RateLimit, whose, burst)
	if left == 0 {
		x.e.note("rate limit", "blocked", limit+"; none left now: refused", "rate_limit, rate_burst")
		return query.RefuseUserRate
	}
	x.e.note("rate limit", "none", fmt.Sprintf("%s; %d left now", limit, left), "")
	return query.NotRefused
}

// networks tells whether the settings let an address ask.
func (x explainedGate) networks(d *usercache.Details, addr netip.Addr) bool {
	for _, n := range d.DenyNetworks {
		if n.Contains(addr) {
			x.e.note("access", "blocked", fmt.Sprintf("deny_networks has %v, which holds %v; refused", n, addr), fmt.Sprint("deny_networks-=", n))
			return false
		}
	}
	for _, n := range d.AllowNetworks {
		if n.Contains(addr) {
			x.e.note("access", "none", fmt.Sprintf("%v is in allow_networks (%v)", addr, n), "")
			return true
		}
	}
	if len(d.AllowNetworks) > 0 {
		x.e.note("access", "blocked", fmt.Sprintf("allow_networks has %s, and not %v; refused", networks(d.AllowNetworks), addr), fmt.Sprint("allow_networks+=", addr))
		return false
	}
	x.e.note("access", "none", fmt.Sprintf("%v is in none of deny_networks", addr), "")
	return true
}

func ownNetworks(d *usercache.Details) string {
	var parts []string
	if len(d.AllowNetworks) > 0 {
		parts = append(parts, "allow_networks has "+networks(d.AllowNetworks))
	}
	if len(d.DenyNetworks) > 0 {
		parts = append(parts, "deny_networks has "+networks(d.DenyNetworks))
	}
	return strings.Join(parts, ", ")
}

// networks lists some networks; of many the first.
func networks(ps []netip.Prefix) string {
	const most = 8
	if len(ps) == 0 {
		return "nobody"
	}
	var words []string
	for _, p := range ps[:min(len(ps), most)] {
		words = append(words, p.String())
	}
	if more := len(ps) - most; more > 0 {
		words = append(words, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(words, ", ")
}

// everybody reports whether there is no address that is in none of the networks.
func everybody(ps []netip.Prefix) bool {
	var families [2]bool
	for _, p := range ps {
		if p.Bits() == 0 {
			families[p.Addr().BitLen()/128] = true
		}
	}
	return families[0] && families[1]
}

// Identify makes the query the device's.
func (x explainedIdentity) Identify(q *query.Query) query.RefuseReason {
	identity, err := x.e.identify(q)
	if err != nil { // it was there before
		x.e.note("identity", "blocked", err.Error(), "")
		return query.RefuseDevice
	}
	p := &q.Client.Profile
	switch {
	case p.Is(usercache.DoHOnly) && q.Transport != query.DoH:
		x.e.note("identity", "blocked", fmt.Sprintf("%s; over %v nothing identifies it, for it may come by DoH alone", identity, q.Transport), "doh_only=false of the device")
		return query.RefuseDevice
	case p.Is(usercache.DoHOnly) || p.Is(usercache.HasCredentials) && q.Transport == query.DoH:
		identity += "; it has to show its password or token"
	}
	x.e.note("identity", "none", identity, "")
	return query.NotRefused
}

func (explainedIdentity) Unassigned(*query.Query) bool        { return false }
func (explainedIdentity) Prove(context.Context, *query.Query) {}

func (x explainedZones) Question(q *query.Query) (query.Verdict, bool) {
	x.e.turned(q)
	v, d, hit := x.e.p.Zones.ExplainQuestion(q)
	x.tell(q, v, d, hit)
	return v, hit
}

func (x explainedZones) Answer(q *query.Query, a *query.Answer, now clock.Instant) (query.Verdict, bool) {
	v, d, hit := x.e.p.Zones.ExplainAnswer(q, a, now)
	x.tell(q, v, d, hit)
	return v, hit
}

func (x explainedZones) tell(q *query.Query, v query.Verdict, d rpz.Decision, hit bool) {
	if !hit {
		return
	}
	s := &adminv1.ExplainStep{Step: "policy zone", Verdict: verdictText(v.Kind), List: d.Zone, Rule: d.Rule, Detail: d.Met,
		Change: "the zone without the rule, or policy_zones with action passthru for it; it holds for everybody"}
	switch {
	case v.Kind == query.Pass:
		s.Detail += "; no other rule of policy zones counts"
	case v.Kind == query.Truncated && q.Transport != query.UDP:
		s.Verdict, s.Detail = "none", s.Detail+"; it has come over TCP, as the rule wants"
	}
	x.e.put(s)
}

// turned tells of aliases that the question has been turned to since it was last judged.
func (e *explanation) turned(q *query.Query) {
	t := &q.Turn
	e.mu.Lock()
	from := e.aliases
	e.aliases, e.judged = t.NumAliases, true
	e.mu.Unlock()
	for i := from; i < t.NumAliases; i++ {
		how := "behind an alias"
		if t.Flatten {
			how = "and its data is given as the asked name's"
		}
		e.note("redirect", "rewritten", "the question is now "+t.Aliases[i].Target.String()+" "+how, "")
	}
}

func (x explainedPolicy) Question(q *query.Query) query.Verdict {
	e := x.e
	e.mu.Lock()
	first := !e.begun
	e.begun = true
	e.mu.Unlock()
	if first {
		x.leftOut(q)
	}
	e.turned(q)
	v := x.ExplainQuestion(q, func(s policy.Step) { e.told(s, "") })
	switch {
	case v.Kind == query.Pass && v.Why == policy.WhyNothing:
		e.note("question", "none", "nothing applies to "+q.Turn.Current.Name.String()+" "+dnswire.TypeText(q.Turn.Current.Type), "")
	case (v.Kind == query.Redirected || v.Kind == query.Flattened) && q.Turn.NumAliases == query.MaxTurns:
		e.note("redirect", "blocked", fmt.Sprintf("more than %d rewrites of one question; SERVFAIL", query.MaxTurns), "")
	}
	return v
}

// leftOut tells of rules that should count and do not.
func (x explainedPolicy) leftOut(q *query.Query) {
	tooMuch, missing := x.LeftOut(q)
	for _, what := range tooMuch {
		x.e.note("own rules", "none", what+" is left out: one user may not have so much", "")
	}
	if missing {
		x.e.note("own rules", "none", "some text of the user's has not reached this resolver yet; the one before counts, if it is known, or nothing", "")
	}
	cat, p := x.e.p.Users.Catalogue(), &q.Client.Profile
	var empty []string
	for _, c := range cat.Categories {
		if c.Lists == (usercache.ListSet{}) && p.Categories.Has(c.Number) {
			empty = append(empty, c.ID)
		}
	}
	if len(empty) > 0 {
		x.e.note("lists", "none", "the settings have categories that hold no list, and so no effect: "+strings.Join(empty, ", "), "lists for them: sluicectl category set "+empty[0]+" lists+=LIST")
	}
	for _, id := range x.Missing() {
		if n, ok := cat.ListNumber(id); ok && (p.Lists.Has(n) || p.Threats.Has(n)) {
			x.e.put(&adminv1.ExplainStep{Step: "lists", Verdict: "none", List: id,
				Detail: "the list's present text has not reached this resolver yet; it is judged by the one before, if there was one"})
		}
	}
}

func (x explainedPolicy) Answer(q *query.Query, a *query.Answer, sofar query.Verdict) query.Verdict {
	e := x.e
	v := x.ExplainAnswer(q, a, sofar, func(s policy.Step) { e.told(s, "answer: ") })
	if v.Kind == query.Pass || v.Kind == query.Allowed {
		e.mu.Lock()
		from := e.from
		e.mu.Unlock()
		e.note("answer", "none", fmt.Sprintf("given as %s: %s, %d records, %s%s", from, dnswire.RCodeText(a.RCode), a.AN, a.Status, leads(a)), "")
	}
	return v
}

func (x explainedLocal) Lookup(question *query.Question, now clock.Instant) (settled.Entry, bool) {
	e, ok := x.Local.Lookup(question, now)
	if ok {
		x.e.came("local data")
	}
	return e, ok
}

func (x explainedAnswers) Get(question *query.Question, now clock.Instant, buf []byte) (settled.Entry, bool, bool) {
	e, _, ok := x.Answers.Get(question, now, buf)
	if ok {
		x.e.came("cached")
	}
	return e, false, ok
}

func (x explainedFetch) Fetch(ctx context.Context, tree *query.Tree, question query.Question) (settled.Entry, error) {
	e, err := x.Fetcher.Fetch(ctx, tree, question)
	if err != nil {
		x.e.note("answer", "none", "it could not be resolved: "+err.Error(), "")
		return e, err
	}
	x.e.came("resolved")
	return e, nil
}

func (x explainedFetch) Stale(question query.Question) (settled.Entry, bool) {
	e, ok := x.Fetcher.Stale(question)
	if ok {
		x.e.came("cached, past its end")
	}
	return e, ok
}

func (x explainedDNS64) Wanted(q *query.Query, a *query.Answer) bool {
	ok := x.DNS64.Wanted(q, a)
	if ok {
		x.e.note("dns64", "rewritten", "it has no AAAA records; they are made of A records if there are any", "")
	}
	return ok
}

func (x explainedRebinding) Offends(q *query.Query, a *query.Answer) bool {
	ok := x.Rebinding.Offends(q, a)
	if ok {
		x.e.note("rebinding", "rewritten", "records with private addresses are left out, for everybody (rebinding.private_addresses)",
			"rebinding.private_domains with "+strings.TrimSuffix(q.Turn.Current.Name.String(), "."))
	}
	return ok
}

// Block adds to what decided how it is answered.
func (x explainedRender) Block(q *query.Query, b *query.Block, out []byte) int {
	n := x.Renderer.Block(q, b, out)
	what := dnswire.RCodeText(q.Outcome.RCode)
	if q.Outcome.RCode == dnswire.RCodeNoError {
		what = "no data"
		if n >= dnswire.HeaderLen && dnswire.ReadHeader(out).AN > uint16(q.Turn.NumAliases) {
			what = map[uint16]string{dnswire.TypeA: "0.0.0.0", dnswire.TypeAAAA: "::"}[q.Question.Type]
			if b.Mode == query.BlockCustom {
				what = map[uint16]string{dnswire.TypeA: b.IPv4.String(), dnswire.TypeAAAA: b.IPv6.String()}[q.Question.Type]
			}
		} else if b.Mode == query.BlockCustom {
			if unset := map[uint16]string{dnswire.TypeA: "block_ipv4", dnswire.TypeAAAA: "block_ipv6"}[q.Question.Type]; unset != "" {
				what += " (mode is custom_ip, and " + unset + " is not set)"
			}
		}
	}
	if b.Mode != query.BlockRefused {
		what += fmt.Sprintf(", TTL %d", uint32(b.TTL/time.Second))
	}
	x.e.answered(fmt.Sprintf("%s, EDE %d (%s)", what, b.EDE, b.Reason))
	return n
}

// Synth adds to what decided how it is answered.
func (x explainedRender) Synth(q *query.Query, s *query.Synth, out []byte) int {
	n := x.Renderer.Synth(q, s, out)
	what, ttl := dnswire.RCodeText(s.RCode), s.TTL
	var data []string
	for i := range s.RRs {
		ttl = s.RRs[i].TTL
		for d := range query.RDatas(s.RRs[i].Data) {
			data = append(data, dnswire.TypeText(s.RRs[i].Type)+" "+dnswire.Text(s.RRs[i].Type, d))
		}
	}
	switch {
	case len(data) > 8:
		what = strings.Join(append(data[:8], fmt.Sprintf("and %d more", len(data)-8)), ", ")
	case len(data) > 0:
		what = strings.Join(data, ", ")
	case s.RCode == dnswire.RCodeNoError:
		what = "no data"
	}
	x.e.answered(fmt.Sprintf("%s, TTL %d", what, ttl))
	return n
}

// answered says of the latest step how the query is answered for it.
func (e *explanation) answered(how string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if n := len(e.steps); n > 0 && !e.ended {
		s := e.steps[n-1]
		s.Detail = strings.TrimPrefix(s.Detail+"; answered "+how, "; ")
	}
}

// Error tells of questions that are answered by an error before anybody looks at them.
func (x explainedRender) Error(q *query.Query, rcode, ede uint16, text string, out []byte) int {
	x.e.mu.Lock()
	judged := x.e.judged
	x.e.mu.Unlock()
	if q.Outcome.Refused == query.NotRefused && !judged {
		x.e.note("question", "blocked", fmt.Sprintf("questions of type %s are not answered: %s", dnswire.TypeText(q.Question.Type), dnswire.RCodeText(rcode)), "")
	}
	return x.Renderer.Error(q, rcode, ede, text, out)
}
