package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-dns/sluice/cmd/internal/config"
)

// A file of trust anchors that no zone could match is refused with its line, by check and by run.
func TestAnchorFiles(t *testing.T) {
	dir := t.TempDir()
	file, anchors := filepath.Join(dir, "c.yaml"), filepath.Join(dir, "anchors")
	if err := os.WriteFile(file, []byte("log: { level: warn }\ndnssec: { trust_anchor_file: anchors }\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	const good = ". IN DS 20326 8 2 E06D44B80B8F1D39A95C0B0D7C65D08458E880409BBC683457104237C7F8EC8D\n"
	for text, want := range map[string]string{
		"":   "",
		good: "",
		good + "; cut off\nexample. IN DS 20326 8 2 E06D44B8\n": anchors + ":3: example.: the digest of the DS with tag 20326 has 4 bytes",
		"example. IN DNSKEY 257 3 8 AAAA\n":                     anchors + ":1: example.: DNSKEY with tag ",
	} {
		if err := os.WriteFile(anchors, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c, faults := config.Load(file)
		if len(faults) > 0 {
			t.Fatal(faults)
		}
		switch faults = Unusable(c); {
		case want == "" && len(faults) > 0:
			t.Errorf("%q: %v", text, faults)
		case want != "" && (len(faults) != 1 || !strings.HasPrefix(faults[0].String(), file+":2:30: dnssec.trust_anchor_file: "+want)):
			t.Errorf("%q: %v, want %s", text, faults, want)
		}
	}
}
