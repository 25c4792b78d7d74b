package resolver_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/admin"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/forward/upstream"
	"github.com/sluice-dns/sluice/resolver/internal/listen"
	"github.com/sluice-dns/sluice/resolver/internal/listen/doh"
	"github.com/sluice-dns/sluice/resolver/internal/listen/listentest"
	"github.com/sluice-dns/sluice/resolver/internal/overload"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
	"github.com/sluice-dns/sluice/resolver/internal/render"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// Section D: what clients send. Beside these, where the code is: header-only answers to what cannot be read,
// responses, classes and TSIG in TestClientProtocol; packets from port 0 and from our own sockets in listen/udp.
var rowsD = []limitRow{
	{"compression pointers", "pointers followed for one name", dnswire.MaxHops, "read", "refused", tryHops},
	{"compression work", "names of 255 octets in one message (64 KiB)", 257, "read", "refused", tryExpanded},
	{"compression table", "names written before the one repeated", 128, "compressed", "in full", tryCompressed},
	{"EDNS options", "the place of the cookie among them", 32, "read", "ignored", tryOptions},
	{"PROXY header", "bytes of it", 512, "read", "refused", tryProxy},
	{"TCP pipelining", "queries under way when another comes", 63, "answered at once", "waits", tryPipelining},
	{"TCP first byte", "seconds without one", 2, "open", "closed", func(t *testing.T, n int) string { return trySilence(t, n, false) }},
	{"TCP idle", "seconds after an answer", 9, "open", "closed", func(t *testing.T, n int) string { return trySilence(t, n, true) }},
	{"TCP connections of one source", "connections (class 2g: 4096/64)", 64, "64 open", "64 open", tryConnections},
	{"padding", "bytes of a response over an encrypted transport, padded to multiples of 468", 468, "468", "936", tryPadding},
	{"rate of strangers", "answers a second to one /24 over UDP", 100, "100 answered", "100 answered", tryRate},
	{"EDNS and cookie of strangers", "answers a second to an address with our cookie", 100, "100 answered", "101 answered", tryRateWithCookie},
	{"rate of strangers over IPv6", "answers a second to one /56 over UDP", 100, "100 answered", "100 answered", func(_ *testing.T, n int) string { return rated6(n, 56) }},
	{"rate of strangers over IPv6: two ranges", "answers a second to two /56 over UDP, half to each", 200, "200 answered", "200 answered", func(_ *testing.T, n int) string { return rated6(n, 55) }},
	{"rate of strangers: slip", "queries beyond the rate; those answered with TC=1", 1, "1 of 2", "2 of 4", trySlip},
	{"TCP connections in all", "connections from many sources", 4096, "4096 open", "4096 open", tryAllConnections},
	{"TCP write-blocked", "seconds that a client reads nothing", 4, "open", "closed", tryBlockedWrite},
	{"HTTP/2 streams", "requests of one connection at once; how many are under way", 100, "100", "100", tryStreams},
	{"HTTP/2 headers", "KiB of one header field, beside the usual ones", 15, "200", "431", tryHTTPHeader},
	{"HTTP/2 body", "bytes of a request's body, which is a message at most", 65535, "200", "413", tryHTTPBody},
	{"HTTP/2 resets", "requests given up within a minute", 200, "open", "closed", tryResets},
	{"padding of queries", "bytes of a query over an encrypted transport, padded to multiples of 128", 128, "128", "256", tryQueryPadding},
	{"size of admin messages", "bytes", 1 << 20, "read", "refused", tryAdminMessage},
}

func tryHops(_ *testing.T, n int) string {
	msg := make([]byte, dnswire.HeaderLen, 1024)
	msg = append(msg, 0) // the root
	for at := dnswire.HeaderLen; n > 0; n-- {
		next := len(msg)
		msg = append(msg, 0xc0|byte(at>>8), byte(at))
		at = next
	}
	var x dnswire.Expander
	var name [dnsname.MaxLen + 1]byte
	if l, _ := x.Name(msg, len(msg)-2, &name); l < 0 {
		return "refused"
	}
	return "read"
}

