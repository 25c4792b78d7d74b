package node

import (
	"fmt"
	"strings"
	"testing"

	"github.com/miekg/dns"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

// Who is told that a revision is served is answered by it, by rules too that are too long for a record and come behind
// it.
func TestServedRevisionHasItsTexts(t *testing.T) {
	c := configured(t, t.TempDir(), `
dnssec: { validate: false }
forward_zones: [{ name: ".", upstreams: [{ url: "udp://127.0.0.1:1" }] }]
local_data: [{ name: a.home.arpa, records: ["A 192.0.2.1"] }, { name: b.home.arpa, records: ["A 192.0.2.1"] }]
`)
	n, conn := annsNode(t, c)
	ctx, policies := t.Context(), adminv1.NewPolicyServiceClient(conn)
	for i := range 10 {
		blocked := []string{"a", "b"}[i%2]
		var text strings.Builder
		for k := range 3000 {
			fmt.Fprintf(&text, "||n%d-%d.example^\n", i, k)
		}
		fmt.Fprintf(&text, "||%s.home.arpa^\n", blocked)
		set, err := policies.SetRules(ctx, &adminv1.SetRulesRequest{Target: "ann", Text: []byte(text.String())})
		if err != nil {
			t.Fatal(err)
		}
		awaitUsers(t, n, set.Revision)
		for _, name := range []string{"a", "b"} {
			m := ask(t, n, name+".home.arpa.", dns.TypeA)
			if got := len(m.Answer) == 1 && strings.HasSuffix(m.Answer[0].String(), "\t0.0.0.0"); got != (name == blocked) {
				t.Fatalf("rules %d: %s is blocked: %v: %v", i, name, got, m)
			}
		}
	}
}
