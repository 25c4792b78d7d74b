package resolver_test

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	mathrand "math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/internal/iterator"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// Attacks of the past played again, against a whole resolver in front of hostile servers. What counts is what the
// attacker gets for a query: questions to others, checks and hashes, memory. The figures are those of hardening
// sections A to C; what one question may cost is a tree's budget of 100 questions, whatever the attack.

// perQuery bounds what one hostile query may allocate, simulated servers included, for each question sent.
const perQuery = 256 << 10

// NXNSAttack (CVE-2020-8616): each name under the attacker's zone is delegated to a hundred names in the victim's
// zone, without glue. Published amplification was 1,620 questions a query.
func TestAttackNXNS(t *testing.T) {
	for _, c := range []struct {
		name   string
		victim siminternet.Behaviour
		most   int // questions to the victim for each query
	}{
		{"names do not exist", siminternet.Behaviour{}, 8},
		{"victim is silent", siminternet.Behaviour{Silent: true}, 40},
		{"victim refuses", siminternet.Behaviour{Lame: siminternet.LameRefused}, 12},
	} {
		t.Run(c.name, func(t *testing.T) {
			assault(t, zones{zoneAt("atk.lab.", evil1, ""), zoneAt("victim.lab.", victim1, "")}, nil, func(l *lab) {
				l.behave(victim1, c.victim)
				l.hook(evil1, func(q siminternet.Query) *siminternet.Reply {
					name, _ := asked(q)
					if name == "atk.lab." {
						return nil
					}
					var ns strings.Builder
					for i := range 100 {
						fmt.Fprintf(&ns, "%s NS n%d.%s.victim.lab.\n", name, i, strings.Split(name, ".")[0])
					}
					return say(q, false, 0, "", ns.String(), "")
				})
				l.must("www.victim.lab.", dns.TypeA) // the way there is known
				const queries = 10
				l.sim.ResetLog()
				bytes := allocated(func() {
					for i := range queries {
						if m := l.must(fmt.Sprintf("r%d.atk.lab.", i), dns.TypeA); m.Rcode != dns.RcodeServerFailure {
							t.Errorf("%s", text(m))
						}
					}
				})
				all, victim := sentTo(l.sim), sentTo(l.sim, victim1)
				t.Logf("%d queries: %d questions, %d to the victim, %d kB", queries, all, victim, bytes>>10)
				if victim == 0 || victim > queries*c.most || all > queries*100 || bytes > uint64(all+queries)*perQuery {
					t.Errorf("%d questions to the victim, at most %d wanted", victim, queries*c.most)
				}
			})
		})
	}
}

// NRDelegation (CVE-2022-3204): hundreds of names of servers that are themselves delegated to servers which do not
// answer. What did not resolve is not tried again for another query within a minute.
func TestAttackNRDelegation(t *testing.T) {
	assault(t, zones{zoneAt("atk.lab.", evil1, ""), zoneAt("nr.lab.", evil2, ""), zoneAt("victim.lab.", victim1, "")}, nil, func(l *lab) {
		l.hook(evil1, func(q siminternet.Query) *siminternet.Reply {
			name, _ := asked(q)
			if name == "atk.lab." {
				return nil
			}
			var ns strings.Builder
			for i := range 500 {
				fmt.Fprintf(&ns, "%s NS n%d.nr.lab.\n", name, i)
			}
			return say(q, false, 0, "", ns.String(), "")
		})
		l.hook(evil2, func(q siminternet.Query) *siminternet.Reply {
			name, _ := asked(q)
			if name == "nr.lab." {
				return nil
			}
			i := strings.LastIndex(strings.TrimSuffix(name, ".nr.lab."), ".") + 1
			return say(q, false, 0, "", name[i:]+" NS ns1.victim.lab.", "ns1.victim.lab. A "+victim1)
		})
		l.behave(victim1, siminternet.Behaviour{Lame: siminternet.LameRefused})
		if m := l.must("one.atk.lab.", dns.TypeA); m.Rcode != dns.RcodeServerFailure {
			t.Errorf("%s", text(m))
		}
		first := sentTo(l.sim)
		l.sim.ResetLog()
		for i := range 10 {
			l.must(fmt.Sprintf("two%d.atk.lab.", i), dns.TypeA)
		}
		more, victim := sentTo(l.sim), sentTo(l.sim, victim1)
		t.Logf("first query: %d questions; ten more: %d, %d to the victim", first, more, victim)
		if first > 100 || more > 10*30 || victim > 10*12 {
			t.Errorf("first query: %d questions; ten more: %d, %d to the victim", first, more, victim)
		}
	})
}

