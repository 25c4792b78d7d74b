// Package metrics shows the counters of a resolver's parts to Prometheus.
//
// The parts count for themselves, in plain numbers. Sources is how to read them: functions that return values,
// called at each scrape and never in between, so that serving costs nothing for being watched. A source that is
// nil leaves its metrics out. What happens rather than is (bytes received by sync, repairs) is told to Sync.
//
// Names that stay, because dashboards and checks rely on them:
//
//	sluice_queries_total{transport,rcode}    sluice_sync_revision
//	sluice_refused_total{reason,listener}    sluice_sync_state
//	sluice_verdicts_total{verdict}           sluice_sync_bytes_total{kind}
//	sluice_cache_hits_total                  sluice_users
//	sluice_cache_misses_total                sluice_overlay_records
//	sluice_upstream_queries_total            sluice_overload_level
//	sluice_recovered_panics_total
package metrics

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Register offers the sources, the Go runtime and the process to a registry.
func Register(r prometheus.Registerer, s Sources) error {
	for _, c := range []prometheus.Collector{
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		&collector{s},
	} {
		if err := r.Register(c); err != nil {
			return fmt.Errorf("registering metrics: %w", err)
		}
	}
	return nil
}

// RegisterSync offers what is told of sync as it happens. It is apart from Register because sync begins before
// the resolver is built.
func RegisterSync(r prometheus.Registerer) (*Sync, error) {
	s := newSync()
	if err := r.Register(s); err != nil {
		return nil, fmt.Errorf("registering metrics of sync: %w", err)
	}
	return s, nil
}

// Sources say how to read the parts. They are called from several goroutines at once.
type Sources struct {
	Version string

	// Workers are the serving workers and what they counted.
	Workers func() []*query.Worker
	// Resolving is what is being resolved.
	Resolving func() Resolving
	// Listeners are the listeners.
	Listeners func() []Listener
	// Upstream is the exchanges with servers.
	Upstream func() Upstream
	// Validation is what was validated.
	Validation func() Validation
	// Forwards are the pools of forward zones.
	Forwards func() []Forward
	// Caches are the caches.
	Caches func() []Cache
	// Datasets are the datasets of user data.
	Datasets func() []Dataset
	// Lists are the lists of the catalogue.
	Lists func() []List
	// Untried is how many judgements left rules untried, the operator's and users' own.
	Untried func() (operators, users uint64)
	// Pressure is the level of overload.
	Pressure func() Pressure
	// Limits are the limits in force, by name.
	Limits func() map[string]int64
	// Panics is how many panics were recovered.
	Panics func() uint64
}

// Resolving is what is being resolved at the moment.
type Resolving struct {
	Flights int64 // questions
	Waiting int64 // queries that wait for them
}

// A Listener is what one listener counted. Numbers that its transport does not have are 0.
type Listener struct {
	Name        string // transport, or transport and address: unique
	Connections int64  // open
	Accepted    uint64
	Refused     [query.NumRefuseReason]uint64 // connections, by reason
	Handshakes  int64                         // in progress
	Dropped     map[string]uint64             // packets or connections, by reason
}

// Upstream is what was sent to servers and what came of it.
type Upstream struct {
	UDP, TCP    uint64 // messages sent
	Joined      uint64 // asked by another at the same time
	Timeouts    uint64
	Unreachable uint64
	Truncated   uint64 // responses with TC=1
	Mismatched  uint64 // responses that answered no question of ours
	CaseLost    uint64 // responses that spelled the name in another way
	BadCookies  uint64
	Busy        uint64 // not sent: too many were under way with that server
	LocalRoot   uint64 // not sent: answered from the copy of the root zone
}

// Validation is what became of answers that were validated, and of signatures.
type Validation struct {
	Answers           map[string]uint64 // by status
	Unfinished        uint64            // answers whose status could not be found
	Verified, Failed  uint64            // signatures
	Verifying, Places int               // signatures being verified now, and how many may be
	NegativeAnchors   int
}

// A Forward is the pool of a forward zone.
type Forward struct {
	Zone                        string
	Answered, Failed, Disagreed uint64
	Upstreams                   []ForwardUpstream
}

// A ForwardUpstream is one of its upstreams. A shadow has Same, Different and Skipped, others Won.
type ForwardUpstream struct {
	Name, Role               string
	Asked, Answered, Won     uint64
	TimedOut, Failed, Broken uint64
	Same, Different, Skipped uint64
	SRTT                     float64 // seconds
	Resting                  bool
}

