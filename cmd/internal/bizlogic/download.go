package bizlogic

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Download bounds the fetching of lists. Every zero field means the default stated on it.
type Download struct {
	MaxSize          int64         // bytes of a text, unpacked; 0 means 300 MiB
	Timeout          time.Duration // of one download; 0 means 60 s
	PrivateAddresses bool          // addresses that are not public may be connected to
	// Files are folders of which file: URLs may name files; none means no file: URLs.
	Files []string
	// Resolve finds the addresses of a name. Nil asks the system.
	Resolve func(ctx context.Context, host string) ([]netip.Addr, error)

	public func(netip.Addr) bool // tests have public addresses of their own
}

const (
	maxRedirects = 5
	// maxURL is the longest URL.
	maxURL = 2048
	// maxAddresses is how many addresses of one name are tried.
	maxAddresses = 6
	// parallelFetches is how many lists of the catalogue are fetched at once, parallelOwn how many of users' own
	// beside them, and parallelOfHost how many of these from one host: whoever may name a URL may name a server
	// that takes its time.
	parallelFetches = 4
	parallelOwn     = 8
	parallelOfHost  = 2
)

func (d Download) maxSize() int64 {
	if d.MaxSize <= 0 {
		return 300 << 20
	}
	return d.MaxSize
}

// A downloader fetches texts over HTTP, and from files in the folders that are allowed. It asks no proxy, follows
// five redirects, and connects to public addresses only: the check is made on the address of each connection, so
// a name or redirect that leads inside is refused like an address.
type downloader struct {
	opts   Download
	client *http.Client
	slots  chan struct{} // one token for each download of a catalogue's list under way
	own    chan struct{} // one for each of users' own

	mu    sync.Mutex       // guards the rest
	hosts map[string]*host // of users' own lists that are fetched, or wait for it
}

// A host is one that users' own lists are fetched from.
type host struct {
	slots chan struct{}
	n     int // downloads that have or want one
}

// enter waits for a turn to download; leave ends it.
func (d *downloader) enter(ctx context.Context, w wanted, name string) (leave func(), err error) {
	if !w.own {
		select {
		case d.slots <- struct{}{}:
			return func() { <-d.slots }, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	d.mu.Lock()
	h := d.hosts[name]
	if h == nil {
		h = &host{slots: make(chan struct{}, parallelOfHost)}
		d.hosts[name] = h
	}
	h.n++
	d.mu.Unlock()
	gone := func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if h.n--; h.n == 0 {
			delete(d.hosts, name)
		}
	}
	select {
	case h.slots <- struct{}{}:
	case <-ctx.Done():
		gone()
		return nil, ctx.Err()
	}
	select {
	case d.own <- struct{}{}:
		return func() { <-d.own; <-h.slots; gone() }, nil
	case <-ctx.Done():
		<-h.slots
		gone()
		return nil, ctx.Err()
	}
}

func newDownloader(o Download) *downloader {
	if o.Timeout <= 0 {
		o.Timeout = time.Minute
	}
	if o.public == nil {
		o.public = public
	}
	dialer := &net.Dialer{Timeout: 15 * time.Second}
	if !o.PrivateAddresses {
		dialer.Control = func(_, address string, _ syscall.RawConn) error {
			ap, err := netip.ParseAddrPort(address)
			if err != nil || !o.public(ap.Addr()) {
				return fmt.Errorf("%s is not a public address, and fetch.private_addresses is off", address)
			}
			return nil
		}
	}
	return &downloader{opts: o, slots: make(chan struct{}, parallelFetches), own: make(chan struct{}, parallelOwn), hosts: map[string]*host{}, client: &http.Client{
		Transport: &http.Transport{
			DialContext:            dialVia(dialer, o.Resolve),
			DisableCompression:     true, // net/http would not bound what is packed
			ForceAttemptHTTP2:      true,
			TLSHandshakeTimeout:    15 * time.Second,
			ResponseHeaderTimeout:  30 * time.Second,
			MaxResponseHeaderBytes: 64 << 10,
			IdleConnTimeout:        10 * time.Second,
			MaxIdleConns:           4,
		},
		CheckRedirect: checkRedirect,
	}}
}

// dialVia is a dial function that has names resolved by resolve.
func dialVia(d *net.Dialer, resolve func(context.Context, string) ([]netip.Addr, error)) func(ctx context.Context, network, address string) (net.Conn, error) {
	if resolve == nil {
		return d.DialContext
	}
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		host, port, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err
		}
		if _, err := netip.ParseAddr(host); err == nil {
			return d.DialContext(ctx, network, address)
		}
		addrs, err := resolve(ctx, host)
		if err != nil {
			return nil, fmt.Errorf("resolving %s: %w", host, err)
		}
		err = fmt.Errorf("%s has no address", host)
		for _, a := range addrs[:min(len(addrs), maxAddresses)] {
			var c net.Conn
			if c, err = d.DialContext(ctx, network, net.JoinHostPort(a.String(), port)); err == nil {
				return c, nil
			}
		}
		return nil, err
	}
}

