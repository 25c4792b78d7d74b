// Package query holds the words all stages share: what arrived (Query), what to resolve (Question), who
// asks (Client), what iteration brought (Unvalidated), what the caches give back (Answer), what policy says
// (Verdict), and what one resolution may spend (Tree).
//
// The types carry the design's two promises. What is shared between users receives a Question, which cannot
// say who asks. And a client only ever sees an Answer, which only package settled makes.
//
// The package computes little and does no I/O. Memory: a Query and everything it points to belongs to one
// worker and is valid until the response is written; Own makes a copy that may be kept.
package query

import (
	"bytes"
	"net/netip"
	"unsafe"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/usercache"
)

// A Transport is how a query came.
type Transport uint8

// The transports, in the order metrics list them.
const (
	UDP Transport = iota
	TCP
	DoT
	DoH
	DoQ
	NumTransports = iota
)

var transportNames = [NumTransports]string{"udp", "tcp", "dot", "doh", "doq"}

func (t Transport) String() string { return transportNames[t] }

// Encrypted reports whether the transport is private, so that responses are padded (RFC 8467).
func (t Transport) Encrypted() bool { return t >= DoT }

// A View says which tree is resolved: 0 is the public one, others are named sets of stub and forward zones.
type View uint8

// A Subnet is a client subnet (RFC 7871) that is part of what is resolved. The zero value means none.
// Bytes beyond Bits are zero.
type Subnet struct {
	Addr   [16]byte
	Family uint8 // 1 IPv4, 2 IPv6, 0 none
	Bits   uint8
}

// AppendOption appends s to EDNS options as a client sends it; nothing if it has no family.
func (s Subnet) AppendOption(options []byte) []byte {
	if s.Family == 0 {
		return options
	}
	v := append(make([]byte, 0, 20), 0, s.Family, s.Bits, 0)
	return dnswire.AppendOption(options, dnswire.OptionSubnet, append(v, s.prefix()...))
}

// Scope returns the scope that a server gave its answer to a question with s; false if the option it sent back
// is not that of s (RFC 7871 section 7.3).
func (s Subnet) Scope(echo []byte) (uint8, bool) {
	p := s.prefix()
	if s.Family == 0 || len(echo) != 4+len(p) || dnswire.Uint16(echo) != uint16(s.Family) ||
		echo[2] != s.Bits || string(echo[4:]) != string(p) {
		return 0, false
	}
	return echo[3], true
}

// PutEcho writes the option that answers one with s, and returns its length: 8 and Octets. It says that the answer is
// good for all addresses of the subnet that was resolved, if that holds s, and otherwise that it does not depend on s
// (RFC 7871 section 7.2). s is as Read read it.
func (s *Subnet) PutEcho(o []byte, resolved *Subnet) int {
	scope := uint8(0)
	if resolved.holds(s) {
		scope = resolved.Bits
	}
	dnswire.PutUint16(o, dnswire.OptionSubnet)
	dnswire.PutUint16(o[2:], uint16(4+s.Octets()))
	dnswire.PutUint16(o[4:], uint16(s.Family))
	o[6], o[7] = s.Bits, scope
	return 8 + copy(o[8:], s.prefix())
}

// holds reports whether all addresses of o are in s.
func (s *Subnet) holds(o *Subnet) bool {
	if s.Family == 0 || s.Family != o.Family || s.Bits > o.Bits {
		return false
	}
	whole, spare := s.Bits/8, s.Bits%8
	return string(s.Addr[:whole]) == string(o.Addr[:whole]) && (spare == 0 || (s.Addr[whole]^o.Addr[whole])>>(8-spare) == 0)
}

// Octets is how many bytes of the address the option holds.
func (s *Subnet) Octets() int { return (int(min(s.Bits, 128)) + 7) / 8 }

// prefix is the part of the address that the option holds.
func (s *Subnet) prefix() []byte { return s.Addr[:s.Octets()] }

// A Question is what to resolve, and all that shared parts are told. It is comparable: equal Questions have
// equal answers.
type Question struct {
	Name  dnsname.Name
	Type  uint16
	Class uint16
	// DO asks for DNSSEC records. CD takes the data unchecked (RFC 4035 section 3.2.2); such answers live
	// under keys of their own.
	DO, CD bool
	View   View
	Subnet Subnet
}

// Own returns the question with a name of its own, so that it may outlive the listener's buffer.
func (q Question) Own() Question {
	q.Name = dnsname.Name([]byte(q.Name))
	return q
}

