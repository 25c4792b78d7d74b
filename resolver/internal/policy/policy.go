// Package policy gives a user's verdict on a question, and on its answer.
//
// Precedence, the first that matches wins; TestPrecedence is this table:
//
//	 1  filtering is off or paused                       pass
//	 2  a name unblocked for a while                     allowed
//	 3  the user's own $important exception, then block  allowed, blocked
//	 4  rules of the device                              allowed, blocked, rewritten
//	 5  rules of the user, then of the shared policy     allowed, blocked, rewritten
//	 6  rewrites                                         rewritten
//	 7  safe search                                      redirected
//	 8  record types that are switched off, ways around the resolver
//	 9  schedules and services                           blocked
//	10  private lists, then catalogue lists              allowed, blocked, rewritten
//	11  threat lists                                     blocked; an exception of a catalogue list does not lift it
//
// Access lists come before all of these and belong to package overload. Within one text of rules or one set
// of lists the order is package filter's. The answer is judged by the same rows: each alias and each other
// name it leads to by 2 to 5 and 9 to 11, each address by the rules that know addresses, and by rebinding
// protection. An answer whose question was Allowed is not judged.
//
// A Policy reads users' settings from the query's Profile and compiles nothing on the way: catalogue lists,
// services and safe search are one immutable snapshot, rebuilt in the background when the catalogue or a blob
// changes; a user's own rules and lists are compiled by Prepare, which the pipeline calls where it may wait,
// and shared by all whose text is the same. A list whose bytes are not there yet keeps its last version, or
// matches nothing; it is named in Missing.
package policy

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/filter"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// What decided, for Verdict.Why.
const (
	WhyNothing query.Why = iota
	WhyOff
	WhyUnblocked
	WhyImportant
	WhyDeviceRule
	WhyUserRule
	WhyPolicyRule
	WhyRewrite
	WhySafeSearch
	WhyType
	WhyBypass
	WhySchedule
	WhyService
	WhyOwnList
	WhyList
	WhyThreat
	WhyRebinding
	WhyPolicyZone // package rpz's, which holds for everybody
	NumWhy        = iota
)

var whyNames = [NumWhy]string{"nothing", "filtering off", "unblocked", "important rule", "device rule", "user rule", "policy rule", "rewrite",
	"safe search", "record type", "bypass", "schedule", "service", "own list", "list", "threat list", "rebinding protection", "policy zone"}

// WhyText names what decided.
func WhyText(w query.Why) string { return whyNames[w] }

// Extended errors of blocking answers (RFC 8914): Filtered for what the user chose, Blocked for threats.
const (
	edeBlocked  = 15
	edeFiltered = 17
)

// Users are what a Policy reads besides the query's Profile; usercache.Cache has it.
type Users interface {
	Catalogue() *usercache.Catalogue
	RuleText(p *usercache.Profile, t usercache.RuleText) ([]byte, bool)
}

// Options are what a Policy needs.
type Options struct {
	// Key hashes names.
	Key dnsname.Key
	// Users are needed.
	Users Users
	// Blob returns a text by the SHA-256 of its content, or false while it is not there. Nil has none.
	Blob func(sha256 [32]byte) ([]byte, bool)
	// Changed is sent to when the catalogue may have changed or a blob has arrived. Nil: nothing changes
	// after New.
	Changed <-chan struct{}
	Logger  *slog.Logger
}

// A Policy judges queries. It is safe for concurrent use.
type Policy struct {
	o     Options
	state atomic.Pointer[state]

	mu     sync.Mutex // guards shared
	shared map[[32]byte]sharedMatcher
}

// New returns a Policy of the catalogue as it is.
func New(o Options) *Policy {
	if o.Blob == nil {
		o.Blob = func([32]byte) ([]byte, bool) { return nil, false }
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	p := &Policy{o: o, shared: make(map[[32]byte]sharedMatcher)}
	p.state.Store(newState(&p.o, nil))
	return p
}

// Run follows changes of the catalogue and arriving blobs until ctx ends.
func (p *Policy) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.o.Changed:
			p.Update()
		}
	}
}

