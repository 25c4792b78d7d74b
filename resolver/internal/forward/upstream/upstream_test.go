package upstream

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/simnet"
)

var at = netip.MustParseAddrPort("192.0.2.1:853")

// A rig is one resolver over TLS on an in-memory network, in a synctest bubble.
type rig struct {
	t       *testing.T
	net     *simnet.Network
	roots   *x509.CertPool
	cert    tls.Certificate
	running sync.WaitGroup
	l       net.Listener

	mu      sync.Mutex
	conns   int
	queries []*dns.Msg
	sizes   []int
}

func bubble(t *testing.T, f func(r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, net: simnet.New(), roots: x509.NewCertPool()}
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		c := &x509.Certificate{
			SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "dns.example.net"}, DNSNames: []string{"dns.example.net"},
			IPAddresses: []net.IP{net.IPv4(192, 0, 2, 1)}, IsCA: true, BasicConstraintsValid: true,
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		}
		der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		if c, err = x509.ParseCertificate(der); err != nil {
			t.Fatal(err)
		}
		r.roots.AddCert(c)
		r.cert = tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
		f(r)
		if r.l != nil {
			r.l.Close()
		}
		time.Sleep(time.Minute) // handlers and connections that net/http keeps end by themselves
		r.running.Wait()
		r.net.Close()
	})
}

func (r *rig) client(s Scheme, name string) Client {
	r.t.Helper()
	spec := Spec{Scheme: s, Addr: at, ServerName: name}
	if s == HTTPS {
		spec.Path = "/dns-query"
	}
	c, err := New(spec, Options{Dial: r.net.Dial, TLS: &tls.Config{RootCAs: r.roots}})
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

func (r *rig) listen() {
	l, err := r.net.ListenTCP(at)
	if err != nil {
		r.t.Fatal(err)
	}
	r.l = l
}

// note remembers a query.
func (r *rig) note(b []byte) *dns.Msg {
	q := new(dns.Msg)
	if err := q.Unpack(b); err != nil {
		r.t.Errorf("a query that cannot be read: %v", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.queries, r.sizes = append(r.queries, q), append(r.sizes, len(b))
	return q
}

func (r *rig) seen() (conns, queries int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.conns, len(r.queries)
}

// dot serves DNS over TLS: serve is called for each query, in a goroutine of its own, and sends what it likes.
func (r *rig) dot(serve func(q *dns.Msg, send func(*dns.Msg), c net.Conn)) {
	r.listen()
	l := tls.NewListener(r.l, &tls.Config{Certificates: []tls.Certificate{r.cert}, NextProtos: []string{"dot"}})
	r.running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			r.mu.Lock()
			r.conns++
			r.mu.Unlock()
			r.running.Go(func() {
				defer c.Close()
				var writing sync.Mutex
				send := func(m *dns.Msg) {
					out, err := m.Pack()
					if err != nil {
						panic(err)
					}
					writing.Lock()
					defer writing.Unlock()
					c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(out))), out...))
				}
				in := bufio.NewReader(c)
				for {
					var n [2]byte
					if _, err := io.ReadFull(in, n[:]); err != nil {
						return
					}
					b := make([]byte, binary.BigEndian.Uint16(n[:]))
					if _, err := io.ReadFull(in, b); err != nil {
						return
					}
					q := r.note(b)
					r.running.Go(func() { serve(q, send, c) })
				}
			})
		}
	})
}

// good answers with an address; names that begin with "slow" after 100 ms.
func good(q *dns.Msg, send func(*dns.Msg), _ net.Conn) {
	if strings.HasPrefix(q.Question[0].Name, "slow") {
		time.Sleep(100 * time.Millisecond)
	}
	send(reply(q))
}

func reply(q *dns.Msg) *dns.Msg {
	m := new(dns.Msg).SetReply(q)
	rr, _ := dns.NewRR(q.Question[0].Name + " 60 A 192.0.2.80")
	m.Answer = []dns.RR{rr}
	m.SetEdns0(1232, true)
	return m
}

func ask(name string) query.Ask {
	return query.Ask{Name: dnsname.MustParse(name), Type: dnswire.TypeA, Class: dnswire.ClassIN, DO: true, CD: true, Timeout: 3 * time.Second}
}

func (r *rig) ask(c Client, name string) (query.Reply, error) {
	return c.Ask(r.t.Context(), query.NewTree(clock.Elapsed(), query.Budget{}), ask(name))
}

