package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-dns/sluice/cmd/internal/config"
)

// What this version does not do is refused by name and place, all of it at once; the defaults ask for nothing
// of it.
func TestUnserved(t *testing.T) {
	if f := Unserved(config.Default()); len(f) > 0 {
		t.Errorf("the defaults: %v", f)
	}
	dir := t.TempDir()
	zone := filepath.Join(dir, "rpz.zone")
	if err := os.WriteFile(zone, []byte("@ SOA a. b. 1 2 3 4 5\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "c.yaml")
	text := `dns64: { prefix: "64:ff9b::/96" }
rebinding: { private_addresses: ["10.0.0.0/8"] } # these are served, and policy_zones
recursion: { ecs: { zones: ["cdn.example."] } }
policy_zones: [{ name: "rpz.example.", file: "rpz.zone" }]
stub_zones: [{ name: "corp.example.", addresses: ["192.0.2.1"], view: "inside" }]
forward_zones: [{ name: ".", upstreams: [{ url: "udp://192.0.2.1" }, { url: "udp://192.0.2.2" }], strategy: hedged, view: "inside" }]
`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, faults := config.Load(file)
	if len(faults) > 0 {
		t.Fatal(faults)
	}
	var got []string
	for _, f := range Unserved(c) {
		got = append(got, f.String())
	}
	for i, want := range []string{"5:", "6:"} {
		if i >= len(got) || !strings.HasPrefix(got[i], file+":"+want) || !strings.Contains(got[i], "this version") {
			t.Errorf("fault %d: want line %s of %q", i, want, got)
		}
	}
}
