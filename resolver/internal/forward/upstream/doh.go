package upstream

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Limits of one DoH client.
const (
	maxRequests  = 256 // at once
	maxBody      = 65535
	dohIdleFor   = 30 * time.Second
	maxHeader    = 16 << 10
	dohMediaType = "application/dns-message"
)

// A doh client asks over HTTPS.
type doh struct {
	spec      Spec
	url       string
	transport *http.Transport
	backoff   backoff
	requests  atomic.Int64
	ctx       context.Context // ends when the client is closed
	cancel    context.CancelFunc
}

func newDoH(s Spec, o Options) *doh {
	d := &doh{spec: s}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	// The authority is the name of the certificate; where to connect is known without it.
	u := url.URL{Scheme: "https", Host: s.ServerName, Path: s.Path}
	if port := s.Addr.Port(); port != 443 {
		u.Host = net.JoinHostPort(s.ServerName, strconv.Itoa(int(port)))
	} else if a := s.Addr.Addr(); a.Is6() && s.ServerName == a.String() {
		u.Host = "[" + s.ServerName + "]"
	}
	d.url = u.String()
	d.transport = &http.Transport{
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			if d.backoff.rests(clock.Elapsed()) {
				return nil, fmt.Errorf("%w: %v could not be connected to a moment ago", query.ErrUnreachable, s)
			}
			c, err := o.Dial(ctx, network, s.Addr.String())
			if err != nil && ctx.Err() == nil {
				d.backoff.failed(clock.Elapsed())
			}
			return c, err
		},
		TLSClientConfig:        tlsConfig(s, o.TLS, "h2", "http/1.1"),
		ForceAttemptHTTP2:      true,
		TLSHandshakeTimeout:    handshakeTimeout,
		MaxConnsPerHost:        maxConns,
		MaxIdleConnsPerHost:    maxConns,
		IdleConnTimeout:        dohIdleFor,
		DisableCompression:     true,
		MaxResponseHeaderBytes: maxHeader,
	}
	return d
}

// Ask sends a as one POST request.
func (d *doh) Ask(ctx context.Context, tree *query.Tree, a query.Ask) (query.Reply, error) {
	left, err := timeLeft(ctx, tree, a.Timeout)
	if err != nil {
		return query.Reply{}, networkError(ctx, d.spec, err)
	}
	if d.ctx.Err() != nil {
		return query.Reply{}, fmt.Errorf("asking %v: %w", d.spec, net.ErrClosed)
	}
	if d.requests.Add(1) > maxRequests {
		d.requests.Add(-1)
		return query.Reply{}, fmt.Errorf("%w: %v has %d outstanding", query.ErrBusy, d.spec, maxRequests)
	}
	defer d.requests.Add(-1)
	if err := tree.Query(); err != nil {
		return query.Reply{}, err
	}
	inner, cancel := context.WithTimeout(ctx, left)
	defer cancel()
	defer context.AfterFunc(d.ctx, cancel)()
	r, err := d.post(inner, &a)
	if err != nil {
		return query.Reply{}, networkError(ctx, d.spec, err)
	}
	return r, nil
}

func (d *doh) post(ctx context.Context, a *query.Ask) (query.Reply, error) {
	var start atomic.Int64 // the transport tells of a connection from a goroutine of its own
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { start.Store(int64(clock.Elapsed())) }})
	// An ID of 0 makes equal questions equal requests (RFC 8484 section 4.1).
	body := appendQuery(make([]byte, 0, maxQuery), 0, a)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, d.url, bytes.NewReader(body))
	if err != nil {
		return query.Reply{}, err
	}
	req.Header.Set("Content-Type", dohMediaType)
	req.Header.Set("Accept", dohMediaType)
	req.Header["User-Agent"] = nil // nobody needs to know (RFC 8484 section 8.2)
	resp, err := d.transport.RoundTrip(req)
	if err != nil {
		return query.Reply{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return query.Reply{}, fmt.Errorf("%w: %v says HTTP status %d", query.ErrUnreachable, d.spec, resp.StatusCode)
	}
	if t, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err != nil || t != dohMediaType {
		return query.Reply{}, fmt.Errorf("%w: %v sent no DNS message", query.ErrMalformed, d.spec)
	}
	in, err := io.ReadAll(io.LimitReader(resp.Body, maxBody+1))
	switch {
	case err != nil:
		return query.Reply{}, err
	case len(in) > maxBody || len(in) < dnswire.HeaderLen:
		return query.Reply{}, fmt.Errorf("%w: %v sent %d bytes", query.ErrMalformed, d.spec, len(in))
	case dnswire.Uint16(in) != 0:
		return query.Reply{}, fmt.Errorf("%w: %v changed the ID", query.ErrMalformed, d.spec)
	}
	r, err := readReply(in, a)
	if err != nil {
		return query.Reply{}, err
	}
	d.backoff.worked()
	r.RTT = clock.Elapsed().Sub(clock.Instant(start.Load()))
	if age, err := strconv.ParseUint(resp.Header.Get("Age"), 10, 32); err == nil && age > 0 { // RFC 8484 section 5.1
		for _, section := range [][]query.RRset{r.Message.Answer, r.Message.Authority, r.Message.Additional} {
			for i := range section {
				section[i].TTL -= uint32(min(age, uint64(section[i].TTL)))
			}
		}
	}
	return r, nil
}

func (d *doh) Close() error {
	d.cancel()
	d.transport.CloseIdleConnections()
	return nil
}
