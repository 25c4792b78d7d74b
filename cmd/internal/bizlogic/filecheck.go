package bizlogic

import (
	"errors"
	"os"

	"github.com/sluice-dns/sluice/usercache/pagewalk"
)

// checkFile returns nil if bbolt can open the file, else a *StoreError. bbolt trusts the file it opens: a damaged one
// makes it panic, in places where nobody can recover, or loop. So it opens what has been walked and found whole.
func checkFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return &StoreError{Path: path, What: "cannot be read", Err: err}
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return &StoreError{Path: path, What: "cannot be read", Err: err}
	}
	restore := "restore a backup into an empty data_dir"
	if fi.Size() == 0 {
		return &StoreError{Path: path, What: "is empty", Try: restore}
	}
	r, err := pagewalk.Walk(f, fi.Size(), func(string, []byte, []byte) error { return nil })
	switch {
	case err == pagewalk.ErrNotBolt:
		return &StoreError{Path: path, What: "is not a store of this service, nor any bbolt file", Try: "name another data_dir"}
	case err == pagewalk.ErrVersion:
		return &StoreError{Path: path, What: "is of a version of bbolt that this program does not know", Try: "run the newer program that wrote it"}
	case err == nil && !r.Whole():
		err = errors.New(r.Faults[0].String())
	}
	if err != nil {
		return &StoreError{Path: path, What: "is damaged", Err: err, Try: restore}
	}
	return nil
}
