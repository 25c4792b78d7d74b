package bizlogic

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
)

// Users, devices and policies have lists of their own: texts that were uploaded, or that the service fetches from
// a URL, once for all who name it. The bucket "own" holds one OwnSource for each text, under its URL or, uploaded,
// "sha256:" and the hash in hexadecimal; the bucket "own_uses" holds URL\x00OWNER, where OWNER is a user's id or
// policy/ID, with the hash of the text the owner has. Records hold that hash, so a text that changes is spread over
// the records that name it. An owner who would then have more rules than he may keeps the text he has, and is given
// the new one when there is room for it: when the text or what else he has becomes less.

// OwnLists bounds the lists that users have of their own. Every zero field means the default stated on it.
type OwnLists struct {
	Number  int   // of a user with all devices, or of a policy; 0 means 16
	MaxSize int64 // bytes of one list, unpacked; 0 means 16 MiB
	Rules   int   // of a user with all devices, own rules included; 0 means 500,000
}

func (o OwnLists) withDefaults() OwnLists {
	if o.Number <= 0 {
		o.Number = 16
	}
	if o.MaxSize <= 0 {
		o.MaxSize = 16 << 20
	}
	if o.Rules <= 0 {
		o.Rules = 500_000
	}
	return o
}

const (
	ownRefresh = 24 * time.Hour
	// spreadBy is how many records one commit changes when a text has changed.
	spreadBy = 200
	// keepUnused is how long a text stays that nobody names.
	keepUnused = 24 * time.Hour
)

// isURL tells the URL of a list from an id.
func isURL(id string) bool { return strings.Contains(id, "://") }

// checkOwnURL accepts where a list of users' own may be fetched. Whoever may see the user sees it, so it holds no
// password, and it names nothing of the service's machine.
func checkOwnURL(field, from string) error {
	u, err := parseURL(from)
	switch {
	case err != nil:
		return invalid(field, "%s", statusMessage(err))
	case u.Scheme == "file":
		return invalid(field, "%q is a file of the service's machine; upload it instead", redacted(u))
	case u.User != nil:
		return invalid(field, "%q holds a password, and with the settings everybody would see it; make it a list of the catalogue", redacted(u))
	case strings.ContainsRune(from, 0):
		return invalid(field, "a URL holds no zero byte")
	}
	return nil
}

// fetchOwn makes sure that the texts of URLs are here before settings that name them are stored.
func (s *Service) fetchOwn(ctx context.Context, urls []string) error {
	for _, from := range urls {
		if err := checkOwnURL("own_lists", from); err != nil {
			return err
		}
		src, err := s.loadOwn(from)
		if err != nil {
			return err
		}
		if src != nil {
			if hasText(s.opts.Dir, src.Sha256) {
				continue
			}
		}
		if err := s.refreshOwn(ctx, from, true); ours(err) {
			return err
		} else if err != nil {
			return invalid("own_lists", "%s", statusMessage(err))
		}
	}
	return nil
}

// ownURLs is the URLs that assignments add to own lists.
func ownURLs(assignments []*adminv1.Assignment) (urls []string) {
	for _, as := range assignments {
		if as.GetKey() != "own_lists" || as.GetOperation() == adminv1.Operation_OPERATION_REMOVE {
			continue
		}
		for part := range strings.SplitSeq(as.GetValue(), ",") {
			if _, from, ok := strings.Cut(strings.TrimSpace(part), "="); ok && isURL(from) {
				urls = append(urls, from)
			}
		}
	}
	return urls
}

func ownUpload(sum []byte) string { return "sha256:" + hex.EncodeToString(sum) }

// loadOwn reads what is known of a text; nil if nothing is.
func (s *Service) loadOwn(key string) (src *storev1.OwnSource, err error) {
	err = s.db.View(func(tx *bolt.Tx) error {
		src, err = (&view{tx: tx}).own(key)
		return err
	})
	return src, reading(err)
}

