package pipeline

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
	"github.com/sluice-dns/sluice/resolver/internal/render"
)

// stages are the fakes of one test; nil functions do nothing.
type stages struct {
	early, late, identify func(*query.Query) query.RefuseReason
	question              func(*query.Query) query.Verdict
	answer                func(*query.Query, *query.Answer, query.Verdict) query.Verdict
	held                  func(query.Question) (settled.Entry, bool, bool)
	fetch                 func(context.Context, *query.Tree, query.Question) (settled.Entry, error)
	stale                 func(query.Question) (settled.Entry, bool)
	postponed             func(query.Question)

	prove    func(*query.Query)
	prepare  func()
	prepared atomic.Bool
	changing atomic.Int32 // how often Prepare finds that the client's settings have changed

	mu    sync.Mutex
	due   bool // what the cache has is near its end
	cache map[query.Question]settled.Entry
	local map[query.Question]settled.Entry
}

func call(f func(*query.Query) query.RefuseReason, q *query.Query) query.RefuseReason {
	if f == nil {
		return query.NotRefused
	}
	return f(q)
}
func (s *stages) Early(q *query.Query) query.RefuseReason    { return call(s.early, q) }
func (s *stages) Late(q *query.Query) query.RefuseReason     { return call(s.late, q) }
func (s *stages) Identify(q *query.Query) query.RefuseReason { return call(s.identify, q) }
func (s *stages) Unassigned(*query.Query) bool               { return false }
func (s *stages) Prove(_ context.Context, q *query.Query)    { s.prove(q) }
func (s *stages) Ready(*query.Query) bool                    { return s.prepare == nil || s.prepared.Load() }
func (s *stages) Prepare(context.Context, *query.Query) bool {
	s.prepare()
	if s.changing.Add(-1) >= 0 {
		return false
	}
	s.prepared.Store(true)
	return true
}
func (s *stages) Question(q *query.Query) query.Verdict {
	if s.question == nil {
		return query.Verdict{}
	}
	return s.question(q)
}
func (s *stages) Answer(q *query.Query, a *query.Answer, v query.Verdict) query.Verdict {
	if s.answer == nil {
		return query.Verdict{}
	}
	return s.answer(q, a, v)
}
func (s *stages) Lookup(q *query.Question, _ clock.Instant) (settled.Entry, bool) {
	e, ok := s.local[*q]
	return e, ok
}
func (s *stages) Get(q *query.Question, _ clock.Instant, buf []byte) (settled.Entry, bool, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.cache[*q]
	return e, s.due, ok
}
func (s *stages) Fetch(ctx context.Context, tree *query.Tree, q query.Question) (settled.Entry, error) {
	if s.fetch == nil {
		return address(q, "192.0.2.1"), nil
	}
	return s.fetch(ctx, tree, q)
}

func (s *stages) Refresh(ctx context.Context, tree *query.Tree, q query.Question) error {
	_, err := s.Fetch(ctx, tree, q)
	return err
}

func (s *stages) Postpone(q query.Question) { s.postponed(q) }

func (s *stages) Stale(q query.Question) (settled.Entry, bool) {
	if s.stale == nil {
		return settled.Entry{}, false
	}
	return s.stale(q)
}

func (s *stages) Held(q query.Question) (settled.Entry, bool, bool) {
	if s.held == nil {
		return settled.Entry{}, false, false
	}
	return s.held(q)
}

func address(q query.Question, ip string) settled.Entry {
	a := netip.MustParseAddr(ip).As4()
	u := &query.Unvalidated{Question: q, Answer: []query.RRset{{Name: q.Name, Type: 1, Class: 1, TTL: 300, Data: query.AppendRData(nil, a[:])}}}
	e, err := settled.Settle(u, query.Indeterminate, settled.Options{Now: clock.Elapsed(), EDE: query.NoEDE})
	if err != nil {
		panic(err)
	}
	return e
}

func start(t testing.TB, ctx context.Context, s *stages, o Options) *Pipeline {
	o.Gate, o.Identify, o.Policy, o.Local, o.Answers, o.Fetch = s, s, s, s, s, s
	o.Render = render.New(render.Options{MaxUDP: 1232, EDE: true})
	o.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	return New(ctx, o)
}

// ask sends one query through the pipeline as a listener does and returns what comes of it, nil for silence.
func ask(t testing.TB, p *Pipeline, w *query.Worker, name string, edit func(*dns.Msg, *query.Query)) *dns.Msg {
	t.Helper()
	q := read(t, name, edit)
	var out [1500]byte
	n, after := p.TryNow(w, q, out[:])
	if after&query.AfterResolve == 0 {
		return message(t, out[:n])
	}
	got := make(chan []byte, 1)
	p.Resolve(q.Own(), func(r []byte) { got <- append([]byte(nil), r...) })
	return message(t, <-got)
}

func read(t testing.TB, name string, edit func(*dns.Msg, *query.Query)) *query.Query {
	t.Helper()
	m := new(dns.Msg)
	m.SetQuestion(name, dns.TypeA)
	m.SetEdns0(1232, false)
	q := &query.Query{Transport: query.UDP, Source: netip.MustParseAddrPort("192.0.2.50:5000"), Arrived: clock.Elapsed()}
	if edit != nil {
		edit(m, q)
	}
	wire, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	if f := q.Read(wire); f != query.NoFault {
		t.Fatalf("fault %d", f)
	}
	return q
}

func message(t testing.TB, wire []byte) *dns.Msg {
	t.Helper()
	if len(wire) == 0 {
		return nil
	}
	m := new(dns.Msg)
	if err := m.Unpack(wire); err != nil {
		t.Fatal(err)
	}
	return m
}

