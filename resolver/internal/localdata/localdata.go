// Package localdata answers from what the resolver itself knows: records of the configuration, names that
// must never leave the network, and the few names of class CH.
//
// The default zones are those of RFC 6303 (reverse zones of private and special addresses), RFC 6761
// (localhost, test, invalid), RFC 6762 (local), RFC 7686 (onion), RFC 7793 (shared address space), RFC 8375
// (home.arpa) and RFC 9462 (resolver.arpa). Each is an empty zone, but for localhost and the reverse names of
// loopback. A zone that the configuration resolves elsewhere (stub, forward), or one above it, is left out.
// Names that are special to others alone (alt, example) are resolved as any.
//
// Below resolver.arpa there is NODATA rather than NXDOMAIN (RFC 9462 section 4); records for its name
// _dns.resolver.arpa can be configured. Whether a default zone is signed is its parent's to say: where that is
// in the public tree, DS questions are resolved, so that validators behind us find an insecure delegation
// instead of a bogus answer (RFC 8375 section 4).
//
// Lookup is called for every query: what is not local costs one look at the top-level domain. Answers are
// Insecure and made when asked for.
package localdata

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
)

// Options say what is local.
type Options struct {
	// Zones serves the default zones.
	Zones bool
	// IPv4Only answers for ipv4only.arpa and its reverse names, by which clients find the prefix of a DNS64
	// resolver, whether the default zones are served or not (RFC 8880 section 7). Resolvers without DNS64 do
	// not, and ask.
	IPv4Only bool
	// Except are zones that are resolved elsewhere: no default zone at or above one of them is served, nor
	// one below it.
	Except []dnsname.Name
	// Records are local data, each in zone-file syntax with an absolute owner name.
	Records []dnswire.Record
	// NodeID answers id.server and hostname.bind; "" gives no answer. Version answers version.server and
	// version.bind.
	NodeID, Version string
}

// Data is what is local. It is constant after New and safe for concurrent use.
type Data struct {
	tlds    map[string]struct{} // first byte to look at: top-level labels under which something is local
	root    bool                // the root itself has local data
	zones   map[dnsname.Name]struct{}
	sets    map[dnsname.Name][]query.RRset
	parents map[dnsname.Name]struct{} // names above data, which exist though they have none (RFC 8020)
	chaos   map[dnsname.Name]string
}

// ttl of records made here, in seconds. RFC 6303 section 3 has three hours.
const ttl = 10800

// defaultZones in presentation form. Ranges are filled in by New.
var defaultZones = []string{
	// RFC 6761, 6762, 7686, 8375, 9462
	"localhost.", "test.", "invalid.", "local.", "onion.", "home.arpa.", "resolver.arpa.",
	// RFC 6303 section 4.1 and 4.2
	"10.in-addr.arpa.", "168.192.in-addr.arpa.", "0.in-addr.arpa.", "127.in-addr.arpa.", "254.169.in-addr.arpa.",
	"2.0.192.in-addr.arpa.", "100.51.198.in-addr.arpa.", "113.0.203.in-addr.arpa.", "255.255.255.255.in-addr.arpa.",
	// RFC 6303 section 4.3 to 4.6
	strings.Repeat("0.", 32) + "ip6.arpa.", "1." + strings.Repeat("0.", 31) + "ip6.arpa.",
	"d.f.ip6.arpa.", "8.e.f.ip6.arpa.", "9.e.f.ip6.arpa.", "a.e.f.ip6.arpa.", "b.e.f.ip6.arpa.", "8.b.d.0.1.0.0.2.ip6.arpa.",
}

// A RecordError is about one of Options.Records.
type RecordError struct {
	Index int // in Options.Records
	err   error
}

func (e *RecordError) Error() string { return e.err.Error() }

// Unwrap returns what is wrong.
func (e *RecordError) Unwrap() error { return e.err }

// New returns the local data, or a RecordError that names the record that cannot be used.
func New(o Options) (*Data, error) {
	d := &Data{
		tlds:    make(map[string]struct{}),
		zones:   make(map[dnsname.Name]struct{}),
		sets:    make(map[dnsname.Name][]query.RRset),
		parents: make(map[dnsname.Name]struct{}),
		chaos:   make(map[dnsname.Name]string),
	}
	if o.Zones {
		zones := slices.Clone(defaultZones)
		for i := 16; i < 32; i++ {
			zones = append(zones, fmt.Sprintf("%d.172.in-addr.arpa.", i))
		}
		for i := 64; i < 128; i++ { // RFC 7793
			zones = append(zones, fmt.Sprintf("%d.100.in-addr.arpa.", i))
		}
		for _, z := range zones {
			d.zone(dnsname.MustParse(z), o.Except)
		}
		d.builtIn(localhost.String(), "A 127.0.0.1", "AAAA ::1")
		d.builtIn(reverse(netip.MustParseAddr("127.0.0.1")), "PTR localhost.")
		d.builtIn(reverse(netip.IPv6Loopback()), "PTR localhost.")
	}
	if o.IPv4Only {
		reverse170, reverse171 := reverse(netip.MustParseAddr("192.0.0.170")), reverse(netip.MustParseAddr("192.0.0.171"))
		for _, z := range []string{ipv4only, reverse170, reverse171} {
			d.zone(dnsname.MustParse(z), o.Except)
		}
		d.builtIn(ipv4only, "A 192.0.0.170", "A 192.0.0.171")
		d.builtIn(reverse170, "PTR "+ipv4only)
		d.builtIn(reverse171, "PTR "+ipv4only)
	}
	sizes := make(map[sizeKey]int)
	for i, r := range o.Records {
		if err := d.unfit(r, sizes); err != nil {
			return nil, &RecordError{i, fmt.Errorf("local data of %s: %w", r.Name, err)}
		}
		d.add(r)
	}
	for _, n := range []string{"version.bind.", "version.server."} {
		d.chaos[dnsname.MustParse(n)] = o.Version
	}
	if o.NodeID != "" {
		for _, n := range []string{"id.server.", "hostname.bind."} {
			d.chaos[dnsname.MustParse(n)] = o.NodeID
		}
	}
	return d, nil
}

