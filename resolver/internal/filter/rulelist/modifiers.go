package rulelist

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Mods are the modifiers of a rule, flags apart. All conditions must hold.
type Mods struct {
	// Types and NotTypes are the QTYPEs of $dnstype. If Types is not empty, NotTypes means nothing.
	Types, NotTypes []uint16
	// Clients and NotClients are those of $client: one of NotClients ends it, then one of Clients must be
	// there unless there are none.
	Clients, NotClients Clients
	// Tags and NotTags are those of $ctag, by the same logic.
	Tags, NotTags []string
	// DenyAllow are the names of $denyallow, in lower case: the rule leaves them and all below alone. The first of them
	// may end in ".*"; the others are in order.
	DenyAllow []string
	// Rewrite is the value of $dnsrewrite, nil if the rule has none.
	Rewrite *Rewrite
}

// Clients are the clients that a rule names: by name, address or prefix.
type Clients struct {
	Names    []string       // in order
	Prefixes []netip.Prefix // in order of address, none in another
}

// Empty reports whether c names nobody.
func (c *Clients) Empty() bool { return len(c.Names) == 0 && len(c.Prefixes) == 0 }

// A Rewrite is the value of a $dnsrewrite. Equal values are equal structs: an exception with a value cancels
// the rewrites of the same value.
type Rewrite struct {
	Any   bool   // no value: as an exception it cancels all rewrites, otherwise it means NODATA
	RCode uint16 // anything but NOERROR is the whole answer
	CNAME string // not empty: the name to resolve instead, lower case, no final dot; *.x of zones is the asked name below x
	Type  uint16 // the type of Value; 0 with NOERROR is NODATA
	Value string // RDATA in presentation form, names as written
	// Action is the whole answer of a policy zone that says so; the rest means nothing then.
	Action Action
}

// An Action is what a policy zone does beyond answering.
type Action uint8

// The actions.
const (
	Answer  Action = iota // as the rest of the Rewrite says
	Drop                  // no response
	TCPOnly               // a response over TCP alone
)

// String returns the name of the action, "" for Answer.
func (a Action) String() string { return [...]string{"", "drop", "tcp-only"}[a%3] }

// restricts reports whether m narrows a rule that would otherwise match every name.
func (m *Mods) restricts() bool {
	return m != nil && (len(m.Types)+len(m.NotTypes)+len(m.Tags)+len(m.NotTags)+len(m.DenyAllow) > 0 ||
		!m.Clients.Empty() || !m.NotClients.Empty())
}

// spares reports whether m leaves some clients or names alone, or every question for an address: a rule with such
// modifiers does not block the world, however wide its pattern is.
func (m *Mods) spares() bool {
	if !m.restricts() {
		return false
	}
	types := *m
	types.Types, types.NotTypes = nil, nil
	if types.restricts() {
		return true
	}
	if len(m.Types) > 0 {
		return !slices.Contains(m.Types, typeA)
	}
	return slices.Contains(m.NotTypes, typeA)
}

// AppendKey appends a text that is equal for equal modifiers, in whatever order they were written.
func (m *Mods) AppendKey(b []byte) []byte {
	if m == nil {
		return b
	}
	for _, t := range [][]uint16{m.Types, m.NotTypes} {
		b = append(b, '\n')
		for _, t := range t {
			b = strconv.AppendUint(append(b, ' '), uint64(t), 10)
		}
	}
	for _, c := range []Clients{m.Clients, m.NotClients} {
		b = append(b, '\n')
		for _, n := range c.Names {
			b = strconv.AppendQuote(b, n)
		}
		for _, p := range c.Prefixes {
			b = p.AppendTo(append(b, ' '))
		}
	}
	for _, s := range [][]string{m.Tags, m.NotTags, m.DenyAllow} {
		b = append(b, '\n')
		for _, s := range s {
			b = append(append(b, ' '), s...)
		}
	}
	if m.Rewrite != nil {
		w := m.Rewrite
		b = fmt.Appendf(b, "\n{%v %d %s %d %s}", w.Any, w.RCode, w.CNAME, w.Type, w.Value)
		if w.Action != Answer {
			b = append(append(b, ' '), w.Action.String()...)
		}
	}
	return b
}

