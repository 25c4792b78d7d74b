package replay

import (
	"compress/gzip"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// shared finds the folder of test data beside the project.
func shared(t *testing.T, elem ...string) string {
	t.Helper()
	root := os.Getenv("SLUICE_SHARED")
	if root == "" {
		root = filepath.Join("..", "..", "..", "..", "shared")
	}
	p := filepath.Join(append([]string{root}, elem...)...)
	if _, err := os.Stat(p); err != nil {
		t.Skipf("no test data here: set SLUICE_SHARED to the folder that holds %s", filepath.Join(elem...))
	}
	return p
}

// readList reads a compressed list and up to n names that a plain rule of it blocks.
func readList(t *testing.T, file, rule string, n int) (text []byte, names []string) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	if text, err = io.ReadAll(z); err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile("(?m)"+rule).FindAllSubmatch(text, -1)
	for i := 0; i < len(found) && len(names) < n; i += max(1, len(found)/n) { // spread over the list
		names = append(names, string(found[i][1]))
	}
	return text, names
}

const siteAddr = "198.18.200.1"

// judge says what a response means for a name served at siteAddr.
func judge(m *dns.Msg, err error) string {
	switch {
	case err != nil:
		return err.Error()
	case m.Rcode != dns.RcodeSuccess || len(m.Answer) == 0:
		return dns.RcodeToString[m.Rcode]
	}
	a, ok := m.Answer[len(m.Answer)-1].(*dns.A)
	switch {
	case !ok:
		return m.Answer[0].String()
	case a.A.IsUnspecified():
		return "blocked"
	case a.A.String() == siteAddr:
		return "passed"
	}
	return a.A.String()
}

