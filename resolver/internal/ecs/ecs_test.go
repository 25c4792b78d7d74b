package ecs

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

func policy(t *testing.T) *Policy {
	p, err := New(Options{
		Zones: []dnsname.Name{dnsname.MustParse("cdn.example."), dnsname.MustParse("geo.test.")}, IPv4: 24, IPv6: 56,
		Relays: []netip.Prefix{netip.MustParsePrefix("192.168.7.0/24")},
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func subnet(prefix string) (s query.Subnet) {
	p := netip.MustParsePrefix(prefix)
	s = query.Subnet{Family: 2, Bits: uint8(p.Bits())}
	if p.Addr().Is4() {
		s.Family = 1
	}
	copy(s.Addr[:], p.Addr().AsSlice())
	return s
}

// Each row is a query for a name of a listed zone unless it says otherwise, and the subnet it carries, "" for none.
func TestSubnet(t *testing.T) {
	off := func(q *query.Query) { q.Client.Kind = query.Identified }
	on := func(q *query.Query) { q.Client.Kind, q.Client.Profile.Flags = query.Identified, usercache.ECS }
	name := func(s string) func(*query.Query) {
		return func(q *query.Query) { q.Turn.Current.Name = dnsname.MustParse(s) }
	}
	typ := func(n uint16) func(*query.Query) { return func(q *query.Query) { q.Turn.Current.Type = n } }
	for _, c := range []struct {
		source, option string
		edit           func(*query.Query)
		want           string
	}{
		{"203.0.113.77", "", nil, "203.0.113.0/24"},
		{"::ffff:203.0.113.77", "", nil, "203.0.113.0/24"},
		{"2001:db8:1:2ff::77", "", nil, "2001:db8:1:200::/56"},
		{"203.0.113.77", "0.0.0.0/0", nil, ""},
		{"203.0.113.77", "::/0", nil, ""},
		{"203.0.113.77", "198.51.100.0/24", nil, "203.0.113.0/24"}, // whoever says so is no relay
		{"203.0.113.77", "", off, ""},
		{"203.0.113.77", "", on, "203.0.113.0/24"},
		{"203.0.113.77", "0.0.0.0/0", on, ""},
		{"192.168.7.1", "198.51.100.64/26", nil, "198.51.100.0/24"},
		{"192.168.7.1", "198.51.0.0/16", nil, "198.51.0.0/16"}, // no more than the relay says
		{"192.168.7.1", "2001:db8:1:2ff::/64", nil, "2001:db8:1:200::/56"},
		{"192.168.7.1", "198.51.100.64/26", off, ""},
		{"192.168.7.1", "0.0.0.0/0", nil, ""},
		{"192.168.7.1", "", nil, ""}, // of the relay itself nobody wants to know
		{"192.168.7.1", "10.1.2.0/24", nil, ""},
		{"192.168.8.1", "198.51.100.0/24", nil, ""},
		{"127.0.0.1", "", nil, ""},
		{"100.64.3.4", "", nil, ""},
		{"169.254.3.4", "", nil, ""},
		{"fd00::1", "", nil, ""},
		{"fe80::1%eth0", "", nil, ""},
		{"203.0.113.77", "", name("www.deep.cdn.example."), "203.0.113.0/24"},
		{"203.0.113.77", "", name("geo.test."), "203.0.113.0/24"},
		{"203.0.113.77", "", name("xcdn.example."), ""},
		{"203.0.113.77", "", name("example."), ""},
		{"203.0.113.77", "", name("."), ""},
		{"203.0.113.77", "", typ(dnswire.TypeHTTPS), "203.0.113.0/24"},
		{"203.0.113.77", "", typ(dnswire.TypeDNSKEY), ""},
		{"203.0.113.77", "", typ(dnswire.TypeDS), ""},
		{"203.0.113.77", "", typ(dnswire.TypeNS), ""},
		{"203.0.113.77", "", func(q *query.Query) { q.Turn.Current.Class = dnswire.ClassCH }, ""},
	} {
		q := &query.Query{Source: netip.AddrPortFrom(netip.MustParseAddr(c.source), 4000)}
		q.Turn.Current = query.Question{Name: dnsname.MustParse("www.cdn.example."), Type: dnswire.TypeA, Class: dnswire.ClassIN}
		if c.option != "" {
			q.EDNS.HasSubnet, q.EDNS.Subnet = true, subnet(c.option)
		}
		if c.edit != nil {
			c.edit(q)
		}
		want := query.Subnet{}
		if c.want != "" {
			want = subnet(c.want)
		}
		p := policy(t)
		if got := p.Subnet(q); got != want {
			t.Errorf("%+v: %+v, want %+v", c, got, want)
		}
		if n := testing.AllocsPerRun(10, func() { p.Subnet(q) }); n != 0 {
			t.Errorf("%+v: %v allocations", c, n)
		}
	}
}

func TestZones(t *testing.T) {
	p := policy(t)
	for zone, want := range map[string]bool{".": false, "example.": false, "cdn.example.": true, "a.b.cdn.example.": true, "n.example.": false, "geo.test.": true} {
		if got := p.Told(dnsname.MustParse(zone)); got != want {
			t.Errorf("%s is told: %v", zone, got)
		}
	}
	for _, zone := range []string{".", "com."} {
		if _, err := New(Options{Zones: []dnsname.Name{dnsname.MustParse(zone)}, IPv4: 24}); err == nil {
			t.Errorf("%s may be told of clients", zone)
		}
	}
	if _, err := New(Options{Zones: []dnsname.Name{dnsname.MustParse("a.b.")}, IPv4: 33}); err == nil {
		t.Error("33 bits of an IPv4 address")
	}
	if p, err := New(Options{IPv4: 24, IPv6: 56}); p != nil || err != nil {
		t.Error("without zones:", p, err)
	}
	none, err := New(Options{Zones: []dnsname.Name{dnsname.MustParse("a.b.")}, IPv6: 56})
	q := &query.Query{Source: netip.MustParseAddrPort("203.0.113.77:1")}
	q.Turn.Current = query.Question{Name: dnsname.MustParse("a.b."), Type: dnswire.TypeA, Class: dnswire.ClassIN}
	if err != nil || none.Subnet(q) != (query.Subnet{}) {
		t.Error("IPv4 is sent though none of it is to be:", err, fmt.Sprint(none.Subnet(q)))
	}
}