// CAMP (compositional amplification): aliases, times servers without glue, times labels to minimise.
func TestAttackComposition(t *testing.T) {
	assault(t, zones{zoneAt("camp.lab.", evil1, ""), zoneAt("victim.lab.", victim1, "* A "+evil2), zoneAt("x.lab.", evil2, "")}, nil, func(l *lab) {
		labels := "a.b.c.d.e.f.g.h.i.j."
		var n atomic.Int64
		hostile := func(q siminternet.Query) *siminternet.Reply {
			name, _ := asked(q)
			i := n.Add(1)
			switch {
			case name == "camp.lab.":
				return nil
			case q.Server == netip.MustParseAddr(evil1) && !strings.HasPrefix(name, "q"):
				// Each alias leads to a zone of its own, with servers of as many labels.
				zone := name[strings.LastIndex(strings.TrimSuffix(name, ".camp.lab."), ".")+1:]
				var ns strings.Builder
				for k := range 13 {
					fmt.Fprintf(&ns, "%s NS %sv%d-%d.victim.lab.\n", zone, labels, i, k)
				}
				return say(q, false, 0, "", ns.String(), "")
			case strings.HasPrefix(name, labels) || strings.HasPrefix(name, "q"):
				return say(q, true, 0, fmt.Sprintf("%s CNAME %sx%d.camp.lab.", name, labels, i), "", "")
			}
			return say(q, true, 0, "", "camp.lab. SOA ns1.camp.lab. h.camp.lab. 1 2 3 4 5", "")
		}
		l.hook(evil1, hostile)
		l.hook(evil2, hostile)
		l.must("www.host.lab.", dns.TypeA)
		for i := range 5 {
			l.sim.ResetLog()
			bytes := allocated(func() { l.must(fmt.Sprintf("q%d.camp.lab.", i), dns.TypeA) })
			all := sentTo(l.sim)
			t.Logf("%d questions, %d to the victim, %d kB", all, sentTo(l.sim, victim1), bytes>>10)
			if all > 100 || bytes > uint64(all+1)*perQuery {
				t.Errorf("%d questions, %d bytes for one query", all, bytes)
			}
		}
	})
}

// TsuNAME: two zones whose servers' names are in the other zone. The circle is seen, and seen once: clients that
// ask again and again cost no more questions.
func TestAttackTsuNAME(t *testing.T) {
	circle := zones{
		{Name: "ca.lab.", NameServers: []siminternet.NameServer{{Name: "ns.cb.lab.", Addrs: []netip.Addr{netip.MustParseAddr(evil1)}}}, NoSiblingGlue: true},
		{Name: "cb.lab.", NameServers: []siminternet.NameServer{{Name: "ns.ca.lab.", Addrs: []netip.Addr{netip.MustParseAddr(evil2)}}}, NoSiblingGlue: true},
	}
	assault(t, circle, nil, func(l *lab) {
		for i := range 100 {
			if m := l.must("www.ca.lab.", dns.TypeA); m.Rcode != dns.RcodeServerFailure {
				t.Errorf("%s", text(m))
			}
			if i == 0 {
				if n := sentTo(l.sim); n > 16 {
					t.Errorf("the first query cost %d questions", n)
				}
				l.sim.ResetLog()
			}
			time.Sleep(300 * time.Millisecond)
		}
		// Thirty seconds of insisting: a few rounds by the backoff of RFC 9520, not a hundred.
		n := sentTo(l.sim)
		t.Logf("%d questions for a hundred queries", n)
		if n > 40 {
			t.Errorf("a hundred queries cost %d questions", n)
		}
	})
}

// Random subdomains of an unsigned zone whose servers are slow: what is under way for the zone is bounded, and
// queries for other zones go on as if nothing were.
func TestAttackRandomSubdomains(t *testing.T) {
	victim := siminternet.Zone{Name: "victim.lab.", Records: "www A 198.51.100.1"}
	for i := range 8 {
		victim.Servers = append(victim.Servers, netip.AddrFrom4([4]byte{192, 0, 2, byte(1 + i)}))
	}
	assault(t, zones{victim}, nil, func(l *lab) {
		l.want("www.victim.lab.", dns.TypeA, "NOERROR | www.victim.lab. A 198.51.100.1")
		under := peak{names: map[string]int{}}
		for _, a := range victim.Servers {
			l.hook(a.String(), func(q siminternet.Query) *siminternet.Reply {
				name, _ := asked(q)
				under.enter(name)
				time.AfterFunc(200*time.Millisecond, func() { under.leave(name) })
				r := say(q, true, dns.RcodeNameError, "", "victim.lab. 300 SOA ns1.victim.lab. h.victim.lab. 1 2 3 4 300", "")
				r.Delay = 200 * time.Millisecond
				return r
			})
		}
		var wg sync.WaitGroup
		var shed, answered, last atomic.Int64
		for i := range 2000 {
			wg.Go(func() {
				m, err := l.ask(fmt.Sprintf("r%d.victim.lab.", i), dns.TypeA, nil)
				switch {
				case err != nil:
				case m.Rcode == dns.RcodeServerFailure && extended(m) == 22:
					shed.Add(1)
					last.Store(int64(i))
				default:
					answered.Add(1)
				}
			})
		}
		time.Sleep(50 * time.Millisecond)
		start := time.Now()
		l.want("www.ecdsa.com.", dns.TypeA, "NOERROR | www.ecdsa.com. A 198.18.0.2")
		if d := time.Since(start); d > 500*time.Millisecond {
			t.Errorf("another zone's name took %v", d)
		}
		wg.Wait()
		t.Logf("%d under way at most, %d shed, %d answered", under.most, shed.Load(), answered.Load())
		if under.most > 200 || shed.Load() == 0 || answered.Load() == 0 {
			t.Errorf("%d under way at most, want 200 (%d shed, %d answered)", under.most, shed.Load(), answered.Load())
		}
		// Having been turned away says nothing of a name.
		l.want(fmt.Sprintf("r%d.victim.lab.", last.Load()), dns.TypeA, "NXDOMAIN")
	})
}

