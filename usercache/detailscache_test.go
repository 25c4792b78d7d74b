package usercache

import (
	"fmt"
	"sync"
	"testing"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/usercache/internal/store"
	"google.golang.org/protobuf/proto"
)

// Devices of all sizes ask from several sides at once: each gets its own Details, they take no more than the budget,
// and those that ask again and again are still there after many that asked once.
func TestDetailsBudget(t *testing.T) {
	cat := newCatalogue(1, nil, nil)
	record := func(user int) (r store.Record, device []byte, p Profile) {
		d := &userv1.Device{Id: fmt.Sprintf("d%d", user), Name: fmt.Sprintf("name %d", user), Tags: []string{"device_pc"}}
		if user%50 == 7 {
			d.Settings = &userv1.Settings{AllowDomains: &userv1.StringSet{}}
			for i := range 100 {
				d.Settings.AllowDomains.Values = append(d.Settings.AllowDomains.Values, fmt.Sprintf("a-long-name-%d.example", i))
			}
		}
		b, err := proto.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		p.User, p.Revision = uint32(user), 1
		p.DeviceID, _ = ParseID(d.Id)
		return store.Record{}, b, p
	}
	const budget = 256 << 10
	var dc detailsCache
	dc.init(budget)
	get := func(user int) *Details {
		r, device, p := record(user)
		d := dc.get(cat, &r, device, &p)
		if want := fmt.Sprintf("name %d", user); d == nil || d.Name != want {
			t.Errorf("user %d has the Details of %+v", user, d)
		}
		return d
	}
	const regulars = 20
	first := make([]*Details, regulars)
	for u := range regulars {
		first[u] = get(u)
	}
	var most int64
	lost := 0
	for u := regulars; u < 5000; u++ {
		get(u)
		most = max(most, dc.bytes.Load())
		for k := range regulars {
			if d := get(k); d != first[k] {
				first[k] = d
				lost++
			}
		}
	}
	if most > budget || most < budget/2 {
		t.Errorf("at most %d bytes were kept, of %d", most, budget)
	}
	if lost > regulars {
		t.Errorf("those that ask all the time were merged anew %d times", lost)
	}

	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for k := range 3000 {
				get((k*7 + w*13) % 900)
			}
		})
	}
	wg.Wait()
	kept := int64(0)
	for i := range dc.slots {
		if e := dc.slots[i].Load(); e != nil {
			kept += e.bytes
		}
	}
	if kept != dc.bytes.Load() || kept > budget {
		t.Errorf("%d bytes are kept, %d counted, of %d", kept, dc.bytes.Load(), budget)
	}
	// A changed record, or catalogue, counts at once; the old entry makes room.
	r, device, p := record(3)
	before := dc.get(cat, &r, device, &p)
	p.Revision = 2
	if dc.get(cat, &r, device, &p) == before {
		t.Error("the Details of an older record")
	}
}
