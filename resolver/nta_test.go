package resolver_test

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// adminOf serves the operator's side of a resolver until the test ends and returns a client of it.
func adminOf(l *lab) (c adminv1.ResolverServiceClient, stop func()) {
	l.t.Helper()
	registry, _, err := resolver.NewMetrics()
	if err != nil {
		l.t.Fatal(err)
	}
	control, err := l.r.Operate(resolver.OperateOptions{
		Registry: registry, Readiness: func() resolver.Readiness { return resolver.Readiness{} }, Draining: func(bool) {}, Level: new(slog.LevelVar),
	})
	if err != nil {
		l.t.Fatal(err)
	}
	listener := bufconn.Listen(1 << 16)
	ctx, cancel := context.WithCancel(l.t.Context())
	done := make(chan error, 1)
	go func() { done <- control.ServeAdmin(ctx, listener) }()
	conn, err := grpc.NewClient("passthrough:///admin", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		l.t.Fatal(err)
	}
	return adminv1.NewResolverServiceClient(conn), func() {
		conn.Close()
		cancel()
		<-done
	}
}

// A negative trust anchor that is added while serving makes a broken zone insecure at once, whatever is remembered of
// it; removed, or when its time is over, the zone is bogus again, whatever is cached.
func TestNegativeTrustAnchorsLive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim, err := siminternet.New(time.Now(), cacheZones()...)
		if err != nil {
			t.Fatal(err)
		}
		l := newLabIn(t, sim, func(o *resolver.Options) { o.DNSSEC.Insecure = names("configured.test.") })
		defer l.stop()
		admin, stop := adminOf(l)
		defer stop()
		ctx := t.Context()
		is := func(name string, rcode int, ad bool) {
			t.Helper()
			for range 3 {
				if m := l.must(name, dns.TypeA); m.Rcode != rcode || m.AuthenticatedData != ad {
					t.Errorf("%s: %s, AD %v; want %s, %v", name, dns.RcodeToString[m.Rcode], m.AuthenticatedData, dns.RcodeToString[rcode], ad)
				}
			}
		}
		add := func(name string, d time.Duration, why string) (*adminv1.NegativeTrustAnchor, error) {
			r, err := admin.AddNegativeTrustAnchor(ctx, &adminv1.AddNegativeTrustAnchorRequest{Name: name, Seconds: uint64(d / time.Second), Why: why})
			return r.GetAnchor(), err
		}
		const broken, whole = "bad.signed.example.", "www.signed.example."
		is(broken, dns.RcodeServerFailure, false)
		is(whole, dns.RcodeSuccess, true)

		a, err := add("Signed.example", time.Hour, "its keys are being mended")
		if err != nil || a.Name != "signed.example." || a.Until != time.Now().Add(time.Hour).Unix() || a.Why == "" || a.Configured {
			t.Fatalf("%v, %v", a, err)
		}
		is(broken, dns.RcodeSuccess, false)
		is(whole, dns.RcodeSuccess, false)
		list, err := admin.ListNegativeTrustAnchors(ctx, &adminv1.ListNegativeTrustAnchorsRequest{})
		if err != nil || len(list.Anchors) != 2 || !list.Anchors[0].Configured || list.Anchors[0].Until != 0 || list.Anchors[1].Name != "signed.example." {
			t.Errorf("%v, %v", list, err)
		}

		remove := func(name string) error {
			_, err := admin.RemoveNegativeTrustAnchor(ctx, &adminv1.RemoveNegativeTrustAnchorRequest{Name: name})
			return err
		}
		if err := remove("signed.example."); err != nil {
			t.Fatal(err)
		}
		is(broken, dns.RcodeServerFailure, false)
		is(whole, dns.RcodeSuccess, true)
		if err := remove("signed.example."); grpcstatus.Code(err) != codes.NotFound || !strings.Contains(err.Error(), "nta list") {
			t.Errorf("removed twice: %v", err)
		}
		if err := remove("www.configured.test."); grpcstatus.Code(err) != codes.NotFound || !strings.Contains(err.Error(), "it is the one at configured.test.") {
			t.Errorf("one below another: %v", err)
		}

		if _, err := add("signed.example.", time.Minute, ""); err != nil {
			t.Fatal(err)
		}
		time.Sleep(58 * time.Second)
		is(broken, dns.RcodeSuccess, false)
		time.Sleep(4 * time.Second)
		is(broken, dns.RcodeServerFailure, false)
		is(whole, dns.RcodeSuccess, true)

		if a, err := add("signed.example.", 0, ""); err != nil || a.Until != time.Now().Add(24*time.Hour).Unix() {
			t.Errorf("for as long as is usual: %v, %v", a, err)
		}
		for name, d := range map[string]time.Duration{".": time.Hour, "": time.Hour, "a..b": time.Hour, "long.example.": 8 * 24 * time.Hour, "configured.test.": time.Hour} {
			if _, err := add(name, d, ""); grpcstatus.Code(err) != codes.InvalidArgument {
				t.Errorf("%q for %v: %v", name, d, err)
			}
		}
	})
}
