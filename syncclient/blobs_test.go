package syncclient

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	"github.com/sluice-dns/sluice/usercache"
)

func TestBlobs(t *testing.T) {
	list := bytes.Repeat([]byte("||ads.example^\n"), 20000) // several messages
	name := func(r *rig, h Hash, more string) string {
		return filepath.Join(r.dir, "sync", "blobs", hex.EncodeToString(h[:])+more)
	}
	tests := map[string]func(t *testing.T, r *rig){
		"wanted": func(t *testing.T, r *rig) {
			h, empty := r.service.AddBlob(list), r.service.AddBlob(nil)
			r.start()
			b := r.client.Blobs()
			news := make(chan struct{}, 1)
			b.Notify(news)
			b.Want([]Hash{h, empty})
			<-news
			synctest.Wait()
			for h, want := range map[Hash][]byte{h: list, empty: nil} {
				if got, err := b.Get(h); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%d bytes, %v", len(got), err)
				}
			}
			if s := r.client.Status().Blobs; s.Wanted != 2 || s.Missing != 0 || s.Held != 2 {
				t.Errorf("%+v", s)
			}
			calls := r.service.Calls("Blob")
			r.restart()
			r.client.Blobs().Want([]Hash{h})
			r.until("fresh", time.Second, func() bool { return r.client.Status().State == Fresh })
			if _, err := r.client.Blobs().Get(h); err != nil || r.service.Calls("Blob") != calls {
				t.Errorf("after a restart: %v, fetched again: %v", err, r.service.Calls("Blob") != calls)
			}
		},
		"asked for by reading": func(t *testing.T, r *rig) {
			h := r.service.AddBlob(list)
			r.start()
			if _, err := r.client.Blobs().Get(h); !errors.Is(err, ErrNoBlob) {
				t.Errorf("%v", err)
			}
			r.until("here", time.Second, func() bool { return r.client.Blobs().Has(h) })
		},
		"by ticket": func(t *testing.T, r *rig) {
			r.service.NeedTicket = true
			h := r.service.AddBlob(list)
			r.start()
			r.client.Blobs().Want([]Hash{h})
			r.until("here", time.Second, func() bool { return r.client.Blobs().Has(h) })
			synctest.Wait()
			if acquired, released := r.service.Acquired(); len(acquired) != released || released == 0 {
				t.Errorf("%d tickets, %d given back", len(acquired), released)
			}
		},
		"corrupt on the way": func(t *testing.T, r *rig) {
			h := r.service.AddBlob(list)
			var lies atomic.Int64
			r.service.SetTamper(func(_ context.Context, _ string, m proto.Message) error {
				if b, ok := m.(*syncv1.BlobResponse); ok && b.Offset == 0 && lies.Add(1) <= 3 {
					b.Data[100] ^= 1
				}
				return nil
			})
			r.start()
			r.client.Blobs().Want([]Hash{h})
			synctest.Wait()
			if s := r.client.Status().Blobs; s.Missing != 1 || s.LastError == "" || lies.Load() != 1 {
				t.Errorf("%+v after %d attempts", s, lies.Load())
			}
			r.until("here", time.Minute, func() bool { return r.client.Blobs().Has(h) })
			if got, err := r.client.Blobs().Get(h); err != nil || !bytes.Equal(got, list) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
		},
		"corrupt on disk": func(t *testing.T, r *rig) {
			h := r.service.AddBlob(list)
			r.start()
			b := r.client.Blobs()
			b.Want([]Hash{h})
			r.until("here", time.Second, func() bool { return b.Has(h) })
			if err := os.WriteFile(name(r, h, ""), list[:len(list)/2], 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := b.Get(h); !errors.Is(err, ErrNoBlob) {
				t.Errorf("half a list is returned: %v", err)
			}
			r.until("here again", time.Second, func() bool { got, err := b.Get(h); return err == nil && bytes.Equal(got, list) })
		},
		"interrupted": func(t *testing.T, r *rig) {
			h := r.service.AddBlob(list)
			r.service.SetTamper(func(ctx context.Context, _ string, m proto.Message) error {
				if b, ok := m.(*syncv1.BlobResponse); ok && b.Offset >= 128<<10 {
					<-ctx.Done()
					return ctx.Err()
				}
				return nil
			})
			r.start()
			r.client.Blobs().Want([]Hash{h})
			synctest.Wait()
			r.stop()
			var sent atomic.Int64
			r.service.SetTamper(func(ctx context.Context, _ string, m proto.Message) error {
				if b, ok := m.(*syncv1.BlobResponse); ok {
					sent.Add(int64(len(b.Data)))
				}
				return nil
			})
			r.start()
			r.client.Blobs().Want([]Hash{h})
			r.until("here", time.Second, func() bool { return r.client.Blobs().Has(h) })
			if want := int64(len(list) - 128<<10); sent.Load() != want {
				t.Errorf("%d bytes were sent, %d were missing", sent.Load(), want)
			}
		},
		"beginning corrupt on disk": func(t *testing.T, r *rig) {
			h := r.service.AddBlob(list)
			r.start()
			if err := os.WriteFile(name(r, h, ".part"), make([]byte, 5000), 0o600); err != nil {
				t.Fatal(err)
			}
			r.client.Blobs().Want([]Hash{h})
			r.until("here", time.Second, func() bool { return r.client.Blobs().Has(h) })
		},
		"there is none, and another is not held up": func(t *testing.T, r *rig) {
			h := r.service.AddBlob(list)
			r.start()
			r.client.Blobs().Want([]Hash{{}, h})
			r.until("here", time.Second, func() bool { return r.client.Blobs().Has(h) })
			time.Sleep(time.Minute)
			if n := r.service.Calls("Blob"); n > 15 {
				t.Errorf("%d calls in a minute", n)
			}
		},
		"nobody's are removed": func(t *testing.T, r *rig) {
			h, kept := r.service.AddBlob(list), r.service.AddBlob(list[:100])
			r.start()
			b := r.client.Blobs()
			b.Want([]Hash{h, kept})
			r.until("here", time.Second, func() bool { return b.Has(h) && b.Has(kept) })
			b.Want([]Hash{kept})
			time.Sleep(23 * time.Hour)
			if !b.Has(h) {
				t.Error("removed at once")
			}
			time.Sleep(3 * time.Hour)
			if _, err := os.Stat(name(r, h, "")); !os.IsNotExist(err) || b.Has(h) {
				t.Errorf("never removed: %v", err)
			}
			if _, err := b.Get(kept); err != nil {
				t.Error(err)
			}
		},
	}
	for what, test := range tests {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			bubble(t, func(r *rig) {
				r.opts.Kinds = []usercache.Kind{usercache.Config}
				test(r.t, r)
			})
		})
	}
}
