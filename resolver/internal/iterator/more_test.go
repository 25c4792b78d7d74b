package iterator

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/exchange"
	"github.com/sluice-dns/sluice/resolver/internal/forward"
	"github.com/sluice-dns/sluice/resolver/internal/forward/upstream"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// B26: 30 % of packets are lost, both ways.
func TestPacketLoss(t *testing.T) {
	records := ""
	for i := range 50 {
		records += fmt.Sprintf("n%d A 198.51.100.1\n", i)
	}
	bubble(t, zones{leafZone("leaf.lab.", records)}, nil, func(r *rig) {
		for _, a := range r.Addrs() {
			b := r.BehaviourOf(a)
			b.Loss = 0.51 // 0.7 × 0.7 of the exchanges succeed
			r.SetBehaviour(a, b)
		}
		failed := 0
		for i := range 50 {
			start := now()
			if _, err := r.ask(ask(fmt.Sprintf("n%d.leaf.lab.", i), typeA)); err != nil {
				failed++
				t.Logf("n%d after %v: %v", i, now().Sub(start), err)
			}
		}
		if failed > 1 {
			t.Errorf("%d of 50 failed", failed)
		}
	})
}

// Two packets lost in a row cost two short timeouts, no more: the third question is sent, and does not wait
// for the second.
func TestTwoPacketsLost(t *testing.T) {
	bubble(t, zones{{Name: "one.lab.", Servers: servers(s1), Records: "* A 198.51.100.1"}}, nil, func(r *rig) {
		for i := range 20 {
			r.ask(ask(fmt.Sprintf("a%d.one.lab.", i), typeA))
		}
		n := 0
		r.hook(s1, func(q siminternet.Query) *siminternet.Reply {
			if n++; n <= 2 {
				return &siminternet.Reply{}
			}
			return nil
		})
		start := now()
		r.want("b.one.lab.", typeA, "NOERROR", "b.one.lab. A 198.51.100.1")
		if d := now().Sub(start); d > 500*time.Millisecond {
			t.Errorf("after %v:\n%s", d, r.log())
		}
	})
}

// A single server whose round-trip time grows far beyond its estimate is waited for.
func TestServerGetsSlower(t *testing.T) {
	bubble(t, zones{{Name: "one.lab.", Servers: servers(s1), Records: "* A 198.51.100.1"}}, nil, func(r *rig) {
		for i := range 20 {
			r.want(fmt.Sprintf("a%d.one.lab.", i), typeA, "NOERROR", fmt.Sprintf("a%d.one.lab. A 198.51.100.1", i))
		}
		r.behave(s1, siminternet.Behaviour{Delay: 1200 * time.Millisecond})
		r.ResetLog()
		r.want("b.one.lab.", typeA, "NOERROR", "b.one.lab. A 198.51.100.1")
		if n := r.sent(nil); n > 3 {
			t.Errorf("%d questions:\n%s", n, r.log())
		}
	})
}

// The second server is asked when patience with the first ends, and whoever answers first is believed.
func TestLateHedge(t *testing.T) {
	bubble(t, zones{leafZone("leaf.lab.", "* A 198.51.100.2")}, nil, func(r *rig) {
		for i := range 10 {
			r.ask(ask(fmt.Sprintf("w%d.leaf.lab.", i), typeA)) // both servers are known to be fast
		}
		r.behave(s1, siminternet.Behaviour{Silent: true})
		for i := range 10 {
			start := now()
			r.want(fmt.Sprintf("h%d.leaf.lab.", i), typeA, "NOERROR", fmt.Sprintf("h%d.leaf.lab. A 198.51.100.2", i))
			if d := now().Sub(start); d > 200*time.Millisecond {
				t.Errorf("%d: %v", i, d)
			}
		}
		if n := r.sent(to(ip(s1))); n > 20 {
			t.Errorf("the dead server got %d questions", n)
		}
	})
}

// A dead server is found again once it is back.
func TestDeadServerComesBack(t *testing.T) {
	bubble(t, zones{{Name: "one.lab.", Servers: servers(s1), Records: "* A 198.51.100.1"}}, nil, func(r *rig) {
		r.behave(s1, siminternet.Behaviour{Silent: true})
		for i := range 30 {
			r.fails(fmt.Sprintf("d%d.one.lab.", i), typeA, "one.lab.")
			time.Sleep(10 * time.Second)
		}
		r.behave(s1, siminternet.Behaviour{})
		time.Sleep(15 * time.Minute)
		r.want("b.one.lab.", typeA, "NOERROR", "b.one.lab. A 198.51.100.1")
	})
}

func TestQuestionsOfOtherKinds(t *testing.T) {
	bubble(t, nil, nil, func(r *rig) {
		// The DS of a zone is asked of its parent, though the child is known (E45, E46); the root has none (E47).
		r.want("www.ecdsa.com.", typeA, "NOERROR", "www.ecdsa.com. A 198.18.0.2")
		r.forgetSets()
		out, err := r.ask(ask("ecdsa.com.", dnswire.TypeDS))
		if err != nil || len(out.Answer) != 1 || out.Zone != dnsname.MustParse("com.") {
			t.Errorf("DS: %v, %q in %v", err, answerText(out), out.Zone)
		}
		out, err = r.ask(ask("root-servers.net.", dnswire.TypeDS))
		if err != nil || len(out.Answer) != 0 || len(out.Authority) == 0 || out.Authority[0].Name != dnsname.MustParse("net.") {
			t.Errorf("DS of root-servers.net.: %v, %+v", err, out)
		}
		r.want(".", dnswire.TypeDS, "NOERROR")
		// The referral told the DS already, or that there is none.
		r.want("www.unsigned.org.", typeA, "NOERROR", "www.unsigned.org. A 198.18.5.2")
		r.ResetLog()
		q := ask("unsigned.org.", dnswire.TypeDS)
		q.CD = true // as a validator asks
		if out, err := r.ask(q); err != nil || r.sent(nil) != 0 || len(out.Authority) == 0 {
			t.Errorf("a DS that a referral denied: %v, %+v\n%s", err, out.Authority, r.log())
		}
		// A client wants the SOA record too, which no referral has.
		q.CD = false
		if out, err := r.ask(q); err != nil || r.sent(nil) != 1 || out.Authority[0].Type != dnswire.TypeSOA {
			t.Errorf("a DS that a referral denied: %v, %+v\n%s", err, out.Authority, r.log())
		}

		// ANY is answered by one RRset, whether the cache has one or not.
		for range 2 {
			out, err = r.ask(ask("www.ed25519.example.", dnswire.TypeANY))
			if err != nil || len(out.Answer) != 1 {
				t.Errorf("ANY: %v, %q", err, answerText(out))
			}
		}
		r.want("nothing.ed25519.example.", dnswire.TypeANY, "NXDOMAIN")
		out, err = r.ask(ask("www.ed25519.example.", dnswire.TypeRRSIG))
		if err != nil || len(out.Answer) != 1 || out.Answer[0].Type != dnswire.TypeRRSIG {
			t.Errorf("RRSIG: %v, %q", err, answerText(out))
		}

		// Neither other classes nor meta types are resolved.
		for _, q := range []query.Question{
			{Name: "\x01a\x00", Type: typeA, Class: dnswire.ClassCH}, {Name: "\x01a\x00", Type: typeA, Class: dnswire.ClassANY},
			{Name: "\x01a\x00", Type: dnswire.TypeAXFR, Class: 1}, {Name: "\x01a\x00", Type: dnswire.TypeOPT, Class: 1}, {Type: typeA, Class: 1},
		} {
			if _, err := r.ask(q); err == nil {
				t.Errorf("%+v is resolved", q)
			}
		}
	})
}

