package usercache

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// Limits of a user's record, as proto/user/v1 states them.
const (
	maxDevices   = 256
	maxName      = 255
	maxRuleText  = 32 << 10
	maxTags      = 16
	maxBlockTTL  = 86400
	maxWindows   = 32
	maxV6Link    = 64
	ednsMACLen   = 12
	ednsCPE      = "cpe:"
	maxEDNSIDLen = 255
)

// A claim is a key by which a device is found: an id, an address, a network.
type claim struct {
	hash uint64
	// link tells a network's family and length (linkV4 or linkV6 plus the length), for the table of
	// lengths in use; zero for other claims.
	link uint8
}

const (
	linkV4 = 0x40 // + 0…32
	linkV6 = 0x80 // + 0…64
)

// Kinds of claims, first byte of what is hashed.
const (
	claimDevice    = 1
	claimEDNS      = 2
	claimDedicated = 3
	claimLink      = 4
)

// userFacts is what the index needs to know of a user's record.
type userFacts struct {
	claims  []claim
	devices int
	enabled bool
}

// readUser checks a User and appends its claims to facts.claims. The error says what a binary of this
// version cannot accept; the claims found before it are there nevertheless, so that a user who is known but
// unusable is not taken for a stranger.
func (x *userIndex) readUser(b []byte, facts *userFacts) error {
	facts.claims, facts.devices, facts.enabled = facts.claims[:0], 0, true
	disabled := false
	var bad error
	fault := func(err error) {
		if bad == nil && err != nil {
			bad = err
		}
	}
	for {
		f, rest, ok := nextField(b)
		if !ok {
			if len(rest) != 0 {
				fault(errBroken)
			}
			break
		}
		b = rest
		switch f.num {
		case 1, 6: // policy, tenant
			if !f.isText() {
				fault(fmt.Errorf("field %d of the user is no text", f.num))
			}
		case 7: // name
			if !f.isText() || len(f.b) > maxName {
				fault(errors.New("name is no text of at most 255 bytes"))
			}
		case 2: // settings
			on, err := checkSettings(f)
			if on != unset {
				facts.enabled = on == yes
			}
			fault(err)
		case 3: // rules
			fault(checkRules(f))
		case 4: // devices
			if !f.isBytes() {
				fault(errors.New("a device is no message"))
				continue
			}
			if facts.devices++; facts.devices > maxDevices {
				fault(fmt.Errorf("more than %d devices", maxDevices))
				continue
			}
			fault(x.readDevice(f.b, facts))
		case 5: // disabled
			if f.wire != wireVarint {
				fault(errors.New("disabled is no boolean"))
			}
			disabled = f.n != 0
		case 8, 9, 10:
			if f.wire != wireVarint {
				fault(fmt.Errorf("field %d of the user is no number", f.num))
			}
		}
	}
	facts.enabled = facts.enabled && !disabled
	return bad
}

var errBroken = errors.New("the bytes are no protobuf message")