// Random subdomains of a signed zone: what its proofs deny needs no question (RFC 8198).
func TestAttackRandomSubdomainsSigned(t *testing.T) {
	for _, nsec3 := range []*siminternet.NSEC3{nil, {}} {
		name := "NSEC"
		if nsec3 != nil {
			name = "NSEC3"
		}
		t.Run(name, func(t *testing.T) {
			z := zoneAt("victim.example.", victim1, "www A 198.51.100.1\nftp A 198.51.100.2\nmail A 198.51.100.3")
			z.Algorithm, z.NSEC3 = 13, nsec3
			assault(t, zones{z}, func(o *resolver.Options) { o.Cache.Aggressive = true }, func(l *lab) {
				l.want("www.victim.example.", dns.TypeA, "NOERROR | www.victim.example. A 198.51.100.1")
				l.sim.ResetLog()
				const names = 500
				r := mathrand.New(mathrand.NewPCG(1, 2))
				for range names {
					l.want(fmt.Sprintf("%x.victim.example.", r.Uint64()), dns.TypeA, "NXDOMAIN")
				}
				n := sentTo(l.sim)
				t.Logf("%d names: %d questions", names, n)
				if n > names/20 {
					t.Errorf("%d questions for %d names that one proof denies", n, names)
				}
				l.want("ftp.victim.example.", dns.TypeA, "NOERROR | ftp.victim.example. A 198.51.100.2")
			})
		})
	}
}

// DNSBomb (CVE-2024-33655): queries trickle in with a forged source and are held back until one slow server
// answers them all at once. What one address can have outstanding bounds the pulse.
func TestAttackDNSBomb(t *testing.T) {
	assault(t, zones{zoneAt("bomb.lab.", evil1, "")}, func(o *resolver.Options) { o.Access.Unlimited = nil }, func(l *lab) {
		start := time.Now()
		l.hook(evil1, func(q siminternet.Query) *siminternet.Reply { // everything is answered three seconds after the start
			name, _ := asked(q)
			r := say(q, true, 0, name+` TXT "`+strings.Repeat("x", 250)+`"`, "", "")
			r.Delay = max(0, 3*time.Second-time.Since(start))
			return r
		})
		c, err := l.net.DialUDP(netip.MustParseAddrPort("198.51.100.200:53"), l.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		var got, bytes, sent atomic.Int64
		done := make(chan struct{})
		go func() {
			defer close(done)
			buf := make([]byte, 4096)
			for {
				n, err := c.Read(buf)
				if err != nil {
					return
				}
				if buf[2]&2 == 0 && n > 200 { // not a slip
					got.Add(1)
					bytes.Add(int64(n))
				}
			}
		}()
		for i := range 1000 {
			m := new(dns.Msg).SetQuestion(fmt.Sprintf("t%d.bomb.lab.", i), dns.TypeTXT)
			m.SetEdns0(4096, false)
			wire, err := m.Pack()
			if err != nil {
				t.Fatal(err)
			}
			c.Write(wire)
			sent.Add(int64(len(wire)))
			time.Sleep(2500 * time.Microsecond)
		}
		time.Sleep(10 * time.Second)
		c.Close()
		<-done
		t.Logf("%d answers in the pulse, %d bytes for %d", got.Load(), bytes.Load(), sent.Load())
		if got.Load() == 0 || got.Load() > 200 {
			t.Errorf("a pulse of %d answers, want some and at most 200", got.Load())
		}
	})
}

// Off the path: an attacker who cannot see queries floods guesses from the server's address; on the path of UDP
// alone, near misses. Nothing but the true answer is believed, and each question costs one more over TCP at most.
func TestAttackSpoofing(t *testing.T) {
	forged := func(query []byte, edit func(m *dns.Msg)) []byte {
		m := new(dns.Msg)
		if m.Unpack(query) != nil {
			return nil
		}
		r := new(dns.Msg).SetReply(m)
		r.Authoritative = true
		r.Answer = records(m.Question[0].Name + " A 203.0.113.66")
		edit(r)
		wire, err := r.Pack()
		if err != nil {
			return nil
		}
		return wire
	}
	for _, c := range []struct {
		name string
		send func(l *lab, from, to netip.AddrPort, query []byte)
		tcp  bool // the exchange ends over TCP
	}{
		{"a thousand wrong IDs", func(l *lab, from, to netip.AddrPort, query []byte) {
			for range 1000 {
				l.net.Inject(to, from, forged(query, func(m *dns.Msg) { m.Id ^= uint16(1 + mathrand.N(65535)) }), 0)
			}
		}, true},
		{"wrong port", func(l *lab, from, to netip.AddrPort, query []byte) {
			for range 100 {
				l.net.Inject(to, netip.AddrPortFrom(from.Addr(), from.Port()^uint16(1+mathrand.N(65535))), forged(query, func(m *dns.Msg) {}), 0)
			}
		}, false},
		{"wrong source", func(l *lab, from, to netip.AddrPort, query []byte) {
			l.net.Inject(netip.AddrPortFrom(netip.MustParseAddr(evil1), 53), from, forged(query, func(m *dns.Msg) {}), 0)
			l.net.Inject(netip.AddrPortFrom(to.Addr(), 54), from, forged(query, func(m *dns.Msg) {}), 0)
		}, false},
		{"wrong question", func(l *lab, from, to netip.AddrPort, query []byte) {
			l.net.Inject(to, from, forged(query, func(m *dns.Msg) { m.Question[0].Name = "www.victim.lab." + m.Question[0].Name }), 0)
		}, true},
		{"QR=0", func(l *lab, from, to netip.AddrPort, query []byte) {
			l.net.Inject(to, from, forged(query, func(m *dns.Msg) { m.Response = false }), 0)
		}, true},
		{"another opcode", func(l *lab, from, to netip.AddrPort, query []byte) {
			l.net.Inject(to, from, forged(query, func(m *dns.Msg) { m.Opcode = dns.OpcodeNotify }), 0)
		}, true},
		{"right but for the case", func(l *lab, from, to netip.AddrPort, query []byte) {
			l.net.Inject(to, from, forged(query, func(m *dns.Msg) {
				name := &m.Question[0].Name
				if lower := strings.ToLower(*name); lower != *name {
					*name = lower
				} else { // drawn so, by a chance of one in a hundred thousand
					*name = strings.ToUpper(*name)
				}
			}), 0)
		}, true},
		{"right but for the cookie", func(l *lab, from, to netip.AddrPort, query []byte) {
			l.net.Inject(to, from, forged(query, func(m *dns.Msg) {
				m.SetEdns0(1232, true)
				m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: strings.Repeat("ab", 24)}}
			}), 0)
		}, true},
		{"garbage", func(l *lab, from, to netip.AddrPort, query []byte) {
			l.net.Inject(to, from, append(slices.Clone(query[:2]), 0xff, 0xff, 0xff), 0)
		}, true},
		{"a forged FORMERR of the wrong ID", func(l *lab, from, to netip.AddrPort, query []byte) {
			l.net.Inject(to, from, forged(query, func(m *dns.Msg) { m.Id++; m.Rcode = dns.RcodeFormatError; m.Answer = nil }), 0)
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			assault(t, zones{zoneAt("victim.lab.", victim1, "* A 198.51.100.1")}, nil, func(l *lab) {
				l.behave(victim1, siminternet.Behaviour{Delay: 20 * time.Millisecond})
				server := netip.AddrPortFrom(netip.MustParseAddr(victim1), 53)
				l.must("known.victim.lab.", dns.TypeA)
				l.net.Watch = func(from, to netip.AddrPort, query []byte) {
					if to == server {
						c.send(l, from, to, query)
					}
				}
				for i := range 5 {
					l.sim.ResetLog()
					name := fmt.Sprintf("WwWwWwWw%d.victim.lab.", i)
					l.want(name, dns.TypeA, "NOERROR | "+strings.ToLower(name)+" A 198.51.100.1")
					tcp := l.sim.Count(func(e siminternet.LogEntry) bool { return e.Transport == siminternet.TCP })
					if n := sentTo(l.sim); n > 2 || (tcp > 0) != c.tcp {
						t.Errorf("%d questions, %d over TCP", n, tcp)
					}
				}
			})
		})
	}
}