func tryExpanded(_ *testing.T, n int) string {
	name := strings.Repeat("\x3f"+strings.Repeat("x", 63), 3) + "\x3d" + strings.Repeat("x", 61) + "\x00"
	msg := append(make([]byte, dnswire.HeaderLen), name...)
	var x dnswire.Expander
	var out [dnsname.MaxLen + 1]byte
	for range n {
		if l, _ := x.Name(msg, dnswire.HeaderLen, &out); l < 0 {
			return "refused"
		}
	}
	return "read"
}

func tryCompressed(_ *testing.T, n int) string {
	var b dnswire.Builder
	b.Reset(make([]byte, 0, dnswire.MaxMessage))
	var name []byte
	for i := range n {
		name = []byte{4, byte('a' + i/26/26), byte('a' + i/26%26), byte('a' + i%26), 'x', 0}
		b.RR(name, dnswire.TypeA, 1, 0, make([]byte, 4))
	}
	before := b.Len()
	b.RR(name, dnswire.TypeA, 1, 0, make([]byte, 4))
	if b.Len()-before < len(name)+14 {
		return "compressed"
	}
	return "in full"
}

func tryOptions(t *testing.T, n int) string {
	wire := packed(t, "www.example.", dns.TypeA, func(m *dns.Msg) {
		edns(false)(m)
		for range n - 1 {
			m.IsEdns0().Option = append(m.IsEdns0().Option, &dns.EDNS0_LOCAL{Code: 65500})
		}
		m.IsEdns0().Option = append(m.IsEdns0().Option, &dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0102030405060708"})
	})
	var q query.Query
	switch f := q.Read(wire); {
	case f != query.NoFault:
		return fmt.Sprint("fault ", f)
	case q.EDNS.Cookie != nil:
		return "read"
	}
	return "ignored"
}

func tryProxy(_ *testing.T, n int) string {
	b := append([]byte("\r\n\r\n\x00\r\nQUIT\n\x21\x11"), byte((n-16)>>8), byte(n-16))
	b = append(b, make([]byte, n-len(b))...)
	if _, l, err := listen.ReadProxy(b); err != nil || l != n {
		return "refused"
	}
	return "read"
}

// onTCP runs f with a connection to a resolver of class 2g, in a bubble.
func onTCP(t *testing.T, edit func(*resolver.Options), f func(l *lab, dial func() net.Conn) string) (out string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l := newProtocolLab(t, func(o *resolver.Options) {
			o.Access.Unlimited = nil
			if edit != nil {
				edit(o)
			}
		})
		defer l.stop()
		var conns []net.Conn
		defer func() {
			for _, c := range conns {
				c.Close()
			}
		}()
		out = f(l, func() net.Conn {
			c, err := l.net.Dial(t.Context(), "tcp", l.addr.String())
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, c)
			return c
		})
	})
	return out
}

func framed(t *testing.T, name string) []byte {
	b := packed(t, name, dns.TypeA, nil)
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)
}

// answered reports whether an answer, or the end, comes within a hundredth of a second.
func answered(c net.Conn) (bool, error) {
	c.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	var b [2]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return false, err
	}
	_, err := io.CopyN(io.Discard, c, int64(binary.BigEndian.Uint16(b[:])))
	return true, err
}

func tryPipelining(t *testing.T, n int) string {
	as8g := limited(map[string]int64{"pipelining": 64})
	return onTCP(t, as8g, func(l *lab, dial func() net.Conn) string {
		l.ask("v4.cases.example.", dns.TypeA, nil)
		l.ask("v4.cases.example.", dns.TypeA, nil)
		for _, a := range l.sim.Servers("cases.example.") {
			l.sim.SetBehaviour(a, siminternet.Behaviour{Delay: 300 * time.Millisecond})
		}
		c := dial()
		for i := range n {
			c.Write(framed(t, fmt.Sprintf("x%d.cases.example.", i)))
		}
		synctest.Wait()
		c.Write(framed(t, "v4.cases.example."))
		if ok, _ := answered(c); ok {
			return "answered at once"
		}
		return "waits"
	})
}

