package resolver

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// LookupHost finds the addresses of a name, IPv4 first, for what this process itself connects to. It resolves as
// for clients, from local data too, but for nobody: no policy has a say, of users or of the operator. An error says that there is no address, or why none
// could be found; with one family out of reach the other is enough.
func (r *Resolver) LookupHost(ctx context.Context, host string) ([]netip.Addr, error) {
	name, err := dnsname.Parse(host)
	if err != nil {
		return nil, err
	}
	types := [...]uint16{dnswire.TypeA, dnswire.TypeAAAA}
	var found [len(types)][]netip.Addr
	var errs [len(types)]error
	var g errgroup.Group
	for i, typ := range types {
		g.Go(func() error {
			found[i], errs[i] = r.addresses(ctx, query.Question{Name: name, Type: typ, Class: dnswire.ClassIN})
			return nil
		})
	}
	_ = g.Wait()
	all := append(found[0], found[1]...)
	if len(all) > 0 {
		return all, nil
	}
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("%s has no address", host)
}

// addresses are those of an answer. A local alias leads to one more question.
func (r *Resolver) addresses(ctx context.Context, q query.Question) (all []netip.Addr, err error) {
	tree := query.NewTree(clock.Elapsed(), query.Budget{})
	for range query.MaxTurns {
		entry, local := r.stages.Local.Lookup(&q, clock.Elapsed())
		if !local {
			if entry, err = r.engine.Fetch(ctx, tree, q); err != nil {
				return nil, err
			}
		}
		a := entry.View()
		if a.Status == query.Bogus {
			return nil, fmt.Errorf("the answer for %v is Bogus", q.Name)
		}
		alias := q.Name
		for off := 0; ; {
			kind, value, next, ok := a.Facts.Next(off)
			if !ok {
				break
			}
			off = next
			switch kind {
			case query.FactAddress:
				if addr, ok := netip.AddrFromSlice(value); ok {
					all = append(all, addr)
				}
			case query.FactAlias:
				alias = dnsname.Name(value)
			}
		}
		if !local || len(all) > 0 || alias == q.Name {
			return all, nil
		}
		q.Name = alias
	}
	return nil, fmt.Errorf("%v is an alias of too many aliases", q.Name)
}
