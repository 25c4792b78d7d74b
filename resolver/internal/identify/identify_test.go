package identify

import (
	"crypto/sha256"
	"encoding/base64"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/crypto/argon2"

	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// directory is a map from what a client shows to a device.
type directory struct {
	devices map[string]string // "id:x", "src:addr", "dst:addr", "edns:x" to a device
	flags   usercache.Flags
	status  usercache.Status // of what is not in devices
	creds   usercache.Credentials
}

func (d directory) get(key string, p *usercache.Profile) usercache.Status {
	dev, ok := d.devices[key]
	if !ok {
		return d.status
	}
	p.DeviceID, _ = usercache.ParseID(dev)
	p.Flags = d.flags
	return usercache.Found
}
func (d directory) LookupDevice(id *usercache.DeviceID, p *usercache.Profile) usercache.Status {
	return d.get("id:"+id.String(), p)
}
func (d directory) LookupSource(a netip.Addr, p *usercache.Profile) usercache.Status {
	return d.get("src:"+a.String(), p)
}
func (d directory) LookupSubnet(n netip.Prefix, p *usercache.Profile) usercache.Status {
	return d.get("net:"+n.String(), p)
}
func (d directory) LookupDedicated(a netip.Addr, p *usercache.Profile) usercache.Status {
	return d.get("dst:"+a.String(), p)
}
func (d directory) LookupEDNS(id []byte, p *usercache.Profile) usercache.Status {
	return d.get("edns:"+string(id), p)
}
func (d directory) Credentials(*usercache.DeviceID) (usercache.Credentials, bool) {
	return d.creds, true
}
func (d directory) Policy(name string, p *usercache.Profile) bool {
	p.User = 99
	return name == "guests"
}

func TestIdentify(t *testing.T) {
	dir := directory{devices: map[string]string{
		"id:auth": "auth", "id:path": "path", "id:sni": "sni", "id:default": "default", "id:dns": "dns",
		"src:192.0.2.1": "linked", "dst:203.0.113.5": "dedicated", "edns:0a0b0c0d0e0f": "mac", "edns:cpe:line-7": "cpe",
		"net:10.1.2.0/24": "subnet", "net:2001:db8::/56": "subnet6", "src:198.51.100.2": "site",
	}}
	relay := netip.MustParseAddrPort("198.51.100.1:5000")
	site := netip.MustParseAddrPort("198.51.100.2:5000") // a relay whose own address is linked
	linked := netip.MustParseAddrPort("192.0.2.1:5000")
	other := netip.MustParseAddrPort("192.0.2.2:5000")
	local := netip.MustParseAddrPort("203.0.113.1:53")
	defaulted := netip.MustParseAddrPort("203.0.113.2:53")
	def, _ := usercache.ParseID("default")
	i := New(Options{
		Directory: dir, ServerNames: []string{"example.net", "DNS.example.net"}, Relays: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")},
		Dedicated: []netip.Prefix{netip.MustParsePrefix("203.0.113.4/30")}, DefaultDevice: map[netip.AddrPort]usercache.DeviceID{defaulted: def},
	})
	raw, text, base64 := uint16(65001), uint16(65073), uint16(65073)
	mac := func(code uint16, v string) query.EDNS { return query.EDNS{MACCode: code, MAC: []byte(v)} }
	const bytes = "\x0a\x0b\x0c\x0d\x0e\x0f"
	cpe := func(e query.EDNS, v string) query.EDNS { e.CPE = []byte(v); return e }
	ecs := func(n string) query.EDNS {
		p := netip.MustParsePrefix(n)
		s := query.Subnet{Family: 1, Bits: uint8(p.Bits())}
		if copy(s.Addr[:], p.Addr().AsSlice()); p.Addr().Is6() {
			s.Family = 2
		}
		return query.EDNS{HasSubnet: true, Subnet: s}
	}
	for name, c := range map[string]struct {
		q    query.Query
		want string // the device
		why  query.RefuseReason
	}{
		"the path beats the server name":     {query.Query{Transport: query.DoH, PathDevice: "path", ServerName: "sni.dns.example.net"}, "path", 0},
		"authentication without credentials": {query.Query{Transport: query.DoH, AuthDevice: "auth", AuthSecret: "x", PathDevice: "path"}, "", query.RefuseDevice},
		"a user without a password":          {query.Query{Transport: query.DoH, AuthDevice: "auth", PathDevice: "path"}, "", query.RefuseDevice},
		"a malformed user":                   {query.Query{Transport: query.DoH, AuthDevice: "!!!", AuthSecret: "x", PathDevice: "path"}, "", query.RefuseDevice},
		"capitals":                           {query.Query{Transport: query.DoH, PathDevice: "PaTH"}, "path", 0},
		"the server name":                    {query.Query{Transport: query.DoT, ServerName: "sni.dns.example.net"}, "sni", 0},
		"the server name beats the source":   {query.Query{Transport: query.DoT, ServerName: "sni.dns.example.net", Source: linked}, "sni", 0},
		"the bare server name":               {query.Query{Transport: query.DoT, ServerName: "dns.example.net", Source: linked}, "linked", 0},
		"the shorter bare server name":       {query.Query{Transport: query.DoT, ServerName: "example.net", Source: linked}, "linked", 0},
		"a name that ends in a server name":  {query.Query{Transport: query.DoT, ServerName: "sniexample.net", Source: linked}, "linked", 0},
		"another server name":                {query.Query{Transport: query.DoT, ServerName: "sni.other.example"}, "", query.RefuseStranger},
		"two labels":                         {query.Query{Transport: query.DoT, ServerName: "a.sni.dns.example.net", Source: linked}, "", query.RefuseDevice},
		"a malformed id":                     {query.Query{Transport: query.DoH, PathDevice: "pa_th", Source: linked}, "", query.RefuseDevice},
		"an unknown id, linked source":       {query.Query{Transport: query.DoH, PathDevice: "nobody", Source: linked}, "", query.RefuseDevice},
		"a path over UDP means nothing":      {query.Query{Transport: query.UDP, PathDevice: "path", Source: linked}, "linked", 0},
		"a server name over TCP neither":     {query.Query{Transport: query.TCP, ServerName: "sni.dns.example.net", Source: linked}, "linked", 0},
		"a relay's MAC address":              {query.Query{Source: relay, EDNS: mac(raw, bytes)}, "mac", 0},
		"a relay's MAC address as text":      {query.Query{Source: relay, EDNS: mac(text, "0A:0b-0c0d.0e0f")}, "mac", 0},
		"a relay's MAC address in base64":    {query.Query{Source: relay, EDNS: mac(base64, "CgsMDQ4P")}, "mac", 0},
		"a relay's CPE-ID":                   {query.Query{Source: relay, EDNS: cpe(query.EDNS{}, "line-7")}, "cpe", 0},
		"the MAC address beats the CPE-ID":   {query.Query{Source: relay, EDNS: cpe(mac(raw, bytes), "line-7")}, "mac", 0},
		"nobody's MAC address and a CPE-ID":  {query.Query{Source: relay, EDNS: cpe(mac(raw, "\x0a\x0b\x0c\x0d\x0e\x00"), "line-7")}, "cpe", 0},
		"a short MAC address":                {query.Query{Source: relay, EDNS: mac(raw, "\x0a")}, "", query.RefuseDevice},
		"an empty MAC address":               {query.Query{Source: relay, EDNS: mac(raw, "")}, "", query.RefuseDevice},
		"a long MAC address as text":         {query.Query{Source: relay, EDNS: mac(text, "0a0b0c0d0e0f0")}, "", query.RefuseDevice},
		"a MAC address in bad base64":        {query.Query{Source: relay, EDNS: mac(base64, "CgsMDQ4=")}, "", query.RefuseDevice},
		"a malformed one beside a CPE-ID":    {query.Query{Source: relay, EDNS: cpe(mac(raw, "\x0a"), "line-7")}, "", query.RefuseDevice},
		"a long CPE-ID":                      {query.Query{Source: relay, EDNS: cpe(query.EDNS{}, string(make([]byte, 65)))}, "", query.RefuseDevice},
		"nobody's CPE-ID, linked source":     {query.Query{Source: site, EDNS: cpe(query.EDNS{}, "line-8")}, "", query.RefuseDevice},
		"a stranger's MAC address":           {query.Query{Source: other, EDNS: mac(raw, bytes)}, "", query.RefuseStranger},
		"a stranger's CPE-ID, linked source": {query.Query{Source: linked, EDNS: cpe(query.EDNS{}, "line-7")}, "linked", 0},
		"a relay's client subnet":            {query.Query{Source: site, EDNS: ecs("10.1.2.0/24")}, "subnet", 0},
		"an IPv6 client subnet":              {query.Query{Source: site, EDNS: ecs("2001:db8::/56")}, "subnet6", 0},
		"nobody's client subnet":             {query.Query{Source: site, EDNS: ecs("10.1.3.0/24")}, "site", 0},
		"a declined client subnet":           {query.Query{Source: site, EDNS: ecs("0.0.0.0/0")}, "site", 0},
		"a stranger's client subnet":         {query.Query{Source: other, EDNS: ecs("10.1.2.0/24")}, "", query.RefuseStranger},
		"a dedicated address":                {query.Query{Source: linked, Local: netip.MustParseAddrPort("203.0.113.5:53")}, "dedicated", 0},
		"a dedicated address of nobody":      {query.Query{Source: linked, Local: netip.MustParseAddrPort("203.0.113.6:53")}, "", query.RefuseDedicated},
		"a linked source":                    {query.Query{Source: linked, Local: local}, "linked", 0},
		"the listener's default":             {query.Query{Source: other, Local: defaulted}, "default", 0},
		"the source beats the default":       {query.Query{Source: linked, Local: defaulted}, "linked", 0},
		"nobody":                             {query.Query{Source: other, Local: local}, "", query.RefuseStranger},
	} {
		q := c.q
		why := i.Identify(&q)
		if got := q.Client.Profile.DeviceID.String(); why != c.why || got != c.want || (q.Client.Kind == query.Identified) != (c.want != "") {
			t.Errorf("%s: device %q, %v; want %q, %v", name, got, why, c.want, c.why)
		}
	}
}

// Strangers who are served are told apart from those who gave an id that nobody has.
func TestMisnamed(t *testing.T) {
	dir := directory{devices: map[string]string{"id:path": "path", "src:192.0.2.1": "linked"}}
	i := New(Options{Directory: &dir, ServerNames: []string{"dns.example.net"}, Stranger: Serve, Relays: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}})
	linked, relay := netip.MustParseAddrPort("192.0.2.1:5000"), netip.MustParseAddrPort("198.51.100.1:5000")
	for name, c := range map[string]struct {
		q        query.Query
		status   usercache.Status // of who is not in the directory
		misnamed bool
	}{
		"an unknown path":            {query.Query{Transport: query.DoH, PathDevice: "nobody"}, usercache.Unknown, true},
		"an unknown server name":     {query.Query{Transport: query.DoT, ServerName: "nobody.dns.example.net", Source: linked}, usercache.Unknown, true},
		"an unknown user":            {query.Query{Transport: query.DoH, AuthDevice: "nobody", AuthSecret: "x"}, usercache.Unknown, true},
		"a disabled user's":          {query.Query{Transport: query.DoH, PathDevice: "nobody"}, usercache.Disabled, true},
		"a known path":               {query.Query{Transport: query.DoH, PathDevice: "path"}, usercache.Unknown, false},
		"the bare server name":       {query.Query{Transport: query.DoT, ServerName: "dns.example.net"}, usercache.Unknown, false},
		"nothing":                    {query.Query{Transport: query.DoH, Source: linked}, usercache.Unknown, false},
		"a relay's box that is none": {query.Query{Source: relay, EDNS: query.EDNS{CPE: []byte("line-8")}}, usercache.Unknown, false},
	} {
		dir.status = c.status
		c.q.Client.Misnamed = !c.misnamed // of an earlier attempt
		if why := i.Identify(&c.q); why != query.NotRefused || c.q.Client.Misnamed != c.misnamed {
			t.Errorf("%s: %v, misnamed: %v", name, why, c.q.Client.Misnamed)
		}
	}
}

