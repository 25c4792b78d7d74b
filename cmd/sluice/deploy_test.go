package main

import (
	"bytes"
	"path/filepath"
	"testing"
)

// The configuration that deploy/ offers has no fault.
func TestDeployedConfiguration(t *testing.T) {
	var out, errs bytes.Buffer
	if code := execute(t.Context(), []string{"check", "-c", filepath.Join("..", "..", "deploy", "sluice.yaml")}, nil, &out, &errs); code != 0 {
		t.Errorf("exit %d\n%s%s", code, &out, &errs)
	}
}
