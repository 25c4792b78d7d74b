package bizlogic

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
)

const (
	maxLines = 1000

	// keepTombstones is how long a resolver may be away and still be caught up by a Watch.
	keepTombstones = 7 * 24 * time.Hour
)

// dataServer moves data in bulk and looks after the datasets.
type dataServer struct {
	adminv1.UnimplementedDataServiceServer
	s *Service
}

func (a dataServer) Import(ctx context.Context, req *adminv1.ImportRequest) (*adminv1.ImportResponse, error) {
	s := a.s
	if n := len(req.GetId()); n < 1 || n > 64 {
		return nil, invalid("id", "has %d bytes; 1 to 64 are possible", n)
	}
	if len(req.GetLines()) > maxLines {
		return nil, invalid("lines", "are %d; at most %d at once", len(req.GetLines()), maxLines)
	}
	if len(req.GetLines()) > 0 && req.GetFirstLine() == 0 {
		return nil, invalid("first_line", "lines are counted from 1")
	}
	state := &storev1.ImportState{}
	if err := s.db.View(func(tx *bolt.Tx) error {
		return proto.Unmarshal((&view{tx: tx}).auxGet(bucketImports, req.GetId()), state)
	}); err != nil {
		return nil, reading(err)
	}
	next := max(state.NextLine, 1)
	end := req.GetFirstLine() + uint64(len(req.GetLines()))
	if len(req.GetLines()) == 0 || end <= next {
		return &adminv1.ImportResponse{Revision: state.Revision, NextLine: next}, nil
	}
	if req.GetFirstLine() > next {
		return nil, invalid("first_line", "is %d, but line %d has not come yet", req.GetFirstLine(), next)
	}
	in, err := s.parseImport(ctx, req.GetLines()[next-req.GetFirstLine():], next)
	if err != nil {
		return nil, err
	}
	resp := &adminv1.ImportResponse{NextLine: end}
	o := &op{accept: req.GetAcceptShrink(), plan: func(v *view) error {
		if err := in.stage(v); err != nil {
			return err
		}
		if err := v.drop(); err != nil {
			return err
		}
		resp.Changed, resp.Datasets = 0, nil
		for _, kind := range kinds {
			if n := len(v.staged[kind]); n > 0 {
				resp.Changed += uint32(n)
				resp.Datasets = append(resp.Datasets, kind)
			}
		}
		done := &storev1.ImportState{NextLine: end, Revision: state.Revision, Updated: v.now.Unix()}
		if resp.Changed > 0 {
			done.Revision = v.b.id.Revision + 1
		}
		resp.Revision = done.Revision
		return v.auxPut(bucketImports, req.GetId(), done)
	}}
	if _, err := s.do(ctx, o); err != nil {
		return nil, err
	}
	return resp, nil
}

// An imported is the lines of a batch, parsed.
type imported struct {
	lists    []importedLine[*adminv1.List]
	policies []importedLine[*adminv1.Policy]
	users    []importedLine[*adminv1.User]
	entries  []importedLine[*adminv1.CatalogueEntry]
	texts    map[string]importedText // of lists, by SHA-256 in hexadecimal
}

type importedText struct {
	report  Report
	content []byte // see contentHash
}

type importedLine[M any] struct {
	line uint64
	m    M
}

// atLine says which line an error is about, keeping its code.
func atLine(line uint64, err error) error {
	if err == nil {
		return nil
	}
	return invalid(fmt.Sprintf("line %d", line), "%s", statusMessage(err))
}