// Promiscuous name servers (CVE-2025-11411, CVE-2025-40778): records nobody asked for, with which a server of one
// zone means to take over another, or its own zone from its parent.
func TestAttackPromiscuousNS(t *testing.T) {
	for _, c := range []struct{ name, answer, authority, additional string }{
		{"NS of itself in a positive answer", "%s A 198.51.100.9", "atk.lab. 86400 NS ns9.atk.lab.", "ns9.atk.lab. 86400 A " + evil2},
		{"NS of the parent", "%s A 198.51.100.9", "lab. 86400 NS ns9.atk.lab.", "ns9.atk.lab. 86400 A " + evil2},
		{"NS of a sibling", "%s A 198.51.100.9", "victim.lab. 86400 NS ns9.atk.lab.", "ns9.atk.lab. 86400 A " + evil2},
		{"address of the victim's server", "%s A 198.51.100.9", "", "ns1.victim.lab. 86400 A " + evil2},
		{"address of the victim", "%s A 198.51.100.9", "", "www.victim.lab. 86400 A " + evil2},
		{"victim in the answer section", "%s A 198.51.100.9\nwww.victim.lab. 86400 A " + evil2 + "\nvictim.lab. 86400 NS ns9.atk.lab.", "", ""},
		{"NS beside NODATA", "", "atk.lab. 300 SOA ns1.atk.lab. h.atk.lab. 1 2 3 4 300\nvictim.lab. 86400 NS ns9.atk.lab.\nlab. NS ns9.atk.lab.", "ns9.atk.lab. 86400 A " + evil2},
		{"a sideways referral", "", "victim.lab. 86400 NS ns9.atk.lab.", "ns9.atk.lab. 86400 A " + evil2},
		{"an upward referral", "", ". 86400 NS ns9.atk.lab.", "ns9.atk.lab. 86400 A " + evil2},
	} {
		t.Run(c.name, func(t *testing.T) {
			assault(t, zones{zoneAt("atk.lab.", evil1, ""), zoneAt("victim.lab.", victim1, "www A 198.51.100.1\nb A 198.51.100.2\nc A 198.51.100.3"), zoneAt("unused.lab.", evil2, "")}, nil, func(l *lab) {
				l.behave(evil2, siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
					name, _ := asked(q)
					return say(q, true, 0, name+" A 203.0.113.66", "", "")
				}})
				l.hook(evil1, func(q siminternet.Query) *siminternet.Reply {
					name, _ := asked(q)
					answer := c.answer
					if answer != "" {
						answer = fmt.Sprintf(answer, name)
					}
					return say(q, answer != "" || strings.Contains(c.authority, "SOA"), 0, answer, c.authority, c.additional)
				})
				attempt := func() {
					l.must("x1.atk.lab.", dns.TypeA)
					l.must("x2.atk.lab.", dns.TypeAAAA)
				}
				attempt() // before the victim is known, and after
				l.want("www.victim.lab.", dns.TypeA, "NOERROR | www.victim.lab. A 198.51.100.1")
				attempt()
				l.want("b.victim.lab.", dns.TypeA, "NOERROR | b.victim.lab. A 198.51.100.2")
				l.want("www.host.lab.", dns.TypeA, "NOERROR | www.host.lab. A 198.18.5.5")
				time.Sleep(2 * time.Hour)
				l.want("c.victim.lab.", dns.TypeA, "NOERROR | c.victim.lab. A 198.51.100.3")
				if n := sentTo(l.sim, evil2); n > 0 {
					t.Errorf("%d questions to the attacker's other server", n)
				}
			})
		})
	}
}

