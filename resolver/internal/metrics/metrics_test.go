package metrics

import (
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/sluice-dns/sluice/resolver/internal/query"
)

func newWorker(f func(c *query.Counters)) *query.Worker {
	w := &query.Worker{Ring: query.NewRing(1)}
	f(&w.Counters)
	return w
}

// full is sources of which every number is different.
func full() Sources {
	workers := []*query.Worker{
		newWorker(func(c *query.Counters) {
			c.Queries[query.UDP][0].Store(5)
			c.Queries[query.DoH][23].Store(2)
			c.Verdicts[query.Blocked].Store(3)
			c.Refused[query.RefuseRate].Store(7)
			c.Hits.Store(11)
			c.Dropped.Store(7)
			c.Misnamed.Store(4)
		}),
		newWorker(func(c *query.Counters) {
			c.Queries[query.UDP][0].Store(100)
			c.Refused[query.RefuseCold].Store(1)
			c.Hits.Store(1000)
			c.Misses.Store(13)
			c.Misnamed.Store(5)
			c.Lists[7].Store(120)
		}),
	}
	workers[1].Ring.Slot()
	workers[1].Ring.Commit()
	workers[1].Ring.Slot() // finds it full
	tcp := Listener{Name: "tcp", Connections: 4, Accepted: 40, Dropped: map[string]uint64{"slow": 6}}
	tcp.Refused[query.RefuseConnections] = 9
	return Sources{
		Version:   "1.2.3",
		Workers:   func() []*query.Worker { return workers },
		Resolving: func() Resolving { return Resolving{Flights: 21, Waiting: 22} },
		Listeners: func() []Listener { return []Listener{tcp, {Name: "udp", Dropped: map[string]uint64{"old": 8}}} },
		Upstream: func() Upstream {
			return Upstream{UDP: 31, TCP: 32, Joined: 33, Timeouts: 34, Unreachable: 35, Truncated: 36, Mismatched: 37, CaseLost: 38, BadCookies: 39, Busy: 40}
		},
		Validation: func() Validation {
			return Validation{Answers: map[string]uint64{"Secure": 91, "Bogus": 92}, Unfinished: 93, Verified: 94, Failed: 95, Verifying: 1, Places: 2, NegativeAnchors: 3}
		},
		Forwards: func() []Forward {
			return []Forward{{Zone: ".", Answered: 101, Failed: 102, Disagreed: 103, Upstreams: []ForwardUpstream{
				{Name: "udp://192.0.2.1:53", Role: "primary", Asked: 104, Answered: 105, Won: 106, TimedOut: 107, Failed: 108, Broken: 109, SRTT: 0.25, Resting: true},
				{Name: "udp://192.0.2.1:53", Role: "shadow", Asked: 110, Answered: 111, Same: 112, Different: 113, Skipped: 114},
				{Name: "udp://192.0.2.1:53", Role: "shadow", Asked: 999},
			}}}
		},
		Caches: func() []Cache { return []Cache{{Name: "rrset", Entries: 41, Bytes: 42, Budget: 43, Evictions: 44}} },
		Datasets: func() []Dataset {
			return []Dataset{
				{Kind: "users", State: "suspect", Revision: 51, Head: 52, Persisted: 59, Records: 53, Overlay: 54, Bytes: 55, MemoryBytes: 56, LagSeconds: 5.7, GuardTripped: true, Users: 58},
				{Kind: "catalogue", State: "fresh", Revision: 61, Overlay: 2},
			}
		},
		Lists: func() []List {
			return []List{{ID: "ads", Number: 7, Rules: 121, Updated: 122}, {ID: "other", Number: 511}}
		},
		Untried:  func() (uint64, uint64) { return 123, 124 },
		Pressure: func() Pressure { return Pressure{Level: 2, Degraded: 0.25} },
		Limits:   func() map[string]int64 { return map[string]int64{"cache": 71} },
		Panics:   func() uint64 { return 81 },
	}
}

