// Package upstream asks one recursive resolver one question: over plain DNS (UDP or TCP), DNS over TLS (RFC 7858)
// or DNS over HTTPS (RFC 8484).
//
// A Client belongs to one resolver, which is known by its address: nothing here has to resolve a name before it
// can resolve names. Over TLS the certificate must be valid for Spec.ServerName; there is no mode that encrypts
// without knowing to whom.
//
// Plain DNS is package exchange's business, with all it does against spoofing. DoT keeps at most maxConns
// connections and sends up to maxPipelined questions on each without waiting for answers, which may come in any
// order (RFC 7766 section 6.2.1.1); a connection with nothing to wait for is closed after idleFor. DoH is POST over
// HTTP/2. Encrypted queries are padded to blocks of 128 bytes (RFC 8467 section 4.1). When no connection can be
// made, none is tried for a while that doubles from dialBackoff to dialBackoffMost; asking then fails at once with
// query.ErrUnreachable.
//
// Errors are those that package query declares for an exchange. A response of any RCODE is a reply, not an error;
// one that does not match is ignored (DoT) or makes the error query.ErrMalformed (DoH, where nothing else can come
// on the same stream). Every question sent costs the tree one query. Nothing is retried, except that a question
// whose connection turns out to have been closed while idle goes over a new one.
package upstream

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// A Client asks one resolver. It is safe for concurrent use.
type Client interface {
	// Ask sends a, whose Server is ignored, with RD=1, and returns the response that matches.
	Ask(ctx context.Context, tree *query.Tree, a query.Ask) (query.Reply, error)
	// Close ends everything under way and waits for it.
	Close() error
}

// A Scheme is how a resolver is asked.
type Scheme uint8

// The schemes.
const (
	UDP Scheme = iota // TCP where UDP truncates
	TCP
	TLS
	HTTPS
)

var schemeNames = [...]string{"udp", "tcp", "tls", "https"}

func (s Scheme) String() string { return schemeNames[s] }

// Encrypted reports whether nobody on the way can read or change what is said.
func (s Scheme) Encrypted() bool { return s >= TLS }

// A Spec says which resolver. It is comparable.
type Spec struct {
	Scheme Scheme
	Addr   netip.AddrPort
	// ServerName is the name or address that the certificate must be for; TLS and HTTPS alone.
	ServerName string
	// Path is that of the HTTPS URL, with its slash in front.
	Path string
}

func (s Spec) String() string {
	out := s.Scheme.String() + "://" + s.Addr.String() + s.Path
	if s.ServerName != "" {
		out += "#" + s.ServerName
	}
	return out
}

// An Exchange asks over plain DNS. Package exchange has it.
type Exchange interface {
	Ask(ctx context.Context, tree *query.Tree, a query.Ask) (query.Reply, error)
}

// Options are what clients share.
type Options struct {
	// Exchange is for plain DNS.
	Exchange Exchange
	// Dial opens TCP connections for DoT and DoH. Nil means the network's.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// TLS is what connections start from: roots above all. Nil means the system's roots.
	TLS *tls.Config
}

// New returns a client.
func New(s Spec, o Options) (Client, error) {
	if !s.Addr.IsValid() || s.Addr.Port() == 0 {
		return nil, fmt.Errorf("upstream %v: it has no address and port", s)
	}
	if s.Scheme.Encrypted() && s.ServerName == "" {
		return nil, fmt.Errorf("upstream %v: it has no name to verify its certificate by", s)
	}
	if o.Dial == nil {
		o.Dial = new(net.Dialer).DialContext
	}
	switch s.Scheme {
	case UDP, TCP:
		if o.Exchange == nil {
			return nil, errors.New("upstream: Options.Exchange is needed")
		}
		return plain{s, o.Exchange}, nil
	case TLS:
		return newDoT(s, o), nil
	case HTTPS:
		return newDoH(s, o), nil
	}
	return nil, fmt.Errorf("upstream: unknown scheme %d", s.Scheme)
}

// plain is Do53.
type plain struct {
	spec     Spec
	exchange Exchange
}

func (p plain) Ask(ctx context.Context, tree *query.Tree, a query.Ask) (query.Reply, error) {
	a.Server, a.RD = p.spec.Addr, true
	a.TCP = a.TCP || p.spec.Scheme == TCP
	a.Case0x20 = a.Case0x20 && !a.TCP
	return p.exchange.Ask(ctx, tree, a)
}

func (plain) Close() error { return nil }

// A Fingerprint says what an answer says: its RCODE and the RRsets of the answer section, whatever their order and
// TTL, the letter case of names, and who signed when. Answers with equal fingerprints are the same answer.
type Fingerprint [sha256.Size]byte

// FingerprintOf returns the fingerprint of a response.
func FingerprintOf(m *query.Message) Fingerprint {
	var lines [][]byte
	for i := range m.Answer {
		s := &m.Answer[i]
		head := append([]byte(nil), s.Name...)
		head = append(head, byte(s.Type>>8), byte(s.Type), byte(s.Class>>8), byte(s.Class))
		for d := range query.RDatas(s.Data) {
			rdata := append([]byte(nil), d...)
			dnswire.CanonicalRData(s.Type, rdata)
			lines = append(lines, append(slices.Clip(head), rdata...))
		}
	}
	slices.SortFunc(lines, slices.Compare)
	h := sha256.New()
	h.Write([]byte{byte(m.RCode >> 8), byte(m.RCode)})
	for _, l := range lines {
		h.Write([]byte{byte(len(l) >> 24), byte(len(l) >> 16), byte(len(l) >> 8), byte(len(l))})
		h.Write(l)
	}
	return Fingerprint(h.Sum(nil))
}

