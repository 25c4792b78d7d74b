package offheap

import (
	"runtime"
	"testing"
	"time"
)

func TestBlockIsUnmappedWhenLetGo(t *testing.T) {
	if onHeap {
		t.Skip("under the race detector blocks are slices")
	}
	// mapped waits until so much is mapped: cleanups run in their own goroutine soon after a collection.
	mapped := func(want int64) {
		t.Helper()
		for range 10_000 {
			runtime.GC()
			if Mapped() == want {
				return
			}
			<-time.After(time.Millisecond)
		}
		t.Fatalf("still %d bytes mapped, want %d", Mapped(), want)
	}
	mapped(0) // blocks of tests before are gone
	b, err := New(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	if Mapped() != 1<<20 {
		t.Fatalf("mapped %d bytes, want 1 MiB", Mapped())
	}
	b.Words()[0] = 1
	b.Words32()[1<<18-1] = 2
	if b.Bytes()[0] != 1 || b.Bytes()[1<<20-4] != 2 {
		t.Error("the views disagree")
	}
	runtime.GC()
	if Mapped() != 1<<20 {
		t.Fatal("unmapped while in use")
	}
	runtime.KeepAlive(b)
	b = nil
	mapped(0)
}

func TestSmallBlocks(t *testing.T) {
	for _, n := range []int{0, 1, 7, 8, 4096} {
		b, err := New(n)
		if err != nil || len(b.Bytes()) != n || len(b.Words()) != n/8 {
			t.Errorf("New(%d): %d bytes, %d words, %v", n, len(b.Bytes()), len(b.Words()), err)
		}
	}
}
