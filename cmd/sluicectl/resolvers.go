package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

func (a *app) addResolver(root *cobra.Command) {
	root.AddCommand(a.explain(), a.status(), a.drain("drain", true), a.drain("undrain", false))
	s := group(root, "sync", "How user data follows the service")
	s.AddCommand(a.syncStatus(), a.syncAccept(), a.syncRepair())
	l := group(root, "limits", "Limits of resolvers, live")
	l.AddCommand(a.limitsGet(), a.limitsSet(), a.limitsReset())
	n := group(root, "nta", "Names at and below which resolvers validate nothing (negative trust anchors), live")
	n.AddCommand(a.ntaList(), a.ntaAdd(), a.ntaRemove())
	k := group(root, "cache", "What resolvers have cached")
	k.AddCommand(a.cacheLook(), a.cachePurge(), a.cacheDump(), a.cacheLoad())
	g := group(root, "log", "What resolvers log")
	g.AddCommand(a.logLevel())
}

func (a *app) explain() *cobra.Command {
	req := new(adminv1.ExplainRequest)
	c := &cobra.Command{
		Use: "explain USER[/DEVICE] NAME [TYPE]", Short: "Show how a query would be judged, step by step; the last step decides",
		Long: "Show how a query would be judged, step by step in the order in which it is; the last step decides. Of a user named alone the first device is taken. " +
			"It does not count against the rates of the client.",
		Args: cobra.RangeArgs(2, 3), ValidArgsFunction: a.completeArgs(targets),
		RunE: func(c *cobra.Command, args []string) error {
			req.Target, req.Name = args[0], args[1]
			if len(args) == 3 {
				req.Type = args[2]
			}
			return a.atOneResolver(func(_ string, r adminv1.ResolverServiceClient) error {
				ctx, cancel := a.call(c.Context())
				defer cancel()
				resp, err := r.Explain(ctx, req)
				if err != nil {
					return err
				}
				return show(a, resp.Steps, func() *table {
					t := &table{head: []string{"STEP", "VERDICT", "LIST", "LINE", "RULE", "DETAIL", "CHANGED BY"}}
					for _, s := range resp.Steps {
						line := ""
						if s.Line > 0 {
							line = strconv.FormatUint(uint64(s.Line), 10)
						}
						t.add(s.Step, s.Verdict, s.List, line, s.Rule, s.Detail, s.Change)
					}
					return t
				})
			})
		},
	}
	c.Flags().StringVar(&req.Address, "addr", "", "`address` that the client asks from, for what is decided by network; without it nothing is")
	c.Flags().StringVar(&req.Transport, "transport", "", "`transport` it asks over: udp, tcp, dot or doh (default udp, or doh for a device that may come by nothing else)")
	return c
}

// gather asks every resolver and prints what came as one table.
func gather[M any](a *app, ctx context.Context, t *table, ask func(ctx context.Context, r adminv1.ResolverServiceClient) (M, error), objects func(M) error, rows func(addr string, m M)) error {
	err := a.atResolvers(func(addr string, r adminv1.ResolverServiceClient) error {
		ctx, cancel := a.call(ctx)
		defer cancel()
		m, err := ask(ctx, r)
		if err != nil {
			return err
		}
		if a.json {
			return objects(m)
		}
		rows(addr, m)
		return nil
	})
	if !a.json && len(t.rows) > 0 {
		err = both(err, a.print(t))
	}
	return err
}

func (a *app) status() *cobra.Command {
	return &cobra.Command{Use: "status", Short: "Show the state of resolvers", Args: cobra.NoArgs, RunE: func(c *cobra.Command, _ []string) error {
		t := &table{head: []string{"RESOLVER", "NODE", "READY", "STATE", "REVISION", "LAG", "USERS", "OVERLAY", "GENERATION", "LEVEL", "DEGRADED", "UPTIME", "WHY"}}
		return gather(a, c.Context(), t,
			func(ctx context.Context, r adminv1.ResolverServiceClient) (*adminv1.StatusResponse, error) {
				return r.Status(ctx, &adminv1.StatusRequest{})
			},
			func(st *adminv1.StatusResponse) error { return show(a, []*adminv1.StatusResponse{st}, nil) },
			func(addr string, st *adminv1.StatusResponse) {
				t.add(addr, st.Node, yes(st.Ready), st.State, st.Revision, age(st.LagMs), st.Users, st.Overlay, st.Generation, st.Level,
					fmt.Sprintf("%.1f%%", 100*st.Degraded), time.Duration(st.Uptime)*time.Second, strings.Join(st.Reasons, ", "))
			})
	}}
}

