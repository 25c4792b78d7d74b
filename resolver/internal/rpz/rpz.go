// Package rpz judges questions and answers by response policy zones, which hold for everybody.
//
// A zone is a zone file whose owner names are triggers and whose records are actions
// (draft-vixie-dnsop-dns-rpz-00). Triggers: the client's address (rpz-client-ip), the name asked for or an alias
// on the way (exact, or below a wildcard, by the rules of DNS wildcards), an address in the answer (rpz-ip), name
// and address of a name server of a zone on the way to the answer (rpz-nsdname, rpz-nsip; which those are is the
// caller's to know). Actions: NXDOMAIN (CNAME .), NODATA (CNAME *.), let
// through (CNAME rpz-passthru.), no response (rpz-drop.), only over TCP (rpz-tcp-only.), another name (any other
// CNAME, *.x standing for the name asked for below x), and local data. An Action of the whole zone overrides
// what its records say.
//
// The first zone with a match decides; within a zone the client's address comes before the name, then addresses
// of the answer, names of servers, addresses of servers, of addresses the longest prefix. What can be said of a
// question is said before it is resolved, though, so that a later zone's rule for the name comes before an
// earlier zone's rule for addresses: nobody's servers are asked for what nobody gets.
//
// Rules are immutable and safe for concurrent use; judging allocates nothing, but for the name that a wildcard
// target makes. There is no I/O and no clock here.
package rpz

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// An Action is what is done with a match, for a whole zone.
type Action uint8

// The actions.
const (
	Given    Action = iota // what the record says
	Disabled               // nothing: the zone is read and does not count
	PassThru
	Drop
	NXDomain
	NoData
	TCPOnly
	CNAME // to Source.Target
)

// A Source is one zone to be read.
type Source struct {
	Name   dnsname.Name
	Text   io.Reader // zone-file syntax, at most MaxBytes
	File   string    // names the text in errors
	Action Action
	Target dnsname.Name
}

// MaxBytes is how long the text of one zone may be; a hostile one could fill the memory (CVE-2026-33259).
const MaxBytes = 512 << 20

const (
	// maxGenerated is how many records of one zone may come of $GENERATE, which makes 65,536 of a line.
	maxGenerated = 1 << 18
	leastRecord  = 8 // bytes of text
)

// A Report says what became of a Source.
type Report struct {
	Zone  dnsname.Name
	Rules int
	// Dropped is how many records are not used, First why the first of them is not.
	Dropped int
	First   string
}

// Rules are zones in their order.
type Rules struct {
	zones   []*zone
	why     query.Why
	servers bool
}

// A zone is one policy zone, compiled.
type zone struct {
	name                  dnsname.Name
	action                Action
	target                dnsname.Name
	reason                string
	negative              uint32 // TTL of negative answers
	names, nsNames        names
	client, answer, nsIPs prefixes
	report                Report
}

// A rule is what the records of one trigger say.
type rule struct {
	action Action // Given: data
	target dnsname.Name
	below  bool // the name asked for is put in front of target
	ttl    uint32
	data   map[uint16]*query.Synth
}

// Load reads zones. why is what verdicts name as their reason. An error names the file and the line.
func Load(sources []Source, why query.Why) (*Rules, []Report, error) {
	r := &Rules{why: why}
	var reports []Report
	for i := range sources {
		s := &sources[i]
		z := &zone{name: s.Name, action: s.Action, target: s.Target, reason: "policy zone " + strings.TrimSuffix(s.Name.String(), "."), negative: defaultTTL}
		z.report.Zone = s.Name
		text := &limited{r: s.Text, left: MaxBytes}
		records := int64(0)
		err := dnswire.EachRecord(text, s.Name.String(), s.File, defaultTTL, func(r dnswire.Record) error {
			if records++; records > maxGenerated+(MaxBytes-text.left)/leastRecord {
				return fmt.Errorf("%s: $GENERATE makes more than %d records", s.File, maxGenerated)
			}
			return z.add(r)
		})
		if err != nil {
			if text.left < 0 {
				err = fmt.Errorf("%s is longer than %d bytes", s.File, MaxBytes)
			}
			return nil, nil, fmt.Errorf("policy zone %v: %w", s.Name, err)
		}
		reports = append(reports, z.report)
		if s.Action == Disabled {
			continue
		}
		r.zones = append(r.zones, z)
		r.servers = r.servers || len(z.nsNames) > 0 || len(z.nsIPs.rules) > 0
	}
	return r, reports, nil
}

