package admin

import (
	"log/slog"
	"strings"
	"sync"
	"time"
)

var levels = map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError}

func levelName(l slog.Level) string { return strings.ToLower(l.String()) }

// LogLevel is a Log over the level variable of the program's logger.
type LogLevel struct {
	v *slog.LevelVar // constant

	mu     sync.Mutex // guards everything below
	before slog.Level // what holds again when the timer runs out
	timer  *time.Timer
}

// NewLogLevel returns a Log that sets v.
func NewLogLevel(v *slog.LevelVar) *LogLevel { return &LogLevel{v: v} }

// SetLevel sets the level. A change for a time goes back to the level that was last set for good.
func (l *LogLevel) SetLevel(level slog.Level, d time.Duration) (was slog.Level) {
	l.mu.Lock()
	defer l.mu.Unlock()
	was = l.v.Level()
	lasting := was
	if l.timer != nil {
		l.timer.Stop()
		l.timer, lasting = nil, l.before
	}
	l.v.Set(level)
	if d == 0 {
		return was
	}
	l.before = lasting
	var t *time.Timer
	t = time.AfterFunc(d, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.timer == t { // not stopped too late
			l.v.Set(l.before)
			l.timer = nil
		}
	})
	l.timer = t
	return was
}

// Close forgets a change that is still to end.
func (l *LogLevel) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
}
