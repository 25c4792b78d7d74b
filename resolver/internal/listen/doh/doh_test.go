package doh

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/listen"
	"github.com/sluice-dns/sluice/resolver/internal/listen/listentest"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

type rig struct {
	*Server
	config *tls.Config
	stop   func() error
}

func start(t *testing.T, encrypted bool, o Options) rig {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o.Listener = l
	if o.Handler == nil {
		o.Handler = new(listentest.Handler)
	}
	r := rig{}
	if encrypted {
		o.GetCertificate, r.config = listentest.Certificate()
	}
	r.Server = New(o)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Serve(ctx) }()
	r.stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() {
		if err := r.stop(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// client returns a client of one HTTP version that connects to r whatever the host.
func (r rig) client(t *testing.T, version int) *http.Client {
	p := new(http.Protocols)
	p.SetHTTP1(version == 1)
	p.SetHTTP2(version == 2 && r.config != nil)
	p.SetUnencryptedHTTP2(version == 2 && r.config == nil)
	tr := &http.Transport{
		Protocols:       p,
		TLSClientConfig: r.config.Clone(), // which the transport changes
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, network, r.Addr().String())
		},
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second}
}

func (r rig) url(path string) string {
	if r.config == nil {
		return "http://dns.example" + path
	}
	return "https://dns.example" + path
}

