package policy

import (
	"strings"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/filter"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// A Step is one thing that decided something, for people who ask why.
type Step struct {
	Step    string // a row of the table
	Verdict query.VerdictKind
	// List is the id of the catalogue list, service or own list, or which of the user's texts, that has the rule
	// on Line, from 1; Text says where its text is to be found.
	List string
	Line uint32
	Text TextOf
	// Detail says what it was, Change what setting or rule would change it.
	Detail, Change string
}

// A TextOf tells where the text is that a Step's Line counts lines of.
type TextOf uint8

// The kinds of texts.
const (
	NoText TextOf = iota
	DeviceRules
	UserRules
	PolicyRules
	OwnList
	CatalogueList
	ServiceRules
)

// instant writes Unix seconds.
func instant(t int64) string { return time.Unix(t, 0).UTC().Format(time.RFC3339) }

// step notes what decided, where there is no rule to name.
func (j *judge) step(why query.Why, kind query.VerdictKind, detail, change string) {
	if j.trace != nil {
		j.trace(Step{Step: whyNames[why], Verdict: kind, Detail: detail, Change: change})
	}
}

// explain notes which rule decided of the name, or of j.addr.
func (j *judge) explain(from source, r *filter.Result, why query.Why, n *name, v *query.Verdict) {
	s := Step{Step: whyNames[why], Verdict: v.Kind, Line: r.Line, Detail: j.addr.String()}
	off := ""
	switch why {
	case WhyList, WhyThreat:
		s.Text, s.List = CatalogueList, "list "+j.s.listNames[r.List]
		if l := j.s.catalogue.List(int(r.List)); l != nil {
			s.List = l.ID
		}
		off = "lists-=" + s.List
		if c := j.category(int(r.List)); c != "" {
			off = c
		}
		if n := int(r.List); !j.p.Lists.Has(n) && !j.p.Threats.Has(n) {
			off = j.scheduledBy(func(c *usercache.Schedule) bool { return c.Lists.Has(n) || c.Threats.Has(n) })
		}
	case WhyService:
		s.Text, s.List = ServiceRules, j.s.serviceNames[r.List]
		for _, v := range j.s.catalogue.Services {
			if v.Number == int(r.List) {
				s.List = v.ID
			}
		}
		off = "services-=" + s.List
		if !j.p.Services.Has(int(r.List)) {
			off = j.scheduledBy(func(c *usercache.Schedule) bool { return c.Services.Has(int(r.List)) })
		}
	case WhyOwnList:
		s.Text, s.List = OwnList, j.own.lists[from.i].id
		off = "own_lists-=" + s.List
	default: // important, device, user and policy rules
		s.Text = DeviceRules + TextOf(from.i)
		s.List = whyNames[int(WhyDeviceRule)+int(from.i)] + "s"
		off = "without the rule"
	}
	if n.text != "" {
		s.Detail = strings.TrimSuffix(n.text.String(), ".")
	}
	if n.servers {
		s.Detail = "the name servers of " + s.Detail
	}
	switch v.Kind {
	case query.Blocked:
		s.Change = j.exception(n, r, why) + off
	case query.Synthesised, query.Redirected:
		s.Change = off
		if v.Kind == query.Redirected {
			s.Detail += " is answered as " + v.Target.String()
		}
	case query.Allowed:
		s.Change = off + "; its block wins if it is $important"
	default:
		s.Change = off
	}
	j.trace(s)
}

// exception is the rule of the user's own that would let a blocked name, or j.addr, pass, with what stands behind it.
func (j *judge) exception(n *name, r *filter.Result, why query.Why) string {
	of := j.addr.String()
	switch {
	case n.text != "":
		of = strings.TrimSuffix(n.text.String(), ".")
	case !j.addr.Is4():
		return "" // of IPv6 there is no such rule
	}
	text := "@@||" + of + "^"
	where := " in the user's rules, or "
	switch {
	case why == WhyImportant:
		text += "$important"
	case why == WhyDeviceRule:
		where = " in the device's rules, or "
	case r.Important:
		// Important in a list; the user's plain rules come before lists all the same.
	}
	return text + where
}

// category is the setting that brought in a list which the profile has by a category and not by name.
func (j *judge) category(list int) string {
	for i := range j.s.catalogue.Categories {
		c := &j.s.catalogue.Categories[i]
		if c.Lists.Has(list) && j.p.Categories.Has(c.Number) {
			return "category " + c.ID + " off (categories-=" + c.ID + ", safe_browsing, adult), or lists-=" + j.s.catalogue.List(list).ID
		}
	}
	return ""
}

// scheduledBy is the setting that brought in what only schedules block.
func (j *judge) scheduledBy(concerns func(*usercache.Schedule) bool) string {
	now := clock.Wall()
	if d := j.p.Details; d != nil {
		for i := range d.Schedules {
			if s := &d.Schedules[i]; !s.Pause && s.Active(now) && concerns(s) {
				return "schedules-=" + s.ID
			}
		}
	}
	return "its schedule"
}

// LeftOut returns what the client's own rules lack: texts that have not arrived, and those that are more than one
// user may have.
func (p *Policy) LeftOut(q *query.Query) (tooMuch []string, missing bool) {
	if o, ok := q.Client.Rules.(*own); ok {
		return o.tooMuch, o.missing
	}
	return nil, false
}

// ExplainQuestion is Question, telling each step that decided something.
func (p *Policy) ExplainQuestion(q *query.Query, trace func(Step)) query.Verdict {
	j := p.judge(q)
	j.trace = trace
	j.told = q.Turn.NumAliases == 0 // once
	defer j.tellUntried()
	return j.question()
}

// ExplainAnswer is Answer, telling each step that decided something.
func (p *Policy) ExplainAnswer(q *query.Query, a *query.Answer, sofar query.Verdict, trace func(Step)) query.Verdict {
	j := p.judge(q)
	j.trace = trace
	defer j.tellUntried()
	return j.answer(a, sofar)
}

// tellUntried notes that rules were left untried.
func (j *judge) tellUntried() {
	tell := func(whose string) {
		j.trace(Step{Step: "limits", Verdict: query.Pass, Detail: "to try all rules of " + whose + " would have taken too long: some were left untried, and may have said otherwise",
			Change: "patterns and expressions in them with more text that a name must have"})
	}
	if filter.Exhausted(j.q.Scratch.Spent) {
		tell("lists, services and the shared policy")
	}
	if filter.Exhausted(j.q.Scratch.OwnSpent) {
		tell("the device and the user, or of their own lists,")
	}
}
