package resolver_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/exchange"
	"github.com/sluice-dns/sluice/resolver/internal/iterator"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/rpz"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// Section A: what one question makes us ask of others.

// onRecursor runs f with a recursor in whose Internet evil1 serves lab.'s hostile zones by hook, and returns what
// f says.
func onRecursor(t *testing.T, extra zones, hook func(q siminternet.Query) *siminternet.Reply, edit func(*iterator.Options), f func(r *recursor) string) (out string) {
	t.Helper()
	withRecursor(t, append(zones{zoneAt("hostile.lab.", evil1, "")}, extra...), "", edit, func(r *recursor) {
		if hook != nil {
			r.sim.SetBehaviour(netip.MustParseAddr(evil1), siminternet.Behaviour{Hook: hook})
		}
		for _, a := range r.sim.Servers("refused.lab.") {
			r.sim.SetBehaviour(a, siminternet.Behaviour{Lame: siminternet.LameRefused})
		}
		out = f(r)
	})
	return out
}

// word is the first word of an outcome: the RCODE.
func word(s string) string { w, _, _ := strings.Cut(s, " "); return w }

func rcode(name string) func(r *recursor) string {
	return func(r *recursor) string {
		got := r.outcome(name, dns.TypeA)
		r.t.Log(got)
		return word(got)
	}
}

// referTo answers with a referral from the zone's parent: lines of NS records, and glue.
func referTo(q siminternet.Query, ns, glue string) *siminternet.Reply {
	return say(q, false, 0, "", ns, glue)
}

// withServers delegates d.hostile.lab. to the names given, of which the last has a good server, and answers
// whether that server was found.
func withServers(t *testing.T, names []string, glue string, other func(q siminternet.Query) *siminternet.Reply, more ...siminternet.Zone) string {
	return onRecursor(t, append(more, zoneAt("good.lab.", victim1, "ns A "+victim1)), func(q siminternet.Query) *siminternet.Reply {
		name, _ := asked(q)
		if strings.HasSuffix(name, "d.hostile.lab.") {
			var ns strings.Builder
			for _, n := range names {
				fmt.Fprintf(&ns, "d.hostile.lab. NS %s\n", n)
			}
			return referTo(q, ns.String(), glue)
		}
		if other != nil {
			return other(q)
		}
		return nil
	}, nil, func(r *recursor) string {
		r.sim.SetBehaviour(netip.MustParseAddr(victim1), siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
			if name, _ := asked(q); strings.HasSuffix(name, "d.hostile.lab.") {
				return say(q, true, 0, name+" A 198.51.100.1", "", "")
			}
			return nil
		}})
		return rcode("www.d.hostile.lab.")(r)
	})
}

func serverNames(n int, format, last string) (names []string) {
	for i := range n - 1 {
		names = append(names, fmt.Sprintf(format, i))
	}
	return append(names, last)
}

// addressesOf is n addresses from 192.0.3.1 on, all with a server of a zone.
func addressesOf(n int) (out []netip.Addr) {
	for i := range n {
		out = append(out, netip.AddrFrom4([4]byte{192, 0, 3, byte(1 + i)}))
	}
	return out
}

// asksOf resolves so many names of a zone and counts at how many servers it asks.
func asksOf(t *testing.T, names int, servers ...siminternet.NameServer) string {
	return onRecursor(t, zones{{Name: "many.lab.", NameServers: servers, Records: "* A 198.51.100.1"}}, nil, nil, func(r *recursor) string {
		for i := range names {
			r.resolve(fmt.Sprintf("w%d.many.lab.", i), dns.TypeA)
		}
		seen := map[netip.Addr]bool{}
		for _, e := range r.sim.Log() {
			if strings.HasSuffix(strings.ToLower(e.Name), ".many.lab.") && e.Server.As4()[1] == 0 && e.Server.As4()[2] == 3 {
				seen[e.Server] = true
			}
		}
		return some(len(seen))
	})
}

// after tells what came of a TCP query and after how long.
func after(l *lab, name string, limit time.Duration) (string, time.Duration) {
	start := time.Now()
	m := new(dns.Msg).SetQuestion(name, dns.TypeA)
	r, err := l.exchangeFor("tcp", m, limit)
	d := time.Since(start)
	if err != nil {
		return "nothing", d
	}
	return dns.RcodeToString[r.Rcode], d
}

