package trustanchor

import (
	"bufio"
	"compress/gzip"
	"context"
	"crypto"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/validator/rrsig"
)

const (
	day   = 24 * time.Hour
	ksk17 = "AwEAAaz/tAm8yTn4Mfeh5eyI96WSVexTBAvkMgJzkKTOiW1vkIbzxeF3+/4RgWOq7HrxRixHlFlExOLAJr5emLvN7SWXgnLh4+B5xQlNVz8Og8kvArMtNROxVQuCaSnIDdD5LKyWbRd2n9WGe2R8PzgCmr3EgVLrjyBxWezF0jLHwVN8efS3rCj/EWgvIWgb9tarpVUDK/b58Da+sqqls3eNbuv7pr+eoZG+SrDK6nWeL3c6H5Apxz7LjVc1uTIdsIXxuOLYA4/ilBmSVIzuDWfdRUfhHdY6+cn8HFRm+2hM8AnXGXws9555KrUB5qihylGa8subX2Nn6UwNR1AkUTV74bU="
	ksk24 = "AwEAAa96jeuknZlaeSrvyAJj6ZHv28hhOKkx3rLGXVaC6rXTsDc449/cidltpkyGwCJNnOAlFNKF2jBosZBU5eeHspaQWOmOElZsjICMQMC3aeHbGiShvZsx4wMYSjH8e7Vrhbu6irwCzVBApESjbUdpWWmEnhathWu1jo+siFUiRAAxm9qyJNg/wOZqqzL/dL/q8PkcRU5oUKEpUge71M3ej2/7CPqpdVwuMoTvoB+ZOT4YeGyxMvHmbrxlFzGOHOijtzN+u1TQNatX2XBuzZNQ1K+s2CXkPIZo7s6JgZyvaBevYtxPvYLw4z9mR7K2vaF18UYH9Z9GNUUeayffKC73PYc="
)

