package doh

import (
	"bytes"
	"encoding/base64"
	"io"
	"mime"
	"net/http"
	"net/netip"
	"strconv"
	"strings"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/listen"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

const mediaType = "application/dns-message"

// ServeHTTP answers one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	device, ok := s.device(r.URL.Path)
	if !ok {
		http.Error(w, "queries are taken at "+s.path, http.StatusNotFound)
		return
	}
	defer s.underWay.Add(-1)
	if s.underWay.Add(1) > max(s.opts.Requests.Load(), 1) {
		s.counters.Refused[query.RefuseBusy].Add(1)
		panic(http.ErrAbortHandler) // a response could wait for the client, and that is what there is no room for
	}
	ctx := r.Context()
	if c, ok := ctx.Value(connKey{}).(*trackedConn); ok {
		defer func() {
			c.underWay.Add(-1)
			if ctx.Err() != nil && c.reset(clock.Elapsed()) {
				s.counters.Malformed.Add(1)
			}
		}()
		if n := c.underWay.Add(1); s.opts.Depth != nil && n > max(s.opts.Depth.Load(), 1) {
			s.counters.Refused[query.RefuseBusy].Add(1)
			panic(http.ErrAbortHandler)
		}
	}
	user, secret, ok := credentials(r)
	if !ok {
		http.Error(w, "the header Authorization is neither Basic nor Bearer with something in it, or there twice", http.StatusBadRequest)
		return
	}
	wire, status, why := readQuery(w, r)
	if status != 0 {
		if status == http.StatusMethodNotAllowed {
			w.Header().Set("Allow", "GET, POST")
		}
		http.Error(w, why, status)
		return
	}

	var k *listen.Desk
	select {
	case k = <-s.opts.Desks:
	case <-ctx.Done():
		return // nobody waits any more
	}
	q := &k.Query
	s.describe(q, r, device, user, secret)
	n, fault, resolve := k.Answer(wire)
	var response []byte
	var own *query.Query
	var out *[]byte
	if resolve {
		own = q.Own()
	} else if n > 0 {
		out = s.outs.Get().(*[]byte)
		*out = append((*out)[:0], k.Out[:n]...)
		response = *out
	}
	s.opts.Desks.Return(k)

	switch {
	case fault == query.Ignore:
		http.Error(w, "the message is not a DNS query", http.StatusBadRequest)
		return
	case resolve:
		reply := make(chan []byte, 1)
		s.opts.Handler.Resolve(own, func(response []byte) {
			if ctx.Err() == nil {
				reply <- bytes.Clone(response)
			}
		})
		select {
		case response = <-reply:
		case <-ctx.Done():
			return
		}
	}
	if len(response) == 0 {
		panic(http.ErrAbortHandler) // which is how net/http lets a handler end the stream; it logs nothing
	}
	h := w.Header()
	h.Set("Content-Type", mediaType)
	h.Set("Content-Length", strconv.Itoa(len(response)))
	h.Set("Cache-Control", cacheControl(response))
	w.Write(response) // an error means that the client has gone
	if out != nil {
		s.outs.Put(out)
	}
}

// device returns what follows the path, without slashes around it.
func (s *Server) device(path string) (string, bool) {
	rest, ok := strings.CutPrefix(path, s.path)
	if !ok {
		return "", false
	}
	if rest == "" || rest == "/" {
		return "", true
	}
	if rest[0] != '/' {
		return "", false
	}
	rest = strings.TrimSuffix(rest[1:], "/")
	if rest == "" || strings.Contains(rest, "/") {
		return "", false
	}
	return rest, true
}

// describe sets what a listener sets of a query.
func (s *Server) describe(q *query.Query, r *http.Request, device, user, secret string) {
	q.Transport, q.Listener, q.Arrived = query.DoH, s.opts.ListenerID, clock.Elapsed()
	q.Source, q.Local, q.ServerName = netip.AddrPort{}, netip.AddrPort{}, ""
	if c, ok := r.Context().Value(connKey{}).(*trackedConn); ok {
		q.Source, q.Local, q.ServerName = c.peer.source, c.peer.local, c.peer.serverName
	}
	q.PathDevice, q.AuthDevice, q.AuthSecret = device, user, secret
}

