package resolver_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/crypto/argon2"
	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/listen/listentest"
	"github.com/sluice-dns/sluice/usercache"
)

// A door is a resolver with every transport on real sockets, asked one name, which each of its users has rewritten
// to an address of its own: so the answer tells as whom the client was served.
type door struct {
	t        *testing.T
	users    *usercache.Cache
	tls      *tls.Config
	udp, tcp netip.AddrPort
	dot, doh netip.AddrPort
	known    map[string]string // address -> device
	revision uint64

	mu       sync.Mutex
	proposed []string
}

const doorName = "who.example."

var doorIdentity = usercache.Identity{Dataset: [16]byte{1}, Lineage: [16]byte{1}}

func newDoor(t *testing.T, edit func(*resolver.Options), devices ...*userv1.Device) *door {
	t.Helper()
	d := &door{t: t, known: map[string]string{}}
	var err error
	if d.users, err = usercache.Open(usercache.Options{Dir: t.TempDir(), ProfilesCached: 64}); err != nil {
		t.Fatal(err)
	}
	fillEmpty(t, d.users)
	for _, dev := range devices {
		d.put("of-"+dev.Id, &userv1.User{Devices: []*userv1.Device{dev}})
	}
	o := resolver.Options{
		Limits: limitsWith(nil), Users: d.users, Logger: slog.New(slog.DiscardHandler),
		Access:  resolver.AccessOptions{Allow: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/25"), netip.MustParsePrefix("192.0.2.0/24")}},
		Answers: resolver.AnswerOptions{MaxUDP: 1232, EDE: true},
		Identify: resolver.IdentifyOptions{
			ServerNames: []string{"dns.example"}, Relays: []netip.Prefix{netip.MustParsePrefix("127.0.0.99/32")},
			Propose: func(id *usercache.DeviceID) {
				d.mu.Lock()
				defer d.mu.Unlock()
				d.proposed = append(d.proposed, id.String())
			},
		},
		Recursion: resolver.RecursionOptions{RootHints: ". NS a.\na. A 127.0.0.1\n", HintsFile: "hints", UpstreamPort: 1},
		Transport: resolver.Dialing(func(context.Context, string, string) (net.Conn, error) { return nil, net.ErrClosed }),
	}
	o.Listeners.GetCertificate, d.tls = listentest.Certificate()
	o.Listeners.ProxyFrom = []netip.Prefix{netip.MustParsePrefix("127.0.0.98/32")}
	listen := func(to *[]net.Listener) netip.AddrPort {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		*to = append(*to, l)
		return l.Addr().(*net.TCPAddr).AddrPort()
	}
	d.tcp, d.dot, d.doh = listen(&o.Listeners.TCP), listen(&o.Listeners.DoT), listen(&o.Listeners.DoH)
	pc, err := net.ListenPacket("udp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	o.Listeners.UDP = []net.PacketConn{pc}
	d.udp = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(pc.LocalAddr().(*net.UDPAddr).Port))
	if edit != nil {
		edit(&o)
	}
	r, err := resolver.New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		r.Close()
		d.users.Close()
	})
	return d
}

// put writes a user whose queries are answered by an address of its own; nil removes it.
func (d *door) put(id string, u *userv1.User) {
	d.t.Helper()
	d.revision++
	c := usercache.Change{Key: []byte(id), Revision: d.revision, Removed: u == nil}
	if u != nil {
		addr := fmt.Sprint("10.0.0.", d.revision)
		d.known[addr] = u.Devices[0].Id
		if u.Settings == nil {
			u.Settings = new(userv1.Settings)
		}
		u.Settings.Rewrites = &userv1.RewriteSet{Values: []*userv1.Rewrite{{Name: strings.TrimSuffix(doorName, "."), Records: []string{"A " + addr}}}}
		var err error
		if c.Bytes, err = proto.Marshal(u); err != nil {
			d.t.Fatal(err)
		}
	}
	if _, err := d.users.Dataset(usercache.Users).ApplyDelta(d.t.Context(), doorIdentity, usercache.Delta{From: d.revision - 1, To: d.revision, Changes: []usercache.Change{c}}, clock.Wall()); err != nil {
		d.t.Fatal(err)
	}
}

