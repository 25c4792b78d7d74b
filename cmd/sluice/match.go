package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/sluice-dns/sluice/resolver"
)

func matchCommand() *cobra.Command {
	var (
		lists, tags []string
		by          resolver.JudgedBy
		ip          string
		asJSON      bool
	)
	c := &cobra.Command{
		Use:   "match --list FILE [--list FILE]… [--client NAME] [--ip ADDRESS] [--tag TAG]… [--json] [NAME [TYPE]]",
		Short: "Judge names by filter lists, by the engine that serves",
		Long: `Compile filter lists and judge one name by them, or each of the lines "NAME TYPE"
on standard input, by the engine that serves. Without TYPE it is A. All lists
apply at once, as they do for a user who has chosen them. A list may have 300 MiB,
as one of the service may if fetch.max_size is not set.

Exit status 2 if a list cannot be read or is no text, or a line is no question. The other lines
are judged all the same.`,
		Args: cobra.MaximumNArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			if ip != "" {
				var err error
				if by.Addr, err = netip.ParseAddr(ip); err != nil {
					return usagef("--ip: %q is not an address; try: 192.0.2.1", ip)
				}
			}
			by.Tags = tags
			judge, err := compileLists(lists, maxList, c.ErrOrStderr(), !asJSON)
			if err != nil {
				return err
			}
			m := &matching{judge: judge, by: by, json: asJSON, out: bufio.NewWriter(c.OutOrStdout())}
			if len(args) > 0 {
				err = m.line(strings.Join(args, " "))
			} else {
				err = m.lines(c.InOrStdin(), c.ErrOrStderr())
			}
			if err == nil || isUsage(err) {
				if ferr := m.out.Flush(); ferr != nil {
					return exit(exitFailure, ferr)
				}
			}
			return err
		},
	}
	f := c.Flags()
	f.StringArrayVar(&lists, "list", nil, "filter list, a `file`; can be repeated")
	f.StringVar(&by.Client, "client", "", "`name` of the device that asks, for rules with $client")
	f.StringVar(&ip, "ip", "", "`address` of the device that asks, for rules with $client")
	f.StringArrayVar(&tags, "tag", nil, "`tag` of the device that asks, for rules with $ctag; can be repeated")
	f.BoolVar(&asJSON, "json", false, "print one JSON object for each name")
	_ = c.MarkFlagRequired("list")
	return c
}

// maxList is the longest list, in bytes: the default of fetch.max_size.
const maxList = 300 << 20

// readList reads a list of at most so many bytes, from whatever the path names: it may never end.
func readList(path string, most int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	tooLong := fmt.Errorf("%s is longer than %d bytes; a list may have no more, so split it", path, most)
	if fi, err := f.Stat(); err == nil && fi.Size() > most {
		return nil, tooLong
	}
	text, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(text)) > most {
		err = tooLong
	}
	return text, err
}

// compileLists compiles list files of at most so many bytes. With remarks, what could not be used of them is said to
// errs.
func compileLists(paths []string, most int64, errs io.Writer, remarks bool) (*resolver.Judge, error) {
	var files []resolver.ListFile
	for _, path := range paths {
		text, err := readList(path, most)
		if err != nil {
			return nil, exit(exitUsage, fmt.Errorf("--list: %w", err))
		}
		if isBinary(text) {
			return nil, exit(exitUsage, fmt.Errorf("--list: %s is binary data, not a filter list; if it is compressed, unpack it, and if it is UTF-16, make it UTF-8", path))
		}
		files = append(files, resolver.ListFile{Name: filepath.Base(path), Text: text})
	}
	judge, reports, err := resolver.NewJudge(files)
	if err != nil {
		return nil, exit(exitUsage, fmt.Errorf("--list: %w", err))
	}
	for i, r := range reports {
		if r.NotAList != "" {
			// The service would refuse it. Somebody who asks what the lines of a web page mean is told all the same.
			fmt.Fprintf(errs, "%s: not a filter list: %s\n", paths[i], r.NotAList)
		}
		if !remarks {
			continue
		}
		for _, w := range r.World {
			fmt.Fprintf(errs, "%s:%d: %s: %s\n", paths[i], w.Line, printable(w.Text), printable(w.Reason))
		}
		for _, w := range r.Complaints {
			fmt.Fprintf(errs, "%s:%d: %s: %s\n", paths[i], w.Line, printable(w.Text), printable(w.Reason))
		}
		if more := r.Skipped - len(r.Complaints); more > 0 {
			fmt.Fprintf(errs, "%s: %d more lines were skipped\n", paths[i], more)
		}
	}
	return judge, nil
}

