package validator_test

import (
	"compress/gzip"
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/rrcache"
	"github.com/sluice-dns/sluice/resolver/internal/validator"
	"github.com/sluice-dns/sluice/resolver/internal/validator/trustanchor"
)

var long = flag.Bool("long", false, "compare with Unbound too")

// The root zone as it was on 21 August 2017: everything is signed until 3 September, the keys by the key signing
// key of 2010, which the zone's own copy of the next one does not help to replace.
const (
	rootZone2017   = "root.zone.signed-20170821.gz"
	rootAnchor2010 = ". IN DS 19036 8 2 49AAC11D7B6F6446702E54A1607371607A1A41855200FD2CE1CDDE32F24E8FB5\n"
)

var rootZoneDate = time.Date(2017, 8, 25, 12, 0, 0, 0, time.UTC)

// TestRealRootZone judges the DS RRset, or the proof that there is none, of every top-level domain there was.
// The zone is third-party data that is not part of the project.
func TestRealRootZone(t *testing.T) {
	zone := readRootZone(t)
	if len(zone.tlds) < 1500 {
		t.Fatalf("%d top-level domains", len(zone.tlds))
	}
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(rootZoneDate))
		count := map[string]int{}
		v := zone.validator(t, rootAnchor2010, "2010")
		for _, tld := range zone.tlds {
			kind, status, why := zone.judge(v, tld)
			count[kind+" "+status]++
			if status != "Secure" {
				t.Errorf("%v: %s, %s: %s", tld, kind, status, why)
			}
		}
		t.Logf("%d top-level domains: %v", len(zone.tlds), count)
		if count["DS Secure"] < 1300 || count["no DS Secure"] < 100 {
			t.Errorf("that cannot be: %v", count)
		}

		// What must not validate: with the anchors of today, after the signatures' time, and spoilt.
		if _, status, why := zone.judge(zone.validator(t, trustanchor.BuiltIn, "today"), "\x03com\x00"); status != "Bogus" {
			t.Errorf("with today's anchors: %s, %s", status, why)
		}
		spoilt := 0
		for _, spoil := range []string{"\x03com\x00", "\x02ao\x00"} {
			for typ, set := range zone.sets[dnsname.Name(spoil)] {
				if typ == dnswire.TypeNS {
					continue
				}
				kept := set.Data
				set.Data = slices.Clone(set.Data)
				set.Data[len(set.Data)-1] ^= 1
				if kind, status, why := zone.judge(zone.validator(t, rootAnchor2010, "2010"), dnsname.Name(spoil)); (kind == "DS") == (typ == dnswire.TypeDS) {
					spoilt++
					if status != "Bogus" {
						t.Errorf("%q, %s spoilt: %s %s: %s", spoil, dnswire.TypeText(typ), kind, status, why)
					}
				}
				set.Data = kept
			}
		}
		if spoilt != 2 {
			t.Errorf("%d records were spoilt: one DS, one NSEC", spoilt)
		}
		time.Sleep(10 * 24 * time.Hour)
		if _, status, why := zone.judge(zone.validator(t, rootAnchor2010, "2010"), "\x03com\x00"); status != "Bogus" {
			t.Errorf("on 4 September: %s, %s", status, why)
		}
	})
}

// TestRealRootZoneAsUnboundSays asks Unbound, given the same zone, anchor and date, for the same records.
func TestRealRootZoneAsUnboundSays(t *testing.T) {
	if !*long {
		t.Skip("without -long")
	}
	bin, err := exec.LookPath("unbound")
	if err != nil {
		t.Skip("unbound is not installed")
	}
	zone := readRootZone(t)
	ask := startUnbound(t, bin, zone.text)
	theirs := map[dnsname.Name]string{}
	for _, tld := range zone.tlds {
		theirs[tld] = ask(tld)
	}
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(rootZoneDate))
		v := zone.validator(t, rootAnchor2010, "2010")
		count := map[string]int{}
		for _, tld := range zone.tlds {
			kind, status, why := zone.judge(v, tld)
			ours := kind + " " + status
			count[ours]++
			if ours != theirs[tld] {
				t.Errorf("%v: %s (%s), Unbound says %s", tld, ours, why, theirs[tld])
			}
		}
		t.Logf("both say of %d: %v", len(zone.tlds), count)
	})
}

// A zone is a file of records, and a Fetcher that answers from it.
type zone struct {
	text string
	sets map[dnsname.Name]map[uint16]*query.RRset
	tlds []dnsname.Name // in canonical order
}

func readRootZone(t *testing.T) *zone {
	t.Helper()
	root := os.Getenv("SLUICE_SHARED")
	if root == "" {
		root = "../../../../shared"
	}
	f, err := os.Open(filepath.Join(root, "data", "names", rootZone2017))
	if err != nil {
		t.Skipf("no test data here: set SLUICE_SHARED to the folder that holds data/names/%s", rootZone2017)
	}
	defer f.Close()
	gz, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	p := make([]byte, 1<<16)
	for {
		n, err := gz.Read(p)
		b.Write(p[:n])
		if err != nil {
			break
		}
	}
	z := &zone{text: b.String(), sets: map[dnsname.Name]map[uint16]*query.RRset{}}
	rs, err := dnswire.ParseRecords(z.text, ".", rootZone2017, 3600)
	if err != nil {
		t.Fatal(err)
	}
	set := func(name dnsname.Name, typ uint16, ttl uint32) *query.RRset {
		if z.sets[name] == nil {
			z.sets[name] = map[uint16]*query.RRset{}
		}
		s := z.sets[name][typ]
		if s == nil {
			s = &query.RRset{Name: name, Type: typ, Class: dnswire.ClassIN, TTL: ttl, Rank: query.RankAnswer}
			z.sets[name][typ] = s
		}
		return s
	}
	for _, r := range rs {
		if r.Type == dnswire.TypeRRSIG {
			s := set(r.Name, dnswire.Uint16(r.Data), r.TTL)
			s.Sigs = query.AppendRData(s.Sigs, r.Data)
			continue
		}
		s := set(r.Name, r.Type, r.TTL)
		s.Data = query.AppendRData(s.Data, r.Data)
		if r.Type == dnswire.TypeNS && r.Name != dnsname.Root && !slices.Contains(z.tlds[max(0, len(z.tlds)-1):], r.Name) {
			z.tlds = append(z.tlds, r.Name)
		}
	}
	slices.SortFunc(z.tlds, dnsname.Compare)
	return z
}

