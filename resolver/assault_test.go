package resolver_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/exchange"
	"github.com/sluice-dns/sluice/resolver/internal/iterator"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
	"github.com/sluice-dns/sluice/resolver/internal/selection"
	"github.com/sluice-dns/sluice/resolver/internal/validator"
	"github.com/sluice-dns/sluice/resolver/internal/validator/trustanchor"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// This file has what attack replays and the table of limits share: hostile servers, a whole resolver to send
// clients to, and its recursor alone with a tree at hand, so that what one question cost can be counted.

// Addresses of hostile servers and of their victims.
const (
	evil1, evil2     = "192.0.2.66", "192.0.2.67"
	victim1, victim2 = "192.0.2.1", "192.0.2.2"
	labServer        = "127.53.1.7" // serves lab., an unsigned top-level domain
)

type zones = []siminternet.Zone

func zoneAt(name string, server string, records string) siminternet.Zone {
	return siminternet.Zone{Name: name, Servers: []netip.Addr{netip.MustParseAddr(server)}, Records: records}
}

func newInternet(t *testing.T, extra zones) *siminternet.Internet {
	t.Helper()
	all := siminternet.StandardZones()
	for _, z := range extra {
		if i := slices.IndexFunc(all, func(o siminternet.Zone) bool { return o.Name == z.Name }); i >= 0 {
			all[i] = z
		} else {
			all = append(all, z)
		}
	}
	sim, err := siminternet.New(time.Now(), all...)
	if err != nil {
		t.Fatal(err)
	}
	siminternet.StandardBehaviours(sim)
	return sim
}

// assault runs f against a whole resolver, which validates, in the standard Internet with more zones.
func assault(t *testing.T, extra zones, edit func(*resolver.Options), f func(l *lab)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l := newLabIn(t, newInternet(t, extra), edit)
		defer l.stop()
		l.net.Link = func(from, to netip.AddrPort) (time.Duration, bool) { return time.Millisecond, false }
		f(l)
	})
}

// hook makes a server answer by f where f answers at all. It is called by several goroutines.
func (l *lab) hook(server string, f func(q siminternet.Query) *siminternet.Reply) {
	l.sim.SetBehaviour(netip.MustParseAddr(server), siminternet.Behaviour{Hook: f})
}

func (l *lab) behave(server string, b siminternet.Behaviour) {
	l.sim.SetBehaviour(netip.MustParseAddr(server), b)
}

// sentTo counts the queries that servers got; without servers, all.
func sentTo(in *siminternet.Internet, servers ...string) int {
	return in.Count(func(e siminternet.LogEntry) bool {
		return len(servers) == 0 || slices.Contains(servers, e.Server.String())
	})
}

// must asks and wants a response.
func (l *lab) must(name string, typ uint16) *dns.Msg {
	l.t.Helper()
	m := new(dns.Msg).SetQuestion(name, typ)
	m.SetEdns0(1232, false)
	m.AuthenticatedData = true // RFC 6840 section 5.7: tell us
	for range 4 {              // a UDP client asks again when nothing comes in time
		if r, err := l.exchangeFor("udp", m, 3*time.Second); err == nil && r.Truncated {
			if r, err = l.exchangeFor("tcp", m, 10*time.Second); err == nil {
				return r
			}
		} else if err == nil {
			return r
		}
	}
	l.t.Fatalf("%s %s: no response", name, dns.TypeToString[typ])
	return nil
}

func (l *lab) exchangeFor(network string, m *dns.Msg, limit time.Duration) (*dns.Msg, error) {
	conn, err := l.net.Dial(l.t.Context(), network, l.addr.String())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(limit))
	c := &dns.Conn{Conn: conn, UDPSize: 4096}
	if err := c.WriteMsg(m); err != nil {
		return nil, err
	}
	return c.ReadMsg()
}

// want asks and compares RCODE and answer.
func (l *lab) want(name string, typ uint16, want string) {
	l.t.Helper()
	if got := text(l.must(name, typ)); got != want {
		l.t.Errorf("%s %s: %s; want %s", name, dns.TypeToString[typ], got, want)
	}
}

// say makes a response with the sections given in zone-file syntax, one record a line.
func say(q siminternet.Query, aa bool, rcode int, answer, authority, additional string) *siminternet.Reply {
	m := new(dns.Msg).SetRcode(q.Msg, rcode)
	m.Authoritative = aa
	m.Answer, m.Ns, m.Extra = records(answer), records(authority), records(additional)
	if q.Msg.IsEdns0() != nil {
		m.SetEdns0(1232, true)
	}
	return reply(q, m)
}

// reply truncates what does not fit the client's UDP size, as an honest server does.
func reply(q siminternet.Query, m *dns.Msg) *siminternet.Reply {
	if q.Transport == siminternet.UDP {
		size := dns.MinMsgSize
		if o := q.Msg.IsEdns0(); o != nil {
			size = int(o.UDPSize())
		}
		m.Truncate(size)
	}
	return &siminternet.Reply{Msg: m}
}

