package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

func (a *app) addUsers(root *cobra.Command) {
	g := group(root, "user", "Accounts")
	g.AddCommand(a.userCreate(), a.userGet(), a.userDelete(), a.userList())
}

func (a *app) userCreate() *cobra.Command {
	var req adminv1.CreateUserRequest
	c := &cobra.Command{Use: "create ID", Short: "Make a user; an existing id is refused", Args: cobra.ExactArgs(1)}
	f := c.Flags()
	f.StringVar(&req.Policy, "policy", "", "`id` of the policy to refer to")
	f.StringVar(&req.Name, "name", "", "`name` for people")
	f.StringVar(&req.Tenant, "tenant", "", "`id` of the customer whose it is")
	f.BoolVar(&req.AutoDevices, "auto-devices", false, "resolvers may propose devices named ID-something")
	a.complete(c, "policy", policyIDs)
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := ch.unconditional("the user does not exist yet"); err != nil {
			return err
		}
		req.Id = args[0]
		return ch.do(c, func(ctx context.Context, conn *grpc.ClientConn) (commit, error) {
			return adminv1.NewUserServiceClient(conn).CreateUser(ctx, &req)
		})
	}
	return c
}

func (a *app) userGet() *cobra.Command {
	return &cobra.Command{Use: "get ID", Short: "Show a user", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeArgs(userIDs),
		RunE: func(c *cobra.Command, args []string) error {
			return a.atService(func(conn *grpc.ClientConn) error {
				ctx, cancel := a.call(c.Context())
				defer cancel()
				resp, err := adminv1.NewUserServiceClient(conn).GetUser(ctx, &adminv1.GetUserRequest{Id: args[0]})
				if err != nil {
					return err
				}
				return show(a, []*adminv1.User{resp.User}, func() *table { return userCard(resp.User) })
			})
		}}
}

// userCard shows one user in full, settings as `policy set` takes them.
func userCard(u *adminv1.User) *table {
	t := &table{}
	t.add("id", u.GetId())
	t.add("revision", u.GetRevision())
	t.add("name", u.GetName())
	t.add("policy", u.GetPolicy())
	t.add("tenant", u.GetTenant())
	t.add("disabled", yes(u.GetDisabled()))
	t.add("created", when(u.GetCreated()))
	t.add("auto devices", yes(u.GetAutoDevices()))
	t.add("max devices", or(u.GetMaxDevices(), 256))
	t.add("rules", u.GetRules().GetRules())
	addSettings(t, "", u.GetSettings())
	for _, d := range u.GetDevices() {
		addDevice(t, d)
	}
	return t
}

func or(n, def uint32) uint32 {
	if n == 0 {
		return def
	}
	return n
}

func addSettings(t *table, indent string, s *userv1.Settings) {
	for _, line := range assignments(s) {
		t.add(indent+"setting", line)
	}
}

func (a *app) userDelete() *cobra.Command {
	c := &cobra.Command{Use: "delete ID", Short: "Remove a user with its devices", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeArgs(userIDs)}
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		return ch.do(c, func(ctx context.Context, conn *grpc.ClientConn) (commit, error) {
			return adminv1.NewUserServiceClient(conn).DeleteUser(ctx, &adminv1.DeleteUserRequest{Id: args[0], IfRevision: ch.ifRevision})
		})
	}
	return c
}

// pageSize is how many users are asked for at once.
const pageSize = 1000

func (a *app) userList() *cobra.Command {
	var filter string
	var limit uint
	c := &cobra.Command{Use: "list", Short: "Show users in order of id", Args: cobra.NoArgs}
	c.Flags().StringVar(&filter, "filter", "", "`words` that all must hold: policy=P, tenant=T, disabled=true, device=ID, or text found in id or name")
	c.Flags().UintVar(&limit, "limit", 0, "show at most this `number` (default all)")
	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.atService(func(conn *grpc.ClientConn) error {
			t := &table{head: []string{"ID", "NAME", "POLICY", "TENANT", "DEVICES", "DISABLED", "REVISION"}}
			req := &adminv1.ListUsersRequest{Filter: filter}
			for n := uint(0); limit == 0 || n < limit; {
				req.Limit = pageSize
				if limit != 0 {
					req.Limit = uint32(min(pageSize, limit-n))
				}
				ctx, cancel := a.call(c.Context())
				resp, err := adminv1.NewUserServiceClient(conn).ListUsers(ctx, req)
				cancel()
				if err != nil {
					return err
				}
				n += uint(len(resp.Users))
				if a.json { // page by page: there may be millions
					if err := show(a, resp.Users, nil); err != nil {
						return err
					}
				}
				for _, u := range resp.Users {
					if !a.json {
						t.add(u.Id, u.Name, u.Policy, u.Tenant, len(u.Devices), yes(u.Disabled), u.Revision)
					}
				}
				if req.Page = resp.NextPage; req.Page == "" {
					break
				}
			}
			if a.json {
				return nil
			}
			return a.print(t)
		})
	}
	return c
}

