package bizlogic

import (
	"bytes"
	"cmp"
	"context"
	"strings"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

// policyServer keeps shared policies, and the settings and rules of all targets.
type policyServer struct {
	adminv1.UnimplementedPolicyServiceServer
	s *Service
}

func (a policyServer) CreatePolicy(ctx context.Context, req *adminv1.CreatePolicyRequest) (*adminv1.CreatePolicyResponse, error) {
	if err := checkID("id", req.GetId()); err != nil {
		return nil, err
	}
	revision, err := a.s.change(ctx, func(v *view) error {
		if _, _, ok, err := v.get(Catalogue, "policy/"+req.GetId()); err != nil || ok {
			return cond(err, exists("policy", req.GetId()))
		}
		return v.putPolicy(req.GetId(), &userv1.Policy{Name: req.GetName(), Tenant: req.GetTenant()})
	})
	if err != nil {
		return nil, err
	}
	return &adminv1.CreatePolicyResponse{Revision: revision, Dataset: Catalogue}, nil
}

func (a policyServer) GetPolicy(_ context.Context, req *adminv1.GetPolicyRequest) (*adminv1.GetPolicyResponse, error) {
	p := new(userv1.Policy)
	revision, err := a.s.read(Catalogue, req.GetId(), "policy", p)
	if err != nil {
		return nil, err
	}
	return &adminv1.GetPolicyResponse{Policy: showPolicy(req.GetId(), revision, p)}, nil
}

func (a policyServer) DeletePolicy(ctx context.Context, req *adminv1.DeletePolicyRequest) (*adminv1.DeletePolicyResponse, error) {
	if err := checkID("id", req.GetId()); err != nil {
		return nil, err
	}
	revision, err := a.s.change(ctx, func(v *view) error {
		have, _, ok, err := v.get(Catalogue, "policy/"+req.GetId())
		if err != nil || !ok {
			return cond(err, notFound("policy", req.GetId()))
		}
		if err := checkRevision(have, req.GetIfRevision()); err != nil {
			return err
		}
		prefix := []byte(req.GetId() + "\x00")
		if k, _ := v.tx.Bucket(bucketService).Bucket(bucketPolicies).Cursor().Seek(prefix); bytes.HasPrefix(k, prefix) {
			return refused("policy %q is in use, by user %q for one", req.GetId(), k[len(prefix):])
		}
		v.remove(Catalogue, "policy/"+req.GetId())
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &adminv1.DeletePolicyResponse{Revision: revision, Dataset: Catalogue}, nil
}

func (a policyServer) ListPolicies(context.Context, *adminv1.ListPoliciesRequest) (*adminv1.ListPoliciesResponse, error) {
	resp := new(adminv1.ListPoliciesResponse)
	err := a.s.db.View(func(tx *bolt.Tx) error {
		return eachOf(tx, "policy/", func(id string, revision uint64, b []byte) error {
			p := new(userv1.Policy)
			if err := proto.Unmarshal(b, p); err != nil {
				return err
			}
			resp.Policies = append(resp.Policies, showPolicy(id, revision, p))
			return nil
		})
	})
	if err != nil {
		return nil, reading(err)
	}
	return resp, nil
}

func (a policyServer) SetSettings(ctx context.Context, req *adminv1.SetSettingsRequest) (*adminv1.SetSettingsResponse, error) {
	t, err := parseTarget(req.GetTarget())
	if err != nil {
		return nil, err
	}
	if len(req.GetAssignments()) == 0 {
		return nil, invalid("assignments", "there are none")
	}
	if err := a.s.fetchOwn(ctx, ownURLs(req.GetAssignments())); err != nil {
		return nil, err
	}
	resp := &adminv1.SetSettingsResponse{Dataset: t.dataset()}
	resp.Revision, err = a.s.changeOwner(ctx, t, req.GetIfRevision(), func(v *view, o *owner) (err error) {
		var strays []string
		for _, as := range req.GetAssignments() {
			stray, err := v.strays(o, as)
			if err != nil {
				return err
			}
			if err := v.assign(o, as); err != nil {
				return err
			}
			strays = append(strays, stray...)
		}
		idle, err := v.idle(o, req.GetAssignments())
		resp.Warnings = append(strays, idle...)
		return err
	})
	if err != nil {
		return nil, err
	}
	return resp, nil
}

// changeOwner changes a target that must exist, and be at ifRevision if that is not 0. It returns the revision of the
// commit; of the record as it is when nothing had to change.
func (s *Service) changeOwner(ctx context.Context, t target, ifRevision uint64, change func(*view, *owner) error) (uint64, error) {
	var have uint64
	revision, err := s.change(ctx, func(v *view) error {
		o, err := v.owner(t)
		if err != nil {
			return err
		}
		have = o.revision
		if err := checkRevision(have, ifRevision); err != nil {
			return err
		}
		if err := change(v, o); err != nil {
			return err
		}
		return o.put()
	})
	if err != nil {
		return 0, err // the plan may still be under way
	}
	return cmp.Or(revision, have), nil
}

func (v *view) putPolicy(id string, p *userv1.Policy) error {
	if err := checkText("name", p.Name, maxName); err != nil {
		return err
	}
	if p.Tenant != "" {
		if err := checkID("tenant", p.Tenant); err != nil {
			return err
		}
	}
	before := new(userv1.Policy)
	if _, _, err := v.load(Catalogue, "policy/"+id, before); err != nil {
		return err
	}
	if _, err := v.catchUp(policyLayers(p), ""); err != nil {
		return err
	}
	if err := v.b.own.check(policyLayers(p), policyLayers(before)); err != nil {
		return err
	}
	return v.put(Catalogue, "policy/"+id, p)
}

func showPolicy(id string, revision uint64, p *userv1.Policy) *adminv1.Policy {
	return &adminv1.Policy{Id: id, Revision: revision, Name: p.Name, Settings: p.Settings, Rules: p.Rules, Tenant: p.Tenant}
}

// eachOf gives the records of the catalogue whose keys have a prefix, in order of id. The catalogue is
// small: policies, lists, services.
func eachOf(tx *bolt.Tx, prefix string, f func(id string, revision uint64, b []byte) error) error {
	found := map[string][]byte{}
	c := tx.Bucket([]byte(Catalogue)).Bucket(bucketRecords).Cursor()
	for k, v := c.First(); k != nil; k, v = c.Next() {
		if id, ok := strings.CutPrefix(string(k[8:]), prefix); ok {
			found[id] = v
		}
	}
	for _, id := range sortedKeys(found) {
		revision, b, err := openRecord(found[id])
		if err != nil {
			return err
		}
		if err := f(id, revision, b); err != nil {
			return err
		}
	}
	return nil
}

// A target is whose settings and rules are meant.
type target struct {
	policy, user, device string
}

func parseTarget(s string) (target, error) {
	if id, ok := strings.CutPrefix(s, "policy/"); ok {
		return target{policy: id}, checkID("target", id)
	}
	user, device, ok := strings.Cut(s, "/")
	if ok {
		if err := checkID("target", device); err != nil {
			return target{}, err
		}
	}
	return target{user: user, device: device}, checkID("target", user)
}

func (t target) dataset() string {
	if t.policy != "" {
		return Catalogue
	}
	return Users
}

// An owner is a loaded target.
type owner struct {
	target
	revision uint64
	settings **userv1.Settings
	rules    **userv1.Rules
	user     *userv1.User   // of a user or device
	shared   *userv1.Policy // of a policy
	put      func() error   // checks and stages the record
}

// owner loads a target, which must exist.
func (v *view) owner(t target) (*owner, error) {
	if t.policy != "" {
		p := new(userv1.Policy)
		revision, ok, err := v.load(Catalogue, "policy/"+t.policy, p)
		if err != nil || !ok {
			return nil, cond(err, notFound("policy", t.policy))
		}
		return &owner{target: t, revision: revision, settings: &p.Settings, rules: &p.Rules, shared: p,
			put: func() error { return v.putPolicy(t.policy, p) }}, nil
	}
	revision, u, err := v.user(t.user)
	if status.Code(err) == codes.NotFound && t.device == "" {
		if _, ok, perr := v.load(Catalogue, "policy/"+t.user, new(userv1.Policy)); perr == nil && ok {
			err = status.Errorf(codes.NotFound, "there is no user %q; the policy of that name is policy/%s", t.user, t.user)
		}
	}
	if err != nil {
		return nil, err
	}
	o := &owner{target: t, revision: revision, settings: &u.Settings, rules: &u.Rules, user: u,
		put: func() error { return v.putUser(t.user, u) }}
	if t.device != "" {
		i := deviceIndex(u, t.device)
		if i < 0 {
			return nil, notFound("device of user "+t.user, t.device)
		}
		o.settings, o.rules = &u.Devices[i].Settings, &u.Devices[i].Rules
	}
	return o, nil
}