func trySilence(t *testing.T, seconds int, afterAnswer bool) string {
	return onTCP(t, nil, func(l *lab, dial func() net.Conn) string {
		c := dial()
		if afterAnswer {
			l.ask("v4.cases.example.", dns.TypeA, nil)
			c.Write(framed(t, "v4.cases.example."))
			if ok, err := answered(c); !ok {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Duration(seconds)*time.Second + time.Millisecond)
		synctest.Wait()
		if _, err := answered(c); err == io.EOF {
			return "closed"
		}
		return "open"
	})
}

func tryConnections(t *testing.T, n int) string {
	return onTCP(t, nil, func(l *lab, dial func() net.Conn) string {
		var all []net.Conn
		for range n {
			all = append(all, dial())
		}
		synctest.Wait()
		open := 0
		for _, c := range all {
			if _, err := answered(c); errors.Is(err, os.ErrDeadlineExceeded) {
				open++
			}
		}
		return fmt.Sprint(open, " open")
	})
}

func tryPadding(t *testing.T, n int) string {
	q := &query.Query{Transport: query.DoT}
	if f := q.Read(packed(t, "www.example.", dns.TypeTXT, edns(false))); f != query.NoFault {
		t.Fatal(f)
	}
	q.Turn.Current = q.Question
	// Header, question, a TXT record whose owner is a pointer, OPT, and the head of the padding option.
	text := n - (dnswire.HeaderLen + len(q.AsIs) + 4) - 12 - 11 - 4
	var rdata []byte
	for text > 0 {
		l := min(text, 256)
		rdata = append(append(rdata, byte(l-1)), make([]byte, l-1)...)
		text -= l
	}
	e, err := settled.Settle(&query.Unvalidated{Question: q.Question, Answer: []query.RRset{{
		Name: q.Question.Name, Type: dnswire.TypeTXT, Class: 1, TTL: 60, Data: query.AppendRData(nil, rdata),
	}}}, query.Insecure, settled.Options{EDE: query.NoEDE})
	if err != nil {
		t.Fatal(err)
	}
	a := e.View()
	return fmt.Sprint(render.New(render.Options{MaxUDP: 1232}).Answer(q, &a, 0, make([]byte, 65535)))
}

func tryRate(_ *testing.T, n int) string { return rated(n, false) }

func tryRateWithCookie(_ *testing.T, n int) string { return rated(n, true) }

func rated(n int, cookie bool) string {
	g := overload.New(overload.Options{Allow: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}, Rate: func() int { return 100 }})
	answered := 0
	for i := range n {
		q := &query.Query{Source: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 4000), Arrived: clock.Instant(time.Hour), CookieOK: cookie}
		if g.Early(q) == query.NotRefused && g.Late(q) == query.NotRefused {
			answered++
		}
	}
	return fmt.Sprint(answered, " answered")
}

func rated6(n, bits int) string {
	g := overload.New(overload.Options{Allow: []netip.Prefix{netip.MustParsePrefix("::/0")}, Rate: func() int { return 100 }})
	answered := 0
	for i := range n {
		a := netip.MustParseAddr("2001:db8::").As16()
		a[15] = byte(i) // within the /56
		if bits < 56 {
			a[6] |= byte(i & 1)
		}
		q := &query.Query{Source: netip.AddrPortFrom(netip.AddrFrom16(a), 4000), Arrived: clock.Instant(time.Hour)}
		if g.Early(q) == query.NotRefused && g.Late(q) == query.NotRefused {
			answered++
		}
	}
	return fmt.Sprint(answered, " answered")
}

func trySlip(_ *testing.T, n int) string {
	g := overload.New(overload.Options{Allow: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}, Rate: func() int { return 100 }})
	slipped := 0
	for i := range 100 + 2*n {
		q := &query.Query{Source: netip.MustParseAddrPort("192.0.2.1:4000"), Arrived: clock.Instant(time.Hour)}
		g.Early(q)
		switch why := g.Late(q); {
		case i < 100 && why != query.NotRefused, i >= 100 && why == query.NotRefused:
			return fmt.Sprint("query ", i, ": ", why)
		case why == query.RefuseSlip:
			slipped++
		}
	}
	return fmt.Sprintf("%d of %d", slipped, 2*n)
}