func (v *view) own(key string) (*storev1.OwnSource, error) {
	if len(key) > maxURL {
		return nil, nil
	}
	b := v.auxGet(bucketOwn, key)
	if b == nil {
		return nil, nil
	}
	src := new(storev1.OwnSource)
	if err := proto.Unmarshal(b, src); err != nil {
		return nil, fmt.Errorf("own list %s: %w", key, err)
	}
	if src.Source == nil {
		src.Source = new(storev1.ListSource)
	}
	return src, nil
}

// refreshOwn fetches a text and gives it to all who name it. With first, it may be one that nobody has fetched
// before; otherwise a failure is remembered with it.
func (s *Service) refreshOwn(ctx context.Context, from string, first bool) error {
	src, err := s.loadOwn(from)
	if err != nil {
		return err
	}
	if src == nil {
		if !first {
			return notFound("own list", showURL(from))
		}
		src = &storev1.OwnSource{Source: &storev1.ListSource{Url: from, Refresh: uint64(ownRefresh / time.Second)}}
	}
	if src.Spreading {
		return s.spread(ctx, from)
	}
	w := wanted{url: from, most: s.opts.Own.MaxSize, bound: "own_lists.max_size", own: true}
	if hasText(s.opts.Dir, src.Sha256) && len(src.Source.HeldSha256) == 0 {
		w.etag, w.lastModified = src.Source.Etag, src.Source.LastModified
	}
	got, err := s.fetch(ctx, w)
	defer got.text.drop()
	if ours(err) {
		return err
	}
	var report Report
	if err == nil && !got.unchanged {
		if report, err = s.judge(ctx, from, true, got.text); err == nil && report.Rules > s.opts.Own.Rules {
			err = fmt.Errorf("it has %d rules; at most %d are possible (own_lists.rules)", report.Rules, s.opts.Own.Rules)
		}
		if err != nil {
			err = fmt.Errorf("what %s serves cannot be used: %w", showURL(from), err)
		} else if err := got.text.keep(); err != nil {
			return storing(err)
		}
	}
	if ctx.Err() != nil {
		return status.FromContextError(ctx.Err()).Err()
	}
	if err != nil && len(src.Sha256) == 0 {
		return refused("%s", statusMessage(err)) // nobody has it: nothing to remember
	}
	var held *heldBack
	_, cerr := s.change(ctx, func(v *view) error {
		now, cerr := v.own(from)
		if cerr != nil {
			return cerr
		}
		if now == nil {
			now = src
		}
		switch {
		case err != nil:
			now.Source = failedFetch(now.Source, err)
		case got.unchanged:
			now.Source = fetched(now.Source, got)
		default:
			held = v.takeOwn(now, got, report)
		}
		return v.auxPut(bucketOwn, from, now)
	})
	switch {
	case cerr != nil:
		return cerr
	case err != nil:
		return refused("%s", statusMessage(err))
	case held != nil:
		held.log(s.log)
		return held
	}
	return s.spread(ctx, from)
}

// takeOwn gives a source the text that was fetched for it, or holds it if it has lost too many rules.
func (v *view) takeOwn(src *storev1.OwnSource, got download, report Report) (held *heldBack) {
	sum, content := got.text.hash(), got.text.content.hash()
	had := src.Source
	next := fetched(had, got)
	peak, since := v.b.guard.peak(had, src.Rules, v.now)
	next.PeakRules, next.PeakAt = peak, since
	same := bytes.Equal(had.ContentSha256, content)
	if len(src.Sha256) > 0 && !same && v.b.guard.trips(uint64(peak), uint64(report.Rules), uint64(v.b.guard.Min)) {
		held = &heldBack{list: had.Url, most: peak, window: v.b.guard.Window, rules: report.Rules, news: len(had.HeldSha256) == 0}
		src.Source = failedFetch(had, held)
		src.Source.HeldSha256, src.Source.HeldRules = sum, uint32(report.Rules)
		return held
	}
	if !same {
		ownText(src, got.text, report, v.now)
		next.ContentSha256 = content
	}
	if src.Rules >= peak {
		next.PeakRules, next.PeakAt = src.Rules, v.now.Unix()
	}
	src.Source = next
	return nil
}

