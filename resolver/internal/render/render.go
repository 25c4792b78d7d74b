// Package render writes the response for one client: ID, letter case, flags, aliases made by policy, TTLs,
// EDNS, extended errors, cookies, padding, truncation; and the edits that a Turn asks for, which are AAAA
// records made of A records and private addresses left out.
//
// Every method writes a whole response into a buffer of the caller and returns its length; none allocates, but
// for clients that ask for structured error data. The response never exceeds what the client's transport takes (Query.MaxResponse) nor the buffer: what does
// not fit becomes a response with TC=1 and no records (RFC 2181 section 9), since a part of an RRset helps
// nobody. A length of 0 means that nothing can be sent.
package render

import (
	"encoding/json"
	"net/netip"
	"time"
	"unicode/utf8"
	"unsafe"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dns64"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/rebinding"
)

// Options tune a Renderer.
type Options struct {
	// MaxUDP is the most bytes of a UDP response (answers.max_udp_size); at least 512.
	MaxUDP int
	// EDE: give extended errors (RFC 8914).
	EDE bool
	// Contact and Organization go to clients that ask for structured error data: whom to tell of names that are
	// blocked in error, each a URI, and who blocks.
	Contact      []string
	Organization string
	// Subnets tells clients that sent a subnet what answers are good for (RFC 7871 section 7.2).
	Subnets bool
	// NSID is given to clients that ask for it (RFC 5001); "" gives none. At most 128 bytes of it are used.
	NSID string
	// DNS64 and Private carry out the edits of their kind; needed if a Turn asks for one.
	DNS64   *dns64.Prefix
	Private *rebinding.Guard
}

// A Renderer writes responses. It is constant after New and safe for concurrent use.
type Renderer struct{ o Options }

// New returns a Renderer.
func New(o Options) *Renderer {
	o.MaxUDP = max(o.MaxUDP, 512)
	o.NSID = o.NSID[:min(len(o.NSID), maxNSID)]
	return &Renderer{o}
}

// Extended errors that Sluice gives (RFC 8914 and the IANA registry).
const (
	EDEOther          uint16 = 0
	EDEStale          uint16 = 3
	EDEBogus          uint16 = 6
	EDECachedError    uint16 = 13
	EDENotReady       uint16 = 14
	EDEBlocked        uint16 = 15
	EDECensored       uint16 = 16
	EDEFiltered       uint16 = 17
	EDEProhibited     uint16 = 18
	EDEStaleNXDomain  uint16 = 19
	EDENotAuthority   uint16 = 20
	EDENotSupported   uint16 = 21
	EDENoReachable    uint16 = 22
	EDENetworkError   uint16 = 23
	EDEInvalidData    uint16 = 24
	EDESynthesized    uint16 = 29
	paddingBlock             = 468 // RFC 8467 section 4.1
	ourUDPSize        uint16 = 1232
	edeOther                 = 0
	maxReason                = 120 // bytes of EDE text
	maxStructured            = 700 // bytes of structured error data
	maxNSID                  = 128 // so that OPT fits beside any question in 512 bytes
	cookieLen                = 24  // client and server cookie
	strippedTTL              = 60  // seconds for which a client keeps that all addresses were left out
	negativeSOASerial        = 1
)

// An ede is an extended error to be written; none if code is query.NoEDE.
type ede struct {
	code uint16
	text string
}

var noEDE = ede{code: query.NoEDE}

// plain is an extended error with a text for people.
func plain(code uint16, text string) ede {
	if len(text) > maxReason {
		text = text[:maxReason]
		for len(text) > 0 && !utf8.ValidString(text) {
			text = text[:len(text)-1]
		}
	}
	return ede{code, text}
}

// filtered is the extended error of a blocking answer. A client that asks for it gets structured error data
// (draft-ietf-dnsop-structured-dns-error) in place of the text, which is I-JSON with short names: "c" whom to tell
// of an error, "j" why, "o" who blocks. Clients that insist on a contact ignore what an operator without one
// sends.
func (r *Renderer) filtered(q *query.Query, code uint16, reason string) ede {
	e := plain(code, reason)
	if !q.EDNS.Structured || !r.o.EDE || code != EDEBlocked && code != EDECensored && code != EDEFiltered {
		return e
	}
	data := struct {
		Contact      []string `json:"c,omitempty"`
		Reason       string   `json:"j"`
		Organization string   `json:"o,omitempty"`
	}{r.o.Contact, e.text, r.o.Organization}
	if text, err := json.Marshal(data); err == nil && len(text) <= maxStructured {
		e.text = string(text)
	}
	return e
}

