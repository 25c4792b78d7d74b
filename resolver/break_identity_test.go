package resolver_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/internal/listen/listentest"
	"github.com/sluice-dns/sluice/usercache"
)

// Ids that are none, in every place where a client can show one, make nobody: they are never passed over for the address
// that the client comes from, nor cut, decoded or completed to somebody's.
func TestIdsThatAreNone(t *testing.T) {
	d := newDoor(t, nil, &userv1.Device{Id: "cli"}, &userv1.Device{Id: "here", Links: []string{"127.0.0.7"}}, &userv1.Device{Id: "xn--bcher-kva"})
	d.put("longest", &userv1.User{Devices: []*userv1.Device{{Id: strings.Repeat("a", 63)}}})
	all := knocks{
		"the longest, in the path": {knock{over: "doh", path: "/dns-query/" + strings.Repeat("A", 63)}, strings.Repeat("a", 63)},
		"the longest, by name":     {knock{over: "dot", sni: strings.Repeat("A", 63) + ".dns.example"}, strings.Repeat("a", 63)},
		"capitals":                 {knock{over: "dot", sni: "CLI.Dns.Example"}, "cli"},
		"an A-label":               {knock{over: "doh", path: "/dns-query/XN--bcher-kva"}, "xn--bcher-kva"},
		"decoded":                  {knock{over: "doh", path: "/dns-query/%63%6C%69"}, "cli"},
	}
	for what, p := range map[string]string{"too long": strings.Repeat("a", 64), "much too long": strings.Repeat("a", 5000), "a dot": "cli.cli", "a dot behind": "cli.", "a colon": ":cli", "colons": "cli:cli", "a blank": "cli%20", "NUL": "cli%00", "newline": "cli%0a",
		"UTF-8": "cl%C4%B1", "a U-label": "b%C3%BCcher", "bad UTF-8": "cli%ff", "underscore": "c_li", "star": "*", "plus": "+cli", "fullwidth": "%EF%BD%83li", "semicolon": "cli;x", "a hyphen first": "-cli", "percent": "%25cli", "a question": "%3Fcli"} {
		all[what] = struct {
			k    knock
			want string
		}{knock{over: "doh", from: "127.0.0.7", path: "/dns-query/" + p}, "REFUSED"}
	}
	all["a slash within"] = struct {
		k    knock
		want string
	}{knock{over: "doh", from: "127.0.0.7", path: "/dns-query/cli%2Fx"}, "HTTP 404"}
	for what, n := range map[string]string{"two labels": "a.cli.dns.example", "under a device": "cli.cli.dns.example", "underscore, by name": "c_li.dns.example", "nobody": "nobody.dns.example"} {
		all[what] = struct {
			k    knock
			want string
		}{knock{over: "dot", from: "127.0.0.7", sni: n}, "REFUSED"}
	}
	d.tls.InsecureSkipVerify = true // names that no certificate has
	for what, n := range map[string]string{"the bare name": "dns.example", "another's name": "cli.dns.example.net", "a name that ends so": "clidns.example"} {
		all[what] = struct {
			k    knock
			want string
		}{knock{over: "dot", from: "127.0.0.7", sni: n}, "here"}
	}
	for what, u := range map[string]string{"user too long": strings.Repeat("a", 64), "user with a dot": "cli.x", "user of UTF-8": "clı", "user with a blank": " cli", "user huge": strings.Repeat("a", 10_000)} {
		all[what] = struct {
			k    knock
			want string
		}{knock{over: "doh", from: "127.0.0.7", path: "/dns-query/cli", user: u, password: "x"}, "REFUSED"}
	}
	d.check(all)
}