func (s *Service) refreshOwnNow(ctx context.Context, from string) (*adminv1.RefreshListResponse, error) {
	before, err := s.loadOwn(from)
	if err == nil && before == nil {
		err = notFound("own list", showURL(from))
	}
	if err == nil {
		err = s.refreshOwn(ctx, from, false)
	}
	if err != nil {
		return nil, err
	}
	l, err := s.showOwn(from)
	if err != nil {
		return nil, err
	}
	return &adminv1.RefreshListResponse{Revision: s.Head(Users), Dataset: Users, List: l, Changed: l.Sha256 != hex.EncodeToString(before.Sha256)}, nil
}

func (s *Service) acceptOwn(ctx context.Context, from string) (*adminv1.AcceptListResponse, error) {
	src, err := s.loadOwn(from)
	switch {
	case err != nil:
		return nil, err
	case src == nil:
		return nil, notFound("own list", showURL(from))
	case len(src.Source.HeldSha256) == 0:
		return nil, refused("list %s has no text that is held", showURL(from))
	}
	held, err := s.openText(src.Source.HeldSha256)
	if err != nil {
		return nil, reading(err)
	}
	defer held.drop()
	report, err := s.judge(ctx, from, true, held)
	if err != nil {
		return nil, refused("list %s: %v", showURL(from), err)
	}
	_, err = s.change(ctx, func(v *view) error {
		src, err := v.own(from)
		if err != nil || src == nil {
			return cond(err, notFound("own list", showURL(from)))
		}
		src.Source.HeldSha256, src.Source.HeldRules, src.Source.Error, src.Source.Failures = nil, 0, "", 0
		src.Source.PeakRules, src.Source.PeakAt, src.Source.ContentSha256 = 0, 0, held.content.hash()
		ownText(src, held, report, v.now)
		return v.auxPut(bucketOwn, from, src)
	})
	if err == nil {
		err = s.spread(ctx, from)
	}
	if err != nil {
		return nil, err
	}
	l, err := s.showOwn(from)
	return &adminv1.AcceptListResponse{Revision: s.Head(Users), Dataset: Users, List: l}, err
}

// ownText makes a text that of a source.
func ownText(src *storev1.OwnSource, t *text, report Report, now time.Time) {
	src.Sha256, src.Size, src.Rules, src.Skipped = t.hash(), uint64(t.size), uint32(report.Rules), uint32(report.Skipped)
	src.Updated, src.Spreading = now.Unix(), true
}

// spread gives the text of a URL to all who name it, some in each commit, and notes when that is done. A service
// that ends in between goes on after its start.
func (s *Service) spread(ctx context.Context, from string) error {
	var after []byte
	var behind []string // those who keep the text before, as far as they are shown
	more := 0
	for {
		var owners [][]byte
		prefix := []byte(from + "\x00")
		err := s.db.View(func(tx *bolt.Tx) error {
			c := tx.Bucket(bucketService).Bucket(bucketOwnUses).Cursor()
			k, _ := c.Seek(append(prefix, after...))
			for ; bytes.HasPrefix(k, prefix) && len(owners) < spreadBy; k, _ = c.Next() {
				if owner := k[len(prefix):]; !bytes.Equal(owner, after) {
					owners = append(owners, bytes.Clone(owner))
				}
			}
			return nil
		})
		if err != nil {
			return reading(err)
		}
		var without []string
		_, err = s.change(ctx, func(v *view) error {
			src, err := v.own(from)
			if err != nil || src == nil || !src.Spreading {
				return err
			}
			for _, owner := range owners {
				given, err := v.giveOwn(string(owner), src)
				if err != nil {
					return err
				}
				if !given {
					without = append(without, string(owner))
				}
			}
			if len(owners) == 0 {
				src.Spreading = false
				return v.auxPut(bucketOwn, from, src)
			}
			return nil
		})
		if err != nil {
			return err
		}
		shown := min(len(without), maxShownBehind-len(behind))
		behind, more = append(behind, without[:shown]...), more+len(without)-shown
		if len(owners) == 0 {
			if len(behind) > 0 {
				s.log.Warn("a list of users has grown, and some would have more rules with it than they may (own_lists.rules); they keep the text they had until there is room",
					"url", showURL(from), "owners", behind, "more", more, "most_rules", s.opts.Own.Rules)
			}
			return nil
		}
		after = owners[len(owners)-1]
	}
}

