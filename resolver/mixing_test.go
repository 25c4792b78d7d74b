package resolver_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// A plainRule is a rule in the simplest form that can be judged; on is a name without its zone, or an address.
type plainRule struct {
	on                      string
	allow, important, exact bool
	typ                     string // of $dnstype, "" for all
	rewrite                 string // of $dnsrewrite, an IPv4 address
}

func (r plainRule) text() string {
	on := r.on
	if !isAddress(on) {
		on += ".example"
	}
	s := "||" + on + "^"
	if r.exact {
		s = "|" + on + "|"
	}
	var mods []string
	if r.important {
		mods = append(mods, "important")
	}
	if r.typ != "" {
		mods = append(mods, "dnstype="+r.typ)
	}
	if r.rewrite != "" {
		mods = append(mods, "dnsrewrite="+r.rewrite)
	}
	if r.allow {
		s = "@@" + s
	}
	if len(mods) > 0 {
		s += "$" + strings.Join(mods, ",")
	}
	return s
}

func isAddress(s string) bool { return strings.HasPrefix(s, "192.") || strings.HasPrefix(s, "2001:") }

func texts(rs []plainRule) string {
	lines := []string{"! rules"}
	for _, r := range rs {
		lines = append(lines, r.text())
	}
	return strings.Join(lines, "\n")
}

// standing is what rules say of a name or address that is met as a type: 4 an important exception, 3 an important
// block, 2 an exception, 1 a block, 0 nothing. The address is that of a rewrite, "" without.
func standing(rs []plainRule, on, typ string) (n int, rewrite string) {
	for _, r := range rs {
		if on != r.on && (r.exact || isAddress(on) || !strings.HasSuffix(on, "."+r.on)) || r.typ != "" && r.typ != typ {
			continue
		}
		if r.rewrite != "" {
			rewrite = r.rewrite
			continue
		}
		m := 1
		if r.allow {
			m = 2
		}
		if r.important {
			m += 2
		}
		n = max(n, m)
	}
	return n, rewrite
}

// A plainUser is whose queries are judged by trying every rule of his, by an evaluator that shares nothing with the
// one it checks.
type plainUser struct {
	source              string
	off                 bool
	mode                userv1.BlockMode
	own, lists, threats []plainRule
}

// A fact is what an answer leads to, and as which type rules meet it.
type fact struct{ on, typ string }

// judge says in the words of briefly how a question is answered that everybody else is answered with plain, which
// leads to facts.
func (u *plainUser) judge(name, typ, plain string, facts []fact) string {
	if u.off {
		return plain
	}
	blocks := func(n int) bool { return n == 1 || n == 3 }
	n, rewrite := standing(u.own, name, typ)
	switch {
	case rewrite != "" && typ == "A":
		return "NOERROR, A " + rewrite
	case rewrite != "":
		return "NOERROR, SOA 10"
	case blocks(n):
		return u.blocked(typ)
	case n > 0:
		return plain
	}
	l, _ := standing(u.lists, name, typ)
	t, _ := standing(u.threats, name, typ)
	if blocks(l) || blocks(t) {
		return u.blocked(typ)
	}
	for _, f := range facts {
		n, _ := standing(u.own, f.on, f.typ)
		m, _ := standing(u.lists, f.on, f.typ)
		t, _ := standing(u.threats, f.on, f.typ)
		if l > 0 { // a list's exception of the name asked lifts what lists and rules say, and not threats
			n, m = 0, 0
		}
		if blocks(n) || n == 0 && (blocks(m) || blocks(t)) {
			return u.blocked(typ)
		}
	}
	return plain
}

func (u *plainUser) blocked(typ string) string {
	switch {
	case u.mode == userv1.BlockMode_BLOCK_MODE_NXDOMAIN:
		return "NXDOMAIN, SOA 10, blocked"
	case u.mode == userv1.BlockMode_BLOCK_MODE_REFUSED:
		return "REFUSED, blocked"
	case u.mode == userv1.BlockMode_BLOCK_MODE_NULL_IP && typ == "A":
		return "NOERROR, A 0.0.0.0, blocked"
	case u.mode == userv1.BlockMode_BLOCK_MODE_NULL_IP && typ == "AAAA":
		return "NOERROR, AAAA ::, blocked"
	}
	return "NOERROR, SOA 10, blocked"
}

