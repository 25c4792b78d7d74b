package query

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// A Tree is what one client's question may cost, all the work it causes included: upstream queries, failed
// and successful signature checks, time. It is an explicit argument of everything that spends, is shared by
// all goroutines that work for the question, and is never reset.
type Tree struct {
	// Deadline ends the work.
	Deadline clock.Instant

	queries, failed, passed, hashes, missing atomic.Int32
	heard                                    atomic.Bool

	mu         sync.Mutex
	inProgress map[nameType]int
	sent       map[sentKey]uint8
}

// Budget is the most a Tree may spend. Zero fields mean the default stated.
type Budget struct {
	Time              time.Duration // 8 s
	Queries           int           // 100 upstream queries
	FailedValidations int           // 8
	Validations       int           // 64 successful ones
	NSEC3Hashes       int           // 64
	MissingNames      int           // 4 name servers whose names have no address
}

// ErrLimit is what ends work that has spent its tree's budget; it says nothing of the question, so it is
// never put in a failure cache.
var ErrLimit = errors.New("limit of one question reached")

// NewTree returns a tree with the given budget.
func NewTree(now clock.Instant, b Budget) *Tree {
	or := func(n, def int) int32 {
		if n == 0 {
			n = def
		}
		return int32(n)
	}
	if b.Time == 0 {
		b.Time = 8 * time.Second
	}
	t := &Tree{Deadline: now.Add(b.Time), inProgress: make(map[nameType]int), sent: make(map[sentKey]uint8)}
	t.queries.Store(or(b.Queries, 100))
	t.failed.Store(or(b.FailedValidations, 8))
	t.passed.Store(or(b.Validations, 64))
	t.hashes.Store(or(b.NSEC3Hashes, 64))
	t.missing.Store(or(b.MissingNames, 4))
	return t
}

func spend(left *atomic.Int32, what string) error {
	if left.Add(-1) < 0 {
		return fmt.Errorf("%w: %s", ErrLimit, what)
	}
	return nil
}

// Query charges one upstream query; an error wraps ErrLimit.
func (t *Tree) Query() error { return spend(&t.queries, "upstream queries") }

// Hear notes that a server has answered, whatever it said. Heard reports whether one has.
func (t *Tree) Hear()       { t.heard.Store(true) }
func (t *Tree) Heard() bool { return t.heard.Load() }

// FailedValidation charges one signature that did not verify.
func (t *Tree) FailedValidation() error { return spend(&t.failed, "failed validations") }

// Validation charges one signature that verified.
func (t *Tree) Validation() error { return spend(&t.passed, "validations") }

// Hash charges one NSEC3 hash.
func (t *Tree) Hash() error { return spend(&t.hashes, "NSEC3 hashes") }

// MissingName charges one name server whose name turned out to have no address: delegations that consist of
// such are how a stranger's zone would have us pester another (NXNSAttack, CVE-2020-12662).
func (t *Tree) MissingName() error { return spend(&t.missing, "name servers without an address") }

// Left returns how many upstream queries may still be sent.
func (t *Tree) Left() int { return int(max(t.queries.Load(), 0)) }

type nameType struct {
	name dnsname.Name
	typ  uint16
}

type sentKey struct {
	server string
	name   dnsname.Name
	typ    uint16
}

// Enter notes that the addresses (or another type) of name are being looked for, and returns false if that
// is already so: the caller depends on itself and must do without (hardening: TsuNAME, cyclic glue). Every
// Enter that returned true needs a Leave.
func (t *Tree) Enter(name dnsname.Name, typ uint16) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := nameType{name, typ}
	if t.inProgress[k] > 0 {
		return false
	}
	t.inProgress[k]++
	return true
}

// Leave ends an Enter.
func (t *Tree) Leave(name dnsname.Name, typ uint16) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.inProgress, nameType{name, typ})
}

// maxSends is how often one tree may send the same question to the same server over the same transport
// (hardening: endless bad-server loops).
const maxSends = 3

// Send notes that a question goes to a server, named with its transport in a form of the caller's, and
// returns false if it went there too often.
func (t *Tree) Send(server string, name dnsname.Name, typ uint16) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := sentKey{server, name, typ}
	if t.sent[k] >= maxSends {
		return false
	}
	t.sent[k]++
	return true
}
