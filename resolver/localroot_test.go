package resolver_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

// longRoot is the standard Internet, with a root zone that expires in a day: its signatures are a day old already.
func longRoot(t *testing.T) *siminternet.Internet {
	t.Helper()
	zones := siminternet.StandardZones()
	for i := range zones {
		if zones[i].Name == "." {
			zones[i].Records += "\n@ 86400 SOA a.root-servers.net. hostmaster. 1 3600 600 172800 300\n"
		}
	}
	in, err := siminternet.New(time.Now(), zones...)
	if err != nil {
		t.Fatal(err)
	}
	siminternet.StandardBehaviours(in)
	return in
}

// rootZone asks a server of the simulated root for all there is in its zone.
func rootZone(t *testing.T, in *siminternet.Internet) string {
	t.Helper()
	var b strings.Builder
	seen := map[string]bool{}
	ask := func(name string, typ uint16) (m *dns.Msg) {
		m = new(dns.Msg).SetQuestion(name, typ)
		m.SetEdns0(4096, true)
		wire, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		packets, _ := in.Handle(in.Servers(".")[0], siminternet.TCP, netip.MustParseAddrPort("127.0.0.1:1234"), wire)
		if err := m.Unpack(packets[0]); err != nil {
			t.Fatal(err)
		}
		for _, rr := range slices.Concat(m.Answer, m.Ns, m.Extra) {
			ttl := rr.Header().Ttl
			rr.Header().Ttl = 0 // denials have the SOA record with another
			if s := rr.String(); rr.Header().Rrtype != dns.TypeOPT && !seen[s] {
				seen[s] = true
				rr.Header().Ttl = ttl
				fmt.Fprintln(&b, rr)
			}
		}
		return m
	}
	for _, typ := range []uint16{dns.TypeSOA, dns.TypeNS, dns.TypeDNSKEY} {
		ask(".", typ)
	}
	for next := "."; ; { // along the NSEC chain
		var after string
		probe := strings.TrimSuffix(next, ".") + "0."
		for _, rr := range ask(probe, dns.TypeA).Ns {
			if nsec, ok := rr.(*dns.NSEC); ok && (next == "." || nsec.Hdr.Name == next) {
				after = nsec.NextDomain
			}
		}
		if after == "." || after == "" {
			return b.String()
		}
		next = after
		ask(next, dns.TypeNS)
	}
}

func localRoot(t *testing.T, text string) *resolver.LocalRoot {
	t.Helper()
	file := filepath.Join(t.TempDir(), "root.zone")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	z, err := resolver.OpenLocalRoot(file)
	if err != nil {
		t.Fatal(err)
	}
	return z
}

// warnings keeps what is logged.
type warnings struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (w *warnings) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(p)
}

// about counts lines, and forgets them.
func (w *warnings) about(what string) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for line := range strings.Lines(w.b.String()) {
		if strings.Contains(line, what) && strings.Contains(line, "level=WARN") {
			n++
		}
	}
	w.b.Reset()
	return n
}

// rootLab is a lab with a copy of the root zone, which edit may change; logged is what it warns of.
func rootLab(t *testing.T, edit func(zone string) string) (l *lab, logged *warnings, asked func() int) {
	in := longRoot(t)
	zone := rootZone(t, in)
	if edit != nil {
		zone = edit(zone)
	}
	logged = new(warnings)
	l = newLabIn(t, in, func(o *resolver.Options) {
		o.Logger = slog.New(slog.NewTextHandler(logged, nil))
		o.Recursion.Prime, o.Recursion.LocalRoot = true, localRoot(t, zone)
	})
	in.ResetLog()
	servers := in.Servers(".")
	return l, logged, func() int {
		return in.Count(func(e siminternet.LogEntry) bool {
			return slices.Contains(servers, e.Server) && !strings.HasSuffix(strings.ToLower(e.Name), "root-servers.net.")
		})
	}
}