// TestBuiltInAnchors derives the digests from the keys themselves.
func TestBuiltInAnchors(t *testing.T) {
	s, err := New(Options{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	ds, keys, ok := s.At(dnsname.Root)
	if !ok || keys != nil || query.CountRData(ds) != 2 {
		t.Fatalf("root = %x, %x, %v", ds, keys, ok)
	}
	if _, _, ok := s.At(dnsname.MustParse("com.")); ok {
		t.Error("com. is a trust anchor")
	}
	for tag, public := range map[uint16]string{20326: ksk17, 38696: ksk24} {
		b, err := base64.StdEncoding.DecodeString(public)
		if err != nil {
			t.Fatal(err)
		}
		k := rrsig.ParseKey(append([]byte{1, 1, 3, 8}, b...))
		if k.Err() != nil || k.Tag != tag {
			t.Errorf("key %d has tag %d, %v", tag, k.Tag, k.Err())
		}
		matches := 0
		for d := range rrsig.UsableDS(ds, nil) {
			if d.Matches(dnsname.Root, k) {
				matches++
			}
		}
		if matches != 1 || !s.RootTag(tag) {
			t.Errorf("key %d matches %d anchors; RootTag %v", tag, matches, s.RootTag(tag))
		}
	}
	if s.RootTag(19036) {
		t.Error("the key of 2010 is trusted")
	}
}

func TestAnchorFiles(t *testing.T) {
	const ds = "20326 8 2 E06D44B80B8F1D39A95C0B0D7C65D08458E880409BBC683457104237C7F8EC8D"
	for _, c := range []struct {
		what, text string
		want       string // the error, "" if there is none
		anchors    string // names, and how many DS and DNSKEY each has
		warns      int
	}{
		{what: "empty file", text: ""},
		{what: "comments alone", text: "; nothing\n\n  ; here\n"},
		{what: "DS and DNSKEY of two names", text: ". IN DS " + ds + "\nexample. 60 IN DNSKEY 257 3 8 " + ksk17 + " ; keytag\nexample. IN DS " + ds + "\n", anchors: ". 1 0, example. 1 1"},
		{what: "parentheses, no class, relative owner, directives", text: "$ORIGIN example.\n$TTL 1d\nA DS 20326 8 2 ( ; begins (\n E06D44B80B8F1D39A95C0B0D7C65D08458E880409BBC\n 683457104237C7F8EC8D )\n", anchors: "a.example. 1 0"},
		{what: "an algorithm that nobody knows", text: ". IN DS 1 200 2 E06D44B80B8F1D39A95C0B0D7C65D08458E880409BBC683457104237C7F8EC8D\n. IN DS 1 8 9 00\n", anchors: ". 2 0", warns: 2},
		{what: "not a zone file", text: "<xml>\n", want: "file: "},
		{what: "broken base 64", text: ". IN DS " + ds + "\n. IN DNSKEY 257 3 8 A*AA\n", want: "file: "},
		{what: "another type", text: "\n; c\n. IN DS " + ds + "\n. 60 IN NS a.\n", want: "file:4: .: is a record of type NS; trust anchors are DS or DNSKEY"},
		{what: "another class", text: ". CH DS " + ds + "\n", want: "file:1: .: a trust anchor is of class IN"},
		{what: "digest cut off", text: "a. IN DS (\n" + ds + ")\n\nb. IN DS ( 20326 8 2\n E06D44B8)\n", want: "file:4: b.: the digest of the DS with tag 20326 has 4 bytes; type 2 has 32"},
		{what: "no zone key", text: "a. IN DNSKEY 1 3 8 " + ksk17 + "\n", want: "file:1: a.: DNSKEY with tag 20070: the key is not a zone key"},
		{what: "revoked", text: "a. IN DNSKEY 385 3 8 " + ksk17 + "\n", want: "file:1: a.: DNSKEY with tag 20454: the key is revoked"},
		{what: "key cut off", text: "a. IN DNSKEY 257 3 13 AAAA\n", want: "file:1: a.: DNSKEY with tag 1038: the key is malformed for its algorithm"},
		{what: "a file that would open another", text: "$INCLUDE /etc/passwd\n", want: "file: "},
	} {
		m, warnings, err := parse(c.text, "file")
		switch {
		case c.want != "":
			if err == nil || !strings.HasPrefix(err.Error(), c.want) {
				t.Errorf("%s: %v, want %s", c.what, err, c.want)
			}
			if e := Check(c.text, "file"); e == nil || e.Error() != err.Error() {
				t.Errorf("%s: Check = %v", c.what, e)
			}
			continue
		case err != nil:
			t.Errorf("%s: %v", c.what, err)
			continue
		}
		var got []string
		for name, a := range m {
			got = append(got, fmt.Sprintf("%v %d %d", name, query.CountRData(a.ds), query.CountRData(a.keys)))
		}
		slices.Sort(got)
		if strings.Join(got, ", ") != c.anchors || len(warnings) != c.warns {
			t.Errorf("%s: %v, %v; want %s, %d warnings", c.what, got, warnings, c.anchors, c.warns)
		}
	}
	s, err := New(Options{Text: "", File: "empty", Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, ok := s.At(dnsname.Root); ok {
		t.Error("an empty file trusts the root")
	}
}

var quiet = slog.New(slog.DiscardHandler)

// A lab makes DNSKEY RRsets of a zone, signed by miekg/dns. Keys are named by a letter.
type lab struct {
	t    *testing.T
	zone string
	keys map[byte]*dns.DNSKEY
	priv map[byte]crypto.Signer
}

func newLab(t *testing.T, names string) *lab {
	l := &lab{t, "example.", map[byte]*dns.DNSKEY{}, map[byte]crypto.Signer{}}
	for _, n := range []byte(names) {
		k := &dns.DNSKEY{Hdr: dns.RR_Header{Name: l.zone, Rrtype: dns.TypeDNSKEY, Class: dns.ClassINET, Ttl: 172800}, Flags: 257, Protocol: 3, Algorithm: dns.ED25519}
		p, err := k.Generate(256)
		if err != nil {
			t.Fatal(err)
		}
		l.keys[n], l.priv[n] = k, p.(crypto.Signer)
	}
	return l
}

// key returns key n; in lower case with the REVOKE flag set.
func (l *lab) key(n byte) (*dns.DNSKEY, crypto.Signer) {
	if up := n &^ 0x20; up != n {
		k := *l.keys[up]
		k.Flags |= dns.REVOKE
		return &k, l.priv[up]
	}
	return l.keys[n], l.priv[n]
}

// set returns the RRset of the keys in has, signed by those in by (a letter in lower case is revoked), at date.
func (l *lab) set(has, by string, date time.Time) query.RRset {
	l.t.Helper()
	var rrs []dns.RR
	set := query.RRset{Name: dnsname.MustParse(l.zone), Type: dnswire.TypeDNSKEY, Class: 1, TTL: 172800}
	for _, n := range []byte(has) {
		k, _ := l.key(n)
		rrs = append(rrs, k)
		set.Data = query.AppendRData(set.Data, wire(l.t, k))
	}
	for _, n := range []byte(by) {
		k, p := l.key(n)
		sig := &dns.RRSIG{Hdr: dns.RR_Header{Ttl: 172800}, KeyTag: k.KeyTag(), SignerName: l.zone, Algorithm: k.Algorithm,
			Inception: uint32(date.Add(-day).Unix()), Expiration: uint32(date.Add(10 * day).Unix())}
		if err := sig.Sign(p, rrs); err != nil {
			l.t.Fatal(err)
		}
		set.Sigs = query.AppendRData(set.Sigs, wire(l.t, sig))
	}
	return set
}

// anchor is the text of an anchor file.
func (l *lab) anchor(names string, asKey bool) (text string) {
	for _, n := range []byte(names) {
		if asKey {
			text += l.keys[n].String() + "\n"
		} else {
			text += l.keys[n].ToDS(dns.SHA256).String() + "\n"
		}
	}
	return text
}

func wire(t *testing.T, rr dns.RR) []byte {
	t.Helper()
	buf := make([]byte, 2048)
	n, err := dns.PackRR(rr, buf, 0, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	w, _ := dnswire.ReadRR(buf[:n], 0)
	return slices.Clone(buf[w.Data:w.End])
}

// states tells a point's keys by their letters.
func (l *lab) states(p *point) string {
	var out []string
	for n, k := range l.keys {
		if i := p.find(wire(l.t, k)); i >= 0 {
			out = append(out, string(n)+" "+p.keys[i].state.String())
		}
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}

// trusts lists the keys that readers would accept.
func (l *lab) trusts(p *point) (out string) {
	a := p.trusted()
	for _, n := range "ABCDEFGH" {
		k, ok := l.keys[byte(n)]
		if !ok {
			continue
		}
		parsed := rrsig.ParseKey(wire(l.t, k))
		match := false
		for d := range rrsig.UsableDS(a.ds, nil) {
			match = match || d.Matches(p.name, parsed)
		}
		for rdata := range query.RDatas(a.keys) {
			match = match || string(rdata) == string(parsed.RData())
		}
		if match {
			out += string(n)
		}
	}
	return out
}

func (l *lab) point(anchors string, asKey bool) *point {
	l.t.Helper()
	m, _, err := parse(l.anchor(anchors, asKey), "file")
	if err != nil {
		l.t.Fatal(err)
	}
	name := dnsname.MustParse(l.zone)
	p := newPoint(name, m[name], "")
	p.fold()
	return p
}

var begin = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func TestLifeOfKeys(t *testing.T) {
	type step struct {
		at      float64 // days since the beginning
		has, by string  // keys of the set, and signers; in lower case: revoked
		states  string
		trusts  string
		problem string
	}
	for _, c := range []struct {
		what    string
		anchors string
		steps   []step
	}{
		{"a roll: the new key is held for thirty days, the old one revoked, and neither changes its mind", "A", []step{
			{0, "A", "A", "A valid", "A", ""},
			{1, "AB", "A", "A valid, B addpend", "A", ""},
			{15, "AB", "A", "A valid, B addpend", "A", ""},
			{30.9, "AB", "A", "A valid, B addpend", "A", ""},
			{31, "AB", "A", "A valid, B valid", "AB", ""},
			{40, "AB", "B", "A valid, B valid", "AB", ""},
			{50, "aB", "aB", "A revoked, B valid", "B", ""},
			{60, "AB", "AB", "A revoked, B valid", "B", ""},
			{70, "AB", "A", "A revoked, B valid", "B", "carry no signature by a trust anchor"},
			{79, "B", "B", "A revoked, B valid", "B", ""},
			{81, "B", "B", "A removed, B valid", "B", ""},
			{82, "AB", "AB", "A removed, B valid", "B", ""},
		}},
		{"a new key that goes starts over", "A", []step{
			{0, "AB", "A", "A valid, B addpend", "A", ""},
			{20, "A", "A", "A valid", "A", ""},
			{21, "AB", "A", "A valid, B addpend", "A", ""},
			{40, "AB", "A", "A valid, B addpend", "A", ""},
			{51, "AB", "A", "A valid, B valid", "AB", ""},
		}},
		{"a set that nobody trusted signed changes nothing, and time in it does not count as seen", "A", []step{
			{0, "AB", "A", "A valid, B addpend", "A", ""},
			{5, "BC", "BC", "A valid, B addpend", "A", "match none of its keys"},
			{6, "ABC", "BC", "A valid, B addpend", "A", "carry no signature by a trust anchor"},
			{7, "ABC", "", "A valid, B addpend", "A", "carry no signature by a trust anchor"},
			{8, "AB", "A", "A valid, B addpend", "A", ""},
		}},
		{"a missing key stays trusted and may come back", "AB", []step{
			{0, "AB", "A", "A valid, B valid", "AB", ""},
			{1, "A", "A", "A valid, B missing", "AB", ""},
			{2, "B", "B", "A missing, B valid", "AB", ""},
			{3, "AB", "A", "A valid, B valid", "AB", ""},
		}},
		{"a revocation needs the key's own signature and nobody else's", "AB", []step{
			{0, "AB", "A", "A valid, B valid", "AB", ""},
			{1, "aB", "B", "A missing, B valid", "AB", ""},
			{2, "aB", "a", "A revoked, B valid", "B", "carry no signature by a trust anchor"},
		}},
		{"a pending key that is revoked was never anything", "A", []step{
			{0, "AB", "A", "A valid, B addpend", "A", ""},
			{1, "Ab", "Ab", "A valid", "A", ""},
			{2, "AB", "A", "A valid, B addpend", "A", ""},
		}},
		{"a stranger's key that is revoked is nothing to us", "A", []step{{0, "Ab", "Ab", "A valid", "A", ""}}},
		{"a revoked key vouches for nothing", "A", []step{
			{0, "A", "A", "A valid", "A", ""},
			{1, "aB", "a", "A revoked", "", "is no trust anchor any more"},
			{2, "AB", "A", "A revoked", "", "is no trust anchor any more"},
		}},
		{"a key without the SEP flag is not for us, unless configured", "A", []step{
			{0, "AZ", "A", "A valid", "A", ""},
			{40, "AZ", "A", "A valid", "A", ""},
		}},
	} {
		for _, asKey := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/%v", c.what, asKey), func(t *testing.T) {
				l := newLab(t, "ABCZ")
				l.keys['Z'].Flags = 256
				p := l.point(c.anchors, asKey)
				for _, s := range c.steps {
					at := time.Duration(s.at * float64(day))
					set := l.set(s.has, s.by, begin.Add(at))
					saw := p.observe(&set, clock.Instant(time.Hour).Add(at), begin.Add(at), 0)
					if got := l.states(p); got != s.states {
						t.Errorf("day %v: %s, want %s", s.at, got, s.states)
					}
					if got := l.trusts(p); got != s.trusts {
						t.Errorf("day %v: trusts %s, want %s", s.at, got, s.trusts)
					}
					if (saw.problem == "") != (s.problem == "") || !strings.Contains(saw.problem, s.problem) {
						t.Errorf("day %v: problem %q, want %q", s.at, saw.problem, s.problem)
					}
				}
			})
		}
	}
}

// TestSteppedDate: what a step of the date can do to a hold-down is nothing while the process runs, and little
// across a restart.
func TestSteppedDate(t *testing.T) {
	for _, step := range []time.Duration{0, -time.Second, time.Hour, -time.Hour, 3650 * day, -3650 * day} {
		l := newLab(t, "AB")
		p := l.point("A", false)
		look := func(at time.Duration, date time.Time) {
			t.Helper()
			set := l.set("AB", "A", date)
			if saw := p.observe(&set, clock.Instant(time.Hour).Add(at), date, 0); saw.problem != "" {
				t.Fatal(saw.problem)
			}
		}
		look(0, begin)
		look(10*day, begin.Add(10*day+step))
		look(20*day, begin.Add(20*day))
		look(30*day-1, begin.Add(30*day+step))
		if got := l.states(p); got != "A valid, B addpend" {
			t.Errorf("step of %v: %s a moment before time", step, got)
		}
		look(30*day, begin.Add(30*day+step))
		if got := l.states(p); got != "A valid, B valid" {
			t.Errorf("step of %v: %s when it is time", step, got)
		}
	}

	l := newLab(t, "AB")
	for _, c := range []struct {
		away time.Duration // what the date says of the time between two processes
		want time.Duration
	}{{5 * day, 6 * day}, {15 * day, 16 * day}, {3650 * day, 16 * day}, {-3650 * day, day}} {
		p := l.point("A", false)
		for d := range 2 {
			set := l.set("AB", "A", begin.Add(time.Duration(d)*day))
			p.observe(&set, clock.Instant(time.Hour).Add(time.Duration(d)*day), begin.Add(time.Duration(d)*day), 0)
		}
		saved, err := parseState(render([]*point{p}))
		if err != nil {
			t.Fatal(err)
		}
		again := l.point("A", false)
		again.resume(saved[p.name])
		date := begin.Add(day + c.away)
		set := l.set("AB", "A", date)
		again.observe(&set, 1, date, 0)
		k := again.keys[again.find(wire(t, l.keys['B']))]
		if k.held != c.want {
			t.Errorf("away for %v: held %v, want %v", c.away, k.held, c.want)
		}
	}
}

// TestWhenToLookAgain: RFC 5011 section 2.3.
func TestWhenToLookAgain(t *testing.T) {
	l := newLab(t, "A")
	for _, c := range []struct {
		ttl         uint32
		left        time.Duration
		next, retry time.Duration
	}{
		{172800, 10 * day, day, 172800 * time.Second / 10},
		{172800, day, 12 * time.Hour, 144 * time.Minute},
		{86400 * 100, 100 * day, 15 * day, day},
		{60, 10 * day, time.Hour, time.Hour},
		{172800, 0, time.Hour, time.Hour},
	} {
		p := l.point("A", false)
		rrs := []dns.RR{l.keys['A']}
		l.keys['A'].Hdr.Ttl = c.ttl
		sig := &dns.RRSIG{Hdr: dns.RR_Header{Ttl: c.ttl}, KeyTag: l.keys['A'].KeyTag(), SignerName: l.zone, Algorithm: dns.ED25519,
			Inception: uint32(begin.Add(-day).Unix()), Expiration: uint32(begin.Add(c.left).Unix())}
		if err := sig.Sign(l.priv['A'], rrs); err != nil {
			t.Fatal(err)
		}
		set := l.set("A", "", begin)
		set.Sigs = query.AppendRData(nil, wire(t, sig))
		saw := p.observe(&set, 1, begin, 0)
		if saw.problem != "" || saw.next != c.next || p.retry != c.retry {
			t.Errorf("TTL %d, %v left: %v and %v (%s), want %v and %v", c.ttl, c.left, saw.next, p.retry, saw.problem, c.next, c.retry)
		}
		// A bad answer is asked for again after the retry time.
		bad := l.set("A", "", begin)
		if saw := p.observe(&bad, 2, begin, 0); saw.next != c.retry || saw.learned {
			t.Errorf("TTL %d: after a bad answer %v, want %v", c.ttl, saw.next, c.retry)
		}
	}
	l.keys['A'].Hdr.Ttl = 172800
	p := l.point("A", false)
	set := l.set("A", "A", begin.Add(-30*day))
	if saw := p.observe(&set, 1, begin, time.Hour); !strings.Contains(saw.problem, rrsig.ErrExpired.Error()) || !strings.Contains(saw.problem, "Is the date right?") {
		t.Errorf("expired: %q", saw.problem)
	}
	other := set
	other.Type = dnswire.TypeDS
	if saw := p.observe(&other, 1, begin, 0); saw.problem == "" {
		t.Error("a set of another type is taken")
	}
	// A zone with very many keys is followed as far as the bound.
	many := newLab(t, "A")
	p = many.point("A", false)
	var keys []*rrsig.Key
	for range maxTracked + 5 {
		k := newLab(t, "A").keys['A']
		keys = append(keys, rrsig.ParseKey(wire(t, k)))
	}
	var saw sighting
	p.takeKeys(keys, 0, 0, &saw)
	if len(p.keys) != maxTracked {
		t.Errorf("%d keys are followed", len(p.keys))
	}
	for i := range p.keys[:4] {
		p.keys[i].state = removed
	}
	p.configured = anchors{keys: query.AppendRData(nil, p.keys[0].rdata)}
	p.takeKeys(keys[maxTracked:maxTracked+2], 0, 0, &saw)
	if p.find(keys[maxTracked+1].RData()) < 0 || p.find(keys[0].RData()) < 0 || p.find(keys[1].RData()) >= 0 {
		t.Error("keys removed long ago keep new ones out, or a configured one is forgotten")
	}
}

func TestState(t *testing.T) {
	l := newLab(t, "ABC")
	path := filepath.Join(t.TempDir(), "anchors")
	var log strings.Builder
	open := func(text, file string) *Store {
		t.Helper()
		log.Reset()
		s, err := New(Options{Text: text, File: file, State: path, Fetch: func(context.Context, dnsname.Name) (query.RRset, error) { return query.RRset{}, errors.New("no") },
			Logger: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	tell := func(s *Store) string { return l.states(s.points[0]) + " trusts " + l.trusts(s.points[0]) }
	s := open(l.anchor("A", false), "file")
	if _, err := os.Stat(path); err == nil {
		t.Error("a file is written before anything was learned")
	}
	for d, has := range []string{"AB", "AB", "ABC"} {
		at := time.Duration(d) * 15 * day
		set := l.set(has, "A", begin.Add(at))
		s.points[0].observe(&set, clock.Instant(time.Hour).Add(at), begin.Add(at), 0)
	}
	set := l.set("aBC", "aB", begin.Add(30*day))
	s.points[0].observe(&set, clock.Instant(time.Hour).Add(30*day), begin.Add(30*day), 0)
	if got, want := tell(s), "A revoked, B valid, C addpend trusts B"; got != want {
		t.Fatalf("%s, want %s", got, want)
	}
	if err := save(path, s.points); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}

	s = open(l.anchor("A", false), "file")
	if got, want := tell(s), "A revoked, B valid, C addpend trusts B"; got != want || log.String() != "" {
		t.Errorf("after a restart: %s, want %s; log %s", got, want, &log)
	}
	if string(render(s.points)) != string(whole) {
		t.Errorf("written again, it differs:\n%s%s", render(s.points), whole)
	}
	s = open(l.anchor("AC", false), "file") // what one configuration led to is not another's; a revocation is
	if got, want := tell(s), "A revoked trusts C"; got != want {
		t.Errorf("with another configuration: %s, want %s", got, want)
	}
	s = open(l.anchor("A", true), "file")
	if got, want := tell(s), "A revoked trusts "; got != want || !strings.Contains(log.String(), "level=ERROR msg=\"every trust anchor of example. was revoked by its zone") {
		t.Errorf("all revoked: %s, want %s; log %s", got, want, &log)
	}
	if _, _, ok := s.At(dnsname.MustParse("example.")); ok {
		t.Error("a trust anchor without keys is one")
	}
	// The present configuration need not name the zone: nothing is forgotten.
	s = open("other. IN DS 20326 8 2 E06D44B80B8F1D39A95C0B0D7C65D08458E880409BBC683457104237C7F8EC8D", "file")
	if err := save(path, slices.Concat(s.points, s.others)); err != nil {
		t.Fatal(err)
	}
	s = open(l.anchor("A", false), "file")
	if got, want := tell(s), "A revoked, B valid, C addpend trusts B"; got != want {
		t.Errorf("after another zone's turn: %s, want %s", got, want)
	}

	for what, damage := range map[string]func([]byte) []byte{
		"a bit":         func(b []byte) []byte { b[len(b)/2] ^= 1; return b },
		"cut off":       func(b []byte) []byte { return b[:len(b)-20] },
		"cut at a line": func(b []byte) []byte { return b[:strings.LastIndex(string(b), "sha256")] },
		"empty":         func([]byte) []byte { return nil },
		"grown":         func(b []byte) []byte { return append(b, "key valid 0 AQEDCA==\n"...) },
		"zeros":         func(b []byte) []byte { return make([]byte, len(b)) },
		"huge":          func(b []byte) []byte { return make([]byte, 2<<20) },
	} {
		if err := os.WriteFile(path, damage(slices.Clone(whole)), 0o600); err != nil {
			t.Fatal(err)
		}
		s = open(l.anchor("A", false), "file")
		if got := tell(s); got != " trusts A" {
			t.Errorf("%s: %s", what, got)
		}
		if out := log.String(); strings.Count(out, "\n") != 1 || !strings.Contains(out, path+" is damaged: ") || !strings.Contains(out, "the configured ones are used") {
			t.Errorf("%s: log %s", what, out)
		}
		if _, err := os.Stat(path + ".damaged"); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	// Whole, but not what we would write.
	good := strings.SplitAfter(string(whole), "\n")
	for what, lines := range map[string][]string{
		"key without a zone": {good[0], good[2]},
		"unknown state":      {good[0], good[1], strings.Replace(good[2], "key ", "key un", 1)},
		"zone twice":         {good[0], good[1], good[1]},
		"key twice":          {good[0], good[1], good[2], good[2]},
		"no date":            {good[0], "zone . built-in yesterday\n"},
		"no name":            {good[0], "zone .. built-in never\n"},
		"negative time":      {good[0], good[1], "key valid -1 AQEDCA==\n"},
		"no key":             {good[0], good[1], "key valid 0 AQEDCA==\n"},
		"no base 64":         {good[0], good[1], "key valid 0 !\n"},
		"something else":     {good[0], "zone\n"},
	} {
		text := strings.Join(lines, "")
		if _, err := parseState(withSum(text)); err == nil || !strings.HasPrefix(err.Error(), "line ") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := save(filepath.Join(t.TempDir(), "missing", "file"), s.points); err == nil {
		t.Error("saving into no folder succeeds")
	}
}

// TestBuiltInKeepsWhatWasLearned: a new release with other built-in anchors does not undo a roll.
func TestBuiltInKeepsWhatWasLearned(t *testing.T) {
	l := newLab(t, "AB")
	old := l.point("A", false)
	old.source = "built-in"
	for d := range 3 {
		at := time.Duration(d) * 10 * day
		set := l.set("AB", "A", begin.Add(at))
		old.observe(&set, clock.Instant(time.Hour).Add(at), begin.Add(at), 0)
	}
	saved, err := parseState(render([]*point{old}))
	if err != nil {
		t.Fatal(err)
	}
	now := l.point("B", false) // the release knows B, which was pending
	now.source = "built-in"
	now.resume(saved[old.name])
	now.fold()
	if got, want := l.states(now)+" trusts "+l.trusts(now), "A valid, B valid trusts AB"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestSignalNames(t *testing.T) {
	zone := dnsname.MustParse("example.")
	for _, c := range []struct {
		zone dnsname.Name
		tags []uint16
		want string
	}{
		{dnsname.Root, []uint16{38696, 20326}, "_ta-4f66-9728."},
		{zone, []uint16{1, 0xabcd, 1}, "_ta-0001-abcd.example."},
		{zone, nil, ""},
		{zone, []uint16{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14}, "_ta-0001-0002-0003-0004-0005-0006-0007-0008-0009-000a-000b-000c.example."},
		{dnsname.MustParse(strings.Repeat(strings.Repeat("a", 49)+".", 5)), []uint16{1}, ""},
	} {
		got, ok := signal(c.zone, slices.Clone(c.tags))
		if ok != (c.want != "") || got.String() != c.want {
			t.Errorf("%v %v = %v, %v; want %s", c.zone, c.tags, got, ok, c.want)
		}
	}
}

// TestRun: a roll as it happens to a process, with an outage at its beginning, and a restart in the middle.
// TestStateKeptLater: what could not be written when it was learned, because the disk was full, is written at the
// next look that finds the keys in order.
func TestStateKeptLater(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "later")
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, "AB")
		var log lockedLog
		s, err := New(Options{
			Text: l.anchor("A", false), File: "file", State: filepath.Join(dir, "state"), Skew: time.Hour,
			Fetch:  func(context.Context, dnsname.Name) (query.RRset, error) { return l.set("AB", "A", time.Now()), nil },
			Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		if err != nil {
			t.Fatal(err)
		}
		p := s.points[0]
		for range 3 {
			s.look(t.Context(), p)
		}
		if n := strings.Count(log.String(), "is not kept"); n == 0 {
			t.Fatalf("it was kept nowhere: %s", log.String())
		}
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		s.look(t.Context(), p)
		if _, err := os.Stat(s.o.State); err != nil {
			t.Errorf("with room again: %v", err)
		}
	})
}

func TestRun(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, "AB")
		start := time.Now()
		var looked []time.Duration
		var told []string
		dropped := 0
		has, by, down := "AB", "A", true
		var log lockedLog
		var mu sync.Mutex // guards what both sides change
		set := func(f func()) { mu.Lock(); defer mu.Unlock(); f() }
		pass := func(d time.Duration) { time.Sleep(d); synctest.Wait() }
		o := Options{
			Text: l.anchor("A", false), File: "file", State: filepath.Join(dir, "state"), Skew: time.Hour,
			Fetch: func(ctx context.Context, zone dnsname.Name) (query.RRset, error) {
				mu.Lock()
				defer mu.Unlock()
				looked = append(looked, time.Since(start))
				if _, ok := ctx.Deadline(); !ok || zone.String() != "example." {
					t.Errorf("fetch of %v without an end", zone)
				}
				if down {
					return query.RRset{}, errors.New("no servers")
				}
				return l.set(has, by, time.Now()), nil
			},
			Tell: func(_ context.Context, name dnsname.Name) error {
				told = append(told, name.String())
				return errors.New("NXDOMAIN")
			},
			Dropped: func() { dropped++ },
			Logger:  slog.New(slog.NewTextHandler(&log, nil)),
		}
		run := func() (s *Store, stop func()) {
			t.Helper()
			s, err := New(o)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { s.Run(ctx); close(done) }()
			return s, func() { cancel(); <-done }
		}
		s, stop := run()
		zone := dnsname.MustParse("example.")
		trusted := func() int {
			ds, keys, _ := s.At(zone)
			return query.CountRData(ds) + query.CountRData(keys)
		}

		pass(10 * time.Minute)
		if want := []time.Duration{0, time.Minute, 3 * time.Minute, 7 * time.Minute}; !slices.Equal(looked, want) {
			t.Errorf("during the outage it looked at %v, want %v", looked, want)
		}
		if strings.Count(log.String(), "cannot be had") != 1 {
			t.Errorf("log: %s", &log)
		}
		set(func() { down = false })
		pass(20 * day)
		if trusted() != 1 || dropped != 0 { // the DS; that its key was seen is nothing new
			t.Errorf("%d anchors, %d times dropped", trusted(), dropped)
		}
		if n := len(looked); n < 20 || n > 26 {
			t.Errorf("looked %d times in twenty days", n)
		}
		if len(told) < 20 || len(told) > 21 || told[0] != fmt.Sprintf("_ta-%04x.example.", l.keys['A'].KeyTag()) {
			t.Errorf("told %d times: %v", len(told), told)
		}
		stop()
		before := len(looked)
		pass(5 * day)
		if len(looked) != before {
			t.Error("it looks after its end")
		}
		log.Reset()
		s, stop = run()
		if trusted() != 1 {
			t.Errorf("%d anchors after a restart", trusted())
		}
		pass(4 * day)
		if trusted() != 1 {
			t.Errorf("%d anchors before thirty days", trusted())
		}
		pass(2*day + time.Hour)
		if trusted() != 2 || dropped != 0 || !strings.Contains(log.String(), "is a trust anchor from now on") {
			t.Errorf("%d anchors after thirty days, %d times dropped; log %s", trusted(), dropped, &log)
		}
		set(func() { has, by = "aB", "aB" })
		pass(2 * day)
		if trusted() != 1 || dropped != 1 || !strings.Contains(log.String(), "was revoked by its owner") {
			t.Errorf("%d anchors after a revocation, %d times dropped; log %s", trusted(), dropped, &log)
		}
		set(func() { has, by = "A", "A" })
		log.Reset()
		pass(3 * day)
		if n := strings.Count(log.String(), "match none of its keys"); n != 1 || trusted() != 1 {
			t.Errorf("a problem is reported %d times: %s", n, &log)
		}
		stop()
		s, stop = run() // what was revoked stays so
		if trusted() != 1 {
			t.Errorf("%d anchors", trusted())
		}
		stop()
	})
}

// A lockedLog is a log that two goroutines use.
type lockedLog struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lockedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *lockedLog) Reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b.Reset()
}

// TestNothingToDo: a store that neither looks nor tells waits for its end.
func TestNothingToDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, o := range []Options{
			{Logger: quiet},
			{Logger: quiet, File: "empty", Tell: func(context.Context, dnsname.Name) error { t.Error("told"); return nil }},
		} {
			s, err := New(o)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			begun := time.Now()
			s.Run(ctx)
			cancel()
			if time.Since(begun) != time.Hour {
				t.Errorf("it ran for %v", time.Since(begun))
			}
		}
	})
}