// forgetSets empties the cache but keeps what is known of servers.
func (r *rig) forgetSets() { r.opts.RRsets.Clear(); r.ResetLog() }

// pool returns the resolver at an address as a forward zone has it.
func pool(o *Options, addr string) Forwarder { return &lazyPool{o: o, addr: addr} }

// A lazyPool is made when it is used: the exchange is not there before.
type lazyPool struct {
	o    *Options
	addr string
	once sync.Once
	pool *forward.Pool
}

func (l *lazyPool) Forward(ctx context.Context, tree *query.Tree, a query.Ask, avoid []netip.AddrPort) (query.Reply, netip.AddrPort, error) {
	l.once.Do(func() {
		spec := forward.Spec{Upstreams: []forward.Upstream{{Spec: upstream.Spec{Addr: netip.AddrPortFrom(ip(l.addr), 53)}}}}
		var err error
		if l.pool, err = forward.New(spec, forward.Options{Options: upstream.Options{Exchange: l.o.Exchange}}); err != nil {
			panic(err)
		}
	})
	return l.pool.Forward(ctx, tree, a, avoid)
}

// Stub and forward zones, in the public tree and in a view.
func TestConfiguredZones(t *testing.T) {
	corp := siminternet.Zone{Name: "corp.internal.", Servers: servers(s1), Records: "www A 10.0.0.1\nout CNAME www.ecdsa.com.\nsub NS ns.sub\nns.sub A " + s2}
	sub := siminternet.Zone{Name: "sub.corp.internal.", NameServers: []siminternet.NameServer{{Name: "ns.sub.corp.internal.", Addrs: servers(s2)}}, Records: "www A 10.0.0.2"}
	port := func(a string) []netip.AddrPort { return []netip.AddrPort{netip.AddrPortFrom(ip(a), 53)} }
	internal := siminternet.Zone{Name: "internal.", Servers: servers(s4), Records: "@ TXT public"}
	bubble(t, zones{corp, sub, internal}, func(o *Options) {
		o.Zones = []Zone{
			{Name: dnsname.MustParse("corp.internal."), Servers: port(s1)},
			{Name: dnsname.MustParse("fwd.example."), Forward: pool(o, s3)},
			{Name: dnsname.MustParse("ecdsa.com."), Forward: pool(o, s3), View: 3},
			{Name: dnsname.MustParse("first.example."), Forward: pool(o, "192.0.2.200"), First: true},
		}
	}, func(r *rig) {
		// A server that refuses the root still lets the stub's zone be resolved, and what it delegates.
		r.want("www.corp.internal.", typeA, "NOERROR", "www.corp.internal. A 10.0.0.1")
		r.want("www.sub.corp.internal.", typeA, "NOERROR", "www.sub.corp.internal. A 10.0.0.2")
		r.want("nx.corp.internal.", typeA, "NXDOMAIN")
		r.want("out.corp.internal.", typeA, "NOERROR", "out.corp.internal. CNAME www.ecdsa.com.", "www.ecdsa.com. A 198.18.0.2")
	})
	forwarder := siminternet.Zone{Name: "holder.lab.", Servers: servers(s3)}
	bubble(t, zones{forwarder}, func(o *Options) {
		o.Zones = []Zone{
			{Name: dnsname.MustParse("fwd.example."), Forward: pool(o, s3)},
			{Name: dnsname.MustParse("ecdsa.com."), Forward: pool(o, s3), View: 3},
			{Name: dnsname.MustParse("rsa.org."), Forward: pool(o, "192.0.2.200"), First: true},
		}
	}, func(r *rig) {
		r.hook(s3, func(q siminternet.Query) *siminternet.Reply {
			if !q.Msg.RecursionDesired || !q.Msg.CheckingDisabled {
				return say(q, false, 5, "", "", "")
			}
			name := strings.Fields(asked(q))[0]
			if strings.HasPrefix(name, "nx") {
				return say(q, false, 3, "", "", "")
			}
			if strings.HasPrefix(name, "alias") {
				return say(q, false, 0, name+" CNAME www.ecdsa.com.\nwww.ecdsa.com. A 203.0.113.66", "com. NS ns.evil.lab.", "")
			}
			return say(q, false, 0, name+" A 10.9.9.9", "fwd.example. NS ns.evil.lab.", "ns.evil.lab. A 203.0.113.66")
		})
		r.want("a.b.c.fwd.example.", typeA, "NOERROR", "a.b.c.fwd.example. A 10.9.9.9")
		if n := r.sent(nil); n != 1 {
			t.Errorf("%d questions:\n%s", n, r.log())
		}
		r.want("nx.fwd.example.", typeA, "NXDOMAIN")
		// What a forwarder says is believed within its zone, and delegates nothing.
		r.want("alias.fwd.example.", typeA, "NOERROR", "alias.fwd.example. CNAME www.ecdsa.com.", "www.ecdsa.com. A 198.18.0.2")
		if zone, _, _, ok := r.opts.RRsets.Delegation(dnsname.MustParse("x.fwd.example."), 0, now()); ok && zone == dnsname.MustParse("fwd.example.") {
			t.Error("a forwarder delegated a zone")
		}
		// Another view is another tree, in the cache too.
		q := ask("www.ecdsa.com.", typeA)
		q.View = 3
		if out, err := r.ask(q); err != nil || answerText(out)[0] != "www.ecdsa.com. A 10.9.9.9" {
			t.Errorf("in the view: %v, %q", err, answerText(out))
		}
		r.want("www.ecdsa.com.", typeA, "NOERROR", "www.ecdsa.com. A 198.18.0.2")
		// Forward first: iterated when the forwarder is dead.
		r.want("www.rsa.org.", typeA, "NOERROR", "www.rsa.org. A 198.18.2.1")
	})
}

