package siminternet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/internal/simnet"
)

// inBubble runs f against the Internet on an in-memory network and checks that nothing is left open.
func inBubble(t *testing.T, make func(now time.Time) *Internet, f func(*testing.T, *Internet, *simnet.Network)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := simnet.New()
		in := make(time.Now())
		if err := in.Attach(n); err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		f(t, in, n)
		in.Close()
		if open := n.Open(); open != 0 {
			t.Errorf("%d endpoints still open", open)
		}
	})
}

func askOver(n *simnet.Network) func(netip.Addr, Transport, *dns.Msg) (*dns.Msg, error) {
	return func(server netip.Addr, tr Transport, m *dns.Msg) (*dns.Msg, error) {
		c, err := n.Dial(context.Background(), tr.String(), netip.AddrPortFrom(server, 53).String())
		if err != nil {
			return nil, err
		}
		return exchange(c, m)
	}
}

// exchange asks over a connection and ignores responses that do not match.
func exchange(c net.Conn, m *dns.Msg) (*dns.Msg, error) {
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Second))
	conn := &dns.Conn{Conn: c, UDPSize: 4096}
	if err := conn.WriteMsg(m); err != nil {
		return nil, err
	}
	for {
		r, err := conn.ReadMsg()
		if err != nil {
			if ne, ok := err.(net.Error); ok && ne.Timeout() || c.RemoteAddr().Network() == "tcp" {
				return nil, err
			}
			continue // garbage
		}
		if r.Id == m.Id && r.Response && len(r.Question) == 1 && r.Question[0] == m.Question[0] {
			return r, nil
		}
	}
}

func newChecker(t *testing.T, in *Internet, ask func(netip.Addr, Transport, *dns.Msg) (*dns.Msg, error)) *checker {
	return &checker{
		t: t, now: in.now, ask: ask, anchor: in.TrustAnchorRecords("."), hints: in.Servers("."), trusted: make(map[string]*trust),
	}
}

// TestExpect resolves and validates every name of the table from the root down.
func TestExpect(t *testing.T) {
	inBubble(t, Standard, func(t *testing.T, in *Internet, n *simnet.Network) {
		checkExpectations(t, newChecker(t, in, askOver(n)), Expect())
	})
}

func checkExpectations(t *testing.T, c *checker, table []Expectation) {
	for _, want := range table {
		got := c.resolve(want.Name, want.Type)
		what := want.Name + " " + dns.Type(want.Type).String()
		if got.rcode != want.RCode {
			t.Errorf("%s: rcode %s, want %s", what, dns.RcodeToString[got.rcode], dns.RcodeToString[want.RCode])
		}
		if text := AnswerText(got.answer); !slices.Equal(text, want.Answer) {
			t.Errorf("%s: answer\n%s\nwant\n%s", what, strings.Join(text, "\n"), strings.Join(want.Answer, "\n"))
		}
		if got.status != want.Status {
			t.Errorf("%s: %v (%v), want %v", what, got.status, got.why, want.Status)
		}
	}
}

// TestLoopback does the same over sockets, without the servers that make one wait.
func TestLoopback(t *testing.T) {
	in := Standard(time.Now())
	port, err := in.ListenLoopback(0)
	if err != nil {
		t.Fatal(err)
	}
	c := newChecker(t, in, func(server netip.Addr, tr Transport, m *dns.Msg) (*dns.Msg, error) {
		conn, err := net.Dial(tr.String(), netip.AddrPortFrom(server, port).String())
		if err != nil {
			return nil, err
		}
		return exchange(conn, m)
	})
	in.SetBehaviour(leaf(20), Behaviour{Lame: LameServfail})
	in.SetBehaviour(leaf(22), Behaviour{Delay: time.Millisecond})
	checkExpectations(t, c, Expect())
	if err := in.Close(); err != nil {
		t.Error(err)
	}
	// The port is free again at every address.
	if err := in.listenPort(port); err != nil {
		t.Error(err)
	}
	in.Close()
}

