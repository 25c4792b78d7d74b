package iterator

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

type zones = []siminternet.Zone

func servers(a ...string) (out []netip.Addr) {
	for _, s := range a {
		out = append(out, ip(s))
	}
	return out
}

const (
	typeA    = dnswire.TypeA
	typeAAAA = dnswire.TypeAAAA
	typeTXT  = dnswire.TypeTXT
)

// say makes a response with the sections given in zone-file syntax, one record a line.
func say(q siminternet.Query, aa bool, rcode int, answer, authority, additional string) *siminternet.Reply {
	m := new(dns.Msg).SetRcode(q.Msg, rcode)
	m.Authoritative = aa
	for _, s := range []struct {
		text string
		to   *[]dns.RR
	}{{answer, &m.Answer}, {authority, &m.Ns}, {additional, &m.Extra}} {
		p := dns.NewZoneParser(strings.NewReader(s.text+"\n"), ".", "")
		p.SetDefaultTTL(300)
		for rr, ok := p.Next(); ok; rr, ok = p.Next() {
			*s.to = append(*s.to, rr)
		}
		if p.Err() != nil {
			panic(p.Err())
		}
	}
	if q.Msg.IsEdns0() != nil {
		m.SetEdns0(1232, true)
	}
	return &siminternet.Reply{Msg: m}
}

// hook makes a server answer by f, where f answers at all.
func (r *rig) hook(addr string, f func(q siminternet.Query) *siminternet.Reply) {
	r.SetBehaviour(ip(addr), siminternet.Behaviour{Hook: f})
}

func (r *rig) behave(addr string, b siminternet.Behaviour) { r.SetBehaviour(ip(addr), b) }

// asked is the name and type of a query, as "name. TYPE".
func asked(q siminternet.Query) string {
	return strings.ToLower(q.Msg.Question[0].Name) + " " + dns.Type(q.Msg.Question[0].Qtype).String()
}

// got reads what the cache holds, "" if nothing.
func (r *rig) got(name string, typ uint16) string {
	set, f := r.opts.RRsets.Get(rrcache.Key{Name: dnsname.MustParse(name), Type: typ, Class: 1}, now())
	switch {
	case !f.OK:
		return ""
	case f.Negative.Kind != rrcache.NoKind:
		return "denied"
	}
	return answerText(query.Unvalidated{Answer: []query.RRset{set}})[0]
}

const (
	s1, s2, s3, s4 = "192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4"
	attacker       = "192.0.2.99"
)

// leafZone is a zone of two servers.
func leafZone(name, records string) siminternet.Zone {
	return siminternet.Zone{Name: name, Servers: servers(s1, s2), Records: "www A 198.51.100.1\n" + records}
}

// Servers that do not serve what they should (cases A and B).
func TestLameServers(t *testing.T) {
	www := []string{"NOERROR", "www.leaf.lab. A 198.51.100.1"}
	for _, c := range []struct {
		name string
		s1   siminternet.Behaviour // s2 is good
	}{
		{"A07 refuses", siminternet.Behaviour{Lame: siminternet.LameRefused}},
		{"fails", siminternet.Behaviour{Lame: siminternet.LameServfail}},
		{"A17 refers upwards", siminternet.Behaviour{Lame: siminternet.LameUpward}},
		{"is empty", siminternet.Behaviour{Lame: siminternet.LameEmpty}},
		{"A28 is dead", siminternet.Behaviour{Silent: true}},
		{"loses half", siminternet.Behaviour{Loss: 0.5}},
		{"B08 NOTIMP to EDNS", siminternet.Behaviour{EDNS: siminternet.EDNSNotImp}},
		{"FORMERR to EDNS", siminternet.Behaviour{EDNS: siminternet.EDNSFormErr}},
		{"ignores EDNS", siminternet.Behaviour{EDNS: siminternet.EDNSIgnored}},
		{"FORMERR to options", siminternet.Behaviour{EDNS: siminternet.EDNSBadOptions}},
		{"lower case", siminternet.Behaviour{LowerCase: true}},
		{"B12 wrong ID first", siminternet.Behaviour{Forge: []siminternet.Forgery{siminternet.ForgeWrongID}}},
		{"B13 wrong question first", siminternet.Behaviour{Forge: []siminternet.Forgery{siminternet.ForgeWrongQuestion}}},
		{"garbage first", siminternet.Behaviour{Forge: []siminternet.Forgery{siminternet.ForgeGarbage, siminternet.ForgeNoResponse, siminternet.ForgeShort}}},
		{"B01 truncates", siminternet.Behaviour{TruncateUDP: true}},
		{"B03 truncates, no TCP", siminternet.Behaviour{TruncateUDP: true, ResetTCP: true}},
		{"A12 says nothing", siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
			return say(q, true, 0, "", "", "")
		}}},
		{"A09 answers as a cache", siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
			r := say(q, false, 0, "www.leaf.lab. A 203.0.113.9", "", "")
			r.Msg.RecursionAvailable = true
			return r
		}}},
		{"refers sideways", siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
			return say(q, true, 0, "", "other.lab. NS ns.attacker.lab.", "ns.attacker.lab. A "+attacker)
		}}},
		{"refers to itself", siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
			return say(q, false, 0, "", "leaf.lab. NS ns1.leaf.lab.", "ns1.leaf.lab. A "+s1)
		}}},
		{"refers twice", siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
			return say(q, false, 0, "", "www.leaf.lab. NS ns.attacker.lab.\nleaf.lab. NS x.", "")
		}}},
		{"a SOA of its parent", siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
			return say(q, true, 0, "", "lab. SOA a. b. 1 2 3 4 5", "")
		}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, zones{leafZone("leaf.lab.", "txt TXT x\nother A 198.51.100.2")}, nil, func(r *rig) {
				r.behave(s1, c.s1)
				for range 6 {
					r.forget()
					r.want("www.leaf.lab.", typeA, www...)
					if n := r.sent(nil); n > 14 {
						t.Errorf("%d questions sent:\n%s", n, r.log())
					}
				}
				if g := r.got("other.lab.", dnswire.TypeNS); g != "" {
					t.Errorf("the cache has %s", g)
				}
			})
		})
	}
}

