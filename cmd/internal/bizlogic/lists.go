package bizlogic

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"slices"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache"
)

const (
	// maxLists is how many lists a catalogue has: the bits of a policy.
	maxLists = 512

	defaultRefresh = 24 * time.Hour
	minRefresh     = 5 * time.Minute
)

// listKind is to lists what entryKinds are to entries.
var listKind = entryKind{"list", maxLists, func() proto.Message { return new(userv1.List) }}

// listServer keeps the filter lists of the catalogue.
type listServer struct {
	adminv1.UnimplementedListServiceServer
	s *Service
}

func (a listServer) AddList(stream grpc.ClientStreamingServer[adminv1.AddListRequest, adminv1.AddListResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	h := first.GetHeader()
	if h == nil {
		return invalid("header", "must come first")
	}
	if err := checkID("id", h.GetId()); err != nil {
		return err
	}
	next := listChange{id: h.GetId(), name: h.GetName(), homepage: h.GetHomepage(), create: true, replace: h.GetReplace(),
		ifRevision: h.GetIfRevision(), accept: h.GetAccept(), source: &storev1.ListSource{}}
	// Refuse early what would be refused in the end, before the text comes over the wire.
	have := new(userv1.List)
	if _, err := a.s.read(Catalogue, h.GetId(), "list", have); err == nil && !h.GetReplace() {
		return listExists(h.GetId())
	}
	if h.GetUrl() != "" {
		from, err := a.s.listURL(h.GetId(), h.GetUrl())
		if err != nil {
			return err
		}
		refresh := time.Duration(min(h.GetRefresh(), 1<<31)) * time.Second
		if refresh == 0 {
			refresh = defaultRefresh
		}
		if refresh < minRefresh {
			return invalid("refresh", "%v is too often; %v at least", refresh, minRefresh)
		}
		got, err := a.s.fetch(stream.Context(), a.s.wantedList(from))
		if ours(err) {
			return err
		}
		if err != nil {
			return refused("list %s: %s", h.GetId(), statusMessage(err))
		}
		now := clock.Wall().Unix()
		next.text = got.text
		next.source = &storev1.ListSource{Url: from, Refresh: uint64(refresh / time.Second),
			Etag: got.etag, LastModified: got.lastModified, Fetched: now, Tried: now}
	} else if next.text, err = a.s.receive(a.s.opts.Download.maxSize(), "fetch.max_size", func() ([]byte, error) {
		m, err := stream.Recv()
		return m.GetData(), err
	}); err != nil {
		return err
	}
	defer next.text.drop()
	done, err := a.s.putList(stream.Context(), next)
	if err != nil {
		return err
	}
	return stream.SendAndClose(&adminv1.AddListResponse{Revision: done.revision, Dataset: Catalogue, List: done.list,
		Complaints: showComplaints(done.report, 100)})
}

// listURL checks where a list is to be fetched. The URL that a list has already may come with its password
// hidden, as it is shown and exported.
func (s *Service) listURL(id, text string) (string, error) {
	if _, _, src, err := s.loadList(id); err == nil {
		text = sameHidden(text, src.Url)
	}
	return text, s.checkURL(text)
}

// wantedList is a fetch of a list of the catalogue.
func (s *Service) wantedList(url string) wanted {
	return wanted{url: url, most: s.opts.Download.maxSize(), bound: "fetch.max_size"}
}

// receive gathers a text that comes in parts.
func (s *Service) receive(most int64, bound string, next func() ([]byte, error)) (*text, error) {
	t, err := s.newText(most, bound)
	if err != nil {
		return nil, storing(err)
	}
	for {
		part, err := next()
		if errors.Is(err, io.EOF) {
			return t, nil
		}
		if err == nil && t.size+int64(len(part)) > most {
			err = invalid("data", "is longer than %d bytes (%s)", most, bound)
		}
		if err == nil {
			if _, err = t.Write(part); err != nil {
				err = storing(err)
			}
		}
		if err != nil {
			t.drop()
			return nil, err
		}
	}
}

// A listChange is new text for a list.
type listChange struct {
	id, name, homepage string
	text               *text // the caller drops it
	create, replace    bool  // the list may be made; an existing one may be changed
	refresh            bool  // the text was fetched from where the list comes from
	ifRevision         uint64
	accept             bool
	source             *storev1.ListSource
}

// A listDone is what came of it.
type listDone struct {
	revision uint64
	list     *adminv1.List
	report   Report
	changed  bool
}

// errMoved is met when a list has been given another source while its text was fetched.
var errMoved = status.Error(codes.Aborted, "the list has been changed meanwhile")

// putList judges a text and makes it the list's. A text that the shrink guard holds is kept aside. A refresh that
// brings other comments and nothing else changes nothing.
func (s *Service) putList(ctx context.Context, c listChange) (listDone, error) {
	if err := checkText("name", c.name, maxName); err != nil {
		return listDone{}, err
	}
	if err := checkText("homepage", c.homepage, 2048); err != nil {
		return listDone{}, err
	}
	report, err := s.judge(ctx, c.id, false, c.text)
	if err != nil {
		if ctx.Err() != nil {
			return listDone{}, status.FromContextError(ctx.Err()).Err()
		}
		return listDone{}, refused("list %s: %v; nothing was changed", c.id, err)
	}
	if err := c.text.keep(); err != nil {
		return listDone{}, storing(err)
	}
	sum, content := c.text.hash(), c.text.content.hash()
	out := listDone{report: report}
	var held *heldBack
	revision, err := s.change(ctx, func(v *view) error {
		old, was := new(userv1.List), new(storev1.ListSource)
		have, ok, err := v.load(Catalogue, "list/"+c.id, old)
		if err != nil {
			return err
		}
		if err := proto.Unmarshal(v.auxGet(bucketSources, c.id), was); err != nil {
			return err
		}
		switch {
		case ok && !c.replace:
			return listExists(c.id)
		case !ok && !c.create:
			return notFound("list", c.id)
		case c.refresh && was.Url != c.source.Url:
			return errMoved
		}
		if err := checkRevision(have, c.ifRevision); err != nil {
			return err
		}
		src := proto.CloneOf(c.source)
		src.HeldSha256, src.HeldRules, src.ContentSha256 = nil, 0, content
		same := c.refresh && bytes.Equal(was.ContentSha256, content)
		peak, since := v.b.guard.peak(was, old.Rules, v.now)
		if ok && !same && !c.accept && v.b.guard.trips(uint64(peak), uint64(report.Rules), uint64(v.b.guard.Min)) {
			src.HeldSha256, src.HeldRules = sum, uint32(report.Rules)
			src.ContentSha256, src.PeakRules, src.PeakAt = was.ContentSha256, peak, since
			held = &heldBack{list: c.id, most: peak, window: v.b.guard.Window, rules: report.Rules, news: len(was.HeldSha256) == 0}
			src.Error = held.Error()
			return v.auxPut(bucketSources, c.id, src)
		}
		if ok && !same && c.accept && uint32(report.Rules) < peak {
			// Resolvers have a guard of their own, which is to hear of it too.
			if err := v.acceptShrunkList(); err != nil {
				return err
			}
		}
		list := proto.CloneOf(old)
		if !ok {
			if list.Number, err = v.freeNumber(listKind); err != nil {
				return err
			}
		}
		list.Name, list.Homepage = cmp.Or(c.name, list.Name, report.title()), cmp.Or(c.homepage, list.Homepage)
		if out.changed = !same && !bytes.Equal(list.Sha256, sum); out.changed {
			list.Updated = v.now.Unix()
		}
		if !same {
			list.Sha256, list.Size, list.Rules, list.Skipped = sum, uint64(c.text.size), uint32(report.Rules), uint32(report.Skipped)
		}
		if src.PeakRules, src.PeakAt = peak, since; c.accept || list.Rules >= peak {
			src.PeakRules, src.PeakAt = list.Rules, v.now.Unix()
		}
		out.revision = have
		if err := v.put(Catalogue, "list/"+c.id, list); err != nil {
			return err
		}
		out.list = showList(c.id, have, list, src)
		return v.auxPut(bucketSources, c.id, src)
	})
	if err != nil {
		return listDone{}, err
	}
	if held != nil {
		held.log(s.log)
		return listDone{}, held
	}
	out.revision = cmp.Or(revision, out.revision)
	out.list.Revision = out.revision
	return out, nil
}

// acceptShrunkList tells the guards of resolvers that what this revision takes away is wanted.
func (v *view) acceptShrunkList() error {
	m, err := v.b.metaNow(Catalogue)
	if err != nil {
		return err
	}
	acc := acceptedShrink(v.b.tx, Catalogue).ShrinkAccepted
	if acc == nil {
		acc = &userv1.ShrinkAccepted{By: byImport, Accepted: v.now.Unix()}
	}
	acc.ThroughRevision, acc.Totals = v.b.id.Revision+1, m.Totals
	return v.put(Catalogue, keyAccepted, acc)
}

// peak is the most rules a list had within the guard's window, and when it last had them. One number is kept: when
// its time is over, what the list has now takes its place.
func (g Guard) peak(src *storev1.ListSource, rules uint32, now time.Time) (most uint32, since int64) {
	if src.PeakRules > rules && time.Unix(src.PeakAt, 0).Add(g.Window).After(now) {
		return src.PeakRules, src.PeakAt
	}
	return rules, now.Unix()
}

// title is what a text calls itself, if it may be shown.
func (r Report) title() string {
	if t := cut(r.Title, maxName); checkText("title", t, maxName) == nil {
		return t
	}
	return ""
}

func (a listServer) GetList(_ context.Context, req *adminv1.GetListRequest) (*adminv1.GetListResponse, error) {
	if isURL(req.GetId()) {
		l, err := a.s.showOwn(req.GetId())
		if err != nil {
			return nil, err
		}
		return &adminv1.GetListResponse{List: l}, nil
	}
	revision, l, src, err := a.s.loadList(req.GetId())
	if err != nil {
		return nil, err
	}
	return &adminv1.GetListResponse{List: showList(req.GetId(), revision, l, src)}, nil
}

func (s *Service) loadList(id string) (uint64, *userv1.List, *storev1.ListSource, error) {
	l, src := new(userv1.List), new(storev1.ListSource)
	revision, err := s.read(Catalogue, id, "list", l)
	if err != nil {
		return 0, nil, nil, err
	}
	err = s.db.View(func(tx *bolt.Tx) error {
		return proto.Unmarshal((&view{tx: tx}).auxGet(bucketSources, id), src)
	})
	return revision, l, src, reading(err)
}

func (a listServer) ListLists(_ context.Context, req *adminv1.ListListsRequest) (*adminv1.ListListsResponse, error) {
	resp := new(adminv1.ListListsResponse)
	if req.GetOwn() {
		err := a.s.eachOwn(func(l *adminv1.List) { resp.Lists = append(resp.Lists, l) })
		return resp, err
	}
	err := a.s.db.View(func(tx *bolt.Tx) error {
		return eachOf(tx, "list/", func(id string, revision uint64, b []byte) error {
			l, src := new(userv1.List), new(storev1.ListSource)
			if err := proto.Unmarshal(b, l); err != nil {
				return err
			}
			if err := proto.Unmarshal((&view{tx: tx}).auxGet(bucketSources, id), src); err != nil {
				return err
			}
			resp.Lists = append(resp.Lists, showList(id, revision, l, src))
			return nil
		})
	})
	if err != nil {
		return nil, reading(err)
	}
	return resp, nil
}

func (a listServer) DeleteList(ctx context.Context, req *adminv1.DeleteListRequest) (*adminv1.DeleteListResponse, error) {
	revision, err := a.s.removeNamed(ctx, "list", req.GetId(), req.GetIfRevision(), func(v *view) error {
		v.auxDelete(bucketSources, req.GetId())
		return eachOf(v.tx, "category/", func(id string, _ uint64, b []byte) error {
			c := new(userv1.Category)
			if err := proto.Unmarshal(b, c); err != nil {
				return err
			}
			if slices.Contains(c.Lists, req.GetId()) {
				return refused("list %q is in use by category %q: take it out there first", req.GetId(), id)
			}
			return nil
		})
	})
	if err != nil {
		return nil, err
	}
	return &adminv1.DeleteListResponse{Revision: revision, Dataset: Catalogue}, nil
}

// removeNamed removes something of the catalogue that no settings name, nor anything that also knows of.
func (s *Service) removeNamed(ctx context.Context, what, id string, ifRevision uint64, also func(*view) error) (uint64, error) {
	if err := checkID("id", id); err != nil {
		return 0, err
	}
	// All users are looked at before the writer is asked for, which then looks at those changed since.
	var seen uint64
	err := s.db.View(func(tx *bolt.Tx) error {
		m, err := metaOf(tx, Users)
		if err != nil {
			return err
		}
		seen = m.Revision
		return userNaming(tx, what, id)
	})
	if err != nil {
		return 0, storing(err)
	}
	return s.change(ctx, func(v *view) error {
		have, _, ok, err := v.get(Catalogue, what+"/"+id)
		if err != nil || !ok {
			return cond(err, notFound(what, id))
		}
		if err := checkRevision(have, ifRevision); err != nil {
			return err
		}
		if err := userNamingSince(v.tx, what, id, seen); err != nil {
			return err
		}
		err = eachOf(v.tx, "policy/", func(policy string, _ uint64, b []byte) error {
			p := new(userv1.Policy)
			if err := proto.Unmarshal(b, p); err != nil {
				return err
			}
			if names(p.GetSettings(), what, id) {
				return refused("%s %q is in use by policy %q: take it out there first", what, id, policy)
			}
			return nil
		})
		if err == nil {
			err = also(v)
		}
		if err == nil {
			v.remove(Catalogue, what+"/"+id)
		}
		return err
	})
}

// names reports whether settings refer to something of the catalogue, always or at times.
func names(s *userv1.Settings, what, id string) bool {
	always, sometimes := s.GetLists(), (*userv1.Schedule).GetLists
	switch what {
	case "service":
		always, sometimes = s.GetServices(), (*userv1.Schedule).GetServices
	case "category":
		always, sometimes = s.GetCategories(), (*userv1.Schedule).GetCategories
	case "safesearch":
		return slices.Contains(s.GetSafeSearch().GetValues(), id)
	}
	return slices.Contains(always.GetValues(), id) ||
		slices.ContainsFunc(s.GetSchedules().GetValues(), func(sch *userv1.Schedule) bool { return slices.Contains(sometimes(sch), id) })
}

// userNaming returns an error if a user, or a device of one, names a list or the like: without it he would be
// filtered less than he asked for, and nobody would tell him.
func userNaming(tx *bolt.Tx, what, id string) error {
	return tx.Bucket([]byte(Users)).Bucket(bucketRecords).ForEach(func(k, v []byte) error {
		return userNames(k[8:], v, what, id)
	})
}

// userNamingSince is userNaming of the users that have changed after a revision.
func userNamingSince(tx *bolt.Tx, what, id string, revision uint64) error {
	c := tx.Bucket([]byte(Users)).Bucket(bucketByRevision).Cursor()
	for k, _ := c.Seek(be64(revision + 1)); k != nil; k, _ = c.Next() {
		key := k[8:]
		if err := userNames(key, tx.Bucket([]byte(Users)).Bucket(bucketRecords).Get(usercache.AppendStoreKey(nil, key)), what, id); err != nil {
			return err
		}
	}
	return nil
}

func userNames(key, record []byte, what, id string) error {
	if bytes.IndexByte(key, '/') >= 0 || !bytes.Contains(record, []byte(id)) {
		return nil // no user; or removed; or spared the decoding
	}
	_, b, err := openRecord(record)
	if err != nil {
		return fmt.Errorf("record %q of %s: %w", key, Users, err)
	}
	u := new(userv1.User)
	if err := proto.Unmarshal(b, u); err != nil {
		return fmt.Errorf("record %q of %s: %w", key, Users, err)
	}
	if names(u.GetSettings(), what, id) {
		return refused("%s %q is in use, by user %q for one", what, id, key)
	}
	for _, d := range u.GetDevices() {
		if names(d.GetSettings(), what, id) {
			return refused("%s %q is in use, by device %q for one", what, id, string(key)+"/"+d.GetId())
		}
	}
	return nil
}

func (a listServer) RefreshList(ctx context.Context, req *adminv1.RefreshListRequest) (*adminv1.RefreshListResponse, error) {
	if isURL(req.GetId()) {
		return a.s.refreshOwnNow(ctx, req.GetId())
	}
	_, l, src, err := a.s.loadList(req.GetId())
	if err != nil {
		return nil, err
	}
	if src.Url == "" {
		return nil, refused("list %q was uploaded; add it again with --replace to give it new text", req.GetId())
	}
	done, err := a.s.refresh(ctx, req.GetId(), l, src)
	if err != nil {
		return nil, err
	}
	return &adminv1.RefreshListResponse{Revision: done.revision, Dataset: Catalogue, List: done.list, Changed: done.changed}, nil
}

// refresh fetches a list. A failure is remembered with the list, which stays as it is.
func (s *Service) refresh(ctx context.Context, id string, l *userv1.List, src *storev1.ListSource) (listDone, error) {
	w := s.wantedList(src.Url)
	if hasText(s.opts.Dir, l.Sha256) && len(src.HeldSha256) == 0 {
		w.etag, w.lastModified = src.Etag, src.LastModified
	}
	got, err := s.fetch(ctx, w)
	defer got.text.drop()
	if ours(err) {
		return listDone{}, err
	}
	next := fetched(src, got)
	if err == nil && !got.unchanged {
		var done listDone
		if done, err = s.putList(ctx, listChange{id: id, text: got.text, replace: true, refresh: true, source: next}); err == nil {
			return done, nil
		}
		if status.Code(err) != codes.FailedPrecondition {
			return listDone{}, err
		}
	}
	if ctx.Err() != nil { // says nothing about the list
		return listDone{}, status.FromContextError(ctx.Err()).Err()
	}
	if err != nil {
		next = failedFetch(src, err)
	}
	_, cerr := s.change(ctx, func(v *view) error {
		cur := new(storev1.ListSource)
		if perr := proto.Unmarshal(v.auxGet(bucketSources, id), cur); perr != nil {
			return perr
		}
		if cur.Url != src.Url {
			return errMoved
		}
		if err != nil {
			next.HeldSha256, next.HeldRules = cur.HeldSha256, cur.HeldRules
		}
		next.PeakRules, next.PeakAt = cur.PeakRules, cur.PeakAt
		return v.auxPut(bucketSources, id, next)
	})
	if cerr != nil {
		return listDone{}, cerr
	}
	if err != nil {
		if _, ok := status.FromError(err); !ok {
			err = refused("list %s: %v; the list is left as it was", id, err)
		}
		return listDone{}, err
	}
	revision, l, src, err := s.loadList(id)
	if err != nil {
		return listDone{}, err
	}
	return listDone{revision: revision, list: showList(id, revision, l, src)}, nil
}

// fetched is a source after a fetch that brought something, or no news.
func fetched(src *storev1.ListSource, got download) *storev1.ListSource {
	next := proto.CloneOf(src)
	next.Tried = clock.Wall().Unix()
	next.Fetched, next.Failures, next.Error = next.Tried, 0, ""
	next.HeldSha256, next.HeldRules = nil, 0
	if !got.unchanged {
		next.Etag, next.LastModified = got.etag, got.lastModified
	}
	return next
}

// failedFetch is a source after a failure.
func failedFetch(src *storev1.ListSource, err error) *storev1.ListSource {
	next := proto.CloneOf(src)
	next.Tried = clock.Wall().Unix()
	next.Failures++
	next.Error = cut(statusMessage(err), 500)
	return next
}

func (a listServer) AcceptList(ctx context.Context, req *adminv1.AcceptListRequest) (*adminv1.AcceptListResponse, error) {
	if isURL(req.GetId()) {
		return a.s.acceptOwn(ctx, req.GetId())
	}
	_, _, src, err := a.s.loadList(req.GetId())
	if err != nil {
		return nil, err
	}
	if len(src.HeldSha256) == 0 {
		return nil, refused("list %q has no text that is held", req.GetId())
	}
	held, err := a.s.openText(src.HeldSha256)
	if err != nil {
		return nil, reading(err)
	}
	defer held.drop()
	src.Error, src.Failures = "", 0
	done, err := a.s.putList(ctx, listChange{id: req.GetId(), text: held, replace: true, accept: true, source: src})
	if err != nil {
		return nil, err
	}
	return &adminv1.AcceptListResponse{Revision: done.revision, Dataset: Catalogue, List: done.list}, nil
}

// refreshLoop fetches what is due, again and again. Lists of the catalogue and users' own each have one, so that
// neither waits for the other. While nothing can be stored it is tried ever less often: not even the failure of a list
// could be remembered, and its server would be asked each minute.
func (s *Service) refreshLoop(refresh func(now time.Time) error) {
	t := time.NewTicker(time.Minute)
	defer t.Stop()
	failures, skip := 0, 0
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-t.C:
		}
		if skip--; skip > 0 {
			continue
		}
		if err := refresh(clock.Wall()); err != nil && s.ctx.Err() == nil {
			s.log.Error("lists are not refreshed while nothing can be stored", "error", statusMessage(err))
			skip = min(2<<failures, 60)
			failures = min(failures+1, 10)
		} else {
			failures = 0
		}
	}
}

