package query

import (
	"strings"
	"testing"
)

// A panic takes its input along, each layer adding its own, and keeps the stack of the fault.
func TestCaught(t *testing.T) {
	defer func() {
		p, ok := recover().(*Panic)
		if !ok || p.Value != "boom" || strings.Join(p.Input, ", ") != "message 0102ff, question" || !strings.Contains(string(p.Stack), "faulty") {
			t.Errorf("%+v", p)
		}
	}()
	func() {
		defer func() { panic(Caught(recover(), "question")) }()
		faulty([]byte{1, 2, 255})
	}()
}

//go:noinline
func faulty(wire []byte) {
	defer carry(wire)
	panic("boom")
}