// appendQuery makes the message of a question, padded.
func appendQuery(out []byte, id uint16, a *query.Ask) []byte {
	const paddingHead = 4
	var w dnswire.Builder
	w.Reset(out[len(out):len(out):cap(out)])
	w.Question([]byte(a.Name), a.Type, a.Class)
	h := dnswire.Header{ID: id, QD: 1, Flags: dnswire.FlagRD}
	if a.CD {
		h.Flags |= dnswire.FlagCD
	}
	if !a.NoEDNS {
		var options []byte
		if !a.NoOptions {
			options = a.Subnet.AppendOption(options)
			size := w.Len() + optHead + len(options) + paddingHead
			options = dnswire.AppendOption(options, dnswire.OptionPadding, make([]byte, (block-size%block)%block))
		}
		w.OPT(max(a.UDPSize, 512), 0, a.DO, options)
		h.AR = 1
	}
	h.Put(w.Bytes())
	return out[:len(out)+w.Len()]
}

const (
	// block is what queries are padded to (RFC 8467 section 4.1).
	block = 128
	// optHead is the length of an OPT record without options.
	optHead = 11
	// maxQuery is the most bytes of a query: header, name, type and class, OPT with a subnet, padding.
	maxQuery = 512
)

// readReply reads a response to the question of a, whose ID the caller has compared. The error wraps
// query.ErrMalformed.
func readReply(in []byte, a *query.Ask) (query.Reply, error) {
	m, err := query.ReadMessage(in)
	if err != nil {
		return query.Reply{}, err
	}
	h := m.Header
	same := m.HasQuestion && m.QType == a.Type && m.QClass == a.Class && equalFold(m.QName, []byte(a.Name))
	// A response without question is taken when it reports an error: some cannot even read the query.
	if !h.Response() || h.Opcode() != dnswire.OpcodeQuery || !same && (m.HasQuestion || m.RCode == dnswire.RCodeNoError) {
		return query.Reply{}, fmt.Errorf("%w: it answers something else", query.ErrMalformed)
	}
	if h.TC() {
		return query.Reply{}, fmt.Errorf("%w: over a stream", query.ErrTruncated)
	}
	r := query.Reply{Message: m, TCP: true}
	r.Scope, r.HasScope = a.Subnet.Scope(m.Subnet)
	return r, nil
}

func equalFold(a, b []byte) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if lower(a[i]) != lower(b[i]) {
			return false
		}
	}
	return true
}

func lower(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		c |= 0x20
	}
	return c
}

// A backoff is how long a resolver that cannot be connected to is left alone.
type backoff struct {
	mu    sync.Mutex // guards everything below
	fails int
	until clock.Instant
}

const (
	dialBackoff     = 250 * time.Millisecond
	dialBackoffMost = 15 * time.Second
)

// rests reports whether no connection should be tried now.
func (b *backoff) rests(now clock.Instant) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return now.Before(b.until)
}

// failed and worked report what came of trying. Attempts under way together fail together and count once.
func (b *backoff) failed(now clock.Instant) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now.Before(b.until) {
		return
	}
	b.until = now.Add(min(dialBackoff<<min(b.fails, 16), dialBackoffMost))
	b.fails++
}

func (b *backoff) worked() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fails, b.until = 0, 0
}

// timeLeft returns how long an exchange may take that would take at most d.
func timeLeft(ctx context.Context, tree *query.Tree, d time.Duration) (time.Duration, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	left := tree.Deadline.Sub(clock.Elapsed())
	if left <= 0 {
		return 0, fmt.Errorf("%w: time", query.ErrLimit)
	}
	return min(d, left), nil
}

// networkError turns what the network says into the errors that query declares. outer is the context of who
// asked: its end is no fault of the resolver.
func networkError(outer context.Context, s Spec, err error) error {
	var dns net.Error
	switch {
	case outer.Err() != nil:
		return fmt.Errorf("asking %v: %w", s, outer.Err())
	case errors.Is(err, query.ErrMalformed), errors.Is(err, query.ErrBusy), errors.Is(err, query.ErrUnreachable), errors.Is(err, query.ErrTimeout),
		errors.Is(err, query.ErrTruncated):
		return err
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), errors.Is(err, syscall.ETIMEDOUT),
		errors.As(err, &dns) && dns.Timeout():
		return fmt.Errorf("%w from %v", query.ErrTimeout, s)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%w: %v closed the connection", query.ErrUnreachable, s)
	}
	return fmt.Errorf("%w: %v: %v", query.ErrUnreachable, s, err)
}

// tlsConfig is the configuration of connections to s.
func tlsConfig(s Spec, base *tls.Config, protocols ...string) *tls.Config {
	c := &tls.Config{}
	if base != nil {
		c = base.Clone()
	}
	c.ServerName, c.InsecureSkipVerify = s.ServerName, false
	c.MinVersion = max(c.MinVersion, tls.VersionTLS12)
	c.NextProtos = protocols
	c.Time = clock.Wall
	c.ClientSessionCache = tls.NewLRUClientSessionCache(maxConns)
	return c
}

// Answers reports whether a response of a resolver answers its question: data, or the statement that there is none.
// A referral from a server that does not recurse is no answer.
func Answers(m *query.Message) bool {
	switch m.RCode {
	case dnswire.RCodeNXDomain, dnswire.RCodeYXDomain:
		return true
	case dnswire.RCodeNoError:
	default:
		return false
	}
	if len(m.Answer) > 0 {
		return true
	}
	refers := false
	for i := range m.Authority {
		switch m.Authority[i].Type {
		case dnswire.TypeSOA:
			return true
		case dnswire.TypeNS:
			refers = true
		}
	}
	return !refers
}
