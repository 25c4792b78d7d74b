package syncclient

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	syncv1 "github.com/sluice-dns/sluice/proto/sync/v1"
	"github.com/sluice-dns/sluice/resolver/clock"
)

const (
	// maxMessage bounds a message of the service. The protocol's biggest are a megabyte of records and
	// one record more.
	maxMessage = 4 << 20

	// answerTime is how long one answer, or the next message of a stream that has something to say, may
	// take. It must be longer than a slow disk at the service and shorter than a person's patience.
	answerTime = 20 * time.Second

	// quiet is how long a connection with a Watch on it never is.
	quiet = 10 * time.Second

	unixPrefix      = "unix:"
	inprocessPrefix = "inprocess:"
)

// A service is one address of the business-logic service.
type service struct {
	address string
	options []grpc.DialOption // constant
	heard   atomic.Int64      // the clock.Instant of the last message from there

	mu   sync.Mutex // guards what follows; held for memory work only
	link *link      // nil: none yet, or the last one was dropped
}

// A link is a connection to a service, shared by all followers.
type link struct {
	service  *service
	conn     *grpc.ClientConn
	sync     syncv1.SyncServiceClient
	segments syncv1.SegmentServiceClient
}

func newService(address string, o *Options) (*service, error) {
	s := &service{address: address}
	dial := o.Dial
	plain := o.TLS == nil
	switch {
	case strings.HasPrefix(address, inprocessPrefix):
		if dial == nil {
			return nil, fmt.Errorf("service %s: addresses in this process need Options.Dial", address)
		}
		plain = true
	case strings.HasPrefix(address, unixPrefix):
		plain = true
	default:
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return nil, fmt.Errorf("service %q: an address is HOST:PORT or unix:PATH: %w", address, err)
		}
		ip, err := netip.ParseAddr(host)
		if plain && (err != nil || !ip.Unmap().IsLoopback()) {
			return nil, fmt.Errorf("service %s: not a loopback address, so it needs TLS with a client certificate", address)
		}
	}
	if dial == nil {
		dial = dialNet
	}
	creds := insecure.NewCredentials()
	if !plain {
		t := o.TLS.Clone()
		t.MinVersion = tls.VersionTLS13
		creds = credentials.NewTLS(t)
	}
	s.options = []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return dial(ctx, address) }),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		// When to try again is decided by our own backoff, which outlives the process. A connection that
		// fails is dropped before this matters.
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: time.Minute, MaxDelay: time.Minute}, MinConnectTimeout: 10 * time.Second}),
		grpc.WithUserAgent("sluice/" + o.Node.Version),
		grpc.WithStatsHandler(received{o.Metrics, s}),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
	}
	return s, nil
}

// dialNet connects as an address says.
func dialNet(ctx context.Context, address string) (net.Conn, error) {
	var d net.Dialer
	if p, ok := strings.CutPrefix(address, unixPrefix); ok {
		return d.DialContext(ctx, "unix", p)
	}
	return d.DialContext(ctx, "tcp", address)
}

// connect returns the service's connection. It is made when first used.
func (s *service) connect() (*link, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.link != nil {
		return s.link, nil
	}
	target := s.address
	if strings.HasPrefix(target, unixPrefix) || strings.HasPrefix(target, inprocessPrefix) {
		target = "localhost" // the dialer knows better; this becomes the :authority
	}
	conn, err := grpc.NewClient("passthrough:///"+target, s.options...)
	if err != nil {
		return nil, fmt.Errorf("service %s: %w", s.address, err)
	}
	s.link = &link{service: s, conn: conn, sync: syncv1.NewSyncServiceClient(conn), segments: syncv1.NewSegmentServiceClient(conn)}
	return s.link, nil
}

// drop closes a connection that has failed; the next connect makes another.
func (s *service) drop(l *link) {
	s.mu.Lock()
	if s.link == l {
		s.link = nil
	}
	s.mu.Unlock()
	_ = l.conn.Close() // it is given up either way
}

// dropIfDead drops a connection unless it still carries something, and reports whether it did not.
func (s *service) dropIfDead(l *link) bool {
	if l.conn.GetState() == connectivity.Ready && clock.Elapsed().Sub(clock.Instant(s.heard.Load())) < quiet {
		return false
	}
	s.drop(l)
	return true
}

func (s *service) close() {
	s.mu.Lock()
	l := s.link
	s.mu.Unlock()
	if l != nil {
		s.drop(l)
	}
}

// received counts the bytes that come in, by RPC.
type received struct {
	metrics Metrics
	service *service
}

type rpcName struct{}

func (received) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	return context.WithValue(ctx, rpcName{}, strings.ToLower(path.Base(info.FullMethodName)))
}

func (r received) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if in, ok := s.(*stats.InPayload); ok {
		name, _ := ctx.Value(rpcName{}).(string)
		r.metrics.Received(name, in.WireLength)
		r.service.heard.Store(int64(clock.Elapsed()))
	}
}

func (received) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (received) HandleConn(context.Context, stats.ConnStats)                       {}

// A wrongError says that a service broke the protocol.
type wrongError struct{ what string }

func (e *wrongError) Error() string { return "the service is wrong: " + e.what }

func wrong(format string, args ...any) error { return &wrongError{fmt.Sprintf(format, args...)} }

// retryAfter returns when a refused caller may come again, and whether err is such a refusal.
func retryAfter(err error) (time.Duration, bool) {
	s, ok := status.FromError(err)
	if !ok {
		return 0, false
	}
	for _, d := range s.Details() {
		if r, ok := d.(*errdetails.RetryInfo); ok {
			return r.GetRetryDelay().AsDuration(), true
		}
	}
	return 0, s.Code() == codes.ResourceExhausted
}

// refused reports whether err says that the caller should come again later, or with a ticket. A message
// beyond maxMessage has the same code, but comes from this side.
func refused(err error) bool {
	_, ok := retryAfter(err)
	return ok && !tooBig(err)
}

func tooBig(err error) bool {
	s, ok := status.FromError(err)
	return ok && s.Code() == codes.ResourceExhausted && strings.Contains(s.Message(), "larger than max")
}

// unreachable reports whether err is about the address rather than what was asked.
func unreachable(err error) bool {
	var w *wrongError
	if errors.As(err, &w) {
		return false
	}
	if errors.Is(err, errSilent) || errors.Is(err, errEnded) {
		return true
	}
	if s, ok := status.FromError(err); ok {
		switch s.Code() {
		case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
			return true
		}
	}
	return false
}

var (
	errSilent = errors.New("nothing was heard for too long")
	errEnded  = errors.New("the service ended the stream")
)

// A watchdog ends a context with errSilent when it was not fed in time.
type watchdog struct{ t *time.Timer }

func newWatchdog(cancel context.CancelCauseFunc) *watchdog {
	w := &watchdog{t: time.AfterFunc(time.Hour, func() { cancel(errSilent) })}
	w.t.Stop()
	return w
}

// receive is one wait for a message.
func receive[M any](ctx context.Context, w *watchdog, wait time.Duration, recv func() (M, error)) (M, error) {
	w.t.Reset(wait)
	m, err := recv()
	w.t.Stop()
	if err != nil {
		// Why we gave up says more than that the call was cancelled.
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
	}
	return m, err
}
