package siminternet

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/clock"
)

// A Behaviour is how a server deviates from a good one. The zero value is a good server.
type Behaviour struct {
	Delay  time.Duration // before each answer
	Loss   float64       // share of UDP queries that get no answer, 0 to 1; the same ones in every run
	Silent bool          // no answer at all; TCP connections are accepted

	Lame Lame

	EDNS    EDNS
	Cookies Cookies
	MaxUDP  int // largest UDP answer in bytes. Zero means 1232

	TruncateUDP   bool // every UDP answer is empty with TC set
	IgnoreUDPSize bool // UDP answers are sent whole, however large
	Padding       int  // makes answers to queries with EDNS larger by so many bytes
	ResetTCP      bool // TCP connections are reset at once
	LowerCase     bool // the question comes back in lower case

	// Forged packets precede each UDP answer, from the server's own address.
	Forge []Forgery

	// Hook, if set, is asked first. A nil Reply leaves the query to the rest of the Behaviour. It is called
	// from several goroutines.
	Hook func(Query) *Reply
}

// Lame says what a server answers that does not serve the zones it should.
type Lame uint8

const (
	NotLame          Lame = iota
	LameRefused           // REFUSED
	LameServfail          // SERVFAIL
	LameUpward            // a referral to the root
	LameUnauthorised      // the right answer without AA, as from a cache
	LameEmpty             // NOERROR with nothing in it, without AA
)

// EDNS says how a server understands RFC 6891.
type EDNS uint8

const (
	EDNSGood         EDNS = iota
	EDNSFormErr           // FORMERR without OPT to every query that has one
	EDNSNotImp            // NOTIMP likewise
	EDNSIgnored           // answers as if there were no OPT
	EDNSDropped           // no answer to a query with OPT
	EDNSNoOptions         // options are ignored: no cookie comes back
	EDNSBadOptions        // FORMERR to every query with an option
	EDNSDropsOptions      // no answer to a query with an option
)

// Cookies says how a server treats DNS cookies (RFC 7873).
type Cookies uint8

const (
	CookiesOff      Cookies = iota // the option is ignored
	CookiesOn                      // a client cookie is answered with a server cookie
	CookiesRequired                // and over UDP, BADCOOKIE without a good server cookie, TC without any cookie
	CookiesWrong                   // the client cookie comes back changed
)

// A Forgery is a false packet.
type Forgery uint8

const (
	ForgeWrongID       Forgery = iota // the right question, another ID, a false address
	ForgeWrongQuestion                // the right ID, another question
	ForgeNoResponse                   // the query itself, QR clear
	ForgeGarbage                      // bytes that are no message
	ForgeWrongCase                    // question with the case of every letter turned, a false address
	ForgeShort                        // the ID and nothing more
)

// A Query is what a Hook sees.
type Query struct {
	Server    netip.Addr
	From      netip.AddrPort
	Transport Transport
	Msg       *dns.Msg // not to be modified

	in *Internet
}

// Answer returns the answer a good server would give, unlimited in size: to be modified and sent.
func (q Query) Answer() *dns.Msg { return q.in.respond(q, Behaviour{IgnoreUDPSize: true}) }

// A Reply is what a Hook sends: Raw packets first, then Msg if there is one, all after Delay. An empty Reply is
// silence. Msg is sent as it is, whatever size the client allowed.
type Reply struct {
	Raw   [][]byte
	Msg   *dns.Msg
	Delay time.Duration
}

// SetBehaviour changes how the server at an address behaves, from the next query on.
func (in *Internet) SetBehaviour(addr netip.Addr, b Behaviour) { in.server(addr).behaviour.Store(&b) }

// BehaviourOf returns how the server at an address behaves.
func (in *Internet) BehaviourOf(addr netip.Addr) Behaviour { return *in.server(addr).behaviour.Load() }

type server struct {
	behaviour atomic.Pointer[Behaviour]

	mu   sync.Mutex // guards everything below
	loss *rand.Rand
}

func (in *Internet) server(addr netip.Addr) *server {
	in.mu.Lock()
	defer in.mu.Unlock()
	s := in.behaviours[addr]
	if s == nil {
		b := addr.As16()
		s = &server{loss: rand.New(rand.NewPCG(binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])))}
		s.behaviour.Store(&Behaviour{})
		in.behaviours[addr] = s
	}
	return s
}

