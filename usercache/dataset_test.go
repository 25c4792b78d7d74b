package usercache

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"google.golang.org/protobuf/proto"
)

// bad is a record that no version of User can be: a device without an id.
func bad(key string) Change {
	return put(key, &userv1.User{Devices: []*userv1.Device{{Name: "nameless"}}})
}

// service is a model of the business-logic service: the present records and every change ever made.
type service struct {
	revision uint64
	records  map[string]Record
	log      []Change
	tree     *Tree
}

func newService() *service { return &service{records: map[string]Record{}, tree: NewTree()} }

func (s *service) change(c Change) {
	s.revision++
	c.Revision = s.revision
	key := string(c.Key)
	if old, ok := s.records[key]; ok {
		s.tree.Remove(BucketOf(old.Key), LeafOf(old.Key, old.Revision, old.Bytes))
		delete(s.records, key)
	} else if c.Removed {
		s.revision--
		return
	}
	if !c.Removed {
		s.records[key] = Record{Key: c.Key, Revision: c.Revision, Bytes: c.Bytes}
		s.tree.Add(BucketOf(c.Key), LeafOf(c.Key, c.Revision, c.Bytes))
	}
	s.log = append(s.log, c)
}

// since returns the delta from a revision to another: each record once, at its newest in between.
func (s *service) since(from, to uint64) Delta {
	newest := map[string]Change{}
	for _, c := range s.log {
		if c.Revision > from && c.Revision <= to {
			newest[string(c.Key)] = c
		}
	}
	d := Delta{From: from, To: to}
	for _, c := range newest {
		d.Changes = append(d.Changes, c)
	}
	slices.SortFunc(d.Changes, func(a, b Change) int { return int(a.Revision) - int(b.Revision) })
	if to == s.revision {
		root := s.tree.Root()
		d.Root = &root
	}
	return d
}

func (s *service) bucket(b uint16) BucketData {
	d := BucketData{Bucket: b, AsOf: s.revision, Whole: true}
	for _, r := range s.records {
		if BucketOf(r.Key) == b {
			d.Records = append(d.Records, r)
		}
	}
	return d
}

