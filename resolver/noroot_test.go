package resolver_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
)

// Where no root server answers, whoever asks once over UDP is told so before client_wait_udp is over.
func TestNoRootServerAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hints := ""
		for i := range 13 {
			hints += fmt.Sprintf(". 3600 NS %c.\n%c. 3600 A 198.18.0.%d\n", 'a'+i, 'a'+i, i+1)
		}
		withHousehold(t, newInternet(t, nil), nil, nil, nil, func(o *resolver.Options) { o.Recursion.RootHints = hints }, func(h *household) {
			for i := range 3 {
				begin := time.Now()
				r, err := h.from("10.0.0.1", fmt.Sprintf("a%d.example.", i), dns.TypeA)
				if took := time.Since(begin); briefly(r, err) != "SERVFAIL, EDE 22" || took > 5*time.Second {
					t.Errorf("question %d: %s after %v", i, briefly(r, err), took)
				}
			}
		})
	})
}