// slowZone is one whose server answers after d.
func slowly(t *testing.T, d time.Duration, edit func(*resolver.Options), f func(l *lab)) {
	assault(t, zones{zoneAt("slow.lab.", victim1, "* A 198.51.100.1")}, edit, func(l *lab) {
		l.must("known.slow.lab.", dns.TypeA)
		l.behave(victim1, siminternet.Behaviour{Delay: d})
		f(l)
	})
}

// limited gives a lab other limits.
func limited(set map[string]int64) func(*resolver.Options) {
	return func(o *resolver.Options) { o.Limits = limitsWith(set) }
}

// crowd sends n queries at once, over UDP from one address, and counts the answers of an RCODE.
func crowd(l *lab, n int, name func(i int) string, rcode int, edit func(*dns.Msg)) (count int) {
	var wg sync.WaitGroup
	var got atomic.Int64
	for i := range n {
		wg.Go(func() {
			m, err := l.ask(name(i), dns.TypeA, edit)
			if err == nil && m.Rcode == rcode {
				got.Add(1)
			}
		})
	}
	wg.Wait()
	return int(got.Load())
}

var rowsA = []limitRow{
	{"referral chase: referral depth", "referrals on the way to one name", 30, "NOERROR", "SERVFAIL", func(t *testing.T, n int) string {
		// The first two referrals are those to lab. and hostile.lab.; the others lead one label down each, to the same server.
		name := strings.Repeat("z.", n-2) + "hostile.lab."
		return onRecursor(t, nil, func(q siminternet.Query) *siminternet.Reply {
			asked, _ := asked(q)
			if strings.HasPrefix(asked, "www.") {
				return say(q, true, 0, asked+" A 198.51.100.1", "", "")
			}
			return referTo(q, asked+" NS ns."+asked, "ns."+asked+" A "+evil1)
		}, nil, rcode("www."+name))
	}},
	{"referral chase: depth of name servers' addresses", "zones without glue, each served by a name in the next", 6, "NOERROR", "SERVFAIL", func(t *testing.T, n int) string {
		var chain zones
		for i := range n {
			chain = append(chain, siminternet.Zone{
				Name: fmt.Sprintf("c%d.lab.", i), NoSiblingGlue: true, Records: "www A 198.51.100.1\nns A " + victim1,
				NameServers: []siminternet.NameServer{{Name: fmt.Sprintf("ns.c%d.lab.", i+1), Addrs: []netip.Addr{netip.MustParseAddr(victim1)}}},
			})
		}
		chain = append(chain, zoneAt(fmt.Sprintf("c%d.lab.", n), victim1, "ns A "+victim1))
		return onRecursor(t, chain, nil, nil, rcode("www.c0.lab."))
	}},
	{"upstream queries of one client query", "queries that one tree wants", 100, "sent", "limit of one question reached", func(t *testing.T, n int) string {
		tree := query.NewTree(0, query.Budget{})
		for i := range n {
			if err := tree.Query(); err != nil && (i < n-1 || !errors.Is(err, query.ErrLimit)) {
				return fmt.Sprintf("query %d: %v", i+1, err)
			} else if err != nil {
				return query.ErrLimit.Error()
			}
		}
		return "sent"
	}},
	{"upstream queries of one client query, at servers", "links of an attacker's chain without end that are wanted; queries sent", 100, "100", "100", func(t *testing.T, n int) string {
		return onRecursor(t, zones{zoneAt("good.lab.", victim1, "* A "+evil1)}, func(q siminternet.Query) *siminternet.Reply {
			name, _ := asked(q) // each name is a zone of its own, whose servers' names take ten questions each
			if strings.HasPrefix(name, "a.b.c.d.") || strings.Count(name, ".") < 4 {
				return say(q, true, 0, fmt.Sprintf("%s CNAME a.b.c.d.x%s", name, name), "", "")
			}
			var ns strings.Builder
			for i := range 6 {
				fmt.Fprintf(&ns, "%s NS a.b.c.d.e.f.g%d.%sgood.lab.\n", name, i, name[:strings.Index(name, ".")+1])
			}
			return referTo(q, ns.String(), "")
		}, nil, func(r *recursor) string {
			r.tree = query.NewTree(clock.Elapsed(), query.Budget{Queries: min(n, 100)})
			r.iterator.Resolve(context.Background(), r.tree, question("w.hostile.lab.", dns.TypeA))
			return some(sentTo(r.sim))
		})
	}},
	{"wall clock of one query", "seconds that servers are silent; what a TCP client gets", 7, "NOERROR", "SERVFAIL after 8s", func(t *testing.T, n int) (out string) {
		z := siminternet.Zone{Name: "dead.lab.", Servers: addressesOf(8), Records: "* A 198.51.100.1"}
		assault(t, zones{z}, nil, func(l *lab) {
			start := time.Now()
			for _, a := range z.Servers {
				l.hook(a.String(), func(q siminternet.Query) *siminternet.Reply {
					if time.Since(start) < time.Duration(n)*time.Second {
						return &siminternet.Reply{}
					}
					return nil
				})
			}
			what, d := after(l, "w.dead.lab.", 20*time.Second)
			if out = what; what != "NOERROR" {
				out = fmt.Sprintf("%s after %v", what, d.Round(100*time.Millisecond))
			}
		})
		return out
	}},
	{"wall clock: a UDP client is answered until", "whole seconds until the answer is there, and 0.9 more", 4, "NOERROR", "nothing", func(t *testing.T, n int) (out string) {
		slowly(t, 0, nil, func(l *lab) {
			l.hook(victim1, func(q siminternet.Query) *siminternet.Reply { // five answers in a row that each take their time
				name, _ := asked(q)
				r := say(q, true, 0, name+" CNAME x"+name, "", "")
				if strings.HasPrefix(name, "xxxx") {
					r = say(q, true, 0, name+" A 198.51.100.1", "", "")
				}
				r.Delay = (time.Duration(n)*time.Second + 900*time.Millisecond) / 5
				return r
			})
			m, err := l.exchangeFor("udp", new(dns.Msg).SetQuestion("w.slow.lab.", dns.TypeA), 20*time.Second)
			if out = "nothing"; err == nil {
				out = dns.RcodeToString[m.Rcode]
			}
		})
		return out
	}},
	{"NXNS: NS names considered", "NS names of a delegation, of which the last has glue", 13, "NOERROR", "SERVFAIL", func(t *testing.T, n int) string {
		names := serverNames(n, "n%d.refused.lab.", "ns.d.hostile.lab.")
		return withServers(t, names, "ns.d.hostile.lab. A "+victim1, nil, refusing)
	}},
	{"NXNS: names without glue for a delegation", "names of which the last alone resolves", 6, "NOERROR", "SERVFAIL", func(t *testing.T, n int) string {
		return withServers(t, serverNames(n, "n%d.refused.lab.", "ns.good.lab."), "", nil, refusing)
	}},
	{"NXNS: names that do not exist, for one query", "names that do not exist, before one that does", 4, "NOERROR", "SERVFAIL", func(t *testing.T, n int) string {
		return withServers(t, serverNames(n+1, "n%d.good.lab.", "ns.good.lab."), "", nil)
	}},
	{"NXNS: names of a round", "names that all resolve; how many were looked up", 2, "2", "2", func(t *testing.T, n int) string {
		return onRecursor(t, zones{zoneAt("good.lab.", victim1, "* A "+victim1)}, func(q siminternet.Query) *siminternet.Reply {
			if name, _ := asked(q); strings.HasSuffix(name, "d.hostile.lab.") {
				var ns strings.Builder
				for i := range n {
					fmt.Fprintf(&ns, "d.hostile.lab. NS n%d.good.lab.\n", i)
				}
				return referTo(q, ns.String(), "")
			}
			return nil
		}, nil, func(r *recursor) string {
			r.sim.SetBehaviour(netip.MustParseAddr(victim1), siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
				if name, _ := asked(q); strings.HasSuffix(name, "d.hostile.lab.") {
					return say(q, true, 0, name+" A 198.51.100.1", "", "")
				}
				return nil
			}})
			r.resolve("www.d.hostile.lab.", dns.TypeA)
			seen := map[string]bool{}
			for _, e := range r.sim.Log() {
				if name := strings.ToLower(e.Name); strings.HasSuffix(name, ".good.lab.") && strings.HasPrefix(name, "n") {
					seen[name] = true
				}
			}
			return some(len(seen))
		})
	}},
	{"NRDelegation: a name that does not resolve is left alone for", "seconds until it is wanted again; whether it is asked for", 59, "false", "true", func(t *testing.T, n int) string {
		return onRecursor(t, zones{refusing}, func(q siminternet.Query) *siminternet.Reply {
			if name, _ := asked(q); strings.Contains(name, ".d.") {
				return referTo(q, name[strings.Index(name, ".")+1:]+" NS n1.refused.lab.", "")
			}
			return nil
		}, func(o *iterator.Options) { o.Minimise = iterator.Off }, func(r *recursor) string {
			r.resolve("www.x1.d.hostile.lab.", dns.TypeA)
			time.Sleep(time.Duration(n)*time.Second + 900*time.Millisecond)
			r.sim.ResetLog()
			r.resolve("www.x2.d.hostile.lab.", dns.TypeA)
			return fmt.Sprint(r.sim.Count(func(e siminternet.LogEntry) bool { return strings.EqualFold(e.Name, "n1.refused.lab.") }) > 0)
		})
	}},
	{"TsuNAME: a circle is remembered for", "seconds until it is asked for again; whether anything is sent", 29, "false", "true", func(t *testing.T, n int) string {
		circle := func(name, other string) siminternet.Zone {
			return siminternet.Zone{Name: name, NameServers: []siminternet.NameServer{{Name: "ns." + other, Addrs: []netip.Addr{netip.MustParseAddr(evil2)}}}, NoSiblingGlue: true}
		}
		return onRecursor(t, zones{circle("ca.lab.", "cb.lab."), circle("cb.lab.", "ca.lab.")}, nil, nil, func(r *recursor) string {
			r.resolve("www.ca.lab.", dns.TypeA)
			time.Sleep(time.Duration(n)*time.Second + 900*time.Millisecond)
			r.sim.ResetLog()
			r.resolve("www.ca.lab.", dns.TypeA)
			return fmt.Sprint(sentTo(r.sim) > 0)
		})
	}},
	{"iDNS, CAMP: aliases", "CNAMEs in a row", 11, "NOERROR", "SERVFAIL", func(t *testing.T, n int) string {
		var chain strings.Builder
		for i := range n {
			fmt.Fprintf(&chain, "c%d CNAME c%d\n", i, i+1)
		}
		fmt.Fprintf(&chain, "c%d A 198.51.100.1", n)
		return onRecursor(t, zones{zoneAt("alias.lab.", victim1, chain.String())}, nil, nil, rcode("c0.alias.lab."))
	}},
	{"iDNS, CAMP: aliases by DNAME and CNAME together", "DNAMEs and CNAMEs in turn", 11, "NOERROR", "SERVFAIL", func(t *testing.T, n int) string {
		var chain strings.Builder
		for i := range n {
			if i%2 == 0 {
				fmt.Fprintf(&chain, "d%d DNAME d%d\n", i, i+1)
			} else {
				fmt.Fprintf(&chain, "x.d%d CNAME x.d%d\n", i, i+1)
			}
		}
		fmt.Fprintf(&chain, "x.d%d A 198.51.100.1", n)
		return onRecursor(t, zones{zoneAt("alias.lab.", victim1, chain.String())}, nil, nil, rcode("x.d0.alias.lab."))
	}},
	{"minimisation: questions", "labels below the zone; questions to its server, that about the whole name included", 10, "10", "10", minimised},
	{"minimisation: questions about the longest names", "labels below the zone; questions to its server", 100, "10", "10", minimised},
	{"minimisation: labels shown one at a time", "questions; labels that each shows", 4, "1 2 3 4", "1 2 3 4 more", func(t *testing.T, n int) string {
		return onRecursor(t, zones{zoneAt("leaf.lab.", victim1, strings.Repeat("l.", 40)+"x A 198.51.100.1")}, nil, nil, func(r *recursor) string {
			r.resolve(strings.Repeat("l.", 40)+"x.leaf.lab.", dns.TypeA)
			var out []string
			for _, e := range r.sim.Log() {
				if below := dns.CountLabel(e.Name) - 2; e.Server == netip.MustParseAddr(victim1) && len(out) < n {
					if below == len(out)+1 {
						out = append(out, fmt.Sprint(below))
					} else {
						out = append(out, "more")
					}
				}
			}
			return strings.Join(out, " ")
		})
	}},
	{"minimisation: given up after a broken answer", "names asked for; NXDOMAINs for what is there", 1, "1", "1", func(t *testing.T, n int) string {
		var broken atomic.Int64
		return onRecursor(t, zones{zoneAt("leaf.lab.", victim1, "a.ent1 A 198.51.100.1\na.ent2 A 198.51.100.1")}, nil, nil, func(r *recursor) string {
			r.sim.SetBehaviour(netip.MustParseAddr(victim1), siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
				if name, _ := asked(q); strings.HasPrefix(name, "ent") {
					broken.Add(1)
					return say(q, true, dns.RcodeNameError, "", "leaf.lab. SOA a. b. 1 2 3 4 5", "")
				}
				return nil
			}})
			for i := range n {
				if got := rcode(fmt.Sprintf("a.ent%d.leaf.lab.", i+1))(r); got != "NOERROR" {
					return got
				}
			}
			return some(int(broken.Load()))
		})
	}},
	{"same addresses: addresses of one name", "addresses of the only name server; servers asked", 8, "8", "8", func(t *testing.T, n int) string {
		return asksOf(t, 300, siminternet.NameServer{Name: "ns.many.lab.", Addrs: addressesOf(n)})
	}},
	{"same addresses: addresses of a delegation", "addresses of thirteen name servers; servers asked", 32, "32", "32", func(t *testing.T, n int) string {
		all := addressesOf(n)
		var ns []siminternet.NameServer
		for i := 0; len(all) > 0; i++ {
			k := min(len(all), 3)
			ns = append(ns, siminternet.NameServer{Name: fmt.Sprintf("ns%d.many.lab.", i), Addrs: all[:k]})
			all = all[k:]
		}
		return asksOf(t, 1000, ns...)
	}},
	{"same addresses: counted once", "names that share one silent address; times it is asked over UDP", 12, "3", "3", func(t *testing.T, n int) string {
		var ns []siminternet.NameServer
		for i := range n {
			ns = append(ns, siminternet.NameServer{Name: fmt.Sprintf("ns%d.many.lab.", i), Addrs: addressesOf(1)})
		}
		return onRecursor(t, zones{{Name: "many.lab.", NameServers: ns}}, nil, nil, func(r *recursor) string {
			r.sim.SetBehaviour(addressesOf(1)[0], siminternet.Behaviour{Silent: true})
			r.resolve("many.lab.", dns.TypeTXT)
			return some(r.sim.Count(func(e siminternet.LogEntry) bool {
				return e.Server == addressesOf(1)[0] && e.Transport == siminternet.UDP
			}))
		})
	}},
	{"bad-server loop: the same question to a server", "times that one tree wants it sent; times allowed", 3, "3", "3", func(t *testing.T, n int) string {
		tree, allowed := query.NewTree(0, query.Budget{}), 0
		for range n {
			if tree.Send("192.0.2.1:53", "\x01a\x00", dns.TypeA) {
				allowed++
			}
		}
		return some(allowed)
	}},
	{"random subdomains: questions under way for a zone", "names asked for at once; how many were turned away", 200, "0", "1", func(t *testing.T, n int) string {
		return floodZone(t, n, 8)
	}},
	{"random subdomains: questions under way at a server", "names asked for at once; how many were turned away", 100, "0", "1", func(t *testing.T, n int) string {
		return floodZone(t, n, 1)
	}},
	{"DNSBomb: queries of a stranger's address", "unanswered queries; how many are answered in the end", 200, "200", "200", func(t *testing.T, n int) string {
		return pulse(t, n, false)
	}},
	{"DNSBomb: with a cookie", "unanswered queries; how many are answered in the end", 2000, "2000", "2000", func(t *testing.T, n int) string {
		return pulse(t, n, true)
	}},
	{"fan-in: fetches of one question", "fetches under way that two hundred clients wait for", 1, "200 answers, 1 question", "400 answers, 2 questions", func(t *testing.T, n int) (out string) {
		slowly(t, time.Second, nil, func(l *lab) {
			l.sim.ResetLog()
			got := crowd(l, 200*n, func(i int) string { return fmt.Sprintf("w%d.slow.lab.", i%n) }, dns.RcodeSuccess, nil)
			names := map[string]bool{}
			for _, e := range l.sim.Log() {
				names[strings.ToLower(e.Name)] = true
			}
			sends := 0
			for name := range names { // a late hedge is the same fetch
				if c := l.sim.Count(func(e siminternet.LogEntry) bool { return e.Is(name, dns.TypeA) }); c > 0 && c <= 3 {
					sends++
				}
			}
			out = fmt.Sprintf("%d answers, %d question", got, sends)
			if sends != 1 {
				out += "s"
			}
		})
		return out
	}},
	{"prefetch: the last tenth of the TTL", "seconds of a hundred gone; questions sent to refresh", 89, "0", "1", func(t *testing.T, n int) string {
		return prefetched(t, 100, 2, time.Duration(n)*time.Second+900*time.Millisecond)
	}},
	{"prefetch: the least TTL", "TTL in seconds; questions sent to refresh", 8, "0", "1", func(t *testing.T, n int) string {
		return prefetched(t, n, 2, time.Duration(n)*time.Second-time.Second/2)
	}},
	{"prefetch: the least popularity", "hits; questions sent to refresh", 1, "0", "1", func(t *testing.T, n int) string {
		return prefetched(t, 100, n, 95*time.Second)
	}},
	{"prefetch: refreshed at once", "names near their end that are asked for at once; questions under way to refresh them", 64, "64", "64", prefetchedAtOnce},
	{"wall clock: stale data is waited for", "tenths of a second until the answer is there, and half a one more; what a client gets that waits for it while there is stale data", 17, "198.51.100.2", "198.51.100.1", func(t *testing.T, n int) string {
		return beforeStale(t, time.Duration(n)*100*time.Millisecond+50*time.Millisecond)
	}},
	{"wall clock: a UDP client under pressure is answered until", "tenths of a second until the answer is there, and half a one more, with most places for waiting queries taken", 18, "120 answered", "0 answered", func(t *testing.T, n int) string {
		return pressed(t, 120, time.Duration(n)*100*time.Millisecond+50*time.Millisecond)
	}},
	{"wall clock: what pressure is", "queries that wait with 200 places, when the answer takes three seconds", 100, "100 answered", "0 answered", func(t *testing.T, n int) string {
		return pressed(t, n, 3*time.Second)
	}},
	{"total upstream queries: a joiner is charged", "fetches of one question at once; queries charged to all of them for one that is sent", 1, "1", "2", func(t *testing.T, n int) (out string) {
		slowServer(t, func(x *exchange.Exchange, sim *siminternet.Internet, a query.Ask) {
			var wg sync.WaitGroup
			charged := make([]int, n)
			for i := range n {
				wg.Go(func() {
					tree := query.NewTree(clock.Elapsed(), query.Budget{})
					whole := tree.Left()
					if _, err := x.Ask(context.Background(), tree, a); err != nil {
						t.Error(err)
					}
					charged[i] = whole - tree.Left()
				})
			}
			wg.Wait()
			sum := 0
			for _, c := range charged {
				sum += c
			}
			if sent := sentTo(sim); sent != 1 {
				t.Errorf("%d queries sent, want 1", sent)
			}
			out = some(sum)
		})
		return out
	}},
	{"RPZ import: size", "bytes of a policy zone", rpz.MaxBytes, "taken", "longer than", func(_ *testing.T, n int) string {
		return importZone(io.LimitReader(comments{}, int64(n)))
	}},
	{"RPZ import: time", "seconds that reading takes", 600, "taken", "not read within 10m0s", func(t *testing.T, n int) (out string) {
		synctest.Test(t, func(t *testing.T) { out = importZone(&slowText{n}) })
		return out
	}},
	{"RPZ import: records outside the zone", "of them; rules made and records dropped", 0, "1 rules, 0 dropped", "1 rules, 1 dropped", func(_ *testing.T, n int) string {
		text := "bad.example.rpz. CNAME .\n" + strings.Repeat("bad.example.org. CNAME .\n", n)
		rules, reports, err := rpz.Load([]rpz.Source{{Name: dnsname.MustParse("rpz."), Text: strings.NewReader(text), File: "zone"}}, 1)
		if err != nil {
			return err.Error()
		}
		if rules.Names(dnsname.MustParse("bad.example.org.")) {
			return "a record outside the zone is used"
		}
		return fmt.Sprintf("%d rules, %d dropped", reports[0].Rules, reports[0].Dropped)
	}},
	{"DS parent walk: extra probes", "labels below a signed zone of a name whose data lacks its signature; questions for DS on the way", 8, "8", "8", func(t *testing.T, n int) (out string) {
		name := strings.Repeat("l.", n-1) + "bare"
		z := siminternet.Zone{Name: "walk.example.", Servers: []netip.Addr{netip.MustParseAddr(victim1)}, Algorithm: dns.ECDSAP256SHA256,
			Records: name + " A 198.51.100.1", FaultAt: map[string]siminternet.Fault{name: siminternet.NoSignature}}
		withRecursor(t, zones{z}, "", nil, func(r *recursor) {
			if got := r.outcome(name+".walk.example.", dns.TypeA); !strings.HasPrefix(got, "SERVFAIL") {
				t.Error(got)
			}
			asked := map[string]bool{}
			for _, e := range r.sim.Log() {
				if e.Type == dns.TypeDS && dns.IsSubDomain("walk.example.", e.Name) && !strings.EqualFold(e.Name, "walk.example.") {
					asked[strings.ToLower(e.Name)] = true
				}
			}
			out = some(len(asked))
		})
		return out
	}},
}

