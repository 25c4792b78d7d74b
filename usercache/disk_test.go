package usercache

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("USERCACHE_WRITER_DIR"); dir != "" {
		writeUntilKilled(dir)
		return
	}
	os.Exit(m.Run())
}

// history is the change that leads to a revision: a fixed sequence, so that any state can be computed.
func history(rev uint64) Change {
	rnd := rand.New(rand.NewPCG(rev, 99))
	key := fmt.Sprintf("u%d", rnd.IntN(300))
	c := gone(key)
	if rnd.IntN(4) > 0 {
		u := user(fmt.Sprintf("d%d", rev))
		u.Name = strings.Repeat("n", rnd.IntN(250))
		c = put(key, u)
	}
	c.Revision = rev
	return c
}

// writeUntilKilled applies history forever, with checkpoints in between, and prints revisions on disk.
func writeUntilKilled(dir string) {
	c, err := Open(Options{Dir: dir, GroupChanges: 7, GroupDelay: time.Millisecond, CheckpointEvery: 20 * time.Millisecond, Guard: GuardOptions{Share: 1}})
	if err != nil {
		fmt.Println("open:", err)
		os.Exit(1)
	}
	if err := c.Ready(); err != nil {
		fmt.Println("ready:", err)
		os.Exit(1)
	}
	d := c.Dataset(Users)
	if !d.Status().Complete {
		if err := d.BeginTransfer(testID, false); err != nil {
			fmt.Println("begin:", err)
		}
		if err := d.FinishTransfer(testID, 0, day); err != nil {
			fmt.Println("finish:", err)
		}
	}
	for rev := d.Status().Revision + 1; ; rev++ {
		h := history(rev)
		if _, err := d.ApplyDelta(context.Background(), testID, Delta{From: rev - 1, To: rev, Changes: []Change{h}}, day); err != nil {
			fmt.Println("apply:", err)
			os.Exit(1)
		}
		if rev%20 == 0 {
			if err := d.Flush(context.Background()); err != nil {
				fmt.Println("flush:", err)
				os.Exit(1)
			}
			fmt.Println(rev)
		}
	}
}

// A process killed with SIGKILL at any moment starts again from a whole state, not older than what it had
// said to be on disk.
func TestKilledAtAnyMoment(t *testing.T) {
	dir := t.TempDir()
	rnd := rand.New(rand.NewPCG(1, 1))
	state := newService()
	for round := range 8 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "USERCACHE_WRITER_DIR="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		promised := uint64(0)
		kill := 1 + rnd.IntN(12)
		lines := bufio.NewScanner(out)
		for n := 0; lines.Scan(); n++ {
			rev, err := strconv.ParseUint(lines.Text(), 10, 64)
			if err != nil {
				t.Fatalf("round %d: the writer says %q", round, lines.Text())
			}
			promised = rev
			if n == kill {
				for range rnd.IntN(200) * 1000 { // somewhere within the next writes
					_ = n
				}
				if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
				break
			}
		}
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait() // killed

		c, err := Open(Options{Dir: dir, Guard: GuardOptions{Share: 1}})
		if err != nil {
			t.Fatal(err)
		}
		d := c.Dataset(Users)
		s := d.Status()
		if !s.Complete || s.Suspect || s.Revision < promised {
			t.Fatalf("round %d: revision %d was on disk, the start finds %+v", round, promised, s)
		}
		for state.revision < s.Revision {
			h := history(state.revision + 1)
			key := string(h.Key)
			if old, ok := state.records[key]; ok {
				state.tree.Remove(BucketOf(h.Key), LeafOf(h.Key, old.Revision, old.Bytes))
				delete(state.records, key)
			}
			if !h.Removed {
				state.records[key] = Record{h.Key, h.Revision, h.Bytes}
				state.tree.Add(BucketOf(h.Key), LeafOf(h.Key, h.Revision, h.Bytes))
			}
			state.revision++
		}
		if d.Root() != state.tree.Root() {
			t.Fatalf("round %d: the state is not that of revision %d", round, s.Revision)
		}
		if err := c.Ready(); err != nil {
			t.Fatal(err)
		}
		closeCache(t, c)
	}
}

