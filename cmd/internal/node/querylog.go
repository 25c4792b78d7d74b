package node

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/usercache"
)

// A queryLog writes one JSON object for each query of clients whose settings allow it.
type queryLog struct {
	catalogue func() *usercache.Catalogue // has the names of lists and services

	mu sync.Mutex
	w  *bufio.Writer
	f  io.Closer // nil for standard streams

	stop chan struct{}
	done sync.WaitGroup
}

// openQueryLog opens the log that the configuration names: "" is off, "stdout", "stderr", or a file, which is
// appended to.
func openQueryLog(to string, catalogue func() *usercache.Catalogue) (*queryLog, error) {
	l := &queryLog{catalogue: catalogue, stop: make(chan struct{})}
	switch to {
	case "":
		return l, nil
	case "stdout":
		l.w = bufio.NewWriter(os.Stdout)
	case "stderr":
		l.w = bufio.NewWriter(os.Stderr)
	default:
		f, err := os.OpenFile(to, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
		if err != nil {
			return nil, fmt.Errorf("log.queries: %w", err)
		}
		l.w, l.f = bufio.NewWriterSize(f, 64<<10), f
	}
	l.done.Go(func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-l.stop:
				return
			case <-tick.C:
				l.mu.Lock()
				l.w.Flush()
				l.mu.Unlock()
			}
		}
	})
	return l, nil
}

// observer returns what the resolver is to call, nil if nothing is logged.
func (l *queryLog) observer() func(*resolver.QueryEvent) {
	if l.w == nil {
		return nil
	}
	return l.write
}

func (l *queryLog) write(e *resolver.QueryEvent) {
	source := ""
	if e.Source != [16]byte{} {
		source = netip.AddrFrom16(e.Source).Unmap().String()
	}
	by, list := resolver.DecidedBy(e, l.catalogue())
	line, err := json.Marshal(struct {
		Time      time.Time `json:"time"`
		Transport string    `json:"transport"`
		Source    string    `json:"source,omitempty"` // "" for a user of whom the address is not kept
		Name      string    `json:"name"`
		Type      string    `json:"type"`
		RCode     string    `json:"rcode"`
		Verdict   string    `json:"verdict"`
		By        string    `json:"by,omitempty"`   // the step that decided, as explanations name it
		List      string    `json:"list,omitempty"` // the id of the catalogue list or service that has the rule
		Line      uint32    `json:"line,omitempty"`
	}{
		clock.Wall().UTC(), e.Transport.String(), source,
		e.Question().Name.String(), dns.Type(e.Type).String(), dns.RcodeToString[int(e.RCode)], e.Verdict.String(), by, list, e.Line,
	})
	if err != nil {
		return // none of these can fail to be written as JSON
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.w.Write(append(line, '\n'))
}

func (l *queryLog) close() {
	if l.w == nil {
		return
	}
	close(l.stop)
	l.done.Wait()
	l.w.Flush()
	if l.f != nil {
		l.f.Close()
	}
}