// A Cache is the sums of one cache.
type Cache struct {
	Name      string // "rrset", "answer" or "denial"
	Entries   int
	Bytes     int64 // of live entries
	Budget    int64 // of everything
	Evictions uint64
}

// A Dataset is where a dataset stands.
type Dataset struct {
	Kind             string // "users", "catalogue", "config" or "secrets"
	State            string // one of States
	Revision, Head   uint64
	Persisted        uint64 // revision that a restart would find
	Records, Overlay uint64
	Bytes            uint64 // of keys and records
	MemoryBytes      int64
	LagSeconds       float64 // since it was last known to be at head
	GuardTripped     bool
	Users            uint64 // in "users"
}

// A List is a list of the catalogue.
type List struct {
	ID      string
	Number  int
	Rules   int
	Updated int64 // Unix seconds: when its text was taken
}

// States are the states of a dataset, in the order of the numbers that sluice_sync_state shows.
var States = [...]string{"cold", "stale", "fresh", "suspect", "unpersisted"}

// Pressure is how far the resolver is from being able to serve all.
type Pressure struct {
	Level    int     // 0 is normal
	Degraded float64 // share of demand that is refused
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("sluice_"+name, help, labels, nil)
}

var (
	buildInfo = desc("build_info", "Always 1; labels say which program this is.", "version", "revision", "goversion")

	queries    = desc("queries_total", "Responses to clients.", "transport", "rcode")
	refused    = desc("refused_total", "Queries and connections that were refused or dropped before they were resolved. Connections are counted by listener, queries under the listener \"any\".", "reason", "listener")
	verdicts   = desc("verdicts_total", "Queries by what policy said of them.", "verdict")
	hits       = desc("cache_hits_total", "Queries answered from the caches.")
	misses     = desc("cache_misses_total", "Queries for which something had to be resolved.")
	misnamed   = desc("misnamed_total", "Queries that gave the id of a device which nobody has, or whose user is disabled, and were served as a stranger's, as the configuration says.")
	silent     = desc("silent_total", "Queries that got no response on purpose.")
	lostEvents = desc("events_dropped_total", "Events for logs and refreshing that were dropped because their ring was full.")

	flights = desc("resolving_questions", "Questions being resolved.")
	waiting = desc("resolving_queries", "Queries waiting for questions being resolved.")
	panics  = desc("recovered_panics_total", "Panics that were recovered. Each is a fault of the program; the log says more.")

	connections = desc("connections", "Open connections of clients.", "listener")
	accepted    = desc("connections_accepted_total", "Connections of clients accepted.", "listener")
	handshakes  = desc("handshakes", "TLS handshakes in progress.", "listener")
	dropped     = desc("listener_dropped_total", "Packets and connections that a listener dropped.", "listener", "reason")

	listHits    = desc("list_hits_total", "Queries that a rule of a catalogue list decided, exceptions too.", "list")
	listRules   = desc("list_rules", "Usable rules of a catalogue list.", "list")
	listUpdated = desc("list_updated_timestamp_seconds", "When the text of a catalogue list was taken by the service.", "list")

	untried = desc("rules_untried_total", "Questions and answers that were judged without trying all rules, because that would have taken too long. Whose: lists, services and shared policies, or what users wrote; sluicectl explain says it of a name.", "whose")

	upstream       = desc("upstream_queries_total", "Messages sent to servers.")
	upstreamTCP    = desc("upstream_tcp_queries_total", "Messages sent to servers over TCP; part of sluice_upstream_queries_total.")
	upstreamEnds   = desc("upstream_outcomes_total", "What went another way than one answer to one question.", "outcome")
	upstreamLocal  = desc("local_root_answers_total", "Questions for servers of the root that the local copy of their zone answered.")
	upstreamJoined = desc("upstream_joined_total", "Questions for servers that shared another's exchange.")

	validated       = desc("validated_answers_total", "Answers that were validated, by what they were found to be; unfinished: the limits of the question, or keys out of reach.", "status")
	signatures      = desc("signatures_total", "Signatures that were verified.", "result")
	verifying       = desc("signatures_in_progress", "Signatures being verified.")
	verifyingMost   = desc("signatures_in_progress_limit", "How many signatures may be verified at once.")
	negativeAnchors = desc("negative_trust_anchors", "Names at and below which nothing is validated.")

	forwarded      = desc("forward_questions_total", "Questions put to the resolvers of a forward zone.", "zone", "outcome")
	forwardAsked   = desc("forward_upstream_queries_total", "Questions put to a resolver of a forward zone.", "zone", "upstream", "role")
	forwardEnds    = desc("forward_upstream_outcomes_total", "What came of them. A won answer went to the client; a shadow's is the same as that or different, and one is skipped beyond its budget.", "zone", "upstream", "role", "outcome")
	forwardSRTT    = desc("forward_upstream_seconds", "Smoothed round-trip time of a resolver of a forward zone; of a shadow, the mean.", "zone", "upstream", "role")
	forwardResting = desc("forward_upstream_resting", "1 while a resolver of a forward zone is left alone because it was silent.", "zone", "upstream", "role")

	cacheEntries   = desc("cache_entries", "Entries of a cache.", "cache")
	cacheBytes     = desc("cache_bytes", "Bytes of live entries of a cache.", "cache")
	cacheBudget    = desc("cache_budget_bytes", "Bytes a cache may use.", "cache")
	cacheEvictions = desc("cache_evictions_total", "Entries that had to make room.", "cache")

	users        = desc("users", "Users known.")
	overlay      = desc("overlay_records", "Records for which another version than the newest is served, over all datasets.")
	syncRevision = desc("sync_revision", "Revision of user data that is served.")
	syncState    = desc("sync_state", "State of user data: 0 cold, 1 stale, 2 fresh, 3 suspect, 4 unpersisted.")

	dataRevision = desc("dataset_revision", "Revision of a dataset that is served.", "dataset")
	dataOnDisk   = desc("dataset_persisted_revision", "Revision of a dataset that a restart would find on disk.", "dataset")
	dataHead     = desc("dataset_head", "Newest revision of a dataset that the service told of.", "dataset")
	dataState    = desc("dataset_state", "1 for the state a dataset is in, 0 for the others.", "dataset", "state")
	dataRecords  = desc("dataset_records", "Records of a dataset.", "dataset")
	dataOverlay  = desc("dataset_overlay_records", "Records of a dataset for which another version than the newest is served.", "dataset")
	dataBytes    = desc("dataset_bytes", "Bytes of keys and records of a dataset.", "dataset")
	dataMemory   = desc("dataset_memory_bytes", "Memory that a dataset takes.", "dataset")
	dataLag      = desc("dataset_lag_seconds", "Time since a dataset was last known to be at head.", "dataset")
	dataGuard    = desc("dataset_guard_tripped", "1 while the shrink guard holds removals.", "dataset")

	overloadLevel = desc("overload_level", "Level of overload; 0 is normal.")
	degraded      = desc("degraded_ratio", "Share of demand that is refused.")
	limit         = desc("limit", "Limits in force, in the unit of each.", "name")
)

