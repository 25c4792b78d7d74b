package bizlogic

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
	"google.golang.org/protobuf/proto"

	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/usercache"
)

// The layout of store.db. Each kind of dataset is a bucket with buckets in it:
//
//	meta         "meta" → store.v1 Meta
//	records      store key (usercache.AppendStoreKey) → store.v1 Record
//	by_revision  be64 revision ‖ key → store.v1 Entry without key; each record's newest change, or its removal
//	tombstones   key → be64 revision of the removal, to find the Entry when the record comes back
//	tree         be16 bucket → 24 bytes of usercache.BucketSum; empty buckets are absent
//
// The bucket "service" holds what only this service knows, in buckets:
//
//	identity     "identity" → store.v1 Identity
//	ids          user id → nothing: users in order
//	claims       what a device claims → USER/DEVICE; see claims()
//	policies     POLICY\x00USER → nothing: who refers to a policy
//	sources      list id → store.v1 ListSource
//	own          URL, or "sha256:" and a hash → store.v1 OwnSource; see own.go
//	own_uses     URL\x00OWNER → SHA-256 of the text he has: who has it among his own lists
//	seeded       catalogue key → store.v1 Seeded; see seed.go
//	imports      import id → store.v1 ImportState
//	tokens       token id → store.v1 Token
const storeFormat = 1

var (
	bucketMeta       = []byte("meta")
	bucketRecords    = []byte("records")
	bucketByRevision = []byte("by_revision")
	bucketTombstones = []byte("tombstones")
	bucketTree       = []byte("tree")

	bucketService  = []byte("service")
	bucketIdentity = []byte("identity")
	bucketIDs      = []byte("ids")
	bucketClaims   = []byte("claims")
	bucketPolicies = []byte("policies")
	bucketSources  = []byte("sources")
	bucketOwn      = []byte("own")
	bucketOwnUses  = []byte("own_uses")
	bucketSeeded   = []byte("seeded")
	bucketImports  = []byte("imports")
	bucketTokens   = []byte("tokens")

	datasetBuckets = [][]byte{bucketMeta, bucketRecords, bucketByRevision, bucketTombstones, bucketTree}
	// laterBuckets are missing in files of earlier versions.
	laterBuckets   = [][]byte{bucketOwn, bucketOwnUses, bucketSeeded}
	serviceBuckets = [][]byte{bucketIdentity, bucketIDs, bucketClaims, bucketPolicies, bucketSources, bucketImports, bucketTokens}

	keyMeta     = []byte("meta")
	keyIdentity = []byte("identity")
)

// initialMmap is address space, not memory: a file that stays below it never makes a writer wait for
// readers to let go of an old mapping.
const initialMmap = 4 << 30

// lineageStep is how far revisions jump when the lineage changes, so that nothing given out by a store
// that this one may have forked from is given out again.
const lineageStep = 1_000_000

// ErrLocked is within the *StoreError of a store that another process has open.
var ErrLocked = errors.New("another process has it open")

// A StoreError says why a store file cannot be used. The file is left as it is.
type StoreError struct {
	Path string
	What string // "is locked by another process", …
	Try  string // what to do
	Err  error  // the cause, if there is one beyond What
}

func (e *StoreError) Error() string {
	s := e.Path + " " + e.What
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	if e.Try != "" {
		s += "; " + e.Try
	}
	return s
}

func (e *StoreError) Unwrap() error { return e.Err }

// A storeFile is the open file.
type storeFile struct {
	*bolt.DB
	dir     string
	lineage [16]byte
	id      *storev1.Identity // as committed; owned by the writer after opening
	note    string            // something to log at start
	side    sidecar

	device, inode uint64
	unsettled     error // why the generation could not be entered; nil if it was. Owned by the writer after opening
}

// openStore opens dir/store.db, or makes it.
func openStore(dir string, now time.Time) (*storeFile, error) {
	path := filepath.Join(dir, "store.db")
	if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
		if err := createStore(path, now); err != nil {
			return nil, err
		}
	}
	switch fi, err := os.Stat(path); {
	case err != nil:
		return nil, fmt.Errorf("opening the store: %w", err)
	case !fi.Mode().IsRegular():
		return nil, &StoreError{Path: path, What: "is not a regular file", Try: "name another data_dir"}
	default:
		if err := checkFile(path); err != nil {
			return nil, err
		}
	}
	db, err := openBolt(path, false)
	if err != nil {
		return nil, err
	}
	f := &storeFile{DB: db, dir: dir}
	if err = f.adopt(path); err == nil {
		err = f.settleIdentity(path)
	}
	if err == nil {
		err = f.bringUp(now)
	}
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	// With the lock held, these are of processes that were killed: in a first start, in a backup.
	for _, suffix := range [...]string{newSuffix, copySuffix} {
		if left, err := filepath.Glob(path + suffix + "*"); err == nil {
			for _, part := range left {
				_ = os.Remove(part) // costs some room if it fails
			}
		}
	}
	return f, nil
}

