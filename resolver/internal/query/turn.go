package query

import (
	"unsafe"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
)

// MaxTurns is how many questions one query may become by rewriting before it fails.
const MaxTurns = 8

// A Turn is how far a query has come: which question is being answered now and what goes in front of that
// answer. It is a value and travels with its Query from the inline path to the waiting one.
type Turn struct {
	// Stage is where the next step goes on.
	Stage Stage
	// Current is the question now, which rewriting may have changed from the one asked.
	Current Question
	// Aliases[:NumAliases] are the targets of CNAME records to put in front of the answer.
	Aliases    [MaxTurns]Alias
	NumAliases uint8
	// Flatten: the data of the last name is given to the asked name, without the aliases.
	Flatten bool
	// Verdict is what policy said of the latest question.
	Verdict Verdict
	// Exempt: policy zones have had their say.
	Exempt bool
	// Local: what answers the current question is local data.
	Local bool
	// Unknown are names of the answer of whose name servers a rule wants to know and nothing is known; Sought says
	// that the way to the present question's was looked for.
	Unknown []dnsname.Name
	Sought  bool
	// Edit is what is to be changed in the answer as it is written.
	Edit Edit
	// DNS64 is how far the making of AAAA records has come, and MaxTTL the most that they may be kept for, in
	// seconds (RFC 6147 section 5.1.7).
	DNS64  DNS64
	MaxTTL uint32
}

// An Edit is a set of changes to an answer on its way to a client. An edited answer is never Secure.
type Edit uint8

// The edits.
const (
	EditPrivate    Edit = 1 << iota // leave out records with private addresses (package rebinding)
	EditExcluded                    // leave out AAAA records that do not count (RFC 6147 section 5.1.4)
	EditSynthesise                  // make AAAA records of A records (package dns64)
)

// DNS64 is a state of the way from a question of type AAAA to one of type A.
type DNS64 uint8

// The states: no; the A records of the name are being asked for; there are none, so that the answer to the
// question of type AAAA will do.
const (
	DNS64Off DNS64 = iota
	DNS64Asking
	DNS64Failed
)

// Wanted is the type of the records that the client is to be given: that of Current, but for A records of which AAAA
// records are to be made.
func (t *Turn) Wanted() uint16 {
	if t.DNS64 == DNS64Asking {
		return dnswire.TypeAAAA
	}
	return t.Current.Type
}

// Alias goes on with target, behind a CNAME record with that TTL in seconds; it is false if there have been too
// many.
func (t *Turn) Alias(target dnsname.Name, ttl uint32) bool {
	if t.NumAliases == MaxTurns {
		return false
	}
	t.Aliases[t.NumAliases] = Alias{Target: target, TTL: ttl}
	t.NumAliases++
	t.Current.Name, t.Current.Type = target, t.Wanted() // of target there may be AAAA records
	t.Sought, t.DNS64 = false, DNS64Off
	return true
}

// An Alias is a CNAME record that policy made.
type Alias struct {
	Target dnsname.Name
	TTL    uint32
}

// A Stage is a point of the path at which a step may begin.
type Stage uint8

// The stages in their order.
const (
	StageStart    Stage = iota // nothing was done
	StageQuestion              // admitted and identified; policy judges the question
	StageData                  // local data, caches, fetch
	StageServers               // the name servers of Turn.Unknown are to be looked for, and then StageData again
)

// keepNames makes the names of a copied Query point into the copy instead of the worker's buffer.
func (q *Query) keepNames(from *Query) {
	own := func(n dnsname.Name) dnsname.Name {
		if len(n) > 0 && unsafe.StringData(string(n)) == &from.name[0] {
			return dnsname.Name(unsafe.String(&q.name[0], len(n)))
		}
		return n // policy's: shared and immutable
	}
	q.Question.Name = own(q.Question.Name)
	q.Turn.Current.Name = own(q.Turn.Current.Name)
}
