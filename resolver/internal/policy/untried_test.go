package policy

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/usercache"
)

// Rules that are so dear to try that not all are tried hurt who wrote them: a user's, in any place where he may write,
// keep no rule of the operator's from being tried. It is counted, and explained.
func TestDearRulesHurtWhoWroteThem(t *testing.T) {
	var b strings.Builder
	for i := range 126 { // the most labels
		b.WriteByte("abcd"[i*i%11%4])
		b.WriteByte('.')
	}
	name := b.String() + "z."
	var dear []string // and never met
	for i := range 64 {
		dear = append(dear, fmt.Sprintf("/(?:[a-d.]?){0,%d}[z][^z]/", 90+i))
	}
	text := strings.Join(dear, "\n")
	all := append([]string{}, dear...)
	all = append(all, "/z$/")

	w := newWorld(t)
	w.list("plain", 0, "/z$/")
	w.list("dear", 1, strings.Join(all, "\n"))
	w.put(usercache.CatalogueKind, "policy/strict", &userv1.Policy{Rules: rules("/z$/$important")})
	w.put(usercache.CatalogueKind, "policy/listed", &userv1.Policy{Settings: &userv1.Settings{OwnLists: ownLists(w, "given", "/z$/")}})
	lists := func(ids ...string) *userv1.Settings { return &userv1.Settings{Lists: set(ids...)} }
	users := map[string]*userv1.User{
		"none":    {Settings: lists("plain")},
		"user":    {Settings: lists("plain"), Rules: rules(dear...)},
		"list":    {Settings: &userv1.Settings{Lists: set("plain"), OwnLists: ownLists(w, "mine", text)}},
		"given":   {Policy: "listed", Settings: &userv1.Settings{OwnLists: ownLists(w, "earlier", text)}},
		"policy":  {Policy: "strict", Rules: rules(dear...)},
		"himself": {Rules: rules(all...)},
		"fool":    {Settings: lists("dear")},
	}
	for id, u := range users {
		u.Devices = []*userv1.Device{{Id: id}}
		w.put(usercache.Users, id, u)
	}
	w.put(usercache.Users, "dev", &userv1.User{Settings: lists("plain"), Devices: []*userv1.Device{{Id: "device", Rules: rules(dear...)}}})

	p := w.policy()
	for _, c := range []struct {
		device, want    string
		operator, users uint64
	}{
		{"none", "blocked by list mode 0", 0, 0},
		{"device", "blocked by list mode 0", 0, 1},
		{"user", "blocked by list mode 0", 0, 1},
		{"list", "blocked by list mode 0", 0, 1},
		{"policy", "blocked by important rule mode 0", 0, 1},
		{"given", "blocked by own list mode 0", 0, 1},
		{"himself", "pass by nothing", 0, 1},
		{"fool", "pass by nothing", 1, 0},
	} {
		operator, users := p.Untried()
		q := w.ask(p, c.device, name, "A")
		if got := say(p.Question(q)); got != c.want {
			t.Errorf("%s: %s, want %s", c.device, got, c.want)
		}
		o, u := p.Untried()
		if o -= operator; o != c.operator {
			t.Errorf("%s: %d judgements left the operator's untried, want %d", c.device, o, c.operator)
		}
		if u -= users; u != c.users {
			t.Errorf("%s: %d judgements left the user's untried, want %d", c.device, u, c.users)
		}
		var told []string
		p.ExplainQuestion(q, func(s Step) {
			if s.Step == "limits" {
				told = append(told, s.Detail)
			}
		})
		if uint64(len(told)) != c.operator+c.users {
			t.Errorf("%s: told %q", c.device, told)
		}
	}

	// So it is with what an answer leads to.
	q := w.ask(p, "user", "asked.example.", "A")
	a := answer(t, q, "asked.example. CNAME "+name)
	if got := say(p.Answer(q, &a, p.Question(q))); got != "blocked by list mode 0" {
		t.Errorf("an alias: %s", got)
	}
}

// ownLists are own lists by id and text.
func ownLists(w *world, idsAndTexts ...string) *userv1.OwnListSet {
	var s userv1.OwnListSet
	for i := 0; i < len(idsAndTexts); i += 2 {
		text := idsAndTexts[i+1]
		s.Values = append(s.Values, &userv1.OwnList{Id: idsAndTexts[i], Sha256: w.blob(text), Size: uint64(len(text))})
	}
	return &s
}

// What a user may have is first taken by what the shared policy gives him, so that his own cannot push it out.
func TestPolicyIsNotPushedOut(t *testing.T) {
	w := newWorld(t)
	var b strings.Builder
	for i := range 10_000 {
		fmt.Fprintf(&b, "||n%d.example^\n", i)
	}
	w.put(usercache.CatalogueKind, "policy/p", &userv1.Policy{Rules: rules("||rule.example^"), Settings: &userv1.Settings{OwnLists: ownLists(w, "z", "||list.example^")}})
	w.put(usercache.Users, "u", &userv1.User{Policy: "p", Rules: &userv1.Rules{Body: &userv1.Rules_Sha256{Sha256: w.blob(b.String())}, Size: uint64(b.Len())},
		Settings: &userv1.Settings{OwnLists: ownLists(w, "a", "||mine.example^\n"+b.String())}, Devices: []*userv1.Device{{Id: "d"}}})
	p := New(Options{Key: w.policy().o.Key, Users: w.cache, Blob: w.get, OwnBytes: 8 * int64(b.Len()+100), Logger: slog.New(slog.DiscardHandler)})
	for name, want := range map[string]string{"rule.example.": "blocked by policy rule mode 0", "list.example.": "blocked by own list mode 0", "mine.example.": "pass by nothing"} {
		q := w.ask(p, "d", name, "A")
		if got := say(p.Question(q)); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
		if left, _ := p.LeftOut(q); len(left) == 0 {
			t.Error("there was room for all")
		}
	}
}
