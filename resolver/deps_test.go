package resolver_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/sluice-dns/sluice/"

// allowed is the import graph of the project, tests left out: what each package may import of it. An edge more
// is a line here, to be discussed. Arrows point from the path of a query towards words: no stage imports
// another, none imports pipeline, and only resolver knows limits, metrics and all stages.
//
// A name stands for resolver/internal/NAME; one with a slash in front is relative to the module.
var allowed = map[string][]string{
	"/cmd/sluice":             {"/cmd/internal/config", "/cmd/internal/demo", "/cmd/internal/node", "/resolver", "/usercache"},
	"/cmd/sluice-bizd":        {"/cmd/internal/bizlogic", "/cmd/internal/config", "/proto/admin/v1", "/resolver/clock"},
	"/cmd/sluicectl":          {"/proto/admin/v1", "/proto/user/v1"},
	"/cmd/internal/bizlogic":  {"/proto/admin/v1", "/proto/store/v1", "/proto/sync/v1", "/proto/user/v1", "/resolver", "/resolver/clock", "/usercache", "/usercache/pagewalk", "/usercache/password"},
	"/cmd/internal/config":    nil,
	"/cmd/internal/demo":      {"/cmd/internal/bizlogic", "/cmd/internal/config", "/cmd/internal/node", "/proto/admin/v1", "/proto/user/v1", "/resolver", "/resolver/clock", "/resolver/siminternet", "/usercache"},
	"/cmd/internal/node":      {"/cmd/internal/bizlogic", "/cmd/internal/config", "/proto/admin/v1", "/resolver", "/resolver/clock", "/syncclient", "/usercache"},
	"/proto":                  nil,
	"/proto/admin/v1":         {"/proto/user/v1"},
	"/proto/store/v1":         {"/proto/user/v1"},
	"/proto/sync/v1":          nil,
	"/proto/user/v1":          nil,
	"/syncclient":             {"/proto/sync/v1", "/resolver/clock", "/usercache"},
	"/syncclient/conformance": {"/proto/sync/v1", "/syncclient", "/usercache"},
	"/usercache": {"/proto/store/v1", "/proto/user/v1", "/resolver/clock", "/usercache/internal/offheap", "/usercache/pagewalk",
		"/usercache/internal/store"},
	"/usercache/password":         nil,
	"/usercache/internal/offheap": nil,
	"/usercache/pagewalk":         nil,
	"/usercache/internal/store":   {"/usercache/internal/offheap"},

	"/resolver": {"/resolver/clock", "/usercache", "admin", "answercache", "cookie", "denialcache", "dns64", "dnsname", "dnswire", "ecs", "exchange", "filter", "filter/rulelist", "forward", "forward/upstream", "identify", "iterator",
		"limits", "listen", "listen/doh", "listen/dot", "listen/tcp", "listen/udp", "localdata", "localroot", "metrics", "overload", "pipeline", "policy", "query",
		"query/settled", "rebinding", "render", "replace", "rpz", "rrcache", "selection", "validator", "validator/trustanchor"},
	"/resolver/clock":       nil,
	"/resolver/siminternet": {"/resolver/clock", "simnet"},
	"/internal/fulldisk":    nil, // for tests alone

	"arena":           nil,
	"crew":            nil,
	"replace":         nil,
	"dnsname":         nil,
	"dnswire":         {"dnsname"},
	"query":           {"/resolver/clock", "/usercache", "dnsname", "dnswire"},
	"query/settled":   {"/resolver/clock", "dnsname", "dnswire", "query"},
	"limits":          {"/resolver/clock"},
	"selection":       {"/resolver/clock", "dnsname"},
	"rrcache":         {"/resolver/clock", "arena", "dnsname", "dnswire", "query"},
	"filter":          {"dnsname", "filter/rulelist", "replace"},
	"filter/rulelist": {"dnsname"},
	"simnet":          {"/resolver/clock"},

	"listen":      {"dnswire", "query"},
	"listen/udp":  {"/resolver/clock", "listen", "query"},
	"listen/tcp":  {"/resolver/clock", "listen", "query"},
	"listen/dot":  {"listen", "listen/tcp", "query"},
	"listen/doh":  {"/resolver/clock", "dnswire", "listen", "query"},
	"overload":    {"/resolver/clock", "/usercache", "query"},
	"identify":    {"/resolver/clock", "/usercache", "/usercache/password", "dnswire", "query"},
	"policy":      {"/resolver/clock", "/usercache", "dnsname", "dnswire", "filter", "query", "replace"},
	"localdata":   {"/resolver/clock", "dnsname", "dnswire", "query", "query/settled"},
	"answercache": {"/resolver/clock", "arena", "dnsname", "query", "query/settled"},
	"iterator":    {"/resolver/clock", "crew", "denialcache", "dnsname", "dnswire", "query", "rrcache", "selection"},
	"exchange":    {"/resolver/clock", "dnswire", "query"},

	"forward":          {"/resolver/clock", "dnsname", "dnswire", "forward/shadow", "forward/upstream", "query", "selection"},
	"forward/shadow":   {"/resolver/clock", "forward/upstream", "query"},
	"forward/upstream": {"/resolver/clock", "dnswire", "query"},

	"validator": {"/resolver/clock", "dnsname", "dnswire", "query", "query/settled", "rrcache", "validator/denial", "validator/rrsig"},
	"render":    {"/resolver/clock", "dns64", "dnsname", "dnswire", "query", "rebinding"},
	"localroot": {"/resolver/clock", "dnsname", "dnswire", "query"},
	"cookie":    {"query"},
	"dns64":     {"dnsname", "dnswire", "query"},
	"ecs":       {"dnsname", "dnswire", "query", "/usercache"},
	"rpz":       {"dnsname", "dnswire", "query"},
	"rebinding": {"dnsname", "dnswire", "query"},
	"pipeline":  {"/resolver/clock", "crew", "dnsname", "dnswire", "query", "query/settled"},
	"admin": {"/proto/admin/v1", "/proto/user/v1", "/resolver/clock", "/usercache", "answercache", "dnsname", "dnswire", "filter/rulelist", "limits", "overload", "pipeline", "policy", "query",
		"query/settled", "rpz", "rrcache"},
	"metrics": {"query"},

	"denialcache":      {"/resolver/clock", "dnsname", "dnswire", "query", "validator/denial"},
	"validator/denial": {"dnsname", "dnswire", "query", "validator/rrsig"},
	"validator/rrsig":  {"dnsname", "dnswire", "query"},

	"validator/trustanchor": {"/resolver/clock", "dnsname", "dnswire", "query", "validator/rrsig", "replace"},
}