// A knock is one query: over which transport, from where, and what it shows.
type knock struct {
	over           string // udp, tcp, dot, doh
	from, to       string // addresses of ours; default 127.0.0.1
	sni, path      string
	user, password string
	bearer         string
	options        []dns.EDNS0
	proxy          []byte // sent first
	silent         bool   // no answer is expected, so it is not waited for
}

// patience is how long an answer is waited for: where none is expected a thousand times what one takes on
// loopback, else as long as a busy machine may take.
func (k knock) patience() time.Duration {
	if k.silent {
		return 700 * time.Millisecond
	}
	return 10 * time.Second
}

// as says as whom a client was served: a device, an RCODE, "HTTP n", or "silence".
func (d *door) as(k knock) string {
	d.t.Helper()
	m := new(dns.Msg)
	m.SetQuestion(doorName, dns.TypeA)
	if k.options != nil {
		m.SetEdns0(1232, false)
		m.IsEdns0().Option = k.options
	}
	var r *dns.Msg
	var err error
	switch k.over {
	case "udp", "tcp", "dot":
		r, err = d.exchange(k, m)
	case "doh":
		var status int
		if r, status, err = d.post(k, m); status != 200 && err == nil {
			return fmt.Sprint("HTTP ", status)
		}
	}
	switch {
	case err != nil:
		return "silence"
	case len(r.Answer) == 1:
		return d.known[r.Answer[0].(*dns.A).A.String()]
	}
	return dns.RcodeToString[r.Rcode]
}

func (d *door) dial(k knock) (net.Conn, error) {
	from, to := k.from, map[string]netip.AddrPort{"udp": d.udp, "tcp": d.tcp, "dot": d.dot, "doh": d.doh}[k.over]
	if from == "" {
		from = "127.0.0.1"
	}
	if k.to != "" {
		to = netip.AddrPortFrom(netip.MustParseAddr(k.to), to.Port())
	}
	var dialer net.Dialer
	network := "tcp"
	if k.over == "udp" {
		network = "udp"
		dialer.LocalAddr = &net.UDPAddr{IP: net.ParseIP(from)}
	} else {
		dialer.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
	}
	c, err := dialer.Dial(network, to.String())
	if err == nil && k.proxy != nil && k.over != "udp" {
		_, err = c.Write(k.proxy)
	}
	return c, err
}

func (d *door) exchange(k knock, m *dns.Msg) (*dns.Msg, error) {
	c, err := d.dial(k)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(k.patience()))
	if k.over == "udp" && k.proxy != nil {
		wire, err := m.Pack()
		if err != nil {
			return nil, err
		}
		if _, err := c.Write(append(bytes.Clone(k.proxy), wire...)); err != nil {
			return nil, err
		}
		return (&dns.Conn{Conn: c}).ReadMsg()
	}
	if k.over == "dot" {
		config := d.tls.Clone()
		if k.sni != "" {
			config.ServerName = k.sni
		}
		t := tls.Client(c, config)
		if err := t.Handshake(); err != nil {
			return nil, err
		}
		c = t
		c.SetDeadline(time.Now().Add(k.patience()))
	}
	dc := &dns.Conn{Conn: c}
	if err := dc.WriteMsg(m); err != nil {
		return nil, err
	}
	return dc.ReadMsg()
}

func (d *door) post(k knock, m *dns.Msg) (*dns.Msg, int, error) {
	wire, err := m.Pack()
	if err != nil {
		return nil, 0, err
	}
	config := d.tls.Clone()
	if k.sni != "" {
		config.ServerName = k.sni
	}
	tr := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true, DialContext: func(context.Context, string, string) (net.Conn, error) { return d.dial(k) }}
	defer tr.CloseIdleConnections()
	path := k.path
	if path == "" {
		path = "/dns-query"
	}
	req, err := http.NewRequest("POST", "https://"+d.doh.String()+path, bytes.NewReader(wire))
	if err != nil {
		return nil, 0, err
	}
	req.Header.Set("Content-Type", "application/dns-message")
	switch {
	case k.user != "" || k.password != "":
		req.SetBasicAuth(k.user, k.password)
	case k.bearer != "":
		req.Header.Set("Authorization", "Bearer "+k.bearer)
	}
	resp, err := (&http.Client{Transport: tr, Timeout: 15 * time.Second}).Do(req)
	if err != nil {
		return nil, 0, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 {
		return nil, resp.StatusCode, err
	}
	r := new(dns.Msg)
	return r, 200, r.Unpack(b)
}

