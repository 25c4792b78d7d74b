// Package rulelist reads filter lists: text in, rules and line-numbered complaints out.
//
// One list may mix syntaxes, so each line is judged by its own look, except that a zone file (RPZ) is
// recognised as a whole. Read are: AdGuard and uBlock DNS rules (patterns with ||, |, ^ and *, regular
// expressions of RE2, exceptions, and the modifiers important, badfilter, dnstype, dnsrewrite, denyallow,
// client, ctag), hosts lines, bare domains, *.domain lines, dnsmasq address=/server=/local= lines, and RPZ
// zones.
//
// A rule is taken whole or not at all: a line with a modifier that is not a DNS modifier, an expression that
// RE2 does not know, or a pattern that can never meet a name is skipped, counted and named in the Report.
// Nothing in a list can make Parse fail or panic, and memory does not grow with the input: a line is read up
// to MaxLine, complaints are kept up to MaxComplaints, rules are handed out one at a time.
//
// Names come out in canonical wire form (package dnsname); Unicode names are converted to A-labels; a final
// dot, letter case, a byte-order mark and the kind of line end mean nothing.
//
// Not done here: matching (package filter), and deciding whether a list as a whole is fit for use; the
// Report says what that decision needs (NotAList, World, Truncated).
package rulelist

import (
	"bytes"
	"fmt"
	"io"
	"net/netip"
	"strings"
)

const (
	// MaxLine is the most bytes of a line that is read: the longest real hosts lines are a tenth of it.
	MaxLine = 64 << 10
	// MaxComplaints is how many complaints a Report keeps; the rest are only counted.
	MaxComplaints = 1000
	// MaxRules is how many rules one list may hold by default: three times the largest known list.
	MaxRules = 5_000_000
	// maxCostly is how many rules of a list may have conditions, rewrites or addresses, which take hundreds of
	// bytes each; real lists have a few hundred.
	maxCostly = 300_000
	// Version is raised when the same text gives other rules than before: what was compiled is compiled again.
	Version = 11
	// maxComplaintText is how much of a bad line a complaint quotes.
	maxComplaintText = 120
)

// A Form is the spelling of a rule that names a domain, as far as the spelling matters: it decides which
// names match, and $badfilter disables rules of the same spelling alone.
type Form uint8

// The forms. Those up to Simple-1 are told by a name and a Form alone.
const (
	Subtree       Form = iota // ||x^     the name and all below it
	SubtreeBoth               // ||x^|
	SubtreePipe               // ||x|
	Exact                     // |x^      the name alone
	ExactPipe                 // |x|
	ExactBoth                 // |x^|
	Below                     // .x^      all below the name
	BelowStar                 // *.x^
	BelowPipes                // ||*.x^
	HostNull4                 // 0.0.0.0 x, and a bare domain: the name alone
	HostLoop4                 // 127.0.0.1 x
	HostNull6                 // :: x
	HostLoop6                 // ::1 x
	ZoneExact                 // RPZ owner x
	ZoneBelow                 // RPZ owner *.x
	DnsmasqDomain             // address=/x/: the name and all below it

	Glob     // a pattern: see Rule.Glob
	Regex    // a regular expression: see Rule.Pattern
	HostAddr // a hosts line with an address worth answering: see Rule.Addr

	Simple = Glob // the number of forms that a name tells completely
)

// IsZone reports whether f is of a policy zone, whose longest match decides for the zone.
func (f Form) IsZone() bool { return f == ZoneExact || f == ZoneBelow }

// IsHost reports whether f is a line of a hosts file or a bare domain, which yield to every other rule.
func (f Form) IsHost() bool { return HostNull4 <= f && f <= HostLoop6 || f == HostAddr }

// A Scope is which names a Form covers, seen from its own.
type Scope uint8

// The scopes.
const (
	ScopeSubtree Scope = iota
	ScopeExact
	ScopeBelow
)

// Scope returns which names f covers; Glob and Regex have none and give ScopeSubtree.
func (f Form) Scope() Scope {
	switch f {
	case Exact, ExactPipe, ExactBoth, HostNull4, HostLoop4, HostNull6, HostLoop6, HostAddr, ZoneExact:
		return ScopeExact
	case Below, BelowStar, BelowPipes, ZoneBelow:
		return ScopeBelow
	}
	return ScopeSubtree
}

