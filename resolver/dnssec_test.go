package resolver_test

import (
	"slices"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// Every name of the standard Internet has the status that its table says, cold, warm and hot, whether or not
// the client asks for DNSSEC records.
func TestStandardInternetValidated(t *testing.T) {
	for _, do := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			l := newLab(t, nil)
			defer l.stop()
			for _, e := range siminternet.Expect() {
				for _, when := range []string{"cold", "warm", "hot"} {
					m, err := l.ask(e.Name, e.Type, func(m *dns.Msg) { m.AuthenticatedData = true; m.IsEdns0().SetDo(do) })
					if err != nil {
						t.Errorf("%s %s %s: %v", when, e.Name, dns.TypeToString[e.Type], err)
						break
					}
					rcode, want := e.RCode, slices.Clone(e.Answer)
					if e.Status == siminternet.Bogus {
						rcode, want = dns.RcodeServerFailure, nil
					}
					slices.Sort(want)
					got := siminternet.AnswerText(m.Answer)
					slices.Sort(got)
					if m.Rcode != rcode || !slices.Equal(got, want) || m.AuthenticatedData != (e.Status == siminternet.Secure) {
						t.Errorf("%s %s %s DO=%v:\n got %s AD=%v %v\nwant %s %v %v (%s)", when, e.Name, dns.TypeToString[e.Type], do, text(m), m.AuthenticatedData, m.IsEdns0(), dns.RcodeToString[rcode], want, e.Status, e.Note)
						break
					}
				}
			}
		})
	}
}
