package syncclient

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	"github.com/sluice-dns/sluice/syncclient/internal/fakesync"
	"github.com/sluice-dns/sluice/usercache"
)

// Users of one bucket, so that it is compared by leaves.
var crowd = sync.OnceValue(func() (list []usercache.Change) {
	b := usercache.BucketOf([]byte("user-0"))
	for n := 0; len(list) < 18; n++ {
		if usercache.BucketOf(fmt.Appendf(nil, "user-%d", n)) == b {
			list = append(list, user(n, 1))
		}
	}
	return list
})

func TestDivergedRootIsRepaired(t *testing.T) {
	bubble(t, func(r *rig) {
		r.addUsers(0, 200)
		r.service.Commit(usercache.Users, crowd()...)
		r.start()
		r.fresh(time.Second)
		fetches := 0
		r.service.SetTamper(func(_ context.Context, rpc string, m proto.Message) error {
			if f, ok := m.(*syncv1.FetchResponse); ok {
				fetches++
				if f.Whole == (f.Bucket == uint32(usercache.BucketOf([]byte("user-0")))) {
					t.Errorf("bucket %d whole: %v", f.Bucket, f.Whole)
				}
			}
			return nil
		})
		r.service.Corrupt(usercache.Users, "user-150", user(150, 2).Bytes) // a small bucket
		r.service.Corrupt(usercache.Users, string(crowd()[3].Key), user(99999, 2).Bytes)
		r.fresh(6 * time.Second) // the next heartbeat tells
		if fetches != 2 || r.service.Calls("Leaves") != 1 {
			t.Errorf("%d buckets fetched, %d Leaves; want one whole and one record of the big one by leaves", fetches, r.service.Calls("Leaves"))
		}
		if d := r.users(); d.Repairs != 2 || d.Suspect {
			t.Errorf("%+v", d)
		}
		if !strings.Contains(r.log.String(), "ERROR") {
			t.Error("no alarm")
		}
	})
}

// While the service refuses a repair, changes go on coming.
func TestSuspectGoesOnLive(t *testing.T) {
	bubble(t, func(r *rig) {
		r.service.NeedTicket = true
		r.addUsers(0, 200)
		r.start()
		r.fresh(time.Second)
		var refuse atomic.Bool
		refuse.Store(true)
		r.service.SetTamper(func(_ context.Context, rpc string, _ proto.Message) error {
			if refuse.Load() && rpc == "Acquire" {
				return fakesync.Refused(time.Minute)
			}
			return nil
		})
		r.service.Corrupt(usercache.Users, "user-150", user(150, 2).Bytes)
		r.until("suspect", 6*time.Second, func() bool { return r.client.Status().State == Suspect })
		acquired, _ := r.service.Acquired()
		r.service.Commit(usercache.Users, user(1000, 1))
		synctest.Wait()
		if !r.has("device-1000") || !r.has("device-150") {
			t.Error("changes stop while a repair is refused")
		}
		time.Sleep(58 * time.Second)
		if again, _ := r.service.Acquired(); len(again) != len(acquired) {
			t.Error("RetryInfo is not honoured")
		}
		refuse.Store(false)
		r.fresh(20 * time.Second)
	})
}

func TestResumeRefusals(t *testing.T) {
	tests := []struct {
		name   string
		change func(r *rig) // while the resolver is away
		within time.Duration
	}{
		{"too old", func(r *rig) {
			r.service.Commit(usercache.Users, user(5, 2), usercache.Change{Key: []byte("user-6"), Removed: true})
			head, _ := r.service.Position(usercache.Users)
			r.service.Forget(usercache.Users, head)
		}, time.Second},
		{"rewound", func(r *rig) {
			head, _ := r.service.Position(usercache.Users)
			r.service.Corrupt(usercache.Users, "user-7", user(7, 2).Bytes)
			r.service.Rewind(usercache.Users, head-1)
		}, 3 * time.Second},
		{"other root", func(r *rig) { r.service.Corrupt(usercache.Users, "user-7", user(7, 2).Bytes) }, time.Second},
		{"lineage that agrees", func(r *rig) {
			id := r.service.Identity(usercache.Users)
			id.Lineage[0]++
			r.service.SetIdentity(usercache.Users, id)
			r.service.Commit(usercache.Users, user(5, 2), usercache.Change{Key: []byte("user-6"), Removed: true})
		}, time.Second},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			bubble(t, func(r *rig) {
				r.addUsers(0, 100)
				r.service.Commit(usercache.Users, user(100, 1))
				r.service.Commit(usercache.Users, crowd()...)
				r.start()
				r.fresh(time.Second)
				r.stop()
				test.change(r)
				r.start()
				r.fresh(test.within)
			})
		})
	}
}

