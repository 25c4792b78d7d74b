package denialcache

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/validator/denial"
	"github.com/sluice-dns/sluice/resolver/internal/validator/denial/denialtest"
)

const start = clock.Instant(1000 * time.Second)

func after(d time.Duration) clock.Instant { return start.Add(d) }

func soa(zone string, minimum int) query.RRset {
	return denialtest.Set(zone, fmt.Sprintf("%s 3600 IN SOA ns.%[1]s host.%[1]s 1 2 3 4 %d", zone, minimum))
}

var p = dnsname.MustParse

// Random zones, of whose chains more and more becomes known: what is found is so, what a server would prove by
// records that are kept is found, and the proof is the server's.
func TestFindsWhatIsKnown(t *testing.T) {
	found := map[Kind]int{}
	for seed := range uint64(30) {
		r := rand.New(rand.NewPCG(seed, 3))
		z := denialtest.New(r, 2+int(seed)%8)
		c := New(Options{})
		known := map[dnsname.Name]bool{}
		for _, i := range r.Perm(len(z.Chain)) {
			c.Put(0, p(denialtest.Apex), soa(denialtest.Apex, 60), z.Chain[i:i+1], start)
			known[z.Chain[i].Name] = true
			for _, name := range denialtest.Universe {
				typ := denialtest.Types[r.IntN(len(denialtest.Types))]
				o := z.Outcome(name, typ)
				d := c.Find(0, p(name), typ, start)
				found[d.Kind]++
				if z.OptOut {
					if d.Kind != Nothing {
						t.Fatalf("seed %d: %s %s: %+v in an opt-out zone", seed, name, dns.TypeToString[typ], d)
					}
					continue
				}
				proof := z.Proof(name, o)
				all := !slices.ContainsFunc(proof, func(s query.RRset) bool { return !known[s.Name] })
				want := Nothing
				switch {
				case o.Kind == denialtest.NXDomain:
					want = NXDomain
				case o.Kind == denialtest.NoData:
					want = NoData
				case o.Kind == denialtest.Data && o.Wildcard:
					// With NSEC3 the server need not show the closest encloser; without it there is no telling which it is.
					want = Expanded
					all = all && !(z.NSEC3 && !knowsHash(known, c, o.Encloser))
				}
				if d.Kind == Expanded && o.Wildcard && want == NoData && !all {
					want, all = Expanded, true // whether the wildcard has the type is not known yet
				} else if d.Kind == Expanded && want == NXDomain && !all {
					continue // nor whether there is one: the caller will find no records of it
				}
				if d.Kind != want && (all || d.Kind != Nothing) || d.Kind == Nothing && all && want != Nothing {
					t.Fatalf("seed %d: %s %s = %+v, want kind %d\nzone %v NSEC3 %v, known %v", seed, name, dns.TypeToString[typ], d, want, z.Nodes, z.NSEC3, known)
				}
				if d.Kind == Expanded && d.Wildcard != p("*."+o.Encloser) {
					t.Fatalf("seed %d: %s expanded from %s, not *.%s", seed, name, d.Wildcard, o.Encloser)
				}
				if d.Kind == NXDomain || d.Kind == NoData {
					if d.TTL != 60 || d.SOA.TTL != 60 || !d.SOA.Is(p(denialtest.Apex), dns.TypeSOA) || len(d.Proof) != len(proof) {
						t.Fatalf("seed %d: %s %s = %+v, want the proof %+v", seed, name, dns.TypeToString[typ], d, proof)
					}
				}
			}
		}
		check(t, c)
	}
	if found[NXDomain] < 500 || found[NoData] < 500 || found[Expanded] < 50 {
		t.Errorf("found too little to mean anything: %v", found)
	}
}

func knowsHash(known map[dnsname.Name]bool, c *Cache, name string) bool {
	z := c.zones[zoneKey{0, p(denialtest.Apex)}]
	if z == nil {
		return false
	}
	h, _ := hashOf(p(name), z)
	_, match := z.hashes.find(h)
	return match
}

