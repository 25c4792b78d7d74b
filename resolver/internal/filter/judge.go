package filter

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/filter/rulelist"
)

// A Judge answers for list files what the engine answers for queries: the work of "sluice match".
type Judge struct {
	m     *Matcher
	names []string
	texts [][]byte
	lines [][]int // where the lines of a text begin, found when first needed
}

// A ListFile is a list by the name that judgements give it.
type ListFile struct {
	Name string
	Text []byte
}

// NewJudge compiles list files. The reports are in the order of the files.
func NewJudge(files []ListFile) (*Judge, []rulelist.Report, error) {
	if len(files) > MaxLists {
		return nil, nil, fmt.Errorf("%d lists; at most %d can be judged together", len(files), MaxLists)
	}
	key := dnsname.Key{K0: 1, K1: 2} // nobody attacks his own lists
	b := NewBuilder(&key)
	j := &Judge{lines: make([][]int, len(files))}
	var reports []rulelist.Report
	for i, f := range files {
		rep, err := b.Add(i, bytes.NewReader(f.Text))
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", f.Name, err)
		}
		reports = append(reports, rep)
		j.names, j.texts = append(j.names, f.Name), append(j.texts, f.Text)
	}
	j.m = b.Build(nil)
	return j, reports, nil
}

// A Judgement is the verdict on one name in the form of "sluice match --json".
type Judgement struct {
	Name    string       `json:"name"`
	Type    string       `json:"type"`
	Verdict string       `json:"verdict"`
	Rule    string       `json:"rule,omitempty"`
	List    string       `json:"list,omitempty"`
	Line    uint32       `json:"line,omitempty"`
	Rewrite *JudgedValue `json:"rewrite,omitempty"`
	HostIPs []string     `json:"host_ips,omitempty"`
}

// A JudgedValue is what a rewritten name is answered with: either a name to resolve instead, or a response
// code with data of the asked type.
type JudgedValue struct {
	RCode   string   `json:"rcode,omitempty"`
	CNAME   string   `json:"cname,omitempty"`
	Answers []string `json:"answers,omitempty"`
	// Action is "drop" or "tcp-only" if that is all the answer there is.
	Action string `json:"action,omitempty"`
}

// Judge judges one name as text; q.Type is taken from typ.
func (j *Judge) Judge(name, typ string, q Query) (Judgement, error) {
	out := Judgement{Name: name, Type: strings.ToUpper(typ)}
	n, err := dnsname.Parse(name)
	if err != nil {
		return out, err
	}
	var ok bool
	if q.Type, ok = rulelist.TypeCode(out.Type); !ok {
		digits, is := strings.CutPrefix(out.Type, "TYPE")
		v, err := strconv.ParseUint(digits, 10, 16)
		if !is || err != nil {
			return out, fmt.Errorf("%q is not a record type; try A, AAAA, HTTPS or TYPE65", typ)
		}
		q.Type = uint16(v)
	}
	r := j.m.Match([]byte(n), nil, &q)
	out.Verdict = r.Verdict.String()
	if r.Verdict == None {
		return out, nil
	}
	out.List, out.Line = j.names[r.List], r.Line
	out.Rule = j.line(int(r.List), r.Line)
	for _, a := range j.m.HostAddrs(&r, q.Type) {
		out.HostIPs = append(out.HostIPs, a.String())
	}
	if r.Verdict == Rewritten {
		a := j.m.Rewrite(&r, q.Type)
		out.Rewrite = &JudgedValue{CNAME: a.CNAME, Answers: a.Data}
		out.Rewrite.Action = a.Action.String()
		if a.CNAME == "" && out.Rewrite.Action == "" {
			out.Rewrite.RCode = rulelist.RCodeName(a.RCode)
		}
	}
	return out, nil
}

// line returns a line of a list, trimmed.
func (j *Judge) line(list int, line uint32) string {
	text := j.texts[list]
	if j.lines[list] == nil {
		j.lines[list] = rulelist.LineStarts(text)
	}
	starts := j.lines[list]
	if line == 0 || int(line) > len(starts) {
		return ""
	}
	end := len(text)
	if int(line) < len(starts) {
		end = starts[line]
	}
	return strings.Trim(strings.TrimPrefix(string(text[starts[line-1]:end]), "\uFEFF"), " \t\r\n")
}
