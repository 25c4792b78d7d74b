package resolver_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/listen/listentest"
	"github.com/sluice-dns/sluice/usercache"
)

// A past is what something has been since which version of the settings.
type past[T any] struct{ steps []step[T] }

type step[T any] struct {
	since int64
	is    T
}

func (h *past[T]) at(v int64) (is T) {
	for i := len(h.steps) - 1; i >= 0; i-- {
		if h.steps[i].since <= v {
			return h.steps[i].is
		}
	}
	return is
}

func (h *past[T]) now() (is T) { return h.at(1 << 62) }

// Rules of a crowd: +name excepts, -name blocks.
type crowdRules map[string]bool // name -> excepted

func (r crowdRules) text() string {
	var lines []string
	for _, n := range slices.Sorted(maps.Keys(r)) {
		lines = append(lines, map[bool]string{true: "@@", false: ""}[r[n]]+"|"+n+".example^")
	}
	return strings.Join(lines, "\n")
}

// A crowdUser is a user as one version of the settings has it. Its block address and TTL are no other's, and no other
// version's.
type crowdUser struct {
	serial          int
	off             bool
	policy          string
	lists, services []string
	rules           crowdRules
	rewrites        []string
	devices         map[string]crowdRules // with the rules of each
}

// A throng is many users whose settings change all the time, and all that they ever were.
type throng struct {
	h *household
	r *rand.Rand

	// asked and applied: a query that begins when applied is a and ends when asked is b must be answered as some
	// version from a to b has it.
	asked, applied atomic.Int64

	mu       sync.RWMutex // guards the histories
	users    map[string]*past[*crowdUser]
	owners   map[string]*past[string]     // of devices: users
	claims   map[string]*past[string]     // of links, MAC addresses: devices
	lists    map[string]*past[crowdRules] // nil: not there
	services map[string]*past[crowdRules]
	policies map[string]*past[crowdRules]
	zone     past[bool]
	serial   int
}

const crowdZoned = "n9" // the name that a policy zone denies at times

var crowdNames = map[string][]string{ // names, and where aliases lead
	"n0": nil, "n1": nil, "n2": nil, "n3": nil, "n4": nil, "n5": nil, crowdZoned: nil,
	"c0": {"n0"}, "c1": {"c0", "n0"}, "c2": {"c1", "c0", "n0"}, "c3": {"n4"}, "c4": {"n5"},
}

var crowdSorted = slices.Sorted(maps.Keys(crowdNames))

func crowdAddr(name string) string { return "192.0.2." + name[1:] }

func (c *throng) randomRules(n int) crowdRules {
	rules := crowdRules{}
	for range c.r.IntN(n + 1) {
		rules[crowdSorted[c.r.IntN(len(crowdSorted))]] = c.r.IntN(3) == 0
	}
	return rules
}

