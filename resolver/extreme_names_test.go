package resolver_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver"
)

// longest returns a name of 255 octets that ends in suffix, in labels of so many octets, as far as that comes out.
func longest(suffix string, most int) string {
	for rest := 254 - len(suffix); rest > 0; {
		n := min(rest-1, most)
		if rest-1-n == 1 { // no room for another label
			if n--; n == 0 {
				n = 2
			}
		}
		suffix = strings.Repeat("a", n) + "." + suffix
		rest -= n + 1
	}
	return suffix
}

// TestExtremeNames asks for names at the limits of RFC 1035, and leads to them by aliases and other records, as a user
// who has every kind of rule: nothing on the way of a query looks beyond their ends.
func TestExtremeNames(t *testing.T) {
	var names []string
	for last := 1; last <= 63; last++ {
		names = append(names, longest(strings.Repeat("b", last)+".", 63))
	}
	for _, most := range []int{1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 61, 62, 63} {
		names = append(names, longest("wild.example.", most))
	}
	for _, odd := range []string{`\000`, `\.`, `\\`, `\255`, `\032`, `*`, `_`, `A`, `\@`, `1`, `-`} {
		names = append(names, odd+".", odd+".wild.example.", strings.Repeat(odd, 63)+".wild.example.", longest(odd+".example.", 62))
	}
	names = append(names, ".", strings.Repeat("0.", 32)+"ip6.arpa.", "1.2.0.192.in-addr.arpa.", longest("ip6.arpa.", 1), longest("in-addr.arpa.", 1))

	records := "*.wild A 192.0.2.1\n"
	leading := map[byte]uint16{'c': dns.TypeA, 'm': dns.TypeMX, 's': dns.TypeSRV, 'h': dns.TypeHTTPS, 'v': dns.TypeSVCB, 'p': dns.TypePTR}
	asked := slices.Clone(names)
	for i, n := range names {
		if n == "." || strings.ContainsAny(n, `\@`) {
			continue // the simulated zone's parser is another one's
		}
		records += fmt.Sprintf("c%d CNAME %s\nm%d MX 1 %s\ns%d SRV 1 1 1 %s\nh%d HTTPS 0 %s\nv%d SVCB 1 %s alpn=h2\np%d PTR %s\n", i, n, i, n, i, n, i, n, i, n, i, n)
		for kind := range leading {
			asked = append(asked, fmt.Sprintf("%c%d.example.", kind, i))
		}
	}
	rules, rulesText := list(0, "||adservice*.x^\n||*.bigbigbigbig.foo*\n*.sevenxx.foobar*\n*ads-*\n*x99*\n/^[a-z]+-ads\\./\n/ads?$/\n/b{60}z/\nplain.example\n0.0.0.0 host.example\n"+
		"||sub*.plain.example^$denyallow=a.plain.example\n||re.example^$dnsrewrite=192.0.2.7\n*$dnstype=NULL\n||x.example^$important\n@@||y.example^\n||z.example^$client=~one\n")
	zone, zoneText := list(1, "$TTL 60\nbad.example CNAME .\n*.bad.example CNAME *.garden.example.\n32.9.9.0.192.rpz-ip CNAME .\ndns.evil.example.rpz-nsdname CNAME .\n32.9.7.0.127.rpz-nsip CNAME .\n")
	user := func(id, link string, s *userv1.Settings) *userv1.User {
		s.Lists, s.SafeSearch, s.Services = strs("rules", "zone"), strs("engine"), strs("service")
		s.RebindingProtection, s.BlockBypass = proto.Bool(true), proto.Bool(true)
		s.Rewrites = &userv1.RewriteSet{Values: []*userv1.Rewrite{{Name: "*.re.example", Records: []string{"CNAME c1.example"}}, {Name: "re.example", Records: []string{"A 192.0.2.8"}}}}
		return &userv1.User{Settings: s, Devices: []*userv1.Device{{Id: id, Links: []string{link}}},
			Rules: &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte("||mine*.example^\n/^mine[0-9]/\n@@||ok.example^\n|exactly.example^\n*own-*\n")}}}
	}
	for _, variant := range []string{"plain", "validating, with DNS64"} {
		t.Run(variant, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := newInternet(t, zones{zoneAt("example.", labServer, records)})
				withHousehold(t, sim, map[string]proto.Message{
					"list/rules": rules, "list/zone": zone,
					"service/service":   &userv1.Service{Number: 1, Rules: []string{"||service.example^", "||*.service*.example^", "|x.service.example|"}},
					"safesearch/engine": &userv1.SafeSearch{Rewrites: []*userv1.Rewrite{{Name: "search.example", Records: []string{"CNAME c2.example"}}, {Name: "*.search.example", Records: []string{"CNAME c3.example"}}}},
				}, map[string]proto.Message{
					"one": user("one", "10.0.1.1", &userv1.Settings{}),
					"two": user("two", "10.0.1.2", &userv1.Settings{AllowDomains: strs("example", "arpa", "b", "bb"), Mode: userv1.BlockMode_BLOCK_MODE_NXDOMAIN, BlockHttpsRecords: proto.Bool(true)}),
				}, [][]byte{rulesText, zoneText}, func(o *resolver.Options) {
					o.PolicyZones = []resolver.PolicyZone{policyZone(t, "zone.", "$TTL 60\n@ SOA ns. host. 1 2 3 4 30\nbad2.example CNAME .\n*.bad2.example CNAME .\n32.8.9.0.192.rpz-ip CNAME .\nevil.example.rpz-nsdname CNAME .\n")}
					if variant != "plain" {
						o.DNSSEC.Validate, o.DNS64 = true, netip.MustParsePrefix("64:ff9b::/96")
					}
				}, func(h *household) {
					counts := map[string]int{}
					for _, name := range asked {
						types, clients := []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeHTTPS, dns.TypeANY, dns.TypeDS}, []string{"10.0.1.1", "10.0.1.2", "203.0.113.1"}
						if leads, ok := leading[name[0]]; ok && strings.HasSuffix(name, ".example.") && len(name) < 20 {
							types, clients = []uint16{leads}, clients[:1]
						}
						for _, typ := range types {
							for _, from := range clients {
								m, err := h.from(from, name, typ)
								if n := h.r.Panics(); n > 0 {
									t.Fatalf("%s asks %s %s: %d panics", from, name, dns.Type(typ), n)
								}
								if err != nil {
									t.Fatalf("%s asks %s %s: %v", from, name, dns.Type(typ), err)
								}
								counts[dns.RcodeToString[m.Rcode]]++
							}
						}
					}
					t.Log(counts)
					if counts["SERVFAIL"] > 0 || counts["NXDOMAIN"] == 0 || counts["NOERROR"] == 0 {
						t.Errorf("response codes: %v", counts)
					}
				})
			})
		})
	}
}