func (a *app) addDevices(root *cobra.Command) {
	g := group(root, "device", "Devices of users")
	g.AddCommand(a.deviceCreate(), a.deviceGet(), a.deviceSet(), a.deviceDelete(), a.deviceList())
}

// deviceFlags are what can be said of a device.
type deviceFlags struct {
	user, name, passwordFile       string
	links, dedicated, ednsIDs, tag []string
	dohOnly, noPassword            bool
}

func (d *deviceFlags) add(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&d.name, "name", "", "`name` for people")
	f.StringArrayVar(&d.links, "link", nil, "source address or `prefix` whose plain queries are the device's; may be repeated")
	f.StringArrayVar(&d.dedicated, "dedicated", nil, "destination `address` of the device alone; may be repeated")
	f.StringArrayVar(&d.ednsIDs, "edns-id", nil, "`MAC` address or cpe:ID that a relay sends; may be repeated")
	f.StringArrayVar(&d.tag, "tag", nil, "client `tag` of rules with $ctag; may be repeated")
	f.StringVar(&d.passwordFile, "password-file", "", "`file` that holds a password for DoH")
	f.BoolVar(&d.dohOnly, "doh-only", false, "only authenticated DoH identifies the device")
}

// given drops the empty text by which --link "" says "none".
func given(values []string) []string {
	var out []string
	for _, v := range values {
		if v != "" {
			out = append(out, v)
		}
	}
	return out
}

func (a *app) deviceCreate() *cobra.Command {
	var d deviceFlags
	c := &cobra.Command{Use: "create USER ID", Short: "Give a user a device; an id that exists anywhere is refused", Args: cobra.ExactArgs(2), ValidArgsFunction: a.completeArgs(userIDs)}
	d.add(c)
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		req := &adminv1.CreateDeviceRequest{User: args[0], IfRevision: ch.ifRevision, Device: &userv1.Device{
			Id: args[1], Name: d.name, Links: given(d.links), Dedicated: given(d.dedicated), EdnsIds: given(d.ednsIDs), Tags: given(d.tag), DohOnly: d.dohOnly,
		}}
		if d.passwordFile != "" {
			var err error
			if req.Password, err = readSecret(d.passwordFile); err != nil {
				return err
			}
		}
		return ch.do(c, func(ctx context.Context, conn *grpc.ClientConn) (commit, error) {
			return adminv1.NewUserServiceClient(conn).CreateDevice(ctx, req)
		})
	}
	return c
}

func (a *app) deviceSet() *cobra.Command {
	var d deviceFlags
	c := &cobra.Command{
		Use: "set " + deviceArg, Short: "Change a device, or move it to another user", Args: cobra.ExactArgs(1),
		Long: "Change a device, or move it to another user. What is not given stays; --link \"\" and the like remove all.",
	}
	d.add(c)
	c.Flags().StringVar(&d.user, "user", "", "move it to this `user`")
	c.Flags().BoolVar(&d.noPassword, "no-password", false, "remove its passwords")
	c.MarkFlagsMutuallyExclusive("no-password", "password-file")
	a.complete(c, "user", userIDs)
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		req := &adminv1.UpdateDeviceRequest{IfRevision: ch.ifRevision}
		set := c.Flags().Changed
		for flag, to := range map[string]struct {
			field  **adminv1.AddressList
			values []string
		}{"link": {&req.Links, d.links}, "dedicated": {&req.Dedicated, d.dedicated}, "edns-id": {&req.EdnsIds, d.ednsIDs}, "tag": {&req.Tags, d.tag}} {
			if set(flag) {
				*to.field = &adminv1.AddressList{Values: given(to.values)}
			}
		}
		if set("user") {
			req.User = &d.user
		}
		if set("name") {
			req.Name = &d.name
		}
		if set("doh-only") {
			req.DohOnly = &d.dohOnly
		}
		if d.noPassword {
			req.Password = new(string)
		}
		if d.passwordFile != "" {
			password, err := readSecret(d.passwordFile)
			if err != nil {
				return err
			}
			req.Password = &password
		}
		return ch.do(c, func(ctx context.Context, conn *grpc.ClientConn) (_ commit, err error) {
			if req.Id, err = a.deviceID(ctx, conn, args[0]); err != nil {
				return nil, err
			}
			return adminv1.NewUserServiceClient(conn).UpdateDevice(ctx, req)
		})
	}
	return c
}

