package rrcache

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

var day = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// signed gives a set a signature that is well formed.
func signed(set query.RRset) query.RRset {
	sig := append(make([]byte, 18), name("example.")...)
	set.Sigs = query.AppendRData(nil, append(sig, "not checked here"...))
	return set
}

func filled() *Cache {
	c := newCache(Options{MaxStale: time.Hour})
	for i := range 3000 {
		c.Put(0, query.Subnet{}, a(fmt.Sprintf("h%d.example.", i), 100, byte(i)), Put{}, at(0))
	}
	c.Put(3, query.Subnet{Family: 1, Bits: 20, Addr: [16]byte{192, 0, 16}}, with(signed(a("sub.example.", 1000, 7)), query.RankAnswer, query.Secure), Put{}, at(0))
	c.Put(0, query.Subnet{}, with(a("brief.example.", 10, 7), query.RankAnswer, query.Bogus), Put{}, at(0))
	c.Put(0, query.Subnet{}, nsSet("example.", 500, query.RankGlue, "ns.example."), Put{Granted: at(500 * s)}, at(0))
	soa, proof := soaSet("example.", 400, 400), nsecSet("a.example.", "z.example.", 400)
	soa.Sigs, proof.Sigs = nil, signed(proof).Sigs
	c.PutNegative(key("gone.example.", 0), NXDomain, soa, []query.RRset{proof}, query.Secure, at(0))
	c.PutNegative(key("h1.example.", dnswire.TypeMX), NoData, soa, nil, query.Secure, at(0))
	return c
}

func TestDumpAndLoad(t *testing.T) {
	var file bytes.Buffer
	n, err := filled().Dump(&file, at(10*s), day)
	if err != nil || n != 3004 {
		t.Fatalf("%d entries, %v", n, err)
	}
	// Another process, whose instants mean nothing to the first, 30 s later.
	boot := clock.Instant(50 * time.Second)
	c := New(Options{Bytes: 1 << 20, Key: dnsname.NewKey([16]byte{99}), MaxStale: time.Hour})
	c.Put(0, query.Subnet{}, a("h5.example.", 60, 250), Put{}, boot) // known already, as good
	c.Put(0, query.Subnet{}, with(a("h6.example.", 60, 251), query.RankAnswer, query.Secure), Put{}, boot)
	if n, err := c.Load(bytes.NewReader(file.Bytes()), boot, day.Add(30*s)); err != nil || n != 3002 {
		t.Fatalf("loaded %d, %v", n, err)
	}
	for i := range 3000 {
		got, f := c.Get(key(fmt.Sprintf("h%d.example.", i), dnswire.TypeA), boot)
		if i == 5 || i == 6 {
			if got.First()[3] != byte(245+i) {
				t.Error("live data was replaced")
			}
			continue
		}
		if !f.OK || got.First()[3] != byte(i) || got.TTL != 60 || got.Status != query.Unchecked || got.Rank != query.RankAnswer {
			t.Fatalf("h%d: %+v %+v", i, got, f)
		}
	}
	sub := Key{name("sub.example."), dnswire.TypeA, 1, 3, query.Subnet{Family: 1, Bits: 20, Addr: [16]byte{192, 0, 16}}}
	if got, f := c.Get(sub, boot); !f.OK || got.Status != query.Unchecked || got.Rank != query.RankAnswer || got.TTL != 960 || len(got.Sigs) == 0 {
		t.Errorf("a status or rank from a file: %+v %+v", got, f)
	}
	if z, _, granted, ok := c.Delegation(name("x.example."), 0, boot); !ok || z != name("example.") || granted > boot.Add(460*s) {
		t.Errorf("cut %v until %v, %v", z, granted, ok)
	}
	_, f := c.Get(key("gone.example.", dnswire.TypeTXT), boot)
	if !f.OK || f.Negative.Kind != NXDomain || f.Negative.Status != query.Unchecked || f.Negative.TTL != 360 || len(f.Negative.Proof) != 1 || f.Negative.Proof[0].Name != name("a.example.") {
		t.Errorf("%+v", f)
	}
	if _, _, ok := c.NXCut(name("x.gone.example."), 0, boot); ok {
		t.Error("a denial from a file counts as Secure")
	}
	if _, f := c.Get(key("h1.example.", dnswire.TypeMX), boot); f.Negative.Kind != NoData {
		t.Errorf("%+v", f)
	}

	// Later, what has ended comes back as stale at most, a delegation not at all.
	c = newCache(Options{MaxStale: 10 * time.Minute})
	if _, err := c.Load(bytes.NewReader(file.Bytes()), at(0), day.Add(500*s)); err != nil {
		t.Fatal(err)
	}
	if _, f := c.Get(key("h1.example.", dnswire.TypeA), at(0)); !f.Stale {
		t.Errorf("%+v", f)
	}
	if _, _, _, ok := c.Delegation(name("x.example."), 0, at(0)); ok {
		t.Error("a grant that ended holds")
	}
	for wrong, want := range map[time.Duration]error{-time.Hour: ErrDump, 48 * time.Hour: ErrOldDump} {
		c := newCache(Options{})
		if n, err := c.Load(bytes.NewReader(file.Bytes()), at(0), day.Add(wrong)); n != 0 || !errors.Is(err, want) {
			t.Errorf("%v off: loaded %d, %v", wrong, n, err)
		}
	}
}