// repair makes d equal to s the way a sync client does, with changes going on meanwhile.
func (s *service) repair(t *testing.T, d *Dataset, replace bool, meanwhile func()) {
	t.Helper()
	if err := d.BeginTransfer(testID, replace); err != nil {
		t.Fatal(err)
	}
	compared := s.revision
	nodes := s.tree.NodeHashes()
	local := d.Tree()
	var differ []uint16
	for _, n := range local.DiffNodes(&nodes) {
		b := s.tree.NodeBuckets(n)
		differ = append(differ, local.DiffBuckets(n, &b)...)
	}
	for _, b := range differ {
		meanwhile()
		if _, err := d.ApplyBucket(context.Background(), testID, s.bucket(b), day); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.FinishTransfer(testID, compared, day); err != nil {
		t.Fatal(err)
	}
}

// The replica against the service, through deltas, gaps, overlaps, bad records, repairs and restarts. At
// every step the replica is some state of the service, and at head it is the service.
func TestReplicaModel(t *testing.T) {
	for seed := range uint64(3) {
		rnd := rand.New(rand.NewPCG(seed, 11))
		dir := t.TempDir()
		o := Options{Dir: dir, Guard: GuardOptions{Share: 1}, GroupChanges: 1 + rnd.IntN(50)}
		c := open(t, o)
		s := newService()
		d := begin(t, c.Dataset(Users))
		random := func() {
			key := fmt.Sprintf("u%d", rnd.IntN(200))
			switch rnd.IntN(8) {
			case 0, 1:
				s.change(gone(key))
			case 2:
				s.change(bad(key))
			default:
				u := user(fmt.Sprintf("d%d", rnd.IntN(150)), fmt.Sprintf("e%d", rnd.IntN(150)))
				u.Name = strings.Repeat("n", rnd.IntN(200))
				s.change(put(key, u))
			}
		}
		head := func() {
			rev := d.Status().Revision
			res, err := d.ApplyDelta(context.Background(), testID, s.since(rev, s.revision), day)
			if err != nil {
				t.Fatal(err)
			}
			if res.RootDiffers || d.Root() != s.tree.Root() || !d.settledAt(s.revision) {
				t.Fatalf("seed %d: at revision %d the root differs: %+v", seed, s.revision, res)
			}
		}
		for range 60 {
			for range rnd.IntN(40) {
				random()
			}
			rev := d.Status().Revision
			switch rnd.IntN(6) {
			case 0: // a part of the way
				if to := rev + uint64(rnd.IntN(int(s.revision-rev)+1)); to > rev {
					if _, err := d.ApplyDelta(context.Background(), testID, s.since(rev, to), day); err != nil {
						t.Fatal(err)
					}
				}
			case 1: // overlapping what is held
				from := rev - min(rev, uint64(rnd.IntN(30)))
				if _, err := d.ApplyDelta(context.Background(), testID, s.since(from, s.revision), day); err != nil {
					t.Fatal(err)
				}
			case 2: // a gap
				var gap *GapError
				if _, err := d.ApplyDelta(context.Background(), testID, Delta{From: rev + 1, To: rev + 2}, day); !errors.As(err, &gap) {
					t.Fatalf("a gap gave %v", err)
				}
			case 3:
				s.repair(t, d, false, random)
			case 4:
				head()
				want := d.Status()
				closeCache(t, c)
				c = open(t, o)
				d = c.Dataset(Users)
				if got := d.Status(); got.Revision != want.Revision || got.Totals != want.Totals || got.Bytes != want.Bytes || got.Bad != want.Bad {
					t.Fatalf("seed %d: after a restart %+v\nbefore %+v", seed, got, want)
				}
			default:
				head()
			}
		}
		head()
		checkServing(t, c, s)
		closeCache(t, c)
	}
}

// checkServing compares who has each device with what follows from the replica and overlay by definition.
func checkServing(t *testing.T, c *Cache, s *service) {
	t.Helper()
	type claim struct {
		revision uint64
		user     string
	}
	best := map[string]claim{}
	d := c.Dataset(Users)
	for i := range 200 {
		key := fmt.Sprintf("u%d", i)
		ordinal, ok := d.store.FindServing([]byte(key))
		if !ok {
			continue
		}
		r, _ := d.store.Serving(ordinal)
		var u userv1.User
		if err := proto.Unmarshal(r.Bytes, &u); err != nil {
			t.Fatal(err)
		}
		for _, dev := range u.Devices {
			if b, ok := best[dev.Id]; !ok || r.Revision > b.revision || r.Revision == b.revision && key < b.user {
				best[dev.Id] = claim{r.Revision, key}
			}
		}
		r.Release()
		if _, held := s.records[key]; !held {
			t.Errorf("%s is served and does not exist", key)
		}
	}
	for i := range 150 {
		for _, p := range "de" {
			id := fmt.Sprintf("%c%d", p, i)
			want := "unknown"
			if b, ok := best[id]; ok {
				want = b.user
			}
			wantWho(t, c, id, want)
		}
	}
}

// A device that several users claim belongs to the same one whatever the order of changes, and goes back
// when that one lets go. With a crowd of claimants too.
func TestConflictsAreOrderIndependent(t *testing.T) {
	for _, claimants := range []int{3, 40} {
		var changes []Change
		for i := range claimants {
			c := put(fmt.Sprintf("u%03d", i), user("shared", fmt.Sprintf("own-%d", i)))
			c.Revision = 100 + uint64(i/2) // pairs of equal revision: the lower key wins
			changes = append(changes, c)
		}
		for seed := range uint64(3) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			c := open(t, Options{Guard: GuardOptions{Share: 1}})
			d := begin(t, c.Dataset(Users))
			if err := d.BeginTransfer(testID, false); err != nil {
				t.Fatal(err)
			}
			for _, i := range rnd.Perm(claimants) {
				r := changes[i]
				b := BucketData{Bucket: BucketOf(r.Key), AsOf: 1000, Records: []Record{{r.Key, r.Revision, r.Bytes}}}
				if _, err := d.ApplyBucket(context.Background(), testID, b, day); err != nil {
					t.Fatal(err)
				}
			}
			// In the order of precedence, each lets go.
			order := make([]int, claimants)
			for i := range order {
				order[i] = i
			}
			slices.SortFunc(order, func(a, b int) int {
				if a/2 != b/2 {
					return b/2 - a/2
				}
				return a - b
			})
			for n, i := range order {
				wantWho(t, c, "shared", fmt.Sprintf("u%03d", i))
				wantWho(t, c, fmt.Sprintf("own-%d", i), fmt.Sprintf("u%03d", i))
				r := changes[i]
				b := BucketData{Bucket: BucketOf(r.Key), AsOf: 2000 + uint64(n)}
				if n%2 == 0 {
					b.Missing = [][]byte{r.Key}
				} else {
					let := put(string(r.Key), user(fmt.Sprintf("own-%d", i)))
					b.Records = []Record{{r.Key, 2000 + uint64(n), let.Bytes}}
				}
				if _, err := d.ApplyBucket(context.Background(), testID, b, day); err != nil {
					t.Fatal(err)
				}
			}
			if err := d.FinishTransfer(testID, 1000, day); err != nil {
				t.Fatal(err)
			}
			wantWho(t, c, "shared", "unknown")
			if n := d.users.crowded.Load(); n != 0 {
				t.Errorf("%d crowds are left of nobody", n)
			}
			closeCache(t, c)
		}
	}
}

