// Package identify finds out which device sends a query, and so whose settings apply.
//
// The ways, strongest first: HTTP authentication, the DoH path, the TLS server name, an identity that a
// trusted relay put into EDNS, the destination address if it is dedicated to a device, the source address if
// it is linked to one, the listener's default device. The first that names a device decides; a weaker one
// never corrects it.
//
// A device id that is malformed, or unknown, over an encrypted transport is refused or treated as the
// operator says of strangers, and never taken for another user's. While the user data is not there
// (usercache.NotReady) or a user's record cannot be used, the cold policy answers; "anonymous, unfiltered"
// does not exist then.
//
// A device that has credentials proves itself over DoH by a token: the bearer token, or the password of Basic
// authentication, is compared by its SHA-256. Password hashes are not verified in this form: such a client is
// refused.
package identify

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"net/netip"
	"strings"

	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// A Directory knows the devices. usercache.Cache is one.
type Directory interface {
	LookupDevice(id *usercache.DeviceID, p *usercache.Profile) usercache.Status
	LookupSource(a netip.Addr, p *usercache.Profile) usercache.Status
	LookupDedicated(a netip.Addr, p *usercache.Profile) usercache.Status
	LookupEDNS(id []byte, p *usercache.Profile) usercache.Status
	Credentials(id *usercache.DeviceID) (usercache.Credentials, bool)
	// Policy fills in the profile of a shared policy, for clients that nobody identified.
	Policy(name string, p *usercache.Profile) bool
}

// What Options.Stranger and Options.WhenCold may be besides the name of a policy.
const (
	Refuse = "refuse"
	Serve  = "serve" // strangers alone
)

// Options are the operator's choices; see the configuration section "identify".
type Options struct {
	Directory Directory
	// ServerNames: in kid-1.NAME the device is kid-1. Lower case, without the final dot.
	ServerNames []string
	// Relays are networks whose EDNS device options are believed.
	Relays []netip.Prefix
	// Dedicated are destination addresses that belong to devices; one without a device gets no answer.
	Dedicated []netip.Prefix
	// DefaultDevice has the device of clients that nothing else identifies, by address asked.
	DefaultDevice map[netip.AddrPort]usercache.DeviceID
	// Stranger and WhenCold are Refuse, Serve (strangers alone), or the name of a shared policy. Empty means
	// Refuse.
	Stranger, WhenCold string
}

// An Identifier identifies clients. It is safe for concurrent use.
type Identifier struct {
	o        Options
	suffixes []string // "." + server name
}

// New returns an Identifier.
func New(o Options) *Identifier {
	i := &Identifier{o: o}
	for _, n := range o.ServerNames {
		i.suffixes = append(i.suffixes, "."+n)
	}
	return i
}

// Identify fills in q.Client, or says why the query must be refused.
func (i *Identifier) Identify(q *query.Query) query.RefuseReason {
	p := &q.Client.Profile
	status, named, ok := i.find(q, p)
	if !ok {
		return query.RefuseDevice
	}
	switch status {
	case usercache.Found:
		if !i.proven(q, p) {
			*p = usercache.Profile{}
			return query.RefuseDevice
		}
		q.Client.Kind = query.Identified
		return query.NotRefused
	case usercache.NotReady, usercache.Unusable:
		return i.unidentified(p, i.o.WhenCold, query.RefuseCold)
	case usercache.Unknown, usercache.Disabled:
	}
	if named {
		return i.unidentified(p, i.o.Stranger, query.RefuseDevice)
	}
	return i.unidentified(p, i.o.Stranger, query.RefuseStranger)
}

// unidentified applies the operator's choice for a client without settings of its own.
func (i *Identifier) unidentified(p *usercache.Profile, choice string, why query.RefuseReason) query.RefuseReason {
	switch choice {
	case "", Refuse:
		return why
	case Serve:
		return query.NotRefused
	}
	if !i.o.Directory.Policy(choice, p) {
		return query.RefuseCold // the policy is not there (yet): serving unfiltered would be worse
	}
	return query.NotRefused
}