// check fails t unless the cache's own accounts are right and no gaps overlap.
func check(t *testing.T, c *Cache) {
	t.Helper()
	bytes, live := int64(0), 0
	for k, z := range c.zones {
		bytes += zoneOverhead + setSize(&z.soa)
		if len(z.names)+len(z.hashes) == 0 {
			t.Errorf("%v is empty and there", k)
		}
		for _, r := range []ring{z.names, z.hashes} {
			for i, s := range r {
				bytes += s.size()
				live++
				if s.dead || s.zone != z {
					t.Errorf("%q is dead or elsewhere", s.from)
				}
				if next := r[(i+1)%len(r)]; i+1 < len(r) && next.from <= s.from || next != s && s.covers(next.from) {
					t.Errorf("%q to %q overlaps %q", s.from, s.to, next.from)
				}
			}
		}
	}
	if bytes != c.bytes || live != c.live {
		t.Errorf("%d bytes, %d records; the cache counts %d, %d", bytes, live, c.bytes, c.live)
	}
	queued := 0
	for _, s := range c.queue {
		if !s.dead {
			queued++
		}
	}
	if queued != live {
		t.Errorf("%d records are queued of %d", queued, live)
	}
}

func chain(zone string, labels ...string) (out []query.RRset) {
	names := []string{zone}
	for _, l := range labels {
		names = append(names, l+"."+zone)
	}
	for i, n := range names {
		types := "A"
		if i == 0 {
			types = "NS SOA"
		}
		out = append(out, denialtest.Set(zone, fmt.Sprintf("%s 3600 IN NSEC %s %s RRSIG NSEC", n, names[(i+1)%len(names)], types)))
	}
	return out
}

func TestTimes(t *testing.T) {
	c := New(Options{MaxTTL: 30 * time.Minute})
	find := func(at time.Duration) Denial { return c.Find(0, p("q.example."), dns.TypeA, after(at)) }

	c.Put(0, p("example."), query.RRset{}, chain("example.", "m"), start)
	if d := find(0); d.Kind != Nothing {
		t.Errorf("without SOA: %+v", d)
	}
	insecure := soa("example.", 600)
	insecure.Status = query.Insecure
	c.Put(0, p("example."), insecure, chain("example.", "m"), start)
	if d := find(0); d.Kind != Nothing {
		t.Errorf("with an SOA that nobody vouched for: %+v", d)
	}
	c.Put(0, p("example."), soa("example.", 600), chain("example.", "m"), start)
	for at, ttl := range map[time.Duration]uint32{
		0: 600, 1200 * time.Second: 600, // never more than MINIMUM
		1500 * time.Second: 300, 1799*time.Second + 1: 1, // what is left of MaxTTL
		1800 * time.Second: 0,
	} {
		if d := find(at); d.TTL != ttl || (d.Kind == NXDomain) != (ttl > 0) || d.Kind == NXDomain && (d.SOA.TTL != ttl || d.Proof[0].TTL != ttl) {
			t.Errorf("at %v: %+v, want TTL %d", at, d, ttl)
		}
	}
	// The shortest TTL counts: of the wildcard's denial here.
	short := chain("example.", "m")
	short[0].TTL = 20
	c.Put(0, p("example."), soa("example.", 600), short, start)
	if d := find(5 * time.Second); d.TTL != 15 {
		t.Errorf("one record lives 20 s: %+v", d)
	}
	if d := find(20 * time.Second); d.Kind == NXDomain {
		t.Errorf("one record has ended: %+v", d)
	}
	zero := soa("example.", 0)
	c.Put(0, p("example."), zero, chain("example.", "m"), start)
	if d := find(0); d.Kind != Nothing {
		t.Errorf("MINIMUM 0: %+v", d)
	}
}

