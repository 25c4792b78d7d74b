package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sync/errgroup"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// A check is one thing that the system must do. do returns a sentence on what it saw.
type check struct {
	name  string
	limit time.Duration
	do    func(ctx context.Context, s *system) (string, error)
}

// checks run in this order: the later ones need the service to be down, or back.
var checks = []check{
	{"udp", short, plain(udp, "www.ed25519.example.")},
	{"tcp", short, plain(tcp, "www.ecdsa.com.")},
	{"dot", short, plain(dot, "www.rsa.org.")},
	{"doh1", short, plain(doh1, "www.p384.test.")},
	{"doh2", short, plain(doh2, "one.chain.example.")},
	{"blocked-for-one", short, blockedForOne},
	{"exception", short, exception},
	{"cname-target-blocked", short, cnameTargetBlocked},
	{"rewrite", short, rewrite},
	{"safe-search", short, safeSearch},
	{"blocked-after-change", short, blockedAfterChange},
	{"unblocked-after-change", short, unblockedAfterChange},
	{"stranger-refused", short, strangerRefused},
	{"nxdomain", short, nxdomain},
	{"big-answer-over-tcp", short, bigAnswerOverTCP},
	{"dead-server-avoided", short, deadServerAvoided},
	{"secure-ad", short, secureAD},
	{"bogus-servfail", short, bogusServfail},
	{"service-down", long, serviceDown},
	{"restart-from-snapshot", long, restartFromSnapshot},
	{"catch-up", long, catchUp},
}

// How long a check may take. On an idle machine all together take a few seconds; a busy one is no reason to fail. The
// longer limit leaves room for the wait between two attempts to reach a service that was away.
const (
	short = 30 * time.Second
	long  = time.Minute
)

// host is the question for a name's IPv4 address.
func host(name string) question { return question{name, typeA} }

// all lets every resolver be checked by f, which returns what the last one answered.
func (s *system) all(f func(p *process) (reply, error)) (r reply, err error) {
	for _, p := range s.nodes {
		if r, err = f(p); err != nil {
			return r, err
		}
	}
	return r, nil
}

// plain asks both resolvers for a name that nothing filters.
func plain(t transport, name string) func(context.Context, *system) (string, error) {
	return func(ctx context.Context, s *system) (string, error) {
		r, err := s.all(func(p *process) (reply, error) { return s.expect(ctx, p, bob, t, host(name), real) })
		return fmt.Sprintf("over %v both resolvers answer %s with %v, as the zone says", t, name, r), err
	}
}

// A turn is one query of a sequence.
type turn struct {
	who  client
	q    question
	want want
}

// sequence asks each resolver in turn.
func (s *system) sequence(ctx context.Context, turns ...turn) error {
	_, err := s.all(func(p *process) (r reply, err error) {
		for _, t := range turns {
			if r, err = s.expect(ctx, p, t.who, udp, t.q, t.want); err != nil {
				return r, err
			}
		}
		return r, nil
	})
	return err
}

func blockedForOne(ctx context.Context, s *system) (string, error) {
	ads, metrics := host("www.ads.example."), host("metrics.tracker.example.")
	if err := s.sequence(ctx,
		turn{bob, ads, real}, turn{alice, ads, blocked}, turn{bob, ads, real}, // the cache is warm from the first on
		turn{alice, metrics, blocked}, turn{bob, metrics, real}, turn{alice, metrics, blocked}, turn{bob, metrics, real},
	); err != nil {
		return "", err
	}
	// The same over transports where the client is known by what it says.
	for _, t := range []transport{dot, doh2} {
		for _, x := range []turn{{alice, ads, blocked}, {bob, ads, real}} {
			if _, err := s.expect(ctx, s.nodes[0], x.who, t, x.q, x.want); err != nil {
				return "", err
			}
		}
	}
	r, err := s.expect(ctx, s.nodes[0], alice, udp, ads, blocked)
	if err != nil {
		return "", err
	}
	if r.code != int(dns.ExtendedErrorCodeFiltered) || !strings.Contains(r.why, listName) {
		return "", fmt.Errorf("the extended error of a blocked answer is %d %q, and should be %d (Filtered) and name %q", r.code, r.why, dns.ExtendedErrorCodeFiltered, listName)
	}
	is, _ := real(s, ads)
	return fmt.Sprintf("from the same warm caches %s is %v for bob and 0.0.0.0 (%s) for alice, whoever asks first", ads.name, is, r.why), nil
}