// maxShownBehind is how many owners are named in a line of the log.
const maxShownBehind = 10

// giveOwn brings the own lists of a record up to a source, if there is room.
func (v *view) giveOwn(owner string, src *storev1.OwnSource) (given bool, err error) {
	if strings.HasPrefix(owner, "policy/") {
		p := new(userv1.Policy)
		if _, ok, err := v.load(Catalogue, owner, p); err != nil || !ok {
			return true, err
		}
		if given, err = v.catchUp(policyLayers(p), src.Source.Url); err != nil {
			return false, err
		}
		return given, v.put(Catalogue, owner, p)
	}
	u := new(userv1.User)
	if _, ok, err := v.load(Users, owner, u); err != nil || !ok {
		return true, err
	}
	if given, err = v.catchUp(userLayers(u), src.Source.Url); err != nil {
		return false, err
	}
	return given, v.put(Users, owner, u)
}

// catchUp brings own lists up to their sources, or those of one URL, where the owner may have as many rules as it
// makes then. The others stay as they are.
func (v *view) catchUp(l layers, only string) (all bool, err error) {
	all = true
	for _, own := range l.lists() {
		if own.Url == "" || only != "" && own.Url != only {
			continue
		}
		src, err := v.own(own.Url)
		if err != nil {
			return false, err
		}
		if src == nil || len(src.Sha256) == 0 || bytes.Equal(src.Sha256, own.Sha256) && src.Rules == own.Rules {
			continue
		}
		sha256, size, rules := own.Sha256, own.Size, own.Rules
		own.Sha256, own.Size, own.Rules = src.Sha256, src.Size, src.Rules
		if own.Rules > rules && l.rules() > v.b.own.Rules {
			own.Sha256, own.Size, own.Rules = sha256, size, rules
			all = false
		}
	}
	return all, nil
}

// dueOwn is the URLs whose time has come: to be fetched, to be spread further, or to be forgotten, which is done
// here. Those that have failed least come first: there may be many that take their time to fail.
func (s *Service) dueOwn(now time.Time) (due []string, err error) {
	var unused []string
	failures := map[string]uint32{}
	err = s.db.View(func(tx *bolt.Tx) error {
		v := &view{tx: tx}
		return tx.Bucket(bucketService).Bucket(bucketOwn).ForEach(func(k, _ []byte) error {
			src, err := v.own(string(k))
			if err != nil {
				return err
			}
			old := now.Add(-keepUnused).Unix() > max(src.Updated, src.Source.Tried)
			switch {
			case src.Source.Url == "":
				if old && !hasText(s.opts.Dir, src.Sha256) { // it has been forgotten
					unused = append(unused, string(k))
				}
			case usesOf(tx, string(k), 1) == 0:
				if old {
					unused = append(unused, string(k))
				}
			case src.Spreading || !now.Before(s.nextFetch(string(k), src.Source)):
				due = append(due, string(k))
				failures[string(k)] = src.Source.Failures
			}
			return nil
		})
	})
	slices.SortStableFunc(due, func(a, b string) int { return cmp.Compare(failures[a], failures[b]) })
	if err != nil || len(unused) == 0 {
		return due, err
	}
	_, err = s.change(s.ctx, func(v *view) error {
		for _, k := range unused {
			if !isURL(k) || usesOf(v.tx, k, 1) == 0 {
				v.auxDelete(bucketOwn, k)
			}
		}
		return nil
	})
	return due, err
}

// usesOf counts who names a URL, up to a bound.
func usesOf(tx *bolt.Tx, from string, most int) (n int) {
	prefix := []byte(from + "\x00")
	c := tx.Bucket(bucketService).Bucket(bucketOwnUses).Cursor()
	for k, _ := c.Seek(prefix); bytes.HasPrefix(k, prefix) && n < most; k, _ = c.Next() {
		n++
	}
	return n
}

