package policy

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// A naive is a policy in the simplest form that can be judged: the table read line by line, every rule tried on every
// name, by an evaluator that shares no code with the one it checks.
type naive struct {
	off, schedule      bool
	deny               []string
	unblocked          []string
	device, user, pol  []naiveRule
	rewrites           map[string]string // name or *.name → address
	safe, service      bool
	own, lists, threat []naiveRule
	mode               userv1.BlockMode
}

type naiveRule struct {
	name                    string
	allow, important, exact bool
}

func (r naiveRule) text() string {
	s := "||" + r.name + "^"
	if r.exact {
		s = "|" + r.name + "|"
	}
	if r.allow {
		s = "@@" + s
	}
	if r.important {
		s += "$important"
	}
	return s
}

func (r naiveRule) matches(name string) bool {
	return name == r.name || !r.exact && strings.HasSuffix(name, "."+r.name)
}

// say is the standing of rules about a name: 4 important exception … 1 block, 0 nothing.
func naiveSays(rules []naiveRule, name string) (best int) {
	for _, r := range rules {
		if !r.matches(name) {
			continue
		}
		n := 1
		if r.allow {
			n = 2
		}
		if r.important {
			n += 2
		}
		best = max(best, n)
	}
	return best
}

const (
	naiveService = "served.example"
	naiveEngine  = "www.c.example"
)

var naiveKinds = [...]string{"", "blocked", "allowed", "blocked", "allowed"}

func (u *naive) judge(name string) string {
	within := func(set []string) bool {
		for _, n := range set {
			if (naiveRule{name: n}).matches(name) {
				return true
			}
		}
		return false
	}
	if within(u.deny) {
		return "refused by access list"
	}
	if u.off {
		return "pass by filtering off"
	}
	for _, n := range u.unblocked {
		if n == name {
			return "allowed by unblocked"
		}
	}
	texts := [][]naiveRule{u.device, u.user, u.pol}
	for _, want := range []int{4, 3} {
		for _, t := range texts {
			if naiveSays(t, name) == want {
				return naiveKinds[want] + " by important rule"
			}
		}
	}
	for i, t := range texts {
		if n := naiveSays(t, name); n > 0 {
			return naiveKinds[n] + " by " + []string{"device", "user", "policy"}[i] + " rule"
		}
	}
	if a, ok := u.rewrites[name]; ok {
		return "synthesised by rewrite NOERROR " + a
	}
	for parent := name; parent != ""; {
		_, parent, _ = strings.Cut(parent, ".")
		if a, ok := u.rewrites["*."+parent]; ok {
			return "synthesised by rewrite NOERROR " + a
		}
	}
	if u.safe && name == naiveEngine {
		return "redirected by safe search to safe.example."
	}
	if u.schedule {
		return "blocked by schedule"
	}
	if u.service && (naiveRule{name: naiveService}).matches(name) {
		return "blocked by service"
	}
	own, list := naiveSays(u.own, name), naiveSays(u.lists, name)
	said := ""
	switch {
	case own > 0 && own >= list:
		return naiveKinds[own] + " by own list"
	case list > 0:
		if said = naiveKinds[list] + " by list"; naiveKinds[list] == "blocked" {
			return said
		}
	}
	// Of a list's rules the strongest speaks, for threats as elsewhere.
	if n := naiveSays(u.threat, name); naiveKinds[n] == "blocked" {
		return "blocked by threat list"
	}
	if said != "" {
		return said
	}
	return "pass by nothing"
}

