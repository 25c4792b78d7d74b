// Package denialtest has for tests what denials of existence are made of: sets as they are once verified, and small
// zones with their chains of NSEC or NSEC3 records and a naive reading of what is in them.
package denialtest

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Sig makes an RRSIG RDATA as far as package denial looks at it.
func Sig(signer dnsname.Name, covered uint16, labels int) []byte {
	b := binary.BigEndian.AppendUint16(nil, covered)
	b = append(b, 13, byte(labels), 0, 0, 14, 16, 0xff, 0, 0, 0, 0, 0, 0, 0, 0x12, 0x34)
	b = append(b, strings.ToUpper(string(signer))...)
	return append(b, make([]byte, 64)...)
}

// signedLabels is the Labels field of a signature over owner (RFC 4034 section 3.1.3).
func signedLabels(owner dnsname.Name) int {
	if strings.HasPrefix(string(owner), "\x01*") {
		return owner.Labels() - 1
	}
	return owner.Labels()
}

// Set reads a record in presentation form as one verified to be signed by zone.
func Set(zone, text string) query.RRset {
	rr, err := dns.NewRR(text)
	if err != nil || rr == nil {
		panic(fmt.Sprintf("%q: %v", text, err))
	}
	return SetOf(dnsname.MustParse(zone), rr)
}

// SetOf is Set for a record.
func SetOf(zone dnsname.Name, rr dns.RR) query.RRset {
	h := rr.Header()
	switch rr := rr.(type) { // PackRR wants the types in order
	case *dns.NSEC:
		slices.Sort(rr.TypeBitMap)
	case *dns.NSEC3:
		slices.Sort(rr.TypeBitMap)
		if rr.Salt != "-" {
			rr.SaltLength = uint8(len(rr.Salt) / 2) // the reader counts modulo 128
		}
	}
	wire := make([]byte, 1024)
	n, err := dns.PackRR(rr, wire, 0, nil, false)
	if err != nil {
		panic(err)
	}
	owner := dnsname.MustParse(h.Name)
	return query.RRset{
		Name: owner, Type: h.Rrtype, Class: h.Class, TTL: h.Ttl, Status: query.Secure,
		Data: query.AppendRData(nil, wire[len(owner)+10:n]),
		Sigs: query.AppendRData(nil, Sig(zone, h.Rrtype, signedLabels(owner))),
	}
}

// Sets is Set for several records.
func Sets(zone string, texts ...string) (out []query.RRset) {
	for _, t := range texts {
		out = append(out, Set(zone, t))
	}
	return out
}

// A Zone is a small zone and a naive reading of RFC 1034 section 4.3.2, RFC 4592 and RFC 6672 on it. It knows
// nothing of package denial: names are label slices from the root down, and chains are sorted text.
type Zone struct {
	Nodes  map[string][]uint16 // what the zone is authoritative for, zone cuts included, by presentation name
	OptOut bool
	NSEC3  bool
	Chain  []query.RRset
	salt   string
}

// Apex is the name of every Zone.
const Apex = "z."

// Types are those that are asked for.
var Types = []uint16{dns.TypeA, dns.TypeMX, dns.TypeDS, dns.TypeCNAME, dns.TypeNS, dns.TypeDNAME}

// Universe is every name that is asked for.
var Universe = func() []string {
	labels := []string{"a", "b", "m", "*"}
	names := []string{Apex}
	for _, x := range labels {
		names = append(names, x+"."+Apex)
		for _, y := range labels {
			names = append(names, y+"."+x+"."+Apex)
			for _, w := range labels {
				names = append(names, w+"."+y+"."+x+"."+Apex)
			}
		}
	}
	return names
}()

// Up returns the name above.
func Up(name string) string { return name[strings.IndexByte(name, '.')+1:] }