// TestEveryDenialProvesItself asks every sound signed zone for names around each of its names, and checks that
// the response proves what it says.
func TestEveryDenialProvesItself(t *testing.T) {
	inBubble(t, Standard, func(t *testing.T, in *Internet, n *simnet.Network) {
		c := newChecker(t, in, askOver(n))
		asked := 0
		for name, z := range in.world.Load().zones {
			if z.zsk == nil || z.declared.Fault != 0 || z.declared.FaultAt != nil || z.declared.NoDS || name == "big.example." {
				continue
			}
			tr := c.trustOf(name)
			if tr.keys == nil {
				t.Fatalf("%s is not secure: %v", name, tr.bogus)
			}
			for owner := range z.nodes {
				for _, prefix := range []string{"", "0.", "zzz.", "x.y.", "*.", "a.*."} {
					for _, qtype := range []uint16{dns.TypeA, dns.TypeTXT, dns.TypeDS, dns.TypeNS, dns.TypeCNAME} {
						qname := dns.Fqdn(prefix + strings.TrimPrefix(owner, "."))
						if qname == name && qtype == dns.TypeDS {
							continue // the parent's business
						}
						m := c.query(z.servers, qname, qtype)
						if m == nil {
							t.Fatalf("%s does not answer for %s %s", name, qname, dns.Type(qtype))
						}
						asked++
						if !m.Authoritative { // a referral proves itself too
							if _, err := c.delegationSigner(tr, canonical(m.Ns[0].Header().Name), m.Ns); err != nil {
								t.Errorf("%s %s: referral: %v", qname, dns.Type(qtype), err)
							}
							continue
						}
						if status, err := c.judge(tr, m, qname, qtype); status == Bogus && in.sound(qname) {
							t.Errorf("%s %s: %v\n%v", qname, dns.Type(qtype), err, m)
						}
					}
				}
			}
		}
		if asked < 2000 {
			t.Errorf("asked %d questions only", asked)
		}
	})
}

// sound reports whether the zone of a name is without faults.
func (in *Internet) sound(name string) bool {
	z := in.world.Load().zoneAbove(canonical(name), false)
	return z.declared.Fault == 0 && z.declared.FaultAt == nil
}

// trustOf returns what the checker knows of a zone after resolving something in it.
func (c *checker) trustOf(zone string) *trust {
	_, tr := c.iterate(zone, dns.TypeSOA)
	return c.descend(tr, zone)
}

