package filter

import "math/bits"

// MaxLists is how many lists a Matcher can number.
const MaxLists = 512

// A Set is a set of list numbers.
type Set [MaxLists / 64]uint64

var all = func() (s Set) {
	for i := range s {
		s[i] = ^uint64(0)
	}
	return s
}()

// Add puts list n into the set. It panics if n is not below MaxLists.
func (s *Set) Add(n int) { s[n/64] |= 1 << (n % 64) }

// Remove takes list n out.
func (s *Set) Remove(n int) { s[n/64] &^= 1 << (n % 64) }

// Has reports whether list n is in the set.
func (s *Set) Has(n int) bool { return n >= 0 && n < MaxLists && s[n/64]&(1<<(n%64)) != 0 }

// Len returns how many lists are in the set.
func (s *Set) Len() int {
	n := 0
	for _, w := range s {
		n += bits.OnesCount64(w)
	}
	return n
}

// Minus returns the lists of s that are not in t.
func (s Set) Minus(t Set) Set {
	for i := range s {
		s[i] &^= t[i]
	}
	return s
}

func (s *Set) empty() bool { return *s == Set{} }
