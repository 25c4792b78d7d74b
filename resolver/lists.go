package resolver

import (
	"fmt"
	"io"

	"github.com/sluice-dns/sluice/resolver/internal/filter"
	"github.com/sluice-dns/sluice/resolver/internal/filter/rulelist"
)

// ListReport says what a rule compiler made of a text: usable rules, skipped lines, and why.
type ListReport = rulelist.Report

// CheckList reads a text of filtering rules as the engine does that serves, keeping nothing: not even the text,
// which may be longer than memory. Whether a text that blocks the world may be used is for the caller: a user may
// like it, a list for many may not have it. A text that makes the compiler panic is no list at all. The error is
// the reader's.
func CheckList(text io.Reader) (rep ListReport, err error) {
	defer func() {
		if v := recover(); v != nil {
			rep = ListReport{NotAList: fmt.Sprintf("the rule compiler panicked on it, please report it: %v", v)}
		}
	}()
	return rulelist.Parse(text, rulelist.Options{}, func(*rulelist.Rule) {})
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
