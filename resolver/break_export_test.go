package resolver

import (
	"errors"
	"io"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
)

// What operators and keys do to the caches, for tests of the whole.

func (r *Resolver) Purge(name Name) {
	r.engine.rrsets.Purge(name, true, 0)
	r.engine.forget(name, true)
	r.engine.answers.Raise()
}

// DropCut does what a full cache does to a delegation.
func (r *Resolver) DropCut(name Name) { r.engine.rrsets.Purge(name, false, dnswire.TypeNS) }

func (r *Resolver) Doubt(name Name, d time.Duration) error {
	_, err := r.engine.negative.Add(name, d, "a test")
	return err
}

func (r *Resolver) Distrust() { r.engine.distrust() }

func (r *Resolver) Dump(w io.Writer) error {
	_, err := r.engine.rrsets.DumpUntil(w, clock.Elapsed(), clock.Wall(), func(int64) bool { return false })
	return err
}

func (r *Resolver) Load(f io.Reader) error {
	_, _, err := r.engine.rrsets.LoadAll(f, clock.Elapsed(), clock.Wall())
	if errors.Is(err, rrcache.ErrPurged) { // as it should, when distrust comes in between
		return nil
	}
	return err
}

// Panics returns how many panics were recovered.
func (r *Resolver) Panics() int64 { return r.path.Panics() }
