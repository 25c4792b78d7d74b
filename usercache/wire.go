package usercache

import (
	"encoding/binary"
	"unicode/utf8"
	"unsafe"
)

// Record bytes are read in place, at every lookup and without allocation, by the small protobuf reader
// below; the protobuf library reads the parts that are cached. What both must agree on is what a message of
// proto/user/v1 with these bytes holds; FuzzUser compares them.

// Wire types of protobuf.
const (
	wireVarint  = 0
	wireFixed64 = 1
	wireBytes   = 2
	wireFixed32 = 5
)

// A field is one field of a protobuf message.
type field struct {
	num  uint32
	wire uint8
	n    uint64 // value of a varint
	b    []byte // value of a length-delimited field
}

// nextField returns the first field of a message and what follows it. At the end of the message, and where
// the encoding is broken, ok is false; then rest is empty only at the end.
func nextField(b []byte) (f field, rest []byte, ok bool) {
	if len(b) == 0 {
		return f, nil, false
	}
	tag, k := uvarint(b)
	if k <= 0 || tag>>3 == 0 || tag>>3 > 1<<29-1 {
		return f, b, false
	}
	f.num, f.wire = uint32(tag>>3), uint8(tag&7)
	v := b[k:]
	switch f.wire {
	case wireVarint:
		if f.n, k = uvarint(v); k <= 0 {
			return f, b, false
		}
		return f, v[k:], true
	case wireBytes:
		n, k := uvarint(v)
		if k <= 0 || n > uint64(len(v)-k) {
			return f, b, false
		}
		f.b = v[k : k+int(n)]
		return f, v[k+int(n):], true
	case wireFixed64:
		if len(v) < 8 {
			return f, b, false
		}
		return f, v[8:], true
	case wireFixed32:
		if len(v) < 4 {
			return f, b, false
		}
		return f, v[4:], true
	}
	// Groups are not used by any message of ours and have no place in a record.
	return f, b, false
}

// uvarint is binary.Uvarint with a short path for the usual single byte.
func uvarint(b []byte) (uint64, int) {
	if len(b) > 0 && b[0] < 0x80 {
		return uint64(b[0]), 1
	}
	return binary.Uvarint(b)
}

// isBytes reports whether f is a length-delimited field, which is what strings, bytes and messages are.
func (f *field) isBytes() bool { return f.wire == wireBytes }

// isText reports whether f is a string that proto3 accepts.
func (f *field) isText() bool { return f.wire == wireBytes && utf8.Valid(f.b) }

// text returns b as a string without copying, for functions that do not keep it.
func text(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