// MaxHint is the most bytes of a device hint (a device id, a MAC address, a CPE id).
const MaxHint = 64

// A Query is one message from a client, read by Read. It belongs to a worker, which reuses it.
type Query struct {
	// Set by the listener.

	Transport Transport
	Listener  uint16         // which listener, for its default device and for metrics
	Source    netip.AddrPort // who sent it (behind a PROXY header: who sent it first)
	Local     netip.AddrPort // the address asked
	Arrived   clock.Instant
	// ServerName is the TLS server name (DoT, DoH, DoQ), in lower case, without the final dot; "" if none.
	ServerName string
	// PathDevice is what followed the DoH path, AuthDevice the user of HTTP authentication, AuthSecret its
	// password or bearer token; "" if none.
	PathDevice, AuthDevice, AuthSecret string

	// Proof is what the identifying stage found out of AuthSecret where it could wait.
	Proof Proof

	// Set by Read.

	ID       uint16
	Opcode   uint8 // as sent: responses echo it
	RD, AD   bool
	Question Question // Name points into name below; CD and DO are the client's
	EDNS     EDNS
	// AsIs is the question's name as the client spelled it: answers echo its letter case.
	AsIs []byte

	// ServerCookie is what goes back to a client that sent a cookie (RFC 7873), set as the query is admitted;
	// CookieOK says that the one it sent was ours for its address, so that the address is not forged.
	ServerCookie [16]byte
	HasCookie    bool
	CookieOK     bool

	name [dnsname.MaxLen + 1]byte

	// Client is who asks, filled in by the identifying stage.
	Client Client

	// Turn is how far the pipeline has come with it.
	Turn Turn

	// Outcome is what became of it, for counters and logs; filled in as the response is made.
	Outcome Outcome

	// Work space of the stages, so that a hit allocates nothing.
	Scratch *Scratch
}

// An Outcome is what observers learn of a response.
type Outcome struct {
	RCode   uint16
	Verdict VerdictKind
	Why     Why
	List    uint16
	Line    uint32
	Hit     bool // answered from the caches
	Refused RefuseReason
}

// A RefuseReason says why a query was refused or dropped before it was resolved; metrics count by it.
type RefuseReason uint8

// The reasons.
const (
	NotRefused        RefuseReason = iota
	RefuseAccess                   // the source may not ask (access.allow, a device's own networks)
	RefuseStranger                 // nobody identified the client and strangers are refused
	RefuseDevice                   // a device id that is malformed or unknown over an encrypted transport
	RefuseCold                     // no user data yet (users.when_cold)
	RefuseRate                     // the source's rate; dropped
	RefuseSlip                     // the source's rate; answered with TC=1, so that it can come over TCP
	RefuseOutstanding              // the source has too many queries under way
	RefuseBusy                     // too many queries under way in all, or pressure
	RefuseConnections              // a connection beyond its limit
	RefuseUserRate                 // the rate of the user or device
	RefuseDedicated                // a dedicated address that is nobody's; dropped
	Unproven                       // no refusal: the password has to be verified first, see Proof
	NumRefuseReason   = iota
)

var refuseNames = [NumRefuseReason]string{"", "access", "stranger", "device", "cold", "rate", "slip", "outstanding", "busy", "connections",
	"user_rate", "dedicated", "unproven"}

func (r RefuseReason) String() string { return refuseNames[r] }

// A Proof says whether the secret that a client has shown was verified for its query.
type Proof uint8

// The proofs.
const (
	NoProof     Proof = iota // it was not
	ProofGood                // it is the device's
	ProofBad                 // it is not
	ProofFailed              // there was no room to verify it, or it was tried too often
)

// EDNS is what the query's OPT record said.
type EDNS struct {
	Present bool
	Version uint8
	UDPSize uint16 // as sent; below 512 means 512
	Cookie  []byte // client cookie, and server cookie if any (RFC 7873): 8, or 16 to 40 bytes
	Subnet  Subnet // RFC 7871, as sent
	// HasSubnet is true when the option was there, even with a prefix of length 0 (which declines).
	HasSubnet bool
	// MAC is the first option with a device's MAC address (65001, 65073), MACCode its code; CPE the first with
	// the identity of a customer's equipment (65074). For identify.
	MAC, CPE []byte
	MACCode  uint16
	// Structured: the client wants to be told in JSON why something was filtered.
	Structured bool
	NSID       bool
	Padding    bool
	KeepAlive  bool
}

