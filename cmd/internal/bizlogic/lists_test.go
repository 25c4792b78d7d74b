package bizlogic

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc/codes"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

// A site serves one text that tests change.
type site struct {
	mu     sync.Mutex
	text   string
	etag   string
	gzip   bool
	status int
	hits   int
	fresh  int // answers with 304
}

func (s *site) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hits++
	switch r.URL.Path {
	case "/moved":
		http.Redirect(w, r, "/list.txt", http.StatusFound)
		return
	case "/loop":
		http.Redirect(w, r, "/loop", http.StatusFound)
		return
	}
	if s.status != 0 {
		w.WriteHeader(s.status)
		return
	}
	if s.etag != "" {
		w.Header().Set("ETag", s.etag)
		if r.Header.Get("If-None-Match") == s.etag {
			s.fresh++
			w.WriteHeader(http.StatusNotModified)
			return
		}
	}
	if s.gzip {
		z := gzip.NewWriter(w)
		z.Write([]byte(s.text))
		z.Close()
		return
	}
	w.Write([]byte(s.text))
}

func (s *site) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// asked is how often it was asked so far. Who has given up waiting may still be counted later.
func (s *site) asked() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hits
}

func (r *rig) addURL(id, url string) (*adminv1.AddListResponse, error) {
	stream, err := r.lists.AddList(r.t.Context())
	if err != nil {
		return nil, err
	}
	if err := stream.Send(&adminv1.AddListRequest{Part: &adminv1.AddListRequest_Header_{Header: &adminv1.AddListRequest_Header{Id: id, Url: url}}}); err != nil {
		r.t.Error(err)
	}
	return stream.CloseAndRecv()
}

func manyRules(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "||ads%d.example^\n", i)
	}
	return b.String()
}