func (c *throng) some(kind string, of, most int) (ids []string) {
	for range c.r.IntN(most + 1) {
		if id := fmt.Sprint(kind, c.r.IntN(of)); !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids
}

func (c *throng) randomUser(devices ...string) *crowdUser {
	c.serial++
	u := &crowdUser{serial: c.serial, off: c.r.IntN(10) == 0, lists: c.some("l", 8, 3), services: c.some("s", 4, 1), devices: map[string]crowdRules{}}
	if c.r.IntN(2) == 0 {
		u.policy = fmt.Sprint("p", c.r.IntN(4))
	}
	if c.r.IntN(2) == 0 {
		u.rules = c.randomRules(4)
	}
	if c.r.IntN(5) == 0 {
		u.rewrites = []string{crowdSorted[c.r.IntN(len(crowdSorted))]}
	}
	for _, d := range devices {
		u.devices[d] = nil
		if c.r.IntN(4) == 0 {
			u.devices[d] = c.randomRules(2)
		}
	}
	return u
}

// with is u with other devices, as a new version.
func (c *throng) with(u *crowdUser, edit func(devices map[string]crowdRules)) *crowdUser {
	v := *u
	c.serial++
	v.serial, v.devices = c.serial, maps.Clone(u.devices)
	edit(v.devices)
	return &v
}

func (u *crowdUser) blocked() string {
	return fmt.Sprintf("100.%d.%d.%d", u.serial>>16, u.serial>>8&255, u.serial&255)
}
func (u *crowdUser) rewritten() string {
	return fmt.Sprintf("101.%d.%d.%d", u.serial>>16, u.serial>>8&255, u.serial&255)
}

func crowdLink(device string) string {
	n := 0
	fmt.Sscanf(device, "d%d", &n)
	return fmt.Sprintf("10.%d.%d.%d", 1+n>>16, n>>8&255, n&255)
}

func crowdMAC(device string) string {
	n := 0
	fmt.Sscanf(device, "d%d", &n)
	return fmt.Sprintf("0200%08x", n)
}

func rulesOf(r crowdRules) *userv1.Rules {
	if len(r) == 0 {
		return nil
	}
	return &userv1.Rules{Body: &userv1.Rules_Text{Text: []byte(r.text())}}
}

// record is the user as stored; claims says which links and MAC addresses its devices have.
func (c *throng) record(u *crowdUser) *userv1.User {
	m := &userv1.User{Policy: u.policy, Rules: rulesOf(u.rules), Settings: &userv1.Settings{
		Enabled: proto.Bool(!u.off), Mode: userv1.BlockMode_BLOCK_MODE_CUSTOM_IP, BlockIpv4: proto.String(u.blocked()), BlockTtl: proto.Uint32(uint32(100 + u.serial%1000)),
		Lists: strs(u.lists...), Services: strs(u.services...)}}
	for _, n := range u.rewrites {
		m.Settings.Rewrites = &userv1.RewriteSet{Values: append(m.Settings.Rewrites.GetValues(), &userv1.Rewrite{Name: n + ".example", Records: []string{"A " + u.rewritten()}, Ttl: uint32(100 + u.serial%1000)})}
	}
	for _, d := range slices.Sorted(maps.Keys(u.devices)) {
		dev := &userv1.Device{Id: d, Rules: rulesOf(u.devices[d])}
		if proven(d) {
			sum := sha256.Sum256([]byte("token of " + d))
			dev.TokenSha256 = [][]byte{sum[:]}
		}
		for claim, h := range c.claims {
			if h.now() == d {
				if mac, ok := strings.CutPrefix(claim, "mac "); ok {
					dev.EdnsIds = append(dev.EdnsIds, mac)
				} else {
					dev.Links = append(dev.Links, claim)
				}
			}
		}
		m.Devices = append(m.Devices, dev)
	}
	return m
}

// proven says of a device whether it has a token to show over DoH.
func proven(device string) bool { return strings.HasSuffix(device, "7") }

// A change is what is to be known of the next version: users, devices, claims.
type change struct {
	users  map[string]*crowdUser // nil: gone
	claims map[string]string     // link or MAC address -> device
}

// apply makes a change of users one version.
func (c *throng) apply(ch change) {
	v := c.asked.Load() + 1
	records := map[string]proto.Message{}
	c.mu.Lock()
	for claim, d := range ch.claims {
		h := c.claims[claim]
		h.steps = append(h.steps, step[string]{v, d})
	}
	for id, u := range ch.users { // what is taken, before what is given
		for d := range c.users[id].devicesNow() {
			if u == nil || !u.has(d) {
				c.owners[d].steps = append(c.owners[d].steps, step[string]{v, ""})
			}
		}
	}
	for id, u := range ch.users {
		if c.users[id] == nil {
			c.users[id] = new(past[*crowdUser])
		}
		c.users[id].steps = append(c.users[id].steps, step[*crowdUser]{v, u})
		records[id] = nil
		if u == nil {
			continue
		}
		for d := range u.devices {
			if c.owners[d] == nil {
				c.owners[d] = new(past[string])
			}
			c.owners[d].steps = append(c.owners[d].steps, step[string]{v, id})
		}
	}
	for id, u := range ch.users {
		if u != nil {
			records[id] = c.record(u)
		}
	}
	c.mu.Unlock()
	c.asked.Store(v)
	c.put(usercache.Users, records)
	c.applied.Store(v)
}

func (u *crowdUser) has(d string) bool { _, ok := u.devices[d]; return ok }

func (h *past[T]) devicesNow() map[string]crowdRules {
	if h != nil {
		if u, ok := any(h.now()).(*crowdUser); ok && u != nil {
			return u.devices
		}
	}
	return nil
}

// put is household.put that also removes, for nil.
func (c *throng) put(k usercache.Kind, records map[string]proto.Message) {
	from := c.h.rev[k]
	c.h.rev[k]++
	d := usercache.Delta{From: from, To: from + 1}
	for key, m := range records {
		ch := usercache.Change{Key: []byte(key), Revision: from + 1, Removed: m == nil}
		if m != nil {
			var err error
			if ch.Bytes, err = proto.Marshal(m); err != nil {
				c.h.t.Error(err)
				return
			}
		}
		d.Changes = append(d.Changes, ch)
	}
	if _, err := c.h.users.Dataset(k).ApplyDelta(c.h.t.Context(), usercache.Identity{Dataset: [16]byte{1}, Lineage: [16]byte{1}}, d, clock.Wall()); err != nil {
		c.h.t.Error(err)
	}
}

// catalogue makes a change of the catalogue one version, once it is served. Numbers are given again at once.
func (c *throng) catalogue(kind, id string, is crowdRules) {
	v := c.asked.Load() + 1
	all := map[string]map[string]*past[crowdRules]{"list": c.lists, "service": c.services, "policy": c.policies}[kind]
	c.mu.Lock()
	h := all[id]
	if h == nil {
		h = new(past[crowdRules])
		all[id] = h
	}
	h.steps = append(h.steps, step[crowdRules]{v, is})
	c.mu.Unlock()
	var m proto.Message
	arrive := func() {}
	switch {
	case is == nil:
	case kind == "list":
		l, text := list(c.number(id), is.text())
		arrive = func() { // after the record, as sync has it
			time.Sleep(time.Duration(c.r.IntN(8)) * time.Millisecond)
			c.h.blobsMu.Lock()
			c.h.blobs[[32]byte(l.Sha256)] = text
			c.h.blobsMu.Unlock()
			c.h.r.BlobArrived()
		}
		m = l
	case kind == "service":
		m = &userv1.Service{Number: c.number(id), Rules: strings.Split(is.text(), "\n")}
	case kind == "policy":
		m = &userv1.Policy{Rules: rulesOf(is)}
	}
	c.asked.Store(v)
	c.put(usercache.CatalogueKind, map[string]proto.Message{kind + "/" + id: m})
	arrive()
	for !c.h.r.ListsPresent() {
		time.Sleep(time.Millisecond)
	}
	c.applied.Store(v)
}

// number is shared by two lists or services each, of which one is there at a time.
func (c *throng) number(id string) (n uint32) {
	fmt.Sscanf(id[1:], "%d", &n)
	return n / 2
}

// turn takes one of two away and puts the other in its place, in versions of their own.
func (c *throng) turn(kind, letter string, pairs int) {
	pair := c.r.IntN(pairs)
	all := map[string]map[string]*past[crowdRules]{"list": c.lists, "service": c.services}[kind]
	for i := range 2 {
		id := fmt.Sprint(letter, 2*pair+i)
		if h := all[id]; h != nil && h.now() != nil {
			c.catalogue(kind, id, nil)
			if c.r.IntN(4) > 0 {
				c.catalogue(kind, fmt.Sprint(letter, 2*pair+1-i), c.moreRules())
			}
			return
		}
	}
	c.catalogue(kind, fmt.Sprint(letter, 2*pair+c.r.IntN(2)), c.moreRules())
}

func (c *throng) moreRules() crowdRules {
	rules := c.randomRules(3)
	rules[crowdSorted[c.r.IntN(len(crowdSorted))]] = c.r.IntN(4) == 0
	return rules
}

// change does something at random.
func (c *throng) change(ids []string) {
	pick := func(alive bool) (string, *crowdUser) {
		for {
			id := ids[c.r.IntN(len(ids))]
			if u := c.users[id].now(); (u != nil) == alive {
				return id, u
			}
		}
	}
	id, u := pick(true)
	devices := slices.Sorted(maps.Keys(u.devices))
	switch c.r.IntN(12) {
	case 0, 1, 2: // other settings
		c.apply(change{users: map[string]*crowdUser{id: c.randomUser(devices...)}})
	case 3, 4: // a device goes over, with its address or without
		other, o := pick(true)
		if len(devices) == 0 || other == id {
			return
		}
		d := devices[c.r.IntN(len(devices))]
		c.apply(change{users: map[string]*crowdUser{
			id:    c.with(u, func(ds map[string]crowdRules) { delete(ds, d) }),
			other: c.with(o, func(ds map[string]crowdRules) { ds[d] = c.randomRules(2) })}})
	case 5, 6: // an address, or the MAC address, is passed on
		other, o := pick(true)
		if len(devices) == 0 || len(o.devices) == 0 || other == id {
			return
		}
		d, e := devices[c.r.IntN(len(devices))], slices.Sorted(maps.Keys(o.devices))[0]
		claim := crowdLink(d)
		if c.r.IntN(2) == 0 {
			claim = "mac " + crowdMAC(d)
		}
		if h := c.claims[claim]; h.now() != d {
			return
		}
		c.apply(change{claims: map[string]string{claim: e}, users: map[string]*crowdUser{
			id: c.with(u, func(map[string]crowdRules) {}), other: c.with(o, func(map[string]crowdRules) {})}})
	case 7: // deleted, and made again
		c.apply(change{users: map[string]*crowdUser{id: nil}})
		c.apply(change{users: map[string]*crowdUser{id: c.randomUser(devices...)}})
	case 8:
		c.turn("list", "l", 4)
	case 9:
		c.turn("service", "s", 2)
	case 10:
		c.catalogue("policy", fmt.Sprint("p", c.r.IntN(4)), c.randomRules(3))
	case 11:
		v := c.asked.Load() + 1
		on := !c.zone.now()
		c.mu.Lock()
		c.zone.steps = append(c.zone.steps, step[bool]{v, on})
		c.mu.Unlock()
		c.asked.Store(v)
		var zones []resolver.PolicyZone
		if on {
			zones = append(zones, policyZone(c.h.t, "zone.", "$TTL 60\n@ SOA ns. host. 1 2 3 4 30\n"+crowdZoned+".example CNAME .\n"))
		}
		if err := c.h.r.SetPolicyZones(zones); err != nil {
			c.h.t.Error(err)
		}
		c.applied.Store(v)
	}
}

// right is what a client is to be told of a name by one version; c.mu is held.
func (c *throng) right(v int64, device, claim, name string) string {
	if claim != "" {
		h := c.claims[claim]
		if h == nil {
			return "REFUSED"
		}
		device = h.at(v)
	}
	h := c.owners[device]
	if h == nil || h.at(v) == "" {
		return "REFUSED"
	}
	u := c.users[h.at(v)].at(v)
	if name == crowdZoned && c.zone.at(v) {
		return "NXDOMAIN"
	}
	passed := append(slices.Clone(crowdNames[name]), crowdAddr(name))
	if n := len(passed); n > 1 {
		passed[n-1] = crowdAddr(passed[n-2])
	}
	pass := strings.Join(passed, " ")
	if u.off {
		return pass
	}
	blocked := fmt.Sprint(u.blocked(), " ", 100+u.serial%1000)
	own := func(name string) (said, excepted bool) {
		texts := []crowdRules{u.devices[device], u.rules}
		if u.policy != "" {
			texts = append(texts, c.policies[u.policy].at(v))
		}
		for _, r := range texts {
			if excepted, said = r[name]; said {
				return true, excepted
			}
		}
		return false, false
	}
	listed := func(name string) (blocked, excepted bool) {
		for _, s := range u.services {
			if h := c.services[s]; h != nil {
				if ok, said := h.at(v)[name]; said && !ok {
					return true, false
				}
			}
		}
		for _, l := range u.lists {
			if h := c.lists[l]; h != nil {
				ok, said := h.at(v)[name]
				blocked, excepted = blocked || said && !ok, excepted || ok
			}
		}
		return blocked && !excepted, excepted
	}
	if said, ok := own(name); said {
		if ok {
			return pass
		}
		return blocked
	}
	if slices.Contains(u.rewrites, name) {
		return fmt.Sprint(u.rewritten(), " ", 100+u.serial%1000)
	}
	if no, ok := listed(name); no {
		return blocked
	} else if ok {
		return pass
	}
	for _, target := range crowdNames[name] {
		if said, ok := own(target); said {
			if !ok {
				return blocked
			}
			continue
		}
		if no, _ := listed(target); no {
			return blocked
		}
	}
	return pass
}

// toldOf is a response in the words of right.
func toldOf(m *dns.Msg) string {
	if m.Rcode != dns.RcodeSuccess {
		return dns.RcodeToString[m.Rcode]
	}
	var words []string
	for _, rr := range m.Answer {
		switch rr := rr.(type) {
		case *dns.CNAME:
			words = append(words, strings.TrimSuffix(rr.Target, ".example."))
		case *dns.A:
			words = append(words, rr.A.String())
			if rr.A[0] == 100 || rr.A[0] == 101 {
				words = append(words, fmt.Sprint(rr.Hdr.Ttl))
			}
		}
	}
	return strings.Join(words, " ")
}

// While the settings of a crowd change all the time, each query is answered as one version of them has it, and as one
// that held while it was under way.
func TestVerdictsWhileSettingsChange(t *testing.T) {
	users, changes, clients := 60, 30, 8
	seeds := []uint64{1, 2}
	if *long {
		users, changes, clients, seeds = 2000, 1500, 16, []uint64{3, 4, 5}
	}
	if *monkeySeed > 0 {
		seeds = []uint64{*monkeySeed}
	}
	for _, seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { crowded(t, seed, users, changes, clients) })
		})
	}
}