// Scratch is a worker's buffers.
type Scratch struct {
	// Worker numbers the worker whose space it is, from 1; 0 is nobody's.
	Worker int
	// Entry receives an answer copied out of the cache.
	Entry [MaxEntry]byte
	// Hashes receives suffix hashes of a name.
	Hashes [dnsname.MaxLabels + 1]uint64
	Name   [dnsname.MaxLen + 1]byte
	// Spent counts what trying rules costs, OwnSpent what a user's own do; see filter.Query.
	Spent, OwnSpent int
	// Device and Hint hold what names the device while it is looked up.
	Device usercache.DeviceID
	Hint   [MaxHint + 4]byte
	// Policy is what package policy keeps from one query to the next.
	Policy any
	// Answer and Verdict are of the step under way: behind interfaces they would escape one by one.
	Answer  Answer
	Verdict Verdict
}

// MaxEntry is the most bytes of a settled answer that the answer cache keeps; larger ones are made anew from
// RRsets each time.
const MaxEntry = 8 << 10

// A Fault is why Read could not make a question of a message, as the response it calls for.
type Fault uint8

// The faults.
const (
	NoFault    Fault = iota
	Ignore           // nothing may be sent: not a query, or too short to have a header
	FormErr          // header-only FORMERR (RFC 1035 section 4.1.1)
	NotImp           // NOTIMP: an opcode other than QUERY
	BadVers          // BADVERS (RFC 6891 section 6.1.3)
	CookieOnly       // no question, but a cookie that wants a server cookie or to be proved good (RFC 7873 section 5.4)
	NumFault   = iota
)

// Read reads a message in place. After NoFault q holds everything that was asked; after any other fault but
// Ignore at least ID and RD are set.
func (q *Query) Read(wire []byte) Fault {
	q.ID, q.Opcode, q.RD, q.AD, q.AsIs, q.EDNS = 0, 0, false, false, nil, EDNS{}
	q.HasCookie, q.CookieOK, q.Proof = false, false, NoProof
	q.Question, q.Client, q.Turn, q.Outcome = Question{}, Client{}, Turn{}, Outcome{}
	if len(wire) < dnswire.HeaderLen {
		return Ignore
	}
	h := dnswire.ReadHeader(wire)
	if h.Response() {
		return Ignore // never answer a response: two servers would talk for ever
	}
	q.ID, q.Opcode, q.RD, q.AD = h.ID, uint8(h.Opcode()), h.RD(), h.AD()
	q.Question.CD = h.CD()
	if h.Opcode() != dnswire.OpcodeQuery {
		return NotImp
	}
	if h.QD == 0 && h.AN == 0 && h.NS == 0 && !h.TC() {
		if q.readAdditional(wire, dnswire.HeaderLen, int(h.AR)) == NoFault && q.EDNS.Cookie != nil {
			return CookieOnly
		}
		return FormErr
	}
	if h.QD != 1 || h.AN != 0 || h.NS > 1 || h.TC() {
		return FormErr
	}
	end := dnswire.PlainName(wire, dnswire.HeaderLen)
	if end < 0 || end+4 > len(wire) {
		return FormErr
	}
	q.AsIs = wire[dnswire.HeaderLen:end]
	n := len(q.AsIs)
	dnsname.Fold(q.name[:n], q.AsIs)
	// The name stays in q: the string is a view of q.name and lives as long as q is not read again.
	q.Question.Name = dnsname.Name(unsafe.String(&q.name[0], n))
	q.Question.Type = dnswire.Uint16(wire[end:])
	q.Question.Class = dnswire.Uint16(wire[end+2:])
	off := end + 4
	if h.NS == 1 { // IXFR alone, which is refused as such, has a SOA record there (RFC 1995 section 3)
		if q.Question.Type != dnswire.TypeIXFR {
			return FormErr
		}
		if _, off = dnswire.ReadRR(wire, off); off < 0 {
			return FormErr
		}
	}
	return q.readAdditional(wire, off, int(h.AR))
}

