package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/usercache"
)

// TestMain is also the program that "sluice snapshot" starts anew to read a file.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == readerCommand {
		if len(os.Args) > 4 && strings.HasSuffix(os.Args[4], ".greedy") {
			greedy()
		}
		main()
	}
	os.Exit(m.Run())
}

// greedy is a reader that a file has made want all memory.
func greedy() {
	if err := limitMemory(64 << 20); err != nil { // less than it may have, so that it ends soon
		panic(err)
	}
	var all [][]byte
	for {
		b := make([]byte, 1<<24)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		all = append(all, b)
		runtime.KeepAlive(all)
	}
}

// userFile writes a file of n users, as a resolver would.
func userFile(t *testing.T, n int) string {
	t.Helper()
	dir := t.TempDir()
	c, err := usercache.Open(usercache.Options{Dir: dir, Program: "test"})
	if err != nil {
		t.Fatal(err)
	}
	d := usercache.Delta{From: 1, To: uint64(n + 1)}
	for i := range n {
		b, err := proto.Marshal(&userv1.User{Name: fmt.Sprintf("number %d", i), Devices: []*userv1.Device{{Id: fmt.Sprintf("d%d", i)}}})
		if err != nil {
			t.Fatal(err)
		}
		d.Changes = append(d.Changes, usercache.Change{Key: fmt.Appendf(nil, "u%d", i), Revision: uint64(i + 2), Bytes: b})
	}
	users := c.Dataset(usercache.Users)
	id := usercache.Identity{Dataset: [16]byte{1}, Lineage: [16]byte{2}}
	now := time.Unix(1_000_000_000, 0)
	if err := users.BeginTransfer(id, false); err != nil {
		t.Fatal(err)
	}
	if err := users.FinishTransfer(id, 1, now); err != nil {
		t.Fatal(err)
	}
	if _, err := users.ApplyDelta(t.Context(), id, d, now); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(dir, "users-*.db"))
	if err != nil || len(files) != 1 {
		t.Fatalf("files %v, %v", files, err)
	}
	return files[0]
}

// report runs one command with --json.
func report(t *testing.T, status int, verb, path string) (r fileReport) {
	t.Helper()
	got, out, errs := sluice(t, "snapshot", verb, path, "--json")
	if got != status || errs != "" {
		t.Fatalf("%s %s: exit status %d, want %d; %s%s", verb, path, got, status, out, errs)
	}
	d := json.NewDecoder(strings.NewReader(out))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil || r.File != path {
		t.Fatalf("%s: %v", out, err)
	}
	return r
}

func TestSnapshotWhole(t *testing.T) {
	path := userFile(t, 100)
	r := report(t, 0, "verify", path)
	if !r.Whole || len(r.Faults) > 0 || r.Kind != "users" || r.Revision != 101 || r.Records != 100 || r.Users != 100 || r.Devices != 100 ||
		r.Dataset != "01"+strings.Repeat("0", 30) || r.Program != "test" || r.Incomplete {
		t.Errorf("%+v", r)
	}
	status, out, errs := sluice(t, "snapshot", "inspect", path)
	if status != 0 || errs != "" {
		t.Errorf("exit status %d, %s", status, errs)
	}
	for _, part := range []string{"revision    101\n", "users       100\n", path + ": whole: 100 records of users at revision 101\n"} {
		if !strings.Contains(out, part) {
			t.Errorf("%q is not in\n%s", part, out)
		}
	}
}

