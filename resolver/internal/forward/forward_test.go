package forward

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/exchange"
	"github.com/sluice-dns/sluice/resolver/internal/forward/shadow"
	"github.com/sluice-dns/sluice/resolver/internal/forward/upstream"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/simnet"
)

// A rig is resolvers on an in-memory network without latency of its own, in a synctest bubble: how long things take
// is exact.
type rig struct {
	t   *testing.T
	net *simnet.Network
	x   *exchange.Exchange
	up  []*fake

	opened []*Pool
}

// A fake is a resolver that does as told: "20ms A 192.0.2.1; A 192.0.2.2", "5ms SERVFAIL", "silent" …
type fake struct {
	addr netip.AddrPort
	conn *simnet.PacketConn

	mu    sync.Mutex
	does  string
	asked int
	last  *dns.Msg
}

func (f *fake) do(does string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.does = does
}

func (f *fake) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked
}

// bubble runs f with resolvers at 192.0.2.1, .2 … that do as told.
func bubble(t *testing.T, does []string, f func(r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, net: simnet.New()}
		var running sync.WaitGroup
		for i, d := range does {
			u := &fake{addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}), 53), does: d}
			var err error
			if u.conn, err = r.net.ListenUDP(u.addr); err != nil {
				t.Fatal(err)
			}
			r.up = append(r.up, u)
			running.Go(func() { u.serve(&running) })
		}
		r.x = exchange.New(exchange.Options{Transport: exchange.Dialing(r.net.Dial)})
		f(r)
		for _, p := range r.opened {
			p.Close()
		}
		r.x.Close()
		for _, u := range r.up {
			u.conn.Close()
		}
		running.Wait()
		r.net.Close()
	})
}

func (f *fake) serve(running *sync.WaitGroup) {
	b := make([]byte, 4096)
	for {
		n, from, err := f.conn.ReadFromUDPAddrPort(b)
		if err != nil {
			return
		}
		q := new(dns.Msg)
		if q.Unpack(b[:n]) != nil || len(q.Question) != 1 {
			continue
		}
		f.mu.Lock()
		f.asked++
		f.last = q
		does := f.does
		f.mu.Unlock()
		m, delay := answer(q, does)
		if m == nil {
			continue
		}
		running.Go(func() {
			time.Sleep(delay)
			out, err := m.Pack()
			if err != nil {
				panic(err)
			}
			f.conn.WriteToUDPAddrPort(out, from)
		})
	}
}

// answer makes what does says of q; nil is silence.
func answer(q *dns.Msg, does string) (*dns.Msg, time.Duration) {
	if does == "silent" {
		return nil, 0
	}
	first, rest, _ := strings.Cut(does, " ")
	delay, err := time.ParseDuration(first)
	if err != nil {
		panic(err)
	}
	m := new(dns.Msg)
	m.SetReply(q)
	m.RecursionAvailable = true
	if rest == "noedns" {
		if q.IsEdns0() != nil {
			m.Rcode = dns.RcodeFormatError
			return m, delay
		}
		rest = "A 192.0.2.80"
	} else if q.IsEdns0() != nil {
		m.SetEdns0(1232, true)
	}
	if rcode, ok := dns.StringToRcode[rest]; ok {
		m.Rcode = rcode
		return m, delay
	}
	for line := range strings.SplitSeq(rest, ";") {
		line = strings.TrimSpace(line)
		section := &m.Answer
		if l, ok := strings.CutPrefix(line, "auth "); ok {
			section, line = &m.Ns, l
		}
		if line == "" {
			continue
		}
		rr, err := dns.NewRR(q.Question[0].Name + " " + line)
		if err != nil {
			panic(err)
		}
		*section = append(*section, rr)
	}
	return m, delay
}

// spec makes a pool's spec of words: "primary" for the first resolver, and so on.
func (r *rig) spec(s Strategy, quorum int, roles ...string) Spec {
	out := Spec{Strategy: s, Quorum: quorum}
	for i, role := range roles {
		out.Upstreams = append(out.Upstreams, Upstream{Spec: upstream.Spec{Addr: r.up[i].addr}, Role: Role(slices.Index(roleNames[:], role))})
	}
	return out
}