// refreshDue fetches lists of the catalogue that are due, a few at a time, and returns when that is done. The error is
// that of the store.
func (s *Service) refreshDue(now time.Time) error {
	due, err := s.dueLists(now)
	if err != nil {
		return err
	}
	return s.refreshEach(due, "list", parallelFetches, func(ctx context.Context, id string) error {
		_, l, src, err := s.loadList(id)
		if err == nil {
			_, err = s.refresh(ctx, id, l, src)
		}
		return err
	})
}

// refreshOwnDue is refreshDue of users' own lists.
func (s *Service) refreshOwnDue(now time.Time) error {
	due, err := s.dueOwn(now)
	if err != nil {
		return err
	}
	return s.refreshEach(due, "url", parallelOwn, func(ctx context.Context, from string) error { return s.refreshOwn(ctx, from, false) })
}

// refreshEach refreshes lists, a few at a time. It gives up when the store fails, and says what else goes wrong itself.
func (s *Service) refreshEach(due []string, what string, parallel int, refresh func(ctx context.Context, which string) error) error {
	g, ctx := errgroup.WithContext(s.ctx)
	g.SetLimit(parallel)
	for _, which := range due {
		g.Go(func() error {
			if ctx.Err() != nil {
				return nil
			}
			err := refresh(ctx, which)
			switch {
			case err == nil || ctx.Err() != nil:
			case ours(err):
				return err
			default:
				s.logRefresh(err, what, showURL(which))
			}
			return nil
		})
	}
	return g.Wait()
}

