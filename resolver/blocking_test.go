package resolver_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// TestBlockedForEveryTypeAndClient: a blocked name, and one whose alias is blocked, asked for with every kind of QTYPE
// in every mode by clients of every kind: what RCODE, which records, which TTL, which extended error, and nothing that
// would say that the answer is somebody's who signs.
func TestBlockedForEveryTypeAndClient(t *testing.T) {
	types := []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeHTTPS, dns.TypeSVCB, dns.TypeANY, dns.TypeNS, dns.TypeSOA, dns.TypeMX, dns.TypeTXT, dns.TypePTR, dns.TypeDS, dns.TypeDNSKEY,
		dns.TypeCAA, dns.TypeCNAME, dns.TypeDNAME, dns.TypeRRSIG, dns.TypeNSEC, dns.TypeSRV, 65534, dns.TypeAXFR, dns.TypeIXFR}
	const contact, organization = "mailto:help@example.net", "Example"
	synctest.Test(t, func(t *testing.T) {
		sim := newInternet(t, zones{zoneAt("example.", labServer, "ads A 192.0.2.1\nads HTTPS 1 . ipv4hint=192.0.2.1\nto CNAME ads\n")})
		l, text := list(3, "||ads.example^")
		catalogue := map[string]proto.Message{"list/l": l}
		modes := map[userv1.BlockMode]string{}
		users := map[string]proto.Message{}
		for m := userv1.BlockMode_BLOCK_MODE_NULL_IP; m <= userv1.BlockMode_BLOCK_MODE_CUSTOM_IP; m++ {
			id := fmt.Sprintf("u%d", m)
			modes[m] = fmt.Sprintf("10.0.1.%d", m)
			users[id] = &userv1.User{Devices: []*userv1.Device{{Id: id, Links: []string{modes[m]}}},
				Settings: &userv1.Settings{Lists: strs("l"), Mode: m, BlockTtl: proto.Uint32(77), BlockIpv4: proto.String("192.0.2.80"), BlockIpv6: proto.String("")}}
		}
		withHousehold(t, sim, catalogue, users, [][]byte{text}, func(o *resolver.Options) {
			o.Answers.Contact, o.Answers.Organization = []string{contact}, organization
		}, func(h *household) {
			checked := 0
			for mode, from := range modes {
				for _, name := range []string{"Ads.Example.", "x.ads.example.", "to.example."} {
					for _, typ := range types {
						for bits := range 32 {
							do, cd, ad, edns, structured := bits&1 != 0, bits&2 != 0, bits&4 != 0, bits&8 != 0, bits&16 != 0
							if !edns && (do || structured) || name == "to.example." && (typ == dns.TypeCNAME || typ == dns.TypeANY) {
								continue // the alias itself is what is asked for, and it is nobody's who is blocked
							}
							m := new(dns.Msg).SetQuestion(name, typ)
							m.CheckingDisabled, m.AuthenticatedData = cd, ad
							if typ == dns.TypeIXFR {
								m.Ns = records("ads.example. 60 IN SOA a. b. 1 2 3 4 5")
							}
							if edns {
								m.SetEdns0(1232, do)
								if structured {
									m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_LOCAL{Code: dns.EDNS0EDE}}
								}
							}
							what := fmt.Sprintf("%v, %s %s, DO %v CD %v AD %v, EDNS %v, structured %v", mode, name, dns.TypeToString[typ], do, cd, ad, edns, structured)
							r, err := h.send(from, m)
							if err != nil {
								t.Errorf("%s: %v", what, err)
								continue
							}
							checked++
							if fault := blockedWell(r, m, mode, edns, do, structured); fault != "" {
								t.Errorf("%s: %s\n%v", what, fault, r)
							}
							if t.Failed() {
								return
							}
						}
					}
				}
			}
			if n := sim.Count(func(e siminternet.LogEntry) bool { return dns.IsSubDomain("x.ads.example.", dns.CanonicalName(e.Name)) }); n > 0 {
				t.Errorf("%d questions that are blocked went upstream", n)
			}
			t.Logf("%d answers", checked)
		})
	})
}