func (a *app) drain(use string, on bool) *cobra.Command {
	short := "Make resolvers not ready; listeners go on until they are stopped"
	if !on {
		short = "End drain"
	}
	return &cobra.Command{Use: use, Short: short, Args: cobra.NoArgs, RunE: func(c *cobra.Command, _ []string) error {
		return a.atResolvers(func(_ string, r adminv1.ResolverServiceClient) error {
			ctx, cancel := a.call(c.Context())
			defer cancel()
			var err error
			if on {
				_, err = r.Drain(ctx, &adminv1.DrainRequest{})
			} else {
				_, err = r.Undrain(ctx, &adminv1.UndrainRequest{})
			}
			return err
		})
	}}
}

// fleetFlag adds --fleet, and returns whether to talk to the service: if it is given, or if --service is on the
// command line and --resolver is not.
func fleetFlag(c *cobra.Command, help string) func() bool {
	var fleet bool
	c.Flags().BoolVar(&fleet, "fleet", false, help)
	return func() bool {
		return fleet || c.Flags().Changed("service") && !c.Flags().Changed("resolver")
	}
}

func datasetTable() *table {
	return &table{head: []string{"AT", "KIND", "STATE", "REVISION", "HEAD", "LAG", "RECORDS", "USERS", "DEVICES", "OVERLAY", "GENERATION", "ROOT", "PROBLEM"}}
}

func (t *table) addDataset(addr string, d *adminv1.DatasetStatus) {
	problem := d.Error
	if d.GuardTripped {
		problem = strings.TrimSuffix("shrink guard holds removals; "+problem, "; ")
	}
	if d.BucketsLeft > 0 {
		problem = strings.TrimSuffix(fmt.Sprintf("%d buckets to fetch; %s", d.BucketsLeft, problem), "; ")
	}
	t.add(addr, d.Kind, d.State, d.Revision, d.Head, age(d.LagMs), d.Records, d.GetTotals().GetUsers(), d.GetTotals().GetDevices(), d.Overlay,
		d.Generation, short(d.Root), problem)
}

func (a *app) syncStatus() *cobra.Command {
	var kind string
	c := &cobra.Command{Use: "status", Short: "Show the datasets of resolvers, or of the service", Args: cobra.NoArgs}
	c.Flags().StringVar(&kind, "kind", "", "only this `dataset`: users, catalogue, config or secrets")
	fleet := fleetFlag(c, "show what the service has")
	c.RunE = func(c *cobra.Command, _ []string) error {
		t := datasetTable()
		if !fleet() {
			return gather(a, c.Context(), t,
				func(ctx context.Context, r adminv1.ResolverServiceClient) (*adminv1.SyncStatusResponse, error) {
					return r.SyncStatus(ctx, &adminv1.SyncStatusRequest{Kind: kind})
				},
				func(m *adminv1.SyncStatusResponse) error { return show(a, m.Datasets, nil) },
				func(addr string, m *adminv1.SyncStatusResponse) {
					for _, d := range m.Datasets {
						t.addDataset(addr, d)
					}
				})
		}
		return a.atService(func(conn *grpc.ClientConn) error {
			ctx, cancel := a.call(c.Context())
			defer cancel()
			resp, err := adminv1.NewDataServiceClient(conn).ServiceStatus(ctx, &adminv1.ServiceStatusRequest{})
			if err != nil {
				return err
			}
			a.note("%s: %d watches, %d tickets, version %s", a.service, resp.Watches, resp.Tickets, resp.Version)
			var kept []*adminv1.DatasetStatus
			for _, d := range resp.Datasets {
				if kind == "" || d.Kind == kind {
					kept = append(kept, d)
					t.addDataset(a.service, d)
				}
			}
			return show(a, kept, func() *table { return t })
		})
	}
	return c
}

