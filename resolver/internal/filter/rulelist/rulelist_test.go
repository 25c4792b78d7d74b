package rulelist

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

var long = flag.Bool("long", false, "run the long tests too")

// show writes a rule as the tables here have it.
func show(r *Rule) string {
	var b strings.Builder
	if r.Allow {
		b.WriteString("@@")
	}
	switch r.Form {
	case Glob:
		fmt.Fprintf(&b, "glob %s%s", [...]string{"~", "|", "||"}[r.Glob.Start], r.Glob.Text)
		if r.Glob.End {
			b.WriteString("|")
		}
	case Regex:
		fmt.Fprintf(&b, "regex %s", r.Pattern)
	case ZoneExact, ZoneBelow:
		if r.Trigger != ByName {
			fmt.Fprintf(&b, "%s", [...]string{ByAnswer: "answer", ByClient: "client", ByServer: "server", ByServerAddr: "server"}[r.Trigger])
			if r.Trigger == ByServer {
				fmt.Fprintf(&b, " %s %q", [...]string{"subtree", "exact", "below"}[r.Form.Scope()], text(r.Name))
			} else {
				fmt.Fprintf(&b, " %v", r.Prefix)
			}
			break
		}
		fallthrough
	default:
		fmt.Fprintf(&b, "%s %s", [...]string{"subtree", "exact", "below"}[r.Form.Scope()], text(r.Name))
		if r.Form.IsHost() {
			b.WriteString(" host")
		}
		if r.Addr.IsValid() {
			fmt.Fprintf(&b, " %v", r.Addr)
		}
	}
	if r.Important {
		b.WriteString(" important")
	}
	if r.Bad {
		b.WriteString(" bad")
	}
	if r.Mods != nil {
		b.WriteString(" " + strings.Join(strings.Fields(string(r.Mods.AppendKey(nil))), " ; "))
	}
	return b.String()
}