func (r *rig) options() Options {
	return Options{Options: upstream.Options{Exchange: r.x}, Shadow: shadow.Options{Sample: 1}}
}

func (r *rig) pool(s Spec) *Pool {
	r.t.Helper()
	p, err := New(s, r.options())
	if err != nil {
		r.t.Fatal(err)
	}
	r.opened = append(r.opened, p)
	return p
}

func askFor(name string) query.Ask {
	return query.Ask{Name: dnsname.MustParse(name), Type: dnswire.TypeA, Class: dnswire.ClassIN, Timeout: 8 * time.Second, Case0x20: true}
}

// ask puts a question to a pool; the text is the answer's data or the error.
func ask(ctx context.Context, p *Pool, name string, avoid ...netip.AddrPort) (text string, from netip.AddrPort, took time.Duration) {
	start := clock.Elapsed()
	reply, from, err := p.Forward(ctx, query.NewTree(start, query.Budget{}), askFor(name), avoid)
	took = clock.Elapsed().Sub(start)
	if err != nil {
		return "error: " + err.Error(), from, took
	}
	var lines []string
	for i := range reply.Message.Answer {
		s := &reply.Message.Answer[i]
		for d := range query.RDatas(s.Data) {
			lines = append(lines, dnswire.TypeText(s.Type)+" "+dnswire.Text(s.Type, d))
		}
	}
	slices.Sort(lines)
	return strings.Join(append([]string{dnswire.RCodeText(reply.Message.RCode)}, lines...), ", "), from, took
}

func (r *rig) counts() (out []int) {
	for _, u := range r.up {
		out = append(out, u.count())
	}
	return out
}

