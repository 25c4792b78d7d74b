package node

import (
	"context"
	"errors"
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

// Queries that arrive before the service of this process has handed over its first user data are answered,
// not refused.
func TestFirstStartRefusesNobody(t *testing.T) {
	dir := t.TempDir()
	text := fmt.Sprintf(`
data_dir: %q
listen: { udp: ["127.0.0.1:0"], tcp: [], workers: 1 }
stranger: serve
users: { service_listen: "" }
limits: { class: 512m }
admin: { listen: "" }
http: { listen: "" }
`, filepath.Join(dir, "data"))
	file := filepath.Join(dir, "c.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, faults := config.Load(file)
	if len(faults) > 0 {
		t.Fatal(faults)
	}
	n, err := Start(c, Options{Version: "test", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	conn, err := net.Dial("udp", n.Addrs()["udp"][0].String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	q, err := new(dns.Msg).SetQuestion("localhost.", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write(q); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	buf := make([]byte, 512)
	var k int
	// On a busy machine the question may have waited for longer than it is worth answering: its client repeats it.
	for range 30 {
		conn.SetReadDeadline(time.Now().Add(2 * time.Second))
		if k, err = conn.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if _, err := conn.Write(q); err != nil {
			t.Fatal(err)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	var m dns.Msg
	if err := m.Unpack(buf[:k]); err != nil || m.Rcode != dns.RcodeSuccess || len(m.Answer) != 1 {
		t.Errorf("%v, %v", &m, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