// A comments is the text of comments without end.
type comments struct{}

func (comments) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	if len(p) > 0 {
		p[0], p[len(p)-1] = ';', '\n'
	}
	return len(p), nil
}

// A slowText is of comments, each of which takes a second to be read.
type slowText struct{ left int }

func (s *slowText) Read(p []byte) (int, error) {
	if s.left == 0 {
		return 0, io.EOF
	}
	s.left--
	time.Sleep(time.Second)
	return copy(p, ";\n"), nil
}

// importZone reads a policy zone and says why it cannot be used.
func importZone(text io.Reader) string {
	err := resolver.CheckPolicyZone(resolver.PolicyZone{Name: dnsname.MustParse("rpz."), File: "zone", Open: func() (io.ReadCloser, error) { return io.NopCloser(text), nil }})
	if err == nil {
		return "taken"
	}
	for _, known := range []string{"longer than", "not read within 10m0s"} {
		if strings.Contains(err.Error(), known) {
			return known
		}
	}
	return err.Error()
}

// prefetchedAtOnce makes n names due for a refresh, asks for all of them, and counts the questions that are then
// under way.
func prefetchedAtOnce(t *testing.T, n int) (out string) {
	var all zones // one for each name, so that no bound of a server is met first
	for i, a := range addressesOf(n) {
		all = append(all, zoneAt(fmt.Sprintf("pre%d.lab.", i), a.String(), "www 100 A 198.51.100.1"))
	}
	assault(t, all, nil, func(l *lab) {
		ask := func() {
			for i := range n {
				l.must(fmt.Sprintf("www.pre%d.lab.", i), dns.TypeA)
			}
		}
		begun := time.Now()
		ask()
		ask()
		ask()
		for _, a := range addressesOf(n) {
			l.behave(a.String(), siminternet.Behaviour{Silent: true})
		}
		time.Sleep(95*time.Second - time.Since(begun))
		l.sim.ResetLog()
		ask()
		synctest.Wait()
		names := map[string]bool{}
		for _, e := range l.sim.Log() {
			names[strings.ToLower(e.Name)] = true
		}
		out = some(len(names))
	})
	return out
}

