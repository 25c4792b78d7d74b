package policy

import (
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// TestZoneAnswers judges answers by lists and rules that are policy zones: by aliases, addresses and name servers, in
// that order, with exceptions of each, for each user by his own, and says which rule of which list it was.
func TestZoneAnswers(t *testing.T) {
	w := newWorld(t)
	w.list("zone", 0, "$TTL 60\nns.bad.rpz-nsdname CNAME .\n*.evil.rpz-nsdname CNAME rpz-drop.\n8.0.0.0.10.rpz-nsip CNAME .\n"+
		"24.0.2.0.192.rpz-ip CNAME rpz-passthru.\n24.0.3.0.192.rpz-ip CNAME garden.example.\ngood.bad.example CNAME rpz-passthru.\n"+
		"walled.example CNAME garden.example.\ndropped.example CNAME rpz-drop.\ndata.example A 192.0.9.9\n*.ok.rpz-nsdname CNAME rpz-passthru.\n")
	w.list("threat", 1, "$TTL 60\nns.threat.rpz-nsdname CNAME .\nphish.example CNAME garden.example.\nns.phish.rpz-nsdname CNAME garden.example.\n")
	w.list("excuse", 2, "@@||www.threat.example^\n@@||phish.example^\n||ads.example^$dnsrewrite=garden.example\n")
	w.put(usercache.CatalogueKind, "category/threat", &userv1.Category{Lists: []string{"threat"}, Threat: true})
	w.put(usercache.Users, "u", &userv1.User{Settings: &userv1.Settings{Lists: set("zone", "excuse"), Categories: set("threat")}, Devices: []*userv1.Device{
		{Id: "d"}, {Id: "own", Rules: rules("@@||www.bad.example^", "ns.own.rpz-nsdname CNAME .")},
	}})
	w.put(usercache.Users, "v", &userv1.User{Settings: &userv1.Settings{Lists: set("excuse")}, Devices: []*userv1.Device{{Id: "v"}, {Id: "off", Settings: &userv1.Settings{Enabled: proto.Bool(false)}}}})
	// Who serves what: names that end in the key.
	served := map[string]string{
		"bad.example.": "a.other ns.bad", "evil.example.": "x.evil", "ten.example.": "ns.ten 10.0.0.1", "threat.example.": "ns.threat", "own.example.": "ns.own",
		"phish2.example.": "ns.phish", "both.example.": "a.ok ns.bad", "first.example.": "ns.bad z.ok",
	}
	p := New(Options{Key: dnsname.NewKey([16]byte{7}), Users: w.cache, Blob: w.get, Logger: slog.New(slog.DiscardHandler),
		Servers: func(_ *query.Query, _ *query.Answer, name dnsname.Name, addrs bool) (s query.Servers) {
			for end, servers := range served {
				if !strings.HasSuffix("."+name.String(), "."+end) {
					continue
				}
				for _, f := range strings.Fields(servers) {
					if a, err := netip.ParseAddr(f); err != nil {
						s.Names = append(s.Names, dnsname.MustParse(f))
					} else if addrs {
						s.Addrs = append(s.Addrs, a)
					}
				}
			}
			return s
		}})
	for _, c := range []struct{ device, name, records, want string }{
		{"d", "www.bad.example.", "www.bad.example. A 198.51.100.1", "blocked by list mode 0 zone:2 the name servers of www.bad.example"},
		{"d", "www.bad.example.", "", "blocked by list mode 0 zone:2 the name servers of www.bad.example"},
		{"v", "www.bad.example.", "www.bad.example. A 198.51.100.1", "pass by nothing"},
		{"off", "www.bad.example.", "www.bad.example. A 198.51.100.1", "pass by nothing"},
		{"own", "www.bad.example.", "www.bad.example. A 198.51.100.1", "pass by nothing"},
		{"own", "x.bad.example.", "x.bad.example. A 198.51.100.1", "blocked by list mode 0 zone:2 the name servers of x.bad.example"},
		{"own", "x.own.example.", "x.own.example. A 198.51.100.1", "blocked by device rule mode 0 device rules:2 the name servers of x.own.example"},
		{"d", "www.evil.example.", "www.evil.example. A 198.51.100.1", "dropped by list zone:3 the name servers of www.evil.example"},
		{"d", "www.ten.example.", "www.ten.example. A 198.51.100.1", "blocked by list mode 0 zone:4 the name servers of www.ten.example"},
		{"d", "www.both.example.", "www.both.example. A 198.51.100.1", "pass by nothing"}, // the first server's rule
		{"d", "www.first.example.", "www.first.example. A 198.51.100.1", "blocked by list mode 0 zone:2 the name servers of www.first.example"},
		// An alias to or from it.
		{"d", "a.example.", "a.example. CNAME www.bad.example.\nwww.bad.example. A 198.51.100.1", "blocked by list mode 0 zone:2 the name servers of www.bad.example"},
		{"d", "a.bad.example.", "a.bad.example. CNAME b.example.\nb.example. A 198.51.100.1", "blocked by list mode 0 zone:2 the name servers of a.bad.example"},
		{"own", "a.example.", "a.example. CNAME www.bad.example.\nwww.bad.example. A 198.51.100.1", "pass by nothing"},
		// Names and addresses go first, for their place in the chain.
		{"d", "good.bad.example.", "good.bad.example. A 198.51.100.1", "pass by nothing"},
		{"d", "a.example.", "a.example. CNAME good.bad.example.\ngood.bad.example. A 198.51.100.1", "pass by nothing"},
		{"d", "a.bad.example.", "a.bad.example. CNAME good.bad.example.\ngood.bad.example. A 198.51.100.1", "blocked by list mode 0 zone:2 the name servers of a.bad.example"},
		{"d", "www.bad.example.", "www.bad.example. A 192.0.2.1", "pass by nothing"},
		{"d", "a.bad.example.", "a.bad.example. CNAME www.bad.example.\nwww.bad.example. A 192.0.2.1", "blocked by list mode 0 zone:2 the name servers of a.bad.example"},
		// Threats are not lifted by exceptions of catalogue lists, whatever is to be done about them.
		{"d", "www.threat.example.", "www.threat.example. A 198.51.100.1", "blocked by threat list mode 0 threat:2 the name servers of www.threat.example"},
		{"d", "a.example.", "a.example. CNAME www.threat.example.\nwww.threat.example. A 198.51.100.1", "blocked by threat list mode 0 threat:2 the name servers of www.threat.example"},
		{"d", "x.phish2.example.", "x.phish2.example. A 198.51.100.1", "redirected by threat list to garden.example. threat:4 the name servers of x.phish2.example is answered as garden.example."},
		{"d", "a.example.", "a.example. CNAME phish.example.\nphish.example. A 198.51.100.1", "redirected by threat list to garden.example. threat:3 phish.example is answered as garden.example."},
		// What a zone does to a name it does to an alias of that name; $dnsrewrite is for what was asked alone.
		{"d", "a.example.", "a.example. CNAME walled.example.\nwalled.example. A 198.51.100.1", "redirected by list to garden.example. zone:8 walled.example is answered as garden.example."},
		{"d", "a.example.", "a.example. CNAME dropped.example.\ndropped.example. A 198.51.100.1", "dropped by list zone:9 dropped.example"},
		{"d", "a.example.", "a.example. CNAME data.example.\ndata.example. A 198.51.100.1", "synthesised by list NOERROR 192.0.9.9 zone:10 data.example"},
		{"d", "a.example.", "a.example. CNAME ads.example.\nads.example. A 198.51.100.1", "pass by nothing"},
		{"d", "a.example.", "a.example. A 192.0.3.1", "redirected by list to garden.example. zone:6 192.0.3.1 is answered as garden.example."},
		{"d", "garden.example.", "garden.example. A 192.0.3.1", "pass by nothing"}, // it is there already
		{"v", "a.example.", "a.example. CNAME walled.example.\nwalled.example. A 198.51.100.1", "pass by nothing"},
	} {
		q := w.ask(p, c.device, c.name, "A")
		sofar := p.Question(q)
		q.Turn.Verdict = sofar
		a := answer(t, q, c.records)
		if len(a.Facts) == 0 { // as real ones have
			a.Facts = query.AppendFact(nil, query.FactZone, []byte{0})
		}
		v := p.Answer(q, &a, sofar)
		got := say(v)
		var steps []Step
		if e := p.ExplainAnswer(q, &a, sofar, func(s Step) { steps = append(steps, s) }); say(e) != got {
			t.Errorf("%s: explained as %s, judged %s", c.name, say(e), got)
		}
		if n := len(steps); n > 0 && v.Kind != query.Pass {
			got += fmt.Sprintf(" %s:%d %s", steps[n-1].List, steps[n-1].Line, steps[n-1].Detail)
			if steps[n-1].Line != v.Line {
				t.Errorf("%s: line %d for the log, %d explained", c.name, v.Line, steps[n-1].Line)
			}
		}
		if got != c.want {
			t.Errorf("%s asks %s (%s):\n %s, want\n %s", c.device, c.name, c.records, got, c.want)
		}
		wants := p.WantsServers(q)
		if exempt := sofar.Kind == query.Allowed && sofar.Why != WhyList; wants != (c.device == "d" || c.device == "own" && !exempt) {
			t.Errorf("%s asks %s: wants servers: %v", c.device, c.name, wants)
		}
		q.Turn.Local = true
		if v := p.Answer(q, &a, sofar); strings.Contains(c.want, "name servers") && v.Kind != query.Pass {
			t.Errorf("%s: local data is judged by name servers: %s", c.name, say(v))
		}
	}
	q := w.ask(p, "d", "phish.example.", "A")
	if got := say(p.Question(q)); got != "redirected by threat list to garden.example." {
		t.Errorf("a threat that a list excuses: %s", got)
	}
}
