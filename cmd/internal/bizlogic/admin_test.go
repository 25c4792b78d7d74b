package bizlogic

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
)

func exportedLine(t *testing.T, what string, m proto.Message) []byte {
	t.Helper()
	b, err := protojson.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := json.Compact(&out, fmt.Appendf(nil, "{%q:%s}", what, b)); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestUsersAndDevices(t *testing.T) {
	r := start(t, Options{})
	ctx := t.Context()
	if _, err := r.policies.CreatePolicy(ctx, &adminv1.CreatePolicyRequest{Id: "family"}); err != nil {
		t.Fatal(err)
	}
	first := r.user("ann", "family")
	if second := r.user("bob"); second <= first {
		t.Errorf("revisions %d, %d", first, second)
	}
	for _, c := range []struct {
		req   *adminv1.CreateUserRequest
		code  codes.Code
		field string
	}{
		{&adminv1.CreateUserRequest{Id: "ann"}, codes.AlreadyExists, ""},
		{&adminv1.CreateUserRequest{Id: ""}, codes.InvalidArgument, "id"},
		{&adminv1.CreateUserRequest{Id: "Ann"}, codes.InvalidArgument, "id"},
		{&adminv1.CreateUserRequest{Id: "a/b"}, codes.InvalidArgument, "id"},
		{&adminv1.CreateUserRequest{Id: strings.Repeat("a", 64)}, codes.InvalidArgument, "id"},
		{&adminv1.CreateUserRequest{Id: "carl", Policy: "none"}, codes.InvalidArgument, "policy"},
		{&adminv1.CreateUserRequest{Id: "carl", Name: "a\x00b"}, codes.InvalidArgument, "name"},
		{&adminv1.CreateUserRequest{Id: "carl", Tenant: "T"}, codes.InvalidArgument, "tenant"},
	} {
		_, err := r.users.CreateUser(ctx, c.req)
		wantError(t, err, c.code, c.field)
	}
	if _, err := r.users.CreateUser(ctx, &adminv1.CreateUserRequest{Id: strings.Repeat("a", 63)}); err != nil {
		t.Error(err)
	}

	if err := r.device("ann", "phone", "192.0.2.7", "2001:db8::1", "198.51.100.0/24", "192.0.2.7/32", "2001:db8:0:1::5/64"); err != nil {
		t.Fatal(err)
	}
	got, err := r.users.GetDevice(ctx, &adminv1.GetDeviceRequest{Id: "phone"})
	if want := []string{"192.0.2.7", "2001:db8::/64", "198.51.100.0/24", "2001:db8:0:1::/64"}; err != nil || fmt.Sprint(got.Device.Device.Links) != fmt.Sprint(want) || got.Device.User != "ann" {
		t.Errorf("device = %v, %v; want links %v", got, err, want)
	}
	wantError(t, r.device("bob", "phone"), codes.AlreadyExists, "")           // ids are unique in the dataset
	wantError(t, r.device("bob", "tv", "192.0.2.7"), codes.AlreadyExists, "") // so are links
	wantError(t, r.device("nobody", "tv"), codes.NotFound, "")                //
	wantError(t, r.device("bob", "tv", "2001:db8::/96"), codes.InvalidArgument, "device.links")
	wantError(t, r.device("bob", "tv", "0.0.0.0/0"), codes.InvalidArgument, "device.links")
	for _, link := range []string{"127.0.0.5/8", "2001:db8::5/48"} { // who wrote it meant fewer
		wantError(t, r.device("bob", "tv", link), codes.InvalidArgument, "device.links")
	}
	wantError(t, r.device("bob", "TV"), codes.InvalidArgument, "device.id")
	_, err = r.users.CreateDevice(ctx, &adminv1.CreateDeviceRequest{User: "bob", Device: &userv1.Device{Id: "tv", DohOnly: true}})
	wantError(t, err, codes.InvalidArgument, "device.doh_only")
	_, err = r.users.CreateDevice(ctx, &adminv1.CreateDeviceRequest{User: "bob", Device: &userv1.Device{Id: "tv", DohOnly: true}, Password: "long enough"})
	if err != nil {
		t.Fatal(err)
	}
	tv, _ := r.users.GetDevice(ctx, &adminv1.GetDeviceRequest{Id: "tv"})
	if h := tv.GetDevice().GetDevice().GetPasswordHashes(); len(h) != 1 || !strings.HasPrefix(h[0], "$argon2id$v=19$m=") || strings.Contains(h[0], "long") {
		t.Errorf("hashes %v", h)
	}

	// A device moves with everything it has, and its old place is free.
	to := "bob"
	if _, err := r.users.UpdateDevice(ctx, &adminv1.UpdateDeviceRequest{Id: "phone", User: &to, IfRevision: 1}); err == nil {
		t.Error("moved at another revision")
	} else {
		wantError(t, err, codes.Aborted, "")
	}
	if _, err := r.users.UpdateDevice(ctx, &adminv1.UpdateDeviceRequest{Id: "phone", User: &to}); err != nil {
		t.Fatal(err)
	}
	if got, err := r.users.GetDevice(ctx, &adminv1.GetDeviceRequest{Id: "phone"}); err != nil || got.Device.User != "bob" || len(got.Device.Device.Links) != 4 {
		t.Errorf("moved device = %v, %v", got, err)
	}
	wantError(t, r.device("ann", "pad", "198.51.100.0/24"), codes.AlreadyExists, "")
	if _, err := r.users.DeleteDevice(ctx, &adminv1.DeleteDeviceRequest{Id: "phone"}); err != nil {
		t.Fatal(err)
	}
	if err := r.device("ann", "phone", "198.51.100.0/24"); err != nil {
		t.Errorf("after the device was deleted: %v", err)
	}

	// Deleting a user frees what its devices claimed, and the policy.
	_, err = r.policies.DeletePolicy(ctx, &adminv1.DeletePolicyRequest{Id: "family"})
	wantError(t, err, codes.FailedPrecondition, "")
	if _, err := r.users.DeleteUser(ctx, &adminv1.DeleteUserRequest{Id: "ann"}); err != nil {
		t.Fatal(err)
	}
	if err := r.device("bob", "phone", "198.51.100.0/24"); err != nil {
		t.Error(err)
	}
	if _, err := r.policies.DeletePolicy(ctx, &adminv1.DeletePolicyRequest{Id: "family"}); err != nil {
		t.Error(err)
	}
	_, err = r.users.GetUser(ctx, &adminv1.GetUserRequest{Id: "ann"})
	wantError(t, err, codes.NotFound, "")
	_, err = r.users.DeleteUser(ctx, &adminv1.DeleteUserRequest{Id: "ann"})
	wantError(t, err, codes.NotFound, "")
}

func TestListUsersPagesAndFilters(t *testing.T) {
	r := start(t, Options{})
	if _, err := r.policies.CreatePolicy(t.Context(), &adminv1.CreatePolicyRequest{Id: "p"}); err != nil {
		t.Fatal(err)
	}
	for i := range 25 {
		policy := ""
		if i%5 == 0 {
			policy = "p"
		}
		r.user(fmt.Sprintf("u-%02d", i), policy)
	}
	var ids []string
	req := &adminv1.ListUsersRequest{Limit: 10}
	for {
		resp, err := r.users.ListUsers(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		for _, u := range resp.Users {
			ids = append(ids, u.Id)
		}
		if req.Page = resp.NextPage; req.Page == "" {
			break
		}
	}
	if len(ids) != 25 || ids[0] != "u-00" || ids[24] != "u-24" {
		t.Errorf("pages hold %v", ids)
	}
	for filter, want := range map[string]int{"policy=p": 5, "policy=p u-2": 1, "u-1": 10, "disabled=true": 0} {
		resp, err := r.users.ListUsers(t.Context(), &adminv1.ListUsersRequest{Filter: filter})
		if err != nil || len(resp.Users) != want {
			t.Errorf("filter %q gives %d, %v; want %d", filter, len(resp.GetUsers()), err, want)
		}
	}
	_, err := r.users.ListUsers(t.Context(), &adminv1.ListUsersRequest{Filter: "color=red"})
	wantError(t, err, codes.InvalidArgument, "filter")
}

func TestSettings(t *testing.T) {
	r := start(t, Options{})
	ctx := t.Context()
	if _, err := r.policies.CreatePolicy(ctx, &adminv1.CreatePolicyRequest{Id: "p"}); err != nil {
		t.Fatal(err)
	}
	r.user("u", "p")
	if err := r.device("u", "d"); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"oisd", "hagezi"} {
		if _, err := r.addList(id, "||ads.example^\n", false); err != nil {
			t.Fatal(err)
		}
	}
	show := func(target string) string {
		var s *userv1.Settings
		switch target {
		case "policy/p":
			resp, _ := r.policies.GetPolicy(ctx, &adminv1.GetPolicyRequest{Id: "p"})
			s = resp.GetPolicy().GetSettings()
		case "u":
			resp, _ := r.users.GetUser(ctx, &adminv1.GetUserRequest{Id: "u"})
			s = resp.GetUser().GetSettings()
		case "u/d":
			resp, _ := r.users.GetDevice(ctx, &adminv1.GetDeviceRequest{Id: "d"})
			s = resp.GetDevice().GetDevice().GetSettings()
		}
		b, _ := protojson.MarshalOptions{UseProtoNames: true}.Marshal(s)
		var out bytes.Buffer
		if json.Compact(&out, b) != nil {
			t.Fatalf("%s", b)
		}
		return out.String()
	}
	for _, c := range []struct {
		target, assignments, want string
	}{
		{"policy/p", "lists+=oisd mode=nxdomain block_ttl=10s services+=tiktok safe_search+=google enabled=false",
			`{"enabled":false,"mode":"BLOCK_MODE_NXDOMAIN","block_ttl":10,"lists":{"values":["oisd"]},"services":{"values":["tiktok"]},"safe_search":{"values":["google"]}}`},
		{"policy/p", "lists+=hagezi,oisd lists-=oisd enabled= mode= block_ttl= safe_search-=google",
			`{"lists":{"values":["hagezi"]},"services":{"values":["tiktok"]}}`},
		{"policy/p", "lists=oisd,hagezi services=", `{"lists":{"values":["oisd","hagezi"]}}`},
		{"u", "lists-=oisd", `{"lists":{"removed":["oisd"]}}`}, // of the policy's
		{"u", "lists+=oisd", `{"lists":{"values":["oisd"]}}`},
		{"u", "lists=-", `{"lists":{"replace":true}}`}, // none, whatever the policy has
		{"u", "lists= enabled=true", `{"enabled":true}`},
		{"u/d", "allow_networks+=192.0.2.1,2001:DB8::/32 block_types+=any,TYPE65280", // canonical forms
			`{"allow_networks":{"values":["192.0.2.1/32","2001:db8::/32"]},"block_types":{"values":["ANY","TYPE65280"]}}`},
		{"u/d", "allow_networks= block_types= block_ipv4=192.0.2.9 log=no-client rate_limit=50",
			`{"block_ipv4":"192.0.2.9","log":"LOG_PRIVACY_NO_CLIENT","rate_limit":50}`},
		{"u/d", "block_ipv4= log= rate_limit= deny_domains+=*.Games.example.,x.example allow_domains+=example rebinding_exceptions+=corp.example block_private_relay=true",
			`{"allow_domains":{"values":["example"]},"deny_domains":{"values":["games.example","x.example"]},"rebinding_exceptions":{"values":["corp.example"]},"block_private_relay":true}`},
		{"u/d", "deny_domains= allow_domains= rebinding_exceptions= block_private_relay= unblocks+=*.Example.ORG.@4102444800",
			`{"unblocks":{"values":[{"name":"example.org","subtree":true,"until":"4102444800"}]}}`},
	} {
		if _, err := r.set(c.target, strings.Fields(c.assignments)...); err != nil {
			t.Errorf("set %s %s: %v", c.target, c.assignments, err)
		}
		if got := show(c.target); got != c.want {
			t.Errorf("after set %s %s:\n got %s\nwant %s", c.target, c.assignments, got, c.want)
		}
	}
	if _, err := r.set("u/d", "unblocks=", "rewrites+=NAS.home.arpa=A 192.0.2.7;AAAA 2001:db8::7", "schedules+=night=block;mon-fri 22:00-07:00;sun 00:00-24:00;services:tiktok,twitter;Europe/Nicosia"); err != nil {
		t.Fatal(err)
	}
	want := `{"schedules":{"values":[{"id":"night","time_zone":"Europe/Nicosia","windows":[{"days":31,"from":1320,"to":1860},{"days":64,"to":1440}],"action":"SCHEDULE_ACTION_BLOCK","services":["tiktok","twitter"]}]},` +
		`"rewrites":{"values":[{"name":"nas.home.arpa","records":["A 192.0.2.7","AAAA 2001:db8::7"]}]}}`
	if got := show("u/d"); got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
	before := show("u")
	for _, c := range []struct {
		target, assignment string
		code               codes.Code
		field              string
	}{
		{"u", "color=red", codes.InvalidArgument, "key"},
		{"u", "lists+=nope", codes.InvalidArgument, "lists"},
		{"u", "services+=tick-tock", codes.InvalidArgument, "services"},
		{"u", "lists-=nope", codes.InvalidArgument, "lists"}, // nobody has it
		{"policy/p", "categories-=nope", codes.InvalidArgument, "categories"},
		{"u", "paused_until=1000", codes.InvalidArgument, "paused_until"}, // it would pause nothing
		{"u", "mode=teapot", codes.InvalidArgument, "mode"},
		{"u", "mode=unspecified", codes.InvalidArgument, "mode"},
		{"u", "enabled=maybe", codes.InvalidArgument, "enabled"},
		{"u", "enabled+=true", codes.InvalidArgument, "enabled"},
		{"u", "block_ttl=2000h", codes.InvalidArgument, "block_ttl"},
		{"u", "block_ttl=-1", codes.InvalidArgument, "block_ttl"},
		{"u", "block_ttl=1500ms", codes.InvalidArgument, "block_ttl"},
		{"u", "rate_limit=10s", codes.InvalidArgument, "rate_limit"},
		{"u", "block_ipv4=2001:db8::1", codes.InvalidArgument, "block_ipv4"},
		{"u", "allow_networks+=home", codes.InvalidArgument, "allow_networks"},
		{"u", "rewrites+=a.example=A 2001:db8::1", codes.InvalidArgument, "rewrites"},
		{"u", "rewrites+=a.example=CNAME b.example;A 192.0.2.1", codes.InvalidArgument, "rewrites"},
		{"u", "rewrites+=a..example=NXDOMAIN", codes.InvalidArgument, "rewrites"},
		{"u", "unblocks+=a.example@1000", codes.InvalidArgument, "unblocks"},
		{"u", "unblocks+=a.example=+1h", codes.InvalidArgument, "unblocks"},
		{"u", "schedules+=n=block;mon 1:00-2:00;everything;Mars/Olympus", codes.InvalidArgument, "schedules"},
		{"u", "schedules+=n=block;mon 1:00-2:00", codes.InvalidArgument, "schedules"},
		{"u", "schedules+=n=block;everything", codes.InvalidArgument, "schedules"},
		{"u", "schedules+=n=block;mon 12:00-12:00;everything", codes.InvalidArgument, "schedules"},
		{"u", "schedules+=n=block;mon -1:00-2:00;everything", codes.InvalidArgument, "schedules"},
		{"u", "schedules+=n=block;mon 24:00-25:00;everything", codes.InvalidArgument, "schedules"},
		{"u", "rewrites+=a.example=MX mail.example", codes.InvalidArgument, "rewrites"},
		{"u", "rewrites+=a.example=HTTPS 1 . ipv4hint=x", codes.InvalidArgument, "rewrites"},
		{"u", "block_types+=FOO", codes.InvalidArgument, "block_types"},
		{"u", "deny_domains+=a..example", codes.InvalidArgument, "deny_domains"},
		{"u", "rebinding_exceptions+=192.0.2.0/24", codes.InvalidArgument, "rebinding_exceptions"},
		{"u", "own_lists+=mine=00", codes.InvalidArgument, "own_lists"},
		{"u", "policy=nope", codes.InvalidArgument, "policy"},
		{"policy/p", "policy=p", codes.InvalidArgument, "policy"},
		{"nobody", "enabled=true", codes.NotFound, ""},
		{"u/nothing", "enabled=true", codes.NotFound, ""},
		{"policy/nope", "enabled=true", codes.NotFound, ""},
		{"u/", "enabled=true", codes.InvalidArgument, "target"},
	} {
		_, err := r.set(c.target, "block_ttl=77", c.assignment) // all or nothing
		wantError(t, err, c.code, c.field)
	}
	if _, err := r.set("u", "unblocks+=a.example=+1h"); !strings.HasSuffix(fmt.Sprint(err), `unblocks: "a.example=+1h" holds '='; what is let through is NAME or *.NAME, for a while NAME@+1h`) || strings.Count(err.Error(), "unblocks") > 1 {
		t.Error(err)
	}
	// What goes wrong most often is told in the words of who wrote it.
	for _, c := range [][3]string{
		{"u", "schedules+=n=block;22:00-07:00;everything", "22:00-07:00 is on no day; write for example daily 22:00-07:00"},
		{"u", "schedules+=n=block;mon-fri,sun;everything", `"mon-fri,sun" has no times; write for example mon-fri,sun 22:00-07:00`},
		{"u", "schedules+=n=block;mon 1:00-2:00,sun 3:00-4:00;everything", `"1:00-2:00,sun 3:00-4:00" is more than one span; write DAYS FROM-TO of each and ; between them`},
		{"u", "schedules+=n=block;mon 1:00-2:00;service:tiktok", `"service:tiktok" is none of services:…, categories:… and lists:…, nor everything`},
		{"u", "schedules+=n=block;mon 1:00-2:00;all;UTC", `n cannot have "all" and "UTC" for its time zone`},
		{"u", "deny_networks+=10.0.0.1/8", `"10.0.0.1/8" has bits set beyond its length; the network is 10.0.0.0/8, the address alone 10.0.0.1`},
		{"p", "enabled=true", `there is no user "p"; the policy of that name is policy/p`},
	} {
		if _, err := r.set(c[0], c[1]); err == nil || !strings.Contains(err.Error(), c[2]) {
			t.Errorf("set %s %s: %v, want %s", c[0], c[1], err, c[2])
		}
	}
	if got := show("u"); got != before {
		t.Errorf("refused assignments left %s; before %s", got, before)
	}
	if _, err := r.set("u", "paused_until=+1h", "paused_until=0"); err != nil {
		t.Errorf("ending a pause: %v", err)
	}
	// What changes nothing makes no revision.
	one, err := r.set("u", "enabled=true")
	two, err2 := r.set("u", "enabled=true")
	if err != nil || err2 != nil || one != two || one == 0 {
		t.Errorf("the same setting twice: %d, %d, %v, %v", one, two, err, err2)
	}
}

// picky is a compiler to which a line with "bad" is unusable, and "block-all" not to be had.
func picky(_ string, from io.Reader) (Report, error) {
	var r Report
	text, err := io.ReadAll(from)
	if err != nil {
		return r, err
	}
	n := 0
	for line := range bytes.Lines(text) {
		line = bytes.TrimSpace(line)
		n++
		switch {
		case len(line) == 0 || line[0] == '!':
		case bytes.Contains(line, []byte("block-all")):
			return Report{}, fmt.Errorf("line %d: %s would block the world", n, line)
		case bytes.Contains(line, []byte("bad")):
			r.Skipped++
			r.Complaints = append(r.Complaints, Complaint{Line: n, Text: string(line), What: "this is bad"})
		default:
			r.Rules++
		}
	}
	return r, nil
}

// Of many ids those are named that may have been meant; of few all are.
func TestUnknownIDs(t *testing.T) {
	r := start(t, Options{})
	r.user("u", "")
	for _, c := range []struct{ assign, holds string }{
		{"services+=tiktoc", "most like it: tiktok"},
		{"services+=youtub", "youtube"},
		{"services+=facebok", "facebook"},
		{"services+=qxqxqx", "nor one like it; `sluicectl service list` shows all"},
		{"lists+=oisd", "nor any other"},
	} {
		_, err := r.set("u", c.assign)
		if got := status.Convert(err).Message(); !strings.Contains(got, c.holds) || len(got) > 200 {
			t.Errorf("%s: %q", c.assign, got)
		}
	}
}

func TestRules(t *testing.T) {
	r := start(t, Options{Compile: picky})
	ctx := t.Context()
	r.user("u")
	if err := r.device("u", "d"); err != nil {
		t.Fatal(err)
	}
	get := func(target string) string {
		resp, err := r.policies.GetRules(ctx, &adminv1.GetRulesRequest{Target: target})
		if err != nil {
			t.Fatal(err)
		}
		return string(resp.Text)
	}
	text := "||one.example^\n! remark\nbad line\n||two.example^\n"
	resp, err := r.policies.SetRules(ctx, &adminv1.SetRulesRequest{Target: "u/d", Text: []byte(text)})
	if err != nil || resp.Revision != 0 || len(resp.Complaints) != 1 || resp.Complaints[0].Line != 3 || resp.Complaints[0].What != "this is bad" {
		t.Errorf("bad line: %v, %v", resp, err)
	}
	if got := get("u/d"); got != "" {
		t.Errorf("stored %q", got)
	}
	resp, err = r.policies.SetRules(ctx, &adminv1.SetRulesRequest{Target: "u/d", Text: []byte(text), KeepGood: true})
	if err != nil || resp.Revision == 0 || resp.Rules != 2 {
		t.Errorf("keep good: %v, %v", resp, err)
	}
	if got := get("u/d"); got != "||one.example^\n! remark\n||two.example^\n" {
		t.Errorf("stored %q", got)
	}
	_, err = r.policies.SetRules(ctx, &adminv1.SetRulesRequest{Target: "u", Text: []byte("block-all\n")})
	wantError(t, err, codes.InvalidArgument, "text")
	_, err = r.policies.SetRules(ctx, &adminv1.SetRulesRequest{Target: "u", Text: []byte("\xff\n")})
	wantError(t, err, codes.InvalidArgument, "text")
	_, err = r.policies.SetRules(ctx, &adminv1.SetRulesRequest{Target: "u", Text: make([]byte, maxRules+1)})
	wantError(t, err, codes.InvalidArgument, "text")

	// A long text goes beside the record, and resolvers get it by its hash.
	long := strings.Repeat("||long.example^\n", 5000)
	if _, err := r.policies.SetRules(ctx, &adminv1.SetRulesRequest{Target: "u", Text: []byte(long)}); err != nil {
		t.Fatal(err)
	}
	if got := get("u"); got != long {
		t.Errorf("a long text came back with %d bytes", len(got))
	}
	u, _ := r.users.GetUser(ctx, &adminv1.GetUserRequest{Id: "u"})
	stream, err := r.sync.Blob(ctx, &syncv1.BlobRequest{Sha256: u.GetUser().GetRules().GetSha256(), Offset: 16})
	if err != nil {
		t.Fatal(err)
	}
	var blob []byte
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		blob = append(blob, m.Data...)
	}
	if string(blob) != long[16:] {
		t.Errorf("blob of %d bytes", len(blob))
	}
	if _, err := r.policies.SetRules(ctx, &adminv1.SetRulesRequest{Target: "u"}); err != nil || get("u") != "" {
		t.Errorf("emptying: %v, %q", err, get("u"))
	}
}

