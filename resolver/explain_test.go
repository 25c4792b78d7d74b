package resolver_test

import (
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
)

// A drawing draws policies of everything there is.
type drawing struct {
	*rand.Rand
	blobs [][]byte
	texts map[string][]string // lines, by "list ID", "service ID", "device rules" of a device, and so on
}

var drawnNames = []string{
	"a.example", "www.a.example", "x.www.a.example", "b.example", "www.b.example", "c.example", "alias.example", "twice.example", "private.example", "mail.example", "hint.example",
	"search.example", "served.example", "x.served.example", "nothing.example", "use-application-dns.net", "mask.icloud.com",
}

const drawnUpstream = `
a A 192.0.2.1
a AAAA 2001:db8::1
a MX 10 www.b
www.a A 192.0.2.2
x.www.a CNAME b
b A 192.0.2.3
www.b A 192.0.2.4
c A 192.0.2.5
alias CNAME b
twice CNAME alias
private A 10.0.0.1
mail MX 10 x.served
hint HTTPS 1 . alpn=h3 ipv4hint=192.0.2.3
search A 192.0.2.6
safe A 192.0.2.7
served A 192.0.2.8
x.served A 192.0.2.9
`

func (d *drawing) chance(n int) bool        { return d.IntN(n) == 0 }
func (d *drawing) name() string             { return drawnNames[d.IntN(len(drawnNames))] }
func (d *drawing) pick(of ...string) string { return of[d.IntN(len(of))] }
func (d *drawing) some(most int, f func())  { d.times(d.IntN(most+1), f) }
func (d *drawing) times(n int, f func()) {
	for range n {
		f()
	}
}
func (d *drawing) set(of ...string) *userv1.StringSet {
	s := &userv1.StringSet{Replace: d.chance(6)}
	for _, v := range of {
		switch d.IntN(4) {
		case 0, 1:
			s.Values = append(s.Values, v)
		case 2:
			s.Removed = append(s.Removed, v)
		}
	}
	return s
}

// lines draws a text of rules.
func (d *drawing) lines(most int) (lines []string) {
	d.some(most, func() {
		n := d.name()
		lines = append(lines, strings.NewReplacer("NAME", n, "SHORT", n[:1]).Replace(d.pick(
			"||NAME^", "||NAME^", "@@||NAME^", "||NAME^$important", "@@||NAME^$important", "|NAME^", "NAME", "! a comment", "0.0.0.0 NAME", "192.0.2.77 NAME",
			"||NAME^$dnstype=AAAA", "||NAME^$dnstype=~A", "||NAME^$dnstype=CNAME", "||NAME^$dnstype=MX|TXT", "||NAME^$client=d1|d2|d3", "||NAME^$ctag=device_phone", "/^SHORT.*www/",
			"|NAME^$dnsrewrite=192.0.2.78", "|NAME^$dnsrewrite=NXDOMAIN;;", "|NAME^$dnsrewrite=REFUSED", "|NAME^$dnsrewrite=c.example", "@@||NAME^$dnsrewrite", "192.0.2.3", "||192.0.2.4^", "@@||192.0.2.3^",
			"*$denyallow=example|net|com", "||example^$denyallow=NAME", "||NAME^$badfilter", "||NAME^$nonsense")))
	})
	return lines
}

func (d *drawing) rules(what string, most int) *userv1.Rules {
	l := d.lines(most)
	d.texts[what] = l
	if len(l) == 0 {
		return nil
	}
	return &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte(strings.Join(l, "\n"))}}
}

