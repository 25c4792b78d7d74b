package resolver_test

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/siminternet"
	"github.com/sluice-dns/sluice/usercache"
)

// A household is a lab whose clients are devices of users: the device at 10.A.B.C has these addresses linked.
type household struct {
	*lab
	users *usercache.Cache
	rev   map[usercache.Kind]uint64

	blobsMu sync.Mutex
	blobs   map[[32]byte][]byte
}

// withHousehold runs f in a lab without validation, whose catalogue and users are these.
func withHousehold(t *testing.T, sim *siminternet.Internet, catalogue, users map[string]proto.Message, blobs [][]byte, edit func(*resolver.Options), f func(h *household)) {
	t.Helper()
	h := &household{blobs: map[[32]byte][]byte{}, rev: map[usercache.Kind]uint64{}}
	for _, b := range blobs {
		h.blobs[sha256.Sum256(b)] = b
	}
	h.lab = newLabIn(t, sim, func(o *resolver.Options) {
		h.users = o.Users
		o.DNSSEC.Validate, o.Logger = false, slog.New(slog.DiscardHandler)
		o.Recursion.Minimise = resolver.MinimiseOff
		o.Blob = func(sum [32]byte) ([]byte, bool) {
			h.blobsMu.Lock()
			defer h.blobsMu.Unlock()
			b, ok := h.blobs[sum]
			return b, ok
		}
		if edit != nil {
			edit(o)
		}
	})
	defer h.stop()
	h.put(t, usercache.CatalogueKind, catalogue)
	h.put(t, usercache.Users, users)
	synctest.Wait() // for the catalogue to be compiled
	f(h)
}

func (h *household) put(t *testing.T, k usercache.Kind, records map[string]proto.Message) {
	t.Helper()
	putRecords(t, h.users, k, h.rev[k], records)
	h.rev[k]++
}

// putRecords puts records, and takes those away that are nil, as the revision after that one.
func putRecords(t testing.TB, c *usercache.Cache, k usercache.Kind, from uint64, records map[string]proto.Message) {
	t.Helper()
	d := usercache.Delta{From: from, To: from + 1}
	for key, m := range records {
		b, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		d.Changes = append(d.Changes, usercache.Change{Key: []byte(key), Revision: from + 1, Bytes: b, Removed: m == nil})
	}
	id := usercache.Identity{Dataset: [16]byte{1}, Lineage: [16]byte{1}}
	if _, err := c.Dataset(k).ApplyDelta(context.Background(), id, d, clock.Wall()); err != nil {
		t.Fatal(err)
	}
}