// A dump that is cut short is a whole one, and has what is used most.
func TestDumpUntil(t *testing.T) {
	c := New(Options{Bytes: 4 << 20})
	name := func(i int) dnsname.Name { return name(fmt.Sprintf("h%d.example.", i)) }
	const all = 60000 // more than fit
	for i := range all {
		set := a("h.example.", 1000, byte(i))
		set.Name = name(i)
		c.Put(0, query.Subnet{}, set, Put{}, at(0))
		for k := range min(i, 2000) { // the first 2,000 names are used again and again
			if i%500 == 0 {
				c.Get(Key{Name: name(k), Type: dnswire.TypeA, Class: 1}, at(0))
			}
		}
	}
	var file bytes.Buffer
	asked := int64(0)
	n, err := c.DumpUntil(&file, at(0), day, func(written int64) bool { asked = written; return written > 150<<10 })
	if err != nil || n == 0 || n > 10000 || asked+8 > int64(file.Len()) || asked+16 < int64(file.Len()) {
		t.Fatalf("%d entries, %v, %d bytes of which %d were said", n, err, file.Len(), asked)
	}
	other := New(Options{Bytes: 4 << 20})
	if got, err := other.Load(&file, at(0), day); err != nil || got != n {
		t.Fatalf("dumped %d, loaded %d, %v", n, got, err)
	}
	used := 0
	for i := range 2000 {
		if _, f := other.Get(Key{Name: name(i), Type: dnswire.TypeA, Class: 1}, at(0)); f.OK {
			used++
		}
	}
	if used < 1800 {
		t.Errorf("of the 2,000 names in use %d are among the %d dumped", used, n)
	}
}

// What is purged while a dump is being loaded stays purged, whether its block came before or comes after. What was
// purged before is loaded: whoever loads a dump wants what it holds.
func TestPurgeWhileLoading(t *testing.T) {
	from := newCache(Options{})
	for _, n := range []string{"top.", "a.top.", "b.a.top.", "other."} {
		from.Put(0, query.Subnet{}, a(n, 100, 1), Put{}, at(0))
		mx := a(n, 100, 1)
		mx.Type, mx.Data = dnswire.TypeTXT, query.AppendRData(nil, []byte("\x01x"))
		from.Put(0, query.Subnet{}, mx, Put{}, at(0))
	}
	soa := soaSet("top.", 400, 400)
	soa.Sigs = nil
	from.PutNegative(key("gone.top.", 0), NXDomain, soa, nil, query.Secure, at(0))
	var file bytes.Buffer
	if _, err := from.Dump(&file, at(0), day); err != nil {
		t.Fatal(err)
	}
	all := "top. A,top. TXT,a.top. A,a.top. TXT,b.a.top. A,b.a.top. TXT,other. A,other. TXT,gone.top. A,gone.top. TXT"
	without := func(s string, gone ...string) string {
		for _, g := range gone {
			s = strings.Replace(","+s+",", ","+g+",", ",", 1)
			s = strings.Trim(s, ",")
		}
		return s
	}
	for what, c := range map[string]struct {
		purge func(*Cache)
		want  string
		err   error
	}{
		"nothing":     {func(*Cache) {}, all, nil},
		"a name":      {func(c *Cache) { c.Purge(name("a.top."), false, 0) }, without(all, "a.top. A", "a.top. TXT"), nil},
		"a type":      {func(c *Cache) { c.Purge(name("a.top."), false, dnswire.TypeTXT) }, without(all, "a.top. TXT"), nil},
		"a tree":      {func(c *Cache) { c.Purge(name("a.top."), true, 0) }, without(all, "a.top. A", "a.top. TXT", "b.a.top. A", "b.a.top. TXT"), nil},
		"below an NX": {func(c *Cache) { c.Purge(name("x.gone.top."), false, 0) }, without(all, "gone.top. A", "gone.top. TXT"), nil},
		"two":         {func(c *Cache) { c.Purge(name("other."), false, 0); c.Purge(name("top."), false, dnswire.TypeA) }, without(all, "other. A", "other. TXT", "top. A"), nil},
		"the root":    {func(c *Cache) { c.Purge(dnsname.Root, true, 0) }, "", nil},
		"a new epoch": {(*Cache).Raise, "", ErrPurged},
		"everything":  {(*Cache).Clear, "", ErrPurged},
		"too many": {func(c *Cache) {
			for range maxPurges + 1 {
				c.Purge(name("other."), false, 0)
			}
		}, without(all, "other. A", "other. TXT"), ErrPurged},
		"nearly as many": {func(c *Cache) {
			for range maxPurges {
				c.Purge(name("other."), false, 0)
			}
		}, without(all, "other. A", "other. TXT"), nil},
	} {
		t.Run(what, func(t *testing.T) {
			into := newCache(Options{})
			into.Purge(name("a.top."), true, 0)
			const head = len(dumpMagic) + 9
			whole := file.Bytes()
			block := whole[head : len(whole)-8]
			_, err := into.Load(io.MultiReader(bytes.NewReader(whole[:head]), bytes.NewReader(block), reading(func() { c.purge(into) }),
				bytes.NewReader(block), bytes.NewReader(whole[len(whole)-8:])), at(0), day)
			if !errors.Is(err, c.err) {
				t.Errorf("%v, want %v", err, c.err)
			}
			var got []string
			for _, n := range []string{"top.", "a.top.", "b.a.top.", "other.", "gone.top."} {
				for _, typ := range []uint16{dnswire.TypeA, dnswire.TypeTXT} {
					if _, f := into.Get(key(n, typ), at(0)); f.OK {
						got = append(got, n+" "+dnswire.TypeText(typ))
					}
				}
			}
			if g := strings.Join(got, ","); g != c.want {
				t.Errorf("left:\n%s\nwant:\n%s", g, c.want)
			}
			into.Clear()
			if n, err := into.Load(bytes.NewReader(whole), at(0), day); n != 9 || err != nil {
				t.Errorf("%d entries later, %v", n, err)
			}
		})
	}
}

