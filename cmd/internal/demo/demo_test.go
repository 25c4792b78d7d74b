package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
)

// runIn runs the demo with a temporary folder of its own and checks that nothing stays in it.
func runIn(t *testing.T, ctx context.Context, o Options) (failed int, out, errs string) {
	t.Helper()
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	var stdout, stderr bytes.Buffer
	o.Out, o.Err = &stdout, &stderr
	failed, err := Run(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(tmp)
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	return failed, stdout.String(), stderr.String()
}

// The demo passes, and its JSON has the shape and the names that others rely on.
func TestDemo(t *testing.T) {
	failed, out, errs := runIn(t, t.Context(), Options{JSON: true})
	t.Log("\n" + out)
	if failed > 0 || errs != "" {
		t.Errorf("%d failed; standard error:\n%s", failed, errs)
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	var names []string
	for _, line := range lines[:len(lines)-1] {
		var r map[string]any
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		name, _ := r["check"].(string)
		ok, isBool := r["ok"].(bool)
		_, isNumber := r["ms"].(float64)
		detail, _ := r["detail"].(string)
		if !ok || !isBool || !isNumber || detail == "" || len(r) != 4 {
			t.Errorf("unexpected: %s", line)
		}
		names = append(names, name)
	}
	want := strings.Fields(`udp tcp dot doh1 doh2 blocked-for-one exception cname-target-blocked rewrite safe-search
		blocked-after-change unblocked-after-change stranger-refused nxdomain big-answer-over-tcp dead-server-avoided
		secure-ad bogus-servfail service-down restart-from-snapshot catch-up`)
	if !slices.Equal(names, want) {
		t.Errorf("checks %v\n  want %v", names, want)
	}
	if last := lines[len(lines)-1]; last != `{"passed":21,"failed":0}` {
		t.Errorf("last line %s", last)
	}
}

// named returns some of the checks.
func named(names ...string) (some []check) {
	for _, c := range checks {
		if slices.Contains(names, c.name) {
			some = append(some, c)
		}
	}
	return some
}

// A system that does not do what it should is found out: here alice has lost her exception. People see what
// both users got, which check failed and what the parts logged.
func TestFailedCheck(t *testing.T) {
	failed, out, errs := runIn(t, t.Context(), Options{
		checks: named("exception", "rewrite"),
		sabotage: func(ctx context.Context, s *system) error {
			if _, err := s.service.setRules(ctx, alice.name, ""); err != nil {
				return err
			}
			_, err := s.eventually(ctx, alice, host("banner.ads.example."), blocked)
			return err
		},
	})
	if failed != 1 || !strings.HasSuffix(out, "\n1 passed, 1 failed\n") {
		t.Errorf("%d failed:\n%s", failed, out)
	}
	for _, part := range []string{
		"alice got 0.0.0.0 for banner.ads.example. A from resolver-1 over UDP, and should get 198.18.10.2",
		"list ads, line 3: ||ads.example^\n", "list ads, line 4: ||tracker.example^ (its alias collect.tracker.example)\n",
		"user rule, line 2: @@||banner.ads.example^\n",
	} {
		if !strings.Contains(out, part) {
			t.Errorf("%q is not in\n%s", part, out)
		}
	}
	if !strings.Contains(errs, "part=resolver-2") {
		t.Errorf("no log of the parts in %q", errs)
	}
}

// A resolver that is gone fails what needs it, and nothing else.
func TestPartsThatDie(t *testing.T) {
	failed, out, _ := runIn(t, t.Context(), Options{
		JSON:     true,
		checks:   named("rewrite", "nxdomain", "restart-from-snapshot"),
		sabotage: func(_ context.Context, s *system) error { return s.nodes[1].stop() },
	})
	if failed != 2 || strings.Count(out, "resolver-2 is not running") != 2 {
		t.Errorf("%d failed:\n%s", failed, out)
	}
}

// What did not run has failed.
func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	failed, out, _ := runIn(t, ctx, Options{JSON: true})
	if failed != len(checks) || strings.Count(out, `"ok":false,"ms":0,"detail":"did not run`) != len(checks) {
		t.Errorf("%d failed:\n%s", failed, out)
	}
}

// Held, the demo goes on serving until it is ended, and tells how to ask. What it prints on standard output
// stays one object a line.
func TestHold(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	failed, out, errs := runIn(t, ctx, Options{
		JSON: true, Hold: true, checks: []check{},
		held: func(s *system) {
			defer cancel()
			for _, tr := range []transport{udp, dot, doh1} {
				if _, err := s.expect(ctx, s.nodes[0], alice, tr, host("www.ads.example."), blocked); err != nil {
					t.Error(err)
				}
			}
		},
	})
	if failed != 0 || out != "{\"passed\":0,\"failed\":0}\n" {
		t.Errorf("%d failed: %q", failed, out)
	}
	for _, part := range []string{
		"-b 127.0.0.2 www.ads.example\n", "-b 127.0.0.3 ",
		"+tls-sni=alice-phone.dns.demo.test ", "+tls-sni=bob-laptop.dns.demo.test ",
		"/dns-query/alice-phone?dns=", "/dns-query/bob-laptop?dns=",
	} {
		if !strings.Contains(errs, part) {
			t.Errorf("%q is not in\n%s", part, errs)
		}
	}
}
