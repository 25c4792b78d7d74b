package main

import (
	"context"
	"strings"
	"testing"
)

// What fails in the demo shows in the exit status; package demo tests the rest. A demo that was interrupted
// before it began has failed in every check.
func TestDemoExitStatus(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out, errs strings.Builder
	status := execute(ctx, []string{"demo", "--json"}, strings.NewReader(""), &out, &errs)
	if status != 1 || !strings.HasSuffix(out.String(), `{"passed":0,"failed":21}`+"\n") {
		t.Errorf("exit status %d\n%s%s", status, out.String(), errs.String())
	}
	if status, _, errs := sluice(t, "demo", "more"); status != 2 || errs == "" {
		t.Errorf("with an argument: exit status %d, %q", status, errs)
	}
}
