package resolver

import (
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/localroot"
)

// A LocalRoot is a copy of the root zone. It does not change.
type LocalRoot = localroot.Zone

// OpenLocalRoot reads a copy of the root zone, in presentation format, plain or packed with gzip.
func OpenLocalRoot(file string) (*LocalRoot, error) { return localroot.Open(file, clock.Wall()) }

// SetLocalRoot replaces the copy of the root zone while serving; nil means that the root's servers are asked. What is
// cached stays: it came from a server of the root or from what answers like one, and has its own end.
func (r *Resolver) SetLocalRoot(z *LocalRoot) { r.engine.root.Set(z) }
