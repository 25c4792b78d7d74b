package bizlogic

import (
	"net/netip"
	"strings"
	"unicode"
	"unicode/utf8"
)

// maxName is the longest name for people, in bytes.
const maxName = 255

// checkID accepts 1-63 of a-z 0-9 -.
func checkID(field, id string) error {
	if id == "" {
		return invalid(field, "is empty; an id is 1-63 of a-z 0-9 -")
	}
	if len(id) > 63 {
		return invalid(field, "%.70q has %d bytes; an id is 1-63 of a-z 0-9 -", id, len(id))
	}
	for _, c := range id {
		if !('a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-') {
			return invalid(field, "%q holds %q; an id is 1-63 of a-z 0-9 -", id, c)
		}
	}
	return nil
}

// checkText accepts text for people.
func checkText(field, s string, most int) error {
	if len(s) > most {
		return invalid(field, "has %d bytes; at most %d", len(s), most)
	}
	if !utf8.ValidString(s) {
		return invalid(field, "is not UTF-8")
	}
	if i := strings.IndexFunc(s, unicode.IsControl); i >= 0 {
		return invalid(field, "holds a control character at byte %d", i)
	}
	return nil
}

// canonicalLink brings a source address or network into the form that is stored. One whose address says more than its
// length is refused: 192.0.2.5/8 for 192.0.2.5/28 would be sixteen million others.
func canonicalLink(field, s string) (string, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		a = a.Unmap()
		if a.Zone() != "" {
			return "", invalid(field, "%q has a zone", s)
		}
		if a.Is4() {
			return a.String(), nil
		}
		// One host of IPv6 has many addresses; its network is what stays the same.
		return netip.PrefixFrom(a, 64).Masked().String(), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return "", invalid(field, "%q is neither an address nor a network such as 192.0.2.0/24", s)
	}
	if p.Addr().Is4In6() {
		return "", invalid(field, "%q is an IPv4-mapped network; write it as IPv4", s)
	}
	if p.Addr().Is6() && p.Bits() > 64 {
		return "", invalid(field, "%q is longer than /64; a host of IPv6 changes the rest of its address", s)
	}
	if p.Bits() == 0 {
		return "", invalid(field, "%q is everybody", s)
	}
	// Of an IPv6 host its own address is as good: its network is taken anyway.
	if p != p.Masked() && !(p.Addr().Is6() && p.Bits() == 64) {
		return "", stray(field, s, p)
	}
	if p.Addr().Is4() && p.Bits() == 32 {
		return p.Addr().String(), nil
	}
	return p.Masked().String(), nil
}

// canonicalNetwork is canonicalLink for access lists, where any network may stand.
func canonicalNetwork(field, s string) (string, error) {
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()).String(), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil || p.Addr().Is4In6() {
		return "", invalid(field, "%q is neither an address nor a network such as 192.0.2.0/24", s)
	}
	if p != p.Masked() {
		return "", stray(field, s, p)
	}
	return p.String(), nil
}

func stray(field, s string, p netip.Prefix) error {
	return invalid(field, "%q has bits set beyond its length; the network is %s, the address alone %s", s, p.Masked(), p.Addr())
}

// canonicalAddr brings a destination address into the form that is stored.
func canonicalAddr(field, s string) (string, error) {
	a, err := netip.ParseAddr(s)
	if err != nil || a.Zone() != "" {
		return "", invalid(field, "%q is not an address", s)
	}
	return a.Unmap().String(), nil
}

// canonicalEDNS brings an EDNS identity into the form that is stored.
func canonicalEDNS(field, s string) (string, error) {
	if id, ok := strings.CutPrefix(s, "cpe:"); ok {
		if id == "" {
			return "", invalid(field, "the CPE-ID is empty")
		}
		return s, checkText(field, id, 64)
	}
	mac := strings.ToLower(strings.NewReplacer(":", "", "-", "").Replace(s))
	if len(mac) != 12 || strings.Trim(mac, "0123456789abcdef") != "" {
		return "", invalid(field, "%q is neither a MAC address nor cpe:ID", s)
	}
	return mac, nil
}

// canonicalTag brings a client tag into the form that is stored.
func canonicalTag(field, s string) (string, error) {
	t := strings.ToLower(s)
	if t == "" || len(t) > 63 || strings.Trim(t, "abcdefghijklmnopqrstuvwxyz0123456789_-") != "" {
		return "", invalid(field, "%q is not a client tag such as device_phone", s)
	}
	return t, nil
}

// canonicalName brings a domain name into the form that is stored: lower case, no dot at the end.
func canonicalName(field, s string) (string, error) {
	n := strings.ToLower(strings.TrimSuffix(s, "."))
	if n == "" || len(n) > 253 {
		return "", invalid(field, "%.300q is not a domain name", s)
	}
	for label := range strings.SplitSeq(n, ".") {
		if label == "" || len(label) > 63 {
			return "", invalid(field, "%q has a label of %d bytes; 1-63 are possible", s, len(label))
		}
		for _, c := range []byte(label) {
			switch {
			case 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-' || c == '_':
			case c >= 0x80:
				return "", invalid(field, "%q is not in ASCII; write its A-label (xn--…)", s)
			default:
				return "", invalid(field, "%q holds %q", s, c)
			}
		}
	}
	return n, nil
}

// canonicalAll applies one of the above to several values, each once.
func canonicalAll(field string, in []string, most int, canonical func(field, s string) (string, error)) ([]string, error) {
	if len(in) > most {
		return nil, invalid(field, "has %d values; at most %d", len(in), most)
	}
	var out []string
	seen := map[string]bool{}
	for _, s := range in {
		c, err := canonical(field, s)
		if err != nil {
			return nil, err
		}
		if !seen[c] {
			seen[c] = true
			out = append(out, c)
		}
	}
	return out, nil
}