func TestOverlay(t *testing.T) {
	dir := t.TempDir()
	c := open(t, Options{Dir: dir})
	d := begin(t, c.Dataset(Users))
	delta(t, d, put("ann", user("ann-pc")), put("bob", user("bob-pc")))
	good := d.Status().Revision

	// A version that cannot be used leaves the last good one in force; its devices are of no interest.
	broken := user("ann-new")
	broken.Devices = append(broken.Devices, &userv1.Device{Id: "not an id"})
	if res := delta(t, d, put("ann", broken)); res.Bad != 1 || res.Applied != 1 {
		t.Errorf("a bad record: %+v", res)
	}
	check := func(when string) {
		t.Helper()
		wantWho(t, c, "ann-pc", "ann")
		wantWho(t, c, "ann-new", "unknown")
		o := c.Dataset(Users).Overlay()
		if len(o) != 1 || o[0].Key != "ann" || o[0].Reason != BadRecord || o[0].ServedRevision != good-1 || o[0].HeldRevision != good+1 || !strings.Contains(o[0].Detail, "not an id") {
			t.Errorf("%s the overlay is %+v", when, o)
		}
	}
	check("at first")
	if r, _ := d.Get([]byte("ann")); r.Revision != good+1 {
		t.Errorf("the replica holds revision %d, not the bad one %d", r.Revision, good+1)
	}
	root := d.Root()
	closeCache(t, c)
	c = open(t, Options{Dir: dir})
	d = c.Dataset(Users)
	check("after a restart")
	if d.Root() != root {
		t.Error("the root of the replica has changed over a restart")
	}

	// A record bad from the start makes its user known and unusable, as far as the devices can be read.
	delta(t, d, put("carl", &userv1.User{Devices: []*userv1.Device{{Id: "carl-pc"}, {Id: "!"}}}))
	wantWho(t, c, "carl-pc", "unusable")
	closeCache(t, c)
	c = open(t, Options{Dir: dir})
	d = c.Dataset(Users)
	wantWho(t, c, "carl-pc", "unusable")
	if s := d.Status(); s.Overlay != 2 || s.Bad != 2 {
		t.Errorf("status %+v", s)
	}

	// A device that a good record claims too is not lost to one that cannot be used.
	delta(t, d, put("carl2", user("carl-pc")))
	wantWho(t, c, "carl-pc", "carl2")
	delta(t, d, put("carl", &userv1.User{Devices: []*userv1.Device{{Id: "carl-pc"}, {Id: "!"}}}))
	wantWho(t, c, "carl-pc", "carl2")
	delta(t, d, gone("carl2"))
	wantWho(t, c, "carl-pc", "unusable")

	// Good versions end it, and so does the end of the record.
	delta(t, d, put("ann", user("ann-new")), put("carl", user("carl-pc")), bad("bob"))
	wantWho(t, c, "ann-pc", "unknown")
	wantWho(t, c, "ann-new", "ann")
	wantWho(t, c, "carl-pc", "carl")
	wantWho(t, c, "bob-pc", "bob")
	delta(t, d, gone("bob"))
	wantWho(t, c, "bob-pc", "unknown")
	if o := d.Overlay(); len(o) != 0 {
		t.Errorf("left in the overlay: %+v", o)
	}
}