// Many users with random rules, lists and modes ask one resolver for the same few names, several at once. What each
// is answered is what he would be answered if he were alone, whether answers come from the cache or are resolved each
// time.
func TestUsersNeverMix(t *testing.T) {
	names := []string{"n0", "n1", "n2", "x.n0", "x.n1", "c0", "c1", "c2", "c3", "h0", "h1", "h2", "m0"}
	types := []string{"A", "AAAA", "HTTPS", "MX", "TXT"}
	addresses := []string{"192.0.2.100", "192.0.2.101", "192.0.2.103", "2001:db8::100", "2001:db8::102", "2001:db8::104"}
	zone := map[string][]string{
		"c0": {"CNAME n0"}, "c1": {"CNAME c0"}, "c2": {"CNAME x.n1"}, "c3": {"CNAME c2"},
		"h0": {"HTTPS 1 . alpn=h3 ipv4hint=192.0.2.101 ipv6hint=2001:db8::102"}, "h1": {"HTTPS 0 n2"}, "h2": {"HTTPS 1 c3"},
		"m0": {"MX 10 n1", "A 192.0.2.103"},
	}
	for i, n := range names[:5] {
		zone[n] = []string{fmt.Sprintf("A 192.0.2.%d", 100+i), fmt.Sprintf("AAAA 2001:db8::%d", 100+i)}
	}
	facts := func(name, typ string) (fs []fact) {
		for {
			next := ""
			for _, rr := range zone[name] {
				f := strings.Fields(rr)
				switch {
				case f[0] == "CNAME":
					next = f[1]
					fs = append(fs, fact{next, "CNAME"})
				case f[0] != typ:
				case typ == "HTTPS" && f[2] == ".":
					fs = append(fs, fact{"192.0.2.101", typ}, fact{"2001:db8::102", typ})
				default:
					fs = append(fs, fact{f[len(f)-1], typ})
				}
			}
			if name = next; name == "" {
				return fs
			}
		}
	}
	for _, ttl := range []int{300, 0} { // kept, and resolved for each query
		var text strings.Builder
		for _, n := range names {
			for _, rr := range zone[n] {
				fmt.Fprintf(&text, "%s %d %s\n", n, ttl, rr)
			}
		}
		rng := rand.New(rand.NewPCG(7, uint64(ttl)))
		chance := func(n int) bool { return rng.IntN(n) == 0 }
		some := func(most int, own bool) (rs []plainRule) {
			for range rng.IntN(most + 1) {
				r := plainRule{allow: chance(3), important: chance(5), exact: chance(3)}
				if chance(4) {
					r.on, r.exact, r.allow = addresses[rng.IntN(len(addresses))], false, chance(5)
				} else {
					r.on = names[rng.IntN(len(names))]
					if chance(3) {
						r.typ = []string{"A", "AAAA", "HTTPS", "MX", "CNAME", "CNAME", "CNAME"}[rng.IntN(7)]
					} else if own && chance(4) {
						r = plainRule{on: r.on, exact: true, rewrite: fmt.Sprintf("198.51.100.%d", 1+rng.IntN(200))}
						if slices.ContainsFunc(rs, func(o plainRule) bool { return o.rewrite != "" && o.on == r.on }) {
							continue // both would be answered
						}
					}
				}
				rs = append(rs, r)
			}
			return rs
		}
		catalogue := map[string]proto.Message{"category/threats": &userv1.Category{Lists: []string{"l4", "l5"}, Threat: true, SafeBrowsing: true}}
		var blobs [][]byte
		var lists [6][]plainRule
		for i := range lists {
			lists[i] = some(5, false)
			l, b := list(uint32(i), fmt.Sprintf("! %d\n%s", i, texts(lists[i])))
			catalogue[fmt.Sprintf("list/l%d", i)], blobs = l, append(blobs, b)
		}
		users := map[string]proto.Message{}
		people := []*plainUser{{off: true}} // the first is filtered by nothing
		for i := range 40 {
			if i > 0 {
				people = append(people, &plainUser{off: chance(20), own: some(4, true)})
			}
			u := people[i]
			u.source, u.mode = fmt.Sprintf("10.0.2.%d", i+1), userv1.BlockMode(1+rng.IntN(4))
			s := &userv1.Settings{Mode: u.mode, Enabled: proto.Bool(!u.off), Lists: strs()}
			for k := range 4 {
				if chance(2) {
					s.Lists.Values, u.lists = append(s.Lists.Values, fmt.Sprintf("l%d", k)), append(u.lists, lists[k]...)
				}
			}
			if chance(2) {
				s.SafeBrowsing, u.threats = proto.Bool(true), append(append([]plainRule(nil), lists[4]...), lists[5]...)
			}
			id := fmt.Sprintf("u%d", i)
			users[id] = &userv1.User{Settings: s, Rules: &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte(texts(u.own))}},
				Devices: []*userv1.Device{{Id: id, Links: []string{u.source}}}}
		}
		type asked struct{ name, typ string }
		synctest.Test(t, func(t *testing.T) {
			sim := newInternet(t, zones{zoneAt("example.", labServer, text.String())})
			withHousehold(t, sim, catalogue, users, blobs, nil, func(h *household) {
				ask := func(u *plainUser, q asked) string {
					m, err := h.from(u.source, q.name+".example.", dns.StringToType[q.typ])
					if s := briefly(m, err); err == nil && (extended(m) == 15 || extended(m) == 17) {
						return s[:strings.LastIndex(s, "EDE")] + "blocked"
					} else {
						return s
					}
				}
				plain := map[asked]string{}
				for _, n := range names {
					for _, typ := range types {
						q := asked{n, typ}
						if plain[q] = ask(people[0], q); !strings.HasPrefix(plain[q], "NOERROR") {
							t.Fatalf("TTL %d: unfiltered, %v is %s", ttl, q, plain[q])
						}
					}
				}
				sim.ResetLog()
				var wg sync.WaitGroup
				for seed := range uint64(4) {
					wg.Go(func() {
						rng := rand.New(rand.NewPCG(seed, 3))
						for range 500 {
							i, q := rng.IntN(len(people)), asked{names[rng.IntN(len(names))], types[rng.IntN(len(types))]}
							want := people[i].judge(q.name, q.typ, plain[q], facts(q.name, q.typ))
							if got := ask(people[i], q); got != want {
								t.Errorf("TTL %d: user %d asks for %s %s: %s, want %s\nown %q\nlists %q\nthreats %q", ttl, i, q.name, q.typ, got, want,
									texts(people[i].own), texts(people[i].lists), texts(people[i].threats))
								return
							}
						}
					})
				}
				wg.Wait()
				n := sim.Count(func(siminternet.LogEntry) bool { return true })
				if cached := n == 0; cached != (ttl > 0) {
					t.Errorf("TTL %d: %d questions went upstream", ttl, n)
				}
			})
		})
	}
}
