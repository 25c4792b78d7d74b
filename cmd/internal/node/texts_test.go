package node

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/usercache"
)

// Who is told that a revision is served is answered by it, by rules too that are too long for a record and come behind
// it.
func TestServedRevisionHasItsTexts(t *testing.T) {
	c := configured(t, t.TempDir(), `
dnssec: { validate: false }
forward_zones: [{ name: ".", upstreams: [{ url: "udp://127.0.0.1:1" }] }]
local_data: [{ name: a.home.arpa, records: ["A 192.0.2.1"] }, { name: b.home.arpa, records: ["A 192.0.2.1"] }]
`)
	n, err := Start(c, Options{Version: "test", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	run(t, n)
	ctx := t.Context()
	conn, err := grpc.NewClient("passthrough:///standalone", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(n.service.dial))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	users, policies := adminv1.NewUserServiceClient(conn), adminv1.NewPolicyServiceClient(conn)
	if _, err := users.CreateUser(ctx, &adminv1.CreateUserRequest{Id: "ann"}); err != nil {
		t.Fatal(err)
	}
	if _, err := users.CreateDevice(ctx, &adminv1.CreateDeviceRequest{User: "ann", Device: &userv1.Device{Id: "pc", Links: []string{"127.0.0.1"}}}); err != nil {
		t.Fatal(err)
	}
	served := func() uint64 {
		for _, d := range (syncControl{n}).Datasets() {
			if d.Kind == string(usercache.Users) {
				return d.Revision
			}
		}
		return 0
	}
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
		for end := time.Now().Add(30 * time.Second); served() < set.Revision; {
			if time.Now().After(end) {
				t.Fatalf("revision %d is not served", set.Revision)
			}
			time.Sleep(time.Millisecond)
		}
		for _, name := range []string{"a", "b"} {
			m := ask(t, n, name+".home.arpa.", dns.TypeA)
			if got := len(m.Answer) == 1 && strings.HasSuffix(m.Answer[0].String(), "\t0.0.0.0"); got != (name == blocked) {
				t.Fatalf("rules %d: %s is blocked: %v: %v", i, name, got, m)
			}
		}
	}
}