// reading is called when it is read, and has nothing to read.
type reading func()

func (r reading) Read([]byte) (int, error) {
	r()
	return 0, io.EOF
}

// Bad files give an error that says so; what stands before the damage may be used.
func TestLoadRefusesDamage(t *testing.T) {
	var file bytes.Buffer
	if _, err := filled().Dump(&file, at(0), day); err != nil {
		t.Fatal(err)
	}
	good := file.Bytes()
	load := func(b []byte) (int, error) { return newCache(Options{}).Load(bytes.NewReader(b), at(0), day) }
	for cut := 0; cut < len(good); cut += 4999 {
		if _, err := load(good[:cut]); !errors.Is(err, ErrDump) {
			t.Fatalf("cut at %d of %d: %v", cut, len(good), err)
		}
	}
	for i := 17; i < len(good); i += 4993 {
		bad := bytes.Clone(good)
		bad[i] ^= 0x10
		if _, err := load(bad); !errors.Is(err, ErrDump) {
			t.Fatalf("byte %d changed: %v", i, err)
		}
	}
	fail := errors.New("disk")
	if _, err := filled().Dump(failing{fail}, at(0), day); !errors.Is(err, fail) {
		t.Errorf("%v", err)
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

// seal makes a dump of one block.
func seal(block []byte) []byte {
	b := append([]byte(dumpMagic), dumpVersion)
	b = binary.BigEndian.AppendUint64(b, uint64(day.UnixNano()))
	b = binary.BigEndian.AppendUint32(b, uint32(len(block)))
	b = binary.BigEndian.AppendUint32(b, crc32.Checksum(block, castagnoli))
	b = append(b, block...)
	return append(b, 0, 0, 0, 0, 0, 0, 0, 0)
}

// FuzzLoad reads blocks whose checksum is right: neither reading them nor what they leave behind panics, and
// what was loaded survives another dump.
func FuzzLoad(f *testing.F) {
	var file bytes.Buffer
	small := newCache(Options{})
	small.Put(0, query.Subnet{}, signed(a("h.example.", 100, 1)), Put{}, at(0))
	small.Put(0, query.Subnet{}, nsSet("example.", 500, query.RankGlue, "ns.example."), Put{Granted: at(500 * s)}, at(0))
	soa := soaSet("example.", 400, 400)
	soa.Sigs = nil
	small.PutNegative(key("gone.example.", 0), NXDomain, soa, []query.RRset{signed(nsecSet("a.example.", "z.example.", 400))}, query.Secure, at(0))
	if _, err := small.Dump(&file, at(0), day); err != nil {
		f.Fatal(err)
	}
	const head = len(dumpMagic) + 9 + 8
	f.Add(file.Bytes()[head : file.Len()-8])
	f.Add([]byte{})
	c := newCache(Options{MaxStale: time.Hour}) // one for all: mapped memory is never unmapped
	f.Fuzz(func(t *testing.T, block []byte) {
		c.Clear()
		n, err := c.Load(bytes.NewReader(seal(block)), at(0), day)
		if err != nil && !errors.Is(err, ErrDump) {
			t.Fatal(err)
		}
		var keys []Key
		c.table.Walk(func(p []byte, _ uint64) bool {
			kind, k, _, ok := readKey(p)
			if !ok {
				t.Fatalf("payload %x", p)
			}
			if kind == kindNX {
				k.Type = dnswire.TypeA
			}
			keys = append(keys, k)
			return false
		})
		if len(keys) > n {
			t.Fatalf("%d entries, %d reported", len(keys), n)
		}
		for _, k := range keys {
			c.Get(k, at(0))
			c.Delegation(k.Name, k.View, at(0))
			c.NXCut(k.Name, k.View, at(0))
		}
		var again bytes.Buffer
		m, err := c.Dump(&again, at(0), day)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := c.Load(&again, at(0), day); err != nil || got > m {
			t.Fatalf("dumped %d, loaded %d, %v", m, got, err)
		}
	})
}
