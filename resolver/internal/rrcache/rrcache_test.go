package rrcache

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

const (
	start = clock.Instant(1000 * time.Second)
	s     = time.Second
)

func at(d time.Duration) clock.Instant { return start.Add(d) }

func name(s string) dnsname.Name { return dnsname.MustParse(s) }

func key(n string, typ uint16) Key { return Key{Name: name(n), Type: typ, Class: dnswire.ClassIN} }

func newCache(o Options) *Cache {
	o.Bytes = max(o.Bytes, 1<<20)
	o.Key = dnsname.NewKey([16]byte{7})
	return New(o)
}

// a makes an A set of rank RankAnswer whose address ends in last.
func a(n string, ttl uint32, last byte) query.RRset {
	return query.RRset{
		Name: name(n), Type: dnswire.TypeA, Class: dnswire.ClassIN, TTL: ttl, Rank: query.RankAnswer,
		Data: query.AppendRData(nil, []byte{192, 0, 2, last}),
	}
}

func with(set query.RRset, r query.Rank, st query.Status) query.RRset {
	set.Rank, set.Status = r, st
	return set
}

func nsSet(n string, ttl uint32, r query.Rank, targets ...string) query.RRset {
	set := query.RRset{Name: name(n), Type: dnswire.TypeNS, Class: dnswire.ClassIN, TTL: ttl, Rank: r}
	for _, t := range targets {
		set.Data = query.AppendRData(set.Data, []byte(name(t)))
	}
	return set
}

func soaSet(n string, ttl, minimum uint32) query.RRset {
	rd := append([]byte(name("ns."+n)), name("host."+n)...)
	rd = append(rd, make([]byte, 20)...)
	dnswire.PutUint32(rd[len(rd)-4:], minimum)
	return query.RRset{
		Name: name(n), Type: dnswire.TypeSOA, Class: dnswire.ClassIN, TTL: ttl, Rank: query.RankAuthority,
		Data: query.AppendRData(nil, rd), Sigs: query.AppendRData(nil, []byte("signature of the SOA")),
	}
}

func nsecSet(owner, next string, ttl uint32) query.RRset {
	return query.RRset{
		Name: name(owner), Type: dnswire.TypeNSEC, Class: dnswire.ClassIN, TTL: ttl, Rank: query.RankAuthority,
		Data: query.AppendRData(nil, append([]byte(name(next)), 0, 1, 0x40)),
		Sigs: query.AppendRData(nil, []byte("signature of the NSEC")),
	}
}

func TestTTLRunsDown(t *testing.T) {
	c := newCache(Options{MinTTL: 0, MaxTTL: time.Hour, MaxStale: 100 * s})
	set := a("www.example.", 300, 1)
	set.Sigs = query.AppendRData(nil, []byte("signature"))
	if !c.Put(0, query.Subnet{}, set, Put{}, at(0)) {
		t.Fatal("not stored")
	}
	k := key("www.example.", dnswire.TypeA)
	for _, x := range []struct {
		after     time.Duration
		ttl       uint32
		ok, stale bool
	}{
		{0, 300, true, false},
		{10 * s, 290, true, false},
		{10*s + s/2, 290, true, false}, // rounded up
		{299*s + s/2, 1, true, false},
		{300 * s, 0, false, true},
		{399 * s, 0, false, true},
		{401 * s, 0, false, false},
	} {
		got, f := c.Get(k, at(x.after))
		if f.OK != x.ok || f.Stale != x.stale || got.TTL != x.ttl {
			t.Errorf("after %v: %+v, TTL %d; want ok %v, stale %v, TTL %d", x.after, f, got.TTL, x.ok, x.stale, x.ttl)
		}
		if (x.ok || x.stale) && (!bytes.Equal(got.Data, set.Data) || !bytes.Equal(got.Sigs, set.Sigs) || got.Name != set.Name || got.Rank != set.Rank) {
			t.Errorf("after %v: %+v, want %+v", x.after, got, set)
		}
	}
	for _, x := range []struct {
		o         Options
		ttl, want uint32 // want 0: not stored
	}{
		{Options{}, 0, 0},
		{Options{}, 1 << 31, 0},
		{Options{}, 1<<31 - 1, 86400},
		{Options{MinTTL: 5 * s}, 2, 5},
		{Options{MinTTL: 5 * s, MaxTTL: 60 * s}, 90, 60},
	} {
		c := newCache(x.o)
		stored := c.Put(0, query.Subnet{}, a("a.", x.ttl, 1), Put{}, at(0))
		got, f := c.Get(key("a.", dnswire.TypeA), at(0))
		if stored != (x.want > 0) || f.OK != stored || got.TTL != x.want {
			t.Errorf("%+v, TTL %d: stored %v, got %d, want %d", x.o, x.ttl, stored, got.TTL, x.want)
		}
	}
}

