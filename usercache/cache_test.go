package usercache

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"google.golang.org/protobuf/proto"
)

var (
	testID = Identity{Dataset: [16]byte{1}, Lineage: [16]byte{2}}
	day    = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
)

// open opens a cache that is closed when the test ends, and counts as ready.
func open(t testing.TB, o Options) *Cache {
	t.Helper()
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	c, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.Ready(); err != nil {
		t.Fatal(err)
	}
	return c
}

func closeCache(t testing.TB, c *Cache) {
	t.Helper()
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}

// begin makes a dataset whole and empty, at revision 0.
func begin(t testing.TB, d *Dataset) *Dataset {
	t.Helper()
	if err := d.BeginTransfer(testID, false); err != nil {
		t.Fatal(err)
	}
	if err := d.FinishTransfer(testID, 0, day); err != nil {
		t.Fatal(err)
	}
	return d
}

// delta applies changes, in order, at the revisions that follow the dataset's.
func delta(t testing.TB, d *Dataset, changes ...Change) Result {
	t.Helper()
	rev := d.Status().Revision
	dl := Delta{From: rev, To: rev + uint64(len(changes))}
	for i, c := range changes {
		c.Revision = rev + uint64(i) + 1
		dl.Changes = append(dl.Changes, c)
	}
	res, err := d.ApplyDelta(context.Background(), testID, dl, day)
	if err != nil {
		t.Fatal(err)
	}
	return res
}

func put(key string, m proto.Message) Change {
	b, err := proto.Marshal(m)
	if err != nil {
		panic(err)
	}
	return Change{Key: []byte(key), Bytes: b}
}

func gone(key string) Change { return Change{Key: []byte(key), Removed: true} }

func user(devices ...string) *userv1.User {
	u := &userv1.User{}
	for _, id := range devices {
		u.Devices = append(u.Devices, &userv1.Device{Id: id})
	}
	return u
}

// who returns the user found for a device, or the status.
func who(c *Cache, device string) string {
	id, ok := ParseID(device)
	if !ok {
		return "malformed"
	}
	var p Profile
	if s := c.LookupDevice(&id, &p); s != Found {
		return s.String()
	}
	if p.DeviceID != id {
		return "another device: " + p.DeviceID.String()
	}
	return p.UserID.String()
}

func wantWho(t testing.TB, c *Cache, device, want string) {
	t.Helper()
	if got := who(c, device); got != want {
		t.Errorf("device %s belongs to %q, want %q", device, got, want)
	}
}

func texts(values ...string) *userv1.StringSet { return &userv1.StringSet{Values: values} }

func listRecord(n uint32) *userv1.List {
	return &userv1.List{Number: n, Sha256: make([]byte, 32), Rules: 100}
}

