package policy

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// TestListsWait changes more lists at once than there is memory for: each is judged by its old version or its new one,
// never by none, the catalogue is not called present before all are new, and soon all are.
func TestListsWait(t *testing.T) {
	defer func(n int64) { smallIndex = n }(smallIndex)
	smallIndex = 0
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		const lists = 6
		text := func(version string, list int) string {
			var b strings.Builder
			for i := range 200 {
				fmt.Fprintf(&b, "||n%d.%s%d.example^\n", i, version, list)
			}
			return b.String()
		}
		all := func(version string) {
			records := map[string]proto.Message{}
			for i := range lists {
				text := text(version, i)
				records[fmt.Sprint("list/l", i)] = &userv1.List{Number: uint32(i), Sha256: w.blob(text), Size: uint64(len(text))}
			}
			w.putAll(usercache.CatalogueKind, records)
		}
		var ids []string
		for i := range lists {
			ids = append(ids, fmt.Sprint("l", i))
		}
		w.put(usercache.Users, "u", &userv1.User{Settings: &userv1.Settings{Lists: set(ids...)}, Devices: []*userv1.Device{{Id: "d"}}})
		all("old")
		path := filepath.Join(t.TempDir(), "index")
		changed := make(chan struct{}, 1)
		start := func() (p *Policy, stop func()) {
			p = New(Options{Key: dnsname.NewKey([16]byte{7}), Users: w.cache, Blob: w.get, Index: path, Changed: changed, Logger: slog.New(slog.DiscardHandler)})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- p.Run(ctx) }()
			return p, func() { cancel(); <-done }
		}
		p, stop := start()
		if present, _ := p.Serving(); !present {
			t.Fatal("a first start has nothing to wait for")
		}
		blocked := func(version string, list int) bool {
			return p.Question(w.ask(p, "d", fmt.Sprintf("n7.%s%d.example.", version, list), "A")).Kind == query.Blocked
		}
		// isNew counts the lists whose new version judges.
		isNew := func() (n int) {
			t.Helper()
			for i := range lists {
				if blocked("new", i) == blocked("old", i) {
					t.Errorf("list %d: both versions judge, or neither", i)
				}
				if blocked("new", i) {
					n++
				}
			}
			return n
		}
		time.Sleep(2 * savePause)
		early := w.ask(p, "d", "n7.old0.example.", "A")
		all("new")
		changed <- struct{}{}
		synctest.Wait()
		have, rounds := isNew(), 0
		for ; have < lists && rounds < lists; rounds++ {
			if present, _ := p.Serving(); present || have == 0 {
				t.Errorf("%d of %d lists are new, present: %v", have, lists, present)
			}
			if got := p.Question(early); (rounds == 0) != (got.Kind == query.Blocked) {
				t.Errorf("round %d: a query of before is %s", rounds, say(got))
			}
			time.Sleep(savePause + time.Second)
			synctest.Wait()
			n := isNew()
			if n <= have {
				t.Fatalf("after another while %d lists are new, %d were", n, have)
			}
			have = n
		}
		if rounds < 2 {
			t.Errorf("all were new after %d rounds: the test does not test", rounds)
		}
		if present, revision := p.Serving(); !present || revision != p.state.Load().catalogue.Revision {
			t.Errorf("all are new: present %v, revision %d", present, revision)
		}
		// A list whose number goes to another is never judged by what it was, even while the new one waits.
		other := text("other", 0)
		records := map[string]proto.Message{"list/l0": nil, "list/o": &userv1.List{Number: 0, Sha256: w.blob(other), Size: uint64(len(other))}}
		for i := 1; i < lists; i++ {
			text := text("old", i)
			records[fmt.Sprint("list/l", i)] = &userv1.List{Number: uint32(i), Sha256: w.blob(text), Size: uint64(len(text))}
		}
		w.putAll(usercache.CatalogueKind, records)
		w.put(usercache.Users, "u", &userv1.User{Settings: &userv1.Settings{Lists: set(append(ids, "o")...)}, Devices: []*userv1.Device{{Id: "d"}}})
		changed <- struct{}{}
		synctest.Wait()
		for blocked("old", 1) != true || !blocked("other", 0) || !blocked("old", 5) {
			if blocked("new", 0) {
				t.Fatal("a list that is gone judges")
			}
			if rounds++; rounds > 3*lists {
				t.Fatal("the lists never came")
			}
			time.Sleep(savePause + time.Second)
			synctest.Wait()
		}
		time.Sleep(2 * savePause)
		stop()
		// What was written is all of it.
		w.mu.Lock()
		clear(w.blobs)
		w.mu.Unlock()
		p, stop = start()
		defer stop()
		if present, _ := p.Serving(); !present || !blocked("other", 0) || !blocked("old", 5) || blocked("new", 5) {
			t.Error("a restart does not have what there was")
		}
	})
}

