package bizlogic

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache/password"
)

const (
	maxDevices = 256
	maxLinks   = 64
	maxTags    = 16
	// maxPasswords is how many passwords a device may have: the old one and the new while it is changed, for
	// each of a wrong password costs a verification.
	maxPasswords = 4

	// maxScan bounds the users one ListUsers looks at.
	maxScan = 10_000
)

// userServer keeps users and their devices.
type userServer struct {
	adminv1.UnimplementedUserServiceServer
	s *Service
}

func (a userServer) CreateUser(ctx context.Context, req *adminv1.CreateUserRequest) (*adminv1.CreateUserResponse, error) {
	if err := checkID("id", req.GetId()); err != nil {
		return nil, err
	}
	u := &userv1.User{Policy: req.GetPolicy(), Name: req.GetName(), Tenant: req.GetTenant(), AutoDevices: req.GetAutoDevices(), Created: clock.Wall().Unix()}
	revision, err := a.s.change(ctx, func(v *view) error {
		if _, _, ok, err := v.get(Users, req.GetId()); err != nil || ok {
			return cond(err, exists("user", req.GetId()))
		}
		return v.putUser(req.GetId(), u)
	})
	if err != nil {
		return nil, err
	}
	return &adminv1.CreateUserResponse{Revision: revision, Dataset: Users}, nil
}

func (a userServer) GetUser(_ context.Context, req *adminv1.GetUserRequest) (*adminv1.GetUserResponse, error) {
	u := new(userv1.User)
	revision, err := a.s.read(Users, req.GetId(), "user", u)
	if err != nil {
		return nil, err
	}
	return &adminv1.GetUserResponse{User: showUser(req.GetId(), revision, u)}, nil
}

