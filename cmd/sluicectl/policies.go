package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

func (a *app) addPolicies(root *cobra.Command) {
	g := group(root, "policy", "Shared policies, and the settings of policies, users and devices")
	g.AddCommand(a.policyCreate(), a.policyGet(), a.policyDelete(), a.policyList(), a.policySet())
}

func (a *app) policyCreate() *cobra.Command {
	var req adminv1.CreatePolicyRequest
	c := &cobra.Command{Use: "create P", Short: "Make an empty policy; an existing id is refused", Args: cobra.ExactArgs(1)}
	c.Flags().StringVar(&req.Name, "name", "", "`name` for people")
	c.Flags().StringVar(&req.Tenant, "tenant", "", "`id` of the customer whose it is")
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := ch.unconditional("the policy does not exist yet"); err != nil {
			return err
		}
		req.Id = args[0]
		return ch.do(c, func(ctx context.Context, conn *grpc.ClientConn) (commit, error) {
			return adminv1.NewPolicyServiceClient(conn).CreatePolicy(ctx, &req)
		})
	}
	return c
}

func (a *app) policyGet() *cobra.Command {
	return &cobra.Command{Use: "get P", Short: "Show a policy", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeArgs(policyIDs),
		RunE: func(c *cobra.Command, args []string) error {
			err := a.atService(func(conn *grpc.ClientConn) error {
				ctx, cancel := a.call(c.Context())
				defer cancel()
				resp, err := adminv1.NewPolicyServiceClient(conn).GetPolicy(ctx, &adminv1.GetPolicyRequest{Id: strings.TrimPrefix(args[0], "policy/")})
				if err != nil {
					return err
				}
				p := resp.Policy
				return show(a, []*adminv1.Policy{p}, func() *table {
					t := &table{}
					t.add("id", p.GetId())
					t.add("revision", p.GetRevision())
					t.add("name", p.GetName())
					t.add("tenant", p.GetTenant())
					t.add("rules", p.GetRules().GetRules())
					addSettings(t, "", p.GetSettings())
					return t
				})
			})
			if f, ok := errors.AsType[*failure](err); ok && !strings.HasPrefix(args[0], "policy/") && (f.Code == "NOT_FOUND" || strings.Contains(args[0], "/")) {
				// People change users by `policy set`, and then look for what they did here.
				user, _, _ := strings.Cut(args[0], "/")
				f.Message += fmt.Sprintf("; settings of users and devices are shown by `sluicectl user get %s`", user)
			}
			return err
		}}
}

func (a *app) policyDelete() *cobra.Command {
	c := &cobra.Command{Use: "delete P", Short: "Remove a policy that no user refers to", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeArgs(policyIDs)}
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		return ch.do(c, func(ctx context.Context, conn *grpc.ClientConn) (commit, error) {
			return adminv1.NewPolicyServiceClient(conn).DeletePolicy(ctx, &adminv1.DeletePolicyRequest{Id: args[0], IfRevision: ch.ifRevision})
		})
	}
	return c
}

func (a *app) policyList() *cobra.Command {
	return &cobra.Command{Use: "list", Short: "Show all policies", Args: cobra.NoArgs, RunE: func(c *cobra.Command, _ []string) error {
		return a.atService(func(conn *grpc.ClientConn) error {
			ctx, cancel := a.call(c.Context())
			defer cancel()
			resp, err := adminv1.NewPolicyServiceClient(conn).ListPolicies(ctx, &adminv1.ListPoliciesRequest{})
			if err != nil {
				return err
			}
			return show(a, resp.Policies, func() *table {
				t := &table{head: []string{"ID", "NAME", "TENANT", "SETTINGS", "RULES", "REVISION"}}
				for _, p := range resp.Policies {
					t.add(p.Id, p.Name, p.Tenant, len(assignments(p.Settings)), p.GetRules().GetRules(), p.Revision)
				}
				return t
			})
		})
	}}
}

