package replay

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

var long = flag.Bool("long", false, "run the long replays too")

// A world is real processes on loopback: a business-logic service and resolvers that follow it, in front of a
// simulated Internet that this test process serves.
type world struct {
	t         *testing.T
	dir       string
	sim       *siminternet.Internet
	port      uint16 // of authoritative servers
	service   string
	bizd      *proc
	resolvers []*node

	conn     *grpc.ClientConn
	users    adminv1.UserServiceClient
	policies adminv1.PolicyServiceClient
	lists    adminv1.ListServiceClient
}

// A node is a resolver process with what it needs to be started again. Its addresses are others after each start: a port
// that was free before may be one from which another resolver asks now.
type node struct {
	*proc
	config              string
	udp, dot, doh, http string
}

// A proc is a running program whose log lines can be waited for.
type proc struct {
	t    *testing.T
	cmd  *exec.Cmd
	done chan struct{}

	mu    sync.Mutex
	lines []string
	more  chan struct{}
}

func run(t *testing.T, name string, args ...string) *proc {
	t.Helper()
	p := &proc{t: t, cmd: exec.Command(name, args...), done: make(chan struct{}), more: make(chan struct{})}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stdout, p.cmd.Stderr = w, w
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	go func() {
		defer close(p.done)
		for s := bufio.NewScanner(r); s.Scan(); {
			p.mu.Lock()
			p.lines = append(p.lines, s.Text())
			close(p.more)
			p.more = make(chan struct{})
			p.mu.Unlock()
		}
		p.cmd.Wait()
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			p.mu.Lock()
			defer p.mu.Unlock()
			t.Logf("%s:\n%s", filepath.Base(name), strings.Join(p.lines[max(0, len(p.lines)-30):], "\n"))
		}
	})
	return p
}

// wait returns the first line that matches, waiting for it.
func (p *proc) wait(pattern string) string {
	p.t.Helper()
	re := regexp.MustCompile(pattern)
	limit := time.After(patience)
	for i := 0; ; {
		p.mu.Lock()
		lines, more := p.lines, p.more
		p.mu.Unlock()
		for ; i < len(lines); i++ {
			if re.MatchString(lines[i]) {
				return lines[i]
			}
		}
		select {
		case <-more:
		case <-p.done:
			p.t.Fatalf("the process ended without a line %q:\n%s", pattern, strings.Join(lines, "\n"))
		case <-limit:
			p.t.Fatalf("no line %q in time:\n%s", pattern, strings.Join(lines, "\n"))
		}
	}
}

// kill is kill -9, and waits for the end.
func (p *proc) kill() {
	p.cmd.Process.Kill()
	<-p.done
}

// binaries are built once for all tests.
var binaries = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "sluice-replay-")
	if err != nil {
		return "", err
	}
	out, err := exec.Command("go", "build", "-buildvcs=false", "-o", dir, "github.com/sluice-dns/sluice/cmd/sluice", "github.com/sluice-dns/sluice/cmd/sluice-bizd").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("building: %v\n%s", err, out)
	}
	return dir, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if dir, err := binaries(); err == nil {
		os.RemoveAll(dir)
	}
	os.Exit(code)
}

// newWorld starts everything: zones are served besides those of the standard Internet.
func newWorld(t *testing.T, resolvers int, zones []siminternet.Zone) *world {
	t.Helper()
	w := &world{t: t, dir: t.TempDir()}
	var err error
	if w.sim, err = siminternet.New(time.Now(), zones...); err != nil {
		t.Fatal(err)
	}
	siminternet.StandardBehaviours(w.sim)
	if w.port, err = w.sim.ListenLoopback(0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.sim.Close() })
	write(t, filepath.Join(w.dir, "hints"), w.sim.RootHints())
	write(t, filepath.Join(w.dir, "anchor"), w.sim.TrustAnchor())
	w.service = freeAddress(t)
	write(t, filepath.Join(w.dir, "bizd.yaml"), fmt.Sprintf("data_dir: %q\nlisten: %q\nhttp: { listen: \"\" }\nfetch: { private_addresses: true }\n", filepath.Join(w.dir, "bizd"), w.service))
	w.startService()
	if w.conn, err = grpc.NewClient(w.service, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.conn.Close() })
	w.users, w.policies, w.lists = adminv1.NewUserServiceClient(w.conn), adminv1.NewPolicyServiceClient(w.conn), adminv1.NewListServiceClient(w.conn)
	cert, key := writeCertificate(t, w.dir, "dns.test", "*.dns.test")
	for i := range resolvers {
		n := &node{config: filepath.Join(w.dir, fmt.Sprintf("resolver%d.yaml", i))}
		write(t, n.config, fmt.Sprintf(`
data_dir: %q
node: { id: "node-%d" }
listen: { udp: ["127.0.0.1:0"], tcp: ["127.0.0.1:0"], dot: ["127.0.0.1:0"], doh: ["127.0.0.1:0"], workers: 1 }
tls: { certificates: [{ cert: %q, key: %q }] }
identify: { server_names: ["dns.test"] }
recursion: { root_hints_file: %q, upstream_port: %d, do_not_query: [], local_zones: none, ipv6: false, prime_root: false }
dnssec: { trust_anchor_file: %q, trust_anchor_updates: false, trust_anchor_signalling: false }
users: { services: [%q] }
limits: { class: 512m }
http: { listen: "127.0.0.1:0" }
admin: { listen: "" }
`, filepath.Join(w.dir, fmt.Sprintf("resolver%d", i)), i, cert, key, filepath.Join(w.dir, "hints"), w.port, filepath.Join(w.dir, "anchor"), w.service))
		w.resolvers = append(w.resolvers, n)
		w.startResolver(n)
	}
	return w
}

