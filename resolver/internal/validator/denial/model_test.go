package denial

import (
	"bytes"
	"flag"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

var long = flag.Bool("long", false, "try more random zones")

// A model is a small zone and a naive reading of RFC 1034 section 4.3.2, RFC 4592 and RFC 6672 on it. It knows
// nothing of package denial: names are label slices from the root down, and chains are sorted text.
type model struct {
	nodes  map[string][]uint16 // what the zone is authoritative for, zone cuts included, by presentation name
	optOut bool
	nsec3  bool
	salt   string
	chain  []query.RRset
}

const apex = "z."

var modelTypes = []uint16{dns.TypeA, dns.TypeMX, dns.TypeDS, dns.TypeCNAME, dns.TypeNS, dns.TypeDNAME}

// universe is every name that is asked for.
var universe = func() []string {
	labels := []string{"a", "b", "m", "*"}
	names := []string{apex}
	for _, x := range labels {
		names = append(names, x+"."+apex)
		for _, y := range labels {
			names = append(names, y+"."+x+"."+apex)
			for _, w := range labels {
				names = append(names, w+"."+y+"."+x+"."+apex)
			}
		}
	}
	return names
}()

func up(name string) string { return name[strings.IndexByte(name, '.')+1:] }

func newModel(r *rand.Rand, maxNodes int) *model {
	m := &model{nodes: map[string][]uint16{apex: {dns.TypeNS, dns.TypeSOA}}, nsec3: r.IntN(2) == 0}
	if m.nsec3 {
		m.optOut, m.salt = r.IntN(2) == 0, []string{"", "ab"}[r.IntN(2)]
	}
	kinds := [][]uint16{{dns.TypeA}, {dns.TypeA}, {dns.TypeMX}, {dns.TypeA, dns.TypeMX}, {dns.TypeCNAME}, {dns.TypeNS}, {dns.TypeNS}, {dns.TypeDS, dns.TypeNS}, {dns.TypeA, dns.TypeDNAME}}
	for range r.IntN(maxNodes) {
		name := universe[1+r.IntN(len(universe)-1)]
		kind := kinds[r.IntN(len(kinds))]
		if strings.HasPrefix(name, "*.") && (slices.Contains(kind, dns.TypeNS) || slices.Contains(kind, dns.TypeDNAME)) {
			continue // RFC 4592 section 4: nobody knows what that means
		}
		if m.optOut && strings.Contains(name, "*.") && slices.Equal(kind, []uint16{dns.TypeNS}) {
			continue // a wildcard that exists for an unsigned delegation below it alone is in no opt-out chain
		}
		m.nodes[name] = kind
	}
	for name := range m.nodes { // what lies below a cut or a DNAME is not the zone's
		for at := name; at != apex; {
			if at = up(at); m.foreign(at) {
				delete(m.nodes, name)
				break
			}
		}
	}
	m.makeChain()
	return m
}

func (m *model) foreign(name string) bool {
	t := m.nodes[name]
	return name != apex && (slices.Contains(t, dns.TypeNS) || slices.Contains(t, dns.TypeDNAME))
}

func (m *model) exists(name string) bool {
	for n := range m.nodes {
		if n == name || strings.HasSuffix(n, "."+name) {
			return true
		}
	}
	return false
}

// What a question comes to.
const (
	isData = iota
	isNoData
	isNXDomain
	isElsewhere // a referral, or an alias by DNAME
)

// An outcome is what the zone answers. source is the node that answers, wildcard the one that did in its stead.
type outcome struct {
	kind     int
	encloser string // of a name that does not exist
	wildcard bool
	open     bool // an opt-out zone need not prove it: unsigned delegations stand at or above the name, or below it alone
}

func (m *model) outcome(name string, typ uint16) (o outcome) {
	o.open = m.optOut && m.unprovable(name)
	for at := name; at != apex; {
		if at = up(at); m.foreign(at) {
			o.kind = isElsewhere
			return o
		}
	}
	source := name
	if !m.exists(name) {
		o.encloser = up(name)
		for !m.exists(o.encloser) {
			o.encloser = up(o.encloser)
		}
		source = "*." + o.encloser
		if !m.exists(source) {
			o.kind = isNXDomain
			return o
		}
		o.wildcard = true
	}
	types := m.nodes[source]
	switch {
	case slices.Contains(types, typ) || slices.Contains(types, dns.TypeCNAME):
		o.kind = isData
		if source != apex && slices.Contains(types, dns.TypeNS) && typ != dns.TypeDS {
			o.kind = isElsewhere
		}
	case source == apex && typ == dns.TypeDS:
		o.kind = isElsewhere // to be asked of the parent
	case source != apex && slices.Contains(types, dns.TypeNS) && typ != dns.TypeDS:
		o.kind = isElsewhere
	default:
		o.kind = isNoData
	}
	return o
}

// unsigned reports an insecure delegation.
func (m *model) unsigned(name string) bool {
	t := m.nodes[name]
	return name != apex && slices.Contains(t, dns.TypeNS) && !slices.Contains(t, dns.TypeDS)
}

// unprovable reports whether an opt-out chain has no record for an existing name.
func (m *model) unprovable(name string) bool { return m.exists(name) && !m.inChain(name) }

func (m *model) inChain(name string) bool {
	for n := range m.nodes {
		if (n == name || m.nsec3 && strings.HasSuffix(n, "."+name)) && !(m.optOut && m.unsigned(n)) {
			return true
		}
	}
	return false
}

func (m *model) hash(name string) string {
	return strings.ToLower(dns.HashName(name, dns.SHA1, 1, m.salt))
}

func labelsDown(name string) []string {
	l := dns.SplitDomainName(name)
	slices.Reverse(l)
	return l
}

func (m *model) makeChain() {
	var names []string
	for _, n := range universe {
		if m.inChain(n) {
			names = append(names, n)
		}
	}
	if m.nsec3 {
		slices.SortFunc(names, func(a, b string) int { return strings.Compare(m.hash(a), m.hash(b)) })
	} else {
		slices.SortFunc(names, func(a, b string) int { return slices.Compare(labelsDown(a), labelsDown(b)) })
	}
	for i, n := range names {
		next := names[(i+1)%len(names)]
		types := slices.Clone(m.nodes[n])
		if len(types) > 0 && !(m.nsec3 && m.unsigned(n)) {
			types = append(types, dns.TypeRRSIG)
		}
		if !m.nsec3 {
			m.chain = append(m.chain, setOf(dnsname.MustParse(apex), &dns.NSEC{Hdr: dns.RR_Header{Name: n, Rrtype: dns.TypeNSEC, Class: dns.ClassINET, Ttl: 60},
				NextDomain: strings.ToUpper(next), TypeBitMap: append(types, dns.TypeNSEC)}))
			continue
		}
		rr := &dns.NSEC3{Hdr: dns.RR_Header{Name: m.hash(n) + "." + apex, Rrtype: dns.TypeNSEC3, Class: dns.ClassINET, Ttl: 60},
			Hash: dns.SHA1, Iterations: 1, Salt: m.salt, HashLength: 20, NextDomain: m.hash(next), TypeBitMap: types}
		if m.optOut {
			rr.Flags = 1
		}
		m.chain = append(m.chain, setOf(dnsname.MustParse(apex), rr))
	}
}

// at returns the index in the chain of what matches name, or covers it.
func (m *model) at(name string) int {
	var names []string
	for _, n := range universe {
		if m.inChain(n) {
			names = append(names, n)
		}
	}
	less := func(a, b string) bool { return slices.Compare(labelsDown(a), labelsDown(b)) <= 0 }
	if m.nsec3 {
		less = func(a, b string) bool { return m.hash(a) <= m.hash(b) }
	}
	best := -1
	place := func(n string) int {
		c := 0
		for _, o := range names {
			if o != n && less(o, n) {
				c++
			}
		}
		return c
	}
	for _, n := range names {
		if less(n, name) {
			best = max(best, place(n))
		}
	}
	if best < 0 {
		best = len(names) - 1
	}
	return best
}

// proof returns the records that an honest server sends for the outcome of a question.
func (m *model) proof(name string, o outcome) []query.RRset {
	var want []int
	add := func(n string) {
		if i := m.at(n); !slices.Contains(want, i) {
			want = append(want, i)
		}
	}
	encloser, nextCloser := up(name), name
	for encloser != "" && !m.inChain(encloser) && m.nsec3 || !m.nsec3 && !m.exists(encloser) {
		encloser, nextCloser = up(encloser), encloser
	}
	switch {
	case !m.nsec3 && !m.exists(name):
		add(name)
		if o.kind != isData {
			add("*." + o.encloser)
		}
	case !m.nsec3 || m.inChain(name):
		add(name)
	case o.kind == isData && o.wildcard:
		add(nextCloser)
	default:
		add(encloser)
		add(nextCloser)
		if !o.open && "*."+encloser != name && (o.kind == isNXDomain || o.wildcard) {
			add("*." + encloser)
		}
	}
	var out []query.RRset
	for _, i := range want {
		out = append(out, m.chain[i])
	}
	return out
}

// sound fails t for whatever is accepted on the word of records of the model's chain and is not so.
func (m *model) sound(t *testing.T, records []query.RRset, name string, typ uint16) {
	p := New(dnsname.MustParse(apex), records, nil)
	n := dnsname.MustParse(name)
	o := m.outcome(name, typ)
	complain := func(what string, r Result) {
		t.Helper()
		t.Errorf("%s of %s %s accepted, which is %+v: %+v\nzone %v, opt-out %v, NSEC3 %v, %d records of %d", what, name, dns.TypeToString[typ], o, r, m.nodes, m.optOut, m.nsec3, len(records), len(m.chain))
	}
	// What is below an unsigned delegation, or exists on its account alone, opt-out leaves open.
	leftOpen := func(r Result) bool {
		if r.Status != query.Insecure || !r.OptOut || !m.optOut {
			return false
		}
		for at := name; at != apex; at = up(at) {
			if m.unprovable(at) {
				return true
			}
		}
		return false
	}
	if r := p.NameError(n); r.Status != query.Bogus && o.kind != isNXDomain && !leftOpen(r) {
		complain("NXDOMAIN", r)
	}
	if r := p.NoData(n, typ); r.Status != query.Bogus && o.kind != isNoData && !leftOpen(r) {
		// In opt-out space a name that does not exist may be an unsigned delegation, which could answer anything; a
		// wildcard that would stand for it need not be denied (RFC 5155 section 8.6).
		if !(!m.exists(name) && r.Status == query.Insecure && r.OptOut) {
			complain("NODATA", r)
		}
	}
	for labels := range n.Labels() {
		wildcard := "*." + strings.Join(dns.SplitDomainName(name)[n.Labels()-labels:], ".") + "."
		if labels == 0 || wildcard == name || m.nodes[wildcard] == nil {
			continue // no signature of a wildcard that is not there
		}
		if r := p.Expansion(n, labels); r.Status != query.Bogus && !(o.wildcard && "*."+o.encloser == wildcard) && !leftOpen(r) {
			complain("expansion of "+wildcard, r)
		}
	}
	below := o.kind == isElsewhere && !m.exists(name)
	cutAt := name != apex && slices.Contains(m.nodes[name], dns.TypeNS)
	switch cut, r := p.Delegation(n); {
	case cut == Unproven && r.Status != query.Bogus, cut != Unproven && r.Status == query.Bogus:
		t.Errorf("Delegation(%s) = %v %+v", name, cut, r)
	case cut == InsecureCut && !m.unsigned(name) && !(r.OptOut && m.optOut && (o.open || !m.exists(name) && !below || leftOpen(r))):
		complain("insecure cut", r)
	case cut == NoCut && (cutAt || below || name == apex):
		complain("no cut", r)
	}
}

// complete fails t if the honest proof is refused, or if one part less is enough.
func (m *model) complete(t *testing.T, name string, typ uint16) {
	n := dnsname.MustParse(name)
	o := m.outcome(name, typ)
	if o.kind == isNXDomain && m.unprovable(o.encloser) {
		return // the closest provable encloser is another, and its wildcard may well exist
	}
	records := m.proof(name, o)
	judge := func(records []query.RRset) (string, Result) {
		p := New(dnsname.MustParse(apex), records, nil)
		switch {
		case o.kind == isNXDomain:
			return "NXDOMAIN", p.NameError(n)
		case o.kind == isNoData:
			return "NODATA", p.NoData(n, typ)
		case o.kind == isData && o.wildcard:
			return "expansion", p.Expansion(n, dns.CountLabel(o.encloser))
		}
		return "", Result{}
	}
	what, r := judge(records)
	if what == "" {
		return
	}
	want := query.Secure
	if r.OptOut && m.optOut {
		want = query.Insecure
	}
	if r.Status != want || len(r.Used) != len(records) {
		t.Errorf("%s of %s %s by %d records: %+v\nzone %v, opt-out %v, NSEC3 %v", what, name, dns.TypeToString[typ], len(records), r, m.nodes, m.optOut, m.nsec3)
		return
	}
	for i := range records {
		if _, r := judge(slices.Delete(slices.Clone(records), i, i+1)); r.Status != query.Bogus && !(r.OptOut && what == "NODATA") {
			t.Errorf("%s of %s %s without record %d: %+v\nzone %v, opt-out %v, NSEC3 %v", what, name, dns.TypeToString[typ], i, r, m.nodes, m.optOut, m.nsec3)
		}
	}
	if m.unsigned(name) && typ == dns.TypeDS {
		if cut, r := New(dnsname.MustParse(apex), records, nil).Delegation(n); cut != InsecureCut {
			t.Errorf("delegation of %s: %v %+v\nzone %v, opt-out %v, NSEC3 %v", name, cut, r, m.nodes, m.optOut, m.nsec3)
		}
	} else if o.kind == isNoData && typ == dns.TypeDS && name != apex && !o.open {
		if cut, r := New(dnsname.MustParse(apex), records, nil).Delegation(n); cut != NoCut && !(cut == InsecureCut && r.OptOut) {
			t.Errorf("no delegation of %s: %v %+v\nzone %v, opt-out %v, NSEC3 %v", name, cut, r, m.nodes, m.optOut, m.nsec3)
		}
	}
}

// Random small zones: of every name and type in the universe, what is true can be proved by the records that a
// server sends and by no less, and no choice of records proves what is not true.
func TestModel(t *testing.T) {
	zones := 40
	if *long {
		zones = 1000
	}
	for seed := range zones {
		r := rand.New(rand.NewPCG(uint64(seed), 7))
		m := newModel(r, 2+seed%7)
		for _, name := range universe {
			for _, typ := range modelTypes {
				m.complete(t, name, typ)
			}
		}
		var choices [][]query.RRset
		if len(m.chain) <= 4 {
			for bits := range 1 << len(m.chain) {
				choices = append(choices, choose(m.chain, uint64(bits)))
			}
		} else {
			choices = append(choices, m.chain)
			for range 15 {
				choices = append(choices, choose(m.chain, r.Uint64()))
			}
		}
		for _, c := range choices {
			for _, name := range universe {
				m.sound(t, c, name, modelTypes[r.IntN(len(modelTypes))])
			}
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func choose(chain []query.RRset, bits uint64) (out []query.RRset) {
	for i := range chain {
		if bits>>(i%64)&1 != 0 {
			out = append(out, chain[i])
		}
	}
	return out
}

// FuzzModel lets the fuzzer choose zone, records and question.
func FuzzModel(f *testing.F) {
	f.Add(uint64(1), uint64(1)<<40-1, uint16(9), uint8(0))
	f.Add(uint64(2), uint64(5), uint16(70), uint8(2))
	f.Fuzz(func(t *testing.T, seed, records uint64, name uint16, typ uint8) {
		m := newModel(rand.New(rand.NewPCG(seed, 1)), 9)
		m.sound(t, choose(m.chain, records), universe[int(name)%len(universe)], modelTypes[int(typ)%len(modelTypes)])
	})
}

// FuzzRaw gives records of any bytes. Besides not panicking: what is proven rests on sets that are there and that
// were verified, and never by nothing.
func FuzzRaw(f *testing.F) {
	for _, z := range []map[string]string{zone4035, zone5155} {
		for _, text := range z {
			s := set("example.", text)
			f.Add([]byte(s.Name), s.First(), s.Sigs[2:], s.Type, []byte("\x02ml\x07example\x00"), uint16(1))
		}
	}
	f.Fuzz(func(t *testing.T, owner, rdata, sigBytes []byte, typ uint16, name []byte, qtype uint16) {
		if dnsname.Check(owner) != nil || dnsname.Check(name) != nil || len(rdata) > 65535 || len(sigBytes) > 65535 {
			return
		}
		dnsname.Fold(owner, owner)
		dnsname.Fold(name, name)
		s := query.RRset{Name: dnsname.Name(owner), Type: typ, Class: 1, Status: query.Secure, Data: query.AppendRData(nil, rdata), Sigs: query.AppendRData(nil, sigBytes)}
		raw := s
		raw.Data, raw.Sigs = rdata, sigBytes // framing of any bytes too
		unchecked := s
		unchecked.Status = query.Unchecked
		in := []query.RRset{unchecked, s, raw, set("example.", zone4035["b"]), set("example.", zone5155["apex"])}
		before := slices.Concat(rdata, sigBytes)
		p := New("\x07example\x00", in, nil)
		n := dnsname.Name(name)
		_, d := p.Delegation(n)
		for _, r := range []Result{p.NameError(n), p.NoData(n, qtype), p.Expansion(n, int(qtype)), d} {
			ok := r.Status == query.Bogus && r.Reason != "" && r.Used == nil ||
				r.Status == query.Insecure && (r.OptOut || r.EDE == EDEIterations) && len(r.Used) > 0 ||
				r.Status == query.Secure && r.Reason == "" && !r.OptOut && (len(r.Used) > 0 || n.IsWildcard())
			for _, u := range r.Used {
				ok = ok && u > 0 && u < len(in)
			}
			if !ok {
				t.Errorf("%s: %+v", n, r)
			}
		}
		if !bytes.Equal(before, slices.Concat(rdata, sigBytes)) {
			t.Error("the sets were written to")
		}
	})
}
