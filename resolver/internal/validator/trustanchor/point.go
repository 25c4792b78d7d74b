package trustanchor

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/validator/rrsig"
)

// A state is where a key stands in RFC 5011 section 4.2. Start is not one: it is a key that we do not know.
type state uint8

const (
	addPend state = iota // seen, not yet for long enough
	valid                // trusted, and there when last seen
	missing              // trusted, and not there when last seen
	revoked              // not trusted, ever again
	removed              // revoked long ago: kept so that configuration cannot bring it back
	numStates
)

var stateNames = [numStates]string{"addpend", "valid", "missing", "revoked", "removed"}

func (s state) String() string { return stateNames[s] }

// Times of RFC 5011 sections 2.3 and 2.4.
const (
	holdDown   = 30 * 24 * time.Hour
	lookFloor  = time.Hour
	lookCeil   = 15 * 24 * time.Hour
	retryFloor = time.Hour
	retryCeil  = 24 * time.Hour
)

// maxTracked is how many keys of one zone are followed. A zone has two or three; the zone's owner decides, so
// this bounds a mistake, not an attack.
const maxTracked = 32

// A key is one that is followed.
type key struct {
	rdata []byte // with the REVOKE flag clear: the same key before and after
	state state
	// held is how long it has been pending without a gap, or revoked; fresh if that began with this very set.
	held  time.Duration
	fresh bool
}

// A point is a zone with trust anchors, and what is known of its keys.
//
// Invariants:
//
//	every configured DNSKEY is in keys, in some state
//	no key is there twice
//	what a DS or DNSKEY of the configuration stands for is trusted unless its key is revoked or removed
type point struct {
	name       dnsname.Name
	configured anchors
	source     string // what the configuration is: "built-in", or a digest of it

	keys []key
	// seen and seenWall say when the keys were last seen, validly signed: seen is 0 until that has happened in
	// this process, seenWall is the zero time if it never has.
	seen     clock.Instant
	seenWall time.Time

	nextLook, nextTell clock.Instant // the zero Instant: at once
	unreached          int           // how often in a row servers could not be reached
	retry              time.Duration // RFC 5011's retry time as of the last valid set
	said               string        // the last problem reported
}

func newPoint(name dnsname.Name, a anchors, source string) *point {
	if source == "" {
		sum := sha256.Sum256(slices.Concat([]byte(name), []byte{0}, a.ds, []byte{0}, a.keys))
		source = "file:" + hex.EncodeToString(sum[:16])
	}
	return &point{name: name, configured: a, source: source, retry: retryFloor}
}

// resume takes up what an earlier process knew. What it learned from another configuration is not trusted;
// that a key is revoked stays true.
func (p *point) resume(old savedPoint) {
	same := old.source == p.source
	for _, k := range old.keys {
		if same || k.state == revoked || k.state == removed {
			p.keys = append(p.keys, k)
		}
	}
	if same {
		p.seenWall = old.seen
	}
}

// fold makes configured DNSKEY records part of keys, and those valid that only waited for what the
// configuration says by now. It returns false if nothing is trusted then.
func (p *point) fold() bool {
	for rdata := range query.RDatas(p.configured.keys) {
		if p.find(rdata) < 0 {
			p.keys = append(p.keys, key{rdata: rdata, state: valid})
		}
	}
	for i := range p.keys {
		if k := &p.keys[i]; k.state == addPend && p.isConfigured(k.rdata) {
			k.state, k.held = valid, 0
		}
	}
	a := p.trusted()
	return a.ds != nil || a.keys != nil
}

func (p *point) gone() string {
	return fmt.Sprintf("every trust anchor of %v was revoked by its zone: it is no trust anchor any more (RFC 5011 section 5); give current anchors", p.name)
}

// find returns the index of the key with this RDATA, the REVOKE flag clear, or -1.
func (p *point) find(rdata []byte) int {
	return slices.IndexFunc(p.keys, func(k key) bool { return bytes.Equal(k.rdata, rdata) })
}

