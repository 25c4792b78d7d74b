package bizlogic

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/usercache/pagewalk"
)

// importAll sends lines in batches of 1,000 from where the service says it is, as a client that may have
// been stopped anywhere.
func importAll(t *testing.T, r *rig, id string, lines [][]byte, batches int) *adminv1.ImportResponse {
	t.Helper()
	at, err := r.data.Import(t.Context(), &adminv1.ImportRequest{Id: id})
	if err != nil {
		t.Fatal(err)
	}
	for ; batches > 0 && at.NextLine <= uint64(len(lines)); batches-- {
		from := at.NextLine - 1
		to := min(from+maxLines, uint64(len(lines)))
		if at, err = r.data.Import(t.Context(), &adminv1.ImportRequest{Id: id, FirstLine: from + 1, Lines: lines[from:to]}); err != nil {
			t.Fatal(err)
		}
	}
	return at
}

func TestImportOf10000LinesIsResumable(t *testing.T) {
	dir := t.TempDir()
	r := start(t, Options{Dir: dir})
	lines := [][]byte{exportedLine(t, "policy", &adminv1.Policy{Id: "standard", Settings: &userv1.Settings{Services: &userv1.StringSet{Values: []string{"tiktok"}}}})}
	for i := range 9_999 {
		u := &adminv1.User{Id: fmt.Sprintf("user-%06d", i), Policy: "standard"}
		for j := range 3 {
			u.Devices = append(u.Devices, &userv1.Device{Id: fmt.Sprintf("d%06d%d", i, j), Links: []string{fmt.Sprintf("10.%d.%d.%d", j, i/256, i%256)}})
		}
		lines = append(lines, exportedLine(t, "user", u))
	}
	before := r.svc.Head(Catalogue) // the newest revision of all
	if at := importAll(t, r, "file-1", lines, 4); at.NextLine != 4001 || at.Revision != before+4 {
		t.Errorf("after 4 batches: %v; want line 4001 at revision %d", at, before+4)
	}
	r.stop()
	r = start(t, Options{Dir: dir})
	at := importAll(t, r, "file-1", lines, 100)
	if at.NextLine != 10_001 || at.Revision != before+10 {
		t.Errorf("at the end: %v; want line 10001 at revision %d", at, before+10)
	}
	st := r.svc.Status()
	if tot := st.Datasets[0].Totals; tot.Users != 9_999 || tot.Devices != 29_997 || tot.EnabledUsers != 9_999 {
		t.Errorf("totals %v", tot)
	}
	// Sent again, nothing happens.
	again, err := r.data.Import(t.Context(), &adminv1.ImportRequest{Id: "file-1", FirstLine: 9001, Lines: lines[9000:]})
	if err != nil || again.Revision != at.Revision || again.Changed != 0 || r.svc.Head(Users) != at.Revision {
		t.Errorf("again: %v, %v", again, err)
	}
	// What comes out goes in elsewhere, and is the same.
	out := exportAll(t, r, "")
	if len(out) != 10_000 || !bytes.HasPrefix(out[0], []byte(`{"policy":`)) {
		t.Fatalf("%d lines, first %.60s", len(out), out[0])
	}
	other := start(t, Options{})
	importAll(t, other, "copy", out, 100)
	if again := exportAll(t, other, "user"); len(again) != 9_999 || stripRevision(t, again[77]) != stripRevision(t, out[78]) {
		t.Errorf("%s became %s", out[78], again[77])
	}
}

func exportAll(t *testing.T, r *rig, only string) (lines [][]byte) {
	t.Helper()
	stream, err := r.data.Export(t.Context(), &adminv1.ExportRequest{Only: only})
	if err != nil {
		t.Fatal(err)
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return lines
		}
		if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, m.Lines...)
	}
}

func stripRevision(t *testing.T, line []byte) string {
	t.Helper()
	before, rest, ok := bytes.Cut(line, []byte(`"revision":"`))
	_, after, ok2 := bytes.Cut(rest, []byte(`",`))
	if !ok || !ok2 {
		t.Fatalf("no revision in %s", line)
	}
	return string(before) + string(after)
}