func (w *world) binary(name string) string {
	w.t.Helper()
	dir, err := binaries()
	if err != nil {
		w.t.Fatal(err)
	}
	return filepath.Join(dir, name)
}

func (w *world) startService() {
	w.bizd = run(w.t, w.binary("sluice-bizd"), "run", "-c", filepath.Join(w.dir, "bizd.yaml"))
	until(w.t, func() bool {
		c, err := net.Dial("tcp", w.service)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
}

// startResolver starts a resolver and waits until it is ready.
func (w *world) startResolver(n *node) {
	w.t.Helper()
	n.proc = run(w.t, w.binary("sluice"), "run", "-c", n.config)
	line := n.wait("msg=ready")
	for key, addr := range map[string]*string{"udp": &n.udp, "dot": &n.dot, "doh": &n.doh, "http": &n.http} {
		m := regexp.MustCompile(` ` + key + `=(\S+)`).FindStringSubmatch(line)
		if m == nil {
			w.t.Fatalf("no address of %s in %s", key, line)
		}
		*addr = m[1]
	}
}

// freeAddress is an address for the service, which is found at the same one when it comes back. Its port is none that
// the system gives out meanwhile.
func freeAddress(t *testing.T) string {
	t.Helper()
	for {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 12000+rand.IntN(10000)))
		if err != nil {
			continue
		}
		defer l.Close()
		return l.Addr().String()
	}
}

// user creates a user with one device, linked to a source address.
func (w *world) user(id, device, source string) {
	w.t.Helper()
	if _, err := w.users.CreateUser(w.t.Context(), &adminv1.CreateUserRequest{Id: id}); err != nil {
		w.t.Fatal(err)
	}
	if _, err := w.users.CreateDevice(w.t.Context(), &adminv1.CreateDeviceRequest{User: id, Device: &userv1.Device{Id: device, Links: []string{source}}}); err != nil {
		w.t.Fatal(err)
	}
}

// list adds a catalogue list.
func (w *world) list(id string, text []byte) {
	w.t.Helper()
	s, err := w.lists.AddList(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	send := func(r *adminv1.AddListRequest) {
		if err := s.Send(r); err != nil && err != io.EOF {
			w.t.Fatal(err)
		}
	}
	send(&adminv1.AddListRequest{Part: &adminv1.AddListRequest_Header_{Header: &adminv1.AddListRequest_Header{Id: id, Name: id}}})
	for len(text) > 0 {
		n := min(len(text), 1<<20)
		send(&adminv1.AddListRequest{Part: &adminv1.AddListRequest_Data{Data: text[:n]}})
		text = text[n:]
	}
	if _, err := s.CloseAndRecv(); err != nil {
		w.t.Fatal(err)
	}
}

// rules replaces a user's own rules.
func (w *world) rules(ctx context.Context, user string, lines ...string) error {
	_, err := w.policies.SetRules(ctx, &adminv1.SetRulesRequest{Target: user, Text: []byte(strings.Join(lines, "\n"))})
	return err
}

// udpFrom asks over UDP from a source address. On a busy machine a query may have waited for longer than it is worth
// answering: its client repeats it.
func udpFrom(source, server string) asker {
	return func(name string, typ uint16) (m *dns.Msg, err error) {
		c := dns.Client{Timeout: 4 * time.Second, Dialer: &net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(source), 0))}}
		for range patience / c.Timeout {
			if m, _, err = c.Exchange(message(name, typ), server); !errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
		}
		return m, err
	}
}

// dotAs asks over one DoT connection as a device.
func dotAs(t *testing.T, device, server string) asker {
	c := dns.Client{Net: "tcp-tls", Timeout: patience, TLSConfig: &tls.Config{InsecureSkipVerify: true, ServerName: device + ".dns.test"}}
	conn, err := c.Dial(server)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return func(name string, typ uint16) (*dns.Msg, error) {
		m, _, err := c.ExchangeWithConn(message(name, typ), conn)
		return m, err
	}
}

// dohAs asks over DoH as a device.
func dohAs(t *testing.T, device, server string) asker {
	tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true, IdleConnTimeout: time.Second}
	t.Cleanup(tr.CloseIdleConnections)
	c := &http.Client{Transport: tr, Timeout: patience}
	return func(name string, typ uint16) (*dns.Msg, error) {
		wire, err := message(name, typ).Pack()
		if err != nil {
			return nil, err
		}
		r, err := c.Get(fmt.Sprintf("https://%s/dns-query/%s?dns=%s", server, device, base64.RawURLEncoding.EncodeToString(wire)))
		if err != nil {
			return nil, err
		}
		defer r.Body.Close()
		body, err := io.ReadAll(r.Body)
		if err != nil || r.StatusCode != 200 {
			return nil, fmt.Errorf("%s: %v", r.Status, err)
		}
		m := new(dns.Msg)
		return m, m.Unpack(body)
	}
}

// persisted reports whether a resolver has all its user data on disk; it writes it in groups.
func persisted(t *testing.T, n *node) bool {
	t.Helper()
	r, err := http.Get("http://" + n.http + "/metrics")
	if err != nil {
		t.Log(err)
		return false
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		t.Log(err)
		return false
	}
	value := func(name string) string {
		_, rest, found := strings.Cut(string(body), "\n"+name+`{dataset="users"} `)
		if !found {
			t.Fatalf("no metric %s", name)
		}
		v, _, _ := strings.Cut(rest, "\n")
		return v
	}
	return value("sluice_dataset_revision") == value("sluice_dataset_persisted_revision")
}
