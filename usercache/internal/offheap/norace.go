//go:build !race

package offheap

const onHeap = false
