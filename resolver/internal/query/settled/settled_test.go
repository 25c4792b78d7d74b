package settled

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

func sets(t testing.TB, text string) (out []query.RRset) {
	t.Helper()
	rs, err := dnswire.ParseRecords(text, ".", "test", 300)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rs {
		out = append(out, query.RRset{Name: r.Name, Type: r.Type, Class: r.Class, TTL: r.TTL, Data: query.AppendRData(nil, r.Data)})
	}
	return out
}

func entry(t testing.TB) Entry {
	t.Helper()
	u := &query.Unvalidated{
		Question: query.Question{Name: dnsname.MustParse("a.example."), Type: dnswire.TypeHTTPS, Class: 1, DO: true, View: 3,
			Subnet: query.Subnet{Family: 1, Bits: 24, Addr: [16]byte{192, 0, 2}}},
		Answer: sets(t, "a.example. 300 CNAME B.Example.\nb.example. 200 HTTPS 1 Svc.Example. ipv4hint=192.0.2.1,192.0.2.2 ipv6hint=2001:db8::1\nb.example. 100 HTTPS 0 other.example."),
		Zone:   dnsname.MustParse("example."),
		RCode:  dnswire.RCodeNoError,
	}
	e, err := Settle(u, query.Insecure, Options{Now: clock.Instant(5 * time.Second), Epoch: 9, EDE: query.NoEDE})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestFactsAndHeader(t *testing.T) {
	e := entry(t)
	a := e.View()
	var got []string
	for off := 0; ; {
		kind, v, next, ok := a.Facts.Next(off)
		if !ok {
			break
		}
		off = next
		if kind == query.FactAddress {
			got = append(got, dnswire.Text(map[int]uint16{4: dnswire.TypeA, 16: dnswire.TypeAAAA}[len(v)], v))
		} else {
			got = append(got, string([]byte{'0' + byte(kind), ' '})+dnsname.Name(v).String())
		}
	}
	want := []string{"1 b.example.", "3 svc.example.", "192.0.2.1", "192.0.2.2", "2001:db8::1", "3 other.example.", "4 example."}
	if len(got) != len(want) {
		t.Fatalf("facts %q, want %q", got, want)
	}
	for i := range got {
		if got[i] != want[i] {
			t.Errorf("fact %d is %q, want %q", i, got[i], want[i])
		}
	}
	if a.AN != 3 || a.Status != query.Insecure || a.Settled != clock.Instant(5*time.Second) || a.Expires != clock.Instant(105*time.Second) || e.Epoch() != 9 || a.EDE != query.NoEDE {
		t.Errorf("%+v, epoch %d", a, e.Epoch())
	}
	if len(a.TTLs) != 6 {
		t.Errorf("%d TTL places", len(a.TTLs)/2)
	}
}

// Two questions share a key only if they are equal: each field is changed in turn.
func TestAnswersComparesTheWholeKey(t *testing.T) {
	e := entry(t)
	q := e.Question()
	if !e.Answers(&q) {
		t.Fatal("an entry does not answer its own question")
	}
	for name, change := range map[string]func(*query.Question){
		"name":   func(q *query.Question) { q.Name = dnsname.MustParse("b.example.") },
		"suffix": func(q *query.Question) { q.Name = q.Name.Parent() },
		"type":   func(q *query.Question) { q.Type++ },
		"class":  func(q *query.Question) { q.Class = 3 },
		"DO":     func(q *query.Question) { q.DO = false },
		"CD":     func(q *query.Question) { q.CD = true },
		"view":   func(q *query.Question) { q.View = 0 },
		"subnet": func(q *query.Question) { q.Subnet.Addr[0]++ },
		"bits":   func(q *query.Question) { q.Subnet.Bits = 16 },
		"none":   func(q *query.Question) { q.Subnet = query.Subnet{} },
		"family": func(q *query.Question) { q.Subnet.Family = 2 },
	} {
		o := q
		change(&o)
		if e.Answers(&o) {
			t.Errorf("another %s is answered too", name)
		}
		if bytes.Equal(AppendKey(nil, &o), AppendKey(nil, &q)) {
			t.Errorf("another %s has the same key", name)
		}
	}
}

func TestLoadFindsEveryFlippedBit(t *testing.T) {
	e := entry(t)
	if _, err := Load(e.Bytes()); err != nil {
		t.Fatal(err)
	}
	b := bytes.Clone(e.Bytes())
	for i := range len(b) * 8 {
		b[i/8] ^= 1 << (i % 8)
		if _, err := Load(b); err == nil {
			t.Fatalf("bit %d flipped and not found", i)
		}
		b[i/8] ^= 1 << (i % 8)
	}
	for n := range b {
		if _, err := Load(b[:n]); err == nil {
			t.Fatalf("cut to %d bytes and not found", n)
		}
	}
}

func TestProofsOnlyForWhoAsks(t *testing.T) {
	u := &query.Unvalidated{
		Question:  query.Question{Name: dnsname.MustParse("a.example."), Type: 1, Class: 1},
		RCode:     dnswire.RCodeNXDomain,
		Authority: sets(t, "example. 300 SOA ns.example. h.example. 1 2 3 4 60\nexample. 300 NSEC b.example. A"),
	}
	for _, do := range []bool{false, true} {
		u.Question.DO = do
		e, err := Settle(u, query.Secure, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if got, want := e.View().NS, uint16(1); do && got != 2 || !do && got != want {
			t.Errorf("DO=%v: %d records of authority", do, got)
		}
	}
}

func FuzzLoad(f *testing.F) {
	f.Add(entry(f).Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, load := range []func() (Entry, bool){
			func() (Entry, bool) { return FromCache(b) },
			func() (Entry, bool) { e, err := Load(b); return e, err == nil },
		} {
			if e, ok := load(); ok {
				a := e.View()
				for off, ok := 0, true; ok; {
					_, _, off, ok = a.Facts.Next(off)
				}
				e.Epoch()
				e.Answers(&query.Question{Name: "\x00"})
			}
		}
	})
}

// An answer is judged by all that it leads to or it is none: what stands at its end is a fact like what stands first.
func TestFactsAreWhole(t *testing.T) {
	u := &query.Unvalidated{Question: query.Question{Name: dnsname.MustParse("x.example."), Type: dnswire.TypeMX, Class: 1}}
	s := query.RRset{Name: u.Question.Name, Type: dnswire.TypeMX, Class: 1, TTL: 60}
	last := ""
	for i := range 250 {
		last = fmt.Sprintf("%s.%s.n%d.example.", strings.Repeat("a", 63), strings.Repeat("b", 40), i)
		s.Data = query.AppendRData(s.Data, append([]byte{0, 1}, dnsname.MustParse(last)...))
	}
	u.Answer = []query.RRset{s}
	e, err := Settle(u, query.Insecure, Options{EDE: query.NoEDE})
	if err != nil {
		t.Fatal(err)
	}
	found := ""
	for off, a := 0, e.View(); ; {
		_, value, next, ok := a.Facts.Next(off)
		if !ok {
			break
		}
		off, found = next, dnsname.Name(value).String()
	}
	if found != last {
		t.Errorf("the last fact is %s", found)
	}
	hints := bytes.Repeat([]byte{192, 0, 2, 1}, 12000) // two bytes more each as facts
	d := binary.BigEndian.AppendUint16([]byte{0, 1, 0, 0, 4}, uint16(len(hints)))
	u.Question.Type = dnswire.TypeHTTPS
	u.Answer = []query.RRset{{Name: u.Question.Name, Type: dnswire.TypeHTTPS, Class: 1, TTL: 60, Data: query.AppendRData(nil, append(d, hints...))}}
	if _, err := Settle(u, query.Insecure, Options{EDE: query.NoEDE}); err == nil {
		t.Error("more facts than fit were left out")
	}
}