// New returns a random zone of less than maxNodes nodes besides the apex.
func New(r *rand.Rand, maxNodes int) *Zone {
	m := &Zone{Nodes: map[string][]uint16{Apex: {dns.TypeNS, dns.TypeSOA}}, NSEC3: r.IntN(2) == 0}
	if m.NSEC3 {
		m.OptOut, m.salt = r.IntN(2) == 0, []string{"", "ab"}[r.IntN(2)]
	}
	kinds := [][]uint16{{dns.TypeA}, {dns.TypeA}, {dns.TypeMX}, {dns.TypeA, dns.TypeMX}, {dns.TypeCNAME}, {dns.TypeNS}, {dns.TypeNS}, {dns.TypeDS, dns.TypeNS}, {dns.TypeA, dns.TypeDNAME}}
	for range r.IntN(maxNodes) {
		name := Universe[1+r.IntN(len(Universe)-1)]
		kind := kinds[r.IntN(len(kinds))]
		if strings.HasPrefix(name, "*.") && (slices.Contains(kind, dns.TypeNS) || slices.Contains(kind, dns.TypeDNAME)) {
			continue // RFC 4592 section 4: nobody knows what that means
		}
		if m.OptOut && strings.Contains(name, "*.") && slices.Equal(kind, []uint16{dns.TypeNS}) {
			continue // a wildcard that exists for an unsigned delegation below it alone is in no opt-out chain
		}
		m.Nodes[name] = kind
	}
	for name := range m.Nodes { // what lies below a cut or a DNAME is not the zone's
		for at := name; at != Apex; {
			if at = Up(at); m.foreign(at) {
				delete(m.Nodes, name)
				break
			}
		}
	}
	m.makeChain()
	return m
}

func (m *Zone) foreign(name string) bool {
	t := m.Nodes[name]
	return name != Apex && (slices.Contains(t, dns.TypeNS) || slices.Contains(t, dns.TypeDNAME))
}

// Exists reports whether a name is there, as an empty non-terminal at least.
func (m *Zone) Exists(name string) bool {
	for n := range m.Nodes {
		if n == name || strings.HasSuffix(n, "."+name) {
			return true
		}
	}
	return false
}

// What a question comes to.
const (
	Data = iota
	NoData
	NXDomain
	Elsewhere // a referral, or an alias by DNAME
)

// An Outcome is what the zone answers to a question.
type Outcome struct {
	Kind     int
	Encloser string // of a name that does not exist
	Wildcard bool   // a wildcard stands for the name
	Open     bool   // the name exists, and an opt-out chain has no record for it
}

// Outcome answers a question.
func (m *Zone) Outcome(name string, typ uint16) (o Outcome) {
	o.Open = m.OptOut && m.Unprovable(name)
	for at := name; at != Apex; {
		if at = Up(at); m.foreign(at) {
			o.Kind = Elsewhere
			return o
		}
	}
	source := name
	if !m.Exists(name) {
		o.Encloser = Up(name)
		for !m.Exists(o.Encloser) {
			o.Encloser = Up(o.Encloser)
		}
		source = "*." + o.Encloser
		if !m.Exists(source) {
			o.Kind = NXDomain
			return o
		}
		o.Wildcard = true
	}
	types := m.Nodes[source]
	switch {
	case slices.Contains(types, typ) || slices.Contains(types, dns.TypeCNAME):
		o.Kind = Data
		if source != Apex && slices.Contains(types, dns.TypeNS) && typ != dns.TypeDS {
			o.Kind = Elsewhere
		}
	case source == Apex && typ == dns.TypeDS:
		o.Kind = Elsewhere // to be asked of the parent
	case source != Apex && slices.Contains(types, dns.TypeNS) && typ != dns.TypeDS:
		o.Kind = Elsewhere
	default:
		o.Kind = NoData
	}
	return o
}

// Unsigned reports an insecure delegation.
func (m *Zone) Unsigned(name string) bool {
	t := m.Nodes[name]
	return name != Apex && slices.Contains(t, dns.TypeNS) && !slices.Contains(t, dns.TypeDS)
}

// Unprovable reports whether an opt-out chain has no record for an existing name.
func (m *Zone) Unprovable(name string) bool { return m.Exists(name) && !m.inChain(name) }

