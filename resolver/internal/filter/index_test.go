package filter

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// indexLists has a rule of every kind that a file keeps in its own way.
var indexLists = map[int]string{
	0: "||a.example^\n@@||ok.a.example^\n0.0.0.0 h.example\n192.0.2.7 i.example\nfe80::1%lo0 z.example\n",
	7: "||a.example^$important\n||twin.example^\n-tracker-\n/^re[0-9]+\\./\n||c.example^$client='My \xff Phone'|10.0.0.0/8|~2001:db8::/32\n" +
		"||t.example^$dnstype=A|AAAA,ctag=pc|~tv\n*$denyallow=example|com,dnstype=HTTPS\n",
	511: "||twin.example^$badfilter\n/^re[0-9]+\\./$badfilter\n-other-\n||rw.example^$dnsrewrite=NOERROR;MX;10 mail.example\n||rw.example^$dnsrewrite=192.0.2.1\n" +
		"@@||rw.example^$dnsrewrite=192.0.2.1\n||nx.example^$dnsrewrite=NXDOMAIN\n||cn.example^$dnsrewrite=b.example\n",
}

var indexQueries = []string{"x.a.example A", "ok.a.example A", "h.example A", "i.example A", "z.example AAAA", "twin.example A", "x-tracker-y A",
	"re12.example A", "c.example A 10.1.2.3", "c.example A 192.0.2.1", "t.example A #pc", "t.example A #tv", "x.org HTTPS", "x.com HTTPS", "x-other-y.org A",
	"rw.example MX", "rw.example A", "nx.example A", "cn.example A", "nothing.example A"}

func indexMatcher(t testing.TB) (*Matcher, *[MaxLists]ID) {
	var m *Matcher
	ids := new([MaxLists]ID)
	for _, n := range []int{0, 7, 511} {
		b := NewBuilder(&testKey)
		if _, err := b.Add(n, strings.NewReader(indexLists[n])); err != nil {
			t.Fatal(err)
		}
		m = b.Build(m)
		sum := sha256.Sum256([]byte(indexLists[n]))
		copy(ids[n][sha256.Size:], sum[:])
	}
	return m, ids
}

// reloaded is m written and read, without a disk.
func reloaded(t testing.TB, m *Matcher) *Matcher {
	head, parts, err := m.image(new([MaxLists]ID))
	if err != nil {
		t.Fatal(err)
	}
	body := bytes.Join(parts, nil)
	mem := newRegion(len(body) / 8)
	copy(castSlice[byte](mem.words), body)
	loaded, _, err := decode(m.key, head[indexHead:], mem)
	if err != nil {
		t.Fatal(err)
	}
	return loaded
}

// A Matcher read from a file answers as the one written did, can be built upon, and knows its lists.
func TestIndex(t *testing.T) {
	m, ids := indexMatcher(t)
	path := filepath.Join(t.TempDir(), "index")
	if err := m.Save(path, ids); err != nil {
		t.Fatal(err)
	}
	l, gotIDs, err := Load(path, &testKey)
	if err != nil {
		t.Fatal(err)
	}
	if *gotIDs != *ids || l.Lists() != m.Lists() || l.Stats().Rules != m.Stats().Rules || l.Overlays() != 2 {
		t.Errorf("ids equal %v, lists %v, %+v, want %+v", *gotIDs == *ids, l.Lists(), l.Stats(), m.Stats())
	}
	verdicts := map[string]bool{}
	same := func(what string, a, b *Matcher) {
		t.Helper()
		for _, lists := range []*Set{nil, {1}, {1 << 7}} {
			for _, q := range indexQueries {
				want, got := judge(t, a, lists, q), judge(t, b, lists, q)
				if got != want {
					t.Errorf("%s: %s is %s, want %s", what, q, got, want)
				}
				verdicts[strings.Fields(got)[0]] = true
			}
		}
		// A name that no text can be: a client's name as it was written.
		q := &Query{Type: 1, Client: "My \xff Phone"}
		if r := b.Match([]byte(dnsname.MustParse("c.example.")), nil, q); r.Verdict != Blocked {
			t.Errorf("%s: the client's name is lost", what)
		}
	}
	same("loaded", m, l)
	if len(verdicts) != 4 {
		t.Errorf("only %v: the test does not test", verdicts)
	}
	same("merged", m, l.Merge(nil))
	if err := l.Save(path, gotIDs); err != nil {
		t.Fatal(err)
	}
	again, _, err := Load(path, &testKey)
	if err != nil {
		t.Fatal(err)
	}
	same("loaded again", m, again)
	for _, old := range []*Matcher{m, l} {
		b := NewBuilder(&testKey)
		b.Remove(511)
		next := b.Build(old)
		if got := judge(t, next, nil, "twin.example A"); got != "blocked 2" {
			t.Errorf("without the list of the $badfilter: %s", got)
		}
		if got := judge(t, next, nil, "x-other-y.org A"); got != "none" {
			t.Errorf("a pattern of a removed list: %s", got)
		}
	}
	left, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(left) != 1 {
		t.Errorf("files %v, %v", left, err)
	}
}