// deviceArg is how a device is named: by its id, which no other has, or as elsewhere with its user in front.
const deviceArg = "[USER/]ID"

// deviceID reads a deviceArg. That the device is the user's, if one is named, the service is asked.
func (a *app) deviceID(ctx context.Context, conn *grpc.ClientConn, arg string) (string, error) {
	user, id, named := strings.Cut(arg, "/")
	if !named {
		return arg, nil
	}
	ctx, cancel := a.call(ctx)
	defer cancel()
	resp, err := adminv1.NewUserServiceClient(conn).GetDevice(ctx, &adminv1.GetDeviceRequest{Id: id})
	if err != nil {
		return "", err
	}
	if of := resp.Device.GetUser(); !strings.EqualFold(of, user) {
		return "", &failure{Code: "NOT_FOUND", Message: fmt.Sprintf("device %q is user %q's and not %q's", id, of, user), Field: "id", exit: exitFailed}
	}
	return id, nil
}

func (a *app) deviceGet() *cobra.Command {
	return &cobra.Command{Use: "get " + deviceArg, Short: "Show a device", Args: cobra.ExactArgs(1), RunE: func(c *cobra.Command, args []string) error {
		return a.atService(func(conn *grpc.ClientConn) error {
			id, err := a.deviceID(c.Context(), conn, args[0])
			if err != nil {
				return err
			}
			ctx, cancel := a.call(c.Context())
			defer cancel()
			resp, err := adminv1.NewUserServiceClient(conn).GetDevice(ctx, &adminv1.GetDeviceRequest{Id: id})
			if err != nil {
				return err
			}
			return show(a, []*adminv1.Device{resp.Device}, func() *table {
				t := &table{}
				addDevice(t, resp.Device.GetDevice())
				t.add("  user", resp.Device.GetUser())
				t.add("  revision", resp.Device.GetRevision())
				return t
			})
		})
	}}
}

// addDevice shows a device below its id.
func addDevice(t *table, d *userv1.Device) {
	t.add("device", d.GetId())
	t.add("  name", d.GetName())
	for _, x := range []struct {
		what   string
		values []string
	}{{"  links", d.GetLinks()}, {"  dedicated", d.GetDedicated()}, {"  edns ids", d.GetEdnsIds()}, {"  tags", d.GetTags()}} {
		if len(x.values) > 0 {
			t.add(x.what, strings.Join(x.values, ", "))
		}
	}
	if n := len(d.GetPasswordHashes()) + len(d.GetTokenSha256()); n > 0 || d.GetDohOnly() {
		t.add("  credentials", fmt.Sprintf("%d, needed: %s", n, yes(d.GetDohOnly())))
	}
	if n := d.GetRules().GetRules(); n > 0 {
		t.add("  rules", n)
	}
	addSettings(t, "  ", d.GetSettings())
}

func (a *app) deviceDelete() *cobra.Command {
	c := &cobra.Command{Use: "delete " + deviceArg, Short: "Remove a device", Args: cobra.ExactArgs(1)}
	ch := a.change(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		return ch.do(c, func(ctx context.Context, conn *grpc.ClientConn) (commit, error) {
			id, err := a.deviceID(ctx, conn, args[0])
			if err != nil {
				return nil, err
			}
			return adminv1.NewUserServiceClient(conn).DeleteDevice(ctx, &adminv1.DeleteDeviceRequest{Id: id, IfRevision: ch.ifRevision})
		})
	}
	return c
}

func (a *app) deviceList() *cobra.Command {
	return &cobra.Command{Use: "list USER", Short: "Show a user's devices", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeArgs(userIDs),
		RunE: func(c *cobra.Command, args []string) error {
			return a.atService(func(conn *grpc.ClientConn) error {
				ctx, cancel := a.call(c.Context())
				defer cancel()
				resp, err := adminv1.NewUserServiceClient(conn).ListDevices(ctx, &adminv1.ListDevicesRequest{User: args[0]})
				if err != nil {
					return err
				}
				return show(a, resp.Devices, func() *table {
					t := &table{head: []string{"ID", "NAME", "LINKS", "DEDICATED", "DOH-ONLY"}}
					for _, d := range resp.Devices {
						x := d.GetDevice()
						t.add(x.GetId(), x.GetName(), strings.Join(x.GetLinks(), ","), strings.Join(x.GetDedicated(), ","), yes(x.GetDohOnly()))
					}
					return t
				})
			})
		}}
}
