package localroot_test

import (
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"fmt"
	"hash"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/localroot"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/siminternet"
)

var signed = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// expire is that of the SOA record of the simulated root.
func expireOf(t *testing.T, rrs []dns.RR) time.Duration {
	t.Helper()
	for _, rr := range rrs {
		if soa, ok := rr.(*dns.SOA); ok {
			return time.Duration(soa.Expire) * time.Second
		}
	}
	t.Fatal("no SOA record")
	return 0
}

// askServer asks the first server of the simulated root.
func askServer(t *testing.T, in *siminternet.Internet, name string, typ uint16) *dns.Msg {
	t.Helper()
	m := new(dns.Msg).SetQuestion(name, typ)
	m.RecursionDesired = false
	m.SetEdns0(4096, true)
	wire, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	packets, _ := in.Handle(in.Servers(".")[0], siminternet.TCP, netip.MustParseAddrPort("127.0.0.1:1234"), wire)
	if len(packets) != 1 {
		t.Fatalf("%s %s: %d packets", name, dns.TypeToString[typ], len(packets))
	}
	r := new(dns.Msg)
	if err := r.Unpack(packets[0]); err != nil {
		t.Fatal(err)
	}
	return r
}

// tlds of siminternet.Standard that the root delegates; lab. has no DS records.
var tlds = []string{"arpa.", "com.", "example.", "lab.", "net.", "org.", "test."}

// transfer asks for all there is in the simulated root.
func transfer(t *testing.T, in *siminternet.Internet) (rrs []dns.RR) {
	t.Helper()
	seen := map[string]bool{}
	ask := func(name string, typ uint16) {
		m := askServer(t, in, name, typ)
		for _, rr := range slices.Concat(m.Answer, m.Ns, m.Extra) {
			bare := dns.Copy(rr)
			bare.Header().Ttl = 0 // denials have the SOA record with another
			if s := bare.String(); rr.Header().Rrtype != dns.TypeOPT && !seen[s] {
				seen[s] = true
				rrs = append(rrs, rr)
			}
		}
	}
	for _, typ := range []uint16{dns.TypeSOA, dns.TypeNS, dns.TypeDNSKEY, dns.TypeNSEC} {
		ask(".", typ)
	}
	for _, tld := range tlds {
		ask(tld, dns.TypeNS)
		ask(strings.TrimSuffix(tld, ".")+"0.", dns.TypeA) // the NSEC record of tld
	}
	return rrs
}

func text(rrs []dns.RR) string {
	var b strings.Builder
	for _, rr := range rrs {
		fmt.Fprintln(&b, rr)
	}
	return b.String()
}

func parse(s string, now time.Time) (*localroot.Zone, error) {
	return localroot.Parse(strings.NewReader(s), "root.zone", now, now)
}

// A copy answers as the servers do whose zone it is: the same records, signatures and proofs.
func TestAnswersAsServersDo(t *testing.T) {
	in := siminternet.Standard(signed)
	z, err := parse(text(transfer(t, in)), signed)
	if err != nil {
		t.Fatal(err)
	}
	questions := map[string][]uint16{
		".":                {dns.TypeSOA, dns.TypeNS, dns.TypeDNSKEY, dns.TypeNSEC, dns.TypeA, dns.TypeDS, dns.TypeTXT},
		"com.":             {dns.TypeA, dns.TypeNS, dns.TypeDS, dns.TypeDNSKEY},
		"www.b.com.":       {dns.TypeA, dns.TypeDS},
		"lab.":             {dns.TypeA, dns.TypeDS},
		"www.lab.":         {dns.TypeAAAA},
		"www.net.":         {dns.TypeA},
		"nonexistent.":     {dns.TypeA, dns.TypeDS},
		"www.nonexistent.": {dns.TypeA},
		"0.":               {dns.TypeA}, // covered by the NSEC record that covers the wildcard
		"*.":               {dns.TypeA},
		"zzz.":             {dns.TypeA},
	}
	for name, types := range questions {
		for _, typ := range types {
			wire, err := askServer(t, in, name, typ).Pack()
			if err != nil {
				t.Fatal(err)
			}
			want, err := query.ReadMessage(wire)
			if err != nil {
				t.Fatal(err)
			}
			got := z.Answer(dnsname.MustParse(name), typ)
			if g, w := show(got), show(want); g != w {
				t.Errorf("%s %s:\n got %s\nwant %s", name, dns.TypeToString[typ], g, w)
			}
		}
	}
	if m := z.Answer(dnsname.Root, dnswire.TypeRRSIG); m != nil {
		t.Errorf("RRSIG: %s", show(m))
	}
}