// Ghost and phoenix domains (CVE-2012-1033; CVE-2022-30698, -30699): a domain taken away by its parent goes when
// the last grant ends, though clients keep its records warm and its servers call themselves its servers for a day
// more in every answer; and new names under it do not bring it back.
func TestAttackGhostDomain(t *testing.T) {
	assault(t, zones{zoneAt("ghost.lab.", evil1, "* A 203.0.113.66")}, nil, func(l *lab) {
		l.hook(labServer, func(q siminternet.Query) *siminternet.Reply { // grants last ten minutes
			m := q.Answer()
			for _, rr := range m.Ns {
				if rr.Header().Rrtype == dns.TypeNS {
					rr.Header().Ttl = 600
				}
			}
			return reply(q, m)
		})
		ghost := func(q siminternet.Query) *siminternet.Reply {
			name, typ := asked(q)
			ns := "ghost.lab. 86400 NS ns1.ghost.lab."
			glue := "ns1.ghost.lab. 86400 A " + evil1
			switch {
			case typ == dns.TypeNS:
				return say(q, true, 0, strings.Replace(ns, "ghost.lab.", name, 1), "", glue)
			case strings.Count(name, ".") > 4: // phoenix: a delegation below itself, to itself
				i := strings.Index(name, "sub")
				return say(q, false, 0, "", name[i:]+" 86400 NS ns1.ghost.lab.", glue)
			}
			return say(q, true, 0, name+" 86400 A 203.0.113.66", ns, glue)
		}
		l.hook(evil1, ghost)
		keepWarm := func(i int) {
			l.ask("ghost.lab.", dns.TypeNS, nil)
			l.ask("ns1.ghost.lab.", dns.TypeA, nil)
			l.ask("www.ghost.lab.", dns.TypeA, nil)
			l.ask(fmt.Sprintf("x.sub%d.ghost.lab.", i), dns.TypeNS, nil)
			l.ask(fmt.Sprintf("n%d.ghost.lab.", i), dns.TypeA, nil)
		}
		keepWarm(0)
		if m := l.must("www.ghost.lab.", dns.TypeA); m.Rcode != 0 {
			t.Fatal(text(m))
		}
		if err := l.sim.Remove("ghost.lab."); err != nil {
			t.Fatal(err)
		}
		for i := range 11 {
			keepWarm(i + 1)
			time.Sleep(time.Minute)
		}
		l.sim.ResetLog()
		for _, name := range []string{"www.ghost.lab.", "new.ghost.lab.", "x.sub3.ghost.lab.", "y.sub3.ghost.lab."} {
			l.want(name, dns.TypeA, "NXDOMAIN")
		}
		if n := sentTo(l.sim, evil1); n > 0 {
			t.Errorf("%d questions to the ghost's server after its grant ended", n)
		}
	})
}

// Fragments: what does not fit the size we offer is not looked at, nor is what a truncated response holds.
func TestAttackFragmentation(t *testing.T) {
	for _, c := range []struct {
		name string
		b    siminternet.Behaviour
	}{
		{"more than we offered", siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
			if q.Transport == siminternet.TCP {
				return nil
			}
			name, _ := asked(q)
			m := say(q, true, 0, name+" A 203.0.113.66", "", "").Msg
			m.Extra = append(m.Extra, records(name+` TXT "`+strings.Repeat("x", 250)+`" "`+strings.Repeat("y", 250)+`" "`+strings.Repeat("z", 250)+`" "`+
				strings.Repeat("v", 250)+`" "`+strings.Repeat("w", 250)+`"`)...)
			return &siminternet.Reply{Msg: m}
		}}},
		{"truncated, with data", siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
			if q.Transport == siminternet.TCP {
				return nil
			}
			name, _ := asked(q)
			m := say(q, true, 0, name+" A 203.0.113.66", "", "").Msg
			m.Truncated = true
			return &siminternet.Reply{Msg: m}
		}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			assault(t, zones{zoneAt("victim.lab.", victim1, "* A 198.51.100.1")}, nil, func(l *lab) {
				l.behave(victim1, c.b)
				for i := range 3 {
					l.sim.ResetLog()
					name := fmt.Sprintf("w%d.victim.lab.", i)
					l.want(name, dns.TypeA, "NOERROR | "+name+" A 198.51.100.1")
					for _, e := range l.sim.Log() {
						if e.EDNS && e.UDPSize > 1232 {
							t.Errorf("%d bytes offered", e.UDPSize)
						}
					}
					if n := sentTo(l.sim, victim1); n > 2 {
						t.Errorf("%d questions", n)
					}
				}
			})
		})
	}
}