func TestLines(t *testing.T) {
	tests := []struct {
		line string
		want string // rules joined by " + ", or "! reason" (a part of it), or "" for a line that is nothing
	}{
		// Patterns.
		{"||Example.ORG^", "subtree example.org"},
		{"@@||example.org^|", "@@subtree example.org"},
		{"||example.org|", "subtree example.org"},
		{"||example.org/*", "subtree example.org"},
		{"|example.org^", "exact example.org"},
		{"*.example.org^", "below example.org"},
		{".example.org^", "below example.org"},
		{"||*.example.org^", "below example.org"},
		{"*.example.org", "glob ~.example.org"},
		{"||example.org", "glob ||example.org"},
		{"://ads.example^", "glob |ads.example|"},
		{"/ads.", "glob |ads."},
		{"-ads-", "glob ~-ads-"},
		{"||ad**s.example^", "glob ||ad*s.example|"},
		{"||example.*^", "glob ||example."},
		{"ex_ample.org", "glob ~ex_ample.org"},
		{"192.0.2.6", "glob ~192.0.2.6"},
		{"2001:DB8:0::6", "exact 2001:db8::6"},
		{"||2001:db8::6^", "exact 2001:db8::6"},
		{"||*^", "glob ~|"},
		{"||пример.рф^", "subtree xn--e1afmkfd.xn--p1ai"},
		{"||при*.рф^", "! A-label"},
		{"||example.org/ads.js", "! path"},
		{"||example.org:8080^", "! port"},
		{"https://example.org^", "! URL"},
		{"||example^org^", "! inside a name"},
		{"||.example.org^", "! begins with a dot"},
		{"||example.org.^", "! ends with a dot"},
		{"||a..b^", "! empty label"},
		{"||example.org^ # why", "! mark inside"},
		{"*", "! every name"}, {"||", "! every name"}, {"^", "! every name"}, {"://", "! every name"},
		{"/", "! three characters"}, {"//", "! three characters"}, {".", "! three characters"}, {"a*", "! three characters"},
		{"*$dnsrewrite=192.0.2.1", "! every name"},
		{"|a", "! three characters"}, {"a^", "glob ~a|"}, {"a|", "glob ~a|"}, {"|a|", "exact a"}, {"||a", "glob ||a"},
		{"*.*", "glob ~."}, {"*e*", "glob ~e"}, {"a.*", "glob ~a."}, {"*/*", "glob ~|"}, {"**$dnstype=A", "glob ~ 1"},
		{"||^", "! matches nothing"}, {"|^|", "! matches nothing"},
		{"||example.org^^", "glob ||example.org|"}, {"example.org^*|", "glob ~example.org|"}, {"example.org*^*", "glob ~example.org"},
		{"||example.org||", "! mark inside"}, {"||example.org|*", "! mark inside"}, {"||example.org^|*", "! mark inside"},
		{"/ad_*.", "glob |ad_*."}, {"//ads.", "glob |ads."}, {"/*s.", "glob ~s."}, {"/a/b.", "! path"},
		{"@@2001:db8::6", "@@exact 2001:db8::6"}, {"2001:db8::6^", "exact 2001:db8::6"}, {"*2001:db8::6", "! port"},
		{"||exam$ple.org^$important", "glob ||exam$ple.org| important"}, {`||exam\$ple.org^`, "glob ||exam$ple.org|"}, {"||a.example^$b.c", "! not a modifier"},
		{"example.org^ # why", "! inside"}, {"*.example.org # why", "glob ~.example.org"}, {"*.example.org#why", "glob ~.example.org"},
		{"192.0.2 # why", "! blank"}, {"ads.*#why", "! has a '#'"}, {"bücher.example # why", "exact xn--bcher-kva.example host"},
		{"||" + strings.Repeat("a", 2000) + "^", "! longer than"},
		{"@@", "! empty rule"},
		// Expressions.
		{`/^ads?\d*\./`, `regex ^ads?\d*\.`},
		{`/a$/$important`, `regex a$ important`},
		{`/^a{1,3}\.example$/$dnstype=AAAA`, `regex ^a{1,3}\.example$ 28`},
		{`/^(?!good)x/`, "! expression"},
		{`/(a)\1/`, "! expression"},
		{`/[/`, "! expression"},
		{`/(\w{1,500}){2}[a-z]{1,900}x{900}/`, "! costs too much"},
		{`/^https?:\/\/ads/`, "! for URLs"},
		// Modifiers.
		{"||a.example^$important,badfilter", "subtree a.example important bad"},
		{"||a.example^$dnstype=aaaa|~A", "subtree a.example 28 ; 1"},
		{"||a.example^$dnstype=A|", "! empty value"},
		{"||a.example^$dnstype=TYPE65", "! record type"},
		{"||a.example^$dnstype", "! needs a value"},
		{`||a.example^$client=~'Mary\'s\, box'|10.0.0.7/8|10.0.0.7`, `subtree a.example 10.0.0.0/8 ; "Mary's, ; box"`},
		{"||a.example^$ctag=b|a|~c", "subtree a.example a ; b ; c"},
		{"||a.example^$ctag=|b||a|", "subtree a.example a ; b"}, {"||a.example^$ctag=|", "! empty value"}, {"||a.example^$ctag=~", "! empty value"},
		{"||a.example^$client=|b||a|", `subtree a.example "a""b"`}, {"||a.example^$client=||", "! empty value"}, {"||a.example^$client=a|~", "! empty value"},
		{`||a.example^$client='192.0.2.7'|"10.0.0.0/8"`, "subtree a.example 10.0.0.0/8 ; 192.0.2.7/32"}, {`||a.example^$client='a\|'`, `subtree a.example "a|"`},
		{"||a.example^$ctag=A-B", "! not a tag"},
		{"*$denyallow=COM|ok.example", "glob ~ com ; ok.example"},
		{"*$denyallow=~x.example", "! negated"}, {"*$denyallow=a_b.example", "! host name"}, {"*$denyallow=192.0.2.1", "! host name"}, {"*$denyallow=c", "! host name"},
		{"*$denyallow=x.*|bücher.example|B.example.", "glob ~ x.* ; b.example ; xn--bcher-kva.example"}, {"*$denyallow=x.example|", "! empty value"},
		{"//$dnstype=A", "regex  1"},
		{"||a.example^$third-party", "! $third-party is not a modifier"},
		{"||a.example^$important,~script", "! $~script is not a modifier"},
		{"||a.example^$dnsrewrite=REFUSED", "subtree a.example {false ; 5 ; 0 ; }"},
		{"||a.example^$dnsrewrite=REFUSE", "! is not NOERROR"},
		{"||a.example^$dnsrewrite=B.example.", "subtree a.example {false ; 0 ; b.example ; 0 ; }"},
		{"||a.example^$dnsrewrite=NOERROR;MX;10  mail.example", "subtree a.example {false ; 0 ; 15 ; 10 ; mail.example}"},
		{"||a.example^$dnsrewrite=NOERROR;MX;010 mail.example.", "subtree a.example {false ; 0 ; 15 ; 10 ; mail.example.}"},
		{"||a.example^$dnsrewrite=NOERROR;PTR;Host.Example", "subtree a.example {false ; 0 ; 12 ; Host.Example.}"},
		{"||a.example^$dnsrewrite=notimpl;;", "subtree a.example {false ; 4 ; 0 ; }"},
		{`||a.example^$dnsrewrite=NOERROR;TXT;a\,b\$c\"d\\e\|f`, `subtree a.example {false ; 0 ; 16 ; a,b$c\"d\\e\|f}`},
		{"||a.example^$dnsrewrite=NOERROR;A;::1", "! not an address"},
		{"||a.example^$dnsrewrite=NOERROR;A", "! one semicolon"},
		{"||a.example^$dnsrewrite=NOERROR;HTTPS;1 . alpn=h3 colour=red", "! unknown service parameter"},
		{"||a.example^$dnsrewrite=NOERROR;SVCB;32 h.example alpn=h3 dohpath=/dns-query{?dns}", "subtree a.example {false ; 0 ; 64 ; 32 ; h.example ; alpn=h3 ; dohpath=/dns-query{?dns}}"},
		// Hosts lines and domains.
		{"0.0.0.0\tA.example  b.example. # c.example", "exact a.example host + exact b.example host"},
		{"192.0.2.1 a.example", "exact a.example host 192.0.2.1"},
		{"fe80::1%lo0 localhost", "exact localhost host fe80::1%lo0"},
		{"0.0.0.0 a.example bad!name b.example", "exact a.example host + exact b.example host + ! not a host name"},
		{"0.0.0.0 # nothing", "! without a name"},
		{"0.0.0.0", "! without a name"},
		{"300.1.1.1 a.example", "! blank"},
		{"a.example", "exact a.example host"},
		{"a.example.", "exact a.example host"},
		{"ads.", "glob ~ads."},
		{"bücher.example", "exact xn--bcher-kva.example host"},
		{"a.example#why", "exact a.example host"},
		{"a.example # why", "exact a.example host"},
		{"zip", "exact zip host"},
		{"example.c", "glob ~example.c"},
		// Comments and other people's syntax.
		{"! comment", ""}, {"# comment", ""}, {"[Adblock Plus 2.0]", ""}, {"  ", ""},
		{"example.org##.ad", "! cosmetic"}, {"example.org#@#.ad", "! cosmetic"}, {"example.org$$script[x]", "! cosmetic"},
		{"a\x00b.example", "! control"},
		// dnsmasq.
		{"address=/a.example/b.example/0.0.0.0", "subtree a.example + subtree b.example"},
		{"address=/a.example/#", "subtree a.example"},
		{"server=/a.example/", "subtree a.example"},
		{"local=/a.example/", "subtree a.example"},
		{"address=/a.example/192.0.2.1", "subtree a.example {false ; 0 ; 1 ; 192.0.2.1}"},
		{"server=/a.example/192.0.2.1", "! forwarder"},
		{"address=/.a.example/..b.example/0.0.0.0", "subtree a.example + subtree b.example"},
		{"address=/*.a.example/*b.example/#", "below a.example + glob ~b.example|"},
		{"address=/*.a.example/*b.example/192.0.2.1", "below a.example {false ; 0 ; 1 ; 192.0.2.1} + glob ~b.example| {false ; 0 ; 1 ; 192.0.2.1}"},
		{"local=/*/", "! not a host name"}, {"local=/a*.example/", "! not a host name"}, {"address=/./0.0.0.0", "! not a host name"},
		// Records of a policy zone.
		{"a.example CNAME .", "exact a.example"},
		{"*.a.example 300 IN CNAME *.", "below a.example"},
		{"a.example. IN CNAME rpz-passthru.", "@@exact a.example"},
		{"a.example CNAME walled.example.", "exact a.example {false ; 0 ; walled.example ; 0 ; }"},
		{"a.example CNAME rpz-drop.", "exact a.example {false ; 0 ; 0 ; } ; drop"},
		{"a.example CNAME rpz-tcp-only.", "exact a.example {false ; 0 ; 0 ; } ; tcp-only"},
		{"a.example CNAME A.example.", "@@exact a.example"},
		{"*.a.example CNAME rpz-passthru.", "@@below a.example"},
		{"32.1.2.0.192.rpz-ip CNAME .", "answer 192.0.2.1/32"},
		{"24.0.2.0.192.rpz-ip CNAME rpz-passthru.", "@@answer 192.0.2.0/24"},
		{"32.zz.db8.2001.rpz-ip CNAME *.", "answer 2001:db8::/32"},
		{"128.1.zz.db8.2001.rpz-ip CNAME .", "answer 2001:db8::1/128"},
		{"128.1.zz.rpz-ip CNAME .", "answer ::1/128"},
		{"128.57.zz.1.0.db8.2001.rpz-client-ip CNAME .", "client 2001:db8:0:1::57/128"},
		{"48.0.0.0.0.0.3.db8.2001.rpz-ip CNAME .", "answer 2001:db8:3::/48"},
		{"8.0.0.0.10.rpz-client-ip CNAME rpz-passthru.", "@@client 10.0.0.0/8"},
		{"24.1.2.0.192.rpz-ip CNAME .", "! beyond its length"},
		{"33.1.2.0.192.rpz-ip CNAME .", "! not a prefix"},
		{"0.0.0.0.0.rpz-ip CNAME .", "! not a prefix"},
		{"x.1.2.0.192.rpz-ip CNAME .", "! not a prefix"},
		{"rpz-ip.rpz-ip CNAME .", "! not a prefix"},
		{"128.zz.zz.rpz-ip CNAME .", "! not a prefix"},
		{"24.0.2.0.192.rpz-ip CNAME rpz-drop.", "answer 192.0.2.0/24 {false ; 0 ; 0 ; } ; drop"},
		{"24.0.2.0.192.rpz-ip CNAME x.example.", "answer 192.0.2.0/24 {false ; 0 ; x.example ; 0 ; }"},
		{"24.0.2.0.192.rpz-client-ip CNAME rpz-tcp-only.", "client 192.0.2.0/24 {false ; 0 ; 0 ; } ; tcp-only"},
		{"ns.example.rpz-nsdname CNAME .", `server exact "ns.example.\x00\x03"`},
		{"NS.Example.RPZ-NSDNAME. CNAME *.", `server exact "ns.example.\x00\x03"`},
		{"*.example.rpz-nsdname CNAME rpz-passthru.", `@@server below "example.\x00\x03"`},
		{"*.rpz-nsdname CNAME rpz-passthru.", `@@server below "\x00\x03"`},
		{"ns.example.rpz-nsdname CNAME rpz-drop.", `server exact "ns.example.\x00\x03" {false ; 0 ; 0 ; } ; drop`},
		{"rpz-nsdname CNAME .", "! not a host name"},
		{"rpz-nsip CNAME .", "! not a prefix"},
		{"a.rpz-something CNAME .", "! unknown trigger"},
		{"*.*.rpz-nsdname CNAME .", "! not a host name"},
		{strings.Repeat("a23456789.", 25) + "rpz-nsdname CNAME .", "! not a host name"},
		{"24.0.2.0.192.rpz-nsip CNAME .", "server 192.0.2.0/24"},
		{"32.zz.db8.2001.rpz-nsip CNAME rpz-passthru.", "@@server 2001:db8::/32"},
		{"24.1.2.0.192.rpz-nsip CNAME .", "! beyond its length"},
	}
	sum := fnv.New64()
	defer func() {
		const want = 0xf01cf4cd1230025d
		if sum.Sum64() != want && !t.Failed() {
			t.Errorf("these lines give other rules than before, or there are more of them: %#x. If any gives others, raise Version, so that kept indexes are made anew; then put the number here", sum.Sum64())
		}
	}()
	for _, tt := range tests {
		var got []string
		rep := ParseString(tt.line, func(r *Rule) { got = append(got, show(r)) })
		for _, c := range rep.Complaints {
			got = append(got, "! "+c.Reason)
		}
		s := strings.Join(got, " + ")
		fmt.Fprintln(sum, tt.line, s)
		ok := s == tt.want
		if rules, reason, cut := strings.Cut(tt.want, "! "); cut {
			ok = strings.HasPrefix(s, rules+"! ") && strings.Contains(s[len(rules):], reason)
		}
		if !ok {
			t.Errorf("%q is %q, want %q", tt.line, s, tt.want)
		}
		if rep.Skipped != len(rep.Complaints) || rep.Rules+rep.Skipped != len(got) {
			t.Errorf("%q: %d rules and %d skipped, but %q", tt.line, rep.Rules, rep.Skipped, got)
		}
	}
}