// brief says of a response what matters: RCODE, extended error, answers.
func brief(m *dns.Msg) string {
	if m == nil {
		return "silence"
	}
	s := dns.RcodeToString[m.Rcode]
	if m.Truncated {
		s += " TC"
	}
	if o := m.IsEdns0(); o != nil {
		for _, x := range o.Option {
			if e, ok := x.(*dns.EDNS0_EDE); ok {
				s += fmt.Sprintf(" EDE%d", e.InfoCode)
			}
		}
	}
	for _, rr := range m.Answer {
		s += " " + strings.Join(strings.Fields(rr.String())[3:], "=")
	}
	return s
}

// An answer that is near its end and that policy has put in the place of what was asked is refreshed; what is noted of
// the query is what was asked.
func TestRefreshedAndLogged(t *testing.T) {
	asked, to := dnsname.MustParse("www.example."), dnsname.MustParse("target.example.")
	target := query.Question{Name: to, Type: 1, Class: 1}
	refreshed, noted := make(chan query.Question, 9), make(chan query.Question, 9)
	s := &stages{due: true, cache: map[query.Question]settled.Entry{target: address(target, "192.0.2.1")}}
	s.question = func(q *query.Query) query.Verdict {
		if q.Turn.Current.Name == asked {
			return query.Verdict{Kind: query.Redirected, Target: to}
		}
		return query.Verdict{}
	}
	s.fetch = func(_ context.Context, _ *query.Tree, q query.Question) (settled.Entry, error) {
		refreshed <- q
		return address(q, "192.0.2.1"), nil
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	p := start(t, ctx, s, Options{Log: func(*query.Query) query.After { return query.AfterLog | query.AfterCount },
		Observe: func(e *query.Event) { noted <- e.Question() }})
	w := p.NewWorker()
	if got := brief(ask(t, p, w, "www.example.", nil)); got != "NOERROR CNAME=target.example. A=192.0.2.1" {
		t.Fatal(got)
	}
	w.Ring.Wake()
	if got := <-refreshed; got.Name != to {
		t.Errorf("%v is refreshed, want %v", got.Name, to)
	}
	if got := <-noted; got.Name != asked {
		t.Errorf("%v is noted, want %v", got.Name, asked)
	}
	cancel()
	p.Close()
	if len(noted) > 0 {
		t.Error("it is noted twice")
	}
}

func TestEveryVerdictAtBothPoints(t *testing.T) {
	to := dnsname.MustParse("target.example.")
	synth := &query.Synth{TTL: 9, RRs: []query.RRset{{Type: 1, Data: query.AppendRData(nil, []byte{192, 0, 2, 7}), TTL: 9}}}
	want := map[query.VerdictKind]string{
		query.Pass:        "NOERROR A=192.0.2.1",
		query.Allowed:     "NOERROR A=192.0.2.1",
		query.Blocked:     "NOERROR EDE15 A=0.0.0.0",
		query.Redirected:  "NOERROR CNAME=target.example. A=192.0.2.1",
		query.Flattened:   "NOERROR A=192.0.2.1",
		query.Synthesised: "NOERROR A=192.0.2.7",
		query.Dropped:     "silence",
		query.Refused:     "REFUSED EDE18",
		query.Truncated:   "NOERROR TC",
	}
	if len(want) != query.NumVerdictKind {
		t.Fatalf("the table has %d of %d verdicts", len(want), query.NumVerdictKind)
	}
	for kind, expect := range want {
		for _, onAnswer := range []bool{false, true} {
			for _, warm := range []bool{false, true} {
				v := query.Verdict{Kind: kind, Why: 5, List: 7, Target: to, Synth: synth, Block: query.Block{EDE: 15, TTL: time.Minute}}
				s := &stages{cache: map[query.Question]settled.Entry{}}
				fetched := 0
				s.fetch = func(_ context.Context, _ *query.Tree, q query.Question) (settled.Entry, error) {
					fetched++
					return address(q, "192.0.2.1"), nil
				}
				first := func(q *query.Query) bool { return q.Turn.Current.Name != to }
				if onAnswer {
					s.answer = func(q *query.Query, _ *query.Answer, _ query.Verdict) query.Verdict {
						if first(q) {
							return v
						}
						return query.Verdict{}
					}
				} else {
					s.question = func(q *query.Query) query.Verdict {
						if first(q) {
							return v
						}
						return query.Verdict{}
					}
				}
				if warm {
					for _, n := range []dnsname.Name{to, dnsname.MustParse("www.example.")} {
						q := query.Question{Name: n, Type: 1, Class: 1}
						s.cache[q] = address(q, "192.0.2.1")
					}
				}
				ctx, cancel := context.WithCancel(t.Context())
				p := start(t, ctx, s, Options{ByList: 1 << 5})
				got := brief(ask(t, p, p.NewWorker(), "www.example.", nil))
				if got != expect {
					t.Errorf("%v on answer=%v warm=%v: %s, want %s", kind, onAnswer, warm, got, expect)
				}
				// What was said is what is counted, whatever silence came after it.
				var said [query.NumVerdictKind]uint64
				var byList uint64
				for _, w := range p.Workers() {
					for k := range said {
						said[k] += w.Counters.Verdicts[k].Load()
					}
					byList += w.Counters.Lists[7].Load()
				}
				var once [query.NumVerdictKind]uint64
				if once[kind] = 1; said != once || byList != 1 {
					t.Errorf("%v on answer=%v warm=%v: counted as %v, %d times by the list", kind, onAnswer, warm, said, byList)
				}
				if warm && fetched > 0 {
					t.Errorf("%v on answer=%v: %d fetches with a warm cache", kind, onAnswer, fetched)
				}
				if ends := kind != query.Pass && kind != query.Allowed && kind != query.Redirected && kind != query.Flattened; ends && !onAnswer && fetched > 0 {
					t.Errorf("%v: the question was resolved all the same", kind)
				}
				cancel()
				p.Close()
			}
		}
	}
}

func TestRefusals(t *testing.T) {
	for why, want := range map[query.RefuseReason]string{
		query.RefuseAccess:      "REFUSED EDE18",
		query.RefuseStranger:    "REFUSED EDE18",
		query.RefuseDevice:      "REFUSED EDE18",
		query.RefuseCold:        "REFUSED EDE14",
		query.RefuseRate:        "silence",
		query.RefuseSlip:        "NOERROR TC",
		query.RefuseOutstanding: "silence",
		query.RefuseBusy:        "SERVFAIL EDE22",
		query.RefuseConnections: "silence",
	} {
		for stage, s := range map[string]*stages{
			"early":    {early: func(*query.Query) query.RefuseReason { return why }},
			"identify": {identify: func(*query.Query) query.RefuseReason { return why }},
			"late":     {late: func(*query.Query) query.RefuseReason { return why }},
		} {
			s.question = func(*query.Query) query.Verdict { t.Error("policy was asked"); return query.Verdict{} }
			ctx, cancel := context.WithCancel(t.Context())
			p := start(t, ctx, s, Options{})
			w := p.NewWorker()
			if got := brief(ask(t, p, w, "www.example.", nil)); got != want {
				t.Errorf("%v at %s: %s, want %s", why, stage, got, want)
			}
			if n := w.Counters.Refused[why].Load(); n != 1 {
				t.Errorf("%v at %s: counted %d times", why, stage, n)
			}
			cancel()
			p.Close()
		}
	}
}

// Who gave an id that nobody has, and is served all the same, is counted once, whatever way the query takes; who is refused
// counts as that alone.
func TestMisnamedClients(t *testing.T) {
	for why, want := range map[query.RefuseReason]uint64{query.NotRefused: 1, query.RefuseDevice: 0} {
		ctx, cancel := context.WithCancel(t.Context())
		p := start(t, ctx, &stages{identify: func(q *query.Query) query.RefuseReason { q.Client.Misnamed = true; return why }}, Options{})
		w := p.NewWorker()
		ask(t, p, w, "www.example.", nil) // which is resolved
		n := uint64(0)
		for _, w := range p.Workers() {
			n += w.Counters.Misnamed.Load()
		}
		if n != want {
			t.Errorf("%v: counted %d times, want %d", why, n, want)
		}
		cancel()
		p.Close()
	}
}

func TestQuestionsNotForUs(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	p := start(t, ctx, &stages{}, Options{})
	defer p.Close()
	defer cancel()
	w := p.NewWorker()
	for _, c := range []struct {
		typ, class uint16
		want       string
	}{
		{dns.TypeAXFR, 1, "REFUSED EDE20"}, {dns.TypeIXFR, 1, "REFUSED EDE20"}, {dns.TypeMAILB, 1, "NOTIMP"}, {dns.TypeTSIG, 1, "NOTIMP"},
		{dns.TypeOPT, 1, "FORMERR"}, {0, 1, "FORMERR"}, {dns.TypeA, 255, "REFUSED EDE21"}, {dns.TypeA, 4, "REFUSED EDE21"}, {dns.TypeTXT, 3, "REFUSED EDE21"},
	} {
		got := brief(ask(t, p, w, "www.example.", func(m *dns.Msg, _ *query.Query) {
			m.Question[0].Qtype, m.Question[0].Qclass = c.typ, c.class
		}))
		if got != c.want {
			t.Errorf("type %d class %d: %s, want %s", c.typ, c.class, got, c.want)
		}
	}
	if got := brief(ask(t, p, w, "www.example.", func(m *dns.Msg, _ *query.Query) { m.RecursionDesired = false })); got != "REFUSED EDE20" {
		t.Errorf("RD=0: %s", got)
	}
}

// RD=0: what the caches have is for whom the operator trusts, and nobody is asked; but what is past its end is fetched
// anew.
func TestRecursionNotDesired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			what               string
			trusted            bool
			have, stale, panic bool
			want               string
			fetches            int32
		}{
			{"a stranger", false, true, false, false, "REFUSED EDE20", 0},
			{"nothing is held", true, false, false, false, "REFUSED EDE20", 0},
			{"an answer is held", true, true, false, false, "NOERROR A=192.0.2.9", 0},
			{"one past its end is", true, true, true, false, "NOERROR A=192.0.2.9", 1},
			{"a panic", true, false, false, true, "REFUSED EDE20", 0},
		} {
			ctx, cancel := context.WithCancel(t.Context())
			var fetches atomic.Int32
			p := start(t, ctx, &stages{
				early: func(q *query.Query) query.RefuseReason { q.Client.Unlimited = c.trusted; return query.NotRefused },
				held: func(q query.Question) (settled.Entry, bool, bool) {
					if !c.trusted {
						t.Errorf("%s: the caches were looked into", c.what)
					}
					if c.panic {
						panic("x")
					}
					if !c.have {
						return settled.Entry{}, false, false
					}
					return address(q, "192.0.2.9"), c.stale, true
				},
				fetch: func(_ context.Context, _ *query.Tree, q query.Question) (settled.Entry, error) {
					fetches.Add(1)
					return address(q, "192.0.2.1"), nil
				},
			}, Options{})
			got := brief(ask(t, p, p.NewWorker(), "www.example.", func(m *dns.Msg, _ *query.Query) { m.RecursionDesired = false }))
			synctest.Wait()
			if got != c.want || fetches.Load() != c.fetches {
				t.Errorf("%s: %s and %d fetches, want %s and %d", c.what, got, fetches.Load(), c.want, c.fetches)
			}
			cancel()
			p.Close()
		}
	})
}