func checkRedirect(req *http.Request, via []*http.Request) error {
	if len(via) > maxRedirects {
		return fmt.Errorf("more than %d redirects", maxRedirects)
	}
	if via[0].URL.Scheme == "https" && req.URL.Scheme != "https" {
		return fmt.Errorf("redirect from https to %s", req.URL.Scheme)
	}
	if req.URL.Scheme != "http" && req.URL.Scheme != "https" {
		return fmt.Errorf("redirect to scheme %q", req.URL.Scheme)
	}
	if req.URL.Host != via[0].URL.Host { // net/http would give the password to subdomains and other ports too
		req.Header.Del("Authorization")
	}
	return nil
}

// A wanted is what to fetch, and what is known of it.
type wanted struct {
	url                string
	etag, lastModified string
	most               int64  // bytes, packed and unpacked
	bound              string // what sets most
	own                bool   // a list of users' own
}

// A download is what came back. The caller drops its text.
type download struct {
	text               *text
	etag, lastModified string
	unchanged          bool // the server says the text is the one of the ETag or date given; there is no text
}

// fetch gets a text. Compressed texts are unpacked; the bound holds for what comes out. Errors hold no password; one
// that is our disk's, and says nothing about the list, is INTERNAL.
func (s *Service) fetch(ctx context.Context, w wanted) (download, error) {
	d := s.downloads
	u, err := parseURL(w.url)
	if err != nil {
		return download{}, err
	}
	leave, err := d.enter(ctx, w, u.Host)
	if err != nil {
		return download{}, err
	}
	defer leave()
	ctx, cancel := context.WithTimeoutCause(ctx, d.opts.Timeout, fmt.Errorf("it takes longer than %v (fetch.timeout)", d.opts.Timeout))
	defer cancel()
	var got download
	if u.Scheme == "file" {
		got, err = s.fetchFile(ctx, u, w)
	} else {
		got, err = s.fetchHTTP(ctx, u, w)
	}
	if err == nil {
		return got, nil
	}
	if e := (*keepError)(nil); errors.As(err, &e) {
		return download{}, storing(e)
	}
	if e := (*url.Error)(nil); errors.As(err, &e) {
		err = e.Err // it names the URL anew, of which a server may have chosen the end
	}
	if ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)) {
		err = context.Cause(ctx)
	}
	return download{}, fmt.Errorf("fetching %s: %w", redacted(u), err)
}