// What pools and their shadows did, and the validator.
func TestForwardAndValidation(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	if err := Register(reg, full()); err != nil {
		t.Fatal(err)
	}
	want := `
# HELP sluice_forward_questions_total Questions put to the resolvers of a forward zone.
# TYPE sluice_forward_questions_total counter
sluice_forward_questions_total{outcome="answered",zone="."} 101
sluice_forward_questions_total{outcome="disagreed",zone="."} 103
sluice_forward_questions_total{outcome="failed",zone="."} 102
# HELP sluice_forward_upstream_outcomes_total What came of them. A won answer went to the client; a shadow's is the same as that or different, and one is skipped beyond its budget.
# TYPE sluice_forward_upstream_outcomes_total counter
sluice_forward_upstream_outcomes_total{outcome="answered",role="primary",upstream="udp://192.0.2.1:53",zone="."} 105
sluice_forward_upstream_outcomes_total{outcome="answered",role="shadow",upstream="udp://192.0.2.1:53",zone="."} 111
sluice_forward_upstream_outcomes_total{outcome="broken",role="primary",upstream="udp://192.0.2.1:53",zone="."} 109
sluice_forward_upstream_outcomes_total{outcome="different",role="shadow",upstream="udp://192.0.2.1:53",zone="."} 113
sluice_forward_upstream_outcomes_total{outcome="failed",role="primary",upstream="udp://192.0.2.1:53",zone="."} 108
sluice_forward_upstream_outcomes_total{outcome="failed",role="shadow",upstream="udp://192.0.2.1:53",zone="."} 0
sluice_forward_upstream_outcomes_total{outcome="same",role="shadow",upstream="udp://192.0.2.1:53",zone="."} 112
sluice_forward_upstream_outcomes_total{outcome="skipped",role="shadow",upstream="udp://192.0.2.1:53",zone="."} 114
sluice_forward_upstream_outcomes_total{outcome="timeout",role="primary",upstream="udp://192.0.2.1:53",zone="."} 107
sluice_forward_upstream_outcomes_total{outcome="timeout",role="shadow",upstream="udp://192.0.2.1:53",zone="."} 0
sluice_forward_upstream_outcomes_total{outcome="won",role="primary",upstream="udp://192.0.2.1:53",zone="."} 106
# HELP sluice_forward_upstream_queries_total Questions put to a resolver of a forward zone.
# TYPE sluice_forward_upstream_queries_total counter
sluice_forward_upstream_queries_total{role="primary",upstream="udp://192.0.2.1:53",zone="."} 104
sluice_forward_upstream_queries_total{role="shadow",upstream="udp://192.0.2.1:53",zone="."} 110
# HELP sluice_signatures_total Signatures that were verified.
# TYPE sluice_signatures_total counter
sluice_signatures_total{result="bad"} 95
sluice_signatures_total{result="good"} 94
# HELP sluice_validated_answers_total Answers that were validated, by what they were found to be; unfinished: the limits of the question, or keys out of reach.
# TYPE sluice_validated_answers_total counter
sluice_validated_answers_total{status="Bogus"} 92
sluice_validated_answers_total{status="Secure"} 91
sluice_validated_answers_total{status="unfinished"} 93
`
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want), "sluice_forward_questions_total", "sluice_forward_upstream_outcomes_total",
		"sluice_forward_upstream_queries_total", "sluice_signatures_total", "sluice_validated_answers_total"); err != nil {
		t.Error(err)
	}
}

