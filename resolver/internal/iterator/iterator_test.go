package iterator

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/exchange"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
	"github.com/sluice-dns/sluice/resolver/internal/selection"
	"github.com/sluice-dns/sluice/resolver/internal/simnet"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// A rig is an Iterator on a simulated Internet.
type rig struct {
	*siminternet.Internet
	t    *testing.T
	net  *simnet.Network
	it   *Iterator
	opts Options
	tree *query.Tree   // of the last question
	took time.Duration // the longest question so far
	seed byte          // of the selector: another one each time, since chance chooses who is asked first
}

// latency of the simulated network, one way.
const latency = 10 * time.Millisecond

// bubble runs f in a synctest bubble, on the standard Internet with the given zones added or replaced.
func bubble(t *testing.T, extra []siminternet.Zone, change func(*Options), f func(r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		zones := siminternet.StandardZones()
		for _, z := range extra {
			if i := slices.IndexFunc(zones, func(o siminternet.Zone) bool { return o.Name == z.Name }); i >= 0 {
				zones[i] = z
			} else {
				zones = append(zones, z)
			}
		}
		in, err := siminternet.New(time.Now(), zones...)
		if err != nil {
			t.Fatal(err)
		}
		siminternet.StandardBehaviours(in)
		r := &rig{Internet: in, t: t, net: simnet.New()}
		r.net.Link = func(from, to netip.AddrPort) (time.Duration, bool) { return latency, false }
		if err := in.Attach(r.net); err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		hints, err := ParseHints(in.RootHints(), "hints")
		if err != nil {
			t.Fatal(err)
		}
		r.opts = Options{Hints: hints, DoNotQuery: []netip.Prefix{}}
		if change != nil {
			change(&r.opts)
		}
		r.forget()
		defer func() { r.opts.Exchange.(*exchange.Exchange).Close() }()
		f(r)
	})
}

// forget starts anew with empty memories.
func (r *rig) forget() {
	if r.opts.Exchange != nil {
		r.opts.Exchange.(*exchange.Exchange).Close()
	}
	r.seed++
	r.opts.RRsets = rrcache.New(rrcache.Options{Bytes: 1 << 20})
	r.opts.Servers = selection.New(selection.Options{Seed: [32]byte{1, r.seed}})
	r.opts.Exchange = exchange.New(exchange.Options{Transport: exchange.Dialing(r.net.Dial)})
	r.it = New(r.opts)
	r.ResetLog()
}

func ask(name string, typ uint16) query.Question {
	return query.Question{Name: dnsname.MustParse(name), Type: typ, Class: dnswire.ClassIN}
}

func (r *rig) ask(q query.Question) (query.Unvalidated, error) {
	start := clock.Elapsed()
	r.tree = query.NewTree(start, query.Budget{})
	defer func() { r.took = max(r.took, clock.Elapsed().Sub(start)) }()
	return r.it.Resolve(context.Background(), r.tree, q)
}

// want resolves and compares: text is "RCODE", then one "owner TYPE rdata" for each record of the answer.
func (r *rig) want(name string, typ uint16, text ...string) {
	r.t.Helper()
	out, err := r.ask(ask(name, typ))
	if err != nil {
		r.t.Errorf("%s %s: %v", name, dnswire.TypeText(typ), err)
		return
	}
	if got := render(out); !slices.Equal(got, text) {
		r.t.Errorf("%s %s:\n got %q\nwant %q", name, dnswire.TypeText(typ), got, text)
	}
}

// fails resolves and wants a failure whose text has the given part.
func (r *rig) fails(name string, typ uint16, part string) *Failure {
	r.t.Helper()
	out, err := r.ask(ask(name, typ))
	var f *Failure
	if !errors.As(err, &f) {
		r.t.Errorf("%s %s: %v, %q; want a failure", name, dnswire.TypeText(typ), err, render(out))
		return &Failure{}
	}
	if !strings.Contains(f.Text, part) {
		r.t.Errorf("%s %s: %q, want something about %q", name, dnswire.TypeText(typ), f.Text, part)
	}
	return f
}

func render(out query.Unvalidated) []string {
	return append([]string{dnswire.RCodeText(out.RCode)}, answerText(out)...)
}

func answerText(out query.Unvalidated) (lines []string) {
	for _, s := range out.Answer {
		for d := range query.RDatas(s.Data) {
			lines = append(lines, fmt.Sprintf("%v %s %s", s.Name, dnswire.TypeText(s.Type), dnswire.Text(s.Type, d)))
		}
	}
	return lines
}

// sent counts the questions that servers got; see siminternet.LogEntry.
func (r *rig) sent(match func(e siminternet.LogEntry) bool) int { return r.Count(match) }

func to(addr netip.Addr) func(siminternet.LogEntry) bool {
	return func(e siminternet.LogEntry) bool { return e.Server == addr }
}

func ip(s string) netip.Addr { return netip.MustParseAddr(s) }

func (r *rig) log() string {
	var b strings.Builder
	for _, e := range r.Log() {
		fmt.Fprintf(&b, "%v %v %s %s edns=%v %v\n", e.Time.Format("05.000"), e.Server, strings.ToLower(e.Name), dnswire.TypeText(e.Type), e.EDNS, e.Transport)
	}
	return b.String()
}

func TestStandardInternet(t *testing.T) {
	for _, mode := range []struct {
		name   string
		change func(*Options)
		cold   bool
	}{
		{"cold", nil, true},
		{"warm", nil, false},
		{"strict", func(o *Options) { o.Minimise = Strict }, false},
		{"not minimised", func(o *Options) { o.Minimise = Off }, false},
		{"primed", func(o *Options) { o.Prime = true }, true},
	} {
		t.Run(mode.name, func(t *testing.T) {
			bubble(t, nil, mode.change, func(r *rig) {
				for _, e := range siminternet.Expect() {
					if mode.cold {
						r.forget()
					}
					out, err := r.ask(ask(e.Name, e.Type))
					if err != nil {
						t.Errorf("%s %s (%s): %v\n%s", e.Name, dns.Type(e.Type), e.Note, err, r.log())
						continue
					}
					got := answerText(out)
					slices.Sort(got)
					if int(out.RCode) != e.RCode || !slices.Equal(got, e.Answer) {
						t.Errorf("%s %s (%s):\n got %s %q\nwant %s %q\n%s", e.Name, dns.Type(e.Type), e.Note,
							dnswire.RCodeText(out.RCode), got, dns.RcodeToString[e.RCode], e.Answer, r.log())
					}
					if n := r.sent(nil); mode.cold && n > 40 {
						t.Errorf("%s: %d questions sent", e.Name, n)
					}
				}
			})
		})
	}
}

func now() clock.Instant { return clock.Elapsed() }
