package rpz

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

const why query.Why = 7

func load(t testing.TB, sources ...Source) *Rules {
	t.Helper()
	r, _, err := Load(sources, why)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func source(name, text string) Source {
	return Source{Name: dnsname.MustParse(name), Text: strings.NewReader(text), File: "file"}
}

// tell writes a verdict in words.
func tell(v query.Verdict, hit bool) string {
	if !hit {
		return "-"
	}
	if v.Why != why {
		return "without a reason"
	}
	switch v.Kind {
	case query.Pass:
		return "passthru"
	case query.Blocked:
		return fmt.Sprintf("%s %v", map[query.BlockMode]string{query.BlockNXDomain: "nxdomain", query.BlockNoData: "nodata"}[v.Block.Mode], v.Block.TTL)
	case query.Redirected:
		return fmt.Sprintf("cname %v %v", v.Target, v.Block.TTL)
	case query.Synthesised:
		s := fmt.Sprintf("data %d", v.Synth.RCode)
		for _, set := range v.Synth.RRs {
			for d := range query.RDatas(set.Data) {
				s += " " + dnswire.Text(set.Type, d)
			}
		}
		return s
	}
	return v.Kind.String()
}

const twoZones = `$TTL 100
@ SOA ns. host. 1 2 3 4 30
@ NS ns.
nx CNAME .
NoData CNAME *.
pass CNAME rpz-passthru.
drop CNAME rpz-drop.
tcp CNAME rpz-tcp-only.
other 77 CNAME Garden.Example.
sub CNAME *.garden.example.
self CNAME self.
data A 192.0.2.1
data A 192.0.2.2
data TXT "x"
*.wild A 192.0.2.3
b.wild CNAME .
twice CNAME .
twice CNAME *.
twice A 192.0.2.9
data CNAME .
24.0.2.0.192.rpz-client-ip CNAME rpz-drop.
32.7.2.0.192.rpz-client-ip CNAME rpz-passthru.
48.zz.1.db8.2001.rpz-client-ip CNAME .
8.0.0.0.10.rpz-ip CNAME .
16.0.0.1.10.rpz-ip CNAME *.
32.1.0.1.10.rpz-ip A 192.0.2.8
128.5.zz.db8.2001.rpz-ip CNAME rpz-passthru.
ns.bad.rpz-nsdname CNAME .
*.worse.rpz-nsdname CNAME *.
32.9.2.0.192.rpz-nsip CNAME .
`

func TestQuestions(t *testing.T) {
	r := load(t, source("rpz.", twoZones), source("rpz2.", "* CNAME .\ndata CNAME .\n*.nx CNAME *.\nwild CNAME .\n8.0.0.0.198.rpz-client-ip CNAME *.\n"))
	const nobody = "203.0.113.1"
	for _, c := range []struct {
		client, name string
		typ          uint16
		want         string
	}{
		{nobody, "nx.", 1, "nxdomain 30s"},
		{nobody, "nodata.", 1, "nodata 30s"},
		{nobody, "pass.", 1, "passthru"},
		{nobody, "drop.", 1, "dropped"},
		{nobody, "tcp.", 1, "truncated"},
		{nobody, "other.", 1, "cname garden.example. 1m17s"},
		{nobody, "sub.", 1, "cname sub.garden.example. 1m40s"},
		{nobody, "self.", 1, "passthru"},
		{nobody, "data.", 1, "data 0 192.0.2.1 192.0.2.2"},
		{nobody, "data.", 16, `data 0 "x"`},
		{nobody, "data.", 28, "data 0"},
		{nobody, "x.wild.", 1, "data 0 192.0.2.3"},
		{nobody, "y.x.wild.", 1, "data 0 192.0.2.3"},
		{nobody, "b.wild.", 1, "nxdomain 30s"},
		{nobody, "x.b.wild.", 1, "-"}, // b.wild exists, so *.wild does not stand for it; nor does the next zone's *, for wild exists there
		{nobody, "wild.", 1, "nxdomain 1m0s"},
		{nobody, "twice.", 1, "nxdomain 30s"},
		{nobody, "x.nx.", 1, "nodata 1m0s"},
		{nobody, "anything.else.", 1, "nxdomain 1m0s"},
		{nobody, ".", 1, "-"},
		{"192.0.2.1", "pass.", 1, "dropped"},
		{"192.0.2.7", "nx.", 1, "passthru"},
		{"::ffff:192.0.2.1", "pass.", 1, "dropped"},
		{"2001:db8:1::77", "pass.", 1, "nxdomain 30s"},
		{"2001:db8:2::77", "pass.", 1, "passthru"},
		{"198.1.2.3", "nx.", 1, "nxdomain 30s"}, // the first zone decides
		{"198.1.2.3", "x.", 1, "nodata 1m0s"},
	} {
		if got := tell(r.Question(netip.MustParseAddr(c.client), dnsname.MustParse(c.name), c.typ)); got != c.want {
			t.Errorf("%s asks %s %d: %s, want %s", c.client, c.name, c.typ, got, c.want)
		}
	}
	long := dnsname.MustParse(strings.Repeat("a123456789.", 22))
	all := load(t, source("rpz.", "* CNAME *.garden.example.\n"))
	if got := tell(all.Question(netip.MustParseAddr(nobody), long, 1)); got != "data 6" {
		t.Errorf("a name that gets too long: %s", got)
	}
}

func TestAnswers(t *testing.T) {
	r := load(t, source("rpz.", twoZones), source("rpz2.", "8.0.0.0.10.rpz-ip CNAME rpz-drop.\n8.0.0.0.11.rpz-ip CNAME rpz-drop.\nns.bad.rpz-nsdname CNAME rpz-drop.\nns.other.rpz-nsdname CNAME rpz-drop.\n"))
	if !r.WantServers() || load(t, source("rpz.", "a CNAME .")).WantServers() {
		t.Error("it does not know whether it wants to know servers")
	}
	for _, c := range []struct {
		addresses, servers, want string
	}{
		{"", "", "-"},
		{"192.0.2.1", "", "-"},
		{"10.9.9.9", "", "nxdomain 30s"},
		{"10.9.9.9 10.1.2.3", "", "nodata 30s"},
		{"10.1.0.1 10.9.9.9", "", "data 0 192.0.2.8"},
		{"2001:db8::5", "", "passthru"},
		{"2001:db8::6", "", "-"},
		{"11.1.1.1", "", "dropped"},
		{"", "ns.good. 192.0.2.1", "-"},
		{"", "ns.good. ns.bad.", "nxdomain 30s"},
		{"", "a.worse.", "nodata 30s"},
		{"", "worse.", "-"},
		{"", "ns.good. 192.0.2.9", "nxdomain 30s"},
		{"", "192.0.2.9 a.worse.", "nodata 30s"}, // names before addresses
		{"10.9.9.9", "a.worse.", "nxdomain 30s"}, // addresses of the answer before both
		{"11.1.1.1", "ns.bad.", "nxdomain 30s"},  // zones before all
		{"11.1.1.1", "ns.other.", "dropped"},
	} {
		var facts query.Facts
		facts = query.AppendFact(facts, query.FactAlias, []byte("\x02nx\x00"))
		for _, a := range strings.Fields(c.addresses) {
			facts = query.AppendFact(facts, query.FactAddress, netip.MustParseAddr(a).AsSlice())
		}
		var servers []Server
		for _, s := range strings.Fields(c.servers) {
			if a, err := netip.ParseAddr(s); err == nil {
				servers = append(servers, Server{Addr: a})
			} else {
				servers = append(servers, Server{Name: dnsname.MustParse(s)})
			}
		}
		if got := tell(r.Answer(facts, servers, dnsname.MustParse("asked."), 1)); got != c.want {
			t.Errorf("%s | %s: %s, want %s", c.addresses, c.servers, got, c.want)
		}
	}
	for name, want := range map[string]bool{"nx.": true, "nothing.": false, "b.wild.": true, "wild.": false} {
		if got := r.Names(dnsname.MustParse(name)); got != want {
			t.Errorf("Names(%s) = %v", name, got)
		}
	}
}

func TestOverrides(t *testing.T) {
	for action, want := range map[Action]string{
		Given: "data 0 192.0.2.1", PassThru: "passthru", Drop: "dropped", NXDomain: "nxdomain 1m0s", NoData: "nodata 1m0s", TCPOnly: "truncated",
		CNAME: "cname t. 1m0s", Disabled: "nodata 1m0s",
	} {
		s := source("rpz.", "a A 192.0.2.1\n")
		s.Action, s.Target = action, dnsname.MustParse("t.")
		r := load(t, s, source("next.", "a CNAME *.\n"))
		if got := tell(r.Question(netip.Addr{}, dnsname.MustParse("a."), 1)); got != want {
			t.Errorf("action %d: %s, want %s", action, got, want)
		}
	}
}

func TestReading(t *testing.T) {
	r, reports, err := Load([]Source{source("rpz.", `$TTL 5
@ SOA ns. host. 1 2 3 4 30
outside.zone. CNAME .
a CNAME .
a CNAME *.
b NS ns.
c.rpz-unknown CNAME .
33.1.2.0.192.rpz-ip CNAME .
24.1.2.0.192.rpz-ip CNAME .
x.rpz-ip CNAME .
8.zz.rpz-ip CNAME .
128.1.2.rpz-nsip CNAME .
d CH A 192.0.2.1
e A 192.0.2.1
0.0.0.0.0.rpz-client-ip CNAME rpz-passthru.
`)}, why)
	if err != nil {
		t.Fatal(err)
	}
	if p := reports[0]; p.Rules != 4 || p.Dropped != 9 || p.First != "outside.zone. CNAME is outside the zone" {
		// a, e, 8.zz (the network ::/8) and 0.0.0.0/0 are rules.
		t.Errorf("%+v", p)
	}
	if got := tell(r.Question(netip.MustParseAddr("192.0.2.1"), dnsname.MustParse("a."), 1)); got != "passthru" {
		t.Errorf("everybody's rule: %s", got)
	}
	for text, want := range map[string]string{
		"a CNAME .\nb A 1.2.3\n": "policy zone rpz.: file: ",
		"a BOGUS x\n":            "policy zone rpz.: file: ",
		"$INCLUDE /etc/passwd\n": "policy zone rpz.: file: ",
	} {
		if _, _, err := Load([]Source{source("rpz.", text)}, why); err == nil || !strings.HasPrefix(err.Error(), want) || !strings.Contains(err.Error(), "line") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestTextsWithoutEnd(t *testing.T) {
	text := &limited{r: strings.NewReader(strings.Repeat("a CNAME .\n", 100)), left: 500}
	if b, err := io.ReadAll(text); !errors.Is(err, errLong) || len(b) > 500 {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	text = &limited{r: strings.NewReader("a CNAME .\n"), left: 10}
	if b, err := io.ReadAll(text); err != nil || len(b) != 10 {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}

func TestAllocations(t *testing.T) {
	r := load(t, source("rpz.", twoZones))
	client, name := netip.MustParseAddr("203.0.113.1"), dnsname.MustParse("a.b.c.example.com.")
	facts := query.AppendFact(nil, query.FactAddress, []byte{192, 0, 2, 1})
	servers := []Server{{Name: name}, {Addr: client}}
	if n := testing.AllocsPerRun(100, func() {
		r.Question(client, name, 1)
		r.Answer(facts, servers, name, 1)
		r.Names(name)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// FuzzZone: no text makes it panic, and what is read can be asked.
func FuzzZone(f *testing.F) {
	f.Add(twoZones, "x.wild.")
	f.Add("* CNAME *.a\n", "a.")
	f.Add("* CNAME ", "a")
	f.Add("128.zz.rpz-ip CNAME .\n0.rpz-ip A 1.2.3.4\n", ".")
	f.Fuzz(func(t *testing.T, text, name string) {
		r, reports, err := Load([]Source{source("rpz.", text)}, why)
		if err != nil {
			return
		}
		if reports[0].Rules < 0 || (reports[0].Dropped > 0) != (reports[0].First != "") {
			t.Errorf("%+v", reports[0])
		}
		n, err := dnsname.Parse(name)
		if err != nil {
			return
		}
		v, hit := r.Question(netip.MustParseAddr("192.0.2.1"), n, 1)
		if v.Kind == query.Redirected && dnsname.Check([]byte(v.Target)) != nil {
			t.Errorf("%q is no name", v.Target)
		}
		if v.Kind == query.Synthesised && v.Synth == nil || !hit && v.Kind != query.Pass {
			t.Errorf("%+v %v", v, hit)
		}
		r.Answer(query.AppendFact(nil, query.FactAddress, []byte{10, 1, 1, 1}), []Server{{Name: n}}, n, 1)
	})
}

// A zone cannot make more of itself than its text has by far.
func TestGenerate(t *testing.T) {
	load := func(lines int) error {
		text := strings.Repeat("$GENERATE 0-65535 a CNAME .\n", lines)
		_, _, err := Load([]Source{{Name: dnsname.MustParse("rpz."), Text: strings.NewReader(text), File: "f"}}, 1)
		return err
	}
	if err := load(1); err != nil {
		t.Error(err)
	}
	if err := load(100); err == nil || !strings.Contains(err.Error(), "$GENERATE") {
		t.Errorf("6,553,600 records of 2,900 bytes: %v", err)
	}
}