// sample writes a small file of users, with overlay, and returns it and the state in it.
func sample(t testing.TB, dir string) (file string, state *service) {
	t.Helper()
	c := open(t, Options{Dir: dir, Guard: GuardOptions{Share: 1}})
	d := begin(t, c.Dataset(Users))
	s := newService()
	for i := range 110 {
		u := user(fmt.Sprintf("d%d", i))
		u.Name = strings.Repeat("x", i)
		s.change(put(fmt.Sprintf("u%d", i), u))
	}
	s.change(bad("u3"))
	if _, err := d.ApplyDelta(context.Background(), testID, s.since(0, 110), day); err != nil {
		t.Fatal(err)
	}
	if _, err := d.ApplyDelta(context.Background(), testID, s.since(110, s.revision), day); err != nil {
		t.Fatal(err)
	}
	closeCache(t, c)
	list, err := filepath.Glob(filepath.Join(dir, "users-*.db"))
	if err != nil || len(list) != 1 {
		t.Fatalf("files %v, %v", list, err)
	}
	return list[0], s
}

var long = flag.Bool("long", false, "run the long tests too")

// Whatever is changed or cut in a file, a start ends, serves nothing that was not in it, does not call a
// damaged file whole, and does not touch a byte of it.
func TestDamagedFile(t *testing.T) {
	dir := t.TempDir()
	path, state := sample(t, dir)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	good, err := Verify(path)
	if err != nil || !good.Whole {
		t.Fatalf("the sample: %+v, %v", good, err)
	}
	try := func(what string, file []byte) (complete bool, records uint64) {
		t.Helper()
		dir := t.TempDir()
		p := filepath.Join(dir, filepath.Base(path))
		if err := os.WriteFile(p, file, 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := Open(Options{Dir: dir, Guard: GuardOptions{Share: 1}})
		if err != nil {
			t.Errorf("%s: %v", what, err)
			return
		}
		defer os.RemoveAll(dir)
		defer c.Close()
		d := c.Dataset(Users)
		s := d.Status()
		for key := range state.records {
			r, ok := d.Get([]byte(key))
			if ok && (r.Revision != state.records[key].Revision || !bytes.Equal(r.Bytes, state.records[key].Bytes)) {
				t.Errorf("%s: record %s is served changed", what, key)
			}
		}
		if s.Records > uint64(len(state.records)) {
			t.Errorf("%s: %d records of %d", what, s.Records, len(state.records))
		}
		if s.Complete && (d.Root() != state.tree.Root() || s.Revision != state.revision) {
			t.Errorf("%s: passes as whole at revision %d and is not", what, s.Revision)
		}
		if !s.Complete {
			if who(c, "nobody") != "not ready" {
				t.Errorf("%s: with records lost, a device not found is %s", what, who(c, "nobody"))
			}
			if err := c.Close(); err != nil {
				t.Errorf("%s: %v", what, err)
			}
			aside := strings.TrimSuffix(p, ".db") + ".damaged"
			if b, err := os.ReadFile(aside); err != nil || !bytes.Equal(b, file) {
				t.Errorf("%s: the damaged file was not set aside as it was: %v", what, err)
			}
		}
		return s.Complete, s.Records
	}
	if ok, n := try("nothing", whole); !ok || n != uint64(len(state.records)) {
		t.Errorf("the whole file: complete %v, %d records", ok, n)
	}
	page := good.PageSize
	for n := 0; n < int(good.Pages); n++ {
		if ok, _ := try(fmt.Sprintf("cut at page %d", n), whole[:n*page]); ok {
			t.Errorf("cut at page %d, it is complete", n)
		}
	}
	rnd := rand.New(rand.NewPCG(4, 4))
	damaged, saved, bits := 0, uint64(0), 1
	if *long {
		bits = 8
	}
	for n := range int(good.Pages) {
		for range bits {
			file := bytes.Clone(whole)
			at := n*page + rnd.IntN(page)
			file[at] ^= 1 << rnd.IntN(8)
			if ok, records := try(fmt.Sprintf("a bit of byte %d", at), file); !ok {
				damaged++
				saved += records
			}
		}
	}
	if damaged == 0 || saved == 0 {
		t.Errorf("%d starts found damage and saved %d records: the test tests nothing", damaged, saved)
	}
}

// What heads a file has no digest but its own check: no bit of it changes unnoticed, whether the revision's,
// the identity's, or one that would make it another dataset's or a newer version's file.
func TestDamagedHead(t *testing.T) {
	dir := t.TempDir()
	first, state := sample(t, dir)
	twoGenerations(t, dir, state)
	c := open(t, Options{Dir: dir, Guard: GuardOptions{Share: 0.01, Min: 1}})
	d := c.Dataset(Users)
	var removals []Change
	for _, key := range slices.Sorted(maps.Keys(state.records))[:40] {
		removals = append(removals, gone(key))
	}
	for i := range removals {
		state.change(removals[i])
	}
	if _, err := d.ApplyDelta(context.Background(), testID, state.since(state.revision-uint64(len(removals)), state.revision), day); err != nil {
		t.Fatal(err)
	}
	if d.Status().Overlay == 0 {
		t.Fatal("nothing is held: the test tests less than it says")
	}
	newest := c.path(Users, 2)
	closeCache(t, c)
	whole, err := os.ReadFile(newest)
	if err != nil {
		t.Fatal(err)
	}
	var values [][]byte
	db, err := bolt.Open(newest, 0o600, &bolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	err = db.View(func(tx *bolt.Tx) error {
		for _, name := range [][]byte{bucketMeta, bucketOverlay} {
			if err := tx.Bucket(name).ForEach(func(_, v []byte) error {
				values = append(values, bytes.Clone(v))
				return nil
			}); err != nil {
				return err
			}
		}
		return nil
	})
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	older, err := os.ReadFile(first)
	if err != nil {
		t.Fatal(err)
	}
	try := t.TempDir()
	path := filepath.Join(try, filepath.Base(newest))
	n, thin := 0, 4
	if *long {
		thin = 1 // byte after byte
	}
	for i, v := range values[:4] { // checkpoint, dataset, and two of the overlay
		for at := i; at < len(v); at += (1 + 2*i) * thin {
			file := bytes.Clone(whole)
			for i := 0; ; { // wherever it stands
				next := bytes.Index(file[i:], v)
				if next < 0 {
					break
				}
				file[i+next+at] ^= 1 << (n % 8)
				i += next + len(v)
			}
			n++
			if err := os.WriteFile(path, file, 0o600); err != nil {
				t.Fatal(err)
			}
			if r, err := Verify(path); err != nil || r.Whole {
				t.Errorf("byte %d of %x, changed: whole %v, %v", at, v, r != nil && r.Whole, err)
			}
			if n%(48/thin) != 0 {
				continue
			}
			if err := os.WriteFile(filepath.Join(try, filepath.Base(first)), older, 0o600); err != nil {
				t.Fatal(err)
			}
			c, err := Open(Options{Dir: try, Guard: GuardOptions{Share: 1}})
			if err != nil {
				t.Errorf("byte %d of %x, changed: %v", at, v, err)
				continue
			}
			if s := c.Dataset(Users).Status(); !s.Complete || s.Identity != testID {
				t.Errorf("byte %d of %x, changed: the predecessor is not used: %+v", at, v, s)
			}
			closeCache(t, c)
			if err := os.RemoveAll(try); err != nil {
				t.Fatal(err)
			}
			if err := os.Mkdir(try, 0o700); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n < 100/thin {
		t.Errorf("%d bytes tried", n)
	}
}

// What stands in the place of the newest file and cannot be read neither hangs nor fails a start that has a
// whole predecessor, and is left alone.
func TestUnreadableFile(t *testing.T) {
	late := put("late", user("late-pc"))
	for what, place := range map[string]func(path string) error{
		"a pipe":         func(path string) error { return syscall.Mkfifo(path, 0o600) },
		"a folder":       func(path string) error { return os.Mkdir(path, 0o700) },
		"a link to self": func(path string) error { return os.Symlink(path, path) },
		"a dead link":    func(path string) error { return os.Symlink(path+".gone", path) },
	} {
		t.Run(what, func(t *testing.T) {
			dir := t.TempDir()
			_, state := sample(t, dir)
			second := filepath.Join(dir, "users-00000002.db")
			if err := place(second); err != nil {
				t.Fatal(err)
			}
			c := open(t, Options{Dir: dir, Guard: GuardOptions{Share: 1}})
			d := c.Dataset(Users)
			if s := d.Status(); !s.Complete || s.Revision != state.revision {
				t.Fatalf("%+v", s)
			}
			state.change(late)
			if _, err := d.ApplyDelta(context.Background(), testID, state.since(state.revision-1, state.revision), day); err != nil {
				t.Fatal(err)
			}
			closeCache(t, c)
			if _, err := os.Lstat(second); err != nil {
				t.Error(err)
			}
			c = open(t, Options{Dir: dir, Guard: GuardOptions{Share: 1}})
			if s := c.Dataset(Users).Status(); s.Revision != state.revision {
				t.Errorf("after another start %+v", s)
			}
			closeCache(t, c)
		})
		t.Run(what+" alone", func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "users-00000001.db")
			if err := place(path); err != nil {
				t.Fatal(err)
			}
			if c, err := Open(Options{Dir: dir}); err == nil {
				c.Close()
				t.Error("a start without its data went on as if there never had been any")
			} else if !strings.Contains(err.Error(), path) {
				t.Error(err)
			}
		})
	}
}

// A newest file that is passed over for failed starts is still used if its predecessor is damaged.
func TestPassedOverIsBetterThanNone(t *testing.T) {
	dir := t.TempDir()
	first, state := sample(t, dir)
	twoGenerations(t, dir, state)
	if err := os.Truncate(first, 8192); err != nil {
		t.Fatal(err)
	}
	if err := writeStarts(dir, 2); err != nil {
		t.Fatal(err)
	}
	c := open(t, Options{Dir: dir, Guard: GuardOptions{Share: 1}})
	if s := c.Dataset(Users).Status(); !s.Complete || s.Revision != state.revision {
		t.Errorf("%+v", s)
	}
	closeCache(t, c)
}

// A damaged newest file falls back to its predecessor, with the newer records that can be read on top.
func TestPredecessorAndSalvage(t *testing.T) {
	dir := t.TempDir()
	o := Options{Dir: dir, Guard: GuardOptions{Share: 1}}
	first, state := sample(t, dir)
	twoGenerations(t, dir, state)
	c := open(t, o)
	d := c.Dataset(Users)
	base := state.revision
	for i := range 60 {
		s := put(fmt.Sprintf("u%d", i+80), user(fmt.Sprintf("new%d", i)))
		state.change(s)
	}
	if _, err := d.ApplyDelta(context.Background(), testID, state.since(base, state.revision), day); err != nil {
		t.Fatal(err)
	}
	closeCache(t, c)
	newest := c.path(Users, 2)
	b, err := os.ReadFile(newest)
	if err != nil {
		t.Fatal(err)
	}
	// One record is damaged.
	at := bytes.Index(b, state.records["u100"].Bytes)
	for ; at >= 0; at = bytes.Index(b, state.records["u100"].Bytes) {
		b[at+3] ^= 1
	}
	if err := os.WriteFile(newest, b, 0o600); err != nil {
		t.Fatal(err)
	}
	c = open(t, o)
	d = c.Dataset(Users)
	s := d.Status()
	if !s.Complete || s.Revision != base {
		t.Errorf("the state is of revision %d, complete %v; want that of %s, %d", s.Revision, s.Complete, first, base)
	}
	wantWho(t, c, "new19", "u99")     // saved
	wantWho(t, c, "d100", "u100")     // of the predecessor
	wantWho(t, c, "new20", "unknown") // lost
	// Watching on from there makes it whole again.
	if res, err := d.ApplyDelta(context.Background(), testID, state.since(base, state.revision), day); err != nil || res.RootDiffers || !res.RootChecked {
		t.Errorf("catching up: %+v, %v", res, err)
	}
	wantWho(t, c, "new20", "u100")
	closeCache(t, c)
	c = open(t, o)
	if got := c.Dataset(Users).Status(); got.Revision != state.revision || got.Generation != 3 {
		t.Errorf("after another start %+v", got)
	}
}

// waitFor returns when the writer has brought about what is wanted.
func waitFor(d *Dataset, ok func(DatasetStatus) bool) {
	for {
		d.mu.RLock()
		progress := d.disk.progress
		d.mu.RUnlock()
		if ok(d.Status()) {
			return
		}
		<-progress
	}
}

// twoGenerations makes a change and has it in two files.
func twoGenerations(t *testing.T, dir string, state *service) {
	t.Helper()
	c := open(t, Options{Dir: dir, CheckpointEvery: 1, Guard: GuardOptions{Share: 1}})
	state.change(put("one-more", user("one-more-pc")))
	d := c.Dataset(Users)
	if _, err := d.ApplyDelta(context.Background(), testID, state.since(state.revision-1, state.revision), day); err != nil {
		t.Fatal(err)
	}
	if err := d.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
	waitFor(d, func(s DatasetStatus) bool { return s.Generation == 2 })
	closeCache(t, c)
}

// A damaged file keeps its name, and so its turn at the next start, until what was saved from it is on disk.
func TestSalvageOutlivesAFailingDisk(t *testing.T) {
	dir := t.TempDir()
	path, state := sample(t, dir)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	victim := state.records["u60"].Bytes
	for at := bytes.Index(b, victim); at >= 0; at = bytes.Index(b, victim) {
		b[at+2] ^= 4
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	broken := errors.New("input/output error")
	c, err := Open(Options{Dir: dir, fault: func(string) error { return broken }})
	if err != nil {
		t.Fatal(err)
	}
	wantWho(t, c, "d61", "u61")
	if err := c.Close(); !errors.Is(err, broken) {
		t.Errorf("Close says %v", err)
	}
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, b) {
		t.Fatalf("the damaged file is gone, or written to: %v", err)
	}
	for range 2 { // from the damaged file, then from what was saved
		c = open(t, Options{Dir: dir})
		wantWho(t, c, "d61", "u61")
		wantWho(t, c, "d60", "not ready")
		wantWho(t, c, "d3", "u3") // from the overlay: its newest version is bad
		if s := c.Dataset(Users).Status(); s.Complete || !s.Transferring {
			t.Errorf("status %+v", s)
		}
		closeCache(t, c)
	}
}

func TestTwoStartsWithoutReady(t *testing.T) {
	dir := t.TempDir()
	_, state := sample(t, dir)
	reopen := func() *Cache {
		t.Helper()
		c, err := Open(Options{Dir: dir, Guard: GuardOptions{Share: 1}})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	twoGenerations(t, dir, state)
	c := reopen()
	d := c.Dataset(Users)
	delta(t, d, put("poison", user("poison-pc")))
	closeCache(t, c)
	c = reopen()
	wantWho(t, c, "poison-pc", "poison")
	closeCache(t, c)
	c = reopen() // the second: two starts did not become ready
	wantWho(t, c, "poison-pc", "unknown")
	if r := c.Dataset(Users).Status().Revision; r != state.revision {
		t.Errorf("revision %d, want the predecessor's %d", r, state.revision)
	}
	if err := c.Ready(); err != nil {
		t.Fatal(err)
	}
	closeCache(t, c)
	c = reopen()
	wantWho(t, c, "poison-pc", "unknown")
	closeCache(t, c)
}

// A disk that fails changes nothing for users, is said plainly, and is made good when it works again.
func TestDiskFails(t *testing.T) {
	for _, step := range []string{"commit", "checkpoint", "sync", "verify", "rename"} {
		t.Run(step, func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				var failing atomic.Bool
				full := errors.New("no space left on device")
				c, err := Open(Options{Dir: dir, Guard: GuardOptions{Share: 1}, fault: func(s string) error {
					if failing.Load() && s == step {
						return full
					}
					return nil
				}})
				if err != nil {
					t.Fatal(err)
				}
				defer func() { c.Close() }()
				failing.Store(step != "commit")
				d := begin(t, c.Dataset(Users))
				delta(t, d, put("a", user("a-pc")))
				onDisk := uint64(0)
				if step == "commit" { // the others are steps of the first file
					if err := d.Flush(context.Background()); err != nil {
						t.Fatal(err)
					}
					onDisk = 1
				}
				failing.Store(true)
				delta(t, d, put("b", user("b-pc")), gone("a"))
				if err := d.Flush(context.Background()); !errors.Is(err, full) {
					t.Fatalf("Flush says %v", err)
				}
				wantWho(t, c, "b-pc", "b")
				wantWho(t, c, "a-pc", "unknown")
				if s := d.Status(); !s.Unpersisted || s.PersistedRevision != onDisk || s.Revision != 3 || s.DiskError == "" {
					t.Errorf("status %+v", s)
				}
				// More than can wait is dropped in favour of a checkpoint.
				d.mu.Lock()
				d.disk.queued = maxFailing
				d.mu.Unlock()
				delta(t, d, put("c", user("c-pc")))
				d.mu.Lock()
				d.disk.close(d)
				d.mu.Unlock()
				failing.Store(false)
				time.Sleep(time.Minute)
				synctest.Wait()
				if s := d.Status(); s.Unpersisted || s.PersistedRevision != 4 {
					t.Errorf("a minute after the disk works again %+v", s)
				}
				root := d.Root()
				closeCache(t, c)
				c, err = Open(Options{Dir: dir})
				if err != nil {
					t.Fatal(err)
				}
				if c.Dataset(Users).Root() != root {
					t.Error("changes are lost")
				}
				closeCache(t, c)
			})
			if tmp, _ := filepath.Glob(filepath.Join(dir, "*.tmp")); len(tmp) != 0 {
				t.Errorf("left behind: %v", tmp)
			}
		})
	}
}

