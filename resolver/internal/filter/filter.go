// Package filter matches names and addresses against compiled rules.
//
// A Matcher is immutable and safe for concurrent use. It holds up to MaxLists numbered lists in one index,
// so that a query costs the same whatever number of them a user has chosen: for each suffix of the name one
// probe by hash yields the set of lists that have a rule there, and a user's choice is a Set to intersect
// with it. Private lists and custom rules are Matchers of one list, made by Compile.
//
// Names go in as canonical wire form (package dnsname). Out comes a Result: the verdict of all chosen lists
// together with the list and line of the rule that decided; the text of the rule is the list's line. Within
// the chosen lists the first of these wins, as in AdGuard: rewrites, $important exceptions, $important
// blocks, exceptions, blocks, hosts lines. A rule of one chosen list disables its twins in all ($badfilter). Of a
// list that is a policy zone (RPZ) only the longest match counts, and its rules for clients come before all names;
// what such lists say of an answer's addresses and name servers, MatchAddr and MatchServers tell.
// What stands above and below that order (a user's settings, services, schedules) is package policy's.
//
// How it is kept. A rule that needs no more than a suffix is sixteen bytes in an open-addressing table, keyed
// by the 64-bit SipHash of the suffix, and a line number; two names are taken for the same only if all 64
// bits agree, under a key that no list author knows. The rest, patterns, expressions and rules with
// conditions, hang off a suffix, off the first bytes of a label or off four or eight literal bytes that any name
// they match must contain; the few that have none are tried on every name that has their characters. A base table
// and up to MaxOverlays younger ones are searched together, so that a changed list costs its own size, and Merge
// makes them one again. Big tables lie outside of the Go heap, in pieces that are given back when no Matcher is left
// that has them; merging makes use of that to have never much more than one of old and new in memory.
//
// How it is asked. Nearly all places of nearly all names meet nothing. So filters, small enough to stay in the
// processor's caches, are asked for all places at once and without branches, and only what they let through is looked
// up, and of that only rules whose pairs of bytes the name has. Memory that is far away is fetched before it is needed
// (prefetch: one instruction of assembly, without which a miss takes a fifth longer). A Memo keeps, for one goroutine, where the names and addresses it sees all the time were found. The sets of
// lists that have a fact are not kept beside answers in the cache, as was planned: a Memo does the same for all
// answers that name a thing, needs no bytes an answer, and no answer has to be thrown away when lists change.
//
// Matching allocates nothing and does no I/O. A list's author can slow only names that meet his rules, and
// those within limits: rules beyond them are left out and named (Dropped), and what trying rules may cost a query is
// bounded (Query.Spent). The root name is never filtered.
package filter

import (
	"bytes"
	"net/netip"
	"runtime"
	"unsafe"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/filter/rulelist"
)

// A Verdict is what the rules say about a name.
type Verdict uint8

// The verdicts.
const (
	None      Verdict = iota // no rule matches
	Blocked                  // answer by the blocking mode, or by Matcher.HostAddrs
	Allowed                  // an exception lets it pass
	Rewritten                // answer as Matcher.Rewrite says
)

// String returns the verdict's name as used outside of the program.
func (v Verdict) String() string {
	switch v {
	case None:
		return "none"
	case Blocked:
		return "blocked"
	case Allowed:
		return "allowed"
	case Rewritten:
		return "rewritten"
	}
	return "invalid"
}

// Query is what a rule may ask about beyond the name. The zero value is a query by nobody in particular.
type Query struct {
	Type   uint16     // QTYPE; when judging an answer, the type of the record
	Client string     // the device's id, for $client
	Name   string     // what its owner calls it, for $client too; "" if the rules need not know
	Addr   netip.Addr // the client's address, for $client
	Tags   []string   // the device's tags, for $ctag
	// NoRewrite leaves out the rewrites of all but policy zones, for names that were not asked for: such a zone is
	// about all names of a chain of aliases.
	NoRewrite bool
	// Spent counts what matching costs, as far as that depends on what authors of rules write: when it is more than
	// maxSpent, rules that are not in tables are not tried any more. Nil counts for each name anew.
	Spent *int
}

// Exhausted reports whether so much has been spent that rules are left untried.
func Exhausted(spent int) bool { return spent > maxSpent }