// beforeStale asks for a name whose data has ended, when its server takes d to answer, and returns the address that
// the client gets: that of the stale data ends in 1. The server is known to be slow, so that it is waited for.
func beforeStale(t *testing.T, d time.Duration) (out string) {
	assault(t, zones{zoneAt("stale.lab.", victim1, "")}, stale(1800*time.Millisecond), func(l *lab) {
		var changed atomic.Bool
		l.hook(victim1, func(q siminternet.Query) *siminternet.Reply {
			name, typ := asked(q)
			if typ != dns.TypeA {
				return nil
			}
			r := say(q, true, 0, name+" 10 A 198.51.100.1", "", "")
			r.Delay = 300 * time.Millisecond
			if changed.Load() {
				r = say(q, true, 0, name+" 10 A 198.51.100.2", "", "")
				r.Delay = d
			}
			return r
		})
		l.must("w.stale.lab.", dns.TypeA)
		time.Sleep(time.Minute)
		changed.Store(true)
		m, err := l.exchangeFor("tcp", new(dns.Msg).SetQuestion("w.stale.lab.", dns.TypeA), 10*time.Second)
		if err != nil || len(m.Answer) == 0 {
			t.Fatal(err, m)
		}
		out = m.Answer[len(m.Answer)-1].(*dns.A).A.String()
	})
	return out
}