func TestZone(t *testing.T) {
	zone := `$TTL 300
$ORIGIN rpz.example.
@ SOA localhost. root.localhost. (
	1 ; serial
	3600 60 86400 300 )
	NS localhost.
; comment
a.example CNAME .
	IN CNAME *.
*.b.example.rpz.example. IN 60 CNAME rpz-passthru.
c.example A 192.0.2.1
  AAAA 2001:db8::1
d.example TXT "hello; world"
24.0.2.0.192.rpz-ip CNAME .
ns.bad.example.rpz-nsdname CNAME .
*.bad.example.rpz-nsdname.RPZ.example. A 192.0.2.2
32.2.2.0.192.rpz-client-ip TXT "who are you"
`
	want := []string{"8 exact a.example", "9 exact a.example", "10 @@below b.example", "11 exact c.example {false ; 0 ; 1 ; 192.0.2.1}",
		"12 exact c.example {false ; 0 ; 28 ; 2001:db8::1}", "13 exact d.example {false ; 0 ; 16 ; hello; ; world}", "14 answer 192.0.2.0/24", `15 server exact "ns.bad.example.\x00\x03"`,
		`16 server below "bad.example.\x00\x03" {false ; 0 ; 1 ; 192.0.2.2}`, "17 client 192.0.2.2/32 {false ; 0 ; 16 ; who ; are ; you}"}
	var got []string
	rep := ParseString(zone, func(r *Rule) { got = append(got, fmt.Sprint(r.Line, " ", show(r))) })
	if !slices.Equal(got, want) {
		t.Errorf("rules %q, want %q", got, want)
	}
	if len(rep.Complaints) != 0 {
		t.Errorf("complaints %+v", rep.Complaints)
	}
}