// check knocks and compares.
func (d *door) check(cases map[string]struct {
	k    knock
	want string
}) {
	d.t.Helper()
	for what, c := range cases {
		c.k.silent = c.want == "silence"
		if got := d.as(c.k); got != c.want {
			d.t.Errorf("%s: served as %q, want %q", what, got, c.want)
		}
	}
}

type knocks = map[string]struct {
	k    knock
	want string
}

// Case U01: exactly one optional element follows the path of DoH.
func TestCaseU01DoHPath(t *testing.T) {
	d := newDoor(t, nil, &userv1.Device{Id: "cli"}, &userv1.Device{Id: "here", Links: []string{"127.0.0.7"}})
	d.check(knocks{
		"no element":         {knock{over: "doh", from: "127.0.0.7", path: "/dns-query"}, "here"},
		"a slash":            {knock{over: "doh", from: "127.0.0.7", path: "/dns-query/"}, "here"},
		"one":                {knock{over: "doh", path: "/dns-query/cli"}, "cli"},
		"one and a slash":    {knock{over: "doh", path: "/dns-query/CLI/"}, "cli"},
		"two":                {knock{over: "doh", from: "127.0.0.7", path: "/dns-query/a/b"}, "HTTP 404"},
		"another path":       {knock{over: "doh", from: "127.0.0.7", path: "/other/cli"}, "HTTP 404"},
		"the root":           {knock{over: "doh", from: "127.0.0.7", path: "/"}, "HTTP 404"},
		"one that is no id":  {knock{over: "doh", from: "127.0.0.7", path: "/dns-query/c_li"}, "REFUSED"},
		"one that is nobody": {knock{over: "doh", from: "127.0.0.7", path: "/dns-query/nobody"}, "REFUSED"},
	})
}

// Case U06: authentication beats the path, the path beats the server name.
func TestCaseU06PathBeatsServerName(t *testing.T) {
	token := sha256.Sum256([]byte("token"))
	d := newDoor(t, nil, &userv1.Device{Id: "right"}, &userv1.Device{Id: "wrong"}, &userv1.Device{Id: "third", TokenSha256: [][]byte{token[:]}})
	d.check(knocks{
		"the path":               {knock{over: "doh", path: "/dns-query/right", sni: "wrong.dns.example"}, "right"},
		"the server name":        {knock{over: "doh", sni: "wrong.dns.example"}, "wrong"},
		"the server name, DoT":   {knock{over: "dot", sni: "wrong.dns.example"}, "wrong"},
		"authentication":         {knock{over: "doh", path: "/dns-query/right", sni: "wrong.dns.example", user: "third", password: "token"}, "third"},
		"nobody by path":         {knock{over: "doh", path: "/dns-query/nobody", sni: "wrong.dns.example"}, "REFUSED"},
		"a token without a name": {knock{over: "doh", path: "/dns-query/third", bearer: "token"}, "third"},
		"another's token":        {knock{over: "doh", path: "/dns-query/right", bearer: "token"}, "REFUSED"},
	})
}

// cheapHash makes a PHC string that is verified at once.
func cheapHash(password string) string {
	sum := argon2.IDKey([]byte(password), []byte("somesalt"), 1, 8, 1, 32)
	return "$argon2id$v=19$m=8,t=1,p=1$c29tZXNhbHQ$" + base64.RawStdEncoding.EncodeToString(sum)
}

