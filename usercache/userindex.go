package usercache

import (
	"container/heap"
	"hash/maphash"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluice-dns/sluice/usercache/internal/store"
)

// A userIndex finds the user and device behind an id or address.
//
// Every claim of every serving record is entered, also those of a device id that two users claim by
// mistake. Who wins is decided when asked: of all records that really hold the claim one that can be used,
// then the one with the highest revision, then the lowest key. So the order in which changes arrived does not matter, and a loser
// has the device again as soon as the winner lets go of it.
//
// One goroutine writes, any read.
type userIndex struct {
	seed   maphash.Seed
	store  *store.Store
	tables [256]store.Table // by the top byte of a claim's hash
	// versions count the claims that came and went, per table.
	versions [256]atomic.Uint32

	// Which lengths of links are in use, as bit sets for readers and as counts for the writer.
	v4Lengths  atomic.Uint64    // 0…32
	v6Lengths  [2]atomic.Uint64 // 0…64
	linkCounts [256]int         // by claim.link

	// Claims beyond crowdAt of one tag go to crowds, by hash, so that a bug of the service that gives one
	// id to every user costs a search nothing.
	crowded  atomic.Int32 // crowds that are not empty
	crowdsMu sync.RWMutex
	crowds   map[uint64]*crowd
}

// crowdAt is how many claims of one tag a table holds. Chance alone gives one tag to two or three.
const crowdAt = 16

func newUserIndex(s *store.Store) *userIndex {
	return &userIndex{seed: maphash.MakeSeed(), store: s, crowds: make(map[uint64]*crowd)}
}

// hash returns the hash of a claim's kind and text.
func (x *userIndex) hash(kind byte, text []byte) uint64 {
	var buf [1 + maxEDNSIDLen]byte
	buf[0] = kind
	n := copy(buf[1:], text)
	return maphash.Bytes(x.seed, buf[:1+n])
}

func (x *userIndex) hashAddr(kind byte, a netip.Addr, bits int) uint64 {
	var buf [18]byte
	buf[0], buf[1] = kind, byte(bits)
	if a.Is4() {
		b := a.As4()
		return maphash.Bytes(x.seed, append(buf[:2], b[:]...))
	}
	b := a.As16()
	return maphash.Bytes(x.seed, append(buf[:2], b[:]...))
}

func (x *userIndex) linkClaim(p netip.Prefix) claim {
	c := claim{hash: x.hashAddr(claimLink, p.Addr(), p.Bits()), link: linkV6 + uint8(p.Bits())}
	if p.Addr().Is4() {
		c.link = linkV4 + uint8(p.Bits())
	}
	return c
}

// match says of a device in a record whether it is the one looked for.
type match struct {
	kind byte
	id   []byte       // claimDevice, claimEDNS
	addr netip.Addr   // claimDedicated
	link netip.Prefix // claimLink
}

// find returns the record that holds the claim, and the device in it, and whether no other record claims it
// too. The caller must Release the record.
func (x *userIndex) find(hash uint64, m *match) (r store.Record, device []byte, ordinal uint32, alone, ok bool) {
	alone = true
	tag := uint32(hash >> 24)
	for f := x.tables[hash>>56].Find(tag); ; {
		o, more := f.Next()
		if !more {
			break
		}
		had := ok
		if x.better(&r, &device, &ordinal, &ok, o, m) && had {
			alone = false
		}
	}
	if x.crowded.Load() > 0 {
		x.crowdsMu.RLock()
		o, some := uint32(0), false
		if c := x.crowds[hash]; c != nil {
			o, some = c.first()
		}
		x.crowdsMu.RUnlock()
		if some {
			x.better(&r, &device, &ordinal, &ok, o, m)
			alone = false
		}
	}
	return r, device, ordinal, alone, ok
}

// better replaces the best record found so far by that of ordinal o, if it holds the claim and wins. It
// reports whether o holds the claim.
func (x *userIndex) better(r *store.Record, device *[]byte, ordinal *uint32, ok *bool, o uint32, m *match) bool {
	c, there := x.store.Serving(o)
	if !there {
		return false
	}
	d := findDevice(c.Bytes, m)
	if d == nil {
		c.Release()
		return false
	}
	if *ok && !wins(&c, r) {
		c.Release()
		return true
	}
	r.Release()
	*r, *device, *ordinal, *ok = c, d, o, true
	return true
}