// Update brings the snapshot up to the present catalogue. It returns when queries are judged by it.
func (p *Policy) Update() {
	old := p.state.Load()
	if s := newState(&p.o, old); s != old {
		p.state.Store(s)
	}
}

// Missing returns the ids of catalogue lists whose present bytes are not here.
func (p *Policy) Missing() []string { return p.state.Load().missing }

// Serving reports whether queries are judged by the present catalogue with the bytes of all its lists, and the
// revision of the newest catalogue of which that was so.
func (p *Policy) Serving() (present bool, revision uint64) {
	s := p.state.Load()
	return len(s.missing) == 0 && s.catalogue == p.o.Users.Catalogue(), s.whole
}

// Stats returns what the catalogue's lists come to.
func (p *Policy) Stats() filter.Stats { return p.state.Load().lists.Stats() }

// A judge is one judgement under way: of a question or of the names and addresses of an answer.
type judge struct {
	s     *state
	q     *query.Query
	p     *usercache.Profile
	own   *own // the user's own rules, compiled; nil if there are none
	fq    filter.Query
	trace func(Step) // nil on the query path
}

func (p *Policy) judge(q *query.Query) judge {
	j := judge{s: p.state.Load(), q: q, p: &q.Client.Profile}
	if j.p.Details != nil {
		j.own, _ = j.p.Details.Compiled().(*own)
		j.fq.Tags = j.p.Details.Tags
	}
	id := j.p.DeviceID.Bytes()
	j.fq.Client = unsafe.String(unsafe.SliceData(id), len(id)) // lives as long as q
	j.fq.Addr = q.Source.Addr()
	return j
}

// filtering reports whether the client's queries are filtered now.
func filtering(p *usercache.Profile) bool {
	return p.Is(usercache.Enabled) && (p.PausedUntil == 0 || clock.Wall().Unix() >= p.PausedUntil)
}

// Question judges q.Turn.Current.
func (p *Policy) Question(q *query.Query) query.Verdict {
	if q.Client.Profile.Flags == 0 {
		return query.Verdict{} // nobody's profile: nothing is filtered
	}
	j := p.judge(q)
	return j.question()
}

func (j *judge) question() query.Verdict {
	if !filtering(j.p) {
		j.step(WhyOff, "pass", "")
		return query.Verdict{Why: WhyOff}
	}
	n := j.hash(j.q.Turn.Current.Name)
	j.fq.Type = j.q.Turn.Current.Type
	if v := j.early(&n); v.Kind != query.Pass {
		return v
	}
	if v := j.rewrites(&n); v.Kind != query.Pass {
		return v
	}
	if v := j.switches(&n); v.Kind != query.Pass {
		return v
	}
	return j.late(&n)
}

// A name is a canonical name with its suffix hashes.
type name struct {
	text   dnsname.Name
	wire   []byte
	hashes []uint64
}

func (j *judge) hash(n dnsname.Name) name {
	wire := unsafe.Slice(unsafe.StringData(string(n)), len(n)) // read only
	k := dnsname.SuffixHashes(&j.s.key, wire, &j.q.Scratch.Hashes)
	return name{n, wire, j.q.Scratch.Hashes[:k]}
}

// early is rows 2 to 5.
func (j *judge) early(n *name) query.Verdict {
	if j.own == nil {
		return query.Verdict{}
	}
	if j.own.unblocked(n.text) {
		j.step(WhyUnblocked, "allowed", "")
		return query.Verdict{Kind: query.Allowed, Why: WhyUnblocked}
	}
	var results [3]filter.Result
	for i, m := range j.own.rules {
		if m != nil {
			results[i] = m.MatchHashed(n.wire, n.hashes, nil, &j.fq)
		}
	}
	for _, want := range [...]filter.Verdict{filter.Allowed, filter.Blocked} {
		for i := range results {
			if r := &results[i]; r.Important && r.Verdict == want {
				return j.result(j.own.rules[i], r, WhyImportant, n)
			}
		}
	}
	for i := range results {
		if r := &results[i]; r.Verdict != filter.None {
			return j.result(j.own.rules[i], r, WhyDeviceRule+query.Why(i), n)
		}
	}
	return query.Verdict{}
}