// TestResponses looks at header bits and sections of single responses.
func TestResponses(t *testing.T) {
	type response struct {
		name   string
		server string
		ask    string // name and type
		edit   func(*dns.Msg)
		tr     Transport
		want   string
	}
	do := func(m *dns.Msg) { m.SetEdns0(1232, true) }
	edns := func(m *dns.Msg) { m.SetEdns0(1232, false) }
	for _, c := range []response{
		{"referral", "127.53.0.1", "www.ecdsa.com. A", edns, UDP, "NOERROR 0 com./NS com./NS a.gtld-servers.net./A b.gtld-servers.net./A"},
		{"signed referral", "127.53.0.1", "www.ecdsa.com. A", do, UDP, "NOERROR 0 com./NS com./NS com./DS com./RRSIG a.gtld-servers.net./A b.gtld-servers.net./A"},
		{"unsigned referral of a signed zone", "127.53.1.5", "www.ads.example. A", do, UDP, "NOERROR 0 ads.example./NS ads.example./NSEC ads.example./RRSIG ns1.ads.example./A"},
		{"no glue across top-level domains", "127.53.1.1", "www.glueless.com. A", edns, UDP, "NOERROR 0 glueless.com./NS glueless.com./NS"},
		{"sibling glue", "127.53.1.5", "www.sibling.example. A", edns, UDP, "NOERROR 0 sibling.example./NS ns1.ed25519.example./A"},
		{"sibling glue withheld", "127.53.1.4", "www.noglue.org. A", edns, UDP, "NOERROR 0 noglue.org./NS"},
		{"priming", "127.53.0.2", ". NS", edns, UDP, "NOERROR aa 2 ./NS ./NS a.root-servers.net./A b.root-servers.net./A"},
		{"DS at the parent", "127.53.1.1", "ecdsa.com. DS", edns, UDP, "NOERROR aa 1 ecdsa.com./DS"},
		{"DS at the parent that serves both", "127.53.1.8", "18.198.in-addr.arpa. DS", edns, UDP, "NOERROR aa 1 18.198.in-addr.arpa./DS"},
		{"DS at the child alone", "127.53.2.3", "ecdsa.com. DS", edns, UDP, "NOERROR aa 0 ecdsa.com./SOA"},
		{"no signatures unless asked", "127.53.2.1", "nothing.ed25519.example. A", edns, UDP, "NXDOMAIN aa 0 ed25519.example./SOA"},
		{"case comes back", "127.53.2.1", "wWw.eD25519.EXAMPLE. AAAA", nil, UDP, "NOERROR aa 1 wWw.eD25519.EXAMPLE./AAAA"},
		{"additional addresses", "127.53.2.1", "ed25519.example. MX", nil, UDP, "NOERROR aa 1 ed25519.example./MX mail.ed25519.example./A"},
		{"another's zone", "127.53.2.1", "www.ecdsa.com. A", nil, UDP, "REFUSED 0"},
		{"another class", "127.53.2.1", "www.ed25519.example. A", func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }, UDP, "REFUSED 0"},
		{"transfer", "127.53.2.1", "ed25519.example. AXFR", nil, TCP, "REFUSED 0"},
		{"update", "127.53.2.1", "ed25519.example. SOA", func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate }, UDP, "NOTIMP 0"},
		{"two questions", "127.53.2.1", "ed25519.example. SOA", func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }, UDP, "FORMERR 0"},
		{"EDNS version", "127.53.2.1", "ed25519.example. SOA", func(m *dns.Msg) { m.SetEdns0(1232, false).IsEdns0().SetVersion(1) }, UDP, "BADVERS 0"},
		{"truncated", "127.53.2.30", "big.example. TXT", edns, UDP, "NOERROR aa tc 0"},
		{"whole over TCP", "127.53.2.30", "big.example. TXT", edns, TCP, "NOERROR aa 1 big.example./TXT"},
		{"512 without EDNS", "127.53.0.1", "www.ecdsa.com. A", func(m *dns.Msg) { m.Question[0].Name = "com."; m.Question[0].Qtype = dns.TypeNS }, UDP, "NOERROR 0 com./NS com./NS a.gtld-servers.net./A b.gtld-servers.net./A"},
		{"DNAME too long", "127.53.2.12", strings.Repeat(strings.Repeat("x", 56)+".", 4) + "s.dname.example. A", nil, UDP, "YXDOMAIN aa 1 s.dname.example./DNAME"},
		{"any", "127.53.2.4", "www.rsa.org. ANY", nil, UDP, "NOERROR aa 1 www.rsa.org./A"},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, Standard, func(t *testing.T, in *Internet, n *simnet.Network) {
				name, qtype, _ := strings.Cut(c.ask, " ")
				m := new(dns.Msg).SetQuestion(name, dns.StringToType[qtype])
				if c.edit != nil {
					c.edit(m)
				}
				r, err := rawExchange(n, netip.MustParseAddr(c.server), c.tr, m)
				if err != nil {
					t.Fatal(err)
				}
				if got := summary(r); got != c.want {
					t.Errorf("got  %s\nwant %s", got, c.want)
				}
				if r.IsEdns0() != nil != (m.IsEdns0() != nil) {
					t.Errorf("OPT in query and response disagree")
				}
			})
		})
	}
}

// rawExchange returns whatever comes back first.
func rawExchange(n *simnet.Network, server netip.Addr, tr Transport, m *dns.Msg) (*dns.Msg, error) {
	c, err := n.Dial(context.Background(), tr.String(), netip.AddrPortFrom(server, 53).String())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	conn := &dns.Conn{Conn: c, UDPSize: 4096}
	if err := conn.WriteMsg(m); err != nil {
		return nil, err
	}
	return conn.ReadMsg()
}

