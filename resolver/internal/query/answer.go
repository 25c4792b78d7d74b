package query

import (
	"net/netip"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// Unvalidated is what iteration, forwarding or a cache of RRsets brings: data that no client may see yet.
type Unvalidated struct {
	Question Question
	RCode    uint16 // NOERROR, NXDOMAIN or YXDOMAIN: an answer, never a failure

	// Answer holds the alias chain from Question.Name in order, each CNAME (and the DNAME before it), then
	// the RRset of the last name if there is one. Authority holds the SOA and the denial proof of a negative
	// answer. Additional is what may help a client.
	Answer, Authority, Additional []RRset

	// Zone is the zone of the last name, and Servers who sent what is new, so that a bogus answer can be
	// asked for again elsewhere.
	Zone    dnsname.Name
	Servers []netip.AddrPort
	// Cached is true if nothing had to be asked.
	Cached bool
	// Until is when it ends at the latest, if that is before its TTLs say so; zero: they say. What comes from the cache
	// has the TTL of its zone, and does not outlive the parent's grant of that zone.
	Until clock.Instant
	// Inferred is true if some of it follows from proofs of other names (RFC 8198).
	Inferred bool
	// Stale is true if some of it is past its TTL (RFC 8767); TTLs are then the configured stale TTL.
	Stale bool
}

// An Answer is a settled answer as the stages see it: a view of an entry, independent of who asks. Its byte
// slices are valid as long as the buffer it was read from. Only package settled makes one with a Body.
type Answer struct {
	Status Status
	RCode  uint16
	// EDE is an extended DNS error that belongs to the data (stale, bogus …), NoEDE if none.
	EDE uint16

	Settled clock.Instant // when its TTLs were true
	Expires clock.Instant // when the first of them ends
	Stale   bool          // made of stale data

	// AN, NS and AR count the records in Body, which is what follows the question of a response whose
	// question is of the same name: compression pointers count from that message's start. TTLs lists, as
	// 16-bit numbers, where in Body TTLs stand.
	AN, NS, AR uint16
	Body, TTLs []byte

	Facts Facts
}

// Facts are what policy needs to know of an answer, taken out once when it was settled: a sequence of
// records {kind uint8, length uint8, value} to be read with Next.
type Facts []byte

// A FactKind says what a fact holds.
type FactKind uint8

// The kinds of facts.
const (
	FactAlias   FactKind = 1 // target of a CNAME or DNAME-made CNAME: canonical name
	FactAddress FactKind = 2 // A or AAAA, or an address hint of SVCB/HTTPS: 4 or 16 bytes
	FactTarget  FactKind = 3 // target of SVCB or HTTPS (in AliasMode too), MX, SRV, NS or PTR: canonical name
	FactZone    FactKind = 4 // the zone cut of the last name: canonical name
)

// Servers are the name servers of the zones on the way to a name: their names in canonical order, and what is known of
// their addresses, in ascending order.
type Servers struct {
	Names []dnsname.Name
	Addrs []netip.Addr
}

// Next returns the fact at off and the offset of the one behind it; ok is false at the end.
func (f Facts) Next(off int) (kind FactKind, value []byte, next int, ok bool) {
	if off+2 > len(f) {
		return 0, nil, off, false
	}
	end := off + 2 + int(f[off+1])
	if end > len(f) {
		return 0, nil, off, false
	}
	return FactKind(f[off]), f[off+2 : end], end, true
}

// AppendFact appends a fact; a value beyond 255 bytes cannot occur.
func AppendFact(f Facts, kind FactKind, value []byte) Facts {
	f = append(f, byte(kind), byte(len(value)))
	return append(f, value...)
}
