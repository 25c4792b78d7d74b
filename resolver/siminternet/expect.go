package siminternet

import (
	"slices"
	"strconv"
	"strings"

	"github.com/miekg/dns"
)

// An Expectation is what a validating resolver that has Standard's root hints and trust anchor must answer.
type Expectation struct {
	Name string
	Type uint16

	// RCode is that of the response. For Bogus it is the one that a query with CD=1 gets; without CD it is
	// SERVFAIL.
	RCode int

	// Answer is the answer section in the form of AnswerText. For Bogus, only CD=1 may see it.
	Answer []string

	Status Status
	Note   string // why this name is in the table
}

// A Status is the security status of RFC 4035 section 4.3.
type Status uint8

const (
	Secure   Status = iota // AD may be set
	Insecure               // an unsigned zone took part, or an opt-out span (RFC 5155 section 9.2)
	Bogus
)

func (s Status) String() string { return [...]string{"secure", "insecure", "bogus"}[s] }

// AnswerText writes records as "owner TYPE rdata" with the owner in lower case and without TTL, signatures and
// pseudo-records, sorted: for comparing answers.
func AnswerText(rrs []dns.RR) []string {
	var lines []string
	for _, rr := range rrs {
		h := rr.Header()
		if h.Rrtype == dns.TypeRRSIG || h.Rrtype == dns.TypeOPT {
			continue
		}
		rdata := strings.TrimPrefix(rr.String(), h.String())
		lines = append(lines, canonical(h.Name)+" "+dns.Type(h.Rrtype).String()+" "+rdata)
	}
	slices.Sort(lines)
	return lines
}

