package identify

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// records is a directory of one device, whose credentials change.
type records struct {
	directory
	revision uint64
	creds    usercache.Credentials
	read     atomic.Int64 // how often credentials were
	hold     chan struct{}
}

func (r *records) LookupDevice(id *usercache.DeviceID, p *usercache.Profile) usercache.Status {
	p.DeviceID, p.Revision, p.Flags = *id, r.revision, usercache.HasCredentials
	return usercache.Found
}

func (r *records) Credentials(*usercache.DeviceID) (usercache.Credentials, bool) {
	r.read.Add(1)
	if r.hold != nil {
		<-r.hold
	}
	return r.creds, true
}

func auth(device, secret string) query.Query {
	return query.Query{Transport: query.DoH, AuthDevice: device, AuthSecret: secret, Arrived: clock.Elapsed(), Source: netip.MustParseAddrPort("192.0.2.1:1")}
}

func TestProofsEndWithTheRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &records{revision: 1, creds: usercache.Credentials{PasswordHashes: []string{hashOf("one")}, Tokens: [][32]byte{sha256.Sum256([]byte("token"))}}}
		i := New(Options{Directory: r})
		ask := func(secret string) (why query.RefuseReason, reads int64) {
			before := r.read.Load()
			q := auth("kid", secret)
			why = identify(t, i, &q)
			return why, r.read.Load() - before
		}
		check := func(what, secret string, want query.RefuseReason, wantRead bool) {
			t.Helper()
			if why, reads := ask(secret); why != want || (reads > 0) != wantRead {
				t.Errorf("%s: %q is %v, the credentials read %d times; want %v", what, secret, why, reads, want)
			}
		}
		for _, first := range []bool{true, false} {
			check("at first", "one", 0, first)
			check("at first", "token", 0, first)
			check("at first", "two", query.RefuseDevice, first)
		}
		time.Sleep(recheck)
		check("a minute later", "one", 0, true)
		check("a minute later", "one", 0, false)
		r.revision++ // something else has changed
		check("another revision", "one", 0, true)
		check("another revision", "one", 0, false)
		r.revision++
		r.creds.PasswordHashes = []string{hashOf("two")}
		check("another password", "one", query.RefuseDevice, true)
		check("another password", "two", 0, true)
		check("another password", "token", 0, true)
		r.revision++
		r.creds.Tokens = nil
		check("the token is gone", "token", query.RefuseDevice, true)
		check("the token is gone", "two", 0, true)
		// A change without a new revision, which there should not be, is seen after a minute.
		r.creds.PasswordHashes = nil
		check("gone behind our back", "two", 0, false)
		time.Sleep(recheck)
		check("gone behind our back", "two", query.RefuseDevice, true)
	})
}

func TestWrongPasswordsAreFew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &records{creds: usercache.Credentials{PasswordHashes: []string{hashOf("right")}}}
		i := New(Options{Directory: r})
		count := map[query.RefuseReason]int{}
		for n := range 50 {
			q := auth("kid", fmt.Sprint("guess ", n))
			count[identify(t, i, &q)]++
		}
		if count[query.RefuseDevice] != maxTries || count[query.RefuseBusy] != 50-maxTries {
			t.Errorf("50 guesses at once: %v", count)
		}
		q := auth("kid", "right")
		// Sources whose tries fall on one word, by a chance of one in four thousand, reset each other.
		id, _ := usercache.ParseID("kid")
		here, _ := i.prover.tryWord(&id, q.Source.Addr())
		for third := byte(3); ; third++ {
			q.Source = netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, third, 1}), 1)
			if there, _ := i.prover.tryWord(&id, q.Source.Addr()); there != here {
				break
			}
		}
		if why := identify(t, i, &q); why != 0 {
			t.Errorf("the right one from elsewhere: %v", why)
		}
		q = auth("kid", "right")
		if why := identify(t, i, &q); why != 0 {
			t.Errorf("the right one, known by now: %v", why)
		}
		time.Sleep(2 * tryEvery)
		clear(count)
		for n := range 10 {
			q := auth("kid", fmt.Sprint("another ", n))
			count[identify(t, i, &q)]++
		}
		if count[query.RefuseDevice] != 2 {
			t.Errorf("guesses %v later: %v", 2*tryEvery, count)
		}
	})
}

func TestVerifyingIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &records{creds: usercache.Credentials{PasswordHashes: []string{hashOf("right")}}}
		i := New(Options{Directory: r, Verifying: 2})
		r.hold = make(chan struct{}) // whoever has a place stays
		var wg sync.WaitGroup
		var good, busy atomic.Int64
		for n := range maxWaiting + 20 {
			q := auth(fmt.Sprint("kid-", n/4), "right") // the same secret of one device is verified once
			wg.Go(func() {
				i.Prove(context.Background(), &q)
				switch q.Proof {
				case query.ProofGood:
					good.Add(1)
				case query.ProofFailed:
					busy.Add(1)
				}
			})
		}
		synctest.Wait()
		if busy.Load() != 20 {
			t.Errorf("%d find no place to wait, want 20", busy.Load())
		}
		close(r.hold)
		wg.Wait()
		if good.Load() != maxWaiting {
			t.Errorf("%d were verified", good.Load())
		}

		r.hold = nil
		for range 2 {
			i.prover.places <- struct{}{}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		q := auth("late", "right")
		if i.Prove(ctx, &q); q.Proof != query.ProofFailed {
			t.Errorf("who gives up waiting is told %v", q.Proof)
		}
		if why := i.Identify(&q); why != query.RefuseBusy {
			t.Errorf("and refused because of %v", why)
		}
	})
}

func TestProofsTable(t *testing.T) {
	var table proofs
	table.slots = make([]atomic.Pointer[proof], 2*ways)
	mac := func(set, n byte) [32]byte { return [32]byte{set, 31: n} }
	for n := range byte(ways + 1) {
		table.put(&proof{mac: mac(1, n), at: clock.Instant(10 - n%3)})
	}
	var kept []byte
	for n := range byte(ways + 1) {
		if m := mac(1, n); table.get(&m) != nil {
			kept = append(kept, n)
		}
	}
	if string(kept) != "\x00\x01\x03\x04" { // the third was looked at longest ago
		t.Errorf("kept %v", kept)
	}
	m := mac(0, 1)
	table.put(&proof{mac: m, revision: 1})
	table.put(&proof{mac: m, revision: 2})
	if e := table.get(&m); e == nil || e.revision != 2 {
		t.Errorf("a proof renewed is %+v", e)
	}
}

func TestKnownAllocatesNothing(t *testing.T) {
	r := &records{creds: usercache.Credentials{PasswordHashes: []string{hashOf("right")}}}
	i := New(Options{Directory: r, ServerNames: []string{"dns.example.net"}})
	scratch := new(query.Scratch)
	q := auth("kid", "right")
	identify(t, i, &q)
	for name, q := range map[string]query.Query{
		"password":    auth("kid", "right"),
		"server name": {Transport: query.DoT, ServerName: "kid.dns.example.net"},
	} {
		q.Scratch = scratch
		if n := testing.AllocsPerRun(100, func() {
			q.Client = query.Client{}
			if i.Identify(&q) != 0 {
				t.Fatal("refused")
			}
		}); n > 0 && !raceEnabled {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
