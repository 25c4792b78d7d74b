package resolver_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

var (
	monkeys    = flag.Int("monkeys", 0, "how many seeds TestMonkeyOnThePath tries; 0 = a few")
	monkeySeed = flag.Uint64("monkey", 0, "the only seed to try")
)

// A monkey sits between the resolver and every server of the Internet. It changes answers at random, and pastes
// records and whole answers that it saw elsewhere: all of it is genuinely signed, for another name or purpose.
type monkey struct {
	mu    sync.Mutex // guards everything below
	rand  *rand.Rand
	share float64 // of answers that are touched
	seen  []dns.RR
	whole []*dns.Msg
}

func (k *monkey) meddle(q siminternet.Query) *siminternet.Reply {
	m := q.Answer()
	if m == nil {
		return nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	honest := m.Copy()
	if touched := k.rand.Float64() < k.share; touched {
		for range 1 + k.rand.IntN(4) {
			m = k.mutate(q, m)
		}
	}
	if len(k.whole) < 300 {
		k.whole = append(k.whole, honest)
		for _, s := range [][]dns.RR{honest.Answer, honest.Ns, honest.Extra} {
			for _, rr := range s {
				if rr.Header().Rrtype != dns.TypeOPT {
					k.seen = append(k.seen, rr)
				}
			}
		}
	}
	wire, err := m.Pack()
	if err != nil {
		return reply(q, honest)
	}
	if k.rand.IntN(60) == 0 { // broken bytes
		if at := 2 + k.rand.IntN(len(wire)-2); k.rand.IntN(2) == 0 {
			wire = wire[:at]
		} else {
			wire[at] ^= 1 << k.rand.IntN(8)
		}
		return &siminternet.Reply{Raw: [][]byte{wire}}
	}
	return reply(q, m)
}

// section returns one of the sections of m.
func (k *monkey) section(m *dns.Msg) *[]dns.RR {
	return []*[]dns.RR{&m.Answer, &m.Answer, &m.Ns, &m.Ns, &m.Extra}[k.rand.IntN(5)]
}

func (k *monkey) pick(rrs []dns.RR) int {
	if len(rrs) == 0 || rrs[0].Header().Rrtype == dns.TypeOPT {
		return -1
	}
	return k.rand.IntN(len(rrs))
}

func (k *monkey) name(q siminternet.Query) string {
	name, _ := asked(q)
	labels := dns.SplitDomainName(name)
	switch k.rand.IntN(6) {
	case 0:
		return dns.Fqdn(strings.Join(append([]string{"*"}, labels[min(1, len(labels)):]...), "."))
	case 1:
		return dns.Fqdn("x." + strings.TrimSuffix(name, "."))
	case 2:
		return dns.Fqdn(strings.Join(labels[min(1, len(labels)):], "."))
	case 3:
		if len(k.seen) > 0 {
			return k.seen[k.rand.IntN(len(k.seen))].Header().Name
		}
	case 4:
		return strings.ToUpper(name)
	}
	return name
}

func (k *monkey) mutate(q siminternet.Query, m *dns.Msg) *dns.Msg {
	s := k.section(m)
	i := k.pick(*s)
	add := func(format string, args ...any) { *s = append(*s, records(fmt.Sprintf(format, args...))...) }
	name, typ := asked(q)
	switch k.rand.IntN(24) {
	case 0:
		if i >= 0 {
			*s = slices.Delete(slices.Clone(*s), i, i+1)
		}
	case 1: // no signatures
		*s = slices.DeleteFunc(slices.Clone(*s), func(rr dns.RR) bool { return rr.Header().Rrtype == dns.TypeRRSIG })
	case 2: // no denial
		m.Ns = slices.DeleteFunc(slices.Clone(m.Ns), func(rr dns.RR) bool {
			return slices.Contains([]uint16{dns.TypeNSEC, dns.TypeNSEC3}, rr.Header().Rrtype)
		})
	case 3:
		m.Rcode = []int{0, 0, 2, 3, 3, 3, 5, 1, 4, 9, 11}[k.rand.IntN(11)]
	case 4:
		m.Authoritative = k.rand.IntN(2) == 0
		m.AuthenticatedData = k.rand.IntN(2) == 0
		m.RecursionAvailable = k.rand.IntN(2) == 0
	case 5:
		m.Truncated = true
	case 6:
		if i >= 0 {
			rr := dns.Copy((*s)[i])
			rr.Header().Ttl = []uint32{0, 1, 1 << 31, 1<<32 - 1, 86400}[k.rand.IntN(5)]
			(*s)[i] = rr
		}
	case 7:
		if i >= 0 {
			rr := dns.Copy((*s)[i])
			rr.Header().Name = k.name(q)
			(*s)[i] = rr
		}
	case 8: // another section
		if i >= 0 {
			t := k.section(m)
			*t = append(*t, (*s)[i])
		}
	case 9, 10, 11: // cut and paste
		for range 1 + k.rand.IntN(6) {
			if len(k.seen) > 0 {
				at := k.rand.IntN(len(k.seen))
				*s = append(*s, k.seen[at:min(at+3, len(k.seen))]...)
			}
		}
	case 12, 13: // another answer altogether
		if len(k.whole) > 0 {
			o := k.whole[k.rand.IntN(len(k.whole))].Copy()
			o.Id, o.Question = m.Id, m.Question
			return o
		}
	case 14:
		add("%s CNAME %s", name, k.name(q))
	case 15:
		add("%s DNAME %s", k.name(q), k.name(q))
	case 16:
		add("%s A 203.0.113.66", k.name(q))
	case 17:
		add("%s NS %s\n%s A 127.53.0.1", k.name(q), name, name)
	case 18:
		if i >= 0 {
			rr := dns.Copy((*s)[i])
			switch rr := rr.(type) {
			case *dns.A:
				rr.A[3]++
			case *dns.RRSIG:
				switch k.rand.IntN(9) {
				case 0:
					rr.Labels--
				case 1:
					rr.Labels++
				case 2:
					rr.OrigTtl = 1<<32 - 1
				case 3:
					rr.Expiration = []uint32{0, 1 << 31, 1<<32 - 1, rr.Inception - 1}[k.rand.IntN(4)]
				case 4:
					rr.Inception = []uint32{0, 1 << 31, 1<<32 - 1, rr.Expiration + 1}[k.rand.IntN(4)]
				case 5:
					rr.KeyTag++
				case 6:
					rr.SignerName = k.name(q)
				case 7:
					rr.Algorithm = uint8(k.rand.IntN(256))
				case 8:
					rr.TypeCovered = typ
				}
			case *dns.DNSKEY:
				rr.Flags ^= []uint16{1, 128, 256}[k.rand.IntN(3)]
			case *dns.DS:
				rr.DigestType, rr.Algorithm = uint8(k.rand.IntN(6)), rr.Algorithm+uint8(k.rand.IntN(2))
			case *dns.NSEC:
				rr.NextDomain = k.name(q)
			case *dns.NSEC3:
				rr.Flags ^= 1
				rr.Iterations = []uint16{0, 1, 65535}[k.rand.IntN(3)]
			case *dns.CNAME:
				rr.Target = k.name(q)
			case *dns.NS:
				rr.Ns = k.name(q)
			case *dns.SOA:
				rr.Minttl = 1<<32 - 1
			}
			(*s)[i] = rr
		}
	case 19:
		m.Answer, m.Ns = nil, nil
	case 20: // upwards
		m.Answer, m.Ns, m.Authoritative = nil, records(". NS a.root-servers.net."), false
	case 21:
		m.Question[0] = dns.Question{Name: k.name(q), Qtype: []uint16{typ, dns.TypeNS, dns.TypeANY}[k.rand.IntN(3)], Qclass: []uint16{1, 1, 3, 255}[k.rand.IntN(4)]}
	case 22: // much of it
		if i >= 0 {
			for range 300 {
				*s = append(*s, (*s)[i])
			}
		}
	case 23: // the answer of a child or parent of the name
		labels := dns.SplitDomainName(name)
		if len(labels) > 1 {
			o := q
			o.Msg = q.Msg.Copy()
			o.Msg.Question[0].Name = dns.Fqdn(strings.Join(labels[1:], "."))
			if a := o.Answer(); a != nil {
				a.Question = m.Question
				return a
			}
		}
	}
	return m
}

// Whatever stands between the resolver and the servers: of a name in signed zones a client learns the truth, or
// SERVFAIL; nothing that is not proven is called authentic; nothing bogus comes without CD, also after somebody
// asked with CD. Once the monkey is gone, and what it was believed about delegations has ended, all is well.
func TestMonkeyOnThePath(t *testing.T) {
	seeds := []uint64{1, 2}
	if *long {
		seeds = append(seeds, 3, 4, 5, 6, 7, 8, 9, 10)
	}
	if *monkeySeed > 0 {
		seeds = []uint64{*monkeySeed}
	}
	for i := len(seeds); i < *monkeys; i++ {
		seeds = append(seeds, uint64(i+1))
	}
	names := siminternet.Expect()
	for _, seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			assault(t, nil, func(o *resolver.Options) { o.Cache.Aggressive = true }, func(l *lab) {
				k := &monkey{rand: rand.New(rand.NewPCG(seed, 1)), share: []float64{0.05, 0.2, 0.5, 1}[seed%4]}
				before := map[string]siminternet.Behaviour{}
				for _, a := range l.sim.Addrs() {
					before[a.String()] = l.sim.BehaviourOf(a)
					l.hook(a.String(), k.meddle)
				}
				r := rand.New(rand.NewPCG(seed, 2))
				answered := 0
				for range 250 {
					e := names[r.IntN(len(names))]
					m := new(dns.Msg).SetQuestion(e.Name, e.Type)
					m.SetEdns0(1232, r.IntN(2) == 0)
					m.AuthenticatedData = r.IntN(2) == 0
					m.CheckingDisabled = r.IntN(4) == 0
					got, err := l.exchangeFor("tcp", m, 15*time.Second)
					if err != nil && m.CheckingDisabled && strings.HasPrefix(err.Error(), "NSEC") {
						continue // whoever does not want it checked gets it as it came
					}
					if err != nil {
						t.Fatalf("%s %s, CD=%v: %v", e.Name, dns.TypeToString[e.Type], m.CheckingDisabled, err)
					}
					if got.Rcode == e.RCode {
						answered++
					}
					l.truth(e, got)
					time.Sleep(time.Duration(r.IntN(60)) * time.Second)
				}
				for a, b := range before {
					l.behave(a, b)
				}
				time.Sleep(25 * time.Hour)
				for _, e := range names {
					m := new(dns.Msg).SetQuestion(e.Name, e.Type)
					m.SetEdns0(1232, false)
					m.AuthenticatedData = true
					got, err := l.exchangeFor("tcp", m, 15*time.Second)
					if err != nil {
						t.Fatalf("afterwards, %s %s: %v", e.Name, dns.TypeToString[e.Type], err)
					}
					l.truth(e, got)
					if got.Rcode == dns.RcodeServerFailure && e.Status != siminternet.Bogus && e.RCode != dns.RcodeServerFailure {
						t.Errorf("afterwards, %s %s: %s %d", e.Name, dns.TypeToString[e.Type], text(got), extended(got))
					}
				}
				t.Logf("share %v: %d of 250 answered, %d questions", k.share, answered, sentTo(l.sim))
			})
		})
	}
}