// Addresses of nobody (CVE-2026-50251): glue of 0.0.0.0 and :: is as none, and flushes nothing.
func TestAttackUnspecifiedGlue(t *testing.T) {
	assault(t, zones{zoneAt("nobody.lab.", evil1, ""), zoneAt("victim.lab.", victim1, "www A 198.51.100.1")}, func(o *resolver.Options) {
		o.Recursion.NoIPv6, o.Recursion.BuiltInDoNotQuery = false, false
	}, func(l *lab) {
		l.hook(labServer, func(q siminternet.Query) *siminternet.Reply {
			if name, _ := asked(q); strings.HasSuffix(name, "nobody.lab.") {
				return say(q, false, 0, "", "nobody.lab. NS ns.nobody.lab.", "ns.nobody.lab. A 0.0.0.0\nns.nobody.lab. AAAA ::")
			}
			return nil
		})
		var dialled atomic.Int64
		l.net.Watch = func(_, to netip.AddrPort, _ []byte) {
			if to.Addr().IsUnspecified() {
				dialled.Add(1)
			}
		}
		l.want("www.victim.lab.", dns.TypeA, "NOERROR | www.victim.lab. A 198.51.100.1")
		for i := range 5 {
			if m := l.must(fmt.Sprintf("w%d.nobody.lab.", i), dns.TypeA); m.Rcode != dns.RcodeServerFailure {
				t.Error(text(m))
			}
		}
		l.sim.ResetLog()
		l.want("www.victim.lab.", dns.TypeA, "NOERROR | www.victim.lab. A 198.51.100.1")
		if n := sentTo(l.sim); n > 0 || dialled.Load() > 0 {
			t.Errorf("%d questions for what was cached, %d to nobody", n, dialled.Load())
		}
	})
}

// KeyTrap (CVE-2023-50387): many keys of one tag times many signatures that none of them made. Counted are
// verifications, the cost of which is the attack.
func TestAttackKeyTrap(t *testing.T) {
	s := newSigner("trap.lab.")
	keys := []dns.RR{s.ksk}
	keys = append(keys, collidingKeys(s.zone, 60)...)
	tag := keys[1].(*dns.DNSKEY).KeyTag()
	withRecursor(t, zones{zoneAt("trap.lab.", evil1, "")}, s.anchor(), nil, func(r *recursor) {
		r.sim.SetBehaviour(netip.MustParseAddr(evil1), siminternet.Behaviour{Hook: s.serveKeys(keys, func(q siminternet.Query, m *dns.Msg) {
			name, _ := asked(q)
			set := records(name + " A 203.0.113.66")
			m.Answer = set
			for range 16 {
				m.Answer = append(m.Answer, falseSignature(s, set, tag))
			}
		})})
		for i := range 3 {
			bytes := allocated(func() {
				if got := r.outcome(fmt.Sprintf("w%d.trap.lab.", i), dns.TypeA); !strings.HasPrefix(got, "SERVFAIL") {
					t.Error(got)
				}
			})
			c := r.spent()
			t.Logf("%+v, %d kB", c, bytes>>10)
			if c.failed > 8 || c.verified > 8 || c.queries > 20 || bytes > 4<<20 {
				t.Errorf("one query cost %+v, %d bytes", c, bytes)
			}
		}
	})
}

// falseSignature is one over set that claims to be made with the RSA key of the given tag, and was not.
func falseSignature(s *signer, set []dns.RR, tag uint16) *dns.RRSIG {
	g := s.unsigned(set)
	g.Algorithm, g.KeyTag = dns.RSASHA256, tag
	b := make([]byte, 128)
	rand.Read(b)
	b[0] = 0
	g.Signature = base64.StdEncoding.EncodeToString(b)
	return g
}

// collidingKeys makes RSA keys that are all different and well formed, and share their tag: the tag is a sum of
// 16-bit words (RFC 4034 appendix B), so words of a modulus can change places.
func collidingKeys(zone string, n int) (keys []dns.RR) {
	rdata := make([]byte, 4+128) // length 3, exponent 65537, modulus: even offset after the 4 bytes of the header
	copy(rdata, []byte{3, 1, 0, 1})
	rand.Read(rdata[4:])
	rdata[4] |= 0x80
	rdata[len(rdata)-1] |= 1
	for i := range n {
		w := slices.Clone(rdata)
		for k := range 2 {
			a := 6 + 2*((i+k*7)%60)
			b := 6 + 2*((i*3+k*11+1)%60)
			w[a], w[a+1], w[b], w[b+1] = w[b], w[b+1], w[a], w[a+1]
		}
		keys = append(keys, &dns.DNSKEY{
			Hdr:   dns.RR_Header{Name: zone, Rrtype: dns.TypeDNSKEY, Class: dns.ClassINET, Ttl: 300},
			Flags: 256, Protocol: 3, Algorithm: dns.RSASHA256, PublicKey: base64.StdEncoding.EncodeToString(w),
		})
	}
	return keys
}