// With a copy of the root zone every name has the outcome that it has without, though no server of the root is up, and
// none is asked.
func TestLocalRoot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, logged, asked := rootLab(t, nil)
		defer l.stop()
		for _, a := range l.sim.Servers(".") {
			l.sim.SetBehaviour(a, siminternet.Behaviour{Silent: true})
		}
		for _, e := range append(siminternet.Expect(),
			siminternet.Expectation{Name: "no.such.tld.", Type: dns.TypeA, RCode: dns.RcodeNameError, Status: siminternet.Secure},
			siminternet.Expectation{Name: "lab.", Type: dns.TypeDS, Status: siminternet.Secure},
			siminternet.Expectation{Name: ".", Type: dns.TypeTXT, Status: siminternet.Secure},
		) {
			if strings.HasSuffix(e.Name, "root-servers.net.") {
				continue // a zone of the same servers
			}
			for _, when := range []string{"cold", "warm"} {
				m, err := l.ask(e.Name, e.Type, func(m *dns.Msg) { m.AuthenticatedData = true })
				if err != nil {
					t.Errorf("%s %s %s: %v", when, e.Name, dns.TypeToString[e.Type], err)
					break
				}
				rcode, want := e.RCode, slices.Clone(e.Answer)
				if e.Status == siminternet.Bogus {
					rcode, want = dns.RcodeServerFailure, nil
				}
				slices.Sort(want)
				if m.Rcode != rcode || !slices.Equal(siminternet.AnswerText(m.Answer), want) || m.AuthenticatedData != (e.Status == siminternet.Secure) {
					t.Errorf("%s %s %s:\n got %s AD=%v %v\nwant %s %v %v", when, e.Name, dns.TypeToString[e.Type], text(m), m.AuthenticatedData, m.IsEdns0(), dns.RcodeToString[rcode], want, e.Status)
				}
			}
		}
		for typ, n := range map[uint16]int{dns.TypeSOA: 1, dns.TypeNS: 2, dns.TypeDNSKEY: 2} {
			if m := l.must(".", typ); m.Rcode != dns.RcodeSuccess || len(m.Answer) != n {
				t.Errorf(". %s: %s", dns.TypeToString[typ], text(m))
			}
		}
		if n := asked(); n != 0 {
			t.Errorf("the root was asked %d times: %v", n, l.sim.Log()[:min(5, len(l.sim.Log()))])
		}
		if n := logged.about("root"); n != 0 {
			t.Errorf("%d warnings", n)
		}
	})
}

// A copy that has expired is not used; nor is none, and another is.
func TestLocalRootExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, logged, asked := rootLab(t, nil)
		defer l.stop()
		uses := func(when, name string, want bool) {
			t.Helper()
			before := asked()
			l.want(name, dns.TypeA, "NXDOMAIN")
			if got := asked() == before; got != want {
				t.Errorf("%s: used %v", when, got)
			}
		}
		uses("fresh", "a.x0.", true)
		time.Sleep(25 * time.Hour) // its SOA record allows a day
		uses("expired", "a.x1.", false)
		time.Sleep(time.Hour)
		uses("expired", "a.x2.", false)
		if n := logged.about("expired"); n != 1 {
			t.Errorf("%d warnings, want 1", n)
		}
		l.r.SetLocalRoot(localRoot(t, rootZone(t, longRoot(t))))
		time.Sleep(time.Hour)
		uses("another", "a.x3.", true)
		l.r.SetLocalRoot(nil)
		time.Sleep(time.Hour)
		uses("none", "a.x4.", false)
	})
}

// spoil changes the last digits of the signature over an RRset.
func spoil(zone, start string) string {
	lines := strings.Split(zone, "\n")
	for i, line := range lines {
		if strings.HasPrefix(line, start) {
			lines[i] = line[:len(line)-12] + "AAAAAAAAAA=="
			return strings.Join(lines, "\n")
		}
	}
	panic("no " + start)
}

// What is bogus in a copy is asked of the servers of the root, and the copy is left aside for an hour: whatever it is
// that does not verify.
func TestLocalRootBogus(t *testing.T) {
	for _, c := range []struct{ bad, name, want string }{
		{"com.\t3600\tIN\tRRSIG\tDS ", "com. DS", "NOERROR"},
		{"com.\t3600\tIN\tRRSIG\tDS ", "www.ecdsa.com. A", "NOERROR"},
		{"lab.\t300\tIN\tRRSIG\tNSEC ", "lab. DS", "NOERROR"},
		{"org.\t300\tIN\tRRSIG\tNSEC ", "no.such. A", "NXDOMAIN"},
		{".\t86400\tIN\tRRSIG\tDNSKEY ", "www.ecdsa.com. A", "NOERROR"},
		{".\t86400\tIN\tRRSIG\tSOA ", ". SOA", "NOERROR"},
	} {
		t.Run(strings.Fields(c.bad)[0]+" for "+c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, logged, asked := rootLab(t, func(zone string) string { return spoil(zone, c.bad) })
				defer l.stop()
				w := strings.Fields(c.name)
				m, err := l.ask(w[0], dns.StringToType[w[1]], func(m *dns.Msg) { m.AuthenticatedData = true })
				if err != nil {
					t.Fatal(err)
				}
				if dns.RcodeToString[m.Rcode] != c.want || !m.AuthenticatedData {
					t.Errorf("%s AD=%v %v, want %s", text(m), m.AuthenticatedData, m.IsEdns0(), c.want)
				}
				n := asked()
				if n == 0 {
					t.Error("the root was not asked")
				}
				if n := logged.about("bogus"); n != 1 {
					t.Errorf("%d warnings, want 1", n)
				}
				l.want("a.b.", dns.TypeA, "NXDOMAIN")
				if asked() == n {
					t.Error("the copy is still used")
				}
			})
		})
	}
}