// wins reports whether a claim of record a goes before that of record b.
func wins(a, b *store.Record) bool {
	if a.Flags&flagUnusable != b.Flags&flagUnusable {
		return b.Flags&flagUnusable != 0
	}
	if a.Revision != b.Revision {
		return a.Revision > b.Revision
	}
	return string(a.Key) < string(b.Key)
}

// findDevice returns the first device of a user's record that m matches, or nil.
func findDevice(user []byte, m *match) []byte {
	for {
		f, rest, ok := nextField(user)
		if !ok {
			return nil
		}
		user = rest
		if f.num == 4 && f.isBytes() && m.matches(f.b) {
			return f.b
		}
	}
}

func (m *match) matches(device []byte) bool {
	for {
		f, rest, ok := nextField(device)
		if !ok {
			return false
		}
		device = rest
		if !f.isBytes() {
			continue
		}
		switch f.num {
		case 1:
			if m.kind == claimDevice {
				return equalFold(f.b, m.id)
			}
		case 3:
			if m.kind == claimLink {
				if p, err := parseLink(f); err == nil && p == m.link {
					return true
				}
			}
		case 4:
			if m.kind == claimDedicated {
				if a, err := parseAddr(f); err == nil && a == m.addr {
					return true
				}
			}
		case 5:
			if m.kind == claimEDNS && string(f.b) == string(m.id) {
				return true
			}
		}
	}
}

// equalFold reports whether text, made lower case, is id, which is lower case already.
func equalFold(text, id []byte) bool {
	if len(text) != len(id) {
		return false
	}
	for i, c := range text {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != id[i] {
			return false
		}
	}
	return true
}

// The functions below are the writer's.

// enter adds the claims of a record that is about to be, or already is, the serving version of an ordinal.
func (x *userIndex) enter(ordinal uint32, claims []claim) error {
	for i, c := range claims {
		if err := x.add(ordinal, c); err != nil {
			x.leave(ordinal, claims[:i])
			return err
		}
	}
	return nil
}

// leave takes claims of an ordinal out.
func (x *userIndex) leave(ordinal uint32, claims []claim) {
	for _, c := range claims {
		x.versions[c.hash>>56].Add(1)
		if !x.tables[c.hash>>56].Remove(uint32(c.hash>>24), ordinal) {
			x.leaveCrowd(ordinal, c.hash)
		}
		if c.link != 0 {
			x.countLink(c.link, -1)
		}
	}
}

func (x *userIndex) add(ordinal uint32, c claim) error {
	added, err := x.tables[c.hash>>56].AddBelow(uint32(c.hash>>24), ordinal, crowdAt)
	if err != nil {
		return err
	}
	if !added {
		x.joinCrowd(ordinal, c.hash)
	}
	x.versions[c.hash>>56].Add(1)
	if c.link != 0 {
		x.countLink(c.link, +1)
	}
	return nil
}

func (x *userIndex) countLink(link uint8, by int) {
	x.linkCounts[link] += by
	used := x.linkCounts[link] > 0
	if link >= linkV6 {
		setBit(&x.v6Lengths[(link-linkV6)/64], (link-linkV6)%64, used)
	} else {
		setBit(&x.v4Lengths, link-linkV4, used)
	}
}

func setBit(w *atomic.Uint64, bit uint8, on bool) {
	old := w.Load()
	v := old &^ (1 << bit)
	if on {
		v |= 1 << bit
	}
	if v != old {
		w.Store(v)
	}
}

// split sorts two lists of claims and returns what is only in the first and only in the second. The results
// share memory with a and b.
func split(a, b []claim) (onlyA, onlyB []claim) {
	order := func(p, q claim) int {
		switch {
		case p.hash < q.hash:
			return -1
		case p.hash > q.hash:
			return 1
		}
		return 0
	}
	if slices.Equal(a, b) {
		return nil, nil
	}
	slices.SortFunc(a, order)
	slices.SortFunc(b, order)
	onlyA, onlyB = a[:0], b[:0]
	for len(a) > 0 || len(b) > 0 {
		switch {
		case len(b) == 0 || len(a) > 0 && a[0].hash < b[0].hash:
			onlyA, a = append(onlyA, a[0]), a[1:]
		case len(a) == 0 || b[0].hash < a[0].hash:
			onlyB, b = append(onlyB, b[0]), b[1:]
		default:
			a, b = a[1:], b[1:]
		}
	}
	return onlyA, onlyB
}