const defaultTTL = 60 // of records that state none, and of negative answers of a zone without SOA

// limited reads so many bytes and then fails, unlike io.LimitedReader, whose end looks like that of the text.
type limited struct {
	r    io.Reader
	left int64
}

var errLong = errors.New("too long")

func (l *limited) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	if l.left -= int64(n); l.left < 0 {
		return 0, errLong
	}
	return n, err
}

// Question judges a question and who asks it; hit is false if no rule matches. A verdict of kind Pass means that
// no other rule is to be applied.
func (r *Rules) Question(client netip.Addr, name dnsname.Name, typ uint16) (v query.Verdict, hit bool) {
	m := r.question(client, name)
	if m.rule == nil {
		return v, false
	}
	return r.verdict(m.zone, m.rule, name, typ), true
}

// question finds the rule for a question.
func (r *Rules) question(client netip.Addr, name dnsname.Name) (m match) {
	client = client.Unmap()
	for _, z := range r.zones {
		if u, bits := z.client.find(client); u != nil {
			return match{zone: z, rule: u, by: byClient, addr: client, bits: bits}
		}
		if u := z.names.find(name); u != nil {
			return match{zone: z, rule: u, by: byName, name: name}
		}
	}
	return m
}

// Names reports whether a rule matches the name, as that of an alias.
func (r *Rules) Names(name dnsname.Name) bool {
	for _, z := range r.zones {
		if z.names.find(name) != nil {
			return true
		}
	}
	return false
}

// A Server is a name server of a zone that an answer came through: its name, or one of its addresses.
type Server struct {
	Name dnsname.Name
	Addr netip.Addr // the zero Addr: it is the name that counts
}

// WantServers reports whether Answer needs to know name servers.
func (r *Rules) WantServers() bool { return r.servers }

// Answer judges what came back for a question: the addresses among facts, and the name servers it came through.
func (r *Rules) Answer(facts query.Facts, servers []Server, name dnsname.Name, typ uint16) (v query.Verdict, hit bool) {
	m := r.answer(facts, servers)
	if m.rule == nil {
		return v, false
	}
	return r.verdict(m.zone, m.rule, name, typ), true
}

// answer finds the rule for what came back.
func (r *Rules) answer(facts query.Facts, servers []Server) (m match) {
	for _, z := range r.zones {
		m = match{zone: z, bits: -1}
		longest := func(p *prefixes, by trigger, a netip.Addr) {
			if u, bits := p.find(a); u != nil && bits > m.bits {
				m = match{zone: z, rule: u, by: by, addr: a, bits: bits}
			}
		}
		if len(z.answer.rules) > 0 {
			for off := 0; ; {
				kind, value, next, ok := facts.Next(off)
				if !ok {
					break
				}
				if kind == query.FactAddress {
					a, _ := netip.AddrFromSlice(value)
					longest(&z.answer, byAnswer, a.Unmap())
				}
				off = next
			}
		}
		for i := range servers {
			if m.rule == nil && !servers[i].Addr.IsValid() {
				if u := z.nsNames.find(servers[i].Name); u != nil {
					m = match{zone: z, rule: u, by: byServerName, name: servers[i].Name}
				}
			}
		}
		if m.rule == nil {
			for i := range servers {
				if a := servers[i].Addr; a.IsValid() {
					longest(&z.nsIPs, byServerAddr, a.Unmap())
				}
			}
		}
		if m.rule != nil {
			return m
		}
	}
	return match{}
}

// edeBlocked is Blocked of RFC 8914 section 4.16.
const edeBlocked = 15