func records(text string) (rrs []dns.RR) {
	p := dns.NewZoneParser(strings.NewReader(text+"\n"), ".", "")
	p.SetDefaultTTL(300)
	for rr, ok := p.Next(); ok; rr, ok = p.Next() {
		rrs = append(rrs, rr)
	}
	if p.Err() != nil {
		panic(p.Err())
	}
	return rrs
}

// asked is the name of a query in lower case, and its type.
func asked(q siminternet.Query) (name string, typ uint16) {
	return strings.ToLower(q.Msg.Question[0].Name), q.Msg.Question[0].Qtype
}

// extended returns the code of the extended error in a response, -1 without one.
func extended(m *dns.Msg) int {
	if o := m.IsEdns0(); o != nil {
		for _, o := range o.Option {
			if e, ok := o.(*dns.EDNS0_EDE); ok {
				return int(e.InfoCode)
			}
		}
	}
	return -1
}

// allocated returns the bytes that f allocates, in this process: of the simulated servers too.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// A peak counts the names of which questions are under way at once.
type peak struct {
	mu    sync.Mutex
	names map[string]int
	most  int
}

func (p *peak) enter(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.names[name]++
	p.most = max(p.most, len(p.names))
}

func (p *peak) leave(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.names[name]--; p.names[name] == 0 {
		delete(p.names, name)
	}
}

// A recursor is what resolves and validates inside a resolver, without clients.
type recursor struct {
	t         *testing.T
	net       *siminternet.Network
	sim       *siminternet.Internet
	rrsets    *rrcache.Cache
	exchange  *exchange.Exchange
	iterator  *iterator.Iterator
	validator *validator.Validator
	tree      *query.Tree // of the last question
}

// withRecursor runs f with a recursor that trusts the root and the anchors given, in zone-file syntax.
func withRecursor(t *testing.T, extra zones, anchors string, edit func(*iterator.Options), f func(r *recursor)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &recursor{t: t, sim: newInternet(t, extra), net: siminternet.NewNetwork()}
		defer r.net.Close()
		r.net.Link = func(from, to netip.AddrPort) (time.Duration, bool) { return time.Millisecond, false }
		if err := r.sim.Attach(r.net); err != nil {
			t.Fatal(err)
		}
		defer r.sim.Close()
		hints, err := iterator.ParseHints(r.sim.RootHints(), "hints")
		if err != nil {
			t.Fatal(err)
		}
		r.rrsets = rrcache.New(rrcache.Options{Bytes: 1 << 20})
		r.exchange = exchange.New(exchange.Options{Transport: exchange.Dialing(r.net.Dial)})
		defer r.exchange.Close()
		o := iterator.Options{
			RRsets: r.rrsets, Servers: selection.New(selection.Options{Seed: [32]byte{1}}), Exchange: r.exchange,
			Hints: hints, DoNotQuery: []netip.Prefix{}, NoIPv6: true,
		}
		if edit != nil {
			edit(&o)
		}
		r.iterator = iterator.New(o)
		trust, err := trustanchor.New(trustanchor.Options{Text: r.sim.TrustAnchor() + "\n" + anchors, File: "anchors"})
		if err != nil {
			t.Fatal(err)
		}
		r.validator = validator.New(validator.Options{Fetch: r.iterator, Cache: r.rrsets, Anchors: trust})
		f(r)
	})
}

func question(name string, typ uint16) query.Question {
	return query.Question{Name: dnsname.MustParse(name), Type: typ, Class: dnswire.ClassIN, DO: true}
}

// resolve asks with a new tree of the default budget.
func (r *recursor) resolve(name string, typ uint16) (settled.Entry, error) {
	r.tree = query.NewTree(clock.Elapsed(), query.Budget{})
	u, err := r.iterator.Resolve(context.Background(), r.tree, question(name, typ))
	if err != nil {
		return settled.Entry{}, err
	}
	return r.validator.Validate(context.Background(), r.tree, &u, clock.Elapsed())
}

// outcome resolves and says what came of it: "NOERROR Secure", "SERVFAIL" with the extended error, …
func (r *recursor) outcome(name string, typ uint16) string {
	e, err := r.resolve(name, typ)
	if err != nil {
		if f, ok := err.(interface{ EDE() (uint16, string) }); ok {
			code, text := f.EDE()
			return fmt.Sprintf("SERVFAIL %d %s", code, text)
		}
		return "SERVFAIL " + err.Error()
	}
	a := e.View()
	return fmt.Sprintf("%s %v", dnswire.RCodeText(a.RCode), a.Status)
}

// Costs are what one question was charged.
type costs struct{ queries, verified, failed, hashes int }

// spent tells what the last question cost, by spending what its tree has left.
func (r *recursor) spent() (c costs) {
	c.queries = 100 - r.tree.Left()
	for _, s := range []struct {
		used  *int
		whole int
		spend func() error
	}{{&c.verified, 64, r.tree.Validation}, {&c.failed, 8, r.tree.FailedValidation}, {&c.hashes, 64, r.tree.Hash}} {
		*s.used = s.whole
		for s.spend() == nil {
			*s.used--
		}
	}
	return c
}

