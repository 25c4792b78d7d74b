package bizlogic

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"fmt"
	"strings"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"

	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

// A catalogue knows some services, categories and safe-search engines from the start, so that policies can name
// them. Operators add lists, which fill the categories. A new version of the program brings what has changed since
// to the catalogues that are there, but for entries that the operator has changed or removed: what was seeded is
// remembered by its hash, in the bucket "seeded".

//go:embed seed/services.txt
var servicesText string

//go:embed seed/safesearch.txt
var safeSearchText string

// startingCategories say how they take part in safe_browsing and adult, and which names are not a matter of taste.
var startingCategories = map[string]*userv1.Category{
	"ads":              {Name: "Advertising"},
	"tracking":         {Name: "Tracking"},
	"malware":          {Name: "Malware", Threat: true, SafeBrowsing: true},
	"phishing":         {Name: "Phishing and fraud", Threat: true, SafeBrowsing: true},
	"newly-registered": {Name: "Newly registered names"},
	"adult":            {Name: "Adult content", Adult: true},
	"gambling":         {Name: "Gambling"},
	"dating":           {Name: "Dating"},
	"social":           {Name: "Social networks"},
	"piracy":           {Name: "Piracy"},
	"bypass":           {Name: "Ways around filtering"},
}

// A seedRecord is a record of the starting catalogue, without its number, and its hash.
type seedRecord struct {
	m    proto.Message
	hash []byte
}

// startingHashes is the starting catalogue with hashes.
var startingHashes = sync.OnceValues(func() (map[string]seedRecord, error) {
	all := map[string]seedRecord{}
	for key, m := range startingCatalogue() {
		h, err := seedHash(m)
		if err != nil {
			return nil, err
		}
		all[key] = seedRecord{m, h}
	}
	return all, nil
})

// startingCatalogue is key → record, without numbers. Nobody changes them.
var startingCatalogue = sync.OnceValue(func() map[string]proto.Message {
	all := map[string]proto.Message{}
	for id, s := range readServices(servicesText) {
		all["service/"+id] = s
	}
	for id, s := range readSafeSearch(safeSearchText) {
		all["safesearch/"+id] = s
	}
	for id, c := range startingCategories {
		all["category/"+id] = c
	}
	return all
})

// sections reads lines of "[ID] TITLE", each followed by what belongs to it.
func sections(text string, line func(id, title, line string)) {
	id, title := "", ""
	for l := range strings.Lines(text) {
		l = strings.TrimRight(l, "\n")
		switch {
		case l == "" || l[0] == '#':
		case l[0] == '[':
			id, title, _ = strings.Cut(l[1:], "] ")
		default:
			line(id, title, l)
		}
	}
}

func readServices(text string) map[string]*userv1.Service {
	all := map[string]*userv1.Service{}
	sections(text, func(id, title, line string) {
		if all[id] == nil {
			group, name, _ := strings.Cut(title, " ")
			all[id] = &userv1.Service{Name: name, Group: group}
		}
		if !strings.ContainsAny(line, "|^/*") {
			line = "||" + line + "^"
		}
		all[id].Rules = append(all[id].Rules, line)
	})
	return all
}

func readSafeSearch(text string) map[string]*userv1.SafeSearch {
	all := map[string]*userv1.SafeSearch{}
	record := ""
	sections(text, func(id, title, line string) {
		if all[id] == nil {
			all[id] = &userv1.SafeSearch{Name: title}
		}
		if name, ok := strings.CutPrefix(line, "\t"); ok {
			all[id].Rewrites = append(all[id].Rewrites, &userv1.Rewrite{Name: name, Records: []string{record}})
		} else {
			record = line
		}
	})
	return all
}

// seedHash tells what a record says from what another says, apart from what is always the operator's: numbers, and
// the lists that fill a category.
func seedHash(m proto.Message) ([]byte, error) {
	m = proto.Clone(m)
	setNumber(m, 0)
	if c, ok := m.(*userv1.Category); ok {
		c.Lists = nil
	}
	b, err := encode(m)
	sum := sha256.Sum256(b)
	return sum[:], err
}

// seedCatalogue brings the starting catalogue of this version into a store that is being made or opened.
func seedCatalogue(tx *bolt.Tx, id *storev1.Identity, now time.Time) error {
	all, err := startingHashes()
	if err != nil {
		return err
	}
	b := newBatch(tx, id, now, Guard{}.withDefaults(), "")
	_, err = b.run(&op{plan: func(v *view) error {
		for _, key := range sortedKeys(all) {
			if err := v.seed(key, all[key].m, all[key].hash); err != nil {
				return fmt.Errorf("%s of the starting catalogue: %w", key, err)
			}
		}
		return nil
	}})
	if err != nil {
		return err
	}
	return b.finish()
}

// seed brings one record of the starting catalogue in, unless the operator has decided otherwise.
func (v *view) seed(key string, m proto.Message, want []byte) error {
	given, err := v.seeded(key)
	if err != nil || bytes.Equal(given, want) {
		return err // what has become of it since is the operator's doing
	}
	cur := m.ProtoReflect().New().Interface()
	_, there, err := v.load(Catalogue, key, cur)
	if err != nil {
		return err
	}
	have, err := seedHash(cur)
	if err != nil {
		return err
	}
	if there && bytes.Equal(have, given) || !there && given == nil {
		if c, ok := cur.(*userv1.Category); ok && len(c.Lists) > 0 {
			filled := proto.CloneOf(m.(*userv1.Category))
			filled.Lists = c.Lists
			m = filled
		}
		if err := v.putEntry(key, m); err != nil {
			return err
		}
	}
	return v.auxPut(bucketSeeded, key, &storev1.Seeded{Sha256: want})
}

// seeded is the hash of what a starting catalogue gave a record; nil if none did.
func (v *view) seeded(key string) ([]byte, error) {
	b := v.auxGet(bucketSeeded, key)
	if b == nil {
		return nil, nil
	}
	s := new(storev1.Seeded)
	if err := proto.Unmarshal(b, s); err != nil {
		return nil, fmt.Errorf("seed of %s: %w", key, err)
	}
	return s.Sha256, nil
}
