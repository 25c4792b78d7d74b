package filter

import (
	"bufio"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/bits"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"syscall"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/filter/rulelist"
	"github.com/sluice-dns/sluice/resolver/internal/replace"
)

// An index file is a Matcher on disk, so that a restart need not compile the lists again:
//
//	magic (8 bytes), format (uint32), length of the preamble (uint32), length of the rest (uint64),
//	HMAC-SHA-256 of all of the file but itself, under a key made of the hash key (32 bytes)
//	preamble: the program that wrote it, the lists by number and ID, the sizes of everything
//	rest: the words of tables and patterns as they lie in memory, each part from a multiple of eight on
//
// Numbers are in the byte order of the machine; a file from another has another magic. The code proves that
// the file was written under this hash key and is whole; that it was written by this version of the rule
// compiler is told by the program's revision, since another may read the same lists otherwise. What a file
// holds is checked all the same before it is used: it is untrusted.

const (
	indexMagic  = 0x5178_6465_6369_6c53 // "Sliced" and more, little-endian
	indexFormat = 4
	indexHead   = 24 + sha256.Size
	// maxPreamble bounds the preamble: 512 hashes, and a hundred numbers a layer.
	maxPreamble = 1 << 20
	// maxIndex bounds an index file, far beyond 512 lists of real size.
	maxIndex = 64 << 30
)

// An ID names what a list was compiled from: the SHA-256 of whose text it is, and that of the text.
type ID = [2 * sha256.Size]byte

// preamble says what is in an index file.
type preamble struct {
	Program string
	Lists   []listPart
	// Triggers are the lengths of prefixes that rules are about.
	Triggers triggers
	// Servers are the lists with rules about name servers.
	Servers Set
	Layers  []layerPart
	Stale   bool
	Rules   rulesPart
	Mores   int // bytes
}

type listPart struct {
	Number int
	ID     []byte
}

type layerPart struct {
	Live                       Set
	Rules                      int
	Shift                      uint8
	Span                       uint64
	Filter, Slots, Sets, Lines int
}

type rulesPart struct {
	All, Texts, Always int
	Maps               [6]mapPart
	Dropped            []Dropped
}

type mapPart struct {
	Shift             uint8
	Filter, Keys, IDs int
}

// program names what compiles: another build may read the same lists otherwise.
var program = sync.OnceValue(func() string {
	name := fmt.Sprintf("compiler %d", rulelist.Version)
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return name
	}
	name += " " + info.Main.Version
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision", "vcs.time", "vcs.modified":
			name += " " + s.Value
		}
	}
	return name
})

// newMAC returns the code that proves a file to be ours and whole.
func newMAC(key *dnsname.Key) hash.Hash {
	secret := sha256.Sum256(fmt.Appendf(nil, "filter index %016x%016x", key.K0, key.K1))
	return hmac.New(sha256.New, secret[:])
}

// Save writes the Matcher to a file, in whose place it is only once it is whole and on the disk. ids tell by
// number what the lists were compiled from; Load gives them back. One Save at a time may write to a path.
func (m *Matcher) Save(path string, ids *[MaxLists]ID) error {
	err := replace.File(path, func(f *os.File) error {
		if m.partial {
			return errors.New("it is being merged")
		}
		head, parts, err := m.image(ids)
		if err != nil {
			return err
		}
		w := bufio.NewWriterSize(f, 1<<20)
		_, _ = w.Write(head) // an error stays and comes out of Flush
		for _, p := range parts {
			_, _ = w.Write(p)
		}
		runtime.KeepAlive(m)
		if err := w.Flush(); err != nil {
			return err
		}
		return f.Sync()
	})
	if err != nil {
		return fmt.Errorf("the index of filter lists: %w", err)
	}
	return nil
}

