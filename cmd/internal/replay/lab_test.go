// Package replay has tests of whole processes: outages of the past played again, and comparisons with another
// resolver. They build cmd/sluice and run it as an operator would.
package replay

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// TestLabParity asks this resolver and Unbound the same questions in a miniature Internet of NSD servers and
// compares RCODE, AD and answer. It runs inside the network namespace of that lab, whose folder SLUICE_LAB names:
//
//	SLUICE_LAB=DIR lab/in go test -run TestLabParity -v ./cmd/internal/replay
//
// The folder holds root.hints, root.ds, special.tsv (name, type, RCODE of a validating resolver, …) and
// queries/{mix,coldzones,cold,nxdomain}.txt (lines "NAME TYPE"). With -long it asks 20,000 questions.
func TestLabParity(t *testing.T) {
	lab := os.Getenv("SLUICE_LAB")
	if lab == "" {
		t.Skip("SLUICE_LAB names no lab; see the comment of this test")
	}
	if c, err := net.DialTimeout("udp", "42.1.0.1:53", time.Second); err != nil {
		t.Skipf("not inside the lab's network namespace: %v", err)
	} else {
		c.Close()
	}
	unboundBin, err := exec.LookPath("unbound")
	if err != nil {
		t.Skip("unbound is not installed")
	}
	dir := t.TempDir()
	cert, key := writeCertificate(t, dir, "dns.test")
	build(t, dir)
	const sluicePort, dotPort, dohPort, unboundPort = 5390, 5391, 5392, 5395
	config := fmt.Sprintf(`
data_dir: %q
listen:
  udp: ["127.0.0.1:%d"]
  tcp: ["127.0.0.1:%d"]
  dot: ["127.0.0.1:%d"]
  doh: ["127.0.0.1:%d"]
tls: { certificates: [{ cert: %q, key: %q }] }
stranger: serve
recursion: { root_hints_file: %q, prime_root: false, refresh_root: false, do_not_query: [], local_zones: none }
dnssec: { trust_anchor_file: %q, trust_anchor_updates: false, trust_anchor_signalling: false }
users: { service_listen: "" }
http: { listen: "" }
admin: { listen: "" }
`, filepath.Join(dir, "data"), sluicePort, sluicePort, dotPort, dohPort, cert, key, filepath.Join(lab, "root.hints"), filepath.Join(lab, "root.ds"))
	write(t, filepath.Join(dir, "sluice.yaml"), config)
	start(t, filepath.Join(dir, "sluice"), "run", "-c", filepath.Join(dir, "sluice.yaml"))
	write(t, filepath.Join(dir, "unbound.conf"), fmt.Sprintf(`
server:
  interface: 127.0.0.1
  port: %d
  num-threads: 1
  username: ""
  chroot: ""
  directory: %q
  pidfile: ""
  use-syslog: no
  do-ip6: no
  do-not-query-localhost: no
  root-hints: %q
  trust-anchor-file: %q
  local-zone: "in-addr.arpa." nodefault
  minimal-responses: yes
`, unboundPort, dir, filepath.Join(lab, "root.hints"), filepath.Join(lab, "root.ds")))
	start(t, unboundBin, "-d", "-c", filepath.Join(dir, "unbound.conf"))
	sluice := plain("udp", sluicePort)
	unbound := plain("udp", unboundPort)
	for _, ask := range []asker{sluice, unbound} {
		until(t, func() bool { m, err := ask("www.plain.com.", dns.TypeA); return err == nil && m.Rcode == 0 })
	}

	count := 1000
	if *long {
		count = 5000
	}
	questions := mix(t, filepath.Join(lab, "queries", "mix.txt"), count)
	parity := func(what string, ask asker, qs []question) {
		t.Helper()
		diffs, servfails, late := 0, 0, 0
		var mu sync.Mutex
		var wg sync.WaitGroup
		slots := make(chan struct{}, 16)
		for _, q := range qs {
			slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-slots }()
				got, err1 := ask(q.name, q.typ)
				want, err2 := unbound(q.name, q.typ)
				why := ""
				if err1 == nil && got.Rcode == dns.RcodeServerFailure {
					// Servers that share their processor with others may answer too late, now and then. It has to pass.
					why = "SERVFAIL at first, extended error " + extended(got)
					got, err1 = ask(q.name, q.typ)
				}
				mu.Lock()
				defer mu.Unlock()
				if why != "" {
					t.Logf("%s %s %s: %s", what, q.name, dns.TypeToString[q.typ], why)
					late++
				}
				if err1 != nil || err2 != nil {
					t.Errorf("%s %s %s: %v, %v", what, q.name, dns.TypeToString[q.typ], err1, err2)
					return
				}
				if got.Rcode == dns.RcodeServerFailure {
					servfails++
				}
				if a, b := outcome(got), outcome(want); a != b {
					if diffs++; diffs <= 20 {
						t.Errorf("%s %s %s:\n sluice %s\nunbound %s", what, q.name, dns.TypeToString[q.typ], a, b)
					}
				}
			})
		}
		wg.Wait()
		t.Logf("%s: %d questions, %d differences, %d SERVFAIL, %d at first", what, len(qs), diffs, servfails, late)
		if servfails > 0 || late > len(qs)/100 || *long && late > 0 { // by hand, on a machine that does nothing else, none is late
			t.Errorf("%s: %d SERVFAIL, %d at first", what, servfails, late)
		}
	}
	parity("udp", sluice, questions)
	for _, file := range []string{"coldzones", "cold", "nxdomain"} {
		parity(file, sluice, mix(t, filepath.Join(lab, "queries", file+".txt"), count))
	}
	parity("tcp", plain("tcp", sluicePort), questions[:200])
	parity("dot", dot(dotPort), questions[:200])
	parity("doh", doh(t, dohPort), questions[:200])

	f, err := os.Open(filepath.Join(lab, "special.tsv"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	n := 0
	for s := bufio.NewScanner(f); s.Scan(); {
		c := strings.Split(s.Text(), "\t")
		// Silent, lossy and self-referring servers depend on time and luck.
		if len(c) < 5 || c[0] == "name" || strings.Contains(c[0], "dead-all") || strings.Contains(c[0], "lossy") || strings.Contains(c[0], "lame-referral") {
			continue
		}
		n++
		m, err := sluice(dns.Fqdn(c[0]), dns.StringToType[c[1]])
		if err == nil && m.Rcode == dns.RcodeServerFailure && c[2] != "SERVFAIL" { // as above
			m, err = sluice(dns.Fqdn(c[0]), dns.StringToType[c[1]])
		}
		if err != nil || dns.RcodeToString[m.Rcode] != c[2] || m.AuthenticatedData != (c[3] == "ad") {
			t.Errorf("special %s %s: %v, %v; want %s %s (%s)", c[0], c[1], err, m, c[2], c[3], c[4])
		}
	}
	t.Logf("special: %d rows", n)
}

// extended is what a response says of its cause (RFC 8914).
func extended(m *dns.Msg) string {
	if opt := m.IsEdns0(); opt != nil {
		for _, o := range opt.Option {
			if e, ok := o.(*dns.EDNS0_EDE); ok {
				return e.String()
			}
		}
	}
	return "it does not say why"
}

type question struct {
	name string
	typ  uint16
}

// mix reads the first n distinct questions of a query file, or all if there are fewer.
func mix(t *testing.T, file string, n int) (qs []question) {
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	seen := map[question]bool{}
	for s := bufio.NewScanner(f); s.Scan() && len(qs) < n; {
		name, typ, _ := strings.Cut(s.Text(), " ")
		q := question{dns.Fqdn(name), dns.StringToType[typ]}
		if !seen[q] {
			seen[q] = true
			qs = append(qs, q)
		}
	}
	if len(qs) < 400 { // the smallest lab has 475 zones
		t.Fatalf("%s has %d distinct questions only", file, len(qs))
	}
	return qs
}

// outcome is RCODE, AD and answer RRsets without signatures and TTLs, sorted, letters as they may differ.
func outcome(m *dns.Msg) string {
	var rrs []string
	for _, rr := range m.Answer {
		if rr.Header().Rrtype == dns.TypeRRSIG {
			continue
		}
		rr = dns.Copy(rr)
		rr.Header().Ttl = 0
		rrs = append(rrs, strings.ToLower(rr.String()))
	}
	slices.Sort(rrs)
	rcode := dns.RcodeToString[m.Rcode]
	if m.AuthenticatedData {
		rcode += " AD"
	}
	return rcode + " " + strings.Join(rrs, " | ")
}

// An asker asks one resolver over one transport.
type asker func(name string, typ uint16) (*dns.Msg, error)

func message(name string, typ uint16) *dns.Msg {
	m := new(dns.Msg)
	m.SetQuestion(name, typ)
	m.SetEdns0(1232, false)
	m.AuthenticatedData = true // asks whether the answer is authentic (RFC 6840 section 5.7)
	return m
}

func plain(network string, port int) asker {
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	return func(name string, typ uint16) (*dns.Msg, error) {
		c := dns.Client{Net: network, Timeout: 10 * time.Second}
		m, _, err := c.Exchange(message(name, typ), addr)
		for range 5 { // a busy machine may have dropped the datagram
			if network != "udp" || !errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			m, _, err = c.Exchange(message(name, typ), addr)
		}
		if err == nil && m.Truncated && network == "udp" {
			c.Net = "tcp"
			m, _, err = c.Exchange(message(name, typ), addr)
		}
		return m, err
	}
}

func dot(port int) asker {
	return func(name string, typ uint16) (*dns.Msg, error) {
		c := dns.Client{Net: "tcp-tls", Timeout: time.Minute, TLSConfig: &tls.Config{InsecureSkipVerify: true, ServerName: "dns.test"}}
		m, _, err := c.Exchange(message(name, typ), fmt.Sprintf("127.0.0.1:%d", port))
		return m, err
	}
}

func doh(t *testing.T, port int) asker {
	tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true}
	t.Cleanup(tr.CloseIdleConnections)
	c := &http.Client{Transport: tr, Timeout: time.Minute}
	return func(name string, typ uint16) (*dns.Msg, error) {
		q := message(name, typ)
		q.Id = 0
		wire, err := q.Pack()
		if err != nil {
			return nil, err
		}
		r, err := c.Get(fmt.Sprintf("https://127.0.0.1:%d/dns-query?dns=%s", port, base64.RawURLEncoding.EncodeToString(wire)))
		if err != nil {
			return nil, err
		}
		defer r.Body.Close()
		body, err := io.ReadAll(r.Body)
		if err != nil || r.StatusCode != 200 || r.ProtoMajor != 2 {
			return nil, fmt.Errorf("%s %s: %v", r.Proto, r.Status, err)
		}
		m := new(dns.Msg)
		return m, m.Unpack(body)
	}
}

// build compiles cmd/sluice into dir.
func build(t *testing.T, dir string) {
	t.Helper()
	out, err := exec.Command("go", "build", "-buildvcs=false", "-o", dir, "github.com/sluice-dns/sluice/cmd/sluice").CombinedOutput()
	if err != nil {
		t.Fatalf("building cmd/sluice: %v\n%s", err, out)
	}
}

// start runs a process until the test ends; its output is shown if the test fails.
func start(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	c := exec.CommandContext(ctx, name, args...)
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) }
	c.WaitDelay = 10 * time.Second
	if err := c.Start(); err != nil {
		cancel()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		c.Wait()
		if t.Failed() {
			t.Logf("%s:\n%s", filepath.Base(name), out.Bytes()[:min(out.Len(), 4000)])
		}
	})
	return c
}

// patience is how long a test waits for anything that takes moments on an idle machine.
const patience = 2 * time.Minute

// until waits for an event outside this process.
func until(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); {
		if time.Now().After(end) {
			t.Fatal("it did not come to pass in time")
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
