package validator

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
	"github.com/sluice-dns/sluice/resolver/internal/validator/trustanchor"
)

// What signatures and proofs are worth is tested over the whole resolver (resolver/dnssec_cases_test.go) and over
// the real root zone; here is what the validator keeps, and what it does when it cannot have what it needs.

// unreachable is a Fetcher whose every question ends with err.
type unreachable struct {
	err   error
	asked []string
}

func (f *unreachable) Resolve(_ context.Context, _ *query.Tree, q query.Question) (query.Unvalidated, error) {
	f.asked = append(f.asked, q.Name.String()+" "+dnswire.TypeText(q.Type))
	return query.Unvalidated{}, f.err
}

func (f *unreachable) Again(ctx context.Context, t *query.Tree, q query.Question, _ []netip.AddrPort) (query.Unvalidated, error) {
	return f.Resolve(ctx, t, q)
}

func (f *unreachable) Cached(query.Question, uint32) (query.Unvalidated, bool) {
	return query.Unvalidated{}, false
}

func anchors(t *testing.T, text string) *trustanchor.Store {
	t.Helper()
	s, err := trustanchor.New(trustanchor.Options{Text: text, File: "anchors"})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const (
	digest        = "0000000000000000000000000000000000000000000000000000000000000000"
	exampleAnchor = "example. DS 1 13 2 " + digest + "\n"
)

func addressOf(name string) *query.Unvalidated {
	n := dnsname.MustParse(name)
	q := query.Question{Name: n, Type: dnswire.TypeA, Class: dnswire.ClassIN}
	return &query.Unvalidated{Question: q, Answer: []query.RRset{
		{Name: n, Type: dnswire.TypeA, Class: dnswire.ClassIN, TTL: 300, Data: query.AppendRData(nil, []byte{192, 0, 2, 1})},
	}}
}

// Without its keys nothing of a zone is given to clients, and it is tried again soon; what its own limits ended
// is held against nobody. Where no anchor is, none is needed.
func TestKeysOutOfReach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &unreachable{err: errors.New("no server answers")}
		rrsets := rrcache.New(rrcache.Options{Bytes: 1 << 20})
		v := New(Options{Fetch: f, Cache: rrsets, Anchors: anchors(t, exampleAnchor)})
		ask := func(name string) (query.Status, error) {
			e, err := v.Validate(t.Context(), query.NewTree(clock.Elapsed(), query.Budget{}), addressOf(name), clock.Elapsed())
			if err != nil {
				return query.Unchecked, err
			}
			return e.View().Status, nil
		}
		if s, err := ask("www.test."); s != query.Indeterminate || err != nil || len(f.asked) > 0 {
			t.Errorf("without an anchor: %v, %v after asking %v", s, err, f.asked)
		}
		for i, wait := range []time.Duration{0, time.Second, 2 * time.Second} {
			time.Sleep(wait)
			_, err := ask("www.example.")
			var fail *Failure
			if !errors.As(err, &fail) || fail.Code != edeNoKey {
				t.Errorf("try %d: %v", i, err)
			}
			q := addressOf("www.example.").Question
			if err := v.Failing(&q, clock.Elapsed()); err != nil {
				t.Errorf("try %d is remembered as if the data were bogus: %v", i, err)
			}
		}
		if want := []string{"example. DNSKEY", "example. DNSKEY"}; !slices.Equal(f.asked, want) {
			t.Errorf("asked %v, want %v: at once, not a second later, but then again", f.asked, want)
		}

		time.Sleep(time.Minute)
		f.err = fmt.Errorf("asking: %w", query.ErrLimit)
		for range 2 {
			f.asked = nil
			if _, err := ask("www.example."); !errors.Is(err, query.ErrLimit) || len(f.asked) != 1 {
				t.Errorf("at the limit of the tree: %v after %v", err, f.asked)
			}
		}
	})
}