// rewrites is rows 6 and 7.
func (j *judge) rewrites(n *name) query.Verdict {
	if j.own != nil {
		if r := j.own.rewrites.find(n.text); r != nil {
			if v := r.verdict(j.fq.Type, n.text, WhyRewrite); v.Kind != query.Pass {
				j.step(WhyRewrite, v.Kind.String(), r.text)
				return v
			}
		}
	}
	if j.p.SafeSearch != 0 {
		for mask := j.p.SafeSearch; mask != 0; mask &= mask - 1 {
			if r := j.s.safeSearch[trailingZeros(mask)].find(n.text); r != nil {
				if v := r.verdict(j.fq.Type, n.text, WhySafeSearch); v.Kind != query.Pass {
					j.step(WhySafeSearch, v.Kind.String(), r.text)
					return v
				}
			}
		}
	}
	return query.Verdict{}
}

// switches is row 8.
func (j *judge) switches(n *name) query.Verdict {
	noData := false
	switch j.fq.Type {
	case dnswire.TypeHTTPS, dnswire.TypeSVCB:
		noData = j.p.Is(usercache.BlockHTTPSRecords)
	}
	if j.own != nil && !noData {
		for _, t := range j.own.types {
			noData = noData || t == j.fq.Type
		}
	}
	if noData {
		j.step(WhyType, "blocked", dnswire.TypeText(j.fq.Type))
		v := j.blocked(WhyType, "record type switched off", edeFiltered)
		v.Block.Mode = query.BlockNoData
		return v
	}
	if j.p.Is(usercache.BlockBypass) {
		if _, ok := bypasses[n.text]; ok {
			j.step(WhyBypass, "blocked", n.text.String())
			v := j.blocked(WhyBypass, "way around the resolver", edeFiltered)
			v.Block.Mode = query.BlockNXDomain
			return v
		}
	}
	return query.Verdict{}
}

// bypasses are names whose absence tells browsers and systems not to go around the network's resolver:
// Firefox's canary and Apple's private relay.
var bypasses = map[dnsname.Name]struct{}{
	dnsname.MustParse("use-application-dns.net."): {},
	dnsname.MustParse("mask.icloud.com."):         {},
	dnsname.MustParse("mask-h2.icloud.com."):      {},
	dnsname.MustParse("mask.apple-dns.net."):      {},
}

// localhost is never judged by lists: hosts files name it with its own address, which is no blocking, and
// its answer is local data.
var localhost = dnsname.MustParse("localhost.")

// late is rows 9 to 11.
func (j *judge) late(n *name) query.Verdict {
	if n.text == localhost {
		return query.Verdict{}
	}
	lists, threats, services := j.p.Lists, j.p.Threats, j.p.Services
	if j.own != nil && len(j.p.Details.Schedules) > 0 {
		if v := j.schedules(&lists, &threats, &services); v.Kind != query.Pass {
			return v
		}
	}
	if !services.IsEmpty() {
		r := j.s.services.MatchHashed(n.wire, n.hashes, (*filter.Set)(&services), &j.fq)
		if r.Verdict == filter.Blocked {
			return j.result(j.s.services, &r, WhyService, n)
		}
	}
	if j.own != nil {
		for _, l := range j.own.lists {
			if r := l.matcher.MatchHashed(n.wire, n.hashes, nil, &j.fq); r.Verdict != filter.None {
				return j.result(l.matcher, &r, WhyOwnList, n)
			}
		}
	}
	verdict := query.Verdict{}
	if !lists.IsEmpty() {
		r := j.s.lists.MatchHashed(n.wire, n.hashes, (*filter.Set)(&lists), &j.fq)
		if r.Verdict != filter.None {
			if verdict = j.result(j.s.lists, &r, WhyList, n); verdict.Kind != query.Allowed {
				return verdict
			}
		}
	}
	if !threats.IsEmpty() {
		if r := j.s.lists.MatchHashed(n.wire, n.hashes, (*filter.Set)(&threats), &j.fq); r.Verdict == filter.Blocked {
			return j.result(j.s.lists, &r, WhyThreat, n)
		}
	}
	return verdict
}

