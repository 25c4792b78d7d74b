package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"net"
	"net/netip"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// ParseSize reads a size, "512MiB": a whole number and KiB, MiB or GiB; or "0".
func ParseSize(s string) (int64, error) {
	const try = "a whole number with KiB, MiB or GiB, such as 512MiB"
	digits := strings.TrimRight(s, "KMGTPBkmgtpbi ")
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n < 0 || digits[0] == '+' {
		return 0, hint{"is not a size", try}
	}
	unit := s[len(digits):]
	shift, ok := map[string]int{"KiB": 10, "MiB": 20, "GiB": 30}[unit]
	switch {
	case ok && n > math.MaxInt64>>shift:
		return 0, hint{"is more than can be counted", try}
	case ok:
		return n << shift, nil
	case s == "0":
		return 0, nil
	case unit == "":
		return 0, hint{"has no unit", try}
	}
	switch strings.ToLower(strings.TrimSpace(unit)) {
	case "k", "kb", "kib":
		try := digits + "KiB"
		return 0, hint{"is not a size", try}
	case "m", "mb", "mib":
		return 0, hint{"is not a size", digits + "MiB"}
	case "g", "gb", "gib":
		return 0, hint{"is not a size", digits + "GiB"}
	}
	return 0, hint{"is not a size", try}
}

// parseDuration reads a Go duration that is not negative.
func parseDuration(s string) (time.Duration, error) {
	v, err := time.ParseDuration(s)
	if err == nil && v >= 0 {
		return v, nil
	}
	if err == nil {
		return 0, hint{"is negative", strings.TrimPrefix(s, "-")}
	}
	if n, err := strconv.ParseUint(s, 10, 32); err == nil {
		return 0, hint{"has no unit", fmt.Sprintf("%ds", n)}
	}
	for unit, hours := range map[string]uint64{"d": 24, "w": 168} {
		if digits, ok := strings.CutSuffix(s, unit); ok {
			if n, err := strconv.ParseUint(digits, 10, 16); err == nil {
				return 0, hint{"is in a unit that is not known", fmt.Sprintf("%dh", n*hours)}
			}
		}
	}
	return 0, hint{"is not a duration", "a number with ms, s, m or h, such as 1.8s or 24h"}
}

// parsePercent reads "10%" as 0.1.
func parsePercent(s string) (float64, error) {
	digits, ok := strings.CutSuffix(s, "%")
	v, err := strconv.ParseFloat(digits, 64)
	switch {
	case err != nil || !(v >= 0 && v <= 100): // NaN is neither
		return 0, hint{"is not a share", "a number from 0% to 100%, such as 10%"}
	case ok:
		return v / 100, nil
	case v > 0 && v < 1:
		return 0, hint{"has no %", strconv.FormatFloat(v*100, 'g', 4, 64) + "%"}
	}
	return 0, hint{"has no %", digits + "%"}
}

// parseAddrPort reads "192.0.2.1:53" or "[2001:db8::1]:53"; with bare also an
// address alone, whose port is then 0.
func parseAddrPort(s string, bare bool) (netip.AddrPort, error) {
	if a, err := netip.ParseAddrPort(s); err == nil {
		if bare && a.Port() == 0 {
			return netip.AddrPort{}, hint{"has port 0", "a port from 1 to 65535"}
		}
		return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()), nil
	}
	if a, err := netip.ParseAddr(strings.Trim(s, "[]")); err == nil {
		if bare {
			return netip.AddrPortFrom(a.Unmap(), 0), nil
		}
		return netip.AddrPort{}, hint{"has no port", netip.AddrPortFrom(a, 53).String()}
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return netip.AddrPort{}, hint{"is not an address and port", "127.0.0.1:53 or [::1]:53"}
	}
	n, err := strconv.ParseUint(port, 10, 16)
	_, hostErr := netip.ParseAddr(host)
	switch {
	case err != nil:
		return netip.AddrPort{}, hint{fmt.Sprintf("has the port %s", quote(port)), "a port from 0 to 65535"}
	case host == "":
		return netip.AddrPort{}, hint{"has no address", fmt.Sprintf("0.0.0.0:%d or [::]:%d for every address", n, n)}
	case hostErr != nil:
		return netip.AddrPort{}, hint{"has a name for an address", fmt.Sprintf("an address, such as 127.0.0.1:%d", n)}
	}
	return netip.AddrPort{}, hint{"is not an address and port", fmt.Sprintf("127.0.0.1:%d or [::1]:%d", n, n)}
}

// parsePrefix reads a network, or an address as a network of one.
func parsePrefix(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	switch {
	case err != nil:
		if addr, bits, ok := strings.Cut(s, "/"); ok {
			if a, err := netip.ParseAddr(addr); err == nil {
				return netip.Prefix{}, hint{"has the impossible length " + clip(bits), fmt.Sprintf("a length from 0 to %d", a.BitLen())}
			}
		}
		return netip.Prefix{}, hint{"is not a network", "192.0.2.0/24, 2001:db8::/32 or a single address"}
	case p.Addr().Is4In6():
		return netip.Prefix{}, hint{"is an IPv4 network in IPv6 clothes", "the IPv4 network itself, such as 192.0.2.0/24"}
	case p != p.Masked():
		return netip.Prefix{}, hint{"has bits set beyond its length", p.Masked().String()}
	}
	return p, nil
}