func TestKeysAreApart(t *testing.T) {
	c := newCache(Options{})
	sub := func(p string) query.Subnet {
		pf := netip.MustParsePrefix(p)
		s := query.Subnet{Family: 1, Bits: uint8(pf.Bits())}
		if pf.Addr().Is6() {
			s.Family = 2
		}
		copy(s.Addr[:], pf.Addr().AsSlice())
		return s
	}
	keys := []Key{
		key("x.example.", dnswire.TypeA),
		key("x.example.", 65535),
		key("y.x.example.", dnswire.TypeA),
		key("example.", dnswire.TypeA),
		{Name: name("x.example."), Type: dnswire.TypeA, Class: 3},
		{Name: name("x.example."), Type: dnswire.TypeA, Class: 1, View: 1},
		{Name: name("x.example."), Type: dnswire.TypeA, Class: 1, View: 255},
		{Name: name("x.example."), Type: dnswire.TypeA, Class: 1, Subnet: sub("192.0.2.0/24")},
		{Name: name("x.example."), Type: dnswire.TypeA, Class: 1, Subnet: sub("192.0.2.0/23")},
		{Name: name("x.example."), Type: dnswire.TypeA, Class: 1, Subnet: sub("c000:200::/24")},
		{Name: name("x.example."), Type: dnswire.TypeA, Class: 1, Subnet: sub("0.0.0.0/0")},
		{Name: name("x.example."), Type: dnswire.TypeA, Class: 1, View: 1, Subnet: sub("2001:db8::/56")},
		{Name: dnsname.Root, Type: dnswire.TypeA, Class: 1},
	}
	for i, k := range keys {
		set := a("x.", 60, byte(i))
		set.Name, set.Type, set.Class = k.Name, k.Type, k.Class
		if !c.Put(k.View, k.Subnet, set, Put{}, at(0)) {
			t.Fatalf("%+v not stored", k)
		}
		for _, kind := range []kind{kindSet, kindNX} {
			var kb keyBuf
			b := appendKey(kb[:0], kind, k)
			gk, gn, n, ok := readKey(append(b, 1, 2, 3))
			want := k
			if kind == kindNX {
				want.Type = 0
			}
			if !ok || n != len(b) || gk != kind || gn != want {
				t.Errorf("key %+v reads back as %v %+v, %d of %d bytes, %v", k, gk, gn, n, len(b), ok)
			}
		}
	}
	for i, k := range keys {
		if got, f := c.Get(k, at(0)); !f.OK || got.First()[3] != byte(i) {
			t.Errorf("%+v: %+v, %v", k, got, f)
		}
	}
	if n := c.Stats().Entries; n != len(keys) {
		t.Errorf("%d entries, want %d", n, len(keys))
	}
}

func TestRanks(t *testing.T) {
	type put struct {
		rank   query.Rank
		status query.Status
		after  time.Duration
		stored bool
	}
	const (
		un, ins, sec, bog = query.Unchecked, query.Insecure, query.Secure, query.Bogus
	)
	for what, puts := range map[string][]put{
		"lower does not replace live higher": {{query.RankAnswer, un, 0, true}, {query.RankGlue, un, s, false}},
		"lower replaces dead higher":         {{query.RankAnswer, un, 0, true}, {query.RankGlue, un, 100 * s, true}},
		"equal replaces":                     {{query.RankAnswer, un, 0, true}, {query.RankAnswer, un, s, true}},
		"higher replaces":                    {{query.RankAdditional, un, 0, true}, {query.RankAuthority, un, s, true}},
		"unchecked does not replace secure":  {{query.RankAnswer, sec, 0, true}, {query.RankAnswer, un, s, false}},
		"insecure does not replace secure":   {{query.RankAuthority, sec, 0, true}, {query.RankAnswer, ins, s, false}},
		"secure replaces any":                {{query.RankAnswer, ins, 0, true}, {query.RankAuthority, sec, s, true}},
		"anything replaces bogus":            {{query.RankAnswer, bog, 0, true}, {query.RankAdditional, un, s, true}},
		"bogus replaces nothing live":        {{query.RankAdditional, un, 0, true}, {query.RankAnswer, bog, s, false}},
	} {
		c := newCache(Options{})
		want := byte(0)
		var last time.Duration
		for i, p := range puts {
			set := with(a("x.example.", 100, byte(i)), p.rank, p.status)
			if got := c.Put(0, query.Subnet{}, set, Put{}, at(p.after)); got != p.stored {
				t.Errorf("%s: put %d returned %v", what, i, got)
			}
			if p.stored {
				want = byte(i)
			}
			last = p.after
		}
		if got, f := c.Get(key("x.example.", dnswire.TypeA), at(last)); !f.OK || got.First()[3] != want {
			t.Errorf("%s: left %+v", what, got)
		}
	}
}

