package node

import (
	"log/slog"
	"testing"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/cmd/internal/config"
)

// A reload reads the copy of the root zone again. One that is broken leaves the one before in use, and one line says so;
// at the start it is an error.
func TestReloadOfLocalRoot(t *testing.T) {
	dir := t.TempDir()
	zone := func(text string) { write(t, dir, "root.zone", text) }
	load := func() *config.Sluice {
		return configured(t, dir, "dnssec: { validate: false }\nrecursion: { local_root: root.zone, ipv6: false, do_not_query: [0.0.0.0/0] }\n")
	}
	const apex = "@ 60 NS a.root-servers.net.\nnet. 60 NS a.root-servers.net.\na.root-servers.net. 60 A 192.0.2.1\n"
	log := new(lines)
	o := Options{Version: "test", Logger: slog.New(slog.NewTextHandler(log, nil))}
	zone(apex)
	if f := Unusable(load()); len(f) != 1 {
		t.Errorf("of a broken copy: %v", f)
	}
	if n, err := Start(load(), o); err == nil {
		n.Close()
		t.Fatal("started with a broken copy")
	}
	zone("@ 60 SOA a. b. 1 60 60 3600 60\n" + apex)
	n, err := Start(load(), o)
	if err != nil {
		t.Fatal(err)
	}
	run(t, n)
	is := func(name, want string) {
		t.Helper()
		if got := dns.RcodeToString[ask(t, n, name, dns.TypeDS).Rcode]; got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	is("one.", "NXDOMAIN")
	log.with("")
	zone(apex + "@ 60 SOA a. b.\n")
	n.Reload(load())
	if n := log.with("level=ERROR"); n != 1 {
		t.Errorf("%d lines about a broken copy, want 1", n)
	}
	is("two.", "NXDOMAIN")
	zone("@ 60 SOA a. b. 2 60 60 3600 60\n" + apex + "three. 60 NS a.root-servers.net.\n")
	n.Reload(load())
	if n := log.with("serial=2"); n != 1 {
		t.Errorf("%d lines about the new copy, want 1", n)
	}
	is("three.", "NOERROR")
	is("four.", "NXDOMAIN")
}