// When the only servers there are have the fault.
func TestAllServersAlike(t *testing.T) {
	for _, c := range []struct {
		name  string
		b     siminternet.Behaviour
		want  []string // nil: failure
		ede   uint16
		sends int // the most
	}{
		{"answer without authority", siminternet.Behaviour{Lame: siminternet.LameUnauthorised}, []string{"NOERROR", "www.leaf.lab. A 198.51.100.1"}, 0, 5},
		{"A11 nothing, with authority", siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply { return say(q, true, 0, "", "", "") }}, []string{"NOERROR"}, 0, 5},
		{"A16 its own NS records", siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
			return say(q, true, 0, "", "leaf.lab. NS ns1.leaf.lab.", "")
		}}, []string{"NOERROR"}, 0, 5},
		{"NXDOMAIN without SOA", siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply { return say(q, true, 3, "", "", "") }}, []string{"NXDOMAIN"}, 0, 5},
		{"nothing, without authority", siminternet.Behaviour{Lame: siminternet.LameEmpty}, nil, edeNoReachable, 6},
		{"REFUSED", siminternet.Behaviour{Lame: siminternet.LameRefused}, nil, edeNoReachable, 8},
		{"SERVFAIL", siminternet.Behaviour{Lame: siminternet.LameServfail}, nil, edeNoReachable, 12},
		{"upward referrals", siminternet.Behaviour{Lame: siminternet.LameUpward}, nil, edeNoReachable, 8},
		{"B03 TC and no TCP", siminternet.Behaviour{TruncateUDP: true, ResetTCP: true}, nil, edeNetwork, 8},
		{"silence", siminternet.Behaviour{Silent: true}, nil, edeNoReachable, 14},
		{"EDNS dropped", siminternet.Behaviour{EDNS: siminternet.EDNSDropped}, []string{"NOERROR", "www.leaf.lab. A 198.51.100.1"}, 0, 9},
		{"B10 options dropped", siminternet.Behaviour{EDNS: siminternet.EDNSDropsOptions}, []string{"NOERROR", "www.leaf.lab. A 198.51.100.1"}, 0, 6},
		{"B15 forged answers first", siminternet.Behaviour{Forge: []siminternet.Forgery{siminternet.ForgeWrongID, siminternet.ForgeWrongCase, siminternet.ForgeWrongQuestion}}, []string{"NOERROR", "www.leaf.lab. A 198.51.100.1"}, 0, 5},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, zones{leafZone("leaf.lab.", "")}, nil, func(r *rig) {
				r.behave(s1, c.b)
				r.behave(s2, c.b)
				if c.want != nil {
					r.want("www.leaf.lab.", typeA, c.want...)
				} else if f := r.fails("www.leaf.lab.", typeA, "leaf.lab."); f.Code != c.ede {
					t.Errorf("EDE %d (%s)", f.Code, f.Text)
				}
				if n := r.sent(nil); n > c.sends {
					t.Errorf("%d questions sent:\n%s", n, r.log())
				}
			})
		})
	}
}

// A13: a server that refers upwards for one type alone; B23: that answers NOTIMP to one type.
func TestFaultOfOneType(t *testing.T) {
	bubble(t, zones{{Name: "leaf.lab.", Servers: servers(s1), Records: "www A 198.51.100.1"}}, nil, func(r *rig) {
		r.hook(s1, func(q siminternet.Query) *siminternet.Reply {
			switch asked(q) {
			case "www.leaf.lab. AAAA":
				return say(q, false, 0, "", ". NS a.root-servers.net.", "")
			case "www.leaf.lab. HTTPS":
				return say(q, true, dns.RcodeNotImplemented, "", "", "")
			}
			return nil
		})
		r.fails("www.leaf.lab.", typeAAAA, "upwards")
		r.want("www.leaf.lab.", typeA, "NOERROR", "www.leaf.lab. A 198.51.100.1")
		r.fails("www.leaf.lab.", dnswire.TypeHTTPS, "NOTIMP")
		r.want("www.leaf.lab.", typeA, "NOERROR", "www.leaf.lab. A 198.51.100.1")
	})
}

