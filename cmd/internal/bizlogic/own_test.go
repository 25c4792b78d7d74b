package bizlogic

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sync/errgroup"

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

// When the shrink guard begins to hold a list's text, that is said once, with figures and what to do; then again when
// it begins again.
func TestShrinkIsSaidOnce(t *testing.T) {
	s := &site{text: manyRules(1000)}
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	var log bytes.Buffer
	r := start(t, Options{Log: slog.New(slog.NewTextHandler(&log, nil)), Download: Download{PrivateAddresses: true}})
	own := srv.URL + "/own"
	r.user("ann")
	if _, err := r.addURL("web", srv.URL); err != nil {
		t.Fatal(err)
	}
	if _, err := r.set("ann", "own_lists+=mine="+own); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	refresh := func() string {
		t.Helper()
		log.Reset()
		now = now.Add(26 * time.Hour)
		r.svc.refreshDue(now)
		r.svc.refreshOwnDue(now)
		return log.String()
	}
	for _, rules := range []int{10, 11, 11, 0} {
		s.set(func() { s.text, s.status = manyRules(rules), 0 })
		if rules == 0 {
			s.set(func() { s.status = 500 }) // what is held stays held
		}
		said := refresh()
		for id, what := range map[string]string{"web": "web", own: "url=" + own} {
			want := 0
			if rules == 10 || rules == 0 {
				want = 1
			}
			lines := 0
			for line := range strings.Lines(said) {
				if strings.Contains(line, "list="+id+" ") || strings.Contains(line, what+" ") {
					lines++
					for _, part := range []string{"level=WARN", "rules=10 most=1000 within=24h0m0s", `if_it_is_meant="sluicectl list accept ` + id + `"`} {
						if rules == 10 && !strings.Contains(line, part) {
							t.Errorf("nothing of %q in %s", part, line)
						}
					}
				}
			}
			if lines != want {
				t.Errorf("a text of %d rules: %d lines about %s, want %d:\n%s", rules, lines, id, want, said)
			}
		}
	}
	for _, id := range []string{"web", own} {
		if l, err := r.lists.GetList(t.Context(), &adminv1.GetListRequest{Id: id}); err != nil || l.List.HeldRules != 11 || l.List.Rules != 1000 {
			t.Errorf("%v, %v", l, err)
		}
		if l, err := r.lists.AcceptList(t.Context(), &adminv1.AcceptListRequest{Id: id}); err != nil || l.List.HeldRules != 0 || l.List.Rules != 11 {
			t.Errorf("accepted: %v, %v", l, err)
		}
	}
	s.set(func() { s.text, s.status = manyRules(1000), 0 })
	if said := refresh(); said != "" {
		t.Errorf("of good texts: %s", said)
	}
	s.set(func() { s.text = manyRules(12) })
	if said := refresh(); strings.Count(said, "the shrink guard holds") != 2 {
		t.Errorf("when it begins again: %s", said)
	}
}

// Texts of users that take long to compile keep no list of the catalogue waiting.
func TestSlowTexts(t *testing.T) {
	srv := httptest.NewServer(&site{text: manyRules(3)})
	t.Cleanup(srv.Close)
	compiling, goOn := make(chan string, 10), make(chan struct{})
	r := start(t, Options{Download: Download{PrivateAddresses: true}, Compile: func(name string, text io.Reader) (Report, error) {
		if isURL(name) {
			compiling <- name
			<-goOn
		}
		return countLines(name, text)
	}})
	var g errgroup.Group
	for i := range 4 {
		user := fmt.Sprintf("user-%d", i)
		r.user(user)
		g.Go(func() error {
			_, err := r.set(user, fmt.Sprintf("own_lists+=slow=%s/%d", srv.URL, i))
			return err
		})
	}
	<-compiling
	if _, err := r.addList("text", manyRules(3), false); err != nil {
		t.Error(err)
	}
	if _, err := r.addURL("web", srv.URL); err != nil {
		t.Error(err)
	}
	if n := len(compiling); n != 0 {
		t.Errorf("%d more of users at once", n)
	}
	close(goOn)
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

// While nothing can be stored, lists are looked at ever less often; then each minute again.
func TestRefreshLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		s := &Service{ctx: ctx, log: slog.New(slog.DiscardHandler)}
		began := time.Now()
		var mu sync.Mutex
		var at []int // minutes
		full := true
		done := make(chan struct{})
		go func() {
			defer close(done)
			s.refreshLoop(func(time.Time) error {
				mu.Lock()
				defer mu.Unlock()
				if at = append(at, int(time.Since(began)/time.Minute)); full {
					return storing(syscall.ENOSPC)
				}
				return nil
			})
		}()
		time.Sleep(200*time.Minute + time.Second)
		synctest.Wait()
		if want := []int{1, 3, 7, 15, 31, 63, 123, 183}; !slices.Equal(at, want) {
			t.Errorf("with a full disk after %v minutes, want %v", at, want)
		}
		mu.Lock()
		at, full = nil, false
		mu.Unlock()
		time.Sleep(50 * time.Minute)
		synctest.Wait()
		if want := []int{243, 244, 245, 246, 247, 248, 249, 250}; !slices.Equal(at, want) {
			t.Errorf("with room after %v minutes, want %v", at, want)
		}
		cancel()
		<-done
	})
}
