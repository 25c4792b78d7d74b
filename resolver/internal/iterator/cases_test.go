package iterator

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

const (
	labServer     = "127.53.1.7" // serves lab., the parent of most zones below
	exampleServer = "127.53.1.5" // serves example.
)

// A known case of iteration (A), of transport and EDNS (B) or of aliases (C). What other tests of this package look
// at more closely has its row here too, so that the list is complete.
type knownCase struct {
	id, what string
	zones    zones
	options  func(*Options)
	slow     time.Duration // may take so long; zero means 2 s
	do       func(t *testing.T, r *rig)
}

// www wants the address of www in a zone, of which every server has the same.
func www(zone string) func(*testing.T, *rig) {
	return func(_ *testing.T, r *rig) { r.want("www."+zone, typeA, "NOERROR", "www."+zone+" A 198.51.100.1") }
}

// on answers what is asked of a server by a table of "name. TYPE" to a response.
func (r *rig) on(server string, f func(q siminternet.Query, asked string) *siminternet.Reply) {
	r.hook(server, func(q siminternet.Query) *siminternet.Reply { return f(q, asked(q)) })
}

// single is a zone of one server.
func single(records string) zones {
	return zones{{Name: "leaf.lab.", Servers: servers(s1), Records: "www A 198.51.100.1\n" + records}}
}

func two(records string) zones { return zones{leafZone("leaf.lab.", records)} }

// refers makes the parent refer to leaf.lab. with these records.
func (r *rig) refers(authority, additional string) {
	r.on(labServer, func(q siminternet.Query, asked string) *siminternet.Reply {
		if strings.HasSuffix(strings.Fields(asked)[0], "leaf.lab.") {
			return say(q, false, 0, "", authority, additional)
		}
		return nil
	})
}

