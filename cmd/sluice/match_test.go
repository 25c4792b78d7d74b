package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-dns/sluice/resolver"
)

const testList = `! Title: some rules
||ads.example^
@@||good.ads.example^
||phone.example^$client=kid-phone
||tagged.example^$ctag=device_tv
||net.example^$client=192.0.2.0/24
0.0.0.0 hosts.example
||nas.example^$dnsrewrite=192.0.2.7
||alias.example^$dnsrewrite=other.example
||gone.example^$dnsrewrite=NXDOMAIN;;
`

func TestMatch(t *testing.T) {
	dir := t.TempDir()
	list, more, page := filepath.Join(dir, "rules.txt"), filepath.Join(dir, "more.txt"), filepath.Join(dir, "page.txt")
	for path, text := range map[string]string{list: testList, more: "||more.example^\n/(/\n", page: "<!DOCTYPE html><html><body>gone</body></html>"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		args   []string
		in     string
		status int
		out    string
		err    string // part of standard error
	}{
		{args: []string{"www.ads.example", "A"}, out: "www.ads.example A: blocked by rules.txt:2: ||ads.example^\n"},
		{args: []string{"www.ads.example"}, out: "www.ads.example A: blocked by rules.txt:2: ||ads.example^\n"},
		{args: []string{"good.ads.example", "aaaa"}, out: "good.ads.example AAAA: allowed by rules.txt:3: @@||good.ads.example^\n"},
		{args: []string{"example.org", "A"}, out: "example.org A: none\n"},
		{args: []string{"nas.example", "A"}, out: "nas.example A: rewritten by rules.txt:8: ||nas.example^$dnsrewrite=192.0.2.7; answered with 192.0.2.7\n"},
		{args: []string{"nas.example", "AAAA"}, out: "nas.example AAAA: rewritten by rules.txt:8: ||nas.example^$dnsrewrite=192.0.2.7; answered with NOERROR and no data\n"},
		{args: []string{"alias.example", "A"}, out: "alias.example A: rewritten by rules.txt:9: ||alias.example^$dnsrewrite=other.example; answered as other.example\n"},
		{args: []string{"hosts.example", "A"}, out: "hosts.example A: blocked by rules.txt:7: 0.0.0.0 hosts.example; the list says 0.0.0.0\n"},
		{args: []string{"--json", "www.ads.example", "A"}, out: `{"name":"www.ads.example","type":"A","verdict":"blocked","rule":"||ads.example^","list":"rules.txt","line":2}` + "\n"},
		{args: []string{"--json", "gone.example", "A"}, out: `{"name":"gone.example","type":"A","verdict":"rewritten","rule":"||gone.example^$dnsrewrite=NXDOMAIN;;","list":"rules.txt","line":10,"rewrite":{"rcode":"NXDOMAIN"}}` + "\n"},
		{args: []string{"--json", "example.org", "TYPE65"}, out: `{"name":"example.org","type":"TYPE65","verdict":"none"}` + "\n"},
		// Who asks.
		{args: []string{"phone.example"}, out: "phone.example A: none\n"},
		{args: []string{"--client", "kid-phone", "phone.example"}, out: "phone.example A: blocked by rules.txt:4: ||phone.example^$client=kid-phone\n"},
		{args: []string{"--tag", "device_pc", "--tag", "device_tv", "tagged.example"}, out: "tagged.example A: blocked by rules.txt:5: ||tagged.example^$ctag=device_tv\n"},
		{args: []string{"--ip", "192.0.2.9", "net.example"}, out: "net.example A: blocked by rules.txt:6: ||net.example^$client=192.0.2.0/24\n"},
		// Several lists, and what is wrong with them.
		{args: []string{"--list", more, "more.example"}, out: "more.example A: blocked by more.txt:1: ||more.example^\n", err: more + ":2: /(/: "},
		{args: []string{"--json", "--list", page, "more.example"}, out: `{"name":"more.example","type":"A","verdict":"none"}` + "\n", err: page + ": not a filter list: "},
		{args: []string{"--list", filepath.Join(dir, "nowhere"), "more.example"}, status: 2, err: "nowhere: no such file"},
		// Standard input; a line that is no question does not lose the others.
		{in: "www.ads.example A\n\n example.org\tAAAA\r\nexample.net", out: "www.ads.example A: blocked by rules.txt:2: ||ads.example^\nexample.org AAAA: none\nexample.net A: none\n"},
		{in: "a..b A\nexample.org A\nexample.org A B\nexample.org NOTYPE\n", status: 2, out: "example.org A: none\n", err: "3 of the lines"},
		{in: "a..b A\n", status: 2, err: "standard input:1: "},
		{in: "example.org A\n" + strings.Repeat("a", maxQuestion+1), status: 2, out: "example.org A: none\n", err: "standard input:2: longer"},
		// Command lines that cannot be used.
		{args: []string{"a..b", "A"}, status: 2, err: "a..b"},
		{args: []string{"example.org", "NOTYPE"}, status: 2, err: "NOTYPE"},
		{args: []string{"--ip", "192.0.2", "example.org"}, status: 2, err: "--ip"},
		{args: []string{"a", "b", "c"}, status: 2, err: "accepts at most 2"},
	} {
		var out, errs strings.Builder
		status := execute(t.Context(), append([]string{"match", "--list", list}, tt.args...), strings.NewReader(tt.in), &out, &errs)
		if status != tt.status || out.String() != tt.out || !strings.Contains(errs.String(), tt.err) || (tt.err == "") != (errs.Len() == 0) {
			t.Errorf("%q, input %.40q: exit status %d, %q, %q\nwant %d, %q, %q", tt.args, tt.in, status, out.String(), errs.String(), tt.status, tt.out, tt.err)
		}
	}
	if status, _, errs := sluice(t, "match", "example.org"); status != 2 || !strings.Contains(errs, `"list" not set`) {
		t.Errorf("without a list: exit status %d, %q", status, errs)
	}
}

