package node

import (
	"context"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/syncclient"
	"github.com/sluice-dns/sluice/usercache"
)

const (
	// blobsEvery is how often at most the records are read for the blobs they name, and blobsShare the part of
	// the time that this may take: with many users it is done less often. Meanwhile what a query needs is fetched
	// because it is asked for.
	blobsEvery = 2 * time.Second
	blobsShare = 50
)

// wantBlobs keeps the blobs here that records name, whether somebody asks for them or not: after a restart with
// the service away there must be no list that a user has and that is missing.
func (n *Node) wantBlobs(ctx context.Context) {
	changed := make(chan struct{}, 1)
	n.users.Dataset(usercache.CatalogueKind).Notify(changed)
	n.users.Dataset(usercache.Users).Notify(changed)
	for {
		started := clock.Elapsed()
		all := map[syncclient.Hash]bool{}
		n.users.Blobs(func(sum [32]byte) { all[sum] = true })
		list := make([]syncclient.Hash, 0, len(all))
		for sum := range all {
			list = append(list, sum)
		}
		n.sync.Blobs().Want(list)
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(blobsEvery, blobsShare*clock.Elapsed().Sub(started))):
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}
