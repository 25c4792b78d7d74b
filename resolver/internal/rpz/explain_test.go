package rpz

import (
	"net/netip"
	"testing"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// What decided is told in the words of the zone, and the verdict is the one that is served.
func TestExplain(t *testing.T) {
	second := source("second.", "deep.example CNAME .\n24.0.100.51.198.rpz-ip CNAME *.\n128.1.0.0.0.0.0.db8.2001.rpz-ip A 192.0.2.9\n"+
		"*.servers.example.rpz-nsdname CNAME rpz-drop.\n64.zz.5.db8.2001.rpz-nsip CNAME rpz-tcp-only.\n")
	second.Action = NXDomain
	r := load(t, source("first.zone.", twoZones), second)
	ask := func(client, name string) (query.Verdict, Decision, bool) {
		c, n := netip.MustParseAddr(client), dnsname.MustParse(name)
		v, d, hit := r.ExplainQuestion(c, n, dnswire.TypeA)
		if served, sure := r.Question(c, n, dnswire.TypeA); tell(v, hit) != tell(served, sure) {
			t.Errorf("%s: %s, and served %s", name, tell(v, hit), tell(served, sure))
		}
		return v, d, hit
	}
	for _, c := range []struct{ client, name, zone, rule, met string }{
		{"203.0.113.1", "nx.", "first.zone", "nx CNAME .", "nx"},
		{"203.0.113.1", "NoData.", "first.zone", "nodata CNAME *.", "nodata"},
		{"203.0.113.1", "x.wild.", "first.zone", "*.wild local data", "x.wild"},
		{"203.0.113.1", "sub.", "first.zone", "sub CNAME *.garden.example.", "sub"},
		{"203.0.113.1", "other.", "first.zone", "other CNAME garden.example.", "other"},
		{"192.0.2.1", "nx.", "first.zone", "24.0.2.0.192.rpz-client-ip CNAME rpz-drop.", "the client 192.0.2.1"},
		{"::ffff:192.0.2.7", "nx.", "first.zone", "32.7.2.0.192.rpz-client-ip CNAME rpz-passthru.", "the client 192.0.2.7"},
		{"2001:db8:1::7", "nx.", "first.zone", "48.zz.1.db8.2001.rpz-client-ip CNAME .", "the client 2001:db8:1::7"},
		{"203.0.113.1", "deep.example.", "second", "deep.example CNAME .", "deep.example; the whole zone's action is nxdomain"},
	} {
		if _, d, hit := ask(c.client, c.name); !hit || d != (Decision{c.zone, c.rule, c.met}) {
			t.Errorf("%s asks %s: %v %+v", c.client, c.name, hit, d)
		}
	}
	if _, d, hit := ask("203.0.113.1", "nothing.example."); hit || d != (Decision{}) {
		t.Errorf("nothing: %+v", d)
	}

	address := func(a string) query.Facts {
		return query.AppendFact(nil, query.FactAddress, netip.MustParseAddr(a).AsSlice())
	}
	server := func(name, addr string) []Server {
		if addr != "" {
			return []Server{{Addr: netip.MustParseAddr(addr)}}
		}
		return []Server{{Name: dnsname.MustParse(name)}}
	}
	for _, c := range []struct {
		facts     query.Facts
		servers   []Server
		rule, met string
	}{
		{address("198.51.100.7"), nil, "24.0.100.51.198.rpz-ip CNAME *.", "198.51.100.7 in the answer"},
		{address("2001:db8::1"), nil, "128.1.zz.db8.2001.rpz-ip local data", "2001:db8::1 in the answer"},
		{nil, server("ns.servers.example.", ""), "*.servers.example.rpz-nsdname CNAME rpz-drop.", "the name server ns.servers.example"},
		{nil, server("", "2001:db8:5::1"), "64.zz.5.db8.2001.rpz-nsip CNAME rpz-tcp-only.", "the name server at 2001:db8:5::1"},
	} {
		v, d, hit := r.ExplainAnswer(c.facts, c.servers, dnsname.MustParse("x."), dnswire.TypeA)
		served, sure := r.Answer(c.facts, c.servers, dnsname.MustParse("x."), dnswire.TypeA)
		if tell(v, hit) != tell(served, sure) || d != (Decision{"second", c.rule, c.met + "; the whole zone's action is nxdomain"}) {
			t.Errorf("%s: %+v, %s", c.rule, d, tell(v, hit))
		}
	}
}
