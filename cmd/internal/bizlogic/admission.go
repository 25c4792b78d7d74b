package bizlogic

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"

	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
)

const (
	// leaseTime is how long a ticket lives without progress.
	leaseTime = 30 * time.Second

	// smallFetch is what may be fetched at once without a ticket, and the burst of a node's small lane;
	// smallRate is how many bytes a second it regains.
	smallFetch = 1 << 20
	smallRate  = 64 << 10

	// firstBackoff and lastBackoff bound how long a refused node is sent away; it doubles in between.
	firstBackoff = time.Second
	lastBackoff  = time.Minute

	// patience is how long beyond its appointed time a refused node keeps its place in the order.
	patience = 10 * time.Second

	// recently is how long after a ticket a node goes behind those that had none.
	recently = time.Hour

	// maxNodes bounds what is remembered; beyond it, those longest unheard of are forgotten.
	maxNodes = 65536
)

// A nodeID names a caller. With client certificates it comes from the certificate: the common name is the
// node, the organisational unit its region.
type nodeID struct {
	id, region string
}

// callerOf says who calls.
func callerOf(ctx context.Context, n *syncv1.Node) nodeID {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nodeID{n.GetId(), n.GetRegion()}
	}
	if t, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(t.State.VerifiedChains) > 0 {
		subject := t.State.VerifiedChains[0][0].Subject
		id := nodeID{id: subject.CommonName}
		if len(subject.OrganizationalUnit) > 0 {
			id.region = subject.OrganizationalUnit[0]
		}
		return id
	}
	if n.GetId() != "" {
		return nodeID{n.GetId(), n.GetRegion()}
	}
	if host, _, err := net.SplitHostPort(p.Addr.String()); err == nil {
		return nodeID{id: host} // nameless callers of one address share a lane
	}
	return nodeID{id: p.Addr.String()}
}

// An admission decides who may transfer in bulk. Time is an argument.
type admission struct {
	tickets int

	mu      sync.Mutex
	leases  map[string]*lease
	nodes   map[string]*node
	regions map[string]bool // some node of it has completed a transfer, or is about to
}

// A lease is a ticket given out.
type lease struct {
	node     string
	region   string
	seed     bool
	expires  clock.Instant
	received uint64 // as last reported
	running  int    // transfers going on under it
}

// A node is what is remembered about a caller.
type node struct {
	region     string
	need       syncv1.Need
	age        time.Duration
	lastTicket clock.Instant // 0: never
	refusals   int
	notBefore  clock.Instant // refused until then
	waiting    bool          // refused, and expected back
	lane       float64       // bytes left in its small lane…
	laneAt     clock.Instant // …at this time; 0: full
	heard      clock.Instant
}

func newAdmission(tickets int) *admission {
	return &admission{tickets: tickets, leases: map[string]*lease{}, nodes: map[string]*node{}, regions: map[string]bool{}}
}

// A grant is a ticket with what goes with it.
type grant struct {
	ticket string
	seed   bool
}

// notYet is a refusal.
type notYet struct {
	after time.Duration
	why   string
}

func (n *notYet) Error() string { return n.why }

func (n *notYet) status(siblings []*syncv1.Sibling) error {
	var more []protoadapt.MessageV1
	if len(siblings) > 0 {
		more = append(more, protoadapt.MessageV1Of(&syncv1.Siblings{Siblings: siblings}))
	}
	return comeBack(n.after, more, "%s; come back in %v", n.why, n.after)
}

// acquire gives a ticket or a *notYet. The neediest of those that have asked lately come first.
func (a *admission) acquire(who nodeID, need syncv1.Need, age time.Duration, now clock.Instant) (grant, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire(now)
	n := a.node(who.id, now)
	n.region, n.need, n.age = who.region, need, age
	if now.Before(n.notBefore) {
		return grant{}, &notYet{n.notBefore.Sub(now), "this node was told to wait"}
	}
	for t, l := range a.leases {
		if l.node == who.id { // it lost the answer, or restarted: the same lease goes on
			l.expires = now.Add(leaseTime)
			return grant{t, l.seed}, nil
		}
	}
	free := a.tickets - len(a.leases)
	ahead := 0
	for id, o := range a.nodes {
		if id != who.id && o.waiting && a.before(o, n, now) {
			ahead++
		}
	}
	if ahead >= free {
		n.refusals++
		n.waiting = true
		wait := min(firstBackoff<<min(n.refusals-1, 10), lastBackoff)
		n.notBefore = now.Add(wait)
		return grant{}, &notYet{wait, fmt.Sprintf("%d of %d transfers are under way and %d nodes come first", len(a.leases), a.tickets, ahead)}
	}
	seed := !a.regions[who.region]
	a.regions[who.region] = true
	n.waiting, n.refusals, n.lastTicket = false, 0, now
	t := rand.Text()
	a.leases[t] = &lease{node: who.id, region: who.region, seed: seed, expires: now.Add(leaseTime)}
	return grant{t, seed}, nil
}