// show writes what counts of a message, sets and their records in order.
func show(m *query.Message) string {
	out := fmt.Sprintf("%s AA=%v", dnswire.RCodeText(m.RCode), m.Header.AA())
	for i, section := range [][]query.RRset{m.Answer, m.Authority, m.Additional} {
		var lines []string
		for _, s := range section {
			var data []string
			for d := range query.RDatas(s.Data) {
				data = append(data, dnswire.Text(s.Type, d))
			}
			for d := range query.RDatas(s.Sigs) {
				t := dnswire.Text(dnswire.TypeRRSIG, d)
				data = append(data, "signed "+t[:20]+t[len(t)-8:])
			}
			slices.Sort(data)
			lines = append(lines, fmt.Sprintf("\n\t%d %v %d %s %q", i, s.Name, s.TTL, dnswire.TypeText(s.Type), data))
		}
		slices.Sort(lines)
		out += strings.Join(lines, "")
	}
	return out
}

// zonemd makes the digest in another way than the package does: with the library's wire format and its comparison.
func zonemd(rrs []dns.RR, algorithm uint8) *dns.ZONEMD {
	serial := uint32(0)
	var h hash.Hash
	if h = sha512.New384(); algorithm == 2 {
		h = sha512.New()
	}
	type record struct {
		labels []string
		typ    uint16
		wire   []byte
	}
	var all []record
	for _, rr := range rrs {
		if soa, ok := rr.(*dns.SOA); ok {
			serial = soa.Serial
		}
		buf := make([]byte, dns.Len(rr)+1)
		n, err := dns.PackRR(rr, buf, 0, nil, false)
		if err != nil {
			panic(err)
		}
		labels := dns.SplitDomainName(rr.Header().Name)
		slices.Reverse(labels)
		all = append(all, record{labels, rr.Header().Rrtype, buf[:n]})
	}
	slices.SortFunc(all, func(a, b record) int {
		if c := slices.Compare(a.labels, b.labels); c != 0 {
			return c
		}
		if a.typ != b.typ {
			return int(a.typ) - int(b.typ)
		}
		skip := 10
		for _, l := range a.labels {
			skip += 1 + len(l)
		}
		return bytes.Compare(a.wire[skip+1:], b.wire[skip+1:])
	})
	for _, r := range all {
		h.Write(r.wire)
	}
	return &dns.ZONEMD{
		Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeZONEMD, Class: dns.ClassINET, Ttl: 86400}, Serial: serial, Scheme: 1, Hash: algorithm,
		Digest: fmt.Sprintf("%x", h.Sum(nil)),
	}
}

