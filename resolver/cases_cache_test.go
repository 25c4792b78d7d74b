package resolver_test

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// This file has what clients see of the caches over time: each row a history, with the rule it follows.

// Servers of the zones of these histories: of one that is not signed, of one that is, and of the zone above the
// first.
var (
	plainServer  = netip.MustParseAddr("192.0.2.53")
	signedServer = netip.MustParseAddr("192.0.2.54")
	rootServer   = netip.MustParseAddr("127.53.0.9")
	aboveServer  = netip.MustParseAddr("127.53.1.7")
)

// cacheZones is an Internet that is quick to make: few zones, and keys that sign fast.
func cacheZones() []siminternet.Zone {
	return []siminternet.Zone{
		{Name: ".", NameServers: []siminternet.NameServer{{Name: "a.root.", Addrs: []netip.Addr{rootServer}}}, Algorithm: dns.ECDSAP256SHA256, TTL: 86400},
		{Name: "root.", Servers: []netip.Addr{rootServer}},
		{Name: "lab.", Servers: []netip.Addr{aboveServer}},
		{Name: "example.", Servers: []netip.Addr{netip.MustParseAddr("127.53.1.8")}, Algorithm: dns.ECDSAP256SHA256},
		{Name: "plain.lab.", Servers: []netip.Addr{plainServer}, Records: `
			@        3600 SOA ns1 hostmaster 1 2 3 4 60
			www      3600 A 198.51.100.1
			brief    10   A 198.51.100.2
			once     0    A 198.51.100.3
			eternal  315360000 A 198.51.100.4
			mixed    100  A 198.51.100.5
			warm     100  A 198.51.100.7
			host     3600 AAAA 2001:db8::1
			a.b.ent  300  A 198.51.100.8
			short    10   CNAME target
			target   3600 A 198.51.100.9
		`},
		{Name: "signed.example.", Servers: []netip.Addr{signedServer}, Algorithm: dns.ECDSAP256SHA256, Records: `
			www      3600 A 198.51.100.20
			brief    10   A 198.51.100.21
			bad      3600 A 198.51.100.22
		`, FaultAt: map[string]siminternet.Fault{"bad": siminternet.BadSignature}},
		{Name: "leased.lab.", Servers: []netip.Addr{netip.MustParseAddr("192.0.2.55")}, TTL: 60, Records: `
			www      3600 A 198.51.100.30
		`},
	}
}

// A history is a resolver in an Internet with cacheZones, and a client.
type history struct {
	*lab
	begun time.Time
}

// at waits until so long after the start.
func (h *history) at(d time.Duration) {
	h.t.Helper()
	left := d - time.Since(h.begun)
	if left < 0 {
		h.t.Fatalf("it is past %v", d)
	}
	time.Sleep(left)
	synctest.Wait()
}

// A seen is what a client sees of a response.
type seen struct {
	*dns.Msg
	took time.Duration
	sent int // queries that the servers got meanwhile
}

// get asks over TCP, so that a response may take its time, and without EDNS options but for extended errors.
func (h *history) get(name string, typ uint16, edit func(*dns.Msg)) seen {
	h.t.Helper()
	m := new(dns.Msg)
	m.SetQuestion(name, typ)
	m.SetEdns0(1232, false)
	if edit != nil {
		edit(m)
	}
	h.sim.ResetLog()
	begun := time.Now()
	r, err := h.exchange("tcp", m)
	if err != nil {
		h.t.Fatalf("%s %s: %v", name, dns.TypeToString[typ], err)
	}
	took := time.Since(begun)
	synctest.Wait()
	return seen{r, took, h.sim.Count(nil)}
}

func (s seen) ttl() int {
	if len(s.Answer) == 0 {
		return -1
	}
	return int(s.Answer[0].Header().Ttl)
}

func (s seen) ede() int {
	if o := s.IsEdns0(); o != nil {
		for _, o := range o.Option {
			if e, ok := o.(*dns.EDNS0_EDE); ok {
				return int(e.InfoCode)
			}
		}
	}
	return -1
}

// is complains unless the response is "RCODE" or "RCODE address …", with a TTL within bounds.
func (h *history) is(s seen, want string, least, most int) {
	h.t.Helper()
	got := dns.RcodeToString[s.Rcode]
	for _, rr := range s.Answer {
		switch rr := rr.(type) {
		case *dns.A:
			got += " " + rr.A.String()
		case *dns.AAAA:
			got += " " + rr.AAAA.String()
		}
		if ttl := int(rr.Header().Ttl); ttl < least || ttl > most {
			h.t.Errorf("after %v: a TTL of %d in %v", time.Since(h.begun), ttl, rr)
		}
	}
	if got != want {
		h.t.Errorf("after %v: %s, want %s\n%v", time.Since(h.begun), got, want, s.Msg)
	}
}

func (h *history) silence(on bool, servers ...netip.Addr) {
	for _, s := range servers {
		h.sim.SetBehaviour(s, siminternet.Behaviour{Silent: on})
	}
}

func (h *history) hooked(server netip.Addr, f func(siminternet.Query) *siminternet.Reply) {
	h.sim.SetBehaviour(server, siminternet.Behaviour{Hook: f})
}