// What is bogus elsewhere is not the copy's fault, even if the answer has a part from it: nobody can make a resolver
// leave it aside by publishing nonsense.
func TestLocalRootIsNotBlamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		in := longRoot(t)
		zone := rootZone(t, in)
		z, ok := in.Zone("ecdsa.com.")
		if !ok {
			t.Fatal("no ecdsa.com.")
		}
		z.Records += "\nevil CNAME a.no.such.tld.\nshort 1 CNAME b.no.such.tld.\n"
		if err := in.Replace(z); err != nil {
			t.Fatal(err)
		}
		logged := new(warnings)
		l := newLabIn(t, in, func(o *resolver.Options) {
			o.Logger = slog.New(slog.NewTextHandler(logged, nil))
			o.Recursion.LocalRoot = localRoot(t, zone)
		})
		defer l.stop()
		for _, a := range in.Servers("ecdsa.com.") {
			l.editAt(a.String(), func(_ *siminternet.Internet, _ siminternet.Query, m *dns.Msg) {
				for i, rr := range m.Answer {
					if sig, ok := rr.(*dns.RRSIG); ok && sig.TypeCovered == dns.TypeCNAME {
						sig = dns.Copy(sig).(*dns.RRSIG)
						sig.Signature = "AAAA" + sig.Signature[4:]
						m.Answer[i] = sig
					}
				}
			})
		}
		// From the cache the alias has no server, so that the copy alone is to be avoided when it turns out bogus.
		if _, err := l.ask("evil.ecdsa.com.", dns.TypeCNAME, func(m *dns.Msg) { m.CheckingDisabled = true }); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			for _, name := range []string{"evil.ecdsa.com.", "short.ecdsa.com."} {
				if m := l.must(name, dns.TypeA); m.Rcode != dns.RcodeServerFailure {
					t.Errorf("%s", text(m))
				}
			}
			time.Sleep(3 * time.Second)
		}
		if n := logged.about("bogus"); n != 0 {
			t.Errorf("%d warnings: the copy was left aside", n)
		}
	})
}

// The root zone as it was on 21 August 2017: all top-level domains are answered for, and Secure, without asking
// anybody. The zone is third-party data that is not part of the project.
func TestLocalRootOfThatTime(t *testing.T) {
	root := os.Getenv("SLUICE_SHARED")
	if root == "" {
		root = filepath.Join("..", "..", "shared")
	}
	file := filepath.Join(root, "data", "names", "root.zone.signed-20170821.gz")
	if _, err := os.Stat(file); err != nil {
		t.Skip("no test data here: set SLUICE_SHARED to the folder that holds data/names/root.zone.signed-20170821.gz")
	}
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Date(2017, 8, 25, 12, 0, 0, 0, time.UTC)))
		z, err := resolver.OpenLocalRoot(file)
		if err != nil {
			t.Fatal(err)
		}
		if left := time.Until(z.Expires()); z.Serial()/100 != 20170821 || left < 0 || left > 7*24*time.Hour {
			t.Fatalf("serial %d, expires %v", z.Serial(), z.Expires())
		}
		in := siminternet.Standard(time.Now())
		logged := new(warnings)
		l := newLabIn(t, in, func(o *resolver.Options) {
			o.Recursion.LocalRoot, o.Recursion.Prime = z, true
			o.DNSSEC.Anchors = ". IN DS 19036 8 2 49AAC11D7B6F6446702E54A1607371607A1A41855200FD2CE1CDDE32F24E8FB5\n"
			o.Logger = slog.New(slog.NewTextHandler(logged, nil))
		})
		defer l.stop()
		count := map[string]int{}
		for _, tld := range topLevel(t, file) {
			m, err := l.ask(tld, dns.TypeDS, func(m *dns.Msg) { m.AuthenticatedData = true })
			if err != nil {
				t.Fatal(err)
			}
			if m.Rcode != dns.RcodeSuccess || !m.AuthenticatedData {
				t.Errorf("%s: %s AD=%v %v", tld, text(m), m.AuthenticatedData, m.IsEdns0())
			}
			if len(m.Answer) > 0 {
				count["DS"]++
			} else {
				count["none"]++
			}
		}
		for _, name := range []string{"no.such.tld0.", "www.0.", "zzzz.", "tesla."} {
			l.want(name, dns.TypeA, "NXDOMAIN")
		}
		t.Logf("%v", count)
		if count["DS"] < 1300 || count["none"] < 100 {
			t.Errorf("that cannot be: %v", count)
		}
		if n := in.Count(nil); n != 0 {
			t.Errorf("%d queries were sent", n)
		}
		if n := logged.about("root"); n != 0 {
			t.Errorf("%d warnings", n)
		}
	})
}

// topLevel returns the names that a root zone delegates.
func topLevel(t *testing.T, file string) (names []string) {
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	gz, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	for s := bufio.NewScanner(gz); s.Scan(); {
		if w := strings.Fields(s.Text()); len(w) > 4 && w[3] == "NS" && w[0] != "." && !slices.Contains(names, w[0]) {
			names = append(names, w[0])
		}
	}
	return names
}