// What a child says of itself never outlives what its parent granted.
func TestGhostDomains(t *testing.T) {
	c := newCache(Options{MaxStale: time.Hour})
	none := query.Subnet{}
	put := func(set query.RRset, granted time.Duration, now time.Duration) bool {
		p := Put{}
		if granted != 0 {
			p.Granted = at(granted)
		}
		return c.Put(0, none, set, p, at(now))
	}
	zoneAt := func(n string, now time.Duration) dnsname.Name {
		z, ns, granted, ok := c.Delegation(name(n), 0, at(now))
		if ok && (granted <= at(now) || ns.Name != z || ns.TTL == 0 || ns.Type != dnswire.TypeNS) {
			t.Errorf("delegation of %s at %v: %+v granted %v", n, now, ns, granted)
		}
		return z
	}
	put(nsSet(".", 3600, query.RankAnswer, "a.root."), 3600*s, 0)
	put(nsSet("com.", 1000, query.RankGlue, "ns.com."), 1000*s, 0)
	put(nsSet("ghost.com.", 500, query.RankGlue, "ns.ghost.com."), 500*s, 0)
	if z := zoneAt("www.ghost.com.", 1*s); z != name("ghost.com.") {
		t.Fatalf("cut %v", z)
	}
	if z := zoneAt("com.", 1*s); z != name("com.") {
		t.Fatalf("a cut at the name itself counts: %v", z)
	}
	if z := zoneAt("other.org.", 1*s); z != dnsname.Root {
		t.Fatalf("root: %v", z)
	}

	// The child keeps renewing its own set, with and without a claim to a grant.
	for now := 100 * s; now < 500*s; now += 100 * s {
		put(nsSet("ghost.com.", 86400, query.RankAnswer, "new.ghost.com."), 0, now)
		put(nsSet("ghost.com.", 86400, query.RankAnswer, "newer.ghost.com."), now+86400*s, now)
		c.SetStatus(0, none, with(nsSet("ghost.com.", 86400, 0, "new.ghost.com."), query.RankAnswer, query.Secure), at(now))
	}
	if got, f := c.Get(key("ghost.com.", dnswire.TypeNS), at(499*s)); !f.OK || got.TTL > 1 {
		t.Errorf("the child's set has TTL %d beyond the grant", got.TTL)
	}
	if z := zoneAt("www.ghost.com.", 499*s); z != name("ghost.com.") {
		t.Errorf("gone early: %v", z)
	}
	if z := zoneAt("www.ghost.com.", 500*s); z != name("com.") {
		t.Errorf("ghost: %v still holds", z)
	}
	// With no grant in force the child's set is plain data, whatever it is put with.
	put(nsSet("ghost.com.", 86400, query.RankAnswer, "new.ghost.com."), 0, 501*s)
	put(nsSet("ghost.com.", 86400, query.RankAnswer, "new.ghost.com."), 86400*s, 501*s)
	if z := zoneAt("www.ghost.com.", 502*s); z != name("com.") {
		t.Errorf("ungranted set became a cut: %v", z)
	}
	// The parent may grant again, however good the child's set.
	if !put(nsSet("ghost.com.", 300, query.RankGlue, "ns.ghost.com."), 803*s, 503*s) || zoneAt("ghost.com.", 504*s) != name("ghost.com.") {
		t.Error("a new grant was refused")
	}
	// A cut below ends with the one above it (phoenix domains), but not with the root's.
	put(nsSet("sub.ghost.com.", 86400, query.RankGlue, "ns.sub.ghost.com."), 86400*s, 600*s)
	if z := zoneAt("a.sub.ghost.com.", 802*s); z != name("sub.ghost.com.") {
		t.Errorf("cut %v", z)
	}
	if z := zoneAt("a.sub.ghost.com.", 804*s); z != name("com.") {
		t.Errorf("phoenix: %v still holds", z)
	}
	put(nsSet("org.", 86400, query.RankGlue, "ns.org."), 86400*s, 900*s)
	if z := zoneAt("org.", 4000*s); z != name("org.") {
		t.Errorf("org. ended with the root's set: %v", z)
	}
	// Glue that was stored with the grant ends with it.
	put(with(a("ns.org.", 86400, 1), query.RankGlue, query.Unchecked), 1000*s, 900*s)
	if _, f := c.Get(key("ns.org.", dnswire.TypeA), at(1000*s)); f.OK {
		t.Error("glue outlives the grant")
	}
	// What a validator puts anew, in place of what it found Secure before, is of the zone too.
	put(nsSet("signed.org.", 300, query.RankGlue, "ns.org."), 1300*s, 1000*s)
	for _, secs := range []uint32{3600, 86400} {
		c.SetStatus(0, none, with(a("www.signed.org.", secs, byte(secs>>8)), query.RankAnswer, query.Secure), at(1000*s))
		k := key("www.signed.org.", dnswire.TypeA)
		if got, f := c.Get(k, at(1001*s)); !f.OK || got.TTL != secs-1 || f.Ends.Sub(at(1300*s)).Abs() > 10*time.Millisecond {
			t.Errorf("within a grant of 300 s: TTL %d, %+v", got.TTL, f)
		}
		if got, f := c.Get(k, at(1300*s)); f.OK || got.TTL != 0 {
			t.Errorf("beyond a grant of 300 s: TTL %d, %+v", got.TTL, f)
		}
	}
	for _, x := range []struct {
		n    string
		typ  uint16
		want clock.Instant
	}{{"www.signed.org.", dnswire.TypeA, at(1300 * s)}, {"signed.org.", dnswire.TypeA, at(1300 * s)}, {"signed.org.", dnswire.TypeDS, at(86400 * s)}, {"test.", dnswire.TypeA, clock.Never}, {".", dnswire.TypeDS, clock.Never}} {
		if got := c.Lease(name(x.n), x.typ, 0, at(1001*s)); got.Sub(x.want).Abs() > 10*time.Millisecond {
			t.Errorf("lease of %s %d: %v, want %v", x.n, x.typ, got, x.want)
		}
	}
	// Views do not see each other's cuts.
	if _, _, _, ok := c.Delegation(name("org."), 1, at(901*s)); ok {
		t.Error("view 1 sees view 0")
	}
}