func crowded(t *testing.T, seed uint64, users, changes, clients int) {
	upstream := ""
	for _, n := range crowdSorted {
		if to := crowdNames[n]; len(to) > 0 {
			upstream += n + " 2 CNAME " + to[0] + "\n"
		} else {
			upstream += n + " 2 A " + crowdAddr(n) + "\n"
		}
	}
	sim := newInternet(t, zones{zoneAt("example.", labServer, upstream)})
	c := &throng{r: rand.New(rand.NewPCG(seed, 1)), users: map[string]*past[*crowdUser]{}, owners: map[string]*past[string]{}, claims: map[string]*past[string]{},
		lists: map[string]*past[crowdRules]{}, services: map[string]*past[crowdRules]{}, policies: map[string]*past[crowdRules]{}}
	var clientTLS *tls.Config
	doh, dot, proxied := netip.MustParseAddrPort("127.0.0.1:443"), netip.MustParseAddrPort("127.0.0.1:853"), netip.MustParseAddr("127.0.0.98")
	relay := netip.MustParseAddr("127.0.0.99")
	withHousehold(t, sim, nil, nil, nil, func(o *resolver.Options) {
		o.Identify = resolver.IdentifyOptions{Stranger: "refuse", ServerNames: []string{"dns.example"}, Relays: []netip.Prefix{netip.PrefixFrom(relay, 32)}}
		o.Listeners.GetCertificate, clientTLS = listentest.Certificate()
		o.Listeners.ProxyFrom = []netip.Prefix{netip.PrefixFrom(proxied, 32)}
		o.Cache = resolver.CacheOptions{MaxTTL: time.Hour}
		if seed%2 == 0 { // as good as none
			o.Cache.MaxTTL = time.Second
		}
	}, func(h *household) {
		c.h = h
		h.net.Link = func(from, to netip.AddrPort) (time.Duration, bool) { return time.Millisecond, false }
		var ids, devices []string
		for i := range users {
			id := fmt.Sprint("u", i)
			ids = append(ids, id)
			var own []string
			for j := range 1 + c.r.IntN(2) {
				d := fmt.Sprintf("d%d", 10*i+j+c.r.IntN(2)*7)
				own = append(own, d)
				if c.claims[crowdLink(d)] == nil {
					devices = append(devices, d)
					c.claims[crowdLink(d)] = &past[string]{[]step[string]{{0, d}}}
					c.claims["mac "+crowdMAC(d)] = &past[string]{[]step[string]{{0, d}}}
				}
			}
			c.users[id] = &past[*crowdUser]{}
			if c.policies["p0"] == nil {
				for p := range 4 {
					c.catalogue("policy", fmt.Sprint("p", p), c.randomRules(3))
				}
			}
			c.apply(change{users: map[string]*crowdUser{id: c.randomUser(own...)}})
		}
		for range 10 {
			c.turn("list", "l", 4)
			c.turn("service", "s", 2)
		}
		ctx, stop := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for n := 1; n < 3; n++ {
			every := []time.Duration{0, 13 * time.Millisecond, 29 * time.Millisecond}[n]
			all.Go(func() {
				root := names("example.")[0]
				for ctx.Err() == nil {
					time.Sleep(every)
					if n == 1 {
						h.r.Purge(root)
					} else {
						h.r.Distrust()
					}
				}
			})
		}
		var asked atomic.Int64
		kinds := make([]atomic.Int64, 7)
		for i := range clients {
			all.Go(func() {
				r := rand.New(rand.NewPCG(seed, uint64(100+i)))
				k := newCrowdClient(t, h, clientTLS, dot, doh, proxied)
				defer k.close()
				for ctx.Err() == nil {
					d, name := devices[r.IntN(len(devices))], crowdSorted[r.IntN(len(crowdSorted))]
					claim := ""
					way := r.IntN(7)
					if way >= 4 && way < 7 && proven(d) && way != 5 {
						way = 0
					}
					link := netip.MustParseAddr(crowdLink(d))
					m := new(dns.Msg).SetQuestion(name+".example.", dns.TypeA)
					var got *dns.Msg
					var err error
					before := c.applied.Load()
					switch way {
					case 0:
						claim = link.String()
						got, err = k.udp(link, nil, m)
					case 1:
						claim = link.String()
						got, err = k.udp(proxied, listentest.ProxyHeader(netip.AddrPortFrom(link, 4000).String(), "127.0.0.1:53"), m)
					case 2:
						claim = "mac " + crowdMAC(d)
						m.SetEdns0(1232, false)
						mac := make([]byte, 6)
						fmt.Sscanf(crowdMAC(d), "%x", &mac)
						m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_LOCAL{Code: 65001, Data: mac}}
						got, err = k.udp(relay, nil, m)
					case 3:
						got, err = k.tls(d, m)
					case 4, 5:
						got, err = k.https(k.direct, d, m)
					case 6:
						got, err = k.https(k.behind, d, m)
					}
					after := c.asked.Load()
					if err != nil {
						t.Errorf("%s asks %s, way %d: %v", d, name, way, err)
						return
					}
					is := toldOf(got)
					ok := false
					var right []string
					c.mu.RLock()
					for v := before; v <= after && !ok; v++ {
						s := c.right(v, d, claim, name)
						if ok = s == is; !slices.Contains(right, s) {
							right = append(right, s)
						}
					}
					c.mu.RUnlock()
					if !ok {
						t.Errorf("%s asks %s, way %d, versions %d to %d: %q, want one of %q\n%v", d, name, way, before, after, is, right, got)
					}
					asked.Add(1)
					kinds[way].Add(1)
					if r.IntN(3) == 0 {
						time.Sleep(time.Duration(r.IntN(5)) * time.Millisecond)
					}
				}
			})
		}
		for range changes {
			time.Sleep(10 * time.Millisecond)
			for range 1 + c.r.IntN(3) {
				c.change(ids)
			}
			if t.Failed() {
				break
			}
		}
		stop()
		all.Wait()
		var ways []int64
		for i := range kinds {
			ways = append(ways, kinds[i].Load())
		}
		t.Logf("%d versions, %d queries, by way %v", c.applied.Load(), asked.Load(), ways)
	})
}