func (a *app) policySet() *cobra.Command {
	c := &cobra.Command{
		Use:   "set TARGET KEY=VALUE | KEY+=VALUE | KEY-=VALUE …",
		Short: "Change settings of a policy, user or device, all or nothing",
		Long: `Change settings of a TARGET: policy/P, USER or USER/DEVICE. All changes are made, or none.

KEY=VALUE sets a value or a whole set, KEY= goes back to what lies beneath; of sets KEY=- is the empty one,
KEY+=VALUE adds and KEY-=VALUE takes away. Several members of a set are separated by commas.

Keys: ` + strings.Join(settingKeys(), ", ") + `.
Besides, a user has policy, name, disabled, tenant, auto_devices and max_devices.

A schedule is ID=block|pause;DAYS FROM-TO;…;WHAT;ZONE: one or more spans, overnight ones such as 22:00-07:00 too; WHAT
is services:A,B, categories:A,B and lists:A,B with ; between them, or everything; without ZONE it is UTC. A pause ends
and an unblock of a name may end at an instant: 2030-01-02T15:04:05Z, or +1h from now. Who asks for mode custom_ip is
answered by block_ipv4 and block_ipv6, and has no data where these are not set.`,
		Example: `  sluicectl policy set policy/family lists+=oisd services+=tiktok safe_search+=google
  sluicectl policy set ann mode=nxdomain block_ttl=10s
  sluicectl policy set ann mode=custom_ip block_ipv4=192.0.2.80 block_ipv6=2001:db8::80
  sluicectl policy set ann/phone paused_until=+30m
  sluicectl policy set ann unblocks+=www.shop.example@+1h,*.games.example
  sluicectl policy set ann own_lists+=kids=https://lists.example/kids.txt
  sluicectl policy set ann 'rewrites+=nas.home.arpa=A 192.0.2.7' 'schedules+=night=block;mon-fri 22:00-07:00;services:tiktok;Europe/Nicosia'`,
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: a.completeSet,
	}
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := checkTarget(args[0]); err != nil {
			return err
		}
		req := &adminv1.SetSettingsRequest{Target: args[0], IfRevision: ch.ifRevision}
		for _, arg := range args[1:] {
			as, err := parseAssignment(arg)
			if err != nil {
				return err
			}
			req.Assignments = append(req.Assignments, as)
		}
		err := a.atService(func(conn *grpc.ClientConn) error {
			ctx, cancel := a.call(c.Context())
			if slices.ContainsFunc(req.Assignments, func(as *adminv1.Assignment) bool { return as.Key == "own_lists" }) {
				cancel() // the service may have to fetch them
				ctx, cancel = context.WithTimeout(c.Context(), max(compileWithin, a.timeout))
			}
			defer cancel()
			resp, err := adminv1.NewPolicyServiceClient(conn).SetSettings(ctx, req)
			if err != nil {
				return err
			}
			for _, w := range resp.Warnings {
				a.note("warning: %s", clean(w)) // of -o json the object has them
			}
			return ch.done(c.Context(), resp)
		})
		// The service knows which keys there are, perhaps more than we do; we only help to find them.
		if f, ok := errors.AsType[*failure](err); ok && f.Code == "INVALID_ARGUMENT" && f.exit == exitFailed {
			for _, as := range req.Assignments {
				if like := similarKey(as.Key); like != "" {
					f.Message += fmt.Sprintf("; did you mean %s instead of %s?", like, as.Key)
				}
			}
		}
		return err
	}
	return c
}

// checkTarget refuses what can be no target.
func checkTarget(t string) error {
	first, second, two := strings.Cut(t, "/")
	if first == "" || two && second == "" || strings.Contains(second, "/") || strings.ContainsAny(t, "= \t") {
		return usagef("target", "%q is no target; write policy/P, USER or USER/DEVICE", t)
	}
	return nil
}
