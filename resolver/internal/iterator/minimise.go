package iterator

import (
	"strings"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// A minimiser chooses the names to ask a zone's servers for, from the zone down to the name wanted: RFC 9156
// section 2.3, with MAX_MINIMISE_COUNT 10 and MINIMISE_ONE_LAB 4.
type minimiser struct {
	zone, name dnsname.Name
	at         dnsname.Name // asked last; the zone at first
	count      int
	off        bool
}

const (
	maxMinimise = 10
	oneLabel    = 4
)

const ip6Arpa dnsname.Name = "\x03ip6\x04arpa\x00"

// reverse6 are the numbers of labels at which IPv6 reverse zones are usually cut: /32, /48, /56, /64, a host.
var reverse6 = [...]int{10, 14, 16, 18, 34}

// step moves at to the next name.
func (m *minimiser) step() {
	total, have := m.name.Labels(), m.at.Labels()
	if m.off || m.count >= maxMinimise || m.at == m.name {
		m.at = m.name
		return
	}
	add := 1
	if m.count >= oneLabel {
		left := maxMinimise - m.count
		add = (total - have + left - 1) / left
	}
	m.count++
	next := have + add
	if have >= 2 && m.name.IsWithin(ip6Arpa) {
		for _, n := range reverse6 {
			if n > have {
				next = n
				break
			}
		}
	}
	for next < total && strings.HasPrefix(m.name.Suffix(next).FirstLabel(), "_") {
		next++ // attribute leaves (RFC 8552) are not where zones are cut
	}
	m.at = m.name.Suffix(min(next, total))
}
