package query

import (
	"errors"
	"fmt"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
)

// A Message is a response from an authoritative server or forwarder, with its records gathered in RRsets.
type Message struct {
	Header dnswire.Header
	RCode  uint16 // extended (RFC 6891 section 6.1.3)

	// Question as echoed; QName has the letters as they came, for the comparison that 0x20 needs. HasQuestion
	// is false if the server left the question out, which some do with an error.
	HasQuestion bool
	QName       []byte
	QType       uint16
	QClass      uint16

	Answer, Authority, Additional []RRset

	EDNS    bool
	UDPSize uint16
	Cookie  []byte // COOKIE option as it came
	Subnet  []byte // client subnet option as it came
	EDE     uint16 // first extended error, NoEDE if none
	EDEText string

	Dropped int // records left out because their RDATA was malformed
}

// NoEDE is the value that stands for "no extended DNS error".
const NoEDE uint16 = 0xffff

// Limits on what a response may hold. What is beyond makes the message malformed.
const (
	MaxRRsPerSet   = 256
	maxRRs         = 4096
	maxSigsPerSet  = 16
	maxOptionBytes = 4096
)

// ErrMalformed is what ReadMessage returns for bytes that are not a well-formed response.
var ErrMalformed = errors.New("malformed message")

// ReadMessage reads a whole response. The result shares nothing with wire. Records of the same owner, type
// and class in one section become one RRset wherever they stand, repeated records one record (RFC 2181
// section 5). RRSIG records go to the set that they cover, or, if it is not there, into a set of type RRSIG.
func ReadMessage(wire []byte) (*Message, error) {
	defer carry(wire)
	if len(wire) < dnswire.HeaderLen {
		return nil, fmt.Errorf("%w: %d bytes", ErrMalformed, len(wire))
	}
	m := &Message{Header: dnswire.ReadHeader(wire), EDE: NoEDE}
	m.RCode = m.Header.RCode()
	r := reader{msg: wire, off: dnswire.HeaderLen}
	if m.Header.QD > 1 {
		return nil, fmt.Errorf("%w: %d questions", ErrMalformed, m.Header.QD)
	}
	if m.Header.QD == 1 {
		end := dnswire.PlainName(wire, r.off)
		if end < 0 || end+4 > len(wire) {
			return nil, fmt.Errorf("%w: its question", ErrMalformed)
		}
		m.HasQuestion = true
		m.QName = append([]byte(nil), wire[r.off:end]...)
		m.QType, m.QClass = dnswire.Uint16(wire[end:]), dnswire.Uint16(wire[end+2:])
		r.off = end + 4
	}
	if int(m.Header.AN)+int(m.Header.NS)+int(m.Header.AR) > maxRRs {
		return nil, fmt.Errorf("%w: more than %d records", ErrMalformed, maxRRs)
	}
	for _, s := range []struct {
		count  uint16
		to     *[]RRset
		name   string
		needed bool // a set that is left out whole would change what the message says
	}{{m.Header.AN, &m.Answer, "answer", true}, {m.Header.NS, &m.Authority, "authority", true}, {m.Header.AR, &m.Additional, "additional", false}} {
		if err := r.section(m, int(s.count), s.to, s.needed); err != nil {
			return nil, fmt.Errorf("%w: %s section: %v", ErrMalformed, s.name, err)
		}
	}
	return m, nil
}

type reader struct {
	msg   []byte
	off   int
	names dnswire.Expander
	rdata []byte // reused
}

type sig struct {
	name    dnsname.Name
	class   uint16
	covered uint16
	ttl     uint32
	rdata   []byte
}

type key struct {
	name       dnsname.Name
	typ, class uint16
}

