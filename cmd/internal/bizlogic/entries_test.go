package bizlogic

import (
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

// Every entry of the starting catalogue is one the service would take from an operator, with no rule lost.
func TestStartingCatalogue(t *testing.T) {
	s := start(t, Options{Compile: Engine}).svc
	count := map[string]int{}
	rewrites := 0
	for key, m := range startingCatalogue() {
		what, id, _ := strings.Cut(key, "/")
		count[what]++
		if err := checkID("id", id); err != nil {
			t.Error(err)
		}
		want := proto.Clone(m)
		if err := s.checkEntryBody(id, m); err != nil {
			t.Errorf("%s: %v", key, err)
		}
		if !proto.Equal(m, want) {
			t.Errorf("%s is not in the form that is stored", key)
		}
		switch m := m.(type) {
		case *userv1.Service:
			if m.Name == "" || m.Group == "" {
				t.Errorf("%s has no name or group", key)
			}
		case *userv1.SafeSearch:
			rewrites += len(m.Rewrites)
		}
	}
	if count["service"] < 139 || count["safesearch"] < 8 || count["category"] < 10 || rewrites < 258 {
		t.Errorf("%v, %d rewrites", count, rewrites)
	}
	strict := startingCatalogue()["safesearch/youtube"].(*userv1.SafeSearch)
	moderate := startingCatalogue()["safesearch/youtube-moderate"].(*userv1.SafeSearch)
	if len(strict.Rewrites) != 5 || len(moderate.Rewrites) != 5 || strict.Rewrites[0].Records[0] == moderate.Rewrites[0].Records[0] {
		t.Errorf("%v and %v", strict, moderate)
	}
}

// A new version's catalogue comes to a store that is there, and leaves alone what the operator has decided.
func TestCatalogueOfANewVersion(t *testing.T) {
	dir := t.TempDir()
	r := start(t, Options{Dir: dir})
	entries := adminv1.NewCatalogueServiceClient(r.dial())
	service := adminv1.EntryKind_ENTRY_KIND_SERVICE
	set := func(id, key string, op adminv1.Operation, value string) {
		t.Helper()
		_, err := entries.SetEntry(t.Context(), &adminv1.SetEntryRequest{Kind: service, Id: id, Assignments: []*adminv1.Assignment{{Key: key, Operation: op, Value: value}}})
		if err != nil {
			t.Fatal(err)
		}
	}
	set("tiktok", "rules", adminv1.Operation_OPERATION_ADD, "||clock.example^")
	if _, err := entries.DeleteEntry(t.Context(), &adminv1.DeleteEntryRequest{Kind: service, Id: "reddit"}); err != nil {
		t.Fatal(err)
	}
	// As if four services had been seeded by an earlier version: unchanged, changed, removed since, and not known.
	err := r.svc.db.Update(func(tx *bolt.Tx) error {
		old := &userv1.Service{Name: "Old", Group: "x", Rules: []string{"||old.example^"}, Number: 77}
		sum, err := seedHash(old)
		if err != nil {
			return err
		}
		b := newBatch(tx, r.svc.db.id, time.Now(), Guard{}.withDefaults(), dir)
		_, err = b.run(&op{plan: func(v *view) error {
			for _, id := range []string{"spotify", "tiktok", "reddit"} {
				if err := v.auxPut(bucketSeeded, "service/"+id, &storev1.Seeded{Sha256: sum}); err != nil {
					return err
				}
			}
			v.remove(Catalogue, "service/steam")
			v.auxDelete(bucketSeeded, "service/steam")
			return v.put(Catalogue, "service/spotify", old)
		}})
		if err != nil {
			return err
		}
		return b.finish()
	})
	if err != nil {
		t.Fatal(err)
	}
	r.stop()
	r = start(t, Options{Dir: dir})
	entries = adminv1.NewCatalogueServiceClient(r.dial())
	get := func(id string) *adminv1.CatalogueEntry {
		resp, err := entries.GetEntry(t.Context(), &adminv1.GetEntryRequest{Kind: service, Id: id})
		if err != nil {
			return nil
		}
		return resp.Entry
	}
	if e := get("spotify"); e.GetOrigin() != adminv1.Origin_ORIGIN_BUILT_IN || e.GetService().GetNumber() != 77 || len(e.GetService().GetRules()) < 3 {
		t.Errorf("unchanged since: %v", e)
	}
	if e := get("tiktok"); e.GetOrigin() != adminv1.Origin_ORIGIN_CHANGED || !strings.Contains(e.String(), "clock.example") {
		t.Errorf("changed since: %v", e)
	}
	if e := get("reddit"); e != nil {
		t.Errorf("removed since: %v", e)
	}
	if e := get("steam"); e.GetOrigin() != adminv1.Origin_ORIGIN_BUILT_IN {
		t.Errorf("not known: %v", e)
	}
	head := r.svc.Head(Catalogue)
	r.stop()
	r = start(t, Options{Dir: dir})
	if got := r.svc.Head(Catalogue); got != head {
		t.Errorf("a start without news makes a commit: %d became %d", head, got)
	}

	// Only what is the operator's is exported, and it can be imported.
	lines := exportAll(t, r, "entry")
	if len(lines) != 1 || !strings.Contains(string(lines[0]), "tiktok") {
		t.Errorf("%q", lines)
	}
	other := start(t, Options{})
	resp, err := other.data.Import(t.Context(), &adminv1.ImportRequest{Id: "x", FirstLine: 1, Lines: lines})
	if err != nil || resp.Changed != 1 {
		t.Errorf("%v, %v", resp, err)
	}
	_, err = other.data.Import(t.Context(), &adminv1.ImportRequest{Id: "y", FirstLine: 1, Lines: [][]byte{[]byte(`{"entry":{"id":"x"}}`)}})
	wantError(t, err, codes.InvalidArgument, "line 1")
}