// A03, A06, A24 and others: delegations that lead nowhere, or somewhere else.
func TestDelegations(t *testing.T) {
	t.Run("A03 cycle", func(t *testing.T) {
		bubble(t, zones{
			{Name: "ca.lab.", NameServers: []siminternet.NameServer{{Name: "ns.cb.lab.", Addrs: servers(s1)}}, NoSiblingGlue: true},
			{Name: "cb.lab.", NameServers: []siminternet.NameServer{{Name: "ns.ca.lab.", Addrs: servers(s2)}}, NoSiblingGlue: true},
		}, nil, func(r *rig) {
			start := now()
			r.fails("www.ca.lab.", typeA, "no server to ask")
			if n := r.sent(nil); n > 12 || now().Sub(start) > 3*time.Second {
				t.Errorf("%d questions, %v:\n%s", n, now().Sub(start), r.log())
			}
		})
	})
	t.Run("A06 name server's name does not exist", func(t *testing.T) {
		bubble(t, zones{{Name: "foo.lab.", NameServers: []siminternet.NameServer{{Name: "ns.foo.lab.", Addrs: servers(s1)}}}}, nil, func(r *rig) {
			r.hook("127.53.1.7", func(q siminternet.Query) *siminternet.Reply {
				return say(q, false, 0, "", "foo.lab. NS ns.nonexistent-tld.", "")
			})
			r.fails("www.foo.lab.", typeA, "no server to ask")
		})
	})
	t.Run("A15 AA in a referral, A24 promiscuous NS", func(t *testing.T) {
		bubble(t, zones{leafZone("leaf.lab.", "b A 198.51.100.2"), {Name: "x.lab.", Servers: servers(attacker)}}, nil, func(r *rig) {
			r.hook("127.53.1.7", func(q siminternet.Query) *siminternet.Reply {
				m := q.Answer()
				m.Authoritative = true
				return &siminternet.Reply{Msg: m}
			})
			r.hook(s1, func(q siminternet.Query) *siminternet.Reply {
				m := say(q, true, 0, "www.leaf.lab. A 198.51.100.1", "leaf.lab. NS ns1.leaf.lab.\nlab. NS ns1.leaf.lab.", "ns1.leaf.lab. A "+attacker)
				if strings.HasPrefix(asked(q), "b.") {
					m = say(q, true, 0, "b.leaf.lab. A 198.51.100.2", "", "")
				}
				return m
			})
			r.behave(s2, siminternet.Behaviour{Silent: true})
			r.want("www.leaf.lab.", typeA, "NOERROR", "www.leaf.lab. A 198.51.100.1")
			r.want("b.leaf.lab.", typeA, "NOERROR", "b.leaf.lab. A 198.51.100.2")
			if n := r.sent(to(ip(attacker))); n > 0 {
				t.Errorf("%d questions to the attacker", n)
			}
		})
	})
	t.Run("A18 A20 out of bailiwick", func(t *testing.T) {
		bubble(t, zones{{Name: "evil.lab.", Servers: servers(attacker)}, leafZone("leaf.lab.", "")}, nil, func(r *rig) {
			r.hook(attacker, func(q siminternet.Query) *siminternet.Reply {
				return say(q, true, 0, "www.evil.lab. CNAME www.leaf.lab.\nwww.leaf.lab. A 203.0.113.66",
					"leaf.lab. NS ns.evil.lab.", "ns.evil.lab. A "+attacker+"\nwww.leaf.lab. A 203.0.113.66")
			})
			r.want("www.evil.lab.", typeA, "NOERROR", "www.evil.lab. CNAME www.leaf.lab.", "www.leaf.lab. A 198.51.100.1")
		})
	})
	t.Run("A21 A22 glue answers nobody", func(t *testing.T) {
		bubble(t, zones{
			{Name: "other.example.", Servers: servers(s3), Records: "ns A 198.51.100.7"},
			{Name: "leaf.lab.", NameServers: []siminternet.NameServer{{Name: "ns.other.example.", Addrs: servers(s1)}}, Records: "www A 198.51.100.1"},
			{Name: "self.lab.", NameServers: []siminternet.NameServer{{Name: "self.lab.", Addrs: servers(s2)}}, Records: "@ A " + s2 + "\n@ A 198.51.100.8"},
		}, nil, func(r *rig) {
			r.hook("127.53.1.7", func(q siminternet.Query) *siminternet.Reply {
				if strings.HasSuffix(strings.Fields(asked(q))[0], "leaf.lab.") {
					return say(q, false, 0, "", "leaf.lab. NS ns.other.example.", "ns.other.example. A "+attacker)
				}
				return nil
			})
			r.fails("www.leaf.lab.", typeA, "198.51.100.7") // the true address, where nobody is
			r.want("ns.other.example.", typeA, "NOERROR", "ns.other.example. A 198.51.100.7")
			r.want("self.lab.", typeTXT, "NOERROR") // now the cache has the glue
			r.want("self.lab.", typeA, "NOERROR", "self.lab. A "+s2, "self.lab. A 198.51.100.8")
		})
	})
	t.Run("A25 child's servers are dead, parent's are not", func(t *testing.T) {
		bubble(t, zones{leafZone("leaf.lab.", "www2 A 198.51.100.2")}, nil, func(r *rig) {
			for _, s := range []string{s1, s2} {
				r.hook(s, func(q siminternet.Query) *siminternet.Reply {
					switch asked(q) {
					case "leaf.lab. NS":
						return say(q, true, 0, "leaf.lab. NS ns9.leaf.lab.", "", "ns9.leaf.lab. A 198.51.100.9")
					case "ns9.leaf.lab. A":
						return say(q, true, 0, "ns9.leaf.lab. A 198.51.100.9", "", "")
					}
					return nil
				})
			}
			r.want("leaf.lab.", dnswire.TypeNS, "NOERROR", "leaf.lab. NS ns9.leaf.lab.")
			r.want("www2.leaf.lab.", typeA, "NOERROR", "www2.leaf.lab. A 198.51.100.2")
		})
	})
	t.Run("A29 A31 the other family's address", func(t *testing.T) {
		bubble(t, zones{
			{Name: "six.lab.", NameServers: []siminternet.NameServer{{Name: "ns.host.lab.", Addrs: servers("2001:db8::53", s1)}}, Records: "www A 198.51.100.1"},
		}, func(o *Options) { o.NoIPv6 = true }, func(r *rig) {
			r.hook("127.53.1.7", func(q siminternet.Query) *siminternet.Reply {
				if strings.Contains(asked(q), "six.lab.") {
					return say(q, false, 0, "", "six.lab. NS ns.host.lab.", "ns.host.lab. AAAA 2001:db8::53")
				}
				return nil
			})
			r.want("www.six.lab.", typeA, "NOERROR", "www.six.lab. A 198.51.100.1")
		})
	})
	t.Run("A32 A33 addresses not to ask", func(t *testing.T) {
		bubble(t, zones{
			{Name: "x.lab.", NameServers: []siminternet.NameServer{
				{Name: "a.x.lab.", Addrs: servers("127.0.0.1")}, {Name: "b.x.lab.", Addrs: servers("255.255.255.255", "224.0.0.1")}, {Name: "c.x.lab.", Addrs: servers(s1)},
			}, Records: "www A 198.51.100.1"},
		}, func(o *Options) {
			o.DoNotQuery = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/16")}
			o.DoNotQuery = append(o.DoNotQuery, DefaultDoNotQuery()[0], DefaultDoNotQuery()[2], DefaultDoNotQuery()[3])
		}, func(r *rig) {
			r.hook("127.53.1.7", func(q siminternet.Query) *siminternet.Reply {
				if !strings.Contains(asked(q), "y.lab.") {
					return nil
				}
				return say(q, false, 0, "", "y.lab. NS a.y.lab.", "a.y.lab. A 0.0.0.0\na.y.lab. AAAA ::")
			})
			for range 5 {
				r.forget()
				r.want("www.x.lab.", typeA, "NOERROR", "www.x.lab. A 198.51.100.1")
				r.fails("www.y.lab.", typeA, "no server to ask")
				for _, a := range []string{"127.0.0.1", "255.255.255.255", "224.0.0.1"} {
					if n := r.sent(to(ip(a))); n > 0 {
						t.Errorf("%d questions to %s", n, a)
					}
				}
			}
		})
	})
	t.Run("a referral's glue expires before the delegation", func(t *testing.T) {
		bubble(t, zones{leafZone("leaf.lab.", "b A 198.51.100.2")}, nil, func(r *rig) {
			r.hook("127.53.1.7", func(q siminternet.Query) *siminternet.Reply {
				m := q.Answer()
				for _, rr := range m.Extra {
					if rr.Header().Rrtype == dns.TypeA {
						rr.Header().Ttl = 5
					}
				}
				return &siminternet.Reply{Msg: m}
			})
			r.want("www.leaf.lab.", typeA, "NOERROR", "www.leaf.lab. A 198.51.100.1")
			time.Sleep(time.Minute)
			r.want("b.leaf.lab.", typeA, "NOERROR", "b.leaf.lab. A 198.51.100.2")
		})
	})
}

