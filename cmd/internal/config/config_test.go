package config

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// write puts a configuration into a folder of its own and returns its path.
func write(t testing.TB, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "sluice.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func mustLoad(t testing.TB, text string) *Sluice {
	t.Helper()
	c, faults := Load(write(t, text))
	if len(faults) > 0 {
		t.Fatalf("%s\n%v", text, faults)
	}
	return c
}

// lines are the faults of a text, without the name of the file.
func lines(t testing.TB, text string) []string {
	t.Helper()
	path := write(t, text)
	c, faults := Load(path)
	if (c == nil) != (len(faults) > 0) {
		t.Fatalf("%s\nreturned %v beside %v", text, c, faults)
	}
	var out []string
	for _, f := range faults {
		s := strings.ReplaceAll(f.String(), filepath.Dir(path)+"/", "")
		if f.Key == "" || f.Try == "" || strings.Contains(s, "\n") {
			t.Errorf("incomplete fault %+v", f)
		}
		out = append(out, strings.TrimPrefix(s, "sluice.yaml:"))
	}
	return out
}

func TestDefaults(t *testing.T) {
	for _, text := range []string{"", "{}", "# nothing\n", "---\n", "listen:\ncache:\nlimits:\n"} {
		if got, want := mustLoad(t, text), mustLoadFile(t, "testdata/sluice.yaml"); !reflect.DeepEqual(plain(got), plain(want)) {
			t.Errorf("%q:\n%+v, want\n%+v", text, got, want)
		}
	}
	none, faults := Load("")
	if len(faults) > 0 || !reflect.DeepEqual(plain(none), plain(mustLoad(t, "{}"))) {
		t.Errorf("without a file: %+v, %v", none, faults)
	}
	if host, _ := os.Hostname(); none.Node.Region != "default" || none.Node.ID != host {
		t.Errorf("node %+v, want this host in the region default", none.Node)
	}

	want, faults := LoadBizd("testdata/bizd.yaml")
	if len(faults) > 0 {
		t.Fatal(faults)
	}
	if got, faults := LoadBizd(write(t, "{}")); len(faults) > 0 || !reflect.DeepEqual(got, want) {
		t.Errorf("bizd: %+v, %v; want %+v", got, faults, want)
	}
}

func mustLoadFile(t testing.TB, path string) *Sluice {
	t.Helper()
	c, faults := Load(path)
	if len(faults) > 0 {
		t.Fatal(faults)
	}
	return c
}

// plain forgets where the keys stood, and the difference between no list and an
// empty one.
func plain(c *Sluice) *Sluice {
	c.source = nil
	if len(c.Identify.DefaultDevice) == 0 {
		c.Identify.DefaultDevice = nil
	}
	return c
}

// The tables in testdata know every key, so that a new one cannot be left out.
func TestEveryKeyIsInTheTables(t *testing.T) {
	for path, typ := range map[string]reflect.Type{"testdata/sluice.yaml": reflect.TypeFor[Sluice](), "testdata/bizd.yaml": reflect.TypeFor[Bizd]()} {
		d := load(path, reflect.New(typ).Interface())
		for _, homes := range schemaOf(typ) {
			for _, home := range homes {
				isLimit := strings.HasPrefix(home, "limits.") && home != "limits.class"
				if !strings.Contains(home, "[]") && !isLimit && !d.has(home) {
					t.Errorf("%s lacks %s", path, home)
				}
			}
		}
	}
}

func TestTenFaultsInOneFile(t *testing.T) {
	got := lines(t, `data_dir: 5
listen:
  udp: ["127.0.0.1:53", "localhost:53", "127.0.0.1:53"]
  tpc: []
  dot: ["127.0.0.1:853"]
cache:
  size: 512MB
  prefetch: yes
size: 1GiB
recursion: { qname_minimisation: realxed, query_timeout: 8 }
access: { allow: [10.1.2.3/8] }
log: { level: info, level: debug }
policy_zones: [{ name: rpz.example, file: missing.rpz }]
`)
	want := []string{
		`1:11: data_dir: must be a text, is the number 5; try: "5"`,
		`3:25: listen.udp[1]: "localhost:53" has a name for an address; try: an address, such as 127.0.0.1:53`,
		`3:41: listen.udp[2]: 127.0.0.1:53 is listed twice; try: another port, or remove one of the two`,
		`4:3: listen.tpc: unknown key; try: tcp`,
		`5:8: listen.dot: needs a certificate; try: tls: { certificates: [{ cert: FILE, key: FILE }] }`,
		`7:9: cache.size: "512MB" is not a size; try: 512MiB`,
		`8:13: cache.prefetch: must be true or false, is the text "yes"; try: true`,
		`9:1: size: unknown key; try: it belongs to cache.size, as cache: { size: … }`,
		`10:34: recursion.qname_minimisation: "realxed" is none of off, relaxed, strict; try: relaxed`,
		`10:58: recursion.query_timeout: "8" has no unit; try: 8s`,
		`11:19: access.allow[0]: "10.1.2.3/8" has bits set beyond its length; try: 10.0.0.0/8`,
		`12:21: log.level: stands twice, first on line 12; try: one of the two`,
		`13:43: policy_zones[0].file: missing.rpz cannot be read: no such file or directory; try: an existing file that this user may read`,
	}
	if g, w := strings.Join(got, "\n"), strings.Join(want, "\n"); g != w {
		t.Errorf("got\n%s\nwant\n%s", g, w)
	}
}