// credentials returns the user and password of HTTP authentication, or a bearer token. It is false if the client
// has shown something else: to take it for one that shows nothing would be to serve it as somebody else.
func credentials(r *http.Request) (name, secret string, ok bool) {
	if len(r.Header["Authorization"]) > 1 { // which of them counts is nothing to guess
		return "", "", false
	}
	a := strings.TrimSpace(r.Header.Get("Authorization"))
	if a == "" {
		return "", "", true
	}
	if name, secret, ok := r.BasicAuth(); ok {
		return name, secret, name != "" || secret != ""
	}
	scheme, token, _ := strings.Cut(a, " ")
	token = strings.TrimSpace(token)
	return "", token, strings.EqualFold(scheme, "Bearer") && token != ""
}

// readQuery returns the message in a request, or the status that refuses it.
func readQuery(w http.ResponseWriter, r *http.Request) (wire []byte, status int, why string) {
	switch r.Method {
	case http.MethodGet:
		return fromParameter(r.URL.Query().Get("dns"))
	case http.MethodPost:
		if t, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || t != mediaType {
			return nil, http.StatusUnsupportedMediaType, "the body must be " + mediaType
		}
		if r.ContentLength > maxBody {
			return nil, http.StatusRequestEntityTooLarge, "a DNS message has at most 65535 bytes"
		}
		b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
		if err != nil {
			if _, ok := err.(*http.MaxBytesError); ok {
				return nil, http.StatusRequestEntityTooLarge, "a DNS message has at most 65535 bytes"
			}
			return nil, http.StatusBadRequest, "the body could not be read"
		}
		if len(b) > dnswire.MaxMessage {
			return nil, http.StatusRequestEntityTooLarge, "a DNS message has at most 65535 bytes"
		}
		return b, 0, ""
	}
	return nil, http.StatusMethodNotAllowed, "use GET or POST"
}

func fromParameter(p string) (wire []byte, status int, why string) {
	if p == "" {
		return nil, http.StatusBadRequest, `the parameter "dns" is missing`
	}
	b, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(p, "="))
	if err != nil {
		return nil, http.StatusBadRequest, `the parameter "dns" is not base64url`
	}
	return b, 0, ""
}

// cacheControl makes the header for a response: the smallest TTL of the answer section, without one the
// negative TTL of the SOA record (RFC 2308 section 5), and nothing to be kept of failures.
func cacheControl(msg []byte) string {
	age, ok := maxAge(msg)
	if !ok {
		return "no-store"
	}
	return "private, max-age=" + strconv.FormatUint(uint64(age), 10)
}

func maxAge(msg []byte) (age uint32, ok bool) {
	if len(msg) < dnswire.HeaderLen {
		return 0, false
	}
	h := dnswire.ReadHeader(msg)
	if rc := h.RCode(); rc != dnswire.RCodeNoError && rc != dnswire.RCodeNXDomain {
		return 0, false
	}
	off := dnswire.HeaderLen
	for range h.QD {
		end := dnswire.PlainName(msg, off)
		if end < 0 || end+4 > len(msg) {
			return 0, false
		}
		off = end + 4
	}
	for range h.AN {
		rr, next := dnswire.ReadRR(msg, off)
		if next < 0 {
			return 0, false
		}
		if ttl := dnswire.ClampTTL(rr.TTL); !ok || ttl < age {
			age, ok = ttl, true
		}
		off = next
	}
	if ok {
		return age, true
	}
	for range h.NS {
		rr, next := dnswire.ReadRR(msg, off)
		if next < 0 {
			return 0, false
		}
		if rr.Type == dnswire.TypeSOA && rr.End-rr.Data >= 22 {
			return min(dnswire.ClampTTL(rr.TTL), dnswire.ClampTTL(dnswire.Uint32(msg[rr.End-4:]))), true
		}
		off = next
	}
	return 0, false
}