// Random users with random policies ask for the same few names in random order, some with room for what is compiled
// and some with none: each is judged as the naive evaluator judges him alone.
func TestRandomPolicies(t *testing.T) {
	for seed := range uint64(4) {
		rng := rand.New(rand.NewPCG(seed, 99))
		names := []string{naiveService, "x." + naiveService, naiveEngine}
		for _, a := range []string{"a", "b", "c"} {
			names = append(names, a+".example", "www."+a+".example", "x.www."+a+".example")
		}
		pick := func() string { return names[rng.IntN(len(names))] }
		chance := func(n int) bool { return rng.IntN(n) == 0 }
		some := func(most int) (out []naiveRule) {
			for range rng.IntN(most + 1) {
				out = append(out, naiveRule{pick(), chance(3), chance(4), chance(3)})
			}
			return out
		}
		text := func(rs []naiveRule) string {
			var lines []string
			for _, r := range rs {
				lines = append(lines, r.text())
			}
			return strings.Join(lines, "\n")
		}
		w := newWorld(t)
		logger := slog.New(slog.DiscardHandler)
		var lists [6][]naiveRule
		for i := range lists {
			lists[i] = some(4)
			w.list(fmt.Sprintf("l%d", i), uint32(i), "! list\n"+text(lists[i]))
		}
		catalogue := map[string]proto.Message{
			"category/threats":  &userv1.Category{Lists: []string{"l4", "l5"}, Threat: true, SafeBrowsing: true},
			"service/service":   &userv1.Service{Rules: []string{"||" + naiveService + "^"}},
			"safesearch/engine": &userv1.SafeSearch{Rewrites: []*userv1.Rewrite{{Name: naiveEngine, Records: []string{"CNAME safe.example"}}}},
		}
		var policies [3][]naiveRule
		for i := range policies {
			policies[i] = some(3)
			catalogue[fmt.Sprintf("policy/p%d", i)] = &userv1.Policy{Rules: rules(text(policies[i]))}
		}
		w.putAll(usercache.CatalogueKind, catalogue)
		people := make([]*naive, 60)
		records := map[string]proto.Message{}
		for i := range people {
			u := &naive{off: chance(12), schedule: chance(10), device: some(2), user: some(2), safe: chance(2), service: chance(3), rewrites: map[string]string{},
				mode: userv1.BlockMode(1 + rng.IntN(4))}
			s := &userv1.Settings{Mode: u.mode, Lists: set()}
			if chance(6) {
				u.deny = []string{pick()}
				s.DenyDomains = set(u.deny...)
			}
			if u.off {
				s.Enabled = proto.Bool(false)
			}
			if chance(5) {
				u.unblocked = []string{pick()}
				s.Unblocks = &userv1.UnblockSet{Values: []*userv1.Unblock{{Name: pick(), Until: 1}, {Name: u.unblocked[0]}}} // of equal names the last counts
			}
			for k := range rng.IntN(3) {
				n := pick()
				if chance(2) {
					n = "*." + n
				}
				u.rewrites[n] = fmt.Sprintf("198.51.100.%d", 1+k)
			}
			s.Rewrites = new(userv1.RewriteSet)
			for n, a := range u.rewrites {
				s.Rewrites.Values = append(s.Rewrites.Values, &userv1.Rewrite{Name: n, Records: []string{"A " + a}})
			}
			if u.safe {
				s.SafeSearch = set("engine")
			}
			if u.service {
				s.Services = set("service")
			}
			if u.schedule {
				s.Schedules = &userv1.ScheduleSet{Values: []*userv1.Schedule{{Id: "s", Action: userv1.ScheduleAction_SCHEDULE_ACTION_BLOCK, Everything: true,
					Windows: []*userv1.Window{{Days: 0x7f, From: 0, To: 1440}}}}}
			}
			for k := range 4 {
				if chance(2) {
					s.Lists.Values = append(s.Lists.Values, fmt.Sprintf("l%d", k))
					u.lists = append(u.lists, lists[k]...)
				}
			}
			if chance(2) {
				s.SafeBrowsing = proto.Bool(true)
				u.threat = append(append([]naiveRule(nil), lists[4]...), lists[5]...)
			}
			if chance(3) {
				u.own = some(3)
				if b := text(u.own); b != "" {
					s.OwnLists = &userv1.OwnListSet{Values: []*userv1.OwnList{{Id: "own", Sha256: w.blob(b), Size: uint64(len(b))}}}
				}
			}
			m := &userv1.User{Settings: s, Rules: rules(text(u.user)), Devices: []*userv1.Device{{Id: fmt.Sprintf("d%d", i), Rules: rules(text(u.device))}}}
			if chance(2) {
				k := rng.IntN(len(policies))
				m.Policy, u.pol = fmt.Sprintf("p%d", k), policies[k]
			}
			people[i], records[fmt.Sprintf("u%d", i)] = u, m
		}
		w.putAll(usercache.Users, records)
		roomy := New(Options{Key: w.policy().o.Key, Users: w.cache, Blob: w.get, Logger: logger})
		tight := New(Options{Key: roomy.o.Key, Users: w.cache, Blob: w.get, OwnBytes: 200 << 10, Logger: logger})
		for range 4000 {
			i, name := rng.IntN(len(people)), pick()
			want := people[i].judge(name)
			for what, p := range map[string]*Policy{"roomy": roomy, "tight": tight} {
				q := w.ask(p, fmt.Sprintf("d%d", i), name+".", "A")
				if d := q.Client.Profile.Details; p == tight && d != nil {
					d.SetCompiled(nil) // nothing is remembered
					q.Client.Rules = nil
					p.Prepare(t.Context(), q)
				}
				got := p.Question(q)
				if p == roomy {
					var steps []Step
					if told := p.ExplainQuestion(q, func(s Step) { steps = append(steps, s) }); say(told) != say(got) {
						t.Fatalf("seed %d: user %d asks for %s: told %s, served %s", seed, i, name, say(told), say(got))
					}
					checkSteps(t, people[i], lists[:], name, got, steps)
				}
				if said := say(got); !strings.HasPrefix(said, want) {
					t.Fatalf("seed %d, %s: user %d asks for %s: %s, want %s\n%+v", seed, what, i, name, said, want, *people[i])
				} else if got.Kind.String() == "blocked" && int(got.Block.Mode) != int(people[i].mode)-1 {
					t.Fatalf("seed %d: user %d is blocked by mode %d, wants %v", seed, i, got.Block.Mode, people[i].mode)
				}
			}
		}
		w.cache.Close()
	}
}

