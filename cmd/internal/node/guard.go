package node

import (
	"fmt"
	"log/slog"

	"github.com/sluice-dns/sluice/usercache"
)

// maxGuardExamples is how many of the records that a shrink guard holds are named in the log.
const maxGuardExamples = 3

// A guardWatch says once when the shrink guard of a dataset begins to hold something back, with what and what to do,
// and once when that is over.
type guardWatch map[usercache.Kind]bool

func (g guardWatch) look(log *slog.Logger, s usercache.DatasetStatus, overlay func() []usercache.OverlayEntry) {
	if g[s.Kind] == (s.Held > 0) {
		return
	}
	g[s.Kind] = s.Held > 0
	if s.Held == 0 {
		log.Info("the shrink guard holds nothing any more", "dataset", s.Kind)
		return
	}
	var examples []string
	until := ""
	for _, e := range overlay() {
		if e.Reason != usercache.HeldRemoval {
			continue
		}
		if examples = append(examples, fmt.Sprintf("%s: %s", e.Key, e.Detail)); len(examples) == 1 && !e.Until.IsZero() {
			until = e.Until.UTC().Format("2006-01-02T15:04:05Z")
		}
		if len(examples) == maxGuardExamples {
			break
		}
	}
	log.Warn("the shrink guard holds back what the service has taken away; what was before is served", "dataset", s.Kind,
		"records", s.Held, "for_example", examples, "until", until,
		"if_it_is_meant", fmt.Sprintf("sluicectl sync accept --kind %s at this resolver, or with --fleet at the service for all", s.Kind))
}
