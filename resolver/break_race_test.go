package resolver_test

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// While clients ask, everything is done that operators, keys and reloads do: purges, dumps and loads, zones that come
// and go, negative trust anchors too, all judgements forgotten. Answers stay true, each query is answered, and what ends, ends.
func TestEverythingAtOnce(t *testing.T) {
	all := siminternet.Expect()
	assault(t, nil, func(o *resolver.Options) { o.Cache.Aggressive = true }, func(l *lab) {
		var clients, operators sync.WaitGroup
		over := make(chan struct{})
		operate := func(every time.Duration, f func(i int)) {
			operators.Go(func() {
				for i := 0; ; i++ {
					select {
					case <-over:
						return
					case <-time.After(every):
						f(i)
					}
				}
			})
		}
		zone := names("ed25519.example.", "example.", "ecdsa.com.")
		operate(130*time.Millisecond, func(i int) { l.r.Purge(zone[i%len(zone)]) })
		operate(370*time.Millisecond, func(int) { l.r.Distrust() })
		nobody := names("nobody.example.", "nobody.ecdsa.com.") // whose end comes by itself
		operate(310*time.Millisecond, func(i int) {
			if err := l.r.Doubt(nobody[i%2], 200*time.Millisecond); err != nil {
				t.Errorf("negative trust anchor: %v", err)
			}
		})
		operate(250*time.Millisecond, func(int) {
			var b bytes.Buffer
			if err := l.r.Dump(&b); err != nil {
				t.Errorf("dump: %v", err)
			}
			if err := l.r.Load(&b); err != nil {
				t.Errorf("load: %v", err)
			}
		})
		operate(90*time.Millisecond, func(i int) {
			var zones []resolver.Zone
			if i%2 == 0 { // the very servers that the zone has
				zones = []resolver.Zone{{Name: zone[0], Servers: []netip.AddrPort{netip.MustParseAddrPort("127.53.2.1:53")}}}
			}
			if err := l.r.SetZones(zones); err != nil {
				t.Errorf("zones: %v", err)
			}
		})
		var mu sync.Mutex // guards failed
		failed, asked := 0, 0
		for c := range 6 {
			clients.Go(func() {
				r := rand.New(rand.NewPCG(uint64(c), 3))
				for range 120 {
					e := all[r.IntN(len(all))]
					m := new(dns.Msg).SetQuestion(e.Name, e.Type)
					m.SetEdns0(1232, r.IntN(2) == 0)
					m.AuthenticatedData, m.CheckingDisabled = r.IntN(2) == 0, r.IntN(5) == 0
					got, err := l.exchangeFor("tcp", m, 15*time.Second)
					if err != nil {
						t.Errorf("%s %s: %v", e.Name, dns.TypeToString[e.Type], err)
						return
					}
					mu.Lock()
					l.truth(e, got)
					if asked++; got.Rcode == dns.RcodeServerFailure && e.Status != siminternet.Bogus && e.RCode != got.Rcode {
						failed++
						t.Errorf("%s %s, CD=%v: %s %v", e.Name, dns.TypeToString[e.Type], m.CheckingDisabled, text(got), got.IsEdns0().Option)
					}
					mu.Unlock()
					time.Sleep(time.Duration(r.IntN(50)) * time.Millisecond)
				}
			})
		}
		clients.Wait()
		close(over)
		operators.Wait()
		t.Logf("%d of %d failed", failed, asked)
	})
}
