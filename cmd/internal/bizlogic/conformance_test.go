package bizlogic

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/syncclient"
	"github.com/sluice-dns/sluice/syncclient/conformance"
)

func TestSyncConformance(t *testing.T) {
	conformance.Run(t, conformance.Harness{New: func(t *testing.T) conformance.Server {
		o := Options{Dir: t.TempDir(), Guard: Guard{Share: 1}}
		r := start(t, o)
		// The clients of a rig go to one server for ever; syncing goes to whichever serves now.
		var now atomic.Pointer[bufconn.Listener]
		listen := func() (stop func()) {
			lis := bufconn.Listen(1 << 20)
			now.Store(lis)
			srv := grpc.NewServer(r.svc.ServerOptions()...)
			r.svc.Register(srv)
			go srv.Serve(lis)
			return srv.Stop
		}
		stop := listen()
		t.Cleanup(func() { stop() })

		key := func(n int) string { return fmt.Sprintf("user-%d", n) }
		return conformance.Server{
			Dial: func(ctx context.Context, _ string) (net.Conn, error) { return now.Load().DialContext(ctx) },
			Key:  key,
			Write: func(t *testing.T, n, version int) uint64 {
				_, err := r.users.CreateUser(t.Context(), &adminv1.CreateUserRequest{Id: key(n)})
				if err != nil && status.Code(err) != codes.AlreadyExists {
					t.Fatal(err)
				}
				revision, err := r.set(key(n), fmt.Sprintf("block_ttl=%ds", version%3000+1))
				if err != nil {
					t.Fatal(err)
				}
				return revision
			},
			Remove: func(t *testing.T, n int) uint64 {
				resp, err := r.users.DeleteUser(t.Context(), &adminv1.DeleteUserRequest{Id: key(n)})
				if err != nil {
					t.Fatal(err)
				}
				return resp.Revision
			},
			Blob: func(t *testing.T, b []byte) syncclient.Hash {
				if _, err := r.addList("blob", string(b), true); err != nil {
					t.Fatal(err)
				}
				return sha256.Sum256(b)
			},
			Restart: func(t *testing.T) {
				stop()
				r.stop()
				r = start(t, o)
				stop = listen()
			},
		}
	}})
}
