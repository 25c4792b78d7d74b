package main

import (
	"context"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

// An entryCommand is the group of commands for one kind of what policies name besides lists.
type entryCommand struct {
	kind                  adminv1.EntryKind
	name, short, keys, eg string
}

var entryCommands = []entryCommand{
	{adminv1.EntryKind_ENTRY_KIND_SERVICE, "service", "Services that people know by one name, and the rules that block them",
		"name, group, rules", "  sluicectl service set chess name=Chess group=gaming rules+='||chess.example^' rules+='||chess.example.net^'"},
	{adminv1.EntryKind_ENTRY_KIND_CATEGORY, "category", "Kinds of content, and the lists that make them up",
		"name, lists, threat, safe_browsing, adult, required", "  sluicectl category set malware lists+=urlhaus\n  sluicectl category set chess name=Chess lists=chess-sites"},
	{adminv1.EntryKind_ENTRY_KIND_SAFE_SEARCH, "safesearch", "Engines that are held to their safe mode, and what is answered instead",
		"name, rewrites", "  sluicectl safesearch set find name=Find 'rewrites+=find.example=CNAME safe.find.example'"},
}

func (a *app) addEntries(root *cobra.Command) {
	for _, e := range entryCommands {
		g := group(root, e.name, e.short)
		g.AddCommand(a.entryList(e), a.entryGet(e), a.entrySet(e), a.entryDelete(e), a.entryReset(e))
	}
}

// origins is where an entry comes from, for people.
var origins = map[adminv1.Origin]string{
	adminv1.Origin_ORIGIN_BUILT_IN: "built in", adminv1.Origin_ORIGIN_CHANGED: "changed", adminv1.Origin_ORIGIN_OPERATOR: "own",
}

func (a *app) entryList(e entryCommand) *cobra.Command {
	return &cobra.Command{Use: "list", Short: "Show all", Args: cobra.NoArgs, RunE: func(c *cobra.Command, _ []string) error {
		return a.atService(func(conn *grpc.ClientConn) error {
			ctx, cancel := a.call(c.Context())
			defer cancel()
			resp, err := adminv1.NewCatalogueServiceClient(conn).ListEntries(ctx, &adminv1.ListEntriesRequest{Kind: e.kind})
			if err != nil {
				return err
			}
			return show(a, resp.Entries, func() *table {
				t := &table{head: []string{"ID", "NAME", "HOLDS", "FROM"}}
				for _, x := range resp.Entries {
					name, holds := entryHolds(x)
					t.add(x.Id, name, holds, origins[x.Origin])
				}
				return t
			})
		})
	}}
}

// entryHolds says in a word what an entry is made of.
func entryHolds(x *adminv1.CatalogueEntry) (name string, holds any) {
	switch b := x.GetBody().(type) {
	case *adminv1.CatalogueEntry_Service:
		return b.Service.GetName(), len(b.Service.GetRules())
	case *adminv1.CatalogueEntry_Category:
		return b.Category.GetName(), strings.Join(b.Category.GetLists(), ",")
	case *adminv1.CatalogueEntry_SafeSearch:
		return b.SafeSearch.GetName(), len(b.SafeSearch.GetRewrites())
	}
	return "", ""
}

func (a *app) showEntry(x *adminv1.CatalogueEntry) error {
	return show(a, []*adminv1.CatalogueEntry{x}, func() *table {
		t := &table{}
		t.add("id", x.GetId())
		t.add("revision", x.GetRevision())
		t.add("from", origins[x.GetOrigin()])
		switch b := x.GetBody().(type) {
		case *adminv1.CatalogueEntry_Service:
			t.add("name", b.Service.GetName())
			t.add("group", b.Service.GetGroup())
			t.add("number", b.Service.GetNumber())
			for _, r := range b.Service.GetRules() {
				t.add("rule", r)
			}
		case *adminv1.CatalogueEntry_Category:
			t.add("name", b.Category.GetName())
			t.add("number", b.Category.GetNumber())
			t.add("lists", strings.Join(b.Category.GetLists(), ","))
			t.add("threat", yes(b.Category.GetThreat()))
			t.add("safe_browsing", yes(b.Category.GetSafeBrowsing()))
			t.add("adult", yes(b.Category.GetAdult()))
			t.add("required", yes(b.Category.GetRequired()))
		case *adminv1.CatalogueEntry_SafeSearch:
			t.add("name", b.SafeSearch.GetName())
			for _, r := range b.SafeSearch.GetRewrites() {
				t.add("rewrite", r.GetName()+"="+strings.Join(r.GetRecords(), ";"))
			}
		}
		return t
	})
}

func entryIDs(kind adminv1.EntryKind) source {
	return func(ctx context.Context, a *app, _ string) (ids []string, err error) {
		err = a.atService(func(conn *grpc.ClientConn) error {
			resp, err := adminv1.NewCatalogueServiceClient(conn).ListEntries(ctx, &adminv1.ListEntriesRequest{Kind: kind})
			for _, x := range resp.GetEntries() {
				ids = append(ids, x.Id)
			}
			return err
		})
		return ids, err
	}
}

func (a *app) entryGet(e entryCommand) *cobra.Command {
	return &cobra.Command{Use: "get ID", Short: "Show one", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeArgs(entryIDs(e.kind)),
		RunE: func(c *cobra.Command, args []string) error {
			return a.atService(func(conn *grpc.ClientConn) error {
				ctx, cancel := a.call(c.Context())
				defer cancel()
				resp, err := adminv1.NewCatalogueServiceClient(conn).GetEntry(ctx, &adminv1.GetEntryRequest{Kind: e.kind, Id: args[0]})
				if err != nil {
					return err
				}
				return a.showEntry(resp.Entry)
			})
		}}
}

func (a *app) entrySet(e entryCommand) *cobra.Command {
	c := &cobra.Command{
		Use: "set ID KEY=VALUE | KEY+=VALUE | KEY-=VALUE …", Short: "Change one, or make it; all or nothing", Args: cobra.MinimumNArgs(2),
		Long:    "Change one, or make it if there is none of this id. New versions of the starting catalogue leave it alone\nfrom then on; `reset` undoes that.\n\nKeys: " + e.keys + ".",
		Example: e.eg, ValidArgsFunction: a.completeArgs(entryIDs(e.kind)),
	}
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		req := &adminv1.SetEntryRequest{Kind: e.kind, Id: args[0], IfRevision: ch.ifRevision}
		for _, arg := range args[1:] {
			as, err := parseAssignment(arg)
			if err != nil {
				return err
			}
			req.Assignments = append(req.Assignments, as)
		}
		return ch.do(c, func(ctx context.Context, conn *grpc.ClientConn) (commit, error) {
			return adminv1.NewCatalogueServiceClient(conn).SetEntry(ctx, req)
		})
	}
	return c
}

func (a *app) entryDelete(e entryCommand) *cobra.Command {
	c := &cobra.Command{Use: "delete ID", Short: "Remove one that no policy, user or device names", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeArgs(entryIDs(e.kind))}
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		return ch.do(c, func(ctx context.Context, conn *grpc.ClientConn) (commit, error) {
			return adminv1.NewCatalogueServiceClient(conn).DeleteEntry(ctx, &adminv1.DeleteEntryRequest{Kind: e.kind, Id: args[0], IfRevision: ch.ifRevision})
		})
	}
	return c
}

func (a *app) entryReset(e entryCommand) *cobra.Command {
	c := &cobra.Command{Use: "reset ID", Short: "Make one what the starting catalogue has", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeArgs(entryIDs(e.kind))}
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		return ch.do(c, func(ctx context.Context, conn *grpc.ClientConn) (commit, error) {
			return adminv1.NewCatalogueServiceClient(conn).ResetEntry(ctx, &adminv1.ResetEntryRequest{Kind: e.kind, Id: args[0], IfRevision: ch.ifRevision})
		})
	}
	return c
}
