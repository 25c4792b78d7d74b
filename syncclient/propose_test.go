package syncclient

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/usercache"
)

// outcomes counts what became of proposals.
type outcomes struct {
	noMetrics
	mu    sync.Mutex
	count map[string]int
}

func (o *outcomes) Proposed(outcome string, n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.count[outcome] += n
}

// take returns what was counted and begins anew.
func (o *outcomes) take() map[string]int {
	o.mu.Lock()
	defer o.mu.Unlock()
	c := maps.Clone(o.count)
	clear(o.count)
	return c
}

func proposing(t *testing.T, test func(r *rig, o *outcomes, propose func(id string), expect func(what string, want map[string]int))) {
	bubble(t, func(r *rig) {
		o := &outcomes{count: map[string]int{}}
		r.opts.Metrics = o
		put := func(id string, u *userv1.User) {
			b, err := proto.Marshal(u)
			if err != nil {
				t.Fatal(err)
			}
			r.service.Commit(usercache.Users, usercache.Change{Key: []byte(id), Bytes: b})
		}
		put("kid", &userv1.User{AutoDevices: true, Devices: []*userv1.Device{{Id: "kid-1"}}})
		put("kid-2", &userv1.User{Devices: []*userv1.Device{{Id: "kid-2-pc"}}})
		put("full", &userv1.User{AutoDevices: true, MaxDevices: 1, Devices: []*userv1.Device{{Id: "full-1"}}})
		put("gone", &userv1.User{AutoDevices: true, Disabled: true})
		r.start()
		r.fresh(10 * time.Second)
		o.take()
		test(r, o, func(text string) {
			id, ok := usercache.ParseID(text)
			if !ok {
				t.Fatalf("%q is no id", text)
			}
			r.client.Propose(&id)
		}, func(what string, want map[string]int) {
			t.Helper()
			n, got := 0, map[string]int{}
			for _, w := range want {
				n += w
			}
			r.until(what, time.Minute, func() bool {
				for k, v := range o.take() {
					got[k] += v
				}
				sum := 0
				for _, g := range got {
					sum += g
				}
				return sum >= n
			})
			if !maps.Equal(got, want) {
				t.Errorf("%s: %v, want %v", what, got, want)
			}
		})
	})
}

func TestPropose(t *testing.T) {
	proposing(t, func(r *rig, o *outcomes, propose func(string), expect func(string, map[string]int)) {
		for _, id := range []string{"kid-tv", "kid-tv", "kid-tv", "kid-2-tv", "full-2", "gone-1", "nobody-1", "kid-2"} {
			propose(id)
		}
		// kid-2 is of kid by its form: that there is a user of that name does not matter.
		expect("the first of each", map[string]int{"made": 2, "nobody": 4})
		id, _ := usercache.ParseID("kid-tv")
		var p usercache.Profile
		r.until("the device is here", 10*time.Second, func() bool { return r.cache.LookupDevice(&id, &p) == usercache.Found })
		if p.UserID.String() != "kid" || r.service.Calls("propose") != 2 {
			t.Errorf("device of %v after %d calls", p.UserID, r.service.Calls("propose"))
		}
	})
}

func TestProposalsThatFail(t *testing.T) {
	proposing(t, func(r *rig, o *outcomes, propose func(string), expect func(string, map[string]int)) {
		answer := func(c codes.Code) {
			r.service.SetTamper(func(_ context.Context, rpc string, _ proto.Message) error {
				if rpc == "propose" {
					return status.Error(c, "as told")
				}
				return nil
			})
		}
		answer(codes.Unavailable)
		propose("kid-tv")
		expect("while the service is away", map[string]int{"unreachable": 1})
		propose("kid-tv")
		time.Sleep(proposeAgain)
		propose("kid-tv")
		expect("again after a while", map[string]int{"unreachable": 1})
		time.Sleep(proposeAgain)
		answer(codes.FailedPrecondition)
		propose("kid-tv")
		expect("refused", map[string]int{"refused": 1})
		for range 30 {
			time.Sleep(proposeAgain)
			propose("kid-tv")
		}
		time.Sleep(refusedAgain)
		r.service.SetTamper(nil)
		propose("kid-tv")
		expect("refused for a while alone", map[string]int{"made": 1})
		if st := r.client.Status(); st.State != Fresh {
			t.Errorf("following was disturbed: %v", st.State)
		}
	})
}

func TestProposalQuotas(t *testing.T) {
	proposing(t, func(r *rig, o *outcomes, propose func(string), expect func(string, map[string]int)) {
		for i := range ofUserAtOnce + 5 {
			propose(fmt.Sprint("kid-x", i))
		}
		expect("many of one user", map[string]int{"made": ofUserAtOnce, "quota": 5})
		time.Sleep(userEvery)
		propose("kid-y1")
		propose("kid-y2")
		expect("a while later", map[string]int{"made": 1, "quota": 1})

		// More than fit: dropped at once, whatever the service does.
		hold := make(chan struct{})
		r.service.SetTamper(func(_ context.Context, rpc string, m proto.Message) error {
			if _, ok := m.(*syncv1.ProposeDeviceRequest); ok {
				<-hold
			}
			return nil
		})
		time.Sleep(userEvery)
		propose("kid-z")
		time.Sleep(time.Millisecond) // it is with the service now
		for i := range proposalsQueued + 100 {
			propose(fmt.Sprint("nobody-", i))
		}
		close(hold)
		expect("a full queue", map[string]int{"made": 1, "nobody": proposalsQueued, "dropped": 100})

		// A flood of made-up ids is looked at so fast and no faster.
		start := time.Now()
		for i := range 40 {
			for j := range 50 {
				propose(fmt.Sprint("flood-", i, "-", j))
			}
			time.Sleep(50 * time.Millisecond)
		}
		got := o.take()
		if most := looksAtOnce + int(time.Since(start)/lookEvery) + 1; got["nobody"] > most || got["nobody"] < looksAtOnce || got["nobody"]+got["quota"] != 2000 {
			t.Errorf("of a flood: %v, at most %d were to be looked at", got, most)
		}
	})
}
