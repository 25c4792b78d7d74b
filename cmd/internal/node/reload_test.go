package node

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/miekg/dns"
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
	dir, log := t.TempDir(), new(lines)
	n, err := Start(configured(t, dir, ""), Options{Version: "test", Logger: slog.New(slog.NewTextHandler(log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	run(t, n)
	is := func(want string) {
		t.Helper()
		m := ask(t, n, "www.zoned.example.", dns.TypeA)
		got := dns.RcodeToString[m.Rcode]
		for _, rr := range m.Answer {
			got += " " + rr.(*dns.A).A.String()
		}
		if got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	const zones = "policy_zones: [{ name: rpz, file: rpz.zone }]\n"
	write(t, dir, "rpz.zone", "www.zoned.example A 192.0.2.1\n")
	n.Reload(configured(t, dir, zones))
	is("NOERROR 192.0.2.1")
	write(t, dir, "rpz.zone", "www.zoned.example A 192.0.2.2\n")
	n.Reload(configured(t, dir, zones))
	is("NOERROR 192.0.2.2")
	log.with("")
	write(t, dir, "rpz.zone", "www.zoned.example A not.an.address\n")
	n.Reload(configured(t, dir, zones+"stub_zones: [{ name: corp.example, addresses: [\"192.0.2.9\"] }]\n"))
	is("NOERROR 192.0.2.2")
	if n := log.with("level=ERROR"); n != 1 {
		t.Errorf("%d lines about a broken zone, want 1", n)
	}
	write(t, dir, "rpz.zone", "www.zoned.example CNAME .\n")
	n.Reload(configured(t, dir, zones))
	is("NXDOMAIN")
}