// schedules changes what applies at this time. A schedule that stops everything decides at once.
func (j *judge) schedules(lists, threats *usercache.ListSet, services *usercache.ServiceSet) query.Verdict {
	now := clock.Wall()
	all := j.p.Details.Schedules
	for i := range all {
		s := &all[i]
		if !s.Active(now) {
			continue
		}
		switch {
		case s.Everything && s.Pause:
			j.step(WhySchedule, "pass", s.ID)
			return query.Verdict{Kind: query.Allowed, Why: WhySchedule}
		case s.Everything:
			j.step(WhySchedule, "blocked", s.ID)
			return j.blocked(WhySchedule, "schedule", edeFiltered)
		case s.Pause:
			services.RemoveAll(&s.Services)
			lists.RemoveAll(&s.Lists)
			threats.RemoveAll(&s.Threats)
		default:
			services.AddAll(&s.Services)
			lists.AddAll(&s.Lists)
			threats.AddAll(&s.Threats)
		}
	}
	return query.Verdict{}
}

// Answer judges what came back for q.Turn.Current; sofar is what Question said.
func (p *Policy) Answer(q *query.Query, a *query.Answer, sofar query.Verdict) query.Verdict {
	if q.Client.Profile.Flags == 0 || len(a.Facts) == 0 || sofar.Kind == query.Allowed || sofar.Why == WhyOff {
		return query.Verdict{}
	}
	j := p.judge(q)
	if !filtering(j.p) {
		return query.Verdict{}
	}
	return j.answer(a)
}

func (j *judge) answer(a *query.Answer) query.Verdict {
	for off := 0; ; {
		kind, value, next, ok := a.Facts.Next(off)
		if !ok {
			return query.Verdict{}
		}
		off = next
		var v query.Verdict
		switch kind {
		case query.FactAlias, query.FactTarget:
			v = j.target(dnsname.Name(unsafe.String(unsafe.SliceData(value), len(value))))
		case query.FactAddress:
			addr, _ := netip.AddrFromSlice(value)
			v = j.address(addr)
		case query.FactZone:
			continue
		}
		switch v.Kind {
		case query.Pass:
		case query.Allowed:
			// An exception for one name of a chain is about that name: the others are judged on.
		default:
			return v
		}
	}
}

// target judges a name that the answer leads to.
func (j *judge) target(to dnsname.Name) query.Verdict {
	n := j.hash(to)
	j.fq.Type = j.q.Turn.Current.Type
	j.fq.NoRewrite = true // rewriting is for what was asked, not for where others point
	if v := j.early(&n); v.Kind != query.Pass {
		return v
	}
	return j.late(&n)
}