var descs = []*prometheus.Desc{
	listHits, listRules, listUpdated, untried,
	buildInfo, queries, refused, verdicts, hits, misses, silent, misnamed, lostEvents, flights, waiting, panics, connections, accepted, handshakes,
	dropped, upstream, upstreamTCP, upstreamEnds, upstreamLocal, upstreamJoined,
	validated, signatures, verifying, verifyingMost, negativeAnchors, forwarded, forwardAsked, forwardEnds, forwardSRTT, forwardResting,
	cacheEntries, cacheBytes, cacheBudget, cacheEvictions, users, overlay,
	syncRevision, syncState, dataRevision, dataOnDisk, dataHead, dataState, dataRecords, dataOverlay, dataBytes, dataMemory, dataLag, dataGuard,
	overloadLevel, degraded, limit,
}

// A collector reads the sources.
type collector struct{ s Sources }

// Describe names all metrics.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range descs {
		ch <- d
	}
}

// Collect reads all sources.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	o := out{ch}
	revision := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				revision = s.Value
			}
		}
	}
	o.gauge(buildInfo, 1, c.s.Version, revision, runtime.Version())
	c.workers(o)
	if c.s.Resolving != nil {
		r := c.s.Resolving()
		o.gauge(flights, float64(r.Flights))
		o.gauge(waiting, float64(r.Waiting))
	}
	if c.s.Panics != nil {
		o.counter(panics, c.s.Panics())
	}
	c.listeners(o)
	c.upstream(o)
	c.validation(o)
	c.forwards(o)
	if c.s.Caches != nil {
		for _, k := range c.s.Caches() {
			o.gauge(cacheEntries, float64(k.Entries), k.Name)
			o.gauge(cacheBytes, float64(k.Bytes), k.Name)
			o.gauge(cacheBudget, float64(k.Budget), k.Name)
			o.counter(cacheEvictions, k.Evictions, k.Name)
		}
	}
	c.datasets(o)
	c.lists(o)
	if c.s.Untried != nil {
		operators, users := c.s.Untried()
		o.counter(untried, operators, "operator")
		o.counter(untried, users, "user")
	}
	if c.s.Pressure != nil {
		p := c.s.Pressure()
		o.gauge(overloadLevel, float64(p.Level))
		o.gauge(degraded, p.Degraded)
	}
	if c.s.Limits != nil {
		for name, v := range c.s.Limits() {
			o.gauge(limit, float64(v), name)
		}
	}
}

