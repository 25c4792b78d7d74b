package rpz

import (
	"net/netip"
	"strconv"
	"strings"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// A match is the rule that decides, and what it matched.
type match struct {
	zone *zone
	rule *rule // nil: none
	by   trigger
	name dnsname.Name // byName, byServerName
	addr netip.Addr   // of the others
	bits int
}

// A trigger is what a rule matches.
type trigger uint8

const (
	byName trigger = iota
	byClient
	byAnswer
	byServerName
	byServerAddr
)

// labels are what triggers' names end in.
var labels = [...]string{byName: "", byClient: ".rpz-client-ip", byAnswer: ".rpz-ip", byServerName: ".rpz-nsdname", byServerAddr: ".rpz-nsip"}

// A Decision says which rule decided, for people who ask why.
type Decision struct {
	// Zone is the policy zone, without the final dot.
	Zone string
	// Rule is the trigger as its zone has it, relative to the zone, and the action that was given.
	Rule string
	// Met is what the rule matched: a name or an address, and what it is of.
	Met string
}

// ExplainQuestion is Question, with what decided.
func (r *Rules) ExplainQuestion(client netip.Addr, name dnsname.Name, typ uint16) (v query.Verdict, d Decision, hit bool) {
	m := r.question(client, name)
	if m.rule == nil {
		return v, d, false
	}
	return r.verdict(m.zone, m.rule, name, typ), m.decision(), true
}

// ExplainAnswer is Answer, with what decided.
func (r *Rules) ExplainAnswer(facts query.Facts, servers []Server, name dnsname.Name, typ uint16) (v query.Verdict, d Decision, hit bool) {
	m := r.answer(facts, servers)
	if m.rule == nil {
		return v, d, false
	}
	return r.verdict(m.zone, m.rule, name, typ), m.decision(), true
}

func (m *match) decision() Decision {
	text, met := "", ""
	switch m.by {
	case byName, byServerName:
		names := m.zone.names
		if met = relative(m.name); m.by == byServerName {
			names, met = m.zone.nsNames, "the name server "+met
		}
		text = names.text(m.name)
	case byClient:
		text, met = prefixText(m.addr, m.bits), "the client "+m.addr.String()
	case byAnswer:
		text, met = prefixText(m.addr, m.bits), m.addr.String()+" in the answer"
	case byServerAddr:
		text, met = prefixText(m.addr, m.bits), "the name server at "+m.addr.String()
	}
	d := Decision{Zone: relative(m.zone.name), Rule: text + labels[m.by] + " " + m.rule.text(), Met: met}
	if m.zone.action != Given {
		d.Met += "; the whole zone's action is " + actionNames[m.zone.action]
	}
	return d
}

func relative(n dnsname.Name) string { return strings.TrimSuffix(n.String(), ".") }

// text is the trigger that find takes for name.
func (n names) text(name dnsname.Name) string {
	if n[name] != nil {
		return relative(name)
	}
	for t := name.Parent(); t != ""; t = t.Parent() {
		if n[t] != nil {
			return strings.TrimSuffix("*."+relative(t), ".")
		}
	}
	return ""
}

// prefixText is a network as triggers have it.
func prefixText(a netip.Addr, bits int) string {
	pre, err := a.WithZone("").Prefix(bits)
	if err != nil {
		return ""
	}
	words := []string{strconv.Itoa(bits)}
	add := func(parts []string) {
		for i := len(parts) - 1; i >= 0; i-- {
			if parts[i] != "" {
				words = append(words, parts[i])
			}
		}
	}
	switch text := pre.Addr().String(); {
	case a.Is4():
		add(strings.Split(text, "."))
	case strings.Contains(text, "::"):
		front, back, _ := strings.Cut(text, "::")
		add(strings.Split(back, ":"))
		words = append(words, "zz")
		add(strings.Split(front, ":"))
	default:
		add(strings.Split(text, ":"))
	}
	return strings.Join(words, ".")
}

// actionNames are what the actions of whole zones are called.
var actionNames = [...]string{Given: "given", Disabled: "disabled", PassThru: "passthru", Drop: "drop", NXDomain: "nxdomain", NoData: "nodata", TCPOnly: "tcp-only", CNAME: "cname"}

// text is the action as its records say it.
func (u *rule) text() string {
	switch u.action {
	case PassThru:
		return "CNAME rpz-passthru."
	case Drop:
		return "CNAME rpz-drop."
	case NXDomain:
		return "CNAME ."
	case NoData:
		return "CNAME *."
	case TCPOnly:
		return "CNAME rpz-tcp-only."
	case CNAME:
		if u.below {
			return "CNAME *." + u.target.String()
		}
		return "CNAME " + u.target.String()
	case Given, Disabled:
	}
	return "local data"
}
