package usercache

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
	_ "time/tzdata" // schedules must mean the same on a machine without zone files

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"google.golang.org/protobuf/proto"
)

// A Catalogue is what users refer to: shared policies, filter lists, services, categories and safe-search
// engines. It is an immutable snapshot; a change of the dataset makes a new one, and so applies to all users
// of a policy at once.
type Catalogue struct {
	// Revision of the dataset.
	Revision uint64
	// Lists, Services and Categories are in order of number. No two have the same one: of records that
	// claim a number, the one of the highest revision, then the lowest key, has it.
	Lists      []CatalogueList
	Services   []Service
	Categories []Category
	// SafeSearch engines are in order of number; at most 64 are used. Their records have none: an engine keeps in
	// this process the one it was given when it came, so that profiles made before another came still mean it.
	SafeSearch []SafeSearch

	serial uint64 // of the snapshot, in this process

	listNumber     map[string]int
	serviceNumber  map[string]int
	categoryNumber map[string]int
	engineNumber   map[string]int

	// since has by number the revision at which it came to mean what it means, zero if it has done so as long as
	// this process knows.
	since struct {
		lists    [MaxLists]uint64
		services [MaxServices]uint64
		engines  [maxEngines]uint64
	}

	// By number, for laying settings over each other.
	categoryLists   [MaxCategories]ListSet
	categoryThreats [MaxCategories]ListSet
	safeBrowsing    CategorySet
	adult           CategorySet

	defaults policy
	policies map[string]*policy
}

// A CatalogueList is a filter list by content.
type CatalogueList struct {
	ID       string
	Number   int
	Name     string
	SHA256   [32]byte
	Size     uint64
	Rules    int
	Updated  int64 // Unix seconds
	Homepage string
	Tenant   string
}

// A Service is something people know by one name and that many domain names serve.
type Service struct {
	ID     string
	Number int
	Name   string
	Group  string
	Rules  []string
}

// A Category is a kind of content that can be blocked as one.
type Category struct {
	ID     string
	Number int
	Name   string
	Lists  ListSet
	// Threat: an exception in a catalogue list does not lift it.
	Threat bool
	// Required: somebody else demands of the operator that it be blocked.
	Required bool
}

// A SafeSearch is how one engine is held to its safe mode.
type SafeSearch struct {
	ID       string
	Number   int
	Name     string
	Rewrites []Rewrite
}

// A policy is a shared policy, ready to be laid under a user.
type policy struct {
	profile  Profile     // laid over the defaults, categories not yet expanded
	all      CategorySet // profile.Categories with those of safe browsing and adult content
	lists    ListSet     // what they add to Lists
	threats  ListSet     // and to Threats
	message  *userv1.Policy
	revision uint64
	// asksNames: its rules may ask what a device is called.
	asksNames bool
}

// ListNumber returns the number of a list.
func (c *Catalogue) ListNumber(id string) (n int, ok bool) { n, ok = c.listNumber[id]; return n, ok }

// ServiceNumber returns the number of a service.
func (c *Catalogue) ServiceNumber(id string) (n int, ok bool) {
	n, ok = c.serviceNumber[id]
	return n, ok
}

// CategoryNumber returns the number of a category.
func (c *Catalogue) CategoryNumber(id string) (n int, ok bool) {
	n, ok = c.categoryNumber[id]
	return n, ok
}

// List returns the list of a number, or nil.
func (c *Catalogue) List(n int) *CatalogueList {
	i, ok := slices.BinarySearchFunc(c.Lists, n, func(l CatalogueList, n int) int { return cmp.Compare(l.Number, n) })
	if !ok {
		return nil
	}
	return &c.Lists[i]
}

// Numbers are some of the numbers by which profiles name what is in the catalogue.
type Numbers struct {
	Lists      ListSet
	Services   ServiceSet
	SafeSearch uint64
}

// IsEmpty reports whether there are none.
func (n *Numbers) IsEmpty() bool { return *n == Numbers{} }