func TestWhatIsNotKept(t *testing.T) {
	with := func(s query.RRset, f func(*query.RRset)) query.RRset { f(&s); return s }
	good := denialtest.Set("example.", "a.example. 60 IN NSEC z.example. A RRSIG NSEC")
	h := strings.Repeat("0", 31)
	for what, s := range map[string]query.RRset{
		"unchecked":        with(good, func(s *query.RRset) { s.Status = query.Unchecked }),
		"insecure":         with(good, func(s *query.RRset) { s.Status = query.Insecure }),
		"TTL 0":            with(good, func(s *query.RRset) { s.TTL = 0 }),
		"CHAOS":            with(good, func(s *query.RRset) { s.Class = 3 }),
		"unsigned":         with(good, func(s *query.RRset) { s.Sigs = nil }),
		"next outside":     denialtest.Set("example.", "a.example. 60 IN NSEC z.test. A RRSIG NSEC"),
		"compact denial":   denialtest.Set("example.", `a.example. 60 IN NSEC \000.a.example. RRSIG NSEC`),
		"opt-out":          denialtest.Set("example.", h+"0.example. 60 IN NSEC3 1 1 0 - "+h+"v A RRSIG"),
		"51 iterations":    denialtest.Set("example.", "0"+h+".example. 60 IN NSEC3 1 0 51 - v"+h+" A RRSIG"),
		"a white lie":      denialtest.Set("example.", h+"0.example. 60 IN NSEC3 1 0 0 - "+h+"2 A RRSIG"),
		"another type":     denialtest.Set("example.", "a.example. 60 IN A 192.0.2.1"),
		"of another zone":  denialtest.Set("example.", "a.test. 60 IN NSEC z.test. A RRSIG NSEC"),
		"signed by parent": denialtest.Set(".", "a.example. 60 IN NSEC z.example. A RRSIG NSEC"),
	} {
		c := New(Options{})
		c.Put(0, p("example."), soa("example.", 60), []query.RRset{s}, start)
		if st := c.Stats(); st.Records != 0 || st.Zones != 0 || st.Bytes != 0 {
			t.Errorf("%s: kept, %+v", what, st)
		}
	}
}

func TestBoundaries(t *testing.T) {
	c := New(Options{})
	c.Put(0, p("example."), soa("example.", 600), chain("example.", "m"), start)
	sub := denialtest.Set("example.", "sub.example. 3600 IN NSEC example. NS RRSIG NSEC")
	c.Put(0, p("example."), soa("example.", 600), []query.RRset{sub}, start)
	for _, q := range []struct {
		view query.View
		name string
		typ  uint16
		want Kind
	}{
		{0, "q.example.", dns.TypeA, Nothing}, // m's gap went when sub turned out to be in it
		{0, "c.example.", dns.TypeA, NXDomain},
		{1, "c.example.", dns.TypeA, Nothing}, // another view
		{0, "c.example.", dns.TypeANY, Nothing},
		{0, "c.example.", dns.TypeRRSIG, Nothing},
		{0, "example.", dns.TypeMX, NoData},
		{0, "example.", dns.TypeSOA, Nothing},
		{0, "example.", dns.TypeDS, Nothing}, // the parent's
		{0, "sub.example.", dns.TypeDS, NoData},
		{0, "sub.example.", dns.TypeA, Nothing}, // the child's
		{0, "x.sub.example.", dns.TypeA, Nothing},
		{0, "x.sub.example.", dns.TypeDS, Nothing},
		{0, "test.", dns.TypeA, Nothing},
		{0, ".", dns.TypeDS, Nothing},
	} {
		if d := c.Find(q.view, p(q.name), q.typ, start); d.Kind != q.want {
			t.Errorf("view %d %s %s = %+v, want %d", q.view, q.name, dns.TypeToString[q.typ], d, q.want)
		}
	}
	c.Put(0, p("sub.example."), soa("sub.example.", 600), chain("sub.example.", "w"), start)
	if d := c.Find(0, p("a.sub.example."), dns.TypeA, start); d.Kind != NXDomain || !d.SOA.Is("\x03sub\x07example\x00", dns.TypeSOA) {
		t.Errorf("in the zone below: %+v", d)
	}
	if d := c.Find(0, p("sub.example."), dns.TypeDS, start); d.Kind != NoData || !d.SOA.Is("\x07example\x00", dns.TypeSOA) {
		t.Errorf("DS of the zone below: %+v", d)
	}

	// Purging a name forgets the zones that could answer for it.
	for _, q := range []struct {
		name    string
		subtree bool
		zones   int
	}{{"x.sub.example.", false, 0}, {"y.example.", false, 1}, {"sub.example.", true, 0}, {"test.", true, 2}, {".", true, 0}, {".", false, 2}} {
		c := New(Options{})
		c.Put(0, p("example."), soa("example.", 600), chain("example.", "m"), start)
		c.Put(3, p("sub.example."), soa("sub.example.", 600), chain("sub.example.", "w"), start)
		if c.Purge(p(q.name), q.subtree); len(c.zones) != q.zones {
			t.Errorf("purge %s %v leaves %d zones, want %d", q.name, q.subtree, len(c.zones), q.zones)
		}
		check(t, c)
		if c.Clear(); c.bytes != 0 || c.live != 0 {
			t.Errorf("cleared, and %+v", c.Stats())
		}
	}
}

