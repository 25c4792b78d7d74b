package policy

import (
	"net/netip"
	"unsafe"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/filter"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// WantsServers reports whether rules that apply to q are about name servers, so that Answer wants to know them.
func (p *Policy) WantsServers(q *query.Query) bool {
	v := &q.Turn.Verdict
	if q.Client.Profile.Flags == 0 || p.o.Servers == nil || v.Why == WhyOff || v.Kind == query.Allowed && v.Why != WhyList {
		return false
	}
	j := judge{p: &q.Client.Profile}
	if j.s, _ = q.Client.Catalogue.(*view); j.s == nil {
		j.s = p.pin(q)
	}
	j.own, _ = q.Client.Rules.(*own)
	names, _ := j.wants()
	if d := j.p.Details; !names && d != nil && len(d.Schedules) > 0 { // which may bring in any list
		names, _ = j.s.lists.Load().WantsServers(nil)
	}
	return names
}

// wants reports whether rules are about name servers, and whether about their addresses. For most it is a look at a
// set that is empty.
func (j *judge) wants() (names, addrs bool) {
	ask := func(m *filter.Matcher, lists *filter.Set) {
		n, a := m.WantsServers(lists)
		names, addrs = names || n, addrs || a
	}
	catalogue := j.catalogue()
	lists, threats, _ := j.now()
	ask(catalogue, lists)
	ask(catalogue, threats)
	if j.own != nil {
		for _, m := range j.own.rules {
			if m != nil {
				ask(m, nil)
			}
		}
		for i := range j.own.lists {
			ask(j.own.lists[i].matcher, nil)
		}
	}
	return names, addrs
}

// servedNames says which names of an answer's chain of aliases are to be judged by their name servers: a rule for
// a name, or for an address of the last one, goes before rules for its servers.
type servedNames struct {
	at uint
	// Bits, by place in the chain: not judged at all; judged by threat lists alone.
	lifted, threats uint64
	excepted        bool // as by an exception of a catalogue list for the question: threats, for all names
}

// next goes on to the next name of the chain.
func (s *servedNames) next() { s.at++ }

// lift notes that an exception applies to the name, or what stands at it.
func (s *servedNames) lift(why query.Why) {
	if why == WhyList {
		s.threats |= 1 << min(s.at, 63)
	} else {
		s.lifted |= 1 << min(s.at, 63)
	}
}

// servers judges the name servers of the zones that an answer came through, name by name of its chain of aliases.
func (j *judge) servers(a *query.Answer, served *servedNames) query.Verdict {
	names, addrs := j.wants()
	if !names || j.served == nil || j.q.Turn.Local {
		return query.Verdict{}
	}
	j.fq.Type = j.q.Turn.Current.Type
	at := uint(0)
	judge := func(n dnsname.Name) (v query.Verdict) {
		bit := uint64(1) << min(at, 63)
		if at++; served.lifted&bit != 0 {
			return v
		}
		by := j.served(j.q, a, n, addrs)
		if len(by.Names) == 0 {
			return v
		}
		v = j.behind(&behind{servers: by}, &name{text: n, servers: true}, served.excepted || served.threats&bit != 0)
		if v.Kind == query.Allowed || v.Kind == query.Redirected && v.Target == j.q.Turn.Current.Name {
			v = query.Verdict{}
		}
		return v
	}
	v := judge(j.q.Turn.Current.Name)
	for off := 0; v.Kind == query.Pass; {
		kind, value, next, ok := a.Facts.Next(off)
		if !ok {
			break
		}
		if off = next; kind == query.FactAlias {
			v = judge(dnsname.Name(unsafe.String(unsafe.SliceData(value), len(value)))) // read only, not kept
		}
	}
	return v
}

// behind is what rules know of an answer beside its names: an address in it, or the name servers it came through.
type behind struct {
	addr    netip.Addr // the zero Addr: it is the servers
	servers query.Servers
}

func (b *behind) match(memo *filter.Memo, m *filter.Matcher, lists *filter.Set, q *filter.Query) filter.Result {
	if b.addr.IsValid() {
		return memo.MatchAddr(m, b.addr, lists, q)
	}
	return m.MatchServers(b.servers.Names, b.servers.Addrs, lists, q)
}

// behind judges what is behind the names of an answer: rows 3 to 5, 10 and 11. excepted leaves row 11.
func (j *judge) behind(b *behind, n *name, excepted bool) query.Verdict {
	var verdict query.Verdict
	catalogue := j.catalogue()
	lists, threats, _ := j.now()
	if j.own != nil && !excepted {
		var results [3]filter.Result
		j.fq.Name = j.p.Details.Name
		for i, m := range j.own.rules {
			if m != nil {
				j.charge(i != policyRules)
				results[i] = b.match(nil, m, nil, &j.fq)
			}
		}
		j.charge(false)
		j.fq.Name = ""
		if v := j.ranked(&results, n); v.Kind != query.Pass {
			return v
		}
	}
	if !excepted {
		var best filter.Result
		from, why := source{}, WhyNothing
		if j.own != nil {
			for i := range j.own.lists {
				m := j.own.lists[i].matcher
				j.charge(!j.own.lists[i].ofPolicy)
				if r := b.match(nil, m, nil, &j.fq); outranks(&r, &best) {
					best, from, why = r, source{m, int8(i)}, WhyOwnList
				}
			}
			j.charge(false)
		}
		if *lists != (filter.Set{}) {
			if r := b.match(j.memo(), catalogue, lists, &j.fq); outranks(&r, &best) {
				best, from, why = r, source{matcher: catalogue}, WhyList
			}
		}
		if why != WhyNothing {
			if verdict = j.result(from, &best, why, n); verdict.Kind != query.Pass && (verdict.Kind != query.Allowed || why != WhyList) {
				return verdict
			}
		}
	}
	if *threats != (filter.Set{}) {
		if r := b.match(j.memo(), catalogue, threats, &j.fq); isThreat(&r) {
			return j.result(source{matcher: catalogue}, &r, WhyThreat, n)
		}
	}
	return verdict
}
