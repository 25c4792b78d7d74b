package usercache

import (
	"crypto/sha256"
	"math/bits"
	"net/netip"
	"slices"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/usercache/internal/store"
	"google.golang.org/protobuf/proto"
)

// LookupDevice finds the device with an id and fills in p, which means nothing unless the status is Found. It
// takes no lock and allocates nothing, except when a device has Details that are not cached.
func (c *Cache) LookupDevice(id *DeviceID, p *Profile) Status {
	if id.IsZero() {
		return Unknown
	}
	x := c.users.users
	m := match{kind: claimDevice, id: id.Bytes()}
	return c.lookup(x.hash(claimDevice, m.id), &m, p)
}

// LookupSource finds the device linked to a source address: the longest linked network that holds it.
func (c *Cache) LookupSource(addr netip.Addr, p *Profile) Status {
	return c.lookupLinks(addr, 128, p)
}

// LookupSubnet finds the device linked to the longest network that holds all of n.
func (c *Cache) LookupSubnet(n netip.Prefix, p *Profile) Status {
	bits := n.Bits()
	if n.Addr().Is4In6() {
		bits -= 96
	}
	return c.lookupLinks(n.Addr(), bits, p)
}

func (c *Cache) lookupLinks(addr netip.Addr, longest int, p *Profile) Status {
	seq := c.users.seq.Load()
	s, sure := c.lookupSource(addr, longest, p)
	if !sure && c.users.moved(seq) {
		c.users.mu.RLock()
		s, _ = c.lookupSource(addr, longest, p)
		c.users.mu.RUnlock()
	}
	return c.absent(s)
}

// lookupSource considers links that are not longer than longest. It also reports whether the first length tried gave the result. Otherwise a batch under way may
// have hidden a longer link that is moving from one user to another.
func (c *Cache) lookupSource(addr netip.Addr, longest int, p *Profile) (s Status, sure bool) {
	x := c.users.users
	addr = addr.Unmap().WithZone("")
	sure = true
	if addr.Is4() {
		for w := x.v4Lengths.Load() & upTo(longest); w != 0; sure = false {
			n := 63 - bits.LeadingZeros64(w)
			w &^= 1 << n
			if s = c.lookupLink(addr, n, p); s != Unknown {
				return s, sure
			}
		}
		return Unknown, false
	}
	for i := 1; i >= 0; i-- {
		for w := x.v6Lengths[i].Load() & upTo(longest-i*64); w != 0; sure = false {
			n := 63 - bits.LeadingZeros64(w)
			w &^= 1 << n
			if s = c.lookupLink(addr, i*64+n, p); s != Unknown {
				return s, sure
			}
		}
	}
	return Unknown, false
}

// upTo has the bits 0 to n.
func upTo(n int) uint64 {
	switch {
	case n < 0:
		return 0
	case n >= 63:
		return ^uint64(0)
	}
	return 1<<(n+1) - 1
}

func (c *Cache) lookupLink(addr netip.Addr, bits int, p *Profile) Status {
	link, err := addr.Prefix(bits)
	if err != nil {
		return Unknown // not an address
	}
	m := match{kind: claimLink, link: link}
	return c.lookupOnce(c.users.users.linkClaim(link).hash, &m, p)
}

// LookupDedicated finds the device to which a destination address belongs.
func (c *Cache) LookupDedicated(addr netip.Addr, p *Profile) Status {
	m := match{kind: claimDedicated, addr: addr.Unmap().WithZone("")}
	if !m.addr.IsValid() {
		return Unknown
	}
	return c.lookup(c.users.users.hashAddr(claimDedicated, m.addr, 0), &m, p)
}

// LookupEDNS finds the device with an identity that a relay sent: 12 lower-case hex digits of a MAC address,
// or "cpe:" and a CPE-ID.
func (c *Cache) LookupEDNS(id []byte, p *Profile) Status {
	if len(id) == 0 || len(id) > maxEDNSIDLen {
		return Unknown
	}
	m := match{kind: claimEDNS, id: id}
	return c.lookup(c.users.users.hash(claimEDNS, id), &m, p)
}

