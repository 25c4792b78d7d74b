package iterator

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// exploding panics for one name, as a fault in the reading of a response would.
type exploding struct{ Exchange }

func (x exploding) Ask(ctx context.Context, tree *query.Tree, a query.Ask) (query.Reply, error) {
	if a.Name.String() == "www.leaf.lab." {
		panic("boom")
	}
	return x.Exchange.Ask(ctx, tree, a)
}

// A panic in a goroutine of an exchange, or over a response, reaches the caller of Resolve, who recovers it, with
// what was being worked on; what was under way is not left hanging.
func TestPanicsReachTheCaller(t *testing.T) {
	caught := func(r *rig, name string) (p *query.Panic) {
		defer func() {
			v := recover()
			p, _ = v.(*query.Panic)
			if p == nil {
				t.Errorf("%s: recovered %v", name, v)
			}
		}()
		r.ask(ask(name, typeA))
		return nil
	}
	bubble(t, zones{leafZone("leaf.lab.", "a A 198.51.100.2")}, nil, func(r *rig) {
		inner := r.opts.Exchange
		r.opts.Exchange = exploding{inner}
		r.it = New(r.opts)
		defer func() { r.opts.Exchange = inner }()
		for range 3 {
			if p := caught(r, "www.leaf.lab."); p != nil && (p.Value != "boom" || !strings.Contains(strings.Join(p.Input, " "), "www.leaf.lab. A to 192.0.2.") ||
				!strings.Contains(string(p.Stack), "exploding")) {
				t.Errorf("%v, %q", p, p.Input)
			}
		}
		r.want("a.leaf.lab.", typeA, "NOERROR", "a.leaf.lab. A 198.51.100.2")
		if n := r.it.loads.m; len(n) > 0 {
			t.Errorf("steps under way: %v", n)
		}
	})
	if _, err := query.ReadMessage(nil); !errors.Is(err, query.ErrMalformed) {
		t.Errorf("no message: %v", err)
	}
}