// readAdditional reads the additional section of a query, in which only OPT means anything. TSIG and SIG(0)
// are not served on this port, so a signed query is a form error rather than a question whose signature
// nobody checked.
func (q *Query) readAdditional(wire []byte, off, count int) Fault {
	for range count {
		rr, next := dnswire.ReadRR(wire, off)
		if next < 0 {
			return FormErr
		}
		switch rr.Type {
		case dnswire.TypeOPT:
			if q.EDNS.Present || wire[off] != 0 { // one OPT, owned by the root (RFC 6891 section 6.1.1)
				return FormErr
			}
			q.EDNS.Present = true
			q.EDNS.UDPSize = rr.Class
			q.EDNS.Version = uint8(rr.TTL >> 16)
			q.Question.DO = rr.TTL&0x8000 != 0
			if !q.readOptions(wire[rr.Data:rr.End]) {
				return FormErr
			}
		case dnswire.TypeTSIG, dnswire.TypeSIG:
			return FormErr
		}
		off = next
	}
	if off != len(wire) && q.Transport != UDP {
		return FormErr // a framed message with trailing bytes
	}
	if q.EDNS.Version != 0 {
		return BadVers
	}
	return NoFault
}

// maxOptions bounds the EDNS options read of one query (hardening: option floods). The first of a kind
// counts, further ones are ignored.
const maxOptions = 32

func (q *Query) readOptions(b []byte) bool {
	for n := 0; len(b) > 0; n++ {
		if len(b) < 4 {
			return false
		}
		code, l := dnswire.Uint16(b), int(dnswire.Uint16(b[2:]))
		if len(b) < 4+l {
			return false
		}
		v := b[4 : 4+l]
		b = b[4+l:]
		if n >= maxOptions {
			continue
		}
		switch code {
		case dnswire.OptionCookie:
			if l != 8 && (l < 16 || l > 40) { // RFC 7873 section 5.2.2
				return false
			}
			if q.EDNS.Cookie == nil {
				q.EDNS.Cookie = v
			}
		case dnswire.OptionSubnet:
			if q.EDNS.HasSubnet {
				continue
			}
			s, ok := readSubnet(v)
			if !ok {
				return false
			}
			q.EDNS.Subnet, q.EDNS.HasSubnet = s, true
		case dnswire.OptionMAC, dnswire.OptionMACText:
			if q.EDNS.MAC == nil {
				q.EDNS.MAC, q.EDNS.MACCode = v, code
			}
		case dnswire.OptionCPEID:
			if q.EDNS.CPE == nil {
				q.EDNS.CPE = v
			}
		case dnswire.OptionEDE:
			// Without a text it asks for structured error data (draft-ietf-dnsop-structured-dns-error); drafts
			// differ on whether the code, 0, is there.
			q.EDNS.Structured = l == 0 || l == 2 && dnswire.Uint16(v) == 0
		case dnswire.OptionNSID:
			q.EDNS.NSID = true
		case dnswire.OptionPadding:
			q.EDNS.Padding = true
		case dnswire.OptionKeepAlive:
			q.EDNS.KeepAlive = true
		}
	}
	return true
}

// readSubnet reads a client subnet option (RFC 7871 section 6): family, source and scope prefix lengths, and
// just the bytes that the source prefix needs, spare bits zero.
func readSubnet(b []byte) (Subnet, bool) {
	if len(b) < 4 || b[3] != 0 {
		return Subnet{}, false
	}
	s := Subnet{Family: uint8(dnswire.Uint16(b)), Bits: b[2]}
	width := map[uint16]uint8{1: 32, 2: 128}[dnswire.Uint16(b)]
	addr := b[4:]
	if s.Bits > width || len(addr) != int(s.Bits+7)/8 {
		return Subnet{}, false
	}
	copy(s.Addr[:], addr)
	if spare := s.Bits % 8; spare != 0 && addr[len(addr)-1]<<spare != 0 {
		return Subnet{}, false
	}
	return s, true
}

// MaxResponse returns the most bytes a response may have: over UDP what the client offered, at least 512
// and at most limit; otherwise what a length prefix can say.
func (q *Query) MaxResponse(limit int) int {
	if q.Transport != UDP {
		return 65535
	}
	if !q.EDNS.Present {
		return 512
	}
	return min(max(int(q.EDNS.UDPSize), 512), max(limit, 512))
}

// Own returns a copy of q that may outlive the listener's buffer. It has no work space: who goes on with it
// lends it some.
func (q *Query) Own() *Query {
	c := *q
	c.AsIs = append([]byte(nil), q.AsIs...)
	c.keepNames(q)
	c.EDNS.Cookie = append([]byte(nil), q.EDNS.Cookie...)
	c.EDNS.MAC = bytes.Clone(q.EDNS.MAC)
	c.EDNS.CPE = bytes.Clone(q.EDNS.CPE)
	c.Scratch = nil
	return &c
}
