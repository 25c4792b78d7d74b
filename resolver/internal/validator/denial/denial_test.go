package denial

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/validator/denial/denialtest"
)

// ask runs a question in a small language: "nxdomain NAME", "nodata NAME TYPE", "expanded NAME LABELS",
// "delegation NAME". It answers with the status, and for a delegation with what was found.
func ask(p *Proof, question string) (string, Result) {
	f := strings.Fields(question)
	name := dnsname.MustParse(f[1])
	switch f[0] {
	case "nxdomain":
		r := p.NameError(name)
		return r.Status.String(), r
	case "nodata":
		r := p.NoData(name, typeOf(f[2]))
		return r.Status.String(), r
	case "expanded":
		r := p.Expansion(name, int(f[2][0]-'0'))
		return r.Status.String(), r
	case "delegation":
		cut, r := p.Delegation(name)
		return [...]string{"Unproven", "InsecureCut", "NoCut"}[cut] + " " + r.Status.String(), r
	}
	panic(question)
}

func typeOf(text string) uint16 {
	if t, ok := dns.StringToType[text]; ok {
		return t
	}
	n, err := strconv.ParseUint(strings.TrimPrefix(text, "TYPE"), 10, 16)
	if err != nil {
		panic(err)
	}
	return uint16(n)
}

// The zone of RFC 4035 appendix A, as its NSEC records.
var zone4035 = map[string]string{
	"apex":  "example. 3600 IN NSEC a.example. NS SOA MX RRSIG NSEC DNSKEY",
	"a":     "a.example. 3600 IN NSEC ai.example. NS DS RRSIG NSEC",
	"ai":    "ai.example. 3600 IN NSEC b.example. A HINFO AAAA RRSIG NSEC",
	"b":     "b.example. 3600 IN NSEC ns1.example. NS RRSIG NSEC",
	"ns1":   "ns1.example. 3600 IN NSEC ns2.example. A RRSIG NSEC",
	"ns2":   "ns2.example. 3600 IN NSEC *.w.example. A RRSIG NSEC",
	"*.w":   "*.w.example. 3600 IN NSEC x.w.example. MX RRSIG NSEC",
	"x.w":   "x.w.example. 3600 IN NSEC x.y.w.example. MX RRSIG NSEC",
	"x.y.w": "x.y.w.example. 3600 IN NSEC xx.example. MX RRSIG NSEC",
	"xx":    "xx.example. 3600 IN NSEC example. A HINFO AAAA RRSIG NSEC",
}

// The zone of RFC 5155 appendix A, as its NSEC3 records; all have the opt-out flag.
var zone5155 = map[string]string{
	"apex":    "0p9mhaveqvm6t7vbl5lop2u3t2rp3tom.example. 3600 IN NSEC3 1 1 12 aabbccdd 2t7b4g4vsa5smi47k61mv5bv1a22bojr MX DNSKEY NS SOA NSEC3PARAM RRSIG",
	"ns1":     "2t7b4g4vsa5smi47k61mv5bv1a22bojr.example. 3600 IN NSEC3 1 1 12 aabbccdd 2vptu5timamqttgl4luu9kg21e0aor3s A RRSIG",
	"x.y.w":   "2vptu5timamqttgl4luu9kg21e0aor3s.example. 3600 IN NSEC3 1 1 12 aabbccdd 35mthgpgcu1qg68fab165klnsnk3dpvl MX RRSIG",
	"a":       "35mthgpgcu1qg68fab165klnsnk3dpvl.example. 3600 IN NSEC3 1 1 12 aabbccdd b4um86eghhds6nea196smvmlo4ors995 NS DS RRSIG",
	"x.w":     "b4um86eghhds6nea196smvmlo4ors995.example. 3600 IN NSEC3 1 1 12 aabbccdd gjeqe526plbf1g8mklp59enfd789njgi MX RRSIG",
	"ai":      "gjeqe526plbf1g8mklp59enfd789njgi.example. 3600 IN NSEC3 1 1 12 aabbccdd ji6neoaepv8b5o6k4ev33abha8ht9fgc HINFO A AAAA RRSIG",
	"y.w":     "ji6neoaepv8b5o6k4ev33abha8ht9fgc.example. 3600 IN NSEC3 1 1 12 aabbccdd k8udemvp1j2f7eg6jebps17vp3n8i58h",
	"w":       "k8udemvp1j2f7eg6jebps17vp3n8i58h.example. 3600 IN NSEC3 1 1 12 aabbccdd kohar7mbb8dc2ce8a9qvl8hon4k53uhi",
	"2t7b4g4": "kohar7mbb8dc2ce8a9qvl8hon4k53uhi.example. 3600 IN NSEC3 1 1 12 aabbccdd q04jkcevqvmu85r014c7dkba38o0ji5r A RRSIG",
	"ns2":     "q04jkcevqvmu85r014c7dkba38o0ji5r.example. 3600 IN NSEC3 1 1 12 aabbccdd r53bq7cc2uvmubfu5ocmm6pers9tk9en A RRSIG",
	"*.w":     "r53bq7cc2uvmubfu5ocmm6pers9tk9en.example. 3600 IN NSEC3 1 1 12 aabbccdd t644ebqk9bibcna874givr6joj62mlhv MX RRSIG",
	"xx":      "t644ebqk9bibcna874givr6joj62mlhv.example. 3600 IN NSEC3 1 1 12 aabbccdd 0p9mhaveqvm6t7vbl5lop2u3t2rp3tom HINFO A AAAA RRSIG",
}

