package config

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/miekg/dns"
)

// check reports what no single value shows: files that cannot be used, and keys
// that contradict each other. A key that has a fault already is not judged again.
func (c *Sluice) check(d *decoder) {
	if d.undecoded() {
		return
	}
	d.required("data_dir", c.DataDir)
	c.checkFiles(d)
	c.checkListen(d)
	c.checkUpstreams(d)
	c.checkUsers(d)
	c.checkRest(d)
}

func (c *Sluice) checkFiles(d *decoder) {
	for i, pair := range c.TLS.Certificates {
		d.keyPair(fmt.Sprintf("tls.certificates[%d]", i), "cert", "key", pair.Cert, pair.Key)
	}
	d.zoneFile("recursion.root_hints_file", c.Recursion.RootHintsFile, checkHints)
	d.readable("recursion.local_root", c.Recursion.LocalRoot)
	d.zoneFile("dnssec.trust_anchor_file", c.DNSSEC.TrustAnchorFile, checkAnchors)
	for i, z := range c.PolicyZones {
		d.readable(fmt.Sprintf("policy_zones[%d].file", i), z.File)
	}
	d.readable("testing.clock_file", c.Testing.ClockFile)
	d.readable("testing.wall_file", c.Testing.WallFile)
	c.Log.check(d, c.DataDir)
}

func (l Log) check(d *decoder, dataDir string) {
	// The folder of the data is made by the first start, so a file right in it needs none yet.
	if q := l.Queries; filepath.IsAbs(q) && filepath.Dir(q) != filepath.Clean(dataDir) {
		if info, err := os.Stat(filepath.Dir(q)); err != nil || !info.IsDir() {
			d.fault("log.queries", "the folder "+filepath.Dir(q)+" does not exist", "an existing folder, stdout or stderr")
		}
	}
}

func (c *Sluice) checkListen(d *decoder) {
	l := c.Listen
	// Who binds what, in the order of the file format. Two sockets of one kind on
	// one address and port cannot be.
	type user struct{ key, kind string }
	taken := map[string]user{}
	bind := func(key, kind, socket, address string) {
		if strings.HasSuffix(address, ":0") && socket != "unix" {
			return // each gets a port of its own
		}
		id := socket + " " + address
		if first, ok := taken[id]; ok {
			what := fmt.Sprintf("%s is listed twice", address)
			if first.kind != kind {
				what = fmt.Sprintf("%s is taken by %s already", address, first.key)
			}
			// Of two keys, name the one that the file has.
			if !d.has(key) && d.has(first.key) {
				key, what = first.key, fmt.Sprintf("%s is taken by %s already", address, key)
			}
			d.fault(key, what, "another port, or remove one of the two")
			return
		}
		taken[id] = user{key, kind}
	}
	lists := []struct {
		key, socket string
		addrs       []netip.AddrPort
	}{
		{"listen.udp", "udp", l.UDP},
		{"listen.tcp", "tcp", l.TCP},
		{"listen.dot", "tcp", l.DoT},
		{"listen.doh", "tcp", l.DoH},
		{"listen.doq", "udp", l.DoQ},
	}
	for _, list := range lists {
		for i, a := range list.addrs {
			key := fmt.Sprintf("%s[%d]", list.key, i)
			if !a.IsValid() {
				continue // has a fault
			}
			bind(key, list.key, list.socket, a.String())
			if list.key == "listen.doh" && l.HTTP3 {
				bind(key, "listen.http3", "udp", a.String())
			}
		}
		if k := list.key; len(list.addrs) > 0 && k != "listen.udp" && k != "listen.tcp" &&
			len(c.TLS.Certificates) == 0 && !d.faulty("tls") {
			d.fault(k, "needs a certificate", "tls: { certificates: [{ cert: FILE, key: FILE }] }")
		}
	}
	if l.HTTP3 && len(l.DoH) == 0 && !d.faulty("listen.doh") {
		d.fault("listen.http3", "there is no address for HTTP/3, which is served where doh is", "an address in listen.doh, or http3: false")
	}
	for _, s := range c.services() {
		if !s.at.Off() {
			bind(s.key, s.key, s.at.Network, s.at.Address)
		}
	}
	c.checkDefaultDevices(d)
}

type service struct {
	key string
	at  Endpoint
}

// services are the endpoints that this configuration makes the daemon listen on.
func (c *Sluice) services() []service {
	s := []service{{"admin.listen", c.Admin.Listen}, {"http.listen", c.HTTP.Listen}, {"users.peer_listen", c.Users.PeerListen}}
	if len(c.Users.Services) == 0 {
		s = append(s, service{"users.service_listen", c.Users.ServiceListen})
	}
	return s
}