// pressed has n clients wait over UDP for one answer that takes d, at a resolver with 200 places for waiting queries,
// and counts those that get it.
func pressed(t *testing.T, n int, d time.Duration) (out string) {
	slowly(t, 0, limited(map[string]int64{"in_flight": 20}), func(l *lab) {
		l.hook(victim1, func(q siminternet.Query) *siminternet.Reply {
			name, _ := asked(q)
			r := say(q, true, 0, name+" CNAME x"+name, "", "")
			if strings.HasPrefix(name, "xx") {
				r = say(q, true, 0, name+" A 198.51.100.1", "", "")
			}
			r.Delay = d / 3
			return r
		})
		out = fmt.Sprintf("%d answered", crowd(l, n, func(int) string { return "w.slow.lab." }, dns.RcodeSuccess, nil))
	})
	return out
}

// slowServer runs f with an exchange and a question whose server takes a tenth of a second.
func slowServer(t *testing.T, f func(x *exchange.Exchange, sim *siminternet.Internet, a query.Ask)) {
	synctest.Test(t, func(t *testing.T) {
		sim := newInternet(t, zones{zoneAt("leaf.lab.", victim1, "www A 198.51.100.1")})
		network := siminternet.NewNetwork()
		defer network.Close()
		if err := sim.Attach(network); err != nil {
			t.Fatal(err)
		}
		defer sim.Close()
		sim.SetBehaviour(netip.MustParseAddr(victim1), siminternet.Behaviour{Delay: 100 * time.Millisecond})
		x := exchange.New(exchange.Options{Transport: resolver.Dialing(network.Dial)})
		defer x.Close()
		f(x, sim, query.Ask{Server: netip.AddrPortFrom(netip.MustParseAddr(victim1), 53), Name: dnsname.MustParse("www.leaf.lab."), Type: dns.TypeA, Class: 1, Timeout: time.Second})
	})
}