// What cannot be understood in a header of authentication, or is there twice, serves nobody, and least of all somebody
// else; a header beyond all measure ends its own connection.
func TestStrangeAuthorization(t *testing.T) {
	token, other := sha256.Sum256([]byte("token")), sha256.Sum256([]byte("other"))
	d := newDoor(t, nil, &userv1.Device{Id: "dev", TokenSha256: [][]byte{token[:]}}, &userv1.Device{Id: "oth", TokenSha256: [][]byte{other[:]}}, &userv1.Device{Id: "here", Links: []string{"127.0.0.7"}})
	basic := func(s string) string { return "Basic " + base64.StdEncoding.EncodeToString([]byte(s)) }
	status := func(path string, h http.Header) string {
		wire, _ := new(dns.Msg).SetQuestion(doorName, dns.TypeA).Pack()
		req, err := http.NewRequest("POST", "https://"+d.doh.String()+path, bytes.NewReader(wire))
		if err != nil {
			t.Fatal(err)
		}
		for k, v := range h {
			req.Header[k] = v
		}
		req.Header.Set("Content-Type", "application/dns-message")
		tr := &http.Transport{TLSClientConfig: d.tls.Clone(), ForceAttemptHTTP2: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
			return d.dial(knock{over: "doh", from: "127.0.0.7"})
		}}
		defer tr.CloseIdleConnections()
		resp, err := (&http.Client{Transport: tr, Timeout: 15 * time.Second}).Do(req)
		if err != nil {
			return "no response"
		}
		defer resp.Body.Close()
		if resp.StatusCode != 200 {
			return fmt.Sprint("HTTP ", resp.StatusCode)
		}
		var b bytes.Buffer
		if _, err := b.ReadFrom(resp.Body); err != nil {
			return "no response"
		}
		m := new(dns.Msg)
		if err := m.Unpack(b.Bytes()); err != nil {
			t.Fatal(err)
		}
		if len(m.Answer) == 1 {
			return d.known[m.Answer[0].(*dns.A).A.String()]
		}
		return dns.RcodeToString[m.Rcode]
	}
	for _, c := range []struct {
		what, path string
		auth       []string
		want       string
	}{
		{"good", "/dns-query", []string{basic("dev:token")}, "dev"},
		{"none", "/dns-query", nil, "here"},
		{"empty", "/dns-query", []string{""}, "here"},
		{"the same twice", "/dns-query", []string{basic("dev:token"), basic("dev:token")}, "HTTP 400"},
		{"two", "/dns-query", []string{basic("dev:token"), basic("oth:other")}, "HTTP 400"},
		{"one empty", "/dns-query", []string{"", basic("dev:token")}, "HTTP 400"},
		{"joined", "/dns-query", []string{basic("dev:token") + ", " + basic("oth:other")}, "HTTP 400"},
		{"no base64", "/dns-query", []string{"Basic ###"}, "HTTP 400"},
		{"no colon", "/dns-query", []string{basic("dev")}, "HTTP 400"},
		{"nothing in it", "/dns-query", []string{basic(":")}, "HTTP 400"},
		{"nobody's password", "/dns-query", []string{basic(":token")}, "REFUSED"},
		{"another scheme", "/dns-query", []string{"Digest username=dev"}, "HTTP 400"},
		{"bearer of nothing", "/dns-query/dev", []string{"Bearer "}, "HTTP 400"},
		{"bearer without a device", "/dns-query", []string{"Bearer token"}, "REFUSED"},
		{"bearer for another", "/dns-query/oth", []string{"Bearer token"}, "REFUSED"},
		{"not ASCII", "/dns-query", []string{basic("d\xc3\xabv:token")}, "REFUSED"},
		{"password not ASCII", "/dns-query", []string{basic("dev:t\xc3\xb6ken")}, "REFUSED"},
		{"NUL", "/dns-query", []string{basic("dev\x00:token")}, "REFUSED"},
		{"password goes on", "/dns-query", []string{basic("dev:token:token")}, "REFUSED"},
		{"password is its beginning", "/dns-query", []string{basic("dev:toke")}, "REFUSED"},
		{"capitals of the user", "/dns-query", []string{basic("DEV:token")}, "dev"},
		{"capitals of the password", "/dns-query", []string{basic("dev:TOKEN")}, "REFUSED"},
		{"a password of 12 kB", "/dns-query", []string{basic("dev:" + strings.Repeat("x", 9000))}, "REFUSED"},
	} {
		h := http.Header{}
		if c.auth != nil {
			h["Authorization"] = c.auth
		}
		if got := status(c.path, h); got != c.want {
			t.Errorf("%s: %q, want %q", c.what, got, c.want)
		}
	}
	if got := status("/dns-query", http.Header{"Authorization": {basic("dev:" + strings.Repeat("x", 10<<20))}}); got != "no response" && got != "HTTP 431" {
		t.Errorf("a header of 10 MB: %q", got)
	}
	if got := status("/dns-query", http.Header{"Authorization": {basic("dev:token")}}); got != "dev" {
		t.Errorf("after it: %q", got)
	}
}