func tryAllConnections(t *testing.T, n int) string {
	everybody := []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")} // no limit for each source
	return onTCP(t, func(o *resolver.Options) { o.Access.Unlimited = everybody }, func(l *lab, dial func() net.Conn) string {
		var all []net.Conn
		for i := range n {
			all = append(all, dial())
			if i%64 == 0 {
				synctest.Wait() // until those have been accepted
			}
		}
		synctest.Wait()
		open := 0
		for _, c := range all {
			c.SetReadDeadline(time.Now().Add(time.Microsecond)) // in all less than an idle connection gets
			if _, err := c.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
				open++
			}
		}
		return fmt.Sprint(open, " open")
	})
}

func tryBlockedWrite(t *testing.T, seconds int) string {
	return onTCP(t, nil, func(l *lab, dial func() net.Conn) string {
		l.ask("v4.cases.example.", dns.TypeA, nil)
		l.ask("v4.cases.example.", dns.TypeA, nil)
		c := dial()
		c.SetWriteDeadline(time.Now().Add(time.Millisecond))
		for q := framed(t, "v4.cases.example."); ; {
			if _, err := c.Write(q); err != nil { // neither its answers nor its queries fit any more
				break
			}
		}
		time.Sleep(time.Duration(seconds)*time.Second + 2*time.Millisecond)
		synctest.Wait()
		c.SetReadDeadline(time.Now().Add(time.Millisecond))
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			return "open"
		}
		return "closed"
	})
}

// An h2 is an HTTP/2 connection to a DoH server, frame by frame.
type h2 struct {
	framer *http2.Framer
	next   uint32     // stream
	came   chan event // closed with the connection
}

// An event is what came of a stream: a status or "reset".
type event struct {
	stream uint32
	what   string
}

// onH2 runs f with a connection to a DoH server of its own; resolving has what answers each query that is resolved.
func onH2(t *testing.T, depth int, f func(c *h2, resolving chan func()) string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	resolving := make(chan func(), 1000)
	o := doh.Options{Listener: l, Handler: &listentest.Handler{OnResolve: func(_ *query.Query, answer func()) { resolving <- answer }}}
	if depth > 0 {
		o.Depth = new(atomic.Int64)
		o.Depth.Store(int64(depth))
	}
	s := doh.New(o)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx) }()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conn.SetDeadline(time.Now().Add(time.Minute))
	c := &h2{framer: http2.NewFramer(conn, conn), next: 1, came: make(chan event, 10000)}
	c.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	io.WriteString(conn, http2.ClientPreface)
	c.framer.WriteSettings()
	go c.read()
	out := f(c, resolving)
	conn.Close()
	for range c.came { // until the reader has ended
	}
	cancel()
	s.Close()
	<-done
	return out
}

// request sends a request and returns its stream. With a body of some size it is a POST of so many bytes.
func (c *h2) request(name string, body int, extra ...hpack.HeaderField) uint32 {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	method, path := "GET", "/dns-query?dns="+base64.RawURLEncoding.EncodeToString(listentest.Query(1, name))
	if body > 0 {
		method, path = "POST", "/dns-query"
		extra = append(extra, hpack.HeaderField{Name: "content-type", Value: "application/dns-message"})
	}
	for _, f := range append([]hpack.HeaderField{{Name: ":method", Value: method}, {Name: ":scheme", Value: "http"}, {Name: ":authority", Value: "dns.example"}, {Name: ":path", Value: path}}, extra...) {
		e.WriteField(f)
	}
	stream, block := c.next, b.Bytes()
	c.next += 2
	first := block[:min(len(block), 16000)]
	c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: first, EndStream: body == 0, EndHeaders: len(first) == len(block)})
	for block = block[len(first):]; len(block) > 0; {
		part := block[:min(len(block), 16000)]
		block = block[len(part):]
		c.framer.WriteContinuation(stream, len(block) == 0, part)
	}
	for sent := 0; sent < body; {
		part := min(body-sent, 16000)
		sent += part
		c.framer.WriteData(stream, sent == body, make([]byte, part))
	}
	return stream
}

func (c *h2) read() {
	defer close(c.came)
	for {
		frame, err := c.framer.ReadFrame()
		if err != nil {
			return
		}
		switch frame := frame.(type) {
		case *http2.RSTStreamFrame:
			c.came <- event{frame.StreamID, "reset"}
		case *http2.MetaHeadersFrame:
			c.came <- event{frame.StreamID, frame.PseudoValue("status")}
		}
	}
}

