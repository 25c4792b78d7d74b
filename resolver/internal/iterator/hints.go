package iterator

import (
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
)

// A Hint is a server of the root.
type Hint struct {
	Name  dnsname.Name
	Addrs []netip.Addr
}

// maxHints bounds the servers of the root, and the addresses of each: there are 13 with two each, and all are asked
// for by one question.
const maxHints = 64

// ParseHints reads root hints in zone-file syntax: NS records of the root, and addresses of their targets.
// file names the text in errors.
func ParseHints(text, file string) ([]Hint, error) {
	records, err := dnswire.ParseRecords(text, ".", file, 3600000)
	if err != nil {
		return nil, err
	}
	var hints []Hint
	byName := make(map[dnsname.Name]int)
	for _, rr := range records {
		if rr.Class != dnswire.ClassIN {
			return nil, fmt.Errorf("%s: %v: a record of class %d; hints are of class IN", file, rr.Name, rr.Class)
		}
		if rr.Type != dnswire.TypeNS || rr.Name != dnsname.Root {
			continue
		}
		name := nameIn(dnswire.TypeNS, rr.Data)
		if _, twice := byName[name]; !twice {
			byName[name] = len(hints)
			hints = append(hints, Hint{Name: name})
		}
	}
	if len(hints) > maxHints {
		return nil, fmt.Errorf("%s: %d root servers; at most %d are used", file, len(hints), maxHints)
	}
	addrs := 0
	for _, rr := range records {
		i, ok := byName[rr.Name]
		if !ok || rr.Type != dnswire.TypeA && rr.Type != dnswire.TypeAAAA {
			continue
		}
		a, _ := netip.AddrFromSlice(rr.Data)
		switch a = a.Unmap(); {
		case a.IsUnspecified() || a.IsMulticast() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
			return nil, fmt.Errorf("%s: %v has the address %v, at which nobody can be asked", file, rr.Name, a)
		case len(hints[i].Addrs) == maxHints:
			return nil, fmt.Errorf("%s: %v has more than %d addresses", file, rr.Name, maxHints)
		}
		hints[i].Addrs = append(hints[i].Addrs, a)
		addrs++
	}
	if addrs == 0 {
		return nil, fmt.Errorf("%s: no root server with an address; it needs NS records of \".\" and A or AAAA records of their targets", file)
	}
	return hints, nil
}

// DefaultHints returns the servers of the root as of 2024 (root-servers.org).
func DefaultHints() []Hint {
	var hints []Hint
	for _, line := range strings.Split(strings.TrimSpace(rootServers), "\n") {
		f := strings.Fields(line)
		hints = append(hints, Hint{
			Name:  dnsname.MustParse(f[0] + ".root-servers.net."),
			Addrs: []netip.Addr{netip.MustParseAddr(f[1]), netip.MustParseAddr(f[2])},
		})
	}
	return hints
}

const rootServers = `
a 198.41.0.4     2001:503:ba3e::2:30
b 170.247.170.2  2801:1b8:10::b
c 192.33.4.12    2001:500:2::c
d 199.7.91.13    2001:500:2d::d
e 192.203.230.10 2001:500:a8::e
f 192.5.5.241    2001:500:2f::f
g 192.112.36.4   2001:500:12::d0d
h 198.97.190.53  2001:500:1::53
i 192.36.148.17  2001:7fe::53
j 192.58.128.30  2001:503:c27::2:30
k 193.0.14.129   2001:7fd::1
l 199.7.83.42    2001:500:9f::42
m 202.12.27.33   2001:dc3::35
`

type hintSet struct {
	hints  []Hint
	byName map[dnsname.Name][]netip.Addr
	all    []netip.Addr
}

func newHintSet(hints []Hint) hintSet {
	s := hintSet{hints: hints, byName: make(map[dnsname.Name][]netip.Addr)}
	for _, h := range hints {
		s.byName[h.Name] = append(s.byName[h.Name], h.Addrs...)
		s.all = append(s.all, h.Addrs...)
	}
	return s
}

// primeRest is how long after a failed priming the hints are used as they are.
const primeRest = 60 * time.Second

// prime asks the hinted servers who serves the root, if the cache has not got it and nobody else is asking
// (RFC 8109). Whether it succeeds or not, there are servers to use afterwards.
func (r *run) prime() {
	if _, ok := r.get(dnsname.Root, dnswire.TypeNS); ok {
		return
	}
	if r.it.opts.PrimeOnce && r.it.primed.Load() {
		return
	}
	now := r.now
	if now.Before(clock.Instant(r.it.primeAfter.Load())) || !r.it.priming.CompareAndSwap(false, true) {
		return
	}
	defer r.it.priming.Store(false)
	z := &cut{name: dnsname.Root, granted: clock.Never}
	for _, a := range r.it.hints.all {
		r.addServer(z, netip.AddrPortFrom(a, r.it.opts.Port))
	}
	res, err := r.ask(z, dnsname.Root, dnswire.TypeNS, true)
	if err != nil || res.kind != kindAnswer {
		r.it.primeAfter.Store(int64(now.Add(primeRest)))
		return
	}
	r.it.primed.Store(true)
	r.keepPrimed(&res, r.now)
}

