package siminternet

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// A key names an RRset. The name is canonical.
type key struct {
	name   string
	rrtype uint16
}

// A zone is compiled in three steps: parsed, completed by its neighbours (add), sealed. Sealed it is read-only,
// but for the signatures, which have their own lock.
type zone struct {
	declared    Zone
	name        string
	ttl         uint32
	servers     []netip.Addr
	nameServers []NameServer // names absolute
	ksk, zsk    *signingKey  // nil: unsigned
	now         time.Time

	records       map[key][]dns.RR
	noSiblingGlue map[string]bool // children that asked for it

	// Made by seal.
	nodes  map[string]*node    // every name that exists at or above the zone cuts
	glue   map[string][]dns.RR // addresses below the zone cuts
	soa    *dns.SOA
	denial denialChain
	sigs   sigCache
}

// A node is a name that exists; without RRsets it is an empty non-terminal.
type node struct {
	name   string
	order  string // sorts by canonical order
	rrsets map[uint16][]dns.RR
	cut    bool // a delegation: only its DS RRset is authoritative here
}

func parseZone(name string, d Zone, now time.Time) (*zone, error) {
	z := &zone{
		declared: d, name: name, now: now,
		ttl:           d.TTL,
		records:       make(map[key][]dns.RR),
		noSiblingGlue: make(map[string]bool),
	}
	if z.ttl == 0 {
		z.ttl = 3600
	}
	for i, addr := range d.Servers {
		z.nameServers = append(z.nameServers, NameServer{Name: fmt.Sprintf("ns%d", i+1), Addrs: []netip.Addr{addr}})
	}
	z.nameServers = append(z.nameServers, d.NameServers...)
	if len(z.nameServers) == 0 {
		return nil, fmt.Errorf("it has no servers: set Servers or NameServers")
	}
	for i, ns := range z.nameServers {
		absolute := ns.Name
		if !dns.IsFqdn(absolute) {
			absolute += "." + strings.TrimPrefix(name, ".")
		}
		if _, ok := dns.IsDomainName(absolute); !ok {
			return nil, fmt.Errorf("%q is no name for a server", ns.Name)
		}
		z.nameServers[i].Name = canonical(absolute)
		for _, addr := range ns.Addrs {
			if !slices.Contains(z.servers, addr) {
				z.servers = append(z.servers, addr)
			}
		}
	}

	p := parser(d, name, z.ttl)
	for rr, ok := p.Next(); ok; rr, ok = p.Next() {
		if !dns.IsSubDomain(name, canonical(rr.Header().Name)) {
			return nil, fmt.Errorf("record outside the zone: %v", rr)
		}
		if rr.Header().Class != dns.ClassINET {
			return nil, fmt.Errorf("record of another class than IN: %v", rr)
		}
		z.add(rr)
	}
	if err := p.Err(); err != nil {
		return nil, err
	}

	head := func(t uint16) dns.RR_Header {
		return dns.RR_Header{Name: name, Rrtype: t, Class: dns.ClassINET, Ttl: z.ttl}
	}
	if !z.has(name, dns.TypeSOA) {
		negative := d.NegativeTTL
		if negative == 0 {
			negative = 300
		}
		z.add(&dns.SOA{
			Hdr: head(dns.TypeSOA), Ns: z.nameServers[0].Name, Mbox: "hostmaster." + strings.TrimPrefix(name, "."),
			Serial: 1, Refresh: 3600, Retry: 600, Expire: 86400, Minttl: negative,
		})
	}
	if !z.has(name, dns.TypeNS) {
		for _, ns := range z.nameServers {
			z.add(&dns.NS{Hdr: head(dns.TypeNS), Ns: ns.Name})
		}
	}
	if d.Algorithm == 0 {
		return z, nil
	}

	var err error
	if z.ksk, err = deriveKey(name, d.Algorithm, 257, z.ttl); err != nil {
		return nil, err
	}
	if z.zsk, err = deriveKey(name, d.Algorithm, 256, z.ttl); err != nil {
		return nil, err
	}
	if d.Fault&UnknownAlgorithm != 0 {
		z.ksk.record.Algorithm, z.zsk.record.Algorithm = unknownAlgorithm, unknownAlgorithm
	}
	z.add(z.ksk.record, z.zsk.record)
	if n := d.NSEC3; n != nil {
		// RFC 5155 section 4: the flags of NSEC3PARAM are zero even when the records opt out.
		z.add(&dns.NSEC3PARAM{
			Hdr: head(dns.TypeNSEC3PARAM), Hash: dns.SHA1, Iterations: n.Iterations,
			SaltLength: uint8(len(n.Salt) / 2), Salt: n.Salt,
		})
	}
	return z, nil
}

var indentation = regexp.MustCompile(`(?m)^[ \t]+`)

// parser reads the records of a declaration. Lines may be indented, as they are in Go source.
func parser(d Zone, origin string, ttl uint32) *dns.ZoneParser {
	p := dns.NewZoneParser(strings.NewReader(indentation.ReplaceAllString(d.Records, "")), origin, "records")
	p.SetDefaultTTL(ttl)
	return p
}