func pick(from map[string]string, names []string, edit func(string) string) (out []query.RRset) {
	for _, n := range names {
		if from[n] == "" {
			panic(n)
		}
		out = append(out, denialtest.Set("example.", edit(from[n])))
	}
	return out
}

// Every proof of the RFCs' examples is accepted as it stands, and refused without any one of its parts.
func TestExamplesOfTheRFCs(t *testing.T) {
	asIs := func(s string) string { return s }
	closed := func(s string) string { return strings.Replace(s, "NSEC3 1 1 ", "NSEC3 1 0 ", 1) }
	for _, c := range []struct {
		where    string
		zone     map[string]string
		edit     func(string) string
		question string
		parts    string
		want     string
		optOut   bool
	}{
		{"4035 B.2", zone4035, asIs, "nxdomain ml.example.", "b apex", "Secure", false},
		{"4035 B.3", zone4035, asIs, "nodata ns1.example. MX", "ns1", "Secure", false},
		{"4035 B.5", zone4035, asIs, "delegation b.example.", "b", "InsecureCut Secure", false},
		{"4035 B.5", zone4035, asIs, "nodata b.example. DS", "b", "Secure", false},
		{"4035 B.6", zone4035, asIs, "expanded a.z.w.example. 2", "x.y.w", "Secure", false},
		{"4035 B.7", zone4035, asIs, "nodata a.z.w.example. AAAA", "x.y.w *.w", "Secure", false},
		{"4035 ENT", zone4035, asIs, "nodata y.w.example. A", "x.w", "Secure", false},
		{"4035 ENT", zone4035, asIs, "delegation w.example.", "ns2", "NoCut Secure", false},
		{"4035 last", zone4035, asIs, "nxdomain zz.example.", "xx apex", "Secure", false},

		{"5155 B.1", zone5155, asIs, "nxdomain a.c.x.w.example.", "apex x.w a", "Insecure", true},
		{"5155 B.2", zone5155, asIs, "nodata ns1.example. MX", "ns1", "Secure", false},
		{"5155 B.2.1", zone5155, asIs, "nodata y.w.example. A", "y.w", "Secure", false},
		{"5155 B.3", zone5155, asIs, "delegation c.example.", "a apex", "InsecureCut Insecure", true},
		{"5155 B.3", zone5155, asIs, "delegation mc.c.example.", "a apex", "InsecureCut Insecure", true},
		{"5155 B.3", zone5155, asIs, "nodata c.example. DS", "a apex", "Insecure", true},
		{"5155 B.4", zone5155, asIs, "expanded a.z.w.example. 2", "ns2", "Insecure", true},
		{"5155 B.5", zone5155, asIs, "nodata a.z.w.example. AAAA", "w ns2 *.w", "Insecure", true},
		{"5155 B.2.1", zone5155, asIs, "delegation w.example.", "w", "NoCut Secure", false},

		{"5155 B.1 closed", zone5155, closed, "nxdomain a.c.x.w.example.", "apex x.w a", "Secure", false},
		{"5155 B.3 closed", zone5155, closed, "delegation c.example.", "a apex", "NoCut Secure", false},
		{"5155 B.4 closed", zone5155, closed, "expanded a.z.w.example. 2", "ns2", "Secure", false},
		{"5155 B.5 closed", zone5155, closed, "nodata a.z.w.example. AAAA", "w ns2 *.w", "Secure", false},
	} {
		parts := strings.Fields(c.parts)
		p := New("\x07example\x00", pick(c.zone, parts, c.edit), nil)
		got, r := ask(p, c.question)
		used := slices.Sorted(slices.Values(r.Used))
		if got != c.want || r.OptOut != c.optOut || len(used) != len(parts) || used[0] != 0 || used[len(used)-1] != len(parts)-1 {
			t.Errorf("%s, %s by %s = %s %+v, want %s", c.where, c.question, c.parts, got, r, c.want)
		}
		for i := range parts {
			fewer := slices.Delete(slices.Clone(parts), i, i+1)
			_, r := ask(New("\x07example\x00", pick(c.zone, fewer, c.edit), nil), c.question)
			// Without its wildcard, NODATA of opt-out space proves as little as before: the name may be unsigned.
			if open := c.optOut && strings.HasPrefix(c.question, "nodata") && parts[i] == "*.w"; open {
				continue
			}
			if r.Status != query.Bogus || r.Reason == "" || r.EDE == query.NoEDE || r.Used != nil {
				t.Errorf("%s, %s without %s = %+v", c.where, c.question, parts[i], r)
			}
		}
	}
}

