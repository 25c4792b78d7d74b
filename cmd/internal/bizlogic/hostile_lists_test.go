package bizlogic

import (
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

// forever writes a text again and again until nobody reads.
func forever(w io.Writer, text string) {
	for {
		if _, err := io.WriteString(w, text); err != nil {
			return
		}
	}
}

// packed is a text in gzip.
func packed(text string) string {
	var b strings.Builder
	z := gzip.NewWriter(&b)
	io.WriteString(z, text)
	z.Close()
	return b.String()
}

// What a server may do to a list that is there, one of the catalogue or of users' own: each is refused with the limit
// named, the list stays, its error and counters say so, and nothing is left behind.
func TestHostileServers(t *testing.T) {
	encoded := func(encoding, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", encoding)
			io.WriteString(w, body)
		}
	}
	zstd, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	var deflated bytes.Buffer
	z := zlib.NewWriter(&deflated)
	io.WriteString(z, manyRules(200))
	z.Close()
	bomb := strings.Repeat("||a.example^\n", 1<<16) // three times what is allowed
	attacks := map[string]struct {
		serve http.HandlerFunc
		says  string
	}{
		"announced too long": {func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Length", "400000000") }, "longer than 262144 bytes (fetch.max_size): 400000000 are announced"},
		"too long":           {func(w http.ResponseWriter, _ *http.Request) { forever(w, manyRules(1000)) }, "longer than 262144 bytes (fetch.max_size)"},
		"a bomb": {func(w http.ResponseWriter, _ *http.Request) {
			z := gzip.NewWriter(w)
			forever(z, strings.Repeat("||a.example^\n", 1000))
		}, "fetch.max_size"},
		"a bomb in the encoding": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			forever(z, strings.Repeat("||a.example^\n", 1000))
		}, "fetch.max_size"},
		"a bomb in a bomb":        {encoded("gzip", packed(packed(bomb))), "fetch.max_size"},
		"a bomb in two":           {func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, packed(packed(bomb))) }, "binary"},
		"packed thrice":           {encoded("gzip", packed(packed(packed(manyRules(200))))), "binary"},
		"packed twice on the way": {encoded("gzip, gzip", packed(packed(manyRules(200)))), `encoding "gzip, gzip"`},
		"twice in two lines": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header()["Content-Encoding"] = []string{"gzip", "gzip"}
			io.WriteString(w, packed(packed(manyRules(200))))
		}, `encoding "gzip, gzip"`},
		"said to be packed": {encoded("gzip", manyRules(200)), "the server says it is packed"},
		"deflated":          {encoded("deflate", deflated.String()), `encoding "deflate"`},
		"zstd":              {encoded("zstd", string(zstd.EncodeAll([]byte(manyRules(200)), nil))), `encoding "zstd"`},
		"zstd, unsaid":      {encoded("", string(zstd.EncodeAll([]byte(manyRules(200)), nil))), "binary"},
		"deflated, unsaid":  {encoded("", deflated.String()), "binary"},
		"packed nothing for ever on the way": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			forever(w, strings.Repeat(packed(""), 100))
		}, "fetch.max_size"},
		"gone":   {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) }, "404"},
		"no way": {func(w http.ResponseWriter, _ *http.Request) { panic(http.ErrAbortHandler) }, "EOF"},
		"half of it": {func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, manyRules(200))
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler) // without the last chunk
		}, "unexpected EOF"},
		"a byte at a time": {func(w http.ResponseWriter, r *http.Request) {
			tick := time.NewTicker(20 * time.Millisecond)
			defer tick.Stop()
			for _, b := range []byte(manyRules(100)) {
				select {
				case <-tick.C:
				case <-r.Context().Done():
					return
				}
				w.Write([]byte{b})
				w.(http.Flusher).Flush()
			}
		}, "it takes longer than 100ms (fetch.timeout)"},
		"packed nothing for ever": {func(w http.ResponseWriter, _ *http.Request) {
			var none bytes.Buffer
			gzip.NewWriter(&none).Close()
			forever(w, strings.Repeat(none.String(), 100))
		}, "fetch.max_size"},
		"packed and cut off": {func(w http.ResponseWriter, _ *http.Request) {
			var b bytes.Buffer
			z := gzip.NewWriter(&b)
			z.Write([]byte(manyRules(200)))
			z.Close()
			w.Write(b.Bytes()[:b.Len()-10])
		}, "unexpected EOF"},
		"one byte and no more": {func(w http.ResponseWriter, r *http.Request) {
			w.Write([]byte("|"))
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}, "it takes longer than 100ms (fetch.timeout)"},
		"no answer": {func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, "it takes longer than 100ms (fetch.timeout)"},
		"shorter than announced": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			io.WriteString(w, "||a.example^\n")
		}, "unexpected EOF"},
		"another encoding": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "br")
			io.WriteString(w, "||a.example^\n")
		}, `encoding "br"`},
		"endless redirects": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, r.URL.Path+"x", http.StatusFound)
		}, "more than 5 redirects"},
		"redirect to a file": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "file:///etc/passwd", http.StatusFound)
		}, `redirect to scheme "file"`},
		"redirect to nowhere":  {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusFound) }, "302"},
		"part of it":           {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusPartialContent) }, "206"},
		"not changed, unasked": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotModified) }, "304"},
		"headers for ever": {func(w http.ResponseWriter, _ *http.Request) {
			for i := range 2000 {
				w.Header().Set(fmt.Sprintf("X-%d", i), strings.Repeat("x", 100))
			}
		}, "header"},
		"a web page":     {func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "\n <!DOCTYPE html><p>Log in") }, "a web page"},
		"JSON":           {func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"error":"no"}`) }, "JSON"},
		"JSON, an array": {func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `[{"a":1}]`) }, "JSON"},
		"a picture":      {func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "\x89PNG\r\n\x1a\n\x00\x00") }, "binary"},
		"nothing":        {func(http.ResponseWriter, *http.Request) {}, "empty"},
		"remarks alone":  {func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "! nothing today\n# nor here\n") }, "none of its lines"},
		"the world":      {func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, manyRules(100)+"/.*/\n") }, "line 101"},
		"one long line":  {func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, strings.Repeat("a", 1<<18-1)) }, "none of its lines"},
		"ten thousand alternatives": {func(w http.ResponseWriter, _ *http.Request) {
			var b strings.Builder
			for i := range 10_000 {
				fmt.Fprintf(&b, "|x%dy%d", i, i*7)
			}
			io.WriteString(w, "/("+b.String()[1:]+")/\n")
		}, "none of its lines"},
	}
	var mu sync.Mutex
	serve := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, manyRules(100)) })
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		f := serve
		mu.Unlock()
		f(w, r)
	}))
	t.Cleanup(srv.Close)
	r := start(t, Options{Compile: Engine, Download: Download{PrivateAddresses: true, MaxSize: 1 << 18}, Own: OwnLists{MaxSize: 1 << 18}})
	if _, err := r.addURL("web", srv.URL); err != nil {
		t.Fatal(err)
	}
	own := srv.URL + "/own"
	r.user("ann")
	if _, err := r.set("ann", "own_lists+=mine="+own); err != nil {
		t.Fatal(err)
	}
	get := func(id string) *adminv1.List {
		t.Helper()
		l, err := r.lists.GetList(t.Context(), &adminv1.GetListRequest{Id: id})
		if err != nil {
			t.Fatal(err)
		}
		return l.List
	}
	before := map[string]*adminv1.List{"web": get("web"), own: get(own)}
	failures := uint32(0)
	for what, a := range attacks {
		mu.Lock()
		serve = a.serve
		mu.Unlock()
		// Only where time is to run out, or a busy machine would decide what is refused first.
		r.svc.downloads.opts.Timeout = time.Minute
		if strings.Contains(a.says, "fetch.timeout") {
			r.svc.downloads.opts.Timeout = 100 * time.Millisecond
		}
		failures++
		for id, was := range before {
			says := a.says
			if id == own {
				says = strings.Replace(says, "fetch.max_size", "own_lists.max_size", 1)
			}
			_, err := r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: id})
			wantError(t, err, codes.FailedPrecondition, "")
			if !strings.Contains(fmt.Sprint(err), says) {
				t.Errorf("%s: %v; want something of %q", what, err, says)
			}
			l := get(id)
			if l.Sha256 != was.Sha256 || l.Rules != was.Rules || l.Fetched != was.Fetched || l.Updated != was.Updated ||
				l.Failures != failures || l.Tried < was.Fetched || !strings.Contains(l.Error, says) {
				t.Errorf("%s: the list became %v", what, l)
			}
		}
	}
	u, err := r.users.GetUser(t.Context(), &adminv1.GetUserRequest{Id: "ann"})
	if l := u.GetUser().GetSettings().GetOwnLists().GetValues(); err != nil || len(l) != 1 || fmt.Sprintf("%x", l[0].Sha256) != before[own].Sha256 || l[0].Rules != 100 {
		t.Errorf("the user has %v, %v", l, err)
	}
	// What nobody has yet does not begin so.
	for what, a := range map[string]http.HandlerFunc{"gone": attacks["gone"].serve, "a web page": attacks["a web page"].serve, "half": attacks["half of it"].serve} {
		mu.Lock()
		serve = a
		mu.Unlock()
		if _, err := r.set("ann", "own_lists+=more="+own+"2"); err == nil || !strings.Contains(err.Error(), "/own2") {
			t.Errorf("%s: %v", what, err)
		}
		_, err := r.lists.GetList(t.Context(), &adminv1.GetListRequest{Id: own + "2"})
		wantError(t, err, codes.NotFound, "")
	}
	// And all is well once the server is.
	mu.Lock()
	serve = func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Encoding", "X-Gzip")
		io.WriteString(w, packed(packed(manyRules(101))))
	}
	mu.Unlock()
	for id := range before {
		if _, err := r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: id}); err != nil {
			t.Error(err)
		}
		if l := get(id); l.Rules != 101 || l.Failures != 0 || l.Error != "" {
			t.Errorf("after all %v", l)
		}
	}
	if left, err := os.ReadDir(filepath.Join(r.svc.opts.Dir, "blobs", incoming)); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// Servers that take their time, however many of users' lists are on them, keep neither the catalogue's lists waiting
// nor those of users on other servers.
func TestSlowServers(t *testing.T) {
	release := make(chan struct{})
	entered := make(chan string, 100)
	slow := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		entered <- r.Host
		<-release
		io.WriteString(w, manyRules(3))
	})
	quick := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, manyRules(3)) }))
	t.Cleanup(quick.Close)
	r := start(t, Options{Download: Download{PrivateAddresses: true}})
	r.user("quick")
	var g errgroup.Group
	waiting := func(user, from string) {
		r.user(user)
		g.Go(func() error {
			_, err := r.set(user, "own_lists+=slow="+from)
			return err
		})
	}
	one := httptest.NewServer(slow)
	t.Cleanup(one.Close)
	for i := range 2 * parallelOwn {
		waiting(fmt.Sprintf("one%d", i), fmt.Sprintf("%s/%d", one.URL, i))
	}
	for range parallelOfHost {
		<-entered
	}
	if _, err := r.set("quick", "own_lists+=quick="+quick.URL); err != nil {
		t.Error(err)
	}
	// With a server of his own for each, somebody has all the turns of users, and none of the catalogue.
	for i := parallelOfHost; i < parallelOwn; i++ {
		another := httptest.NewServer(slow)
		t.Cleanup(another.Close)
		waiting(fmt.Sprintf("more%d", i), another.URL)
		<-entered
	}
	if _, err := r.addURL("web", quick.URL); err != nil {
		t.Error(err)
	}
	if _, err := r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: "web"}); err != nil {
		t.Error(err)
	}
	r.svc.refreshDue(time.Now().Add(26 * time.Hour))
	if l, err := r.lists.GetList(t.Context(), &adminv1.GetListRequest{Id: "web"}); err != nil || l.List.Failures != 0 {
		t.Errorf("%v, %v", l, err)
	}
	select {
	case host := <-entered:
		t.Errorf("%s has had one more turn", host)
	default:
	}
	close(release)
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	if d := r.svc.downloads; len(d.hosts) != 0 || len(d.own) != 0 || len(d.slots) != 0 {
		t.Errorf("turns that were not given back: %v, %d, %d", d.hosts, len(d.own), len(d.slots))
	}
	// Where many lists fail, and take their time to, those that do not come first.
	broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }))
	t.Cleanup(broken.Close)
	if _, err := r.svc.change(t.Context(), func(v *view) error {
		src, err := v.own(one.URL + "/0")
		if err == nil {
			src.Source.Failures = 3
			err = v.auxPut(bucketOwn, one.URL+"/0", src)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	due, err := r.svc.dueOwn(time.Now().Add(26 * time.Hour))
	if err != nil || len(due) != 3*parallelOwn-parallelOfHost+1 || due[len(due)-1] != one.URL+"/0" {
		t.Errorf("%d due, %v; the last is %v", len(due), err, due[len(due)-1])
	}
}

// What a server says of the version of a text is believed as far as it goes, and can spoil nothing.
func TestETags(t *testing.T) {
	var mu sync.Mutex
	text, tag := manyRules(100), ""
	always := false // says "not changed" whatever is asked
	var asked string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		asked = r.Header.Get("If-None-Match")
		w.Header()["Etag"] = []string{tag}
		if always || asked != "" && asked == tag {
			w.WriteHeader(http.StatusNotModified)
			return
		}
		io.WriteString(w, text)
	}))
	t.Cleanup(srv.Close)
	for _, own := range []bool{false, true} {
		r := start(t, Options{Compile: Engine, Download: Download{PrivateAddresses: true}})
		r.user("ann")
		id := "web"
		serve := func(newText, newTag string, is304 bool) {
			mu.Lock()
			defer mu.Unlock()
			text, tag, always = newText, newTag, is304
		}
		serve(manyRules(100), "", false)
		var err error
		if own {
			id = srv.URL + "/own"
			_, err = r.set("ann", "own_lists+=mine="+id)
		} else {
			_, err = r.addURL("web", srv.URL)
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, step := range []struct {
			text, tag string
			is304     bool
			rules     uint32
			changed   bool
			err       string
			asked     string
		}{
			{manyRules(101), `"a"`, false, 101, true, "", ""},
			{manyRules(101), `"a"`, false, 101, false, "", `"a"`},
			{manyRules(101), `W/"b"`, false, 101, false, "", `"a"`}, // a new version that is the old
			{manyRules(102), `W/"b"`, false, 101, false, "", `W/"b"`},
			{"<html>", `"c"`, false, 101, false, "web page", `W/"b"`},
			{manyRules(102), `"c"`, false, 102, true, "", `W/"b"`}, // what was refused is not what is here
			{manyRules(103), `"` + strings.Repeat("x", 300) + `"`, false, 103, true, "", `"c"`},
			{manyRules(104), "", true, 103, false, "304", ""}, // nothing was asked
			{manyRules(104), `"d"`, false, 104, true, "", ""},
			{manyRules(1), `"e"`, false, 104, false, "shrink guard", `"d"`},
			{manyRules(1), `"e"`, false, 104, false, "shrink guard", ""}, // what is held is not what is here
			{manyRules(105), `"f"`, false, 105, true, "", ""},
			{manyRules(106), `"g"`, true, 105, false, "", `"f"`},
		} {
			serve(step.text, step.tag, step.is304)
			got, err := r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: id})
			if (err != nil) != (step.err != "") || err != nil && !strings.Contains(err.Error(), step.err) || got.GetChanged() != step.changed || asked != step.asked {
				t.Errorf("%s, %.40q, %.20q: %v, %v; asked with %q, want %q", id, step.text, step.tag, got, err, asked, step.asked)
			}
			l, err := r.lists.GetList(t.Context(), &adminv1.GetListRequest{Id: id})
			if err != nil || l.List.Rules != step.rules || (l.List.Error != "") != (step.err != "") {
				t.Errorf("%s, %.40q, %.20q: %v, %v", id, step.text, step.tag, l, err)
			}
		}
	}
}

// The address is judged where a connection is made: redirects and names that change their mind lead nowhere.
func TestNoWayInside(t *testing.T) {
	inside := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		t.Error("the inside was reached")
	}))
	t.Cleanup(inside.Close)
	outside := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/redirect" {
			http.Redirect(w, r, strings.Replace(inside.URL, "127.0.0.1", "127.0.0.2", 1), http.StatusFound)
			return
		}
		if r.Host != "" && strings.HasPrefix(r.URL.Path, "/auth") {
			http.Redirect(w, r, "http://other.example:"+strings.Split(r.Host, ":")[1]+"/shown", http.StatusFound)
			return
		}
		if r.URL.Path == "/shown" && r.Header.Get("Authorization") != "" {
			t.Error("the password went to another host")
		}
		io.WriteString(w, manyRules(3))
	}))
	t.Cleanup(outside.Close)
	_, port, _ := strings.Cut(strings.TrimPrefix(outside.URL, "http://"), ":")
	var mu sync.Mutex
	asked := 0
	r := start(t, Options{Download: Download{
		public: func(a netip.Addr) bool { return a == netip.MustParseAddr("127.0.0.1") },
		Resolve: func(_ context.Context, host string) ([]netip.Addr, error) {
			mu.Lock()
			defer mu.Unlock()
			if asked++; host == "turns.example" && asked > 1 {
				return []netip.Addr{netip.MustParseAddr("127.0.0.2"), netip.MustParseAddr("::1")}, nil
			}
			return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
		},
	}})
	if _, err := r.addURL("turns", "http://turns.example:"+port+"/"); err != nil {
		t.Fatal(err)
	}
	r.svc.downloads.client.CloseIdleConnections()
	_, err := r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: "turns"})
	wantError(t, err, codes.FailedPrecondition, "")
	if !strings.Contains(fmt.Sprint(err), "not a public address") {
		t.Error(err)
	}
	_, err = r.addURL("away", outside.URL+"/redirect")
	wantError(t, err, codes.FailedPrecondition, "")
	if !strings.Contains(fmt.Sprint(err), "127.0.0.2") || !strings.Contains(fmt.Sprint(err), "fetch.private_addresses") {
		t.Error(err)
	}
	if _, err := r.addURL("auth", "http://me:hunter2@a.example:"+port+"/auth"); err != nil {
		t.Error(err)
	}
}

// A password is used, and shown to nobody: not in answers, errors, logs or exports.
func TestListPassword(t *testing.T) {
	var broken atomic.Bool
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, password, _ := r.BasicAuth()
		if broken.Load() || user != "me" || password != "hunter2" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		io.WriteString(w, manyRules(3))
	}))
	t.Cleanup(srv.Close)
	var log bytes.Buffer
	dir := t.TempDir()
	r := start(t, Options{Dir: dir, Log: slog.New(slog.NewTextHandler(&log, nil)), Download: Download{PrivateAddresses: true}})
	from := strings.Replace(srv.URL, "http://", "http://me:hunter2@", 1)
	var seen strings.Builder
	note := func(v any, err error) { fmt.Fprintln(&seen, v, err) }
	got, err := r.addURL("web", from)
	if err != nil || !strings.Contains(got.List.Url, "me:xxxxx@") {
		t.Fatalf("%v, %v", got, err)
	}
	note(got, nil)
	note(r.lists.ListLists(t.Context(), nil))
	lines := exportAll(t, r, "")
	note(lines, nil)
	// What was exported can be imported: the password is still known, or asked for.
	if _, err := r.data.Import(t.Context(), &adminv1.ImportRequest{Id: "again", FirstLine: 1, Lines: lines}); err != nil {
		t.Error(err)
	}
	if got, err := r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: "web"}); err != nil {
		t.Errorf("after an import: %v, %v", got, err)
	}
	other := start(t, Options{Download: Download{PrivateAddresses: true}})
	_, err = other.data.Import(t.Context(), &adminv1.ImportRequest{Id: "again", FirstLine: 1, Lines: lines})
	wantError(t, err, codes.InvalidArgument, "")
	note(nil, err)

	broken.Store(true)
	note(r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: "web"}))
	note(r.lists.GetList(t.Context(), &adminv1.GetListRequest{Id: "web"}))
	r.svc.refreshDue(time.Now().Add(48 * time.Hour))
	for _, bad := range []string{"http://me:hunter2@/", "ftp://me:hunter2@a.example/", "http://me:hunter2@a.example:x/", "http://me:hun/ter2@a.example/", "http://me:hunter2%zz@a.example/", "http://me:hunter2@127.0.0.1:1/x"} {
		_, err := r.addURL("bad", bad)
		if err == nil {
			t.Errorf("%s was taken", bad)
		}
		note(nil, err)
	}
	if s := seen.String() + log.String(); strings.Contains(s, "hunter2") || strings.Contains(s, "ter2") {
		t.Errorf("the password is shown: %s", s)
	}
}

func TestListsFromFiles(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(dir, "list.txt"), manyRules(10))
	write(filepath.Join(outside, "list.txt"), manyRules(10))
	var z bytes.Buffer
	g := gzip.NewWriter(&z)
	g.Write([]byte(manyRules(20)))
	g.Close()
	write(filepath.Join(dir, "list.gz"), z.String())
	if err := syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, to := range map[string]string{"away": filepath.Join(outside, "list.txt"), "zero": "/dev/zero", "near": "list.txt"} {
		if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	r := start(t, Options{Download: Download{Files: []string{dir}}})
	for name, rules := range map[string]uint32{"list.txt": 10, "list.gz": 20, "near": 10} {
		if got, err := r.addURL("ok", "file://"+filepath.Join(dir, name)); err != nil || got.List.Rules != rules {
			t.Errorf("%s: %v, %v", name, got, err)
		}
		if _, err := r.lists.DeleteList(t.Context(), &adminv1.DeleteListRequest{Id: "ok"}); err != nil {
			t.Error(err)
		}
	}
	for name, says := range map[string]string{
		"file://" + filepath.Join(dir, "pipe"):                              "not a regular file",
		"file://" + dir:                                                     "not a regular file",
		"file://" + filepath.Join(dir, "zero"):                              "escapes",
		"file://" + filepath.Join(dir, "away"):                              "escapes",
		"file://" + filepath.Join(dir, "missing"):                           "no such file",
		"file://" + filepath.Join(outside, "list.txt"):                      "fetch.files",
		"file://" + dir + "/../" + filepath.Base(outside) + "/list.txt":     "fetch.files",
		"file://elsewhere/etc/passwd":                                       "file:///PATH",
		"file:etc/passwd":                                                   "file:///PATH",
		"file://" + dir + "/%2e%2e/" + filepath.Base(outside) + "/list.txt": "fetch.files",
		"FILE://" + filepath.Join(outside, "list.txt"):                      "fetch.files",
		"gopher://a.example/":                                               "no http, https or file",
		"http:a.example/x":                                                  "names no host",
		"http://" + strings.Repeat("a", maxURL):                             "at most",
	} {
		_, err := r.addURL("bad", name)
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v; want something of %q", name, err, says)
		}
	}
	if _, err := r.addURL("list", "file://"+filepath.Join(dir, "list.txt")); err != nil {
		t.Fatal(err)
	}
	refresh := func() *adminv1.RefreshListResponse {
		t.Helper()
		got, err := r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: "list"})
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	if got := refresh(); got.Changed {
		t.Errorf("changed by itself: %v", got)
	}
	write(filepath.Join(dir, "list.txt"), manyRules(11))
	if got := refresh(); !got.Changed || got.List.Rules != 11 {
		t.Errorf("not changed: %v", got)
	}
	_, err := start(t, Options{}).addURL("list", "file://"+filepath.Join(dir, "list.txt"))
	wantError(t, err, codes.InvalidArgument, "url")
}

// A meddler does something when it is asked whether it has ended.
type meddler struct {
	context.Context
	does func()
}

func (m meddler) Err() error {
	m.does()
	return m.Context.Err()
}

// A file that somebody is still writing is not taken half written.
func TestFileChangedWhileRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "list.txt")
	if err := os.WriteFile(path, []byte(manyRules(100)), 0o600); err != nil {
		t.Fatal(err)
	}
	r := start(t, Options{Download: Download{Files: []string{filepath.Dir(path)}}})
	u := &url.URL{Scheme: "file", Path: path}
	w := r.svc.wantedList(u.String())
	_, err := r.svc.fetchFile(meddler{t.Context(), sync.OnceFunc(func() {
		if err := os.WriteFile(path, []byte(manyRules(200)), 0o600); err != nil {
			t.Error(err)
		}
	})}, u, w)
	if err == nil || !strings.Contains(err.Error(), "changed while it was read") {
		t.Error(err)
	}
	got, err := r.svc.fetchFile(t.Context(), u, w)
	if err != nil || got.text.size != int64(len(manyRules(200))) {
		t.Errorf("%v, %v", got, err)
	}
	got.text.drop()
	if left, err := os.ReadDir(filepath.Join(r.svc.opts.Dir, "blobs", incoming)); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// A line of 10 MB costs a list that line.
func TestLongLine(t *testing.T) {
	const long = 10 << 20
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, "||a.example^\n||"+strings.Repeat("b", long)+".example^\n||c.example^\n")
	}))
	t.Cleanup(srv.Close)
	r := start(t, Options{Compile: Engine, Download: Download{PrivateAddresses: true}})
	r.user("ann")
	if _, err := r.set("ann", "own_lists+=mine="+srv.URL); err != nil {
		t.Fatal(err)
	}
	if l, err := r.lists.GetList(t.Context(), &adminv1.GetListRequest{Id: srv.URL}); err != nil || l.List.Rules != 2 || l.List.Skipped != 1 || l.List.Size < long {
		t.Errorf("%v, %v", l, err)
	}
	got, err := r.addURL("web", srv.URL)
	if err != nil || got.List.Rules != 2 || len(got.Complaints) != 1 || got.Complaints[0].Line != 2 || !strings.Contains(got.Complaints[0].What, "long") {
		t.Errorf("%v, %v", got.GetComplaints(), err)
	}
}

// The first title names a list that has no name; other remarks are no news.
func TestListTitleAndRemarks(t *testing.T) {
	s := &site{text: "! Title:  My Title  \n! Title: Bad, Ignored Title\n||a.example^\n"}
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	r := start(t, Options{Compile: Engine, Download: Download{PrivateAddresses: true}})
	got, err := r.addURL("web", srv.URL)
	if err != nil || got.List.Name != "My Title" || got.List.Rules != 1 {
		t.Fatalf("%v, %v", got, err)
	}
	before := r.svc.Head(Catalogue)
	for _, c := range []struct {
		text    string
		changed bool
	}{
		{"\xef\xbb\xbf! Title: Other\r\n\r\n! of today\r\n   \r\n  ||a.example^\r\n# end", false},
		{"||a.example^", false},
		{"||b.example^", true},
	} {
		s.set(func() { s.text = c.text })
		again, err := r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: "web"})
		if err != nil || again.Changed != c.changed {
			t.Errorf("%q: %v, %v", c.text, again, err)
		}
		if !c.changed && r.svc.Head(Catalogue) != before {
			t.Errorf("%q: a commit for nothing", c.text)
		}
	}
}

// A list that loses a little each time is held as one that loses all at once.
func TestListErosion(t *testing.T) {
	r := start(t, Options{})
	if _, err := r.addList("ads", manyRules(1000), false); err != nil {
		t.Fatal(err)
	}
	if _, err := r.addList("ads", manyRules(920), true); err != nil {
		t.Error(err)
	}
	_, err := r.addList("ads", manyRules(850), true)
	wantError(t, err, codes.FailedPrecondition, "")
	if _, err := r.lists.AcceptList(t.Context(), &adminv1.AcceptListRequest{Id: "ads"}); err != nil {
		t.Error(err)
	}
	if l, err := r.addList("ads", manyRules(800), true); err != nil || l.List.Rules != 800 {
		t.Errorf("after an accept: %v, %v", l, err)
	}
}

// What was good stays through restarts, and is fetched anew where the disk has lost it.
func TestLastGoodCopy(t *testing.T) {
	s := &site{text: manyRules(100), etag: `"one"`}
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	dir := t.TempDir()
	r := start(t, Options{Dir: dir, Download: Download{PrivateAddresses: true}})
	got, err := r.addURL("web", srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "blobs", incoming, ".text-1"), []byte("half a list"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.set(func() { s.status = 500 })
	r.svc.refreshDue(time.Now().Add(26 * time.Hour))
	r.stop()
	r = start(t, Options{Dir: dir, Download: Download{PrivateAddresses: true}})
	if err := r.svc.forgetBlobs(time.Now().Add(1000 * time.Hour)); err != nil {
		t.Fatal(err)
	}
	if l, err := r.lists.GetList(t.Context(), &adminv1.GetListRequest{Id: "web"}); err != nil || l.List.Sha256 != got.List.Sha256 || l.List.Failures != 1 || !r.svc.hasBlob([]byte(manyRules(100))) {
		t.Errorf("%v, %v", l, err)
	}
	if left, _ := os.ReadDir(filepath.Join(dir, "blobs", incoming)); len(left) > 0 {
		t.Errorf("half a list is still there: %v", left)
	}
	s.set(func() { s.status = 0 })
	if err := os.RemoveAll(filepath.Join(dir, "blobs")); err != nil {
		t.Fatal(err)
	}
	if _, err := r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: "web"}); err != nil || !r.svc.hasBlob([]byte(manyRules(100))) {
		t.Errorf("not fetched anew: %v", err)
	}
}

func TestOwnLists(t *testing.T) {
	s := &site{text: manyRules(100), etag: `"one"`}
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	dir := t.TempDir()
	o := Options{Dir: dir, Download: Download{PrivateAddresses: true}, Own: OwnLists{Number: 2, MaxSize: 20_000, Rules: 700}}
	r := start(t, o)
	ctx := t.Context()
	for _, id := range []string{"a", "b"} {
		r.user(id)
	}
	if err := r.device("b", "pc"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.policies.CreatePolicy(ctx, &adminv1.CreatePolicyRequest{Id: "p"}); err != nil {
		t.Fatal(err)
	}
	for _, target := range []string{"a", "b/pc", "policy/p"} {
		if _, err := r.set(target, "own_lists+=kids="+srv.URL); err != nil {
			t.Fatal(target, err)
		}
	}
	if s.hits != 1 {
		t.Errorf("fetched %d times for three", s.hits)
	}
	held := func() (sums []string) {
		a, err1 := r.users.GetUser(ctx, &adminv1.GetUserRequest{Id: "a"})
		b, err2 := r.users.GetUser(ctx, &adminv1.GetUserRequest{Id: "b"})
		p, err3 := r.policies.GetPolicy(ctx, &adminv1.GetPolicyRequest{Id: "p"})
		if err1 != nil || err2 != nil || err3 != nil {
			t.Fatal(err1, err2, err3)
		}
		for _, l := range append(append(a.User.Settings.OwnLists.Values, b.User.Devices[0].Settings.OwnLists.Values...), p.Policy.Settings.OwnLists.Values...) {
			sums = append(sums, fmt.Sprintf("%x %d %d", l.Sha256[:4], l.Size, l.Rules))
		}
		return sums
	}
	first := held()
	if len(first) != 3 || first[0] != first[1] || first[0] != first[2] || !strings.HasSuffix(first[0], " 100") {
		t.Fatalf("%q", first)
	}
	show := func() *adminv1.List {
		t.Helper()
		resp, err := r.lists.ListLists(ctx, &adminv1.ListListsRequest{Own: true})
		if err != nil || len(resp.Lists) != 1 {
			t.Fatalf("%v, %v", resp, err)
		}
		return resp.Lists[0]
	}
	if l := show(); l.UsedBy != 3 || l.Rules != 100 || l.Id != srv.URL {
		t.Errorf("%v", l)
	}

	// A refresh reaches all who name it, one that would shrink none till it is accepted.
	s.set(func() { s.text, s.etag = manyRules(110), `"two"` })
	r.svc.refreshOwnDue(time.Now().Add(26 * time.Hour))
	if got := held(); got[0] == first[0] || got[0] != got[1] || got[0] != got[2] || !strings.HasSuffix(got[0], " 110") {
		t.Errorf("after a refresh %q", got)
	}
	s.set(func() { s.text, s.etag = manyRules(5), `"three"` })
	_, err := r.lists.RefreshList(ctx, &adminv1.RefreshListRequest{Id: srv.URL})
	wantError(t, err, codes.FailedPrecondition, "")
	if got := held(); !strings.HasSuffix(got[1], " 110") {
		t.Errorf("shrunk: %q", got)
	}
	if l := show(); l.HeldRules != 5 || l.Failures != 1 || l.Error == "" {
		t.Errorf("%v", l)
	}
	if _, err := r.lists.AcceptList(ctx, &adminv1.AcceptListRequest{Id: srv.URL}); err != nil {
		t.Error(err)
	}
	if got := held(); !strings.HasSuffix(got[2], " 5") {
		t.Errorf("after an accept %q", got)
	}

	// Limits, and what is no list for users.
	s.set(func() { s.text, s.etag = manyRules(600), `"four"` })
	for assignment, says := range map[string]string{
		"own_lists+=big=" + srv.URL + "/big":                 "",
		"own_lists+=x=file:///etc/passwd":                    "file of the service",
		"own_lists+=x=http://me:hunter2@a.example/":          "holds a password",
		"own_lists+=x=http://127.0.0.1:1/":                   "refused",
		"own_lists+=x=" + strings.Repeat("0", 64):            "upload it first",
		"own_lists+=x=nonsense":                              "neither a URL nor a SHA-256",
		"own_lists+=x=" + srv.URL + "/1,y=" + srv.URL + "/2": "own_lists.number",
		"own_lists+=Not-An-Id=" + srv.URL:                    "own_lists",
	} {
		_, err := r.set("a", assignment)
		if (err != nil) != (says != "") || err != nil && (!strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "hunter2")) {
			t.Errorf("%s: %v; want something of %q", assignment, err, says)
		}
	}
	if _, err := r.set("a", "own_lists=two="+srv.URL+"/1,three="+srv.URL+"/2"); err == nil || !strings.Contains(err.Error(), "own_lists.rules") {
		t.Errorf("1200 rules: %v", err)
	}
	s.set(func() { s.text, s.etag = strings.Repeat("||a.example^\n", 3000), `"five"` })
	if _, err := r.set("b", "own_lists+=long="+srv.URL+"/long"); err == nil || !strings.Contains(err.Error(), "own_lists.max_size") {
		t.Errorf("too long: %v", err)
	}

	// A service that ends while a text is spread goes on afterwards.
	if _, err := r.svc.change(ctx, func(v *view) error {
		src, err := v.own(srv.URL)
		if err != nil {
			return err
		}
		src.Spreading, src.Rules = true, 77
		return v.auxPut(bucketOwn, srv.URL, src)
	}); err != nil {
		t.Fatal(err)
	}
	r.stop()
	r = start(t, o)
	r.svc.refreshOwnDue(time.Now())
	if got := held(); len(got) != 4 || !strings.HasSuffix(got[3], " 77") {
		t.Errorf("after a restart %q", got)
	}
	r.stop()
	if found, err := Migrate(dir); err != nil || len(found) > 0 {
		t.Errorf("the index is not that of the records: %q, %v", found, err)
	}
	r = start(t, o)

	// What nobody names goes.
	for target, change := range map[string]string{"a": "own_lists=", "b/pc": "own_lists-=kids", "policy/p": "own_lists="} {
		if _, err := r.set(target, change); err != nil {
			t.Error(err)
		}
	}
	later := time.Now().Add(27 * time.Hour)
	if _, err := r.svc.dueOwn(later); err != nil {
		t.Error(err)
	}
	if err := r.svc.forgetBlobs(later); err != nil {
		t.Error(err)
	}
	err = r.svc.db.View(func(tx *bolt.Tx) error {
		for _, b := range [][]byte{bucketOwn, bucketOwnUses} {
			if n := tx.Bucket(bucketService).Bucket(b).Stats().KeyN; n != 0 {
				t.Errorf("%d left in %s", n, b)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if r.svc.hasBlob([]byte(manyRules(5))) {
		t.Error("the text is still there")
	}
}

var long = flag.Bool("long", false, "run the long tests too")

// TestListOf400MB moves lists around the limits for real: what is read of one that is too long, or has too many rules,
// ends there, and none is ever in memory as a whole.
func TestListOf400MB(t *testing.T) {
	if !*long {
		t.Skip("a long test: run with -long")
	}
	var size, sent atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		sent.Store(0)
		rest := size.Load()
		var b []byte
		for n := 0; rest > 0; n++ {
			if b = fmt.Appendf(b, "||ads%d.example^\n", n); len(b) < 1<<16 && int64(len(b)) < rest {
				continue
			}
			b = b[:min(int64(len(b)), rest)]
			n, err := w.Write(b)
			sent.Add(int64(n))
			if err != nil {
				return
			}
			rest -= int64(n)
			b = b[:0]
		}
	}))
	t.Cleanup(srv.Close)
	r := start(t, Options{Compile: Engine, Download: Download{PrivateAddresses: true}})
	size.Store(20)
	if _, err := r.addURL("web", srv.URL); err != nil {
		t.Fatal(err)
	}
	peak := func(what string) {
		b, err := os.ReadFile("/proc/self/status")
		if err != nil {
			t.Skip(err)
		}
		_, after, _ := strings.Cut(string(b), "VmHWM:")
		var kb int
		fmt.Sscan(after, &kb)
		t.Logf("%s: %d MB sent, %d MB at most in memory", what, sent.Load()>>20, kb>>10)
		if kb > 200<<10 {
			t.Errorf("%s: %d KB of memory", what, kb)
		}
	}
	size.Store(400 << 20)
	if _, err := r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: "web"}); !strings.Contains(fmt.Sprint(err), "longer than 314572800 bytes (fetch.max_size)") {
		t.Errorf("400 MiB: %v", err)
	}
	if n := sent.Load(); n > 320<<20 {
		t.Errorf("%d bytes were sent", n)
	}
	peak("400 MiB")
	size.Store(300 << 20)
	if _, err := r.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: "web"}); !strings.Contains(fmt.Sprint(err), "more rules than can be served; 5000000 were read") {
		t.Errorf("300 MiB: %v", err)
	}
	peak("300 MiB")
}
