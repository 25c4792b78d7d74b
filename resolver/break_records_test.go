package resolver_test

import (
	"fmt"
	"math"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/usercache"
)

// What is bogus stays SERVFAIL whatever a user's policy says of where it leads, with stale data and without; a block or a
// rewrite of the asked name wins, an exception does not make it true. Who asks without checking is filtered all the same.
func TestBogusAnswersAndPolicy(t *testing.T) {
	const name = "bad.chain.example." // CNAME www.bad-signature.example., which is bogus
	cases := []struct{ id, rules, plain, unchecked string }{
		{"nothing", "", "SERVFAIL, EDE 6", "NOERROR, A 198.18.12.1, CNAME www.bad-signature.example."},
		{"asked", "||bad.chain.example^", "NOERROR, A 0.0.0.0, EDE 17", "NOERROR, A 0.0.0.0, EDE 17"},
		{"alias", "||bad-signature.example^", "SERVFAIL, EDE 6", "NOERROR, A 0.0.0.0, EDE 17"},
		{"address", "||198.18.12.1^", "SERVFAIL, EDE 6", "NOERROR, A 0.0.0.0, EDE 17"},
		{"excepted", "@@||bad.chain.example^$important", "SERVFAIL, EDE 6", "NOERROR, A 198.18.12.1, CNAME www.bad-signature.example."},
		{"rewritten", "||bad.chain.example^$dnsrewrite=192.0.2.9", "NOERROR, A 192.0.2.9", "NOERROR, A 192.0.2.9"},
		{"led to it", "||bad.chain.example^$dnsrewrite=www.bad-signature.example", "SERVFAIL, EDE 6", "NOERROR, A 198.18.12.1, CNAME www.bad-signature.example."},
	}
	users := map[string]proto.Message{}
	for i, c := range cases {
		u := &userv1.User{Devices: []*userv1.Device{{Id: fmt.Sprint("d", i), Links: []string{fmt.Sprint("10.0.1.", i+1)}}}}
		if c.rules != "" {
			u.Rules = &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte(c.rules)}}
		}
		users[fmt.Sprint("u", i)] = u
	}
	synctest.Test(t, func(t *testing.T) {
		withHousehold(t, newInternet(t, nil), nil, users, nil, func(o *resolver.Options) {
			o.DNSSEC.Validate = true
			o.Cache.MaxStale, o.Cache.StaleAfter = 24*time.Hour, 1800*time.Millisecond
		}, func(h *household) {
			for round := range 3 {
				for i, c := range cases {
					for _, cd := range []bool{round == 1, round != 1} { // either first
						m := new(dns.Msg).SetQuestion(name, dns.TypeA)
						m.SetEdns0(1232, false)
						m.CheckingDisabled = cd
						conn, err := h.net.DialTCP(t.Context(), netip.AddrPortFrom(netip.MustParseAddr(fmt.Sprint("10.0.1.", i+1)), 0), h.addr)
						if err != nil {
							t.Fatal(err)
						}
						dc := &dns.Conn{Conn: conn}
						if err := dc.WriteMsg(m); err != nil {
							t.Fatal(err)
						}
						r, err := dc.ReadMsg()
						conn.Close()
						want := map[bool]string{false: c.plain, true: c.unchecked}[cd]
						if got := briefly(r, err); got != want && !(strings.HasPrefix(want, "SERVFAIL") && strings.HasPrefix(got, "SERVFAIL")) {
							t.Errorf("round %d, %s, CD=%v: %s, want %s", round, c.id, cd, got, want)
						}
						if err == nil && r.AuthenticatedData {
							t.Errorf("round %d, %s, CD=%v: authentic", round, c.id, cd)
						}
					}
				}
				time.Sleep(time.Duration(round) * 2 * time.Hour)
			}
		})
	})
}

