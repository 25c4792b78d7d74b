package policy

import (
	"context"
	"crypto/sha256"
	"runtime"
	"weak"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/filter"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// An own is what a device's Details come to when compiled. It is immutable and hangs on the Details, so it
// goes when they do.
type own struct {
	rules    [3]*filter.Matcher // of the device, the user, the shared policy; nil without
	lists    []ownList
	rewrites rewriteSet
	unblocks []unblock
	types    []uint16
	missing  bool // a text was not there: compile again next time
}

type ownList struct {
	id      string
	matcher *filter.Matcher
}

type unblock struct {
	name    dnsname.Name
	subtree bool
	until   int64 // Unix seconds; 0 for ever
}

// A sharedMatcher is one that somebody uses, by the content of its text.
type sharedMatcher = weak.Pointer[filter.Matcher]

// Ready reports whether the client's own rules are compiled, so that Question may be called.
func (p *Policy) Ready(q *query.Query) bool {
	d := q.Client.Profile.Details
	if d == nil || q.Client.Profile.Flags == 0 {
		return true
	}
	o, ok := d.Compiled().(*own)
	return ok && !o.missing
}

// Prepare compiles the client's own rules. It may take milliseconds. Texts that are not there are left out
// until they are.
func (p *Policy) Prepare(_ context.Context, q *query.Query) {
	d := q.Client.Profile.Details
	if d == nil {
		return
	}
	o := &own{rewrites: newRewriteSet(d.Rewrites, true, q.Client.Profile.BlockTTL)}
	for i, t := range [...]usercache.RuleText{d.DeviceRules, d.UserRules, d.PolicyRules} {
		if t.Size > 0 {
			o.rules[i] = p.matcher(t.SHA256, o, func() ([]byte, bool) {
				if t.Blob {
					return p.o.Blob(t.SHA256)
				}
				return p.o.Users.RuleText(&q.Client.Profile, t)
			})
		}
	}
	for _, l := range d.OwnLists {
		if m := p.matcher(l.SHA256, o, func() ([]byte, bool) { return p.o.Blob(l.SHA256) }); m != nil {
			o.lists = append(o.lists, ownList{l.ID, m})
		}
	}
	for _, u := range d.Unblocks {
		if n, err := dnsname.Parse(u.Name); err == nil {
			o.unblocks = append(o.unblocks, unblock{n, u.Subtree, u.Until})
		}
	}
	for _, t := range d.BlockTypes {
		if n, err := dnswire.ParseType(t); err == nil {
			o.types = append(o.types, n)
		}
	}
	d.SetCompiled(o)
}

// matcher returns the matcher of a text, compiled now or by somebody before; nil if the text is not there.
func (p *Policy) matcher(sum [32]byte, o *own, text func() ([]byte, bool)) *filter.Matcher {
	p.mu.Lock()
	m := p.shared[sum].Value()
	p.mu.Unlock()
	if m != nil {
		return m
	}
	b, ok := text()
	if !ok || sha256.Sum256(b) != sum {
		o.missing = true
		return nil
	}
	m, _ = filter.Compile(&p.o.Key, string(b))
	p.mu.Lock()
	defer p.mu.Unlock()
	if other := p.shared[sum].Value(); other != nil {
		return other
	}
	p.shared[sum] = weak.Make(m)
	runtime.AddCleanup(m, p.forget, sum)
	return m
}

// forget drops the entry of a matcher that nobody uses any more.
func (p *Policy) forget(sum [32]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if w, ok := p.shared[sum]; ok && w.Value() == nil {
		delete(p.shared, sum)
	}
}

// unblocked reports whether the user has let the name through for now.
func (o *own) unblocked(n dnsname.Name) bool {
	for i := range o.unblocks {
		u := &o.unblocks[i]
		if (n == u.name || u.subtree && n.Below(u.name)) && (u.until == 0 || clock.Wall().Unix() < u.until) {
			return true
		}
	}
	return false
}