func (x *userIndex) readDevice(b []byte, facts *userFacts) error {
	var bad error
	fault := func(err error) {
		if bad == nil && err != nil {
			bad = err
		}
	}
	hasID, tags := false, 0
	for {
		f, rest, ok := nextField(b)
		if !ok {
			if len(rest) != 0 {
				fault(errBroken)
			}
			break
		}
		b = rest
		switch f.num {
		case 1: // id
			id, ok := ParseID(f.b)
			if !ok || !f.isBytes() {
				fault(fmt.Errorf("device id %q is not 1-63 of a-z 0-9 -", clip(f.b)))
				continue
			}
			hasID = true
			facts.claims = append(facts.claims, claim{hash: x.hash(claimDevice, id.Bytes())})
		case 2: // name
			if !f.isText() || len(f.b) > maxName {
				fault(errors.New("a device's name is no text of at most 255 bytes"))
			}
		case 3: // links
			p, err := parseLink(f)
			if err != nil {
				fault(err)
				continue
			}
			facts.claims = append(facts.claims, x.linkClaim(p))
		case 4: // dedicated
			a, err := parseAddr(f)
			if err != nil {
				fault(fmt.Errorf("dedicated address %q: %w", clip(f.b), err))
				continue
			}
			facts.claims = append(facts.claims, claim{hash: x.hashAddr(claimDedicated, a, 0)})
		case 5: // edns_ids
			if !validEDNSID(f) {
				fault(fmt.Errorf("EDNS id %q is neither a MAC address of 12 lower-case hex digits nor begins with %q", clip(f.b), ednsCPE))
				continue
			}
			facts.claims = append(facts.claims, claim{hash: x.hash(claimEDNS, f.b)})
		case 6: // password_hashes
			if !f.isText() {
				fault(errors.New("a password hash is no text"))
			}
		case 7: // token_sha256
			if !f.isBytes() || len(f.b) != 32 {
				fault(errors.New("a token's hash is not of 32 bytes"))
			}
		case 8, 12, 13:
			if f.wire != wireVarint {
				fault(fmt.Errorf("field %d of a device is no number", f.num))
			}
		case 9: // settings
			_, err := checkSettings(f)
			fault(err)
		case 10: // rules
			fault(checkRules(f))
		case 11: // tags
			if tags++; tags > maxTags || !f.isText() {
				fault(fmt.Errorf("tags are no texts, or more than %d", maxTags))
			}
		}
	}
	if !hasID {
		fault(errors.New("a device has no id"))
	}
	return bad
}

// A tristate is the value of an optional boolean.
type tristate uint8

const (
	unset tristate = iota
	no
	yes
)

// checkSettings checks one layer of settings, and returns the value of its field enabled.
func checkSettings(f field) (enabled tristate, err error) {
	if !f.isBytes() {
		return unset, errors.New("settings are no message")
	}
	for b := f.b; ; {
		f, rest, ok := nextField(b)
		if !ok {
			if len(rest) != 0 {
				return enabled, fmt.Errorf("settings: %w", errBroken)
			}
			return enabled, nil
		}
		b = rest
		switch f.num {
		case 1:
			if f.wire != wireVarint {
				return enabled, errors.New("settings: enabled is no boolean")
			}
			enabled = no
			if f.n != 0 {
				enabled = yes
			}
		case 3: // mode
			if f.wire != wireVarint || f.n > 5 {
				return enabled, fmt.Errorf("settings: block mode %d is unknown to this version", f.n)
			}
		case 4: // block_ttl
			if f.wire != wireVarint || f.n > maxBlockTTL {
				return enabled, fmt.Errorf("settings: block_ttl %d is more than %d", f.n, maxBlockTTL)
			}
		case 5, 6: // block_ipv4, block_ipv6
			if !f.isBytes() {
				return enabled, errors.New("settings: a blocking address is no text")
			}
			if len(f.b) == 0 {
				continue
			}
			if a, err := parseAddr(f); err != nil || a.Is4() != (f.num == 5) {
				return enabled, fmt.Errorf("settings: blocking address %q is not of its family", clip(f.b))
			}
		case 7, 9, 10, 13, 21, 28, 29, 30:
			if err := checkStringSet(f, nil); err != nil {
				return enabled, err
			}
		case 17, 18: // networks
			if err := checkStringSet(f, checkNetwork); err != nil {
				return enabled, err
			}
		case 8, 14, 15, 16:
			// Sets of messages. They are rare, so the protobuf library may do the work; see checkSet.
			if !f.isBytes() {
				return enabled, fmt.Errorf("settings: field %d is no message", f.num)
			}
			if err := checkSet(f.num, f.b); err != nil {
				return enabled, err
			}
		case 23: // log
			if f.wire != wireVarint || f.n > 4 {
				return enabled, fmt.Errorf("settings: log privacy %d is unknown to this version", f.n)
			}
		case 2, 11, 12, 19, 20, 22, 24, 25, 26, 27, 31, 32:
			if f.wire != wireVarint {
				return enabled, fmt.Errorf("settings: field %d is no number", f.num)
			}
		}
	}
}