// Resolve answers as the servers of the zone would.
func (z *zone) Resolve(_ context.Context, _ *query.Tree, q query.Question) (query.Unvalidated, error) {
	u := query.Unvalidated{Question: q, Zone: dnsname.Root, Servers: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:53")}}
	if s := z.sets[q.Name][q.Type]; s != nil {
		u.Answer = []query.RRset{*s}
		return u, nil
	}
	if z.sets[q.Name][dnswire.TypeNSEC] == nil {
		return u, fmt.Errorf("%v is not in the zone", q.Name)
	}
	u.Authority = []query.RRset{*z.sets[dnsname.Root][dnswire.TypeSOA], *z.sets[q.Name][dnswire.TypeNSEC]}
	return u, nil
}

func (z *zone) Again(ctx context.Context, tree *query.Tree, q query.Question, avoid []netip.AddrPort) (query.Unvalidated, error) {
	if len(avoid) > 0 {
		return query.Unvalidated{}, fmt.Errorf("there is no other server")
	}
	return z.Resolve(ctx, tree, q)
}

func (z *zone) Cached(query.Question, uint32) (query.Unvalidated, bool) {
	return query.Unvalidated{}, false
}

// SetStatus and PutNegative: nothing is cached.
func (z *zone) SetStatus(query.View, query.Subnet, query.RRset, clock.Instant) bool { return true }

func (z *zone) PutNegative(rrcache.Key, rrcache.Kind, query.RRset, []query.RRset, query.Status, clock.Instant) bool {
	return true
}

func (z *zone) validator(t *testing.T, anchors, file string) *validator.Validator {
	t.Helper()
	s, err := trustanchor.New(trustanchor.Options{Text: anchors, File: file, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return validator.New(validator.Options{Fetch: z, Cache: z, Anchors: s})
}

// judge validates what the zone says of the DS records of a name.
func (z *zone) judge(v *validator.Validator, name dnsname.Name) (kind, status, why string) {
	now := clock.Elapsed()
	tree := query.NewTree(now, query.Budget{})
	q := query.Question{Name: name, Type: dnswire.TypeDS, Class: dnswire.ClassIN, DO: true}
	u, err := z.Resolve(context.Background(), tree, q)
	if err != nil {
		return "", "", err.Error()
	}
	kind = "DS"
	if len(u.Answer) == 0 {
		kind = "no DS"
	}
	entry, err := v.Validate(context.Background(), tree, &u, now)
	if err != nil {
		return kind, "Bogus", err.Error()
	}
	return kind, entry.View().Status.String(), ""
}

// startUnbound runs Unbound with a copy of the root zone and returns a function that asks it for DS records.
func startUnbound(t *testing.T, bin, zone string) func(dnsname.Name) string {
	t.Helper()
	dir := t.TempDir()
	l, err := net.ListenPacket("udp", "127.0.0.1:0") // a port that is free, most likely still in a moment
	if err != nil {
		t.Fatal(err)
	}
	addr := l.LocalAddr().(*net.UDPAddr)
	l.Close()
	files := map[string]string{
		"root.zone": zone,
		"root.ds":   rootAnchor2010,
		"unbound.conf": fmt.Sprintf(`
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
  trust-anchor-file: %q
  val-override-date: %q
auth-zone:
  name: "."
  zonefile: %q
  for-upstream: yes
  for-downstream: no
`, addr.Port, dir, filepath.Join(dir, "root.ds"), rootZoneDate.Format("20060102150405"), filepath.Join(dir, "root.zone")),
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(bin, "-d", "-c", filepath.Join(dir, "unbound.conf"))
	var out strings.Builder
	cmd.Stderr = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	c := &dns.Client{Timeout: 5 * time.Second, UDPSize: 4096}
	return func(name dnsname.Name) string {
		m := new(dns.Msg)
		m.SetQuestion(name.String(), dns.TypeDS)
		m.SetEdns0(4096, true)
		for try := 0; ; try++ {
			r, _, err := c.Exchange(m, addr.String())
			if err != nil {
				if try == 20 {
					t.Fatalf("unbound does not answer: %v\n%s", err, &out)
				}
				time.Sleep(100 * time.Millisecond) // it is starting
				continue
			}
			kind, status := "no DS", "Bogus"
			if slices.ContainsFunc(r.Answer, func(rr dns.RR) bool { return rr.Header().Rrtype == dns.TypeDS }) {
				kind = "DS"
			}
			switch {
			case r.Rcode == dns.RcodeSuccess && r.AuthenticatedData:
				status = "Secure"
			case r.Rcode == dns.RcodeSuccess:
				status = "Insecure"
			}
			return kind + " " + status
		}
	}
}