// Renumbered returns the numbers that mean something else here than in the catalogue of an earlier revision: they
// are given again when what had them is gone.
func (c *Catalogue) Renumbered(since uint64) (n Numbers) {
	for i, r := range &c.since.lists {
		if r > since {
			n.Lists.Add(i)
		}
	}
	for i, r := range &c.since.services {
		if r > since {
			n.Services.Add(i)
		}
	}
	for i, r := range &c.since.engines {
		if r > since {
			n.SafeSearch |= 1 << i
		}
	}
	return n
}

// Engine returns the id of the safe-search engine of a number, "" if there is none.
func (c *Catalogue) Engine(n int) string {
	for _, e := range c.SafeSearch {
		if e.Number == n {
			return e.ID
		}
	}
	return ""
}

// Policy lays the named shared policy over the defaults, as for a client that nobody identified but that is
// served by a policy (`stranger`, `users.when_cold`). It reports false if there is no such policy.
func (c *Catalogue) Policy(id string) (Profile, bool) {
	pol := c.policies[id]
	if pol == nil {
		return Profile{}, false
	}
	p := pol.profile
	p.Categories = pol.all
	p.Lists.AddAll(&pol.lists)
	p.Threats.AddAll(&pol.threats)
	return p, true
}

// catalogueRecord is one record of the dataset, decoded.
type catalogueRecord struct {
	key      string
	revision uint64
	message  proto.Message
}

// decodeCatalogue decodes and checks a record of the catalogue. A kind of record this version does not know
// is no fault, and nil.
func decodeCatalogue(key, b []byte) (proto.Message, error) {
	kind, id, ok := bytes.Cut(key, []byte("/"))
	if !ok {
		return nil, nil
	}
	if i, ok := ParseID(id); !ok && (string(kind) == "policy" || string(kind) == "list") || ok && i.String() != string(id) {
		return nil, fmt.Errorf("id %q is not 1-63 of a-z 0-9 -", clip(id))
	}
	switch string(kind) {
	case "policy":
		m := new(userv1.Policy)
		if err := proto.Unmarshal(b, m); err != nil {
			return nil, errBroken
		}
		return m, checkPolicy(b)
	case "list":
		m := new(userv1.List)
		if err := proto.Unmarshal(b, m); err != nil {
			return nil, errBroken
		}
		if m.Number >= MaxLists {
			return nil, fmt.Errorf("list number %d is not below %d", m.Number, MaxLists)
		}
		if len(m.Sha256) != 32 {
			return nil, errors.New("the list's hash is not of 32 bytes")
		}
		return m, nil
	case "service":
		m := new(userv1.Service)
		if err := proto.Unmarshal(b, m); err != nil {
			return nil, errBroken
		}
		if m.Number >= MaxServices {
			return nil, fmt.Errorf("service number %d is not below %d", m.Number, MaxServices)
		}
		return m, nil
	case "category":
		m := new(userv1.Category)
		if err := proto.Unmarshal(b, m); err != nil {
			return nil, errBroken
		}
		if m.Number >= MaxCategories {
			return nil, fmt.Errorf("category number %d is not below %d", m.Number, MaxCategories)
		}
		return m, nil
	case "safesearch":
		m := new(userv1.SafeSearch)
		if err := proto.Unmarshal(b, m); err != nil {
			return nil, errBroken
		}
		return m, nil
	}
	return nil, nil
}

// checkPolicy checks the settings and rules of a Policy.
func checkPolicy(b []byte) error {
	for {
		f, rest, ok := nextField(b)
		if !ok {
			if len(rest) != 0 {
				return errBroken
			}
			return nil
		}
		b = rest
		switch f.num {
		case 2:
			if _, err := checkSettings(f); err != nil {
				return err
			}
		case 3:
			if err := checkRules(f); err != nil {
				return err
			}
		}
	}
}

// maxEngines is how many engines a profile can name.
const maxEngines = 64

