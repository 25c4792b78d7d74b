package resolver_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

// Answers that rules and rewrites make are messages, however much their authors put into them: what does not fit is
// truncated over UDP and a failure over TCP; names of lists are shortened and quoted in what clients are told.
func TestAnswersOfTooMuch(t *testing.T) {
	l, text := list(0, "||blocked.example^")
	l.Name = strings.Repeat("\"é\n\x00\\", 800)
	var lines []string
	for i := range 6 {
		lines = append(lines, fmt.Sprintf("||txt.example^$dnsrewrite=NOERROR;TXT;%d%s", i, strings.Repeat("x", 15000)))
	}
	for i := range 20 {
		lines = append(lines, fmt.Sprintf("||many.example^$dnsrewrite=192.0.2.%d", i))
	}
	var records []string
	for i := range 230 {
		records = append(records, fmt.Sprintf("TXT \"%d%s\"", i, strings.Repeat("y", 250)))
	}
	sum := list1(strings.Join(lines, "\n"))
	users := map[string]proto.Message{"u": &userv1.User{Devices: []*userv1.Device{{Id: "d", Links: []string{"10.0.1.1"}}}, Settings: &userv1.Settings{Lists: strs("list"),
		Rewrites: &userv1.RewriteSet{Values: []*userv1.Rewrite{{Name: "wide.example", Records: append(records, "A 192.0.2.1")}}}},
		Rules: &userv1.Rules{Body: &userv1.Rules_Sha256{Sha256: sum}, Size: uint64(len(strings.Join(lines, "\n")))}}}
	synctest.Test(t, func(t *testing.T) {
		sim := newInternet(t, zones{zoneAt("example.", labServer, "a A 192.0.2.1")})
		withHousehold(t, sim, map[string]proto.Message{"list/list": l}, users, [][]byte{text, []byte(strings.Join(lines, "\n"))}, nil, func(h *household) {
			ask := func(network, name string, typ uint16) (*dns.Msg, error) {
				m := new(dns.Msg).SetQuestion(name, typ)
				m.SetEdns0(1232, false)
				m.IsEdns0().Option = append(m.IsEdns0().Option, &dns.EDNS0_LOCAL{Code: dns.EDNS0EDE})
				source := netip.AddrPortFrom(netip.MustParseAddr("10.0.1.1"), 0)
				dc := &dns.Conn{UDPSize: 65535}
				if network == "udp" {
					c, err := h.net.DialUDP(source, h.addr)
					if err != nil {
						return nil, err
					}
					dc.Conn = c
				} else {
					c, err := h.net.DialTCP(t.Context(), source, h.addr)
					if err != nil {
						return nil, err
					}
					dc.Conn = c
				}
				defer dc.Close()
				dc.SetDeadline(time.Now().Add(10 * time.Second))
				if err := dc.WriteMsg(m); err != nil {
					return nil, err
				}
				return dc.ReadMsg()
			}
			for range 2 {
				for _, c := range []struct {
					network, name string
					typ           uint16
					truncated     bool
					rcode, n      int
				}{
					{"udp", "txt.example.", dns.TypeTXT, true, 0, 0}, {"tcp", "txt.example.", dns.TypeTXT, false, dns.RcodeServerFailure, 0},
					{"udp", "wide.example.", dns.TypeTXT, true, 0, 0}, {"tcp", "wide.example.", dns.TypeTXT, false, dns.RcodeSuccess, 230},
					{"udp", "wide.example.", dns.TypeA, false, 0, 1}, {"udp", "many.example.", dns.TypeA, false, 0, 16},
				} {
					m, err := ask(c.network, c.name, c.typ)
					if err != nil || m.Truncated != c.truncated || m.Rcode != c.rcode || len(m.Answer) != c.n && !c.truncated {
						if err == nil {
							err = fmt.Errorf("%s, TC=%v, %d records", dns.RcodeToString[m.Rcode], m.Truncated, len(m.Answer))
						}
						t.Errorf("%s %s %s: %v", c.network, c.name, dns.TypeToString[c.typ], err)
					}
				}
				for _, network := range []string{"udp", "tcp"} {
					m, err := ask(network, "blocked.example.", dns.TypeA)
					if err != nil || len(m.Answer) != 1 || m.Len() > 1232 {
						t.Fatalf("%s: %v %v", network, m, err)
					}
					for _, o := range m.IsEdns0().Option {
						if e, ok := o.(*dns.EDNS0_EDE); ok {
							if !utf8.ValidString(e.ExtraText) || len(e.ExtraText) > 600 || strings.HasPrefix(e.ExtraText, "{") && !json.Valid([]byte(e.ExtraText)) {
								t.Errorf("%s: %d bytes: %q", network, len(e.ExtraText), e.ExtraText)
							}
						}
					}
				}
			}
		})
	})
}

func list1(text string) []byte { l, _ := list(0, text); return l.Sha256 }
