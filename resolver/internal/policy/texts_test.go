package policy

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/usercache"
)

// A user's list that has changed and not arrived is judged by the one before after a restart too, whether the process
// ended in peace or was killed while it was on its way, until it arrives. A device that has another user meanwhile is not
// judged by what it had in the hands of the one before.
func TestTextsOutliveRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		put := func(user, device, text string) {
			w.put(usercache.Users, user, &userv1.User{Devices: []*userv1.Device{{Id: device}}, Settings: &userv1.Settings{
				OwnLists: &userv1.OwnListSet{Values: []*userv1.OwnList{{Id: "mine", Sha256: w.blob(text), Size: uint64(len(text))}}}}})
		}
		path := filepath.Join(t.TempDir(), "own.texts")
		var log logText
		start := func() (p *Policy, stop func()) {
			p = New(Options{Key: dnsname.NewKey([16]byte{7}), Users: w.cache, Blob: w.get, OwnTexts: path, Logger: slog.New(slog.NewTextHandler(&log, nil))})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- p.Run(ctx) }()
			return p, func() {
				cancel()
				<-done
				if err := w.cache.Close(); err != nil { // with it goes what was compiled
					t.Error(err)
				}
				w.open()
			}
		}
		check := func(when string, p *Policy, device, name, want string) {
			t.Helper()
			if got := say(p.Question(w.ask(p, device, name, "A"))); got != want {
				t.Errorf("%s: %s asks for %s: %s, want %s", when, device, name, got, want)
			}
		}
		const blocked, pass = "blocked by own list mode 0", "pass by nothing"
		// underway puts a list that is not here before arrive is called.
		underway := func(user, device, text string) (arrive func()) {
			put(user, device, text)
			sum := sha256.Sum256([]byte(text))
			w.mu.Lock()
			defer w.mu.Unlock()
			delete(w.blobs, sum)
			return func() { w.blob(text) }
		}
		put("ann", "pc", "||one.example^")
		put("ben", "tv", "||ben.example^")
		p, stop := start()
		check("at first", p, "pc", "one.example.", blocked)
		check("at first", p, "tv", "ben.example.", blocked)
		stop()

		arrive := underway("ann", "pc", "||two.example^") // nobody asks before the restart
		p, stop = start()
		check("after a restart", p, "pc", "one.example.", blocked)
		check("after a restart", p, "pc", "two.example.", pass)
		stop()

		arrive()
		p, stop = start()
		check("arrived", p, "pc", "one.example.", pass)
		check("arrived", p, "pc", "two.example.", blocked)
		underway("ann", "pc", "||three.example^")
		check("on its way", p, "pc", "two.example.", blocked)
		for range 2 * int(savePause/time.Second) { // and other texts arrive all the while
			time.Sleep(time.Second)
			synctest.Wait()
			p.Update()
			check("on its way", p, "pc", "two.example.", blocked)
		}
		killed, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		stop()
		for name, text := range map[string][]byte{path: killed, path + ".new": killed[:len(killed)/2]} {
			if err := os.WriteFile(name, text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		p, stop = start()
		check("after it was killed", p, "pc", "two.example.", blocked)
		check("after it was killed", p, "pc", "three.example.", pass)

		w.remove(usercache.Users, "ben")
		underway("cat", "tv", "||cat.example^")
		check("another's device", p, "tv", "ben.example.", pass)
		stop()
		if left, _ := filepath.Glob(path + "?*"); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}

		// What is damaged is told, and leaves what stands before it.
		if err := os.WriteFile(path, append(killed, `{"User":"x`...), 0o600); err != nil {
			t.Fatal(err)
		}
		log.Reset()
		p, stop = start()
		check("with a damaged file", p, "pc", "two.example.", blocked)
		stop()
		if strings.Count(log.String(), "level=WARN") != 1 {
			t.Errorf("of a damaged file: %s", log.String())
		}
	})
}

// Whatever the file holds, it is read or refused, and what is read is written again.
func FuzzKeptTexts(f *testing.F) {
	f.Add(`{"User":"ann","Device":"pc","Texts":{"own list mine":"` + strings.Repeat("0a", 32) + `"}}` + "\n")
	f.Add(`{"User":"","Device":"pc"}`)
	f.Add(`{"User":"ann","Device":"pc","Texts":{"x":"0a"}}`)
	f.Fuzz(func(t *testing.T, text string) {
		var a, b compiled
		a.init(1 << 20)
		b.init(1 << 20)
		_ = a.read(strings.NewReader(text))
		lines := a.keptTexts()
		var again bytes.Buffer
		for _, k := range lines {
			if err := json.NewEncoder(&again).Encode(k); err != nil {
				t.Fatal(err)
			}
		}
		if err := b.read(&again); err != nil {
			t.Fatalf("%+v: %v", lines, err)
		}
		if got := b.keptTexts(); !reflect.DeepEqual(got, lines) {
			t.Errorf("%+v, then %+v", lines, got)
		}
	})
}