// Answer writes a settled answer, with the TTLs that are left at now. The answer's question is
// q.Turn.Current; aliases that policy made go in front.
func (r *Renderer) Answer(q *query.Query, a *query.Answer, now clock.Instant, out []byte) int {
	flags := base(q)
	t := &q.Turn
	if a.Status == query.Secure && (q.AD || q.Question.DO) && t.NumAliases == 0 && !t.Flatten && t.Edit == 0 {
		flags |= dnswire.FlagAD
	}
	e := ede{code: a.EDE}
	age := uint32(max(now.Sub(a.Settled), 0) / time.Second)
	q.Outcome.RCode = a.RCode
	if t.NumAliases > 0 || t.Flatten || t.Edit != 0 {
		return r.rewritten(q, a, e, age, out)
	}

	end := dnswire.HeaderLen + len(q.AsIs) + 4
	size := end + len(a.Body)
	room := min(q.MaxResponse(r.o.MaxUDP), len(out))
	if size+r.optLen(q, e) > room {
		return r.truncated(q, flags, e, out)
	}
	h := dnswire.Header{ID: q.ID, Flags: flags | a.RCode&15, QD: 1, AN: a.AN, NS: a.NS, AR: a.AR}
	r.question(q, out)
	copy(out[end:], a.Body)
	if age > 0 {
		body := out[end:size]
		for o := 0; o+2 <= len(a.TTLs); o += 2 {
			at := int(a.TTLs[o]) | int(a.TTLs[o+1])<<8
			ttl := dnswire.Uint32(body[at:])
			dnswire.PutUint32(body[at:], ttl-min(ttl, age))
		}
	}
	return r.finish(q, h, a.RCode, e, size, room, out)
}

// base returns the flags that every response to q has.
func base(q *query.Query) uint16 {
	f := dnswire.FlagQR | dnswire.FlagRA
	if q.RD {
		f |= dnswire.FlagRD
	}
	if q.Question.CD {
		f |= dnswire.FlagCD
	}
	return f
}

// question writes the question as the client spelled it.
func (r *Renderer) question(q *query.Query, out []byte) {
	n := dnswire.HeaderLen + copy(out[dnswire.HeaderLen:], q.AsIs)
	dnswire.PutUint16(out[n:], q.Question.Type)
	dnswire.PutUint16(out[n+2:], q.Question.Class)
}

// optLen returns the size of the OPT record without padding.
func (r *Renderer) optLen(q *query.Query, e ede) int {
	if !q.EDNS.Present {
		return 0
	}
	n := 11
	if q.HasCookie {
		n += 4 + cookieLen
	}
	if q.EDNS.NSID && r.o.NSID != "" {
		n += 4 + len(r.o.NSID)
	}
	if r.o.Subnets && q.EDNS.HasSubnet {
		n += 8 + q.EDNS.Subnet.Octets()
	}
	if r.o.EDE && e.code != query.NoEDE {
		n += 6 + len(e.text)
	}
	return n
}

