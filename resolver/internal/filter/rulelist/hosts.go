package rulelist

import (
	"bytes"
	"net/netip"
	"strings"

	"golang.org/x/net/idna"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// hosts reads the names of a hosts line.
func (p *parser) hosts(text []byte, addr netip.Addr, rest []byte) {
	if i := bytes.IndexByte(rest, '#'); i >= 0 {
		rest = rest[:i]
	}
	form := HostAddr
	switch addr {
	case netip.IPv4Unspecified():
		form = HostNull4
	case netip.AddrFrom4([4]byte{127, 0, 0, 1}):
		form = HostLoop4
	case netip.IPv6Unspecified():
		form = HostNull6
	case netip.IPv6Loopback():
		form = HostLoop6
	}
	none := true
	for {
		rest = trim(rest)
		if len(rest) == 0 {
			break
		}
		word := rest
		if i := bytes.IndexAny(rest, " \t"); i >= 0 {
			word = rest[:i]
		}
		rest = rest[len(word):]
		none = false
		p.rule = Rule{Line: p.line, Form: form}
		if !p.setName(word) {
			p.complain(text, "not a host name: "+clip(word))
			continue
		}
		if form == HostAddr {
			p.rule.Addr = addr
			p.needText()
		}
		p.hand()
	}
	if none {
		p.complain(text, "an address without a name")
	}
}

// domain reads a bare domain: the name alone, as if a hosts line gave it the null address. It also reads a
// bare IPv6 address; a bare IPv4 address is a pattern like others, see Rule.Glob.
func (p *parser) domain(text []byte) bool {
	if addr, err := netip.ParseAddr(string(text)); err == nil {
		if addr.IsUnspecified() || addr.IsLoopback() {
			p.complain(text, "an address without a name")
			return true
		}
		if addr.Is4() {
			return false
		}
		p.rule = Rule{Line: p.line, Form: Exact}
		p.rule.Name = AppendAddr(p.name[:0], addr)
		p.hand()
		return true
	}
	p.rule = Rule{Line: p.line, Form: HostNull4}
	if !p.setName(text) || !isDomain(p.rule.Name) {
		return false
	}
	if text[len(text)-1] == '.' && p.rule.Name[1+p.rule.Name[0]] == 0 {
		return false // "ads." is a fragment; "example.org." is a name
	}
	p.hand()
	return true
}

// AppendAddr appends the name, in wire form, by which rules know an address: its text, so that the rule
// ||192.0.2.1^ covers the address 192.0.2.1. An IPv6 address is one label.
func AppendAddr(b []byte, addr netip.Addr) []byte {
	var t [64]byte
	text := addr.WithZone("").AppendTo(t[:0])
	at := len(b)
	b = append(b, 0)
	for _, c := range text {
		if c == '.' && addr.Is4() {
			at = len(b)
			b = append(b, 0)
			continue
		}
		b = append(b, c)
		b[at]++
	}
	return append(b, 0)
}

// isDomain reports whether a name looks like a registered or local domain rather than a fragment of one.
// Lines that do not are patterns, as in AdGuard: labels of letters, digits and inner hyphens, an A-label of
// at least eight bytes, a top-level domain of at least two that begins and ends with a letter.
func isDomain(name []byte) bool {
	var l []byte
	for i := 0; name[i] != 0; i += 1 + int(name[i]) {
		l = name[i+1 : i+1+int(name[i])]
		if l[0] == '-' || l[len(l)-1] == '-' || bytes.IndexByte(l, '_') >= 0 {
			return false
		}
		if bytes.HasPrefix(l, []byte("xn--")) && len(l) < 8 {
			return false
		}
	}
	digit := func(c byte) bool { return c <= '9' }
	return len(l) >= 2 && !digit(l[0]) && !digit(l[len(l)-1])
}

// class tells for each byte whether host names may hold it, and gives it in lower case. Underscores are no
// host names' but DNS has them everywhere.
var class = func() (t [256]byte) {
	for c := range 256 {
		switch {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-', c == '_':
			t[c] = byte(c)
		case 'A' <= c && c <= 'Z':
			t[c] = byte(c) + 'a' - 'A'
		}
	}
	return t
}()

// hostName writes the name in text to buf in canonical wire form and returns its length, or 0 if it is no
// name of letters, digits, hyphens and underscores. One final dot is allowed.
func hostName(buf *[256]byte, text []byte) int {
	if len(text) > 254 || len(text) == 0 {
		return 0
	}
	label, n := 0, 1
	for i, c := range text {
		if c == '.' {
			l := n - label - 1
			if l == 0 || l > 63 {
				return 0
			}
			buf[label] = byte(l)
			if i == len(text)-1 {
				buf[n] = 0
				return n + 1
			}
			label = n
			n++
			continue
		}
		c = class[c]
		if c == 0 {
			return 0
		}
		buf[n] = c
		n++
	}
	l := n - label - 1
	if l > 63 || n >= dnsname.MaxLen {
		return 0
	}
	buf[label] = byte(l)
	buf[n] = 0
	return n + 1
}

// setName sets the rule's name from text, Unicode included.
func (p *parser) setName(text []byte) bool {
	n := hostName(&p.name, text)
	if n == 0 {
		a, ok := ascii(string(text))
		if !ok {
			return false
		}
		if n = hostName(&p.name, []byte(a)); n == 0 {
			return false
		}
	}
	p.rule.Name = p.name[:n]
	return true
}

var profile = idna.New(idna.MapForLookup(), idna.Transitional(false), idna.StrictDomainName(false))

// ascii converts a name or pattern with Unicode labels to A-labels; it reports false if there is nothing to
// convert or it cannot be.
func ascii(s string) (string, bool) {
	if len(s) > 1024 || strings.IndexFunc(s, func(r rune) bool { return r >= 0x80 }) < 0 {
		return "", false
	}
	labels := strings.Split(s, ".")
	for i, l := range labels {
		if strings.IndexFunc(l, func(r rune) bool { return r >= 0x80 }) < 0 {
			continue
		}
		if strings.ContainsAny(l, "*") {
			return "", false // part of a label has no A-label
		}
		a, err := profile.ToASCII(l)
		if err != nil || strings.IndexFunc(a, func(r rune) bool { return r >= 0x80 }) >= 0 {
			return "", false
		}
		labels[i] = a
	}
	return strings.Join(labels, "."), true
}

// text returns a host name of wire form as text.
func text(name []byte) string {
	b := make([]byte, 0, len(name))
	for i := 0; i < len(name) && name[i] != 0; i += 1 + int(name[i]) {
		if len(b) > 0 {
			b = append(b, '.')
		}
		b = append(b, name[i+1:i+1+int(name[i])]...)
	}
	return string(b)
}

// needText fills the rule's Glob and Pattern from its name and form.
func (p *parser) needText() {
	t := text(p.rule.Name)
	g := Pattern{Text: t, End: true}
	switch p.rule.Form.Scope() {
	case ScopeSubtree:
		g.Start = AtLabel
	case ScopeExact:
		g.Start = AtName
	case ScopeBelow:
		g.Text = "." + t
	}
	p.rule.Glob = g
	if p.rule.Pattern == "" {
		p.rule.Pattern = t
	}
}

// dnsmasq reads address=/x/…, server=/x/ and local=/x/, each with several names between slashes; *x is whatever ends in
// x. A comment begins with
// a # behind a blank; one in a value means something: address=/x/# is the null address, and server=/x/# says that x is
// to be resolved as if no line named what is above it.
func (p *parser) dnsmasq(line []byte) bool {
	k, value, ok := bytes.Cut(line, []byte("=/"))
	if !ok || string(k) != "address" && string(k) != "server" && string(k) != "local" {
		return false
	}
	for i := 1; i < len(value); i++ {
		if value[i] == '#' && (value[i-1] == ' ' || value[i-1] == '\t') {
			value = trim(value[:i])
		}
	}
	names, rest, ok := cutLast(value, '/')
	if !ok {
		p.complain(line, "no slash after the name")
		return true
	}
	address, arg := string(k) == "address", string(trim(rest))
	var addr netip.Addr
	switch {
	case arg == "" || arg == "#":
	case !address:
		p.complain(line, "names a forwarder: forward zones are configured, not listed")
		return true
	default:
		var err error
		if addr, err = netip.ParseAddr(arg); err != nil {
			p.complain(line, "not an address: "+arg)
			return true
		}
	}
	for _, name := range bytes.Split(names, []byte("/")) {
		p.rule = Rule{Line: p.line, Form: DnsmasqDomain, Allow: arg == "#" && !address}
		// A star is for the end of names wherever it falls, a dot before a name for nothing.
		name, star := bytes.CutPrefix(name, []byte("*"))
		below := star && bytes.HasPrefix(name, []byte("."))
		if below || !star {
			name = bytes.TrimLeft(name, ".")
		}
		switch {
		case string(name) == "#":
			p.complain(line, "matches every name")
			continue
		case !p.setName(name):
			p.complain(line, "not a host name: "+clip(name))
			continue
		}
		if below {
			p.rule.Form = BelowStar
		}
		if addr.IsValid() && !addr.IsUnspecified() && !addr.IsLoopback() {
			p.rule.Mods = &Mods{Rewrite: addrRewrite(addr)}
		}
		if star && !below {
			p.rule.Form, p.rule.Pattern = Glob, "dnsmasq *"+text(p.rule.Name)
			p.rule.Glob, p.rule.Name = Pattern{Text: text(p.rule.Name), End: true}, nil
		} else if p.rule.Mods != nil {
			p.rule.Pattern = "dnsmasq " + text(p.rule.Name)
			if below {
				p.rule.Pattern = "dnsmasq *." + text(p.rule.Name)
			}
			p.needText()
		}
		p.hand()
	}
	return true
}

func cutLast(b []byte, sep byte) (before, after []byte, ok bool) {
	i := bytes.LastIndexByte(b, sep)
	if i < 0 {
		return nil, nil, false
	}
	return b[:i], b[i+1:], true
}
