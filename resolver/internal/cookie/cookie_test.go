package cookie

import (
	"encoding/hex"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/query"
)

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The examples of RFC 9018 appendix A: ours and other implementations' cookies are the same.
func TestExamplesOfRFC9018(t *testing.T) {
	for _, c := range []struct{ key, client, server, addr string }{
		{"e5e973e5a6b2a43f48e7dc849e37bfcf", "2464c4abcf10c957", "010000005cf79f111f8130c3eee29480", "198.51.100.100"},
		{"e5e973e5a6b2a43f48e7dc849e37bfcf", "2464c4abcf10c957", "010000005cf7a871d4a564a1442aca77", "198.51.100.100"},
		{"dd3bdf9344b678b185a6f5cb60fca715", "22681ab97d52c298", "010000005cf7c57926556bd0934c72f8", "2001:db8:220:1:59de:d0f4:8769:82b8"},
		{"445536bcd2513298075a5d379663c962", "22681ab97d52c298", "010000005cf7c609a6bb79d16625507a", "2001:db8:220:1:59de:d0f4:8769:82b8"},
	} {
		key, client := newSipKey([16]byte(unhex(t, c.key))), [clientLen]byte(unhex(t, c.client))
		want := [serverLen]byte(unhex(t, c.server))
		got := want
		clear(got[8:])
		sign(&key, &client, &got, netip.MustParseAddr(c.addr))
		if got != want {
			t.Errorf("%s for %s: %x", c.client, c.addr, got)
		}
	}
}

func TestCheck(t *testing.T) {
	jar, other := New([32]byte{1}), New([32]byte{2})
	start := time.Date(2030, 1, 1, 23, 59, 0, 0, time.UTC) // keys change a minute later
	ask := func(j *Jar, cookie []byte, from string, at time.Time) (q query.Query) {
		q.EDNS.Cookie, q.Source = cookie, netip.AddrPortFrom(netip.MustParseAddr(from), 4000)
		j.Check(&q, at)
		return q
	}
	client := []byte("12345678")
	first := ask(jar, client, "192.0.2.1", start)
	if !first.HasCookie || first.CookieOK {
		t.Fatalf("a client cookie alone: %v %v", first.HasCookie, first.CookieOK)
	}
	full := append(client[:8:8], first.ServerCookie[:]...)
	changed := func(i int) []byte { b := append([]byte(nil), full...); b[i] ^= 1; return b }
	for name, c := range map[string]struct {
		jar    *Jar
		cookie []byte
		from   string
		after  time.Duration
		ok     bool
	}{
		"at once":                   {jar, full, "192.0.2.1", 0, true},
		"the next day's key":        {jar, full, "192.0.2.1", 2 * time.Minute, true},
		"an hour later":             {jar, full, "192.0.2.1", time.Hour, true},
		"more than an hour later":   {jar, full, "192.0.2.1", time.Hour + time.Second, false},
		"our clock was ahead":       {jar, full, "192.0.2.1", -5 * time.Minute, true},
		"our clock was far ahead":   {jar, full, "192.0.2.1", -5*time.Minute - time.Second, false},
		"another address":           {jar, full, "192.0.2.2", 0, false},
		"the address as IPv6":       {jar, full, "::ffff:192.0.2.1", 0, true},
		"another secret":            {other, full, "192.0.2.1", 0, false},
		"another client cookie":     {jar, changed(0), "192.0.2.1", 0, false},
		"another version":           {jar, changed(8), "192.0.2.1", 0, false},
		"a reserved bit":            {jar, changed(9), "192.0.2.1", 0, false},
		"another time":              {jar, changed(15), "192.0.2.1", 0, false},
		"another hash":              {jar, changed(23), "192.0.2.1", 0, false},
		"a longer cookie, not ours": {jar, append(full[:24:24], 0), "192.0.2.1", 0, false},
	} {
		if q := ask(c.jar, c.cookie, c.from, start.Add(c.after)); q.CookieOK != c.ok || !q.HasCookie {
			t.Errorf("%s: %v, want %v", name, q.CookieOK, c.ok)
		}
	}
	if q := ask(jar, nil, "192.0.2.1", start); q.HasCookie {
		t.Error("a query without a cookie gets one")
	}
	q := query.Query{Source: netip.MustParseAddrPort("192.0.2.1:4000")}
	q.EDNS.Cookie = full
	if n := testing.AllocsPerRun(100, func() { jar.Check(&q, start) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