// TestListsPeak runs through all that can happen to the 19 lists of a running resolver, with a query of before that
// nobody ends: at no time does the process have more than one and a half times the memory of the index that it is left
// with. It looks at what the system gave the process.
func TestListsPeak(t *testing.T) {
	if !*long {
		t.Skip("two million rules: with -long")
	}
	if _, err := os.ReadFile("/proc/self/clear_refs"); errors.Is(err, fs.ErrNotExist) {
		t.Skip("the system does not measure peaks")
	}
	const alone = "SLUICE_TEST_LISTS_PEAK" // what tests before leave in the heap would count
	if os.Getenv(alone) == "" {
		c := exec.Command(os.Args[0], "-test.run=^TestListsPeak$", "-test.v", "-long")
		c.Env = append(os.Environ(), alone+"=1")
		out, err := c.CombinedOutput()
		t.Logf("%s", out)
		if err != nil {
			t.Error(err)
		}
		return
	}
	dir, names := mainLists(t)
	defer debug.SetGCPercent(debug.SetGCPercent(10)) // garbage that the runtime lets lie is not ours
	w := newWorld(t)
	files := map[[32]byte]string{}
	// put makes new versions of some lists, which say what they said.
	version := 0
	record := func(i int) (string, proto.Message) {
		version++
		sum := sha256.Sum256(fmt.Append(nil, version))
		files[sum] = filepath.Join(dir, names[i]+".gz")
		z := openGzip(t, files[sum])
		size, err := io.Copy(io.Discard, z)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint("list/l", i), &userv1.List{Number: uint32(i), Sha256: sum[:], Size: uint64(size)}
	}
	put := func(lists ...int) {
		records := map[string]proto.Message{}
		for _, i := range lists {
			key, m := record(i)
			records[key] = m
		}
		w.putAll(usercache.CatalogueKind, records)
	}
	w.put(usercache.Users, "u", &userv1.User{Settings: &userv1.Settings{Lists: set("l0", "l8")}, Devices: []*userv1.Device{{Id: "d"}}})
	path := filepath.Join(t.TempDir(), "index")
	start := func() *Policy {
		return New(Options{Key: dnsname.NewKey([16]byte{7}), Users: w.cache, Index: path, Logger: slog.New(slog.DiscardHandler),
			OpenBlob: func(sum [32]byte) (io.ReadCloser, bool) { return openGzip(t, files[sum]), true }})
	}
	var p *Policy
	index := func() int64 {
		if p == nil {
			return 0
		}
		return p.Stats().Bytes
	}
	measure := func(what string, do func()) {
		t.Helper()
		var idle *query.Query
		if p != nil {
			idle = w.ask(p, "d", "www.example.", "A")
			p.Question(idle)
		}
		for range 3 {
			runtime.GC()
		}
		debug.FreeOSMemory()
		if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0o200); err != nil {
			t.Skip("the system does not measure peaks: ", err)
		}
		before, was := status(t, "VmRSS"), index()
		do()
		// It goes on as keep does.
		rounds := 1
		for ; ; rounds++ {
			p.merge()
			if p.state.Load().waiting == 0 {
				break
			}
			p.Update()
		}
		peak, is := status(t, "VmHWM")-(before-was), index()
		t.Logf("%s: an index of %.1f MB became one of %.1f MB in %d rounds; at most %.1f MB, %.2f times the greater",
			what, float64(was)/1e6, float64(is)/1e6, rounds, float64(peak)/1e6, float64(peak)/float64(max(was, is)))
		if most := max(was, is) * 3 / 2; peak > most {
			t.Errorf("%s took %d bytes, want at most %d", what, peak, most)
		}
		if !p.state.Load().isWhole() || p.Stats().Overlaid != 0 {
			t.Errorf("%s: not all is done", what)
		}
		if idle != nil {
			p.Question(idle)
		}
	}
	var all []int
	for i := range names {
		all = append(all, i)
	}
	warm := start() // what the process needs once
	put(all[:1]...)
	warm.Update()
	put(all[1:]...)
	measure("the first start", func() { p = start() })
	for _, i := range []int{0, 3, 8, 10} { // a big one, a small one, the one with the most patterns, and the biggest
		put(i)
		measure("changing "+names[i], func() { p.Update() })
	}
	put(0, 2, 9, 11)
	measure("changing four at once", func() { p.Update() })
	measure("changing five, one after the other", func() {
		for _, i := range []int{2, 9, 10, 11, 14} {
			put(i)
			p.Update()
		}
	})
	put(all...)
	measure("changing all at once", func() { p.Update() })
	w.putAll(usercache.CatalogueKind, map[string]proto.Message{"list/l8": nil, "list/l10": nil, "list/l11": nil})
	measure("removing three", func() { p.Update() })
	put(8, 10, 11)
	measure("adding three", func() { p.Update() })
	if !p.saveIndex() {
		t.Fatal("the index was not saved")
	}
	p = nil
	measure("a restart", func() { p = start() })
	put(all...)
	measure("changing all after a restart", func() { p.Update() })
	runtime.KeepAlive(warm)
}

// mainLists returns the 19 lists that resolvers are measured with, and where they are.
func mainLists(t *testing.T) (dir string, names []string) {
	root := os.Getenv("SLUICE_SHARED")
	if root == "" {
		root = filepath.Join("..", "..", "..", "..", "shared")
	}
	dir = filepath.Join(root, "data", "lists")
	files, _ := filepath.Glob(filepath.Join(dir, "*.txt.gz")) // the pattern is a good one
	for _, f := range files {
		switch name := strings.TrimSuffix(filepath.Base(f), ".gz"); name {
		case "easylist.txt", "easyprivacy.txt", "urlhaus_filter_online.txt", "blp_scam_dnsmasq.txt":
		default:
			names = append(names, name)
		}
	}
	if len(names) != 19 {
		t.Skipf("%d lists here: set SLUICE_SHARED to the folder that holds the 19", len(names))
	}
	return dir, names
}

func openGzip(t *testing.T, path string) io.ReadCloser {
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	return struct {
		io.Reader
		io.Closer
	}{z, f}
}

// status returns a line of /proc/self/status in bytes.
func status(t *testing.T, key string) int64 {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Skip(err)
	}
	for l := range bytes.Lines(b) {
		var n int64
		if _, err := fmt.Sscanf(string(l), key+": %d kB", &n); err == nil {
			return n << 10
		}
	}
	t.Skipf("no %s", key)
	return 0
}
