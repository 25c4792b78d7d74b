package filter

import (
	"net/netip"
	"runtime"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/filter/rulelist"
)

// This file is the rules of policy zones whose trigger is not the name asked for: the client's address, an address of
// the answer, the names and addresses of the name servers it came through. Rules know such a trigger by a name of its
// own (rulelist.AppendPrefix, AppendServer). Those that block or allow are in tables under that name, those that
// rewrite hang off it as off a suffix.

// WantsServers reports whether MatchServers could say something for the lists chosen, and whether addresses of name
// servers matter to it.
func (m *Matcher) WantsServers(lists *Set) (names, addrs bool) {
	if m.servers.empty() || lists != nil && !intersect(&m.servers, lists) {
		return false, false
	}
	return true, m.triggers[rulelist.ByServerAddr] != prefixSizes{}
}

// MatchServers judges the name servers of the zones that an answer came through: their names, each a canonical name,
// and then their addresses. In each list the first of the names that a rule matches decides, by its longest match, and
// if there is none the longest prefix that holds one of the addresses. Names in canonical order and addresses in
// ascending order give the order of draft-vixie-dnsop-dns-rpz. Of lists that disagree rewrites go before exceptions,
// and these before blocks.
func (m *Matcher) MatchServers(names []dnsname.Name, addrs []netip.Addr, lists *Set, q *Query) Result {
	defer runtime.KeepAlive(m)
	var best Result
	if w, _ := m.WantsServers(lists); !w {
		return best
	}
	for word := range m.servers {
		left := m.servers[word]
		if lists != nil {
			left &= lists[word]
		}
		for ; left != 0; left &= left - 1 {
			var one Set
			one[word] = left & -left
			if r := m.servedBy(names, addrs, &one, q); r.Verdict > best.Verdict { // the first list of equals
				best = r
			}
		}
	}
	return best
}

// servedBy is MatchServers for one list.
func (m *Matcher) servedBy(names []dnsname.Name, addrs []netip.Addr, list *Set, q *Query) Result {
	j := judgement{q: q, lists: list}
	for _, n := range names {
		var h [dnsname.MaxLabels + 1]uint64
		k := m.serverHashes(n, &h)
		for i := k; i >= 0; i-- {
			j.depth = uint8(i + 1)
			if m.trigger(&j, h[i], i == k) {
				return j.finish(m, nil)
			}
		}
	}
	var longest netip.Addr
	bits := -1
	for _, a := range addrs {
		if b := m.longest(rulelist.ByServerAddr, a, list, q); b > bits {
			longest, bits = a, b
		}
	}
	if bits >= 0 {
		m.prefixes(&j, rulelist.ByServerAddr, longest)
	}
	return j.finish(m, nil)
}

// serverHashes hashes the suffixes of the name by which rules know a name server: h[0] is that of all of them, h[k] of
// the whole name.
func (m *Matcher) serverHashes(n dnsname.Name, h *[dnsname.MaxLabels + 1]uint64) (k int) {
	label := rulelist.TriggerLabel(rulelist.ByServer)
	s := m.key.Start().Label(label[:])
	h[0] = s.Sum()
	var at [dnsname.MaxLabels]uint8
	for i := 0; i < len(n) && n[i] != 0 && k < len(at); i += 1 + int(n[i]) {
		at[k] = uint8(i)
		k++
	}
	for i := range k {
		from := int(at[k-1-i])
		var b [64]byte
		s = s.Label(b[:copy(b[:], n[from:from+1+int(n[from])])])
		h[i+1] = s.Sum()
	}
	return k
}

// trigger judges the rules at one suffix of a trigger's name, and reports whether there was one.
func (m *Matcher) trigger(j *judgement, hash uint64, exact bool) bool {
	zones, rewrites := j.nZones, j.nRewrite
	m.rewrites(j, hash, exact) // before suffix, which closes the lists that it meets
	m.suffix(j, hash, exact)
	for _, id := range j.rewrite[rewrites:j.nRewrite] {
		j.close(m.rules.all[id].list)
	}
	return j.nZones > zones || j.nRewrite > rewrites
}

// rewrites collects the rewrites at one suffix of a trigger's name.
func (m *Matcher) rewrites(j *judgement, hash uint64, exact bool) {
	for _, id := range m.rules.bySuffix.find(hash, ^uint64(0)) {
		r := &m.rules.all[id]
		if r.flags&isTrigger != 0 && (r.flags&atName != 0) == exact && j.lists.Has(int(r.list)) && !j.closed(r.list) {
			collect(&j.rewrite, &j.nRewrite, id)
		}
	}
}

func (j *judgement) closed(list uint16) bool {
	for _, z := range j.zones[:j.nZones] {
		if z.list == list {
			return true
		}
	}
	return false
}

// close remembers that a list has decided.
func (j *judgement) close(list uint16) {
	if j.nZones < len(j.zones) && !j.closed(list) {
		j.zones[j.nZones] = zoneHit{list, j.depth}
		j.nZones++
	}
}

// prefixes judges the rules whose trigger is an address, from the longest prefix on: in each list the first decides.
// It reports whether there was one.
func (m *Matcher) prefixes(j *judgement, t rulelist.Trigger, addr netip.Addr) (hit bool) {
	sizes := &m.triggers[t]
	if *sizes == (prefixSizes{}) || !addr.IsValid() {
		return false
	}
	addr = addr.Unmap().WithZone("")
	for size := 128; size >= least(addr); size-- {
		if sizes.has(size) && m.prefix(j, t, addr, size) {
			hit = true
		}
	}
	return hit
}

// prefix judges the rules for the prefix of one size, IPv4 counting from 96 on, that holds an address.
func (m *Matcher) prefix(j *judgement, t rulelist.Trigger, addr netip.Addr, size int) bool {
	p, err := addr.Prefix(size - least(addr))
	if err != nil {
		return false
	}
	var buf [64]byte
	j.depth = uint8(size)
	if t == rulelist.ByClient && j.q.NoRewrite { // it was said when the client asked
		zones := j.nZones
		m.suffix(j, m.key.Hash(rulelist.AppendPrefix(buf[:0], t, p)), true)
		return j.nZones > zones
	}
	return m.trigger(j, m.key.Hash(rulelist.AppendPrefix(buf[:0], t, p)), true)
}

// longest returns the size of the longest prefix of a list's rules that holds an address, or -1.
func (m *Matcher) longest(t rulelist.Trigger, addr netip.Addr, list *Set, q *Query) int {
	addr = addr.Unmap().WithZone("")
	for size := 128; addr.IsValid() && size >= least(addr); size-- {
		j := judgement{q: q, lists: list}
		if m.triggers[t].has(size) && m.prefix(&j, t, addr, size) {
			return size
		}
	}
	return -1
}

// least is the size of the prefix of all addresses of a family.
func least(a netip.Addr) int {
	if a.Is4() {
		return 96
	}
	return 0
}

// prefixSizes are lengths of prefixes, as bits; IPv4 counts from 96 on.
type prefixSizes [3]uint64

func (s *prefixSizes) has(n int) bool { return s[n/64]&(1<<(n%64)) != 0 }

func (s *prefixSizes) add(p netip.Prefix) {
	n := p.Bits()
	if p.Addr().Is4() {
		n += 96
	}
	s[n/64] |= 1 << (n % 64)
}

// triggers are the lengths of the prefixes that rules are about.
type triggers [rulelist.NumTriggers]prefixSizes