// parseImport reads lines, and fetches or judges what must not wait in the writer.
func (s *Service) parseImport(ctx context.Context, lines [][]byte, first uint64) (*imported, error) {
	in := &imported{texts: map[string]importedText{}}
	for i, raw := range lines {
		line := first + uint64(i)
		raw = bytes.TrimSpace(raw)
		if len(raw) == 0 || raw[0] == '#' {
			continue
		}
		var entry map[string]json.RawMessage
		if err := json.Unmarshal(raw, &entry); err != nil {
			return nil, atLine(line, fmt.Errorf("not a JSON object: %w", err))
		}
		if len(entry) != 1 {
			return nil, atLine(line, errors.New(`not one of {"user":{…}}, {"policy":{…}}, {"list":{…}}, {"entry":{…}}`))
		}
		for what, body := range entry {
			if err := s.parseLine(ctx, in, line, what, body); err != nil {
				return nil, atLine(line, err)
			}
		}
	}
	return in, nil
}

func (s *Service) parseLine(ctx context.Context, in *imported, line uint64, what string, body []byte) error {
	switch what {
	case "user":
		u := new(adminv1.User)
		if err := protojson.Unmarshal(body, u); err != nil {
			return err
		}
		if err := checkID("user.id", u.Id); err != nil {
			return err
		}
		if err := s.judgeRules(u.Id, u.Rules); err != nil {
			return err
		}
		for _, dev := range u.Devices {
			if err := checkDevice("user.devices", dev); err != nil {
				return err
			}
			if err := s.judgeRules(u.Id+"/"+dev.Id, dev.Rules); err != nil {
				return err
			}
		}
		if err := s.fetchOwn(ctx, sortedKeys(userLayers(&userv1.User{Settings: u.Settings, Devices: u.Devices}).texts())); err != nil {
			return err
		}
		in.users = append(in.users, importedLine[*adminv1.User]{line, u})
	case "policy":
		p := new(adminv1.Policy)
		if err := protojson.Unmarshal(body, p); err != nil {
			return err
		}
		if err := checkID("policy.id", p.Id); err != nil {
			return err
		}
		if err := s.judgeRules("policy/"+p.Id, p.Rules); err != nil {
			return err
		}
		if err := s.fetchOwn(ctx, sortedKeys(policyLayers(&userv1.Policy{Settings: p.Settings}).texts())); err != nil {
			return err
		}
		in.policies = append(in.policies, importedLine[*adminv1.Policy]{line, p})
	case "list":
		l := new(adminv1.List)
		if err := protojson.Unmarshal(body, l); err != nil {
			return err
		}
		if err := checkID("list.id", l.Id); err != nil {
			return err
		}
		if err := s.importText(ctx, in, l); err != nil {
			return err
		}
		in.lists = append(in.lists, importedLine[*adminv1.List]{line, l})
	case "entry":
		e := new(adminv1.CatalogueEntry)
		if err := protojson.Unmarshal(body, e); err != nil {
			return err
		}
		if err := s.checkEntry(e); err != nil {
			return err
		}
		in.entries = append(in.entries, importedLine[*adminv1.CatalogueEntry]{line, e})
	default:
		return fmt.Errorf("%q is none of user, policy, list, entry", what)
	}
	return nil
}

// judgeRules checks imported rules and counts them.
func (s *Service) judgeRules(name string, r *userv1.Rules) error {
	text := r.GetText()
	if sum := r.GetSha256(); len(sum) > 0 {
		if len(sum) != 32 {
			return invalid("rules.sha256", "has %d bytes", len(sum))
		}
		var err error
		if text, err = os.ReadFile(s.blobPath(sum)); err != nil {
			return invalid("rules.sha256", "the text %x is not here", sum)
		}
	}
	if r == nil {
		return nil
	}
	if len(r.GetText()) > maxInline {
		return invalid("rules.text", "has %d bytes; longer than %d goes by sha256", len(text), maxInline)
	}
	report, err := s.opts.Compile(name, bytes.NewReader(text))
	if err != nil {
		return err
	}
	if report.Skipped > 0 {
		what := ""
		if len(report.Complaints) > 0 {
			what = fmt.Sprintf("; line %d: %s", report.Complaints[0].Line, report.Complaints[0].What)
		}
		return invalid("rules", "%d lines cannot be used%s", report.Skipped, what)
	}
	r.Rules = uint32(report.Rules)
	return nil
}