func TestImportRefusesABatchWhole(t *testing.T) {
	r := start(t, Options{Compile: picky})
	good := []byte(`{"user":{"id":"good"}}`)
	head := r.svc.Head(Users)
	for _, c := range []struct{ line, want string }{
		{`not json`, "line 2: not a JSON object"},
		{`{"user":{"id":"a"},"policy":{"id":"b"}}`, "line 2: not one of"},
		{`{"planet":{"id":"a"}}`, `"planet" is none of`},
		{`{"user":{"id":"a","colour":"red"}}`, "colour"},
		{`{"user":{"id":"A"}}`, "user.id"},
		{`{"user":{"id":"a","policy":"nope"}}`, `there is no policy "nope"`},
		{`{"user":{"id":"a","settings":{"lists":{"values":["nope"]}}}}`, `there is no list "nope"`},
		{`{"user":{"id":"a","settings":{"block_ttl":100000}}}`, "block_ttl"},
		{`{"user":{"id":"a","devices":[{"id":"x"},{"id":"x"}]}}`, "claimed twice"},
		{`{"user":{"id":"a","rules":{"text":"YmFkCg=="}}}`, "this is bad"},
		{`{"list":{"id":"a"}}`, "neither a url nor"},
		{`{"policy":{"id":"a","settings":{"schedules":{"values":[{"id":"n"}]}}}}`, "neither block nor pause"},
	} {
		_, err := r.data.Import(t.Context(), &adminv1.ImportRequest{Id: "x", FirstLine: 1, Lines: [][]byte{good, []byte(c.line)}})
		wantError(t, err, codes.InvalidArgument, "line 2")
		if err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q in it", c.line, err, c.want)
		}
	}
	if r.svc.Head(Users) != head {
		t.Error("something was stored")
	}
	// A gap is refused: it would lose lines.
	_, err := r.data.Import(t.Context(), &adminv1.ImportRequest{Id: "x", FirstLine: 5, Lines: [][]byte{good}})
	wantError(t, err, codes.InvalidArgument, "first_line")
	// Devices may change places within a batch, in either order.
	for i, lines := range []string{
		`{"user":{"id":"a","devices":[{"id":"one"}]}}|{"user":{"id":"b","devices":[{"id":"two"}]}}`,
		`{"user":{"id":"a","devices":[{"id":"two"}]}}|{"user":{"id":"b","devices":[{"id":"one"}]}}`,
		`{"user":{"id":"b","devices":[{"id":"two"}]}}|{"user":{"id":"a","devices":[{"id":"one"}]}}`,
	} {
		_, err := r.data.Import(t.Context(), &adminv1.ImportRequest{Id: fmt.Sprint("swap", i), FirstLine: 1, Lines: bytes.Split([]byte(lines), []byte("|"))})
		if err != nil {
			t.Error(err)
		}
	}
	if d, err := r.users.GetDevice(t.Context(), &adminv1.GetDeviceRequest{Id: "two"}); err != nil || d.Device.User != "b" {
		t.Errorf("device two: %v, %v", d, err)
	}
}

func TestShrinkGuard(t *testing.T) {
	r := start(t, Options{})
	for i := range 100 {
		r.user(fmt.Sprintf("u-%02d", i))
	}
	remove := func(i int) error {
		_, err := r.users.DeleteUser(t.Context(), &adminv1.DeleteUserRequest{Id: fmt.Sprintf("u-%02d", i)})
		return err
	}
	for i := range 20 {
		if err := remove(i); err != nil {
			t.Fatalf("removal %d: %v", i, err)
		}
	}
	wantError(t, remove(20), codes.FailedPrecondition, "")
	_, err := r.set("u-50", "disabled=true") // one fewer enabled user is a shrink too
	wantError(t, err, codes.FailedPrecondition, "")
	r.user("more") // growing goes on
	if _, err := r.set("u-50", "enabled=true"); err != nil {
		t.Error(err)
	}

	p := newReplica(t, Users)
	p.repair(r, nil)
	stream, _ := p.watch(t.Context(), r)
	resp, err := r.data.AcceptShrink(t.Context(), &adminv1.AcceptShrinkRequest{Kind: Users, Why: "they left"})
	if err != nil {
		t.Fatal(err)
	}
	for i := 20; i < 90; i++ {
		if err := remove(i); err != nil {
			t.Fatalf("after accepting, removal %d: %v", i, err)
		}
	}
	// The acceptance is part of the data, and covers the removals made under it.
	p.follow(stream, r.svc.Head(Users))
	acc := new(userv1.ShrinkAccepted)
	rec := p.records[keyAccepted]
	if rec == nil || proto.Unmarshal(rec.Bytes, acc) != nil || acc.Why != "they left" || acc.ThroughRevision < resp.Revision || acc.Totals.Users > 40 {
		t.Errorf("acceptance %v", acc)
	}
	p.wantEqual(r)

	// An import may carry its own acceptance, which opens nothing for others.
	var lines [][]byte
	for i := range 100 {
		lines = append(lines, fmt.Appendf(nil, `{"user":{"id":"n-%02d","devices":[{"id":"dev-%02d"}]}}`, i, i))
	}
	importAll(t, r, "grow", lines, 1)
	for i := range lines {
		lines[i] = fmt.Appendf(nil, `{"user":{"id":"n-%02d"}}`, i)
	}
	other := start(t, Options{}) // where nothing was accepted
	importAll(t, other, "grow", append([][]byte{}, linesWithDevices(100)...), 1)
	_, err = other.data.Import(t.Context(), &adminv1.ImportRequest{Id: "shrink", FirstLine: 1, Lines: lines})
	wantError(t, err, codes.FailedPrecondition, "")
	if _, err := other.data.Import(t.Context(), &adminv1.ImportRequest{Id: "shrink", FirstLine: 1, Lines: lines, AcceptShrink: true}); err != nil {
		t.Error(err)
	}
}