// A set of a longer TTL than its zone is granted for ends with the grant, and says its TTL until then.
func TestLease(t *testing.T) {
	c := newCache(Options{MaxStale: time.Hour})
	k, none := key("www.example.", dnswire.TypeA), query.Subnet{}
	lease := Put{Lease: at(100 * s)}
	see := func(c *Cache, now time.Duration, ttl uint32, ends bool) {
		t.Helper()
		got, f := c.Get(k, at(now))
		if f.OK != (ttl > 0) || got.TTL != ttl || ends != (f.Ends != 0) || ends && f.Ends.Sub(at(100*s)).Abs() > 10*time.Millisecond {
			t.Errorf("at %v: TTL %d, %+v; want %d", now, got.TTL, f, ttl)
		}
	}
	c.Put(0, none, a("www.example.", 3600, 1), lease, at(0))
	see(c, 0, 3600, true)
	see(c, 60*s, 3540, true)
	if got, f := c.Get(k, at(100*s)); f.OK || !f.Stale || got.TTL != 0 || got.First()[3] != 1 {
		t.Errorf("past the grant: %+v %+v", got, f)
	}
	c.Put(0, none, a("www.example.", 50, 2), lease, at(0)) // shorter than the grant
	see(c, 0, 50, false)
	c.Put(0, none, a("www.example.", 3600, 2), Put{Lease: at(-s)}, at(0)) // a grant that has ended: nothing is stored
	see(c, 0, 50, false)
	c.Put(0, none, nsSet("www.example.", 3600, query.RankAnswer, "ns."), lease, at(0))
	if got, f := c.Get(key("www.example.", dnswire.TypeNS), at(0)); got.TTL != 100 || f.Ends != 0 {
		t.Errorf("an NS set: %+v %+v", got, f)
	}

	// A validator that finds the signatures to end sooner lowers the TTL; one that does not leaves it.
	for _, ttl := range []uint32{3590, 200, 30} {
		c := newCache(Options{})
		c.Put(0, none, nsSet("example.", 100, query.RankGlue, "ns."), Put{Granted: at(100 * s)}, at(0))
		c.Put(0, none, a("www.example.", 3600, 1), lease, at(0))
		c.SetStatus(0, none, with(a("www.example.", ttl, 1), query.RankAnswer, query.Secure), at(10*s))
		see(c, 10*s, ttl, ttl > 100)
		if got, _ := c.Get(k, at(10*s)); got.Status != query.Secure {
			t.Errorf("status %v", got.Status)
		}
	}

	// Through a dump, and into a cache of shorter TTLs.
	c = newCache(Options{})
	c.Put(0, none, a("www.example.", 3600, 1), lease, at(0))
	var file bytes.Buffer
	if _, err := c.Dump(&file, at(0), day); err != nil {
		t.Fatal(err)
	}
	for most, ttl := range map[time.Duration]uint32{0: 3590, 1000 * s: 1000} {
		c := newCache(Options{MaxTTL: most})
		if n, err := c.Load(bytes.NewReader(file.Bytes()), at(10*s), day.Add(10*s)); err != nil || n != 1 {
			t.Fatalf("loaded %d: %v", n, err)
		}
		see(c, 10*s, ttl, true)
	}
}