// maxRefs is how many rewrites, or addresses of hosts lines, one answer can be made of. More are left
// out, of which the compiler names those that are of one list and one name.
const maxRefs = rulelist.MaxRecords

// A Result is the verdict on one name. It belongs to the Matcher that gave it.
type Result struct {
	Verdict   Verdict
	Important bool   // the deciding rule is $important
	List      uint16 // the number of the list of the deciding rule
	Line      uint32 // its line, from 1

	rank  uint8
	hosts uint8 // bits of hosts forms, from HostNull4
	n     uint8
	refs  [maxRefs]uint32 // rules whose rewrites or addresses make the answer
}

// Match judges a name by the lists chosen; nil chooses all.
func (m *Matcher) Match(name []byte, lists *Set, q *Query) Result {
	var h [dnsname.MaxLabels + 1]uint64
	n := dnsname.SuffixHashes(m.key, name, &h)
	return m.MatchHashed(name, h[:n], lists, q)
}

// MatchHashed is Match for a caller that has the name's suffix hashes: hashes[i] is that of the suffix of
// i+1 labels, under the Matcher's key.
func (m *Matcher) MatchHashed(name []byte, hashes []uint64, lists *Set, q *Query) Result {
	var s *sight
	if m.looks(hashes) {
		s = new(sight)
	}
	suffixes, seen := m.sift(s, name, hashes)
	if suffixes == 0 && seen == nil && len(hashes) <= 64 && m.triggers[rulelist.ByClient] == (prefixSizes{}) {
		runtime.KeepAlive(m) // whose memory the collector does not see
		return Result{}
	}
	return m.match(seen, suffixes, name, hashes, lists, q)
}

// looks reports whether a name has to be looked at for rules that are not in tables.
func (m *Matcher) looks(hashes []uint64) bool { return len(m.rules.all) > 0 && len(hashes) > 0 }

// sift finds the suffixes of a name that may be in tables, as may returns them. If looks says so, s is the room to look
// at the name for other rules; it comes back if one may match. Tables are far away in memory: what is needed of them is
// fetched while the name is looked at.
func (m *Matcher) sift(s *sight, name []byte, hashes []uint64) (suffixes uint64, seen *sight) {
	m.fetch(hashes)
	if s == nil {
		return m.may(hashes), nil
	}
	m.rules.take(s, name)
	suffixes = m.may(hashes)
	if m.rules.look(s, name, hashes) {
		seen = s
	}
	return suffixes, seen
}

// match goes on with a name of which something may be known; s is nil if only the tables may know it.
func (m *Matcher) match(s *sight, suffixes uint64, name []byte, hashes []uint64, lists *Set, q *Query) Result {
	var j judgement
	j.q, j.lists = q, lists
	if lists == nil {
		j.lists = &all
	}
	if !q.Addr.IsValid() || !m.prefixes(&j, rulelist.ByClient, q.Addr) {
		m.suffixes(&j, suffixes, hashes)
		if s != nil {
			var spent int
			m.rules.complex(&j, s, hashes, &spent)
		}
	}
	r := j.finish(m, name)
	runtime.KeepAlive(m)
	return r
}

// MatchAddr judges an address found in an answer; q.Type is the type of its record. Rules know an address by
// its text: ||192.0.2.1^, the bare line 192.0.2.1, and expressions. Rules for names do not apply to it, nor
// do those with $denyallow.
func (m *Matcher) MatchAddr(addr netip.Addr, lists *Set, q *Query) Result {
	var buf [64]byte
	name := rulelist.AppendAddr(buf[:0], addr.Unmap())
	hash := [1]uint64{m.key.Hash(name)}
	suffixes := m.may(hash[:])
	if suffixes == 0 && len(m.rules.all) == 0 && m.triggers[rulelist.ByAnswer] == (prefixSizes{}) {
		runtime.KeepAlive(m)
		return Result{}
	}
	var j judgement
	j.q, j.lists = q, lists
	if lists == nil {
		j.lists = &all
	}
	j.addr = true
	m.prefixes(&j, rulelist.ByAnswer, addr)
	m.suffixes(&j, suffixes, hash[:])
	if len(m.rules.all) > 0 {
		m.rules.addr(&j, name, hash[:])
	}
	r := j.finish(m, name)
	runtime.KeepAlive(m)
	return r
}