// logRefresh says that a list could not be refreshed. What the shrink guard holds was said when it began.
func (s *Service) logRefresh(err error, what, which string) {
	level := slog.LevelWarn
	if h := (*heldBack)(nil); errors.As(err, &h) {
		level = slog.LevelDebug
	}
	s.log.Log(s.ctx, level, "list not refreshed; the old text stays", what, which, "error", statusMessage(err))
}

// dueLists is the lists whose time has come.
func (s *Service) dueLists(now time.Time) (due []string, err error) {
	err = s.db.View(func(tx *bolt.Tx) error {
		return tx.Bucket(bucketService).Bucket(bucketSources).ForEach(func(k, b []byte) error {
			src := new(storev1.ListSource)
			if err := proto.Unmarshal(b, src); err != nil {
				return fmt.Errorf("source of list %s: %w", k, err)
			}
			if src.Url != "" && !now.Before(s.nextFetch(string(k), src)) {
				due = append(due, string(k))
			}
			return nil
		})
	})
	return due, err
}

// nextFetch is when a list is fetched next: a little later than asked, by an amount of its own, so that the
// lists of a service, and the services of the world, do not come all at once. Failures are retried sooner, ever
// less often.
func (s *Service) nextFetch(id string, src *storev1.ListSource) time.Time {
	h := fnv.New64a()
	h.Write(s.datasets[Catalogue].id)
	h.Write(binary.BigEndian.AppendUint64([]byte(id), uint64(src.Tried)))
	share := func(d time.Duration) time.Duration { return time.Duration(h.Sum64() % uint64(d)) }

	refresh := max(time.Duration(src.Refresh)*time.Second, minRefresh)
	if src.Failures == 0 {
		return time.Unix(src.Fetched, 0).Add(refresh + share(refresh/25))
	}
	wait := min(refresh, minRefresh<<min(src.Failures, 8))
	return time.Unix(src.Tried, 0).Add(wait/2 + share(wait/2))
}

func showList(id string, revision uint64, l *userv1.List, src *storev1.ListSource) *adminv1.List {
	return &adminv1.List{Id: id, Revision: revision, Name: l.Name, Number: l.Number, Sha256: hex.EncodeToString(l.Sha256), Size: l.Size,
		Rules: l.Rules, Skipped: l.Skipped, Updated: l.Updated, Homepage: l.Homepage, Tenant: l.Tenant,
		Url: showURL(src.GetUrl()), Refresh: src.GetRefresh(), Error: src.GetError(), HeldRules: src.GetHeldRules(),
		Fetched: src.GetFetched(), Tried: src.GetTried(), Failures: src.GetFailures()}
}

// Lists is the lists of the catalogue and how fetching them went, for metrics.
func (s *Service) Lists() ([]*adminv1.List, error) {
	resp, err := listServer{s: s}.ListLists(s.ctx, &adminv1.ListListsRequest{})
	return resp.GetLists(), err
}

// OwnLists is the lists that users have among their own, for metrics.
func (s *Service) OwnLists() ([]*adminv1.List, error) {
	resp, err := listServer{s: s}.ListLists(s.ctx, &adminv1.ListListsRequest{Own: true})
	return resp.GetLists(), err
}