// newSuffix is between the name of a store and something random while the store is made, copySuffix while it is copied.
const newSuffix, copySuffix = ".new-", ".copy-"

// createStore makes a store, which appears under its name only when it is whole: a first start may be killed,
// or find the disk full, at any moment, and the next one must not find half a store. If another process
// makes one meanwhile, that one stands.
func createStore(path string, now time.Time) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+newSuffix+"*")
	if err != nil {
		return fmt.Errorf("making the store: %w", err)
	}
	defer os.Remove(tmp.Name())
	if err := tmp.Close(); err != nil {
		return fmt.Errorf("making the store: %w", err)
	}
	db, err := openBolt(tmp.Name(), false)
	if err != nil {
		return fmt.Errorf("making the store: %w", err)
	}
	err = (&storeFile{DB: db}).create(now)
	if err = errors.Join(err, db.Close()); err != nil {
		return fmt.Errorf("making the store: %w", err)
	}
	if err := os.Link(tmp.Name(), path); err != nil && !errors.Is(err, os.ErrExist) { // unlike a rename, never replaces
		return fmt.Errorf("making the store: %w", err)
	}
	return syncDir(filepath.Dir(path))
}

// openBolt opens a file that checkFile has passed.
func openBolt(path string, readOnly bool) (*bolt.DB, error) {
	db, err := bolt.Open(path, 0o600, &bolt.Options{
		Timeout:         time.Second, // for the lock
		FreelistType:    bolt.FreelistMapType,
		InitialMmapSize: initialMmap,
		ReadOnly:        readOnly,
	})
	if errors.Is(err, bolterrors.ErrTimeout) {
		return nil, &StoreError{Path: path, What: "cannot be used", Err: ErrLocked, Try: "stop the other one, or give this one its own data_dir"}
	}
	if err != nil {
		return nil, &StoreError{Path: path, What: "cannot be opened", Err: err, Try: "restore a backup into an empty data_dir"}
	}
	return db, nil
}

// create fills an empty file.
func (f *storeFile) create(now time.Time) error {
	return f.Update(func(tx *bolt.Tx) error {
		f.id = &storev1.Identity{Format: storeFormat, Lineage: random16(), Revision: 1}
		svc, err := tx.CreateBucket(bucketService)
		if err != nil {
			return err
		}
		for _, name := range slices.Concat(serviceBuckets, laterBuckets) {
			if _, err := svc.CreateBucket(name); err != nil {
				return err
			}
		}
		for _, kind := range kinds {
			b, err := tx.CreateBucket([]byte(kind))
			if err != nil {
				return err
			}
			for _, name := range datasetBuckets {
				if _, err := b.CreateBucket(name); err != nil {
					return err
				}
			}
			m := &storev1.Meta{Format: storeFormat, Kind: kind, DatasetId: random16(), Lineage: f.id.Lineage,
				Revision: 1, Oldest: 1, Totals: &userv1.Totals{}, Guard: &storev1.Guard{}}
			if err := putProto(b.Bucket(bucketMeta), keyMeta, m); err != nil {
				return err
			}
		}
		if err := putProto(svc.Bucket(bucketIdentity), keyIdentity, f.id); err != nil {
			return err
		}
		return seedCatalogue(tx, f.id, now)
	})
}

// bringUp adds what an earlier version's file lacks, and the starting catalogue of this one. Without the generation
// nothing is added, and the file must do as it is.
func (f *storeFile) bringUp(now time.Time) error {
	if f.unsettled != nil {
		return f.View(func(tx *bolt.Tx) error {
			for _, name := range laterBuckets {
				if tx.Bucket(bucketService).Bucket(name) == nil {
					return fmt.Errorf("%s is of an earlier version and cannot be brought up to this one: %w", f.Path(), f.unsettled)
				}
			}
			return nil
		})
	}
	id := proto.CloneOf(f.id)
	err := f.Update(func(tx *bolt.Tx) error {
		svc := tx.Bucket(bucketService)
		for _, name := range laterBuckets {
			if _, err := svc.CreateBucketIfNotExists(name); err != nil {
				return err
			}
		}
		return seedCatalogue(tx, id, now)
	})
	if err != nil {
		return fmt.Errorf("bringing %s up to this version: %w", f.Path(), err)
	}
	f.id = id
	return nil
}

