package resolver_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/limits"
	"github.com/sluice-dns/sluice/resolver/internal/listen"
	"github.com/sluice-dns/sluice/resolver/internal/overload"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
	"github.com/sluice-dns/sluice/resolver/internal/render"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// Section D: what clients send. Beside these, where the code is: header-only answers to what cannot be read,
// responses, classes and TSIG in TestClientProtocol; packets from port 0 and from our own sockets in listen/udp; a
// client that does not read in listen/tcp; streams, headers, bodies and resets of HTTP/2 in listen/doh, whose
// limits need a TLS client; the size of admin messages in admin.
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
	deep, err := resolver.NewLiveLimits(resolver.Machine{Memory: 2 << 30, CPUs: 1}, resolver.LimitsOptions{Set: map[resolver.LimitsName]int64{limits.Pipelining: 64}}) // as class 8g has
	if err != nil {
		t.Fatal(err)
	}
	return onTCP(t, func(o *resolver.Options) { o.Limits = deep }, func(l *lab, dial func() net.Conn) string {
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
