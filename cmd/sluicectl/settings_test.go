package main

import (
	"strings"
	"testing"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

func TestParseAssignment(t *testing.T) {
	const set, add, remove = adminv1.Operation_OPERATION_SET, adminv1.Operation_OPERATION_ADD, adminv1.Operation_OPERATION_REMOVE
	for in, want := range map[string]*adminv1.Assignment{
		"mode=nxdomain":                {Key: "mode", Operation: set, Value: "nxdomain"},
		"settings.mode=nxdomain":       {Key: "mode", Operation: set, Value: "nxdomain"},
		"mode=":                        {Key: "mode", Operation: set},
		"lists=-":                      {Key: "lists", Operation: set, Value: "-"},
		"lists+=a,b":                   {Key: "lists", Operation: add, Value: "a,b"},
		"lists-=a":                     {Key: "lists", Operation: remove, Value: "a"},
		"rewrites+=nas=A 192.0.2.7":    {Key: "rewrites", Operation: add, Value: "nas=A 192.0.2.7"},
		"unblocks-=*.example":          {Key: "unblocks", Operation: remove, Value: "*.example"},
		"name=a+=b":                    {Key: "name", Operation: set, Value: "a+=b"},
		"block_ipv4=":                  {Key: "block_ipv4", Operation: set},
		"a_key_of_a_newer_service=yes": {Key: "a_key_of_a_newer_service", Operation: set, Value: "yes"},
	} {
		as, err := parseAssignment(in)
		if err != nil || as.Key != want.Key || as.Operation != want.Operation || as.Value != want.Value {
			t.Errorf("%s = %v, %v", in, as, err)
		}
	}
	for _, in := range []string{"", "=", "+=", "mode", "Mode=x", "mo de=x", "lists++=a", "lists+ =a", "1st=x", "settings.=x", "-mode=x", "lists[0]=x"} {
		if as, err := parseAssignment(in); err == nil {
			t.Errorf("%q = %v", in, as)
		}
	}
}

func FuzzParseAssignment(f *testing.F) {
	for _, s := range []string{"mode=nxdomain", "lists+=a,b", "lists-=a", "rewrites+=nas=A 192.0.2.7", "=", "settings.mode="} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		as, err := parseAssignment(s)
		if err != nil {
			return
		}
		op := map[adminv1.Operation]string{1: "=", 2: "+=", 3: "-="}[as.Operation]
		if got := as.Key + op + as.Value; got != s && "settings."+got != s {
			t.Errorf("%q was read as %q", s, got)
		}
		similarKey(as.Key)
	})
}

func TestSimilarKey(t *testing.T) {
	for key, want := range map[string]string{
		"mdoe": "mode", "list": "lists", "service": "services", "blockttl": "block_ttl", "safesearch": "safe_search", "enable": "enabled",
		"rebinding_prot": "rebinding_protection", "mode": "", "policy": "", "xyzzy_quux": "",
	} {
		if got := similarKey(key); got != want {
			t.Errorf("%s: %q; want %q", key, got, want)
		}
	}
}

func TestAssignments(t *testing.T) {
	no, ttl, until := false, uint32(90), int64(1893456000)
	s := &userv1.Settings{
		Enabled: &no, PausedUntil: &until, Mode: userv1.BlockMode_BLOCK_MODE_CUSTOM_IP, BlockTtl: &ttl, BlockIpv4: new(string),
		Lists:      &userv1.StringSet{Replace: true, Values: []string{"a", "b"}, Removed: []string{"c"}},
		Services:   &userv1.StringSet{Replace: true},
		Categories: &userv1.StringSet{Values: []string{"ads"}},
		OwnLists:   &userv1.OwnListSet{Values: []*userv1.OwnList{{Id: "mine", Sha256: []byte{1, 2}}}, Removed: []string{"old"}},
		Rewrites:   &userv1.RewriteSet{Replace: true, Values: []*userv1.Rewrite{{Name: "nas", Records: []string{"A 192.0.2.7", "A 192.0.2.8"}}, {Name: "x", Records: []string{"NXDOMAIN"}}}},
		Unblocks:   &userv1.UnblockSet{Values: []*userv1.Unblock{{Name: "example", Subtree: true, Until: until}}},
		Schedules: &userv1.ScheduleSet{Values: []*userv1.Schedule{{Id: "night", Action: userv1.ScheduleAction_SCHEDULE_ACTION_BLOCK, TimeZone: "Europe/Nicosia",
			Windows: []*userv1.Window{{Days: 0x1f, From: 1320, To: 1440 + 420}, {Days: 0x7f, From: 0, To: 1440}, {Days: 0x45, From: 90, To: 100}}, Services: []string{"tiktok", "x"}, Everything: true}}},
		Log: userv1.LogPrivacy_LOG_PRIVACY_NO_CLIENT,
	}
	want := `enabled=false
paused_until=2030-01-01T00:00:00Z
mode=custom_ip
block_ttl=1m30s
block_ipv4=
lists=a,b
lists-=c
own_lists+=mine=0102
own_lists-=old
services=-
categories+=ads
schedules+=night=block;mon-fri 22:00-07:00;daily 00:00-24:00;mon,wed,sun 01:30-01:40;services:tiktok,x;everything;Europe/Nicosia
rewrites=nas=A 192.0.2.7;A 192.0.2.8
rewrites+=x=NXDOMAIN
unblocks+=*.example@2030-01-01T00:00:00Z
log=no_client`
	if got := strings.Join(assignments(s), "\n"); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}

func TestJSONLine(t *testing.T) {
	ttl := uint32(0)
	u := &adminv1.User{Id: "a\"b\x01<", Revision: 1<<63 + 1, Settings: &userv1.Settings{Mode: userv1.BlockMode_BLOCK_MODE_NXDOMAIN, BlockTtl: &ttl},
		Devices: []*userv1.Device{{Id: "d", TokenSha256: [][]byte{{0xff}}}}}
	want := `{"id":"a\"b\u0001\u003c","revision":9223372036854775809,"policy":"","settings":{"mode":"BLOCK_MODE_NXDOMAIN","block_ttl":0},"devices":[{"id":"d","token_sha256":["/w=="]}],"disabled":false,"tenant":"","name":"","created":0,"auto_devices":false,"max_devices":0}`
	if got := string(jsonLine(u)); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}

func TestSize(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 1000: "1000", 4096: "4KiB", 1 << 20: "1MiB", 1 << 30: "1GiB", 1536 << 20: "1536MiB", 5529130880: "~5.1GiB", 1<<20 + 1: "~1.0MiB", 300<<30 + 1<<20: "~300.0GiB"} {
		if got := size(n); got != want {
			t.Errorf("%d: %s; want %s", n, got, want)
		}
	}
}