func (c *Sluice) listeners() []netip.AddrPort {
	l := c.Listen
	return slices.Concat(l.UDP, l.TCP, l.DoT, l.DoH, l.DoQ)
}

// checkDefaultDevices wants every address that has a device to be served.
func (c *Sluice) checkDefaultDevices(d *decoder) {
	for a := range c.Identify.DefaultDevice {
		if a.IsValid() && !d.faulty("listen") && !serves(c.listeners(), a) {
			d.fault(fmt.Sprintf("identify.default_device[%s]", a), "nothing listens there", "an address of the section listen")
		}
	}
}

// serves reports whether a query to a reaches one of the listeners. One whose
// port is chosen by the system may be anywhere on its address.
func serves(listeners []netip.AddrPort, a netip.AddrPort) bool {
	return slices.ContainsFunc(listeners, func(l netip.AddrPort) bool {
		addr := l.Addr() == a.Addr() || l.Addr().IsUnspecified() && (l.Addr().Is6() || a.Addr().Is4())
		return addr && (l.Port() == a.Port() || l.Port() == 0)
	})
}

// asksItself reports whether asking a would ask this very process: it is one of
// the listeners, or an address of this machine under a listener on every address.
func asksItself(listeners []netip.AddrPort, a netip.AddrPort) bool {
	return slices.ContainsFunc(listeners, func(l netip.AddrPort) bool {
		if l.Port() != a.Port() || l.Port() == 0 {
			return false
		}
		everywhere := l.Addr().IsUnspecified() && (l.Addr().Is6() || a.Addr().Is4())
		return l.Addr() == a.Addr() || everywhere && (a.Addr().IsLoopback() || a.Addr().IsUnspecified() || ofThisMachine(a.Addr()))
	})
}

// ofThisMachine reports whether an interface has the address.
func ofThisMachine(a netip.Addr) bool {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return false // then nobody knows
	}
	return slices.ContainsFunc(addrs, func(n net.Addr) bool {
		p, err := netip.ParsePrefix(n.String())
		return err == nil && p.Addr() == a
	})
}

func (c *Sluice) checkUpstreams(d *decoder) {
	r := c.Recursion
	if !r.IPv4 && !r.IPv6 {
		key := "recursion.ipv4"
		if !d.has(key) {
			key = "recursion.ipv6"
		}
		d.fault(key, "ipv4 and ipv6 are both false, so no server can be asked", "true for one of them")
	}
	for i, a := range r.Outgoing {
		if a.IsValid() && (a.Is4() && !r.IPv4 || a.Is6() && !r.IPv6) {
			d.fault(fmt.Sprintf("recursion.outgoing[%d]", i), a.String()+" is of a family that is switched off", "remove it, or set recursion.ipv4 or recursion.ipv6 to true")
		}
	}
	for i, z := range r.ECS.Zones {
		if strings.Count(strings.TrimSuffix(z, "."), ".") == 0 {
			d.fault(fmt.Sprintf("recursion.ecs.zones[%d]", i), z+" is the root or a top-level domain, whose servers are never told of clients", "the zones that answer by network")
		}
	}
	listeners := c.listeners()
	zones := map[[2]string]string{} // view and name -> key
	once := func(key, view, name string) {
		if name == "" {
			return
		}
		if first, ok := zones[[2]string{view, name}]; ok {
			d.fault(key+".name", fmt.Sprintf("%s is %s already", name, first), "one entry for a zone in a view")
			return
		}
		zones[[2]string{view, name}] = key
	}
	for i, z := range c.StubZones {
		key := fmt.Sprintf("stub_zones[%d]", i)
		once(key, z.View, z.Name)
		for j, a := range z.Addresses {
			if a.IsValid() && asksItself(listeners, a) {
				d.fault(fmt.Sprintf("%s.addresses[%d]", key, j), fmt.Sprintf("%s is an address that this resolver listens on: it would ask itself", a), "the address of an authoritative server of "+z.Name)
			}
		}
	}
	for i, z := range c.ForwardZones {
		key := fmt.Sprintf("forward_zones[%d]", i)
		once(key, z.View, z.Name)
		c.checkForward(d, key, z, listeners)
	}
}