// Case U07: what HTTP authentication says comes first and is checked.
func TestCaseU07Authentication(t *testing.T) {
	d := newDoor(t, nil, &userv1.Device{Id: "dev", PasswordHashes: []string{cheapHash("good password")}}, &userv1.Device{Id: "open", Links: []string{"127.0.0.7"}})
	for range 2 { // verified, then remembered
		d.check(knocks{
			"good":                  {knock{over: "doh", user: "dev", password: "good password"}, "dev"},
			"bad":                   {knock{over: "doh", user: "dev", password: "bad password"}, "REFUSED"},
			"bad, linked source":    {knock{over: "doh", user: "dev", password: "bad password", from: "127.0.0.7"}, "REFUSED"},
			"none":                  {knock{over: "doh", user: "dev", from: "127.0.0.7"}, "REFUSED"},
			"for one without":       {knock{over: "doh", user: "open", password: "good password"}, "REFUSED"},
			"of nobody":             {knock{over: "doh", user: "nobody", password: "good password"}, "REFUSED"},
			"malformed user":        {knock{over: "doh", user: "!!!", password: "good password", from: "127.0.0.7"}, "REFUSED"},
			"path without one":      {knock{over: "doh", path: "/dns-query/dev"}, "REFUSED"},
			"DoT, which shows none": {knock{over: "dot", sni: "dev.dns.example"}, "dev"},
		})
	}
	// A password changed is a password changed.
	d.put("of-dev", &userv1.User{Devices: []*userv1.Device{{Id: "dev", PasswordHashes: []string{cheapHash("new password")}}}})
	d.check(knocks{
		"the old one": {knock{over: "doh", user: "dev", password: "good password"}, "REFUSED"},
		"the new one": {knock{over: "doh", user: "dev", password: "new password"}, "dev"},
	})
}

// Case U08: of a device that is DoH-only it is not enough to know the id, or to sit at its address.
func TestCaseU08OnlyAuthenticatedDoH(t *testing.T) {
	d := newDoor(t, nil, &userv1.Device{Id: "dev", DohOnly: true, PasswordHashes: []string{cheapHash("good password")}, Links: []string{"127.0.0.7"}})
	d.check(knocks{
		"DoT by server name": {knock{over: "dot", sni: "dev.dns.example"}, "REFUSED"},
		"DoH by server name": {knock{over: "doh", sni: "dev.dns.example"}, "REFUSED"},
		"DoH by path":        {knock{over: "doh", path: "/dns-query/dev"}, "REFUSED"},
		"linked source, UDP": {knock{over: "udp", from: "127.0.0.7"}, "REFUSED"},
		"linked source, DoH": {knock{over: "doh", from: "127.0.0.7"}, "REFUSED"},
		"authentication":     {knock{over: "doh", user: "dev", password: "good password"}, "dev"},
		"path and password":  {knock{over: "doh", path: "/dns-query/dev", bearer: "good password"}, "dev"},
	})
}

// Case U11: a dedicated address that belongs to no device gets no answer.
func TestCaseU11DedicatedAddressOfNobody(t *testing.T) {
	d := newDoor(t, func(o *resolver.Options) {
		o.Identify.Dedicated = []netip.Prefix{netip.MustParsePrefix("127.0.0.32/28")}
		o.Identify.Stranger = "serve"
	}, &userv1.Device{Id: "its", Dedicated: []string{"127.0.0.33"}}, &userv1.Device{Id: "linked", Links: []string{"127.0.0.7"}})
	d.check(knocks{
		"a device's":                          {knock{over: "udp", to: "127.0.0.33"}, "its"},
		"nobody's":                            {knock{over: "udp", to: "127.0.0.34"}, "silence"},
		"nobody's, from a link":               {knock{over: "udp", to: "127.0.0.34", from: "127.0.0.7"}, "silence"},
		"another, from a link":                {knock{over: "udp", to: "127.0.0.50", from: "127.0.0.7"}, "linked"},
		"nobody's, by one who may not ask":    {knock{over: "udp", to: "127.0.0.34", from: "127.0.0.200"}, "silence"},
		"a device's, by one who may not":      {knock{over: "udp", to: "127.0.0.33", from: "127.0.0.200"}, "REFUSED"},
		"no address kept, by one who may not": {knock{over: "udp", to: "127.0.0.50", from: "127.0.0.200"}, "REFUSED"},
		"nobody's behind a proxy, TCP": {knock{over: "tcp", from: "127.0.0.98",
			proxy: listentest.ProxyHeader("192.0.2.9:4000", "127.0.0.34:53")}, "silence"},
	})
}