func TestDenials(t *testing.T) {
	c := newCache(Options{MaxNegativeTTL: 200 * s, MaxStale: 10 * s})
	none := query.Subnet{}
	soa := soaSet("example.", 3600, 100)
	proof := []query.RRset{nsecSet("alpha.example.", "omega.example.", 3600), nsecSet("example.", "alpha.example.", 3600)}
	nx, nodata := key("gone.example.", dnswire.TypeA), key("here.example.", dnswire.TypeAAAA)
	if !c.PutNegative(nx, NXDomain, soa, proof, query.Unchecked, at(0)) || !c.PutNegative(nodata, NoData, soa, proof[1:], query.Insecure, at(0)) {
		t.Fatal("not stored")
	}
	check := func(k Key, kind Kind, st query.Status, proofs []query.RRset, now time.Duration, ttl uint32) {
		t.Helper()
		_, f := c.Get(k, at(now))
		n := f.Negative
		if !f.OK || n.Kind != kind || n.Status != st || n.TTL != ttl || n.SOA.Name != soa.Name ||
			!bytes.Equal(n.SOA.Data, soa.Data) || !bytes.Equal(n.SOA.Sigs, soa.Sigs) || len(n.Proof) != len(proofs) {
			t.Fatalf("%+v", f)
		}
		for i := range proofs {
			if p := n.Proof[i]; p.Name != proofs[i].Name || p.Type != dnswire.TypeNSEC || p.Class != dnswire.ClassIN ||
				!bytes.Equal(p.Data, proofs[i].Data) || !bytes.Equal(p.Sigs, proofs[i].Sigs) || p.Status != st || p.TTL != ttl {
				t.Errorf("proof %d: %+v", i, p)
			}
		}
	}
	check(nx, NXDomain, query.Unchecked, proof, 30*s, 70)
	check(key("gone.example.", dnswire.TypeMX), NXDomain, query.Unchecked, proof, 30*s, 70) // every type
	check(nodata, NoData, query.Insecure, proof[1:], 30*s, 70)
	if _, f := c.Get(key("here.example.", dnswire.TypeA), at(0)); f.OK {
		t.Errorf("NODATA of another type: %+v", f)
	}

	// NXDOMAIN covers what is below only when it is Secure, and says nothing about itself here.
	if at, _, ok := c.NXCut(name("a.b.gone.example."), 0, at(1*s)); ok {
		t.Errorf("unchecked NXDOMAIN at %v used as a cut", at)
	}
	c.PutNegative(nx, NXDomain, soa, proof, query.Secure, at(1*s))
	if z, n, ok := c.NXCut(name("a.b.gone.example."), 0, at(2*s)); !ok || z != nx.Name || n.Kind != NXDomain || len(n.Proof) != 2 {
		t.Errorf("cut %v %+v %v", z, n, ok)
	}
	for _, n := range []string{"gone.example.", "agone.example.", "example.", "."} {
		if z, _, ok := c.NXCut(name(n), 0, at(2*s)); ok {
			t.Errorf("%s is below %v?", n, z)
		}
	}

	// Unchecked data does not lift a Secure denial; validated data does, and NODATA gives way to data.
	c.Put(0, none, a("gone.example.", 50, 1), Put{}, at(3*s))
	check(nx, NXDomain, query.Secure, proof, 3*s, 98)
	c.SetStatus(0, none, with(a("gone.example.", 50, 1), query.RankAnswer, query.Secure), at(4*s))
	if got, f := c.Get(nx, at(4*s)); !f.OK || f.Negative.Kind != NoKind || got.Status != query.Secure || got.Rank != query.RankSecure {
		t.Errorf("%+v %+v", got, f)
	}
	aaaa := a("here.example.", 50, 1)
	aaaa.Type = dnswire.TypeAAAA
	c.Put(0, none, with(aaaa, query.RankGlue, query.Unchecked), Put{}, at(4*s))
	check(nodata, NoData, query.Insecure, proof[1:], 4*s, 96)
	c.Put(0, none, aaaa, Put{}, at(4*s))
	if _, f := c.Get(nodata, at(4*s)); !f.OK || f.Negative.Kind != NoKind {
		t.Errorf("%+v", f)
	}
	// A denial that nobody has checked, or that is Bogus, does not hide what is Secure.
	for _, st := range []query.Status{query.Unchecked, query.Bogus} {
		c.PutNegative(nx, NXDomain, soa, proof, st, at(4*s))
		if got, f := c.Get(nx, at(4*s)); f.Negative.Kind != NoKind || got.Status != query.Secure {
			t.Errorf("%v NXDOMAIN hides Secure data: %+v", st, f)
		}
	}
	c.PutNegative(nx, NXDomain, soa, proof, query.Secure, at(4*s))
	check(nx, NXDomain, query.Secure, proof, 4*s, 100)
	// And the other way round: a newer denial of equal rank hides data.
	c.PutNegative(nodata, NoData, soa, nil, query.Insecure, at(5*s))
	check(nodata, NoData, query.Insecure, nil, 5*s, 100)
	// Stale denials can be had.
	if _, f := c.Get(nodata, at(106*s)); !f.Stale || f.OK || f.Negative.Kind != NoData || f.Negative.TTL != 0 {
		t.Errorf("%+v", f)
	}

	for what, x := range map[string]struct {
		soa   query.RRset
		proof []query.RRset
		want  uint32
	}{
		"SOA TTL":          {soaSet("t.", 7, 100), nil, 7},
		"MINIMUM":          {soaSet("t.", 100, 8), nil, 8},
		"proof":            {soaSet("t.", 100, 100), []query.RRset{nsecSet("t.", "t.", 9)}, 9},
		"MaxNegativeTTL":   {soaSet("t.", 86400, 86400), nil, 200},
		"zero":             {soaSet("t.", 0, 100), nil, 0},
		"no SOA":           {query.RRset{}, nil, 5},
		"proof alone":      {query.RRset{}, []query.RRset{nsecSet("t.", "t.", 9)}, 9},
		"SOA without data": {query.RRset{Name: "t.", Type: dnswire.TypeSOA, TTL: 100}, nil, 0},
		"padded proof":     {soaSet("t.", 100, 100), make([]query.RRset, maxProof+1), 0},
	} {
		c := newCache(Options{MaxNegativeTTL: 200 * s})
		stored := c.PutNegative(key("n.t.", 1), NXDomain, x.soa, x.proof, query.Unchecked, at(0))
		_, f := c.Get(key("n.t.", 1), at(0))
		if stored != (x.want > 0) || f.OK != stored || f.Negative.TTL != x.want {
			t.Errorf("%s: stored %v, TTL %d, want %d", what, stored, f.Negative.TTL, x.want)
		}
		if stored && (f.Negative.SOA.Type != x.soa.Type || len(f.Negative.Proof) != len(x.proof)) {
			t.Errorf("%s: SOA %+v, proof %+v", what, f.Negative.SOA, f.Negative.Proof)
		}
	}
}