// checkStringSet checks a StringSet, and each value added by check.
func checkStringSet(f field, check func([]byte) error) error {
	if !f.isBytes() {
		return fmt.Errorf("settings: field %d is no set", f.num)
	}
	for b := f.b; ; {
		g, rest, ok := nextField(b)
		if !ok {
			if len(rest) != 0 {
				return fmt.Errorf("settings: field %d: %w", f.num, errBroken)
			}
			return nil
		}
		b = rest
		switch g.num {
		case 1:
			if g.wire != wireVarint {
				return fmt.Errorf("settings: replace of field %d is no boolean", f.num)
			}
		case 2, 3:
			if !g.isText() {
				return fmt.Errorf("settings: a value of field %d is no text", f.num)
			}
			if g.num == 2 && check != nil {
				if err := check(g.b); err != nil {
					return err
				}
			}
		}
	}
}

func checkNetwork(b []byte) error {
	if _, err := parsePrefix(text(b)); err != nil {
		return fmt.Errorf("settings: network %q is none", clip(b))
	}
	return nil
}

// checkRules checks a Rules message.
func checkRules(f field) error {
	if !f.isBytes() {
		return errors.New("rules are no message")
	}
	for b := f.b; ; {
		g, rest, ok := nextField(b)
		if !ok {
			if len(rest) != 0 {
				return fmt.Errorf("rules: %w", errBroken)
			}
			return nil
		}
		b = rest
		switch g.num {
		case 1:
			if !g.isBytes() || len(g.b) > maxRuleText {
				return fmt.Errorf("rules: the text is longer than %d bytes", maxRuleText)
			}
		case 2:
			if !g.isBytes() || len(g.b) != 32 {
				return errors.New("rules: the hash of the text is not of 32 bytes")
			}
		case 3, 4:
			if g.wire != wireVarint {
				return fmt.Errorf("rules: field %d is no number", g.num)
			}
		}
	}
}

// parseAddr returns an address in text, without zone and never as IPv4 inside IPv6.
func parseAddr(f field) (netip.Addr, error) {
	if !f.isBytes() || len(f.b) > 64 {
		return netip.Addr{}, errNoAddr
	}
	a, err := netip.ParseAddr(text(f.b))
	if err != nil || a.Zone() != "" {
		return netip.Addr{}, errNoAddr // err refers to the record's memory
	}
	return a.Unmap(), nil
}

var errNoAddr = errors.New("no address")

// parsePrefix returns an address or network in text as a masked network.
func parsePrefix(s string) (netip.Prefix, error) {
	if len(s) > 64 {
		return netip.Prefix{}, errNoAddr
	}
	if strings.IndexByte(s, '/') < 0 {
		a, err := netip.ParseAddr(s)
		if err != nil || a.Zone() != "" {
			return netip.Prefix{}, errNoAddr
		}
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, errNoAddr
	}
	if p.Addr().Is4In6() {
		if p.Bits() < 96 {
			return netip.Prefix{}, errNoAddr
		}
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p.Masked(), nil
}

// parseLink returns the network of a device's link. A single IPv6 address, or a network longer than /64,
// stands for its /64: hosts change addresses within it as they please.
func parseLink(f field) (netip.Prefix, error) {
	if f.isBytes() {
		if p, err := parsePrefix(text(f.b)); err == nil {
			if p.Addr().Is6() && p.Bits() > maxV6Link {
				p = netip.PrefixFrom(p.Addr(), maxV6Link).Masked()
			}
			return p, nil
		}
	}
	return netip.Prefix{}, fmt.Errorf("link %q is no address or network", clip(f.b))
}

func validEDNSID(f field) bool {
	if !f.isText() || len(f.b) > maxEDNSIDLen {
		return false
	}
	if len(f.b) > len(ednsCPE) && string(f.b[:len(ednsCPE)]) == ednsCPE {
		return true
	}
	if len(f.b) != ednsMACLen {
		return false
	}
	for _, c := range f.b {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// clip shortens what an error quotes, and copies it out of the record.
func clip(b []byte) string {
	if len(b) > 80 {
		return string(b[:80]) + "…"
	}
	return string(b)
}