// The outcome, exact time and questions of one question to a pool that has learned nothing yet.
func TestStrategies(t *testing.T) {
	const unknown = 376 * time.Millisecond // least patience with a resolver never heard of; at most 24 ms more
	for _, tt := range []struct {
		what     string
		strategy Strategy
		quorum   int
		pool     string // role and what it does, each
		want     string // outcome, or a part of the error
		// from and to bound how long it takes; counts are questions by resolver.
		from, to time.Duration
		counts   []int
	}{
		{"a good one", Fastest, 0, "primary 20ms A 192.0.2.80", "NOERROR, A 192.0.2.80", 20 * time.Millisecond, 20 * time.Millisecond, []int{1}},
		{"NXDOMAIN is an answer", Fastest, 0, "primary 20ms NXDOMAIN | spare 1ms A 192.0.2.80", "NXDOMAIN", 20 * time.Millisecond, 20 * time.Millisecond, []int{1, 0}},
		{"NODATA is an answer", Fastest, 0, "primary 20ms auth SOA a. b. 1 2 3 4 5 | spare 1ms A 192.0.2.80", "NOERROR", 20 * time.Millisecond, 20 * time.Millisecond, []int{1, 0}},
		{"SERVFAIL is none", Fastest, 0, "primary 20ms SERVFAIL | spare 5ms A 192.0.2.80", "NOERROR, A 192.0.2.80", 25 * time.Millisecond, 25 * time.Millisecond, []int{1, 1}},
		{"REFUSED is none", Fastest, 0, "primary 20ms REFUSED | spare 5ms A 192.0.2.80", "NOERROR, A 192.0.2.80", 25 * time.Millisecond, 25 * time.Millisecond, []int{1, 1}},
		{"a referral is none", Fastest, 0, "primary 20ms auth NS a.b. | spare 5ms A 192.0.2.80", "NOERROR, A 192.0.2.80", 25 * time.Millisecond, 25 * time.Millisecond, []int{1, 1}},
		{"a referral is NODATA for want of better", Fastest, 0, "primary 20ms auth NS a.b. | spare 5ms SERVFAIL", "NOERROR", 25 * time.Millisecond, 25 * time.Millisecond, []int{1, 1}},
		{"silence ends patience", Fastest, 0, "primary silent | spare 5ms A 192.0.2.80", "NOERROR, A 192.0.2.80", unknown, unknown + 30*time.Millisecond, []int{1, 1}},
		{"a late primary beats a later spare", Fastest, 0, "primary 600ms A 192.0.2.80 | spare 2s A 192.0.2.81", "NOERROR, A 192.0.2.80", 600 * time.Millisecond, 600 * time.Millisecond, []int{1, 1}},
		{"a spare waits for all primaries", Fastest, 0, "primary 10ms SERVFAIL | primary 100ms A 192.0.2.80 | spare 1ms A 192.0.2.81", "NOERROR, A 192.0.2.80", 100 * time.Millisecond, 110 * time.Millisecond, []int{-1, 1, 0}},
		{"all say no", Fastest, 0, "primary 10ms SERVFAIL | primary 10ms REFUSED | spare 10ms FORMERR", "192.0.2.3:53 said FORMERR", 30 * time.Millisecond, 30 * time.Millisecond, []int{1, 1, 1}},
		{"UDP lost is sent again, three times at most", Fastest, 0, "primary silent", "timed out", 7 * time.Second, 8 * time.Second, []int{3}},
		{"hedged knows no time to hedge by", Hedged, 0, "primary 20ms A 192.0.2.80 | primary 20ms A 192.0.2.80", "NOERROR, A 192.0.2.80", 20 * time.Millisecond, 20 * time.Millisecond, nil},
		{"race: the first", Race, 0, "primary 300ms A 192.0.2.80 | primary 30ms A 192.0.2.81 | primary silent | spare 1ms A 192.0.2.82", "NOERROR, A 192.0.2.81", 30 * time.Millisecond, 30 * time.Millisecond, []int{1, 1, 1, 0}},
		{"race: a quick failure wins nothing", Race, 0, "primary 1ms SERVFAIL | primary 30ms A 192.0.2.81 | spare 1ms A 192.0.2.82", "NOERROR, A 192.0.2.81", 30 * time.Millisecond, 30 * time.Millisecond, []int{1, 1, 0}},
		{"race: spares when all failed", Race, 0, "primary 1ms SERVFAIL | primary 30ms REFUSED | spare 1ms A 192.0.2.82", "NOERROR, A 192.0.2.82", 31 * time.Millisecond, 31 * time.Millisecond, []int{1, 1, 1}},
		{"quorum: the slow one is not waited for", Quorum, 2, "primary 10ms A 192.0.2.80 | primary 20ms A 192.0.2.80 | primary 5s A 192.0.2.80", "NOERROR, A 192.0.2.80", 20 * time.Millisecond, 20 * time.Millisecond, []int{1, 1, 1}},
		{"quorum: one lie is outvoted", Quorum, 2, "primary 1ms A 203.0.113.66 | primary 20ms A 192.0.2.80 | primary 30ms A 192.0.2.80", "NOERROR, A 192.0.2.80", 30 * time.Millisecond, 30 * time.Millisecond, []int{1, 1, 1}},
		{"quorum: order, TTL and case do not matter", Quorum, 2, "primary 10ms 60 A 192.0.2.80; 60 A 192.0.2.81; CNAME WWW.a. | primary 20ms 5 A 192.0.2.81; 7 A 192.0.2.80; CNAME www.A.", "NOERROR, A 192.0.2.80, A 192.0.2.81, CNAME WWW.a.", 20 * time.Millisecond, 20 * time.Millisecond, []int{1, 1}},
		{"quorum: RCODE matters", Quorum, 2, "primary 10ms NXDOMAIN | primary 20ms NOERROR", "no quorum: of 2 answers 1 agree, 2 must", 20 * time.Millisecond, 20 * time.Millisecond, []int{1, 1}},
		{"quorum: disagreement calls no spare", Quorum, 2, "primary 10ms A 192.0.2.80 | primary 20ms A 192.0.2.81 | spare 1ms A 192.0.2.80", "no quorum", 20 * time.Millisecond, 20 * time.Millisecond, []int{1, 1, 0}},
		{"quorum: a spare stands in for one that failed", Quorum, 2, "primary 10ms A 192.0.2.80 | primary 20ms SERVFAIL | spare 5ms A 192.0.2.80 | spare 5ms A 192.0.2.80", "NOERROR, A 192.0.2.80", 25 * time.Millisecond, 25 * time.Millisecond, []int{1, 1, -1, -1}},
		{"quorum: impossible is said at once", Quorum, 2, "primary 10ms A 192.0.2.80 | primary 20ms SERVFAIL", "no quorum: of 1 answers 1 agree, 2 must", 20 * time.Millisecond, 20 * time.Millisecond, []int{1, 1}},
		{"a shadow is no spare", Fastest, 0, "primary 10ms SERVFAIL | shadow 1ms A 192.0.2.80", "said SERVFAIL", 10 * time.Millisecond, 10 * time.Millisecond, []int{1, 0}},
		{"without EDNS, if that is it", Fastest, 0, "primary 10ms noedns", "NOERROR, A 192.0.2.80", 20 * time.Millisecond, 20 * time.Millisecond, []int{2}},
	} {
		t.Run(tt.what, func(t *testing.T) {
			var roles, does []string
			for u := range strings.SplitSeq(tt.pool, " | ") {
				role, d, _ := strings.Cut(u, " ")
				roles, does = append(roles, role), append(does, d)
			}
			bubble(t, does, func(r *rig) {
				p := r.pool(r.spec(tt.strategy, tt.quorum, roles...))
				got, _, took := ask(r.t.Context(), p, "www.example.com.")
				if isError := strings.HasPrefix(got, "error"); isError && !strings.Contains(got, tt.want) || !isError && got != tt.want {
					t.Errorf("got %q, want %q", got, tt.want)
				}
				if took < tt.from || took > tt.to {
					t.Errorf("took %v, want %v to %v", took, tt.from, tt.to)
				}
				for i, want := range tt.counts {
					if n := r.up[i].count(); want >= 0 && n != want {
						t.Errorf("questions by resolver: %v, want %v", r.counts(), tt.counts)
						break
					}
				}
				for _, u := range r.up {
					if q := u.last; q != nil && (!q.RecursionDesired || !q.CheckingDisabled || q.IsEdns0() != nil && !q.IsEdns0().Do()) {
						t.Errorf("asked without RD, CD or DO:\n%v", q)
					}
				}
			})
		})
	}
}