func (r *reader) section(m *Message, count int, to *[]RRset, needed bool) error {
	var index map[key]int // made when a linear look would get long
	find := func(k key) int {
		if index != nil {
			if i, ok := index[k]; ok {
				return i
			}
			return -1
		}
		for i := len(*to) - 1; i >= 0; i-- {
			if s := &(*to)[i]; s.Type == k.typ && s.Class == k.class && s.Name == k.name {
				return i
			}
		}
		return -1
	}
	add := func(s RRset) int {
		*to = append(*to, s)
		if index == nil && len(*to) > 16 {
			index = make(map[key]int, 64)
			for i, s := range *to {
				index[key{s.Name, s.Type, s.Class}] = i
			}
		} else if index != nil {
			index[key{s.Name, s.Type, s.Class}] = len(*to) - 1
		}
		return len(*to) - 1
	}
	var sigs []sig
	var dropped []key
	var buf [dnsname.MaxLen + 1]byte
	var last dnsname.Name
	for range count {
		n, _ := r.names.Name(r.msg, r.off, &buf)
		rr, next := dnswire.ReadRR(r.msg, r.off)
		if n < 0 || next < 0 {
			return errors.New("a record that does not fit or whose name is broken")
		}
		r.off = next
		if rr.Type == dnswire.TypeOPT {
			if err := m.opt(r.msg, rr); err != nil {
				return err
			}
			continue
		}
		dnsname.Fold(buf[:n], buf[:n])
		if string(last) != string(buf[:n]) { // most records share their owner with the one before
			last = dnsname.Name(buf[:n])
		}
		var ok bool
		if r.rdata, ok = r.names.AppendRData(r.rdata[:0], r.msg, rr); !ok {
			m.Dropped++
			if needed {
				dropped = append(dropped, key{last, rr.Type, rr.Class})
			}
			continue
		}
		ttl := dnswire.ClampTTL(rr.TTL)
		if rr.Type == dnswire.TypeRRSIG {
			sigs = append(sigs, sig{last, rr.Class, dnswire.Uint16(r.rdata), ttl, append([]byte(nil), r.rdata...)})
			continue
		}
		i := find(key{last, rr.Type, rr.Class})
		if i < 0 {
			i = add(RRset{Name: last, Type: rr.Type, Class: rr.Class, TTL: ttl})
		}
		s := &(*to)[i]
		s.TTL = min(s.TTL, ttl)
		if !has(s.Data, r.rdata) {
			if CountRData(s.Data) == MaxRRsPerSet {
				return fmt.Errorf("more than %d %s records of %s", MaxRRsPerSet, dnswire.TypeText(rr.Type), last)
			}
			s.Data = AppendRData(s.Data, r.rdata)
		}
	}
	for _, k := range dropped {
		// A broken signature is as good as none, and so is a broken proof: whoever needs it will miss it.
		proof := to == &m.Authority && (k.typ == dnswire.TypeNSEC || k.typ == dnswire.TypeNSEC3)
		if k.typ != dnswire.TypeRRSIG && !proof && find(k) < 0 {
			return fmt.Errorf("no %s record of %s has well-formed RDATA", dnswire.TypeText(k.typ), k.name)
		}
	}
	for _, g := range sigs {
		i := find(key{g.name, g.covered, g.class})
		if i < 0 { // what it covers is not here: keep it as data, for the answer to a question of type RRSIG
			if i = find(key{g.name, dnswire.TypeRRSIG, g.class}); i < 0 {
				i = add(RRset{Name: g.name, Type: dnswire.TypeRRSIG, Class: g.class, TTL: g.ttl})
			}
			if s := &(*to)[i]; !has(s.Data, g.rdata) && CountRData(s.Data) < MaxRRsPerSet {
				s.Data = AppendRData(s.Data, g.rdata)
			}
			continue
		}
		if s := &(*to)[i]; !has(s.Sigs, g.rdata) && CountRData(s.Sigs) < maxSigsPerSet {
			s.Sigs = AppendRData(s.Sigs, g.rdata)
			s.TTL = min(s.TTL, g.ttl)
		}
	}
	return nil
}

func has(data, rdata []byte) bool {
	for d := range RDatas(data) {
		if string(d) == string(rdata) {
			return true
		}
	}
	return false
}

func (m *Message) opt(msg []byte, rr dnswire.RR) error {
	if m.EDNS {
		return errors.New("two OPT records")
	}
	m.EDNS, m.UDPSize = true, rr.Class
	m.RCode |= uint16(rr.TTL>>24) << 4
	b := msg[rr.Data:min(rr.End, rr.Data+maxOptionBytes)]
	for len(b) >= 4 {
		code, n := dnswire.Uint16(b), 4+int(dnswire.Uint16(b[2:]))
		if n > len(b) {
			return errors.New("an EDNS option that does not fit")
		}
		v := b[4:n]
		b = b[n:]
		switch {
		case code == dnswire.OptionCookie && m.Cookie == nil:
			m.Cookie = append([]byte(nil), v...)
		case code == dnswire.OptionSubnet && m.Subnet == nil:
			m.Subnet = append([]byte(nil), v...)
		case code == dnswire.OptionEDE && m.EDE == NoEDE && len(v) >= 2:
			m.EDE, m.EDEText = dnswire.Uint16(v), string(v[2:])
		}
	}
	return nil
}