// importOf turns a name of the table into a path below the module.
func importOf(name string) string {
	if rest, ok := strings.CutPrefix(name, "/"); ok {
		return rest
	}
	return "resolver/internal/" + name
}

// sources parses every Go file of the module that is not a test, by package folder.
func sources(t *testing.T) (*token.FileSet, map[string][]*ast.File) {
	t.Helper()
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	fset := token.NewFileSet()
	pkgs := map[string][]*ast.File{}
	err = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		// Packages named …test and fakes hold what several packages' tests share; like tests they import what they test.
		if d.IsDir() && (strings.HasSuffix(d.Name(), "test") || d.Name() == "fakesync" || strings.HasPrefix(d.Name(), ".") && p != root || d.Name() == "testdata") {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(p, ".go") || strings.HasSuffix(p, "_test.go") {
			return nil
		}
		src, err := os.ReadFile(p) // opened here, so that the test cache knows that the result depends on it
		if err != nil {
			return err
		}
		f, err := parser.ParseFile(fset, p, src, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, filepath.Dir(p))
		if err != nil {
			return err
		}
		pkgs[filepath.ToSlash(rel)] = append(pkgs[filepath.ToSlash(rel)], f)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return fset, pkgs
}

func TestImportGraph(t *testing.T) {
	table := map[string][]string{}
	for name, to := range allowed {
		var paths []string
		for _, n := range to {
			paths = append(paths, importOf(n))
		}
		table[importOf(name)] = paths
	}
	fset, pkgs := sources(t)
	used := map[string]map[string]bool{}
	for dir, files := range pkgs {
		may, known := table[dir]
		if !known {
			t.Errorf("package %s is not in the table", dir)
			continue
		}
		used[dir] = map[string]bool{}
		for _, f := range files {
			for _, im := range f.Imports {
				p, err := strconv.Unquote(im.Path.Value)
				if err != nil {
					t.Fatal(err)
				}
				rest, ours := strings.CutPrefix(p, module)
				if !ours {
					continue
				}
				used[dir][rest] = true
				if !slices.Contains(may, rest) {
					t.Errorf("%s: %s may not import %s", fset.Position(im.Pos()), dir, rest)
				}
			}
		}
	}
	for dir, may := range table {
		if pkgs[dir] == nil {
			t.Errorf("the table has package %s, which does not exist", dir)
			continue
		}
		for _, m := range may {
			if !used[dir][m] {
				t.Errorf("%s may import %s and does not: take the edge out of the table", dir, m)
			}
		}
	}
}

// TestOnlyClockReadsTime: nothing but package clock calls time.Now, time.Since or time.Until, except where a
// deadline of package net, which knows no other clock, is made of it.
func TestOnlyClockReadsTime(t *testing.T) {
	fset, pkgs := sources(t)
	for dir, files := range pkgs {
		if dir == "resolver/clock" || dir == "resolver/internal/simnet" { // simnet keeps net's deadlines itself
			continue
		}
		for _, f := range files {
			ast.Inspect(f, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				if sel, ok := call.Fun.(*ast.SelectorExpr); ok && strings.HasSuffix(sel.Sel.Name, "Deadline") {
					return false // its argument may be time.Now().Add(…)
				}
				sel, ok := call.Fun.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				if x, ok := sel.X.(*ast.Ident); ok && x.Name == "time" && (sel.Sel.Name == "Now" || sel.Sel.Name == "Since" || sel.Sel.Name == "Until") {
					t.Errorf("%s: %s calls time.%s; use resolver/clock", fset.Position(n.Pos()), dir, sel.Sel.Name)
				}
				return true
			})
		}
	}
}

