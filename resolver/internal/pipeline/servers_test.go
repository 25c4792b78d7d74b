package pipeline

import (
	"context"
	"testing"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
)

// A seeker knows the name servers of nothing, and is told to look.
type seeker struct {
	unknown func(q *query.Query) bool
	find    func(names []dnsname.Name)
}

func (s *seeker) Unknown(q *query.Query, _ *query.Answer, _ clock.Instant) []dnsname.Name {
	if !s.unknown(q) {
		return nil
	}
	return []dnsname.Name{dnsname.Name([]byte(q.Turn.Current.Name))}
}

func (s *seeker) Find(_ context.Context, _ *query.Tree, _ query.View, names []dnsname.Name) {
	s.find(names)
}

// Name servers that a rule asks for are looked for before the answer is judged, once for each question that a query
// becomes, and nothing hangs on their being found: what panics on the way is as good as what finds nothing. Those who do
// not want recursion have nobody asked, and where there is no room nobody is judged by half of the rules.
func TestNameServersAreLookedForFirst(t *testing.T) {
	for _, c := range []struct {
		what, want string
		cached     bool
		unknown    func(q *query.Query) bool
		edit       func(*dns.Msg, *query.Query)
		redirect   bool
		panics     bool
		inFlight   int
		finds      int
	}{
		{what: "from the cache", want: "NOERROR A=192.0.2.1", cached: true, finds: 1},
		{what: "fresh", want: "NOERROR A=192.0.2.1", finds: 1},
		{what: "nobody asks", want: "NOERROR A=192.0.2.1", cached: true, unknown: func(*query.Query) bool { return false }},
		{what: "never found", want: "NOERROR A=192.0.2.1", cached: true, unknown: func(*query.Query) bool { return true }, finds: 1},
		{what: "a panic", want: "NOERROR A=192.0.2.1", cached: true, panics: true, finds: 1},
		{what: "two questions", want: "NOERROR CNAME=other.example. A=192.0.2.1", redirect: true, unknown: func(*query.Query) bool { return true }, finds: 2},
		{what: "no recursion", want: "NOERROR A=192.0.2.1", cached: true, edit: func(m *dns.Msg, _ *query.Query) { m.RecursionDesired = false }},
		{what: "no room", want: "SERVFAIL EDE22", cached: true, inFlight: 1},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		finds, judged := 0, 0
		n := &seeker{unknown: c.unknown}
		if n.unknown == nil {
			n.unknown = func(*query.Query) bool { return finds == 0 }
		}
		n.find = func(names []dnsname.Name) {
			finds++
			if judged > finds-1 {
				t.Errorf("%s: judged before it was looked", c.what)
			}
			if c.panics {
				panic("x")
			}
		}
		s := &stages{
			early: func(q *query.Query) query.RefuseReason { q.Client.Unlimited = true; return query.NotRefused },
			answer: func(q *query.Query, _ *query.Answer, _ query.Verdict) query.Verdict {
				judged++
				if c.redirect && q.Turn.NumAliases == 0 {
					return query.Verdict{Kind: query.Redirected, Target: dnsname.MustParse("other.example.")}
				}
				return query.Verdict{}
			},
			fetch: func(_ context.Context, _ *query.Tree, q query.Question) (settled.Entry, error) {
				return address(q, "192.0.2.1"), nil
			},
		}
		if c.cached {
			question := query.Question{Name: dnsname.MustParse("www.example."), Type: 1, Class: 1}
			s.cache = map[query.Question]settled.Entry{question: address(question, "192.0.2.1")}
		}
		o := Options{NameServers: n}
		if c.inFlight > 0 {
			o.InFlight = func() int { return 0 }
		}
		p := start(t, ctx, s, o)
		if got := brief(ask(t, p, p.NewWorker(), "www.example.", c.edit)); got != c.want || finds != c.finds {
			t.Errorf("%s: %s with %d looks, want %s with %d", c.what, got, finds, c.want, c.finds)
		}
		cancel()
		p.Close()
	}
}