// NSEC3 (CVE-2023-50868): denials that cost hashes. Counted are hashes and how zones of many iterations fare.
func TestAttackNSEC3(t *testing.T) {
	with := func(name string, iterations uint16, salt string) siminternet.Zone {
		z := zoneAt(name, victim2, "www A 198.51.100.1\n*.wild A 198.51.100.2")
		z.Algorithm, z.NSEC3 = 13, &siminternet.NSEC3{Iterations: iterations, Salt: salt}
		return z
	}
	withRecursor(t, zones{with("i0.example.", 0, ""), with("i50.example.", 50, ""), with("i51.example.", 51, ""), with("i500.example.", 500, ""),
		with("i501.example.", 501, "")}, "", nil, func(r *recursor) {
		for _, c := range []struct {
			name, want string
			hashes     int
		}{
			{"nx.i0.example.", "NXDOMAIN Secure", 4},
			{"nx.i50.example.", "NXDOMAIN Secure", 64},
			{"nx.i51.example.", "NXDOMAIN Insecure", 8}, // each costs two, for a look whether it is a proof at all
			{"nx.i500.example.", "NXDOMAIN Insecure", 0},
			{"nx.i501.example.", "SERVFAIL 27", 0},
			{strings.Repeat("l.", 60) + "i0.example.", "NXDOMAIN Secure", 64},
			{strings.Repeat("m.", 100) + "i0.example.", "SERVFAIL", 64}, // more hashes than one question may cost
		} {
			got := r.outcome(c.name, dns.TypeA)
			spent := r.spent()
			t.Logf("%.30s: %s, %+v", c.name, got, spent)
			if !strings.HasPrefix(got, c.want) || spent.hashes > c.hashes {
				t.Errorf("%s: %s, %+v; want %s and at most %d hashes", c.name, got, spent, c.want, c.hashes)
			}
		}
	})
}

// A zone of too many iterations is insecure, but not so that any NSEC3 record of it, sent in answer to the question for
// DS records, takes the signature off a name that has one.
func TestAttackDowngradeByIterations(t *testing.T) {
	for _, c := range []struct {
		iterations uint16
		owner      string // of the record that is to deny a DS record of www
		want       string
	}{
		{50, "www.costly.lab.", "SERVFAIL"},
		{51, "www.costly.lab.", "SERVFAIL"}, // it does, for an ordinary name: no zone begins there
		{150, "www.costly.lab.", "SERVFAIL"},
		{150, "costly.lab.", "SERVFAIL"}, // it does not
		{151, "costly.lab.", "NOERROR Insecure"},
	} {
		s := newSigner("costly.lab.")
		hash := func(n string) string { return strings.ToLower(dns.HashName(n, dns.SHA1, c.iterations, "")) }
		types := map[string]string{"www.costly.lab.": "A RRSIG", "costly.lab.": "NS SOA RRSIG DNSKEY"}[c.owner]
		withRecursor(t, zones{zoneAt("costly.lab.", evil1, "")}, s.anchor(), nil, func(r *recursor) {
			r.sim.SetBehaviour(netip.MustParseAddr(evil1), siminternet.Behaviour{Hook: s.serve(func(q siminternet.Query, m *dns.Msg) {
				if _, typ := asked(q); typ == dns.TypeA {
					m.Answer = records("www.costly.lab. A 203.0.113.66")
					return
				}
				m.Ns = append(m.Ns, s.signed(fmt.Sprintf("%s.costly.lab. NSEC3 1 0 %d - %s %s", hash(c.owner), c.iterations, hash("next.costly.lab."), types))...)
			})})
			for range 2 { // the second time out of the cache
				if got := r.outcome("www.costly.lab.", dns.TypeA); !strings.HasPrefix(got, c.want) {
					t.Errorf("%d iterations, record of %s: %s, want %s", c.iterations, c.owner, got, c.want)
				}
				r.outcome("www.costly.lab.", dns.TypeDS) // what a client asks about it changes nothing
			}
		})
	}
}