// Again asks, though the cache knows, and elsewhere if told so.
func TestAgain(t *testing.T) {
	bubble(t, zones{leafZone("leaf.lab.", "")}, nil, func(r *rig) {
		out, err := r.ask(ask("www.leaf.lab.", typeA))
		if err != nil || len(out.Servers) != 1 || out.Cached {
			t.Fatalf("%v, %+v", err, out)
		}
		again, err := r.it.Again(context.Background(), query.NewTree(now(), query.Budget{}), ask("www.leaf.lab.", typeA), out.Servers)
		if err != nil || len(again.Servers) != 1 || again.Servers[0] == out.Servers[0] {
			t.Errorf("%v; asked %v, then %v", err, out.Servers, again.Servers)
		}
		out, err = r.ask(ask("www.leaf.lab.", typeA))
		if err != nil || !out.Cached || len(out.Servers) != 0 || out.Zone != dnsname.MustParse("leaf.lab.") {
			t.Errorf("from the cache: %v, %+v", err, out)
		}
	})
}

// A38 and RFC 8109: priming, with and without addresses in the answer, and when the hints are all that works.
// Priming is repeated when its answer has expired, unless once is enough.
func TestPrimingAgain(t *testing.T) {
	for _, once := range []bool{false, true} {
		bubble(t, nil, func(o *Options) { o.Prime, o.PrimeOnce = true, once }, func(r *rig) {
			r.want("www.rsa.org.", typeA, "NOERROR", "www.rsa.org. A 198.18.2.1")
			time.Sleep(8 * 24 * time.Hour)
			r.want("www.host.lab.", typeA, "NOERROR", "www.host.lab. A 198.18.5.5")
			primes, want := r.sent(func(e siminternet.LogEntry) bool { return e.Is(".", dns.TypeNS) }), 2
			if once {
				want = 1
			}
			if primes != want {
				t.Errorf("once %v: %d priming questions", once, primes)
			}
		})
	}
}

func TestPriming(t *testing.T) {
	for _, c := range []struct {
		name string
		b    func(q siminternet.Query) *siminternet.Reply
	}{
		{"good", func(q siminternet.Query) *siminternet.Reply { return nil }},
		{"no addresses", func(q siminternet.Query) *siminternet.Reply {
			if asked(q) == ". NS" {
				m := q.Answer()
				m.Extra = nil
				return &siminternet.Reply{Msg: m}
			}
			return nil
		}},
		{"refused", func(q siminternet.Query) *siminternet.Reply {
			if asked(q) == ". NS" {
				return say(q, false, 5, "", "", "")
			}
			return nil
		}},
		{"other servers", func(q siminternet.Query) *siminternet.Reply {
			if asked(q) == ". NS" {
				return say(q, true, 0, ". NS new.example.", "", "new.example. A 127.53.0.2\nevil.example. A 203.0.113.66")
			}
			return nil
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, nil, func(o *Options) { o.Prime = true }, func(r *rig) {
				r.hook("127.53.0.1", c.b)
				r.hook("127.53.0.2", c.b)
				r.want("www.rsa.org.", typeA, "NOERROR", "www.rsa.org. A 198.18.2.1")
				r.want("www.host.lab.", typeA, "NOERROR", "www.host.lab. A 198.18.5.5")
				primes := r.sent(func(e siminternet.LogEntry) bool { return e.Is(".", dns.TypeNS) })
				if primes < 1 || primes > 2 {
					t.Errorf("%d priming questions", primes)
				}
			})
		})
	}
}

// Many questions at once, some the same: for the race detector, and for goroutines left behind.
func TestConcurrent(t *testing.T) {
	bubble(t, nil, func(o *Options) { o.Prime = true }, func(r *rig) {
		var wg sync.WaitGroup
		for i, e := range siminternet.Expect() {
			for range 3 {
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+i%5)*100*time.Millisecond)
					defer cancel()
					if i%2 == 0 {
						ctx = context.Background()
					}
					out, err := r.it.Resolve(ctx, query.NewTree(now(), query.Budget{}), ask(e.Name, e.Type))
					if err != nil {
						if i%2 == 0 {
							t.Errorf("%s: %v", e.Name, err)
						}
						return
					}
					got := answerText(out)
					slices.Sort(got)
					if !slices.Equal(got, e.Answer) {
						t.Errorf("%s: %q", e.Name, got)
					}
				})
			}
		}
		wg.Wait()
	})
}

func TestMinimiser(t *testing.T) {
	steps := func(zone, name string) (out []string) {
		m := minimiser{zone: dnsname.MustParse(zone), name: dnsname.MustParse(name), at: dnsname.MustParse(zone)}
		for range 130 {
			m.step()
			out = append(out, m.at.String())
			if m.at == m.name {
				return out
			}
		}
		t.Fatal("no end")
		return nil
	}
	for _, c := range []struct{ zone, name, want string }{
		{".", "a.b.c.", "c. b.c. a.b.c."},
		{"c.", "c.", "c."},
		{"c.", "_443._tcp.www.c.", "www.c. _443._tcp.www.c."},
		{"c.", "_dmarc.c.", "_dmarc.c."},
		{"ip6.arpa.", strings.Repeat("1.", 32) + "ip6.arpa.", "8 12 14 16 32"},
		{".", strings.Repeat("l.", 127), "1 2 3 4 25 46 67 87 107 127"},
		{".", strings.Repeat("l.", 11), "1 2 3 4 6 7 8 9 10 11"},
	} {
		got := steps(c.zone, c.name)
		if c.want[0] >= '0' && c.want[0] <= '9' {
			for i, n := range got {
				l := dnsname.MustParse(n).Labels()
				if c.zone == "ip6.arpa." {
					l -= 2
				}
				got[i] = fmt.Sprint(l)
			}
		}
		if g := strings.Join(got, " "); g != c.want {
			t.Errorf("%s from %s: %s, want %s", c.name, c.zone, g, c.want)
		}
	}
}