// settings draws a layer of them. Of what hides everything else there is little.
func (d *drawing) settings(layer string) *userv1.Settings {
	s := new(userv1.Settings)
	now := clock.Wall()
	if d.chance(25) {
		s.Enabled = proto.Bool(d.chance(2))
	}
	if d.chance(15) {
		s.PausedUntil = proto.Int64(now.Add(time.Duration(d.IntN(100)-70) * time.Minute).Unix())
	}
	s.Mode = userv1.BlockMode(d.IntN(6))
	if d.chance(3) {
		s.BlockTtl = proto.Uint32(uint32(d.IntN(300)))
		s.BlockIpv4 = proto.String(d.pick("", "198.51.100.1"))
		s.BlockIpv6 = proto.String(d.pick("", "2001:db8::b"))
	}
	if d.chance(2) {
		s.Lists = d.set("l0", "l1", "l2", "l3")
	}
	if d.chance(5) {
		text := strings.Join(d.lines(4), "\n")
		id := d.pick("mine", "yours")
		sum := sha256.Sum256([]byte(text))
		d.blobs = append(d.blobs, []byte(text))
		s.OwnLists = &userv1.OwnListSet{Values: []*userv1.OwnList{{Id: id, Sha256: sum[:], Size: uint64(len(text))}}}
	}
	if d.chance(3) {
		s.Services, s.Categories = d.set("served", "other"), d.set("kind", "danger")
	}
	if d.chance(4) {
		s.SafeBrowsing, s.Adult = proto.Bool(d.chance(2)), proto.Bool(d.chance(2))
	}
	if d.chance(3) {
		s.SafeSearch = d.set("engine")
	}
	if d.chance(4) {
		minute := uint32(now.Hour()*60 + now.Minute())
		one := &userv1.Schedule{Id: d.pick("s1", "s2"), TimeZone: d.pick("", "Asia/Kathmandu", "Pacific/Kiritimati"), Action: userv1.ScheduleAction(1 + d.IntN(2)), Everything: d.chance(8),
			Windows: []*userv1.Window{{Days: 0x7f, From: 0, To: 1440}}}
		if d.chance(2) {
			one.TimeZone, one.Windows = "", []*userv1.Window{{Days: uint32(1 + d.IntN(127)), From: minute, To: minute + 1 + uint32(d.IntN(30))}}
		}
		if !one.Everything {
			one.Services, one.Lists, one.Categories = []string{d.pick("served", "other")}, []string{d.pick("l1", "l3")}, []string{d.pick("kind", "danger")}
		}
		s.Schedules = &userv1.ScheduleSet{Values: []*userv1.Schedule{one}}
	}
	if d.chance(4) {
		s.Rewrites = &userv1.RewriteSet{Values: []*userv1.Rewrite{{Name: d.pick("", "*.") + d.name(), Records: []string{d.pick("A 192.0.2.80", "CNAME "+d.name(), "NXDOMAIN", "NODATA", "REFUSED", "TXT \"x\"")}}}}
	}
	if d.chance(5) {
		s.Unblocks = &userv1.UnblockSet{Values: []*userv1.Unblock{{Name: d.name(), Subtree: d.chance(2), Until: now.Add(time.Duration(d.IntN(100)-40) * time.Minute).Unix()}}}
	}
	if d.chance(8) {
		s.DenyNetworks = strs("10.0.1.128/25")
	}
	if d.chance(10) {
		s.AllowNetworks = strs(d.pick("10.0.1.0/24", "10.0.2.0/24"), "10.0.1.64/26")
	}
	if d.chance(4) {
		s.RebindingProtection, s.RebindingExceptions = proto.Bool(true), d.set("private.example", "example")
	}
	if d.chance(6) {
		s.BlockHttpsRecords, s.BlockTypes = proto.Bool(true), d.set("MX", "TYPE65280")
	}
	if d.chance(6) {
		s.BlockBypass, s.BlockFirefoxCanary, s.BlockPrivateRelay = proto.Bool(d.chance(3)), proto.Bool(d.chance(2)), proto.Bool(d.chance(2))
	}
	if d.chance(8) {
		s.RateLimit, s.RateBurst = proto.Uint32(1), proto.Uint32(uint32(1+d.IntN(3)))
	}
	if d.chance(10) {
		s.DenyDomains = d.set("a.example", "served.example", "mail.example")
	}
	if d.chance(15) {
		s.AllowDomains = d.set("example", "b.example", "net")
	}
	s.Log = userv1.LogPrivacy_LOG_PRIVACY_FULL
	return s
}

// TestExplanationsAreWhatIsServed: random users with random settings ask random questions, and each time what an
// operator is told just before, step, list, line, rule and verdict, is what has decided the served query.
func TestExplanationsAreWhatIsServed(t *testing.T) {
	seeds := uint64(3)
	if *long {
		seeds = 100
	}
	for seed := range seeds {
		synctest.Test(t, func(t *testing.T) { explainRandomly(t, seed) })
	}
}