func TestSetStatusJudgesTheDataItWasGiven(t *testing.T) {
	none := query.Subnet{}
	k := key("x.example.", dnswire.TypeA)
	c := newCache(Options{})
	mine, other := a("x.example.", 100, 1), a("x.example.", 100, 2)
	c.Put(0, none, mine, Put{}, at(0))
	mine.Status, mine.TTL = query.Secure, 40
	if !c.SetStatus(0, none, mine, at(10*s)) {
		t.Fatal("refused")
	}
	if got, _ := c.Get(k, at(10*s)); got.Status != query.Secure || got.Rank != query.RankSecure || got.TTL != 40 {
		t.Errorf("%+v", got)
	}
	// A status found does not prolong what the network gave.
	c.Purge(k.Name, false, 0)
	c.Put(0, none, a("x.example.", 100, 1), Put{}, at(0))
	mine.TTL = 100
	c.SetStatus(0, none, mine, at(10*s))
	if got, _ := c.Get(k, at(10*s)); got.TTL != 90 {
		t.Errorf("TTL %d, want 90", got.TTL)
	}
	// Somebody else's data came in between: it is not called Secure.
	c.Purge(k.Name, false, 0)
	c.Put(0, none, other, Put{}, at(0))
	c.SetStatus(0, none, mine, at(s))
	if got, _ := c.Get(k, at(s)); got.Status == query.Secure && got.First()[3] != 1 {
		t.Errorf("%+v was never validated", got)
	}
	// Bogus does not last and yields to anything.
	c.Purge(k.Name, false, 0)
	c.Put(0, none, other, Put{}, at(0))
	other.Status = query.Bogus
	c.SetStatus(0, none, other, at(s))
	if got, _ := c.Get(k, at(s)); got.Status != query.Bogus || got.TTL != 60 {
		t.Errorf("%+v", got)
	}
	// A refresh of Secure data counts once it has been validated.
	c.SetStatus(0, none, mine, at(2*s))
	if got, _ := c.Get(k, at(2*s)); got.Status != query.Secure || got.TTL != 100 {
		t.Errorf("%+v", got)
	}
}