// maxSet bounds the records of one type that a name can have, in bytes of an answer without compression: more
// than a message holds could never be said.
const maxSet = 60 << 10

type sizeKey struct {
	name dnsname.Name
	typ  uint16
}

// unfit says why r cannot stand beside the records before it, whose sizes are kept in sizes.
func (d *Data) unfit(r dnswire.Record, sizes map[sizeKey]int) error {
	if r.Class != dnswire.ClassIN {
		return fmt.Errorf("class %d; only class IN is served", r.Class)
	}
	for _, s := range d.sets[r.Name] {
		switch {
		case s.Type == r.Type && s.Type == dnswire.TypeCNAME:
			return errors.New("a second CNAME record") // RFC 2181 section 10.1
		case s.Type != r.Type && (s.Type == dnswire.TypeCNAME || r.Type == dnswire.TypeCNAME):
			return errors.New("a CNAME record beside others")
		}
	}
	k := sizeKey{r.Name, r.Type}
	if sizes[k] += len(r.Name) + 10 + len(r.Data); sizes[k] > maxSet {
		return errors.New("more records of one type than an answer can hold")
	}
	return nil
}

const ipv4only = "ipv4only.arpa."

// builtIn adds records to a default zone, if that is served.
func (d *Data) builtIn(owner string, records ...string) {
	if !d.covered(dnsname.MustParse(owner)) {
		return
	}
	for _, r := range records {
		rs, err := dnswire.ParseRecords(owner+" "+r+"\n", ".", "built in", ttl)
		if err != nil {
			panic(err) // they are constants
		}
		d.add(rs[0])
	}
}

func (d *Data) zone(z dnsname.Name, except []dnsname.Name) {
	for _, e := range except {
		if e != dnsname.Root && (e.IsWithin(z) || z.IsWithin(e)) {
			return
		}
	}
	d.zones[z] = struct{}{}
	d.note(z)
}

func (d *Data) note(n dnsname.Name) {
	if n == dnsname.Root {
		d.root = true
		return
	}
	d.tlds[string(n.Suffix(1))] = struct{}{}
}

func (d *Data) covered(n dnsname.Name) bool {
	for ; n != ""; n = n.Parent() {
		if _, ok := d.zones[n]; ok {
			return true
		}
	}
	return false
}

func (d *Data) add(r dnswire.Record) {
	d.note(r.Name)
	sets := d.sets[r.Name]
	for i := range sets {
		if sets[i].Type == r.Type {
			sets[i].Data = query.AppendRData(sets[i].Data, r.Data)
			sets[i].TTL = min(sets[i].TTL, r.TTL)
			return
		}
	}
	d.sets[r.Name] = append(sets, query.RRset{
		Name: r.Name, Type: r.Type, Class: r.Class, TTL: r.TTL, Status: query.Insecure, Rank: query.RankAnswer,
		Data: query.AppendRData(nil, r.Data),
	})
	for n := r.Name.Parent(); n != "" && n != dnsname.Root; n = n.Parent() {
		d.parents[n] = struct{}{}
	}
}

// reverse returns the name under which the address has its PTR record.
func reverse(a netip.Addr) string {
	var b strings.Builder
	s := a.AsSlice()
	if a.Is4() {
		for i := len(s) - 1; i >= 0; i-- {
			fmt.Fprintf(&b, "%d.", s[i])
		}
		return b.String() + "in-addr.arpa."
	}
	for i := len(s) - 1; i >= 0; i-- {
		fmt.Fprintf(&b, "%x.%x.", s[i]&15, s[i]>>4)
	}
	return b.String() + "ip6.arpa."
}

// Lookup answers q if it is about something local.
func (d *Data) Lookup(q *query.Question, now clock.Instant) (settled.Entry, bool) {
	if q.Class == dnswire.ClassCH {
		return d.lookupChaos(q, now)
	}
	if q.View != 0 {
		return settled.Entry{}, false // a view is a tree of its own
	}
	if !d.possible(q.Name) {
		return settled.Entry{}, false
	}
	return d.lookup(q, now)
}