// image returns what a file begins with, its code included, and the parts that follow.
func (m *Matcher) image(ids *[MaxLists]ID) (head []byte, parts [][]byte, err error) {
	p := preamble{Program: program(), Triggers: m.triggers, Servers: m.servers, Stale: m.stale}
	for n := range MaxLists {
		if m.lists.Has(n) {
			p.Lists = append(p.Lists, listPart{n, ids[n][:]})
		}
	}
	rest := 0
	add := func(some ...[]byte) {
		for _, b := range some {
			if parts = append(parts, b); len(b)%8 != 0 {
				parts = append(parts, make([]byte, 8-len(b)%8))
			}
			rest += (len(b) + 7) / 8 * 8
		}
	}
	for i := range m.layers {
		l := &m.layers[i]
		p.Layers = append(p.Layers, layerPart{l.live, l.rules, l.shift, l.span, len(l.filter), len(l.slots), len(l.sets), len(l.lines)})
		add(bytesOf(l.filter), bytesOf(l.slots), bytesOf(l.sets), bytesOf(l.lines))
	}
	x := m.rules
	p.Rules.All, p.Rules.Texts, p.Rules.Always, p.Rules.Dropped = len(x.all), len(x.texts), len(x.always), x.dropped
	add(bytesOf(x.all), x.texts, bytesOf(x.always))
	for i, mm := range x.maps() {
		p.Rules.Maps[i] = mapPart{mm.shift, len(mm.filter), len(mm.keys), len(mm.ids)}
		add(bytesOf(mm.filter), bytesOf(mm.keys), bytesOf(mm.ids))
	}
	mores := appendMores(nil, x.mores)
	p.Mores = len(mores)
	add(mores)
	pre, err := json.Marshal(p)
	if err != nil {
		return nil, nil, err
	}
	for len(pre)%8 != 0 {
		pre = append(pre, ' ')
	}
	head = binary.NativeEndian.AppendUint64(nil, indexMagic)
	head = binary.NativeEndian.AppendUint32(head, indexFormat)
	head = binary.NativeEndian.AppendUint32(head, uint32(len(pre)))
	head = binary.NativeEndian.AppendUint64(head, uint64(rest))
	mac := newMAC(m.key)
	mac.Write(head)
	mac.Write(pre)
	for _, b := range parts {
		mac.Write(b)
	}
	return append(mac.Sum(head), pre...), parts, nil
}

// Load reads a file that Save wrote under the same key. The error says why the file is of no use, which is
// never more than a reason to compile the lists again; it wraps fs.ErrNotExist if there is none.
func Load(path string, key *dnsname.Key) (*Matcher, *[MaxLists]ID, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // of a pipe, opening does not wait for a writer
	if err != nil {
		return nil, nil, fmt.Errorf("the index of filter lists: %w", err)
	}
	defer f.Close()
	m, ids, err := read(f, key)
	if err != nil {
		return nil, nil, fmt.Errorf("the index of filter lists, %s: %w", path, err)
	}
	return m, ids, nil
}

func read(f *os.File, key *dnsname.Key) (*Matcher, *[MaxLists]ID, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, nil, errors.New("it is not a regular file")
	}
	var head [indexHead]byte
	if _, err := io.ReadFull(f, head[:]); err != nil {
		return nil, nil, fmt.Errorf("reading its head: %w", err)
	}
	if binary.NativeEndian.Uint64(head[:]) != indexMagic || binary.NativeEndian.Uint32(head[8:]) != indexFormat {
		return nil, nil, errors.New("it is of another program, machine or format")
	}
	size, rest := binary.NativeEndian.Uint32(head[12:]), binary.NativeEndian.Uint64(head[16:])
	if size > maxPreamble || rest > maxIndex || rest%8 != 0 || info.Size() != indexHead+int64(size)+int64(rest) {
		return nil, nil, errors.New("its size is not what its head says: it is damaged")
	}
	pre := make([]byte, size)
	if _, err := io.ReadFull(f, pre); err != nil {
		return nil, nil, err
	}
	mem := newRegion(int(rest / 8))
	mem.huge()
	body := castSlice[byte](mem.words)
	if _, err := io.ReadFull(f, body); err != nil {
		return nil, nil, err
	}
	mac := newMAC(key)
	mac.Write(head[:24])
	mac.Write(pre)
	mac.Write(body)
	if !hmac.Equal(mac.Sum(nil), head[24:]) {
		return nil, nil, errors.New("its checksum is wrong: it is damaged, or was written under another hash key")
	}
	return decode(key, pre, mem)
}

