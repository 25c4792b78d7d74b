package syncclient

import (
	"fmt"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache"
)

// A State says how far data can be relied on. The greater, the worse.
type State uint8

// The states.
const (
	Fresh State = iota
	Stale
	Unpersisted
	Suspect
	Cold
)

// String returns the state in a word.
func (s State) String() string {
	switch s {
	case Fresh:
		return "fresh"
	case Stale:
		return "stale"
	case Unpersisted:
		return "unpersisted"
	case Suspect:
		return "suspect"
	case Cold:
		return "cold"
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// A Status is where the client stands.
type Status struct {
	// State is the worst of the datasets'. But only users and the catalogue can make it Cold: others that
	// are not there make it Stale.
	State State
	// Reasons say why it is not Fresh, one a dataset and state, in words.
	Reasons  []string
	Datasets []DatasetStatus
	Services []ServiceStatus
	Blobs    BlobStatus
}

// A DatasetStatus is where one dataset stands.
type DatasetStatus struct {
	usercache.DatasetStatus
	State   State
	Reasons []string // why it is not Fresh

	// Head is the service's revision, as last heard; 0: never heard.
	Head uint64
	// AtHead is how long ago we were last known to be there; negative: not since the start.
	AtHead time.Duration
	// Service is the address being followed. Empty: none.
	Service string
	// Activity in words: watching, comparing digests, asking for a ticket, transferring, waiting to try
	// again.
	Activity string
	// RepairDue is why a repair is due. Empty: none is.
	RepairDue string
	// Repairs that ended well since the start, first transfers among them.
	Repairs uint64
	// Foreign is a dataset or lineage that the service has and that Accept would take over. Zero: none.
	Foreign usercache.Identity
	// LastError is what last went wrong, since all was well.
	LastError string
}

// A ServiceStatus is how an address is doing.
type ServiceStatus struct {
	Address string
	// Failures in a row to reach it, and why. Again is when it may be tried again; 0: now.
	Failures int
	Why      string
	Again    time.Duration
}

// Status returns where the client stands.
func (c *Client) Status() Status {
	now := clock.Elapsed()
	s := Status{Blobs: c.blobs.status()}
	for _, f := range c.followers {
		d := f.status(now)
		s.Datasets = append(s.Datasets, d)
		state := d.State
		if state == Cold && f.kind != usercache.Users && f.kind != usercache.CatalogueKind {
			state = Stale
		}
		s.State = max(s.State, state)
		for _, r := range d.Reasons {
			s.Reasons = append(s.Reasons, string(f.kind)+": "+r)
		}
	}
	for _, v := range c.services {
		e := c.backoffs.failing(v.address)
		s.Services = append(s.Services, ServiceStatus{Address: v.address, Failures: e.Failures, Why: e.Why, Again: max(e.until.Sub(now), 0)})
	}
	return s
}

func (f *follower) status(now clock.Instant) DatasetStatus {
	f.mu.Lock()
	d := DatasetStatus{Head: f.head, AtHead: -1, Service: f.service, Activity: f.activity, RepairDue: f.repairDue, Repairs: f.repairTimes, LastError: f.lastErr}
	atHead := f.atHead
	if atHead != never {
		d.AtHead = now.Sub(atHead)
	}
	if f.foreign != nil {
		d.Foreign = *f.foreign
	}
	f.mu.Unlock()
	d.DatasetStatus = f.ds.Status()

	is := func(s State, format string, args ...any) {
		d.State = max(d.State, s)
		d.Reasons = append(d.Reasons, s.String()+": "+fmt.Sprintf(format, args...))
	}
	if !d.Complete {
		is(Cold, "nothing has been received in whole")
	}
	if d.Suspect {
		is(Suspect, "the service had another root at the same revision")
	}
	if d.Unpersisted {
		is(Unpersisted, "%s", d.DiskError)
	}
	switch catalogue := f.c.opts.Cache.Dataset(usercache.CatalogueKind).Status().Revision; {
	case !d.Complete:
	case d.AtHead < 0:
		is(Stale, "not at the service's head since the start")
	case d.AtHead >= f.c.opts.StaleAfter:
		is(Stale, "not at the service's head for %v", d.AtHead.Truncate(time.Second))
	case d.Transferring:
		is(Stale, "a transfer is under way")
	case f.kind == usercache.Users && d.NeedsCatalogue > catalogue:
		is(Stale, "it names things of catalogue %d, and we have %d", d.NeedsCatalogue, catalogue)
	}
	if d.Foreign != (usercache.Identity{}) {
		d.Reasons = append(d.Reasons, fmt.Sprintf("the service has %v; an operator must accept it", d.Foreign))
	}
	return d
}