func (c *Cache) lookup(hash uint64, m *match, p *Profile) Status {
	seq := c.users.seq.Load()
	s := c.lookupOnce(hash, m, p)
	if s == Unknown && c.users.moved(seq) {
		// A batch is under way, in the middle of which a device may have left one user and not yet reached
		// the next.
		c.users.mu.RLock()
		s = c.lookupOnce(hash, m, p)
		c.users.mu.RUnlock()
	}
	return c.absent(s)
}

// moved reports whether a batch was under way when seq was read, or has begun since.
func (d *Dataset) moved(seq uint64) bool { return seq&1 != 0 || d.seq.Load() != seq }

// absent tells apart nobody and nobody yet.
func (c *Cache) absent(s Status) Status {
	if s == Unknown && !c.users.whole.Load() {
		return NotReady
	}
	return s
}

func (c *Cache) lookupOnce(hash uint64, m *match, p *Profile) Status {
	x := c.users.users
	cat, version := c.catalogue.Load(), x.versions[hash>>56].Load()
	stamp := profileStamp{hash: hash, catalogue: cat.serial, version: version}
	if c.profiles.get(&stamp, c.users.store, p) && (m.kind != claimDevice || string(p.DeviceID.Bytes()) == string(m.id)) {
		return Found
	}
	r, device, ordinal, alone, ok := x.find(hash, m)
	if !ok {
		return Unknown
	}
	s := c.profile(cat, &r, device, ordinal, p)
	if s == Found && alone {
		stamp.record = r.Stamp
		c.profiles.put(&stamp, p)
	}
	r.Release()
	return s
}

// profile resolves a device of a user's record.
func (c *Cache) profile(cat *Catalogue, r *store.Record, device []byte, ordinal uint32, p *Profile) Status {
	if r.Flags&flagUnusable != 0 {
		return Unusable
	}
	s, details := cat.resolve(p, r.Bytes, device)
	if s != Found {
		return s
	}
	p.UserID, _ = ParseID(r.Key)
	p.User, p.Revision = ordinal, r.Revision
	if details {
		p.Details = c.details.get(cat, r, device, p)
	}
	return Found
}

// RuleText returns a text of rules that the profile's Details name and that is no blob. It reports false if
// the record has changed meanwhile: then the next lookup names another text.
func (c *Cache) RuleText(p *Profile, t RuleText) ([]byte, bool) {
	if cat := c.catalogue.Load(); p.Details != nil && t == p.Details.PolicyRules {
		for _, pol := range cat.policies {
			if text := pol.message.GetRules().GetText(); len(text) == int(t.Size) && sha256.Sum256(text) == t.SHA256 {
				return text, true
			}
		}
	}
	r, ok := c.users.store.Serving(p.User)
	defer r.Release()
	if !ok || string(r.Key) != string(p.UserID.Bytes()) {
		return nil, false
	}
	find := func(f field) []byte {
		for b := f.b; ; {
			g, rest, ok := nextField(b)
			if !ok {
				return nil
			}
			if b = rest; g.num == 1 && uint64(len(g.b)) == t.Size && sha256.Sum256(g.b) == t.SHA256 {
				return slices.Clone(g.b)
			}
		}
	}
	for b := r.Bytes; ; {
		f, rest, ok := nextField(b)
		if !ok {
			return nil, false
		}
		b = rest
		switch f.num {
		case 3:
			if text := find(f); text != nil {
				return text, true
			}
		case 4:
			for b := f.b; ; {
				g, rest, ok := nextField(b)
				if !ok {
					break
				}
				if b = rest; g.num == 10 {
					if text := find(g); text != nil {
						return text, true
					}
				}
			}
		}
	}
}

