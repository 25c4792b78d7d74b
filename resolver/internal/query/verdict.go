package query

import (
	"net/netip"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
)

// A Verdict is what policy says of a question or of an answer. It is a struct with a Kind, not an interface,
// because it is made for every query and must not allocate; a test feeds every kind to every switch.
type Verdict struct {
	Kind VerdictKind
	// Why, List, Line and Rule say what decided: the stage of the precedence table, the number of the
	// catalogue list, and the line in it (or in the user's rules).
	Why  Why
	List uint16
	Line uint32

	// Block says how a Blocked question is answered.
	Block Block
	// Target is the name a Redirect goes to.
	Target dnsname.Name
	// Synth is what a Synthesised answer holds; shared and immutable.
	Synth *Synth
}

// A VerdictKind is one of a closed set.
type VerdictKind uint8

// The kinds of verdicts.
const (
	Pass           VerdictKind = iota // nothing applies
	Allowed                           // an exception applies: the answer is not judged by what it overrides
	Blocked                           // answered by Block
	Redirected                        // the question is asked of Target and answered behind a CNAME
	Flattened                         // the question is asked of Target and answered as if it were the owner
	Synthesised                       // answered by Synth
	Dropped                           // not answered at all
	Refused                           // REFUSED with EDE 18 Prohibited
	Truncated                         // over UDP answered with TC=1 and nothing else (RPZ tcp-only)
	NumVerdictKind = iota
)

var verdictNames = [NumVerdictKind]string{"pass", "allowed", "blocked", "redirected", "flattened", "synthesised", "dropped", "refused", "truncated"}

func (k VerdictKind) String() string { return verdictNames[k] }

// A Why names the row of the precedence table that decided.
type Why uint8

// A BlockMode is how a blocked name is answered.
type BlockMode uint8

// The blocking modes. The zero value is the default.
const (
	BlockNull     BlockMode = iota // 0.0.0.0 and ::
	BlockNXDomain                  // NXDOMAIN
	BlockNoData                    // NOERROR without data
	BlockRefused                   // REFUSED
	BlockCustom                    // the user's own addresses
	NumBlockMode  = iota
)

// A Block is a blocking answer to be rendered.
type Block struct {
	Mode   BlockMode
	TTL    time.Duration
	IPv4   netip.Addr // for BlockCustom; the zero Addr means none of that family: NODATA
	IPv6   netip.Addr
	EDE    uint16 // 15 Blocked, 16 Censored, 17 Filtered
	Reason string // text of the EDE: the list's name
}

// A Synth is an answer made by policy or local data.
type Synth struct {
	RCode uint16
	TTL   uint32
	// RRs are records of the asked type to give with the question's name as owner; none with NOERROR is
	// NODATA.
	RRs []RRset
}
