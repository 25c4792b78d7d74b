package siminternet

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// Standard returns the Internet that the demo and most tests use, with signatures valid around now. Its
// servers are good ones but for those that a zone's name announces: of onedead.example. the first server is
// silent, slow.example. answers after 300 ms, lame.example. has a server that refuses. Every address is in
// 127.53.0.0/16.
func Standard(now time.Time) *Internet {
	in, err := New(now, StandardZones()...)
	if err != nil {
		panic("siminternet: the standard zones: " + err.Error()) // fixed text, covered by tests
	}
	StandardBehaviours(in)
	return in
}

// StandardBehaviours makes the servers of StandardZones behave as Standard says: for an Internet of these zones
// and others.
func StandardBehaviours(in *Internet) {
	in.SetBehaviour(leaf(20), Behaviour{Silent: true})
	in.SetBehaviour(leaf(22), Behaviour{Delay: 300 * time.Millisecond})
	in.SetBehaviour(leaf(23), Behaviour{Lame: LameRefused})
	in.SetBehaviour(leaf(25), Behaviour{EDNS: EDNSFormErr})
	in.SetBehaviour(leaf(26), Behaviour{Cookies: CookiesRequired})
}

func tld(n byte) netip.Addr  { return netip.AddrFrom4([4]byte{127, 53, 1, n}) }
func leaf(n byte) netip.Addr { return netip.AddrFrom4([4]byte{127, 53, 2, n}) }

func servers(addrs ...netip.Addr) []netip.Addr { return addrs }