// A35, CVE-2020-8616: a referral to a hundred names in a victim's zone.
func TestNXNS(t *testing.T) {
	for _, absent := range []bool{true, false} {
		t.Run(fmt.Sprintf("absent=%v", absent), func(t *testing.T) {
			bubble(t, zones{{Name: "atk.lab.", Servers: servers(attacker)}, {Name: "victim.lab.", Servers: servers(s1)}}, nil, func(r *rig) {
				r.hook(attacker, func(q siminternet.Query) *siminternet.Reply {
					name := strings.Fields(asked(q))[0]
					ns := ""
					for i := range 100 {
						ns += fmt.Sprintf("%s NS n%d.%svictim.lab.\n", name, i, name[:strings.Index(name, ".")+1])
					}
					return say(q, false, 0, "", ns, "")
				})
				if !absent {
					r.behave(s1, siminternet.Behaviour{Silent: true})
				}
				f := r.fails("r1.atk.lab.", typeA, "")
				n := r.sent(func(e siminternet.LogEntry) bool { return e.Server == ip(s1) })
				if absent && n > 6 || n > 40 {
					t.Errorf("%d questions to the victim (%v):\n%s", n, f, r.log())
				}
			})
		})
	}
}

// The tree's budget ends everything, and such an end is not remembered against the question.
func TestTreeBudget(t *testing.T) {
	bubble(t, nil, nil, func(r *rig) {
		tree := query.NewTree(now(), query.Budget{Queries: 2})
		_, err := r.it.Resolve(context.Background(), tree, ask("www.glueless2.com.", typeA))
		var f *Failure
		if !errors.Is(err, query.ErrLimit) || !errors.As(err, &f) {
			t.Fatalf("%v", err)
		}
		if n := r.sent(nil); n > 2 {
			t.Errorf("%d questions", n)
		}
		r.want("www.glueless2.com.", typeA, "NOERROR", "www.glueless2.com. A 198.18.8.5")
	})
}