func linesWithDevices(n int) (lines [][]byte) {
	for i := range n {
		lines = append(lines, fmt.Appendf(nil, `{"user":{"id":"n-%02d","devices":[{"id":"dev-%02d"}]}}`, i, i))
	}
	return lines
}

// An acceptance ends, wherever the clock goes.
func TestAcceptanceEnds(t *testing.T) {
	given := time.Unix(1_800_000_000, 0)
	a := acceptance{&userv1.ShrinkAccepted{By: "operator", Accepted: given.Unix()}}
	for after, want := range map[time.Duration]bool{
		0: true, acceptFor - time.Second: true, acceptFor: false, -time.Second: true, // a leap second
		-time.Hour: false, -87600 * time.Hour: false, 87600 * time.Hour: false,
	} {
		if a.open(given.Add(after)) != want {
			t.Errorf("%v after it was given, an acceptance is open: %v", after, !want)
		}
	}
	if (acceptance{&userv1.ShrinkAccepted{By: byImport, Accepted: given.Unix()}}).open(given) || (acceptance{}).open(given) {
		t.Error("one of an import, or none, is open")
	}
}

func TestBackupAndRestore(t *testing.T) {
	r := start(t, Options{})
	r.user("u")
	text := strings.Repeat("||long.example^\n", 5000)
	if _, err := r.policies.SetRules(t.Context(), &adminv1.SetRulesRequest{Target: "u", Text: []byte(text)}); err != nil {
		t.Fatal(err)
	}
	p := newReplica(t, Users)
	p.repair(r, nil)
	var archive bytes.Buffer
	stream, err := r.data.Backup(t.Context(), &adminv1.BackupRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		archive.Write(m.Data)
	}
	r.user("later") // is not in the backup

	dir := filepath.Join(t.TempDir(), "new")
	if err := Restore(dir, bytes.NewReader(archive.Bytes())); err != nil {
		t.Fatal(err)
	}
	if err := Restore(dir, bytes.NewReader(archive.Bytes())); err == nil {
		t.Error("restored over a store")
	}
	// Half a copy of the store, made for a backup by a process that was killed, does not stay.
	half := filepath.Join(dir, "store.db"+copySuffix+"1")
	if err := os.WriteFile(half, []byte("half a store"), 0o600); err != nil {
		t.Fatal(err)
	}
	back := start(t, Options{Dir: dir})
	if _, err := os.Stat(half); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("half a copy of the store: %v", err)
	}
	got, err := back.policies.GetRules(t.Context(), &adminv1.GetRulesRequest{Target: "u"})
	if err != nil || string(got.Text) != text {
		t.Errorf("rules after a restore: %d bytes, %v", len(got.GetText()), err)
	}
	if _, hello := p.watch(t.Context(), back); hello.Resume != syncv1.Resume_RESUME_OTHER_LINEAGE || hello.Head < p.revision+lineageStep {
		t.Errorf("after a restore: %v", hello)
	}
	p.repair(back, nil) // a repair moves nothing but what differs
	p.wantEqual(back)

	for cut := range slices.Values([]int{0, 100, archive.Len() / 2}) {
		dir := filepath.Join(t.TempDir(), "cut")
		if err := Restore(dir, bytes.NewReader(archive.Bytes()[:cut])); err == nil {
			t.Errorf("restored from %d of %d bytes", cut, archive.Len())
		}
		if _, err := os.Stat(filepath.Join(dir, "store.db")); err == nil {
			t.Errorf("%d of %d bytes left a store", cut, archive.Len())
		}
	}
}

