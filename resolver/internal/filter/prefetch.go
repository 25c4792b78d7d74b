//go:build amd64 || arm64

package filter

import "unsafe"

// prefetch begins to bring the memory at p near. Unlike a read it is not waited for, so that other work goes on
// meanwhile; p is not followed and may be anything.
//
//go:noescape
func prefetch(p unsafe.Pointer)