// TestZoneWorld: triggers that nearly every answer meets are named as rules that block the world, unless they allow.
func TestZoneWorld(t *testing.T) {
	for line, want := range map[string]int{
		"*.rpz-nsdname CNAME .": 1, "*.rpz-nsdname CNAME rpz-drop.": 1, "*.rpz-nsdname CNAME rpz-passthru.": 0, "*.com.rpz-nsdname CNAME .": 0,
		"1.0.0.0.128.rpz-ip CNAME .": 1, "3.zz.2000.rpz-nsip CNAME .": 1, "8.0.0.0.10.rpz-ip CNAME .": 0, "1.0.0.0.0.rpz-client-ip CNAME rpz-passthru.": 0,
	} {
		if rep := ParseString(line, func(*Rule) {}); len(rep.World) != want || rep.Rules != 1 {
			t.Errorf("%s: %+v", line, rep)
		}
	}
}

// TestZoneFiles reads zones as people, programs and enemies write them.
func TestZoneFiles(t *testing.T) {
	for _, tt := range []struct {
		name, text, want string // rules and complaints by line
	}{
		{"nested origins, as named-compilezone writes them", "$ORIGIN .\n$TTL 300\nrpz.example 60 IN SOA a. b. (\n1 2 3 4 5 )\n NS localhost.\n$ORIGIN com.rpz.example.\nbad CNAME .\n*.bad CNAME .\n$ORIGIN rpz.example.\norg CNAME .\n$ORIGIN example.org.rpz.example.\n$ORIGIN www\n@ CNAME .\n",
			"7 exact bad.com, 8 below bad.com, 10 exact org, 13 exact www.example.org"},
		{"absolute owners, as a transfer has them", "rpz.example. 60 IN SOA a. b. 1 2 3 4 5\nrpz.example. 60 IN NS a.\nbad.com.rpz.example. 60 IN CNAME .\n*.BAD.com.RPZ.example. 60 IN CNAME *.\n24.0.2.0.192.rpz-ip.rpz.example. 60 IN CNAME .\nns.bad.rpz-nsdname.rpz.example. 60 IN CNAME .\nrpz.example. 60 IN SOA a. b. 1 2 3 4 5\n",
			`3 exact bad.com, 4 below bad.com, 5 answer 192.0.2.0/24, 6 server exact "ns.bad.\x00\x03"`},
		{"owners outside", "$ORIGIN rpz.example.\n@ SOA a. b. 1 2 3 4 5\nbad.com. CNAME .\nbad.com CNAME .\nxrpz.example. CNAME .\n", "! 3 outside, 4 exact bad.com, ! 5 outside"},
		{"no name", "$TTL 1h\n@ SOA a. b. 1 2 3 4 5\n NS a.\nbad.com. CNAME .\nworse.com CNAME .\n", "4 exact bad.com, 5 exact worse.com"},
		{"two zones", "$ORIGIN a.\n@ SOA a. b. 1 2 3 4 5\nx CNAME .\n$ORIGIN b.\n@ SOA a. b. 1 2 3 4 5\ny CNAME .\n", "3 exact x, ! 5 second zone, ! 6 outside"},
		{"no owner", "$TTL 60\n CNAME .\n", "! 2 without an owner"},
		{"TTLs and classes", "$TTL 1w2d\na 1h CNAME .\nb IN 2H30M CNAME .\nc 99999999999999999999 IN CNAME .\nd CH CNAME .\ne 1x CNAME .\nf CLASS1 CNAME .\n",
			"2 exact a, 3 exact b, 4 exact c, ! 5 CH is not, ! 6 1X is not, ! 7 CLASS1 is not"},
		{"directives", "$TTL 1\n$INCLUDE /etc/passwd\n$GENERATE 1-1000000 a$ CNAME .\n$ORIGIN\na CNAME .\n", "! 2 $INCLUDE is not, ! 3 $GENERATE is not, ! 4 $ORIGIN without, 5 exact a"},
		{"types that are no action", "$TTL 1\na NS b.\na DNAME b.\na RRSIG A 1 2 3\na DS 1 2 3 4\na CAA 0 issue x\na TYPE1 x\n", "! 2 no action, ! 3 no action, ! 4 no action, ! 5 no action, ! 6 not supported, ! 7 not the name"},
		{"data that is none", "$TTL 1\na A 1.2.3\na AAAA 1.2.3.4\na A\na MX 10\na CNAME 1.2.3.4\na CNAME a..b.\na TXT \"x\na TXT x\\\n", "! 2 not an address, ! 3 not an address, ! 4 not a record, ! 5 PREFERENCE, ! 6 needs a record, ! 7 not a host name, ! 8 data of a TXT, ! 9 data of a TXT"},
		{"texts", "$TTL 1\na TXT \"x; y  z\" \"(\" ; c\nb TXT un quoted\nc TXT \"a\\\"b\\065\"\n", "2 exact a {false ; 0 ; 16 ; x; ; y ; z(}, 3 exact b {false ; 0 ; 16 ; unquoted}, 4 exact c {false ; 0 ; 16 ; a\"bA}"},
		{"parentheses", "$TTL 1\na CNAME ( . )\nb TXT ( \"a\"\n\"b\" )\nc CNAME .\nd CNAME (\n", "2 exact a, ! 3 several lines, 5 exact c, ! 6 never closed, ! 6 not a record"},
		{"below a garden", "$TTL 1\n*.a CNAME *.garden.example.\nb CNAME *.\nc CNAME *.*.d.\n", "2 below a {false ; 0 ; *.garden.example ; 0 ; }, 3 exact b, ! 4 not a host name"},
		{"wildcards", "$TTL 1\n* CNAME .\na.*.b CNAME .\n*.*.b CNAME .\n*b CNAME .\n*.b CNAME .\n", "! 2 not a host name, ! 3 not a host name, ! 4 not a host name, ! 5 not a host name, 6 below b"},
		{"long names", "$TTL 1\n" + strings.Repeat("a.", 126) + "a CNAME .\n" + strings.Repeat("a.", 127) + "a CNAME .\n" + strings.Repeat("a", 63) + ".x CNAME .\n" + strings.Repeat("a", 64) + ".x CNAME .\n",
			"2 exact " + strings.Repeat("a.", 126) + "a, ! 3 not a host name, 4 exact " + strings.Repeat("a", 63) + ".x, ! 5 not a host name"},
	} {
		var got []string
		rep := ParseString(tt.text, func(r *Rule) { got = append(got, fmt.Sprintf("%03d %s", r.Line, show(r))) })
		for _, c := range rep.Complaints {
			got = append(got, fmt.Sprintf("%03d ! %s", c.Line, c.Reason))
		}
		slices.Sort(got)
		want := strings.Split(tt.want, ", ")
		ok := len(got) == len(want)
		for i := range min(len(got), len(want)) {
			line, what, _ := strings.Cut(strings.TrimLeft(got[i], "0"), " ")
			if reason, bad := strings.CutPrefix(want[i], "! "); bad {
				n, r, _ := strings.Cut(reason, " ")
				ok = ok && n == line && strings.HasPrefix(what, "! ") && strings.Contains(what, r)
			} else {
				ok = ok && want[i] == line+" "+what
			}
		}
		if !ok {
			t.Errorf("%s:\n got %q\nwant %q", tt.name, got, want)
		}
	}
}