// decode makes a Matcher of a file's preamble and the rest of it, in memory. Whatever these hold, the result
// can be matched with, or there is an error.
func decode(key *dnsname.Key, pre []byte, mem *region) (*Matcher, *[MaxLists]ID, error) {
	var p preamble
	if err := json.Unmarshal(pre, &p); err != nil {
		return nil, nil, fmt.Errorf("its preamble: %w", err)
	}
	if p.Program != program() {
		return nil, nil, fmt.Errorf("it was compiled by another version of the program")
	}
	words, ok := p.words()
	if !ok || words != len(mem.words) || len(p.Layers) > 1+MaxOverlays {
		return nil, nil, errors.New("its parts are not as long as its preamble says")
	}
	m := &Matcher{key: key, generation: generations.Add(1), triggers: p.Triggers, servers: p.Servers, stale: p.Stale}
	ids := new([MaxLists]ID)
	for _, l := range p.Lists {
		if l.Number < 0 || l.Number >= MaxLists || m.lists.Has(l.Number) || len(l.ID) != len(ID{}) {
			return nil, nil, fmt.Errorf("list %d is not one", l.Number)
		}
		m.lists.Add(l.Number)
		ids[l.Number] = ID(l.ID)
	}
	c := &cutter{mem.words}
	// A merge gives back a table's slots piece by piece, and its lines; and patterns are given back alone.
	var parts []stretch
	at := 0
	for _, l := range p.Layers {
		parts = append(parts, stretch{at + l.Filter, someMemory}, stretch{at + l.Filter + wordsFor[slot](l.Slots), hugePage})
		at += l.Filter + wordsFor[slot](l.Slots) + l.Sets + wordsFor[uint32](l.Lines)
		parts = append(parts, stretch{at, someMemory})
	}
	pieces := mem.cut(append(parts, stretch{words, hugePage})...)
	for _, l := range p.Layers {
		t := &table{rules: l.Rules, shift: l.Shift, span: l.Span}
		words := c.rest
		t.filter, t.slots, t.sets, t.lines = c.words(l.Filter), cut[slot](c, l.Slots), c.words(l.Sets), cut[uint32](c, l.Lines)
		t.mem = touching(pieces, words[:len(words)-len(c.rest)])
		if err := t.check(); err != nil {
			return nil, nil, err
		}
		m.layers = append(m.layers, layer{t, l.Live})
	}
	x := &rules{mem: touching(pieces, c.rest)}
	m.rules = x
	x.all, x.texts, x.always, x.dropped = cut[rule](c, p.Rules.All), cut[byte](c, p.Rules.Texts), cut[uint32](c, p.Rules.Always), p.Rules.Dropped
	for i, mm := range x.maps() {
		part := &p.Rules.Maps[i]
		mm.shift, mm.filter, mm.keys, mm.ids = part.Shift, c.words(part.Filter), cut[multikey](c, part.Keys), cut[uint32](c, part.IDs)
		mm.setPlaces(multiplier(key))
	}
	var err error
	if x.mores, err = parseMores(cut[byte](c, p.Mores)); err != nil {
		return nil, nil, err
	}
	if err := x.check(); err != nil {
		return nil, nil, err
	}
	x.findVoids()
	x.sieve()
	return m, ids, nil
}

// words returns how many words all parts take, or false if a length is absurd.
func (p *preamble) words() (n int, ok bool) {
	ok = true
	add := func(count, size int) {
		if count < 0 || count > maxIndex/size || n > maxIndex {
			ok = false
			return
		}
		n += (count*size + 7) / 8
	}
	for _, l := range p.Layers {
		add(l.Filter, 8)
		add(l.Slots, 16)
		add(l.Sets, 8)
		add(l.Lines, 4)
	}
	add(p.Rules.All, 32)
	add(p.Rules.Texts, 1)
	add(p.Rules.Always, 4)
	for _, m := range p.Rules.Maps {
		add(m.Filter, 8)
		add(m.Keys, 24)
		add(m.IDs, 4)
	}
	add(p.Mores, 1)
	return n, ok
}