// trusted returns what readers may begin chains of trust with: the configured DS and the keys that none of
// them stands for, so that learning the key behind a DS changes nothing.
func (p *point) trusted() (a anchors) {
	dead := func(d rrsig.DS) bool {
		return slices.ContainsFunc(p.keys, func(k key) bool {
			return (k.state == revoked || k.state == removed) && d.Matches(p.name, rrsig.ParseKey(k.rdata))
		})
	}
	for rdata := range query.RDatas(p.configured.ds) {
		if d, _ := rrsig.ParseDS(rdata); !dead(d) {
			a.ds = query.AppendRData(a.ds, rdata)
		}
	}
	for _, k := range p.keys {
		if (k.state == valid || k.state == missing) && !p.hasDS(k.rdata) {
			a.keys = query.AppendRData(a.keys, k.rdata)
		}
	}
	return a
}

// hasDS reports whether a configured DS that is supported stands for the key.
func (p *point) hasDS(rdata []byte) bool {
	k := rrsig.ParseKey(rdata)
	for c := range query.RDatas(p.configured.ds) {
		if d, _ := rrsig.ParseDS(c); d.Supported() && d.Matches(p.name, k) {
			return true
		}
	}
	return false
}

// tags returns the tags of what is trusted, some perhaps twice.
func (p *point) tags() (tags []uint16) {
	a := p.trusted()
	for rdata := range query.RDatas(a.ds) {
		tags = append(tags, tagOf(rdata, true))
	}
	for rdata := range query.RDatas(a.keys) {
		tags = append(tags, tagOf(rdata, false))
	}
	return tags
}

// retryUnreached is how long to wait after servers could not be reached. RFC 5011's floor of an hour is for
// those who got an answer: a resolver that starts before its network does should not need an hour to find out
// that its anchors are out of date.
func (p *point) retryUnreached() time.Duration {
	p.unreached++
	if !p.seenWall.IsZero() && p.unreached > 6 {
		return p.retry
	}
	return min(firstRetry<<min(p.unreached-1, 6), retryFloor)
}

// What observe found.
type sighting struct {
	news    []news
	problem string        // why nothing could be learned, for operators; "" if the set is good
	learned bool          // something is worth keeping
	next    time.Duration // when to look again
}

type news struct {
	level slog.Level
	text  string
}

// observe takes in a DNSKEY RRset of the zone as it was at now and, by the date, wall.
func (p *point) observe(set *query.RRset, now clock.Instant, wall time.Time, skew time.Duration) (s sighting) {
	p.unreached = 0
	s.next = p.retry
	var v rrsig.Verifier
	if err := v.Load(set); err != nil || !set.Is(p.name, dnswire.TypeDNSKEY) {
		s.problem = fmt.Sprintf("what was brought as the keys of %v is not usable", p.name)
		return s
	}
	var keys []*rrsig.Key
	for rdata := range query.RDatas(set.Data) {
		if k := rrsig.ParseKey(rdata); k != nil {
			keys = append(keys, k)
		}
	}
	var sigs []rrsig.Sig
	var why error
	for rdata := range query.RDatas(set.Sigs) {
		sig, ok := rrsig.ParseSig(rdata)
		if !ok {
			continue
		}
		if err := v.Check(&sig, p.name, wall, skew); err != nil {
			why = err
		} else if len(sigs) < maxSigs {
			sigs = append(sigs, sig)
		}
	}

	p.takeRevocations(&v, keys, sigs, &s)
	by, spoilt := p.vouched(&v, keys, sigs)
	if by == nil {
		if spoilt != nil {
			why = spoilt
		}
		s.problem = p.unvouched(keys, why)
		return s
	}
	p.takeKeys(keys, p.sinceSeen(now, wall), time.Duration(by.OriginalTTL)*time.Second, &s)
	p.seen, p.seenWall = now, wall
	s.learned = true

	left := time.Duration(by.TTL(1<<31-1, wall, 0)) * time.Second // TTL: the lower of original TTL and what is left of the signature
	p.retry = min(max(left/10, retryFloor), retryCeil)
	s.next = min(max(left/2, lookFloor), lookCeil)
	return s
}