func TestHints(t *testing.T) {
	if h := DefaultHints(); len(h) != 13 || len(newHintSet(h).all) != 26 {
		t.Errorf("%d built-in servers", len(h))
	}
	h, err := ParseHints(". 3600 IN NS a.root.\n. NS b.root.\na.root. A 192.0.2.1\na.root. AAAA 2001:db8::1\nb.root. A 192.0.2.2\nc.root. A 192.0.2.3\n", "f")
	if err != nil || len(h) != 2 || len(h[0].Addrs) != 2 || h[1].Addrs[0] != ip("192.0.2.2") {
		t.Errorf("%v, %v", h, err)
	}
	many := ""
	for i := range maxHints + 1 {
		many += fmt.Sprintf(". NS a%d.\na%d. A 192.0.2.1\n", i, i)
	}
	for _, bad := range []string{
		"", ". NS a.root.", "a.root. A 192.0.2.1", "x NS", ". NS a.\na. A 1.2.3", ". CH NS a.\na. IN A 192.0.2.1",
		". NS a.\na. A 0.0.0.0", ". NS a.\na. A 224.0.0.1", ". NS a.\na. A 255.255.255.255", ". NS a.\na. AAAA ::", many,
	} {
		if _, err := ParseHints(bad, "hints.txt"); err == nil || !strings.Contains(err.Error(), "hints.txt") {
			t.Errorf("%.80q: %v", bad, err)
		}
	}
}

func TestClassify(t *testing.T) {
	const soa = "leaf.lab. SOA a. b. 1 2 3 4 5"
	sig := func(name, typ string) string {
		return fmt.Sprintf("\n%s RRSIG %s 13 %d 60 20300101000000 20200101000000 1 leaf.lab. AAAA", name, typ, dns.CountLabel(name))
	}
	for _, c := range []struct {
		name                          string
		aa                            bool
		rcode                         int
		answer, authority, additional string
		typ                           uint16
		want                          string // kind, then child or last name, then w if weak
	}{
		{"answer", true, 0, "a.leaf.lab. A 192.0.2.1", "", "", typeA, "answer a.leaf.lab."},
		{"from a cache", false, 0, "a.leaf.lab. A 192.0.2.1", "", "", typeA, "answer a.leaf.lab. w"},
		{"NODATA", true, 0, "", soa, "", typeA, "NODATA a.leaf.lab."},
		{"NXDOMAIN", true, 3, "", soa, "", typeA, "NXDOMAIN a.leaf.lab."},
		{"NXDOMAIN without SOA", true, 3, "", "", "", typeA, "NXDOMAIN a.leaf.lab."},
		{"NXDOMAIN without SOA and authority", false, 3, "", "", "", typeA, "failed a.leaf.lab. w"},
		{"SOA of the parent", true, 0, "", "lab. SOA a. b. 1 2 3 4 5", "", typeA, "empty a.leaf.lab."},
		{"SOA of a sibling", true, 0, "", "b.leaf.lab. SOA a. b. 1 2 3 4 5", "", typeA, "empty a.leaf.lab."},
		{"SOA of the child, for DS", true, 0, "", "a.leaf.lab. SOA a. b. 1 2 3 4 5", "", dnswire.TypeDS, "empty a.leaf.lab."},
		{"referral", false, 0, "", "a.leaf.lab. NS x.", "", typeA, "referral a.leaf.lab. w"},
		{"referral with AA", true, 0, "", "a.leaf.lab. NS x.", "", typeA, "referral a.leaf.lab."},
		{"referral for DS", false, 0, "", "a.leaf.lab. NS x.", "", dnswire.TypeDS, "empty a.leaf.lab. w"},
		{"referral twice", false, 0, "", "a.leaf.lab. NS x.\nleaf.lab. NS x.", "", typeA, "lame a.leaf.lab. w"},
		{"upwards", false, 0, "", ". NS x.", "", typeA, "lame a.leaf.lab. w"},
		{"to the parent", true, 0, "", "lab. NS x.", "", typeA, "lame a.leaf.lab."},
		{"to itself", false, 0, "", "leaf.lab. NS x.", "", typeA, "lame a.leaf.lab. w"},
		{"own NS beside NODATA", true, 0, "", "leaf.lab. NS x.", "", typeA, "empty a.leaf.lab."},
		{"sideways", false, 0, "", "b.leaf.lab. NS x.", "", typeA, "lame a.leaf.lab. w"},
		{"too deep", false, 0, "", "x.a.leaf.lab. NS x.", "", typeA, "lame a.leaf.lab. w"},
		{"alias", true, 0, "a.leaf.lab. CNAME x.", "", "", typeA, "alias x."},
		{"alias within, and the target", true, 0, "a.leaf.lab. CNAME b.leaf.lab.\nb.leaf.lab. A 192.0.2.1", "", "", typeA, "alias b.leaf.lab."},
		{"alias within, and the target, signed", true, 0, "a.leaf.lab. CNAME b.leaf.lab.\nb.leaf.lab. A 192.0.2.1" + sig("b.leaf.lab.", "A"), "", "", typeA, "answer b.leaf.lab."},
		{"alias within, and the target, signed by another", true, 0, "a.leaf.lab. CNAME b.leaf.lab.\nb.leaf.lab. A 192.0.2.1" + strings.Replace(sig("b.leaf.lab.", "A"), " leaf.lab.", " b.leaf.lab.", 1), "", "", typeA, "alias b.leaf.lab."},
		{"alias within", true, 0, "a.leaf.lab. CNAME b.leaf.lab.", "", "", typeA, "alias b.leaf.lab."},
		{"alias within, to nothing", true, 3, "a.leaf.lab. CNAME b.leaf.lab.", soa, "", typeA, "alias b.leaf.lab."},
		{"alias within, to nothing, signed", true, 3, "a.leaf.lab. CNAME b.leaf.lab.", soa + sig("leaf.lab.", "SOA"), "", typeA, "NXDOMAIN b.leaf.lab."},
		{"alias within, NODATA, signed", true, 0, "a.leaf.lab. CNAME b.leaf.lab.", soa + sig("leaf.lab.", "SOA"), "", typeA, "alias b.leaf.lab."},
		{"alias within, NXDOMAIN without SOA", true, 3, "a.leaf.lab. CNAME b.leaf.lab.", "", "", typeA, "alias b.leaf.lab."},
		{"alias within, NXDOMAIN from a cache", false, 3, "a.leaf.lab. CNAME b.leaf.lab.", soa, "", typeA, "alias b.leaf.lab. w"},
		{"alias outside, NXDOMAIN", true, 3, "a.leaf.lab. CNAME x.\nx. A 192.0.2.1", soa, "", typeA, "alias x."},
		{"loop", true, 0, "a.leaf.lab. CNAME b.leaf.lab.\nb.leaf.lab. CNAME a.leaf.lab.", "", "", typeA, "alias b.leaf.lab."},
		{"loop, signed", true, 0, "a.leaf.lab. CNAME b.leaf.lab.\nb.leaf.lab. CNAME a.leaf.lab." + sig("b.leaf.lab.", "CNAME"), "", "", typeA, "alias a.leaf.lab."},
		{"the alias itself", true, 0, "a.leaf.lab. CNAME x.", "", "", dnswire.TypeCNAME, "answer a.leaf.lab."},
		{"DNAME at the name", true, 0, "a.leaf.lab. DNAME x.", "", "", typeA, "empty a.leaf.lab."},
		{"DNAME", true, 0, "leaf.lab. DNAME x.", "", "", typeA, "alias a.x."},
		{"DNAME above", true, 0, "lab. DNAME x.", "", "", typeA, "empty a.leaf.lab."},
		{"REFUSED", true, 5, "a.leaf.lab. A 192.0.2.1", "", "", typeA, "lame a.leaf.lab."},
		{"SERVFAIL", true, 2, "a.leaf.lab. A 192.0.2.1", "", "", typeA, "failed a.leaf.lab."},
		{"YXDOMAIN", true, 6, "", "", "", typeA, "failed a.leaf.lab."},
		{"another class", true, 0, "a.leaf.lab. CH A 192.0.2.1", "", "", typeA, "empty a.leaf.lab."},
		{"nothing", false, 0, "", "", "", typeA, "empty a.leaf.lab. w"},
	} {
		q := new(dns.Msg).SetQuestion("a.leaf.lab.", c.typ)
		wire, err := say(siminternet.Query{Msg: q}, c.aa, c.rcode, c.answer, c.authority, c.additional).Msg.Pack()
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		m, err := query.ReadMessage(wire)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		r := classify(m, dnsname.MustParse("leaf.lab."), dnsname.MustParse("a.leaf.lab."), c.typ, false)
		got := r.kind.String() + " " + r.last.String()
		if r.kind == kindReferral {
			got = "referral " + r.child.String()
		}
		if r.weak {
			got += " w"
		}
		if got != c.want {
			t.Errorf("%s: %s (%s), want %s", c.name, got, r.why, c.want)
		}
	}
}

