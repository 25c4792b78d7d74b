package identify

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"hash"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
	"github.com/sluice-dns/sluice/usercache/password"
)

// A prover says whether a secret is one of a device's, and remembers what it found.
//
// What it remembers is a proof, found by the HMAC, under a key of this process, of device and secret: nothing in
// memory is worth more to a thief than the stored hashes are. Proofs live in two tables of fixed size, so that
// wrong passwords, of which anyone can send many, push out no right one. A proof counts while the user's record
// has the revision it was made at and for a minute; then the device's credentials are read again, and it goes on
// counting if the hash it was proven by is still among them. So a changed or removed password is worth nothing
// as soon as the record is here.
//
// Verifying a hash takes tens of milliseconds and of megabytes. So few are verified at once, the same secret of
// a device by one for all, and at most maxWaiting queries wait; who finds no place there is told that we are
// busy, never that the password is wrong. A source (an IPv4 /24, an IPv6 /56) may have so many tries at a device;
// right passwords cost none.
type prover struct {
	directory Directory
	key       [32]byte // of the HMAC
	macs      sync.Pool
	right     proofs
	wrong     proofs

	flights singleflight.Group // by HMAC
	places  chan struct{}      // held while verifying
	waiting atomic.Int64

	mu    sync.Mutex // guards tries
	tries [1 << 12]tries
}

const (
	// recheck is how long a proof counts without a look at the credentials.
	recheck = time.Minute
	// rightProofs and wrongProofs are how many proofs are kept: some 8 MiB if all places are taken.
	rightProofs, wrongProofs = 1 << 16, 1 << 12
	// maxWaiting is how many verifications may wait for a place.
	maxWaiting = 128
	// maxTries is how many wrong passwords of one device a source may try at once, and tryEvery after what time
	// it may try one more.
	maxTries = 8
	tryEvery = 10 * time.Second
)

func (v *prover) init(d Directory, places int) {
	v.directory = d
	rand.Read(v.key[:])
	v.macs.New = func() any { return &macSpace{mac: hmac.New(sha256.New, v.key[:])} }
	v.right.slots = make([]atomic.Pointer[proof], rightProofs)
	v.wrong.slots = make([]atomic.Pointer[proof], wrongProofs)
	v.places = make(chan struct{}, max(places, 1))
}

// known says what is known of a secret without verifying a hash: NoProof if that has to be done.
func (v *prover) known(p *usercache.Profile, secret string, now clock.Instant) query.Proof {
	if len(secret) > password.MaxLen {
		return query.ProofBad
	}
	mac := v.mac(&p.DeviceID, secret)
	right, wrong := v.right.get(&mac), v.wrong.get(&mac)
	switch {
	case right != nil && right.good(p, now):
		return query.ProofGood
	case wrong != nil && wrong.good(p, now):
		return query.ProofBad
	}
	creds, ok := v.directory.Credentials(&p.DeviceID)
	if !ok {
		return query.ProofBad
	}
	result, by := query.NoProof, [32]byte{}
	switch {
	case right != nil && holds(&creds, &right.by):
		result, by = query.ProofGood, right.by
	default:
		sum := sha256.Sum256([]byte(secret))
		for i := range creds.Tokens {
			if subtle.ConstantTimeCompare(creds.Tokens[i][:], sum[:]) == 1 {
				result, by = query.ProofGood, digest(creds.Tokens[i][:])
			}
		}
		if result == query.NoProof && (len(creds.PasswordHashes) == 0 || wrong != nil && wrong.by == digestAll(&creds)) {
			result, by = query.ProofBad, digestAll(&creds)
		}
	}
	v.keep(result, &proof{mac: mac, revision: p.Revision, at: now, by: by})
	return result
}

// prove verifies a secret that is not known.
func (v *prover) prove(ctx context.Context, p *usercache.Profile, secret string, source netip.Addr) query.Proof {
	defer v.waiting.Add(-1)
	if v.waiting.Add(1) > maxWaiting {
		return query.ProofFailed
	}
	mac := v.mac(&p.DeviceID, secret)
	result, _, _ := v.flights.Do(string(mac[:]), func() (any, error) {
		return v.verify(ctx, &mac, p, secret, source), nil
	})
	return result.(query.Proof)
}

func (v *prover) verify(ctx context.Context, mac *[sha256.Size]byte, p *usercache.Profile, secret string, source netip.Addr) query.Proof {
	if known := v.known(p, secret, clock.Elapsed()); known != query.NoProof {
		return known // verified just now
	}
	if !v.mayTry(&p.DeviceID, source, clock.Elapsed()) {
		return query.ProofFailed
	}
	select {
	case v.places <- struct{}{}:
	case <-ctx.Done():
		return query.ProofFailed
	}
	defer func() { <-v.places }()
	creds, ok := v.directory.Credentials(&p.DeviceID)
	if !ok {
		return query.ProofBad
	}
	result, by := query.ProofBad, digestAll(&creds)
	for _, phc := range creds.PasswordHashes {
		// A hash that cannot be used, or would cost too much, is nobody's: the service takes none.
		if h, err := password.Parse(phc); err == nil && h.Verify(secret) {
			result, by = query.ProofGood, digest([]byte(phc))
			v.tryBack(&p.DeviceID, source)
			break
		}
	}
	v.keep(result, &proof{mac: *mac, revision: p.Revision, at: clock.Elapsed(), by: by})
	return result
}

