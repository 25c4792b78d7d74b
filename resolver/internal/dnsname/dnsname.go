// Package dnsname handles domain names in canonical wire form: compare, walk, hash.
//
// A Name is a sequence of labels as they stand in a message, each behind its length byte, ending with the
// root label's zero byte, never compressed, letters in lower case (RFC 4034 section 6.2). So the root is
// "\x00", two equal names are equal strings, and any suffix that starts at a label is itself a Name. A Name
// is at most 255 bytes and 127 labels before the root (RFC 1035 section 3.1).
//
// Names are strings so that they can be map keys and be shared without copying. Functions that must not
// allocate take the same form as bytes. Names that come from a message are read by package dnswire; Parse
// reads presentation form. Every method is total on valid Names, and the zero value "" stands for "no name".
package dnsname

import (
	"errors"
	"fmt"
	"strings"
)

// A Name is a domain name in canonical wire form.
type Name string

// Root is the name of the root zone.
const Root Name = "\x00"

// MaxLen is the most bytes a name may have on the wire, the root label included.
const MaxLen = 255

// MaxLabels is the most labels a name may have, the root label not counted.
const MaxLabels = 127

// Errors of Parse and Check.
var (
	ErrLong  = errors.New("a name has at most 255 bytes, a label at most 63")
	ErrEmpty = errors.New("empty label")
	ErrForm  = errors.New("not a name in wire form")
)

// Parse reads a name in presentation form (RFC 1035 section 5.1): \DDD and \X escapes, with or without the
// final dot; "." is the root. It takes bytes as they are, so names that are not host names pass, and makes
// letters lower case.
func Parse(s string) (Name, error) {
	if s == "." {
		return Root, nil
	}
	if s == "" {
		return "", fmt.Errorf("%q: %w", s, ErrEmpty)
	}
	var b [MaxLen + 1]byte
	label, n := 0, 1 // b[label] is the length byte of the label being read; n is the end
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch c {
		case '.':
			if n == label+1 {
				return "", fmt.Errorf("%q: %w", s, ErrEmpty)
			}
			b[label] = byte(n - label - 1)
			label = n
			n++
			if n > MaxLen {
				return "", fmt.Errorf("%q: %w", s, ErrLong)
			}
			continue
		case '\\':
			var err error
			if c, i, err = unescape(s, i); err != nil {
				return "", err
			}
		}
		if n-label-1 == 63 || n >= MaxLen {
			return "", fmt.Errorf("%q: %w", s, ErrLong)
		}
		b[n] = lower[c]
		n++
	}
	if n > label+1 { // no final dot
		b[label] = byte(n - label - 1)
		label = n
		n++
	}
	if n > MaxLen {
		return "", fmt.Errorf("%q: %w", s, ErrLong)
	}
	b[label] = 0
	return Name(b[:n]), nil
}

// unescape reads the escape at s[i] and returns its byte and the index of its last character.
func unescape(s string, i int) (byte, int, error) {
	if i+1 >= len(s) {
		return 0, 0, fmt.Errorf("%q: a backslash ends it; write \\\\ for one", s)
	}
	digit := func(c byte) bool { return '0' <= c && c <= '9' }
	if !digit(s[i+1]) {
		return s[i+1], i + 1, nil
	}
	if i+3 >= len(s) || !digit(s[i+2]) || !digit(s[i+3]) {
		return 0, 0, fmt.Errorf("%q: an escape with digits has three, \\000 to \\255", s)
	}
	v := int(s[i+1]-'0')*100 + int(s[i+2]-'0')*10 + int(s[i+3]-'0')
	if v > 255 {
		return 0, 0, fmt.Errorf("%q: \\%d is beyond \\255", s, v)
	}
	return byte(v), i + 3, nil
}

// MustParse is Parse for constants and tests: it panics on an error.
func MustParse(s string) Name {
	n, err := Parse(s)
	if err != nil {
		panic(err)
	}
	return n
}

// Check returns nil if b is a name in wire form, in any case, and nothing more.
func Check(b []byte) error {
	if len(b) > MaxLen {
		return ErrLong
	}
	for i := 0; i < len(b); {
		l := int(b[i])
		if l == 0 {
			if i != len(b)-1 {
				return ErrForm
			}
			return nil
		}
		if l > 63 {
			return ErrForm
		}
		i += 1 + l
	}
	return ErrForm
}

// String returns n in presentation form with the final dot. A byte outside 0x21..0x7e is written \DDD, and
// the characters special in zone files are escaped, so that Parse gives n back.
func (n Name) String() string {
	if len(n) <= 1 {
		if n == Root {
			return "."
		}
		return ""
	}
	var b strings.Builder
	b.Grow(len(n))
	for i := 0; i < len(n) && n[i] != 0; i += 1 + int(n[i]) {
		for _, c := range []byte(n[i+1 : min(len(n), i+1+int(n[i]))]) {
			switch {
			case c == '.' || c == '\\' || c == '"' || c == ';' || c == '(' || c == ')' || c == '@' || c == '$':
				b.WriteByte('\\')
				b.WriteByte(c)
			case c < 0x21 || c > 0x7e:
				fmt.Fprintf(&b, "\\%03d", c)
			default:
				b.WriteByte(c)
			}
		}
		b.WriteByte('.')
	}
	return b.String()
}

