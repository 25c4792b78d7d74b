package syncclient

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/syncclient/internal/fakesync"
	"github.com/sluice-dns/sluice/usercache"
)

// A rig is a resolver's sync side with a service, in a bubble.
type rig struct {
	t       *testing.T
	dir     string
	service *fakesync.Server
	cache   *usercache.Cache
	client  *Client
	opts    Options
	log     *logged
}

// bubble runs a test of one resolver and one service, and checks that nothing is left running.
func bubble(t *testing.T, test func(r *rig)) {
	t.Helper()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, dir: dir, service: fakesync.New(), log: &logged{}}
		r.service.Start()
		defer func() {
			r.stop()
			r.service.Stop()
		}()
		test(r)
	})
}

// start opens the cache and runs a client.
func (r *rig) start() {
	r.t.Helper()
	var err error
	if r.cache, err = usercache.Open(usercache.Options{Dir: filepath.Join(r.dir, "users"), GroupDelay: time.Millisecond}); err != nil {
		r.t.Fatal(err)
	}
	o := r.opts
	o.Cache, o.DataDir, o.Logger = r.cache, filepath.Join(r.dir, "sync"), slog.New(r.log)
	if o.Services == nil {
		o.Services, o.Dial = []string{"inprocess:service"}, r.service.Dial
	}
	o.Node = Node{ID: "node-1", Region: "here", Version: "test"}
	if r.client, err = New(o); err != nil {
		r.t.Fatal(err)
	}
	go func() { _ = r.client.Run(r.t.Context()) }()
}

func (r *rig) stop() {
	r.t.Helper()
	if r.client == nil {
		return
	}
	r.client.Close()
	if err := r.cache.Close(); err != nil {
		r.t.Error(err)
	}
	r.client, r.cache = nil, nil
}

func (r *rig) restart() { r.stop(); r.start() }

// until waits until something is so, at most for a time of the bubble's.
func (r *rig) until(what string, limit time.Duration, so func() bool) {
	r.t.Helper()
	begun := time.Now()
	for end := begun.Add(limit); ; time.Sleep(10*time.Millisecond + min(time.Since(begun)/10, time.Second)) {
		synctest.Wait()
		if so() {
			return
		}
		if time.Now().After(end) {
			r.t.Fatalf("after %v still not: %s\nstatus: %+v\nlog:\n%s", limit, what, r.client.Status(), r.log)
		}
	}
}

// fresh waits until all datasets are fresh and equal to the service's.
func (r *rig) fresh(limit time.Duration) {
	r.t.Helper()
	r.until("fresh and equal", limit, func() bool { return r.client.Status().State == Fresh && r.equal() })
}

// equal compares all replicas with the service.
func (r *rig) equal() bool {
	for _, kind := range usercache.Kinds {
		head, root := r.service.Position(kind)
		ds := r.cache.Dataset(kind)
		if st := ds.Status(); st.Revision != head || ds.Root() != root || st.Identity != r.service.Identity(kind) {
			return false
		}
	}
	return true
}

func (r *rig) users() DatasetStatus {
	return r.client.Status().Datasets[0]
}

// has reports whether a device can be looked up.
func (r *rig) has(device string) bool {
	id, ok := usercache.ParseID(device)
	if !ok {
		r.t.Fatal(device)
	}
	var p usercache.Profile
	return r.cache.LookupDevice(&id, &p) == usercache.Found
}

// user is a change that writes a user with a device.
func user(n, version int) usercache.Change {
	m := &userv1.User{Name: fmt.Sprintf("version %d", version), Devices: []*userv1.Device{{Id: fmt.Sprintf("device-%d", n)}}}
	b, err := proto.Marshal(m)
	if err != nil {
		panic(err)
	}
	return usercache.Change{Key: fmt.Appendf(nil, "user-%d", n), Bytes: b}
}

func (r *rig) addUsers(from, to int) {
	var list []usercache.Change
	for n := from; n < to; n++ {
		list = append(list, user(n, 1))
	}
	r.service.Commit(usercache.Users, list...)
}

// logged keeps what was logged.
type logged struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logged) Enabled(context.Context, slog.Level) bool { return true }
func (l *logged) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logged) WithGroup(string) slog.Handler            { return l }
func (l *logged) Handle(_ context.Context, rec slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(&l.text, "%s %s %s", rec.Time.Format("15:04:05.000"), rec.Level, rec.Message)
	rec.Attrs(func(a slog.Attr) bool { fmt.Fprintf(&l.text, " %v", a); return true })
	l.text.WriteByte('\n')
	return nil
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func TestFirstTransferThenLive(t *testing.T) {
	bubble(t, func(r *rig) {
		r.addUsers(0, 500)
		r.start()
		if s := r.client.Status().State; s != Cold {
			t.Errorf("at the start: %v, want cold", s)
		}
		r.fresh(time.Second)
		if !r.has("device-499") {
			t.Error("a user of the first transfer is not served")
		}

		// A change is answered by at once: no polling, no delay of ours.
		before := time.Now()
		r.service.Commit(usercache.Users, user(500, 1), usercache.Change{Key: []byte("user-0"), Removed: true})
		synctest.Wait()
		if !r.has("device-500") || r.has("device-0") {
			t.Error("a live change is not served")
		}
		if d := time.Since(before); d != 0 {
			t.Errorf("it took %v of timers", d)
		}
		r.fresh(time.Second)
		if n := r.service.Calls("Watch"); n != len(usercache.Kinds) {
			t.Errorf("%d Watches, want one a dataset", n)
		}
	})
}

func TestCatchUpAfterRestart(t *testing.T) {
	bubble(t, func(r *rig) {
		r.addUsers(0, 100)
		r.start()
		r.fresh(time.Second)
		digests := r.service.Calls("Digests")
		r.stop()
		r.service.Commit(usercache.Users, user(7, 2))
		r.service.Commit(usercache.Users, usercache.Change{Key: []byte("user-8"), Removed: true})
		r.start()
		if !r.has("device-7") {
			t.Error("what was on disk is not served before the service answers")
		}
		r.fresh(time.Second)
		if n := r.service.Calls("Digests"); n != digests {
			t.Errorf("%d calls of Digests for a catch-up", n-digests)
		}
	})
}

func TestServiceDownNeverEmpties(t *testing.T) {
	bubble(t, func(r *rig) {
		r.addUsers(0, 50)
		r.start()
		r.fresh(time.Second)
		r.service.Stop()
		time.Sleep(14 * time.Second)
		if s := r.client.Status().State; s != Fresh {
			t.Errorf("14 s after the last heartbeat: %v", s)
		}
		time.Sleep(2 * time.Second)
		if s := r.client.Status().State; s != Stale {
			t.Errorf("16 s after the last heartbeat: %v", s)
		}
		time.Sleep(10 * time.Minute)
		r.restart()
		if !r.has("device-49") || r.client.Status().State != Stale {
			t.Errorf("restarted without a service: %v", r.client.Status().State)
		}
		r.service.Commit(usercache.Users, user(3, 9))
		r.service.Start()
		r.fresh(maxUnreachable + time.Second)
	})
}