// Compositional amplification: aliases times glueless servers times minimisation, all in one question.
func TestCompositionIsBounded(t *testing.T) {
	bubble(t, zones{{Name: "camp.lab.", Servers: servers(attacker)}, {Name: "victim.lab.", Servers: servers(s1)}}, nil, func(r *rig) {
		n := 0
		r.hook(attacker, func(q siminternet.Query) *siminternet.Reply {
			n++
			name := strings.Fields(asked(q))[0]
			if n%3 == 0 {
				return say(q, true, 0, fmt.Sprintf("%s CNAME a.b.c.d.e.f.g.h.i.j.k.x%d.camp.lab.", name, n), "", "")
			}
			ns := ""
			for i := range 13 {
				ns += fmt.Sprintf("%s NS a.b.c.d.e%d-%d.camp.lab.\n", name, n, i)
			}
			return say(q, false, 0, "", ns, "")
		})
		r.fails("www.camp.lab.", typeA, "")
		if n := r.sent(nil); n > 100 {
			t.Errorf("%d questions", n)
		}
	})
}

// Aliases (cases C).
func TestAliases(t *testing.T) {
	chain := ""
	for i := range 30 {
		chain += fmt.Sprintf("c%d CNAME c%d\n", i, i+1)
	}
	leaf := leafZone("leaf.lab.", chain+"loop1 CNAME loop2\nloop2 CNAME loop1\nself CNAME self\nc30 A 198.51.100.30\nd DNAME www.leaf.lab.\n")
	bubble(t, zones{leaf, {Name: "x.lab.", Servers: servers(s3), Records: "www A 198.51.100.5"}}, nil, func(r *rig) {
		r.fails("loop1.leaf.lab.", typeA, "circle")
		r.fails("self.leaf.lab.", typeA, "circle")
		r.fails("c0.leaf.lab.", typeA, "more than 11 aliases")
		r.fails("loop.chain.example.", typeA, "circle")
		r.want("self.leaf.lab.", dnswire.TypeCNAME, "NOERROR", "self.leaf.lab. CNAME self.leaf.lab.") // C10
		out, err := r.ask(ask("c19.leaf.lab.", typeA))                                                // 11 aliases
		if err != nil || len(out.Answer) != 12 {
			t.Errorf("eleven aliases: %d, %v", len(out.Answer), err)
		}
		r.fails("c18.leaf.lab.", typeA, "more than 11 aliases")
		if n := r.sent(nil); n > 36 {
			t.Errorf("%d questions:\n%s", n, r.log())
		}
	})
	for _, c := range []struct {
		name, answer, authority string
		aa                      bool
		rcode                   int
		typ                     uint16
		want                    []string
	}{
		{name: "C01 two CNAMEs", answer: "a.leaf.lab. CNAME www.x.lab.\na.leaf.lab. CNAME other.x.lab.", aa: true,
			want: []string{"NOERROR", "a.leaf.lab. CNAME www.x.lab.", "www.x.lab. A 198.51.100.5"}},
		{name: "C02 NXDOMAIN beside an alias", answer: "a.leaf.lab. CNAME www.x.lab.", authority: "leaf.lab. SOA a. b. 1 2 3 4 5", rcode: 3, aa: true,
			want: []string{"NOERROR", "a.leaf.lab. CNAME www.x.lab.", "www.x.lab. A 198.51.100.5"}},
		{name: "C03 NXDOMAIN of the target", answer: "a.leaf.lab. CNAME nx.leaf.lab.", authority: "leaf.lab. SOA a. b. 1 2 3 4 5", rcode: 3, aa: true,
			want: []string{"NXDOMAIN", "a.leaf.lab. CNAME nx.leaf.lab."}},
		{name: "C04 NODATA of the target", answer: "a.leaf.lab. CNAME www.leaf.lab.", authority: "leaf.lab. SOA a. b. 1 2 3 4 5", typ: typeAAAA, aa: true,
			want: []string{"NOERROR", "a.leaf.lab. CNAME www.leaf.lab."}},
		{name: "C09 target's address from elsewhere", answer: "a.leaf.lab. CNAME www.x.lab.\nwww.x.lab. A 203.0.113.66", aa: true,
			want: []string{"NOERROR", "a.leaf.lab. CNAME www.x.lab.", "www.x.lab. A 198.51.100.5"}},
		{name: "A27 target in the zone", answer: "a.leaf.lab. CNAME b.leaf.lab.\nb.leaf.lab. A 198.51.100.6", authority: "leaf.lab. NS dead.leaf.lab.", aa: true,
			want: []string{"NOERROR", "a.leaf.lab. CNAME b.leaf.lab.", "b.leaf.lab. A 198.51.100.6"}},
		{name: "what a server has of the target is not its own", answer: "a.leaf.lab. CNAME b.leaf.lab.\nb.leaf.lab. CNAME www.x.lab.\nwww.x.lab. A 203.0.113.66", aa: true,
			want: []string{"NOERROR", "a.leaf.lab. CNAME b.leaf.lab.", "b.leaf.lab. A 198.51.100.6"}},
		{name: "out of order", answer: "b.leaf.lab. A 198.51.100.6\na.leaf.lab. CNAME b.leaf.lab.", aa: true,
			want: []string{"NOERROR", "a.leaf.lab. CNAME b.leaf.lab.", "b.leaf.lab. A 198.51.100.6"}},
		{name: "a forged CNAME beside a DNAME", answer: "leaf.lab. DNAME x.lab.\na.leaf.lab. CNAME www.evil.example.", aa: true,
			want: []string{"NXDOMAIN", "leaf.lab. DNAME x.lab.", "a.leaf.lab. CNAME a.x.lab."}},
		{name: "a DNAME above the zone", answer: "lab. DNAME x.lab.\na.leaf.lab. A 198.51.100.6", aa: true,
			want: []string{"NOERROR", "a.leaf.lab. A 198.51.100.6"}},
		{name: "junk beside", answer: "z.leaf.lab. A 203.0.113.66\na.leaf.lab. A 198.51.100.6\na.leaf.lab. TXT junk", aa: true,
			want: []string{"NOERROR", "a.leaf.lab. A 198.51.100.6"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, zones{leafZone("leaf.lab.", "b A 198.51.100.6"), {Name: "x.lab.", Servers: servers(s3), Records: "www A 198.51.100.5"}}, nil, func(r *rig) {
				for _, s := range []string{s1, s2} {
					r.hook(s, func(q siminternet.Query) *siminternet.Reply {
						if !strings.HasPrefix(asked(q), "a.") {
							return nil
						}
						return say(q, c.aa, c.rcode, c.answer, c.authority, "")
					})
				}
				typ := c.typ
				if typ == 0 {
					typ = typeA
				}
				r.want("a.leaf.lab.", typ, c.want...)
				if g := r.got("z.leaf.lab.", typeA) + r.got("a.leaf.lab.", typeTXT); g != "" {
					t.Errorf("the cache has %s", g)
				}
				r.want("a.leaf.lab.", typ, c.want...) // and again from the cache
			})
		})
	}
	t.Run("YXDOMAIN", func(t *testing.T) {
		bubble(t, nil, nil, func(r *rig) {
			label := strings.Repeat("x", 63)
			r.want(label+"."+label+"."+label+".xxx.s.dname.example.", typeA, "YXDOMAIN", "s.dname.example. DNAME a.target.so.long.that.some.names.no.longer.fit.dname.example.")
		})
	})
	t.Run("C11 CNAME at an apex", func(t *testing.T) {
		bubble(t, zones{{Name: "apex.lab.", Servers: servers(s1), Records: "www A 198.51.100.1"}, {Name: "x.lab.", Servers: servers(s3), Records: "www A 198.51.100.5"}}, nil, func(r *rig) {
			r.hook(s1, func(q siminternet.Query) *siminternet.Reply {
				if asked(q) == "apex.lab. A" {
					return say(q, true, 0, "apex.lab. CNAME www.x.lab.", "", "")
				}
				return nil
			})
			r.want("apex.lab.", typeA, "NOERROR", "apex.lab. CNAME www.x.lab.", "www.x.lab. A 198.51.100.5")
			r.want("www.apex.lab.", typeA, "NOERROR", "www.apex.lab. A 198.51.100.1")
		})
	})
}

