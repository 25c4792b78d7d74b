package node

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
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

// The query log says what decided, by the ids that operators know, and of who asked as much as his settings allow.
func TestQueryLog(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "queries.log")
	c := configured(t, dir, `
dnssec: { validate: false }
forward_zones: [{ name: ".", upstreams: [{ url: "udp://127.0.0.1:1" }] }]
local_data: [{ name: a.home.arpa, records: ["A 192.0.2.1"] }]
log: { queries: `+file+` }
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
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	add, err := adminv1.NewListServiceClient(conn).AddList(ctx)
	must(err)
	must(add.Send(&adminv1.AddListRequest{Part: &adminv1.AddListRequest_Header_{Header: &adminv1.AddListRequest_Header{Id: "first"}}}))
	must(add.Send(&adminv1.AddListRequest{Part: &adminv1.AddListRequest_Data{Data: []byte("||none.example^\n||ads.example^\n")}}))
	_, err = add.CloseAndRecv()
	must(err)
	users, policies := adminv1.NewUserServiceClient(conn), adminv1.NewPolicyServiceClient(conn)
	_, err = users.CreateUser(ctx, &adminv1.CreateUserRequest{Id: "ann"})
	must(err)
	_, err = users.CreateDevice(ctx, &adminv1.CreateDeviceRequest{User: "ann", Device: &userv1.Device{Id: "pc", Links: []string{"127.0.0.0/24"}}})
	must(err)
	_, err = policies.SetRules(ctx, &adminv1.SetRulesRequest{Target: "ann", Text: []byte("||rule.example^\n")})
	must(err)
	wait := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("waiting for %s", what)
			}
		}
	}
	served := func(revision uint64) {
		t.Helper()
		wait(fmt.Sprintf("revision %d", revision), func() bool {
			return slices.ContainsFunc((syncControl{n}).Datasets(), func(d *adminv1.DatasetStatus) bool {
				return d.Kind == string(usercache.Users) && d.Revision >= revision
			})
		})
	}
	for round, privacy := range []string{"counters", "full", "no_client", "counters"} {
		source := netip.AddrFrom4([4]byte{127, 0, 0, byte(round + 1)})
		set, err := policies.SetSettings(ctx, &adminv1.SetSettingsRequest{Target: "ann", Assignments: []*adminv1.Assignment{
			{Key: "log", Operation: adminv1.Operation_OPERATION_SET, Value: privacy}, {Key: "lists", Operation: adminv1.Operation_OPERATION_ADD, Value: "first"},
			{Key: "services", Operation: adminv1.Operation_OPERATION_ADD, Value: "tiktok"}}})
		must(err)
		served(set.Revision)
		for _, name := range []string{"ads.example.", "tiktok.com."} { // of the catalogue, which comes by itself
			wait(name, func() bool { return askFrom(t, n, source, name, dns.TypeA).Rcode == dns.RcodeSuccess })
		}
		for _, name := range []string{"ads.example.", "tiktok.com.", "rule.example.", "a.home.arpa."} {
			askFrom(t, n, source, name, dns.TypeA)
		}
	}
	decided := []string{"ads.example. blocked list first", "tiktok.com. blocked service tiktok", "rule.example. blocked user rule ", "a.home.arpa. pass  "}
	var want, got []string // the first round and the last leave nothing
	for _, source := range []string{"127.0.0.2", ""} {
		for _, d := range decided {
			want = append(want, source+" "+d)
		}
	}
	wait("the log", func() bool {
		n.queries.mu.Lock()
		n.queries.w.Flush()
		n.queries.mu.Unlock()
		text, err := os.ReadFile(file)
		must(err)
		got = got[:0]
		for line := range strings.Lines(string(text)) {
			var l struct{ Source, Name, Verdict, By, List string }
			if json.Unmarshal([]byte(line), &l) != nil {
				break // not all of it is written
			}
			if s := fmt.Sprintf("%s %s %s %s %s", l.Source, l.Name, l.Verdict, l.By, l.List); !slices.Contains(got, s) { // who got no answer asks again
				got = append(got, s)
			}
		}
		return len(got) >= len(want)
	})
	// Lines come in no order: who waited until his rules were compiled is noted by another worker than who did not.
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%q\nwant %q", got, want)
	}
}