// What is not ours is not taken unless an operator says so, and ours is served meanwhile.
func TestForeignDataNeedsAccept(t *testing.T) {
	tests := map[string]func(r *rig){
		"lineage that disagrees": func(r *rig) {
			id := r.service.Identity(usercache.Users)
			id.Lineage[0]++
			r.service.SetIdentity(usercache.Users, id)
			var list []usercache.Change
			for n := range 15 { // of 100
				list = append(list, user(n, 2))
			}
			r.service.Commit(usercache.Users, append(list, user(1000, 1))...)
		},
		"dataset": func(r *rig) {
			r.service.SetIdentity(usercache.Users, usercache.Identity{Dataset: [16]byte{99}, Lineage: [16]byte{1}})
			r.service.Commit(usercache.Users, user(1000, 1))
		},
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bubble(t, func(r *rig) {
				r.addUsers(0, 100)
				r.start()
				r.fresh(time.Second)
				r.stop()
				change(r)
				r.start()
				time.Sleep(10 * time.Minute)
				if n := r.service.Calls("Watch"); n > 100 {
					t.Errorf("%d Watches in ten minutes", n)
				}
				foreign := r.service.Identity(usercache.Users)
				if d := r.users(); d.Foreign != foreign || d.State != Stale || !r.has("device-50") || r.has("device-1000") {
					t.Fatalf("%v, %v is waiting; device-50 %v, device-1000 %v", d.State, d.Foreign, r.has("device-50"), r.has("device-1000"))
				}
				a, err := r.client.Accept(usercache.Users)
				if err != nil || a.Identity != foreign {
					t.Fatalf("%+v, %v", a, err)
				}
				r.fresh(time.Second)
				if !r.has("device-1000") {
					t.Error("what was accepted is not served")
				}
			})
		})
	}
}