// summary writes a response as rcode, bits, number of answers, and the owners and types of all records. A big
// response that was cut is shown without the records that happened to fit.
func summary(r *dns.Msg) string {
	words := []string{dns.RcodeToString[r.Rcode]}
	if r.Rcode == dns.RcodeBadVers {
		words[0] = "BADVERS" // miekg calls it BADSIG
	}
	if r.Authoritative {
		words = append(words, "aa")
	}
	if r.Truncated {
		words = append(words, "tc")
	}
	words = append(words, fmt.Sprint(len(rrsets(r.Answer))))
	if r.Authoritative && hasType(r.Answer, dns.TypeNS) {
		words[len(words)-1] = fmt.Sprint(len(r.Answer))
	}
	for _, rr := range slices.Concat(r.Answer, r.Ns, r.Extra) {
		if rr.Header().Rrtype != dns.TypeOPT {
			words = append(words, rr.Header().Name+"/"+dns.Type(rr.Header().Rrtype).String())
		}
	}
	return strings.Join(words, " ")
}

// TestBehaviours sees each deviation once, from outside.
func TestBehaviours(t *testing.T) {
	server := leaf(1)
	question := func() *dns.Msg {
		m := new(dns.Msg).SetQuestion("www.ed25519.example.", dns.TypeAAAA)
		m.SetEdns0(1232, false)
		return m
	}
	withCookie := func(cookie string) *dns.Msg {
		m := question()
		m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: cookie}}
		return m
	}
	const good = "NOERROR aa 1 www.ed25519.example./AAAA"
	for _, c := range []struct {
		name  string
		b     Behaviour
		m     *dns.Msg
		tr    Transport
		want  string // summary or error
		after time.Duration
	}{
		{"good", Behaviour{}, question(), UDP, good, 0},
		{"slow", Behaviour{Delay: 700 * time.Millisecond}, question(), UDP, good, 700 * time.Millisecond},
		{"slow over TCP", Behaviour{Delay: 700 * time.Millisecond}, question(), TCP, good, 700 * time.Millisecond},
		{"silent", Behaviour{Silent: true}, question(), UDP, "timeout", 5 * time.Second},
		{"silent over TCP", Behaviour{Silent: true}, question(), TCP, "timeout", 5 * time.Second},
		{"loses all", Behaviour{Loss: 1}, question(), UDP, "timeout", 5 * time.Second},
		{"loses all but TCP", Behaviour{Loss: 1}, question(), TCP, good, 0},
		{"refused", Behaviour{Lame: LameRefused}, question(), UDP, "REFUSED 0", 0},
		{"servfail", Behaviour{Lame: LameServfail}, question(), UDP, "SERVFAIL 0", 0},
		{"upward", Behaviour{Lame: LameUpward}, question(), UDP, "NOERROR 0 ./NS ./NS", 0},
		{"unauthorised", Behaviour{Lame: LameUnauthorised}, question(), UDP, "NOERROR 1 www.ed25519.example./AAAA", 0},
		{"empty", Behaviour{Lame: LameEmpty}, question(), UDP, "NOERROR 0", 0},
		{"no EDNS", Behaviour{EDNS: EDNSFormErr}, question(), UDP, "FORMERR 0", 0},
		{"no EDNS, NOTIMP", Behaviour{EDNS: EDNSNotImp}, question(), UDP, "NOTIMP 0", 0},
		{"drops EDNS", Behaviour{EDNS: EDNSDropped}, question(), UDP, "timeout", 5 * time.Second},
		{"ignores EDNS", Behaviour{EDNS: EDNSIgnored}, question(), UDP, good, 0},
		{"no options, none sent", Behaviour{EDNS: EDNSBadOptions}, question(), UDP, good, 0},
		{"no options, one sent", Behaviour{EDNS: EDNSBadOptions}, withCookie("0011223344556677"), UDP, "FORMERR 0", 0},
		{"drops options", Behaviour{EDNS: EDNSDropsOptions}, withCookie("0011223344556677"), UDP, "timeout", 5 * time.Second},
		{"cookie wanted", Behaviour{Cookies: CookiesRequired}, withCookie("0011223344556677"), UDP, "BADCOOKIE 0", 0},
		{"cookie wanted, none sent", Behaviour{Cookies: CookiesRequired}, question(), UDP, "NOERROR tc 0", 0},
		{"cookie wanted, over TCP", Behaviour{Cookies: CookiesRequired}, question(), TCP, good, 0},
		{"truncates", Behaviour{TruncateUDP: true}, question(), UDP, "NOERROR aa tc 0", 0},
		{"truncates, over TCP", Behaviour{TruncateUDP: true}, question(), TCP, good, 0},
		{"pads", Behaviour{Padding: 1300}, question(), UDP, "NOERROR aa tc 0", 0},
		{"pads and does not care", Behaviour{Padding: 1300, IgnoreUDPSize: true}, question(), UDP, good, 0},
		{"resets TCP", Behaviour{ResetTCP: true}, question(), TCP, "reset", 0},
		{"hook", Behaviour{Silent: true, Hook: func(q Query) *Reply {
			r := q.Answer()
			r.Answer = nil
			return &Reply{Msg: r, Delay: time.Second}
		}}, question(), UDP, "NOERROR aa 0", time.Second},
		{"hook that declines", Behaviour{Hook: func(Query) *Reply { return nil }}, question(), UDP, good, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, Standard, func(t *testing.T, in *Internet, n *simnet.Network) {
				in.SetBehaviour(server, c.b)
				start := time.Now()
				r, err := rawExchange(n, server, c.tr, c.m)
				got := ""
				var ne net.Error
				switch {
				case errors.As(err, &ne) && ne.Timeout():
					got = "timeout"
				case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
					got = "reset"
				case err != nil:
					t.Fatal(err)
				default:
					got = summary(r)
				}
				if got != c.want {
					t.Errorf("got %s, want %s", got, c.want)
				}
				if d := time.Since(start); d != c.after {
					t.Errorf("after %v, want %v", d, c.after)
				}
				if log := in.Log(); c.tr == UDP && (len(log) != 1 || log[0].Server != server || !log[0].Is("WWW.ed25519.example.", dns.TypeAAAA)) {
					t.Errorf("log = %v", log)
				}
			})
		})
	}
}

