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
	"github.com/sluice-dns/sluice/resolver/internal/validator/denial/denialtest"
)

var long = flag.Bool("long", false, "try more random zones")

// sound fails t for whatever is accepted on the word of records of the model's chain and is not so.
func sound(t *testing.T, m *denialtest.Zone, records []query.RRset, name string, typ uint16) {
	p := New(dnsname.MustParse(denialtest.Apex), records, nil)
	n := dnsname.MustParse(name)
	o := m.Outcome(name, typ)
	complain := func(what string, r Result) {
		t.Helper()
		t.Errorf("%s of %s %s accepted, which is %+v: %+v\nzone %v, opt-out %v, NSEC3 %v, %d records of %d", what, name, dns.TypeToString[typ], o, r, m.Nodes, m.OptOut, m.NSEC3, len(records), len(m.Chain))
	}
	// What is below an unsigned delegation, or exists on its account alone, opt-out leaves open.
	leftOpen := func(r Result) bool {
		if r.Status != query.Insecure || !r.OptOut || !m.OptOut {
			return false
		}
		for at := name; at != denialtest.Apex; at = denialtest.Up(at) {
			if m.Unprovable(at) {
				return true
			}
		}
		return false
	}
	if r := p.NameError(n); r.Status != query.Bogus && o.Kind != denialtest.NXDomain && !leftOpen(r) {
		complain("NXDOMAIN", r)
	}
	if r := p.NoData(n, typ); r.Status != query.Bogus && o.Kind != denialtest.NoData && !leftOpen(r) {
		// In opt-out space a name that does not exist may be an unsigned delegation, which could answer anything; a
		// wildcard that would stand for it need not be denied (RFC 5155 section 8.6).
		if !(!m.Exists(name) && r.Status == query.Insecure && r.OptOut) {
			complain("NODATA", r)
		}
	}
	for labels := range n.Labels() {
		wildcard := "*." + strings.Join(dns.SplitDomainName(name)[n.Labels()-labels:], ".") + "."
		if labels == 0 || wildcard == name || m.Nodes[wildcard] == nil {
			continue // no signature of a wildcard that is not there
		}
		if r := p.Expansion(n, labels); r.Status != query.Bogus && !(o.Wildcard && "*."+o.Encloser == wildcard) && !leftOpen(r) {
			complain("expansion of "+wildcard, r)
		}
	}
	below := o.Kind == denialtest.Elsewhere && !m.Exists(name)
	cutAt := name != denialtest.Apex && slices.Contains(m.Nodes[name], dns.TypeNS)
	switch cut, r := p.Delegation(n); {
	case cut == Unproven && r.Status != query.Bogus, cut != Unproven && r.Status == query.Bogus:
		t.Errorf("Delegation(%s) = %v %+v", name, cut, r)
	case cut == InsecureCut && !m.Unsigned(name) && !(r.OptOut && m.OptOut && (o.Open || !m.Exists(name) && !below || leftOpen(r))):
		complain("insecure cut", r)
	case cut == NoCut && (cutAt || below || name == denialtest.Apex):
		complain("no cut", r)
	}
}

// complete fails t if the honest proof is refused, or if one part less is enough.
func complete(t *testing.T, m *denialtest.Zone, name string, typ uint16) {
	n := dnsname.MustParse(name)
	o := m.Outcome(name, typ)
	if o.Kind == denialtest.NXDomain && m.Unprovable(o.Encloser) {
		return // the closest provable encloser is another, and its wildcard may well exist
	}
	records := m.Proof(name, o)
	judge := func(records []query.RRset) (string, Result) {
		p := New(dnsname.MustParse(denialtest.Apex), records, nil)
		switch {
		case o.Kind == denialtest.NXDomain:
			return "NXDOMAIN", p.NameError(n)
		case o.Kind == denialtest.NoData:
			return "NODATA", p.NoData(n, typ)
		case o.Kind == denialtest.Data && o.Wildcard:
			return "expansion", p.Expansion(n, dns.CountLabel(o.Encloser))
		}
		return "", Result{}
	}
	what, r := judge(records)
	if what == "" {
		return
	}
	want := query.Secure
	if r.OptOut && m.OptOut {
		want = query.Insecure
	}
	if r.Status != want || len(r.Used) != len(records) {
		t.Errorf("%s of %s %s by %d records: %+v\nzone %v, opt-out %v, NSEC3 %v", what, name, dns.TypeToString[typ], len(records), r, m.Nodes, m.OptOut, m.NSEC3)
		return
	}
	for i := range records {
		if _, r := judge(slices.Delete(slices.Clone(records), i, i+1)); r.Status != query.Bogus && !(r.OptOut && what == "NODATA") {
			t.Errorf("%s of %s %s without record %d: %+v\nzone %v, opt-out %v, NSEC3 %v", what, name, dns.TypeToString[typ], i, r, m.Nodes, m.OptOut, m.NSEC3)
		}
	}
	if m.Unsigned(name) && typ == dns.TypeDS {
		if cut, r := New(dnsname.MustParse(denialtest.Apex), records, nil).Delegation(n); cut != InsecureCut {
			t.Errorf("delegation of %s: %v %+v\nzone %v, opt-out %v, NSEC3 %v", name, cut, r, m.Nodes, m.OptOut, m.NSEC3)
		}
	} else if o.Kind == denialtest.NoData && typ == dns.TypeDS && name != denialtest.Apex && !o.Open {
		if cut, r := New(dnsname.MustParse(denialtest.Apex), records, nil).Delegation(n); cut != NoCut && !(cut == InsecureCut && r.OptOut) {
			t.Errorf("no delegation of %s: %v %+v\nzone %v, opt-out %v, NSEC3 %v", name, cut, r, m.Nodes, m.OptOut, m.NSEC3)
		}
	}
}

// Random small zones: of every name and type in the denialtest.Universe, what is true can be proved by the records that a
// server sends and by no less, and no choice of records proves what is not true.
func TestModel(t *testing.T) {
	zones := 40
	if *long {
		zones = 1000
	}
	for seed := range zones {
		r := rand.New(rand.NewPCG(uint64(seed), 7))
		m := denialtest.New(r, 2+seed%7)
		for _, name := range denialtest.Universe {
			for _, typ := range denialtest.Types {
				complete(t, m, name, typ)
			}
		}
		var choices [][]query.RRset
		if len(m.Chain) <= 4 {
			for bits := range 1 << len(m.Chain) {
				choices = append(choices, choose(m.Chain, uint64(bits)))
			}
		} else {
			choices = append(choices, m.Chain)
			for range 15 {
				choices = append(choices, choose(m.Chain, r.Uint64()))
			}
		}
		for _, c := range choices {
			for _, name := range denialtest.Universe {
				sound(t, m, c, name, denialtest.Types[r.IntN(len(denialtest.Types))])
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
		m := denialtest.New(rand.New(rand.NewPCG(seed, 1)), 9)
		sound(t, m, choose(m.Chain, records), denialtest.Universe[int(name)%len(denialtest.Universe)], denialtest.Types[int(typ)%len(denialtest.Types)])
	})
}

// FuzzRaw gives records of any bytes. Besides not panicking: what is proven rests on sets that are there and that
// were verified, and never by nothing.
func FuzzRaw(f *testing.F) {
	for _, z := range []map[string]string{zone4035, zone5155} {
		for _, text := range z {
			s := denialtest.Set("example.", text)
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
		in := []query.RRset{unchecked, s, raw, denialtest.Set("example.", zone4035["b"]), denialtest.Set("example.", zone5155["apex"])}
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