func (a userServer) DeleteUser(ctx context.Context, req *adminv1.DeleteUserRequest) (*adminv1.DeleteUserResponse, error) {
	revision, err := a.s.change(ctx, func(v *view) error {
		have, u, err := v.user(req.GetId())
		if err != nil {
			return err
		}
		if err := checkRevision(have, req.GetIfRevision()); err != nil {
			return err
		}
		v.release(claims(req.GetId(), u))
		v.remove(Users, req.GetId())
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &adminv1.DeleteUserResponse{Revision: revision, Dataset: Users}, nil
}

func (a userServer) ListUsers(_ context.Context, req *adminv1.ListUsersRequest) (*adminv1.ListUsersResponse, error) {
	limit := int(req.GetLimit())
	if limit == 0 {
		limit = 100
	}
	if limit > 1000 {
		return nil, invalid("limit", "at most 1000, not %d", limit)
	}
	match, err := userFilter(req.GetFilter())
	if err != nil {
		return nil, err
	}
	resp := new(adminv1.ListUsersResponse)
	err = a.s.db.View(func(tx *bolt.Tx) error {
		c := tx.Bucket(bucketService).Bucket(bucketIDs).Cursor()
		scanned := 0
		for k, _ := c.Seek([]byte(req.GetPage())); k != nil; k, _ = c.Next() {
			if len(resp.Users) == limit || scanned == maxScan {
				resp.NextPage = string(k)
				return nil
			}
			scanned++
			u := new(userv1.User)
			revision, b, ok, err := getRecord(tx, Users, k)
			if err == nil && ok {
				err = proto.Unmarshal(b, u)
			}
			if err != nil {
				return fmt.Errorf("user %s: %w", k, err)
			}
			if ok && match(string(k), u) {
				resp.Users = append(resp.Users, showUser(string(k), revision, u))
			}
		}
		return nil
	})
	if err != nil {
		return nil, reading(err)
	}
	return resp, nil
}

// userFilter compiles the filter of ListUsers.
func userFilter(filter string) (func(id string, u *userv1.User) bool, error) {
	var tests []func(id string, u *userv1.User) bool
	for word := range strings.FieldsSeq(filter) {
		key, value, isPair := strings.Cut(word, "=")
		switch {
		case !isPair:
			tests = append(tests, func(id string, u *userv1.User) bool {
				return strings.Contains(id, word) || strings.Contains(strings.ToLower(u.Name), strings.ToLower(word))
			})
		case key == "policy":
			tests = append(tests, func(_ string, u *userv1.User) bool { return u.Policy == value })
		case key == "tenant":
			tests = append(tests, func(_ string, u *userv1.User) bool { return u.Tenant == value })
		case key == "disabled" && (value == "true" || value == "false"):
			tests = append(tests, func(_ string, u *userv1.User) bool { return u.Disabled == (value == "true") })
		case key == "device":
			tests = append(tests, func(_ string, u *userv1.User) bool { return deviceIndex(u, value) >= 0 })
		default:
			return nil, invalid("filter", "%q is none of policy=P, tenant=T, disabled=true|false, device=ID, TEXT", word)
		}
	}
	return func(id string, u *userv1.User) bool {
		for _, t := range tests {
			if !t(id, u) {
				return false
			}
		}
		return true
	}, nil
}

func (a userServer) CreateDevice(ctx context.Context, req *adminv1.CreateDeviceRequest) (*adminv1.CreateDeviceResponse, error) {
	in := req.GetDevice()
	if in == nil {
		return nil, invalid("device", "is missing")
	}
	dev := proto.CloneOf(in)
	if len(dev.PasswordHashes) > 0 {
		return nil, invalid("device.password_hashes", "give the password; the service hashes it")
	}
	if err := checkDevice("device", dev); err != nil {
		return nil, err
	}
	if dev.Created == 0 {
		dev.Created = clock.Wall().Unix()
	}
	if req.GetPassword() != "" {
		h, err := hashPassword(req.GetPassword())
		if err != nil {
			return nil, err
		}
		dev.PasswordHashes = []string{h}
	}
	if dev.DohOnly && len(dev.PasswordHashes) == 0 && len(dev.TokenSha256) == 0 {
		return nil, invalid("device.doh_only", "needs a password or a token, or nothing identifies the device")
	}
	revision, err := a.s.change(ctx, func(v *view) error {
		have, u, err := v.user(req.GetUser())
		if err != nil {
			return err
		}
		if err := checkRevision(have, req.GetIfRevision()); err != nil {
			return err
		}
		if v.claimOwner("d:"+dev.Id) != "" {
			return exists("device", dev.Id)
		}
		u.Devices = append(u.Devices, dev)
		return v.putUser(req.GetUser(), u)
	})
	if err != nil {
		return nil, err
	}
	return &adminv1.CreateDeviceResponse{Revision: revision, Dataset: Users}, nil
}

func (a userServer) GetDevice(_ context.Context, req *adminv1.GetDeviceRequest) (*adminv1.GetDeviceResponse, error) {
	var out *adminv1.Device
	err := a.s.db.View(func(tx *bolt.Tx) error {
		v := &view{tx: tx}
		user, revision, u, i, err := v.device(req.GetId())
		if err != nil {
			return err
		}
		out = showDevice(user, revision, u.Devices[i])
		return nil
	})
	if err != nil {
		return nil, reading(err)
	}
	return &adminv1.GetDeviceResponse{Device: out}, nil
}

func (a userServer) UpdateDevice(ctx context.Context, req *adminv1.UpdateDeviceRequest) (*adminv1.UpdateDeviceResponse, error) {
	hash := ""
	if req.GetPassword() != "" {
		var err error
		if hash, err = hashPassword(req.GetPassword()); err != nil { // slow, so not in the writer
			return nil, err
		}
	}
	var unchanged uint64
	revision, err := a.s.change(ctx, func(v *view) error {
		owner, have, u, i, err := v.device(req.GetId())
		if err != nil {
			return err
		}
		unchanged = have
		if err := checkRevision(have, req.GetIfRevision()); err != nil {
			return err
		}
		dev := u.Devices[i]
		if req.Name != nil {
			dev.Name = *req.Name
		}
		if req.DohOnly != nil {
			dev.DohOnly = *req.DohOnly
		}
		if req.Password != nil {
			dev.PasswordHashes = nil
			if hash != "" {
				dev.PasswordHashes = []string{hash}
			}
		}
		for _, set := range []struct {
			from *adminv1.AddressList
			to   *[]string
		}{{req.Links, &dev.Links}, {req.Dedicated, &dev.Dedicated}, {req.EdnsIds, &dev.EdnsIds}, {req.Tags, &dev.Tags}} {
			if set.from != nil {
				*set.to = set.from.Values
			}
		}
		if err := checkDevice("device", dev); err != nil {
			return err
		}
		if dev.DohOnly && len(dev.PasswordHashes) == 0 && len(dev.TokenSha256) == 0 {
			return invalid("doh_only", "needs a password or a token, or nothing identifies the device")
		}
		if req.User == nil || *req.User == owner {
			return v.putUser(owner, u)
		}
		u.Devices = slices.Delete(u.Devices, i, i+1)
		if err := v.putUser(owner, u); err != nil {
			return err
		}
		_, to, err := v.user(*req.User)
		if err != nil {
			return err
		}
		to.Devices = append(to.Devices, dev)
		return v.putUser(*req.User, to)
	})
	if err != nil {
		return nil, err
	}
	return &adminv1.UpdateDeviceResponse{Revision: cmp.Or(revision, unchanged), Dataset: Users}, nil
}

func (a userServer) DeleteDevice(ctx context.Context, req *adminv1.DeleteDeviceRequest) (*adminv1.DeleteDeviceResponse, error) {
	revision, err := a.s.change(ctx, func(v *view) error {
		owner, have, u, i, err := v.device(req.GetId())
		if err != nil {
			return err
		}
		if err := checkRevision(have, req.GetIfRevision()); err != nil {
			return err
		}
		u.Devices = slices.Delete(u.Devices, i, i+1)
		return v.putUser(owner, u)
	})
	if err != nil {
		return nil, err
	}
	return &adminv1.DeleteDeviceResponse{Revision: revision, Dataset: Users}, nil
}

func (a userServer) ListDevices(_ context.Context, req *adminv1.ListDevicesRequest) (*adminv1.ListDevicesResponse, error) {
	u := new(userv1.User)
	revision, err := a.s.read(Users, req.GetUser(), "user", u)
	if err != nil {
		return nil, err
	}
	resp := new(adminv1.ListDevicesResponse)
	for _, dev := range u.Devices {
		resp.Devices = append(resp.Devices, showDevice(req.GetUser(), revision, dev))
	}
	return resp, nil
}

// user loads a user that must exist.
func (v *view) user(id string) (uint64, *userv1.User, error) {
	if err := checkID("user", id); err != nil {
		return 0, nil, err
	}
	u := new(userv1.User)
	revision, ok, err := v.load(Users, id, u)
	if err == nil && !ok {
		err = notFound("user", id)
	}
	return revision, u, err
}

// device loads the user that has a device, which must exist, and the device's place in it.
func (v *view) device(id string) (user string, revision uint64, u *userv1.User, i int, err error) {
	if err := checkID("device", id); err != nil {
		return "", 0, nil, 0, err
	}
	user, _, ok := strings.Cut(v.claimOwner("d:"+id), "/")
	if !ok {
		return "", 0, nil, 0, notFound("device", id)
	}
	if revision, u, err = v.user(user); err != nil {
		return "", 0, nil, 0, err
	}
	if i = deviceIndex(u, id); i < 0 {
		return "", 0, nil, 0, status.Errorf(codes.Internal, "device %q is indexed at user %q, which does not have it; run sluice-bizd migrate", id, user)
	}
	return user, revision, u, i, nil
}

func deviceIndex(u *userv1.User, id string) int {
	return slices.IndexFunc(u.Devices, func(d *userv1.Device) bool { return d.Id == id })
}

// putUser checks a whole user and stages it.
func (v *view) putUser(id string, u *userv1.User) error {
	if err := checkText("name", u.Name, maxName); err != nil {
		return err
	}
	if u.Tenant != "" {
		if err := checkID("tenant", u.Tenant); err != nil {
			return err
		}
	}
	if u.MaxDevices > maxDevices {
		return invalid("max_devices", "%d is more than %d", u.MaxDevices, maxDevices)
	}
	if err := roomForDevices(id, u, len(u.Devices)); err != nil {
		return err
	}
	if u.Policy != "" {
		if _, _, ok, err := v.get(Catalogue, "policy/"+u.Policy); err != nil || !ok {
			return cond(err, invalid("policy", "there is no policy %q", u.Policy))
		}
	}
	before := new(userv1.User)
	if _, _, err := v.load(Users, id, before); err != nil {
		return err
	}
	if _, err := v.catchUp(userLayers(u), ""); err != nil {
		return err
	}
	if err := v.b.own.check(userLayers(u), userLayers(before)); err != nil {
		return err
	}
	after := claims(id, u)
	seen := map[string]string{}
	for _, dev := range u.Devices {
		for _, c := range deviceClaims(dev) {
			if other, ok := seen[c]; ok {
				return status.Errorf(codes.AlreadyExists, "%s is claimed twice within user %q, by devices %q and %q", claimText(c), id, other, dev.Id)
			}
			seen[c] = dev.Id
			if owner := v.claimOwner(c); owner != "" && !strings.HasPrefix(owner, id+"/") {
				return status.Errorf(codes.AlreadyExists, "%s belongs to %s already", claimText(c), owner)
			}
		}
	}
	v.release(claims(id, before))
	for c, owner := range after {
		v.claimed[c] = owner
	}
	return v.put(Users, id, u)
}

// roomForDevices bounds how many devices a user has.
func roomForDevices(id string, u *userv1.User, n int) error {
	if most := int(cmp.Or(u.MaxDevices, maxDevices)); n > most {
		return refused("user %q would have %d devices; at most %d (max_devices)", id, n, most)
	}
	return nil
}

// release gives claims up.
func (v *view) release(claims map[string]string) {
	for c, owner := range claims {
		if v.claimOwner(c) == owner { // else it has moved already
			v.claimed[c] = ""
		}
	}
}

// claimOwner is "USER/DEVICE" or "".
func (v *view) claimOwner(c string) string {
	if owner, ok := v.claimed[c]; ok {
		return owner
	}
	return string(v.tx.Bucket(bucketService).Bucket(bucketClaims).Get([]byte(c)))
}

// claims is what must be unique in the whole dataset, for each the owner "USER/DEVICE": ids (d:), links
// (l:), dedicated addresses (a:), EDNS identities (e:).
func claims(id string, u *userv1.User) map[string]string {
	out := map[string]string{}
	for _, dev := range u.Devices {
		for _, c := range deviceClaims(dev) {
			out[c] = id + "/" + dev.Id
		}
	}
	return out
}

func deviceClaims(dev *userv1.Device) []string {
	out := []string{"d:" + dev.Id}
	for _, l := range dev.Links {
		out = append(out, "l:"+l)
	}
	for _, a := range dev.Dedicated {
		out = append(out, "a:"+a)
	}
	for _, e := range dev.EdnsIds {
		out = append(out, "e:"+e)
	}
	return out
}

func claimText(c string) string {
	return map[byte]string{'d': "device", 'l': "link", 'a': "dedicated address", 'e': "EDNS identity"}[c[0]] + " " + c[2:]
}

// checkDevice checks a device and brings it into the form that is stored.
func checkDevice(field string, dev *userv1.Device) (err error) {
	if err := checkID(field+".id", dev.Id); err != nil {
		return err
	}
	if err := checkText(field+".name", dev.Name, maxName); err != nil {
		return err
	}
	if dev.Links, err = canonicalAll(field+".links", dev.Links, maxLinks, canonicalLink); err != nil {
		return err
	}
	if dev.Dedicated, err = canonicalAll(field+".dedicated", dev.Dedicated, maxLinks, canonicalAddr); err != nil {
		return err
	}
	if dev.EdnsIds, err = canonicalAll(field+".edns_ids", dev.EdnsIds, maxLinks, canonicalEDNS); err != nil {
		return err
	}
	if dev.Tags, err = canonicalAll(field+".tags", dev.Tags, maxTags, canonicalTag); err != nil {
		return err
	}
	if len(dev.PasswordHashes) > maxPasswords {
		return invalid(field+".password_hashes", "are %d; at most %d", len(dev.PasswordHashes), maxPasswords)
	}
	for _, h := range dev.PasswordHashes {
		// Resolvers spend what a hash costs for whoever shows any password, so it is bounded here too.
		if _, err := password.Parse(h); err != nil {
			return invalid(field+".password_hashes", "one %v", err)
		}
	}
	for _, t := range dev.TokenSha256 {
		if len(t) != 32 {
			return invalid(field+".token_sha256", "has %d bytes; a SHA-256 has 32", len(t))
		}
	}
	return nil
}

// hashPassword makes a PHC string.
func hashPassword(text string) (string, error) {
	phc, err := password.New(text)
	if err != nil {
		return "", invalid("password", "%v", err)
	}
	return phc, nil
}

func showUser(id string, revision uint64, u *userv1.User) *adminv1.User {
	return &adminv1.User{Id: id, Revision: revision, Policy: u.Policy, Settings: u.Settings, Rules: u.Rules, Devices: u.Devices,
		Disabled: u.Disabled, Tenant: u.Tenant, Name: u.Name, Created: u.Created, AutoDevices: u.AutoDevices, MaxDevices: u.MaxDevices}
}

func showDevice(user string, revision uint64, dev *userv1.Device) *adminv1.Device {
	return &adminv1.Device{User: user, Revision: revision, Device: dev}
}

// read loads one record for showing.
func (s *Service) read(kind, id, what string, m proto.Message) (uint64, error) {
	if err := checkID("id", id); err != nil {
		return 0, err
	}
	key := id
	if kind == Catalogue {
		key = what + "/" + id
	}
	var revision uint64
	err := s.db.View(func(tx *bolt.Tx) error {
		r, b, ok, err := getRecord(tx, kind, []byte(key))
		if err != nil {
			return err
		}
		if !ok {
			return notFound(what, id)
		}
		revision = r
		return proto.Unmarshal(b, m)
	})
	return revision, reading(err)
}

// cond is err, or else otherwise: for conditions of the form `if err != nil || bad`.
func cond(err, otherwise error) error {
	if err != nil {
		return err
	}
	return otherwise
}
