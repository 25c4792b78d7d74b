// Package policy gives a user's verdict on a question, and on its answer.
//
// Precedence, the first that matches wins; TestPrecedence is this table, and TestPairs meets each row with each:
//
//	 0  the user's access lists, by name                 refused
//	 1  filtering is off, paused, or a schedule pauses everything: pass
//	 2  a name unblocked for a while                     allowed
//	 3  the user's own $important exception, then block  allowed, blocked
//	 4  rules of the device                              allowed, blocked, rewritten
//	 5  rules of the user, then of the shared policy     allowed, blocked, rewritten
//	 6  rewrites                                         rewritten
//	 7  safe search                                      redirected
//	 8  record types that are switched off, ways around the resolver
//	 9  schedules and services                           blocked
//	10  private lists and catalogue lists, as one        allowed, blocked, rewritten
//	11  threat lists                                     blocked, rewritten; an exception of a catalogue list does not lift it
//
// A rule's $client knows a device by its id and its addresses and, in rules of device, user and shared policy, by the
// name its owner gave it; lists know no such names.
//
// Access lists by network come before all of these and belong to package overload. Within one text of rules or
// one set of lists the order is package filter's; in row 10 it is that of AdGuard over all lists together: rewrites,
// $important exceptions, $important blocks, exceptions, blocks. Of schedules active at once those that pause come
// before those that block.
//
// The answer is judged by the same rows: each alias and each other name it leads to by 2 to 5 and 9 to 11, each
// address by the rules that know addresses, and by rebinding protection; a rule's $dnstype is then about the
// record, so that an alias is of type CNAME; and what came for a question of type ANY is judged as if its types had been
// asked for, by row 8 too. An answer whose question was Allowed is not judged, except that an
// exception of a catalogue list lifts neither threats nor rebinding protection. Where an answer holds private
// addresses by right, rebinding protection looks at the name that was asked: an alias of anybody's could lead to
// a name that is excepted. Local data is the operator's, and may hold any address.
//
// Rules of policy zones (RPZ) in lists and in rules of one's own judge what is behind an answer as well: its addresses
// and, for each name of its chain of aliases, the name servers of the zones on the way to that name. As such zones
// have it, the name goes before addresses and these before servers: a name that is Allowed, and a last name with an
// address that is, is not judged by its servers. Which servers those are, and when none are known, is what
// Options.Servers says; local data has none. What such a rule has to say in the place of the answer is said to who
// asked, whichever name of the chain it was about; a redirect to the present question leaves the answer as it is.
//
// A Policy reads users' settings from the query's Profile and compiles nothing on the way: catalogue lists,
// services and safe search are one immutable snapshot, rebuilt in the background when the catalogue or a blob
// changes; a user's own rules and lists are compiled by Prepare, which the pipeline calls where it may wait,
// and shared by all whose text is the same. What is compiled is kept within a budget of bytes for all users
// together (compiled.go); what is dropped is compiled anew when its user asks again. A list whose bytes are not
// there yet keeps its last version, or matches nothing; it is named in Missing. A user's own lists and rules keep
// theirs too, as far as that is remembered (texts.go), and for some seconds a list whose new version would take too much
// memory beside the old one (index.go).
package policy

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"
	"weak"

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
	WhyAccess
	NumWhy = iota
)

var whyNames = [NumWhy]string{"nothing", "filtering off", "unblocked", "important rule", "device rule", "user rule", "policy rule", "rewrite",
	"safe search", "record type", "bypass", "schedule", "service", "own list", "list", "threat list", "rebinding protection", "policy zone", "access list"}

// WhyText names what decided.
func WhyText(w query.Why) string { return whyNames[w] }

// Extended errors of blocking answers (RFC 8914 section 4): Filtered for what the user chose, Blocked for threats,
// Censored for what others demand of the operator.
const (
	edeBlocked  = 15
	edeCensored = 16
	edeFiltered = 17
)

// Users are what a Policy reads besides the query's Profile; usercache.Cache has it.
type Users interface {
	Catalogue() *usercache.Catalogue
	RuleText(p *usercache.Profile, t usercache.RuleText) ([]byte, bool)
	LookupUser(id *usercache.ID) (usercache.UserInfo, bool)
}