// Nor does it tell anybody that his message is malformed.
func TestDedicatedAddressOfNobodyAndFaults(t *testing.T) {
	d := newDoor(t, func(o *resolver.Options) {
		o.Identify.Dedicated = []netip.Prefix{netip.MustParsePrefix("127.0.0.32/28")}
	}, &userv1.Device{Id: "its", Dedicated: []string{"127.0.0.33"}})
	for to, want := range map[string]bool{"127.0.0.1": true, "127.0.0.33": true, "127.0.0.34": false} {
		c, err := d.dial(knock{over: "udp", to: to})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write(make([]byte, 20)); err != nil { // a header without a question, and more
			t.Fatal(err)
		}
		c.SetReadDeadline(time.Now().Add(knock{silent: !want}.patience()))
		if n, err := c.Read(make([]byte, 512)); (err == nil) != want {
			t.Errorf("a malformed message to %s: %d bytes, %v", to, n, err)
		}
	}
}

// A policy that serves clients whom nobody identified bounds what each of them may ask, and from where.
func TestStrangersAreHeldToTheirPolicy(t *testing.T) {
	d := newDoor(t, func(o *resolver.Options) { o.Identify.Stranger = "guests" })
	b, err := proto.Marshal(&userv1.Policy{Settings: &userv1.Settings{RateLimit: proto.Uint32(1), RateBurst: proto.Uint32(3), DenyNetworks: strs("127.0.0.8/29"),
		Rewrites: &userv1.RewriteSet{Values: []*userv1.Rewrite{{Name: strings.TrimSuffix(doorName, "."), Records: []string{"A 10.9.9.9"}}}}}})
	if err != nil {
		t.Fatal(err)
	}
	d.known["10.9.9.9"] = "guest"
	at := d.users.Dataset(usercache.CatalogueKind).Status().Revision
	if _, err := d.users.Dataset(usercache.CatalogueKind).ApplyDelta(t.Context(), doorIdentity, usercache.Delta{From: at, To: at + 1,
		Changes: []usercache.Change{{Key: []byte("policy/guests"), Revision: at + 1, Bytes: b}}}, clock.Wall()); err != nil {
		t.Fatal(err)
	}
	for _, over := range []string{"udp", "tcp", "dot", "doh"} {
		if got := d.as(knock{over: over, from: "127.0.0.9"}); got != "REFUSED" {
			t.Errorf("over %s from a network that the policy denies: %s", over, got)
		}
	}
	for _, from := range []string{"127.0.0.20", "127.0.0.21"} {
		served, refused := 0, 0
		for i := range 40 { // more than it earns while this runs
			switch got := d.as(knock{over: []string{"udp", "tcp"}[i%2], from: from}); got {
			case "guest":
				served++
			case "REFUSED":
				refused++
			default:
				t.Fatalf("%s: %s", from, got)
			}
		}
		if served < 3 || refused == 0 {
			t.Errorf("%s: %d served, %d refused", from, served, refused)
		}
	}
}

// Case U12: a user that a delta removes is known no longer, nor is its device.
func TestCaseU12DeletedUser(t *testing.T) {
	d := newDoor(t, nil, &userv1.Device{Id: "dev", Links: []string{"127.0.0.7"}})
	d.check(knocks{"before": {knock{over: "dot", sni: "dev.dns.example"}, "dev"}, "before, by address": {knock{over: "udp", from: "127.0.0.7"}, "dev"}})
	d.put("of-dev", nil)
	d.check(knocks{"after": {knock{over: "dot", sni: "dev.dns.example"}, "REFUSED"}, "after, by address": {knock{over: "udp", from: "127.0.0.7"}, "REFUSED"}})
}

// Access is judged before identity on plain DNS, and after it on encrypted transports.
func TestAccessAndIdentity(t *testing.T) {
	d := newDoor(t, func(o *resolver.Options) { o.Identify.Stranger = "serve" },
		&userv1.Device{Id: "dev", Links: []string{"127.0.0.200"}}, // beyond access.allow
		&userv1.Device{Id: "home", Settings: &userv1.Settings{AllowNetworks: &userv1.StringSet{Values: []string{"127.0.0.8/29"}}, DenyNetworks: &userv1.StringSet{Values: []string{"127.0.0.9"}}}})
	d.check(knocks{
		"UDP":                       {knock{over: "udp", from: "127.0.0.200"}, "REFUSED"},
		"TCP":                       {knock{over: "tcp", from: "127.0.0.200"}, "REFUSED"},
		"DoT by address":            {knock{over: "dot", from: "127.0.0.200"}, "dev"},
		"DoH by path":               {knock{over: "doh", from: "127.0.0.201", path: "/dns-query/dev"}, "dev"},
		"a stranger over DoT":       {knock{over: "dot", from: "127.0.0.201"}, "REFUSED"},
		"an unknown id over DoH":    {knock{over: "doh", from: "127.0.0.201", path: "/dns-query/nobody"}, "REFUSED"},
		"within its networks":       {knock{over: "dot", from: "127.0.0.10", sni: "home.dns.example"}, "home"},
		"outside of its networks":   {knock{over: "dot", from: "127.0.0.1", sni: "home.dns.example"}, "REFUSED"},
		"in a network it is denied": {knock{over: "dot", from: "127.0.0.9", sni: "home.dns.example"}, "REFUSED"},
	})
}

