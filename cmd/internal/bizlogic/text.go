package bizlogic

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/sluice-dns/sluice/resolver/clock"
)

// incoming is the folder in blobs of texts that are not whole yet.
const incoming = "incoming"

// A text is one on its way to becoming a blob, or a blob: a file, since a text may be too long for memory. What
// must be known of it is gathered while it is written. drop ends the use of a text, kept or not.
type text struct {
	dir   string // data folder
	file  *os.File
	blob  bool // the file is that of the blob
	most  int64
	bound string // what sets most, for people

	size    int64
	sum     hash.Hash
	content contentHash
	head    []byte // the first headSize bytes, to see what this is
}

const headSize = 64 << 10

// newText begins a text of at most so many bytes.
func (s *Service) newText(most int64, bound string) (*text, error) {
	dir := filepath.Join(s.opts.Dir, "blobs", incoming)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, &keepError{err}
	}
	f, err := os.CreateTemp(dir, ".text-*")
	if err != nil {
		return nil, &keepError{err}
	}
	return &text{dir: s.opts.Dir, file: f, most: most, bound: bound, sum: sha256.New(), content: newContentHash()}, nil
}

// openText opens a blob.
func (s *Service) openText(sum []byte) (*text, error) {
	f, err := os.Open(s.blobPath(sum))
	if err != nil {
		return nil, err
	}
	t := &text{dir: s.opts.Dir, file: f, blob: true, most: 1 << 62, sum: sha256.New(), content: newContentHash()}
	if _, err := io.Copy(gauge{t}, f); err != nil {
		t.drop()
		return nil, err
	}
	if !bytes.Equal(t.hash(), sum) {
		t.drop()
		return nil, fmt.Errorf("the text %x is damaged on disk; remove its file and fetch or upload it again", sum)
	}
	return t, nil
}

// clearIncoming removes what a process before has left half done.
func clearIncoming(dir string) error { return os.RemoveAll(filepath.Join(dir, "blobs", incoming)) }

// Write adds to a text; more than it may hold is an error.
func (t *text) Write(b []byte) (int, error) {
	if t.size+int64(len(b)) > t.most {
		return 0, fmt.Errorf("the text is longer than %d bytes (%s)", t.most, t.bound)
	}
	if _, err := t.file.Write(b); err != nil {
		return 0, &keepError{err}
	}
	return gauge{t}.Write(b)
}

// A keepError is that of our own disk, not of where a text comes from.
type keepError struct{ error }

func (e *keepError) Unwrap() error { return e.error }

// A gauge takes note of a text's bytes.
type gauge struct{ t *text }

func (g gauge) Write(b []byte) (int, error) {
	t := g.t
	t.size += int64(len(b))
	t.sum.Write(b)
	t.content.Write(b)
	if free := headSize - len(t.head); free > 0 {
		t.head = append(t.head, b[:min(len(b), free)]...)
	}
	return len(b), nil
}

// hash is the SHA-256 of what has been written.
func (t *text) hash() []byte { return t.sum.Sum(nil) }

// read returns a text from its beginning.
func (t *text) read() (io.Reader, error) {
	if _, err := t.file.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	return t.file, nil
}