// Options are what a Policy needs.
type Options struct {
	// Key hashes names.
	Key dnsname.Key
	// Users are needed.
	Users Users
	// Blob returns a text by the SHA-256 of its content, or false while it is not there. Nil has none.
	Blob func(sha256 [32]byte) ([]byte, bool)
	// Servers returns the name servers of the zones on the way to a name of an answer, with their addresses if those
	// matter. Nil: nobody knows any.
	Servers func(q *query.Query, a *query.Answer, name dnsname.Name, addrs bool) query.Servers
	// OpenBlob opens a catalogue list's text, which may be longer than is good for memory; nil takes it from Blob.
	OpenBlob func(sha256 [32]byte) (io.ReadCloser, bool)
	// Changed is sent to when the catalogue may have changed or a blob has arrived. Nil: nothing changes
	// after New.
	Changed <-chan struct{}
	// Index is the file that keeps the index of the catalogue's lists for the next start; "" keeps none.
	Index string
	// OwnTexts is the file that keeps which texts of users were in force for the next start; "" keeps it not.
	OwnTexts string
	// OwnBytes bounds the memory of users' own rules and lists, compiled; 0 means 64 MiB. One user may have an
	// eighth of it.
	OwnBytes int64
	Logger   *slog.Logger
}

// A Policy judges queries. It is safe for concurrent use.
type Policy struct {
	o     Options
	state atomic.Pointer[state]
	own   compiled
	// changes counts what may have brought a text that was missing.
	changes atomic.Uint64
	// What Untried returns.
	untried, ownUntried atomic.Uint64

	listsChanged chan struct{} // of one: the lists' index may not be on disk
	replaced     chan struct{} // of one: a text is in force in the place of one that has not arrived

	making sync.Mutex            // held while the state is made anew; no query waits for it
	former []weak.Pointer[shelf] // of states before this one
	merged bool                  // since the index was written

	// keep's.
	saved                 [usercache.MaxLists]filter.ID // the lists as they were written, or read
	textsSaved            [sha256.Size]byte             // of what says which texts are in force, as it was written
	unsaved, textsUnsaved bool                          // the disk failed
}

// New returns a Policy of the catalogue as it is.
func New(o Options) *Policy {
	if o.Blob == nil {
		o.Blob = func([32]byte) ([]byte, bool) { return nil, false }
	}
	if o.OpenBlob == nil {
		o.OpenBlob = func(sum [32]byte) (io.ReadCloser, bool) {
			text, ok := o.Blob(sum)
			return io.NopCloser(bytes.NewReader(text)), ok
		}
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.OwnBytes == 0 {
		o.OwnBytes = 64 << 20
	}
	p := &Policy{o: o, listsChanged: make(chan struct{}, 1), replaced: make(chan struct{}, 1)}
	p.own.init(o.OwnBytes)
	p.loadTexts()
	first := &state{key: o.Key}
	first.loadIndex(&p.o)
	p.saved = first.listHash
	p.state.Store(p.newState(first))
	p.tellListsChanged()
	return p
}

// Run follows changes of the catalogue and arriving blobs until ctx ends.
func (p *Policy) Run(ctx context.Context) error {
	var files sync.WaitGroup
	files.Go(func() { p.keep(ctx) })
	defer files.Wait()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.o.Changed:
			p.Update()
		}
	}
}

// Update brings the snapshot up to the present catalogue. It returns when queries are judged by it, but for lists that
// wait for memory: those are judged by the version before until the ones that came first are merged.
func (p *Policy) Update() {
	p.changes.Add(1)
	p.making.Lock()
	defer p.making.Unlock()
	old := p.state.Load()
	s := p.newState(old)
	if s == old {
		return
	}
	p.state.Store(s)
	if s.lists != old.lists {
		p.former = slices.DeleteFunc(p.former, func(w weak.Pointer[shelf]) bool { return w.Value() == nil })
		p.former = append(p.former, weak.Make(old.lists))
		p.tellListsChanged()
	}
}

// Missing returns the ids of catalogue lists whose present bytes are not here.
func (p *Policy) Missing() []string { return p.state.Load().missing }

// Serving reports whether queries are judged by the present catalogue with the bytes of all its lists, and the
// revision of the newest catalogue of which that was so.
func (p *Policy) Serving() (present bool, revision uint64) {
	s := p.state.Load()
	return s.isWhole() && s.catalogue == p.o.Users.Catalogue(), s.whole
}

