package rulelist

import (
	"bytes"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// A zone is the state of reading a response policy zone (draft-vixie-dnsop-dns-rpz): master file syntax, of
// which $TTL, $ORIGIN, parentheses, comments and omitted owners are understood. $INCLUDE and $GENERATE are not, and of
// records over several lines only SOA is, which tells nothing but the zone's name.
//
// Read are triggers by the name asked for, exact and wildcard, by addresses of the answer and of the client
// (rpz-ip, rpz-client-ip), and by names and addresses of the name servers that an answer came through
// (rpz-nsdname, rpz-nsip). The actions of all are NXDOMAIN, NODATA (both are "blocked": how to say so is the
// user's setting), PASSTHRU, DROP, TCP-Only, a CNAME target (*.x standing for the name asked for below x) and local
// data. The zone's name is that of its SOA record, or the first $ORIGIN; it is cut off owners, and owners outside it
// mean nothing. With no name known owners are taken as they are, absolute or not, which is how some lists are written.
type zone struct {
	on     bool
	parens int    // nesting of parentheses at the line's beginning
	owner  string // of the last record, as absolute made it; "" before the first
	// Names in lower case, with their final dot; "" if not given.
	origin, apex, first string
}

// absolute makes a name one, if there is an origin.
func (z *zone) absolute(name string) string {
	name = strings.ToLower(name)
	switch {
	case name == "@" && z.origin != "":
		return z.origin
	case z.origin == "" || strings.HasSuffix(name, "."):
		return name
	case z.origin == ".":
		return name + "."
	}
	return name + "." + z.origin
}

// trigger cuts the zone's name off an owner; "" is the zone itself. It reports false if the owner is outside.
func (z *zone) trigger(owner string) (string, bool) {
	apex := z.apex
	if apex == "" {
		apex = z.first
	}
	switch {
	case owner == apex || owner == "@":
		return "", true
	case apex == "" || apex == "." || !strings.HasSuffix(owner, "."):
		return strings.TrimSuffix(owner, "."), true
	}
	return strings.CutSuffix(owner, "."+apex)
}

// isZoneStart reports whether a line belongs to a zone file and to nothing else.
func isZoneStart(text []byte) bool {
	f := bytes.Fields(text)
	if len(f) < 2 {
		return false
	}
	first := string(f[0])
	if first == "$TTL" || first == "$ORIGIN" {
		return true
	}
	for _, w := range f[1:min(len(f), 4)] {
		if string(w) == "SOA" {
			return len(f) > 2
		}
	}
	return false
}

// zoneLine reads a line once the file is known to be a zone.
func (p *parser) zoneLine(raw []byte) {
	z := &p.zone
	text := make([]byte, 0, len(raw)) // without comment and parentheses
	quoted := false
	begun := z.parens
scan:
	for i, c := range raw {
		switch {
		case c == '\\' && i+1 < len(raw) && raw[i+1] == '"':
			text = append(text, c)
			continue
		case c == '"' && (i == 0 || raw[i-1] != '\\'):
			quoted = !quoted
		case quoted:
		case c == ';':
			break scan
		case c == '(':
			z.parens++
			c = ' '
		case c == ')':
			z.parens = max(0, z.parens-1)
			c = ' '
		}
		text = append(text, c)
	}
	if begun > 0 || len(trim(text)) == 0 {
		return // blank, or inside a record of several lines
	}
	first, rest := field(string(text))
	switch directive := strings.ToUpper(first); {
	case directive == "$ORIGIN":
		name, _ := field(rest)
		if name == "" {
			p.complain(trim(raw), "$ORIGIN without a name")
			return
		}
		if z.origin = z.absolute(name); !strings.HasSuffix(z.origin, ".") {
			z.origin += "."
		}
		if z.first == "" {
			z.first = z.origin
		}
		return
	case directive == "$TTL":
		return
	case directive[0] == '$':
		p.complain(trim(raw), first+" is not supported")
		return
	}
	switch {
	case text[0] != ' ' && text[0] != '\t':
		z.owner = z.absolute(first)
	case z.owner == "" && z.origin != "":
		z.owner, rest = z.origin, string(text)
	default:
		rest = string(text)
	}
	p.zoneFields(trim(raw), z.owner, rest)
}

// field splits the first word off a text.
func field(s string) (word, rest string) {
	s = strings.TrimLeft(s, " \t")
	if i := strings.IndexAny(s, " \t"); i >= 0 {
		return s[:i], s[i:]
	}
	return s, ""
}

// zoneRecord reads a line of a policy zone outside of what is known to be one; it reports whether it was one.
func (p *parser) zoneRecord(text []byte) bool {
	owner, rest := field(string(text))
	f := strings.Fields(skipClass(rest))
	if len(f) != 2 || !strings.EqualFold(f[0], "CNAME") || strings.ContainsAny(owner, "|^$/") {
		return false
	}
	p.zoneFields(text, strings.ToLower(owner), rest)
	return true
}

// skipClass drops a TTL and a class, in either order.
func skipClass(s string) string {
	for {
		word, rest := field(s)
		if !isTTL(word) && !strings.EqualFold(word, "IN") {
			return s
		}
		s = rest
	}
}

// isTTL reports whether a word is a number, of seconds or of what BIND's units say: 1h30m.
func isTTL(s string) bool {
	digits := 0
	for _, c := range []byte(s) {
		switch {
		case '0' <= c && c <= '9':
			digits++
		case digits == 0 || strings.IndexByte("smhdwSMHDW", c) < 0:
			return false
		default:
			digits = 0
		}
	}
	return s != "" && '0' <= s[0] && s[0] <= '9'
}

// zoneFields reads the record of an owner. rest is what follows the owner.
func (p *parser) zoneFields(line []byte, owner, rest string) {
	z := &p.zone
	typ, rest := field(skipClass(rest))
	if typ = strings.ToUpper(typ); typ == "" || strings.TrimSpace(rest) == "" {
		p.complain(line, "not a record of a policy zone")
		return
	}
	if typ == "SOA" {
		switch {
		case z.apex == "" && strings.HasSuffix(owner, "."):
			z.apex = owner
		case z.apex != "" && owner != z.apex:
			p.complain(line, "a second zone begins; it is taken as part of the first")
		}
		return
	}
	if z.parens > 0 {
		p.complain(line, "a record over several lines")
		return
	}
	owner, inside := z.trigger(owner)
	if !inside {
		p.complain(line, "outside the zone")
		return
	}
	if owner == "" {
		if z.owner == "" {
			p.complain(line, "a record without an owner")
		}
		return // the zone's own records
	}
	switch typ {
	case "NS", "DNAME", "DS", "DNSKEY", "RRSIG", "NSEC", "NSEC3", "NSEC3PARAM":
		p.complain(line, typ+" is of a type that is no action")
		return
	}
	value := strings.Join(strings.Fields(rest), " ")
	if typ == "TXT" {
		var ok bool
		if value, ok = txt(rest); !ok {
			p.complain(line, "not the data of a TXT record")
			return
		}
	}
	dot := strings.LastIndexByte(owner, '.')
	if rest, kind := owner[:max(0, dot)], owner[dot+1:]; strings.HasPrefix(kind, "rpz-") {
		t := slices.Index(triggerNames[:], kind)
		if t < 0 {
			p.complain(line, "unknown trigger "+kind)
			return
		}
		p.zoneTrigger(line, Trigger(t), rest, typ, value)
		return
	}
	p.rule = Rule{Line: p.line, Form: ZoneExact}
	whole := owner
	if rest, ok := strings.CutPrefix(owner, "*."); ok {
		p.rule.Form, owner = ZoneBelow, rest
	}
	if !p.setName([]byte(owner)) {
		p.complain(line, "not a host name: "+owner)
		return
	}
	if reason := p.zoneAction(typ, value); reason != "" {
		p.complain(line, reason)
		return
	}
	if p.rule.Mods != nil {
		p.rule.Pattern = "rpz " + whole
		p.needText()
	}
	p.hand()
}

// triggerNames are the last labels of the owners of triggers.
var triggerNames = [NumTriggers]string{ByAnswer: "rpz-ip", ByClient: "rpz-client-ip", ByServer: "rpz-nsdname", ByServerAddr: "rpz-nsip"}

// zoneTrigger reads a record whose trigger is not the name asked for; owner is what says which.
func (p *parser) zoneTrigger(line []byte, t Trigger, owner, typ, value string) {
	p.rule = Rule{Line: p.line, Form: ZoneExact, Trigger: t}
	switch {
	case t == ByServer && owner == "*": // every name server
		p.rule.Form = ZoneBelow
		p.rule.Name = AppendServer(p.name[:0], []byte{0})
	case t == ByServer:
		if rest, ok := strings.CutPrefix(owner, "*."); ok {
			p.rule.Form, owner = ZoneBelow, rest
		}
		if !p.setName([]byte(owner)) || len(p.rule.Name)+1+len(triggerNames[t]) > dnsname.MaxLen {
			p.complain(line, "not a host name: "+owner)
			return
		}
		p.rule.Name = AppendServer(p.name[:0], p.rule.Name)
	default:
		prefix, reason := zonePrefix(owner)
		if reason != "" {
			p.complain(line, reason)
			return
		}
		p.rule.Prefix = prefix
		p.rule.Name = AppendPrefix(p.name[:0], t, prefix)
	}
	if reason := p.zoneAction(typ, value); reason != "" {
		p.complain(line, reason)
		return
	}
	if everything := t == ByServer && owner == "*" || t != ByServer && p.rule.Prefix.Bits() <= 3; everything && !p.rule.Allow {
		p.world(string(line))
	}
	if p.rule.Mods != nil {
		p.rule.Pattern = "rpz " + owner + "." + triggerNames[t]
		p.needText()
	}
	p.hand()
}

// zonePrefix reads the owner of a trigger that is an address: the length of a prefix and the address from the end,
// of IPv4 in bytes, of IPv6 in words, of which zz stands for a run of zeros. The reason is not "" if it is none.
func zonePrefix(owner string) (prefix netip.Prefix, reason string) {
	f := strings.Split(owner, ".")
	size, err := strconv.Atoi(f[0])
	f = f[1:]
	slices.Reverse(f)
	text := strings.Join(f, ".")
	if len(f) != 4 || slices.Contains(f, "zz") {
		text = strings.Replace(strings.Join(f, ":"), "zz", "", 1)
		if len(f) > 0 && f[0] == "zz" {
			text = ":" + text
		}
		if len(f) > 1 && f[len(f)-1] == "zz" || text == ":" {
			text += ":"
		}
	}
	addr, aerr := netip.ParseAddr(text)
	if err != nil || aerr != nil || size < 1 || size > addr.BitLen() || addr.Is4In6() || addr.Zone() != "" {
		return prefix, "not a prefix: " + owner
	}
	prefix = netip.PrefixFrom(addr, size)
	if prefix != prefix.Masked() {
		return prefix, prefix.String() + " has bits beyond its length"
	}
	return prefix, ""
}

// The names by which rules know triggers that are not names asked for end in a label of two bytes, a zero and the
// Trigger, which no host name does.

// TriggerLabel is the last label of such names.
func TriggerLabel(t Trigger) [3]byte { return [3]byte{2, 0, byte(t)} }

// AppendServer appends the name, in wire form, by which rules know the name of a name server.
func AppendServer(b, name []byte) []byte {
	return append(append(b, name[:len(name)-1]...), 2, 0, byte(ByServer), 0)
}

// AppendPrefix appends the name, in wire form, by which rules know a prefix that is a trigger.
func AppendPrefix(b []byte, t Trigger, p netip.Prefix) []byte {
	const hex = "0123456789abcdef"
	a, size := p.Addr().As16(), p.Bits()
	if p.Addr().Is4() {
		size += 96
	}
	b = append(b, 34, hex[size>>4&15], hex[size&15])
	for _, c := range a {
		b = append(b, hex[c>>4], hex[c&15])
	}
	return append(b, 2, 0, byte(t), 0)
}

// zoneAction sets what the record tells to do, and returns why it cannot be done, or "".
func (p *parser) zoneAction(typ, value string) string {
	if typ != "CNAME" {
		t, ok := typeCode[typ]
		if !ok {
			return typ + " is not the name of a record type"
		}
		value, err := rdata(t, value)
		if err != nil {
			return err.Error()
		}
		p.rule.Mods = &Mods{Rewrite: &Rewrite{Type: t, Value: value}}
		return ""
	}
	switch v := strings.ToLower(value); v {
	case ".", "*.":
		return ""
	case "rpz-passthru.", "rpz-passthru":
		p.rule.Allow = true
		return ""
	case "rpz-drop.", "rpz-drop":
		p.rule.Mods = &Mods{Rewrite: &Rewrite{Action: Drop}}
		return ""
	case "rpz-tcp-only.", "rpz-tcp-only":
		p.rule.Mods = &Mods{Rewrite: &Rewrite{Action: TCPOnly}}
		return ""
	default:
		// The oldest way to say PASSTHRU is a CNAME to the owner itself.
		if strings.TrimSuffix(v, ".") == text(p.rule.Name) {
			p.rule.Allow = true
			return ""
		}
		below, wild := strings.CutPrefix(v, "*.")
		name, err := target(below)
		if err != nil {
			return err.Error() + "; an address needs a record of type A or AAAA"
		}
		if wild {
			name = "*." + name
		}
		p.rule.Mods = &Mods{Rewrite: &Rewrite{CNAME: name}}
		return ""
	}
}

// txt returns the strings of a TXT record as one, which is how those that need more than 255 bytes are read.
func txt(s string) (string, bool) {
	var b []byte
	quoted := false
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"':
			quoted = !quoted
		case c == '\\':
			if i++; i == len(s) {
				return "", false
			}
			if i+3 <= len(s) {
				if n, err := strconv.ParseUint(s[i:i+3], 10, 8); err == nil {
					b = append(b, byte(n))
					i += 2
					continue
				}
			}
			b = append(b, s[i])
		case !quoted && (c == ' ' || c == '\t'):
		default:
			b = append(b, c)
		}
	}
	return string(b), !quoted
}

// endZone names what an unbalanced parenthesis swallowed.
func (p *parser) endZone() {
	if p.zone.parens > 0 {
		p.complain(nil, "a parenthesis is never closed; what follows it was not read")
	}
}