// maxSigs is how many signatures over a key set are looked at: the work is maxSigs times the trusted keys of
// one tag at most.
const maxSigs = 16

// sinceSeen is how much time has passed, for hold-downs, since the keys were last seen.
func (p *point) sinceSeen(now clock.Instant, wall time.Time) time.Duration {
	switch {
	case p.seen != 0:
		return now.Sub(p.seen)
	case !p.seenWall.IsZero():
		return min(max(wall.Sub(p.seenWall), 0), lookCeil)
	}
	return 0
}

// takeRevocations revokes the keys that say so of themselves: in the set with the REVOKE flag, and signing it
// (RFC 5011 section 2.1). That needs nobody else's word.
func (p *point) takeRevocations(v *rrsig.Verifier, keys []*rrsig.Key, sigs []rrsig.Sig, s *sighting) {
	for _, k := range keys {
		if !k.Revoked() || k.Err() != rrsig.ErrRevoked {
			continue
		}
		before := slices.Clone(k.RData())
		before[1] &^= rrsig.FlagRevoke
		i := p.find(before)
		if i >= 0 && (p.keys[i].state == revoked || p.keys[i].state == removed) || i < 0 && !p.isConfigured(before) {
			continue
		}
		if !slices.ContainsFunc(sigs, func(sig rrsig.Sig) bool { return v.VerifyRevoked(&sig, k) == nil }) {
			continue
		}
		was := rrsig.KeyTag(before)
		switch {
		case i < 0:
			p.keys = append(p.keys, key{rdata: before, state: revoked, fresh: true})
		case p.keys[i].state == addPend: // never trusted, so there is nothing to revoke
			p.keys = slices.Delete(p.keys, i, i+1)
			s.tell(slog.LevelInfo, "%v: key %d was revoked before it could become a trust anchor", p.name, was)
			s.learned = true
			continue
		default:
			p.keys[i] = key{rdata: before, state: revoked, fresh: true}
		}
		s.learned = true
		s.tell(slog.LevelWarn, "%v: trust anchor %d was revoked by its owner and is dropped", p.name, was)
		if a := p.trusted(); a.ds == nil && a.keys == nil {
			s.tell(slog.LevelError, "%s", p.gone())
		}
	}
}

func (s *sighting) tell(level slog.Level, format string, args ...any) {
	s.news = append(s.news, news{level, fmt.Sprintf(format, args...)})
}

// isConfigured reports whether the configuration trusts the key.
func (p *point) isConfigured(rdata []byte) bool {
	for c := range query.RDatas(p.configured.keys) {
		if bytes.Equal(c, rdata) {
			return true
		}
	}
	return p.hasDS(rdata)
}

// isTrusted reports whether the key, which is not revoked, may vouch for the set.
func (p *point) isTrusted(k *rrsig.Key) bool {
	if i := p.find(k.RData()); i >= 0 {
		return p.keys[i].state == valid || p.keys[i].state == missing
	}
	return p.isConfigured(k.RData())
}

// vouched returns the signature over the set that a trusted key made, or nil, and then what was wrong with
// those that claim to be.
func (p *point) vouched(v *rrsig.Verifier, keys []*rrsig.Key, sigs []rrsig.Sig) (by *rrsig.Sig, err error) {
	for _, k := range keys {
		if k.Revoked() || !p.isTrusted(k) {
			continue
		}
		for i := range sigs {
			e := v.Verify(&sigs[i], k)
			if e == nil {
				return &sigs[i], nil
			}
			if e != rrsig.ErrOtherKey {
				err = e
			}
		}
	}
	return nil, err
}