// Credentials are what proves to be a device over DoH.
type Credentials struct {
	PasswordHashes []string   // PHC strings
	Tokens         [][32]byte // SHA-256 of bearer tokens
}

// Credentials returns those of a device. It reports false if there is no such device.
func (c *Cache) Credentials(id *DeviceID) (Credentials, bool) {
	m := match{kind: claimDevice, id: id.Bytes()}
	c.users.mu.RLock()
	defer c.users.mu.RUnlock()
	r, device, _, _, ok := c.users.users.find(c.users.users.hash(claimDevice, m.id), &m)
	defer r.Release()
	if !ok {
		return Credentials{}, false
	}
	var creds Credentials
	for {
		f, rest, ok := nextField(device)
		if !ok {
			return creds, true
		}
		device = rest
		switch {
		case f.num == 6 && f.isText():
			creds.PasswordHashes = append(creds.PasswordHashes, string(f.b))
		case f.num == 7 && len(f.b) == 32:
			creds.Tokens = append(creds.Tokens, [32]byte(f.b))
		}
	}
}

// AutoUser returns the user for whom a device of this id, which does not exist, may be made: its id and a hyphen
// are what the device's id begins with, it has automatic devices, and it may have one more. Of several such users
// the one with the longest id is meant, whether it has automatic devices or not.
func (c *Cache) AutoUser(device *DeviceID) (user ID, ok bool) {
	for n := int(device.n) - 2; n > 0; n-- {
		if device.b[n] != '-' {
			continue
		}
		c.users.mu.RLock()
		ordinal, there := c.users.store.FindServing(device.b[:n])
		r, serving := c.users.store.Serving(ordinal)
		c.users.mu.RUnlock()
		if there && serving {
			user, _ = ParseID(r.Key)
			ok = r.Flags&flagUnusable == 0 && takesDevice(r.Bytes)
			r.Release()
			return user, ok
		}
		r.Release()
	}
	return ID{}, false
}

// takesDevice reports whether a user may get one more device by itself.
func takesDevice(user []byte) bool {
	auto, disabled, devices, most := false, false, 0, maxDevices
	for {
		f, rest, ok := nextField(user)
		if !ok {
			return auto && !disabled && devices < most
		}
		user = rest
		switch f.num {
		case 4:
			devices++
		case 5:
			disabled = f.n != 0
		case 9:
			auto = f.n != 0
		case 10:
			if most = maxDevices; f.n != 0 {
				most = int(min(f.n, maxDevices))
			}
		}
	}
}

// A UserInfo is what is known of a user beyond its settings.
type UserInfo struct {
	ID          ID
	Revision    uint64
	Policy      string
	Tenant      string
	Name        string
	Disabled    bool
	AutoDevices bool // a resolver may propose new devices of the form USER-NAME
	MaxDevices  int
	Devices     []DeviceID
	Usable      bool
}

// LookupUser returns what is known of a user, from the serving view.
func (c *Cache) LookupUser(id *ID) (UserInfo, bool) {
	c.users.mu.RLock()
	ordinal, ok := c.users.store.FindServing(id.Bytes())
	r, there := c.users.store.Serving(ordinal)
	c.users.mu.RUnlock()
	defer r.Release()
	if !ok || !there {
		return UserInfo{}, false
	}
	info := UserInfo{ID: *id, Revision: r.Revision, Usable: r.Flags&flagUnusable == 0}
	var m userv1.User
	if err := proto.Unmarshal(r.Bytes, &m); err != nil {
		return info, true // then it is not usable either
	}
	info.Policy, info.Tenant, info.Name = m.Policy, m.Tenant, m.Name
	info.Disabled, info.AutoDevices, info.MaxDevices = m.Disabled, m.AutoDevices, int(m.MaxDevices)
	if info.MaxDevices == 0 {
		info.MaxDevices = maxDevices
	}
	for _, d := range m.Devices {
		if id, ok := ParseID(d.GetId()); ok {
			info.Devices = append(info.Devices, id)
		}
	}
	return info, true
}
