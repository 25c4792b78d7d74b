package rrcache

import (
	"encoding/binary"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// A meta is an entry's meta word, what can change without its bytes changing:
//
//	bits 0-39  end, in ticks
//	bits 40-42 status
//	bits 43-45 rank
//	bit  46    a denial
//	bits 48-63 epoch
type meta uint64

const (
	tickShift = 22 // a tick is 2^22 ns, about 4 ms; 40 bits of them last 146 years
	endMask   = 1<<40 - 1
	epochMask = 1<<16 - 1
)

func ticks(i clock.Instant) uint64 {
	return min(uint64(max(i, 0))>>tickShift, endMask)
}

func makeMeta(end clock.Instant, s query.Status, r query.Rank, negative bool, epoch uint32) meta {
	m := meta(ticks(end)) | meta(s)<<40 | meta(r&7)<<43 | meta(epoch&epochMask)<<48
	if negative {
		m |= 1 << 46
	}
	return m
}

func (m meta) end() clock.Instant   { return clock.Instant(m&endMask) << tickShift }
func (m meta) status() query.Status { return min(query.Status(m>>40&7), query.Bogus) }
func (m meta) rank() query.Rank     { return min(query.Rank(m>>43&7), query.RankSecure) }
func (m meta) negative() bool       { return m>>46&1 != 0 }
func (m meta) epoch() uint32        { return uint32(m >> 48) }

// standing is what decides which of two entries stays.
func (m meta) standing() query.Rank {
	switch m.status() {
	case query.Secure:
		return query.RankSecure
	case query.Bogus:
		return query.RankNone
	}
	return m.rank()
}

// remaining returns the TTL that is left, rounded up; 0 once it has ended.
func (m meta) remaining(now clock.Instant) uint32 { return left(m.end(), now) }

func left(end, now clock.Instant) uint32 {
	const second = clock.Instant(1e9)
	if end <= now {
		return 0
	}
	return uint32((end - now + second - 1) / second)
}

// A kind says which of a name's entries is meant.
type kind uint8

const (
	kindSet kind = iota // the set of a type, or the denial of that type
	kindCut             // a delegation: the parent's NS set
	kindNX              // the denial of the name; it has no type
)

// A key begins with a byte of flags that say what follows it, and ends with the name, which marks its own
// end: so no key is the beginning of another.
//
//	flags, [class 2], [view 1], [family 1, bits 1, address as long as bits need], [type 2], name
const (
	flagCut    = 1 << iota // kindCut
	flagNX                 // kindNX; no type
	flagClass              // class other than IN
	flagView               // view other than 0
	flagSubnet             // a client subnet
	flagsAll   = flagCut | flagNX | flagClass | flagView | flagSubnet
)

type keyBuf [1 + 2 + 1 + 18 + 2 + dnsname.MaxLen]byte

func appendKey(b []byte, kind kind, k Key) []byte {
	flags := byte(0)
	b = append(b, 0)
	if k.Class != dnswire.ClassIN {
		flags |= flagClass
		b = binary.BigEndian.AppendUint16(b, k.Class)
	}
	if k.View != 0 {
		flags |= flagView
		b = append(b, byte(k.View))
	}
	if kind == kindCut {
		flags |= flagCut
	} else if k.Subnet.Family != 0 {
		flags |= flagSubnet
		b = append(b, k.Subnet.Family, k.Subnet.Bits)
		b = append(b, k.Subnet.Addr[:subnetBytes(k.Subnet.Bits)]...)
	}
	if kind == kindNX {
		flags |= flagNX
	} else {
		b = binary.BigEndian.AppendUint16(b, k.Type)
	}
	b[0] = flags
	return append(b, k.Name...)
}

func subnetBytes(bits uint8) int { return min((int(bits)+7)/8, 16) }

// readKey reads a key and returns its length; false if b does not begin with one. The name is a view of b
// under a cast that copies.
func readKey(b []byte) (kind kind, k Key, n int, ok bool) {
	take := func(m int) []byte {
		if n+m > len(b) {
			ok = false
			return make([]byte, m)
		}
		n += m
		return b[n-m : n]
	}
	ok = true
	flags := take(1)[0]
	k.Class = dnswire.ClassIN
	if flags&flagClass != 0 {
		k.Class = dnswire.Uint16(take(2))
	}
	if flags&flagView != 0 {
		k.View = query.View(take(1)[0])
	}
	if flags&flagSubnet != 0 {
		h := take(2)
		k.Subnet.Family, k.Subnet.Bits = h[0], h[1]
		if k.Subnet.Family != 1 && k.Subnet.Family != 2 || k.Subnet.Bits > 128 {
			return 0, Key{}, 0, false
		}
		copy(k.Subnet.Addr[:], take(subnetBytes(k.Subnet.Bits)))
	}
	switch {
	case flags&^flagsAll != 0, flags&flagCut != 0 && flags&(flagNX|flagSubnet) != 0:
		return 0, Key{}, 0, false
	case flags&flagCut != 0:
		kind = kindCut
	case flags&flagNX != 0:
		kind = kindNX
	}
	if kind != kindNX {
		k.Type = dnswire.Uint16(take(2))
	}
	if !ok {
		return 0, Key{}, 0, false
	}
	end := dnswire.PlainName(b, n)
	if end < 0 {
		return 0, Key{}, 0, false
	}
	k.Name = dnsname.Name(b[n:end])
	return kind, k, end, true
}

func (c *Cache) hashName(n dnsname.Name) uint64 { return c.opts.Key.Hash([]byte(n)) }
func (c *Cache) hashRoot() uint64               { return c.opts.Key.Start().Sum() }

// hash mixes what a key has beside its name into the name's hash, which is secret, so that nobody can tell
// which keys collide.
func (c *Cache) hash(nameHash uint64, kind kind, k Key) uint64 {
	rest := uint64(k.Class)<<16 | uint64(k.View)<<32 | uint64(kind)<<40
	if kind != kindNX {
		rest |= uint64(k.Type)
	}
	if kind != kindCut && k.Subnet.Family != 0 {
		s := c.opts.Key.Start().
			Word(binary.LittleEndian.Uint64(k.Subnet.Addr[:8])).
			Word(binary.LittleEndian.Uint64(k.Subnet.Addr[8:])).
			Word(uint64(k.Subnet.Family)<<8 | uint64(k.Subnet.Bits))
		nameHash ^= s.Sum()
	}
	h := nameHash + rest*0x9e3779b97f4a7c15
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}

// The value of a set is its data's length, its data, and its signatures to the end. If its TTL goes beyond its end,
// a length of 0, which no data has, and by how many seconds, stand before that.
func appendSet(b []byte, over uint32, data, sigs []byte) []byte {
	if over > 0 {
		b = binary.AppendUvarint(append(b, 0), uint64(over))
	}
	b = binary.AppendUvarint(b, uint64(len(data)))
	return append(append(b, data...), sigs...)
}

func splitSet(v []byte) (data, sigs []byte, over uint32, ok bool) {
	if len(v) > 1 && v[0] == 0 {
		o, l := binary.Uvarint(v[1:])
		if l <= 0 || o > maxOver {
			return nil, nil, 0, false
		}
		over, v = uint32(o), v[1+l:]
	}
	n, l := binary.Uvarint(v)
	if l <= 0 || n > uint64(len(v)-l) {
		return nil, nil, 0, false
	}
	end := l + int(n)
	if end < len(v) {
		sigs = v[end:]
	}
	return v[l:end:end], sigs, over, true
}

// maxOver bounds what a dump can say: the longest TTL (RFC 2181 section 8).
const maxOver = 1<<31 - 1

// The value of a denial is a sequence of sets, the SOA (if there is one) first:
//
//	labels 1      how many labels of its owner it shares with the key's name
//	head 1, bytes the labels before those
//	type 2, length of the data, length of the signatures, data, signatures
//
// Owners share most of their labels with the name denied, so this is mostly two bytes.
func appendDenial(b []byte, name dnsname.Name, soa query.RRset, proof []query.RRset) []byte {
	if soa.Type != 0 {
		b = appendMember(b, name, soa)
	}
	for _, p := range proof {
		b = appendMember(b, name, p)
	}
	return b
}

func appendMember(b []byte, name dnsname.Name, s query.RRset) []byte {
	shared := dnsname.CommonLabels(name, s.Name)
	head := s.Name[:len(s.Name)-len(name.Suffix(shared))]
	b = append(b, byte(shared), byte(len(head)))
	b = append(b, head...)
	b = binary.BigEndian.AppendUint16(b, s.Type)
	b = binary.AppendUvarint(b, uint64(len(s.Data)))
	b = binary.AppendUvarint(b, uint64(len(s.Sigs)))
	b = append(b, s.Data...)
	return append(b, s.Sigs...)
}

// readDenial reads the sets of a denial; their data is a view of v. It is strict, for Load reads with it.
func readDenial(v []byte, name dnsname.Name) ([]query.RRset, bool) {
	labels := name.Labels()
	var sets []query.RRset
	for len(v) > 0 {
		if len(v) < 2 || len(v) < 2+int(v[1])+2 || int(v[0]) > labels || len(sets) > maxProof {
			return nil, false
		}
		owner := dnsname.Name(v[2:2+int(v[1])]) + name.Suffix(int(v[0]))
		v = v[2+int(v[1]):]
		s := query.RRset{Name: owner, Type: dnswire.Uint16(v)}
		v = v[2:]
		nd, l1 := binary.Uvarint(v)
		if l1 <= 0 {
			return nil, false
		}
		ns, l2 := binary.Uvarint(v[l1:])
		if l2 <= 0 {
			return nil, false
		}
		v = v[l1+l2:]
		if nd > uint64(len(v)) || ns > uint64(len(v))-nd {
			return nil, false
		}
		s.Data = v[:nd:nd]
		if ns > 0 {
			s.Sigs = v[nd : nd+ns : nd+ns]
		}
		v = v[nd+ns:]
		sets = append(sets, s)
	}
	return sets, len(sets) > 0
}
