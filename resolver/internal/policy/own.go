package policy

import (
	"context"
	"crypto/sha256"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/filter"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/usercache"
)

// An own is what a device's Details come to when compiled. It is immutable. It hangs on the Details, so that it
// goes when they do, and on each query that is judged by it.
type own struct {
	rules    [3]*filter.Matcher // of the device, the user, the shared policy (policyRules); nil without
	lists    []ownList
	rewrites rewriteSet
	unblocks []unblock
	types    []uint16
	tooMuch  []string // texts that are left out because the user may not have so much

	// missing: a text was not there when changes were so many, and there is the one before instead, or nothing;
	// compile again when there are more.
	missing bool
	changes uint64
	item    *item
}

// policyRules is the place of the shared policy's rules, which are the operator's, among an own's.
const policyRules = 2

type ownList struct {
	id       string
	matcher  *filter.Matcher
	ofPolicy bool // the shared policy's, and so the operator's
}

type unblock struct {
	text    string // as it was written
	name    dnsname.Name
	subtree bool
	until   int64 // Unix seconds; 0 for ever
}

// Ready reports whether the client's own rules are compiled, so that Question may be called. The query is judged
// from now on, to its end, by the catalogue as it is now.
func (p *Policy) Ready(q *query.Query) bool {
	p.pin(q)
	d := q.Client.Profile.Details
	if d == nil {
		return true
	}
	c := d.Compiled()
	o, ok := c.(*own)
	if !ok || o.missing && o.changes != p.changes.Load() {
		return false
	}
	o.item.use()
	q.Client.Rules = c // what is dropped meanwhile is this query's to the end
	return true
}

// Prepare compiles the client's own rules. It may take milliseconds, and waits while others of its tenant
// compile. Instead of a blob that is not there the one before it counts until it is, if there was one; otherwise
// nothing does. It is false if the query cannot be judged as it
// is: the client's settings have changed since it was identified, and the text of its rules went with them, or ctx
// ended first.
func (p *Policy) Prepare(ctx context.Context, q *query.Query) bool {
	prof := &q.Client.Profile
	d := prof.Details
	if d == nil {
		return true
	}
	tenant := ""
	if info, ok := p.o.Users.LookupUser(&prof.UserID); ok {
		tenant = info.Tenant
	}
	if !p.own.enter(ctx, tenant) {
		return false
	}
	defer p.own.leave(tenant)
	if p.Ready(q) {
		return true // somebody else has, while this one waited
	}
	o := &own{changes: p.changes.Load(), rewrites: newRewriteSet(d.Rewrites, true, prof.BlockTTL)}
	var texts []*text
	room, changed, replaced := p.o.OwnBytes/8, false, false
	device, shared := p.own.memory(owner{user: prof.UserID, device: prof.DeviceID}), p.own.memory(owner{policy: d.Policy})
	add := func(from *memory, what string, sum [32]byte, size uint64, blob bool, read func() ([]byte, bool)) *filter.Matcher {
		// A rule takes about as much memory as text; of what is too long not even the text is read.
		if size > uint64(max(room, 0)) {
			o.tooMuch = append(o.tooMuch, what)
			return nil
		}
		t, ok := p.text(sum, read)
		if !ok {
			o.missing, changed = true, changed || !blob
			old, had := from.before[what]
			if blob && had {
				t, ok = p.text(old.sum, func() ([]byte, bool) { return p.o.Blob(old.sum) })
			}
			if !ok {
				return nil
			}
			replaced, blob = true, old.blob
		}
		from.now[what] = usedText{t.sum, blob}
		room -= t.item.bytes
		texts = append(texts, t)
		return t.matcher
	}
	rules := func(from *memory, i int, t usercache.RuleText) {
		if t.Size > 0 {
			o.rules[i] = add(from, whyNames[int(WhyDeviceRule)+i]+"s", t.SHA256, t.Size, t.Blob, func() ([]byte, bool) {
				if t.Blob {
					return p.o.Blob(t.SHA256)
				}
				return p.o.Users.RuleText(prof, t)
			})
		}
	}
	lists := func(from *memory, ofPolicy bool) {
		for _, l := range d.OwnLists {
			if l.OfPolicy != ofPolicy {
				continue
			}
			if m := add(from, "own list "+l.ID, l.SHA256, l.Size, true, func() ([]byte, bool) { return p.o.Blob(l.SHA256) }); m != nil {
				o.lists = append(o.lists, ownList{l.ID, m, ofPolicy})
			}
		}
	}
	// What users write must not take the place of what they are given.
	rules(&shared, policyRules, d.PolicyRules)
	lists(&shared, true)
	rules(&device, 0, d.DeviceRules)
	rules(&device, 1, d.UserRules)
	lists(&device, false)
	if changed {
		p.own.abandon(texts)
		return false
	}
	if len(o.tooMuch) > 0 {
		p.o.Logger.Warn("a user's own rules are more than one user may have; some are left out",
			"user", prof.UserID, "device", prof.DeviceID, "left_out", o.tooMuch, "most_bytes", p.o.OwnBytes/8)
	}
	for _, u := range d.Unblocks {
		if n, err := dnsname.Parse(u.Name); err == nil {
			c := unblock{u.Name, n, u.Subtree, u.Until}
			if c.subtree {
				c.text = "*." + c.text
			}
			o.unblocks = append(o.unblocks, c)
		}
	}
	for _, t := range d.BlockTypes {
		if n, err := dnswire.ParseType(t); err == nil {
			o.types = append(o.types, n)
		}
	}
	p.own.keep(d, o, texts)
	p.own.remember(device.of, device.now)
	p.own.remember(shared.of, shared.whole())
	if replaced {
		p.tellReplaced()
	}
	q.Client.Rules = o
	return true
}

// text returns a compiled text, from those kept or compiled now.
func (p *Policy) text(sum [32]byte, read func() ([]byte, bool)) (*text, bool) {
	if t := p.own.find(sum); t != nil {
		return t, true
	}
	b, ok := read()
	if !ok || sha256.Sum256(b) != sum {
		return nil, false
	}
	m, _ := filter.Compile(&p.o.Key, string(b))
	return p.own.add(sum, m), true
}

// unblocked returns what has let the name through for now, nil if nothing has.
func (o *own) unblocked(n dnsname.Name) *unblock {
	for i := range o.unblocks {
		u := &o.unblocks[i]
		if (n == u.name || u.subtree && n.Below(u.name)) && (u.until == 0 || clock.Wall().Unix() < u.until) {
			return u
		}
	}
	return nil
}