// Of three, the one with the least round-trip time gets nearly everything; when it gets slow or dies, another does.
func TestFastestFollowsTheClock(t *testing.T) {
	bubble(t, []string{"50ms A 192.0.2.80", "5ms A 192.0.2.80", "100ms A 192.0.2.80"}, func(r *rig) {
		p := r.pool(r.spec(Fastest, 0, "primary", "primary", "primary"))
		round := func(n int) (counts []int, worst time.Duration) {
			before := r.counts()
			for i := range n {
				got, _, took := ask(r.t.Context(), p, fmt.Sprintf("n%d.example.com.", i))
				if got != "NOERROR, A 192.0.2.80" {
					t.Errorf("got %q", got)
				}
				worst = max(worst, took)
			}
			for i, n := range r.counts() {
				counts = append(counts, n-before[i])
			}
			return counts, worst
		}
		// Exploring finds the fastest, by a chance of one in forty each time: one in a hundred runs needs 180 questions.
		for p.Stats(clock.Elapsed()).Upstreams[1].SRTT == 0 {
			if r.up[0].count() > 5000 || r.up[2].count() > 5000 {
				t.Fatalf("questions %v: the second was never tried", r.counts())
			}
			round(1)
		}
		if n, worst := round(200); n[1] < 150 || worst > 100*time.Millisecond {
			t.Errorf("questions %v, want nearly all at the second; the slowest took %v", n, worst)
		}
		r.up[1].do("400ms A 192.0.2.80")
		round(100)
		if n, _ := round(200); n[0] < 150 {
			t.Errorf("once the second is slow: %v, want nearly all at the first", n)
		}
		r.up[0].do("silent")
		round(20)
		if n, _ := round(200); n[2] < 150 {
			t.Errorf("once the first is dead: %v, want nearly all at the third", n)
		}
	})
}

