package policy

import (
	"crypto/sha256"
	"math/bits"
	"strings"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/filter"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// A state is everything of the catalogue that judging needs: immutable, swapped as one.
type state struct {
	key       dnsname.Key
	catalogue *usercache.Catalogue

	view view // of queries whose profile is of the same catalogue

	lists    *shelf          // catalogue lists by number; states with the same lists share it
	services *filter.Matcher // services by number, as if each were a list
	// What the matchers were made of.
	listHash    [usercache.MaxLists]filter.ID
	serviceText [usercache.MaxServices]string
	missing     []string
	waiting     int            // how many lists wait for memory
	dropped     map[uint16]int // by list, how many rules the matcher leaves out
	// whole is the revision of the newest catalogue so far of which nothing was missing or waiting.
	whole uint64

	required     usercache.ListSet // lists whose blocking others demand
	listNames    [usercache.MaxLists]string
	serviceNames [usercache.MaxServices]string
	safeSearch   [64]rewriteSet // by the bit of Profile.SafeSearch
}

// A view is what a query is judged by: a state, less what means something else there than in the query's profile.
type view struct {
	*state
	void usercache.Numbers
}

// pin settles by which state q is judged. Profile and state are made of the catalogue apart, and one may be older
// than the other by as long as it takes to compile a list: numbers that have been given again in between name
// nothing in such a query, whether it is the list of before or of after that they mean.
func (p *Policy) pin(q *query.Query) *view {
	s, prof := p.state.Load(), &q.Client.Profile
	v := &s.view
	if prof.Catalogue != s.catalogue.Revision && prof.Flags != 0 {
		newer, since := s.catalogue, prof.Catalogue
		if since > newer.Revision {
			newer, since = p.o.Users.Catalogue(), newer.Revision
		}
		if void := newer.Renumbered(since); !void.IsEmpty() {
			v = &view{s, void}
		}
	}
	q.Client.Catalogue = v
	return v
}

// listID tells a list's text from others, and in its first half the list.
func listID(l *usercache.CatalogueList) (id filter.ID) {
	name := sha256.Sum256([]byte(l.ID))
	copy(id[copy(id[:], name[:]):], l.SHA256[:])
	return id
}

// sameList reports whether two texts are of one list.
func sameList(a, b *filter.ID) bool { return [sha256.Size]byte(a[:]) == [sha256.Size]byte(b[:]) }

// safeSearchTTL of aliases to an engine's safe mode that name none, in seconds.
const safeSearchTTL = 300

// isWhole reports whether the state has the present versions of all its lists.
func (s *state) isWhole() bool { return len(s.missing) == 0 && s.waiting == 0 }

// newState makes the state of the present catalogue; it returns old if nothing is different.
func (p *Policy) newState(old *state) *state {
	cat := p.o.Users.Catalogue()
	if old.catalogue == cat && old.isWhole() {
		return old
	}
	s := &state{key: p.o.Key, catalogue: cat}
	s.view.state = s
	s.lists, s.services, s.listHash, s.serviceText = old.lists, old.services, old.listHash, old.serviceText
	s.dropped = old.dropped
	changed := p.compileLists(s)
	changed = s.compileServices(&p.o, cat) || changed
	if old.catalogue == cat && !changed && len(s.missing) == len(old.missing) && s.waiting == old.waiting {
		return old
	}
	if s.whole = old.whole; s.isWhole() {
		s.whole = cat.Revision
	}
	for _, l := range cat.Lists {
		if s.listNames[l.Number] = l.Name; l.Name == "" {
			s.listNames[l.Number] = l.ID
		}
	}
	for _, c := range cat.Categories {
		if c.Required {
			s.required.AddAll(&c.Lists)
		}
	}
	for _, v := range cat.Services {
		if s.serviceNames[v.Number] = v.Name; v.Name == "" {
			s.serviceNames[v.Number] = v.ID
		}
	}
	for _, e := range cat.SafeSearch {
		s.safeSearch[e.Number] = newRewriteSet(e.Rewrites, false, safeSearchTTL)
	}
	return s
}

// compileLists brings the matcher of catalogue lists up to the catalogue.
func (p *Policy) compileLists(s *state) (changed bool) {
	b := filter.NewBuilder(&p.o.Key)
	room := p.newRoom(s.lists)
	var there filter.Set
	for i := range s.catalogue.Lists {
		l := &s.catalogue.Lists[i]
		there.Add(l.Number)
		id, held := listID(l), &s.listHash[l.Number]
		if *held == id {
			continue
		}
		// What goes on matching without the text is the version before, unless the number was another list's.
		without := func() {
			if *held != (filter.ID{}) && !sameList(held, &id) {
				b.Remove(l.Number)
				*held = filter.ID{}
				changed = true
			}
		}
		before := room
		if *held != (filter.ID{}) && !room.take(l.Size) {
			s.waiting++
			without()
			continue
		}
		text, ok := p.o.OpenBlob(l.SHA256)
		if !ok {
			room = before
			s.missing = append(s.missing, l.ID)
			without()
			continue
		}
		rep, err := b.Add(l.Number, text)
		_ = text.Close() // it was read, or there is an error already
		if err == nil && rep.NotAList != "" {
			b.Undo()
		}
		if err != nil || rep.NotAList != "" {
			room = before
			without()
			p.o.Logger.Error("a catalogue list cannot be used; its last good version stays", "list", l.ID, "what", rep.NotAList, "err", err)
			continue
		}
		p.o.Logger.Info("catalogue list compiled", "list", l.ID, "number", l.Number, "rules", rep.Rules, "skipped", rep.Skipped)
		*held = id
		changed = true
	}
	defer func() {
		if changed {
			p.tellDropped(s)
		}
	}()
	if s.lists == nil {
		s.lists = newShelf(b.Build(nil), s.catalogue.Revision)
		return changed
	}
	held := s.lists.Load().Lists()
	for n := range filter.MaxLists {
		if held.Has(n) && !there.Has(n) {
			b.Remove(n)
			s.listHash[n] = filter.ID{}
			changed = true
		}
	}
	if changed {
		s.lists = newShelf(b.Build(s.lists.Load()), s.catalogue.Revision)
	}
	return changed
}

// tellDropped says which lists have rules that the matcher leaves out, when their number changes.
func (p *Policy) tellDropped(s *state) {
	now, first := map[uint16]int{}, map[uint16]uint32{}
	for _, d := range s.lists.Load().Dropped() {
		if now[d.List]++; now[d.List] == 1 {
			first[d.List] = d.Line
		}
	}
	for _, l := range s.catalogue.Lists {
		if n := now[uint16(l.Number)]; n > 0 && n != s.dropped[uint16(l.Number)] {
			p.o.Logger.Warn("rules of a catalogue list are left out: too many names would have to be tried against them, give them more text that a name must have",
				"list", l.ID, "rules", n, "first_line", first[uint16(l.Number)])
		}
	}
	s.dropped = now
}

// compileServices brings the matcher of services up to the catalogue.
func (s *state) compileServices(o *Options, cat *usercache.Catalogue) (changed bool) {
	b := filter.NewBuilder(&o.Key)
	var there [usercache.MaxServices]bool
	for _, v := range cat.Services {
		there[v.Number] = true
		text := strings.Join(v.Rules, "\n")
		if s.serviceText[v.Number] == text {
			continue
		}
		if _, err := b.Add(v.Number, strings.NewReader(text)); err != nil {
			b.Remove(v.Number)
		}
		s.serviceText[v.Number] = text
		changed = true
	}
	for n := range there {
		if !there[n] && s.serviceText[n] != "" {
			b.Remove(n)
			s.serviceText[n] = ""
			changed = true
		}
	}
	if changed || s.services == nil {
		s.services = b.Build(s.services)
	}
	return changed
}

// ede is the extended error of what a list or service blocks.
func (s *state) ede(why query.Why, number uint16) uint16 {
	switch {
	case (why == WhyList || why == WhyThreat) && s.required.Has(int(number)):
		return edeCensored
	case why == WhyThreat:
		return edeBlocked
	}
	return edeFiltered
}

func trailingZeros(x uint64) int { return bits.TrailingZeros64(x) & 63 }