// Each text has exactly the faults named: place and key, and a part of the rest.
func TestFaults(t *testing.T) {
	for _, tt := range []struct {
		text string
		want []string // "LINE:COL: KEY: …part…"
	}{
		// syntax
		{"a:\n\tb: 1", []string{"2:1: syntax: |spaces instead of tabs"}},
		{"listen:\n  udp: [\n    \"127.0.0.1:5300\"\n  tcp: []", []string{"4:3: syntax: |"}},
		{"cache:\n  size 1GiB\n  prefetch: true", []string{"2:3: syntax: |"}},
		{"\"", []string{"1:1: syntax: |"}},
		{"- a", []string{"1:1: file: |is a list"}},
		{"3", []string{"1:1: file: |is the number 3"}},
		{"{}\n---\n{}", []string{"3:1: file: |second document"}},
		{"listen: !!map {}", []string{"1:9: listen: |tags"}},
		{"listen: {udp: *x}", []string{"1:15: listen.udp: |no anchor &x"}},
		{"listen: &a\n  <<: *a", []string{"2:3: listen: |merge key"}},
		{"? a\n: b", []string{"1:1: syntax: |question mark"}},
		{strings.Repeat("[", 1<<16), []string{"1:33: syntax: |nested more than 32"}},
		{strings.Repeat("- ", 1<<16), []string{"1:65: syntax: |nested more than 32"}},
		{"a: |\n" + strings.Repeat("\n", 1<<20), []string{"258:1: syntax: |empty lines"}},
		// keys
		{"limits.cache: 1GiB", []string{"1:1: limits.cache: unknown key|limits: { cache: … }"}},
		{"url: x", []string{"1:1: url: unknown key|forward_zones[].upstreams[].url"}},
		{"zzzzzz: x", []string{"1:1: zzzzzz: unknown key|one of data_dir, node,"}},
		{"cach: {}", []string{"1:1: cach: unknown key; try: cache|"}},
		{"limits: {pipelinig: 3, cpu: 2}", []string{"1:10: limits.pipelinig: unknown key; try: pipelining|", "1:24: limits.cpu: unknown key|"}},
		{"users: {min: 3}", []string{"1:9: users.min: unknown key|users.shrink_guard.min"}},
		{"listen: []", []string{"1:9: listen: must be a mapping|is a list"}},
		{"forward_zones: [{name: '.', upstreams: [\"udp://192.0.2.1\"]}]", []string{`1:41: forward_zones[0].upstreams[0]: must be a mapping|try: { url: "udp://192.0.2.1" }`}},
		{"forward_zones: [{name: '.'}]", []string{"1:|forward_zones[0].upstreams: is missing; try: upstreams: [{ url: … }]"}},
		{"policy_zones: [rpz.example]", []string{`1:16: policy_zones[0]: must be a mapping|try: { name: "rpz.example"`}},
		{"local_data: [a]", []string{`1:14: local_data[0]: must be a mapping|try: { name: "a", records: […] }`}},
		{"data_dir: ''", []string{"1:11: data_dir: is empty|"}},
		{"listen:\n  udp:\n", []string{"2:|listen.udp: must be a list, is nothing"}},
		// addresses and networks
		{`listen: {udp: "127.0.0.1:53"}`, []string{`1:15: listen.udp: must be a list|["127.0.0.1:53"]`}},
		{`listen: {udp: [":53", "127.0.0.1", "127.0.0.1:65536", "[::1]", x]}`, []string{
			`1:16: listen.udp[0]: ":53" has no address|0.0.0.0:53 or [::]:53`,
			`1:23: listen.udp[1]: "127.0.0.1" has no port; try: 127.0.0.1:53|`,
			`1:36: listen.udp[2]: "127.0.0.1:65536" has the port|`,
			`1:55: listen.udp[3]: "[::1]" has no port; try: [::1]:53|`,
			`1:64: listen.udp[4]: "x" is not|`}},
		{`access: {allow: ["::1/129", 1, "::ffff:10.0.0.0/104", {}]}`, []string{
			"1:18: access.allow[0]: |length 129", "1:29: access.allow[1]: |", "1:32: access.allow[2]: |IPv4", "1:55: access.allow[3]: |is a mapping"}},
		{`recursion: {do_not_query: [default, none]}`, []string{"1:37: recursion.do_not_query[1]: |default"}},
		{`recursion: {outgoing: ["192.0.2.1:53"]}`, []string{"1:24: recursion.outgoing[0]: |without a port"}},
		{`dns64: {prefix: "64:ff9b::/95"}`, []string{"1:17: dns64.prefix: |RFC 6052"}},
		{`dns64: {prefix: 10.0.0.0/8}`, []string{"1:17: dns64.prefix: |RFC 6052"}},
		{`identify: {default_device: {"127.0.0.1:54": kid, "x": kid, "127.0.0.1:53": a b}}`, []string{
			"1:29: identify.default_device[127.0.0.1:54]: nothing listens there|",
			"1:50: identify.default_device[x]: |", "1:76: identify.default_device[127.0.0.1:53]: |id of a device"}},
		// numbers, times, sizes
		{`listen: {workers: -1}`, []string{"1:19: listen.workers: |0 to 1024; try: 0"}},
		{`listen: {workers: "2"}`, []string{"1:19: listen.workers: |without quotes"}},
		{`recursion: {upstream_port: 0, edns_buffer_size: 99999}`, []string{"1:28: recursion.upstream_port: |", "1:49: recursion.edns_buffer_size: |try: 4096"}},
		{`cache: {max_ttl: 1d, min_ttl: -5s, max_negative_ttl: never}`, []string{
			`1:18: cache.max_ttl: "1d"|24h`, "1:31: cache.min_ttl: |negative", "1:54: cache.max_negative_ttl: |"}},
		{`cache: {size: 10}`, []string{"1:15: cache.size: |no unit"}},
		{`cache: {size: 10KiB}`, []string{"1:15: cache.size: |less than 1MiB"}},
		{`users: {shrink_guard: {share: 0.1}}`, []string{"1:31: users.shrink_guard.share: |try: 10%"}},
		{`users: {shrink_guard: {share: 101%}}`, []string{"1:31: users.shrink_guard.share: |"}},
		{`limits: {cache: 0, client_rate: 0, class: 7q}`, []string{"1:17: limits.cache: |", "1:33: limits.client_rate: |", "1:43: limits.class: |"}},
		// words
		{`stranger: refused`, []string{"1:11: stranger: |almost the word refuse"}},
		{`stranger: Server`, []string{"1:11: stranger: |almost the word serve"}},
		{`stranger: no one`, []string{"1:11: stranger: |name of a policy"}},
		{`users: {when_cold: Refuse}`, []string{"1:20: users.when_cold: |"}},
		{`identify: {server_names: ["https://x", "a..b", "exämple.net"], doh_path: dns}`, []string{
			"1:27: identify.server_names[0]: |URL", "1:40: identify.server_names[1]: |", "1:48: identify.server_names[2]: |xn--", "1:74: identify.doh_path: |"}},
		// contradictions
		{"listen: {udp: [], http3: true}", []string{"1:26: listen.http3: |doh"}},
		{`listen: {tcp: ["127.0.0.1:8053"]}`, []string{"1:16: listen.tcp[0]: |taken by admin.listen"}},
		{`listen: {tcp: ["127.0.0.1:5"]}` + "\nhttp: {listen: 127.0.0.1:5}", []string{"2:16: http.listen: |taken by listen.tcp[0]"}},
		{"listen: {doh: ['127.0.0.1:443'], doq: ['127.0.0.1:443'], http3: true}", []string{
			"1:15: listen.doh: |certificate", "1:39: listen.doq: |certificate", "1:40: listen.doq[0]: |taken by listen.doh[0]"}},
		{"recursion: {ipv4: false, ipv6: false}", []string{"1:19: recursion.ipv4: |both false"}},
		{"recursion: {ecs: {zones: [com]}}", []string{"1:27: recursion.ecs.zones[0]: |top-level domain"}},
		{"recursion: {ecs: {zones: [cdn.example.], ipv4: 33}}", []string{"1:48: recursion.ecs.ipv4: |32"}},
		{"recursion: {ipv6: false, outgoing: ['::1']}", []string{"1:37: recursion.outgoing[0]: |family"}},
		{"cache: {min_ttl: 2h, max_ttl: 1h}", []string{"1:18: cache.min_ttl: |more than max_ttl 1h0m0s"}},
		{"cache: {min_ttl: 48h}", []string{"1:18: cache.min_ttl: |more than max_ttl 24h"}},
		{"cache: {size: 2GiB}\nlimits: {memory: 1GiB}", []string{"1:15: cache.size: |limits.memory"}},
		{"cache: {size: 1GiB}\nlimits: {cache: 2GiB}", []string{"2:17: limits.cache: |cache.size"}},
		{"admin: {listen: '192.0.2.1:8053'}", []string{"1:17: admin.listen: |certificate"}},
		{"users: {services: ['192.0.2.1:8054', 'biz.example.net:8054', 'unix:/run/biz.sock', '127.0.0.1:1', '127.0.0.1:1']}", []string{
			"1:20: users.services[0]: |users.tls", "1:38: users.services[1]: |users.tls", "1:99: users.services[4]: |twice"}},
		{"users: {service_listen: '0.0.0.0:8054', peer_listen: '0.0.0.0:8055'}", []string{"1:25: users.service_listen: |", "1:54: users.peer_listen: |"}},
		{"users: {services: [''], tls: {cert: x}}", []string{"1:20: users.services[0]: |", "1:37: users.tls.cert: |cannot be read"}},
		{`stub_zones: [{name: a, addresses: [127.0.0.1, 192.0.2.1]}, {name: A., addresses: ["127.0.0.1:54"]}]`, []string{
			"1:36: stub_zones[0].addresses[0]: |ask itself", "1:67: stub_zones[1].name: |stub_zones[0] already"}},
		{"listen: {udp: ['0.0.0.0:53']}\nstub_zones: [{name: a, addresses: [127.0.0.7]}]", []string{"2:36: stub_zones[0].addresses[0]: |ask itself"}},
		{"stub_zones: [{addresses: []}]", []string{"1:|stub_zones[0].name: is missing", "1:|stub_zones[0].addresses: is empty"}},
		{`forward_zones: [{name: ., upstreams: [{url: "udp://192.0.2.1", role: shadow}]}]`, []string{"1:38: forward_zones[0].upstreams: |primary"}},
		{`forward_zones: [{name: ., upstreams: [{url: "udp://192.0.2.1"}, {url: "udp://192.0.2.2", role: spare}], strategy: quorum, quorum: 2}]`,
			[]string{"1:131: forward_zones[0].quorum: 2 is more than the 1|"}},
		{`forward_zones: [{name: ., upstreams: [{url: "udp://192.0.2.1"}], strategy: quorum}]`, []string{"1:76: forward_zones[0].strategy: |"}},
		{`forward_zones: [{name: ., upstreams: [{url: "udp://192.0.2.1"}], quorum: 1}]`, []string{"1:74: forward_zones[0].quorum: |no meaning"}},
		{`forward_zones: [{name: ., upstreams: [{url: 192.0.2.1}, {url: "udp://a.b"}, {url: "quic://192.0.2.1"}, {url: "tls://a.b:0"}, {url: "udp://192.0.2.1/x"}, {role: spare}, {url: "udp://127.0.0.1"}]}]`, []string{
			"1:45: forward_zones[0].upstreams[0].url: |udp://192.0.2.1", "1:63: forward_zones[0].upstreams[1].url: |", "1:83: forward_zones[0].upstreams[2].url: |scheme",
			"1:110: forward_zones[0].upstreams[3].url: |port", "1:132: forward_zones[0].upstreams[4].url: |path", "1:|forward_zones[0].upstreams[5].url: is missing",
			"1:175: forward_zones[0].upstreams[6].url: |ask itself"}},
		{`forward_zones: [{name: ., upstreams: [{url: "tls://dns.example.net"}, {url: "https://dns.example.net/q"}, {url: "tls://192.0.2.1#a b"}, {url: "udp://0.0.0.0"}, {url: "udp://192.0.2.1#x"}, {url: "https://192.0.2.1/?x"}]}]`, []string{
			"1:45: forward_zones[0].upstreams[0].url: |tls://ADDRESS#dns.example.net", "1:77: forward_zones[0].upstreams[1].url: |https://ADDRESS/q#dns.example.net",
			"1:113: forward_zones[0].upstreams[2].url: |certificate", "1:143: forward_zones[0].upstreams[3].url: |nobody", "1:167: forward_zones[0].upstreams[4].url: |encryption",
			"1:195: forward_zones[0].upstreams[5].url: |more parts"}},
		{`forward_zones: [{name: ., upstreams: [{url: "udp://192.0.2.1"}, {url: "udp://192.0.2.1:53", role: spare}], strategy: both}]`, []string{
			"1:71: forward_zones[0].upstreams[1].url: |twice", "1:118: forward_zones[0].strategy: |fastest"}},
		{`forward_zones: [{name: a, upstreams: [{url: "udp://192.0.2.1"}, {url: "tls://192.0.2.2", role: shadow}, {url: "tls://192.0.2.3", role: shadow}], strategy: quorum, quorum: 2}]`,
			[]string{"1:172: forward_zones[0].quorum: 2 is more than the 1|"}},
		{`forward_zones: [{name: a, upstreams: [{url: "udp://192.0.2.1"}]}, {name: A, upstreams: [{url: "udp://192.0.2.1"}], view: in}, {name: a., upstreams: [{url: "udp://192.0.2.1"}]}]`,
			[]string{"1:134: forward_zones[2].name: |forward_zones[0] already"}},
		{"policy_zones: [{name: a, file: sluice.yaml, action: cname}, {name: a, file: sluice.yaml, cname: b}]", []string{
			"1:53: policy_zones[0].action: |", "1:68: policy_zones[1].name: |twice", "1:97: policy_zones[1].cname: |"}},
		{`local_data: [{name: a, records: ["A 192.0.2.7", "B x", "A", "b. A 192.0.2.1", "$INCLUDE x", "CH TXT x", "A 192.0.2.1\nb. A 192.0.2.1"]}]`, []string{
			"1:49: local_data[0].records[1]: |", "1:56: local_data[0].records[2]: |", "1:61: local_data[0].records[3]: |", "1:79: local_data[0].records[4]: |",
			"1:93: local_data[0].records[5]: |class IN", "1:105: local_data[0].records[6]: |more than one"}},
		// files
		{"recursion: {local_root: missing.zone}", []string{"1:25: recursion.local_root: |cannot be read"}},
		{"recursion: {root_hints_file: sluice.yaml}", []string{"1:30: recursion.root_hints_file: |cannot be used"}},
		{"dnssec: {trust_anchor_file: /}", []string{"1:29: dnssec.trust_anchor_file: |not a regular file"}},
		{"testing: {clock_file: nowhere}", []string{"1:23: testing.clock_file: |cannot be read"}},
		{"log: {queries: nowhere/queries.log}", []string{"1:16: log.queries: |does not exist"}},
		{"data_dir: later\nlog: {queries: later/queries.log}", nil}, // the first start makes it
		{"data_dir: later\nlog: {queries: later/deep/queries.log}", []string{"2:16: log.queries: |does not exist"}},
		{"identify: {server_name: [dns.example]}", []string{"1:12: identify.server_name: |try: server_names"}}, // users.tls has one of that name
		{"tls: {certificates: [{cert: sluice.yaml}]}", []string{"1:|tls.certificates[0].key: is missing"}},
		{"tls: {certificates: [{cert: sluice.yaml, key: sluice.yaml}]}", []string{"1:29: tls.certificates[0].cert: |PEM"}},
	} {
		got := lines(t, tt.text)
		shown := strings.ReplaceAll(tt.text, "\n\n", "")
		if len(shown) > 200 {
			shown = shown[:200] + "…"
		}
		if len(got) != len(tt.want) {
			t.Errorf("%s\n%d faults, want %d:\n%s", shown, len(got), len(tt.want), strings.Join(got, "\n"))
			continue
		}
		for i := range got {
			start, part, _ := strings.Cut(tt.want[i], "|")
			if !strings.HasPrefix(got[i], start) || !strings.Contains(got[i][len(start):], part) {
				t.Errorf("%s\ngot  %s\nwant %s … %s", shown, got[i], start, part)
			}
		}
	}
}

