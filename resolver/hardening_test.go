package resolver_test

import (
	"flag"
	"fmt"
	"testing"
)

var long = flag.Bool("long", false, "run the long tests too")

// TestHardening has a row for each row of the hardening checklist (sections A to D) that names a figure, and for
// the times of section E that clients or servers can see. A row sends n of something to the code that serves, once
// with n at the limit and once with one more, and compares what is observed. Run with -v for the table.
//
// No row is due for QUIC, which is not served yet (listen.doq is refused).
func TestHardening(t *testing.T) {
	for section, rows := range map[string][]limitRow{"A": rowsA, "B": rowsB, "C": rowsC, "D": rowsD, "E": rowsE} {
		for _, r := range rows {
			t.Run(section+"/"+r.name, func(t *testing.T) {
				if r.limit > 1000 && section == "A" && !*long {
					t.Skip("long: thousands of clients; run with -long")
				}
				for _, c := range []struct {
					n    int
					want string
				}{{r.limit, r.at}, {r.limit + 1, r.beyond}} {
					got := r.try(t, c.n)
					if got != c.want {
						t.Errorf("%s: %d: %s; want %s", r.counts, c.n, got, c.want)
					}
					t.Logf("limit %d, %s: %d: %s", r.limit, r.counts, c.n, got)
				}
			})
		}
	}
}

// A limitRow is one limit.
type limitRow struct {
	name   string // the row, and which of its figures
	counts string // what n is
	limit  int
	at     string // observed with n == limit
	beyond string // observed with n == limit+1
	try    func(t *testing.T, n int) string
}

// some says how often something came about, for rows in which what is beyond the limit is cut off.
func some(n int) string { return fmt.Sprint(n) }