func (a *app) syncAccept() *cobra.Command {
	var kind, dataset, why string
	c := &cobra.Command{
		Use: "accept", Short: "Accept a shrink that the guard holds, or another dataset", Args: cobra.NoArgs,
		Long: `Accept a shrink that the guard holds: at resolvers, which frees these, or with --fleet at the service, which
frees every resolver. With --dataset accept, at resolvers, data of another dataset than the one they hold.`,
	}
	c.Flags().StringVar(&kind, "kind", "users", "`dataset`: users, catalogue, config or secrets")
	c.Flags().StringVar(&dataset, "dataset", "", "`id` of another dataset, in hexadecimal")
	c.Flags().StringVar(&why, "why", "", "`reason`, for people")
	fleet := fleetFlag(c, "accept at the service, which frees every resolver")
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		if err := ch.unconditional("what is accepted is no record"); err != nil {
			return err
		}
		if !fleet() {
			t := &table{head: []string{"RESOLVER", "RELEASED"}}
			return gather(a, c.Context(), t,
				func(ctx context.Context, r adminv1.ResolverServiceClient) (*adminv1.SyncAcceptResponse, error) {
					return r.SyncAccept(ctx, &adminv1.SyncAcceptRequest{Kind: kind, Dataset: dataset, Why: why})
				},
				func(m *adminv1.SyncAcceptResponse) error { return show(a, []*adminv1.SyncAcceptResponse{m}, nil) },
				func(addr string, m *adminv1.SyncAcceptResponse) { t.add(addr, m.Released) })
		}
		if dataset != "" {
			return usagef("dataset", "another dataset is accepted at resolvers, not at the service")
		}
		return ch.do(c, func(ctx context.Context, conn *grpc.ClientConn) (commit, error) {
			return adminv1.NewDataServiceClient(conn).AcceptShrink(ctx, &adminv1.AcceptShrinkRequest{Kind: kind, Why: why})
		})
	}
	return c
}

func (a *app) syncRepair() *cobra.Command {
	var kind string
	c := &cobra.Command{Use: "repair", Short: "Compare a dataset with the service by digests, and fetch what differs", Args: cobra.NoArgs}
	c.Flags().StringVar(&kind, "kind", "users", "`dataset`: users, catalogue, config or secrets")
	c.RunE = func(c *cobra.Command, _ []string) error {
		t := &table{head: []string{"RESOLVER", "REPAIR"}}
		return gather(a, c.Context(), t,
			func(ctx context.Context, r adminv1.ResolverServiceClient) (*adminv1.SyncRepairResponse, error) {
				return r.SyncRepair(ctx, &adminv1.SyncRepairRequest{Kind: kind})
			},
			func(m *adminv1.SyncRepairResponse) error { return show(a, []*adminv1.SyncRepairResponse{m}, nil) },
			func(addr string, m *adminv1.SyncRepairResponse) {
				t.add(addr, map[bool]string{true: "was under way", false: "has begun"}[m.Already])
			})
	}
	return c
}

func limitTable() *table {
	return &table{head: []string{"RESOLVER", "NAME", "VALUE", "UNIT", "FROM", "UNTIL", "WHY"}}
}

func (t *table) addLimit(addr string, l *adminv1.Limit) {
	value := l.Value
	if n, err := strconv.ParseInt(value, 10, 64); err == nil && l.Unit == "bytes" {
		value = size(n)
	}
	t.add(addr, l.Name, value, l.Unit, l.From, when(l.Until), l.Why)
}

