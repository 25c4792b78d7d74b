package pipeline

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"

	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/query/settled"
)

// A recovered panic is counted, and its log line has what it takes to play it again: the question, and whatever
// message was being read, but not who asked.
func TestPanicsKeepTheirInput(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	p := start(t, ctx, &stages{fetch: func(context.Context, *query.Tree, query.Question) (settled.Entry, error) {
		panic(query.Caught("boom", "message 01020384"))
	}}, Options{})
	var log bytes.Buffer
	p.o.Logger = slog.New(slog.NewTextHandler(&log, nil))
	if got := brief(ask(t, p, p.NewWorker(), "www.example.", nil)); got != "SERVFAIL EDE0" || p.Panics() != 1 {
		t.Errorf("%s, %d panics", got, p.Panics())
	}
	cancel()
	p.Close()
	for _, want := range []string{"name=www.example.", "type=A", "panic=boom", "message 01020384", "TestPanicsKeepTheirInput"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("%q is missing in %s", want, log.String())
		}
	}
	if strings.Contains(log.String(), "source") {
		t.Errorf("who asked is told: %s", log.String())
	}
}
