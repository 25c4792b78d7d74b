package bizlogic

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"strings"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
)

const (
	maxServices     = 512
	maxCategories   = 256
	maxSafeSearch   = 64
	maxServiceRules = 5000
	maxEntryLists   = 128
	maxEntryNames   = 2000 // rewrites of one engine
)

// entryServer keeps services, categories and engines' safe search: the entries of the catalogue.
type entryServer struct {
	adminv1.UnimplementedCatalogueServiceServer
	s *Service
}

// An entryKind is one of the kinds of entries.
type entryKind struct {
	what string // before the slash in a record's key
	most int
	make func() proto.Message
}

var entryKinds = map[adminv1.EntryKind]entryKind{
	adminv1.EntryKind_ENTRY_KIND_SERVICE:     {"service", maxServices, func() proto.Message { return new(userv1.Service) }},
	adminv1.EntryKind_ENTRY_KIND_CATEGORY:    {"category", maxCategories, func() proto.Message { return new(userv1.Category) }},
	adminv1.EntryKind_ENTRY_KIND_SAFE_SEARCH: {"safesearch", maxSafeSearch, func() proto.Message { return new(userv1.SafeSearch) }},
}

func entryKindOf(k adminv1.EntryKind) (entryKind, error) {
	kind, ok := entryKinds[k]
	if !ok {
		return kind, invalid("kind", "is none of service, category, safe_search")
	}
	return kind, nil
}

// kindOfKey is the kind of a record of the catalogue; ok is false if it is no entry.
func kindOfKey(key string) (kind entryKind, ok bool) {
	what, _, _ := strings.Cut(key, "/")
	for _, k := range entryKinds {
		if k.what == what {
			return k, true
		}
	}
	return kind, false
}

func (a entryServer) ListEntries(_ context.Context, req *adminv1.ListEntriesRequest) (*adminv1.ListEntriesResponse, error) {
	kind, err := entryKindOf(req.GetKind())
	if err != nil {
		return nil, err
	}
	resp := new(adminv1.ListEntriesResponse)
	resp.Entries, err = a.s.entries(kind)
	return resp, err
}

func (s *Service) entries(kind entryKind) (all []*adminv1.CatalogueEntry, err error) {
	err = s.db.View(func(tx *bolt.Tx) error {
		return eachOf(tx, kind.what+"/", func(id string, revision uint64, b []byte) error {
			m := kind.make()
			if err := proto.Unmarshal(b, m); err != nil {
				return err
			}
			e, err := (&view{tx: tx}).showEntry(kind.what+"/"+id, revision, m)
			all = append(all, e)
			return err
		})
	})
	return all, reading(err)
}