var refusing = zoneAt("refused.lab.", "192.0.2.77", "")

func minimised(t *testing.T, n int) string {
	name := strings.Repeat("l.", n-1) + "x.leaf.lab."
	return onRecursor(t, zones{zoneAt("leaf.lab.", victim1, strings.TrimSuffix(name, ".leaf.lab.")+" A 198.51.100.1")}, nil, nil, func(r *recursor) string {
		if got := rcode(name)(r); got != "NOERROR" {
			return got
		}
		return some(r.sim.Count(func(e siminternet.LogEntry) bool {
			return e.Server == netip.MustParseAddr(victim1) && dns.CountLabel(e.Name) > 2
		}))
	})
}

// floodZone asks for n names of a zone at once and counts those turned away.
func floodZone(t *testing.T, n, servers int) (out string) {
	z := siminternet.Zone{Name: "flood.lab.", Servers: addressesOf(servers), Records: "* A 198.51.100.1"}
	assault(t, zones{z}, nil, func(l *lab) {
		for i := range 40 { // the servers are known to take a second
			if i == 0 {
				for _, a := range z.Servers {
					l.sim.SetBehaviour(a, siminternet.Behaviour{Delay: time.Second})
				}
			}
			l.must(fmt.Sprintf("known%d.flood.lab.", i), dns.TypeA)
		}
		out = some(crowd(l, n, func(i int) string { return fmt.Sprintf("r%d.flood.lab.", i) }, dns.RcodeServerFailure, nil))
	})
	return out
}