func TestParse(t *testing.T) {
	rrs := transfer(t, siminternet.Standard(signed))
	whole := text(rrs)
	md := zonemd(rrs, 1)
	other := func(edit func(*dns.ZONEMD)) string {
		m := *md
		edit(&m)
		return text(append(slices.Clone(rrs), &m))
	}
	without := func(typ uint16) string {
		return text(slices.DeleteFunc(slices.Clone(rrs), func(rr dns.RR) bool { return rr.Header().Rrtype == typ && rr.Header().Name == "." }))
	}
	var packed bytes.Buffer
	gz := gzip.NewWriter(&packed)
	gz.Write([]byte(whole))
	gz.Close()
	for name, c := range map[string]struct{ text, err string }{
		"as it is":             {whole, ""},
		"packed":               {packed.String(), ""},
		"twice the same":       {whole + whole, ""},
		"SHA-384":              {text(append(slices.Clone(rrs), md)), ""},
		"SHA-384, twice":       {strings.Repeat(text(append(slices.Clone(rrs), md)), 2), ""},
		"SHA-512":              {text(append(slices.Clone(rrs), zonemd(rrs, 2))), ""},
		"both":                 {text(append(slices.Clone(rrs), md, zonemd(rrs, 2))), ""},
		"unknown scheme":       {other(func(m *dns.ZONEMD) { m.Scheme, m.Digest = 200, strings.Repeat("00", 48) }), ""},
		"unknown algorithm":    {other(func(m *dns.ZONEMD) { m.Hash, m.Digest = 240, strings.Repeat("00", 48) }), ""},
		"wrong digest":         {other(func(m *dns.ZONEMD) { m.Digest = strings.Repeat("00", 48) }), "digest"},
		"short digest":         {other(func(m *dns.ZONEMD) { m.Digest = m.Digest[:40] }), "digest"},
		"one of two is wrong":  {text(append(slices.Clone(rrs), md, &dns.ZONEMD{Hdr: md.Hdr, Serial: md.Serial, Scheme: 1, Hash: 2, Digest: strings.Repeat("00", 64)})), "digest"},
		"digest of another":    {other(func(m *dns.ZONEMD) { m.Serial++ }), "serial"},
		"changed under digest": {strings.Replace(text(append(slices.Clone(rrs), md)), "127.53.0.2", "127.53.0.3", 1), "digest"},
		"nothing":              {"", "SOA"},
		"an empty archive":     {"\x1f\x8b", "EOF"},
		"half an archive":      {packed.String()[:packed.Len()/2], "unexpected EOF"},
		"no SOA":               {without(dns.TypeSOA), "SOA"},
		"no NS":                {without(dns.TypeNS), "NS"},
		"class":                {whole + "com. CH A 192.0.2.1\n", "class 3"},
		"no zone file":         {"<html>no such page</html>\n", "root.zone"},
		"include":              {whole + "$INCLUDE /etc/passwd\n", "INCLUDE"},
		"generated":            {whole + "$GENERATE 1-1000 a$.com. A 192.0.2.1\n", ""},
		"a second SOA":         {whole + ". SOA a. b. 1 2 3 4 5\n", "SOA"},
		"another zone":         {"$ORIGIN example.\n@ SOA a b 1 2 3 4 5\n@ NS a\na A 192.0.2.1\n", "SOA"},
		"more than the root":   {whole + "www.com. TXT more\n", "www.com. has TXT"},
		"data beside":          {whole + "com. TXT more\n", "com. has TXT"},
		"delegation below":     {whole + "sub.com. NS ns.com.\n", "sub.com. has NS"},
		"orphan":               {whole + "host.orphan. A 192.0.2.1\n", "orphan. is neither"},
		"wildcard":             {whole + "*. A 192.0.2.1\n", "is neither"},
		"alias":                {whole + ". CNAME com.\n", "CNAME"},
		"NSEC3":                {whole + ". NSEC3PARAM 1 0 0 -\n", "NSEC3PARAM"},
	} {
		z, err := parse(c.text, signed)
		switch {
		case c.err == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.err == "" && z.Answer("\x03com\x00", dnswire.TypeDS).Answer == nil:
			t.Errorf("%s: no answer", name)
		case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err) || !strings.Contains(err.Error(), "root.zone")):
			t.Errorf("%s: %v, want %q of root.zone", name, err, c.err)
		}
	}
}

