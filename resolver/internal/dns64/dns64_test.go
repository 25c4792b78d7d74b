package dns64

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// The table of RFC 6052 section 2.4, one line for each length.
func TestEmbed(t *testing.T) {
	v4 := netip.MustParseAddr("192.0.2.33").As4()
	for prefix, want := range map[string]string{
		"2001:db8::/32":         "2001:db8:c000:221::",
		"2001:db8:100::/40":     "2001:db8:1c0:2:21::",
		"2001:db8:122::/48":     "2001:db8:122:c000:2:2100::",
		"2001:db8:122:300::/56": "2001:db8:122:3c0:0:221::",
		"2001:db8:122:344::/64": "2001:db8:122:344:c0:2:2100::",
		"2001:db8:122:344::/96": "2001:db8:122:344::192.0.2.33",
		"fe80::21b:aabb:0:0/96": "fe80::21b:aabb:192.0.2.33",
		"64:ff9b::/96":          "64:ff9b::192.0.2.33",
	} {
		p, err := New(netip.MustParsePrefix(prefix))
		if err != nil {
			t.Errorf("%s: %v", prefix, err)
			continue
		}
		v6 := p.Embed(v4)
		if got := netip.AddrFrom16(v6); got != netip.MustParseAddr(want) {
			t.Errorf("%s: %s, want %s", prefix, got, want)
		}
		if back, ok := p.Extract(v6); !ok || back != v4 {
			t.Errorf("%s: back to %v, %v", prefix, back, ok)
		}
		name, _ := dns.ReverseAddr(netip.AddrFrom16(v6).String())
		if got, ok := p.Reverse(dnsname.MustParse(name)); !ok || got.String() != "33.2.0.192.in-addr.arpa." {
			t.Errorf("%s: reverse %s, %v", prefix, got, ok)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	for _, prefix := range []string{"10.0.0.0/8", "2001:db8::/33", "2001:db8::/128", "2001:db8::1/96", "::ffff:10.0.0.0/104"} {
		if _, err := New(netip.MustParsePrefix(prefix)); err == nil || !strings.Contains(err.Error(), prefix) && !strings.Contains(err.Error(), "IPv6") {
			t.Errorf("%s: %v", prefix, err)
		}
	}
	if _, err := New(netip.Prefix{}); err == nil {
		t.Error("the zero prefix was taken")
	}
}

// Names that are not the reverse of a whole address in the prefix are left alone.
func TestReverseLeavesOthers(t *testing.T) {
	p, err := New(netip.MustParsePrefix("2001:db8:122:344::/64"))
	if err != nil {
		t.Fatal(err)
	}
	reverse := func(a string) string { n, _ := dns.ReverseAddr(a); return n }
	for _, n := range []string{
		reverse("2001:db8:122:345:c0:2:2100::"), reverse("2001:db8:122:344:1c0:2:2100::"), reverse("2001:db8:122:344:c0:2:2100:1"),
		reverse("192.0.2.1"), "ip6.arpa.", ".", "0." + reverse("2001:db8:122:344:c0:2:2100::"),
		strings.Replace(reverse("2001:db8:122:344:c0:2:2100::"), "0.", "g.", 1), strings.Replace(reverse("2001:db8:122:344:c0:2:2100::"), "0.0.", "00.", 1),
		strings.Replace(reverse("2001:db8:122:344:c0:2:2100::"), "ip6", "ip7", 1),
	} {
		if got, ok := p.Reverse(dnsname.MustParse(n)); ok {
			t.Errorf("%s became %s", n, got)
		}
	}
}

func FuzzReverse(f *testing.F) {
	p, _ := New(netip.MustParsePrefix("64:ff9b::/96"))
	n, _ := dns.ReverseAddr("64:ff9b::1.2.3.4")
	f.Add([]byte(dnsname.MustParse(n)))
	f.Fuzz(func(t *testing.T, b []byte) {
		if got, ok := p.Reverse(dnsname.Name(b)); ok && !got.IsWithin(inAddrArpa) {
			t.Errorf("%q became %s", b, got)
		}
	})
}
