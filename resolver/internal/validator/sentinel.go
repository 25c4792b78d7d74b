package validator

import (
	"strconv"
	"strings"

	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// sentinel answers whether a key is a trust anchor of the root, to those who ask by the labels of RFC 8509: a
// Secure answer to such a name becomes a failure if the key is not trusted, or is where that was the question.
func (v *Validator) sentinel(q *query.Question) error {
	if q.Type != dnswire.TypeA && q.Type != dnswire.TypeAAAA {
		return nil
	}
	label := q.Name.FirstLabel()
	digits, is := strings.CutPrefix(label, "root-key-sentinel-is-ta-")
	if !is {
		var not bool
		if digits, not = strings.CutPrefix(label, "root-key-sentinel-not-ta-"); !not {
			return nil
		}
	}
	tag, err := strconv.ParseUint(digits, 10, 16)
	if err != nil || len(digits) != 5 { // section 2: five digits, decimal
		return nil
	}
	if v.o.Anchors.RootTag(uint16(tag)) == is {
		return nil
	}
	return &Failure{Code: edeOther, Text: "root key sentinel (RFC 8509): the answer to the question in this name is no"}
}