// TestHostsAddressIsNotDenied: a name that a hosts line gives an address has no records of other types, but it is not
// denied, whatever the mode: a client that asks for A and AAAA at once would drop the address.
func TestHostsAddressIsNotDenied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := newInternet(t, zones{zoneAt("example.", labServer, "")})
		l, text := list(3, "192.0.2.77 nas.example\n2001:db8::7 six.example\n0.0.0.0 ads.example\n127.0.0.1 both.example\n192.0.2.78 both.example\n")
		users := map[string]proto.Message{}
		from := map[userv1.BlockMode]string{}
		for m := userv1.BlockMode_BLOCK_MODE_NULL_IP; m <= userv1.BlockMode_BLOCK_MODE_REFUSED; m++ {
			id := fmt.Sprintf("u%d", m)
			from[m] = fmt.Sprintf("10.0.1.%d", m)
			users[id] = &userv1.User{Devices: []*userv1.Device{{Id: id, Links: []string{from[m]}}}, Settings: &userv1.Settings{Lists: strs("l"), Mode: m}}
		}
		withHousehold(t, sim, map[string]proto.Message{"list/l": l}, users, [][]byte{text}, nil, func(h *household) {
			for _, c := range []struct {
				mode userv1.BlockMode
				name string
				typ  uint16
				want string
			}{
				{userv1.BlockMode_BLOCK_MODE_NXDOMAIN, "nas.example.", dns.TypeA, "NOERROR, A 192.0.2.77"},
				{userv1.BlockMode_BLOCK_MODE_NXDOMAIN, "nas.example.", dns.TypeAAAA, "NOERROR, SOA 10, EDE 17"},
				{userv1.BlockMode_BLOCK_MODE_NXDOMAIN, "nas.example.", dns.TypeMX, "NOERROR, SOA 10, EDE 17"},
				{userv1.BlockMode_BLOCK_MODE_NXDOMAIN, "six.example.", dns.TypeAAAA, "NOERROR, AAAA 2001:db8::7"},
				{userv1.BlockMode_BLOCK_MODE_NXDOMAIN, "six.example.", dns.TypeA, "NOERROR, SOA 10, EDE 17"},
				{userv1.BlockMode_BLOCK_MODE_NXDOMAIN, "both.example.", dns.TypeHTTPS, "NOERROR, SOA 10, EDE 17"},
				{userv1.BlockMode_BLOCK_MODE_NXDOMAIN, "ads.example.", dns.TypeA, "NXDOMAIN, SOA 10, EDE 17"},
				{userv1.BlockMode_BLOCK_MODE_NXDOMAIN, "ads.example.", dns.TypeMX, "NXDOMAIN, SOA 10, EDE 17"},
				{userv1.BlockMode_BLOCK_MODE_NODATA, "nas.example.", dns.TypeAAAA, "NOERROR, SOA 10, EDE 17"},
				{userv1.BlockMode_BLOCK_MODE_REFUSED, "nas.example.", dns.TypeAAAA, "REFUSED, EDE 17"},
				{userv1.BlockMode_BLOCK_MODE_NULL_IP, "nas.example.", dns.TypeAAAA, "NOERROR, AAAA ::, EDE 17"},
			} {
				m, err := h.from(from[c.mode], c.name, c.typ)
				if got := briefly(m, err); got != c.want {
					t.Errorf("%v, %s %s: %s, want %s", c.mode, c.name, dns.TypeToString[c.typ], got, c.want)
				}
			}
		})
	})
}