// truth judges an answer by what is true.
func (l *lab) truth(e siminternet.Expectation, got *dns.Msg) {
	l.t.Helper()
	is := siminternet.AnswerText(got.Answer)
	slices.Sort(is)
	want := slices.Clone(e.Answer)
	slices.Sort(want)
	right := got.Rcode == e.RCode && slices.Equal(is, want)
	what := fmt.Sprintf("%s %s (%v): %s AD=%v CD=%v; the truth is %s %v", e.Name, dns.TypeToString[e.Type], e.Status,
		text(got), got.AuthenticatedData, got.CheckingDisabled, dns.RcodeToString[e.RCode], e.Answer)
	switch {
	case got.AuthenticatedData && (!right || e.Status != siminternet.Secure || got.CheckingDisabled):
		l.t.Errorf("authentic? %s", what)
	case got.CheckingDisabled || got.Rcode == dns.RcodeServerFailure:
	case e.Status == siminternet.Bogus:
		l.t.Errorf("bogus: %s", what)
	case e.Status == siminternet.Secure && !right:
		l.t.Errorf("%s", what)
	}
	for _, rr := range got.Answer {
		if rr.Header().Ttl > 86400 {
			l.t.Errorf("TTL %d: %s", rr.Header().Ttl, what)
		}
	}
}