// Records with values beyond all sense, of a newer version, or too big: each means something sane or leaves its user on the
// last good version, and nobody else notices.
func TestAbsurdRecords(t *testing.T) {
	ask := func(h *household, from, name string) string {
		m, err := h.from(from, name, dns.TypeA)
		s := briefly(m, err)
		if err == nil && len(m.Answer) > 0 {
			s += fmt.Sprint(", TTL ", m.Answer[0].Header().Ttl)
		}
		return s
	}
	rules := func(text string) *userv1.Rules { return &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte(text)}} }
	device := func(id, link string) []*userv1.Device { return []*userv1.Device{{Id: id, Links: []string{link}}} }
	users := map[string]proto.Message{
		"ttls": &userv1.User{Devices: device("ttls", "10.0.1.1"), Rules: rules("||blocked.example^"), Settings: &userv1.Settings{BlockTtl: proto.Uint32(0),
			Rewrites: &userv1.RewriteSet{Values: []*userv1.Rewrite{{Name: "long.example", Records: []string{"A 192.0.2.1"}, Ttl: math.MaxUint32}, {Name: "broken.example", Records: []string{"A nonsense", "XYZ", ""}}, {Name: "", Records: []string{"A 192.0.2.1"}}, {Name: "*.", Records: []string{"A 192.0.2.1"}}}}}},
		"times": &userv1.User{Devices: device("times", "10.0.1.2"), Rules: rules("||blocked.example^"), Settings: &userv1.Settings{PausedUntil: proto.Int64(math.MinInt64), RateLimit: proto.Uint32(math.MaxUint32), RateBurst: proto.Uint32(math.MaxUint32), LogRetention: proto.Uint32(math.MaxUint32),
			Unblocks: &userv1.UnblockSet{Values: []*userv1.Unblock{{Name: "blocked.example", Until: math.MinInt64}, {Name: "x", Until: -1}, {Name: ""}}}}},
		"forever": &userv1.User{Devices: device("forever", "10.0.1.3"), Rules: rules("||blocked.example^"), Settings: &userv1.Settings{PausedUntil: proto.Int64(math.MaxInt64)}},
		"unknown": &userv1.User{Devices: device("unknown", "10.0.1.4"), Rules: rules("||blocked.example^"), Settings: &userv1.Settings{Lists: strs("no-such-list", ""), Services: strs("none"), Categories: strs("none"), SafeSearch: strs("none"), BlockTypes: strs("TYPE65535", "NOTYPE", "")}},
		"burst":   &userv1.User{Devices: device("burst", "10.0.1.5"), Rules: rules("||blocked.example^"), Settings: &userv1.Settings{RateLimit: proto.Uint32(1), RateBurst: proto.Uint32(math.MaxUint32)}},
		"good":    &userv1.User{Devices: device("good", "10.0.1.6"), Rules: rules("||blocked.example^")},
		"newer":   &userv1.User{Devices: device("newer", "10.0.1.7"), Rules: rules("||blocked.example^")},
		"many":    &userv1.User{Devices: device("many", "10.0.1.8"), Rules: rules("||blocked.example^")},
	}
	const blocked = "NOERROR, A 0.0.0.0, EDE 17, TTL 10"
	synctest.Test(t, func(t *testing.T) {
		sim := newInternet(t, zones{zoneAt("example.", labServer, "blocked A 192.0.2.7\nlong A 192.0.2.8\nbroken A 192.0.2.9\n")})
		withHousehold(t, sim, nil, users, nil, nil, func(h *household) {
			check := func(when string) {
				t.Helper()
				for _, c := range []struct{ from, name, want string }{
					{"10.0.1.1", "long.example.", "NOERROR, A 192.0.2.1, TTL 2147483647"},
					{"10.0.1.1", "broken.example.", "NOERROR, SOA 0"},
					{"10.0.1.1", "blocked.example.", "NOERROR, A 0.0.0.0, EDE 17, TTL 0"},
					{"10.0.1.2", "blocked.example.", blocked}, {"10.0.1.3", "blocked.example.", "NOERROR, A 192.0.2.7, TTL 3600"}, {"10.0.1.4", "blocked.example.", blocked},
					{"10.0.1.5", "blocked.example.", blocked}, {"10.0.1.6", "blocked.example.", blocked}, {"10.0.1.7", "blocked.example.", blocked}, {"10.0.1.8", "blocked.example.", blocked},
				} {
					if got := ask(h, c.from, c.name); got != c.want {
						t.Errorf("%s, %s asks %s: %s, want %s", when, c.from, c.name, got, c.want)
					}
				}
			}
			check("at first")
			// Fields that this version does not know mean nothing to it; values that it does not know leave the version before.
			newer, _ := proto.Marshal(users["newer"])
			newer = protowire.AppendTag(newer, 500, protowire.BytesType)
			newer = protowire.AppendBytes(newer, []byte("a field of the future"))
			newer = protowire.AppendTag(newer, 501, protowire.VarintType)
			newer = protowire.AppendVarint(newer, math.MaxUint64)
			h.raw(t, map[string][]byte{"newer": newer})
			mode := protowire.AppendVarint(protowire.AppendTag(nil, 3, protowire.VarintType), 99)
			future := protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), mode)
			h.raw(t, map[string][]byte{"good": future, "burst": []byte("\xff\xff\xff"), "unknown": nil})
			m := &userv1.User{}
			for i := range 1000 {
				m.Devices = append(m.Devices, &userv1.Device{Id: fmt.Sprint("many-", i), Links: []string{fmt.Sprintf("10.7.%d.%d", i>>8, i&255)}})
			}
			h.put(t, usercache.Users, map[string]proto.Message{"many": m})
			check("afterwards")
			if got := ask(h, "10.7.0.9", "blocked.example."); !strings.HasPrefix(got, "REFUSED") && !strings.HasPrefix(got, "NOERROR, A 192.0.2.7") {
				t.Errorf("a device of a record that is refused: %s", got)
			}
		})
	})
}

// raw puts records as they are; nil is a record of nothing at all.
func (h *household) raw(t *testing.T, records map[string][]byte) {
	t.Helper()
	for key, b := range records {
		if b == nil { // as it was
			continue
		}
		h.rev[usercache.Users]++
		rev := h.rev[usercache.Users]
		d := usercache.Delta{From: rev - 1, To: rev, Changes: []usercache.Change{{Key: []byte(key), Revision: rev, Bytes: b}}}
		if _, err := h.users.Dataset(usercache.Users).ApplyDelta(t.Context(), usercache.Identity{Dataset: [16]byte{1}, Lineage: [16]byte{1}}, d, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
}
