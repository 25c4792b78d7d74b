package resolver_test

import (
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// server answers at an address that the simulated Internet does not know, until the returned function is called.
func (l *lab) server(addr netip.AddrPort, answer func(q *dns.Msg) *dns.Msg) (stop func()) {
	conn, err := l.net.ListenUDP(addr)
	if err != nil {
		l.t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() {
		b := make([]byte, 4096)
		for {
			n, from, err := conn.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			q := new(dns.Msg)
			if q.Unpack(b[:n]) != nil {
				continue
			}
			out, err := answer(q).Pack()
			if err != nil {
				panic(err)
			}
			conn.WriteToUDPAddrPort(out, from)
		}
	})
	return func() {
		conn.Close()
		running.Wait()
	}
}

// G13: a stub zone that is not signed, under a signed parent that says that it does not exist, is resolved where a
// negative trust anchor covers it, and bogus where none does. A public denial never hides it.
func TestStubUnderSignedParent(t *testing.T) {
	private := netip.MustParseAddrPort("192.0.2.77:53")
	name := names("corp.example.")[0]
	for _, anchored := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			l := newCaseLab(t, time.Now(), func(o *resolver.Options) {
				o.Recursion.Zones = []resolver.Zone{{Name: name, Servers: []netip.AddrPort{private}}}
				if anchored {
					o.DNSSEC.Insecure = names("corp.example.")
				}
			})
			defer l.stop()
			defer l.server(private, func(q *dns.Msg) *dns.Msg {
				m := new(dns.Msg).SetReply(q)
				m.Authoritative = true
				if q.Question[0].Qtype == dns.TypeA {
					rr, _ := dns.NewRR(q.Question[0].Name + " 60 A 10.0.0.1")
					m.Answer = []dns.RR{rr}
				} else {
					rr, _ := dns.NewRR("corp.example. 60 SOA a. b. 1 2 3 4 5")
					m.Ns = []dns.RR{rr}
				}
				return m
			})()
			// The parent's denial is in the cache, and Secure, before anybody asks for the zone.
			if m, err := l.ask("corp1.example.", dns.TypeA, withDO); err != nil || m.Rcode != dns.RcodeNameError {
				t.Fatalf("%v, %v", m, err)
			}
			m, err := l.ask("www.corp.example.", dns.TypeA, withDO)
			if err != nil {
				t.Fatal(err)
			}
			switch {
			case anchored && (m.Rcode != dns.RcodeSuccess || m.AuthenticatedData || len(m.Answer) != 1):
				t.Errorf("with a negative trust anchor:\n%v", m)
			case !anchored && m.Rcode != dns.RcodeServerFailure:
				t.Errorf("without:\n%v", m)
			}
		})
	}
}

// G15: forward first, and nobody there: the name is iterated, and validated as any other.
func TestForwardFirstIterates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newCaseLab(t, time.Now(), func(o *resolver.Options) {
			o.Recursion.Zones = []resolver.Zone{{Name: names("z.example.")[0], First: true, Forward: &resolver.ForwardPool{
				Upstreams: []resolver.ForwardUpstream{{Spec: resolver.UpstreamSpec{Addr: netip.MustParseAddrPort("192.0.2.200:53")}}},
			}}}
		})
		defer l.stop()
		m, err := l.ask("www.z.example.", dns.TypeA, withDO)
		if err != nil || m.Rcode != dns.RcodeSuccess || len(m.Answer) == 0 || !m.AuthenticatedData {
			t.Errorf("%v, %v", m, err)
		}
		if l.sim.Count(func(e siminternet.LogEntry) bool { return strings.HasSuffix(strings.ToLower(e.Name), "z.example.") }) == 0 {
			t.Error("no authoritative server was asked")
		}
	})
}
