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
// which $TTL, $ORIGIN, parentheses, comments and omitted owners are understood. $INCLUDE is not.
//
// Read are triggers by the name asked for, exact and wildcard, by addresses of the answer and of the client
// (rpz-ip, rpz-client-ip), and by names and addresses of the name servers that an answer came through
// (rpz-nsdname, rpz-nsip). The actions of all are NXDOMAIN, NODATA (both are "blocked": how to say so is the
// user's setting), PASSTHRU, DROP, TCP-Only, a CNAME target and local data. Of owners that are absolute, the
// origin is cut off; with no origin given they are taken as if relative, which is how some lists are written.
type zone struct {
	on     bool
	parens int    // nesting of parentheses at the line's beginning
	owner  string // of the last record
	origin string // lower case, with its final dot; "" if not given
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
	text := raw
	quoted := false
	begun := z.parens
scan:
	for i, c := range text {
		switch {
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == ';':
			text = text[:i]
			break scan
		case c == '(':
			z.parens++
		case c == ')':
			z.parens = max(0, z.parens-1)
		}
	}
	f := strings.Fields(string(text))
	if begun > 0 || len(f) == 0 {
		return // blank, or inside a record of several lines, which only SOA is in practice
	}
	switch strings.ToUpper(f[0]) {
	case "$ORIGIN":
		if len(f) > 1 {
			z.origin = strings.ToLower(f[1])
		}
		return
	case "$TTL":
		return
	}
	if f[0][0] == '$' {
		p.complain(trim(raw), f[0]+" is not supported")
		return
	}
	if text[0] == ' ' || text[0] == '\t' {
		f = append([]string{z.owner}, f...)
	} else {
		z.owner = f[0]
	}
	p.zoneFields(trim(raw), f)
}

// zoneRecord reads a line of a policy zone outside of what is known to be one; it reports whether it was one.
func (p *parser) zoneRecord(text []byte) bool {
	f := strings.Fields(string(text))
	if len(f) == 0 {
		return false
	}
	rest := skipClass(f[1:])
	if len(rest) != 2 || !strings.EqualFold(rest[0], "CNAME") || strings.ContainsAny(f[0], "|^$/") {
		return false
	}
	p.zoneFields(text, f)
	return true
}

// skipClass drops a TTL and a class, in either order.
func skipClass(f []string) []string {
	for len(f) > 0 {
		if _, err := strconv.ParseUint(f[0], 10, 32); err != nil && !strings.EqualFold(f[0], "IN") {
			break
		}
		f = f[1:]
	}
	return f
}

func (p *parser) zoneFields(line []byte, f []string) {
	z := &p.zone
	rest := skipClass(f[1:])
	if len(rest) < 2 {
		p.complain(line, "not a record of a policy zone")
		return
	}
	owner := strings.ToLower(f[0])
	typ := strings.ToUpper(rest[0])
	if owner == "" || owner == "@" || owner == z.origin || typ == "SOA" || typ == "NS" {
		if z.origin == "" && typ == "SOA" && strings.HasSuffix(owner, ".") {
			z.origin = owner
		}
		return // the zone's own records
	}
	if z.origin != "" && z.origin != "." && strings.HasSuffix(owner, "."+z.origin) {
		owner = strings.TrimSuffix(owner, "."+z.origin)
	}
	owner = strings.TrimSuffix(owner, ".")
	value := strings.Join(rest[1:], " ")
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
		p.rule.Pattern = "rpz " + f[0]
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
		if t == typeTXT {
			value = strings.Trim(value, `"`)
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
		name, err := target(v)
		if err != nil {
			return err.Error() + "; an address needs a record of type A or AAAA"
		}
		p.rule.Mods = &Mods{Rewrite: &Rewrite{CNAME: name}}
		return ""
	}
}

// endZone names what an unbalanced parenthesis swallowed.
func (p *parser) endZone() {
	if p.zone.parens > 0 {
		p.complain(nil, "a parenthesis is never closed; what follows it was not read")
	}
}