// What is no text is refused in one line, and not by a complaint about each of what its lines might be. A list with some
// rubbish in it, or in another encoding than UTF-8, is judged by what is good.
func TestMatchBinary(t *testing.T) {
	dir, r := t.TempDir(), rand.New(rand.NewPCG(7, 7))
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	for i := range 5000 {
		fmt.Fprintf(z, "||n%d.example^\n", r.IntN(1e9)+i)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	random := make([]byte, 1<<20)
	for i := range random {
		random[i] = byte(r.Uint32())
	}
	own, err := os.ReadFile(os.Args[0]) // a program
	if err != nil {
		t.Fatal(err)
	}
	utf16 := []byte("\xff\xfe")
	for _, c := range strings.Repeat("||a.example^\n", 20) {
		utf16 = append(utf16, byte(c), 0)
	}
	path := filepath.Join(dir, "list")
	for what, text := range map[string][]byte{"gzip": packed.Bytes(), "random": random, "a program": own[:min(len(own), 1<<20)], "utf-16": utf16} {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if status, out, errs := sluice(t, "match", "--list", path, "a.example"); status != 2 || out != "" || strings.Count(errs, "\n") != 1 || !strings.Contains(errs, path+" is binary data") {
			t.Errorf("%s: exit status %d, %q, %.300q", what, status, out, errs)
		}
	}
	for _, text := range []string{"||a.example^\n\x00\x01\x02\x7f\n", "<!DOCTYPE html>\n\x00\x00\n||a.example^\n", strings.Repeat("! \xcf\xd2\xc8 \xcc\xc5\xd4, as KOI8-R has them\n", 50) + "||a.example^\n", "\x1b[2Jb.example\n||a.example^\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if status, out, errs := sluice(t, "match", "--list", path, "a.example"); status != 0 || !strings.Contains(out, "blocked by list:") || strings.ContainsAny(errs, "\x00\x1b") {
			t.Errorf("%.40q: exit status %d, %q, %q", text, status, out, errs)
		}
	}
}

