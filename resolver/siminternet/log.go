package siminternet

import (
	"net/netip"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// logSize is how many queries the log keeps.
const logSize = 1 << 14

// A Transport is what a query came over.
type Transport uint8

const (
	UDP Transport = iota
	TCP
)

func (t Transport) String() string {
	if t == TCP {
		return "tcp"
	}
	return "udp"
}

// A LogEntry is one query that a server received.
type LogEntry struct {
	Time      time.Time
	Server    netip.Addr
	From      netip.AddrPort
	Transport Transport
	ID        uint16
	Name      string // in the spelling of the query
	Type      uint16
	RD, CD    bool
	EDNS      bool
	DO        bool
	UDPSize   uint16 // of EDNS
	Options   []uint16
}

// Is reports whether the query was for this name, in any spelling, and type.
func (e LogEntry) Is(name string, qtype uint16) bool {
	return e.Type == qtype && canonical(e.Name) == canonical(name)
}

// A queryLog keeps the newest entries.
type queryLog struct {
	mu      sync.Mutex
	entries []LogEntry // a ring once full
	first   int
	total   int
}

func (l *queryLog) add(e LogEntry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.total++
	if len(l.entries) < logSize {
		l.entries = append(l.entries, e)
		return
	}
	l.entries[l.first] = e
	l.first = (l.first + 1) % logSize
}

// Log returns the queries received since the start or the last ResetLog, oldest first: the newest 16,384 of
// them. Queries that a Behaviour lost count as received; what was no query with one question is not logged.
func (in *Internet) Log() []LogEntry {
	l := &in.log
	l.mu.Lock()
	defer l.mu.Unlock()
	return append(append([]LogEntry(nil), l.entries[l.first:]...), l.entries[:l.first]...)
}

// Count returns how many of the logged queries match; nil matches every query, also those the log forgot.
func (in *Internet) Count(match func(LogEntry) bool) int {
	if match == nil {
		in.log.mu.Lock()
		defer in.log.mu.Unlock()
		return in.log.total
	}
	n := 0
	for _, e := range in.Log() {
		if match(e) {
			n++
		}
	}
	return n
}

// ResetLog empties the log.
func (in *Internet) ResetLog() {
	l := &in.log
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries, l.first, l.total = nil, 0, 0
}

func entryOf(m *dns.Msg) LogEntry {
	e := LogEntry{ID: m.Id, Name: m.Question[0].Name, Type: m.Question[0].Qtype, RD: m.RecursionDesired, CD: m.CheckingDisabled}
	if opt := m.IsEdns0(); opt != nil {
		e.EDNS, e.DO, e.UDPSize = true, opt.Do(), opt.UDPSize()
		for _, o := range opt.Option {
			e.Options = append(e.Options, o.Option())
		}
	}
	return e
}
