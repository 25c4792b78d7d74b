package admin

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"strings"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/policy"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
	"github.com/sluice-dns/sluice/usercache"
)

// Policies is an Explainer that asks the very engine that judges queries.
type Policies struct {
	Users  *usercache.Cache
	Policy *policy.Policy
	// Answer resolves a question as for a client. Nil leaves out what answers lead to.
	Answer func(ctx context.Context, q query.Question) (settled.Entry, error)
	// Blob returns the text of a list, to quote rules from. Nil quotes none of lists.
	Blob func(sha256 [32]byte) ([]byte, bool)
}

// Explain judges a question as a device's, and then what its answer holds. Of a user named alone the first
// device is taken. Limits, access lists and the client's address are not looked at, for there is no client.
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
	q.Turn.Current = q.Question
	for range query.MaxTurns {
		v := p.Policy.ExplainQuestion(&q, e.add)
		switch v.Kind {
		case query.Redirected, query.Flattened:
			q.Turn.Current.Name = v.Target
			e.note("redirect", "rewritten", "the question is now "+v.Target.String())
			continue
		case query.Pass:
			return e.steps, e.answer(ctx, &q, v)
		case query.Allowed:
			if v.Why == policy.WhyList || v.Why == policy.WhyOwnList {
				e.note("answer", "allowed", "an exception of a list; the answer is not judged")
			}
			return e.steps, nil
		case query.Blocked, query.Synthesised, query.Dropped, query.Refused, query.Truncated:
			return e.steps, nil
		}
	}
	e.note("redirect", "blocked", fmt.Sprintf("more than %d rewrites of one question; SERVFAIL", query.MaxTurns))
	return e.steps, nil
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
		Step: s.Step, Verdict: verdictText(s.Verdict), List: s.List, Line: s.Line, Rule: e.rule(s), Detail: s.Detail,
	})
}

// verdictText maps the kinds of verdicts to the four that people are told of.
func verdictText(kind string) string {
	switch kind {
	case query.Pass.String():
		return "none"
	case query.Redirected.String(), query.Flattened.String(), query.Synthesised.String():
		return "rewritten"
	case query.Dropped.String(), query.Refused.String(), query.Truncated.String():
		return "blocked"
	}
	return kind
}

// rule quotes the line that decided, if its text is at hand.
func (e *explanation) rule(s policy.Step) string {
	if s.Line == 0 {
		return ""
	}
	var text []byte
	var ok bool
	own := func(t func(*usercache.Details) usercache.RuleText) {
		d := e.profile.Details
		if d == nil {
			return
		}
		switch rt := t(d); {
		case rt.Size > 0 && !rt.Blob:
			text, ok = e.p.Users.RuleText(e.profile, rt)
		case rt.Size > 0 && e.p.Blob != nil:
			text, ok = e.p.Blob(rt.SHA256)
		}
	}
	switch s.Step {
	case policy.WhyText(policy.WhyDeviceRule):
		own(func(d *usercache.Details) usercache.RuleText { return d.DeviceRules })
	case policy.WhyText(policy.WhyUserRule):
		own(func(d *usercache.Details) usercache.RuleText { return d.UserRules })
	case policy.WhyText(policy.WhyPolicyRule):
		own(func(d *usercache.Details) usercache.RuleText { return d.PolicyRules })
	case policy.WhyText(policy.WhyList), policy.WhyText(policy.WhyThreat):
		cat := e.p.Users.Catalogue()
		if n, known := cat.ListNumber(s.List); known && e.p.Blob != nil {
			text, ok = e.p.Blob(cat.List(n).SHA256)
		}
	case policy.WhyText(policy.WhyService):
		for _, v := range e.p.Users.Catalogue().Services {
			if v.Name == s.List || v.ID == s.List {
				text, ok = []byte(strings.Join(v.Rules, "\n")), true
			}
		}
	}
	if !ok {
		return ""
	}
	return lineOf(text, s.Line)
}

func lineOf(text []byte, n uint32) string {
	at := uint32(0)
	for line := range bytes.Lines(text) {
		if at++; at == n {
			line = bytes.TrimSpace(line)
			return string(bytes.ToValidUTF8(line[:min(len(line), 300)], []byte("?")))
		}
	}
	return ""
}

// answer resolves the question and judges what comes.
func (e *explanation) answer(ctx context.Context, q *query.Query, sofar query.Verdict) error {
	if e.p.Answer == nil {
		e.note("answer", "none", "nothing applies to the question; its answer was not looked at")
		return nil
	}
	entry, err := e.p.Answer(ctx, q.Turn.Current)
	if err != nil {
		e.note("answer", "none", "nothing applies to the question; it could not be resolved: "+err.Error())
		return nil
	}
	a := entry.View()
	if sofar.Why != policy.WhyOff {
		if v := e.p.Policy.ExplainAnswer(q, &a, e.add); v.Kind != query.Pass && v.Kind != query.Allowed {
			return nil
		}
	}
	e.note("answer", "none", fmt.Sprintf("given as resolved: %s, %d records, %s", dnswire.RCodeText(a.RCode), a.AN, a.Status))
	return nil
}