// A list has a limit, which is named, whether its length is known or it never ends.
func TestMatchLongList(t *testing.T) {
	long := filepath.Join(t.TempDir(), "long")
	if err := os.WriteFile(long, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(long, maxList+1); err != nil {
		t.Skip(err)
	}
	if status, out, errs := sluice(t, "match", "--list", long, "a.example"); status != 2 || out != "" || !strings.Contains(errs, "longer than 314572800 bytes") {
		t.Errorf("exit status %d, %q, %q", status, out, errs)
	}
	if _, err := compileLists([]string{"/dev/zero"}, 1<<16, io.Discard, true); err == nil || !strings.Contains(err.Error(), "longer than 65536 bytes") {
		t.Error(err)
	}
	if err := os.WriteFile(long, []byte("||a.example^\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for most, ok := range map[int64]bool{12: false, 13: true} {
		if _, err := compileLists([]string{long}, most, io.Discard, true); (err == nil) != ok {
			t.Errorf("13 bytes of at most %d: %v", most, err)
		}
	}
}

var long = flag.Bool("long", false, "judge by all real lists together, too")

// The command's verdicts over real lists, many names at a time on standard input. The table and the lists are not
// part of the project.
func TestMatchRealLists(t *testing.T) {
	root := os.Getenv("SLUICE_SHARED")
	if root == "" {
		root = "../../../shared"
	}
	f, err := os.Open(filepath.Join(root, "data", "tables", "reallists.public.jsonl"))
	if err != nil {
		t.Skip("no test data here: set SLUICE_SHARED to the folder that holds data/tables")
	}
	defer f.Close()
	type verdict struct{ Verdict, Rule string }
	type row struct {
		ID, Set, Name, QType string
		Expect               struct {
			verdict
			RuleAny []string `json:"rule_any"`
		}
		Doc *verdict
	}
	// The big set takes seconds, and package filter holds its engine to it: here the others, unless -long.
	sets := map[string][]string{"adguard": {"adguard_dns_filter.txt"}, "browser": {"easylist.txt", "easyprivacy.txt", "urlhaus_filter_online.txt"},
		"rpz": {"hagezi_tif_normal.rpz", "mullvad_doh_privacy.rpz"}, "rpz-absolute": {"dnsbunker_cti.rpz"}, "dnsmasq": {"blp_scam_dnsmasq.txt"}}
	if *long {
		all, err := filepath.Glob(filepath.Join(root, "data", "lists", "*.gz"))
		if err != nil {
			t.Fatal(err)
		}
		others := slices.Concat(sets["browser"], sets["rpz"], sets["rpz-absolute"], sets["dnsmasq"])
		for _, path := range all {
			if name := strings.TrimSuffix(filepath.Base(path), ".gz"); !slices.Contains(others, name) {
				sets["main"] = append(sets["main"], name)
			}
		}
	}
	rows := map[string][]row{}
	for d := json.NewDecoder(f); ; {
		var r row
		if err := d.Decode(&r); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		rows[r.Set] = append(rows[r.Set], r)
	}
	dir := t.TempDir()
	for set, names := range sets {
		args := []string{"match", "--json"}
		for _, name := range names {
			args = append(args, "--list", unpacked(t, filepath.Join(root, "data", "lists", name+".gz"), filepath.Join(dir, name)))
		}
		var in, out, errs strings.Builder
		for _, r := range rows[set] {
			fmt.Fprintln(&in, r.Name, r.QType)
		}
		if status := execute(t.Context(), args, strings.NewReader(in.String()), &out, &errs); status != 0 {
			t.Fatalf("%s: exit status %d, %s", set, status, errs.String())
		}
		got := json.NewDecoder(strings.NewReader(out.String()))
		for _, r := range rows[set] {
			var g resolver.Judgement
			if err := got.Decode(&g); err != nil {
				t.Fatalf("%s: %v", r.ID, err)
			}
			if r.Doc != nil {
				if g.Verdict != r.Doc.Verdict {
					t.Errorf("%s: %s %s is %s by %q, want %s", r.ID, r.Name, r.QType, g.Verdict, g.Rule, r.Doc.Verdict)
				}
				continue
			}
			if g.Verdict != r.Expect.Verdict || g.Name != r.Name || !slices.Contains(names, g.List) && g.Verdict != "none" {
				t.Errorf("%s: %s %s is %s by %q of %s, want %s", r.ID, r.Name, r.QType, g.Verdict, g.Rule, g.List, r.Expect.Verdict)
			}
			if r.ID == "main/0008" {
				continue // the table names a rule that $badfilter in another list disables
			}
			if !strings.HasPrefix(set, "rpz") && !slices.Contains(append(r.Expect.RuleAny, r.Expect.Rule), g.Rule) {
				t.Errorf("%s: %s by %q, want %q", r.ID, r.Name, g.Rule, r.Expect.Rule)
			}
		}
		t.Logf("%s: %d rows", set, len(rows[set]))
	}
}

// unpacked writes the text of a compressed file to a path, which it returns.
func unpacked(t *testing.T, from, to string) string {
	f, err := os.Open(from)
	if err != nil {
		t.Skip(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return to
}

// The command says in JSON what the engine says, for a table of questions that is not part of the project.
func TestMatchTable(t *testing.T) {
	root := os.Getenv("SLUICE_SHARED")
	if root == "" {
		root = "../../../shared"
	}
	f, err := os.Open(filepath.Join(root, "data", "tables", "semantic.public.jsonl"))
	if err != nil {
		t.Skip("no test data here: set SLUICE_SHARED to the folder that holds data/tables")
	}
	defer f.Close()
	dir := t.TempDir()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	n := 0
	for lines.Scan() {
		var r struct {
			ID, Name, QType, Client, IP string
			Lists, Tags                 []string
		}
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		args := []string{"match", "--json", "--client", r.Client, "--ip", r.IP}
		by := resolver.JudgedBy{Client: r.Client, Tags: r.Tags}
		if r.IP != "" {
			by.Addr = netip.MustParseAddr(r.IP)
		}
		for _, tag := range r.Tags {
			args = append(args, "--tag", tag)
		}
		var files []resolver.ListFile
		for i, text := range r.Lists {
			name := fmt.Sprintf("list%d", i+1)
			path := filepath.Join(dir, name)
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			args = append(args, "--list", path)
			files = append(files, resolver.ListFile{Name: name, Text: []byte(text)})
		}
		judge, _, err := resolver.NewJudge(files)
		if err != nil {
			t.Fatal(err)
		}
		want, err := judge.Judge(r.Name, r.QType, by)
		status, out, errs := sluice(t, append(args, "--", r.Name, r.QType)...)
		n++
		if err != nil {
			if status != 2 || out != "" || errs == "" {
				t.Errorf("%s: exit status %d, %q, %q; want the error %v", r.ID, status, out, errs, err)
			}
			continue
		}
		var b strings.Builder
		e := json.NewEncoder(&b)
		e.SetEscapeHTML(false)
		if err := e.Encode(want); err != nil {
			t.Fatal(err)
		}
		if status != 0 || out != b.String() {
			t.Errorf("%s: exit status %d, %s%s; want %s", r.ID, status, out, errs, b.String())
		}
	}
	if lines.Err() != nil || n == 0 {
		t.Errorf("%d rows, %v", n, lines.Err())
	}
	t.Logf("%d rows", n)
}
