package usercache

import (
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// Details are the settings of a device that have no fixed size, merged over all layers. All fields are
// constant.
type Details struct {
	// Rule texts, in the order they are judged: the device's own, the user's, the shared policy's. Size 0
	// means none.
	DeviceRules, UserRules, PolicyRules RuleText

	// Policy is the id of the shared policy that is laid under, "" without one. Users who say nothing beyond what has a
	// fixed size have its Details, one and the same for all of them.
	Policy string

	// OwnLists are private lists, in order of id.
	OwnLists []OwnList
	// Schedules, in order of id.
	Schedules []Schedule
	// Rewrites, in order of name.
	Rewrites []Rewrite
	// Unblocks, in order of name.
	Unblocks []Unblock

	// AllowNetworks and DenyNetworks bound where the client may ask from. No AllowNetworks: anywhere.
	AllowNetworks, DenyNetworks []netip.Prefix
	// AllowDomains and DenyDomains bound what may be asked for: the names and all below. No AllowDomains:
	// anything. RebindingExceptions are the names for which rebinding protection lets private addresses pass.
	AllowDomains, DenyDomains, RebindingExceptions Domains

	// BlockTypes are mnemonics of RR types that get NODATA.
	BlockTypes []string
	// Tags are the client tags for rules with $ctag.
	Tags []string
	// Name is what the owner calls the device, for rules with $client. A device of which nothing but its name
	// would need Details has them only if the shared policy's rules may ask for it.
	Name string

	compiled atomic.Pointer[any]
}

// AdmitsName reports whether a name may be asked for, by AllowDomains and DenyDomains. The name is in canonical
// wire form.
func (d *Details) AdmitsName(wire string) bool {
	return !d.DenyDomains.Has(wire) && (len(d.AllowDomains) == 0 || d.AllowDomains.Has(wire))
}

// Domains are a set of names, each of which stands for all below it too. They are in canonical wire form and
// sorted.
type Domains []string

// newDomains reads names as they stand in records: lower case, without the final dot. What is no name is left
// out.
func newDomains(texts []string) Domains {
	var d Domains
	for _, t := range texts {
		var wire []byte
		ok := len(t) > 0 && len(t) < 254
		for label := range strings.SplitSeq(strings.ToLower(t), ".") {
			ok = ok && len(label) > 0 && len(label) < 64
			wire = append(append(wire, byte(len(label))), label...)
		}
		if ok {
			d = append(d, string(append(wire, 0)))
		}
	}
	slices.Sort(d)
	return slices.Compact(d)
}

// Has reports whether the name, or one above it, is in the set. The name is in canonical wire form.
func (d Domains) Has(wire string) bool {
	if len(d) == 0 {
		return false
	}
	for len(wire) > 1 {
		if _, ok := slices.BinarySearch(d, wire); ok {
			return true
		}
		wire = wire[min(len(wire), 1+int(wire[0])):]
	}
	return false
}

// Compiled returns what SetCompiled stored, or nil. The policy package keeps there what it has made of
// these Details, so that a query finds it without a lookup. It is empty anew whenever a setting changes.
func (d *Details) Compiled() any {
	if p := d.compiled.Load(); p != nil {
		return *p
	}
	return nil
}

// SetCompiled stores a value for Compiled to return.
func (d *Details) SetCompiled(v any) { d.compiled.Store(&v) }

// A RuleText names a text of filtering rules by its content.
type RuleText struct {
	// SHA256 of the text. Texts of equal content have equal rules, whoever owns them.
	SHA256 [32]byte
	// Size of the text in bytes.
	Size uint64
	// Blob: the text is not in the record but a blob of the sync protocol. Otherwise Cache.RuleText
	// returns it.
	Blob bool
}

// An OwnList is a private list by content; the bytes are a blob.
type OwnList struct {
	ID     string
	SHA256 [32]byte
	Size   uint64
	// OfPolicy: it is the shared policy's.
	OfPolicy bool
}

// A Schedule blocks, or stops blocking, something at certain times of the week.
type Schedule struct {
	ID       string
	Location *time.Location
	Windows  []Window
	// Pause: what it concerns is let through, though the settings block it. Otherwise it is blocked.
	Pause bool
	// Everything: it concerns every name.
	Everything bool
	Services   ServiceSet
	Categories CategorySet
	Lists      ListSet
	// Threats are the lists of its threat categories.
	Threats ListSet
}

// A Window is a part of some days of the week.
type Window struct {
	// Days has bit 0 for Monday … bit 6 for Sunday: the days on which the window begins.
	Days uint8
	// From is the minute of the day at which it begins, To at which it ends; beyond 1440, on the next day.
	From, To uint16
}

// Active reports whether the schedule is in one of its windows at the given time.
func (s *Schedule) Active(now time.Time) bool {
	local := now.In(s.Location)
	minute := uint16(local.Hour()*60 + local.Minute())
	today := (int(local.Weekday()) + 6) % 7 // Monday is 0
	yesterday := (today + 6) % 7
	for _, w := range s.Windows {
		if w.Days>>today&1 != 0 && w.From <= minute && minute < w.To {
			return true
		}
		if w.Days>>yesterday&1 != 0 && minute+minutesPerDay >= w.From && minute+minutesPerDay < w.To {
			return true
		}
	}
	return false
}

const minutesPerDay = 24 * 60

// A Rewrite answers a name with given data.
type Rewrite struct {
	// Name in presentation form, without the final dot; "*." in front means every name below and not the
	// name itself.
	Name string
	// Records are each "TYPE RDATA", or one of NXDOMAIN, NODATA, REFUSED alone.
	Records []string
	// TTL in seconds. 0: the block TTL.
	TTL uint32
}

// An Unblock lets a name through for a while.
type Unblock struct {
	Name string
	// Subtree: every name below it too.
	Subtree bool
	// Until when, in Unix seconds. 0: for ever.
	Until int64
}
