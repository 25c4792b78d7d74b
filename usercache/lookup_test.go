package usercache

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"google.golang.org/protobuf/proto"
)

// standardUser is the user of the memory goal: 3 devices with a linked address each, a policy, two lists, a
// service.
func standardUser(i int) *userv1.User {
	u := &userv1.User{
		Policy: "family", Tenant: "isp", Created: 1700000000,
		Settings: &userv1.Settings{Lists: texts("list-a", "list-b"), Services: texts("tiktok")},
	}
	for n := range 3 {
		k := i*3 + n
		u.Devices = append(u.Devices, &userv1.Device{
			Id: fmt.Sprintf("d%07x", k), Name: "phone", Created: 1700000000,
			Links: []string{netip.AddrFrom4([4]byte{10 + byte(k>>24), byte(k >> 16), byte(k >> 8), byte(k)}).String()},
		})
	}
	return u
}

func withCatalogue(t testing.TB, c *Cache) {
	t.Helper()
	delta(t, begin(t, c.Dataset(CatalogueKind)),
		put("list/list-a", listRecord(1)), put("list/list-b", listRecord(2)), put("list/list-c", listRecord(3)),
		put("service/tiktok", &userv1.Service{Number: 5}),
		put("category/c", &userv1.Category{Number: 1, Lists: []string{"list-c"}, Threat: true, SafeBrowsing: true}),
		put("policy/family", &userv1.Policy{Settings: &userv1.Settings{SafeBrowsing: proto.Bool(true), Lists: texts("list-c")},
			Rules: &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte("||x^")}}}))
}

func TestLookupsDoNotAllocate(t *testing.T) {
	c := open(t, Options{})
	withCatalogue(t, c)
	d := begin(t, c.Dataset(Users))
	for i := range 50 {
		u := standardUser(i)
		if i == 7 {
			u.Rules = &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte("||mine^")}}
			u.Devices[0].Dedicated = []string{"203.0.113.9"}
			u.Settings.BlockIpv6 = proto.String("2001:db8::53")
			u.Settings.Mode = userv1.BlockMode_BLOCK_MODE_CUSTOM_IP
		}
		delta(t, d, put(fmt.Sprintf("user-%07d", i), u))
	}
	for _, k := range Kinds { // the writer allocates
		if err := c.Dataset(k).Flush(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	id, _ := ParseID("d000000a")
	rules, _ := ParseID("d0000015")
	nobody, _ := ParseID("nobody")
	text := []byte("D000000A")
	var p Profile
	const runs = 5000 // so many that what goes on besides is less than one each
	for what, f := range map[string]func() Status{
		"device":            func() Status { return c.LookupDevice(&id, &p) },
		"parsed device":     func() Status { i, _ := ParseID(text); return c.LookupDevice(&i, &p) },
		"device with rules": func() Status { return c.LookupDevice(&rules, &p) },
		"source":            func() Status { return c.LookupSource(netip.AddrFrom4([4]byte{10, 0, 0, 7}), &p) },
		"dedicated":         func() Status { return c.LookupDedicated(netip.AddrFrom4([4]byte{203, 0, 113, 9}), &p) },
	} {
		if s := f(); s != Found {
			t.Fatalf("%s: %v", what, s)
		}
		if n := testing.AllocsPerRun(runs, func() { f() }); n != 0 {
			t.Errorf("looking up a %s allocates %v times", what, n)
		}
	}
	if n := testing.AllocsPerRun(runs, func() { c.LookupDevice(&nobody, &p) }); n != 0 {
		t.Errorf("looking up nobody allocates %v times", n)
	}
}

// While a device moves to and fro between users, other users come and go, and tables grow and compact, a
// lookup finds the device with one of the two, and the other devices where they are.
func TestLookupsDuringChanges(t *testing.T) {
	c := open(t, Options{Guard: GuardOptions{Share: 1}})
	d := begin(t, c.Dataset(Users))
	roaming := func(u string, with bool) Change {
		m := user(u + "-own")
		if with {
			m.Devices = append(m.Devices, &userv1.Device{Id: "roaming", Links: []string{"192.0.2.7"}})
		}
		return put(u, m)
	}
	delta(t, d, roaming("a", true), roaming("b", false),
		put("net", &userv1.User{Devices: []*userv1.Device{{Id: "net-all", Links: []string{"192.0.2.0/24"}}}}))
	var stop atomic.Bool
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for !stop.Load() {
				if w := who(c, "roaming"); w != "a" && w != "b" {
					t.Errorf("the roaming device is with %q", w)
					return
				}
				var p Profile
				if s := c.LookupSource(netip.AddrFrom4([4]byte{192, 0, 2, 7}), &p); s != Found || p.DeviceID.String() != "roaming" {
					t.Errorf("the roaming device's address is %v %v", s, p.DeviceID)
					return
				}
				if w := who(c, "a-own"); w != "a" {
					t.Errorf("the resident device is with %q", w)
					return
				}
				if w := who(c, "nobody"); w != "unknown" {
					t.Errorf("nobody is %q", w)
					return
				}
			}
		})
	}
	for i := range 1500 {
		from, to := "a", "b"
		if i%2 == 1 {
			from, to = to, from
		}
		changes := []Change{roaming(from, false), roaming(to, true)}
		for k := range 4 {
			key := "x" + strconv.Itoa((i*7+k)%500)
			if i/100%2 == 0 {
				changes = append(changes, put(key, user(key+"-1", key+"-2")))
			} else {
				changes = append(changes, gone(key))
			}
		}
		delta(t, d, changes...)
	}
	stop.Store(true)
	wg.Wait()
}