// What a relay says is believed; what others say is not.
func TestRelays(t *testing.T) {
	d := newDoor(t, nil,
		&userv1.Device{Id: "phone", EdnsIds: []string{"0a0b0c0d0e0f"}}, &userv1.Device{Id: "line", EdnsIds: []string{"cpe:box-7"}},
		&userv1.Device{Id: "net", Links: []string{"10.1.2.0/24"}}, &userv1.Device{Id: "host", Links: []string{"10.1.2.3"}},
		&userv1.Device{Id: "here", Links: []string{"127.0.0.7"}})
	local := func(code uint16, v string) dns.EDNS0 { return &dns.EDNS0_LOCAL{Code: code, Data: []byte(v)} }
	subnet := func(bits uint8, a string) dns.EDNS0 {
		return &dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: bits, Address: net.ParseIP(a).To4()}
	}
	mac := "\x0a\x0b\x0c\x0d\x0e\x0f"
	for _, over := range []string{"udp", "tcp"} {
		relay := func(o ...dns.EDNS0) knock { return knock{over: over, from: "127.0.0.99", options: o} }
		d.check(knocks{
			"raw":                   {relay(local(65001, mac)), "phone"},
			"text":                  {relay(local(65073, "0a:0b:0c:0d:0e:0f")), "phone"},
			"base64":                {relay(local(65073, "CgsMDQ4P")), "phone"},
			"CPE-ID":                {relay(local(65074, "box-7")), "line"},
			"unknown MAC, CPE-ID":   {relay(local(65001, "\x00\x0b\x0c\x0d\x0e\x0f"), local(65074, "box-7")), "line"},
			"unknown MAC":           {relay(local(65001, "\x00\x0b\x0c\x0d\x0e\x0f")), "REFUSED"},
			"malformed MAC":         {relay(local(65001, "\x00")), "REFUSED"},
			"subnet":                {relay(subnet(24, "10.1.2.0")), "net"},
			"subnet, one host":      {relay(subnet(32, "10.1.2.3")), "host"},
			"subnet, other host":    {relay(subnet(32, "10.1.2.4")), "net"},
			"subnet, too wide":      {relay(subnet(16, "10.1.0.0")), "REFUSED"},
			"no relay":              {knock{over: over, from: "127.0.0.7", options: []dns.EDNS0{local(65001, mac)}}, "here"},
			"no relay, with subnet": {knock{over: over, options: []dns.EDNS0{subnet(32, "10.1.2.3")}}, "REFUSED"},
		})
	}
}