// A crowd asks one question: one flight, one answer each, the retransmission none.
func TestOneFlightForACrowd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var fetches atomic.Int32
		s := &stages{fetch: func(_ context.Context, _ *query.Tree, q query.Question) (settled.Entry, error) {
			fetches.Add(1)
			time.Sleep(time.Second)
			return address(q, "192.0.2.1"), nil
		}}
		ctx, cancel := context.WithCancel(t.Context())
		p := start(t, ctx, s, Options{})
		answers, silent := 0, 0
		var mu sync.Mutex
		send := func(port uint16, id uint16) {
			q := read(t, "www.example.", func(m *dns.Msg, q *query.Query) {
				m.Id = id
				q.Source = netip.AddrPortFrom(netip.MustParseAddr("192.0.2.50"), port)
			})
			p.Resolve(advance(p, q), func(r []byte) {
				mu.Lock()
				defer mu.Unlock()
				if r == nil {
					silent++
				} else {
					answers++
				}
			})
		}
		for i := range uint16(100) {
			send(1000+i, i)
		}
		for i := range uint16(100) {
			send(1000+i, i) // again
		}
		if f, wait := p.InFlight(); f != 1 || wait != 100 {
			t.Errorf("%d flights, %d waiting", f, wait)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if fetches.Load() != 1 || answers != 100 || silent != 100 {
			t.Errorf("%d fetches, %d answers, %d silent", fetches.Load(), answers, silent)
		}
		if f, wait := p.InFlight(); f != 0 || wait != 0 {
			t.Errorf("%d flights, %d waiting at the end", f, wait)
		}
		cancel()
		p.Close()
	})
}