func (s *server) loses(share float64) bool {
	if share <= 0 {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.loss.Float64() < share
}

// Handle gives a query to the server at an address without any network, and returns what the server would send,
// after how long; no packets mean silence. The query is logged.
func (in *Internet) Handle(server netip.Addr, tr Transport, from netip.AddrPort, query []byte) (packets [][]byte, delay time.Duration) {
	out := in.handle(in.server(server), server, query, tr, from)
	return out.packets, out.delay
}

// An outcome is what to send for one query: packets after a delay, or nothing.
type outcome struct {
	packets [][]byte
	delay   time.Duration
}

// handle is the whole server: one query in, what to send out.
func (in *Internet) handle(s *server, addr netip.Addr, wire []byte, tr Transport, from netip.AddrPort) outcome {
	if len(wire) < 12 || wire[2]&0x80 != 0 {
		return outcome{} // no message, or a response: answering would make loops
	}
	b := s.behaviour.Load()
	m := new(dns.Msg)
	if err := m.Unpack(wire); err != nil {
		return outcome{packets: [][]byte{failure(wire, dns.RcodeFormatError)}, delay: b.Delay}
	}
	if m.Opcode != dns.OpcodeQuery {
		return outcome{packets: [][]byte{failure(wire, dns.RcodeNotImplemented)}, delay: b.Delay}
	}
	if len(m.Question) != 1 {
		return outcome{packets: [][]byte{failure(wire, dns.RcodeFormatError)}, delay: b.Delay}
	}

	e := entryOf(m)
	e.Time, e.Server, e.From, e.Transport = clock.Wall(), addr, from, tr
	in.log.add(e)

	q := Query{Server: addr, From: from, Transport: tr, Msg: m, in: in}
	if b.Hook != nil {
		if r := b.Hook(q); r != nil {
			out := outcome{packets: slices.Clone(r.Raw), delay: r.Delay}
			if r.Msg != nil {
				out.packets = append(out.packets, pack(r.Msg))
			}
			return out
		}
	}
	if b.Silent || tr == UDP && s.loses(b.Loss) {
		return outcome{}
	}
	resp := in.respond(q, *b)
	if resp == nil {
		return outcome{}
	}
	out := outcome{delay: b.Delay}
	if tr == UDP {
		for _, f := range b.Forge {
			out.packets = append(out.packets, forge(f, m, wire))
		}
	}
	out.packets = append(out.packets, pack(resp))
	return out
}

// respond makes the response to a well-formed query; nil is silence.
func (in *Internet) respond(q Query, b Behaviour) *dns.Msg {
	opt := q.Msg.IsEdns0()
	hasOptions := opt != nil && len(opt.Option) > 0
	resp := new(dns.Msg).SetReply(q.Msg)
	resp.Compress = true
	resp.CheckingDisabled = q.Msg.CheckingDisabled
	if b.LowerCase {
		resp.Question[0].Name = strings.ToLower(resp.Question[0].Name)
	}

	switch {
	case opt == nil:
	case b.EDNS == EDNSFormErr, b.EDNS == EDNSBadOptions && hasOptions:
		resp.Rcode = dns.RcodeFormatError
		return resp
	case b.EDNS == EDNSNotImp:
		resp.Rcode = dns.RcodeNotImplemented
		return resp
	case b.EDNS == EDNSDropped, b.EDNS == EDNSDropsOptions && hasOptions:
		return nil
	case b.EDNS == EDNSIgnored:
		opt = nil
	}

	if opt == nil && b.Cookies == CookiesRequired && q.Transport == UDP {
		resp.Truncated = true
		return resp
	}
	size, do := dns.MinMsgSize, false
	maxUDP := b.MaxUDP
	if maxUDP == 0 {
		maxUDP = 1232
	}
	if opt != nil {
		do = opt.Do()
		size = min(max(int(opt.UDPSize()), dns.MinMsgSize), maxUDP)
		resp.SetEdns0(uint16(maxUDP), do)
		if opt.Version() != 0 { // RFC 6891 section 6.1.3
			resp.Rcode = dns.RcodeBadVers
			return resp
		}
		if b.EDNS != EDNSNoOptions && !answerCookie(q, opt, resp, b.Cookies) {
			return resp
		}
		if b.Padding > 0 {
			o := resp.IsEdns0()
			o.Option = append(o.Option, &dns.EDNS0_PADDING{Padding: make([]byte, b.Padding)})
		}
	}

	w := in.world.Load()
	zones := w.servers[q.Server]
	question := resp.Question[0]
	switch b.Lame {
	case LameRefused:
		resp.Rcode = dns.RcodeRefused
	case LameServfail:
		resp.Rcode = dns.RcodeServerFailure
	case LameEmpty:
	case LameUpward:
		resp.Ns = in.RootHintRecords()
		resp.Ns = slices.DeleteFunc(resp.Ns, func(rr dns.RR) bool { return rr.Header().Rrtype != dns.TypeNS })
	default:
		r := result{rcode: dns.RcodeRefused}
		if question.Qclass == dns.ClassINET && question.Qtype != dns.TypeAXFR && question.Qtype != dns.TypeIXFR {
			r = answer(zones, question, do)
		}
		resp.Authoritative = r.authoritative && b.Lame != LameUnauthorised
		resp.Rcode, resp.Answer, resp.Ns = r.rcode, r.answer, r.ns
		resp.Extra = append(r.extra, resp.Extra...)
	}

	if q.Transport == UDP && !b.IgnoreUDPSize {
		if b.TruncateUDP {
			resp.Answer, resp.Ns = nil, nil
			resp.Extra = slices.DeleteFunc(resp.Extra, func(rr dns.RR) bool { return rr.Header().Rrtype != dns.TypeOPT })
			resp.Truncated = true
		}
		resp.Truncate(size)
		resp.Compress = true
	}
	return resp
}

// answerCookie adds the cookie option that the query deserves. If that is all the query may get, it completes
// the response and returns false.
func answerCookie(q Query, opt *dns.OPT, resp *dns.Msg, mode Cookies) bool {
	if mode == CookiesOff {
		return true
	}
	insists := mode == CookiesRequired && q.Transport == UDP
	var sent string
	for _, o := range opt.Option {
		if c, ok := o.(*dns.EDNS0_COOKIE); ok {
			sent = c.Cookie
		}
	}
	if len(sent) < 16 { // hexadecimal: no option, or a malformed one
		resp.Truncated = insists
		return !insists
	}
	client := sent[:16]
	sum := sha256.Sum256([]byte(client + q.From.Addr().String() + q.Server.String()))
	good := client + hex.EncodeToString(sum[:8])
	back := good
	if mode == CookiesWrong {
		back = strings.Repeat("0", 16) + good[16:]
	}
	o := resp.IsEdns0()
	o.Option = append(o.Option, &dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: back})
	if insists && sent != good {
		resp.Rcode = dns.RcodeBadCookie
		return false
	}
	return true
}

