package admin

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/filter/rulelist"
	"github.com/sluice-dns/sluice/resolver/internal/policy"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
	"github.com/sluice-dns/sluice/usercache"
)

// Policies is an Explainer that asks the very engine that judges queries.
type Policies struct {
	Users  *usercache.Cache
	Policy *policy.Policy
	// Answer resolves a question as for a client, and says whether local data answers it. Nil leaves out what
	// answers lead to.
	Answer func(ctx context.Context, q query.Question) (e settled.Entry, local bool, err error)
	// Blob returns the text of a list, to quote rules from. Nil quotes none of lists.
	Blob func(sha256 [32]byte) ([]byte, bool)
}

// Explain judges a question as a device's, and then what its answer holds. Of a user named alone the first
// device is taken. Limits, access lists by network, policy zones and the client's address are not looked at, for
// there is no client.
func (p Policies) Explain(ctx context.Context, who Target, name dnsname.Name, typ uint16) ([]*adminv1.ExplainStep, error) {
	q := query.Query{Scratch: new(query.Scratch), Source: netip.AddrPortFrom(netip.IPv4Unspecified(), 0), Arrived: clock.Elapsed()}
	q.Question = query.Question{Name: name, Type: typ, Class: dnswire.ClassIN}
	first, err := p.identify(who, &q.Client)
	if err != nil {
		return nil, err
	}
	if !p.Policy.Ready(&q) {
		p.Policy.Prepare(ctx, &q)
	}
	e := explanation{p: p, profile: &q.Client.Profile, steps: []*adminv1.ExplainStep{first}}
	tooMuch, missing := p.Policy.LeftOut(&q)
	for _, what := range tooMuch {
		e.note("own rules", "none", what+" is left out: one user may not have so much")
	}
	if missing {
		e.note("own rules", "none", "some text of the user's has not reached this resolver yet and is left out")
	}
	q.Turn.Current = q.Question
	for {
		sofar := p.Policy.ExplainQuestion(&q, e.add)
		v := sofar
		if v.Kind == query.Pass || v.Kind == query.Allowed {
			if v.Kind == query.Pass && v.Why == policy.WhyNothing {
				e.note("question", "none", "nothing applies to "+q.Turn.Current.Name.String()+" "+dnswire.TypeText(q.Turn.Current.Type))
			}
			if v = e.answer(ctx, &q, sofar); v.Kind == query.Pass || v.Kind == query.Allowed {
				return e.steps, nil
			}
		}
		if v.Kind != query.Redirected && v.Kind != query.Flattened {
			return e.steps, nil
		}
		if !q.Turn.Alias(v.Target, 0) {
			e.note("redirect", "blocked", fmt.Sprintf("more than %d rewrites of one question; SERVFAIL", query.MaxTurns))
			return e.steps, nil
		}
		how := "behind an alias"
		if v.Kind == query.Flattened {
			how = "and its data is given as the asked name's"
		}
		e.note("redirect", "rewritten", "the question is now "+v.Target.String()+" "+how)
	}
}

// identify finds the device and says whose it is.
func (p Policies) identify(who Target, c *query.Client) (*adminv1.ExplainStep, error) {
	info, ok := p.Users.LookupUser(&who.User)
	if !ok {
		return nil, fmt.Errorf("user %q: %w at this resolver, which is at revision %d", who.User, ErrNotFound, p.Users.Dataset(usercache.Users).Status().Revision)
	}
	device := who.Device
	if device.IsZero() {
		if len(info.Devices) == 0 {
			return nil, fmt.Errorf("%w: user %q has no device, so no query can be this user's", ErrRefused, who.User)
		}
		device = info.Devices[0]
	}
	status := p.Users.LookupDevice(&device, &c.Profile)
	if status != usercache.Found {
		return nil, fmt.Errorf("%w: device %q is not served by its user's settings: %v", ErrRefused, device, status)
	}
	if c.Profile.UserID != who.User {
		return nil, fmt.Errorf("device %q of user %q: %w; it is user %q's", device, who.User, ErrNotFound, c.Profile.UserID)
	}
	c.Kind = query.Identified
	detail := fmt.Sprintf("device %s of user %s, revision %d", device, who.User, c.Profile.Revision)
	if info.Policy != "" {
		detail += ", policy " + info.Policy
	}
	return &adminv1.ExplainStep{Step: "identity", Verdict: "none", Detail: detail}, nil
}

