package syncclient

// Metrics is what this package reports as it happens; what merely is, Status says. The arguments are plain
// values, so an implementation need not import this package.
type Metrics interface {
	// Received: so many bytes came in an answer of an RPC: watch, digests, leaves, fetch, segment, blob, …
	Received(rpc string, bytes int)
	// Applied: a delta or bucket changed so many records of a dataset.
	Applied(dataset string, records int)
	// Diverged: the service has another root at the same revision, or is behind what is held.
	Diverged(dataset string)
	// Repaired: a repair ended, having fetched so many buckets. A first transfer is one.
	Repaired(dataset string, buckets int, ok bool)
	// Failed: following a dataset broke off: unreachable, refused, wrong or other.
	Failed(dataset, reason string)
	// Proposed: what became of so many devices that were met: made, there, refused, unreachable, nobody, quota,
	// dropped.
	Proposed(outcome string, n int)
}

type noMetrics struct{}

func (noMetrics) Received(string, int)       {}
func (noMetrics) Applied(string, int)        {}
func (noMetrics) Diverged(string)            {}
func (noMetrics) Repaired(string, int, bool) {}
func (noMetrics) Failed(string, string)      {}
func (noMetrics) Proposed(string, int)       {}