// finish writes OPT behind the size bytes that are there, then the header.
func (r *Renderer) finish(q *query.Query, h dnswire.Header, rcode uint16, e ede, size, room int, out []byte) int {
	if q.EDNS.Present {
		n := r.optLen(q, e)
		if size+n > room {
			return 0
		}
		pad := 0
		if q.Transport.Encrypted() {
			// Padding to a multiple of 468 bytes, the option's own four bytes included (RFC 8467).
			pad = (size+n+4+paddingBlock-1)/paddingBlock*paddingBlock - (size + n)
			if size+n+pad > room {
				pad = 0
			}
		}
		o := out[size : size+n+pad]
		o[0] = 0
		dnswire.PutUint16(o[1:], dnswire.TypeOPT)
		dnswire.PutUint16(o[3:], ourUDPSize)
		o[5], o[6], o[7], o[8] = byte(rcode>>4), 0, 0, 0
		if q.Question.DO {
			o[7] = 0x80
		}
		dnswire.PutUint16(o[9:], uint16(n+pad-11))
		at := 11
		if q.HasCookie {
			dnswire.PutUint16(o[at:], dnswire.OptionCookie)
			dnswire.PutUint16(o[at+2:], cookieLen)
			copy(o[at+4:], q.EDNS.Cookie[:cookieLen-len(q.ServerCookie)])
			copy(o[at+4+cookieLen-len(q.ServerCookie):], q.ServerCookie[:])
			at += 4 + cookieLen
		}
		if q.EDNS.NSID && r.o.NSID != "" {
			dnswire.PutUint16(o[at:], dnswire.OptionNSID)
			dnswire.PutUint16(o[at+2:], uint16(len(r.o.NSID)))
			at += 4 + copy(o[at+4:], r.o.NSID)
		}
		if r.o.Subnets && q.EDNS.HasSubnet {
			at += q.EDNS.Subnet.PutEcho(o[at:], &q.Turn.Current.Subnet)
		}
		if n > at {
			dnswire.PutUint16(o[at:], dnswire.OptionEDE)
			dnswire.PutUint16(o[at+2:], uint16(n-at-4))
			dnswire.PutUint16(o[at+4:], e.code)
			copy(o[at+6:n], e.text)
		}
		if pad > 0 {
			dnswire.PutUint16(o[n:], dnswire.OptionPadding)
			dnswire.PutUint16(o[n+2:], uint16(pad-4))
			clear(o[n+4:])
		}
		h.AR++
		size += n + pad
	}
	h.Put(out)
	return size
}

// truncated writes a response with TC=1 and no records. Where there is no other transport to come back over, what does
// not fit is a failure.
func (r *Renderer) truncated(q *query.Query, flags uint16, e ede, out []byte) int {
	if q.Transport != query.UDP {
		return r.error(q, dnswire.RCodeServFail, plain(edeOther, "the answer does not fit into a message"), out)
	}
	size := dnswire.HeaderLen + len(q.AsIs) + 4
	room := min(q.MaxResponse(r.o.MaxUDP), len(out))
	if size > room {
		return 0
	}
	r.question(q, out)
	if size+r.optLen(q, e) > room {
		e = noEDE
	}
	return r.finish(q, dnswire.Header{ID: q.ID, Flags: flags | dnswire.FlagTC, QD: 1}, 0, e, size, room, out)
}

// Truncated writes the answer of RPZ's tcp-only: over UDP, TC=1 and nothing else.
func (r *Renderer) Truncated(q *query.Query, out []byte) int {
	q.Outcome.RCode = dnswire.RCodeNoError
	return r.truncated(q, base(q), noEDE, out)
}

// Error writes a response without records. code is an extended error, query.NoEDE for none.
func (r *Renderer) Error(q *query.Query, rcode, code uint16, text string, out []byte) int {
	return r.error(q, rcode, plain(code, text), out)
}

func (r *Renderer) error(q *query.Query, rcode uint16, e ede, out []byte) int {
	q.Outcome.RCode = rcode
	size := dnswire.HeaderLen + len(q.AsIs) + 4
	room := min(q.MaxResponse(r.o.MaxUDP), len(out))
	if len(q.AsIs) == 0 || size > room {
		return r.headerOnly(q, rcode, out)
	}
	if size+r.optLen(q, e) > room {
		e = noEDE
	}
	r.question(q, out)
	return r.finish(q, dnswire.Header{ID: q.ID, Flags: base(q) | rcode&15, QD: 1}, rcode, e, size, room, out)
}

// Fault writes the response to a message that could not be read: a bare header, so that nothing a stranger
// wrote is reflected, for an unknown EDNS version BADVERS with OPT (RFC 6891 section 6.1.3), and for a cookie alone the
// server's.
func (r *Renderer) Fault(q *query.Query, f query.Fault, out []byte) int {
	switch f {
	case query.FormErr:
		return r.headerOnly(q, dnswire.RCodeFormErr, out)
	case query.NotImp:
		return r.headerOnly(q, dnswire.RCodeNotImp, out)
	case query.CookieOnly:
		return r.cookie(q, out)
	case query.BadVers:
		return r.Error(q, dnswire.RCodeBadVers, query.NoEDE, "", out)
	}
	return 0 // NoFault is no fault, and Ignore says that nothing may be sent
}

