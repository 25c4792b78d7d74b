package node

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/sluice-dns/sluice/cmd/internal/config"
	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/usercache"
)

// write writes a file of the configuration in dir.
func write(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// configured is the configuration of a small node, whose files are in dir, and whatever more says. Unless that is how to
// resolve names, it asks nobody.
func configured(t *testing.T, dir, more string) *config.Sluice {
	t.Helper()
	if !strings.Contains(more, "recursion:") && !strings.Contains(more, "forward_zones:") {
		more = "recursion: { do_not_query: [0.0.0.0/0, \"::/0\"] }\n" + more
	}
	write(t, dir, "c.yaml", fmt.Sprintf(`
data_dir: %q
listen: { udp: ["127.0.0.1:0"], tcp: [], workers: 1 }
stranger: serve
users: { service_listen: "" }
limits: { class: 512m }
admin: { listen: "" }
http: { listen: "" }
`, filepath.Join(dir, "data"))+more)
	c, faults := config.Load(filepath.Join(dir, "c.yaml"))
	if len(faults) > 0 {
		t.Fatal(faults)
	}
	return c
}

// run runs a node until the end of the test, and closes it.
func run(t *testing.T, n *Node) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		n.Close()
	})
}

// ask sends one question over UDP. On a busy machine it may have waited for longer than it is worth answering: its
// client repeats it.
func ask(t *testing.T, n *Node, name string, typ uint16) *dns.Msg {
	t.Helper()
	return askFrom(t, n, netip.MustParseAddr("127.0.0.1"), name, typ)
}

// askFrom is ask from an address.
func askFrom(t *testing.T, n *Node, source netip.Addr, name string, typ uint16) *dns.Msg {
	t.Helper()
	conn, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(source, 0)), net.UDPAddrFromAddrPort(n.Addrs()["udp"][0]))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	c := &dns.Conn{Conn: conn}
	for range 30 {
		if err = c.WriteMsg(new(dns.Msg).SetQuestion(name, typ)); err != nil {
			t.Fatal(err)
		}
		conn.SetReadDeadline(time.Now().Add(2 * time.Second))
		m, e := c.ReadMsg()
		if err = e; err == nil {
			return m
		}
	}
	t.Fatal(err)
	return nil
}

// annsNode runs a standalone node with a user ann, whose device pc asks from 127.0.0.0/24, and returns a connection to
// the service in it.
func annsNode(t *testing.T, c *config.Sluice) (*Node, *grpc.ClientConn) {
	t.Helper()
	n, err := Start(c, Options{Version: "test", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	run(t, n)
	conn, err := grpc.NewClient("passthrough:///standalone", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(n.service.dial))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	users := adminv1.NewUserServiceClient(conn)
	if _, err := users.CreateUser(t.Context(), &adminv1.CreateUserRequest{Id: "ann"}); err != nil {
		t.Fatal(err)
	}
	if _, err := users.CreateDevice(t.Context(), &adminv1.CreateDeviceRequest{User: "ann", Device: &userv1.Device{Id: "pc", Links: []string{"127.0.0.0/24"}}}); err != nil {
		t.Fatal(err)
	}
	return n, conn
}

// wait returns when something is so.
func wait(t *testing.T, what string, so func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !so(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waiting for %s", what)
		}
	}
}

// awaitUsers returns when a node says that it serves a revision of users.
func awaitUsers(t *testing.T, n *Node, revision uint64) {
	t.Helper()
	wait(t, fmt.Sprintf("revision %d", revision), func() bool {
		return slices.ContainsFunc((syncControl{n}).Datasets(), func(d *adminv1.DatasetStatus) bool {
			return d.Kind == string(usercache.Users) && d.Revision >= revision
		})
	})
}