// TestForgeries reads every packet that comes back: the false ones, then the true one.
func TestForgeries(t *testing.T) {
	inBubble(t, Standard, func(t *testing.T, in *Internet, n *simnet.Network) {
		in.SetBehaviour(leaf(1), Behaviour{Forge: []Forgery{ForgeWrongID, ForgeWrongQuestion, ForgeNoResponse, ForgeGarbage, ForgeWrongCase, ForgeShort}})
		c, err := n.DialUDP(netip.AddrPort{}, netip.AddrPortFrom(leaf(1), 53))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		m := new(dns.Msg).SetQuestion("wWw.ed25519.example.", dns.TypeA)
		wire, _ := m.Pack()
		c.Write(wire)
		c.SetReadDeadline(time.Now().Add(time.Second))
		buf := make([]byte, 4096)
		for i := range 7 {
			size, err := c.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			r := new(dns.Msg)
			valid := r.Unpack(buf[:size]) == nil && r.Response && r.Id == m.Id && len(r.Question) == 1 && r.Question[0] == m.Question[0]
			if valid != (i == 6) {
				t.Errorf("packet %d matches the query: %v", i, valid)
			}
		}
	})
}

// TestCookies completes the exchange of RFC 7873.
func TestCookies(t *testing.T) {
	inBubble(t, Standard, func(t *testing.T, in *Internet, n *simnet.Network) {
		ask := func(b Behaviour, cookie string) (rcode int, back string) {
			in.SetBehaviour(leaf(1), b)
			m := new(dns.Msg).SetQuestion("www.ed25519.example.", dns.TypeA)
			m.SetEdns0(1232, false).IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: cookie}}
			r, err := rawExchange(n, leaf(1), UDP, m)
			if err != nil {
				t.Fatal(err)
			}
			for _, o := range r.IsEdns0().Option {
				back = o.(*dns.EDNS0_COOKIE).Cookie
			}
			return r.Rcode, back
		}
		const client = "0011223344556677"
		rcode, full := ask(Behaviour{Cookies: CookiesOn}, client)
		if rcode != dns.RcodeSuccess || len(full) != 32 || !strings.HasPrefix(full, client) {
			t.Errorf("on: %d %q", rcode, full)
		}
		if rcode, _ := ask(Behaviour{Cookies: CookiesRequired}, full); rcode != dns.RcodeSuccess {
			t.Errorf("required, good cookie: %d", rcode)
		}
		if rcode, _ := ask(Behaviour{Cookies: CookiesRequired}, client+"ffffffffffffffff"); rcode != dns.RcodeBadCookie {
			t.Errorf("required, bad cookie: %d", rcode)
		}
		if _, back := ask(Behaviour{Cookies: CookiesWrong}, client); strings.HasPrefix(back, client) {
			t.Errorf("wrong: client cookie came back unchanged")
		}
		if _, back := ask(Behaviour{}, client); back != "" {
			t.Errorf("off: %q", back)
		}
		if _, back := ask(Behaviour{Cookies: CookiesOn, EDNS: EDNSNoOptions}, client); back != "" {
			t.Errorf("no options: %q", back)
		}
	})
}