// StandardZones returns the declarations of Standard, to add to or to change before New.
func StandardZones() []Zone {
	rootServers := []NameServer{
		{Name: "a.root-servers.net.", Addrs: servers(netip.AddrFrom4([4]byte{127, 53, 0, 1}))},
		{Name: "b.root-servers.net.", Addrs: servers(netip.AddrFrom4([4]byte{127, 53, 0, 2}))},
	}
	gtldServers := []NameServer{
		{Name: "a.gtld-servers.net.", Addrs: servers(tld(1))},
		{Name: "b.gtld-servers.net.", Addrs: servers(tld(2))},
	}
	arpaServers := servers(tld(8))
	const (
		rsa, rsa512, p256, p384, ed = dns.RSASHA256, dns.RSASHA512, dns.ECDSAP256SHA256, dns.ECDSAP384SHA384, dns.ED25519
	)
	return []Zone{
		// The root and the top-level domains.
		{Name: ".", NameServers: rootServers, Algorithm: rsa, TTL: 86400},
		{Name: "root-servers.net.", NameServers: rootServers},
		{Name: "gtld-servers.net.", NameServers: gtldServers},
		{Name: "com.", NameServers: gtldServers, Algorithm: p256, NSEC3: &NSEC3{OptOut: true}},
		{Name: "net.", NameServers: gtldServers, Algorithm: p256, NSEC3: &NSEC3{OptOut: true}},
		{Name: "org.", NameServers: []NameServer{{Name: "a.nic", Addrs: servers(tld(4))}}, Algorithm: rsa, NSEC3: &NSEC3{Iterations: 1, Salt: "5A17"}},
		{Name: "example.", NameServers: []NameServer{{Name: "a.nic", Addrs: servers(tld(5))}}, Algorithm: p256},
		{Name: "test.", NameServers: []NameServer{{Name: "a.nic", Addrs: servers(tld(6))}}, Algorithm: ed, NSEC3: &NSEC3{}},
		{Name: "lab.", NameServers: []NameServer{{Name: "a.nic", Addrs: servers(tld(7))}}}, // unsigned

		// Reverse mapping of 198.18.0.0/16 (RFC 2544), which no resolver answers for by itself.
		{Name: "arpa.", Servers: arpaServers, Algorithm: rsa},
		{Name: "in-addr.arpa.", Servers: arpaServers, Algorithm: p256},
		{Name: "ip6.arpa.", Servers: arpaServers, Algorithm: p256},
		{Name: "18.198.in-addr.arpa.", Servers: arpaServers, Algorithm: ed, Records: `
			1.0 PTR www.ed25519.example.
			2.0 PTR www.ecdsa.com.
		`},

		// One zone of each kind of signature.
		{Name: "ed25519.example.", Servers: servers(leaf(1), leaf(2)), Algorithm: ed, Records: `
			@           A     198.18.0.10
			@           AAAA  2001:db8::10
			@           MX    10 mail
			@           TXT   "signed with ed25519"
			@           CAA   0 issue "ca.example.net"
			www         A     198.18.0.1
			www         A     198.18.0.11
			www         AAAA  2001:db8::1
			www         HTTPS 1 . alpn=h2,h3
			mail        A     198.18.0.12
			_dns._udp   SRV   0 5 53 www
			alias       CNAME www
			alias2      CNAME alias
			leaf.a.b    A     198.18.0.13
		`},
		{Name: "ecdsa.com.", Servers: servers(leaf(3)), Algorithm: p256, NSEC3: &NSEC3{}, Records: `
			@        A     198.18.1.10
			www      A     198.18.0.2
			www      AAAA  2001:db8::2
			alias    CNAME www
			leaf.a.b A     198.18.1.13
			*.wild   A     198.18.1.14
			*.wild   TXT   "from a wildcard"
		`},
		{Name: "rsa.org.", Servers: servers(leaf(4)), Algorithm: rsa, NSEC3: &NSEC3{Iterations: 1, Salt: "AABBCCDD"}, Records: `
			@     A 198.18.2.10
			www   A 198.18.2.1
		`},
		{Name: "p384.test.", Servers: servers(leaf(5)), Algorithm: p384, Records: `www A 198.18.3.1`},
		{Name: "rsa512.test.", Servers: servers(leaf(6)), Algorithm: rsa512, Records: `www A 198.18.3.2`},
		{Name: "example.com.", Servers: servers(leaf(3)), Algorithm: p256, Records: "@ A 198.18.4.1\nwww A 198.18.4.2"},
		{Name: "example.net.", Servers: servers(leaf(4)), Algorithm: ed, Records: "@ A 198.18.4.3\nwww A 198.18.4.4"},

		// Unsigned zones below each kind of parent: NSEC3 with opt-out, NSEC3, NSEC, unsigned.
		{Name: "unsigned.com.", Servers: servers(leaf(7)), Records: "@ A 198.18.5.10\nwww A 198.18.5.1\nalias CNAME www.ecdsa.com."},
		{Name: "unsigned.org.", Servers: servers(leaf(7)), Records: "www A 198.18.5.2"},
		{Name: "unsigned.example.", Servers: servers(leaf(7)), Records: "www A 198.18.5.3\n*.wild A 198.18.5.4"},
		{Name: "host.lab.", Servers: servers(leaf(8)), Records: "www A 198.18.5.5"},
		{Name: "island.example.", Servers: servers(leaf(8)), Algorithm: p256, NoDS: true, Records: "www A 198.18.5.6"},
		{Name: "unknown-algorithm.example.", Servers: servers(leaf(8)), Algorithm: p256, Fault: UnknownAlgorithm, Records: "www A 198.18.5.7"},

		// Wildcards, aliases, DNAME.
		{Name: "wild.example.", Servers: servers(leaf(9)), Algorithm: p256, Records: `
			*         A     198.18.6.1
			*         TXT   "any name"
			named     A     198.18.6.2
			sub.named TXT   "below a name that exists"
			*.alias   CNAME www.ecdsa.com.
		`},
		{Name: "chain.example.", Servers: servers(leaf(10)), Algorithm: ed, Records: `
			one      CNAME two.chain.com.
			mixed    CNAME www.unsigned.com.
			loop     CNAME loop.chain.com.
			dangling CNAME nothing.ecdsa.com.
			bad      CNAME www.bad-signature.example.
		`},
		{Name: "chain.com.", Servers: servers(leaf(11)), Algorithm: p256, Records: `
			two  CNAME three.chain.org.
			loop CNAME loop.chain.example.
		`},
		{Name: "chain.org.", Servers: servers(leaf(10)), Algorithm: rsa, Records: "three CNAME www.ed25519.example."},
		{Name: "dname.example.", Servers: servers(leaf(12)), Algorithm: p256, Records: `
			old DNAME ed25519.example.
			own DNAME new
			s   DNAME a.target.so.long.that.some.names.no.longer.fit
			host.new A 198.18.7.1
		`},

		// Delegations of each kind: in-domain (above), sibling, outside the parent, with no help from glue.
		{Name: "sibling.example.", NameServers: []NameServer{{Name: "ns1.ed25519.example.", Addrs: servers(leaf(1))}}, Algorithm: ed, Records: "www A 198.18.8.1"},
		{Name: "hoster.org.", Servers: servers(leaf(13), leaf(14)), Algorithm: ed, Records: "www A 198.18.8.2\nedge A 198.18.10.11"},
		{Name: "glueless.com.", NameServers: []NameServer{
			{Name: "ns1.hoster.org.", Addrs: servers(leaf(13))},
			{Name: "ns2.hoster.org.", Addrs: servers(leaf(14))},
		}, Algorithm: p256, Records: "www A 198.18.8.3"},
		{Name: "noglue.org.", NameServers: []NameServer{{Name: "ns2.hoster.org.", Addrs: servers(leaf(14))}}, NoSiblingGlue: true, Algorithm: p256, Records: "www A 198.18.8.4"},
		{Name: "glueless2.com.", NameServers: []NameServer{{Name: "dns.glueless.com.", Addrs: servers(leaf(15))}}, NoSiblingGlue: true, Algorithm: ed, Records: "www A 198.18.8.5"},
		{Name: "deep.sub.example.", Servers: servers(leaf(16)), Algorithm: p256, Records: "www A 198.18.8.6\na.b.c.d.e.f.g A 198.18.8.7"},

		// Servers in trouble.
		{Name: "onedead.example.", Servers: servers(leaf(20), leaf(21)), Records: "www A 198.18.9.1\nwww2 A 198.18.9.2\nwww3 A 198.18.9.3"},
		{Name: "slow.example.", Servers: servers(leaf(22)), Records: "www A 198.18.9.4"},
		{Name: "lame.example.", Servers: servers(leaf(23), leaf(24)), Records: "www A 198.18.9.5"},
		{Name: "noedns.example.", Servers: servers(leaf(25)), Records: "www A 198.18.9.6"},
		{Name: "cookies.example.", Servers: servers(leaf(26)), Records: "www A 198.18.9.7"},

		// Answers that do not fit UDP.
		{Name: "big.example.", Servers: servers(leaf(30)), Algorithm: p256, Records: bigRecords()},

		// Names to filter.
		{Name: "ads.example.", Servers: servers(leaf(40)), Records: "@ A 198.18.10.1\nwww A 198.18.10.1\nbanner A 198.18.10.2"},
		{Name: "tracker.example.", Servers: servers(leaf(40)), Records: "@ A 198.18.10.3\nmetrics A 198.18.10.4\ncollect A 198.18.10.5"},
		{Name: "shop.example.", Servers: servers(leaf(41)), Algorithm: ed, Records: `
			@     A     198.18.10.10
			www   A     198.18.10.10
			stats CNAME collect.tracker.example. ; a tracker under the shop's own name
			cdn   CNAME edge.hoster.org.
			deal  CNAME www.ads.example.
		`},
		{Name: "adult.example.", Servers: servers(leaf(41)), Records: "@ A 198.18.10.20\nwww A 198.18.10.20"},
		{Name: "casino.example.", Servers: servers(leaf(41)), Records: "@ A 198.18.10.21\nwww A 198.18.10.21"},
		{Name: "rebind.example.", Servers: servers(leaf(41)), Records: "www A 192.168.1.1\nlocal A 127.0.0.1\nv6 AAAA fd00::1"},

		// Search engines and their filtered twins, at the addresses these have.
		{Name: "google.com.", Servers: servers(leaf(42)), Records: `
			@                A 198.18.11.1
			www              A 198.18.11.1
			forcesafesearch  A 216.239.38.120
		`},
		{Name: "youtube.com.", Servers: servers(leaf(42)), Records: `
			@                A 198.18.11.2
			www              A 198.18.11.2
			m                A 198.18.11.2
			restrict         A 216.239.38.120
			restrictmoderate A 216.239.38.119
		`},
		{Name: "bing.com.", Servers: servers(leaf(42)), Records: "@ A 198.18.11.3\nwww A 198.18.11.3\nstrict A 204.79.197.220"},
		{Name: "duckduckgo.com.", Servers: servers(leaf(42)), Records: "@ A 198.18.11.4\nwww A 198.18.11.4\nsafe A 198.18.11.5"},

		// Signed zones that must not be believed.
		{Name: "bad-signature.example.", Servers: servers(leaf(50)), Algorithm: p256, Fault: BadSignature, Records: "www A 198.18.12.1"},
		{Name: "expired.example.", Servers: servers(leaf(50)), Algorithm: ed, Fault: Expired, Records: "www A 198.18.12.2"},
		{Name: "future.example.", Servers: servers(leaf(50)), Algorithm: ed, Fault: NotYetValid, Records: "www A 198.18.12.3"},
		{Name: "wrong-ds.example.", Servers: servers(leaf(50)), Algorithm: p256, Fault: WrongDS, Records: "www A 198.18.12.4"},
		{Name: "no-signature.example.", Servers: servers(leaf(50)), Algorithm: p256, Fault: NoSignature, Records: "www A 198.18.12.5"},
		{Name: "no-denial.example.", Servers: servers(leaf(50)), Algorithm: p256, Fault: NoDenial, Records: "www A 198.18.12.6\n*.wild A 198.18.12.7"},
		{Name: "no-denial.com.", Servers: servers(leaf(50)), Algorithm: p256, NSEC3: &NSEC3{}, Fault: NoDenial, Records: "www A 198.18.12.8"},
		{Name: "partly.example.", Servers: servers(leaf(51)), Algorithm: p256, Records: "good A 198.18.12.10\nbad A 198.18.12.11\nold A 198.18.12.12\nbare A 198.18.12.13",
			FaultAt: map[string]Fault{"bad": BadSignature, "old": Expired, "bare": NoSignature}},
	}
}