// Stats returns what the catalogue's lists come to.
func (p *Policy) Stats() filter.Stats { return p.state.Load().lists.Load().Stats() }

// A judge is one judgement under way: of a question or of the names and addresses of an answer.
type judge struct {
	s   *view
	q   *query.Query
	p   *usercache.Profile
	own *own // the user's own rules, compiled; nil if there are none
	fq  filter.Query
	// What applies, if schedules or numbers given again change it; otherwise it is the profile's. blocked is a
	// schedule that blocks everything.
	varied                   bool
	lists, threats, services filter.Set
	blocked                  *usercache.Schedule
	addr                     netip.Addr                                                          // of the answer: the one being judged
	served                   func(*query.Query, *query.Answer, dnsname.Name, bool) query.Servers // Options.Servers
	trace                    func(Step)                                                          // nil on the query path
	told                     bool                                                                // trace hears which schedules pause a part
}

// now returns what applies at this time.
func (j *judge) now() (lists, threats, services *filter.Set) {
	if j.varied {
		return &j.lists, &j.threats, &j.services
	}
	return (*filter.Set)(&j.p.Lists), (*filter.Set)(&j.p.Threats), (*filter.Set)(&j.p.Services)
}

// vary makes what applies the judge's own, to be changed.
func (j *judge) vary() {
	if !j.varied {
		j.lists, j.threats, j.services = filter.Set(j.p.Lists), filter.Set(j.p.Threats), filter.Set(j.p.Services)
		j.varied = true
	}
}

// catalogue returns the matcher of the catalogue's lists. Which of them apply is to be asked for after it.
func (j *judge) catalogue() *filter.Matcher {
	m := j.s.lists.Load()
	if void := j.s.lists.void.Load(); void != nil {
		j.vary()
		j.lists, j.threats = j.lists.Minus(*void), j.threats.Minus(*void)
	}
	return m
}

// avoid takes away what has another meaning in the view than in the profile.
func (j *judge) avoid() {
	void := &j.s.void
	(*usercache.ListSet)(&j.lists).RemoveAll(&void.Lists)
	(*usercache.ListSet)(&j.threats).RemoveAll(&void.Lists)
	(*usercache.ServiceSet)(&j.services).RemoveAll(&void.Services)
}

func (p *Policy) judge(q *query.Query) judge {
	v, _ := q.Client.Catalogue.(*view)
	if v == nil {
		v = p.pin(q)
	}
	j := judge{s: v, q: q, p: &q.Client.Profile, served: p.o.Servers}
	if v != &v.view {
		j.vary()
		j.avoid()
	}
	if j.p.Details != nil {
		j.own, _ = q.Client.Rules.(*own)
		j.fq.Tags = j.p.Details.Tags
	}
	id := j.p.DeviceID.Bytes()
	j.fq.Client = unsafe.String(unsafe.SliceData(id), len(id)) // lives as long as q
	j.fq.Addr = q.Source.Addr().Unmap()
	q.Scratch.Spent, q.Scratch.OwnSpent = 0, 0
	j.charge(false)
	return j
}

// charge says what the rules that are tried next are counted as. What a user writes has a bound of its own, so that
// however dear it is to try, the operator's rules are tried all the same.
func (j *judge) charge(own bool) {
	j.fq.Spent = &j.q.Scratch.Spent
	if own {
		j.fq.Spent = &j.q.Scratch.OwnSpent
	}
}

// count notes judgements that left rules untried.
func (p *Policy) count(q *query.Query) {
	if filter.Exhausted(q.Scratch.Spent) {
		p.untried.Add(1)
	}
	if filter.Exhausted(q.Scratch.OwnSpent) {
		p.ownUntried.Add(1)
	}
}

// Untried returns how many judgements, of a question or of an answer, left rules of the operator's or of users
// untried, because they would have cost too much.
func (p *Policy) Untried() (operators, users uint64) { return p.untried.Load(), p.ownUntried.Load() }