// keep makes a text a blob, durably. One that is there already stays.
func (t *text) keep() error {
	if t.blob {
		return nil
	}
	path := blobPath(t.dir, t.hash())
	if fi, err := os.Stat(path); err == nil && fi.Size() == t.size {
		now := clock.Wall() // so that it is not forgotten before a record names it
		return os.Chtimes(path, now, now)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	if err := t.file.Sync(); err != nil {
		return err
	}
	if err := os.Rename(t.file.Name(), path); err != nil {
		return err
	}
	t.blob = true
	return syncDir(filepath.Dir(path))
}

// drop gives a text's file back, and removes it unless it was kept.
func (t *text) drop() {
	if t == nil {
		return
	}
	_ = t.file.Close() // synced where that matters
	if !t.blob {
		_ = os.Remove(t.file.Name())
	}
}

// putBlob keeps bytes by their SHA-256.
func (s *Service) putBlob(b []byte) error {
	t, err := s.newText(int64(len(b)), "")
	if err != nil {
		return err
	}
	defer t.drop()
	if _, err := t.Write(b); err != nil {
		return err
	}
	return t.keep()
}

// hasBlob reports whether bytes are kept.
func (s *Service) hasBlob(b []byte) bool {
	sum := sha256.Sum256(b)
	fi, err := os.Stat(s.blobPath(sum[:]))
	return err == nil && fi.Size() == int64(len(b))
}

// blobPath is where bytes of a SHA-256 are kept.
func (s *Service) blobPath(sum []byte) string { return blobPath(s.opts.Dir, sum) }

func blobPath(dir string, sum []byte) string {
	return fmt.Sprintf("%s/blobs/%02x/%x", dir, sum[:1], sum)
}

// hasText reports whether the text of a SHA-256 is kept, as far as can be said without reading it.
func hasText(dir string, sum []byte) bool {
	if len(sum) != sha256.Size {
		return false
	}
	fi, err := os.Stat(blobPath(dir, sum))
	return err == nil && fi.Mode().IsRegular()
}

// judge says whether a text can be a list that is used without being looked at by those it is used for. Only
// a few are compiled at a time, and of users' own one, so that what they write keeps no list of the catalogue waiting.
func (s *Service) judge(ctx context.Context, name string, own bool, t *text) (Report, error) {
	if err := looksLikeList(t.head); err != nil {
		return Report{}, err
	}
	report, err := s.compile(ctx, name, own, t)
	switch {
	case err != nil:
		return report, err
	case report.NotList != "":
		return report, errors.New(report.NotList)
	case report.Rules == 0:
		return report, errors.New("none of its lines is a usable rule")
	}
	return report, nil
}

// compile has a text compiled.
func (s *Service) compile(ctx context.Context, name string, own bool, t *text) (Report, error) {
	if own {
		select {
		case s.compilingOwn <- struct{}{}:
			defer func() { <-s.compilingOwn }()
		case <-ctx.Done():
			return Report{}, ctx.Err()
		}
	}
	select {
	case s.compiling <- struct{}{}:
		defer func() { <-s.compiling }()
	case <-ctx.Done():
		return Report{}, ctx.Err()
	}
	r, err := t.read()
	if err != nil {
		return Report{}, err
	}
	return s.opts.Compile(name, r)
}

// looksLikeList refuses what is plainly no list, whatever a lenient compiler might find in it. It is given the
// beginning of the text.
func looksLikeList(text []byte) error {
	head := bytes.ToLower(bytes.TrimSpace(bytes.TrimPrefix(text[:min(len(text), 1024)], []byte("\xef\xbb\xbf"))))
	if len(head) == 0 {
		return errors.New("the text is empty")
	}
	for _, tag := range []string{"<!doctype", "<html", "<head", "<body", "<?xml", "<script", "<!--"} {
		if bytes.HasPrefix(head, []byte(tag)) {
			return errors.New("this is a web page, not a list")
		}
	}
	if head[0] == '{' {
		return errors.New("this is JSON, not a list")
	}
	if head[0] == '[' && !bytes.HasPrefix(head, []byte("[adblock")) && bytes.ContainsAny(head[:min(len(head), 64)], `{"`) {
		return errors.New("this is JSON, not a list")
	}
	sample := text[:min(len(text), headSize)]
	if bytes.IndexByte(sample, 0) >= 0 {
		return errors.New("this is binary data, not a list")
	}
	bad := 0
	for rest := sample; len(rest) > 0; {
		r, n := utf8.DecodeRune(rest)
		if r == utf8.RuneError && n == 1 {
			bad++ // up to three more where the sample was cut within a character
		}
		rest = rest[n:]
	}
	if bad > 3+len(sample)/20 {
		return errors.New("this is binary data, not a list")
	}
	return nil
}

// A contentHash is the SHA-256 of a text's lines without blank ones, comments and line ends: two texts that
// differ in nothing else say the same.
type contentHash struct {
	sum   hash.Hash
	state contentState
}

type contentState uint8

const (
	atStart contentState = iota // of a line, after any white space
	inLine
	inComment
)

func newContentHash() contentHash { return contentHash{sum: sha256.New()} }

func (c *contentHash) Write(b []byte) {
	for len(b) > 0 {
		switch c.state {
		case atStart:
			// A byte-order mark is part of no line; nor does any rule begin with one of its bytes.
			if strings.IndexByte(" \t\r\n\xef\xbb\xbf", b[0]) >= 0 {
				b = b[1:]
				continue
			}
			if c.state = inLine; b[0] == '!' || b[0] == '#' || b[0] == ';' {
				c.state = inComment
			}
		case inLine, inComment:
			end := bytes.IndexAny(b, "\r\n")
			line := b
			if end >= 0 {
				line = b[:end]
			}
			if c.state == inLine {
				c.sum.Write(line)
			}
			if end < 0 {
				return
			}
			if c.state == inLine {
				c.sum.Write([]byte{'\n'})
			}
			c.state, b = atStart, b[end+1:]
		}
	}
}

// hash ends the last line and returns the checksum.
func (c *contentHash) hash() []byte {
	if c.state == inLine {
		c.sum.Write([]byte{'\n'})
	}
	c.state = atStart
	return c.sum.Sum(nil)
}
