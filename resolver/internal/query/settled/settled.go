// Package settled has the sealed form of an answer: the only form in which answers are kept and from which
// clients are served.
//
// Settle turns what iteration or a cache of RRsets brought into an Entry, once its security status has been
// decided; an answer with more facts than an Entry holds is none, for it could not be judged. A test pins who may call it. An Entry is one run of bytes: a fixed header, the question it
// answers, the places of its TTLs, the facts that policy needs, and the sections of a response in wire form,
// compressed against that question. View reads it in place, without allocating.
//
// The header ends with a checksum, verified by Load when bytes come from where they may have been damaged.
// It finds accidents; it proves nothing against a forger. Times in an Entry are clock.Instants, so entries
// are never persisted.
package settled

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"sync"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// An Entry is a settled answer. The zero Entry holds nothing.
type Entry struct{ b []byte }

// The header. Numbers are little-endian, unlike those of the message in the body.
const (
	offVersion  = 0
	offStatus   = 1
	offFlags    = 2
	offRCode    = 4
	offEDE      = 6
	offAN       = 8
	offNS       = 10
	offAR       = 12
	offTTLs     = 14 // how many
	offSettled  = 16
	offExpires  = 24
	offEpoch    = 32
	offKeyLen   = 36
	offFactsLen = 38
	offBodyLen  = 40
	offSum      = 44
	headerLen   = 48 // a multiple of eight, for what stands behind to be aligned

	version   = 2
	flagStale = 1
)

var le = binary.LittleEndian

// ErrDamaged is what Load returns for bytes that are not a whole Entry.
var ErrDamaged = errors.New("damaged entry")

// Options are what Settle needs besides the data.
type Options struct {
	Now   clock.Instant
	Epoch uint32
	// EDE is an extended error to give with the answer; query.NoEDE for none.
	EDE uint16
	// Full keeps the authority and additional sections of positive answers (answers.minimal: false).
	Full bool
	// TTL, if above 0, overrides how long the entry may be used, in seconds.
	TTL uint32
}

var buffers = sync.Pool{New: func() any { return new([dnswire.MaxMessage + 1]byte) }}

// Settle seals an answer whose status has been decided. It returns an error if the records do not fit in a
// message.
func Settle(u *query.Unvalidated, status query.Status, o Options) (Entry, error) {
	buf := buffers.Get().(*[dnswire.MaxMessage + 1]byte)
	defer buffers.Put(buf)
	w := writer{do: u.Question.DO, minTTL: 1<<32 - 1}
	w.b.Reset(buf[:0:len(buf)])
	if !w.b.Question([]byte(u.Question.Name), u.Question.Type, u.Question.Class) {
		return Entry{}, fmt.Errorf("settling %s: its name does not fit", u.Question.Name)
	}
	start := w.b.Len()
	positive := len(u.Answer) > 0 && u.RCode == dnswire.RCodeNoError

	var counts [3]uint16
	ok := true
	for i := range u.Answer {
		ok = ok && w.set(&u.Answer[i], &counts[0], true)
		w.fact(&u.Answer[i])
	}
	for i := range u.Authority {
		s := &u.Authority[i]
		if w.keep(s, u.Question.Type) && (o.Full || !positive || s.Type != dnswire.TypeNS) {
			ok = ok && w.set(s, &counts[1], true)
		}
	}
	if o.Full || !positive {
		for i := range u.Additional {
			ok = ok && w.set(&u.Additional[i], &counts[2], false)
		}
	}
	if !ok || len(w.facts) > maxFacts {
		return Entry{}, fmt.Errorf("settling %s %s: more than a message can hold", u.Question.Name, dnswire.TypeText(u.Question.Type))
	}
	if u.Zone != "" {
		w.facts = query.AppendFact(w.facts, query.FactZone, []byte(u.Zone))
	}
	ttl := w.minTTL
	if ttl == 1<<32-1 {
		ttl = 0 // nothing in it has a TTL: usable by whoever waits for it, not longer
	}
	if o.TTL > 0 {
		ttl = o.TTL
	}

	body := w.b.Bytes()[start:]
	key := AppendKey(nil, &u.Question)
	b := make([]byte, 0, headerLen+len(key)+2*len(w.ttls)+len(w.facts)+len(body))
	b = b[:headerLen]
	b[offVersion], b[offStatus] = version, byte(status)
	if u.Stale {
		b[offFlags] |= flagStale
	}
	le.PutUint16(b[offRCode:], u.RCode)
	le.PutUint16(b[offEDE:], o.EDE)
	le.PutUint16(b[offAN:], counts[0])
	le.PutUint16(b[offNS:], counts[1])
	le.PutUint16(b[offAR:], counts[2])
	le.PutUint16(b[offTTLs:], uint16(len(w.ttls)))
	le.PutUint64(b[offSettled:], uint64(o.Now))
	le.PutUint64(b[offExpires:], uint64(o.Now.Add(time.Duration(ttl)*time.Second)))
	le.PutUint32(b[offEpoch:], o.Epoch)
	le.PutUint16(b[offKeyLen:], uint16(len(key)))
	le.PutUint16(b[offFactsLen:], uint16(len(w.facts)))
	le.PutUint32(b[offBodyLen:], uint32(len(body)))
	b = append(b, key...)
	for _, t := range w.ttls {
		b = le.AppendUint16(b, t-uint16(start))
	}
	b = append(b, w.facts...)
	b = append(b, body...)
	le.PutUint32(b[offSum:], sum(b))
	return Entry{b}, nil
}

