package query

import (
	"encoding/hex"
	"fmt"
	"runtime/debug"
)

// A Panic is a panic on its way to whoever recovers, counts and logs it, with what it takes to play it again: a
// program that survives its faults by recovering must not hide them.
type Panic struct {
	Value any
	Stack []byte   // where it happened
	Input []string // what was being worked on, the innermost first
}

func (p *Panic) String() string { return fmt.Sprint(p.Value) }

// Caught wraps a recovered value, or adds to one that is wrapped already. It is called in the deferred function
// that recovered, so that the stack is still that of the fault.
func Caught(v any, input string) *Panic {
	p, ok := v.(*Panic)
	if !ok {
		p = &Panic{Value: v, Stack: debug.Stack()}
	}
	p.Input = append(p.Input, input)
	return p
}

// carry is deferred by what reads a message: a panic goes on with the message in it.
func carry(wire []byte) {
	if v := recover(); v != nil {
		panic(Caught(v, "message "+hex.EncodeToString(wire)))
	}
}
