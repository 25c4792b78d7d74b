package syncclient

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
)

// smallFetch is what is fetched without a ticket: by the small lane, which every node has.
const smallFetch = 256 << 10

// A ticket lets one bulk transfer pass. It is renewed while bytes come in, until release.
type ticket struct {
	c        *Client
	l        *link
	id       []byte
	received atomic.Uint64
	complete bool // owned by the holder

	stop    context.CancelFunc
	renewal sync.WaitGroup
}

// acquire waits until no other transfer of this process is under way and asks for a ticket. A node has one
// ticket at a time: the service would take a second request for a repetition of the first.
func (c *Client) acquire(ctx context.Context, l *link, req *syncv1.AcquireRequest) (*ticket, error) {
	select {
	case c.bulk <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	asking, cancel := context.WithTimeout(ctx, answerTime)
	resp, err := l.sync.Acquire(asking, req)
	cancel()
	if err == nil && len(resp.GetTicket()) == 0 {
		err = wrong("an empty ticket")
	}
	if err != nil {
		<-c.bulk
		return nil, err
	}
	t := &ticket{c: c, l: l, id: resp.GetTicket()}
	ctx, t.stop = context.WithCancel(ctx)
	lease := min(max(time.Duration(resp.GetLeaseMs())*time.Millisecond, time.Second), time.Hour)
	t.renewal.Go(func() { t.renew(ctx, lease/3) })
	return t, nil
}

func (t *ticket) moved(m proto.Message) { t.received.Add(uint64(proto.Size(m))) }

// renew extends the lease as long as bytes come in. If the service will not, the transfer finds out.
func (t *ticket) renew(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	var reported uint64
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if n := t.received.Load(); n > reported {
			asking, cancel := context.WithTimeout(ctx, answerTime)
			_, err := t.l.sync.Renew(asking, &syncv1.RenewRequest{Ticket: t.id, Received: n})
			cancel()
			if err == nil {
				reported = n
			}
		}
	}
}

// release gives the ticket back. If that cannot be said, the lease runs out.
func (t *ticket) release() {
	t.stop()
	t.renewal.Wait()
	// Also, and above all, when the transfer was cancelled: others wait for it.
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, _ = t.l.sync.Release(ctx, &syncv1.ReleaseRequest{Ticket: t.id, Complete: t.complete})
	<-t.c.bulk
}