// A client over UDP that asks again while its query waits is answered so long after that, as if it had asked then alone;
// one that does not is not answered when it has given up. Whoever waits beside it changes nothing.
func TestRetransmissionWaitsAnew(t *testing.T) {
	for _, beside := range []int{0, 40} {
		synctest.Test(t, func(t *testing.T) {
			s := &stages{fetch: func(_ context.Context, tree *query.Tree, _ query.Question) (settled.Entry, error) {
				tree.Hear()
				time.Sleep(7 * time.Second)
				return settled.Entry{}, errors.New("no server answers")
			}}
			ctx, cancel := context.WithCancel(t.Context())
			p := start(t, ctx, s, Options{})
			var mu sync.Mutex
			got := map[uint16]string{}
			send := func(id uint16) {
				q := read(t, "www.example.", func(m *dns.Msg, q *query.Query) {
					m.Id, q.Source = id, netip.AddrPortFrom(netip.MustParseAddr("192.0.2.50"), 1000+id)
				})
				p.Resolve(advance(p, q), func(r []byte) {
					mu.Lock()
					defer mu.Unlock()
					got[id] += brief(message(t, r)) + "; "
				})
			}
			for i := range beside {
				send(uint16(100 + i))
			}
			send(1)
			send(2)
			time.Sleep(4 * time.Second)
			send(2)
			time.Sleep(4 * time.Second)
			synctest.Wait()
			if got[1] != "silence; " || got[2] != "silence; SERVFAIL EDE0; " {
				t.Errorf("one that waited: %q; one that asked again: %q", got[1], got[2])
			}
			cancel()
			p.Close()
		})
	}
}

// advance does what a listener does before Resolve.
func advance(p *Pipeline, q *query.Query) *query.Query {
	var out [1500]byte
	p.TryNow(&query.Worker{Ring: query.NewRing(1)}, q, out[:])
	return q.Own()
}