// checkSteps holds what is told of a verdict against the verdict, and the line of a rule against the texts: the rule
// there matches the name and says what was decided.
func checkSteps(t *testing.T, u *naive, lists [][]naiveRule, name string, v query.Verdict, steps []Step) {
	t.Helper()
	if v.Kind == query.Pass {
		if v.Why == WhyOff && (len(steps) != 1 || steps[0].Step != "filtering off" || steps[0].Change == "") || v.Why == WhyNothing && len(steps) != 0 {
			t.Fatalf("%s passes by %s: told %+v", name, WhyText(v.Why), steps)
		}
		return
	}
	if len(steps) == 0 {
		t.Fatalf("%s is %s and nothing is told", name, say(v))
	}
	s := steps[len(steps)-1]
	if s.Step != WhyText(v.Why) || s.Verdict != v.Kind || s.Line != v.Line || s.Change == "" {
		t.Fatalf("%s is %s: told %+v", name, say(v), s)
	}
	var text []naiveRule
	line := int(s.Line) - 1
	switch s.Text {
	case DeviceRules:
		text = u.device
	case UserRules:
		text = u.user
	case PolicyRules:
		text = u.pol
	case OwnList:
		text = u.own
	case CatalogueList:
		if s.List != fmt.Sprintf("l%d", v.List) {
			t.Fatalf("%s is decided by list %d: told %+v", name, v.List, s)
		}
		text, line = lists[v.List], line-1 // behind its title
	case ServiceRules:
		text = []naiveRule{{name: naiveService}}
	case NoText:
		if s.Line != 0 {
			t.Fatalf("line %d of no text", s.Line)
		}
		return
	}
	if line < 0 || line >= len(text) {
		t.Fatalf("%s is %s by line %d of %d", name, say(v), s.Line, len(text))
	}
	if r := text[line]; !r.matches(name) || r.allow != (v.Kind == query.Allowed) || v.Why == WhyImportant && !r.important {
		t.Fatalf("%s is %s: told of the rule %q", name, say(v), r.text())
	}
}
