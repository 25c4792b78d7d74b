package bizlogic

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"syscall"
	"time"
)

// Download bounds the fetching of lists. Every zero field means the default stated on it.
type Download struct {
	MaxSize          int64         // bytes of a text, unpacked; 0 means 300 MiB
	Timeout          time.Duration // of one download; 0 means 60 s
	PrivateAddresses bool          // addresses that are not public may be connected to
}

func (d Download) maxSize() int64 {
	if d.MaxSize <= 0 {
		return 300 << 20
	}
	return d.MaxSize
}

// A downloader fetches texts over HTTP. It asks no proxy, follows five redirects, and connects to public
// addresses only: the check is made on the address of each connection, so a name or redirect that leads
// inside is refused like an address.
type downloader struct {
	opts   Download
	client *http.Client
}

func newDownloader(o Download) *downloader {
	if o.Timeout <= 0 {
		o.Timeout = time.Minute
	}
	dialer := &net.Dialer{Timeout: 15 * time.Second}
	if !o.PrivateAddresses {
		dialer.Control = func(_, address string, _ syscall.RawConn) error {
			ap, err := netip.ParseAddrPort(address)
			if err != nil || !public(ap.Addr()) {
				return fmt.Errorf("%s is not a public address, and fetch.private_addresses is off", address)
			}
			return nil
		}
	}
	return &downloader{opts: o, client: &http.Client{
		Timeout: o.Timeout,
		Transport: &http.Transport{
			DialContext:            dialer.DialContext,
			ForceAttemptHTTP2:      true,
			TLSHandshakeTimeout:    15 * time.Second,
			ResponseHeaderTimeout:  30 * time.Second,
			MaxResponseHeaderBytes: 64 << 10,
			IdleConnTimeout:        10 * time.Second,
			MaxIdleConns:           4,
		},
		CheckRedirect: func(req *http.Request, via []*http.Request) error {
			if len(via) > 5 {
				return errors.New("more than 5 redirects")
			}
			if via[0].URL.Scheme == "https" && req.URL.Scheme != "https" {
				return fmt.Errorf("redirect from https to %s", req.URL.Scheme)
			}
			if req.URL.Scheme != "http" && req.URL.Scheme != "https" {
				return fmt.Errorf("redirect to scheme %q", req.URL.Scheme)
			}
			return nil
		},
	}}
}

// A download is what came back.
type download struct {
	text               []byte
	etag, lastModified string
	unchanged          bool // the server says the text is the one of the ETag or date given
}

// fetch gets a text. Compressed texts are unpacked; the bound holds for what comes out.
func (d *downloader) fetch(ctx context.Context, url, etag, lastModified string) (download, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return download{}, err
	}
	req.Header.Set("User-Agent", "sluice-bizd")
	req.Header.Set("Accept", "text/plain, */*;q=0.5")
	if etag != "" {
		req.Header.Set("If-None-Match", etag)
	}
	if lastModified != "" {
		req.Header.Set("If-Modified-Since", lastModified)
	}
	resp, err := d.client.Do(req)
	if err != nil {
		return download{}, fmt.Errorf("fetching: %w", err)
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusNotModified && etag+lastModified != "":
		return download{unchanged: true}, nil
	case resp.StatusCode != http.StatusOK:
		return download{}, fmt.Errorf("fetching %s: the server answers %s", url, resp.Status)
	}
	text, err := readAtMost(resp.Body, d.opts.maxSize())
	if err == nil && resp.ContentLength >= 0 && int64(len(text)) != resp.ContentLength {
		err = fmt.Errorf("%d bytes came of %d announced", len(text), resp.ContentLength)
	}
	if err == nil && bytes.HasPrefix(text, []byte{0x1f, 0x8b}) { // a .gz file
		var z *gzip.Reader
		if z, err = gzip.NewReader(bytes.NewReader(text)); err == nil {
			text, err = readAtMost(z, d.opts.maxSize())
		}
	}
	if err != nil {
		return download{}, fmt.Errorf("fetching %s: %w", url, err)
	}
	return download{text: text, etag: header(resp, "ETag"), lastModified: header(resp, "Last-Modified")}, nil
}

// header is a header's value if it is worth keeping.
func header(resp *http.Response, name string) string {
	if v := resp.Header.Get(name); len(v) <= 256 {
		return v
	}
	return ""
}

func readAtMost(r io.Reader, most int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, most+1))
	if err == nil && int64(len(b)) > most {
		err = fmt.Errorf("the text is longer than %d bytes (fetch.max_size)", most)
	}
	return b, err
}

// special is what IsGlobalUnicast and IsPrivate leave over of the special-purpose registries (RFC 6890).
var special = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("100.64.0.0/10"),
	netip.MustParsePrefix("192.0.0.0/24"),
	netip.MustParsePrefix("192.0.2.0/24"),
	netip.MustParsePrefix("198.18.0.0/15"),
	netip.MustParsePrefix("198.51.100.0/24"),
	netip.MustParsePrefix("203.0.113.0/24"),
	netip.MustParsePrefix("240.0.0.0/4"),
	netip.MustParsePrefix("64:ff9b::/96"), // leads to IPv4 of any kind
	netip.MustParsePrefix("64:ff9b:1::/48"),
	netip.MustParsePrefix("100::/64"),
	netip.MustParsePrefix("2001::/23"),
	netip.MustParsePrefix("2001:db8::/32"),
	netip.MustParsePrefix("2002::/16"),
}

func public(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	if !a.IsGlobalUnicast() || a.IsPrivate() {
		return false
	}
	for _, p := range special {
		if p.Contains(a) {
			return false
		}
	}
	return true
}