// One connection carries many questions at once, answers come in any order, queries are padded, and it ends when idle.
func TestDoT(t *testing.T) {
	bubble(t, func(r *rig) {
		r.dot(good)
		c := r.client(TLS, "dns.example.net")
		defer c.Close()
		var asking sync.WaitGroup
		start := clock.Elapsed()
		for i := range 50 {
			asking.Go(func() {
				name := fmt.Sprintf("slow%d.example.com.", i)
				if i%2 == 1 {
					name = fmt.Sprintf("quick%d.example.com.", i)
				}
				got, err := r.ask(c, name)
				if err != nil || got.Message == nil || got.Message.Answer[0].Name != dnsname.MustParse(name) || !got.TCP {
					t.Errorf("%s: %+v, %v", name, got, err)
				}
			})
		}
		asking.Wait()
		if took := clock.Elapsed().Sub(start); took != 100*time.Millisecond {
			t.Errorf("took %v: questions waited for each other", took)
		}
		if conns, queries := r.seen(); conns != 1 || queries != 50 {
			t.Errorf("%d connections, %d queries; want 1 and 50", conns, queries)
		}
		for i, q := range r.queries {
			if r.sizes[i]%128 != 0 || !q.RecursionDesired || !q.CheckingDisabled || q.IsEdns0() == nil || !q.IsEdns0().Do() {
				t.Fatalf("a query of %d bytes: %v", r.sizes[i], q)
			}
		}
		time.Sleep(idleFor + time.Second)
		if n := r.net.Open(); n != 1 { // the listener
			t.Errorf("%d endpoints open after the idle time, want the listener alone", n)
		}
		if _, err := r.ask(c, "again.example.com."); err != nil {
			t.Error(err)
		}
		if conns, _ := r.seen(); conns != 2 {
			t.Errorf("%d connections, want 2", conns)
		}
	})
}

// What a DoT server may do wrong.
func TestDoTTrouble(t *testing.T) {
	for _, tt := range []struct {
		what  string
		serve func(q *dns.Msg, send func(*dns.Msg), c net.Conn)
		name  string // of the certificate wanted
		want  error  // nil: an answer
	}{
		{"another ID first", func(q *dns.Msg, send func(*dns.Msg), c net.Conn) {
			m := reply(q)
			m.Id++
			send(m)
			good(q, send, c)
		}, "dns.example.net", nil},
		{"another question", func(q *dns.Msg, send func(*dns.Msg), _ net.Conn) {
			m := reply(q)
			m.Question[0].Name = "other.example."
			send(m)
		}, "dns.example.net", query.ErrMalformed},
		{"truncated", func(q *dns.Msg, send func(*dns.Msg), _ net.Conn) {
			m := reply(q)
			m.Truncated = true
			send(m)
		}, "dns.example.net", query.ErrTruncated},
		{"silent", func(*dns.Msg, func(*dns.Msg), net.Conn) {}, "dns.example.net", query.ErrTimeout},
		{"closes at once", func(_ *dns.Msg, _ func(*dns.Msg), c net.Conn) { c.Close() }, "dns.example.net", query.ErrUnreachable},
		{"a certificate for another name", good, "other.example.net", query.ErrUnreachable},
		{"a certificate for the address", good, "192.0.2.1", nil},
		{"a certificate for another address", good, "192.0.2.2", query.ErrUnreachable},
	} {
		t.Run(tt.what, func(t *testing.T) {
			bubble(t, func(r *rig) {
				r.dot(tt.serve)
				c := r.client(TLS, tt.name)
				defer c.Close()
				got, err := r.ask(c, "www.example.com.")
				if !errors.Is(err, tt.want) || tt.want == nil && (err != nil || len(got.Message.Answer) != 1) {
					t.Errorf("%+v, %v; want %v", got, err, tt.want)
				}
				if _, queries := r.seen(); errors.Is(err, query.ErrUnreachable) && tt.what[0] == 'a' && queries > 0 {
					t.Error("a query went to a server that could not show who it is")
				}
			})
		})
	}
}

// A server that closed an idle connection is asked over a new one; one that cannot be reached is left alone for a while.
func TestDoTConnections(t *testing.T) {
	bubble(t, func(r *rig) {
		var last net.Conn
		r.dot(func(q *dns.Msg, send func(*dns.Msg), c net.Conn) {
			last = c
			good(q, send, c)
		})
		c := r.client(TLS, "dns.example.net")
		defer c.Close()
		for range 3 {
			if _, err := r.ask(c, "www.example.com."); err != nil {
				t.Fatal(err)
			}
			last.Close() // seen or not seen by the client before it asks again
		}
		r.l.Close()
		time.Sleep(idleFor)
		if _, err := r.ask(c, "www.example.com."); !errors.Is(err, query.ErrUnreachable) {
			t.Errorf("nobody listens: %v", err)
		}
		start := clock.Elapsed()
		if _, err := r.ask(c, "www.example.com."); !errors.Is(err, query.ErrUnreachable) || !strings.Contains(err.Error(), "a moment ago") || clock.Elapsed() != start {
			t.Errorf("soon after: %v after %v", err, clock.Elapsed().Sub(start))
		}
		time.Sleep(dialBackoff)
		r.dot(good)
		if _, err := r.ask(c, "www.example.com."); err != nil {
			t.Errorf("back again: %v", err)
		}
	})
}