// TestLineage tells a store that went on from one that was copied or put back.
func TestLineage(t *testing.T) {
	dir := t.TempDir()
	lineage := func(dir string) (string, uint64) {
		t.Helper()
		svc, err := Open(Options{Dir: dir, noSync: true})
		if err != nil {
			t.Fatal(err)
		}
		defer svc.Close()
		return fmt.Sprintf("%x", svc.db.lineage), svc.Head(Users)
	}
	path := filepath.Join(dir, "store.db")
	first, head := lineage(dir)
	early, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if again, head2 := lineage(dir); again != first || head2 != head {
		t.Errorf("opened twice: %s at %d, then %s at %d", first, head, again, head2)
	}
	// Put back in place: the same inode, an earlier generation.
	if err := os.WriteFile(path, early, 0o600); err != nil {
		t.Fatal(err)
	}
	put, head2 := lineage(dir)
	if put == first || head2 < head+lineageStep {
		t.Errorf("put back: %s at %d", put, head2)
	}
	// Copied with everything beside it.
	copied := t.TempDir()
	if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if c, _ := lineage(copied); c == put {
		t.Error("a copy has the lineage of the original")
	}
	if same, _ := lineage(dir); same != put {
		t.Error("the original lost its lineage")
	}
	// A crash between the two writes of an opening.
	side := readSidecar(dir)
	if err := writeSidecar(dir, sidecar{Generation: side.Generation + 1, Pending: true}); err != nil {
		t.Fatal(err)
	}
	if same, _ := lineage(dir); same != put {
		t.Error("a crash while opening cost the lineage")
	}
	if err := os.Remove(sidecarPath(dir)); err != nil {
		t.Fatal(err)
	}
	if c, _ := lineage(dir); c == put {
		t.Error("without its generation file the store kept its lineage")
	}
}

