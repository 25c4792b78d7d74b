package bizlogic

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

// A list that grows reaches those who have room for it; the others keep the text they have, which is said, and are
// given the new one as soon as there is room.
func TestOwnListsGrow(t *testing.T) {
	var mu sync.Mutex
	rules := map[string]int{"/grows": 100, "/fixed": 300, "/policy": 300}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprint(w, manyRules(rules[r.URL.Path]))
	}))
	t.Cleanup(srv.Close)
	var log bytes.Buffer
	dir := t.TempDir()
	o := Options{Dir: dir, Log: slog.New(slog.NewTextHandler(&log, nil)), Download: Download{PrivateAddresses: true}, Own: OwnLists{Rules: 500}, Guard: Guard{Min: 1000}}
	r := start(t, o)
	ctx := t.Context()
	grows := srv.URL + "/grows"
	for _, id := range []string{"full", "roomy", "phone"} {
		r.user(id)
	}
	if err := r.device("phone", "kid"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.policies.CreatePolicy(ctx, &adminv1.CreatePolicyRequest{Id: "p"}); err != nil {
		t.Fatal(err)
	}
	for _, a := range [][2]string{
		{"full", "own_lists=grows=" + grows + ",fixed=" + srv.URL + "/fixed"}, {"roomy", "own_lists=grows=" + grows},
		{"phone/kid", "own_lists=grows=" + grows}, {"phone", "own_lists=fixed=" + srv.URL + "/fixed"},
		{"policy/p", "own_lists=grows=" + grows + ",fixed=" + srv.URL + "/policy"},
	} {
		if _, err := r.set(a[0], a[1]); err != nil {
			t.Fatal(err)
		}
	}
	// What each has of the list, by its rules.
	has := func() string {
		t.Helper()
		full, err1 := r.users.GetUser(ctx, &adminv1.GetUserRequest{Id: "full"})
		roomy, err2 := r.users.GetUser(ctx, &adminv1.GetUserRequest{Id: "roomy"})
		phone, err3 := r.users.GetUser(ctx, &adminv1.GetUserRequest{Id: "phone"})
		p, err4 := r.policies.GetPolicy(ctx, &adminv1.GetPolicyRequest{Id: "p"})
		if err1 != nil || err2 != nil || err3 != nil || err4 != nil {
			t.Fatal(err1, err2, err3, err4)
		}
		var out []string
		for _, s := range []*userv1.Settings{full.User.Settings, roomy.User.Settings, phone.User.Devices[0].Settings, p.Policy.Settings} {
			l := s.OwnLists.Values[slices.IndexFunc(s.OwnLists.Values, func(l *userv1.OwnList) bool { return l.Id == "grows" })]
			out = append(out, fmt.Sprint(l.Rules))
			if text := manyRules(int(l.Rules)); !r.svc.hasBlob([]byte(text)) || l.Size != uint64(len(text)) {
				t.Errorf("the text of %d rules is not as the record says: %v", l.Rules, l)
			}
		}
		return strings.Join(out, " ")
	}
	becomes := func(n int) {
		t.Helper()
		mu.Lock()
		rules["/grows"] = n
		mu.Unlock()
		if _, err := r.lists.RefreshList(ctx, &adminv1.RefreshListRequest{Id: grows}); err != nil {
			t.Fatal(err)
		}
	}
	is := func(when, want string, behind uint64) {
		t.Helper()
		l, err := r.lists.GetList(ctx, &adminv1.GetListRequest{Id: grows})
		if got := has(); err != nil || got != want || l.List.UsedBy != 4 || l.List.Behind != behind {
			t.Errorf("%s they have %s, want %s; %d of %d are behind, want %d; %v", when, got, want, l.GetList().GetBehind(), l.GetList().GetUsedBy(), behind, err)
		}
	}
	is("at first", "100 100 100 100", 0)
	becomes(150)
	is("while there is room", "150 150 150 150", 0)
	log.Reset()
	becomes(250)
	is("when it has grown", "150 250 150 150", 3)
	if s := log.String(); strings.Count(s, "level=WARN") != 1 || !strings.Contains(s, "own_lists.rules") || !strings.Contains(s, "[full phone policy/p]") || !strings.Contains(s, "most_rules=500") {
		t.Errorf("the log says %s", s)
	}
	// Nobody is kept from other changes, and the texts stay for ever.
	if _, err := r.set("full", "mode=nxdomain"); err != nil {
		t.Error(err)
	}
	if err := r.svc.forgetBlobs(time.Now().Add(100 * time.Hour)); err != nil {
		t.Error(err)
	}
	r.stop()
	if found, err := Migrate(dir); err != nil || len(found) > 0 {
		t.Errorf("the index is not that of the records: %q, %v", found, err)
	}
	r = start(t, o)
	is("after a restart", "150 250 150 150", 3)
	// Room comes when something else goes, or when the list is less again.
	if _, err := r.set("full", "own_lists-=fixed"); err != nil {
		t.Error(err)
	}
	is("with room for one", "250 250 150 150", 2)
	if _, err := r.set("phone/kid", "own_lists+=more="+srv.URL+"/policy"); err == nil || !strings.Contains(err.Error(), "would have 750 rules with the rules beside them; at most 500 (own_lists.rules)") {
		t.Errorf("more than there may be: %v", err)
	}
	becomes(190)
	is("when it is less", "190 190 190 190", 0)

	// With limits that are less than what there is, things can be taken away, and nothing becomes more.
	r.stop()
	o.Own.Rules = 400
	r = start(t, o)
	if _, err := r.set("phone", "mode=nxdomain"); err != nil {
		t.Errorf("what was too much already: %v", err)
	}
	becomes(200)
	is("when it grows beyond the new limit", "200 200 190 190", 2)
	becomes(180)
	is("when it is less, though still too much", "180 180 180 180", 0)
	if _, err := r.set("phone", "own_lists+=more="+srv.URL+"/fixed"); err == nil {
		t.Error("more of what is too much")
	}
}