// Settings are laid over each other: defaults, policy, user, device.
func TestProfileLayers(t *testing.T) {
	c := open(t, Options{})
	cat := begin(t, c.Dataset(CatalogueKind))
	delta(t, cat,
		put("list/ads", listRecord(3)), put("list/malware", listRecord(7)), put("list/gambling", listRecord(511)),
		put("service/tiktok", &userv1.Service{Number: 1}), put("service/youtube", &userv1.Service{Number: 300}),
		put("category/threats", &userv1.Category{Number: 2, Lists: []string{"malware", "nowhere"}, Threat: true, SafeBrowsing: true}),
		put("category/gambling", &userv1.Category{Number: 200, Lists: []string{"gambling"}}),
		put("safesearch/bing", &userv1.SafeSearch{}), put("safesearch/google", &userv1.SafeSearch{}),
		put("policy/family", &userv1.Policy{
			Settings: &userv1.Settings{
				Lists: texts("ads", "unknown"), Services: texts("tiktok"), SafeSearch: texts("google", "bing"),
				SafeBrowsing: proto.Bool(true), Mode: userv1.BlockMode_BLOCK_MODE_NXDOMAIN, BlockTtl: proto.Uint32(60),
				Rewrites: &userv1.RewriteSet{Values: []*userv1.Rewrite{{Name: "NAS.home", Records: []string{"A 192.0.2.1"}}}},
			},
			Rules: &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte("||policy.example^")}},
		}),
	)
	users := begin(t, c.Dataset(Users))
	delta(t, users, put("ann", &userv1.User{
		Policy: "family",
		Settings: &userv1.Settings{
			Services: &userv1.StringSet{Values: []string{"youtube"}, Removed: []string{"tiktok"}}, BlockTtl: proto.Uint32(0),
			Categories: texts("gambling"),
		},
		Devices: []*userv1.Device{
			{Id: "ann-pc"},
			{Id: "ann-tv", DohOnly: true, PasswordHashes: []string{"$x"}, Settings: &userv1.Settings{
				SafeBrowsing: proto.Bool(false), Lists: &userv1.StringSet{Replace: true, Values: []string{"gambling"}},
				Mode: userv1.BlockMode_BLOCK_MODE_CUSTOM_IP, BlockIpv4: proto.String("192.0.2.9"), BlockIpv6: proto.String("2001:db8::9"),
				Log: userv1.LogPrivacy_LOG_PRIVACY_FULL, Ecs: proto.Bool(false), SafeSearch: &userv1.StringSet{Removed: []string{"google"}},
				PausedUntil: proto.Int64(1000),
			}, Rules: &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte("||tv.example^")}}, Tags: []string{"device_tv"}},
		},
	}), put("bob", user("bob-pc")), put("eve", &userv1.User{Policy: "nowhere", Devices: []*userv1.Device{{Id: "eve-pc"}}}),
		put("off", &userv1.User{Disabled: true, Devices: []*userv1.Device{{Id: "off-pc"}}}))

	look := func(device string) Profile {
		t.Helper()
		id, _ := ParseID(device)
		var p Profile
		if s := c.LookupDevice(&id, &p); s != Found {
			t.Fatalf("%s: %v", device, s)
		}
		return p
	}
	pc, tv, bob := look("ANN-PC"), look("ann-tv"), look("bob-pc")

	for _, x := range []struct {
		what string
		ok   bool
	}{
		{"pc: lists of policy and category", pc.Lists.Has(3) && pc.Lists.Has(511) && !pc.Lists.Has(7)},
		{"pc: threats of safe browsing", pc.Threats.Has(7) && !pc.Threats.Has(3)},
		{"pc: services added and removed", pc.Services.Has(300) && !pc.Services.Has(1)},
		{"pc: categories", pc.Categories.Has(2) && pc.Categories.Has(200)},
		{"pc: mode of policy", pc.Mode == BlockNXDomain},
		{"pc: a set zero wins", pc.BlockTTL == 0},
		{"pc: safe search", pc.SafeSearch == 3},
		{"pc: details are the policy's, shared", pc.Details != nil && pc.Details == cat.cache.Catalogue().policies["family"].profile.Details},
		{"pc: rewrite", len(pc.Details.Rewrites) == 1 && pc.Details.Rewrites[0].Name == "nas.home"},
		{"pc: enabled", pc.Is(Enabled|ECS|SafeBrowsing) && !pc.Is(DoHOnly)},
		{"pc: ids and revision", pc.UserID.String() == "ann" && pc.DeviceID.String() == "ann-pc" && pc.Revision == 1},
		{"tv: lists replaced", !tv.Lists.Has(3) && tv.Lists.Has(511)},
		{"tv: safe browsing off", !tv.Categories.Has(2) && tv.Threats.IsEmpty()},
		{"tv: custom addresses", tv.Mode == BlockCustomIP && tv.BlockIPv4 == [4]byte{192, 0, 2, 9} && tv.BlockIPv6[15] == 9},
		{"tv: flags", tv.Is(DoHOnly|HasCredentials) && !tv.Is(ECS) && tv.Log == LogFull},
		{"tv: safe search", tv.SafeSearch == 1},
		{"tv: pause", tv.PausedUntil == 1000 && !tv.Filtering(999) && tv.Filtering(1000)},
		{"tv: details", tv.Details != nil && len(tv.Details.Tags) == 1 && tv.Details.DeviceRules.Size == 13 && tv.Details.PolicyRules.Size == 17 && len(tv.Details.Rewrites) == 1},
		{"bob: defaults", bob.Lists.IsEmpty() && bob.Is(Enabled|ECS) && bob.BlockTTL == 10 && bob.Details == nil},
	} {
		if !x.ok {
			t.Errorf("wrong: %s", x.what)
		}
	}
	wantWho(t, c, "eve-pc", "unusable")
	wantWho(t, c, "off-pc", "disabled")
	wantWho(t, c, "nobody", "unknown")

	if text, ok := c.RuleText(&tv, tv.Details.DeviceRules); !ok || string(text) != "||tv.example^" {
		t.Errorf("device rules = %q, %v", text, ok)
	}
	if text, ok := c.RuleText(&tv, tv.Details.PolicyRules); !ok || string(text) != "||policy.example^" {
		t.Errorf("policy rules = %q, %v", text, ok)
	}
	if cr, ok := c.Credentials(&tv.DeviceID); !ok || len(cr.PasswordHashes) != 1 {
		t.Errorf("credentials = %v, %v", cr, ok)
	}
	tv.Details.SetCompiled(5)
	if d := look("ann-tv").Details; d.Compiled() != 5 {
		t.Error("what was compiled for a device is lost at the next lookup")
	}

	// A change of the policy is a change of all its users, at once.
	delta(t, cat, put("policy/family", &userv1.Policy{Settings: &userv1.Settings{Lists: texts("malware")}}))
	pc = look("ann-pc")
	if !pc.Lists.Has(7) || pc.Lists.Has(3) || pc.Mode != BlockNullIP || pc.Details != nil {
		t.Errorf("after a change of the policy: %+v", pc)
	}
	if d := look("ann-tv").Details; d.Compiled() != nil || d.PolicyRules.Size != 0 {
		t.Error("details outlived the policy they were merged with")
	}
	if p, ok := c.Catalogue().Policy("family"); !ok || !p.Lists.Has(7) {
		t.Error("the policy by itself is not found")
	}
}