// TestRecords: of more records than an answer can be made of, the list's author is told.
func TestRecords(t *testing.T) {
	many := func(line string) string {
		var b strings.Builder
		b.WriteString("$TTL 1\n")
		for i := range 20 {
			fmt.Fprintf(&b, line+"\n", i)
		}
		return b.String()
	}
	rewrites := strings.TrimPrefix(many("||x.example^$dnsrewrite=192.0.2.%d"), "$TTL 1\n")
	for text, used := range map[string]int{
		many("x.example A 192.0.2.%d"): 16, many("x.example TXT %d"): 16, many("x.rpz-nsdname A 192.0.2.%d"): 16, many("x%d.example A 192.0.2.1"): 20,
		many("x.example CNAME . ; %d"): 20, rewrites: 16, strings.ReplaceAll(rewrites, "||", "@@||"): 20, strings.ReplaceAll(rewrites, "$", "$badfilter,"): 20,
		strings.TrimPrefix(many("192.0.2.%d x.example"), "$TTL 1\n"):                               16,
		strings.TrimPrefix(many("||x^$client=c%d,dnsrewrite=192.0.2.1"), "$TTL 1\n"):               20,
		rewrites + strings.TrimPrefix(many("||x.example^$dnstype=~A,dnsrewrite=::%d"), "$TTL 1\n"): 32,
	} {
		rep := ParseString(text, func(*Rule) {})
		lines := strings.Count(strings.TrimPrefix(text, "$TTL 1\n"), "\n")
		if rep.Rules != used || rep.Skipped != lines-used || rep.Skipped > 0 && !strings.Contains(rep.Complaints[0].Reason, "16 records") {
			t.Errorf("%.60q: %d rules of %d lines, %+v", text, rep.Rules, lines, rep.Complaints)
		}
	}
}

