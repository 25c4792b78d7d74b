// Package replace writes files in the place of others, which stay until the new ones are whole.
package replace

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// File has a file written that takes the place of path when write has returned without an error, and does not exist
// otherwise; whether it is on the disk by then is for write to see to (os.File.Sync). Only its owner may read it. Until
// then it is PATH.new, so that what a process that was killed has left does not stay for ever. One File at a time may
// be under way for a path.
func File(path string, write func(*os.File) error) (err error) {
	temp := path + ".new"
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(temp)
		}
	}()
	if err := write(f); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(temp, path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}