func param(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

func TestQueries(t *testing.T) {
	for _, encrypted := range []bool{true, false} {
		for _, version := range []int{1, 2} {
			t.Run(fmt.Sprintf("TLS=%v HTTP/%d", encrypted, version), func(t *testing.T) {
				h := new(listentest.Handler)
				r := start(t, encrypted, Options{Handler: h, ListenerID: 3})
				c := r.client(t, version)
				for i, name := range []string{"hit.example.", "miss.example.", "big.example."} {
					q := listentest.Query(uint16(i), name)
					for _, method := range []string{"GET", "POST"} {
						var resp *http.Response
						var err error
						if method == "GET" {
							resp, err = c.Get(r.url("/dns-query?dns=" + param(q)))
						} else {
							resp, err = c.Post(r.url("/dns-query"), mediaType, bytes.NewReader(q))
						}
						if err != nil {
							t.Fatal(err)
						}
						b, err := io.ReadAll(resp.Body)
						resp.Body.Close()
						if err != nil || resp.StatusCode != 200 || resp.ProtoMajor != version || resp.Header.Get("Content-Type") != mediaType ||
							resp.Header.Get("Cache-Control") != "private, max-age=300" || int(resp.ContentLength) != len(b) ||
							len(b) < 12 || int(dnswire.Uint16(b)) != i || dnswire.ReadHeader(b).AN != 1 {
							t.Errorf("%s %s: %v %v %x %v", method, name, resp.Status, resp.Header, b, err)
						}
					}
				}
				q := h.Last()
				if q.Transport != query.DoH || q.Listener != 3 || !q.Source.Addr().IsLoopback() || q.Local != listen.AddrPort(r.Addr()) {
					t.Errorf("query %+v", q)
				}
				if want := map[bool]string{true: "dns.example"}[encrypted]; q.ServerName != want {
					t.Errorf("server name %q, want %q", q.ServerName, want)
				}
			})
		}
	}
}

func TestRequests(t *testing.T) {
	hit := listentest.Query(1, "hit.example.")
	response := listentest.Query(1, "hit.example.")
	response[2] |= 0x80
	get := "/dns-query?dns=" + param(hit)
	s := New(Options{Listener: closedListener{}, Handler: new(listentest.Handler)})
	for _, c := range []struct {
		method, target, contentType string
		body                        []byte
		want                        int
	}{
		{"GET", get, "", nil, 200},
		{"GET", "/dns-query/?dns=" + param(hit), "", nil, 200},
		{"GET", "/dns-query/kid-1?dns=" + param(hit), "", nil, 200},
		{"GET", "/dns-query/kid-1/?dns=" + param(hit), "", nil, 200},
		{"GET", get + "%3D%3D", "", nil, 200}, // padding, and a client that escapes it
		{"GET", get + "&ct=application/dns-json", "", nil, 200},
		{"GET", "/dns-query?x=1&dns=" + param(hit), "", nil, 200},
		{"POST", "/dns-query", mediaType, hit, 200},
		{"POST", "/dns-query/kid-1", "Application/DNS-Message; x=y", hit, 200},
		{"GET", "/dns-query?dns=" + param([]byte{0, 1, 1, 0, 0, 9, 0, 0, 0, 0, 0, 0}), "", nil, 200}, // FORMERR is a DNS response
		{"GET", "/dns-query", "", nil, 400},
		{"GET", "/dns-query?dns=", "", nil, 400},
		{"GET", "/dns-query?dns=*", "", nil, 400},
		{"GET", "/dns-query?dns=A", "", nil, 400},
		{"GET", "/dns-query?dns=%zz", "", nil, 400},
		{"GET", "/dns-query?dns=AAAA", "", nil, 400},
		{"GET", "/dns-query?dns=" + param(response), "", nil, 400},
		{"POST", "/dns-query", mediaType, nil, 400},
		{"GET", "/", "", nil, 404},
		{"GET", "/dns-queryx?dns=" + param(hit), "", nil, 404},
		{"GET", "/dns-query//?dns=" + param(hit), "", nil, 404},
		{"GET", "/dns-query/a/b?dns=" + param(hit), "", nil, 404},
		{"GET", "/dns-query/a%2Fb?dns=" + param(hit), "", nil, 404},
		{"GET", "/x/dns-query?dns=" + param(hit), "", nil, 404},
		{"PUT", "/dns-query", mediaType, hit, 405},
		{"HEAD", get, "", nil, 405},
		{"OPTIONS", "/dns-query", "", nil, 405},
		{"POST", "/dns-query", mediaType, make([]byte, maxBody+1), 413},
		{"POST", "/dns-query", mediaType, make([]byte, maxBody), 413}, // one byte more than a message can have
		{"POST", "/dns-query", "text/plain", hit, 415},
		{"POST", "/dns-query", "", hit, 415},
		{"POST", "/dns-query?dns=" + param(hit), "", nil, 415},
	} {
		for _, chunked := range []bool{false, true} {
			r := httptest.NewRequest(c.method, c.target, bytes.NewReader(c.body))
			if chunked {
				r.ContentLength = -1
			}
			r.Header.Set("Content-Type", c.contentType)
			w := httptest.NewRecorder()
			s.ServeHTTP(w, r)
			if w.Code != c.want {
				t.Errorf("%s %.60s (%s, %d bytes): %d %s, want %d", c.method, c.target, c.contentType, len(c.body), w.Code, w.Body, c.want)
			}
			if allow := w.Header().Get("Allow"); (c.want == 405) != (allow != "") {
				t.Errorf("%s: Allow %q", c.method, allow)
			}
		}
	}
}

type closedListener struct{ net.Listener }

func (closedListener) Addr() net.Addr { return nil }

func TestWhoAsks(t *testing.T) {
	h := new(listentest.Handler)
	s := New(Options{Listener: closedListener{}, Handler: h, Path: "/q/"})
	miss := param(listentest.Query(1, "miss.example."))
	for _, c := range []struct {
		target, auth        string
		path, name, secrect string
	}{
		{"/q?dns=" + miss, "", "", "", ""},
		{"/q/Kid-1?dns=" + miss, "", "Kid-1", "", ""},
		{"/q/kid%201/?dns=" + miss, "", "kid 1", "", ""},
		{"/q?dns=" + miss, "Basic " + base64.StdEncoding.EncodeToString([]byte("kid-1:pass:word")), "", "kid-1", "pass:word"},
		{"/q/a?dns=" + miss, "bearer  t0ken ", "a", "", "t0ken"},
		{"/q?dns=" + miss, "Basic " + base64.StdEncoding.EncodeToString([]byte("kid-1:")), "", "kid-1", ""},
	} {
		r := httptest.NewRequest("GET", c.target, nil)
		r.Header.Set("Authorization", c.auth)
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		q := h.Last()
		if w.Code != 200 || q.PathDevice != c.path || q.AuthDevice != c.name || q.AuthSecret != c.secrect {
			t.Errorf("%s, %q: %d, path %q, name %q, secret %q", c.target, c.auth, w.Code, q.PathDevice, q.AuthDevice, q.AuthSecret)
		}
	}
	before := h.Resolved.Load()
	for _, auth := range []string{"Basic !", "Basic", "Basic Og==", "Basic a2lk", "Bearer", "Bearer ", "Digest username=\"kid\"", "kid"} {
		r := httptest.NewRequest("GET", "/q/kid-1?dns="+miss, nil)
		r.Header.Set("Authorization", auth)
		w := httptest.NewRecorder()
		if s.ServeHTTP(w, r); w.Code != 400 {
			t.Errorf("Authorization %q: %d", auth, w.Code)
		}
	}
	if n := h.Resolved.Load() - before; n != 0 {
		t.Errorf("%d queries with a malformed authorization were taken", n)
	}
}

func TestCacheControl(t *testing.T) {
	msg := func(rcode uint16, build func(b *dnswire.Builder, h *dnswire.Header)) []byte {
		var b dnswire.Builder
		b.Reset(make([]byte, 0, 512))
		b.Question([]byte("\x01a\x00"), 1, 1)
		h := dnswire.Header{Flags: dnswire.FlagQR | rcode, QD: 1}
		build(&b, &h)
		h.Put(b.Bytes())
		return b.Bytes()
	}
	a := func(ttl ...uint32) func(b *dnswire.Builder, h *dnswire.Header) {
		return func(b *dnswire.Builder, h *dnswire.Header) {
			for _, t := range ttl {
				b.RR([]byte("\x01a\x00"), 1, 1, t, []byte{192, 0, 2, 1})
				h.AN++
			}
		}
	}
	soa := func(ttl uint32, minimum byte) func(b *dnswire.Builder, h *dnswire.Header) {
		return func(b *dnswire.Builder, h *dnswire.Header) {
			rdata := append([]byte{0, 0}, make([]byte, 20)...)
			rdata[21] = minimum
			b.RR([]byte{0}, dnswire.TypeSOA, 1, ttl, rdata)
			h.NS++
		}
	}
	for _, c := range []struct {
		name string
		msg  []byte
		want string
	}{
		{"smallest", msg(0, a(300, 20, 400)), "private, max-age=20"},
		{"zero", msg(0, a(0)), "private, max-age=0"},
		{"top bit", msg(0, a(1<<31)), "private, max-age=0"},
		{"NXDOMAIN by TTL", msg(3, soa(30, 60)), "private, max-age=30"},
		{"NODATA by minimum", msg(0, soa(90, 60)), "private, max-age=60"},
		{"no SOA", msg(0, a()), "no-store"},
		{"SERVFAIL", msg(2, a(300)), "no-store"},
		{"cut off", msg(0, a(300))[:30], "no-store"},
		{"header alone", []byte{0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0}, "no-store"},
		{"nothing", nil, "no-store"},
	} {
		if got := cacheControl(c.msg); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestSilenceEndsTheStream(t *testing.T) {
	for _, version := range []int{1, 2} {
		r := start(t, true, Options{})
		c := r.client(t, version)
		for _, name := range []string{"drop.example.", "lost.example."} {
			// By POST, which the client does not send again by itself.
			resp, err := c.Post(r.url("/dns-query"), mediaType, bytes.NewReader(listentest.Query(1, name)))
			if err == nil {
				resp.Body.Close()
				t.Errorf("HTTP/%d, %s: %s", version, name, resp.Status)
			}
		}
	}
}

func TestHeaderLimit(t *testing.T) {
	r := start(t, false, Options{})
	resp, err := r.client(t, 1).Get(r.url("/dns-query/" + strings.Repeat("x", 2*maxHeader)))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("%s, want 431", resp.Status)
	}
}

func TestConnectionAndHandshakeLimits(t *testing.T) {
	limit := new(atomic.Int64)
	limit.Store(1)
	gate := listen.NewConnections(10, 1)
	r := start(t, true, Options{Gate: gate, Handshakes: limit})
	c := r.client(t, 2)
	get := func(c *http.Client) error {
		resp, err := c.Get(r.url("/dns-query?dns=" + param(listentest.Query(1, "hit.example."))))
		if err == nil {
			resp.Body.Close()
		}
		return err
	}
	if err := get(c); err != nil {
		t.Fatal(err)
	}
	if get(r.client(t, 1)) == nil {
		t.Error("a second connection of the source was taken")
	}
	if n := r.Counters().Refused[query.RefuseConnections].Load(); n == 0 {
		t.Error("not counted")
	}
	gate.PerSource.Store(10)
	limit.Store(0)
	if get(r.client(t, 1)) == nil {
		t.Error("a handshake beyond the limit was made")
	}
	if n := r.Counters().HandshakesFull.Load(); n == 0 {
		t.Error("not counted")
	}
	if err := get(c); err != nil {
		t.Errorf("the connection that was there: %v", err)
	}
	if err := r.stop(); err != nil {
		t.Error(err)
	}
	if r.Counters().Active.Load() != 0 || gate.Share() != 0 {
		t.Errorf("%d active, share %v after the end", r.Counters().Active.Load(), gate.Share())
	}
}

// Requests under way are bounded over all connections, whatever they wait for: their body, a desk, resolution.
func TestRequestsUnderWay(t *testing.T) {
	for version := 1; version <= 2; version++ {
		t.Run(fmt.Sprint("HTTP/", version), func(t *testing.T) {
			resolving := make(chan func(), 8)
			h := &listentest.Handler{OnResolve: func(_ *query.Query, answer func()) { resolving <- answer }}
			limit := new(atomic.Int64)
			limit.Store(3)
			r := start(t, true, Options{Handler: h, Requests: limit})
			get := func() chan error {
				c := r.client(t, version) // a connection of its own
				done := make(chan error, 1)
				go func() {
					resp, err := c.Get(r.url("/dns-query?dns=" + param(listentest.Query(1, "miss.example."))))
					if err == nil {
						resp.Body.Close()
						if resp.StatusCode != 200 {
							err = errors.New(resp.Status)
						}
					}
					done <- err
				}()
				return done
			}
			first, second := get(), get()
			answers := []func(){<-resolving, <-resolving}
			// The third is one whose body never comes to its end.
			body, more := io.Pipe()
			go func() {
				resp, err := r.client(t, version).Post(r.url("/dns-query"), mediaType, body)
				if err == nil {
					resp.Body.Close()
				}
			}()
			more.Write([]byte{0})
			for r.underWay.Load() < 3 { // the client has taken the byte; the server need not have
				runtime.Gosched()
			}
			if err := <-get(); err == nil {
				t.Error("a fourth request was answered")
			}
			if n := r.Counters().Refused[query.RefuseBusy].Load(); n == 0 {
				t.Error("it was not counted")
			}
			more.Close()
			for r.underWay.Load() > 2 {
				runtime.Gosched()
			}
			third := get()
			for _, answer := range append(answers, <-resolving) {
				answer()
			}
			for _, done := range []chan error{first, second, third} {
				if err := <-done; err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// A connection has so many requests under way and no more, by a limit that may change; and a client that gives
// up more than 200 of them in a minute is rid of.
func TestOneConnection(t *testing.T) {
	resolving := make(chan func(), 300)
	h := &listentest.Handler{OnResolve: func(_ *query.Query, answer func()) { resolving <- answer }}
	depth := new(atomic.Int64)
	depth.Store(3)
	r := start(t, true, Options{Handler: h, Depth: depth})
	c := r.client(t, 2)
	get := func(ctx context.Context) chan error {
		done := make(chan error, 1)
		go func() {
			req, err := http.NewRequestWithContext(ctx, "GET", r.url("/dns-query?dns="+param(listentest.Query(1, "miss.example."))), nil)
			if err != nil {
				t.Error(err)
			}
			resp, err := c.Do(req)
			if err == nil {
				resp.Body.Close()
			}
			done <- err
		}()
		return done
	}
	first := get(t.Context())
	answers := []func(){<-resolving}
	depth.Store(2)
	second := get(t.Context())
	answers = append(answers, <-resolving)
	if err := <-get(t.Context()); err == nil {
		t.Error("a request beyond the depth was answered")
	}
	for _, answer := range answers {
		answer()
	}
	if err := errors.Join(<-first, <-second); err != nil {
		t.Error(err)
	}

	ended := func() bool { return r.Counters().Malformed.Load() > 0 }
	for i := range maxResets + 1 {
		if ended() {
			t.Fatalf("the connection was closed after %d resets", i)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := get(ctx)
		<-resolving
		cancel()
		<-done
		for r.underWay.Load() > 0 { // the server learns of the reset a moment later
			runtime.Gosched()
		}
	}
	for !ended() {
		runtime.Gosched()
	}
}

// A client that has gone while its request waited costs nothing more.
func TestClientGoneBeforeItsTurn(t *testing.T) {
	h := new(listentest.Handler)
	desks := listen.NewDesks(h, 1)
	s := New(Options{Listener: closedListener{}, Handler: h, Desks: desks})
	k := desks.Borrow()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, "GET", "/dns-query?dns="+param(listentest.Query(1, "miss.example.")), nil))
	}()
	cancel()
	<-done
	desks.Return(k)
	if n := h.Resolved.Load(); n != 0 {
		t.Errorf("%d queries were resolved for nobody", n)
	}
}

// What the server tells HTTP/2 clients bounds what they can make it hold.
func TestSettings(t *testing.T) {
	r := start(t, true, Options{Streams: 7})
	config := r.config.Clone()
	config.NextProtos, config.ServerName = []string{"h2"}, "dns.example"
	c, err := tls.Dial("tcp", r.Addr().String(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	framer := http2.NewFramer(c, c)
	if err := framer.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	f, err := framer.ReadFrame()
	settings, ok := f.(*http2.SettingsFrame)
	if err != nil || !ok {
		t.Fatalf("%v %v", f, err)
	}
	for id, want := range map[http2.SettingID]uint32{
		http2.SettingMaxConcurrentStreams: 7, http2.SettingMaxFrameSize: maxFrame, http2.SettingInitialWindowSize: streamRoom,
	} {
		if got, _ := settings.Value(id); got != want {
			t.Errorf("%v is %d, want %d", id, got, want)
		}
	}
}

func TestProxy(t *testing.T) {
	h := new(listentest.Handler)
	r := start(t, true, Options{Handler: h, FromProxy: func(a netip.Addr) bool { return a.IsLoopback() }})
	c := r.client(t, 2)
	tr := c.Transport.(*http.Transport)
	dial := tr.DialContext
	tr.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err == nil {
			_, err = c.Write(listentest.ProxyHeader("[2001:db8::7]:4000", "[2001:db8::53]:443"))
		}
		return c, err
	}
	resp, err := c.Get(r.url("/dns-query?dns=" + param(listentest.Query(1, "miss.example."))))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if q := h.Last(); q.Source.String() != "[2001:db8::7]:4000" || q.Local.String() != "[2001:db8::53]:443" || q.ServerName != "dns.example" {
		t.Errorf("source %v, local %v, server name %q", q.Source, q.Local, q.ServerName)
	}
}

func TestDrainWaitsForAnswers(t *testing.T) {
	resolving := make(chan func(), 1)
	h := &listentest.Handler{OnResolve: func(_ *query.Query, answer func()) { resolving <- answer }}
	r := start(t, true, Options{Handler: h})
	got := make(chan error, 1)
	c := r.client(t, 2)
	go func() {
		resp, err := c.Get(r.url("/dns-query?dns=" + param(listentest.Query(1, "miss.example."))))
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode != 200 {
				err = errors.New(resp.Status)
			}
		}
		got <- err
	}()
	answer := <-resolving
	ended := make(chan error, 1)
	go func() { ended <- r.stop() }()
	answer()
	if err := <-got; err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestDrainIsBounded(t *testing.T) {
	resolving := make(chan func(), 1)
	h := &listentest.Handler{OnResolve: func(_ *query.Query, answer func()) { resolving <- answer }}
	r := start(t, false, Options{Handler: h, Drain: time.Millisecond})
	c := r.client(t, 1)
	got := make(chan error, 1)
	go func() {
		_, err := c.Post(r.url("/dns-query"), mediaType, bytes.NewReader(listentest.Query(1, "miss.example.")))
		got <- err
	}()
	answer := <-resolving
	if err := r.stop(); err != nil {
		t.Error(err)
	}
	if <-got == nil {
		t.Error("there was an answer")
	}
	answer() // to nobody
}

func FuzzRequest(f *testing.F) {
	f.Add("GET", "/dns-query/a", "dns="+param(listentest.Query(1, "hit.example.")), "", "", []byte(nil))
	f.Add("POST", "/dns-query", "", mediaType, "Basic YTpi", listentest.Query(1, "miss.example."))
	f.Add("POST", "/dns-query/", "", mediaType, "Bearer x", listentest.Query(1, "drop.example."))
	s := New(Options{Listener: closedListener{}, Handler: new(listentest.Handler)})
	f.Fuzz(func(t *testing.T, method, path, rawQuery, contentType, auth string, body []byte) {
		r := httptest.NewRequest("GET", "/", bytes.NewReader(body))
		r.Method, r.URL.Path, r.URL.RawQuery = method, path, rawQuery
		r.Header.Set("Content-Type", contentType)
		r.Header.Set("Authorization", auth)
		w := httptest.NewRecorder()
		defer func() {
			if p := recover(); p != nil && p != http.ErrAbortHandler {
				panic(p)
			}
		}()
		s.ServeHTTP(w, r)
		switch w.Code {
		case 200:
			if b := w.Body.Bytes(); len(b) < dnswire.HeaderLen || b[2]&0x80 == 0 {
				t.Errorf("200 with %x", b)
			}
		case 400, 404, 405, 413, 415:
		default:
			t.Errorf("status %d", w.Code)
		}
	})
}

func FuzzMaxAge(f *testing.F) {
	f.Add([]byte{0, 0, 0x80, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0, 0, 9, 0, 0})
	f.Fuzz(func(t *testing.T, msg []byte) {
		if age, _ := maxAge(msg); age > 1<<31-1 {
			t.Errorf("age %d", age)
		}
	})
}