// cookie answers a message that has a cookie and no question (RFC 7873 section 5.4). Where no cookies are given it is
// malformed, as it always was.
func (r *Renderer) cookie(q *query.Query, out []byte) int {
	if !q.HasCookie || len(out) < dnswire.HeaderLen {
		return r.headerOnly(q, dnswire.RCodeFormErr, out)
	}
	q.Outcome.RCode = dnswire.RCodeNoError
	if len(q.EDNS.Cookie) > cookieLen-len(q.ServerCookie) && !q.CookieOK {
		q.Outcome.RCode = dnswire.RCodeBadCook
	}
	h := dnswire.Header{ID: q.ID, Flags: base(q) | q.Outcome.RCode&15}
	return r.finish(q, h, q.Outcome.RCode, noEDE, dnswire.HeaderLen, min(q.MaxResponse(r.o.MaxUDP), len(out)), out)
}

func (r *Renderer) headerOnly(q *query.Query, rcode uint16, out []byte) int {
	if len(out) < dnswire.HeaderLen {
		return 0
	}
	q.Outcome.RCode = rcode
	flags := dnswire.FlagQR | uint16(q.Opcode)<<11 | rcode&15
	if q.RD {
		flags |= dnswire.FlagRD
	}
	dnswire.Header{ID: q.ID, Flags: flags}.Put(out)
	return dnswire.HeaderLen
}

// Block writes the answer to a blocked question.
func (r *Renderer) Block(q *query.Query, b *query.Block, out []byte) int {
	e := r.filtered(q, b.EDE, b.Reason)
	if n := r.block(q, b, e, out); n > 0 && (e.text == "" || out[2]&byte(dnswire.FlagTC>>8) == 0) {
		return n
	}
	return r.block(q, b, ede{code: e.code}, out) // the text is for people; the answer goes before it
}

func (r *Renderer) block(q *query.Query, b *query.Block, e ede, out []byte) int {
	ttl := uint32(b.TTL / time.Second)
	var addr netip.Addr
	switch b.Mode {
	case query.BlockRefused:
		return r.error(q, dnswire.RCodeRefused, e, out)
	case query.BlockNXDomain:
		return r.negative(q, dnswire.RCodeNXDomain, ttl, e, out)
	case query.BlockNull:
		switch q.Question.Type {
		case dnswire.TypeA:
			addr = netip.IPv4Unspecified()
		case dnswire.TypeAAAA:
			addr = netip.IPv6Unspecified()
		}
	case query.BlockCustom:
		switch q.Question.Type {
		case dnswire.TypeA:
			addr = b.IPv4
		case dnswire.TypeAAAA:
			addr = b.IPv6
		}
	case query.BlockNoData:
	}
	if !addr.IsValid() {
		return r.negative(q, dnswire.RCodeNoError, ttl, e, out)
	}
	m, ok := r.start(q, e, out)
	if !ok {
		return 0
	}
	var ip [16]byte
	if addr.Is4() {
		a := addr.As4()
		copy(ip[:], a[:])
	} else {
		ip = addr.As16()
	}
	m.aliases(q)
	m.rr(0, m.owner, q.Question.Type, q.Question.Class, ttl, ip[:addr.BitLen()/8])
	return r.end(q, &m, dnswire.RCodeNoError, e, out)
}

// Synth writes an answer that policy made.
func (r *Renderer) Synth(q *query.Query, s *query.Synth, out []byte) int {
	if s.RCode != dnswire.RCodeNoError || len(s.RRs) == 0 {
		return r.negative(q, s.RCode, s.TTL, noEDE, out)
	}
	m, ok := r.start(q, noEDE, out)
	if !ok {
		return 0
	}
	m.aliases(q)
	for i := range s.RRs {
		set := &s.RRs[i]
		for data := set.Data; len(data) >= 2; {
			n := 2 + int(dnswire.Uint16(data))
			m.rr(0, m.owner, set.Type, q.Question.Class, set.TTL, data[2:n])
			data = data[n:]
		}
	}
	return r.end(q, &m, dnswire.RCodeNoError, noEDE, out)
}