func TestListsFromText(t *testing.T) {
	r := start(t, Options{Compile: picky})
	ctx := t.Context()
	got, err := r.addList("ads", "! remark\n||a.example^\nbad\n||b.example^\n", false)
	if err != nil || got.List.Rules != 2 || got.List.Skipped != 1 || len(got.List.Sha256) != 64 || got.List.Number != 0 || len(got.Complaints) != 1 || got.Revision == 0 {
		t.Fatalf("added: %v, %v", got, err)
	}
	if second, err := r.addList("more", "||c.example^\n", false); err != nil || second.List.Number != 1 {
		t.Errorf("second: %v, %v", second, err)
	}
	_, err = r.addList("ads", "||c.example^\n", false)
	wantError(t, err, codes.AlreadyExists, "")
	for _, text := range []string{"", " \n", "<!DOCTYPE html><html>", "\xef\xbb\xbf\n <html>", "<?xml version=1?>", "a\x00b", strings.Repeat("\xff\xfe", 100), "bad\n", "||a.example^\nblock-all\n"} {
		_, err := r.addList("junk", text, false)
		wantError(t, err, codes.FailedPrecondition, "")
	}
	if l, err := r.lists.ListLists(ctx, nil); err != nil || len(l.Lists) != 2 || l.Lists[0].Id != "ads" {
		t.Errorf("lists: %v, %v", l, err)
	}

	// A shrink is held, the old text stays, and accept takes the new.
	if _, err := r.addList("big", manyRules(1000), false); err != nil {
		t.Fatal(err)
	}
	_, err = r.addList("big", manyRules(100), true)
	wantError(t, err, codes.FailedPrecondition, "")
	if l, err := r.lists.GetList(ctx, &adminv1.GetListRequest{Id: "big"}); err != nil || l.List.Rules != 1000 || l.List.HeldRules != 100 || !strings.Contains(l.List.Error, "shrink") {
		t.Errorf("held: %v, %v", l, err)
	}
	if l, err := r.lists.AcceptList(ctx, &adminv1.AcceptListRequest{Id: "big"}); err != nil || l.List.Rules != 100 || l.List.HeldRules != 0 || l.List.Error != "" {
		t.Errorf("accepted: %v, %v", l, err)
	}
	var through uint64 // resolvers, whose guards see the same loss, hear that it is wanted
	if err := r.svc.db.View(func(tx *bolt.Tx) error {
		if a := acceptedShrink(tx, Catalogue); a.ShrinkAccepted != nil {
			through = a.ThroughRevision
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if l, err := r.lists.GetList(ctx, &adminv1.GetListRequest{Id: "big"}); err != nil || through != l.List.Revision {
		t.Errorf("losses are accepted through revision %d; the list is %v, %v", through, l, err)
	}
	_, err = r.lists.AcceptList(ctx, &adminv1.AcceptListRequest{Id: "big"})
	wantError(t, err, codes.FailedPrecondition, "")

	// A list in use cannot go; the lowest free number is used again.
	if _, err := r.policies.CreatePolicy(ctx, &adminv1.CreatePolicyRequest{Id: "p"}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.set("policy/p", "lists+=ads"); err != nil {
		t.Fatal(err)
	}
	_, err = r.lists.DeleteList(ctx, &adminv1.DeleteListRequest{Id: "ads"})
	wantError(t, err, codes.FailedPrecondition, "")
	if _, err := r.set("policy/p", "lists-=ads"); err != nil {
		t.Fatal(err)
	}
	r.user("u")
	if err := r.device("u", "pc"); err != nil {
		t.Fatal(err)
	}
	for _, use := range [][3]string{
		{"u", "lists+=ads", "lists="},
		{"u", "schedules+=night=block;mon-fri 22:00-07:00;lists:ads", "schedules="},
		{"u/pc", "lists+=ads", "lists="},
	} {
		before := r.svc.Head(Users)
		if _, err := r.set(use[0], use[1]); err != nil {
			t.Fatal(err)
		}
		_, err = r.lists.DeleteList(ctx, &adminv1.DeleteListRequest{Id: "ads"})
		wantError(t, err, codes.FailedPrecondition, "")
		// A use that comes between the look at all users and the writer's turn is seen by the latter.
		if err := r.svc.db.View(func(tx *bolt.Tx) error { return userNamingSince(tx, "list", "ads", before) }); err == nil {
			t.Errorf("%v: not seen among the latest changes", use)
		}
		if _, err := r.set(use[0], use[2]); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.lists.DeleteList(ctx, &adminv1.DeleteListRequest{Id: "ads"}); err != nil {
		t.Fatal(err)
	}
	if l, err := r.addList("next", "||d.example^\n", false); err != nil || l.List.Number != 0 {
		t.Errorf("next: %v, %v", l, err)
	}
	_, err = r.lists.RefreshList(ctx, &adminv1.RefreshListRequest{Id: "next"})
	wantError(t, err, codes.FailedPrecondition, "")
	_, err = r.lists.GetList(ctx, &adminv1.GetListRequest{Id: "ads"})
	wantError(t, err, codes.NotFound, "")
}

func TestListsFromURL(t *testing.T) {
	s := &site{text: manyRules(100), etag: `"one"`}
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	r := start(t, Options{Compile: picky, Download: Download{PrivateAddresses: true, MaxSize: 64 << 10}})
	ctx := t.Context()
	if got, err := r.addURL("web", srv.URL+"/moved"); err != nil || got.List.Rules != 100 || got.List.Refresh != 86400 {
		t.Fatalf("added: %v, %v", got, err)
	}
	refresh := func() (*adminv1.RefreshListResponse, error) {
		return r.lists.RefreshList(ctx, &adminv1.RefreshListRequest{Id: "web"})
	}
	if got, err := refresh(); err != nil || got.Changed || s.fresh != 1 {
		t.Errorf("unchanged: %v, %v, %d", got, err, s.fresh)
	}
	s.set(func() { s.text, s.etag, s.gzip = manyRules(101), `"two"`, true })
	if got, err := refresh(); err != nil || !got.Changed || got.List.Rules != 101 {
		t.Errorf("changed and packed: %v, %v", got, err)
	}
	// Whatever goes wrong, the list stays and says why.
	for what, f := range map[string]func(){
		"html":   func() { s.text = "<html>Please log in</html>" },
		"short":  func() { s.text = manyRules(5) },
		"status": func() { s.text, s.status = manyRules(101), 500 },
		"long":   func() { s.text = manyRules(100_000) },
		"bomb":   func() { s.text, s.gzip = strings.Repeat("||a.example^\n", 1<<20), true },
	} {
		s.set(func() { s.status, s.gzip, s.etag = 0, false, `"`+what+`"` })
		s.set(f)
		_, err := refresh()
		wantError(t, err, codes.FailedPrecondition, "")
		if l, err := r.lists.GetList(ctx, &adminv1.GetListRequest{Id: "web"}); err != nil || l.List.Rules != 101 || l.List.Error == "" {
			t.Errorf("%s: %v, %v", what, l, err)
		}
	}
	s.set(func() { s.status, s.gzip, s.text, s.etag = 0, false, manyRules(102), `"good"` })
	if got, err := refresh(); err != nil || got.List.Rules != 102 || got.List.Error != "" {
		t.Errorf("good again: %v, %v", got, err)
	}
	for _, url := range []string{"ftp://a.example/x", "file:///etc/passwd", "http://", "://"} {
		_, err := r.addURL("other", url)
		wantError(t, err, codes.InvalidArgument, "url")
	}
	_, err := r.addURL("other", srv.URL+"/loop")
	wantError(t, err, codes.FailedPrecondition, "")

	// By default no address inside is connected to.
	closed := start(t, Options{})
	hits := s.hits
	_, err = closed.addURL("web", srv.URL)
	wantError(t, err, codes.FailedPrecondition, "")
	if s.hits != hits || !strings.Contains(fmt.Sprint(err), "not a public address") {
		t.Errorf("%d connections; %v", s.hits-hits, err)
	}
}

func TestPublicAddresses(t *testing.T) {
	for addr, want := range map[string]bool{
		"8.8.8.8": true, "2606:4700::1111": true,
		"127.0.0.1": false, "10.1.2.3": false, "192.168.1.1": false, "172.16.0.1": false, "169.254.169.254": false, "100.64.1.1": false,
		"0.0.0.0": false, "224.0.0.1": false, "255.255.255.255": false, "::": false, "::1": false, "fe80::1": false, "fd00::1": false,
		"::ffff:127.0.0.1": false, "64:ff9b::7f00:1": false, "2002:7f00:1::": false,
		"::127.0.0.1": false, "fec0::1": false, "3fff::1": false, "5f00::1": false, "fe80::1%eth0": false, "::ffff:8.8.8.8": true,
	} {
		if got := public(netip.MustParseAddr(addr)); got != want {
			t.Errorf("public(%s) = %v", addr, got)
		}
	}
}

func TestDueLists(t *testing.T) {
	s := &site{text: manyRules(10)}
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	r := start(t, Options{Download: Download{PrivateAddresses: true}})
	if _, err := r.addURL("web", srv.URL); err != nil {
		t.Fatal(err)
	}
	if _, err := r.addList("text", manyRules(10), false); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for after, want := range map[time.Duration]int{0: 0, 23 * time.Hour: 0, 25 * time.Hour: 1} {
		if due, err := r.svc.dueLists(now.Add(after)); err != nil || len(due) != want {
			t.Errorf("after %v: %v, %v", after, due, err)
		}
	}
	// A failure is retried sooner, but not at once.
	s.set(func() { s.status = 404 })
	_, err := r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: "web"})
	wantError(t, err, codes.FailedPrecondition, "")
	for after, want := range map[time.Duration]int{time.Minute: 0, 11 * time.Minute: 1} {
		if due, err := r.svc.dueLists(now.Add(after)); err != nil || len(due) != want {
			t.Errorf("%v after a failure: %v, %v", after, due, err)
		}
	}
}

func TestForgetting(t *testing.T) {
	r := start(t, Options{})
	r.user("a")
	r.user("b")
	p := newReplica(t, Users)
	p.repair(r, nil)
	gone, err := r.users.DeleteUser(t.Context(), &adminv1.DeleteUserRequest{Id: "a"})
	if err != nil {
		t.Fatal(err)
	}
	r.user("c")
	_, err = r.svc.change(t.Context(), func(v *view) error { return v.forgetTombstones(Users, v.now.Add(time.Hour)) })
	if err != nil {
		t.Fatal(err)
	}
	if _, hello := p.watch(t.Context(), r); hello.Resume.String() != "RESUME_TOO_OLD" || hello.Oldest != gone.Revision {
		t.Errorf("from before a forgotten removal: %v", hello)
	}
	p.revision = gone.Revision
	if _, hello := p.watch(t.Context(), r); hello.Resume.String() != "RESUME_OK" {
		t.Errorf("from the removal on: %v", hello)
	}

	// Texts that nothing names go after a day; others stay.
	if _, err := r.addList("ads", manyRules(3), false); err != nil {
		t.Fatal(err)
	}
	if err := r.svc.putBlob([]byte("nobody's\n")); err != nil {
		t.Fatal(err)
	}
	count := func() (n int) {
		for _, b := range [][]byte{[]byte(manyRules(3)), []byte("nobody's\n")} {
			if r.svc.hasBlob(b) {
				n++
			}
		}
		return n
	}
	for after, want := range map[time.Duration]int{time.Hour: 2} {
		if err := r.svc.forgetBlobs(time.Now().Add(after)); err != nil || count() != want {
			t.Errorf("after %v: %d texts, %v", after, count(), err)
		}
	}
	if err := r.svc.forgetBlobs(time.Now().Add(25 * time.Hour)); err != nil || count() != 1 || !r.svc.hasBlob([]byte(manyRules(3))) {
		t.Errorf("after a day: %d texts, %v", count(), err)
	}
}

// FuzzLooksLikeList must neither panic nor take what holds a zero byte at its beginning.
func FuzzLooksLikeList(f *testing.F) {
	f.Add([]byte("||a.example^\n"))
	f.Add([]byte("<html>"))
	f.Add(bytes.Repeat([]byte("é"), 40_000))
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := looksLikeList(b); err == nil && bytes.IndexByte(b[:min(len(b), 1024)], 0) >= 0 {
			t.Errorf("took %q", b)
		}
	})
}