// The metrics that others rely on, with their labels and values.
func TestNamesThatStay(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	if err := Register(reg, full()); err != nil {
		t.Fatal(err)
	}
	sync, err := RegisterSync(reg)
	if err != nil {
		t.Fatal(err)
	}
	sync.Received("segment", 1000)
	sync.Received("segment", 24)
	want := `
# HELP sluice_cache_hits_total Queries answered from the caches.
# TYPE sluice_cache_hits_total counter
sluice_cache_hits_total 1011
# HELP sluice_list_hits_total Queries that a rule of a catalogue list decided, exceptions too.
# TYPE sluice_list_hits_total counter
sluice_list_hits_total{list="ads"} 120
sluice_list_hits_total{list="other"} 0
# HELP sluice_list_rules Usable rules of a catalogue list.
# TYPE sluice_list_rules gauge
sluice_list_rules{list="ads"} 121
sluice_list_rules{list="other"} 0
# HELP sluice_list_updated_timestamp_seconds When the text of a catalogue list was taken by the service.
# TYPE sluice_list_updated_timestamp_seconds gauge
sluice_list_updated_timestamp_seconds{list="ads"} 122
sluice_list_updated_timestamp_seconds{list="other"} 0
# HELP sluice_cache_misses_total Queries for which something had to be resolved.
# TYPE sluice_cache_misses_total counter
sluice_cache_misses_total 13
# HELP sluice_overlay_records Records for which another version than the newest is served, over all datasets.
# TYPE sluice_overlay_records gauge
sluice_overlay_records 56
# HELP sluice_overload_level Level of overload; 0 is normal.
# TYPE sluice_overload_level gauge
sluice_overload_level 2
# HELP sluice_queries_total Responses to clients.
# TYPE sluice_queries_total counter
sluice_queries_total{rcode="NOERROR",transport="doh"} 0
sluice_queries_total{rcode="NOERROR",transport="doq"} 0
sluice_queries_total{rcode="NOERROR",transport="dot"} 0
sluice_queries_total{rcode="NOERROR",transport="tcp"} 0
sluice_queries_total{rcode="NOERROR",transport="udp"} 105
sluice_queries_total{rcode="NXDOMAIN",transport="doh"} 0
sluice_queries_total{rcode="NXDOMAIN",transport="doq"} 0
sluice_queries_total{rcode="NXDOMAIN",transport="dot"} 0
sluice_queries_total{rcode="NXDOMAIN",transport="tcp"} 0
sluice_queries_total{rcode="NXDOMAIN",transport="udp"} 0
sluice_queries_total{rcode="OTHER",transport="doh"} 2
sluice_queries_total{rcode="REFUSED",transport="doh"} 0
sluice_queries_total{rcode="REFUSED",transport="doq"} 0
sluice_queries_total{rcode="REFUSED",transport="dot"} 0
sluice_queries_total{rcode="REFUSED",transport="tcp"} 0
sluice_queries_total{rcode="REFUSED",transport="udp"} 0
sluice_queries_total{rcode="SERVFAIL",transport="doh"} 0
sluice_queries_total{rcode="SERVFAIL",transport="doq"} 0
sluice_queries_total{rcode="SERVFAIL",transport="dot"} 0
sluice_queries_total{rcode="SERVFAIL",transport="tcp"} 0
sluice_queries_total{rcode="SERVFAIL",transport="udp"} 0
# HELP sluice_recovered_panics_total Panics that were recovered. Each is a fault of the program; the log says more.
# TYPE sluice_recovered_panics_total counter
sluice_recovered_panics_total 81
# HELP sluice_refused_total Queries and connections that were refused or dropped before they were resolved. Connections are counted by listener, queries under the listener "any".
# TYPE sluice_refused_total counter
sluice_refused_total{listener="any",reason="access"} 0
sluice_refused_total{listener="any",reason="busy"} 0
sluice_refused_total{listener="any",reason="cold"} 1
sluice_refused_total{listener="any",reason="connections"} 0
sluice_refused_total{listener="any",reason="dedicated"} 0
sluice_refused_total{listener="any",reason="device"} 0
sluice_refused_total{listener="any",reason="outstanding"} 0
sluice_refused_total{listener="any",reason="rate"} 7
sluice_refused_total{listener="any",reason="slip"} 0
sluice_refused_total{listener="any",reason="stranger"} 0
sluice_refused_total{listener="any",reason="unproven"} 0
sluice_refused_total{listener="any",reason="user_rate"} 0
sluice_refused_total{listener="tcp",reason="connections"} 9
sluice_refused_total{listener="udp",reason="connections"} 0
# HELP sluice_sync_bytes_total Bytes received from the service and siblings, by kind of call.
# TYPE sluice_sync_bytes_total counter
sluice_sync_bytes_total{kind="segment"} 1024
sluice_sync_bytes_total{kind="watch"} 0
# HELP sluice_sync_revision Revision of user data that is served.
# TYPE sluice_sync_revision gauge
sluice_sync_revision 51
# HELP sluice_sync_state State of user data: 0 cold, 1 stale, 2 fresh, 3 suspect, 4 unpersisted.
# TYPE sluice_sync_state gauge
sluice_sync_state 3
# HELP sluice_upstream_queries_total Messages sent to servers.
# TYPE sluice_upstream_queries_total counter
sluice_upstream_queries_total 63
# HELP sluice_users Users known.
# TYPE sluice_users gauge
sluice_users 58
# HELP sluice_verdicts_total Queries by what policy said of them.
# TYPE sluice_verdicts_total counter
sluice_verdicts_total{verdict="allowed"} 0
sluice_verdicts_total{verdict="blocked"} 3
sluice_verdicts_total{verdict="dropped"} 0
sluice_verdicts_total{verdict="flattened"} 0
sluice_verdicts_total{verdict="pass"} 0
sluice_verdicts_total{verdict="redirected"} 0
sluice_verdicts_total{verdict="refused"} 0
sluice_verdicts_total{verdict="synthesised"} 0
sluice_verdicts_total{verdict="truncated"} 0
`
	var names []string
	for line := range strings.Lines(want) {
		if rest, ok := strings.CutPrefix(line, "# TYPE "); ok {
			name, _, _ := strings.Cut(rest, " ")
			names = append(names, name)
		}
	}
	if len(names) != 16 {
		t.Fatalf("%d names", len(names))
	}
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want), names...); err != nil {
		t.Error(err)
	}
}