// addr judges the rules that are not in tables.
func (x *rules) addr(j *judgement, name []byte, hash []uint64) {
	var s sight
	x.take(&s, name)
	if x.look(&s, name, hash) {
		var spent int
		x.complex(j, &s, hash, &spent)
	}
}

// judgement is the work in progress on one name.
type judgement struct {
	q     *Query
	lists *Set
	addr  bool  // the name is the text of an address
	depth uint8 // labels of the suffix being judged
	best  uint8 // of the deciding rule
	r     Result

	nZones int
	zones  [8]zoneHit // the policy zones that have decided; beyond eight, shorter matches count too

	nRewrite, nCancel, nHost  int
	rewrite, cancel, hostAddr [maxRefs]uint32
}

// A zoneHit is the longest match in a list that is a policy zone.
type zoneHit struct {
	list  uint16
	depth uint8
}

// ranks orders rules of the table and others alike; a higher one wins.
const (
	rankHostOther = 1 + iota // a hosts line of the other address family
	rankHost
	rankBlock
	rankAllow
	rankImportantBlock
	rankImportantAllow
)

func rank(allow, important bool) uint8 {
	switch {
	case allow && important:
		return rankImportantAllow
	case important:
		return rankImportantBlock
	case allow:
		return rankAllow
	}
	return rankBlock
}

// take makes a rule the deciding one if it outranks what is there. Of equals the longest suffix is named, as
// dnsmasq would; then the first by list and line, so that the answer does not depend on how rules are stored.
// Rules that are not in tables have depth 0.
func (j *judgement) take(rank, depth uint8, list uint16, line uint32) {
	r := &j.r
	if rank != r.rank {
		if rank < r.rank {
			return
		}
	} else if depth != j.best {
		if depth < j.best {
			return
		}
	} else if list > r.List || list == r.List && line >= r.Line {
		return
	}
	r.rank, j.best, r.List, r.Line = rank, depth, list, line
}

func hostRank(v6 bool, qtype uint16) uint8 {
	if v6 == (qtype == typeAAAA) {
		return rankHost
	}
	return rankHostOther
}

const (
	typeA    = 1
	typeAAAA = 28
)

// finish turns what was found into the result.
func (j *judgement) finish(m *Matcher, name []byte) Result {
	r := &j.r
	if j.nRewrite > 0 && j.rewritten(m, name) {
		return *r
	}
	switch r.rank {
	case 0:
		return *r
	case rankAllow, rankImportantAllow:
		r.Verdict = Allowed
	default:
		r.Verdict = Blocked
	}
	r.Important = r.rank >= rankImportantBlock
	if r.rank > rankHost {
		r.hosts = 0
		return *r
	}
	r.n = uint8(copy(r.refs[:], j.hostAddr[:j.nHost]))
	return *r
}

// rewritten applies the exceptions to the rewrites and says whether any are left.
func (j *judgement) rewritten(m *Matcher, name []byte) bool {
	rules := m.rules.all
	left := j.rewrite[:0]
	for _, id := range j.rewrite[:j.nRewrite] {
		c := &rules[id]
		rw := m.rules.rewrite(id)
		cancelled := rw.CNAME != "" && sameName(rw.CNAME, name) // a name to itself is no rewrite
		for _, x := range j.cancel[:j.nCancel] {
			e := &rules[x]
			v := m.rules.rewrite(x)
			if (v.Any || *v == *rw) && (e.flags&isImportant != 0 || c.flags&isImportant == 0) {
				cancelled = true
			}
		}
		if !cancelled {
			left = append(left, id)
		}
	}
	if len(left) == 0 {
		return false
	}
	left = m.rules.deepest(left, j.zones[:j.nZones])
	if len(left) == 0 {
		return false
	}
	// In the order of the lists, so that the answer does not depend on how the rules were found.
	for i := 1; i < len(left); i++ {
		for k := i; k > 0 && rules[left[k]].before(&rules[left[k-1]]); k-- {
			left[k], left[k-1] = left[k-1], left[k]
		}
	}
	// A response code goes before a name, a name before data.
	kind := func(id uint32) int {
		switch rw := m.rules.rewrite(id); {
		case rw.RCode != 0 || rw.Action != rulelist.Answer:
			return 0
		case rw.CNAME != "":
			return 1
		}
		return 2
	}
	lead := 0
	for i := range left {
		if kind(left[i]) < kind(left[lead]) {
			lead = i
		}
	}
	r := &j.r
	c := &rules[left[lead]]
	*r = Result{Verdict: Rewritten, Important: c.flags&isImportant != 0, List: c.list, Line: c.line}
	if kind(left[lead]) < 2 {
		r.refs[0], r.n = left[lead], 1
	} else {
		r.n = uint8(copy(r.refs[:], left))
	}
	return true
}