// modifiers reads what follows the $ into p.rule and returns why the rule cannot be used, or "".
func (p *parser) modifiers(s string) string {
	r := &p.rule
	var m Mods
	some := false
	for s != "" {
		var item string
		item, s = cutUnescaped(s, ',')
		if item == "" {
			continue
		}
		name, value, has := strings.Cut(item, "=")
		var err error
		switch name {
		case "important":
			r.Important = true
		case "badfilter":
			r.Bad = true
		case "dnstype":
			m.Types, m.NotTypes, err = dnsTypes(value)
			some = true
		case "client":
			m.Clients, m.NotClients, err = clients(value)
			some = true
		case "ctag":
			m.Tags, m.NotTags, err = tags(value)
			some = true
		case "denyallow":
			m.DenyAllow, err = denyAllow(value)
			some = true
		case "dnsrewrite":
			m.Rewrite, err = dnsRewrite(strings.NewReplacer(`\,`, ",", `\$`, "$").Replace(value))
			some = true
		default:
			return fmt.Sprintf("%s is not a modifier of DNS rules", clip([]byte("$"+name)))
		}
		if err != nil {
			if !has {
				return "$" + name + " needs a value"
			}
			return "$" + name + ": " + err.Error()
		}
	}
	if some {
		r.Mods = &m
	}
	return ""
}

// cutUnescaped cuts s at the first sep that no backslash precedes. The backslashes stay.
func cutUnescaped(s string, sep byte) (before, after string) {
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case sep:
			return s[:i], s[i+1:]
		}
	}
	return s, ""
}

// items splits a value at its pipes and hands each item to f, without the ~ that negates it. Nothing between two pipes,
// before the first and behind the last is an error unless gaps are allowed; nothing but that always is.
func items(value string, gaps bool, f func(item string, not bool) error) error {
	some := false
	for more := true; more; {
		n := len(value)
		var item string
		item, value = cutUnescaped(value, '|')
		more = len(item) < n // a pipe was there, so another item must be
		if gaps && item == "" {
			continue
		}
		item, not := strings.CutPrefix(item, "~")
		if item == "" {
			return errEmpty
		}
		if err := f(item, not); err != nil {
			return err
		}
		some = true
	}
	if !some {
		return errEmpty
	}
	return nil
}

var errEmpty = errors.New("an empty value")

func dnsTypes(value string) (types, nots []uint16, err error) {
	err = items(value, false, func(item string, not bool) error {
		t, ok := typeCode[strings.ToUpper(item)]
		if !ok {
			return fmt.Errorf("%q is not the name of a record type", item)
		}
		if not {
			nots = append(nots, t)
		} else {
			types = append(types, t)
		}
		return nil
	})
	return unique(types), unique(nots), err
}

func clients(value string) (yes, no Clients, err error) {
	err = items(value, true, func(item string, not bool) error {
		c := &yes
		if not {
			c = &no
		}
		if q := item[0]; (q == '\'' || q == '"') && len(item) >= 2 && item[len(item)-1] == q {
			if item = unescape(item[1 : len(item)-1]); item == "" {
				return errEmpty
			}
		} else {
			item = unescape(item)
		}
		if a, err := netip.ParseAddr(item); err == nil {
			a = a.Unmap().WithZone("")
			c.Prefixes = append(c.Prefixes, netip.PrefixFrom(a, a.BitLen()))
			return nil
		}
		if p, err := netip.ParsePrefix(item); err == nil {
			c.Prefixes = append(c.Prefixes, p.Masked())
			return nil
		}
		c.Names = append(c.Names, item)
		return nil
	})
	for _, c := range []*Clients{&yes, &no} {
		c.Names = unique(c.Names)
		slices.SortFunc(c.Prefixes, func(a, b netip.Prefix) int {
			return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
		})
		// One in another says nothing. What holds it stands before it, and what stands between is in that too.
		outer := c.Prefixes[:0]
		for _, p := range c.Prefixes {
			if n := len(outer); n == 0 || !outer[n-1].Contains(p.Addr()) {
				outer = append(outer, p)
			}
		}
		c.Prefixes = outer
	}
	return yes, no, err
}

