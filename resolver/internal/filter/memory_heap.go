//go:build !linux || race

package filter

// The race detector sees only the Go heap, and other systems cannot grow a mapping in place.

func mapWords(int) ([]uint64, bool) { return nil, false }

func remapWords([]uint64, int) ([]uint64, bool) { return nil, false }

func unmapWords(mapping) {}

func adviseHuge([]uint64) {}
