package metrics

import "github.com/prometheus/client_golang/prometheus"

// Sync is told of sync as it happens; it satisfies the Metrics of package syncclient. It is safe for
// concurrent use.
type Sync struct {
	bytes, applied, diverged, repaired, buckets, failed, proposed *prometheus.CounterVec
}

func newSync() *Sync {
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "sluice_sync_" + name, Help: help}, labels)
	}
	s := &Sync{
		bytes:    vec("bytes_total", "Bytes received from the service and siblings, by kind of call.", "kind"),
		applied:  vec("records_total", "Records that deltas and buckets changed.", "dataset"),
		diverged: vec("diverged_total", "Times that the service had another root at the same revision, or was behind.", "dataset"),
		repaired: vec("repairs_total", "Repairs that ended, first transfers among them.", "dataset", "ok"),
		buckets:  vec("repaired_buckets_total", "Buckets fetched by repairs.", "dataset"),
		failed:   vec("failures_total", "Times that following a dataset broke off.", "dataset", "reason"),
		proposed: vec("proposals_total", "Devices that clients named and that did not exist, by what became of them.", "outcome"),
	}
	s.bytes.WithLabelValues("watch") // so that a rate begins at its first byte
	return s
}

// Received: so many bytes came in an answer of an RPC.
func (s *Sync) Received(rpc string, bytes int) { s.bytes.WithLabelValues(rpc).Add(float64(bytes)) }

// Applied: a delta or bucket changed so many records of a dataset.
func (s *Sync) Applied(dataset string, records int) {
	s.applied.WithLabelValues(dataset).Add(float64(records))
}

// Diverged: the service has another root at the same revision, or is behind what is held.
func (s *Sync) Diverged(dataset string) { s.diverged.WithLabelValues(dataset).Inc() }

// Repaired: a repair ended, having fetched so many buckets.
func (s *Sync) Repaired(dataset string, buckets int, ok bool) {
	s.repaired.WithLabelValues(dataset, map[bool]string{true: "true", false: "false"}[ok]).Inc()
	s.buckets.WithLabelValues(dataset).Add(float64(buckets))
}

// Failed: following a dataset broke off.
func (s *Sync) Failed(dataset, reason string) { s.failed.WithLabelValues(dataset, reason).Inc() }

// Proposed: so ended n devices that clients named and that did not exist.
func (s *Sync) Proposed(outcome string, n int) { s.proposed.WithLabelValues(outcome).Add(float64(n)) }

func (s *Sync) each(f func(prometheus.Collector)) {
	for _, v := range []*prometheus.CounterVec{s.bytes, s.applied, s.diverged, s.repaired, s.buckets, s.failed, s.proposed} {
		f(v)
	}
}

// Describe names the metrics.
func (s *Sync) Describe(ch chan<- *prometheus.Desc) {
	s.each(func(c prometheus.Collector) { c.Describe(ch) })
}

// Collect gives them out.
func (s *Sync) Collect(ch chan<- prometheus.Metric) {
	s.each(func(c prometheus.Collector) { c.Collect(ch) })
}