func exception(ctx context.Context, s *system) (string, error) {
	err := s.sequence(ctx,
		turn{alice, host("banner.ads.example."), real}, turn{alice, host("www.ads.example."), blocked},
		turn{alice, host("banner.ads.example."), real})
	return "alice's own rule lets banner.ads.example. through; its sibling www.ads.example. stays blocked", err
}

func cnameTargetBlocked(ctx context.Context, s *system) (string, error) {
	stats, cdn := host("stats.shop.example."), host("cdn.shop.example.")
	err := s.sequence(ctx,
		turn{bob, stats, real}, turn{alice, stats, blocked},
		turn{alice, cdn, real}, turn{bob, stats, real})
	return "stats.shop.example. is blocked for alice because it is an alias of collect.tracker.example.; the harmless alias cdn.shop.example. is not", err
}

func rewrite(ctx context.Context, s *system) (string, error) {
	nas := host("nas.home.arpa.")
	err := s.sequence(ctx,
		turn{alice, nas, records("nas.home.arpa. A 192.0.2.7")}, turn{bob, nas, real},
		turn{alice, nas, records("nas.home.arpa. A 192.0.2.7")})
	is, _ := real(s, nas)
	return fmt.Sprintf("alice's rewrite answers nas.home.arpa. with 192.0.2.7; bob gets what the zones say, %v", is), err
}

func safeSearch(ctx context.Context, s *system) (string, error) {
	google, forced := host("www.google.com."), host("forcesafesearch.google.com.")
	is, err := real(s, forced)
	if err != nil {
		return "", err
	}
	safe := records(append([]string{"www.google.com. CNAME forcesafesearch.google.com."}, is.answer...)...)
	err = s.sequence(ctx, turn{alice, google, safe}, turn{bob, google, real}, turn{alice, google, safe})
	return fmt.Sprintf("www.google.com. leads alice to forcesafesearch.google.com. (%v), and bob to the ordinary address", is), err
}

func blockedAfterChange(ctx context.Context, s *system) (string, error) {
	return s.afterChange(ctx, "||casino.example^\n", host("www.casino.example."), real, blocked)
}

func unblockedAfterChange(ctx context.Context, s *system) (string, error) {
	return s.afterChange(ctx, "", host("www.casino.example."), blocked, real)
}

// afterChange gives bob rules and waits until both resolvers apply them.
func (s *system) afterChange(ctx context.Context, rules string, q question, before, after want) (string, error) {
	if err := s.sequence(ctx, turn{bob, q, before}); err != nil {
		return "", err
	}
	revision, err := s.service.setRules(ctx, bob.name, rules)
	if err != nil {
		return "", err
	}
	took, err := s.eventually(ctx, bob, q, after)
	return fmt.Sprintf("revision %d reached %s after the command's return", revision, took), err
}

// eventually asks both resolvers until each gives the answer wanted, and says how long that took.
func (s *system) eventually(ctx context.Context, c client, q question, w want) (string, error) {
	begin := clock.Elapsed()
	took := make([]time.Duration, len(s.nodes))
	var g errgroup.Group
	for i, p := range s.nodes {
		g.Go(func() error {
			var last error
			err := until(ctx, func() bool {
				_, last = s.expect(ctx, p, c, udp, q, w)
				return last == nil
			})
			took[i] = clock.Elapsed().Sub(begin)
			if err != nil {
				return fmt.Errorf("%s does not apply the change: %w", p.name, last)
			}
			return nil
		})
	}
	err := g.Wait()
	var parts []string
	for i, p := range s.nodes {
		parts = append(parts, fmt.Sprintf("%s in %.1f ms", p.name, float64(took[i].Microseconds())/1000))
	}
	return strings.Join(parts, ", "), err
}

