// Package syncclient keeps a usercache current: it follows the business-logic service over proto/sync/v1,
// one Watch per dataset, and repairs what differs.
//
// For each dataset a follower Watches from the revision held. Deltas are applied as they come; nothing is
// polled and nothing waits. At head, by delta or heartbeat, the roots of the digest trees are compared. When
// they differ, or the service cannot resume the revision held, the dataset is repaired: Digests say which
// buckets differ, Leaves which records of big ones, Fetch brings them, and Watch goes on from the smallest
// revision at which any of it was read. A first transfer is a repair in which everything differs, and so is
// the end of an interrupted one: how far it had come is read from the data.
//
// The service being down, slow, refusing or wrong changes nothing about the data held, except that it ages:
//
//	cold         there is no valid data
//	suspect      the service has another root at the same revision; a repair is due
//	unpersisted  the disk does not take changes
//	stale        not at the service's head by a heartbeat younger than Options.StaleAfter, or users that
//	             name things of a catalogue newer than the one held
//	fresh        none of these
//
// What a service sends is judged before it is applied: identities, lengths, order, digests wherever both were
// read at one revision. What cannot be judged at once shows in the next root. A service that is caught is
// left alone for a while and the next address is tried. Another lineage is taken over only if 90 % of the
// records agree, another dataset only into an empty cache or on Accept.
//
// Refusals are honoured: RetryInfo says when to come again. Waits are jittered by crypto/rand and kept in
// DataDir/backoff.json, so that restarts do not shorten them. Bulk transfers need a ticket of the service;
// one is under way at a time. When the service has an export, its segments are used for bulk.
//
// Blobs are big texts named by SHA-256; see Blobs.
//
// The package translates between proto/sync and usercache, which do not know each other. It has no opinion
// on what records mean, and none on readiness: Status says what there is.
package syncclient