func TestPurgeAndRaise(t *testing.T) {
	c := newCache(Options{})
	fill := func() {
		for _, n := range []string{"example.", "a.example.", "b.a.example.", "example.org.", "ba.example."} {
			c.Put(0, query.Subnet{}, a(n, 100, 1), Put{}, at(0))
			set := a(n, 100, 1)
			set.Type = dnswire.TypeMX
			c.Put(1, query.Subnet{}, set, Put{}, at(0))
		}
		c.Put(0, query.Subnet{}, nsSet("a.example.", 100, query.RankGlue, "ns.a.example."), Put{Granted: at(100 * s)}, at(0))
		c.PutNegative(key("z.example.", 0), NXDomain, soaSet("example.", 60, 60), nil, query.Secure, at(0))
	}
	for _, x := range []struct {
		name    string
		subtree bool
		typ     uint16
		want    int
	}{
		{"a.example.", false, 0, 3},
		{"a.example.", false, dnswire.TypeA, 1},
		{"a.example.", false, dnswire.TypeNS, 1},
		{"a.example.", true, 0, 5},
		{"example.", true, 0, 10},
		{".", true, 0, 12},
		{".", false, 0, 0},
		{"k.z.example.", false, 0, 1}, // the NXDOMAIN above it would answer
	} {
		fill()
		if n := c.Purge(name(x.name), x.subtree, x.typ); n != x.want {
			t.Errorf("purge %+v removed %d", x, n)
		}
		c.Clear()
		if n := c.Stats().Entries; n != 0 {
			t.Fatalf("%d entries after Clear", n)
		}
	}
	fill()
	c.Raise()
	if _, f := c.Get(key("example.", dnswire.TypeA), at(0)); f.OK || f.Stale {
		t.Error("an entry of an older epoch is found")
	}
	if _, _, _, ok := c.Delegation(name("a.example."), 0, at(0)); ok {
		t.Error("a cut of an older epoch is found")
	}
	if !c.Put(0, query.Subnet{}, with(a("example.", 100, 9), query.RankGlue, 0), Put{}, at(0)) {
		t.Error("an older epoch's rank still counts")
	}
	for range epochMask {
		c.Raise()
	}
	if _, f := c.Get(key("a.example.", dnswire.TypeA), at(0)); f.OK {
		t.Error("an epoch came round again")
	}
}

// A cache of random operations agrees with a map that follows the rules in the plainest way, as long as
// nothing has to be evicted.
func TestAgainstModel(t *testing.T) {
	type stored struct {
		set query.RRset
		end clock.Instant
	}
	r := rand.New(rand.NewPCG(1, 2))
	c := newCache(Options{Bytes: 2 << 20, MaxTTL: 500 * s, MaxStale: 50 * s})
	model := map[Key]stored{}
	now := start
	standing := func(s query.RRset) query.Rank {
		switch s.Status {
		case query.Secure:
			return query.RankSecure
		case query.Bogus:
			return 0
		}
		return s.Rank
	}
	names := make([]dnsname.Name, 300)
	for i := range names {
		names[i] = name(string(rune('a'+i%26)) + string(rune('a'+i/26)) + ".example.")
	}
	for range 20000 {
		now = now.Add(time.Duration(r.IntN(int(s))))
		k := Key{names[r.IntN(len(names))], uint16(100 + r.IntN(3)), 1, query.View(r.IntN(2)), query.Subnet{}}
		if r.IntN(2) == 0 {
			set := query.RRset{
				Name: k.Name, Type: k.Type, Class: 1, TTL: uint32(r.IntN(900)),
				Status: query.Status(r.IntN(query.NumStatus)), Rank: query.Rank(1 + r.IntN(5)),
				Data: query.AppendRData(nil, make([]byte, r.IntN(300))),
			}
			for i := 2; i < len(set.Data); i++ {
				set.Data[i] = byte(r.Uint32())
			}
			old, ok := model[k]
			life := min(time.Duration(set.TTL)*s, 500*s)
			if set.Status == query.Bogus {
				life = min(life, bogusTTL)
			}
			end := now.Add(life)
			want := ticks(end) > ticks(now) && !(ok && ticks(old.end) > ticks(now) && standing(old.set) > standing(set))
			if got := c.Put(k.View, k.Subnet, set, Put{}, now); got != want {
				t.Fatalf("put %+v over %+v at %v: %v", set, old, now, got)
			}
			if want {
				model[k] = stored{set, end}
			}
			continue
		}
		got, f := c.Get(k, now)
		want, ok := model[k]
		// Ends are kept to 4 ms.
		if ok && want.end.Sub(now).Abs() < 1<<tickShift || ok && want.end.Add(50*s).Sub(now).Abs() < 1<<tickShift {
			continue
		}
		live := ok && want.end > now
		stale := ok && !live && want.end.Add(50*s) > now
		if f.OK != live || f.Stale != stale {
			t.Fatalf("get %+v at %v: %+v, want %+v", k, now, f, want)
		}
		if live || stale {
			if !bytes.Equal(got.Data, want.set.Data) || got.Status != want.set.Status || got.Rank != want.set.Rank {
				t.Fatalf("get %+v: %+v, want %+v", k, got, want.set)
			}
		}
	}
	if st := c.Stats(); st.Evictions != 0 || st.Entries != len(model) {
		t.Errorf("%+v; the model has %d", st, len(model))
	}
}