func TestEveryEnumValue(t *testing.T) {
	places := map[reflect.Type]string{
		reflect.TypeFor[QNAMEMinimisation](): "recursion: {qname_minimisation: %s}",
		reflect.TypeFor[LocalZones]():        "recursion: {local_zones: %s}",
		reflect.TypeFor[AnyAnswer]():         "answers: {any: %s}",
		reflect.TypeFor[SHA1]():              "dnssec: {sha1: %s}",
		reflect.TypeFor[Strategy]():          `forward_zones: [{name: a, upstreams: [{url: "udp://192.0.2.1"}], strategy: %s}]`,
		reflect.TypeFor[Role]():              `forward_zones: [{name: a, upstreams: [{url: "udp://192.0.2.1"}, {url: "udp://192.0.2.2", role: %s}]}]`,
		reflect.TypeFor[PolicyAction]():      "policy_zones: [{name: a, file: sluice.yaml, action: %s}]",
		reflect.TypeFor[LogLevel]():          "log: {level: %s}",
		reflect.TypeFor[LogFormat]():         "log: {format: %s}",
	}
	for typ, words := range enums {
		place, ok := places[typ]
		if !ok {
			t.Errorf("%v is not tested", typ)
			continue
		}
		for _, w := range words {
			text := fmt.Sprintf(place, w)
			switch w { // these need another key
			case "quorum":
				text = strings.Replace(text, "strategy: quorum", "strategy: quorum, quorum: 1", 1)
			case "cname":
				text = strings.Replace(text, "action: cname", "action: cname, cname: b", 1)
			}
			c := mustLoad(t, text)
			if !strings.Contains(fmt.Sprintf("%+v", *c), ":"+w) {
				t.Errorf("%s is not in %+v", text, c)
			}
		}
		got := lines(t, fmt.Sprintf(place, "bogus"))
		if len(got) != 1 || !strings.Contains(got[0], strings.Join(words, ", ")) {
			t.Errorf("%v: %v, want the allowed values", typ, got)
		}
	}
}