const never = 1 << 30

func stale(after time.Duration) func(*resolver.Options) {
	return func(o *resolver.Options) { o.Cache.MaxStale, o.Cache.StaleAfter = 24*time.Hour, after }
}

func TestCacheHistories(t *testing.T) {
	for _, row := range []struct {
		id, rule string
		options  func(*resolver.Options)
		run      func(h *history)
	}{
		{"D01", "a denial lives as long as the lesser of SOA's TTL and MINIMUM (RFC 2308 section 5)", nil, func(h *history) {
			h.is(h.get("nx.plain.lab.", dns.TypeA, nil), "NXDOMAIN", 0, 0)
			h.at(59 * time.Second)
			s := h.get("nx.plain.lab.", dns.TypeA, nil)
			if h.is(s, "NXDOMAIN", 0, 0); s.sent != 0 || len(s.Ns) != 1 || s.Ns[0].Header().Ttl > 2 {
				h.t.Errorf("%d queries, %v", s.sent, s.Ns)
			}
			h.at(61 * time.Second)
			if s := h.get("nx.plain.lab.", dns.TypeA, nil); s.sent == 0 {
				h.t.Error("not asked again")
			}
		}},
		{"D03", "NXDOMAIN is of the name, whatever type was asked for", nil, func(h *history) {
			h.get("nx.plain.lab.", dns.TypeA, nil)
			s := h.get("nx.plain.lab.", dns.TypeMX, nil)
			if h.is(s, "NXDOMAIN", 0, 0); s.sent != 0 {
				h.t.Errorf("%d queries", s.sent)
			}
		}},
		{"D05", "nothing is below a name that is proven not to exist (RFC 8020)", nil, func(h *history) {
			h.get("b.signed.example.", dns.TypeA, nil)
			s := h.get("a.b.signed.example.", dns.TypeA, nil)
			if h.is(s, "NXDOMAIN", 0, 0); s.sent != 0 {
				h.t.Errorf("%d queries", s.sent)
			}
		}},
		{"D06", "an unsigned server that denies an empty non-terminal is not believed about names below", nil, func(h *history) {
			h.hooked(plainServer, func(q siminternet.Query) *siminternet.Reply {
				if name := strings.ToLower(q.Msg.Question[0].Name); name == "ent.plain.lab." || name == "b.ent.plain.lab." {
					m := q.Answer()
					m.Rcode = dns.RcodeNameError
					return &siminternet.Reply{Msg: m}
				}
				return nil
			})
			h.is(h.get("ent.plain.lab.", dns.TypeA, nil), "NXDOMAIN", 0, 0)
			h.is(h.get("a.b.ent.plain.lab.", dns.TypeA, nil), "NOERROR 198.51.100.8", 300, 300)
		}},
		{"D12", "TTLs run down", nil, func(h *history) {
			h.is(h.get("brief.plain.lab.", dns.TypeA, nil), "NOERROR 198.51.100.2", 10, 10)
			h.at(4 * time.Second)
			h.is(h.get("brief.plain.lab.", dns.TypeA, nil), "NOERROR 198.51.100.2", 5, 6)
		}},
		{"D13", "in its last second a TTL is neither 0 nor huge, and then the data is fetched anew", nil, func(h *history) {
			h.get("brief.plain.lab.", dns.TypeA, nil)
			for _, at := range []time.Duration{9100, 9500, 9990} {
				h.at(at * time.Millisecond)
				s := h.get("brief.plain.lab.", dns.TypeA, nil)
				if h.is(s, "NOERROR 198.51.100.2", 0, 1); s.sent != 0 {
					h.t.Errorf("%d queries", s.sent)
				}
			}
			h.at(10100 * time.Millisecond)
			s := h.get("brief.plain.lab.", dns.TypeA, nil)
			if h.is(s, "NOERROR 198.51.100.2", 10, 10); s.sent == 0 {
				h.t.Error("not asked again")
			}
		}},
		{"D14", "a TTL of 0 is for who asked (RFC 2181 section 8)", nil, func(h *history) {
			for range 3 {
				s := h.get("once.plain.lab.", dns.TypeA, nil)
				if h.is(s, "NOERROR 198.51.100.3", 0, 0); s.sent == 0 {
					h.t.Error("not asked again")
				}
			}
		}},
		{"D16", "no TTL is longer than max_ttl", nil, func(h *history) {
			h.is(h.get("eternal.plain.lab.", dns.TypeA, nil), "NOERROR 198.51.100.4", 3600, 86400)
			h.at(25 * time.Hour)
			if s := h.get("eternal.plain.lab.", dns.TypeA, nil); s.sent == 0 {
				h.t.Error("not asked again")
			}
		}},
		{"D16 min", "min_ttl raises, max_ttl and max_negative_ttl lower",
			func(o *resolver.Options) {
				o.Cache.MinTTL, o.Cache.MaxTTL, o.Cache.MaxNegativeTTL = 30*time.Second, 2000*time.Second, 20*time.Second
			},
			func(h *history) {
				h.is(h.get("brief.plain.lab.", dns.TypeA, nil), "NOERROR 198.51.100.2", 30, 30)
				h.is(h.get("www.plain.lab.", dns.TypeA, nil), "NOERROR 198.51.100.1", 2000, 2000)
				h.get("nx.plain.lab.", dns.TypeA, nil)
				h.at(21 * time.Second)
				if s := h.get("brief.plain.lab.", dns.TypeA, nil); s.sent != 0 {
					h.t.Errorf("%d queries", s.sent)
				}
				if s := h.get("nx.plain.lab.", dns.TypeA, nil); s.sent == 0 {
					h.t.Error("the denial lives on")
				}
			}},
		{"D17", "the records of an RRset have one TTL, the least (RFC 2181 section 5.2)", nil, func(h *history) {
			h.hooked(plainServer, func(q siminternet.Query) *siminternet.Reply {
				m := q.Answer()
				if len(m.Answer) == 1 {
					m.Answer = append(m.Answer, mustRR("mixed.plain.lab. 50 A 198.51.100.6"))
				}
				return &siminternet.Reply{Msg: m}
			})
			h.is(h.get("mixed.plain.lab.", dns.TypeA, nil), "NOERROR 198.51.100.5 198.51.100.6", 50, 50)
		}},
		{"D19", "glue does not replace what the zone itself said (RFC 2181 section 5.4.1)", nil, func(h *history) {
			h.is(h.get("host.plain.lab.", dns.TypeAAAA, nil), "NOERROR 2001:db8::1", 3600, 3600)
			h.hooked(plainServer, func(q siminternet.Query) *siminternet.Reply {
				if !dns.IsSubDomain("child.plain.lab.", strings.ToLower(q.Msg.Question[0].Name)) {
					return nil
				}
				m := new(dns.Msg).SetReply(q.Msg)
				for _, text := range []string{"child.plain.lab. 3600 NS host.plain.lab.", "host.plain.lab. 3600 AAAA 2001:db8::bad", "host.plain.lab. 3600 A 192.0.2.99"} {
					rr, _ := dns.NewRR(text)
					if rr.Header().Rrtype == dns.TypeNS {
						m.Ns = append(m.Ns, rr)
					} else {
						m.Extra = append(m.Extra, rr)
					}
				}
				return &siminternet.Reply{Msg: m}
			})
			h.get("www.child.plain.lab.", dns.TypeA, nil) // nobody is at that address
			h.is(h.get("host.plain.lab.", dns.TypeAAAA, nil), "NOERROR 2001:db8::1", 3000, 3600)
		}},
		{"D20", "a failure is remembered, longer each time, and never longer than five minutes (RFC 9520)", nil, func(h *history) {
			h.silence(true, plainServer)
			s := h.get("www.plain.lab.", dns.TypeA, nil)
			if h.is(s, "SERVFAIL", 0, 0); s.sent == 0 || s.took > 8*time.Second {
				h.t.Errorf("%d queries in %v", s.sent, s.took)
			}
			time.Sleep(500 * time.Millisecond)
			s = h.get("www.plain.lab.", dns.TypeA, nil)
			if h.is(s, "SERVFAIL", 0, 0); s.sent != 0 || s.took != 0 || s.ede() != 13 {
				h.t.Errorf("%d queries in %v, EDE %d", s.sent, s.took, s.ede())
			}
			tries := 0
			for range 240 { // of two seconds each, or more where it is tried
				if s := h.get("www.plain.lab.", dns.TypeA, nil); s.sent > 0 {
					tries++
				}
				time.Sleep(2 * time.Second)
			}
			if tries < 5 || tries > 14 {
				h.t.Errorf("tried %d times in eight minutes", tries)
			}
			h.silence(false, plainServer)
			time.Sleep(5 * time.Minute)
			h.is(h.get("www.plain.lab.", dns.TypeA, nil), "NOERROR 198.51.100.1", 3600, 3600)
		}},
		{"D22", "what somebody got with CD=1 is judged for everybody else", nil, func(h *history) {
			for range 3 {
				cd := h.get("bad.signed.example.", dns.TypeA, func(m *dns.Msg) { m.CheckingDisabled = true })
				if h.is(cd, "NOERROR 198.51.100.22", 1, 3600); cd.AuthenticatedData {
					h.t.Errorf("%v", cd.Msg)
				}
				h.is(h.get("bad.signed.example.", dns.TypeA, nil), "SERVFAIL", 0, 0)
			}
		}},
		{"D23", "bogus data is not asked for again within a minute (RFC 4035 section 4.7)", nil, func(h *history) {
			h.is(h.get("bad.signed.example.", dns.TypeA, nil), "SERVFAIL", 0, 0)
			h.at(50 * time.Second)
			s := h.get("bad.signed.example.", dns.TypeA, nil)
			if h.is(s, "SERVFAIL", 0, 0); s.sent != 0 || s.ede() != 6 {
				h.t.Errorf("%d queries, EDE %d", s.sent, s.ede())
			}
			h.at(2 * time.Minute)
			if s := h.get("bad.signed.example.", dns.TypeA, nil); s.sent == 0 {
				h.t.Error("never asked again")
			}
		}},
		{"D24", "what is asked for is fetched anew in its last tenth, behind the answer", nil, func(h *history) {
			for _, at := range []time.Duration{0, 1, 2} {
				h.at(at * time.Second)
				h.get("warm.plain.lab.", dns.TypeA, nil)
			}
			h.at(85 * time.Second)
			if s := h.get("warm.plain.lab.", dns.TypeA, nil); s.sent != 0 {
				h.t.Errorf("%d queries before the last tenth", s.sent)
			}
			h.at(95 * time.Second)
			s := h.get("warm.plain.lab.", dns.TypeA, nil)
			if h.is(s, "NOERROR 198.51.100.7", 4, 6); s.sent != 1 || s.took != 0 {
				h.t.Errorf("%d queries, answered after %v", s.sent, s.took)
			}
			h.at(101 * time.Second)
			s = h.get("warm.plain.lab.", dns.TypeA, nil)
			if h.is(s, "NOERROR 198.51.100.7", 90, 95); s.sent != 0 {
				h.t.Errorf("%d queries", s.sent)
			}
		}},
		{"D24 once", "what is not asked for again is not", nil, func(h *history) {
			h.get("warm.plain.lab.", dns.TypeA, nil)
			h.at(95 * time.Second)
			if s := h.get("warm.plain.lab.", dns.TypeA, nil); s.sent != 0 {
				h.t.Errorf("%d queries", s.sent)
			}
		}},
		{"D24 off", "nor anything without prefetch", func(o *resolver.Options) { o.Cache.NoPrefetch = true }, func(h *history) {
			for range 4 {
				h.get("warm.plain.lab.", dns.TypeA, nil)
			}
			h.at(95 * time.Second)
			if s := h.get("warm.plain.lab.", dns.TypeA, nil); s.sent != 0 {
				h.t.Errorf("%d queries", s.sent)
			}
		}},
		{"D25", "if that fails, what there is lives to its end, and it is tried again a little later", nil, func(h *history) {
			for range 3 {
				h.get("www.plain.lab.", dns.TypeA, nil) // an hour
			}
			h.silence(true, plainServer)
			h.at(3300 * time.Second)
			tried := 0
			for range 20 {
				s := h.get("www.plain.lab.", dns.TypeA, nil)
				if h.is(s, "NOERROR 198.51.100.1", 1, 300); s.took != 0 {
					h.t.Errorf("answered after %v", s.took)
				}
				time.Sleep(5 * time.Second) // the refresh sends for a while
				if h.sim.Count(nil) > 0 {
					tried++
				}
			}
			if tried < 2 || tried > 10 {
				h.t.Errorf("in 100 s queries were sent in %d spans of 5 s", tried)
			}
			s := h.get("www.plain.lab.", dns.TypeA, func(m *dns.Msg) { m.IsEdns0().SetDo() }) // made anew from RRsets
			h.is(s, "NOERROR 198.51.100.1", 1, 300)
			h.silence(false, plainServer)
			time.Sleep(40 * time.Second)
			h.get("www.plain.lab.", dns.TypeA, nil)
			h.is(h.get("www.plain.lab.", dns.TypeA, nil), "NOERROR 198.51.100.1", 3590, 3600)
		}},
		{"D26", "after 1.8 s a client gets what was true a while ago (RFC 8767), then at once, until servers answer", stale(1800 * time.Millisecond), func(h *history) {
			for _, name := range []string{"brief.plain.lab.", "brief.signed.example."} {
				h.get(name, dns.TypeA, nil)
			}
			h.get("nx.plain.lab.", dns.TypeA, nil)
			h.silence(true, h.sim.Addrs()...)
			h.at(2 * time.Hour)
			s := h.get("brief.plain.lab.", dns.TypeA, nil)
			if h.is(s, "NOERROR 198.51.100.2", 1, 30); s.ede() != 3 || s.took != 1800*time.Millisecond {
				h.t.Errorf("EDE %d after %v", s.ede(), s.took)
			}
			for range 4 { // while resolution goes on, and after it has failed
				s = h.get("brief.plain.lab.", dns.TypeA, nil)
				if h.is(s, "NOERROR 198.51.100.2", 1, 30); s.ede() != 3 || s.took != 0 {
					h.t.Errorf("EDE %d after %v", s.ede(), s.took)
				}
				time.Sleep(7 * time.Second)
			}
			h.sim.ResetLog()
			s = h.get("brief.plain.lab.", dns.TypeA, func(m *dns.Msg) { m.IsEdns0().SetDo() })
			if h.is(s, "NOERROR 198.51.100.2", 1, 30); s.sent != 0 || s.took != 0 {
				h.t.Errorf("servers that are left alone got %d queries; %v", s.sent, s.took)
			}
			s = h.get("brief.signed.example.", dns.TypeA, func(m *dns.Msg) { m.AuthenticatedData = true })
			if h.is(s, "NOERROR 198.51.100.21", 1, 30); s.ede() != 3 || s.AuthenticatedData {
				h.t.Errorf("EDE %d, AD %v", s.ede(), s.AuthenticatedData)
			}
			s = h.get("nx.plain.lab.", dns.TypeA, nil)
			if h.is(s, "NXDOMAIN", 0, 0); s.ede() != 19 || len(s.Ns) != 1 || s.Ns[0].Header().Ttl > 30 {
				h.t.Errorf("EDE %d, %v", s.ede(), s.Ns)
			}
			time.Sleep(10 * time.Second)
			h.silence(false, h.sim.Addrs()...)
			time.Sleep(5 * time.Minute)
			for _, do := range []bool{false, true} {
				s = h.get("brief.plain.lab.", dns.TypeA, func(m *dns.Msg) { m.IsEdns0().SetDo(do) })
				if h.is(s, "NOERROR 198.51.100.2", 10, 10); s.ede() != -1 {
					h.t.Errorf("EDE %d though servers answer", s.ede())
				}
			}
			h.silence(true, h.sim.Addrs()...)
			time.Sleep(25 * time.Hour)
			h.is(h.get("brief.plain.lab.", dns.TypeA, nil), "SERVFAIL", 0, 0)
		}},
		{"D26 slow", "a resolution that takes longer than the client waits is kept for the next", stale(1800 * time.Millisecond), func(h *history) {
			h.get("brief.plain.lab.", dns.TypeA, nil)
			h.sim.SetBehaviour(plainServer, siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
				m := q.Answer()
				for _, rr := range m.Answer {
					if a, ok := rr.(*dns.A); ok {
						a.A[len(a.A)-1] = 222
					}
				}
				return &siminternet.Reply{Msg: m, Delay: 1200 * time.Millisecond}
			}})
			// The server's first answers come too late for who asks first, if at all.
			h.at(time.Minute)
			begun := time.Now()
			for time.Since(begun) < 10*time.Second {
				s := h.get("brief.plain.lab.", dns.TypeA, nil)
				if s.took > 1800*time.Millisecond {
					h.t.Errorf("waited %v", s.took)
				}
				if strings.HasSuffix(s.Answer[0].String(), ".222") {
					if s.ede() != -1 {
						h.t.Errorf("fresh data with EDE %d", s.ede())
					}
					return
				}
				h.is(s, "NOERROR 198.51.100.2", 1, 30)
				time.Sleep(200 * time.Millisecond)
			}
			h.t.Error("what came late was not kept")
		}},
		{"D26 now", "with a client timeout of 0 stale data is given at once and fetched anew behind it", stale(0), func(h *history) {
			h.get("brief.plain.lab.", dns.TypeA, nil)
			h.at(time.Minute)
			s := h.get("brief.plain.lab.", dns.TypeA, nil)
			if h.is(s, "NOERROR 198.51.100.2", 1, 30); s.took != 0 || s.ede() != 3 {
				h.t.Errorf("EDE %d after %v", s.ede(), s.took)
			}
			time.Sleep(time.Second)
			s = h.get("brief.plain.lab.", dns.TypeA, nil)
			if h.is(s, "NOERROR 198.51.100.2", 9, 10); s.sent != 0 || s.ede() != -1 {
				h.t.Errorf("%d queries, EDE %d", s.sent, s.ede())
			}
		}},
		{"D26 off", "without max_stale there is none", nil, func(h *history) {
			h.get("brief.plain.lab.", dns.TypeA, nil)
			h.silence(true, plainServer)
			h.at(time.Minute)
			h.is(h.get("brief.plain.lab.", dns.TypeA, nil), "SERVFAIL", 0, 0)
		}},
		{"D26 ttl", "answer_ttl is what it is given with", func(o *resolver.Options) {
			stale(1800 * time.Millisecond)(o)
			o.Cache.StaleTTL = 7 * time.Second
		}, func(h *history) {
			h.get("brief.plain.lab.", dns.TypeA, nil)
			h.silence(true, plainServer)
			h.at(time.Minute)
			s := h.get("brief.plain.lab.", dns.TypeA, nil)
			h.is(s, "NOERROR 198.51.100.2", 7, 7)
			time.Sleep(9 * time.Second) // resolution has failed meanwhile
			s = h.get("brief.plain.lab.", dns.TypeA, nil)
			if h.is(s, "NOERROR 198.51.100.2", 1, 7); s.took != 0 || s.sent != 0 {
				h.t.Errorf("%v, %d queries", s.took, s.sent)
			}
		}},
		{"D26 alias", "an alias that ended leads to a target that did not", stale(1800 * time.Millisecond), func(h *history) {
			h.get("short.plain.lab.", dns.TypeA, nil)
			h.silence(true, plainServer)
			h.at(time.Minute)
			s := h.get("short.plain.lab.", dns.TypeA, nil)
			if h.is(s, "NOERROR 198.51.100.9", 1, 3600); s.ede() != 3 || s.ttl() > 30 {
				h.t.Errorf("EDE %d, TTL %d", s.ede(), s.ttl())
			}
		}},
		{"D28", "stale data that was good, or nothing, but never the fresh data that is bogus", stale(1800 * time.Millisecond), func(h *history) {
			h.get("brief.signed.example.", dns.TypeA, nil)
			h.hooked(signedServer, func(q siminternet.Query) *siminternet.Reply {
				m := q.Answer()
				for _, rr := range m.Answer {
					if a, ok := rr.(*dns.A); ok {
						a.A[len(a.A)-1] = 66
					}
				}
				return &siminternet.Reply{Msg: m}
			})
			h.at(time.Minute)
			for range 10 {
				s := h.get("brief.signed.example.", dns.TypeA, nil)
				switch {
				case s.Rcode == dns.RcodeServerFailure && len(s.Answer) == 0:
				case s.Rcode == dns.RcodeSuccess && s.ede() == 3 && !s.AuthenticatedData:
					h.is(s, "NOERROR 198.51.100.21", 1, 30)
				default:
					h.t.Errorf("%v", s.Msg)
				}
				time.Sleep(7 * time.Second)
			}
		}},
		{"D30", "signatures that have ended make nothing Secure, fresh or stale", func(o *resolver.Options) {
			stale(1800 * time.Millisecond)(o)
			o.DNSSEC.Skew = time.Minute
		}, func(h *history) {
			s := h.get("www.signed.example.", dns.TypeA, func(m *dns.Msg) { m.AuthenticatedData = true })
			if h.is(s, "NOERROR 198.51.100.20", 1, 3600); !s.AuthenticatedData {
				h.t.Fatalf("not Secure to begin with: %v", s.Msg)
			}
			for range 8 {
				time.Sleep(10 * time.Minute)
				s := h.get("www.signed.example.", dns.TypeA, func(m *dns.Msg) { m.AuthenticatedData = true })
				over := time.Since(h.begun) > 32*time.Minute
				if over && s.AuthenticatedData {
					h.t.Errorf("AD after %v: %v", time.Since(h.begun), s.Msg)
				}
				if over && s.Rcode != dns.RcodeServerFailure && s.ede() != 3 {
					h.t.Errorf("after %v: %v", time.Since(h.begun), s.Msg)
				}
			}
		}},
		{"D32", "the second client is told the TTL that the first was, though the parent's grant is shorter, and for no longer than that", nil, func(h *history) {
			h.is(h.get("www.leased.lab.", dns.TypeA, nil), "NOERROR 198.51.100.30", 3600, 3600)
			time.Sleep(20 * time.Second)
			s := h.get("www.leased.lab.", dns.TypeA, nil)
			if h.is(s, "NOERROR 198.51.100.30", 3580, 3580); s.sent > 0 {
				h.t.Errorf("asked again while it was cached")
			}
			time.Sleep(41 * time.Second)
			if s := h.get("www.leased.lab.", dns.TypeA, nil); s.sent == 0 {
				h.t.Errorf("not asked again though the grant has ended: %v", s.Msg)
			}
		}},
		{"D32", "a TTL never rises while the data is the same fetch", nil, func(h *history) {
			last, fetched := never, 0
			for i := range 100 {
				s := h.get("www.leased.lab.", dns.TypeA, func(m *dns.Msg) { m.IsEdns0().SetDo(i%3 == 1) })
				if s.sent > 0 {
					last, fetched = never, fetched+1
				}
				if h.is(s, "NOERROR 198.51.100.30", 1, 3600); s.ttl() > last {
					h.t.Errorf("after %v: TTL %d after %d", time.Since(h.begun), s.ttl(), last)
				}
				if last = s.ttl(); s.sent > 0 {
					last = never // fetched anew, maybe behind the answer
				}
				time.Sleep(1700 * time.Millisecond)
			}
			if fetched < 3 { // the parent's grant is of a minute
				h.t.Errorf("fetched %d times in 170 s", fetched)
			}
		}},
	} {
		t.Run(strings.ReplaceAll(row.id, " ", "-"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				signed := clock.Wall()
				if row.id == "D30" {
					signed = signed.Add(30*time.Minute - 60*24*time.Hour) // signatures are good for 60 days
				}
				sim, err := siminternet.New(signed, cacheZones()...)
				if err != nil {
					t.Fatal(err)
				}
				h := &history{newLabIn(t, sim, row.options), time.Now()}
				defer h.stop()
				row.run(h)
				if t.Failed() {
					t.Log(row.rule)
				}
			})
		})
	}
}