// pulse sends n queries of one stranger that all wait, and counts the answers.
func pulse(t *testing.T, n int, cookie bool) (out string) {
	var slow zones // many, so that no bound of a zone or a server is met first
	for i, a := range addressesOf(25) {
		slow = append(slow, zoneAt(fmt.Sprintf("slow%d.lab.", i), a.String(), "* A 198.51.100.1"))
	}
	assault(t, slow, func(o *resolver.Options) {
		limited(map[string]int64{"client_rate": 4000})(o)
		o.Access.Unlimited = nil
	}, func(l *lab) {
		server := ""
		if cookie {
			m, err := l.ask("www.host.lab.", dns.TypeA, withCookie(""))
			if err != nil {
				t.Fatal(err)
			}
			for _, o := range m.IsEdns0().Option {
				if c, ok := o.(*dns.EDNS0_COOKIE); ok {
					server = c.Cookie[16:]
				}
			}
			if server == "" {
				out = "no server cookie"
				return
			}
		}
		for i, a := range addressesOf(len(slow)) {
			l.sim.SetBehaviour(a, siminternet.Behaviour{Delay: time.Second})
			l.must(fmt.Sprintf("known.slow%d.lab.", i), dns.TypeA)
		}
		var edit func(*dns.Msg)
		if cookie {
			edit = withCookie(server)
		}
		out = some(crowd(l, n, func(i int) string { return fmt.Sprintf("r%d.slow%d.lab.", i, i%len(slow)) }, dns.RcodeSuccess, edit))
	})
	return out
}

func withCookie(server string) func(*dns.Msg) {
	return func(m *dns.Msg) {
		o := m.IsEdns0()
		o.Option = append(o.Option, &dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0102030405060708" + server})
	}
}

// prefetched asks so many times for a name of the given TTL, once more when the given time has passed, and
// counts the questions that the last one made us send.
func prefetched(t *testing.T, ttl, hits int, passed time.Duration) (out string) {
	assault(t, zones{zoneAt("pre.lab.", victim1, fmt.Sprintf("www %d A 198.51.100.1", ttl))}, nil, func(l *lab) {
		for range hits + 1 {
			l.must("www.pre.lab.", dns.TypeA)
		}
		time.Sleep(passed)
		l.sim.ResetLog()
		l.must("www.pre.lab.", dns.TypeA)
		synctest.Wait()
		time.Sleep(200 * time.Millisecond)
		out = some(sentTo(l.sim, victim1))
	})
	return out
}
