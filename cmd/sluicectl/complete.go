package main

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/reflect/protoreflect"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

// Completion asks the service, and gives up soon and in silence: a shell waits for it.
const completeWithin = time.Second

// A source lists what may be written, given its beginning.
type source func(ctx context.Context, a *app, begin string) ([]string, error)

func (a *app) offer(c *cobra.Command, from source, begin string) ([]string, cobra.ShellCompDirective) {
	if root := c.Root(); root.PersistentPreRunE != nil && root.PersistentPreRunE(c, nil) != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(context.Background(), completeWithin)
	defer cancel()
	all, err := from(ctx, a, begin)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []string
	for _, s := range all {
		if strings.HasPrefix(s, begin) {
			out = append(out, s)
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

// completeArgs completes the first argument.
func (a *app) completeArgs(from source) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, begin string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return a.offer(c, from, begin)
	}
}

// complete completes a flag.
func (a *app) complete(c *cobra.Command, flag string, from source) {
	err := c.RegisterFlagCompletionFunc(flag, func(c *cobra.Command, _ []string, begin string) ([]string, cobra.ShellCompDirective) {
		return a.offer(c, from, begin)
	})
	if err != nil {
		panic(err) // the flag does not exist: a fault of this program
	}
}

func userIDs(ctx context.Context, a *app, begin string) (ids []string, err error) {
	err = a.atService(func(conn *grpc.ClientConn) error {
		resp, err := adminv1.NewUserServiceClient(conn).ListUsers(ctx, &adminv1.ListUsersRequest{Filter: begin, Limit: 100})
		for _, u := range resp.GetUsers() {
			ids = append(ids, u.Id)
		}
		return err
	})
	return ids, err
}

func policyIDs(ctx context.Context, a *app, _ string) (ids []string, err error) {
	err = a.atService(func(conn *grpc.ClientConn) error {
		resp, err := adminv1.NewPolicyServiceClient(conn).ListPolicies(ctx, &adminv1.ListPoliciesRequest{})
		for _, p := range resp.GetPolicies() {
			ids = append(ids, p.Id)
		}
		return err
	})
	return ids, err
}

func listIDs(ctx context.Context, a *app, _ string) (ids []string, err error) {
	err = a.atService(func(conn *grpc.ClientConn) error {
		resp, err := adminv1.NewListServiceClient(conn).ListLists(ctx, &adminv1.ListListsRequest{})
		for _, l := range resp.GetLists() {
			ids = append(ids, l.Id)
		}
		return err
	})
	return ids, err
}

// targets completes policy/P, USER and USER/DEVICE.
func targets(ctx context.Context, a *app, begin string) ([]string, error) {
	if user, _, ok := strings.Cut(begin, "/"); ok && user != "policy" {
		var ids []string
		err := a.atService(func(conn *grpc.ClientConn) error {
			resp, err := adminv1.NewUserServiceClient(conn).ListDevices(ctx, &adminv1.ListDevicesRequest{User: user})
			for _, d := range resp.GetDevices() {
				ids = append(ids, user+"/"+d.GetDevice().GetId())
			}
			return err
		})
		return ids, err
	}
	ids, err := policyIDs(ctx, a, begin)
	for i := range ids {
		ids[i] = "policy/" + ids[i]
	}
	if err != nil || strings.HasPrefix(begin, "policy/") {
		return ids, err
	}
	users, err := userIDs(ctx, a, begin)
	return append(ids, users...), err
}

func limitNames(ctx context.Context, a *app, _ string) (names []string, err error) {
	a.resolvers = a.resolvers[:1]
	err = a.atResolvers(func(_ string, c adminv1.ResolverServiceClient) error {
		resp, err := c.GetLimits(ctx, &adminv1.GetLimitsRequest{})
		for _, l := range resp.GetLimits() {
			names = append(names, l.Name)
		}
		return err
	})
	return names, err
}

// completeSet completes the target, then keys with what may follow them.
func (a *app) completeSet(c *cobra.Command, args []string, begin string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 0 {
		return a.offer(c, targets, begin)
	}
	var out []string
	fields := settingFields()
	for i := range fields.Len() {
		f := fields.Get(i)
		key := string(f.Name())
		switch f.Kind() {
		case protoreflect.MessageKind:
			out = append(out, key+"=", key+"+=", key+"-=")
		case protoreflect.EnumKind:
			for _, v := range enumNames(f.Enum()) {
				out = append(out, key+"="+v)
			}
		case protoreflect.BoolKind:
			out = append(out, key+"=true", key+"=false")
		default:
			out = append(out, key+"=")
		}
	}
	kept := out[:0]
	for _, s := range out {
		if strings.HasPrefix(s, begin) {
			kept = append(kept, s)
		}
	}
	return kept, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
}
