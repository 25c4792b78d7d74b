package usercache

// A Status says what a lookup found.
type Status uint8

const (
	// Unknown: nobody has this id or address, and the dataset is whole. The client is a stranger.
	Unknown Status = iota

	// NotReady: nobody known has it, but the dataset has never been received in whole, so somebody may.
	// The cold policy answers, never the stranger's.
	NotReady

	// Unusable: the user is known, but no version of the record, or of the policy it names, can be used.
	// The cold policy answers.
	Unusable

	// Disabled: the account is suspended. The client is treated as a stranger.
	Disabled

	// Found: the Profile is filled in.
	Found
)

// String returns the status in a word.
func (s Status) String() string {
	return [...]string{"unknown", "not ready", "unusable", "disabled", "found"}[s]
}

// MaxLists, MaxServices and MaxCategories bound the numbers the catalogue gives.
const (
	MaxLists      = 512
	MaxServices   = 512
	MaxCategories = 256
)

// A ListSet is a set of catalogue lists by number.
type ListSet [MaxLists / 64]uint64

// A ServiceSet is a set of services by number.
type ServiceSet [MaxServices / 64]uint64

// A CategorySet is a set of categories by number.
type CategorySet [MaxCategories / 64]uint64

// Has reports whether list n is in the set. Numbers out of range are in no set.
func (s *ListSet) Has(n int) bool { return bitHas(s[:], n) }

// Add puts list n into the set.
func (s *ListSet) Add(n int) { bitAdd(s[:], n) }

// Remove takes list n out of the set.
func (s *ListSet) Remove(n int) { bitRemove(s[:], n) }

// AddAll puts all of o into the set.
func (s *ListSet) AddAll(o *ListSet) { bitOr(s[:], o[:]) }

// RemoveAll takes all of o out of the set.
func (s *ListSet) RemoveAll(o *ListSet) { bitAndNot(s[:], o[:]) }

// IsEmpty reports whether the set is empty.
func (s *ListSet) IsEmpty() bool { return *s == ListSet{} }

// Intersects reports whether the sets share a list.
func (s *ListSet) Intersects(o *ListSet) bool {
	for i := range s {
		if s[i]&o[i] != 0 {
			return true
		}
	}
	return false
}

// Has reports whether service n is in the set.
func (s *ServiceSet) Has(n int) bool { return bitHas(s[:], n) }

// Add puts service n into the set.
func (s *ServiceSet) Add(n int) { bitAdd(s[:], n) }

// Remove takes service n out of the set.
func (s *ServiceSet) Remove(n int) { bitRemove(s[:], n) }

// AddAll puts all of o into the set.
func (s *ServiceSet) AddAll(o *ServiceSet) { bitOr(s[:], o[:]) }

// RemoveAll takes all of o out of the set.
func (s *ServiceSet) RemoveAll(o *ServiceSet) { bitAndNot(s[:], o[:]) }

// IsEmpty reports whether the set is empty.
func (s *ServiceSet) IsEmpty() bool { return *s == ServiceSet{} }

// Has reports whether category n is in the set.
func (s *CategorySet) Has(n int) bool { return bitHas(s[:], n) }

// Add puts category n into the set.
func (s *CategorySet) Add(n int) { bitAdd(s[:], n) }

// Remove takes category n out of the set.
func (s *CategorySet) Remove(n int) { bitRemove(s[:], n) }

// AddAll puts all of o into the set.
func (s *CategorySet) AddAll(o *CategorySet) { bitOr(s[:], o[:]) }

// RemoveAll takes all of o out of the set.
func (s *CategorySet) RemoveAll(o *CategorySet) { bitAndNot(s[:], o[:]) }

// IsEmpty reports whether the set is empty.
func (s *CategorySet) IsEmpty() bool { return *s == CategorySet{} }

func bitHas(s []uint64, n int) bool { return uint(n)/64 < uint(len(s)) && s[n/64]>>(n%64)&1 != 0 }

func bitAdd(s []uint64, n int) {
	if uint(n)/64 < uint(len(s)) {
		s[n/64] |= 1 << (n % 64)
	}
}

func bitRemove(s []uint64, n int) {
	if uint(n)/64 < uint(len(s)) {
		s[n/64] &^= 1 << (n % 64)
	}
}

func bitOr(s, o []uint64) {
	for i := range s {
		s[i] |= o[i]
	}
}

