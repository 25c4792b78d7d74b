package clock

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// followEvery is how often Follow reads its files. A changed offset must hold for queries received 20 ms
// later, so it reads four times as often.
const followEvery = 5 * time.Millisecond

// Follow reads clockFile (seconds added to Elapsed and to Wall) and wallFile (seconds added to Wall alone)
// now and then every few milliseconds until ctx ends. An empty name means no such file. A file holds one
// whole number of seconds as text, with an optional sign and leading zeros.
//
// The first reading must succeed: an error names the file and nothing is followed. Later a file that is
// missing or unreadable (it may be caught half-written) leaves the last value in force.
//
// The returned function waits until following has ended, after ctx.
func Follow(ctx context.Context, clockFile, wallFile string) (wait func(), err error) {
	files := []struct {
		name string
		set  func(int64)
	}{
		{clockFile, elapsedOffset.Store},
		{wallFile, wallOffset.Store},
	}
	for _, f := range files {
		if f.name == "" {
			continue
		}
		off, err := readOffset(f.name)
		if err != nil {
			return nil, err
		}
		f.set(off)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(followEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			for _, f := range files {
				if f.name == "" {
					continue
				}
				if off, err := readOffset(f.name); err == nil {
					f.set(off)
				}
			}
		}
	}()
	return func() { <-done }, nil
}

// readOffset returns the offset in nanoseconds.
func readOffset(name string) (int64, error) {
	b, err := os.ReadFile(name)
	if err != nil {
		return 0, fmt.Errorf("reading a clock offset: %w", err)
	}
	s := strings.TrimSpace(string(b))
	sec, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %q is not a whole number of seconds; write for example 3600", name, s)
	}
	const most = 1 << 33 // seconds; 272 years, so that nanoseconds fit in 64 bits
	if sec < -most || sec > most {
		return 0, fmt.Errorf("%s: %d seconds is beyond ±%d", name, sec, int64(most))
	}
	return sec * int64(time.Second), nil
}
