package query

import (
	"errors"
	"net/netip"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// An Ask is one question for one server: what the iterator decides and the exchange carries out.
//
// The exchange spends one of its tree's queries for every message that it sends (joining an identical
// exchange under way costs one too), and sends nothing when none is left: its error then wraps ErrLimit.
// Which servers to ask, how often and with what EDNS is the iterator's business, as is Tree.Send.
type Ask struct {
	Server netip.AddrPort
	Name   dnsname.Name
	Type   uint16
	Class  uint16
	// Header and EDNS flags. DO has no effect with NoEDNS.
	RD, CD, DO bool
	// Case0x20 spells the name in random letter case over UDP and wants it back (RFC 5452 and draft-vixie-dnsext-dns0x20).
	Case0x20 bool
	// NoEDNS leaves the OPT record out, NoOptions sends it without options (cookies, client subnet).
	NoEDNS, NoOptions bool
	// UDPSize is what OPT offers. Zero means 1232.
	UDPSize uint16
	// TCP asks over TCP from the start.
	TCP bool
	// Subnet is the client subnet to send (RFC 7871); zero means none.
	Subnet Subnet
	// Timeout ends the exchange, one over UDP that goes on over TCP included: TCP then gets as much again,
	// at least a second. The context ends it sooner.
	Timeout time.Duration
}

// A Reply is the one response that matched an Ask.
type Reply struct {
	// Message is well formed, has QR set, opcode QUERY, and echoes the question, or has none when it reports
	// an error. It is never truncated, unless it came over TCP and says so.
	Message *Message
	// RTT is the time from sending to receiving over the transport that answered, the TCP handshake not
	// counted. Exchanges that were joined late give less than the truth; Joined says so, and no estimate
	// should take such a sample.
	RTT    time.Duration
	Joined bool
	// TCP says that it came over TCP: asked so, or because of truncation or a mismatch over UDP.
	TCP bool
	// Truncated says that UDP brought TC=1 and TCP was used therefore.
	Truncated bool
	// CaseLost says that the question came back in other letters over UDP, and over TCP too, which was used
	// therefore: the server is better asked without Case0x20. If TCP keeps the letters, somebody was guessing,
	// which is a Mismatch.
	CaseLost bool
	// Mismatch says that something else over UDP did not match, so that TCP was used. Never the server's fault.
	Mismatch bool
	// Scope is the scope prefix length if the server echoed Ask.Subnet's family, source length and address
	// (RFC 7871 section 7.3); without a proper echo it is 0 and HasScope is false.
	Scope    uint8
	HasScope bool
}

// Errors of an exchange, besides those wrapping ErrMalformed, ErrLimit and the context's.
var (
	// ErrTimeout: no matching response came in time. A response that does not match is nobody's fault and is
	// waited out, so it ends here too.
	ErrTimeout = errors.New("no response in time")
	// ErrUnreachable: the network said so (ICMP, no route, connection refused or reset).
	ErrUnreachable = errors.New("server unreachable")
	// ErrTruncated: UDP said TC=1 and TCP gave nothing. Data of a truncated response is never used.
	ErrTruncated = errors.New("truncated response, and TCP brought none")
	// ErrBusy: too many exchanges with the server are outstanding. Nothing was sent, and it says nothing of it.
	ErrBusy = errors.New("too many queries to one server outstanding")
)