// A connection has room for so many questions, and there are so many connections; then it is busy.
func TestDoTBounds(t *testing.T) {
	bubble(t, func(r *rig) {
		r.dot(func(*dns.Msg, func(*dns.Msg), net.Conn) {})
		c := r.client(TLS, "dns.example.net")
		defer c.Close()
		var asking sync.WaitGroup
		var mu sync.Mutex
		busy := 0
		for i := range 400 {
			asking.Go(func() {
				if _, err := r.ask(c, fmt.Sprintf("n%d.", i)); errors.Is(err, query.ErrBusy) {
					mu.Lock()
					busy++
					mu.Unlock()
				}
			})
			synctest.Wait()
		}
		if conns, queries := r.seen(); conns != maxConns || queries != maxConns*maxPipelined || busy != 400-queries {
			t.Errorf("%d connections, %d queries, %d busy", conns, queries, busy)
		}
		asking.Wait() // all time out
	})
}

// doh serves DNS over HTTPS.
func (r *rig) doh(h http.HandlerFunc) {
	r.listen()
	s := &http.Server{Handler: h, TLSConfig: &tls.Config{Certificates: []tls.Certificate{r.cert}}, ErrorLog: log.New(io.Discard, "", 0)}
	r.running.Go(func() { s.ServeTLS(r.l, "", "") })
}

func TestDoH(t *testing.T) {
	whole := func(w http.ResponseWriter, body []byte) {
		w.Header().Set("Content-Type", "application/dns-message")
		w.Write(body)
	}
	for _, tt := range []struct {
		what string
		do   func(w http.ResponseWriter, q *dns.Msg)
		want error // nil: an answer
		ttl  uint32
	}{
		{"good", func(w http.ResponseWriter, q *dns.Msg) { b, _ := reply(q).Pack(); whole(w, b) }, nil, 60},
		{"aged", func(w http.ResponseWriter, q *dns.Msg) {
			w.Header().Set("Age", "25")
			b, _ := reply(q).Pack()
			whole(w, b)
		}, nil, 35},
		{"very old", func(w http.ResponseWriter, q *dns.Msg) {
			w.Header().Set("Age", "4000000000")
			b, _ := reply(q).Pack()
			whole(w, b)
		}, nil, 0},
		{"status 503", func(w http.ResponseWriter, q *dns.Msg) { w.WriteHeader(503) }, query.ErrUnreachable, 0},
		{"a redirect", func(w http.ResponseWriter, q *dns.Msg) {
			w.Header().Set("Location", "https://elsewhere.example/")
			w.WriteHeader(307)
		}, query.ErrUnreachable, 0},
		{"a web page", func(w http.ResponseWriter, q *dns.Msg) { w.Write([]byte("<html>welcome to our captive portal</html>")) }, query.ErrMalformed, 0},
		{"garbage", func(w http.ResponseWriter, q *dns.Msg) { whole(w, bytes.Repeat([]byte{0}, 40)) }, query.ErrMalformed, 0},
		{"too long", func(w http.ResponseWriter, q *dns.Msg) { whole(w, make([]byte, 70000)) }, query.ErrMalformed, 0},
		{"another question", func(w http.ResponseWriter, q *dns.Msg) {
			m := reply(q)
			m.Question[0].Name = "other.example."
			b, _ := m.Pack()
			whole(w, b)
		}, query.ErrMalformed, 0},
		{"slow", func(w http.ResponseWriter, q *dns.Msg) { time.Sleep(4 * time.Second) }, query.ErrTimeout, 0},
	} {
		t.Run(tt.what, func(t *testing.T) {
			bubble(t, func(r *rig) {
				r.doh(func(w http.ResponseWriter, req *http.Request) {
					b, err := io.ReadAll(req.Body)
					if err != nil {
						return
					}
					q := r.note(b)
					if req.Method != http.MethodPost || req.ProtoMajor != 2 || req.Host != "dns.example.net:853" || req.URL.Path != "/dns-query" ||
						req.Header.Get("Content-Type") != "application/dns-message" || req.UserAgent() != "" || q.Id != 0 || len(b)%128 != 0 {
						t.Errorf("%s %v HTTP/%d, host %s, headers %v, ID %d, %d bytes", req.Method, req.URL, req.ProtoMajor, req.Host, req.Header, q.Id, len(b))
					}
					tt.do(w, q)
				})
				c := r.client(HTTPS, "dns.example.net")
				for range 2 {
					got, err := r.ask(c, "www.example.com.")
					if !errors.Is(err, tt.want) || tt.want == nil && (err != nil || got.Message.Answer[0].TTL != tt.ttl) {
						t.Errorf("%+v, %v; want %v", got, err, tt.want)
					}
				}
				c.Close()
				if _, err := r.ask(c, "www.example.com."); !errors.Is(err, net.ErrClosed) {
					t.Errorf("after Close: %v", err)
				}
			})
		})
	}
	t.Run("a certificate for another name", func(t *testing.T) {
		bubble(t, func(r *rig) {
			r.doh(func(http.ResponseWriter, *http.Request) {
				t.Error("a query went to a server that could not show who it is")
			})
			c := r.client(HTTPS, "other.example.net")
			defer c.Close()
			if _, err := r.ask(c, "www.example.com."); !errors.Is(err, query.ErrUnreachable) {
				t.Error(err)
			}
		})
	})
}