// TestLossIsReproducible: the share is right, and the same queries are lost in every run.
func TestLossIsReproducible(t *testing.T) {
	var first []bool
	for range 2 {
		in := Standard(time.Unix(0, 0))
		in.SetBehaviour(leaf(1), Behaviour{Loss: 0.3})
		wire, _ := new(dns.Msg).SetQuestion("www.ed25519.example.", dns.TypeA).Pack()
		var lost []bool
		n := 0
		for range 1000 {
			packets, _ := in.Handle(leaf(1), UDP, netip.AddrPort{}, wire)
			if packets == nil {
				n++
			}
			lost = append(lost, packets == nil)
		}
		if n < 250 || n > 350 {
			t.Errorf("lost %d of 1000, want about 300", n)
		}
		if first != nil && !slices.Equal(first, lost) {
			t.Error("two runs lost different queries")
		}
		first = lost
	}
}

// TestReplace changes the Internet under the eyes of its clients.
func TestReplace(t *testing.T) {
	inBubble(t, Standard, func(t *testing.T, in *Internet, n *simnet.Network) {
		c := func(name string) string {
			out := newChecker(t, in, askOver(n)).resolve(name, dns.TypeA)
			return fmt.Sprint(dns.RcodeToString[out.rcode], " ", out.status, " ", AnswerText(out.answer))
		}
		z, ok := in.Zone("RSA.org")
		if !ok {
			t.Fatal("no zone rsa.org.")
		}
		z.Records += "\nnew A 198.18.2.99"
		z.Algorithm = dns.ED25519 // with the DS in the parent
		if err := in.Replace(z); err != nil {
			t.Fatal(err)
		}
		if got, want := c("new.rsa.org."), "NOERROR secure [new.rsa.org. A 198.18.2.99]"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		z.Fault = BadSignature
		if err := in.Replace(z); err != nil {
			t.Fatal(err)
		}
		if got, want := c("new.rsa.org."), "NOERROR bogus [new.rsa.org. A 198.18.2.99]"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		if err := in.Remove("rsa.org."); err != nil {
			t.Fatal(err)
		}
		if got, want := c("new.rsa.org."), "NXDOMAIN secure []"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		z.Servers = servers(leaf(200))
		if err := in.Replace(z); err == nil {
			t.Error("a new server address was accepted while running")
		}
		if got, want := c("new.rsa.org."), "NXDOMAIN secure []"; got != want {
			t.Errorf("after a refused change: got %s, want %s", got, want)
		}
	})
}

