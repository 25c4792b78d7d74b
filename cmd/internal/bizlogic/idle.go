package bizlogic

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

// idle says which of the settings that were just assigned have no effect for now: categories that hold no list, blocking
// by addresses that nobody has set. They are stored all the same, since what they lack may come later.
func (v *view) idle(o *owner, assigned []*adminv1.Assignment) (warnings []string, err error) {
	set := map[string]bool{}
	var ids []string // of categories
	for _, as := range assigned {
		if as.GetOperation() == adminv1.Operation_OPERATION_REMOVE {
			continue
		}
		set[as.GetKey()] = true
		if as.GetKey() == "categories" {
			ids = append(ids, splitList(as.GetValue())...)
		}
	}
	s := *o.settings
	if set["schedules"] {
		for _, sch := range s.GetSchedules().GetValues() {
			ids = append(ids, sch.Categories...)
		}
	}
	browsing, adult := set["safe_browsing"] && s.GetSafeBrowsing(), set["adult"] && s.GetAdult()
	if len(ids) > 0 || browsing || adult {
		categories := map[string]*userv1.Category{}
		err := eachOf(v.tx, "category/", func(id string, _ uint64, b []byte) error {
			categories[id] = new(userv1.Category)
			return proto.Unmarshal(b, categories[id])
		})
		if err != nil {
			return nil, err
		}
		slices.Sort(ids)
		for _, id := range slices.Compact(ids) {
			if c := categories[id]; c != nil && len(c.Lists) == 0 {
				warnings = append(warnings, fmt.Sprintf("category %s holds no list and has no effect until it does: sluicectl category set %s lists+=LIST", id, id))
			}
		}
		if browsing {
			warnings = append(warnings, unlisted("safe_browsing", categories, (*userv1.Category).GetSafeBrowsing)...)
		}
		if adult {
			warnings = append(warnings, unlisted("adult", categories, (*userv1.Category).GetAdult)...)
		}
	}
	if set["mode"] || set["block_ipv4"] || set["block_ipv6"] || set["policy"] {
		var mode userv1.BlockMode
		ipv4, ipv6 := "", ""
		beneath, err := v.layersOf(o)
		if err != nil {
			return nil, err
		}
		for _, l := range beneath {
			mode, ipv4, ipv6 = cmp.Or(mode, l.GetMode()), cmp.Or(ipv4, l.GetBlockIpv4()), cmp.Or(ipv6, l.GetBlockIpv6())
		}
		if mode == userv1.BlockMode_BLOCK_MODE_CUSTOM_IP && ipv4 == "" && ipv6 == "" {
			warnings = append(warnings, "mode is custom_ip, and neither block_ipv4 nor block_ipv6 is set: what is blocked has no data")
		}
	}
	return warnings, nil
}

// unlisted warns of a setting that switches on categories of which none holds a list.
func unlisted(key string, categories map[string]*userv1.Category, belongs func(*userv1.Category) bool) []string {
	var of []string
	for _, id := range sortedKeys(categories) {
		if c := categories[id]; belongs(c) {
			if of = append(of, id); len(c.Lists) > 0 {
				return nil
			}
		}
	}
	if len(of) == 0 {
		return []string{fmt.Sprintf("%s has no effect until a category belongs to it: sluicectl category set CATEGORY %s=true", key, key)}
	}
	return []string{fmt.Sprintf("%s has no effect until one of its categories (%s) holds a list: sluicectl category set %s lists+=LIST", key, strings.Join(of, ", "), of[0])}
}

// strays warns of members that an assignment takes away from a set and that are neither in it nor beneath: mistyped in
// all likelihood, and what was meant stays in force. It looks at sets of the owner's own making, before the assignment;
// unknown ids of the catalogue are errors.
func (v *view) strays(o *owner, as *adminv1.Assignment) (warnings []string, err error) {
	if as.GetOperation() != adminv1.Operation_OPERATION_REMOVE {
		return nil, nil
	}
	key := as.GetKey()
	canon := func(s string) string { return s }
	var members func(*userv1.Settings) []string
	switch key {
	case "schedules":
		members = func(s *userv1.Settings) []string {
			return keysOf(s.GetSchedules().GetValues(), (*userv1.Schedule).GetId)
		}
	case "own_lists":
		members = func(s *userv1.Settings) []string { return keysOf(s.GetOwnLists().GetValues(), (*userv1.OwnList).GetId) }
	case "rewrites", "unblocks":
		members = func(s *userv1.Settings) []string {
			if key == "rewrites" {
				return keysOf(s.GetRewrites().GetValues(), (*userv1.Rewrite).GetName)
			}
			return keysOf(s.GetUnblocks().GetValues(), (*userv1.Unblock).GetName)
		}
		canon = func(s string) string {
			rest, star := strings.CutPrefix(s, "*.")
			n, _ := canonicalName(key, rest) // what is no name is refused when it is assigned
			if star && key == "rewrites" {
				return "*." + n
			}
			return n
		}
	default:
		return nil, nil
	}
	layers, err := v.layersOf(o)
	if err != nil {
		return nil, err
	}
	var have []string
	for _, l := range layers {
		have = append(have, members(l)...)
	}
	slices.Sort(have)
	have = slices.Compact(have)
	there := "there are none"
	switch {
	case len(have) > 8:
		there = fmt.Sprintf("there are %d", len(have))
	case len(have) > 0:
		there = "there are " + strings.Join(have, ", ")
	}
	for _, text := range splitList(as.GetValue()) {
		if !slices.Contains(have, canon(text)) {
			warnings = append(warnings, fmt.Sprintf("%s: there is no %q to take away; %s", key, text, there))
		}
	}
	return warnings, nil
}

// keysOf are the keys of the members of a set.
func keysOf[T any](values []T, key func(T) string) (keys []string) {
	for _, x := range values {
		keys = append(keys, key(x))
	}
	return keys
}

// layersOf are the settings that count for an owner, the ones that override others first.
func (v *view) layersOf(o *owner) ([]*userv1.Settings, error) {
	all := []*userv1.Settings{*o.settings}
	if o.user == nil {
		return all, nil
	}
	if o.device != "" {
		all = append(all, o.user.Settings)
	}
	p := new(userv1.Policy)
	if o.user.Policy != "" {
		if _, _, err := v.load(Catalogue, "policy/"+o.user.Policy, p); err != nil {
			return nil, err
		}
	}
	return append(all, p.Settings), nil
}