func FuzzMACText(f *testing.F) {
	f.Add(uint16(65001), []byte{10, 11, 12, 13, 14, 15})
	f.Add(uint16(65073), []byte("0A:0b-0c0d.0e0f"))
	f.Add(uint16(65073), []byte("CgsMDQ4P"))
	f.Fuzz(func(t *testing.T, code uint16, v []byte) {
		var buf [query.MaxHint + 4]byte
		out, ok := macText(code, v, &buf)
		if !ok {
			return
		}
		again, ok := macText(65073, out, new([query.MaxHint + 4]byte))
		if len(out) != 12 || !ok || string(again) != string(out) {
			t.Errorf("%d %q is %q, which is %q, %v", code, v, out, again, ok)
		}
	})
}

func TestPropose(t *testing.T) {
	dir := directory{devices: map[string]string{"id:kid-1": "kid-1"}}
	var got []string
	i := New(Options{Directory: &dir, ServerNames: []string{"dns.example.net"}, Propose: func(id *usercache.DeviceID) { got = append(got, id.String()) }})
	for _, q := range []query.Query{
		{Transport: query.DoH, PathDevice: "Kid-2"},
		{Transport: query.DoT, ServerName: "kid-3.dns.example.net"},
		// None of these may be a device to be made.
		{Transport: query.DoH, PathDevice: "kid-1"},
		{Transport: query.DoH, PathDevice: "kid"},
		{Transport: query.DoH, PathDevice: "-kid"},
		{Transport: query.DoH, PathDevice: "kid_-1"},
		{Transport: query.DoH, PathDevice: "kid-4", AuthSecret: "x"},
		{Transport: query.DoH, AuthDevice: "kid-5", AuthSecret: "x"},
		{Transport: query.TCP, PathDevice: "kid-6"},
	} {
		if why := i.Identify(&q); why == 0 && q.Client.Profile.DeviceID.String() != "kid-1" {
			t.Errorf("%+v was served", q)
		}
	}
	dir.status = usercache.NotReady // nobody knows yet whether it exists
	i.Identify(&query.Query{Transport: query.DoH, PathDevice: "kid-7"})
	if want := []string{"kid-2", "kid-3"}; !slices.Equal(got, want) {
		t.Errorf("proposed %v, want %v", got, want)
	}
}

