// Package validator settles the security status of what iteration brought (RFC 4033 to 4035, 5155, 6840).
//
// Validate takes the parts of an answer one by one: each alias and the data or the denial of the last name,
// each in its own zone. A part is Secure if a chain of signatures leads from a trust anchor to it, Insecure if
// such a chain leads to a proof that the zone is not signed, Indeterminate if no anchor says anything of it,
// and Bogus otherwise. The answer is worth the least of its parts, and one Bogus part spoils it: the error is
// then a *Failure with the extended error (RFC 8914) of the cause. Bogus answers are asked for again at other
// servers, maxRetries times, before that is said, and the verdict is remembered for bogusFor. Answers to
// questions with CD=1 are settled as Unchecked, whatever they hold.
//
// DS and DNSKEY records come from a Fetcher, mostly out of its cache: a referral brought the DS set or its
// denial along. Zones once established, with their keys or as insecure, are remembered in a bounded table
// until the first of the records they rest on ends. What a set was found to be goes to the cache of RRsets
// (Cache), so that the next answer made of it needs no signature checked; sets that have a status are not
// checked again.
//
// Everything spends from the tree of the question: upstream queries, verifications that succeed and that fail,
// NSEC3 hashes. Verifications run on a pool of at most Options.Parallel. The limits of hardening section B
// are the constants below.
//
// What is not validated is not given: proofs that no part needed are dropped, and so is the additional section.
package validator

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
	"github.com/sluice-dns/sluice/resolver/internal/validator/denial"
)

// Limits of the work one answer can cause (KeyTrap, CVE-2023-50387); the budgets of the tree come on top.
const (
	maxRetries    = 2 // of a bogus answer, or bogus DS or DNSKEY records, at other servers
	maxSignatures = 4 // tried of an RRset
	maxColliding  = 2 // keys of one tag and algorithm tried with a signature
	maxFailures   = 4 // verifications that fail, of an RRset
	maxSigners    = 3 // zones that claim to have signed an RRset, looked at
	maxDS         = 8 // DS records of a zone that are looked at
	maxProofs     = 8 // NSEC and NSEC3 sets used of an answer
	maxProbes     = 8 // names asked for DS records in search of an insecure delegation
)

// How long what is not Secure is remembered.
const (
	bogusFor       = time.Minute // RFC 4035 section 4.7: a bogus answer; also a zone whose keys do not verify
	unreachableFor = 2 * time.Second
)

// A Fetcher finds records; package iterator has it.
type Fetcher interface {
	Resolve(ctx context.Context, tree *query.Tree, q query.Question) (query.Unvalidated, error)
	Again(ctx context.Context, tree *query.Tree, q query.Question, avoid []netip.AddrPort) (query.Unvalidated, error)
	Cached(q query.Question, staleTTL uint32) (query.Unvalidated, bool)
}

// A Cache is told what sets were found to be; package rrcache has it.
type Cache interface {
	SetStatus(view query.View, subnet query.Subnet, set query.RRset, now clock.Instant) bool
	PutNegative(k rrcache.Key, kind rrcache.Kind, soa query.RRset, proof []query.RRset, status query.Status, now clock.Instant) bool
}

// Denials are told what Secure denials and expansions of wildcards rest on; package denialcache has them.
type Denials interface {
	Put(view query.View, zone dnsname.Name, soa query.RRset, proof []query.RRset, now clock.Instant)
}

// Options tune a Validator. Every zero field means the default stated on it.
type Options struct {
	// Full keeps authority records of positive answers (answers.minimal: false).
	Full bool
	// Epoch is the present epoch of the caches, stamped into every entry. What is remembered of zones ends
	// with it too, so whoever changes anchors raises it. Nil means that it is always 0.
	Epoch func() uint32

	// Fetch and Cache are needed to validate. With a nil Fetch nothing is, and everything is Indeterminate.
	Fetch Fetcher
	Cache Cache
	// Denials keep proofs for other questions (RFC 8198). Nil: nobody does.
	Denials Denials
	// Anchors are where chains of trust begin, Insecure where they end.
	Anchors Anchors
	// Insecure are negative trust anchors (RFC 7646): at and below these names nothing is validated, unless
	// an anchor below says otherwise.
	Insecure []Insecure
	// Skew is how far the clocks of signers and ours may be apart.
	Skew time.Duration
	// SHA1 validates signatures of the algorithms 5 and 7. Otherwise zones with no other are insecure (RFC 9905).
	SHA1 bool
	// Parallel is how many signatures are verified at once. Zero means half the processors, at least one.
	Parallel int
	// Zones is how many zones are remembered. Zero means 16,384.
	Zones int
}