func (s *Service) fetchHTTP(ctx context.Context, u *url.URL, w wanted) (download, error) {
	bare := *u
	bare.User = nil
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, bare.String(), nil)
	if err != nil {
		return download{}, err
	}
	if u.User != nil {
		password, _ := u.User.Password()
		req.SetBasicAuth(u.User.Username(), password)
	}
	req.Header.Set("User-Agent", "sluice-bizd")
	req.Header.Set("Accept", "text/plain, */*;q=0.5")
	req.Header.Set("Accept-Encoding", "gzip")
	if w.etag != "" {
		req.Header.Set("If-None-Match", w.etag)
	}
	if w.lastModified != "" {
		req.Header.Set("If-Modified-Since", w.lastModified)
	}
	resp, err := s.downloads.client.Do(req)
	if err != nil {
		return download{}, err
	}
	defer resp.Body.Close()
	packed := false
	switch encoding := strings.Join(resp.Header.Values("Content-Encoding"), ", "); strings.ToLower(encoding) {
	case "", "identity":
	case "gzip", "x-gzip": // RFC 9110 section 8.4.1.3
		packed = true
	default:
		return download{}, fmt.Errorf("the server sends it in the encoding %.50q; gzip alone was asked for", encoding)
	}
	switch {
	case resp.StatusCode == http.StatusNotModified && w.etag+w.lastModified != "":
		return download{unchanged: true}, nil
	case resp.StatusCode != http.StatusOK:
		return download{}, fmt.Errorf("the server answers %.100q", resp.Status)
	case resp.ContentLength > w.most:
		return download{}, fmt.Errorf("the text is longer than %d bytes (%s): %d are announced", w.most, w.bound, resp.ContentLength)
	}
	t, err := s.take(resp.Body, w, packed)
	return download{text: t, etag: header(resp, "ETag"), lastModified: header(resp, "Last-Modified")}, err
}

// header is a header's value if it is worth keeping.
func header(resp *http.Response, name string) string {
	if v := resp.Header.Get(name); len(v) <= 256 {
		return v
	}
	return ""
}

// fetchFile reads a file of an allowed folder. Links are followed within the folder alone, and what is not a
// regular file is not opened, or at least not read: a pipe would never end.
func (s *Service) fetchFile(ctx context.Context, u *url.URL, w wanted) (download, error) {
	path := filepath.Clean(filepath.FromSlash(u.Path))
	for _, dir := range s.downloads.opts.Files {
		rel, err := filepath.Rel(dir, path)
		if err != nil || !filepath.IsLocal(rel) {
			continue
		}
		root, err := os.OpenRoot(dir)
		if err != nil {
			return download{}, err
		}
		defer root.Close()
		if fi, err := root.Stat(rel); err != nil {
			return download{}, err
		} else if !fi.Mode().IsRegular() {
			return download{}, errors.New("it is not a regular file")
		}
		f, err := root.OpenFile(rel, os.O_RDONLY|syscall.O_NONBLOCK, 0)
		if err != nil {
			return download{}, err
		}
		defer f.Close()
		fi, err := f.Stat()
		if err != nil {
			return download{}, err
		}
		if !fi.Mode().IsRegular() { // it has become something else
			return download{}, errors.New("it is not a regular file")
		}
		tag := fileTag(fi)
		if tag == w.etag {
			return download{unchanged: true}, nil
		}
		t, err := s.take(readerOf(func(b []byte) (int, error) {
			if err := ctx.Err(); err != nil {
				return 0, err
			}
			return f.Read(b)
		}), w, false)
		if err != nil {
			return download{}, err
		}
		if now, err := f.Stat(); err != nil || fileTag(now) != tag {
			t.drop()
			return download{}, cond(err, errors.New("the file was changed while it was read; it is read again later"))
		}
		return download{text: t, etag: tag}, nil
	}
	return download{}, errors.New("it is in none of the folders of fetch.files")
}

// fileTag is to a file what an ETag is to a page.
func fileTag(fi os.FileInfo) string { return fmt.Sprintf("%d-%d", fi.Size(), fi.ModTime().UnixNano()) }

type readerOf func([]byte) (int, error)

func (f readerOf) Read(b []byte) (int, error) { return f(b) }

// take copies what comes into a text, unpacking a .gz file, and before that what was packed to be sent. What is
// packed is bounded too: it may unpack to nothing for ever.
func (s *Service) take(r io.Reader, w wanted, packed bool) (_ *text, err error) {
	t, err := s.newText(w.most, w.bound)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			t.drop()
		}
	}()
	in := bufio.NewReaderSize(&bounded{r, w.most, w}, 32<<10)
	if packed {
		z, err := gzip.NewReader(in)
		if err != nil {
			return nil, fmt.Errorf("the server says it is packed: %w", err)
		}
		in = bufio.NewReaderSize(&bounded{z, w.most, w}, 32<<10)
	}
	if magic, _ := in.Peek(2); !bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		_, err = io.Copy(t, in)
		return t, err
	}
	z, err := gzip.NewReader(in)
	if err != nil {
		return nil, err
	}
	_, err = io.Copy(t, z)
	return t, err
}

