package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-dns/sluice/cmd/internal/config"
	"github.com/sluice-dns/sluice/resolver"
)

// sluice runs one command line in this process.
func sluice(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs strings.Builder
	status = execute(t.Context(), args, strings.NewReader(""), &out, &errs)
	return status, out.String(), errs.String()
}

func configFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "sluice.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestExitStatuses(t *testing.T) {
	good, bad := configFile(t, "{}"), configFile(t, "listen: {tpc: []}\ncache: {size: 5MB}\n")
	huge := configFile(t, "\nlimits: {class: 1048576g}")
	tooMany := configFile(t, "limits: {class: 512m, dot_connections: 1000000}")
	for _, tt := range []struct {
		args   []string
		status int
		out    []string // parts of standard output; nil: it is empty
		err    []string // the same of standard error
	}{
		{[]string{"check", "-c", good}, 0, nil, nil},
		{[]string{"check", "--config", bad}, 2, []string{
			bad + ":1:10: listen.tpc: unknown key; try: tcp\n",
			bad + `:2:15: cache.size: "5MB" is not a size; try: 5MiB` + "\n"}, nil},
		{[]string{"check", "-c", huge}, 2, []string{huge + ":2:17: limits.class: the class 1048576g is for 1048576 GiB, and the machine has "}, nil},
		{[]string{"check", "-c", tooMany}, 2, []string{tooMany + ":1:40: limits.dot_connections: "}, nil},
		{[]string{"check", "-c", filepath.Join(t.TempDir(), "nowhere")}, 2, []string{"nowhere:1:1: file: cannot be read"}, nil},
		{[]string{"check"}, 2, nil, []string{`"config" not set`}},
		{[]string{"check", "-c", good, "more"}, 2, nil, []string{"more"}},
		{[]string{"limits"}, 0, []string{"tcp_connections", "FROM"}, nil},
		{[]string{"limits", "--memory", "32GiB", "--cpus", "16", "--class", "8g"}, 0, []string{"class 8g", "7 GiB", "--cpus"}, nil},
		{[]string{"limits", "--memory", "32GiB", "--cpus", "16", "--class", "64g"}, 2, nil, []string{"64 GiB", "32 GiB"}},
		{[]string{"limits", "--memory", "32GB"}, 2, nil, []string{"--memory", "try: 32GiB"}},
		{[]string{"limits", "--memory", "100MiB"}, 2, nil, []string{"100 MiB"}},
		{[]string{"limits", "--cpus", "-1"}, 2, nil, []string{"--cpus"}},
		{[]string{"limits", "--class", "huge"}, 2, nil, []string{`"huge"`}},
		{[]string{"limits", "-c", bad}, 2, nil, []string{"cache.size"}},
		{[]string{"limits", "-c", tooMany}, 2, nil, []string{tooMany + ":1:40: limits.dot_connections: "}},
		{[]string{"limits", "--no-such-flag"}, 2, nil, []string{"no-such-flag"}},
		{[]string{"no-such-command"}, 2, nil, []string{"no-such-command"}},
	} {
		status, stdout, stderr := sluice(t, tt.args...)
		if status != tt.status {
			t.Errorf("%v: exit status %d, want %d", tt.args, status, tt.status)
		}
		for name, text := range map[string]struct {
			got  string
			want []string
		}{"standard output": {stdout, tt.out}, "standard error": {stderr, tt.err}} {
			if text.want == nil && text.got != "" {
				t.Errorf("%v: %s is %q, want nothing", tt.args, name, text.got)
			}
			for _, part := range text.want {
				if !strings.Contains(text.got, part) {
					t.Errorf("%v: %s is %q, want %q in it", tt.args, name, text.got, part)
				}
			}
		}
	}
}

func TestLimitsJSON(t *testing.T) {
	file := configFile(t, "cache: {size: 512MiB}\nlimits: {pipelining: 5}\nlisten: {workers: 4}")
	status, stdout, _ := sluice(t, "limits", "--memory", "8GiB", "--cpus", "16", "-c", file, "--json")
	var rows []struct {
		Name, Unit, From string
		Value            int64
	}
	if err := json.Unmarshal([]byte(stdout), &rows); status != 0 || err != nil {
		t.Fatalf("exit status %d, %v: %s", status, err, stdout)
	}
	type row struct {
		value      int64
		unit, from string
	}
	got := map[string]row{}
	for _, r := range rows {
		got[r.Name] = row{r.Value, r.Unit, r.From}
	}
	for name, want := range map[string]row{
		"cache":                  {512 << 20, "bytes", "configuration"},
		"pipelining":             {5, "queries", "configuration"},
		"workers":                {4, "workers", "configuration"},
		"gomaxprocs":             {5, "processors", "workers and a quarter more"},
		"tcp_connections":        {16384, "connections", "auto: 8 GiB, --memory"},
		"connections_per_source": {256, "connections", "1/64 of tcp_connections"},
		"tree_queries":           {100, "queries", "default"},
	} {
		if got[name] != want {
			t.Errorf("%s: %+v, want %+v", name, got[name], want)
		}
	}
	for _, l := range config.LimitNames {
		if _, ok := got[l.Name]; !ok {
			t.Errorf("%s is missing", l.Name)
		}
	}
}

// The configuration and the table know the same limits, in the same units.
func TestConfigKnowsEveryLimit(t *testing.T) {
	var inFile, table []string
	for _, l := range config.LimitNames {
		inFile = append(inFile, l.Name+" in "+l.Unit)
	}
	for _, n := range resolver.LimitsNames() {
		table = append(table, n.String()+" in "+n.Unit())
	}
	if !slices.Equal(inFile, table) {
		t.Errorf("configuration %v\ntable %v", inFile, table)
	}
}
