package filter

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
)

// TestCases are behaviours that products of the field got wrong at some time, and the edges around them. A query
// is "name TYPE", then the client's name, its address or #tag; the answer is in the words of judge.
func TestCases(t *testing.T) {
	type want = map[string]string
	for _, tt := range []struct {
		name  string
		rules string // the lists, with "----" between them
		want  want
	}{
		// Patterns.
		{"R03 a bare domain is that name alone", "a.example", want{"a.example A": "blocked 1 [0.0.0.0]", "sub.a.example A": "none", "xa.example A": "none"}},
		{"R05 the dot after a star is a dot", "*.host.example", want{"asdf.host.example A": "blocked 1", "q.asdf.host.example A": "blocked 1", "host.example A": "none", "asdf.zhost.example A": "none"}},
		{"R07 a top-level domain", "||zip^", want{"a.zip A": "blocked 1", "zip A": "blocked 1", "a.zipx A": "none", "zip.example A": "none"}},
		{"R09 not inside a longer label", "||github.example^", want{"log.github.example-east-1.amazonaws.example A": "none", "log.github.example1.amazonaws.example A": "none", "agithub.example A": "none"}},
		{"R10 all paths are the host", "||b.example/*", want{"b.example A": "blocked 1", "x.b.example A": "blocked 1"}},
		{"R11 one path is not", "||a.example/ads.js", want{"a.example A": "none"}},
		{"R13 exceptions", "||a.example^\n@@||ok.a.example^", want{"a.example A": "blocked 1", "ok.a.example A": "allowed 2", "x.ok.a.example A": "allowed 2"}},
		{"R15 the strongest", "||a.example^$important\n@@||a.example^$important", want{"a.example A": "allowed 2"}},
		{"R16 exceptions before hosts lines", "@@||a.example^\n127.0.0.1  a.example", want{"a.example A": "allowed 1"}},
		{"R18 an expression as exception", "||stats.test.example^\n@@/^stats?\\./", want{"stats.test.example A": "allowed 2", "x.stats.test.example A": "blocked 1"}},
		{"R20 a slash", "/\n||b.example^", want{"a.example A": "none", "b.example A": "blocked 2"}},
		{"R21 a scheme", "://\n||b.example^", want{"anything.example A": "none", "b.example A": "blocked 2"}},
		{"R24 a pipe at the end", "||example3.example|", want{"example3.example A": "blocked 1", "x.example3.example A": "blocked 1", "example3.example.org A": "none"}},
		{"other short and empty patterns", "|\n||\n^\n*\n**\n||^\n|^\n//\n.\n..\n-\n@@\n$important\n||b.example^", want{"a.example A": "none", "x-y.example A": "none", "b.example A": "blocked 14"}},
		{"the root is never filtered", "||*^\n/.*/", want{". NS": "none", "a A": "blocked 1"}},
		// Modifiers.
		{"M02 two $badfilter", "||a.b.example^\n||b.example^\n||a.b.example^$badfilter\n||b.example^$badfilter", want{"a.b.example A": "none", "b.example A": "none"}},
		{"M04 another value is another rule", "*$denyallow=x.example\n*$denyallow=y.example,badfilter", want{"a.example A": "blocked 1", "x.example A": "none", "y.example A": "blocked 1"}},
		{"M07 an exception disabled", "@@||a.example^\n||a.example^\n@@||a.example^$badfilter", want{"a.example A": "blocked 2"}},
		{"M08 any order of modifiers", "||a.example^$client=192.0.2.4,important\n||a.example^$important,client=192.0.2.4,badfilter", want{"a.example A 192.0.2.4": "none"}},
		{"$badfilter first, in the middle, and of values in another order", "||a.example^$dnstype=A|AAAA,client=x|y\n||a.example^$badfilter,client=y|x,dnstype=AAAA|A\n||b.example^$ctag=a|b,denyallow=x.b.example|y.b.example\n||b.example^$denyallow=y.b.example|x.b.example,badfilter,ctag=b|a",
			want{"a.example A x": "none", "b.example A #a": "none"}},
		{"$badfilter of another spelling", "||a.example^\n|a.example^$badfilter\n||a.example|$badfilter\n*.a.example^$badfilter\na.example$badfilter", want{"a.example A": "blocked 1"}},
		{"$badfilter before its twin and in another list", "||a.example^$badfilter\n----\n||A.Example^\n||b.example^", want{"a.example A": "none", "b.example A": "blocked 2"}},
		{"$badfilter of a rewrite has its value", "||a.example^$dnsrewrite=192.0.2.1\n||a.example^$dnsrewrite=192.0.2.2\n||a.example^$dnsrewrite=192.0.2.1,badfilter", want{"a.example A": `rewritten 2 ["192.0.2.2"]`}},
		{"$badfilter of an expression", "/^ads\\d/\n/^ads\\d/$badfilter\n/^ads/$badfilter", want{"ads1.example A": "none"}},
		{"M10 tags", "||h2.example^$ctag=pc|printer\n||h3.example^$ctag=~pc|~router\n||h4.example^$ctag=~pc|router", want{"h2.example A #phone": "none", "h2.example A #phone #printer": "blocked 1", "h2.example A": "none",
			"h3.example A #phone #printer": "blocked 2", "h3.example A #pc": "none", "h3.example A": "blocked 2", "h4.example A #phone #router": "blocked 3", "h4.example A #pc #router": "none", "h4.example A": "none"}},
		{"M13 types in small letters", "||a.example^$dnstype=aaaa", want{"a.example AAAA": "blocked 1", "a.example A": "none"}},
		{"M14 all types but these", "||a.example^$dnstype=~A|~CNAME", want{"a.example A": "none", "a.example CNAME": "none", "a.example AAAA": "blocked 1", "a.example HTTPS": "blocked 1"}},
		{"M17 all names but these", "*$denyallow=com|ok.example", want{"a.com A": "none", "com A": "none", "ok.example A": "none", "sub.ok.example A": "none", "notok.example A": "blocked 1", "a.org A": "blocked 1"}},
		{"M19 a value that is none voids the rule", "*$denyallow=~x.example\n*$denyallow\n*$denyallow=\n*$denyallow=a||b\n||b.example^", want{"a.example A": "none", "b.example A": "blocked 5"}},
		{"all top-level domains but these", "||shop.*^$denyallow=shop.*\n://w7.$denyallow=w7.example|" + strings.Repeat("no_name_is_so_long", 4) + ".*", want{"shop.com A": "none", "www.shop.co.uk A": "none", "shop.evil.com A": "blocked 1", "shop.zzzz A": "blocked 1", "w7.org A": "blocked 2", "w7.example A": "none"}},
		{"M20 who asks is asked each time", "||a.example^$client=192.0.2.1", want{"a.example A 192.0.2.1": "blocked 1", "a.example A 192.0.2.2": "none", "a.example A": "none"}},
		{"unknown modifiers void the rule", "||a.example^$important,third-party\n||a.example^$IMPORTANT\n||a.example^$dnstype=A,respgeo=FR\n||a.example^$domain=b.example\n||a.example^$~important\n||a.example^$important=1x,foo", want{"a.example A": "none"}},
		{"a $ that ends", "||a.example^$", want{"a.example A": "blocked 1"}},
		{"clients with quotes, commas and pipes", `||a.example^$client='Mary\'s\, box'` + "\n" + `||b.example^$client="a\|b"|'c d'` + "\n" + `||c.example^$client=~"x"|~10.0.0.0/8`,
			want{"b.example A a|b": "blocked 2", "b.example A a": "none", "c.example A x": "none", "c.example A y": "blocked 3", "c.example A 10.1.1.1": "none", "c.example A 11.1.1.1": "blocked 3"}},
		{"clients by prefix", "||a.example^$client=2001:db8::/32|192.0.2.0/24|~192.0.2.7", want{"a.example A 2001:db8:1::1": "blocked 1", "a.example A 2001:db9::1": "none", "a.example A 192.0.2.1": "blocked 1", "a.example A 192.0.2.7": "none", "a.example A ::ffff:192.0.2.1": "blocked 1"}},
		{"quotes are no part of what is in them, an address too", "||a.example^$client='192.0.2.1'|\"10.0.0.0/8\"", want{"a.example A 192.0.2.1": "blocked 1", "a.example A 10.9.8.7": "blocked 1", "a.example A 192.0.2.2": "none"}},
		{"marks behind the end", "||a.example^^\nb.example^*|\n|c.example^*\n||d.example*^\n||e.example||", want{"x.a.example A": "blocked 1", "a.example.org A": "none", "xb.example A": "blocked 2", "b.example.org A": "none", "c.example A": "blocked 3", "c.example.org A": "none", "d.example.org A": "blocked 4", "e.example A": "none"}},
		{"three characters, however little they say", "*q*\n||*.z^\n*7.*\nab\n|a\n@@*k*$important", want{"xqx A": "blocked 1", "y.z A": "blocked 2", "z A": "none", "a7.b A": "blocked 3", "ab.b A": "none", "kqk A": "allowed 6"}},
		{"a slash and a beginning", "/ads.\n/ad_*.\n//track.\n/*7.", want{"ads.example A": "blocked 1", "x.ads.example A": "none", "ad_1.example A": "blocked 2", "x.ad_1.example A": "none", "track.example A": "blocked 3", "xtrack.example A": "none", "x.a7.example A": "blocked 4"}},
		// Expressions.
		{"look-around and back-references are refused", "/^(?!x)y/\n/(?<=a)b/\n/(a)\\1/\n/(?=a)/\n/a(?!b)/\n||c.example^", want{"y.example A": "none", "aa.example A": "none", "c.example A": "blocked 6"}},
		{"optional parts are no literals", "/^adserverx{0,2}\\.io$/\n/^ba?nner\\./\n/^(foo|)bar\\./\n/^tr.*k\\./\n/^q(w)?e$/", want{"adserver.io A": "blocked 1", "adserverxx.io A": "blocked 1", "adserverxxx.io A": "none", "bnner.x A": "blocked 2", "bar.x A": "blocked 3", "track.x A": "blocked 4", "qe A": "blocked 5"}},
		{"alternatives at the top", "/^ads\\.|^stats\\.|tracker$/", want{"ads.x A": "blocked 1", "stats.x A": "blocked 1", "x.tracker A": "blocked 1", "x.ads.x A": "none"}},
		{"commas, slashes and dollars inside", "/^a{1,2}\\.example$/$important\n/^b\\/c/\n/d\\$/\n@@||aa.example^", want{"aa.example A": "blocked 1", "aaa.example A": "none"}},
		{"classes and word boundaries", "/\\bads\\b/\n/^[[:digit:]]{4,}\\./\n/^\\w+-\\d+\\./", want{"x-ads-y.example A": "blocked 1", "bads.example A": "none", "12345.example A": "blocked 2", "ab-12.example A": "blocked 3"}},
		// Rewrites.
		{"W02 all values", "|a.example^$dnsrewrite=192.0.2.1\n|a.example^$dnsrewrite=192.0.2.2\n|a.example^$dnsrewrite=2001:db8::1", want{"a.example A": `rewritten 1 ["192.0.2.1" "192.0.2.2"]`, "a.example AAAA": `rewritten 1 ["2001:db8::1"]`, "a.example TXT": "rewritten 1 []"}},
		{"W06 empty", "|a.example^$dnsrewrite=NOERROR;;", want{"a.example A": "rewritten 1 []", "a.example TXT": "rewritten 1 []"}},
		{"W09 service bindings", "|a.example^$dnsrewrite=NOERROR;HTTPS;32 host.example alpn=h3\n|b.example^$dnsrewrite=NOERROR;SVCB;32 host.example alpn=h3 dohpath=/dns-query{?dns}",
			want{"a.example HTTPS": `rewritten 1 ["32 host.example alpn=h3"]`, "b.example SVCB": `rewritten 2 ["32 host.example alpn=h3 dohpath=/dns-query{?dns}"]`, "a.example A": "rewritten 1 []"}},
		{"W10 one type alone", "|a.example^$dnstype=HTTPS,dnsrewrite=REFUSED", want{"a.example HTTPS": "rewritten 1 REFUSED", "a.example A": "none"}},
		{"W12 none of them", "|a.example^$dnsrewrite=192.0.2.1\n|a.example^$dnsrewrite=b.example\n@@||a.example^$dnsrewrite\n|c.example^$dnsrewrite=192.0.2.1\n@@||c.example^$dnsrewrite=", want{"a.example A": "none", "c.example A": "none"}},
		{"W14 a plain exception", "|a.example^$dnsrewrite=192.0.2.1\n@@||a.example^", want{"a.example A": `rewritten 1 ["192.0.2.1"]`}},
		{"W15 one value less", "||a.example^$dnsrewrite=NOERROR;MX;10 mail.example\n||a.example^$dnsrewrite=NOERROR;SRV;1 2 3 h.example\n||a.example^$dnsrewrite=NOERROR;HTTPS;1 . alpn=h3\n||a.example^$dnsrewrite=NOERROR;TXT;x\n" +
			"@@||a.example^$dnsrewrite=NOERROR;MX;10 mail.example\n@@||a.example^$dnsrewrite=NOERROR;SRV;1  2 3 h.example\n@@||a.example^$dnsrewrite=NOERROR;HTTPS;1 . alpn=h3\n@@||a.example^$dnsrewrite=NOERROR;TXT;x", want{"a.example MX": "none", "a.example SRV": "none", "a.example HTTPS": "none", "a.example TXT": "none"}},
		{"an exception in the other form", "||a.example^$dnsrewrite=192.0.2.1\n@@||a.example^$dnsrewrite=NOERROR;A;192.0.2.1\n||b.example^$dnsrewrite=NXDOMAIN;;\n@@||b.example^$dnsrewrite=NXDOMAIN\n||c.example^$dnsrewrite=d.example\n@@||c.example^$dnsrewrite=NOERROR;CNAME;D.example.", want{"a.example A": "none", "b.example A": "none", "c.example A": "none"}},
		{"W17 to itself", "||a.example^$dnsrewrite=A.example", want{"a.example A": "none", "b.a.example A": "rewritten 1 to a.example"}},
		{"values that are none", "||a.example^$dnsrewrite=NOERROR;A;::1\n||a.example^$dnsrewrite=NOERROR;A;\n||a.example^$dnsrewrite=NOERROR;MX;mail.example\n||a.example^$dnsrewrite=1.2.3\n||a.example^$dnsrewrite=NOERROR;FOO;x\n||a.example^$dnsrewrite=BADCODE;;\n||a.example^$dnsrewrite=NOERROR;SRV;1 2 x h.example", want{"a.example MX": "none", "a.example SRV": "none"}},
		// Texts.
		{"P01 CRLF", "||a.example^\r\n0.0.0.0 b.example\r\nc.example\r\n", want{"a.example A": "blocked 1", "b.example A": "blocked 2 [0.0.0.0]", "c.example A": "blocked 3 [0.0.0.0]"}},
		{"P02 a byte-order mark", "\uFEFF||a.example^\n||b.example^\n----\n\uFEFF0.0.0.0 c.example", want{"a.example A": "blocked 1", "b.example A": "blocked 2", "c.example A": "blocked 1 [0.0.0.0]"}},
		{"lone CR", "||a.example^\r! x\r||b.example^\r", want{"a.example A": "blocked 1", "b.example A": "blocked 3"}},
		{"P04 capitals", "0.0.0.0 Ads.A.Example\nAds.B.Example\n||Ads.C.Example^\n/^RE\\.X/\n*$denyallow=COM,dnstype=HTTPS", want{"ads.a.example A": "blocked 1 [0.0.0.0]", "ADS.a.EXAMPLE A": "blocked 1 [0.0.0.0]", "ads.b.example A": "blocked 2 [0.0.0.0]", "aDs.c.example A": "blocked 3", "re.x A": "blocked 4", "a.com HTTPS": "none"}},
		{"P05 final dots", "0.0.0.0 a.example.\nb.example.\naddress=/c.example./0.0.0.0", want{"a.example A": "blocked 1 [0.0.0.0]", "b.example A": "blocked 2 [0.0.0.0]", "b.example. A": "blocked 2 [0.0.0.0]", "x.c.example A": "blocked 3"}},
		{"final dots of wildcards, but not of fragments", "*.a.example.\n*.b.example.$important\n@@*.ok.a.example.\n*.ads.\n", want{"x.a.example A": "blocked 1", "a.example A": "none", "x.a.example.org A": "none", "x.b.example A": "blocked 2", "x.ok.a.example A": "allowed 3", "x.ads.example A": "blocked 4"}},
		{"P07 tabs and blanks", "0.0.0.0\ta.example\tb.example\n   ||c.example^   \n\t0.0.0.0 d.example ", want{"a.example A": "blocked 1 [0.0.0.0]", "b.example A": "blocked 1 [0.0.0.0]", "c.example A": "blocked 2", "d.example A": "blocked 3 [0.0.0.0]"}},
		{"P08 no line end", "||a.example^", want{"a.example A": "blocked 1"}},
		{"P10 one address once", "0.0.0.0 a.example\n----\n0.0.0.0 a.example", want{"a.example A": "blocked 1 [0.0.0.0]", "a.example AAAA": "blocked 1"}},
		{"P11 what hosts files begin with", "127.0.0.1 localhost\n::1 localhost\n255.255.255.255 broadcasthost\n0.0.0.0 0.0.0.0\n0.0.0.0 a.example", want{"localhost A": "blocked 1 [127.0.0.1]", "localhost AAAA": "blocked 2 [::1]", "a.example A": "blocked 5 [0.0.0.0]"}},
		{"P12 a zone of an address", "fe80::1%lo0 localhost\n0.0.0.0 b.example", want{"b.example A": "blocked 2 [0.0.0.0]"}},
		{"P14 odd names", "0.0.0.0 a.example\n0.0.0.0 -043ns11.net.daraz.example\n" + strings.Repeat("0.0.0.0 bad!name\n", 2000) + "0.0.0.0 b.example", want{"a.example A": "blocked 1 [0.0.0.0]", "b.example A": "blocked 2003 [0.0.0.0]"}},
		{"comments glued to names", "0.0.0.0 a.example#x\nb.example#x\n0.0.0.0 c.example d.example # e.example\n||f.example^#x", want{"a.example A": "blocked 1 [0.0.0.0]", "b.example A": "blocked 2 [0.0.0.0]", "d.example A": "blocked 3 [0.0.0.0]", "e.example A": "none"}},
		{"hosts lines with addresses", "192.0.2.7 a.example b.example\n2001:db8::7 a.example\n127.0.0.1 a.example", want{"a.example A": "blocked 3 [127.0.0.1 192.0.2.7]", "a.example AAAA": "blocked 2 [2001:db8::7]", "b.example AAAA": "blocked 1", "x.a.example A": "none"}},
		{"dnsmasq", "address=/a.example/b.example/1.2.3.4\nserver=/c.example/\nlocal=/d.example/\naddress=/e.example/\naddress=/f.example/::\nserver=/g.example/192.0.2.53\naddress=/h.example/2001:db8::1", want{"x.a.example A": `rewritten 1 ["1.2.3.4"]`, "b.example AAAA": "rewritten 1 []", "x.c.example A": "blocked 2",
			"d.example A": "blocked 3", "e.example A": "blocked 4", "x.f.example A": "blocked 5", "g.example A": "none", "h.example AAAA": `rewritten 7 ["2001:db8::1"]`}},
		{"dnsmasq, dots and stars before names", "address=/.a.example/0.0.0.0\nlocal=/*.b.example/\naddress=/*c.example/192.0.2.1", want{"a.example A": "blocked 1", "x.a.example A": "blocked 1", "b.example A": "none", "x.b.example A": "blocked 2", "xc.example A": `rewritten 3 ["192.0.2.1"]`, "x.c.example A": `rewritten 3 ["192.0.2.1"]`, "c.example.x A": "none"}},
		{"dnsmasq, where # is no comment, and where it is one", "address=/a.example/#\nserver=/a.example/\nserver=/ok.a.example/#\nserver=/a.example/192.0.2.53#5353\naddress=/b.example/0.0.0.0 # c\naddress=/c.example/192.0.2.1#2\naddress=/#/0.0.0.0\nserver=/#/\n#address=/d.example/",
			want{"x.a.example A": "blocked 1", "ok.a.example A": "allowed 3", "x.ok.a.example A": "allowed 3", "b.example A": "blocked 5", "c.example A": "none", "d.example A": "none"}},
		{"names in Unicode", "bücher.example\n||пример.рф^\n0.0.0.0 münchen.example\n||faß.example^\n@@||shop.bücher.example^", want{"xn--bcher-kva.example A": "blocked 1 [0.0.0.0]", "x.xn--e1afmkfd.xn--p1ai A": "blocked 2", "xn--mnchen-3ya.example A": "blocked 3 [0.0.0.0]", "xn--fa-hia.example A": "blocked 4", "shop.xn--bcher-kva.example A": "allowed 5"}},
		{"underscores", "||_dmarc.a.example^\n0.0.0.0 ex_ample.b\n*._tcp.c.example", want{"_dmarc.a.example TXT": "blocked 1", "ex_ample.b A": "blocked 2 [0.0.0.0]", "_x._tcp.c.example SRV": "blocked 3"}},
		{"bytes that are no text", "a\x00b.example\n||x\x7f.example^\n\xff\xfe.example\n||ok.example^", want{"ok.example A": "blocked 4", "b.example A": "none"}},
	} {
		b := NewBuilder(&testKey)
		for i, text := range strings.Split(tt.rules, "\n----\n") {
			if _, err := b.Add(i, strings.NewReader(text)); err != nil {
				t.Fatal(err)
			}
		}
		m := b.Build(nil)
		for _, query := range slices.Sorted(maps.Keys(tt.want)) {
			if got := judge(t, m, nil, query); got != tt.want[query] {
				t.Errorf("%s: %s is %s, want %s", tt.name, query, got, tt.want[query])
			}
		}
	}
	// Names with blanks, which the queries above cannot say.
	m, _ := Compile(&testKey, `||a.example^$client='Mary\'s\, box'|My Phone`)
	for client, want := range map[string]Verdict{"": None, "Mary's, box": Blocked, "My Phone": Blocked, "My": None, "mary's, box": None} {
		if r := m.Match(wireName("a.example"), nil, &Query{Type: typeA, Client: client}); r.Verdict != want {
			t.Errorf("client %q: %v, want %v", client, r.Verdict, want)
		}
		if r := m.Match(wireName("a.example"), nil, &Query{Type: typeA, Client: "pc-1", Name: client}); r.Verdict != want {
			t.Errorf("a client called %q: %v, want %v", client, r.Verdict, want)
		}
	}
}

// TestManyCustomRules has more of the user's own rules than anybody writes: all that are allowed count.
func TestManyCustomRules(t *testing.T) {
	var b strings.Builder
	for i := range 100_000 {
		switch i % 4 {
		case 0:
			fmt.Fprintf(&b, "||n%d.example^\n", i)
		case 1:
			fmt.Fprintf(&b, "@@||n%d.example^$client=kid\n", i)
		case 2:
			fmt.Fprintf(&b, "-n%d-\n", i)
		case 3:
			fmt.Fprintf(&b, "/^n%d\\./\n", i)
		}
	}
	m, rep := Compile(&testKey, b.String())
	if rep.Rules+rep.Skipped != 100_000 || rep.Skipped == 0 || !strings.Contains(rep.Complaints[0].Reason, "the limit is") {
		t.Errorf("%d rules, %d skipped", rep.Rules, rep.Skipped)
	}
	for query, want := range map[string]string{"x.n4.example A": "blocked 5", "n99993.example A kid": "allowed 99994", "a-n6-b A": "blocked 7", "n3.example A": "blocked 4", "n1.example A": "none"} {
		if got := judge(t, m, nil, query); got != want {
			t.Errorf("%s is %s, want %s", query, got, want)
		}
	}
}
