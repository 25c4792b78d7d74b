package usercache

import "fmt"

// A Kind names a dataset.
type Kind string

// The datasets.
const (
	// Users are accounts with their devices.
	Users Kind = "users"
	// CatalogueKind is shared policies, lists, services, categories and safe-search engines.
	CatalogueKind Kind = "catalogue"
	// Config is region settings and flags.
	Config Kind = "config"
	// Secrets are seeds of session-ticket keys.
	Secrets Kind = "secrets"
)

// Kinds lists all datasets.
var Kinds = []Kind{Users, CatalogueKind, Config, Secrets}

const (
	// MaxKey is the greatest length of a record's key.
	MaxKey = 1024
	// MaxRecord is the greatest length of a record's bytes.
	MaxRecord = 256 << 10
)

// An Identity tells datasets and their histories apart. The zero Identity is that of a dataset that has
// never been received.
type Identity struct {
	// Dataset is kept for ever.
	Dataset [16]byte
	// Lineage is new whenever history may have forked: a restored backup, a copied or promoted store.
	Lineage [16]byte
}

// IsZero reports whether there is no dataset yet.
func (id Identity) IsZero() bool { return id == Identity{} }

// String returns both halves in hexadecimal.
func (id Identity) String() string { return fmt.Sprintf("%x/%x", id.Dataset[:], id.Lineage[:]) }

// A Record is a record as its writer encoded it.
type Record struct {
	Key      []byte
	Revision uint64
	Bytes    []byte
}

// A Change is a record written or removed.
type Change struct {
	Key      []byte
	Revision uint64
	Bytes    []byte // unused when Removed
	Removed  bool
}

// A Delta is the changes of revisions (From, To]. It is never a dataset: what replaces buckets is a
// BucketData, by another way.
type Delta struct {
	From, To uint64
	Changes  []Change // each record at most once
	// Root of the dataset at To; nil if the sender did not say.
	Root *Hash
	// NeedsCatalogue is the revision of the catalogue that these records may name things of.
	NeedsCatalogue uint64
}

// A BucketData is the content of one bucket, or chosen records of it, read at one revision.
type BucketData struct {
	Bucket  uint16
	AsOf    uint64
	Records []Record
	// Whole: Records are all there are; others held and not newer than AsOf are removed.
	Whole bool
	// Missing are keys that were asked for and do not exist; used when not Whole.
	Missing [][]byte
}

// A KeyLeaf is the digest of one record with its key.
type KeyLeaf struct {
	Key      []byte
	Revision uint64
	Leaf     Leaf
}