// PROXY headers that are none end the connection or the datagram, whatever stands behind them; who the proxy does not know
// is the proxy.
func TestStrangeProxyHeaders(t *testing.T) {
	d := newDoor(t, nil, &userv1.Device{Id: "client", Links: []string{"192.0.2.7"}}, &userv1.Device{Id: "proxy", Links: []string{"127.0.0.98"}}, &userv1.Device{Id: "six", Links: []string{"2001:db8:1::/64"}})
	good := listentest.ProxyHeader("192.0.2.7:4000", "198.51.100.1:53")
	edit := func(f func(b []byte) []byte) []byte { return f(bytes.Clone(good)) }
	size := func(b []byte, n int) []byte { binary.BigEndian.PutUint16(b[14:], uint16(n)); return b }
	mapped := append(bytes.Clone(good[:13]), 0x21, 0, 36)
	mapped = append(mapped, []byte("\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\xc0\x00\x02\x07")...)
	mapped = append(mapped, make([]byte, 16)...)
	mapped = append(mapped, 15, 160, 0, 53)
	var all sync.WaitGroup
	for _, over := range []string{"udp", "tcp", "dot", "doh"} {
		all.Go(func() {
			by := func(h []byte) knock { return knock{over: over, from: "127.0.0.98", proxy: h} }
			cases := knocks{
				over + ", good":                {by(good), "client"},
				over + ", UNSPEC":              {by(edit(func(b []byte) []byte { b[13] = 0; return size(b, 12) })), "proxy"},
				over + ", UNSPEC of nothing":   {by(size(append(bytes.Clone(good[:13]), 0, 0, 0), 0)), "proxy"},
				over + ", LOCAL with garbage":  {by(edit(func(b []byte) []byte { b[12], b[13] = 0x20, 0xff; return b })), "proxy"},
				over + ", IPv4 within IPv6":    {by(mapped), "client"},
				over + ", TLVs up to the most": {by(size(append(bytes.Clone(good), make([]byte, 512-28)...), 512-16)), "client"},
				over + ", too short for two":   {by(size(bytes.Clone(good[:24]), 8)), "silence"},
				over + ", command 2":           {by(edit(func(b []byte) []byte { b[12] = 0x22; return b })), "silence"},
				over + ", version 3":           {by(edit(func(b []byte) []byte { b[12] = 0x31; return b })), "silence"},
				over + ", family 4":            {by(edit(func(b []byte) []byte { b[13] = 0x41; return b })), "silence"},
				over + ", transport 3":         {by(edit(func(b []byte) []byte { b[13] = 0x13; return b })), "silence"},
				over + ", longer than sent":    {by(size(bytes.Clone(good), 500)), "silence"},
				over + ", 64 kB":               {by(size(bytes.Clone(good), 65535)), "silence"},
				over + ", a broken signature":  {by(edit(func(b []byte) []byte { b[11] = 'x'; return b })), "silence"},
			}
			for what, c := range cases { // silence takes its time
				all.Go(func() { d.check(knocks{what: c}) })
			}
			// A second header is part of what follows, which is no DNS message then.
			if got := d.as(knock{over: over, from: "127.0.0.98", proxy: append(bytes.Clone(good), good...), silent: true}); got == "client" || got == "proxy" {
				t.Errorf("%s, twice: %q", over, got)
			}
		})
	}
	all.Wait()
}