// soaHead is the RDATA of the SOA record in negative answers that policy makes, up to the MINIMUM: primary
// sluice.invalid., mailbox hostmaster.sluice.invalid., serial 1, and timers of no consequence.
var soaHead = func() []byte {
	b := append([]byte(dnsname.MustParse("sluice.invalid.")), dnsname.MustParse("hostmaster.sluice.invalid.")...)
	for _, v := range []uint32{negativeSOASerial, 3600, 600, 86400} {
		b = append(b, byte(v>>24), byte(v>>16), byte(v>>8), byte(v))
	}
	return b
}()

// negative writes NODATA or another response without answers, with a SOA record so that the client's own
// cache keeps it for ttl seconds (RFC 2308 section 3).
func (r *Renderer) negative(q *query.Query, rcode uint16, ttl uint32, e ede, out []byte) int {
	m, ok := r.start(q, e, out)
	if !ok {
		return 0
	}
	m.aliases(q)
	m.soa(ttl)
	return r.end(q, &m, rcode, e, out)
}

// A message is a response being written record by record.
type message struct {
	b      dnswire.Builder
	owner  []byte // the owner name of the next record
	counts [3]uint16
	full   bool // a record did not fit
	room   int
}

func (r *Renderer) start(q *query.Query, e ede, out []byte) (m message, ok bool) {
	m.room = min(q.MaxResponse(r.o.MaxUDP), len(out))
	limit := m.room - r.optLen(q, e)
	if limit < dnswire.HeaderLen+len(q.AsIs)+4 {
		return m, false
	}
	m.b.Reset(out[:0:limit])
	m.b.Question(q.AsIs, q.Question.Type, q.Question.Class)
	m.owner = q.AsIs
	return m, true
}

// aliases writes the CNAME records that policy put in front.
func (m *message) aliases(q *query.Query) {
	if q.Turn.Flatten {
		return
	}
	for i := range int(q.Turn.NumAliases) {
		a := &q.Turn.Aliases[i]
		target := unsafe.Slice(unsafe.StringData(string(a.Target)), len(a.Target)) // read only
		m.rr(0, m.owner, dnswire.TypeCNAME, q.Question.Class, a.TTL, target)
		m.owner = target
	}
}

// soa writes the SOA record of an answer without data.
func (m *message) soa(ttl uint32) {
	var soa [96]byte
	b := append(soa[:0], soaHead...)
	b = append(b, byte(ttl>>24), byte(ttl>>16), byte(ttl>>8), byte(ttl))
	m.rr(1, m.owner, dnswire.TypeSOA, dnswire.ClassIN, ttl, b)
}

func (m *message) rr(section int, owner []byte, typ, class uint16, ttl uint32, rdata []byte) {
	if !m.b.RR(owner, typ, class, ttl, rdata) {
		m.full = true
		return
	}
	m.counts[section]++
}

func (r *Renderer) end(q *query.Query, m *message, rcode uint16, e ede, out []byte) int {
	if m.full {
		return r.truncated(q, base(q), e, out)
	}
	q.Outcome.RCode = rcode
	h := dnswire.Header{ID: q.ID, Flags: base(q) | rcode&15, QD: 1, AN: m.counts[0], NS: m.counts[1], AR: m.counts[2]}
	return r.finish(q, h, rcode, e, m.b.Len(), m.room, out)
}

