package bizlogic

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	bolt "go.etcd.io/bbolt"
)

// Backup writes a consistent copy of the store and its blobs as a tar archive. The store is copied to a
// temporary file first, since a slow reader must not hold a transaction open.
func (s *Service) Backup(w io.Writer) error {
	tmp, err := os.CreateTemp(s.opts.Dir, "store.db"+copySuffix+"*")
	if err != nil {
		return reading(err)
	}
	defer os.Remove(tmp.Name())
	defer tmp.Close()
	if err := s.db.View(func(tx *bolt.Tx) error { _, err := tx.WriteTo(tmp); return err }); err != nil {
		return reading(err)
	}
	return writeBackup(w, s.opts.Dir, tmp.Name())
}

// BackupClosed is Backup of a store that no service has open; ErrLocked if one has.
func BackupClosed(dir string, w io.Writer) error {
	path := filepath.Join(dir, "store.db")
	if err := checkFile(path); err != nil {
		return err
	}
	db, err := openBolt(path, true)
	if err != nil {
		return err
	}
	return errors.Join(writeBackup(w, dir, path), db.Close()) // open, so that nobody writes meanwhile
}

func writeBackup(w io.Writer, dir, store string) error {
	tw := tar.NewWriter(w)
	if err := addToTar(tw, store, "store.db"); err != nil {
		return err
	}
	blobs := filepath.Join(dir, "blobs")
	err := filepath.WalkDir(blobs, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || d.IsDir() || strings.HasPrefix(d.Name(), ".") {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		return addToTar(tw, path, filepath.ToSlash(rel))
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

func addToTar(tw *tar.Writer, path, name string) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // a blob that has just been forgotten
	}
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if err := tw.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: fi.Size(), Format: tar.FormatPAX}); err != nil {
		return err
	}
	_, err = io.CopyN(tw, f, fi.Size())
	return err
}

// Restore unpacks a backup into dir, which must hold no store. The store will have a new lineage.
func Restore(dir string, r io.Reader) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	path := filepath.Join(dir, "store.db")
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return &StoreError{Path: path, What: "is there already", Try: "restore into an empty data_dir"}
	}
	part := filepath.Join(dir, ".restore.db")
	defer os.Remove(part)
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("reading the backup: %w", err)
		}
		to := part
		if h.Name != "store.db" {
			sum, err := hex.DecodeString(filepath.Base(h.Name))
			if err != nil || len(sum) != 32 || h.Name != fmt.Sprintf("blobs/%02x/%x", sum[:1], sum) || h.Typeflag != tar.TypeReg {
				return fmt.Errorf("the backup holds %q, which is no part of a backup of ours", h.Name)
			}
			to = blobPath(dir, sum)
		}
		if err := unpack(to, tr); err != nil {
			return fmt.Errorf("unpacking %s: %w", h.Name, err)
		}
		if to != part {
			sum, err := hashFile(to)
			if err != nil {
				return err
			}
			if sum != filepath.Base(to) {
				return errors.Join(fmt.Errorf("the backup is damaged: %s does not hold what its name says", h.Name), os.Remove(to))
			}
		}
	}
	if _, err := os.Stat(part); err != nil {
		return errors.New("the backup holds no store")
	}
	if err := checkFile(part); err != nil {
		return fmt.Errorf("the backup is damaged: %w", err)
	}
	if err := writeSidecar(dir, sidecar{Restored: true}); err != nil {
		return err
	}
	if err := os.Rename(part, path); err != nil {
		return err
	}
	return syncDir(dir)
}

// hashFile is the SHA-256 of a file in hexadecimal.
func hashFile(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	return hex.EncodeToString(h.Sum(nil)), err
}

func unpack(path string, r io.Reader) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}