// Tricks with wildcards, signatures and denials (CVE-2017-15105, CVE-2026-44690, -13321, -10723, -52686): each
// record is signed by the zone's own key, so that nothing but the rule in question stands against it.
func TestAttackDenialTricks(t *testing.T) {
	s := newSigner("trick.lab.")
	nsec := func(m *dns.Msg, lines ...string) {
		for _, l := range lines {
			m.Ns = append(m.Ns, s.signed(l)...)
		}
	}
	expand := func(m *dns.Msg, owner, wildcard string) {
		set := records(owner + " A 203.0.113.66")
		m.Answer = append(set, s.sign(set, wildcard, nil))
	}
	for _, c := range []struct {
		name, ask, want string
		answer          func(m *dns.Msg)
	}{
		{"an honest wildcard", "a.w.trick.lab.", "NOERROR Secure", func(m *dns.Msg) {
			expand(m, "a.w.trick.lab.", "*.w.trick.lab.")
			nsec(m, "*.w.trick.lab. NSEC z.trick.lab. A RRSIG NSEC")
		}},
		{"an honest denial", "b.trick.lab.", "NXDOMAIN Secure", func(m *dns.Msg) {
			m.Rcode = dns.RcodeNameError
			nsec(m, "trick.lab. NSEC z.trick.lab. NS SOA RRSIG NSEC DNSKEY")
		}},
		{"wildcard without proof", "a.w.trick.lab.", "SERVFAIL", func(m *dns.Msg) { expand(m, "a.w.trick.lab.", "*.w.trick.lab.") }},
		{"wildcard though the name exists", "a.w.trick.lab.", "SERVFAIL", func(m *dns.Msg) {
			expand(m, "a.w.trick.lab.", "*.w.trick.lab.")
			nsec(m, "a.w.trick.lab. NSEC z.trick.lab. A RRSIG NSEC")
		}},
		{"wildcard above an existing closer name", "a.b.w.trick.lab.", "SERVFAIL", func(m *dns.Msg) {
			expand(m, "a.b.w.trick.lab.", "*.w.trick.lab.")
			nsec(m, "b.w.trick.lab. NSEC z.trick.lab. A RRSIG NSEC") // covers a.b.w, and shows that b.w exists
		}},
		{"fewer labels than the signer's zone", "a.w.trick.lab.", "SERVFAIL", func(m *dns.Msg) {
			expand(m, "a.w.trick.lab.", "*.lab.")
			nsec(m, "trick.lab. NSEC z.trick.lab. NS SOA RRSIG NSEC DNSKEY")
		}},
		{"more labels than the owner's", "a.w.trick.lab.", "SERVFAIL", func(m *dns.Msg) {
			set := records("a.w.trick.lab. A 203.0.113.66")
			m.Answer = append(set, s.sign(set, "", func(g *dns.RRSIG) { g.Labels = 5 }))
		}},
		{"a wildcard CNAME needs a proof of its own", "a.w.trick.lab.", "SERVFAIL", func(m *dns.Msg) {
			set := records("a.w.trick.lab. CNAME t.trick.lab.")
			m.Answer = append(append(set, s.sign(set, "*.w.trick.lab.", nil)), s.signed("t.trick.lab. A 203.0.113.66")...)
		}},
		{"the next name outside the zone", "b.trick.lab.", "SERVFAIL", func(m *dns.Msg) {
			m.Rcode = dns.RcodeNameError
			nsec(m, "trick.lab. NSEC zzz.lab. NS SOA RRSIG NSEC DNSKEY")
		}},
		{"a denial from the parent's side of a cut", "b.sub.trick.lab.", "SERVFAIL", func(m *dns.Msg) {
			m.Rcode = dns.RcodeNameError
			nsec(m, "sub.trick.lab. NSEC z.trick.lab. NS RRSIG NSEC", "trick.lab. NSEC sub.trick.lab. NS SOA RRSIG NSEC DNSKEY")
		}},
		{"below a DNAME", "b.d.trick.lab.", "SERVFAIL", func(m *dns.Msg) {
			m.Rcode = dns.RcodeNameError
			nsec(m, "d.trick.lab. NSEC z.trick.lab. DNAME RRSIG NSEC", "trick.lab. NSEC d.trick.lab. NS SOA RRSIG NSEC DNSKEY")
		}},
		{"an expanded wildcard NSEC", "b.w.trick.lab.", "SERVFAIL", func(m *dns.Msg) { // CVE-2017-15105
			m.Rcode = dns.RcodeNameError
			set := records("a.w.trick.lab. NSEC z.trick.lab. A RRSIG NSEC")
			m.Ns = append(m.Ns, append(set, s.sign(set, "*.w.trick.lab.", nil))...)
			nsec(m, "trick.lab. NSEC a.w.trick.lab. NS SOA RRSIG NSEC DNSKEY")
		}},
		{"NXDOMAIN without denial of the wildcard", "b.w.trick.lab.", "SERVFAIL", func(m *dns.Msg) {
			m.Rcode = dns.RcodeNameError
			nsec(m, "a.w.trick.lab. NSEC c.w.trick.lab. A RRSIG NSEC")
		}},
		{"NODATA though the type is there", "t.trick.lab.", "SERVFAIL", func(m *dns.Msg) { nsec(m, "t.trick.lab. NSEC z.trick.lab. A RRSIG NSEC") }},
		{"NSEC3 not directly below its zone", "b.trick.lab.", "SERVFAIL", func(m *dns.Msg) {
			m.Rcode = dns.RcodeNameError
			for _, h := range []string{"x.", ""} {
				nsec(m, "00000000000000000000000000000000."+h+"sub.trick.lab. NSEC3 1 0 0 - VVVVVVVVVVVVVVVVVVVVVVVVVVVVVVVV A RRSIG")
			}
		}},
		{"signed by a key of another zone", "t.trick.lab.", "SERVFAIL", func(m *dns.Msg) {
			set := records("t.trick.lab. A 203.0.113.66")
			m.Answer = append(set, s.sign(set, "", func(g *dns.RRSIG) { g.SignerName = "lab." }))
		}},
		{"a forged CNAME beside a signed DNAME", "b.d.trick.lab.", "NOERROR Secure", func(m *dns.Msg) {
			m.Answer = append(s.signed("d.trick.lab. DNAME e.trick.lab."), records("b.d.trick.lab. CNAME www.host.lab.")...)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			withRecursor(t, zones{zoneAt("trick.lab.", evil1, "")}, s.anchor(), func(o *iterator.Options) { o.Minimise = resolver.MinimiseOff }, func(r *recursor) {
				r.sim.SetBehaviour(netip.MustParseAddr(evil1), siminternet.Behaviour{Hook: s.serve(func(q siminternet.Query, m *dns.Msg) {
					switch name, typ := asked(q); {
					case name == c.ask && typ == dns.TypeA:
						c.answer(m)
					case name == "b.e.trick.lab.":
						m.Answer = s.signed("b.e.trick.lab. A 198.51.100.7")
					default:
						nsec(m, name+" NSEC z.trick.lab. TXT RRSIG NSEC") // nothing else here, and no zone cut
					}
				})})
				got := r.outcome(c.ask, dns.TypeA)
				if !strings.HasPrefix(got, c.want) {
					t.Errorf("%s; want %s", got, c.want)
				}
				if spent := r.spent(); spent.queries > 30 || spent.failed > 8 {
					t.Errorf("cost %+v", spent)
				}
				// What is bogus is not there for a later question either.
				if c.want == "SERVFAIL" {
					if again := r.outcome(c.ask, dns.TypeA); !strings.HasPrefix(again, "SERVFAIL") {
						t.Errorf("asked again: %s", again)
					}
				}
			})
		})
	}
}