// FuzzClassify reads any message as an answer to one of a few questions: nothing outside the zone, nothing
// that was not asked for, and always an end.
func FuzzClassify(f *testing.F) {
	add := func(zone, name string, build func(m *dns.Msg)) {
		m := new(dns.Msg).SetQuestion(name, dns.TypeA)
		m.Response = true
		build(m)
		wire, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(wire, zone, name, uint16(dns.TypeA), false)
	}
	rr := func(s string) dns.RR {
		r, err := dns.NewRR(s)
		if err != nil {
			f.Fatal(err)
		}
		return r
	}
	add("leaf.lab.", "a.leaf.lab.", func(m *dns.Msg) {
		m.Answer = []dns.RR{rr("a.leaf.lab. CNAME b.leaf.lab."), rr("b.leaf.lab. CNAME a.leaf.lab."), rr("b.leaf.lab. A 192.0.2.1")}
	})
	add("lab.", "a.leaf.lab.", func(m *dns.Msg) {
		m.Ns = []dns.RR{rr("leaf.lab. NS ns.leaf.lab."), rr("leaf.lab. DS 1 13 2 00"), rr("x. NSEC y. A")}
		m.Extra = []dns.RR{rr("ns.leaf.lab. A 192.0.2.1"), rr("other. A 192.0.2.1")}
	})
	add("lab.", "a.leaf.lab.", func(m *dns.Msg) { m.Answer = []dns.RR{rr("leaf.lab. DNAME x.leaf.lab.")} })
	add("lab.", "a.leaf.lab.", func(m *dns.Msg) { m.Rcode = 3; m.Ns = []dns.RR{rr("lab. SOA a. b. 1 2 3 4 5")} })
	f.Fuzz(func(t *testing.T, wire []byte, zoneText, nameText string, typ uint16, forwarder bool) {
		zone, err1 := dnsname.Parse(zoneText)
		name, err2 := dnsname.Parse(nameText)
		m, err3 := query.ReadMessage(wire)
		if err1 != nil || err2 != nil || err3 != nil || !name.IsWithin(zone) {
			return
		}
		r := classify(m, zone, name, typ, forwarder)
		if int(r.kind) >= len(kindNames) || len(r.chain) > 2*maxAliases+4 {
			t.Fatalf("kind %d, %d in the chain", r.kind, len(r.chain))
		}
		at := name
		for i := range r.chain {
			s := &r.chain[i]
			if !s.Name.IsWithin(zone) || s.Class != dnswire.ClassIN {
				t.Fatalf("%v %d in an answer of %v", s.Name, s.Type, zone)
			}
			switch {
			case s.Type == dnswire.TypeDNAME && at.Below(s.Name):
			case s.Name != at:
				t.Fatalf("%v stands where %v was to come", s.Name, at)
			case s.Type == dnswire.TypeCNAME && i < len(r.chain)-1:
				at = nameIn(dnswire.TypeCNAME, s.First())
			}
		}
		for i := range r.proof {
			if !r.proof[i].Name.IsWithin(zone) {
				t.Fatalf("%v in a proof of %v", r.proof[i].Name, zone)
			}
		}
		switch r.kind {
		case kindReferral:
			if !r.child.Below(zone) || !name.IsWithin(r.child) && !r.last.IsWithin(r.child) || r.ns.Type != dnswire.TypeNS || r.ns.Name != r.child {
				t.Fatalf("referral from %v to %v for %v", zone, r.child, name)
			}
			for i := range r.glue {
				if !bytes.Contains(r.ns.Data, []byte(r.glue[i].Name)) && !containsFolded(r.ns.Data, r.glue[i].Name) {
					t.Fatalf("glue for %v", r.glue[i].Name)
				}
			}
		case kindAnswer:
			if len(r.chain) == 0 {
				t.Fatal("an answer of nothing")
			}
		case kindNoData, kindNXDomain:
			if r.soa != nil && (!r.soa.Name.IsWithin(zone) || !r.last.IsWithin(r.soa.Name)) {
				t.Fatalf("SOA of %v about %v in %v", r.soa.Name, r.last, zone)
			}
		}
	})
}