// A domain that its parent has taken away is gone once the parent's last grant ends, whatever its own servers
// say to be kept alive (ghost domains, CVE-2012-1033, CVE-2022-30698; phoenix domains, CVE-2022-30699 and their
// like).
func TestDomainsTakenAway(t *testing.T) {
	const granted = 60 * time.Second
	evil := netip.MustParseAddr("192.0.2.66")
	for name, c := range map[string]struct {
		// asked for every ten seconds while the grant lasts, so that the domain's servers can say something.
		asked map[string]uint16
		// said by its servers in place of the truth.
		says func(q siminternet.Query, m *dns.Msg) bool
		// gone must no longer resolve.
		gone string
	}{
		"ghost: its own NS set, with a long TTL and new names": {
			map[string]uint16{"ghost.lab.": dns.TypeNS, "www.ghost.lab.": dns.TypeA},
			func(q siminternet.Query, m *dns.Msg) bool {
				*m = *q.Answer()
				m.Ns = append(m.Ns, mustRR("ghost.lab. 86400 NS ns%d.ghost.lab.", time.Now().Second()))
				m.Extra = append(m.Extra, mustRR("ns%d.ghost.lab. 86400 A %v", time.Now().Second(), evil))
				return true
			}, "new.ghost.lab.",
		},
		"its servers' addresses, with a long TTL": {
			map[string]uint16{"ns1.ghost.lab.": dns.TypeA, "www.ghost.lab.": dns.TypeA}, nil, "new.ghost.lab.",
		},
		"phoenix: a zone below, granted by itself": {
			map[string]uint16{"www.sub.ghost.lab.": dns.TypeA},
			func(q siminternet.Query, m *dns.Msg) bool {
				if !dns.IsSubDomain("sub.ghost.lab.", strings.ToLower(q.Msg.Question[0].Name)) || strings.HasPrefix(strings.ToLower(q.Msg.Question[0].Name), "www.") && q.Msg.Question[0].Qtype == dns.TypeA && m == nil {
					return false
				}
				if strings.ToLower(q.Msg.Question[0].Name) == "www.sub.ghost.lab." && time.Now().Second()%2 == 0 {
					m.Authoritative = true
					m.Answer = append(m.Answer, mustRR("www.sub.ghost.lab. 86400 A 198.51.100.66"))
					return true
				}
				m.Ns = append(m.Ns, mustRR("sub.ghost.lab. 86400 NS ns.sub.ghost.lab."))
				m.Extra = append(m.Extra, mustRR("ns.sub.ghost.lab. 86400 A %v", evil))
				return true
			}, "new.sub.ghost.lab.",
		},
		"phoenix: a referral to itself": {
			map[string]uint16{"www.ghost.lab.": dns.TypeA},
			func(q siminternet.Query, m *dns.Msg) bool {
				m.Ns = append(m.Ns, mustRR("ghost.lab. 86400 NS ns1.ghost.lab."))
				m.Extra = append(m.Extra, mustRR("ns1.ghost.lab. 86400 A %v", evil))
				return time.Now().Second()%20 != 0
			}, "new.ghost.lab.",
		},
	} {
		t.Run(strings.SplitN(name, ":", 2)[0], func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				zones := append(cacheZones(), siminternet.Zone{Name: "ghost.lab.", Servers: []netip.Addr{evil}, TTL: 86400, Records: `
					www 86400 A 198.51.100.66
					*   86400 A 198.51.100.67
				`})
				sim, err := siminternet.New(clock.Wall(), zones...)
				if err != nil {
					t.Fatal(err)
				}
				var taken atomic.Bool
				sim.SetBehaviour(aboveServer, siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
					if !dns.IsSubDomain("ghost.lab.", strings.ToLower(q.Msg.Question[0].Name)) {
						return nil
					}
					m := q.Answer()
					if taken.Load() {
						m.Authoritative, m.Rcode, m.Answer, m.Extra = true, dns.RcodeNameError, nil, nil
						m.Ns = []dns.RR{mustRR("lab. 300 SOA a.nic.lab. hostmaster.lab. 1 2 3 4 300")}
					}
					for _, rr := range m.Ns {
						rr.Header().Ttl = uint32(granted / time.Second)
					}
					return &siminternet.Reply{Msg: m}
				}})
				sim.SetBehaviour(evil, siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
					m := new(dns.Msg).SetReply(q.Msg)
					if c.says == nil || !c.says(q, m) {
						return nil
					}
					return &siminternet.Reply{Msg: m}
				}})
				h := &history{newLabIn(t, sim, func(o *resolver.Options) { stale(1800 * time.Millisecond)(o) }), time.Now()}
				defer h.stop()
				for name, typ := range c.asked {
					h.get(name, typ, nil)
				}
				taken.Store(true)
				for time.Since(h.begun) < granted-time.Second {
					for name, typ := range c.asked {
						h.get(name, typ, nil)
					}
					time.Sleep(9 * time.Second)
				}
				// A grant fetched anew by who was under way is none. Clients were told the zone's own TTLs, as any
				// resolver tells them; what must end with the grant is what is kept here.
				h.at(granted + 11*time.Second)
				for name, typ := range c.asked {
					if s := h.get(name, typ, nil); s.Rcode != dns.RcodeNameError {
						t.Errorf("%s lives: %v", name, s.Msg)
					}
				}
				if s := h.get(c.gone, dns.TypeA, nil); s.Rcode != dns.RcodeNameError {
					t.Errorf("%s lives: %v", c.gone, s.Msg)
				}
			})
		})
	}
}