// A crowdClient asks in all ways.
type crowdClient struct {
	t              *testing.T
	h              *household
	config         *tls.Config
	dot            netip.AddrPort
	direct, behind *http.Client
	n              atomic.Uint32
}

func newCrowdClient(t *testing.T, h *household, config *tls.Config, dot, doh netip.AddrPort, proxied netip.Addr) *crowdClient {
	k := &crowdClient{t: t, h: h, config: config, dot: dot}
	over := func(from netip.Addr, header []byte) *http.Client {
		return &http.Client{Timeout: 15 * time.Second, Transport: &http.Transport{TLSClientConfig: config.Clone(), ForceAttemptHTTP2: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				conn, err := h.net.DialTCP(ctx, netip.AddrPortFrom(from, 0), doh)
				if err == nil && header != nil {
					_, err = conn.Write(header)
				}
				return conn, err
			}}}
	}
	k.direct = over(netip.MustParseAddr("127.0.0.1"), nil)
	k.behind = over(proxied, listentest.ProxyHeader("203.0.113.9:4000", "127.0.0.1:443"))
	return k
}

func (k *crowdClient) close() {
	k.direct.CloseIdleConnections()
	k.behind.CloseIdleConnections()
}

func (k *crowdClient) udp(from netip.Addr, header []byte, m *dns.Msg) (*dns.Msg, error) {
	conn, err := k.h.net.DialUDP(netip.AddrPortFrom(from, 0), netip.AddrPortFrom(k.h.addr.Addr(), 53+uint16(k.n.Add(1)%3)))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	wire, err := m.Pack()
	if err != nil {
		return nil, err
	}
	if _, err := conn.Write(append(bytes.Clone(header), wire...)); err != nil {
		return nil, err
	}
	return (&dns.Conn{Conn: conn}).ReadMsg()
}

func (k *crowdClient) tls(device string, m *dns.Msg) (*dns.Msg, error) {
	conn, err := k.h.net.DialTCP(k.t.Context(), netip.AddrPort{}, k.dot)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	config := k.config.Clone()
	config.ServerName = device + ".dns.example"
	dc := &dns.Conn{Conn: tls.Client(conn, config)}
	if err := dc.WriteMsg(m); err != nil {
		return nil, err
	}
	return dc.ReadMsg()
}

func (k *crowdClient) https(c *http.Client, device string, m *dns.Msg) (*dns.Msg, error) {
	wire, err := m.Pack()
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequest("POST", "https://dns.example/dns-query/"+device, bytes.NewReader(wire))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/dns-message")
	if proven(device) {
		req.Header.Set("Authorization", "Bearer token of "+device)
	}
	resp, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 {
		return nil, fmt.Errorf("status %d, %v", resp.StatusCode, err)
	}
	r := new(dns.Msg)
	return r, r.Unpack(b)
}