// filtering is row 1, and finds out what applies now.
func (j *judge) filtering() bool {
	p := j.p
	if !p.Is(usercache.Enabled) {
		j.step(WhyOff, query.Pass, "filtering is switched off", "enabled=true")
		return false
	}
	scheduled := p.Details != nil && len(p.Details.Schedules) > 0
	if p.PausedUntil == 0 && !scheduled {
		return true
	}
	now := clock.Wall()
	if now.Unix() < p.PausedUntil {
		if j.trace != nil {
			j.step(WhyOff, query.Pass, "filtering is paused until "+instant(p.PausedUntil), "paused_until=0")
		}
		return false
	}
	return !scheduled || j.schedules(now)
}

// schedules changes what applies at this time; false if everything pauses.
func (j *judge) schedules(now time.Time) bool {
	all := j.p.Details.Schedules
	for _, pause := range [...]bool{false, true} {
		for i := range all {
			s := &all[i]
			if s.Pause != pause || !s.Active(now) {
				continue
			}
			switch {
			case s.Everything && pause:
				if j.trace != nil {
					j.step(WhyOff, query.Pass, "schedule "+s.ID+" pauses all filtering", "schedules-="+s.ID)
				}
				return false
			case s.Everything:
				j.blocked = s
				continue
			}
			j.vary()
			lists, threats, services := (*usercache.ListSet)(&j.lists), (*usercache.ListSet)(&j.threats), (*usercache.ServiceSet)(&j.services)
			if pause {
				if j.told {
					j.step(WhySchedule, query.Pass, "schedule "+s.ID+" pauses the services, categories and lists it names", "schedules-="+s.ID)
				}
				services.RemoveAll(&s.Services)
				lists.RemoveAll(&s.Lists)
				threats.RemoveAll(&s.Threats)
				threats.RemoveAll(&s.Lists) // who names a list means it, whatever it is used as
			} else {
				services.AddAll(&s.Services)
				lists.AddAll(&s.Lists)
				threats.AddAll(&s.Threats)
			}
		}
	}
	if j.s != &j.s.view {
		j.avoid()
	}
	return true
}

// Question judges q.Turn.Current.
func (p *Policy) Question(q *query.Query) query.Verdict {
	if q.Client.Profile.Flags == 0 && q.Client.Profile.Details == nil {
		return query.Verdict{} // nobody's profile, or one that wants nothing
	}
	j := p.judge(q)
	v := j.question()
	p.count(q)
	return v
}

