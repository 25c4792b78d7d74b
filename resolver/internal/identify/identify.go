// Package identify finds out which device sends a query, and so whose settings apply.
//
// The ways, strongest first; the first that names a device decides, and a weaker one never corrects it:
//
//	HTTP authentication          DoH: the user of Basic authentication
//	the DoH path                 /dns-query/DEVICE
//	the TLS server name          DoT, DoH, DoQ: DEVICE.NAME for each NAME of Options.ServerNames
//	EDNS options of a relay      a MAC address (65001 raw; 65073 as text or base64, as dnsmasq sends it), then a
//	                             CPE-ID (65074)
//	the destination address      if it is dedicated to a device
//	client subnet of a relay     the longest linked network that holds all of it (RFC 7871)
//	the source address           the longest linked network that holds it
//	the listener                 its default device
//
// EDNS options and client subnets are believed from Options.Relays alone. Of two options of a relay the CPE-ID
// counts if nobody has the MAC address: the line is known before the telephone on it is.
//
// Ids are case-insensitive. A device id that is malformed, or unknown, over an encrypted transport is refused
// or treated as the operator says of strangers, and never taken for another user's; query.Client.Misnamed tells that
// somebody is who seems to have meant to be known. A dedicated address without a device gets no answer. While the user data is not there (usercache.NotReady) or a user's record cannot be
// used, the cold policy answers; "anonymous, unfiltered" does not exist then.
//
// An unknown id with a hyphen may be that of a device to be made, if its user has automatic devices: it is given
// to Options.Propose, and the client stays a stranger until the device exists and has come here with the user's
// record. Its query is not answered by the user's settings meanwhile: whether there may be one more device is
// the service's to say, and an id that never becomes a device would be served for ever.
//
// A device that has credentials proves itself over DoH by a secret: a bearer token, compared by its SHA-256, or
// the password of Basic authentication, verified by its argon2id hash (package password). One that is DoH-only
// is identified in no other way. A user name without a password, and a password for a device that has none, are
// refused. What a password hash costs is spent where a query may wait (Prove), by few at a time, and remembered:
// see prover.
package identify