// A catalogue record that cannot be used leaves the last good one in the snapshot.
func TestOverlayOfCatalogue(t *testing.T) {
	dir := t.TempDir()
	c := open(t, Options{Dir: dir})
	d := begin(t, c.Dataset(CatalogueKind))
	delta(t, d, put("list/a", listRecord(1)), put("list/b", listRecord(1)), put("x/unknown-kind", listRecord(1)))
	if n, ok := c.Catalogue().ListNumber("b"); !ok || n != 1 {
		t.Error("the newer claim of a number does not win")
	}
	if _, ok := c.Catalogue().ListNumber("a"); ok {
		t.Error("two lists have one number")
	}
	delta(t, d, put("list/b", listRecord(512)))
	shrunk := listRecord(1)
	shrunk.Rules = 50
	if res := delta(t, d, put("list/b", shrunk)); res.Held != 1 {
		t.Errorf("a list that lost half of its rules: %+v", res)
	}
	closeCache(t, c)
	c = open(t, Options{Dir: dir})
	if l := c.Catalogue().List(1); l == nil || l.Rules != 100 {
		t.Errorf("list 1 is %+v", l)
	}
	c.Dataset(CatalogueKind).AcceptShrink(day)
	if l := c.Catalogue().List(1); l == nil || l.Rules != 50 {
		t.Errorf("after accepting, list 1 is %+v", l)
	}
}

func TestShrinkGuard(t *testing.T) {
	dir := t.TempDir()
	c := open(t, Options{Dir: dir})
	d := begin(t, c.Dataset(Users))
	const n = 300
	for i := range n {
		delta(t, d, put(fmt.Sprintf("u%03d", i), user(fmt.Sprintf("d%03d", i))))
	}
	served := func() int {
		k := 0
		for i := range n {
			if who(c, fmt.Sprintf("d%03d", i)) == fmt.Sprintf("u%03d", i) {
				k++
			}
		}
		return k
	}
	// One by one over many deltas, 30 of 300 may go; the rest is held.
	held := 0
	for i := range 100 {
		held += delta(t, d, gone(fmt.Sprintf("u%03d", i))).Held
	}
	if held != 70 || served() != 270 {
		t.Errorf("%d held, %d served; want 70 and 270", held, served())
	}
	s := d.Status()
	if s.Totals.Users != 200 || !s.GuardTripped || s.Held != 70 || s.Records != 200 {
		t.Errorf("status %+v", s)
	}
	// Upserts flow on, also of one that is held.
	delta(t, d, put("new", user("dnew")), put("u050", user("d050")))
	wantWho(t, c, "dnew", "new")
	if s := d.Status(); s.Held != 69 {
		t.Errorf("%d held after one came back", s.Held)
	}
	// Nor may they all be switched off, or lose their devices.
	off := user("d200")
	off.Disabled = true
	if res := delta(t, d, put("u200", off)); res.Held != 1 {
		t.Errorf("disabling during a trip: %+v", res)
	}
	wantWho(t, c, "d200", "u200")

	closeCache(t, c)
	c = open(t, Options{Dir: dir})
	d = c.Dataset(Users)
	if got := served(); got != 270 {
		t.Errorf("after a restart %d are served, want 270", got)
	}
	if res := delta(t, d, gone("u150")); res.Held != 1 {
		t.Error("the guard's memory did not survive a restart")
	}

	// Expiry, then accepting the rest.
	for key, e := range d.overlay {
		if key == "u099" {
			e.until = day.Unix()
		}
	}
	d.expire(day)
	wantWho(t, c, "d099", "unknown")
	if k := d.AcceptShrink(day); k == 0 || d.Status().Held != 0 || d.Status().GuardTripped {
		t.Errorf("%d released, status %+v", k, d.Status())
	}
	wantWho(t, c, "d200", "disabled")
	wantWho(t, c, "d098", "unknown")
	wantWho(t, c, "d050", "u050")
	root := d.Root()
	closeCache(t, c)
	c = open(t, Options{Dir: dir})
	if d = c.Dataset(Users); d.Root() != root || len(d.Overlay()) != 0 {
		t.Error("what was accepted came back with a restart")
	}
	wantWho(t, c, "d098", "unknown")
}

