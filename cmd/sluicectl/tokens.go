package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

func (a *app) addTokens(root *cobra.Command) {
	g := group(root, "token", "Tokens of people and programs")
	var req adminv1.CreateTokenRequest
	var lifetime time.Duration
	create := &cobra.Command{Use: "create --role admin|operator|reader", Short: "Make a token, and show it this once", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if lifetime < 0 || lifetime > 0 && lifetime < time.Second {
				return usagef("for", "--for %v is less than a second", lifetime)
			}
			req.Lifetime = uint64(lifetime / time.Second)
			return a.atService(func(conn *grpc.ClientConn) error {
				ctx, cancel := a.call(c.Context())
				defer cancel()
				resp, err := adminv1.NewTokenServiceClient(conn).CreateToken(ctx, &req)
				if err != nil {
					return err
				}
				if a.json {
					return show(a, []*adminv1.CreateTokenResponse{resp}, nil)
				}
				a.note("token %s:", resp.Id)
				if _, err := fmt.Fprintln(a.stdout, resp.Token); err != nil {
					return failedf("writing: %w", err)
				}
				return nil
			})
		}}
	f := create.Flags()
	f.StringVar(&req.Role, "role", "", "`role`: admin, operator or reader")
	f.StringVar(&req.Tenant, "tenant", "", "`id` of the customer it is for; not possible yet")
	f.StringVar(&req.Note, "note", "", "`text` that says what it is for")
	f.DurationVar(&lifetime, "for", 0, "how long it is valid (default until revoked)")
	mustMark(create.MarkFlagRequired("role"))
	mustMark(create.RegisterFlagCompletionFunc("role", cobra.FixedCompletions([]string{"admin", "operator", "reader"}, cobra.ShellCompDirectiveNoFileComp)))

	list := &cobra.Command{Use: "list", Short: "Show all tokens without their secrets", Args: cobra.NoArgs, RunE: func(c *cobra.Command, _ []string) error {
		return a.atService(func(conn *grpc.ClientConn) error {
			ctx, cancel := a.call(c.Context())
			defer cancel()
			resp, err := adminv1.NewTokenServiceClient(conn).ListTokens(ctx, &adminv1.ListTokensRequest{})
			if err != nil {
				return err
			}
			return show(a, resp.Tokens, func() *table {
				t := &table{head: []string{"ID", "ROLE", "TENANT", "CREATED", "EXPIRES", "NOTE"}}
				for _, k := range resp.Tokens {
					t.add(k.Id, k.Role, k.Tenant, when(k.Created), when(k.Expires), k.Note)
				}
				return t
			})
		})
	}}
	revoke := &cobra.Command{Use: "revoke ID", Short: "End a token", Args: cobra.ExactArgs(1), RunE: func(c *cobra.Command, args []string) error {
		return a.atService(func(conn *grpc.ClientConn) error {
			ctx, cancel := a.call(c.Context())
			defer cancel()
			_, err := adminv1.NewTokenServiceClient(conn).RevokeToken(ctx, &adminv1.RevokeTokenRequest{Id: args[0]})
			return err
		})
	}}
	g.AddCommand(create, list, revoke)
}