func containsFolded(data []byte, name dnsname.Name) bool {
	for d := range query.RDatas(data) {
		if nameIn(dnswire.TypeNS, d) == name {
			return true
		}
	}
	return false
}

// What servers cannot do is remembered after it was seen twice, and spares the questions that found out.
func TestAbilitiesAreRemembered(t *testing.T) {
	for _, c := range []struct {
		name string
		b    siminternet.Behaviour
		edns bool // whether the question at the end has EDNS
	}{
		{"FORMERR to EDNS", siminternet.Behaviour{EDNS: siminternet.EDNSFormErr}, false},
		{"NOTIMP to EDNS", siminternet.Behaviour{EDNS: siminternet.EDNSNotImp}, false},
		{"drops EDNS", siminternet.Behaviour{EDNS: siminternet.EDNSDropped}, false},
		{"FORMERR to options", siminternet.Behaviour{EDNS: siminternet.EDNSBadOptions}, true},
		{"drops options", siminternet.Behaviour{EDNS: siminternet.EDNSDropsOptions}, true},
		{"lower case", siminternet.Behaviour{LowerCase: true}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, zones{{Name: "one.lab.", Servers: servers(s1), Records: "* A 198.51.100.1"}}, nil, func(r *rig) {
				r.behave(s1, c.b)
				for i := range 4 {
					r.ResetLog()
					r.want(fmt.Sprintf("a%d.one.lab.", i), typeA, "NOERROR", fmt.Sprintf("a%d.one.lab. A 198.51.100.1", i))
				}
				if log := r.Log(); len(log) != 1 || log[0].EDNS != c.edns {
					t.Errorf("the fourth question:\n%s", r.log())
				}
				time.Sleep(61 * time.Minute)
				r.behave(s1, siminternet.Behaviour{})
				r.want("b.one.lab.", typeA, "NOERROR", "b.one.lab. A 198.51.100.1")
				if log := r.Log(); !log[len(log)-1].EDNS || len(log[len(log)-1].Options) == 0 {
					t.Errorf("an hour later:\n%s", r.log())
				}
			})
		})
	}
}

// A family of addresses that does not work here is soon left alone, and the other is not, however many of its
// servers are dead.
func TestUnusableFamily(t *testing.T) {
	six := func(n int) netip.Addr { return ip(fmt.Sprintf("2001:db8::%d", n)) }
	var zs zones
	for i := range 30 {
		zs = append(zs, siminternet.Zone{Name: fmt.Sprintf("z%d.lab.", i), NameServers: []siminternet.NameServer{{Name: "ns", Addrs: []netip.Addr{six(i + 1), ip(fmt.Sprintf("192.0.2.%d", i+1))}}}, Records: "www A 198.51.100.1"})
	}
	bubble(t, zs, nil, func(r *rig) {
		r.net.Link = func(from, to netip.AddrPort) (time.Duration, bool) { return latency, to.Addr().Is6() }
		slow := 0
		for i := range 30 {
			start := now()
			r.want(fmt.Sprintf("www.z%d.lab.", i), typeA, "NOERROR", fmt.Sprintf("www.z%d.lab. A 198.51.100.1", i))
			if now().Sub(start) > 400*time.Millisecond {
				slow++
			}
		}
		if slow > 0 {
			t.Errorf("%d of 30 waited for IPv6", slow)
		}
		if r.it.doubtful(ipv4) {
			t.Error("IPv4 is given up")
		}
	})
	bubble(t, zs, nil, func(r *rig) { // no route
		var tried int
		r.opts.Exchange.(*exchange.Exchange).Close()
		r.opts.Exchange = exchange.New(exchange.Options{Transport: exchange.Dialing(func(ctx context.Context, network, address string) (net.Conn, error) {
			if netip.MustParseAddrPort(address).Addr().Is6() {
				tried++
				return nil, &net.OpError{Op: "dial", Net: network, Err: os.NewSyscallError("connect", syscall.ENETUNREACH)}
			}
			return r.net.Dial(ctx, network, address)
		})})
		r.it = New(r.opts)
		start := now()
		for i := range 30 {
			r.want(fmt.Sprintf("www.z%d.lab.", i), typeA, "NOERROR", fmt.Sprintf("www.z%d.lab. A 198.51.100.1", i))
		}
		if d := now().Sub(start); tried != 1 || d > 2*time.Second {
			t.Errorf("IPv6 was tried %d times; 30 names took %v", tried, d)
		}
		if _, blamed := r.opts.Servers.Look(now(), netip.AddrPortFrom(six(1), 53)); blamed {
			t.Error("a server is blamed for the lack of a route to it")
		}
	})
	bubble(t, zs, nil, func(r *rig) { // nothing but IPv4 exists, and its servers are dead
		for i := range 30 {
			r.behave(fmt.Sprintf("192.0.2.%d", i+1), siminternet.Behaviour{Silent: true})
		}
		r.net.Link = func(from, to netip.AddrPort) (time.Duration, bool) { return latency, to.Addr().Is6() }
		for i := range 10 {
			r.fails(fmt.Sprintf("www.z%d.lab.", i), typeA, "timed out")
		}
		if r.it.doubtful(ipv4) {
			t.Error("IPv4 is given up")
		}
	})
}

// UDP vanishes; TCP works.
func TestOnlyTCPWorks(t *testing.T) {
	bubble(t, zones{{Name: "one.lab.", Servers: servers(s1), Records: "* A 198.51.100.1"}}, nil, func(r *rig) {
		r.behave(s1, siminternet.Behaviour{Loss: 1})
		for i := range 4 {
			r.ResetLog()
			r.want(fmt.Sprintf("a%d.one.lab.", i), typeA, "NOERROR", fmt.Sprintf("a%d.one.lab. A 198.51.100.1", i))
		}
		if log := r.Log(); len(log) != 1 || log[0].Transport != siminternet.TCP {
			t.Errorf("the fourth question:\n%s", r.log())
		}
	})
}