// A Rule is one rule of a list. It and the memory behind its slices are valid during the call it is handed
// to; its strings may be kept.
type Rule struct {
	Line      uint32 // from 1
	Form      Form
	Allow     bool // an exception
	Important bool
	Bad       bool // disables its twins instead of matching

	// Name is the rule's domain in canonical wire form; empty for Glob and Regex.
	Name []byte
	// Glob is the pattern in text form, set for every form but Regex if Form is at least Simple or Mods is not
	// nil. One whose Text is an IPv4 address matches names that contain it but, among addresses, that one
	// alone: 192.0.2.6 does not stand for 192.0.2.66.
	Glob Pattern
	// Pattern is the spelling without modifiers, in lower case (Regex: as written, without the slashes),
	// set where Glob is and for Regex: twins have equal ones.
	Pattern string
	Mods    *Mods // nil if there are none beyond the flags above
	// Addr is the address of a HostAddr line.
	Addr netip.Addr
	// Trigger tells what a rule is about if that is not the name asked for, and Prefix which addresses; Name is then
	// what AppendPrefix or AppendServer makes of them.
	Trigger Trigger
	Prefix  netip.Prefix
}

// A Trigger is what a rule is about.
type Trigger uint8

// The triggers.
const (
	ByName       Trigger = iota
	ByAnswer             // an address in an answer
	ByClient             // the address of who asks
	ByServer             // the name of a name server of a zone that an answer came through
	ByServerAddr         // the address of one
	NumTriggers
)

// A Pattern matches names in text form: lower case, no final dot.
type Pattern struct {
	Text  string // literal bytes and * for any run of bytes; empty matches everything
	Start Start
	End   bool // Text ends where the name ends
}

// Start is where in a name a Pattern may begin.
type Start uint8

// The starts.
const (
	Anywhere Start = iota
	AtName         // at the first label
	AtLabel        // at any label
)

// A Complaint names a line that was not used.
type Complaint struct {
	Line   uint32
	Text   string // the line, cut to a readable length
	Reason string
}

// A Report says what became of a list.
type Report struct {
	Title   string // the first "Title:" comment
	Lines   uint32
	Rules   int // rules handed out
	Skipped int // lines, or names of a hosts line, that were not used

	// Complaints are the first MaxComplaints of them.
	Complaints []Complaint
	// World names the rules that block every name, or nearly. They were handed out; a shared list that holds
	// one is better refused.
	World []Complaint
	// NotAList is not empty if the text is something else, and says what: an HTML page, a compressed file.
	NotAList string
	// Truncated reports that the limit of rules ended the reading.
	Truncated bool
}

func (r *Report) complain(line uint32, text []byte, reason string) {
	r.Skipped++
	if len(r.Complaints) < MaxComplaints {
		r.Complaints = append(r.Complaints, Complaint{line, clip(text), reason})
	}
}

func clip(text []byte) string {
	if len(text) > maxComplaintText {
		return strings.ToValidUTF8(string(text[:maxComplaintText]), "\uFFFD") + "..."
	}
	return strings.ToValidUTF8(string(text), "\uFFFD")
}

// Options tunes Parse. Zero fields mean the default stated on them.
type Options struct {
	// Rules is the most rules to hand out. Zero means MaxRules.
	Rules int
}

// Parse reads a list to its end and hands each rule to emit. The error is the reader's; what was read
// before it has been handed out.
func Parse(r io.Reader, o Options, emit func(*Rule)) (Report, error) {
	if o.Rules == 0 {
		o.Rules = MaxRules
	}
	p := &parser{emit: emit, max: o.Rules}
	err := p.read(r)
	p.endZone()
	return p.report, err
}

// ParseString is Parse for a text in memory.
func ParseString(text string, emit func(*Rule)) Report {
	rep, _ := Parse(strings.NewReader(text), Options{}, emit)
	return rep
}

type parser struct {
	emit    func(*Rule)
	max     int
	report  Report
	line    uint32
	rule    Rule
	name    [256]byte // what rule.Name points to
	seen    bool      // a line that is neither blank nor comment has been met
	costly  int       // rules that need more than a few bytes
	insts   int       // instructions of all expressions so far
	zone    zone
	records records
}