// Who is asked by chance is followed by the best, not by another of whom nothing good is known.
func TestExploringFallsBackOnTheBest(t *testing.T) {
	var s Spec
	for n := range byte(4) {
		s.Upstreams = append(s.Upstreams, Upstream{Spec: upstream.Spec{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, n}), 53)}})
	}
	p, err := New(s, Options{Options: upstream.Options{Exchange: fakeExchange{}}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	now := clock.Elapsed()
	for i, m := range p.ups[:3] { // of the fourth nothing is known
		p.speed.Answered(now, m.key, time.Duration(i+1)*10*time.Millisecond)
	}
	first := map[*member]int{}
	for range 20_000 {
		out, explored := p.order(now, Primary, nil)
		if first[out[0]]++; !explored {
			continue
		}
		rest := slices.DeleteFunc(slices.Clone(p.ups), func(m *member) bool { return m == out[0] })
		if out[0] == p.ups[0] || !slices.Equal(out[1:], rest) {
			t.Fatalf("explored, and then not from the best on")
		}
	}
	for i, m := range p.ups {
		if n := first[m]; (n > 10_000) != (i == 0) || n == 0 {
			t.Errorf("upstream %d was the first %d times of 20,000", i, n)
		}
	}
}

// Hedged asks a second one as soon as the first takes longer than it usually does.
func TestHedge(t *testing.T) {
	bubble(t, []string{"20ms A 192.0.2.80", "25ms A 192.0.2.80"}, func(r *rig) {
		p := r.pool(r.spec(Hedged, 0, "primary", "primary"))
		for i := range 60 {
			ask(r.t.Context(), p, fmt.Sprintf("n%d.example.com.", i))
		}
		before := r.counts()
		r.up[0].do("300ms A 192.0.2.80")
		got, _, took := ask(r.t.Context(), p, "hedged.example.com.")
		// The first after 20 ms and half as much again, then the second; or the second at once, by exploring.
		if got != "NOERROR, A 192.0.2.80" || took > 60*time.Millisecond {
			t.Errorf("%q after %v, want an answer within 60ms", got, took)
		}
		if n := r.counts(); n[0]+n[1]-before[0]-before[1] > 2 {
			t.Errorf("questions before %v, after %v: want two at most", before, n)
		}
	})
}

// An upstream that refuses is asked last for a while, and forgiven.
func TestRefusalIsRemembered(t *testing.T) {
	bubble(t, []string{"1ms REFUSED", "50ms A 192.0.2.80"}, func(r *rig) {
		p := r.pool(r.spec(Fastest, 0, "primary", "primary"))
		for i := range 50 {
			if got, _, _ := ask(r.t.Context(), p, fmt.Sprintf("n%d.example.com.", i)); got != "NOERROR, A 192.0.2.80" {
				t.Error(got)
			}
		}
		if n := r.up[0].count(); n > 2 {
			t.Errorf("the one that refuses was asked %d times", n)
		}
		r.up[0].do("1ms A 192.0.2.81")
		time.Sleep(refusedFor)
		if got, _, _ := ask(r.t.Context(), p, "later.example.com."); got != "NOERROR, A 192.0.2.81" && got != "NOERROR, A 192.0.2.80" {
			t.Error(got)
		}
		const later = 600 // exploring, one question in twenty, surely finds it in the first half of these
		for i := range later {
			ask(r.t.Context(), p, fmt.Sprintf("m%d.example.com.", i))
		}
		if n := r.up[0].count(); n < later/2 {
			t.Errorf("the one that refused once was asked %d times of %d later", n, later)
		}
	})
}

// A bogus answer is asked for elsewhere; the one to avoid is asked when all others failed.
func TestAvoid(t *testing.T) {
	bubble(t, []string{"1ms A 203.0.113.66", "30ms A 192.0.2.80"}, func(r *rig) {
		p := r.pool(r.spec(Fastest, 0, "primary", "primary"))
		for range 20 {
			if got, from, _ := ask(r.t.Context(), p, "www.example.com.", r.up[0].addr); got != "NOERROR, A 192.0.2.80" || from != r.up[1].addr {
				t.Fatalf("%q of %v", got, from)
			}
		}
		r.up[1].do("1ms SERVFAIL")
		if got, _, _ := ask(r.t.Context(), p, "www.example.com.", r.up[0].addr); got != "NOERROR, A 203.0.113.66" {
			t.Error(got)
		}
	})
}

// What ends a question for reasons of its own says so, and costs no upstream its name.
func TestLimits(t *testing.T) {
	bubble(t, []string{"silent", "silent"}, func(r *rig) {
		p := r.pool(r.spec(Race, 0, "primary", "primary"))
		tree := query.NewTree(clock.Elapsed(), query.Budget{Queries: 1})
		if _, _, err := p.Forward(r.t.Context(), tree, askFor("a."), nil); !errors.Is(err, query.ErrLimit) {
			t.Errorf("a spent tree: %v", err)
		}
		tree = query.NewTree(clock.Elapsed(), query.Budget{Time: time.Second})
		start := clock.Elapsed()
		if _, _, err := p.Forward(r.t.Context(), tree, askFor("b."), nil); !errors.Is(err, query.ErrLimit) || clock.Elapsed().Sub(start) != time.Second {
			t.Errorf("no time left: %v after %v", err, clock.Elapsed().Sub(start))
		}
		ctx, cancel := context.WithCancel(r.t.Context())
		time.AfterFunc(50*time.Millisecond, cancel)
		start = clock.Elapsed()
		if _, _, err := p.Forward(ctx, query.NewTree(start, query.Budget{}), askFor("c."), nil); !errors.Is(err, context.Canceled) || clock.Elapsed().Sub(start) != 50*time.Millisecond {
			t.Errorf("given up: %v after %v", err, clock.Elapsed().Sub(start))
		}
		p.Close()
		if _, _, err := p.Forward(r.t.Context(), query.NewTree(start, query.Budget{}), askFor("d."), nil); !errors.Is(err, net.ErrClosed) {
			t.Errorf("a closed pool: %v", err)
		}
	})
}

// Close lets what is under way end.
func TestCloseWaits(t *testing.T) {
	bubble(t, []string{"500ms A 192.0.2.80"}, func(r *rig) {
		p := r.pool(r.spec(Fastest, 0, "primary"))
		got := make(chan string, 1)
		go func() {
			text, _, _ := ask(r.t.Context(), p, "www.example.com.")
			got <- text
		}()
		synctest.Wait()
		p.Close()
		if text := <-got; text != "NOERROR, A 192.0.2.80" {
			t.Error(text)
		}
	})
}

func TestCheck(t *testing.T) {
	up := func(n byte, r Role) Upstream {
		return Upstream{Spec: upstream.Spec{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, n}), 53)}, Role: r}
	}
	for _, tt := range []struct {
		spec Spec
		want string // "": good
	}{
		{Spec{Upstreams: []Upstream{up(1, Primary)}}, ""},
		{Spec{Upstreams: []Upstream{up(1, Primary), up(2, Primary)}, Strategy: Quorum, Quorum: 2}, ""},
		{Spec{}, "no upstream is a primary"},
		{Spec{Upstreams: []Upstream{up(1, Spare), up(2, Shadow)}}, "no upstream is a primary"},
		{Spec{Upstreams: []Upstream{up(1, Primary), up(2, Spare), up(3, Shadow)}, Strategy: Quorum, Quorum: 2}, "a quorum of 2 of 1 primaries"},
		{Spec{Upstreams: []Upstream{up(1, Primary)}, Strategy: Quorum}, "how many must agree"},
		{Spec{Upstreams: []Upstream{up(1, Primary)}, Strategy: Race, Quorum: 1}, "without the strategy quorum"},
		{Spec{Upstreams: []Upstream{up(1, Primary)}, Strategy: 9}, "unknown strategy"},
		{Spec{Upstreams: []Upstream{up(1, Primary), up(2, 9)}}, "unknown role"},
		{Spec{Upstreams: []Upstream{up(1, Primary), up(1, Shadow)}}, "twice"},
		{Spec{Upstreams: []Upstream{{}}}, "no address"},
		{Spec{Upstreams: []Upstream{{Spec: upstream.Spec{Scheme: upstream.TLS, Addr: up(1, 0).Addr}}}}, "no name to verify"},
	} {
		p, err := New(tt.spec, Options{Options: upstream.Options{Exchange: fakeExchange{}}})
		switch {
		case tt.want == "" && err != nil, tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
			t.Errorf("%+v: %v, want %q", tt.spec, err, tt.want)
		case err == nil:
			p.Close()
		}
	}
}