func strangerRefused(ctx context.Context, s *system) (string, error) {
	for _, p := range s.nodes {
		for _, t := range []transport{udp, tcp, dot, doh2} {
			m, err := s.ask(ctx, p, stranger, t, host("www.shop.example."))
			if err != nil {
				return "", err
			}
			r := replyOf(m)
			if r.rcode != dns.RcodeRefused || len(m.Answer) > 0 || r.code != int(dns.ExtendedErrorCodeProhibited) {
				return "", fmt.Errorf("a stranger got %v with extended error %d from %s over %v, and should be refused with %d (Prohibited)", r, r.code, p.name, t, dns.ExtendedErrorCodeProhibited)
			}
		}
	}
	return fmt.Sprintf("%v, which is nobody's, and an unknown device name over DoT and DoH are refused (Prohibited)", stranger.source), nil
}

func nxdomain(ctx context.Context, s *system) (string, error) {
	q := host("nothing.ed25519.example.")
	for _, p := range s.nodes {
		m, err := s.ask(ctx, p, bob, udp, q)
		if err != nil {
			return "", err
		}
		zone, err := s.authoritative(q)
		if err != nil {
			return "", err
		}
		if m.Rcode != dns.RcodeNameError || zone.Rcode != dns.RcodeNameError || len(m.Answer) > 0 {
			return "", fmt.Errorf("%s says %s to %v, and the zone %s", p.name, dns.RcodeToString[m.Rcode], q, dns.RcodeToString[zone.Rcode])
		}
		if got, want := soa(m), soa(zone); got != want {
			return "", fmt.Errorf("%s shows the SOA record %q, and the zone %q", p.name, got, want)
		}
	}
	return "nothing.ed25519.example. does not exist, and the zone's SOA record says for how long", nil
}

// secureAD asks for names with a chain of trust from the root down, signed in different ways, and for one
// without: the AD flag tells them apart.
func secureAD(ctx context.Context, s *system) (string, error) {
	for _, p := range s.nodes {
		for _, x := range []struct {
			name   string
			secure bool
		}{
			{"www.ed25519.example.", true}, {"www.rsa.org.", true}, {"www.ecdsa.com.", true}, {"nothing.ed25519.example.", true},
			{"www.unsigned.example.", false}, {"www.unsigned.com.", false},
		} {
			m, err := s.askWith(ctx, p, bob, udp, host(x.name), flags{do: true})
			if err != nil {
				return "", err
			}
			signed := slices.ContainsFunc(append(m.Answer, m.Ns...), func(rr dns.RR) bool { return rr.Header().Rrtype == dns.TypeRRSIG })
			if m.AuthenticatedData != x.secure || signed != x.secure {
				return "", fmt.Errorf("%s answers %s with AD %v and signatures %v, and both should be %v", p.name, x.name, m.AuthenticatedData, signed, x.secure)
			}
			if m, err = s.askWith(ctx, p, bob, udp, host(x.name), flags{}); err != nil {
				return "", err
			}
			if m.AuthenticatedData {
				return "", fmt.Errorf("%s sets AD in an answer about %s to a client that did not ask for it", p.name, x.name)
			}
		}
	}
	return "signed names carry the AD flag, whether they exist or not, and names of unsigned zones do not", nil
}

// bogusServfail asks for names whose signatures are broken, each in a way of its own.
func bogusServfail(ctx context.Context, s *system) (string, error) {
	for _, p := range s.nodes {
		for _, x := range []struct {
			name string
			ede  uint16
		}{
			{"www.bad-signature.example.", dns.ExtendedErrorCodeDNSBogus},
			{"www.expired.example.", dns.ExtendedErrorCodeSignatureExpired},
			{"www.future.example.", dns.ExtendedErrorCodeSignatureNotYetValid},
			{"bare.partly.example.", dns.ExtendedErrorCodeRRSIGsMissing},
		} {
			q := host(x.name)
			m, err := s.ask(ctx, p, bob, udp, q)
			if err != nil {
				return "", err
			}
			if r := replyOf(m); r.rcode != dns.RcodeServerFailure || len(m.Answer)+len(m.Ns) > 0 || r.code != int(x.ede) {
				return "", fmt.Errorf("%s answers %v with %v and extended error %d, and should with SERVFAIL, no data and %d", p.name, q, r, r.code, x.ede)
			}
			if m, err = s.askWith(ctx, p, bob, udp, q, flags{cd: true}); err != nil {
				return "", err
			}
			should, err := real(s, q)
			if err != nil {
				return "", err
			}
			if r := replyOf(m); !r.equal(should) || m.AuthenticatedData {
				return "", fmt.Errorf("%s answers %v with %v to a client that checks for itself (CD), and should with %v and without AD", p.name, q, r, should)
			}
		}
	}
	return "names with broken, expired, early and missing signatures are SERVFAIL, with the cause as extended error, and data for clients that check themselves", nil
}