// A negative trust anchor ends the chain of trust at and below its name, until its time is over; an anchor below
// it begins a new one. CD=1 and data that has been judged ask nobody.
func TestNegativeTrustAnchors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &unreachable{err: errors.New("no server answers")}
		until := clock.Wall().Add(time.Hour)
		v := New(Options{
			Fetch: f, Cache: rrcache.New(rrcache.Options{Bytes: 1 << 20}),
			Anchors:  anchors(t, exampleAnchor+"island."+exampleAnchor),
			Insecure: []Insecure{{Name: dnsname.MustParse("example."), Until: until}, {Name: dnsname.MustParse("lab.")}},
		})
		for _, c := range []struct {
			name string
			edit func(*query.Unvalidated)
			want query.Status // Bogus: an error
			late bool
		}{
			{name: "example.", want: query.Insecure},
			{name: "www.example.", want: query.Insecure},
			{name: "www.island.example.", want: query.Bogus},
			{name: "www.lab.", want: query.Insecure},
			{name: "www.example.", edit: func(u *query.Unvalidated) { u.Question.CD = true }, want: query.Unchecked},
			{name: "www.example.", want: query.Bogus, late: true},
			{name: "www.lab.", want: query.Insecure, late: true},
			{name: "www.example.", edit: func(u *query.Unvalidated) { u.Answer[0].Status = query.Secure }, want: query.Secure, late: true},
			{name: "www.example.", edit: func(u *query.Unvalidated) { u.Question.CD = true }, want: query.Unchecked, late: true},
		} {
			if c.late && !clock.Wall().After(until) {
				time.Sleep(time.Hour + time.Second)
			}
			u := addressOf(c.name)
			if c.edit != nil {
				c.edit(u)
			}
			e, err := v.Validate(t.Context(), query.NewTree(clock.Elapsed(), query.Budget{}), u, clock.Elapsed())
			if c.want == query.Bogus {
				if err == nil {
					t.Errorf("%s, late %v: %v, want a failure", c.name, c.late, e.View().Status)
				}
				continue
			}
			if err != nil || e.View().Status != c.want {
				t.Errorf("%s, late %v: %v, %v; want %v", c.name, c.late, e, err, c.want)
			}
		}
	})
}

// The tables are bounded, end with the epoch and with their entries, and forget what is purged.
func TestTables(t *testing.T) {
	name := func(i int) dnsname.Name { return dnsname.MustParse(fmt.Sprintf("z%d.example.", i)) }
	zones, bogus, proofs := zoneTable{most: 100}, bogusTable{most: 100}, proofTable{most: 100}
	for i := range 1000 {
		end := clock.Instant(1000 + i)
		zones.put(zoneKey{name(i), 0}, &zone{name: name(i), end: end}, end, 1, 0)
		bogus.put(bogusKey{name: name(i)}, reason{ede: edeBogus}, end, 1, 0)
		proofs.put(proofKey{byte(i), byte(i >> 8)}, end, end, 1, 0)
		if len(zones.m) > 100 || len(bogus.m) > 100 || len(proofs.m) > 100 {
			t.Fatalf("%d, %d, %d entries where 100 fit", len(zones.m), len(bogus.m), len(proofs.m))
		}
	}
	last := zoneKey{name(999), 0}
	for _, c := range []struct {
		what  string
		view  query.View
		now   clock.Instant
		epoch uint32
		want  bool
	}{
		{"the last one", 0, 1500, 1, true},
		{"in another view", 1, 1500, 1, false},
		{"after its end", 0, 1999, 1, false},
		{"in another epoch", 0, 1500, 2, false},
	} {
		_, z := zones.get(zoneKey{last.name, c.view}, c.now, c.epoch)
		_, b := bogus.get(bogusKey{name: last.name, view: c.view}, c.now, c.epoch)
		if z != c.want || b != c.want {
			t.Errorf("%s: zone %v, bogus %v; want %v", c.what, z, b, c.want)
		}
	}
	v := &Validator{}
	v.zones.m, v.bogus.m = zones.m, bogus.m
	v.Forget(dnsname.MustParse("example."), false)
	if _, ok := v.zones.get(last, 1500, 1); !ok {
		t.Error("purging a name forgets one below it")
	}
	v.Forget(dnsname.MustParse("example."), true)
	if len(v.zones.m) > 0 || len(v.bogus.m) > 0 {
		t.Errorf("purging a subtree leaves %d zones, %d bogus answers", len(v.zones.m), len(v.bogus.m))
	}
}