// An Endpoint is where a gRPC or HTTP service is; the zero Endpoint is off.
// Network and Address suit package net.
type Endpoint struct {
	Network string // "tcp" or "unix"
	Address string // host:port, or the absolute path of a socket
}

// Off reports whether e stands for no service.
func (e Endpoint) Off() bool { return e == Endpoint{} }

// Local reports whether only this machine can reach e: a unix socket or a
// loopback address.
func (e Endpoint) Local() bool {
	a, err := netip.ParseAddrPort(e.Address)
	return e.Network != "tcp" || err == nil && a.Addr().IsLoopback()
}

// String is how e is written in a configuration.
func (e Endpoint) String() string {
	if e.Network == "unix" {
		return "unix:" + e.Address
	}
	return e.Address
}

// parseEndpoint reads "", "unix:PATH" or an address and port; with names a host
// name may stand for the address.
func (d *decoder) parseEndpoint(s string, names bool) (Endpoint, error) {
	if path, ok := strings.CutPrefix(s, "unix:"); ok {
		const longest = 107 // sun_path
		path = d.path(strings.TrimPrefix(path, "//"))
		switch {
		case path == "":
			return Endpoint{}, hint{"has no path", "unix:/run/sluice/admin.sock"}
		case len(path) > longest:
			return Endpoint{}, hint{fmt.Sprintf("is longer than the %d bytes that a socket's path can have", longest), "a shorter path"}
		}
		return Endpoint{"unix", path}, nil
	}
	if s == "" && !names {
		return Endpoint{}, nil
	}
	a, err := parseAddrPort(s, false)
	switch {
	case err == nil && names && a.Port() == 0:
		return Endpoint{}, hint{"has port 0", "the port that the service listens on"}
	case err == nil:
		return Endpoint{"tcp", a.String()}, nil
	case !names:
		return Endpoint{}, err
	}
	host, port, splitErr := net.SplitHostPort(s)
	n, portErr := strconv.ParseUint(port, 10, 16)
	if splitErr != nil || portErr != nil || n == 0 {
		return Endpoint{}, hint{"is not a host and port", "192.0.2.1:8054, sluice.example.net:8054 or unix:PATH"}
	}
	if strings.EqualFold(host, "localhost") {
		host = "127.0.0.1" // RFC 6761 section 6.3: no need to ask
	}
	if err := hostName(host); err != nil {
		return Endpoint{}, err
	}
	return Endpoint{"tcp", net.JoinHostPort(strings.ToLower(host), port)}, nil
}

func parseUpstream(s string) (UpstreamURL, error) {
	const try = "udp://192.0.2.1, tcp://192.0.2.1, tls://192.0.2.1#NAME or https://192.0.2.1/dns-query#NAME"
	if !strings.Contains(s, "://") {
		if _, err := parseAddrPort(s, true); err == nil {
			return UpstreamURL{}, hint{"has no scheme", "udp://" + s}
		}
		return UpstreamURL{}, hint{"is not a URL", try}
	}
	u, err := url.Parse(s)
	if err != nil || u.Host == "" || u.Opaque != "" {
		return UpstreamURL{}, hint{"is not a URL", try}
	}
	out := UpstreamURL{Text: s, Scheme: u.Scheme, ServerName: u.Fragment}
	encrypted := false
	switch u.Scheme {
	case "udp", "tcp":
	case "tls", "https":
		encrypted = true
	default:
		return UpstreamURL{}, hint{"has an unknown scheme", try}
	}
	switch {
	case u.User != nil || u.RawQuery != "":
		return UpstreamURL{}, hint{"has more parts than SCHEME://HOST:PORT/PATH#NAME", try}
	case u.Scheme != "https" && u.Path != "":
		return UpstreamURL{}, hint{"has a path", "a path with https:// only"}
	case !encrypted && u.Fragment != "":
		return UpstreamURL{}, hint{"has a name for a certificate without encryption", "tls:// or https://"}
	}
	var port uint16
	if p := u.Port(); p != "" {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil || n == 0 {
			return UpstreamURL{}, hint{"has the port " + clip(p), "a port from 1 to 65535"}
		}
		port = uint16(n)
	} else if strings.HasSuffix(u.Host, ":") {
		return UpstreamURL{}, hint{"has a colon without a port", try}
	}
	host := u.Hostname()
	a, err := netip.ParseAddr(host)
	switch {
	case err == nil:
		out.Addr = netip.AddrPortFrom(a.Unmap(), port)
	case encrypted:
		return UpstreamURL{}, hint{"has a name where its address belongs, which could not be looked up without it", u.Scheme + "://ADDRESS" + u.EscapedPath() + "#" + clip(host)}
	default:
		return UpstreamURL{}, hint{"has a name where its address belongs", u.Scheme + "://ADDRESS"}
	}
	if out.Addr.Addr().IsUnspecified() || out.Addr.Addr().IsMulticast() {
		return UpstreamURL{}, hint{"has an address that nobody can be asked at", try}
	}
	switch name, err := netip.ParseAddr(out.ServerName); {
	case !encrypted:
	case out.ServerName == "":
		out.ServerName = out.Addr.Addr().WithZone("").String()
	case err == nil:
		out.ServerName = name.Unmap().WithZone("").String()
	default:
		if err := hostName(out.ServerName); err != nil {
			return UpstreamURL{}, hint{"has a name that no certificate can be for", try}
		}
		out.ServerName = strings.ToLower(strings.TrimSuffix(out.ServerName, "."))
	}
	if u.Scheme == "https" {
		if out.Path = u.EscapedPath(); out.Path == "" || out.Path == "/" {
			out.Path = "/dns-query"
		}
	}
	return out, nil
}

