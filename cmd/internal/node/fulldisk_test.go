//go:build unix

package node

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/sluice-dns/sluice/internal/fulldisk"
	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

// A standalone resolver starts on a full disk and serves what it has; what its own blobs have lost meanwhile comes when
// there is room. A first start, which needs room, leaves nothing in the way of the next. It runs in a process of its
// own, because the limit on the size of files that stands for the full disk is the process's.
func TestStandaloneOnFullDisk(t *testing.T) {
	if fulldisk.Alone(t) {
		return
	}
	room := func(bytes uint64) { fulldisk.Room(t, bytes) }
	const lots = 1 << 40
	dir := t.TempDir()
	c := configured(t, dir, "")
	log := new(lines)
	begin := func() (*Node, error) {
		return Start(c, Options{Version: "test", Logger: slog.New(slog.NewTextHandler(log, nil))})
	}
	room(0)
	if n, err := begin(); err == nil {
		n.Close()
		t.Fatal("a first start without room")
	}
	room(lots)

	client := func(t *testing.T, n *Node) (adminv1.UserServiceClient, adminv1.PolicyServiceClient) {
		conn, err := grpc.NewClient("passthrough:///standalone", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(n.service.dial))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return adminv1.NewUserServiceClient(conn), adminv1.NewPolicyServiceClient(conn)
	}
	// Names below localhost have an address (RFC 6761), but for those that the user blocks.
	becomes := func(t *testing.T, n *Node, name string, blocked bool) {
		t.Helper()
		got := ""
		for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			got = ask(t, n, name, dns.TypeA).String()
			if strings.Contains(got, "\t0.0.0.0") == blocked {
				return
			}
		}
		t.Errorf("%s: %s; want blocked: %v", name, got, blocked)
	}
	t.Run("with room", func(t *testing.T) {
		n, err := begin()
		if err != nil {
			t.Fatal(err)
		}
		run(t, n)
		users, policies := client(t, n)
		if _, err := users.CreateUser(t.Context(), &adminv1.CreateUserRequest{Id: "ann"}); err != nil {
			t.Fatal(err)
		}
		if _, err := users.CreateDevice(t.Context(), &adminv1.CreateDeviceRequest{User: "ann", Device: &userv1.Device{Id: "ann-pc", Links: []string{"127.0.0.0/8"}}}); err != nil {
			t.Fatal(err)
		}
		var long strings.Builder // too long for the record
		for i := range 3000 {
			fmt.Fprintf(&long, "||x%d.localhost^\n", i)
		}
		for target, text := range map[string]string{"ann": long.String(), "ann/ann-pc": "||short.localhost^\n"} {
			if _, err := policies.SetRules(t.Context(), &adminv1.SetRulesRequest{Target: target, Text: []byte(text)}); err != nil {
				t.Fatal(err)
			}
		}
		becomes(t, n, "short.localhost.", true)
		becomes(t, n, "x2999.localhost.", true)
	})
	blobs := filepath.Join(dir, "data", "sync", "blobs")
	if err := os.RemoveAll(blobs); err != nil {
		t.Fatal(err)
	}
	room(0)
	n, err := begin()
	if err != nil {
		t.Fatalf("a full disk keeps it from starting: %v", err)
	}
	run(t, n)
	users, _ := client(t, n)
	becomes(t, n, "short.localhost.", true)
	becomes(t, n, "x2999.localhost.", false) // lost, and there is no room for it
	if _, err := users.CreateUser(t.Context(), &adminv1.CreateUserRequest{Id: "bob"}); err == nil || !strings.Contains(err.Error(), "make room") {
		t.Error(err)
	}
	room(lots)
	becomes(t, n, "x2999.localhost.", true)
	if _, err := users.CreateUser(t.Context(), &adminv1.CreateUserRequest{Id: "bob"}); err != nil {
		t.Error(err)
	}
}
