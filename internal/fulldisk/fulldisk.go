//go:build unix

// Package fulldisk lets tests run out of disk. What stands for the full disk is the limit on the size of files, which is
// the process's, so such a test runs in a process of its own.
package fulldisk

import (
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
)

// Alone runs the test again in a process of its own and fails it if it fails there. It reports false in that process,
// where what does not fit into the room left is an error from then on; where it reports true, the test is over.
func Alone(t *testing.T) bool {
	const child = "SLUICE_TEST_FULL_DISK"
	if os.Getenv(child) != "" {
		signal.Ignore(syscall.SIGXFSZ) // which would end the process
		return false
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), child+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("%v:\n%s", err, out)
	}
	return true
}

// Room lets files grow to so many bytes and no further.
func Room(t testing.TB, bytes uint64) {
	t.Helper()
	var l syscall.Rlimit
	err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &l)
	if l.Cur = min(bytes, l.Max); err == nil {
		err = syscall.Setrlimit(syscall.RLIMIT_FSIZE, &l)
	}
	if err != nil {
		t.Fatal(err)
	}
}