// verdict puts an action into the words of the path.
func (r *Rules) verdict(z *zone, u *rule, name dnsname.Name, typ uint16) query.Verdict {
	v := query.Verdict{Why: r.why}
	action, target, below, ttl := u.action, u.target, u.below, u.ttl
	if z.action != Given {
		action, target, below = z.action, z.target, false
	}
	switch action {
	case PassThru, Disabled:
		return v
	case Drop:
		v.Kind = query.Dropped
	case TCPOnly:
		v.Kind = query.Truncated
	case NXDomain, NoData:
		v.Kind = query.Blocked
		v.Block = query.Block{Mode: query.BlockNXDomain, TTL: time.Duration(z.negative) * time.Second, EDE: edeBlocked, Reason: z.reason}
		if action == NoData {
			v.Block.Mode = query.BlockNoData
		}
	case CNAME:
		if below {
			var err error
			if target, err = name.Replace(dnsname.Root, target); err != nil { // too long to be a name
				v.Kind, v.Synth = query.Synthesised, &tooLong
				return v
			}
		}
		v.Kind, v.Target, v.Block.TTL = query.Redirected, target, time.Duration(ttl)*time.Second
	case Given:
		v.Kind = query.Synthesised
		if v.Synth = u.data[typ]; v.Synth == nil {
			v.Synth = &noData
		}
	}
	return v
}

// Answers that hold nothing.
var (
	noData  = query.Synth{TTL: defaultTTL}
	tooLong = query.Synth{RCode: dnswire.RCodeYXDomain, TTL: defaultTTL}
)

// add compiles one record.
func (z *zone) add(r dnswire.Record) error {
	if r.Class != dnswire.ClassIN || !r.Name.IsWithin(z.name) {
		z.drop(r, "is outside the zone")
		return nil
	}
	if r.Name == z.name {
		if r.Type == dnswire.TypeSOA && len(r.Data) >= 4 {
			z.negative = min(r.TTL, dnswire.Uint32(r.Data[len(r.Data)-4:]))
		}
		return nil // SOA, NS: of the zone itself
	}
	switch r.Type {
	case dnswire.TypeSOA, dnswire.TypeNS, dnswire.TypeDNAME, dnswire.TypeRRSIG, dnswire.TypeNSEC, dnswire.TypeNSEC3, dnswire.TypeNSEC3PARAM, dnswire.TypeDNSKEY, dnswire.TypeDS:
		z.drop(r, "is of a type that is no action")
		return nil
	}
	trigger := r.Name[:len(r.Name)-len(z.name)] + dnsname.Root
	u, err := z.at(trigger)
	if err != nil {
		z.drop(r, err.Error())
		return nil
	}
	if u.action == Given && u.data == nil {
		z.report.Rules++
	}
	if !u.add(r, trigger) {
		z.drop(r, "comes behind another action of its name")
	}
	return nil
}

func (z *zone) drop(r dnswire.Record, why string) {
	if z.report.Dropped == 0 {
		z.report.First = fmt.Sprintf("%v %s %s", r.Name, dnswire.TypeText(r.Type), why)
	}
	z.report.Dropped++
}

// at returns the rule of a trigger, which may be new.
func (z *zone) at(trigger dnsname.Name) (*rule, error) {
	last := trigger.Suffix(1)
	rest := trigger[:len(trigger)-len(last)] + dnsname.Root
	switch kind := last.FirstLabel(); {
	case kind == "rpz-nsdname":
		return z.nsNames.at(rest), nil
	case kind == "rpz-client-ip":
		return z.client.at(rest)
	case kind == "rpz-ip":
		return z.answer.at(rest)
	case kind == "rpz-nsip":
		return z.nsIPs.at(rest)
	case strings.HasPrefix(kind, "rpz-"):
		return nil, fmt.Errorf("has the unknown trigger %s", kind)
	}
	return z.names.at(trigger), nil
}

// add takes a record as (part of) the action; false if the rule has another already.
func (u *rule) add(r dnswire.Record, trigger dnsname.Name) bool {
	if u.action != Given || r.Type == dnswire.TypeCNAME && u.data != nil {
		return false
	}
	u.ttl = r.TTL
	if r.Type != dnswire.TypeCNAME {
		if u.data == nil {
			u.data = make(map[uint16]*query.Synth)
		}
		s := u.data[r.Type]
		if s == nil {
			s = &query.Synth{TTL: r.TTL, RRs: []query.RRset{{Type: r.Type, Class: dnswire.ClassIN, TTL: r.TTL}}}
			u.data[r.Type] = s
		}
		s.RRs[0].Data = query.AppendRData(s.RRs[0].Data, r.Data)
		return true
	}
	dnsname.Fold(r.Data, r.Data)
	u.target, u.action = dnsname.Name(r.Data), CNAME
	switch {
	case u.target == dnsname.Root:
		u.action = NXDomain
	case u.target == wildcardRoot:
		u.action = NoData
	case u.target == passThru || u.target == trigger: // a name that leads to itself is how it was once written
		u.action = PassThru
	case u.target == drop:
		u.action = Drop
	case u.target == tcpOnly:
		u.action = TCPOnly
	case u.target.IsWildcard():
		u.target, u.below = u.target.Parent(), true
	}
	return true
}

