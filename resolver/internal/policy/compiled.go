package policy

import (
	"container/list"
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"weak"

	"github.com/sluice-dns/sluice/resolver/internal/filter"
	"github.com/sluice-dns/sluice/usercache"
)

// compiled keeps what users' own rules and lists have been compiled to, within a budget of bytes for all users
// together. Texts of equal content are one. What has not been used since a hand last passed it is dropped when
// more is needed (the second-chance algorithm), so that a use costs a flag and not a lock.
//
// Two kinds of items share the budget: texts, and the owns made of them, one a device. A text is dropped only
// when no own uses it; an own is dropped by taking it off its Details, and is gone as well when they are.
type compiled struct {
	budget int64
	slots  chan struct{} // compilations of all tenants together

	mu      sync.Mutex // guards the rest; held for map and list work only
	bytes   int64
	ring    *list.List // of *item; the hand is at the front, which moves to the back if it is given another chance
	texts   map[[32]byte]*text
	tenants map[string]*tenant
	before  map[owner]map[string]usedText // see remember
}

// An item is what the budget is spent on.
type item struct {
	bytes int64
	used  atomic.Bool
	at    *list.Element // in the ring; nil if it is no more

	text    *text                           // of this text, or
	details weak.Pointer[usercache.Details] // of the own on these Details,
	texts   []*text                         // which uses these
}

// use gives the item another chance.
func (i *item) use() {
	if !i.used.Load() { // so that a line that all workers read is written once a round
		i.used.Store(true)
	}
}

// A text is one that somebody wrote, compiled.
type text struct {
	sum     [32]byte
	matcher *filter.Matcher
	item    item
	users   int // owns that use it, and Prepares that are going to
}

// A tenant is one whose users are compiling.
type tenant struct {
	slots chan struct{}
	n     int // who has or wants one
}

const (
	perTenant = 2 // compilations at a time, so that one tenant's texts do not keep all others waiting
	together  = 8
	// What a text and an own take beside what they hold.
	textBytes = 1152
	ownBytes  = 1024
	// There is room for one device in before for so many bytes of the budget, of which it takes a few hundred.
	beforeBytes = 16 << 10
)

func (c *compiled) init(budget int64) {
	c.budget, c.slots = budget, make(chan struct{}, together)
	c.ring, c.texts, c.tenants = list.New(), make(map[[32]byte]*text), make(map[string]*tenant)
	c.before = make(map[owner]map[string]usedText)
}

// enter waits for a turn to compile for a tenant; false if ctx ended first.
func (c *compiled) enter(ctx context.Context, name string) bool {
	if ctx.Err() != nil { // of two ways that are open select takes either
		return false
	}
	c.mu.Lock()
	t := c.tenants[name]
	if t == nil {
		t = &tenant{slots: make(chan struct{}, perTenant)}
		c.tenants[name] = t
	}
	t.n++
	c.mu.Unlock()
	select {
	case t.slots <- struct{}{}:
	case <-ctx.Done():
		c.gone(name, t)
		return false
	}
	select {
	case c.slots <- struct{}{}:
		return true
	case <-ctx.Done():
		<-t.slots
		c.gone(name, t)
		return false
	}
}

func (c *compiled) leave(name string) {
	c.mu.Lock()
	t := c.tenants[name]
	c.mu.Unlock()
	<-c.slots
	<-t.slots
	c.gone(name, t)
}

func (c *compiled) gone(name string, t *tenant) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.n--; t.n == 0 {
		delete(c.tenants, name)
	}
}

// find returns a text that is compiled, for an own that keep is going to be told of.
func (c *compiled) find(sum [32]byte) *text {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.texts[sum]
	if t != nil {
		t.users++
	}
	return t
}

// add takes a text in that has been compiled, unless somebody else's is there, for an own that keep is going to be
// told of.
func (c *compiled) add(sum [32]byte, m *filter.Matcher) *text {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.texts[sum]
	if t == nil {
		t = &text{sum: sum, matcher: m}
		t.item.text, t.item.bytes = t, textBytes+m.Stats().Bytes
		c.texts[sum] = t
		c.put(&t.item)
	}
	t.users++
	return t
}

// keep puts an own on its Details.
func (c *compiled) keep(d *usercache.Details, o *own, texts []*text) {
	o.item = &item{bytes: ownBytes + o.rewrites.bytes + 200*int64(len(o.unblocks)), details: weak.Make(d), texts: texts}
	o.item.use()
	runtime.AddCleanup(o, c.release, o.item)
	c.mu.Lock()
	defer c.mu.Unlock()
	if old, ok := d.Compiled().(*own); ok && old.item.at != nil { // its texts were missing
		c.drop(old.item)
	}
	c.put(o.item)
	d.SetCompiled(o)
	c.shrink()
}

// remember notes which of a device's texts are in force, so that they stay so when blobs are to take their place and
// have not arrived. Of more devices than there is room for, any are forgotten.
func (c *compiled) remember(o owner, texts map[string]usedText) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.before, o)
	if len(texts) == 0 || o.isNobody() {
		return
	}
	if int64(len(c.before)) >= max(c.budget/beforeBytes, 1) {
		for other := range c.before {
			delete(c.before, other)
			break
		}
	}
	c.before[o] = texts
}

// remembered is what remember was told of a device. Nobody changes it.
func (c *compiled) remembered(o owner) map[string]usedText {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.before[o]
}

// abandon lets go of texts that no own is going to use.
func (c *compiled) abandon(texts []*text) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, t := range texts {
		t.users--
	}
}

// release forgets an own that nobody has any more.
func (c *compiled) release(i *item) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i.at != nil {
		c.drop(i)
	}
}

func (c *compiled) put(i *item) {
	i.at = c.ring.PushBack(i)
	c.bytes += i.bytes
}

// drop takes an item out of the ring and what belongs to it.
func (c *compiled) drop(i *item) {
	c.ring.Remove(i.at)
	i.at = nil
	c.bytes -= i.bytes
	if i.text != nil {
		delete(c.texts, i.text.sum)
		return
	}
	for _, t := range i.texts {
		t.users--
		t.item.use() // the next own may want it soon
	}
}

// shrink drops what has not been used for long until all is within the budget.
func (c *compiled) shrink() {
	for left := 2*c.ring.Len() + 1; c.bytes > c.budget && left > 0; left-- {
		i := c.ring.Front().Value.(*item)
		if i.used.Swap(false) || i.text != nil && i.text.users > 0 {
			c.ring.MoveToBack(i.at)
			continue
		}
		if d := i.details.Value(); i.text == nil && d != nil {
			if o, ok := d.Compiled().(*own); ok && o.item == i {
				d.SetCompiled(nil)
			}
		}
		c.drop(i)
	}
}

// use returns the bytes that are held, and of how many texts.
func (c *compiled) use() (bytes int64, texts int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes, len(c.texts)
}