func tags(value string) (yes, no []string, err error) {
	err = items(value, true, func(item string, not bool) error {
		for _, c := range []byte(item) {
			if !('a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '_') {
				return fmt.Errorf("%q is not a tag: small letters, digits and underscores", item)
			}
		}
		if not {
			no = append(no, item)
		} else {
			yes = append(yes, item)
		}
		return nil
	})
	return unique(yes), unique(no), err
}

func denyAllow(value string) (names []string, err error) {
	wild := 0
	err = items(value, false, func(item string, not bool) error {
		if not {
			return fmt.Errorf("a negated name")
		}
		item = strings.ToLower(item)
		if a, ok := ascii(item); ok {
			item = a
		}
		// What is no domain is refused, as AdGuard does: the rule would spare nothing and so hold for all names. It
		// takes anything before ".*", and lists have remarks there that no name can be.
		var buf [256]byte
		wildcard := strings.HasSuffix(item, ".*")
		if n := hostName(&buf, []byte(item)); !wildcard && (n == 0 || !isDomain(buf[:n])) {
			return fmt.Errorf("%q is not a host name", item)
		}
		if wildcard {
			if wild++; wild > maxWild {
				return fmt.Errorf("more than %d names that end in .*", maxWild)
			}
		}
		names = append(names, strings.TrimSuffix(item, "."))
		return nil
	})
	slices.SortFunc(names, func(a, b string) int {
		if a, b := strings.HasSuffix(a, "*"), strings.HasSuffix(b, "*"); a != b {
			return map[bool]int{true: -1, false: 1}[a]
		}
		return cmp.Compare(a, b)
	})
	return slices.Compact(names), err
}

// maxWild is how many names of one $denyallow may end in ".*": each is tried on every name.
const maxWild = 64

func unique[T cmp.Ordered](s []T) []T {
	slices.Sort(s)
	return slices.Compact(s)
}

// dnsRewrite reads the short form (a keyword, an address, a name) or the full form RCODE;TYPE;VALUE.
func dnsRewrite(s string) (*Rewrite, error) {
	if s == "" {
		return &Rewrite{Any: true}, nil
	}
	parts := strings.SplitN(s, ";", 3)
	switch len(parts) {
	case 2:
		return nil, fmt.Errorf("%q has one semicolon; write RCODE;TYPE;VALUE", s)
	case 3:
		return fullRewrite(parts[0], parts[1], parts[2])
	}
	if !strings.ContainsFunc(s, func(c rune) bool { return c < 'A' || c > 'Z' }) {
		switch s {
		case "NOERROR", "SERVFAIL", "NXDOMAIN", "REFUSED":
			return &Rewrite{RCode: rcode[s]}, nil
		}
		return nil, fmt.Errorf("%q is not NOERROR, SERVFAIL, NXDOMAIN or REFUSED", s)
	}
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		return addrRewrite(a), nil
	}
	name, err := target(s)
	if err != nil {
		return nil, err
	}
	return &Rewrite{CNAME: name}, nil
}

func addrRewrite(a netip.Addr) *Rewrite {
	if a.Is4() {
		return &Rewrite{Type: typeA, Value: a.String()}
	}
	return &Rewrite{Type: typeAAAA, Value: a.String()}
}

func fullRewrite(code, typ, value string) (*Rewrite, error) {
	if code = strings.ToUpper(code); code == "NOTIMPL" { // as some spell it
		code = "NOTIMP"
	}
	rc, ok := rcode[code]
	if !ok {
		return nil, fmt.Errorf("%q is not a response code", code)
	}
	if rc != 0 || typ == "" && value == "" {
		return &Rewrite{RCode: rc}, nil
	}
	t, ok := typeCode[strings.ToUpper(typ)]
	if !ok {
		return nil, fmt.Errorf("%q is not the name of a record type", typ)
	}
	if t == typeCNAME {
		name, err := target(value)
		if err != nil {
			return nil, err
		}
		return &Rewrite{CNAME: name}, nil
	}
	value, err := rdata(t, value)
	if err != nil {
		return nil, err
	}
	return &Rewrite{Type: t, Value: value}, nil
}

// maxValue is the most bytes of a rewrite's value. A record holds less than 64 KiB, and a message no more than that.
const maxValue = 16 << 10

