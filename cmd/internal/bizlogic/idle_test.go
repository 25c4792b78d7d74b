package bizlogic

import (
	"strings"
	"testing"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

// Who switches on what does nothing for now is told so, and what is missing; who does not is told nothing.
func TestSettingsWithoutEffect(t *testing.T) {
	r := start(t, Options{})
	ctx, entries := t.Context(), adminv1.NewCatalogueServiceClient(r.dial())
	if _, err := r.policies.CreatePolicy(ctx, &adminv1.CreatePolicyRequest{Id: "p"}); err != nil {
		t.Fatal(err)
	}
	r.user("u", "p")
	r.user("alone")
	if err := r.device("u", "d"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.addList("bad", "||bad.example^\n", false); err != nil {
		t.Fatal(err)
	}
	entry := func(id string, assignments ...string) {
		t.Helper()
		req := &adminv1.SetEntryRequest{Kind: adminv1.EntryKind_ENTRY_KIND_CATEGORY, Id: id}
		for _, a := range assignments {
			req.Assignments = append(req.Assignments, assignment(a))
		}
		if _, err := entries.SetEntry(ctx, req); err != nil {
			t.Fatal(err)
		}
	}
	check := func(target, assignments string, want ...string) { // ~ is a blank in a value
		t.Helper()
		req := &adminv1.SetSettingsRequest{Target: target}
		for _, a := range strings.Fields(assignments) {
			req.Assignments = append(req.Assignments, assignment(strings.ReplaceAll(a, "~", " ")))
		}
		resp, err := r.policies.SetSettings(ctx, req)
		if err != nil {
			t.Fatalf("set %s %s: %v", target, assignments, err)
		}
		got := resp.GetWarnings()
		if len(got) != len(want) {
			t.Errorf("set %s %s: %q, want %q", target, assignments, got, want)
			return
		}
		for i := range want {
			if !strings.Contains(got[i], want[i]) {
				t.Errorf("set %s %s: %q, want %q", target, assignments, got[i], want[i])
			}
		}
	}
	check("u", "enabled=true lists+=bad services+=tiktok")
	check("u", "categories+=malware,gambling", "category gambling holds no list", "category malware holds no list")
	check("u", "categories-=gambling block_ttl=5s")
	check("policy/p", "safe_browsing=true", "safe_browsing has no effect until one of its categories (")
	check("policy/p", "safe_browsing=false adult=true", "adult has no effect until one of its categories (adult) holds a list: sluicectl category set adult lists+=LIST")
	check("u/d", "schedules+=night=block;daily~22:00-07:00;categories:gambling", "category gambling holds no list")
	entry("phishing", "lists+=bad")
	entry("gambling", "lists+=bad")
	entry("adult", "adult=false")
	check("policy/p", "safe_browsing=true adult=true", "adult has no effect until a category belongs to it")
	check("u", "categories+=gambling schedules+=day=block;daily~7:00-22:00;categories:gambling")

	const custom = "neither block_ipv4 nor block_ipv6 is set"
	check("policy/p", "mode=custom_ip", custom)
	check("policy/p", "block_ipv6=2001:db8::1")
	check("u", "mode=custom_ip") // the policy's addresses count
	check("policy/p", "block_ipv6= mode=null_ip")
	check("u/d", "block_ipv4= block_ttl=7s", custom)
	check("u/d", "block_ipv4=192.0.2.1")
	check("u", "mode=nxdomain")
	check("alone", "mode=custom_ip", custom)
	check("alone", "policy=p block_ipv4=192.0.2.1")

	// What is taken away and is not there was meant to be something else.
	check("policy/p", "unblocks+=*.Games.example rewrites+=*.lan.example=A~192.0.2.7 schedules+=night=block;daily~22:00-07:00;everything")
	check("u", "unblocks+=shop.example@+1h")
	check("u", "unblocks-=shpo.example,SHOP.example", `unblocks: there is no "shpo.example" to take away; there are games.example, shop.example`)
	check("u/d", "unblocks-=*.games.example rewrites-=*.lan.example schedules-=night") // of the policy
	check("u/d", "rewrites-=lan.example schedules-=nihgt own_lists-=kids",
		`rewrites: there is no "lan.example" to take away; there are *.lan.example`, `schedules: there is no "nihgt"`, `own_lists: there is no "kids" to take away; there are none`)
}
