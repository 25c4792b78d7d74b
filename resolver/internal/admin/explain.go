package admin

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"time"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/filter/rulelist"
	"github.com/sluice-dns/sluice/resolver/internal/overload"
	"github.com/sluice-dns/sluice/resolver/internal/pipeline"
	"github.com/sluice-dns/sluice/resolver/internal/policy"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/rpz"
	"github.com/sluice-dns/sluice/usercache"
)

// Policies is an Explainer that sends the question down the very path that queries take, with somebody at each stage
// who notes what it decides. So what is explained is what is served, in its order; only that nothing of a client's
// allowance is taken and nothing is refreshed.
type Policies struct {
	Users  *usercache.Cache
	Policy *policy.Policy
	// Path are the stages and limits by which queries are answered.
	Path pipeline.Options
	// Gate knows networks and rates; it is Path's. Zones are Path's too; nil: none.
	Gate  *overload.Gate
	Zones ZoneRules
	// Blob returns the text of a list, to quote rules from. Nil quotes none of lists.
	Blob func(sha256 [32]byte) ([]byte, bool)
}

// ZoneRules judge as the stage pipeline.Zones does, and say what decided.
type ZoneRules interface {
	ExplainQuestion(q *query.Query) (query.Verdict, rpz.Decision, bool)
	ExplainAnswer(q *query.Query, a *query.Answer, now clock.Instant) (query.Verdict, rpz.Decision, bool)
}