func (j *judge) question() query.Verdict {
	if d := j.p.Details; d != nil && j.q.Turn.NumAliases == 0 && !d.AdmitsName(string(j.q.Turn.Current.Name)) {
		return j.denied(d)
	}
	if !j.filtering() {
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

// denied is row 0.
func (j *judge) denied(d *usercache.Details) query.Verdict {
	v := query.Verdict{Kind: query.Refused, Why: WhyAccess}
	v.Block.Reason = "the access list"
	switch n := j.q.Turn.Current.Name; {
	case j.trace == nil:
	case d.DenyDomains.Has(string(n)):
		j.step(WhyAccess, query.Refused, "deny_domains has the name, or one above it", "deny_domains without it")
	default:
		j.step(WhyAccess, query.Refused, "allow_domains has neither the name nor one above it", "allow_domains+="+strings.TrimSuffix(n.String(), "."))
	}
	return v
}

// A name is a canonical name with its suffix hashes.
type name struct {
	text    dnsname.Name
	wire    []byte
	hashes  []uint64
	servers bool // it is about its name servers, and only text is set
}

func (j *judge) hash(n dnsname.Name) name {
	wire := unsafe.Slice(unsafe.StringData(string(n)), len(n)) // read only
	k := dnsname.SuffixHashes(&j.s.key, wire, &j.q.Scratch.Hashes)
	return name{text: n, wire: wire, hashes: j.q.Scratch.Hashes[:k]}
}

// early is rows 2 to 5.
func (j *judge) early(n *name) query.Verdict {
	if j.own == nil || n.text == localhost {
		return query.Verdict{}
	}
	if u := j.own.unblocked(n.text); u != nil {
		if j.trace != nil {
			until := ""
			if u.until != 0 {
				until = " until " + instant(u.until)
			}
			j.step(WhyUnblocked, query.Allowed, "unblocks has "+u.text+until, "unblocks-="+u.text)
		}
		return query.Verdict{Kind: query.Allowed, Why: WhyUnblocked}
	}
	var results [3]filter.Result
	j.fq.Name = j.p.Details.Name
	for i, m := range j.own.rules {
		if m != nil {
			j.charge(i != policyRules)
			results[i] = m.MatchHashed(n.wire, n.hashes, nil, &j.fq)
		}
	}
	j.charge(false)
	j.fq.Name = "" // lists are written for many, and what somebody calls his device means nothing there
	return j.ranked(&results, n)
}

// ranked is rows 3 to 5 over what the texts of device, user and policy say.
func (j *judge) ranked(results *[3]filter.Result, n *name) query.Verdict {
	for _, want := range [...]filter.Verdict{filter.Allowed, filter.Blocked} {
		for i := range results {
			if r := &results[i]; r.Important && r.Verdict == want {
				return j.result(source{j.own.rules[i], int8(i)}, r, WhyImportant, n)
			}
		}
	}
	for i := range results {
		if r := &results[i]; r.Verdict != filter.None {
			return j.result(source{j.own.rules[i], int8(i)}, r, WhyDeviceRule+query.Why(i), n)
		}
	}
	return query.Verdict{}
}

// rewrites is rows 6 and 7.
func (j *judge) rewrites(n *name) query.Verdict {
	if j.own != nil {
		if r := j.own.rewrites.find(n.text); r != nil {
			if v := r.verdict(j.fq.Type, n.text, WhyRewrite, j.p.BlockTTL); v.Kind != query.Pass {
				if j.trace != nil {
					j.step(WhyRewrite, v.Kind, "rewrites has "+r.text, "rewrites-="+r.name)
				}
				return v
			}
		}
	}
	switch j.fq.Type {
	case dnswire.TypeA, dnswire.TypeAAAA, dnswire.TypeHTTPS, dnswire.TypeSVCB, dnswire.TypeANY:
	default:
		return query.Verdict{} // safe search is about where browsers connect to; the engine's mail is its own
	}
	for mask := j.p.SafeSearch &^ j.s.void.SafeSearch; mask != 0; mask &= mask - 1 {
		i := trailingZeros(mask)
		if r := j.s.safeSearch[i].find(n.text); r != nil {
			if v := r.verdict(j.fq.Type, n.text, WhySafeSearch, safeSearchTTL); v.Kind != query.Pass {
				if j.trace != nil {
					id := j.s.catalogue.Engine(i)
					j.step(WhySafeSearch, v.Kind, "the safe mode of "+id+" has "+r.text, "safe_search-="+id)
				}
				return v
			}
		}
	}
	return query.Verdict{}
}

// switches is row 8.
func (j *judge) switches(n *name) query.Verdict {
	change := ""
	switch j.fq.Type {
	case dnswire.TypeHTTPS, dnswire.TypeSVCB:
		if j.p.Is(usercache.BlockHTTPSRecords) {
			change = "block_https_records=false"
		}
	}
	if j.own != nil && change == "" {
		for _, t := range j.own.types {
			if t == j.fq.Type {
				change = "block_types without the type"
			}
		}
	}
	if change != "" {
		j.step(WhyType, query.Blocked, "records of this type are switched off", change)
		v := j.block(WhyType, "record type switched off", edeFiltered)
		v.Block.Mode = query.BlockNoData
		return v
	}
	const any = usercache.BlockBypass | usercache.BlockFirefoxCanary | usercache.BlockPrivateRelay
	if j.p.Flags&any != 0 {
		if by := bypasses[n.text]; j.p.Flags&by != 0 {
			if j.trace != nil {
				j.step(WhyBypass, query.Blocked, n.text.String()+" leads around the resolver", bypassKeys[by&^usercache.BlockBypass]+"=false block_bypass=false")
			}
			v := j.block(WhyBypass, "way around the resolver", edeFiltered)
			v.Block.Mode = query.BlockNXDomain
			return v
		}
	}
	return query.Verdict{}
}

// bypasses are names whose absence tells browsers and systems not to go around the network's resolver:
// Firefox's canary and Apple's private relay; and the switches that deny them.
var bypasses = map[dnsname.Name]usercache.Flags{
	dnsname.MustParse("use-application-dns.net."): usercache.BlockBypass | usercache.BlockFirefoxCanary,
	dnsname.MustParse("mask.icloud.com."):         usercache.BlockBypass | usercache.BlockPrivateRelay,
	dnsname.MustParse("mask-h2.icloud.com."):      usercache.BlockBypass | usercache.BlockPrivateRelay,
	dnsname.MustParse("mask-canary.icloud.com."):  usercache.BlockBypass | usercache.BlockPrivateRelay,
	dnsname.MustParse("mask.apple-dns.net."):      usercache.BlockBypass | usercache.BlockPrivateRelay,
}

var bypassKeys = map[usercache.Flags]string{
	usercache.BlockFirefoxCanary: "block_firefox_canary", usercache.BlockPrivateRelay: "block_private_relay",
}

// localhost is never judged by rules: hosts files name it with its own address, which is no blocking, and its answer
// is local data.
var localhost = dnsname.MustParse("localhost.")

// late is rows 9 to 11.
func (j *judge) late(n *name) query.Verdict {
	if n.text == localhost {
		return query.Verdict{}
	}
	if j.blocked != nil {
		if j.trace != nil {
			j.step(WhySchedule, query.Blocked, "schedule "+j.blocked.ID+" blocks everything now", "schedules-="+j.blocked.ID)
		}
		return j.block(WhySchedule, "schedule", edeFiltered)
	}
	catalogue := j.catalogue()
	lists, threats, services := j.now()
	if *services != (filter.Set{}) {
		r := j.s.services.MatchHashed(n.wire, n.hashes, services, &j.fq)
		if r.Verdict == filter.Blocked {
			return j.result(source{matcher: j.s.services}, &r, WhyService, n)
		}
	}
	var best filter.Result
	from, why := source{}, WhyNothing
	if j.own != nil {
		for i := range j.own.lists {
			m := j.own.lists[i].matcher
			j.charge(!j.own.lists[i].ofPolicy)
			if r := m.MatchHashed(n.wire, n.hashes, nil, &j.fq); outranks(&r, &best) {
				best, from, why = r, source{m, int8(i)}, WhyOwnList
			}
		}
		j.charge(false)
	}
	if *lists != (filter.Set{}) {
		if r := j.memo().Match(catalogue, n.wire, n.hashes, lists, &j.fq); outranks(&r, &best) {
			best, from, why = r, source{matcher: catalogue}, WhyList
		}
	}
	var verdict query.Verdict
	if why != WhyNothing {
		if verdict = j.result(from, &best, why, n); verdict.Kind != query.Pass && (verdict.Kind != query.Allowed || why != WhyList) {
			return verdict
		}
	}
	if *threats != (filter.Set{}) {
		if r := j.memo().Match(catalogue, n.wire, n.hashes, threats, &j.fq); isThreat(&r) {
			return j.result(source{matcher: catalogue}, &r, WhyThreat, n)
		}
	}
	return verdict
}

// memo returns what the worker remembers of the catalogue's lists. Users' own rules stay out of it: they are many, and
// each is asked by few.
func (j *judge) memo() *filter.Memo {
	m, _ := j.q.Scratch.Policy.(*filter.Memo)
	if m == nil {
		m = new(filter.Memo)
		j.q.Scratch.Policy = m
	}
	return m
}

// outranks says whether a decides over b, both being of row 10.
func outranks(a, b *filter.Result) bool { return standing(a) > standing(b) }

func standing(r *filter.Result) int {
	switch {
	case r.Verdict == filter.Rewritten:
		return 5
	case r.Verdict == filter.Allowed && r.Important:
		return 4
	case r.Verdict == filter.Blocked && r.Important:
		return 3
	case r.Verdict == filter.Allowed:
		return 2
	case r.Verdict == filter.Blocked:
		return 1
	}
	return 0
}

// Answer judges what came back for q.Turn.Current; sofar is what Question said.
func (p *Policy) Answer(q *query.Query, a *query.Answer, sofar query.Verdict) query.Verdict {
	if q.Client.Profile.Flags == 0 || len(a.Facts) == 0 && q.Turn.Current.Type != dnswire.TypeANY {
		return query.Verdict{}
	}
	j := p.judge(q)
	v := j.answer(a, sofar)
	p.count(q)
	return v
}

func (j *judge) answer(a *query.Answer, sofar query.Verdict) query.Verdict {
	excepted := sofar.Kind == query.Allowed
	if excepted && sofar.Why != WhyList || sofar.Why == WhyOff || !j.filtering() {
		return query.Verdict{}
	}
	// Rewriting is for what was asked, not for where others point; but policy zones mean both.
	j.fq.NoRewrite = true
	served := servedNames{excepted: excepted}
	typ := j.q.Turn.Current.Type
	if typ == dnswire.TypeANY {
		var v query.Verdict
		if v, typ = j.types(a, excepted); v.Kind != query.Pass {
			return v
		}
	}
	for off := 0; ; {
		kind, value, next, ok := a.Facts.Next(off)
		if !ok {
			return j.servers(a, &served)
		}
		off = next
		var v query.Verdict
		switch kind {
		case query.FactAlias:
			served.next()
			j.fq.Type = dnswire.TypeCNAME
			v = j.target(value, excepted)
		case query.FactTarget:
			j.fq.Type = typ
			v = j.target(value, excepted)
		case query.FactAddress:
			addr, _ := netip.AddrFromSlice(value)
			v = j.address(addr, typ, excepted)
		case query.FactZone:
			continue
		}
		switch v.Kind {
		case query.Pass:
		case query.Allowed:
			// An exception for one name of a chain is about that name: the others are judged on.
			if kind != query.FactTarget {
				served.lift(v.Why)
			}
		case query.Redirected:
			if v.Target != j.q.Turn.Current.Name { // where a rule about addresses leads, it may well apply too
				return v
			}
		default:
			return v
		}
	}
}

// types judges the name asked for by each type that an answer to a question of type ANY has records of, as if that had
// been asked for: whoever may not have one type of a name does not get it by asking for any. It returns the last type as
// well, of the records that the answer is about.
func (j *judge) types(a *query.Answer, excepted bool) (v query.Verdict, last uint16) {
	n := j.hash(j.q.Turn.Current.Name)
	last = j.q.Turn.Current.Type
	for off, i := 0, uint16(0); i < a.AN; i++ {
		rr, next := dnswire.ReadRR(a.Body, off)
		if off = next; off < 0 {
			break
		}
		if rr.Type == last || rr.Type == dnswire.TypeRRSIG {
			continue
		}
		last, j.fq.Type = rr.Type, rr.Type
		switch {
		case excepted:
			v = j.threat(&n)
		default:
			if v = j.early(&n); v.Kind == query.Pass {
				v = j.switches(&n)
			}
			if v.Kind == query.Pass {
				v = j.late(&n)
			}
		}
		if v.Kind != query.Pass && v.Kind != query.Allowed {
			return v, last
		}
	}
	return query.Verdict{}, last
}

// target judges a name that the answer leads to; excepted says that a catalogue list's exception let the question
// through.
func (j *judge) target(to []byte, excepted bool) query.Verdict {
	n := j.hash(dnsname.Name(unsafe.String(unsafe.SliceData(to), len(to))))
	if excepted {
		return j.threat(&n)
	}
	if v := j.early(&n); v.Kind != query.Pass {
		return v
	}
	return j.late(&n)
}

// threat is row 11 alone.
func (j *judge) threat(n *name) query.Verdict {
	m := j.catalogue()
	if _, threats, _ := j.now(); *threats != (filter.Set{}) {
		if r := j.memo().Match(m, n.wire, n.hashes, threats, &j.fq); isThreat(&r) {
			return j.result(source{matcher: m}, &r, WhyThreat, n)
		}
	}
	return query.Verdict{}
}

// isThreat says whether a threat list is against what it was asked about, whatever it wants done.
func isThreat(r *filter.Result) bool {
	return r.Verdict == filter.Blocked || r.Verdict == filter.Rewritten
}

// address judges an address of the answer to a question of a type, by the rules that know addresses.
func (j *judge) address(a netip.Addr, typ uint16, excepted bool) query.Verdict {
	if j.p.Is(usercache.RebindingProtection) && special(a) && !j.mayBePrivate() {
		if j.trace != nil {
			j.step(WhyRebinding, query.Blocked, a.String()+" is a private address for a public name",
				"rebinding_exceptions+="+strings.TrimSuffix(j.q.Question.Name.String(), "."))
		}
		return j.block(WhyRebinding, "private address for a public name", edeFiltered)
	}
	switch typ {
	case dnswire.TypeHTTPS, dnswire.TypeSVCB: // an address hint
		j.fq.Type = typ
	default:
		j.fq.Type = dnswire.TypeA
		if a.Is6() {
			j.fq.Type = dnswire.TypeAAAA
		}
	}
	j.addr = a
	return j.behind(&behind{addr: a}, &name{}, excepted)
}

// mayBePrivate reports whether the answer may hold private addresses: it is local data, or the user excepts the
// name that was asked.
func (j *judge) mayBePrivate() bool {
	d := j.p.Details
	return j.q.Turn.Local || d != nil && d.RebindingExceptions.Has(string(j.q.Question.Name))
}

// special reports addresses that a public name should not have: private, loopback, link-local, shared, of "this"
// network, site-local (RFC 6890, 6598 and 3879), and such ones inside IPv6.
func special(a netip.Addr) bool {
	a = a.Unmap()
	if a.IsPrivate() || a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsUnspecified() {
		return true
	}
	for _, p := range specials {
		if p.Contains(a) {
			return true
		}
	}
	if !a.Is6() {
		return false
	}
	b := a.As16()
	switch {
	case nat64.Contains(a), compatible.Contains(a):
		return special(netip.AddrFrom4([4]byte(b[12:])))
	case sixToFour.Contains(a):
		return special(netip.AddrFrom4([4]byte(b[2:6])))
	}
	return false
}

var specials = [...]netip.Prefix{netip.MustParsePrefix("100.64.0.0/10"), netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("fec0::/10")}

// IPv6 addresses that lead to an IPv4 address in them (RFC 6052, 4291 section 2.5.5.1 and 3056).
var nat64, compatible, sixToFour = netip.MustParsePrefix("64:ff9b::/96"), netip.MustParsePrefix("::/96"), netip.MustParsePrefix("2002::/16")

// A source is the matcher that a result is of; i tells which of several of its kind it is, for explanations.
type source struct {
	matcher *filter.Matcher
	i       int8
}

// result turns what rules say into a verdict.
func (j *judge) result(from source, r *filter.Result, why query.Why, n *name) query.Verdict {
	m := from.matcher
	v := query.Verdict{Why: why, List: r.List, Line: r.Line}
	switch r.Verdict {
	case filter.Allowed:
		v.Kind = query.Allowed
	case filter.Blocked:
		if addrs := slices.DeleteFunc(m.HostAddrs(r, j.fq.Type), meansBlocked); len(addrs) > 0 {
			v.Kind, v.Synth = query.Synthesised, addressSynth(addrs, j.fq.Type, j.p.BlockTTL)
			break
		}
		b := j.block(why, j.reason(from, r, why), j.s.ede(why, r.List))
		if b.Block.Mode == query.BlockNXDomain && leads(m, r) {
			b.Block.Mode = query.BlockNoData
		}
		v.Kind, v.Block = b.Kind, b.Block
	case filter.Rewritten:
		v = rewritten(m, r, v, j.q.Turn.Current.Name, j.q.Turn.Wanted(), j.p.BlockTTL) // what is asked for, whatever was judged
	case filter.None:
	}
	if j.trace != nil {
		j.explain(from, r, why, n, &v)
	}
	return v
}

// meansBlocked reports whether an address is one that hosts lines use to say "blocked". Beside others, which lead
// somewhere, it says nothing.
func meansBlocked(a netip.Addr) bool { return a.IsUnspecified() || a.IsLoopback() }

// leads reports whether hosts lines have an address for the name, of whichever family. Other types are blocked then
// as all that hosts lines name, but that the name does not exist must not be said: clients that ask for A and AAAA at
// once believe it, and drop the address.
func leads(m *filter.Matcher, r *filter.Result) bool {
	for _, typ := range [...]uint16{dnswire.TypeA, dnswire.TypeAAAA} {
		if slices.ContainsFunc(m.HostAddrs(r, typ), func(a netip.Addr) bool { return !meansBlocked(a) }) {
			return true
		}
	}
	return false
}

// reason is the text of the extended error: the name of the list or service that blocked.
func (j *judge) reason(from source, r *filter.Result, why query.Why) string {
	switch why {
	case WhyList, WhyThreat:
		return j.s.listNames[r.List]
	case WhyService:
		return j.s.serviceNames[r.List]
	case WhyOwnList:
		return j.own.lists[from.i].id
	}
	return whyNames[why]
}

// block is the user's way of blocking.
func (j *judge) block(why query.Why, reason string, ede uint16) query.Verdict {
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