// Expect returns the table of Standard.
func Expect() []Expectation {
	const (
		a, aaaa, txt, mx = dns.TypeA, dns.TypeAAAA, dns.TypeTXT, dns.TypeMX
		noError, noName  = dns.RcodeSuccess, dns.RcodeNameError
	)
	lines := func(l ...string) []string { slices.Sort(l); return l }
	host := func(name, addr string, status Status, note string) Expectation {
		return Expectation{name, a, noError, []string{name + " A " + addr}, status, note}
	}
	none := func(name string, qtype uint16, rcode int, status Status, note string) Expectation {
		return Expectation{name, qtype, rcode, nil, status, note}
	}
	wwwEd := []string{"www.ed25519.example. A 198.18.0.1", "www.ed25519.example. A 198.18.0.11"}
	big, many := bigAnswer()

	return []Expectation{
		// Signed, one algorithm each.
		{"www.ed25519.example.", a, noError, wwwEd, Secure, "algorithm 15, NSEC, two addresses"},
		{"www.ed25519.example.", aaaa, noError, lines("www.ed25519.example. AAAA 2001:db8::1"), Secure, ""},
		{"www.ed25519.example.", dns.TypeHTTPS, noError, lines(`www.ed25519.example. HTTPS 1 . alpn="h2,h3"`), Secure, ""},
		{"ed25519.example.", mx, noError, lines("ed25519.example. MX 10 mail.ed25519.example."), Secure, ""},
		{"ed25519.example.", txt, noError, lines(`ed25519.example. TXT "signed with ed25519"`), Secure, ""},
		{"_dns._udp.ed25519.example.", dns.TypeSRV, noError, lines("_dns._udp.ed25519.example. SRV 0 5 53 www.ed25519.example."), Secure, ""},
		host("www.ecdsa.com.", "198.18.0.2", Secure, "algorithm 13, NSEC3 without opt-out, below an opt-out zone"),
		host("www.rsa.org.", "198.18.2.1", Secure, "algorithm 8, NSEC3 with iterations and salt"),
		host("www.p384.test.", "198.18.3.1", Secure, "algorithm 14"),
		host("www.rsa512.test.", "198.18.3.2", Secure, "algorithm 10"),
		host("www.example.com.", "198.18.4.2", Secure, ""),
		host("www.example.net.", "198.18.4.4", Secure, ""),
		host("www.deep.sub.example.", "198.18.8.6", Secure, "a zone two labels below its parent"),
		host("a.b.c.d.e.f.g.deep.sub.example.", "198.18.8.7", Secure, "many empty non-terminals on the way"),
		{"1.0.18.198.in-addr.arpa.", dns.TypePTR, noError, lines("1.0.18.198.in-addr.arpa. PTR www.ed25519.example."), Secure, "reverse mapping"},

		// Not there.
		none("www.ed25519.example.", txt, noError, Secure, "NODATA, NSEC"),
		none("nothing.ed25519.example.", a, noName, Secure, "NXDOMAIN, NSEC"),
		none("b.ed25519.example.", a, noError, Secure, "empty non-terminal, NSEC"),
		none("www.ecdsa.com.", txt, noError, Secure, "NODATA, NSEC3"),
		none("nothing.ecdsa.com.", a, noName, Secure, "NXDOMAIN, NSEC3"),
		none("a.nothing.ecdsa.com.", a, noName, Secure, "NXDOMAIN, closest encloser two labels up"),
		none("a.b.ecdsa.com.", a, noError, Secure, "empty non-terminal, NSEC3"),
		none("nothing.rsa.org.", a, noName, Secure, "NXDOMAIN, NSEC3 with iterations and salt"),
		none("nothing.example.", a, noName, Secure, "a domain that does not exist, NSEC"),
		none("nothing.test.", a, noName, Secure, "a domain that does not exist, NSEC3"),
		none("nothing.com.", a, noName, Insecure, "a domain that does not exist below an opt-out zone"),
		none("nothing.", a, noName, Secure, "a top-level domain that does not exist"),
		none("ecdsa.com.", dns.TypeCAA, noError, Secure, "NODATA at an apex"),
		none("unsigned.com.", dns.TypeDS, noError, Insecure, "no DS, by an opt-out span"),
		none("unsigned.org.", dns.TypeDS, noError, Secure, "no DS, by a matching NSEC3"),
		none("unsigned.example.", dns.TypeDS, noError, Secure, "no DS, by NSEC"),

		// Unsigned.
		host("www.unsigned.com.", "198.18.5.1", Insecure, "delegation in an opt-out span"),
		host("www.unsigned.org.", "198.18.5.2", Insecure, "delegation with a matching NSEC3"),
		host("www.unsigned.example.", "198.18.5.3", Insecure, "delegation with NSEC"),
		host("any.wild.unsigned.example.", "198.18.5.4", Insecure, "wildcard without proof"),
		none("nothing.unsigned.example.", a, noName, Insecure, ""),
		none("www.unsigned.example.", txt, noError, Insecure, ""),
		host("www.host.lab.", "198.18.5.5", Insecure, "below an unsigned top-level domain"),
		host("www.island.example.", "198.18.5.6", Insecure, "signed, without DS"),
		host("www.unknown-algorithm.example.", "198.18.5.7", Insecure, "signed with algorithm 200"),

		// Wildcards.
		host("any.wild.example.", "198.18.6.1", Secure, "wildcard, NSEC"),
		host("any.depth.wild.example.", "198.18.6.1", Secure, "wildcard, two labels"),
		host("named.wild.example.", "198.18.6.2", Secure, "a name beside the wildcard"),
		none("any.wild.example.", aaaa, noError, Secure, "wildcard NODATA, NSEC"),
		none("other.named.wild.example.", a, noName, Secure, "a name that exists stops the wildcard"),
		{"any.alias.wild.example.", a, noError, lines("any.alias.wild.example. CNAME www.ecdsa.com.", "www.ecdsa.com. A 198.18.0.2"), Secure, "wildcard CNAME"},
		host("any.wild.ecdsa.com.", "198.18.1.14", Secure, "wildcard, NSEC3"),
		none("any.wild.ecdsa.com.", aaaa, noError, Secure, "wildcard NODATA, NSEC3"),
		host("*.wild.ecdsa.com.", "198.18.1.14", Secure, "the wildcard itself"),

		// Aliases.
		{"alias2.ed25519.example.", a, noError, lines(append([]string{"alias2.ed25519.example. CNAME alias.ed25519.example.", "alias.ed25519.example. CNAME www.ed25519.example."}, wwwEd...)...), Secure, "aliases inside one zone"},
		{"alias.ed25519.example.", dns.TypeCNAME, noError, lines("alias.ed25519.example. CNAME www.ed25519.example."), Secure, "the alias itself"},
		{"alias.ed25519.example.", txt, noError, lines("alias.ed25519.example. CNAME www.ed25519.example."), Secure, "an alias whose target lacks the type"},
		{"one.chain.example.", a, noError, lines(append([]string{"one.chain.example. CNAME two.chain.com.", "two.chain.com. CNAME three.chain.org.", "three.chain.org. CNAME www.ed25519.example."}, wwwEd...)...), Secure, "aliases across four zones"},
		{"mixed.chain.example.", a, noError, lines("mixed.chain.example. CNAME www.unsigned.com.", "www.unsigned.com. A 198.18.5.1"), Insecure, "from a signed zone into an unsigned one"},
		{"alias.unsigned.com.", a, noError, lines("alias.unsigned.com. CNAME www.ecdsa.com.", "www.ecdsa.com. A 198.18.0.2"), Insecure, "from an unsigned zone into a signed one"},
		{"dangling.chain.example.", a, noName, lines("dangling.chain.example. CNAME nothing.ecdsa.com."), Secure, "an alias to nothing"},
		{"bad.chain.example.", a, noError, lines("bad.chain.example. CNAME www.bad-signature.example.", "www.bad-signature.example. A 198.18.12.1"), Bogus, "an alias into a bogus zone"},
		{"www.old.dname.example.", a, noError, lines(append([]string{"old.dname.example. DNAME ed25519.example.", "www.old.dname.example. CNAME www.ed25519.example."}, wwwEd...)...), Secure, "DNAME into another zone"},
		{"host.own.dname.example.", a, noError, lines("own.dname.example. DNAME new.dname.example.", "host.own.dname.example. CNAME host.new.dname.example.", "host.new.dname.example. A 198.18.7.1"), Secure, "DNAME inside one zone"},
		{"old.dname.example.", dns.TypeDNAME, noError, lines("old.dname.example. DNAME ed25519.example."), Secure, "the DNAME itself"},

		// Delegations.
		host("www.sibling.example.", "198.18.8.1", Secure, "name server in a sibling zone, with glue"),
		host("www.hoster.org.", "198.18.8.2", Secure, "name servers in the zone itself"),
		host("www.glueless.com.", "198.18.8.3", Secure, "name servers in another top-level domain"),
		host("www.noglue.org.", "198.18.8.4", Secure, "name server in a sibling zone, without glue"),
		host("www.glueless2.com.", "198.18.8.5", Secure, "name server in a zone that is glueless itself"),

		// Servers in trouble.
		host("www.onedead.example.", "198.18.9.1", Insecure, "one of two servers is silent"),
		host("www.slow.example.", "198.18.9.4", Insecure, "300 ms"),
		host("www.lame.example.", "198.18.9.5", Insecure, "one of two servers refuses"),
		host("www.noedns.example.", "198.18.9.6", Insecure, "FORMERR to EDNS"),
		host("www.cookies.example.", "198.18.9.7", Insecure, "over UDP, BADCOOKIE without a server cookie, TC without any"),

		// Big.
		{"big.example.", txt, noError, big, Secure, "2.4 KB: over TCP"},
		{"many.big.example.", a, noError, many, Secure, "150 addresses: over TCP"},

		// Names to filter, and search engines.
		host("www.ads.example.", "198.18.10.1", Insecure, "advertisements"),
		host("metrics.tracker.example.", "198.18.10.4", Insecure, "a tracker"),
		{"stats.shop.example.", a, noError, lines("stats.shop.example. CNAME collect.tracker.example.", "collect.tracker.example. A 198.18.10.5"), Insecure, "a tracker behind an alias of the shop"},
		{"cdn.shop.example.", a, noError, lines("cdn.shop.example. CNAME edge.hoster.org.", "edge.hoster.org. A 198.18.10.11"), Secure, "a harmless alias"},
		host("www.shop.example.", "198.18.10.10", Secure, ""),
		host("www.google.com.", "198.18.11.1", Insecure, "safe search rewrites it"),
		host("forcesafesearch.google.com.", "216.239.38.120", Insecure, ""),
		host("restrict.youtube.com.", "216.239.38.120", Insecure, ""),
		host("strict.bing.com.", "204.79.197.220", Insecure, ""),
		host("safe.duckduckgo.com.", "198.18.11.5", Insecure, ""),
		host("www.rebind.example.", "192.168.1.1", Insecure, "a public name with a private address"),

		// Not to be believed.
		host("www.bad-signature.example.", "198.18.12.1", Bogus, "signature does not verify"),
		host("www.expired.example.", "198.18.12.2", Bogus, "signatures expired"),
		host("www.future.example.", "198.18.12.3", Bogus, "signatures not yet valid"),
		host("www.wrong-ds.example.", "198.18.12.4", Bogus, "no key matches the DS"),
		host("www.no-signature.example.", "198.18.12.5", Bogus, "signatures missing"),
		none("nothing.no-denial.example.", a, noName, Bogus, "NXDOMAIN without proof, NSEC"),
		none("www.no-denial.example.", txt, noError, Bogus, "NODATA without proof"),
		host("any.wild.no-denial.example.", "198.18.12.7", Bogus, "wildcard without proof"),
		host("www.no-denial.example.", "198.18.12.6", Secure, "a positive answer of that zone"),
		none("nothing.no-denial.com.", a, noName, Bogus, "NXDOMAIN without proof, NSEC3"),
		host("good.partly.example.", "198.18.12.10", Secure, ""),
		host("bad.partly.example.", "198.18.12.11", Bogus, "one signature does not verify"),
		host("old.partly.example.", "198.18.12.12", Bogus, "one signature expired"),
		host("bare.partly.example.", "198.18.12.13", Bogus, "one signature missing"),
	}
}

func bigAnswer() (text, many []string) {
	line := "big.example. TXT"
	for i := range bigText {
		line += ` "` + bigString(i) + `"`
	}
	for i := range bigMany {
		many = append(many, "many.big.example. A 198.18.13."+strconv.Itoa(i+1))
	}
	slices.Sort(many)
	return []string{line}, many
}