type fakeExchange struct{ upstream.Exchange }

// What a shadow says is counted and goes nowhere, whatever it says and however long it takes.
func TestShadow(t *testing.T) {
	const good = "10ms 60 A 192.0.2.80"
	for does, want := range map[string]UpstreamStats{
		"20ms 5 A 192.0.2.80":    {Asked: 1, Answered: 1, Same: 1},
		"20ms A 203.0.113.66":    {Asked: 1, Answered: 1, Different: 1},
		"1ms NXDOMAIN":           {Asked: 1, Answered: 1, Different: 1},
		"1ms SERVFAIL":           {Asked: 1, Failed: 1},
		"silent":                 {Asked: 1, TimedOut: 1},
		"4s 60 A 192.0.2.80":     {Asked: 1, Answered: 1, Same: 1},
		"1ms auth NS elsewhere.": {Asked: 1, Failed: 1},
	} {
		bubble(t, []string{good, does}, func(r *rig) {
			p := r.pool(r.spec(Fastest, 0, "primary", "shadow"))
			tree := query.NewTree(clock.Elapsed(), query.Budget{Queries: 10})
			start := clock.Elapsed()
			if _, from, err := p.Forward(r.t.Context(), tree, askFor("www.example.com."), nil); err != nil || from != r.up[0].addr || clock.Elapsed().Sub(start) != 10*time.Millisecond {
				t.Errorf("shadow %q: answer of %v after %v, %v", does, from, clock.Elapsed().Sub(start), err)
			}
			if tree.Left() != 9 {
				t.Errorf("shadow %q: the client was charged %d queries", does, 10-tree.Left())
			}
			time.Sleep(10 * time.Second)
			got := p.Stats(clock.Elapsed()).Upstreams[1]
			got.Name, got.Role, got.SRTT = "", 0, 0
			if got != want {
				t.Errorf("shadow %q: %+v, want %+v", does, got, want)
			}
		})
	}
}

