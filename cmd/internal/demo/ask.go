package demo

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/siminternet"
)

const typeA = dns.TypeA

// A client is one device, as the resolvers see it.
type client struct {
	name   string // of the user
	device string
	source netip.Addr
}

// A transport is a way to ask.
type transport int

const (
	udp transport = iota
	tcp
	dot
	doh1
	doh2
)

var transportNames = [...]string{"UDP", "TCP", "DoT", "DoH (HTTP/1.1)", "DoH (HTTP/2)"}

func (t transport) String() string { return transportNames[t] }

// listener is the name of the listener that serves a transport.
func (t transport) listener() string { return [...]string{"udp", "tcp", "dot", "doh", "doh"}[t] }

// A question is a name and a type.
type question struct {
	name string
	typ  uint16
}

func (q question) String() string { return q.name + " " + dns.TypeToString[q.typ] }

// ask asks a resolver as the client's device would. Over encrypted transports the source is 127.0.0.1, which
// is nobody's: there the device is known by what it says.
func (s *system) ask(ctx context.Context, p *process, c client, t transport, q question) (*dns.Msg, error) {
	return s.askWith(ctx, p, c, t, q, flags{})
}

// flags are what a validating client, or one that wants to see for itself, sets in a query.
type flags struct{ do, cd bool }

func (s *system) askWith(ctx context.Context, p *process, c client, t transport, q question, f flags) (*dns.Msg, error) {
	m := new(dns.Msg)
	m.SetQuestion(q.name, q.typ)
	m.SetEdns0(1232, f.do)
	m.CheckingDisabled = f.cd
	var got *dns.Msg
	var err error
	if p.node == nil {
		return nil, fmt.Errorf("%s is not running", p.name)
	}
	switch t {
	case udp, tcp, dot:
		got, err = s.exchange(ctx, p.addr(t), c, t, m)
	case doh1, doh2:
		got, err = s.fetch(ctx, p.addr(t), c, t, m)
	}
	if err != nil {
		return nil, fmt.Errorf("%s asking %s for %v over %v: %w", c.name, p.name, q, t, err)
	}
	return got, nil
}

func (s *system) exchange(ctx context.Context, to netip.AddrPort, c client, t transport, m *dns.Msg) (*dns.Msg, error) {
	d := &net.Dialer{}
	x := dns.Client{Net: "udp", Dialer: d}
	switch t {
	case udp:
		d.LocalAddr = net.UDPAddrFromAddrPort(netip.AddrPortFrom(c.source, 0))
	case tcp:
		x.Net = "tcp"
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(c.source, 0))
	default:
		x.Net = "tcp-tls"
		x.TLSConfig = &tls.Config{ServerName: c.device + "." + serverName, RootCAs: s.roots, MinVersion: tls.VersionTLS12, NextProtos: []string{"dot"}}
	}
	conn, err := x.DialContext(ctx, to.String())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	conn.UDPSize = 1232
	for {
		if err := conn.WriteMsg(m); err != nil {
			return nil, err
		}
		wait := patience
		if t != udp {
			wait = short
		}
		_ = conn.SetReadDeadline(time.Now().Add(wait)) // of an open connection this cannot fail
		got, err := conn.ReadMsg()
		if t == udp && errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() == nil {
			s.resent.Add(1)
			continue
		}
		if err != nil {
			return nil, cmp.Or(context.Cause(ctx), err)
		}
		return got, answers(m, got)
	}
}

// patience is how long a client waits over UDP before it asks again, as stub resolvers do.
const patience = 2 * time.Second

// fetch asks over DoH: with GET in HTTP/1.1, with POST in HTTP/2.
func (s *system) fetch(ctx context.Context, to netip.AddrPort, c client, t transport, m *dns.Msg) (*dns.Msg, error) {
	m.Id = 0 // RFC 8484 section 4.1
	wire, err := m.Pack()
	if err != nil {
		return nil, err
	}
	url := "https://" + serverName + "/dns-query/" + c.device
	var req *http.Request
	if t == doh1 {
		req, err = http.NewRequestWithContext(ctx, http.MethodGet, url+"?dns="+base64.RawURLEncoding.EncodeToString(wire), nil)
	} else {
		req, err = http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(wire))
	}
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/dns-message")
	req.Header.Set("Content-Type", "application/dns-message")
	protocols := new(http.Protocols)
	protocols.SetHTTP1(t == doh1)
	protocols.SetHTTP2(t == doh2)
	h := &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: s.roots, MinVersion: tls.VersionTLS12},
		Protocols:       protocols,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", to.String())
		},
	}
	defer h.CloseIdleConnections()
	resp, err := h.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	switch want := map[transport]int{doh1: 1, doh2: 2}[t]; {
	case err != nil:
		return nil, err
	case resp.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("status %s", resp.Status)
	case resp.ProtoMajor != want:
		return nil, fmt.Errorf("answered over %s", resp.Proto)
	}
	got := new(dns.Msg)
	if err := got.Unpack(body); err != nil {
		return nil, err
	}
	return got, answers(m, got)
}