// read splits the input into lines at LF, CRLF or CR.
func (p *parser) read(r io.Reader) error {
	buf := make([]byte, 4<<10) // grows with what there is to read, so that small texts stay cheap
	start, end := 0, 0         // unread bytes
	skip := false              // inside a line that was too long
	var err error
	for {
		// Hand out the complete lines.
		for {
			i := lineEnd(buf[start:end])
			if i < 0 {
				break
			}
			next := start + i + 1
			if buf[start+i] == '\r' {
				if next == end && err == nil {
					break // an LF may follow
				}
				if next < end && buf[next] == '\n' {
					next++
				}
			}
			if skip {
				skip = false
			} else {
				p.do(buf[start : start+i])
			}
			if p.report.Truncated {
				return nil
			}
			start = next
		}
		if err != nil {
			if end > start && !skip {
				p.do(buf[start:end])
			}
			if err == io.EOF {
				return nil
			}
			return err
		}
		if end-start > MaxLine || skip {
			if !skip {
				p.do(buf[start:end])
			}
			skip = true
			// Keep a last CR: it may be half a line end.
			if end > start && buf[end-1] == '\r' {
				buf[0] = '\r'
				start, end = 0, 1
			} else {
				start, end = 0, 0
			}
		}
		if end == len(buf) && len(buf) < 4*MaxLine {
			buf = append(make([]byte, 0, 4*len(buf)), buf...)[:4*len(buf)]
		}
		copy(buf, buf[start:end])
		start, end = 0, end-start
		var n int
		for tries := 0; n == 0 && err == nil; tries++ {
			if tries == 100 {
				return io.ErrNoProgress
			}
			n, err = r.Read(buf[end:])
		}
		end += n
	}
}

func lineEnd(b []byte) int {
	i := bytes.IndexByte(b, '\n')
	line := b
	if i >= 0 {
		line = b[:i]
	}
	if j := bytes.IndexByte(line, '\r'); j >= 0 {
		return j
	}
	return i
}

var bom = []byte("\xEF\xBB\xBF")

// do judges one line.
func (p *parser) do(raw []byte) {
	p.line++
	p.report.Lines = p.line
	if p.line == 1 {
		if raw = bytes.TrimPrefix(raw, bom); notText(raw) {
			p.report.NotAList = "it begins with bytes that no text has; is it compressed, or UTF-16?"
		}
	}
	if len(raw) > MaxLine { // the buffer may hold more, and what a text means must not depend on how it comes
		p.report.complain(p.line, raw, fmt.Sprintf("longer than %d bytes", MaxLine))
		return
	}
	if p.zone.on {
		p.zoneLine(raw)
		return
	}
	text := trim(raw)
	if len(text) == 0 {
		return
	}
	switch text[0] {
	case '!', '#', ';':
		p.comment(text)
		return
	case '[':
		if text[len(text)-1] == ']' { // [Adblock Plus 2.0]
			return
		}
	case '<':
		if !p.seen && p.report.NotAList == "" {
			p.report.NotAList = "it begins like an HTML or XML page"
		}
	}
	p.seen = true
	if n := len(text); n > 3 && text[0] == '|' && text[1] == '|' && text[n-1] == '^' {
		// The commonest line of all, without detours.
		if w := hostName(&p.name, text[2:n-1]); w > 0 && text[n-2] != '.' {
			p.rule = Rule{Line: p.line, Form: Subtree, Name: p.name[:w]}
			p.hand()
			return
		}
	}
	if isZoneStart(text) {
		p.zone.on = true
		p.zoneLine(raw)
		return
	}
	for _, c := range text {
		if c < ' ' && c != '\t' || c == 0x7f {
			p.report.complain(p.line, text, "control character")
			return
		}
	}
	p.detect(text)
}

func notText(b []byte) bool {
	for _, magic := range []string{"\xFF\xFE", "\xFE\xFF", "\x1F\x8B", "PK\x03\x04", "\x28\xB5\x2F\xFD", "BZh", "\xFD7zXZ"} {
		if bytes.HasPrefix(b, []byte(magic)) {
			return true
		}
	}
	return false
}

