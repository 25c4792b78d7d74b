package policy

import (
	"bytes"
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

	lists    *filter.Matcher // catalogue lists by number
	services *filter.Matcher // services by number, as if each were a list
	// What the matchers were made of.
	listHash    [usercache.MaxLists][32]byte
	serviceText [usercache.MaxServices]string
	missing     []string
	// whole is the revision of the newest catalogue so far of which nothing was missing.
	whole uint64

	required     usercache.ListSet // lists whose blocking others demand
	listNames    [usercache.MaxLists]string
	serviceNames [usercache.MaxServices]string
	safeSearch   [64]rewriteSet // by the bit of Profile.SafeSearch
}

// safeSearchTTL of aliases to an engine's safe mode that name none, in seconds.
const safeSearchTTL = 300

// newState makes the state of the present catalogue; it returns old if nothing is different.
func newState(o *Options, old *state) *state {
	cat := o.Users.Catalogue()
	if old != nil && old.catalogue == cat && len(old.missing) == 0 {
		return old
	}
	s := &state{key: o.Key, catalogue: cat}
	if old != nil {
		s.lists, s.services, s.listHash, s.serviceText = old.lists, old.services, old.listHash, old.serviceText
	}
	changed := s.compileLists(o, cat)
	changed = s.compileServices(o, cat) || changed
	if old != nil && old.catalogue == cat && !changed && len(s.missing) == len(old.missing) {
		return old
	}
	if len(s.missing) == 0 {
		s.whole = cat.Revision
	} else if old != nil {
		s.whole = old.whole
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
	for i, e := range cat.SafeSearch {
		if i < len(s.safeSearch) {
			s.safeSearch[i] = newRewriteSet(e.Rewrites, false, safeSearchTTL)
		}
	}
	return s
}

// compileLists brings the matcher of catalogue lists up to the catalogue.
func (s *state) compileLists(o *Options, cat *usercache.Catalogue) (changed bool) {
	b := filter.NewBuilder(&o.Key)
	var there filter.Set
	for _, l := range cat.Lists {
		there.Add(l.Number)
		if s.listHash[l.Number] == l.SHA256 {
			continue
		}
		text, ok := o.Blob(l.SHA256)
		if !ok {
			s.missing = append(s.missing, l.ID)
			continue // the version before, if there is one, goes on matching
		}
		rep, err := b.Add(l.Number, bytes.NewReader(text))
		if err == nil && rep.NotAList != "" {
			b.Undo()
		}
		if err != nil || rep.NotAList != "" {
			o.Logger.Error("a catalogue list cannot be used; its last good version stays", "list", l.ID, "what", rep.NotAList, "err", err)
			continue
		}
		o.Logger.Info("catalogue list compiled", "list", l.ID, "number", l.Number, "rules", rep.Rules, "skipped", rep.Skipped)
		s.listHash[l.Number] = l.SHA256
		changed = true
	}
	if s.lists != nil {
		held := s.lists.Lists()
		for n := range filter.MaxLists {
			if held.Has(n) && !there.Has(n) {
				b.Remove(n)
				s.listHash[n] = [32]byte{}
				changed = true
			}
		}
	}
	if changed || s.lists == nil {
		s.lists = b.Build(s.lists)
	}
	return changed
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