// Explain judges a question as a device's, and then what its answer holds. Of a user named alone the first
// device is taken. Without a client's address nothing is decided by where it asks from.
func (p Policies) Explain(ctx context.Context, a Asking) ([]*adminv1.ExplainStep, error) {
	q := &query.Query{Transport: query.UDP, Arrived: clock.Elapsed(), RD: true, AsIs: []byte(a.Name)}
	q.Question = query.Question{Name: a.Name, Type: a.Type, Class: dnswire.ClassIN}
	q.EDNS.Present, q.EDNS.UDPSize = true, dnswire.MaxMessage
	q.Source = netip.AddrPortFrom(a.Address, 1)
	e := &explanation{p: p, asking: a, profile: &q.Client.Profile}
	identity, err := e.identify(q)
	if err != nil {
		return nil, err
	}
	switch {
	case a.Transport != nil:
		q.Transport = *a.Transport
	case q.Client.Profile.Is(usercache.DoHOnly):
		q.Transport = query.DoH
	}
	e.identity, q.Client = identity, query.Client{}

	ctx, cancel := context.WithCancel(ctx)
	path := pipeline.New(ctx, e.path())
	defer path.Close()
	defer cancel()
	done := make(chan struct{})
	out := make([]byte, dnswire.MaxMessage)
	if _, after := path.TryNow(path.NewWorker(), q, out); after&query.AfterResolve != 0 {
		q = q.Own()
		e.move(&q.Client.Profile)
		path.Resolve(q, func([]byte) { close(done) })
		select {
		case <-done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return e.end(), nil
}

// path is the way of queries with the explanation at its stages.
func (e *explanation) path() pipeline.Options {
	o := e.p.Path
	if o.Zones != nil && e.p.Zones != nil {
		o.Zones = explainedZones{o.Zones, e}
	}
	if o.DNS64 != nil {
		o.DNS64 = explainedDNS64{o.DNS64, e}
	}
	if o.Rebinding != nil {
		o.Rebinding = explainedRebinding{o.Rebinding, e}
	}
	if !e.asking.Address.IsValid() {
		o.Subnets = nil
	}
	o.Gate, o.Identify, o.Policy = explainedGate{e}, explainedIdentity{e}, explainedPolicy{e.p.Policy, e}
	o.Local, o.Answers, o.Fetch = explainedLocal{o.Local, e}, explainedAnswers{o.Answers, e}, explainedFetch{o.Fetch, e}
	o.Render = explainedRender{o.Render, e}
	o.Cookies, o.Outstanding, o.Log, o.Observe = nil, nil, nil, nil
	o.ClientWaitUDP = time.Hour // who asks for an explanation waits
	return o
}

// identify finds the device and says whose it is.
func (e *explanation) identify(q *query.Query) (string, error) {
	p, who, c := e.p, e.asking.Who, &q.Client
	info, ok := p.Users.LookupUser(&who.User)
	if !ok {
		return "", fmt.Errorf("user %q: %w at this resolver, which is at revision %d", who.User, ErrNotFound, p.Users.Dataset(usercache.Users).Status().Revision)
	}
	device := who.Device
	if device.IsZero() {
		if len(info.Devices) == 0 {
			return "", fmt.Errorf("%w: user %q has no device, so no query can be this user's", ErrRefused, who.User)
		}
		device = info.Devices[0]
	}
	switch status := p.Users.LookupDevice(&device, &c.Profile); status {
	case usercache.Found:
	case usercache.Unknown, usercache.NotReady:
		return "", fmt.Errorf("device %q of user %q: %w at this resolver, which is at revision %d%s", device, who.User, ErrNotFound,
			p.Users.Dataset(usercache.Users).Status().Revision, theDevices(info.Devices))
	case usercache.Disabled:
		return "", fmt.Errorf("%w: user %q is disabled, so that device %q is answered as a stranger (disabled=false)", ErrRefused, who.User, device)
	case usercache.Unusable:
		return "", fmt.Errorf("%w: the settings of user %q, or of the policy, cannot be used by this resolver, so that device %q is answered as users.when_cold says", ErrRefused, who.User, device)
	}
	if c.Profile.UserID != who.User {
		return "", fmt.Errorf("device %q of user %q: %w; it is user %q's", device, who.User, ErrNotFound, c.Profile.UserID)
	}
	c.Kind = query.Identified
	detail := fmt.Sprintf("device %s of user %s, revision %d", device, who.User, c.Profile.Revision)
	if info.Policy != "" {
		detail += ", policy " + info.Policy
	}
	return detail, nil
}

// theDevices names some of a user's devices, for who asked for another.
func theDevices(ids []usercache.DeviceID) string {
	const most = 8
	if len(ids) == 0 {
		return "; the user has no device"
	}
	var names []string
	for _, id := range ids[:min(len(ids), most)] {
		names = append(names, id.String())
	}
	if more := len(ids) - most; more > 0 {
		names = append(names, fmt.Sprintf("%d more", more))
	}
	return "; there are " + strings.Join(names, ", ")
}

// An explanation collects steps. The path may go on in another goroutine after the answer, so that it has a lock and
// an end.
type explanation struct {
	p        Policies
	asking   Asking
	identity string

	mu      sync.Mutex // guards what follows
	profile *usercache.Profile
	steps   []*adminv1.ExplainStep
	ended   bool
	from    string // where the latest answer comes from
	judged  bool   // somebody has judged the question
	begun   bool   // the user's settings have
	aliases uint8  // that have been told of
}

// restart forgets what was noted: the query begins anew.
func (e *explanation) restart() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.steps, e.judged, e.begun, e.aliases = nil, false, false, 0
}

// move says where the client's profile is from now on.
func (e *explanation) move(p *usercache.Profile) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.profile = p
}

// end returns the steps; there are no more.
func (e *explanation) end() []*adminv1.ExplainStep {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ended = true
	return e.steps
}

// put adds a step.
func (e *explanation) put(s *adminv1.ExplainStep) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.ended {
		e.steps = append(e.steps, s)
	}
}

// came says where the answer to be judged next comes from.
func (e *explanation) came(from string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.from = from
}

// note adds a step that no rule is named for.
func (e *explanation) note(step, verdict, detail, change string) {
	e.put(&adminv1.ExplainStep{Step: step, Verdict: verdict, Detail: detail, Change: change})
}

// told adds what policy says.
func (e *explanation) told(s policy.Step, prefix string) {
	e.put(&adminv1.ExplainStep{
		Step: prefix + s.Step, Verdict: verdictText(s.Verdict), List: s.List, Line: s.Line, Rule: e.rule(s), Detail: s.Detail, Change: s.Change,
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