// A list that lost its rules and was accepted is judged by what it has now.
func TestAcceptedListIsTheNewMeasure(t *testing.T) {
	d := begin(t, open(t, Options{}).Dataset(CatalogueKind))
	list := func(rules uint32) Change {
		l := listRecord(1)
		l.Rules = rules
		return put("list/a", l)
	}
	delta(t, d, list(1000))
	delta(t, d, list(1000))
	if res := delta(t, d, list(50)); res.Held != 1 {
		t.Fatalf("%+v", res)
	}
	delta(t, d, put(guardKey, &userv1.ShrinkAccepted{ThroughRevision: d.Status().Revision}))
	if res := delta(t, d, list(49)); res.Held != 0 || d.Status().Held != 0 {
		t.Errorf("after it was accepted: %+v, %d held", res, d.Status().Held)
	}
}

// One accept at the service frees the fleet: it comes as a record.
func TestShrinkAcceptedByTheService(t *testing.T) {
	c := open(t, Options{})
	d := begin(t, c.Dataset(Users))
	for i := range 100 {
		delta(t, d, put(fmt.Sprintf("u%d", i), user(fmt.Sprintf("d%d", i))))
	}
	for i := range 90 {
		delta(t, d, gone(fmt.Sprintf("u%d", i)))
	}
	if s := d.Status(); s.Held != 70 {
		t.Fatalf("%d held", s.Held)
	}
	through := d.Status().Revision
	delta(t, d, put(guardKey, &userv1.ShrinkAccepted{ThroughRevision: through}))
	if s := d.Status(); s.Held != 0 || s.GuardTripped {
		t.Errorf("after the service accepted: %+v", s)
	}
	wantWho(t, c, "d50", "unknown")
	wantWho(t, c, "d95", "u95")
}

func TestGuardForgetsAfterADay(t *testing.T) {
	g := newGuard(GuardOptions{})
	g.observe(Totals{Users: 1000}, day)
	g.observe(Totals{Users: 950}, day.Add(2*time.Hour))
	if g.loss(Totals{Users: 899}) == 0 || g.loss(Totals{Users: 900}) != 0 {
		t.Error("10 % of 1000 is not where the guard trips")
	}
	if g.loss(Totals{Users: 999}) != 0 || newGuard(GuardOptions{}).hours != nil {
		t.Error("the guard trips at one")
	}
	g.observe(Totals{Users: 950}, day.Add(26*time.Hour))
	if g.loss(Totals{Users: 899}) != 0 || g.loss(Totals{Users: 854}) == 0 {
		t.Error("a maximum older than a day counts, or the newer one does not")
	}
	g.observe(Totals{Users: 10}, day.Add(-1000*time.Hour)) // the date steps back
	if g.loss(Totals{Users: 854}) == 0 {
		t.Error("a date that steps back makes the guard forget")
	}
	for i := range 100 {
		g.observe(Totals{Users: 1}, day.Add(time.Duration(i)*time.Hour))
	}
	if len(g.hours) > maxGuardHours {
		t.Errorf("%d hours kept", len(g.hours))
	}
}