func TestKnownCases(t *testing.T) {
	leaf := www("leaf.lab.")
	cases := []knownCase{
		{id: "A03", what: "two zones whose servers are in each other", zones: zones{
			{Name: "ca.lab.", NameServers: []siminternet.NameServer{{Name: "ns.cb.lab.", Addrs: servers(s1)}}, NoSiblingGlue: true},
			{Name: "cb.lab.", NameServers: []siminternet.NameServer{{Name: "ns.ca.lab.", Addrs: servers(s2)}}, NoSiblingGlue: true},
		}, do: func(t *testing.T, r *rig) {
			if f := r.fails("www.ca.lab.", typeA, ""); f.Code != edeNoReachable {
				t.Errorf("EDE %d", f.Code)
			}
			n := r.sent(nil)
			time.Sleep(29 * time.Second)
			if f := r.fails("www.ca.lab.", typeA, ""); f.Code != edeCachedError || r.sent(nil) != n {
				t.Errorf("29 s later: EDE %d and %d more questions", f.Code, r.sent(nil)-n)
			}
		}},
		{id: "A06", what: "a name server whose name does not exist", zones: single(""), do: func(t *testing.T, r *rig) {
			r.refers("leaf.lab. NS ns.nonexist-tld.", "")
			r.fails("www.leaf.lab.", typeA, "no server to ask")
		}},
		{id: "A07", what: "one server REFUSED", zones: two(""), do: func(t *testing.T, r *rig) {
			r.behave(s1, siminternet.Behaviour{Lame: siminternet.LameRefused})
			leaf(t, r)
		}},
		{id: "A09", what: "one server is a resolver with another answer", zones: two(""), do: func(t *testing.T, r *rig) {
			r.on(s1, func(q siminternet.Query, asked string) *siminternet.Reply {
				m := say(q, false, 0, strings.Fields(asked)[0]+" A 203.0.113.66", "", "")
				m.Msg.RecursionAvailable = true
				return m
			})
			for i := range 8 { // whichever is asked first
				r.forget()
				if leaf(t, r); t.Failed() {
					t.Fatal(i)
				}
			}
		}},
		{id: "A11", what: "NODATA without SOA, with authority", zones: two(""), do: func(t *testing.T, r *rig) {
			for _, s := range []string{s1, s2} {
				r.on(s, func(q siminternet.Query, asked string) *siminternet.Reply { return say(q, true, 0, "", "", "") })
			}
			r.want("x.leaf.lab.", typeTXT, "NOERROR")
			n := r.sent(nil)
			if r.want("x.leaf.lab.", typeTXT, "NOERROR"); r.sent(nil) != n {
				t.Error("asked again at once")
			}
			time.Sleep(30 * time.Second)
			if r.want("x.leaf.lab.", typeTXT, "NOERROR"); r.sent(nil) == n {
				t.Error("not asked again after 30 s")
			}
		}},
		{id: "A12", what: "one server says nothing of a name that exists", zones: two(""), do: func(t *testing.T, r *rig) {
			r.on(s1, func(q siminternet.Query, asked string) *siminternet.Reply { return say(q, true, 0, "", "", "") })
			for range 8 {
				r.forget()
				leaf(t, r)
			}
		}},
		{id: "A13", what: "upward referral for one type", zones: two(""), do: func(t *testing.T, r *rig) {
			for _, s := range []string{s1, s2} {
				r.on(s, func(q siminternet.Query, asked string) *siminternet.Reply {
					if strings.HasSuffix(asked, " AAAA") {
						return say(q, false, 0, "", ". NS a.root-servers.net.", "")
					}
					return nil
				})
			}
			r.fails("www.leaf.lab.", typeAAAA, "referral upwards")
			leaf(t, r)
		}},
		{id: "A15", what: "AA in a referral", zones: two(""), do: func(t *testing.T, r *rig) {
			r.on(labServer, func(q siminternet.Query, _ string) *siminternet.Reply {
				m := q.Answer()
				m.Authoritative = true
				return &siminternet.Reply{Msg: m}
			})
			leaf(t, r)
		}},
		{id: "A16", what: "NODATA with the zone's own NS on the way down", zones: two("api A 198.51.100.7\na.api A 198.51.100.8"), do: func(t *testing.T, r *rig) {
			for _, s := range []string{s1, s2} {
				r.on(s, func(q siminternet.Query, asked string) *siminternet.Reply {
					if asked == "api.leaf.lab. A" {
						return say(q, true, 0, "", "leaf.lab. NS ns1.leaf.lab.", "ns1.leaf.lab. A "+s1)
					}
					return nil
				})
			}
			r.want("a.api.leaf.lab.", typeA, "NOERROR", "a.api.leaf.lab. A 198.51.100.8")
		}},
		{id: "A17", what: "upward referral", zones: two(""), do: func(t *testing.T, r *rig) {
			r.on(s1, func(q siminternet.Query, _ string) *siminternet.Reply {
				return say(q, false, 0, "", "lab. NS ns.evil.lab.", "ns.evil.lab. A "+attacker)
			})
			for range 8 {
				r.forget()
				leaf(t, r)
				r.want("nx.lab.", typeA, "NXDOMAIN") // lab. is still where it was
			}
			if n := r.sent(to(ip(attacker))); n > 0 {
				t.Errorf("%d questions to the attacker", n)
			}
		}},
		{id: "A18", what: "NS of a sibling in an answer", zones: append(two(""), siminternet.Zone{Name: "other.lab.", Servers: servers(s3), Records: "www A 198.51.100.1"}), do: func(t *testing.T, r *rig) {
			for _, s := range []string{s1, s2} {
				r.on(s, func(q siminternet.Query, asked string) *siminternet.Reply {
					return say(q, true, 0, strings.Fields(asked)[0]+" A 198.51.100.1", "other.lab. NS ns.evil.lab.", "ns.evil.lab. A "+attacker)
				})
			}
			leaf(t, r)
			www("other.lab.")(t, r)
			if n := r.sent(to(ip(attacker))); n > 0 {
				t.Errorf("%d questions to the attacker", n)
			}
		}},
		{id: "A20", what: "answers from the zone above", zones: zones{leafZone("leaf.lab.", ""), {Name: "sub.leaf.lab.", Servers: servers(s3), Records: "www A 198.51.100.1"}}, do: func(t *testing.T, r *rig) {
			r.on(s3, func(q siminternet.Query, _ string) *siminternet.Reply {
				return say(q, true, 0, "www.leaf.lab. A 203.0.113.66", "leaf.lab. NS ns.evil.lab.", "ns.evil.lab. A "+attacker)
			})
			r.fails("www.sub.leaf.lab.", typeA, "") // nothing of it is in the zone
			leaf(t, r)
		}},
		{id: "A21", what: "glue for a name elsewhere", zones: zones{
			{Name: "other.example.", Servers: servers(s3), Records: "ns A 198.51.100.7"},
			{Name: "leaf.lab.", NameServers: []siminternet.NameServer{{Name: "ns.other.example.", Addrs: servers(s1)}}, Records: "www A 198.51.100.1"},
		}, slow: 9 * time.Second, do: func(t *testing.T, r *rig) {
			r.refers("leaf.lab. NS ns.other.example.", "ns.other.example. A "+attacker)
			r.fails("www.leaf.lab.", typeA, "198.51.100.7") // the true address, where nobody is
			r.want("ns.other.example.", typeA, "NOERROR", "ns.other.example. A 198.51.100.7")
		}},
		{id: "A22", what: "glue answers nobody", zones: zones{{Name: "self.lab.", NameServers: []siminternet.NameServer{{Name: "self.lab.", Addrs: servers(s2)}}, Records: "@ A " + s2 + "\n@ A 198.51.100.8", Algorithm: 13}},
			do: func(t *testing.T, r *rig) {
				r.want("self.lab.", typeTXT, "NOERROR") // now the cache has the glue
				r.want("self.lab.", typeA, "NOERROR", "self.lab. A "+s2, "self.lab. A 198.51.100.8")
				out, err := r.ask(ask("self.lab.", typeA))
				if err != nil || len(out.Answer) != 1 || len(out.Answer[0].Sigs) == 0 {
					t.Errorf("without signature: %+v, %v", out, err)
				}
			}},
		{id: "A24", what: "promiscuous NS beside an answer", zones: two("b A 198.51.100.2"), do: func(t *testing.T, r *rig) {
			for _, s := range []string{s1, s2} {
				r.on(s, func(q siminternet.Query, _ string) *siminternet.Reply {
					m := say(q, true, 0, "", "leaf.lab. NS ns1.leaf.lab.\nlab. NS ns1.leaf.lab.", "ns1.leaf.lab. A "+attacker)
					m.Msg.Answer = q.Answer().Answer
					return m
				})
			}
			leaf(t, r)
			r.want("b.leaf.lab.", typeA, "NOERROR", "b.leaf.lab. A 198.51.100.2")
			if n := r.sent(to(ip(attacker))); n > 0 {
				t.Errorf("%d questions to the attacker", n)
			}
		}},
		{id: "A25", what: "parent and child disagree, the child's server is dead", zones: two("b A 198.51.100.2"), do: func(t *testing.T, r *rig) {
			for _, s := range []string{s1, s2} {
				r.on(s, func(q siminternet.Query, asked string) *siminternet.Reply {
					switch asked {
					case "leaf.lab. NS":
						return say(q, true, 0, "leaf.lab. NS n9.leaf.lab.", "", "n9.leaf.lab. A 198.51.100.9")
					case "n9.leaf.lab. A":
						return say(q, true, 0, "n9.leaf.lab. A 198.51.100.9", "", "")
					}
					return nil
				})
			}
			leaf(t, r)
			r.want("leaf.lab.", dnswire.TypeNS, "NOERROR", "leaf.lab. NS n9.leaf.lab.")
			r.want("n9.leaf.lab.", typeA, "NOERROR", "n9.leaf.lab. A 198.51.100.9")
			r.want("b.leaf.lab.", typeA, "NOERROR", "b.leaf.lab. A 198.51.100.2")
		}},
		{id: "A25b", what: "parent and child disagree on the address of a server elsewhere", zones: zones{
			{Name: "host.example.", NameServers: []siminternet.NameServer{{Name: "ns.host.example.", Addrs: servers(s1)}}, Records: "ns A " + s2},
			{Name: "leaf.lab.", NameServers: []siminternet.NameServer{{Name: "ns.host.example.", Addrs: servers(s1)}}, Records: "www A 198.51.100.1"},
			{Name: "moved.lab.", NameServers: []siminternet.NameServer{{Name: "ns.host.example.", Addrs: servers(s2)}}, Records: "www A 198.51.100.1"},
		}, do: func(t *testing.T, r *rig) {
			r.on(s1, func(q siminternet.Query, asked string) *siminternet.Reply {
				if strings.Contains(asked, "moved") {
					return say(q, false, dns.RcodeRefused, "", "", "")
				}
				return nil
			})
			r.on(s2, func(q siminternet.Query, asked string) *siminternet.Reply {
				if strings.Contains(asked, "moved") {
					return nil
				}
				return say(q, false, dns.RcodeServerFailure, "", "", "")
			})
			r.refersGlue("host.example.", "ns.host.example.", s1)
			leaf(t, r) // by glue, without asking for the address
			if n := r.sent(func(e siminternet.LogEntry) bool {
				return e.Server == ip(s1) && strings.EqualFold(e.Name, "ns.host.example.")
			}); n > 0 {
				t.Errorf("%d questions for an address that glue told:\n%s", n, r.log())
			}
			www("moved.lab.")(t, r) // glue leads nowhere, the zone itself knows better
		}},
		{id: "A27", what: "alias and target in one response", zones: two("b A 198.51.100.6\na CNAME b"), do: func(t *testing.T, r *rig) {
			r.want("a.leaf.lab.", typeA, "NOERROR", "a.leaf.lab. CNAME b.leaf.lab.", "b.leaf.lab. A 198.51.100.6")
		}},
		{id: "A28", what: "one of five servers is not there", zones: zones{{Name: "leaf.lab.", Servers: servers(s1, s2, s3, s4, "192.0.2.5"), Records: "www A 198.51.100.1"}}, do: func(t *testing.T, r *rig) {
			r.behave(s3, siminternet.Behaviour{Silent: true})
			for range 8 {
				r.forget()
				start := now()
				if leaf(t, r); now().Sub(start) > time.Second {
					t.Errorf("took %v", now().Sub(start))
				}
			}
		}},
		{id: "A29", what: "IPv6 alone is known, and does not work", zones: zones{
			{Name: "host.example.", Servers: servers(s3), Records: "ns A " + s1 + "\nns AAAA 2001:db8::1"},
			{Name: "leaf.lab.", NameServers: []siminternet.NameServer{{Name: "ns.host.example.", Addrs: append(servers(s1), ip("2001:db8::1"))}}, Records: "www A 198.51.100.1", NoSiblingGlue: true},
		}, do: func(t *testing.T, r *rig) {
			r.net.Link = func(from, to netip.AddrPort) (time.Duration, bool) { return latency, to.Addr().Is6() }
			r.want("ns.host.example.", typeAAAA, "NOERROR", "ns.host.example. AAAA 2001:db8::1")
			leaf(t, r)
		}},
		{id: "A31", what: "IPv6 glue alone, IPv6 unused", options: func(o *Options) { o.NoIPv6 = true }, zones: zones{
			{Name: "host.lab.", Servers: servers(s3), Records: "ns A " + s1},
			{Name: "leaf.lab.", NameServers: []siminternet.NameServer{{Name: "ns.host.lab.", Addrs: servers(s1)}}, Records: "www A 198.51.100.1"},
		}, do: func(t *testing.T, r *rig) {
			r.refers("leaf.lab. NS ns.host.lab.", "ns.host.lab. AAAA 2001:db8::1")
			leaf(t, r)
		}},
		{id: "A32", what: "addresses of nobody among the glue", zones: two(""), options: func(o *Options) {
			o.DoNotQuery = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/16"), netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("255.255.255.255/32")}
		}, do: func(t *testing.T, r *rig) {
			r.refers("leaf.lab. NS n1.leaf.lab.\nleaf.lab. NS n2.leaf.lab.\nleaf.lab. NS n3.leaf.lab.\nleaf.lab. NS ns1.leaf.lab.",
				"n1.leaf.lab. A 127.0.0.1\nn2.leaf.lab. A 0.0.0.0\nn3.leaf.lab. A 255.255.255.255\nns1.leaf.lab. A "+s1)
			for range 4 {
				r.forget()
				leaf(t, r)
				if n := r.sent(func(e siminternet.LogEntry) bool { return e.Server == ip("127.0.0.1") || e.Server == ip("0.0.0.0") }); n > 0 {
					t.Errorf("%d questions to nobody", n)
				}
			}
		}},
		{id: "A33", what: "no address but those of nobody", zones: append(two(""), siminternet.Zone{Name: "x.lab.", Servers: servers(s3), Records: "www A 198.51.100.1"}), options: func(o *Options) {
			o.DoNotQuery = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("::/128")}
		},
			do: func(t *testing.T, r *rig) {
				www("x.lab.")(t, r)
				r.refers("leaf.lab. NS ns1.leaf.lab.", "ns1.leaf.lab. A 0.0.0.0\nns1.leaf.lab. AAAA ::")
				r.fails("www.leaf.lab.", typeA, "no server to ask")
				n := r.sent(nil)
				if www("x.lab.")(t, r); r.sent(nil) != n {
					t.Error("the cache lost what it had")
				}
			}},
		{id: "A35", what: "a hundred servers in somebody else's zone", zones: zones{leafZone("leaf.lab.", ""), {Name: "victim.example.", Servers: servers(s4)}}, do: func(t *testing.T, r *rig) {
			var ns strings.Builder
			for i := range 100 {
				fmt.Fprintf(&ns, "leaf.lab. NS n%d.victim.example.\n", i)
			}
			r.refers(ns.String(), "")
			r.fails("r1.leaf.lab.", typeA, "")
			if n := r.sent(to(ip(s4))); n > 10 {
				t.Errorf("%d questions to the victim", n)
			}
		}},
		{id: "A38", what: "priming without addresses", zones: two(""), options: func(o *Options) { o.Prime = true }, do: func(t *testing.T, r *rig) {
			r.on("127.53.0.1", func(q siminternet.Query, asked string) *siminternet.Reply {
				if asked == ". NS" {
					m := q.Answer()
					m.Extra = nil
					return &siminternet.Reply{Msg: m}
				}
				return nil
			})
			leaf(t, r)
		}},
		{id: "A43", what: "servers of the parent disagree", zones: zones{
			{Name: "tld2.", Servers: servers(s3, s4), Records: ""},
			{Name: "leaf.tld2.", Servers: servers(s1), Records: "www A 198.51.100.1"},
			{Name: "old.lab.", Servers: servers(s2)},
		}, do: func(t *testing.T, r *rig) {
			r.on(s3, func(q siminternet.Query, asked string) *siminternet.Reply {
				if strings.Contains(asked, "leaf") {
					return say(q, false, 0, "", "leaf.tld2. NS old.leaf.tld2.", "old.leaf.tld2. A "+s2) // where the zone was
				}
				return nil
			})
			r.on(s2, func(q siminternet.Query, asked string) *siminternet.Reply {
				return say(q, true, 0, strings.Fields(asked)[0]+" A 198.51.100.1", "", "")
			})
			for range 8 {
				r.forget()
				www("leaf.tld2.")(t, r)
			}
		}},

		{id: "B01", what: "TC=1, then TCP", zones: single("big TXT \"x\""), do: func(t *testing.T, r *rig) {
			r.behave(s1, siminternet.Behaviour{TruncateUDP: true})
			r.want("big.leaf.lab.", typeTXT, "NOERROR", `big.leaf.lab. TXT "x"`)
		}},
		{id: "B02", what: "a response too large for UDP costs one question over TCP", zones: zones{{Name: "leaf.lab.", Servers: servers(s1), Records: "www A 198.51.100.1", Algorithm: 13}}, do: func(t *testing.T, r *rig) {
			r.behave(s1, siminternet.Behaviour{Padding: 1200})
			if _, err := r.ask(ask("leaf.lab.", dnswire.TypeDNSKEY)); err != nil {
				t.Error(err)
			}
			udp := r.sent(func(e siminternet.LogEntry) bool { return e.Server == ip(s1) && e.Transport == siminternet.UDP })
			tcp := r.sent(func(e siminternet.LogEntry) bool { return e.Server == ip(s1) && e.Transport == siminternet.TCP })
			if udp != 1 || tcp != 1 {
				t.Errorf("%d questions over UDP, %d over TCP:\n%s", udp, tcp, r.log())
			}
		}},
		{id: "B03", what: "TC=1, and no TCP", zones: single(""), slow: 9 * time.Second, do: func(t *testing.T, r *rig) {
			r.behave(s1, siminternet.Behaviour{TruncateUDP: true, ResetTCP: true})
			if f := r.fails("www.leaf.lab.", typeA, "truncated"); f.Code != edeNetwork && f.Code != edeNoReachable {
				t.Errorf("EDE %d", f.Code)
			}
		}},
		{id: "B04", what: "what came over TCP is cached whole", zones: single("big TXT \"x\" \"y\""), do: func(t *testing.T, r *rig) {
			r.behave(s1, siminternet.Behaviour{TruncateUDP: true})
			r.want("big.leaf.lab.", typeTXT, "NOERROR", `big.leaf.lab. TXT "x" "y"`)
			n := r.sent(nil)
			if r.want("big.leaf.lab.", typeTXT, "NOERROR", `big.leaf.lab. TXT "x" "y"`); r.sent(nil) != n {
				t.Error("not from the cache")
			}
		}},
		{id: "B08", what: "NOTIMP or SERVFAIL to EDNS", zones: single(""), do: func(t *testing.T, r *rig) {
			r.behave(s1, siminternet.Behaviour{EDNS: siminternet.EDNSNotImp})
			leaf(t, r)
			r.forget()
			r.on(s1, func(q siminternet.Query, _ string) *siminternet.Reply {
				if q.Msg.IsEdns0() != nil {
					m := say(q, false, dns.RcodeServerFailure, "", "", "")
					m.Msg.Extra = nil
					return m
				}
				return nil
			})
			leaf(t, r)
		}},
		{id: "B10", what: "options are dropped", zones: single(""), do: func(t *testing.T, r *rig) {
			r.behave(s1, siminternet.Behaviour{EDNS: siminternet.EDNSDropsOptions})
			leaf(t, r)
		}},
		{id: "B12", what: "a wrong ID first", zones: single(""), do: func(t *testing.T, r *rig) {
			r.behave(s1, siminternet.Behaviour{Forge: []siminternet.Forgery{siminternet.ForgeWrongID}})
			leaf(t, r)
		}},
		{id: "B13", what: "another question, or no response, first", zones: single(""), do: func(t *testing.T, r *rig) {
			for _, f := range []siminternet.Forgery{siminternet.ForgeWrongQuestion, siminternet.ForgeNoResponse} {
				r.forget()
				r.behave(s1, siminternet.Behaviour{Forge: []siminternet.Forgery{f}})
				leaf(t, r)
			}
		}},
		{id: "B18", what: "NXDOMAIN for an empty non-terminal", zones: two("a.b.ent A 198.51.100.7"), do: func(t *testing.T, r *rig) {
			for _, s := range []string{s1, s2} {
				r.on(s, func(q siminternet.Query, asked string) *siminternet.Reply {
					if asked == "ent.leaf.lab. A" || asked == "b.ent.leaf.lab. A" {
						return say(q, true, dns.RcodeNameError, "", "leaf.lab. SOA a. b. 1 2 3 4 60", "")
					}
					return nil
				})
			}
			r.want("a.b.ent.leaf.lab.", typeA, "NOERROR", "a.b.ent.leaf.lab. A 198.51.100.7")
		}},
		{id: "B20", what: "questions for A on the way are dropped", zones: two("x MX 5 mail\ny.x MX 5 mail"), do: func(t *testing.T, r *rig) {
			for _, s := range []string{s1, s2} {
				r.on(s, func(q siminternet.Query, asked string) *siminternet.Reply {
					if strings.HasSuffix(asked, " A") {
						return &siminternet.Reply{}
					}
					return nil
				})
			}
			r.want("y.x.leaf.lab.", dnswire.TypeMX, "NOERROR", "y.x.leaf.lab. MX 5 mail.leaf.lab.")
			if n := r.sent(func(e siminternet.LogEntry) bool {
				return e.Type == typeA && (e.Server == ip(s1) || e.Server == ip(s2))
			}); n > minimisedTimeouts {
				t.Errorf("%d questions were dropped:\n%s", n, r.log())
			}
		}},
		{id: "B21", what: "many labels", zones: two(strings.Repeat("a.", 24) + "deep A 198.51.100.7"), do: func(t *testing.T, r *rig) {
			r.want(strings.Repeat("a.", 24)+"deep.leaf.lab.", typeA, "NOERROR", strings.Repeat("a.", 24)+"deep.leaf.lab. A 198.51.100.7")
			if n := r.sent(nil); n > maxMinimise+3 {
				t.Errorf("%d questions:\n%s", n, r.log())
			}
		}},
		{id: "B23", what: "NOTIMP to one type", zones: two(""), do: func(t *testing.T, r *rig) {
			for _, s := range []string{s1, s2} {
				r.on(s, func(q siminternet.Query, asked string) *siminternet.Reply {
					if strings.HasSuffix(asked, " HTTPS") {
						return say(q, false, dns.RcodeNotImplemented, "", "", "")
					}
					return nil
				})
			}
			r.fails("www.leaf.lab.", dnswire.TypeHTTPS, "NOTIMP")
			leaf(t, r)
		}},
		{id: "B25", what: "garbage for AAAA from all but one", zones: zones{{Name: "leaf.lab.", Servers: servers(s1, s2, s3), Records: "www A 198.51.100.1"}}, slow: 4 * time.Second, do: func(t *testing.T, r *rig) {
			for _, s := range []string{s1, s2} {
				r.on(s, func(q siminternet.Query, asked string) *siminternet.Reply {
					if strings.HasSuffix(asked, " AAAA") {
						return &siminternet.Reply{Raw: [][]byte{{1, 2, 3}}}
					}
					return nil
				})
			}
			for range 4 {
				r.forget()
				r.want("www.leaf.lab.", typeAAAA, "NOERROR")
			}
		}},

		{id: "C05", what: "aliases in a circle, through two zones", zones: append(two("a CNAME a\nb CNAME c\nc CNAME b.x.lab."), siminternet.Zone{Name: "x.lab.", Servers: servers(s3), Records: "b CNAME b.leaf.lab."}), do: func(t *testing.T, r *rig) {
			r.fails("a.leaf.lab.", typeA, "circle")
			r.fails("b.leaf.lab.", typeA, "circle")
			for _, name := range []string{"b.leaf.lab.", "c.leaf.lab.", "b.x.lab."} {
				if n := r.sent(func(e siminternet.LogEntry) bool { return e.Is(name, typeA) && e.Server != ip(labServer) }); n > 1 {
					t.Errorf("%s was asked for %d times:\n%s", name, n, r.log())
				}
			}
		}},
		{id: "C10", what: "CNAME asked for", zones: two("a CNAME nowhere.x."), do: func(t *testing.T, r *rig) {
			r.want("a.leaf.lab.", dnswire.TypeCNAME, "NOERROR", "a.leaf.lab. CNAME nowhere.x.")
		}},
		{id: "C11", what: "CNAME at an apex", zones: append(two(""), siminternet.Zone{Name: "x.lab.", Servers: servers(s3), Records: "www A 198.51.100.5"}), do: func(t *testing.T, r *rig) {
			for _, s := range []string{s1, s2} {
				r.on(s, func(q siminternet.Query, asked string) *siminternet.Reply {
					if asked == "leaf.lab. A" {
						return say(q, true, 0, "leaf.lab. CNAME www.x.lab.", "", "")
					}
					return nil
				})
			}
			r.want("leaf.lab.", typeA, "NOERROR", "leaf.lab. CNAME www.x.lab.", "www.x.lab. A 198.51.100.5")
			leaf(t, r)
		}},
		{id: "C13", what: "the owner of a DNAME", zones: two("old DNAME new\nold A 198.51.100.3\na.new A 198.51.100.4"), do: func(t *testing.T, r *rig) {
			r.want("old.leaf.lab.", typeA, "NOERROR", "old.leaf.lab. A 198.51.100.3")
			r.want("a.old.leaf.lab.", typeA, "NOERROR", "old.leaf.lab. DNAME new.leaf.lab.", "a.old.leaf.lab. CNAME a.new.leaf.lab.", "a.new.leaf.lab. A 198.51.100.4")
			r.want("old.leaf.lab.", typeTXT, "NOERROR")
			// Another name below comes from the DNAME in the cache.
			n := r.sent(func(e siminternet.LogEntry) bool { return strings.Contains(strings.ToLower(e.Name), "old") })
			r.want("b.old.leaf.lab.", typeA, "NXDOMAIN", "old.leaf.lab. DNAME new.leaf.lab.", "b.old.leaf.lab. CNAME b.new.leaf.lab.")
			if m := r.sent(func(e siminternet.LogEntry) bool { return strings.Contains(strings.ToLower(e.Name), "old") }); m != n {
				t.Errorf("%d questions though the DNAME was known:\n%s", m-n, r.log())
			}
		}},
		{id: "C22", what: "another alias for another type", zones: two("t1 A 198.51.100.3"), do: func(t *testing.T, r *rig) {
			for _, s := range []string{s1, s2} {
				r.on(s, func(q siminternet.Query, asked string) *siminternet.Reply {
					switch asked {
					case "a.leaf.lab. A":
						return say(q, true, 0, "a.leaf.lab. A 198.51.100.2", "", "")
					case "a.leaf.lab. AAAA":
						return say(q, true, 0, "a.leaf.lab. CNAME nx.leaf.lab.", "", "")
					}
					return nil
				})
			}
			r.want("a.leaf.lab.", typeAAAA, "NXDOMAIN", "a.leaf.lab. CNAME nx.leaf.lab.")
			r.forget()
			r.want("a.leaf.lab.", typeA, "NOERROR", "a.leaf.lab. A 198.51.100.2")
			r.want("a.leaf.lab.", typeAAAA, "NXDOMAIN", "a.leaf.lab. CNAME nx.leaf.lab.")
			r.want("a.leaf.lab.", typeA, "NOERROR", "a.leaf.lab. A 198.51.100.2")
		}},
		{id: "C24", what: "a name server whose name is an alias", zones: zones{
			{Name: "host.example.", Servers: servers(s3), Records: "ns CNAME real\nreal A " + s1},
			{Name: "leaf.lab.", Servers: servers(s1), Records: "www A 198.51.100.1"},
		}, do: func(t *testing.T, r *rig) {
			r.refers("leaf.lab. NS ns.host.example.", "")
			leaf(t, r)
		}},
	}
	var ids []string
	for _, c := range cases {
		ids = append(ids, c.id)
		t.Run(c.id, func(t *testing.T) {
			bubble(t, c.zones, c.options, func(r *rig) {
				c.do(t, r)
				if n := 100 - r.tree.Left(); n > 40 {
					t.Errorf("%s: the last question cost %d", c.what, n)
				}
				if r.took > max(c.slow, 2*time.Second) {
					t.Errorf("%s: a question took %v", c.what, r.took)
				}
				if t.Failed() {
					t.Logf("%s: %s", c.id, c.what)
				}
			})
		})
	}
	slices.Sort(ids)
	if len(slices.Compact(slices.Clone(ids))) != len(ids) {
		t.Errorf("an id comes twice: %v", ids)
	}
}

// refersGlue makes sure that the servers above zone name this address for its server.
func (r *rig) refersGlue(zone, server, addr string) {
	r.on(exampleServer, func(q siminternet.Query, asked string) *siminternet.Reply {
		if strings.HasSuffix(strings.Fields(asked)[0], zone) {
			return say(q, false, 0, "", zone+" NS "+server, server+" A "+addr)
		}
		return nil
	})
}
