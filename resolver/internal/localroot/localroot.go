// Package localroot answers questions to the root zone from a copy of it (RFC 8806), as one of its servers would.
//
// Parse reads a copy, a zone file in presentation format, plain or packed with gzip, and checks that it is one: an
// apex with SOA and NS records, delegations of top-level domains, addresses below them, nothing else; of a bounded
// size; and that its digest is right if it has one (ZONEMD, RFC 8976, scheme SIMPLE with SHA-384 or SHA-512). A Zone
// never changes. A Copy is the zone in use, which can be replaced.
//
// Signatures are not verified here, and a copy is believed no more than a server: its answers are those that a server
// gives to queries with DO, and whoever asks validates them as ever (RFC 8806 section 3). Two things end the use of
// one: the time that the SOA record allows (its expire field), counted from when the SOA record was signed or, without
// signature, from when the file was last modified; and Doubt, which is for who found an answer to be bogus.
package localroot

import (
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Answer returns the response to a question that was meant for a server of the root, or nil if it has to be asked.
func (c *Copy) Answer(name dnsname.Name, typ uint16, now clock.Instant, wall time.Time) *query.Message {
	h := c.held.Load()
	if h == nil || now < clock.Instant(h.aside.Load()) {
		return nil
	}
	if !wall.Before(h.zone.expires) {
		if !h.told.Swap(true) {
			c.log.Warn("the local copy of the root zone has expired; the root servers are asked", "serial", h.zone.serial, "expired", h.zone.expires)
		}
		return nil
	}
	m := h.zone.Answer(name, typ)
	if m != nil {
		c.answered.Add(1)
	}
	return m
}

// asideFor is how long a copy is not used after it gave a bogus answer. It may have been the date that was wrong, so
// it is tried again.
const asideFor = time.Hour

// Doubt says that an answer was bogus: the copy is left aside for an hour, or until it is replaced.
func (c *Copy) Doubt(now clock.Instant) {
	h := c.held.Load()
	if h == nil {
		return
	}
	if old := h.aside.Swap(int64(now.Add(asideFor))); now >= clock.Instant(old) {
		c.log.Warn("the local copy of the root zone gave an answer that is bogus; the root servers are asked", "serial", h.zone.serial, "for", asideFor)
	}
}

// A Copy is the copy of the root zone in use, if any. It is safe for concurrent use.
type Copy struct {
	log      *slog.Logger // constant
	held     atomic.Pointer[held]
	answered atomic.Uint64
}

// A held zone is one in use.
type held struct {
	zone  *Zone
	aside atomic.Int64 // a clock.Instant: not used until then
	told  atomic.Bool  // that it has expired
}

// New returns a Copy without a zone, which answers nothing.
func New(log *slog.Logger) *Copy { return &Copy{log: log} }

// Set replaces the zone; nil means that the root servers are asked.
func (c *Copy) Set(z *Zone) {
	if z == nil {
		c.held.Store(nil)
		return
	}
	c.held.Store(&held{zone: z})
}

// Answered returns how many questions were answered.
func (c *Copy) Answered() uint64 { return c.answered.Load() }

// A Zone is a copy of the root zone. It is immutable.
type Zone struct {
	sets    map[dnsname.Name][]query.RRset // in the order of types
	chain   []dnsname.Name                 // owners of NSEC records, in canonical order
	serial  uint32
	expires time.Time
	records int
}

// Serial returns the serial number of the SOA record.
func (z *Zone) Serial() uint32 { return z.serial }

// Expires returns when the copy is too old to be used.
func (z *Zone) Expires() time.Time { return z.expires }

// Records returns how many records there are.
func (z *Zone) Records() int { return z.records }

const flagsQRAA = 0x8400

// Answer returns the response of a server of the root to a query with DO. It is nil for type RRSIG, to which an answer
// would be signatures by themselves.
func (z *Zone) Answer(name dnsname.Name, typ uint16) *query.Message {
	if typ == dnswire.TypeRRSIG {
		return nil
	}
	m := &query.Message{
		Header: dnswire.Header{Flags: flagsQRAA}, RCode: dnswire.RCodeNoError,
		HasQuestion: true, QName: []byte(name), QType: typ, QClass: dnswire.ClassIN, EDNS: true, EDE: query.NoEDE,
	}
	if name == dnsname.Root {
		for _, s := range z.sets[name] {
			if s.Type == typ || typ == dnswire.TypeANY {
				m.Answer = append(m.Answer, s)
			}
		}
		switch {
		case len(m.Answer) == 0:
			z.deny(m, name)
		case typ == dnswire.TypeNS:
			z.addGlue(m, &m.Answer[0])
		}
		return m
	}
	tld := name.Suffix(1)
	ns := z.find(tld, dnswire.TypeNS)
	if ns == nil {
		m.RCode = dnswire.RCodeNXDomain
		z.deny(m, name, wildcard)
		return m
	}
	ds := z.find(tld, dnswire.TypeDS)
	switch {
	case name == tld && typ == dnswire.TypeDS && ds != nil:
		m.Answer = []query.RRset{*ds}
	case name == tld && typ == dnswire.TypeDS:
		z.deny(m, tld)
	default:
		m.Header.Flags &^= 0x0400 // a referral is not authoritative
		m.Authority = append(m.Authority, *ns)
		if ds != nil {
			m.Authority = append(m.Authority, *ds)
		} else {
			z.addProof(m, tld)
		}
		z.addGlue(m, ns)
	}
	return m
}

// wildcard would stand for every name that does not exist.
const wildcard = dnsname.Name("\x01*\x00")

func (z *Zone) find(name dnsname.Name, typ uint16) *query.RRset {
	sets := z.sets[name]
	for i := range sets {
		if sets[i].Type == typ {
			return &sets[i]
		}
	}
	return nil
}

// deny adds the SOA record and the NSEC records of the names, or of where they would stand.
func (z *Zone) deny(m *query.Message, names ...dnsname.Name) {
	soa := *z.find(dnsname.Root, dnswire.TypeSOA)
	soa.TTL = min(soa.TTL, dnswire.Uint32(soaNumbers(&soa)[16:])) // RFC 2308 section 3
	m.Authority = append(m.Authority, soa)
	for _, n := range names {
		z.addProof(m, n)
	}
}

// soaNumbers returns the data of an SOA record behind its names: serial, refresh, retry, expire, minimum.
func soaNumbers(soa *query.RRset) []byte {
	d := soa.First()
	return d[len(d)-20:]
}

func (z *Zone) addProof(m *query.Message, name dnsname.Name) {
	i, found := slices.BinarySearchFunc(z.chain, name, dnsname.Compare)
	if !found {
		i--
	}
	if i < 0 { // there is no chain: the zone is not signed
		return
	}
	nsec := z.find(z.chain[i], dnswire.TypeNSEC)
	for k := range m.Authority {
		if m.Authority[k].Is(nsec.Name, nsec.Type) {
			return
		}
	}
	m.Authority = append(m.Authority, *nsec)
}

// addGlue adds the addresses of the name servers in ns.
func (z *Zone) addGlue(m *query.Message, ns *query.RRset) {
	for d := range query.RDatas(ns.Data) {
		for _, typ := range []uint16{dnswire.TypeA, dnswire.TypeAAAA} {
			if s := z.find(dnsname.Name(d), typ); s != nil { // names in Data are canonical
				m.Additional = append(m.Additional, *s)
			}
		}
	}
}