// blockedWell says what is wrong with the answer to a blocked question, "" if nothing is.
func blockedWell(r, m *dns.Msg, mode userv1.BlockMode, edns, do, structured bool) string {
	q := m.Question[0]
	opt := r.IsEdns0()
	switch {
	case len(r.Question) != 1 || r.Question[0] != q:
		return "the question is not echoed"
	case r.AuthenticatedData || r.Authoritative || r.Truncated || !r.RecursionAvailable || r.CheckingDisabled != m.CheckingDisabled || !r.Response:
		return "its flags"
	case (opt != nil) != edns || edns && opt.Do() != do:
		return "its EDNS"
	}
	for _, rr := range append(append(r.Answer, r.Ns...), r.Extra...) {
		switch rr.Header().Rrtype {
		case dns.TypeRRSIG, dns.TypeNSEC, dns.TypeNSEC3:
			return "it has DNSSEC records"
		}
	}
	ede, told := -1, ""
	if edns {
		for _, o := range opt.Option {
			if e, ok := o.(*dns.EDNS0_EDE); ok {
				ede, told = int(e.InfoCode), e.ExtraText
			}
		}
	}
	if q.Qtype == dns.TypeAXFR || q.Qtype == dns.TypeIXFR { // is refused whatever the name
		if r.Rcode != dns.RcodeRefused || len(r.Answer)+len(r.Ns) > 0 || edns && ede != 20 {
			return "a transfer is not refused"
		}
		return ""
	}
	if edns && ede != 17 {
		return fmt.Sprintf("extended error %d", ede)
	}
	var s struct {
		C []string `json:"c"`
		J string   `json:"j"`
		O string   `json:"o"`
	}
	if isJSON := json.Unmarshal([]byte(told), &s) == nil; isJSON != structured || structured && (len(s.C) != 1 || s.J != "l" || s.O == "") || edns && !structured && told != "l" {
		return fmt.Sprintf("its text %q", told)
	}
	const ttl = 77
	addr := ""
	switch {
	case mode == userv1.BlockMode_BLOCK_MODE_NULL_IP && q.Qtype == dns.TypeA:
		addr = "0.0.0.0"
	case mode == userv1.BlockMode_BLOCK_MODE_NULL_IP && q.Qtype == dns.TypeAAAA:
		addr = "::"
	case mode == userv1.BlockMode_BLOCK_MODE_CUSTOM_IP && q.Qtype == dns.TypeA:
		addr = "192.0.2.80"
	}
	rcode := map[userv1.BlockMode]int{userv1.BlockMode_BLOCK_MODE_NXDOMAIN: dns.RcodeNameError, userv1.BlockMode_BLOCK_MODE_REFUSED: dns.RcodeRefused}[mode]
	switch {
	case r.Rcode != rcode:
		return "its RCODE"
	case rcode == dns.RcodeRefused:
		if len(r.Answer)+len(r.Ns) > 0 {
			return "records in a refusal"
		}
	case addr != "":
		if len(r.Answer) != 1 || len(r.Ns) != 0 {
			return "its sections"
		}
		var got string
		switch rr := r.Answer[0].(type) {
		case *dns.A:
			got = rr.A.String()
		case *dns.AAAA:
			got = rr.AAAA.String()
		}
		if h := r.Answer[0].Header(); got != addr || h.Ttl != ttl || h.Name != q.Name || h.Rrtype != q.Qtype {
			return "its record"
		}
	default:
		if len(r.Answer) != 0 || len(r.Ns) != 1 {
			return "its sections"
		}
		soa, ok := r.Ns[0].(*dns.SOA)
		if !ok || soa.Hdr.Ttl != ttl || soa.Minttl != ttl || soa.Hdr.Name != q.Name {
			return "its SOA record"
		}
	}
	return ""
}

// send sends a message over UDP from an address.
func (h *household) send(from string, m *dns.Msg) (*dns.Msg, error) {
	conn, err := h.net.DialUDP(netip.AddrPortFrom(netip.MustParseAddr(from), 0), h.addr)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	wire, err := m.Pack()
	if err != nil {
		return nil, err
	}
	if _, err := conn.Write(wire); err != nil {
		return nil, err
	}
	buf := make([]byte, 1500)
	n, err := conn.Read(buf)
	if err != nil {
		return nil, err
	}
	r := new(dns.Msg)
	return r, r.Unpack(buf[:n])
}
