package rrcache

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Look shows sets, denials, grants and stale data, as they are and without counting.
func TestLook(t *testing.T) {
	c := newCache(Options{MaxStale: 100 * s})
	c.Put(0, query.Subnet{}, a("www.example.", 10, 1), Put{}, at(0))
	c.Put(4, query.Subnet{}, a("www.example.", 60, 2), Put{}, at(0))
	c.Put(0, query.Subnet{}, nsSet("example.", 60, query.RankGlue, "ns.example."), Put{Granted: at(30 * s)}, at(0))
	c.PutNegative(key("www.example.", dnswire.TypeAAAA), NoData, soaSet("example.", 60, 60), nil, query.Insecure, at(0))
	c.PutNegative(key("no.example.", dnswire.TypeA), NXDomain, soaSet("example.", 60, 60), nil, query.Secure, at(0))
	before := c.Stats()
	for _, x := range []struct {
		name string
		typ  uint16
		view query.View
		at   time.Duration
		want string
	}{
		{"www.example.", 0, 0, 5 * s, "A 1 5s, AAAA NODATA 55s"},
		{"www.example.", dnswire.TypeA, 0, 5 * s, "A 1 5s"},
		{"www.example.", dnswire.TypeA, 0, 30 * s, "A 1 -20s"}, // stale
		{"www.example.", 0, 0, 200 * s, ""},                    // too old even for that
		{"www.example.", 0, 4, 5 * s, "A 2 55s"},
		{"example.", 0, 0, 5 * s, "NS cut 25s"},
		{"example.", 0, 0, 31 * s, ""}, // a grant is never stale
		{"no.example.", 0, 0, 5 * s, "TYPE0 NXDOMAIN 55s"},
		{"no.example.", dnswire.TypeMX, 0, 5 * s, "TYPE0 NXDOMAIN 55s"}, // denied whatever the type
		{"below.no.example.", 0, 0, 5 * s, ""},
	} {
		var got []string
		for _, h := range c.Look(name(x.name), x.typ, x.view, at(x.at)) {
			what := map[Kind]string{NXDomain: "NXDOMAIN", NoData: "NODATA"}[h.Negative.Kind]
			switch {
			case h.Cut:
				what = "cut"
			case what == "":
				d := h.Set.First()
				what = fmt.Sprint(d[len(d)-1])
			}
			typ := dnswire.TypeText(h.Type)
			if h.Type == 0 {
				typ = "TYPE0"
			}
			got = append(got, fmt.Sprintf("%s %s %v", typ, what, h.Left.Round(time.Second)))
		}
		if strings.Join(got, ", ") != x.want {
			t.Errorf("%s %d in view %d after %v: %s; want %s", x.name, x.typ, x.view, x.at, strings.Join(got, ", "), x.want)
		}
	}
	if after := c.Stats(); after.Hits != before.Hits || after.Misses != before.Misses {
		t.Error("looking counts as use")
	}
}