func TestIdentity(t *testing.T) {
	c := open(t, Options{})
	d := c.Dataset(Users)
	ctx := context.Background()
	if _, err := d.ApplyDelta(ctx, testID, Delta{To: 1}, day); !errors.Is(err, ErrOtherDataset) {
		t.Errorf("a delta for an empty cache: %v", err)
	}
	if _, err := d.ApplyBucket(ctx, testID, BucketData{}, day); err == nil {
		t.Error("a bucket outside a transfer was taken")
	}
	wantWho(t, c, "a-pc", "not ready")
	if err := d.BeginTransfer(testID, false); err != nil {
		t.Fatal(err)
	}
	if _, err := d.ApplyDelta(ctx, testID, Delta{To: 1}, day); !errors.Is(err, ErrIncomplete) {
		t.Errorf("a delta in the middle of the first transfer: %v", err)
	}
	// While nothing has come, another dataset may come instead.
	if err := d.BeginTransfer(Identity{Dataset: [16]byte{9}}, false); err != nil {
		t.Error(err)
	}
	if err := d.BeginTransfer(testID, false); err != nil {
		t.Error(err)
	}
	a := put("a", user("a-pc"))
	if _, err := d.ApplyBucket(ctx, testID, BucketData{Bucket: BucketOf(a.Key), AsOf: 5, Whole: true, Records: []Record{{a.Key, 5, a.Bytes}}}, day); err != nil {
		t.Fatal(err)
	}
	// What has come is served; who has not come is not a stranger yet.
	wantWho(t, c, "a-pc", "a")
	wantWho(t, c, "b-pc", "not ready")
	if err := d.BeginTransfer(Identity{Dataset: [16]byte{9}}, false); !errors.Is(err, ErrOtherDataset) {
		t.Errorf("another dataset in the middle of the first transfer: %v", err)
	}
	if d.Status().Complete {
		t.Error("complete in the middle of the first transfer")
	}
	if err := d.FinishTransfer(testID, 6, day); err == nil {
		t.Error("a transfer ended beyond its oldest bucket")
	}
	if err := d.FinishTransfer(testID, 5, day); err != nil {
		t.Fatal(err)
	}
	wantWho(t, c, "b-pc", "unknown")

	other, lineage := Identity{Dataset: [16]byte{9}}, Identity{Dataset: testID.Dataset, Lineage: [16]byte{7}}
	for _, id := range []Identity{other, lineage, {}} {
		if err := d.BeginTransfer(id, false); !errors.Is(err, ErrOtherDataset) {
			t.Errorf("a transfer of %v: %v", id, err)
		}
		if _, err := d.ApplyDelta(ctx, id, Delta{From: 5, To: 6}, day); !errors.Is(err, ErrOtherDataset) {
			t.Errorf("a delta of %v: %v", id, err)
		}
	}
	if err := d.AcceptLineage(other, Agreement{Equal: 1}); err == nil {
		t.Error("another dataset passed for a lineage")
	}
	if err := d.AcceptLineage(lineage, Agreement{Equal: 89, Differing: 11}); err == nil {
		t.Error("89 % passed for 90 %")
	}
	if err := d.AcceptLineage(lineage, Agreement{Equal: 90, Differing: 10}); err != nil {
		t.Error(err)
	}
	wantWho(t, c, "a-pc", "a")
	if err := d.AcceptDataset(other); err != nil {
		t.Fatal(err)
	}
	wantWho(t, c, "a-pc", "a") // until the new data comes
	wantWho(t, c, "b-pc", "not ready")
	if _, err := d.ApplyBucket(ctx, other, BucketData{Bucket: BucketOf(a.Key), AsOf: 2, Whole: true}, day); err != nil {
		t.Fatal(err)
	}
	if err := d.FinishTransfer(other, 2, day); err != nil {
		t.Fatal(err)
	}
	wantWho(t, c, "a-pc", "unknown")
	if s := d.Status(); s.Revision != 2 || s.Identity != other || !s.Complete {
		t.Errorf("status %+v", s)
	}
}

// A service that lost its newest revisions has less than the resolver: the transfer replaces them.
func TestDivergedDataset(t *testing.T) {
	c := open(t, Options{Guard: GuardOptions{Share: 1}})
	s := newService()
	d := begin(t, c.Dataset(Users))
	for i := range 50 {
		s.change(put(fmt.Sprintf("u%d", i), user(fmt.Sprintf("d%d", i))))
	}
	if _, err := d.ApplyDelta(context.Background(), testID, s.since(0, 50), day); err != nil {
		t.Fatal(err)
	}
	lost := &service{revision: 40, records: maps.Clone(s.records), tree: NewTree()}
	for k, r := range lost.records {
		if r.Revision > 40 {
			delete(lost.records, k)
		} else {
			lost.tree.Add(BucketOf(r.Key), LeafOf(r.Key, r.Revision, r.Bytes))
		}
	}
	lost.repair(t, d, true, func() {})
	if d.Root() != lost.tree.Root() || d.Status().Revision != 40 {
		t.Errorf("revision %d, root differs: %v", d.Status().Revision, d.Root() != lost.tree.Root())
	}
	wantWho(t, c, "d45", "unknown")
}