func TestCached(t *testing.T) {
	bubble(t, zones{leafZone("leaf.lab.", "alias CNAME www.x.lab."), {Name: "x.lab.", Servers: servers(s3), Records: "www 60 A 198.51.100.5", NegativeTTL: 60}}, nil, func(r *rig) {
		r.opts.RRsets = rrcache.New(rrcache.Options{Bytes: 1 << 20, MaxStale: time.Hour})
		r.it = New(r.opts)
		if out, ok := r.it.Cached(ask("alias.leaf.lab.", typeA), 30); ok {
			t.Errorf("%q from nothing", answerText(out))
		}
		r.want("alias.leaf.lab.", typeA, "NOERROR", "alias.leaf.lab. CNAME www.x.lab.", "www.x.lab. A 198.51.100.5")
		r.want("nx.x.lab.", typeA, "NXDOMAIN")
		r.ResetLog()
		if out, ok := r.it.Cached(ask("alias.leaf.lab.", typeA), 0); !ok || out.Stale || len(out.Answer) != 2 {
			t.Errorf("%v, %q", ok, answerText(out))
		}
		time.Sleep(61 * time.Second)
		if _, ok := r.it.Cached(ask("alias.leaf.lab.", typeA), 0); ok {
			t.Error("stale data, though not asked for")
		}
		if out, ok := r.it.Cached(ask("alias.leaf.lab.", typeA), 30); !ok || !out.Stale || len(out.Answer) != 2 || out.Answer[1].TTL != 30 {
			t.Errorf("stale: %v, %+v", ok, out)
		}
		if out, ok := r.it.Cached(ask("nx.x.lab.", typeA), 30); !ok || !out.Stale || out.RCode != dnswire.RCodeNXDomain || out.Authority[0].TTL != 30 {
			t.Errorf("stale: %v, %+v", ok, out)
		}
		if n := r.sent(nil); n != 0 {
			t.Errorf("%d questions", n)
		}
	})
}

// A43, B25 and odd mixtures: some server is right.
func TestServersDisagree(t *testing.T) {
	bubble(t, zones{{Name: "mix.lab.", Servers: servers(s1, s2, s3, s4), Records: "www A 198.51.100.1"}}, nil, func(r *rig) {
		garbage := func(q siminternet.Query) *siminternet.Reply {
			if q.Msg.Question[0].Qtype == dns.TypeAAAA {
				return &siminternet.Reply{Raw: [][]byte{[]byte("\x00\x01 not a message at all")}}
			}
			return nil
		}
		r.hook(s1, garbage)
		r.hook(s2, garbage)
		r.hook(s3, func(q siminternet.Query) *siminternet.Reply {
			if q.Msg.Question[0].Qtype == dns.TypeAAAA {
				return say(q, false, dns.RcodeServerFailure, "", "", "")
			}
			return nil
		})
		for range 3 {
			r.forget()
			r.want("www.mix.lab.", typeAAAA, "NOERROR")
			r.want("www.mix.lab.", typeA, "NOERROR", "www.mix.lab. A 198.51.100.1")
		}
	})
}

// TTLs are those of the zone within the bounds of the cache, which keeps data within the parent's grant and says so;
// a denial's is the SOA record's MINIMUM (D01, D16, D32).
func TestTTLs(t *testing.T) {
	ttls := func(out query.Unvalidated) (all []uint32) {
		for _, s := range append(out.Answer, out.Authority...) {
			all = append(all, s.TTL)
		}
		return all
	}
	bubble(t, zones{
		{Name: "ttl.lab.", Servers: servers(s1), Records: "long 900000 A 198.51.100.1\nshort 5 A 198.51.100.1\nalias 7 CNAME long", TTL: 3600, NegativeTTL: 60},
	}, nil, func(r *rig) {
		r.hook("127.53.1.7", func(q siminternet.Query) *siminternet.Reply {
			m := q.Answer()
			for _, rr := range m.Ns {
				rr.Header().Ttl = 500
			}
			return &siminternet.Reply{Msg: m}
		})
		for _, c := range []struct {
			name string
			want []uint32 // at once, then after 3 s
		}{
			{"long", []uint32{86400, 86397}}, {"short", []uint32{5, 2}}, {"nx", []uint32{60, 57}}, {"alias", []uint32{7, 86400, 4, 86397}},
		} {
			r.forget()
			out, err := r.ask(ask(c.name+".ttl.lab.", typeA))
			time.Sleep(3 * time.Second)
			again, err2 := r.ask(ask(c.name+".ttl.lab.", typeA))
			if got := append(ttls(out), ttls(again)...); err != nil || err2 != nil || !again.Cached || !slices.Equal(got, c.want) {
				t.Errorf("%s: %v %v, TTLs %v, want %v", c.name, err, err2, got, c.want)
			}
			if left := again.Until.Sub(clock.Elapsed()); (again.Until != 0) != slices.Contains(c.want, 86397) || left > 500*time.Second {
				t.Errorf("%s: ends in %v", c.name, left)
			}
		}
	})
}

// A25 the other way: the parent's servers are dead, those that the child alone named are not.
func TestServersOfTheChildAlone(t *testing.T) {
	bubble(t, zones{leafZone("leaf.lab.", "www2 A 198.51.100.2"), {Name: "host.example.", Servers: servers(s3), Records: "ns A " + s4}, {Name: "four.lab.", Servers: servers(s4)}}, nil, func(r *rig) {
		own := func(q siminternet.Query) *siminternet.Reply {
			switch asked(q) {
			case "leaf.lab. NS":
				return say(q, true, 0, "leaf.lab. NS ns.host.example.", "", "")
			case "www2.leaf.lab. A":
				return say(q, true, 0, "www2.leaf.lab. A 198.51.100.2", "", "")
			}
			return nil
		}
		r.hook(s1, own)
		r.hook(s2, own)
		r.want("leaf.lab.", dnswire.TypeNS, "NOERROR", "leaf.lab. NS ns.host.example.")
		r.behave(s1, siminternet.Behaviour{Silent: true})
		r.behave(s2, siminternet.Behaviour{Silent: true})
		r.behave(s4, siminternet.Behaviour{Hook: own})
		r.ResetLog()
		r.want("www2.leaf.lab.", typeA, "NOERROR", "www2.leaf.lab. A 198.51.100.2")
	})
}

