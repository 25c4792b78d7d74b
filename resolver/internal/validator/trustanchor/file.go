package trustanchor

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/replace"
	"github.com/sluice-dns/sluice/resolver/internal/validator/rrsig"
)

// The file is text, one line for the form, one for each zone with the date its keys were last seen, one for
// each of its keys with the seconds it was held, and the SHA-256 of all that stands before:
//
//	sluice trust anchors 1
//	zone . built-in 2026-11-30T06:00:00Z
//	key valid 0 BASE64-OF-THE-DNSKEY-RDATA
//	sha256 HEX
//
// It is made to be read by a person, not edited: the checksum finds accidents.
const (
	header = "sluice trust anchors 1\n"
	// maxState is more than maxZones with maxTracked keys of 4096 bits each can need.
	maxState = 32 << 20
)

// A savedPoint is a point as it was kept.
type savedPoint struct {
	source string
	seen   time.Time
	keys   []key
}

// save writes the state of points to path, as a whole or not at all.
func save(path string, points []*point) error {
	return replace.File(path, func(f *os.File) error {
		if _, err := f.Write(render(points)); err != nil {
			return err
		}
		return f.Sync()
	})
}

func render(points []*point) []byte {
	var b bytes.Buffer
	b.WriteString(header)
	for _, p := range points {
		if len(p.keys) == 0 && p.seenWall.IsZero() {
			continue
		}
		seen := "never"
		if !p.seenWall.IsZero() {
			seen = p.seenWall.UTC().Format(time.RFC3339)
		}
		fmt.Fprintf(&b, "zone %s %s %s\n", p.name, p.source, seen)
		for _, k := range p.keys {
			fmt.Fprintf(&b, "key %v %d %s\n", k.state, int64(k.held/time.Second), base64.StdEncoding.EncodeToString(k.rdata))
		}
	}
	sum := sha256.Sum256(b.Bytes())
	fmt.Fprintf(&b, "sha256 %s\n", hex.EncodeToString(sum[:]))
	return b.Bytes()
}

// load reads what save wrote. No file is no error. A file that is not one of ours is set aside under the name
// path.damaged and is an error.
func load(path string) (map[dnsname.Name]savedPoint, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() { // a pipe might never answer
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(f, maxState+1))
	f.Close()
	if err != nil {
		return nil, err
	}
	points, err := parseState(text)
	if err == nil {
		return points, nil
	}
	err = fmt.Errorf("%s is damaged: %w", path, err)
	if e := os.Rename(path, path+".damaged"); e != nil {
		return nil, errors.Join(err, e)
	}
	return nil, fmt.Errorf("%w; it was set aside as %s.damaged", err, path)
}

func parseState(text []byte) (map[dnsname.Name]savedPoint, error) {
	if len(text) > maxState {
		return nil, fmt.Errorf("more than %d bytes", maxState)
	}
	if !bytes.HasPrefix(text, []byte(header)) {
		return nil, fmt.Errorf("does not begin with %q", strings.TrimSpace(header))
	}
	at := bytes.LastIndex(text, []byte("\nsha256 ")) + 1
	sum := sha256.Sum256(text[:at])
	if string(text[at:]) != "sha256 "+hex.EncodeToString(sum[:])+"\n" {
		return nil, errors.New("the checksum does not fit")
	}
	points := make(map[dnsname.Name]savedPoint)
	var name dnsname.Name
	line := 1
	for sc := bufio.NewScanner(bytes.NewReader(text[len(header):at])); sc.Scan(); {
		line++
		w := strings.Split(sc.Text(), " ")
		var err error
		switch {
		case len(w) == 4 && w[0] == "zone":
			name, err = parseZone(points, w[1:])
		case len(w) == 4 && w[0] == "key" && name != "":
			p := points[name]
			p.keys, err = parseKey(p.keys, w[1:])
			points[name] = p
		default:
			err = errors.New("neither a zone nor a key of one")
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
	}
	return points, nil
}

func parseZone(points map[dnsname.Name]savedPoint, w []string) (dnsname.Name, error) {
	name, err := dnsname.Parse(w[0])
	if err != nil {
		return "", err
	}
	if _, twice := points[name]; twice {
		return "", fmt.Errorf("zone %v stands there twice", name)
	}
	p := savedPoint{source: w[1]}
	if w[2] != "never" {
		if p.seen, err = time.Parse(time.RFC3339, w[2]); err != nil {
			return "", err
		}
	}
	points[name] = p
	return name, nil
}

func parseKey(keys []key, w []string) ([]key, error) {
	st := slices.Index(stateNames[:], w[0])
	if st < 0 {
		return nil, fmt.Errorf("unknown state %q", w[0])
	}
	held, err := strconv.ParseUint(w[1], 10, 32)
	if err != nil {
		return nil, err
	}
	rdata, err := base64.StdEncoding.DecodeString(w[2])
	if err != nil {
		return nil, err
	}
	k := rrsig.ParseKey(rdata)
	switch {
	case k == nil || k.Err() != nil:
		return nil, errors.New("not a key that could be a trust anchor")
	case len(keys) == maxTracked:
		return nil, errors.New("too many keys")
	case slices.ContainsFunc(keys, func(o key) bool { return bytes.Equal(o.rdata, rdata) }):
		return nil, fmt.Errorf("key %d stands there twice", k.Tag)
	}
	return append(keys, key{rdata: rdata, state: state(st), held: time.Duration(held) * time.Second}), nil
}