// newCatalogue builds a snapshot of the records that can be used, to follow another; nil if it is the first.
func newCatalogue(revision uint64, records map[string]*catalogueRecord, before *Catalogue) *Catalogue {
	c := &Catalogue{
		Revision:       revision,
		listNumber:     make(map[string]int),
		serviceNumber:  make(map[string]int),
		categoryNumber: make(map[string]int),
		engineNumber:   make(map[string]int),
		policies:       make(map[string]*policy),
	}
	// In this order the first to claim a number has it.
	sorted := make([]*catalogueRecord, 0, len(records))
	for _, r := range records {
		sorted = append(sorted, r)
	}
	slices.SortFunc(sorted, func(a, b *catalogueRecord) int {
		return cmp.Or(cmp.Compare(b.revision, a.revision), strings.Compare(a.key, b.key))
	})
	var lists ListSet
	var services ServiceSet
	var categories CategorySet
	for _, r := range sorted {
		_, id, _ := strings.Cut(r.key, "/")
		switch m := r.message.(type) {
		case *userv1.List:
			n := int(m.Number)
			if lists.Has(n) {
				continue
			}
			lists.Add(n)
			c.listNumber[id] = n
			c.Lists = append(c.Lists, CatalogueList{
				ID: id, Number: n, Name: m.Name, SHA256: [32]byte(m.Sha256), Size: m.Size, Rules: int(m.Rules),
				Updated: m.Updated, Homepage: m.Homepage, Tenant: m.Tenant,
			})
		case *userv1.Service:
			n := int(m.Number)
			if services.Has(n) {
				continue
			}
			services.Add(n)
			c.serviceNumber[id] = n
			c.Services = append(c.Services, Service{ID: id, Number: n, Name: m.Name, Group: m.Group, Rules: m.Rules})
		case *userv1.SafeSearch:
			c.SafeSearch = append(c.SafeSearch, SafeSearch{ID: id, Name: m.Name, Rewrites: rewritesOf(m.Rewrites)})
		}
	}
	for _, r := range sorted { // categories name lists, so they come after
		m, ok := r.message.(*userv1.Category)
		if !ok || categories.Has(int(m.Number)) {
			continue
		}
		_, id, _ := strings.Cut(r.key, "/")
		n := int(m.Number)
		categories.Add(n)
		c.categoryNumber[id] = n
		cat := Category{ID: id, Number: n, Name: m.Name, Threat: m.Threat, Required: m.Required}
		for _, l := range m.Lists {
			if number, ok := c.listNumber[l]; ok {
				cat.Lists.Add(number)
			}
		}
		c.Categories = append(c.Categories, cat)
		if m.Threat {
			c.categoryThreats[n] = cat.Lists
		} else {
			c.categoryLists[n] = cat.Lists
		}
		if m.SafeBrowsing {
			c.safeBrowsing.Add(n)
		}
		if m.Adult {
			c.adult.Add(n)
		}
	}
	slices.SortFunc(c.Lists, func(a, b CatalogueList) int { return cmp.Compare(a.Number, b.Number) })
	slices.SortFunc(c.Services, func(a, b Service) int { return cmp.Compare(a.Number, b.Number) })
	slices.SortFunc(c.Categories, func(a, b Category) int { return cmp.Compare(a.Number, b.Number) })
	c.numberEngines(before)
	if before != nil {
		renumber(c.since.lists[:], before.since.lists[:], c.listNumber, before.listNumber, revision)
		renumber(c.since.services[:], before.since.services[:], c.serviceNumber, before.serviceNumber, revision)
		renumber(c.since.engines[:], before.since.engines[:], c.engineNumber, before.engineNumber, revision)
	}

	c.defaults.profile = Profile{
		Flags: Enabled | ECS, BlockTTL: 10, LogRetention: 86400, Catalogue: revision,
	}
	for _, r := range sorted {
		m, ok := r.message.(*userv1.Policy)
		if !ok {
			continue
		}
		_, id, _ := strings.Cut(r.key, "/")
		c.policies[id] = c.newPolicy(id, m, r.revision)
	}
	return c
}

