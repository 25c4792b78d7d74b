package syncclient

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	"github.com/sluice-dns/sluice/usercache"
)

const (
	// bigBucket is how many records a bucket may have before it is compared by leaves.
	bigBucket = 16
	// parallelDigests is how many nodes are asked for at once.
	parallelDigests = 8
	// leavesAtOnce is how many buckets one Leaves asks for.
	leavesAtOnce = 256
	// rangesAtOnce and keysAtOnce bound one Fetch request.
	rangesAtOnce, keysAtOnce = 4096, 4096
	// maxBucket bounds the bytes of one bucket. At ten million users it has some hundred records.
	maxBucket = 64 << 20
	// exportWorth is from how many bytes on an export is asked for.
	exportWorth = 4 << 20
)

// repair compares the dataset with the service's and fetches what differs. Nothing else changes the dataset
// meanwhile. When it ends well the dataset is at the smallest revision at which any of it was read, and a
// Watch from there completes it.
func (f *follower) repair(ctx context.Context, l *link) error {
	f.set(func() { f.activity = "comparing digests" })
	defer f.set(func() { f.activity = "" })
	r := &repair{f: f, l: l, held: f.ds.Status(), ours: f.ds.Tree(), behind: f.due.behind}
	err := r.run(ctx)
	f.c.opts.Metrics.Repaired(string(f.kind), r.fetched, err == nil)
	if err != nil {
		return fmt.Errorf("repairing from %s: %w", l.service.address, err)
	}
	f.repairs++
	f.settleAt = r.newest
	f.set(func() {
		f.repairTimes++
		f.accepted, f.foreign = nil, nil
	})
	f.log.Info("repaired", "service", l.service.address, "why", f.due.why, "buckets", r.fetched, "records", f.ds.Status().Records, "revision", r.oldest)
	return nil
}

// A repair is one comparison and what follows from it.
type repair struct {
	f      *follower
	l      *link
	held   usercache.DatasetStatus
	ours   *usercache.Tree
	behind bool // the service may be at a revision before ours

	id             usercache.Identity // the service's
	records, size  uint64             // of its dataset
	oldest, newest uint64             // as_of of everything read; oldest 0: nothing yet

	mu      sync.Mutex // guards buckets while digests are read
	buckets map[uint16]theirBucket

	whole   []uint16 // to fetch, ascending
	keys    [][]byte // to fetch, in order of store key
	ticket  *ticket  // nil: small lane
	fetched int      // buckets
}

// theirBucket is a digest of the service's that differs from ours.
type theirBucket struct {
	sum  usercache.BucketSum
	asOf uint64
}

func (r *repair) run(ctx context.Context) error {
	nodes, err := r.compareNodes(ctx)
	if err != nil {
		return err
	}
	if err := r.compareBuckets(ctx, nodes); err != nil {
		return err
	}
	adopt, err := r.judge(ctx)
	if err != nil {
		return err
	}
	if err := r.plan(ctx); err != nil {
		return err
	}
	defer r.release()
	if err := r.admit(ctx); err != nil {
		return err
	}
	if err := adopt(); err != nil {
		return err
	}
	if err := r.f.ds.BeginTransfer(r.id, true); err != nil {
		return err
	}
	if err := r.transfer(ctx); err != nil {
		return err
	}
	// A transfer that was begun before a restart has buckets of its own.
	at := r.oldest
	if st := r.f.ds.Status(); st.OldestAsOf != 0 {
		at = min(at, st.OldestAsOf)
	}
	r.oldest = at
	if err := r.f.ds.FinishTransfer(r.id, at, wall()); err != nil {
		return err
	}
	if r.ticket != nil {
		r.ticket.complete = true
	}
	return nil
}

// read notes at which revision something was read.
func (r *repair) read(asOf uint64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if asOf < r.held.Revision && !r.behind && r.held.Identity == r.id {
		return fmt.Errorf("the service is at revision %d, we are at %d; perhaps it is a moment behind", asOf, r.held.Revision)
	}
	if r.newest == 0 || asOf < r.oldest {
		r.oldest = asOf
	}
	r.newest = max(r.newest, asOf)
	return nil
}