// ownEntries is the entries in which there is something of the operator's.
func (s *Service) ownEntries() ([]*adminv1.CatalogueEntry, error) {
	var all []*adminv1.CatalogueEntry
	for _, k := range []adminv1.EntryKind{adminv1.EntryKind_ENTRY_KIND_SERVICE, adminv1.EntryKind_ENTRY_KIND_CATEGORY, adminv1.EntryKind_ENTRY_KIND_SAFE_SEARCH} {
		some, err := s.entries(entryKinds[k])
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return slices.DeleteFunc(all, func(e *adminv1.CatalogueEntry) bool {
		return e.Origin == adminv1.Origin_ORIGIN_BUILT_IN && len(e.GetCategory().GetLists()) == 0
	}), nil
}

func (a entryServer) GetEntry(_ context.Context, req *adminv1.GetEntryRequest) (*adminv1.GetEntryResponse, error) {
	kind, err := entryKindOf(req.GetKind())
	if err != nil {
		return nil, err
	}
	if err := checkID("id", req.GetId()); err != nil {
		return nil, err
	}
	resp := new(adminv1.GetEntryResponse)
	_, resp.Entry, err = a.s.loadEntry(kind, req.GetId())
	if err == nil && resp.Entry == nil {
		err = notFound(kind.what, req.GetId())
	}
	return resp, err
}

// loadEntry reads an entry; the one returned for showing is nil if there is none, the other is then empty.
func (s *Service) loadEntry(kind entryKind, id string) (m proto.Message, shown *adminv1.CatalogueEntry, err error) {
	m = kind.make()
	err = s.db.View(func(tx *bolt.Tx) error {
		v := &view{tx: tx}
		revision, ok, err := v.load(Catalogue, kind.what+"/"+id, m)
		if err == nil && ok {
			shown, err = v.showEntry(kind.what+"/"+id, revision, m)
		}
		return err
	})
	return m, shown, reading(err)
}

func (a entryServer) SetEntry(ctx context.Context, req *adminv1.SetEntryRequest) (*adminv1.SetEntryResponse, error) {
	kind, err := entryKindOf(req.GetKind())
	if err != nil {
		return nil, err
	}
	if err := checkID("id", req.GetId()); err != nil {
		return nil, err
	}
	if len(req.GetAssignments()) == 0 {
		return nil, invalid("assignments", "there are none")
	}
	m, shown, err := a.s.loadEntry(kind, req.GetId())
	if err != nil {
		return nil, err
	}
	have := shown.GetRevision()
	if err := checkRevision(have, req.GetIfRevision()); err != nil {
		return nil, err
	}
	for _, as := range req.GetAssignments() {
		if err := assignEntry(m, as); err != nil {
			return nil, err
		}
	}
	if err := a.s.checkEntryBody(req.GetId(), m); err != nil {
		return nil, err
	}
	revision, e, err := a.s.storeEntry(ctx, kind, req.GetId(), m, func(v *view, now uint64) error {
		if now != have {
			return status.Error(codes.Aborted, "the entry has been changed meanwhile; try again")
		}
		return nil
	})
	return &adminv1.SetEntryResponse{Revision: revision, Dataset: Catalogue, Entry: e}, err
}

// storeEntry puts an entry, if before agrees to what is there.
func (s *Service) storeEntry(ctx context.Context, kind entryKind, id string, m proto.Message, before func(v *view, have uint64) error) (revision uint64, e *adminv1.CatalogueEntry, err error) {
	key := kind.what + "/" + id
	var have uint64
	revision, err = s.change(ctx, func(v *view) error {
		now, _, ok, err := v.get(Catalogue, key)
		if err != nil {
			return err
		}
		if !ok {
			now = 0
		}
		have = now
		if err := before(v, now); err != nil {
			return err
		}
		return v.putEntry(key, m)
	})
	if err != nil {
		return 0, nil, err
	}
	if _, e, err = s.loadEntry(kind, id); err != nil {
		return 0, nil, err
	}
	return cmp.Or(revision, have), e, nil
}

// assignEntry makes one KEY=V, KEY+=V or KEY-=V of an entry.
func assignEntry(m proto.Message, as *adminv1.Assignment) (err error) {
	key, value, op := as.GetKey(), strings.TrimSpace(as.GetValue()), as.GetOperation()
	switch op {
	case adminv1.Operation_OPERATION_SET, adminv1.Operation_OPERATION_ADD, adminv1.Operation_OPERATION_REMOVE:
	default:
		return invalid("operation", "of %q is none of =, += and -=", key)
	}
	text := map[string]*string{}
	flag := map[string]*bool{}
	sets := map[string]func() error{}
	plain := func(values *[]string, most int, check func(string) (string, error), split bool) func() error {
		return func() error {
			texts := []string{value}
			if split {
				texts = splitList(value)
			}
			if value == "-" || value == "" {
				texts = nil
			}
			replace, removed := false, []string(nil)
			return set[string]{key, most, &replace, values, &removed, func(s string) string { return s }, check, check}.change(op, texts, true)
		}
	}
	switch m := m.(type) {
	case *userv1.Service:
		text["name"], text["group"] = &m.Name, &m.Group
		sets["rules"] = plain(&m.Rules, maxServiceRules, func(s string) (string, error) { return s, nil }, false)
	case *userv1.Category:
		text["name"] = &m.Name
		flag["threat"], flag["safe_browsing"], flag["adult"], flag["required"] = &m.Threat, &m.SafeBrowsing, &m.Adult, &m.Required
		sets["lists"] = plain(&m.Lists, maxEntryLists, func(s string) (string, error) { return s, checkID("lists", s) }, true)
	case *userv1.SafeSearch:
		text["name"] = &m.Name
		sets["rewrites"] = func() error {
			texts := splitList(value)
			if value == "-" || value == "" {
				texts = nil
			}
			replace, removed := false, []string(nil)
			name := func(s string) (string, error) {
				rest, star := strings.CutPrefix(s, "*.")
				n, err := canonicalName(key, rest)
				if star {
					n = "*." + n
				}
				return n, err
			}
			return set[*userv1.Rewrite]{key, maxEntryNames, &replace, &m.Rewrites, &removed, (*userv1.Rewrite).GetName, parseRewrite, name}.change(op, texts, true)
		}
	}
	if change := sets[key]; change != nil {
		return change()
	}
	t, f := text[key], flag[key]
	switch {
	case t == nil && f == nil:
		keys := slices.Concat(sortedKeys(text), sortedKeys(flag), sortedKeys(sets))
		return invalid("key", "there is no %q here; there are %s", key, strings.Join(keys, ", "))
	case op != adminv1.Operation_OPERATION_SET:
		return invalid(key, "is not a set; only %s=VALUE works", key)
	case t != nil:
		*t = value
	default:
		*f, err = parseBool(key, value)
	}
	return err
}

func splitList(value string) (texts []string) {
	for text := range strings.SplitSeq(value, ",") {
		texts = append(texts, strings.TrimSpace(text))
	}
	return texts
}

// entryBody is the message of an entry, nil if it has none, and its kind.
func entryBody(e *adminv1.CatalogueEntry) (m proto.Message, kind entryKind) {
	switch b := e.GetBody().(type) {
	case *adminv1.CatalogueEntry_Service:
		return b.Service, entryKinds[adminv1.EntryKind_ENTRY_KIND_SERVICE]
	case *adminv1.CatalogueEntry_Category:
		return b.Category, entryKinds[adminv1.EntryKind_ENTRY_KIND_CATEGORY]
	case *adminv1.CatalogueEntry_SafeSearch:
		return b.SafeSearch, entryKinds[adminv1.EntryKind_ENTRY_KIND_SAFE_SEARCH]
	}
	return nil, kind
}

// checkEntry checks an entry that came whole, as in an import.
func (s *Service) checkEntry(e *adminv1.CatalogueEntry) error {
	if err := checkID("entry.id", e.GetId()); err != nil {
		return err
	}
	m, _ := entryBody(e)
	if m == nil {
		return invalid("entry", "%s has none of service, category, safe_search", e.GetId())
	}
	return s.checkEntryBody(e.GetId(), m)
}

// checkEntryBody checks what can be checked without the store, and brings it into the form that is stored.
func (s *Service) checkEntryBody(id string, m proto.Message) error {
	named := m.(interface{ GetName() string })
	if err := checkText("name", named.GetName(), maxName); err != nil {
		return err
	}
	switch m := m.(type) {
	case *userv1.Service:
		if err := checkText("group", m.Group, 63); err != nil {
			return err
		}
		if len(m.Rules) == 0 || len(m.Rules) > maxServiceRules {
			return invalid("rules", "are %d; a service has 1 to %d", len(m.Rules), maxServiceRules)
		}
		for i, r := range m.Rules {
			if m.Rules[i] = strings.TrimSpace(r); m.Rules[i] == "" || strings.ContainsAny(r, "\r\n") {
				return invalid("rules", "%.100q is not one line", r)
			}
		}
		report, err := s.opts.Compile("service/"+id, strings.NewReader(strings.Join(m.Rules, "\n")+"\n"))
		if err != nil {
			return invalid("rules", "%v", err)
		}
		if len(report.Complaints) > 0 {
			return invalid("rules", "%q cannot be used: %s", cut(report.Complaints[0].Text, 200), report.Complaints[0].What)
		}
		if report.NotList != "" {
			return invalid("rules", "%s", report.NotList)
		}
	case *userv1.Category:
		if len(m.Lists) > maxEntryLists {
			return invalid("lists", "are %d; at most %d", len(m.Lists), maxEntryLists)
		}
	case *userv1.SafeSearch:
		if len(m.Rewrites) == 0 || len(m.Rewrites) > maxEntryNames {
			return invalid("rewrites", "are %d; an engine has 1 to %d", len(m.Rewrites), maxEntryNames)
		}
		for _, r := range m.Rewrites {
			if err := checkRewrite("rewrites", r); err != nil {
				return err
			}
		}
	}
	return nil
}

// putEntry stages an entry under its own number, or the lowest free one.
func (v *view) putEntry(key string, m proto.Message) error {
	kind, _ := kindOfKey(key)
	m = proto.Clone(m)
	if c, ok := m.(*userv1.Category); ok {
		for _, id := range c.Lists {
			if err := v.refer("lists", "list", id); err != nil {
				return err
			}
		}
	}
	old := kind.make()
	_, ok, err := v.load(Catalogue, key, old)
	if err != nil {
		return err
	}
	n := number(old)
	if !ok {
		if n, err = v.freeNumber(kind); err != nil {
			return err
		}
	}
	setNumber(m, n)
	return v.put(Catalogue, key, m)
}

func (v *view) importEntry(e *adminv1.CatalogueEntry) error {
	m, kind := entryBody(e)
	return v.putEntry(kind.what+"/"+e.Id, m)
}

// number is that of an entry or list, by which it is a bit of a policy. Safe searches have none in their record.
func number(m proto.Message) uint32 {
	if n, ok := m.(interface{ GetNumber() uint32 }); ok {
		return n.GetNumber()
	}
	return 0
}

func setNumber(m proto.Message, n uint32) {
	switch m := m.(type) {
	case *userv1.Service:
		m.Number = n
	case *userv1.Category:
		m.Number = n
	}
}

// freeNumber takes the lowest number that nothing of a kind has.
func (v *view) freeNumber(kind entryKind) (uint32, error) {
	taken := v.taken[kind.what]
	if taken == nil {
		taken = make([]bool, kind.most)
		count := 0
		err := eachOf(v.tx, kind.what+"/", func(_ string, _ uint64, b []byte) error {
			m := kind.make()
			if err := proto.Unmarshal(b, m); err != nil {
				return err
			}
			n := number(m)
			if _, ok := m.(*userv1.SafeSearch); ok {
				n = uint32(count) // has none: only how many there are matters
			}
			if count++; n < uint32(kind.most) {
				taken[n] = true
			}
			return nil
		})
		if err != nil {
			return 0, err
		}
		if v.taken == nil {
			v.taken = map[string][]bool{}
		}
		v.taken[kind.what] = taken
	}
	i := slices.Index(taken, false)
	if i < 0 {
		return 0, refused("there are %d of kind %s, and no more are possible; delete one that nobody needs first", kind.most, kind.what)
	}
	taken[i] = true
	return uint32(i), nil
}

func (v *view) showEntry(key string, revision uint64, m proto.Message) (*adminv1.CatalogueEntry, error) {
	_, id, _ := strings.Cut(key, "/")
	e := &adminv1.CatalogueEntry{Id: id, Revision: revision}
	switch m := m.(type) {
	case *userv1.Service:
		e.Body = &adminv1.CatalogueEntry_Service{Service: m}
	case *userv1.Category:
		e.Body = &adminv1.CatalogueEntry_Category{Category: m}
	case *userv1.SafeSearch:
		e.Body = &adminv1.CatalogueEntry_SafeSearch{SafeSearch: m}
	}
	given, err := v.seeded(key)
	if err != nil {
		return nil, err
	}
	have, err := seedHash(m)
	switch {
	case given == nil:
		e.Origin = adminv1.Origin_ORIGIN_OPERATOR
	case bytes.Equal(given, have):
		e.Origin = adminv1.Origin_ORIGIN_BUILT_IN
	default:
		e.Origin = adminv1.Origin_ORIGIN_CHANGED
	}
	return e, err
}

func (a entryServer) DeleteEntry(ctx context.Context, req *adminv1.DeleteEntryRequest) (*adminv1.DeleteEntryResponse, error) {
	kind, err := entryKindOf(req.GetKind())
	if err != nil {
		return nil, err
	}
	revision, err := a.s.removeNamed(ctx, kind.what, req.GetId(), req.GetIfRevision(), func(*view) error { return nil })
	if err != nil {
		return nil, err
	}
	return &adminv1.DeleteEntryResponse{Revision: revision, Dataset: Catalogue}, nil
}

func (a entryServer) ResetEntry(ctx context.Context, req *adminv1.ResetEntryRequest) (*adminv1.ResetEntryResponse, error) {
	kind, err := entryKindOf(req.GetKind())
	if err != nil {
		return nil, err
	}
	m := startingCatalogue()[kind.what+"/"+req.GetId()]
	if m == nil {
		return nil, notFound(kind.what+" of the starting catalogue", req.GetId())
	}
	if c, ok := m.(*userv1.Category); ok { // what fills it is the operator's in any case
		now, _, err := a.s.loadEntry(kind, req.GetId())
		if err != nil {
			return nil, err
		}
		c = proto.CloneOf(c)
		c.Lists = now.(*userv1.Category).Lists
		m = c
	}
	revision, e, err := a.s.storeEntry(ctx, kind, req.GetId(), m, func(_ *view, have uint64) error { return checkRevision(have, req.GetIfRevision()) })
	return &adminv1.ResetEntryResponse{Revision: revision, Dataset: Catalogue, Entry: e}, err
}
