package conformance

import (
	"fmt"
	"testing"

	"github.com/sluice-dns/sluice/syncclient"
	"github.com/sluice-dns/sluice/syncclient/internal/fakesync"
	"github.com/sluice-dns/sluice/usercache"
)

// The service that syncclient's own tests lie with is itself an honest one.
func TestFake(t *testing.T) {
	Run(t, Harness{New: func(t *testing.T) Server {
		s := fakesync.New()
		s.Start()
		t.Cleanup(s.Stop)
		key := func(n int) string { return fmt.Sprintf("user-%d", n) }
		return Server{
			Dial: s.Dial,
			Key:  key,
			Write: func(_ *testing.T, n, version int) uint64 {
				return s.Commit(usercache.Users, usercache.Change{Key: []byte(key(n)), Bytes: fmt.Appendf([]byte{0x3a, 4}, "%04d", version%10000)})
			},
			Remove: func(_ *testing.T, n int) uint64 {
				return s.Commit(usercache.Users, usercache.Change{Key: []byte(key(n)), Removed: true})
			},
			Blob:    func(_ *testing.T, b []byte) syncclient.Hash { return s.AddBlob(b) },
			Restart: func(*testing.T) { s.Stop(); s.Start() },
		}
	}})
}
