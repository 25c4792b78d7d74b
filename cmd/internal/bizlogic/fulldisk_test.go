//go:build unix

package bizlogic

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-dns/sluice/internal/fulldisk"
	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
)

// On a full disk the service starts and serves what it has, refuses changes with a message that says what to do, blames
// no list, asks no list's server again and again, and goes on by itself when there is room. It runs in a process of its
// own, because the limit on the size of files that stands for the full disk is the process's.
func TestFullDisk(t *testing.T) {
	if fulldisk.Alone(t) {
		return
	}
	room := func(bytes uint64) { fulldisk.Room(t, bytes) }
	s := &site{text: manyRules(100)}
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	var log bytes.Buffer
	dir := t.TempDir()
	o := Options{Dir: dir, Log: slog.New(slog.NewTextHandler(&log, nil)), Download: Download{PrivateAddresses: true}}
	r := start(t, o)
	own := srv.URL + "/own"
	r.user("ann")
	const lists = 3 * parallelFetches
	for i := range lists {
		if _, err := r.addURL(fmt.Sprintf("web%d", i), fmt.Sprintf("%s/%d", srv.URL, i)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.set("ann", "own_lists+=mine="+own); err != nil {
		t.Fatal(err)
	}
	lineage := r.svc.db.lineage

	full := func() {
		t.Helper()
		s.set(func() { s.text = manyRules(101) })
		for what, err := range map[string]error{
			"a user":      errOf(r.users.CreateUser(t.Context(), &adminv1.CreateUserRequest{Id: "bob"})),
			"a list":      errOf(r.addList("text", manyRules(1000), false)),
			"a URL":       errOf(r.addURL("text", srv.URL)),
			"a refresh":   errOf(r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: "web0"})),
			"an own list": errOf(r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: own})),
			"a new one":   errOf(r.set("ann", "own_lists+=more="+own+"2")),
			"long rules":  errOf(r.policies.SetRules(t.Context(), &adminv1.SetRulesRequest{Target: "ann", Text: []byte(manyRules(5000))})),
		} {
			if status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "file too large; nothing was changed; make room there and try again") {
				t.Errorf("%s: %v", what, err)
			}
		}
		before := s.asked()
		later := time.Now().Add(48 * time.Hour)
		for _, err := range []error{r.svc.refreshDue(later), r.svc.refreshOwnDue(later)} {
			if !ours(err) {
				t.Errorf("refreshing what is due: %v", err)
			}
		}
		if asked := s.asked() - before; asked > parallelFetches+1 {
			t.Errorf("%d servers were asked", asked)
		}
		for _, id := range []string{"web0", own} {
			l, err := r.lists.GetList(t.Context(), &adminv1.GetListRequest{Id: id})
			if err != nil || l.List.Rules != 100 || l.List.Failures != 0 || l.List.Error != "" {
				t.Errorf("%s: %v, %v", id, l, err)
			}
		}
		if left, err := os.ReadDir(dir + "/blobs/" + incoming); err != nil || len(left) > 0 {
			t.Errorf("left behind: %v, %v", left, err)
		}
		// Resolvers get what there is.
		p := newReplica(t, Users)
		p.repair(r, nil)
		if _, hello := p.watch(t.Context(), r); hello.Resume != syncv1.Resume_RESUME_OK {
			t.Errorf("%v", hello)
		}
	}
	again := func() {
		t.Helper()
		if err := errors.Join(errOf(r.users.CreateUser(t.Context(), &adminv1.CreateUserRequest{Id: "bob"})),
			errOf(r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: "web0"})), errOf(r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: own}))); err != nil {
			t.Error(err)
		}
		for _, id := range []string{"web0", own} {
			if l, err := r.lists.GetList(t.Context(), &adminv1.GetListRequest{Id: id}); err != nil || l.List.Rules != 101 {
				t.Errorf("%s: %v, %v", id, l, err)
			}
		}
	}
	restart := func(bytes uint64) {
		t.Helper()
		r.stop()
		room(bytes)
		log.Reset()
		r = start(t, o)
		if r.svc.db.lineage != lineage {
			t.Errorf("another lineage: %s", log.String())
		}
	}

	// Full when it starts, and once more without having been able to write anything.
	for range 2 {
		restart(0)
		if !strings.Contains(log.String(), "what is in it is served, and changes are refused until it can") {
			t.Errorf("it says %s", log.String())
		}
		full()
	}
	log.Reset()
	room(1 << 40)
	again()
	if n := strings.Count(log.String(), "the store can be written again"); n != 1 {
		t.Errorf("said %d times: %s", n, log.String())
	}
	restart(1 << 40)
	if log.Len() > 0 {
		t.Errorf("of a good start: %s", log.String())
	}

	// Full while it runs.
	s.set(func() { s.text = manyRules(100) })
	for _, id := range []string{"web0", own} {
		if _, err := r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: id}); err != nil {
			t.Error(err)
		}
	}
	if _, err := r.users.DeleteUser(t.Context(), &adminv1.DeleteUserRequest{Id: "bob"}); err != nil {
		t.Error(err)
	}
	room(0)
	full()
	room(1 << 40)
	again()
	restart(1 << 40)
}

func errOf[T any](_ T, err error) error { return err }
