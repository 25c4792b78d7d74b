package rulelist

import (
	"bytes"
	"fmt"
	"net/netip"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"
)

const (
	// maxPattern bounds a pattern or expression; a name has at most 253 bytes.
	maxPattern = 1024
	// maxInsts bounds one compiled expression, and maxAllInsts those of one list together. RE2 is linear, in
	// the length of the name times these; real lists stay under 5,000.
	maxInsts    = 1_000
	maxAllInsts = 20_000
)

// adguard reads a rule in the syntax of AdGuard and uBlock.
func (p *parser) adguard(line []byte) {
	p.rule = Rule{Line: p.line}
	if reason := p.adguardRule(string(line)); reason != "" {
		p.complain(line, reason)
		return
	}
	p.hand()
}

// adguardRule fills p.rule and returns why it cannot be used, or "".
func (p *parser) adguardRule(s string) string {
	r := &p.rule
	if rest, ok := strings.CutPrefix(s, "@@"); ok {
		r.Allow = true
		s = rest
	}
	pattern, mods := splitModifiers(s)
	if strings.HasPrefix(mods, "$") {
		return "cosmetic rule: nothing for DNS" // example.org$$script
	}
	if mods != "" {
		if reason := p.modifiers(mods); reason != "" {
			return reason
		}
	} else if pattern == "" {
		return "empty rule"
	}
	if len(pattern) > maxPattern {
		return fmt.Sprintf("a pattern longer than %d bytes", maxPattern)
	}
	if n := len(pattern); n > 2 && pattern[0] == '/' && pattern[n-1] == '/' || pattern == "//" && r.Mods.restricts() {
		return p.expression(pattern[1 : n-1])
	}
	return p.pattern(pattern)
}

// splitModifiers cuts s at the $ that begins the modifiers. In an expression that is the $ after the closing
// slash; elsewhere the first one that is not escaped and that a modifier follows, or else the first.
func splitModifiers(s string) (pattern, mods string) {
	regex := strings.HasPrefix(s, "/")
	first := -1
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case '/':
			if regex && i > 0 {
				if i == len(s)-1 {
					return s, ""
				}
				if s[i+1] == '$' {
					return s[:i+1], s[i+2:]
				}
			}
		case '$':
			if regex {
				continue
			}
			if isModifier(s[i+1:]) {
				return s[:i], s[i+1:]
			}
			if first < 0 {
				first = i
			}
		}
	}
	if regex { // no closing slash, so it is a pattern
		first = strings.IndexByte(s, '$')
	}
	if first >= 0 {
		return s[:first], s[first+1:]
	}
	return s, ""
}