// A bounded reader ends with an error where there is more than there may be.
type bounded struct {
	r    io.Reader
	left int64
	w    wanted
}

func (b *bounded) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return 0, fmt.Errorf("the text is longer than %d bytes (%s)", b.w.most, b.w.bound)
	}
	return n, err
}

// parseURL reads where a list may be fetched. Its errors do not repeat the URL, which may hold a password.
func parseURL(s string) (*url.URL, error) {
	if len(s) > maxURL {
		return nil, invalid("url", "has %d bytes; at most %d", len(s), maxURL)
	}
	u, err := url.Parse(s)
	if err != nil {
		return nil, invalid("url", "cannot be read; a URL is scheme://host/path, and a %% or / in a password is written %%25 or %%2F")
	}
	switch u.Scheme {
	case "http", "https":
		if u.Hostname() == "" || u.Opaque != "" {
			return nil, invalid("url", "%q names no host", redacted(u))
		}
	case "file":
		if u.Host != "" && u.Host != "localhost" || !strings.HasPrefix(u.Path, "/") || u.RawQuery != "" || u.User != nil {
			return nil, invalid("url", "%q is not file:///PATH", redacted(u))
		}
	default:
		return nil, invalid("url", "%q is no http, https or file URL", redacted(u))
	}
	return u, nil
}

// checkURL accepts where a list of the catalogue may be fetched.
func (s *Service) checkURL(text string) error {
	u, err := parseURL(text)
	if err == nil && u.Scheme == "file" && len(s.downloads.opts.Files) == 0 {
		err = invalid("url", "%q is a file of the service's machine; fetch.files names no folder with such", redacted(u))
	}
	if err == nil && hidden(u) {
		err = invalid("url", "%q has its password hidden; write it out", redacted(u))
	}
	return err
}

// hiddenPassword is what stands for a password in what is shown.
const hiddenPassword = "xxxxx"

func hidden(u *url.URL) bool {
	p, ok := u.User.Password()
	return p == hiddenPassword || !ok && u.User.Username() == hiddenPassword
}

// redacted is a URL without its password, or without a user name that stands alone: that is one.
func redacted(u *url.URL) string {
	if u.User == nil {
		return u.String()
	}
	shown := *u
	if _, ok := u.User.Password(); ok {
		shown.User = url.UserPassword(u.User.Username(), hiddenPassword)
	} else {
		shown.User = url.User(hiddenPassword)
	}
	return shown.String()
}

// showURL is a stored URL as it may be shown.
func showURL(s string) string {
	u, err := url.Parse(s)
	if err != nil {
		return "(unreadable)" // was checked before it was stored
	}
	return redacted(u)
}

// sameHidden returns known if text is known with its password hidden, as it is shown and exported; else text.
func sameHidden(text, known string) string {
	if u, err := url.Parse(text); err == nil && hidden(u) && text == showURL(known) {
		return known
	}
	return text
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
	netip.MustParsePrefix("::/96"),        // IPv4-compatible, RFC 4291 section 2.5.5.1
	netip.MustParsePrefix("64:ff9b::/96"), // leads to IPv4 of any kind
	netip.MustParsePrefix("64:ff9b:1::/48"),
	netip.MustParsePrefix("100::/64"),
	netip.MustParsePrefix("2001::/23"),
	netip.MustParsePrefix("2001:db8::/32"),
	netip.MustParsePrefix("2002::/16"),
	netip.MustParsePrefix("3fff::/20"),
	netip.MustParsePrefix("5f00::/16"),
	netip.MustParsePrefix("fec0::/10"), // site-local, RFC 3879
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
