package node

import (
	"log/slog"
	"testing"

	"github.com/sluice-dns/sluice/cmd/internal/config"
)

// A standalone resolver shows the metrics of the service in it beside its own; one that has its service elsewhere does
// not.
func TestMetricsOfTheServiceInside(t *testing.T) {
	for _, elsewhere := range []bool{false, true} {
		c := configured(t, t.TempDir(), "")
		if elsewhere {
			c.Users.Services = []config.Endpoint{{Network: "tcp", Address: "127.0.0.1:1"}}
		}
		n, err := Start(c, Options{Version: "test", Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		families, err := n.registry.Gather()
		if err != nil {
			t.Error(err)
		}
		has := map[string]bool{}
		for _, f := range families {
			has[f.GetName()] = true
		}
		if !has["sluice_sync_bytes_total"] || has["sluice_service_records"] == elsewhere || has["sluice_service_own_lists"] == elsewhere {
			t.Errorf("with its service elsewhere: %v: %v", elsewhere, has)
		}
		n.Close()
	}
}
