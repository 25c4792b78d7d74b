package policy

import (
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// A Step is one thing that was looked at, for people who ask why.
type Step struct {
	Step    string // a row of the table
	Verdict string
	List    string // the id of a list or service
	Line    uint32
	Detail  string
}

// step notes what decided, where there is no rule to name.
func (j *judge) step(why query.Why, verdict, detail string) {
	if j.trace != nil {
		j.trace(Step{Step: whyNames[why], Verdict: verdict, Detail: detail})
	}
}

func (j *judge) explain(why query.Why, v *query.Verdict) {
	s := Step{Step: whyNames[why], Verdict: v.Kind.String(), Line: v.Line, Detail: v.Block.Reason}
	switch why {
	case WhyList, WhyThreat:
		if l := j.s.catalogue.List(int(v.List)); l != nil {
			s.List = l.ID
		}
	case WhyService:
		s.List = j.s.serviceNames[v.List]
	}
	j.trace(s)
}

// ExplainQuestion is Question, telling each step that decided something.
func (p *Policy) ExplainQuestion(q *query.Query, trace func(Step)) query.Verdict {
	j := p.judge(q)
	j.trace = trace
	return j.question()
}

// ExplainAnswer is Answer, telling each step that decided something.
func (p *Policy) ExplainAnswer(q *query.Query, a *query.Answer, trace func(Step)) query.Verdict {
	j := p.judge(q)
	j.trace = trace
	if !filtering(j.p) {
		return query.Verdict{}
	}
	return j.answer(a)
}
