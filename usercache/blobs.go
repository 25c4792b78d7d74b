package usercache

import "strings"

// Blobs gives the SHA-256 of each blob that records name, of users and of the catalogue, more than once if several
// do: list texts, users' own lists, long rules. Records that are held off and those served in their place both
// count. It reads all records, a bucket at a time, without keeping writers waiting for longer than that.
func (c *Cache) Blobs(f func(sum [32]byte)) {
	for _, kind := range []Kind{CatalogueKind, Users} {
		c.Dataset(kind).blobs(f)
	}
}

// A NewBlob is a blob that a change named, and the revision of the change.
type NewBlob struct {
	Sum      [32]byte
	Revision uint64
}

// maxNewBlobs is how many blobs NewBlobs has to give at most.
const maxNewBlobs = 1024

// NewBlobs gives the blobs that records name which have come since it was last called. Blobs has all of them in time;
// this is for those that somebody waits for, and when there are more than maxNewBlobs, the rest is left out.
func (d *Dataset) NewBlobs() []NewBlob {
	d.mu.Lock()
	defer d.mu.Unlock()
	named := d.newBlobs
	d.newBlobs = nil
	return named
}

// noteBlobs notes the blobs of a record that has come.
func (d *Dataset) noteBlobs(c *Change) {
	named := d.namedBlobs()
	if named == nil || c.Removed || len(d.newBlobs) == maxNewBlobs {
		return
	}
	named(c.Key, c.Bytes, func(sum [32]byte) {
		if len(d.newBlobs) < maxNewBlobs {
			d.newBlobs = append(d.newBlobs, NewBlob{sum, c.Revision})
		}
	})
}

// namedBlobs walks a record of this kind of dataset; nil if none names blobs.
func (d *Dataset) namedBlobs() func(key, b []byte, f func([32]byte)) {
	switch d.kind {
	case Users:
		return userBlobs
	case CatalogueKind:
		return catalogueBlobs
	}
	return nil
}

func (d *Dataset) blobs(f func(sum [32]byte)) {
	named := d.namedBlobs()
	var ordinals []uint32
	for bucket := range Buckets {
		d.mu.RLock()
		ordinals = d.store.AppendBucket(ordinals[:0], uint16(bucket))
		for _, o := range ordinals {
			if r, ok := d.store.Replica(o); ok {
				named(r.Key, r.Bytes, f)
				r.Release()
			}
		}
		d.mu.RUnlock()
	}
	d.mu.RLock()
	defer d.mu.RUnlock()
	for key, e := range d.overlay {
		if e.reason == NeverUsable {
			continue
		}
		if o, ok := d.store.FindServing([]byte(key)); ok {
			if r, ok := d.store.Serving(o); ok {
				named(r.Key, r.Bytes, f)
				r.Release()
			}
		}
	}
}

// userBlobs walks a user.v1 User. What cannot be read names nothing.
func userBlobs(_, b []byte, f func([32]byte)) {
	layerBlobs(b, 2, 3, f)
	eachMessage(b, 4, func(device []byte) { layerBlobs(device, 9, 10, f) })
}

// catalogueBlobs walks a record of the catalogue: a List or a Policy, since others name no blobs.
func catalogueBlobs(key, b []byte, f func([32]byte)) {
	what, _, _ := strings.Cut(string(key), "/")
	switch what {
	case "list":
		eachMessage(b, 3, sum(f))
	case "policy":
		layerBlobs(b, 2, 3, f)
	}
}

// layerBlobs walks the settings and rules of a message, given their fields.
func layerBlobs(b []byte, settings, rules uint32, f func([32]byte)) {
	eachMessage(b, settings, func(b []byte) {
		eachMessage(b, 8, func(ownLists []byte) {
			eachMessage(ownLists, 2, func(list []byte) { eachMessage(list, 2, sum(f)) })
		})
	})
	eachMessage(b, rules, func(b []byte) { eachMessage(b, 2, sum(f)) })
}

func sum(f func([32]byte)) func([]byte) {
	return func(b []byte) {
		if len(b) == 32 {
			f([32]byte(b))
		}
	}
}

// eachMessage gives the values of a length-delimited field.
func eachMessage(b []byte, num uint32, f func([]byte)) {
	for {
		x, rest, ok := nextField(b)
		if !ok {
			return
		}
		if x.num == num && x.isBytes() {
			f(x.b)
		}
		b = rest
	}
}
