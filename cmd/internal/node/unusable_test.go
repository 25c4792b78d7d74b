package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-dns/sluice/cmd/internal/config"
)

// What a start would refuse, check finds, and says where it stands.
func TestUnusable(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "c.yaml")
	for name, text := range map[string]string{
		"nobody": "$TTL 60\n. NS a.\na. A 0.0.0.0\n",
		"class":  "$TTL 60\n. CH NS a.\na. IN A 192.0.2.1\n. IN NS a.\n",
		"root":   ". 60 SOA a. b. 1 2 3 4 5\n. 60 NS a.\na. 60 NS a.\na. 60 A 192.0.2.1\n",
		"good":   "$TTL 60\n. NS a.\na. A 192.0.2.1\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for text, want := range map[string]string{
		"recursion: { root_hints_file: good }":                                                                                "",
		"recursion: { root_hints_file: nobody }":                                                                              "1:31: recursion.root_hints_file: ",
		"recursion: { root_hints_file: class }":                                                                               "1:31: recursion.root_hints_file: ",
		"recursion: { local_root: root }":                                                                                     "",
		"recursion: { local_root: good }":                                                                                     "1:26: recursion.local_root: ",
		`local_data: [{ name: a., records: ["A 192.0.2.1", "A 192.0.2.2"] }]`:                                                 "",
		`local_data: [{ name: a., records: ["A 192.0.2.1", "CNAME b."] }]`:                                                    "1:51: local_data[0].records[1]: local data of a.: a CNAME record beside others",
		"local_data:\n- { name: a., records: [CNAME c.] }\n- { name: a., records: [CNAME b.] }":                               "3:25: local_data[1].records[0]: local data of a.: a second CNAME record",
		`local_data: [{ name: localhost., records: ["CNAME b."] }]`:                                                           "1:44: local_data[0].records[0]: local data of localhost.: a CNAME record beside others",
		"recursion: { local_zones: none }\nlocal_data: [{ name: localhost., records: [CNAME b.] }]":                           "",
		"stub_zones: [{ name: localhost., addresses: [192.0.2.1] }]\nlocal_data: [{ name: localhost., records: [CNAME b.] }]": "",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c, faults := config.Load(file)
		if len(faults) > 0 {
			t.Fatalf("%s: %v", text, faults)
		}
		switch faults = Unusable(c); {
		case want == "" && len(faults) > 0:
			t.Errorf("%s: %v", text, faults)
		case want != "" && (len(faults) != 1 || !strings.HasPrefix(faults[0].String(), file+":"+want)):
			t.Errorf("%s: %v, want %s", text, faults, want)
		}
	}
}
