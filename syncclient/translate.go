package syncclient

import (
	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	"github.com/sluice-dns/sluice/usercache"
)

// The functions here turn messages into usercache's types. What they return shares memory with the message.
// Lengths of keys and records, buckets and revisions are judged by usercache.

func identityMessage(id usercache.Identity) *syncv1.Identity {
	if id.IsZero() {
		return nil
	}
	return &syncv1.Identity{DatasetId: id.Dataset[:], Lineage: id.Lineage[:]}
}

func parseIdentity(m *syncv1.Identity) (id usercache.Identity, err error) {
	if len(m.GetDatasetId()) != len(id.Dataset) || len(m.GetLineage()) != len(id.Lineage) {
		return id, wrong("an identity of %d and %d bytes", len(m.GetDatasetId()), len(m.GetLineage()))
	}
	copy(id.Dataset[:], m.GetDatasetId())
	copy(id.Lineage[:], m.GetLineage())
	if id.IsZero() {
		return id, wrong("an identity of zeros")
	}
	return id, nil
}

// parseRoot returns nil for an empty root.
func parseRoot(b []byte) (*usercache.Hash, error) {
	if len(b) == 0 {
		return nil, nil
	}
	var h usercache.Hash
	if len(b) != len(h) {
		return nil, wrong("a root of %d bytes", len(b))
	}
	copy(h[:], b)
	return &h, nil
}

func parseDelta(m *syncv1.Delta) (usercache.Delta, error) {
	d := usercache.Delta{From: m.GetFrom(), To: m.GetTo(), NeedsCatalogue: m.GetNeedsCatalogue()}
	var err error
	if d.Root, err = parseRoot(m.GetRoot()); err != nil {
		return d, err
	}
	if d.To < d.From {
		return d, wrong("a delta from %d to %d", d.From, d.To)
	}
	if len(m.GetChanges()) > 0 {
		d.Changes = make([]usercache.Change, len(m.GetChanges()))
	}
	for i, c := range m.GetChanges() {
		d.Changes[i] = usercache.Change{Key: c.GetKey(), Revision: c.GetRevision(), Bytes: c.GetBytes(), Removed: c.GetRemoved()}
	}
	return d, nil
}

func parseRecords(list []*syncv1.Record) []usercache.Record {
	records := make([]usercache.Record, len(list))
	for i, r := range list {
		records[i] = usercache.Record{Key: r.GetKey(), Revision: r.GetRevision(), Bytes: r.GetBytes()}
	}
	return records
}

// parseDigests reads level 1 or 2 of a tree.
func parseNodes(b []byte) (nodes [usercache.Nodes]usercache.Hash, err error) {
	if len(b) != usercache.Nodes*len(nodes[0]) {
		return nodes, wrong("%d bytes of node digests", len(b))
	}
	for i := range nodes {
		copy(nodes[i][:], b[i*len(nodes[0]):])
	}
	return nodes, nil
}

func parseBuckets(b []byte) (buckets [usercache.BucketsPerNode]usercache.BucketSum, err error) {
	const each = 24
	if len(b) != len(buckets)*each {
		return buckets, wrong("%d bytes of bucket digests", len(b))
	}
	for i := range buckets {
		if buckets[i], err = usercache.ParseBucketSum(b[i*each : (i+1)*each]); err != nil {
			return buckets, wrong("%v", err)
		}
	}
	return buckets, nil
}

// sumOf returns the digest of whole bucket's records.
func sumOf(records []usercache.Record) (sum usercache.BucketSum) {
	for i := range records {
		sum = sum.Add(usercache.LeafOf(records[i].Key, records[i].Revision, records[i].Bytes))
	}
	return sum
}