// Sixteen hashes are computed and no more; iterated ones only while there is a place.
func TestHashLimits(t *testing.T) {
	c := New(Options{})
	z := denialtest.New(rand.New(rand.NewPCG(0, 0)), 1)
	for seed := uint64(1); !z.NSEC3 || z.OptOut; seed++ {
		z = denialtest.New(rand.New(rand.NewPCG(seed, 0)), 1)
	}
	c.Put(0, p("z."), soa("z.", 60), z.Chain, start)
	for labels := range 20 { // the name, those above up to the apex, and the wildcard
		d := c.Find(0, p(strings.Repeat("q.", labels+1)+"z."), dns.TypeA, start)
		if want := labels+1+2 <= 16; (d.Kind == NXDomain) != want {
			t.Errorf("%d labels: %+v", labels+1, d.Kind)
		}
	}
	for range cap(c.hashing) {
		c.hashing <- struct{}{}
	}
	if d := c.Find(0, p("q.z."), dns.TypeA, start); d.Kind != Nothing {
		t.Errorf("with every place taken: %+v", d)
	}
	<-c.hashing
	if d := c.Find(0, p("q.z."), dns.TypeA, start); d.Kind != NXDomain {
		t.Errorf("with one place free: %+v", d)
	}
}

// A new chain of NSEC3 records ends the old one.
func TestNewChain(t *testing.T) {
	c := New(Options{})
	h := strings.Repeat("0", 31)
	for _, salt := range []string{"-", "aa"} {
		c.Put(0, p("example."), soa("example.", 60), denialtest.Sets("example.",
			"0"+h+".example. 60 IN NSEC3 1 0 0 "+salt+" g"+h+" A RRSIG", "g"+h+".example. 60 IN NSEC3 1 0 0 "+salt+" v"+h+" A RRSIG"), start)
		if st := c.Stats(); st.Records != 2 {
			t.Errorf("salt %s: %+v", salt, st)
		}
		check(t, c)
	}
}

