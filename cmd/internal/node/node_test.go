package node

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// Queries that arrive before the service of this process has handed over its first user data are answered,
// not refused.
func TestFirstStartRefusesNobody(t *testing.T) {
	n, err := Start(configured(t, t.TempDir(), ""), Options{Version: "test", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
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
	run(t, n)
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
}