// possible looks at the top-level domain alone.
func (d *Data) possible(n dnsname.Name) bool {
	if len(n) <= 1 {
		return d.root
	}
	i := 0
	for {
		next := i + 1 + int(n[i])
		if next >= len(n)-1 {
			break
		}
		i = next
	}
	_, ok := d.tlds[string(n[i:])]
	return ok
}

func (d *Data) lookup(q *query.Question, now clock.Instant) (settled.Entry, bool) {
	u := &query.Unvalidated{Question: *q}
	sets, exists := d.sets[q.Name]
	if !exists && d.covered(q.Name) && q.Name.IsWithin(localhost) {
		sets, exists = d.sets[localhost] // RFC 6761 section 6.3: names below localhost too
	}
	for i := range sets {
		if s := sets[i]; s.Type == q.Type || s.Type == dnswire.TypeCNAME || q.Type == dnswire.TypeANY {
			s.Name = q.Name
			u.Answer = append(u.Answer, s)
			if q.Type == dnswire.TypeANY {
				break // one RRset (RFC 8482)
			}
		}
	}
	zone, inZone := d.apex(q.Name)
	switch {
	case len(u.Answer) > 0:
		if u.Answer[0].Type == dnswire.TypeCNAME && q.Type != dnswire.TypeCNAME {
			return d.follow(u, now)
		}
	case !exists && !inZone:
		return settled.Entry{}, false
	case inZone && zone == q.Name && q.Type == dnswire.TypeDS && zone.Labels() > 1:
		return settled.Entry{}, false
	case !inZone: // the configuration's name without this type
		zone = q.Name
	case !exists && zone == resolverArpa: // NODATA for everything
	case !exists && zone != q.Name:
		if _, ent := d.parents[q.Name]; !ent {
			u.RCode = dnswire.RCodeNXDomain
		}
	case zone == q.Name && q.Type == dnswire.TypeSOA:
		u.Answer = append(u.Answer, soa(zone))
	case zone == q.Name && q.Type == dnswire.TypeNS:
		u.Answer = append(u.Answer, query.RRset{Name: zone, Type: dnswire.TypeNS, Class: dnswire.ClassIN, TTL: ttl, Data: query.AppendRData(nil, []byte(zone))})
	}
	if len(u.Answer) == 0 {
		u.Authority = append(u.Authority, soa(zone))
	}
	return settle(u, now)
}

// follow adds what a local alias points at, if that is local; otherwise the client gets the alias alone and
// asks again.
func (d *Data) follow(u *query.Unvalidated, now clock.Instant) (settled.Entry, bool) {
	for range query.MaxTurns {
		last := &u.Answer[len(u.Answer)-1]
		target := make([]byte, len(last.First()))
		dnsname.Fold(target, last.First())
		name := dnsname.Name(target)
		sets := d.sets[name]
		found := false
		for _, s := range sets {
			if s.Type == u.Question.Type || s.Type == dnswire.TypeCNAME {
				u.Answer = append(u.Answer, s)
				found = true
			}
		}
		if !found || u.Answer[len(u.Answer)-1].Type != dnswire.TypeCNAME {
			break
		}
	}
	return settle(u, now)
}

var (
	localhost    = dnsname.MustParse("localhost.")
	resolverArpa = dnsname.MustParse("resolver.arpa.")
)

// apex returns the default zone that n is in.
func (d *Data) apex(n dnsname.Name) (dnsname.Name, bool) {
	for ; n != "" && n != dnsname.Root; n = n.Parent() {
		if _, ok := d.zones[n]; ok {
			return n, true
		}
	}
	return "", false
}

// soa is the one that RFC 6303 section 3 gives, with the zone as primary.
func soa(zone dnsname.Name) query.RRset {
	b := append([]byte(zone), dnsname.MustParse("nobody.invalid.")...)
	for _, v := range []uint32{1, 3600, 1200, 604800, ttl} {
		b = append(b, byte(v>>24), byte(v>>16), byte(v>>8), byte(v))
	}
	return query.RRset{Name: zone, Type: dnswire.TypeSOA, Class: dnswire.ClassIN, TTL: ttl, Data: query.AppendRData(nil, b)}
}

func (d *Data) lookupChaos(q *query.Question, now clock.Instant) (settled.Entry, bool) {
	text, ok := d.chaos[q.Name]
	if !ok || q.Type != dnswire.TypeTXT && q.Type != dnswire.TypeANY {
		return settled.Entry{}, false
	}
	text = text[:min(len(text), 255)]
	rdata := append([]byte{byte(len(text))}, text...)
	return settle(&query.Unvalidated{Question: *q, Answer: []query.RRset{{
		Name: q.Name, Type: dnswire.TypeTXT, Class: dnswire.ClassCH, Data: query.AppendRData(nil, rdata),
	}}}, now)
}

func settle(u *query.Unvalidated, now clock.Instant) (settled.Entry, bool) {
	e, err := settled.Settle(u, query.Insecure, settled.Options{Now: now, EDE: query.NoEDE})
	return e, err == nil
}