// TestLineEnds reads the same lines with each line end, a byte-order mark, and in pieces of every size.
func TestLineEnds(t *testing.T) {
	lines := []string{"||a.example^", "", "! x", "b.example", "||c.example^$nonsense", "0.0.0.0 d.example"}
	want := "1 subtree a.example,4 exact b.example host,6 exact d.example host, skipped 5"
	for _, end := range []string{"\n", "\r\n", "\r"} {
		for _, bom := range []string{"", "\uFEFF"} {
			for _, last := range []string{"", end} {
				in := bom + strings.Join(lines, end) + last
				for name, r := range map[string]io.Reader{
					"whole": strings.NewReader(in), "bytes": iotest.OneByteReader(strings.NewReader(in)),
					"data with EOF": iotest.DataErrReader(strings.NewReader(in)),
				} {
					got := ""
					rep, err := Parse(r, Options{}, func(r *Rule) { got += fmt.Sprint(r.Line, " ", show(r), ",") })
					for _, c := range rep.Complaints {
						got += fmt.Sprint(" skipped ", c.Line)
					}
					if err != nil || got != want {
						t.Errorf("%q %s: %q, %v, want %q", in, name, got, err, want)
					}
				}
				for i, l := range lines {
					if got := Line([]byte(in), uint32(i+1)); got != l {
						t.Errorf("%q: line %d is %q", in, i+1, got)
					}
				}
				if got := Line([]byte(in), 0) + Line([]byte(in), 99); got != "" {
					t.Errorf("%q: no line is %q", in, got)
				}
				starts := LineStarts([]byte(in))
				if !strings.HasPrefix(in[starts[5]:], "0.0.0.0") {
					t.Errorf("%q: line 6 begins with %q", in, in[starts[5]:])
				}
			}
		}
	}
}

func TestTitleAndKind(t *testing.T) {
	rep := ParseString("! Title:  My Title  \n! Title: another\n||a.example^\n# more", func(*Rule) {})
	if rep.Title != "My Title" || rep.Rules != 1 || rep.NotAList != "" {
		t.Errorf("%+v", rep)
	}
	for _, s := range []string{"<!DOCTYPE html>\n<html>", "\n\n <html>", "\x1f\x8b\x08\x00abc", "\xff\xfe|\x00|\x00"} {
		if rep := ParseString(s, func(*Rule) {}); rep.NotAList == "" {
			t.Errorf("%q passes for a list", s)
		}
	}
}

// TestWorld names rules that block every name, and no others.
func TestWorld(t *testing.T) {
	for line, world := range map[string]bool{
		"||*^": true, "***": true, "/.*/": true, "/^/": true, "/^.+$/": true, "/(x|.*)/": true,
		"*$dnstype=HTTPS": false, "*$denyallow=com": false, "@@||*^": false, "||*^$badfilter": false,
		"*$dnstype=A": true, "*$dnstype=A|AAAA": true, "||*^$dnstype=~TXT": true, "/./$dnstype=A": true,
		"*$dnstype=~A": false, "*$dnstype=A,client=10.0.0.1": false, "/[a-z]/$denyallow=com": false,
		"/[a-z]/": true, `/\./`: true, `/\w/`: true, "/^[a-z0-9.-]+$/": true, "/^.{1,255}$/": true, "/[aeiou]/": true,
		`/^([^.]+\.)+[a-z]+$/`: true, `/^[^.]+\.[^.]+$/`: false, `/\.(com|org|net|uk)$/`: false, "/[0-9]/": false, "/e/": false,
		"*.*": true, "||*.": true, "@@*.*": false, "*/*": true, "e*^": false, "*.*$client=a": false, "a.*": false,
		"||com^": false, "/^x*$/": false, "/^.$/": false, "/ad/": false, `/^(.*\.)?ads\.com$/`: false,
	} {
		if rep := ParseString(line, func(*Rule) {}); (len(rep.World) == 1) != world {
			t.Errorf("%s: %+v, want %v", line, rep.World, world)
		}
	}
}