// Minimisation (RFC 9156) and servers that do not bear it.
func TestMinimisation(t *testing.T) {
	deep := leafZone("leaf.lab.", "a.b.ent A 198.51.100.7\n"+strings.Repeat("l.", 40)+"deep A 198.51.100.8\nm.n MX 10 x.")
	t.Run("nobody above sees the name", func(t *testing.T) {
		bubble(t, zones{deep}, nil, func(r *rig) {
			r.want("a.b.ent.leaf.lab.", typeA, "NOERROR", "a.b.ent.leaf.lab. A 198.51.100.7")
			for _, e := range r.Log() {
				above := e.Server != ip(s1) && e.Server != ip(s2)
				if above && strings.Contains(strings.ToLower(e.Name), "ent") {
					t.Errorf("%v was asked for %s", e.Server, e.Name)
				}
			}
			r.ResetLog()
			r.want("x.b.ent.leaf.lab.", typeA, "NXDOMAIN")
			if n := r.sent(nil); n != 1 {
				t.Errorf("what is known of the way is not used: %d questions", n)
			}
		})
	})
	t.Run("B21 forty labels", func(t *testing.T) {
		bubble(t, zones{deep}, nil, func(r *rig) {
			r.want(strings.Repeat("l.", 40)+"deep.leaf.lab.", typeA, "NOERROR", strings.Repeat("l.", 40)+"deep.leaf.lab. A 198.51.100.8")
			if n := r.sent(nil); n > 2+maxMinimise {
				t.Errorf("%d questions:\n%s", n, r.log())
			}
		})
	})
	t.Run("B18 NXDOMAIN for an empty non-terminal", func(t *testing.T) {
		bubble(t, zones{deep}, nil, func(r *rig) {
			for _, s := range []string{s1, s2} {
				r.hook(s, func(q siminternet.Query) *siminternet.Reply {
					if a := asked(q); a == "ent.leaf.lab. A" || a == "b.ent.leaf.lab. A" {
						return say(q, true, 3, "", "leaf.lab. SOA a. b. 1 2 3 4 300", "")
					}
					return nil
				})
			}
			r.want("a.b.ent.leaf.lab.", typeA, "NOERROR", "a.b.ent.leaf.lab. A 198.51.100.7")
			r.ResetLog()
			r.want("m.n.leaf.lab.", dnswire.TypeMX, "NOERROR", "m.n.leaf.lab. MX 10 x.")
			if n := r.sent(nil); n != 1 {
				t.Errorf("the zone is minimised still:\n%s", r.log())
			}
		})
	})
	t.Run("a signed denial on the way", func(t *testing.T) {
		bubble(t, zones{{Name: "leaf.lab.", Servers: servers(s1), Algorithm: 13}}, nil, func(r *rig) {
			for _, c := range []struct {
				name   string
				secure bool // whether the zone is known to be
				cost   int
			}{{"a.gone.leaf.lab.", false, 3}, {"b.gone.leaf.lab.", false, 1}, {"c.gone.leaf.lab.", true, 0}} {
				if c.secure {
					out, err := r.ask(ask("leaf.lab.", dnswire.TypeDNSKEY))
					if err != nil {
						t.Fatal(err)
					}
					keys := out.Answer[0]
					keys.Status = query.Secure
					r.opts.RRsets.SetStatus(0, query.Subnet{}, keys, now())
				}
				r.ResetLog()
				if r.want(c.name, typeTXT, "NXDOMAIN"); r.sent(nil) != c.cost {
					t.Errorf("%s cost %d questions, want %d:\n%s", c.name, r.sent(nil), c.cost, r.log())
				}
			}
		})
	})
	t.Run("B20 type A is not answered", func(t *testing.T) {
		bubble(t, zones{deep}, nil, func(r *rig) {
			for _, s := range []string{s1, s2} {
				r.hook(s, func(q siminternet.Query) *siminternet.Reply {
					if strings.HasSuffix(asked(q), " A") {
						return &siminternet.Reply{}
					}
					return nil
				})
			}
			start := now()
			r.want("m.n.leaf.lab.", dnswire.TypeMX, "NOERROR", "m.n.leaf.lab. MX 10 x.")
			if d := now().Sub(start); d > 3*time.Second {
				t.Errorf("after %v", d)
			}
		})
	})
	t.Run("REFUSED to what is not served", func(t *testing.T) {
		bubble(t, zones{deep}, nil, func(r *rig) {
			for _, s := range []string{s1, s2} {
				r.hook(s, func(q siminternet.Query) *siminternet.Reply {
					if strings.HasSuffix(asked(q), "ent.leaf.lab. A") && !strings.HasPrefix(asked(q), "a.") {
						return say(q, false, dns.RcodeRefused, "", "", "")
					}
					return nil
				})
			}
			r.want("a.b.ent.leaf.lab.", typeA, "NOERROR", "a.b.ent.leaf.lab. A 198.51.100.7")
		})
	})
}