// fillPort gives a URL without a port that of its scheme, udp and tcp that of
// recursion.upstream_port.
func (u *UpstreamURL) fillPort(do53 uint16) {
	if !u.Addr.IsValid() || u.Addr.Port() != 0 {
		return
	}
	port := do53
	switch u.Scheme {
	case "tls":
		port = 853
	case "https":
		port = 443
	}
	u.Addr = netip.AddrPortFrom(u.Addr.Addr(), port)
}

// parseText checks a text by what its field holds and gives it its final form.
func (d *decoder) parseText(s, as, path string) (string, error) {
	switch as {
	case "path":
		return d.path(s), nil
	case "logfile":
		if s == "stdout" || s == "stderr" {
			return s, nil
		}
		return d.path(s), nil
	case "name":
		if s == "" && path[len(path)-1] != ']' {
			return "", nil // an optional name, or one that is reported as missing
		}
		return domainName(s)
	case "label":
		if s != "" && !isWord(s, 63, "-_.") {
			return "", hint{"is not a plain word", "up to 63 letters, digits, '-', '_' and '.'"}
		}
		return s, nil
	case "device":
		if s = strings.ToLower(s); !isID(s) {
			return "", hint{"is not the id of a device", "1 to 63 of a-z, 0-9 and -"}
		}
		return s, nil
	case "policy":
		return policy(s, path == "stranger")
	case "urlpath":
		if len(s) < 2 || s[0] != '/' || s[len(s)-1] == '/' || strings.ContainsAny(s, "?#{}% \t\r\n") {
			return "", hint{"is not the path of a URL", "a path that begins with / and does not end with it, such as /dns-query"}
		}
		return s, nil
	}
	return s, nil
}

// policy reads the name of a policy, or one of the words that may stand for it. A
// name one slip away from a word is refused: "refused" would be a policy that
// does not exist, and nobody would notice.
func policy(s string, serveToo bool) (string, error) {
	words := []string{Refuse}
	if serveToo {
		words = append(words, Serve)
	}
	for _, w := range words {
		if s == w {
			return s, nil
		}
		if distance(strings.ToLower(s), w) <= 1 {
			return "", hint{"is almost the word " + w, w + ", or the name of a policy that differs more"}
		}
	}
	if !isID(s) {
		return "", hint{"is neither " + strings.Join(words, " nor ") + " nor the name of a policy", strings.Join(words, ", ") + ", or 1 to 63 of a-z, 0-9 and -"}
	}
	return s, nil
}

// isID reports whether s can name a user, device or policy.
func isID(s string) bool { return s != "" && s == strings.ToLower(s) && isWord(s, 63, "-") }

func isWord(s string, longest int, also string) bool {
	for _, c := range s {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune(also, c)) {
			return false
		}
	}
	return len(s) <= longest
}

// domainName gives a domain name in lower case with the dot at the end.
func domainName(s string) (string, error) {
	const try = "a name such as example.net."
	_, ok := dns.IsDomainName(s)
	switch {
	case s == "":
		return "", hint{"is not a domain name", try}
	case strings.Contains(s, "://"):
		return "", hint{"is a URL", try}
	case strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r == 0x7f }):
		return "", hint{"has a space or control character in it", try}
	case strings.ContainsFunc(s, func(r rune) bool { return r > 0x7f }):
		return "", hint{"has letters beyond ASCII", "the form that begins with xn--"}
	case !ok:
		return "", hint{"is not a domain name", try}
	}
	return dns.CanonicalName(s), nil
}

func hostName(s string) error {
	if _, err := domainName(s); err != nil || !isWord(s, 253, "-_.") {
		return hint{"has no usable host", "an address, or a host name such as dns.example.net"}
	}
	return nil
}

// path makes a path absolute against the folder of the configuration file.
func (d *decoder) path(p string) string {
	if p == "" || filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(d.dir, p)
}

func readAtMost(r io.Reader, limit int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("it is longer than %d MiB", limit>>20)
	}
	return data, err
}

// bare leaves out the operation and path of an error about a file, which the
// fault names already.
func bare(err error) string {
	if pe := (*fs.PathError)(nil); errors.As(err, &pe) {
		return pe.Err.Error()
	}
	return err.Error()
}