func mustRR(format string, args ...any) dns.RR {
	rr, err := dns.NewRR(fmt.Sprintf(format, args...))
	if err != nil {
		panic(err)
	}
	return rr
}

// What the caches hold outlives the process: nothing has to be asked again that has not ended, all is judged
// anew, and a file that cannot be used is one line in the log.
func TestCacheOutlivesTheProcess(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "rrsets.cache")
	var log strings.Builder
	serve := func(t *testing.T, edit func(*resolver.Options), f func(h *history)) {
		log.Reset()
		synctest.Test(t, func(t *testing.T) {
			sim, err := siminternet.New(clock.Wall(), cacheZones()...)
			if err != nil {
				t.Fatal(err)
			}
			h := &history{newLabIn(t, sim, func(o *resolver.Options) {
				o.Cache.File, o.Logger = file, slog.New(slog.NewTextHandler(&log, nil))
				if edit != nil {
					edit(o)
				}
			}), time.Now()}
			synctest.Wait()
			f(h)
			h.stop()
		})
	}
	first := func(h *history) {
		for _, name := range []string{"www.plain.lab.", "www.signed.example.", "brief.plain.lab."} {
			h.get(name, dns.TypeA, nil)
		}
		time.Sleep(2 * time.Minute)
	}
	known := func(want bool) func(h *history) {
		return func(h *history) {
			h.t.Helper()
			s := h.get("www.plain.lab.", dns.TypeA, nil)
			if h.is(s, "NOERROR 198.51.100.1", 2900, 3600); (s.sent == 0) != want {
				h.t.Errorf("known: %v; %d queries: %v. %s", want, s.sent, h.sim.Log(), log.String())
			}
		}
	}
	serve(t, nil, first)
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) != 1 {
		t.Errorf("files: %v", left)
	}

	// Bubbles begin at the same date: the second process starts when the first did, and the file is from two
	// minutes later.
	serve(t, nil, known(false))
	if n := strings.Count(log.String(), "level=WARN"); n != 1 || !strings.Contains(log.String(), "in the future") {
		t.Errorf("%d warnings: %s", n, log.String())
	}
	for what, c := range map[string]struct {
		file  []byte
		wait  time.Duration
		edit  func(*resolver.Options)
		known bool
		warns int
	}{
		"whole":         {good, 2 * time.Minute, nil, true, 0},
		"empty":         {nil, 2 * time.Minute, nil, false, 1},
		"cut short":     {good[:len(good)-9], 2 * time.Minute, nil, false, 1},
		"a bit changed": {append(append([]byte{}, good[:len(good)/2]...), append([]byte{good[len(good)/2] ^ 1}, good[len(good)/2+1:]...)...), 2 * time.Minute, nil, false, 1},
		"another file":  {[]byte("root:x:0:0:root:/root:/bin/sh\n and much more text than a head is long, so that it is no short read"), 2 * time.Minute, nil, false, 1},
		"too old":       {good, 25 * time.Hour, nil, false, 1},
		"other zones": {good, 2 * time.Minute, func(o *resolver.Options) {
			name, _ := resolver.ParseName("corp.example.")
			o.Recursion.Zones = []resolver.Zone{{Name: name, Servers: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.9:53")}}}
		}, false, 0},
	} {
		t.Run(strings.ReplaceAll(what, " ", "-"), func(t *testing.T) {
			if err := os.WriteFile(file, c.file, 0o600); err != nil {
				t.Fatal(err)
			}
			log.Reset()
			synctest.Test(t, func(t *testing.T) {
				time.Sleep(c.wait)
				sim, err := siminternet.New(clock.Wall(), cacheZones()...)
				if err != nil {
					t.Fatal(err)
				}
				h := &history{newLabIn(t, sim, func(o *resolver.Options) {
					o.Cache.File, o.Logger = file, slog.New(slog.NewTextHandler(&log, nil))
					if c.edit != nil {
						c.edit(o)
					}
				}), time.Now()}
				defer h.stop()
				synctest.Wait()
				known(c.known)(h)
				s := h.get("www.signed.example.", dns.TypeA, func(m *dns.Msg) { m.AuthenticatedData = true })
				if h.is(s, "NOERROR 198.51.100.20", 2900, 3600); !s.AuthenticatedData || c.known && s.sent != 0 {
					t.Errorf("AD %v, %d queries", s.AuthenticatedData, s.sent)
				}
			})
			if n := strings.Count(log.String(), "level=WARN"); n != c.warns {
				t.Errorf("%d warnings, want %d: %s", n, c.warns, log.String())
			}
		})
	}
}

// A purge holds across a crash: soon the file no longer has what was purged.
func TestPurgeOutlivesTheProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "rrsets.cache")
		sim, err := siminternet.New(clock.Wall(), cacheZones()...)
		if err != nil {
			t.Fatal(err)
		}
		h := &history{newLabIn(t, sim, func(o *resolver.Options) { o.Cache.File = file }), time.Now()}
		defer h.stop()
		kept := func() (purged, other bool) {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			return strings.Contains(string(b), "\x03www\x05plain"), strings.Contains(string(b), "\x03www\x06signed")
		}
		h.get("www.plain.lab.", dns.TypeA, nil)
		h.get("www.signed.example.", dns.TypeA, nil)
		h.at(31 * time.Minute)
		if purged, other := kept(); !purged || !other {
			t.Fatalf("kept after half an hour: %v, %v", purged, other)
		}
		name, _ := resolver.ParseName("www.plain.lab.")
		h.r.Purge(name)
		h.at(37 * time.Minute)
		if purged, other := kept(); purged || !other {
			t.Errorf("kept after the purge: what was purged %v, another name %v", purged, other)
		}
	})
}
