package rulelist

import (
	"bytes"
	"strconv"
	"strings"
)

// A zone is the state of reading a response policy zone (draft-vixie-dnsop-dns-rpz): master file syntax, of
// which $TTL, $ORIGIN, parentheses, comments and omitted owners are understood. $INCLUDE is not.
//
// Read are QNAME triggers, exact and wildcard, with the actions NXDOMAIN, NODATA (both are "blocked": how to
// say so is the user's setting), PASSTHRU, a CNAME target and local data. Triggers by address and name
// server, and DROP and TCP-Only, are skipped and named. Of owners that are absolute, the origin is cut off;
// with no origin given they are taken as if relative, which is how some lists are written.
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
	for _, kind := range []string{"rpz-ip", "rpz-nsip", "rpz-nsdname", "rpz-client-ip"} {
		if strings.HasSuffix(owner, "."+kind) {
			p.complain(line, kind+" triggers are not supported")
			return
		}
	}
	p.rule = Rule{Line: p.line, Form: ZoneExact}
	if rest, ok := strings.CutPrefix(owner, "*."); ok {
		p.rule.Form, owner = ZoneBelow, rest
	}
	if !p.setName([]byte(owner)) {
		p.complain(line, "not a host name: "+owner)
		return
	}
	value := strings.Join(rest[1:], " ")
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
	case "rpz-drop.", "rpz-tcp-only.", "rpz-drop", "rpz-tcp-only":
		return v + " is not supported in lists"
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