// Anchors say with which keys chains of trust begin.
type Anchors interface {
	// At returns the DS and DNSKEY RDATA that vouch for the zone of this name, in the form of query.RRset.Data;
	// ok is false if it is no trust anchor.
	At(name dnsname.Name) (ds, keys []byte, ok bool)
	// RootTag reports whether a trust anchor of the root has this key tag (RFC 8509).
	RootTag(tag uint16) bool
}

// Insecure is a negative trust anchor.
type Insecure struct {
	Name dnsname.Name
	// Until ends it; the zero time means never.
	Until time.Time
}

// A Validator settles answers. It is safe for concurrent use.
type Validator struct {
	o        Options       // constant after New
	pool     chan struct{} // a place for each verification at a time
	zones    zoneTable
	bogus    bogusTable
	proofs   proofTable
	count    counters
	insecure atomic.Pointer[map[dnsname.Name]time.Time]
	alive    sync.Map // the names of trust anchors whose zones have shown their keys since New
}

// New returns a Validator.
func New(o Options) *Validator {
	if o.Epoch == nil {
		o.Epoch = func() uint32 { return 0 }
	}
	if o.Parallel == 0 {
		o.Parallel = max(1, runtime.NumCPU()/2)
	}
	if o.Zones == 0 {
		o.Zones = 16384
	}
	v := &Validator{o: o, pool: make(chan struct{}, o.Parallel)}
	v.zones.most, v.bogus.most, v.proofs.most = o.Zones, 16384, 8192
	v.SetInsecure(o.Insecure)
	return v
}

// SetInsecure replaces the negative trust anchors. The caller raises the epoch.
func (v *Validator) SetInsecure(list []Insecure) {
	m := make(map[dnsname.Name]time.Time, len(list))
	for _, n := range list {
		m[n.Name] = n.Until
	}
	v.insecure.Store(&m)
}

// Untrusted reports whether a negative trust anchor stands at or above name.
func (v *Validator) Untrusted(name dnsname.Name, wall time.Time) bool {
	anchors := *v.insecure.Load()
	if len(anchors) == 0 {
		return false
	}
	for n := name; n != ""; n = n.Parent() {
		if until, ok := anchors[n]; ok && (until.IsZero() || wall.Before(until)) {
			return true
		}
	}
	return false
}

// A Failure is an answer that clients must not see, or one whose status could not be found.
type Failure struct {
	Code uint16 // extended DNS error (RFC 8914)
	Text string // which object, what is wrong

	err error // query.ErrLimit, the context's error, or what the fetcher said; nil: the answer is bogus
}

func (f *Failure) Error() string { return f.Text }

// EDE returns the extended DNS error that clients may be told.
func (f *Failure) EDE() (code uint16, text string) { return f.Code, f.Text }

func (f *Failure) Unwrap() error { return f.err }

// Extended errors of RFC 8914 section 4.
const (
	edeOther         = 0
	edeAlgorithm     = 1 // Unsupported DNSKEY Algorithm
	edeDigest        = 2 // Unsupported DS Digest Type
	edeStale         = 3
	edeIndeterminate = 5
	edeBogus         = 6
	edeExpired       = 7
	edeNotYetValid   = 8
	edeNoKey         = 9  // DNSKEY Missing
	edeNoSignature   = 10 // RRSIGs Missing
	edeNoZoneKey     = 11 // No Zone Key Bit Set
	edeNoProof       = 12 // NSEC Missing
	edeStaleNXDomain = 19
)

// A reason is why something is bogus, or an extended error to give with what is insecure.
type reason struct {
	ede  uint16
	text string
	// zone: it is the zone's keys that are at fault, so another answer would not help.
	zone bool
	// absent: all who were asked for the zone's keys say that there is no such name.
	absent bool
}

func because(ede uint16, format string, args ...any) reason {
	return reason{ede: ede, text: fmt.Sprintf(format, args...)}
}

// Failing returns the error of a question whose answer was found bogus a while ago, or nil: it need not be
// asked for again so soon.
func (v *Validator) Failing(q *query.Question, now clock.Instant) error {
	if q.CD || v.o.Fetch == nil {
		return nil
	}
	if why, ok := v.bogus.get(bogusKey{q.Name, q.Type, q.View, q.Subnet}, now, v.o.Epoch()); ok {
		return &Failure{Code: why.ede, Text: why.text}
	}
	return nil
}

