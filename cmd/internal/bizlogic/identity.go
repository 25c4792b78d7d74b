package bizlogic

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"

	storev1 "github.com/sluice-dns/sluice/proto/store/v1"
)

// A store that was copied or restored may have forked from one whose revisions resolvers have seen. It
// then needs another lineage. Three signs tell:
//
//   - the file's device or inode is not the one it was last opened at: it was copied;
//   - its generation, which counts openings, is not the one in the file beside it: it was put back;
//   - it was closed cleanly at another revision than it has now: it was put back within one generation.
//
// Not seen: a copy put back in place (same inode) within the generation it was made in, after a crash.
// `sluice-bizd restore` therefore asks for a new lineage outright.

// A sidecar is what stands in store.db.generation.
type sidecar struct {
	Generation uint64 `json:"generation"`
	Pending    bool   `json:"pending"`            // the file is about to take this generation
	Closed     bool   `json:"closed"`             // the file was closed cleanly…
	Revision   uint64 `json:"revision,omitempty"` // …at this revision
	Restored   bool   `json:"restored,omitempty"` // made by a restore: the lineage is to be new
}

func sidecarPath(dir string) string { return filepath.Join(dir, "store.db.generation") }

// settleIdentity decides whether the lineage holds, and enters the next generation. On a full disk a store that has
// not forked is left as it is, and can be read: mayWrite tries again before anything is written.
func (f *storeFile) settleIdentity(path string) error {
	fi, err := os.Stat(path)
	if err != nil {
		return err
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		f.device, f.inode = uint64(st.Dev), st.Ino
	}
	why := ""
	if f.id.Generation > 0 { // not just made
		why = forked(f.id, readSidecar(f.dir), f.device, f.inode)
	}
	err = f.enterGeneration(why)
	if err != nil && why == "" && f.id.Generation > 0 && noRoom(err) {
		copy(f.lineage[:], f.id.Lineage)
		f.unsettled = err
		return nil
	}
	return err
}

// enterGeneration enters the next generation, and another lineage if the file has forked.
func (f *storeFile) enterGeneration(why string) error {
	id := proto.CloneOf(f.id)
	next := sidecar{Generation: id.Generation + 1, Pending: true}
	if err := writeSidecar(f.dir, next); err != nil {
		return err
	}
	err := f.Update(func(tx *bolt.Tx) error {
		id.Device, id.Inode, id.Generation = f.device, f.inode, next.Generation
		if why != "" {
			id.Lineage = random16()
			id.Revision += lineageStep
			for _, kind := range kinds {
				m, err := metaOf(tx, kind)
				if err != nil {
					return err
				}
				m.Lineage, m.Revision = id.Lineage, id.Revision
				if err := putProto(tx.Bucket([]byte(kind)).Bucket(bucketMeta), keyMeta, m); err != nil {
					return err
				}
			}
		}
		return putProto(tx.Bucket(bucketService).Bucket(bucketIdentity), keyIdentity, id)
	})
	if err != nil {
		return fmt.Errorf("entering generation %d: %w", next.Generation, err)
	}
	f.id = id
	if why != "" {
		f.note = "the store " + why + "; it continues under a new lineage"
	}
	copy(f.lineage[:], f.id.Lineage)
	next.Pending = false
	f.side = next
	return writeSidecar(f.dir, next)
}

// mayWrite enters the generation that a full disk has kept the store from at its opening. The writer alone calls it.
func (f *storeFile) mayWrite() error {
	if f.unsettled != nil {
		f.unsettled = f.enterGeneration("")
	}
	return f.unsettled
}

// noRoom reports whether an error is that of a full disk.
func noRoom(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.EFBIG)
}

// forked says why a file may have forked; "" if it has not.
func forked(id *storev1.Identity, side *sidecar, device, inode uint64) string {
	switch {
	case side == nil:
		return "has no readable generation file beside it"
	case side.Restored:
		return "was restored from a backup"
	case id.Device != device || id.Inode != inode:
		return "is a copy"
	case side.Pending && side.Generation == id.Generation+1:
		return "" // a crash between the two writes of an opening
	case side.Generation != id.Generation:
		return fmt.Sprintf("is of generation %d, the file beside it of %d: it was put back", id.Generation, side.Generation)
	case side.Closed && side.Revision != id.Revision:
		return fmt.Sprintf("was closed at revision %d and is now at %d: it was put back", side.Revision, id.Revision)
	}
	return ""
}

// noteClosing marks a clean close. A failure costs no more than a new lineage, so it is not reported.
func (f *storeFile) noteClosing() {
	if f.id == nil || f.side.Generation == 0 {
		return
	}
	f.side.Closed, f.side.Revision = true, f.id.Revision
	_ = writeSidecar(f.dir, f.side)
}

func readSidecar(dir string) *sidecar {
	b, err := os.ReadFile(sidecarPath(dir))
	if err != nil {
		return nil
	}
	s := new(sidecar)
	if json.Unmarshal(b, s) != nil {
		return nil
	}
	return s
}

func writeSidecar(dir string, s sidecar) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return writeFile(sidecarPath(dir), b)
}

// writeFile replaces a file so that after a crash the old or the new one is there, whole.
func writeFile(path string, b []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".tmp-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) // gone already unless something failed
	_, err = tmp.Write(b)
	if err == nil {
		err = tmp.Sync()
	}
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
