package main

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"github.com/sluice-dns/sluice/cmd/internal/bizlogic"
)

// startEngine is the real service with the engine that resolvers have.
func startEngine(t *testing.T) *shell {
	t.Helper()
	svc, err := bizlogic.Open(bizlogic.Options{Dir: t.TempDir(), Compile: bizlogic.Engine})
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

// A catalogue has 512 lists, and no more.
func TestListTooMany(t *testing.T) {
	sh := startEngine(t)
	list := write(t, "||ads.example^\n")
	var g errgroup.Group
	g.SetLimit(32)
	for i := range 512 {
		g.Go(func() error {
			if code, _, errs := sh.run("list", "add", fmt.Sprintf("list-%d", i), "--file", list); code != 0 {
				return fmt.Errorf("list %d: %s", i, errs)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	sh.fails(exitFailed, "there are 512 of kind list, and no more are possible; delete one that nobody needs first", "list", "add", "one-more", "--file", list)
	sh.ok("list", "add", "list-7", "--replace", "--file", list) // is none more
	sh.ok("list", "delete", "list-300")
	sh.ok("list", "add", "one-more", "--file", list)
	if out := sh.ok("list", "list"); strings.Count(out, "\n") != 513 || !strings.Contains(out, "one-more") {
		t.Errorf("%d lines", strings.Count(out, "\n"))
	}
}

// Lists that are named by others, renamed, alike, or called something odd.
func TestListNames(t *testing.T) {
	sh := startEngine(t)
	list := write(t, "! Title: Its own title\n||ads.example^\n")
	for _, id := range []string{"ads", "same"} {
		sh.ok("list", "add", id, "--file", list)
	}
	field := func(id, name string) string {
		for line := range strings.Lines(sh.ok("list", "get", id)) {
			if f := strings.Fields(line); len(f) > 1 && f[0] == name {
				return strings.Join(f[1:], " ")
			}
		}
		return ""
	}

	// Removing what is named is refused with who names it.
	sh.ok("policy", "create", "family")
	sh.ok("user", "create", "ann")
	sh.ok("device", "create", "ann", "ann-pc")
	for _, use := range [][3]string{
		{"policy/family", "lists+=ads", `list "ads" is in use by policy "family"`},
		{"ann", "lists+=ads", `list "ads" is in use, by user "ann" for one`},
		{"ann/ann-pc", "lists+=ads", `list "ads" is in use, by device "ann/ann-pc" for one`},
		{"ann", "schedules+=night=block;mon-fri 22:00-07:00;lists:ads;UTC", `list "ads" is in use, by user "ann" for one`},
	} {
		sh.ok("policy", "set", use[0], use[1])
		sh.fails(exitFailed, use[2], "list", "delete", "ads")
		key, _, _ := strings.Cut(use[1], "+")
		sh.ok("policy", "set", use[0], key+"=")
	}
	sh.ok("category", "set", "malware", "lists+=ads")
	sh.fails(exitFailed, `list "ads" is in use by category "malware"`, "list", "delete", "ads")
	sh.ok("category", "set", "malware", "lists-=ads")

	// A list that is called something else stays what it is to those who chose it; its id is for ever.
	sh.ok("policy", "set", "ann", "lists+=ads")
	number, sum := field("ads", "number"), field("ads", "sha256")
	if got := field("ads", "name"); got != "Its own title" {
		t.Errorf("called %q", got)
	}
	sh.ok("list", "add", "ads", "--replace", "--file", list, "--name", "Another name")
	if got := field("ads", "name"); got != "Another name" || field("ads", "number") != number || field("ads", "sha256") != sum {
		t.Errorf("renamed: %q\n%s", got, sh.ok("list", "get", "ads"))
	}
	if out := sh.ok("user", "get", "ann"); !strings.Contains(out, "lists+=ads") {
		t.Errorf("the user has\n%s", out)
	}

	// Two lists with one text are two lists.
	if field("same", "sha256") != sum || field("same", "number") == number {
		t.Errorf("alike:\n%s", sh.ok("list", "get", "same"))
	}
	sh.ok("list", "delete", "same")
	if field("ads", "sha256") != sum {
		t.Errorf("the other's removal changed it:\n%s", sh.ok("list", "get", "ads"))
	}

	for id, says := range map[string]string{
		"Ads":                    `"Ads" holds 'A'; an id is 1-63 of a-z 0-9 -`,
		"a b":                    `holds ' '`,
		"../../etc/passwd":       `holds '.'`,
		"a/b":                    `holds '/'`,
		"\x1b[31mred":            `holds`,
		"wärbung":                `holds 'ä'`,
		"a\x00b":                 `holds`,
		"":                       "is empty; an id is 1-63 of a-z 0-9 -",
		strings.Repeat("a", 64):  "has 64 bytes; an id is 1-63 of a-z 0-9 -",
		"https://a.example/l.tx": "holds ':'",
	} {
		sh.fails(exitFailed, says, "list", "add", id, "--file", list)
		if code, out, errs := sh.run("list", "add", id, "--file", list); strings.ContainsAny(out+errs, "\x1b\x00") {
			t.Errorf("%q reaches the terminal: exit %d, %q", id, code, out+errs)
		}
	}
	sh.fails(exitUsage, `the argument "\xff" is not UTF-8`, "list", "add", "\xff", "--file", list)
	sh.ok("list", "add", strings.Repeat("a", 63), "--file", list)
	sh.ok("list", "add", "0-0", "--file", list)
}

// Own rules of a user: 100,000 of them, 10 MB of them, and one of 10,000 alternatives.
func TestRulesTooMany(t *testing.T) {
	sh := startEngine(t)
	sh.ok("user", "create", "ann")
	before := write(t, "||mine.example^\n")
	sh.ok("rules", "set", "ann", "--file", before)
	many := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "%x.de\n", i)
		}
		return write(t, b.String())
	}
	alternatives := func(form string) string {
		var b strings.Builder
		for i := range 10_000 {
			fmt.Fprintf(&b, form, i)
		}
		return write(t, "||fine.example^\n/("+b.String()[1:]+")/\n")
	}
	wide, short := alternatives("|x%09d"), alternatives("|%x")
	sh.fails(exitFailed, "has 100000 rules; at most 20000 are possible, and more of them as a list (own_lists)", "rules", "set", "ann", "--file", many(100_000))
	sh.fails(exitFailed, "1048576", "rules", "set", "ann", "--file", write(t, strings.Repeat("||a.example^\n", 1<<20)))
	sh.fails(exitFailed, wide+":2: longer than 65536 bytes", "rules", "set", "ann", "--file", wide)
	sh.fails(exitFailed, short+":2: a pattern longer than 1024 bytes", "rules", "set", "ann", "--file", short)
	if got := sh.ok("rules", "get", "ann"); got != "||mine.example^\n" {
		t.Errorf("the rules became %.100q", got)
	}
	sh.ok("rules", "set", "ann", "--file", many(20_000))
	sh.ok("rules", "set", "ann", "--keep-good", "--file", wide)
	if got := sh.ok("rules", "get", "ann"); got != "||fine.example^\n" {
		t.Errorf("what is good is %.100q", got)
	}
	// As a list, they may be so many.
	sh.ok("list", "add", "many", "--file", many(100_000))
	code, _, errs := sh.run("list", "add", "wide", "--file", wide)
	if code != 0 || !strings.Contains(errs, wide+":2: ") {
		t.Errorf("exit %d, %q", code, errs)
	}
}