// A leader that ends for its own limits hands over to a waiter with a budget of its own, a few times.
func TestLeaderHandsOver(t *testing.T) {
	for _, c := range []struct{ fail, waiters, trees, good int }{{1, 5, 2, 4}, {9, 5, maxLeaders, 0}, {9, 1, 1, 0}} {
		synctest.Test(t, func(t *testing.T) {
			trees := map[*query.Tree]bool{}
			s := &stages{fetch: func(_ context.Context, tree *query.Tree, q query.Question) (settled.Entry, error) {
				time.Sleep(time.Second)
				trees[tree] = true
				if len(trees) <= c.fail {
					return settled.Entry{}, fmt.Errorf("too far: %w", query.ErrLimit)
				}
				return address(q, "192.0.2.1"), nil
			}}
			ctx, cancel := context.WithCancel(t.Context())
			p := start(t, ctx, s, Options{})
			var good, bad atomic.Int32
			for i := range c.waiters {
				q := read(t, "www.example.", func(m *dns.Msg, q *query.Query) { m.Id = uint16(i) })
				p.Resolve(advance(p, q), func(r []byte) {
					switch got := brief(message(t, r)); got {
					case "NOERROR A=192.0.2.1":
						good.Add(1)
					case "SERVFAIL EDE22":
						bad.Add(1)
					default:
						t.Error(got)
					}
				})
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			if len(trees) != c.trees || int(good.Load()) != c.good || int(bad.Load()) != c.waiters-c.good {
				t.Errorf("%+v: %d trees, %d good, %d bad", c, len(trees), good.Load(), bad.Load())
			}
			cancel()
			p.Close()
		})
	}
}

func TestLimitsOfWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stages{fetch: func(ctx context.Context, _ *query.Tree, q query.Question) (settled.Entry, error) {
			select {
			case <-ctx.Done():
				return settled.Entry{}, ctx.Err()
			case <-time.After(time.Second):
				return address(q, "192.0.2.1"), nil
			}
		}}
		ctx, cancel := context.WithCancel(t.Context())
		p := start(t, ctx, s, Options{InFlight: func() int { return 2 }, Waiters: func() int { return 3 }})
		results := map[string]string{}
		var mu sync.Mutex
		send := func(name string, id uint16) {
			q := read(t, name, func(m *dns.Msg, q *query.Query) { m.Id = id })
			p.Resolve(advance(p, q), func(r []byte) {
				mu.Lock()
				defer mu.Unlock()
				results[fmt.Sprintf("%s%d", name, id)] = brief(message(t, r))
			})
		}
		send("a.example.", 1)
		send("b.example.", 1)
		send("c.example.", 1) // a third flight
		send("a.example.", 2)
		send("a.example.", 3) // a fourth waiter
		time.Sleep(time.Minute)
		mu.Lock()
		defer mu.Unlock()
		for k, want := range map[string]string{"a.example.1": "NOERROR A=192.0.2.1", "b.example.1": "NOERROR A=192.0.2.1",
			"c.example.1": "SERVFAIL EDE22", "a.example.2": "NOERROR A=192.0.2.1", "a.example.3": "silence"} {
			if results[k] != want {
				t.Errorf("%s: %s, want %s", k, results[k], want)
			}
		}
		cancel()
		p.Close()
	})
}

// Stale data is given to those who have waited for StaleAfter, to who comes later while the flight goes on, and
// to those who may not wait; each is answered once, and what the flight brings is for the caches.
func TestStaleForThoseWhoWait(t *testing.T) {
	for _, c := range []struct {
		after, flight time.Duration
		have          bool
		want          [3]string // asked at once, after 1 s, after 3 s
		at            [3]time.Duration
	}{
		{1800 * time.Millisecond, 6 * time.Second, true, [3]string{"old", "old", "old"}, [3]time.Duration{1800 * time.Millisecond, 1800 * time.Millisecond, 3 * time.Second}},
		{1800 * time.Millisecond, 1200 * time.Millisecond, true, [3]string{"new", "new", "new"}, [3]time.Duration{1200 * time.Millisecond, 1200 * time.Millisecond, 4200 * time.Millisecond}},
		{1800 * time.Millisecond, 4 * time.Second, false, [3]string{"new", "new", "new"}, [3]time.Duration{4 * time.Second, 4 * time.Second, 4 * time.Second}},
		{0, 6 * time.Second, true, [3]string{"old", "old", "old"}, [3]time.Duration{0, time.Second, 3 * time.Second}},
		{0, 4 * time.Second, false, [3]string{"new", "new", "new"}, [3]time.Duration{4 * time.Second, 4 * time.Second, 4 * time.Second}},
	} {
		synctest.Test(t, func(t *testing.T) {
			var fetches atomic.Int32
			s := &stages{
				fetch: func(_ context.Context, _ *query.Tree, q query.Question) (settled.Entry, error) {
					fetches.Add(1)
					time.Sleep(c.flight)
					return address(q, "192.0.2.1"), nil
				},
				stale: func(q query.Question) (settled.Entry, bool) { return address(q, "192.0.2.9"), c.have },
			}
			ctx, cancel := context.WithCancel(t.Context())
			p := start(t, ctx, s, Options{StaleAfter: c.after})
			begun := clock.Elapsed()
			var mu sync.Mutex
			var got [3][]string
			var at [3]time.Duration
			send := func(i int) {
				q := read(t, "www.example.", func(m *dns.Msg, q *query.Query) { m.Id, q.Transport = uint16(i), query.TCP })
				p.Resolve(advance(p, q), func(r []byte) {
					mu.Lock()
					defer mu.Unlock()
					got[i] = append(got[i], map[string]string{"NOERROR A=192.0.2.9": "old", "NOERROR A=192.0.2.1": "new"}[brief(message(t, r))])
					at[i] = clock.Elapsed().Sub(begun)
				})
			}
			send(0)
			time.Sleep(time.Second)
			send(1)
			time.Sleep(2 * time.Second)
			send(2)
			time.Sleep(time.Minute)
			synctest.Wait()
			for i := range got {
				if len(got[i]) != 1 || got[i][0] != c.want[i] || at[i] != c.at[i] {
					t.Errorf("%+v: query %d: %v after %v, want %s after %v", c, i, got[i], at[i], c.want[i], c.at[i])
				}
			}
			if f, w := p.InFlight(); f != 0 || w != 0 || fetches.Load() > 2 {
				t.Errorf("%+v: %d flights and %d waiters are left of %d", c, f, w, fetches.Load())
			}
			cancel()
			p.Close()
		})
	}
}

