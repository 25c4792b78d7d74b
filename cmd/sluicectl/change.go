package main

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

// A change is the flags of a command that changes something.
type change struct {
	a          *app
	wait       time.Duration
	ifRevision uint64
}

// change adds the flags of a command that changes something.
func (a *app) change(c *cobra.Command) *change {
	ch := &change{a: a}
	c.Flags().DurationVar(&ch.wait, "wait", 0, "return when every --resolver serves the change, waiting at most this `duration`")
	c.Flags().Uint64Var(&ch.ifRevision, "if-revision", 0, "only if the record is at this `revision`")
	return ch
}

// unconditional refuses --if-revision where there is no record to have one.
func (ch *change) unconditional(why string) error {
	if ch.ifRevision != 0 {
		return usagef("if-revision", "--if-revision makes no sense here: %s", why)
	}
	return nil
}

// A commit is a response that says at which revision a change was made.
type commit interface {
	proto.Message
	GetRevision() uint64
	GetDataset() string
}

// do makes the change by one call of the service.
func (ch *change) do(c *cobra.Command, call func(context.Context, *grpc.ClientConn) (commit, error)) error {
	return ch.a.atService(func(conn *grpc.ClientConn) error {
		ctx, cancel := ch.a.call(c.Context())
		defer cancel()
		m, err := call(ctx, conn)
		if err != nil {
			return err
		}
		return ch.done(c.Context(), m)
	})
}

// done prints what a change came to, and waits for it if asked to.
func (ch *change) done(ctx context.Context, m commit) error {
	if err := ch.print(m, m.GetRevision()); err != nil {
		return err
	}
	return ch.await(ctx, map[string]uint64{m.GetDataset(): m.GetRevision()})
}

func (ch *change) print(m proto.Message, revision uint64) error {
	line := fmt.Sprintf(`{"revision":%d}`, revision)
	if ch.a.json {
		line = string(jsonLine(m))
	}
	if _, err := fmt.Fprintln(ch.a.stdout, line); err != nil {
		return failedf("writing: %w", err)
	}
	return nil
}

// pollEvery is how often a resolver is asked how far it is.
const pollEvery = 20 * time.Millisecond

// await returns when every resolver serves these revisions, by kind of dataset.
func (ch *change) await(ctx context.Context, revisions map[string]uint64) error {
	if ch.wait <= 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, ch.wait)
	defer cancel()
	errs := make([]error, len(ch.a.resolvers))
	var wg sync.WaitGroup
	for i, addr := range ch.a.resolvers {
		conn, err := ch.a.dial(addr)
		if err != nil {
			return err
		}
		wg.Go(func() { errs[i] = awaitOne(ctx, addr, adminv1.NewResolverServiceClient(conn), revisions, ch.wait) })
	}
	wg.Wait()
	var all error
	for _, err := range errs {
		all = both(all, err)
	}
	return all
}

func awaitOne(ctx context.Context, addr string, c adminv1.ResolverServiceClient, revisions map[string]uint64, wait time.Duration) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	last := "has not answered"
	for {
		// A resolver that is starting is worth waiting for, so errors are only kept.
		st, err := c.Status(ctx, &adminv1.StatusRequest{})
		switch {
		case err == nil:
			if last = behind(st, revisions); last == "" {
				return nil
			}
		case ctx.Err() == nil && status.Code(err) != codes.DeadlineExceeded: // gRPC may see the deadline first
			last = "does not say how far it is: " + refused(addr, err).Error()
		}
		select {
		case <-ctx.Done():
			return &failure{Code: "DEADLINE_EXCEEDED", exit: exitFailed,
				Message: fmt.Sprintf("the change is made, but after %v resolver %s %s", wait, addr, last)}
		case <-tick.C:
		}
	}
}

// behind says what a resolver still lacks, "" if nothing.
func behind(st *adminv1.StatusResponse, revisions map[string]uint64) string {
	var lacks []string
	for kind, want := range revisions {
		have := uint64(0)
		if kind == "users" {
			have = st.Revision
		}
		for _, d := range st.Datasets {
			if d.Kind == kind {
				have = d.Revision
			}
		}
		if have < want {
			lacks = append(lacks, fmt.Sprintf("serves revision %d of %s, not %d", have, kind, want))
		}
	}
	return strings.Join(lacks, " and ")
}
