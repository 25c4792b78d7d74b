package usercache

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

func TestBlobsOfRecords(t *testing.T) {
	hash := func(n byte) []byte { return bytes.Repeat([]byte{n}, 32) }
	settings := func(n byte) *userv1.Settings {
		return &userv1.Settings{Lists: &userv1.StringSet{Values: []string{"ads"}}, OwnLists: &userv1.OwnListSet{
			Values: []*userv1.OwnList{{Id: "a", Sha256: hash(n)}, {Id: "b", Sha256: hash(n + 1), Url: "https://a.example/"}}, Removed: []string{"c"}}}
	}
	long := func(n byte) *userv1.Rules {
		return &userv1.Rules{Body: &userv1.Rules_Sha256{Sha256: hash(n)}, Size: 40_000}
	}
	short := &userv1.Rules{Body: &userv1.Rules_Text{Text: hash(99)}}
	for _, c := range []struct {
		key  string
		m    proto.Message
		want []byte
	}{
		{"ann", &userv1.User{Policy: "p", Settings: settings(1), Rules: long(3), Devices: []*userv1.Device{
			{Id: "pc", TokenSha256: [][]byte{hash(98)}}, {Id: "tv", Settings: settings(4), Rules: long(6)}}}, []byte{1, 2, 3, 4, 5, 6}},
		{"bob", &userv1.User{Rules: short}, nil},
		{"policy/p", &userv1.Policy{Settings: settings(1), Rules: long(3)}, []byte{1, 2, 3}},
		{"list/ads", &userv1.List{Name: "Ads", Sha256: hash(7), Size: 3}, []byte{7}},
		{"service/x", &userv1.Service{Name: "x", Rules: []string{"||x.example^"}}, nil},
	} {
		b, err := proto.Marshal(c.m)
		if err != nil {
			t.Fatal(err)
		}
		walk := userBlobs
		if bytes.IndexByte([]byte(c.key), '/') >= 0 {
			walk = catalogueBlobs
		}
		var got []byte
		walk([]byte(c.key), b, func(h [32]byte) { got = append(got, h[0]) })
		if slices.Sort(got); !slices.Equal(got, c.want) {
			t.Errorf("%s names %v; want %v", c.key, got, c.want)
		}
		for n := range b { // a record that was cut short must not do harm
			walk([]byte(c.key), b[:n], func([32]byte) {})
		}
	}
}

// Blobs of changes are told once, with the revision that brought them; those of removals and old news are not.
func TestNewBlobs(t *testing.T) {
	d := begin(t, open(t, Options{}).Dataset(CatalogueKind))
	list := func(key string, revision uint64, n byte) Change {
		b, err := proto.Marshal(&userv1.List{Number: uint32(n), Sha256: bytes.Repeat([]byte{n}, 32), Size: 3})
		if err != nil {
			t.Fatal(err)
		}
		return Change{Key: []byte(key), Revision: revision, Bytes: b}
	}
	delta := Delta{To: 3, Changes: []Change{list("list/a", 1, 1), list("list/b", 2, 2), {Key: []byte("list/c"), Revision: 3, Removed: true}}}
	for range 2 { // the second time it is nothing new
		if _, err := d.ApplyDelta(t.Context(), testID, delta, day); err != nil {
			t.Fatal(err)
		}
	}
	got := d.NewBlobs()
	if len(got) != 2 || got[0].Sum[0] != 1 || got[0].Revision != 1 || got[1].Sum[0] != 2 || got[1].Revision != 2 {
		t.Errorf("%v", got)
	}
	if more := d.NewBlobs(); len(more) > 0 {
		t.Errorf("told twice: %v", more)
	}
	many := Delta{From: 3, To: 4}
	for i := range maxNewBlobs + 10 {
		many.Changes = append(many.Changes, list(fmt.Sprintf("list/x%d", i), 4, byte(i)))
	}
	if _, err := d.ApplyDelta(t.Context(), testID, many, day); err != nil {
		t.Fatal(err)
	}
	if n := len(d.NewBlobs()); n != maxNewBlobs {
		t.Errorf("%d are told of", n)
	}
	// A first start, or a repair, brings records in buckets.
	if err := d.BeginTransfer(testID, false); err != nil {
		t.Fatal(err)
	}
	c := list("list/late", 5, 7)
	whole := BucketData{Bucket: BucketOf(c.Key), AsOf: 5, Records: []Record{{c.Key, 5, c.Bytes}}}
	if _, err := d.ApplyBucket(t.Context(), testID, whole, day); err != nil {
		t.Fatal(err)
	}
	if got := d.NewBlobs(); len(got) != 1 || got[0].Sum[0] != 7 || got[0].Revision != 5 {
		t.Errorf("of a bucket: %v", got)
	}
}