// D20 and RFC 9520: failures are remembered, a second at first.
func TestFailureMemory(t *testing.T) {
	bubble(t, zones{leafZone("leaf.lab.", "")}, nil, func(r *rig) {
		dead := func(is bool) {
			r.behave(s1, siminternet.Behaviour{Silent: is})
			r.behave(s2, siminternet.Behaviour{Silent: is})
		}
		dead(true)
		r.fails("www.leaf.lab.", typeA, "timed out")
		r.ResetLog()
		time.Sleep(time.Second / 2)
		if f := r.fails("www.leaf.lab.", typeA, "timed out"); f.Code != edeCachedError || r.sent(nil) != 0 {
			t.Errorf("EDE %d, %d questions", f.Code, r.sent(nil))
		}
		time.Sleep(time.Second)
		r.fails("www.leaf.lab.", typeA, "timed out")
		if r.sent(nil) == 0 {
			t.Error("not asked again after a second")
		}
		r.ResetLog()
		time.Sleep(4 * time.Second)
		r.fails("www.leaf.lab.", typeA, "timed out")
		if r.sent(nil) != 0 {
			t.Error("the second failure is forgotten within five seconds")
		}
		dead(false)
		time.Sleep(2 * time.Second)
		r.want("www.leaf.lab.", typeA, "NOERROR", "www.leaf.lab. A 198.51.100.1")
	})
}