// Forget ends what is remembered of a name, or with subtree of the names below it too: zones and bogus answers.
func (v *Validator) Forget(name dnsname.Name, subtree bool) {
	of := func(n dnsname.Name) bool { return n == name || subtree && n.Below(name) }
	v.zones.forget(func(k zoneKey) bool { return of(k.name) })
	v.bogus.forget(func(k bogusKey) bool { return of(k.name) })
}

// Validate decides the status of u and seals it. tree is charged for the work. The error is a *Failure.
func (v *Validator) Validate(ctx context.Context, tree *query.Tree, u *query.Unvalidated, now clock.Instant) (settled.Entry, error) {
	if u.Question.CD || v.o.Fetch == nil {
		status := query.Indeterminate
		if u.Question.CD {
			status = query.Unchecked
		}
		return settled.Settle(u, status, settled.Options{Now: now, Epoch: v.o.Epoch(), EDE: query.NoEDE, Full: v.o.Full})
	}
	epoch := v.o.Epoch() // as of the start: what changes meanwhile makes the entry old
	var first reason
	var avoid []netip.AddrPort
	for try := 0; ; try++ {
		r := v.newRun(ctx, tree, u.Question.View, u.Question.Subnet, now)
		status, why, err := r.answer(u)
		cryptographies.Put(r.crypto)
		if err != nil {
			v.count.unfinished.Add(1)
			return settled.Entry{}, err
		}
		if status != query.Bogus {
			v.count.answers[status].Add(1)
			if status == query.Secure {
				if err := v.sentinel(&u.Question); err != nil {
					return settled.Entry{}, err
				}
			}
			return settled.Settle(u, status, settled.Options{Now: now, Epoch: epoch, EDE: why.ede, Full: v.o.Full})
		}
		if try == 0 {
			first = why
		}
		if why.zone || try == maxRetries {
			break
		}
		avoid = append(avoid, u.Servers...)
		again, err := v.o.Fetch.Again(ctx, tree, u.Question, avoid)
		if err != nil {
			if ended(err) {
				v.count.unfinished.Add(1)
				return settled.Entry{}, &Failure{Code: first.ede, Text: first.text, err: err}
			}
			break // nobody else to ask
		}
		u, now = &again, clock.Elapsed()
	}
	v.count.answers[query.Bogus].Add(1)
	if !first.zone { // of a zone without keys its own entry remembers it, for as long as the cause is worth
		q := &u.Question
		v.bogus.put(bogusKey{q.Name, q.Type, q.View, q.Subnet}, first, now.Add(bogusFor), epoch, now)
	}
	return settled.Entry{}, &Failure{Code: first.ede, Text: first.text}
}