// hand gives the rule being built to the caller.
func (p *parser) hand() {
	if p.report.Rules >= p.max {
		if !p.report.Truncated {
			p.report.Truncated = true
			p.report.complain(p.line, nil, fmt.Sprintf("the list has more than %d rules; the rest is not read", p.max))
		}
		return
	}
	if p.rule.Mods != nil || p.rule.Form == HostAddr {
		if !p.records.take(&p.rule) {
			p.report.complain(p.line, nil, fmt.Sprintf("an answer is made of %d records at most, and as many of the same name come before", MaxRecords))
			return
		}
		if p.costly++; p.costly > maxCostly {
			p.report.complain(p.line, nil, fmt.Sprintf("the list has more than %d rules with conditions, rewrites or addresses", maxCostly))
			return
		}
	}
	p.report.Rules++
	p.emit(&p.rule)
}

func (p *parser) complain(text []byte, reason string) { p.report.complain(p.line, text, reason) }

func (p *parser) comment(text []byte) {
	if p.report.Title != "" {
		return
	}
	text = trim(text[1:])
	if len(text) > 6 && strings.EqualFold(string(text[:6]), "title:") {
		p.report.Title = clip(trim(text[6:]))
	}
}

// detect tells the syntax of a line by its look.
func (p *parser) detect(text []byte) {
	if bytes.HasPrefix(text, []byte("@@")) || text[0] == '|' || text[0] == '/' || text[0] == '$' {
		p.adguard(text)
		return
	}
	if p.dnsmasq(text) {
		return
	}
	blank := bytes.IndexAny(text, " \t")
	hash := bytes.IndexByte(text, '#')
	if hash > 0 && (blank < 0 || hash < blank) {
		// Glued to the first word: a cosmetic rule of browsers, or a comment.
		if isCosmetic(text[hash:]) {
			p.complain(text, "cosmetic rule: nothing for DNS")
			return
		}
		if isName(text[:hash]) {
			text, blank = text[:hash], -1
		}
	}
	if blank > 0 {
		if addr, err := netip.ParseAddr(string(text[:blank])); err == nil {
			p.hosts(text, addr, text[blank:])
			return
		}
		if p.zoneRecord(text) {
			return
		}
		if trim(text[blank:])[0] != '#' || !isName(text[:blank]) {
			// Also modifiers with blanks in their values: $client=My Phone.
			p.adguard(text)
			return
		}
		text = text[:blank]
	}
	if p.domain(text) {
		return
	}
	p.adguard(text)
}

// isName reports whether a word is a domain, or one behind "*.": lists of these have comments at the ends of lines, where
// patterns have none.
func isName(word []byte) bool {
	if a, ok := ascii(string(word)); ok {
		word = []byte(a)
	}
	var buf [256]byte
	n := hostName(&buf, bytes.TrimPrefix(word, []byte("*.")))
	return n > 0 && isDomain(buf[:n])
}

// isCosmetic reports whether s, which begins with #, begins with a separator of cosmetic rules: ##, #@#,
// #?#, #$#, #%# and their exceptions.
func isCosmetic(s []byte) bool {
	for i := 1; i < len(s) && i <= 4; i++ {
		switch s[i] {
		case '#':
			return true
		case '@', '?', '$', '%':
		default:
			return false
		}
	}
	return false
}

func trim(b []byte) []byte { return bytes.Trim(b, " \t") }

// Line returns a line of a list by its number in Parse, without outer blanks; "" if there is none. This is how
// the text of a rule is found again: an index keeps list and line alone, the text of the list stays on disk.
func Line(text []byte, line uint32) string {
	at := 0
	for n := uint32(1); n < line; n++ {
		i := lineEnd(text[at:])
		if i < 0 {
			return ""
		}
		if at += i + 1; text[at-1] == '\r' && at < len(text) && text[at] == '\n' {
			at++
		}
	}
	end := len(text)
	if i := lineEnd(text[at:]); i >= 0 {
		end = at + i
	}
	if line == 0 {
		return ""
	}
	return string(trim(bytes.TrimPrefix(text[at:end], bom)))
}

// LineStarts returns where each line of a text begins, by the same line ends and so the same numbers as Parse.
func LineStarts(text []byte) []int {
	starts := []int{0}
	for at := 0; ; {
		i := lineEnd(text[at:])
		if i < 0 {
			return starts
		}
		at += i + 1
		if text[at-1] == '\r' && at < len(text) && text[at] == '\n' {
			at++
		}
		starts = append(starts, at)
	}
}