// What ends because its tree was nearly spent before it began, or for another limit of the tree, is not
// remembered: the next tree may do better. What takes all of a tree's time is.
func TestFailuresOfTrees(t *testing.T) {
	var chain strings.Builder
	for i := range 10 {
		fmt.Fprintf(&chain, "a%d CNAME a%d\n", i, i+1)
	}
	chain.WriteString("a10 A 198.51.100.1\n")
	for what, c := range map[string]struct {
		delay  time.Duration
		budget query.Budget
		known  bool
	}{
		"queries":         {0, query.Budget{Queries: 3}, false},
		"little time":     {400 * time.Millisecond, query.Budget{Time: 2 * time.Second}, false},
		"all of its time": {1100 * time.Millisecond, query.Budget{}, true},
	} {
		bubble(t, zones{leafZone("leaf.lab.", chain.String())}, func(o *Options) { o.Minimise = Off }, func(r *rig) {
			for _, s := range []string{s1, s2} {
				r.hook(s, func(q siminternet.Query) *siminternet.Reply {
					m := q.Answer()
					if len(m.Answer) > 1 {
						m.Answer = m.Answer[:1] // one step of the chain at a time
					}
					return &siminternet.Reply{Msg: m, Delay: c.delay}
				})
			}
			q := ask("a0.leaf.lab.", typeA)
			fail := func() *Failure {
				ctx, cancel := context.WithTimeout(context.Background(), 8*time.Second)
				defer cancel()
				_, err := r.it.Resolve(ctx, query.NewTree(clock.Elapsed(), c.budget), q)
				var f *Failure
				if !errors.As(err, &f) {
					t.Fatalf("%s: %v", what, err)
				}
				return f
			}
			fail()
			r.it.opts.RRsets.Clear()
			if f := fail(); (f.Code == edeCachedError) != c.known {
				t.Errorf("%s: then %d %v", what, f.Code, f)
			}
		})
	}
}

func TestFailureBackoff(t *testing.T) {
	var m memory[int]
	now := now()
	for _, want := range []time.Duration{1, 5, 10, 20, 40, 60, 60} {
		m.failed(1, "x", now, questionBackoff)
		want *= time.Second
		if _, on := m.active(1, now.Add(want-1)); !on {
			t.Errorf("over before %v", want)
		}
		now = now.Add(want)
		if _, on := m.active(1, now); on {
			t.Errorf("not over after %v", want)
		}
	}
	m.failed(1, "x", now.Add(6*time.Minute), questionBackoff)
	if _, on := m.active(1, now.Add(6*time.Minute+2*time.Second)); on {
		t.Error("quiet for six minutes, and not forgotten")
	}
	for i := range 3 * maxMemory {
		m.failed(i, "x", now, questionBackoff)
	}
	if len(m.m) > maxMemory {
		t.Errorf("%d entries", len(m.m))
	}
}

// CVE-2012-1033 and its successors: what a parent has taken away goes when its grant ends, however the child's
// servers behave.
func TestGhostDomain(t *testing.T) {
	ghost := siminternet.Zone{Name: "ghost.lab.", Servers: servers(attacker), Records: "* A 203.0.113.66"}
	bubble(t, zones{ghost}, nil, func(r *rig) {
		r.hook("127.53.1.7", func(q siminternet.Query) *siminternet.Reply { // a short grant
			m := q.Answer()
			for _, rr := range m.Ns {
				rr.Header().Ttl = 60
			}
			return &siminternet.Reply{Msg: m}
		})
		keep := func() {
			r.ask(ask("ghost.lab.", dnswire.TypeNS))
			r.ask(ask("ns1.ghost.lab.", typeA))
		}
		r.want("a.ghost.lab.", typeA, "NOERROR", "a.ghost.lab. A 203.0.113.66")
		if err := r.Remove("ghost.lab."); err != nil {
			t.Fatal(err)
		}
		// The attacker's server goes on answering, with long TTLs and itself as NS.
		r.hook(attacker, func(q siminternet.Query) *siminternet.Reply {
			name := strings.Fields(asked(q))[0]
			ns := "ghost.lab. 86400 NS ns1.ghost.lab."
			switch asked(q) {
			case "ghost.lab. NS":
				return say(q, true, 0, ns, "", "ns1.ghost.lab. 86400 A "+attacker)
			case "ns1.ghost.lab. A":
				return say(q, true, 0, "ns1.ghost.lab. 86400 A "+attacker, ns, "")
			}
			return say(q, true, 0, name+" 86400 A 203.0.113.66", ns, "ns1.ghost.lab. 86400 A "+attacker)
		})
		for range 5 {
			keep()
			time.Sleep(11 * time.Second)
		}
		keep()
		time.Sleep(10 * time.Second)
		r.want("b.ghost.lab.", typeA, "NXDOMAIN")
		r.want("a.ghost.lab.", typeA, "NXDOMAIN")
	})
}