// Who may not wait is given stale data if there is any.
func TestStaleForThoseWhoMayNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stages{
			fetch: func(_ context.Context, _ *query.Tree, q query.Question) (settled.Entry, error) {
				time.Sleep(time.Second)
				return address(q, "192.0.2.1"), nil
			},
			stale: func(q query.Question) (settled.Entry, bool) { return address(q, "192.0.2.9"), q.Name != "" },
		}
		ctx, cancel := context.WithCancel(t.Context())
		p := start(t, ctx, s, Options{StaleAfter: time.Hour, InFlight: func() int { return 1 }, Waiters: func() int { return 1 }})
		var mu sync.Mutex
		results := map[uint16]string{}
		send := func(id uint16, name string) {
			q := read(t, name, func(m *dns.Msg, q *query.Query) { m.Id = id })
			p.Resolve(advance(p, q), func(r []byte) {
				mu.Lock()
				defer mu.Unlock()
				results[id] = brief(message(t, r))
			})
		}
		got := func(id uint16) string {
			mu.Lock()
			defer mu.Unlock()
			return results[id]
		}
		send(1, "a.example.")
		send(2, "a.example.") // one waiter more
		send(3, "b.example.") // one flight more
		if got(1) != "" || got(2) != "NOERROR A=192.0.2.9" || got(3) != "NOERROR A=192.0.2.9" {
			t.Errorf("%q, %q, %q", got(1), got(2), got(3))
		}
		time.Sleep(time.Minute)
		if got(1) != "NOERROR A=192.0.2.1" {
			t.Errorf("who waited: %q", got(1))
		}
		cancel()
		p.Close()
	})
}

// However many answers near their ends are hit at once, maxRefreshing are fetched anew at a time, and the others
// are told of.
func TestRefreshesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var now, most, done, postponed atomic.Int32
		s := &stages{
			fetch: func(_ context.Context, _ *query.Tree, q query.Question) (settled.Entry, error) {
				if n := now.Add(1); n > most.Load() {
					most.Store(n)
				}
				time.Sleep(time.Second)
				now.Add(-1)
				done.Add(1)
				return address(q, "192.0.2.1"), nil
			},
			postponed: func(query.Question) { postponed.Add(1) },
		}
		ctx, cancel := context.WithCancel(t.Context())
		p := start(t, ctx, s, Options{})
		for round := range 3 {
			for i := range maxRefreshing + 10 {
				p.refresh(query.Question{Name: dnsname.MustParse(fmt.Sprintf("n%d.example.", i)), Type: 1, Class: 1})
			}
			time.Sleep(time.Minute)
			if most.Load() != maxRefreshing || int(done.Load()) != (round+1)*maxRefreshing || int(postponed.Load()) != (round+1)*10 {
				t.Errorf("round %d: %d at once, %d done, %d postponed", round, most.Load(), done.Load(), postponed.Load())
			}
		}
		cancel()
		p.Close()
	})
}

// While servers answer, only slowly, a client over UDP that has given up is told nothing. If none has said anything it is
// told so before it gives up, whoever leads, and others are given what comes in the end.
func TestWaitingWhileNoServerAnswers(t *testing.T) {
	for _, c := range []struct {
		what    string
		heard   time.Duration // when a server says something; 0 never
		limits  int           // how many leaders' budgets end, each a second and a half after it began
		waiters int
		want    string // of the first, with when it came; then of one over TCP, and of one who came three seconds later
	}{
		{"nobody answers", 0, 0, 3, "SERVFAIL EDE22 4.8s, SERVFAIL EDE0 8s, SERVFAIL EDE22 7.8s"},
		{"somebody does", time.Second, 0, 3, "silence 8s, SERVFAIL EDE0 8s, SERVFAIL EDE0 8s"},
		{"a leader who was told so has a budget that ends", 0, 1, 40, "SERVFAIL EDE22 4.8s, SERVFAIL EDE0 14s, SERVFAIL EDE22 7.8s"},
	} {
		synctest.Test(t, func(t *testing.T) {
			begin := time.Now()
			fetches := 0
			s := &stages{fetch: func(_ context.Context, tree *query.Tree, _ query.Question) (settled.Entry, error) {
				fetches++
				if c.heard > 0 {
					time.AfterFunc(c.heard, tree.Hear)
				}
				if fetches <= c.limits {
					time.Sleep(6 * time.Second)
					return settled.Entry{}, query.ErrLimit
				}
				time.Sleep(8 * time.Second)
				return settled.Entry{}, errors.New("no server answers")
			}}
			ctx, cancel := context.WithCancel(t.Context())
			p := start(t, ctx, s, Options{Budget: func() query.Budget { return query.Budget{Time: time.Minute} }})
			var mu sync.Mutex
			got := map[uint16]string{}
			send := func(id uint16, tr query.Transport) {
				q := read(t, "www.example.", func(m *dns.Msg, q *query.Query) {
					m.Id, q.Transport, q.Source = id, tr, netip.AddrPortFrom(netip.MustParseAddr("192.0.2.50"), 1000+id)
				})
				p.Resolve(advance(p, q), func(r []byte) {
					mu.Lock()
					defer mu.Unlock()
					if got[id] != "" {
						t.Errorf("%s: query %d is answered twice", c.what, id)
					}
					got[id] = fmt.Sprint(brief(message(t, r)), " ", time.Since(begin))
				})
			}
			for i := range c.waiters {
				send(uint16(i), query.UDP)
			}
			send(1000, query.TCP)
			time.Sleep(3 * time.Second)
			send(1001, query.UDP)
			time.Sleep(30 * time.Second)
			synctest.Wait()
			if all := strings.Join([]string{got[0], got[1000], got[1001]}, ", "); all != c.want || len(got) != c.waiters+2 {
				t.Errorf("%s: %s, want %s; %d answers", c.what, all, c.want, len(got))
			}
			if f, wait := p.InFlight(); f != 0 || wait != 0 {
				t.Errorf("%s: %d flights, %d waiting at the end", c.what, f, wait)
			}
			cancel()
			p.Close()
		})
	}
}

