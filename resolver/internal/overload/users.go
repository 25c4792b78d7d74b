package overload

import (
	"encoding/binary"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache"
)

// userRates holds users and devices, and the sources of clients that a policy serves without knowing them, to
// rate_limit and rate_burst.
//
// What one may ask for is kept in one word: the time at which all that was taken will have been earned again
// (the generic cell rate algorithm). A worker takes a share of a second's queries in advance and spends it from a
// table that only it writes, so that most queries write no shared memory, and the limit holds exactly however a
// client's queries fall on the workers. A share that is not used within leaseFor is lost.
//
// The words stand in sets of the size of a cache line. A user that finds no word takes that of the one who has
// waited longest; so with more than words users asking at once some get more than they should.
type userRates struct {
	seed    uint64
	words   []atomic.Uint64
	workers atomic.Int64
	shares  [maxWorkers + 1]*shares // each written by its worker alone
}

const (
	maxWorkers = 1024 // whose shares are kept; any more take each query from the common word
	userWords  = 1 << 16
	userWays   = 8 // words of a set: a cache line

	timeBits = 44
	timeMask = 1<<timeBits - 1
	unit     = 64 // nanoseconds
	second   = uint64(time.Second) / unit

	// leaseFor is how long a share may be spent, and sharesPerSecond in how many parts a worker takes its part of a
	// second's queries.
	leaseFor        = 250 * time.Millisecond
	sharesPerSecond = 8
	// maxUserRate is the highest limit that the clock can tell from none.
	maxUserRate = 1_000_000
)

// shares are those of one worker, found by the key's hash.
type shares [1 << 9]share

type share struct {
	key   uint64
	left  uint32
	until clock.Instant
}

func (r *userRates) init(seed uint64) {
	r.seed = seed
	r.words = make([]atomic.Uint64, userWords)
}

// take takes one query of the allowance of a key; worker is 0 if the query is at no worker's. It is false if there is
// none left. Key 0 has no limit.
func (r *userRates) take(key uint64, limit, most uint32, worker int, now clock.Instant) bool {
	if key == 0 || limit >= maxUserRate {
		return true
	}
	rate, burst := allowed(limit, most)
	if worker <= 0 || worker > maxWorkers {
		return r.draw(key, rate, burst, 1, now)
	}
	t := r.shares[worker]
	if t == nil {
		t = new(shares)
		r.shares[worker] = t
		r.workers.Add(1)
	}
	s := &t[key%uint64(len(t))]
	if s.key == key && s.left > 0 && now < s.until {
		s.left--
		return true
	}
	part := max(min(rate, burst)/uint64(sharesPerSecond*r.workers.Load()), 1)
	for _, n := range [...]uint64{part, 1} { // if there is no share left, there may be a query
		if r.draw(key, rate, burst, n, now) {
			*s = share{key: key, left: uint32(n - 1), until: now.Add(leaseFor)}
			return true
		}
	}
	return false
}

// allowed is what rate_limit and rate_burst come to.
func allowed(limit, most uint32) (rate, burst uint64) {
	if most == 0 {
		most = limit
	}
	return uint64(limit), uint64(most)
}

// left is how many queries there are in the common word of a key; what workers have taken in advance is gone from it.
func (r *userRates) left(key uint64, limit, most uint32, now clock.Instant) int {
	rate, burst := allowed(limit, most)
	at := uint64(now) / unit & timeMask
	room := min(burst*second/rate, timeMask/4)
	_, old := find(r.set(key), tagOf(key), at)
	return int((room - min(r.ahead(old, key, at, room), room)) / (second / rate))
}

// draw takes n queries from the common word.
func (r *userRates) draw(key, rate, burst, n uint64, now clock.Instant) bool {
	tag, set := tagOf(key), r.set(key)
	at := uint64(now) / unit & timeMask
	most := min(burst*second/rate, timeMask/4) // how far ahead of now the word may be: three days at most
	cost := n * second / rate
	for {
		word, old := find(set, tag, at)
		ahead := r.ahead(old, key, at, most)
		if ahead+cost > most {
			return false
		}
		if word.CompareAndSwap(old, tag|(at+ahead+cost)&timeMask) {
			return true
		}
	}
}

func tagOf(key uint64) uint64 { return key >> timeBits << timeBits }

// set is where the word of a key may be.
func (r *userRates) set(key uint64) []atomic.Uint64 {
	return r.words[key%(userWords/userWays)*userWays:][:userWays]
}

// ahead is how far ahead of now a word is, if it is the key's. One that is further ahead than it can have been put has
// been behind for a long time.
func (r *userRates) ahead(word, key, at, most uint64) uint64 {
	if d := (word - at) & timeMask; word&^timeMask == tagOf(key) && d <= most+second {
		return d
	}
	return 0
}

// find returns the word of a tag and what it holds, or the word that the tag may take: one of nobody, or the one
// that has been behind now for longest.
func find(set []atomic.Uint64, tag, at uint64) (word *atomic.Uint64, old uint64) {
	longest := uint64(0)
	for i := range set {
		w := set[i].Load()
		if w&^uint64(timeMask) == tag {
			return &set[i], w
		}
		behind := (at - w) & timeMask
		switch {
		case w == 0:
			behind = timeMask
		case behind > timeMask/2: // ahead
			behind = 0
		}
		if word == nil || behind > longest {
			word, old, longest = &set[i], w, behind
		}
	}
	return word, old
}

// key tells apart whose allowance it is: the user's, or that of a device with a limit of its own. The user's number is
// given again when he is gone, and what he has spent must not be another's.
func (r *userRates) key(p *usercache.Profile) uint64 {
	h := uint64(p.User) ^ r.seed
	for _, c := range p.UserID.Bytes() {
		h = (h ^ uint64(c)) * 0x100000001b3
	}
	h = mix(h)
	if p.Is(usercache.DeviceRate) {
		for _, c := range p.DeviceID.Bytes() {
			h = (h ^ uint64(c)) * 0x100000001b3
		}
		h = mix(h)
	}
	return h | 1<<timeBits // the tag is never zero, so that no word in use is
}

// source tells apart clients that nobody identified: by the address, of which IPv6 has as many as it likes within a
// customer's network.
func (r *userRates) source(a netip.Addr) uint64 {
	b := a.As16()
	h := binary.BigEndian.Uint64(b[:]) >> 8
	if a.Is4() {
		h = uint64(binary.BigEndian.Uint32(b[12:])) | 1<<60
	}
	return mix(mix(h)^r.seed) | 1<<timeBits
}

func mix(h uint64) uint64 {
	h *= 0x9e3779b97f4a7c15
	h ^= h >> 32
	h *= 0xd6e8feb86659fd93
	h ^= h >> 32
	return h
}
