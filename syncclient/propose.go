package syncclient

import (
	"cmp"
	"context"
	"hash/maphash"
	"log/slog"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache"
)

const (
	// proposalsQueued is how many ids may wait to be looked at; more are dropped.
	proposalsQueued = 64
	// proposalsSeen is how many ids are remembered, so that one that asks again and again is looked at once in
	// proposeAgain, and one that was refused in refusedAgain.
	proposalsSeen = 1 << 12
	proposeAgain  = 10 * time.Second
	refusedAgain  = 10 * time.Minute
	// The quotas: how many ids this resolver looks at, and how many devices it proposes for one user, at once and
	// in the long run. Anybody can make ids up.
	looksAtOnce, lookEvery  = 256, 20 * time.Millisecond
	ofUserAtOnce, userEvery = 16, 5 * time.Minute
	// usersCounted is how many users' quotas are kept; while all are in use no other user gets a device.
	usersCounted = 1024
	proposalTime = 5 * time.Second
)

// Propose is told of the id of a device that a client has named and that does not exist: if it begins with the id
// of a user who has automatic devices, and a hyphen, the service is asked to make it. It neither waits nor fails:
// what finds the queue full, or the service away, is dropped, and the client's next query proposes it again.
func (c *Client) Propose(id *usercache.DeviceID) { c.proposals.add(id, clock.Elapsed()) }

// proposals are the devices to be proposed, and who has had how many.
type proposals struct {
	seed  maphash.Seed
	queue chan usercache.DeviceID
	// seen holds for each id, found by its hash, the upper half of the hash and the second until which it is not
	// looked at again.
	seen    [proposalsSeen]atomic.Uint64
	dropped atomic.Int64 // that found the queue full, since it was last read

	// Owned by run.
	looks quota
	users map[usercache.ID]*quota
}

func newProposals() *proposals {
	return &proposals{seed: maphash.MakeSeed(), queue: make(chan usercache.DeviceID, proposalsQueued), users: map[usercache.ID]*quota{}}
}

// add queues an id, unless it was seen lately or there is no room.
func (p *proposals) add(id *usercache.DeviceID, now clock.Instant) {
	word, tag := p.word(id)
	if w := word.Load(); w>>32 == tag && now.Seconds() < uint32(w) {
		return
	}
	select {
	case p.queue <- *id:
		word.Store(tag<<32 | uint64(now.Add(proposeAgain).Seconds()))
	default:
		p.dropped.Add(1)
	}
}

func (p *proposals) word(id *usercache.DeviceID) (word *atomic.Uint64, tag uint64) {
	h := maphash.Bytes(p.seed, id.Bytes())
	return &p.seen[h%proposalsSeen], h >> 32
}

// propose works the queue off until ctx ends.
func (c *Client) propose(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case id := <-c.proposals.queue:
			c.opts.Metrics.Proposed(c.proposeOne(ctx, &id, clock.Elapsed()), 1)
			if n := c.proposals.dropped.Swap(0); n > 0 {
				c.opts.Metrics.Proposed("dropped", int(n))
			}
		}
	}
}

// proposeOne returns what became of an id: made, there, refused, unreachable, nobody (no user would have it), or
// quota.
func (c *Client) proposeOne(ctx context.Context, id *usercache.DeviceID, now clock.Instant) string {
	p := c.proposals
	if !p.looks.take(now, looksAtOnce, lookEvery) {
		return "quota"
	}
	user, ok := c.opts.Cache.AutoUser(id)
	if !ok {
		return "nobody"
	}
	if !p.ofUser(user, now) {
		return "quota"
	}
	ctx, cancel := context.WithTimeout(ctx, proposalTime)
	defer cancel()
	req := &syncv1.ProposeDeviceRequest{Node: c.opts.Node.message(), User: user.String(), Device: id.String()}
	for _, s := range c.services {
		l, err := s.connect()
		if err != nil {
			continue
		}
		answer, err := l.sync.ProposeDevice(ctx, req)
		switch {
		case err == nil && answer.GetCreated():
			c.opts.Logger.Info("a device was made by itself", "user", user.String(), "device", id.String())
			return "made"
		case err == nil:
			return "there"
		case unreachable(err):
			continue
		}
		word, tag := p.word(id)
		word.Store(tag<<32 | uint64(now.Add(refusedAgain).Seconds()))
		level := slog.LevelInfo
		if code := status.Code(err); code == codes.PermissionDenied || code == codes.Unauthenticated || code == codes.Unimplemented {
			level = slog.LevelWarn // not about the device, but about us or the service
		}
		c.opts.Logger.Log(ctx, level, "the service refused a device", "user", user.String(), "device", id.String(), "err", err)
		return "refused"
	}
	return "unreachable"
}

// ofUser takes one proposal of a user's quota.
func (p *proposals) ofUser(user usercache.ID, now clock.Instant) bool {
	q := p.users[user]
	if q == nil {
		if len(p.users) >= usersCounted {
			for u, q := range p.users { // those whose quota is whole again need not be remembered
				if now.Sub(q.since) >= ofUserAtOnce*userEvery {
					delete(p.users, u)
				}
			}
			if len(p.users) >= usersCounted {
				return false
			}
		}
		q = new(quota)
		p.users[user] = q
	}
	return q.take(now, ofUserAtOnce, userEvery)
}

// A quota is so many at once, and one more after each so long. The zero quota is whole.
type quota struct {
	used  int
	since clock.Instant // when used was right
}

func (q *quota) take(now clock.Instant, most int, every time.Duration) bool {
	if back := int(now.Sub(q.since) / every); back > 0 {
		q.used = max(q.used-back, 0)
		q.since = now
	}
	if q.used >= most {
		return false
	}
	q.used++
	q.since = cmp.Or(q.since, now)
	return true
}
