package replay

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/miekg/dns"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// A list of exceptions for sites that another list blocks arrives with a quarter of its entries. The service does not
// take it, and says so. A service without that guard gives it to the resolvers, which go on with what they had; only
// where nobody guards are the sites gone.
func partialAllowlist(t *testing.T) {
	const sites = 60
	var names, exceptions []string
	for i := range sites {
		names = append(names, fmt.Sprintf("site%d.switch.com", i))
		exceptions = append(exceptions, "@@||"+names[i]+"^")
	}
	var part atomic.Bool
	site := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/block":
			io.WriteString(rw, "||switch.com^\n")
		case part.Load():
			io.WriteString(rw, strings.Join(exceptions[:sites/4], "\n")+"\n")
		default:
			io.WriteString(rw, strings.Join(exceptions, "\n")+"\n")
		}
	}))
	t.Cleanup(site.Close)
	w := newWorld(t, 1, siminternet.WithNames(siminternet.StandardZones(), netip.MustParseAddr("127.53.9.1"), netip.MustParseAddr(siteAddr), append(names, "other.switch.com")...))
	for _, id := range []string{"block", "allow"} {
		s, err := w.lists.AddList(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Send(&adminv1.AddListRequest{Part: &adminv1.AddListRequest_Header_{Header: &adminv1.AddListRequest_Header{Id: id, Url: site.URL + "/" + id}}}); err != nil {
			t.Fatal(err)
		}
		if _, err := s.CloseAndRecv(); err != nil {
			t.Fatal(err)
		}
	}
	w.user("user-a", "dev-a", "127.0.0.2")
	if _, err := w.policies.SetSettings(t.Context(), &adminv1.SetSettingsRequest{Target: "user-a",
		Assignments: []*adminv1.Assignment{{Key: "lists", Operation: adminv1.Operation_OPERATION_ADD, Value: "block,allow"}}}); err != nil {
		t.Fatal(err)
	}
	r := w.resolvers[0]
	verdict := func(name string) string { return judge(udpFrom("127.0.0.2", r.udp)(dns.Fqdn(name), dns.TypeA)) }
	passed := func() (n int) {
		for _, name := range names {
			if verdict(name) == "passed" {
				n++
			}
		}
		return n
	}
	refresh := func() error {
		_, err := w.lists.RefreshList(t.Context(), &adminv1.RefreshListRequest{Id: "allow"})
		return err
	}
	until(t, func() bool { return verdict("other.switch.com") == "blocked" && passed() == sites })

	part.Store(true)
	if err := refresh(); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "shrink guard") {
		t.Errorf("a quarter of the list is taken: %v", err)
	}
	if n := passed(); n != sites {
		t.Errorf("%d of %d sites are left", n, sites)
	}

	// The service's guard is off: the resolver's own holds.
	open := func(path, before, after string) {
		t.Helper()
		text, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(text), before) {
			t.Fatalf("%s has no %q: %v", path, before, err)
		}
		write(t, path, strings.Replace(string(text), before, after, 1))
	}
	open(filepath.Join(w.dir, "bizd.yaml"), "data_dir:", "shrink_guard: { share: 100% }\ndata_dir:")
	w.bizd.kill()
	w.startService()
	until(t, func() bool { return refresh() == nil })
	r.wait("the shrink guard holds back")
	if n := passed(); n != sites {
		t.Errorf("with the resolver's guard alone %d of %d sites are left", n, sites)
	}

	// Nobody guards: so much was at stake.
	open(r.config, "users: {", "users: { shrink_guard: { share: 100% },")
	r.kill()
	w.startResolver(r)
	until(t, func() bool { return passed() == sites/4 })
}