// address judges an address of the answer.
func (j *judge) address(a netip.Addr) query.Verdict {
	if j.p.Is(usercache.RebindingProtection) && special(a) {
		j.step(WhyRebinding, "blocked", a.String())
		return j.blocked(WhyRebinding, "private address for a public name", edeFiltered)
	}
	j.fq.Type = dnswire.TypeA
	if a.Is6() {
		j.fq.Type = dnswire.TypeAAAA
	}
	j.fq.NoRewrite = true
	var n name
	if j.own != nil {
		for i, m := range j.own.rules {
			if m == nil {
				continue
			}
			if r := m.MatchAddr(a, nil, &j.fq); r.Verdict != filter.None {
				return j.result(m, &r, WhyDeviceRule+query.Why(i), &n)
			}
		}
		for _, l := range j.own.lists {
			if r := l.matcher.MatchAddr(a, nil, &j.fq); r.Verdict != filter.None {
				return j.result(l.matcher, &r, WhyOwnList, &n)
			}
		}
	}
	if !j.p.Lists.IsEmpty() {
		if r := j.s.lists.MatchAddr(a, (*filter.Set)(&j.p.Lists), &j.fq); r.Verdict != filter.None {
			return j.result(j.s.lists, &r, WhyList, &n)
		}
	}
	if !j.p.Threats.IsEmpty() {
		if r := j.s.lists.MatchAddr(a, (*filter.Set)(&j.p.Threats), &j.fq); r.Verdict == filter.Blocked {
			return j.result(j.s.lists, &r, WhyThreat, &n)
		}
	}
	return query.Verdict{}
}

// special reports addresses that a public name should not have: private, loopback, link-local, shared
// (RFC 6890 and 6598).
func special(a netip.Addr) bool {
	a = a.Unmap()
	return a.IsPrivate() || a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsUnspecified() || shared.Contains(a)
}

var shared = netip.MustParsePrefix("100.64.0.0/10")

// result turns what rules say into a verdict.
func (j *judge) result(m *filter.Matcher, r *filter.Result, why query.Why, n *name) query.Verdict {
	v := query.Verdict{Why: why, List: r.List, Line: r.Line}
	switch r.Verdict {
	case filter.Allowed:
		v.Kind = query.Allowed
	case filter.Blocked:
		if addrs := m.HostAddrs(r, j.fq.Type); len(addrs) > 0 && !meansBlocked(addrs) {
			v.Kind, v.Synth = query.Synthesised, addressSynth(addrs, j.fq.Type, j.p.BlockTTL)
			break
		}
		ede := uint16(edeFiltered)
		if why == WhyThreat {
			ede = edeBlocked
		}
		b := j.blocked(why, j.s.reason(why, r.List), ede)
		v.Kind, v.Block = b.Kind, b.Block
	case filter.Rewritten:
		v = rewritten(m, r, v, j.fq.Type, j.p.BlockTTL)
	case filter.None:
	}
	if j.trace != nil {
		j.explain(why, &v)
	}
	return v
}

// meansBlocked reports whether hosts lines name only addresses that lists use to say "blocked".
func meansBlocked(addrs []netip.Addr) bool {
	for _, a := range addrs {
		if !a.IsUnspecified() && !a.IsLoopback() {
			return false
		}
	}
	return true
}

// blocked is the user's way of blocking.
func (j *judge) blocked(why query.Why, reason string, ede uint16) query.Verdict {
	p := j.p
	v := query.Verdict{Kind: query.Blocked, Why: why}
	v.Block = query.Block{TTL: time.Duration(p.BlockTTL) * time.Second, EDE: ede, Reason: reason}
	switch p.Mode {
	case usercache.BlockNullIP:
		v.Block.Mode = query.BlockNull
	case usercache.BlockNXDomain:
		v.Block.Mode = query.BlockNXDomain
	case usercache.BlockNoData:
		v.Block.Mode = query.BlockNoData
	case usercache.BlockRefused:
		v.Block.Mode = query.BlockRefused
	case usercache.BlockCustomIP:
		v.Block.Mode = query.BlockCustom
		if p.BlockIPv4 != [4]byte{} {
			v.Block.IPv4 = netip.AddrFrom4(p.BlockIPv4)
		}
		if p.BlockIPv6 != [16]byte{} {
			v.Block.IPv6 = netip.AddrFrom16(p.BlockIPv6)
		}
	}
	return v
}