// A service that lies, or is not able to say anything, changes nothing about what is served, is not asked at
// full speed, and is followed again when it has come to its senses.
func TestServiceThatLies(t *testing.T) {
	delta := func(change func(d *syncv1.Delta)) func(context.Context, string, proto.Message) error {
		return func(_ context.Context, _ string, m proto.Message) error {
			if w, ok := m.(*syncv1.WatchResponse); ok && w.GetDelta() != nil {
				d := proto.CloneOf(w.GetDelta())
				change(d)
				w.Message = &syncv1.WatchResponse_Delta{Delta: d}
			}
			return nil
		}
	}
	hello := func(change func(h *syncv1.Hello)) func(context.Context, string, proto.Message) error {
		return func(_ context.Context, _ string, m proto.Message) error {
			if w, ok := m.(*syncv1.WatchResponse); ok && w.GetHello() != nil {
				change(w.GetHello())
			}
			return nil
		}
	}
	silent := func(rpc string) func(context.Context, string, proto.Message) error {
		return func(ctx context.Context, name string, _ proto.Message) error {
			if name == rpc {
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}
	}
	fails := func(rpc string, code codes.Code) func(context.Context, string, proto.Message) error {
		return func(_ context.Context, name string, _ proto.Message) error {
			if name == rpc {
				return status.Error(code, "no")
			}
			return nil
		}
	}
	fetch := func(change func(m *syncv1.FetchResponse)) func(context.Context, string, proto.Message) error {
		return func(_ context.Context, _ string, m proto.Message) error {
			if f, ok := m.(*syncv1.FetchResponse); ok {
				change(f)
			}
			return nil
		}
	}
	digests := func(change func(m *syncv1.DigestsResponse)) func(context.Context, string, proto.Message) error {
		return func(_ context.Context, _ string, m proto.Message) error {
			if d, ok := m.(*syncv1.DigestsResponse); ok {
				change(d)
			}
			return nil
		}
	}
	flip := func(b []byte) []byte { b = append([]byte(nil), b...); b[0] ^= 1; return b }

	lies := map[string]func(context.Context, string, proto.Message) error{
		"hello: another identity":     hello(func(h *syncv1.Hello) { h.Identity.DatasetId = flip(h.Identity.DatasetId) }),
		"hello: short identity":       hello(func(h *syncv1.Hello) { h.Identity.Lineage = h.Identity.Lineage[:3] }),
		"hello: no identity":          hello(func(h *syncv1.Hello) { h.Identity = nil }),
		"hello: short root":           hello(func(h *syncv1.Hello) { h.Root = h.Root[:5] }),
		"hello: unknown resume":       hello(func(h *syncv1.Hello) { h.Resume = 99 }),
		"hello: always cold":          hello(func(h *syncv1.Hello) { h.Resume = syncv1.Resume_RESUME_COLD }),
		"hello: always ahead":         hello(func(h *syncv1.Hello) { h.Resume = syncv1.Resume_RESUME_AHEAD }),
		"hello: always other root":    hello(func(h *syncv1.Hello) { h.Resume = syncv1.Resume_RESUME_OTHER_ROOT }),
		"hello: heartbeats of 0.1 ms": hello(func(h *syncv1.Hello) { h.HeartbeatMs = 1 }),
		"delta: gap":                  delta(func(d *syncv1.Delta) { d.From, d.To = d.From+1000, d.To+1000 }),
		"delta: backwards":            delta(func(d *syncv1.Delta) { d.To = d.From - 1 }),
		"delta: wrong root":           delta(func(d *syncv1.Delta) { d.Root = flip(d.Root) }),
		"delta: short root":           delta(func(d *syncv1.Delta) { d.Root = d.Root[:1] }),
		"delta: key too long": delta(func(d *syncv1.Delta) {
			d.Changes = append(d.Changes, &syncv1.Change{Key: make([]byte, 4000), Revision: d.To})
		}),
		"delta: no key": delta(func(d *syncv1.Delta) { d.Changes = append(d.Changes, &syncv1.Change{Revision: d.To}) }),
		"delta: beyond its end": delta(func(d *syncv1.Delta) {
			d.Changes = append(d.Changes, &syncv1.Change{Key: []byte("x"), Revision: d.To + 1})
		}),
		"delta: lost":                delta(func(d *syncv1.Delta) { d.Changes = nil }),
		"delta: huge":                delta(func(d *syncv1.Delta) { d.Root = make([]byte, 5<<20) }),
		"delta: never the last part": delta(func(d *syncv1.Delta) { d.More = true }),
		"watch: an empty message":    func(_ context.Context, _ string, m proto.Message) error { proto.Reset(m); return nil },
		"watch: silent":              silent("Watch"),
		"watch: unavailable":         fails("Watch", codes.Unavailable),
		"watch: unknown":             fails("Watch", codes.Unknown),
		"watch: permission denied":   fails("Watch", codes.PermissionDenied),
		"watch: exhausted":           fails("Watch", codes.ResourceExhausted),
		"watch: unimplemented":       fails("Watch", codes.Unimplemented),
		"digests: wrong root":        digests(func(m *syncv1.DigestsResponse) { m.Root = flip(m.Root) }),
		"digests: wrong": digests(func(m *syncv1.DigestsResponse) {
			if len(m.Digests) > 0 {
				m.Digests = flip(m.Digests)
			}
		}),
		"digests: short":       digests(func(m *syncv1.DigestsResponse) { m.Digests = m.Digests[:len(m.Digests)/2] }),
		"digests: nobody's":    digests(func(m *syncv1.DigestsResponse) { m.Identity = nil }),
		"digests: old":         digests(func(m *syncv1.DigestsResponse) { m.AsOf = 0 }),
		"digests: silent":      silent("Digests"),
		"digests: unavailable": fails("Digests", codes.Unavailable),
		"leaves: wrong": func(_ context.Context, _ string, m proto.Message) error {
			if l, ok := m.(*syncv1.LeavesResponse); ok && len(l.Leaves) > 0 {
				l.Leaves[0].Hash = flip(l.Leaves[0].Hash)
			}
			return nil
		},
		"leaves: wrong at another time": func(_ context.Context, _ string, m proto.Message) error {
			if l, ok := m.(*syncv1.LeavesResponse); ok && len(l.Leaves) > 0 {
				l.AsOf++
				l.Leaves[0].Hash = flip(l.Leaves[0].Hash)
			}
			return nil
		},
		"leaves: another bucket": func(_ context.Context, _ string, m proto.Message) error {
			if l, ok := m.(*syncv1.LeavesResponse); ok {
				l.Bucket++
			}
			return nil
		},
		"leaves: of nothing": func(_ context.Context, _ string, m proto.Message) error {
			if l, ok := m.(*syncv1.LeavesResponse); ok {
				l.Leaves = nil
			}
			return nil
		},
		"leaves: silent":               silent("Leaves"),
		"leaves: fails":                fails("Leaves", codes.Internal),
		"fetch: truncated bucket":      fetch(func(m *syncv1.FetchResponse) { m.Records = nil }),
		"fetch: truncated, other time": fetch(func(m *syncv1.FetchResponse) { m.Records = nil; m.AsOf++ }),
		"fetch: another bucket":        fetch(func(m *syncv1.FetchResponse) { m.Bucket ^= 1 }),
		"fetch: no such bucket":        fetch(func(m *syncv1.FetchResponse) { m.Bucket = 1 << 20 }),
		"fetch: not whole":             fetch(func(m *syncv1.FetchResponse) { m.Whole = !m.Whole }),
		"fetch: endless parts":         fetch(func(m *syncv1.FetchResponse) { m.More = true }),
		"fetch: old":                   fetch(func(m *syncv1.FetchResponse) { m.AsOf = 1 }),
		"fetch: record of another bucket": fetch(func(m *syncv1.FetchResponse) {
			m.Records = append(m.Records, &syncv1.Record{Key: []byte("elsewhere"), Revision: 1})
		}),
		"fetch: silent":         silent("Fetch"),
		"fetch: fails":          fails("Fetch", codes.Internal),
		"fetch: always refused": fails("Fetch", codes.ResourceExhausted),
	}
	for name, lie := range lies {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bubble(t, func(r *rig) {
				r.addUsers(0, 100)
				r.service.Commit(usercache.Users, crowd()...)
				r.start()
				r.fresh(time.Second)

				calls := func() (n int) {
					for _, rpc := range []string{"Watch", "Digests", "Leaves", "Fetch", "Acquire"} {
						n += r.service.Calls(rpc)
					}
					return n
				}
				before := calls()
				r.service.SetTamper(lie)
				// Make it use every part of the protocol: a difference in a small and in a big bucket, a
				// change, and another start.
				r.service.Corrupt(usercache.Users, "user-50", user(50, 3).Bytes)
				r.service.Corrupt(usercache.Users, string(crowd()[5].Key), user(88888, 3).Bytes)
				r.service.Commit(usercache.Users, user(101, 1))
				time.Sleep(20 * time.Second)
				r.restart()
				for range 24 {
					time.Sleep(5 * time.Second)
					synctest.Wait()
					if d := r.users(); !d.Complete || !r.has("device-20") || !r.has("device-99") {
						t.Fatalf("data is gone: %+v", d)
					}
				}
				if n := calls() - before; n > 600 {
					t.Errorf("%d calls in two minutes", n)
				}
				r.service.SetTamper(nil)
				r.fresh(maxWrong + 30*time.Second)
			})
		})
	}
}