func TestLateAnswersOverUDP(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stages{fetch: func(_ context.Context, tree *query.Tree, q query.Question) (settled.Entry, error) {
			tree.Hear()
			time.Sleep(6 * time.Second)
			return address(q, "192.0.2.1"), nil
		}}
		ctx, cancel := context.WithCancel(t.Context())
		p := start(t, ctx, s, Options{})
		w := p.NewWorker()
		if got := brief(ask(t, p, w, "www.example.", nil)); got != "silence" {
			t.Errorf("UDP after 6 s: %s", got)
		}
		if got := brief(ask(t, p, w, "www.example.", func(_ *dns.Msg, q *query.Query) { q.Transport = query.TCP })); got != "NOERROR A=192.0.2.1" {
			t.Errorf("TCP after 6 s: %s", got)
		}
		cancel()
		p.Close()
	})
}

func TestPanicsAreCountedAndAnswered(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	p := start(t, ctx, &stages{fetch: func(context.Context, *query.Tree, query.Question) (settled.Entry, error) { panic("boom") }}, Options{})
	if got := brief(ask(t, p, p.NewWorker(), "www.example.", nil)); got != "SERVFAIL EDE0" || p.Panics() != 1 {
		t.Errorf("%s, %d panics", got, p.Panics())
	}
	cancel()
	p.Close()
	if got := brief(ask(t, p, p.NewWorker(), "www.example.", nil)); got != "SERVFAIL EDE22" {
		t.Errorf("after Close: %s", got)
	}
}

// A stage that panics costs the query that made it, inline and behind a flight.
func TestPanicsOfStages(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s := &stages{}
	s.question = func(q *query.Query) query.Verdict {
		if q.Question.Name == dnsname.MustParse("bad.example.") {
			panic("question")
		}
		return query.Verdict{}
	}
	s.answer = func(q *query.Query, _ *query.Answer, _ query.Verdict) query.Verdict {
		if q.Question.Name == dnsname.MustParse("worse.example.") {
			panic("answer")
		}
		return query.Verdict{}
	}
	p := start(t, ctx, s, Options{})
	w := p.NewWorker()
	for i, name := range []string{"bad.example.", "worse.example."} {
		if got := brief(ask(t, p, w, name, nil)); got != "silence" || p.Panics() != int64(i+1) {
			t.Errorf("%s: %s, %d panics", name, got, p.Panics())
		}
	}
	if got := brief(ask(t, p, w, "good.example.", nil)); got != "NOERROR A=192.0.2.1" {
		t.Errorf("after them: %s", got)
	}
	cancel()
	p.Close()
}

func TestRewritingWithoutEnd(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s := &stages{question: func(q *query.Query) query.Verdict {
		n, err := q.Turn.Current.Name.Prepend("x")
		if err != nil {
			t.Error(err)
		}
		return query.Verdict{Kind: query.Redirected, Target: n}
	}}
	p := start(t, ctx, s, Options{})
	if got := brief(ask(t, p, p.NewWorker(), "www.example.", nil)); got != "SERVFAIL EDE0" {
		t.Error(got)
	}
	cancel()
	p.Close()
}

// A client whose rules are not compiled yet waits for that, alone, and is answered by them.
func TestRulesAreCompiledFirst(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	question := query.Question{Name: dnsname.MustParse("www.example."), Type: 1, Class: 1}
	s := &stages{cache: map[query.Question]settled.Entry{question: address(question, "192.0.2.1")}}
	prepared := 0
	s.prepare = func() { prepared++ }
	s.question = func(*query.Query) query.Verdict {
		if !s.prepared.Load() {
			t.Error("judged before the rules were compiled")
		}
		return query.Verdict{}
	}
	p := start(t, ctx, s, Options{})
	w := p.NewWorker()
	for range 3 {
		if got := brief(ask(t, p, w, "www.example.", nil)); got != "NOERROR A=192.0.2.1" || prepared != 1 {
			t.Errorf("%s, prepared %d times", got, prepared)
		}
	}
	cancel()
	p.Close()
}

// A client whose settings change while its rules are compiled is admitted and identified anew. While they change without
// end, or cannot be compiled, nothing is judged.
func TestRulesThatChangeMeanwhile(t *testing.T) {
	question := query.Question{Name: dnsname.MustParse("www.example."), Type: 1, Class: 1}
	for _, c := range []struct {
		changing         int32
		panics           bool
		want             string
		identified, made int32
	}{
		{2, false, "NOERROR A=192.0.2.1", 3, 3},
		{1000, false, "SERVFAIL EDE22", maxPrepared + 1, maxPrepared + 1},
		{0, true, "SERVFAIL EDE22", 1, 1},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		s := &stages{cache: map[query.Question]settled.Entry{question: address(question, "192.0.2.1")}}
		s.changing.Store(c.changing)
		var identified, made atomic.Int32
		s.identify = func(q *query.Query) query.RefuseReason {
			if q.Client != (query.Client{}) || q.Proof != query.NoProof {
				t.Errorf("identified with what was known before: %+v", q.Client)
			}
			identified.Add(1)
			q.Client.Kind = query.Identified
			return query.NotRefused
		}
		s.prepare = func() {
			if made.Add(1); c.panics {
				panic("rules")
			}
		}
		s.question = func(q *query.Query) query.Verdict {
			if !s.prepared.Load() || q.Client.Kind != query.Identified {
				t.Error("judged before the rules were compiled")
			}
			return query.Verdict{}
		}
		p := start(t, ctx, s, Options{Logger: slog.New(slog.DiscardHandler)})
		if got := brief(ask(t, p, p.NewWorker(), "www.example.", nil)); got != c.want || identified.Load() != c.identified || made.Load() != c.made {
			t.Errorf("%d changes, panics=%v: %s, identified %d times, prepared %d times", c.changing, c.panics, got, identified.Load(), made.Load())
		}
		cancel()
		p.Close()
	}
}