func TestStrangersAndCold(t *testing.T) {
	for _, c := range []struct {
		stranger, cold string
		status         usercache.Status
		named          bool
		want           query.RefuseReason
		user           uint32
	}{
		{"", "", usercache.Unknown, false, query.RefuseStranger, 0},
		{"refuse", "", usercache.Unknown, true, query.RefuseDevice, 0},
		{"serve", "", usercache.Unknown, false, 0, 0},
		{"serve", "", usercache.Unknown, true, 0, 0},
		{"guests", "", usercache.Unknown, false, 0, 99},
		{"gone", "", usercache.Unknown, false, query.RefuseCold, 99},
		{"serve", "", usercache.NotReady, false, query.RefuseCold, 0}, // cold beats serving strangers
		{"serve", "guests", usercache.NotReady, false, 0, 99},
		{"serve", "", usercache.Unusable, true, query.RefuseCold, 0},
		{"serve", "", usercache.Disabled, false, 0, 0},
	} {
		i := New(Options{Directory: directory{status: c.status}, Stranger: c.stranger, WhenCold: c.cold})
		q := query.Query{Transport: query.DoH}
		if c.named {
			q.PathDevice = "x"
		}
		if why := i.Identify(&q); why != c.want || why == 0 && q.Client.Profile.User != c.user || q.Client.Kind != query.Stranger {
			t.Errorf("%+v: %v, user %d", c, why, q.Client.Profile.User)
		}
	}
}