// The same with nothing to lose: a first transfer that ends at any message, with the process or with the
// connection.
func TestFirstTransferInterruptedAtEveryMessage(t *testing.T) {
	const messages = 40 // more than it takes
	var reached [messages]atomic.Bool
	t.Run("at", func(t *testing.T) {
		for n := range messages {
			t.Run(fmt.Sprint(n), func(t *testing.T) {
				t.Parallel()
				bubble(t, func(r *rig) { reached[n].Store(interruptedAt(r, n)) })
			})
		}
	})
	if !reached[25].Load() || reached[messages-1].Load() {
		t.Errorf("a first transfer does not take 25 to %d messages any more", messages)
	}
}

func interruptedAt(r *rig, n int) (reached bool) {
	r.addUsers(0, 12)
	r.service.Commit(usercache.CatalogueKind, usercache.Change{Key: []byte("policy/a"), Bytes: []byte{}})
	var sent atomic.Int64
	cut := make(chan struct{})
	r.service.SetTamper(func(ctx context.Context, _ string, _ proto.Message) error {
		switch i := sent.Add(1) - 1; {
		case i == int64(n):
			close(cut)
			fallthrough
		case i > int64(n):
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	})
	r.start()
	select {
	case <-cut:
		reached = true
	case <-time.After(time.Second):
	}
	if n%2 == 0 {
		r.stop()
	} else {
		r.service.Stop()
		time.Sleep(time.Second)
		r.service.Start()
	}
	r.service.SetTamper(nil)
	r.service.Commit(usercache.Users, user(3, 2), usercache.Change{Key: []byte("user-4"), Removed: true})
	if n%2 == 0 {
		r.start()
	}
	r.fresh(2 * maxUnreachable)
	// And live.
	r.service.Commit(usercache.Users, user(3, 3))
	r.fresh(time.Second)
	return reached
}

func TestRefusedTransferOutlivesRestarts(t *testing.T) {
	bubble(t, func(r *rig) {
		r.service.NeedTicket = true
		r.addUsers(0, 50)
		r.service.SetTamper(func(_ context.Context, rpc string, _ proto.Message) error {
			if rpc == "Acquire" {
				return fakesync.Refused(time.Minute)
			}
			return nil
		})
		r.start()
		synctest.Wait()
		acquired, _ := r.service.Acquired()
		if len(acquired) != 1 || acquired[0].Need != syncv1.Need_NEED_COLD {
			t.Fatalf("%v", acquired)
		}
		for range 11 {
			time.Sleep(5 * time.Second)
			r.restart()
			synctest.Wait()
		}
		if again, _ := r.service.Acquired(); len(again) != 1 {
			t.Errorf("asked %d times within a minute in which it was to wait", len(again))
		}
		if s := r.client.Status(); s.State != Cold {
			t.Errorf("%+v", s)
		}
		r.service.SetTamper(nil)
		r.fresh(15 * time.Second)
		acquired, released := r.service.Acquired()
		if len(acquired) != 2 || released != 1 {
			t.Errorf("%d tickets asked for, %d given back", len(acquired), released)
		}

		// A damaged file costs politeness and nothing else.
		r.stop()
		if err := os.WriteFile(filepath.Join(r.dir, "sync", "backoff.json"), []byte(`{"version":1,"entr`), 0o600); err != nil {
			t.Fatal(err)
		}
		r.start()
		r.fresh(time.Second)
	})
}

func TestHeartbeatsMissing(t *testing.T) {
	bubble(t, func(r *rig) {
		r.addUsers(0, 5)
		r.start()
		r.fresh(time.Second)
		var mute atomic.Bool
		r.service.SetTamper(func(ctx context.Context, _ string, m proto.Message) error {
			if w, ok := m.(*syncv1.WatchResponse); ok && w.GetHeartbeat() != nil && mute.Load() {
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		})
		mute.Store(true)
		time.Sleep(14 * time.Second)
		if n := r.service.Calls("Watch"); n != 4 {
			t.Errorf("reconnected after two missing heartbeats: %d Watches", n)
		}
		r.until("stale", 7*time.Second, func() bool { return r.client.Status().State == Stale })
		r.until("reconnected", 7*time.Second, func() bool { return r.service.Calls("Watch") > 4 })
		mute.Store(false)
		r.fresh(30 * time.Second)
	})
}

func TestNextAddress(t *testing.T) {
	bubble(t, func(r *rig) {
		first, second := r.service, fakesync.New()
		second.Start()
		defer first.Stop()
		r.opts.Services = []string{"inprocess:one", "inprocess:two"}
		r.opts.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			if address == "inprocess:two" {
				return second.Dial(ctx, address)
			}
			return first.Dial(ctx, address)
		}
		r.addUsers(0, 5)
		var list []usercache.Change
		for n := range 5 {
			list = append(list, user(n, 1))
		}
		second.Commit(usercache.Users, list...)
		r.start()
		r.fresh(time.Second)
		first.Stop()
		r.service = second
		r.until("following the second address", time.Second, func() bool { return r.users().Service == "inprocess:two" })
		r.service.Commit(usercache.Users, user(9, 1))
		r.fresh(time.Second)
	})
}

func TestUsersNeedTheirCatalogue(t *testing.T) {
	bubble(t, func(r *rig) {
		r.addUsers(0, 5)
		r.start()
		r.fresh(time.Second)
		r.service.SetTamper(func(ctx context.Context, _ string, m proto.Message) error {
			if w, ok := m.(*syncv1.WatchResponse); ok && w.GetDelta() != nil && w.GetDelta().NeedsCatalogue == 0 {
				<-ctx.Done() // the catalogue's is held back
				return ctx.Err()
			}
			return nil
		})
		r.service.Commit(usercache.CatalogueKind, usercache.Change{Key: []byte("policy/new"), Bytes: []byte{}})
		r.service.Commit(usercache.Users, user(6, 1))
		synctest.Wait()
		if d := r.users(); d.State != Stale || !r.has("device-6") {
			t.Errorf("users that name things of a catalogue we do not have: %v %v", d.State, d.Reasons)
		}
		r.service.SetTamper(nil)
		r.fresh(time.Minute)
	})
}

// One commit in several deltas is applied at once.
func TestDeltaInParts(t *testing.T) {
	bubble(t, func(r *rig) {
		r.addUsers(0, 5)
		r.start()
		r.fresh(time.Second)
		// The tamperer cannot send more than it gets; it makes of three deltas one in three parts.
		from := uint64(0)
		parts := 0
		r.service.SetTamper(func(_ context.Context, _ string, m proto.Message) error {
			w, ok := m.(*syncv1.WatchResponse)
			if !ok || w.GetDelta() == nil {
				return nil
			}
			d := proto.CloneOf(w.GetDelta())
			if parts++; parts == 1 {
				from = d.From
			}
			if d.From = from; parts < 3 {
				d.More, d.Root = true, nil
			}
			w.Message = &syncv1.WatchResponse_Delta{Delta: d}
			return nil
		})
		r.service.Commit(usercache.Users, user(10, 1))
		synctest.Wait()
		r.service.Commit(usercache.Users, user(11, 1))
		synctest.Wait()
		if r.has("device-10") || r.has("device-11") || r.users().Revision != from {
			t.Error("a part is applied before the last has come")
		}
		r.service.Commit(usercache.Users, user(12, 1))
		r.fresh(time.Second)
		if parts != 3 {
			t.Errorf("%d parts", parts)
		}
	})
}

func TestOperatorsRepair(t *testing.T) {
	bubble(t, func(r *rig) {
		r.addUsers(0, 5)
		r.start()
		r.fresh(time.Second)
		repairs := r.users().Repairs
		if err := r.client.Repair(usercache.Users); err != nil {
			t.Fatal(err)
		}
		r.until("repaired", time.Second, func() bool { return r.users().Repairs == repairs+1 })
		r.fresh(time.Second)
		if err := r.client.Repair("nonsense"); err == nil {
			t.Error("no such dataset")
		}
	})
}

func TestExport(t *testing.T) {
	for _, damage := range []string{"", "segment", "manifest"} {
		t.Run(damage, func(t *testing.T) {
			bubble(t, func(r *rig) {
				// Enough for the export to be worth it.
				var list []usercache.Change
				for n := range 100 {
					c := user(n, 1)
					c.Bytes = protowire.AppendTag(c.Bytes, 100, protowire.BytesType) // an unknown field
					c.Bytes = protowire.AppendBytes(c.Bytes, make([]byte, 60<<10))
					list = append(list, c)
				}
				r.service.Commit(usercache.Users, list...)
				r.service.Export(usercache.Users)
				r.service.Commit(usercache.Users, user(3, 2), usercache.Change{Key: []byte("user-4"), Removed: true})
				r.service.SetTamper(func(_ context.Context, _ string, m proto.Message) error {
					switch m := m.(type) {
					case *syncv1.SegmentResponse:
						if damage == "segment" && m.Offset == 0 {
							m.Data[20] ^= 1
						}
					case *syncv1.ManifestResponse:
						if damage == "manifest" {
							m.Segments[0].Sha256 = m.Segments[0].Sha256[:9]
						}
					}
					return nil
				})
				r.start()
				r.fresh(time.Second)
				acquired, released := r.service.Acquired()
				if len(acquired) != 1 || released != 1 || acquired[0].ExpectedBytes < exportWorth {
					t.Errorf("%v", acquired)
				}
				if n := r.service.Calls("Fetch"); damage == "" && n != 0 || damage != "" && n == 0 {
					t.Errorf("%d Fetches", n)
				}
				if _, err := os.Stat(filepath.Join(r.dir, "sync", "segments")); !os.IsNotExist(err) {
					t.Errorf("segments are left behind: %v", err)
				}
			})
		})
	}
}