func TestAutoUser(t *testing.T) {
	c := open(t, Options{})
	users := begin(t, c.Dataset(Users))
	device := []*userv1.Device{{Id: "d-1"}}
	delta(t, users,
		put("a", &userv1.User{AutoDevices: true}),
		put("a-b", &userv1.User{}),
		put("full", &userv1.User{AutoDevices: true, MaxDevices: 1, Devices: device}),
		put("off", &userv1.User{AutoDevices: true, Disabled: true}),
	)
	for id, want := range map[string]string{
		"a-1": "a", "a-tv-2": "a", "A-1": "a", "a-b-c": "", "a-b": "a", "a": "", "a-": "", "-a": "", "b-1": "", "full-2": "", "off-1": "",
	} {
		device, _ := ParseID(id)
		if user, ok := c.AutoUser(&device); user.String() != want && ok || ok != (want != "") {
			t.Errorf("%s is of %v, %v; want %q", id, user, ok, want)
		}
	}
}

func TestLookupByAddress(t *testing.T) {
	c := open(t, Options{})
	users := begin(t, c.Dataset(Users))
	delta(t, users,
		put("a", &userv1.User{Devices: []*userv1.Device{
			{Id: "a1", Links: []string{"192.0.2.0/24", "2001:db8::/32"}, Dedicated: []string{"203.0.113.1", "2001:db8:ff::1"}},
			{Id: "a2", Links: []string{"192.0.2.7", "2001:db8:1:2::5"}, EdnsIds: []string{"0011aabbccdd", "cpe:box 7"}},
		}}),
		put("b", &userv1.User{Devices: []*userv1.Device{{Id: "b1", Links: []string{"192.0.2.0/28"}}}}),
	)
	source := func(a string) string {
		var p Profile
		if s := c.LookupSource(netip.MustParseAddr(a), &p); s != Found {
			return s.String()
		}
		return p.DeviceID.String()
	}
	for _, x := range []struct{ addr, want string }{
		{"192.0.2.7", "a2"}, {"::ffff:192.0.2.7", "a2"}, {"192.0.2.8", "b1"}, {"192.0.2.16", "a1"}, {"192.0.3.1", "unknown"},
		{"2001:db8:1:2:ffff::1", "a2"}, {"2001:db8:1:3::1", "a1"}, {"2001:db9::1", "unknown"}, {"fe80::1%eth0", "unknown"},
	} {
		if got := source(x.addr); got != x.want {
			t.Errorf("source %s is %s, want %s", x.addr, got, x.want)
		}
	}
	var p Profile
	for _, x := range []struct{ subnet, want string }{
		{"192.0.2.7/32", "a2"}, {"192.0.2.0/28", "b1"}, {"::ffff:192.0.2.0/124", "b1"}, {"192.0.2.0/27", "a1"}, {"192.0.2.0/24", "a1"}, {"192.0.0.0/22", ""},
		{"2001:db8:1:2::/64", "a2"}, {"2001:db8:1:2::5/128", "a2"}, {"2001:db8:1::/56", "a1"}, {"2001::/16", ""}, {"0.0.0.0/0", ""}, {"::/0", ""},
	} {
		if s := c.LookupSubnet(netip.MustParsePrefix(x.subnet), &p); (s == Found) != (x.want != "") || s == Found && p.DeviceID.String() != x.want {
			t.Errorf("subnet %s is %v %v, want %q", x.subnet, s, p.DeviceID, x.want)
		}
	}
	if s := c.LookupDedicated(netip.MustParseAddr("203.0.113.1"), &p); s != Found || p.DeviceID.String() != "a1" {
		t.Errorf("dedicated address: %v %v", s, p.DeviceID)
	}
	if s := c.LookupDedicated(netip.MustParseAddr("203.0.113.2"), &p); s != Unknown {
		t.Errorf("another address: %v", s)
	}
	for _, id := range []string{"0011aabbccdd", "cpe:box 7"} {
		if s := c.LookupEDNS([]byte(id), &p); s != Found || p.DeviceID.String() != "a2" {
			t.Errorf("EDNS id %s: %v %v", id, s, p.DeviceID)
		}
	}
	// Links go with their record.
	delta(t, users, gone("b"), put("a", user("a1")))
	if got := source("192.0.2.7"); got != "unknown" {
		t.Errorf("a link outlived its record: %s", got)
	}
	if c.users.users.v4Lengths.Load() != 0 || c.users.users.v6Lengths[0].Load() != 0 {
		t.Error("lengths of links that are gone are still searched")
	}
}