func (v *prover) keep(result query.Proof, e *proof) {
	switch result {
	case query.ProofGood:
		v.right.put(e)
	case query.ProofBad:
		v.wrong.put(e)
	}
}

// macSpace is what computing an HMAC takes: behind an interface, so its arguments must not be on the stack.
type macSpace struct {
	mac hash.Hash
	in  [1 + usercache.MaxID + password.MaxLen]byte
	out [sha256.Size]byte
}

// mac identifies a device and a secret of at most password.MaxLen bytes. The secret is looked up by it, which
// takes as long for a right one as for a wrong one that nobody can aim: the key is secret.
func (v *prover) mac(id *usercache.DeviceID, secret string) [sha256.Size]byte {
	s := v.macs.Get().(*macSpace)
	defer v.macs.Put(s)
	n := copy(s.in[1:], id.Bytes())
	s.in[0] = byte(n)
	n += 1 + copy(s.in[1+n:], secret)
	s.mac.Reset()
	s.mac.Write(s.in[:n])
	clear(s.in[:n])
	return [sha256.Size]byte(s.mac.Sum(s.out[:0]))
}

// A proof is immutable.
type proof struct {
	mac      [sha256.Size]byte
	revision uint64 // of the user's record
	at       clock.Instant
	by       [sha256.Size]byte // digest of the hash or token that proved it; of all of them if none did
}

// good reports whether the proof counts without a look at the credentials.
func (e *proof) good(p *usercache.Profile, now clock.Instant) bool {
	return e.revision == p.Revision && now.Sub(e.at) < recheck
}

func digest(credential []byte) [sha256.Size]byte { return sha256.Sum256(credential) }

func digestAll(c *usercache.Credentials) (all [sha256.Size]byte) {
	h := sha256.New()
	for _, phc := range c.PasswordHashes {
		h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(phc))))
		h.Write([]byte(phc))
	}
	for _, t := range c.Tokens {
		h.Write(t[:])
	}
	return [sha256.Size]byte(h.Sum(nil))
}

// holds reports whether by is the digest of one of the credentials.
func holds(c *usercache.Credentials, by *[sha256.Size]byte) bool {
	for _, phc := range c.PasswordHashes {
		if digest([]byte(phc)) == *by {
			return true
		}
	}
	for i := range c.Tokens {
		if digest(c.Tokens[i][:]) == *by {
			return true
		}
	}
	return false
}

// proofs is a table of proofs in sets of four: a new one replaces the one that was looked at longest ago.
type proofs struct{ slots []atomic.Pointer[proof] }

const ways = 4

func (t *proofs) set(mac *[sha256.Size]byte) []atomic.Pointer[proof] {
	i := binary.LittleEndian.Uint64(mac[:]) % uint64(len(t.slots)/ways) * ways
	return t.slots[i : i+ways]
}

func (t *proofs) get(mac *[sha256.Size]byte) *proof {
	set := t.set(mac)
	for i := range set {
		if e := set[i].Load(); e != nil && e.mac == *mac {
			return e
		}
	}
	return nil
}

func (t *proofs) put(e *proof) {
	set := t.set(&e.mac)
	oldest, at := 0, clock.Instant(0)
	for i := range set {
		was := set[i].Load()
		if was == nil || was.mac == e.mac {
			set[i].Store(e)
			return
		}
		if i == 0 || was.at < at {
			oldest, at = i, was.at
		}
	}
	set[oldest].Store(e)
}

// tries counts those of one source at one device. Two that fall on one word reset each other, which gives
// whoever has many sources no more than those do.
type tries struct {
	who  uint64
	left int
	at   clock.Instant // when left was right
}

func (v *prover) tryWord(id *usercache.DeviceID, source netip.Addr) (*tries, uint64) {
	bits := 24
	if source = source.Unmap().WithZone(""); source.Is6() {
		bits = 56
	}
	network, _ := source.Prefix(bits)
	sum := v.mac(id, network.String())
	who := binary.LittleEndian.Uint64(sum[:])
	return &v.tries[who%uint64(len(v.tries))], who
}

// mayTry takes one try.
func (v *prover) mayTry(id *usercache.DeviceID, source netip.Addr, now clock.Instant) bool {
	t, who := v.tryWord(id, source)
	v.mu.Lock()
	defer v.mu.Unlock()
	if t.who != who {
		*t = tries{who: who, left: maxTries, at: now}
	}
	if more := int(min(now.Sub(t.at)/tryEvery, maxTries)); more > 0 {
		t.left, t.at = min(t.left+more, maxTries), now
	}
	if t.left == 0 {
		return false
	}
	t.left--
	return true
}

// tryBack gives one back.
func (v *prover) tryBack(id *usercache.DeviceID, source netip.Addr) {
	t, who := v.tryWord(id, source)
	v.mu.Lock()
	defer v.mu.Unlock()
	if t.who == who {
		t.left = min(t.left+1, maxTries)
	}
}