// TestChangesWhileServing is for the race detector.
func TestChangesWhileServing(t *testing.T) {
	in := Standard(time.Now())
	if _, err := in.ListenLoopback(0); err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	z, _ := in.Zone("ed25519.example.")
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			wire, _ := new(dns.Msg).SetQuestion("www.ed25519.example.", dns.TypeA).Pack()
			for j := range 50 {
				switch i {
				case 0:
					in.SetBehaviour(leaf(1), Behaviour{LowerCase: j%2 == 0})
				case 1:
					if err := in.Replace(z); err != nil {
						t.Error(err)
					}
				default:
					if packets, _ := in.Handle(leaf(1), TCP, netip.AddrPort{}, wire); len(packets) != 1 {
						t.Errorf("%d packets", len(packets))
					}
				}
				in.Count(func(e LogEntry) bool { return e.DO })
			}
		})
	}
	wg.Wait()
	if n := in.Count(nil); n != 100 {
		t.Errorf("%d queries logged, want 100", n)
	}
	in.ResetLog()
	if n := in.Count(nil) + len(in.Log()); n != 0 {
		t.Errorf("%d queries after a reset", n)
	}
}

func TestWithNames(t *testing.T) {
	addr := netip.MustParseAddr("198.18.20.1")
	names := []string{
		"ad.doubleclick.net", "doubleclick.net.", "pixel.facebook.com", "stats.ed25519.example", "www.ed25519.example",
		"a.b.c.tracking.co.uk", "co.uk", "xn--80ak6aa92e.xyz", "_x.under_score.zip", "single", "Pixel.Facebook.com",
		"*.wild.org", "bad..name", "", "t.unsigned.com",
	}
	build := func(now time.Time) *Internet {
		in, err := New(now, WithNames(StandardZones(), leaf(60), addr, names...)...)
		if err != nil {
			t.Fatal(err)
		}
		StandardBehaviours(in)
		return in
	}
	inBubble(t, build, func(t *testing.T, in *Internet, n *simnet.Network) {
		c := newChecker(t, in, askOver(n))
		for _, name := range names {
			want := []string{canonical(name) + " A " + addr.String()}
			switch {
			case name == "www.ed25519.example":
				want = []string{"www.ed25519.example. A 198.18.0.1", "www.ed25519.example. A 198.18.0.11"}
			case name == "" || strings.ContainsAny(name, "*") || strings.Contains(name, ".."):
				continue
			}
			got := c.resolve(name, dns.TypeA)
			if !slices.Equal(AnswerText(got.answer), want) || got.status == Bogus {
				t.Errorf("%s: %v %v (%v), want %v", name, AnswerText(got.answer), got.status, got.why, want)
			}
		}
		checkExpectations(t, newChecker(t, in, askOver(n)), Expect()[:20]) // the others are as they were
	})
}

// TestIPv6 puts a server at an IPv6 address.
func TestIPv6(t *testing.T) {
	six := netip.MustParseAddr("2001:db8:53::1")
	build := func(now time.Time) *Internet {
		in, err := New(now, Zone{Name: ".", Servers: servers(six), Algorithm: dns.ED25519, Records: "www.x A 192.0.2.1"})
		if err != nil {
			t.Fatal(err)
		}
		return in
	}
	inBubble(t, build, func(t *testing.T, in *Internet, n *simnet.Network) {
		for _, tr := range []Transport{UDP, TCP} {
			r, err := rawExchange(n, six, tr, new(dns.Msg).SetQuestion("www.x.", dns.TypeA))
			if err != nil || len(r.Answer) != 1 {
				t.Errorf("%v: %v %v", tr, r, err)
			}
		}
		if want := "ns1.\t3600\tIN\tAAAA\t2001:db8:53::1\n"; !strings.Contains(in.RootHints(), want) {
			t.Errorf("hints %q lack %q", in.RootHints(), want)
		}
	})
	in := build(time.Now())
	if _, err := in.ListenLoopback(0); err == nil {
		t.Error("listened at an address that is not loopback")
	}
}