// TestWhoSettles pins who may make the sealed form of an answer: what decides on its security status, local
// data, and the caches that load what was settled before.
func TestWhoSettles(t *testing.T) {
	may := map[string][]string{
		"Settle":    {"resolver/internal/validator", "resolver/internal/localdata"},
		"FromCache": {"resolver/internal/answercache"},
		"Load":      {},
	}
	fset, pkgs := sources(t)
	found := map[string]bool{}
	for dir, files := range pkgs {
		for _, f := range files {
			name := ""
			for _, im := range f.Imports {
				if p, _ := strconv.Unquote(im.Path.Value); p == module+"resolver/internal/query/settled" {
					name = path.Base(p)
					if im.Name != nil {
						name = im.Name.Name
					}
				}
			}
			if name == "" {
				continue
			}
			ast.Inspect(f, func(n ast.Node) bool {
				sel, ok := n.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				if x, ok := sel.X.(*ast.Ident); ok && x.Name == name {
					if dirs, pinned := may[sel.Sel.Name]; pinned {
						found[sel.Sel.Name] = true
						if !slices.Contains(dirs, dir) {
							t.Errorf("%s: %s may not call settled.%s", fset.Position(n.Pos()), dir, sel.Sel.Name)
						}
					}
				}
				return true
			})
		}
	}
	if !found["Settle"] || !found["FromCache"] {
		t.Error("nobody settles: this test has lost sight of its subject")
	}
}