func TestFullFile(t *testing.T) {
	c := mustLoad(t, `
data_dir: data
node: { id: ams-1, region: eu }
listen:
  udp: [127.0.0.1:0, 127.0.0.1:0, "[::1]:5300", "[fe80::1%lo]:5300"]
  tcp: ""
  proxy_protocol_from: [192.0.2.9, 10.0.0.0/8]
admin: { listen: unix:admin.sock }
http: { listen: [] }
identify:
  server_names: [DNS.Example.net]
  default_device: { "[::1]:5300": KID-1 }
stranger: guests
recursion:
  do_not_query: []
  upstream_port: 5353
  qname_minimisation: off
local_data:
  - name: Nas.Home.arpa
    records: ["A 192.0.2.7", "300 TXT \"a b\"", "CNAME other"]
stub_zones:
  - { name: corp.example., addresses: [192.0.2.1, "192.0.2.1:54", "2001:db8::1"], view: inside }
forward_zones:
  - name: .
    upstreams:
      - url: udp://192.0.2.1
      - { url: "tls://192.0.2.2#dns.example.net", role: spare }
      - { url: "https://192.0.2.3/q#Dns.example.net", role: shadow }
      - { url: "https://[2001:db8::1]:8443" }
cache: { size: 64MiB, serve_stale: { client_timeout: 0s } }
limits: { class: 2g, cache: 64MiB, pipelining: 1 }
users: { services: ["unix:/run/biz.sock", "localhost:8054"], shrink_guard: { share: 2.5% } }
log: { queries: stdout }
`)
	dir := filepath.Dir(c.DataDir)
	if filepath.Base(c.DataDir) != "data" || !filepath.IsAbs(dir) {
		t.Errorf("data_dir %q is not in the folder of the file", c.DataDir)
	}
	anchor := c.ForwardZones[0].Upstreams
	for _, tt := range []struct{ got, want any }{
		{c.Node, Node{"ams-1", "eu"}},
		{fmt.Sprint(c.Listen.UDP), "[127.0.0.1:0 127.0.0.1:0 [::1]:5300 [fe80::1%lo]:5300]"},
		{len(c.Listen.TCP), 0},
		{fmt.Sprint(c.Listen.ProxyProtocolFrom), "[192.0.2.9/32 10.0.0.0/8]"},
		{c.Admin.Listen, Endpoint{"unix", dir + "/admin.sock"}},
		{c.Admin.Listen.String(), "unix:" + dir + "/admin.sock"},
		{c.HTTP.Listen.Off(), true},
		{fmt.Sprint(c.Identify.ServerNames), "[dns.example.net.]"},
		{c.Identify.DefaultDevice[netip.MustParseAddrPort("[::1]:5300")], "kid-1"},
		{c.Stranger, "guests"},
		{fmt.Sprintf("%+v", c.Recursion.DoNotQuery), "{Default:false Networks:[]}"},
		{c.Recursion.QNAMEMinimisation, MinimiseOff},
		{c.LocalData[0].Name, "nas.home.arpa."},
		{fmt.Sprint(c.StubZones[0].Addresses), "[192.0.2.1:5353 192.0.2.1:54 [2001:db8::1]:5353]"},
		{c.StubZones[0].View, "inside"},
		{c.ForwardZones[0].Strategy, Fastest},
		{anchor[0], Upstream{UpstreamURL{Text: "udp://192.0.2.1", Scheme: "udp", Addr: netip.MustParseAddrPort("192.0.2.1:5353")}, Primary}},
		{anchor[1], Upstream{UpstreamURL{Text: "tls://192.0.2.2#dns.example.net", Scheme: "tls", Addr: netip.MustParseAddrPort("192.0.2.2:853"), ServerName: "dns.example.net"}, Spare}},
		{anchor[2], Upstream{UpstreamURL{Text: "https://192.0.2.3/q#Dns.example.net", Scheme: "https", Addr: netip.MustParseAddrPort("192.0.2.3:443"), Path: "/q", ServerName: "dns.example.net"}, Shadow}},
		{anchor[3], Upstream{UpstreamURL{Text: "https://[2001:db8::1]:8443", Scheme: "https", Addr: netip.MustParseAddrPort("[2001:db8::1]:8443"), Path: "/dns-query", ServerName: "2001:db8::1"}, Primary}},
		{c.Cache.Size, int64(64 << 20)},
		{c.Cache.ServeStale, ServeStale{true, 24 * time.Hour, 30 * time.Second, 0}},
		{c.Limits, Limits{"2g", map[string]int64{"cache": 64 << 20, "pipelining": 1}}},
		{c.Users.ShrinkGuard, ShrinkGuard{0.025, 20, 24 * time.Hour}},
		{c.Log.Queries, "stdout"},
		{c.Users.Services, []Endpoint{{"unix", "/run/biz.sock"}, {"tcp", "127.0.0.1:8054"}}},
		{c.Fault("limits.cache", "x", "y").String(), dir + "/sluice.yaml:31:29: limits.cache: x; try: y"},
		{c.Fault("limits.in_flight", "x", "y").String(), dir + "/sluice.yaml:31:9: limits.in_flight: x; try: y"},
	} {
		if !reflect.DeepEqual(tt.got, tt.want) {
			t.Errorf("got %+v, want %+v", tt.got, tt.want)
		}
	}
	rrs, err := c.LocalData[0].RRs()
	if err != nil || len(rrs) != 3 || rrs[1].Header().Ttl != 300 || rrs[2].String() != "nas.home.arpa.\t3600\tIN\tCNAME\tother." {
		t.Errorf("records %v, %v", rrs, err)
	}
}

