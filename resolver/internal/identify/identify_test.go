package identify

import (
	"crypto/sha256"
	"net/netip"
	"testing"

	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// directory is a map from what a client shows to a device.
type directory struct {
	devices map[string]string // "id:x", "src:addr", "dst:addr", "edns:x" to a device
	flags   usercache.Flags
	status  usercache.Status // of what is not in devices
	tokens  [][32]byte
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
func (d directory) LookupDedicated(a netip.Addr, p *usercache.Profile) usercache.Status {
	return d.get("dst:"+a.String(), p)
}
func (d directory) LookupEDNS(id []byte, p *usercache.Profile) usercache.Status {
	return d.get("edns:"+string(id), p)
}
func (d directory) Credentials(*usercache.DeviceID) (usercache.Credentials, bool) {
	return usercache.Credentials{Tokens: d.tokens}, true
}
func (d directory) Policy(name string, p *usercache.Profile) bool {
	p.User = 99
	return name == "guests"
}

func TestIdentify(t *testing.T) {
	dir := directory{devices: map[string]string{
		"id:auth": "auth", "id:path": "path", "id:sni": "sni", "id:default": "default",
		"src:192.0.2.1": "linked", "dst:203.0.113.5": "dedicated", "edns:0a0b0c0d0e0f": "mac", "edns:cpe:line-7": "cpe",
	}}
	relay := netip.MustParseAddrPort("198.51.100.1:5000")
	linked := netip.MustParseAddrPort("192.0.2.1:5000")
	other := netip.MustParseAddrPort("192.0.2.2:5000")
	local := netip.MustParseAddrPort("203.0.113.1:53")
	defaulted := netip.MustParseAddrPort("203.0.113.2:53")
	def, _ := usercache.ParseID("default")
	i := New(Options{
		Directory: dir, ServerNames: []string{"dns.example.net"}, Relays: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")},
		Dedicated: []netip.Prefix{netip.MustParsePrefix("203.0.113.4/30")}, DefaultDevice: map[netip.AddrPort]usercache.DeviceID{defaulted: def},
	})
	for name, c := range map[string]struct {
		q    query.Query
		want string // the device
		why  query.RefuseReason
	}{
		"the path beats the server name":     {query.Query{Transport: query.DoH, PathDevice: "path", ServerName: "sni.dns.example.net"}, "path", 0},
		"authentication without credentials": {query.Query{Transport: query.DoH, AuthDevice: "auth", AuthSecret: "x", PathDevice: "path"}, "", query.RefuseDevice},
		"capitals":                           {query.Query{Transport: query.DoH, PathDevice: "PaTH"}, "path", 0},
		"the server name":                    {query.Query{Transport: query.DoT, ServerName: "sni.dns.example.net"}, "sni", 0},
		"the server name beats the source":   {query.Query{Transport: query.DoT, ServerName: "sni.dns.example.net", Source: linked}, "sni", 0},
		"the bare server name":               {query.Query{Transport: query.DoT, ServerName: "dns.example.net", Source: linked}, "linked", 0},
		"another server name":                {query.Query{Transport: query.DoT, ServerName: "sni.other.example"}, "", query.RefuseStranger},
		"two labels":                         {query.Query{Transport: query.DoT, ServerName: "a.sni.dns.example.net", Source: linked}, "", query.RefuseDevice},
		"a malformed id":                     {query.Query{Transport: query.DoH, PathDevice: "pa_th", Source: linked}, "", query.RefuseDevice},
		"an unknown id, linked source":       {query.Query{Transport: query.DoH, PathDevice: "nobody", Source: linked}, "", query.RefuseDevice},
		"a path over UDP means nothing":      {query.Query{Transport: query.UDP, PathDevice: "path", Source: linked}, "linked", 0},
		"a relay's MAC address":              {query.Query{Source: relay, EDNS: query.EDNS{DeviceCode: 65001, Device: []byte{10, 11, 12, 13, 14, 15}}}, "mac", 0},
		"a relay's MAC address as text":      {query.Query{Source: relay, EDNS: query.EDNS{DeviceCode: 65073, Device: []byte("0A:0b-0c0d.0e0f")}}, "mac", 0},
		"a relay's CPE-ID":                   {query.Query{Source: relay, EDNS: query.EDNS{DeviceCode: 65074, Device: []byte("line-7")}}, "cpe", 0},
		"a short MAC address":                {query.Query{Source: relay, EDNS: query.EDNS{DeviceCode: 65001, Device: []byte{10}}}, "", query.RefuseDevice},
		"a long MAC address as text":         {query.Query{Source: relay, EDNS: query.EDNS{DeviceCode: 65073, Device: []byte("0a0b0c0d0e0f0")}}, "", query.RefuseDevice},
		"a stranger's MAC address":           {query.Query{Source: other, EDNS: query.EDNS{DeviceCode: 65001, Device: []byte{10, 11, 12, 13, 14, 15}}}, "", query.RefuseStranger},
		"a dedicated address":                {query.Query{Source: linked, Local: netip.MustParseAddrPort("203.0.113.5:53")}, "dedicated", 0},
		"a dedicated address of nobody":      {query.Query{Source: linked, Local: netip.MustParseAddrPort("203.0.113.6:53")}, "", query.RefuseDevice},
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

func TestCredentials(t *testing.T) {
	dir := directory{devices: map[string]string{"id:kid": "kid"}, tokens: [][32]byte{sha256.Sum256([]byte("other")), sha256.Sum256([]byte("secret"))}}
	for _, c := range []struct {
		flags  usercache.Flags
		tr     query.Transport
		secret string
		want   query.RefuseReason
	}{
		{usercache.HasCredentials, query.DoH, "secret", 0},
		{usercache.HasCredentials, query.DoH, "wrong", query.RefuseDevice},
		{usercache.HasCredentials, query.DoH, "", query.RefuseDevice},
		{usercache.HasCredentials, query.DoT, "", 0},
		{usercache.HasCredentials | usercache.DoHOnly, query.DoT, "", query.RefuseDevice},
		{usercache.HasCredentials | usercache.DoHOnly, query.DoH, "secret", 0},
	} {
		dir.flags = c.flags
		i := New(Options{Directory: dir, ServerNames: []string{"dns.example.net"}})
		q := query.Query{Transport: c.tr, ServerName: "kid.dns.example.net", AuthSecret: c.secret}
		if why := i.Identify(&q); why != c.want {
			t.Errorf("%+v: %v", c, why)
		}
	}
}