func bitAndNot(s, o []uint64) {
	for i := range s {
		s[i] &^= o[i]
	}
}

// Flags are the yes-or-no settings of a Profile.
type Flags uint16

const (
	// Enabled: the client's queries are filtered. Whether filtering is paused is in PausedUntil.
	Enabled Flags = 1 << iota
	// RebindingProtection: special addresses for public names are blocked.
	RebindingProtection
	// BlockHTTPSRecords: HTTPS and SVCB queries get NODATA.
	BlockHTTPSRecords
	// BlockBypass: all well-known ways around the network's resolver are blocked.
	BlockBypass
	// ECS: the client's network may be sent to authoritative servers on the ECS list.
	ECS
	// SafeBrowsing: the categories of safe browsing are in Categories.
	SafeBrowsing
	// Adult: the adult categories are in Categories.
	Adult
	// DoHOnly: only authenticated DoH identifies this device.
	DoHOnly
	// HasCredentials: the device has passwords or tokens; see Cache.Credentials.
	HasCredentials
	// DeviceRate: RateLimit is the device's own; otherwise all devices of the user without one share it.
	DeviceRate
	// BlockFirefoxCanary: Firefox is told not to choose a resolver of its own.
	BlockFirefoxCanary
	// BlockPrivateRelay: iCloud Private Relay is not to be found.
	BlockPrivateRelay
)

// A BlockMode is how a blocked query is answered.
type BlockMode uint8

const (
	// BlockNullIP answers 0.0.0.0 or ::, and NODATA for other types.
	BlockNullIP BlockMode = iota
	// BlockNXDomain answers NXDOMAIN.
	BlockNXDomain
	// BlockNoData answers NOERROR without an answer.
	BlockNoData
	// BlockRefused answers REFUSED.
	BlockRefused
	// BlockCustomIP answers BlockIPv4 or BlockIPv6, and NODATA for other types or where there is none.
	BlockCustomIP
)

// A LogPrivacy is what the query log may keep.
type LogPrivacy uint8

const (
	// LogCounters keeps counters only.
	LogCounters LogPrivacy = iota
	// LogNone keeps nothing, not even counters of this user.
	LogNone
	// LogNoClient keeps names without the client's address.
	LogNoClient
	// LogFull keeps everything.
	LogFull
)

// A Profile is everything the query path needs to know about who asks: the settings of a device laid over
// its user's, over the shared policy's, over the defaults. It is a value of fixed size; a query copies it
// once and sees one version of its user from start to finish.
//
// The zero Profile is nobody's: it filters nothing.
type Profile struct {
	UserID   ID
	DeviceID DeviceID

	// Lists are the catalogue lists that apply, those of blocked categories that are no threats included.
	Lists ListSet
	// Threats are the lists of blocked threat categories. A list may be in Lists too.
	Threats ListSet
	// Services are the services blocked at all times; schedules may add and pause some.
	Services ServiceSet
	// Categories are the categories blocked at all times.
	Categories CategorySet

	// Details are the settings of variable size. Nil if there are none. It is immutable and shared by all
	// Profiles that agree on it.
	Details *Details

	// Revision is that of the user's record; Catalogue that of the catalogue it was laid over.
	Revision, Catalogue uint64

	// PausedUntil is until when filtering is off, in Unix seconds. Zero: it is not.
	PausedUntil int64

	// SafeSearch has bit i for the engine of number i.
	SafeSearch uint64

	BlockTTL     uint32 // seconds
	LogRetention uint32 // seconds
	RateLimit    uint32 // queries a second; 0 = no limit of its own
	RateBurst    uint32
	// User numbers the user while it exists in this process: an index for counters and limiters. A number
	// may be given again after its user is gone.
	User uint32

	BlockIPv4 [4]byte  // all zero: none
	BlockIPv6 [16]byte // all zero: none
	Flags     Flags
	Mode      BlockMode
	Log       LogPrivacy
}

// Is reports whether all flags in f are set.
func (p *Profile) Is(f Flags) bool { return p.Flags&f == f }

// Filtering reports whether the client's queries are filtered at the given time, in Unix seconds, as far as
// switch and pause go; schedules may pause too.
func (p *Profile) Filtering(now int64) bool { return p.Flags&Enabled != 0 && now >= p.PausedUntil }