// adopt reads who an existing file is.
func (f *storeFile) adopt(path string) error {
	return f.View(func(tx *bolt.Tx) error {
		svc := tx.Bucket(bucketService)
		if svc == nil || svc.Bucket(bucketIdentity) == nil {
			return &StoreError{Path: path, What: "is a bbolt file, but not one of this service", Try: "name another data_dir"}
		}
		f.id = new(storev1.Identity)
		if err := getProto(svc.Bucket(bucketIdentity), keyIdentity, f.id); err != nil {
			return &StoreError{Path: path, What: "has an unreadable identity", Err: err, Try: "restore a backup into an empty data_dir"}
		}
		if f.id.Format > storeFormat {
			return &StoreError{Path: path, What: fmt.Sprintf("has format %d; this program knows formats up to %d", f.id.Format, storeFormat),
				Try: "run the newer program that wrote it"}
		}
		for _, name := range serviceBuckets {
			if svc.Bucket(name) == nil {
				return &StoreError{Path: path, What: fmt.Sprintf("lacks %s", name), Try: "restore a backup into an empty data_dir"}
			}
		}
		for _, kind := range kinds {
			b := tx.Bucket([]byte(kind))
			for _, name := range datasetBuckets {
				if b == nil || b.Bucket(name) == nil {
					return &StoreError{Path: path, What: fmt.Sprintf("lacks %s of dataset %s", name, kind), Try: "restore a backup into an empty data_dir"}
				}
			}
		}
		return nil
	})
}

func (f *storeFile) close() error {
	f.noteClosing()
	return f.DB.Close()
}

// loadDataset reads a dataset's position and tree.
func loadDataset(f *storeFile, kind string) (*dataset, error) {
	d := &dataset{kind: kind, tree: usercache.NewTree(), changed: make(chan struct{})}
	err := f.View(func(tx *bolt.Tx) error {
		b := tx.Bucket([]byte(kind))
		m, err := metaOf(tx, kind)
		if err != nil {
			return err
		}
		d.id, d.head, d.oldest = m.DatasetId, m.Revision, m.Oldest
		d.records, d.size, d.totals = m.Records, m.Size, m.Totals
		return b.Bucket(bucketTree).ForEach(func(k, v []byte) error {
			sum, err := usercache.ParseBucketSum(v)
			if err != nil || len(k) != 2 {
				return fmt.Errorf("dataset %s: tree entry %x is unreadable", kind, k)
			}
			d.tree.Set(binary.BigEndian.Uint16(k), sum)
			return nil
		})
	})
	if err != nil {
		return nil, &StoreError{Path: f.Path(), What: "is damaged", Err: err, Try: "run sluice-bizd migrate, or restore a backup into an empty data_dir"}
	}
	if d.tree.Records() != d.records {
		return nil, &StoreError{Path: f.Path(), What: fmt.Sprintf("is damaged: the tree of %s counts %d records, its meta %d", kind, d.tree.Records(), d.records),
			Try: "run sluice-bizd migrate, or restore a backup into an empty data_dir"}
	}
	d.flushed, d.flushedRoot = d.head, d.tree.Root()
	return d, nil
}

func metaOf(tx *bolt.Tx, kind string) (*storev1.Meta, error) {
	m := new(storev1.Meta)
	if err := getProto(tx.Bucket([]byte(kind)).Bucket(bucketMeta), keyMeta, m); err != nil {
		return nil, fmt.Errorf("dataset %s: %w", kind, err)
	}
	if m.Format > storeFormat {
		return nil, fmt.Errorf("dataset %s has format %d; this program knows formats up to %d", kind, m.Format, storeFormat)
	}
	if m.Totals == nil {
		m.Totals = &userv1.Totals{}
	}
	if m.Guard == nil {
		m.Guard = &storev1.Guard{}
	}
	return m, nil
}

// getRecord reads a record; ok is false if there is none. bytes are valid until the transaction ends.
func getRecord(tx *bolt.Tx, kind string, key []byte) (revision uint64, bytes []byte, ok bool, err error) {
	v := tx.Bucket([]byte(kind)).Bucket(bucketRecords).Get(usercache.AppendStoreKey(nil, key))
	if v == nil {
		return 0, nil, false, nil
	}
	revision, bytes, err = openRecord(v)
	if err != nil {
		return 0, nil, false, fmt.Errorf("record %q of %s: %w", key, kind, err)
	}
	return revision, bytes, true, nil
}

// openRecord decodes an envelope.
func openRecord(v []byte) (revision uint64, bytes []byte, err error) {
	var r storev1.Record
	if err := proto.Unmarshal(v, &r); err != nil {
		return 0, nil, err
	}
	return r.Revision, r.Bytes, nil
}

func putProto(b *bolt.Bucket, key []byte, m proto.Message) error {
	v, err := encode(m)
	if err != nil {
		return err
	}
	return b.Put(key, v)
}

func getProto(b *bolt.Bucket, key []byte, m proto.Message) error {
	v := b.Get(key)
	if v == nil {
		return fmt.Errorf("%s is missing", key)
	}
	return proto.Unmarshal(v, m)
}

// encode is the one way in which messages become bytes here.
func encode(m proto.Message) ([]byte, error) {
	return proto.MarshalOptions{Deterministic: true}.Marshal(m)
}

func be64(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

func random16() []byte {
	b := make([]byte, 16)
	rand.Read(b) // never fails
	return b
}
