package usercache

// MaxID is the greatest length of an id of a user or device, in bytes: one DNS label.
const MaxID = 63

// An ID is the id of a user or a device: 1 to 63 of a-z 0-9 and hyphen. It is a fixed-size comparable
// value without pointers. The zero ID is none.
type ID struct {
	n uint8
	b [MaxID]byte // zero beyond n
}

// A DeviceID is the id of a device, unique in the dataset.
type DeviceID = ID

// ParseID returns the id in text, with upper-case letters made lower: ids are case-insensitive. It reports
// false for a malformed id, which must be refused and never be taken for somebody else's.
func ParseID[T ~string | ~[]byte](text T) (id ID, ok bool) {
	if len(text) == 0 || len(text) > MaxID {
		return ID{}, false
	}
	for i := range len(text) {
		c := text[i]
		switch {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-':
		case 'A' <= c && c <= 'Z':
			c += 'a' - 'A'
		default:
			return ID{}, false
		}
		id.b[i] = c
	}
	id.n = uint8(len(text))
	return id, true
}

// IsZero reports whether id is none.
func (id *ID) IsZero() bool { return id.n == 0 }

// Bytes returns the id's text. It shares memory with id.
func (id *ID) Bytes() []byte { return id.b[:id.n] }

// String returns the id's text.
func (id ID) String() string { return string(id.b[:id.n]) }