func TestProposeDevice(t *testing.T) {
	r := start(t, Options{})
	ctx := t.Context()
	r.user("shy")
	if _, err := r.users.CreateUser(ctx, &adminv1.CreateUserRequest{Id: "open", AutoDevices: true}); err != nil {
		t.Fatal(err)
	}
	got, err := r.sync.ProposeDevice(ctx, &syncv1.ProposeDeviceRequest{User: "open", Device: "open-phone"})
	if err != nil || !got.Created || got.Revision == 0 {
		t.Errorf("proposed: %v, %v", got, err)
	}
	again, err := r.sync.ProposeDevice(ctx, &syncv1.ProposeDeviceRequest{User: "open", Device: "open-phone"})
	if err != nil || again.Created || again.Revision != got.Revision {
		t.Errorf("proposed again: %v, %v", again, err)
	}
	_, err = r.sync.ProposeDevice(ctx, &syncv1.ProposeDeviceRequest{User: "shy", Device: "shy-phone"})
	wantError(t, err, codes.FailedPrecondition, "")
	_, err = r.sync.ProposeDevice(ctx, &syncv1.ProposeDeviceRequest{User: "open", Device: "shy-phone"})
	wantError(t, err, codes.InvalidArgument, "device")
	_, err = r.sync.ProposeDevice(ctx, &syncv1.ProposeDeviceRequest{User: "nobody", Device: "nobody-x"})
	wantError(t, err, codes.NotFound, "")

	if _, err := r.policies.SetSettings(ctx, &adminv1.SetSettingsRequest{Target: "open", Assignments: []*adminv1.Assignment{
		{Key: "max_devices", Operation: adminv1.Operation_OPERATION_SET, Value: "2"}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.sync.ProposeDevice(ctx, &syncv1.ProposeDeviceRequest{User: "open", Device: "open-tv"}); err != nil {
		t.Error(err)
	}
	_, err = r.sync.ProposeDevice(ctx, &syncv1.ProposeDeviceRequest{User: "open", Device: "open-fridge"})
	wantError(t, err, codes.FailedPrecondition, "")
	u, err := r.users.GetUser(ctx, &adminv1.GetUserRequest{Id: "open"})
	if err != nil || len(u.GetUser().GetDevices()) != 2 || !u.GetUser().GetDevices()[1].GetAutomatic() {
		t.Errorf("the user has %v, %v", u.GetUser().GetDevices(), err)
	}
}

// Whoever knows a user's id can have devices proposed: so many at once, then one each so long, whatever max_devices
// is; the rest is counted. Nobody else notices.
func TestProposalQuota(t *testing.T) {
	var log bytes.Buffer
	r := start(t, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	ctx := t.Context()
	for _, id := range []string{"open", "calm"} {
		if _, err := r.users.CreateUser(ctx, &adminv1.CreateUserRequest{Id: id, AutoDevices: true}); err != nil {
			t.Fatal(err)
		}
	}
	propose := func(user string, n int) error {
		_, err := r.sync.ProposeDevice(ctx, &syncv1.ProposeDeviceRequest{User: user, Device: fmt.Sprintf("%s-%d", user, n)})
		return err
	}
	for i := range proposalsAtOnce {
		if err := propose("open", i); err != nil {
			t.Fatal(i, err)
		}
	}
	head := r.svc.Head(Users)
	for i := range 50 {
		err := propose("open", 1000+i)
		wantError(t, err, codes.ResourceExhausted, "")
		if !strings.Contains(err.Error(), "32 are possible at once and one more each 5m") {
			t.Error(err)
		}
	}
	if err := propose("open", 3); err != nil { // it is there
		t.Error(err)
	}
	wantError(t, propose("nobody", 1), codes.NotFound, "")
	if got := r.svc.Head(Users); got != head {
		t.Error("there were commits for what was refused")
	}
	if err := propose("calm", 1); err != nil {
		t.Error(err)
	}
	want := map[string]uint64{"made": proposalsAtOnce + 1, "there": 1, "refused": 1, "quota": 50}
	if got := r.svc.Proposals(); !maps.Equal(got, want) {
		t.Errorf("counted %v, want %v", got, want)
	}
	if n := strings.Count(log.String(), "resolvers propose more"); n != 1 {
		t.Errorf("said %d times: %s", n, log.String())
	}
}

func TestProposalQuotaInTime(t *testing.T) {
	p := proposals{users: map[string]*proposalQuota{}}
	now := clock.Elapsed()
	many := func(user string, n int) (taken int) {
		for range n {
			if wait, _ := p.take(user, now); wait == 0 {
				taken++
			} else if wait < 0 || wait > proposalEvery {
				t.Errorf("to wait %v", wait)
			}
		}
		return taken
	}
	for _, c := range []struct {
		after time.Duration
		want  int
	}{{0, proposalsAtOnce}, {proposalEvery - 1, 0}, {1, 1}, {proposalEvery/2 + 5*proposalEvery, 5}, {proposalEvery / 2, 1}, {1000 * proposalEvery, proposalsAtOnce}} {
		now = now.Add(c.after)
		if got := many("a", 100); got != c.want {
			t.Errorf("after %v more: %d, want %d", c.after, got, c.want)
		}
	}
	// So many users, and no more until one's quota is whole again.
	for i := range proposingUsers - 1 {
		many(fmt.Sprint(i), 1)
	}
	if got := many("late", 1); got != 0 || len(p.users) != proposingUsers {
		t.Errorf("%d taken, %d users", got, len(p.users))
	}
	now = now.Add(proposalEvery)
	if got := many("late", 1); got != 1 || len(p.users) != 2 {
		t.Errorf("%d taken, %d users", got, len(p.users))
	}
}

// Password hashes that came whole are held to what resolvers verify.
func TestImportedPasswordHashes(t *testing.T) {
	const good = "$argon2id$v=19$m=65536,t=2,p=1$c29tZXNhbHQ$CTFhFdXPJO1aFaMaO6Mm5c8y7cJHAph8ArZWb2GRPPc"
	for _, c := range []struct {
		hashes []string
		ok     bool
	}{
		{[]string{good}, true}, {[]string{good, good, good, good}, true}, {[]string{good, good, good, good, good}, false},
		{[]string{strings.Replace(good, "m=65536", "m=1048576", 1)}, false}, {[]string{strings.Replace(good, "t=2", "t=1000", 1)}, false}, {[]string{"secret"}, false},
	} {
		dev := &userv1.Device{Id: "d", PasswordHashes: c.hashes}
		if err := checkDevice("device", dev); (err == nil) != c.ok {
			t.Errorf("%v: %v", c.hashes, err)
		}
	}
}

// TestUnknownFieldsSurvive edits a record that a newer program wrote.
func TestUnknownFieldsSurvive(t *testing.T) {
	r := start(t, Options{})
	r.user("u")
	newer := []byte{0xfa, 0x3f, 3, 'n', 'e', 'w'} // field 1023
	_, err := r.svc.change(t.Context(), func(v *view) error {
		_, b, _, err := v.get(Users, "u")
		v.stage(Users, "u", append(bytes.Clone(b), newer...))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.set("u", "enabled=false"); err != nil {
		t.Fatal(err)
	}
	p := newReplica(t, Users)
	p.repair(r, nil)
	if !bytes.Contains(p.records["u"].Bytes, newer) {
		t.Errorf("record %x lost %x", p.records["u"].Bytes, newer)
	}
}

// FuzzAssign gives assignments of any text to a user: what is taken must be a record that an import would
// take too.
func FuzzAssign(f *testing.F) {
	for _, s := range []string{"lists+=oisd", "mode=nxdomain", "block_ttl=10s", "schedules+=n=block;mon-fri 22:00-07:00;everything;UTC",
		"rewrites+=a.example=A 192.0.2.1;AAAA 2001:db8::1", "unblocks+=*.a.example@+1h", "services=-", "allow_networks+=192.0.2.0/24", "own_lists+=x=00"} {
		f.Add(s, "lists-=oisd")
	}
	svc, err := Open(Options{Dir: f.TempDir(), noSync: true})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { svc.Close() })
	f.Fuzz(func(t *testing.T, one, two string) {
		err := svc.db.View(func(tx *bolt.Tx) error {
			v := &view{b: &batch{dir: svc.opts.Dir}, tx: tx, now: time.Unix(1_900_000_000, 0)}
			u := new(userv1.User)
			o := &owner{target: target{user: "u"}, settings: &u.Settings, rules: &u.Rules, user: u}
			for _, s := range []string{one, two} {
				if err := v.assign(o, assignment(s)); err != nil {
					if status.Code(err) == codes.Unknown {
						t.Errorf("%q: %v has no code", s, err)
					}
					return nil
				}
			}
			b, err := encode(u)
			if err != nil {
				return nil // text that is not UTF-8 is refused when it is put
			}
			if err := v.checkSettings("settings", u.Settings); err != nil {
				t.Errorf("%q, %q: assigned, but %v", one, two, err)
			}
			if again, err := encode(u); err != nil || !bytes.Equal(b, again) {
				t.Errorf("%q, %q: not canonical: %v", one, two, u.Settings)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}