// EDNS options of a relay that are there twice, or of a wrong length, make nobody; from others they mean nothing.
func TestStrangeRelayOptions(t *testing.T) {
	d := newDoor(t, nil, &userv1.Device{Id: "phone", EdnsIds: []string{"0a0b0c0d0e0f"}}, &userv1.Device{Id: "line", EdnsIds: []string{"cpe:box-7"}}, &userv1.Device{Id: "long", EdnsIds: []string{"cpe:" + strings.Repeat("b", 64)}},
		&userv1.Device{Id: "relay", Links: []string{"127.0.0.99"}}, &userv1.Device{Id: "here", Links: []string{"127.0.0.7"}})
	local := func(code uint16, v string) dns.EDNS0 { return &dns.EDNS0_LOCAL{Code: code, Data: []byte(v)} }
	mac, other := "\x0a\x0b\x0c\x0d\x0e\x0f", "\x0a\x0b\x0c\x0d\x0e\x00"
	for _, over := range []string{"udp", "tcp"} {
		relay := func(o ...dns.EDNS0) knock { return knock{over: over, from: "127.0.0.99", options: o} }
		cases := knocks{
			"good":                {relay(local(65001, mac)), "phone"},
			"the first of two":    {relay(local(65001, mac), local(65001, other)), "phone"},
			"the first is nobody": {relay(local(65001, other), local(65001, mac)), "REFUSED"},
			"a CPE-ID of 64":      {relay(local(65074, strings.Repeat("b", 64))), "long"},
			"a CPE-ID of 65":      {relay(local(65074, strings.Repeat("b", 65))), "REFUSED"},
			"a CPE-ID of nothing": {relay(local(65074, "")), "REFUSED"},
			"CPE-ID with prefix":  {relay(local(65074, "cpe:box-7")), "REFUSED"},
			"CPE-ID in capitals":  {relay(local(65074, "BOX-7")), "REFUSED"},
			"no option":           {knock{over: over, from: "127.0.0.99"}, "relay"},
		}
		for _, n := range []int{0, 1, 5, 7, 8, 64, 65, 400} {
			cases[fmt.Sprintf("a MAC address of %d bytes", n)] = struct {
				k    knock
				want string
			}{relay(local(65001, strings.Repeat("\x0a", n))), "REFUSED"}
			cases[fmt.Sprintf("a MAC address of %d bytes, and a good CPE-ID", n)] = struct {
				k    knock
				want string
			}{relay(local(65001, strings.Repeat("\x0a", n)), local(65074, "box-7")), "REFUSED"}
		}
		for _, text := range []string{"0a:0b:0c:0d:0e", "0a:0b:0c:0d:0e:0f:10", "0g:0b:0c:0d:0e:0f", "CgsMDQ4=", "        ", "0a0b0c0d0e0f\x00"} {
			cases["text "+text] = struct {
				k    knock
				want string
			}{relay(local(65073, text)), "REFUSED"}
		}
		for what, c := range cases {
			cases["of no relay: "+what] = struct {
				k    knock
				want string
			}{knock{over: over, from: "127.0.0.7", options: c.k.options}, "here"}
		}
		d.check(cases)
	}
}

// Limits of a user hold over all transports, ports, connections and devices together, exactly, and are nobody else's.
func TestRateLimitOverEverything(t *testing.T) {
	d := newDoor(t, nil, &userv1.Device{Id: "open", Links: []string{"127.0.0.8"}}, &userv1.Device{Id: "also"})
	d.put("ann", &userv1.User{Settings: &userv1.Settings{RateLimit: proto.Uint32(1), RateBurst: proto.Uint32(120)}, Devices: []*userv1.Device{
		{Id: "pc", Links: []string{"127.0.0.7", "127.0.0.6"}}, {Id: "tv", Links: []string{"127.0.0.5"}}, {Id: "tab"}}})
	start := time.Now()
	var mu sync.Mutex
	got := map[string]int{}
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for n := range 25 {
				k := []knock{{over: "udp", from: "127.0.0.7"}, {over: "udp", from: "127.0.0.6"}, {over: "tcp", from: "127.0.0.5"}, {over: "dot", sni: "tab.dns.example"}, {over: "doh", path: "/dns-query/tv"}}[(n+i)%5]
				as := d.as(k)
				mu.Lock()
				got["ann "+as]++
				mu.Unlock()
				if n%5 == 0 {
					for _, k := range []knock{{over: "udp", from: "127.0.0.8"}, {over: "dot", sni: "also.dns.example"}} {
						as := d.as(k)
						mu.Lock()
						got[as]++
						mu.Unlock()
					}
				}
			}
		})
	}
	all.Wait()
	earned := int(time.Since(start).Seconds()) + 1
	if n := got["ann pc"]; n < 120 || n > 120+earned || n+got["ann REFUSED"] != 200 || got["open"] != 40 || got["also"] != 40 {
		t.Errorf("of 200, with 120 at once and %d earned: %v", earned, got)
	}
}

// Proposals for devices that do not exist cost the query path a call, whoever floods.
func TestFloodOfUnknownDevices(t *testing.T) {
	proposed := make(chan string, 4)
	d := newDoor(t, func(o *resolver.Options) {
		o.Identify.Propose = func(id *usercache.DeviceID) {
			select {
			case proposed <- id.String():
			default: // lossy, as the queue behind is
			}
		}
	}, &userv1.Device{Id: "here", Links: []string{"127.0.0.7"}})
	d.put("kid", &userv1.User{AutoDevices: true, MaxDevices: 2, Devices: []*userv1.Device{{Id: "kid-pc"}}})
	for i := range 50 {
		if got := d.as(knock{over: "doh", path: fmt.Sprintf("/dns-query/kid-%d", i), from: "127.0.0.7"}); got != "REFUSED" {
			t.Fatalf("an id that is no device yet was served as %q", got)
		}
	}
	if len(proposed) != 4 {
		t.Errorf("%d proposals", len(proposed))
	}
}