// An explanation collects steps.
type explanation struct {
	p       Policies
	profile *usercache.Profile
	steps   []*adminv1.ExplainStep
}

func (e *explanation) note(step, verdict, detail string) {
	e.steps = append(e.steps, &adminv1.ExplainStep{Step: step, Verdict: verdict, Detail: detail})
}

func (e *explanation) add(s policy.Step) {
	e.steps = append(e.steps, &adminv1.ExplainStep{
		Step: s.Step, Verdict: verdictText(s.Verdict), List: s.List, Line: s.Line, Rule: e.rule(s), Detail: s.Detail, Change: s.Change,
	})
}

// verdictText maps the kinds of verdicts to the four that people are told of.
func verdictText(kind query.VerdictKind) string {
	switch kind {
	case query.Pass:
		return "none"
	case query.Allowed:
		return "allowed"
	case query.Redirected, query.Flattened, query.Synthesised:
		return "rewritten"
	case query.Blocked, query.Dropped, query.Refused, query.Truncated:
		return "blocked"
	}
	return kind.String()
}

// rule quotes the line that decided, if its text is at hand.
func (e *explanation) rule(s policy.Step) string {
	var text []byte
	var ok bool
	own := func(rt usercache.RuleText) {
		switch {
		case rt.Size > 0 && !rt.Blob:
			text, ok = e.p.Users.RuleText(e.profile, rt)
		case rt.Size > 0 && e.p.Blob != nil:
			text, ok = e.p.Blob(rt.SHA256)
		}
	}
	cat, d := e.p.Users.Catalogue(), e.profile.Details
	switch s.Text {
	case policy.NoText:
		return ""
	case policy.DeviceRules:
		own(d.DeviceRules)
	case policy.UserRules:
		own(d.UserRules)
	case policy.PolicyRules:
		own(d.PolicyRules)
	case policy.OwnList:
		for _, l := range d.OwnLists {
			if l.ID == s.List && e.p.Blob != nil {
				text, ok = e.p.Blob(l.SHA256)
			}
		}
	case policy.CatalogueList:
		if n, known := cat.ListNumber(s.List); known && e.p.Blob != nil {
			text, ok = e.p.Blob(cat.List(n).SHA256)
		}
	case policy.ServiceRules:
		for _, v := range cat.Services {
			if v.ID == s.List {
				text, ok = []byte(strings.Join(v.Rules, "\n")), true
			}
		}
	}
	if !ok {
		return ""
	}
	return lineOf(text, s.Line)
}

// lineOf returns a line as the rule compiler counts lines, in a form that can be shown.
func lineOf(text []byte, n uint32) string {
	line := strings.TrimSpace(rulelist.Line(text, n))
	return strings.ToValidUTF8(line[:min(len(line), 300)], "?")
}

// answer resolves the question and judges what comes.
func (e *explanation) answer(ctx context.Context, q *query.Query, sofar query.Verdict) query.Verdict {
	if e.p.Answer == nil {
		e.note("answer", "none", "its answer was not looked at")
		return query.Verdict{}
	}
	entry, local, err := e.p.Answer(ctx, q.Turn.Current)
	if err != nil {
		e.note("answer", "none", "it could not be resolved: "+err.Error())
		return query.Verdict{}
	}
	a := entry.View()
	q.Turn.Local = local
	judged := len(e.steps)
	v := e.p.Policy.ExplainAnswer(q, &a, sofar, e.add)
	if v.Kind != query.Pass && v.Kind != query.Allowed {
		for _, s := range e.steps[judged:] {
			s.Step = "answer: " + s.Step
		}
		return v
	}
	e.note("answer", "none", fmt.Sprintf("given as resolved: %s, %d records, %s%s", dnswire.RCodeText(a.RCode), a.AN, a.Status, leads(&a)))
	return v
}

// leads says what an answer leads to, which is what was judged.
func leads(a *query.Answer) string {
	var names []string
	for off := 0; ; {
		kind, value, next, ok := a.Facts.Next(off)
		if !ok {
			break
		}
		off = next
		switch kind {
		case query.FactAlias, query.FactTarget:
			names = append(names, dnsname.Name(value).String())
		case query.FactAddress:
			addr, _ := netip.AddrFromSlice(value)
			names = append(names, addr.String())
		case query.FactZone:
		}
	}
	switch {
	case len(names) == 0:
		return ""
	case len(names) > 16:
		names = append(names[:16], "…")
	}
	return "; it leads to " + strings.Join(names, ", ")
}
