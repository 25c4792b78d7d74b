package usercache

import (
	"crypto/sha256"
	"math/bits"
	"net/netip"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"google.golang.org/protobuf/proto"
)

func trailing(w uint64) int { return bits.TrailingZeros64(w) }

// lay lays one Settings message over a profile, as far as it has a fixed size, and reports whether it says
// something beyond that. It must agree with newDetails on which fields those are.
func (c *Catalogue) lay(p *Profile, settings []byte) (details bool) {
	for {
		f, rest, ok := nextField(settings)
		if !ok {
			return details
		}
		settings = rest
		switch f.num {
		case 1:
			p.flag(Enabled, f.n)
		case 2:
			p.PausedUntil = int64(f.n)
		case 3:
			if f.n >= 1 && f.n <= 5 {
				p.Mode = BlockMode(f.n - 1) // both count in the same order
			}
		case 4:
			p.BlockTTL = uint32(f.n)
		case 5:
			p.BlockIPv4 = [4]byte{}
			if a, err := netip.ParseAddr(text(f.b)); err == nil && a.Is4() {
				p.BlockIPv4 = a.As4()
			}
		case 6:
			p.BlockIPv6 = [16]byte{}
			if a, err := netip.ParseAddr(text(f.b)); err == nil && a.Is6() {
				p.BlockIPv6 = a.As16()
			}
		case 7:
			layBits(p.Lists[:], f.b, c.listNumber)
		case 9:
			layBits(p.Services[:], f.b, c.serviceNumber)
		case 10:
			layBits(p.Categories[:], f.b, c.categoryNumber)
		case 11:
			p.flag(SafeBrowsing, f.n)
		case 12:
			p.flag(Adult, f.n)
		case 13:
			var one [1]uint64
			one[0] = p.SafeSearch
			layBits(one[:], f.b, c.engineNumber)
			p.SafeSearch = one[0]
		case 8, 14, 15, 16, 17, 18, 21, 28, 29, 30:
			details = true
		case 19:
			p.flag(RebindingProtection, f.n)
		case 20:
			p.flag(BlockHTTPSRecords, f.n)
		case 22:
			p.flag(BlockBypass, f.n)
		case 23:
			switch f.n {
			case 1:
				p.Log = LogNone
			case 2:
				p.Log = LogCounters
			case 3:
				p.Log = LogNoClient
			case 4:
				p.Log = LogFull
			}
		case 24:
			p.LogRetention = uint32(f.n)
		case 25:
			p.RateLimit = uint32(f.n)
		case 26:
			p.RateBurst = uint32(f.n)
		case 27:
			p.flag(ECS, f.n)
		case 31:
			p.flag(BlockFirefoxCanary, f.n)
		case 32:
			p.flag(BlockPrivateRelay, f.n)
		}
	}
}

// setsRate is 1 if a Settings message has a rate_limit.
func setsRate(settings []byte) uint64 {
	for {
		f, rest, ok := nextField(settings)
		if !ok {
			return 0
		}
		if settings = rest; f.num == 25 {
			return 1
		}
	}
}

func (p *Profile) flag(f Flags, v uint64) {
	p.Flags &^= f
	if v != 0 {
		p.Flags |= f
	}
}

// layBits lays a StringSet over a bit set. Names without a number are of something that is gone, or not yet
// here: they say nothing.
func layBits(set []uint64, b []byte, number map[string]int) {
	// The parts may come in any order: first replace, then values, then removed.
	for pass := uint32(1); pass <= 3; pass++ {
		for rest := b; ; {
			f, next, ok := nextField(rest)
			if !ok {
				break
			}
			rest = next
			if f.num != pass {
				continue
			}
			switch f.num {
			case 1:
				if f.n != 0 {
					clear(set)
				}
			case 2:
				if n, ok := number[text(f.b)]; ok {
					bitAdd(set, n)
				}
			case 3:
				if n, ok := number[text(f.b)]; ok {
					bitRemove(set, n)
				}
			}
		}
	}
}

// resolve lays device over user over policy over defaults. It reports the status, and whether the device or
// the user says something that needs Details of their own; p.Details is then the policy's.
func (c *Catalogue) resolve(p *Profile, user, device []byte) (s Status, details bool) {
	pol := &c.defaults
	var settings []byte
	disabled := false
	for b := user; ; {
		f, rest, ok := nextField(b)
		if !ok {
			break
		}
		b = rest
		switch f.num {
		case 1:
			if len(f.b) == 0 {
				pol = &c.defaults
			} else if pol = c.policies[text(f.b)]; pol == nil {
				return Unusable, false
			}
		case 2:
			settings = f.b
		case 3:
			details = details || len(f.b) > 0
		case 5:
			disabled = f.n != 0
		}
	}
	if disabled {
		return Disabled, false
	}
	*p = pol.profile
	if settings != nil && c.lay(p, settings) {
		details = true
	}
	for b := device; ; {
		f, rest, ok := nextField(b)
		if !ok {
			break
		}
		b = rest
		switch f.num {
		case 1:
			p.DeviceID, _ = ParseID(f.b)
		case 2:
			details = details || pol.asksNames && len(f.b) > 0
		case 6, 7:
			p.Flags |= HasCredentials
		case 8:
			p.flag(DoHOnly, f.n)
		case 9:
			if c.lay(p, f.b) {
				details = true
			}
			p.flag(DeviceRate, setsRate(f.b))
		case 10, 11:
			details = details || len(f.b) > 0
		}
	}
	cats := c.allCategories(p)
	if cats == pol.all {
		p.Lists.AddAll(&pol.lists)
		p.Threats.AddAll(&pol.threats)
	} else {
		c.expand(&cats, &p.Lists, &p.Threats)
	}
	p.Categories = cats
	return Found, details
}

// detailsOf merges the Details of a device whose layers have some. It allocates; its result is cached.
func (c *Catalogue) detailsOf(user, device []byte) *Details {
	var u userv1.User
	var d userv1.Device
	// Both were checked when they came; if the two readers of protobuf disagree, what cannot be read says
	// nothing.
	_ = proto.Unmarshal(user, &u)
	_ = proto.Unmarshal(device, &d)
	layers := [3]layer{
		deviceLayer: {settings: d.Settings, rules: d.Rules, tags: d.Tags, name: d.Name},
		userLayer:   {settings: u.Settings, rules: u.Rules},
	}
	if pol := c.policies[u.Policy]; pol != nil {
		layers[policyLayer] = layer{settings: pol.message.Settings, rules: pol.message.Rules, name: u.Policy}
		if pol.profile.Details != nil {
			return c.newDetails(&layers, &pol.profile.Details.PolicyRules)
		}
	}
	return c.newDetails(&layers, nil)
}

func ruleTextOf(m *userv1.Rules) RuleText {
	switch body := m.GetBody().(type) {
	case *userv1.Rules_Text:
		if len(body.Text) > 0 {
			return RuleText{SHA256: sha256.Sum256(body.Text), Size: uint64(len(body.Text))}
		}
	case *userv1.Rules_Sha256:
		if len(body.Sha256) == 32 && m.Size > 0 {
			return RuleText{SHA256: [32]byte(body.Sha256), Size: m.Size, Blob: true}
		}
	}
	return RuleText{}
}