// The big answers: 200-octet strings in the TXT record at big.example., addresses of many.big.example.
const bigText, bigMany = 12, 150

func bigRecords() string {
	var b strings.Builder
	b.WriteString("@ TXT")
	for i := range bigText {
		fmt.Fprintf(&b, ` "%s"`, bigString(i))
	}
	b.WriteString("\nsmall TXT \"fits\"\n")
	for i := range bigMany {
		fmt.Fprintf(&b, "many A 198.18.13.%d\n", i+1)
	}
	return b.String()
}

func bigString(i int) string { return strings.Repeat(string(rune('a'+i)), 200) }

// WithNames returns zones with a host for each of the names, at addr: for tests that need to resolve names they
// did not choose, such as those of a block list. A name whose registrable part (its last two labels) is in no
// zone gets an unsigned zone of that name, and an unknown top-level domain gets an unsigned zone too, on the
// given server. A name that a zone has already stays as it is; names that are no host names are left out.
func WithNames(zones []Zone, server, addr netip.Addr, names ...string) []Zone {
	zones = append([]Zone(nil), zones...)
	index := make(map[string]int)
	for i, z := range zones {
		index[canonical(z.Name)] = i
	}
	declare := func(name string) int {
		if i, ok := index[name]; ok {
			return i
		}
		index[name] = len(zones)
		zones = append(zones, Zone{Name: name, Servers: servers(server)})
		return len(zones) - 1
	}
	rrtype := "AAAA"
	if addr.Is4() {
		rrtype = "A"
	}

	added := make(map[int]*strings.Builder)
	seen := make(map[string]bool)
	for _, name := range names {
		labels := dns.SplitDomainName(name)
		if _, ok := dns.IsDomainName(name); !ok || len(labels) == 0 || strings.ContainsAny(name, "*\\\"(); \t\n@$") {
			continue
		}
		name = canonical(name)
		if seen[name] {
			continue
		}
		seen[name] = true
		tldName := canonical(labels[len(labels)-1])
		home := declare(tldName)
		if len(labels) > 1 {
			home = declare(canonical(labels[len(labels)-2] + "." + tldName))
		}
		for n := name; dns.CountLabel(n) > 2; n = parentName(n) {
			if i, ok := index[n]; ok {
				home = i
				break
			}
		}
		if declares(zones[home], name) {
			continue
		}
		if added[home] == nil {
			added[home] = new(strings.Builder)
		}
		fmt.Fprintf(added[home], "\n%s %s %s", name, rrtype, addr)
	}
	for i, b := range added {
		zones[i].Records += b.String() + "\n"
	}
	return zones
}

// declares reports whether the text of a zone has a record at name.
func declares(z Zone, name string) bool {
	if z.Records == "" {
		return false
	}
	p := parser(z, canonical(z.Name), 1)
	for rr, ok := p.Next(); ok; rr, ok = p.Next() {
		if canonical(rr.Header().Name) == name {
			return true
		}
	}
	return false
}