// A file cut short under bbolt's mapping faults in the writer, which goes on with a new file.
func TestFileCutWhileInUse(t *testing.T) {
	dir := t.TempDir()
	path, state := sample(t, dir)
	c := open(t, Options{Dir: dir, Guard: GuardOptions{Share: 1}})
	d := c.Dataset(Users)
	if err := os.Truncate(path, 8192); err != nil {
		t.Fatal(err)
	}
	state.change(put("late", user("late-pc")))
	if _, err := d.ApplyDelta(context.Background(), testID, state.since(state.revision-1, state.revision), day); err != nil {
		t.Fatal(err)
	}
	for d.Flush(context.Background()) != nil { // fails until the new file is there
		d.mu.RLock()
		progress := d.disk.progress
		failing := d.disk.failing
		d.mu.RUnlock()
		if failing != nil {
			<-progress
		}
	}
	wantWho(t, c, "late-pc", "late")
	if c.RecoveredPanics() == 0 {
		t.Error("there was no fault to recover from")
	}
	closeCache(t, c)
	c = open(t, Options{Dir: dir})
	if got := c.Dataset(Users).Root(); got != state.tree.Root() {
		t.Error("the new file is not the state")
	}
}

func TestForeignFiles(t *testing.T) {
	t.Run("in use", func(t *testing.T) {
		c := open(t, Options{})
		if _, err := Open(Options{Dir: c.opts.Dir}); err == nil || !strings.Contains(err.Error(), "in use by another process") {
			t.Errorf("a second cache: %v", err)
		}
	})
	change := func(t *testing.T, f func(m *storev1.Meta)) (path string, err error) {
		dir := t.TempDir()
		path, _ = sample(t, dir)
		db, err := bolt.Open(path, 0o600, nil)
		if err != nil {
			t.Fatal(err)
		}
		err = db.Update(func(tx *bolt.Tx) error {
			m := new(storev1.Meta)
			sealed, ok := unseal(bucketMeta, keyMeta, tx.Bucket(bucketMeta).Get(keyMeta))
			if !ok {
				return errors.New("meta is not sealed")
			}
			if err := proto.Unmarshal(sealed, m); err != nil {
				return err
			}
			f(m)
			v, err := proto.Marshal(m)
			if err != nil {
				return err
			}
			return tx.Bucket(bucketMeta).Put(keyMeta, seal(nil, bucketMeta, keyMeta, v))
		})
		if err := errors.Join(err, db.Close()); err != nil {
			t.Fatal(err)
		}
		before, _ := os.ReadFile(path)
		c, err := Open(Options{Dir: dir})
		if err == nil {
			c.Close()
		}
		if after, _ := os.ReadFile(path); !bytes.Equal(before, after) {
			t.Error("the file was written")
		}
		return path, err
	}
	t.Run("newer", func(t *testing.T) {
		path, err := change(t, func(m *storev1.Meta) { m.Format = 2 })
		if !errors.Is(err, ErrNewerFormat) {
			t.Errorf("Open says %v", err)
		}
		if _, err := Verify(path); !errors.Is(err, ErrNewerFormat) {
			t.Errorf("Verify says %v", err)
		}
	})
	t.Run("another kind", func(t *testing.T) {
		if _, err := change(t, func(m *storev1.Meta) { m.Kind = "catalogue" }); err == nil || !strings.Contains(err.Error(), "move it away") {
			t.Errorf("Open says %v", err)
		}
	})
}