// ended reports an error that says nothing of the data: the budget or the time of the question is spent.
func ended(err error) bool {
	return errors.Is(err, query.ErrLimit) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// A run validates one answer. It belongs to one goroutine.
type run struct {
	v      *Validator
	ctx    context.Context
	tree   *query.Tree
	view   query.View
	subnet query.Subnet
	now    clock.Instant
	wall   time.Time
	epoch  uint32
	crypto *cryptography
	nsec3  *denial.Hasher
	keyBuf []byte

	// zones are those established by this run, which may not outlive it (TTL 0).
	zones map[dnsname.Name]*zone
	// ordinary are names at which no zone begins, as this run has found: nothing for one that does not exist,
	// otherwise nil. Without it, proofs that name many signers would be judged again and again.
	ordinary map[dnsname.Name]*zone
	// working holds the zones being established, so that none depends on itself.
	working map[dnsname.Name]bool
	probes  int
}

func (v *Validator) newRun(ctx context.Context, tree *query.Tree, view query.View, subnet query.Subnet, now clock.Instant) *run {
	return &run{v: v, ctx: ctx, tree: tree, view: view, subnet: subnet, now: now, wall: clock.Wall(), epoch: v.o.Epoch(),
		crypto: cryptographies.Get().(*cryptography)}
}

// answer judges all of u, notes in it and in the cache what its sets are, and drops what no part needed.
func (r *run) answer(u *query.Unvalidated) (query.Status, reason, error) {
	q := &u.Question
	total := verdict{status: query.Secure, why: reason{ede: query.NoEDE}}
	var proofs []query.RRset // that were needed
	last, positive := q.Name, false
	for i := range u.Answer {
		s := &u.Answer[i]
		if d := maker(u.Answer[:i], s); d != nil {
			s.Status, s.TTL = d.Status, d.TTL
		} else {
			vd, err := r.set(s)
			if err == nil && vd.status == query.Secure && vd.encloser != "" {
				var needed []query.RRset
				if vd, needed, err = r.wildcard(u, s, vd); err == nil {
					proofs = append(proofs, needed...)
				}
			}
			if err != nil || vd.status == query.Bogus {
				if err == nil {
					r.note(s, query.Bogus)
				}
				return vd.status, vd.why, err
			}
			if q.Type == dnswire.TypeDS && s.Type == dnswire.TypeCNAME && r.delegated(s.Name) {
				// DS records are the parent's, and an alias beside a delegation is not (RFC 2181 section 10.1). In the
				// child zone, where it counts as nothing here, it may stand unsigned.
				return query.Bogus, because(edeNoSignature, "%v has an alias in place of DS records, and is delegated", s.Name), nil
			}
			total.and(vd)
		}
		final := s.Name == last && (s.Type == q.Type || q.Type == dnswire.TypeANY || q.Type == dnswire.TypeRRSIG)
		switch {
		case final:
			positive = true
		case s.Type == dnswire.TypeCNAME && s.Name == last:
			if t := dnswire.NameIn(dnswire.TypeCNAME, s.First(), 0); t != nil {
				last = canonical(t)
			}
		}
	}
	u.Additional = nil
	if positive || u.RCode == dnswire.RCodeYXDomain {
		u.Authority = proofs
		return total.status, total.why, nil
	}
	vd, needed, err := r.denied(u, last)
	if err != nil || vd.status == query.Bogus {
		return vd.status, vd.why, err
	}
	total.and(vd)
	for _, p := range proofs {
		if !slices.ContainsFunc(needed, func(n query.RRset) bool { return n.Is(p.Name, p.Type) }) {
			needed = append(needed, p)
		}
	}
	u.Authority = needed
	return total.status, total.why, nil
}

// maker returns the DNAME among those judged already that makes s, nil if none does.
func maker(before []query.RRset, s *query.RRset) *query.RRset {
	if s.Type != dnswire.TypeCNAME || len(s.Sigs) > 0 {
		return nil
	}
	for i := range before {
		if madeBy(s, &before[i]) {
			return &before[i]
		}
	}
	return nil
}

// madeBy reports whether s is the CNAME that the DNAME d makes (RFC 6672 section 3.1): it needs no signature,
// for it is made again from d here.
func madeBy(s, d *query.RRset) bool {
	if s.Type != dnswire.TypeCNAME || d.Type != dnswire.TypeDNAME || !s.Name.Below(d.Name) {
		return false
	}
	to := dnswire.NameIn(dnswire.TypeDNAME, d.First(), 0)
	is := dnswire.NameIn(dnswire.TypeCNAME, s.First(), 0)
	if to == nil || is == nil {
		return false
	}
	want, err := s.Name.Replace(d.Name, canonical(to))
	return err == nil && want == canonical(is)
}

func canonical(wire []byte) dnsname.Name {
	b := make([]byte, len(wire))
	dnsname.Fold(b, wire)
	return dnsname.Name(b)
}

// A verdict is what a part was found to be.
type verdict struct {
	status query.Status
	why    reason // why.ede is query.NoEDE if there is nothing to say
	// encloser is the closest encloser of a set that was made from a wildcard, which remains to be proved.
	encloser dnsname.Name
	zone     *zone // whose keys made it Secure
}

func insecure(why reason) verdict { return verdict{status: query.Insecure, why: why} }
func bogus(why reason) verdict    { return verdict{status: query.Bogus, why: why} }

// and makes t the least of both.
func (t *verdict) and(o verdict) {
	if o.status < t.status {
		t.status = o.status
	}
	if t.why.ede == query.NoEDE {
		t.why = o.why
	}
}

// note tells the cache what a set was found to be.
func (r *run) note(s *query.RRset, status query.Status) {
	s.Status = status
	if s.Type == dnswire.TypeRRSIG {
		return
	}
	r.v.o.Cache.SetStatus(r.view, r.subnet, *s, r.now)
}