// numberEngines gives those that were there before their numbers, and the others the lowest that are free, in order
// of id.
func (c *Catalogue) numberEngines(before *Catalogue) {
	slices.SortFunc(c.SafeSearch, func(a, b SafeSearch) int { return strings.Compare(a.ID, b.ID) })
	var taken [maxEngines]bool
	if before != nil {
		for _, e := range c.SafeSearch {
			if n, ok := before.engineNumber[e.ID]; ok {
				c.engineNumber[e.ID], taken[n] = n, true
			}
		}
	}
	numbered := c.SafeSearch[:0]
	for _, e := range c.SafeSearch {
		n, ok := c.engineNumber[e.ID]
		if !ok {
			if n = slices.Index(taken[:], false); n < 0 {
				continue
			}
			c.engineNumber[e.ID], taken[n] = n, true
		}
		e.Number = n
		numbered = append(numbered, e)
	}
	c.SafeSearch = numbered
	slices.SortFunc(c.SafeSearch, func(a, b SafeSearch) int { return cmp.Compare(a.Number, b.Number) })
}

// renumber fills in since: what it was before, but for the numbers that have come to something else.
func renumber(since, before []uint64, now, then map[string]int, revision uint64) {
	copy(since, before)
	for id, n := range now {
		if was, ok := then[id]; !ok || was != n {
			since[n] = revision
		}
	}
	for id, n := range then {
		if is, ok := now[id]; !ok || is != n {
			since[n] = revision
		}
	}
}

func (c *Catalogue) newPolicy(id string, m *userv1.Policy, revision uint64) *policy {
	pol := &policy{profile: c.defaults.profile, message: m, revision: revision}
	p := &pol.profile
	if m.Settings != nil {
		b, err := proto.Marshal(m.Settings)
		if err == nil { // cannot fail: it was unmarshalled
			c.lay(p, b)
		}
	}
	layers := [3]layer{policyLayer: {settings: m.GetSettings(), rules: m.GetRules(), name: id}}
	if d := c.newDetails(&layers, nil); !d.isEmpty() {
		p.Details = d
	}
	r := m.GetRules()
	pol.asksNames = len(r.GetSha256()) > 0 || bytes.Contains(r.GetText(), []byte("client="))
	pol.all = c.allCategories(p)
	c.expand(&pol.all, &pol.lists, &pol.threats)
	return pol
}

// allCategories returns the categories chosen and those of safe browsing and adult content.
func (c *Catalogue) allCategories(p *Profile) CategorySet {
	s := p.Categories
	if p.Is(SafeBrowsing) {
		s.AddAll(&c.safeBrowsing)
	}
	if p.Is(Adult) {
		s.AddAll(&c.adult)
	}
	return s
}

// expand adds the lists of categories.
func (c *Catalogue) expand(s *CategorySet, lists, threats *ListSet) {
	for i, w := range s {
		for ; w != 0; w &= w - 1 {
			n := i*64 + trailing(w)
			lists.AddAll(&c.categoryLists[n])
			threats.AddAll(&c.categoryThreats[n])
		}
	}
}

func rewritesOf(ms []*userv1.Rewrite) []Rewrite {
	var rs []Rewrite
	for _, m := range ms {
		rs = append(rs, Rewrite{Name: strings.ToLower(m.GetName()), Records: m.GetRecords(), TTL: m.GetTtl()})
	}
	return rs
}

// checkSet checks one of the sets of messages of a Settings.
func checkSet(num uint32, b []byte) error {
	switch num {
	case 8:
		m := new(userv1.OwnListSet)
		if err := proto.Unmarshal(b, m); err != nil {
			return errBroken
		}
		for _, l := range m.Values {
			if len(l.Sha256) != 32 {
				return fmt.Errorf("own list %q: its hash is not of 32 bytes", l.Id)
			}
		}
	case 14:
		m := new(userv1.ScheduleSet)
		if err := proto.Unmarshal(b, m); err != nil {
			return errBroken
		}
		for _, s := range m.Values {
			if err := checkSchedule(s); err != nil {
				return err
			}
		}
	case 15:
		m := new(userv1.RewriteSet)
		if err := proto.Unmarshal(b, m); err != nil {
			return errBroken
		}
	case 16:
		m := new(userv1.UnblockSet)
		if err := proto.Unmarshal(b, m); err != nil {
			return errBroken
		}
	}
	return nil
}