func (z *zone) has(name string, t uint16) bool { return len(z.records[key{name, t}]) > 0 }

func (z *zone) add(rrs ...dns.RR) {
	for _, rr := range rrs {
		k := key{canonical(rr.Header().Name), rr.Header().Rrtype}
		z.records[k] = append(z.records[k], rr)
	}
}

// seal sorts the records into authoritative nodes, zone cuts and glue, checks them, and makes the denial chain.
func (z *zone) seal() error {
	z.nodes, z.glue = make(map[string]*node), make(map[string][]dns.RR)
	for k, rrs := range z.records {
		cut := z.cutAbove(k.name)
		if cut != "" && (cut != k.name || k.rrtype != dns.TypeNS && k.rrtype != dns.TypeDS) {
			if k.rrtype == dns.TypeA || k.rrtype == dns.TypeAAAA {
				z.glue[k.name] = append(z.glue[k.name], rrs...)
			}
			continue // the delegation hides everything else
		}
		if strings.HasPrefix(k.name, "*.") && (k.rrtype == dns.TypeNS || k.rrtype == dns.TypeDNAME) {
			return fmt.Errorf("%s %s: a wildcard cannot be that", k.name, dns.Type(k.rrtype))
		}
		for _, rr := range rrs {
			if rr.Header().Ttl != rrs[0].Header().Ttl {
				return fmt.Errorf("%s %s: the records of an RRset have one TTL", k.name, dns.Type(k.rrtype))
			}
		}
		n := z.ensure(k.name)
		n.rrsets[k.rrtype] = rrs
		n.cut = cut == k.name
	}
	for _, n := range z.nodes {
		if n.rrsets[dns.TypeCNAME] != nil && (len(n.rrsets) > 1 || len(n.rrsets[dns.TypeCNAME]) > 1) {
			return fmt.Errorf("%s: a CNAME record stands alone", n.name)
		}
	}
	z.soa = z.records[key{z.name, dns.TypeSOA}][0].(*dns.SOA)
	if z.zsk != nil {
		z.denial = z.makeDenial()
	}
	return nil
}

// cutAbove returns the delegation that name is at or below, or "".
func (z *zone) cutAbove(name string) string {
	highest := ""
	for ; name != z.name; name = parentName(name) {
		if z.has(name, dns.TypeNS) {
			highest = name
		}
	}
	return highest
}

// ensure returns the node of a name; it and the empty non-terminals above it come into being.
func (z *zone) ensure(name string) *node {
	n := z.nodes[name]
	if n == nil {
		n = &node{name: name, order: canonicalOrder(name), rrsets: make(map[uint16][]dns.RR)}
		z.nodes[name] = n
		if name != z.name {
			z.ensure(parentName(name))
		}
	}
	return n
}

// addresses returns what this zone knows of the addresses of the targets of NS, MX and SRV records.
func (z *zone) addresses(rrs []dns.RR) (out []dns.RR) {
	for _, rr := range rrs {
		var target string
		switch rr := rr.(type) {
		case *dns.NS:
			target = rr.Ns
		case *dns.MX:
			target = rr.Mx
		case *dns.SRV:
			target = rr.Target
		default:
			continue
		}
		out = append(out, z.addressesOf(canonical(target))...)
	}
	return out
}

func (z *zone) addressesOf(name string) (out []dns.RR) {
	if n := z.nodes[name]; n != nil {
		out = append(out, n.rrsets[dns.TypeA]...)
		out = append(out, n.rrsets[dns.TypeAAAA]...)
	}
	return append(out, z.glue[name]...)
}

// canonical returns a name fully qualified, in lower case, each octet written in one way.
func canonical(name string) string {
	name = dns.Fqdn(name)
	var wire [256]byte
	if n, err := dns.PackDomainName(name, wire[:], 0, nil, false); err == nil {
		if s, _, err := dns.UnpackDomainName(wire[:n], 0); err == nil {
			name = s
		}
	}
	return strings.ToLower(name)
}

func parentName(name string) string {
	i, end := dns.NextLabel(name, 0)
	if end {
		return "."
	}
	return name[i:]
}

// canonicalOrder returns a string whose byte order is the canonical order of names (RFC 4034 section 6.1):
// labels from the right, each ended by 0 0, with a 0 inside a label written as 0 1.
func canonicalOrder(name string) string {
	var wire [256]byte
	end, err := dns.PackDomainName(name, wire[:], 0, nil, false)
	if err != nil {
		return name
	}
	var labels [][]byte
	for i := 0; i < end && wire[i] != 0; i += 1 + int(wire[i]) {
		labels = append(labels, wire[i+1:i+1+int(wire[i])])
	}
	var b strings.Builder
	for _, label := range slices.Backward(labels) {
		for _, c := range label {
			b.WriteByte(c)
			if c == 0 {
				b.WriteByte(1)
			}
		}
		b.WriteString("\x00\x00")
	}
	return b.String()
}

func copyRRs(rrs []dns.RR) []dns.RR {
	out := make([]dns.RR, len(rrs))
	for i, rr := range rrs {
		out[i] = dns.Copy(rr)
	}
	return out
}