// RFC 8509 section 3.1: what a resolver that trusts key 1 and not 2 says.
func TestSentinelLabels(t *testing.T) {
	v := New(Options{Anchors: anchors(t, ". DS 1 13 2 "+digest+"\n")})
	for _, c := range []struct {
		name string
		typ  uint16
		ok   bool
	}{
		{"root-key-sentinel-is-ta-00001.example.", dnswire.TypeA, true},
		{"root-key-sentinel-not-ta-00001.example.", dnswire.TypeA, false},
		{"root-key-sentinel-is-ta-00002.example.", dnswire.TypeAAAA, false},
		{"root-key-sentinel-not-ta-00002.example.", dnswire.TypeAAAA, true},
		{"ROOT-KEY-SENTINEL-not-ta-00001.example.", dnswire.TypeA, false},
		{"root-key-sentinel-not-ta-00001.example.", dnswire.TypeTXT, true},
		{"x.root-key-sentinel-not-ta-00001.example.", dnswire.TypeA, true},
		{"root-key-sentinel-not-ta-1.example.", dnswire.TypeA, true},
		{"root-key-sentinel-is-ta-65537.example.", dnswire.TypeA, true},
		{"root-key-sentinel-is-ta-.example.", dnswire.TypeA, true},
	} {
		if err := v.sentinel(&query.Question{Name: dnsname.MustParse(c.name), Type: c.typ}); (err == nil) != c.ok {
			t.Errorf("%s %s: %v", c.name, dnswire.TypeText(c.typ), err)
		}
	}
}

// An unsigned CNAME is the DNAME's word only if it is exactly what the DNAME makes.
func TestCNAMEOfDNAME(t *testing.T) {
	set := func(owner string, typ uint16, target string) query.RRset {
		return query.RRset{Name: dnsname.MustParse(owner), Type: typ, Class: dnswire.ClassIN, Data: query.AppendRData(nil, []byte(dnsname.MustParse(target)))}
	}
	before := []query.RRset{set("old.example.", dnswire.TypeDNAME, "new.example.")}
	for _, c := range []struct {
		owner, target string
		want          bool
	}{
		{"www.old.example.", "www.new.example.", true},
		{"a.b.old.example.", "a.b.new.example.", true},
		{"www.old.example.", "evil.new.example.", false},
		{"www.old.example.", "www.old.example.", false},
		{"old.example.", "new.example.", false},
		{"www.older.example.", "www.new.example.", false},
	} {
		s := set(c.owner, dnswire.TypeCNAME, c.target)
		if got := maker(before, &s) != nil; got != c.want {
			t.Errorf("%s CNAME %s: %v, want %v", c.owner, c.target, got, c.want)
		}
		s.Sigs = query.AppendRData(nil, []byte{0, 5})
		if maker(before, &s) != nil {
			t.Errorf("%s CNAME %s with a signature is not judged by it", c.owner, c.target)
		}
	}
}

// A trust anchor below a zone is not talked away by that zone.
func TestAnchorBelowOverrules(t *testing.T) {
	r := &run{v: New(Options{Anchors: anchors(t, "com. DS 1 13 2 "+digest+"\nb.example.com. DS 1 13 2 "+digest+"\n")})}
	for _, c := range []struct {
		zone, name string
		want       bool
	}{
		{"com.", "www.example.com.", false},
		{"com.", "www.b.example.com.", true},
		{"example.com.", "b.example.com.", true},
		{"b.example.com.", "www.b.example.com.", false},
		{".", "www.com.", true},
		{".", "www.org.", false},
	} {
		if got := r.overruled(dnsname.MustParse(c.zone), dnsname.MustParse(c.name)); got != c.want {
			t.Errorf("%s over %s: %v, want %v", c.zone, c.name, got, c.want)
		}
	}
	if got := deepestFirst([]dnsname.Name{dnsname.Root, dnsname.MustParse("b.com."), dnsname.MustParse("com.")}); got[0].Labels() != 2 || got[2] != dnsname.Root {
		t.Errorf("in the order %v", got)
	}
}