func (c *Sluice) checkForward(d *decoder, key string, z ForwardZone, listeners []netip.AddrPort) {
	primaries, urls := 0, map[UpstreamURL]bool{}
	for j, u := range z.Upstreams {
		urlKey := fmt.Sprintf("%s.upstreams[%d].url", key, j)
		if u.Role == Primary {
			primaries++
		}
		if u.URL.Text == "" {
			continue // has a fault
		}
		same := u.URL
		same.Text = ""
		if urls[same] {
			d.fault(urlKey, "stands twice", "each upstream once")
		}
		urls[same] = true
		if asksItself(listeners, u.URL.Addr) {
			d.fault(urlKey, fmt.Sprintf("%s is an address that this resolver listens on: it would ask itself", u.URL.Addr), "the address of another resolver")
		}
	}
	if len(z.Upstreams) == 0 || d.faulty(key+".upstreams") {
		return
	}
	switch {
	case primaries == 0:
		d.fault(key+".upstreams", "no upstream is a primary: a shadow never answers, and a spare only beside a primary", "role: primary for at least one")
	case z.Strategy == Quorum && z.Quorum == 0 && !d.faulty(key+".quorum"):
		d.fault(key+".strategy", "quorum needs to know how many answers must agree", fmt.Sprintf("quorum: a number from 1 to %d", primaries))
	case z.Strategy != Quorum && z.Quorum > 0 && !d.faulty(key+".strategy"):
		d.fault(key+".quorum", fmt.Sprintf("has no meaning with strategy %s", z.Strategy), "strategy: quorum, or leave quorum out")
	case z.Quorum > primaries:
		d.fault(key+".quorum", fmt.Sprintf("%d is more than the %d upstreams with the role primary", z.Quorum, primaries), fmt.Sprintf("%d or less", primaries))
	}
}

func (c *Sluice) checkUsers(d *decoder) {
	u := c.Users
	d.readable("users.tls.ca", u.TLS.CA)
	if !d.faulty("users.tls.ca") {
		d.authorities("users.tls.ca", u.TLS.CA)
	}
	d.keyPair("users.tls", "cert", "key", u.TLS.Cert, u.TLS.Key)
	complete := u.TLS.CA != "" && u.TLS.Cert != "" && u.TLS.Key != "" || d.faulty("users.tls")
	const both = "users: { tls: { ca: FILE, cert: FILE, key: FILE } }, or a loopback address or unix:PATH"
	for i, s := range u.Services {
		if !s.Off() && !s.Local() && !complete {
			d.fault(fmt.Sprintf("users.services[%d]", i), s.String()+" is not on this machine and users.tls is not complete", both)
		}
		if slices.Contains(u.Services[:i], s) && !s.Off() {
			d.fault(fmt.Sprintf("users.services[%d]", i), s.String()+" is listed twice", "each service once")
		}
	}
	if !u.PeerListen.Local() && !complete {
		d.fault("users.peer_listen", u.PeerListen.String()+" can be reached from other machines and users.tls is not complete", both)
	}
	if len(u.Services) == 0 && !u.ServiceListen.Local() && !complete {
		d.fault("users.service_listen", u.ServiceListen.String()+" can be reached from other machines and users.tls is not complete", both)
	}
	if a := c.Admin.Listen; !a.Local() && len(c.TLS.Certificates) == 0 && !d.faulty("tls") {
		d.fault("admin.listen", a.String()+" can be reached from other machines and there is no certificate", "127.0.0.1:8053, unix:PATH, or tls: { certificates: [{ cert: FILE, key: FILE }] }")
	}
}