func checkSchedule(s *userv1.Schedule) error {
	switch s.Action {
	case userv1.ScheduleAction_SCHEDULE_ACTION_BLOCK, userv1.ScheduleAction_SCHEDULE_ACTION_PAUSE:
	default:
		return fmt.Errorf("schedule %q: action %d is unknown to this version", s.Id, s.Action)
	}
	if _, err := location(s.TimeZone); err != nil {
		return fmt.Errorf("schedule %q: time zone %q is unknown here", s.Id, s.TimeZone)
	}
	if len(s.Windows) > maxWindows {
		return fmt.Errorf("schedule %q: more than %d windows", s.Id, maxWindows)
	}
	for _, w := range s.Windows {
		if w.Days > 0x7f || w.From >= minutesPerDay || w.To <= w.From || w.To > 2*minutesPerDay {
			return fmt.Errorf("schedule %q: window from minute %d to %d on days %#x is none", s.Id, w.From, w.To, w.Days)
		}
	}
	return nil
}

// locations remembers time zones by name: loading one reads and parses a file.
var locations sync.Map

func location(name string) (*time.Location, error) {
	if l, ok := locations.Load(name); ok {
		return l.(*time.Location), nil
	}
	if name == "Local" { // wherever this machine happens to be
		return nil, errors.New("it is no zone of the time zone database")
	}
	l, err := time.LoadLocation(name)
	if err == nil {
		locations.Store(name, l)
	}
	return l, err
}

// A layer is what one of device, user and policy says beyond what has a fixed size.
type layer struct {
	settings *userv1.Settings
	rules    *userv1.Rules
	tags     []string
	name     string // the device's; the policy's id
}

const (
	deviceLayer = 0
	userLayer   = 1
	policyLayer = 2
)

// newDetails merges the layers.
func (c *Catalogue) newDetails(layers *[3]layer, policyRules *RuleText) *Details {
	d := &Details{
		Name:        layers[deviceLayer].name,
		Policy:      layers[policyLayer].name,
		DeviceRules: ruleTextOf(layers[deviceLayer].rules),
		UserRules:   ruleTextOf(layers[userLayer].rules),
		PolicyRules: ruleTextOf(layers[policyLayer].rules),
		Tags:        layers[deviceLayer].tags,
	}
	if policyRules != nil {
		d.PolicyRules = *policyRules
	}
	var own set[OwnList]
	var schedules set[Schedule]
	var rewrites set[Rewrite]
	var unblocks set[Unblock]
	var allow, deny, types, allowNames, denyNames, private set[struct{}]
	for i := policyLayer; i >= deviceLayer; i-- {
		s := layers[i].settings
		if s == nil {
			continue
		}
		if m := s.OwnLists; m != nil {
			own.begin(m.Replace, m.Removed)
			for _, l := range m.Values {
				if len(l.GetSha256()) == 32 {
					own.put(l.Id, OwnList{ID: l.Id, SHA256: [32]byte(l.Sha256), Size: l.Size, OfPolicy: i == policyLayer})
				}
			}
		}
		if m := s.Schedules; m != nil {
			schedules.begin(m.Replace, m.Removed)
			for _, v := range m.Values {
				if sc, ok := c.schedule(v); ok {
					schedules.put(v.Id, sc)
				}
			}
		}
		if m := s.Rewrites; m != nil {
			rewrites.begin(m.Replace, m.Removed)
			for _, r := range rewritesOf(m.Values) {
				rewrites.put(r.Name, r)
			}
		}
		if m := s.Unblocks; m != nil {
			unblocks.begin(m.Replace, m.Removed)
			for _, u := range m.Values {
				name := strings.ToLower(u.GetName())
				unblocks.put(name, Unblock{Name: name, Subtree: u.GetSubtree(), Until: u.GetUntil()})
			}
		}
		allow.texts(s.AllowNetworks)
		deny.texts(s.DenyNetworks)
		types.texts(s.BlockTypes)
		allowNames.texts(s.AllowDomains)
		denyNames.texts(s.DenyDomains)
		private.texts(s.RebindingExceptions)
	}
	d.OwnLists, d.Schedules = own.values(), schedules.values()
	d.Rewrites, d.Unblocks = rewrites.values(), unblocks.values()
	d.AllowNetworks, d.DenyNetworks = networks(allow.keys()), networks(deny.keys())
	d.BlockTypes = types.keys()
	d.AllowDomains, d.DenyDomains, d.RebindingExceptions = newDomains(allowNames.keys()), newDomains(denyNames.keys()), newDomains(private.keys())
	return d
}