// TestCredentials covers cases U07 and U08 of the reference behaviours, as far as they are decided here.
func TestCredentials(t *testing.T) {
	dir := directory{devices: map[string]string{"id:kid": "kid"}, creds: usercache.Credentials{
		Tokens:         [][32]byte{sha256.Sum256([]byte("other")), sha256.Sum256([]byte("secret"))},
		PasswordHashes: []string{hashOf("old"), hashOf("password")},
	}}
	const has, only = usercache.HasCredentials, usercache.HasCredentials | usercache.DoHOnly
	for _, c := range []struct {
		flags  usercache.Flags
		tr     query.Transport
		secret string
		want   query.RefuseReason
	}{
		{has, query.DoH, "secret", 0},
		{has, query.DoH, "password", 0},
		{has, query.DoH, "old", 0},
		{has, query.DoH, "wrong", query.RefuseDevice},
		{has, query.DoH, "", query.RefuseDevice},
		{has, query.DoH, strings.Repeat("x", 2000), query.RefuseDevice},
		{has, query.DoT, "", 0},
		{only, query.DoT, "", query.RefuseDevice},
		{only, query.DoH, "", query.RefuseDevice},
		{only, query.DoH, "secret", 0},
		{only, query.DoH, "password", 0},
		{0, query.DoH, "password", query.RefuseDevice},
		{0, query.DoH, "", 0},
	} {
		dir.flags = c.flags
		i := New(Options{Directory: dir, ServerNames: []string{"dns.example.net"}})
		for range 2 { // verified, then remembered
			q := query.Query{Transport: c.tr, ServerName: "kid.dns.example.net", AuthSecret: c.secret}
			if why := identify(t, i, &q); why != c.want || (q.Client.Kind == query.Identified) != (c.want == 0) || c.want != 0 && q.Client.Profile != (usercache.Profile{}) {
				t.Errorf("%+v: %v, client %v", c, why, q.Client.Kind)
			}
		}
	}
}

// hashOf makes a hash that costs next to nothing.
func hashOf(password string) string {
	sum := argon2.IDKey([]byte(password), []byte("somesalt"), 1, 8, 1, 32)
	return "$argon2id$v=19$m=8,t=1,p=1$c29tZXNhbHQ$" + base64.RawStdEncoding.EncodeToString(sum)
}

// identify goes the way of the pipeline.
func identify(t *testing.T, i *Identifier, q *query.Query) query.RefuseReason {
	t.Helper()
	why := i.Identify(q)
	if why == query.Unproven {
		if q.Client.Profile != (usercache.Profile{}) || q.Client.Kind != query.Stranger {
			t.Error("an unproven client has a profile")
		}
		i.Prove(t.Context(), q)
		why = i.Identify(q)
	}
	return why
}