// size writes bytes for people: as `limits set` takes them if that is exact, else rounded.
func size(n int64) string {
	for _, u := range []struct {
		unit  string
		shift int
	}{{"GiB", 30}, {"MiB", 20}, {"KiB", 10}} {
		switch whole := int64(1) << u.shift; {
		case n < whole:
		case n%whole == 0:
			return strconv.FormatInt(n/whole, 10) + u.unit
		case n%(1<<20) != 0 || n > 100<<30:
			return fmt.Sprintf("~%.1f%s", float64(n)/float64(whole), u.unit)
		}
	}
	return strconv.FormatInt(n, 10)
}

func (a *app) limitsGet() *cobra.Command {
	return &cobra.Command{Use: "get [NAME]", Short: "Show limits", Args: cobra.MaximumNArgs(1), ValidArgsFunction: a.completeArgs(limitNames),
		RunE: func(c *cobra.Command, args []string) error {
			t := limitTable()
			req := &adminv1.GetLimitsRequest{Name: strings.Join(args, "")}
			return gather(a, c.Context(), t,
				func(ctx context.Context, r adminv1.ResolverServiceClient) (*adminv1.GetLimitsResponse, error) {
					return r.GetLimits(ctx, req)
				},
				func(m *adminv1.GetLimitsResponse) error { return show(a, m.Limits, nil) },
				func(addr string, m *adminv1.GetLimitsResponse) {
					for _, l := range m.Limits {
						t.addLimit(addr, l)
					}
				})
		}}
}

func (a *app) limitsSet() *cobra.Command {
	var d time.Duration
	req := &adminv1.SetLimitRequest{}
	c := &cobra.Command{Use: "set NAME VALUE", Short: "Change a limit, live; it goes to the resolver's log", Args: cobra.ExactArgs(2), ValidArgsFunction: a.completeArgs(limitNames)}
	c.Flags().DurationVar(&d, "for", 0, "for this `duration` (default until reset or restart)")
	c.Flags().StringVar(&req.Why, "why", "", "`reason`, for people")
	c.RunE = func(c *cobra.Command, args []string) error {
		var err error
		if req.Seconds, err = seconds("for", d); err != nil {
			return err
		}
		req.Name, req.Value = args[0], args[1]
		t := limitTable()
		return gather(a, c.Context(), t,
			func(ctx context.Context, r adminv1.ResolverServiceClient) (*adminv1.SetLimitResponse, error) {
				return r.SetLimit(ctx, req)
			},
			func(m *adminv1.SetLimitResponse) error { return show(a, []*adminv1.Limit{m.Limit}, nil) },
			func(addr string, m *adminv1.SetLimitResponse) { t.addLimit(addr, m.Limit) })
	}
	return c
}

func ntaTable() *table {
	return &table{head: []string{"RESOLVER", "NAME", "UNTIL", "CONFIGURED", "WHY"}}
}

func (t *table) addAnchor(addr string, n *adminv1.NegativeTrustAnchor) {
	t.add(addr, n.Name, when(n.Until), yes(n.Configured), n.Why)
}

func (a *app) ntaList() *cobra.Command {
	return &cobra.Command{Use: "list", Short: "Show them", Args: cobra.NoArgs, RunE: func(c *cobra.Command, _ []string) error {
		t := ntaTable()
		return gather(a, c.Context(), t,
			func(ctx context.Context, r adminv1.ResolverServiceClient) (*adminv1.ListNegativeTrustAnchorsResponse, error) {
				return r.ListNegativeTrustAnchors(ctx, &adminv1.ListNegativeTrustAnchorsRequest{})
			},
			func(m *adminv1.ListNegativeTrustAnchorsResponse) error { return show(a, m.Anchors, nil) },
			func(addr string, m *adminv1.ListNegativeTrustAnchorsResponse) {
				for _, n := range m.Anchors {
					t.addAnchor(addr, n)
				}
			})
	}}
}