// check reports what of a table would make a search go wrong.
func (t *table) check() error {
	damaged := errors.New("a table of it is damaged")
	if n := len(t.filter); n == 0 || n&(n-1) != 0 || int(t.shift) != 64-bits.TrailingZeros(uint(n)) || t.span > uint64(len(t.slots)) || t.rules < 0 || t.rules > len(t.slots)+len(t.lines) {
		return damaged
	}
	// The chains of sections, each with how many lines it needs; 0 where none begins.
	lines := make([]uint32, len(t.sets))
	for at := 0; at < len(t.sets); {
		begin, n := at, 0
		for last := false; !last; {
			if at == len(t.sets) {
				return damaged
			}
			head := t.sets[at]
			last = head>>63 != 0
			at++
			words := bits.OnesCount64(head & 0xff00)
			if head>>16&0xffffff != uint64(n) || n > 1<<24 || at+words > len(t.sets) || words == 0 {
				return damaged
			}
			for _, w := range t.sets[at : at+words] {
				n += bits.OnesCount64(w)
			}
			at += words
		}
		lines[begin] = uint32(n)
	}
	last, line := uint64(0), uint32(0)
	for i := range t.slots {
		s := &t.slots[i]
		if s.hash == 0 {
			continue
		}
		if s.hash <= last {
			return damaged
		}
		if last = s.hash; s.set&single != 0 {
			continue
		}
		if s.lines < line || int(s.set) >= len(lines) || lines[s.set] == 0 || uint64(s.lines)+uint64(lines[s.set]) > uint64(len(t.lines)) {
			return damaged
		}
		line = s.lines
	}
	return nil
}

// check reports what of the rules would make a match go wrong.
func (x *rules) check() error {
	damaged := errors.New("the patterns of it are damaged")
	for i := range x.all {
		r := &x.all[i]
		if uint64(r.text)+uint64(r.size) > uint64(len(x.texts)) || int(r.more) > len(x.mores) || r.list >= MaxLists || r.flags >= ruleFlagsEnd {
			return damaged
		}
		m := x.moreOf(r)
		if (r.flags&isRegex != 0) != (m != nil && m.re != nil) || r.flags&isHost != 0 && (m == nil || !m.addr.IsValid()) {
			return damaged
		}
	}
	inside := func(ids []uint32) bool {
		for _, id := range ids {
			if int(id) >= len(x.all) {
				return false
			}
		}
		return true
	}
	if !inside(x.always) {
		return damaged
	}
	for _, m := range x.maps() {
		if len(m.filter)+len(m.keys)+len(m.ids) == 0 {
			continue
		}
		if n := len(m.filter); n == 0 || n&(n-1) != 0 || int(m.shift) != 64-bits.TrailingZeros(uint(n)) {
			return damaged
		}
		free := false // a search ends at a free key
		for i := range m.keys {
			k := &m.keys[i]
			free = free || k.from == k.to
			if k.from > k.to || int(k.to) > len(m.ids) {
				return damaged
			}
		}
		if n := len(m.keys); !free || n&(n-1) != 0 || !inside(m.ids) {
			return damaged
		}
	}
	return nil
}

// What a more has, in a file.
const (
	hasExpr = 1 << iota
	hasMods
	hasAddr
	hasRewrite
)