// outcome waits for what becomes of a stream: its status, "reset" or "closed".
func (c *h2) outcome(stream uint32) string {
	for e := range c.came {
		if e.stream == stream {
			return e.what
		}
	}
	return "closed"
}

func tryStreams(t *testing.T, n int) string {
	return onH2(t, 0, func(c *h2, resolving chan func()) string {
		var last uint32
		for range n {
			last = c.request("miss.example.", 0)
		}
		underWay := 0
		answers := make([]func(), 0, n)
		for range min(n, 100) {
			answers = append(answers, <-resolving)
			underWay++
		}
		if n > 100 {
			if got := c.outcome(last); got != "reset" {
				t.Errorf("the last request: %s", got)
			}
		}
		for _, f := range answers {
			f()
		}
		return some(underWay + len(resolving))
	})
}

func tryHTTPHeader(t *testing.T, n int) string {
	return onH2(t, 0, func(c *h2, _ chan func()) string {
		value := make([]byte, n<<10)
		for i := range value {
			value[i] = "abcdefgh"[i*i%7]
		}
		return c.outcome(c.request("hit.example.", 0, hpack.HeaderField{Name: strings.Repeat("x", 100), Value: string(value)}))
	})
}

func tryHTTPBody(t *testing.T, n int) string {
	return onH2(t, 0, func(c *h2, _ chan func()) string { return c.outcome(c.request("hit.example.", n)) })
}

func tryResets(t *testing.T, n int) string {
	return onH2(t, 1, func(c *h2, resolving chan func()) string { // one at a time, so that each is noticed before the next
		for given := 0; given < n; {
			stream := c.request("miss.example.", 0)
			select {
			case <-resolving:
				c.framer.WriteRSTStream(stream, http2.ErrCodeCancel)
				given++
			case _, open := <-c.came: // the one before is still under way
				if !open {
					return fmt.Sprint("closed after ", given)
				}
			}
		}
		for range 100 { // it is noticed before all of these
			if stream := c.request("hit.example.", 0); c.outcome(stream) == "closed" {
				return "closed"
			}
		}
		return "open"
	})
}

func tryQueryPadding(t *testing.T, n int) string {
	get, client := listentest.Certificate()
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{GetCertificate: get, NextProtos: []string{"dot"}})
	if err != nil {
		t.Fatal(err)
	}
	length := make(chan int, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			length <- -1
			return
		}
		defer c.Close()
		var head [2]byte
		io.ReadFull(c, head[:])
		length <- int(binary.BigEndian.Uint16(head[:]))
		l.Close()
	}()
	u, err := upstream.New(upstream.Spec{Scheme: upstream.TLS, Addr: l.Addr().(*net.TCPAddr).AddrPort(), ServerName: "dns.example"}, upstream.Options{TLS: client})
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	// Header, type and class, an OPT record and the head of the padding option: the rest is the name.
	name := n - dnswire.HeaderLen - 4 - 11 - 4
	text := strings.Repeat("x", 63) + "." + strings.Repeat("y", name-64-2) + "."
	go u.Ask(t.Context(), query.NewTree(clock.Elapsed(), query.Budget{}), query.Ask{Name: dnsname.MustParse(text), Type: dns.TypeA, Class: 1, UDPSize: 1232, Timeout: 5 * time.Second})
	return some(<-length)
}

func tryAdminMessage(t *testing.T, n int) string {
	s := admin.New(admin.Options{Readiness: func() admin.Readiness { return admin.Readiness{} }, Logger: slog.New(slog.DiscardHandler)})
	l := bufconn.Listen(1 << 16)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	defer func() { cancel(); <-done }()
	conn, err := grpc.NewClient("passthrough:///admin", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = adminv1.NewResolverServiceClient(conn).CacheLook(ctx, &adminv1.CacheLookRequest{Name: strings.Repeat("x", n-4)}) // behind the field's head
	if grpcstatus.Code(err) == codes.ResourceExhausted {
		return "refused"
	}
	return "read" // and then refused for what it says
}
