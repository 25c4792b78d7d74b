package resolver_test

import (
	"strings"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"
)

// What names cost in questions to servers, one after the other: a new signed zone below a known one three (the
// referral with its DS record, the answer, the keys), an unsigned one two, a name in a known zone one. What a
// referral has told is not asked for again.
func TestCostOfNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, nil)
		defer l.stop()
		for _, c := range []struct {
			name string
			cost int
		}{
			{"www.ecdsa.com.", 6}, // the root's and com.'s keys too
			{"www.ed25519.example.", 5},
			{"www.unsigned.org.", 4}, // the proof that there is no DS record needs org.'s keys
			{"nx.ecdsa.com.", 1},
			{"www.rsa.org.", 3},
			{"www.unsigned.example.", 2},
			{"www.ecdsa.com.", 0},
		} {
			l.sim.ResetLog()
			if _, err := l.ask(c.name, dns.TypeA, nil); err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			var log []string
			for _, e := range l.sim.Log() {
				log = append(log, strings.ToLower(e.Name)+" "+dns.TypeToString[e.Type])
			}
			if len(log) != c.cost {
				t.Errorf("%s cost %d questions, want %d: %q", c.name, len(log), c.cost, log)
			}
		}
	})
}
