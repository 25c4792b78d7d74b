package bizlogic

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"

	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache"
)

// Migrate brings the store in dir to this program's format, and makes everything that derives from records
// anew: trees, counts, the by-revision index and the service's own indexes. It says what it found wrong.
// Records themselves are not changed. No service may have the store open.
func Migrate(dir string) (found []string, err error) {
	path := filepath.Join(dir, "store.db")
	if err := checkFile(path); err != nil { // also when there is none: nothing is made here
		return nil, err
	}
	f, err := openStore(dir, clock.Wall())
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	err = f.Update(func(tx *bolt.Tx) error {
		svc := tx.Bucket(bucketService)
		indexes := map[string]map[string]string{}
		for _, name := range [][]byte{bucketIDs, bucketClaims, bucketPolicies, bucketOwnUses} {
			indexes[string(name)] = map[string]string{}
		}
		for _, kind := range kinds {
			wrong, err := rebuild(tx, kind, indexes)
			if err != nil {
				return fmt.Errorf("dataset %s: %w", kind, err)
			}
			found = append(found, wrong...)
		}
		for _, name := range sortedKeys(indexes) {
			differs, err := replaceBucket(svc, []byte(name), indexes[name])
			if err != nil {
				return err
			}
			if differs {
				found = append(found, fmt.Sprintf("service: index %s was not that of the records", name))
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("rebuilding %s: %w; nothing was changed", path, err)
	}
	return found, nil
}

// rebuild makes anew what derives from the records of a dataset, and fills the service's indexes.
func rebuild(tx *bolt.Tx, kind string, indexes map[string]map[string]string) (found []string, err error) {
	m, err := metaOf(tx, kind)
	if err != nil {
		return nil, err
	}
	ds := tx.Bucket([]byte(kind))
	was := proto.CloneOf(m)
	m.Records, m.Size, m.Totals = 0, 0, &userv1.Totals{}
	sums := map[uint16]usercache.BucketSum{}
	byRevision, tree := map[string]string{}, map[string]string{}
	err = ds.Bucket(bucketRecords).ForEach(func(k, v []byte) error {
		key, ok := usercache.KeyOfStoreKey(k)
		if !ok {
			return fmt.Errorf("store key %x is not that of a record", k)
		}
		revision, b, err := openRecord(v)
		if err != nil {
			return fmt.Errorf("record %q: %w", key, err)
		}
		if revision > m.Revision {
			return fmt.Errorf("record %q has revision %d, beyond the head %d", key, revision, m.Revision)
		}
		bucket := binary.BigEndian.Uint16(k)
		sums[bucket] = sums[bucket].Add(usercache.LeafOf(key, revision, b))
		m.Records++
		m.Size += uint64(len(key) + len(b))
		addTotals(m.Totals, kind, string(key), b, 1)
		byRevision[string(be64(revision))+string(key)] = ""
		if kind == Catalogue {
			for from, sum := range policyRecord(string(key), b).texts() {
				indexes[string(bucketOwnUses)][from+"\x00"+string(key)] = sum
			}
		}
		if kind == Users && !bytes.Contains(key, []byte("/")) {
			u := new(userv1.User)
			if err := proto.Unmarshal(b, u); err != nil {
				found = append(found, fmt.Sprintf("users: record %q cannot be decoded: %v", key, err))
			}
			indexes[string(bucketIDs)][string(key)] = ""
			if u.Policy != "" {
				indexes[string(bucketPolicies)][u.Policy+"\x00"+string(key)] = ""
			}
			for from, sum := range userLayers(u).texts() {
				indexes[string(bucketOwnUses)][from+"\x00"+string(key)] = sum
			}
			for c, owner := range claims(string(key), u) {
				if other := indexes[string(bucketClaims)][c]; other != "" {
					found = append(found, fmt.Sprintf("users: %s is claimed by %s and %s", claimText(c), other, owner))
				}
				indexes[string(bucketClaims)][c] = owner
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	tombstones := map[string]string{}
	err = ds.Bucket(bucketByRevision).ForEach(func(k, v []byte) error {
		var e storev1.Entry
		if err := proto.Unmarshal(v, &e); err != nil || len(k) <= 8 || !e.Removed {
			return nil // made anew from the records
		}
		if ds.Bucket(bucketRecords).Get(usercache.AppendStoreKey(nil, k[8:])) == nil {
			byRevision[string(k)] = string(v)
			tombstones[string(k[8:])] = string(k[:8])
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for bucket, sum := range sums {
		tree[string(binary.BigEndian.AppendUint16(nil, bucket))] = string(sum.AppendTo(nil))
	}
	if was.Records != m.Records || was.Size != m.Size || !proto.Equal(was.Totals, m.Totals) {
		found = append(found, fmt.Sprintf("%s: counts were not those of the records", kind))
	}
	for _, x := range []struct {
		name []byte
		want map[string]string
	}{{bucketTree, tree}, {bucketByRevision, byRevision}, {bucketTombstones, tombstones}} {
		differs, err := replaceBucket(ds, x.name, x.want)
		if err != nil {
			return nil, err
		}
		if differs {
			found = append(found, fmt.Sprintf("%s: %s was not that of the records", kind, x.name))
		}
	}
	m.Format = storeFormat
	return found, putProto(ds.Bucket(bucketMeta), keyMeta, m)
}

// replaceBucket gives a bucket the contents wanted, and reports whether it had others.
func replaceBucket(parent *bolt.Bucket, name []byte, want map[string]string) (bool, error) {
	b, all, same := parent.Bucket(name), 0, 0
	err := b.ForEach(func(k, v []byte) error {
		all++
		if w, ok := want[string(k)]; ok && w == string(v) {
			same++
		}
		return nil
	})
	if err != nil || same == all && same == len(want) {
		return false, err
	}
	if err := parent.DeleteBucket(name); err != nil {
		return false, err
	}
	if b, err = parent.CreateBucket(name); err != nil {
		return false, err
	}
	for _, k := range sortedKeys(want) {
		if err := b.Put([]byte(k), []byte(want[k])); err != nil {
			return false, err
		}
	}
	return true, nil
}
