// Package siminternet is a small Internet for tests and for `sluice demo`: authoritative servers for a signed
// root, top-level domains and leaf zones, in one process.
//
// It is declared as a list of Zones: a name, servers, records in zone-file syntax, and how to sign. New adds
// what an Internet needs around them: SOA, NS and DNSKEY records, address records of name servers, delegations
// with glue and DS records in the parent, NSEC or NSEC3 chains. Every address is a server with its own set of
// zones, and answers as RFC 1034, 4035, 5155, 6672, 6891 and 2308 want it: referrals, CNAME and DNAME chains
// inside a zone, wildcards, empty non-terminals, denial of existence with the proofs, truncation. Answers are
// minimal: no authority section where none is needed. Zone transfers, updates and TSIG are refused.
//
// What goes wrong on the real Internet is a Behaviour of a server (slow, lossy, silent, lame, old, forged
// answers first, or any function), changeable while it runs, or a Fault of a zone (signatures broken, expired,
// missing, a wrong DS). Every query is logged, so that a test can count what a resolver sent.
//
// Keys are derived from zone names and are the same in every process: trust anchors can be written down. They
// protect nothing. Signatures are made when first needed, valid around the time given to New.
//
// Attach puts the servers on a simnet network in memory (fit for testing/synctest), ListenLoopback on real
// sockets of 127.0.0.0/8, all on one port: a resolver reaches them there by `recursion.upstream_port`, with
// `recursion.do_not_query: []` and, since Standard has names under test. and in-addr.arpa.,
// `recursion.local_zones: none`.
//
// Standard is a ready-made Internet; Expect lists its names and what a validating resolver must answer. In a
// bubble, all of it is
//
//	in := siminternet.Standard(time.Now())
//	err := in.Attach(network)
//	defer in.Close()
//	…              // a resolver with in.RootHints() and in.TrustAnchor(), dialing on network
//	in.SetBehaviour(in.Servers("example.")[0], siminternet.Behaviour{Silent: true})
package siminternet

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
)

// New builds an Internet of the given zones, one of which must be the root. now is the time around which
// signatures are valid: from a day before until 60 days after. The servers run after Attach or ListenLoopback.
func New(now time.Time, zones ...Zone) (*Internet, error) {
	in := &Internet{now: now, declared: make(map[string]Zone), behaviours: make(map[netip.Addr]*server)}
	for _, z := range zones {
		name := canonical(z.Name)
		if _, twice := in.declared[name]; twice {
			return nil, fmt.Errorf("zone %s is declared twice", name)
		}
		in.declared[name] = z
	}
	w, err := buildWorld(now, in.declared)
	if err != nil {
		return nil, err
	}
	in.world.Store(w)
	return in, nil
}

// A Zone declares one zone.
type Zone struct {
	Name string

	// Servers are the addresses of the zone's servers, named ns1, ns2, … in the zone itself. It is the short
	// form of NameServers.
	Servers []netip.Addr

	// NameServers are servers with names of their choice, which may lie in other zones: New adds the address
	// records there (and glue in the zones above), unless Records of that zone has them.
	NameServers []NameServer

	// Records are the zone's records in zone-file syntax, with the zone as origin. Lines may be indented, so
	// each names its owner. An RRset found here replaces the one New would make: SOA, NS, address records of
	// name servers, delegations.
	Records string

	// TTL is that of records that state none, and of what New adds. Zero means one hour.
	TTL uint32

	// NegativeTTL is the last field of the SOA record that New makes. Zero means five minutes.
	NegativeTTL uint32

	// Algorithm signs the zone: 8, 10, 13, 14 or 15. Zero leaves it unsigned.
	Algorithm uint8

	// NSEC3 makes the denial of existence hashed. Nil means NSEC. It has no meaning in an unsigned zone.
	NSEC3 *NSEC3

	// NoDS leaves the DS record out of the parent: a signed zone that nothing vouches for.
	NoDS bool

	// NoSiblingGlue keeps addresses of this zone's servers out of referrals to it, unless the servers are named
	// in the zone itself.
	NoSiblingGlue bool

	// Fault breaks the whole zone, FaultAt only the RRsets (or the denial) at a name.
	Fault   Fault
	FaultAt map[string]Fault
}

// A NameServer is the target of an NS record, with its addresses.
type NameServer struct {
	Name  string // absolute, or relative to the zone
	Addrs []netip.Addr
}