// find looks the device up. named is true if the client itself named a device; ok is false if what it named
// is malformed or a dedicated address is nobody's.
func (i *Identifier) find(q *query.Query, p *usercache.Profile) (s usercache.Status, named, ok bool) {
	if q.Transport.Encrypted() {
		for _, name := range [...]string{q.AuthDevice, q.PathDevice, i.label(q.ServerName)} {
			if name == "" {
				continue
			}
			id, ok := usercache.ParseID(name)
			if !ok {
				return usercache.Unknown, true, false
			}
			return i.o.Directory.LookupDevice(&id, p), true, true
		}
	}
	src := q.Source.Addr()
	if q.EDNS.Device != nil && within(i.o.Relays, src) {
		var buf [query.MaxHint + 4]byte
		id, ok := ednsID(q, &buf)
		if !ok {
			return usercache.Unknown, true, false
		}
		return i.o.Directory.LookupEDNS(id, p), true, true
	}
	if len(i.o.Dedicated) > 0 && within(i.o.Dedicated, q.Local.Addr()) {
		s := i.o.Directory.LookupDedicated(q.Local.Addr(), p)
		return s, true, s != usercache.Unknown && s != usercache.Disabled
	}
	if s := i.o.Directory.LookupSource(src, p); s != usercache.Unknown {
		return s, false, true
	}
	if len(i.o.DefaultDevice) > 0 {
		if id, ok := i.o.DefaultDevice[q.Local]; ok {
			return i.o.Directory.LookupDevice(&id, p), false, true
		}
	}
	return usercache.Unknown, false, true
}

// label returns the device label of a TLS server name, "" if there is none.
func (i *Identifier) label(server string) string {
	for _, suffix := range i.suffixes {
		if l, ok := strings.CutSuffix(server, suffix); ok {
			return l
		}
	}
	return ""
}

// ednsID brings a relay's option into the form of the directory: 12 lower-case hex digits of a MAC address,
// or "cpe:" and the CPE-ID.
func ednsID(q *query.Query, buf *[query.MaxHint + 4]byte) ([]byte, bool) {
	v := q.EDNS.Device
	const hex = "0123456789abcdef"
	switch q.EDNS.DeviceCode {
	case dnswire.OptionMAC:
		if len(v) != 6 {
			return nil, false
		}
		for i, c := range v {
			buf[2*i], buf[2*i+1] = hex[c>>4], hex[c&15]
		}
		return buf[:12], true
	case dnswire.OptionMACText: // hex digits, with or without separators
		n := 0
		for _, c := range bytes.ToLower(v) {
			switch {
			case c == ':' || c == '-' || c == '.':
				continue
			case '0' <= c && c <= '9', 'a' <= c && c <= 'f':
			default:
				return nil, false
			}
			if n == 12 {
				return nil, false
			}
			buf[n] = c
			n++
		}
		return buf[:n], n == 12
	}
	return append(append(buf[:0], "cpe:"...), v...), true
}

// proven reports whether the client may be the device that it was found to be: one with credentials has to
// show them over DoH, and one that is DoH only has to come that way and show them.
func (i *Identifier) proven(q *query.Query, p *usercache.Profile) bool {
	if q.AuthSecret == "" {
		return !p.Is(usercache.DoHOnly) && !(p.Is(usercache.HasCredentials) && q.Transport == query.DoH)
	}
	if !p.Is(usercache.HasCredentials) {
		return false // a secret for a device that has none
	}
	creds, ok := i.o.Directory.Credentials(&p.DeviceID)
	if !ok {
		return false
	}
	sum := sha256.Sum256([]byte(q.AuthSecret))
	match := 0
	for _, t := range creds.Tokens {
		match |= subtle.ConstantTimeCompare(t[:], sum[:])
	}
	return match == 1
}

func within(ps []netip.Prefix, a netip.Addr) bool {
	a = a.Unmap()
	for i := range ps {
		if ps[i].Contains(a) {
			return true
		}
	}
	return false
}
