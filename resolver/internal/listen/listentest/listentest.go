// Package listentest is a handler for the tests of listeners. What it does with a query is in the first label
// of its name: "hit…" is answered inline, "miss…" is resolved, "big…" is answered inline with Big bytes,
// "drop…" gets no answer inline and "lost…" none from resolving.
package listentest

import (
	"encoding/binary"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Big is the size of a big response.
const Big = 20000

// A Handler answers by name. The zero value is ready.
type Handler struct {
	// OnResolve, if set, is called by Resolve with the query and what would answer it; otherwise Resolve
	// answers before it returns.
	OnResolve func(q *query.Query, answer func())

	Hits, Resolved, Faults atomic.Int64

	mu   sync.Mutex // guards last
	last query.Query
}

// Last returns the query seen last.
func (h *Handler) Last() query.Query {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.last
}

// NewWorker returns a worker with a ring.
func (h *Handler) NewWorker() *query.Worker { return &query.Worker{Ring: query.NewRing(16)} }

// TryNow answers inline.
func (h *Handler) TryNow(_ *query.Worker, q *query.Query, out []byte) (int, query.After) {
	label := string(q.Question.Name[1:])
	if strings.HasPrefix(label, "miss") || strings.HasPrefix(label, "lost") {
		return 0, query.AfterResolve
	}
	h.Hits.Add(1)
	if strings.HasPrefix(label, "drop") {
		return 0, 0
	}
	return Response(q, out), query.AfterCount
}

// Response writes the response to q: its question and one TXT record.
func Response(q *query.Query, out []byte) int {
	var b dnswire.Builder
	b.Reset(out[:0:len(out)])
	b.Question(q.AsIs, q.Question.Type, q.Question.Class)
	h := dnswire.Header{ID: q.ID, Flags: dnswire.FlagQR | dnswire.FlagRA, QD: 1, AN: 1}
	text := []byte{3, 'a', 'b', 'c'}
	if len(q.Question.Name) > 4 && q.Question.Name[1:4] == "big" {
		text = make([]byte, Big)
		for i := 0; i < Big; i += 250 {
			text[i] = 249
		}
	}
	if !b.RR(q.AsIs, 16, dnswire.ClassIN, 300, text) {
		h.AN, h.Flags = 0, h.Flags|dnswire.FlagTC
	}
	h.Put(b.Bytes())
	return b.Len()
}

// Fault answers with a header.
func (h *Handler) Fault(_ *query.Worker, q *query.Query, f query.Fault, out []byte) int {
	h.Faults.Add(1)
	rcode := map[query.Fault]uint16{query.FormErr: 1, query.NotImp: 4, query.BadVers: 0}[f]
	dnswire.Header{ID: q.ID, Flags: dnswire.FlagQR | rcode}.Put(out)
	return dnswire.HeaderLen
}

// Resolve answers later.
func (h *Handler) Resolve(q *query.Query, reply func([]byte)) {
	h.Resolved.Add(1)
	h.mu.Lock()
	h.last = *q
	h.mu.Unlock()
	answer := func() {
		if q.Question.Name[1:5] == "lost" {
			reply(nil)
			return
		}
		out := make([]byte, dnswire.MaxMessage)
		reply(out[:Response(q, out)])
	}
	if h.OnResolve != nil {
		h.OnResolve(q, answer)
		return
	}
	answer()
}

// Query returns a query in wire form.
func Query(id uint16, name string) []byte {
	n := dnsname.MustParse(name)
	b := make([]byte, dnswire.HeaderLen, 64)
	dnswire.Header{ID: id, Flags: dnswire.FlagRD, QD: 1}.Put(b)
	b = append(b, n...)
	return append(b, 0, 16, 0, 1)
}

// ProxyHeader returns a PROXY header, version 2, that tells these addresses of one family.
func ProxyHeader(source, local string) []byte {
	s, l := netip.MustParseAddrPort(source), netip.MustParseAddrPort(local)
	family := byte(0x11)
	if s.Addr().Is6() {
		family = 0x21
	}
	addrs := append(s.Addr().AsSlice(), l.Addr().AsSlice()...)
	addrs = binary.BigEndian.AppendUint16(addrs, s.Port())
	addrs = binary.BigEndian.AppendUint16(addrs, l.Port())
	b := append([]byte("\r\n\r\n\x00\r\nQUIT\n\x21"), family, 0, byte(len(addrs)))
	return append(b, addrs...)
}