// forge makes a false packet in answer to the query m, whose bytes are wire.
func forge(f Forgery, m *dns.Msg, wire []byte) []byte {
	resp := new(dns.Msg).SetReply(m)
	resp.Authoritative = true
	switch f {
	case ForgeNoResponse:
		return slices.Clone(wire)
	case ForgeGarbage:
		return []byte("this is no DNS message, though it is longer than a header")
	case ForgeShort:
		return slices.Clone(wire[:2])
	case ForgeWrongID:
		resp.Id = ^m.Id
	case ForgeWrongQuestion:
		resp.Question[0].Name = "forged.invalid."
	case ForgeWrongCase:
		resp.Question[0].Name = strings.Map(turnCase, resp.Question[0].Name)
	}
	resp.Answer = []dns.RR{&dns.A{
		Hdr: dns.RR_Header{Name: resp.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 86400},
		A:   ForgedAddr.AsSlice(),
	}}
	return pack(resp)
}

// ForgedAddr is the address in forged answers. No zone of Standard has it.
var ForgedAddr = netip.MustParseAddr("203.0.113.66")

func turnCase(r rune) rune {
	switch {
	case 'a' <= r && r <= 'z':
		return r - 'a' + 'A'
	case 'A' <= r && r <= 'Z':
		return r - 'A' + 'a'
	}
	return r
}

// failure makes a response of a header alone, for queries that cannot be read.
func failure(wire []byte, rcode int) []byte {
	h := make([]byte, 12)
	copy(h, wire[:4])
	h[2] = 0x80 | h[2]&0x79 // QR; opcode and RD as asked
	h[3] = byte(rcode)
	return h
}

func pack(m *dns.Msg) []byte {
	wire, err := m.Pack()
	if err != nil { // a hook's message, or data that does not fit 64 KiB
		f := new(dns.Msg).SetRcode(m, dns.RcodeServerFailure)
		if wire, err = f.Pack(); err != nil {
			return nil
		}
	}
	return wire
}