// rdata checks the value of a full rewrite and returns it with single blanks. Host names in it stay as
// written.
func rdata(t uint16, value string) (string, error) {
	if len(value) > maxValue {
		return "", fmt.Errorf("a value of %d bytes; the limit is %d", len(value), maxValue)
	}
	f := strings.Fields(value)
	switch t {
	case typeA, typeAAAA:
		a, err := netip.ParseAddr(value)
		if err != nil || a.Zone() != "" || a.Is4() != (t == typeA) {
			return "", fmt.Errorf("%q is not an address of that type", value)
		}
		return a.String(), nil
	case typePTR, typeNS, typeDNAME:
		name, err := target(value)
		if err != nil {
			return "", err
		}
		if written := strings.TrimSuffix(value, "."); strings.EqualFold(name, written) {
			name = written
		}
		return name + ".", nil
	case typeTXT:
		return value, nil
	case typeMX:
		if len(f) == 2 && numbers(f[:1]) && isTarget(f[1]) {
			return strings.Join(f, " "), nil
		}
		return "", fmt.Errorf("%q is not PREFERENCE HOST", value)
	case typeSRV:
		if len(f) == 4 && numbers(f[:3]) && isTarget(f[3]) {
			return strings.Join(f, " "), nil
		}
		return "", fmt.Errorf("%q is not PRIORITY WEIGHT PORT HOST", value)
	case typeSVCB, typeHTTPS:
		if len(f) < 2 || !numbers(f[:1]) || !isTarget(f[1]) {
			return "", fmt.Errorf("%q is not PRIORITY TARGET PARAMETERS", value)
		}
		for _, param := range f[2:] {
			if err := svcParam(param); err != nil {
				return "", err
			}
		}
		return strings.Join(f, " "), nil
	}
	return "", fmt.Errorf("rewriting to %s records is not supported", typeName[t])
}

// svcParam checks a parameter of a service binding as far as its form goes (RFC 9460 section 2.1).
func svcParam(s string) error {
	key, value, has := strings.Cut(s, "=")
	value = strings.Trim(value, `"`)
	bad := fmt.Errorf("bad service parameter %q", s)
	switch key {
	case "no-default-alpn", "ohttp":
		if has {
			return bad
		}
		return nil
	case "alpn", "mandatory", "ech", "dohpath":
		if value == "" {
			return bad
		}
		return nil
	case "port":
		if !numbers([]string{value}) {
			return bad
		}
		return nil
	case "ipv4hint", "ipv6hint":
		for _, v := range strings.Split(value, ",") {
			if a, err := netip.ParseAddr(v); err != nil || a.Is4() != (key == "ipv4hint") {
				return bad
			}
		}
		return nil
	}
	if n, ok := strings.CutPrefix(key, "key"); ok && numbers([]string{n}) {
		return nil
	}
	return fmt.Errorf("unknown service parameter %q", key)
}

// numbers reports whether all of f are numbers of 16 bits, and takes leading zeros off them.
func numbers(f []string) bool {
	for i, s := range f {
		n, err := strconv.ParseUint(s, 10, 16)
		if err != nil {
			return false
		}
		f[i] = strconv.FormatUint(n, 10)
	}
	return true
}

func isTarget(s string) bool {
	if s == "." {
		return true
	}
	_, err := target(s)
	return err == nil
}

// target reads the name that a rewrite leads to: a host name, in lower case and without its final dot.
func target(s string) (string, error) {
	var buf [256]byte
	if a, ok := ascii(s); ok {
		s = a
	}
	n := hostName(&buf, []byte(s))
	bad := n == 0
	numeric := false // of the last label: a mistyped address, no top-level domain
	for i := 0; !bad && buf[i] != 0; i += 1 + int(buf[i]) {
		l := string(buf[i+1 : i+1+int(buf[i])])
		bad = l[0] == '-' || strings.Contains(l, "_")
		numeric = strings.Trim(l, "0123456789") == ""
	}
	bad = bad || numeric
	if bad {
		return "", fmt.Errorf("%q is not a host name", s)
	}
	return strings.ToLower(strings.TrimSuffix(s, ".")), nil
}