// Asking ends with the question's own time, its context, and its budget.
func TestEndsWithTheTree(t *testing.T) {
	for _, s := range []Scheme{TLS, HTTPS} {
		bubble(t, func(r *rig) {
			if s == TLS {
				r.dot(func(*dns.Msg, func(*dns.Msg), net.Conn) {})
			} else {
				r.doh(func(w http.ResponseWriter, req *http.Request) { <-req.Context().Done() })
			}
			c := r.client(s, "dns.example.net")
			start := clock.Elapsed()
			tree := query.NewTree(start, query.Budget{Time: time.Second})
			if _, err := c.Ask(r.t.Context(), tree, ask("a.")); err == nil || clock.Elapsed().Sub(start) != time.Second {
				t.Errorf("%v: %v after %v", s, err, clock.Elapsed().Sub(start))
			}
			ctx, cancel := context.WithCancel(r.t.Context())
			time.AfterFunc(50*time.Millisecond, cancel)
			start = clock.Elapsed()
			if _, err := c.Ask(ctx, query.NewTree(start, query.Budget{}), ask("b.")); !errors.Is(err, context.Canceled) || clock.Elapsed().Sub(start) != 50*time.Millisecond {
				t.Errorf("%v: %v after %v", s, err, clock.Elapsed().Sub(start))
			}
			tree = query.NewTree(start, query.Budget{Queries: 1})
			tree.Query()
			if _, err := c.Ask(r.t.Context(), tree, ask("c.")); !errors.Is(err, query.ErrLimit) {
				t.Errorf("%v: %v", s, err)
			}
			c.Close()
		})
	}
}

// No bytes make reading a response panic, and what is accepted answers the question.
func FuzzReadReply(f *testing.F) {
	q := new(dns.Msg).SetQuestion("www.example.com.", dns.TypeA)
	b, _ := reply(q).Pack()
	f.Add(b)
	f.Add(b[:12])
	f.Fuzz(func(t *testing.T, b []byte) {
		a := ask("www.example.com.")
		r, err := readReply(b, &a)
		if err != nil {
			return
		}
		m := r.Message
		if m.HasQuestion && (m.QType != a.Type || !strings.EqualFold(string(m.QName), string(a.Name))) || !m.Header.Response() {
			t.Errorf("%x answers another question", b)
		}
		FingerprintOf(m)
		Answers(m)
	})
}

func FuzzQuery(f *testing.F) {
	f.Add("www.example.com.", uint16(1), uint16(1232), uint8(24))
	f.Fuzz(func(t *testing.T, name string, typ, size uint16, bits uint8) {
		n, err := dnsname.Parse(name)
		if err != nil {
			return
		}
		a := query.Ask{Name: n, Type: typ, Class: 1, DO: true, UDPSize: size, Subnet: query.Subnet{Family: 2, Bits: min(bits, 128)}}
		b := appendQuery(make([]byte, 2, 2+maxQuery), 7, &a)[2:]
		m := new(dns.Msg)
		if err := m.Unpack(b); err != nil || len(b)%block != 0 || len(m.Question) != 1 || m.IsEdns0() == nil {
			t.Errorf("%x: %v", b, err)
		}
	})
}