// However much comes, the budget holds, and what is in use stays.
func TestBudget(t *testing.T) {
	c := New(Options{Bytes: 64 << 10})
	c.Put(0, p("used.example."), soa("used.example.", 60), chain("used.example.", "m"), start)
	for i := range 5000 {
		zone := fmt.Sprintf("z%d.example.", i%700)
		c.Put(0, p(zone), soa(zone, 60), chain(zone, fmt.Sprintf("h%d", i)), start)
		if d := c.Find(0, p("q.used.example."), dns.TypeA, start); d.Kind != NXDomain {
			t.Fatalf("what is used all the time went after %d", i)
		}
		if st := c.Stats(); st.Bytes > st.Budget {
			t.Fatalf("%+v", st)
		}
	}
	if len(c.queue) > 2*c.live+64 {
		t.Errorf("%d queued for %d", len(c.queue), c.live)
	}
	check(t, c)
	if c.Limit(8<<10, start); c.Stats().Bytes > 8<<10 || c.Stats().Records == 0 {
		t.Errorf("with a smaller budget: %+v", c.Stats())
	}
	check(t, c)
	// One zone that keeps changing leaves nothing behind.
	for i := range 5000 {
		c.Put(0, p("example."), soa("example.", 60), chain("example.", fmt.Sprintf("h%d", i)), start)
	}
	if len(c.queue) > 2*c.live+64 {
		t.Errorf("%d queued for %d", len(c.queue), c.live)
	}
	check(t, c)
}

func TestConcurrent(t *testing.T) {
	c := New(Options{Bytes: 32 << 10})
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 0))
			for range 500 {
				zone := fmt.Sprintf("z%d.", r.IntN(20))
				switch r.IntN(8) {
				case 0:
					c.Purge(p(zone), r.IntN(2) == 0)
				case 1, 2, 3:
					c.Put(0, p(zone), soa(zone, 60), chain(zone, fmt.Sprintf("h%d", r.IntN(9))), start)
				default:
					if d := c.Find(0, p("q."+zone), dns.TypeA, start); d.Kind == NoData {
						t.Errorf("%+v", d)
					}
				}
			}
		})
	}
	wg.Wait()
	check(t, c)
}

// Names and their places are in the same order.
func TestOrder(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	name := func() dnsname.Name {
		n := dnsname.Root
		for range r.IntN(4) {
			label := make([]byte, 1+r.IntN(3))
			for i := range label {
				label[i] = []byte{0, 1, 2, 'a', 'b', 255}[r.IntN(6)]
			}
			n, _ = n.Prepend(string(label))
		}
		return n
	}
	for range 20000 {
		a, b := name(), name()
		if strings.Compare(order(a), order(b)) != dnsname.Compare(a, b) {
			t.Fatalf("%q and %q", a, b)
		}
	}
}

// FuzzRing inserts gaps of single-byte places: no two overlap, the last is there, and a place is found in a gap only
// if the newest that said something of it says so.
func FuzzRing(f *testing.F) {
	f.Add([]byte("akkzza"))
	f.Add([]byte("aaazmn"))
	f.Fuzz(func(t *testing.T, ends []byte) {
		var r ring
		var all []*span
		for ; len(ends) >= 2; ends = ends[2:] {
			s := &span{gap: gap{string(ends[:1]), string(ends[1:2])}}
			gone := r.insert(s)
			all = append(all, s)
			for _, g := range gone {
				if slices.Contains(r, g) {
					t.Fatal("gone, and there")
				}
			}
			if got, match := r.find(s.from); got != s || !match {
				t.Fatalf("inserted %+v, found %+v", s.gap, got)
			}
			for i, a := range r {
				for j, b := range r {
					if i != j && (a.covers(b.from) || a.from == b.from) || i < j && a.from >= b.from {
						t.Fatalf("%+v and %+v", a.gap, b.gap)
					}
				}
			}
			for at := range 256 {
				place := string([]byte{byte(at)})
				got, match := r.find(place)
				if got == nil {
					continue
				}
				for _, later := range all[slices.Index(all, got)+1:] {
					if later.from == place && !match {
						t.Fatalf("%q is said to be nothing by %+v, though %+v, which is newer, begins there", place, got.gap, later.gap)
					}
				}
			}
		}
	})
}

func hashOf(name dnsname.Name, z *zone) (string, error) {
	h, err := new(denial.Hasher).Hash(name, z.params)
	return string(h[:]), err
}