// importText finds the text of an imported list: by its SHA-256 if it is here, else at its URL.
func (s *Service) importText(ctx context.Context, in *imported, l *adminv1.List) error {
	if l.Url != "" {
		var err error
		if l.Url, err = s.listURL(l.Id, l.Url); err != nil {
			return err
		}
		if l.Refresh == 0 {
			l.Refresh = uint64(defaultRefresh / time.Second)
		}
		if l.Refresh < uint64(minRefresh/time.Second) || l.Refresh > 1<<31 {
			return invalid("list.refresh", "%d s is not between %v and 68 years", l.Refresh, minRefresh)
		}
	}
	var t *text
	if sum, err := hex.DecodeString(l.Sha256); err == nil && len(sum) == 32 {
		if t, err = s.openText(sum); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if t == nil {
		if l.Url == "" {
			return invalid("list", "%s has neither a url nor the sha256 of a text that is here", l.Id)
		}
		got, err := s.fetch(ctx, s.wantedList(l.Url))
		if err != nil {
			return err
		}
		t = got.text
	}
	defer t.drop()
	report, err := s.judge(ctx, l.Id, false, t)
	if err != nil {
		return err
	}
	if err := t.keep(); err != nil {
		return err
	}
	l.Sha256, l.Size = hex.EncodeToString(t.hash()), uint64(t.size)
	l.Name = cmp.Or(l.Name, report.title())
	in.texts[l.Sha256] = importedText{report, t.content.hash()}
	return nil
}

// stage stages a batch: first what others refer to.
func (in *imported) stage(v *view) error {
	for _, x := range in.lists {
		if err := atLine(x.line, in.stageList(v, x.m)); err != nil {
			return err
		}
	}
	for _, x := range in.entries {
		if err := atLine(x.line, v.importEntry(x.m)); err != nil {
			return err
		}
	}
	for _, x := range in.policies {
		p := &userv1.Policy{Name: x.m.Name, Settings: x.m.Settings, Rules: x.m.Rules, Tenant: x.m.Tenant}
		err := v.checkSettings("policy.settings", p.Settings)
		if err == nil {
			err = v.putPolicy(x.m.Id, p)
		}
		if err := atLine(x.line, err); err != nil {
			return err
		}
	}
	// A device may move from one user of the batch to another, in either order.
	before := make([]*userv1.User, len(in.users))
	for i, x := range in.users {
		before[i] = new(userv1.User)
		if _, _, err := v.load(Users, x.m.Id, before[i]); err != nil {
			return err
		}
		v.release(claims(x.m.Id, before[i]))
	}
	for i, x := range in.users {
		if err := atLine(x.line, v.importUser(x.m, before[i])); err != nil {
			return err
		}
	}
	return nil
}

func (v *view) importUser(in *adminv1.User, before *userv1.User) error {
	if err := v.checkSettings("user.settings", in.Settings); err != nil {
		return err
	}
	for _, dev := range in.Devices {
		if err := v.checkSettings("user.devices.settings", dev.Settings); err != nil {
			return err
		}
	}
	created := in.Created
	if created == 0 {
		created = cmp.Or(before.Created, v.now.Unix())
	}
	return v.putUser(in.Id, &userv1.User{Policy: in.Policy, Settings: in.Settings, Rules: in.Rules, Devices: in.Devices,
		Disabled: in.Disabled, Tenant: in.Tenant, Name: in.Name, Created: created, AutoDevices: in.AutoDevices, MaxDevices: in.MaxDevices})
}

func (in *imported) stageList(v *view, l *adminv1.List) error {
	if err := checkText("list.name", l.Name, maxName); err != nil {
		return err
	}
	if err := checkText("list.homepage", l.Homepage, 2048); err != nil {
		return err
	}
	old, src := new(userv1.List), new(storev1.ListSource)
	_, ok, err := v.load(Catalogue, "list/"+l.Id, old)
	if err != nil {
		return err
	}
	if err := proto.Unmarshal(v.auxGet(bucketSources, l.Id), src); err != nil {
		return err
	}
	sum, err := hex.DecodeString(l.Sha256)
	if err != nil {
		return invalid("list.sha256", "%v", err)
	}
	taken := in.texts[l.Sha256]
	report := taken.report
	list := &userv1.List{Name: l.Name, Number: old.Number, Sha256: sum, Size: l.Size, Rules: uint32(report.Rules), Skipped: uint32(report.Skipped),
		Updated: l.Updated, Homepage: l.Homepage, Tenant: l.Tenant}
	if list.Updated == 0 {
		if list.Updated = v.now.Unix(); bytes.Equal(old.Sha256, sum) {
			list.Updated = old.Updated
		}
	}
	if !ok {
		if list.Number, err = v.freeNumber(listKind); err != nil {
			return err
		}
	} else if !v.accept && v.b.guard.trips(uint64(old.Rules), uint64(list.Rules), uint64(v.b.guard.Min)) {
		return refused("the shrink guard holds: rules of list %s would fall from %d to %d", l.Id, old.Rules, list.Rules)
	}
	if err := v.put(Catalogue, "list/"+l.Id, list); err != nil {
		return err
	}
	if src.Url != l.Url || src.Refresh != l.Refresh {
		src = &storev1.ListSource{Url: l.Url, Refresh: l.Refresh, Fetched: v.now.Unix(), Tried: v.now.Unix()}
	}
	if src.ContentSha256 = taken.content; !bytes.Equal(old.Sha256, sum) {
		src.Etag, src.LastModified = "", "" // of another text
	}
	return v.auxPut(bucketSources, l.Id, src)
}

func (a dataServer) Export(req *adminv1.ExportRequest, stream grpc.ServerStreamingServer[adminv1.ExportResponse]) error {
	switch req.GetOnly() {
	case "", "user", "policy", "list", "entry":
	default:
		return invalid("only", "%q is none of user, policy, list, entry", req.GetOnly())
	}
	want := func(what string) bool { return req.GetOnly() == "" || req.GetOnly() == what }
	if want("list") {
		lists, err := listServer{s: a.s}.ListLists(stream.Context(), nil)
		if err != nil {
			return err
		}
		if err := exportLines(stream, "list", lists.Lists); err != nil {
			return err
		}
	}
	if want("entry") {
		entries, err := a.s.ownEntries()
		if err != nil {
			return err
		}
		if err := exportLines(stream, "entry", entries); err != nil {
			return err
		}
	}
	if want("policy") {
		policies, err := policyServer{s: a.s}.ListPolicies(stream.Context(), nil)
		if err != nil {
			return err
		}
		if err := exportLines(stream, "policy", policies.Policies); err != nil {
			return err
		}
	}
	if !want("user") {
		return nil
	}
	page := &adminv1.ListUsersRequest{Limit: 500}
	for {
		users, err := userServer{s: a.s}.ListUsers(stream.Context(), page)
		if err != nil {
			return err
		}
		if err := exportLines(stream, "user", users.Users); err != nil {
			return err
		}
		if page.Page = users.NextPage; page.Page == "" {
			return nil
		}
	}
}

func exportLines[M proto.Message](stream grpc.ServerStreamingServer[adminv1.ExportResponse], what string, items []M) error {
	resp, size := new(adminv1.ExportResponse), 0
	for _, m := range items {
		b, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
		if err != nil {
			return reading(err)
		}
		var line bytes.Buffer
		if err := json.Compact(&line, fmt.Appendf(nil, "{%q:%s}", what, b)); err != nil { // protojson varies its white space
			return reading(err)
		}
		resp.Lines = append(resp.Lines, line.Bytes())
		if size += line.Len(); size > maxDelta {
			if err := stream.Send(resp); err != nil {
				return err
			}
			resp, size = new(adminv1.ExportResponse), 0
		}
	}
	if len(resp.Lines) == 0 {
		return nil
	}
	return stream.Send(resp)
}

func (a dataServer) ServiceStatus(context.Context, *adminv1.ServiceStatusRequest) (*adminv1.ServiceStatusResponse, error) {
	return a.s.Status(), nil
}

// Status is how the service stands.
func (s *Service) Status() *adminv1.ServiceStatusResponse {
	resp := &adminv1.ServiceStatusResponse{Tickets: uint32(s.admission.out(clock.Elapsed())), Version: s.opts.Version}
	for _, kind := range kinds {
		d := s.datasets[kind]
		d.mu.Lock()
		root := d.tree.Root()
		resp.Datasets = append(resp.Datasets, &adminv1.DatasetStatus{Kind: kind, State: "serving", Dataset: hex.EncodeToString(d.id),
			Lineage: hex.EncodeToString(s.db.lineage[:]), Revision: d.head, Head: d.head, Root: root.String(), Records: d.records, Totals: d.totals})
		d.mu.Unlock()
	}
	s.watches.Range(func(any, any) bool { resp.Watches++; return true })
	return resp
}

func (a dataServer) AcceptShrink(ctx context.Context, req *adminv1.AcceptShrinkRequest) (*adminv1.AcceptShrinkResponse, error) {
	kind := req.GetKind()
	if kind == "" {
		kind = Users
	}
	if _, err := a.s.dataset(kind, ""); err != nil {
		return nil, err
	}
	if err := checkText("why", req.GetWhy(), 1000); err != nil {
		return nil, err
	}
	revision, err := a.s.change(ctx, func(v *view) error {
		m, err := v.b.metaNow(kind)
		if err != nil {
			return err
		}
		return v.put(kind, keyAccepted, &userv1.ShrinkAccepted{ThroughRevision: v.b.id.Revision + 1, Totals: m.Totals,
			By: "operator", Why: req.GetWhy(), Accepted: v.now.Unix()})
	})
	if err != nil {
		return nil, err
	}
	return &adminv1.AcceptShrinkResponse{Revision: revision, Dataset: kind}, nil
}

func (a dataServer) Backup(_ *adminv1.BackupRequest, stream grpc.ServerStreamingServer[adminv1.BackupResponse]) error {
	return a.s.Backup(writerFunc(func(b []byte) (int, error) {
		for rest := b; len(rest) > 0; {
			n := min(len(rest), 1<<20)
			if err := stream.Send(&adminv1.BackupResponse{Data: rest[:n]}); err != nil {
				return 0, err
			}
			rest = rest[n:]
		}
		return len(b), nil
	}))
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// forgetOld forgets tombstones, imports and blobs that nobody needs any more.
func (s *Service) forgetOld() error {
	now := clock.Wall()
	_, err := s.change(s.ctx, func(v *view) error {
		for _, kind := range kinds {
			if err := v.forgetTombstones(kind, now.Add(-keepTombstones)); err != nil {
				return err
			}
		}
		return v.tx.Bucket(bucketService).Bucket(bucketImports).ForEach(func(k, b []byte) error {
			st := new(storev1.ImportState)
			if proto.Unmarshal(b, st) != nil || time.Unix(st.Updated, 0).Before(now.Add(-keepTombstones)) {
				v.auxDelete(bucketImports, string(k))
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	return s.forgetBlobs(now)
}

// forgetTombstones drops a dataset's tombstones of before a time, and with them the possibility to resume
// from before the newest of those.
func (v *view) forgetTombstones(kind string, before time.Time) error {
	ds := v.tx.Bucket([]byte(kind))
	type old struct{ key, revision []byte }
	var gone []old
	err := ds.Bucket(bucketTombstones).ForEach(func(key, revision []byte) error {
		var e storev1.Entry
		if err := getProto(ds.Bucket(bucketByRevision), append(bytes.Clone(revision), key...), &e); err != nil {
			return fmt.Errorf("tombstone %q of %s: %w", key, kind, err)
		}
		if time.Unix(e.RemovedAt, 0).Before(before) {
			gone = append(gone, old{bytes.Clone(key), bytes.Clone(revision)})
		}
		return nil
	})
	if err != nil || len(gone) == 0 {
		return err
	}
	w, err := v.b.workOn(kind)
	if err != nil {
		return err
	}
	for _, o := range gone {
		w.meta.Oldest = max(w.meta.Oldest, binary.BigEndian.Uint64(o.revision))
		err := errors.Join(ds.Bucket(bucketTombstones).Delete(o.key), ds.Bucket(bucketByRevision).Delete(append(o.revision, o.key...)))
		if err != nil {
			v.b.broken = err // half done: give the transaction up
			return err
		}
	}
	return nil
}

// forgetBlobs removes blobs that no record names and that are a day old.
func (s *Service) forgetBlobs(now time.Time) error {
	keep := map[string]bool{}
	for _, kind := range []string{Catalogue, Users} {
		if err := s.namedBlobs(kind, keep); err != nil {
			return err
		}
	}
	err := s.db.View(func(tx *bolt.Tx) error {
		svc := tx.Bucket(bucketService)
		err := svc.Bucket(bucketSources).ForEach(func(_, b []byte) error {
			src := new(storev1.ListSource)
			err := proto.Unmarshal(b, src)
			keep[hex.EncodeToString(src.HeldSha256)] = true
			return err
		})
		return errors.Join(err, svc.Bucket(bucketOwn).ForEach(func(_, b []byte) error {
			src := new(storev1.OwnSource)
			err := proto.Unmarshal(b, src)
			if src.GetSource().GetUrl() != "" { // what was uploaded goes with those who name it
				keep[hex.EncodeToString(src.Sha256)] = true
				keep[hex.EncodeToString(src.Source.HeldSha256)] = true
			}
			return err
		}))
	})
	if err != nil {
		return err
	}
	return filepath.WalkDir(filepath.Join(s.opts.Dir, "blobs"), func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || d.IsDir() || keep[d.Name()] {
			return err
		}
		fi, err := d.Info()
		if err != nil || fi.ModTime().After(now.Add(-24*time.Hour)) {
			return nil
		}
		return os.Remove(path)
	})
}

// namedBlobs collects what the records of a dataset name, a few thousand records per transaction.
func (s *Service) namedBlobs(kind string, keep map[string]bool) error {
	var from []byte
	for more := true; more; {
		err := s.db.View(func(tx *bolt.Tx) error {
			c := tx.Bucket([]byte(kind)).Bucket(bucketRecords).Cursor()
			k, v := c.Seek(from)
			for n := 0; k != nil && n < 4096; n++ {
				_, b, err := openRecord(v)
				if err != nil {
					return err
				}
				nameBlobs(kind, string(k[8:]), b, keep)
				k, v = c.Next()
			}
			from, more = bytes.Clone(k), k != nil
			return s.ctx.Err()
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func nameBlobs(kind, key string, b []byte, keep map[string]bool) {
	add := func(sum []byte) { keep[hex.EncodeToString(sum)] = true }
	layer := func(s *userv1.Settings, r *userv1.Rules) {
		add(r.GetSha256())
		for _, l := range s.GetOwnLists().GetValues() {
			add(l.Sha256)
		}
	}
	switch {
	case kind == Users:
		u := new(userv1.User)
		_ = proto.Unmarshal(b, u) // unreadable: names nothing we could give
		layer(u.Settings, u.Rules)
		for _, dev := range u.Devices {
			layer(dev.Settings, dev.Rules)
		}
	case strings.HasPrefix(key, "policy/"):
		p := new(userv1.Policy)
		_ = proto.Unmarshal(b, p)
		layer(p.Settings, p.Rules)
	case strings.HasPrefix(key, "list/"):
		l := new(userv1.List)
		_ = proto.Unmarshal(b, l)
		add(l.Sha256)
	}
}