func TestSnapshotDamaged(t *testing.T) {
	path := userFile(t, 100)
	damaged, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for at := bytes.Index(damaged, []byte("number 60")); at >= 0; at = bytes.Index(damaged, []byte("number 60")) {
		damaged[at] ^= 4
		found++
	}
	if found == 0 {
		t.Fatal("the record is not in the file")
	}
	if err := os.WriteFile(path, damaged, 0o600); err != nil {
		t.Fatal(err)
	}
	r := report(t, 3, "verify", path)
	if r.Whole || r.Records != 99 || r.Bad != 1 || !strings.Contains(strings.Join(r.Faults, "\n"), `"u60"`) {
		t.Errorf("%+v", r)
	}
	if status, out, _ := sluice(t, "snapshot", "inspect", path); status != 3 || !strings.Contains(out, path+": damaged; 99 records are whole, 1 are not\n") || !strings.Contains(out, `"u60"`) {
		t.Errorf("exit status %d\n%s", status, out)
	}

	if r = report(t, 3, "repair", path); r.Repaired != path+".repaired" || r.Records != 99 {
		t.Errorf("%+v", r)
	}
	if r = report(t, 0, "verify", path+".repaired"); !r.Whole || r.Records != 99 || !r.Incomplete {
		t.Errorf("the repaired file: %+v", r)
	}
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, damaged) {
		t.Errorf("the damaged file was written, or %v", err)
	}
	if status, _, errs := sluice(t, "snapshot", "repair", path); status != 2 || !strings.Contains(errs, path+".repaired exists; move it away") {
		t.Errorf("a second repair: exit status %d, %s", status, errs)
	}
}

// Whatever is in a file, the command ends with a report of damage, and nothing else is touched.
func TestSnapshotHostile(t *testing.T) {
	good, err := os.ReadFile(userFile(t, 100))
	if err != nil {
		t.Fatal(err)
	}
	page := os.Getpagesize()
	cut := func(n int) []byte { return good[:n] }
	with := func(change func(b []byte)) []byte {
		b := bytes.Clone(good)
		change(b)
		return b
	}
	for name, text := range map[string][]byte{
		"empty":         nil,
		"text":          []byte("not a file of ours\n"),
		"one page":      cut(page),
		"cut short":     cut(8 * page),
		"no metas":      with(func(b []byte) { clear(b[:2*page]) }),
		"all pages one": with(func(b []byte) { fill(b[2*page:], b[2*page:3*page]) }),
		"all ones":      with(func(b []byte) { fill(b[2*page:], []byte{0xff}) }),
		"greedy":        good, // see TestMain
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "users-00000001.db")
			if name == "greedy" {
				path = strings.TrimSuffix(path, "db") + "greedy"
			}
			if err := os.WriteFile(path, text, 0o600); err != nil {
				t.Fatal(err)
			}
			if r := report(t, 3, "verify", path); r.Whole || len(r.Faults) == 0 {
				t.Errorf("%+v", r)
			} else {
				t.Log(r.Faults[0])
			}
			if name != "text" && name != "all pages one" && name != "greedy" {
				return // a child takes a second under the race detector
			}
			status, out, errs := sluice(t, "snapshot", "repair", path)
			if status != 3 || errs != "" {
				t.Errorf("repair: exit status %d\n%s%s", status, out, errs)
			}
			_, err := os.Stat(path + ".repaired")
			if wrote := strings.Contains(out, path+".repaired: written"); wrote != (err == nil) {
				t.Errorf("the file was written: %v; the command says\n%s", err, out)
			}
			if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, text) {
				t.Errorf("the file was written, or %v", err)
			}
		})
	}
}

// fill repeats a pattern over b.
func fill(b, pattern []byte) {
	pattern = bytes.Clone(pattern)
	for len(b) > 0 {
		b = b[copy(b, pattern):]
	}
}

func TestSnapshotUsage(t *testing.T) {
	dir := t.TempDir()
	for _, tt := range []struct {
		args []string
		err  string
	}{
		{[]string{"snapshot"}, "verify, inspect or repair"},
		{[]string{"snapshot", "look", dir}, "look"},
		{[]string{"snapshot", "verify"}, "accepts 1 arg"},
		{[]string{"snapshot", "verify", filepath.Join(dir, "nowhere")}, "no such file"},
		{[]string{"snapshot", "inspect", dir}, "is no file"},
	} {
		if status, out, errs := sluice(t, tt.args...); status != 2 || out != "" || !strings.Contains(errs, tt.err) {
			t.Errorf("%v: exit status %d, %q, %q; want 2 and %q", tt.args, status, out, errs, tt.err)
		}
	}
}