// isEmpty reports whether there is nothing that a name would be for, either.
func (d *Details) isEmpty() bool {
	return d.DeviceRules.Size == 0 && d.UserRules.Size == 0 && d.PolicyRules.Size == 0 &&
		len(d.OwnLists) == 0 && len(d.Schedules) == 0 && len(d.Rewrites) == 0 && len(d.Unblocks) == 0 &&
		len(d.AllowNetworks) == 0 && len(d.DenyNetworks) == 0 && len(d.BlockTypes) == 0 && len(d.Tags) == 0 &&
		len(d.AllowDomains) == 0 && len(d.DenyDomains) == 0 && len(d.RebindingExceptions) == 0
}

func (c *Catalogue) schedule(m *userv1.Schedule) (Schedule, bool) {
	if m == nil || checkSchedule(m) != nil {
		return Schedule{}, false
	}
	loc, err := location(m.TimeZone)
	if err != nil {
		return Schedule{}, false
	}
	s := Schedule{
		ID: m.Id, Location: loc, Everything: m.Everything,
		Pause: m.Action == userv1.ScheduleAction_SCHEDULE_ACTION_PAUSE,
	}
	for _, w := range m.Windows {
		s.Windows = append(s.Windows, Window{Days: uint8(w.Days), From: uint16(w.From), To: uint16(w.To)})
	}
	for _, id := range m.Services {
		if n, ok := c.serviceNumber[id]; ok {
			s.Services.Add(n)
		}
	}
	for _, id := range m.Lists {
		if n, ok := c.listNumber[id]; ok {
			s.Lists.Add(n)
		}
	}
	for _, id := range m.Categories {
		if n, ok := c.categoryNumber[id]; ok {
			s.Categories.Add(n)
		}
	}
	c.expand(&s.Categories, &s.Lists, &s.Threats)
	return s, true
}

func networks(texts []string) []netip.Prefix {
	var ps []netip.Prefix
	for _, t := range texts {
		if p, err := parsePrefix(t); err == nil {
			ps = append(ps, p)
		}
	}
	return ps
}

// A set merges the layers of a "…Set" message: result = (replace ? nothing : beneath) + values - removed.
type set[T any] struct{ m map[string]T }

func (s *set[T]) begin(replace bool, removed []string) {
	if replace {
		s.m = nil
	}
	for _, r := range removed {
		delete(s.m, r)
	}
}

func (s *set[T]) put(key string, v T) {
	if s.m == nil {
		s.m = make(map[string]T)
	}
	s.m[key] = v
}

func (s *set[T]) keys() []string {
	keys := make([]string, 0, len(s.m))
	for k := range s.m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func (s *set[T]) values() []T {
	if len(s.m) == 0 {
		return nil
	}
	vs := make([]T, 0, len(s.m))
	for _, k := range s.keys() {
		vs = append(vs, s.m[k])
	}
	return vs
}

func (s *set[T]) texts(m *userv1.StringSet) {
	if m == nil {
		return
	}
	s.begin(m.Replace, m.Removed)
	for _, v := range m.Values {
		var zero T
		s.put(v, zero)
	}
}
