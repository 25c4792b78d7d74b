package overload

import (
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

func prefixes(ss ...string) (ps []netip.Prefix) {
	for _, s := range ss {
		ps = append(ps, netip.MustParsePrefix(s))
	}
	return
}

func from(tr query.Transport, addr string) *query.Query {
	return &query.Query{Transport: tr, Source: netip.AddrPortFrom(netip.MustParseAddr(addr), 5000)}
}

func TestAccess(t *testing.T) {
	g := New(Options{Allow: prefixes("127.0.0.0/8", "192.0.2.0/24"), Unlimited: prefixes("127.0.0.0/8", "198.51.100.1/32")})
	for _, c := range []struct {
		tr          query.Transport
		addr        string
		known       bool
		early, late query.RefuseReason
		kind        query.ClientKind
	}{
		{query.UDP, "127.0.0.1", false, 0, 0, query.Listed},
		{query.UDP, "192.0.2.7", false, 0, 0, query.Listed},
		{query.UDP, "::ffff:192.0.2.7", false, 0, 0, query.Listed},
		{query.UDP, "203.0.113.1", false, query.RefuseAccess, query.RefuseAccess, query.Stranger},
		{query.TCP, "203.0.113.1", true, query.RefuseAccess, 0, query.Stranger}, // plain DNS: before identity
		{query.DoT, "203.0.113.1", true, 0, 0, query.Stranger},                  // encrypted: a known device may
		{query.DoH, "203.0.113.1", false, 0, query.RefuseAccess, query.Stranger},
		{query.UDP, "198.51.100.1", false, 0, 0, query.Listed},
	} {
		q := from(c.tr, c.addr)
		if got := g.Early(q); got != c.early || q.Client.Kind != c.kind {
			t.Errorf("%v %s early: %v, kind %d", c.tr, c.addr, got, q.Client.Kind)
		}
		if c.early != query.NotRefused {
			continue
		}
		if c.known {
			q.Client.Kind = query.Identified
		}
		if got := g.Late(q); got != c.late {
			t.Errorf("%v %s late: %v", c.tr, c.addr, got)
		}
	}
	if q := from(query.UDP, "127.0.0.1"); g.Early(&query.Query{Source: netip.AddrPortFrom(q.Source.Addr(), 0)}) != query.RefuseRate {
		t.Error("source port 0 was admitted")
	}
	for _, tr := range []query.Transport{query.TCP, query.DoT, query.DoH} {
		q := from(tr, "127.0.0.1")
		if got := g.Early(&query.Query{Transport: tr, Source: netip.AddrPortFrom(q.Source.Addr(), 0)}); got != query.NotRefused {
			t.Errorf("%v from behind a proxy that names no port: %v", tr, got)
		}
	}
}

func TestDevicesOwnNetworks(t *testing.T) {
	g := New(Options{})
	d := &usercache.Details{AllowNetworks: prefixes("192.0.2.0/24"), DenyNetworks: prefixes("192.0.2.128/25")}
	for addr, want := range map[string]query.RefuseReason{"192.0.2.1": 0, "192.0.2.200": query.RefuseAccess, "203.0.113.1": query.RefuseAccess} {
		q := from(query.DoT, addr)
		q.Client.Kind = query.Identified
		q.Client.Profile.Details = d
		if got := g.Late(q); got != want {
			t.Errorf("%s: %v", addr, got)
		}
	}
}

func TestRateOfStrangers(t *testing.T) {
	g := New(Options{Allow: prefixes("0.0.0.0/0", "::/0"), Rate: func() int { return 100 }, Seed: 7})
	send := func(addr string, tr query.Transport, at time.Duration) query.RefuseReason {
		q := from(tr, addr)
		q.Arrived = clock.Instant(at)
		if why := g.Early(q); why != query.NotRefused {
			t.Fatal(why)
		}
		return g.Late(q)
	}
	count := func(n int, addr string, at time.Duration) (passed, slipped, dropped int) {
		for range n {
			switch send(addr, query.UDP, at) {
			case query.NotRefused:
				passed++
			case query.RefuseSlip:
				slipped++
			default:
				dropped++
			}
		}
		return
	}
	t0 := 5 * time.Hour
	if p, s, d := count(300, "192.0.2.1", t0); p != 100 || s != 100 || d != 100 {
		t.Errorf("300 at once: %d passed, %d slipped, %d dropped", p, s, d)
	}
	if p, _, _ := count(10, "192.0.2.99", t0); p != 0 {
		t.Errorf("another address of the range: %d passed", p)
	}
	if p, _, _ := count(10, "192.0.3.1", t0); p != 10 {
		t.Errorf("another range: %d passed", p)
	}
	if p, _, _ := count(300, "192.0.2.1", t0+500*time.Millisecond); p < 49 || p > 51 {
		t.Errorf("half a second later: %d passed", p)
	}
	if p, _, _ := count(300, "192.0.2.1", t0+100*time.Hour); p != 100 {
		t.Errorf("days later: %d passed", p)
	}
	if p, _, _ := count(300, "2001:db8:0:1100::1", t0); p != 100 {
		t.Errorf("IPv6: %d passed", p)
	}
	if p, _, _ := count(10, "2001:db8:0:11ff::1", t0); p != 0 {
		t.Errorf("the same /56: %d passed", p)
	}
	if p, _, _ := count(300, "127.0.0.1", t0); p != 300 {
		t.Errorf("loopback: %d passed", p)
	}
	if why := send("192.0.2.1", query.TCP, t0); why != query.NotRefused {
		t.Errorf("TCP: %v", why)
	}
	q := from(query.UDP, "192.0.2.1")
	if a := testing.AllocsPerRun(100, func() { g.Early(q); g.Late(q) }); a != 0 {
		t.Errorf("%v allocations", a)
	}
}