// answers checks that a message is the response to a query.
func answers(query, m *dns.Msg) error {
	if !m.Response || m.Id != query.Id || len(m.Question) != 1 || !strings.EqualFold(m.Question[0].Name, query.Question[0].Name) {
		return errors.New("the response is to something else")
	}
	return nil
}

// A reply is what matters of a response.
type reply struct {
	rcode  int
	answer []string // as of siminternet.AnswerText
	why    string   // the extended error's text
	code   int      // of the extended error, -1 for none
}

func replyOf(m *dns.Msg) reply {
	r := reply{rcode: m.Rcode, answer: siminternet.AnswerText(m.Answer), code: -1}
	if opt := m.IsEdns0(); opt != nil {
		for _, o := range opt.Option {
			if e, ok := o.(*dns.EDNS0_EDE); ok {
				r.code, r.why = int(e.InfoCode), e.ExtraText
			}
		}
	}
	return r
}

func (r reply) equal(o reply) bool { return r.rcode == o.rcode && slices.Equal(r.answer, o.answer) }

// String is the data that a client uses in the end, as people read it.
func (r reply) String() string {
	if len(r.answer) == 0 {
		if r.rcode == dns.RcodeSuccess {
			return "no data"
		}
		return dns.RcodeToString[r.rcode]
	}
	var data, aliases []string
	for _, line := range r.answer {
		f := strings.SplitN(line, " ", 3)
		if f[1] == "CNAME" {
			aliases = append(aliases, f[2])
		} else {
			data = append(data, f[2])
		}
	}
	if len(data) == 0 {
		return "alias of " + aliases[len(aliases)-1]
	}
	if n := len(data); n > 3 {
		return fmt.Sprintf("%s and %d more", data[0], n-1)
	}
	return strings.Join(data, ", ")
}

// A want says what a client must get for a question.
type want func(s *system, q question) (reply, error)

// real is what the zones say, read from the servers' data and not by any resolver.
func real(s *system, q question) (reply, error) { return s.zoneData(q) }

// blocked is the address that means blocked.
func blocked(_ *system, q question) (reply, error) {
	return reply{rcode: dns.RcodeSuccess, answer: []string{q.name + " A 0.0.0.0"}}, nil
}

// records is a fixed answer.
func records(lines ...string) want {
	slices.Sort(lines)
	return func(*system, question) (reply, error) { return reply{answer: lines}, nil }
}

// expect asks and compares.
func (s *system) expect(ctx context.Context, p *process, c client, t transport, q question, w want) (reply, error) {
	m, err := s.ask(ctx, p, c, t, q)
	if err != nil {
		return reply{}, err
	}
	got := replyOf(m)
	if m.Truncated {
		return got, fmt.Errorf("%s got a truncated answer for %v from %s over %v", c.name, q, p.name, t)
	}
	should, err := w(s, q)
	if err != nil {
		return got, err
	}
	if !got.equal(should) {
		return got, fmt.Errorf("%s got %v for %v from %s over %v, and should get %v", c.name, got, q, p.name, t, should)
	}
	return got, nil
}

// zoneData answers a question from the zones themselves.
func (s *system) zoneData(q question) (reply, error) {
	var out reply
	name := q.name
	for range 8 {
		m, err := s.authoritative(question{name, q.typ})
		if err != nil {
			return out, err
		}
		r := replyOf(m)
		out.rcode = r.rcode
		out.answer = append(out.answer, r.answer...)
		next, done := name, len(m.Answer) == 0
		for again := true; again; {
			again = false
			for _, rr := range m.Answer {
				switch {
				case !strings.EqualFold(rr.Header().Name, next):
				case rr.Header().Rrtype == q.typ:
					done = true
				case rr.Header().Rrtype == dns.TypeCNAME:
					next, again = rr.(*dns.CNAME).Target, true
				}
			}
		}
		if done || next == name {
			slices.Sort(out.answer)
			return out, nil
		}
		name = next
	}
	return out, fmt.Errorf("the zones have an endless chain of aliases at %v", q)
}

// authoritative asks the first server of a name's zone that answers.
func (s *system) authoritative(q question) (*dns.Msg, error) {
	zone := q.name
	for {
		if _, ok := s.internet.Zone(zone); ok {
			break
		}
		i, end := dns.NextLabel(zone, 0)
		if end {
			zone = "."
			break
		}
		zone = zone[i:]
	}
	m := new(dns.Msg)
	m.SetQuestion(q.name, q.typ)
	wire, err := m.Pack()
	if err != nil {
		return nil, err
	}
	for _, server := range s.internet.Servers(zone) {
		packets, _ := s.internet.Handle(server, siminternet.TCP, netip.MustParseAddrPort("127.0.0.1:9"), wire)
		for _, p := range packets {
			got := new(dns.Msg)
			if got.Unpack(p) == nil && got.Authoritative {
				return got, nil
			}
		}
	}
	return nil, fmt.Errorf("no server of %s answers for %v", zone, q)
}