// What the whole of the RFCs' zones must not prove.
func TestExistingIsNotDenied(t *testing.T) {
	for _, question := range []string{
		"nxdomain ns1.example.", "nxdomain w.example.", "nxdomain y.w.example.", "nxdomain a.z.w.example.", "nxdomain *.w.example.",
		"nxdomain example.", "nxdomain other.", "nxdomain mc.a.example.", "nxdomain b.example.",
		"nodata ns1.example. A", "nodata a.z.w.example. MX", "nodata *.w.example. MX", "nodata a.example. DS", "nodata ml.example. A",
		"nodata a.example. A", "nodata b.example. A", "nodata b.example. NS", "nodata mc.b.example. A", "nodata mc.b.example. DS",
		"nodata example. DS", // RFC 4035 B.8, RFC 5155 B.6: that is the parent's to say
		"nodata ns1.example. ANY", "nodata other. A",
		"expanded x.w.example. 2", "expanded x.y.w.example. 2", "expanded q.y.w.example. 2", "expanded q.x.w.example. 2", "expanded y.w.example. 2",
		"expanded a.z.w.example. 1", "expanded a.z.w.example. 3", "expanded a.z.w.example. 0", "expanded a.z.w.example. 4", "expanded mc.a.example. 1",
		"delegation a.example.", "delegation mc.a.example.", "delegation mc.b.example.", "delegation example.", "delegation other.",
	} {
		p := New("\x07example\x00", pick(zone4035, slices.Sorted(keys(zone4035)), func(s string) string { return s }), nil)
		if got, r := ask(p, question); r.Status != query.Bogus || r.Reason == "" {
			t.Errorf("%s = %s %+v", question, got, r)
		}
	}
	// The NSEC3 records are more than one proof may hold: take those that a liar would.
	closed := func(s string) string { return strings.Replace(s, "NSEC3 1 1 ", "NSEC3 1 0 ", 1) }
	for question, parts := range map[string]string{
		"nxdomain ns1.example.":           "apex ns1 a xx ns2",
		"nxdomain y.w.example.":           "apex y.w w ns2",
		"nxdomain a.z.w.example.":         "w ns2 *.w apex",
		"nxdomain q.z.w.example.":         "apex ns2 a x.w", // a higher encloser, whose next closer name exists
		"nxdomain mc.a.example.":          "a apex ns1 xx ns2 x.w",
		"nodata ns1.example. A":           "ns1",
		"nodata a.z.w.example. MX":        "w ns2 *.w",
		"nodata a.example. A":             "a",
		"nodata a.example. DS":            "a",
		"nodata example. DS":              "apex",
		"nodata ml.example. A":            "apex a ns1 ns2 xx",
		"nodata y.w.example. ANY":         "x.w",
		"nodata ns1.example. ANY":         "ns1",
		"nodata c.example. DS":            "a apex", // covered, and not by opt-out
		"expanded x.w.example. 2":         "x.w w ns2",
		"expanded q.y.w.example. 2":       "y.w w ns2",
		"delegation a.example.":           "a",
		"delegation mc.a.example.":        "a apex ns1 xx ns2 x.w",
		"delegation mc.c.example.nowhere": "a apex",
	} {
		p := New("\x07example\x00", pick(zone5155, strings.Fields(parts), closed), nil)
		if got, r := ask(p, question); r.Status != query.Bogus || r.Reason == "" {
			t.Errorf("%s by %s = %s %+v", question, parts, got, r)
		}
	}
}

