package resolver_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/usercache"
)

// A notebook is what was logged.
type notebook struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (n *notebook) Write(p []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.b.Write(p)
}

// about returns the levels of the lines since the last call that hold a text.
func (n *notebook) about(text string) (levels string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for line := range strings.Lines(n.b.String()) {
		if strings.Contains(line, text) {
			_, after, _ := strings.Cut(line, "level=")
			level, _, _ := strings.Cut(after, " ")
			levels += level + " "
		}
	}
	n.b.Reset()
	return strings.TrimSpace(levels)
}

// A policy that the configuration names and that does not exist is told of once, at the start, when it goes and when it
// is there; meanwhile who would be served by it is refused.
func TestStrangersPolicyThatIsNotThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := new(notebook)
		sim := newInternet(t, zones{zoneAt("example.", labServer, "a A 192.0.2.1\n")})
		withHousehold(t, sim, nil, nil, nil, func(o *resolver.Options) {
			o.Identify.Stranger = "guests"
			o.Logger = slog.New(slog.NewTextHandler(log, nil))
		}, func(h *household) {
			policies := func(p map[string]proto.Message) {
				h.put(t, usercache.CatalogueKind, p)
				synctest.Wait()
			}
			guests := &userv1.Policy{Settings: &userv1.Settings{Rewrites: &userv1.RewriteSet{Values: []*userv1.Rewrite{{Name: "a.example", Records: []string{"A 192.0.2.99"}}}}}}
			for i, c := range []struct {
				change       func()
				says, served string
			}{
				{func() {}, "WARN", "REFUSED, EDE 14"},
				{func() { policies(map[string]proto.Message{"policy/others": &userv1.Policy{}}) }, "", "REFUSED, EDE 14"},
				{func() { policies(map[string]proto.Message{"policy/guests": guests}) }, "INFO", "NOERROR, A 192.0.2.99"},
				{func() { policies(map[string]proto.Message{"policy/others": &userv1.Policy{Name: "x"}}) }, "", "NOERROR, A 192.0.2.99"},
				{func() { policies(map[string]proto.Message{"policy/guests": nil}) }, "WARN", "REFUSED, EDE 14"},
			} {
				c.change()
				if got := log.about("policy=guests"); got != c.says {
					t.Errorf("step %d: logged %q, want %q", i, got, c.says)
				}
				m, err := h.from("10.0.5.5", "a.example.", dns.TypeA)
				if got := briefly(m, err); got != c.served {
					t.Errorf("step %d: %s, want %s", i, got, c.served)
				}
			}
		})
	})
	for _, choice := range []string{"refuse", "serve"} { // are no policies
		synctest.Test(t, func(t *testing.T) {
			log := new(notebook)
			withHousehold(t, newInternet(t, nil), nil, nil, nil, func(o *resolver.Options) {
				o.Identify.Stranger, o.Logger = choice, slog.New(slog.NewTextHandler(log, nil))
			}, func(*household) {
				if got := log.about("policy=" + choice); got != "" {
					t.Error(fmt.Sprint("stranger: ", choice, ": ", got))
				}
			})
		})
	}
}
