package resolver

import (
	"context"
	"log/slog"

	"github.com/sluice-dns/sluice/resolver/internal/identify"
	"github.com/sluice-dns/sluice/usercache"
)

// standins are the policies that the configuration names for clients who have no settings of their own. Whether there
// is such a policy only the catalogue knows, now and later; nobody else would say why such clients are refused.
type standins struct {
	users   *usercache.Cache
	log     *slog.Logger
	named   []standin
	changed chan struct{} // of size one: the catalogue has changed
}

type standin struct {
	key, policy, who string
	absent           bool // and said so
}

func newStandins(o *Options) *standins {
	s := &standins{users: o.Users, log: o.Logger, changed: make(chan struct{}, 1)}
	for _, n := range []standin{
		{key: "stranger", policy: o.Identify.Stranger, who: "clients that nobody identified"},
		{key: "users.when_cold", policy: o.Identify.WhenCold, who: "clients whose settings are not there"},
	} {
		if n.policy != "" && n.policy != identify.Refuse && n.policy != identify.Serve {
			s.named = append(s.named, n)
		}
	}
	if len(s.named) > 0 {
		o.Users.Dataset(usercache.CatalogueKind).Notify(s.changed)
	}
	return s
}

// run looks whenever the catalogue changes.
func (s *standins) run(ctx context.Context) {
	for {
		s.look()
		select {
		case <-ctx.Done():
			return
		case <-s.changed:
		}
	}
}

// look says what is no more, and what is again.
func (s *standins) look() {
	if !s.users.Dataset(usercache.CatalogueKind).Status().Complete {
		return // without a catalogue there is no policy at all, of which readiness tells
	}
	for i := range s.named {
		n := &s.named[i]
		_, there := s.users.Catalogue().Policy(n.policy)
		switch {
		case !there && !n.absent:
			s.log.Warn("a policy that the configuration names does not exist: "+n.who+" are refused (EDE 14) until it does",
				"key", n.key, "policy", n.policy, "try", "sluicectl policy create "+n.policy+", or another value of "+n.key)
		case there && n.absent:
			s.log.Info("a policy that the configuration names exists now: "+n.who+" are served by it", "key", n.key, "policy", n.policy)
		}
		n.absent = !there
	}
}