func TestRestart(t *testing.T) {
	dir := t.TempDir()
	c := open(t, Options{Dir: dir})
	users := begin(t, c.Dataset(Users))
	for i := range 100 {
		delta(t, users, put(fmt.Sprintf("u%d", i), user(fmt.Sprintf("d%d", i))))
	}
	delta(t, users, gone("u7"))
	root, status := users.Root(), users.Status()
	closeCache(t, c)

	c = open(t, Options{Dir: dir})
	users = c.Dataset(Users)
	got := users.Status()
	if users.Root() != root || got.Revision != status.Revision || got.Records != 99 || !got.Complete || got.Identity != testID ||
		got.Totals != status.Totals || got.Bytes != status.Bytes || got.PersistedRevision != status.Revision {
		t.Errorf("after a restart %+v\nbefore %+v", got, status)
	}
	wantWho(t, c, "d50", "u50")
	wantWho(t, c, "d7", "unknown")
	// And once more, now into an existing file.
	delta(t, users, put("new", user("dnew")), gone("u50"))
	root = users.Root()
	closeCache(t, c)
	c = open(t, Options{Dir: dir})
	if c.Dataset(Users).Root() != root {
		t.Error("changes to an existing file are lost")
	}
	wantWho(t, c, "dnew", "new")
	wantWho(t, c, "d50", "unknown")
}