// isModifier reports whether s begins with what could be a modifier's name.
func isModifier(s string) bool {
	name := s[:len(s)-len(strings.TrimLeft(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_~-"))]
	rest := s[len(name):]
	return name != "" && (rest == "" || rest[0] == '=' || rest[0] == ',')
}

// pattern reads a pattern of ||, |, ^ and *.
//
// A name has no separators inside, so ^ means the end of the name. Patterns are understood as if matched
// against http://NAME, which is how rules that begin with :// or http:// come to mean the start of the name.
func (p *parser) pattern(raw string) string {
	r := &p.rule
	wide := len(raw) < 3 && !r.Mods.restricts()
	s := strings.ToLower(strings.ReplaceAll(raw, `\$`, "$"))
	if rest, ok := strings.CutSuffix(s, "/*"); ok {
		s = rest + "^"
	}
	if rest, ok := strings.CutPrefix(s, "*."); ok && strings.HasSuffix(rest, ".") {
		if p.setName([]byte(rest)) && isDomain(r.Name) && strings.Count(rest, ".") > 1 {
			s = s[:len(s)-1] + "^" // "*.example.org." is of whole names, "*.ads." of fragments
		}
		r.Name = nil // a pattern has none
	}
	r.Pattern = s
	if s == "://" || s == "http://" {
		return "matches every name"
	}
	if strings.HasPrefix(s, "https:") || strings.HasPrefix(s, "|http:") || strings.HasPrefix(s, "|https:") {
		return "a URL; no name matches it"
	}

	var g Pattern
	head, tail := "", ""
	switch {
	case strings.HasPrefix(s, "://"):
		s, g.Start = s[3:], AtName
	case strings.HasPrefix(s, "http://"):
		s, g.Start = s[7:], AtName
	case isSlashLabel(s):
		s, g.Start = strings.TrimLeft(s, "/"), AtName
	case strings.HasPrefix(s, "||"):
		s, g.Start, head = s[2:], AtLabel, "||"
	case strings.HasPrefix(s, "|"):
		s, g.Start, head = s[1:], AtName, "|"
	}
	if rest := strings.TrimLeft(s, "*"); rest != s {
		// At any start, a run of anything first means anywhere.
		head += s[:len(s)-len(rest)]
		s, g.Start = rest, Anywhere
	}
	if core := strings.TrimRight(s, "*^|"); core != s {
		// Behind the end that the first ^ means, everything else finds its place.
		s, tail = core, s[len(core):]
		if i := strings.IndexByte(tail, '|'); i >= 0 && i < len(tail)-1 {
			return "a mark inside a name matches nothing"
		}
		g.End = tail[0] != '*'
	}
	switch {
	case wide && s == "":
		return "matches every name"
	case wide && !g.End:
		return "fewer than three characters anywhere in a name match too much"
	case s == "" && g.End && g.Start != Anywhere:
		return "matches nothing"
	}
	if a, ok := ascii(s); ok {
		s = a
	}
	if addr, err := netip.ParseAddr(s); err == nil && addr.Is6() && !strings.Contains(head, "*") {
		r.Form = Exact
		r.Name = AppendAddr(p.name[:0], addr)
		r.Glob = Pattern{Text: addr.WithZone("").String(), Start: AtName, End: true}
		return ""
	}
	if reason := deadPattern(s, g); reason != "" {
		return reason
	}
	for strings.Contains(s, "**") {
		s = strings.ReplaceAll(s, "**", "*")
	}
	g.Text = s
	r.Glob, r.Form = g, Glob
	if !r.Mods.spares() && !r.Allow && !r.Bad && (s == "" || len(s) < 8 && matchesOrdinary(g.expression())) {
		p.world(raw)
	}
	if f := formOf(head, tail); f != Glob && g.End && s != "" && !strings.Contains(s, "*") {
		if dotted := f.Scope() == ScopeBelow; dotted != (s[0] == '.') {
			return ""
		}
		if n := hostName(&p.name, []byte(strings.TrimPrefix(s, "."))); n > 0 {
			r.Form, r.Name = f, p.name[:n]
		}
	}
	return ""
}

func formOf(head, tail string) Form {
	switch head + " " + tail {
	case "|| ^":
		return Subtree
	case "|| ^|":
		return SubtreeBoth
	case "|| |":
		return SubtreePipe
	case "| ^":
		return Exact
	case "| |":
		return ExactPipe
	case "| ^|":
		return ExactBoth
	case " ^":
		return Below
	case "* ^":
		return BelowStar
	case "||* ^":
		return BelowPipes
	}
	return Glob
}

// isSlashLabel reports whether s is one slash or two and the beginning of a name that ends with a dot: /ads. means a
// name that begins with "ads.".
func isSlashLabel(s string) bool {
	if len(s) <= 3 || s[0] != '/' || s[len(s)-1] != '.' {
		return false
	}
	for _, c := range []byte(strings.TrimPrefix(s[1:], "/")) {
		if class[c] == 0 && c != '.' && c != '*' {
			return false
		}
	}
	return true
}

// deadPattern returns why no name can match, or "". A slash could stand in a name (RFC 2317), but rules with
// one mean paths of URLs, so they are named rather than kept.
func deadPattern(s string, g Pattern) string {
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case class[c] != 0, c == '.', c == '*', c == '$':
		case c == '/':
			return "a path: DNS sees names only"
		case c == ':':
			return "a port or scheme: DNS sees names only"
		case c == '^' || c == '|':
			return "a mark inside a name matches nothing"
		case c == ' ' || c == '\t':
			return "a blank inside a pattern"
		case c >= 0x80:
			return "characters that have no A-label"
		default:
			return fmt.Sprintf("no host name has a %q", c)
		}
	}
	switch {
	case strings.HasPrefix(s, ".") && g.Start != Anywhere:
		return "no name or label begins with a dot"
	case strings.HasSuffix(s, ".") && g.End:
		return "no name ends with a dot here"
	case strings.Contains(s, ".."):
		return "an empty label"
	case len(s)-strings.Count(s, "*") > 253:
		return "longer than any name"
	}
	for label := range strings.SplitSeq(s, ".") {
		if len(label) > 63 && !strings.Contains(label, "*") {
			return "a label longer than any name has"
		}
	}
	return ""
}

// expression reads a regular expression.
func (p *parser) expression(e string) string {
	r := &p.rule
	r.Form, r.Pattern = Regex, e
	for i := 0; i < len(e); i++ {
		if e[i] >= 0x80 {
			return "an expression with characters that no A-label has"
		}
	}
	re, err := syntax.Parse(Insensitive(e), syntax.Perl)
	if err != nil {
		return "expression: " + strings.TrimPrefix(err.Error(), "error parsing regexp: ")
	}
	if needsSlash(re) {
		return "an expression for URLs: DNS sees names only"
	}
	if n := roughly(re); n > 4*maxInsts { // before a few bytes of text become millions of steps
		return fmt.Sprintf("an expression that costs too much: some %d steps, the limit is %d", n, maxInsts)
	}
	prog, err := syntax.Compile(re.Simplify())
	if err != nil {
		return "expression: " + err.Error()
	}
	if len(prog.Inst) > maxInsts {
		return fmt.Sprintf("an expression that costs too much: %d steps, the limit is %d", len(prog.Inst), maxInsts)
	}
	if p.insts += len(prog.Inst); p.insts > maxAllInsts {
		return fmt.Sprintf("the list's expressions together cost too much: the limit is %d steps", maxAllInsts)
	}
	if !r.Allow && !r.Bad && !r.Mods.spares() && (matchesAll(re) || matchesOrdinary(e)) {
		p.world("/" + e + "/")
	}
	return ""
}

// roughly returns about how many steps an expression is compiled to, or a million if there are more.
func roughly(re *syntax.Regexp) int {
	n := 1
	for _, s := range re.Sub {
		n += roughly(s)
	}
	switch re.Op {
	case syntax.OpLiteral:
		n = len(re.Rune)
	case syntax.OpRepeat:
		n *= max(re.Min, re.Max, 1)
	}
	return min(n, 1_000_000)
}

// needsSlash reports whether every match of re contains a slash.
func needsSlash(re *syntax.Regexp) bool {
	switch re.Op {
	case syntax.OpLiteral:
		return slices.Contains(re.Rune, '/')
	case syntax.OpCapture, syntax.OpPlus:
		return needsSlash(re.Sub[0])
	case syntax.OpRepeat:
		return re.Min > 0 && needsSlash(re.Sub[0])
	case syntax.OpConcat:
		return slices.ContainsFunc(re.Sub, needsSlash)
	case syntax.OpAlternate:
		return !slices.ContainsFunc(re.Sub, func(s *syntax.Regexp) bool { return !needsSlash(s) })
	}
	return false
}

// Insensitive returns e, the text of a Regex rule, as package regexp is to read it.
func Insensitive(e string) string { return "(?i)" + e }

// matchesAll reports whether an expression surely matches every name: it is made of parts that may all be
// empty, or are runs of anything.
func matchesAll(re *syntax.Regexp) bool {
	switch re.Op {
	case syntax.OpEmptyMatch, syntax.OpStar, syntax.OpQuest, syntax.OpAnyChar, syntax.OpAnyCharNotNL:
		return true
	case syntax.OpBeginText, syntax.OpBeginLine, syntax.OpEndText, syntax.OpEndLine:
		return true
	case syntax.OpCapture, syntax.OpPlus:
		return matchesAll(re.Sub[0])
	case syntax.OpRepeat:
		return re.Min == 0 || re.Min == 1 && matchesAll(re.Sub[0])
	case syntax.OpConcat:
		// Anchors at both ends with bounded parts between do not match all; be content with the plain cases.
		bounded := false
		for _, s := range re.Sub {
			if !matchesAll(s) {
				return false
			}
			switch s.Op {
			case syntax.OpBeginText, syntax.OpBeginLine, syntax.OpEndText, syntax.OpEndLine:
				bounded = true
			}
		}
		if bounded {
			for _, s := range re.Sub {
				if s.Op == syntax.OpStar || s.Op == syntax.OpPlus {
					return s.Sub[0].Op == syntax.OpAnyChar || s.Sub[0].Op == syntax.OpAnyCharNotNL
				}
			}
			return false
		}
		return true
	case syntax.OpAlternate:
		for _, s := range re.Sub {
			if matchesAll(s) {
				return true
			}
		}
	}
	return false
}

// ordinary are names with nothing in common but being names.
var ordinary = []string{"www.google.com", "bbc.co.uk", "wikipedia.org", "t.co", "heise.de", "login.live.com", "yandex.ru", "a.root-servers.net"}

// expression returns a regular expression that matches what g does.
func (g Pattern) expression() string {
	e := [...]string{"", "^", `(^|\.)`}[g.Start] + strings.ReplaceAll(regexp.QuoteMeta(g.Text), `\*`, ".*")
	if g.End {
		e += "$"
	}
	return e
}

// matchesOrdinary reports whether an expression matches names that have nothing in common, as /[a-z]/ does.
func matchesOrdinary(e string) bool {
	re, err := regexp.Compile(Insensitive(e))
	return err == nil && !slices.ContainsFunc(ordinary, func(name string) bool { return !re.MatchString(name) })
}

func (p *parser) world(text string) {
	if len(p.report.World) < MaxComplaints {
		p.report.World = append(p.report.World, Complaint{p.line, clip([]byte(text)), "blocks every name"})
	}
}

// unescape removes the backslash before a comma, a pipe, a quote or a backslash.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+1 < len(s) && bytes.IndexByte([]byte(`,|'"\`), s[i+1]) >= 0 {
			i++
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