// soa is the SOA record of a negative answer.
func soa(m *dns.Msg) string {
	for _, line := range siminternet.AnswerText(m.Ns) {
		if strings.Contains(line, " SOA ") {
			return line
		}
	}
	return ""
}

func bigAnswerOverTCP(ctx context.Context, s *system) (string, error) {
	q := question{"big.example.", dns.TypeTXT}
	var size int
	for _, p := range s.nodes {
		m, err := s.ask(ctx, p, bob, udp, q)
		if err != nil {
			return "", err
		}
		if !m.Truncated || m.Len() > 1232 {
			return "", fmt.Errorf("%s answers %v over UDP in %d bytes, not truncated (TC)", p.name, q, m.Len())
		}
		if _, err := s.expect(ctx, p, bob, tcp, q, real); err != nil {
			return "", err
		}
		if m, err = s.ask(ctx, p, bob, tcp, q); err != nil {
			return "", err
		}
		size = m.Len()
	}
	return fmt.Sprintf("big.example. TXT is truncated over UDP and whole over TCP: %d bytes, as the zone says", size), nil
}

// deadNames is how many names are asked for in the zone with a dead server.
const deadNames = 40

func deadServerAvoided(ctx context.Context, s *system) (string, error) {
	p := s.nodes[0]
	servers := s.internet.Servers("onedead.example.")
	dead := slices.IndexFunc(servers, func(a netip.Addr) bool { return s.internet.BehaviourOf(a).Silent })
	if dead < 0 {
		return "", errors.New("no server of onedead.example. is silent: nothing to check")
	}
	asked := func() int {
		return s.internet.Count(func(e siminternet.LogEntry) bool { return e.Server == servers[dead] && e.From.Port() != 9 })
	}
	before := asked()
	names := []string{"www", "www2", "www3"}
	for i := range deadNames - len(names) {
		names = append(names, fmt.Sprintf("nothing-%d", i))
	}
	for _, n := range names {
		if _, err := s.expect(ctx, p, bob, udp, host(n+".onedead.example."), real); err != nil {
			return "", err
		}
	}
	// It takes a few timeouts to believe that a server is dead; from then on it is probed now and then.
	n := asked() - before
	if n > deadNames/4 {
		return "", fmt.Errorf("for %d names the silent server was asked %d times", deadNames, n)
	}
	return fmt.Sprintf("%d names of a zone with a silent server are answered, and the silent one was asked %d times", deadNames, n), nil
}

// downQueries is how many queries are asked while the service is down.
const downQueries = 1000

func serviceDown(ctx context.Context, s *system) (string, error) {
	if err := s.service.stop(); err != nil {
		return "", fmt.Errorf("stopping the service: %w", err)
	}
	if c, err := net.DialTimeout("tcp", s.service.resolvers, time.Second); err == nil {
		c.Close()
		return "", fmt.Errorf("something still listens at the service's address %s", s.service.resolvers)
	}
	ads, shop, stats := host("www.ads.example."), host("www.shop.example."), host("stats.shop.example.")
	resent := s.resent.Load()
	var failed atomic.Int64
	var mu sync.Mutex
	var first error
	var g errgroup.Group
	g.SetLimit(8)
	for i := range downQueries {
		c, p := alice, s.nodes[i/2%len(s.nodes)]
		if i%2 == 1 {
			c = bob
		}
		q, w := shop, real
		switch i / 4 % 4 {
		case 0:
			q = ads
		case 1:
			q = stats
		case 2:
			q = host(fmt.Sprintf("n%d.wild.example.", i)) // new: in no cache
		}
		if c == alice && (q == ads || q == stats) {
			w = blocked
		}
		g.Go(func() error {
			if _, err := s.expect(ctx, p, c, udp, q, w); err != nil {
				failed.Add(1)
				mu.Lock()
				if first == nil {
					first = err
				}
				mu.Unlock()
			}
			return nil
		})
	}
	_ = g.Wait() // failures are counted
	n := failed.Load()
	if n > 0 {
		return "", fmt.Errorf("the service is stopped: %d queries, %d failed; the first: %w", downQueries, n, first)
	}
	detail := fmt.Sprintf("the service is stopped: %d queries, a quarter of them for names in no cache, %d failed", downQueries, n)
	if again := s.resent.Load() - resent; again > 0 {
		detail += fmt.Sprintf("; clients asked %d times again", again)
	}
	return detail, nil
}