func keys(m map[string]string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// Rows of hardening C: records that are truly signed and say what is not true, or that nobody signed.
func TestRecordsThatDoNotCount(t *testing.T) {
	nsec := denialtest.Set("example.", zone4035["b"])
	with := func(s query.RRset, f func(*query.RRset)) query.RRset { f(&s); return s }
	resign := func(signer string, typ uint16, labels ...int) (b []byte) {
		for _, l := range labels {
			b = query.AppendRData(b, denialtest.Sig(dnsname.MustParse(signer), typ, l))
		}
		return b
	}
	for what, s := range map[string]query.RRset{
		"not verified":                    with(nsec, func(s *query.RRset) { s.Status = query.Unchecked }),
		"bogus":                           with(nsec, func(s *query.RRset) { s.Status = query.Bogus }),
		"insecure":                        with(nsec, func(s *query.RRset) { s.Status = query.Insecure }),
		"of another class":                with(nsec, func(s *query.RRset) { s.Class = dns.ClassCHAOS }),
		"without signature":               with(nsec, func(s *query.RRset) { s.Sigs = nil }),
		"signed by the parent":            with(nsec, func(s *query.RRset) { s.Sigs = resign(".", dns.TypeNSEC, 2) }),
		"signed for another type":         with(nsec, func(s *query.RRset) { s.Sigs = resign("example.", dns.TypeA, 2) }),
		"expanded from a wildcard":        with(nsec, func(s *query.RRset) { s.Sigs = resign("example.", dns.TypeNSEC, 1) }),
		"expanded, by one signature":      with(nsec, func(s *query.RRset) { s.Sigs = resign("example.", dns.TypeNSEC, 2, 1) }),
		"two records":                     with(nsec, func(s *query.RRset) { s.Data = append(slices.Clone(s.Data), s.Data...) }),
		"no record":                       with(nsec, func(s *query.RRset) { s.Data = nil }),
		"cut off":                         with(nsec, func(s *query.RRset) { s.Data = query.AppendRData(nil, s.First()[:5]) }),
		"without types":                   with(nsec, func(s *query.RRset) { s.Data = query.AppendRData(nil, append(s.First()[:13:13], 0, 0)) }),
		"windows out of order":            with(nsec, func(s *query.RRset) { s.Data = query.AppendRData(nil, append(s.First()[:13:13], 1, 1, 64, 0, 1, 32)) }),
		"next name in another zone":       denialtest.Set("example.", "b.example. 3600 IN NSEC ns1.test. NS RRSIG NSEC"),
		"next name above the zone":        denialtest.Set("example.", "b.example. 3600 IN NSEC . NS RRSIG NSEC"),
		"next name before the owner":      denialtest.Set("example.", "b.example. 3600 IN NSEC ai.example. NS RRSIG NSEC"),
		"next name is the owner":          denialtest.Set("example.", "b.example. 3600 IN NSEC b.example. NS RRSIG NSEC"),
		"owner in another zone":           denialtest.Set("example.", "b.test. 3600 IN NSEC ns1.example. NS RRSIG NSEC"),
		"a delegation, the name below it": denialtest.Set("example.", "example. 3600 IN NSEC ns1.example. NS RRSIG NSEC"),
		"a DNAME, the name below it":      denialtest.Set("example.", "example. 3600 IN NSEC ns1.example. NS SOA DNAME RRSIG NSEC"),
	} {
		got, r := ask(New("\x07example\x00", []query.RRset{s, denialtest.Set("example.", zone4035["apex"])}, nil), "nxdomain ml.example.")
		if r.Status != query.Bogus {
			t.Errorf("NSEC %s: %s %+v", what, got, r)
		}
	}
	// The apex record of b's proof covers the wildcard, so the proof stands once b's record is good.
	if got, r := ask(New("\x07example\x00", []query.RRset{nsec, denialtest.Set("example.", zone4035["apex"])}, nil), "nxdomain ml.example."); got != "Secure" {
		t.Errorf("the good record: %s %+v", got, r)
	}

	for what, text := range map[string]string{
		"unknown hash algorithm":       "2t7b4g4vsa5smi47k61mv5bv1a22bojr.example. 3600 IN NSEC3 2 0 12 aabbccdd 2vptu5timamqttgl4luu9kg21e0aor3s A RRSIG",
		"unknown flag":                 "2t7b4g4vsa5smi47k61mv5bv1a22bojr.example. 3600 IN NSEC3 1 2 12 aabbccdd 2vptu5timamqttgl4luu9kg21e0aor3s A RRSIG",
		"not directly below the apex":  "2t7b4g4vsa5smi47k61mv5bv1a22bojr.w.example. 3600 IN NSEC3 1 0 12 aabbccdd 2vptu5timamqttgl4luu9kg21e0aor3s A RRSIG",
		"owner label too short":        "2t7b4g4vsa5smi47k61mv5bv1a22boj.example. 3600 IN NSEC3 1 0 12 aabbccdd 2vptu5timamqttgl4luu9kg21e0aor3s A RRSIG",
		"owner label not base32hex":    "2t7b4g4vsa5smi47k61mv5bv1a22bojw.example. 3600 IN NSEC3 1 0 12 aabbccdd 2vptu5timamqttgl4luu9kg21e0aor3s A RRSIG",
		"another salt":                 "2t7b4g4vsa5smi47k61mv5bv1a22bojr.example. 3600 IN NSEC3 1 0 12 aabbccde 2vptu5timamqttgl4luu9kg21e0aor3s A RRSIG",
		"another number of iterations": "2t7b4g4vsa5smi47k61mv5bv1a22bojr.example. 3600 IN NSEC3 1 0 11 aabbccdd 2vptu5timamqttgl4luu9kg21e0aor3s A RRSIG",
	} {
		if got, r := ask(New("\x07example\x00", denialtest.Sets("example.", text), nil), "nodata ns1.example. MX"); r.Status != query.Bogus {
			t.Errorf("NSEC3 with %s: %s %+v", what, got, r)
		}
	}
	short := denialtest.Set("example.", zone5155["ns1"])
	rdata := slices.Clone(short.First())
	rdata[9] = 19 // the next hash is a byte short, and the rest would still parse
	short.Data = query.AppendRData(nil, append(rdata[:29:29], 0, 1, 64))
	if got, r := ask(New("\x07example\x00", []query.RRset{short}, nil), "nodata ns1.example. MX"); r.Status != query.Bogus {
		t.Errorf("NSEC3 with a short next hash: %s %+v", got, r)
	}
	mixed := []query.RRset{denialtest.Set("example.", zone5155["ns1"]), denialtest.Set("example.", strings.Replace(zone5155["ns2"], "aabbccdd", "-", 1))}
	if got, r := ask(New("\x07example\x00", mixed, nil), "nodata ns1.example. MX"); r.Status != query.Bogus || r.Reason != "NSEC3 records of different chains" {
		t.Errorf("two chains: %s %+v", got, r)
	}
}

// optOutWildcard is an opt-out zone that holds *.example CNAME, and an unsigned delegation sub.example that lies in
// the gap of the wildcard's record.
var optOutWildcard = func() string {
	h := func(n string) string { return strings.ToLower(dns.HashName(n, dns.SHA1, 0, "")) }
	return fmt.Sprintf("%s.example. 60 IN NSEC3 1 1 0 - %s NS SOA RRSIG|%[2]s.example. 60 IN NSEC3 1 1 0 - %[1]s CNAME RRSIG", h("example."), h("*.example."))
}()

// The rules of RFC 6840 section 4 and of neighbours, one by one.
func TestRules(t *testing.T) {
	for _, c := range []struct{ what, zone, records, question, want string }{
		{"the root denies its DS itself", ".", ". 60 IN NSEC aaa. NS SOA RRSIG NSEC DNSKEY", "nodata . DS", "Secure"},
		{"any other apex does not", "example.", "example. 60 IN NSEC a.example. NS SOA RRSIG NSEC", "nodata example. DS", "Bogus"},
		{"even if it hides its SOA", "example.", "example. 60 IN NSEC a.example. NS RRSIG NSEC", "nodata example. DS", "Bogus"},
		{"an apex denies other types", "example.", "example. 60 IN NSEC a.example. NS SOA RRSIG NSEC", "nodata example. A", "Secure"},
		{"a child's apex record is not the parent's", "example.", "sub.example. 60 IN NSEC t.example. NS SOA RRSIG NSEC", "delegation sub.example.", "Unproven Bogus"},
		{"and denies no DS", "example.", "sub.example. 60 IN NSEC t.example. NS SOA RRSIG NSEC", "nodata sub.example. DS", "Bogus"},
		{"no NS: no delegation (RFC 6840 4.4)", "example.", "sub.example. 60 IN NSEC t.example. A RRSIG NSEC", "delegation sub.example.", "NoCut Secure"},
		{"DS: not insecure", "example.", "sub.example. 60 IN NSEC t.example. NS DS RRSIG NSEC", "delegation sub.example.", "Unproven Bogus"},
		{"CNAME counts as present (4.3)", "example.", "w.example. 60 IN NSEC x.example. CNAME RRSIG NSEC", "nodata w.example. A", "Bogus"},
		{"CNAME is no cut", "example.", "w.example. 60 IN NSEC x.example. CNAME RRSIG NSEC", "delegation w.example.", "NoCut Secure"},
		{"CNAME at the wildcard", "example.", "*.example. 60 IN NSEC example. CNAME RRSIG NSEC", "nodata w.example. A", "Bogus"},
		{"DNAME owner lacks a type", "example.", "w.example. 60 IN NSEC x.example. DNAME RRSIG NSEC", "nodata w.example. A", "Secure"},
		{"below a DNAME", "example.", "w.example. 60 IN NSEC x.example. DNAME RRSIG NSEC", "delegation q.w.example.", "Unproven Bogus"},
		{"ANY has at least NSEC (4.2)", "example.", "w.example. 60 IN NSEC x.example. A RRSIG NSEC", "nodata w.example. ANY", "Bogus"},
		{"NSEC itself is there", "example.", "w.example. 60 IN NSEC x.example. A RRSIG NSEC", "nodata w.example. NSEC", "Bogus"},
		{"a type beyond the window", "example.", "w.example. 60 IN NSEC x.example. A RRSIG NSEC TYPE65534", "nodata w.example. TYPE65533", "Secure"},
		{"a type in a high window", "example.", "w.example. 60 IN NSEC x.example. A RRSIG NSEC TYPE65534", "nodata w.example. TYPE65534", "Bogus"},
		{"next name in capitals (5.1)", "example.", "w.example. 60 IN NSEC Q.E.EXAMPLE. A RRSIG NSEC", "nodata e.example. A", "Bogus"}, // order: e < w
		{"next name in capitals, right order", "example.", "d.example. 60 IN NSEC Q.E.EXAMPLE. A RRSIG NSEC", "nodata e.example. A", "Secure"},
		{"an empty wildcard", "example.", "a.example. 60 IN NSEC x.*.b.example. A RRSIG NSEC|x.*.b.example. 60 IN NSEC z.example. A RRSIG NSEC", "nodata q.b.example. A", "Secure"},
		{"no name error by it", "example.", "a.example. 60 IN NSEC x.*.b.example. A RRSIG NSEC|x.*.b.example. 60 IN NSEC z.example. A RRSIG NSEC", "nxdomain q.b.example.", "Bogus"},
		{"a zone of one name", "example.", "example. 60 IN NSEC example. NS SOA RRSIG NSEC", "nxdomain w.example.", "Secure"},
		{"a zone of one name, hashed", "example.", "0p9mhaveqvm6t7vbl5lop2u3t2rp3tom.example. 60 IN NSEC3 1 0 12 aabbccdd 0p9mhaveqvm6t7vbl5lop2u3t2rp3tom NS SOA RRSIG", "nxdomain w.example.", "Secure"},
		{"the apex of it is not covered", "example.", "0p9mhaveqvm6t7vbl5lop2u3t2rp3tom.example. 60 IN NSEC3 1 0 12 aabbccdd 0p9mhaveqvm6t7vbl5lop2u3t2rp3tom NS SOA RRSIG", "nodata example. NS", "Bogus"},
		{"the wildcard asked for by name", "example.", "x.example. 60 IN NSEC example. A RRSIG NSEC", "expanded *.example. 1", "Secure"},
		{"the wildcard, absent, asked for by name", "example.", "example. 60 IN NSEC a.example. NS SOA RRSIG NSEC", "nxdomain *.example.", "Secure"},
		{"is then not NODATA", "example.", "example. 60 IN NSEC a.example. NS SOA RRSIG NSEC", "nodata *.example. A", "Bogus"},

		{"compact denial (RFC 9824): NODATA", "example.", `w.example. 60 IN NSEC \000.w.example. RRSIG NSEC TYPE128`, "nodata w.example. A", "Secure"},
		{"compact denial: NXDOMAIN by NXNAME", "example.", `w.example. 60 IN NSEC \000.w.example. RRSIG NSEC TYPE128`, "nxdomain w.example.", "Secure"},
		{"compact denial: not without", "example.", `w.example. 60 IN NSEC \000.w.example. RRSIG NSEC`, "nxdomain w.example.", "Bogus"},
		{"compact denial: no cut", "example.", `w.example. 60 IN NSEC \000.w.example. RRSIG NSEC TYPE128`, "delegation w.example.", "NoCut Secure"},
		{"white lies (RFC 4470)", "example.", `v\255.example. 60 IN NSEC w\000.example. RRSIG NSEC|\)\255.example. 60 IN NSEC +.example. RRSIG NSEC`, "nxdomain w.example.", "Secure"},

		{"opt-out, by the record of a wildcard that has the type", "example.", optOutWildcard, "nodata sub.example. DS", "Insecure"},
		{"NSEC fails, NSEC3 proves", "example.", zone4035["apex"] + "|" + zone5155["ns1"], "nodata ns1.example. MX", "Secure"},
		{"NSEC proves, NSEC3 is of no use", "example.", zone4035["ns1"] + "|" + zone5155["xx"], "nodata ns1.example. MX", "Secure"},
		{"no mixture of both", "example.", zone4035["b"] + "|" + zone5155["apex"] + "|" + zone5155["ns1"], "nxdomain ml.example.", "Bogus"},
	} {
		got, r := ask(New(dnsname.MustParse(c.zone), denialtest.Sets(c.zone, strings.Split(c.records, "|")...), nil), c.question)
		if got != c.want {
			t.Errorf("%s: %s = %s %+v, want %s", c.what, c.question, got, r, c.want)
		}
	}
}

// Hardening B, at each limit and one beyond.
func TestLimits(t *testing.T) {
	chain := func(iterations, salt int) []query.RRset {
		s := strings.Repeat("ab", salt)
		if salt == 0 {
			s = "-"
		}
		h := func(n string) string {
			return strings.ToLower(dns.HashName(n, dns.SHA1, uint16(iterations), strings.TrimPrefix(s, "-")))
		}
		return denialtest.Sets("example.", fmt.Sprintf("%s.example. 60 IN NSEC3 1 0 %d %s %s A RRSIG", h("w.example."), iterations, s, h("v.example.")))
	}
	for _, c := range []struct {
		iterations, salt int
		want             query.Status
		ede              uint16
	}{
		{0, 0, query.Secure, query.NoEDE},
		{50, 0, query.Secure, query.NoEDE},
		{51, 0, query.Insecure, 27},
		{150, 0, query.Insecure, 27},
		{151, 0, query.Insecure, 27},
		{500, 0, query.Insecure, 27},
		{501, 0, query.Bogus, 27},
		{65535, 255, query.Bogus, 27},
		{50, 35, query.Secure, query.NoEDE}, // 20+35+9 bytes: one block still
		{24, 36, query.Secure, query.NoEDE}, // two blocks: 25 times two are 50 with the first block free
		{25, 36, query.Insecure, 27},
		{9, 255, query.Secure, query.NoEDE}, // five blocks
		{10, 255, query.Insecure, 27},
		{100, 255, query.Bogus, 27},
	} {
		p := New("\x07example\x00", chain(c.iterations, c.salt), nil)
		r := p.NoData(dnsname.MustParse("w.example."), dns.TypeMX)
		if r.Status != c.want || r.EDE != c.ede {
			t.Errorf("%d iterations, salt of %d: %+v, want %v %d", c.iterations, c.salt, r, c.want, c.ede)
		}
		// Of sub the record says nothing, which is only looked at up to MaxExamined.
		cut, r := p.Delegation(dnsname.MustParse("sub.example."))
		if want := map[bool]Cut{true: InsecureCut}[c.want == query.Insecure && p.params.price() > MaxExamined]; cut != want {
			t.Errorf("%d iterations, salt of %d: Delegation = %v %+v", c.iterations, c.salt, cut, r)
		}
	}

	// The eighth NSEC3 record is looked at, the ninth is not.
	var many []string
	for _, k := range []string{"apex", "a", "ai", "w", "xx", "ns2", "*.w", "x.w"} {
		many = append(many, zone5155[k])
	}
	for _, c := range []struct {
		before int
		want   query.Status
	}{{7, query.Secure}, {8, query.Bogus}} {
		r := New("\x07example\x00", denialtest.Sets("example.", append(slices.Clone(many[:c.before]), zone5155["ns1"])...), nil).NoData(dnsname.MustParse("ns1.example."), dns.TypeMX)
		if r.Status != c.want {
			t.Errorf("behind %d NSEC3 records: %+v", c.before, r)
		}
	}
	// Likewise the 32nd and 33rd NSEC.
	for _, c := range []struct {
		before int
		want   query.Status
	}{{MaxNSEC - 1, query.Secure}, {MaxNSEC, query.Bogus}} {
		s := slices.Repeat(denialtest.Sets("example.", zone4035["xx"]), c.before)
		r := New("\x07example\x00", append(s, denialtest.Set("example.", zone4035["ns1"])), nil).NoData(dnsname.MustParse("ns1.example."), dns.TypeMX)
		if r.Status != c.want {
			t.Errorf("behind %d NSEC records: %+v", c.before, r)
		}
	}
}

// A zone of too many iterations is insecure, and still cannot be made to say what it does not.
func TestExcused(t *testing.T) {
	chain := func(iterations int, flags string, names map[string]string) (out map[string]string) {
		h := func(n string) string { return strings.ToLower(dns.HashName(n, dns.SHA1, uint16(iterations), "")) }
		order := slices.SortedFunc(keys(names), func(a, b string) int { return strings.Compare(h(a), h(b)) })
		out = make(map[string]string)
		for i, n := range order {
			out[n] = fmt.Sprintf("%s.example. 60 IN NSEC3 1 %s %d - %s %s", h(n), flags, iterations, h(order[(i+1)%len(order)]), names[n])
		}
		return out
	}
	names := map[string]string{"example.": "NS SOA RRSIG", "www.example.": "A RRSIG", "sub.example.": "NS", "safe.example.": "NS DS RRSIG",
		"a.example.": "A RRSIG", "b.example.": "A RRSIG", "c.example.": "A RRSIG", "d.example.": "A RRSIG"}
	all := slices.Sorted(keys(names))
	for _, c := range []struct{ flags, question, parts, looked, taken string }{
		{"0", "nodata www.example. MX", "www.example.", "Insecure", "Insecure"},
		{"0", "nodata www.example. A", "www.example.", "Bogus", "Insecure"},
		{"0", "nodata www.example. MX", "example.", "Bogus", "Insecure"},
		{"0", "nxdomain nx.example.", "", "Insecure", "Insecure"},
		{"0", "nxdomain www.example.", "", "Bogus", "Insecure"},
		{"0", "nxdomain nx.example.", "www.example.", "Bogus", "Insecure"},
		{"0", "delegation sub.example.", "sub.example.", "InsecureCut Insecure", "InsecureCut Insecure"},
		{"0", "delegation safe.example.", "safe.example.", "Unproven Bogus", "InsecureCut Insecure"},
		{"0", "delegation safe.example.", "example. sub.example. www.example.", "Unproven Bogus", "InsecureCut Insecure"},
		{"0", "delegation www.example.", "www.example.", "NoCut Insecure", "InsecureCut Insecure"},
		{"0", "delegation other.example.", "", "NoCut Insecure", "InsecureCut Insecure"}, // covered without opt-out
		{"1", "delegation other.example.", "", "InsecureCut Insecure", "InsecureCut Insecure"},
	} {
		for iterations, want := range map[int]string{51: c.looked, 123: c.looked, 150: c.looked, 151: c.taken, 500: c.taken} {
			parts := strings.Fields(c.parts)
			if c.parts == "" {
				parts = all
			}
			spent := 0
			h := NewHasher(func() error { spent++; return nil })
			got, r := ask(New("\x07example\x00", pick(chain(iterations, c.flags, names), parts, func(s string) string { return s }), h), c.question)
			if got != want || r.Status == query.Insecure && (r.EDE != EDEIterations || len(r.Used) != len(parts)) {
				t.Errorf("%d iterations: %s by %s = %s %+v, want %s", iterations, c.question, parts, got, r, want)
			}
			if spent > 32 || iterations > MaxExamined && spent > 0 {
				t.Errorf("%d iterations: %s cost %d hashes", iterations, c.question, spent)
			}
		}
	}
	// Names so deep that hashing them would eat up the budget are not looked at, and nor is what the budget does not
	// suffice for called bogus.
	records := pick(chain(150, "0", names), all, func(s string) string { return s })
	deep := dnsname.MustParse(strings.Repeat("l.", 9) + "example.")
	spent := 0
	h := NewHasher(func() error { spent++; return nil })
	if r := New("\x07example\x00", records, h).NameError(deep); r.Status != query.Insecure || spent > 0 {
		t.Errorf("nine labels: %+v, %d hashes", r, spent)
	}
	h = NewHasher(func() error { return fmt.Errorf("%w: NSEC3 hashes", query.ErrLimit) })
	if cut, r := New("\x07example\x00", records, h).Delegation(dnsname.MustParse("www.example.")); r.Status != query.Insecure || r.Err != nil || cut != InsecureCut {
		t.Errorf("without a budget: %v %+v", cut, r)
	}
}

// The tree pays for each hash once, and what it cannot pay is no verdict about the data.
func TestHashBudget(t *testing.T) {
	spent := 0
	h := NewHasher(func() error {
		if spent++; spent > 64 {
			return fmt.Errorf("%w: NSEC3 hashes", query.ErrLimit)
		}
		return nil
	})
	closed := func(s string) string { return strings.Replace(s, "NSEC3 1 1 ", "NSEC3 1 0 ", 1) }
	p := New("\x07example\x00", pick(zone5155, []string{"apex", "x.w", "a"}, closed), h)
	name := dnsname.MustParse("a.c.x.w.example.")
	for range 3 {
		if r := p.NameError(name); r.Status != query.Secure {
			t.Fatalf("%+v", r)
		}
	}
	if spent != 4 { // the name, the next closer name, the encloser, the wildcard
		t.Errorf("the RFC's proof cost %d hashes, thrice", spent)
	}
	// 60 labels more: from the asked name up to the first that is there, each costs one.
	for l := range 62 {
		long := name
		for range l {
			long = "\x01q" + long
		}
		spent = 0
		r := New("\x07example\x00", pick(zone5155, []string{"apex", "x.w", "a"}, closed), NewHasher(h.charge)).NameError(long)
		if fits := 4+l <= 64; fits != (r.Status == query.Secure) || fits != (r.Err == nil) || !fits && (!errors.Is(r.Err, query.ErrLimit) || spent != 65) {
			t.Errorf("%d labels more: %+v, %d spent", l, r, spent)
		}
	}
}

func TestHash(t *testing.T) {
	for name, want := range map[string]string{ // RFC 5155 appendix A
		"example.": "0p9mhaveqvm6t7vbl5lop2u3t2rp3tom", "*.w.example.": "r53bq7cc2uvmubfu5ocmm6pers9tk9en",
		"x.y.w.example.": "2vptu5timamqttgl4luu9kg21e0aor3s", "xx.example.": "t644ebqk9bibcna874givr6joj62mlhv",
	} {
		var h [hashLen]byte
		if !ownerHash(dnsname.MustParse(want+".example."), "\x07example\x00", &h) || hash(dnsname.MustParse(name), Params{12, "\xaa\xbb\xcc\xdd"}) != h {
			t.Errorf("hash of %s is not %s", name, want)
		}
	}
}