// TestRealRoot: what the root's keys of 21 August 2017 say to those who trusted the key of 2010, and to others.
// The zone is third-party data that is not part of the project.
func TestRealRoot(t *testing.T) {
	dir := os.Getenv("SLUICE_SHARED")
	if dir == "" {
		dir = "../../../../../shared"
	}
	f, err := os.Open(filepath.Join(dir, "data", "names", "root.zone.signed-20170821.gz"))
	if err != nil {
		t.Skip("no test data here: set SLUICE_SHARED to the folder that holds data/names")
	}
	defer f.Close()
	gz, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	set := query.RRset{Name: dnsname.Root, Type: dnswire.TypeDNSKEY, Class: 1, TTL: 172800}
	for sc := bufio.NewScanner(gz); sc.Scan() && strings.HasPrefix(sc.Text(), ".\t"); {
		rs, err := dnswire.ParseRecords(sc.Text(), ".", "root", 0)
		if err != nil {
			t.Fatal(err)
		}
		switch r := rs[0]; {
		case r.Type == dnswire.TypeDNSKEY:
			set.Data = query.AppendRData(set.Data, r.Data)
		case r.Type == dnswire.TypeRRSIG && dnswire.Uint16(r.Data) == dnswire.TypeDNSKEY:
			set.Sigs = query.AppendRData(set.Sigs, r.Data)
		}
	}
	date := time.Date(2017, 8, 25, 0, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		anchors, problem string
		pending          []uint16
	}{
		{". IN DS 19036 8 2 49AAC11D7B6F6446702E54A1607371607A1A41855200FD2CE1CDDE32F24E8FB5", "", []uint16{20326}},
		{". IN DS 20326 8 2 E06D44B80B8F1D39A95C0B0D7C65D08458E880409BBC683457104237C7F8EC8D", "the keys of . carry no signature by a trust anchor (anchors 20326)", nil},
		{". IN DS 38696 8 2 683D2D0ACB8C9B712A1948B27F741219298D0A450D612C483AF444A4C0FB2B16", "the trust anchors of . match none of its keys (anchors 38696; keys 19036 20326)", nil},
	} {
		m, _, err := parse(c.anchors, "file")
		if err != nil {
			t.Fatal(err)
		}
		p := newPoint(dnsname.Root, m[dnsname.Root], "")
		saw := p.observe(&set, 1, date, 0)
		var pending []uint16
		for _, k := range p.keys {
			if k.state == addPend {
				pending = append(pending, rrsig.KeyTag(k.rdata))
			}
		}
		if !strings.HasPrefix(saw.problem, c.problem) || (saw.problem == "") != (c.problem == "") || !slices.Equal(pending, c.pending) {
			t.Errorf("%s: %q, pending %v; want %q, %v", c.anchors, saw.problem, pending, c.problem, c.pending)
		}
		if c.problem == "" && saw.next != day {
			t.Errorf("next look after %v", saw.next)
		}
	}
}

