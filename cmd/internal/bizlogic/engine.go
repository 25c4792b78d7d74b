package bizlogic

import (
	"fmt"
	"io"

	"github.com/sluice-dns/sluice/resolver"
)

// Engine judges a text by the rule engine that resolvers serve by: for Options.Compile.
func Engine(_ string, text io.Reader) (Report, error) {
	rep, err := resolver.CheckList(text)
	if err != nil {
		return Report{}, fmt.Errorf("reading the text: %w", err)
	}
	out := Report{Title: rep.Title, Rules: rep.Rules, Skipped: rep.Skipped, NotList: rep.NotAList}
	for _, c := range rep.Complaints {
		out.Complaints = append(out.Complaints, Complaint{Line: int(c.Line), Text: c.Text, What: c.Reason})
	}
	switch {
	case out.NotList != "":
	case len(rep.World) > 0:
		w := rep.World[0]
		out.NotList = fmt.Sprintf("line %d, %q: %s", w.Line, w.Text, w.Reason)
	case rep.Truncated:
		out.NotList = fmt.Sprintf("it has more rules than can be served; %d were read", rep.Rules)
	}
	return out, nil
}
