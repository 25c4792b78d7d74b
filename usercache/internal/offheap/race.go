//go:build race

package offheap

const onHeap = true