// TestHostile reads inputs made to exhaust, and counts what is kept of them.
func TestHostile(t *testing.T) {
	t.Run("ten megabyte line", func(t *testing.T) {
		in := io.MultiReader(strings.NewReader("||a.example^\n"), &repeat{text: "||x.example^ ", n: 800_000}, strings.NewReader("\r\n||b.example^\n"))
		var got []string
		rep, err := Parse(in, Options{}, func(r *Rule) { got = append(got, fmt.Sprint(r.Line, show(r))) })
		if err != nil || !slices.Equal(got, []string{"1subtree a.example", "3subtree b.example"}) {
			t.Errorf("%q, %v", got, err)
		}
		if len(rep.Complaints) != 1 || rep.Complaints[0].Line != 2 || len(rep.Complaints[0].Text) > 200 {
			t.Errorf("complaints %.300v", rep.Complaints)
		}
	})
	t.Run("a long line in one piece", func(t *testing.T) {
		for _, end := range []string{"", "\n", "\r\n||b.example^"} {
			for _, n := range []int{MaxLine + 1, 2 * MaxLine, 5 * MaxLine} {
				rep := ParseString("||"+strings.Repeat("*", n-2)+end, func(r *Rule) {
					if r.Line == 1 {
						t.Errorf("a rule of %d bytes", n)
					}
				})
				if len(rep.Complaints) != 1 || rep.Complaints[0].Reason != "longer than 65536 bytes" {
					t.Errorf("%d bytes and %q: %.300v", n, end, rep.Complaints)
				}
			}
		}
	})
	t.Run("values longer than a record", func(t *testing.T) {
		for line, want := range map[string]string{
			"||a.example^$dnsrewrite=NOERROR;TXT;" + strings.Repeat("x", maxValue):                    "",
			"||a.example^$dnsrewrite=NOERROR;TXT;" + strings.Repeat("x", maxValue+1):                  "the limit is 16384",
			"||a.example^$dnsrewrite=NOERROR;HTTPS;1 . alpn=" + strings.Repeat("h", 60<<10):           "the limit is 16384",
			"$TTL 60\n@ SOA . . 1 1 1 1 1\na.example TXT \"" + strings.Repeat("x", maxValue+1) + "\"": "the limit is 16384",
		} {
			rep := ParseString(line, func(*Rule) {})
			if want == "" && len(rep.Complaints) > 0 || want != "" && (len(rep.Complaints) != 1 || !strings.Contains(rep.Complaints[0].Reason, want)) {
				t.Errorf("%.60s: %.300v", line, rep.Complaints)
			}
		}
	})
	t.Run("bad lines without end", func(t *testing.T) {
		rep, err := Parse(&repeat{text: "||bad^rule^\n", n: 300_000}, Options{}, func(*Rule) { t.Error("a rule") })
		if err != nil || rep.Skipped != 300_000 || len(rep.Complaints) != MaxComplaints {
			t.Errorf("skipped %d, kept %d, %v", rep.Skipped, len(rep.Complaints), err)
		}
	})
	t.Run("too many rules", func(t *testing.T) {
		n := 0
		rep, err := Parse(&repeat{text: "||a.example^\n", n: 1 << 40}, Options{Rules: 1000}, func(*Rule) { n++ })
		if err != nil || n != 1000 || !rep.Truncated || rep.Rules != 1000 {
			t.Errorf("%d rules, %+v, %v", n, rep, err)
		}
	})
	t.Run("costly expressions", func(t *testing.T) {
		n := 0
		rep := ParseString(strings.Repeat("/a{900}b/\n", 2000), func(*Rule) { n++ })
		if n == 0 || n > maxAllInsts/900 || rep.Rules+rep.Skipped != 2000 {
			t.Errorf("%d expressions taken, %d skipped", n, rep.Skipped)
		}
	})
	t.Run("ten thousand alternatives", func(t *testing.T) {
		var short, long strings.Builder
		for i := range 10_000 {
			fmt.Fprintf(&long, "|x%d", i)
		}
		for i := range 160 {
			fmt.Fprintf(&short, "|x%cy%c", 'a'+i%26, 'a'+i/26)
		}
		rep := ParseString("/"+long.String()[1:]+"/\n/("+short.String()[1:]+"){2,40}/\n||a.example^", func(*Rule) {})
		if rep.Rules != 1 || rep.Skipped != 2 || !strings.Contains(rep.Complaints[0].Reason, "1024") || !strings.Contains(rep.Complaints[1].Reason, "the limit is 1000") {
			t.Errorf("%d rules, complaints %.300v", rep.Rules, rep.Complaints)
		}
	})
	t.Run("conditions without end", func(t *testing.T) {
		n := 0
		rep, err := Parse(&repeat{text: "||a.example^$client=x\n", n: maxCostly + 5}, Options{}, func(*Rule) { n++ })
		if err != nil || n != maxCostly || rep.Skipped != 5 || !strings.Contains(rep.Complaints[0].Reason, "more than 300000 rules with") {
			t.Errorf("%d rules, %d skipped, %v", n, rep.Skipped, err)
		}
	})
	t.Run("four hundred megabytes", func(t *testing.T) {
		if !*long {
			t.Skip("with -long")
		}
		// Of short rules the number is bounded, and then the reading stops; long lines and comments are read through.
		n := 0
		read := &repeat{text: "||x1.example^\n", n: 30 << 20}
		rep, err := Parse(read, Options{}, func(*Rule) { n++ })
		if err != nil || n != MaxRules || !rep.Truncated || !strings.Contains(rep.Complaints[0].Reason, "more than 5000000 rules") || read.n < 20<<20 {
			t.Errorf("%d rules, %d lines left, %+v, %v", n, read.n, rep, err)
		}
	})
	t.Run("unclosed parenthesis", func(t *testing.T) {
		rep := ParseString("$TTL 1\n@ SOA a. b. ( 1 2 3\na.example CNAME .\n", func(*Rule) { t.Error("a rule") })
		if rep.Skipped != 1 {
			t.Errorf("%+v", rep)
		}
	})
	t.Run("reader that fails", func(t *testing.T) {
		n := 0
		_, err := Parse(io.MultiReader(strings.NewReader("||a.example^\n||b."), iotest.ErrReader(io.ErrUnexpectedEOF)), Options{}, func(*Rule) { n++ })
		if !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%v", err)
		}
		if _, err := Parse(stuck{}, Options{}, func(*Rule) {}); !errors.Is(err, io.ErrNoProgress) {
			t.Errorf("a reader without progress: %v", err)
		}
	})
}

// repeat yields a text n times.
type repeat struct {
	text string
	n    int
	rest string
}

func (r *repeat) Read(b []byte) (int, error) {
	n := 0
	for n < len(b) {
		if r.rest == "" {
			if r.n == 0 {
				return n, io.EOF
			}
			r.n--
			r.rest = r.text
		}
		k := copy(b[n:], r.rest)
		n, r.rest = n+k, r.rest[k:]
	}
	return n, nil
}

type stuck struct{}

