package main

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
)

// A logWatch is standard error that can be waited on for a line.
type logWatch struct {
	mu    sync.Mutex
	text  bytes.Buffer
	lines chan string
}

func (l *logWatch) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text.Write(b)
	for line := range strings.Lines(string(b)) {
		select {
		case l.lines <- line:
		default:
		}
	}
	return len(b), nil
}

// bizd runs the command until stop is called, which returns its exit status.
func bizd(t *testing.T, config string) (service, web string, stop func() int) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	log := &logWatch{lines: make(chan string, 100)}
	code := make(chan int, 1)
	go func() { code <- execute(ctx, []string{"run", "-c", config}, nil, io.Discard, log) }()
	stop = func() int { cancel(); return <-code }
	addr := regexp.MustCompile(`msg=ready service=(\S+) http=(\S+)`)
	for {
		select {
		case line := <-log.lines:
			if m := addr.FindStringSubmatch(line); m != nil {
				return m[1], m[2], stop
			}
		case c := <-code:
			t.Fatalf("ended with %d: %s", c, log.text.String())
		}
	}
}

func writeConfig(t *testing.T, dir, more string) string {
	t.Helper()
	path := filepath.Join(dir, "bizd.yaml")
	text := "data_dir: " + filepath.Join(dir, "data") + "\nlisten: 127.0.0.1:0\nhttp: { listen: \"127.0.0.1:0\" }\n" + more
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func get(t *testing.T, url string) string {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("%s: %s, %v", url, resp.Status, err)
	}
	return string(b)
}

func TestRunServesAndKeeps(t *testing.T) {
	dir := t.TempDir()
	file := writeConfig(t, dir, "")
	addr, web, stop := bizd(t, file)
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := adminv1.NewUserServiceClient(conn).CreateUser(t.Context(), &adminv1.CreateUserRequest{Id: "ann"}); err != nil {
		t.Fatal(err)
	}
	if h, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{}); err != nil || h.Status != healthv1.HealthCheckResponse_SERVING {
		t.Errorf("health: %v, %v", h, err)
	}
	get(t, "http://"+web+"/livez")
	get(t, "http://"+web+"/readyz")
	if m := get(t, "http://"+web+"/metrics"); !strings.Contains(m, `sluice_service_records{dataset="users"} 1`) {
		t.Errorf("metrics:\n%.2000s", m)
	}

	// A second one on the same data says so and touches nothing.
	var stderr bytes.Buffer
	if code := execute(t.Context(), []string{"run", "-c", file}, nil, io.Discard, &stderr); code != exitFailure || !strings.Contains(stderr.String(), "another process has it open") {
		t.Errorf("second: %d, %s", code, stderr.String())
	}

	if code := stop(); code != 0 {
		t.Errorf("stopped with %d", code)
	}
	archive := filepath.Join(dir, "backup.tar")
	for _, want := range []int{0, exitFailure} { // the second finds the archive there
		if code := execute(t.Context(), []string{"backup", "-c", file, archive}, nil, io.Discard, &stderr); code != want {
			t.Errorf("backup: %d, %s; want %d", code, stderr.String(), want)
		}
	}
	if code := execute(t.Context(), []string{"restore", "-c", file, archive}, nil, io.Discard, &stderr); code != exitFailure {
		t.Errorf("restored over a store: %d", code)
	}
	other := writeConfig(t, t.TempDir(), "")
	for _, args := range [][]string{{"restore", "-c", other, archive}, {"migrate", "-c", other}} {
		if code := execute(t.Context(), args, nil, io.Discard, &stderr); code != 0 {
			t.Errorf("%v: %d, %s", args, code, stderr.String())
		}
	}
	addr, _, stop = bizd(t, other)
	defer stop()
	conn2, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn2.Close()
	if u, err := adminv1.NewUserServiceClient(conn2).GetUser(t.Context(), &adminv1.GetUserRequest{Id: "ann"}); err != nil || u.User.Id != "ann" {
		t.Errorf("after a restore: %v, %v", u, err)
	}
}

func TestBackupOfARunningService(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	file := filepath.Join(dir, "bizd.yaml")
	text := "data_dir: " + filepath.Join(dir, "data") + "\nlisten: unix:" + socket + "\nhttp: { listen: \"127.0.0.1:0\" }\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	_, _, stop := bizd(t, file)
	defer stop()
	var stderr bytes.Buffer
	archive := filepath.Join(dir, "backup.tar")
	if code := execute(t.Context(), []string{"backup", "-c", file, archive}, nil, io.Discard, &stderr); code != 0 {
		t.Fatalf("backup: %d, %s", code, stderr.String())
	}
	if fi, err := os.Stat(archive); err != nil || fi.Size() < 8192 {
		t.Errorf("archive: %v, %v", fi, err)
	}
}

func TestExitStatus(t *testing.T) {
	dir := t.TempDir()
	damaged := t.TempDir()
	if err := os.Mkdir(filepath.Join(damaged, "data"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(damaged, "data", "store.db"), []byte("not a store"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args           []string
		code           int
		stdout, stderr string
	}{
		{[]string{"check", "-c", writeConfig(t, dir, "")}, 0, "", ""},
		{[]string{"check", "-c", writeConfig(t, t.TempDir(), "colour: red\ntransfers: 0\n")}, 2, ":4:1: colour: ", ""},
		{[]string{"check", "-c", writeConfig(t, t.TempDir(), "store: \"postgres://u@h/d\"\n")}, 2, "store: a PostgreSQL store is not part", ""},
		{[]string{"check"}, 2, "", "config"},
		{[]string{"run", "-c", writeConfig(t, t.TempDir(), "colour: red\n")}, 2, "", "colour"},
		{[]string{"run", "-c", writeConfig(t, damaged, "")}, 1, "", "is not a store of this service"},
		{[]string{"migrate", "-c", writeConfig(t, damaged, "")}, 1, "", "is not a store of this service"},
		{[]string{"backup", "-c", writeConfig(t, damaged, ""), filepath.Join(damaged, "a")}, 1, "", "is not a store of this service"},
		{[]string{"dance"}, 2, "", "dance"},
		{[]string{"restore", "-c", writeConfig(t, dir, ""), filepath.Join(dir, "nothing")}, 1, "", "nothing"},
	} {
		var stdout, stderr bytes.Buffer
		if code := execute(t.Context(), c.args, nil, &stdout, &stderr); code != c.code {
			t.Errorf("%v: exit status %d; want %d (%s%s)", c.args, code, c.code, stdout.String(), stderr.String())
		}
		if !strings.Contains(stdout.String(), c.stdout) || !strings.Contains(stderr.String(), c.stderr) {
			t.Errorf("%v says %q and %q; want %q and %q", c.args, stdout.String(), stderr.String(), c.stdout, c.stderr)
		}
	}
	if b, err := os.ReadFile(filepath.Join(damaged, "data", "store.db")); err != nil || string(b) != "not a store" {
		t.Errorf("the damaged store became %q, %v", b, err)
	}
}