func restartFromSnapshot(ctx context.Context, s *system) (string, error) {
	if err := s.service.stop(); err != nil { // if service-down did not get so far
		return "", fmt.Errorf("stopping the service: %w", err)
	}
	p := s.nodes[0]
	before, err := s.verdicts(ctx, p)
	if err != nil {
		return "", err
	}
	revision, root := p.revision(), p.root()
	if err := p.stop(); err != nil {
		return "", fmt.Errorf("stopping %s: %w", p.name, err)
	}
	begin := clock.Elapsed()
	if err := p.start(); err != nil {
		return "", err
	}
	if r, h := p.revision(), p.root(); r != revision || h != root {
		return "", fmt.Errorf("%s has revision %d, root %v after the restart; before: %d, %v", p.name, r, h, revision, root)
	}
	after, err := s.verdicts(ctx, p)
	took := clock.Elapsed().Sub(begin)
	if err != nil {
		return "", err
	}
	for i, v := range before {
		if after[i] != v {
			return "", fmt.Errorf("after the restart of %s, with the service down: %s; before: %s", p.name, after[i], v)
		}
	}
	return fmt.Sprintf("with the service down %s starts from its disk and after %.0f ms has given the same %d verdicts at revision %d", p.name, float64(took.Microseconds())/1000, len(after), revision), nil
}

// verdicts are what both users get for names that tell them apart, in words.
func (s *system) verdicts(ctx context.Context, p *process) (all []string, err error) {
	for _, name := range []string{"www.ads.example.", "banner.ads.example.", "stats.shop.example.", "nas.home.arpa.", "www.google.com.", "www.casino.example.", "www.ed25519.example."} {
		for _, c := range []client{alice, bob} {
			m, err := s.ask(ctx, p, c, udp, host(name))
			if err != nil {
				return nil, err
			}
			r := replyOf(m)
			all = append(all, fmt.Sprintf("%s for %s: %s %q %s", name, c.name, dns.RcodeToString[r.rcode], r.answer, r.why))
		}
	}
	return all, nil
}

func catchUp(ctx context.Context, s *system) (string, error) {
	q := host("www.adult.example.")
	if err := s.sequence(ctx, turn{bob, q, real}); err != nil {
		return "", err
	}
	if err := s.service.stop(); err != nil { // if the checks before did not get so far
		return "", fmt.Errorf("stopping the service: %w", err)
	}
	// The service is up again, but not where resolvers look for it.
	if err := s.service.start(); err != nil {
		return "", fmt.Errorf("starting the service again: %w", err)
	}
	revision, err := s.service.setRules(ctx, bob.name, "||adult.example^\n")
	if err != nil {
		return "", err
	}
	for _, p := range s.nodes {
		if r := p.revision(); r >= revision {
			return "", fmt.Errorf("%s has revision %d while the service cannot be reached", p.name, r)
		}
	}
	if err := s.sequence(ctx, turn{bob, q, real}); err != nil {
		return "", err
	}
	if err := s.service.open(); err != nil {
		return "", err
	}
	took, err := s.eventually(ctx, bob, q, blocked)
	return fmt.Sprintf("the change made meanwhile (revision %d) reached %s after the service was back", revision, took), err
}