// maxShownUses is how far uses are counted for people.
const maxShownUses = 100_000

func (s *Service) showOwn(from string) (l *adminv1.List, err error) {
	err = s.db.View(func(tx *bolt.Tx) error {
		src, err := (&view{tx: tx}).own(from)
		if err != nil || src == nil {
			return cond(err, notFound("own list", showURL(from)))
		}
		l = showOwnSource(tx, from, src)
		return nil
	})
	return l, reading(err)
}

// eachOwn shows the lists at URLs that users have among their own.
func (s *Service) eachOwn(f func(*adminv1.List)) error {
	return reading(s.db.View(func(tx *bolt.Tx) error {
		v := &view{tx: tx}
		return tx.Bucket(bucketService).Bucket(bucketOwn).ForEach(func(k, _ []byte) error {
			src, err := v.own(string(k))
			if err == nil && src.Source.Url != "" {
				f(showOwnSource(tx, string(k), src))
			}
			return err
		})
	}))
}

func showOwnSource(tx *bolt.Tx, from string, src *storev1.OwnSource) *adminv1.List {
	l := showList(showURL(from), 0, &userv1.List{Sha256: src.Sha256, Size: src.Size, Rules: src.Rules, Skipped: src.Skipped, Updated: src.Updated}, src.Source)
	prefix := []byte(from + "\x00")
	c := tx.Bucket(bucketService).Bucket(bucketOwnUses).Cursor()
	for k, has := c.Seek(prefix); bytes.HasPrefix(k, prefix) && l.UsedBy < maxShownUses; k, has = c.Next() {
		l.UsedBy++
		if len(has) > 0 && !src.Spreading && !bytes.Equal(has, src.Sha256) { // earlier versions wrote nothing
			l.Behind++
		}
	}
	return l
}

// indexOwn brings the index of who names which URL from one version of a record to the next.
func (b *batch) indexOwn(owner string, before, after layers) error {
	uses := b.tx.Bucket(bucketService).Bucket(bucketOwnUses)
	keep := after.texts()
	for u := range before.texts() {
		if _, ok := keep[u]; !ok {
			if err := uses.Delete([]byte(u + "\x00" + owner)); err != nil {
				return err
			}
		}
	}
	for u, sum := range keep {
		if err := uses.Put([]byte(u+"\x00"+owner), []byte(sum)); err != nil {
			return err
		}
	}
	return nil
}

// Layers are what one user with all devices, or a policy, has.
type layers struct {
	settings []*userv1.Settings
	own      []*userv1.Rules
}

func userLayers(u *userv1.User) layers {
	l := layers{[]*userv1.Settings{u.GetSettings()}, []*userv1.Rules{u.GetRules()}}
	for _, d := range u.GetDevices() {
		l.settings, l.own = append(l.settings, d.GetSettings()), append(l.own, d.GetRules())
	}
	return l
}

func policyLayers(p *userv1.Policy) layers {
	return layers{[]*userv1.Settings{p.GetSettings()}, []*userv1.Rules{p.GetRules()}}
}

// policyRecord is the layers of a record of the catalogue; none if it is no policy.
func policyRecord(key string, record []byte) layers {
	p := new(userv1.Policy)
	if strings.HasPrefix(key, "policy/") {
		_ = proto.Unmarshal(record, p) // was checked before it was written
	}
	return policyLayers(p)
}

// lists is the own lists of all layers.
func (l layers) lists() (all []*userv1.OwnList) {
	for _, s := range l.settings {
		all = append(all, s.GetOwnLists().GetValues()...)
	}
	return all
}

// texts is the URLs of the own lists, with the hashes of the texts that are had of them.
func (l layers) texts() map[string]string {
	all := map[string]string{}
	for _, own := range l.lists() {
		if own.Url != "" {
			all[own.Url] = string(own.Sha256)
		}
	}
	return all
}

// rules is how many rules there are, own ones and those of own lists.
func (l layers) rules() (n int) {
	for _, own := range l.lists() {
		n += int(own.Rules)
	}
	for _, r := range l.own {
		n += int(r.GetRules())
	}
	return n
}

