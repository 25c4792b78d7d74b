package replace

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	text := func(s string) func(*os.File) error {
		return func(f *os.File) error {
			_, err := f.WriteString(s)
			return err
		}
	}
	if err := os.WriteFile(path+".new", []byte("of a process that was killed"), 0o400); err != nil {
		t.Fatal(err)
	}
	full := errors.New("full")
	for _, c := range []struct {
		write func(*os.File) error
		err   error
		want  string
	}{
		{text("one"), nil, "one"},
		{func(f *os.File) error { _ = text("t")(f); return full }, full, "one"},
		{func(f *os.File) error { return f.Close() }, os.ErrClosed, "one"},
		{text("three"), nil, "three"},
	} {
		err := File(path, c.write)
		got, _ := os.ReadFile(path)
		if !errors.Is(err, c.err) || string(got) != c.want {
			t.Errorf("%v, %q; want %v, %q", err, got, c.err, c.want)
		}
		if _, err := os.Stat(path + ".new"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("PATH.new: %v", err)
		}
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Error(fi.Mode(), err)
	}
	if err := File(filepath.Join(path, "below a file"), text("x")); err == nil {
		t.Error("a file in no folder")
	}
}