// A writer writes RRsets, noting where their TTLs are.
type writer struct {
	b      dnswire.Builder
	do     bool
	ttls   []uint16
	facts  query.Facts
	minTTL uint32
}

// keep says whether a set of the authority section belongs into the answer: proofs only for those who
// asked for DNSSEC records, or for the type itself.
func (w *writer) keep(s *query.RRset, asked uint16) bool {
	switch s.Type {
	case dnswire.TypeNSEC, dnswire.TypeNSEC3, dnswire.TypeDS, dnswire.TypeRRSIG:
		return w.do || s.Type == asked
	}
	return true
}

func (w *writer) set(s *query.RRset, count *uint16, counts bool) bool {
	for d := range query.RDatas(s.Data) {
		if !w.rr(s, s.Type, d, count) {
			return false
		}
	}
	if w.do {
		for d := range query.RDatas(s.Sigs) {
			if !w.rr(s, dnswire.TypeRRSIG, d, count) {
				return false
			}
		}
	}
	if counts {
		w.minTTL = min(w.minTTL, s.TTL)
	}
	return true
}

func (w *writer) rr(s *query.RRset, typ uint16, rdata []byte, count *uint16) bool {
	at := w.b.Len()
	if !w.b.RR([]byte(s.Name), typ, s.Class, s.TTL, rdata) {
		return false
	}
	rr, _ := dnswire.ReadRR(w.b.Bytes(), at)
	w.ttls = append(w.ttls, uint16(rr.Data-6)) // TTL (4 bytes) and length (2) stand before the RDATA
	*count++
	return true
}

// maxFacts is how many bytes of facts an entry holds, and the zone.
const maxFacts = 1<<16 - 1 - (2 + dnsname.MaxLen)

// fact takes out of an answer set what policy judges.
func (w *writer) fact(s *query.RRset) {
	for d := range query.RDatas(s.Data) {
		if len(w.facts) > maxFacts {
			return // one too many, which is none to the next
		}
		switch s.Type {
		case dnswire.TypeA, dnswire.TypeAAAA:
			w.facts = query.AppendFact(w.facts, query.FactAddress, d)
		case dnswire.TypeCNAME:
			w.name(query.FactAlias, dnswire.NameIn(s.Type, d, 0))
		case dnswire.TypeMX, dnswire.TypeSRV, dnswire.TypeNS, dnswire.TypePTR:
			w.name(query.FactTarget, dnswire.NameIn(s.Type, d, 0))
		case dnswire.TypeSVCB, dnswire.TypeHTTPS:
			w.svcb(d)
		}
	}
}

func (w *writer) name(kind query.FactKind, n []byte) {
	if len(n) <= 1 { // the root is no target worth judging; in SVCB it means the owner itself
		return
	}
	var c [dnsname.MaxLen + 1]byte
	dnsname.Fold(c[:len(n)], n)
	w.facts = query.AppendFact(w.facts, kind, c[:len(n)])
}

// svcb takes the target and the address hints (RFC 9460 section 7.3) of an SVCB or HTTPS record. The target of
// AliasMode (priority 0) is one like others: the client goes there, and no CNAME record leads to it.
func (w *writer) svcb(d []byte) {
	target := dnswire.NameIn(dnswire.TypeSVCB, d, 0)
	if target == nil {
		return
	}
	w.name(query.FactTarget, target)
	for p := d[2+len(target):]; len(p) >= 4; {
		code, n := dnswire.Uint16(p), 4+int(dnswire.Uint16(p[2:]))
		if n > len(p) {
			return
		}
		size := map[uint16]int{4: 4, 6: 16}[code]
		for v := p[4:n]; size > 0 && len(v) >= size; v = v[size:] {
			w.facts = query.AppendFact(w.facts, query.FactAddress, v[:size])
		}
		p = p[n:]
	}
}

// AppendKey appends the form of a question that entries hold: what two equal questions share and two
// different ones do not.
func AppendKey(dst []byte, q *query.Question) []byte {
	dst = append(dst, keyFlags(q), byte(q.View), byte(q.Type), byte(q.Type>>8), byte(q.Class), byte(q.Class>>8))
	if q.Subnet.Family != 0 {
		dst = append(dst, q.Subnet.Family, q.Subnet.Bits)
		dst = append(dst, q.Subnet.Addr[:]...)
	}
	return append(dst, q.Name...)
}