// Whatever is wrong with a file, it is told from a good one, and the error says what it is.
func TestIndexDamaged(t *testing.T) {
	m, ids := indexMatcher(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "index")
	if _, _, err := Load(path, &testKey); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	if err := m.Save(path, ids); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// A pipe that nobody writes to would hold up the start for ever.
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, odd := range []string{dir, pipe, "/dev/zero"} {
		if _, _, err := Load(odd, &testKey); err == nil || !strings.Contains(err.Error(), "not a regular file") {
			t.Errorf("%s: %v", odd, err)
		}
	}
	load := func(b []byte, key *dnsname.Key) error {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		_, _, err := Load(path, key)
		return err
	}
	if err := load(good, &testKey); err != nil {
		t.Fatal(err)
	}
	if err := load(good, &dnsname.Key{K0: 1}); err == nil || !strings.Contains(err.Error(), "another hash key") {
		t.Errorf("another key: %v", err)
	}
	for n := 0; n < len(good); n += 1 + n/20 {
		if load(good[:n], &testKey) == nil {
			t.Fatalf("the first %d bytes pass for the file", n)
		}
	}
	if load(append(slices.Clone(good), 0), &testKey) == nil {
		t.Error("a byte more passes")
	}
	for i := 0; i < len(good); i += 1 + i/50 {
		b := slices.Clone(good)
		b[i] ^= 1 << (i % 8)
		if load(b, &testKey) == nil {
			t.Fatalf("with byte %d changed it passes", i)
		}
	}
	// Half a file, which a process that was killed had not finished, does not stay.
	for range 2 {
		if err := os.WriteFile(path+".new", good[:len(good)/2], 0o600); err != nil {
			t.Fatal(err)
		}
		if err := m.Save(path, ids); err != nil {
			t.Fatal(err)
		}
	}
	// Nowhere to write to: nothing is left behind, and the old file stays.
	if err := load(good, &testKey); err != nil {
		t.Fatal(err)
	}
	if err := m.Save(filepath.Join(dir, "nowhere", "index"), ids); err == nil {
		t.Error("saved into a folder that is not there")
	}
	if err := os.Mkdir(filepath.Join(dir, "taken"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := m.Save(filepath.Join(dir, "taken"), ids); err == nil {
		t.Error("saved in place of a folder")
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*.*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// FuzzIndex changes the inside of a file, its code made right again: what decode takes can be matched with.
func FuzzIndex(f *testing.F) {
	m, ids := indexMatcher(f)
	head, parts, err := m.image(ids)
	if err != nil {
		f.Fatal(err)
	}
	pre, body := head[indexHead:], bytes.Join(parts, nil)
	f.Add(pre, body)
	var small preamble
	if err := json.Unmarshal(pre, &small); err != nil {
		f.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		b := slices.Clone(body)
		for range 1 + r.IntN(4) {
			b[r.IntN(len(b))] ^= 1 << r.IntN(8)
		}
		f.Add(pre, b)
	}
	f.Fuzz(func(t *testing.T, pre, body []byte) {
		if len(body)%8 != 0 {
			return
		}
		mem := newRegion(len(body) / 8)
		copy(castSlice[byte](mem.words), body)
		m, _, err := decode(&testKey, pre, mem)
		if err != nil {
			return
		}
		for _, q := range indexQueries {
			judge(t, m, nil, q)
		}
		next := NewBuilder(&testKey).Build(m).Merge(nil)
		judge(t, next, nil, "a.example A")
		runtime.KeepAlive(m)
	})
}

// The 19 lists: what a restart saves.
func BenchmarkIndex(b *testing.B) {
	files := listFiles(b, "main")
	bl := NewBuilder(&testKey)
	for i, f := range files {
		if _, err := bl.Add(i, bytes.NewReader(f.Text)); err != nil {
			b.Fatal(err)
		}
	}
	m := bl.Build(nil)
	path := filepath.Join(b.TempDir(), "index")
	b.Run("save", func(b *testing.B) {
		perOp(b, func(int) {
			if err := m.Save(path, new([MaxLists]ID)); err != nil {
				b.Fatal(err)
			}
		})
	})
	b.Run("load", func(b *testing.B) {
		perOp(b, func(int) {
			if _, _, err := Load(path, &testKey); err != nil {
				b.Fatal(err)
			}
		})
	})
	info, err := os.Stat(path)
	if err != nil {
		b.Fatal(err)
	}
	b.Logf("%.1f MB", float64(info.Size())/1e6)
}
