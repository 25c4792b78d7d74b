package replay

import (
	"compress/gzip"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// Lists come from a web server by way of the service to two resolvers: one of the catalogue, one of a category and
// one of users' own. They change, turn into a web page, and stay when the service and both resolvers are killed and
// the resolvers come back alone.
func TestListsFromTheWeb(t *testing.T) {
	names := []string{"ads.switch.com", "late.switch.com", "evil.switch.com", "own.switch.com", "quiet.switch.com"}
	zones := siminternet.WithNames(siminternet.StandardZones(), netip.MustParseAddr("127.53.9.1"), netip.MustParseAddr(siteAddr), names...)
	w := newWorld(t, 2, zones)

	var mu sync.Mutex
	texts := map[string]string{
		"/ads":   "! Title: Ads\n||ads.switch.com^\n",
		"/evil":  "0.0.0.0 evil.switch.com\n",
		"/own":   "own.switch.com\n",
		"/quiet": "||quiet.switch.com^\n",
	}
	site := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		mu.Lock()
		text := texts[r.URL.Path]
		mu.Unlock()
		z := gzip.NewWriter(rw)
		io.WriteString(z, text)
		z.Close()
	}))
	t.Cleanup(site.Close)
	serve := func(path, text string) {
		mu.Lock()
		defer mu.Unlock()
		texts[path] = text
	}
	for id, path := range map[string]string{"ads": "/ads", "evil": "/evil"} {
		s, err := w.lists.AddList(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Send(&adminv1.AddListRequest{Part: &adminv1.AddListRequest_Header_{Header: &adminv1.AddListRequest_Header{Id: id, Url: site.URL + path}}}); err != nil {
			t.Fatal(err)
		}
		if _, err := s.CloseAndRecv(); err != nil {
			t.Fatal(err)
		}
	}
	set := func(target, key, value string) {
		t.Helper()
		_, err := w.policies.SetSettings(t.Context(), &adminv1.SetSettingsRequest{Target: target,
			Assignments: []*adminv1.Assignment{{Key: key, Operation: adminv1.Operation_OPERATION_ADD, Value: value}}})
		if err != nil {
			t.Fatal(err)
		}
	}
	_, err := adminv1.NewCatalogueServiceClient(w.conn).SetEntry(t.Context(), &adminv1.SetEntryRequest{Kind: adminv1.EntryKind_ENTRY_KIND_CATEGORY, Id: "malware",
		Assignments: []*adminv1.Assignment{{Key: "lists", Operation: adminv1.Operation_OPERATION_ADD, Value: "evil"}}})
	if err != nil {
		t.Fatal(err)
	}
	w.user("user-a", "dev-a", "127.0.0.2")
	w.user("user-b", "dev-b", "127.0.0.3")
	w.user("user-c", "dev-c", "127.0.0.4")
	set("user-a", "lists", "ads")
	set("user-a", "categories", "malware")
	set("user-a", "own_lists", "mine="+site.URL+"/own")
	set("user-c", "own_lists", "mine="+site.URL+"/quiet")

	everywhere := func(what, source, name, want string) {
		t.Helper()
		for i, r := range w.resolvers {
			got := ""
			for end := time.Now().Add(patience); got != want && time.Now().Before(end); {
				if got = judge(udpFrom(source, r.udp)(dns.Fqdn(name), dns.TypeA)); got != want {
					time.Sleep(20 * time.Millisecond)
				}
			}
			if got != want {
				t.Fatalf("%s: resolver %d answers %s for %s with %s, want %s", what, i, source, name, got, want)
			}
		}
	}
	everywhere("added", "127.0.0.2", "ads.switch.com", "blocked")
	everywhere("added", "127.0.0.2", "evil.switch.com", "blocked")
	everywhere("added", "127.0.0.2", "own.switch.com", "blocked")
	for _, name := range names {
		everywhere("added", "127.0.0.3", name, "passed")
	}

	refresh := func(id string) (*adminv1.RefreshListResponse, error) {
		return w.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: id})
	}
	serve("/ads", "! Title: Ads\n||late.switch.com^\n")
	if got, err := refresh("ads"); err != nil || !got.Changed {
		t.Fatalf("%v, %v", got, err)
	}
	everywhere("changed", "127.0.0.2", "late.switch.com", "blocked")
	everywhere("changed", "127.0.0.2", "ads.switch.com", "passed")
	serve("/own", "own.switch.com\nads.switch.com\n")
	if _, err := refresh(site.URL + "/own"); err != nil {
		t.Fatal(err)
	}
	everywhere("changed", "127.0.0.2", "ads.switch.com", "blocked")
	for id, path := range map[string]string{"ads": "/ads", site.URL + "/own": "/own"} {
		serve(path, "<!DOCTYPE html><title>Moved</title>")
		if _, err := refresh(id); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("a web page is taken for %s: %v", id, err)
		}
	}
	everywhere("a web page", "127.0.0.2", "late.switch.com", "blocked")

	// Each resolver counts what each list decided.
	for i, r := range w.resolvers {
		resp, err := http.Get("http://" + r.http + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		page, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range []string{"ads", "evil"} {
			if !regexp.MustCompile(`(?m)^sluice_list_hits_total\{list="` + id + `"\} [1-9]`).Match(page) {
				t.Errorf("resolver %d has no hits of list %s", i, id)
			}
		}
	}

	// All bytes are on both disks, those nobody has asked for too.
	var sums []string
	for _, own := range []bool{false, true} {
		all, err := w.lists.ListLists(t.Context(), &adminv1.ListListsRequest{Own: own})
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range all.Lists {
			sums = append(sums, l.Sha256)
		}
	}
	if len(sums) != 4 {
		t.Fatalf("%d lists", len(sums))
	}
	for _, dir := range []string{"resolver0", "resolver1"} {
		for _, sum := range sums {
			if _, err := hex.DecodeString(sum); err != nil {
				t.Fatal(err)
			}
			until(t, func() bool {
				_, err := os.Stat(filepath.Join(w.dir, dir, "sync", "blobs", sum))
				return err == nil
			})
		}
	}
	for _, r := range w.resolvers {
		until(t, func() bool { return persisted(t, r) })
	}
	w.bizd.kill()
	for _, r := range w.resolvers {
		r.kill()
		w.startResolver(r)
	}
	everywhere("alone", "127.0.0.2", "late.switch.com", "blocked")
	everywhere("alone", "127.0.0.2", "evil.switch.com", "blocked")
	everywhere("alone", "127.0.0.2", "own.switch.com", "blocked")
	everywhere("alone", "127.0.0.4", "quiet.switch.com", "blocked")
	everywhere("alone", "127.0.0.3", "late.switch.com", "passed")
}