func (stuck) Read([]byte) (int, error) { return 0, nil }

func FuzzParse(f *testing.F) {
	f.Add([]byte("||a.example^$client='x\\'y',dnstype=A|~B\n@@/x/$denyallow=a.*\r\n0.0.0.0 a b#c\raddress=/x/y/1.2.3.4"))
	f.Add([]byte("$TTL 1\n@ SOA a. b. (1\n)\n*.x. IN CNAME rpz-passthru.\n y A 1.2.3.4"))
	f.Add([]byte("\uFEFFbücher.example\n/(a|b*)+c{2,5}$/$dnsrewrite=NOERROR;SRV;1 2 3 x.y"))
	f.Fuzz(func(t *testing.T, in []byte) {
		lines := uint32(len(LineStarts(in)))
		last, n := uint32(0), 0
		rep, err := Parse(bytes.NewReader(in), Options{Rules: 1000}, func(r *Rule) {
			n++
			if r.Line < last || r.Line > lines {
				t.Errorf("line %d of %d after %d", r.Line, lines, last)
			}
			last = r.Line
			switch r.Form {
			case Glob:
				if len(r.Name) != 0 {
					t.Errorf("a pattern with the name %q", r.Name)
				}
			case Regex:
			default:
				if err := dnsname.Check(r.Name); err != nil || len(r.Name) < 2 || bytes.ContainsAny(r.Name, "ABCXYZ") {
					t.Errorf("name %q: %v", r.Name, err)
				}
			}
			if r.Form >= Simple || r.Mods != nil {
				if r.Form != Regex && r.Glob.Text == "" && r.Form != Glob {
					t.Errorf("%s has no text", show(r))
				}
				if strings.Contains(r.Glob.Text, "**") {
					t.Errorf("%s: two stars", show(r))
				}
			}
		})
		if err != nil || rep.Rules != n || len(rep.Complaints) > MaxComplaints || rep.Skipped < len(rep.Complaints) {
			t.Errorf("%v; %d rules handed out, report %+v", err, n, rep)
		}
	})
}

// FuzzZone reads policy zones: whatever a zone holds, rules name what can be matched, and no line is lost.
func FuzzZone(f *testing.F) {
	f.Add("$TTL 300\n$ORIGIN rpz.example.\n@ SOA a. b. ( 1 2\n3 4 5 )\n NS x.\na CNAME .\n\tIN 60 CNAME *.\n*.b.rpz.example. CNAME rpz-drop.\n")
	f.Add("$TTL 1\n32.1.2.0.192.rpz-ip CNAME .\n128.1.zz.db8.2001.rpz-client-ip IN CNAME rpz-passthru.\nx.rpz-nsdname CNAME .\n")
	f.Add("$TTL 1\n*.rpz-nsdname A 1.2.3.4\n*.a.rpz-nsdname CNAME rpz-drop.\n1.0.0.0.128.rpz-nsip CNAME b.\n.rpz-nsdname CNAME .\n..rpz-ip TXT x\nrpz-nsip CNAME .\n")
	f.Add("$ORIGIN .\na A 192.0.2.1\n  AAAA ::1\nb TXT \"x;y\" ; c\nc MX 10 d.\n$INCLUDE f\n$GENERATE 1-9 a$ CNAME .\n(\n")
	f.Fuzz(func(t *testing.T, in string) {
		n := 0
		rep := ParseString("$TTL 1\n"+in, func(r *Rule) {
			n++
			if err := dnsname.Check(r.Name); err != nil || !r.Form.IsZone() {
				t.Errorf("%s: name %q, form %d: %v", show(r), r.Name, r.Form, err)
			}
			switch r.Trigger {
			case ByName:
			case ByServer:
				if l := TriggerLabel(ByServer); !bytes.HasSuffix(r.Name, append(l[:], 0)) {
					t.Errorf("server %q", r.Name)
				}
			default:
				if !r.Prefix.IsValid() || r.Prefix != r.Prefix.Masked() {
					t.Errorf("prefix %v", r.Prefix)
				}
			}
			if r.Mods != nil && r.Glob.Text == "" {
				t.Errorf("%s has no text", show(r))
			}
		})
		if n != rep.Rules {
			t.Errorf("%d rules handed out, report %+v", n, rep)
		}
	})
}

// An expression that a few bytes make immense is refused before it is: what reading it takes does not depend on how big it
// would have become.
func TestImmenseExpressions(t *testing.T) {
	for what, e := range map[string]string{
		"repeats": strings.Repeat("a{1000}", 140), "classes": strings.Repeat("[^a]{1000}", 100), "letters": strings.Repeat(`\pL{0,1000}`, 90),
		"nested": strings.Repeat("(a{0,30}){0,30}", 66), "open": strings.Repeat("a{1000,}", 120),
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		rep, _ := Parse(strings.NewReader("/"+e+"/\n"), Options{}, func(*Rule) {})
		runtime.ReadMemStats(&after)
		bytes := after.TotalAlloc - before.TotalAlloc
		if rep.Rules != 0 || !strings.Contains(rep.Complaints[0].Reason, "costs too much") || bytes > 3<<20 {
			t.Errorf("%s: %d rules, %d bytes allocated: %+v", what, rep.Rules, bytes, rep.Complaints)
		}
	}
	for _, e := range []string{"^(?:[a-z0-9-]{1,63}\\.){2,5}example$", "^a{900}", "(?:ads?|track(?:er|ing)?)[0-9]{1,3}\\."} {
		if rep, _ := Parse(strings.NewReader("/"+e+"/\n"), Options{}, func(*Rule) {}); rep.Rules != 1 {
			t.Errorf("%s: %+v", e, rep.Complaints)
		}
	}
}
