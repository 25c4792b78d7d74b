package bizlogic

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"slices"
	"time"
	"unicode/utf8"

	bolt "go.etcd.io/bbolt"
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
		return exists("list", h.GetId())
	}
	if h.GetUrl() != "" {
		if err := checkURL(h.GetUrl()); err != nil {
			return err
		}
		refresh := time.Duration(min(h.GetRefresh(), 1<<31)) * time.Second
		if refresh == 0 {
			refresh = defaultRefresh
		}
		if refresh < minRefresh {
			return invalid("refresh", "%v is too often; %v at least", refresh, minRefresh)
		}
		got, err := a.s.downloads.fetch(stream.Context(), h.GetUrl(), "", "")
		if err != nil {
			return refused("list %s: %v", h.GetId(), err)
		}
		now := clock.Wall().Unix()
		next.text = got.text
		next.source = &storev1.ListSource{Url: h.GetUrl(), Refresh: uint64(refresh / time.Second),
			Etag: got.etag, LastModified: got.lastModified, Fetched: now, Tried: now}
	} else if next.text, err = receive(a.s.opts.Download.maxSize(), func() ([]byte, error) {
		m, err := stream.Recv()
		return m.GetData(), err
	}); err != nil {
		return err
	}
	done, err := a.s.putList(stream.Context(), next)
	if err != nil {
		return err
	}
	return stream.SendAndClose(&adminv1.AddListResponse{Revision: done.revision, Dataset: Catalogue, List: done.list,
		Complaints: showComplaints(done.report, 100)})
}

// receive gathers a text that comes in parts.
func receive(most int64, next func() ([]byte, error)) ([]byte, error) {
	var text []byte
	for {
		part, err := next()
		if errors.Is(err, io.EOF) {
			return text, nil
		}
		if err != nil {
			return nil, err
		}
		if int64(len(text)+len(part)) > most {
			return nil, invalid("data", "is longer than %d bytes; raise fetch.max_size if it is meant", most)
		}
		text = append(text, part...)
	}
}