func explainRandomly(t *testing.T, seed uint64) {
	d := &drawing{Rand: rand.New(rand.NewPCG(seed, 7)), texts: map[string][]string{}}
	catalogue := map[string]proto.Message{
		"service/served":    &userv1.Service{Number: 0, Rules: []string{"||served.example^"}},
		"service/other":     &userv1.Service{Number: 1, Rules: []string{"||c.example^", "||192.0.2.8^"}},
		"category/kind":     &userv1.Category{Number: 0, Lists: []string{"l3"}, Adult: true},
		"category/danger":   &userv1.Category{Number: 1, Lists: []string{"l4"}, Threat: true, SafeBrowsing: true},
		"safesearch/engine": &userv1.SafeSearch{Rewrites: []*userv1.Rewrite{{Name: "search.example", Records: []string{"CNAME safe.example"}}}},
	}
	d.texts["list served"], d.texts["list other"] = []string{"||served.example^"}, []string{"||c.example^", "||192.0.2.8^"}
	for i := range uint32(5) {
		id := fmt.Sprintf("l%d", i)
		d.texts["list "+id] = append([]string{"! list " + id}, d.lines(6)...)
		if i == 2 && seed%3 > 0 { // a policy zone among the lists
			lines := []string{"$TTL 60", "@ SOA a. b. 1 2 3 4 5", "@ NS a."}
			d.some(6, func() {
				lines = append(lines, d.pick("", "*.")+d.name()+" "+d.pick("CNAME .", "CNAME *.", "CNAME rpz-passthru.", "CNAME rpz-drop.", "CNAME rpz-tcp-only.", "CNAME c.example.", "A 192.0.2.91"))
			})
			d.texts["list "+id] = append(lines, "32.3.2.0.192.rpz-ip CNAME .", "32.107.1.0.10.rpz-client-ip CNAME *.", "*.example.rpz-nsdname CNAME rpz-passthru.")
		}
		l, b := list(i, strings.Join(d.texts["list "+id], "\n"))
		catalogue["list/"+id], d.blobs = l, append(d.blobs, b)
	}
	for i := range 3 {
		id := fmt.Sprintf("p%d", i)
		catalogue["policy/"+id] = &userv1.Policy{Settings: d.settings(id), Rules: d.rules("policy "+id, 3)}
	}
	users := map[string]proto.Message{}
	const people = 40
	policyOf := map[int]string{}
	for i := range people {
		u := &userv1.User{Settings: d.settings("user"), Rules: d.rules(fmt.Sprint("user ", i), 3), Devices: []*userv1.Device{{
			Id: fmt.Sprintf("d%d", i), Links: []string{fmt.Sprintf("10.0.1.%d", 100+i), fmt.Sprintf("10.9.1.%d", i)}, Rules: d.rules(fmt.Sprint("device ", i), 2)}}}
		if d.chance(2) {
			u.Devices[0].Settings = d.settings("device")
		}
		if d.chance(3) {
			u.Devices[0].Tags = []string{"device_phone"}
		}
		if d.chance(2) {
			u.Policy = fmt.Sprintf("p%d", d.IntN(3))
			policyOf[i] = u.Policy
		}
		users[fmt.Sprintf("u%d", i)] = u
	}
	var zone []string
	d.some(4, func() {
		zone = append(zone, d.name()+" "+d.pick("CNAME .", "CNAME *.", "CNAME rpz-passthru.", "CNAME rpz-drop.", "CNAME rpz-tcp-only.", "CNAME c.example.", "A 192.0.2.90"))
	})
	zone = append(zone, "32.5.2.0.192.rpz-ip CNAME *.", "32.103.1.0.10.rpz-client-ip CNAME .")

	var mu sync.Mutex
	var logged []resolver.QueryEvent
	sim := newInternet(t, zones{zoneAt("example.", labServer, drawnUpstream), zoneAt("use-application-dns.net.", labServer, "@ A 192.0.2.10\n"), zoneAt("icloud.com.", labServer, "mask A 192.0.2.11\n")})
	asked, decided := 0, map[string]int{}
	withHousehold(t, sim, catalogue, users, d.blobs, func(o *resolver.Options) {
		o.Access = resolver.AccessOptions{Allow: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}}
		o.QueryLog = func(e *resolver.QueryEvent) {
			mu.Lock()
			defer mu.Unlock()
			logged = append(logged, *e)
		}
		if seed%2 == 0 {
			o.PolicyZones = []resolver.PolicyZone{{Name: resolver.Name("\x03rpz\x00"), File: "rpz", Open: func() (io.ReadCloser, error) {
				return io.NopCloser(strings.NewReader(strings.Join(zone, "\n") + "\n")), nil
			}}}
		}
	}, func(h *household) {
		// What has been asked for once costs no time, in which a rate would be earned again or a schedule turn.
		for _, n := range append(drawnNames, "safe.example") {
			for _, typ := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeHTTPS, dns.TypeMX, dns.TypeTXT, dns.TypeANY, dns.TypeCNAME, dns.TypeNS} {
				h.from("10.0.99.1", n+".", typ)
			}
		}
		for range 400 {
			i := d.IntN(people)
			name, typ := d.name(), []uint16{dns.TypeA, dns.TypeA, dns.TypeAAAA, dns.TypeHTTPS, dns.TypeMX, dns.TypeTXT, dns.TypeANY, dns.TypeCNAME, dns.TypeNS}[d.IntN(9)]
			from := fmt.Sprintf("10.0.1.%d", 100+i)
			if d.chance(20) {
				from = fmt.Sprintf("10.9.1.%d", i) // not in access.allow
			}
			what := fmt.Sprintf("seed %d, u%d from %s, %s %s", seed, i, from, name, dns.TypeToString[typ])
			steps, err := h.r.Explain(t.Context(), fmt.Sprintf("u%d", i), wireName(name), typ, netip.MustParseAddr(from))
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			at := time.Now()
			synctest.Wait() // for what is noted of earlier ones behind their answers
			logged = nil
			h.ask(from, name+".", typ)
			if len(logged) != 1 {
				t.Fatalf("%s: %d events: %+v", what, len(logged), logged)
			}
			if logged[0].Type != typ || logged[0].Question().Name != wireName(name) {
				t.Fatalf("%s: an event of another query: %+v", what, logged[0])
			}
			e := logged[0]
			step, verdict, list, line := h.r.Decided(&e)
			if e.RCode == dns.RcodeRefused && verdict == "none" { // by the gate
				step, verdict = "gate", "blocked"
			}
			// What an explanation comes to is its last step that decided.
			var told string
			var last *adminv1.ExplainStep
			for _, s := range steps {
				if s.Verdict != "none" && s.Step != "redirect" && (s.Verdict != "allowed" || !strings.HasPrefix(s.Step, "answer: ")) { // that is about one of many
					last = s
				}
			}
			asked++
			decided[step]++
			served := fmt.Sprintf("%s %s %s %d", step, verdict, list, line)
			if last == nil {
				told = " none  0"
			} else {
				id, at := last.List, last.Line
				s := strings.TrimPrefix(last.Step, "answer: ")
				if s == "access" || s == "rate limit" {
					s = "gate"
				}
				switch s {
				case "list", "threat list", "service":
				default:
					id = "" // the log numbers catalogue lists and services alone
				}
				told = fmt.Sprintf("%s %s %s %d", s, last.Verdict, id, at)
			}
			if told != served {
				var all []string
				for _, s := range steps {
					all = append(all, s.String())
				}
				t.Fatalf("%s: told %q, served %q (%v later)\n%s", what, told, served, time.Since(at), strings.Join(all, "\n"))
			}
			if last != nil && last.Line > 0 {
				key := map[string]string{"list": "list " + last.List, "threat list": "list " + last.List, "service": "list " + last.List,
					"device rule": fmt.Sprint("device ", i), "user rule": fmt.Sprint("user ", i), "policy rule": "policy " + policyOf[i]}[step]
				if step == "important rule" {
					key = map[string]string{"device rules": fmt.Sprint("device ", i), "user rules": fmt.Sprint("user ", i), "policy rules": "policy " + policyOf[i]}[last.List]
				}
				if lines := d.texts[key]; key != "" && (int(last.Line) > len(lines) || lines[last.Line-1] != last.Rule) {
					t.Fatalf("%s: the rule %q is line %d of %s, told; it has %q", what, last.Rule, last.Line, key, lines)
				}
			}
			if d.chance(10) {
				time.Sleep(time.Duration(d.IntN(90)) * time.Second)
			}
		}
	})
	t.Logf("seed %d: %d questions, decided by %v", seed, asked, decided)
	if len(decided) < 10 {
		t.Errorf("seed %d: only %v have decided anything", seed, decided)
	}
}

// ask sends a question over UDP and waits only if there is an answer.
func (h *household) ask(from, name string, typ uint16) {
	conn, err := h.net.DialUDP(netip.AddrPortFrom(netip.MustParseAddr(from), 0), h.addr)
	if err != nil {
		h.t.Fatal(err)
	}
	defer conn.Close()
	m := new(dns.Msg).SetQuestion(name, typ)
	m.SetEdns0(1232, false)
	wire, err := m.Pack()
	if err != nil {
		h.t.Fatal(err)
	}
	if _, err := conn.Write(wire); err != nil {
		h.t.Fatal(err)
	}
	synctest.Wait()
}

func wireName(s string) resolver.Name {
	b := make([]byte, 256)
	n, err := dns.PackDomainName(dns.Fqdn(s), b, 0, nil, false)
	if err != nil {
		panic(err)
	}
	return resolver.Name(b[:n])
}
