// Package demo runs the whole of Sluice in one process, offline, and checks that it does what it is for.
//
// Run starts a small signed Internet (resolver/siminternet), a business-logic service on a store of its own,
// and two resolvers that follow it, all on free ports of 127.0.0.0/8 and in one temporary folder. It makes two
// users through the admin API as an operator would, asks as they would over every transport, and compares each
// answer with the data of the zone. Users are told apart by their source address over UDP and TCP, by the TLS
// server name over DoT and by the path over DoH.
//
// Each check is independent of how others end, has a time limit and says in a sentence what it saw. A check
// that did not run, because the system could not be started or ctx ended, is a failed one. Run returns no
// error for a failed check: it counts them. What the parts logged goes to Options.Err if any failed.
//
// Nothing is left behind: listeners, goroutines and files are gone when Run returns.
package demo

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
)

// Options say what to print, and where. Out is needed.
type Options struct {
	// Out receives the results, Err what explains failures; nil means nobody does.
	Out, Err io.Writer

	// JSON prints one object for each check instead of tables.
	JSON bool

	// Hold keeps everything serving after the checks until ctx ends, and prints how to ask.
	Hold bool

	// Version of the program, for status.
	Version string

	// For tests: the checks to run, nil for all, a change to the system before them, and what to do while held.
	checks   []check
	sabotage func(context.Context, *system) error
	held     func(*system)
}

// Run runs the demo and returns how many checks failed. The error is of writing to Out.
func Run(ctx context.Context, o Options) (failed int, err error) {
	if o.Err == nil {
		o.Err = io.Discard
	}
	if o.checks == nil {
		o.checks = checks
	}
	logged := new(logBuffer)
	p := &printer{w: o.Out, json: o.JSON}

	dir, err := os.MkdirTemp("", "sluice-demo-")
	if err != nil {
		return len(o.checks), fmt.Errorf("a folder for the demo: %w", err)
	}
	defer os.RemoveAll(dir)
	s := &system{dir: dir, version: o.Version, log: slog.New(slog.NewTextHandler(logged, &slog.HandlerOptions{Level: slog.LevelInfo}))}
	defer s.close()

	begin := clock.Elapsed()
	startErr := within(ctx, startTime, s.start)
	if startErr == nil {
		p.system(s, clock.Elapsed().Sub(begin))
		if !o.JSON {
			_ = within(ctx, startTime, func(ctx context.Context) error { p.answers(s.tour(ctx)); return nil })
		}
		if o.sabotage != nil {
			startErr = within(ctx, startTime, func(ctx context.Context) error { return o.sabotage(ctx, s) })
		}
	}
	p.begin()
	for _, c := range o.checks {
		r := result{Check: c.name, Detail: "did not run"}
		switch {
		case startErr != nil:
			r.Detail = "did not run: " + startErr.Error()
		case ctx.Err() != nil:
			r.Detail = "did not run: interrupted"
		default:
			r = c.run(ctx, s)
		}
		if !r.OK {
			failed++
		}
		p.result(r)
	}
	p.total(len(o.checks)-failed, failed)
	if failed > 0 {
		fmt.Fprintf(o.Err, "\nWhat the parts logged:\n%s", logged.text())
	}
	if o.Hold && startErr == nil && ctx.Err() == nil {
		if err := s.hold(); err != nil {
			fmt.Fprintf(o.Err, "The addresses cannot be held: %v\n", err)
		} else {
			to := o.Out
			if o.JSON {
				to = o.Err // standard output stays one object a line
			}
			fmt.Fprint(to, s.pasteLines())
			if o.held != nil {
				o.held(s)
			}
			<-ctx.Done()
		}
	}
	return failed, p.err
}

// startTime bounds the start of everything: a fraction of a second on an idle machine.
const startTime = time.Minute

// within calls f with a context that ends after d.
func within(ctx context.Context, d time.Duration, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	return f(ctx)
}

// run runs one check.
func (c *check) run(ctx context.Context, s *system) result {
	begin := clock.Elapsed()
	r := result{Check: c.name}
	err := within(ctx, c.limit, func(ctx context.Context) (err error) {
		r.Detail, err = c.do(ctx, s)
		return err
	})
	r.MS = float64(clock.Elapsed().Sub(begin).Microseconds()) / 1000
	r.OK = err == nil
	if err != nil {
		r.Detail = err.Error()
	}
	return r
}

// A logBuffer keeps the last of what is logged.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// maxLog is how much of the log is kept, in bytes: what a person would scroll through.
const maxLog = 64 << 10

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.b.Len()+len(p) > maxLog {
		l.b.Next(l.b.Len() + len(p) - maxLog/2)
	}
	return l.b.Write(p)
}

func (l *logBuffer) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
