package resolver

import (
	"fmt"

	"github.com/sluice-dns/sluice/resolver/internal/filter"
	"github.com/sluice-dns/sluice/resolver/internal/filter/rulelist"
)

// ListReport says what a rule compiler made of a text: usable rules, skipped lines, and why.
type ListReport = rulelist.Report

// CheckList reads a text of filtering rules as the engine does that serves, keeping nothing. The error says
// why the text as a whole cannot be a filter list: it is something else, or a rule of it blocks the world.
func CheckList(text []byte) (ListReport, error) {
	rep := CheckRules(text)
	switch {
	case rep.NotAList != "":
		return rep, fmt.Errorf("not a filter list: %s", rep.NotAList)
	case len(rep.World) > 0:
		w := rep.World[0]
		return rep, fmt.Errorf("line %d, %q: %s", w.Line, w.Text, w.Reason)
	}
	return rep, nil
}

// CheckRules is CheckList for a user's own rules, who may block the world if he likes. A text that makes the
// compiler panic is no list at all.
func CheckRules(text []byte) (rep ListReport) {
	defer func() {
		if v := recover(); v != nil {
			rep = ListReport{NotAList: fmt.Sprintf("the rule compiler panicked on it, please report it: %v", v)}
		}
	}()
	return rulelist.ParseString(string(text), func(*rulelist.Rule) {})
}

// What judges names by list files, for "sluice match".
type (
	Judge     = filter.Judge
	ListFile  = filter.ListFile
	Judgement = filter.Judgement
	JudgedBy  = filter.Query
)

// NewJudge compiles list files.
func NewJudge(files []ListFile) (*Judge, []ListReport, error) { return filter.NewJudge(files) }
