package node

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/cmd/internal/config"
)

// A lines keeps what is logged.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// with returns the lines that hold what, and forgets all.
func (l *lines) with(what string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.b.String()) {
		if strings.Contains(line, what) {
			n++
		}
	}
	l.b.Reset()
	return n
}

// A reload reads policy zones again. One that is broken leaves those before in force, and one line says so; stub and
// forward zones are taken all the same.
func TestReloadOfPolicyZones(t *testing.T) {
	dir := t.TempDir()
	zone, file := filepath.Join(dir, "rpz.zone"), filepath.Join(dir, "c.yaml")
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	configured := fmt.Sprintf(`
data_dir: %q
listen: { udp: ["127.0.0.1:0"], tcp: [], workers: 1 }
stranger: serve
users: { service_listen: "" }
limits: { class: 512m }
admin: { listen: "" }
http: { listen: "" }
`, filepath.Join(dir, "data"))
	load := func(more string) *config.Sluice {
		t.Helper()
		write(file, configured+more)
		c, faults := config.Load(file)
		if len(faults) > 0 {
			t.Fatal(faults)
		}
		return c
	}
	log := new(lines)
	n, err := Start(load(""), Options{Version: "test", Logger: slog.New(slog.NewTextHandler(log, nil))})
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
	is := func(want string) {
		t.Helper()
		c := &dns.Conn{Conn: conn}
		if err := c.WriteMsg(new(dns.Msg).SetQuestion("www.zoned.example.", dns.TypeA)); err != nil {
			t.Fatal(err)
		}
		m, err := c.ReadMsg()
		if err != nil {
			t.Fatal(err)
		}
		got := dns.RcodeToString[m.Rcode]
		for _, rr := range m.Answer {
			got += " " + rr.(*dns.A).A.String()
		}
		if got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	const zones = "policy_zones: [{ name: rpz, file: rpz.zone }]\n"
	write(zone, "www.zoned.example A 192.0.2.1\n")
	n.Reload(load(zones))
	is("NOERROR 192.0.2.1")
	write(zone, "www.zoned.example A 192.0.2.2\n")
	n.Reload(load(zones))
	is("NOERROR 192.0.2.2")
	log.with("")
	write(zone, "www.zoned.example A not.an.address\n")
	n.Reload(load(zones + "stub_zones: [{ name: corp.example, addresses: [\"192.0.2.9\"] }]\n"))
	is("NOERROR 192.0.2.2")
	if n := log.with("level=ERROR"); n != 1 {
		t.Errorf("%d lines about a broken zone, want 1", n)
	}
	write(zone, "www.zoned.example CNAME .\n")
	n.Reload(load(zones))
	is("NXDOMAIN")
}