// Both readers of protobuf must agree: what the checker accepts the library can decode, the claims are those
// of the library's message, and laying settings over each other field by field gives what the library's
// values give.
func FuzzUser(f *testing.F) {
	full := standardUser(1)
	full.Settings = &userv1.Settings{
		Enabled: proto.Bool(false), PausedUntil: proto.Int64(-5), Mode: userv1.BlockMode_BLOCK_MODE_REFUSED, BlockTtl: proto.Uint32(1),
		BlockIpv4: proto.String("192.0.2.1"), BlockIpv6: proto.String(""), Lists: &userv1.StringSet{Replace: true, Values: []string{"list-a"}},
		SafeBrowsing: proto.Bool(true), Services: &userv1.StringSet{Removed: []string{"tiktok"}},
		Rewrites:      &userv1.RewriteSet{Values: []*userv1.Rewrite{{Name: "x", Records: []string{"NXDOMAIN"}}}},
		Schedules:     &userv1.ScheduleSet{Values: []*userv1.Schedule{{Id: "s", TimeZone: "Europe/Nicosia", Action: 1, Windows: []*userv1.Window{{Days: 127, From: 0, To: 2880}}}}},
		AllowNetworks: texts("192.0.2.0/24", "::/0"), Log: userv1.LogPrivacy_LOG_PRIVACY_NONE, RateLimit: proto.Uint32(7), Ecs: proto.Bool(false),
	}
	full.Devices[0].Settings = &userv1.Settings{BlockTtl: proto.Uint32(86400), Enabled: proto.Bool(true)}
	full.Devices[1].EdnsIds = []string{"cpe:x", "001122334455"}
	full.Devices[2].Dedicated = []string{"2001:db8::1"}
	full.Rules = &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte("||a^\n")}}
	for _, u := range []*userv1.User{{}, standardUser(0), full, user("a", "A"), {Policy: "family", Disabled: true}} {
		b, err := proto.Marshal(u)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	// Made by hand: repeated singular fields, unknown fields, a group.
	for _, s := range []string{"0a0161 0a0162", "f8ff7f01", "1b1c", "22020a00", "2205 0a0141 2a00"} {
		b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	c := open(f, Options{})
	withCatalogue(f, c)
	d := begin(f, c.Dataset(Users))
	f.Fuzz(func(t *testing.T, b []byte) {
		var facts userFacts
		err := d.users.readUser(b, &facts)
		for i := range facts.claims {
			if facts.claims[i].hash == 0 && len(b) == 0 {
				t.Error("a claim out of nothing")
			}
		}
		if err != nil {
			return
		}
		var u userv1.User
		if err := proto.Unmarshal(b, &u); err != nil {
			t.Fatalf("accepted, but the library says %v", err)
		}
		if len(u.Devices) != facts.devices {
			t.Errorf("%d devices, the library finds %d", facts.devices, len(u.Devices))
		}
		claims := 0
		for _, dev := range u.Devices {
			claims += 1 + len(dev.Links) + len(dev.Dedicated) + len(dev.EdnsIds)
		}
		if !hasRepeatedID(b) && claims != len(facts.claims) {
			t.Errorf("%d claims, the library finds %d", len(facts.claims), claims)
		}
		cat := c.Catalogue()
		for _, dev := range u.Devices {
			id, _ := ParseID(dev.Id)
			m := match{kind: claimDevice, id: id.Bytes()}
			raw := findDevice(b, &m)
			if raw == nil {
				if !hasRepeatedID(b) {
					t.Fatalf("device %s is not found again", dev.Id)
				}
				continue
			}
			var p Profile
			s, _ := cat.resolve(&p, b, raw)
			if s == Found && p.Details == nil {
				_ = cat.detailsOf(b, raw)
			}
			if s != Found || canonical(b) == nil {
				continue
			}
			// The same through the library, for records in canonical form.
			again, err := proto.MarshalOptions{Deterministic: true}.Marshal(&u)
			if err != nil {
				t.Fatal(err)
			}
			var q Profile
			s2, _ := cat.resolve(&q, again, findDevice(again, &m))
			if s2 != s || q != p {
				t.Errorf("resolved to %+v, in canonical form to %+v", p, q)
			}
		}
	})
}

// canonical returns b if the library would write it so.
func canonical(b []byte) []byte {
	var u userv1.User
	if proto.Unmarshal(b, &u) != nil {
		return nil
	}
	again, err := proto.MarshalOptions{Deterministic: true}.Marshal(&u)
	if err != nil || !bytes.Equal(again, b) {
		return nil
	}
	return b
}

// hasRepeatedID reports whether a device has its id twice, of which the library takes the last.
func hasRepeatedID(b []byte) bool {
	for {
		f, rest, ok := nextField(b)
		if !ok {
			return false
		}
		b = rest
		if f.num != 4 {
			continue
		}
		n := 0
		for dev := f.b; ; {
			g, rest, ok := nextField(dev)
			if !ok {
				break
			}
			dev = rest
			if g.num == 1 {
				n++
			}
		}
		if n > 1 {
			return true
		}
	}
}

func FuzzCatalogueRecord(f *testing.F) {
	for _, c := range []Change{put("list/a", listRecord(1)), put("policy/p", &userv1.Policy{Settings: &userv1.Settings{Lists: texts("a")}}),
		put("category/c", &userv1.Category{Lists: []string{"a"}}), put("service/s", &userv1.Service{}), put("safesearch/g", &userv1.SafeSearch{})} {
		f.Add(c.Key, c.Bytes)
	}
	f.Fuzz(func(t *testing.T, key, b []byte) {
		m, err := decodeCatalogue(key, b)
		if err != nil || m == nil {
			return
		}
		c := newCatalogue(1, map[string]*catalogueRecord{string(key): {key: string(key), revision: 1, message: m}}, nil)
		_, _ = c.Policy(string(bytes.TrimPrefix(key, []byte("policy/"))))
	})
}

func TestScheduleActive(t *testing.T) {
	nicosia, err := location("Europe/Nicosia")
	if err != nil {
		t.Fatal(err)
	}
	// Monday 22:00 to Tuesday 07:00.
	s := Schedule{Location: nicosia, Windows: []Window{{Days: 1, From: 22 * 60, To: 31 * 60}}}
	for _, c := range []struct {
		at   string
		want bool
	}{
		{"2026-03-02T21:59", false}, {"2026-03-02T22:00", true}, {"2026-03-03T06:59", true}, {"2026-03-03T07:00", false},
		{"2026-03-03T22:00", false}, {"2026-03-02T06:00", false},
	} {
		at, err := time.ParseInLocation("2006-01-02T15:04", c.at, nicosia)
		if err != nil {
			t.Fatal(err)
		}
		if got := s.Active(at.UTC()); got != c.want {
			t.Errorf("at %s active = %v", c.at, got)
		}
	}
}

// fill loads n standard users as a transfer would, bucket by bucket.
func fill(b testing.TB, c *Cache, n int) {
	d := c.Dataset(Users)
	if err := d.BeginTransfer(testID, false); err != nil {
		b.Fatal(err)
	}
	buckets := make([][]int32, Buckets)
	for i := range n {
		k := BucketOf(fmt.Appendf(nil, "user-%07d", i))
		buckets[k] = append(buckets[k], int32(i))
	}
	for bucket, list := range buckets {
		data := BucketData{Bucket: uint16(bucket), AsOf: uint64(n), Whole: true}
		for _, i := range list {
			p := put(fmt.Sprintf("user-%07d", i), standardUser(int(i)))
			data.Records = append(data.Records, Record{p.Key, uint64(i) + 1, p.Bytes})
		}
		if _, err := d.ApplyBucket(context.Background(), testID, data, day); err != nil {
			b.Fatal(err)
		}
	}
	if err := d.FinishTransfer(testID, uint64(n), day); err != nil {
		b.Fatal(err)
	}
}

func users() int {
	if n, err := strconv.Atoi(os.Getenv("USERS")); err == nil {
		return n
	}
	return 20000
}

// BenchmarkFill reports memory a user, and the time to take and to load them. USERS sets how many.
func BenchmarkFill(b *testing.B) {
	n := users()
	for b.Loop() {
		dir := b.TempDir()
		c, err := Open(Options{Dir: dir})
		if err != nil {
			b.Fatal(err)
		}
		withCatalogue(b, c)
		start := time.Now()
		fill(b, c, n)
		took := time.Since(start)
		if err := c.Dataset(Users).Flush(context.Background()); err != nil {
			b.Fatal(err)
		}
		flushed := time.Since(start)
		s := c.Dataset(Users).Status()
		b.ReportMetric(float64(s.IndexBytes)/float64(n), "index-B/user")
		b.ReportMetric(float64(uint64(s.MemoryBytes)-s.Totals.RecordBytes)/float64(n), "overhead-B/user")
		b.ReportMetric(float64(s.Totals.RecordBytes)/float64(n), "record-B/user")
		b.ReportMetric(took.Seconds()*1e6/float64(n), "µs-take/user")
		b.ReportMetric(flushed.Seconds()*1e6/float64(n), "µs-on-disk/user")
		if err := c.Ready(); err != nil {
			b.Fatal(err)
		}
		if err := c.Close(); err != nil {
			b.Fatal(err)
		}
		c = nil
		runtime.GC()
		start = time.Now()
		if c, err = Open(Options{Dir: dir}); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(time.Since(start).Seconds()*1e6/float64(n), "µs-load/user")
		files, _ := os.ReadDir(dir)
		for _, f := range files {
			if info, err := f.Info(); err == nil && strings.HasPrefix(f.Name(), "users") {
				b.ReportMetric(float64(info.Size())/float64(n), "file-B/user")
			}
		}
		s = c.Dataset(Users).Status()
		b.ReportMetric(float64(uint64(s.MemoryBytes)-s.Totals.RecordBytes)/float64(n), "overhead-loaded-B/user")
		_ = c.Close()
	}
}

func BenchmarkLookupDevice(b *testing.B) {
	c := open(b, Options{})
	withCatalogue(b, c)
	n := users()
	fill(b, c, n)
	ids := make([]ID, 1024)
	for i := range ids {
		ids[i], _ = ParseID(fmt.Sprintf("d%07x", i*7919%(n*3)))
	}
	var p Profile
	i := 0
	for b.Loop() {
		if s := c.LookupDevice(&ids[i&1023], &p); s != Found {
			b.Fatal(s)
		}
		i++
	}
}

func BenchmarkApplyDelta(b *testing.B) {
	c := open(b, Options{})
	n := users()
	fill(b, c, n)
	d := c.Dataset(Users)
	rev := uint64(n)
	i := 0
	for b.Loop() {
		dl := Delta{From: rev, To: rev + 20}
		for k := range 20 {
			j := (i*20 + k) * 7919 % n
			p := put(fmt.Sprintf("user-%07d", j), standardUser(j))
			p.Revision = rev + uint64(k) + 1
			dl.Changes = append(dl.Changes, p)
		}
		rev += 20
		i++
		if _, err := d.ApplyDelta(context.Background(), testID, dl, day); err != nil {
			b.Fatal(err)
		}
	}
}