// TestReplay/blocked-for-one: two users of one resolver, one with real block lists and one without, ask for
// the same names of those lists, over three transports, in both orders, cold and warm.
func TestReplay(t *testing.T) {
	t.Run("blocked-for-one", func(t *testing.T) {
		agText, ag := readList(t, shared(t, "data", "lists", "adguard_dns_filter.txt.gz"), `^\|\|([a-z0-9-]+\.(?:com|net|org))\^$`, 50)
		sbText, sb := readList(t, shared(t, "data", "lists", "stevenblack_unified_hosts.txt.gz"), `^0\.0\.0\.0 ((?:[a-z0-9-]+\.)+(?:com|net|org))$`, 50)
		names := append(ag, sb...)
		if len(names) != 100 {
			t.Fatalf("%d names", len(names))
		}
		zones := siminternet.WithNames(siminternet.StandardZones(), netip.MustParseAddr("127.53.9.1"), netip.MustParseAddr(siteAddr), names...)
		w := newWorld(t, 1, zones)
		w.list("adguard", agText)
		w.list("stevenblack", sbText)
		w.user("user-a", "dev-a", "127.0.0.2")
		w.user("user-b", "dev-b", "127.0.0.3")
		if _, err := w.policies.SetSettings(t.Context(), &adminv1.SetSettingsRequest{Target: "user-a", Assignments: []*adminv1.Assignment{{Key: "lists", Operation: adminv1.Operation_OPERATION_ADD, Value: "adguard,stevenblack"}}}); err != nil {
			t.Fatal(err)
		}
		r := w.resolvers[0]
		// The lists have to reach the resolver and be compiled; one name of each tells.
		for _, n := range []string{names[0], names[99]} {
			until(t, func() bool { return judge(udpFrom("127.0.0.2", r.udp)(dns.Fqdn(n), dns.TypeA)) == "blocked" })
			until(t, func() bool { return judge(udpFrom("127.0.0.3", r.udp)(dns.Fqdn(n), dns.TypeA)) == "passed" })
		}
		ways := map[string]func() [2]asker{ // made when needed: a connection that is idle for long is closed
			"udp": func() [2]asker { return [2]asker{udpFrom("127.0.0.2", r.udp), udpFrom("127.0.0.3", r.udp)} },
			"dot": func() [2]asker { return [2]asker{dotAs(t, "dev-a", r.dot), dotAs(t, "dev-b", r.dot)} },
			"doh": func() [2]asker { return [2]asker{dohAs(t, "dev-a", r.doh), dohAs(t, "dev-b", r.doh)} },
		}
		wrong := 0
		ask := func(askers [2]asker, way, temper string, i int, name string) {
			want := [2]string{"blocked", "passed"}[i]
			if got := judge(askers[i](dns.Fqdn(name), dns.TypeA)); got != want {
				if wrong++; wrong < 20 {
					t.Errorf("%s, %s, user %c, %s: %s, want %s", way, temper, 'a'+i, name, got, want)
				}
			}
		}
		asked := 0
		for _, way := range []string{"udp", "dot", "doh"} {
			askers := ways[way]()
			for k, name := range names {
				order := []int{0, 1}
				if k%2 == 1 {
					order = []int{1, 0}
				}
				for _, temper := range []string{"first", "warm", "hot"} {
					for _, i := range order {
						ask(askers, way, temper, i, name)
						asked++
					}
					slices.Reverse(order)
				}
			}
		}
		t.Logf("%d queries, %d wrong", asked, wrong)
	})

	t.Run("adguardvpn-2023-11-partial-allowlist", partialAllowlist)

	// A change is answered by both resolvers within moments of the call's return; queries every 5 ms say when.
	t.Run("change-reaches-resolvers", func(t *testing.T) {
		zones := siminternet.WithNames(siminternet.StandardZones(), netip.MustParseAddr("127.53.9.1"), netip.MustParseAddr(siteAddr), "site.switch.com")
		w := newWorld(t, 2, zones)
		w.user("user-a", "dev-a", "127.0.0.2")
		var askers [2]asker
		for i, r := range w.resolvers {
			askers[i] = udpFrom("127.0.0.2", r.udp)
			until(t, func() bool { return judge(askers[i]("site.switch.com.", dns.TypeA)) == "passed" })
		}
		var took []time.Duration
		changes := 20
		if *long {
			changes = 100
		}
		for k := range changes {
			want, lines := "blocked", []string{"||switch.com^"}
			if k%2 == 1 {
				want, lines = "passed", []string{"||other.com^"}
			}
			if err := w.rules(t.Context(), "user-a", lines...); err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			var wg sync.WaitGroup
			var mu sync.Mutex
			for i := range askers {
				wg.Go(func() {
					tick := time.NewTicker(5 * time.Millisecond)
					defer tick.Stop()
					for judge(askers[i]("site.switch.com.", dns.TypeA)) != want {
						<-tick.C
						if time.Since(start) > patience {
							t.Errorf("change %d never reached resolver %d", k, i)
							return
						}
					}
					mu.Lock()
					took = append(took, time.Since(start))
					mu.Unlock()
				})
			}
			wg.Wait()
			if t.Failed() {
				return
			}
		}
		slices.Sort(took)
		t.Logf("%d changes, 2 resolvers: p50 %v, p99 %v, max %v", changes, took[len(took)/2], took[len(took)*99/100], took[len(took)-1])
	})

	// The service is killed while clients ask: nobody notices; a resolver that starts meanwhile serves what it
	// has, and follows on when the service is back.
	t.Run("service-killed", func(t *testing.T) {
		var names []string
		for i := range 200 {
			names = append(names, fmt.Sprintf("n%d.names.com", i))
		}
		zones := siminternet.WithNames(siminternet.StandardZones(), netip.MustParseAddr("127.53.9.1"), netip.MustParseAddr(siteAddr), append(names, "ads.com")...)
		w := newWorld(t, 2, zones)
		w.user("user-a", "dev-a", "127.0.0.2")
		w.user("user-b", "dev-b", "127.0.0.3")
		if err := w.rules(t.Context(), "user-a", "||ads.com^"); err != nil {
			t.Fatal(err)
		}
		verdicts := func(r *node) string {
			return judge(udpFrom("127.0.0.2", r.udp)("ads.com.", dns.TypeA)) + "," + judge(udpFrom("127.0.0.3", r.udp)("ads.com.", dns.TypeA))
		}
		for _, r := range w.resolvers {
			until(t, func() bool { return verdicts(r) == "blocked,passed" && persisted(t, r) })
		}
		var asked, failed atomic.Int64
		stop := make(chan struct{})
		var wg sync.WaitGroup
		for i := range 8 {
			ask := udpFrom("127.0.0.3", w.resolvers[0].udp)
			wg.Go(func() {
				for k := i; ; k += 8 {
					select {
					case <-stop:
						return
					default:
					}
					asked.Add(1)
					if got := judge(ask(dns.Fqdn(names[k%len(names)]), dns.TypeA)); got != "passed" {
						failed.Add(1)
						t.Log(got)
					}
				}
			})
		}
		until(t, func() bool { return asked.Load() > 300 })
		w.bizd.kill()
		killedAt := asked.Load()
		until(t, func() bool { return asked.Load() > killedAt+1000 })

		r := w.resolvers[1]
		r.kill()
		w.startResolver(r)
		if got := verdicts(r); got != "blocked,passed" {
			t.Errorf("started while the service is down: %s", got)
		}
		close(stop)
		wg.Wait()
		if failed.Load() > 0 {
			t.Errorf("%d of %d queries failed", failed.Load(), asked.Load())
		}
		t.Logf("%d queries, %d of them after the kill, %d failed", asked.Load(), asked.Load()-killedAt, failed.Load())

		w.startService()
		until(t, func() bool { return w.rules(t.Context(), "user-b", "||ads.com^") == nil })
		for _, r := range w.resolvers {
			until(t, func() bool { return verdicts(r) == "blocked,blocked" })
		}
	})
}