import (
	"cmp"
	"context"
	"encoding/base64"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// A Directory knows the devices. usercache.Cache is one.
type Directory interface {
	LookupDevice(id *usercache.DeviceID, p *usercache.Profile) usercache.Status
	LookupSource(a netip.Addr, p *usercache.Profile) usercache.Status
	// LookupSubnet finds the device linked to the longest network that holds all of n.
	LookupSubnet(n netip.Prefix, p *usercache.Profile) usercache.Status
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
	// ServerNames: in kid-1.NAME the device is kid-1. Without the final dot. NAME itself identifies nobody.
	ServerNames []string
	// Relays are networks whose EDNS device options and client subnets are believed.
	Relays []netip.Prefix
	// Dedicated are destination addresses that belong to devices; one without a device gets no answer.
	Dedicated []netip.Prefix
	// DefaultDevice has the device of clients that nothing else identifies, by address asked.
	DefaultDevice map[netip.AddrPort]usercache.DeviceID
	// Stranger and WhenCold are Refuse, Serve (strangers alone), or the name of a shared policy. Empty means
	// Refuse.
	Stranger, WhenCold string
	// Propose is told of unknown ids that may be of devices to be made. It must neither wait nor keep the
	// pointer. Nil: nobody is.
	Propose func(id *usercache.DeviceID)
	// Verifying is how many passwords may be verified at once. Zero means one.
	Verifying int
}

// An Identifier identifies clients. It is safe for concurrent use.
type Identifier struct {
	o      Options
	names  []string // of servers
	prover prover
}

// New returns an Identifier.
func New(o Options) *Identifier {
	i := &Identifier{o: o}
	for _, n := range o.ServerNames {
		i.names = append(i.names, strings.ToLower(n))
	}
	// Of two names of which one ends in the other the longer one is meant.
	slices.SortStableFunc(i.names, func(a, b string) int { return cmp.Compare(len(b), len(a)) })
	i.prover.init(o.Directory, o.Verifying)
	return i
}

// Identify fills in q.Client, or says why the query must be refused. After query.Unproven, which is no refusal,
// Prove is to be called and then Identify again.
func (i *Identifier) Identify(q *query.Query) query.RefuseReason {
	p := &q.Client.Profile
	f := i.find(q, p)
	q.Client.Misnamed = f.byID && (f.status == usercache.Unknown || f.status == usercache.Disabled)
	switch {
	case f.malformed:
		return query.RefuseDevice
	case f.dedicated && (f.status == usercache.Unknown || f.status == usercache.Disabled):
		return query.RefuseDedicated
	}
	switch f.status {
	case usercache.Found:
		if why := i.proven(q, p); why != query.NotRefused {
			*p = usercache.Profile{}
			return why
		}
		q.Client.Kind = query.Identified
		return query.NotRefused
	case usercache.NotReady, usercache.Unusable:
		return i.unidentified(p, i.o.WhenCold, query.RefuseCold)
	case usercache.Unknown, usercache.Disabled:
	}
	if f.named {
		return i.unidentified(p, i.o.Stranger, query.RefuseDevice)
	}
	return i.unidentified(p, i.o.Stranger, query.RefuseStranger)
}

// Unassigned reports whether the address asked is one that belongs to devices and has none, so that nobody is there to
// answer.
func (i *Identifier) Unassigned(q *query.Query) bool {
	if len(i.o.Dedicated) == 0 || !within(i.o.Dedicated, q.Local.Addr()) {
		return false
	}
	var p usercache.Profile
	s := i.o.Directory.LookupDedicated(q.Local.Addr(), &p)
	return s == usercache.Unknown || s == usercache.Disabled
}

// Prove verifies the password of a query that Identify called unproven, and says in q.Proof what came of it. It
// may take as long as ctx lasts.
func (i *Identifier) Prove(ctx context.Context, q *query.Query) {
	var p usercache.Profile
	if f := i.find(q, &p); f.malformed || f.status != usercache.Found {
		q.Proof = query.ProofFailed // it has changed meanwhile; Identify may not call it unproven again
		return
	}
	q.Proof = i.prover.prove(ctx, &p, q.AuthSecret, q.Source.Addr())
}

// unidentified applies the operator's choice for a client without settings of its own.
func (i *Identifier) unidentified(p *usercache.Profile, choice string, why query.RefuseReason) query.RefuseReason {
	*p = usercache.Profile{} // a lookup that found nothing may have written to it
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

// A finding is what looking for the device came to.
type finding struct {
	status    usercache.Status
	named     bool // the client, or a relay, named a device
	byID      bool // by its id
	malformed bool // what it named can be no device's
	dedicated bool // the address asked belongs to devices
}

// find looks the device up.
func (i *Identifier) find(q *query.Query, p *usercache.Profile) finding {
	space := q.Scratch
	if space == nil {
		space = new(query.Scratch)
	}
	if q.Transport.Encrypted() {
		for _, name := range [...]string{q.AuthDevice, q.PathDevice, i.label(q.ServerName)} {
			if name == "" {
				continue
			}
			id, ok := &space.Device, false
			if *id, ok = usercache.ParseID(name); !ok {
				return finding{named: true, malformed: true}
			}
			s := i.o.Directory.LookupDevice(id, p)
			// A device that is yet to be made has no password, so there is none to show.
			if s == usercache.Unknown && i.o.Propose != nil && q.AuthDevice == "" && q.AuthSecret == "" && strings.IndexByte(name, '-') > 0 {
				i.o.Propose(id)
			}
			return finding{status: s, named: true, byID: true}
		}
	}
	src := q.Source.Addr()
	relayed := (q.EDNS.MAC != nil || q.EDNS.CPE != nil || q.EDNS.HasSubnet) && within(i.o.Relays, src)
	if relayed && (q.EDNS.MAC != nil || q.EDNS.CPE != nil) {
		return i.findEDNS(&q.EDNS, &space.Hint, p)
	}
	if len(i.o.Dedicated) > 0 && within(i.o.Dedicated, q.Local.Addr()) {
		return finding{status: i.o.Directory.LookupDedicated(q.Local.Addr(), p), named: true, dedicated: true}
	}
	if relayed && q.EDNS.Subnet.Bits > 0 {
		if s := i.o.Directory.LookupSubnet(prefix(&q.EDNS.Subnet), p); s != usercache.Unknown {
			return finding{status: s}
		}
	}
	if s := i.o.Directory.LookupSource(src, p); s != usercache.Unknown {
		return finding{status: s}
	}
	if len(i.o.DefaultDevice) > 0 {
		var ok bool
		if space.Device, ok = i.o.DefaultDevice[q.Local]; ok {
			return finding{status: i.o.Directory.LookupDevice(&space.Device, p)}
		}
	}
	return finding{status: usercache.Unknown}
}

// findEDNS looks up what a relay says of the device.
func (i *Identifier) findEDNS(e *query.EDNS, buf *[query.MaxHint + 4]byte, p *usercache.Profile) finding {
	f := finding{status: usercache.Unknown, named: true}
	if e.MAC != nil {
		mac, ok := macText(e.MACCode, e.MAC, buf)
		if !ok {
			f.malformed = true
			return f
		}
		f.status = i.o.Directory.LookupEDNS(mac, p)
	}
	if e.CPE != nil && f.status == usercache.Unknown {
		if len(e.CPE) == 0 || len(e.CPE) > query.MaxHint {
			f.malformed = true
			return f
		}
		f.status = i.o.Directory.LookupEDNS(append(append(buf[:0], "cpe:"...), e.CPE...), p)
	}
	return f
}

// label returns the device label of a TLS server name, "" if there is none.
func (i *Identifier) label(server string) string {
	if server == "" || slices.Contains(i.names, server) {
		return ""
	}
	for _, n := range i.names {
		if l, ok := strings.CutSuffix(server, n); ok && len(l) > 1 && l[len(l)-1] == '.' {
			return l[:len(l)-1]
		}
	}
	return ""
}

// macText brings a relay's MAC address into the form of the directory, 12 lower-case hex digits. Code 65001 has
// the six bytes. Code 65073 has hex digits, with or without separators, or the six bytes in base64.
func macText(code uint16, v []byte, buf *[query.MaxHint + 4]byte) ([]byte, bool) {
	const hex = "0123456789abcdef"
	var raw [6]byte
	switch {
	case code == dnswire.OptionMAC && len(v) == len(raw):
		copy(raw[:], v)
	case code == dnswire.OptionMACText && len(v) == base64.StdEncoding.EncodedLen(len(raw)): // too few for hex
		if n, err := base64.StdEncoding.Decode(raw[:], v); err != nil || n != len(raw) {
			return nil, false
		}
	case code == dnswire.OptionMACText:
		n := 0
		for _, c := range v {
			switch {
			case c == ':' || c == '-' || c == '.':
				continue
			case '0' <= c && c <= '9', 'a' <= c && c <= 'f':
			case 'A' <= c && c <= 'F':
				c += 'a' - 'A'
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
	default:
		return nil, false
	}
	for i, c := range raw {
		buf[2*i], buf[2*i+1] = hex[c>>4], hex[c&15]
	}
	return buf[:12], true
}

// prefix is a client subnet as a network.
func prefix(s *query.Subnet) netip.Prefix {
	if s.Family == 1 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte(s.Addr[:4])), int(s.Bits))
	}
	return netip.PrefixFrom(netip.AddrFrom16(s.Addr), int(s.Bits))
}

// proven says whether the client may be the device that it was found to be: one with credentials has to show
// them over DoH, and one that is DoH only has to come that way and show them.
func (i *Identifier) proven(q *query.Query, p *usercache.Profile) query.RefuseReason {
	if q.AuthSecret == "" {
		if q.AuthDevice != "" || p.Is(usercache.DoHOnly) || p.Is(usercache.HasCredentials) && q.Transport == query.DoH {
			return query.RefuseDevice
		}
		return query.NotRefused
	}
	if !p.Is(usercache.HasCredentials) {
		return query.RefuseDevice // a secret for a device that has none
	}
	if q.Proof == query.NoProof {
		switch i.prover.known(p, q.AuthSecret, q.Arrived) {
		case query.NoProof:
			return query.Unproven
		case query.ProofGood:
			return query.NotRefused
		}
		return query.RefuseDevice
	}
	switch q.Proof {
	case query.ProofGood:
		return query.NotRefused
	case query.ProofFailed:
		return query.RefuseBusy
	}
	return query.RefuseDevice
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
