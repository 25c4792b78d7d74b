package syncclient

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// A chunk is a part of something named by its SHA-256.
type chunk struct {
	data         []byte
	offset, size uint64
}

// errCorrupt says that bytes are not what their name says.
var errCorrupt = errors.New("the bytes do not have the SHA-256 that names them")

// download fetches a file by its SHA-256 into dir, where it is then found under that name in hexadecimal.
// What an earlier attempt has brought, before a restart too, is not fetched again.
func download(ctx context.Context, dir string, sum [32]byte, most uint64, open func(ctx context.Context, offset uint64) (recv func() (chunk, error), err error)) error {
	name := filepath.Join(dir, hex.EncodeToString(sum[:]))
	part := name + ".part"
	resumed, err := downloadPart(ctx, part, most, open)
	if err != nil {
		return err
	}
	err = checkFile(part, sum)
	if errors.Is(err, errCorrupt) {
		_ = os.Remove(part)
		if !resumed {
			return wrong("%x: %v", sum, err)
		}
		// The beginning may have been at fault.
		if _, err = downloadPart(ctx, part, most, open); err != nil {
			return err
		}
		if err = checkFile(part, sum); errors.Is(err, errCorrupt) {
			_ = os.Remove(part)
			return wrong("%x: %v", sum, err)
		}
	}
	if err != nil {
		return err
	}
	return os.Rename(part, name)
}

// downloadPart completes a file that may have its beginning already, and makes it durable.
func downloadPart(ctx context.Context, path string, most uint64, open func(ctx context.Context, offset uint64) (func() (chunk, error), error)) (resumed bool, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	fi, err := f.Stat()
	if err != nil {
		return false, err
	}
	at := uint64(fi.Size())
	resumed = at > 0

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	recv, err := open(ctx, at)
	if err != nil {
		return resumed, err
	}
	dog := newWatchdog(cancel)
	size := uint64(0)
	for first := true; first || at < size; first = false {
		c, err := receive(ctx, dog, answerTime, recv)
		if errors.Is(err, io.EOF) {
			return resumed, wrong("it ends after %d of %d bytes", at, size)
		}
		if err != nil {
			return resumed, err
		}
		if first {
			size = c.size
		}
		switch {
		case c.size > most:
			return resumed, wrong("%d bytes are announced, more than %d", c.size, most)
		case c.size != size || c.offset != at || at+uint64(len(c.data)) > size:
			// What is here already may be at fault: the next attempt begins anew.
			return resumed, errors.Join(wrong("bytes %d to %d of %d come where %d of %d should go on", c.offset, c.offset+uint64(len(c.data)), c.size, at, size), os.Truncate(path, 0))
		case len(c.data) == 0 && at < size:
			return resumed, wrong("nothing comes at %d of %d bytes", at, size)
		}
		if _, err := f.Write(c.data); err != nil {
			return resumed, err
		}
		at += uint64(len(c.data))
	}
	return resumed, f.Sync()
}

// checkFile compares a file with its name.
func checkFile(path string, sum [32]byte) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return checkReader(f, sum)
}

func checkReader(r io.Reader, sum [32]byte) error {
	h := sha256.New()
	if _, err := io.Copy(h, r); err != nil {
		return err
	}
	if [32]byte(h.Sum(nil)) != sum {
		return errCorrupt
	}
	return nil
}

// removeFile removes a file that may be gone already.
func removeFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing what is not needed any more: %w", err)
	}
	return nil
}