// A listChange is new text for a list.
type listChange struct {
	id, name, homepage string
	text               []byte
	create, replace    bool // the list may be made; an existing one may be changed
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

// putList judges a text and makes it the list's. A text that the shrink guard holds is kept aside.
func (s *Service) putList(ctx context.Context, c listChange) (listDone, error) {
	if err := checkText("name", c.name, maxName); err != nil {
		return listDone{}, err
	}
	if err := checkText("homepage", c.homepage, 2048); err != nil {
		return listDone{}, err
	}
	if err := looksLikeList(c.text); err != nil {
		return listDone{}, refused("list %s: %v; the list is left as it was", c.id, err)
	}
	report, err := s.opts.Compile(c.id, c.text)
	if err != nil {
		return listDone{}, refused("list %s: %v; the list is left as it was", c.id, err)
	}
	if report.NotList != "" {
		return listDone{}, refused("list %s: %s; the list is left as it was", c.id, report.NotList)
	}
	if report.Rules == 0 {
		return listDone{}, refused("list %s: none of its lines is a usable rule; the list is left as it was", c.id)
	}
	if err := s.putBlob(c.text); err != nil {
		return listDone{}, storing(err)
	}
	sum := sha256.Sum256(c.text)
	out := listDone{report: report}
	var held error
	revision, err := s.change(ctx, func(v *view) error {
		old := new(userv1.List)
		have, ok, err := v.load(Catalogue, "list/"+c.id, old)
		if err != nil {
			return err
		}
		switch {
		case ok && !c.replace:
			return exists("list", c.id)
		case !ok && !c.create:
			return notFound("list", c.id)
		}
		if err := checkRevision(have, c.ifRevision); err != nil {
			return err
		}
		src := proto.CloneOf(c.source)
		src.HeldSha256, src.HeldRules = nil, 0
		if ok && !c.accept && s.opts.Guard.trips(uint64(old.Rules), uint64(report.Rules), uint64(s.opts.Guard.Min)) {
			src.HeldSha256, src.HeldRules = sum[:], uint32(report.Rules)
			held = refused("list %s: the shrink guard holds: its rules would fall from %d to %d; `sluicectl list accept %s` takes the new text", c.id, old.Rules, report.Rules, c.id)
			src.Error = status.Convert(held).Message()
			out.list = showList(c.id, have, old, src)
			return v.auxPut(bucketSources, c.id, src)
		}
		list := proto.CloneOf(old)
		if !ok {
			if list.Number, err = v.freeListNumber(); err != nil {
				return err
			}
		}
		list.Name, list.Homepage = cmp.Or(c.name, list.Name), cmp.Or(c.homepage, list.Homepage)
		out.changed = !bytes.Equal(list.Sha256, sum[:])
		if out.changed {
			list.Updated = v.now.Unix()
		}
		list.Sha256, list.Size, list.Rules, list.Skipped = sum[:], uint64(len(c.text)), uint32(report.Rules), uint32(report.Skipped)
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
	out.revision = cmp.Or(revision, out.revision)
	out.list.Revision = out.revision
	if held != nil {
		return listDone{}, held
	}
	return out, nil
}

// freeListNumber is the lowest number that no list has.
func (v *view) freeListNumber() (uint32, error) {
	taken := [maxLists]bool{}
	mark := func(_ string, _ uint64, b []byte) error {
		l := new(userv1.List)
		if err := proto.Unmarshal(b, l); err != nil {
			return err
		}
		if l.Number < maxLists {
			taken[l.Number] = true
		}
		return nil
	}
	if err := eachOf(v.tx, "list/", mark); err != nil {
		return 0, err
	}
	for key, b := range v.staged[Catalogue] {
		if len(key) > 5 && key[:5] == "list/" && b != nil {
			if err := mark("", 0, b); err != nil {
				return 0, err
			}
		}
	}
	if i := slices.Index(taken[:], false); i >= 0 {
		return uint32(i), nil
	}
	return 0, refused("there are %d lists, and no more are possible", maxLists)
}

func (a listServer) GetList(_ context.Context, req *adminv1.GetListRequest) (*adminv1.GetListResponse, error) {
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

func (a listServer) ListLists(context.Context, *adminv1.ListListsRequest) (*adminv1.ListListsResponse, error) {
	resp := new(adminv1.ListListsResponse)
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
	if err := checkID("id", req.GetId()); err != nil {
		return nil, err
	}
	// All users are looked at before the writer is asked for, which then looks at those changed since.
	var seen uint64
	err := a.s.db.View(func(tx *bolt.Tx) error {
		m, err := metaOf(tx, Users)
		if err != nil {
			return err
		}
		seen = m.Revision
		return userNaming(tx, req.GetId())
	})
	if err != nil {
		return nil, storing(err)
	}
	revision, err := a.s.change(ctx, func(v *view) error {
		have, _, ok, err := v.get(Catalogue, "list/"+req.GetId())
		if err != nil || !ok {
			return cond(err, notFound("list", req.GetId()))
		}
		if err := checkRevision(have, req.GetIfRevision()); err != nil {
			return err
		}
		if err := userNamingSince(v.tx, req.GetId(), seen); err != nil {
			return err
		}
		err = eachOf(v.tx, "policy/", func(id string, _ uint64, b []byte) error {
			p := new(userv1.Policy)
			if err := proto.Unmarshal(b, p); err != nil {
				return err
			}
			if namesList(p.GetSettings(), req.GetId()) {
				return refused("list %q is in use by policy %q", req.GetId(), id)
			}
			return nil
		})
		if err == nil {
			err = eachOf(v.tx, "category/", func(id string, _ uint64, b []byte) error {
				c := new(userv1.Category)
				if err := proto.Unmarshal(b, c); err != nil {
					return err
				}
				if slices.Contains(c.Lists, req.GetId()) {
					return refused("list %q is in use by category %q", req.GetId(), id)
				}
				return nil
			})
		}
		if err != nil {
			return err
		}
		v.remove(Catalogue, "list/"+req.GetId())
		v.auxDelete(bucketSources, req.GetId())
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &adminv1.DeleteListResponse{Revision: revision, Dataset: Catalogue}, nil
}

// namesList reports whether settings turn a list on, always or at times.
func namesList(s *userv1.Settings, list string) bool {
	return slices.Contains(s.GetLists().GetValues(), list) ||
		slices.ContainsFunc(s.GetSchedules().GetValues(), func(sch *userv1.Schedule) bool { return slices.Contains(sch.Lists, list) })
}

// userNaming returns an error if a user, or a device of one, names a list: without it he would be filtered
// less than he asked for, and nobody would tell him.
func userNaming(tx *bolt.Tx, list string) error {
	return tx.Bucket([]byte(Users)).Bucket(bucketRecords).ForEach(func(k, v []byte) error {
		return userNames(k[8:], v, list)
	})
}

// userNamingSince is userNaming of the users that have changed after a revision.
func userNamingSince(tx *bolt.Tx, list string, revision uint64) error {
	c := tx.Bucket([]byte(Users)).Bucket(bucketByRevision).Cursor()
	for k, _ := c.Seek(be64(revision + 1)); k != nil; k, _ = c.Next() {
		key := k[8:]
		if err := userNames(key, tx.Bucket([]byte(Users)).Bucket(bucketRecords).Get(usercache.AppendStoreKey(nil, key)), list); err != nil {
			return err
		}
	}
	return nil
}

func userNames(key, record []byte, list string) error {
	if bytes.IndexByte(key, '/') >= 0 || !bytes.Contains(record, []byte(list)) {
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
	if namesList(u.GetSettings(), list) {
		return refused("list %q is in use, by user %q for one", list, key)
	}
	for _, d := range u.GetDevices() {
		if namesList(d.GetSettings(), list) {
			return refused("list %q is in use, by device %q for one", list, string(key)+"/"+d.GetId())
		}
	}
	return nil
}

func (a listServer) RefreshList(ctx context.Context, req *adminv1.RefreshListRequest) (*adminv1.RefreshListResponse, error) {
	_, _, src, err := a.s.loadList(req.GetId())
	if err != nil {
		return nil, err
	}
	if src.Url == "" {
		return nil, refused("list %q was uploaded; add it again with --replace to give it new text", req.GetId())
	}
	done, err := a.s.refresh(ctx, req.GetId(), src)
	if err != nil {
		return nil, err
	}
	return &adminv1.RefreshListResponse{Revision: done.revision, Dataset: Catalogue, List: done.list, Changed: done.changed}, nil
}

// refresh fetches a list. A failure is remembered with the list, which stays as it is.
func (s *Service) refresh(ctx context.Context, id string, src *storev1.ListSource) (listDone, error) {
	got, err := s.downloads.fetch(ctx, src.Url, src.Etag, src.LastModified)
	next := proto.CloneOf(src)
	next.Tried = clock.Wall().Unix()
	if err == nil && !got.unchanged {
		next.Etag, next.LastModified, next.Fetched, next.Failures, next.Error = got.etag, got.lastModified, next.Tried, 0, ""
		var done listDone
		if done, err = s.putList(ctx, listChange{id: id, text: got.text, replace: true, source: next}); err == nil {
			return done, nil
		}
		if status.Code(err) != codes.FailedPrecondition {
			return listDone{}, err
		}
		// Refused: fetch the whole text again next time, whatever its ETag.
		next = proto.CloneOf(src)
		next.Tried = clock.Wall().Unix()
	}
	if err != nil {
		next.Failures++
		next.Error = cut(status.Convert(err).Message(), 500)
	} else {
		next.Fetched, next.Failures, next.Error = next.Tried, 0, ""
	}
	_, cerr := s.change(ctx, func(v *view) error {
		cur := new(storev1.ListSource)
		if perr := proto.Unmarshal(v.auxGet(bucketSources, id), cur); perr != nil {
			return perr
		}
		next.HeldSha256, next.HeldRules = cur.HeldSha256, cur.HeldRules
		return v.auxPut(bucketSources, id, next)
	})
	if err != nil {
		if _, ok := status.FromError(err); !ok {
			err = refused("list %s: %v; the list is left as it was", id, err)
		}
		return listDone{}, err
	}
	if cerr != nil {
		return listDone{}, cerr
	}
	revision, l, src, err := s.loadList(id)
	if err != nil {
		return listDone{}, err
	}
	return listDone{revision: revision, list: showList(id, revision, l, src)}, nil
}

func (a listServer) AcceptList(ctx context.Context, req *adminv1.AcceptListRequest) (*adminv1.AcceptListResponse, error) {
	_, _, src, err := a.s.loadList(req.GetId())
	if err != nil {
		return nil, err
	}
	if len(src.HeldSha256) == 0 {
		return nil, refused("list %q has no text that is held", req.GetId())
	}
	text, err := os.ReadFile(a.s.blobPath(src.HeldSha256))
	if err != nil {
		return nil, reading(err)
	}
	src.Error, src.Failures = "", 0
	done, err := a.s.putList(ctx, listChange{id: req.GetId(), text: text, replace: true, accept: true, source: src})
	if err != nil {
		return nil, err
	}
	return &adminv1.AcceptListResponse{Revision: done.revision, Dataset: Catalogue, List: done.list}, nil
}

func (a listServer) PutBlob(stream grpc.ClientStreamingServer[adminv1.PutBlobRequest, adminv1.PutBlobResponse]) error {
	text, err := receive(a.s.opts.Download.maxSize(), func() ([]byte, error) {
		m, err := stream.Recv()
		return m.GetData(), err
	})
	if err != nil {
		return err
	}
	if err := looksLikeList(text); err != nil {
		return invalid("data", "%v", err)
	}
	report, err := a.s.opts.Compile("blob", text)
	if err != nil {
		return invalid("data", "%v", err)
	}
	if err := a.s.putBlob(text); err != nil {
		return storing(err)
	}
	sum := sha256.Sum256(text)
	return stream.SendAndClose(&adminv1.PutBlobResponse{Sha256: hex.EncodeToString(sum[:]), Size: uint64(len(text)),
		Rules: uint32(report.Rules), Complaints: showComplaints(report, 100)})
}

// refreshLoop fetches lists when they are due, one after the other.
func (s *Service) refreshLoop() {
	t := time.NewTicker(time.Minute)
	defer t.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-t.C:
		}
		due, err := s.dueLists(clock.Wall())
		if err != nil {
			s.log.Error("looking for lists to refresh", "error", err)
		}
		for id, src := range due {
			if _, err := s.refresh(s.ctx, id, src); err != nil && s.ctx.Err() == nil {
				s.log.Warn("list not refreshed; the old text stays", "list", id, "error", status.Convert(err).Message())
			}
		}
	}
}

// dueLists is the lists whose time has come. Failures are retried sooner than a refresh, ever less often.
func (s *Service) dueLists(now time.Time) (map[string]*storev1.ListSource, error) {
	due := map[string]*storev1.ListSource{}
	err := s.db.View(func(tx *bolt.Tx) error {
		return tx.Bucket(bucketService).Bucket(bucketSources).ForEach(func(k, b []byte) error {
			src := new(storev1.ListSource)
			if err := proto.Unmarshal(b, src); err != nil {
				return fmt.Errorf("source of list %s: %w", k, err)
			}
			if src.Url == "" {
				return nil
			}
			refresh := time.Duration(src.Refresh) * time.Second
			next := time.Unix(src.Fetched, 0).Add(refresh)
			if src.Failures > 0 {
				next = time.Unix(src.Tried, 0).Add(min(refresh, minRefresh<<min(src.Failures, 8)))
			}
			if !now.Before(next) {
				due[string(k)] = src
			}
			return nil
		})
	})
	return due, err
}

// looksLikeList refuses what is plainly no list, whatever a lenient compiler might find in it.
func looksLikeList(text []byte) error {
	head := bytes.ToLower(bytes.TrimSpace(bytes.TrimPrefix(text[:min(len(text), 1024)], []byte("\xef\xbb\xbf"))))
	if len(head) == 0 {
		return errors.New("the text is empty")
	}
	for _, tag := range []string{"<!doctype", "<html", "<head", "<body", "<?xml"} {
		if bytes.HasPrefix(head, []byte(tag)) {
			return errors.New("this is a web page, not a list")
		}
	}
	sample := text[:min(len(text), 64<<10)]
	if bytes.IndexByte(sample, 0) >= 0 {
		return errors.New("this is binary data, not a list")
	}
	bad := 0
	for rest := sample; len(rest) > 0; {
		r, n := utf8.DecodeRune(rest)
		if r == utf8.RuneError && n == 1 {
			bad++ // up to three more where the sample was cut within a character
		}
		rest = rest[n:]
	}
	if bad > 3+len(sample)/20 {
		return errors.New("this is binary data, not a list")
	}
	return nil
}

// checkURL accepts where a list may be fetched.
func checkURL(s string) error {
	u, err := url.Parse(s)
	if err != nil {
		return invalid("url", "%v", err)
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || len(s) > 2048 {
		return invalid("url", "%.200q is not an http or https URL", s)
	}
	if u.User != nil {
		return invalid("url", "holds a password, which everyone who may see the list would see")
	}
	return nil
}

func showList(id string, revision uint64, l *userv1.List, src *storev1.ListSource) *adminv1.List {
	return &adminv1.List{Id: id, Revision: revision, Name: l.Name, Number: l.Number, Sha256: hex.EncodeToString(l.Sha256), Size: l.Size,
		Rules: l.Rules, Skipped: l.Skipped, Updated: l.Updated, Homepage: l.Homepage, Tenant: l.Tenant,
		Url: src.GetUrl(), Refresh: src.GetRefresh(), Error: src.GetError(), HeldRules: src.GetHeldRules()}
}