func TestStoreThatCannotBeUsed(t *testing.T) {
	whole := t.TempDir()
	r := start(t, Options{Dir: whole})
	for i := range 200 {
		r.user(fmt.Sprintf("user-%d", i))
	}
	if _, err := Open(Options{Dir: whole}); !errors.Is(err, ErrLocked) {
		t.Errorf("opened twice: %v", err)
	}
	r.stop()
	good, err := os.ReadFile(filepath.Join(whole, "store.db"))
	if err != nil {
		t.Fatal(err)
	}
	page := os.Getpagesize()
	good = used(t, good)
	edit := func(f func(b []byte) []byte) []byte { return f(bytes.Clone(good)) }
	newer := filepath.Join(t.TempDir(), "newer.db")
	foreign := filepath.Join(t.TempDir(), "foreign.db")
	for path, f := range map[string]func(*bolt.Tx) error{
		newer: func(tx *bolt.Tx) error {
			b := tx.Bucket(bucketService).Bucket(bucketIdentity)
			return b.Put(keyIdentity, append(bytes.Clone(b.Get(keyIdentity)), 8, 99)) // field 1 again: the last counts
		},
		foreign: func(tx *bolt.Tx) error { _, err := tx.CreateBucket([]byte("groceries")); return err },
	} {
		if path == newer {
			if err := os.WriteFile(path, good, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		db, err := bolt.Open(path, 0o600, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(db.Update(f), db.Close()); err != nil {
			t.Fatal(err)
		}
	}
	read := func(path string) []byte {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, c := range []struct {
		what string
		file []byte
		want string
	}{
		{"empty", nil, "is empty"},
		{"text", []byte(strings.Repeat("dear diary\n", 2000)), "nor any bbolt file"},
		{"zeroes", make([]byte, len(good)), "nor any bbolt file"},
		{"foreign bbolt", read(foreign), "not one of this service"},
		{"newer", read(newer), "has format 99"},
		{"cut", good[:len(good)-2*page], "the file ends here"},
		{"both metas damaged", edit(func(b []byte) []byte { b[30]++; b[page+30]++; return b }), "both meta pages are damaged"},
		{"newer bbolt", edit(func(b []byte) []byte { b[20], b[page+20] = 9, 9; return b }), "version"},
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "store.db")
		if err := os.WriteFile(path, c.file, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Open(Options{Dir: dir})
		if se := (*StoreError)(nil); !errors.As(err, &se) || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v; want %q", c.what, err, c.want)
		}
		if after := read(path); !bytes.Equal(after, c.file) {
			t.Errorf("%s: the file was changed", c.what)
		}
	}
	// One damaged meta page is what bbolt has two for.
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "store.db"), edit(func(b []byte) []byte { b[30]++; return b }), 0o600); err != nil {
		t.Fatal(err)
	}
	if svc, err := Open(Options{Dir: dir}); err != nil {
		t.Errorf("one damaged meta page: %v", err)
	} else {
		svc.Close()
	}
	// Damage anywhere in the used pages is found before bbolt sees it, or does no harm.
	for at := 2 * page; at < len(good); at += 5 * page {
		b := edit(func(b []byte) []byte {
			for i := range 16 {
				b[at+i] ^= 0xff // the page's header
			}
			return b
		})
		path := filepath.Join(t.TempDir(), "store.db")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := checkFile(path); err != nil {
			continue
		}
		if svc, err := Open(Options{Dir: filepath.Dir(path)}); err == nil { // a free page
			svc.Close()
		}
	}
}

// A first start that is killed, or finds the disk full, at any moment leaves nothing that the next one refuses.
func TestFirstStartCutShort(t *testing.T) {
	if dir := os.Getenv("BIZLOGIC_FIRST_START"); dir != "" {
		svc, err := Open(Options{Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		svc.Close()
		return
	}
	// RLIMIT_FSIZE with its signal ignored stands for a disk that is full after so many KiB.
	for kib := 1; kib <= 257; kib += 32 {
		dir := t.TempDir()
		cmd := exec.Command("sh", "-c", fmt.Sprintf("ulimit -f %d; exec \"$0\" -test.run='^TestFirstStartCutShort$'", kib), os.Args[0])
		cmd.Env = append(os.Environ(), "BIZLOGIC_FIRST_START="+dir)
		if out, err := cmd.CombinedOutput(); err == nil && kib == 1 {
			t.Errorf("with room for %d KiB the first start succeeds: the test tests nothing\n%s", kib, out)
		}
		svc, err := Open(Options{Dir: dir})
		if err != nil {
			t.Errorf("after a first start with room for %d KiB: %v", kib, err)
			continue
		}
		if err := svc.Close(); err != nil {
			t.Error(err)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, "store.db.new-*")); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
}

func TestMigrateRebuildsIndexes(t *testing.T) {
	dir := t.TempDir()
	r := start(t, Options{Dir: dir})
	for i := range 50 {
		r.user(fmt.Sprintf("user-%d", i))
		if err := r.device(fmt.Sprintf("user-%d", i), fmt.Sprintf("dev-%d", i)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.users.DeleteUser(t.Context(), &adminv1.DeleteUserRequest{Id: "user-7"}); err != nil {
		t.Fatal(err)
	}
	p := newReplica(t, Users)
	p.repair(r, nil)
	r.stop()
	if found, err := Migrate(dir); err != nil || len(found) > 0 {
		t.Errorf("a whole store: %v, %v", found, err)
	}
	db, err := bolt.Open(filepath.Join(dir, "store.db"), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bolt.Tx) error {
		users, svc := tx.Bucket([]byte(Users)), tx.Bucket(bucketService)
		return errors.Join(
			users.DeleteBucket(bucketTree), func() error { _, err := users.CreateBucket(bucketTree); return err }(),
			svc.Bucket(bucketClaims).Delete([]byte("d:dev-3")),
			svc.Bucket(bucketIDs).Put([]byte("ghost"), []byte{}))
	})
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{Dir: dir}); err == nil || !strings.Contains(err.Error(), "migrate") {
		t.Errorf("opened without its tree: %v", err)
	}
	found, err := Migrate(dir)
	if err != nil || len(found) != 3 {
		t.Errorf("found %q, %v; want the tree and two indexes", found, err)
	}
	r = start(t, Options{Dir: dir})
	p.wantEqual(r)
	if d, err := r.users.GetDevice(t.Context(), &adminv1.GetDeviceRequest{Id: "dev-3"}); err != nil || d.Device.User != "user-3" {
		t.Errorf("dev-3: %v, %v", d, err)
	}
	if _, err := Migrate(filepath.Join(dir, "nowhere")); err == nil {
		t.Error("migrated what is not there")
	}
}

// FuzzCheckFile gives the walker files that were damaged in one place: it must end, and what it passes
// bbolt must be able to read to the end.
func FuzzCheckFile(f *testing.F) {
	dir := f.TempDir()
	svc, err := Open(Options{Dir: dir, noSync: true})
	if err != nil {
		f.Fatal(err)
	}
	svc.Close()
	good, err := os.ReadFile(filepath.Join(dir, "store.db"))
	if err != nil {
		f.Fatal(err)
	}
	good = used(f, good)
	for _, at := range []uint32{0, 16, 4096, 8200, 12300, 20000} {
		f.Add(at, []byte{0xff, 0xff, 0xff, 0xff})
	}
	f.Add(uint32(8394), []byte{0, 3, 0, 0, 3})
	f.Fuzz(func(t *testing.T, at uint32, patch []byte) {
		b := bytes.Clone(good)
		at %= uint32(len(b))
		copy(b[at:], patch)
		path := filepath.Join(t.TempDir(), "store.db")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if checkFile(path) != nil {
			return
		}
		db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true, PreLoadFreelist: true})
		if err != nil {
			t.Fatalf("passed, but: %v", err)
		}
		defer db.Close()
		err = db.View(func(tx *bolt.Tx) error { return readAll(tx.Cursor().Bucket()) })
		if err != nil {
			t.Fatalf("passed, but: %v", err)
		}
	})
}

// used returns what is used of a bbolt file: it grows ahead of that.
func used(t testing.TB, file []byte) []byte {
	t.Helper()
	r, err := pagewalk.Walk(bytes.NewReader(file), int64(len(file)), func(string, []byte, []byte) error { return nil })
	if err != nil || !r.Whole() {
		t.Fatalf("a store of our own: %v, %v", err, r.Faults)
	}
	return file[:int(r.Pages)*r.PageSize]
}

func readAll(b *bolt.Bucket) error {
	return b.ForEach(func(k, v []byte) error {
		if v != nil {
			return nil
		}
		return readAll(b.Bucket(k))
	})
}

// FuzzImportLine gives lines of any content to the import: an error names the line and has a code, and what
// is taken can be staged again with the same bytes.
func FuzzImportLine(f *testing.F) {
	for _, s := range []string{`{"user":{"id":"a","devices":[{"id":"d","links":["192.0.2.1"]}]}}`, `{"policy":{"id":"p","settings":{"mode":"BLOCK_MODE_NXDOMAIN"}}}`,
		`{"user":{"id":"a","settings":{"rewrites":{"values":[{"name":"a.example","records":["A 192.0.2.1"]}]}}}}`, `# remark`, `{`} {
		f.Add([]byte(s))
	}
	svc, err := Open(Options{Dir: f.TempDir(), noSync: true})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { svc.Close() })
	f.Fuzz(func(t *testing.T, line []byte) {
		if bytes.Contains(line, []byte("list")) {
			return // might name a URL to fetch
		}
		in, err := svc.parseImport(t.Context(), [][]byte{line}, 1)
		if err != nil {
			wantError(t, err, codes.InvalidArgument, "line 1")
			return
		}
		stage := func() (out map[string]map[string][]byte) {
			_ = svc.db.View(func(tx *bolt.Tx) error {
				v := &view{b: &batch{dir: svc.opts.Dir}, tx: tx, staged: map[string]map[string][]byte{}, claimed: map[string]string{}}
				if err := in.stage(v); err != nil {
					wantError(t, err, codes.InvalidArgument, "line 1")
					return nil
				}
				out = v.staged
				return nil
			})
			return out
		}
		if one, two := stage(), stage(); fmt.Sprint(one) != fmt.Sprint(two) {
			t.Errorf("%q becomes %v, then %v", line, one, two)
		}
	})
}

// A rule that would block the world makes a text no list for many users, and the line is named; a bare
// wildcard is no rule at all.
func TestWorldBlockingList(t *testing.T) {
	for text, want := range map[string]string{
		"||ads.example^\n/.*/\n":           "line 2",
		"||ads.example^\n||tracker.com^\n": "",
		"||ads.example^\n*\n":              "",
	} {
		rep, err := Engine("x", strings.NewReader(text))
		if err != nil || (rep.NotList != "") != (want != "") || !strings.Contains(rep.NotList, want) {
			t.Errorf("%q: %q, %v", text, rep.NotList, err)
		}
		if strings.Contains(text, "*\n") && want == "" && rep.Skipped != 1 {
			t.Errorf("%q: %d lines skipped", text, rep.Skipped)
		}
	}
}