// parseOwnList reads ID=URL or ID=SHA256. The text is here already: see fetchOwn.
func (v *view) parseOwnList(s string) (*userv1.OwnList, error) {
	id, from, ok := strings.Cut(s, "=")
	if !ok {
		return nil, invalid("own_lists", "%q is neither ID=URL nor ID=SHA256; a comma within a URL is written %%2C", s)
	}
	l := &userv1.OwnList{Id: id}
	if isURL(from) {
		l.Url = from
	} else {
		b, err := hex.DecodeString(from)
		if err != nil || len(b) != 32 {
			return nil, invalid("own_lists", "%q is neither a URL nor a SHA-256 in hexadecimal", from)
		}
		l.Sha256 = b
	}
	return l, v.settleOwnList("own_lists", l)
}

// settleOwnList checks an own list and fills in what is known of its text.
func (v *view) settleOwnList(field string, l *userv1.OwnList) error {
	if err := checkID(field, l.Id); err != nil {
		return err
	}
	key := l.Url
	if l.Url == "" {
		if len(l.Sha256) != 32 {
			return invalid(field, "%s has a SHA-256 of %d bytes", l.Id, len(l.Sha256))
		}
		key = ownUpload(l.Sha256)
	} else if err := checkOwnURL(field, l.Url); err != nil {
		return err
	}
	src, err := v.own(key)
	if err != nil {
		return err
	}
	if src != nil {
		l.Sha256, l.Size, l.Rules = src.Sha256, src.Size, src.Rules
	}
	if !hasText(v.b.dir, l.Sha256) {
		return invalid(field, "the text %x of %s is not here; upload it first", l.Sha256, l.Id)
	}
	fi, err := os.Stat(blobPath(v.b.dir, l.Sha256))
	if err != nil {
		return err
	}
	if l.Size = uint64(fi.Size()); fi.Size() > v.b.own.MaxSize {
		return invalid(field, "%s has %d bytes; at most %d (own_lists.max_size)", l.Id, fi.Size(), v.b.own.MaxSize)
	}
	return nil
}

// check bounds what one user, or a policy, has. What is too much already, by limits that were others then, may stay,
// but not become more.
func (o OwnLists) check(now, before layers) error {
	if n := len(now.lists()); n > o.Number && n > len(before.lists()) {
		return invalid("own_lists", "would be %d; at most %d (own_lists.number)", n, o.Number)
	}
	if n := now.rules(); n > o.Rules && n > before.rules() {
		return invalid("own_lists", "would have %d rules with the rules beside them; at most %d (own_lists.rules)", n, o.Rules)
	}
	return nil
}

func (a listServer) PutBlob(stream grpc.ClientStreamingServer[adminv1.PutBlobRequest, adminv1.PutBlobResponse]) error {
	t, err := a.s.receive(a.s.opts.Own.MaxSize, "own_lists.max_size", func() ([]byte, error) {
		m, err := stream.Recv()
		return m.GetData(), err
	})
	if err != nil {
		return err
	}
	defer t.drop()
	if err := looksLikeList(t.head); err != nil {
		return invalid("data", "%v", err)
	}
	report, err := a.s.compile(stream.Context(), "blob", true, t)
	if err != nil {
		return invalid("data", "%v", err)
	}
	if report.Rules > a.s.opts.Own.Rules {
		return invalid("data", "has %d rules; at most %d (own_lists.rules)", report.Rules, a.s.opts.Own.Rules)
	}
	if err := t.keep(); err != nil {
		return storing(err)
	}
	src := new(storev1.OwnSource)
	ownText(src, t, report, clock.Wall())
	src.Spreading = false // to nobody: a text that is named by its hash does not change
	if _, err := a.s.change(stream.Context(), func(v *view) error { return v.auxPut(bucketOwn, ownUpload(src.Sha256), src) }); err != nil {
		return err
	}
	return stream.SendAndClose(&adminv1.PutBlobResponse{Sha256: hex.EncodeToString(src.Sha256), Size: src.Size,
		Rules: src.Rules, Complaints: showComplaints(report, 100)})
}