func TestDeclarationsAreChecked(t *testing.T) {
	root := Zone{Name: ".", Servers: servers(leaf(1))}
	for _, c := range []struct {
		want  string
		zones []Zone
	}{
		{"needs a root", []Zone{{Name: "com.", Servers: servers(leaf(1))}}},
		{"declared twice", []Zone{root, {Name: "A.", Servers: servers(leaf(1))}, {Name: "a", Servers: servers(leaf(1))}}},
		{"zone a.: it has no servers", []Zone{root, {Name: "a."}}},
		{"algorithm 5", []Zone{root, {Name: "a.", Servers: servers(leaf(1)), Algorithm: 5}}},
		{"line: 1", []Zone{root, {Name: "a.", Servers: servers(leaf(1)), Records: "x A nonsense"}}},
		{"outside the zone", []Zone{root, {Name: "a.", Servers: servers(leaf(1)), Records: "b. A 192.0.2.1"}}},
		{"stands alone", []Zone{root, {Name: "a.", Servers: servers(leaf(1)), Records: "x A 192.0.2.1\nx CNAME y"}}},
		{"one TTL", []Zone{root, {Name: "a.", Servers: servers(leaf(1)), Records: "x 1 A 192.0.2.1\nx 2 A 192.0.2.2"}}},
		{"wildcard", []Zone{root, {Name: "a.", Servers: servers(leaf(1)), Records: "*.x NS ns.b."}}},
	} {
		_, err := New(time.Now(), c.zones...)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("error %v, want one with %q", err, c.want)
		}
	}
}

// TestKeysAreStable: trust anchors can be written down.
func TestKeysAreStable(t *testing.T) {
	for alg, want := range map[uint8]string{
		dns.RSASHA256:       "7aab9cab30750749f7bb12c336ed91ff3789d164ebd208eee2b9252836029e7c",
		dns.ECDSAP256SHA256: "e572e08ce3271734dd8e64fe6e6c9c6329a735c0d65d154730ab25ca0a928414",
		dns.ECDSAP384SHA384: "0b967ca73a29e7d6b545b5cf949a79708a925d3b28270bb80fa7f07fb9d5fb4b",
		dns.ED25519:         "4022194600babeeb142df58968c5801da00a19beba975f7e3331dce7c3bff30d",
	} {
		k, err := deriveKey(".", alg, 257, 1)
		if err != nil {
			t.Fatal(err)
		}
		if got := k.record.ToDS(dns.SHA256).Digest; got != want {
			t.Errorf("algorithm %d: %q, want %q", alg, got, want)
		}
	}
}

// TestCanonicalOrder uses the example of RFC 4034 section 6.1.
func TestCanonicalOrder(t *testing.T) {
	names := []string{
		"example.", "a.example.", "yljkjljk.a.example.", "Z.a.example.", "zABC.a.EXAMPLE.", "z.example.",
		`\001.z.example.`, "*.z.example.", `\200.z.example.`,
	}
	for i := range names[1:] {
		a, b := canonicalOrder(canonical(names[i])), canonicalOrder(canonical(names[i+1]))
		if a >= b {
			t.Errorf("%s is not before %s", names[i], names[i+1])
		}
	}
}

// FuzzHandle: no query makes the server panic, and what it sends back is a response to it.
func FuzzHandle(f *testing.F) {
	in := Standard(time.Unix(1e9, 0))
	in.SetBehaviour(leaf(20), Behaviour{})
	for _, e := range Expect() {
		m := new(dns.Msg).SetQuestion(e.Name, e.Type)
		m.SetEdns0(1232, true)
		wire, _ := m.Pack()
		f.Add(wire, byte(0))
		f.Add(wire, byte(1))
	}
	f.Add([]byte("xx\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\xc0\x0c\x00\x01\x00\x01"), byte(0))
	addrs := in.Addrs()
	f.Fuzz(func(t *testing.T, wire []byte, which byte) {
		addr := addrs[int(which/2)%len(addrs)]
		tr := Transport(which & 1)
		packets, _ := in.Handle(addr, tr, netip.AddrPort{}, wire)
		for _, p := range packets {
			if len(p) < 12 || p[0] != wire[0] || p[1] != wire[1] || p[2]&0x80 == 0 {
				t.Fatalf("%x answered by %x", wire, p)
			}
			if err := new(dns.Msg).Unpack(p); err != nil {
				t.Fatalf("response to %x: %v", wire, err)
			}
			if tr == UDP && len(p) > 1232 {
				t.Fatalf("%d bytes over UDP", len(p))
			}
		}
	})
}