// What a bucket's sender would have seen gives way to what it did see, also where its revision is higher.
func TestTransferOverRecordsThatShouldNotBe(t *testing.T) {
	c := open(t, Options{})
	d := begin(t, c.Dataset(Users))
	wrong, right := put("a", user("wrong")), put("a", user("right"))
	wrong.Revision = 10
	for _, as := range []struct {
		asOf uint64
		want string
	}{{9, "wrong"}, {20, "right"}} {
		if _, err := d.ApplyDelta(context.Background(), testID, Delta{To: 10, Changes: []Change{wrong}}, day); err != nil {
			t.Fatal(err)
		}
		if err := d.BeginTransfer(testID, false); err != nil {
			t.Fatal(err)
		}
		b := BucketData{Bucket: BucketOf(right.Key), AsOf: as.asOf, Whole: true, Records: []Record{{right.Key, 8, right.Bytes}}}
		if _, err := d.ApplyBucket(context.Background(), testID, b, day); err != nil {
			t.Fatal(err)
		}
		if err := d.FinishTransfer(testID, as.asOf, day); err != nil {
			t.Fatal(err)
		}
		wantWho(t, c, as.want, "a")
	}
}

// A transfer that a restart interrupted goes on with what is still missing, and may end at the newer
// revision at which the rest was found equal.
func TestTransferResumesAfterRestart(t *testing.T) {
	dir := t.TempDir()
	s := newService()
	for i := range 50 {
		s.change(put(fmt.Sprintf("u%d", i), user(fmt.Sprintf("d%d", i))))
	}
	c := open(t, Options{Dir: dir})
	d := c.Dataset(Users)
	if err := d.BeginTransfer(testID, false); err != nil {
		t.Fatal(err)
	}
	for i := range 30 {
		if _, err := d.ApplyBucket(context.Background(), testID, s.bucket(BucketOf(fmt.Appendf(nil, "u%d", i))), day); err != nil {
			t.Fatal(err)
		}
	}
	closeCache(t, c)
	c = open(t, Options{Dir: dir})
	d = c.Dataset(Users)
	if st := d.Status(); st.Complete || !st.Transferring || st.OldestAsOf != 50 || st.Records < 30 {
		t.Fatalf("after a restart %+v", st)
	}
	wantWho(t, c, "d7", "u7")
	wantWho(t, c, "d49", "not ready")
	s.change(put("late", user("late-pc")))
	fetched := 0
	s.repair(t, d, false, func() { fetched++ })
	if st := d.Status(); fetched > 21 || !st.Complete || st.Revision != 51 || d.Root() != s.tree.Root() {
		t.Errorf("%d buckets fetched, %+v", fetched, st)
	}
}

func TestRefusedInput(t *testing.T) {
	c := open(t, Options{})
	d := begin(t, c.Dataset(Users))
	ctx := context.Background()
	a := put("a", user("a-pc"))
	a.Revision = 1
	for what, dl := range map[string]Delta{
		"no key":             {To: 1, Changes: []Change{{Revision: 1}}},
		"a long key":         {To: 1, Changes: []Change{{Key: make([]byte, MaxKey+1), Revision: 1}}},
		"a big record":       {To: 1, Changes: []Change{{Key: []byte("a"), Bytes: make([]byte, MaxRecord+1), Revision: 1}}},
		"a revision beyond":  {To: 1, Changes: []Change{{Key: []byte("a"), Revision: 2}}},
		"a good and a wrong": {To: 1, Changes: []Change{a, {Revision: 1}}},
	} {
		if _, err := d.ApplyDelta(ctx, testID, dl, day); err == nil {
			t.Errorf("a delta with %s was taken", what)
		}
	}
	if err := d.BeginTransfer(testID, false); err != nil {
		t.Fatal(err)
	}
	for what, b := range map[string]BucketData{
		"a record of another bucket": {Bucket: BucketOf(a.Key) + 1, AsOf: 9, Records: []Record{{a.Key, 1, a.Bytes}}},
		"a revision beyond":          {Bucket: BucketOf(a.Key), AsOf: 1, Records: []Record{{a.Key, 2, a.Bytes}}},
		"a record that is missing":   {Bucket: BucketOf(a.Key), AsOf: 1, Records: []Record{{a.Key, 1, a.Bytes}}, Missing: [][]byte{a.Key}},
	} {
		if _, err := d.ApplyBucket(ctx, testID, b, day); err == nil {
			t.Errorf("a bucket with %s was taken", what)
		}
	}
	if n := d.Status().Records; n != 0 {
		t.Errorf("refused input left %d records", n)
	}
	// A root that differs undoes nothing, and makes suspect.
	if err := d.FinishTransfer(testID, 0, day); err != nil {
		t.Fatal(err)
	}
	wrong := Hash{1}
	res, err := d.ApplyDelta(ctx, testID, Delta{To: 1, Changes: []Change{a}, Root: &wrong}, day)
	if err != nil || !res.RootDiffers || !d.Status().Suspect {
		t.Errorf("a wrong root: %+v, %v", res, err)
	}
	wantWho(t, c, "a-pc", "a")
}