// An out is where metrics go.
type out struct{ ch chan<- prometheus.Metric }

func (o out) counter(d *prometheus.Desc, v uint64, labels ...string) {
	o.ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
}

func (o out) gauge(d *prometheus.Desc, v float64, labels ...string) {
	o.ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

// rcodes are the names of the response codes that workers count; the last stands for all others.
var rcodes = [...]string{"NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED", "YXDOMAIN", "YXRRSET", "NXRRSET", "NOTAUTH", "NOTZONE",
	"DSOTYPENI", "RCODE12", "RCODE13", "RCODE14", "RCODE15", "BADVERS", "BADKEY", "BADTIME", "BADMODE", "BADNAME", "BADALG", "BADTRUNC", "OTHER"}

// common are the codes shown even while they are 0, so that a rate begins at its first.
var common = map[string]bool{"NOERROR": true, "SERVFAIL": true, "NXDOMAIN": true, "REFUSED": true}

// lists shows what each list of the catalogue decided, and how old it is.
func (c *collector) lists(o out) {
	if c.s.Lists == nil || c.s.Workers == nil {
		return
	}
	workers := c.s.Workers()
	for _, l := range c.s.Lists() {
		var n uint64
		for _, w := range workers {
			n += w.Counters.Lists[l.Number].Load()
		}
		o.counter(listHits, n, l.ID)
		o.gauge(listRules, float64(l.Rules), l.ID)
		o.gauge(listUpdated, float64(l.Updated), l.ID)
	}
}

func (c *collector) workers(o out) {
	if c.s.Workers == nil {
		return
	}
	var byCode [query.NumTransports][len(rcodes)]uint64
	var byVerdict [query.NumVerdictKind]uint64
	var byReason [query.NumRefuseReason]uint64
	var hit, miss, none, unknown, lost uint64
	for _, w := range c.s.Workers() {
		k := &w.Counters
		for t := range k.Queries {
			for r := range k.Queries[t] {
				byCode[t][r] += k.Queries[t][r].Load()
			}
		}
		for i := range k.Verdicts {
			byVerdict[i] += k.Verdicts[i].Load()
		}
		for i := range k.Refused {
			byReason[i] += k.Refused[i].Load()
		}
		hit, miss, none = hit+k.Hits.Load(), miss+k.Misses.Load(), none+k.Dropped.Load()
		unknown += k.Misnamed.Load()
		if w.Ring != nil {
			lost += w.Ring.Dropped()
		}
	}
	for t := range byCode {
		for r, n := range byCode[t] {
			if n > 0 || common[rcodes[r]] {
				o.counter(queries, n, query.Transport(t).String(), rcodes[r])
			}
		}
	}
	for i, n := range byVerdict {
		o.counter(verdicts, n, query.VerdictKind(i).String())
	}
	for i := int(query.NotRefused) + 1; i < len(byReason); i++ {
		o.counter(refused, byReason[i], query.RefuseReason(i).String(), "any")
	}
	o.counter(hits, hit)
	o.counter(misses, miss)
	o.counter(silent, none)
	o.counter(misnamed, unknown)
	o.counter(lostEvents, lost)
}

func (c *collector) listeners(o out) {
	if c.s.Listeners == nil {
		return
	}
	for _, l := range c.s.Listeners() {
		o.gauge(connections, float64(l.Connections), l.Name)
		o.counter(accepted, l.Accepted, l.Name)
		o.gauge(handshakes, float64(l.Handshakes), l.Name)
		for i, n := range l.Refused {
			if n > 0 || query.RefuseReason(i) == query.RefuseConnections {
				o.counter(refused, n, query.RefuseReason(i).String(), l.Name)
			}
		}
		for reason, n := range l.Dropped {
			o.counter(dropped, n, l.Name, reason)
		}
	}
}

func (c *collector) upstream(o out) {
	if c.s.Upstream == nil {
		return
	}
	u := c.s.Upstream()
	o.counter(upstream, u.UDP+u.TCP)
	o.counter(upstreamTCP, u.TCP)
	o.counter(upstreamLocal, u.LocalRoot)
	o.counter(upstreamJoined, u.Joined)
	for outcome, n := range map[string]uint64{
		"timeout": u.Timeouts, "unreachable": u.Unreachable, "truncated": u.Truncated, "mismatched": u.Mismatched,
		"case_lost": u.CaseLost, "bad_cookie": u.BadCookies, "busy": u.Busy,
	} {
		o.counter(upstreamEnds, n, outcome)
	}
}

func (c *collector) validation(o out) {
	if c.s.Validation == nil {
		return
	}
	v := c.s.Validation()
	for status, n := range v.Answers {
		o.counter(validated, n, status)
	}
	o.counter(validated, v.Unfinished, "unfinished")
	o.counter(signatures, v.Verified, "good")
	o.counter(signatures, v.Failed, "bad")
	o.gauge(verifying, float64(v.Verifying))
	o.gauge(verifyingMost, float64(v.Places))
	o.gauge(negativeAnchors, float64(v.NegativeAnchors))
}

func (c *collector) forwards(o out) {
	if c.s.Forwards == nil {
		return
	}
	for _, f := range c.s.Forwards() {
		o.counter(forwarded, f.Answered, f.Zone, "answered")
		o.counter(forwarded, f.Failed, f.Zone, "failed")
		o.counter(forwarded, f.Disagreed, f.Zone, "disagreed")
		seen := map[string]bool{}
		for _, u := range f.Upstreams {
			if seen[u.Role+u.Name] {
				continue // the same one twice in a pool is one to a dashboard
			}
			seen[u.Role+u.Name] = true
			o.counter(forwardAsked, u.Asked, f.Zone, u.Name, u.Role)
			ends := map[string]uint64{"answered": u.Answered, "timeout": u.TimedOut, "failed": u.Failed, "won": u.Won, "broken": u.Broken}
			if u.Role == "shadow" {
				ends = map[string]uint64{"answered": u.Answered, "timeout": u.TimedOut, "failed": u.Failed, "same": u.Same, "different": u.Different, "skipped": u.Skipped}
			}
			for outcome, n := range ends {
				o.counter(forwardEnds, n, f.Zone, u.Name, u.Role, outcome)
			}
			o.gauge(forwardSRTT, u.SRTT, f.Zone, u.Name, u.Role)
			o.gauge(forwardResting, number(u.Resting), f.Zone, u.Name, u.Role)
		}
	}
}

func (c *collector) datasets(o out) {
	if c.s.Datasets == nil {
		return
	}
	held := uint64(0)
	for _, d := range c.s.Datasets() {
		held += d.Overlay
		o.gauge(dataRevision, float64(d.Revision), d.Kind)
		o.gauge(dataOnDisk, float64(d.Persisted), d.Kind)
		o.gauge(dataHead, float64(d.Head), d.Kind)
		o.gauge(dataRecords, float64(d.Records), d.Kind)
		o.gauge(dataOverlay, float64(d.Overlay), d.Kind)
		o.gauge(dataBytes, float64(d.Bytes), d.Kind)
		o.gauge(dataMemory, float64(d.MemoryBytes), d.Kind)
		o.gauge(dataLag, d.LagSeconds, d.Kind)
		o.gauge(dataGuard, number(d.GuardTripped), d.Kind)
		for i, state := range States {
			o.gauge(dataState, number(d.State == state), d.Kind, state)
			if d.Kind == "users" && d.State == state {
				o.gauge(syncState, float64(i))
			}
		}
		if d.Kind == "users" {
			o.gauge(syncRevision, float64(d.Revision))
			o.gauge(users, float64(d.Users))
		}
	}
	o.gauge(overlay, float64(held))
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
