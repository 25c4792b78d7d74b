package localroot

import (
	"bytes"
	"compress/gzip"
	"strings"
	"testing"
)

// What is too long is refused whatever it is packed in, and not read to its end.
func TestBounds(t *testing.T) {
	line := ". 86400 NS a.root-servers.net.\n"
	text := strings.Repeat(line, 5)
	pack := func(s string) string {
		var b bytes.Buffer
		w := gzip.NewWriter(&b)
		w.Write([]byte(s))
		w.Close()
		return b.String()
	}
	for name, c := range map[string]struct {
		text           string
		bytes, records int
		err            string
	}{
		"just so":              {text, len(text), 5, ""},
		"just so, packed":      {pack(text), len(text), 5, ""},
		"a byte more":          {text, len(text) - 1, 5, "longer"},
		"a byte more, packed":  {pack(text), len(text) - 1, 5, "longer"},
		"a bomb":               {pack(strings.Repeat(" \n", 1<<20)), 1 << 16, 5, "longer"},
		"a record more":        {text, len(text), 4, "more than 4 records"},
		"many, generated":      {"$GENERATE 1-65000 $.com. A 192.0.2.1\n", 1 << 16, 1000, "more than 1000 records"},
		"cut within a record":  {text, len(line) + 8, 5, "longer"},
		"cut between records":  {text, len(line), 5, "longer"},
		"broken after a while": {pack(text)[:30], 1 << 16, 5, "unexpected EOF"},
	} {
		records, err := read(strings.NewReader(c.text), "root.zone", c.bytes, c.records)
		switch {
		case c.err == "" && (err != nil || len(records) != 5):
			t.Errorf("%s: %d records, %v", name, len(records), err)
		case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err) || !strings.HasPrefix(err.Error(), "root.zone")):
			t.Errorf("%s: %v, want %q", name, err, c.err)
		}
	}
}
