// Package usercache holds every user's settings on a resolver: in memory to answer by, on disk to start
// from.
//
// It keeps four datasets (users, catalogue, config, secrets), each a set of records {key, revision, bytes}
// that a sync client copies from the business-logic service. Lookups go from a device id, a source address,
// a dedicated address or an EDNS identity to a Profile: the device's settings laid over its user's, over the
// shared policy's, as one value of fixed size. Lookups take no contended lock and, but for settings of
// variable size that are not cached, allocate nothing.
//
// What comes in is believed at three levels. The *replica* is stored byte for byte, bad records too, so that
// revision and digests always advance with the service. The *serving view* is the replica with an overlay: of
// a record that this version cannot use the last good version is served, and removals beyond what the shrink
// guard allows are held back. A user of whom nothing usable is known is Unusable, never a stranger.
//
// Memory comes first: a change is answered by when Apply… returns, and reaches disk within a quarter of a
// second, in groups, each of which leaves the file a whole state of some revision. A disk that fails changes
// nothing for users. A process killed at any moment starts again from such a state. FORMAT.md describes the
// files.
//
// A Delta and a BucketData are different types with different ways in: what has changed can never be taken
// for what there is. The digest tree (Tree) finds accidental differences from the service; it proves nothing
// against a forger.
//
// The package decodes proto/user/v1 and knows nothing of the sync protocol. It reads the clock for nothing
// but waiting and file dates; decisions take the time as an argument.
package usercache