func (c *Sluice) checkRest(d *decoder) {
	for i, contact := range c.Answers.Contact {
		switch scheme, rest, _ := strings.Cut(contact, ":"); {
		case rest != "" && (scheme == "mailto" || scheme == "tel" || scheme == "sips" || scheme == "https") && len(contact) <= 200:
		default:
			d.fault(fmt.Sprintf("answers.contact[%d]", i), fmt.Sprintf("%q is no contact that clients show", contact), "mailto:abuse@example.net, tel:+…, sips:… or https://…, of at most 200 bytes")
		}
	}
	if len(c.Answers.Organization) > 100 {
		d.fault("answers.organization", "is longer than 100 bytes", "a short name")
	}
	if k := c.Cache; k.MinTTL > k.MaxTTL {
		key := "cache.min_ttl"
		if !d.has(key) {
			key = "cache.max_ttl"
		}
		d.fault(key, fmt.Sprintf("min_ttl %v is more than max_ttl %v", k.MinTTL, k.MaxTTL), "a min_ttl of at most "+k.MaxTTL.String())
	}
	if size, ok := c.Limits.Set["cache"]; ok && size != 0 && c.Cache.Size != 0 && size != c.Cache.Size {
		d.fault("limits.cache", "differs from cache.size, which is the same limit", "one of the two")
	}
	if cache, memory := max(c.Cache.Size, c.Limits.Set["cache"]), c.Limits.Set["memory"]; memory != 0 && cache >= memory {
		key := "cache.size"
		if c.Cache.Size == 0 {
			key = "limits.cache"
		}
		d.fault(key, "the cache is as large as limits.memory, which also holds everything else", "half of limits.memory or less")
	}
	for i, l := range c.LocalData {
		for j, r := range l.Records {
			if l.Name == "" {
				continue
			}
			if _, err := l.rr(r); err != nil {
				d.fault(fmt.Sprintf("local_data[%d].records[%d]", i, j), quote(r)+" "+err.Error(), "TYPE RDATA as in a zone file, such as A 192.0.2.7")
			}
		}
	}
	if p := c.DNS64.Prefix; p.IsValid() && (!p.Addr().Is6() || !slices.Contains([]int{32, 40, 48, 56, 64, 96}, p.Bits()) || p != p.Masked()) {
		d.fault("dns64.prefix", p.String()+" is no prefix of RFC 6052", "64:ff9b::/96, or an IPv6 network of length 32, 40, 48, 56, 64 or 96")
	}
	names := map[string]bool{}
	for i, z := range c.PolicyZones {
		key := fmt.Sprintf("policy_zones[%d]", i)
		if names[z.Name] && z.Name != "" {
			d.fault(key+".name", z.Name+" stands twice", "another name")
		}
		names[z.Name] = true
		switch {
		case d.faulty(key + ".action"), d.faulty(key + ".cname"):
		case z.Action == ActionCNAME && z.CNAME == "":
			d.fault(key+".action", "cname needs the name to answer with", "cname: NAME")
		case z.Action != ActionCNAME && z.CNAME != "":
			d.fault(key+".cname", fmt.Sprintf("has no meaning with action %s", z.Action), "action: cname, or leave cname out")
		}
	}
}

// RRs are the records of l, ready to serve.
func (l LocalData) RRs() ([]dns.RR, error) {
	var out []dns.RR
	for _, r := range l.Records {
		rr, err := l.rr(r)
		if err != nil {
			return nil, fmt.Errorf("local data of %s: %q %w", l.Name, r, err)
		}
		out = append(out, rr)
	}
	return out, nil
}

func (l LocalData) rr(text string) (dns.RR, error) {
	if strings.ContainsAny(text, "\r\n") || strings.HasPrefix(strings.TrimSpace(text), "$") {
		return nil, errors.New("is more than one record")
	}
	rr, err := dns.NewRR(l.Name + " " + text)
	switch {
	case err != nil || rr == nil:
		return nil, errors.New("is not a record")
	case rr.Header().Class != dns.ClassINET:
		return nil, errors.New("is not of class IN")
	case rr.Header().Rrtype == dns.TypeANY || rr.Header().Rrtype == dns.TypeOPT || rr.Header().Rdlength == 0 && rr.String() == rr.Header().String():
		return nil, errors.New("has no data")
	}
	if rr.Header().Name != l.Name {
		return nil, errors.New("has an owner name of its own")
	}
	return rr, nil
}

// --- files

func (d *decoder) required(key, value string) {
	if value == "" && !d.faulty(key) {
		d.fault(key, "is empty", "a folder, such as /var/lib/sluice")
	}
}

// readable wants a regular file that can be opened. "" is no file. A pipe is not
// opened: it might never answer.
func (d *decoder) readable(key, path string) {
	if path == "" || d.faulty(key) {
		return
	}
	info, err := os.Stat(path)
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("it is not a regular file")
	}
	if err == nil {
		var f *os.File
		if f, err = os.Open(path); err == nil {
			f.Close()
		}
	}
	if err != nil {
		d.fault(key, path+" cannot be read: "+bare(err), "an existing file that this user may read")
	}
}

// keyPair wants both files or neither, readable, and belonging together.
func (d *decoder) keyPair(section, certKey, keyKey, cert, key string) {
	certKey, keyKey = join(section, certKey), join(section, keyKey)
	d.readable(certKey, cert)
	d.readable(keyKey, key)
	switch {
	case d.faulty(certKey) || d.faulty(keyKey) || cert == "" && key == "":
	case cert == "":
		d.fault(keyKey, "there is no certificate for this key", certKey+": FILE")
	case key == "":
		d.fault(certKey, "there is no key for this certificate", keyKey+": FILE")
	default:
		if _, err := tls.LoadX509KeyPair(cert, key); err != nil {
			d.fault(certKey, "cannot be used with "+key+": "+strings.TrimPrefix(err.Error(), "tls: "), "the PEM certificate, leaf first, that belongs to this key")
		}
	}
}