// NSEC3 holds the parameters of RFC 5155.
type NSEC3 struct {
	Iterations uint16
	Salt       string // hexadecimal digits
	OptOut     bool   // insecure delegations have no NSEC3 record
}

// A Fault is a set of ways in which a signed zone is wrong.
type Fault uint

const (
	BadSignature     Fault = 1 << iota // signatures do not verify
	Expired                            // signatures ended a day before now
	NotYetValid                        // signatures begin ten days after now
	NoSignature                        // RRSIG records are missing
	NoDenial                           // NSEC and NSEC3 records are missing from answers
	WrongDS                            // the DS record in the parent has another digest; a fault of the whole zone
	UnknownAlgorithm                   // keys, signatures and DS are of algorithm 200: insecure to anybody; of the whole zone
)

// An Internet is a set of zones and their servers. It is safe for concurrent use.
type Internet struct {
	now   time.Time
	world atomic.Pointer[world]
	log   queryLog

	mu         sync.Mutex // guards everything below
	declared   map[string]Zone
	behaviours map[netip.Addr]*server
	running    []*running
	addrs      map[netip.Addr]bool // served since the first Attach or Listen; nil before
}

// Replace adds zones, or puts them in the place of those with the same names, and rebuilds delegations. While
// servers run, no zone may name a server address that was unknown when they began.
func (in *Internet) Replace(zones ...Zone) error {
	return in.edit(func(declared map[string]Zone) {
		for _, z := range zones {
			declared[canonical(z.Name)] = z
		}
	})
}

// Remove takes zones away, with their delegations.
func (in *Internet) Remove(names ...string) error {
	return in.edit(func(declared map[string]Zone) {
		for _, n := range names {
			delete(declared, canonical(n))
		}
	})
}

// Zone returns the declaration of a zone, to change and hand to Replace.
func (in *Internet) Zone(name string) (Zone, bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	z, ok := in.declared[canonical(name)]
	z.FaultAt = maps.Clone(z.FaultAt)
	z.Servers, z.NameServers = slices.Clone(z.Servers), slices.Clone(z.NameServers)
	return z, ok
}

func (in *Internet) edit(change func(map[string]Zone)) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	declared := maps.Clone(in.declared)
	change(declared)
	w, err := buildWorld(in.now, declared)
	if err != nil {
		return err
	}
	if in.addrs != nil {
		for addr := range w.servers {
			if !in.addrs[addr] {
				return fmt.Errorf("server %v is new: zones that need it must be declared before Attach or ListenLoopback", addr)
			}
		}
	}
	in.declared = declared
	in.world.Store(w)
	return nil
}

// Servers returns the addresses that serve a zone, in the order declared.
func (in *Internet) Servers(zone string) []netip.Addr {
	if z := in.world.Load().zones[canonical(zone)]; z != nil {
		return slices.Clone(z.servers)
	}
	return nil
}

// Addrs returns every server address, in order.
func (in *Internet) Addrs() []netip.Addr {
	return slices.SortedFunc(maps.Keys(in.world.Load().servers), netip.Addr.Compare)
}

// RootHints returns the NS records of the root and the addresses of its servers, in zone-file syntax.
func (in *Internet) RootHints() string { return text(in.RootHintRecords()) }

// RootHintRecords returns the records of RootHints.
func (in *Internet) RootHintRecords() []dns.RR {
	root := in.world.Load().zones["."]
	hints := copyRRs(root.nodes["."].rrsets[dns.TypeNS])
	return append(hints, root.addresses(hints)...)
}

// TrustAnchor returns the DS record of the root's key signing key, in zone-file syntax; empty if the root is
// not signed.
func (in *Internet) TrustAnchor() string { return text(in.TrustAnchorRecords(".")) }

// TrustAnchorRecords returns the DS and the DNSKEY record that vouch for a signed zone.
func (in *Internet) TrustAnchorRecords(zone string) []dns.RR {
	z := in.world.Load().zones[canonical(zone)]
	if z == nil || z.ksk == nil {
		return nil
	}
	return []dns.RR{z.ds(), dns.Copy(z.ksk.record)}
}

// Sign returns the signature that a signed zone makes over an RRset, which need not be its own: for Hooks whose
// answers no good server would give. An owner that begins with an asterisk is signed as a wildcard.
func (in *Internet) Sign(zone string, rrs []dns.RR) *dns.RRSIG {
	z := in.world.Load().zones[canonical(zone)]
	if z == nil || z.zsk == nil {
		return nil
	}
	return z.sign(rrs, 0)
}