// A client whose password has to be verified waits for that alone, then for its rules, and is answered; one whose
// verification fails in any way is not, and is not tried again.
func TestPasswordsAreVerifiedFirst(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	question := query.Question{Name: dnsname.MustParse("www.example."), Type: 1, Class: 1}
	proof := map[query.Proof]query.RefuseReason{query.NoProof: query.Unproven, query.ProofBad: query.RefuseDevice, query.ProofFailed: query.RefuseBusy}
	s := &stages{cache: map[query.Question]settled.Entry{question: address(question, "192.0.2.1")}}
	s.identify = func(q *query.Query) query.RefuseReason { return proof[q.Proof] }
	s.prepare = func() {}
	p := start(t, ctx, s, Options{Logger: slog.New(slog.DiscardHandler)})
	w := p.NewWorker()
	for _, c := range []struct {
		finds query.Proof
		want  string
	}{
		{query.ProofGood, "NOERROR A=192.0.2.1"}, {query.ProofBad, "REFUSED EDE18"}, {query.ProofFailed, "SERVFAIL EDE22"}, {query.NoProof, "SERVFAIL EDE22"},
	} {
		tried := 0
		s.prove = func(q *query.Query) {
			if tried++; c.finds == query.NoProof {
				panic("a bug")
			}
			q.Proof = c.finds
		}
		s.prepared.Store(false)
		if got := brief(ask(t, p, w, "www.example.", nil)); got != c.want || tried != 1 {
			t.Errorf("proof %d: %s, tried %d times; want %s", c.finds, got, tried, c.want)
		}
	}
	if p.Panics() != 1 {
		t.Errorf("%d panics were counted", p.Panics())
	}
	cancel()
	p.Close()
}

func TestOutstandingOfOneStranger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stages{fetch: func(_ context.Context, _ *query.Tree, q query.Question) (settled.Entry, error) {
			time.Sleep(time.Second)
			return address(q, "192.0.2.1"), nil
		}}
		ctx, cancel := context.WithCancel(t.Context())
		p := start(t, ctx, s, Options{Outstanding: func() int { return 3 }})
		var mu sync.Mutex
		count := map[string]int{}
		send := func(i int, listed bool) {
			q := advance(p, read(t, fmt.Sprintf("n%d.example.", i), nil))
			if listed {
				q.Client.Kind = query.Listed
			}
			p.Resolve(q, func(r []byte) {
				mu.Lock()
				defer mu.Unlock()
				count[brief(message(t, r))]++
			})
		}
		for i := range 10 {
			send(i, false)
			send(100+i, true)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		send(200, false) // there is room again
		time.Sleep(time.Minute)
		synctest.Wait()
		if count["NOERROR A=192.0.2.1"] != 3+10+1 || count["silence"] != 7 {
			t.Errorf("%v", count)
		}
		cancel()
		p.Close()
	})
}

type edeError struct{ error }

func (edeError) EDE() (uint16, string) { return 23, "all servers timed out" }

func TestFailuresSayWhy(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s := &stages{fetch: func(context.Context, *query.Tree, query.Question) (settled.Entry, error) {
		return settled.Entry{}, fmt.Errorf("asking: %w", edeError{errors.New("x")})
	}}
	p := start(t, ctx, s, Options{})
	if got := brief(ask(t, p, p.NewWorker(), "www.example.", nil)); got != "SERVFAIL EDE23" {
		t.Error(got)
	}
	cancel()
	p.Close()
}

func TestHitsAllocateNothing(t *testing.T) {
	question := query.Question{Name: dnsname.MustParse("www.example."), Type: 1, Class: 1}
	s := &stages{cache: map[query.Question]settled.Entry{question: address(question, "192.0.2.1")}}
	ctx, cancel := context.WithCancel(t.Context())
	for what, o := range map[string]Options{"": {}, " judged by policy zones": {Zones: noZones{}}} {
		p := start(t, ctx, s, o)
		w := p.NewWorker()
		q := read(t, "www.example.", nil)
		m := new(dns.Msg)
		m.SetQuestion("www.example.", 1)
		m.SetEdns0(1232, false)
		wire, _ := m.Pack()
		var out [1500]byte
		if a := testing.AllocsPerRun(200, func() {
			q.Read(wire)
			if n, after := p.TryNow(w, q, out[:]); n == 0 || after != 0 {
				t.Fatal("no hit")
			}
		}); a != 0 {
			t.Errorf("%v allocations for a hit%s", a, what)
		}
		defer p.Close()
	}
	cancel()
}

// noZones are policy zones that match nothing.
type noZones struct{}

func (noZones) Question(*query.Query) (query.Verdict, bool) { return query.Verdict{}, false }
func (noZones) Alias(dnsname.Name) bool                     { return false }
func (noZones) Answer(*query.Query, *query.Answer, clock.Instant) (query.Verdict, bool) {
	return query.Verdict{}, false
}
func (noZones) Target(*query.Question, clock.Instant) (dnsname.Name, uint32, bool) {
	return "", 0, false
}