// from sends a query over UDP from an address.
func (h *household) from(source, name string, typ uint16) (*dns.Msg, error) {
	conn, err := h.net.DialUDP(netip.AddrPortFrom(netip.MustParseAddr(source), 0), h.addr)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	m := new(dns.Msg).SetQuestion(name, typ)
	m.SetEdns0(1232, false)
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

func strs(values ...string) *userv1.StringSet { return &userv1.StringSet{Values: values} }

func list(number uint32, text string) (*userv1.List, []byte) {
	sum := sha256.Sum256([]byte(text))
	return &userv1.List{Number: number, Sha256: sum[:], Size: uint64(len(text))}, []byte(text)
}

// briefly puts a response in words: RCODE, what answers, whether there is a SOA record, the extended error.
func briefly(m *dns.Msg, err error) string {
	if err != nil {
		return err.Error()
	}
	words := []string{dns.RcodeToString[m.Rcode]}
	for _, rr := range m.Answer {
		f := strings.Fields(rr.String())
		words = append(words, strings.Join(f[3:], " "))
	}
	slices.Sort(words[1:])
	for _, rr := range m.Ns {
		if soa, ok := rr.(*dns.SOA); ok {
			words = append(words, fmt.Sprintf("SOA %d", min(soa.Hdr.Ttl, soa.Minttl)))
		}
	}
	if code := extended(m); code >= 0 {
		words = append(words, fmt.Sprintf("EDE %d", code))
	}
	return strings.Join(words, ", ")
}

// TestFilteringCases: cases about answers and about users, each asked of a whole resolver over UDP, cold and warm.
func TestFilteringCases(t *testing.T) {
	const upstream = `
ad.first CNAME u.co2
u.co2 CNAME blocked.adco
blocked.adco A 192.0.2.101
w CNAME null
null A 192.0.2.102
goto.store CNAME goto.impact
goto.impact A 192.0.2.103
impact A 192.0.2.104
c4 CNAME t4
t4 A 192.0.2.105
c10 CNAME t10
t10 A 192.0.2.106
a A 192.0.2.107
a HTTPS 1 . alpn=h3 ipv4hint=192.0.2.107
a MX 10 mail
www.search A 192.0.2.108
safe.search A 192.0.2.109
shared A 192.0.2.110
target A 192.0.2.111
target AAAA 2001:db8::111
self A 192.0.2.112
b.host A 192.0.2.113
`
	number := func() func() uint32 { n := uint32(0); return func() uint32 { n++; return n - 1 } }()
	catalogue := map[string]proto.Message{
		"safesearch/engine": &userv1.SafeSearch{Rewrites: []*userv1.Rewrite{{Name: "www.search.example", Records: []string{"CNAME safe.search.example"}}}},
	}
	var blobs [][]byte
	users := map[string]proto.Message{}
	source := map[string]string{}
	user := func(id string, s *userv1.Settings, lines ...string) {
		if s == nil {
			s = new(userv1.Settings)
		}
		if len(lines) > 0 {
			l, text := list(number(), strings.Join(lines, "\n"))
			catalogue["list/"+id], blobs = l, append(blobs, text)
			s.Lists = strs(id)
		}
		source[id] = fmt.Sprintf("10.0.1.%d", len(source)+1)
		users[id] = &userv1.User{Settings: s, Devices: []*userv1.Device{{Id: id, Links: []string{source[id]}}}}
	}
	nx := userv1.BlockMode_BLOCK_MODE_NXDOMAIN
	user("c01", nil, "||blocked.adco.example^")
	user("c02", nil, "@@||w.example^", "||null.example^")
	user("c03", nil, "@@|impact.example|", "||impact.example^")
	user("c04", nil, "||t4.example^")
	user("c05", &userv1.Settings{Mode: nx}, "||t4.example^")
	user("c09", nil, "||a.example^")
	user("c09-nx", &userv1.Settings{Mode: nx, BlockTtl: proto.Uint32(300)}, "||a.example^")
	user("c10", nil, "||t10.example^$dnstype=CNAME")
	user("c11", &userv1.Settings{Enabled: proto.Bool(false)}, "||t10.example^")
	user("b03", &userv1.Settings{Mode: userv1.BlockMode_BLOCK_MODE_CUSTOM_IP, BlockIpv4: proto.String("192.0.2.10")}, "||a.example^")
	user("b04", &userv1.Settings{BlockTtl: proto.Uint32(77)}, "||a.example^")
	user("b10", nil, "192.0.2.200 a.example")
	user("k02-a", &userv1.Settings{SafeSearch: strs("engine")})
	user("k02-b", nil)
	user("k06-a", nil, "||192.0.2.110^")
	user("w17", nil, "||self.example^$dnsrewrite=Self.example")
	user("w19", &userv1.Settings{Rewrites: &userv1.RewriteSet{Values: []*userv1.Rewrite{
		{Name: "*.host.example", Records: []string{"A 192.0.2.2"}}, {Name: "a.host.example", Records: []string{"A 192.0.2.1"}},
		{Name: "*.both.example", Records: []string{"A 192.0.2.3", "AAAA 2001:db8::3"}}, {Name: "BIG.EXAMPLE", Records: []string{"A 192.0.2.4"}},
		{Name: "*.sub.w.example", Records: []string{"A 192.0.2.6"}}, {Name: "*.w.example", Records: []string{"A 192.0.2.5"}},
		{Name: "flat.example", Records: []string{"CNAME target.example"}, Ttl: 30},
	}}})
	user("deny", &userv1.Settings{Enabled: proto.Bool(false), DenyDomains: strs("a.example")})
	user("private", &userv1.Settings{RebindingProtection: proto.Bool(true)})

	synctest.Test(t, func(t *testing.T) {
		sim := newInternet(t, zones{zoneAt("example.", labServer, upstream)})
		withHousehold(t, sim, catalogue, users, blobs, func(o *resolver.Options) { o.Local.DefaultZones = true }, func(h *household) {
			const nodata, refused = "NOERROR, SOA 10, EDE 17", "REFUSED, EDE 18"
			for round := range 3 {
				for _, c := range []struct{ id, ask, want string }{
					{"c01", "ad.first A", "NOERROR, A 0.0.0.0, EDE 17"},
					{"c02", "w A", "NOERROR, A 192.0.2.102, CNAME null.example."},
					{"c03", "goto.store A", "NOERROR, A 0.0.0.0, EDE 17"},
					{"c03", "impact A", "NOERROR, A 192.0.2.104"},
					{"c04", "c4 AAAA", "NOERROR, AAAA ::, EDE 17"},
					{"c04", "c4 A", "NOERROR, A 0.0.0.0, EDE 17"},
					{"c05", "c4 A", "NXDOMAIN, SOA 10, EDE 17"},
					{"c09", "a HTTPS", nodata},
					{"c09-nx", "a HTTPS", "NXDOMAIN, SOA 300, EDE 17"},
					{"c10", "c10 A", "NOERROR, A 0.0.0.0, EDE 17"},
					{"c10", "t10 A", "NOERROR, A 192.0.2.106"},
					{"c11", "c10 A", "NOERROR, A 192.0.2.106, CNAME t10.example."},
					{"c09", "a A", "NOERROR, A 0.0.0.0, EDE 17"}, // B01
					{"c09", "a AAAA", "NOERROR, AAAA ::, EDE 17"},
					{"c09", "a MX", nodata},
					{"c09-nx", "a A", "NXDOMAIN, SOA 300, EDE 17"}, // B02
					{"b03", "a A", "NOERROR, A 192.0.2.10, EDE 17"},
					{"b03", "a AAAA", nodata},
					{"b03", "a TXT", nodata},
					{"b04", "a A", "NOERROR, A 0.0.0.0, EDE 17"},
					{"b10", "a A", "NOERROR, A 192.0.2.200"},
					{"k02-a", "www.search A", "NOERROR, A 192.0.2.109, CNAME safe.search.example."},
					{"k02-b", "www.search A", "NOERROR, A 192.0.2.108"},
					{"w17", "self A", "NOERROR, A 192.0.2.112"},
					{"w19", "a.host A", "NOERROR, A 192.0.2.1"},
					{"w19", "b.host A", "NOERROR, A 192.0.2.2"},
					{"w19", "www.both AAAA", "NOERROR, AAAA 2001:db8::3"},
					{"w19", "big A", "NOERROR, A 192.0.2.4"},
					{"w19", "a.host HTTPS", "NOERROR, SOA 10"},
					{"w19", "x.sub.w A", "NOERROR, A 192.0.2.6"},
					{"w19", "y.w A", "NOERROR, A 192.0.2.5"},
					{"w19", "flat AAAA", "NOERROR, AAAA 2001:db8::111"},
					{"deny", "a A", refused},
					{"deny", "x.a A", refused},
					{"deny", "target A", "NOERROR, A 192.0.2.111"},
				} {
					name, typ, _ := strings.Cut(c.ask, " ")
					m, err := h.from(source[c.id], name+".ExAmple.", dns.StringToType[typ])
					got := briefly(m, err)
					if got = strings.ReplaceAll(got, "ExAmple.", "example."); got != c.want {
						t.Errorf("round %d, %s asks %s: %s, want %s", round, c.id, c.ask, got, c.want)
					}
					if err == nil && (m.AuthenticatedData || m.Question[0].Name != name+".ExAmple." || len(m.Answer) > 0 && !strings.HasSuffix(m.Answer[0].Header().Name, ".ExAmple.")) { // B08
						t.Errorf("round %d, %s asks %s: %v", round, c.id, c.ask, m)
					}
					if c.id == "b04" && m.Answer[0].Header().Ttl != 77 {
						t.Errorf("B04, round %d: %v", round, m.Answer[0])
					}
				}
				if m, err := h.from(source["private"], "localhost.", dns.TypeA); briefly(m, err) != "NOERROR, A 127.0.0.1" {
					t.Errorf("localhost, for a user with rebinding protection: %s", briefly(m, err))
				}
				time.Sleep(3 * time.Second)
			}
			if n := sim.Count(func(e siminternet.LogEntry) bool {
				return strings.EqualFold(e.Name, "a.example.") && e.Type != dns.TypeA
			}); n != 0 {
				t.Errorf("C09: %d questions for blocked types of a.example. went upstream", n)
			}

			// K06: a hundred equal queries of two users at once, of which one is blocked by the address.
			sim.ResetLog()
			var wg sync.WaitGroup
			var mu sync.Mutex
			got := map[string]int{}
			for i := range 100 {
				wg.Go(func() {
					who := []string{"k06-a", "k02-b"}[i%2]
					m, err := h.from(source[who], "shared.example.", dns.TypeA)
					mu.Lock()
					defer mu.Unlock()
					got[who+": "+briefly(m, err)]++
				})
			}
			wg.Wait()
			if got["k06-a: NOERROR, A 0.0.0.0, EDE 17"] != 50 || got["k02-b: NOERROR, A 192.0.2.110"] != 50 {
				t.Errorf("K06: %v", got)
			}
			if n := sim.Count(func(e siminternet.LogEntry) bool { return strings.EqualFold(e.Name, "shared.example.") }); n != 1 {
				t.Errorf("K06: %d questions went upstream", n)
			}
		})
	})
}

// TestSemanticRowsServed asks 300 rows of the table of rule semantics of a whole resolver, each as a user whose
// lists are the row's.
func TestSemanticRowsServed(t *testing.T) {
	root := os.Getenv("SLUICE_SHARED")
	if root == "" {
		root = filepath.Join("..", "..", "shared")
	}
	f, err := os.Open(filepath.Join(root, "data", "tables", "semantic.public.jsonl"))
	if err != nil {
		t.Skipf("no test data here: set SLUICE_SHARED to the folder that holds data/tables (%v)", err)
	}
	defer f.Close()
	type expect struct {
		Verdict string   `json:"verdict"`
		HostIPs []string `json:"host_ips"`
		Rewrite struct {
			RCode   string   `json:"rcode"`
			CNAME   string   `json:"cname"`
			Answers []string `json:"answers"`
		} `json:"rewrite"`
	}
	type row struct {
		ID     string   `json:"id"`
		Lists  []string `json:"lists"`
		Name   string   `json:"name"`
		QType  string   `json:"qtype"`
		Client string   `json:"client"`
		IP     string   `json:"ip"`
		Tags   []string `json:"tags"`
		Expect expect   `json:"expect"`
		Doc    *expect  `json:"doc"`
		Status string   `json:"status"`
	}
	var rows []row
	catalogue, users := map[string]proto.Message{}, map[string]proto.Message{}
	var blobs [][]byte
	numbers := map[string]uint32{}
	for s := bufio.NewScanner(f); s.Scan() && len(rows) < 300; {
		var r row
		if err := json.Unmarshal(s.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		name := dns.Fqdn(r.Name)
		_, plain := dns.IsDomainName(name)
		// A device has an id and not any name; localhost and addresses are answered before anybody's rules.
		if r.Status != "agreed" || r.Client != "" || r.IP != "" || !plain || strings.ContainsAny(name, " \\*") || strings.EqualFold(name, "localhost.") || dns.StringToType[r.QType] == 0 {
			continue
		}
		if _, err := netip.ParseAddr(r.Name); err == nil {
			continue
		}
		var ids []string
		for _, text := range r.Lists {
			n, ok := numbers[text]
			if !ok {
				n = uint32(len(numbers))
				numbers[text] = n
				l, b := list(n, text)
				catalogue[fmt.Sprintf("list/l%d", n)], blobs = l, append(blobs, b)
			}
			ids = append(ids, fmt.Sprintf("l%d", n))
		}
		if len(numbers) > usercache.MaxLists {
			break
		}
		i := len(rows)
		users[fmt.Sprintf("u%d", i)] = &userv1.User{Settings: &userv1.Settings{Lists: strs(ids...)},
			Devices: []*userv1.Device{{Id: fmt.Sprintf("d%d", i), Tags: r.Tags, Links: []string{fmt.Sprintf("10.1.%d.%d", i>>8, i&255)}}}}
		rows = append(rows, r)
	}
	if len(rows) < 300 {
		t.Fatalf("%d rows can be asked", len(rows))
	}
	const passed4, passed6 = "203.0.113.77", "2600::77"
	synctest.Test(t, func(t *testing.T) {
		sim := newInternet(t, nil)
		for _, a := range sim.Servers(".") { // who is asked here answers whatever is asked for
			sim.SetBehaviour(a, siminternet.Behaviour{Hook: func(q siminternet.Query) *siminternet.Reply {
				name, typ := asked(q)
				if name == "." {
					return nil
				}
				m := new(dns.Msg).SetReply(q.Msg)
				m.Authoritative = true
				switch typ {
				case dns.TypeA:
					m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: typ, Class: dns.ClassINET, Ttl: 60}, A: netip.MustParseAddr(passed4).AsSlice()}}
				case dns.TypeAAAA:
					m.Answer = []dns.RR{&dns.AAAA{Hdr: dns.RR_Header{Name: name, Rrtype: typ, Class: dns.ClassINET, Ttl: 60}, AAAA: netip.MustParseAddr(passed6).AsSlice()}}
				default:
					m.Ns = records(". 60 IN SOA a. b. 1 2 3 4 60")
				}
				return reply(q, m)
			}})
		}
		withHousehold(t, sim, catalogue, users, blobs, nil, func(h *household) {
			wrong := 0
			for i, r := range rows {
				typ := dns.StringToType[r.QType]
				for _, round := range []string{"cold", "warm"} {
					m, err := h.from(fmt.Sprintf("10.1.%d.%d", i>>8, i&255), dns.Fqdn(r.Name), typ)
					if err != nil {
						t.Fatalf("%s: %v", r.ID, err)
					}
					want := "passed"
					e := &r.Expect
					switch e.Verdict {
					case "blocked":
						want = "blocked"
						var real []string
						for _, ip := range e.HostIPs {
							if a, err := netip.ParseAddr(ip); err == nil && !a.IsUnspecified() && !a.IsLoopback() && (typ == dns.TypeA && a.Is4() || typ == dns.TypeAAAA && a.Is6()) {
								real = append(real, a.String())
							}
						}
						if slices.Sort(real); len(real) > 0 {
							want = "NOERROR " + strings.Join(real, " ")
						}
					case "rewritten":
						want = e.Rewrite.RCode
						if want == "" {
							want = "NOERROR"
						}
						slices.Sort(e.Rewrite.Answers)
						if e.Rewrite.CNAME != "" {
							want += " to " + strings.TrimSuffix(strings.ToLower(e.Rewrite.CNAME), ".")
						} else if len(e.Rewrite.Answers) > 0 {
							want += " " + strings.Join(e.Rewrite.Answers, " ")
						}
					}
					if got := verdictOf(m, typ, passed4, passed6); got != want {
						if wrong++; wrong < 30 {
							t.Errorf("%s, %s: %s %s with %q: %s, want %s", r.ID, round, r.Name, r.QType, r.Lists, got, want)
						}
					}
				}
			}
			t.Logf("%d rows, %d lists, %d wrong", len(rows), len(numbers), wrong)
		})
	})
}

// verdictOf says what a response means where everything that passes has these addresses, or nothing.
func verdictOf(m *dns.Msg, typ uint16, passed ...string) string {
	if code := extended(m); code == 15 || code == 17 {
		return "blocked"
	}
	var data []string
	for _, rr := range m.Answer {
		if c, ok := rr.(*dns.CNAME); ok && typ != dns.TypeCNAME {
			return dns.RcodeToString[m.Rcode] + " to " + strings.TrimSuffix(strings.ToLower(c.Target), ".")
		}
		d := strings.TrimPrefix(rr.String(), rr.Header().String())
		if slices.Contains(passed, d) {
			return "passed"
		}
		data = append(data, d)
	}
	for _, rr := range m.Ns {
		if soa, ok := rr.(*dns.SOA); ok && soa.Ns == "a." {
			return "passed"
		}
	}
	slices.Sort(data)
	return strings.TrimSpace(dns.RcodeToString[m.Rcode] + " " + strings.Join(data, " "))
}