func TestOthers(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	if err := Register(reg, full()); err != nil {
		t.Fatal(err)
	}
	want := `
# HELP sluice_events_dropped_total Events for logs and refreshing that were dropped because their ring was full.
# TYPE sluice_events_dropped_total counter
sluice_events_dropped_total 1
# HELP sluice_listener_dropped_total Packets and connections that a listener dropped.
# TYPE sluice_listener_dropped_total counter
sluice_listener_dropped_total{listener="tcp",reason="slow"} 6
sluice_listener_dropped_total{listener="udp",reason="old"} 8
# HELP sluice_upstream_outcomes_total What went another way than one answer to one question.
# TYPE sluice_upstream_outcomes_total counter
sluice_upstream_outcomes_total{outcome="bad_cookie"} 39
sluice_upstream_outcomes_total{outcome="busy"} 40
sluice_upstream_outcomes_total{outcome="case_lost"} 38
sluice_upstream_outcomes_total{outcome="mismatched"} 37
sluice_upstream_outcomes_total{outcome="timeout"} 34
sluice_upstream_outcomes_total{outcome="truncated"} 36
sluice_upstream_outcomes_total{outcome="unreachable"} 35
# HELP sluice_limit Limits in force, in the unit of each.
# TYPE sluice_limit gauge
sluice_limit{name="cache"} 71
# HELP sluice_misnamed_total Queries that gave the id of a device which nobody has, or whose user is disabled, and were served as a stranger's, as the configuration says.
# TYPE sluice_misnamed_total counter
sluice_misnamed_total 9
# HELP sluice_rules_untried_total Questions and answers that were judged without trying all rules, because that would have taken too long. Whose: lists, services and shared policies, or what users wrote; sluicectl explain says it of a name.
# TYPE sluice_rules_untried_total counter
sluice_rules_untried_total{whose="operator"} 123
sluice_rules_untried_total{whose="user"} 124
`
	err := testutil.GatherAndCompare(reg, strings.NewReader(want), "sluice_events_dropped_total", "sluice_listener_dropped_total", "sluice_upstream_outcomes_total", "sluice_limit", "sluice_rules_untried_total", "sluice_misnamed_total")
	if err != nil {
		t.Error(err)
	}
	problems, err := testutil.GatherAndLint(reg)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// A resolver of which little is known shows that little, and names everything it may show later.
func TestEmptySources(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	if err := Register(reg, Sources{}); err != nil {
		t.Fatal(err)
	}
	if _, err := RegisterSync(reg); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range families {
		if strings.HasPrefix(f.GetName(), "sluice_") {
			names = append(names, f.GetName())
		}
	}
	if want := []string{"sluice_build_info", "sluice_sync_bytes_total"}; !slices.Equal(names, want) {
		t.Errorf("%v; want %v", names, want)
	}
}