// keyPair writes a certificate that is its own authority.
func keyPair(t *testing.T, dir, name string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Unix(1<<32, 0)}
	cert, err := x509.CreateCertificate(rand.Reader, &template, &template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, b := range map[string]*pem.Block{name + ".pem": {Type: "CERTIFICATE", Bytes: cert}, name + ".key": {Type: "PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(filepath.Join(dir, file), pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFilesThatAreNamed(t *testing.T) {
	dir := t.TempDir()
	keyPair(t, dir, "a")
	keyPair(t, dir, "b")
	for name, text := range map[string]string{
		"hints":      ". 3600000 NS a.root-servers.net.\nA.root-servers.net. 3600000 A 192.0.2.53\n",
		"no-address": ". 3600000 NS a.root-servers.net.\n",
		"anchors":    "; a comment\n. IN DS 20326 8 2 E06D44B80B8F1D39A95C0B0D7C65D08458E880409BBC683457104237C7F8EC8D\n",
		"empty":      "",
		"zone":       ". 1 NS a.\na. 1 A 192.0.2.1\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct{ text, want string }{
		{"tls: {certificates: [{cert: a.pem, key: a.key}]}\nlisten: {dot: ['0.0.0.0:853']}\nadmin: {listen: '0.0.0.0:8053'}", ""},
		{"tls: {certificates: [{cert: a.pem, key: b.key}]}", "tls.certificates[0].cert: cannot be used"},
		{"users: {services: ['192.0.2.1:1'], tls: {ca: b.pem, cert: a.pem, key: a.key}}", ""},
		{"users: {services: ['192.0.2.1:1'], tls: {cert: a.pem, key: a.key}}", "users.services[0]"},
		{"users: {tls: {ca: a.key}}", "users.tls.ca"},
		{"users: {tls: {cert: a.pem}}", "users.tls.cert: there is no key"},
		{"users: {tls: {key: a.key}}", "users.tls.key: there is no certificate"},
		{"recursion: {root_hints_file: hints}", ""},
		{"recursion: {root_hints_file: no-address}", "recursion.root_hints_file"},
		{"recursion: {root_hints_file: empty}", ""},
		{"dnssec: {trust_anchor_file: anchors}", ""},
		{"dnssec: {trust_anchor_file: empty}", ""},
		{"dnssec: {trust_anchor_file: zone}", "type NS"},
	} {
		path := filepath.Join(dir, "sluice.yaml")
		if err := os.WriteFile(path, []byte(tt.text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, faults := Load(path)
		if ok := len(faults) == 0; ok != (tt.want == "") || !ok && (len(faults) > 1 || !strings.Contains(faults[0].String(), tt.want)) {
			t.Errorf("%s\n%v, want %q", tt.text, faults, tt.want)
		}
	}
}

func TestBizd(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{"store: postgres://sluice@db.example/sluice", ""},
		{"store: mysql://x:secret@y", "1:8: store: "},
		{"listen: '0.0.0.0:8054'", "1:9: listen: "},
		{"listen: ''", "1:9: listen: "},
		{"http: {listen: '127.0.0.1:8054'}", "1:16: http.listen: "},
		{"fetch: {max_size: 8GiB}", "1:19: fetch.max_size: "},
		{"transfers: 0", "1:12: transfers: "},
		{"cache: {}", "1:1: cache: unknown key"},
	} {
		path := write(t, tt.text)
		c, faults := LoadBizd(path)
		if (len(faults) == 0) != (tt.want == "") || (c == nil) != (tt.want != "") || len(faults) > 1 ||
			tt.want != "" && !strings.HasPrefix(faults[0].String(), path+":"+tt.want) {
			t.Errorf("%s\n%v, want %q", tt.text, faults, tt.want)
		}
		if strings.Contains(fmt.Sprint(faults), "secret") {
			t.Errorf("a password is repeated: %v", faults)
		}
	}
}

func TestUnreadableFile(t *testing.T) {
	long := write(t, strings.Repeat("#", maxFile+1))
	for _, path := range []string{filepath.Join(t.TempDir(), "nowhere.yaml"), t.TempDir(), long} {
		if c, faults := Load(path); c != nil || len(faults) != 1 || !strings.HasPrefix(faults[0].String(), path+":1:1: file: cannot be read: ") {
			t.Errorf("%s: %v", path, faults)
		}
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]int64{"0": 0, "1KiB": 1024, "512MiB": 512 << 20, "1024GiB": 1 << 40, "0GiB": 0} {
		if got, err := ParseSize(text); err != nil || got != want {
			t.Errorf("%q = %d, %v", text, got, err)
		}
	}
	for text, try := range map[string]string{"": "", "5": "", "-1MiB": "", "+1MiB": "", "1.5GiB": "", "9999999999GiB": "", "MiB": "", "1 MiB": "1MiB",
		"5MB": "5MiB", "5m": "5MiB", "5gib": "5GiB", "5k": "5KiB", "5TiB": "", "99999999999999999999MiB": ""} {
		if _, err := ParseSize(text); err == nil || !strings.HasSuffix(err.Error(), try) {
			t.Errorf("%q: %v, want a hint at %q", text, err, try)
		}
	}
}

// Aliases may unfold a small file into a huge one; decoding stops at a bound.
func TestAliases(t *testing.T) {
	c := mustLoad(t, "access:\n  allow: &home [192.0.2.0/24, &one 2001:db8::1]\n  unlimited: *home\nidentify: {relays: [*one]}")
	if fmt.Sprint(c.Access.Unlimited, c.Identify.Relays) != "[192.0.2.0/24 2001:db8::1/128] [2001:db8::1/128]" {
		t.Errorf("%v %v", c.Access.Unlimited, c.Identify.Relays)
	}
	bomb := "local_data:\n- &z {name: a, records: &r [" + strings.Repeat("A 192.0.2.1,", 20000) + "]}\n" + strings.Repeat("- *z\n", 20000)
	if got := lines(t, bomb); len(got) != 1 || !strings.Contains(got[0], "unfolds") {
		t.Errorf("%d faults, first %v", len(got), got[:min(len(got), 1)])
	}
	if got := lines(t, "access: {allow: &a [*a, *a]}\nlisten: &l {udp: *l}"); len(got) != 3 {
		t.Errorf("values that hold themselves: %v", got)
	}
}

func TestManyFaultsAreBounded(t *testing.T) {
	got := lines(t, "access: {allow: ["+strings.Repeat("x,", 5000)+"]}")
	if len(got) != maxFaults {
		t.Errorf("%d faults, want %d", len(got), maxFaults)
	}
}

func TestDistance(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"", "abc", 3}, {"tpc", "tcp", 1}, {"cach", "cache", 1}, {"kitten", "sitting", 3}, {"same", "same", 0}, {strings.Repeat("x", 99), "x", 48}} {
		if got := distance(tt.a, tt.b); got != tt.want {
			t.Errorf("%q to %q: %d, want %d", tt.a, tt.b, got, tt.want)
		}
		if got := distance(tt.b, tt.a); got != tt.want {
			t.Errorf("%q to %q: %d, want %d", tt.b, tt.a, got, tt.want)
		}
	}
}

func FuzzLoad(f *testing.F) {
	for _, path := range []string{"testdata/sluice.yaml", "testdata/bizd.yaml"} {
		text, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	for _, s := range []string{
		"a: &a [*a]", "<<: {}", "? x", "listen: {udp: [127.0.0.1:53, ::1]}", "limits: {cache: 1GiB, class: 2g}", "a: |\n b\n", "- - -", "!!a b", "%", "\x00",
		`forward_zones: [{name: ., upstreams: [{url: "tls://192.0.2.1#x"}], strategy: quorum, quorum: 1}]`,
		`local_data: [{name: a, records: ["A 192.0.2.7"]}]`, `identify: {default_device: {"127.0.0.1:53": kid}}`,
		`users: {services: [unix:/a, "a.b:1"], shrink_guard: {share: 1%}}`,
	} {
		f.Add([]byte(s))
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, c := range []interface{ check(*decoder) }{Default(), DefaultBizd()} {
			d := &decoder{file: "x", dir: dir}
			d.decode(text, c)
			if s, ok := c.(*Sluice); ok {
				s.settle()
			}
			c.check(d)
			for _, fault := range d.faults() {
				if s := fault.String(); fault.Line < 1 || fault.Col < 1 || fault.Key == "" || fault.What == "" || fault.Try == "" || strings.ContainsAny(s, "\n\r") {
					t.Fatalf("%+v", fault)
				}
			}
		}
	})
}

// A hints file without records is no hints file; one with records but no servers of the root is a fault.
func TestEmptyHints(t *testing.T) {
	file := filepath.Join(t.TempDir(), "hints.zone")
	for content, want := range map[string]string{"; nothing\n": "", "a. 60 A 192.0.2.1\n": "no NS record of the root", ". 60 NS a.\n": "no NS record of the root", ". 60 NS a.\na. 60 A 192.0.2.1\n": ""} {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		got := lines(t, "recursion: {root_hints_file: '"+file+"'}\n")
		if want == "" && len(got) > 0 || want != "" && (len(got) != 1 || !strings.Contains(got[0], want)) {
			t.Errorf("%q: %q", content, got)
		}
	}
}