// Behind a proxy the client is who the header says; a proxy that sends none, or a malformed one, is refused.
func TestProxyProtocol(t *testing.T) {
	d := newDoor(t, nil, &userv1.Device{Id: "client", Links: []string{"192.0.2.7"}}, &userv1.Device{Id: "proxy", Links: []string{"127.0.0.98"}},
		&userv1.Device{Id: "named"})
	header := listentest.ProxyHeader("192.0.2.7:4000", "198.51.100.1:53")
	edit := func(f func(b []byte)) []byte { b := bytes.Clone(header); f(b); return b }
	tlvs := append(edit(func(b []byte) { b[15] += 5 }), 0x05, 0, 2, 1, 2)
	long := append(edit(func(b []byte) { b[14], b[15] = 1, 0xf1 }), make([]byte, 0x1f1-12)...) // 513 bytes
	for _, over := range []string{"udp", "tcp", "dot", "doh"} {
		by := func(h []byte) knock { return knock{over: over, from: "127.0.0.98", proxy: h} }
		d.check(knocks{
			over + ", the client":    {by(header), "client"},
			over + ", with TLVs":     {by(tlvs), "client"},
			over + ", LOCAL":         {by(edit(func(b []byte) { b[12] = 0x20 })), "proxy"},
			over + ", another":       {by(listentest.ProxyHeader("192.0.2.8:4000", "198.51.100.1:53")), "REFUSED"},
			over + ", not allowed":   {by(listentest.ProxyHeader("203.0.113.8:4000", "198.51.100.1:53")), "REFUSED"},
			over + ", without":       {by(nil), "silence"},
			over + ", version 1":     {by([]byte("PROXY TCP4 192.0.2.7 198.51.100.1 4000 53\r\n")), "silence"},
			over + ", unix sockets":  {by(edit(func(b []byte) { b[13] = 0x31 })), "silence"},
			over + ", too long":      {by(long), "silence"},
			over + ", of a stranger": {knock{over: over, proxy: header}, map[bool]string{true: "silence", false: "NOTIMP"}[over != "udp"]},
		})
	}
	k := knock{over: "dot", from: "127.0.0.98", sni: "named.dns.example", proxy: listentest.ProxyHeader("203.0.113.8:4000", "198.51.100.1:53")}
	if got := d.as(k); got != "named" {
		t.Errorf("a known device behind a proxy, from anywhere: %q", got)
	}
}

// Limits of users hold over all transports together, and whoever is beyond them is told so.
func TestRateLimits(t *testing.T) {
	limit := uint32(20)
	d := newDoor(t, nil, &userv1.Device{Id: "open", Links: []string{"127.0.0.8"}})
	d.put("ann", &userv1.User{Settings: &userv1.Settings{RateLimit: &limit}, Devices: []*userv1.Device{
		{Id: "pc", Links: []string{"127.0.0.7"}}, {Id: "tv"}, {Id: "own", Settings: &userv1.Settings{RateLimit: proto.Uint32(5)}}}})
	count := func(n int, k knock) map[string]int {
		got := map[string]int{}
		for range n {
			got[d.as(k)]++
		}
		return got
	}
	start := time.Now()
	got := count(60, knock{over: "udp", from: "127.0.0.7"})
	more := int(time.Since(start).Seconds()*float64(limit)) + 1 // what is earned meanwhile
	if n := got["pc"]; n < 20 || n > 20+more || n+got["REFUSED"] != 60 {
		t.Errorf("60 over UDP: %v", got)
	}
	udp := got["pc"]
	got = count(10, knock{over: "tcp", from: "127.0.0.7"})
	more = int(time.Since(start).Seconds()*float64(limit)) + 1
	if n := udp + got["pc"]; n > 20+more || got["pc"]+got["REFUSED"] != 10 {
		t.Errorf("and 10 over TCP: %v, after %d over UDP", got, udp)
	}
	if got := count(3, knock{over: "dot", sni: "own.dns.example"}); got["pc"] != 3 { // "pc": the user's first device
		t.Errorf("a device with a limit of its own: %v", got)
	}
	if got := count(60, knock{over: "udp", from: "127.0.0.8"}); got["open"] != 60 {
		t.Errorf("a user without a limit: %v", got)
	}
}

// An id that may become a device is proposed, and is a stranger's until it has.
func TestDevicesAreProposed(t *testing.T) {
	d := newDoor(t, nil, &userv1.Device{Id: "here", Links: []string{"127.0.0.7"}})
	d.put("kid", &userv1.User{AutoDevices: true, Devices: []*userv1.Device{{Id: "kid-pc"}}})
	d.check(knocks{
		"before":    {knock{over: "doh", path: "/dns-query/kid-tv", from: "127.0.0.7"}, "REFUSED"},
		"with none": {knock{over: "doh", path: "/dns-query/kidtv"}, "REFUSED"},
	})
	d.mu.Lock()
	if got := strings.Join(d.proposed, " "); got != "kid-tv" {
		t.Errorf("proposed %q", got)
	}
	d.mu.Unlock()
	d.put("kid", &userv1.User{AutoDevices: true, Devices: []*userv1.Device{{Id: "kid-tv", Automatic: true}}})
	d.check(knocks{"after": {knock{over: "doh", path: "/dns-query/kid-tv"}, "kid-tv"}})
}
