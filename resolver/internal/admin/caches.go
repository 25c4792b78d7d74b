package admin

import (
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/answercache"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
)

// Caches is Cache over the RRset cache and the answer cache. Entries for a client subnet are purged and dumped,
// but not shown by Look, which would have to guess the subnets.
type Caches struct {
	RRsets  *rrcache.Cache
	Answers *answercache.Cache
	// Key is that of the answer cache's hashes.
	Key dnsname.Key
	// Forget is told what Purge removes, so that what was concluded from it goes too. Nil: nobody is.
	Forget func(name dnsname.Name, subtree bool)
	// Views names the views besides the public tree, which is view 0.
	Views map[query.View]string
}

// Look returns what is held for a name, of one type or, if typ is 0, of every type that has a number below
// 512.
func (c Caches) Look(name dnsname.Name, typ uint16) []*adminv1.CacheEntry {
	now := clock.Elapsed()
	var out []*adminv1.CacheEntry
	for _, v := range append([]query.View{0}, slices.Sorted(maps.Keys(c.Views))...) {
		view := ""
		if v != 0 {
			view = c.Views[v]
		}
		for _, h := range c.RRsets.Look(name, typ, v, now) {
			out = append(out, showHeld(name, h, view))
		}
		types := []uint16{typ}
		if typ == 0 {
			types = types[:0]
			for t := uint16(1); t < 512; t++ {
				types = append(types, t)
			}
		}
		for _, t := range types {
			for flags := range 4 {
				q := query.Question{Name: name, Type: t, Class: dnswire.ClassIN, View: v, DO: flags&1 != 0, CD: flags&2 != 0}
				if e := c.showAnswer(&q, view, now); e != nil {
					out = append(out, e)
				}
			}
		}
	}
	return out
}

var rankNames = [...]string{"none", "additional", "glue", "non-authoritative answer", "authority", "answer", "secure"}

func showHeld(name dnsname.Name, h rrcache.Held, view string) *adminv1.CacheEntry {
	e := &adminv1.CacheEntry{
		Cache: "rrset", Name: name.String(), Ttl: int64(h.Left / time.Second), Status: strings.ToLower(h.Status.String()),
		Rank: rankNames[h.Rank], View: view,
	}
	if h.Type != 0 {
		e.Type = dnswire.TypeText(h.Type)
	}
	if h.Cut {
		e.Rank = "delegation, " + e.Rank
	}
	switch h.Negative.Kind {
	case rrcache.NoKind:
		for d := range query.RDatas(h.Set.Data) {
			e.Data = append(e.Data, dnswire.Text(h.Set.Type, d))
		}
		return e
	case rrcache.NXDomain:
		e.Data = []string{"NXDOMAIN"}
	case rrcache.NoData:
		e.Data = []string{"NODATA"}
	}
	if soa := h.Negative.SOA; soa.Type != 0 {
		e.Data = append(e.Data, "SOA of "+soa.Name.String())
	}
	return e
}

// showAnswer shows a settled answer, or returns nil if there is none.
func (c Caches) showAnswer(q *query.Question, view string, now clock.Instant) *adminv1.CacheEntry {
	buf := make([]byte, query.MaxEntry)
	entry, found := c.Answers.Get(q, answercache.Hash(&c.Key, q), buf, now)
	if !found.OK && !found.Stale {
		return nil
	}
	a := entry.View()
	e := &adminv1.CacheEntry{
		Cache: "answer", Name: q.Name.String(), Type: dnswire.TypeText(q.Type), Ttl: int64(a.Expires.Sub(now) / time.Second),
		Status: strings.ToLower(a.Status.String()), View: view,
		Data: []string{dnswire.RCodeText(a.RCode) + map[bool]string{true: " DO"}[q.DO] + map[bool]string{true: " CD"}[q.CD]},
	}
	for _, s := range answerSection(entry) {
		for d := range query.RDatas(s.Data) {
			e.Data = append(e.Data, fmt.Sprintf("%s %s %s", s.Name, dnswire.TypeText(s.Type), dnswire.Text(s.Type, d)))
		}
	}
	return e
}

// answerSection reads the answer section of a settled answer, by putting the message together of which its
// body is the end.
func answerSection(entry settled.Entry) []query.RRset {
	a, q := entry.View(), entry.Question()
	var b dnswire.Builder
	b.Reset(make([]byte, 0, dnswire.MaxMessage))
	if !b.Question([]byte(q.Name), q.Type, q.Class) {
		return nil
	}
	msg := append(b.Bytes(), a.Body...)
	binary.BigEndian.PutUint16(msg[2:], 1<<15) // QR
	binary.BigEndian.PutUint16(msg[4:], 1)
	binary.BigEndian.PutUint16(msg[6:], a.AN)
	binary.BigEndian.PutUint16(msg[8:], a.NS)
	binary.BigEndian.PutUint16(msg[10:], a.AR)
	m, err := query.ReadMessage(msg)
	if err != nil {
		return nil // what is shown is less, and nothing else depends on it
	}
	return m.Answer
}

// Purge forgets a name in both caches. Of settled answers all types go: an answer of one type may rest on
// RRsets of another. All other settled answers are made again from their RRsets when they are next asked for,
// because those under way may rest on what was purged.
func (c Caches) Purge(name dnsname.Name, subtree bool, typ uint16) int {
	// RRsets first: an answer must not be made again from what is about to go.
	n := c.RRsets.Purge(name, subtree, typ)
	if c.Forget != nil {
		c.Forget(name, subtree)
	}
	n += c.Answers.Purge(name, subtree)
	c.Answers.Raise()
	return n
}

// Dump writes the RRset cache.
func (c Caches) Dump(w io.Writer) error {
	_, err := c.RRsets.Dump(w, clock.Elapsed(), clock.Wall())
	return err
}

// Load takes a dump in, unchecked: what it holds is validated when it is used.
func (c Caches) Load(r io.Reader) (loaded, skipped int, err error) {
	return c.RRsets.LoadAll(r, clock.Elapsed(), clock.Wall())
}
