package resolver_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// The proof that a wildcard alias applies says nothing of where the alias leads: whoever can answer in the place of
// the target's server cannot make the target vanish, whether what he says has a SOA record or not, and whether the
// alias was asked for or follows from what is cached.
func TestAliasProofIsNoDenial(t *testing.T) {
	const target, soa = "127.53.2.3", "ecdsa.com. SOA ns1.ecdsa.com. h. 1 2 3 4 300"
	for _, aggressive := range []bool{false, true} {
		for _, typ := range []uint16{dns.TypeA, dns.TypeDS, dns.TypeTXT} {
			for forged, answer := range map[string][3]string{
				"NODATA":             {},
				"NODATA with SOA":    {1: soa},
				"records of another": {0: "ecdsa.com. A 198.18.1.10"},
				"NXDOMAIN":           {2: "3"},
				"NXDOMAIN with SOA":  {1: soa, 2: "3"},
			} {
				if bare := answer[0]+answer[1] == ""; !*long && (typ != dns.TypeA || !aggressive && !bare) {
					continue
				}
				t.Run(fmt.Sprintf("%s %s aggressive=%v", dns.TypeToString[typ], forged, aggressive), func(t *testing.T) {
					assault(t, nil, func(o *resolver.Options) { o.Cache.Aggressive = aggressive }, func(l *lab) {
						rcode := len(answer[2]) * dns.RcodeNameError
						l.hook(target, func(q siminternet.Query) *siminternet.Reply {
							if name, typ := asked(q); name == "ecdsa.com." && typ == dns.TypeDNSKEY {
								return nil
							}
							return say(q, true, rcode, answer[0], answer[1], "")
						})
						for _, name := range []string{"one", "two", "one"} {
							if m := l.must(name+".alias.wild.example.", typ); m.Rcode != dns.RcodeServerFailure || m.AuthenticatedData {
								t.Errorf("%s: %s AD=%v", name, text(m), m.AuthenticatedData)
							}
						}
					})
				})
			}
		}
	}
}

// DS records belong to the parent: nobody can put an alias in their place, which would be unsigned like all that the
// child has. For other types the child's servers may say so.
func TestNoAliasForDS(t *testing.T) {
	assault(t, nil, nil, func(l *lab) {
		const parent = "127.53.1.5" // example.
		l.want("unsigned.example.", dns.TypeDS, "NOERROR")
		l.hook(parent, func(q siminternet.Query) *siminternet.Reply {
			if name, typ := asked(q); name == "unsigned.example." && typ == dns.TypeDS {
				return say(q, true, 0, "unsigned.example. CNAME www.ed25519.example.", "", "")
			}
			return nil
		})
		time.Sleep(2 * time.Hour)
		l.want("www.unsigned.example.", dns.TypeA, "NOERROR | www.unsigned.example. A 198.18.5.3")
		if m := l.must("unsigned.example.", dns.TypeDS); m.Rcode != dns.RcodeServerFailure {
			t.Errorf("%s", text(m))
		}
		l.want("www.unsigned.example.", dns.TypeA, "NOERROR | www.unsigned.example. A 198.18.5.3")
	})
}