func TestFamilyNeedsTheOtherOneToBeDoubted(t *testing.T) {
	it := New(Options{})
	v4, v6 := ip("192.0.2.1"), ip("2001:db8::1")
	both := []netip.AddrPort{netip.AddrPortFrom(v4, 53), netip.AddrPortFrom(v6, 53)}
	at := now()
	choice := func() string {
		some, exploring := it.preferred(both, at)
		return fmt.Sprint(some, exploring)
	}
	check := func(what, want string) {
		t.Helper()
		if got := choice(); got != want {
			t.Errorf("%s: %s, want %s", what, got, want)
		}
	}
	four, six, all := fmt.Sprint(both[:1], false), fmt.Sprint(both[1:], true), fmt.Sprint(both, false)
	check("at first IPv6 is tried", six)
	check("and not again at once", four)
	it.familyFails(v6, at)
	check("after a failure", four)
	at = at.Add(exploreFirst)
	check("a second later", six)
	for range 20 {
		it.familyFails(v6, at)
	}
	at = at.Add(exploreMost - time.Second)
	check("after many failures", four)
	at = at.Add(time.Second)
	check("a minute later", six)
	if some, _ := it.preferred(both[1:], at); len(some) != 1 {
		t.Errorf("with nothing else: %v", some)
	}
	for range 50 {
		it.familyFails(v4, at)
	}
	if it.doubtful(ipv4) {
		t.Error("IPv4 is in doubt, though nothing says that IPv6 works")
	}
	it.familyWorks(v6, at)
	if check("IPv6 works, IPv4 does not", fmt.Sprint(both[1:], false)); !it.doubtful(ipv4) {
		t.Error("IPv4 is not in doubt, though IPv6 works")
	}
	it.familyWorks(v4, at)
	check("both work", all)
	it.familyGone(v6, at)
	check("no route", four)
	it.familyWorks(v6, at)
	check("a route again", all)
}

// A client subnet is told to the zone's servers alone, and an answer for one subnet is kept for it alone
// (RFC 7871).
func TestClientSubnet(t *testing.T) {
	for _, scope := range []uint8{24, 0} {
		t.Run(fmt.Sprintf("scope %d", scope), func(t *testing.T) {
			told := func(o *Options) {
				o.Told = func(zone dnsname.Name) bool { return zone.IsWithin(dnsname.MustParse("ecs.lab.")) }
			}
			bubble(t, zones{{Name: "ecs.lab.", Servers: servers(s1)}}, told, func(r *rig) {
				r.hook(s1, func(q siminternet.Query) *siminternet.Reply {
					for _, o := range q.Msg.IsEdns0().Option {
						if e, ok := o.(*dns.EDNS0_SUBNET); ok {
							m := say(q, true, 0, "www.ecs.lab. A "+e.Address.String(), "", "")
							m.Msg.IsEdns0().Option = append(m.Msg.IsEdns0().Option, &dns.EDNS0_SUBNET{
								Code: dns.EDNS0SUBNET, Family: e.Family, SourceNetmask: e.SourceNetmask, SourceScope: scope, Address: e.Address,
							})
							return m
						}
					}
					return say(q, true, 0, "www.ecs.lab. A 198.51.100.1", "", "")
				})
				in := func(third byte) query.Question {
					q := ask("www.ecs.lab.", typeA)
					q.Subnet = query.Subnet{Addr: [16]byte{203, 0, third, 0}, Family: 1, Bits: 24}
					return q
				}
				for _, third := range []byte{1, 2} {
					out, err := r.ask(in(third))
					want := fmt.Sprintf("www.ecs.lab. A 203.0.%d.0", third)
					if scope == 0 {
						want = "www.ecs.lab. A 203.0.1.0" // the first was for all
					}
					if err != nil || answerText(out)[0] != want || out.Cached != (scope == 0 && third > 1) {
						t.Errorf("%v, %q, want %s", err, answerText(out), want)
					}
					if out, err := r.ask(in(third)); err != nil || !out.Cached {
						t.Errorf("%v, asked again though known", err)
					}
				}
				for _, e := range r.Log() {
					if told := slices.Contains(e.Options, dns.EDNS0SUBNET); told != (e.Server == ip(s1)) {
						t.Errorf("%v asked for %s, subnet %v", e.Server, e.Name, told)
					}
				}
				r.ResetLog()
				out, err := r.ask(ask("www.ecs.lab.", typeA))
				switch {
				case err != nil:
					t.Error(err)
				case scope > 0 && answerText(out)[0] != "www.ecs.lab. A 198.51.100.1":
					t.Errorf("without subnet: %q", answerText(out))
				case scope == 0 && !out.Cached:
					t.Error("an answer for everybody is not shared")
				}
			})
		})
	}
}

// The addresses of a zone's servers that a referral brought serve the whole resolution, though its glue is not in the
// cache any more when an alias leads to another name of the zone: it had a TTL of 0, or was purged meanwhile.
func TestGlueGoneMeanwhile(t *testing.T) {
	for _, purged := range []bool{false, true} {
		t.Run(fmt.Sprint("purged=", purged), func(t *testing.T) {
			bubble(t, zones{{Name: "one.lab.", Servers: servers(s1), Records: "a CNAME b\nb CNAME c\nc A 198.51.100.1"}}, nil, func(r *rig) {
				r.hook(s1, func(q siminternet.Query) *siminternet.Reply {
					if purged {
						r.opts.RRsets.Purge(dnsname.MustParse("ns1.one.lab."), false, 0)
					}
					m := q.Answer()
					m.Answer = m.Answer[:min(len(m.Answer), 1)]
					return &siminternet.Reply{Msg: m}
				})
				r.hook("127.53.1.7", func(q siminternet.Query) *siminternet.Reply {
					m := q.Answer()
					for _, rr := range m.Extra {
						if !purged && rr.Header().Rrtype == typeA {
							rr.Header().Ttl = 0
						}
					}
					return &siminternet.Reply{Msg: m}
				})
				r.want("a.one.lab.", typeA, "NOERROR", "a.one.lab. CNAME b.one.lab.", "b.one.lab. CNAME c.one.lab.", "c.one.lab. A 198.51.100.1")
				r.ResetLog()
				r.want("d.one.lab.", typeA, "NXDOMAIN") // the parent gives the glue again
				if n := r.sent(nil); n != 2 {
					t.Errorf("%d questions:\n%s", n, r.log())
				}
			})
		})
	}
}
