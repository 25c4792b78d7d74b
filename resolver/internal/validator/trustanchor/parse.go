package trustanchor

import (
	"errors"
	"fmt"
	"strings"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/validator/rrsig"
)

// BuiltIn are the root's key signing keys of 2017 and 2024 (IANA, root-anchors.xml).
const BuiltIn = `. IN DS 20326 8 2 E06D44B80B8F1D39A95C0B0D7C65D08458E880409BBC683457104237C7F8EC8D
. IN DS 38696 8 2 683D2D0ACB8C9B712A1948B27F741219298D0A450D612C483AF444A4C0FB2B16
`

// maxZones bounds the zones with anchors, each of which is followed on its own: there is the root, and what an
// operator signs without a chain to it.
const maxZones = 1000

// Check reports what is wrong with the text of an anchor file, naming file and line, or nil.
func Check(text, file string) error {
	_, _, err := parse(text, file)
	return err
}

// parse reads anchors. What is not an anchor, or could never match a key, is an error; what is one but cannot
// be used here (an unknown algorithm) is a warning.
func parse(text, file string) (m map[dnsname.Name]anchors, warnings []string, err error) {
	records, err := dnswire.ParseRecords(text, ".", file, 3600)
	if err != nil {
		return nil, nil, err
	}
	lines := entryLines(text)
	at := func(i int) string {
		if len(lines) != len(records) { // $GENERATE: then the name has to do
			return fmt.Sprintf("%s: %v", file, records[i].Name)
		}
		return fmt.Sprintf("%s:%d: %v", file, lines[i], records[i].Name)
	}
	m = make(map[dnsname.Name]anchors)
	counts := make(map[dnsname.Name]int)
	for i, r := range records {
		usable, err := check(r)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", at(i), err)
		}
		if !usable {
			warnings = append(warnings, fmt.Sprintf("%s: the trust anchor with tag %d cannot be used: its algorithm, digest or key size is not supported", at(i), tagOf(r.Data, r.Type == dnswire.TypeDS)))
		}
		a, known := m[r.Name]
		if !known && len(m) == maxZones {
			return nil, nil, fmt.Errorf("%s: more than %d zones with trust anchors", at(i), maxZones)
		}
		if counts[r.Name]++; counts[r.Name] > maxTracked {
			return nil, nil, fmt.Errorf("%s: more than %d trust anchors of one zone", at(i), maxTracked)
		}
		if r.Type == dnswire.TypeDS {
			a.ds = query.AppendRData(a.ds, r.Data)
		} else {
			a.keys = query.AppendRData(a.keys, r.Data)
		}
		m[r.Name] = a
	}
	return m, warnings, nil
}

// check reports whether a record can serve as an anchor here; an error says that it could nowhere.
func check(r dnswire.Record) (usable bool, err error) {
	switch {
	case r.Class != dnswire.ClassIN:
		return false, errors.New("a trust anchor is of class IN")
	case r.Type == dnswire.TypeDS:
		d, ok := rrsig.ParseDS(r.Data)
		if !ok {
			return false, errors.New("the DS record is cut off")
		}
		want := map[uint8]int{rrsig.DigestSHA1: 20, rrsig.DigestSHA256: 32, rrsig.DigestSHA384: 48}[d.DigestType]
		if want != 0 && len(d.Digest) != want {
			return false, fmt.Errorf("the digest of the DS with tag %d has %d bytes; type %d has %d", d.KeyTag, len(d.Digest), d.DigestType, want)
		}
		return d.Supported(), nil
	case r.Type == dnswire.TypeDNSKEY:
		k := rrsig.ParseKey(r.Data)
		if k == nil {
			return false, errors.New("the DNSKEY record is cut off")
		}
		switch k.Err() {
		case nil:
			return true, nil
		case rrsig.ErrAlgorithm:
			return false, nil
		}
		return false, fmt.Errorf("DNSKEY with tag %d: %w", k.Tag, k.Err())
	}
	return false, fmt.Errorf("is a record of type %s; trust anchors are DS or DNSKEY", dnswire.TypeText(r.Type))
}

// entryLines returns on which line each record of zone-file text begins: parentheses continue a record over
// lines, a semicolon begins a comment, quotes hold either.
func entryLines(text string) (lines []int) {
	depth, quoted := 0, false
	for n, line := range strings.Split(text, "\n") {
		continues := depth > 0 || quoted
		filled := false
		for i := 0; i < len(line); i++ {
			c := line[i]
			if c == ';' && !quoted {
				break
			}
			filled = filled || c != ' ' && c != '\t' && c != '\r'
			switch {
			case c == '\\':
				i++
			case c == '"':
				quoted = !quoted
			case c == '(' && !quoted:
				depth++
			case c == ')' && !quoted:
				depth--
			}
		}
		if filled && !continues && line[0] != '$' {
			lines = append(lines, n+1)
		}
	}
	return lines
}
