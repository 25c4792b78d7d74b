package bizlogic

import (
	"cmp"
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
)

// Anybody who knows a user's id can make up ids of devices, at as many resolvers as there are: each bounds what it
// proposes, and this what all of them together make of it, below max_devices, which bounds what is there.
const (
	// proposalsAtOnce is how many unknown devices of one user are looked at, proposalEvery when there is one more.
	proposalsAtOnce = 32
	proposalEvery   = 5 * time.Minute
	// proposingUsers is how many users' quotas are kept. While all of them are in use, no other user gets a device.
	proposingUsers = 4096
)

// proposals are the quotas of users whose devices were proposed lately, and what became of all proposals.
type proposals struct {
	mu    sync.Mutex // guards users
	users map[string]*proposalQuota

	made, there, refused, overQuota atomic.Uint64
}

// A proposalQuota is how many proposals a user has had, as they were at a time.
type proposalQuota struct {
	used int
	at   clock.Instant
	said bool // that it is used up
}

// take takes one proposal of a user's quota; wait is how long until there is another, 0 if this is one. first tells
// the first that finds the quota used up.
func (p *proposals) take(user string, now clock.Instant) (wait time.Duration, first bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	q := p.users[user]
	if q == nil {
		if len(p.users) >= proposingUsers {
			for u, q := range p.users {
				if q.renew(now); q.used == 0 {
					delete(p.users, u)
				}
			}
		}
		if len(p.users) >= proposingUsers {
			return proposalEvery, false
		}
		q = &proposalQuota{at: now}
		p.users[user] = q
	}
	q.renew(now)
	if q.used >= proposalsAtOnce {
		first, q.said = !q.said, true
		return q.at.Add(proposalEvery).Sub(now), first
	}
	q.used++
	return 0, false
}

// renew gives back what time has brought.
func (q *proposalQuota) renew(now clock.Instant) {
	n := int(now.Sub(q.at) / proposalEvery)
	q.used = max(q.used-n, 0)
	q.at = q.at.Add(time.Duration(n) * proposalEvery)
	if q.used == 0 {
		q.at, q.said = now, false
	}
}

// Proposals is what became of the devices that resolvers have proposed since the service began: made, there (already),
// refused, and quota, which are those that their user had too many of.
func (s *Service) Proposals() map[string]uint64 {
	p := &s.proposals
	return map[string]uint64{"made": p.made.Load(), "there": p.there.Load(), "refused": p.refused.Load(), "quota": p.overQuota.Load()}
}

// proposeDevice makes a device that a resolver has met, if its user wants that and has not had too many.
func (s *Service) proposeDevice(ctx context.Context, req *syncv1.ProposeDeviceRequest) (*syncv1.ProposeDeviceResponse, error) {
	resp, err := s.propose(ctx, req, clock.Elapsed())
	p := &s.proposals
	switch {
	case err == nil && resp.Created:
		p.made.Add(1)
	case err == nil:
		p.there.Add(1)
	case status.Code(err) == codes.ResourceExhausted:
		p.overQuota.Add(1)
	default:
		p.refused.Add(1)
	}
	return resp, err
}

func (s *Service) propose(ctx context.Context, req *syncv1.ProposeDeviceRequest, now clock.Instant) (*syncv1.ProposeDeviceResponse, error) {
	dev := &userv1.Device{Id: req.GetDevice(), Name: req.GetName(), Automatic: true, Created: clock.Wall().Unix()}
	if err := checkDevice("device", dev); err != nil {
		return nil, err
	}
	resp := new(syncv1.ProposeDeviceResponse)
	may := func(v *view) (*userv1.User, error) {
		resp.Created, resp.Revision = false, 0 // a group that fails is not run again, but say it plainly
		have, u, err := v.user(req.GetUser())
		switch {
		case err != nil:
			return nil, err
		case deviceIndex(u, dev.Id) >= 0:
			resp.Revision = have
			return nil, nil
		case !u.AutoDevices || u.Disabled:
			return nil, refused("user %q does not take devices by itself", req.GetUser())
		case !strings.HasPrefix(dev.Id, req.GetUser()+"-"):
			return nil, invalid("device", "%q does not begin with %q", dev.Id, req.GetUser()+"-")
		case v.claimOwner("d:"+dev.Id) != "":
			return nil, exists("device", dev.Id)
		}
		return u, roomForDevices(req.GetUser(), u, len(u.Devices)+1)
	}
	// Most are refused, or there already, at the cost of a look: only what may be made waits for the writer.
	var u *userv1.User
	err := s.db.View(func(tx *bolt.Tx) (err error) {
		u, err = may(&view{tx: tx})
		return err
	})
	if err != nil || u == nil {
		return resp, reading(err)
	}
	if wait, first := s.proposals.take(req.GetUser(), now); wait > 0 {
		if first {
			s.log.Warn("resolvers propose more devices of a user than are made by themselves; the rest is dropped for a while",
				"user", req.GetUser(), "at_once", proposalsAtOnce, "then_one_each", proposalEvery)
		}
		return nil, comeBack(wait, nil, "user %q has had too many devices proposed; %d are possible at once and one more each %v", req.GetUser(), proposalsAtOnce, proposalEvery)
	}
	revision, err := s.change(ctx, func(v *view) error {
		u, err := may(v)
		if err != nil || u == nil {
			return err
		}
		u.Devices = append(u.Devices, dev)
		resp.Created = true
		return v.putUser(req.GetUser(), u)
	})
	if err != nil {
		return nil, err
	}
	resp.Revision = cmp.Or(revision, resp.Revision)
	return resp, nil
}