func (d *decoder) authorities(key, path string) {
	if path == "" {
		return
	}
	pem, err := readFile(path, 16<<20)
	if err == nil && !x509.NewCertPool().AppendCertsFromPEM(pem) {
		err = errors.New("it holds no certificate")
	}
	if err != nil {
		d.fault(key, path+" cannot be used: "+bare(err), "a PEM file with the certificates of the authority")
	}
}

// zoneFile wants a readable file of records that check is content with.
func (d *decoder) zoneFile(key, path string, check func(io.Reader) error) {
	d.readable(key, path)
	if path == "" || d.faulty(key) {
		return
	}
	f, err := os.Open(path)
	if err == nil {
		defer f.Close()
		err = check(io.LimitReader(f, 16<<20))
	}
	if err != nil {
		d.fault(key, path+" cannot be used: "+bare(err), `a zone file, or "" for what is built in`)
	}
}

// checkHints wants a name server of the root and an address of one, or an empty
// file, which is none.
func checkHints(r io.Reader) error {
	records, complete, err := readHints(r)
	if err == nil && records > 0 && !complete {
		err = errors.New("it holds no NS record of the root with an address for it")
	}
	return err
}

// HoldsHints reports whether the text of a hints file that was checked has any
// records.
func HoldsHints(text string) bool {
	records, _, _ := readHints(strings.NewReader(text))
	return records > 0
}

// readHints counts the records of a hints file; complete says that a name server
// of the root has an address.
func readHints(r io.Reader) (records int, complete bool, err error) {
	servers, addresses := map[string]bool{}, map[string]bool{}
	p := dns.NewZoneParser(r, ".", "")
	for rr, ok := p.Next(); ok; rr, ok = p.Next() {
		records++
		switch rr := rr.(type) {
		case *dns.NS:
			if rr.Hdr.Name == "." {
				servers[dns.CanonicalName(rr.Ns)] = true
			}
		case *dns.A, *dns.AAAA:
			addresses[dns.CanonicalName(rr.Header().Name)] = true
		}
	}
	for s := range servers {
		complete = complete || addresses[s]
	}
	return records, complete, p.Err()
}

// checkAnchors wants nothing but DS and DNSKEY records; none at all is allowed.
func checkAnchors(r io.Reader) error {
	p := dns.NewZoneParser(r, ".", "")
	p.SetDefaultTTL(3600) // anchors are often written without
	for rr, ok := p.Next(); ok; rr, ok = p.Next() {
		switch rr.(type) {
		case *dns.DS, *dns.DNSKEY:
		default:
			return fmt.Errorf("it holds a record of type %s; trust anchors are DS or DNSKEY", dns.TypeToString[rr.Header().Rrtype])
		}
	}
	return p.Err()
}

// check is Sluice.check for the service.
func (c *Bizd) check(d *decoder) {
	if d.undecoded() {
		return
	}
	d.required("data_dir", c.DataDir)
	if c.Store != "" && !d.faulty("store") {
		u, err := url.Parse(c.Store)
		if err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" || u.Host == "" && u.RawQuery == "" {
			// The text is not repeated: it may hold a password.
			d.fault("store", "is not the URL of a PostgreSQL database", `postgres://USER@HOST/DATABASE, or "" for a file in data_dir`)
		}
	}
	d.keyPair("tls", "cert", "key", c.TLS.Cert, c.TLS.Key)
	d.readable("tls.client_ca", c.TLS.ClientCA)
	if !d.faulty("tls.client_ca") {
		d.authorities("tls.client_ca", c.TLS.ClientCA)
	}
	complete := c.TLS.Cert != "" && c.TLS.Key != "" && c.TLS.ClientCA != "" || d.faulty("tls")
	switch {
	case c.Listen.Off() && !d.faulty("listen"):
		d.fault("listen", "the service would listen nowhere", "127.0.0.1:8054")
	case !c.Listen.Local() && !complete:
		d.fault("listen", c.Listen.String()+" can be reached from other machines and tls is not complete", "tls: { cert: FILE, key: FILE, client_ca: FILE }, or a loopback address or unix:PATH")
	case c.Listen == c.HTTP.Listen && !strings.HasSuffix(c.Listen.Address, ":0"):
		d.fault("http.listen", c.HTTP.Listen.String()+" is taken by listen already", "another port")
	}
	d.readable("testing.clock_file", c.Testing.ClockFile)
	d.readable("testing.wall_file", c.Testing.WallFile)
	c.Log.check(d, c.DataDir)
}