// With as many zones as may be configured, none of which answers, a stop is a stop.
func TestStopAmongManyZones(t *testing.T) {
	text := ""
	for i := range maxZones {
		text += fmt.Sprintf("z%d. IN DS 1 8 2 E06D44B80B8F1D39A95C0B0D7C65D08458E880409BBC683457104237C7F8EC8D\n", i)
	}
	ctx, cancel := context.WithCancel(t.Context())
	asked := 0
	s, err := New(Options{
		Text: text, File: "file",
		Fetch: func(context.Context, dnsname.Name) (query.RRset, error) {
			if asked++; asked == 3 {
				cancel()
			}
			return query.RRset{}, errors.New("no servers")
		},
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	if s.Run(ctx); asked != 3 {
		t.Errorf("%d zones were asked, 3 wanted", asked)
	}
}

// More anchors than could be followed are refused, with the line.
func TestTooManyAnchors(t *testing.T) {
	const ds = " IN DS %d 8 2 E06D44B80B8F1D39A95C0B0D7C65D08458E880409BBC683457104237C7F8EC8D\n"
	zones, one := "", ""
	for i := range maxZones + 1 {
		zones += fmt.Sprintf("z%d."+ds, i, i)
	}
	for i := range maxTracked + 1 {
		one += fmt.Sprintf("."+ds, i)
	}
	for text, want := range map[string]string{
		zones: "file:1001: z1000.: more than 1000 zones with trust anchors",
		one:   "file:33: .: more than 32 trust anchors of one zone",
	} {
		if err := Check(text, "file"); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// A state file that is a pipe or a folder is an error, not a start that never ends.
func TestStateIsNoFile(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{pipe, dir} {
		if _, err := load(path); err == nil || !strings.Contains(err.Error(), "not a regular file") {
			t.Errorf("%s: %v", path, err)
		}
	}
}
