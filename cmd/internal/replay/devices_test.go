package replay

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/miekg/dns"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// TestDevices: a device that does not exist is made by itself because a client has named it, and one with a
// password is served to who knows it, through a service and a resolver as they are run.
func TestDevices(t *testing.T) {
	const site = "site.example"
	w := newWorld(t, 1, siminternet.WithNames(siminternet.StandardZones(), netip.MustParseAddr("127.53.9.1"), netip.MustParseAddr(siteAddr), site))
	if _, err := w.users.CreateUser(t.Context(), &adminv1.CreateUserRequest{Id: "ann", AutoDevices: true}); err != nil {
		t.Fatal(err)
	}
	w.user("bob", "bob-pc", "127.0.0.3")
	r := w.resolvers[0]
	as := func(device, server string) string {
		return judge(dohAs(t, device, server)(dns.Fqdn(site), dns.TypeA))
	}
	until(t, func() bool { return as("bob-pc", r.doh) == "passed" })

	// Until it exists the device is a stranger, and strangers are refused.
	until(t, func() bool {
		got := as("ann-tv", r.doh)
		if got != "REFUSED" && got != "passed" {
			t.Fatalf("a device that is being made: %s", got)
		}
		return got == "passed"
	})
	u, err := w.users.GetUser(t.Context(), &adminv1.GetUserRequest{Id: "ann"})
	if err != nil {
		t.Fatal(err)
	}
	if i := slices.IndexFunc(u.GetUser().GetDevices(), func(d *userv1.Device) bool { return d.GetId() == "ann-tv" }); i < 0 || !u.GetUser().GetDevices()[i].GetAutomatic() {
		t.Errorf("ann has %v", u.GetUser().GetDevices())
	}
	if got := as("bob-tv", r.doh); got != "REFUSED" {
		t.Errorf("bob, who wants no such devices, got one: %s", got)
	}

	if _, err := w.users.CreateDevice(t.Context(), &adminv1.CreateDeviceRequest{User: "bob", Password: "correct horse", Device: &userv1.Device{Id: "bob-phone", DohOnly: true}}); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { return as("", "bob-phone:correct%20horse@"+r.doh) == "passed" })
	for what, got := range map[string]string{
		"a wrong password": as("", "bob-phone:battery%20staple@"+r.doh), "no password": as("bob-phone", r.doh),
		"another's": as("", "bob-pc:correct%20horse@"+r.doh),
		"over DoT":  judge(dotAs(t, "bob-phone", r.dot)(dns.Fqdn(site), dns.TypeA)),
	} {
		if got != "REFUSED" {
			t.Errorf("%s: %s", what, got)
		}
	}
}