// A shadow's budget is its own, and bounded.
func TestShadowBudget(t *testing.T) {
	bubble(t, []string{"1ms A 192.0.2.80", "silent"}, func(r *rig) {
		p := r.pool(r.spec(Fastest, 0, "primary", "shadow"))
		for i := range 100 {
			if got, _, took := ask(r.t.Context(), p, fmt.Sprintf("n%d.example.com.", i)); got != "NOERROR, A 192.0.2.80" || took != time.Millisecond {
				t.Fatalf("%q after %v", got, took)
			}
		}
		if s := p.Stats(clock.Elapsed()).Upstreams[1]; r.up[1].count() != 16 || s.Skipped != 84 {
			t.Errorf("%d questions, %d skipped; want 16 and 84", r.up[1].count(), s.Skipped)
		}
		// The rest is free again once those have timed out; closing ends what is under way.
		time.Sleep(6 * time.Second)
		ask(r.t.Context(), p, "again.example.com.")
		synctest.Wait()
		if n := r.up[1].count(); n != 17 {
			t.Errorf("%d questions, want 17", n)
		}
	})
}

// Nothing made of a message can come out of a shadow: no method of a Set returns anything but counters and an error,
// and none takes what could be filled in.
func TestShadowCannotAnswerByType(t *testing.T) {
	set := reflect.TypeFor[*shadow.Set]()
	allowed := map[reflect.Type]bool{reflect.TypeFor[[]*shadow.Counters](): true, reflect.TypeFor[error](): true}
	for i := range set.NumMethod() {
		m := set.Method(i)
		for j := range m.Type.NumOut() {
			if out := m.Type.Out(j); !allowed[out] {
				t.Errorf("%s returns %v", m.Name, out)
			}
		}
		for j := 1; j < m.Type.NumIn(); j++ {
			switch in := m.Type.In(j); in.Kind() {
			case reflect.Pointer, reflect.Func, reflect.Chan, reflect.Map, reflect.Interface, reflect.Slice:
				t.Errorf("%s takes %v", m.Name, in)
			}
		}
	}
	counters := reflect.TypeFor[shadow.Counters]()
	for i := range counters.NumField() {
		if f := counters.Field(i); f.Type.Kind() != reflect.Struct || f.Type.PkgPath() != "sync/atomic" {
			t.Errorf("Counters.%s is a %v", f.Name, f.Type)
		}
	}
	pool := reflect.TypeFor[observer]()
	if pool.NumMethod() != 1 || pool.Method(0).Type.NumOut() != 0 {
		t.Errorf("a pool sees more of its shadows than Observe")
	}
}
