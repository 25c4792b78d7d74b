package resolver

import "github.com/sluice-dns/sluice/resolver/internal/limits"

// The table of limits of a machine, for those who print it or start a resolver
// with it; see package limits for what each means.
type (
	LimitsTable   = limits.Table
	LimitsRow     = limits.Row
	LimitsName    = limits.Name
	LimitsOptions = limits.Options
	LimitsError   = limits.Error
	Machine       = limits.Machine
	LiveLimits    = limits.Live
)

var (
	// LimitsFor makes the table of limits for a machine.
	LimitsFor = limits.For

	// NewLiveLimits makes a table that can be changed while it is used.
	NewLiveLimits = limits.NewLive

	// LimitsByName finds a limit by the name operators use.
	LimitsByName = limits.ByName

	// LimitsNames are the limits that can be set.
	LimitsNames = limits.Names

	// LimitsSize writes bytes for people.
	LimitsSize = limits.Size

	// ReadMachine finds out what this process may use.
	ReadMachine = limits.ReadMachine
)