// unvouched says what is wrong with a set that no trusted key signed.
func (p *point) unvouched(keys []*rrsig.Key, why error) string {
	match := false
	var there []uint16
	for _, k := range keys {
		match = match || !k.Revoked() && p.isTrusted(k)
		if k.SEP() && !k.Revoked() {
			there = append(there, k.Tag)
		}
	}
	anchors := p.tags()
	switch {
	case len(anchors) == 0:
		return p.gone()
	case !match:
		return fmt.Sprintf("the trust anchors of %v match none of its keys (anchors %s; keys %s): everything below it is bogus. If these servers are the right ones, give its current anchors", p.name, list(anchors), list(there))
	case why != nil:
		return fmt.Sprintf("the keys of %v carry no good signature by a trust anchor: %v. Is the date right?", p.name, why)
	}
	return fmt.Sprintf("the keys of %v carry no signature by a trust anchor (anchors %s)", p.name, list(anchors))
}

func list(tags []uint16) string {
	if len(tags) == 0 {
		return "none"
	}
	slices.Sort(tags)
	var b strings.Builder
	for i, t := range slices.Compact(tags) {
		if i > 0 {
			b.WriteByte(' ')
		}
		fmt.Fprint(&b, t)
	}
	return b.String()
}

// takeKeys moves the keys on, now that the set is known to be the owner's. passed is the time since the last
// such set.
func (p *point) takeKeys(keys []*rrsig.Key, passed, ttl time.Duration, s *sighting) {
	if len(p.keys) == maxTracked { // what was revoked long ago matters only if the configuration still names it
		p.keys = slices.DeleteFunc(p.keys, func(k key) bool { return k.state == removed && !p.isConfigured(k.rdata) })
	}
	there := make([]bool, len(p.keys), len(p.keys)+len(keys))
	for _, k := range keys {
		if k.Err() != nil { // revoked, or of no use to us
			continue
		}
		i := p.find(k.RData())
		switch {
		case i >= 0:
			there[i] = true
			continue
		case len(p.keys) == maxTracked:
			s.tell(slog.LevelWarn, "%v has more keys than are followed: %d is left out", p.name, k.Tag)
			continue
		case p.isConfigured(k.RData()):
			p.keys = append(p.keys, key{rdata: k.RData(), state: valid})
		case k.SEP():
			p.keys = append(p.keys, key{rdata: k.RData(), state: addPend, fresh: true})
			s.tell(slog.LevelInfo, "%v: key %d is new and becomes a trust anchor if it stays for %.0f days", p.name, k.Tag, hold(ttl).Hours()/24)
		default:
			continue
		}
		there = append(there, true)
	}
	kept := p.keys[:0]
	for i, k := range p.keys {
		tag := rrsig.KeyTag(k.rdata)
		if !k.fresh {
			k.held += passed
		}
		k.fresh = false
		switch k.state {
		case addPend:
			if !there[i] { // RFC 5011 section 2.2: it starts over if it comes back
				s.tell(slog.LevelInfo, "%v: key %d went before it could become a trust anchor", p.name, tag)
				continue
			}
			if k.held >= hold(ttl) {
				k.state = valid
				s.tell(slog.LevelWarn, "%v: key %d is a trust anchor from now on", p.name, tag)
			}
		case valid:
			if !there[i] {
				k.state = missing
				s.tell(slog.LevelWarn, "%v: trust anchor %d is not among the zone's keys; it stays trusted", p.name, tag)
			}
		case missing:
			if there[i] {
				k.state = valid
			}
		case revoked:
			if k.held >= holdDown {
				k.state = removed
			}
		}
		if k.state != addPend && k.state != revoked {
			k.held = 0
		}
		kept = append(kept, k)
	}
	p.keys = kept
}

// hold is the add hold-down time (RFC 5011 section 2.4.1).
func hold(ttl time.Duration) time.Duration { return max(holdDown, ttl) }
