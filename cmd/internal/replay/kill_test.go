package replay

import (
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// A resolver is killed a hundred times while it writes a group of changes: after the first write of the group
// to the file, seen by inotify, and a random moment. It always starts from a whole state of some revision,
// complaining of nothing, and converges. How many kills fell between the first and the last write is known
// from the file: the last write of a bbolt transaction is its meta page, so the kill fell before it if the
// transaction number did not grow.
func TestKilledWhileWriting(t *testing.T) {
	kills := 5
	if *long {
		kills = 100
	}
	zones := siminternet.WithNames(siminternet.StandardZones(), netip.MustParseAddr("127.53.9.1"), netip.MustParseAddr(siteAddr), "even.switch.com", "odd.switch.com")
	w := newWorld(t, 1, zones)
	r := w.resolvers[0]
	data := adminv1.NewDataServiceClient(w.conn)
	// change gives three hundred users new rules; the last of them is who asks below.
	const users = 300
	change := func(k int) {
		t.Helper()
		req := &adminv1.ImportRequest{Id: fmt.Sprintf("import-%d", k), FirstLine: 1}
		blocked := []string{"even", "odd"}[k%2]
		for u := range users {
			device := ""
			if u == users-1 {
				device = `,"devices":[{"id":"dev","links":["127.0.0.2"]}]`
			}
			rules := fmt.Sprintf("||%s.switch.com^\n! change %d", blocked, k)
			req.Lines = append(req.Lines, fmt.Appendf(nil, `{"user":{"id":"user-%d","rules":{"text":"%s"}%s}}`, u, base64.StdEncoding.EncodeToString([]byte(rules)), device))
		}
		if _, err := data.Import(t.Context(), req); err != nil {
			t.Fatal(err)
		}
	}
	converged := func(k int) bool {
		ask := udpFrom("127.0.0.2", r.udp)
		even, odd := judge(ask("even.switch.com.", dns.TypeA)), judge(ask("odd.switch.com.", dns.TypeA))
		return k%2 == 0 && even == "blocked" && odd == "passed" || k%2 == 1 && even == "passed" && odd == "blocked"
	}
	change(0)
	until(t, func() bool { return converged(0) })

	between := 0
	for k := 1; k <= kills || between == 0 && k <= 100; k++ { // a busy machine may let the whole group pass, time and again
		file := newest(t, filepath.Join(w.dir, "resolver0", "users"), "users-*.db")
		quiet(t, file)
		before := txid(t, file)
		writes := watch(t, file)
		change(k)
		writes.wait()
		spin(time.Duration(rand.Int64N(int64(4 * time.Millisecond))))
		r.kill()
		writes.close()
		if txid(t, file) == before {
			between++
		}
		w.startResolver(r)
		until(t, func() bool { return converged(k) })
		r.mu.Lock()
		for _, l := range r.lines {
			if strings.Contains(l, "level=ERROR") || strings.Contains(l, "damaged") || strings.Contains(l, "salvage") || strings.Contains(l, "diverged") {
				t.Errorf("kill %d: the next start says: %s", k, l)
			}
		}
		r.mu.Unlock()
	}
	t.Logf("%d kills, %d of them between the first and the last write of a group", kills, between)
	if between == 0 {
		t.Error("no kill fell between the first and the last write: the test has lost its aim")
	}
}

// newest returns the file of the highest generation.
func newest(t *testing.T, dir, pattern string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(files) == 0 {
		t.Fatalf("%s in %s: %v, %v", pattern, dir, files, err)
	}
	return files[len(files)-1] // generations are of one width
}

// txid reads the greater transaction number of the two meta pages of a bbolt file.
func txid(t *testing.T, file string) uint64 {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var most uint64
	for page := range int64(2) {
		var b [8]byte
		if _, err := f.ReadAt(b[:], page*4096+64); err != nil {
			t.Fatal(err)
		}
		most = max(most, binary.LittleEndian.Uint64(b[:]))
	}
	return most
}

// quiet waits until a file has not been written for a while: what is pending is on disk.
func quiet(t *testing.T, file string) {
	t.Helper()
	last, since := txid(t, file), time.Now()
	until(t, func() bool {
		if now := txid(t, file); now != last {
			last, since = now, time.Now()
		}
		return time.Since(since) > 600*time.Millisecond
	})
}

// spin waits without giving up the processor, for moments shorter than a scheduler's.
func spin(d time.Duration) {
	for start := time.Now(); time.Since(start) < d; {
	}
}

// writes tells of writes to a file.
type writes struct {
	t  *testing.T
	fd int
}

func watch(t *testing.T, file string) *writes {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := unix.InotifyAddWatch(fd, file, unix.IN_MODIFY); err != nil {
		t.Fatal(err)
	}
	return &writes{t, fd}
}

func (w *writes) wait() {
	w.t.Helper()
	p := []unix.PollFd{{Fd: int32(w.fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(p, int(patience/time.Millisecond))
		if err == syscall.EINTR {
			continue
		}
		if err != nil || n == 0 {
			w.t.Fatalf("no write came: %v", err)
		}
		var b [unix.SizeofInotifyEvent * 64]byte
		unix.Read(w.fd, b[:])
		return
	}
}

func (w *writes) close() { unix.Close(w.fd) }