// A signer signs a hostile zone as its owner likes. Its key signing key is to be trusted by anchor.
type signer struct {
	zone string
	ksk  *dns.DNSKEY
	priv *ecdsa.PrivateKey
}

func newSigner(zone string) *signer {
	k := &dns.DNSKEY{Hdr: dns.RR_Header{Name: zone, Rrtype: dns.TypeDNSKEY, Class: dns.ClassINET, Ttl: 300}, Flags: 257, Protocol: 3, Algorithm: dns.ECDSAP256SHA256}
	priv, err := k.Generate(256)
	if err != nil {
		panic(err)
	}
	return &signer{zone, k, priv.(*ecdsa.PrivateKey)}
}

func (s *signer) anchor() string { return s.ksk.ToDS(dns.SHA256).String() }

// sign returns the signature over a set. edit, if given, changes the signature's header before it is signed, and
// owner, if not "", is the owner that the signed data has (a wildcard).
func (s *signer) sign(set []dns.RR, owner string, edit func(*dns.RRSIG)) *dns.RRSIG {
	g := s.unsigned(set)
	if owner == "" {
		owner = g.Hdr.Name
	} else {
		g.Labels = uint8(dns.CountLabel(owner) - 1)
	}
	if edit != nil {
		edit(g)
	}
	g.Signature = ""
	pack := func(rr dns.RR) []byte {
		buf := make([]byte, dns.MaxMsgSize)
		n, err := dns.PackRR(rr, buf, 0, nil, false)
		if err != nil {
			panic(err)
		}
		return buf[:n]
	}
	var wires []string
	for _, rr := range set {
		rr = dns.Copy(rr)
		rr.Header().Name, rr.Header().Ttl = owner, g.OrigTtl
		wires = append(wires, string(pack(rr)))
	}
	header := pack(g)
	nameLen := func(name string) int {
		n, err := dns.PackDomainName(name, make([]byte, 256), 0, nil, false)
		if err != nil {
			panic(err)
		}
		return n
	}
	fixed := nameLen(owner) + 10 // owner, type, class, TTL, length
	slices.SortFunc(wires, func(a, b string) int { return strings.Compare(a[fixed:], b[fixed:]) })
	sum := sha256.Sum256(append(header[nameLen(g.Hdr.Name)+10:], strings.Join(wires, "")...))
	r, v, err := ecdsa.Sign(rand.Reader, s.priv, sum[:])
	if err != nil {
		panic(err)
	}
	g.Signature = base64.StdEncoding.EncodeToString(append(r.FillBytes(make([]byte, 32)), v.FillBytes(make([]byte, 32))...))
	return g
}

func (s *signer) unsigned(set []dns.RR) *dns.RRSIG {
	h := set[0].Header()
	labels := dns.CountLabel(h.Name)
	if strings.HasPrefix(h.Name, "*.") {
		labels-- // RFC 4034 section 3.1.3
	}
	return &dns.RRSIG{
		Hdr:        dns.RR_Header{Name: h.Name, Rrtype: dns.TypeRRSIG, Class: dns.ClassINET, Ttl: h.Ttl},
		Algorithm:  s.ksk.Algorithm,
		Labels:     uint8(labels),
		OrigTtl:    h.Ttl,
		Expiration: uint32(time.Now().Add(24 * time.Hour).Unix()), Inception: uint32(time.Now().Add(-24 * time.Hour).Unix()),
		KeyTag: s.ksk.KeyTag(), SignerName: s.zone, TypeCovered: h.Rrtype,
		Signature: base64.StdEncoding.EncodeToString(make([]byte, 64)),
	}
}

// signed is a set with its signature.
func (s *signer) signed(text string) []dns.RR {
	set := records(text)
	return append(set, s.sign(set, "", nil))
}

// serve answers as the zone's server: keys, and what f has for other questions.
func (s *signer) serve(f func(q siminternet.Query, m *dns.Msg)) func(siminternet.Query) *siminternet.Reply {
	keys := []dns.RR{s.ksk}
	return s.serveKeys(keys, f)
}

func (s *signer) serveKeys(keys []dns.RR, f func(q siminternet.Query, m *dns.Msg)) func(siminternet.Query) *siminternet.Reply {
	sig := s.sign(keys, "", nil)
	soa := s.signed(fmt.Sprintf("%s 300 SOA ns1.%s h.%s 1 2 3 4 300", s.zone, s.zone, s.zone))
	return func(q siminternet.Query) *siminternet.Reply {
		name, typ := asked(q)
		m := new(dns.Msg).SetReply(q.Msg)
		m.Authoritative = true
		m.SetEdns0(1232, true)
		switch {
		case name == s.zone && typ == dns.TypeDNSKEY:
			m.Answer = append(slices.Clone(keys), sig)
		case name == s.zone && typ == dns.TypeSOA:
			m.Answer = soa
		default:
			f(q, m)
			if len(m.Answer) == 0 && (len(m.Ns) == 0 || m.Ns[0].Header().Rrtype != dns.TypeNS) {
				m.Ns = append(m.Ns, soa...)
			}
		}
		return reply(q, m)
	}
}