func appendMores(b []byte, mores []*more) []byte {
	text := func(s string) { b = append(binary.AppendUvarint(b, uint64(len(s))), s...) }
	texts := func(s []string) {
		b = binary.AppendUvarint(b, uint64(len(s)))
		for _, s := range s {
			text(s)
		}
	}
	types := func(s []uint16) {
		b = binary.AppendUvarint(b, uint64(len(s)))
		for _, t := range s {
			b = binary.AppendUvarint(b, uint64(t))
		}
	}
	b = binary.AppendUvarint(b, uint64(len(mores)))
	for _, m := range mores {
		var has byte
		if m.expr != "" {
			has |= hasExpr
		}
		if m.mods != nil {
			has |= hasMods
			if m.mods.Rewrite != nil {
				has |= hasRewrite
			}
		}
		if m.addr.IsValid() {
			has |= hasAddr
		}
		b = append(b, has)
		if has&hasExpr != 0 {
			text(m.expr)
		}
		if has&hasMods != 0 {
			types(m.mods.Types)
			types(m.mods.NotTypes)
			for _, c := range [...]*rulelist.Clients{&m.mods.Clients, &m.mods.NotClients} {
				texts(c.Names)
				b = binary.AppendUvarint(b, uint64(len(c.Prefixes)))
				for _, p := range c.Prefixes {
					text(string(p.Addr().AsSlice()))
					b = append(b, byte(p.Bits()))
				}
			}
			texts(m.mods.Tags)
			texts(m.mods.NotTags)
			texts(m.mods.DenyAllow)
		}
		if has&hasRewrite != 0 {
			w := m.mods.Rewrite
			var any byte
			if w.Any {
				any = 1
			}
			b = append(b, any, byte(w.Action))
			b = binary.AppendUvarint(b, uint64(w.RCode))
			b = binary.AppendUvarint(b, uint64(w.Type))
			text(w.CNAME)
			text(w.Value)
		}
		if has&hasAddr != 0 {
			a, _ := m.addr.MarshalBinary() // never fails
			text(string(a))
		}
	}
	return b
}

// A moreReader reads what appendMores wrote; after the first fault all it reads is empty.
type moreReader struct {
	b   []byte
	bad bool
}

func (r *moreReader) number() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.b, r.bad = nil, true
		return 0
	}
	r.b = r.b[n:]
	return v
}

// count reads the number of things of which each takes a byte at least.
func (r *moreReader) count() int {
	n := r.number()
	if n > uint64(len(r.b)) {
		r.b, r.bad = nil, true
		return 0
	}
	return int(n)
}

func (r *moreReader) take(n int) []byte {
	if n > len(r.b) {
		r.b, r.bad = nil, true
		return nil
	}
	b := r.b[:n]
	r.b = r.b[n:]
	return b
}

func (r *moreReader) text() string { return string(r.take(r.count())) }

func (r *moreReader) byte() byte {
	if b := r.take(1); len(b) == 1 {
		return b[0]
	}
	return 0
}

func (r *moreReader) texts() (s []string) {
	for range r.count() {
		s = append(s, r.text())
	}
	return s
}

func (r *moreReader) types() (s []uint16) {
	for range r.count() {
		s = append(s, uint16(r.number()))
	}
	return s
}

func (r *moreReader) addr() netip.Addr {
	a, ok := netip.AddrFromSlice(r.take(r.count()))
	r.bad = r.bad || !ok
	return a
}

func parseMores(b []byte) (mores []*more, err error) {
	r := &moreReader{b: b}
	for range r.count() {
		has := r.byte()
		m := &more{}
		if has&hasExpr != 0 {
			if m.expr = r.text(); !r.bad {
				if err := m.compile(); err != nil {
					return nil, err
				}
			}
		}
		if has&hasMods != 0 {
			m.mods = &rulelist.Mods{Types: r.types(), NotTypes: r.types()}
			for _, c := range [...]*rulelist.Clients{&m.mods.Clients, &m.mods.NotClients} {
				c.Names = r.texts()
				for range r.count() {
					c.Prefixes = append(c.Prefixes, netip.PrefixFrom(r.addr(), int(r.byte())))
				}
			}
			m.mods.Tags, m.mods.NotTags, m.mods.DenyAllow = r.texts(), r.texts(), r.texts()
			if has&hasRewrite != 0 {
				w := &rulelist.Rewrite{Any: r.byte() == 1, Action: rulelist.Action(r.byte()), RCode: uint16(r.number()), Type: uint16(r.number())}
				w.CNAME, w.Value = r.text(), r.text()
				m.mods.Rewrite = w
			}
		}
		if has&hasAddr != 0 {
			r.bad = m.addr.UnmarshalBinary(r.take(r.count())) != nil || r.bad
		}
		if r.bad {
			return nil, errors.New("the rules with conditions in it are damaged")
		}
		mores = append(mores, m)
	}
	return mores, nil
}