func (a *app) ntaAdd() *cobra.Command {
	var d time.Duration
	req := &adminv1.AddNegativeTrustAnchorRequest{}
	c := &cobra.Command{Use: "add NAME", Short: "Validate nothing at and below a name; it goes to the resolver's log", Args: cobra.ExactArgs(1)}
	c.Flags().DurationVar(&d, "for", 0, "for this `duration`, at most a week (default a day, or until a restart)")
	c.Flags().StringVar(&req.Why, "why", "", "`reason`, for people")
	c.RunE = func(c *cobra.Command, args []string) error {
		var err error
		if req.Seconds, err = seconds("for", d); err != nil {
			return err
		}
		req.Name = args[0]
		t := ntaTable()
		return gather(a, c.Context(), t,
			func(ctx context.Context, r adminv1.ResolverServiceClient) (*adminv1.AddNegativeTrustAnchorResponse, error) {
				return r.AddNegativeTrustAnchor(ctx, req)
			},
			func(m *adminv1.AddNegativeTrustAnchorResponse) error {
				return show(a, []*adminv1.NegativeTrustAnchor{m.Anchor}, nil)
			},
			func(addr string, m *adminv1.AddNegativeTrustAnchorResponse) { t.addAnchor(addr, m.Anchor) })
	}
	return c
}

func (a *app) ntaRemove() *cobra.Command {
	return &cobra.Command{Use: "remove NAME", Short: "Validate again; a configured one is back after a restart", Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return a.atResolvers(func(_ string, r adminv1.ResolverServiceClient) error {
				ctx, cancel := a.call(c.Context())
				defer cancel()
				_, err := r.RemoveNegativeTrustAnchor(ctx, &adminv1.RemoveNegativeTrustAnchorRequest{Name: args[0]})
				return err
			})
		}}
}

// seconds reads the value of a flag for a number of seconds; 0 is none.
func seconds(flag string, d time.Duration) (uint64, error) {
	if d < 0 || d > 0 && d < time.Second {
		return 0, usagef(flag, "--%s %v is less than a second", flag, d)
	}
	return uint64(d / time.Second), nil
}

func (a *app) limitsReset() *cobra.Command {
	return &cobra.Command{Use: "reset NAME", Short: "Take the change of a limit back", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeArgs(limitNames),
		RunE: func(c *cobra.Command, args []string) error {
			t := limitTable()
			return gather(a, c.Context(), t,
				func(ctx context.Context, r adminv1.ResolverServiceClient) (*adminv1.ResetLimitResponse, error) {
					return r.ResetLimit(ctx, &adminv1.ResetLimitRequest{Name: args[0]})
				},
				func(m *adminv1.ResetLimitResponse) error { return show(a, []*adminv1.Limit{m.Limit}, nil) },
				func(addr string, m *adminv1.ResetLimitResponse) { t.addLimit(addr, m.Limit) })
		}}
}

func (a *app) cacheLook() *cobra.Command {
	return &cobra.Command{Use: "look NAME [TYPE]", Short: "Show what is cached for a name", Args: cobra.RangeArgs(1, 2), RunE: func(c *cobra.Command, args []string) error {
		req := &adminv1.CacheLookRequest{Name: args[0]}
		if len(args) == 2 {
			req.Type = args[1]
		}
		t := &table{head: []string{"RESOLVER", "CACHE", "NAME", "TYPE", "TTL", "STATUS", "RANK", "VIEW", "DATA"}}
		return gather(a, c.Context(), t,
			func(ctx context.Context, r adminv1.ResolverServiceClient) (*adminv1.CacheLookResponse, error) {
				return r.CacheLook(ctx, req)
			},
			func(m *adminv1.CacheLookResponse) error { return show(a, m.Entries, nil) },
			func(addr string, m *adminv1.CacheLookResponse) {
				if len(m.Entries) == 0 {
					a.note("%s: nothing is cached for %s", addr, args[0])
				}
				for _, e := range m.Entries {
					t.add(addr, e.Cache, e.Name, e.Type, e.Ttl, e.Status, e.Rank, e.View, strings.Join(e.Data, "; "))
				}
			})
	}}
}

