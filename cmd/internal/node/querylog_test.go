package node

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
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
	n, conn := annsNode(t, c)
	ctx, policies := t.Context(), adminv1.NewPolicyServiceClient(conn)
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
	_, err = policies.SetRules(ctx, &adminv1.SetRulesRequest{Target: "ann", Text: []byte("||rule.example^\n")})
	must(err)
	for round, privacy := range []string{"counters", "full", "no_client", "counters"} {
		source := netip.AddrFrom4([4]byte{127, 0, 0, byte(round + 1)})
		set, err := policies.SetSettings(ctx, &adminv1.SetSettingsRequest{Target: "ann", Assignments: []*adminv1.Assignment{
			{Key: "log", Operation: adminv1.Operation_OPERATION_SET, Value: privacy}, {Key: "lists", Operation: adminv1.Operation_OPERATION_ADD, Value: "first"},
			{Key: "services", Operation: adminv1.Operation_OPERATION_ADD, Value: "tiktok"}}})
		must(err)
		awaitUsers(t, n, set.Revision)
		for _, name := range []string{"ads.example.", "tiktok.com."} { // of the catalogue, which comes by itself
			wait(t, name, func() bool { return askFrom(t, n, source, name, dns.TypeA).Rcode == dns.RcodeSuccess })
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
	wait(t, "the log", func() bool {
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