// Changes reach the disk a quarter of a second after the first, all of them in one group.
func TestGroupReachesDiskByItself(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		var commits atomic.Int32
		c, err := Open(Options{Dir: dir, fault: func(step string) error {
			if step == "commit" || step == "checkpoint" {
				commits.Add(1)
			}
			return nil
		}})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		d := begin(t, c.Dataset(Users))
		if err := d.Flush(context.Background()); err != nil {
			t.Fatal(err)
		}
		commits.Store(0)
		for i := range 20 {
			delta(t, d, put(fmt.Sprintf("u%d", i), user()))
		}
		time.Sleep(240 * time.Millisecond)
		synctest.Wait()
		if p := d.Status().PersistedRevision; p != 0 || commits.Load() != 0 {
			t.Errorf("revision %d is on disk too early, by %d commits", p, commits.Load())
		}
		time.Sleep(20 * time.Millisecond)
		synctest.Wait()
		if p := d.Status().PersistedRevision; p != 20 || commits.Load() != 1 {
			t.Errorf("revision %d is on disk, by %d commits; want 20 by one", p, commits.Load())
		}
	})
}

// The buckets of a transfer come to one snapshot, when it ends or some time after it was broken off; a delta that
// comes meanwhile is answered by at once.
func TestSnapshotOfTransfer(t *testing.T) {
	c := open(t, Options{})
	d := begin(t, c.Dataset(CatalogueKind))
	delta(t, d, put("list/old", listRecord(0)))
	heard := make(chan struct{}, 1)
	d.Notify(heard)
	buckets := func(from, to uint32) {
		t.Helper()
		if err := d.BeginTransfer(testID, false); err != nil {
			t.Fatal(err)
		}
		for n := from; n < to; n++ {
			r := put(fmt.Sprintf("list/new%d", n), listRecord(n))
			b := BucketData{Bucket: BucketOf(r.Key), AsOf: 1000, Records: []Record{{r.Key, 900, r.Bytes}}}
			if _, err := d.ApplyBucket(context.Background(), testID, b, day); err != nil {
				t.Fatal(err)
			}
		}
	}
	lists := func(want int) {
		t.Helper()
		if n := len(c.Catalogue().Lists); n != want {
			t.Errorf("the catalogue has %d lists, want %d", n, want)
		}
	}
	serial := c.Catalogue().serial
	buckets(1, 21)
	lists(1)
	for len(heard) > 0 {
		<-heard
	}
	if err := d.FinishTransfer(testID, 1000, day); err != nil {
		t.Fatal(err)
	}
	lists(21)
	if n := c.Catalogue().serial - serial; n != 1 || len(heard) == 0 {
		t.Errorf("%d snapshots, %d told", n, len(heard))
	}

	buckets(21, 31)
	lists(21)
	for len(heard) > 0 {
		<-heard
	}
	d.expire(day)
	lists(31)
	if len(heard) == 0 {
		t.Error("nobody is told of what a broken transfer has brought")
	}
	serial = c.Catalogue().serial
	d.expire(day)
	if c.Catalogue().serial != serial {
		t.Error("a new snapshot without a change")
	}
	buckets(31, 33)
	delta(t, d, put("list/live", listRecord(40)))
	lists(34)
}