func (a *app) cachePurge() *cobra.Command {
	req := &adminv1.CachePurgeRequest{}
	c := &cobra.Command{Use: "purge NAME", Short: "Forget what is cached for a name", Args: cobra.ExactArgs(1)}
	c.Flags().BoolVar(&req.Subtree, "subtree", false, "everything below it too")
	c.Flags().StringVar(&req.Type, "type", "", "only this `type`")
	c.RunE = func(c *cobra.Command, args []string) error {
		req.Name = args[0]
		t := &table{head: []string{"RESOLVER", "REMOVED"}}
		return gather(a, c.Context(), t,
			func(ctx context.Context, r adminv1.ResolverServiceClient) (*adminv1.CachePurgeResponse, error) {
				return r.CachePurge(ctx, req)
			},
			func(m *adminv1.CachePurgeResponse) error { return show(a, []*adminv1.CachePurgeResponse{m}, nil) },
			func(addr string, m *adminv1.CachePurgeResponse) { t.add(addr, m.Removed) })
	}
	return c
}

func (a *app) cacheDump() *cobra.Command {
	return &cobra.Command{Use: "dump FILE", Short: "Write a resolver's RRset cache to a file", Args: cobra.ExactArgs(1), RunE: func(c *cobra.Command, args []string) error {
		return a.atOneResolver(func(addr string, r adminv1.ResolverServiceClient) error {
			stream, err := r.CacheDump(c.Context(), &adminv1.CacheDumpRequest{})
			if err != nil {
				return err
			}
			n := 0
			err = a.writeFile(args[0], func(w *bufio.Writer) error {
				for {
					m, err := stream.Recv()
					if err == io.EOF {
						return nil
					}
					if err != nil {
						return refused(addr, err)
					}
					n += len(m.Data)
					_, _ = w.Write(m.Data) // bufio keeps an error for Flush
				}
			})
			if err == nil {
				a.note("%d bytes written to %s", n, args[0])
			}
			return err
		})
	}}
}

func (a *app) cacheLoad() *cobra.Command {
	return &cobra.Command{Use: "load FILE", Short: "Take a dump into the RRset cache of resolvers", Args: cobra.ExactArgs(1), RunE: func(c *cobra.Command, args []string) error {
		t := &table{head: []string{"RESOLVER", "LOADED", "SKIPPED"}}
		err := a.atResolvers(func(addr string, r adminv1.ResolverServiceClient) error {
			f, err := os.Open(args[0])
			if err != nil {
				return failedf("%w", err)
			}
			defer f.Close()
			stream, err := r.CacheLoad(c.Context())
			if err != nil {
				return err
			}
			err = sendChunks(f, args[0], func(b []byte) error { return stream.Send(&adminv1.CacheLoadRequest{Data: b}) })
			if err != nil && err != io.EOF { // io.EOF: the answer says why it is not wanted
				return err
			}
			resp, err := stream.CloseAndRecv()
			if err != nil {
				return err
			}
			if a.json {
				return show(a, []*adminv1.CacheLoadResponse{resp}, nil)
			}
			t.add(addr, resp.Loaded, resp.Skipped)
			return nil
		})
		if len(t.rows) > 0 {
			err = both(err, a.print(t))
		}
		return err
	}}
}

func (a *app) logLevel() *cobra.Command {
	var d time.Duration
	levels := []string{"debug", "info", "warn", "error"}
	c := &cobra.Command{Use: "level debug|info|warn|error", Short: "Change how much resolvers log", Args: cobra.ExactArgs(1), ValidArgs: levels}
	c.Flags().DurationVar(&d, "for", 0, "for this `duration` (default until changed or restarted)")
	c.RunE = func(c *cobra.Command, args []string) error {
		secs, err := seconds("for", d)
		if err != nil {
			return err
		}
		t := &table{head: []string{"RESOLVER", "WAS"}}
		return gather(a, c.Context(), t,
			func(ctx context.Context, r adminv1.ResolverServiceClient) (*adminv1.SetLogLevelResponse, error) {
				return r.SetLogLevel(ctx, &adminv1.SetLogLevelRequest{Level: args[0], Seconds: secs})
			},
			func(m *adminv1.SetLogLevelResponse) error { return show(a, []*adminv1.SetLogLevelResponse{m}, nil) },
			func(addr string, m *adminv1.SetLogLevelResponse) { t.add(addr, m.Was) })
	}
	return c
}