func text(records []dns.RR) string {
	var b strings.Builder
	for _, rr := range records {
		b.WriteString(rr.String())
		b.WriteByte('\n')
	}
	return b.String()
}

// A world is the compiled form of all zones. It is immutable, but for signatures made on demand.
type world struct {
	zones   map[string]*zone
	servers map[netip.Addr][]*zone // by descending number of labels
}

func buildWorld(now time.Time, declared map[string]Zone) (*world, error) {
	w := &world{zones: make(map[string]*zone), servers: make(map[netip.Addr][]*zone)}
	if _, ok := declared["."]; !ok {
		return nil, fmt.Errorf("an Internet needs a root: no zone is named \".\"")
	}
	// Parents before children, so that a delegation finds its parent parsed.
	names := slices.SortedFunc(maps.Keys(declared), func(a, b string) int {
		return cmp.Or(dns.CountLabel(a)-dns.CountLabel(b), strings.Compare(a, b))
	})
	for _, name := range names {
		z, err := parseZone(name, declared[name], now)
		if err != nil {
			return nil, fmt.Errorf("zone %s: %w", name, err)
		}
		w.zones[name] = z
	}
	for _, name := range names {
		if name != "." {
			w.delegate(w.zones[name])
		}
	}
	for _, name := range names {
		w.placeAddresses(w.zones[name])
	}
	for _, name := range names {
		z := w.zones[name]
		if err := z.seal(); err != nil {
			return nil, fmt.Errorf("zone %s: %w", name, err)
		}
		for _, addr := range z.servers {
			w.servers[addr] = append(w.servers[addr], z)
		}
	}
	for _, zones := range w.servers {
		slices.SortStableFunc(zones, func(a, b *zone) int { return dns.CountLabel(b.name) - dns.CountLabel(a.name) })
	}
	return w, nil
}

// zoneAbove returns the deepest zone that name is in; with strict, not the one whose apex it is.
func (w *world) zoneAbove(name string, strict bool) *zone {
	if strict {
		if name == "." {
			return nil
		}
		name = parentName(name)
	}
	for {
		if z := w.zones[name]; z != nil {
			return z
		}
		if name == "." {
			return nil
		}
		name = parentName(name)
	}
}

// delegate puts NS and DS records of child into its parent, unless the parent's text has them.
func (w *world) delegate(child *zone) {
	parent := w.zoneAbove(child.name, true)
	if !parent.has(child.name, dns.TypeNS) {
		parent.add(copyRRs(child.records[key{child.name, dns.TypeNS}])...)
	}
	if child.ksk != nil && parent.ksk != nil && !child.declared.NoDS && !parent.has(child.name, dns.TypeDS) {
		parent.add(child.ds())
	}
	if child.declared.NoSiblingGlue {
		parent.noSiblingGlue[child.name] = true
	}
}

// placeAddresses puts the addresses of z's name servers where they are looked for: in the zone the name belongs
// to, and as glue in the zones above it.
func (w *world) placeAddresses(z *zone) {
	for _, ns := range z.nameServers {
		home := w.zoneAbove(ns.Name, false)
		if !home.has(ns.Name, dns.TypeA) && !home.has(ns.Name, dns.TypeAAAA) {
			home.add(addressRRs(ns, z.ttl)...)
		}
		for above := w.zoneAbove(home.name, true); above != nil; above = w.zoneAbove(above.name, true) {
			if !above.has(ns.Name, dns.TypeA) && !above.has(ns.Name, dns.TypeAAAA) {
				above.add(addressRRs(ns, z.ttl)...)
			}
		}
	}
}

func addressRRs(ns NameServer, ttl uint32) (rrs []dns.RR) {
	for _, addr := range ns.Addrs {
		h := dns.RR_Header{Name: ns.Name, Class: dns.ClassINET, Ttl: ttl}
		if addr.Is4() {
			h.Rrtype = dns.TypeA
			rrs = append(rrs, &dns.A{Hdr: h, A: addr.AsSlice()})
		} else {
			h.Rrtype = dns.TypeAAAA
			rrs = append(rrs, &dns.AAAA{Hdr: h, AAAA: addr.AsSlice()})
		}
	}
	return rrs
}