// DefaultDoNotQuery returns networks in which no public name server is: addresses of this host, of nobody and
// of everybody.
func DefaultDoNotQuery() []netip.Prefix {
	var out []netip.Prefix
	for _, s := range []string{
		"0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/3", // multicast, reserved and broadcast
		"::/128", "::1/128", "::ffff:0:0/96", "ff00::/8",
	} {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// uses reports whether an address that the network told us may be asked. Unspecified ones are nobody's, whatever
// was configured (CVE-2026-50251).
func (it *Iterator) uses(a netip.Addr) bool {
	if a.IsUnspecified() || !it.enabled(familyOf(a)) {
		return false
	}
	for _, p := range it.opts.DoNotQuery {
		if p.Contains(a) {
			return false
		}
	}
	return true
}

// Families of addresses, as indices.
const (
	ipv4 = 0
	ipv6 = 1
)

var familyTypes = [2]uint16{ipv4: dnswire.TypeA, ipv6: dnswire.TypeAAAA}

func familyOf(a netip.Addr) int {
	if a.Is4() {
		return ipv4
	}
	return ipv6
}

func (it *Iterator) enabled(fam int) bool {
	return fam == ipv4 && !it.opts.NoIPv4 || fam == ipv6 && !it.opts.NoIPv6
}

// A family notices that no server of an address family can be reached, as on a host without IPv6, so that not
// every question has to find out. A family is in doubt when it has failed a few times in a row and the other is
// better off: ten dead servers are no proof that the whole of IPv4 is gone. IPv6 begins in doubt.
//
// While in doubt a family is asked where there is no other, and else now and then, with little patience: the
// first answer ends the doubt.
type family struct {
	failed  atomic.Int32 // failures in a row
	worked  atomic.Int64 // a clock.Instant: the last answer
	explore atomic.Int64 // a clock.Instant: when it may be tried again while in doubt
}

const (
	doubtAfter = 2
	// explorePatience is how long a family in doubt may take to answer.
	explorePatience = 200 * time.Millisecond
	exploreFirst    = time.Second // doubled with each failure, up to
	exploreMost     = 60 * time.Second
)

func (it *Iterator) familyWorks(a netip.Addr, now clock.Instant) {
	f := &it.families[familyOf(a)]
	f.failed.Store(0)
	f.worked.Store(int64(now))
	f.explore.Store(0)
}

func (it *Iterator) familyFails(a netip.Addr, now clock.Instant) {
	f := &it.families[familyOf(a)]
	n := min(f.failed.Add(1), 16)
	f.failed.Store(n) // two at once may count as one
	f.explore.Store(int64(now.Add(min(exploreFirst<<max(n-doubtAfter-1, 0), exploreMost))))
}

// familyGone says that this host has no route for a family, or no address: it is not worth trying for a while.
func (it *Iterator) familyGone(a netip.Addr, now clock.Instant) {
	f := &it.families[familyOf(a)]
	f.failed.Store(16)
	f.explore.Store(int64(now.Add(exploreMost)))
}

func (it *Iterator) doubtful(fam int) bool {
	f, other := &it.families[fam], &it.families[1-fam]
	return f.failed.Load() >= doubtAfter && (other.failed.Load() < doubtAfter || other.worked.Load() > f.worked.Load())
}

// preferred leaves out servers of a family in doubt if there are others or, when it is time to see whether the
// doubt is right, those others: then it returns exploring.
func (it *Iterator) preferred(servers []netip.AddrPort, now clock.Instant) (some []netip.AddrPort, exploring bool) {
	for fam := range it.families {
		if !it.doubtful(fam) {
			continue
		}
		var in, out []netip.AddrPort
		for _, a := range servers {
			if familyOf(a.Addr()) == fam {
				in = append(in, a)
			} else {
				out = append(out, a)
			}
		}
		if len(in) == 0 || len(out) == 0 {
			return servers, false
		}
		next := &it.families[fam].explore
		if at := next.Load(); clock.Instant(at) <= now && next.CompareAndSwap(at, int64(now.Add(exploreFirst))) {
			return in, true
		}
		return out, false
	}
	return servers, false
}