var (
	wildcardRoot = dnsname.MustParse("*.")
	passThru     = dnsname.MustParse("rpz-passthru.")
	drop         = dnsname.MustParse("rpz-drop.")
	tcpOnly      = dnsname.MustParse("rpz-tcp-only.")
)

// names are the triggers that are names, by the rules of wildcards (RFC 4592): every name at or above a trigger
// exists, and a wildcard stands for what does not, below the closest name that does.
type names map[dnsname.Name]*node

type node struct{ exact, wild *rule }

func (n *names) at(trigger dnsname.Name) *rule {
	if *n == nil {
		*n = make(names)
	}
	wild := trigger.IsWildcard()
	if wild {
		trigger = trigger.Parent()
	}
	var at *node
	for t := trigger; t != ""; t = t.Parent() {
		nd := (*n)[t]
		if nd == nil {
			nd = new(node)
			(*n)[t] = nd
		}
		if at == nil {
			at = nd
		}
	}
	u := &at.exact
	if wild {
		u = &at.wild
	}
	if *u == nil {
		*u = new(rule)
	}
	return *u
}

func (n names) find(name dnsname.Name) *rule {
	if n == nil {
		return nil
	}
	if nd := n[name]; nd != nil {
		return nd.exact
	}
	for t := name.Parent(); t != ""; t = t.Parent() {
		if nd := n[t]; nd != nil {
			return nd.wild
		}
	}
	return nil
}

// prefixes are the triggers that are networks.
type prefixes struct {
	rules map[netip.Prefix]*rule
	lens  [2][]uint8 // of IPv4 and IPv6: the lengths there are, longest first
}

func (p *prefixes) at(trigger dnsname.Name) (*rule, error) {
	pre, err := parsePrefix(trigger)
	if err != nil {
		return nil, err
	}
	if p.rules == nil {
		p.rules = make(map[netip.Prefix]*rule)
	}
	u := p.rules[pre]
	if u == nil {
		u = &rule{}
		p.rules[pre] = u
		l := &p.lens[family(pre.Addr())]
		if i, in := slices.BinarySearchFunc(*l, uint8(pre.Bits()), func(a, b uint8) int { return int(b) - int(a) }); !in {
			*l = slices.Insert(*l, i, uint8(pre.Bits()))
		}
	}
	return u, nil
}

func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

// find returns the rule of the longest network that holds a, and its length.
func (p *prefixes) find(a netip.Addr) (u *rule, bits int) {
	if len(p.rules) == 0 || !a.IsValid() {
		return nil, -1
	}
	for _, l := range p.lens[family(a)] {
		pre, err := a.WithZone("").Prefix(int(l))
		if err == nil {
			if u := p.rules[pre]; u != nil {
				return u, int(l)
			}
		}
	}
	return nil, -1
}

// parsePrefix reads a network as triggers have it: the length, then octets, or words with zz for ::, in reverse.
func parsePrefix(trigger dnsname.Name) (netip.Prefix, error) {
	var words []string
	for n := trigger; n != dnsname.Root; n = n.Parent() {
		words = append(words, n.FirstLabel())
	}
	bad := fmt.Errorf("has %q for a network", strings.Join(words, "."))
	if len(words) < 2 {
		return netip.Prefix{}, bad
	}
	bits, err := strconv.ParseUint(words[0], 10, 8)
	if err != nil {
		return netip.Prefix{}, bad
	}
	words = words[1:]
	slices.Reverse(words)
	var text string
	if zz := slices.Index(words, "zz"); zz >= 0 {
		text = strings.Join(words[:zz], ":") + "::" + strings.Join(words[zz+1:], ":")
	} else if len(words) == 4 {
		text = strings.Join(words, ".")
	} else {
		text = strings.Join(words, ":")
	}
	a, err := netip.ParseAddr(text)
	if err != nil || a.Zone() != "" {
		return netip.Prefix{}, bad
	}
	pre, err := a.Prefix(int(bits))
	if err != nil || pre.Addr() != a {
		return netip.Prefix{}, bad
	}
	return pre, nil
}