// deep is a Fetcher that denies DS records at every name below evil., by proofs that were verified before and
// whose signatures name, besides evil., the two names above as their signers.
type deep struct {
	unreachable
	looked int
}

func (f *deep) Cached(q query.Question, _ uint32) (query.Unvalidated, bool) {
	f.looked++
	nsec := query.RRset{Name: q.Name, Type: dnswire.TypeNSEC, Class: dnswire.ClassIN, TTL: 300, Status: query.Secure}
	nsec.Data = query.AppendRData(nil, append([]byte("\x01\x00"+q.Name), 0, 1, 0x40)) // the next name, then type A
	for _, signer := range []dnsname.Name{q.Name.Parent(), q.Name.Parent().Parent(), dnsname.MustParse("evil.")} {
		if !signer.IsWithin(dnsname.MustParse("evil.")) {
			continue
		}
		sig := []byte{0, byte(dnswire.TypeNSEC), 13, byte(q.Name.Labels()), 0, 0, 1, 44, 255, 255, 255, 255, 0, 0, 0, 0, 0, 1}
		nsec.Sigs = query.AppendRData(nsec.Sigs, append(append(sig, signer...), 1))
	}
	return query.Unvalidated{Question: q, Authority: []query.RRset{nsec}, Cached: true}, true
}

// Proofs that claim many signers, each of which has to be looked into, which leads to more of the like, cost no
// more than one look at each name.
func TestClaimsOfSignersAreLookedIntoOnce(t *testing.T) {
	f := &deep{unreachable: unreachable{err: errors.New("nobody answers")}}
	v := New(Options{Fetch: f, Cache: rrcache.New(rrcache.Options{Bytes: 1 << 20}), Anchors: anchors(t, "evil."+exampleAnchor[len("example."):])})
	evil := dnsname.MustParse("evil.")
	v.zones.put(zoneKey{evil, 0}, &zone{name: evil, status: query.Secure, end: clock.Never}, clock.Never, 0, 0)
	u := addressOf("a.evil.")
	for u.Question.Name.Labels() < 100 {
		n, err := u.Question.Name.Prepend("a")
		if err != nil {
			t.Fatal(err)
		}
		u.Question.Name, u.Answer[0].Name = n, n
	}
	if _, err := v.Validate(t.Context(), query.NewTree(clock.Elapsed(), query.Budget{}), u, clock.Elapsed()); err == nil {
		t.Error("data without signatures in a signed zone is believed")
	}
	if f.looked < 99 || f.looked > 3*99 { // an answer is judged again after each attempt at other servers
		t.Errorf("%d looks at 99 names", f.looked)
	}
}

// Half the processors verify signatures at once and no more; who finds no place waits for one, or until its time is over.
func TestVerificationsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := New(Options{Fetch: &unreachable{}, Cache: rrcache.New(rrcache.Options{Bytes: 1 << 20}), Anchors: anchors(t, exampleAnchor)})
		limit := max(1, runtime.NumCPU()/2)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		r := v.newRun(ctx, query.NewTree(clock.Elapsed(), query.Budget{}), 0, query.Subnet{}, clock.Elapsed())
		for i := range limit {
			if err := r.enter(); err != nil {
				t.Fatalf("place %d of %d: %v", i+1, limit, err)
			}
		}
		begun := time.Now()
		time.AfterFunc(500*time.Millisecond, func() { <-v.pool })
		if err := r.enter(); err != nil || time.Since(begun) != 500*time.Millisecond {
			t.Errorf("one beyond the limit: %v after %v; want to wait for a place", err, time.Since(begun))
		}
		var f *Failure
		if err := r.enter(); !errors.As(err, &f) || !errors.Is(err, context.DeadlineExceeded) || time.Since(begun) != time.Second {
			t.Errorf("without a place: %v after %v", err, time.Since(begun))
		}
		if s := v.Stats(); s.Peak != limit || s.Verifying != limit || s.Places != limit {
			t.Errorf("%+v", s)
		}
	})
}