func (x *userIndex) memory() int {
	n := 0
	for i := range x.tables {
		n += x.tables[i].Bytes()
	}
	return n
}

// A crowd is the ordinals that claim one key beyond those in the table, as a heap whose first is the winner.
// What decides is remembered when an ordinal joins; a record that changes leaves and joins anew, see
// userIndex.rejoin.
type crowd struct {
	members []member
	at      map[uint32]int // ordinal -> index in members
}

type member struct {
	ordinal  uint32
	claims   int // how often the record makes this claim
	unusable bool
	revision uint64
	key      string
}

func (c *crowd) first() (uint32, bool) {
	if len(c.members) == 0 {
		return 0, false
	}
	return c.members[0].ordinal, true
}

func (x *userIndex) joinCrowd(ordinal uint32, hash uint64) {
	x.crowdsMu.Lock()
	defer x.crowdsMu.Unlock()
	c := x.crowds[hash]
	if c == nil {
		c = &crowd{at: make(map[uint32]int)}
		x.crowds[hash] = c
		x.crowded.Add(1)
	}
	if i, ok := c.at[ordinal]; ok {
		c.members[i].claims++
		return
	}
	m := member{ordinal: ordinal, claims: 1}
	if r, ok := x.store.Serving(ordinal); ok {
		m.revision, m.key, m.unusable = r.Revision, string(r.Key), r.Flags&flagUnusable != 0
		r.Release()
	}
	heap.Push(c, m)
}

func (x *userIndex) leaveCrowd(ordinal uint32, hash uint64) {
	x.crowdsMu.Lock()
	defer x.crowdsMu.Unlock()
	c := x.crowds[hash]
	if c == nil {
		return
	}
	i, ok := c.at[ordinal]
	if !ok {
		return
	}
	if c.members[i].claims--; c.members[i].claims > 0 {
		return
	}
	heap.Remove(c, i)
	if len(c.members) == 0 {
		delete(x.crowds, hash)
		x.crowded.Add(-1)
	}
}

// rejoin puts the ordinal, whose record has just changed, where it now belongs in the crowds of its claims.
func (x *userIndex) rejoin(ordinal uint32, claims []claim) {
	if x.crowded.Load() == 0 {
		return
	}
	x.crowdsMu.Lock()
	defer x.crowdsMu.Unlock()
	for _, cl := range claims {
		c := x.crowds[cl.hash]
		if c == nil {
			continue
		}
		i, ok := c.at[ordinal]
		if !ok {
			continue
		}
		if r, ok := x.store.Serving(ordinal); ok {
			m := &c.members[i]
			m.revision, m.key, m.unusable = r.Revision, string(r.Key), r.Flags&flagUnusable != 0
			r.Release()
			heap.Fix(c, i)
		}
	}
}

// Len, Less, Swap, Push and Pop are those of heap.Interface.

// Len returns the size of the crowd.
func (c *crowd) Len() int { return len(c.members) }

// Less reports whether member i goes before member j.
func (c *crowd) Less(i, j int) bool {
	a, b := &c.members[i], &c.members[j]
	if a.unusable != b.unusable {
		return b.unusable
	}
	if a.revision != b.revision {
		return a.revision > b.revision
	}
	return a.key < b.key
}

// Swap exchanges two members.
func (c *crowd) Swap(i, j int) {
	c.members[i], c.members[j] = c.members[j], c.members[i]
	c.at[c.members[i].ordinal], c.at[c.members[j].ordinal] = i, j
}

// Push adds a member at the end.
func (c *crowd) Push(m any) {
	c.at[m.(member).ordinal] = len(c.members)
	c.members = append(c.members, m.(member))
}

// Pop takes the last member out.
func (c *crowd) Pop() any {
	last := c.members[len(c.members)-1]
	c.members = c.members[:len(c.members)-1]
	delete(c.at, last.ordinal)
	return last
}