// sameName reports whether text, lower case without a final dot, is the name in wire form.
func sameName(text string, name []byte) bool {
	if len(text)+2 != len(name) {
		return false
	}
	at := 0
	for i := range len(text) {
		if i == at+int(name[at]) {
			if text[i] != '.' {
				return false
			}
			at = i + 1
		} else if text[i] != name[i+1] {
			return false
		}
	}
	return true
}

// What an Answer can be beyond an answer, in policy zones.
const (
	Drop    = rulelist.Drop
	TCPOnly = rulelist.TCPOnly
)

// An Answer is what the rewrites of a Result add up to.
type Answer struct {
	Action rulelist.Action // Drop or TCPOnly: the rest means nothing
	RCode  uint16
	CNAME  string   // if not empty, the name to resolve instead, without the final dot; the rest means nothing
	Data   []string // RDATA of the asked type in presentation form; none with RCode NOERROR is NODATA
}

// Rewrite returns the answer to give for a Result of this Matcher that is Rewritten.
func (m *Matcher) Rewrite(r *Result, qtype uint16) Answer {
	defer runtime.KeepAlive(m)
	var a Answer
	for _, id := range r.refs[:r.n] {
		rw := m.rules.rewrite(id)
		switch {
		case rw.Action != rulelist.Answer:
			return Answer{Action: rw.Action}
		case rw.RCode != 0:
			return Answer{RCode: rw.RCode}
		case rw.CNAME != "":
			return Answer{CNAME: rw.CNAME}
		case rw.Type == qtype && rw.Type != 0:
			a.Data = appendNew(a.Data, rw.Value)
		}
	}
	return a
}

// HostAddrs returns the addresses that hosts lines gave, of the family asked for. Those that are neither
// unspecified nor loopback are what the resolver answers with; otherwise the blocking mode decides.
func (m *Matcher) HostAddrs(r *Result, qtype uint16) []netip.Addr {
	defer runtime.KeepAlive(m)
	var addrs []netip.Addr
	if r.Verdict != Blocked || qtype != typeA && qtype != typeAAAA {
		return nil
	}
	for i, a := range [...]netip.Addr{netip.IPv4Unspecified(), netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Unspecified(), netip.IPv6Loopback()} {
		if r.hosts&(1<<i) != 0 && a.Is4() == (qtype == typeA) {
			addrs = append(addrs, a)
		}
	}
	for _, id := range r.refs[:r.n] {
		if a := m.rules.moreOf(&m.rules.all[id]).addr; a.Is4() == (qtype == typeA) {
			addrs = appendNew(addrs, a)
		}
	}
	return addrs
}

func appendNew[T comparable](s []T, v T) []T {
	for _, w := range s {
		if v == w {
			return s
		}
	}
	return append(s, v)
}

// appendText writes a name in wire form as text, without the final dot. A dot inside a label becomes a zero
// byte, so that dots are label boundaries and nothing else.
func appendText(b, name []byte) []byte {
	if len(name) < 2 {
		return b
	}
	from := len(b)
	b = append(b, name[1:len(name)-1]...)
	text := b[from:]
	if bytes.IndexByte(text, '.') >= 0 { // inside a label, or the length of one
		for i, c := range text {
			if c == '.' {
				text[i] = 0
			}
		}
	}
	for i := int(name[0]); i < len(text); i += 1 + int(name[i+1]) {
		text[i] = '.'
	}
	return b
}

// view returns b as a string that shares its memory.
func view(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