func TestRepairFile(t *testing.T) {
	dir := t.TempDir()
	path, state := sample(t, dir)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	victim := state.records["u60"].Bytes
	for at := bytes.Index(b, victim); at >= 0; at = bytes.Index(b, victim) {
		b[at+2] ^= 4
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := Verify(path)
	if err != nil || r.Whole || len(r.Faults) == 0 || !strings.Contains(strings.Join(r.Faults, "\n"), `"u60"`) {
		t.Fatalf("Verify: %+v, %v", r, err)
	}
	to := path + ".repaired"
	if r, err = RepairFile(path, to); err != nil || r.Whole {
		t.Fatalf("RepairFile: %+v, %v", r, err)
	}
	after, _ := os.ReadFile(path)
	if !bytes.Equal(after, b) {
		t.Error("the damaged file was written")
	}
	if r, err = Verify(to); err != nil || !r.Whole || r.Good != uint64(len(state.records)-1) || r.Identity != testID || r.Overlay != 1 {
		t.Errorf("the repaired file: %+v, %v", r, err)
	}
	stop := errors.New("stop")
	n := 0
	if _, err := ReadFile(to, func(r Record) error {
		if n++; n == 9 {
			return stop
		}
		return nil
	}); err != stop || n != 9 {
		t.Errorf("ReadFile went on for %d records, and says %v", n, err)
	}
	if _, err := RepairFile(path, to); err == nil {
		t.Error("an existing file was overwritten")
	}
	// Put in place, it is served, known to be incomplete, and completed by what is missing alone.
	if err := os.Rename(to, path); err != nil {
		t.Fatal(err)
	}
	c := open(t, Options{Dir: dir, Guard: GuardOptions{Share: 1}})
	d := c.Dataset(Users)
	wantWho(t, c, "d61", "u61")
	wantWho(t, c, "d60", "not ready")
	state.repair(t, d, false, func() {})
	wantWho(t, c, "d60", "u60")
	if d.Root() != state.tree.Root() || !d.Status().Complete {
		t.Errorf("after repair %+v", d.Status())
	}
}

// Changes that arrive while a checkpoint is written are in it.
func TestChangesDuringCheckpoint(t *testing.T) {
	dir := t.TempDir()
	var c *Cache
	state := newService()
	step := 0
	calls := 0 // of the writer
	var busy atomic.Bool
	var mu sync.Mutex // state is changed by the test and by the writer's steps
	o := Options{Dir: dir, Guard: GuardOptions{Share: 1}, GroupChanges: 5, CheckpointEvery: 1}
	apply := func(n int) {
		mu.Lock()
		defer mu.Unlock()
		d := c.Dataset(Users)
		for range n {
			step++
			state.change(put(fmt.Sprintf("u%d", step%70), user(fmt.Sprintf("d%d", step))))
			if step%3 == 0 {
				state.change(gone(fmt.Sprintf("u%d", (step*7)%70)))
			}
			if step%5 == 0 {
				state.change(bad(fmt.Sprintf("u%d", (step*11)%70)))
			}
			if _, err := d.ApplyDelta(context.Background(), testID, state.since(d.Status().Revision, state.revision), day); err != nil {
				t.Error(err)
			}
		}
	}
	o.fault = func(s string) error {
		if busy.Load() {
			busy.Store(s != "verify")
			if calls++; calls%32 == 1 || s != "commit" {
				apply(12)
			}
		}
		return nil
	}
	c = open(t, o)
	d := begin(t, c.Dataset(Users))
	for range 4 {
		apply(50)
		before := d.Status().Generation
		busy.Store(true)
		apply(1)
		waitFor(d, func(s DatasetStatus) bool { return s.Generation > before })
	}
	if s := d.Status(); s.Generation < 3 || calls < 4 {
		t.Errorf("generation %d after %d steps: there was no checkpoint to disturb", s.Generation, calls)
	}
	closeCache(t, c)
	o.fault = nil
	c = open(t, o)
	d = c.Dataset(Users)
	if s := d.Status(); s.Revision != state.revision || d.Root() != state.tree.Root() {
		t.Errorf("revision %d of %d, same root: %v", s.Revision, state.revision, d.Root() == state.tree.Root())
	}
}