// before reports whether x comes before y: a node that had a ticket lately goes behind; then the first of
// a region, then the neediest, then the one longest without fresh data.
func (a *admission) before(x, y *node, now clock.Instant) bool {
	if rx, ry := x.recent(now), y.recent(now); rx != ry {
		return ry
	}
	if sx, sy := !a.regions[x.region], !a.regions[y.region]; sx != sy {
		return sx
	}
	if x.need != y.need {
		return x.need > y.need
	}
	return x.age > y.age
}

func (n *node) recent(now clock.Instant) bool {
	return n.lastTicket != 0 && now.Sub(n.lastTicket) < recently
}

// node finds or makes what is remembered about a caller.
func (a *admission) node(id string, now clock.Instant) *node {
	n := a.nodes[id]
	if n == nil {
		if len(a.nodes) >= maxNodes {
			oldest := ""
			for id, n := range a.nodes {
				if oldest == "" || n.heard.Before(a.nodes[oldest].heard) {
					oldest = id
				}
			}
			delete(a.nodes, oldest)
		}
		n = &node{lane: smallFetch, laneAt: now}
		a.nodes[id] = n
	}
	n.heard = now
	return n
}

// expire ends leases without progress and forgets those who did not come back.
func (a *admission) expire(now clock.Instant) {
	for t, l := range a.leases {
		if l.running == 0 && !now.Before(l.expires) {
			a.end(t, false)
		}
	}
	for _, n := range a.nodes {
		if n.waiting && !now.Before(n.notBefore.Add(patience)) {
			n.waiting = false
		}
	}
}

// end takes a lease away. A region whose seed did not complete needs another.
func (a *admission) end(ticket string, complete bool) {
	l := a.leases[ticket]
	delete(a.leases, ticket)
	if l.seed && !complete {
		delete(a.regions, l.region)
	}
}

func (a *admission) renew(ticket string, received uint64, now clock.Instant) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire(now)
	l := a.leases[ticket]
	if l == nil {
		return status.Error(codes.NotFound, "this ticket is not valid any more; acquire another")
	}
	if received > l.received {
		l.received, l.expires = received, now.Add(leaseTime)
	}
	return nil
}

func (a *admission) release(ticket string, complete bool, now clock.Instant) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire(now)
	if a.leases[ticket] != nil {
		a.end(ticket, complete)
	}
}

// out is how many tickets are out.
func (a *admission) out(now clock.Instant) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire(now)
	return len(a.leases)
}

// A passage is one transfer going on, under a ticket or by the small lane.
type passage struct {
	a    *admission
	l    *lease // nil: small lane
	node *node
}

// enter lets a transfer of about size bytes begin. Without a ticket it must be small, and fit what is left
// of the node's lane.
func (a *admission) enter(ticket []byte, who nodeID, size int, now clock.Instant) (*passage, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire(now)
	if len(ticket) > 0 {
		l := a.leases[string(ticket)]
		if l == nil {
			return nil, status.Error(codes.FailedPrecondition, "this ticket is not valid any more; acquire another")
		}
		if l.running >= 4 {
			return nil, comeBack(firstBackoff, nil, "4 transfers are going on under this ticket")
		}
		l.running++
		l.expires = now.Add(leaseTime)
		return &passage{a: a, l: l}, nil
	}
	if size > smallFetch {
		return nil, comeBack(firstBackoff, nil, "about %d bytes are too much without a ticket; acquire one", size)
	}
	n := a.node(who.id, now)
	n.refill(now)
	if float64(size) > n.lane {
		return nil, comeBack(n.regain(size), nil, "about %d bytes are more than is left of this node's small lane; wait, or acquire a ticket", size)
	}
	return &passage{a: a, node: n}, nil
}

func (n *node) refill(now clock.Instant) {
	n.lane = min(smallFetch, n.lane+smallRate*now.Sub(n.laneAt).Seconds())
	n.laneAt = now
}

// regain is how long it takes until size bytes are left.
func (n *node) regain(size int) time.Duration {
	return max(time.Second, time.Duration((float64(size)-n.lane)/smallRate*float64(time.Second)))
}

// spend takes bytes before they are sent. By a ticket they are free. The small lane may be overdrawn once:
// the size on entering was an estimate.
func (p *passage) spend(bytes int, now clock.Instant) error {
	if p.l != nil {
		return nil
	}
	p.a.mu.Lock()
	defer p.a.mu.Unlock()
	p.node.refill(now)
	if p.node.lane < 0 {
		return comeBack(p.node.regain(bytes), nil, "this node's small lane is used up; go on from the cursor later, or acquire a ticket")
	}
	p.node.lane -= float64(bytes)
	return nil
}

// moved extends the lease: bytes have been taken.
func (p *passage) moved(now clock.Instant) {
	if p.l == nil {
		return
	}
	p.a.mu.Lock()
	p.l.expires = now.Add(leaseTime)
	p.a.mu.Unlock()
}

// leave ends the transfer.
func (p *passage) leave(now clock.Instant) {
	if p.l == nil {
		return
	}
	p.a.mu.Lock()
	p.l.running--
	p.l.expires = now.Add(leaseTime)
	p.a.mu.Unlock()
}
