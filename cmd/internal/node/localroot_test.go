package node

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/cmd/internal/config"
)

// A reload reads the copy of the root zone again. One that is broken leaves the one before in use, and one line says so;
// at the start it is an error.
func TestReloadOfLocalRoot(t *testing.T) {
	dir := t.TempDir()
	zone, file := filepath.Join(dir, "root.zone"), filepath.Join(dir, "c.yaml")
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	load := func() *config.Sluice {
		t.Helper()
		write(file, fmt.Sprintf(`
data_dir: %q
listen: { udp: ["127.0.0.1:0"], tcp: [], workers: 1 }
stranger: serve
users: { service_listen: "" }
limits: { class: 512m }
admin: { listen: "" }
http: { listen: "" }
dnssec: { validate: false }
recursion: { local_root: root.zone, ipv6: false, do_not_query: [0.0.0.0/0] }
`, filepath.Join(dir, "data")))
		c, faults := config.Load(file)
		if len(faults) > 0 {
			t.Fatal(faults)
		}
		return c
	}
	const apex = "@ 60 NS a.root-servers.net.\nnet. 60 NS a.root-servers.net.\na.root-servers.net. 60 A 192.0.2.1\n"
	log := new(lines)
	o := Options{Version: "test", Logger: slog.New(slog.NewTextHandler(log, nil))}
	write(zone, apex)
	if f := Unusable(load()); len(f) != 1 {
		t.Errorf("of a broken copy: %v", f)
	}
	if n, err := Start(load(), o); err == nil {
		n.Close()
		t.Fatal("started with a broken copy")
	}
	write(zone, "@ 60 SOA a. b. 1 60 60 3600 60\n"+apex)
	n, err := Start(load(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	conn, err := net.Dial("udp", n.Addrs()["udp"][0].String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	is := func(name, want string) {
		t.Helper()
		c := &dns.Conn{Conn: conn}
		if err := c.WriteMsg(new(dns.Msg).SetQuestion(name, dns.TypeDS)); err != nil {
			t.Fatal(err)
		}
		m, err := c.ReadMsg()
		if err != nil {
			t.Fatal(err)
		}
		if got := dns.RcodeToString[m.Rcode]; got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	is("one.", "NXDOMAIN")
	log.with("")
	write(zone, apex+"@ 60 SOA a. b.\n")
	n.Reload(load())
	if n := log.with("level=ERROR"); n != 1 {
		t.Errorf("%d lines about a broken copy, want 1", n)
	}
	is("two.", "NXDOMAIN")
	write(zone, "@ 60 SOA a. b. 2 60 60 3600 60\n"+apex+"three. 60 NS a.root-servers.net.\n")
	n.Reload(load())
	if n := log.with("serial=2"); n != 1 {
		t.Errorf("%d lines about the new copy, want 1", n)
	}
	is("three.", "NOERROR")
	is("four.", "NXDOMAIN")
}