// A name has at most a hundred types, data and denials together, whatever is asked for; those in common use have
// their place, and what is there can be renewed.
func TestTypesOfAName(t *testing.T) {
	c := newCache(Options{})
	set := func(typ uint16, b byte) query.RRset {
		x := a("many.example.", 300, b)
		x.Type = typ
		return x
	}
	held := func() (n int) {
		for typ := range 1 << 16 {
			if _, f := c.Get(key("many.example.", uint16(typ)), at(0)); f.OK {
				n++
			}
		}
		return n
	}
	for typ := 1 << 16; typ > 1; typ-- {
		if typ%2 == 0 {
			c.Put(0, query.Subnet{}, set(uint16(typ-1), 1), Put{}, at(0))
		} else {
			c.PutNegative(key("many.example.", uint16(typ-1)), NoData, soaSet("example.", 300, 300), nil, query.Insecure, at(0))
		}
	}
	if n := held(); n > 100 || n < 60 {
		t.Errorf("%d types", n)
	}
	for _, typ := range []uint16{dnswire.TypeA, dnswire.TypeAAAA, dnswire.TypeHTTPS, 257, 65535} {
		if got, f := c.Get(key("many.example.", typ), at(0)); !f.OK {
			t.Errorf("type %d is not there: %+v", typ, got)
		}
	}
	if !c.Put(0, query.Subnet{}, set(65535, 9), Put{}, at(1*s)) {
		t.Error("what is there cannot be renewed")
	}
	other := set(777, 1)
	other.Name = name("other.example.")
	if !c.Put(0, query.Subnet{}, other, Put{}, at(0)) {
		t.Error("another name has no room")
	}
	other.Name, other.Type = name("many.example."), 778
	if c.Put(0, query.Subnet{}, other, Put{}, at(0)) || !c.Put(0, query.Subnet{}, other, Put{}, at(2*time.Hour)) {
		t.Error("counted for less than an hour, or for ever")
	}
}

// Numbers: at most 150 bytes of budget for a name that was resolved once; here with the three quarters of
// the budget that sets get.
func TestBytesForAName(t *testing.T) {
	if testing.Short() {
		t.Skip("fills 1.5 MiB")
	}
	const budget = 2 << 20
	c := newCache(Options{Bytes: budget * 3 / 4})
	const n = 30000
	host := func(i int) dnsname.Name {
		return name("host" + string([]byte{byte('0' + i/100000%10), byte('0' + i/10000%10), byte('0' + i/1000%10), byte('0' + i/100%10), byte('0' + i/10%10), byte('0' + i%10)}) + ".zone.example.com.")
	}
	for i := range n {
		set := a("x.", 3600, byte(i))
		set.Name = host(i)
		c.Put(0, query.Subnet{}, set, Put{}, at(0))
	}
	found, run := 0, true
	for i := n - 1; i >= 0; i-- {
		if _, f := c.Get(Key{Name: host(i), Type: dnswire.TypeA, Class: 1}, at(0)); f.OK {
			found++
		} else if run {
			run = false
			t.Logf("the last %d are all there", n-1-i)
		}
	}
	per := budget / found
	t.Logf("%d of %d names, %d bytes each; %+v", found, n, per, c.Stats())
	if per > 150 {
		t.Errorf("%d bytes of budget for a name, want at most 150", per)
	}
	if c.Stats().Budget > budget*3/4 {
		t.Errorf("reserved %d", c.Stats().Budget)
	}
}

func TestGetInDoesNotAllocate(t *testing.T) {
	c := newCache(Options{})
	c.Put(0, query.Subnet{}, a("a-name-of-more-than-thirty-two-bytes.www.example.", 300, 1), Put{}, at(0))
	k := key("a-name-of-more-than-thirty-two-bytes.www.example.", dnswire.TypeA)
	buf := make([]byte, 512)
	if n := testing.AllocsPerRun(100, func() {
		if _, f := c.GetIn(buf, k, at(0)); !f.OK {
			t.Fatal("miss")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