// rewritten writes an answer that is not given as it was settled: it answers another question than the one
// asked, behind the aliases that policy made or flattened to the asked name, or records of it are changed or
// left out. The records are read out of the answer one by one and compressed anew.
func (r *Renderer) rewritten(q *query.Query, a *query.Answer, e ede, age uint32, out []byte) int {
	stripped := ede{EDEFiltered, "a private address for a public name was left out"}
	if q.Turn.Edit&query.EditPrivate != 0 && e.code == query.NoEDE {
		e = stripped // room for it is kept; whether it is true shows at the end
	}
	m, ok := r.start(q, e, out)
	if !ok {
		return 0
	}
	m.aliases(q)
	var src source
	if !src.set(&q.Turn.Current, a) {
		return r.Error(q, dnswire.RCodeServFail, EDEOther, "an answer too large to rewrite", out)
	}
	private, asked := 0, 0 // records left out for being private; records of the asked type
	var v6 [16]byte
	for section, count := range [3]uint16{a.AN, a.NS, a.AR} {
		for range count {
			owner, rr, rdata, ok := src.next()
			if !ok {
				return r.Error(q, dnswire.RCodeServFail, EDEOther, "", out)
			}
			ttl := rr.TTL - min(rr.TTL, age)
			keep, isPrivate := r.keeps(q.Turn.Edit, section, owner, rr.Type, rdata)
			if isPrivate {
				private++
			}
			if !keep {
				continue
			}
			if section == 0 && rr.Type == dnswire.TypeA && q.Turn.Edit&query.EditSynthesise != 0 {
				v6 = r.o.DNS64.Embed([4]byte(rdata))
				rr.Type, rdata, ttl = dnswire.TypeAAAA, v6[:], min(ttl, q.Turn.MaxTTL)
			}
			if q.Turn.Flatten && section == 0 {
				if rr.Type != q.Question.Type {
					continue // aliases, and signatures that fit another owner
				}
				owner = q.AsIs
				ttl = min(ttl, q.Turn.Aliases[0].TTL) // or clients keep it longer than they would the alias
			}
			if section == 0 && rr.Type == q.Question.Type {
				asked++
			}
			m.rr(section, owner, rr.Type, rr.Class, ttl, rdata)
		}
	}
	switch {
	case private == 0 && e == stripped:
		e = noEDE
	case private > 0 && asked == 0:
		m.soa(strippedTTL)
	}
	return r.end(q, &m, a.RCode, e, out)
}

// keeps reports whether a record stays in an edited answer, and whether it goes for its private address. With
// a set of which something is left out or changed go its signatures and, in a synthesised answer, the proof.
func (r *Renderer) keeps(edit query.Edit, section int, owner []byte, typ uint16, rdata []byte) (keep, private bool) {
	covered := uint16(0)
	if typ == dnswire.TypeRRSIG && len(rdata) >= 2 {
		covered = dnswire.Uint16(rdata)
	}
	if edit&query.EditPrivate != 0 {
		if r.o.Private.Record(owner, typ, rdata) {
			return false, true
		}
		switch covered {
		case dnswire.TypeA, dnswire.TypeAAAA, dnswire.TypeSVCB, dnswire.TypeHTTPS:
			return false, false
		}
	}
	if edit&query.EditExcluded != 0 && (covered == dnswire.TypeAAAA || typ == dnswire.TypeAAAA && dns64.Excluded(rdata)) {
		return false, false
	}
	if edit&query.EditSynthesise != 0 && (section > 0 || covered == dnswire.TypeA) {
		return false, false
	}
	return true, false
}

// A source reads the records of an answer's body, in the message that it is part of.
type source struct {
	msg   [query.MaxEntry]byte
	n     int
	off   int
	names dnswire.Expander
	owner [dnsname.MaxLen + 1]byte
	rdata [query.MaxEntry]byte
}

func (s *source) set(cur *query.Question, a *query.Answer) bool {
	s.off = dnswire.HeaderLen + len(cur.Name) + 4
	s.n = s.off + len(a.Body)
	if s.n > len(s.msg) {
		return false
	}
	copy(s.msg[dnswire.HeaderLen:], cur.Name)
	copy(s.msg[s.off:], a.Body)
	return true
}

func (s *source) next() (owner []byte, rr dnswire.RR, rdata []byte, ok bool) {
	msg := s.msg[:s.n]
	n, _ := s.names.Name(msg, s.off, &s.owner)
	rr, next := dnswire.ReadRR(msg, s.off)
	if n < 0 || next < 0 {
		return nil, rr, nil, false
	}
	s.off = next
	rdata, ok = s.names.AppendRData(s.rdata[:0], msg, rr)
	return s.owner[:n], rr, rdata, ok
}
