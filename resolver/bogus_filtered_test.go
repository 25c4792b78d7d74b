package resolver_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// What is bogus stays a failure whatever a user's policy says of it or of where it leads; a block of the very name that
// is asked needs no answer, and wins.
func TestBogusAndFiltered(t *testing.T) {
	const failure, blocked = "SERVFAIL, EDE 6", "NOERROR, A 0.0.0.0, EDE 17"
	users := map[string]proto.Message{}
	source := map[string]string{}
	user := func(id string, s *userv1.Settings, lines string) {
		source[id] = fmt.Sprintf("10.0.3.%d", len(source)+1)
		users[id] = &userv1.User{Settings: s, Rules: &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte("! mine\n" + lines)}}, Devices: []*userv1.Device{{Id: id, Links: []string{source[id]}}}}
	}
	user("plain", nil, "")
	user("block", nil, "||bad.example^")
	user("allow", nil, "@@||bad.example^\n@@||tobad.z.example^")
	user("address", nil, "||198.51.100.1^\n||198.51.100.2^\n||198.51.100.4^")
	user("rewrite", &userv1.Settings{Rewrites: &userv1.RewriteSet{Values: []*userv1.Rewrite{{Name: "led.example", Records: []string{"CNAME www.bad.example"}}}}}, "")
	user("off", &userv1.Settings{Enabled: proto.Bool(false)}, "||bad.example^")
	synctest.Test(t, func(t *testing.T) {
		sim, err := siminternet.New(time.Now(), caseZones()...)
		if err != nil {
			t.Fatal(err)
		}
		z, _ := sim.Zone("z.example.")
		z.Records += "\ntobad CNAME www.bad.example.\n"
		if err := sim.Replace(z); err != nil {
			t.Fatal(err)
		}
		withHousehold(t, sim, nil, users, nil, func(o *resolver.Options) { o.DNSSEC.Validate = true }, func(h *household) {
			for _, round := range []string{"cold", "warm"} {
				for _, c := range []struct{ id, name, want string }{
					{"plain", "www.bad.example.", failure},
					{"plain", "tobad.z.example.", failure},
					{"block", "www.bad.example.", blocked},
					{"block", "tobad.z.example.", failure},
					{"allow", "www.bad.example.", failure},
					{"allow", "tobad.z.example.", failure},
					{"address", "www.bad.example.", failure},
					{"rewrite", "led.example.", failure},
					{"off", "www.bad.example.", failure},
				} {
					if got := briefly(h.from(source[c.id], c.name, dns.TypeA)); got != c.want {
						t.Errorf("%s, %s asks for %s: %s, want %s", round, c.id, c.name, got, c.want)
					}
				}
			}
		})
	})
}