func keyFlags(q *query.Question) (f byte) {
	if q.DO {
		f |= 1
	}
	if q.CD {
		f |= 2
	}
	if q.Subnet.Family != 0 {
		f |= 4
	}
	return f
}

// Answers reports whether e is the answer to q, comparing the whole key.
func (e Entry) Answers(q *query.Question) bool {
	if len(e.b) < headerLen {
		return false
	}
	k := e.b[headerLen:]
	n := int(le.Uint16(e.b[offKeyLen:]))
	if n > len(k) || n < 6 {
		return false
	}
	k = k[:n]
	if k[0] != keyFlags(q) || k[1] != byte(q.View) || le.Uint16(k[2:]) != q.Type || le.Uint16(k[4:]) != q.Class {
		return false
	}
	k = k[6:]
	if q.Subnet.Family != 0 {
		if len(k) < 18 || k[0] != q.Subnet.Family || k[1] != q.Subnet.Bits || string(k[2:18]) != string(q.Subnet.Addr[:]) {
			return false
		}
		k = k[18:]
	}
	return string(k) == string(q.Name)
}

// Question returns the question that e answers; its name is a copy.
func (e Entry) Question() query.Question {
	k := e.b[headerLen : headerLen+int(le.Uint16(e.b[offKeyLen:]))]
	q := query.Question{
		DO: k[0]&1 != 0, CD: k[0]&2 != 0, View: query.View(k[1]),
		Type: le.Uint16(k[2:]), Class: le.Uint16(k[4:]),
	}
	subnet := k[0]&4 != 0
	k = k[6:]
	if subnet {
		q.Subnet.Family, q.Subnet.Bits = k[0], k[1]
		copy(q.Subnet.Addr[:], k[2:18])
		k = k[18:]
	}
	q.Name = dnsname.Name(k)
	return q
}

// IsZero reports whether e holds nothing.
func (e Entry) IsZero() bool { return len(e.b) == 0 }

// Bytes returns the entry for a cache to copy; it must not be changed.
func (e Entry) Bytes() []byte { return e.b }

// Epoch returns the cache epoch in which e was settled.
func (e Entry) Epoch() uint32 { return le.Uint32(e.b[offEpoch:]) }

// Stale reports whether e was made of stale data.
func (e Entry) Stale() bool { return e.b[offFlags]&flagStale != 0 }

// Expires returns when e ends.
func (e Entry) Expires() clock.Instant { return clock.Instant(le.Uint64(e.b[offExpires:])) }

// Until makes e end at t if it would end later. It changes e, so nobody else may have it yet.
func (e Entry) Until(t clock.Instant) {
	if e.Expires() > t {
		le.PutUint64(e.b[offExpires:], uint64(t))
		le.PutUint32(e.b[offSum:], sum(e.b))
	}
}

// View reads e in place.
func (e Entry) View() query.Answer {
	b := e.b
	key, facts := int(le.Uint16(b[offKeyLen:])), int(le.Uint16(b[offFactsLen:]))
	ttls, body := 2*int(le.Uint16(b[offTTLs:])), int(le.Uint32(b[offBodyLen:]))
	rest := b[headerLen+key:]
	return query.Answer{
		Status:  query.Status(b[offStatus]),
		RCode:   le.Uint16(b[offRCode:]),
		EDE:     le.Uint16(b[offEDE:]),
		Settled: clock.Instant(le.Uint64(b[offSettled:])),
		Expires: clock.Instant(le.Uint64(b[offExpires:])),
		Stale:   b[offFlags]&flagStale != 0,
		AN:      le.Uint16(b[offAN:]),
		NS:      le.Uint16(b[offNS:]),
		AR:      le.Uint16(b[offAR:]),
		TTLs:    rest[:ttls],
		Facts:   query.Facts(rest[ttls : ttls+facts]),
		Body:    rest[ttls+facts : ttls+facts+body],
	}
}

// FromCache takes bytes that a cache copied out of its own memory, where its protocol has already shown that
// they are whole; only their outline is checked, which costs the hot path a few nanoseconds.
func FromCache(b []byte) (Entry, bool) {
	if len(b) < headerLen || b[offVersion] != version || b[offStatus] >= query.NumStatus {
		return Entry{}, false
	}
	want := headerLen + int(le.Uint16(b[offKeyLen:])) + 2*int(le.Uint16(b[offTTLs:])) + int(le.Uint16(b[offFactsLen:])) + int(le.Uint32(b[offBodyLen:]))
	if want != len(b) || le.Uint16(b[offKeyLen:]) < 7 {
		return Entry{}, false
	}
	return Entry{b}, true
}

// Load takes bytes from anywhere and verifies them; the error is ErrDamaged.
func Load(b []byte) (Entry, error) {
	e, ok := FromCache(b)
	if !ok || le.Uint32(b[offSum:]) != sum(b) {
		return Entry{}, ErrDamaged
	}
	return e, nil
}

// castagnoli is the polynomial for which processors have an instruction.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sum covers everything but itself.
func sum(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:offSum], castagnoli), castagnoli, b[offSum+4:])
}
