package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"github.com/sluice-dns/sluice/cmd/internal/bizlogic"
)

// startBizlogic is the real service on a store of its own. Lines with "bad" are no rules.
func startBizlogic(t *testing.T) *shell {
	t.Helper()
	svc, err := bizlogic.Open(bizlogic.Options{Dir: t.TempDir(), Compile: func(_ string, from io.Reader) (r bizlogic.Report, err error) {
		text, err := io.ReadAll(from)
		n := 0
		for line := range bytes.Lines(text) {
			n++
			switch line = bytes.TrimSpace(line); {
			case len(line) == 0 || line[0] == '!':
			case bytes.Contains(line, []byte("bad")):
				r.Skipped++
				r.Complaints = append(r.Complaints, bizlogic.Complaint{Line: n, Text: string(line), What: "it is bad"})
			default:
				r.Rules++
			}
		}
		return r, err
	}})
	if err != nil {
		t.Fatal(err)
	}
	addr := serve(t, func(g *grpc.Server) { svc.Register(g) }, svc.ServerOptions()...)
	t.Cleanup(func() {
		if err := svc.Close(); err != nil {
			t.Error(err)
		}
	})
	return &shell{t: t, env: map[string]string{"SLUICE_SERVICE": addr}}
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// revisions are never the same; times neither.
var volatile = regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`)

// What is stored and has no effect for now is said, to programs in the object.
func TestSettingsWithoutEffect(t *testing.T) {
	sh := startBizlogic(t)
	sh.ok("user", "create", "ann")
	for _, c := range []struct{ assignments, out, errs string }{
		{"categories+=malware", `{"revision":`, "warning: category malware holds no list"},
		{"mode=custom_ip -o json", `"warnings":["mode is custom_ip, and neither `, ""},
		{"mode= categories=", `{"revision":`, ""},
	} {
		code, out, errs := sh.run(append([]string{"policy", "set", "ann"}, strings.Fields(c.assignments)...)...)
		if code != 0 || !strings.Contains(out, c.out) || !strings.Contains(errs, c.errs) || (errs == "") != (c.errs == "") {
			t.Errorf("%s: exit %d, %q, %q", c.assignments, code, out, errs)
		}
	}
}

func TestService(t *testing.T) {
	sh := startBizlogic(t)
	revision := func(out string) (n uint64) {
		t.Helper()
		lines := strings.Split(strings.TrimSpace(out), "\n")
		var r struct{ Revision uint64 }
		if err := json.Unmarshal([]byte(lines[len(lines)-1]), &r); err != nil || r.Revision == 0 {
			t.Fatalf("no revision in %q", out)
		}
		return r.Revision
	}
	list := write(t, "! ads\n||ads.example^\nbad line \x1b[31m\n||more.example^\n")
	first := revision(sh.ok("policy", "create", "family", "--name", "For families"))
	code, out, errs := sh.run("list", "add", "oisd", "--file", list, "--name", "OISD")
	if code != 0 || revision(out) <= first || !strings.Contains(out, "OISD  2      1") || !strings.Contains(errs, list+":3: it is bad") {
		t.Errorf("list add: exit %d\n%s%s", code, out, errs)
	}
	if strings.Contains(errs, "\x1b") {
		t.Errorf("control characters reach the terminal: %q", errs)
	}
	sh.fails(exitFailed, "exists already", "list", "add", "oisd", "--file", list)
	sh.fails(exitFailed, `"code":"ALREADY_EXISTS"`, "list", "add", "oisd", "--file", list, "-o", "json")

	sh.ok("user", "create", "ann", "--policy", "family", "--name", "Ann")
	sh.fails(exitFailed, `"code":"ALREADY_EXISTS"`, "user", "create", "ann", "-o", "json")
	sh.fails(exitFailed, `"field":"policy"`, "user", "create", "bob", "--policy", "none", "-o", "json")
	sh.fails(exitFailed, `"code":"NOT_FOUND"`, "user", "get", "bob", "-o", "json")
	password := write(t, "correct horse\n")
	at := revision(sh.ok("device", "create", "ann", "phone", "--link", "192.0.2.7", "--link", "2001:db8::/64", "--dedicated", "198.51.100.1", "--password-file", password, "--doh-only"))
	sh.fails(exitFailed, "exists already", "device", "create", "ann", "phone")

	// Settings: as in the interface, all or nothing, with help for slips of the pen.
	sh.ok("policy", "set", "policy/family", "lists+=oisd", "mode=nxdomain", "block_ttl=10s", "services+=tiktok", "safe_search+=google", "enabled=false")
	sh.ok("policy", "set", "ann", "enabled=true", "rewrites+=nas.home.arpa=A 192.0.2.7", "schedules+=night=block;mon-fri 22:00-07:00;services:tiktok,twitter;Europe/Nicosia")
	sh.ok("policy", "set", "ann/phone", "lists-=oisd", "log=no_client")
	sh.fails(exitFailed, "did you mean mode instead of mdoe?", "policy", "set", "ann", "block_ttl=20s", "mdoe=nxdomain")
	sh.fails(exitFailed, `"field":"mode"`, "policy", "set", "ann", "mode=nosuch", "-o", "json")
	sh.fails(exitFailed, `"code":"ABORTED"`, "policy", "set", "ann", "mode=refused", "--if-revision", fmt.Sprint(at), "-o", "json")
	if out := sh.ok("user", "get", "ann"); strings.Contains(out, "block_ttl") {
		t.Errorf("a refused change was made in part:\n%s", out)
	}

	golden(t, "user-get", mask(sh.ok("user", "get", "ann")))
	golden(t, "user-list", mask(sh.ok("user", "list")))
	golden(t, "device-list", mask(sh.ok("device", "list", "ann")))
	golden(t, "device-get", mask(sh.ok("device", "get", "phone")))
	if short, long := sh.ok("device", "get", "phone"), sh.ok("device", "get", "ann/phone"); short != long {
		t.Errorf("by its user too:\n%s", long)
	}
	sh.fails(exitFailed, "and not \"nobody\"'s", "device", "get", "nobody/phone")
	sh.fails(exitFailed, "and not \"nobody\"'s", "device", "set", "nobody/phone", "--name", "x")
	sh.fails(exitFailed, "and not \"nobody\"'s", "device", "delete", "nobody/phone")
	sh.fails(exitFailed, "shown by `sluicectl user get ann`", "policy", "get", "ann/phone")
	sh.fails(exitUsage, "received 0; write: sluicectl list add ID --file FILE | --url URL; see", "list", "add")
	golden(t, "policy-get", mask(sh.ok("policy", "get", "family")))
	golden(t, "policy-list", mask(sh.ok("policy", "list")))
	golden(t, "list-list", mask(sh.ok("list", "list")))
	golden(t, "list-get", mask(sh.ok("list", "get", "oisd")))

	// What `user get` shows can be set again, and changes nothing.
	before := settingsOf(t, sh, "ann")
	set := []string{"policy", "set", "ann"}
	for line := range strings.Lines(sh.ok("user", "get", "ann")) {
		if s, ok := strings.CutPrefix(line, "setting"); ok {
			set = append(set, strings.TrimSpace(s))
		}
	}
	if len(set) != 3+3 {
		t.Errorf("settings: %q", set[3:])
	}
	sh.ok("policy", "set", "ann", "enabled=", "rewrites=", "schedules=")
	sh.ok(set...)
	if after := settingsOf(t, sh, "ann"); after != before {
		t.Errorf("%s\nbecame\n%s", before, after)
	}

	// Devices move and lose what they had.
	sh.ok("user", "create", "bob")
	sh.ok("device", "set", "phone", "--user", "bob", "--link", "", "--doh-only=false", "--no-password", "--name", "Bob's")
	var dev struct {
		User   string
		Device struct {
			Name           string
			Links          []string
			Dedicated      []string
			PasswordHashes []string `json:"password_hashes"`
			DohOnly        bool     `json:"doh_only"`
		}
	}
	if err := json.Unmarshal([]byte(sh.ok("device", "get", "phone", "-o", "json")), &dev); err != nil || dev.User != "bob" || dev.Device.Name != "Bob's" ||
		len(dev.Device.Links)+len(dev.Device.PasswordHashes) != 0 || dev.Device.DohOnly || len(dev.Device.Dedicated) != 1 {
		t.Errorf("%+v, %v", dev, err)
	}
	sh.ok("device", "delete", "phone")

	// Rules: unusable lines are named, and nothing is stored unless asked for.
	rules := write(t, "||one.example^\nbad one\n\nbad two\n")
	code, out, errs = sh.run("rules", "set", "ann", "-f", rules)
	if code != exitFailed || out != "" || !strings.Contains(errs, rules+":2: it is bad: bad one\n"+rules+":4: it is bad: bad two\n") {
		t.Errorf("rules set: exit %d, %s, %s", code, out, errs)
	}
	if out := sh.ok("rules", "get", "ann"); out != "" {
		t.Errorf("stored %q", out)
	}
	code, _, errs = sh.run("rules", "set", "ann", "-f", rules, "-o", "json")
	if lines := strings.Split(strings.TrimSpace(errs), "\n"); code != exitFailed || len(lines) != 3 || !strings.HasPrefix(lines[0], `{"code":"INVALID_ARGUMENT","message":"`+rules+`:2: it is bad"`) {
		t.Errorf("exit %d: %s", code, errs)
	}
	sh.ok("rules", "set", "ann", "-f", rules, "--keep-good")
	if out := sh.ok("rules", "get", "ann"); out != "||one.example^\n\n" {
		t.Errorf("stored %q", out)
	}
	sh.stdin = "@@||two.example^\n"
	sh.ok("rules", "set", "policy/family", "-f", "-")
	if out := sh.ok("rules", "get", "policy/family"); out != sh.stdin {
		t.Errorf("stored %q", out)
	}

	// An export is what an import takes.
	file := filepath.Join(t.TempDir(), "all.jsonl")
	sh.ok("export", "-f", file)
	text, err := os.ReadFile(file)
	if err != nil || strings.Count(string(text), "\n") != 4 {
		t.Fatalf("%s, %v", text, err)
	}
	before = settingsOf(t, sh, "ann")
	sh.ok("user", "delete", "ann")
	revision(sh.ok("import", "-f", file))
	if after := settingsOf(t, sh, "ann"); after != before {
		t.Errorf("%s\nbecame\n%s", before, after)
	}
	if out := sh.ok("export", "-f", "-", "--only", "policy"); strings.Count(out, "\n") != 1 || !strings.HasPrefix(out, `{"policy":`) {
		t.Errorf("export = %q", out)
	}
	sh.stdin = "{\"user\":{\"id\":\"ok\"}}\n\n{\"user\":{\"id\":\"Not Ok\"}}\n"
	sh.fails(exitFailed, "standard input:3: ", "import", "-f", "-")
	sh.fails(exitFailed, `"field":"line 3"`, "import", "-f", "-", "-o", "json")

	// Pages, and limits across them.
	var many strings.Builder
	for i := range 1200 {
		fmt.Fprintf(&many, "{\"user\":{\"id\":\"many-%04d\"}}\n", i)
	}
	sh.stdin = many.String()
	sh.ok("import", "-f", "-")
	for limit, want := range map[string]int{"0": 1200, "1100": 1100, "7": 7} {
		out := sh.ok("user", "list", "--filter", "many-", "--limit", limit, "-o", "json")
		if n := strings.Count(out, "\n"); n != want {
			t.Errorf("--limit %s gives %d", limit, n)
		}
	}

	token := sh.ok("token", "create", "--role", "reader", "--note", "for a test")
	sh.env["SLUICE_TOKEN_FILE"] = write(t, token)
	sh.ok("user", "get", "ann")
	sh.fails(exitFailed, `"code":"PERMISSION_DENIED"`, "user", "delete", "ann", "-o", "json")
	delete(sh.env, "SLUICE_TOKEN_FILE")
	if out := sh.ok("token", "list"); !strings.Contains(out, "reader") || strings.Contains(out, strings.TrimSpace(token)) {
		t.Errorf("tokens:\n%s", out)
	}
	id, _, _ := strings.Cut(token, ".")
	sh.ok("token", "revoke", id)

	if out := sh.ok("sync", "status", "--fleet"); !strings.Contains(out, "serving") || !strings.Contains(out, "catalogue") {
		t.Errorf("sync status:\n%s", out)
	}
	// Completion asks the service.
	if out := sh.ok("__complete", "policy", "set", "policy/"); !strings.Contains(out, "policy/family\n") {
		t.Errorf("completion: %s", out)
	}
	if out := sh.ok("__complete", "policy", "set", "ann", "mode="); !strings.Contains(out, "mode=nxdomain\n") || strings.Contains(out, "enabled") {
		t.Errorf("completion: %s", out)
	}
	if out := sh.ok("__complete", "user", "create", "x", "--policy", "f"); !strings.Contains(out, "family\n") {
		t.Errorf("completion: %s", out)
	}
}

func settingsOf(t *testing.T, sh *shell, user string) string {
	t.Helper()
	var u struct{ Settings json.RawMessage }
	if err := json.Unmarshal([]byte(sh.ok("user", "get", user, "-o", "json")), &u); err != nil {
		t.Fatal(err)
	}
	return string(u.Settings)
}

func mask(s string) string { return volatile.ReplaceAllString(s, "(time)") }

// What policies name besides lists can be looked at, changed, made, removed and put back.
func TestEntries(t *testing.T) {
	sh := startBizlogic(t)
	list := write(t, "||casino.example^\n")
	sh.ok("list", "add", "casinos", "--file", list)
	sh.ok("category", "set", "gambling", "lists+=casinos")
	if out := sh.ok("category", "list"); !strings.Contains(out, "casinos  built in") {
		t.Errorf("a category that was filled:\n%s", out)
	}
	sh.ok("service", "set", "chess", "name=Chess", "group=gaming", "rules+=||chess.example^", "rules+=||chess.example.net^$dnstype=A|AAAA,important")
	if out := sh.ok("service", "get", "chess"); !strings.Contains(out, "$dnstype=A|AAAA,important") || !strings.Contains(out, "own") {
		t.Errorf("a service that was made:\n%s", out)
	}
	sh.fails(exitFailed, `"field":"rules"`, "service", "set", "chess", "rules+=bad", "-o", "json")
	sh.fails(exitFailed, "there are group, name, rules", "service", "set", "chess", "lists=casinos")
	sh.fails(exitFailed, `no list "none"`, "category", "set", "gambling", "lists+=none")
	sh.fails(exitFailed, "in use by category", "list", "delete", "casinos")
	sh.ok("user", "create", "ann")
	sh.ok("policy", "set", "ann", "services+=chess", "categories+=newly-registered")
	sh.fails(exitFailed, "in use, by user", "service", "delete", "chess")
	sh.fails(exitFailed, "in use, by user", "category", "delete", "newly-registered")
	sh.ok("policy", "set", "ann", "services-=chess")
	sh.ok("service", "delete", "chess")
	sh.ok("service", "set", "tiktok", "rules-=||tiktok.com^", "name=The clock")
	if out := sh.ok("service", "get", "tiktok"); strings.Contains(out, "rule  ||tiktok.com^") || !strings.Contains(out, "changed") {
		t.Errorf("a service that was changed:\n%s", out)
	}
	sh.ok("service", "reset", "tiktok")
	if out := sh.ok("service", "get", "tiktok"); !strings.Contains(out, "||tiktok.com^") || !strings.Contains(out, "built in") {
		t.Errorf("a service that was reset:\n%s", out)
	}
	sh.fails(exitFailed, `"code":"NOT_FOUND"`, "service", "reset", "chess", "-o", "json")
	sh.ok("safesearch", "set", "find", "name=Find", "rewrites+=find.example=CNAME safe.find.example")
	if out := sh.ok("safesearch", "get", "find"); !strings.Contains(out, "find.example=CNAME safe.find.example") {
		t.Errorf("an engine that was made:\n%s", out)
	}
	for _, id := range []string{"google", "bing", "duckduckgo", "yandex", "ecosia", "pixabay", "youtube", "youtube-moderate"} {
		sh.ok("safesearch", "get", id)
	}
}