// Labels returns the number of labels, the root label not counted.
func (n Name) Labels() int {
	c := 0
	for i := 0; i < len(n) && n[i] != 0; i += 1 + int(n[i]) {
		c++
	}
	return c
}

// Parent returns n without its first label; the parent of the root is "".
func (n Name) Parent() Name {
	if len(n) <= 1 {
		return ""
	}
	return n[1+int(n[0]):]
}

// FirstLabel returns the first label without its length byte; "" for the root.
func (n Name) FirstLabel() string {
	if len(n) <= 1 {
		return ""
	}
	return string(n[1 : 1+int(n[0])])
}

// Suffix returns the last k labels of n, the root label not counted: Suffix(0) is the root, and k of at
// least Labels gives n itself.
func (n Name) Suffix(k int) Name {
	for drop := n.Labels() - k; drop > 0; drop-- {
		n = n.Parent()
	}
	return n
}

// IsWithin reports whether n is zone or below it. Everything is within the root; nothing is within "".
func (n Name) IsWithin(zone Name) bool {
	if zone == "" || len(n) < len(zone) || n[len(n)-len(zone):] != zone {
		return false
	}
	// The bytes agree; they are a suffix only if a label starts there.
	i := 0
	for i < len(n)-len(zone) {
		i += 1 + int(n[i])
	}
	return i == len(n)-len(zone)
}

// Below reports whether n is strictly below zone.
func (n Name) Below(zone Name) bool { return len(n) > len(zone) && n.IsWithin(zone) }

// CommonLabels returns how many labels, from the right, a and b share, the root label not counted.
func CommonLabels(a, b Name) int {
	var ao, bo [MaxLabels + 1]uint8
	i, j := labelStarts(a, &ao), labelStarts(b, &bo)
	c := 0
	for i > 0 && j > 0 {
		i--
		j--
		if label(a, ao[i]) != label(b, bo[j]) {
			break
		}
		c++
	}
	return c
}

// Compare orders names canonically (RFC 4034 section 6.1): label by label from the right, each as bytes, a
// missing label first. It returns -1, 0 or 1.
func Compare(a, b Name) int {
	var ao, bo [MaxLabels + 1]uint8
	i, j := labelStarts(a, &ao), labelStarts(b, &bo)
	for i > 0 && j > 0 {
		i--
		j--
		if c := strings.Compare(string(label(a, ao[i])), string(label(b, bo[j]))); c != 0 {
			return c
		}
	}
	switch {
	case i > 0:
		return 1
	case j > 0:
		return -1
	}
	return 0
}

func labelStarts(n Name, out *[MaxLabels + 1]uint8) int {
	c := 0
	for i := 0; i < len(n) && n[i] != 0 && c <= MaxLabels; i += 1 + int(n[i]) {
		out[c] = uint8(i)
		c++
	}
	return c
}

func label(n Name, at uint8) Name { return n[int(at)+1 : int(at)+1+int(n[at])] }

// IsWildcard reports whether the first label is "*" (RFC 4592 section 2.1.1).
func (n Name) IsWildcard() bool { return len(n) > 2 && n[0] == 1 && n[1] == '*' }

// Prepend returns label.n. The label is taken in lower case.
func (n Name) Prepend(label string) (Name, error) {
	if label == "" {
		return "", ErrEmpty
	}
	if len(label) > 63 || len(n)+1+len(label) > MaxLen {
		return "", ErrLong
	}
	b := make([]byte, 0, len(n)+1+len(label))
	b = append(b, byte(len(label)))
	b = append(b, label...)
	Fold(b[1:], b[1:])
	return Name(append(b, n...)), nil
}

// Replace returns n with its ending from, which it must be within, replaced by to (RFC 6672 section 2.2).
// ErrLong says that the result would not be a name (the answer is then YXDOMAIN).
func (n Name) Replace(from, to Name) (Name, error) {
	head := n[:len(n)-len(from)]
	if len(head)+len(to) > MaxLen {
		return "", ErrLong
	}
	return head + to, nil
}

// lower maps upper-case ASCII letters to lower case and every other byte to itself.
var lower = func() (t [256]byte) {
	for i := range t {
		t[i] = byte(i)
		if 'A' <= i && i <= 'Z' {
			t[i] += 'a' - 'A'
		}
	}
	return t
}()

// Fold copies src to dst, which has at least its length and may be the same, making ASCII letters lower
// case. It may be given a whole name in wire form: a length byte is at most 63 and so never a letter.
func Fold(dst, src []byte) {
	dst = dst[:len(src)]
	i := 0
	for ; i+8 <= len(src); i += 8 {
		v := le64(src[i:])
		// Bit 7 of each byte of up is set where v holds 'A'..'Z': 0x80-'A' carries into it from 'A' on,
		// 0x80-'Z'-1 from '[' on, and bytes above 0x7f are left alone.
		lo := v & 0x7f7f7f7f7f7f7f7f
		up := (lo + 0x3f3f3f3f3f3f3f3f) & ^(lo + 0x2525252525252525) & ^v & 0x8080808080808080
		putLE64(dst[i:], v|up>>2)
	}
	for ; i < len(src); i++ {
		dst[i] = lower[src[i]]
	}
}