func (m *Zone) inChain(name string) bool {
	for n := range m.Nodes {
		if (n == name || m.NSEC3 && strings.HasSuffix(n, "."+name)) && !(m.OptOut && m.Unsigned(n)) {
			return true
		}
	}
	return false
}

func (m *Zone) hash(name string) string {
	return strings.ToLower(dns.HashName(name, dns.SHA1, 1, m.salt))
}

func labelsDown(name string) []string {
	l := dns.SplitDomainName(name)
	slices.Reverse(l)
	return l
}

func (m *Zone) makeChain() {
	var names []string
	for _, n := range Universe {
		if m.inChain(n) {
			names = append(names, n)
		}
	}
	if m.NSEC3 {
		slices.SortFunc(names, func(a, b string) int { return strings.Compare(m.hash(a), m.hash(b)) })
	} else {
		slices.SortFunc(names, func(a, b string) int { return slices.Compare(labelsDown(a), labelsDown(b)) })
	}
	for i, n := range names {
		next := names[(i+1)%len(names)]
		types := slices.Clone(m.Nodes[n])
		if len(types) > 0 && !(m.NSEC3 && m.Unsigned(n)) {
			types = append(types, dns.TypeRRSIG)
		}
		if !m.NSEC3 {
			m.Chain = append(m.Chain, SetOf(dnsname.MustParse(Apex), &dns.NSEC{Hdr: dns.RR_Header{Name: n, Rrtype: dns.TypeNSEC, Class: dns.ClassINET, Ttl: 60},
				NextDomain: strings.ToUpper(next), TypeBitMap: append(types, dns.TypeNSEC)}))
			continue
		}
		rr := &dns.NSEC3{Hdr: dns.RR_Header{Name: m.hash(n) + "." + Apex, Rrtype: dns.TypeNSEC3, Class: dns.ClassINET, Ttl: 60},
			Hash: dns.SHA1, Iterations: 1, Salt: m.salt, HashLength: 20, NextDomain: m.hash(next), TypeBitMap: types}
		if m.OptOut {
			rr.Flags = 1
		}
		m.Chain = append(m.Chain, SetOf(dnsname.MustParse(Apex), rr))
	}
}

// at returns the index in the chain of what matches name, or covers it.
func (m *Zone) at(name string) int {
	var names []string
	for _, n := range Universe {
		if m.inChain(n) {
			names = append(names, n)
		}
	}
	less := func(a, b string) bool { return slices.Compare(labelsDown(a), labelsDown(b)) <= 0 }
	if m.NSEC3 {
		less = func(a, b string) bool { return m.hash(a) <= m.hash(b) }
	}
	before := 0 // in the chain's order, name's own place included
	for _, n := range names {
		if less(n, name) {
			before++
		}
	}
	return (before + len(names) - 1) % len(names)
}

// Proof returns the records that an honest server sends with the outcome of a question.
func (m *Zone) Proof(name string, o Outcome) []query.RRset {
	var want []int
	add := func(n string) {
		if i := m.at(n); !slices.Contains(want, i) {
			want = append(want, i)
		}
	}
	encloser, nextCloser := Up(name), name
	for encloser != "" && !m.inChain(encloser) && m.NSEC3 || !m.NSEC3 && !m.Exists(encloser) {
		encloser, nextCloser = Up(encloser), encloser
	}
	switch {
	case !m.NSEC3 && !m.Exists(name):
		add(name)
		if o.Kind != Data {
			add("*." + o.Encloser)
		}
	case !m.NSEC3 || m.inChain(name):
		add(name)
	case o.Kind == Data && o.Wildcard:
		add(nextCloser)
	default:
		add(encloser)
		add(nextCloser)
		if !o.Open && "*."+encloser != name && (o.Kind == NXDomain || o.Wildcard) {
			add("*." + encloser)
		}
	}
	var out []query.RRset
	for _, i := range want {
		out = append(out, m.Chain[i])
	}
	return out
}