// isBinary reports whether a file plainly is no text, in whatever encoding: its beginning is full of what no text has. A
// few such characters are in many a list, and are for the compiler to complain of.
func isBinary(text []byte) bool {
	bad, sample := 0, text[:min(len(text), 64<<10)]
	for _, c := range sample {
		if c < ' ' && c != '\t' && c != '\n' && c != '\r' && c != '\f' {
			bad++
		}
	}
	return bad > 4+len(sample)/25 // of bytes at random a tenth
}

// printable makes what a list holds, which is anybody's, safe for a terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// A matching judges questions and prints the judgements.
type matching struct {
	judge *resolver.Judge
	by    resolver.JudgedBy
	json  bool
	out   *bufio.Writer
}

// maxQuestion is the longest line of standard input, in bytes: several times the longest name with every
// octet escaped.
const maxQuestion = 64 << 10

// lines judges what comes in. A line that is no question is named and the rest is judged.
func (m *matching) lines(in io.Reader, errs io.Writer) error {
	r := bufio.NewReaderSize(in, maxQuestion)
	bad := 0
	for n := 1; ; n++ {
		text, err := r.ReadSlice('\n')
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			return usagef("standard input:%d: longer than %d bytes, so it is no question", n, maxQuestion)
		case err != nil && err != io.EOF:
			return exit(exitFailure, fmt.Errorf("reading standard input: %w", err))
		}
		if line := strings.TrimSpace(string(text)); line != "" {
			switch lerr := m.line(line); {
			case isUsage(lerr):
				fmt.Fprintf(errs, "standard input:%d: %v\n", n, lerr)
				bad++
			case lerr != nil:
				return lerr
			}
		}
		if err == io.EOF {
			break
		}
		if r.Buffered() == 0 { // somebody may be waiting for the answers before he goes on
			if err := m.out.Flush(); err != nil {
				return exit(exitFailure, err)
			}
		}
	}
	if bad > 0 {
		return usagef("%d of the lines were no questions", bad)
	}
	return nil
}

// line judges one question, "NAME TYPE" or "NAME".
func (m *matching) line(text string) error {
	f := strings.Fields(text)
	if len(f) == 1 {
		f = append(f, "A")
	}
	if len(f) != 2 {
		return usagef("%q is no question; try: NAME TYPE", text)
	}
	j, err := m.judge.Judge(f[0], f[1], m.by)
	if err != nil {
		return exit(exitUsage, err)
	}
	if err := m.print(&j); err != nil {
		return exit(exitFailure, err)
	}
	return nil
}

func (m *matching) print(j *resolver.Judgement) error {
	if m.json {
		e := json.NewEncoder(m.out)
		e.SetEscapeHTML(false) // rules are full of & and <, and nobody puts this into a page
		return e.Encode(j)
	}
	fmt.Fprintf(m.out, "%s %s: %s", j.Name, j.Type, j.Verdict)
	if j.List != "" {
		fmt.Fprintf(m.out, " by %s:%d: %s", j.List, j.Line, printable(j.Rule))
	}
	switch {
	case j.Rewrite == nil:
	case j.Rewrite.Action == "drop":
		fmt.Fprint(m.out, "; not answered")
	case j.Rewrite.Action != "":
		fmt.Fprint(m.out, "; answered over TCP alone")
	case j.Rewrite.CNAME != "":
		fmt.Fprintf(m.out, "; answered as %s", j.Rewrite.CNAME)
	case len(j.Rewrite.Answers) > 0:
		fmt.Fprintf(m.out, "; answered with %s", strings.Join(j.Rewrite.Answers, ", "))
	default:
		fmt.Fprintf(m.out, "; answered with %s and no data", j.Rewrite.RCode)
	}
	if len(j.HostIPs) > 0 {
		fmt.Fprintf(m.out, "; the list says %s", strings.Join(j.HostIPs, ", "))
	}
	_, err := fmt.Fprintln(m.out)
	return err
}

// isUsage reports whether an error ends with the exit status of bad usage.
func isUsage(err error) bool {
	var s *statusError
	return errors.As(err, &s) && s.code == exitUsage
}