// compareNodes reads level 1 of the tree, and returns the nodes that differ.
func (r *repair) compareNodes(ctx context.Context) (theirs map[uint8]theirNode, err error) {
	resp, err := r.digests(ctx, 1, 0)
	if err != nil {
		return nil, err
	}
	nodes, err := parseNodes(resp.GetDigests())
	if err != nil {
		return nil, err
	}
	if root := usercache.RootHash(&nodes); !bytes.Equal(root[:], resp.GetRoot()) {
		return nil, wrong("its nodes do not make up its root at revision %d", resp.GetAsOf())
	}
	if r.id, err = parseIdentity(resp.GetIdentity()); err != nil {
		return nil, err
	}
	r.records, r.size = resp.GetRecords(), resp.GetSize()
	if err := r.read(resp.GetAsOf()); err != nil {
		return nil, err
	}
	theirs = map[uint8]theirNode{}
	for _, n := range r.ours.DiffNodes(&nodes) {
		theirs[n] = theirNode{nodes[n], resp.GetAsOf()}
	}
	return theirs, nil
}

type theirNode struct {
	hash usercache.Hash
	asOf uint64
}

// compareBuckets reads level 2 under the nodes that differ.
func (r *repair) compareBuckets(ctx context.Context, nodes map[uint8]theirNode) error {
	r.buckets = map[uint16]theirBucket{}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(parallelDigests)
	for n, node := range nodes {
		g.Go(func() error {
			resp, err := r.digests(ctx, 2, uint32(n))
			if err != nil {
				return err
			}
			if id, err := parseIdentity(resp.GetIdentity()); err != nil || id != r.id {
				return fmt.Errorf("the service became another one while being compared (%w)", cmpErr(err))
			}
			buckets, err := parseBuckets(resp.GetDigests())
			if err != nil {
				return err
			}
			asOf := resp.GetAsOf()
			if asOf == node.asOf && usercache.NodeHash(&buckets) != node.hash {
				return wrong("the buckets of node %d do not make up its digest at revision %d", n, asOf)
			}
			if err := r.read(asOf); err != nil {
				return err
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			for _, b := range r.ours.DiffBuckets(n, &buckets) {
				r.buckets[b] = theirBucket{buckets[b&0xff], asOf}
			}
			return nil
		})
	}
	return g.Wait()
}

func cmpErr(err error) error {
	if err == nil {
		return errOther
	}
	return err
}

var errOther = errors.New("another identity")

func (r *repair) digests(ctx context.Context, level, node uint32) (*syncv1.DigestsResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	return r.l.sync.Digests(ctx, &syncv1.DigestsRequest{Kind: string(r.f.kind), Level: level, Node: node})
}

// judge decides whether the service's dataset may take the place of ours, and returns how to do that.
func (r *repair) judge(ctx context.Context) (adopt func() error, err error) {
	f, held := r.f, r.held
	nothing := func() error { return nil }
	if r.id == held.Identity || held.Identity.IsZero() || !held.Complete {
		return nothing, nil
	}
	f.mu.Lock()
	accepted := f.accepted != nil && *f.accepted == r.id
	f.mu.Unlock()
	if accepted {
		return func() error { return f.ds.AcceptDataset(r.id) }, nil
	}
	if r.id.Dataset != held.Identity.Dataset {
		f.set(func() { f.foreign = &r.id })
		return nil, fmt.Errorf("%w: the service has %v, we have %v; if that is meant, an operator must accept it", usercache.ErrOtherDataset, r.id, held.Identity)
	}
	a, err := r.agreement(ctx)
	if err != nil {
		return nil, err
	}
	if all := a.Equal + a.Differing; held.Records > 0 && float64(a.Equal) < 0.9*float64(all) {
		f.set(func() { f.foreign = &r.id })
		return nil, fmt.Errorf("%w: only %d of %d records agree with lineage %x; if that is meant, an operator must accept it",
			usercache.ErrOtherDataset, a.Equal, all, r.id.Lineage[:])
	}
	return func() error { return f.ds.AcceptLineage(r.id, a) }, nil
}

// agreement counts the records that are equal here and there.
func (r *repair) agreement(ctx context.Context) (a usercache.Agreement, err error) {
	// All of the buckets that do not differ, and of the others those with equal leaves.
	a.Equal = r.held.Records
	differing := r.sorted(func(uint16, theirBucket) bool { return true })
	for _, b := range differing {
		a.Equal -= r.ours.Bucket(b).Count
	}
	err = r.leaves(ctx, differing, func(b uint16, _ uint64, theirs []usercache.KeyLeaf) error {
		d := diffLeaves(r.f.ds.Leaves(b), theirs)
		a.Equal += uint64(d.equal)
		a.Differing += uint64(len(d.keys))
		return nil
	})
	return a, err
}

// sorted returns the differing buckets that are chosen, ascending.
func (r *repair) sorted(choose func(uint16, theirBucket) bool) []uint16 {
	var list []uint16
	for b, their := range r.buckets {
		if choose(b, their) {
			list = append(list, b)
		}
	}
	slices.Sort(list)
	return list
}

// plan decides what to fetch: small buckets whole, of big ones the records whose leaves differ.
func (r *repair) plan(ctx context.Context) error {
	// If a repair by leaves has not helped, the leaves are not to be trusted.
	big := func(b uint16, their theirBucket) bool {
		ours := r.ours.Bucket(b).Count
		return r.f.repairs == 0 && ours > 0 && max(ours, their.sum.Count) > bigBucket
	}
	r.whole = r.sorted(func(b uint16, their theirBucket) bool { return !big(b, their) })
	err := r.leaves(ctx, r.sorted(big), func(b uint16, _ uint64, theirs []usercache.KeyLeaf) error {
		d := diffLeaves(r.f.ds.Leaves(b), theirs)
		if len(d.keys) > len(theirs)/2 {
			r.whole = append(r.whole, b)
		} else {
			r.keys = append(r.keys, d.keys...)
		}
		return nil
	})
	slices.Sort(r.whole)
	return err
}

// leaves reads the leaves of buckets, ascending.
func (r *repair) leaves(ctx context.Context, buckets []uint16, each func(b uint16, asOf uint64, theirs []usercache.KeyLeaf) error) error {
	for chunk := range slices.Chunk(buckets, leavesAtOnce) {
		if err := r.leavesOf(ctx, chunk, each); err != nil {
			return err
		}
	}
	return nil
}

func (r *repair) leavesOf(ctx context.Context, buckets []uint16, each func(b uint16, asOf uint64, theirs []usercache.KeyLeaf) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	req := &syncv1.LeavesRequest{Kind: string(r.f.kind), Identity: identityMessage(r.id)}
	for _, b := range buckets {
		req.Buckets = append(req.Buckets, uint32(b))
	}
	stream, err := r.l.sync.Leaves(ctx, req)
	if err != nil {
		return err
	}
	dog := newWatchdog(cancel)
	for _, b := range buckets {
		m, err := receive(ctx, dog, answerTime, stream.Recv)
		if errors.Is(err, io.EOF) {
			return wrong("the leaves end before bucket %d", b)
		}
		if err != nil {
			return err
		}
		if m.GetBucket() != uint32(b) {
			return wrong("leaves of bucket %d, not %d", m.GetBucket(), b)
		}
		theirs := make([]usercache.KeyLeaf, len(m.GetLeaves()))
		var sum usercache.BucketSum
		seen := make(map[string]bool, len(theirs))
		for i, leaf := range m.GetLeaves() {
			if len(leaf.GetHash()) != len(usercache.Leaf{}) || usercache.BucketOf(leaf.GetKey()) != b || seen[string(leaf.GetKey())] {
				return wrong("leaf %q is malformed, twice, or not of bucket %d", leaf.GetKey(), b)
			}
			seen[string(leaf.GetKey())] = true
			theirs[i] = usercache.KeyLeaf{Key: leaf.GetKey(), Revision: leaf.GetRevision(), Leaf: usercache.Leaf(leaf.GetHash())}
			sum = sum.Add(theirs[i].Leaf)
		}
		if their := r.buckets[b]; their.asOf == m.GetAsOf() && their.sum != sum {
			return wrong("the leaves of bucket %d do not make up its digest at revision %d", b, m.GetAsOf())
		}
		if err := r.read(m.GetAsOf()); err != nil {
			return err
		}
		if err := each(b, m.GetAsOf(), theirs); err != nil {
			return err
		}
	}
	return nil
}

// A leafDiff is how two lists of leaves differ.
type leafDiff struct {
	equal int
	keys  [][]byte // of records that are not the same on both sides, in order of store key
}

func diffLeaves(ours, theirs []usercache.KeyLeaf) (d leafDiff) {
	held := make(map[string]usercache.Leaf, len(ours))
	for _, l := range ours {
		held[string(l.Key)] = l.Leaf
	}
	for _, l := range theirs {
		leaf, ok := held[string(l.Key)]
		delete(held, string(l.Key))
		if ok && leaf == l.Leaf {
			d.equal++
		} else {
			d.keys = append(d.keys, l.Key)
		}
	}
	for key := range held {
		d.keys = append(d.keys, []byte(key))
	}
	slices.SortFunc(d.keys, func(a, b []byte) int {
		return bytes.Compare(usercache.AppendStoreKey(nil, a), usercache.AppendStoreKey(nil, b))
	})
	return d
}

// expected estimates how many bytes the plan brings.
func (r *repair) expected() uint64 {
	n := uint64(len(r.keys))
	for _, b := range r.whole {
		n += r.buckets[b].sum.Count
	}
	if r.records == 0 {
		return 0
	}
	return uint64(float64(n) * float64(r.size) / float64(r.records))
}

// admit gets a ticket if the plan needs one.
func (r *repair) admit(ctx context.Context) error {
	if r.expected() <= smallFetch {
		return nil
	}
	return r.acquire(ctx)
}

func (r *repair) acquire(ctx context.Context) error {
	need := syncv1.Need_NEED_REPAIR
	switch {
	case !r.held.Complete:
		need = syncv1.Need_NEED_COLD
	case r.f.due.blind:
		need = syncv1.Need_NEED_STALE
	}
	var age uint64
	if need != syncv1.Need_NEED_COLD && !r.held.FreshAt.IsZero() {
		age = uint64(max(wall().Sub(r.held.FreshAt).Seconds(), 1))
	}
	r.f.set(func() { r.f.activity = "asking for a ticket" })
	var err error
	r.ticket, err = r.f.c.acquire(ctx, r.l, &syncv1.AcquireRequest{Kind: string(r.f.kind), Node: r.f.c.opts.Node.message(),
		Need: need, ExpectedBytes: r.expected(), Age: age})
	return err
}

func (r *repair) release() {
	if r.ticket != nil {
		r.ticket.release()
	}
}

// transfer fetches what was planned.
func (r *repair) transfer(ctx context.Context) error {
	r.f.set(func() { r.f.activity = "transferring" })
	if r.ticket != nil && r.expected() >= exportWorth && r.expected() > r.size/2 {
		if err := r.fromExport(ctx); err != nil {
			if ctx.Err() != nil || unreachable(err) {
				return err
			}
			r.f.log.Warn("the export is of no use; buckets are fetched one by one", "service", r.l.service.address, "error", err)
		}
	}
	for ranges := range slices.Chunk(rangesOf(r.whole), rangesAtOnce) {
		job := &fetchJob{r: r, req: &syncv1.FetchRequest{Ranges: ranges}, next: int(ranges[0].First)}
		if err := job.run(ctx); err != nil {
			return err
		}
	}
	for keys := range slices.Chunk(r.keys, keysAtOnce) {
		job := &fetchJob{r: r, req: &syncv1.FetchRequest{Keys: keys}, keys: map[string]bool{}}
		for _, k := range keys {
			job.keys[string(k)] = true
		}
		if err := job.run(ctx); err != nil {
			return err
		}
	}
	return nil
}

// rangesOf joins consecutive buckets.
func rangesOf(buckets []uint16) []*syncv1.BucketRange {
	var list []*syncv1.BucketRange
	for _, b := range buckets {
		if n := len(list); n > 0 && list[n-1].Last+1 == uint32(b) {
			list[n-1].Last++
			continue
		}
		list = append(list, &syncv1.BucketRange{First: uint32(b), Last: uint32(b)})
	}
	return list
}

// A fetchJob is one Fetch, gone on with from its cursor when it breaks off for want of a ticket.
type fetchJob struct {
	r    *repair
	req  *syncv1.FetchRequest
	next int             // next bucket wanted, of ranges; -1: all have come
	keys map[string]bool // still wanted; nil for ranges
}

func (j *fetchJob) run(ctx context.Context) error {
	j.req.Kind, j.req.Identity, j.req.Node = string(j.r.f.kind), identityMessage(j.r.id), j.r.f.c.opts.Node.message()
	for {
		if j.r.ticket != nil {
			j.req.Ticket = j.r.ticket.id
		}
		err := j.fetch(ctx)
		if err == nil || !refused(err) || j.r.ticket != nil {
			return err
		}
		// More than the small lane has. What has come is not asked for again.
		if err := j.r.acquire(ctx); err != nil {
			return err
		}
	}
}

func (j *fetchJob) done() bool {
	if j.keys != nil {
		return len(j.keys) == 0
	}
	return j.next < 0
}

// advance moves past a bucket.
func (j *fetchJob) advance() {
	for i, r := range j.req.Ranges {
		switch {
		case uint32(j.next) < r.First:
			j.next = int(r.First)
			return
		case uint32(j.next) < r.Last:
			j.next++
			return
		case uint32(j.next) == r.Last && i+1 < len(j.req.Ranges):
			j.next = int(j.req.Ranges[i+1].First)
			return
		}
	}
	j.next = -1
}

func (j *fetchJob) fetch(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := j.r.l.sync.Fetch(ctx, j.req)
	if err != nil {
		return err
	}
	dog := newWatchdog(cancel)
	var p bucketParts
	for !j.done() {
		m, err := receive(ctx, dog, answerTime, stream.Recv)
		if errors.Is(err, io.EOF) {
			return wrong("a Fetch ends before everything has come")
		}
		if err != nil {
			return err
		}
		if j.r.ticket != nil {
			j.r.ticket.moved(m)
		}
		data, err := p.add(m)
		if err != nil {
			return err
		}
		if data == nil {
			continue
		}
		if err := j.wanted(data); err != nil {
			return err
		}
		if err := j.r.apply(ctx, data, true); err != nil {
			return err
		}
		j.req.Cursor = m.GetCursor()
	}
	return nil
}

// wanted checks that a bucket is the next that was asked for, and moves on.
func (j *fetchJob) wanted(data *usercache.BucketData) error {
	if j.keys == nil {
		if !data.Whole || int(data.Bucket) != j.next {
			return wrong("bucket %d (whole: %v) comes in place of %d", data.Bucket, data.Whole, j.next)
		}
		j.advance()
		return nil
	}
	if data.Whole {
		return wrong("bucket %d comes whole; single records were asked for", data.Bucket)
	}
	before := len(j.keys)
	for i := range data.Records {
		if !j.keys[string(data.Records[i].Key)] {
			return wrong("record %q was not asked for, or comes twice", data.Records[i].Key)
		}
		delete(j.keys, string(data.Records[i].Key))
	}
	for _, k := range data.Missing {
		if !j.keys[string(k)] {
			return wrong("record %q was not asked for, or comes twice", k)
		}
		delete(j.keys, string(k))
	}
	if len(j.keys) == before {
		return wrong("an answer without any of the records that were asked for")
	}
	return nil
}

// bucketParts puts the parts of a bucket together.
type bucketParts struct {
	data *usercache.BucketData // nil: none yet
	size int
}

// add takes a message, and returns the bucket when it is complete.
func (p *bucketParts) add(m *syncv1.FetchResponse) (*usercache.BucketData, error) {
	if m.GetBucket() >= usercache.Buckets {
		return nil, wrong("there is no bucket %d", m.GetBucket())
	}
	if p.data == nil {
		p.data = &usercache.BucketData{Bucket: uint16(m.GetBucket()), AsOf: m.GetAsOf(), Whole: m.GetWhole()}
	}
	d := p.data
	if uint16(m.GetBucket()) != d.Bucket || m.GetAsOf() != d.AsOf || m.GetWhole() != d.Whole {
		return nil, wrong("parts of bucket %d as of %d are mixed with bucket %d as of %d", d.Bucket, d.AsOf, m.GetBucket(), m.GetAsOf())
	}
	if m.GetMore() && len(m.GetRecords()) == 0 && len(m.GetMissing()) == 0 {
		return nil, wrong("an empty part of bucket %d", d.Bucket)
	}
	for _, r := range m.GetRecords() {
		p.size += len(r.GetKey()) + len(r.GetBytes()) + 24
	}
	for _, k := range m.GetMissing() {
		p.size += len(k) + 24
	}
	if p.size > maxBucket {
		return nil, wrong("bucket %d has more than %d bytes", d.Bucket, maxBucket)
	}
	d.Records = append(d.Records, parseRecords(m.GetRecords())...)
	d.Missing = append(d.Missing, m.GetMissing()...)
	if m.GetMore() {
		return nil, nil
	}
	*p = bucketParts{}
	return d, nil
}

// apply judges and applies a bucket. Live: it was read now, not for an export.
func (r *repair) apply(ctx context.Context, data *usercache.BucketData, live bool) error {
	if their := r.buckets[data.Bucket]; live && data.Whole && data.AsOf == their.asOf && sumOf(data.Records) != their.sum {
		return wrong("the records of bucket %d do not make up its digest at revision %d", data.Bucket, data.AsOf)
	}
	if err := r.read(data.AsOf); err != nil {
		return err
	}
	res, err := r.f.ds.ApplyBucket(ctx, r.id, *data, wall())
	if err != nil {
		return r.f.notApplied(err)
	}
	r.fetched++
	r.f.c.opts.Metrics.Applied(string(r.f.kind), res.Applied)
	return nil
}
