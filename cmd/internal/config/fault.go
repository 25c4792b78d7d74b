package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// A Fault is one thing wrong with a configuration file.
type Fault struct {
	File      string // as it was given to Load
	Line, Col int    // from 1
	Key       string // path of keys, "listen.udp[0]"; "syntax" or "file" where no key is at fault
	What      string
	Try       string // what may put it right
}

// String is "FILE:LINE:COL: KEY: WHAT; try: TRY", always one line.
func (f Fault) String() string {
	s := fmt.Sprintf("%s:%d:%d: %s: %s", f.File, f.Line, f.Col, f.Key, f.What)
	if f.Try != "" {
		s += "; try: " + f.Try
	}
	return oneLine.Replace(s)
}

// Error makes a Fault usable as an error.
func (f Fault) Error() string { return f.String() }

var oneLine = strings.NewReplacer("\n", " ", "\r", " ")

// Fault makes a fault of key at the place where the file has it, for those who
// find something wrong later: a limit against the machine, a port in use.
func (c *Sluice) Fault(key, what, try string) Fault {
	if c.source == nil {
		return Fault{File: "defaults", Line: 1, Col: 1, Key: key, What: what, Try: try}
	}
	return c.source.faultAt(key, what, try)
}

// maxFaults bounds what a hopeless file can make us say.
const maxFaults = 1000

func (d *decoder) add(f Fault) {
	if len(d.list) < maxFaults {
		d.list = append(d.list, f)
	}
}

// fault reports key at the place of its value, or of the nearest key around it
// that the file has.
func (d *decoder) fault(key, what, try string) { d.add(d.faultAt(key, what, try)) }

func (d *decoder) faultAt(key, what, try string) Fault {
	p, k := position{1, 1}, key
	for {
		if at, ok := d.at[k]; ok {
			p = at
			break
		}
		i := strings.LastIndexAny(k, ".[")
		if i < 0 {
			break
		}
		k = k[:i]
	}
	return Fault{File: d.file, Line: p.line, Col: p.col, Key: key, What: what, Try: try}
}

// has reports whether the file sets key.
func (d *decoder) has(key string) bool {
	_, ok := d.at[key]
	return ok
}

func (d *decoder) faults() []Fault {
	slices.SortStableFunc(d.list, func(a, b Fault) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Col, b.Col))
	})
	return d.list
}

// nearest returns the word of words that got was most likely meant to be, or "".
func nearest(got string, words []string) string {
	got = strings.ToLower(got)
	best, bestD := "", 3
	for _, w := range words {
		d := distance(got, w)
		if len(w) > 2 && strings.HasPrefix(got, w) || len(got) > 2 && strings.HasPrefix(w, got) {
			d = min(d, 2) // "warning" for "warn"
		}
		if d < bestD && d*2 <= len(w) {
			best, bestD = w, d
		}
	}
	return best
}

// distance counts the insertions, deletions, replacements and swaps of neighbours
// that make a into b. Words longer than any key are infinitely far.
func distance(a, b string) int {
	const longest = 48
	if len(a) > longest || len(b) > longest {
		return longest
	}
	var rows [3][longest + 1]int // this row and the two before it
	for j := range len(b) + 1 {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		row, up, up2 := &rows[i%3], &rows[(i+2)%3], &rows[(i+1)%3]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			same := 1
			if a[i-1] == b[j-1] {
				same = 0
			}
			row[j] = min(up[j]+1, row[j-1]+1, up[j-1]+same)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], up2[j-2]+1)
			}
		}
	}
	return rows[len(a)%3][len(b)]
}