// A copy is used until it expires, counted from its signature, or from when its file was written; and not for an hour
// after an answer turned out bogus. Each end is told of once.
func TestUse(t *testing.T) {
	rrs := transfer(t, siminternet.Standard(signed))
	expire := expireOf(t, rrs)
	var inception time.Time
	bare := slices.DeleteFunc(slices.Clone(rrs), func(rr dns.RR) bool {
		sig, ok := rr.(*dns.RRSIG)
		if ok && sig.TypeCovered == dns.TypeSOA {
			inception = time.Unix(int64(sig.Inception), 0)
		}
		return ok && sig.TypeCovered == dns.TypeSOA
	})
	for name, c := range map[string]struct {
		text     string
		now      time.Time
		modified time.Time
		expires  time.Time
	}{
		"signed":            {text(rrs), signed, signed.Add(50 * 24 * time.Hour), inception.Add(expire)},
		"signed, long ago":  {text(rrs), signed.AddDate(10, 0, 0), signed.AddDate(10, 0, 0), inception.Add(expire)},
		"signed in future":  {text(rrs), inception.Add(-time.Hour), signed, inception.Add(-time.Hour).Add(expire)},
		"without signature": {text(bare), signed, signed.Add(-time.Hour), signed.Add(-time.Hour).Add(expire)},
	} {
		z, err := localroot.Parse(strings.NewReader(c.text), "root.zone", c.modified, c.now)
		if err != nil {
			t.Fatal(err)
		}
		if !z.Expires().Equal(c.expires) {
			t.Errorf("%s: until %v, want %v", name, z.Expires(), c.expires)
		}
	}

	z, err := parse(text(rrs), signed)
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	c := localroot.New(slog.New(slog.NewTextHandler(&log, nil)))
	now := clock.Elapsed()
	uses := func(when string, after time.Duration, want bool, lines int) {
		t.Helper()
		for range 3 {
			if got := c.Answer(dnsname.Root, dnswire.TypeNS, now.Add(after), z.Expires().Add(after-expire)) != nil; got != want {
				t.Errorf("%s: answers %v", when, got)
			}
		}
		if n := strings.Count(log.String(), "level=WARN"); n != lines {
			t.Errorf("%s: %d lines, want %d:\n%s", when, n, lines, &log)
		}
		log.Reset()
	}
	c.Doubt(now)
	uses("without a zone", 0, false, 0)
	c.Set(z)
	uses("with one", 0, true, 0)
	c.Doubt(now)
	c.Doubt(now.Add(time.Minute))
	uses("in doubt", time.Hour, false, 1)
	uses("later", time.Hour+time.Minute, true, 0)
	c.Doubt(now.Add(2 * time.Hour))
	c.Set(z)
	uses("replaced", 2*time.Hour, true, 1)
	uses("in time", expire-time.Second, true, 0)
	uses("expired", expire, false, 1)
	c.Set(nil)
	uses("without one again", 0, false, 0)
	if n := c.Answered(); n != 12 {
		t.Errorf("%d answers, want 12", n)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(". SOA a. b. 1 2 3 4 5\n. NS a.\na. NS a.\na. A 192.0.2.1\n. NSEC a. NS SOA\na. NSEC . NS\n")
	f.Add(". 1 SOA a. b. 1 2 3 4 5\n. NS a.x.\nx. NS a.x.\nx. DS 1 8 2 00\n. ZONEMD 1 1 1 " + strings.Repeat("00", 48) + "\n")
	f.Add(". SOA a. b. 1 2 3 4 5\n. NS a.\n. RRSIG SOA 8 0 1 20260101000000 20250101000000 1 . AAAA\n")
	f.Add("\x1f\x8b")
	f.Fuzz(func(t *testing.T, s string) {
		if len(s) > 1<<14 || strings.Contains(strings.ToUpper(s), "$GENERATE") {
			return
		}
		z, err := parse(s, signed)
		if err != nil {
			return
		}
		for _, name := range []dnsname.Name{dnsname.Root, "\x01a\x00", "\x01x\x00", "\x03www\x01x\x00", "\x01*\x00", "\x02zz\x00"} {
			for _, typ := range []uint16{1, 2, 6, 43, 46, 47, 255} {
				m := z.Answer(name, typ)
				if m == nil {
					continue
				}
				for _, s := range slices.Concat(m.Answer, m.Authority, m.Additional) {
					if len(s.Data) == 0 {
						t.Fatalf("%v %d: an empty set of type %d", name, typ, s.Type)
					}
				}
			}
		}
	})
}
